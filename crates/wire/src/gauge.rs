//! The packets that measure the rate of a link before a job begins. Their port is open only
//! meanwhile. They belong to no job and have no tag: a ticket shows that the sender was told of the
//! measurement.

use crate::{MAGIC, VERSION, WireError, bytes_at};

/// Length of what a filler begins with, in bytes. Any number of bytes may follow.
pub const FILLER_BYTES: usize = 20;
/// Length of a reading in bytes.
pub const READING_BYTES: usize = 28;
/// The offset of the kind. The numbers are none of [`crate::Kind`].
const KIND_OFFSET: usize = 3;
const FILLER: u8 = 64;
const READING: u8 = 65;

/// A packet that fills a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filler {
    /// The measurement's.
    pub ticket: u64,
    /// Of this sender's packets, from 0.
    pub sequence: u64,
}

/// The answer to fillers: what was received so far. It is shorter than any of them may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// The measurement's.
    pub ticket: u64,
    /// One more than the highest sequence that came from the addressee.
    pub reached: u64,
    /// The bits a second that come from all senders together, with headers; 0 if it is too early to
    /// tell.
    pub rate_bps: u64,
}

impl Filler {
    /// Reads and checks the beginning of a packet that is no shorter than a reading, so that
    /// answers never are more than what they answer.
    pub fn parse(packet: &[u8]) -> Result<Self, WireError> {
        let [ticket, sequence] = words(packet, FILLER, READING_BYTES)?;
        Ok(Self { ticket, sequence })
    }

    /// The beginning as bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; FILLER_BYTES] {
        written(FILLER, &[self.ticket, self.sequence])
    }
}

impl Reading {
    /// Reads and checks a packet.
    pub fn parse(packet: &[u8]) -> Result<Self, WireError> {
        let [ticket, reached, rate_bps] = words(packet, READING, READING_BYTES)?;
        Ok(Self { ticket, reached, rate_bps })
    }

    /// The packet as bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; READING_BYTES] {
        written(READING, &[self.ticket, self.reached, self.rate_bps])
    }
}

fn words<const N: usize>(packet: &[u8], expected: u8, need: usize) -> Result<[u64; N], WireError> {
    let truncated = WireError::Truncated { need, have: packet.len() };
    if packet.len() < need {
        return Err(truncated);
    }
    let [m0, m1, version, kind] = *bytes_at(packet, 0).ok_or(truncated)?;
    let magic = u16::from_le_bytes([m0, m1]);
    if magic != MAGIC {
        return Err(WireError::Magic(magic));
    }
    if version != VERSION {
        return Err(WireError::Version { theirs: version, ours: VERSION });
    }
    if kind != expected {
        return Err(WireError::Kind(kind));
    }
    let mut words = [0; N];
    for (index, word) in words.iter_mut().enumerate() {
        let bytes = bytes_at(packet, KIND_OFFSET + 1 + size_of::<u64>() * index).ok_or(truncated)?;
        *word = u64::from_le_bytes(*bytes);
    }
    Ok(words)
}

fn written<const BYTES: usize>(kind: u8, words: &[u64]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    bytes[..2].copy_from_slice(&MAGIC.to_le_bytes());
    bytes[2] = VERSION;
    bytes[KIND_OFFSET] = kind;
    let (places, _) = bytes[KIND_OFFSET + 1..].as_chunks_mut();
    for (place, word) in places.iter_mut().zip(words) {
        *place = word.to_le_bytes();
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As docs/wire.md has them.
    const FILLER_GOLDEN: &str = "51fa0640 0807060504030201 0c0b0a0900000000";
    const READING_GOLDEN: &str = "51fa0641 0807060504030201 0d0b0a0900000000 00ca9a3b00000000";

    fn same(bytes: &[u8], golden: &str) -> bool {
        let digits = golden.bytes().filter(|byte| *byte != b' ');
        let nibbles = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
        let hex = nibbles.map(|nibble| b"0123456789abcdef"[usize::from(nibble)]);
        hex.eq(digits)
    }

    #[test]
    fn packets_are_the_golden_bytes_both_ways() {
        let ticket = 0x0102_0304_0506_0708;
        let filler = Filler { ticket, sequence: 0x090a_0b0c };
        let reading = Reading { ticket, reached: 0x090a_0b0d, rate_bps: 1_000_000_000 };
        assert!(same(&filler.to_bytes(), FILLER_GOLDEN));
        assert!(same(&reading.to_bytes(), READING_GOLDEN));
        let mut packet = [7; 1400];
        packet[..FILLER_BYTES].copy_from_slice(&filler.to_bytes());
        assert_eq!(Filler::parse(&packet), Ok(filler));
        assert_eq!(Reading::parse(&reading.to_bytes()), Ok(reading));
    }

    #[test]
    fn what_is_none_of_them_is_refused() {
        let reading = Reading { ticket: 1, reached: 2, rate_bps: 3 }.to_bytes();
        assert_eq!(Filler::parse(&reading), Err(WireError::Kind(READING)));
        let short = Filler { ticket: 1, sequence: 2 }.to_bytes();
        let truncated = Err(WireError::Truncated { need: READING_BYTES, have: FILLER_BYTES });
        assert_eq!(Filler::parse(&short), truncated, "its answer would be longer");
        for (at, error) in [
            (0, WireError::Magic(MAGIC ^ 1)),
            (2, WireError::Version { theirs: VERSION ^ 1, ours: VERSION }),
            (KIND_OFFSET, WireError::Kind(READING ^ 1)),
        ] {
            let mut other = reading;
            other[at] ^= 1;
            assert_eq!(Reading::parse(&other), Err(error));
        }
        for length in 0..READING_BYTES {
            assert!(Reading::parse(&reading[..length]).is_err());
        }
    }
}
