//! What every protocol's worker tells its owner.

use core::time::Duration;
use fanin_wire::AbortReason;

use super::{Instant, Received};

/// When a tensor was on its way, by the driver's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorTimes {
    /// Its first packet was written.
    pub first_sent: Instant,
    /// Its last result came.
    pub last_result: Instant,
}

/// What a worker tells its owner.
#[derive(Debug)]
pub enum WorkerEvent<T> {
    /// The tensor holds the sum. A tensor without elements was never sent, and has no times.
    Completed(T, Option<TensorTimes>),
    /// The job cannot go on. What is outstanding stays with the worker until it is abandoned.
    Aborted(AbortReason),
}

/// Counters of one worker's shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerStatistics {
    /// Packets sent, retransmissions included.
    pub packets_sent: u64,
    /// Packets that came.
    pub received: Received,
    /// Packets sent again.
    pub retransmissions: u64,
    /// Smoothed round trip, from a packet to its result: the slowest worker's delay is in it.
    pub smoothed_rtt: Duration,
    /// Tensors completed.
    pub completed: u64,
}
