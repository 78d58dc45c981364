//! The DLCP data packet: one block of a tensor, with its address in it (DLCP §3.2.3, Figure 9), and
//! how a network may treat it (§3.2.2).

use crate::preamble::PREAMBLE_BYTES;
use crate::signal::SIGNAL_PATH_OFFSET;
use crate::{FlowId, Key, Kind, Preamble, TAG_BYTES, WireError, bytes_at};

/// Preamble, block header and tag together, in bytes; the payload follows.
pub const BLOCK_HEADER_BYTES: usize = 36;
const TAG_OFFSET: usize = BLOCK_HEADER_BYTES - TAG_BYTES;
/// The offset of the packet's treatment.
const TREATMENT_OFFSET: usize = 22;

/// Queues of a port that packets are put into: the first is reserved for signals (DLCP §4.2).
pub const PRIORITIES: u8 = 8;
/// Most paths of a job: source ports of a rank, in each shard.
pub const PATHS_MAX: u8 = 16;

/// Length of the UDP payload that carries so many bytes of a block.
#[must_use]
pub const fn block_packet_bytes(payload_bytes: usize) -> usize {
    BLOCK_HEADER_BYTES + payload_bytes
}

/// How a network may treat a packet. Drivers make a DSCP, an ECN-capable bit and a source port of
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// Which queue: 0 is for signals and goes first, then front layers before back layers. Below
    /// [`PRIORITIES`].
    pub priority: u8,
    /// Whether it is marked at a queue's threshold and not dropped there: what is ECN-capable.
    pub important: bool,
    /// Which of the job's paths it takes: a source port. Below [`PATHS_MAX`].
    pub path: u8,
}

impl Tag {
    /// The treatment of a signal on the first path. An abort is not DLCP's alone: on sockets it has
    /// none.
    pub const SIGNAL: Self = Self { priority: 0, important: true, path: 0 };
    const IMPORTANT: u8 = 0x80;

    /// How a packet of DLCP may be treated; all of a train are treated alike.
    #[must_use]
    pub fn of_packet(packet: &[u8]) -> Self {
        const BLOCK: u8 = Kind::Block as u8;
        const SIGNAL: u8 = Kind::Signal as u8;
        match (packet.get(Kind::OFFSET), bytes_at(packet, TREATMENT_OFFSET), packet.get(SIGNAL_PATH_OFFSET)) {
            (Some(&BLOCK), Some(bytes), _) => Self::parse(*bytes).unwrap_or(Self::SIGNAL),
            (Some(&SIGNAL), _, Some(path)) => Self { path: *path, ..Self::SIGNAL },
            _ => Self::SIGNAL,
        }
    }

    /// The same, of what may be a packet of another protocol, which has none.
    #[must_use]
    pub fn of_any(packet: &[u8]) -> Option<Self> {
        const OF_DLCP: [u8; 2] = [Kind::Block as u8, Kind::Signal as u8];
        packet.get(Kind::OFFSET).filter(|kind| OF_DLCP.contains(kind)).map(|_| Self::of_packet(packet))
    }

    /// The byte of an IP header that asks for this treatment. It has the class selector of its
    /// queue (RFC 2474, §4.2.2); the highest goes first. It also says whether the transport is
    /// ECN-capable (RFC 3168).
    #[must_use]
    pub const fn traffic_class(self) -> u8 {
        (PRIORITIES - 1 - self.priority) << 5 | if self.important { ECT0 } else { 0 }
    }

    fn parse([byte, path]: [u8; 2]) -> Result<Self, WireError> {
        let priority = byte & !Self::IMPORTANT;
        if priority >= PRIORITIES {
            return Err(WireError::Field("priority"));
        }
        if path >= PATHS_MAX {
            return Err(WireError::Field("path"));
        }
        Ok(Self { priority, important: byte & Self::IMPORTANT != 0, path })
    }

    const fn to_bytes(self) -> [u8; 2] {
        [self.priority | if self.important { Self::IMPORTANT } else { 0 }, self.path]
    }
}

/// That the transport is ECN-capable, in an IP header's traffic class (RFC 3168).
const ECT0: u8 = 0b10;

/// The traffic class of a packet's IP header. Fragments of ATP and GOAT and their parameters are
/// ECN-capable (ATP §3.7); packets of DLCP have their [`Tag`]'s; others have none.
#[must_use]
pub fn traffic_class(packet: &[u8]) -> Option<u8> {
    const FRAGMENTS: [u8; 2] = [Kind::Gradient as u8, Kind::Planned as u8];
    match packet.get(Kind::OFFSET) {
        Some(kind) if FRAGMENTS.contains(kind) => Some(ECT0),
        _ => Tag::of_any(packet).map(Tag::traffic_class),
    }
}

/// Names a block of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockHeader {
    /// The flow.
    pub flow: FlowId,
    /// Number of the block within its flow.
    pub block: u32,
    /// How often its sender had been asked for missing blocks; wraps.
    pub round: u16,
    /// How it may be treated.
    pub tag: Tag,
    /// The number of contributions in the payload. A worker's own block has 1. If it is 0, nobody's
    /// came, and there is no payload.
    pub contributions: u16,
    /// Whether it is the last of its round: a stop that rides on data.
    pub last: bool,
    /// Whether a worker hands back a sum, which a server that lost its memory does not have.
    pub restored: bool,
}

/// A checked block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPacket<'a> {
    /// Sender and job.
    pub preamble: Preamble,
    /// Which block.
    pub header: BlockHeader,
    /// Its elements, little-endian, as many as the block has. Whether that is their length only who
    /// knows the flow can say.
    pub payload: &'a [u8],
}

impl<'a> BlockPacket<'a> {
    /// Reads what follows the preamble of a block. Its tag is the reader's to check.
    #[inline]
    pub fn parse(preamble: Preamble, packet: &'a [u8]) -> Result<Self, WireError> {
        if preamble.kind != Kind::Block {
            return Err(WireError::Kind(preamble.kind as u8));
        }
        let truncated = WireError::Truncated { need: BLOCK_HEADER_BYTES, have: packet.len() };
        let head: &[u8; TAG_OFFSET - PREAMBLE_BYTES] = bytes_at(packet, PREAMBLE_BYTES).ok_or(truncated)?;
        let &[f0, f1, f2, f3, b0, b1, b2, b3, r0, r1, treatment, path, c0, c1, last, restored] = head;
        let payload = packet.get(BLOCK_HEADER_BYTES..).ok_or(truncated)?;
        if last > 1 {
            return Err(WireError::Field("last"));
        }
        if restored > 1 {
            return Err(WireError::Field("restored"));
        }
        let contributions = u16::from_le_bytes([c0, c1]);
        if contributions == 0 && !payload.is_empty() {
            return Err(WireError::PayloadLength(payload.len()));
        }
        Ok(Self {
            preamble,
            header: BlockHeader {
                flow: FlowId(u32::from_le_bytes([f0, f1, f2, f3])),
                block: u32::from_le_bytes([b0, b1, b2, b3]),
                round: u16::from_le_bytes([r0, r1]),
                tag: Tag::parse([treatment, path])?,
                contributions,
                last: last != 0,
                restored: restored != 0,
            },
            payload,
        })
    }

    /// Writes a packet of the job that has `key` into `out`, which is as long as it: its payload
    /// through `fill`.
    ///
    /// # Panics
    /// When `out` is shorter than a header.
    #[inline]
    pub fn write(
        out: &mut [u8],
        key: Key,
        preamble: &Preamble,
        header: &BlockHeader,
        fill: impl FnOnce(&mut [u8]),
    ) {
        out[..PREAMBLE_BYTES].copy_from_slice(&preamble.to_bytes());
        out[12..16].copy_from_slice(&header.flow.0.to_le_bytes());
        out[16..20].copy_from_slice(&header.block.to_le_bytes());
        out[20..22].copy_from_slice(&header.round.to_le_bytes());
        out[TREATMENT_OFFSET..24].copy_from_slice(&header.tag.to_bytes());
        out[24..26].copy_from_slice(&header.contributions.to_le_bytes());
        out[26..TAG_OFFSET].copy_from_slice(&[header.last.into(), header.restored.into()]);
        key.seal(out);
        fill(&mut out[BLOCK_HEADER_BYTES..]);
    }
}
