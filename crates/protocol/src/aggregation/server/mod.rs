//! The parameter server: it aggregates whatever the switches did not, and answers with the
//! parameters (ATP §3.6).

mod aside;
mod coverage;
mod exact_sum;
mod fragment;
mod job;

use alloc::vec::Vec;
use fanin_wire::{AbortReason, Generation, JobId, Key, ShardId};

pub use self::coverage::{Admitted, Coverage, Roster, Workers};
use self::job::Job;
use super::{ConfigError, JOBS_MAX};
use crate::machine::{
    Endpoint, Instant, JobAborted, JobProgress, JobTable, Packet, Reason, Received, Summer, Transmit, Verdict,
};

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
    jobs: JobTable<Job<A, R>>,
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
    /// A server without jobs, with one shard.
    #[must_use]
    pub fn new() -> Self {
        Self::of_shard(ShardId(0))
    }

    /// A shard of a server, without jobs.
    #[must_use]
    pub fn of_shard(shard: ShardId) -> Self {
        Self { jobs: JobTable::new(shard) }
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
        self.jobs.get_mut(job).map(|job| job.go_on(generation, of)).transpose()
    }

    /// How far a job is.
    #[must_use]
    pub fn progress(&self, job: JobId) -> Option<ServerProgress> {
        self.jobs.get(job).map(Job::progress)
    }

    /// Control says that a child of a job, counted as the job's roster counts them, is elsewhere
    /// from now on.
    pub fn child_moved(&mut self, job: JobId, child: usize, to: A) {
        if let Some(job) = self.jobs.get_mut(job) {
            job.child_moved(child, to);
        }
    }
}

impl<A: Copy + PartialEq, R: Roster<A>> Endpoint for Server<A, R> {
    type Address = A;
    type Event = JobAborted;

    fn receive(&mut self, now: Instant, from: &A, packet: &Packet<'_>) -> Result<Verdict, Reason> {
        self.jobs.receive(packet, |job| job.receive(now, *from, packet))
    }

    fn count(&mut self, verdict: Verdict) -> Verdict {
        self.jobs.count(verdict)
    }

    fn handle_timeout(&mut self, _now: Instant) {}

    fn poll_transmit(&mut self, _now: Instant, train: &mut [u8]) -> Option<Transmit<'_, A>> {
        let shard = self.jobs.shard();
        self.jobs.next_sender()?.poll_transmit(shard, train)
    }

    fn poll_event(&mut self) -> Option<JobAborted> {
        self.jobs.poll_event()
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
        if !self.jobs.has_room(id, JOBS_MAX) {
            return Err(ConfigError::Jobs);
        }
        self.jobs.insert(id, Job::new(admitted));
        Ok(())
    }

    fn remove_job(&mut self, job: JobId) {
        self.jobs.remove(job);
    }

    fn abort_job(&mut self, job: JobId, reason: AbortReason) {
        self.jobs.with(job, |job| job.abort(reason));
    }

    fn job_progress(&self, job: JobId) -> Option<JobProgress> {
        self.jobs.get(job).map(Job::job_progress)
    }

    fn received(&self) -> Received {
        self.jobs.received()
    }
}
