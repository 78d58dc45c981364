//! pFabric's queue: who has least left goes first, who has most left gives way
//! (`Order::LeastRemaining`).

use std::collections::{BTreeMap, BTreeSet};

use super::core::Core;
use super::ids::{PortId, SimAddress};
use super::packets::{PacketId, Record};
use super::statistics::DropReason;

/// Sender and receiver: a switch takes these for a flow.
type Ends = (SimAddress, SimAddress);

/// The packets that wait in one queue, in both of the orders that it is asked for.
#[derive(Debug, Default)]
pub(crate) struct LeastRemaining {
    /// By what is left, and when it came.
    by_remaining: BTreeSet<(u16, u64)>,
    /// By flow, and when it came.
    by_flow: BTreeSet<(Ends, u64)>,
    /// By when it came; with what is needed to find it in the others.
    waiting: BTreeMap<u64, (PacketId, u16, Ends)>,
    /// How many have come.
    came: u64,
}

impl LeastRemaining {
    pub(crate) fn add(&mut self, id: PacketId, record: &Record) {
        let (at, ends) = (self.came, (record.from, record.to));
        self.came += 1;
        self.by_remaining.insert((record.remaining, at));
        self.by_flow.insert((ends, at));
        self.waiting.insert(at, (id, record.remaining, ends));
    }

    /// The next to go: of the flow with the least left the packet that came first.
    pub(crate) fn take_next(&mut self) -> Option<PacketId> {
        let (_, at) = *self.by_remaining.first()?;
        let (_, _, ends) = self.waiting[&at];
        let (_, first) = *self.by_flow.range((ends, 0)..).next().expect("the flow has a packet");
        Some(self.remove(first))
    }

    /// The one with the most left gives way to one with less; of several the one that came last.
    pub(crate) fn push_out(&mut self, less_than: u16) -> Option<PacketId> {
        let (most, at) = *self.by_remaining.last()?;
        (most > less_than).then(|| self.remove(at))
    }

    fn remove(&mut self, at: u64) -> PacketId {
        let (id, remaining, ends) = self.waiting.remove(&at).expect("it waits");
        self.by_remaining.remove(&(remaining, at));
        self.by_flow.remove(&(ends, at));
        id
    }
}

impl Core {
    /// In a full queue the packet with the most left is dropped for one with less. Returns whether
    /// there was such a packet.
    pub(crate) fn give_way(
        &mut self,
        less_than: u16,
        id: PortId,
        priority: usize,
        reason: DropReason,
    ) -> bool {
        let seldom = &mut self.seldom[id.index()];
        let Some(victim) = seldom.least_remaining(priority).push_out(less_than) else { return false };
        seldom.count_at_queue(priority, reason);
        self.leaves(victim, id, priority);
        self.packets.release(victim);
        true
    }

    /// # Panics
    /// When no packet waits.
    pub(crate) fn dequeue_least_remaining(&mut self, id: PortId, priority: usize) -> PacketId {
        let packet = self.seldom[id.index()].least_remaining(priority).take_next().expect("a packet waits");
        self.leaves(packet, id, priority);
        packet
    }

    /// Frees the memory that a packet held.
    fn leaves(&mut self, packet: PacketId, id: PortId, priority: usize) {
        let bytes = u64::from(self.packets.get(packet).wire_bytes());
        let port = &mut self.ports[id.index()];
        let queue = self.queues.get_mut(id, priority);
        queue.shrink(self.now, bytes);
        if queue.bytes == 0 {
            port.backlog &= !(1 << priority);
        }
        self.nodes[port.node.index()].buffered_bytes -= bytes;
        if port.special {
            self.trace_queue(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use oorandom::Rand64;

    use super::*;
    use crate::net::ids::NodeId;
    use crate::net::packets::{Content, Ecn};
    use crate::net::queue::Class;

    fn record(flow: u64, remaining: u16) -> Record {
        let [from, to] = [flow, flow + 1].map(|node| SimAddress::new(NodeId(node as u32), 7));
        let record = crate::net::core::outgoing(
            from,
            to,
            Class::DEFAULT,
            100,
            Content::Blank { tag: 0 },
            Ecn::NotCapable,
        );
        Record { remaining, ..record }
    }

    /// Against a list that is searched from end to end.
    #[test]
    fn each_packet_leaves_once_and_in_the_order_that_the_definition_gives() {
        for seed in 0..300 {
            let mut dice = Rand64::new(seed);
            let mut queue = LeastRemaining::default();
            let mut list: Vec<(PacketId, u64, u16)> = Vec::new();
            for id in 0..200 {
                let (flow, remaining) = (dice.rand_range(0..4), dice.rand_range(0..6) as u16);
                queue.add(PacketId(id), &record(flow, remaining));
                list.push((PacketId(id), flow, remaining));
                if dice.rand_float() < 0.5 {
                    // Among equals the first goes, and with it the first of its flow.
                    let least = list.iter().map(|waits| waits.2).min().unwrap();
                    let flow = list.iter().find(|waits| waits.2 == least).unwrap().1;
                    let at = list.iter().position(|waits| waits.1 == flow).unwrap();
                    assert_eq!(queue.take_next(), Some(list.remove(at).0), "seed {seed}");
                } else if dice.rand_float() < 0.5 {
                    let less_than = dice.rand_range(0..6) as u16;
                    let most = list.iter().map(|waits| waits.2).max().unwrap();
                    let victim = (most > less_than)
                        .then(|| list.remove(list.iter().rposition(|waits| waits.2 == most).unwrap()).0);
                    assert_eq!(queue.push_out(less_than), victim, "seed {seed}");
                }
            }
            let left: Vec<PacketId> = std::iter::from_fn(|| queue.take_next()).collect();
            assert_eq!(left.len(), list.len(), "seed {seed}");
            assert!(list.iter().all(|waits| left.contains(&waits.0)), "seed {seed}");
            assert_eq!(queue.push_out(0), None);
        }
    }
}
