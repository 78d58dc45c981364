//! The contract of every machine that sums for jobs: a switch's slots, a rack's aggregators, a
//! server's places.

use alloc::vec::Vec;
use core::time::Duration;
use fanin_wire::{AbortReason, JobId, Key};

use super::{Endpoint, Received};

/// A machine that sums for jobs, as its owner knows it.
pub trait Summer: Endpoint<Event = JobAborted> {
    /// The configuration of a job.
    type Job: Clone;
    /// Why it does not take a job in.
    type Error: core::error::Error;

    /// Which job that is, and the key of its packets.
    fn identity(job: &Self::Job) -> (JobId, Key);

    /// Takes a job in; one of the same id is forgotten. The memory of its slots, places or
    /// aggregators is taken here. Memory that only some tensors need (for contributions that are
    /// kept side by side) is taken with the first of them, and then kept.
    ///
    /// # Errors
    /// When a number is outside its limit, or the machine has as many jobs as it can hold.
    fn add_job(&mut self, job: Self::Job) -> Result<(), Self::Error>;

    /// Forgets a job. Its packets are unknown from now on.
    fn remove_job(&mut self, job: JobId);

    /// Tells the job's workers, now and whenever they send again, that it cannot go on.
    fn abort_job(&mut self, job: JobId, reason: AbortReason);

    /// How far a job is; `None` when there is no such job.
    fn job_progress(&self, job: JobId) -> Option<JobProgress>;

    /// Packets since the start.
    fn received(&self) -> Received;

    /// How its aggregators are, of a machine that has some.
    fn table(&self) -> Option<TableStatistics> {
        None
    }
}

/// How the aggregators of a switch are, over all jobs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableStatistics {
    /// All of them.
    pub aggregators: u32,
    /// Those that gather now.
    pub in_use: u32,
    /// Those that became complete.
    pub completed: u64,
    /// Those freed by the results of what they held.
    pub freed_by_parameters: u64,
    /// Those freed because what they held was sent again.
    pub freed_by_resend: u64,
    /// Those freed because they were left behind.
    pub freed_stale: u64,
}

impl core::ops::AddAssign for TableStatistics {
    /// Adds another shard's.
    fn add_assign(&mut self, other: Self) {
        self.aggregators += other.aggregators;
        self.in_use += other.in_use;
        self.completed += other.completed;
        self.freed_by_parameters += other.freed_by_parameters;
        self.freed_by_resend += other.freed_by_resend;
        self.freed_stale += other.freed_stale;
    }
}

/// An event for the owner of a machine that sums: the data path found that a job cannot go on, and
/// told its workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobAborted {
    /// The job.
    pub job: JobId,
    /// Why.
    pub reason: AbortReason,
}

/// How far a job is, at one machine or summed over several. A count that a protocol does not have
/// stays zero, or empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobProgress {
    /// Slots (SwitchML) or fragments (ATP) that gather contributions now.
    pub in_use: u32,
    /// For each rank, how many of them wait for it. The server does not see sums that still gather
    /// in an ATP switch on the way: they come when a worker sends again.
    pub waiting_for: Vec<u32>,
    /// For each rank, how much later than the first one its contributions came: the sum over all of
    /// them. ATP, whose switches mix contributions, does not know.
    pub lateness: Vec<Duration>,
    /// Sums completed, or handed back, since this machine took the job in.
    pub completed: u64,
    /// Contributions that came again.
    pub retransmitted: u64,
    /// DLCP: contributions that are not in the sums of blocks that were decided.
    pub lost: u64,
    /// ATP: packets that were added here.
    pub aggregations: u64,
    /// ATP: fragments that found no aggregator free.
    pub collisions: u64,
}

impl core::ops::AddAssign for JobProgress {
    fn add_assign(&mut self, other: Self) {
        self.in_use += other.in_use;
        add_each(&mut self.waiting_for, other.waiting_for);
        add_each(&mut self.lateness, other.lateness);
        self.completed += other.completed;
        self.retransmitted += other.retransmitted;
        self.lost += other.lost;
        self.aggregations += other.aggregations;
        self.collisions += other.collisions;
    }
}

fn add_each<T: Copy + Default + core::ops::AddAssign>(sums: &mut Vec<T>, others: Vec<T>) {
    sums.resize(sums.len().max(others.len()), T::default());
    for (sum, other) in sums.iter_mut().zip(others) {
        *sum += other;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn progress_is_summed_over_the_shards() {
        let shard = |number: u32| JobProgress {
            in_use: number,
            waiting_for: vec![0, number],
            lateness: vec![Duration::from_nanos(number.into()), Duration::ZERO],
            completed: 10 * u64::from(number),
            retransmitted: 100 * u64::from(number),
            lost: 5 * u64::from(number),
            aggregations: 1000 * u64::from(number),
            collisions: 10_000 * u64::from(number),
        };
        let mut sum = JobProgress::default();
        sum += shard(3);
        sum += shard(4);
        assert_eq!(sum, shard(7));
    }
}
