//! The parameter server: it aggregates whatever the switches did not, and answers with the
//! parameters (ATP §3.6).

mod aside;
mod coverage;
mod exact_sum;
mod fragment;
mod job;

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use fanin_wire::{AbortReason, FragmentPacket, Generation, JobId, Key, Label, Preamble, ShardId};

pub use self::coverage::{Admitted, Coverage, Roster, Workers};
use self::job::Job;
use super::{ConfigError, JOBS_MAX};
use crate::machine::{
    Endpoint, Instant, JobAborted, JobProgress, Reason, Received, Summer, Transmit, Verdict,
};
use crate::transport::Turns;

/// How far a job is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerProgress {
    /// Fragments whose parameters were sent, or handed back.
    pub completed: u64,
    /// The earliest sequence number that is not aggregated: a worker that starts again goes on
    /// there (ATP §A.3).
    pub earliest: u64,
    /// Packets that were added here.
    pub aggregations: u64,
    /// The fragments among them that were sums of several workers, but not of all.
    pub partial: u64,
    /// The fragments among them that were the whole sum.
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

/// A parameter server of any number of jobs. `A` names a peer's address; `R` knows a job's workers.
#[derive(Debug)]
pub struct Server<A, R: Roster<A>> {
    jobs: BTreeMap<JobId, Job<A, R>>,
    turns: Turns,
    events: VecDeque<JobAborted>,
    received: Received,
}

/// How a job goes on in another generation.
pub(crate) struct GoOn<R, A> {
    /// The workers, as many as before.
    pub(crate) roster: R,
    /// The addresses of the first children, if they are known before they send.
    pub(crate) children: Vec<A>,
    /// Whether what was gathered of unfinished fragments stays: workers that are still there do not
    /// send it again.
    pub(crate) keeps: bool,
}

impl<A: Copy + PartialEq, R: Roster<A>> Default for Server<A, R> {
    fn default() -> Self {
        Self::new()
    }
}

impl<A: Copy + PartialEq, R: Roster<A>> Server<A, R> {
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

    /// Sets the job up again in a new generation, in which its workers are `after`, where `of` a
    /// job may tell that. Returns the earliest sequence number that is not aggregated; `None` when
    /// there is no such job.
    pub(crate) fn go_on(
        &mut self,
        job: JobId,
        generation: Generation,
        of: impl FnOnce(&R) -> Result<GoOn<R, A>, ConfigError>,
    ) -> Result<Option<u64>, ConfigError> {
        self.jobs.get_mut(&job).map(|job| job.go_on(generation, of)).transpose()
    }

    /// How far a job is.
    #[must_use]
    pub fn progress(&self, job: JobId) -> Option<ServerProgress> {
        self.jobs.get(&job).map(Job::progress)
    }

    /// Control says that a child of a job, counted as the job's roster counts them, is elsewhere
    /// from now on.
    pub fn child_moved(&mut self, job: JobId, child: usize, to: A) {
        if let Some(job) = self.jobs.get_mut(&job) {
            job.child_moved(child, to);
        }
    }

    fn receive(&mut self, now: Instant, from: A, bytes: &[u8]) -> Result<Verdict, Reason> {
        let preamble = Preamble::parse(bytes)?;
        if preamble.shard != ShardId(0) {
            return Err(Reason::OutOfRange);
        }
        let job = self.jobs.get_mut(&preamble.job).ok_or(Reason::UnknownJob)?;
        if preamble.kind != R::Label::KIND {
            return Err(Reason::Unexpected);
        }
        let packet = FragmentPacket::parse(preamble, bytes)?;
        job.authenticate(preamble.generation, bytes)?;
        let verdict = job.receive(now, from, &packet);
        self.turns.line_up(preamble.job, job);
        if let Some(reason) = job.take_new_abort() {
            self.events.push_back(JobAborted { job: preamble.job, reason });
        }
        verdict
    }
}

impl<A: Copy + PartialEq, R: Roster<A>> Endpoint for Server<A, R> {
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

impl<A: Copy + PartialEq, R: Roster<A>> Summer for Server<A, R> {
    type Job = R::Job;
    type Error = ConfigError;

    fn identity(job: &R::Job) -> (JobId, Key) {
        R::identity(job)
    }

    /// The memory for overflows is not taken yet.
    fn add_job(&mut self, job: R::Job) -> Result<(), ConfigError> {
        let admitted = R::admit(job)?;
        let id = admitted.config.id;
        if self.jobs.len() >= JOBS_MAX && !self.jobs.contains_key(&id) {
            return Err(ConfigError::Jobs);
        }
        self.jobs.insert(id, Job::new(admitted));
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
