//! A job's pool of slots (SwitchML Algorithms 1 and 3).
//!
//! A slot has two versions that are used in turn. While one gathers contributions the other keeps
//! the previous sum and answers a worker whose result was lost. No worker can be more than one
//! exchange behind: the next exchange completes only when every worker has contributed to it, which
//! it does only after it has the previous result (§4.5).
//!
//! Beyond the paper, a packet carries the full number of its exchange and not only its lowest bit,
//! the pool version. A duplicate that the network held back for two exchanges is recognised by it
//! instead of being added.

mod upstream;
mod version;

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;
use fanin_quant::{Exponent, Scale};
use fanin_wire::{
    ABORT_BYTES, Abort, AbortReason, Collective, Generation, Key, Kind, PLACES_MAX, Pattern, Preamble,
    SlotHeader, SlotIndex, SlotPacket, WireDtype, WorkerId, begin_bfloat16_payload, bfloat16_payload,
};

use self::upstream::Upward;
use self::version::{Version, versions};
use super::config::{Contributions, JobConfig, SwitchJob};
use super::exchange::is_after;
use super::native_sums::NativeSums;
use crate::machine::{Abortion, Instant, JobProgress, Packet, Reason, TableJob, Transmit, Verdict};
use crate::transport::Run;

#[derive(Debug)]
pub(super) struct SlotPool<A> {
    config: JobConfig,
    contributions: Contributions,
    /// Bitmap of all contributions.
    everyone: u64,
    /// Of a rack.
    upward: Option<Upward<A>>,
    slots: Vec<[Version; 2]>,
    /// When the first contribution came to what each slot gathers.
    began: Vec<Instant>,
    /// Whether a sum may still be handed back to each slot: in a resumed job, until the slot has
    /// completed an exchange here. Everybody who contributed to that one had the sum before it, so
    /// nobody can lack a sum that is not here. A rack may have restarted while its job runs: there
    /// every slot begins so.
    restorable: Vec<bool>,
    /// The sums: of slot `i`, version `v` at `(2 i + v) * sum_words`. Sums of bfloat16 are in fixed
    /// point; those of elements that travel as they are, as int8 or as int4 are the words of the payload.
    sums: Vec<i32>,
    native: NativeSums,
    /// The source of each worker's last packet.
    addresses: [Option<A>; PLACES_MAX as usize],
    /// The known addresses, in a row for [`Transmit`], and the same once more: all but one are in a
    /// row too.
    recipients: Vec<A>,
    /// Completed exchanges whose results are still to be sent: at most one a packet since the last
    /// drain.
    results: VecDeque<(SlotIndex, u32)>,
    /// Results that only one worker gets, and the others heard of in the train before: at most a
    /// train.
    for_roots: VecDeque<(WorkerId, SlotIndex, u32)>,
    /// Results that one worker asks for again, at most two a slot: more are dropped, and asked for
    /// once more.
    replies: VecDeque<(WorkerId, SlotIndex, u32)>,
    abortion: Abortion,
    /// Bitmap of workers to be told of the abortion.
    abort_pending: u64,
    completed: u64,
    retransmitted: u64,
    /// [`JobProgress::lateness`] in nanoseconds. It wraps, which a reader of counters takes for a
    /// restart.
    lateness_ns: [u64; PLACES_MAX as usize],
}

impl<A: Copy + PartialEq> SlotPool<A> {
    pub(super) fn new(job: SwitchJob<A>) -> Self {
        let native = NativeSums::new(&job);
        let SwitchJob { config, contributions, upstream } = job;
        let slots = usize::from(config.slots);
        Self {
            config,
            everyone: contributions.everyone(),
            upward: upstream.map(|upstream| Upward::new(upstream, slots)),
            slots: vec![[Version::UNUSED; 2]; slots],
            began: vec![Instant(0); slots],
            restorable: vec![config.resumed || upstream.is_some(); slots],
            sums: vec![0; 2 * slots * config.sum_words()],
            native,
            addresses: [None; PLACES_MAX as usize],
            recipients: Vec::with_capacity(2 * contributions.ranks.len()),
            contributions,
            results: VecDeque::with_capacity(2 * slots),
            for_roots: VecDeque::new(),
            replies: VecDeque::with_capacity(2 * slots),
            abortion: Abortion::None,
            abort_pending: 0,
            completed: 0,
            retransmitted: 0,
            lateness_ns: [0; PLACES_MAX as usize],
        }
    }

    /// Takes a packet that is authentic.
    pub(super) fn receive(&mut self, now: Instant, from: &A, packet: &Packet<'_>) -> Result<Verdict, Reason> {
        let Packet { preamble, bytes } = packet;
        match preamble.kind {
            Kind::Update | Kind::Restore | Kind::Query => {
                // Not moved out: see `Worker::receive`.
                let parsed = SlotPacket::parse(preamble, bytes);
                self.take_contribution(now, from, parsed.as_ref().map_err(|error| *error)?)
            }
            Kind::Result => self.take_result(*from, &SlotPacket::parse(preamble, bytes)?),
            Kind::Abort => self.take_abort(*from, &Abort::parse(*preamble, bytes)?),
            // The table of jobs has asked `takes`.
            Kind::Gradient | Kind::Block | Kind::Signal | Kind::Planned => Err(Reason::Unexpected),
        }
    }

    fn take_contribution(
        &mut self,
        now: Instant,
        from: &A,
        packet: &SlotPacket<'_>,
    ) -> Result<Verdict, Reason> {
        let SlotPacket { preamble, .. } = packet;
        let worker = preamble.worker;
        if worker.0 >= self.contributions.count() {
            return Err(Reason::OutOfRange);
        }
        self.check(packet)?;
        self.remember_address(worker, from);
        if !self.abortion.is_none() {
            self.abort_pending |= worker.bit();
            self.tell_abort_upward();
            return Err(Reason::Aborted);
        }
        match preamble.kind {
            Kind::Restore => self.restore(now, packet),
            Kind::Query => self.query(packet),
            _ => self.contribute(now, packet),
        }
    }

    /// Whether the job has such a slot and such a payload.
    fn check(&self, packet: &SlotPacket<'_>) -> Result<(), Reason> {
        let SlotPacket { preamble, header, payload } = packet;
        if header.slot.0 >= self.config.slots {
            return Err(Reason::OutOfRange);
        }
        // Only a job of bfloat16 has room for the elements of a bfloat16 payload, and one of int8
        // for the shortest of those. A job of int4 sums nothing as int8.
        let Collective { wire_dtype, pattern, .. } = header.collective;
        if let Pattern::Reduce(root) | Pattern::Broadcast(root) = pattern
            && u16::from(root.0) >= self.config.workers
        {
            return Err(Reason::OutOfRange);
        }
        // A rack does not know behind which of its places a root is.
        if pattern != Pattern::AllReduce && (self.is_rack() || self.has_racks()) {
            return Err(Reason::Unexpected);
        }
        let has_room = wire_dtype == self.config.wire_dtype
            || matches!(wire_dtype, WireDtype::SharedExponent | WireDtype::Native);
        let chunk_elements = header.collective.chunk_elements(self.config.elements.into());
        let is_right = packet.elements() == chunk_elements && has_room && preamble.kind != Kind::Query;
        if payload.is_empty() || is_right { Ok(()) } else { Err(Reason::ChunkLength) }
    }

    /// Algorithm 3, with exchange numbers in place of clearing the other version's bits.
    fn contribute(&mut self, now: Instant, packet: &SlotPacket<'_>) -> Result<Verdict, Reason> {
        let SlotPacket { preamble, header, payload } = packet;
        let everyone = self.everyone;
        let bfloat16 = bfloat16_of(packet);
        if self.upward.is_some() {
            self.recall(header)?;
        }
        let is_moved = matches!(header.collective.pattern, Pattern::Broadcast(_));
        // The length to which all packets of the exchange together come, whatever this one has.
        let elements = if is_moved {
            if payload.is_empty() == header.collective.pattern.contributes(preamble.worker) {
                return Err(Reason::ChunkLength);
            }
            header.collective.chunk_elements(self.config.elements.into())
        } else {
            packet.elements()
        };
        let (current, other) = versions(&mut self.slots, header);
        let new = current.collective.is_none() || is_after(header.exchange, current.exchange);
        if new {
            // The sum in this version may be overwritten only when nobody can ask for it any more.
            let in_turn = match other.collective {
                Some(_) => other.is_finished(everyone) && other.exchange.wrapping_add(1) == header.exchange,
                // A resumed job begins wherever it was; but what gathers already is not overtaken.
                None => header.exchange == 0 || (self.config.resumed && current.collective.is_none()),
            };
            // A rack was asked above.
            if !in_turn && self.upward.is_none() {
                return Err(Reason::Ahead);
            }
            *current = Version {
                worker_bitmap: 0,
                exchange: header.exchange,
                chunk: header.chunk,
                collective: Some(header.collective),
                elements: elements as u16,
                exponent: bfloat16.map_or(Exponent::ZERO, |(exponent, _)| exponent),
                next_exponent: header.next_exponent,
                first: preamble.worker,
                ..Version::UNUSED
            };
        } else if header.exchange != current.exchange {
            return Err(Reason::Stale);
        }
        if current.worker_bitmap & preamble.worker.bit() != 0 {
            self.retransmitted += 1;
            if !current.is_finished(everyone) {
                self.retransmit_upward(preamble.worker, header);
                return Err(Reason::Duplicate);
            }
            return self.queue_reply(preamble.worker, header);
        }
        if current.collective != Some(header.collective) || current.chunk != header.chunk {
            if let Some(collective) = current.collective {
                let rank = |place: WorkerId| self.contributions.ranks[usize::from(place.0)];
                let first = (rank(current.first), collective);
                let second = (rank(preamble.worker), header.collective);
                self.stop(Abortion::New(AbortReason::Mismatch { first, second }));
            }
            return Err(Reason::Aborted);
        }
        if usize::from(current.elements) != elements {
            return Err(Reason::ChunkLength);
        }
        if bfloat16.is_some_and(|(exponent, _)| exponent != current.exponent) {
            return Err(Reason::Exponent);
        }
        current.worker_bitmap |= preamble.worker.bit();
        current.last = preamble.worker;
        current.next_exponent = current.next_exponent.max(header.next_exponent);
        let complete = current.worker_bitmap == everyone;
        if new {
            self.began[header.slot.index()] = now;
        } else {
            let late_ns = now.0.saturating_sub(self.began[header.slot.index()].0);
            let lateness_ns = &mut self.lateness_ns[usize::from(preamble.worker.0)];
            *lateness_ns = lateness_ns.wrapping_add(late_ns);
        }
        let sum = sum_of(&mut self.sums, &self.config, header, payload);
        match (bfloat16, new) {
            _ if is_moved && payload.is_empty() => {}
            _ if is_moved => fanin_quant::store_le(sum, payload),
            (None, _) if is_gathered(&header.collective) && !payload.is_empty() => {
                self.native.contribute(preamble.worker, header, payload, (new, complete), sum);
            }
            (None, true) => fanin_quant::store_le(sum, payload),
            (None, false) => fanin_quant::add_le(sum, payload),
            (Some((exponent, elements)), _) => {
                let workers = self.config.workers.into();
                let scale = match self.contributions.racks & preamble.worker.bit() {
                    0 => Scale::fixed_point(exponent, workers),
                    // A sum of several.
                    _ => Scale::fixed_point_sum(exponent, workers),
                };
                let add = if new { fanin_quant::store_bf16 } else { fanin_quant::add_bf16 };
                add(sum, elements, &scale);
            }
        }
        if complete {
            if let Some(upward) = &mut self.upward {
                current.awaits = Some(Kind::Update);
                upward.push(Kind::Update, header);
                return Ok(Verdict::Forward);
            }
            self.restorable[header.slot.index()] = false;
            return Ok(self.complete(header));
        }
        Ok(Verdict::Absorb)
    }

    /// The sum of an exchange is there.
    fn complete(&mut self, header: &SlotHeader) -> Verdict {
        self.completed += 1;
        self.results.push_back((header.slot, header.exchange));
        Verdict::Multicast
    }

    /// Takes a sum back from a worker that has it, after this switch lost its memory. If only
    /// another worker got the sum, the workers that go on hand their contributions back.
    fn restore(&mut self, now: Instant, packet: &SlotPacket<'_>) -> Result<Verdict, Reason> {
        let SlotPacket { preamble, header, payload } = packet;
        if !self.config.resumed && self.upward.is_none() {
            return Err(Reason::Unexpected);
        }
        let everyone = self.everyone;
        let (current, _) = versions(&mut self.slots, header);
        if current.collective.is_some() {
            if current.exchange == header.exchange && current.worker_bitmap == everyone {
                self.retransmitted += 1;
                if !current.is_finished(everyone) {
                    self.push_upward(header);
                    return Err(Reason::Duplicate);
                }
                return self.queue_reply(preamble.worker, header);
            }
            if is_after(current.exchange, header.exchange) {
                return Err(Reason::Stale);
            }
        }
        if !self.restorable[header.slot.index()] {
            return Err(Reason::Unexpected);
        }
        if !payload.is_empty() && !header.collective.pattern.receives(preamble.worker) {
            return self.contribute(now, packet);
        }
        self.hold_sum(packet);
        if let Some(upward) = &mut self.upward {
            let (current, _) = versions(&mut self.slots, header);
            current.awaits = Some(Kind::Restore);
            upward.push(Kind::Restore, header);
            return Ok(Verdict::Forward);
        }
        Ok(self.complete(header))
    }

    /// Keeps a sum that was made elsewhere, in place of what gathers in its version.
    fn hold_sum(&mut self, packet: &SlotPacket<'_>) {
        let SlotPacket { preamble, header, payload } = packet;
        let bfloat16 = bfloat16_of(packet);
        let (current, _) = versions(&mut self.slots, header);
        if current.gathers(self.everyone) {
            self.native.release(header.slot);
        }
        *current = Version {
            worker_bitmap: self.everyone,
            exchange: header.exchange,
            chunk: header.chunk,
            collective: Some(header.collective),
            elements: packet.elements() as u16,
            exponent: bfloat16.map_or(Exponent::ZERO, |(exponent, _)| exponent),
            next_exponent: header.next_exponent,
            first: preamble.worker,
            last: preamble.worker,
            awaits: None,
        };
        let sum = sum_of(&mut self.sums, &self.config, header, payload);
        match bfloat16 {
            None => fanin_quant::store_le(sum, payload),
            Some((exponent, elements)) => {
                // A whole sum and not one worker's part. It is written as the same bits again.
                let scale = Scale::fixed_point_sum(exponent, self.config.workers.into());
                fanin_quant::store_bf16(sum, elements, &scale);
            }
        }
    }

    fn queue_reply(&mut self, worker: WorkerId, header: &SlotHeader) -> Result<Verdict, Reason> {
        if self.replies.len() >= 2 * self.slots.len() {
            return Err(Reason::Duplicate);
        }
        self.replies.push_back((worker, header.slot, header.exchange));
        Ok(Verdict::ReplyUnicast)
    }

    fn remember_address(&mut self, worker: WorkerId, from: &A) {
        let known = &mut self.addresses[usize::from(worker.0)];
        if known.as_ref() != Some(from) {
            *known = Some(*from);
            self.recipients.clear();
            for _ in 0..2 {
                self.recipients.extend(self.addresses.iter().flatten());
            }
        }
    }

    /// Everybody's address that is known, or everybody else's.
    fn all_but(&self, worker: Option<WorkerId>) -> &[A] {
        let known = self.recipients.len() / 2;
        let at =
            worker.map(|worker| usize::from(worker.0)).filter(|worker| self.addresses[*worker].is_some());
        match at {
            None => &self.recipients[..known],
            Some(worker) => {
                let before = self.addresses[..worker].iter().flatten().count();
                &self.recipients[before + 1..before + known]
            }
        }
    }

    pub(super) fn abort(&mut self, reason: AbortReason) {
        if self.abortion.is_none() {
            self.stop(Abortion::Known(reason));
        }
    }

    fn stop(&mut self, abortion: Abortion) {
        self.abortion = abortion;
        self.abort_pending = self.everyone;
        if let Some(upward) = &mut self.upward {
            upward.stop();
        }
        self.results.clear();
        self.for_roots.clear();
        self.replies.clear();
        // The reason is all that is still needed.
        self.slots = Vec::new();
        self.began = Vec::new();
        self.restorable = Vec::new();
        self.sums = Vec::new();
        self.native.forget();
    }

    pub(super) fn poll_transmit(&mut self, train: &mut [u8]) -> Option<Transmit<'_, A>> {
        let mut run = Run::default();
        if let Some(reason) = self.abortion.reason() {
            if let Some(upward) = self.upward.as_mut().filter(|upward| upward.has_abort()) {
                return upward.poll_abort(&self.config, reason, train);
            }
            let worker = self.abort_pending.trailing_zeros() as usize;
            self.abort_pending &= self.abort_pending.wrapping_sub(1);
            write_abort(&self.config, reason, WorkerId::ALL, run.packet(ABORT_BYTES, train));
            return run.to(self.addresses.get(worker)?.as_slice());
        }
        let mut sole_receiver = None;
        // A root's own results right behind those of the others: what comes in another order than
        // it was asked for in looks lost.
        while self.for_roots.is_empty() || !run.is_empty() {
            let Some(&(slot, exchange)) = self.results.front() else { break };
            let Some(version) = self.finished(slot, exchange) else {
                self.results.pop_front();
                continue;
            };
            let elements = version.elements_for(WorkerId::ALL);
            if !run.is_empty() && sole_receiver != version.sole_receiver() {
                break;
            }
            let Some(bytes) = version.fits(elements, &run, train) else { break };
            let part = run.packet(bytes, train);
            let to = (Kind::Result, WorkerId::ALL);
            write_sum(&self.config, &self.sums, slot, &version, to, part);
            sole_receiver = version.sole_receiver();
            self.for_roots.extend(sole_receiver.map(|root| (root, slot, exchange)));
            self.results.pop_front();
        }
        if !run.is_empty() {
            return run.to(self.all_but(sole_receiver));
        }
        if self.has_upward() {
            return self.poll_upward(train);
        }
        let worker = self.for_one().front()?.0;
        while let Some(&(to, slot, exchange)) = self.for_one().front() {
            if to != worker {
                break;
            }
            if let Some(version) = self.finished(slot, exchange) {
                let Some(bytes) = version.fits(version.elements_for(worker), &run, train) else { break };
                let part = run.packet(bytes, train);
                write_sum(&self.config, &self.sums, slot, &version, (Kind::Result, worker), part);
            }
            self.for_one().pop_front();
        }
        run.to(self.addresses[usize::from(worker.0)].as_slice())
    }

    /// The next of the results that go to one worker.
    fn for_one(&mut self) -> &mut VecDeque<(WorkerId, SlotIndex, u32)> {
        if self.for_roots.is_empty() { &mut self.replies } else { &mut self.for_roots }
    }

    /// The version that still holds the finished sum of this exchange.
    fn finished(&self, slot: SlotIndex, exchange: u32) -> Option<Version> {
        let version = self.slots[slot.index()][(exchange & 1) as usize];
        let finished = version.exchange == exchange && version.is_finished(self.everyone);
        finished.then_some(version)
    }

    pub(super) fn progress(&self) -> JobProgress {
        let everyone = self.everyone;
        let ranks = &self.contributions.ranks;
        let mut lateness = vec![Duration::ZERO; usize::from(self.config.workers)];
        for (rank, late_ns) in ranks.iter().zip(self.lateness_ns) {
            lateness[usize::from(rank.0)] = Duration::from_nanos(late_ns);
        }
        let mut progress = JobProgress {
            waiting_for: vec![0; lateness.len()],
            lateness,
            completed: self.completed,
            retransmitted: self.retransmitted,
            ..JobProgress::default()
        };
        for versions in &self.slots {
            let gathering = versions.iter().find(|version| version.gathers(everyone));
            let Some(version) = gathering else { continue };
            progress.in_use += 1;
            let mut missing = everyone & !version.worker_bitmap;
            while missing != 0 {
                let rank = ranks[missing.trailing_zeros() as usize];
                progress.waiting_for[usize::from(rank.0)] += 1;
                missing &= missing - 1;
            }
        }
        progress
    }
}

impl<A: Copy + PartialEq> TableJob for SlotPool<A> {
    #[inline]
    fn membership(&self) -> (Generation, Key) {
        (self.config.generation, self.config.key)
    }

    #[inline]
    fn takes(&self, kind: Kind) -> bool {
        match kind {
            Kind::Update | Kind::Restore | Kind::Query => true,
            Kind::Result => self.is_rack(),
            Kind::Abort => self.is_rack() || self.has_racks(),
            Kind::Gradient | Kind::Block | Kind::Signal | Kind::Planned => false,
        }
    }

    fn abortion(&mut self) -> &mut Abortion {
        &mut self.abortion
    }

    /// Whether [`SlotPool::poll_transmit`] would return something. Forgets what is no longer worth
    /// sending.
    fn has_pending(&mut self) -> bool {
        while let Some(&(slot, exchange)) = self.results.front() {
            if self.finished(slot, exchange).is_some() {
                break;
            }
            self.results.pop_front();
        }
        while let Some(&(worker, slot, exchange)) = self.for_one().front() {
            if self.finished(slot, exchange).is_some() && self.addresses[usize::from(worker.0)].is_some() {
                break;
            }
            self.for_one().pop_front();
        }
        while self.abort_pending != 0
            && self.addresses[self.abort_pending.trailing_zeros() as usize].is_none()
        {
            self.abort_pending &= self.abort_pending - 1;
        }
        self.abort_pending != 0 || !self.results.is_empty() || !self.for_one().is_empty() || self.has_upward()
    }
}

/// Whether contributions are kept until all are there.
fn is_gathered(collective: &Collective) -> bool {
    collective.wire_dtype.is_packed() || collective.wire_dtype == WireDtype::Native
}

/// The sum that a packet means, of as many words as a payload needs.
fn sum_of<'a>(sums: &'a mut [i32], config: &JobConfig, header: &SlotHeader, payload: &[u8]) -> &'a mut [i32] {
    let words = words_of(&header.collective, payload);
    let at = (2 * header.slot.index() + header.pool_version()) * config.sum_words();
    &mut sums[at..at + words]
}

/// Words of the sum of such payloads: an element of bfloat16 is added as an int32.
fn words_of(collective: &Collective, payload: &[u8]) -> usize {
    match collective.wire_dtype {
        WireDtype::SharedExponent | WireDtype::Int8 | WireDtype::Int4 | WireDtype::Native => {
            payload.len() / 4
        }
        WireDtype::Bfloat16 => bfloat16_payload(payload).map_or(0, |(_, elements)| elements.len() / 2),
    }
}

/// The exponent and the elements of a payload, where it is bfloat16.
fn bfloat16_of<'a>(packet: &SlotPacket<'a>) -> Option<(Exponent, &'a [u8])> {
    match packet.header.collective.wire_dtype {
        WireDtype::SharedExponent | WireDtype::Int8 | WireDtype::Int4 | WireDtype::Native => None,
        WireDtype::Bfloat16 => {
            bfloat16_payload(packet.payload).map(|(bits, elements)| (Exponent::from_bits(bits), elements))
        }
    }
}

/// Writes what a version holds as a packet of this kind, from or to this worker.
fn write_sum(
    config: &JobConfig,
    sums: &[i32],
    slot: SlotIndex,
    version: &Version,
    (kind, worker): (Kind, WorkerId),
    out: &mut [u8],
) {
    let Some(collective) = version.collective else { return };
    let preamble =
        Preamble { kind, job: config.id, generation: config.generation, worker, shard: config.shard };
    let header = SlotHeader {
        slot,
        next_exponent: version.next_exponent,
        exchange: version.exchange,
        chunk: version.chunk,
        collective,
    };
    let at = (2 * slot.index() + header.pool_version()) * config.sum_words();
    let elements = version.elements_for(worker).into();
    SlotPacket::write(out, config.key, &preamble, &header, elements, |payload| {
        let sum = &sums[at..at + config.sum_words()];
        match collective.wire_dtype {
            WireDtype::SharedExponent | WireDtype::Int8 | WireDtype::Int4 | WireDtype::Native => {
                fanin_quant::write_le(&sum[..payload.len() / 4], payload);
            }
            WireDtype::Bfloat16 if payload.is_empty() => {}
            WireDtype::Bfloat16 => {
                let elements = begin_bfloat16_payload(payload, version.exponent.bits());
                let scale = Scale::fixed_point(version.exponent, config.workers.into());
                let sum = &sum[..elements.len() / 2];
                fanin_quant::write_bf16(sum, &scale, elements);
                if kind == Kind::Update && version.exponent.finite().is_none() {
                    upstream::leave_finite_open(sum, elements);
                }
            }
        }
    });
}

fn write_abort(config: &JobConfig, reason: AbortReason, worker: WorkerId, out: &mut [u8]) {
    let preamble = Preamble {
        kind: Kind::Abort,
        job: config.id,
        generation: config.generation,
        worker,
        shard: config.shard,
    };
    out.copy_from_slice(&Abort { preamble, reason }.to_bytes(config.key));
}
