//! A packet at the door of a machine: its preamble is read once, and handed on with the bytes.

use fanin_wire::{Generation, Key, Preamble, TAG_BYTES};

use super::Reason;

/// A datagram of this version of the wire format. Its tag, and whatever follows the preamble, are
/// not checked yet.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// What its first bytes say.
    pub preamble: Preamble,
    /// All of it, the preamble included.
    pub bytes: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Reads the preamble of a datagram.
    ///
    /// # Errors
    /// Why it is none of ours.
    #[inline]
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Reason> {
        Ok(Self { preamble: Preamble::parse(bytes)?, bytes })
    }

    /// Whether somebody with the job's key wrote it, in this generation of the job.
    #[inline]
    pub(crate) fn authenticate(&self, generation: Generation, key: Key) -> Result<(), Reason> {
        if self.preamble.generation != generation {
            return Err(Reason::Generation);
        }
        if key.authenticates(self.bytes) {
            return Ok(());
        }
        let tag = Key::tag_offset(self.bytes).and_then(|at| self.bytes.get(at..at + TAG_BYTES));
        Err(if tag.is_some() { Reason::Forged } else { Reason::Malformed })
    }
}
