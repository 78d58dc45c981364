//! How ranks wait for each other: gates, which open unit by unit when everybody has arrived, and a
//! bell for each rank to sleep by.
//!
//! All of it lies in shared memory and is made of atomics. A rank that has to wait writes at each
//! gate what it waits for, looks once more, and sleeps on its bell. A rank that opens a gate rings
//! for those whose wish is fulfilled, and for nobody else. Nobody spins, and nobody holds a lock
//! that could die with him.

use crate::error::Submission;
use fanin_udp::{CollectiveKind, Loss};
use fanin_wire::{Dtype, LossBound, Op, Participants};
use rustix::thread::futex::{self, Flags, Timespec};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Most ranks of a machine that share a memory.
pub const RANKS_MAX: usize = 64;
/// Most places of a ring.
pub(crate) const SLOTS_MAX: usize = 8;
/// Number of gates.
pub(crate) const GATES: usize = 4;

/// All ranks have contributed to a block.
pub(crate) const CONTRIBUTED: usize = 0;
/// All columns have summed a block.
pub(crate) const SUMMED: usize = 1;
/// All columns' sums of a segment are there, of all machines.
pub(crate) const READY: usize = 2;
/// All ranks have read a segment.
pub(crate) const READ: usize = 3;

/// Nothing is waited for.
const NOTHING: u64 = u64::MAX;

/// Opens for one unit after the other, blocks or segments, when all parties have arrived there.
#[repr(C, align(128))]
pub(crate) struct Gate {
    /// Units that everybody has arrived at.
    open: AtomicU64,
    /// The ranks that arrived at the unit that has this place.
    arrivals: [AtomicU32; SLOTS_MAX],
    /// Up to which unit each rank would sleep. It is one more than the unit that it waits for, as
    /// [`Self::open`] counts; 0 and [`NOTHING`] are none.
    wanted: [AtomicU64; RANKS_MAX],
}

/// A rank, as the others see it.
#[repr(C, align(128))]
pub(crate) struct Seat {
    bell: AtomicU32,
    party: AtomicU32,
    process: AtomicU64,
    /// Units that it has arrived at, of each gate: whom the others wait for.
    reached: [AtomicU64; GATES],
    /// The collective of each of its blocks.
    submissions: [[AtomicU64; 5]; SLOTS_MAX],
    /// The losses of its column of each segment, between machines.
    losses: [[AtomicU64; 4]; SLOTS_MAX],
}

/// Whether a rank is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Party {
    Absent,
    Here,
    Left,
}

impl Gate {
    /// How many units it is open for.
    pub(crate) fn open(&self) -> u64 {
        // Sequentially consistent, here and below. A waiter looks after it has wished, and an
        // opener looks for wishes after it has opened: so one of them sees the other.
        self.open.load(Ordering::SeqCst)
    }

    /// Arrives at `unit`, whose ring has `slots` places, as one of `parties`. Returns the ranks to
    /// ring for.
    pub(crate) fn arrive(&self, unit: u64, slots: usize, parties: usize) -> impl Iterator<Item = usize> {
        let place = &self.arrivals[(unit % slots as u64) as usize];
        let is_last = place.fetch_add(1, Ordering::AcqRel) + 1 == parties as u32;
        let open = if is_last {
            // Before it opens: nobody arrives at the unit that has this place next while this one
            // is shut.
            place.store(0, Ordering::Relaxed);
            self.open.fetch_max(unit + 1, Ordering::SeqCst).max(unit + 1)
        } else {
            0
        };
        self.wanted.iter().enumerate().take(if is_last { RANKS_MAX } else { 0 }).filter_map(
            move |(rank, wanted)| {
                let until = wanted.load(Ordering::SeqCst);
                let fulfilled = until != 0 && until <= open;
                if fulfilled {
                    // Before the bell: a wish that is lost here was made by somebody who has not
                    // slept since, and will not now.
                    wanted.store(NOTHING, Ordering::SeqCst);
                }
                fulfilled.then_some(rank)
            },
        )
    }

    /// Asks that `rank` is rung for when it is open for `until` units.
    pub(crate) fn want(&self, rank: usize, until: u64) {
        self.wanted[rank].store(until, Ordering::SeqCst);
    }

    pub(crate) fn want_nothing(&self, rank: usize) {
        self.wanted[rank].store(NOTHING, Ordering::SeqCst);
    }
}

impl Seat {
    pub(crate) fn sit_down(&self, process: u64) {
        self.process.store(process, Ordering::Relaxed);
        self.party.store(1, Ordering::Release);
    }

    pub(crate) fn leave(&self) {
        self.party.store(2, Ordering::SeqCst);
    }

    pub(crate) fn party(&self) -> Party {
        match self.party.load(Ordering::SeqCst) {
            0 => Party::Absent,
            1 => Party::Here,
            _ => Party::Left,
        }
    }

    pub(crate) fn process(&self) -> u64 {
        self.process.load(Ordering::Relaxed)
    }

    pub(crate) fn reached(&self, gate: usize) -> u64 {
        self.reached[gate].load(Ordering::Acquire)
    }

    pub(crate) fn reach(&self, gate: usize, units: u64) {
        self.reached[gate].store(units, Ordering::Release);
    }

    /// The count of the bell now: [`Self::sleep`] returns at once when it has rung since.
    pub(crate) fn listen(&self) -> u32 {
        self.bell.load(Ordering::SeqCst)
    }

    pub(crate) fn ring(&self) {
        self.bell.fetch_add(1, Ordering::SeqCst);
        // It fails for an address that is none.
        let _ = futex::wake(&self.bell, Flags::empty(), 1);
    }

    /// Until it rings, for `most` at most. Returns early for no reason, too.
    pub(crate) fn sleep(&self, heard: u32, most: Duration) {
        let most = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: most.subsec_nanos().into() };
        let _ = futex::wait(&self.bell, Flags::empty(), heard, Some(&most));
    }

    /// Says which collective the rank's next block belongs to, before the rank arrives with it.
    pub(crate) fn submit(&self, slot: usize, submission: Submission) {
        let Submission { number, kind, root, elements, dtype, op, loss_bound, participants } = submission;
        let [a, b, c, d] = loss_bound.millionths().to_le_bytes();
        let kind = u64::from_le_bytes([kind as u8, root, dtype as u8, op as u8, a, b, c, d]);
        let [low, high] = [participants.0 as u64, (participants.0 >> 64) as u64];
        for (place, word) in self.submissions[slot].iter().zip([number, elements as u64, kind, low, high]) {
            place.store(word, Ordering::Relaxed);
        }
    }

    /// After it has arrived. `None` for what no rank writes.
    pub(crate) fn submission(&self, slot: usize) -> Option<Submission> {
        let [number, elements, kind, low, high] =
            [0, 1, 2, 3, 4].map(|word: usize| self.submissions[slot][word].load(Ordering::Relaxed));
        let [kind, root, dtype, op, bound @ ..] = kind.to_le_bytes();
        let kind = CollectiveKind::ALL.into_iter().find(|each| *each as u8 == kind)?;
        let dtype = Dtype::ALL.into_iter().find(|each| *each as u8 == dtype)?;
        let op = [Op::Sum, Op::Average].into_iter().find(|each| *each as u8 == op)?;
        let loss_bound = LossBound::from_millionths(u32::from_le_bytes(bound))?;
        let (elements, participants) =
            (elements as usize, Participants(u128::from(high) << 64 | u128::from(low)));
        Some(Submission { number, kind, root, elements, dtype, op, loss_bound, participants })
    }

    /// Says what its column of a segment lost, before the rank arrives with it. Sums over machines keep
    /// nobody's own values.
    pub(crate) fn lose(&self, slot: usize, loss: Loss) {
        let words = [loss.contributions, loss.lost, loss.unsummed, loss.rounds.into()];
        for (place, word) in self.losses[slot].iter().zip(words) {
            place.store(word, Ordering::Relaxed);
        }
    }

    /// After it has arrived.
    pub(crate) fn loss(&self, slot: usize) -> Loss {
        let [contributions, lost, unsummed, rounds] =
            [0, 1, 2, 3].map(|word: usize| self.losses[slot][word].load(Ordering::Relaxed));
        Loss { contributions, lost, unsummed, rounds: rounds as u32, ..Loss::default() }
    }
}
