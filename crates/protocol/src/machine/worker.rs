//! The contract of every protocol's worker: how its owner hands it tensors, and what it tells.

use alloc::vec::Vec;
use core::time::Duration;
use fanin_wire::{AbortReason, Generation, Operation};

use super::{Endpoint, Instant, Received, Tensor};

/// A shard of one worker of a job, as its owner knows it.
pub trait WorkerMachine: Endpoint<Event = WorkerEvent<<Self as WorkerMachine>::Tensor>> {
    /// The holder of a tensor's memory.
    type Tensor: Tensor;
    /// The plan by which it goes on after it was suspended.
    type Plan;

    /// Appends a tensor to the stream. Every worker of the job must submit alike tensors in the
    /// same order.
    ///
    /// # Panics
    /// When the tensor has more than `u32::MAX` elements: the owner splits those. And when one of
    /// int32 is broadcast: the owner says what bytes it has.
    fn submit(&mut self, tensor: Self::Tensor, operation: impl Into<Operation>);

    /// Stops sending and taking, because the machine that sums is gone. Returns what its protocol counts, by which a machine with an
    /// empty memory finds out who lacks which sum.
    fn suspend(&mut self) -> Vec<u32>;

    /// Goes on with a machine that sums and that has an empty memory. A worker that was aborted or
    /// abandoned stays so.
    fn resume(&mut self, now: Instant, plan: Self::Plan);

    /// Gives everything outstanding back, undefined in part, and ends the worker.
    fn abandon(&mut self) -> impl Iterator<Item = Self::Tensor>;

    /// The job's generation that it takes part in.
    fn generation(&self) -> Generation;

    /// Tensors submitted and not completed.
    fn outstanding(&self) -> usize;

    /// Counters since the start.
    fn statistics(&self) -> WorkerStatistics;

    /// Packets that brought it nearer to its end. While it moves, the job does: what only asks, or
    /// only says that somebody is there, does not move it.
    fn progress(&self) -> u64 {
        self.statistics().received.counted()
    }
}

/// When a tensor was on its way, by the driver's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorTimes {
    /// Its first packet was written.
    pub first_sent: Instant,
    /// Its first result came: all ranks had sent something of it.
    pub first_result: Instant,
    /// Its last result came.
    pub last_result: Instant,
    /// The part that its sum lacks.
    pub loss: Loss,
}

/// The part that the sum of a tensor lacks, with a protocol that may lose something (DLCP); all
/// zero elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loss {
    /// Contributions that its blocks would have if nothing had been lost.
    pub contributions: u64,
    /// The contributions that are not in their sums: the same on every rank that got all sums.
    pub lost: u64,
    /// Blocks that have nobody's contribution, and are zero: the same on every rank that got all
    /// sums.
    pub unsummed: u64,
    /// Blocks whose mean did not come here, and which hold this rank's own gradient.
    pub kept: u64,
    /// How often blocks were asked for again on their way here.
    pub rounds: u32,
}

/// Over parts of a tensor.
impl core::ops::AddAssign for Loss {
    fn add_assign(&mut self, other: Self) {
        self.contributions += other.contributions;
        self.lost += other.lost;
        self.unsummed += other.unsummed;
        self.kept += other.kept;
        self.rounds += other.rounds;
    }
}

/// An event that a worker tells its owner.
#[derive(Debug)]
pub enum WorkerEvent<T> {
    /// The tensor holds the sum, or what it held where the sum is another worker's. A tensor
    /// without elements was never sent, and has no times.
    Completed(T, Option<TensorTimes>),
    /// The job cannot go on. Outstanding tensors stay with the worker until it is abandoned.
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
    /// Of ATP and GOAT: parameters that met a long queue on their way, or whose fragments did.
    pub marked: u64,
    /// Smoothed round trip, from a packet to its result: the slowest worker's delay is in it.
    pub smoothed_rtt: Duration,
    /// Tensors completed.
    pub completed: u64,
    /// The part that the sums of those lack.
    pub loss: Loss,
}
