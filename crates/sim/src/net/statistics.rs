//! What is counted.

use super::time::Time;

/// Why a packet did not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DropReason {
    /// Its queue was full.
    Tail,
    /// Its queue was longer than the threshold of its drop class.
    Selective,
    /// Its queue had its share of the node's or the port's memory.
    Buffer,
    /// It was longer than the link's MTU: an error of who sent it.
    TooLong,
    /// The link's loss model took it.
    Loss,
    /// The link was down, or went down while the packet was queued or on it.
    LinkDown,
    /// The node was down.
    NodeDown,
    /// No way to its destination.
    NoRoute,
    /// It went in circles while routes changed.
    HopLimit,
    /// Nobody listens at its destination.
    NoListener,
    /// More waited for the cores of a node than one of its queues holds.
    Host,
}

impl DropReason {
    /// All reasons, in order: one counter each.
    pub const ALL: [Self; 11] = [
        Self::Tail,
        Self::Selective,
        Self::Buffer,
        Self::TooLong,
        Self::Loss,
        Self::LinkDown,
        Self::NodeDown,
        Self::NoRoute,
        Self::HopLimit,
        Self::NoListener,
        Self::Host,
    ];

    /// Its name in results.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tail => "tail",
            Self::Selective => "selective",
            Self::Buffer => "buffer",
            Self::TooLong => "too_long",
            Self::Loss => "loss",
            Self::LinkDown => "link_down",
            Self::NodeDown => "node_down",
            Self::NoRoute => "no_route",
            Self::HopLimit => "hop_limit",
            Self::NoListener => "no_listener",
            Self::Host => "host",
        }
    }
}

/// Packets dropped, by reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Drops([u64; DropReason::ALL.len()]);

impl Drops {
    pub(crate) fn count(&mut self, reason: DropReason) {
        self.0[reason as usize] += 1;
    }

    /// For this reason.
    #[must_use]
    pub const fn of(&self, reason: DropReason) -> u64 {
        self.0[reason as usize]
    }

    /// For any.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (sum, count) in self.0.iter_mut().zip(other.0) {
            *sum += count;
        }
    }
}

/// A queue of a port. Lengths are of packets that wait, not of the one that is being sent.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct QueueStatistics {
    /// Bytes that wait now.
    pub bytes: u64,
    /// Packets that wait now.
    pub packets: u64,
    /// Most bytes that ever waited.
    pub bytes_max: u64,
    /// Bytes that waited, in the mean over time.
    pub bytes_mean: f64,
    /// Packets that waited, in the mean over time.
    pub packets_mean: f64,
    /// Packets that it marked.
    pub marked: u64,
    /// Packets dropped here: tail, selective, buffer.
    pub drops: Drops,
}

/// A direction of a link.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct PortStatistics {
    /// Packets sent into the link.
    pub sent_packets: u64,
    /// Their bytes, with framing.
    pub sent_bytes: u64,
    /// Time that the link was busy.
    pub busy: Time,
    /// Packets that did not get through, queue drops included.
    pub drops: Drops,
    /// Packets that were marked.
    pub marked: u64,
    /// Packets that arrived twice.
    pub duplicated: u64,
    /// Packets that were held back.
    pub held_back: u64,
    /// Bytes that wait now, in all queues.
    pub queue_bytes: u64,
    /// Most bytes that ever waited in one queue.
    pub queue_bytes_max: u64,
}

/// Counts of one direction of a link since the beginning. None ever falls.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Passed {
    /// Time in which the link was busy; a packet that is being sent counts up to now.
    pub busy: Time,
    /// The sum over time of the bytes that waited, in byte nanoseconds.
    pub queued_byte_ns: f64,
    /// Packets that were marked.
    pub marked: u64,
    /// Packets that did not get through, queue drops included.
    pub dropped: u64,
}

/// A node. In this order: what every packet counts is together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(C)]
pub struct NodeStatistics {
    /// Packets that its machines and flows sent.
    pub sent_packets: u64,
    /// Their bytes, with framing.
    pub sent_bytes: u64,
    /// Packets that reached its machines and flows.
    pub received_packets: u64,
    /// Their bytes, with framing.
    pub received_bytes: u64,
    /// Packets for others that went through.
    pub forwarded_packets: u64,
    /// Most bytes that ever waited in all its queues together.
    pub buffer_bytes_max: u64,
    /// Packets that ended here.
    pub drops: Drops,
}
