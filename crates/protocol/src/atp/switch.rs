//! The programmable switch of a rack, or of a higher level: a table of aggregators, and for each job the way up and down.

use alloc::collections::{BTreeMap, VecDeque};
use core::time::Duration;
use fanin_wire::{
    ABORT_BYTES, Abort, AbortReason, CHILDREN_MAX, Directions, FRAGMENT_ELEMENTS, Flags, Generation,
    GradientHeader, GradientPacket, JobId, Kind, LEVELS_MAX, Preamble, ShardId, WorkerId,
    fragment_packet_bytes,
};

use super::aggregator_table::{Aggregate, AggregatorTable, Freed, Identifier, Outcome, ResendOutcome};
use super::children::Children;
use super::outbox::Outbox;
use super::{AGGREGATOR_ELEMENTS_MAX, AGGREGATORS_MAX, ATP_JOBS_MAX, AtpConfigError};
use crate::machine::{
    Endpoint, Instant, JobAborted, JobProgress, Reason, Received, Summer, Transmit, Verdict,
};
use crate::transport::{Sender, Turns};

/// What a switch is told when it starts; jobs change none of it (ATP §3.2, static infrastructure setup).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtpSwitchConfig {
    /// Number of aggregators, up to [`AGGREGATORS_MAX`] and as many as 4 GiB hold; with none, the switch only forwards.
    pub aggregators: u32,
    /// Elements of the longest fragment that an aggregator holds, one of [`FRAGMENT_ELEMENTS`]; longer ones are forwarded.
    pub elements: u16,
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

#[derive(Debug)]
struct Job<A> {
    route: SwitchRoute<A>,
    /// By bit.
    children: Children<A>,
    up: Outbox,
    down: Outbox,
    aborted: Option<AbortReason>,
    in_line: bool,
    progress: AtpSwitchProgress,
}

/// A switch. `A` names a peer's address.
#[derive(Debug)]
pub struct AtpSwitch<A> {
    config: AtpSwitchConfig,
    table: AggregatorTable,
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
            table: AggregatorTable::new(config.aggregators, config.elements),
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
                job.check_generation(preamble)?;
                if from != job.route.upstream {
                    return Err(Reason::Foreign);
                }
                if job.aborted.is_some() {
                    return Err(Reason::Aborted);
                }
                job.abort(abort.reason);
                self.table.forget(preamble.job);
                self.events.push_back(JobAborted { job: preamble.job, reason: abort.reason });
                return Ok(Verdict::Multicast);
            }
            _ => return Err(Reason::Unexpected),
        }
        let packet = GradientPacket::parse(preamble, bytes)?;
        job.check_generation(preamble)?;
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
            job.queue_abort();
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
        let index = packet.header.aggregator_index;
        match self.table.release(now, self.config.stale, index, &Identifier::of(packet)) {
            Freed::None => {}
            Freed::Own => self.statistics.freed_by_parameters += 1,
            Freed::Stale => self.statistics.freed_stale += 1,
        }
        // A switch that lost its memory knows no children: they send again, and ask the server.
        if job.children.addresses().is_empty() {
            return Err(Reason::Unexpected);
        }
        let mark = self.config.is_congested(&job.down);
        let sent = job.down.push(bytes.len(), |out| {
            out.copy_from_slice(bytes);
            if mark {
                GradientHeader::mark_ecn(out);
            }
        });
        if sent { Ok(Verdict::Multicast) } else { Err(Reason::OutboxFull) }
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
            if self.table.discard(header.aggregator_index, &Identifier::of(packet)) {
                self.statistics.freed_by_resend += 1;
            }
            return job.forward(&self.config, packet, Flags::default());
        }
        if resend {
            return match self.table.merge_resent(now, level, packet) {
                ResendOutcome::Pass => job.forward(&self.config, packet, Flags::default()),
                ResendOutcome::Flush(partial) => {
                    self.statistics.freed_by_resend += 1;
                    job.forward_sum(&self.config, packet, &partial)
                }
            };
        }
        match self.table.aggregate(now, level, packet) {
            Outcome::Held => {
                self.statistics.aggregations += 1;
                job.progress.aggregations += 1;
                Ok(Verdict::Absorb)
            }
            Outcome::Complete(sum) => {
                self.statistics.aggregations += 1;
                self.statistics.completed += 1;
                job.progress.aggregations += 1;
                job.forward_sum(&self.config, packet, &sum)
            }
            Outcome::Duplicate => Err(Reason::Duplicate),
            // Figure 7, box 2. The flags keep switches further on from aggregating it and tell the server.
            Outcome::Collision => {
                self.statistics.collisions += 1;
                job.progress.collisions += 1;
                job.forward(&self.config, packet, Flags { resend: true, collision: true, ..Flags::default() })
            }
            // The server finds out who disagrees; another index would not help.
            Outcome::Unlike => job.forward(&self.config, packet, Flags { resend: true, ..Flags::default() }),
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
        if !FRAGMENT_ELEMENTS.contains(&usize::from(self.elements)) {
            return Err(AtpConfigError::Elements(self.elements));
        }
        if self.aggregators > Self::aggregators_max(self.elements) {
            return Err(AtpConfigError::Aggregators(self.aggregators));
        }
        Ok(self)
    }

    fn is_congested(&self, outbox: &Outbox) -> bool {
        self.ecn_threshold_packets.is_some_and(|threshold| outbox.len() >= threshold)
    }
}

impl<A: Copy + PartialEq> Job<A> {
    fn check_generation(&self, preamble: Preamble) -> Result<(), Reason> {
        if preamble.generation == self.route.generation { Ok(()) } else { Err(Reason::Generation) }
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
        packet: &GradientPacket<'_>,
        more: Flags,
    ) -> Result<Verdict, Reason> {
        let mut header = packet.header;
        header.flags.resend |= more.resend;
        header.flags.collision |= more.collision;
        self.send_up(config, packet.preamble, header, packet.payload.len() / 4, |out| {
            out.copy_from_slice(packet.payload);
        })
    }

    /// Sends what an aggregator holds in place of the packet's own value and bitmap (Figure 7, box 6; Figure 17, box 7).
    fn forward_sum(
        &mut self,
        config: &AtpSwitchConfig,
        packet: &GradientPacket<'_>,
        sum: &Aggregate<'_>,
    ) -> Result<Verdict, Reason> {
        let mut header = packet.header;
        header.directions.bitmaps[usize::from(self.route.level)] = sum.bitmap;
        header.flags.ecn = sum.ecn;
        header.next_exponent = sum.next_exponent;
        self.send_up(config, packet.preamble, header, sum.value.len(), |out| {
            fanin_quant::write_le(sum.value, out);
        })
    }

    fn send_up(
        &mut self,
        config: &AtpSwitchConfig,
        preamble: Preamble,
        mut header: GradientHeader,
        elements: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<Verdict, Reason> {
        header.directions.level = self.route.level + 1;
        header.flags.ecn |= config.is_congested(&self.up);
        let sent = self.up.push(fragment_packet_bytes(elements), |out| {
            GradientPacket::write(out, &preamble, &header, elements, fill);
        });
        if !sent {
            return Err(Reason::OutboxFull);
        }
        self.progress.forwards += 1;
        Ok(Verdict::Forward)
    }

    fn abort(&mut self, reason: AbortReason) {
        self.aborted = Some(reason);
        self.down = Outbox::default();
        self.queue_abort();
    }

    /// One packet between two drains is enough.
    fn queue_abort(&mut self) {
        if let Some(reason) = self.aborted
            && self.down.is_empty()
            && !self.children.addresses().is_empty()
        {
            let preamble = Preamble {
                kind: Kind::Abort,
                job: self.route.id,
                generation: self.route.generation,
                worker: WorkerId::ALL,
                shard: ShardId(0),
            };
            let abort = Abort { preamble, reason };
            self.down.push(ABORT_BYTES, |out| out.copy_from_slice(&abort.to_bytes()));
        }
    }
}

impl<A> Sender for Job<A> {
    fn in_line(&mut self) -> &mut bool {
        &mut self.in_line
    }

    fn has_pending(&mut self) -> bool {
        !self.up.is_empty() || !self.down.is_empty()
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
        let job = self.turns.next(&mut self.jobs)?;
        // Parameters first: they free workers, and aggregators further down.
        let (outbox, to) = if job.down.is_empty() {
            (&mut job.up, core::slice::from_ref(&job.route.upstream))
        } else {
            (&mut job.down, job.children.addresses())
        };
        let (bytes, segment_bytes) = outbox.fill(train)?;
        Some(Transmit { to, bytes, segment_bytes })
    }

    fn poll_event(&mut self) -> Option<JobAborted> {
        self.events.pop_front()
    }

    /// Never: aggregators that were left behind are found when their place is needed (§3.7).
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
        self.table.forget(route.id);
        self.turns.remove(route.id);
        self.jobs.insert(
            route.id,
            Job {
                route,
                children: Children::new(CHILDREN_MAX),
                up: Outbox::default(),
                down: Outbox::default(),
                aborted: None,
                in_line: false,
                progress: AtpSwitchProgress::default(),
            },
        );
        Ok(())
    }

    /// Its aggregators are free.
    fn remove_job(&mut self, job: JobId) {
        if self.jobs.remove(&job).is_some() {
            self.table.forget(job);
            self.turns.remove(job);
        }
    }

    fn abort_job(&mut self, id: JobId, reason: AbortReason) {
        if let Some(job) = self.jobs.get_mut(&id)
            && job.aborted.is_none()
        {
            job.abort(reason);
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
