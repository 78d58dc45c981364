//! A port's state: its queues, and the link that they are sent into.
//!
//! Every packet needs one cache line of a port, and another of a queue; the queues of one priority
//! lie together. In a large network most time goes into these lines.

use super::ids::{NodeId, PortId};
use super::impairment::Faults;
use super::least_remaining::LeastRemaining;
use super::packets::PacketId;
use super::queue::{PRIORITIES, QueueConfig};
use super::rate::Rate;
use super::statistics::{DropReason, Drops, QueueStatistics};
use super::time::Time;
use super::topology::LinkConfig;

/// A list through the slab; of a queue in another order than that of arrival the list is empty
/// ([`Seldom::least_remaining`]).
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(crate) struct Queue {
    pub(crate) head: PacketId,
    pub(crate) tail: PacketId,
    packets: u32,
    pub(crate) bytes: u64,
    bytes_max: u64,
    /// Sums over time of what waited, in picoseconds, up to `changed`.
    byte_time: f64,
    packet_time: f64,
    changed: Time,
    pub(crate) marked: u64,
}

impl Queue {
    const EMPTY: Self = Self {
        head: PacketId::NONE,
        tail: PacketId::NONE,
        packets: 0,
        bytes: 0,
        bytes_max: 0,
        byte_time: 0.0,
        packet_time: 0.0,
        changed: Time::ZERO,
        marked: 0,
    };

    /// Before its length changes.
    #[inline]
    fn account(&mut self, now: Time) {
        let passed = now.since(self.changed).0 as f64;
        self.byte_time += passed * self.bytes as f64;
        self.packet_time += passed * f64::from(self.packets);
        self.changed = now;
    }

    #[inline]
    pub(crate) fn grow(&mut self, now: Time, bytes: u64) {
        self.account(now);
        self.packets += 1;
        self.bytes += bytes;
        self.bytes_max = self.bytes_max.max(self.bytes);
    }

    #[inline]
    pub(crate) fn shrink(&mut self, now: Time, bytes: u64) {
        self.account(now);
        self.packets -= 1;
        self.bytes -= bytes;
    }

    /// The sum over time of the bytes that waited until now, in byte nanoseconds.
    pub(crate) fn byte_ns(&self, now: Time) -> f64 {
        let lately = now.since(self.changed).0 as f64 * self.bytes as f64;
        (self.byte_time + lately) / 1e3
    }

    pub(crate) fn statistics(&self, now: Time, drops: Drops) -> QueueStatistics {
        let mut until_now = self.clone();
        until_now.account(now);
        let mean = |sum: f64| if now == Time::ZERO { 0.0 } else { sum / now.0 as f64 };
        QueueStatistics {
            bytes: self.bytes,
            packets: self.packets.into(),
            bytes_max: self.bytes_max,
            bytes_mean: mean(until_now.byte_time),
            packets_mean: mean(until_now.packet_time),
            marked: self.marked,
            drops,
        }
    }
}

/// All queues of all ports.
#[derive(Debug)]
pub(crate) struct Queues([Vec<Queue>; PRIORITIES]);

impl Queues {
    pub(crate) fn new(ports: usize) -> Self {
        Self(std::array::from_fn(|_| vec![Queue::EMPTY; ports]))
    }

    #[inline]
    pub(crate) fn get(&self, port: PortId, priority: usize) -> &Queue {
        &self.0[priority][port.index()]
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, port: PortId, priority: usize) -> &mut Queue {
        &mut self.0[priority][port.index()]
    }

    /// The bytes that wait at a port.
    pub(crate) fn bytes(&self, port: PortId) -> u64 {
        self.0.iter().map(|queues| queues[port.index()].bytes).sum()
    }
}

/// The part of a port that every packet needs.
#[repr(align(64))]
pub(crate) struct Port {
    /// Whose it is.
    pub(crate) node: NodeId,
    /// The node at the other end of its link.
    pub(crate) peer: NodeId,
    /// Packets on the link, the first to arrive first. Packets that are held back are not among
    /// them.
    pub(crate) flying: PacketId,
    pub(crate) flying_last: PacketId,
    /// Counts the times that it went down.
    pub(crate) epoch: u32,
    /// Which of the network's queue configurations is its.
    pub(crate) config: u32,
    /// And which of its kinds of links.
    pub(crate) link: u32,
    /// Link and both nodes work.
    pub(crate) up: bool,
    /// An event will look at the queues when the link is free.
    pub(crate) wakes: bool,
    /// A bit for each queue that is not empty.
    pub(crate) backlog: u8,
    /// It is captured, traced or has faults: [`Seldom`] says which.
    pub(crate) special: bool,
    pub(crate) busy_until: Time,
    pub(crate) busy: Time,
    pub(crate) sent_packets: u64,
    pub(crate) sent_bytes: u64,
}

const _: () = assert!(size_of::<Port>() == 64 && size_of::<Queue>() == 64);

impl Port {
    pub(crate) const fn new(node: NodeId, peer: NodeId, config: u32, link: u32) -> Self {
        Self {
            node,
            peer,
            flying: PacketId::NONE,
            flying_last: PacketId::NONE,
            epoch: 0,
            config,
            link,
            up: true,
            wakes: false,
            backlog: 0,
            special: false,
            busy_until: Time::ZERO,
            busy: Time::ZERO,
            sent_packets: 0,
            sent_bytes: 0,
        }
    }
}

/// The properties that links of one kind share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) mtu: u32,
    pub(crate) delay: Time,
    /// If that is a whole number; else [`Seldom::rate`] keeps the fraction.
    pub(crate) picos_per_byte: Option<u64>,
}

impl Link {
    pub(crate) fn new(config: &LinkConfig) -> Self {
        let picos_per_byte = Rate::new(config.rate_bps).picos_per_byte();
        Self { mtu: config.mtu, delay: config.delay.into(), picos_per_byte }
    }
}

/// The part of a port that few packets need.
pub(crate) struct Seldom {
    pub(crate) rate: Rate,
    pub(crate) captured: bool,
    pub(crate) traced: bool,
    pub(crate) duplicated: u64,
    pub(crate) held_back: u64,
    /// Drops that are not a queue's.
    pub(crate) drops: Drops,
    pub(crate) faults: Option<Box<Faults>>,
    /// The drops of its queues; most never drop anything.
    of_queues: Option<Box<[Drops; PRIORITIES]>>,
    /// The packets that wait in queues that are not in the order of arrival.
    least_remaining: Option<Box<[LeastRemaining; PRIORITIES]>>,
}

impl Seldom {
    pub(crate) fn new(rate_bps: u64) -> Self {
        Self {
            rate: Rate::new(rate_bps),
            captured: false,
            traced: false,
            duplicated: 0,
            held_back: 0,
            drops: Drops::default(),
            faults: None,
            of_queues: None,
            least_remaining: None,
        }
    }

    pub(crate) fn count_at_queue(&mut self, priority: usize, reason: DropReason) {
        self.of_queues.get_or_insert_default()[priority].count(reason);
    }

    pub(crate) fn least_remaining(&mut self, priority: usize) -> &mut LeastRemaining {
        &mut self.least_remaining.get_or_insert_default()[priority]
    }

    pub(crate) fn queue_drops(&self, priority: usize) -> Drops {
        self.of_queues.as_ref().map_or_else(Drops::default, |drops| drops[priority])
    }
}

/// The queues of a port, by priority.
pub(crate) type QueueConfigs = [QueueConfig; PRIORITIES];
