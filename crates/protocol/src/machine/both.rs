//! Two machines that sum on one port: jobs of two protocols, which ranks need not tell apart by where they are.

use alloc::vec::Vec;
use fanin_wire::{AbortReason, JobId, Key};

use super::{
    Endpoint, Instant, JobAborted, JobProgress, Packet, Reason, Received, Summer, TableStatistics, Transmit,
    Verdict,
};

/// One shard of both. A packet is its job's machine's; a packet of no job is the first one's.
#[derive(Debug)]
pub struct Both<F, S> {
    first: F,
    second: S,
    /// The jobs that the second one has, in order.
    of_second: Vec<JobId>,
}

/// What one of two is told of a job, or has against it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Either<F, S> {
    /// The first.
    First(F),
    /// The second.
    Second(S),
}

impl<F, S> Both<F, S> {
    /// Both without jobs.
    #[must_use]
    pub const fn new(first: F, second: S) -> Self {
        Self { first, second, of_second: Vec::new() }
    }

    fn is_of_second(&self, job: JobId) -> bool {
        !self.of_second.is_empty() && self.of_second.binary_search(&job).is_ok()
    }
}

impl<F, S> Endpoint for Both<F, S>
where
    F: Endpoint<Event = JobAborted>,
    S: Endpoint<Address = F::Address, Event = JobAborted>,
{
    type Address = F::Address;
    type Event = JobAborted;

    fn receive(&mut self, now: Instant, from: &F::Address, packet: &Packet<'_>) -> Result<Verdict, Reason> {
        match self.is_of_second(packet.preamble.job) {
            false => self.first.receive(now, from, packet),
            true => self.second.receive(now, from, packet),
        }
    }

    /// The first one counts for both: what the second one says of packets received stays 0.
    fn count(&mut self, verdict: Verdict) -> Verdict {
        self.first.count(verdict)
    }

    fn handle_timeout(&mut self, now: Instant) {
        self.first.handle_timeout(now);
        self.second.handle_timeout(now);
    }

    fn poll_transmit(&mut self, now: Instant, train: &mut [u8]) -> Option<Transmit<'_, F::Address>> {
        match self.first.poll_transmit(now, train) {
            None => self.second.poll_transmit(now, train),
            transmit => transmit,
        }
    }

    fn poll_event(&mut self) -> Option<JobAborted> {
        self.first.poll_event().or_else(|| self.second.poll_event())
    }

    fn poll_timeout(&self) -> Option<Instant> {
        self.first.poll_timeout().into_iter().chain(self.second.poll_timeout()).min()
    }
}

impl<F: Summer, S: Summer<Address = F::Address>> Summer for Both<F, S> {
    type Job = Either<F::Job, S::Job>;
    type Error = Either<F::Error, S::Error>;

    fn identity(job: &Self::Job) -> (JobId, Key) {
        match job {
            Either::First(job) => F::identity(job),
            Either::Second(job) => S::identity(job),
        }
    }

    fn add_job(&mut self, job: Self::Job) -> Result<(), Self::Error> {
        let (id, _) = Self::identity(&job);
        self.remove_job(id);
        match job {
            Either::First(job) => self.first.add_job(job).map_err(Either::First),
            Either::Second(job) => {
                self.second.add_job(job).map_err(Either::Second)?;
                let at = self.of_second.partition_point(|other| *other < id);
                self.of_second.insert(at, id);
                Ok(())
            }
        }
    }

    fn remove_job(&mut self, job: JobId) {
        self.first.remove_job(job);
        self.second.remove_job(job);
        self.of_second.retain(|other| *other != job);
    }

    fn abort_job(&mut self, job: JobId, reason: AbortReason) {
        self.first.abort_job(job, reason);
        self.second.abort_job(job, reason);
    }

    fn job_progress(&self, job: JobId) -> Option<JobProgress> {
        self.first.job_progress(job).or_else(|| self.second.job_progress(job))
    }

    fn received(&self) -> Received {
        self.first.received()
    }

    fn table(&self) -> Option<TableStatistics> {
        self.first.table().or_else(|| self.second.table())
    }
}

impl<F: core::fmt::Display, S: core::fmt::Display> core::fmt::Display for Either<F, S> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::First(error) => error.fmt(f),
            Self::Second(error) => error.fmt(f),
        }
    }
}

impl<F: core::error::Error, S: core::error::Error> core::error::Error for Either<F, S> {}
