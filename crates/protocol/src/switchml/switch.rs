//! The switch: a table of jobs, each with its own pool of slots. A machine is one shard.

#[cfg(test)]
mod tests;

use alloc::collections::{BTreeMap, VecDeque};
use fanin_wire::{Abort, AbortReason, JobId, Key, Kind, Preamble, ShardId, SlotPacket};

use super::config::{ConfigError, JobConfig, SwitchJob};
use super::slot_pool::SlotPool;
use crate::machine::{
    Endpoint, Instant, JobAborted, JobProgress, Reason, Received, Summer, Transmit, Verdict,
};
use crate::transport::Turns;

/// A shard of a switch: every job's slots in it. `A` names a worker's address.
#[derive(Debug)]
pub struct Switch<A> {
    shard: ShardId,
    jobs: BTreeMap<JobId, SlotPool<A>>,
    turns: Turns,
    events: VecDeque<JobAborted>,
    received: Received,
}

impl<A: Copy + PartialEq> Switch<A> {
    /// A shard without jobs.
    #[must_use]
    pub fn new(shard: ShardId) -> Self {
        Self {
            shard,
            jobs: BTreeMap::new(),
            turns: Turns::default(),
            events: VecDeque::new(),
            received: Received::default(),
        }
    }

    fn receive(&mut self, now: Instant, from: &A, packet: &[u8]) -> Result<Verdict, Reason> {
        let preamble = Preamble::parse(packet)?;
        if preamble.shard != self.shard {
            return Err(Reason::OutOfRange);
        }
        let pool = self.jobs.get_mut(&preamble.job).ok_or(Reason::UnknownJob)?;
        let verdict = match preamble.kind {
            Kind::Update | Kind::Restore | Kind::Query => {
                // Not moved out: see `Worker::receive`.
                let parsed = SlotPacket::parse(preamble, packet);
                let parsed = parsed.as_ref().map_err(|error| *error)?;
                pool.authenticate(preamble.generation, packet)?;
                pool.receive(now, from, parsed)
            }
            Kind::Result if pool.is_rack() => {
                let parsed = SlotPacket::parse(preamble, packet)?;
                pool.authenticate(preamble.generation, packet)?;
                pool.take_result(*from, &parsed)
            }
            Kind::Abort if pool.is_rack() || pool.has_racks() => {
                let abort = Abort::parse(preamble, packet)?;
                pool.authenticate(preamble.generation, packet)?;
                pool.take_abort(*from, &abort)
            }
            Kind::Result | Kind::Abort | Kind::Gradient | Kind::Block | Kind::Signal | Kind::Planned => {
                return Err(Reason::Unexpected);
            }
        };
        self.turns.line_up(preamble.job, pool);
        if let Some(reason) = pool.take_new_abort() {
            self.events.push_back(JobAborted { job: preamble.job, reason });
        }
        verdict
    }
}

impl<A: Copy + PartialEq> Endpoint for Switch<A> {
    type Address = A;
    type Event = JobAborted;

    fn handle_packet(&mut self, now: Instant, from: A, packet: &[u8]) -> Verdict {
        let verdict = self.receive(now, &from, packet).unwrap_or_else(Verdict::Drop);
        self.received.count(verdict)
    }

    fn handle_timeout(&mut self, _now: Instant) {}

    fn poll_transmit(&mut self, _now: Instant, train: &mut [u8]) -> Option<Transmit<'_, A>> {
        self.turns.next(&mut self.jobs)?.poll_transmit(train)
    }

    fn poll_event(&mut self) -> Option<JobAborted> {
        self.events.pop_front()
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
        let config = JobConfig { shard: self.shard, ..job.config };
        let job = SwitchJob { config, ..job }.check()?;
        self.jobs.insert(config.id, SlotPool::new(job));
        self.turns.remove(config.id);
        Ok(())
    }

    fn remove_job(&mut self, job: JobId) {
        self.jobs.remove(&job);
        self.turns.remove(job);
    }

    fn abort_job(&mut self, job: JobId, reason: AbortReason) {
        if let Some(pool) = self.jobs.get_mut(&job) {
            pool.abort(reason);
            self.turns.line_up(job, pool);
        }
    }

    fn job_progress(&self, job: JobId) -> Option<JobProgress> {
        self.jobs.get(&job).map(SlotPool::progress)
    }

    fn received(&self) -> Received {
        self.received
    }
}
