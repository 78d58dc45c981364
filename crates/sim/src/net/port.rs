//! A port's state: its queues, and the link that they are sent into.

use super::ids::NodeId;
use super::impairment::Faults;
use super::packets::PacketId;
use super::queue::{PRIORITIES, QueueConfig};
use super::rate::Rate;
use super::statistics::{Drops, QueueStatistics};
use super::time::Time;
use super::topology::LinkConfig;

/// A list through the slab.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) head: PacketId,
    pub(crate) tail: PacketId,
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
    bytes_max: u64,
    /// Sums over time of what waited, up to `changed`.
    byte_picos: u128,
    packet_picos: u128,
    changed: Time,
    pub(crate) marked: u64,
    pub(crate) drops: Drops,
}

impl Queue {
    fn new() -> Self {
        Self {
            head: PacketId::NONE,
            tail: PacketId::NONE,
            packets: 0,
            bytes: 0,
            bytes_max: 0,
            byte_picos: 0,
            packet_picos: 0,
            changed: Time::ZERO,
            marked: 0,
            drops: Drops::default(),
        }
    }

    /// Before its length changes.
    fn account(&mut self, now: Time) {
        let passed = u128::from(now.since(self.changed).0);
        self.byte_picos += passed * u128::from(self.bytes);
        self.packet_picos += passed * u128::from(self.packets);
        self.changed = now;
    }

    pub(crate) fn grow(&mut self, now: Time, bytes: u64) {
        self.account(now);
        self.packets += 1;
        self.bytes += bytes;
        self.bytes_max = self.bytes_max.max(self.bytes);
    }

    pub(crate) fn shrink(&mut self, now: Time, bytes: u64) {
        self.account(now);
        self.packets -= 1;
        self.bytes -= bytes;
    }

    pub(crate) fn statistics(&self, now: Time) -> QueueStatistics {
        let passed = u128::from(now.since(self.changed).0);
        let mean = |sum: u128, length: u64| match now {
            Time::ZERO => 0.0,
            now => (sum + passed * u128::from(length)) as f64 / now.0 as f64,
        };
        QueueStatistics {
            bytes: self.bytes,
            packets: self.packets,
            bytes_max: self.bytes_max,
            bytes_mean: mean(self.byte_picos, self.bytes),
            packets_mean: mean(self.packet_picos, self.packets),
            marked: self.marked,
            drops: self.drops,
        }
    }
}

pub(crate) struct Port {
    /// Whose it is.
    pub(crate) node: NodeId,
    /// Where its link leads.
    pub(crate) peer: NodeId,
    /// Link and both nodes work.
    pub(crate) up: bool,
    /// An event will look at the queues when the link is free.
    pub(crate) wakes: bool,
    /// Packets on the link, the first to arrive first. Those that are held back are not among them.
    pub(crate) flying: PacketId,
    pub(crate) flying_last: PacketId,
    /// A bit for each queue that is not empty.
    pub(crate) backlog: u8,
    pub(crate) captured: bool,
    pub(crate) traced: bool,
    /// Counts the times that it went down.
    pub(crate) epoch: u32,
    pub(crate) mtu: u32,
    /// Which of the network's queue configurations is its.
    pub(crate) config: u32,
    pub(crate) delay: Time,
    pub(crate) rate: Rate,
    pub(crate) busy_until: Time,
    pub(crate) busy: Time,
    pub(crate) sent_packets: u64,
    pub(crate) sent_bytes: u64,
    pub(crate) duplicated: u64,
    pub(crate) held_back: u64,
    /// Drops that are not a queue's.
    pub(crate) drops: Drops,
    pub(crate) faults: Option<Box<Faults>>,
    pub(crate) queues: [Queue; PRIORITIES],
}

impl Port {
    pub(crate) fn new(node: NodeId, peer: NodeId, link: &LinkConfig, config: u32) -> Self {
        Self {
            node,
            peer,
            up: true,
            wakes: false,
            flying: PacketId::NONE,
            flying_last: PacketId::NONE,
            backlog: 0,
            captured: false,
            traced: false,
            epoch: 0,
            mtu: link.mtu,
            config,
            delay: link.delay.into(),
            rate: Rate::new(link.rate_bps),
            busy_until: Time::ZERO,
            busy: Time::ZERO,
            sent_packets: 0,
            sent_bytes: 0,
            duplicated: 0,
            held_back: 0,
            drops: Drops::default(),
            faults: None,
            queues: std::array::from_fn(|_| Queue::new()),
        }
    }

    pub(crate) fn queue_bytes(&self) -> u64 {
        self.queues.iter().map(|queue| queue.bytes).sum()
    }
}

/// The queues of a port, by priority.
pub(crate) type QueueConfigs = [QueueConfig; PRIORITIES];
