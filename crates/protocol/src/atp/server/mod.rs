//! The parameter server: it aggregates whatever the switches did not, and answers with the parameters (ATP §3.6).

mod exact_sum;
mod fragment;
mod hierarchy;
mod job;

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use fanin_wire::{AbortReason, Directions, Generation, GradientPacket, JobId, Kind, Preamble, ShardId};

use self::job::Job;
use super::turns::Turns;
use super::{ATP_JOBS_MAX, AtpConfigError, AtpJobConfig};
use crate::machine::{Endpoint, Instant, Reason, Transmit, Verdict};

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

/// What a server tells its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtpServerEvent {
    /// Two workers disagree about what they reduce. All were told.
    Aborted {
        /// The job.
        job: JobId,
        /// Why. A rank that the packet has no room for is [`fanin_wire::WorkerId::ALL`].
        reason: AbortReason,
        /// The first two ranks that disagree.
        ranks: (u16, u16),
    },
}

/// Packets by what became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AtpServerStatistics {
    /// All packets that came.
    pub packets_received: u64,
    /// Their bytes, without those of IP and below.
    pub bytes_received: u64,
    /// Contributions that counted without completing a fragment.
    pub absorb: u64,
    /// Contributions that completed a fragment.
    pub multicast: u64,
    /// Fragments that were sent again and answered.
    pub reply_unicast: u64,
    /// Packets without effect, by [`Reason`].
    pub dropped: [u64; Reason::ALL.len()],
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

/// Whom a job's fragments wait for. What still gathers in a switch is not seen here: it comes when a worker sends again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AtpServerWaiting {
    /// Fragments of which something came, and not all.
    pub fragments: u32,
    /// For each rank, how many of them wait for it.
    pub ranks: Vec<u32>,
}

/// A parameter server of any number of jobs. `A` names a peer's address.
#[derive(Debug)]
pub struct AtpServer<A> {
    jobs: BTreeMap<JobId, Job<A>>,
    turns: Turns,
    events: VecDeque<AtpServerEvent>,
    statistics: AtpServerStatistics,
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
            statistics: AtpServerStatistics::default(),
        }
    }

    /// Takes a job in; one of the same id is forgotten. All its memory is taken here, but for what overflows need.
    ///
    /// # Errors
    /// When a number is outside its limit, the directions do not form a tree whose switches have the children that they say, or
    /// the server has [`ATP_JOBS_MAX`] jobs.
    pub fn add_job(&mut self, job: ServerJob) -> Result<(), AtpConfigError> {
        let id = job.config.id;
        if self.jobs.len() >= ATP_JOBS_MAX && !self.jobs.contains_key(&id) {
            return Err(AtpConfigError::Jobs);
        }
        self.jobs.insert(id, Job::new(job)?);
        self.turns.remove(id);
        Ok(())
    }

    /// Forgets a job. Its packets are unknown from now on.
    pub fn remove_job(&mut self, job: JobId) {
        self.jobs.remove(&job);
        self.turns.remove(job);
    }

    /// Tells the job's workers, now and whenever they send again, that it cannot go on.
    pub fn abort_job(&mut self, id: JobId, reason: AbortReason) {
        if let Some(job) = self.jobs.get_mut(&id) {
            job.abort(reason);
            self.turns.line_up(id, job);
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

    /// Lets a worker's packets come from elsewhere from now on: it was started again in its old place (ATP §A.3).
    pub fn replace_worker(&mut self, job: JobId, rank: u16) {
        if let Some(job) = self.jobs.get_mut(&job) {
            job.forget_child_of(rank);
        }
    }

    /// Packets by verdict since the start.
    #[must_use]
    pub const fn statistics(&self) -> AtpServerStatistics {
        self.statistics
    }

    /// How far a job is.
    #[must_use]
    pub fn progress(&self, job: JobId) -> Option<AtpServerProgress> {
        self.jobs.get(&job).map(Job::progress)
    }

    /// Whom a job waits for.
    #[must_use]
    pub fn waiting(&self, job: JobId) -> Option<AtpServerWaiting> {
        self.jobs.get(&job).map(Job::waiting)
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
        let verdict = job.receive(now, from, &packet);
        self.turns.line_up(preamble.job, job);
        if let Some((reason, ranks)) = job.take_new_abort() {
            self.events.push_back(AtpServerEvent::Aborted { job: preamble.job, reason, ranks });
        }
        verdict
    }
}

impl<A: Copy + PartialEq> Endpoint for AtpServer<A> {
    type Address = A;
    type Event = AtpServerEvent;

    fn handle_packet(&mut self, now: Instant, from: A, packet: &[u8]) -> Verdict {
        let verdict = self.receive(now, from, packet).unwrap_or_else(Verdict::Drop);
        let statistics = &mut self.statistics;
        statistics.packets_received += 1;
        statistics.bytes_received += packet.len() as u64;
        match verdict {
            Verdict::Absorb => statistics.absorb += 1,
            Verdict::Multicast => statistics.multicast += 1,
            Verdict::ReplyUnicast => statistics.reply_unicast += 1,
            // Nothing is beyond the server.
            Verdict::Forward => {}
            Verdict::Drop(reason) => statistics.dropped[reason as usize] += 1,
        }
        verdict
    }

    fn handle_timeout(&mut self, _now: Instant) {}

    fn poll_transmit(&mut self, _now: Instant, train: &mut [u8]) -> Option<Transmit<'_, A>> {
        self.turns.next(&mut self.jobs)?.poll_transmit(train)
    }

    fn poll_event(&mut self) -> Option<AtpServerEvent> {
        self.events.pop_front()
    }

    /// Never: loss is found and mended by the workers alone (ATP §3.7).
    fn poll_timeout(&self) -> Option<Instant> {
        None
    }
}
