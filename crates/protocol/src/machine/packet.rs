//! A packet at the door of a machine: its preamble is read once, and handed on with the bytes.

use fanin_wire::{Key, Preamble};

use super::Reason;

/// A datagram of this version of the wire format. Its tag, and whatever follows the preamble, are
/// not checked yet. The two fields agree: whoever makes one from parts sees to that.
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

    /// Whether somebody with the job's key wrote it; or why that is not known.
    #[inline]
    pub(crate) fn authenticate(&self, key: Key) -> Result<(), Reason> {
        match key.wrote(self.bytes) {
            Some(true) => Ok(()),
            Some(false) => Err(Reason::Forged),
            None => Err(Reason::Malformed),
        }
    }
}
