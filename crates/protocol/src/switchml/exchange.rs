//! Small things that both sides of a slot exchange need.

use fanin_wire::{Collective, PLACES_MAX, SLOT_HEADER_BYTES, ShardId, WorkerId};

use crate::transport::mix;

/// Length of a packet with `elements` of a tensor.
#[inline]
pub(super) const fn packet_bytes(collective: &Collective, elements: usize) -> usize {
    SLOT_HEADER_BYTES + collective.payload_bytes(elements)
}

/// The machine that rounds to int8 or int4.
#[derive(Clone, Copy, Debug)]
pub(super) enum Rounder {
    /// A worker its contribution.
    Worker(WorkerId),
    /// A rack its sum, as what its upstream knows it.
    Rack(WorkerId),
    /// The root the sum of all.
    Root,
}

/// The seed of the rounding of a chunk to int8 or int4. It follows from the chunk's place in the
/// stream, so that the rounding is the same whenever it is done, and in every run.
pub(super) const fn rounding_seed(by: Rounder, shard: ShardId, collective: &Collective, chunk: u32) -> u64 {
    let places = PLACES_MAX as u64;
    let by = match by {
        Rounder::Worker(place) => place.0 as u64,
        Rounder::Rack(place) => places + place.0 as u64,
        Rounder::Root => 2 * places,
    };
    mix((chunk as u64) << 32 | (shard.0 as u64) << 24 | by << 16 | collective.sequence as u64)
}

const _: () = assert!(2 * PLACES_MAX < 1 << 8, "who rounds is a byte");

/// Whether exchange `a` is later than `b`; numbers wrap.
pub(super) const fn is_after(a: u32, b: u32) -> bool {
    a.wrapping_sub(b).cast_signed() > 0
}
