//! The kernels with AVX2 and F16C: four elements a step, since the arithmetic is in `f64`; four
//! steps an iteration.
//!
//! Loads and stores go through fixed-size arrays, so that their bounds are the type's. The
//! specification handles the rest at the end of a block; packet-sized blocks leave none.

use core::arch::x86_64::*;

use crate::integer::ELEMENT_BYTES;
use crate::native::{CANONICAL_NAN, sum_blocks, to_odd};
use crate::scalar;
use crate::scale::Finite;

/// Elements of one step: an `f64` register full.
const STEP: usize = 4;
/// Elements of one iteration.
const ITERATION: usize = 4 * STEP;

/// How far ahead of itself the exponent pass fetches: about four blocks.
///
/// It meets the gradient first, one block between other work, where the processor's own prefetchers
/// lose the stream. The sending path runs at twice the speed with this, and no nearer distance does
/// as well. The other passes follow over blocks that are in the cache.
const PREFETCH_BYTES: usize = 5632;

/// Fetches what a worker that goes on through its gradient reads next. At the end of the gradient
/// it fetches in vain.
#[inline]
pub(crate) fn prefetch_ahead<T>(x: &[T]) {
    // Not dereferenced, and a prefetch of any address is harmless: hence the wrapping addition.
    let ahead = x.as_ptr().cast::<i8>().wrapping_add(PREFETCH_BYTES);
    // SAFETY: a prefetch neither faults nor changes what a program can see.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead) }
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn magnitude_f32(block: &[f32]) -> u32 {
    /// Elements of one register.
    const LANES: usize = 8;
    let unsigned = _mm256_set1_epi32(0x7fff_ffff);
    let step = |max: &mut __m256i, x: &[f32; LANES]| {
        prefetch_ahead(x);
        // SAFETY: `x` is 32 readable bytes; the load needs no alignment.
        let x = unsafe { _mm256_loadu_si256(x.as_ptr().cast()) };
        *max = _mm256_max_epu32(*max, _mm256_and_si256(x, unsigned));
    };
    let (iterations, last) = block.as_chunks::<{ 4 * LANES }>();
    let (last, rest) = last.as_chunks::<LANES>();
    // Four accumulators: a maximum waits for the one before.
    let mut max = [_mm256_setzero_si256(); 4];
    for iteration in iterations {
        for (max, x) in max.iter_mut().zip(iteration.as_chunks().0) {
            step(max, x);
        }
    }
    for (max, x) in max.iter_mut().zip(last) {
        step(max, x);
    }
    let max = _mm256_max_epu32(_mm256_max_epu32(max[0], max[1]), _mm256_max_epu32(max[2], max[3]));
    let max = _mm_max_epu32(_mm256_castsi256_si128(max), _mm256_extracti128_si256::<1>(max));
    let max = _mm_max_epu32(max, _mm_shuffle_epi32::<0b01_00_11_10>(max));
    let max = _mm_max_epu32(max, _mm_shuffle_epi32::<0b10_11_00_01>(max));
    scalar::magnitude_f32(rest).max(_mm_cvtsi128_si32(max).cast_unsigned())
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn magnitude_16(block: &[u16]) -> u16 {
    /// Elements of one register.
    const LANES: usize = 16;
    let unsigned = _mm256_set1_epi16(0x7fff);
    let step = |max: &mut __m256i, x: &[u16; LANES]| {
        prefetch_ahead(x);
        // SAFETY: `x` is 32 readable bytes; the load needs no alignment.
        let x = unsafe { _mm256_loadu_si256(x.as_ptr().cast()) };
        *max = _mm256_max_epu16(*max, _mm256_and_si256(x, unsigned));
    };
    let (iterations, last) = block.as_chunks::<{ 4 * LANES }>();
    let (last, rest) = last.as_chunks::<LANES>();
    let mut max = [_mm256_setzero_si256(); 4];
    for iteration in iterations {
        for (max, x) in max.iter_mut().zip(iteration.as_chunks().0) {
            step(max, x);
        }
    }
    for (max, x) in max.iter_mut().zip(last) {
        step(max, x);
    }
    let max = _mm256_max_epu16(_mm256_max_epu16(max[0], max[1]), _mm256_max_epu16(max[2], max[3]));
    let max = _mm_max_epu16(_mm256_castsi256_si128(max), _mm256_extracti128_si256::<1>(max));
    // The instruction finds a minimum; the complement turns the order round.
    let least = _mm_minpos_epu16(_mm_xor_si128(max, _mm_set1_epi16(-1)));
    scalar::magnitude_16(rest).max(!(_mm_cvtsi128_si32(least) as u16))
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn quantize_f32(block: &[f32], scale: &Finite, out: &mut [u8]) {
    quantize(block, scale, out, |x| load_f32(x), scalar::quantize_f32);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn quantize_f16(block: &[u16], scale: &Finite, out: &mut [u8]) {
    let widen = |x: &[u16; STEP]| _mm_cvtph_ps(load_16(x));
    quantize(block, scale, out, widen, scalar::quantize_f16);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn quantize_bf16(block: &[u16], scale: &Finite, out: &mut [u8]) {
    let widen = |x: &[u16; STEP]| _mm_castsi128_ps(_mm_slli_epi32::<16>(_mm_cvtepu16_epi32(load_16(x))));
    quantize(block, scale, out, widen, scalar::quantize_bf16);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn dequantize_f32(sums: &[u8], inverse: f64, out: &mut [f32]) {
    dequantize(sums, inverse, out, |y, out| store_f32(y, out), scalar::dequantize_f32);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn dequantize_f16(sums: &[u8], inverse: f64, out: &mut [u16]) {
    let narrow = |y, out: &mut [u16; STEP]| store_16(_mm_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(y), out);
    dequantize(sums, inverse, out, narrow, scalar::dequantize_f16);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn dequantize_bf16(sums: &[u8], inverse: f64, out: &mut [u16]) {
    let narrow = |y, out: &mut [u16; STEP]| {
        // As the specification, less its NaNs: a finite scale makes none.
        let bits = _mm_castps_si128(y);
        let last = _mm_and_si128(_mm_srli_epi32::<16>(bits), _mm_set1_epi32(1));
        let rounded = _mm_add_epi32(_mm_add_epi32(bits, _mm_set1_epi32(0x7fff)), last);
        let upper = _mm_srli_epi32::<16>(rounded);
        store_16(_mm_packus_epi32(upper, upper), out);
    };
    dequantize(sums, inverse, out, narrow, scalar::dequantize_bf16);
}

/// Compiled for the wider registers, the specification is already as fast as memory.
#[target_feature(enable = "avx2,f16c")]
pub(crate) fn add_le(acc: &mut [i32], payload: &[u8]) {
    scalar::add_le(acc, payload);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn add_saturating_le(acc: &mut [i32], payload: &[u8]) {
    scalar::add_saturating_le(acc, payload);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn widen_f32(block: &[f32], out: &mut [u8]) {
    scalar::widen_f32(block, out);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn widen_bf16(block: &[u16], out: &mut [u8]) {
    scalar::widen_bf16(block, out);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn narrow_f32(values: &[u8], out: &mut [f32]) {
    scalar::narrow_f32(values, out);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn narrow_bf16(values: &[u8], out: &mut [u16]) {
    scalar::narrow_bf16(values, out);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn widen_f16(block: &[u16], out: &mut [u8]) {
    /// Elements of one register of `f32`.
    const LANES: usize = 8;
    let (xs, xs_rest) = block.as_chunks::<LANES>();
    let (ws, ws_rest) = out.as_chunks_mut::<{ LANES * ELEMENT_BYTES }>();
    for (x, w) in xs.iter().zip(ws) {
        // SAFETY: `x` is the 16 bytes that are read; the load needs no alignment.
        let x = unsafe { _mm_loadu_si128(x.as_ptr().cast()) };
        // SAFETY: `w` is the 32 bytes that are written; the store needs no alignment.
        unsafe { _mm256_storeu_ps(w.as_mut_ptr().cast(), _mm256_cvtph_ps(x)) }
    }
    scalar::widen_f16(xs_rest, ws_rest);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn narrow_f16(values: &[u8], out: &mut [u16]) {
    /// Elements of one register of `f32`.
    const LANES: usize = 8;
    let (vs, vs_rest) = values.as_chunks::<{ LANES * ELEMENT_BYTES }>();
    let (ys, ys_rest) = out.as_chunks_mut::<LANES>();
    for (v, y) in vs.iter().zip(ys) {
        // SAFETY: `v` is the 32 bytes that are read; the load needs no alignment.
        let v = unsafe { _mm256_loadu_ps(v.as_ptr().cast()) };
        let narrowed = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v);
        // SAFETY: `y` is the 16 bytes that are written; the store needs no alignment.
        unsafe { _mm_storeu_si128(y.as_mut_ptr().cast(), narrowed) }
    }
    scalar::narrow_f16(vs_rest, ys_rest);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn encode_f32(block: &[f32], out: &mut [u8]) {
    scalar::encode_f32(block, out);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn decode_f32(sums: &[u8], divisor: f32, out: &mut [f32]) {
    scalar::decode_f32(sums, divisor, out);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn decode_bf16(sums: &[u8], divisor: f32, out: &mut [u16]) {
    scalar::decode_bf16(sums, divisor, out);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn encode_f16(block: &[u16], out: &mut [u8]) {
    scalar::encode_f16(block, out);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn decode_f16(sums: &[u8], divisor: f32, out: &mut [u16]) {
    scalar::decode_f16(sums, divisor, out);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn store_bf16(acc: &mut [i32], payload: &[u8], scale: &Finite) {
    scalar::store_bf16(acc, payload, scale);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn add_bf16(acc: &mut [i32], payload: &[u8], scale: &Finite) {
    scalar::add_bf16(acc, payload, scale);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn write_bf16(acc: &[i32], inverse: f64, out: &mut [u8]) {
    scalar::write_bf16(acc, inverse, out);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn sum_f32(payloads: &[&[u8]], divisor: Option<f64>, sum: &mut [i32]) {
    let Some((first, others)) = payloads.split_first() else { return };
    let widen = |x: &[u8; 4 * STEP]| {
        // SAFETY: `x` is 16 readable bytes; the load needs no alignment.
        _mm256_cvtps_pd(unsafe { _mm_loadu_ps(x.as_ptr().cast()) })
    };
    let divisor = divisor.map(|n| _mm256_set1_pd(n));
    let nan = _mm256_set1_pd(CANONICAL_NAN);
    // The sums stay in registers while the payloads go by; the specification's go through memory.
    let (iterations, rest) = sum.as_chunks_mut::<ITERATION>();
    assert!(rest.is_empty(), "a payload is a multiple of 32 words");
    for (at, out) in iterations.iter_mut().enumerate() {
        let mut totals = [_mm256_setzero_pd(); ITERATION / STEP];
        for (total, x) in totals.iter_mut().zip(steps(first, at)) {
            *total = widen(x);
        }
        for payload in others {
            for (total, x) in totals.iter_mut().zip(steps(payload, at)) {
                *total = _mm256_add_pd(*total, widen(x));
            }
        }
        for (total, out) in totals.into_iter().zip(out.as_chunks_mut::<STEP>().0) {
            let mean = divisor.map_or(total, |n| _mm256_div_pd(total, n));
            let is_nan = _mm256_cmp_pd::<_CMP_UNORD_Q>(mean, mean);
            let narrow = _mm256_cvtpd_ps(_mm256_blendv_pd(mean, nan, is_nan));
            // SAFETY: `out` is 16 writable bytes; the store needs no alignment.
            unsafe { _mm_storeu_ps(out.as_mut_ptr().cast(), narrow) };
        }
    }
}

/// The bytes of one iteration over a payload of four bytes an element, a register of elements each.
fn steps(payload: &[u8], iteration: usize) -> &[[u8; 4 * STEP]] {
    let (steps, _) = payload.as_chunks();
    &steps[iteration * (ITERATION / STEP)..][..ITERATION / STEP]
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn sum_f16(payloads: &[&[u8]], divisor: Option<f64>, sum: &mut [i32]) {
    // Whole steps: payloads are whole multiples of 64 elements.
    let begin = |totals: &mut [f64], part: &[[u8; 2]]| {
        for (total, x) in totals.as_chunks_mut::<STEP>().0.iter_mut().zip(part.as_chunks::<STEP>().0) {
            *total = load_halves(x);
        }
    };
    let add = |totals: &mut [f64], part: &[[u8; 2]]| {
        for (total, x) in totals.as_chunks_mut::<STEP>().0.iter_mut().zip(part.as_chunks::<STEP>().0) {
            let x = load_halves(x);
            for (total, x) in total.iter_mut().zip(x) {
                *total += x;
            }
        }
    };
    let finish = |totals: &[f64], out: &mut [[u8; 2]]| {
        for (total, out) in totals.as_chunks::<STEP>().0.iter().zip(out.as_chunks_mut::<STEP>().0) {
            store_halves(total.map(to_odd), out);
        }
    };
    sum_blocks(payloads, divisor, sum, begin, add, finish);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn sum_bf16(payloads: &[&[u8]], divisor: Option<f64>, sum: &mut [i32]) {
    scalar::sum_bf16(payloads, divisor, sum);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn sum_f64(payloads: &[&[u8]], divisor: Option<f64>, sum: &mut [i32]) {
    scalar::sum_f64(payloads, divisor, sum);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn pack_f32(values: &[f32], seed: u64, payload: &mut [u8]) {
    scalar::pack_f32(values, seed, payload);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn unpack_f32(payload: &[u8], out: &mut [f32]) {
    scalar::unpack_f32(payload, out);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn pack_f16(values: &[u16], seed: u64, payload: &mut [u8]) {
    scalar::pack_f16(values, seed, payload);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn unpack_f16(payload: &[u8], out: &mut [u16]) {
    scalar::unpack_f16(payload, out);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn pack_bf16(values: &[u16], seed: u64, payload: &mut [u8]) {
    scalar::pack_bf16(values, seed, payload);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn unpack_bf16(payload: &[u8], out: &mut [u16]) {
    scalar::unpack_bf16(payload, out);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn feed_back_f32(values: &mut [f32], residual: &mut [f32]) {
    scalar::feed_back_f32(values, residual);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn feed_back_f16(values: &mut [u16], residual: &mut [f32]) {
    scalar::feed_back_f16(values, residual);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn feed_back_bf16(values: &mut [u16], residual: &mut [f32]) {
    scalar::feed_back_bf16(values, residual);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn sum_packed(payloads: &[&[u8]], divisor: Option<f32>, seed: u64, sum: &mut [i32]) {
    scalar::sum_packed(payloads, divisor, seed, sum);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn rotate_f32(values: &mut [f32], block: usize, seed: u64) {
    scalar::rotate_f32(values, block, seed);
}

#[target_feature(enable = "avx2,f16c")]
pub(crate) fn rotate_back_f32(values: &mut [f32], block: usize, seed: u64) {
    scalar::rotate_back_f32(values, block, seed);
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn quantize<T>(
    block: &[T],
    scale: &Finite,
    out: &mut [u8],
    widen: impl Fn(&[T; STEP]) -> __m128,
    rest: impl Fn(&[T], &Finite, &mut [u8]),
) {
    let factor = _mm256_set1_pd(scale.factor);
    let limit = _mm256_set1_pd(scale.limit);
    let least = _mm256_set1_pd(scale.least);
    let (xs, xs_rest) = block.as_chunks::<ITERATION>();
    let (qs, qs_rest) = out.as_chunks_mut::<{ ITERATION * ELEMENT_BYTES }>();
    for (x, q) in xs.iter().zip(qs) {
        let steps = x.as_chunks::<STEP>().0.iter();
        for (x, q) in steps.zip(q.as_chunks_mut::<{ STEP * ELEMENT_BYTES }>().0) {
            let scaled = _mm256_mul_pd(_mm256_cvtps_pd(widen(x)), factor);
            let below = _mm256_min_pd(scaled, limit);
            let clamped = _mm256_max_pd(below, least);
            let integers = _mm256_cvtpd_epi32(clamped);
            // SAFETY: `q` is 16 writable bytes; the store needs no alignment.
            unsafe { _mm_storeu_si128(q.as_mut_ptr().cast(), integers) }
        }
    }
    rest(xs_rest, scale, qs_rest);
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn dequantize<T>(
    sums: &[u8],
    inverse: f64,
    out: &mut [T],
    narrow: impl Fn(__m128, &mut [T; STEP]),
    rest: impl Fn(&[u8], f64, &mut [T]),
) {
    let factor = _mm256_set1_pd(inverse);
    let (sums, sums_rest) = sums.as_chunks::<{ ITERATION * ELEMENT_BYTES }>();
    let (ys, ys_rest) = out.as_chunks_mut::<ITERATION>();
    for (a, y) in sums.iter().zip(ys) {
        let steps = a.as_chunks::<{ STEP * ELEMENT_BYTES }>().0.iter();
        for (a, y) in steps.zip(y.as_chunks_mut::<STEP>().0) {
            // SAFETY: `a` is 16 readable bytes; the load needs no alignment.
            let a = unsafe { _mm_loadu_si128(a.as_ptr().cast()) };
            narrow(_mm256_cvtpd_ps(_mm256_mul_pd(_mm256_cvtepi32_pd(a), factor)), y);
        }
    }
    rest(sums_rest, inverse, ys_rest);
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_f32(x: &[f32; STEP]) -> __m128 {
    // SAFETY: `x` is 16 readable bytes; the load needs no alignment.
    unsafe { _mm_loadu_ps(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn store_f32(y: __m128, out: &mut [f32; STEP]) {
    // SAFETY: `out` is 16 writable bytes; the store needs no alignment.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), y) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_16(x: &[u16; STEP]) -> __m128i {
    // SAFETY: `x` is the 8 bytes that are read; the load needs no alignment.
    unsafe { _mm_loadl_epi64(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn store_16(y: __m128i, out: &mut [u16; STEP]) {
    // SAFETY: `out` is the 8 bytes that are written; the store needs no alignment.
    unsafe { _mm_storel_epi64(out.as_mut_ptr().cast(), y) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_halves(x: &[[u8; 2]; STEP]) -> [f64; STEP] {
    // SAFETY: `x` is the 8 bytes that are read; the load needs no alignment.
    let x = unsafe { _mm_loadl_epi64(x.as_ptr().cast()) };
    let mut wide = [0.0; STEP];
    // SAFETY: `wide` is the 32 bytes that are written; the store needs no alignment.
    unsafe { _mm256_storeu_pd(wide.as_mut_ptr(), _mm256_cvtps_pd(_mm_cvtph_ps(x))) }
    wide
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn store_halves(x: [f32; STEP], out: &mut [[u8; 2]; STEP]) {
    let y = _mm_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(load_f32(&x));
    // SAFETY: `out` is the 8 bytes that are written; the store needs no alignment.
    unsafe { _mm_storel_epi64(out.as_mut_ptr().cast(), y) }
}
