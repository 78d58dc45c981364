//! A switch's aggregators: one table that all jobs share, first come, first served (ATP §3.3,
//! Figure 6; §3.5, Figure 7; §A.1, Figure 17). No packets are read or written here. `B` is a set of
//! contributors.
//!
//! The paper's fragment has one aggregator, that of its index. Here the table is set-associative,
//! as caches are: a fragment takes any that is free of a few neighbours. With one way, that is the
//! paper's.

use alloc::vec;
use alloc::vec::Vec;
use core::ops::{BitAnd, BitOr};
use core::time::Duration;
use fanin_wire::{Collective, FragmentHeader, FragmentPacket, Generation, JobId, Preamble};

use crate::machine::Instant;
use crate::transport::mix;

/// Fragments that a table remembers to have collided: several windows.
const COLLIDED_MAX: usize = 8192;

/// A set of contributors to a sum.
pub trait Bits:
    Copy + PartialEq + Default + core::fmt::Debug + BitAnd<Output = Self> + BitOr<Output = Self>
{
}

impl<B> Bits for B where
    B: Copy + PartialEq + Default + core::fmt::Debug + BitAnd<Output = Self> + BitOr<Output = Self>
{
}

/// A fragment's part in the sum of an aggregator, as the switch's protocol has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part<B> {
    /// The aggregator that it hashes to.
    pub(crate) index: u32,
    /// The contributor's bit.
    pub(crate) bit: B,
    /// How many the sum waits for.
    pub(crate) fan_in_degree: u8,
    /// The participants of the fragment, where a protocol has such sets.
    pub(crate) participants: B,
    /// Fragments of a job that are so far apart are never on the way at once: if aggregators are a
    /// job's own, the later one takes the earlier one's. None if the content of an aggregator stays
    /// there until it is freed.
    pub(crate) window: Option<u64>,
}

/// The fragment that an aggregator serves: ATP's identifier fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identifier {
    pub(super) job: JobId,
    pub(super) generation: Generation,
    pub(super) sequence: u64,
}

impl Identifier {
    pub(super) const fn of<L>(preamble: &Preamble, header: &FragmentHeader<L>) -> Self {
        Self { job: preamble.job, generation: preamble.generation, sequence: header.sequence }
    }

    /// Whether it is a window before another fragment of its job, or further.
    const fn precedes(&self, other: &Self, window: u64) -> bool {
        self.job.0 == other.job.0
            && self.generation.0 == other.generation.0
            && self.sequence.saturating_add(window) <= other.sequence
    }
}

/// The properties that all fragments in an aggregator share: adding unlike ones would give numbers
/// that mean nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Likeness<B> {
    collective: Collective,
    fragment: u32,
    exponent: i16,
    fan_in_degree: u8,
    participants: B,
    payload_bytes: usize,
}

/// An aggregator without its value (Figure 6).
#[derive(Clone, Copy, Debug)]
struct Aggregator<B> {
    identifier: Identifier,
    likeness: Likeness<B>,
    bitmap: B,
    counter: u8,
    /// Those who sent it again while it was here.
    asked: B,
    ecn: bool,
    next_exponent: i16,
    timestamp: Instant,
}

/// An aggregator's sum, as it is sent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Aggregate<'a, B> {
    pub(super) bitmap: B,
    pub(super) ecn: bool,
    pub(super) next_exponent: i16,
    pub(super) value: &'a [i32],
}

/// The fate of a fragment.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It is in its aggregator, which waits for more.
    Held,
    /// It was in its aggregator before.
    Duplicate,
    /// It was the last one. The sum stays until the parameters come: [`AggregatorTable::sum`].
    Complete,
    /// Its aggregators serve other fragments, or there is none.
    Collision,
    /// Its aggregator holds something under the same number that is not to be added to it.
    Unlike,
    /// An aggregator of its set serves the fragment of its place a window later: all workers have
    /// this one's parameters, or will be told by the server. A fragment that is sent again often
    /// meets the next turn so; there is room for it, and counted as a collision it would say that
    /// there is not.
    Succeeded,
}

/// The fate of a fragment that was sent again.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ResendOutcome<'a, B> {
    /// No aggregator has any of it.
    Pass,
    /// It was the one that was lost.
    Complete,
    /// The sum is whole, and was sent on: it may be lost, or its parameters.
    Again,
    /// It was in already. The missing one completes the sum, or the sum was just sent.
    Duplicate,
    /// Its whole sum did not help: the server may have a part of it, and cannot add it. The
    /// aggregator is free.
    GivenUp,
    /// This is what there was, with the fragment in it; the aggregator is free.
    Flush {
        sum: Aggregate<'a, B>,
        /// The fragment was in it, and others were not: it was not lost, and no sum of it either.
        stalled: bool,
    },
}

/// Which aggregator a parameter packet freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Freed {
    None,
    /// The aggregator of its fragment.
    Own,
    /// An aggregator that somebody left behind.
    Stale,
}

/// The table.
#[derive(Debug)]
pub(super) struct AggregatorTable<B> {
    aggregators: Vec<Option<Aggregator<B>>>,
    /// The values, `elements` for each aggregator.
    values: Vec<i32>,
    elements: usize,
    ways: u8,
    in_use: u32,
    /// Fragments for which one packet found no aggregator. The other packets go on to the server,
    /// too: in an aggregator they would wait for that one. A later fragment may take the place of
    /// an earlier one here. Empty with one way, the paper's.
    collided: Vec<Option<Identifier>>,
}

impl<B: Bits> AggregatorTable<B> {
    /// `count` aggregators for fragments of up to `elements`, each of which finds a place in one of
    /// `ways`.
    pub(super) fn new(count: u32, elements: u16, ways: u8) -> Self {
        let (count, elements) = (count as usize, usize::from(elements));
        let remembered = if ways > 1 { count.min(COLLIDED_MAX) } else { 0 };
        Self {
            aggregators: vec![None; count],
            values: vec![0; count * elements],
            elements,
            ways,
            in_use: 0,
            collided: vec![None; remembered],
        }
    }

    /// The aggregators of an index, its own first. All fragments of a number have the same ones,
    /// whoever of them is free.
    pub(super) fn set(&self, index: u32) -> impl Iterator<Item = usize> + use<B> {
        let count = self.aggregators.len();
        (0..u32::from(self.ways)).map(move |way| (index ^ way) as usize).filter(move |at| *at < count)
    }

    /// The aggregator of the set that serves this fragment. There is one at most, as none begins
    /// while there is one.
    pub(super) fn serving(&self, index: u32, identifier: &Identifier) -> Option<usize> {
        self.set(index).find(|at| self.aggregators[*at].is_some_and(|one| one.identifier == *identifier))
    }

    /// The place of a fragment among those that collided.
    fn collided_at(&self, identifier: &Identifier) -> Option<usize> {
        let place = mix(u64::from(identifier.job.0)) ^ identifier.sequence;
        place.checked_rem(self.collided.len() as u64).map(|place| place as usize)
    }

    /// Whether a part of the fragment found no aggregator.
    fn has_collided(&self, identifier: &Identifier) -> bool {
        self.collided_at(identifier).is_some_and(|at| self.collided[at] == Some(*identifier))
    }

    /// The fragment that an aggregator serves.
    pub(super) fn serves(&self, at: usize) -> Option<Identifier> {
        self.aggregators[at].map(|one| one.identifier)
    }

    fn free(&mut self, at: usize) {
        self.aggregators[at] = None;
        self.in_use -= 1;
    }

    pub(super) const fn in_use(&self) -> u32 {
        self.in_use
    }

    /// Takes a fragment whose part in a sum is `part`.
    pub(super) fn aggregate<L>(
        &mut self,
        now: Instant,
        part: &Part<B>,
        packet: &FragmentPacket<'_, L>,
    ) -> Outcome {
        let FragmentPacket { header, payload, .. } = packet;
        let identifier = Identifier::of(&packet.preamble, header);
        let likeness = likeness(part, packet);
        let fits = payload.len() <= self.elements * 4;
        // Figure 7, boxes 1 and 2: other fragments' do not count.
        let serving = self.serving(part.index, &identifier);
        let place = match serving {
            None if self.has_collided(&identifier) => return Outcome::Collision,
            None => self.reserve(part, &identifier),
            serving => serving,
        };
        let Some(at) = place.filter(|_| fits) else {
            if self.is_succeeded(part, &identifier) {
                return Outcome::Succeeded;
            }
            if let Some(at) = self.collided_at(&identifier) {
                self.collided[at] = Some(identifier);
            }
            return Outcome::Collision;
        };
        let value = &mut self.values[at * self.elements..][..payload.len() / 4];
        let aggregator = match &mut self.aggregators[at] {
            // "If the identifier field in the aggregator is empty": it is reserved (§3.5,
            // aggregator allocation).
            place @ None => {
                self.in_use += 1;
                fanin_quant::store_le(value, payload);
                place.insert(Aggregator {
                    identifier,
                    likeness,
                    bitmap: part.bit,
                    counter: 1,
                    asked: B::default(),
                    ecn: header.flags.ecn,
                    next_exponent: header.next_exponent,
                    timestamp: now,
                })
            }
            Some(aggregator) if aggregator.likeness != likeness => return Outcome::Unlike,
            Some(aggregator) => {
                // Box 7: the packet may be dropped, what it tells of congestion may not.
                aggregator.ecn |= header.flags.ecn;
                // Box 4: is it in already? And nothing is added to what is complete.
                if aggregator.has(part.bit) || aggregator.is_complete() {
                    return Outcome::Duplicate;
                }
                // Box 5.
                aggregator.add(now, part.bit, header.next_exponent);
                fanin_quant::add_saturating_le(value, payload);
                if aggregator.is_complete() {
                    // They asked for a sum that was not sent yet.
                    aggregator.asked = B::default();
                }
                aggregator
            }
        };
        // Box 6. The aggregator stays as it is until the parameters come, so that a duplicate does
        // not begin a new one.
        if aggregator.is_complete() { Outcome::Complete } else { Outcome::Held }
    }

    /// The first aggregator of the set that is free. An aggregator also counts as free if it holds
    /// what is left of the job's fragment a window before or earlier, which is freed then: a worker
    /// that sends this fragment has the parameters of that one. They are asked in order, so that
    /// what is left in a fragment's own aggregator is cleared before a free neighbour is taken.
    fn reserve(&mut self, part: &Part<B>, identifier: &Identifier) -> Option<usize> {
        let is_over = |one: Aggregator<B>| {
            part.window.is_some_and(|window| one.identifier.precedes(identifier, window))
        };
        let at = self.set(part.index).find(|at| self.aggregators[*at].is_none_or(is_over))?;
        if self.aggregators[at].is_some() {
            self.free(at);
        }
        Some(at)
    }

    /// Whether an aggregator of the set serves so late a fragment of the same job.
    fn is_succeeded(&self, part: &Part<B>, identifier: &Identifier) -> bool {
        part.window.is_some_and(|window| {
            let mut serving = self.set(part.index).filter_map(|at| self.aggregators[at]);
            serving.any(|one| identifier.precedes(&one.identifier, window))
        })
    }

    /// The sum that the aggregator of a fragment holds by now, and whether that is all.
    pub(super) fn held(&self, index: u32, identifier: &Identifier) -> Option<(Aggregate<'_, B>, bool)> {
        let at = self.serving(index, identifier)?;
        let aggregator = self.aggregators[at].as_ref()?;
        let value = &self.values[at * self.elements..][..aggregator.likeness.payload_bytes / 4];
        Some((aggregator.aggregate(value), aggregator.is_complete()))
    }

    /// The sum in an aggregator that is complete, unless it serves another fragment by now, or
    /// none.
    pub(super) fn sum(&self, index: u32, identifier: &Identifier) -> Option<Aggregate<'_, B>> {
        self.held(index, identifier).and_then(|(sum, is_complete)| is_complete.then_some(sum))
    }

    /// Takes a fragment that is sent again, at the first level (Figure 17, boxes 1, 5 to 7).
    ///
    /// One lost packet makes all workers send their fragments again. The paper's switch sends what
    /// it has to the server then, and all these packets too. Here a sum stays that lacks one worker
    /// at most. The lost packet completes it, and the other packets end here. The paper's rule holds
    /// once a worker sends again for the second time, or all workers have but the missing one. With
    /// one way, it holds at once.
    pub(super) fn merge_resent<L>(
        &mut self,
        now: Instant,
        part: &Part<B>,
        packet: &FragmentPacket<'_, L>,
    ) -> ResendOutcome<'_, B> {
        let identifier = Identifier::of(&packet.preamble, &packet.header);
        // Box 1: a matching aggregator? An aggregator that holds something unlike is left for its
        // own resends.
        let likeness = likeness(part, packet);
        let matching = self.serving(part.index, &identifier).and_then(|at| {
            let aggregator = self.aggregators[at].as_mut().filter(|one| one.likeness == likeness)?;
            Some((at, aggregator))
        });
        let Some((at, aggregator)) = matching else { return ResendOutcome::Pass };
        let value = &mut self.values[at * self.elements..][..packet.payload.len() / 4];
        aggregator.ecn |= packet.header.flags.ecn;
        let (is_in, is_complete) = (aggregator.has(part.bit), aggregator.is_complete());
        let asks_again = aggregator.asked & part.bit != B::default();
        let is_first = aggregator.asked == B::default();
        aggregator.asked = aggregator.asked | part.bit;
        let is_papers = self.ways == 1;
        if is_complete && !is_papers {
            if is_in && !asks_again {
                return if is_first { ResendOutcome::Again } else { ResendOutcome::Duplicate };
            }
            self.free(at);
            return ResendOutcome::GivenUp;
        }
        // Box 5: not in it yet? Box 6: add it.
        if !is_in {
            aggregator.add(now, part.bit, packet.header.next_exponent);
            fanin_quant::add_saturating_le(value, packet.payload);
            if aggregator.is_complete() && !is_papers {
                return ResendOutcome::Complete;
            }
        } else if !is_papers && !asks_again && aggregator.lacks_one() && aggregator.asked != aggregator.bitmap
        {
            return ResendOutcome::Duplicate;
        }
        // Box 7.
        let aggregator = *aggregator;
        self.free(at);
        let value = &self.values[at * self.elements..][..packet.payload.len() / 4];
        ResendOutcome::Flush { sum: aggregator.aggregate(value), stalled: is_in && !is_complete }
    }

    /// Frees the fragment's aggregator: at higher levels when it is sent again (Figure 17, box 3).
    /// Whether there was one.
    pub(super) fn discard(&mut self, index: u32, identifier: &Identifier) -> bool {
        let serving = self.serving(index, identifier);
        if let Some(at) = serving {
            self.free(at);
        }
        serving.is_some()
    }

    /// Frees the fragment's aggregator if any of these contributors is in it. Returns whether one
    /// was.
    pub(super) fn discard_with(&mut self, index: u32, identifier: &Identifier, contributors: B) -> bool {
        let is_in = |(sum, _): (Aggregate<'_, B>, bool)| sum.bitmap & contributors != B::default();
        self.held(index, identifier).is_some_and(is_in) && self.discard(index, identifier)
    }

    /// Frees an aggregator for a parameter packet: its fragment's (Figure 7, box 8). If the
    /// fragment's set has no free one, it frees one of the set to which nothing was added for
    /// longer than `stale`, if that is given (§3.7, memory leaks).
    pub(super) fn release(
        &mut self,
        now: Instant,
        stale: Option<Duration>,
        index: u32,
        identifier: &Identifier,
    ) -> Freed {
        if self.discard(index, identifier) {
            return Freed::Own;
        }
        let Some(stale) = stale else { return Freed::None };
        let has_room = self.set(index).any(|at| self.aggregators[at].is_none());
        let is_stale = |at: &usize| self.aggregators[*at].is_some_and(|one| now.since(one.timestamp) > stale);
        let Some(at) = self.set(index).find(is_stale).filter(|_| !has_room) else { return Freed::None };
        self.free(at);
        Freed::Stale
    }

    /// Frees everything of a job.
    pub(super) fn forget(&mut self, job: JobId) {
        for place in &mut self.collided {
            if place.is_some_and(|identifier| identifier.job == job) {
                *place = None;
            }
        }
        for place in &mut self.aggregators {
            if place.is_some_and(|aggregator| aggregator.identifier.job == job) {
                *place = None;
                self.in_use -= 1;
            }
        }
    }
}

impl<B: Bits> Aggregator<B> {
    fn has(&self, bit: B) -> bool {
        self.bitmap & bit != B::default()
    }

    fn add(&mut self, now: Instant, bit: B, next_exponent: i16) {
        self.bitmap = self.bitmap | bit;
        self.counter += 1;
        self.next_exponent = self.next_exponent.max(next_exponent);
        self.timestamp = now;
    }

    const fn is_complete(&self) -> bool {
        self.counter == self.likeness.fan_in_degree
    }

    const fn lacks_one(&self) -> bool {
        self.counter + 1 == self.likeness.fan_in_degree
    }

    const fn aggregate<'a>(&self, value: &'a [i32]) -> Aggregate<'a, B> {
        Aggregate { bitmap: self.bitmap, ecn: self.ecn, next_exponent: self.next_exponent, value }
    }
}

fn likeness<B: Bits, L>(part: &Part<B>, packet: &FragmentPacket<'_, L>) -> Likeness<B> {
    let FragmentPacket { header, payload, .. } = packet;
    Likeness {
        collective: header.collective,
        fragment: header.fragment,
        exponent: header.exponent,
        fan_in_degree: part.fan_in_degree,
        participants: part.participants,
        payload_bytes: payload.len(),
    }
}
