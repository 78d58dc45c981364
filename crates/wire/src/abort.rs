//! The packet that ends a job, with the reason in it.

use crate::preamble::PREAMBLE_BYTES;
use crate::{Collective, Key, Kind, Preamble, TAG_BYTES, WORKERS_MAX, WireError, WorkerId, bytes_at};

/// Length of an abort packet in bytes.
pub const ABORT_BYTES: usize = PREAMBLE_BYTES + 4 + 2 * Collective::BYTES + TAG_BYTES;

/// Why a job cannot go on. It names who is to blame; [`WorkerId::ALL`] is a rank of an ATP job that has no number here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AbortReason {
    /// The worker's heartbeat stopped.
    Expelled(WorkerId),
    /// Two workers fed unlike tensors into one slot.
    Mismatch {
        /// The worker that came first, and what it is reducing.
        first: (WorkerId, Collective),
        /// The worker that disagreed with it, and what that one is reducing.
        second: (WorkerId, Collective),
    },
    /// The switch is shutting down.
    SwitchStopped,
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
        let [code, a, b, _] = bytes_at(packet, PREAMBLE_BYTES).ok_or(truncated)?;
        let first = bytes_at(packet, PREAMBLE_BYTES + 4).ok_or(truncated)?;
        let named = |worker: u8| u32::from(worker) < WORKERS_MAX || worker == WorkerId::ALL.0;
        if !named(a) || !named(b) {
            return Err(WireError::Field("worker"));
        }
        let second = bytes_at(packet, PREAMBLE_BYTES + 4 + Collective::BYTES).ok_or(truncated)?;
        let reason = match code {
            1 => AbortReason::Expelled(WorkerId(a)),
            2 => AbortReason::Mismatch {
                first: (WorkerId(a), Collective::parse(first)?),
                second: (WorkerId(b), Collective::parse(second)?),
            },
            3 => AbortReason::SwitchStopped,
            _ => return Err(WireError::Field("reason")),
        };
        Ok(Self { preamble, reason })
    }

    /// The packet as bytes, of the job that has `key`.
    #[must_use]
    pub fn to_bytes(&self, key: Key) -> [u8; ABORT_BYTES] {
        let mut out = [0; ABORT_BYTES];
        out[..PREAMBLE_BYTES].copy_from_slice(&self.preamble.to_bytes());
        let at = PREAMBLE_BYTES;
        match self.reason {
            AbortReason::Expelled(worker) => out[at..at + 2].copy_from_slice(&[1, worker.0]),
            AbortReason::Mismatch { first, second } => {
                out[at..at + 3].copy_from_slice(&[2, first.0.0, second.0.0]);
                let (one, two) = (at + 4, at + 4 + Collective::BYTES);
                out[one..two].copy_from_slice(&first.1.to_bytes());
                out[two..two + Collective::BYTES].copy_from_slice(&second.1.to_bytes());
            }
            AbortReason::SwitchStopped => out[at] = 3,
        }
        key.seal(&mut out);
        out
    }
}
