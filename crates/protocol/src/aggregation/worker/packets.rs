//! The packets of a worker.

use fanin_quant::{Exponent, Scale};
use fanin_wire::{Dtype, Flags, FragmentHeader, FragmentPacket, GradientHeader, Label};

use super::Worker;
use super::way::Way;
use crate::aggregation::EXPONENT_UNKNOWN;
use crate::aggregation::config::{Overflow, Scaling};
use crate::machine::{Instant, Tensor};

/// A packet that is to be sent.
#[derive(Clone, Copy, Debug)]
pub(super) enum Outgoing {
    First(u64),
    Again(u64),
    /// Parameters that are handed back.
    Restore(u64),
}

impl Outgoing {
    pub(super) const fn sequence(self) -> u64 {
        match self {
            Self::First(sequence) | Self::Again(sequence) | Self::Restore(sequence) => sequence,
        }
    }
}

impl<A: Copy + PartialEq, T: Tensor, D: Way<A>> Worker<A, T, D> {
    /// Length of a packet.
    pub(super) fn packet_bytes(&mut self, outgoing: Outgoing) -> usize {
        let sequence = outgoing.sequence();
        let is_half = match outgoing {
            Outgoing::Restore(_) => {
                self.places[self.window.place(sequence)].last.is_some_and(|last| last.flags.half)
            }
            Outgoing::First(_) | Outgoing::Again(_) => {
                let fragment = self.core.stream.locate(sequence);
                fragment.is_some_and(|fragment| self.config.contributes_as(fragment.collective()).is_some())
            }
        };
        D::Label::HEADER_BYTES + usize::from(self.config.elements) * if is_half { 2 } else { 4 }
    }

    /// A fragment of the worker's own (ATP §3.6, "Worker Pushing Gradients"), quantised or as it
    /// is.
    pub(super) fn write_fragment(&mut self, now: Instant, sequence: u64, resend: bool, out: &mut [u8]) {
        let (key, preamble) = (self.config.key, self.preamble());
        let place = self.places[self.window.place(sequence)];
        let next_exponent = match self.config.scaling {
            Scaling::Static => GradientHeader::STATIC_FACTOR,
            Scaling::Dynamic => {
                let after = sequence + u64::from(self.config.window_max);
                let later = self.core.stream.locate(after).map(|later| later.participants());
                debug_assert_eq!(Exponent::UNKNOWN.bits(), EXPONENT_UNKNOWN);
                match later {
                    Some(later) if !self.directions.takes_part(later) => GradientHeader::STATIC_FACTOR,
                    _ => self.core.stream.exponent(after).bits(),
                }
            }
        };
        let mut fragment = self.core.stream.locate(sequence).expect("what is on the way is in the stream");
        fragment.sent(now);
        let (collective, participants) = (fragment.collective(), fragment.participants());
        let (directions, aggregator_index) =
            self.directions.label(sequence, place.aggregator_index, participants);
        // All participants know whether all of them were told the exponent.
        let was_told = participants.is_subset(place.told);
        let exponent = if was_told { place.exponent } else { GradientHeader::STATIC_FACTOR };
        let mut header = FragmentHeader {
            flags: Flags { resend, ..Flags::default() },
            directions,
            sequence,
            aggregator_index,
            fragment: fragment.chunk(),
            collective,
            exponent,
            next_exponent,
        };
        let elements = usize::from(self.config.elements);
        let range = fragment.range();
        let half = self.config.contributes_as(collective);
        let is_float = collective.dtype != Dtype::Int32;
        let at_once = is_float && collective.elements <= self.config.originals_elements_max;
        let is_fixed = self.config.scaling == Scaling::Dynamic && exponent == GradientHeader::STATIC_FACTOR;
        if is_float && is_fixed && !at_once && !self.window.originals(sequence) {
            let exponent = fragment.elements().exponent(range.clone()).finite();
            if exponent.is_some_and(|exponent| self.config.is_tiny(exponent)) {
                self.window.set_originals(sequence);
                self.progress.proactive += 1;
            }
        }
        let original = at_once || self.window.originals(sequence);
        if let Some(half) = half {
            if original {
                self.progress.originals_sent += 1;
                header.flags = Flags { resend: true, overflow: true, ..Flags::default() };
            }
            header.flags.half = true;
            FragmentPacket::write(out, key, &preamble, &header, elements, |payload| {
                fragment.elements().write_halves(half, range, payload);
            });
            return;
        }
        if !original {
            let scale = Scale::of_factor(self.config.factor(exponent));
            let proactive = self.config.overflow == Overflow::Proactive && is_float;
            let mut risky = false;
            FragmentPacket::write(out, key, &preamble, &header, elements, |payload| {
                fragment.elements().quantize(range.clone(), &scale, payload);
                risky = proactive && may_overflow(payload, self.config.workers);
            });
            if !risky {
                return;
            }
            self.window.set_originals(sequence);
            self.progress.proactive += 1;
        }
        self.progress.originals_sent += 1;
        header.flags = Flags { resend: true, overflow: true, ..Flags::default() };
        FragmentPacket::write(out, key, &preamble, &header, elements, |payload| {
            fragment.elements().widen(range, payload);
        });
    }

    /// The parameters of a finished fragment, for a server that lost its memory. The aggregator
    /// that the fragment used is long free; in its stead stands the one that the place uses now, on
    /// which all workers must go on agreeing.
    pub(super) fn write_parameters(&self, sequence: u64, out: &mut [u8]) {
        let index = self.window.place(sequence);
        let place = self.places[index];
        let last = place.last.expect("a finished fragment has parameters");
        let next = D::next_aggregator_index(&last);
        let participants = last.directions.participants();
        let (directions, aggregator_index) = self.directions.label(sequence, next, participants);
        let header = FragmentHeader {
            flags: Flags { resend: true, restore: true, half: last.flags.half, ..Flags::default() },
            directions,
            aggregator_index,
            ..last
        };
        let (key, elements) = (self.config.key, usize::from(self.config.elements));
        let at = index * self.config.payload_bytes();
        let parameters = &self.last_payloads[at..at + elements * header.element_bytes()];
        FragmentPacket::write(out, key, &self.preamble(), &header, elements, |payload| {
            payload.copy_from_slice(parameters);
        });
    }
}

/// Whether the sum could overflow if the others' values were as large as the largest here (ATP
/// §B.2).
fn may_overflow(payload: &[u8], workers: u16) -> bool {
    let workers = i64::from(workers);
    let bound = (1 << 31) / workers - 1;
    payload.as_chunks().0.iter().any(|value| i64::from(i32::from_le_bytes(*value)).abs() > bound)
}
