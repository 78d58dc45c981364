//! The network but for its actors: what an actor's [`Context`](super::Context) reaches.

use std::collections::BTreeMap;

use oorandom::Rand64;

use super::flow::{Flow, Notice};
use super::ids::{ActorId, FlowId, LinkId, NodeId, PortId, SimAddress};
use super::network::{Multipath, NetworkConfig};
use super::packets::{Content, Ecn, PacketId, Packets, Record, UDP_HEADER_BYTES, wire_bytes};
use super::pcap::Pcap;
use super::port::{Port, QueueConfigs};
use super::queue::{Buffer, Class, DROP_CLASSES, PRIORITIES};
use super::routing::{Anchor, Edge, Graph, Routes, flow_choice, mix};
use super::statistics::{DropReason, NodeStatistics};
use super::time::Time;
use super::topology::{NodeKind, Topology, TopologyError};
use super::trace::Trace;
use crate::agenda::Agenda;

/// Longer than any way through a standard topology.
const HOPS_MAX: u8 = 64;
const DIGEST_PRIME: u64 = 0x9e37_79b9_7f4a_7c15;

/// What happens. Small, because the agenda moves it about.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    /// The last bit of the first packet on a link is at the other end. One event for all packets on the link: the agenda
    /// stays as short as there are links.
    Lands { port: PortId, epoch: u32 },
    /// The same of a packet that travels alone: it was held back, or is another's twin.
    Arrives(PacketId),
    /// A port's link is free, and packets wait.
    Wakes(PortId),
    /// A packet is through its node's processing, or was sent by the node to itself.
    Processed(PacketId),
    /// An actor begins.
    Starts { actor: ActorId, incarnation: u16 },
    /// A timer of an actor.
    Timer { actor: ActorId, incarnation: u16, token: u64 },
    /// Somebody is told something.
    Notice { actor: ActorId, token: u64 },
    /// A flow's own timer.
    Flow(FlowId),
    /// One of the network's hooks.
    Hook(u32),
}

/// A node at work.
pub(crate) struct NodeState {
    pub(crate) up: bool,
    pub(crate) is_host: bool,
    /// Counts the times that it went down.
    epoch: u32,
    pub(crate) ports: Vec<PortId>,
    buffer: Buffer,
    /// In all its queues.
    buffered_bytes: u64,
    processing: Time,
    /// When its machines are through with all that came.
    processes_until: Time,
    /// Actors by port, sorted.
    pub(crate) listeners: Vec<(u16, ActorId)>,
    pub(crate) statistics: NodeStatistics,
}

/// An actor as the network knows it.
pub(crate) struct Seat {
    pub(crate) address: SimAddress,
    /// Timers of earlier ones do not fire.
    pub(crate) incarnation: u16,
}

/// See the module.
pub(crate) struct Core {
    pub(crate) now: Time,
    pub(crate) dice: Rand64,
    pub(crate) stopped: bool,
    /// Where machines write their trains.
    pub(crate) train: Vec<u8>,
    pub(crate) topology: Topology,
    pub(crate) config: NetworkConfig,
    pub(crate) agenda: Agenda<Time, Event>,
    pub(crate) packets: Packets,
    pub(crate) ports: Vec<Port>,
    pub(crate) queue_configs: Vec<QueueConfigs>,
    pub(crate) nodes: Vec<NodeState>,
    pub(crate) links_up: Vec<bool>,
    pub(crate) seats: Vec<Seat>,
    pub(crate) flows: Vec<Flow>,
    pub(crate) routes: Routes,
    pub(crate) pcap: Option<Pcap>,
    pub(crate) trace: Option<Trace>,
    pub(crate) packet_hops: u64,
    pub(crate) digest: u64,
}

/// Ports as routing looks at them.
struct Ports<'a> {
    ports: &'a [Port],
    nodes: &'a [NodeState],
}

impl Graph for Ports<'_> {
    fn nodes(&self) -> usize {
        self.nodes.len()
    }

    fn edges(&self, node: NodeId) -> impl Iterator<Item = Edge> {
        self.nodes[node.index()].ports.iter().map(|port| {
            let Port { peer, up, .. } = self.ports[port.index()];
            Edge { port: *port, to: peer, up }
        })
    }

    fn forwards(&self, node: NodeId) -> bool {
        !self.nodes[node.index()].is_host
    }
}

impl Core {
    pub(crate) fn new(topology: Topology, config: NetworkConfig) -> Result<Self, TopologyError> {
        topology.check()?;
        let mut nodes: Vec<_> = topology
            .nodes()
            .iter()
            .map(|node| NodeState {
                up: true,
                is_host: node.kind == NodeKind::Host,
                epoch: 0,
                ports: Vec::new(),
                buffer: node.config.buffer,
                buffered_bytes: 0,
                processing: node.config.processing.into(),
                processes_until: Time::ZERO,
                listeners: Vec::new(),
                statistics: NodeStatistics::default(),
            })
            .collect();
        // A node's ports share its configuration, and a standard topology has two or three in all.
        let mut queue_configs: Vec<QueueConfigs> = Vec::new();
        let mut of_node = vec![None; nodes.len()];
        let mut ports = Vec::with_capacity(2 * topology.links().len());
        for (at, link) in topology.links().iter().enumerate() {
            for (port, [node, peer]) in
                LinkId(at as u32).ports().into_iter().zip([link.ends, [link.ends[1], link.ends[0]]])
            {
                let mut intern = |queues: &QueueConfigs| {
                    let known = queue_configs.iter().rposition(|config| config == queues);
                    known.unwrap_or_else(|| {
                        queue_configs.push(*queues);
                        queue_configs.len() - 1
                    }) as u32
                };
                let config = match topology.port_queues.get(&port) {
                    Some(own) => intern(own),
                    None => *of_node[node.index()]
                        .get_or_insert_with(|| intern(&topology.get(node).config.queues)),
                };
                ports.push(Port::new(node, peer, &link.config, config));
                nodes[node.index()].ports.push(port);
            }
        }
        let anchors = nodes.iter().map(|node| match node.ports[..] {
            [nic] if node.is_host => {
                let switch = ports[nic.index()].peer;
                (!nodes[switch.index()].is_host).then_some(Anchor { switch, port: nic.opposite() })
            }
            _ => None,
        });
        let routes = Routes::new(anchors.collect());
        Ok(Self {
            now: Time::ZERO,
            dice: Rand64::new(u128::from(config.seed)),
            stopped: false,
            train: vec![0; 1 << 16],
            config,
            agenda: Agenda::new(),
            packets: Packets::default(),
            routes,
            links_up: vec![true; topology.links().len()],
            ports,
            queue_configs,
            nodes,
            seats: Vec::new(),
            flows: Vec::new(),
            pcap: None,
            trace: None,
            packet_hops: 0,
            digest: config.seed,
            topology,
        })
    }

    pub(crate) fn address(&self, actor: ActorId) -> SimAddress {
        self.seats[actor.0 as usize].address
    }

    pub(crate) fn wake_at(&mut self, actor: ActorId, at: Time, token: u64) {
        let incarnation = self.seats[actor.0 as usize].incarnation;
        self.agenda.at(at.max(self.now), Event::Timer { actor, incarnation, token });
    }

    pub(crate) fn notify(&mut self, Notice { actor, token }: Notice) {
        self.agenda.at(self.now, Event::Notice { actor, token });
    }

    /// Starts an actor, as soon as what happens now is over.
    pub(crate) fn start(&mut self, actor: ActorId) {
        let seat = &mut self.seats[actor.0 as usize];
        seat.incarnation = seat.incarnation.wrapping_add(1);
        let incarnation = seat.incarnation;
        self.agenda.at(self.now, Event::Starts { actor, incarnation });
    }

    pub(crate) fn send_bytes(&mut self, from: SimAddress, to: SimAddress, class: Class, payload: &[u8]) {
        let datagram_bytes = payload.len() as u32 + UDP_HEADER_BYTES;
        let record = outgoing(from, to, class, datagram_bytes, Content::Bytes, Ecn::Capable);
        let packet = self.packets.add(record);
        self.packets.fill(packet, payload);
        self.send(packet);
    }

    pub(crate) fn send_blank(
        &mut self,
        from: SimAddress,
        to: SimAddress,
        class: Class,
        bytes: u32,
        tag: u64,
    ) {
        let datagram_bytes = bytes.saturating_add(UDP_HEADER_BYTES);
        let record = outgoing(from, to, class, datagram_bytes, Content::Blank { tag }, Ecn::NotCapable);
        let packet = self.packets.add(record);
        self.send(packet);
    }

    /// A packet leaves the node that its sender lives on.
    pub(crate) fn send(&mut self, packet: PacketId) {
        let Record { from, to, datagram_bytes, class, .. } = *self.packets.get(packet);
        assert!(usize::from(class.priority) < PRIORITIES && usize::from(class.drop_class) < DROP_CLASSES);
        let node = &mut self.nodes[from.node as usize];
        node.statistics.sent_packets += 1;
        node.statistics.sent_bytes += u64::from(wire_bytes(datagram_bytes));
        if !node.up {
            self.drop_at_node(packet, NodeId(from.node), DropReason::NodeDown);
        } else if from.node == to.node {
            self.packets.get_mut(packet).epoch = node.epoch;
            self.agenda.at(self.now, Event::Processed(packet));
        } else {
            self.forward(packet, NodeId(from.node));
        }
    }

    /// The first packet on a link is at its end. Returns it, and when the next one will be.
    pub(crate) fn lands(&mut self, id: PortId, epoch: u32) -> (Option<PacketId>, Option<Time>) {
        let port = &mut self.ports[id.index()];
        if port.epoch != epoch {
            return (None, None); // All that was on it is lost.
        }
        let packet = port.flying;
        port.flying = self.packets.get(packet).next;
        if port.flying == PacketId::NONE {
            return (Some(packet), None);
        }
        (Some(packet), Some(self.packets.get(port.flying).arrives))
    }

    /// A packet is at the other end of its link. If it is for this node and needs no processing, it is to be delivered.
    pub(crate) fn arrives(&mut self, packet: PacketId) -> Option<PacketId> {
        let record = self.packets.get_mut(packet);
        let port = &mut self.ports[record.port.index()];
        if record.epoch != port.epoch {
            port.drops.count(DropReason::LinkDown);
            self.packets.release(packet);
            return None;
        }
        let here = port.peer;
        record.hops += 1;
        let (to, hops) = (record.to.node, record.hops);
        let mixed = self.now.0 ^ u64::from(packet.0) << 40 ^ u64::from(record.datagram_bytes) << 20;
        self.digest = (self.digest.rotate_left(5) ^ mixed).wrapping_mul(DIGEST_PRIME);
        let node = &mut self.nodes[here.index()];
        if to == here.0 {
            if node.processing == Time::ZERO {
                return Some(packet);
            }
            record.epoch = node.epoch;
            node.processes_until = node.processes_until.max(self.now) + node.processing;
            self.agenda.at(node.processes_until, Event::Processed(packet));
        } else if node.is_host {
            self.drop_at_node(packet, here, DropReason::NoRoute);
        } else if hops >= HOPS_MAX {
            self.drop_at_node(packet, here, DropReason::HopLimit);
        } else {
            node.statistics.forwarded_packets += 1;
            self.forward(packet, here);
        }
        None
    }

    /// A packet's processing is over. It is to be delivered, unless its node went down meanwhile.
    pub(crate) fn processed(&mut self, packet: PacketId) -> Option<PacketId> {
        let record = self.packets.get(packet);
        let node = NodeId(record.to.node);
        let state = &self.nodes[node.index()];
        if state.up && state.epoch == record.epoch {
            return Some(packet);
        }
        self.drop_at_node(packet, node, DropReason::NodeDown);
        None
    }

    pub(crate) fn drop_at_node(&mut self, packet: PacketId, node: NodeId, reason: DropReason) {
        self.nodes[node.index()].statistics.drops.count(reason);
        self.packets.release(packet);
    }

    fn forward(&mut self, packet: PacketId, here: NodeId) {
        let Record { from, to, .. } = *self.packets.get(packet);
        let destination = NodeId(to.node);
        if destination.index() >= self.nodes.len() {
            return self.drop_at_node(packet, here, DropReason::NoRoute);
        }
        if !self.routes.knows(destination) {
            self.routes.learn(destination, &Ports { ports: &self.ports, nodes: &self.nodes });
        }
        let port = self.routes.port(here, destination, |count| match self.config.multipath {
            Multipath::PerFlow => flow_choice(from, to, here, count),
            Multipath::PerPacket => self.dice.rand_range(0..u64::from(count)) as u32,
        });
        match port {
            Some(port) => self.enqueue(packet, port),
            None => self.drop_at_node(packet, here, DropReason::NoRoute),
        }
    }

    fn enqueue(&mut self, packet: PacketId, id: PortId) {
        let record = self.packets.get_mut(packet);
        let port = &mut self.ports[id.index()];
        let priority = usize::from(record.class.priority);
        let bytes = u64::from(record.wire_bytes());
        let refused = if !port.up {
            Some(DropReason::LinkDown)
        } else if record.datagram_bytes > port.mtu {
            Some(DropReason::TooLong)
        } else {
            None
        };
        if let Some(reason) = refused {
            port.drops.count(reason);
            return self.packets.release(packet);
        }
        record.port = id;
        record.epoch = port.epoch;
        if port.backlog == 0 && self.now >= port.busy_until {
            return self.transmit(packet, id);
        }
        let node = &mut self.nodes[port.node.index()];
        let config = &self.queue_configs[port.config as usize][priority];
        let queue = &mut port.queues[priority];
        let length = queue.bytes + bytes;
        let above = |threshold: Option<u64>| threshold.is_some_and(|threshold| length > threshold);
        let refused = if length > config.limit_bytes {
            Some(DropReason::Tail)
        } else if above(config.drop_thresholds_bytes[usize::from(record.class.drop_class)]) {
            Some(DropReason::Selective)
        } else if let Buffer::Shared { bytes: memory, alpha } = node.buffer {
            let free = memory.saturating_sub(node.buffered_bytes);
            (bytes > free || length as f64 > alpha * free as f64).then_some(DropReason::Buffer)
        } else {
            None
        };
        if let Some(reason) = refused {
            queue.drops.count(reason);
            return self.packets.release(packet);
        }
        let marks = above(config.ecn_threshold_bytes) && record.ecn != Ecn::NotCapable;
        if marks {
            queue.marked += 1;
            record.ecn = Ecn::Marked;
        }
        record.next = PacketId::NONE;
        let has_header = record.content == Content::Bytes;
        let last = std::mem::replace(&mut queue.tail, packet);
        queue.grow(self.now, bytes);
        node.buffered_bytes += bytes;
        node.statistics.buffer_bytes_max = node.statistics.buffer_bytes_max.max(node.buffered_bytes);
        if last == PacketId::NONE {
            queue.head = packet;
            port.backlog |= 1 << priority;
        } else {
            self.packets.get_mut(last).next = packet;
        }
        if !port.wakes {
            port.wakes = true;
            self.agenda.at(port.busy_until, Event::Wakes(id));
        }
        if port.traced
            && let Some(trace) = &mut self.trace
        {
            trace.queue(self.now, id, port.queue_bytes());
        }
        if marks && has_header {
            fanin_wire::GradientHeader::mark_ecn(self.packets.buffer_mut(packet));
        }
    }

    /// A port's link is free: its most urgent packet goes. Returns when to look again, if packets are left.
    pub(crate) fn wakes(&mut self, id: PortId) -> Option<Time> {
        let port = &self.ports[id.index()];
        // Otherwise it went down meanwhile.
        if port.backlog != 0 && port.busy_until <= self.now {
            let packet = self.dequeue(id);
            self.transmit(packet, id);
        }
        let port = &mut self.ports[id.index()];
        port.wakes = port.backlog != 0;
        port.wakes.then_some(port.busy_until)
    }

    /// # Panics
    /// When no packet waits.
    fn dequeue(&mut self, id: PortId) -> PacketId {
        let port = &mut self.ports[id.index()];
        let priority = port.backlog.trailing_zeros() as usize;
        let queue = &mut port.queues[priority];
        let packet = queue.head;
        let record = self.packets.get(packet);
        let bytes = u64::from(record.wire_bytes());
        queue.head = record.next;
        if queue.head == PacketId::NONE {
            queue.tail = PacketId::NONE;
            port.backlog &= !(1 << priority);
        }
        queue.shrink(self.now, bytes);
        self.nodes[port.node.index()].buffered_bytes -= bytes;
        if port.traced
            && let Some(trace) = &mut self.trace
        {
            trace.queue(self.now, id, port.queue_bytes());
        }
        packet
    }

    fn transmit(&mut self, packet: PacketId, id: PortId) {
        let port = &mut self.ports[id.index()];
        let bytes = self.packets.get(packet).wire_bytes();
        let takes = port.rate.take(bytes);
        port.busy_until = self.now + takes;
        port.busy = port.busy + takes;
        port.sent_packets += 1;
        port.sent_bytes += u64::from(bytes);
        self.packet_hops += 1;
        if port.captured
            && let Some(pcap) = &mut self.pcap
        {
            pcap.packet(self.now, &self.packets.view(packet), self.packets.get(packet));
        }
        if port.traced
            && let Some(trace) = &mut self.trace
        {
            trace.transmission(self.now, takes, id, &self.packets.view(packet), bytes);
        }
        let arrives = port.busy_until + port.delay;
        if let Some(faults) = &mut port.faults {
            let fate = faults.fate(&self.packets.view(packet));
            if fate.lost {
                port.drops.count(DropReason::Loss);
                return self.packets.release(packet);
            }
            if fate.duplicated {
                port.duplicated += 1;
                let twin = self.packets.copy(packet);
                self.agenda.at(arrives + fate.held_back, Event::Arrives(twin));
            }
            if fate.held_back > Time::ZERO {
                port.held_back += 1;
                return self.agenda.at(arrives + fate.held_back, Event::Arrives(packet));
            }
        }
        let record = self.packets.get_mut(packet);
        record.arrives = arrives;
        record.next = PacketId::NONE;
        let last = std::mem::replace(&mut port.flying_last, packet);
        if port.flying == PacketId::NONE {
            port.flying = packet;
            self.agenda.at(arrives, Event::Lands { port: id, epoch: port.epoch });
        } else {
            self.packets.get_mut(last).next = packet;
        }
    }

    /// What was delivered counts in the digest: its beginning, where headers are.
    pub(crate) fn mix_in(&mut self, payload: &[u8]) {
        for word in payload[..payload.len().min(64)].chunks(8) {
            let mut bytes = [0; 8];
            bytes[..word.len()].copy_from_slice(word);
            self.digest = (self.digest.rotate_left(5) ^ u64::from_le_bytes(bytes)).wrapping_mul(DIGEST_PRIME);
        }
    }

    pub(crate) fn set_link(&mut self, link: LinkId, up: bool) {
        self.links_up[link.index()] = up;
        self.refresh(link);
        self.routes.forget();
    }

    /// Returns whether that changed anything.
    pub(crate) fn set_node(&mut self, id: NodeId, up: bool) -> bool {
        let node = &mut self.nodes[id.index()];
        if node.up == up {
            return false;
        }
        node.up = up;
        if !up {
            node.epoch += 1;
            node.processes_until = Time::ZERO;
        }
        for port in node.ports.clone() {
            self.refresh(port.link());
        }
        self.routes.forget();
        true
    }

    /// Both ports of a link are up if it and both nodes are; what waits at one that goes down is lost.
    fn refresh(&mut self, link: LinkId) {
        let works = link.ports().into_iter().all(|port| self.nodes[self.ports[port.index()].node.index()].up);
        let up = self.links_up[link.index()] && works;
        for id in link.ports() {
            let was_up = std::mem::replace(&mut self.ports[id.index()].up, up);
            if was_up && !up {
                self.ports[id.index()].epoch += 1;
                // What was being sent is lost; the link is free when it comes back.
                self.ports[id.index()].busy_until = self.now;
                let mut flying = std::mem::replace(&mut self.ports[id.index()].flying, PacketId::NONE);
                while flying != PacketId::NONE {
                    self.ports[id.index()].drops.count(DropReason::LinkDown);
                    self.packets.release(flying);
                    flying = self.packets.get(flying).next;
                }
                while self.ports[id.index()].backlog != 0 {
                    let packet = self.dequeue(id);
                    self.ports[id.index()].drops.count(DropReason::LinkDown);
                    self.packets.release(packet);
                }
            }
        }
    }

    /// For everything that has its own dice.
    pub(crate) fn seed(&self, what: u64) -> u128 {
        u128::from(mix(self.config.seed)) << 64 | u128::from(mix(what))
    }

    pub(crate) fn names(&self) -> BTreeMap<PortId, String> {
        let name = |node: NodeId| self.topology.get(node).name.as_str();
        let ports = self.ports.iter().enumerate();
        ports
            .map(|(at, port)| (PortId(at as u32), format!("{} to {}", name(port.node), name(port.peer))))
            .collect()
    }
}

/// A packet that has not begun its way.
pub(crate) const fn outgoing(
    from: SimAddress,
    to: SimAddress,
    class: Class,
    datagram_bytes: u32,
    content: Content,
    ecn: Ecn,
) -> Record {
    Record {
        from,
        to,
        content,
        datagram_bytes,
        next: PacketId::NONE,
        arrives: Time::ZERO,
        port: PortId(0),
        epoch: 0,
        class,
        ecn,
        hops: 0,
    }
}
