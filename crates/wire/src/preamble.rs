//! The twelve bytes that open every packet of every protocol.

use crate::{Generation, JobId, ShardId, WireError, WorkerId, bytes_at};

/// The first two bytes of every packet, little-endian.
pub const MAGIC: u16 = 0xfa51;
/// The version of the formats in this crate. Any change of meaning or offset raises it.
pub const VERSION: u8 = 6;
/// Length of the preamble in bytes.
pub const PREAMBLE_BYTES: usize = 12;
/// The offset of the shard: a socket filter steers by this byte alone.
pub const SHARD_OFFSET: usize = 11;

/// The kind of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Worker to switch: a contribution to a slot; without payload only its exponent.
    Update = 1,
    /// Switch to workers: the sum of a slot.
    Result = 2,
    /// Worker to a switch that lost its memory: the sum that a slot had, handed back.
    Restore = 3,
    /// Switch to workers: the job cannot go on, with the reason.
    Abort = 4,
    /// ATP, both ways: a fragment of a gradient, or the parameters that it became.
    Gradient = 5,
    /// SwitchML, rack to its upstream: has this exchange of the slot a sum? Without payload;
    /// answered by the result, or not at all.
    Query = 6,
    /// DLCP, both ways: a block of a tensor, which may be lost. Number 7 was one that did not say
    /// whether it is the last of its round.
    Block = 11,
    /// DLCP, both ways: what is said of a flow, which may not be lost.
    Signal = 8,
    /// GOAT, both ways: a fragment of a gradient that a plan says where to sum, or the parameters
    /// that it became. Number 9 was a shorter header, without participants.
    Planned = 10,
}

impl Kind {
    /// Where it stands.
    pub(crate) const OFFSET: usize = 3;

    #[inline]
    fn parse(byte: u8) -> Result<Self, WireError> {
        Ok(match byte {
            1 => Self::Update,
            2 => Self::Result,
            3 => Self::Restore,
            4 => Self::Abort,
            5 => Self::Gradient,
            6 => Self::Query,
            8 => Self::Signal,
            10 => Self::Planned,
            11 => Self::Block,
            other => return Err(WireError::Kind(other)),
        })
    }
}

/// The preamble: who sent what for which job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preamble {
    /// The kind of the packet.
    pub kind: Kind,
    /// The job that it belongs to.
    pub job: JobId,
    /// The job's generation when it was sent.
    pub generation: Generation,
    /// The worker that sent it, or to whom it goes ([`WorkerId::ALL`] for all).
    pub worker: WorkerId,
    /// The shard that it belongs to.
    pub shard: ShardId,
}

impl Preamble {
    /// Reads and checks the preamble at the start of `packet`.
    #[inline]
    pub fn parse(packet: &[u8]) -> Result<Self, WireError> {
        let head: &[u8; PREAMBLE_BYTES] =
            bytes_at(packet, 0).ok_or(WireError::Truncated { need: PREAMBLE_BYTES, have: packet.len() })?;
        let &[m0, m1, version, kind, j0, j1, j2, j3, g0, g1, worker, shard] = head;
        let magic = u16::from_le_bytes([m0, m1]);
        if magic != MAGIC {
            return Err(WireError::Magic(magic));
        }
        if version != VERSION {
            return Err(WireError::Version { theirs: version, ours: VERSION });
        }
        Ok(Self {
            kind: Kind::parse(kind)?,
            job: JobId(u32::from_le_bytes([j0, j1, j2, j3])),
            generation: Generation(u16::from_le_bytes([g0, g1])),
            worker: WorkerId(worker),
            shard: ShardId(shard),
        })
    }

    /// The preamble as bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; PREAMBLE_BYTES] {
        let (first, second) = self.to_words();
        let mut bytes = [0; PREAMBLE_BYTES];
        bytes[..8].copy_from_slice(&first.to_le_bytes());
        bytes[8..].copy_from_slice(&second.to_le_bytes());
        bytes
    }

    /// The preamble as little-endian words.
    #[inline]
    pub(crate) const fn to_words(self) -> (u64, u32) {
        let first = MAGIC as u32 | (VERSION as u32) << 16 | (self.kind as u32) << 24;
        let second = self.generation.0 as u32 | (self.worker.0 as u32) << 16 | (self.shard.0 as u32) << 24;
        (first as u64 | (self.job.0 as u64) << 32, second)
    }
}
