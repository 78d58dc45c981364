//! A switch's aggregators: one table that all jobs share, first come, first served (ATP §3.3, Figure 6; §3.5, Figure 7; §A.1,
//! Figure 17). No packets are read or written here.
//!
//! The paper's fragment has one aggregator, that of its index. Here the table is set-associative, as caches are: a fragment takes any that
//! is free of a few neighbours. With one way it is the paper's.

use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;
use fanin_wire::{Collective, Generation, GradientHeader, GradientPacket, JobId, Preamble};

use crate::machine::Instant;

/// What an aggregator serves: ATP's identifier fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identifier {
    pub(super) job: JobId,
    pub(super) generation: Generation,
    pub(super) sequence: u64,
}

impl Identifier {
    pub(super) const fn of(preamble: &Preamble, header: &GradientHeader) -> Self {
        Self { job: preamble.job, generation: preamble.generation, sequence: header.sequence }
    }
}

/// What all fragments in an aggregator have in common: adding unlike ones would give numbers that mean nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Likeness {
    collective: Collective,
    fragment: u32,
    exponent: i16,
    fan_in_degree: u8,
    payload_bytes: usize,
}

/// One aggregator without its value (Figure 6).
#[derive(Clone, Copy, Debug)]
struct Aggregator {
    identifier: Identifier,
    likeness: Likeness,
    bitmap: u32,
    counter: u8,
    ecn: bool,
    next_exponent: i16,
    timestamp: Instant,
}

/// An aggregator's sum, as it is sent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Aggregate<'a> {
    pub(super) bitmap: u32,
    pub(super) ecn: bool,
    pub(super) next_exponent: i16,
    pub(super) value: &'a [i32],
}

/// What became of a fragment.
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
}

/// What became of a fragment that was sent again.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ResendOutcome<'a> {
    /// No aggregator has any of it.
    Pass,
    /// This is what there was, with the fragment in it; the aggregator is free.
    Flush {
        sum: Aggregate<'a>,
        /// The fragment was in it, and others were not: it was not lost, and no sum of it either.
        stalled: bool,
    },
}

/// Which aggregator a parameter packet freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Freed {
    None,
    /// That of its fragment.
    Own,
    /// One that somebody left behind.
    Stale,
}

/// The table.
#[derive(Debug)]
pub(super) struct AggregatorTable {
    aggregators: Vec<Option<Aggregator>>,
    /// The values, `elements` for each aggregator.
    values: Vec<i32>,
    elements: usize,
    ways: u8,
    in_use: u32,
}

impl AggregatorTable {
    /// `count` aggregators for fragments of up to `elements`, each of which finds a place in one of `ways`.
    pub(super) fn new(count: u32, elements: u16, ways: u8) -> Self {
        let (count, elements) = (count as usize, usize::from(elements));
        Self { aggregators: vec![None; count], values: vec![0; count * elements], elements, ways, in_use: 0 }
    }

    /// The aggregators of an index, its own first. All fragments of a number have the same ones, whoever of them is free.
    fn set(&self, index: u32) -> impl Iterator<Item = usize> + use<> {
        let count = self.aggregators.len();
        (0..u32::from(self.ways)).map(move |way| (index ^ way) as usize).filter(move |at| *at < count)
    }

    /// The aggregator of the set that serves this fragment. There is one at most, as none begins while there is one.
    fn serving(&self, index: u32, identifier: &Identifier) -> Option<usize> {
        self.set(index).find(|at| self.aggregators[*at].is_some_and(|one| one.identifier == *identifier))
    }

    fn free(&mut self, at: usize) {
        self.aggregators[at] = None;
        self.in_use -= 1;
    }

    pub(super) const fn in_use(&self) -> u32 {
        self.in_use
    }

    /// Takes a fragment that is sent for the first time; `level` is this switch's. Its bitmap there has one bit.
    pub(super) fn aggregate(&mut self, now: Instant, level: usize, packet: &GradientPacket<'_>) -> Outcome {
        let GradientPacket { header, payload, .. } = packet;
        let identifier = Identifier::of(&packet.preamble, header);
        let likeness = likeness(level, packet);
        let bit = header.directions.bitmaps[level];
        let fits = payload.len() <= self.elements * 4;
        // Figure 7, boxes 1 and 2: other fragments' do not count.
        let place = self
            .serving(header.aggregator_index, &identifier)
            .or_else(|| self.set(header.aggregator_index).find(|at| self.aggregators[*at].is_none()));
        let Some(at) = place.filter(|_| fits) else { return Outcome::Collision };
        let value = &mut self.values[at * self.elements..][..payload.len() / 4];
        let aggregator = match &mut self.aggregators[at] {
            // "If the identifier field in the aggregator is empty": it is reserved (§3.5, aggregator allocation).
            place @ None => {
                self.in_use += 1;
                fanin_quant::store_le(value, payload);
                place.insert(Aggregator {
                    identifier,
                    likeness,
                    bitmap: bit,
                    counter: 1,
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
                if aggregator.bitmap & bit != 0 || aggregator.is_complete() {
                    return Outcome::Duplicate;
                }
                // Box 5.
                aggregator.add(now, packet, bit);
                fanin_quant::add_saturating_le(value, payload);
                aggregator
            }
        };
        // Box 6. The aggregator stays as it is until the parameters come, so that a duplicate does not begin a new one.
        if aggregator.is_complete() { Outcome::Complete } else { Outcome::Held }
    }

    /// What an aggregator that is complete holds, unless it serves another fragment by now, or none.
    pub(super) fn sum(&self, index: u32, identifier: &Identifier) -> Option<Aggregate<'_>> {
        let at = self.serving(index, identifier)?;
        let aggregator = self.aggregators[at].as_ref().filter(|aggregator| aggregator.is_complete())?;
        let value = &self.values[at * self.elements..][..aggregator.likeness.payload_bytes / 4];
        Some(aggregator.aggregate(value))
    }

    /// Takes a fragment that is sent again, at the first level (Figure 17, boxes 1, 5 to 7).
    pub(super) fn merge_resent(
        &mut self,
        now: Instant,
        level: usize,
        packet: &GradientPacket<'_>,
    ) -> ResendOutcome<'_> {
        let identifier = Identifier::of(&packet.preamble, &packet.header);
        // Box 1: a matching aggregator? One that holds something unlike is left for its own resends.
        let matching = self.serving(packet.header.aggregator_index, &identifier).and_then(|at| {
            let aggregator = self.aggregators[at].filter(|one| one.likeness == likeness(level, packet))?;
            Some((at, aggregator))
        });
        let Some((at, mut aggregator)) = matching else { return ResendOutcome::Pass };
        self.free(at);
        let value = &mut self.values[at * self.elements..][..packet.payload.len() / 4];
        aggregator.ecn |= packet.header.flags.ecn;
        let bit = packet.header.directions.bitmaps[level];
        let stalled = aggregator.bitmap & bit != 0 && !aggregator.is_complete();
        // Box 5: not in it yet? Box 6: add it.
        if aggregator.bitmap & bit == 0 {
            aggregator.add(now, packet, bit);
            fanin_quant::add_saturating_le(value, packet.payload);
        }
        // Box 7.
        ResendOutcome::Flush { sum: aggregator.aggregate(value), stalled }
    }

    /// Frees the fragment's aggregator: at higher levels when it is sent again (Figure 17, box 3). Whether there was one.
    pub(super) fn discard(&mut self, index: u32, identifier: &Identifier) -> bool {
        let serving = self.serving(index, identifier);
        if let Some(at) = serving {
            self.free(at);
        }
        serving.is_some()
    }

    /// Frees what a parameter packet frees: its fragment's aggregator (Figure 7, box 8), or, where its set has no free
    /// one, one of that which nothing was added to for longer than `stale` (§3.7, memory leaks).
    pub(super) fn release(
        &mut self,
        now: Instant,
        stale: Duration,
        index: u32,
        identifier: &Identifier,
    ) -> Freed {
        if self.discard(index, identifier) {
            return Freed::Own;
        }
        let has_room = self.set(index).any(|at| self.aggregators[at].is_none());
        let is_stale = |at: &usize| self.aggregators[*at].is_some_and(|one| now.since(one.timestamp) > stale);
        let Some(at) = self.set(index).find(is_stale).filter(|_| !has_room) else { return Freed::None };
        self.free(at);
        Freed::Stale
    }

    /// Frees everything of a job.
    pub(super) fn forget(&mut self, job: JobId) {
        for place in &mut self.aggregators {
            if place.is_some_and(|aggregator| aggregator.identifier.job == job) {
                *place = None;
                self.in_use -= 1;
            }
        }
    }
}

impl Aggregator {
    fn add(&mut self, now: Instant, packet: &GradientPacket<'_>, bit: u32) {
        self.bitmap |= bit;
        self.counter += 1;
        self.next_exponent = self.next_exponent.max(packet.header.next_exponent);
        self.timestamp = now;
    }

    const fn is_complete(&self) -> bool {
        self.counter == self.likeness.fan_in_degree
    }

    const fn aggregate<'a>(&self, value: &'a [i32]) -> Aggregate<'a> {
        Aggregate { bitmap: self.bitmap, ecn: self.ecn, next_exponent: self.next_exponent, value }
    }
}

fn likeness(level: usize, packet: &GradientPacket<'_>) -> Likeness {
    let GradientPacket { header, payload, .. } = packet;
    Likeness {
        collective: header.collective,
        fragment: header.fragment,
        exponent: header.exponent,
        fan_in_degree: header.directions.fan_in_degrees[level],
        payload_bytes: payload.len(),
    }
}
