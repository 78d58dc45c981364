//! The worker. It sends its tensors' fragments in a sliding window, takes parameters in any order,
//! and sends again what was overtaken or not answered. It answers a server that needs original
//! values or lost its memory (ATP §3.6 to §3.8).
//!
//! All tensors of a job form one stream of fragments; a fragment's number in it is its sequence
//! number, and its *place* is that modulo the job's window. The parameters of a place's fragment
//! say which aggregator and which exponent the next one of the place uses. So all workers agree on
//! them without a word.

mod packets;
#[cfg(test)]
mod tests;
mod way;
mod window;

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;
use core::time::Duration;
use fanin_quant::Exponent;
use fanin_wire::{
    Flags, FragmentHeader, FragmentPacket, Generation, GradientHeader, Kind, Label, Operation, Participants,
    Preamble, ShardId, WorkerId, fragment_packet_bytes,
};

use super::config::{Hashing, JobConfig, Scaling, WorkerPlan};
use crate::machine::{
    Endpoint, Instant, Packet, Reason, Tensor, Transmit, Verdict, WorkerEvent, WorkerMachine,
    WorkerStatistics,
};
use crate::transport::{CongestionWindow, RetransmissionConfig, Run, Stream, WorkerCore, mix};
use packets::Outgoing;
pub use way::Way;
use window::{Standing, Window};

/// Fragments that a timeout sends again at once. If nothing came for a while, mostly somebody is
/// late: a few packets find out when he is there, and few further ones would be aggregated on the
/// way.
const STALLED_RETRANSMISSIONS: usize = 8;

/// A worker of a job. `A` names the rack's switch (or the server where there is none), `T` holds a
/// tensor's memory.
#[derive(Debug)]
pub struct Worker<A, T, D: Way<A>> {
    core: WorkerCore<A, T>,
    config: JobConfig,
    shard: ShardId,
    directions: D,
    /// Jobs side by side that take the same way, this one included.
    jobs: u16,
    window: Window,
    congestion: CongestionWindow,
    places: Vec<Place<D::Label>>,
    /// The parameters of each place's last finished fragment: the tensor may long be in other hands
    /// when a server that lost its memory asks.
    last_payloads: Vec<u8>,
    /// The packets to be sent again or handed back, each once.
    again: VecDeque<Outgoing>,
    /// Fragments that were sent by a former plan that reached further. They are sent again when they
    /// are within reach.
    beyond: Range<u64>,
    /// Nothing was heard in this generation, nothing is on the way, and there are parameters that
    /// others may lack. Server and switches that lost their memory must learn where the worker is,
    /// or they cannot ask.
    unheard: bool,
    /// When something came last that the server had not said before, or the worker (again) began.
    last_progress: Instant,
    progress: WorkerProgress,
}

#[derive(Clone, Copy, Debug)]
struct Place<L> {
    /// Aggregator and exponent of the fragment that is on the way or comes next.
    aggregator_index: u32,
    exponent: i16,
    /// The participants of the fragment before: who is not one of them does not know the exponent.
    told: Participants,
    /// Header of the last parameters.
    last: Option<FragmentHeader<L>>,
}

/// The position of a worker in its job's stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerProgress {
    /// The first fragment whose parameters are missing.
    pub expected: u64,
    /// The first that was not sent.
    pub next: u64,
    /// Fragments on the way.
    pub in_flight: u32,
    /// Fragments that may be on the way.
    pub congestion_window: u32,
    /// How often that was halved.
    pub window_halved: u64,
    /// Fragments sent with original values.
    pub originals_sent: u64,
    /// Fragments whose original values went before anybody asked: the sum could overflow (ATP
    /// §B.2), or they are tiny.
    pub proactive: u64,
    /// Parameters handed back to a server that lost its memory.
    pub restores_sent: u64,
}

impl<A: Copy + PartialEq, T: Tensor, D: Way<A>> Worker<A, T, D> {
    /// A worker of an admitted job: where it stands is in its directions.
    ///
    /// # Panics
    /// When the configuration was not checked: admission does that.
    #[must_use]
    pub fn new(
        config: impl Into<JobConfig>,
        directions: D,
        upstream: A,
        retransmission: RetransmissionConfig,
    ) -> Self {
        let config = config.into().check().expect("a job is checked at admission");
        let place = |place| Place {
            aggregator_index: config.aggregator_index(place),
            exponent: GradientHeader::STATIC_FACTOR,
            told: Participants::ALL,
            last: None,
        };
        let stream = Stream::even(usize::from(config.elements), config.wire_dtype);
        Self {
            core: WorkerCore::new(stream, upstream, retransmission),
            config,
            shard: ShardId(0),
            window: Window::new(config.window_max, directions.lanes()),
            congestion: CongestionWindow::new(
                fragment_packet_bytes::<D::Label>(usize::from(config.elements)),
                config.window_max.into(),
                directions.senders(config.workers),
                config.congestion_control,
            ),
            directions,
            jobs: 1,
            places: (0..u64::from(config.window_max)).map(place).collect(),
            last_payloads: vec![0; usize::from(config.window_max) * config.payload_bytes()],
            again: VecDeque::with_capacity(config.window_max.into()),
            beyond: 0..0,
            unheard: false,
            last_progress: Instant(0),
            progress: WorkerProgress::default(),
        }
    }

    /// Makes the window count packets of so many bytes, as the network does where they are longer
    /// than what they carry. A worker that has sent nothing yet is told.
    #[must_use]
    pub fn with_packet_bytes(mut self, bytes: usize) -> Self {
        let JobConfig { window_max, congestion_control, .. } = self.config;
        self.congestion = CongestionWindow::new(bytes, window_max.into(), self.senders(), congestion_control);
        self
    }

    /// Puts the worker into another shard of its job than the first.
    #[must_use]
    pub fn in_shard(self, shard: ShardId) -> Self {
        Self { shard, ..self }
    }

    /// Says how many jobs take the same way side by side, this one included. A worker that has sent
    /// nothing yet is told.
    #[must_use]
    pub fn beside(mut self, jobs: u16) -> Self {
        self.jobs = jobs;
        self.congestion.take_way(self.senders());
        self
    }

    /// The most windows that meet at one machine.
    fn senders(&self) -> u16 {
        self.directions.senders(self.config.workers).saturating_mul(self.jobs)
    }

    /// Puts a worker that was started again, and has no tensors yet, where its job is (ATP §A.3).
    /// Its first tensor is number `collective` of the job, whose fragment `fragment` has the
    /// sequence number `sequence`, the earliest that is not aggregated. The tensor keeps its own
    /// values before that: the parameters are with the other workers only.
    ///
    /// # Panics
    /// When the worker has tensors already, or the tensor would begin before the stream.
    pub fn begin_at(&mut self, sequence: u64, collective: u16, fragment: u32) {
        assert_eq!(self.window.next(), 0, "the worker has begun");
        self.core.stream.begin_at(sequence, collective, fragment);
        self.window.begin_at(sequence);
    }

    /// Hands the newest parameters back unasked.
    fn make_known(&mut self) {
        if self.unheard
            && let Some(sequence) = self.window.expected().checked_sub(1)
            && self.window.standing(sequence) == Standing::Finished
            && self.window.queue(sequence)
        {
            self.again.push_back(Outgoing::Restore(sequence));
        }
    }

    /// Where it stands.
    #[must_use]
    pub fn progress(&self) -> WorkerProgress {
        WorkerProgress {
            expected: self.window.expected(),
            next: self.window.next(),
            in_flight: self.window.in_flight(),
            congestion_window: self.congestion.size(),
            window_halved: self.congestion.halved(),
            ..self.progress
        }
    }

    /// Forgets what is to be sent again.
    fn stop(&mut self) {
        self.again.clear();
        self.beyond = 0..0;
        self.window.forget_queue();
    }

    /// Parameters slide the window, in order or not (ATP §3.6, "Worker Receiving Parameters").
    fn take_parameters(
        &mut self,
        now: Instant,
        packet: &FragmentPacket<'_, D::Label>,
    ) -> Result<Verdict, Reason> {
        let FragmentPacket { header, payload, .. } = packet;
        let sequence = header.sequence;
        let since = match self.window.standing(sequence) {
            Standing::Sent { since } => since,
            // Another worker lost them, and all get them again.
            Standing::Finished => return Err(Reason::Duplicate),
            Standing::Stale => return Err(Reason::Stale),
            Standing::Ahead => return Err(Reason::Ahead),
        };
        if packet.elements() != usize::from(self.config.elements) {
            return Err(Reason::ChunkLength);
        }
        let mut place = self.core.stream.locate(sequence).ok_or(Reason::Unexpected)?;
        let half = place.collective().half();
        if header.collective != place.collective()
            || header.fragment != place.chunk()
            || header.flags.half != half.is_some()
        {
            return Err(Reason::Unexpected);
        }
        let (range, participants) = (place.range(), place.participants());
        match half {
            Some(half) => place.elements().take_halves(half, range, payload),
            None => place.elements().narrow(range, payload),
        }
        let finished = place.finish_chunk(now);

        let index = self.window.place(sequence);
        let at = index * self.config.payload_bytes();
        self.last_payloads[at..at + payload.len()].copy_from_slice(payload);
        let place = &mut self.places[index];
        place.last = Some(*header);
        place.told = participants;
        place.aggregator_index = match self.config.hashing {
            Hashing::Hash => D::next_aggregator_index(header),
            Hashing::Linear | Hashing::Partition { .. } => {
                self.config.aggregator_index(sequence + u64::from(self.config.window_max))
            }
        };
        place.exponent = match Exponent::from_bits(header.next_exponent).finite() {
            Some(exponent) if self.config.scaling == Scaling::Dynamic => exponent,
            _ => GradientHeader::STATIC_FACTOR,
        };

        match since {
            Some(since) => self.core.round_trip.measure(now.since(since)),
            None => self.core.round_trip.answered_again(),
        }
        let lost = header.flags.resend;
        let was_overtaken = self.window.finish(sequence, lost);
        self.come_within_reach();
        self.last_progress = now;
        let doubt = self.window.doubts() && self.congestion.losses_tell(sequence);
        self.congestion.acknowledged(doubt);
        let next = self.window.next();
        if lost && was_overtaken {
            self.congestion.lost(sequence, next);
        }
        if header.flags.ecn {
            self.core.statistics.marked += 1;
            self.congestion.marked(sequence, next);
        }
        self.recover(sequence, lost);
        self.core.finished(finished);
        self.pass_over(now);
        Ok(Verdict::Absorb)
    }

    /// Goes by the fragments that are next and in which this worker takes no part.
    fn pass_over(&mut self, now: Instant) {
        if !self.core.is_running() {
            return;
        }
        loop {
            let sequence = self.window.next();
            let Some(fragment) = self.core.stream.locate(sequence) else { return };
            let participants = fragment.participants();
            if self.directions.takes_part(participants) || !self.window.pass_over() {
                return;
            }
            self.places[self.window.place(sequence)].told = participants;
            let finished = fragment.finish_chunk(now);
            self.core.passed_over(finished);
        }
    }

    /// The server needs original values (§3.8), or lost its memory: who has the parameters hands
    /// them back.
    fn answer_request(
        &mut self,
        now: Instant,
        packet: &FragmentPacket<'_, D::Label>,
    ) -> Result<Verdict, Reason> {
        if !packet.payload.is_empty() {
            return Err(Reason::ChunkLength);
        }
        let sequence = packet.header.sequence;
        let outgoing = match self.window.standing(sequence) {
            Standing::Finished => Outgoing::Restore(sequence),
            // Its timeout sends it again, not at the same time as the others' do: an answer by all
            // at once may be too much for a queue, which loses the same packets each time.
            Standing::Sent { since: None } if self.window.originals(sequence) => {
                return Err(Reason::Duplicate);
            }
            Standing::Sent { .. } => {
                self.window.set_originals(sequence);
                // What is before it is still to be sent again in time.
                if self.beyond.contains(&sequence) {
                    return Ok(Verdict::Absorb);
                }
                self.last_progress = now;
                Outgoing::Again(sequence)
            }
            Standing::Stale => return Err(Reason::Stale),
            Standing::Ahead => return Err(Reason::Ahead),
        };
        if self.window.queue(sequence) {
            self.again.push_back(outgoing);
        }
        Ok(Verdict::Absorb)
    }

    /// How much longer than its timeout it waits; most resends are not aggregated, so that fewer of
    /// them fit into a queue.
    fn spread(&self) -> Duration {
        // Each worker of a job on its own machines has one machine for each part, all with the same
        // place.
        let begin = mix(self.config.id.0.into()) ^ self.window.expected();
        self.core.round_trip.spread(self.directions.mixed(begin))
    }

    /// Queues a fragment that was sent once more, if the plan reaches it.
    fn send_again(&mut self, sequence: u64) {
        if !self.beyond.contains(&sequence) && self.window.queue(sequence) {
            self.again.push_back(Outgoing::Again(sequence));
            self.core.statistics.retransmissions += 1;
        }
    }

    /// The first fragment that may not be sent yet.
    fn end_of_reach(&self) -> u64 {
        self.window.expected().saturating_add(self.directions.reach())
    }

    /// Whether a fragment was sent, and has no parameters.
    fn is_unanswered(&self, sequence: u64) -> bool {
        matches!(self.window.standing(sequence), Standing::Sent { .. })
    }

    /// Sends again what was beyond the reach of the plan.
    fn come_within_reach(&mut self) {
        let end = self.end_of_reach().min(self.beyond.end);
        while self.beyond.start < end {
            let sequence = self.beyond.start;
            self.beyond.start += 1;
            if self.is_unanswered(sequence) {
                self.send_again(sequence);
            }
        }
    }

    /// Sends again what was overtaken by this one and others. A fragment for each that came is
    /// sent, so that a queue which lost some gets no more than leaves it, and two for one that was
    /// `mended` by sending it again. These go on with what was on the way at the last timeout,
    /// twice as much each round trip, as in a slow start after TCP's timeout (RFC 5681 §3.1).
    fn recover(&mut self, sequence: u64, mended: bool) {
        for _ in 0..1 + u32::from(mended) {
            if let Some(lost) = self.window.overtaken(sequence) {
                self.send_again(lost);
            } else if mended && let Some(unanswered) = self.window.still_unanswered() {
                self.send_again(unanswered);
            }
        }
    }

    /// The next packet. A packet that was queued and then answered is none any more.
    fn next_packet(&mut self) -> Option<Outgoing> {
        while let Some(&queued) = self.again.front() {
            let goes = match queued {
                Outgoing::Again(sequence) => self.is_unanswered(sequence),
                Outgoing::Restore(sequence) => self.window.standing(sequence) == Standing::Finished,
                Outgoing::First(_) => false,
            };
            if goes {
                return Some(queued);
            }
            self.again.pop_front();
        }
        let sequence = self.window.next();
        let has_room = self.window.has_room(self.congestion.size(), self.directions.reach());
        let goes = sequence < self.core.stream.end() && has_room;
        goes.then_some(Outgoing::First(sequence))
    }

    /// Writes a packet into `out` and counts it as sent.
    fn send(&mut self, now: Instant, outgoing: Outgoing, out: &mut [u8]) {
        self.core.statistics.packets_sent += 1;
        match outgoing {
            Outgoing::First(sequence) => {
                self.window.send_next(now, self.directions.lane(sequence));
                self.write_fragment(now, sequence, false, out);
                self.pass_over(now);
            }
            Outgoing::Again(sequence) => {
                self.again.pop_front();
                self.window.send_again(sequence, now);
                self.write_fragment(now, sequence, true, out);
            }
            Outgoing::Restore(sequence) => {
                self.again.pop_front();
                self.window.unqueue(sequence);
                self.progress.restores_sent += 1;
                self.write_parameters(sequence, out);
            }
        }
    }

    fn preamble(&self) -> Preamble {
        Preamble {
            kind: D::Label::KIND,
            job: self.config.id,
            generation: self.config.generation,
            worker: WorkerId::ALL,
            shard: self.shard,
        }
    }
}

impl<A: Copy + PartialEq, T: Tensor, D: Way<A>> Endpoint for Worker<A, T, D> {
    type Address = A;
    type Event = WorkerEvent<T>;

    fn receive(&mut self, now: Instant, from: &A, packet: &Packet<'_>) -> Result<Verdict, Reason> {
        self.core.check(&self.preamble(), self.config.key, packet)?;
        if *from != self.core.peer()[0] {
            return Err(Reason::Foreign);
        }
        self.unheard = false;
        let Packet { preamble, bytes } = *packet;
        match preamble.kind {
            kind if kind == D::Label::KIND => {
                let packet = FragmentPacket::parse(preamble, bytes)?;
                let Flags { is_ack, overflow, .. } = packet.header.flags;
                match (is_ack, overflow) {
                    (false, _) => Err(Reason::Unexpected),
                    (true, false) => self.take_parameters(now, &packet),
                    (true, true) => self.answer_request(now, &packet),
                }
            }
            Kind::Abort => {
                self.core.abort(packet)?;
                self.stop();
                Ok(Verdict::Absorb)
            }
            _ => Err(Reason::Unexpected),
        }
    }

    fn count(&mut self, verdict: Verdict) -> Verdict {
        self.core.count(verdict)
    }

    fn handle_timeout(&mut self, now: Instant) {
        if self.poll_timeout().is_none_or(|due| due > now) {
            return;
        }
        self.window.go_back();
        for _ in 0..STALLED_RETRANSMISSIONS {
            let Some(unanswered) = self.window.still_unanswered() else { break };
            self.send_again(unanswered);
        }
        if self.unheard {
            self.make_known();
            self.last_progress = now;
        }
        self.core.round_trip.back_off(now);
    }

    fn poll_transmit(&mut self, now: Instant, train: &mut [u8]) -> Option<Transmit<'_, A>> {
        if !self.core.is_running() {
            return None;
        }
        let mut run = Run::default();
        let mut to = None;
        while let Some(outgoing) = self.next_packet() {
            let bytes = self.packet_bytes(outgoing);
            let hop = self.directions.first_hop(outgoing.sequence());
            if !run.takes(bytes, train) || !run.is_empty() && hop != to {
                break;
            }
            to = hop;
            self.send(now, outgoing, run.packet(bytes, train));
        }
        run.to(match to {
            Some(hop) => self.directions.address(hop),
            None => self.core.peer(),
        })
    }

    fn poll_event(&mut self) -> Option<WorkerEvent<T>> {
        self.core.poll_event()
    }

    fn poll_timeout(&self) -> Option<Instant> {
        if !self.core.is_running() {
            return None;
        }
        let unheard = (self.unheard && self.window.expected() > 0).then_some(self.last_progress);
        let sent = self.window.expected_sent().or(unheard)?;
        Some(sent.max(self.last_progress) + self.core.round_trip.timeout() + self.spread())
    }
}

impl<A: Copy + PartialEq, T: Tensor, D: Way<A>> WorkerMachine for Worker<A, T, D> {
    type Tensor = T;
    type Plan = WorkerPlan<A, D>;

    fn submit(&mut self, tensor: T, operation: impl Into<Operation>) {
        self.core.submit(tensor, operation.into());
        self.pass_over(self.last_progress);
    }

    /// Nothing is told: server and switches ask for what they need.
    fn suspend(&mut self) -> Vec<u32> {
        self.core.suspend();
        self.stop();
        Vec::new()
    }

    /// Packets on the way are sent again, since nobody may have them any more.
    fn resume(&mut self, now: Instant, plan: WorkerPlan<A, D>) {
        if !self.core.resume(plan.upstream) {
            return;
        }
        self.stop();
        self.config = JobConfig { id: plan.id, key: plan.key, generation: plan.generation, ..self.config };
        self.directions = plan.directions;
        self.window.take_lanes(self.directions.lanes(), |sequence| self.directions.lane(sequence));
        self.last_progress = now;
        self.congestion.take_way(self.senders());
        let next = self.window.next();
        self.beyond = self.end_of_reach().min(next)..next;
        for sequence in self.window.expected()..next {
            if self.is_unanswered(sequence) {
                self.window.hold(sequence);
                self.send_again(sequence);
            }
        }
        self.unheard = self.again.is_empty();
        self.make_known();
        self.pass_over(now);
    }

    fn abandon(&mut self) -> impl Iterator<Item = T> {
        self.stop();
        self.core.abandon()
    }

    fn generation(&self) -> Generation {
        self.config.generation
    }

    fn outstanding(&self) -> usize {
        self.core.stream.outstanding()
    }

    fn statistics(&self) -> WorkerStatistics {
        self.core.statistics()
    }
}
