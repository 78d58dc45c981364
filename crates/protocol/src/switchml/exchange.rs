//! Small things that both sides of a slot exchange need.

use fanin_wire::{Collective, SLOT_HEADER_BYTES};

/// Length of a packet with `elements` of a tensor.
#[inline]
pub(super) const fn packet_bytes(collective: &Collective, elements: usize) -> usize {
    SLOT_HEADER_BYTES + collective.payload_bytes(elements)
}

/// Whether exchange `a` is later than `b`; numbers wrap.
pub(super) const fn is_after(a: u32, b: u32) -> bool {
    a.wrapping_sub(b).cast_signed() > 0
}
