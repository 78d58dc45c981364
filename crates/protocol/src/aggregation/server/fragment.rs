//! A place of the window: the fragment that is being aggregated there, and the one before it, whose
//! parameters answer a worker that lost them.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use fanin_wire::{Collective, Dtype, Flags, FragmentHeader, GradientHeader, Op, Participants};

use super::aside::{Aside, AsideRoom};
use super::exact_sum::ExactSum;
use super::{Coverage, Workers};
use crate::aggregation::JobConfig;
use crate::machine::{Instant, Reason};

/// The subject that is being reduced: the same from all workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Subject {
    pub(super) collective: Collective,
    pub(super) fragment: u32,
    pub(super) participants: Participants,
    /// A position that said so, to name in a disagreement.
    pub(super) first: u16,
}

/// Sums of original float values, one for each element. They are large and seldom needed, so a job
/// has only as many as overflowed at one time, and hands them on from fragment to fragment.
type ExactSums = Box<[ExactSum]>;

/// Memory that few fragments need besides their sums: it is handed on from one to another, and
/// never given back.
#[derive(Debug, Default)]
pub(super) struct Spare {
    exact: Vec<ExactSums>,
    aside: AsideRoom,
}

impl Spare {
    /// The memory for a job with so many workers and places.
    pub(super) fn new(workers: usize, window: usize) -> Self {
        Self { exact: Vec::new(), aside: AsideRoom::new(workers, window) }
    }

    /// Whether what is left is for the earliest fragment alone.
    pub(super) const fn is_short(&self) -> bool {
        self.aside.is_short()
    }
}

/// The fragment that a place gathers.
#[derive(Debug)]
pub(super) struct Unfinished {
    pub(super) sequence: u64,
    pub(super) subject: Option<Subject>,
    pub(super) contributed: Workers,
    pub(super) count: u32,
    /// The workers of whom anything came, also what could not be added.
    heard: Workers,
    /// Something of it was lost, and came only when it was sent again.
    pub(super) lost: bool,
    /// The workers whose values in `sums` are integers scaled by `exponent`; the others sent
    /// original values.
    scaled: Workers,
    exponent: i16,
    pub(super) next_exponent: i16,
    pub(super) ecn: bool,
    pub(super) collision: bool,
    pub(super) saturated: bool,
    pub(super) aggregator_index: u32,
    /// Nothing but original values counts: they were asked for because the sum did not fit.
    pub(super) originals_only: bool,
    /// When something was last asked for.
    pub(super) requested: Option<Instant>,
    /// Sums of original float values; none are needed for integers, whose sum always fits in
    /// `sums`.
    exact: Option<ExactSums>,
    /// Parts of groups whose whole sums may still come.
    aside: Vec<Aside>,
}

/// A fragment whose parameters are known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finished {
    pub(super) sequence: u64,
    pub(super) collective: Collective,
    pub(super) fragment: u32,
    pub(super) participants: Participants,
    pub(super) ecn: bool,
    /// A packet of it was lost, or its parameters were.
    pub(super) lost: bool,
    pub(super) aggregator_index: u32,
    pub(super) next_aggregator_index: u32,
    pub(super) next_exponent: i16,
}

impl Unfinished {
    pub(super) fn new(sequence: u64) -> Self {
        Self {
            sequence,
            subject: None,
            contributed: Workers::default(),
            count: 0,
            heard: Workers::default(),
            lost: false,
            scaled: Workers::default(),
            exponent: GradientHeader::STATIC_FACTOR,
            next_exponent: i16::MIN,
            ecn: false,
            collision: false,
            saturated: false,
            aggregator_index: 0,
            originals_only: false,
            requested: None,
            exact: None,
            aside: Vec::new(),
        }
    }

    /// Goes on to another fragment, and puts what it needed besides its sums to the spare ones.
    pub(super) fn begin(&mut self, sequence: u64, spare: &mut Spare) {
        spare.exact.extend(self.exact.take());
        self.aside.drain(..).for_each(|aside| spare.aside.give_back(aside));
        *self = Self { aside: core::mem::take(&mut self.aside), ..Self::new(sequence) };
    }

    /// Forgets all contributions, because the sum did not fit, and waits for the original values.
    pub(super) fn await_originals(&mut self, spare: &mut Spare) {
        self.contributed = Workers::default();
        self.scaled = Workers::default();
        self.count = 0;
        self.saturated = false;
        self.originals_only = true;
        self.aside.drain(..).for_each(|aside| spare.aside.give_back(aside));
        if let Some(exact) = &mut self.exact {
            exact.fill(ExactSum::default());
        }
    }

    /// Notes whose packet it is, and whether a loss was mended with it. A worker lost its first
    /// packet if it sent again, is not known to have stalled, and nothing came from it before. A
    /// part of a group has those in it again who were in the part before, so that one who is new is
    /// enough. Original values go to the server under the same flags the first time.
    pub(super) fn hear(&mut self, flags: Flags, from: &Coverage) {
        let sent_again = is_sent_again(flags) && !flags.overflow && !flags.restore;
        let is_new = match from.part_of {
            Some(_) => !from.workers.is_subset(&self.heard),
            None => from.workers.is_disjoint(&self.heard),
        };
        self.lost |= sent_again && !flags.stalled && is_new;
        self.heard.extend(&from.workers);
    }

    /// Adds a packet of scaled values (ATP §3.6, "PS updating parameters").
    pub(super) fn add_scaled<L>(
        &mut self,
        header: &FragmentHeader<L>,
        from: &Coverage,
        payload: &[u8],
        sums: &mut [i64],
        spare: &mut Spare,
        is_earliest: bool,
    ) -> Result<(), Reason> {
        if self.originals_only {
            return Err(Reason::Unexpected);
        }
        if self.count > 0 && from.workers.is_subset(&self.contributed) {
            return Err(Reason::Duplicate);
        }
        let any_scaled = self.scaled != Workers::default() || !self.aside.is_empty();
        if any_scaled && header.exponent != self.exponent {
            return Err(Reason::Exponent);
        }
        if let Some(group) = from.part_of {
            self.set_aside(group, from, payload, &mut spare.aside, is_earliest)?;
            self.exponent = header.exponent;
            return Ok(());
        }
        if from.workers.is_disjoint(&self.contributed) {
            self.count += from.count;
        } else if self.scaled == self.contributed && self.contributed.is_subset(&from.workers) {
            // All that is here is in the packet once more: a worker whose fragment had collided
            // sent it again into an aggregator that the others had found free. The packet takes the
            // place of what is here.
            self.scaled = Workers::default();
            self.contributed = Workers::default();
            self.count = from.count;
            self.saturated = false;
        } else {
            return Err(Reason::Overlap);
        }
        self.exponent = header.exponent;
        let mut saturated = false;
        let replace = self.contributed == Workers::default();
        for (sum, term) in sums.iter_mut().zip(payload.as_chunks().0) {
            let term = i32::from_le_bytes(*term);
            saturated |= term == i32::MAX || term == i32::MIN;
            *sum = i64::from(term) + if replace { 0 } else { *sum };
        }
        self.saturated |= saturated;
        self.contributed.extend(&from.workers);
        self.scaled.extend(&from.workers);
        self.drop_aside(&from.workers, &mut spare.aside);
        Ok(())
    }

    /// Keeps a part of a group. The part that a switch shows of it grows, so that a later part may
    /// have all that is here in it once more: of its own group, or of others whose sums come into
    /// its own. No worker is in two parts.
    fn set_aside(
        &mut self,
        group: u16,
        from: &Coverage,
        payload: &[u8],
        room: &mut AsideRoom,
        is_earliest: bool,
    ) -> Result<(), Reason> {
        if !from.workers.is_disjoint(&self.contributed) {
            return Err(Reason::Overlap);
        }
        if self.aside.iter().any(|aside| from.workers.is_subset(&aside.workers)) {
            return Err(Reason::Duplicate);
        }
        let is_replaced = |aside: &Aside| aside.group != group && !aside.workers.is_disjoint(&from.workers);
        if self.aside.iter().all(|aside| aside.group != group)
            && let Some(replaced) = self.aside.iter_mut().find(|aside| is_replaced(aside))
        {
            replaced.begin(group);
        }
        self.aside.extract_if(.., |aside| is_replaced(aside)).for_each(|aside| room.give_back(aside));
        match self.aside.iter_mut().find(|aside| aside.group == group) {
            Some(aside) => aside.add(from, payload),
            None => {
                let mut aside = room.take(group, payload.len() / 4, is_earliest).ok_or(Reason::NoRoom)?;
                aside.add(from, payload)?;
                self.aside.push(aside);
                Ok(())
            }
        }
    }

    /// Forgets what is set aside of these workers: it came otherwise.
    fn drop_aside(&mut self, workers: &Workers, room: &mut AsideRoom) {
        let gone = self.aside.extract_if(.., |aside| !aside.workers.is_disjoint(workers));
        gone.for_each(|aside| room.give_back(aside));
    }

    /// How many workers are in, with those of parts.
    pub(super) fn gathered(&self) -> u32 {
        self.count + self.aside.iter().map(|aside| aside.count).sum::<u32>()
    }

    /// Whether a worker is in.
    pub(super) fn has(&self, position: usize) -> bool {
        self.contributed.contains(position) || self.aside.iter().any(|aside| aside.workers.contains(position))
    }

    /// Adds the parts: all workers are in, and no whole sum is needed any more.
    pub(super) fn add_aside(&mut self, sums: &mut [i64], spare: &mut Spare) {
        if self.count == 0 {
            sums.fill(0);
        }
        for aside in self.aside.drain(..) {
            sums.iter_mut().zip(&aside.sums).for_each(|(sum, part)| *sum += part);
            self.count += aside.count;
            self.saturated |= aside.saturated;
            self.contributed.extend(&aside.workers);
            self.scaled.extend(&aside.workers);
            spare.aside.give_back(aside);
        }
    }

    /// Adds one worker's original values (ATP §3.8).
    pub(super) fn add_original(
        &mut self,
        dtype: Dtype,
        from: &Coverage,
        payload: &[u8],
        sums: &mut [i64],
        spare: &mut Spare,
    ) -> Result<(), Reason> {
        if from.count != 1 {
            return Err(Reason::OutOfRange);
        }
        if !from.workers.is_disjoint(&self.contributed) {
            return Err(Reason::Duplicate);
        }
        if self.count == 0 {
            sums.fill(0);
        }
        if dtype == Dtype::Int32 {
            for (sum, term) in sums.iter_mut().zip(payload.as_chunks().0) {
                *sum += i64::from(i32::from_le_bytes(*term));
            }
        } else {
            let exact = self.exact.get_or_insert_with(|| match spare.exact.pop() {
                Some(mut used) => {
                    used.fill(ExactSum::default());
                    used
                }
                None => vec![ExactSum::default(); sums.len()].into(),
            });
            for (sum, term) in exact.iter_mut().zip(payload.as_chunks().0) {
                sum.add(f32::from_le_bytes(*term));
            }
        }
        self.contributed.extend(&from.workers);
        self.count += 1;
        self.drop_aside(&from.workers, &mut spare.aside);
        Ok(())
    }

    /// Writes the parameters: the sum, or the mean, rounded once (ATP §3.8: "dividing by the
    /// scaling factor").
    pub(super) fn write_parameters(
        &self,
        config: &JobConfig,
        collective: Collective,
        sums: &[i64],
        parameters: &mut [u8],
    ) {
        let mean = collective.op == Op::Average;
        let participants = self.count;
        let out = parameters.as_chunks_mut().0.iter_mut();
        if collective.dtype == Dtype::Int32 {
            let divisor = if mean { participants as i32 } else { 1 };
            for (sum, out) in sums.iter().zip(out) {
                // Native integers wrap, and a mean is truncated toward zero, as with SwitchML.
                *out = (*sum as i32 / divisor).to_le_bytes();
            }
            return;
        }
        let workers = if mean { f64::from(participants) } else { 1.0 };
        let divisor = config.factor(self.exponent) * workers;
        match &self.exact {
            None => {
                for (sum, out) in sums.iter().zip(out) {
                    *out = ((*sum as f64 / divisor) as f32).to_le_bytes();
                }
            }
            Some(exact) => {
                for ((sum, exact), out) in sums.iter().zip(exact).zip(out) {
                    *out = ((*sum as f64 / divisor + exact.to_f64() / workers) as f32).to_le_bytes();
                }
            }
        }
    }

    /// The largest exponent of the next fragment in this place, if all workers know theirs and it
    /// is that of finite numbers.
    pub(super) fn next_known(&self) -> Option<i16> {
        (-149..=128).contains(&self.next_exponent).then_some(self.next_exponent)
    }

    /// The exponent that the values here were scaled by.
    pub(super) const fn exponent(&self) -> i16 {
        self.exponent
    }

    /// Names the contributors by other positions, after the tree changed.
    pub(super) fn rename(&mut self, position_after: impl Fn(usize) -> usize, workers: usize) {
        let renamed = |old: &Workers| {
            let mut new = Workers::default();
            (0..workers).filter(|at| old.contains(*at)).for_each(|at| new.insert(position_after(at)));
            new
        };
        self.contributed = renamed(&self.contributed);
        self.heard = renamed(&self.heard);
        self.scaled = renamed(&self.scaled);
        if let Some(subject) = &mut self.subject {
            subject.first = position_after(subject.first.into()) as u16;
        }
    }
}

/// Whether a worker sent it again. A switch without an aggregator marks also what was sent once
/// (Figure 7, box 2).
pub(super) const fn is_sent_again(flags: Flags) -> bool {
    flags.resend && !flags.collision
}

impl Finished {
    pub(super) fn header<L>(&self, directions: L) -> FragmentHeader<L> {
        let half = self.collective.half().is_some();
        FragmentHeader {
            flags: Flags { is_ack: true, ecn: self.ecn, resend: self.lost, half, ..Flags::default() },
            directions,
            sequence: self.sequence,
            aggregator_index: self.aggregator_index,
            fragment: self.fragment,
            collective: self.collective,
            exponent: GradientHeader::STATIC_FACTOR,
            next_exponent: self.next_exponent,
        }
    }
}

/// Parameters that a worker hands back: it knows the index that its place uses from now on.
pub(super) const fn finished_by_hand<L>(header: &FragmentHeader<L>, participants: Participants) -> Finished {
    Finished {
        sequence: header.sequence,
        collective: header.collective,
        fragment: header.fragment,
        participants,
        ecn: header.flags.ecn,
        lost: false,
        aggregator_index: header.aggregator_index,
        next_aggregator_index: header.aggregator_index,
        next_exponent: header.next_exponent,
    }
}

/// The request for whatever a worker has of a fragment, which also frees its aggregators.
pub(super) fn request_header<L>(fragment: FragmentHeader<L>, directions: L) -> FragmentHeader<L> {
    FragmentHeader {
        flags: Flags { is_ack: true, overflow: true, ..Flags::default() },
        directions,
        ..fragment
    }
}
