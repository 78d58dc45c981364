//! How the packets of a job are secured between the machines that have its key, and what a secured
//! packet looks like.

use crate::preamble::PREAMBLE_BYTES;
use crate::{Key, TAG_BYTES};

/// Bytes of a secured packet's nonce: 8 that its sender drew, and 4 that count its packets.
pub const NONCE_BYTES: usize = 12;
/// Bytes of the tag that ends a secured packet.
pub const SEAL_TAG_BYTES: usize = 16;
/// Bytes with which a secured packet begins: the preamble, which steers it, and the nonce.
pub const SEALED_HEAD_BYTES: usize = PREAMBLE_BYTES + NONCE_BYTES;
/// How much longer a packet is where it is secured: its header's tag is left out, as whoever opens
/// it can make that.
pub const SEAL_BYTES: usize = NONCE_BYTES + SEAL_TAG_BYTES - TAG_BYTES;

/// How the packets of a job are secured. All members of a job do alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Security {
    /// Headers are tagged: nobody without the job's key can send a packet that counts. Somebody who
    /// changes packets on their way changes payloads.
    #[default]
    Tag = 0,
    /// The whole packet is authenticated (AES-128-GMAC): a packet that was changed on its way is
    /// dropped. Payloads are readable.
    Authenticate = 1,
    /// All that follows the preamble is encrypted, too (AES-128-GCM).
    Encrypt = 2,
}

impl Security {
    /// Every one, the weakest first.
    pub const ALL: [Self; 3] = [Self::Tag, Self::Authenticate, Self::Encrypt];

    /// Its name on command lines and in messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tag => "tag",
            Self::Authenticate => "authenticate",
            Self::Encrypt => "encrypt",
        }
    }

    /// The security of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|security| security.name() == name)
    }

    /// The security of this number, which is its place in [`Self::ALL`].
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// How much longer packets are than their format says.
    #[must_use]
    pub const fn extra_bytes(self) -> usize {
        match self {
            Self::Tag => 0,
            Self::Authenticate | Self::Encrypt => SEAL_BYTES,
        }
    }
}

/// Lays a packet out to be secured in `out`, which is [`SEAL_BYTES`] longer: preamble, nonce,
/// header, payload, and room for the tag. It does not yet encrypt or authenticate. `None` for what
/// is no packet.
#[must_use]
pub fn begin_sealed(packet: &[u8], nonce: [u8; NONCE_BYTES], out: &mut [u8]) -> Option<()> {
    let tag_at = Key::tag_offset(packet).filter(|at| *at >= PREAMBLE_BYTES)?;
    let rest = packet.get(tag_at + TAG_BYTES..)?;
    let (head, body) = out.split_at_mut_checked(SEALED_HEAD_BYTES)?;
    head[..PREAMBLE_BYTES].copy_from_slice(&packet[..PREAMBLE_BYTES]);
    head[PREAMBLE_BYTES..].copy_from_slice(&nonce);
    let (header, body) = body.split_at_mut_checked(tag_at - PREAMBLE_BYTES)?;
    header.copy_from_slice(&packet[PREAMBLE_BYTES..tag_at]);
    body.get_mut(..rest.len())?.copy_from_slice(rest);
    Some(())
}

/// Makes a packet again of one that was secured, and has been decrypted and found authentic, with
/// its header's tag. The payload stays where it is. `None` where none was secured.
#[must_use]
pub fn end_sealed(key: Key, sealed: &mut [u8]) -> Option<&mut [u8]> {
    // The preamble and the header's rest move towards the payload: a nonce goes, and a tag comes.
    const BEGIN: usize = NONCE_BYTES - TAG_BYTES;
    let end = sealed.len().checked_sub(SEAL_TAG_BYTES)?;
    let tag_at = Key::tag_offset_in(*sealed.get(crate::Kind::OFFSET)?, end.checked_sub(BEGIN)?)?;
    let tag_place = BEGIN + tag_at..BEGIN + tag_at + TAG_BYTES;
    if tag_at < PREAMBLE_BYTES || tag_place.end > end {
        return None;
    }
    sealed.copy_within(..PREAMBLE_BYTES, BEGIN);
    sealed.copy_within(SEALED_HEAD_BYTES..tag_place.end, BEGIN + PREAMBLE_BYTES);
    let packet = &mut sealed[BEGIN..end];
    key.seal(packet);
    Some(packet)
}
