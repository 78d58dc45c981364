//! The cores of a node that handle packets, in one of its directions.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::core::{Core, Event};
use super::ids::NodeId;
use super::packets::{ETHERNET_HEADER_BYTES, PacketId, Packets};
use super::statistics::DropReason;
use super::time::Time;
use super::topology::Cost;

/// Which way packets go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Sends,
    Receives,
}

/// See the module. Packets are through in the order in which they came, whichever core takes which.
#[derive(Debug)]
pub(crate) struct Cores {
    cost: Cost,
    /// When each core has done what it was given.
    free: BinaryHeap<Reverse<Time>>,
    /// When the last packet is through.
    last: Time,
    head: PacketId,
    tail: PacketId,
    /// IP packets, and what there is room for.
    waiting_bytes: u64,
    limit_bytes: u64,
}

impl Cores {
    /// None where packets cost nothing.
    pub(crate) fn of(cost: Cost, limit_bytes: u64) -> Option<Box<Self>> {
        (!cost.is_nothing()).then(|| Box::new(Self::new(cost, limit_bytes)))
    }

    fn new(cost: Cost, limit_bytes: u64) -> Self {
        let free = (0..cost.cores.max(1)).map(|_| Reverse(Time::ZERO)).collect();
        let none = PacketId::NONE;
        Self { cost, free, last: Time::ZERO, head: none, tail: none, waiting_bytes: 0, limit_bytes }
    }

    /// Gives a packet of so many bytes to the core that is free first. Returns when it is through.
    fn take(&mut self, now: Time, bytes: u32) -> Time {
        let through = self.free.peek_mut().map_or(now, |mut core| {
            core.0 = core.0.max(now) + self.cost.of(bytes);
            core.0
        });
        self.last = self.last.max(through);
        self.last
    }

    /// Its node went down. Returns the first of the packets that are lost.
    pub(crate) fn forget(&mut self) -> PacketId {
        std::mem::replace(self, Self::new(self.cost, self.limit_bytes)).head
    }

    /// The packet that is through.
    fn pop(&mut self, packets: &Packets) -> PacketId {
        let packet = self.head;
        let record = packets.get(packet);
        self.waiting_bytes -= u64::from(record.datagram_bytes);
        self.head = record.next;
        if self.head == PacketId::NONE {
            self.tail = PacketId::NONE;
        }
        packet
    }
}

impl Core {
    /// A packet waits for one of a node's cores, and is handled there.
    pub(crate) fn handle(&mut self, packet: PacketId, node: NodeId, direction: Direction) {
        let datagram_bytes = self.packets.get(packet).datagram_bytes;
        let state = &mut self.nodes[node.index()];
        let epoch = state.epoch;
        let cores = state.cores(direction);
        let waiting_bytes = cores.waiting_bytes + u64::from(datagram_bytes);
        if waiting_bytes > cores.limit_bytes {
            return self.drop_at_node(packet, node, DropReason::Host);
        }
        cores.waiting_bytes = waiting_bytes;
        let through = cores.take(self.now, datagram_bytes.saturating_add(ETHERNET_HEADER_BYTES));
        let last = std::mem::replace(&mut cores.tail, packet);
        if last == PacketId::NONE {
            cores.head = packet;
            self.agenda.at(through, Event::Handled { node, epoch, direction });
        } else {
            let last = self.packets.get_mut(last);
            last.next = packet;
            last.next_at = through;
        }
        self.packets.get_mut(packet).next = PacketId::NONE;
    }

    /// A node's cores are through with their first packet. Returns it, and when they are with the
    /// next one.
    pub(crate) fn handled(
        &mut self,
        node: NodeId,
        epoch: u32,
        direction: Direction,
    ) -> (Option<PacketId>, Option<Time>) {
        let state = &mut self.nodes[node.index()];
        if state.epoch != epoch {
            return (None, None); // It went down meanwhile, and what waited is lost.
        }
        let packet = state.cores(direction).pop(&self.packets);
        let record = self.packets.get(packet);
        (Some(packet), (record.next != PacketId::NONE).then_some(record.next_at))
    }
}
