//! Sums in the tensor's own type: each element is right to its own magnitude.
//!
//! A slot holds the payload of their result, word by word as [`store_le`] and
//! [`write_le`](crate::write_le) have it. Integers wrap, so they are added as they come.
//! Floating-point addition depends on its order: the contributions are kept side by side, and
//! summed in the order of the workers when all are there.
//!
//! The sums of floats are the specification, as in [`scalar`](crate::scalar), and the compiler
//! makes code of it for each instruction set. Additions and roundings are element by element, so
//! that every one has the same bits.

use crate::float16::{bf16_from_f32, f16_from_f32, f32_from_bf16, f32_from_f16};
use crate::integer::store_le;
use crate::scale::assert_workers;

/// Words that every payload is a multiple of.
const WORDS_MULTIPLE: usize = 32;
/// Elements that are summed at a time: their sums stay in the nearest cache while the workers'
/// payloads go by. Whole loops over them, and not some lanes that are unrolled, are what the
/// compiler makes vector instructions of.
pub(crate) const BLOCK: usize = 256;

/// The quiet NaN that every sum has which is none: which bits an addition leaves in it is the
/// processor's choice.
pub(crate) const CANONICAL_NAN: f64 = f64::from_bits(0x7ff8_0000_0000_0000);

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

/// The sums of `f32`: see [`crate::sum_f32`]. Each of `payloads`, one of each worker, is as long as
/// `sum`.
#[inline(always)] // for each instruction set anew, here and below
pub(crate) fn sum_f32(payloads: &[&[u8]], divisor: Option<f64>, sum: &mut [i32]) {
    let widen = |x: [u8; 4]| f64::from(f32::from_le_bytes(x));
    let narrow = |x: f64| (x as f32).to_le_bytes();
    sum_as_f64(payloads, divisor, sum, widen, narrow);
}

#[inline(always)]
pub(crate) fn sum_f16(payloads: &[&[u8]], divisor: Option<f64>, sum: &mut [i32]) {
    let widen = |x: [u8; 2]| f64::from(f32_from_f16(u16::from_le_bytes(x)));
    let narrow = |x: f64| f16_from_f32(to_odd(x)).to_le_bytes();
    sum_as_f64(payloads, divisor, sum, widen, narrow);
}

#[inline(always)]
pub(crate) fn sum_bf16(payloads: &[&[u8]], divisor: Option<f64>, sum: &mut [i32]) {
    let widen = |x: [u8; 2]| f64::from(f32_from_bf16(u16::from_le_bytes(x)));
    let narrow = |x: f64| bf16_from_f32(to_odd(x)).to_le_bytes();
    sum_as_f64(payloads, divisor, sum, widen, narrow);
}

/// The errors of the additions are carried along (Ogita, Rump and Oishi 2005, Sum2).
#[inline(always)]
pub(crate) fn sum_f64(payloads: &[&[u8]], divisor: Option<f64>, sum: &mut [i32]) {
    let Some((first, others)) = payloads.split_first() else { return };
    let mut totals = [0.0; BLOCK];
    let mut errors = [0.0; BLOCK];
    let mut out = [[0; 8]; BLOCK];
    for (block, sum) in sum.chunks_mut(2 * BLOCK).enumerate() {
        let count = sum.len() / 2;
        let (totals, errors, out) = (&mut totals[..count], &mut errors[..count], &mut out[..count]);
        for ((total, error), x) in totals.iter_mut().zip(&mut *errors).zip(elements(first, block, count)) {
            (*total, *error) = (f64::from_le_bytes(*x), 0.0);
        }
        for part in others {
            let part = elements(part, block, count);
            for ((total, error), x) in totals.iter_mut().zip(&mut *errors).zip(part) {
                let (a, x) = (*total, f64::from_le_bytes(*x));
                let sum = a + x;
                let of_x = sum - a;
                *error += (a - (sum - of_x)) + (x - of_x);
                *total = sum;
            }
        }
        for (total, error) in totals.iter_mut().zip(&*errors) {
            let corrected = *total + error;
            // Without an error the sign of a zero stays; beside an infinity the error is none.
            *total = if *error == 0.0 || corrected.is_nan() { *total } else { corrected };
        }
        divide(totals, divisor);
        for (total, out) in totals.iter().zip(&mut *out) {
            *out = total.to_le_bytes();
        }
        store_le(sum, out.as_flattened());
    }
}

#[inline(always)]
fn sum_as_f64<const N: usize>(
    payloads: &[&[u8]],
    divisor: Option<f64>,
    sum: &mut [i32],
    widen: impl Fn([u8; N]) -> f64,
    narrow: impl Fn(f64) -> [u8; N],
) {
    let begin = |totals: &mut [f64], part: &[[u8; N]]| {
        for (total, x) in totals.iter_mut().zip(part) {
            *total = widen(*x);
        }
    };
    let add = |totals: &mut [f64], part: &[[u8; N]]| {
        for (total, x) in totals.iter_mut().zip(part) {
            *total += widen(*x);
        }
    };
    let finish = |totals: &[f64], out: &mut [[u8; N]]| {
        for (total, out) in totals.iter().zip(out) {
            *out = narrow(*total);
        }
    };
    sum_blocks(payloads, divisor, sum, begin, add, finish);
}

/// Sums a block of elements after the other: `begin` makes totals of the first payload's, `add`
/// adds another's, and `finish` rounds the totals, in which a NaN is [`CANONICAL_NAN`].
#[inline(always)]
pub(crate) fn sum_blocks<const N: usize>(
    payloads: &[&[u8]],
    divisor: Option<f64>,
    sum: &mut [i32],
    begin: impl Fn(&mut [f64], &[[u8; N]]),
    add: impl Fn(&mut [f64], &[[u8; N]]),
    finish: impl Fn(&[f64], &mut [[u8; N]]),
) {
    let Some((first, others)) = payloads.split_first() else { return };
    let mut totals = [0.0; BLOCK];
    let mut out = [[0; N]; BLOCK];
    for (block, sum) in sum.chunks_mut(BLOCK * N / 4).enumerate() {
        let count = 4 * sum.len() / N;
        let (totals, out) = (&mut totals[..count], &mut out[..count]);
        // From the first one on, not from zero: a sum of negative zeros is one.
        begin(totals, elements(first, block, count));
        for part in others {
            add(totals, elements(part, block, count));
        }
        divide(totals, divisor);
        finish(totals, out);
        store_le(sum, out.as_flattened());
    }
}

/// The elements of a payload that are summed together.
#[inline(always)]
fn elements<const N: usize>(payload: &[u8], block: usize, count: usize) -> &[[u8; N]] {
    &payload.as_chunks().0[block * BLOCK..][..count]
}

/// Divides the sums of some elements, and makes every NaN the same one.
#[inline(always)]
fn divide(totals: &mut [f64], divisor: Option<f64>) {
    if let Some(n) = divisor {
        for total in &mut *totals {
            *total /= n;
        }
    }
    for total in totals {
        *total = if total.is_nan() { CANONICAL_NAN } else { *total };
    }
}

/// The divisor of the sums of some workers; asserts that their payloads are as long as they should
/// be.
///
/// # Panics
/// As [`crate::sum_f32`].
pub(crate) fn assert_payloads(payloads: &[&[u8]], divisor: u32, words: usize) -> Option<f64> {
    assert_workers(u32::try_from(payloads.len()).unwrap_or(u32::MAX));
    assert_workers(divisor);
    assert!(words > 0 && words.is_multiple_of(WORDS_MULTIPLE), "{words} words");
    for (number, payload) in payloads.iter().enumerate() {
        let bytes = payload.len();
        assert!(bytes == 4 * words, "{bytes} bytes of payload {number} for {words} words");
    }
    (divisor > 1).then(|| f64::from(divisor))
}

/// Rounds to `f32` so that a further rounding, to a type of at least two digits less, ends where
/// one alone would have. A value that cannot be represented becomes the neighbour whose last bit is
/// set ("round to odd").
#[inline(always)]
pub(crate) fn to_odd(x: f64) -> f32 {
    let nearest = x as f32;
    let back = f64::from(nearest);
    // A step toward zero where rounding went away from it; and the last bit, where anything was
    // rounded.
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
