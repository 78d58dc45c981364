//! The tensor as a worker sees it: numbers in place, whoever owns them.

use fanin_quant::{Divisor, Exponent, Packing, Scale};
use fanin_wire::{Dtype, LossBound, Op, Participants, WireDtype};

const _: () = assert!(fanin_quant::WORKERS_MAX == fanin_wire::RANKS_MAX);
const _: () = assert!(fanin_quant::PACKED_BLOCK == fanin_wire::PACKED_BLOCK);

/// How wide the integers are of a wire dtype that [`WireDtype::is_packed`].
pub(crate) fn packing(wire_dtype: WireDtype) -> Packing {
    match wire_dtype {
        WireDtype::Int8 => Packing::Int8,
        WireDtype::Int4 => Packing::Int4,
        WireDtype::SharedExponent | WireDtype::Bfloat16 | WireDtype::Native => {
            unreachable!("{} has no blocks", wire_dtype.name())
        }
    }
}

/// A tensor's elements, contiguous. Half-precision elements are their raw bits.
#[derive(Debug)]
pub enum Elements<'a> {
    /// IEEE binary32.
    Float32(&'a mut [f32]),
    /// Bits of IEEE binary16.
    Float16(&'a mut [u16]),
    /// Bits of bfloat16.
    Bfloat16(&'a mut [u16]),
    /// Integers, summed natively.
    Int32(&'a mut [i32]),
    /// IEEE binary64.
    Float64(&'a mut [f64]),
    /// Integers, summed natively.
    Int64(&'a mut [i64]),
    /// Unsigned integers, summed natively.
    Uint8(&'a mut [u8]),
    /// Integers, summed natively.
    Int8(&'a mut [i8]),
}

impl Elements<'_> {
    /// Number of elements.
    #[must_use]
    pub fn count(&self) -> usize {
        match self {
            Self::Float32(x) => x.len(),
            Self::Float16(x) | Self::Bfloat16(x) => x.len(),
            Self::Int32(x) => x.len(),
            Self::Float64(x) => x.len(),
            Self::Int64(x) => x.len(),
            Self::Uint8(x) => x.len(),
            Self::Int8(x) => x.len(),
        }
    }

    /// Type of an element.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        match self {
            Self::Float32(_) => Dtype::Float32,
            Self::Float16(_) => Dtype::Float16,
            Self::Bfloat16(_) => Dtype::Bfloat16,
            Self::Int32(_) => Dtype::Int32,
            Self::Float64(_) => Dtype::Float64,
            Self::Int64(_) => Dtype::Int64,
            Self::Uint8(_) => Dtype::Uint8,
            Self::Int8(_) => Dtype::Int8,
        }
    }

    /// The exponent of the block in `range`; what is not scaled has none to agree on.
    pub(crate) fn exponent(&self, range: core::ops::Range<usize>) -> Exponent {
        match self {
            Self::Float32(x) => fanin_quant::exponent_f32(&x[range]),
            Self::Float16(x) => fanin_quant::exponent_f16(&x[range]),
            Self::Bfloat16(x) => fanin_quant::exponent_bf16(&x[range]),
            _ => Exponent::ZERO,
        }
    }

    /// Writes the block in `range` as integers, padded with zeros to the length of `payload`.
    pub(crate) fn quantize(&self, range: core::ops::Range<usize>, scale: &Scale, payload: &mut [u8]) {
        let (values, padding) = payload.split_at_mut(range.len() * 4);
        match self {
            Self::Float32(x) => fanin_quant::quantize_f32(&x[range], scale, values),
            Self::Float16(x) => fanin_quant::quantize_f16(&x[range], scale, values),
            Self::Bfloat16(x) => fanin_quant::quantize_bf16(&x[range], scale, values),
            Self::Int32(x) => fanin_quant::copy_i32(&x[range], values),
            _ => unreachable!("{} travels as it is", self.dtype().name()),
        }
        padding.fill(0);
    }

    /// Writes the block in `range` as bfloat16, padded with zeros to the length of `elements`.
    pub(crate) fn encode(&self, range: core::ops::Range<usize>, elements: &mut [u8]) {
        let (values, padding) = elements.split_at_mut(range.len() * 2);
        match self {
            Self::Float32(x) => fanin_quant::encode_f32(&x[range], values),
            Self::Float16(x) => fanin_quant::encode_f16(&x[range], values),
            Self::Bfloat16(x) => fanin_quant::copy_bf16(&x[range], values),
            _ => unreachable!("{} travels never as bfloat16", self.dtype().name()),
        }
        padding.fill(0);
    }

    /// Replaces the block in `range` by the bfloat16 sums in `elements`.
    pub(crate) fn decode(&mut self, range: core::ops::Range<usize>, elements: &[u8], workers: u32, op: Op) {
        let sums = &elements[..range.len() * 2];
        match self {
            Self::Float32(x) => fanin_quant::decode_f32(sums, divisor(op), workers, &mut x[range]),
            Self::Float16(x) => fanin_quant::decode_f16(sums, divisor(op), workers, &mut x[range]),
            Self::Bfloat16(x) => fanin_quant::decode_bf16(sums, divisor(op), workers, &mut x[range]),
            _ => unreachable!("{} travels never as bfloat16", self.dtype().name()),
        }
    }

    /// Writes the elements in `range` as int8 or int4, padded with zeros to the length of
    /// `payload`; rounded by chance, which `seed` decides.
    pub(crate) fn pack(
        &self,
        packing: Packing,
        range: core::ops::Range<usize>,
        seed: u64,
        payload: &mut [u8],
    ) {
        match self {
            Self::Float32(x) => fanin_quant::pack_f32(packing, &x[range], seed, payload),
            Self::Float16(x) => fanin_quant::pack_f16(packing, &x[range], seed, payload),
            Self::Bfloat16(x) => fanin_quant::pack_bf16(packing, &x[range], seed, payload),
            _ => unreachable!("{} travels never as {}", self.dtype().name(), packing.name()),
        }
    }

    /// Replaces the elements in `range` by those in `payload`, which travelled as int8 or int4.
    pub(crate) fn unpack(&mut self, packing: Packing, range: core::ops::Range<usize>, payload: &[u8]) {
        match self {
            Self::Float32(x) => fanin_quant::unpack_f32(packing, payload, &mut x[range]),
            Self::Float16(x) => fanin_quant::unpack_f16(packing, payload, &mut x[range]),
            Self::Bfloat16(x) => fanin_quant::unpack_bf16(packing, payload, &mut x[range]),
            _ => unreachable!("{} travels never as {}", self.dtype().name(), packing.name()),
        }
    }

    /// Writes the block in `range` as it is, in its own type, padded with zeros to the length of
    /// `payload`.
    pub(crate) fn copy_to(&self, range: core::ops::Range<usize>, payload: &mut [u8]) {
        let (values, padding) = payload.split_at_mut(range.len() * self.dtype().element_bytes());
        match self {
            Self::Float32(x) => write(&x[range], values, |x| x.to_le_bytes()),
            Self::Float16(x) | Self::Bfloat16(x) => write(&x[range], values, |x| x.to_le_bytes()),
            Self::Int32(_) => unreachable!("int32 does not travel as it is"),
            Self::Float64(x) => write(&x[range], values, |x| x.to_le_bytes()),
            Self::Int64(x) => write(&x[range], values, |x| x.to_le_bytes()),
            Self::Uint8(x) => values.copy_from_slice(&x[range]),
            Self::Int8(x) => write(&x[range], values, |x| x.to_le_bytes()),
        }
        padding.fill(0);
    }

    /// Replaces the block in `range` by the elements in `payload`, which are of its own type.
    pub(crate) fn copy_from(&mut self, range: core::ops::Range<usize>, payload: &[u8]) {
        let values = &payload[..range.len() * self.dtype().element_bytes()];
        match self {
            Self::Float32(x) => read(values, &mut x[range], f32::from_le_bytes),
            Self::Float16(x) | Self::Bfloat16(x) => read(values, &mut x[range], u16::from_le_bytes),
            Self::Int32(_) => unreachable!("int32 does not travel as it is"),
            Self::Float64(x) => read(values, &mut x[range], f64::from_le_bytes),
            Self::Int64(x) => read(values, &mut x[range], i64::from_le_bytes),
            Self::Uint8(x) => x[range].copy_from_slice(values),
            Self::Int8(x) => read(values, &mut x[range], i8::from_le_bytes),
        }
    }

    /// Writes the block in `range` with two bytes an element, as `half`, padded with zeros to the
    /// length of `payload`.
    pub(crate) fn write_halves(&self, half: Dtype, range: core::ops::Range<usize>, payload: &mut [u8]) {
        match half {
            Dtype::Bfloat16 => self.encode(range, payload),
            _ => self.copy_to(range, payload),
        }
    }

    /// Replaces the block in `range` by the elements in `payload`, which have two bytes, as `half`.
    pub(crate) fn take_halves(&mut self, half: Dtype, range: core::ops::Range<usize>, payload: &[u8]) {
        match half {
            Dtype::Bfloat16 => self.decode(range, payload, 1, Op::Sum),
            _ => self.copy_from(range, payload),
        }
    }

    /// Writes the block in `range` widened, in float32 or int32, padded with zeros to the length of
    /// `payload`.
    pub(crate) fn widen(&self, range: core::ops::Range<usize>, payload: &mut [u8]) {
        let (values, padding) = payload.split_at_mut(range.len() * 4);
        match self {
            Self::Float32(x) => fanin_quant::widen_f32(&x[range], values),
            Self::Float16(x) => fanin_quant::widen_f16(&x[range], values),
            Self::Bfloat16(x) => fanin_quant::widen_bf16(&x[range], values),
            Self::Int32(x) => fanin_quant::copy_i32(&x[range], values),
            _ => unreachable!("ATP has no {}", self.dtype().name()),
        }
        padding.fill(0);
    }

    /// Replaces the block in `range` by the float32 or int32 parameters in `payload`.
    pub(crate) fn narrow(&mut self, range: core::ops::Range<usize>, payload: &[u8]) {
        let values = &payload[..range.len() * 4];
        match self {
            Self::Float32(x) => fanin_quant::narrow_f32(values, &mut x[range]),
            Self::Float16(x) => fanin_quant::narrow_f16(values, &mut x[range]),
            Self::Bfloat16(x) => fanin_quant::narrow_bf16(values, &mut x[range]),
            Self::Int32(x) => fanin_quant::store_le(&mut x[range], values),
            _ => unreachable!("ATP has no {}", self.dtype().name()),
        }
    }

    /// Replaces the block in `range` by the sums in `payload`.
    pub(crate) fn dequantize(
        &mut self,
        range: core::ops::Range<usize>,
        payload: &[u8],
        scale: &Scale,
        workers: u32,
        op: Op,
    ) {
        let sums = &payload[..range.len() * 4];
        let divisor = divisor(op);
        match self {
            Self::Float32(x) => fanin_quant::dequantize_f32(sums, scale, divisor, &mut x[range]),
            Self::Float16(x) => fanin_quant::dequantize_f16(sums, scale, divisor, &mut x[range]),
            Self::Bfloat16(x) => fanin_quant::dequantize_bf16(sums, scale, divisor, &mut x[range]),
            Self::Int32(x) => fanin_quant::read_i32(sums, divisor, workers, &mut x[range]),
            _ => unreachable!("{} travels as it is", self.dtype().name()),
        }
    }
}

/// A copy, which the compiler makes of it where bytes stand in memory as they travel.
fn write<T: Copy, const N: usize>(block: &[T], payload: &mut [u8], bytes: impl Fn(T) -> [u8; N]) {
    for (x, out) in block.iter().zip(payload.as_chunks_mut().0) {
        *out = bytes(*x);
    }
}

/// As [`write`], the other way.
fn read<T, const N: usize>(payload: &[u8], block: &mut [T], value: impl Fn([u8; N]) -> T) {
    for (bytes, x) in payload.as_chunks().0.iter().zip(block) {
        *x = value(*bytes);
    }
}

const fn divisor(op: Op) -> Divisor {
    match op {
        Op::Sum => Divisor::One,
        Op::Average => Divisor::Workers,
    }
}

/// A tensor that is reduced in place. It must not change while a worker holds it.
pub trait Tensor {
    /// Its elements; always the same number and type.
    fn elements(&mut self) -> Elements<'_>;

    /// Number of elements of the user's tensor, of which this may be one shard's part: what the
    /// workers compare, and what a person is told when they disagree. At most `u32::MAX`.
    fn whole_elements(&mut self) -> usize {
        self.elements().count()
    }

    /// The layer of the model that its gradients are of: DLCP's packets say it to queues.
    fn layer(&self) -> Layer {
        Layer::default()
    }

    /// How much of it may be lost on its way (DLCP §3.2.1), if not as much as the job says.
    fn loss_bound(&self) -> Option<LossBound> {
        None
    }

    /// The ranks that contribute to it, and get the sum (GOAT §V). A worker that is none of them
    /// sends nothing, and keeps its own values. All workers submit it all the same, with the same
    /// set. A set may differ from the one before only once all workers of that one have its sums.
    fn participants(&self) -> Participants {
        Participants::ALL
    }
}

/// A layer of a model, counted from its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Which one; less than `count`.
    pub index: u16,
    /// Of how many.
    pub count: u16,
}

/// The one layer of a model of which nothing is known.
impl Default for Layer {
    fn default() -> Self {
        Self { index: 0, count: 1 }
    }
}
