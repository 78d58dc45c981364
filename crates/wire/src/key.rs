//! The key of a job, which nobody outside the job has, and what is made of it.

use siphasher::sip::SipHasher13;

use crate::{
    ABORT_BYTES, BLOCK_HEADER_BYTES, Flags, GRADIENT_HEADER_BYTES, GradientHeader, Kind,
    PLANNED_HEADER_BYTES, Rank, SLOT_HEADER_BYTES, Security,
};

/// Length of the tag that ends the header of every packet, and a DLCP signal as a whole.
pub const TAG_BYTES: usize = 8;
/// The text that is hashed for [`Key::lineage`]: no packet's header and no rank is as long.
const LINEAGE: &[u8] = b"lineage";

/// The key of a job: drawn at random when it is admitted, told to its ranks over control, and to
/// the switches between them.
///
/// SipHash-1-3 under it makes the tags of the job's packets, and what a rank shows in its control
/// calls. The key also says how the packets are secured beyond that, so nobody knows the one
/// without the other.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Key {
    secret: u128,
    security: Security,
}

impl Key {
    /// Its length as bytes.
    pub const BYTES: usize = 17;

    /// A key of packets that are tagged alone.
    #[must_use]
    pub const fn new(secret: u128) -> Self {
        Self { secret, security: Security::Tag }
    }

    /// The same, of packets that are secured so.
    #[must_use]
    pub const fn with(self, security: Security) -> Self {
        Self { security, ..self }
    }

    /// How packets under it are secured.
    #[must_use]
    pub const fn security(self) -> Security {
        self.security
    }

    /// The part that nobody outside the job knows.
    #[must_use]
    pub const fn secret(self) -> u128 {
        self.secret
    }

    /// The key whose bytes these are: its secret, and the number of how packets are secured.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let (secret, security) = (bytes.first_chunk()?, bytes.last()?);
        Some(Self { secret: u128::from_le_bytes(*secret), security: Security::from_number(*security)? })
    }

    /// The key as bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [self.security as u8; Self::BYTES];
        bytes[..16].copy_from_slice(&self.secret.to_le_bytes());
        bytes
    }

    /// The secret that a rank shows in its control calls, to be taken for this rank of the job.
    #[must_use]
    pub fn secret_of(self, rank: Rank) -> u64 {
        self.hash(&rank.0.to_le_bytes())
    }

    /// The value that the ranks of a job show when their switch forgot it: the same for all of
    /// them, and known to nobody else.
    #[must_use]
    pub fn lineage(self) -> u64 {
        self.hash(LINEAGE)
    }

    /// Whether somebody with this key wrote the packet's header; `None` if the packet was cut
    /// before the end of its tag. It says nothing of the payload.
    #[inline]
    #[must_use]
    pub fn wrote(self, packet: &[u8]) -> Option<bool> {
        let (at, tag) = self.tag_of(packet)?;
        packet.get(at..at + TAG_BYTES).map(|written| written == tag.to_le_bytes())
    }

    /// Whether the packet has a tag, and somebody with this key wrote its header.
    #[inline]
    #[must_use]
    pub fn authenticates(self, packet: &[u8]) -> bool {
        self.wrote(packet) == Some(true)
    }

    /// Writes the tag of the header that precedes it. A packet that is too short for one does not
    /// change.
    #[inline]
    pub fn seal(self, packet: &mut [u8]) {
        if let Some((at, tag)) = self.tag_of(packet)
            && let Some(place) = packet.get_mut(at..at + TAG_BYTES)
        {
            place.copy_from_slice(&tag.to_le_bytes());
        }
    }

    /// Offset of a packet's tag, which a packet that was cut may lack.
    pub(crate) fn tag_offset(packet: &[u8]) -> Option<usize> {
        Self::tag_offset_in(*packet.get(Kind::OFFSET)?, packet.len())
    }

    /// Offset of the tag of a packet of this kind and length.
    #[inline]
    pub(crate) fn tag_offset_in(kind: u8, packet_bytes: usize) -> Option<usize> {
        const GRADIENT: u8 = Kind::Gradient as u8;
        const PLANNED: u8 = Kind::Planned as u8;
        const ABORT: u8 = Kind::Abort as u8;
        const BLOCK: u8 = Kind::Block as u8;
        const SIGNAL: u8 = Kind::Signal as u8;
        let bytes = match kind {
            GRADIENT => GRADIENT_HEADER_BYTES,
            PLANNED => PLANNED_HEADER_BYTES,
            ABORT => ABORT_BYTES,
            BLOCK => BLOCK_HEADER_BYTES,
            // All of it: what it says decides, and is short.
            SIGNAL => packet_bytes,
            _ => SLOT_HEADER_BYTES,
        };
        bytes.checked_sub(TAG_BYTES)
    }

    /// Offset of a packet's tag, and the tag that is to be there.
    #[inline]
    fn tag_of(self, packet: &[u8]) -> Option<(usize, u64)> {
        const GRADIENT: u8 = Kind::Gradient as u8;
        const PLANNED: u8 = Kind::Planned as u8;
        let at = Self::tag_offset(packet)?;
        let tag = match packet[Kind::OFFSET] {
            GRADIENT => self.hash(&unmarked::<{ GRADIENT_HEADER_BYTES - TAG_BYTES }>(packet)?),
            PLANNED => self.hash(&unmarked::<{ PLANNED_HEADER_BYTES - TAG_BYTES }>(packet)?),
            _ => self.hash(packet.get(..at)?),
        };
        Some((at, tag))
    }

    #[inline]
    fn hash(self, bytes: &[u8]) -> u64 {
        SipHasher13::new_with_key(&self.secret.to_le_bytes()).hash(bytes)
    }
}

/// The first bytes of a gradient packet without the one bit that a queue on the way may set (ATP
/// §3.7).
#[inline]
fn unmarked<const N: usize>(packet: &[u8]) -> Option<[u8; N]> {
    let mut header: [u8; N] = *packet.first_chunk()?;
    header[GradientHeader::FLAGS_OFFSET] &= !Flags::ECN;
    Some(header)
}

/// Nothing of it: a key must not get into a log.
impl core::fmt::Debug for Key {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Key(..)")
    }
}
