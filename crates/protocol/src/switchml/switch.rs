//! The switch: a table of jobs, each with its own pool of slots. A machine is one shard.

#[cfg(test)]
mod tests;

use fanin_wire::{AbortReason, JobId, Key, ShardId};

use super::config::{ConfigError, JobConfig, SwitchJob};
use super::slot_pool::SlotPool;
use crate::machine::{
    Endpoint, Instant, JobAborted, JobProgress, JobTable, Packet, Reason, Received, Summer, Transmit, Verdict,
};

/// A shard of a switch: every job's slots in it. `A` names a worker's address.
#[derive(Debug)]
pub struct Switch<A> {
    jobs: JobTable<SlotPool<A>>,
}

impl<A: Copy + PartialEq> Switch<A> {
    /// A shard without jobs.
    #[must_use]
    pub fn new(shard: ShardId) -> Self {
        Self { jobs: JobTable::new(shard) }
    }
}

impl<A: Copy + PartialEq> Endpoint for Switch<A> {
    type Address = A;
    type Event = JobAborted;

    fn receive(&mut self, now: Instant, from: &A, packet: &Packet<'_>) -> Result<Verdict, Reason> {
        self.jobs.receive(packet, |pool| pool.receive(now, from, packet))
    }

    fn count(&mut self, verdict: Verdict) -> Verdict {
        self.jobs.count(verdict)
    }

    fn handle_timeout(&mut self, _now: Instant) {}

    fn poll_transmit(&mut self, _now: Instant, train: &mut [u8]) -> Option<Transmit<'_, A>> {
        self.jobs.next_sender()?.poll_transmit(train)
    }

    fn poll_event(&mut self) -> Option<JobAborted> {
        self.jobs.poll_event()
    }

    /// Never: loss is found and mended by the workers alone (SwitchML §4.5), also above a rack
    /// (§7).
    fn poll_timeout(&self) -> Option<Instant> {
        None
    }
}

impl<A: Copy + PartialEq> Summer for Switch<A> {
    /// As all its shards are told of it: each puts its own number in.
    type Job = SwitchJob<A>;
    type Error = ConfigError;

    fn identity(job: &SwitchJob<A>) -> (JobId, Key) {
        (job.config.id, job.config.key)
    }

    fn add_job(&mut self, job: SwitchJob<A>) -> Result<(), ConfigError> {
        let config = JobConfig { shard: self.jobs.shard(), ..job.config };
        let job = SwitchJob { config, ..job }.check()?;
        self.jobs.insert(config.id, SlotPool::new(job));
        Ok(())
    }

    fn remove_job(&mut self, job: JobId) {
        self.jobs.remove(job);
    }

    fn abort_job(&mut self, job: JobId, reason: AbortReason) {
        self.jobs.with(job, |pool| pool.abort(reason));
    }

    fn job_progress(&self, job: JobId) -> Option<JobProgress> {
        self.jobs.get(job).map(SlotPool::progress)
    }

    fn received(&self) -> Received {
        self.jobs.received()
    }
}
