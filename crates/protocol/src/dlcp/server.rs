//! The server: a table of jobs. A machine is one shard.

use alloc::collections::{BTreeMap, VecDeque};
use fanin_wire::{AbortReason, BlockPacket, JobId, Key, Kind, Preamble, ShardId, SignalPacket};

mod addresses;
mod flow;
mod job;

use self::job::Job;
use super::clock::Clock;
use super::config::{ConfigError, JobConfig, ServerJob};
use crate::machine::{
    Endpoint, Instant, JobAborted, JobProgress, Reason, Received, Summer, Transmit, Verdict,
};

/// A shard of a server: every job's flows in it. `A` names a worker's address.
#[derive(Debug)]
pub struct Server<A> {
    shard: ShardId,
    jobs: BTreeMap<JobId, Job<A>>,
    /// The job whose turn it is to send.
    turn: JobId,
    clock: Clock,
    events: VecDeque<JobAborted>,
    received: Received,
}

impl<A: Copy> Server<A> {
    /// A shard without jobs.
    #[must_use]
    pub fn new(shard: ShardId) -> Self {
        Self {
            shard,
            jobs: BTreeMap::new(),
            turn: JobId(0),
            clock: Clock::default(),
            events: VecDeque::new(),
            received: Received::default(),
        }
    }

    fn receive(&mut self, now: Instant, from: A, packet: &[u8]) -> Result<Verdict, Reason> {
        let preamble = Preamble::parse(packet)?;
        if preamble.shard != self.shard {
            return Err(Reason::OutOfRange);
        }
        let job = self.jobs.get_mut(&preamble.job).ok_or(Reason::UnknownJob)?;
        let verdict = match preamble.kind {
            Kind::Block => {
                let block = BlockPacket::parse(preamble, packet)?;
                job.authenticate(from, &preamble, packet)?;
                job.take_block(now, from, &block)
            }
            Kind::Signal => {
                let signal = SignalPacket::parse(preamble, packet)?;
                job.authenticate(from, &preamble, packet)?;
                job.take_signal(now, from, &signal)
            }
            _ => return Err(Reason::Unexpected),
        };
        if let Some(reason) = job.take_new_abort() {
            self.events.push_back(JobAborted { job: preamble.job, reason });
        }
        verdict
    }
}

impl<A: Copy> Endpoint for Server<A> {
    type Address = A;
    type Event = JobAborted;

    fn handle_packet(&mut self, now: Instant, from: A, packet: &[u8]) -> Verdict {
        let now = self.clock.read(now);
        let verdict = self.receive(now, from, packet).unwrap_or_else(Verdict::Drop);
        self.received.count(verdict)
    }

    fn handle_timeout(&mut self, now: Instant) {
        let now = self.clock.read(now);
        for (id, job) in &mut self.jobs {
            job.handle_timeout(now);
            if let Some(reason) = job.take_new_abort() {
                self.events.push_back(JobAborted { job: *id, reason });
            }
        }
    }

    fn poll_transmit(&mut self, now: Instant, train: &mut [u8]) -> Option<Transmit<'_, A>> {
        let now = self.clock.read(now);
        for _ in 0..self.jobs.len() {
            let next = self.jobs.range(self.turn..).next().or_else(|| self.jobs.iter().next());
            let id = *next?.0;
            self.turn = JobId(id.0.wrapping_add(1));
            let written = self.jobs.get_mut(&id)?.write(now, train);
            if let Some(written) = written {
                return self.jobs.get_mut(&id)?.transmit(written);
            }
        }
        None
    }

    fn poll_event(&mut self) -> Option<JobAborted> {
        self.events.pop_front()
    }

    fn poll_timeout(&self) -> Option<Instant> {
        let due = self.jobs.values().filter_map(Job::poll_timeout).min();
        due.map(|due| self.clock.due(due))
    }
}

impl<A: Copy> Summer for Server<A> {
    type Job = ServerJob;
    type Error = ConfigError;

    fn identity(job: &ServerJob) -> (JobId, Key) {
        (job.config.id, job.config.key)
    }

    fn add_job(&mut self, job: ServerJob) -> Result<(), ConfigError> {
        // As all its shards are told of it: each puts its own number in.
        let config = JobConfig { shard: self.shard, ..job.config }.check()?;
        let job = ServerJob { config, ..job };
        if job.ranks.len() != usize::from(config.workers) {
            return Err(ConfigError::Ranks(job.ranks.len()));
        }
        self.jobs.insert(config.id, Job::new(job));
        Ok(())
    }

    fn remove_job(&mut self, job: JobId) {
        self.jobs.remove(&job);
    }

    fn abort_job(&mut self, job: JobId, reason: AbortReason) {
        if let Some(job) = self.jobs.get_mut(&job) {
            job.abort(reason);
        }
    }

    fn job_progress(&self, job: JobId) -> Option<JobProgress> {
        self.jobs.get(&job).map(Job::progress)
    }

    fn received(&self) -> Received {
        self.received
    }
}
