//! Elements that travel as they are: sums in the tensor's own type, each element right to its own magnitude.
//!
//! What a slot holds of them is the payload of the result, word by word as [`store_le`](crate::store_le) and
//! [`write_le`](crate::write_le) have it. Integers wrap, so they are added as they come. Floating-point addition depends on its
//! order: the contributions are kept side by side, and summed in the order of the workers when all are there.
//!
//! One plain loop each, over arrays of a fixed length, which the compiler turns into vector instructions; at the length of a
//! packet a sum is faster than the network brings its contributions.

use crate::float16::{bf16_from_f32, f16_from_f32, f32_from_bf16, f32_from_f16};
use crate::scale::{Divisor, assert_workers};

/// Elements that are summed together.
const LANES: usize = 16;
/// Words that every payload is a multiple of: [`LANES`] of the longest elements.
const WORDS_MULTIPLE: usize = 2 * LANES;

/// The quiet NaN that every sum has which is none: which bits an addition leaves in it is the processor's choice.
const CANONICAL_NAN: f64 = f64::from_bits(0x7ff8_0000_0000_0000);

/// Adds a payload of 64-bit integers, wrapping.
///
/// # Panics
/// If `payload` is not as long as `acc`, or no whole number of elements.
pub fn add_i64_le(acc: &mut [i32], payload: &[u8]) {
    assert_payload(acc.len(), payload.len());
    for (a, p) in acc.as_chunks_mut::<2>().0.iter_mut().zip(payload.as_chunks().0) {
        *a = words_of_i64(i64_of_words(*a).wrapping_add(i64::from_le_bytes(*p)));
    }
}

/// Adds a payload of 8-bit integers, signed or not, wrapping.
///
/// # Panics
/// If `payload` is not as long as `acc`.
pub fn add_i8_le(acc: &mut [i32], payload: &[u8]) {
    /// The highest bit of each byte, which has no carry to give.
    const HIGHEST: u32 = 0x8080_8080;
    assert_payload(acc.len(), payload.len());
    for (a, p) in acc.iter_mut().zip(payload.as_chunks().0) {
        let (x, y) = (a.cast_unsigned(), u32::from_le_bytes(*p));
        let low = (x & !HIGHEST) + (y & !HIGHEST);
        *a = (low ^ ((x ^ y) & HIGHEST)).cast_signed();
    }
}

/// Turns sums of 64-bit integers into their mean over the workers, truncated toward zero.
///
/// # Panics
/// If `workers` is not in `1..=`[`WORKERS_MAX`](crate::WORKERS_MAX).
pub fn mean_i64(acc: &mut [i32], workers: u32) {
    assert_workers(workers);
    for a in acc.as_chunks_mut::<2>().0 {
        *a = words_of_i64(i64_of_words(*a) / i64::from(workers));
    }
}

/// Turns sums of unsigned 8-bit integers into their mean over the workers, truncated.
///
/// # Panics
/// As [`mean_i64`].
pub fn mean_u8(acc: &mut [i32], workers: u32) {
    assert_workers(workers);
    for a in acc {
        *a = i32::from_le_bytes(a.to_le_bytes().map(|x| (u32::from(x) / workers) as u8));
    }
}

/// Turns sums of signed 8-bit integers into their mean over the workers, truncated toward zero.
///
/// # Panics
/// As [`mean_i64`].
pub fn mean_i8(acc: &mut [i32], workers: u32) {
    assert_workers(workers);
    let n = workers as i32;
    for a in acc {
        let mean = |x: u8| (i32::from(x.cast_signed()) / n) as i8;
        *a = i32::from_le_bytes(a.to_le_bytes().map(|x| mean(x).cast_unsigned()));
    }
}

/// Sums the payloads of `workers` workers, which stand one after the other in `payloads`, in that order: in `f64`, divided there
/// where the mean is asked for, and rounded once to `f32`. A sum without a value is one NaN, whatever the NaNs were.
///
/// # Panics
/// If `payloads` is not `workers` times as long as `sum`, `sum` is no multiple of 32 words, or `workers` is not in
/// `1..=`[`WORKERS_MAX`](crate::WORKERS_MAX).
pub fn sum_f32(payloads: &[u8], workers: u32, divisor: Divisor, sum: &mut [i32]) {
    let widen = |x: [u8; 4]| f64::from(f32::from_le_bytes(x));
    let narrow = |x: f64| (x as f32).to_le_bytes();
    sum_as_f64(payloads, workers, divisor, sum, widen, narrow);
}

/// [`sum_f32`] for IEEE half-precision elements, rounded once to their type.
///
/// # Panics
/// As [`sum_f32`].
pub fn sum_f16(payloads: &[u8], workers: u32, divisor: Divisor, sum: &mut [i32]) {
    let widen = |x: [u8; 2]| f64::from(f32_from_f16(u16::from_le_bytes(x)));
    let narrow = |x: f64| f16_from_f32(to_odd(x)).to_le_bytes();
    sum_as_f64(payloads, workers, divisor, sum, widen, narrow);
}

/// [`sum_f32`] for bfloat16 elements, rounded once to their type.
///
/// # Panics
/// As [`sum_f32`].
pub fn sum_bf16(payloads: &[u8], workers: u32, divisor: Divisor, sum: &mut [i32]) {
    let widen = |x: [u8; 2]| f64::from(f32_from_bf16(u16::from_le_bytes(x)));
    let narrow = |x: f64| bf16_from_f32(to_odd(x)).to_le_bytes();
    sum_as_f64(payloads, workers, divisor, sum, widen, narrow);
}

/// [`sum_f32`] for `f64`, with the errors of the additions carried along (Ogita, Rump and Oishi 2005, Sum2): as if summed with
/// twice the digits and rounded once. A mean is rounded once more.
///
/// # Panics
/// As [`sum_f32`].
pub fn sum_f64(payloads: &[u8], workers: u32, divisor: Divisor, sum: &mut [i32]) {
    let (first, others) = split(payloads, workers, sum.len());
    let n = divisor_of(divisor, workers);
    for (block, sum) in sum.chunks_exact_mut(2 * LANES).enumerate() {
        let mut totals = lanes(first, block).map(f64::from_le_bytes);
        let mut errors = [0.0; LANES];
        for part in others.chunks_exact(first.len()) {
            let part = lanes(part, block);
            for lane in 0..LANES {
                let (a, x) = (totals[lane], f64::from_le_bytes(part[lane]));
                let total = a + x;
                let of_x = total - a;
                errors[lane] += (a - (total - of_x)) + (x - of_x);
                totals[lane] = total;
            }
        }
        let mut out = [[0; 8]; LANES];
        for lane in 0..LANES {
            let (total, error) = (totals[lane], errors[lane]);
            let corrected = total + error;
            // Without an error the sign of a zero stays; beside an infinity the error is none.
            let total = if error == 0.0 || corrected.is_nan() { total } else { corrected };
            out[lane] = finish(total, n).to_le_bytes();
        }
        crate::store_le(sum, out.as_flattened());
    }
}

fn sum_as_f64<const N: usize>(
    payloads: &[u8],
    workers: u32,
    divisor: Divisor,
    sum: &mut [i32],
    widen: impl Fn([u8; N]) -> f64 + Copy,
    narrow: impl Fn(f64) -> [u8; N] + Copy,
) {
    let (first, others) = split(payloads, workers, sum.len());
    let n = divisor_of(divisor, workers);
    for (block, sum) in sum.chunks_exact_mut(LANES * N / 4).enumerate() {
        // From the first one on, not from zero: a sum of negative zeros is one.
        let mut totals = lanes(first, block).map(widen);
        for part in others.chunks_exact(first.len()) {
            for (total, x) in totals.iter_mut().zip(lanes(part, block)) {
                *total += widen(x);
            }
        }
        crate::store_le(sum, totals.map(|total| narrow(finish(total, n))).as_flattened());
    }
}

/// The first payload, and the others.
fn split(payloads: &[u8], workers: u32, words: usize) -> (&[u8], &[u8]) {
    assert_workers(workers);
    assert!(
        words > 0 && words.is_multiple_of(WORDS_MULTIPLE) && payloads.len() == workers as usize * 4 * words,
        "{} bytes of {workers} payloads for {words} words",
        payloads.len()
    );
    payloads.split_at(4 * words)
}

const fn divisor_of(divisor: Divisor, workers: u32) -> Option<f64> {
    match divisor {
        Divisor::One => None,
        Divisor::Workers => Some(workers as f64),
    }
}

/// Some elements of a payload that are summed together.
#[inline]
fn lanes<const N: usize>(payload: &[u8], block: usize) -> [[u8; N]; LANES] {
    payload.as_chunks().0.as_chunks().0[block]
}

#[inline]
fn finish(total: f64, divisor: Option<f64>) -> f64 {
    let value = divisor.map_or(total, |n| total / n);
    if value.is_nan() { CANONICAL_NAN } else { value }
}

/// Rounds to `f32` so that a further rounding, to a type of at least two digits less, ends where one alone would have: what
/// cannot be represented becomes the neighbour whose last bit is set ("round to odd").
#[inline]
fn to_odd(x: f64) -> f32 {
    let nearest = x as f32;
    let back = f64::from(nearest);
    // A step toward zero where rounding went away from it; and the last bit, where anything was rounded.
    let bits = nearest.to_bits() - u32::from(back.abs() > x.abs());
    f32::from_bits(bits | u32::from(back.abs() != x.abs() && !x.is_nan()))
}

#[inline]
const fn i64_of_words([low, high]: [i32; 2]) -> i64 {
    ((high.cast_unsigned() as u64) << 32 | low.cast_unsigned() as u64).cast_signed()
}

#[inline]
const fn words_of_i64(x: i64) -> [i32; 2] {
    [x as i32, (x >> 32) as i32]
}

fn assert_payload(words: usize, payload_bytes: usize) {
    assert!(
        payload_bytes == 4 * words && words.is_multiple_of(WORDS_MULTIPLE),
        "{payload_bytes} bytes of payload for {words} words"
    );
}
