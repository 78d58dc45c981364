//! The worker: sends its tensors' fragments in a sliding window, takes parameters in any order, sends again what was
//! overtaken or not answered, and answers a server that needs original values or lost its memory (ATP §3.6 to §3.8).
//!
//! All tensors of a job form one stream of fragments; a fragment's number in it is its sequence number, and its *place* is
//! that modulo the job's window. The parameters of a place's fragment say which aggregator and which exponent the next one
//! of the place uses, so that all workers agree on them without a word.

#[cfg(test)]
mod tests;
mod window;

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;
use fanin_quant::{Exponent, Scale};
use fanin_wire::{
    Abort, Directions, Dtype, Flags, Generation, GradientHeader, GradientPacket, Kind, Op, Preamble, ShardId,
    WireDtype, WorkerId, fragment_packet_bytes,
};

use super::{AtpJobConfig, EXPONENT_UNKNOWN, Hashing, Overflow, Scaling, next_aggregator_index, unreadable};
use crate::transport::CongestionWindow;
use crate::worker::retransmission::RoundTrip;
use crate::worker::stream::Stream;
use crate::{
    Endpoint, Instant, Reason, RetransmissionConfig, Tensor, TensorTimes, Transmit, Verdict, WorkerEvent,
    WorkerStatistics,
};
use window::{Standing, Window};

/// Fragments that a timeout sends again at most. Nothing came for a while, so somebody is late: a few packets find out when he is
/// there, and every further one would be lost to aggregation on the way.
const STALLED_RETRANSMISSIONS: usize = 8;

/// One worker of an ATP job. `A` names the rack's switch (or the server where there is none), `T` holds a tensor's memory.
#[derive(Debug)]
pub struct AtpWorker<A, T> {
    config: AtpJobConfig,
    directions: Directions,
    upstream: [A; 1],
    retransmission: RetransmissionConfig,
    state: State,
    stream: Stream<T>,
    window: Window,
    congestion: CongestionWindow,
    places: Vec<Place>,
    /// The parameters of each place's last finished fragment: the tensor may long be in other hands when a server that lost
    /// its memory asks.
    last_payloads: Vec<u8>,
    /// Sequence numbers to send again, or whose parameters to hand back, each once.
    again: VecDeque<u64>,
    round_trip: RoundTrip,
    /// When something came last that the server had not said before, or the worker (again) began.
    last_progress: Instant,
    events: VecDeque<WorkerEvent<T>>,
    statistics: WorkerStatistics,
    progress: AtpWorkerProgress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    /// Between a lost server or switch and the one that takes over.
    Suspended,
    Aborted,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    /// Aggregator and exponent of the fragment that is on the way or comes next.
    aggregator_index: u32,
    exponent: i16,
    /// Header of the last parameters.
    last: Option<GradientHeader>,
}

/// Where a worker stands in its job's stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AtpWorkerProgress {
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
    /// Parameters handed back to a server that lost its memory.
    pub restores_sent: u64,
}

impl<A: Copy + PartialEq, T: Tensor> AtpWorker<A, T> {
    /// A worker of an admitted job: where it stands is in its directions.
    ///
    /// # Panics
    /// When the configuration was not checked: admission does that.
    #[must_use]
    pub fn new(
        config: AtpJobConfig,
        directions: Directions,
        upstream: A,
        retransmission: RetransmissionConfig,
    ) -> Self {
        let config = config.check().expect("a job is checked at admission");
        let place = |place| Place {
            aggregator_index: config.aggregator_index(place),
            exponent: GradientHeader::STATIC_FACTOR,
            last: None,
        };
        Self {
            config,
            directions,
            upstream: [upstream],
            retransmission,
            state: State::Running,
            stream: Stream::new(usize::from(config.elements), WireDtype::Int32),
            window: Window::new(config.window_max),
            congestion: CongestionWindow::new(
                fragment_packet_bytes(usize::from(config.elements)),
                config.window_max.into(),
                config.congestion_control,
            ),
            places: (0..u64::from(config.window_max)).map(place).collect(),
            last_payloads: vec![0; usize::from(config.window_max) * config.payload_bytes()],
            again: VecDeque::with_capacity(config.window_max.into()),
            round_trip: RoundTrip::new(retransmission),
            last_progress: Instant(0),
            events: VecDeque::new(),
            statistics: WorkerStatistics::default(),
            progress: AtpWorkerProgress::default(),
        }
    }

    /// Appends a tensor to the stream. Every worker of the job must submit alike tensors in the same order.
    ///
    /// # Panics
    /// When the tensor has more than `u32::MAX` elements: the owner splits those.
    pub fn submit(&mut self, mut tensor: T, op: Op) {
        if tensor.elements().count() == 0 {
            self.stream.skip();
            self.complete(tensor, None);
        } else {
            self.stream.push(tensor, op);
        }
    }

    /// The job's generation that it takes part in.
    #[must_use]
    pub const fn generation(&self) -> Generation {
        self.config.generation
    }

    /// Tensors submitted and not completed.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.stream.outstanding()
    }

    /// Stops sending and taking, because the server or the rack's switch is gone.
    pub fn suspend(&mut self) {
        if self.state == State::Running {
            self.state = State::Suspended;
        }
        self.again.clear();
        self.window.forget_queue();
    }

    /// Goes on in another generation: what is on the way is sent again, since nobody may have it any more. A worker that was
    /// aborted or abandoned stays so.
    pub fn resume(&mut self, now: Instant, generation: Generation, upstream: A) {
        if self.state == State::Aborted {
            return;
        }
        self.suspend();
        self.config.generation = generation;
        self.upstream = [upstream];
        self.state = State::Running;
        self.round_trip = RoundTrip::new(self.retransmission);
        self.last_progress = now;
        self.again.extend(self.window.unanswered());
        for sequence in &self.again {
            self.window.queue(*sequence);
        }
        self.statistics.retransmissions += self.again.len() as u64;
    }

    /// Gives everything outstanding back, undefined in part, and ends the worker.
    pub fn abandon(&mut self) -> impl Iterator<Item = T> + '_ {
        self.end();
        self.stream.drain()
    }

    /// Counters since the start.
    #[must_use]
    pub fn statistics(&self) -> WorkerStatistics {
        WorkerStatistics { smoothed_rtt: self.round_trip.smoothed(), ..self.statistics }
    }

    /// Where it stands.
    #[must_use]
    pub fn progress(&self) -> AtpWorkerProgress {
        AtpWorkerProgress {
            expected: self.window.expected(),
            next: self.window.next(),
            in_flight: self.window.in_flight(),
            congestion_window: self.congestion.size(),
            window_halved: self.congestion.halved(),
            ..self.progress
        }
    }

    fn end(&mut self) {
        self.suspend();
        self.state = State::Aborted;
    }

    fn complete(&mut self, tensor: T, times: Option<TensorTimes>) {
        self.statistics.completed += 1;
        self.events.push_back(WorkerEvent::Completed(tensor, times));
    }

    fn receive(&mut self, now: Instant, from: A, bytes: &[u8]) -> Result<Verdict, Reason> {
        let preamble = Preamble::parse(bytes).map_err(unreadable)?;
        if preamble.job != self.config.id {
            return Err(Reason::UnknownJob);
        }
        if from != self.upstream[0] {
            return Err(Reason::Foreign);
        }
        if preamble.generation != self.config.generation {
            return Err(Reason::Generation);
        }
        if preamble.shard != ShardId(0) {
            return Err(Reason::OutOfRange);
        }
        match self.state {
            State::Running => {}
            State::Suspended => return Err(Reason::Unexpected),
            State::Aborted => return Err(Reason::Aborted),
        }
        match preamble.kind {
            Kind::Gradient => {
                let packet = GradientPacket::parse(preamble, bytes).map_err(unreadable)?;
                let Flags { is_ack, overflow, .. } = packet.header.flags;
                match (is_ack, overflow) {
                    (false, _) => Err(Reason::Unexpected),
                    (true, false) => self.take_parameters(now, &packet),
                    (true, true) => self.answer_request(now, &packet),
                }
            }
            Kind::Abort => {
                let abort = Abort::parse(preamble, bytes).map_err(unreadable)?;
                self.end();
                self.events.push_back(WorkerEvent::Aborted(abort.reason));
                Ok(Verdict::Absorb)
            }
            Kind::Update | Kind::Result | Kind::Restore => Err(Reason::Unexpected),
        }
    }

    /// Parameters slide the window, in order or not (ATP §3.6, "Worker Receiving Parameters").
    fn take_parameters(&mut self, now: Instant, packet: &GradientPacket<'_>) -> Result<Verdict, Reason> {
        let GradientPacket { header, payload, .. } = packet;
        let sequence = header.sequence;
        let since = match self.window.standing(sequence) {
            Standing::Sent { since } => since,
            // Another worker lost them, and all get them again.
            Standing::Finished => return Err(Reason::Duplicate),
            Standing::Stale => return Err(Reason::Stale),
            Standing::Ahead => return Err(Reason::Ahead),
        };
        if payload.len() != self.config.payload_bytes() {
            return Err(Reason::ChunkLength);
        }
        let mut place = self.stream.locate(sequence).ok_or(Reason::Unexpected)?;
        if header.collective != place.collective() || header.fragment != place.chunk() {
            return Err(Reason::Unexpected);
        }
        let range = place.range();
        place.elements().narrow(range, payload);
        let finished = place.finish_chunk(now);

        let index = self.window.place(sequence);
        let at = index * self.config.payload_bytes();
        self.last_payloads[at..at + payload.len()].copy_from_slice(payload);
        let place = &mut self.places[index];
        place.last = Some(*header);
        place.aggregator_index = match self.config.hashing {
            Hashing::Hash => next_aggregator_index(header),
            Hashing::Linear => self.config.aggregator_index(sequence + u64::from(self.config.window_max)),
        };
        place.exponent = match Exponent::from_bits(header.next_exponent).finite() {
            Some(exponent) if self.config.scaling == Scaling::Dynamic => exponent,
            _ => GradientHeader::STATIC_FACTOR,
        };

        if let Some(since) = since {
            self.round_trip.measure(now.since(since));
        }
        self.window.finish(sequence);
        self.last_progress = now;
        self.congestion.acknowledged();
        if header.flags.ecn {
            self.congestion.congested(sequence, self.window.next());
        }
        while let Some(lost) = self.window.overtaken() {
            self.congestion.congested(lost, self.window.next());
            self.send_again(lost);
        }
        if let Some((tensor, times)) = finished {
            self.complete(tensor, Some(times));
        }
        Ok(Verdict::Absorb)
    }

    /// The server needs original values (§3.8), or lost its memory: who has the parameters hands them back.
    fn answer_request(&mut self, now: Instant, packet: &GradientPacket<'_>) -> Result<Verdict, Reason> {
        if !packet.payload.is_empty() {
            return Err(Reason::ChunkLength);
        }
        let sequence = packet.header.sequence;
        match self.window.standing(sequence) {
            Standing::Finished => {}
            Standing::Sent { .. } => {
                self.window.set_originals(sequence, true);
                self.last_progress = now;
            }
            Standing::Stale => return Err(Reason::Stale),
            Standing::Ahead => return Err(Reason::Ahead),
        }
        if self.window.queue(sequence) {
            self.again.push_back(sequence);
        }
        Ok(Verdict::Absorb)
    }

    /// Queues a fragment that is on the way once more.
    fn send_again(&mut self, sequence: u64) {
        if self.window.queue(sequence) {
            self.again.push_back(sequence);
            self.statistics.retransmissions += 1;
        }
    }

    /// What the next packet is, `None` when there is none.
    fn next_packet(&mut self) -> Option<Outgoing> {
        while let Some(&sequence) = self.again.front() {
            match self.window.standing(sequence) {
                Standing::Sent { .. } => return Some(Outgoing::Again(sequence)),
                Standing::Finished if self.restores.contains(sequence) => {
                    return Some(Outgoing::Restore(sequence));
                }
                // Its parameters came meanwhile.
                _ => {
                    self.window.unqueue(sequence);
                    self.again.pop_front();
                }
            }
        }
        let sequence = self.window.next();
        let goes = sequence < self.stream.end() && self.window.has_room(self.congestion.size());
        goes.then_some(Outgoing::First(sequence))
    }
}
