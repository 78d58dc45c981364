//! The server: a table of jobs. A machine is one shard.

use fanin_wire::{AbortReason, JobId, Key, ShardId};

mod addresses;
mod flow;
mod job;

use self::job::Job;
use super::clock::Clock;
use super::config::{ConfigError, JobConfig, ServerJob};
use crate::machine::{
    Endpoint, Instant, JobAborted, JobProgress, JobTable, Packet, Reason, Received, Summer, Transmit, Verdict,
};

/// A shard of a server: every job's flows in it. `A` names a worker's address.
#[derive(Debug)]
pub struct Server<A> {
    jobs: JobTable<Job<A>>,
    /// The job whose turn it is to send.
    turn: JobId,
    clock: Clock,
}

impl<A: Copy + PartialEq> Server<A> {
    /// A shard without jobs.
    #[must_use]
    pub fn new(shard: ShardId) -> Self {
        Self { jobs: JobTable::new(shard), turn: JobId(0), clock: Clock::default() }
    }
}

impl<A: Copy + PartialEq> Endpoint for Server<A> {
    type Address = A;
    type Event = JobAborted;

    fn receive(&mut self, now: Instant, from: &A, packet: &Packet<'_>) -> Result<Verdict, Reason> {
        let now = self.clock.read(now);
        self.jobs.receive(packet, |job| job.receive(now, *from, packet))
    }

    fn count(&mut self, verdict: Verdict) -> Verdict {
        self.jobs.count(verdict)
    }

    fn handle_timeout(&mut self, now: Instant) {
        let now = self.clock.read(now);
        self.jobs.with_each(|job| job.handle_timeout(now));
    }

    fn poll_transmit(&mut self, now: Instant, train: &mut [u8]) -> Option<Transmit<'_, A>> {
        let now = self.clock.read(now);
        for _ in 0..self.jobs.len() {
            let (id, job) = self.jobs.at_or_after(self.turn)?;
            self.turn = JobId(id.0.wrapping_add(1));
            if let Some(written) = job.write(now, train) {
                return self.jobs.get_mut(id)?.transmit(written);
            }
        }
        None
    }

    fn poll_event(&mut self) -> Option<JobAborted> {
        self.jobs.poll_event()
    }

    fn poll_timeout(&self) -> Option<Instant> {
        let due = self.jobs.iter().filter_map(Job::poll_timeout).min();
        due.map(|due| self.clock.due(due))
    }
}

impl<A: Copy + PartialEq> Summer for Server<A> {
    type Job = ServerJob;
    type Error = ConfigError;

    fn identity(job: &ServerJob) -> (JobId, Key) {
        (job.config.id, job.config.key)
    }

    fn add_job(&mut self, job: ServerJob) -> Result<(), ConfigError> {
        // As all its shards are told of it: each puts its own number in.
        let shard = self.jobs.shard();
        let resumes_at = job.resumes_at.get(usize::from(shard.0)).copied();
        let config = JobConfig { shard, resumes_at, ..job.config }.check()?;
        let job = ServerJob { config, ..job };
        if job.ranks.len() != usize::from(config.workers) {
            return Err(ConfigError::Ranks(job.ranks.len()));
        }
        self.jobs.insert(config.id, Job::new(job));
        Ok(())
    }

    fn remove_job(&mut self, job: JobId) {
        self.jobs.remove(job);
    }

    fn abort_job(&mut self, job: JobId, reason: AbortReason) {
        self.jobs.with(job, |job| job.abort(reason));
    }

    fn job_progress(&self, job: JobId) -> Option<JobProgress> {
        self.jobs.get(job).map(Job::progress)
    }

    fn received(&self) -> Received {
        self.jobs.received()
    }
}
