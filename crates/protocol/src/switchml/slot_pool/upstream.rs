//! The upper half of a rack's slots (SwitchML §7). The sum of a slot goes to the upstream as one
//! contribution, in the same slot and of the same exchange, and what comes back from there is the
//! result.
//!
//! Nothing is timed here. A worker that waits sends again; a slot that waits for the upstream then
//! sends its sum there once more, and so on up, until somebody has the result. Only the worker that
//! contributed last moves it, so that no more copies go up than come from one of them.
//!
//! A rack that restarted while its job runs has forgotten its slots, and its upstream has not. A
//! slot goes on wherever its workers are, the latest of them having its way. An exchange that
//! somebody waits for may lack others' parts because they have its result already: then the rack
//! asks the upstream, which has it ([`Kind::Query`]).

use alloc::collections::VecDeque;
use fanin_wire::{
    ABORT_BYTES, Abort, AbortReason, Kind, Preamble, SLOT_HEADER_BYTES, SlotHeader, SlotIndex, SlotPacket,
    WorkerId,
};

use super::{SlotPool, Version, versions, write_abort, write_sum};
use crate::machine::{Abortion, Reason, Transmit, Verdict};
use crate::switchml::config::{JobConfig, Upstream};
use crate::switchml::exchange::is_after;
use crate::transport::Run;

/// The packets that a rack has to send to its upstream.
#[derive(Debug)]
pub(super) struct Upward<A> {
    address: [A; 1],
    place: WorkerId,
    /// Sums, and questions for them: at most two a slot.
    queue: VecDeque<(Kind, SlotHeader)>,
    queue_max: usize,
    /// Whether the upstream is to be told that the job cannot go on.
    abort: bool,
    /// Whether that came from there.
    told: bool,
}

impl<A: Copy> Upward<A> {
    pub(super) fn new(Upstream { address, place }: Upstream<A>, slots: usize) -> Self {
        let queue_max = 2 * slots;
        let queue = VecDeque::with_capacity(queue_max);
        Self { address: [address], place, queue, queue_max, abort: false, told: false }
    }

    /// Queues a slot's sum or a question for one. A packet that finds no room is sent again when a
    /// worker sends again.
    pub(super) fn push(&mut self, kind: Kind, header: &SlotHeader) {
        if self.queue.len() < self.queue_max {
            self.queue.push_back((kind, *header));
        }
    }

    /// The job is over.
    pub(super) fn stop(&mut self) {
        self.queue.clear();
        self.abort = !self.told;
    }

    pub(super) const fn has_abort(&self) -> bool {
        self.abort
    }

    pub(super) fn poll_abort(
        &mut self,
        config: &JobConfig,
        reason: AbortReason,
        train: &mut [u8],
    ) -> Option<Transmit<'_, A>> {
        self.abort = false;
        let mut run = Run::default();
        write_abort(config, reason, self.place, run.packet(ABORT_BYTES, train));
        run.to(&self.address)
    }
}

impl<A: Copy + PartialEq> SlotPool<A> {
    /// Whether it has an upstream.
    pub(super) const fn is_rack(&self) -> bool {
        self.upward.is_some()
    }

    /// Whether racks send to it.
    pub(super) const fn has_racks(&self) -> bool {
        self.contributions.racks != 0
    }

    /// Takes a result from the upstream: it is that of the slot here, too.
    pub(super) fn take_result(&mut self, from: A, packet: &SlotPacket<'_>) -> Result<Verdict, Reason> {
        let SlotPacket { preamble, header, .. } = packet;
        let Some(Upward { address: [address], place, .. }) = &self.upward else {
            return Err(Reason::Unexpected);
        };
        if from != *address {
            return Err(Reason::Foreign);
        }
        if preamble.worker != *place && preamble.worker != WorkerId::ALL {
            return Err(Reason::OutOfRange);
        }
        if !self.abortion.is_none() {
            return Err(Reason::Aborted);
        }
        self.check(packet)?;
        let everyone = self.everyone;
        let (current, other) = versions(&mut self.slots, header);
        match current.collective {
            Some(collective) if current.exchange == header.exchange => {
                if current.is_finished(everyone) {
                    return Err(Reason::Duplicate);
                }
                if collective != header.collective || current.chunk != header.chunk {
                    return Err(Reason::Unexpected);
                }
                if usize::from(current.elements) != packet.elements() {
                    return Err(Reason::ChunkLength);
                }
            }
            Some(_) if is_after(current.exchange, header.exchange) => return Err(Reason::Stale),
            // The rack's part was in it, from before it restarted.
            _ => {}
        }
        // An older exchange cannot be gathered any more.
        let is_over = other.collective.is_some() && is_after(header.exchange, other.exchange);
        if is_over && !other.is_finished(everyone) {
            self.forget(header.slot, header.exchange.wrapping_add(1));
        }
        self.hold_sum(packet);
        self.restorable[header.slot.index()] = false;
        Ok(self.complete(header))
    }

    /// Takes from the upstream, or from a rack below, that the job cannot go on.
    pub(super) fn take_abort(&mut self, from: A, abort: &Abort) -> Result<Verdict, Reason> {
        let Abort { preamble: Preamble { worker, .. }, reason } = *abort;
        let is_from_above = self.upward.as_ref().is_some_and(|upward| upward.address == [from]);
        if !is_from_above
            && (worker.0 >= self.contributions.count() || self.contributions.racks & worker.bit() == 0)
        {
            return Err(Reason::Unexpected);
        }
        if !self.abortion.is_none() {
            return Err(Reason::Aborted);
        }
        if let Some(upward) = &mut self.upward {
            upward.told = is_from_above;
        }
        self.stop(Abortion::New(reason));
        if !is_from_above {
            self.abort_pending &= !worker.bit();
        }
        Ok(Verdict::Absorb)
    }

    /// Tells the upstream once more, whose packet may be lost, that the job cannot go on.
    pub(super) fn tell_abort_upward(&mut self) {
        if let Some(upward) = &mut self.upward {
            upward.abort = !upward.told;
        }
    }

    /// Answers a rack's question for a sum, or asks on.
    pub(super) fn query(&mut self, packet: &SlotPacket<'_>) -> Result<Verdict, Reason> {
        let SlotPacket { preamble, header, .. } = packet;
        let everyone = self.everyone;
        let (current, other) = versions(&mut self.slots, header);
        if current.collective.is_some() && current.exchange == header.exchange {
            if current.is_finished(everyone) {
                self.retransmitted += 1;
                return self.queue_reply(preamble.worker, header);
            }
            if current.awaits.is_some() {
                self.push_upward(header);
                return Err(Reason::Duplicate);
            }
        }
        let is_over = |version: &Version| {
            version.collective.is_some()
                && version.is_finished(everyone)
                && is_after(version.exchange, header.exchange)
        };
        if is_over(current) || is_over(other) {
            return Err(Reason::Stale);
        }
        let Some(upward) = &mut self.upward else { return Err(Reason::Ahead) };
        upward.push(Kind::Query, header);
        Ok(Verdict::Forward)
    }

    /// Prepares a rack's slot for a contribution, as it may have forgotten what was before; or says
    /// why this one is not gathered. The latest of the workers has its way: it has the results of
    /// all exchanges before.
    pub(super) fn recall(&mut self, header: &SlotHeader) -> Result<(), Reason> {
        let everyone = self.everyone;
        let (current, other) = versions(&mut self.slots, header);
        let (current, other) = (*current, *other);
        let is_current =
            |version: &Version| version.collective.is_some() && version.exchange == header.exchange;
        if is_current(&current) && current.is_finished(everyone) {
            return Ok(());
        }
        for version in [current, other] {
            if version.collective.is_none() || is_current(&version) {
                continue;
            }
            let is_later = is_after(header.exchange, version.exchange);
            match version.is_finished(everyone) {
                true if is_later => {}
                // Its result came from the upstream, so that nobody can need an older one.
                true => return Err(Reason::Stale),
                // The worker has this result from before the rack restarted, and the others may
                // not. Or nobody needs it any more, and what the worker sends was summed then, too.
                false if version.awaits.is_some() && version.exchange.wrapping_add(1) == header.exchange => {
                    self.push_upward(&SlotHeader { exchange: version.exchange, ..*header });
                    self.ask_upward(header);
                    return Err(Reason::Ahead);
                }
                false if is_later => self.forget(header.slot, version.exchange),
                // Somebody is ahead, so that this one is complete, and the upstream has it.
                false => {
                    self.ask_upward(header);
                    return Err(Reason::Stale);
                }
            }
        }
        Ok(())
    }

    /// A worker sent again what the slot has and cannot answer.
    pub(super) fn retransmit_upward(&mut self, worker: WorkerId, header: &SlotHeader) {
        let (current, _) = versions(&mut self.slots, header);
        match current.awaits {
            Some(_) if current.last == worker => self.push_upward(header),
            // The workers that the slot lacks may have the result, from before the rack restarted.
            None if current.first == worker => self.ask_upward(header),
            _ => {}
        }
    }

    /// Sends what a slot waits for to the upstream once more.
    pub(super) fn push_upward(&mut self, header: &SlotHeader) {
        let (current, _) = versions(&mut self.slots, header);
        if let (Some(upward), Some(kind)) = (&mut self.upward, current.awaits) {
            upward.push(kind, header);
        }
    }

    /// Asks the upstream for a sum that may have been forgotten here.
    fn ask_upward(&mut self, header: &SlotHeader) {
        if let Some(upward) = &mut self.upward {
            upward.push(Kind::Query, header);
        }
    }

    /// Empties the version that holds this exchange, or would.
    fn forget(&mut self, slot: SlotIndex, exchange: u32) {
        let version = &mut self.slots[slot.index()][(exchange & 1) as usize];
        if version.gathers(self.everyone) {
            self.native.release(slot);
        }
        *version = Version::UNUSED;
    }

    /// Whether there is something to send up. Forgets what is no longer worth sending.
    pub(super) fn has_upward(&mut self) -> bool {
        let Self { upward: Some(upward), slots, .. } = self else { return false };
        while let Some((kind, header)) = upward.queue.front() {
            if *kind == Kind::Query || waits(slots, header).is_some() {
                return true;
            }
            upward.queue.pop_front();
        }
        upward.abort
    }

    /// The next train to the upstream.
    pub(super) fn poll_upward(&mut self, train: &mut [u8]) -> Option<Transmit<'_, A>> {
        let Self { upward: Some(upward), slots, config, sums, .. } = self else { return None };
        let mut run = Run::default();
        while let Some((kind, header)) = upward.queue.front() {
            if *kind == Kind::Query {
                if !run.takes(SLOT_HEADER_BYTES, train) {
                    break;
                }
                let preamble = Preamble {
                    kind: Kind::Query,
                    job: config.id,
                    generation: config.generation,
                    worker: upward.place,
                    shard: config.shard,
                };
                let out = run.packet(SLOT_HEADER_BYTES, train);
                SlotPacket::write(out, config.key, &preamble, header, 0, |_| {});
            } else if let Some(version) = waits(slots, header) {
                let Some(bytes) = version.fits(version.elements, &run, train) else { break };
                let part = run.packet(bytes, train);
                write_sum(config, sums, header.slot, &version, (*kind, upward.place), part);
            }
            upward.queue.pop_front();
        }
        run.to(&upward.address)
    }
}

/// The version that waits for the upstream's answer to this exchange.
fn waits(slots: &[[Version; 2]], header: &SlotHeader) -> Option<Version> {
    let version = slots[header.slot.index()][header.pool_version()];
    (version.exchange == header.exchange && version.awaits.is_some()).then_some(version)
}

/// In a block that holds no values but classes, an element that is finite everywhere reads as a NaN
/// once it is known to be. In a rack it is not.
pub(super) fn leave_finite_open(sum: &[i32], elements: &mut [u8]) {
    for (_, element) in sum.iter().zip(elements.as_chunks_mut::<2>().0).filter(|(classes, _)| **classes == 0)
    {
        *element = [0; 2];
    }
}
