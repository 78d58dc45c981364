//! The tensor as a worker sees it: numbers in place, whoever owns them.

use fanin_quant::{Divisor, Exponent, Scale};
use fanin_wire::{Dtype, Op};

const _: () = assert!(fanin_quant::WORKERS_MAX == fanin_wire::WORKERS_MAX);

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
}

impl Elements<'_> {
    /// Number of elements.
    #[must_use]
    pub fn count(&self) -> usize {
        match self {
            Self::Float32(x) => x.len(),
            Self::Float16(x) | Self::Bfloat16(x) => x.len(),
            Self::Int32(x) => x.len(),
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
        }
    }

    /// The exponent of the block in `range`; integers have none to agree on.
    pub(crate) fn exponent(&self, range: core::ops::Range<usize>) -> Exponent {
        match self {
            Self::Float32(x) => fanin_quant::exponent_f32(&x[range]),
            Self::Float16(x) => fanin_quant::exponent_f16(&x[range]),
            Self::Bfloat16(x) => fanin_quant::exponent_bf16(&x[range]),
            Self::Int32(_) => Exponent::ZERO,
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
        }
        padding.fill(0);
    }

    /// Writes the block in `range` as bfloat16, padded with zeros to the length of `elements`. Integers never travel so.
    pub(crate) fn encode(&self, range: core::ops::Range<usize>, elements: &mut [u8]) {
        let (values, padding) = elements.split_at_mut(range.len() * 2);
        match self {
            Self::Float32(x) => fanin_quant::encode_f32(&x[range], values),
            Self::Float16(x) => fanin_quant::encode_f16(&x[range], values),
            Self::Bfloat16(x) => fanin_quant::copy_bf16(&x[range], values),
            Self::Int32(_) => values.fill(0),
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
            Self::Int32(_) => {}
        }
    }

    /// Writes the block in `range` as it is, in float32 or int32, padded with zeros to the length of `payload`.
    pub(crate) fn widen(&self, range: core::ops::Range<usize>, payload: &mut [u8]) {
        let (values, padding) = payload.split_at_mut(range.len() * 4);
        match self {
            Self::Float32(x) => fanin_quant::widen_f32(&x[range], values),
            Self::Float16(x) => fanin_quant::widen_f16(&x[range], values),
            Self::Bfloat16(x) => fanin_quant::widen_bf16(&x[range], values),
            Self::Int32(x) => fanin_quant::copy_i32(&x[range], values),
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
        }
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

    /// Number of elements of the user's tensor, of which this may be one shard's part: what the workers compare, and what
    /// a person is told when they disagree. At most `u32::MAX`.
    fn whole_elements(&mut self) -> usize {
        self.elements().count()
    }
}
