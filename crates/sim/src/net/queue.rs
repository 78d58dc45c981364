//! The limits of a port's queues, and when they mark or drop.

/// Strict priorities of a port; 0 goes first.
pub const PRIORITIES: usize = 8;
/// Classes of packets by how willingly they are dropped; 0 is dropped last.
pub const DROP_CLASSES: usize = 8;

/// How a packet is treated on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Class {
    /// Which queue of a port: 0 goes first. Less than [`PRIORITIES`].
    pub priority: u8,
    /// Which of [`QueueConfig::drop_thresholds_bytes`] holds for it. Less than [`DROP_CLASSES`].
    pub drop_class: u8,
    /// It is not ECN-capable, although its sender understands marks: a queue that
    /// [`QueueConfig::drops_unmarkable`] drops it where others are marked (DLCP §4.2).
    pub unimportant: bool,
    /// It takes a path of its own, whatever others of its flow take.
    pub sprayed: bool,
}

impl Class {
    /// The first queue, dropped last, important, on its flow's path.
    pub const DEFAULT: Self = Self { priority: 0, drop_class: 0, unimportant: false, sprayed: false };
}

/// Which packet of a queue is the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Order {
    /// The one that came first.
    #[default]
    Arrival,
    /// pFabric's order (Alizadeh et al., SIGCOMM 2013, 4.1). It serves the flow whose packet says
    /// that least is left. Within that flow it serves the packet that came first, so none waits for
    /// ever behind its own. When the queue is full, the packet that says that most is left gives
    /// way, which may be the new one. Packets that say nothing are urgent.
    LeastRemaining,
}

/// One queue. All lengths are bytes on the link, framing included, of packets that wait; the
/// packet that is being sent has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// A packet that would make it longer is dropped at its tail.
    pub limit_bytes: u64,
    /// A packet that makes it longer than this is marked, if its sender understands the mark.
    pub ecn_threshold_bytes: Option<u64>,
    /// It is the length of all queues of the port that decides about marks, as PIAS has it.
    pub ecn_by_port: bool,
    /// A packet of a drop class that would make it longer than the class's threshold is dropped
    /// (selective dropping).
    pub drop_thresholds_bytes: [Option<u64>; DROP_CLASSES],
    /// A packet that cannot be marked is dropped where it would be marked, as RED with ECN does it.
    pub drops_unmarkable: bool,
    /// Which packet goes next.
    pub order: Order,
    /// Its packets are let in however full the node's [`Buffer`] is: [`Self::limit_bytes`] alone
    /// counts. To the other queues what waits here counts as what waits there.
    pub reserved: bool,
}

impl QueueConfig {
    /// A FIFO that drops at its tail, and nothing else.
    #[must_use]
    pub const fn tail_drop(limit_bytes: u64) -> Self {
        Self {
            limit_bytes,
            ecn_threshold_bytes: None,
            ecn_by_port: false,
            drop_thresholds_bytes: [None; DROP_CLASSES],
            drops_unmarkable: false,
            order: Order::Arrival,
            reserved: false,
        }
    }

    /// pFabric's queue.
    #[must_use]
    pub const fn least_remaining(limit_bytes: u64) -> Self {
        Self { order: Order::LeastRemaining, ..Self::tail_drop(limit_bytes) }
    }

    /// A port's queues for DLCP (§4.2). The first is reserved for signals (§4.1) and drops nothing
    /// before it is full. The others are for layers from front to back. In them unimportant packets
    /// are dropped above `threshold_bytes` times 1, 1 + `step`, .., 1 + 6 `step`, and important
    /// ones are marked.
    #[must_use]
    pub fn dlcp(limit_bytes: u64, threshold_bytes: u64, step: f64) -> [Self; PRIORITIES] {
        std::array::from_fn(|queue| match queue.checked_sub(1) {
            None => Self { reserved: true, ..Self::tail_drop(limit_bytes) },
            Some(nth) => {
                let threshold = threshold_bytes as f64 * (1.0 + nth as f64 * step);
                Self { drops_unmarkable: true, ..Self::tail_drop(limit_bytes).with_ecn(threshold as u64) }
            }
        })
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

/// The memory of a node's queues. It is no limit to one that is [`QueueConfig::reserved`].
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
    /// All queues of the node share one memory, with dynamic thresholds (Choudhury and Hahne,
    /// 1998): a queue may hold `alpha` times what is free at the moment. `n` queues that are always
    /// full then get `alpha / (1 + n * alpha)` of the memory each, and some always stays free for a
    /// queue that has just begun to fill.
    Shared {
        /// The memory.
        bytes: u64,
        /// Share of the free memory that one queue may have.
        alpha: f64,
    },
}
