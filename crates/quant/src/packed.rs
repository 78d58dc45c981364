//! Floats in one byte an element: blocks of [`INT8_BLOCK`] integers of eight bits that share a
//! step, a power of two. It is the layout of MXINT8 in the OCP Microscaling Formats 1.0, whose
//! integers count in 64ths of what its scale says.
//!
//! A payload is the steps of its blocks, one byte each, and then the integers. The step of byte `b`
//! is 2^(b - 127), the least, down to 2^-126, by which no magnitude in the block is above 127.
//! Rounding is stochastic: up or down by chance, so that the expectation is the value itself. A
//! value that can be represented stays. Any multiple of a step is one of every smaller step, so
//! that a rounded value is not changed by rounding again, whatever the seed.
//!
//! A block with a NaN, an infinity or a magnitude of more than 127 * 2^121 has no step but the byte
//! [`NOT_FINITE`], and its elements are classes. So every such block is seen as one by all, and
//! none of it is a wrong number.
//!
//! The functions are the specification, as in [`scalar`](crate::scalar). The compiler makes code of
//! it for each instruction set. They go element by element, so every instruction set gives the same
//! bits.

use crate::float16::{bf16_from_f32, f16_from_f32, f32_from_bf16, f32_from_f16};
use crate::integer::store_le;
use crate::scale::assert_workers;

/// Elements that share a step.
pub const INT8_BLOCK: usize = 32;
/// Blocks that every payload is a multiple of: whole words of steps.
const GROUP: usize = 4;
const GROUP_BYTES: usize = GROUP * (1 + INT8_BLOCK);
const WORD_BYTES: usize = 4;

/// In place of a step.
const NOT_FINITE: u8 = 255;
/// The largest magnitude that has a step, 127 * 2^121, as the bits of an `f32`.
const LARGEST: u32 = 0x7f7e_0000;
/// The classes of a block that is not finite; a finite element is zero.
const INFINITE: i8 = 1;
const NOT_A_NUMBER: i8 = 2;

/// At 1.5 * 2^23 the last bit of an `f32` is worth 1. So an addition rounds to nearest, ties to
/// even, and leaves the integer, in two's complement, in the low bits.
const INTEGERS: f32 = (3u32 << 22) as f32;
const CANONICAL_NAN: f32 = f32::from_bits(0x7fc0_0000);

type Block = [f32; INT8_BLOCK];

#[inline(always)] // for each instruction set anew, here and below
pub(crate) fn pack_f32(values: &[f32], seed: u64, payload: &mut [u8]) {
    pack(values, seed, payload, |x| x);
}

#[inline(always)]
pub(crate) fn pack_f16(values: &[u16], seed: u64, payload: &mut [u8]) {
    pack(values, seed, payload, f32_from_f16);
}

#[inline(always)]
pub(crate) fn pack_bf16(values: &[u16], seed: u64, payload: &mut [u8]) {
    pack(values, seed, payload, f32_from_bf16);
}

#[inline(always)]
pub(crate) fn unpack_f32(payload: &[u8], out: &mut [f32]) {
    unpack(payload, out, |x| x);
}

#[inline(always)]
pub(crate) fn unpack_f16(payload: &[u8], out: &mut [u16]) {
    unpack(payload, out, f16_from_f32);
}

#[inline(always)]
pub(crate) fn unpack_bf16(payload: &[u8], out: &mut [u16]) {
    unpack(payload, out, bf16_from_f32);
}

#[inline(always)]
pub(crate) fn feed_back_f32(values: &mut [f32], residual: &mut [f32]) {
    feed_back(values, residual, |x| x, |x| x);
}

#[inline(always)]
pub(crate) fn feed_back_f16(values: &mut [u16], residual: &mut [f32]) {
    feed_back(values, residual, f32_from_f16, f16_from_f32);
}

#[inline(always)]
pub(crate) fn feed_back_bf16(values: &mut [u16], residual: &mut [f32]) {
    feed_back(values, residual, f32_from_bf16, bf16_from_f32);
}

/// See [`crate::sum_packed`]: in `f32`, in the order of `payloads`.
#[inline(always)]
pub(crate) fn sum_packed(payloads: &[&[u8]], divisor: Option<f32>, seed: u64, sum: &mut [i32]) {
    let Some(bytes) = payloads.first().map(|payload| payload.len()) else { return };
    let blocks = blocks_of(bytes);
    // A block's elements, which the compiler does not know: it makes loops of vectors of them, and
    // not 32 additions.
    let width = (bytes - blocks) / blocks.max(1);
    let (steps, integers) = sum.split_at_mut(blocks / GROUP);
    let mut packed = [[0; INT8_BLOCK]; GROUP];
    let groups = integers.chunks_exact_mut(GROUP * INT8_BLOCK / WORD_BYTES);
    for (group, (words_of_steps, words)) in steps.iter_mut().zip(groups).enumerate() {
        let mut new_steps = [0; GROUP];
        for (at, (new_step, out)) in new_steps.iter_mut().zip(&mut packed).enumerate() {
            let number = GROUP * group + at;
            let mut total = [0.0; INT8_BLOCK];
            let mut is_finite = true;
            for payload in payloads {
                let (steps, integers) = payload.split_at(blocks);
                let integers = &integers[number * width..][..width];
                if steps[number] == NOT_FINITE {
                    is_finite = false;
                    add_classes(&mut total, integers);
                } else {
                    let step = step_of(steps[number]);
                    for (total, q) in total[..width].iter_mut().zip(integers) {
                        *total += f32::from(q.cast_signed()) * step;
                    }
                }
            }
            if let Some(n) = divisor {
                for total in &mut total {
                    *total /= n;
                }
            }
            *new_step =
                if is_finite { round(&total, word(seed, number), out) } else { classify(&total, out) };
        }
        *words_of_steps = i32::from_le_bytes(new_steps);
        store_le(words, packed.as_flattened());
    }
}

/// The divisor of the sums of some workers; asserts that their payloads are as long as they should
/// be.
///
/// # Panics
/// As [`crate::sum_packed`].
pub(crate) fn assert_packed(payloads: &[&[u8]], divisor: u32, words: usize) -> Option<f32> {
    assert_workers(u32::try_from(payloads.len()).unwrap_or(u32::MAX));
    assert_workers(divisor);
    for (number, payload) in payloads.iter().enumerate() {
        let bytes = payload.len();
        assert!(
            bytes == WORD_BYTES * words && bytes.is_multiple_of(GROUP_BYTES),
            "{bytes} bytes of payload {number} for {words} words"
        );
    }
    // Exact: there are at most 4,096.
    (divisor > 1).then_some(divisor as f32)
}

/// # Panics
/// When so many elements have no room in the payload, or it is no whole number of blocks.
pub(crate) fn assert_room(elements: usize, payload_bytes: usize) {
    let room = INT8_BLOCK * blocks_of(payload_bytes);
    assert!(
        payload_bytes.is_multiple_of(GROUP_BYTES) && elements <= room,
        "{payload_bytes} bytes of payload for {elements} elements of int8"
    );
}

/// # Panics
/// When a value has no residual, or the other way round.
pub(crate) fn assert_residual(values: usize, residual: usize) {
    assert!(values == residual, "{residual} residuals of {values} values");
}

const fn blocks_of(payload_bytes: usize) -> usize {
    payload_bytes / (1 + INT8_BLOCK)
}

#[inline(always)]
fn pack<T: Copy>(values: &[T], seed: u64, payload: &mut [u8], widen: impl Fn(T) -> f32) {
    let (steps, integers) = payload.split_at_mut(blocks_of(payload.len()));
    let blocks = steps.iter_mut().zip(integers.as_chunks_mut::<INT8_BLOCK>().0);
    let (whole, rest) = values.as_chunks::<INT8_BLOCK>();
    for (number, (step, out)) in blocks.enumerate() {
        let mut block = [0.0; INT8_BLOCK];
        if let Some(values) = whole.get(number) {
            for (x, value) in block.iter_mut().zip(values) {
                *x = widen(*value);
            }
        } else if number == whole.len() {
            for (x, value) in block.iter_mut().zip(rest) {
                *x = widen(*value);
            }
        }
        *step = round(&block, word(seed, number), out);
    }
}

#[inline(always)]
fn unpack<T: Copy>(payload: &[u8], out: &mut [T], narrow: impl Fn(f32) -> T) {
    let (steps, integers) = payload.split_at(blocks_of(payload.len()));
    let blocks = steps.iter().zip(integers.as_chunks::<INT8_BLOCK>().0);
    for ((step, integers), out) in blocks.zip(out.chunks_mut(INT8_BLOCK)) {
        if *step == NOT_FINITE {
            for (class, out) in integers.iter().zip(out) {
                let value = value_of_class(class.cast_signed());
                *out = narrow(if value == 0.0 { CANONICAL_NAN } else { value });
            }
            continue;
        }
        let step = step_of(*step);
        if let Ok(out) = <&mut [T; INT8_BLOCK]>::try_from(&mut *out) {
            for (q, out) in integers.iter().zip(out) {
                *out = narrow(f32::from(q.cast_signed()) * step);
            }
        } else {
            for (q, out) in integers.iter().zip(out) {
                *out = narrow(f32::from(q.cast_signed()) * step);
            }
        }
    }
}

#[inline(always)]
fn feed_back<T: Copy + Default>(
    values: &mut [T],
    residual: &mut [f32],
    widen: impl Fn(T) -> f32,
    narrow: impl Fn(f32) -> T,
) {
    let (whole, rest) = values.as_chunks_mut::<INT8_BLOCK>();
    let (whole_residual, rest_residual) = residual.as_chunks_mut::<INT8_BLOCK>();
    for (values, residual) in whole.iter_mut().zip(whole_residual) {
        feed_back_block(values, residual, &widen, &narrow);
    }
    let (mut last, mut last_residual) = ([T::default(); INT8_BLOCK], [0.0; INT8_BLOCK]);
    last[..rest.len()].copy_from_slice(rest);
    last_residual[..rest.len()].copy_from_slice(rest_residual);
    feed_back_block(&mut last, &mut last_residual, &widen, &narrow);
    rest.copy_from_slice(&last[..rest.len()]);
    rest_residual.copy_from_slice(&last_residual[..rest.len()]);
}

#[inline(always)]
fn feed_back_block<T: Copy>(
    values: &mut [T; INT8_BLOCK],
    residual: &mut Block,
    widen: impl Fn(T) -> f32,
    narrow: impl Fn(f32) -> T,
) {
    for (value, residual) in values.iter().zip(&mut *residual) {
        *residual += widen(*value);
    }
    let magnitude = magnitude_of(residual);
    let is_finite = magnitude <= LARGEST;
    let step = step_byte(magnitude);
    let (inverse, step) = (f32::from_bits((254 - step) << 23), f32::from_bits(step << 23));
    for (value, residual) in values.iter_mut().zip(residual) {
        let total = *residual;
        let rounded = ((total * inverse + INTEGERS) - INTEGERS) * step;
        *value = narrow(if is_finite { rounded } else { total });
        let missing = total - widen(*value);
        // For float16 the next multiple of a step may be an infinity.
        *residual = if is_finite && missing.is_finite() { missing } else { 0.0 };
    }
}

#[inline(always)]
fn magnitude_of(block: &Block) -> u32 {
    block.iter().fold(0, |max, x| (x.to_bits() & 0x7fff_ffff).max(max))
}

/// The step of a block whose largest magnitude has these bits; for one that is not finite, some
/// step.
#[inline(always)]
fn step_byte(magnitude: u32) -> u32 {
    // 127 is 1.984375 * 2^6: a mantissa above that needs the next step.
    ((magnitude + 0x0001_ffff) >> 23).saturating_sub(6).clamp(1, 254)
}

/// Rounds a block, and returns its step's byte.
#[inline(always)]
fn round(block: &Block, seed: u32, out: &mut [u8; INT8_BLOCK]) -> u8 {
    /// Random numbers are below that.
    const CHANCES: f32 = (1u32 << 24) as f32;
    let magnitude = magnitude_of(block);
    if magnitude > LARGEST {
        return classify(block, out);
    }
    let step = step_byte(magnitude);
    let inverse = f32::from_bits((254 - step) << 23);
    for (at, (x, out)) in block.iter().zip(out).enumerate() {
        let scaled = x * inverse;
        let shifted = scaled + INTEGERS;
        let nearest = shifted.to_bits().wrapping_sub(INTEGERS.to_bits()) as i32;
        let rest = scaled - (shifted - INTEGERS);
        let chance = (random(seed, at as u32) >> 8) as i32 as f32;
        let further = if rest < 0.0 { -1 } else { 1 };
        let moved = if chance < rest.abs() * CHANCES { further } else { 0 };
        *out = (nearest + moved) as u8;
    }
    step as u8
}

/// Says of each element whether it is finite, and returns what is in place of a step.
#[cold]
fn classify(block: &Block, out: &mut [u8; INT8_BLOCK]) -> u8 {
    for (x, out) in block.iter().zip(out) {
        let class = match x.to_bits() & 0x7fff_ffff {
            ..=LARGEST => 0,
            _ if x.is_nan() => NOT_A_NUMBER,
            _ if *x < 0.0 => -INFINITE,
            _ => INFINITE,
        };
        *out = class.cast_unsigned();
    }
    NOT_FINITE
}

#[cold]
fn add_classes(total: &mut Block, classes: &[u8]) {
    for (total, class) in total.iter_mut().zip(classes) {
        *total += value_of_class(class.cast_signed());
    }
}

/// The value that a class adds to a sum.
#[inline]
fn value_of_class(class: i8) -> f32 {
    match class {
        0 => 0.0,
        INFINITE => f32::INFINITY,
        -1 => f32::NEG_INFINITY,
        _ => CANONICAL_NAN,
    }
}

#[inline(always)]
fn step_of(byte: u8) -> f32 {
    f32::from_bits(u32::from(byte) << 23)
}

/// The random numbers of a block begin here: SplitMix64 (Steele, Lea and Flood 2014).
#[inline(always)]
const fn word(seed: u64, number: usize) -> u32 {
    let mut x = seed.wrapping_add((number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x >> 32) as u32
}

/// The random number of an element: a mixer of 32 bits with little bias (Wellons 2018,
/// `lowbias32`), which vectors have.
#[inline(always)]
const fn random(seed: u32, element: u32) -> u32 {
    let mut x = seed.wrapping_add(element.wrapping_mul(0x9e37_79b9));
    x = (x ^ x >> 16).wrapping_mul(0x7feb_352d);
    x = (x ^ x >> 15).wrapping_mul(0x846c_a68b);
    x ^ x >> 16
}
