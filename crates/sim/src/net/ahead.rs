//! The events of a span of time are known together when it begins. In a network that is larger than the caches each would wait
//! for memory alone: for its port, then for the packet there, then for the port that this goes to. Here all that they are
//! about to need is read in rounds of reads that do not depend on each other, of which a core has many under way at once. Nothing
//! but time depends on it: what happens reads everything again.

use std::hint::black_box;

use super::core::{Core, Event};
use super::ids::PortId;
use super::packets::{Content, PacketId};
use super::queue::PRIORITIES;

/// With fewer events in a span the network is small, and in the caches as it is. Measured: with 16 a network of 64 hosts is slower by
/// some 7 %, with 128 one of 1,024 hosts by as much, many of whose spans have fewer.
const EVENTS_MIN: usize = 48;

/// One event's way through memory.
#[derive(Debug)]
pub(crate) struct Look {
    port: PortId,
    /// The first packet on its link, or in its queues.
    packet: PacketId,
    lands: bool,
    /// It is where it is to be.
    ends: bool,
    /// Where the packet, or the answer to it, goes next.
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
