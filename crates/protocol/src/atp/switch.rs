//! The programmable switch of a rack, or of a higher level: a table of aggregators, and for each job the way up and down.

use alloc::collections::{BTreeMap, VecDeque};
use core::time::Duration;
use fanin_wire::{
    ABORT_BYTES, Abort, AbortReason, CHILDREN_MAX, Directions, Flags, Generation, GradientHeader,
    GradientPacket, JobId, Key, Kind, LEVELS_MAX, Preamble, ShardId, WorkerId, fragment_packet_bytes,
    is_fragment,
};

use super::aggregator_table::{Aggregate, AggregatorTable, Freed, Identifier, Outcome, ResendOutcome};
use super::children::Children;
use super::passing::{Passing, PassingPacket};
use super::{AGGREGATOR_ELEMENTS_MAX, AGGREGATORS_MAX, ATP_JOBS_MAX, AtpConfigError, WAYS_MAX};
use crate::machine::{
    Endpoint, Instant, JobAborted, JobProgress, Reason, Received, Summer, Transmit, Verdict,
};
use crate::transport::{Run, Sender, Turns};

/// What a switch is told when it starts; jobs change none of it (ATP §3.2, static infrastructure setup).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtpSwitchConfig {
    /// Number of aggregators, up to [`AGGREGATORS_MAX`] and as many as 4 GiB hold; with none, the switch only forwards.
    pub aggregators: u32,
    /// Elements of the longest fragment that an aggregator holds, as [`is_fragment`] allows; longer ones are forwarded.
    pub elements: u16,
    /// In how many aggregators a fragment looks for a place, from 1, the paper's, to [`WAYS_MAX`]: that of its index, and those whose numbers
    /// differ from it in the last bits. Of jobs that share a table more is summed here (docs/protocols/atp.md).
    pub ways: u8,
    /// How long after its last contribution an aggregator counts as left behind (§3.7).
    pub stale: Duration,
    /// Packets that wait in one of the switch's own queues before it marks congestion; `None` leaves that to the network.
    pub ecn_threshold_packets: Option<usize>,
}

/// A job's way through one switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchRoute<A> {
    /// The job.
    pub id: JobId,
    /// What its packets are tagged with.
    pub key: Key,
    /// How often it was set up.
    pub generation: Generation,
    /// The next switch towards the server, or the server.
    pub upstream: A,
    /// Which level's directions are this switch's.
    pub level: u8,
}

/// What happened at a switch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AtpSwitchStatistics {
    /// Packets that came. Those that were absorbed wait, or waited, in an aggregator.
    pub received: Received,
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
    /// Aggregators in use now.
    pub in_use: u32,
}

/// How a job fares at one switch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AtpSwitchProgress {
    /// Children that were heard of.
    pub children: u32,
    /// Fragments that were added in an aggregator, or began one.
    pub aggregations: u64,
    /// Fragments that found no aggregator.
    pub collisions: u64,
    /// Packets that went on towards the server.
    pub forwards: u64,
}

/// What waits to go on towards the server.
#[derive(Debug)]
enum Upward {
    /// The sum of a fragment, which is in its aggregator, under the header of the packet that came last.
    Sum(GradientHeader),
    Passing(PassingPacket),
}

#[derive(Debug)]
struct Job<A> {
    route: SwitchRoute<A>,
    /// By bit.
    children: Children<A>,
    up: VecDeque<Upward>,
    down: VecDeque<PassingPacket>,
    aborted: Option<AbortReason>,
    /// Whether the children are to be told so: one packet between two drains is enough.
    abort_pending: bool,
    in_line: bool,
    progress: AtpSwitchProgress,
}

/// A switch. `A` names a peer's address.
#[derive(Debug)]
pub struct AtpSwitch<A> {
    config: AtpSwitchConfig,
    table: AggregatorTable,
    passing: Passing,
    jobs: BTreeMap<JobId, Job<A>>,
    turns: Turns,
    events: VecDeque<JobAborted>,
    statistics: AtpSwitchStatistics,
}

impl<A: Copy + PartialEq> AtpSwitch<A> {
    /// A switch without jobs. All its aggregators' memory is taken here.
    ///
    /// # Panics
    /// When the configuration was not checked: the command line does that.
    #[must_use]
    pub fn new(config: AtpSwitchConfig) -> Self {
        let config = config.check().expect("a switch is checked by who starts it");
        Self {
            config,
            table: AggregatorTable::new(config.aggregators, config.elements, config.ways),
            passing: Passing::default(),
            jobs: BTreeMap::new(),
            turns: Turns::default(),
            events: VecDeque::new(),
            statistics: AtpSwitchStatistics::default(),
        }
    }

    /// What happened since the start.
    #[must_use]
    pub const fn statistics(&self) -> AtpSwitchStatistics {
        AtpSwitchStatistics { in_use: self.table.in_use(), ..self.statistics }
    }

    /// How a job fares here.
    #[must_use]
    pub fn progress(&self, job: JobId) -> Option<AtpSwitchProgress> {
        let children = |job: &Job<A>| job.children.addresses().len() as u32;
        self.jobs.get(&job).map(|job| AtpSwitchProgress { children: children(job), ..job.progress })
    }

    fn receive(&mut self, now: Instant, from: A, bytes: &[u8]) -> Result<Verdict, Reason> {
        let preamble = Preamble::parse(bytes)?;
        let verdict = self.receive_parsed(now, from, preamble, bytes);
        if let Some(job) = self.jobs.get_mut(&preamble.job) {
            self.turns.line_up(preamble.job, job);
        }
        verdict
    }

    fn receive_parsed(
        &mut self,
        now: Instant,
        from: A,
        preamble: Preamble,
        bytes: &[u8],
    ) -> Result<Verdict, Reason> {
        if preamble.shard != ShardId(0) {
            return Err(Reason::OutOfRange);
        }
        let job = self.jobs.get_mut(&preamble.job).ok_or(Reason::UnknownJob)?;
        match preamble.kind {
            Kind::Gradient => {}
            Kind::Abort => {
                let abort = Abort::parse(preamble, bytes)?;
                job.authenticate(preamble, bytes)?;
                if from != job.route.upstream {
                    return Err(Reason::Foreign);
                }
                if job.aborted.is_some() {
                    return Err(Reason::Aborted);
                }
                job.abort(abort.reason, &mut self.passing);
                self.table.forget(preamble.job);
                self.events.push_back(JobAborted { job: preamble.job, reason: abort.reason });
                return Ok(Verdict::Multicast);
            }
            _ => return Err(Reason::Unexpected),
        }
        let packet = GradientPacket::parse(preamble, bytes)?;
        job.authenticate(preamble, bytes)?;
        if packet.header.flags.is_ack {
            return self.parameters(now, from, &packet, bytes);
        }
        // Only a server's request has no payload.
        if packet.payload.is_empty() {
            return Err(Reason::ChunkLength);
        }
        let child = job.sender(from, &packet.header.directions)?;
        job.children.learn(child, from);
        if job.aborted.is_some() {
            job.abort_pending = true;
            return Err(Reason::Aborted);
        }
        self.fragment(now, &packet)
    }

    /// Parameters, or a request for original values: down to the children, and the aggregator is free (Figure 7, box 8).
    fn parameters(
        &mut self,
        now: Instant,
        from: A,
        packet: &GradientPacket<'_>,
        bytes: &[u8],
    ) -> Result<Verdict, Reason> {
        let job = self.jobs.get_mut(&packet.preamble.job).ok_or(Reason::UnknownJob)?;
        if from != job.route.upstream {
            return Err(Reason::Foreign);
        }
        if job.aborted.is_some() {
            return Err(Reason::Aborted);
        }
        let index = packet.header.aggregator_index;
        match self.table.release(
            now,
            self.config.stale,
            index,
            &Identifier::of(&packet.preamble, &packet.header),
        ) {
            Freed::None => {}
            Freed::Own => self.statistics.freed_by_parameters += 1,
            Freed::Stale => self.statistics.freed_stale += 1,
        }
        // A switch that lost its memory knows no children: they send again, and ask the server.
        if job.children.addresses().is_empty() {
            return Err(Reason::Unexpected);
        }
        let mark = self.config.is_congested(job.down.len());
        let waiting = self.passing.push(bytes.len(), |out| {
            out.copy_from_slice(bytes);
            if mark {
                GradientHeader::mark_ecn(out);
            }
        });
        job.down.push_back(waiting.ok_or(Reason::OutboxFull)?);
        Ok(Verdict::Multicast)
    }

    /// A fragment, or a sum of some, on its way up.
    fn fragment(&mut self, now: Instant, packet: &GradientPacket<'_>) -> Result<Verdict, Reason> {
        let GradientPacket { preamble, header, .. } = packet;
        let job = self.jobs.get_mut(&preamble.job).ok_or(Reason::UnknownJob)?;
        let level = usize::from(job.route.level);
        let Flags { resend, overflow, restore, .. } = header.flags;
        if overflow || restore || (resend && level > 0) {
            // Figure 17, box 3: above the first level a bit does not say which workers are in a sum, so nothing is merged. Original
            // values and parameters that are handed back are not for adding anywhere.
            if self.table.discard(header.aggregator_index, &Identifier::of(&packet.preamble, &packet.header))
            {
                self.statistics.freed_by_resend += 1;
            }
            return job.forward(&self.config, &mut self.passing, packet, Flags::default());
        }
        if resend {
            return match self.table.merge_resent(now, level, packet) {
                ResendOutcome::Pass => job.forward(&self.config, &mut self.passing, packet, Flags::default()),
                ResendOutcome::Flush { sum, stalled } => {
                    self.statistics.freed_by_resend += 1;
                    job.forward_partial(&self.config, &mut self.passing, packet, &sum, stalled)
                }
            };
        }
        match self.table.aggregate(now, level, packet) {
            Outcome::Held => {
                self.statistics.aggregations += 1;
                job.progress.aggregations += 1;
                Ok(Verdict::Absorb)
            }
            Outcome::Complete => {
                self.statistics.aggregations += 1;
                self.statistics.completed += 1;
                job.progress.aggregations += 1;
                Ok(job.forward_sum(&self.config, header))
            }
            Outcome::Duplicate => Err(Reason::Duplicate),
            // Figure 7, box 2. The flags keep switches further on from aggregating it and tell the server.
            Outcome::Collision => {
                self.statistics.collisions += 1;
                job.progress.collisions += 1;
                job.forward(
                    &self.config,
                    &mut self.passing,
                    packet,
                    Flags { resend: true, collision: true, ..Flags::default() },
                )
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

impl AtpSwitchConfig {
    /// Most aggregators of a switch whose aggregators hold so many elements: [`AGGREGATORS_MAX`], or as many as 4 GiB hold.
    #[must_use]
    pub const fn aggregators_max(elements: u16) -> u32 {
        let by_memory = AGGREGATOR_ELEMENTS_MAX / if elements == 0 { 1 } else { elements as u64 };
        if by_memory < AGGREGATORS_MAX as u64 { by_memory as u32 } else { AGGREGATORS_MAX }
    }

    /// The configuration, if every number is within its limit.
    ///
    /// # Errors
    /// The first number that is not.
    pub fn check(self) -> Result<Self, AtpConfigError> {
        if !is_fragment(self.elements.into()) {
            return Err(AtpConfigError::Elements(self.elements));
        }
        if self.aggregators > Self::aggregators_max(self.elements) {
            return Err(AtpConfigError::Aggregators(self.aggregators));
        }
        if !(1..=WAYS_MAX).contains(&self.ways) {
            return Err(AtpConfigError::Ways(self.ways));
        }
        Ok(self)
    }

    fn is_congested(&self, waiting: usize) -> bool {
        self.ecn_threshold_packets.is_some_and(|threshold| waiting >= threshold)
    }
}

impl<A: Copy + PartialEq> Job<A> {
    /// Whether a packet was written by a member of the job, of this generation.
    #[inline]
    fn authenticate(&self, preamble: Preamble, packet: &[u8]) -> Result<(), Reason> {
        if preamble.generation != self.route.generation {
            return Err(Reason::Generation);
        }
        if self.route.key.authenticates(packet) { Ok(()) } else { Err(Reason::Forged) }
    }

    /// The child that a fragment comes from, if it is meant for this level.
    fn sender(&self, from: A, directions: &Directions) -> Result<usize, Reason> {
        let level = self.route.level;
        let bitmap = directions.bitmaps[usize::from(level)];
        if directions.level != level
            || !bitmap.is_power_of_two()
            || directions.fan_in_degrees[usize::from(level)] == 0
        {
            return Err(Reason::OutOfRange);
        }
        if from == self.route.upstream {
            return Err(Reason::Foreign);
        }
        Ok(bitmap.trailing_zeros() as usize)
    }

    /// Sends a fragment on as it is, but for its level and for what `more` flags it has.
    fn forward(
        &mut self,
        config: &AtpSwitchConfig,
        passing: &mut Passing,
        packet: &GradientPacket<'_>,
        more: Flags,
    ) -> Result<Verdict, Reason> {
        let mut header = packet.header;
        header.flags.resend |= more.resend;
        header.flags.collision |= more.collision;
        self.pass(config, passing, header, packet.payload.len() / 4, |out| {
            out.copy_from_slice(packet.payload);
        })
    }

    /// Sends what an aggregator held, which is free again, in place of the packet's own value and bitmap (Figure 17, box 7).
    fn forward_partial(
        &mut self,
        config: &AtpSwitchConfig,
        passing: &mut Passing,
        packet: &GradientPacket<'_>,
        sum: &Aggregate<'_>,
        stalled: bool,
    ) -> Result<Verdict, Reason> {
        let mut header = self.header_of_sum(packet.header, sum);
        header.flags.stalled = stalled;
        self.pass(config, passing, header, sum.value.len(), |out| fanin_quant::write_le(sum.value, out))
    }

    /// Sends what the fragment's aggregator holds in place of its own value and bitmap (Figure 7, box 6).
    fn forward_sum(&mut self, config: &AtpSwitchConfig, header: &GradientHeader) -> Verdict {
        let header = self.next_level(config, *header);
        self.up.push_back(Upward::Sum(header));
        self.progress.forwards += 1;
        Verdict::Forward
    }

    fn pass(
        &mut self,
        config: &AtpSwitchConfig,
        passing: &mut Passing,
        header: GradientHeader,
        elements: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<Verdict, Reason> {
        let (key, preamble) = (self.route.key, self.preamble(Kind::Gradient));
        let header = self.next_level(config, header);
        let waiting = passing.push(fragment_packet_bytes(elements), |out| {
            GradientPacket::write(out, key, &preamble, &header, elements, fill);
        });
        self.up.push_back(Upward::Passing(waiting.ok_or(Reason::OutboxFull)?));
        self.progress.forwards += 1;
        Ok(Verdict::Forward)
    }

    fn header_of_sum(&self, mut header: GradientHeader, sum: &Aggregate<'_>) -> GradientHeader {
        header.directions.bitmaps[usize::from(self.route.level)] = sum.bitmap;
        header.flags.ecn |= sum.ecn;
        header.next_exponent = sum.next_exponent;
        header
    }

    fn next_level(&self, config: &AtpSwitchConfig, mut header: GradientHeader) -> GradientHeader {
        header.directions.level = self.route.level + 1;
        header.flags.ecn |= config.is_congested(self.up.len());
        header
    }

    const fn preamble(&self, kind: Kind) -> Preamble {
        Preamble {
            kind,
            job: self.route.id,
            generation: self.route.generation,
            worker: WorkerId::ALL,
            shard: ShardId(0),
        }
    }

    fn abort(&mut self, reason: AbortReason, passing: &mut Passing) {
        self.aborted = Some(reason);
        self.abort_pending = true;
        self.forget_waiting(passing);
    }

    fn forget_waiting(&mut self, passing: &mut Passing) {
        for waiting in self.up.drain(..) {
            if let Upward::Passing(packet) = waiting {
                passing.take(packet);
            }
        }
        for packet in self.down.drain(..) {
            passing.take(packet);
        }
    }

    /// Writes what goes to the children next into `train`, as long as it has one size.
    fn write_down(&mut self, passing: &mut Passing, train: &mut [u8]) -> Run {
        let mut run = Run::default();
        if let Some(reason) = self.aborted {
            let abort = Abort { preamble: self.preamble(Kind::Abort), reason };
            run.packet(ABORT_BYTES, train).copy_from_slice(&abort.to_bytes(self.route.key));
            self.abort_pending = false;
            return run;
        }
        while self.down.front().is_some_and(|packet| run.takes(packet.len(), train))
            && let Some(packet) = self.down.pop_front()
        {
            run.packet(packet.len(), train).copy_from_slice(passing.take(packet));
        }
        run
    }

    /// Writes what goes up next into `train`, as long as it has one size: sums straight from their aggregators.
    fn write_up(&mut self, table: &AggregatorTable, passing: &mut Passing, train: &mut [u8]) -> Run {
        let mut run = Run::default();
        let preamble = self.preamble(Kind::Gradient);
        while let Some(next) = self.up.front() {
            match next {
                Upward::Sum(header) => {
                    let identifier = Identifier::of(&preamble, header);
                    // Freed meanwhile, by a resend that took the sum along, or by parameters that made it worthless.
                    if let Some(sum) = table.sum(header.aggregator_index, &identifier) {
                        let elements = sum.value.len();
                        let bytes = fragment_packet_bytes(elements);
                        if !run.takes(bytes, train) {
                            break;
                        }
                        let header = self.header_of_sum(*header, &sum);
                        let out = run.packet(bytes, train);
                        GradientPacket::write(out, self.route.key, &preamble, &header, elements, |out| {
                            fanin_quant::write_le(sum.value, out);
                        });
                    }
                    self.up.pop_front();
                }
                Upward::Passing(packet) => {
                    if !run.takes(packet.len(), train) {
                        break;
                    }
                    if let Some(Upward::Passing(packet)) = self.up.pop_front() {
                        run.packet(packet.len(), train).copy_from_slice(passing.take(packet));
                    }
                }
            }
        }
        run
    }
}

impl<A: Copy + PartialEq> Sender for Job<A> {
    fn in_line(&mut self) -> &mut bool {
        &mut self.in_line
    }

    fn has_pending(&mut self) -> bool {
        !self.up.is_empty()
            || !self.down.is_empty()
            || self.abort_pending && !self.children.addresses().is_empty()
    }
}

impl<A: Copy + PartialEq> Endpoint for AtpSwitch<A> {
    type Address = A;
    type Event = JobAborted;

    fn handle_packet(&mut self, now: Instant, from: A, packet: &[u8]) -> Verdict {
        let verdict = self.receive(now, from, packet).unwrap_or_else(Verdict::Drop);
        self.statistics.received.count(verdict)
    }

    fn handle_timeout(&mut self, _now: Instant) {}

    fn poll_transmit(&mut self, _now: Instant, train: &mut [u8]) -> Option<Transmit<'_, A>> {
        loop {
            let job = self.turns.next(&mut self.jobs)?;
            let id = job.route.id;
            // Parameters first: they free workers, and aggregators further down.
            let goes_down = job.abort_pending || !job.down.is_empty();
            let run = if goes_down {
                job.write_down(&mut self.passing, train)
            } else {
                job.write_up(&self.table, &mut self.passing, train)
            };
            if run.is_empty() && !job.has_pending() {
                continue; // None of its sums was still there.
            }
            let job = self.jobs.get(&id)?;
            let up = core::slice::from_ref(&job.route.upstream);
            let to = if goes_down { job.children.addresses() } else { up };
            return run.to(to);
        }
    }

    fn poll_event(&mut self) -> Option<JobAborted> {
        self.events.pop_front()
    }

    /// Never: aggregators that were left behind are found by parameters whose set has no room (§3.7).
    fn poll_timeout(&self) -> Option<Instant> {
        None
    }
}

impl<A: Copy + PartialEq> Summer for AtpSwitch<A> {
    type Job = SwitchRoute<A>;
    type Error = AtpConfigError;

    fn add_job(&mut self, route: SwitchRoute<A>) -> Result<(), AtpConfigError> {
        if usize::from(route.level) >= LEVELS_MAX {
            return Err(AtpConfigError::Level(route.level));
        }
        if self.jobs.len() >= ATP_JOBS_MAX && !self.jobs.contains_key(&route.id) {
            return Err(AtpConfigError::Jobs);
        }
        self.remove_job(route.id);
        self.jobs.insert(
            route.id,
            Job {
                route,
                children: Children::new(CHILDREN_MAX),
                up: VecDeque::new(),
                down: VecDeque::new(),
                aborted: None,
                abort_pending: false,
                in_line: false,
                progress: AtpSwitchProgress::default(),
            },
        );
        Ok(())
    }

    /// Its aggregators are free.
    fn remove_job(&mut self, job: JobId) {
        if let Some(mut removed) = self.jobs.remove(&job) {
            removed.forget_waiting(&mut self.passing);
            self.table.forget(job);
            self.turns.remove(job);
        }
    }

    fn abort_job(&mut self, id: JobId, reason: AbortReason) {
        if let Some(job) = self.jobs.get_mut(&id)
            && job.aborted.is_none()
        {
            job.abort(reason, &mut self.passing);
            self.table.forget(id);
            self.turns.line_up(id, job);
        }
    }

    fn job_progress(&self, job: JobId) -> Option<JobProgress> {
        let AtpSwitchProgress { aggregations, collisions, .. } = self.progress(job)?;
        Some(JobProgress { aggregations, collisions, ..JobProgress::default() })
    }

    fn received(&self) -> Received {
        self.statistics.received
    }
}
