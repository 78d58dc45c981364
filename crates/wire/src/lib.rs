//! The packet formats of fanin, and nothing that acts on them.
//!
//! A packet is a [`Preamble`] that every protocol shares, then the header of its kind, then a
//! payload. All fields are little-endian and at fixed offsets, so that a bounded program (XDP)
//! finds them without parsing options. Parsing is checked once, here, and its results are values
//! that the format has. The machines ask whether a job has such a worker or slot, and whether the
//! packet comes from one of its members ([`Key::authenticates`]). `docs/wire.md` is the same in
//! words, `golden/` the same in bytes.
//!
//! Deliberately absent: sockets, floats, state, and any dependency but SipHash.
#![no_std]
#![forbid(unsafe_code)]

mod abort;
mod block;
mod gauge;
mod gradient;
mod ids;
mod key;
mod preamble;
mod security;
mod signal;
mod slot;
mod wire_dtype;

pub use abort::{ABORT_BYTES, Abort, AbortReason};
pub use block::{
    BLOCK_HEADER_BYTES, BlockHeader, BlockPacket, PATHS_MAX, PRIORITIES, Tag, block_packet_bytes,
    traffic_class,
};
pub use gauge::{FILLER_BYTES, Filler, READING_BYTES, Reading};
pub use gradient::{
    CHILDREN_MAX, Directions, FRAGMENT_ELEMENTS, Flags, FragmentHeader, FragmentPacket,
    GRADIENT_HEADER_BYTES, GradientHeader, GradientPacket, LEVELS_MAX, Label, PLANNED_HEADER_BYTES,
    PLANNED_WORKERS_MAX, PlannedDirections, PlannedHeader, PlannedPacket, SAMPLE_ELEMENTS,
    fragment_elements_for_mtu, fragment_packet_bytes, is_fragment,
};
pub use ids::{
    AggregationNode, FlowId, Generation, JobId, LossBound, PLACES_MAX, Participants, RANKS_MAX, Rank,
    ShardId, SlotIndex, SubModel, WorkerId,
};
pub use key::{Key, TAG_BYTES};
pub use preamble::{Kind, MAGIC, PREAMBLE_BYTES, Preamble, SHARD_OFFSET, VERSION};
pub use security::{
    NONCE_BYTES, SEAL_BYTES, SEAL_TAG_BYTES, SEALED_HEAD_BYTES, Security, begin_sealed, end_sealed,
};
pub use signal::{REQUEST_BLOCKS, Report, SIGNAL_BYTES_MAX, Signal, SignalPacket, Start};
pub use slot::{
    CHUNK_ELEMENTS, CHUNK_ELEMENTS_DEFAULT, Collective, Dtype, IP_UDP_BYTES, Op, Operation, Pattern,
    SLOT_HEADER_BYTES, SlotHeader, SlotPacket, chunk_elements_for_mtu, chunk_packet_bytes, packet_bytes,
};
pub use wire_dtype::{
    NATIVE_ELEMENTS_MAX, PACKED_BLOCK, WireDtype, begin_bfloat16_payload, bfloat16_payload,
};

/// Why a datagram is not a packet of ours. Counted by the receiver, never fatal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireError {
    /// Shorter than the header that its kind needs.
    Truncated {
        /// Bytes that the header needs.
        need: usize,
        /// Bytes that came.
        have: usize,
    },
    /// The first two bytes are not [`MAGIC`].
    Magic(u16),
    /// A version that this build does not speak.
    Version {
        /// The sender's version.
        theirs: u8,
        /// Ours, [`VERSION`].
        ours: u8,
    },
    /// No packet kind has this number.
    Kind(u8),
    /// A field holds a value outside its range.
    Field(&'static str),
    /// The payload is none of the lengths that the kind allows.
    PayloadLength(usize),
}

impl core::fmt::Display for WireError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match *self {
            Self::Truncated { need, have } => {
                write!(f, "packet of {have} bytes is shorter than its header of {need}")
            }
            Self::Magic(magic) => write!(f, "not a fanin packet (magic {magic:#06x})"),
            Self::Version { theirs, ours } => {
                write!(f, "wire version {theirs} where this build speaks {ours}")
            }
            Self::Kind(kind) => write!(f, "unknown packet kind {kind}"),
            Self::Field(name) => write!(f, "field {name} is out of range"),
            Self::PayloadLength(bytes) => write!(f, "payload of {bytes} bytes is not a chunk"),
        }
    }
}

impl core::error::Error for WireError {}

/// The `N` bytes at `at`; `None` when the slice ends before. It is not a copy. A read of a part of
/// bytes that were just copied whole waits for all pending stores of the core. On the data path
/// these are the sums of the packet before.
#[inline]
fn bytes_at<const N: usize>(packet: &[u8], at: usize) -> Option<&[u8; N]> {
    packet.get(at..)?.first_chunk()
}
