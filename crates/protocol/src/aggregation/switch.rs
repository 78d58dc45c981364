//! The programmable switch of a rack, or of a higher level: a table of aggregators, and for each
//! job the way up and down.

mod job;

use alloc::collections::BTreeMap;
use core::time::Duration;
use fanin_wire::{
    Abort, AbortReason, Flags, FragmentHeader, FragmentPacket, Generation, JobId, Key, Kind, Label,
    Participants, ShardId, is_fragment,
};

use self::job::Job;
use super::aggregator_table::{AggregatorTable, Bits, Freed, Identifier, Outcome, Part, ResendOutcome};
use super::children::Children;
use super::config::AGGREGATOR_ELEMENTS_MAX;
use super::halves::Halves;
use super::passing::Passing;
use super::{AGGREGATORS_MAX, ConfigError, JOBS_MAX, WAYS_MAX};
use crate::machine::{
    Abortion, Endpoint, Instant, JobAborted, JobProgress, JobTable, Packet, Reason, Received, Summer,
    TableJob, TableStatistics, Transmit, Verdict,
};

/// The settings of a switch when it starts; jobs change none of it (ATP §3.2, static infrastructure
/// setup).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchConfig {
    /// Number of aggregators, up to [`AGGREGATORS_MAX`] and as many as 4 GiB hold; with none, the
    /// switch only forwards.
    pub aggregators: u32,
    /// Elements of the longest fragment that an aggregator holds, as [`is_fragment`] allows; longer
    /// ones are forwarded.
    pub elements: u16,
    /// The number of aggregators in which a fragment looks for a place, from 1, the paper's, to
    /// [`WAYS_MAX`]: that of its index, and those whose numbers differ from it in the last bits. If
    /// jobs share a table, more is summed here with several (docs/protocols/atp.md).
    pub ways: u8,
    /// How long after its last contribution an aggregator counts as left behind (§3.7).
    pub stale: Duration,
    /// Packets that wait in one of the switch's own queues before it marks congestion; `None`
    /// leaves that to the network.
    pub ecn_threshold_packets: Option<usize>,
}

/// A job at one switch, as its protocol has it: where its packets go, and which are summed here.
pub trait Route<A>: Clone + core::fmt::Debug {
    /// The label of fragments.
    type Label: Label;
    /// The workers in a sum.
    type Bits: Bits;
    /// Whether parameters may free an aggregator that was left behind by others (§3.7).
    const FREES_STALE: bool;

    /// Whether a switch can have it.
    fn check(&self) -> Result<(), ConfigError> {
        Ok(())
    }

    /// The job, as its packets say it.
    fn job(&self) -> (JobId, Key, Generation);

    /// How many workers the job has.
    fn workers(&self) -> u16;

    /// The next machine towards the server.
    fn upstream(&self) -> &A;

    /// Another neighbour by its number.
    fn neighbour(&self, _number: u16) -> &[A] {
        &[]
    }

    /// The addresses of its children, as far as they are known before they send.
    fn children(&self) -> Children<A>;

    /// The child whose address a fragment teaches, if it does; or why it is not meant for this
    /// switch.
    fn sender(&self, from: A, label: &Self::Label) -> Result<Option<usize>, Reason>;

    /// The treatment of a fragment.
    fn treatment(&self, header: &FragmentHeader<Self::Label>) -> Treatment<Self::Bits>;

    /// How important a fragment is, where a more important one takes the aggregator of one that
    /// waits. None where who has it keeps it.
    fn priority(&self, _header: &FragmentHeader<Self::Label>) -> Option<u64> {
        None
    }

    /// Whether a child gets what these participants get.
    fn reaches(&self, _child: usize, _participants: Participants) -> bool {
        true
    }

    /// The aggregator of the fragment that parameters are of.
    fn freed_by(&self, parameters: &FragmentHeader<Self::Label>) -> Option<u32>;

    /// The label of what goes on from here towards the server as it came.
    fn onward(&self, label: Self::Label) -> Self::Label;

    /// The label of a sum of these that goes on from here: of all that is summed here, or of some.
    fn of_sum(&self, label: Self::Label, bits: Self::Bits) -> Self::Label;
}

/// The treatment of a fragment at a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Treatment<B> {
    /// It goes on as it is to a neighbour: it is summed further on.
    Relay(u16),
    /// It goes on towards the server.
    Forward,
    /// The same, and what this aggregator has of it is given up.
    Discard(u32),
    /// The same, if any of these contributors is in it. A sum of others alone stays.
    DiscardWith(u32, B),
    /// It is added, and sent on when all are in.
    Add(Part<B>),
    /// It was sent again. It completes a sum that lacks it alone. Otherwise what there is of it goes
    /// on with it, and is given up here (ATP Figure 17).
    Flush(Part<B>),
    /// It was sent again: it is added if it is not in, and what there is by now is shown to who gets
    /// the sum, but stays here.
    Show(Part<B>),
}

/// The events at a switch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwitchStatistics {
    /// Fragments that were added in an aggregator, or began one.
    pub aggregations: u64,
    /// Aggregators that became complete.
    pub completed: u64,
    /// Fragments that found no aggregator.
    pub collisions: u64,
    /// Aggregators freed by the parameters of their fragment.
    pub freed_by_parameters: u64,
    /// Aggregators freed because their fragment was sent again.
    pub freed_by_resend: u64,
    /// Aggregators freed because they were left behind.
    pub freed_stale: u64,
    /// Aggregators that a more important fragment took from one that waited.
    pub evicted: u64,
    /// Aggregators in use now.
    pub in_use: u32,
}

/// How a job fares at one switch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwitchProgress {
    /// Children that were heard of.
    pub children: u32,
    /// Fragments that were added in an aggregator, or began one.
    pub aggregations: u64,
    /// Fragments that found no aggregator.
    pub collisions: u64,
    /// Packets that went on towards the server.
    pub forwards: u64,
}

/// A sum that waits in an aggregator and may be taken from it.
#[derive(Clone, Copy, Debug)]
struct Occupant<L> {
    identifier: Identifier,
    priority: u64,
    /// The header of the packet that came last.
    header: FragmentHeader<L>,
}

/// A switch. `A` names a peer's address; `R` is a job's route.
#[derive(Debug)]
pub struct Switch<A, R: Route<A>> {
    config: SwitchConfig,
    table: AggregatorTable<R::Bits>,
    /// By aggregator: only of those that fragments with a priority wait in, or waited.
    occupants: BTreeMap<usize, Occupant<R::Label>>,
    passing: Passing,
    halves: Halves,
    jobs: JobTable<Job<A, R>>,
    statistics: SwitchStatistics,
}

impl<A: Copy + PartialEq, R: Route<A>> Switch<A, R> {
    /// A switch with one shard, without jobs. All its aggregators' memory is taken here.
    ///
    /// # Panics
    /// When the configuration was not checked: the command line does that.
    #[must_use]
    pub fn new(config: SwitchConfig) -> Self {
        Self::of_shard(ShardId(0), config)
    }

    /// A shard of a switch, as [`Self::new`].
    ///
    /// # Panics
    /// As there.
    #[must_use]
    pub fn of_shard(shard: ShardId, config: SwitchConfig) -> Self {
        let config = config.check().expect("a switch is checked by who starts it");
        Self {
            config,
            table: AggregatorTable::new(config.aggregators, config.elements, config.ways),
            occupants: BTreeMap::new(),
            passing: Passing::default(),
            halves: Halves::default(),
            jobs: JobTable::new(shard),
            statistics: SwitchStatistics::default(),
        }
    }

    /// The events since the start.
    #[must_use]
    pub const fn statistics(&self) -> SwitchStatistics {
        SwitchStatistics { in_use: self.table.in_use(), ..self.statistics }
    }

    /// How a job fares here.
    #[must_use]
    pub fn progress(&self, job: JobId) -> Option<SwitchProgress> {
        let children = |job: &Job<A, R>| job.children.addresses().len() as u32;
        self.jobs.get(job).map(|job| SwitchProgress { children: children(job), ..job.progress })
    }

    /// Control says that a child of a job, counted as the route counts them, is elsewhere from now
    /// on.
    pub fn child_moved(&mut self, job: JobId, child: usize, to: A) {
        if let Some(job) = self.jobs.get_mut(job) {
            job.children.learn(child, to);
        }
    }

    fn take(&mut self, now: Instant, from: A, packet: &Packet<'_>) -> Result<Verdict, Reason> {
        let Packet { preamble, bytes } = *packet;
        let job = self.jobs.of_packet(packet)?;
        if preamble.kind == Kind::Abort {
            let abort = Abort::parse(preamble, bytes)?;
            if from != *job.route.upstream() {
                return Err(Reason::Foreign);
            }
            if !job.abortion.is_none() {
                return Err(Reason::Aborted);
            }
            job.abort(Abortion::New(abort.reason), &mut self.passing);
            self.table.forget(preamble.job);
            return Ok(Verdict::Multicast);
        }
        let packet = FragmentPacket::parse(preamble, bytes)?;
        if packet.header.flags.is_ack {
            return self.parameters(now, from, &packet, bytes);
        }
        // Only a server's request has no payload.
        if packet.payload.is_empty() {
            return Err(Reason::ChunkLength);
        }
        if let Some(child) = job.route.sender(from, &packet.header.directions)? {
            job.children.learn(child, from);
        }
        if !job.abortion.is_none() {
            return Err(job.refuse());
        }
        let mut halves = core::mem::take(&mut self.halves);
        let verdict = self.fragment(now, &packet, bytes, &mut halves);
        self.halves = halves;
        verdict
    }

    /// Parameters, or a request for original values: down to the children, and the aggregator is
    /// free (Figure 7, box 8).
    fn parameters(
        &mut self,
        now: Instant,
        from: A,
        packet: &FragmentPacket<'_, R::Label>,
        bytes: &[u8],
    ) -> Result<Verdict, Reason> {
        let job = self.jobs.get_mut(packet.preamble.job).ok_or(Reason::UnknownJob)?;
        if from != *job.route.upstream() {
            return Err(Reason::Foreign);
        }
        if !job.abortion.is_none() {
            return Err(Reason::Aborted);
        }
        if let Some(index) = job.route.freed_by(&packet.header) {
            let stale = R::FREES_STALE.then_some(self.config.stale);
            match self.table.release(now, stale, index, &Identifier::of(&packet.preamble, &packet.header)) {
                Freed::None => {}
                Freed::Own => self.statistics.freed_by_parameters += 1,
                Freed::Stale => self.statistics.freed_stale += 1,
            }
        }
        let participants = packet.header.directions.participants();
        job.multicast(&self.config, &mut self.passing, bytes, participants)
    }

    /// Frees an aggregator of a set in which something less important than `priority` waits, the
    /// least important: the sum so far goes on to the server, as a fragment that finds no room
    /// does. Returns whether there was one.
    fn evict(&mut self, index: u32, priority: u64) -> bool {
        let waits = |at: usize| {
            let occupant = self.occupants.get(&at)?;
            (self.table.serves(at) == Some(occupant.identifier)).then_some((occupant.priority, at))
        };
        let least = self.table.set(index).filter_map(waits).min();
        let Some((_, at)) = least.filter(|(least, _)| *least < priority) else { return false };
        let Some(Occupant { identifier, mut header, .. }) = self.occupants.remove(&at) else { return false };
        let Some(job) = self.jobs.get_mut(identifier.job) else { return false };
        (header.flags.resend, header.flags.collision) = (true, true);
        if let Some((sum, _)) = self.table.held(at as u32, &identifier) {
            // Without room to pass it on it is lost, as a packet is.
            let _ = job.forward_partial(&self.config, &mut self.passing, header, &sum, false);
        }
        self.table.discard(at as u32, &identifier);
        self.jobs.settle(identifier.job);
        self.statistics.evicted += 1;
        true
    }

    /// A fragment, or a sum of some, on its way up.
    fn fragment(
        &mut self,
        now: Instant,
        packet: &FragmentPacket<'_, R::Label>,
        bytes: &[u8],
        halves: &mut Halves,
    ) -> Result<Verdict, Reason> {
        let FragmentPacket { preamble, header, .. } = packet;
        let mut job = self.jobs.get_mut(preamble.job).ok_or(Reason::UnknownJob)?;
        let identifier = Identifier::of(preamble, header);
        let treatment = job.route.treatment(header);
        let summed = match treatment {
            Treatment::Flush(_) | Treatment::Add(_) | Treatment::Show(_) => {
                &halves.widen(*packet, job.route.workers())?
            }
            Treatment::Relay(_) | Treatment::Forward | Treatment::Discard(_) | Treatment::DiscardWith(..) => {
                packet
            }
        };
        let (part, shows, mended) = match treatment {
            Treatment::Relay(to) => {
                return job.relay(&self.config, &mut self.passing, bytes, header.flags.half, to);
            }
            Treatment::Forward => {
                return job.forward(&self.config, &mut self.passing, packet, Flags::default());
            }
            // Figure 17, box 3: above the first level a bit does not say which workers are in a
            // sum, so nothing is merged. Original values and parameters that are handed back are
            // not for adding anywhere.
            Treatment::Discard(index) => {
                if self.table.discard(index, &identifier) {
                    self.statistics.freed_by_resend += 1;
                }
                return job.forward(&self.config, &mut self.passing, packet, Flags::default());
            }
            Treatment::DiscardWith(index, contributors) => {
                if self.table.discard_with(index, &identifier, contributors) {
                    self.statistics.freed_by_resend += 1;
                }
                return job.forward(&self.config, &mut self.passing, packet, Flags::default());
            }
            Treatment::Flush(part) => match self.table.merge_resent(now, &part, summed) {
                ResendOutcome::Complete => (part, false, Some(Outcome::Complete)),
                ResendOutcome::Again => return Ok(job.forward_sum(&self.config, part.index, header)),
                ResendOutcome::Duplicate => return Err(Reason::Duplicate),
                passes @ (ResendOutcome::Pass | ResendOutcome::GivenUp) => {
                    self.statistics.freed_by_resend += u64::from(passes == ResendOutcome::GivenUp);
                    return job.forward(&self.config, &mut self.passing, packet, Flags::default());
                }
                ResendOutcome::Flush { sum, stalled } => {
                    self.statistics.freed_by_resend += 1;
                    return job.forward_partial(&self.config, &mut self.passing, *header, &sum, stalled);
                }
            },
            Treatment::Add(part) => (part, false, None),
            Treatment::Show(part) => (part, true, None),
        };
        let mut outcome = mended.unwrap_or_else(|| self.table.aggregate(now, &part, summed));
        if let Some(priority) = job.route.priority(header) {
            if outcome == Outcome::Collision && !shows && self.evict(part.index, priority) {
                outcome = self.table.aggregate(now, &part, summed);
            }
            if let Some(at) = self.table.serving(part.index, &identifier) {
                match outcome {
                    Outcome::Held => {
                        self.occupants.insert(at, Occupant { identifier, priority, header: *header });
                    }
                    // It leaves by itself.
                    _ => drop(self.occupants.remove(&at)),
                }
            }
            job = self.jobs.get_mut(preamble.job).ok_or(Reason::UnknownJob)?;
        }
        if matches!(outcome, Outcome::Held | Outcome::Complete) {
            self.statistics.aggregations += 1;
            self.statistics.completed += u64::from(outcome == Outcome::Complete);
            job.progress.aggregations += 1;
        }
        match outcome {
            Outcome::Held | Outcome::Duplicate if shows => {
                let Some((sum, is_complete)) = self.table.held(part.index, &identifier) else {
                    return Err(Reason::Duplicate);
                };
                let stalled = outcome == Outcome::Duplicate && !is_complete;
                job.forward_partial(&self.config, &mut self.passing, *header, &sum, stalled)
            }
            Outcome::Held => Ok(Verdict::Absorb),
            Outcome::Complete => Ok(job.forward_sum(&self.config, part.index, header)),
            Outcome::Duplicate => Err(Reason::Duplicate),
            // Its worker lacks the parameters, and only the server has them.
            Outcome::Succeeded if shows => {
                job.forward(&self.config, &mut self.passing, packet, Flags::default())
            }
            Outcome::Succeeded => Err(Reason::Stale),
            // Figure 7, box 2. The flags keep switches further on from aggregating it and tell the
            // server.
            Outcome::Collision => {
                self.statistics.collisions += 1;
                job.progress.collisions += 1;
                let collision = !shows;
                let flags = Flags { resend: true, collision, ..Flags::default() };
                job.forward(&self.config, &mut self.passing, packet, flags)
            }
            // The server finds out who disagrees; another index would not help.
            Outcome::Unlike => job.forward(
                &self.config,
                &mut self.passing,
                packet,
                Flags { resend: true, ..Flags::default() },
            ),
        }
    }
}

impl SwitchConfig {
    /// Most aggregators of a switch whose aggregators hold so many elements: [`AGGREGATORS_MAX`],
    /// or as many as 4 GiB hold.
    #[must_use]
    pub const fn aggregators_max(elements: u16) -> u32 {
        let by_memory = AGGREGATOR_ELEMENTS_MAX / if elements == 0 { 1 } else { elements as u64 };
        if by_memory < AGGREGATORS_MAX as u64 { by_memory as u32 } else { AGGREGATORS_MAX }
    }

    /// The configuration, if every number is within its limit.
    ///
    /// # Errors
    /// The first number that is not.
    pub fn check(self) -> Result<Self, ConfigError> {
        if !is_fragment(self.elements.into()) {
            return Err(ConfigError::Elements(self.elements));
        }
        if self.aggregators > Self::aggregators_max(self.elements) {
            return Err(ConfigError::Aggregators(self.aggregators));
        }
        if !(1..=WAYS_MAX).contains(&self.ways) {
            return Err(ConfigError::Ways(self.ways));
        }
        Ok(self)
    }

    fn is_congested(&self, waiting: usize) -> bool {
        self.ecn_threshold_packets.is_some_and(|threshold| waiting >= threshold)
    }
}

impl<A: Copy + PartialEq, R: Route<A>> Endpoint for Switch<A, R> {
    type Address = A;
    type Event = JobAborted;

    fn receive(&mut self, now: Instant, from: &A, packet: &Packet<'_>) -> Result<Verdict, Reason> {
        let verdict = self.take(now, *from, packet);
        self.jobs.settle(packet.preamble.job);
        verdict
    }

    fn count(&mut self, verdict: Verdict) -> Verdict {
        self.jobs.count(verdict)
    }

    fn handle_timeout(&mut self, _now: Instant) {}

    fn poll_transmit(&mut self, _now: Instant, train: &mut [u8]) -> Option<Transmit<'_, A>> {
        let Self { jobs, table, passing, .. } = self;
        loop {
            let job = jobs.next_sender()?;
            let id = job.route.job().0;
            let (run, to) = job.write(table, passing, train);
            if run.is_empty() && !job.has_pending() {
                continue; // None of its sums was still there.
            }
            return run.to(jobs.get(id)?.addresses(to));
        }
    }

    fn poll_event(&mut self) -> Option<JobAborted> {
        self.jobs.poll_event()
    }

    /// Never: aggregators that were left behind are found by parameters whose set has no room
    /// (§3.7).
    fn poll_timeout(&self) -> Option<Instant> {
        None
    }
}

impl<A: Copy + PartialEq, R: Route<A>> Summer for Switch<A, R> {
    type Job = R;
    type Error = ConfigError;

    fn identity(route: &R) -> (JobId, Key) {
        let (job, key, _) = route.job();
        (job, key)
    }

    fn add_job(&mut self, route: R) -> Result<(), ConfigError> {
        route.check()?;
        let id = route.job().0;
        if !self.jobs.has_room(id, JOBS_MAX) {
            return Err(ConfigError::Jobs);
        }
        self.remove_job(id);
        self.jobs.insert(id, Job::new(self.jobs.shard(), route));
        Ok(())
    }

    /// Its aggregators are free.
    fn remove_job(&mut self, job: JobId) {
        if let Some(mut removed) = self.jobs.remove(job) {
            removed.forget_waiting(&mut self.passing);
            self.table.forget(job);
        }
    }

    fn abort_job(&mut self, id: JobId, reason: AbortReason) {
        let Self { jobs, table, passing, .. } = self;
        jobs.with(id, |job| {
            if job.abortion.is_none() {
                job.abort(Abortion::Known(reason), passing);
                table.forget(id);
            }
        });
    }

    fn job_progress(&self, job: JobId) -> Option<JobProgress> {
        let SwitchProgress { aggregations, collisions, .. } = self.progress(job)?;
        Some(JobProgress { aggregations, collisions, ..JobProgress::default() })
    }

    fn received(&self) -> Received {
        self.jobs.received()
    }

    fn table(&self) -> Option<TableStatistics> {
        let SwitchStatistics { in_use, completed, freed_by_parameters, freed_by_resend, freed_stale, .. } =
            self.statistics();
        let aggregators = self.config.aggregators;
        Some(TableStatistics {
            aggregators,
            in_use,
            completed,
            freed_by_parameters,
            freed_by_resend,
            freed_stale,
        })
    }
}
