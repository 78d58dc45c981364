//! The packet that ends a job, with the reason in it.

use crate::preamble::PREAMBLE_BYTES;
use crate::{Collective, Key, Kind, LossBound, Preamble, RANKS_MAX, Rank, TAG_BYTES, WireError, bytes_at};

/// Length of an abort packet in bytes.
pub const ABORT_BYTES: usize = COLLECTIVES_OFFSET + 2 * Collective::BYTES + TAG_BYTES;
/// The offset of the first of the two collectives.
const COLLECTIVES_OFFSET: usize = PREAMBLE_BYTES + 8;

/// Why a job cannot go on. It names the ranks that are to blame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AbortReason {
    /// The worker's heartbeat stopped.
    Expelled(Rank),
    /// Two workers fed unlike tensors into one slot.
    Mismatch {
        /// The worker that came first, and what it is reducing.
        first: (Rank, Collective),
        /// The worker that disagreed with it, and what that one is reducing.
        second: (Rank, Collective),
    },
    /// The switch is shutting down.
    SwitchStopped,
    /// DLCP: two workers allow for unlike losses of one tensor.
    LossBounds {
        /// The worker that came first, and its bound.
        first: (Rank, LossBound),
        /// The worker that disagreed with it, and that one's bound.
        second: (Rank, LossBound),
    },
    /// GOAT: two workers have unlike sets of participants for one tensor.
    Participants {
        /// The worker that came first.
        first: Rank,
        /// The worker that disagreed with it.
        second: Rank,
    },
}

/// A checked abort packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abort {
    /// Job and addressee.
    pub preamble: Preamble,
    /// Why.
    pub reason: AbortReason,
}

impl Abort {
    /// Reads what follows the preamble of an abort packet. Its tag is the reader's to check.
    pub fn parse(preamble: Preamble, packet: &[u8]) -> Result<Self, WireError> {
        if preamble.kind != Kind::Abort {
            return Err(WireError::Kind(preamble.kind as u8));
        }
        let truncated = WireError::Truncated { need: ABORT_BYTES, have: packet.len() };
        if packet.len() < ABORT_BYTES {
            return Err(truncated);
        }
        let [code, _, a0, a1, b0, b1, _, _] = *bytes_at(packet, PREAMBLE_BYTES).ok_or(truncated)?;
        let [a, b] = [[a0, a1], [b0, b1]].map(u16::from_le_bytes);
        if u32::from(a.max(b)) >= RANKS_MAX {
            return Err(WireError::Field("rank"));
        }
        let first = bytes_at(packet, COLLECTIVES_OFFSET).ok_or(truncated)?;
        let second = bytes_at(packet, COLLECTIVES_OFFSET + Collective::BYTES).ok_or(truncated)?;
        let reason = match code {
            1 => AbortReason::Expelled(Rank(a)),
            2 => AbortReason::Mismatch {
                first: (Rank(a), Collective::parse(*first)?),
                second: (Rank(b), Collective::parse(*second)?),
            },
            3 => AbortReason::SwitchStopped,
            4 => AbortReason::LossBounds {
                first: (Rank(a), bound_of(first)?),
                second: (Rank(b), bound_of(second)?),
            },
            5 => AbortReason::Participants { first: Rank(a), second: Rank(b) },
            _ => return Err(WireError::Field("reason")),
        };
        Ok(Self { preamble, reason })
    }

    /// The packet as bytes, of the job that has `key`.
    #[must_use]
    pub fn to_bytes(&self, key: Key) -> [u8; ABORT_BYTES] {
        let mut out = [0; ABORT_BYTES];
        out[..PREAMBLE_BYTES].copy_from_slice(&self.preamble.to_bytes());
        let mut name = |at: usize, rank: Rank| {
            out[PREAMBLE_BYTES + at..][..2].copy_from_slice(&rank.0.to_le_bytes());
        };
        let code = match self.reason {
            AbortReason::Expelled(rank) => {
                name(2, rank);
                1
            }
            AbortReason::Mismatch { first, second } => {
                name(2, first.0);
                name(4, second.0);
                let collectives = [first.1, second.1].map(Collective::to_bytes);
                let bytes = collectives.as_flattened();
                out[COLLECTIVES_OFFSET..][..bytes.len()].copy_from_slice(bytes);
                2
            }
            AbortReason::SwitchStopped => 3,
            AbortReason::LossBounds { first, second } => {
                name(2, first.0);
                name(4, second.0);
                for (at, (_, bound)) in [(0, first), (Collective::BYTES, second)] {
                    out[COLLECTIVES_OFFSET + at..][..4].copy_from_slice(&bound.millionths().to_le_bytes());
                }
                4
            }
            AbortReason::Participants { first, second } => {
                name(2, first);
                name(4, second);
                5
            }
        };
        out[PREAMBLE_BYTES] = code;
        key.seal(&mut out);
        out
    }
}

/// A bound where another reason has a collective: the last four of its bytes mean nothing.
fn bound_of(&[m0, m1, m2, m3, ..]: &[u8; Collective::BYTES]) -> Result<LossBound, WireError> {
    LossBound::from_millionths(u32::from_le_bytes([m0, m1, m2, m3])).ok_or(WireError::Field("bound"))
}
