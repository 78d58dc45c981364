//! The packet of ATP and GOAT (ATP §3.3, Figure 5; GOAT §III-D). It carries one fragment of a
//! gradient to the parameter server, or the parameters back. The two protocols differ in their
//! [`Label`], which says where a fragment is summed, and who is in it.

use crate::preamble::PREAMBLE_BYTES;
use crate::{
    AggregationNode, Collective, Key, Kind, Participants, Pattern, Preamble, SubModel, TAG_BYTES, WireError,
    bytes_at,
};

/// Preamble, ATP's gradient header and tag together, in bytes; the payload follows.
pub const GRADIENT_HEADER_BYTES: usize = 72;
/// As [`GRADIENT_HEADER_BYTES`], of GOAT's header: the participants stand before the tag.
pub const PLANNED_HEADER_BYTES: usize = GRADIENT_HEADER_BYTES + 16;
/// The offset of the participants.
const PARTICIPANTS_OFFSET: usize = GRADIENT_HEADER_BYTES - TAG_BYTES;
/// Levels that an aggregation hierarchy may have: the two of ATP §3.4, and two more (§A.2).
pub const LEVELS_MAX: usize = 4;
/// Most children of a switch in a job: its bitmap is one 32-bit word (ATP §3.4), so two levels
/// serve 1,024 workers.
pub const CHILDREN_MAX: usize = 32;
/// The payload lengths, in elements of four bytes. The length 64 is nearest to the paper's 62.
/// Under IPv4 and IPv6, 336 fills an Ethernet frame of 1500 bytes, and 2048 one of 9000.
pub const FRAGMENT_ELEMENTS: [usize; 5] = [64, 256, 336, 1024, 2048];

/// Elements that a simulation carries of longer packets, whose other elements are there in length
/// alone. A machine takes them as it takes one of [`FRAGMENT_ELEMENTS`]; no job on a network is
/// admitted with them.
pub const SAMPLE_ELEMENTS: usize = 8;

/// Whether a fragment has so many elements: one of [`FRAGMENT_ELEMENTS`], or [`SAMPLE_ELEMENTS`].
#[must_use]
pub fn is_fragment(elements: usize) -> bool {
    elements == SAMPLE_ELEMENTS || FRAGMENT_ELEMENTS.contains(&elements)
}

/// Length of the longest UDP payload that carries a fragment of `elements`, which is labelled with
/// `L`: they have four bytes each.
#[must_use]
pub const fn fragment_packet_bytes<L: Label>(elements: usize) -> usize {
    L::HEADER_BYTES + elements * 4
}

/// The largest of [`FRAGMENT_ELEMENTS`] whose packet, labelled with `L`, passes a path of `mtu`
/// bytes unfragmented; `None` when even the smallest does not.
#[must_use]
pub fn fragment_elements_for_mtu<L: Label>(mtu: usize) -> Option<usize> {
    let fits = |elements: &usize| fragment_packet_bytes::<L>(*elements) + crate::IP_UDP_BYTES <= mtu;
    FRAGMENT_ELEMENTS.into_iter().rev().find(fits)
}

/// The place of a packet's gradients in the aggregation hierarchy: each switch on the way needs it
/// to aggregate them (ATP §3.3). Unused levels are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Directions {
    /// The level of the switch that the packet reaches next: ATP's edge switch identifier, which
    /// the paper's two levels fit into one bit. A worker that is attached to a second-level switch
    /// starts at 1.
    pub level: u8,
    /// At each level, who contributed: one bit of a worker or switch that is to be aggregated,
    /// several when it was.
    pub bitmaps: [u32; LEVELS_MAX],
    /// At each level, how many contributions the switch waits for.
    pub fan_in_degrees: [u8; LEVELS_MAX],
}

impl Label for Directions {
    const KIND: Kind = Kind::Gradient;
    const HEADER_BYTES: usize = GRADIENT_HEADER_BYTES;

    fn read(head: &[u8; GRADIENT_HEADER_BYTES], _: &[u8]) -> Result<Self, WireError> {
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let level = head[12];
        if usize::from(level) > LEVELS_MAX {
            return Err(WireError::Field("level"));
        }
        let fan_in_degrees = [head[56], head[57], head[58], head[59]];
        if fan_in_degrees.iter().any(|degree| usize::from(*degree) > CHILDREN_MAX) {
            return Err(WireError::Field("fan_in_degrees"));
        }
        Ok(Self { level, bitmaps: [word(40), word(44), word(48), word(52)], fan_in_degrees })
    }

    fn write(&self, out: &mut [u8]) {
        out[12] = self.level;
        for (level, bitmap) in self.bitmaps.iter().enumerate() {
            out[40 + 4 * level..44 + 4 * level].copy_from_slice(&bitmap.to_le_bytes());
        }
        out[56..60].copy_from_slice(&self.fan_in_degrees);
    }
}

/// Most workers of a GOAT job: a packet names them in one word of 128 bits.
pub const PLANNED_WORKERS_MAX: usize = 128;

/// The switch that sums a fragment by the plan, and the workers that are in it: GOAT's identifier
/// <aggregation node, sub-model, fragment> (§III-D), whose third part is
/// [`FragmentHeader::aggregator_index`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PlannedDirections {
    /// It has left its aggregation node, or does not go there: it is on its way to the server.
    pub passed: bool,
    /// The node that sums it.
    pub aggregation_node: AggregationNode,
    /// The part of the model that it is of.
    pub sub_model: SubModel,
    /// The workers whose contributions are in it, a bit for each rank; none in parameters.
    pub workers: u128,
    /// The workers that contribute to the fragment: no switch waits for others (GOAT §V, `K_t^s`).
    pub participants: Participants,
}

impl Label for PlannedDirections {
    const KIND: Kind = Kind::Planned;
    const HEADER_BYTES: usize = PLANNED_HEADER_BYTES;

    fn read(head: &[u8; GRADIENT_HEADER_BYTES], packet: &[u8]) -> Result<Self, WireError> {
        let passed = match head[12] {
            0 => false,
            1 => true,
            _ => return Err(WireError::Field("passed")),
        };
        let mut workers = [0; 16];
        workers.copy_from_slice(&head[40..56]);
        let truncated = WireError::Truncated { need: PLANNED_HEADER_BYTES, have: packet.len() };
        let participants: &[u8; 16] = bytes_at(packet, PARTICIPANTS_OFFSET).ok_or(truncated)?;
        Ok(Self {
            passed,
            aggregation_node: AggregationNode(u16::from_le_bytes([head[56], head[57]])),
            sub_model: SubModel(u16::from_le_bytes([head[58], head[59]])),
            workers: u128::from_le_bytes(workers),
            participants: Participants(u128::from_le_bytes(*participants)),
        })
    }

    fn write(&self, out: &mut [u8]) {
        out[12] = self.passed.into();
        out[40..56].copy_from_slice(&self.workers.to_le_bytes());
        out[56..58].copy_from_slice(&self.aggregation_node.0.to_le_bytes());
        out[58..60].copy_from_slice(&self.sub_model.0.to_le_bytes());
        out[PARTICIPANTS_OFFSET..][..16].copy_from_slice(&self.participants.0.to_le_bytes());
    }

    fn participants(&self) -> Participants {
        self.participants
    }
}

/// The label of a fragment on its way: where it is summed, and who is in it. It has the bytes 12
/// and 40 to 59 of the header, and what is between byte 64 and the tag.
pub trait Label: Copy + core::fmt::Debug + PartialEq + Eq + Default {
    /// The kind of packets that have such a label.
    const KIND: Kind;
    /// Preamble, header and tag together, in bytes: [`GRADIENT_HEADER_BYTES`] or more.
    const HEADER_BYTES: usize;

    /// Reads it from the header of a packet.
    ///
    /// # Errors
    /// When a field is outside its range, or the packet is shorter than its header.
    fn read(head: &[u8; GRADIENT_HEADER_BYTES], packet: &[u8]) -> Result<Self, WireError>;

    /// Writes it to where it stands in a header.
    fn write(&self, out: &mut [u8]);

    /// The ranks that contribute to the fragment.
    fn participants(&self) -> Participants {
        Participants::ALL
    }
}

/// The single bits of a gradient packet (ATP §3.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Flags {
    /// Sent again, or to be treated so: what a switch has of the fragment goes on to the server. In
    /// parameters: a packet of their fragment was lost.
    pub resend: bool,
    /// A switch had no aggregator for it.
    pub collision: bool,
    /// A queue on the way was longer than its threshold.
    pub ecn: bool,
    /// Parameters from the server, which acknowledge the fragment.
    pub is_ack: bool,
    /// From the server: the sum overflowed, send the original values. From a worker: these are
    /// they, in the tensor's own type widened to four bytes; no switch adds them (§3.8).
    pub overflow: bool,
    /// From a worker: the parameters that it has, for a server that lost its memory.
    pub restore: bool,
    /// Sent again although it was not lost: a switch had it in an aggregator, which others were
    /// missing from.
    pub stalled: bool,
    /// Its elements have two bytes, in the type that [`Collective::half`] says: nobody has added
    /// anything to them yet, or they are parameters. Integers that were added have four.
    pub half: bool,
}

impl Flags {
    const RESEND: u8 = 1;
    const COLLISION: u8 = 2;
    pub(crate) const ECN: u8 = 4;
    const IS_ACK: u8 = 8;
    const OVERFLOW: u8 = 16;
    const RESTORE: u8 = 32;
    const STALLED: u8 = 64;
    const HALF: u8 = 128;

    const fn from_bits(bits: u8) -> Self {
        Self {
            resend: bits & Self::RESEND != 0,
            collision: bits & Self::COLLISION != 0,
            ecn: bits & Self::ECN != 0,
            is_ack: bits & Self::IS_ACK != 0,
            overflow: bits & Self::OVERFLOW != 0,
            restore: bits & Self::RESTORE != 0,
            stalled: bits & Self::STALLED != 0,
            half: bits & Self::HALF != 0,
        }
    }

    fn bits(self) -> u8 {
        [
            (self.resend, Self::RESEND),
            (self.collision, Self::COLLISION),
            (self.ecn, Self::ECN),
            (self.is_ack, Self::IS_ACK),
            (self.overflow, Self::OVERFLOW),
            (self.restore, Self::RESTORE),
            (self.stalled, Self::STALLED),
            (self.half, Self::HALF),
        ]
        .into_iter()
        .fold(0, |bits, (set, bit)| bits | if set { bit } else { 0 })
    }
}

/// The header of an ATP packet's fragment.
pub type GradientHeader = FragmentHeader<Directions>;
/// A checked ATP packet.
pub type GradientPacket<'a> = FragmentPacket<'a, Directions>;
/// The header of a GOAT packet's fragment.
pub type PlannedHeader = FragmentHeader<PlannedDirections>;
/// A checked GOAT packet.
pub type PlannedPacket<'a> = FragmentPacket<'a, PlannedDirections>;

/// The header of a packet's fragment, which is labelled with `L`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FragmentHeader<L> {
    /// The flags, by which it is treated on the way.
    pub flags: Flags,
    /// The workers in it, and where it is summed.
    pub directions: L,
    /// Number of the fragment in the job's stream of all tensors. It does not wrap.
    pub sequence: u64,
    /// ATP: the aggregator that it uses on every switch; in parameters the same, which they free.
    /// Parameters carry in their first bitmap the index to use when the turn of this place in the
    /// window comes again (§3.6). GOAT: its number within its sub-model.
    pub aggregator_index: u32,
    /// Number of the fragment within its tensor.
    pub fragment: u32,
    /// The tensor.
    pub collective: Collective,
    /// Exponent that the payload is scaled by, [`GradientHeader::STATIC_FACTOR`] with the job's
    /// fixed factor (§3.8). Elements of two bytes are scaled by it where they are added.
    pub exponent: i16,
    /// Exponent of the fragment that is a window ahead. It is the largest value of the sender's, or
    /// merged, of the workers'; in parameters it is the exponent that the fragment is to be scaled
    /// by (§B.3).
    pub next_exponent: i16,
}

impl<L: Label> FragmentHeader<L> {
    /// Length of the UDP payload that carries `elements` of it.
    #[must_use]
    pub const fn packet_bytes(&self, elements: usize) -> usize {
        L::HEADER_BYTES + elements * self.element_bytes()
    }
}

impl<L> FragmentHeader<L> {
    /// Bytes of each element of the payload.
    #[must_use]
    pub const fn element_bytes(&self) -> usize {
        if self.flags.half { 2 } else { 4 }
    }

    /// The exponent that stands for the fixed scaling factor.
    pub const STATIC_FACTOR: i16 = i16::MIN;
    /// The offset of the flags: a queue that marks needs no more of the packet.
    pub const FLAGS_OFFSET: usize = 13;
}

impl GradientHeader {
    /// Sets the ECN flag of a gradient packet of ATP or GOAT, as a switch's queue does. Other
    /// packets do not change. No tag depends on the flag.
    pub fn mark_ecn(packet: &mut [u8]) {
        if packet.len() >= GRADIENT_HEADER_BYTES
            && Preamble::parse(packet)
                .is_ok_and(|preamble| matches!(preamble.kind, Kind::Gradient | Kind::Planned))
        {
            packet[Self::FLAGS_OFFSET] |= Flags::ECN;
        }
    }
}

/// A checked packet of a fragment that is labelled with `L`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FragmentPacket<'a, L> {
    /// The job. Sender and addressee are in the directions: [`Preamble::worker`] is
    /// [`crate::WorkerId::ALL`].
    pub preamble: Preamble,
    /// Everything else.
    pub header: FragmentHeader<L>,
    /// Little-endian elements of [`FragmentHeader::element_bytes`]: none, or as many as
    /// [`is_fragment`] allows.
    pub payload: &'a [u8],
}

impl<L> FragmentPacket<'_, L> {
    /// How many elements it carries.
    #[must_use]
    pub const fn elements(&self) -> usize {
        self.payload.len() / self.header.element_bytes()
    }
}

impl<'a, L: Label> FragmentPacket<'a, L> {
    /// Reads what follows the preamble of a gradient packet. Its tag is the reader's to check.
    ///
    /// # Errors
    /// When it is shorter than its header, a field is outside its range, or its payload has an
    /// impossible length.
    pub fn parse(preamble: Preamble, packet: &'a [u8]) -> Result<Self, WireError> {
        if preamble.kind != L::KIND {
            return Err(WireError::Kind(preamble.kind as u8));
        }
        let truncated = WireError::Truncated { need: L::HEADER_BYTES, have: packet.len() };
        let head: &[u8; GRADIENT_HEADER_BYTES] = bytes_at(packet, 0).ok_or(truncated)?;
        let payload = packet.get(L::HEADER_BYTES..).ok_or(truncated)?;
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let directions = L::read(head, packet)?;
        if head[62] != 0 || head[63] != 0 {
            return Err(WireError::Field("zero"));
        }
        let collective = Collective::parse(*bytes_at(packet, 32).ok_or(truncated)?)?;
        if collective.pattern != Pattern::AllReduce {
            return Err(WireError::Field("op"));
        }
        let flags = Flags::from_bits(head[13]);
        if flags.half && collective.half().is_none() {
            return Err(WireError::Field("flags"));
        }
        let header = FragmentHeader {
            flags,
            directions,
            sequence: u64::from(word(16)) | u64::from(word(20)) << 32,
            aggregator_index: word(24),
            fragment: word(28),
            collective,
            exponent: i16::from_le_bytes([head[60], head[61]]),
            next_exponent: i16::from_le_bytes([head[14], head[15]]),
        };
        let packet = Self { preamble, header, payload };
        let is_whole = payload.len().is_multiple_of(header.element_bytes());
        let fits = payload.is_empty() || is_whole && is_fragment(packet.elements());
        if !fits {
            return Err(WireError::PayloadLength(payload.len()));
        }
        Ok(packet)
    }

    /// Writes a packet of the job that has `key` to the start of `out`, its payload of `elements`
    /// through `fill`, and returns its length.
    ///
    /// # Panics
    /// When `out` is shorter than the packet: the caller sizes its buffer by
    /// [`FragmentHeader::packet_bytes`].
    pub fn write(
        out: &mut [u8],
        key: Key,
        preamble: &Preamble,
        header: &FragmentHeader<L>,
        elements: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> usize {
        let bytes = header.packet_bytes(elements);
        let out = &mut out[..bytes];
        let FragmentHeader { flags, directions, .. } = header;
        out[..PREAMBLE_BYTES].copy_from_slice(&preamble.to_bytes());
        directions.write(out);
        out[13] = flags.bits();
        out[14..16].copy_from_slice(&header.next_exponent.to_le_bytes());
        out[16..24].copy_from_slice(&header.sequence.to_le_bytes());
        out[24..28].copy_from_slice(&header.aggregator_index.to_le_bytes());
        out[28..32].copy_from_slice(&header.fragment.to_le_bytes());
        out[32..40].copy_from_slice(&header.collective.to_bytes());
        out[60..62].copy_from_slice(&header.exponent.to_le_bytes());
        out[62..64].fill(0);
        key.seal(out);
        fill(&mut out[L::HEADER_BYTES..]);
        bytes
    }
}
