//! Flows in the network: their packets, timers and notices.

use super::receiver::Receiver;
use super::sender::Piece;
use super::sending::Sending;
use super::{ConstantRateConfig, Flow, FlowKind, FlowStatistics, Notice, Tcp, TcpConfig, Transport};
use crate::net::core::{Core, Event, outgoing};
use crate::net::ids::{FlowId, NodeId, SimAddress};
use crate::net::packets::{Content, Ecn, PacketId, TCP_HEADER_BYTES, UDP_HEADER_BYTES, wire_bytes};
use crate::net::queue::Class;
use crate::net::rate::Rate;

impl Core {
    pub(crate) fn open_tcp(&mut self, config: TcpConfig) -> FlowId {
        assert!(config.segment_bytes > 0 && config.segment_bytes < 1 << 16, "a segment has bytes");
        assert!(config.duplicates > 0, "a duplicate of what was there once");
        let transport = config.transport;
        let tcp = Tcp {
            transport,
            segment_bytes: config.segment_bytes,
            sender: Sending::new(&config),
            receiver: Receiver::default(),
            timer: None,
        };
        let kind = FlowKind::Tcp(Box::new(tcp));
        self.add_flow([config.from, config.to], config.class, config.takes_marks(), kind)
    }

    pub(crate) fn start_constant_rate(&mut self, config: ConstantRateConfig) -> FlowId {
        assert!(config.rate_bps > 0, "a rate of nothing");
        assert!((UDP_HEADER_BYTES..1 << 16).contains(&config.datagram_bytes), "a packet that cannot be");
        let kind = FlowKind::ConstantRate {
            rate: Rate::new(config.rate_bps),
            datagram_bytes: config.datagram_bytes,
        };
        let flow = self.add_flow([config.from, config.to], config.class, config.ecn, kind);
        self.agenda.at(self.now, Event::Flow(flow));
        flow
    }

    fn add_flow(&mut self, nodes: [NodeId; 2], class: Class, ecn: bool, kind: FlowKind) -> FlowId {
        assert!(nodes[0] != nodes[1], "a flow from a node to itself");
        assert!(
            nodes.iter().all(|node| node.index() < self.nodes.len()),
            "a flow of a node that is not there"
        );
        let id = FlowId(self.flows.len() as u32);
        // For ECMP, captures and pFabric's queues: packets carry the flow's number.
        let ports = u32::from(u16::MAX - SimAddress::FLOW_PORTS) + 1;
        let port = SimAddress::FLOW_PORTS + (id.0 % ports) as u16;
        let ends = nodes.map(|node| SimAddress::new(node, port));
        self.flows.push(Flow {
            ends,
            class,
            ecn,
            stopped: false,
            statistics: FlowStatistics::default(),
            kind,
        });
        id
    }

    pub(crate) fn flow_statistics(&self, flow: FlowId) -> FlowStatistics {
        self.flows[flow.0 as usize].statistics
    }

    pub(crate) fn write(&mut self, id: FlowId, bytes: u64, arrived: Option<Notice>) {
        let flow = &mut self.flows[id.0 as usize];
        let FlowKind::Tcp(tcp) = &mut flow.kind else { panic!("flow {} is not a connection", id.0) };
        tcp.sender.write(bytes);
        let end = tcp.sender.end();
        if end > tcp.receiver.expected() {
            flow.statistics.completed = None;
            if let Some(notice) = arrived {
                tcp.receiver.wait(end, notice);
            }
            self.push(id);
        } else if let Some(notice) = arrived {
            self.notify(notice); // nothing, after everything has arrived
        }
    }

    pub(crate) fn fill(&mut self, flow: FlowId) {
        // Not so much that sequence numbers could wrap.
        self.write(flow, u64::MAX / 4, None);
    }

    pub(crate) fn stop_flow(&mut self, id: FlowId) {
        self.flows[id.0 as usize].stopped = true;
    }

    /// Sends all that a connection may send now, and sees to its timer.
    fn push(&mut self, id: FlowId) {
        loop {
            let flow = &mut self.flows[id.0 as usize];
            let FlowKind::Tcp(tcp) = &mut flow.kind else { return };
            if flow.stopped {
                return;
            }
            let Some(Piece { sequence, bytes }) = tcp.sender.poll(self.now, &mut flow.statistics) else {
                break;
            };
            let content = Content::Segment { flow: id, sequence, is_ack: false, echo: false };
            self.send_of_flow(id, 0, TCP_HEADER_BYTES + bytes, content);
        }
        let FlowKind::Tcp(tcp) = &mut self.flows[id.0 as usize].kind else { return };
        if let Some(deadline) = tcp.sender.deadline()
            && tcp.timer.is_none_or(|timer| deadline < timer)
        {
            tcp.timer = Some(deadline);
            self.agenda.at(deadline, Event::Flow(id));
        }
    }

    fn send_of_flow(&mut self, id: FlowId, end: usize, datagram_bytes: u32, content: Content) {
        let flow = &mut self.flows[id.0 as usize];
        flow.statistics.sent_packets += 1;
        // As RFC 3168 has it, acknowledgements are not marked.
        let is_ack = matches!(content, Content::Segment { is_ack: true, .. });
        let ecn = if flow.ecn && !is_ack { Ecn::Capable } else { Ecn::NotCapable };
        let (from, to) = (flow.ends[end], flow.ends[1 - end]);
        let mut record = outgoing(from, to, flow.class, datagram_bytes, content, ecn);
        if let (FlowKind::Tcp(tcp), Content::Segment { sequence, .. }) = (&flow.kind, content) {
            match tcp.transport {
                Transport::NewReno | Transport::Dctcp => {}
                Transport::Pias { .. } if is_ack => record.class.priority = 0,
                Transport::Pias { thresholds_bytes } => {
                    let passed = thresholds_bytes.iter().filter(|threshold| **threshold <= sequence);
                    record.class.priority = passed.count() as u8;
                }
                // An acknowledgement has nothing left behind it.
                Transport::Pfabric if is_ack => {}
                Transport::Pfabric => {
                    let segments = tcp.sender.remaining().div_ceil(tcp.segment_bytes.into());
                    record.remaining = u16::try_from(segments).unwrap_or(u16::MAX);
                }
            }
        }
        let packet = self.packets.add(record);
        self.send(packet);
    }

    /// A flow's timer.
    pub(crate) fn flow_due(&mut self, id: FlowId) {
        let flow = &mut self.flows[id.0 as usize];
        if flow.stopped {
            return;
        }
        match &mut flow.kind {
            FlowKind::ConstantRate { rate, datagram_bytes } => {
                let datagram_bytes = *datagram_bytes;
                let next = self.now + rate.take(wire_bytes(datagram_bytes));
                self.agenda.at(next, Event::Flow(id));
                self.send_of_flow(id, 0, datagram_bytes, Content::Datagram { flow: id });
            }
            FlowKind::Tcp(tcp) => {
                if tcp.timer.is_some_and(|timer| timer > self.now) {
                    return; // An earlier one took its place.
                }
                tcp.timer = None;
                tcp.sender.timeout(self.now, &mut flow.statistics);
                self.push(id);
            }
        }
    }

    /// A packet of a flow has reached its destination.
    pub(crate) fn flow_packet(&mut self, packet: PacketId) {
        let record = *self.packets.get(packet);
        self.packets.release(packet);
        match record.content {
            Content::Datagram { flow } => {
                let statistics = &mut self.flows[flow.0 as usize].statistics;
                statistics.delivered_bytes += u64::from(record.datagram_bytes - UDP_HEADER_BYTES);
            }
            Content::Segment { flow: id, sequence, is_ack, echo } => {
                let now = self.now;
                let flow = &mut self.flows[id.0 as usize];
                let FlowKind::Tcp(tcp) = &mut flow.kind else { return };
                if is_ack {
                    tcp.sender.acknowledged(now, sequence, echo, &mut flow.statistics);
                    return self.push(id);
                }
                let bytes = record.datagram_bytes - TCP_HEADER_BYTES;
                flow.statistics.delivered_bytes += tcp.receiver.segment(sequence, bytes);
                let expected = tcp.receiver.expected();
                if expected == tcp.sender.end() && flow.statistics.completed.is_none() {
                    flow.statistics.completed = Some(now);
                }
                while let Some(notice) = tcp.receiver.arrived() {
                    self.agenda.at(now, Event::Notice { actor: notice.actor, token: notice.token });
                }
                let echo = record.ecn == Ecn::Marked;
                let answer = tcp.sender.answer(sequence, bytes, expected);
                let content = Content::Segment { flow: id, sequence: answer, is_ack: true, echo };
                self.send_of_flow(id, 1, TCP_HEADER_BYTES, content);
            }
            Content::Bytes(_) | Content::Blank { .. } => {}
        }
    }
}
