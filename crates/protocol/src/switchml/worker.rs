//! The worker: cuts tensors into chunks, keeps one packet in flight a slot, sends again what was
//! not answered (SwitchML Algorithms 2 and 4).
//!
//! All tensors of a job form one stream of chunks (Appendix B). Chunk `g` of the stream goes
//! through slot `g mod s`, so every worker finds the same slot for the same chunk without a word,
//! and the slots stay busy across tensors.
//!
//! A packet carries the exponent of the block that its slot carries next (§4.6). The next block may
//! not be there yet (the tensor after this one was not submitted, or this is the first). Then the
//! exponent is [`Exponent::UNKNOWN`], the maximum of all workers is so too, and they all spend one
//! exchange without payload on agreeing: a probe. Elements that travel as they are, as int8 or as
//! int4, and int32, need none.

#[cfg(test)]
mod tests;

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;
use fanin_quant::{Exponent, Scale};
use fanin_wire::{
    Collective, Generation, Kind, Operation, Pattern, Preamble, SlotHeader, SlotIndex, SlotPacket, WireDtype,
    WorkerId, begin_bfloat16_payload, bfloat16_payload,
};

use super::config::{JobConfig, WorkerPlan};
use super::exchange::{Rounder, is_after, packet_bytes, rounding_seed};
use super::in_flight::InFlight;
use super::window::{ANEW, Answered, Cause, Window};
use crate::machine::{
    Endpoint, Instant, Packet, Reason, Tensor, Transmit, Verdict, WorkerEvent, WorkerMachine,
    WorkerStatistics, packing,
};
use crate::transport::{Chunk, RetransmissionConfig, Run, Stream, WorkerCore, mix};

/// Slots that are sent again at a time while no result comes at all. Then somebody is late, and a
/// packet or two will find out when he is there; the whole window would only load the switch.
const STALLED_RETRANSMISSIONS: usize = 32;

/// A shard of one worker. `A` names the switch, `T` holds a tensor's memory.
#[derive(Debug)]
pub struct Worker<A, T> {
    core: WorkerCore<A, T>,
    config: JobConfig,
    /// Its place among those who send to the same switch: its rank, where that is the only one.
    worker: WorkerId,
    slots: Vec<Slot>,
    /// Payload of each slot's last result: the worker's own shadow copy. From it a switch that lost
    /// its memory gets the sum back, although the tensor may long be in other hands. If only
    /// another worker got the sum, it is this one's part of it.
    last_payloads: Vec<u8>,
    /// Slots whose packet is to be sent, each once. Sums that are handed back come first, then
    /// chunks in their order, so that workers whose windows differ send the same ones first.
    ready: VecDeque<SlotIndex>,
    in_flight: InFlight,
    window: Window,
    /// Slots in [`Phase::InDoubt`], in the order of their chunks.
    in_doubt: Vec<SlotIndex>,
    /// The first chunk of the stream that lacks its sum, or one before it.
    unsummed: u64,
    timeouts_only: bool,
    /// When a result came last, or the first packet left since the worker (again) began.
    last_progress: Option<Instant>,
    /// While nothing comes back: when to try again.
    stalled_until: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    /// The exchange that is in flight or comes next; as many are completed (wrapping).
    exchange: u32,
    /// The stream's chunk that the slot carries in it.
    chunk: u64,
    /// The exponent that all agreed on for that chunk.
    exponent: Exponent,
    phase: Phase,
    /// Header of the last result, `None` before the first.
    last: Option<SlotHeader>,
    /// Whether the last result had a payload.
    last_has_payload: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Nothing to send.
    Idle,
    /// Waits in `ready` for its first packet of the exchange.
    Ready,
    /// Sent once at `since`; a round trip can be measured.
    Sent { since: Instant },
    /// Sent once, and nothing was answered since for long: waits for what explains that.
    InDoubt,
    /// Sent more than once: which copy an answer answers is not known (Karn's rule).
    SentAgain,
    /// Hands the last sum back before its own exchange goes on.
    Restoring,
}

impl<A: Copy, T: Tensor> Worker<A, T> {
    /// A worker of an admitted job, which is `worker` to its switch.
    ///
    /// # Panics
    /// When the configuration was not checked, or the worker is not one of the job's: admission
    /// does that.
    #[must_use]
    pub fn new(config: JobConfig, worker: WorkerId, switch: A, retransmission: RetransmissionConfig) -> Self {
        let config = config.check().expect("a job is checked at admission");
        assert!(u16::from(worker.0) < config.workers, "place {} of {} workers", worker.0, config.workers);
        let slots = usize::from(config.slots);
        let slot = |index| Slot {
            exchange: 0,
            chunk: index,
            exponent: Exponent::UNKNOWN,
            phase: Phase::Idle,
            last: None,
            last_has_payload: false,
        };
        let stream = Stream::new(usize::from(config.elements), config.wire_dtype);
        Self {
            core: WorkerCore::new(stream, switch, retransmission),
            config,
            worker,
            slots: (0..u64::from(config.slots)).map(slot).collect(),
            last_payloads: vec![0; slots * config.payload_bytes_max()],
            ready: VecDeque::with_capacity(slots),
            in_flight: InFlight::new(config.slots),
            window: Window::new(config.window),
            in_doubt: Vec::new(),
            unsummed: 0,
            timeouts_only: false,
            last_progress: None,
            stalled_until: None,
        }
    }

    /// The paper's worker. Each packet has a timer of its own (Algorithm 4), losses are noticed by
    /// nothing else, and as many packets are on the way as there are slots, whatever is lost ("no
    /// explicit congestion control", §7). For comparisons only.
    #[must_use]
    pub fn with_timeouts_only(mut self) -> Self {
        self.timeouts_only = true;
        self
    }

    /// Forgets what is in flight.
    fn stop(&mut self) {
        self.ready.clear();
        self.in_doubt.clear();
        self.in_flight = InFlight::new(self.config.slots);
        self.window = Window::new(self.config.window);
        self.stalled_until = None;
        for slot in &mut self.slots {
            slot.phase = Phase::Idle;
        }
    }

    /// The preamble of the packets that it sends, but for those that hand a sum back.
    const fn preamble(&self) -> Preamble {
        Preamble {
            kind: Kind::Update,
            job: self.config.id,
            generation: self.config.generation,
            worker: self.worker,
            shard: self.config.shard,
        }
    }

    /// Queues a slot's packet.
    fn queue(&mut self, index: SlotIndex) {
        // Others wait for sums that are handed back.
        let turn = |index: &SlotIndex| {
            let slot = &self.slots[index.index()];
            (slot.phase != Phase::Restoring, slot.chunk)
        };
        // Nearly always the last one: results come in the order of the chunks.
        let before = self.ready.iter().rposition(|other| turn(other) < turn(&index));
        self.ready.insert(before.map_or(0, |at| at + 1), index);
    }

    /// Whether the window has room for the slot's packet. For the first chunk that lacks its sum,
    /// and for sums that are handed back, it always has: no workers wait for each other's windows.
    fn has_room_for(&mut self, index: SlotIndex) -> bool {
        let is_handed_back = self.slots[index.index()].phase == Phase::Restoring;
        if is_handed_back || self.in_flight.count() < self.window.size() {
            return true;
        }
        let slots = u64::from(self.config.slots);
        // A slot's chunk is its first without a sum.
        while self.slots[(self.unsummed % slots) as usize].chunk > self.unsummed {
            self.unsummed += 1;
        }
        self.slots[index.index()].chunk == self.unsummed
    }

    /// Makes an idle slot ready if the stream has a chunk for it.
    fn advance(&mut self, index: SlotIndex) {
        let slot = &mut self.slots[index.index()];
        slot.phase = if slot.chunk < self.core.stream.end() { Phase::Ready } else { Phase::Idle };
        if slot.phase == Phase::Ready {
            self.queue(index);
        }
    }

    fn take_result(&mut self, now: Instant, packet: &SlotPacket<'_>) -> Result<Verdict, Reason> {
        let SlotPacket { header, payload, .. } = packet;
        let index = header.slot;
        let slot = self.slots.get_mut(index.index()).ok_or(Reason::OutOfRange)?;
        match slot.phase {
            // The answer to a sum that was handed back: this worker has it already.
            Phase::Restoring if header.exchange == slot.exchange.wrapping_sub(1) => {
                self.in_flight.remove(index);
                self.progressed(now);
                // A retransmission may be due; the slot's own exchange takes its place.
                self.ready.retain(|queued| *queued != index);
                self.advance(index);
                return Ok(Verdict::Absorb);
            }
            _ if is_after(slot.exchange, header.exchange) => return Err(Reason::Stale),
            _ if header.exchange != slot.exchange => return Err(Reason::Ahead),
            Phase::Sent { .. } | Phase::InDoubt | Phase::SentAgain => {}
            // A sum of our exchange without our part cannot be.
            Phase::Idle | Phase::Ready | Phase::Restoring => return Err(Reason::Ahead),
        }
        let Some(mut place) = self.core.stream.locate(slot.chunk) else { return Err(Reason::Unexpected) };
        let probe = is_probe(slot.exponent, &place.collective());
        if header.collective != place.collective() || header.chunk != place.chunk() {
            return Err(Reason::Unexpected);
        }
        let receives = header.collective.pattern.receives(self.worker);
        let elements = if probe || !receives { 0 } else { place.chunk_elements() };
        if packet.elements() != elements {
            return Err(Reason::ChunkLength);
        }
        let bfloat16 = match header.collective.wire_dtype {
            WireDtype::Bfloat16 => bfloat16_payload(payload),
            WireDtype::SharedExponent | WireDtype::Int8 | WireDtype::Int4 | WireDtype::Native => None,
        };
        if bfloat16.is_some_and(|(exponent, _)| exponent != slot.exponent.bits()) {
            return Err(Reason::Exponent);
        }
        if let Phase::Sent { since } = slot.phase {
            // A probe is small and finds empty queues: it tells nothing of a window of full
            // packets.
            if !probe {
                self.core.round_trip.measure(now.since(since));
            }
            self.in_flight.answered(index);
        }
        let answered = match slot.phase {
            Phase::InDoubt => Answered::InDoubt,
            Phase::SentAgain => Answered::Again,
            _ => Answered::Once,
        };
        if !probe {
            let workers = u32::from(self.config.workers);
            let op = place.collective().op;
            let range = place.range();
            let at = index.index() * self.config.payload_bytes_max();
            if receives {
                // Nobody's memory is written that only says what it holds: it may be read-only.
                let is_told = header.collective.pattern != Pattern::Broadcast(self.worker);
                match (header.collective.wire_dtype, bfloat16) {
                    _ if !is_told => {}
                    (WireDtype::Native, _) => place.elements().copy_from(range, payload),
                    (wire_dtype @ (WireDtype::Int8 | WireDtype::Int4), _) => {
                        place.elements().unpack(packing(wire_dtype), range, payload);
                    }
                    (_, Some((_, sums))) => place.elements().decode(range, sums, workers, op),
                    _ => {
                        let scale = Scale::new(slot.exponent, workers);
                        place.elements().dequantize(range, payload, &scale, workers, op);
                    }
                }
                self.last_payloads[at..at + payload.len()].copy_from_slice(payload);
            } else {
                let bytes = header.collective.payload_bytes(place.chunk_elements());
                let last = &mut self.last_payloads[at..at + bytes];
                write_contribution(&mut place, &self.config, self.worker, slot.exponent, last);
            }
            slot.chunk += u64::from(self.config.slots);
            let finished = place.finish_chunk(now);
            // Not carried further where there is nothing: to move the whole of it would wait for
            // the sums to reach the cache.
            if finished.is_some() {
                self.core.finished(finished);
            }
        }
        slot.exponent = Exponent::from_bits(header.next_exponent);
        slot.exchange = slot.exchange.wrapping_add(1);
        slot.last = Some(*header);
        slot.last_has_payload = !probe;
        self.in_flight.remove(index);
        match answered {
            Answered::Once => {}
            // Its retransmission may be due but not sent yet.
            Answered::Again => self.ready.retain(|queued| *queued != index),
            Answered::InDoubt => self.in_doubt.retain(|doubted| *doubted != index),
        }
        self.progressed(now);
        if let Some(cause) = self.window.answered(answered) {
            self.explain(now, cause);
        }
        self.advance(index);
        while let Some(lost) = self.in_flight.overtaken(self.window.size()).filter(|_| !self.timeouts_only) {
            self.window.lost(self.in_flight.number(lost), self.in_flight.next_number());
            self.send_again(lost);
        }
        Ok(Verdict::Absorb)
    }

    fn progressed(&mut self, now: Instant) {
        self.last_progress = Some(now);
        self.stalled_until = None;
    }

    /// The slot that waits for an answer the longest, and since when: while answers come in the
    /// order of sending, since the last of them.
    fn waits_longest(&self) -> Option<(SlotIndex, Instant)> {
        let (index, sent) = self.in_flight.oldest()?;
        let overtaken = self.timeouts_only || self.in_flight.is_overtaken(index);
        Some((index, self.last_progress.filter(|_| !overtaken).map_or(sent, |last| sent.max(last))))
    }

    /// Whether the stream ends with what is in flight. Too few packets then follow a lost one to
    /// overtake it by the usual margin, and a timeout is many round trips.
    fn is_at_end(&self) -> bool {
        self.ready.is_empty()
            && self.in_flight.count() < self.config.slots.into()
            && self.stalled_until.is_none()
            && !self.window.doubts()
            && !self.timeouts_only
    }

    /// At a stream's end: the packet that waits longest, and when it is sent again, if another one
    /// overtook it.
    fn overtaken_at_end(&self) -> Option<(SlotIndex, Instant)> {
        let (index, sent) =
            self.in_flight.oldest().filter(|(index, _)| self.in_flight.is_overtaken(*index))?;
        Some((index, sent + self.core.round_trip.overtaken()?))
    }

    /// Sends the first chunks that are in flight again, and doubts the others: nothing was answered
    /// for long.
    fn doubt(&mut self) {
        let mut in_flight = Vec::new();
        while let Some((index, _)) = self.in_flight.oldest() {
            self.in_flight.remove(index);
            in_flight.push(index);
        }
        in_flight.sort_by_key(|index| self.slots[index.index()].chunk);
        for (number, index) in in_flight.into_iter().enumerate() {
            let slot = &mut self.slots[index.index()];
            match slot.phase {
                Phase::Sent { .. } if number >= ANEW as usize => {
                    slot.phase = Phase::InDoubt;
                    self.in_doubt.push(index);
                }
                _ => self.send_again(index),
            }
        }
    }

    /// Sends what is in doubt again, or waits for it as before.
    fn explain(&mut self, now: Instant, cause: Cause) {
        self.window.explained(cause);
        for index in core::mem::take(&mut self.in_doubt) {
            match cause {
                Cause::Loss | Cause::Unknown => self.send_again(index),
                Cause::Lateness => {
                    self.slots[index.index()].phase = Phase::SentAgain;
                    self.in_flight.push(index, now);
                }
            }
        }
    }

    /// Queues what is in flight in a slot once more.
    fn send_again(&mut self, index: SlotIndex) {
        self.in_flight.remove(index);
        let slot = &mut self.slots[index.index()];
        if slot.phase != Phase::Restoring {
            slot.phase = Phase::SentAgain;
        }
        self.queue(index);
        self.core.statistics.retransmissions += 1;
    }

    /// Writes the slot's packet into `run` if it fits; `None` when it belongs to another train.
    fn write(&mut self, now: Instant, index: SlotIndex, run: &mut Run, train: &mut [u8]) -> Option<()> {
        let slot = self.slots[index.index()];
        if slot.phase == Phase::Restoring {
            let header = slot.last?;
            let collective = header.collective;
            let size_class = usize::from(self.config.elements);
            let elements_sent = if slot.last_has_payload { collective.chunk_elements(size_class) } else { 0 };
            let bytes = packet_bytes(&collective, elements_sent);
            if !run.takes(bytes, train) {
                return None;
            }
            let preamble = Preamble { kind: Kind::Restore, ..self.preamble() };
            let at = index.index() * self.config.payload_bytes_max();
            let last = &self.last_payloads[at..at + collective.payload_bytes(elements_sent)];
            let out = run.packet(bytes, train);
            SlotPacket::write(out, self.config.key, &preamble, &header, elements_sent, |payload| {
                payload.copy_from_slice(last);
            });
            return Some(());
        }
        let place = self.core.stream.locate(slot.chunk)?;
        let (collective, chunk) = (place.collective(), place.chunk());
        let probe = is_probe(slot.exponent, &collective);
        let contributes = collective.pattern.contributes(self.worker);
        let elements_sent = if probe || !contributes { 0 } else { place.chunk_elements() };
        let bytes = packet_bytes(&collective, elements_sent);
        if !run.takes(bytes, train) {
            return None;
        }
        let announced = if probe { slot.chunk } else { slot.chunk + u64::from(self.config.slots) };
        let header = SlotHeader {
            slot: index,
            next_exponent: self.core.stream.exponent(announced).bits(),
            exchange: slot.exchange,
            chunk,
            collective,
        };
        let (key, preamble) = (self.config.key, self.preamble());
        let mut place = self.core.stream.locate(slot.chunk)?;
        place.sent(now);
        let (config, worker) = (&self.config, self.worker);
        SlotPacket::write(run.packet(bytes, train), key, &preamble, &header, elements_sent, |payload| {
            if !payload.is_empty() {
                write_contribution(&mut place, config, worker, slot.exponent, payload);
            }
        });
        Some(())
    }
}

/// Writes a chunk as this worker sends it.
#[inline]
fn write_contribution<T: Tensor>(
    place: &mut Chunk<'_, T>,
    config: &JobConfig,
    worker: WorkerId,
    exponent: Exponent,
    payload: &mut [u8],
) {
    let range = place.range();
    let (collective, chunk) = (place.collective(), place.chunk());
    match collective.wire_dtype {
        WireDtype::SharedExponent => {
            let scale = Scale::new(exponent, config.workers.into());
            place.elements().quantize(range, &scale, payload);
        }
        WireDtype::Bfloat16 => {
            let elements = begin_bfloat16_payload(payload, exponent.bits());
            place.elements().encode(range, elements);
        }
        WireDtype::Int8 | WireDtype::Int4 => {
            let seed = rounding_seed(Rounder::Worker(worker), config.shard, &collective, chunk);
            place.elements().pack(packing(collective.wire_dtype), range, seed, payload);
        }
        WireDtype::Native => place.elements().copy_to(range, payload),
    }
}

/// Whether the exchange only agrees on an exponent, because nobody knows it yet.
fn is_probe(exponent: Exponent, collective: &Collective) -> bool {
    exponent == Exponent::UNKNOWN && collective.has_exponents()
}

impl<A: Copy, T: Tensor> Endpoint for Worker<A, T> {
    type Address = A;
    type Event = WorkerEvent<T>;

    fn receive(&mut self, now: Instant, _from: &A, packet: &Packet<'_>) -> Result<Verdict, Reason> {
        self.core.check(&self.preamble(), self.config.key, packet)?;
        let Packet { preamble, bytes } = packet;
        if preamble.worker != self.worker && preamble.worker != WorkerId::ALL {
            return Err(Reason::OutOfRange);
        }
        match preamble.kind {
            Kind::Result => {
                // Not moved out: a move reads what was just written, and waits until the sums of
                // the packet before are in the cache.
                let parsed = SlotPacket::parse(preamble, bytes);
                self.take_result(now, parsed.as_ref().map_err(|error| *error)?)
            }
            Kind::Abort => {
                self.core.abort(packet)?;
                self.stop();
                Ok(Verdict::Absorb)
            }
            Kind::Update
            | Kind::Restore
            | Kind::Query
            | Kind::Gradient
            | Kind::Block
            | Kind::Signal
            | Kind::Planned => Err(Reason::Unexpected),
        }
    }

    fn count(&mut self, verdict: Verdict) -> Verdict {
        self.core.count(verdict)
    }

    /// Algorithm 4, lines 20 to 22.
    fn handle_timeout(&mut self, now: Instant) {
        if self.is_at_end() {
            while let Some((index, _)) = self.overtaken_at_end().filter(|(_, due)| *due <= now) {
                self.send_again(index);
            }
        }
        if self.poll_timeout().is_none_or(|due| due > now) {
            return;
        }
        let timeout = self.core.round_trip.timeout();
        let pause = self.last_progress.is_some_and(|last| now.since(last) >= timeout);
        let stalled = pause && !self.timeouts_only;
        self.core.round_trip.back_off(now);
        if stalled {
            // Places are the same behind like switches, and clocks are not, nor are shards.
            let JobConfig { id, shard, .. } = self.config;
            let own = [self.unsummed, id.0.into(), shard.0.into(), self.worker.0.into(), now.0];
            let own = own.into_iter().fold(0, |own, number| mix(own ^ number));
            let spread = self.core.round_trip.spread(own);
            self.stalled_until = Some(now + self.core.round_trip.timeout() + spread);
            if self.window.paused_again() {
                self.explain(now, Cause::Loss);
            } else if self.window.paused(self.in_flight.count(), self.in_flight.next_number()) {
                self.doubt();
                return;
            }
        }
        let at_most = if stalled { STALLED_RETRANSMISSIONS } else { usize::MAX };
        for _ in 0..at_most {
            let Some((index, since)) = self.waits_longest() else { break };
            if since + timeout > now {
                break;
            }
            if !stalled && !self.timeouts_only {
                self.window.lost(self.in_flight.number(index), self.in_flight.next_number());
            }
            self.send_again(index);
        }
    }

    fn poll_transmit(&mut self, now: Instant, train: &mut [u8]) -> Option<Transmit<'_, A>> {
        let mut run = Run::default();
        if self.window.doubts() && self.in_flight.count() == 0 && self.ready.is_empty() {
            self.explain(now, Cause::Unknown);
        }
        while let Some(&index) = self.ready.front() {
            if !self.has_room_for(index) || self.write(now, index, &mut run, train).is_none() {
                break;
            }
            self.ready.pop_front();
            self.in_flight.push(index, now);
            self.last_progress.get_or_insert(now);
            self.core.statistics.packets_sent += 1;
            let slot = &mut self.slots[index.index()];
            if slot.phase == Phase::Ready {
                slot.phase = Phase::Sent { since: now };
            }
        }
        run.to(self.core.peer())
    }

    fn poll_event(&mut self) -> Option<WorkerEvent<T>> {
        self.core.poll_event()
    }

    fn poll_timeout(&self) -> Option<Instant> {
        let (_, since) = self.waits_longest()?;
        let due = since + self.core.round_trip.timeout();
        let due = self.stalled_until.map_or(due, |until| due.max(until));
        let at_end = self.is_at_end().then(|| self.overtaken_at_end()).flatten();
        Some(at_end.map_or(due, |(_, at_end)| due.min(at_end)))
    }
}

impl<A: Copy, T: Tensor> WorkerMachine for Worker<A, T> {
    type Tensor = T;
    type Plan = WorkerPlan<A>;

    fn submit(&mut self, tensor: T, operation: impl Into<Operation>) {
        let begin = self.core.stream.end();
        self.core.submit(tensor, operation.into());
        if !self.core.is_running() {
            return;
        }
        let first_round = begin + u64::from(self.config.slots);
        for chunk in begin..self.core.stream.end().min(first_round) {
            let index = (chunk % u64::from(self.config.slots)) as u16;
            let slot = &mut self.slots[usize::from(index)];
            // A slot that is behind gets there by itself, result by result.
            if slot.chunk == chunk && slot.phase == Phase::Idle {
                slot.phase = Phase::Ready;
                self.queue(SlotIndex(index));
            }
        }
    }

    fn suspend(&mut self) -> Vec<u32> {
        self.core.suspend();
        self.stop();
        self.slots.iter().map(|slot| slot.exchange).collect()
    }

    fn resume(&mut self, _now: Instant, plan: WorkerPlan<A>) {
        if !self.core.resume(plan.switch) {
            return;
        }
        let JobConfig { slots, window, elements, wire_dtype, .. } = self.config;
        self.config = JobConfig { slots, window, elements, wire_dtype, ..plan.config };
        self.worker = plan.place;
        self.last_progress = None;
        for index in plan.restore {
            if let Some(slot) = self.slots.get_mut(index.index()).filter(|slot| slot.last.is_some()) {
                slot.phase = Phase::Restoring;
                self.queue(index);
            }
        }
        for index in 0..self.config.slots {
            if self.slots[usize::from(index)].phase == Phase::Idle {
                self.advance(SlotIndex(index));
            }
        }
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
