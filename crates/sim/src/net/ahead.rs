//! The events of a span of time are known together when it begins. In a network that is larger than
//! the caches, each event would wait for memory alone. It would wait for its port, then for the
//! packet there, then for the next port of that packet. This module reads all that they are about
//! to need, in rounds of independent reads. A core has many such reads under way at once. It
//! affects nothing but time: the events read everything again.

use std::hint::black_box;

use super::core::{Core, Event};
use super::ids::PortId;
use super::packets::{Content, PacketId};
use super::queue::PRIORITIES;

/// With fewer events in a span the network is small, and already in the caches. Measured: with 16,
/// a network of 64 hosts is slower by some 7 %. With 128, a network of 1,024 hosts is slower by as
/// much, because many of its spans have fewer events.
const EVENTS_MIN: usize = 48;

/// The way of an event through memory.
#[derive(Debug)]
pub(crate) struct Look {
    port: PortId,
    /// The first packet on its link, or in its queues.
    packet: PacketId,
    lands: bool,
    /// It is where it is to be.
    ends: bool,
    /// The next port of the packet, or of the answer to it.
    next: Option<PortId>,
}

impl Core {
    /// A span has begun.
    pub(crate) fn look_ahead(&mut self) {
        if self.agenda.present().len() < EVENTS_MIN {
            return;
        }
        let mut looks = std::mem::take(&mut self.looks);
        looks.clear();
        let mut read = 0;
        for event in self.agenda.present() {
            let (Event::Lands { port: id, .. } | Event::Wakes { port: id, .. }) = *event else { continue };
            let port = &self.ports[id.index()];
            let lands = matches!(event, Event::Lands { .. });
            let waiting = || self.queues.get(id, port.backlog.trailing_zeros() as usize % PRIORITIES).head;
            let packet = if lands { port.flying } else { waiting() };
            if packet != PacketId::NONE {
                looks.push(Look { port: id, packet, lands, ends: false, next: (!lands).then_some(id) });
            }
        }
        for Look { packet, .. } in &looks {
            read ^= u64::from(self.packets.get(*packet).to.node);
        }
        for Look { port, packet, lands, ends, next } in &mut looks {
            let port = &self.ports[port.index()];
            if *lands {
                let record = self.packets.get(*packet);
                *ends = record.to.node == port.peer.0;
                if *ends {
                    *next = self.likely_port(port.peer, record.to, record.from);
                    read ^= self.nodes[port.peer.index()].buffered_bytes;
                } else {
                    *next = self.likely_port(port.peer, record.from, record.to);
                }
            } else {
                read ^= self.nodes[port.node.index()].buffered_bytes;
            }
        }
        for Look { packet, ends, next, .. } in &looks {
            let record = self.packets.get(*packet);
            if *ends && let Content::Segment { flow, is_ack, .. } = record.content {
                read ^= self.flows[flow.0 as usize].glance(is_ack);
            }
            if let Some(next) = next {
                let priority = usize::from(record.class.priority);
                read ^= self.ports[next.index()].sent_bytes ^ self.queues.get(*next, priority).bytes;
            }
        }
        for next in looks.iter().filter_map(|look| look.next) {
            let port = &self.ports[next.index()];
            if port.flying != PacketId::NONE {
                read ^= u64::from(self.packets.get(port.flying_last).next.0);
            }
        }
        black_box(read);
        self.looks = looks;
    }
}
