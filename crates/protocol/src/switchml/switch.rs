//! The switch: a table of jobs, each with its own pool of slots. One machine is one shard.

#[cfg(test)]
mod tests;

use alloc::collections::{BTreeMap, VecDeque};
use fanin_wire::{AbortReason, JobId, Kind, Preamble, ShardId, SlotPacket};

use super::config::JobConfig;
use super::slot_pool::{JobProgress, SlotPool};
use crate::machine::{Endpoint, Instant, Reason, Transmit, Verdict};

/// One shard of a switch: every job's slots in it. `A` names a worker's address.
#[derive(Debug)]
pub struct Switch<A> {
    shard: ShardId,
    jobs: BTreeMap<JobId, SlotPool<A>>,
    /// The job whose trains went out last: the next one in turn goes first.
    last_served: JobId,
    events: VecDeque<SwitchEvent>,
    statistics: SwitchStatistics,
}

/// What the switch tells its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwitchEvent {
    /// The data path found that the job cannot go on, and told its workers.
    Aborted {
        /// The job.
        job: JobId,
        /// Why.
        reason: AbortReason,
    },
}

/// Packets by what became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwitchStatistics {
    /// All packets that came.
    pub packets_received: u64,
    /// Contributions that counted without completing a slot.
    pub absorb: u64,
    /// Contributions that completed a slot.
    pub multicast: u64,
    /// Retransmissions that were answered from a finished slot.
    pub reply_unicast: u64,
    /// Packets without effect, by [`Reason`].
    pub dropped: [u64; Reason::ALL.len()],
}

impl SwitchStatistics {
    fn count(&mut self, verdict: Verdict) {
        self.packets_received += 1;
        match verdict {
            // Nothing is beyond this switch.
            Verdict::Forward => {}
            Verdict::Absorb => self.absorb += 1,
            Verdict::Multicast => self.multicast += 1,
            Verdict::ReplyUnicast => self.reply_unicast += 1,
            Verdict::Drop(reason) => self.dropped[reason as usize] += 1,
        }
    }
}

impl<A: Copy + PartialEq> Switch<A> {
    /// A shard without jobs.
    #[must_use]
    pub const fn new(shard: ShardId) -> Self {
        Self {
            shard,
            jobs: BTreeMap::new(),
            last_served: JobId(0),
            events: VecDeque::new(),
            statistics: SwitchStatistics {
                packets_received: 0,
                absorb: 0,
                multicast: 0,
                reply_unicast: 0,
                dropped: [0; Reason::ALL.len()],
            },
        }
    }

    /// Takes a job in; one of the same id is forgotten. All its memory is taken here.
    ///
    /// # Panics
    /// When the configuration was not checked: admission does that.
    pub fn add_job(&mut self, config: JobConfig) {
        let config = config.check().expect("a job is checked at admission");
        self.jobs.insert(config.id, SlotPool::new(config));
    }

    /// Forgets a job. Its packets are unknown from now on.
    pub fn remove_job(&mut self, job: JobId) {
        self.jobs.remove(&job);
    }

    /// Tells the job's workers, now and whenever they send again, that it cannot go on.
    pub fn abort_job(&mut self, job: JobId, reason: AbortReason) {
        if let Some(pool) = self.jobs.get_mut(&job) {
            pool.abort(reason);
        }
    }

    /// Packets by verdict since the start.
    #[must_use]
    pub const fn statistics(&self) -> SwitchStatistics {
        self.statistics
    }

    /// How far a job is and whom its slots wait for.
    #[must_use]
    pub fn progress(&self, job: JobId) -> Option<JobProgress> {
        self.jobs.get(&job).map(SlotPool::progress)
    }

    fn receive(&mut self, now: Instant, from: A, packet: &[u8]) -> Result<Verdict, Reason> {
        let preamble = Preamble::parse(packet)?;
        if preamble.shard != self.shard {
            return Err(Reason::OutOfRange);
        }
        let pool = self.jobs.get_mut(&preamble.job).ok_or(Reason::UnknownJob)?;
        if !matches!(preamble.kind, Kind::Update | Kind::Restore) {
            return Err(Reason::Unexpected);
        }
        let packet = SlotPacket::parse(preamble, packet)?;
        let verdict = pool.receive(now, from, &packet);
        if let Some(reason) = pool.take_new_abort() {
            self.events.push_back(SwitchEvent::Aborted { job: preamble.job, reason });
        }
        verdict
    }

    /// The next job in turn that has something to say.
    fn next_to_serve(&mut self) -> Option<JobId> {
        let after = (core::ops::Bound::Excluded(self.last_served), core::ops::Bound::Unbounded);
        let mut pending = |(id, pool): (&JobId, &mut SlotPool<A>)| pool.has_pending().then_some(*id);
        let found = self.jobs.range_mut(after).find_map(&mut pending);
        found.or_else(|| self.jobs.iter_mut().find_map(pending))
    }
}

impl<A: Copy + PartialEq> Endpoint for Switch<A> {
    type Address = A;
    type Event = SwitchEvent;

    fn handle_packet(&mut self, now: Instant, from: A, packet: &[u8]) -> Verdict {
        let verdict = self.receive(now, from, packet).unwrap_or_else(Verdict::Drop);
        self.statistics.count(verdict);
        verdict
    }

    fn handle_timeout(&mut self, _now: Instant) {}

    fn poll_transmit(&mut self, _now: Instant, train: &mut [u8]) -> Option<Transmit<'_, A>> {
        self.last_served = self.next_to_serve()?;
        self.jobs.get_mut(&self.last_served)?.poll_transmit(train)
    }

    fn poll_event(&mut self) -> Option<SwitchEvent> {
        self.events.pop_front()
    }

    /// Never: loss is found and mended by the workers alone (SwitchML §4.5).
    fn poll_timeout(&self) -> Option<Instant> {
        None
    }
}
