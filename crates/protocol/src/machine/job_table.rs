//! The jobs of a machine that sums: whose a packet is, whether a member wrote it, whose turn it is
//! to send, and which jobs ended without the owner knowing it yet.
//!
//! The jobs take turns. A job stands in a line while it may have something to send, so that jobs
//! without a word cost nothing.

use alloc::collections::{BTreeMap, VecDeque};
use fanin_wire::{AbortReason, Generation, JobId, Key, Kind, Preamble, ShardId};

use super::{JobAborted, Packet, Reason, Received, Verdict};

/// A job at a machine that sums, as its table knows it.
pub(crate) trait TableJob {
    /// The generation and the key of the packets that its members write.
    fn membership(&self) -> (Generation, Key);

    /// Whether its machine has a use for packets of this kind. All others are dropped before their
    /// tags are computed, and before anything notes that their sender was heard.
    fn takes(&self, kind: Kind) -> bool;

    /// Whether the job can go on.
    fn abortion(&mut self) -> &mut Abortion;

    /// Whether it has something to send now. Jobs of a machine that polls them itself (DLCP) leave
    /// this false.
    fn has_pending(&mut self) -> bool {
        false
    }
}

/// Whether a job can go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Abortion {
    None,
    /// Found by the data path; the owner has not heard of it.
    New(AbortReason),
    Known(AbortReason),
}

impl Abortion {
    /// Why it cannot.
    pub(crate) const fn reason(&self) -> Option<AbortReason> {
        match *self {
            Self::None => None,
            Self::New(reason) | Self::Known(reason) => Some(reason),
        }
    }

    #[inline]
    pub(crate) const fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }
}

/// The jobs of one shard of a machine.
#[derive(Debug)]
pub(crate) struct JobTable<J> {
    shard: ShardId,
    jobs: BTreeMap<JobId, Entry<J>>,
    /// A job in it may have nothing to send any more; one that has something stands in it.
    line: VecDeque<JobId>,
    events: VecDeque<JobAborted>,
    received: Received,
}

#[derive(Debug)]
struct Entry<J> {
    job: J,
    in_line: bool,
}

impl<J: TableJob> JobTable<J> {
    pub(crate) fn new(shard: ShardId) -> Self {
        Self {
            shard,
            jobs: BTreeMap::new(),
            line: VecDeque::new(),
            events: VecDeque::new(),
            received: Received::default(),
        }
    }

    pub(crate) const fn shard(&self) -> ShardId {
        self.shard
    }

    pub(crate) fn get(&self, id: JobId) -> Option<&J> {
        self.jobs.get(&id).map(|entry| &entry.job)
    }

    pub(crate) fn get_mut(&mut self, id: JobId) -> Option<&mut J> {
        self.jobs.get_mut(&id).map(|entry| &mut entry.job)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &J> {
        self.jobs.values().map(|entry| &entry.job)
    }

    pub(crate) fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Whether a job may join, or take the place of one with its id, where there may be so many.
    pub(crate) fn has_room(&self, id: JobId, jobs_max: usize) -> bool {
        self.len() < jobs_max || self.jobs.contains_key(&id)
    }

    /// Takes a job in; one of the same id is forgotten.
    pub(crate) fn insert(&mut self, id: JobId, job: J) {
        self.remove(id);
        self.jobs.insert(id, Entry { job, in_line: false });
    }

    pub(crate) fn remove(&mut self, id: JobId) -> Option<J> {
        self.line.retain(|other| *other != id);
        self.jobs.remove(&id).map(|entry| entry.job)
    }

    /// The job of a packet that one of its members wrote; or why the packet is nobody's.
    #[inline]
    pub(crate) fn of_packet(&mut self, packet: &Packet<'_>) -> Result<&mut J, Reason> {
        Self::find(&mut self.jobs, self.shard, packet).map(|entry| &mut entry.job)
    }

    #[inline]
    fn find<'a>(
        jobs: &'a mut BTreeMap<JobId, Entry<J>>,
        own_shard: ShardId,
        packet: &Packet<'_>,
    ) -> Result<&'a mut Entry<J>, Reason> {
        let Preamble { kind, job, generation, shard, .. } = packet.preamble;
        if shard != own_shard {
            return Err(Reason::OutOfRange);
        }
        let entry = jobs.get_mut(&job).ok_or(Reason::UnknownJob)?;
        if !entry.job.takes(kind) {
            return Err(Reason::Unexpected);
        }
        let (own_generation, key) = entry.job.membership();
        if generation != own_generation {
            return Err(Reason::Generation);
        }
        packet.authenticate(key)?;
        Ok(entry)
    }

    /// Hands a packet that one of its members wrote to its job.
    #[inline]
    pub(crate) fn receive(
        &mut self,
        packet: &Packet<'_>,
        take: impl FnOnce(&mut J) -> Result<Verdict, Reason>,
    ) -> Result<Verdict, Reason> {
        let Self { shard, jobs, line, events, .. } = self;
        let entry = Self::find(jobs, *shard, packet)?;
        let verdict = take(&mut entry.job);
        entry.settle(packet.preamble.job, line, events);
        verdict
    }

    /// Lets something happen to a job, if it is here.
    pub(crate) fn with(&mut self, id: JobId, act: impl FnOnce(&mut J)) {
        if let Some(entry) = self.jobs.get_mut(&id) {
            act(&mut entry.job);
            entry.settle(id, &mut self.line, &mut self.events);
        }
    }

    /// To be called after something that happened to a job by [`Self::of_packet`] or
    /// [`Self::get_mut`].
    pub(crate) fn settle(&mut self, id: JobId) {
        self.with(id, |_| ());
    }

    /// Lets something happen to all jobs.
    pub(crate) fn with_each(&mut self, mut act: impl FnMut(&mut J)) {
        for (id, entry) in &mut self.jobs {
            act(&mut entry.job);
            entry.settle(*id, &mut self.line, &mut self.events);
        }
    }

    /// The job whose turn it is to send; it goes to the end of the line.
    pub(crate) fn next_sender(&mut self) -> Option<&mut J> {
        let id = loop {
            let id = self.line.pop_front()?;
            let Some(entry) = self.jobs.get_mut(&id) else { continue };
            if entry.job.has_pending() {
                break id;
            }
            entry.in_line = false;
        };
        self.line.push_back(id);
        self.get_mut(id)
    }

    /// The first job whose id is not below this one, or else the first of all.
    pub(crate) fn at_or_after(&mut self, first: JobId) -> Option<(JobId, &mut J)> {
        let id = *self.jobs.range(first..).chain(&self.jobs).next()?.0;
        Some((id, self.get_mut(id)?))
    }

    pub(crate) fn poll_event(&mut self) -> Option<JobAborted> {
        self.events.pop_front()
    }

    /// Counts a packet, and hands the verdict on it through.
    #[inline]
    pub(crate) const fn count(&mut self, verdict: Verdict) -> Verdict {
        self.received.count(verdict)
    }

    /// Packets since the start.
    pub(crate) const fn received(&self) -> Received {
        self.received
    }
}

impl<J: TableJob> Entry<J> {
    /// To be called after anything that may have given a job something to send, or ended it.
    #[inline]
    fn settle(&mut self, id: JobId, line: &mut VecDeque<JobId>, events: &mut VecDeque<JobAborted>) {
        if !self.in_line && self.job.has_pending() {
            self.in_line = true;
            line.push_back(id);
        }
        let abortion = self.job.abortion();
        if let Abortion::New(reason) = *abortion {
            *abortion = Abortion::Known(reason);
            events.push_back(JobAborted { job: id, reason });
        }
    }
}
