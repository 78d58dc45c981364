//! Floats in eight or four bits an element: blocks of [`PACKED_BLOCK`] integers that share a step,
//! a power of two. The layouts are those of the OCP Microscaling Formats 1.0, with another unit.
//! MXINT8's integers count in 64ths of its scale, and MXFP4's levels in halves.
//!
//! A payload is the steps of its blocks, one byte each, and then the integers. Byte `b` says that
//! the step is 2^(b - 127). The step is the least, down to 2^-126, by which no magnitude in the
//! block is above the largest level. That level is 127 with eight bits, and 12 with four. Rounding is stochastic: up or down by chance,
//! so that the expectation is the value itself. A value that can be represented stays. Any level of
//! a step is one of every smaller step that reaches as far, so that a rounded value is not changed
//! by rounding again, whatever the seed.
//!
//! With eight bits every integer is a level. With four the integers -7 to 7 are codes of the levels
//! 0, 1, 2, 3, 4, 6, 8 and 12, and of their negatives. Small elements are many, and get the fine
//! levels (docs/protocols/switchml.md has what other levels do to a training). Byte `i` of a block
//! has the code of element `i` in its low half. Its high half has that of element `i + 16`: vectors
//! take the halves apart without moving anything across.
//!
//! Some blocks are not finite: one with a NaN, an infinity or a magnitude of more than 127 * 2^121
//! (12 * 2^124 with four bits). In place of a step they have the byte [`NOT_FINITE`], and their
//! elements are classes. So every such block
//! is seen as one by all, and none of it is a wrong number.
//!
//! The functions are the specification, as in [`scalar`](crate::scalar). The compiler makes code of
//! it for each instruction set. They go element by element, so every instruction set gives the same
//! bits. Both widths are one text: its parameter `BYTES` is the length of a block's integers.

use crate::float16::{bf16_from_f32, f16_from_f32, f32_from_bf16, f32_from_f16};
use crate::integer::store_le;
use crate::scale::assert_workers;

/// Elements that share a step.
pub const PACKED_BLOCK: usize = 32;
/// Blocks that every payload is a multiple of: whole words of steps.
const GROUP: usize = 4;
const WORD_BYTES: usize = 4;

/// How wide the integers of a payload are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Eight bits: -127 to 127 steps.
    Int8,
    /// Four bits: 0, 1, 2, 3, 4, 6, 8 or 12 steps, and a sign.
    Int4,
}

impl Packing {
    /// Every one.
    pub const ALL: [Self; 2] = [Self::Int8, Self::Int4];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }

    /// Bytes of a block: its step's, and its integers'.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        1 + match self {
            Self::Int8 => INT8_BYTES,
            Self::Int4 => INT4_BYTES,
        }
    }
}

/// Bytes of a block's integers.
const INT8_BYTES: usize = PACKED_BLOCK;
const INT4_BYTES: usize = PACKED_BLOCK / 2;

/// In place of a step.
const NOT_FINITE: u8 = 255;
/// The classes of a block that is not finite; a finite element is zero.
const INFINITE: i8 = 1;
const NOT_A_NUMBER: i8 = 2;

/// At 1.5 * 2^23 the last bit of an `f32` is worth 1. So an addition rounds to nearest, ties to
/// even, and leaves the integer, in two's complement, in the low bits.
const INTEGERS: f32 = (3u32 << 22) as f32;
const CANONICAL_NAN: f32 = f32::from_bits(0x7fc0_0000);

type Block = [f32; PACKED_BLOCK];

/// Calls a function of `BYTES` with the packing's.
macro_rules! by_width {
    ($packing:ident, $function:ident($($argument:expr),*)) => {
        match $packing {
            Packing::Int8 => $function::<INT8_BYTES, _>($($argument),*),
            Packing::Int4 => $function::<INT4_BYTES, _>($($argument),*),
        }
    };
}

#[inline(always)] // for each instruction set anew, here and below
pub(crate) fn pack_f32(packing: Packing, values: &[f32], seed: u64, payload: &mut [u8]) {
    by_width!(packing, pack(values, seed, payload, |x| x));
}

#[inline(always)]
pub(crate) fn pack_f16(packing: Packing, values: &[u16], seed: u64, payload: &mut [u8]) {
    by_width!(packing, pack(values, seed, payload, f32_from_f16));
}

#[inline(always)]
pub(crate) fn pack_bf16(packing: Packing, values: &[u16], seed: u64, payload: &mut [u8]) {
    by_width!(packing, pack(values, seed, payload, f32_from_bf16));
}

#[inline(always)]
pub(crate) fn unpack_f32(packing: Packing, payload: &[u8], out: &mut [f32]) {
    by_width!(packing, unpack(payload, out, |x| x));
}

#[inline(always)]
pub(crate) fn unpack_f16(packing: Packing, payload: &[u8], out: &mut [u16]) {
    by_width!(packing, unpack(payload, out, f16_from_f32));
}

#[inline(always)]
pub(crate) fn unpack_bf16(packing: Packing, payload: &[u8], out: &mut [u16]) {
    by_width!(packing, unpack(payload, out, bf16_from_f32));
}

#[inline(always)]
pub(crate) fn feed_back_f32(packing: Packing, values: &mut [f32], residual: &mut [f32]) {
    by_width!(packing, feed_back(values, residual, |x| x, |x| x));
}

#[inline(always)]
pub(crate) fn feed_back_f16(packing: Packing, values: &mut [u16], residual: &mut [f32]) {
    by_width!(packing, feed_back(values, residual, f32_from_f16, f16_from_f32));
}

#[inline(always)]
pub(crate) fn feed_back_bf16(packing: Packing, values: &mut [u16], residual: &mut [f32]) {
    by_width!(packing, feed_back(values, residual, f32_from_bf16, bf16_from_f32));
}

/// See [`crate::sum_packed`]: in `f32`, in the order of `payloads`.
#[inline(always)]
pub(crate) fn sum_packed(
    packing: Packing,
    payloads: &[&[u8]],
    divisor: Option<f32>,
    seed: u64,
    sum: &mut [i32],
) {
    match packing {
        Packing::Int8 => sum_blocks::<INT8_BYTES>(payloads, divisor, seed, sum),
        Packing::Int4 => sum_blocks::<INT4_BYTES>(payloads, divisor, seed, sum),
    }
}

#[inline(always)]
fn sum_blocks<const BYTES: usize>(payloads: &[&[u8]], divisor: Option<f32>, seed: u64, sum: &mut [i32]) {
    let Some(bytes) = payloads.first().map(|payload| payload.len()) else { return };
    let blocks = bytes / (1 + BYTES);
    // A block's elements, which the compiler does not know: it makes loops of vectors of them, and
    // not 32 additions.
    let width = (bytes - blocks) / blocks.max(1) * (PACKED_BLOCK / BYTES);
    let (steps, integers) = sum.split_at_mut(blocks / GROUP);
    let mut packed = [[0; BYTES]; GROUP];
    let groups = integers.chunks_exact_mut(GROUP * BYTES / WORD_BYTES);
    for (group, (words_of_steps, words)) in steps.iter_mut().zip(groups).enumerate() {
        let mut new_steps = [0; GROUP];
        for (at, (new_step, out)) in new_steps.iter_mut().zip(&mut packed).enumerate() {
            let number = GROUP * group + at;
            let mut total = [0.0; PACKED_BLOCK];
            let mut is_finite = true;
            for payload in payloads {
                let (steps, integers) = payload.split_at(blocks);
                let integers = levels(&integers.as_chunks::<BYTES>().0[number]);
                if steps[number] == NOT_FINITE {
                    is_finite = false;
                    add_classes(&mut total, &integers);
                } else {
                    let step = step_of(steps[number]);
                    for (total, q) in total[..width].iter_mut().zip(&integers) {
                        *total += f32::from(*q) * step;
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
pub(crate) fn assert_packed(packing: Packing, payloads: &[&[u8]], divisor: u32, words: usize) -> Option<f32> {
    assert_workers(u32::try_from(payloads.len()).unwrap_or(u32::MAX));
    assert_workers(divisor);
    for (number, payload) in payloads.iter().enumerate() {
        let bytes = payload.len();
        assert!(
            bytes == WORD_BYTES * words && bytes.is_multiple_of(GROUP * packing.block_bytes()),
            "{bytes} bytes of payload {number} for {words} words"
        );
    }
    // Exact: there are at most 4,096.
    (divisor > 1).then_some(divisor as f32)
}

/// # Panics
/// When so many elements have no room in the payload, or it is no whole number of blocks.
pub(crate) fn assert_room(packing: Packing, elements: usize, payload_bytes: usize) {
    let room = PACKED_BLOCK * (payload_bytes / packing.block_bytes());
    assert!(
        payload_bytes.is_multiple_of(GROUP * packing.block_bytes()) && elements <= room,
        "{payload_bytes} bytes of payload for {elements} elements of {}",
        packing.name()
    );
}

/// # Panics
/// When a value has no residual, or the other way round.
pub(crate) fn assert_residual(values: usize, residual: usize) {
    assert!(values == residual, "{residual} residuals of {values} values");
}

/// The largest magnitude that has a step, as the bits of an `f32`: the largest level by the
/// largest power of two with which it is finite.
const fn largest(bytes: usize) -> u32 {
    f32::INFINITY.to_bits() - (1 << places_below(bytes))
}

/// The exponent of the largest level: 127 is 1.984375 * 2^6, and 12 is 1.5 * 2^3.
const fn exponent_max(bytes: usize) -> u32 {
    if bytes == INT8_BYTES { 6 } else { 3 }
}

/// Places of an `f32`'s mantissa that are zero in the largest level; those before them are ones.
const fn places_below(bytes: usize) -> u32 {
    (f32::MANTISSA_DIGITS - 1) - if bytes == INT8_BYTES { 6 } else { 1 }
}

/// The distance of the levels about so many steps, as its binary logarithm.
#[inline(always)]
fn coarseness<const BYTES: usize>(steps: f32) -> i32 {
    if BYTES == INT8_BYTES {
        return 0;
    }
    i32::from(steps.abs() >= 4.0) + i32::from(steps.abs() >= 8.0)
}

#[inline(always)]
fn pack<const BYTES: usize, T: Copy>(values: &[T], seed: u64, payload: &mut [u8], widen: impl Fn(T) -> f32) {
    let (steps, integers) = payload.split_at_mut(payload.len() / (1 + BYTES));
    let blocks = steps.iter_mut().zip(integers.as_chunks_mut::<BYTES>().0);
    let (whole, rest) = values.as_chunks::<PACKED_BLOCK>();
    for (number, (step, out)) in blocks.enumerate() {
        let mut block = [0.0; PACKED_BLOCK];
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
fn unpack<const BYTES: usize, T: Copy>(payload: &[u8], out: &mut [T], narrow: impl Fn(f32) -> T) {
    let (steps, integers) = payload.split_at(payload.len() / (1 + BYTES));
    let blocks = steps.iter().zip(integers.as_chunks::<BYTES>().0);
    for ((step, integers), out) in blocks.zip(out.chunks_mut(PACKED_BLOCK)) {
        let integers = levels(integers);
        if *step == NOT_FINITE {
            for (class, out) in integers.iter().zip(out) {
                let value = value_of_class(*class);
                *out = narrow(if value == 0.0 { CANONICAL_NAN } else { value });
            }
            continue;
        }
        let step = step_of(*step);
        if let Ok(out) = <&mut [T; PACKED_BLOCK]>::try_from(&mut *out) {
            for (q, out) in integers.iter().zip(out) {
                *out = narrow(f32::from(*q) * step);
            }
        } else {
            for (q, out) in integers.iter().zip(out) {
                *out = narrow(f32::from(*q) * step);
            }
        }
    }
}

#[inline(always)]
fn feed_back<const BYTES: usize, T: Copy + Default>(
    values: &mut [T],
    residual: &mut [f32],
    widen: impl Fn(T) -> f32,
    narrow: impl Fn(f32) -> T,
) {
    let (whole, rest) = values.as_chunks_mut::<PACKED_BLOCK>();
    let (whole_residual, rest_residual) = residual.as_chunks_mut::<PACKED_BLOCK>();
    for (values, residual) in whole.iter_mut().zip(whole_residual) {
        feed_back_block::<BYTES, T>(values, residual, &widen, &narrow);
    }
    let (mut last, mut last_residual) = ([T::default(); PACKED_BLOCK], [0.0; PACKED_BLOCK]);
    last[..rest.len()].copy_from_slice(rest);
    last_residual[..rest.len()].copy_from_slice(rest_residual);
    feed_back_block::<BYTES, T>(&mut last, &mut last_residual, &widen, &narrow);
    rest.copy_from_slice(&last[..rest.len()]);
    rest_residual.copy_from_slice(&last_residual[..rest.len()]);
}

#[inline(always)]
fn feed_back_block<const BYTES: usize, T: Copy>(
    values: &mut [T; PACKED_BLOCK],
    residual: &mut Block,
    widen: impl Fn(T) -> f32,
    narrow: impl Fn(f32) -> T,
) {
    for (value, residual) in values.iter().zip(&mut *residual) {
        *residual += widen(*value);
    }
    let magnitude = magnitude_of(residual);
    let is_finite = magnitude <= const { largest(BYTES) };
    let step = step_byte::<BYTES>(magnitude);
    let (inverse, step) = (f32::from_bits((254 - step) << 23), f32::from_bits(step << 23));
    for (value, residual) in values.iter_mut().zip(residual) {
        let total = *residual;
        let steps = total * inverse;
        let coarseness = coarseness::<BYTES>(steps);
        let rounded = ((steps * power(-coarseness) + INTEGERS) - INTEGERS) * power(coarseness) * step;
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
fn step_byte<const BYTES: usize>(magnitude: u32) -> u32 {
    // A mantissa above the largest level's needs the next step.
    let up = const { (1 << places_below(BYTES)) - 1 };
    ((magnitude + up) >> 23).saturating_sub(const { exponent_max(BYTES) }).clamp(1, 254)
}

/// Rounds a block, and returns its step's byte.
#[inline(always)]
fn round<const BYTES: usize>(block: &Block, seed: u32, out: &mut [u8; BYTES]) -> u8 {
    /// Random numbers are below that.
    const CHANCES: f32 = (1u32 << 24) as f32;
    let magnitude = magnitude_of(block);
    if magnitude > const { largest(BYTES) } {
        return classify(block, out);
    }
    let step = step_byte::<BYTES>(magnitude);
    let inverse = f32::from_bits((254 - step) << 23);
    let mut codes = [0; PACKED_BLOCK];
    for (at, (x, code)) in block.iter().zip(&mut codes).enumerate() {
        let steps = x * inverse;
        let coarseness = coarseness::<BYTES>(steps);
        let scaled = steps * power(-coarseness);
        let shifted = scaled + INTEGERS;
        let nearest = shifted.to_bits().wrapping_sub(INTEGERS.to_bits()) as i32;
        let rest = scaled - (shifted - INTEGERS);
        let chance = (random(seed, at as u32) >> 8) as i32 as f32;
        let further = if rest < 0.0 { -1 } else { 1 };
        let moved = if chance < rest.abs() * CHANCES { further } else { 0 };
        // Two codes for each doubling of the distance: 2, 3 and 4 times 2 are 4, 5 and 6.
        let further = if steps < 0.0 { -2 } else { 2 };
        *code = (nearest + moved + coarseness * further) as i8;
    }
    narrow_to(&codes, out);
    step as u8
}

/// Says of each element whether it is finite, and returns what is in place of a step.
#[cold]
fn classify<const BYTES: usize>(block: &Block, out: &mut [u8; BYTES]) -> u8 {
    let classes = block.map(|x| match x.to_bits() & 0x7fff_ffff {
        bits if bits <= largest(BYTES) => 0,
        _ if x.is_nan() => NOT_A_NUMBER,
        _ if x < 0.0 => -INFINITE,
        _ => INFINITE,
    });
    narrow_to(&classes, out);
    NOT_FINITE
}

#[cold]
fn add_classes(total: &mut Block, classes: &[i8; PACKED_BLOCK]) {
    for (total, class) in total.iter_mut().zip(classes) {
        *total += value_of_class(*class);
    }
}

/// Writes codes as wide as a payload has them.
#[inline(always)]
fn narrow_to<const BYTES: usize>(codes: &[i8; PACKED_BLOCK], out: &mut [u8; BYTES]) {
    let (low, high) = codes.split_at(BYTES);
    for (out, low) in out.iter_mut().zip(low) {
        *out = low.cast_unsigned();
    }
    for (out, high) in out.iter_mut().zip(high) {
        *out = *out & 0xf | high.cast_unsigned() << 4;
    }
}

/// The levels of a block of a payload, in steps. Those of classes are the classes.
#[inline(always)]
fn levels<const BYTES: usize>(packed: &[u8; BYTES]) -> [i8; PACKED_BLOCK] {
    if BYTES == INT8_BYTES {
        return core::array::from_fn(|at| packed[at].cast_signed());
    }
    let mut levels = [0; PACKED_BLOCK];
    let (low, high) = levels.split_at_mut(BYTES);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(packed) {
        // Shifted to the top and back, which copies the sign.
        *low = level((byte << 4).cast_signed() >> 4);
        *high = level(byte.cast_signed() >> 4);
    }
    levels
}

/// The level of four bits' code. Nobody writes -8, which would be -16.
#[inline(always)]
fn level(code: i8) -> i8 {
    let (above_4, above_6) = (code - code.clamp(-4, 4), code - code.clamp(-6, 6));
    code + above_4 + 2 * above_6
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
const fn power(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
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
