//! The specification: every kernel as one plain loop. An implementation for an instruction set is
//! right if it equals this bit for bit.
//!
//! Callers have checked the lengths.

use crate::float16::{bf16_from_f32, f16_from_f32, f32_from_bf16, f32_from_f16};
use crate::scale::Finite;

pub(crate) use crate::native::{sum_bf16, sum_f16, sum_f32, sum_f64};
pub(crate) use crate::packed::{
    feed_back_bf16, feed_back_f16, feed_back_f32, pack_bf16, pack_f16, pack_f32, sum_packed, unpack_bf16,
    unpack_f16, unpack_f32,
};
pub(crate) use crate::rotation::{rotate_back_f32, rotate_f32};

/// The largest magnitude of a block, as the bits of an `f32` without the sign: ordered as the
/// values are, infinities above all numbers, NaNs above infinities.
#[inline]
pub(crate) fn magnitude_f32(block: &[f32]) -> u32 {
    block.iter().fold(0, |max, x| max.max(x.to_bits() & 0x7fff_ffff))
}

/// As [`magnitude_f32`], for both 16-bit formats: their bits are ordered likewise.
#[inline]
pub(crate) fn magnitude_16(block: &[u16]) -> u16 {
    block.iter().fold(0, |max, x| max.max(x & 0x7fff))
}

#[inline]
pub(crate) fn quantize_f32(block: &[f32], scale: &Finite, out: &mut [u8]) {
    for (&x, q) in block.iter().zip(out.as_chunks_mut().0) {
        *q = quantize(x, scale).to_le_bytes();
    }
}

#[inline]
pub(crate) fn quantize_f16(block: &[u16], scale: &Finite, out: &mut [u8]) {
    for (&x, q) in block.iter().zip(out.as_chunks_mut().0) {
        *q = quantize(f32_from_f16(x), scale).to_le_bytes();
    }
}

#[inline]
pub(crate) fn quantize_bf16(block: &[u16], scale: &Finite, out: &mut [u8]) {
    for (&x, q) in block.iter().zip(out.as_chunks_mut().0) {
        *q = quantize(f32_from_bf16(x), scale).to_le_bytes();
    }
}

#[inline]
pub(crate) fn dequantize_f32(sums: &[u8], inverse: f64, out: &mut [f32]) {
    for (a, y) in sums.as_chunks().0.iter().zip(out) {
        *y = dequantize(i32::from_le_bytes(*a), inverse);
    }
}

#[inline]
pub(crate) fn dequantize_f16(sums: &[u8], inverse: f64, out: &mut [u16]) {
    for (a, y) in sums.as_chunks().0.iter().zip(out) {
        *y = f16_from_f32(dequantize(i32::from_le_bytes(*a), inverse));
    }
}

#[inline]
pub(crate) fn dequantize_bf16(sums: &[u8], inverse: f64, out: &mut [u16]) {
    for (a, y) in sums.as_chunks().0.iter().zip(out) {
        *y = bf16_from_f32(dequantize(i32::from_le_bytes(*a), inverse));
    }
}

#[inline]
pub(crate) fn add_le(acc: &mut [i32], payload: &[u8]) {
    for (a, p) in acc.iter_mut().zip(payload.as_chunks().0) {
        *a = a.wrapping_add(i32::from_le_bytes(*p));
    }
}

/// The limits are sticky: they stand for a sum that is not known, and adding to it does not make it
/// known.
#[inline]
pub(crate) fn add_saturating_le(acc: &mut [i32], payload: &[u8]) {
    for (a, p) in acc.iter_mut().zip(payload.as_chunks().0) {
        let p = i32::from_le_bytes(*p);
        let sum = a.saturating_add(p);
        let sum = if is_limit(p) { p } else { sum };
        *a = if is_limit(*a) { *a } else { sum };
    }
}

#[inline]
pub(crate) fn widen_f32(block: &[f32], out: &mut [u8]) {
    for (&x, w) in block.iter().zip(out.as_chunks_mut().0) {
        *w = x.to_bits().to_le_bytes();
    }
}

#[inline]
pub(crate) fn widen_f16(block: &[u16], out: &mut [u8]) {
    for (&x, w) in block.iter().zip(out.as_chunks_mut().0) {
        *w = f32_from_f16(x).to_bits().to_le_bytes();
    }
}

#[inline]
pub(crate) fn widen_bf16(block: &[u16], out: &mut [u8]) {
    for (&x, w) in block.iter().zip(out.as_chunks_mut().0) {
        *w = f32_from_bf16(x).to_bits().to_le_bytes();
    }
}

#[inline]
pub(crate) fn narrow_f32(values: &[u8], out: &mut [f32]) {
    for (v, y) in values.as_chunks().0.iter().zip(out) {
        *y = f32::from_bits(u32::from_le_bytes(*v));
    }
}

#[inline]
pub(crate) fn narrow_f16(values: &[u8], out: &mut [u16]) {
    for (v, y) in values.as_chunks().0.iter().zip(out) {
        *y = f16_from_f32(f32::from_bits(u32::from_le_bytes(*v)));
    }
}

#[inline]
pub(crate) fn narrow_bf16(values: &[u8], out: &mut [u16]) {
    for (v, y) in values.as_chunks().0.iter().zip(out) {
        *y = bf16_from_f32(f32::from_bits(u32::from_le_bytes(*v)));
    }
}

#[inline]
pub(crate) fn encode_f32(block: &[f32], out: &mut [u8]) {
    for (&x, e) in block.iter().zip(out.as_chunks_mut().0) {
        *e = bf16_from_f32(x).to_le_bytes();
    }
}

#[inline]
pub(crate) fn encode_f16(block: &[u16], out: &mut [u8]) {
    for (&x, e) in block.iter().zip(out.as_chunks_mut().0) {
        *e = bf16_from_f32(f32_from_f16(x)).to_le_bytes();
    }
}

#[inline]
pub(crate) fn decode_f32(sums: &[u8], divisor: f32, out: &mut [f32]) {
    for (s, y) in sums.as_chunks().0.iter().zip(out) {
        *y = decode(*s, divisor);
    }
}

#[inline]
pub(crate) fn decode_f16(sums: &[u8], divisor: f32, out: &mut [u16]) {
    for (s, y) in sums.as_chunks().0.iter().zip(out) {
        *y = f16_from_f32(decode(*s, divisor));
    }
}

#[inline]
pub(crate) fn decode_bf16(sums: &[u8], divisor: f32, out: &mut [u16]) {
    for (s, y) in sums.as_chunks().0.iter().zip(out) {
        *y = bf16_from_f32(decode(*s, divisor));
    }
}

#[inline]
pub(crate) fn store_bf16(acc: &mut [i32], payload: &[u8], scale: &Finite) {
    for (a, p) in acc.iter_mut().zip(payload.as_chunks().0) {
        *a = quantize(f32_from_bf16(u16::from_le_bytes(*p)), scale);
    }
}

#[inline]
pub(crate) fn add_bf16(acc: &mut [i32], payload: &[u8], scale: &Finite) {
    for (a, p) in acc.iter_mut().zip(payload.as_chunks().0) {
        *a = a.wrapping_add(quantize(f32_from_bf16(u16::from_le_bytes(*p)), scale));
    }
}

#[inline]
pub(crate) fn write_bf16(acc: &[i32], inverse: f64, out: &mut [u8]) {
    for (&a, s) in acc.iter().zip(out.as_chunks_mut().0) {
        *s = bf16_from_f32(dequantize(a, inverse)).to_le_bytes();
    }
}

/// Whether a saturating addition could have ended here.
#[inline]
const fn is_limit(x: i32) -> bool {
    x == i32::MAX || x == i32::MIN
}

/// A bfloat16 of the wire, over `divisor`: a single rounding to `f32`.
#[inline]
fn decode(sum: [u8; 2], divisor: f32) -> f32 {
    f32_from_bf16(u16::from_le_bytes(sum)) / divisor
}

/// Quantises one element. The comparisons are as in MINPD and MAXPD, which yield their second
/// operand for a NaN. So a NaN in a block that was announced as finite becomes the limit.
#[inline]
fn quantize(x: f32, scale: &Finite) -> i32 {
    let scaled = f64::from(x) * scale.factor;
    let below = if scaled < scale.limit { scaled } else { scale.limit };
    let clamped = if below > scale.least { below } else { scale.least };
    round_ties_even(clamped)
}

/// At 1.5 * 2^52 the last bit of an `f64` is worth 1. So an addition rounds to nearest, ties to
/// even, and leaves the integer in the low bits, in two's complement.
pub(crate) const INTEGERS: f64 = (3u64 << 51) as f64;

/// `f64::round_ties_even` is not in `core`.
#[inline]
fn round_ties_even(x: f64) -> i32 {
    (x + INTEGERS).to_bits() as i32
}

/// A single sum: a single multiplication, then a single rounding to `f32`.
#[inline]
fn dequantize(sum: i32, inverse: f64) -> f32 {
    (f64::from(sum) * inverse) as f32
}
