//! The parameter server: it aggregates whatever the switches did not, and answers with the parameters (ATP §3.6).

mod exact_sum;
mod fragment;
mod job;
mod tree;

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use fanin_wire::{AbortReason, Directions, Generation, GradientPacket, JobId, Kind, Preamble, ShardId};

use self::job::Job;
use super::{ATP_JOBS_MAX, AtpConfigError, AtpJobConfig};
use crate::machine::{
    Endpoint, Instant, JobAborted, JobProgress, Reason, Received, Summer, Transmit, Verdict,
};
use crate::transport::Turns;

/// A job as its server is told of it.
#[derive(Clone, Debug)]
pub struct ServerJob {
    /// The same as at the workers.
    pub config: AtpJobConfig,
    /// What each worker sends its fragments with, by rank.
    pub workers: Vec<Directions>,
    /// The level that packets have when they come here: one more than that of the last switch on their way. Directions of this
    /// level and above, with one bit each, tell the server's own children apart where it has several.
    pub level: u8,
    /// Whether the job is under way: the server lost its memory, and workers hand back what they have.
    pub restored: bool,
}

/// How far a job is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AtpServerProgress {
    /// Fragments whose parameters were sent, or handed back.
    pub completed: u64,
    /// The earliest sequence number that is not aggregated: a worker that starts again goes on there (ATP §A.3).
    pub earliest: u64,
    /// Packets that were added here.
    pub aggregations: u64,
    /// Those of them that were sums of several workers, but not of all.
    pub partial: u64,
    /// Those of them that were the whole sum.
    pub complete: u64,
    /// Packets that brought nothing new.
    pub duplicates: u64,
    /// Fragments whose sum saturated.
    pub overflows: u64,
    /// Requests for original values, or for parameters that the server lost.
    pub requests: u64,
    /// Fragments of which a packet collided at a switch.
    pub collisions: u64,
    /// Places that were moved to another aggregator for that.
    pub rehashes: u64,
    /// Fragments that were told to use a factor of their own (§B.3).
    pub dynamic_factors: u64,
    /// Bytes that came, without those of IP and below.
    pub bytes_received: u64,
}

/// A parameter server of any number of jobs. `A` names a peer's address.
#[derive(Debug)]
pub struct AtpServer<A> {
    jobs: BTreeMap<JobId, Job<A>>,
    turns: Turns,
    events: VecDeque<JobAborted>,
    received: Received,
}

impl<A: Copy + PartialEq> Default for AtpServer<A> {
    fn default() -> Self {
        Self::new()
    }
}

impl<A: Copy + PartialEq> AtpServer<A> {
    /// A server without jobs.
    #[must_use]
    pub fn new() -> Self {
        Self {
            jobs: BTreeMap::new(),
            turns: Turns::default(),
            events: VecDeque::new(),
            received: Received::default(),
        }
    }

    /// Sets the job up again after a worker moved (ATP §A.3): a new generation, and everybody's new directions. What the
    /// server has aggregated stays. Returns the earliest sequence number that it has not; `None` when it has no such job.
    ///
    /// A new generation, because packets with the old fan-in degrees must not meet those with the new in a switch: it would
    /// take a rack for complete that is not.
    ///
    /// # Errors
    /// When the directions do not form a tree of as many workers as the job has; the job is then as before.
    pub fn set_up_again(
        &mut self,
        job: JobId,
        generation: Generation,
        workers: &[Directions],
        level: u8,
    ) -> Result<Option<u64>, AtpConfigError> {
        self.jobs.get_mut(&job).map(|job| job.set_up_again(generation, workers, level)).transpose()
    }

    /// How far a job is.
    #[must_use]
    pub fn progress(&self, job: JobId) -> Option<AtpServerProgress> {
        self.jobs.get(&job).map(Job::progress)
    }

    fn receive(&mut self, now: Instant, from: A, bytes: &[u8]) -> Result<Verdict, Reason> {
        let preamble = Preamble::parse(bytes)?;
        if preamble.shard != ShardId(0) {
            return Err(Reason::OutOfRange);
        }
        let job = self.jobs.get_mut(&preamble.job).ok_or(Reason::UnknownJob)?;
        if preamble.kind != Kind::Gradient {
            return Err(Reason::Unexpected);
        }
        let packet = GradientPacket::parse(preamble, bytes)?;
        job.authenticate(preamble.generation, bytes)?;
        let verdict = job.receive(now, from, &packet);
        self.turns.line_up(preamble.job, job);
        if let Some(reason) = job.take_new_abort() {
            self.events.push_back(JobAborted { job: preamble.job, reason });
        }
        verdict
    }
}

impl<A: Copy + PartialEq> Endpoint for AtpServer<A> {
    type Address = A;
    type Event = JobAborted;

    fn handle_packet(&mut self, now: Instant, from: A, packet: &[u8]) -> Verdict {
        let verdict = self.receive(now, from, packet).unwrap_or_else(Verdict::Drop);
        self.received.count(verdict)
    }

    fn handle_timeout(&mut self, _now: Instant) {}

    fn poll_transmit(&mut self, _now: Instant, train: &mut [u8]) -> Option<Transmit<'_, A>> {
        self.turns.next(&mut self.jobs)?.poll_transmit(train)
    }

    fn poll_event(&mut self) -> Option<JobAborted> {
        self.events.pop_front()
    }

    /// Never: loss is found and mended by the workers alone (ATP §3.7).
    fn poll_timeout(&self) -> Option<Instant> {
        None
    }
}

impl<A: Copy + PartialEq> Summer for AtpServer<A> {
    type Job = ServerJob;
    type Error = AtpConfigError;

    /// The directions must form a tree whose switches have the children that they say. What overflows need is not taken yet.
    fn add_job(&mut self, job: ServerJob) -> Result<(), AtpConfigError> {
        let id = job.config.id;
        if self.jobs.len() >= ATP_JOBS_MAX && !self.jobs.contains_key(&id) {
            return Err(AtpConfigError::Jobs);
        }
        self.jobs.insert(id, Job::new(job)?);
        self.turns.remove(id);
        Ok(())
    }

    fn remove_job(&mut self, job: JobId) {
        self.jobs.remove(&job);
        self.turns.remove(job);
    }

    fn abort_job(&mut self, id: JobId, reason: AbortReason) {
        if let Some(job) = self.jobs.get_mut(&id) {
            job.abort(reason);
            self.turns.line_up(id, job);
        }
    }

    fn job_progress(&self, job: JobId) -> Option<JobProgress> {
        self.jobs.get(&job).map(Job::job_progress)
    }

    fn received(&self) -> Received {
        self.received
    }
}
