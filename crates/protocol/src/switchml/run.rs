//! Small things that both sides of a slot exchange need.

use fanin_wire::{Collective, SLOT_HEADER_BYTES};

use crate::machine::Transmit;

/// A train being written: packets of one size.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Run {
    pub(crate) bytes: usize,
    pub(crate) segment_bytes: usize,
}

impl Run {
    /// Whether a packet of `elements` still belongs to this train; the first one decides the size.
    pub(crate) fn takes(&mut self, collective: &Collective, elements: usize, train_bytes: usize) -> bool {
        let bytes = SLOT_HEADER_BYTES + collective.payload_bytes(elements);
        if self.segment_bytes == 0 {
            self.segment_bytes = bytes;
        }
        bytes == self.segment_bytes && self.bytes + bytes <= train_bytes
    }

    pub(crate) const fn to<A>(self, to: &[A]) -> Transmit<'_, A> {
        Transmit { to, bytes: self.bytes, segment_bytes: self.segment_bytes }
    }
}

/// Whether exchange `a` is later than `b`; numbers wrap.
pub(crate) const fn is_after(a: u32, b: u32) -> bool {
    a.wrapping_sub(b).cast_signed() > 0
}
