//! The SwitchML packet: one chunk of a tensor for one slot (SwitchML §4.3 to §4.6).

use crate::preamble::PREAMBLE_BYTES;
use crate::{
    Key, Kind, Preamble, SlotIndex, TAG_BYTES, WireDtype, WireError, WorkerId, bfloat16_payload, bytes_at,
};

/// Preamble, slot header and tag together, in bytes; the payload follows.
pub const SLOT_HEADER_BYTES: usize = 40;
/// The offset of the tag.
const TAG_OFFSET: usize = SLOT_HEADER_BYTES - TAG_BYTES;
/// Elements a packet when nothing is known of the path (SwitchML §5).
pub const CHUNK_ELEMENTS_DEFAULT: usize = 256;
/// The payload lengths, in elements of four bytes. A short list, so that a bounded program can
/// unroll each. As bfloat16 a payload has twice as many elements. As int8 it has up to four times
/// as many, and as int4 up to eight times (it has room for 128 also in the shortest), in whole
/// groups of blocks. In their own type it has as many as there is room for. A programmable switch
/// sums 32 and 64 in one pass (SwitchML §5); here they serve narrow paths, and the simulator. Under
/// IPv4 and IPv6, 352 fills an Ethernet frame of 1500 bytes, and 2048 one of 9000.
pub const CHUNK_ELEMENTS: [usize; 6] = [32, 64, 256, 352, 1024, 2048];

/// IPv6 and UDP headers: the larger of the two that a datagram may carry.
pub const IP_UDP_BYTES: usize = 48;

/// The largest of [`CHUNK_ELEMENTS`] whose packet passes a path of `mtu` bytes unfragmented;
/// `None` when even the smallest does not.
#[must_use]
pub fn chunk_elements_for_mtu(mtu: usize, wire_dtype: WireDtype) -> Option<usize> {
    let fits = |size_class: &usize| chunk_packet_bytes(*size_class, wire_dtype) + IP_UDP_BYTES <= mtu;
    CHUNK_ELEMENTS.into_iter().rev().find(fits)
}

/// Length of the UDP payload that carries a chunk of `elements` as int32.
#[must_use]
pub const fn packet_bytes(elements: usize) -> usize {
    SLOT_HEADER_BYTES + elements * 4
}

/// The longest UDP payload of a job whose chunks have `size_class`, one of [`CHUNK_ELEMENTS`].
#[must_use]
pub const fn chunk_packet_bytes(size_class: usize, wire_dtype: WireDtype) -> usize {
    SLOT_HEADER_BYTES + wire_dtype.payload_bytes_max(size_class)
}

/// Type of a tensor's elements. How they travel is their [`WireDtype`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Dtype {
    /// IEEE binary32.
    Float32 = 1,
    /// IEEE binary16.
    Float16 = 2,
    /// The upper half of a binary32.
    Bfloat16 = 3,
    /// Two's complement; summed natively, wrapping.
    Int32 = 4,
    /// IEEE binary64.
    Float64 = 5,
    /// Two's complement, wrapping.
    Int64 = 6,
    /// Unsigned, wrapping.
    Uint8 = 7,
    /// Two's complement, wrapping.
    Int8 = 8,
}

impl Dtype {
    /// Every type.
    pub const ALL: [Self; 8] = [
        Self::Float32,
        Self::Float16,
        Self::Bfloat16,
        Self::Int32,
        Self::Float64,
        Self::Int64,
        Self::Uint8,
        Self::Int8,
    ];

    fn parse(byte: u8) -> Result<Self, WireError> {
        Ok(match byte {
            1 => Self::Float32,
            2 => Self::Float16,
            3 => Self::Bfloat16,
            4 => Self::Int32,
            5 => Self::Float64,
            6 => Self::Int64,
            7 => Self::Uint8,
            8 => Self::Int8,
            _ => return Err(WireError::Field("dtype")),
        })
    }

    /// Bytes of one element in the tensor.
    #[must_use]
    pub const fn element_bytes(self) -> usize {
        match self {
            Self::Float64 | Self::Int64 => 8,
            Self::Float32 | Self::Int32 => 4,
            Self::Float16 | Self::Bfloat16 => 2,
            Self::Uint8 | Self::Int8 => 1,
        }
    }

    /// PyTorch's and NumPy's name of the type.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Float16 => "float16",
            Self::Bfloat16 => "bfloat16",
            Self::Int32 => "int32",
            Self::Float64 => "float64",
            Self::Int64 => "int64",
            Self::Uint8 => "uint8",
            Self::Int8 => "int8",
        }
    }
}

impl core::str::FromStr for Dtype {
    type Err = WireError;

    fn from_str(name: &str) -> Result<Self, WireError> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name).ok_or(WireError::Field("dtype"))
    }
}

/// The operation on the sum. The switch only adds, and the workers divide (SwitchML §4.3). But if
/// elements travel in their own type, the switch divides before it rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// The sum itself.
    Sum = 1,
    /// The sum divided by the number of workers.
    Average = 2,
}

/// The contributors of elements, and the receivers of the sum. A root is one worker of a job that
/// has one switch alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Everybody's, for everybody.
    AllReduce,
    /// Everybody's, for the root; the others get an empty result, which is their permission to go
    /// on.
    Reduce(WorkerId),
    /// The root's, for everybody; the others contribute nothing but that they are there.
    Broadcast(WorkerId),
}

impl Pattern {
    /// Whether this worker's packets have elements.
    #[must_use]
    pub fn contributes(self, worker: WorkerId) -> bool {
        !matches!(self, Self::Broadcast(root) if root != worker)
    }

    /// How many contributions have elements, where so many workers take part.
    #[must_use]
    pub const fn contributions(self, workers: u16) -> u16 {
        match self {
            Self::AllReduce | Self::Reduce(_) => workers,
            Self::Broadcast(_) => 1,
        }
    }

    /// Whether the results that this worker gets have elements.
    #[must_use]
    pub fn receives(self, worker: WorkerId) -> bool {
        !matches!(self, Self::Reduce(root) if root != worker)
    }
}

/// The operation on a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// The operation on the sum. For a broadcast it is always [`Op::Sum`].
    pub op: Op,
    /// The contributors, and the receivers.
    pub pattern: Pattern,
}

impl From<Op> for Operation {
    /// An all-reduce.
    fn from(op: Op) -> Self {
        Self { op, pattern: Pattern::AllReduce }
    }
}

impl Operation {
    /// The two highest bits of its byte say which pattern a root has, the others who that is.
    const ROOTED: u8 = 0xc0;
    const REDUCE_SUM: u8 = 0x40;
    const REDUCE_AVERAGE: u8 = 0x80;
    const BROADCAST: u8 = 0xc0;

    fn parse(byte: u8) -> Result<Self, WireError> {
        let root = WorkerId(byte & !Self::ROOTED);
        let (op, pattern) = match (byte & Self::ROOTED, byte) {
            (0, 1) => (Op::Sum, Pattern::AllReduce),
            (0, 2) => (Op::Average, Pattern::AllReduce),
            (Self::REDUCE_SUM, _) => (Op::Sum, Pattern::Reduce(root)),
            (Self::REDUCE_AVERAGE, _) => (Op::Average, Pattern::Reduce(root)),
            (Self::BROADCAST, _) => (Op::Sum, Pattern::Broadcast(root)),
            _ => return Err(WireError::Field("op")),
        };
        Ok(Self { op, pattern })
    }

    const fn to_byte(self) -> u8 {
        match (self.pattern, self.op) {
            (Pattern::AllReduce, op) => op as u8,
            (Pattern::Reduce(root), Op::Sum) => Self::REDUCE_SUM | root.0,
            (Pattern::Reduce(root), Op::Average) => Self::REDUCE_AVERAGE | root.0,
            (Pattern::Broadcast(root), _) => Self::BROADCAST | root.0,
        }
    }
}

const _: () = assert!(crate::PLACES_MAX <= Operation::REDUCE_SUM as u32, "a root has six bits");

/// The properties that all workers must agree on before their numbers may be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Collective {
    /// Number of the all-reduce within the job; wraps.
    pub sequence: u16,
    /// Element type of the tensor.
    pub dtype: Dtype,
    /// Sum or average.
    pub op: Op,
    /// The contributors, and the receivers.
    pub pattern: Pattern,
    /// Elements of the whole tensor; a shard may carry a part of it.
    pub elements: u32,
    /// How its elements travel, by [`WireDtype::of_tensor`].
    pub wire_dtype: WireDtype,
}

impl core::fmt::Display for Collective {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let op = match (self.pattern, self.op) {
            (Pattern::Broadcast(_), _) => "broadcast",
            (_, Op::Sum) => "sum",
            (_, Op::Average) => "average",
        };
        write!(f, "{op} of {} {}", self.elements, self.dtype.name())?;
        match self.wire_dtype {
            WireDtype::Native => {}
            WireDtype::SharedExponent if self.dtype == Dtype::Int32 => {}
            WireDtype::SharedExponent => f.write_str(" sent with shared exponents")?,
            WireDtype::Bfloat16 => f.write_str(" sent as bfloat16")?,
            WireDtype::Int8 => f.write_str(" sent as int8")?,
            WireDtype::Int4 => f.write_str(" sent as int4")?,
        }
        match self.pattern {
            Pattern::AllReduce => {}
            Pattern::Reduce(root) => write!(f, " for rank {}", root.0)?,
            Pattern::Broadcast(root) => write!(f, " of rank {}", root.0)?,
        }
        write!(f, " (all-reduce {})", self.sequence)
    }
}

impl Collective {
    pub(crate) const BYTES: usize = 8;
    /// The bit of the dtype's byte that says bfloat16 on the wire.
    const BFLOAT16_ON_WIRE: u8 = 0x80;
    /// The bit of the dtype's byte that says that the elements travel in their own type.
    const NATIVE_ON_WIRE: u8 = 0x40;
    /// The bits of the dtype's byte that say int8 on the wire.
    const INT8_ON_WIRE: u8 = Self::BFLOAT16_ON_WIRE | Self::NATIVE_ON_WIRE;
    /// The bit of the dtype's byte that says int4 on the wire.
    const INT4_ON_WIRE: u8 = 0x20;
    /// The bits of the dtype's byte that say how its elements travel.
    const ON_WIRE: u8 = Self::INT8_ON_WIRE | Self::INT4_ON_WIRE;

    /// Whether the sum depends on an exponent that the workers agree on before they send a chunk.
    #[must_use]
    pub const fn has_exponents(&self) -> bool {
        !matches!(
            (self.dtype, self.wire_dtype),
            (Dtype::Int32, _) | (_, WireDtype::Int8 | WireDtype::Int4 | WireDtype::Native)
        )
    }

    /// The type of two bytes in which fragments of its floats may travel: the tensor's own, or the
    /// job's.
    #[must_use]
    pub const fn half(&self) -> Option<Dtype> {
        match (self.dtype, self.wire_dtype) {
            (Dtype::Float16 | Dtype::Bfloat16, _) => Some(self.dtype),
            (Dtype::Float32, WireDtype::Bfloat16) => Some(Dtype::Bfloat16),
            _ => None,
        }
    }

    /// Elements of a full payload in a job whose chunks have `size_class`.
    #[must_use]
    pub const fn chunk_elements(&self, size_class: usize) -> usize {
        self.wire_dtype.chunk_elements(size_class, self.dtype)
    }

    /// Length of a payload of `elements`.
    #[must_use]
    pub const fn payload_bytes(&self, elements: usize) -> usize {
        self.wire_dtype.payload_bytes(elements, self.dtype)
    }

    #[inline]
    pub(crate) fn parse(bytes: [u8; Self::BYTES]) -> Result<Self, WireError> {
        let [s0, s1, dtype, op, e0, e1, e2, e3] = bytes;
        let wire_dtype = match dtype & Self::ON_WIRE {
            0 => WireDtype::SharedExponent,
            Self::BFLOAT16_ON_WIRE => WireDtype::Bfloat16,
            Self::NATIVE_ON_WIRE => WireDtype::Native,
            Self::INT8_ON_WIRE => WireDtype::Int8,
            Self::INT4_ON_WIRE => WireDtype::Int4,
            _ => return Err(WireError::Field("dtype")),
        };
        let dtype = Dtype::parse(dtype & !Self::ON_WIRE)?;
        if !wire_dtype.carries(dtype) {
            return Err(WireError::Field("dtype"));
        }
        let Operation { op, pattern } = Operation::parse(op)?;
        let is_moved = matches!(pattern, Pattern::Broadcast(_));
        if is_moved && wire_dtype != WireDtype::Native {
            return Err(WireError::Field("dtype"));
        }
        Ok(Self {
            sequence: u16::from_le_bytes([s0, s1]),
            dtype,
            op,
            pattern,
            elements: u32::from_le_bytes([e0, e1, e2, e3]),
            wire_dtype,
        })
    }

    pub(crate) fn to_bytes(self) -> [u8; Self::BYTES] {
        self.to_word().to_le_bytes()
    }

    /// The same as a little-endian word.
    #[inline]
    fn to_word(self) -> u64 {
        let wire_dtype = match self.wire_dtype {
            WireDtype::SharedExponent => 0,
            WireDtype::Bfloat16 => Self::BFLOAT16_ON_WIRE,
            WireDtype::Int8 => Self::INT8_ON_WIRE,
            WireDtype::Int4 => Self::INT4_ON_WIRE,
            WireDtype::Native => Self::NATIVE_ON_WIRE,
        };
        let operation = Operation { op: self.op, pattern: self.pattern }.to_byte();
        u64::from(self.sequence)
            | u64::from(self.dtype as u8 | wire_dtype) << 16
            | u64::from(operation) << 24
            | u64::from(self.elements) << 32
    }
}

/// Which slot, which turn of it, and which chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotHeader {
    /// The slot.
    pub slot: SlotIndex,
    /// Largest exponent of the slot's next chunk: the sender's, or in a result the workers' maximum
    /// (SwitchML §4.6, look-ahead of one block).
    pub next_exponent: i16,
    /// Turn of the slot; wraps. Its lowest bit is the pool version (SwitchML §4.5); the rest tells
    /// an old duplicate from a new contribution however long the network held it.
    pub exchange: u32,
    /// Number of the chunk within its tensor.
    pub chunk: u32,
    /// The tensor.
    pub collective: Collective,
}

impl SlotHeader {
    /// Which of the slot's two versions this exchange uses.
    #[must_use]
    pub const fn pool_version(&self) -> usize {
        (self.exchange & 1) as usize
    }
}

/// A checked update, result or restore packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotPacket<'a> {
    /// Sender and job. It is not copied: its fields were written a moment ago, and a copy would
    /// wait until the payload of the packet before is in the cache.
    pub preamble: &'a Preamble,
    /// Slot and chunk.
    pub header: SlotHeader,
    /// Little-endian elements: none, or as many as [`CHUNK_ELEMENTS`] lists. As bfloat16 there are
    /// twice as many, and before them what [`bfloat16_payload`] splits off. As int8 or int4 there
    /// are the steps of its blocks, a byte each, and then the elements. In their own type, there
    /// are as many as [`Collective::chunk_elements`] says.
    pub payload: &'a [u8],
}

impl<'a> SlotPacket<'a> {
    /// Reads what follows the preamble of an update, result or restore packet. Its tag is the
    /// reader's to check.
    #[inline]
    pub fn parse(preamble: &'a Preamble, packet: &'a [u8]) -> Result<Self, WireError> {
        if !matches!(preamble.kind, Kind::Update | Kind::Result | Kind::Restore | Kind::Query) {
            return Err(WireError::Kind(preamble.kind as u8));
        }
        let truncated = WireError::Truncated { need: SLOT_HEADER_BYTES, have: packet.len() };
        let head: &[u8; TAG_OFFSET - PREAMBLE_BYTES] = bytes_at(packet, PREAMBLE_BYTES).ok_or(truncated)?;
        let &[s0, s1, n0, n1, e0, e1, e2, e3, c0, c1, c2, c3, t0, t1, t2, t3, t4, t5, t6, t7] = head;
        let payload = packet.get(SLOT_HEADER_BYTES..).ok_or(truncated)?;
        let collective = Collective::parse([t0, t1, t2, t3, t4, t5, t6, t7])?;
        let Collective { dtype, wire_dtype, .. } = collective;
        let is_chunk = |elements: usize| {
            elements == 0 || CHUNK_ELEMENTS.iter().any(|class| collective.chunk_elements(*class) == elements)
        };
        if !wire_dtype.payload_elements(payload.len(), dtype).is_some_and(is_chunk) {
            return Err(WireError::PayloadLength(payload.len()));
        }
        if wire_dtype == WireDtype::Bfloat16 && !payload.is_empty() && bfloat16_payload(payload).is_none() {
            return Err(WireError::Field("zero"));
        }
        Ok(Self {
            preamble,
            header: SlotHeader {
                slot: SlotIndex(u16::from_le_bytes([s0, s1])),
                next_exponent: i16::from_le_bytes([n0, n1]),
                exchange: u32::from_le_bytes([e0, e1, e2, e3]),
                chunk: u32::from_le_bytes([c0, c1, c2, c3]),
                collective,
            },
            payload,
        })
    }

    /// Elements of the payload.
    #[must_use]
    pub fn elements(&self) -> usize {
        let Collective { dtype, wire_dtype, .. } = self.header.collective;
        wire_dtype.payload_elements(self.payload.len(), dtype).unwrap_or(0)
    }

    /// Writes a packet of the job that has `key` to the start of `out`, its payload of `elements`
    /// through `fill`, and returns its length.
    ///
    /// # Panics
    /// When `out` is shorter than the packet: the caller sizes its buffer by
    /// [`chunk_packet_bytes`].
    pub fn write(
        out: &mut [u8],
        key: Key,
        preamble: &Preamble,
        header: &SlotHeader,
        elements: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> usize {
        let bytes = SLOT_HEADER_BYTES + header.collective.payload_bytes(elements);
        let out = &mut out[..bytes];
        // The hash reads words. A word that was written in parts could be read only when the
        // payload of the packet before has reached the cache.
        let (first, second) = preamble.to_words();
        let slot = u64::from(header.slot.0) << 32 | u64::from(header.next_exponent as u16) << 48;
        let words = [
            first,
            u64::from(second) | slot,
            u64::from(header.exchange) | u64::from(header.chunk) << 32,
            header.collective.to_word(),
        ];
        for (word, place) in words.iter().zip(out.chunks_exact_mut(8)) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        key.seal(out);
        fill(&mut out[SLOT_HEADER_BYTES..]);
        bytes
    }
}
