//! What a port's queues are allowed to hold, and when they mark or drop.

/// Strict priorities of a port; 0 goes first.
pub const PRIORITIES: usize = 8;
/// Classes of packets by how willingly they are dropped; 0 is dropped last.
pub const DROP_CLASSES: usize = 8;

/// How a packet is treated in queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Class {
    /// Which queue of a port: 0 goes first. Less than [`PRIORITIES`].
    pub priority: u8,
    /// Which of [`QueueConfig::drop_thresholds_bytes`] holds for it. Less than [`DROP_CLASSES`].
    pub drop_class: u8,
}

/// One queue: first in, first out. All lengths are bytes on the link, framing included, of packets that wait; the
/// packet that is being sent has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// A packet that would make it longer is dropped at its tail.
    pub limit_bytes: u64,
    /// A packet that makes it longer than this is marked, if its sender understands the mark.
    pub ecn_threshold_bytes: Option<u64>,
    /// A packet of a drop class that would make it longer than the class's threshold is dropped (selective dropping).
    pub drop_thresholds_bytes: [Option<u64>; DROP_CLASSES],
}

impl QueueConfig {
    /// A FIFO that drops at its tail, and nothing else.
    #[must_use]
    pub const fn tail_drop(limit_bytes: u64) -> Self {
        Self { limit_bytes, ecn_threshold_bytes: None, drop_thresholds_bytes: [None; DROP_CLASSES] }
    }

    /// The same, with an ECN threshold.
    #[must_use]
    pub const fn with_ecn(mut self, threshold_bytes: u64) -> Self {
        self.ecn_threshold_bytes = Some(threshold_bytes);
        self
    }

    /// The same, with a threshold for one drop class.
    ///
    /// # Panics
    /// When there is no such class.
    #[must_use]
    pub const fn with_drop_threshold(mut self, drop_class: u8, threshold_bytes: u64) -> Self {
        self.drop_thresholds_bytes[drop_class as usize] = Some(threshold_bytes);
        self
    }
}

/// Where a node's queues have their bytes from.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub enum Buffer {
    /// Each queue has its own: [`QueueConfig::limit_bytes`] alone counts.
    #[default]
    PerQueue,
    /// The queues of one port share as much, first come, first served.
    PerPort {
        /// The memory of each port.
        bytes: u64,
    },
    /// All queues of the node share one memory, with dynamic thresholds (Choudhury and Hahne, 1998): a queue may hold
    /// `alpha` times what is free at the moment. `n` queues that are always full then get `alpha / (1 + n * alpha)` of
    /// the memory each, and some always stays free for a queue that has just begun to fill.
    Shared {
        /// The memory.
        bytes: u64,
        /// Share of the free memory that one queue may have.
        alpha: f64,
    },
}
