//! The registers of AVX-512 F, BW and VL: twice the width of those of `avx2`.

use core::arch::x86_64::*;
use core::arch::x86_64::{
    _mm512_add_pd as add, _mm512_cvtpd_ps as narrow, _mm512_cvtps_pd as widen, _mm512_div_pd as div,
    _mm512_max_epu16 as max_16, _mm512_max_epu32 as max_32, _mm512_mul_pd as mul,
    _mm512_reduce_max_epu32 as largest_32, _mm512_set1_pd as splat, _mm512_setzero_si512 as zero,
};

use crate::avx2::{self, prefetch_ahead};
use crate::native::CANONICAL_NAN;
use crate::vectors::{Plain, kernels};

/// Elements of one step: an `f64` register full.
const STEP: usize = 8;
/// Words of 32 bits of one register.
const LANES: usize = 16;

type Doubles = __m512d;
type Singles = __m256;
type Bits = __m512i;

kernels!("avx512f,avx512bw,avx512vl");

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn magnitudes_32(max: Bits, x: &[f32; LANES]) -> Bits {
    prefetch_ahead(x);
    // SAFETY: `x` is 64 readable bytes; the load needs no alignment.
    let x = unsafe { _mm512_loadu_si512(x.as_ptr().cast()) };
    max_32(max, _mm512_and_si512(x, _mm512_set1_epi32(0x7fff_ffff)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn magnitudes_16(max: Bits, x: &[u16; 2 * LANES]) -> Bits {
    prefetch_ahead(x);
    // SAFETY: `x` is 64 readable bytes; the load needs no alignment.
    let x = unsafe { _mm512_loadu_si512(x.as_ptr().cast()) };
    max_16(max, _mm512_and_si512(x, _mm512_set1_epi16(0x7fff)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn largest_16(max: Bits) -> u16 {
    avx2::largest_16(_mm256_max_epu16(_mm512_castsi512_si256(max), _mm512_extracti64x4_epi64::<1>(max)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn clamp(x: Doubles, least: Doubles, limit: Doubles) -> Doubles {
    _mm512_max_pd(_mm512_min_pd(x, limit), least)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn canonical(x: Doubles) -> Doubles {
    _mm512_mask_blend_pd(_mm512_cmp_pd_mask::<_CMP_UNORD_Q>(x, x), x, splat(CANONICAL_NAN))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn load_f32<T: Plain<4>>(x: &[T; STEP]) -> Singles {
    // SAFETY: `x` is 32 readable bytes; the load needs no alignment.
    unsafe { _mm256_loadu_ps(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn load_f16<T: Plain<2>>(x: &[T; STEP]) -> Singles {
    _mm256_cvtph_ps(load_16(x))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn load_bf16<T: Plain<2>>(x: &[T; STEP]) -> Singles {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(load_16(x))))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn load_i32<T: Plain<4>>(x: &[T; STEP]) -> Doubles {
    // SAFETY: `x` is 32 readable bytes; the load needs no alignment.
    _mm512_cvtepi32_pd(unsafe { _mm256_loadu_si256(x.as_ptr().cast()) })
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn save_f32<T: Plain<4>>(y: Singles, out: &mut [T; STEP]) {
    // SAFETY: `out` is 32 writable bytes; the store needs no alignment.
    unsafe { _mm256_storeu_ps(out.as_mut_ptr().cast(), y) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn save_f16<T: Plain<2>>(y: Singles, out: &mut [T; STEP]) {
    save_16(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(y), out);
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn save_bf16<T: Plain<2>>(y: Singles, out: &mut [T; STEP]) {
    let bits = _mm256_castps_si256(y);
    let last = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), last);
    let upper = _mm256_srli_epi32::<16>(rounded);
    // Not VPMOVDW, which some processors are slow to store.
    let (low, high) = (_mm256_castsi256_si128(upper), _mm256_extracti128_si256::<1>(upper));
    save_16(_mm_packus_epi32(low, high), out);
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn save_i32<T: Plain<4>>(y: Doubles, out: &mut [T; STEP]) {
    // SAFETY: `out` is 32 writable bytes; the store needs no alignment.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), _mm512_cvtpd_epi32(y)) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn load_f64(x: &[f64; STEP]) -> Doubles {
    // SAFETY: `x` is 64 readable bytes; the load needs no alignment.
    unsafe { _mm512_loadu_pd(x.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn save_f64(y: Doubles, out: &mut [f64; STEP]) {
    // SAFETY: `out` is 64 writable bytes; the store needs no alignment.
    unsafe { _mm512_storeu_pd(out.as_mut_ptr(), y) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn load_16<T: Plain<2>>(x: &[T; STEP]) -> __m128i {
    // SAFETY: `x` is the 16 bytes that are read; the load needs no alignment.
    unsafe { _mm_loadu_si128(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn save_16<T: Plain<2>>(y: __m128i, out: &mut [T; STEP]) {
    // SAFETY: `out` is the 16 bytes that are written; the store needs no alignment.
    unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), y) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn widen_lanes_f16(x: &[u16; LANES], out: &mut [[u8; 4]; LANES]) {
    // SAFETY: `x` is the 32 bytes that are read; the load needs no alignment.
    let x = unsafe { _mm256_loadu_si256(x.as_ptr().cast()) };
    // SAFETY: `out` is the 64 bytes that are written; the store needs no alignment.
    unsafe { _mm512_storeu_ps(out.as_mut_ptr().cast(), _mm512_cvtph_ps(x)) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn narrow_lanes_f16(x: &[[u8; 4]; LANES], out: &mut [u16; LANES]) {
    // SAFETY: `x` is the 64 bytes that are read; the load needs no alignment.
    let x = unsafe { _mm512_loadu_ps(x.as_ptr().cast()) };
    let narrowed = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
    // SAFETY: `out` is the 32 bytes that are written; the store needs no alignment.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), narrowed) }
}
