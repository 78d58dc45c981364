//! The key of a job, which nobody outside the job has, and what is made of it.

use siphasher::sip::SipHasher13;

use crate::{
    ABORT_BYTES, BLOCK_HEADER_BYTES, Flags, GRADIENT_HEADER_BYTES, GradientHeader, Kind, Rank,
    SLOT_HEADER_BYTES,
};

/// Length of the tag that ends the header of every packet, and a DLCP signal as a whole.
pub const TAG_BYTES: usize = 8;
/// What is hashed for [`Key::lineage`]: no packet's header and no rank is as long.
const LINEAGE: &[u8] = b"lineage";

/// The key of a job: drawn at random when it is admitted, told to its ranks over control, and to the switches between them.
///
/// SipHash-1-3 under it makes the tags of the job's packets, and what a rank shows in its control calls.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Key(pub u128);

impl Key {
    /// Its length as bytes.
    pub const BYTES: usize = 16;

    /// The key whose bytes these are.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(u128::from_le_bytes(bytes))
    }

    /// The key as bytes.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0.to_le_bytes()
    }

    /// What a rank shows in its control calls, to be taken for this rank of the job.
    #[must_use]
    pub fn secret_of(self, rank: Rank) -> u64 {
        self.hash(&rank.0.to_le_bytes())
    }

    /// What the ranks of a job show when their switch forgot it: the same for all of them, and known to nobody else.
    #[must_use]
    pub fn lineage(self) -> u64 {
        self.hash(LINEAGE)
    }

    /// Whether the packet's header is one that somebody with this key wrote. Of its payload that says nothing.
    #[inline]
    #[must_use]
    pub fn authenticates(self, packet: &[u8]) -> bool {
        self.tag_of(packet).is_some_and(|(at, tag)| {
            packet.get(at..at + TAG_BYTES).is_some_and(|written| written == tag.to_le_bytes())
        })
    }

    /// Writes the tag of the header that precedes it. A packet that is too short for one stays as it is.
    #[inline]
    pub fn seal(self, packet: &mut [u8]) {
        if let Some((at, tag)) = self.tag_of(packet)
            && let Some(place) = packet.get_mut(at..at + TAG_BYTES)
        {
            place.copy_from_slice(&tag.to_le_bytes());
        }
    }

    /// Where a packet's tag stands, and what it is to be.
    #[inline]
    fn tag_of(self, packet: &[u8]) -> Option<(usize, u64)> {
        const GRADIENT: u8 = Kind::Gradient as u8;
        const PLANNED: u8 = Kind::Planned as u8;
        const ABORT: u8 = Kind::Abort as u8;
        const BLOCK: u8 = Kind::Block as u8;
        const SIGNAL: u8 = Kind::Signal as u8;
        match *packet.get(Kind::OFFSET)? {
            GRADIENT | PLANNED => {
                const AT: usize = GRADIENT_HEADER_BYTES - TAG_BYTES;
                let mut header: [u8; AT] = *packet.first_chunk()?;
                // The one bit that a queue on the way may set (ATP §3.7).
                header[GradientHeader::FLAGS_OFFSET] &= !Flags::ECN;
                Some((AT, self.hash(&header)))
            }
            kind => {
                let bytes = match kind {
                    ABORT => ABORT_BYTES,
                    BLOCK => BLOCK_HEADER_BYTES,
                    // All of it: what it says decides, and is short.
                    SIGNAL => packet.len(),
                    _ => SLOT_HEADER_BYTES,
                };
                let at = bytes.checked_sub(TAG_BYTES)?;
                Some((at, self.hash(packet.get(..at)?)))
            }
        }
    }

    #[inline]
    fn hash(self, bytes: &[u8]) -> u64 {
        SipHasher13::new_with_key(&self.to_bytes()).hash(bytes)
    }
}

/// Nothing of it: a key must not get into a log.
impl core::fmt::Debug for Key {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Key(..)")
    }
}
