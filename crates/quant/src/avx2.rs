//! The registers of AVX2 and F16C: four elements a step, since the arithmetic is in `f64`.

use core::arch::x86_64::*;
use core::arch::x86_64::{
    _mm256_add_pd as add, _mm256_cvtpd_ps as narrow, _mm256_cvtps_pd as widen, _mm256_div_pd as div,
    _mm256_max_epu16 as max_16, _mm256_max_epu32 as max_32, _mm256_mul_pd as mul, _mm256_set1_pd as splat,
    _mm256_setzero_si256 as zero,
};

use crate::native::CANONICAL_NAN;
use crate::vectors::{Plain, kernels};

/// Elements of one step: an `f64` register full.
const STEP: usize = 4;
/// Words of 32 bits of one register.
const LANES: usize = 8;

type Doubles = __m256d;
type Singles = __m128;
type Bits = __m256i;

kernels!("avx2,f16c");

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

#[inline]
#[target_feature(enable = "avx2")]
fn magnitudes_32(max: Bits, x: &[f32; LANES]) -> Bits {
    prefetch_ahead(x);
    // SAFETY: `x` is 32 readable bytes; the load needs no alignment.
    let x = unsafe { _mm256_loadu_si256(x.as_ptr().cast()) };
    max_32(max, _mm256_and_si256(x, _mm256_set1_epi32(0x7fff_ffff)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn magnitudes_16(max: Bits, x: &[u16; 2 * LANES]) -> Bits {
    prefetch_ahead(x);
    // SAFETY: `x` is 32 readable bytes; the load needs no alignment.
    let x = unsafe { _mm256_loadu_si256(x.as_ptr().cast()) };
    max_16(max, _mm256_and_si256(x, _mm256_set1_epi16(0x7fff)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn largest_32(max: Bits) -> u32 {
    let max = _mm_max_epu32(_mm256_castsi256_si128(max), _mm256_extracti128_si256::<1>(max));
    let max = _mm_max_epu32(max, _mm_shuffle_epi32::<0b01_00_11_10>(max));
    let max = _mm_max_epu32(max, _mm_shuffle_epi32::<0b10_11_00_01>(max));
    _mm_cvtsi128_si32(max).cast_unsigned()
}

#[inline]
#[target_feature(enable = "avx2")]
pub(crate) fn largest_16(max: Bits) -> u16 {
    let max = _mm_max_epu16(_mm256_castsi256_si128(max), _mm256_extracti128_si256::<1>(max));
    // The instruction finds a minimum; the complement turns the order round.
    let least = _mm_minpos_epu16(_mm_xor_si128(max, _mm_set1_epi16(-1)));
    !(_mm_cvtsi128_si32(least) as u16)
}

#[inline]
#[target_feature(enable = "avx2")]
fn clamp(x: Doubles, least: Doubles, limit: Doubles) -> Doubles {
    _mm256_max_pd(_mm256_min_pd(x, limit), least)
}

#[inline]
#[target_feature(enable = "avx2")]
fn canonical(x: Doubles) -> Doubles {
    _mm256_blendv_pd(x, splat(CANONICAL_NAN), _mm256_cmp_pd::<_CMP_UNORD_Q>(x, x))
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_f32<T: Plain<4>>(x: &[T; STEP]) -> Singles {
    // SAFETY: `x` is 16 readable bytes; the load needs no alignment.
    unsafe { _mm_loadu_ps(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_f16<T: Plain<2>>(x: &[T; STEP]) -> Singles {
    _mm_cvtph_ps(load_16(x))
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_bf16<T: Plain<2>>(x: &[T; STEP]) -> Singles {
    _mm_castsi128_ps(_mm_slli_epi32::<16>(_mm_cvtepu16_epi32(load_16(x))))
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_i32<T: Plain<4>>(x: &[T; STEP]) -> Doubles {
    // SAFETY: `x` is 16 readable bytes; the load needs no alignment.
    _mm256_cvtepi32_pd(unsafe { _mm_loadu_si128(x.as_ptr().cast()) })
}

#[inline]
#[target_feature(enable = "avx2")]
fn save_f32<T: Plain<4>>(y: Singles, out: &mut [T; STEP]) {
    // SAFETY: `out` is 16 writable bytes; the store needs no alignment.
    unsafe { _mm_storeu_ps(out.as_mut_ptr().cast(), y) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn save_f16<T: Plain<2>>(y: Singles, out: &mut [T; STEP]) {
    save_16(_mm_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(y), out);
}

#[inline]
#[target_feature(enable = "avx2")]
fn save_bf16<T: Plain<2>>(y: Singles, out: &mut [T; STEP]) {
    let bits = _mm_castps_si128(y);
    let last = _mm_and_si128(_mm_srli_epi32::<16>(bits), _mm_set1_epi32(1));
    let rounded = _mm_add_epi32(_mm_add_epi32(bits, _mm_set1_epi32(0x7fff)), last);
    let upper = _mm_srli_epi32::<16>(rounded);
    save_16(_mm_packus_epi32(upper, upper), out);
}

#[inline]
#[target_feature(enable = "avx2")]
fn save_i32<T: Plain<4>>(y: Doubles, out: &mut [T; STEP]) {
    // SAFETY: `out` is 16 writable bytes; the store needs no alignment.
    unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), _mm256_cvtpd_epi32(y)) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_f64(x: &[f64; STEP]) -> Doubles {
    // SAFETY: `x` is 32 readable bytes; the load needs no alignment.
    unsafe { _mm256_loadu_pd(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn save_f64(y: Doubles, out: &mut [f64; STEP]) {
    // SAFETY: `out` is 32 writable bytes; the store needs no alignment.
    unsafe { _mm256_storeu_pd(out.as_mut_ptr(), y) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_16<T: Plain<2>>(x: &[T; STEP]) -> __m128i {
    // SAFETY: `x` is the 8 bytes that are read; the load needs no alignment.
    unsafe { _mm_loadl_epi64(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn save_16<T: Plain<2>>(y: __m128i, out: &mut [T; STEP]) {
    // SAFETY: `out` is the 8 bytes that are written; the store needs no alignment.
    unsafe { _mm_storel_epi64(out.as_mut_ptr().cast(), y) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn widen_lanes_f16(x: &[u16; LANES], out: &mut [[u8; 4]; LANES]) {
    // SAFETY: `x` is the 16 bytes that are read; the load needs no alignment.
    let x = unsafe { _mm_loadu_si128(x.as_ptr().cast()) };
    // SAFETY: `out` is the 32 bytes that are written; the store needs no alignment.
    unsafe { _mm256_storeu_ps(out.as_mut_ptr().cast(), _mm256_cvtph_ps(x)) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn narrow_lanes_f16(x: &[[u8; 4]; LANES], out: &mut [u16; LANES]) {
    // SAFETY: `x` is the 32 bytes that are read; the load needs no alignment.
    let x = unsafe { _mm256_loadu_ps(x.as_ptr().cast()) };
    let narrowed = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
    // SAFETY: `out` is the 16 bytes that are written; the store needs no alignment.
    unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), narrowed) }
}
