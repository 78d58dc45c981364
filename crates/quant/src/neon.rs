//! The registers of NEON, which every little-endian AArch64 has: a pair of them is four `f64`.
//!
//! Nothing is fetched ahead here: there was no such machine to measure the distance on.

use core::arch::aarch64::*;
use core::arch::aarch64::{vmaxq_u32 as max_32, vmaxvq_u32 as largest_32};
use core::arch::asm;

use crate::native::CANONICAL_NAN;
use crate::scalar::INTEGERS;
use crate::vectors::{Plain, kernels};

/// Elements of one step: an `f32` register full.
const STEP: usize = 4;
/// Words of 32 bits of one register.
const LANES: usize = 4;

/// The lower elements and the upper ones.
type Doubles = [float64x2_t; 2];
type Singles = float32x4_t;
type Bits = uint32x4_t;

kernels!("neon");

#[inline]
#[target_feature(enable = "neon")]
fn zero() -> Bits {
    vdupq_n_u32(0)
}

#[inline]
#[target_feature(enable = "neon")]
fn max_16(a: Bits, b: Bits) -> Bits {
    vreinterpretq_u32_u16(vmaxq_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)))
}

#[inline]
#[target_feature(enable = "neon")]
fn magnitudes_32(max: Bits, x: &[f32; LANES]) -> Bits {
    // SAFETY: `x` is 16 readable bytes.
    let x = unsafe { vld1q_u32(x.as_ptr().cast()) };
    max_32(max, vandq_u32(x, vdupq_n_u32(0x7fff_ffff)))
}

#[inline]
#[target_feature(enable = "neon")]
fn magnitudes_16(max: Bits, x: &[u16; 2 * LANES]) -> Bits {
    // SAFETY: `x` is 16 readable bytes.
    let x = unsafe { vld1q_u16(x.as_ptr()) };
    max_16(max, vreinterpretq_u32_u16(vandq_u16(x, vdupq_n_u16(0x7fff))))
}

#[inline]
#[target_feature(enable = "neon")]
fn largest_16(max: Bits) -> u16 {
    vmaxvq_u16(vreinterpretq_u16_u32(max))
}

#[inline]
#[target_feature(enable = "neon")]
fn splat(x: f64) -> Doubles {
    [vdupq_n_f64(x); 2]
}

#[inline]
#[target_feature(enable = "neon")]
fn add([a, b]: Doubles, [c, d]: Doubles) -> Doubles {
    [vaddq_f64(a, c), vaddq_f64(b, d)]
}

#[inline]
#[target_feature(enable = "neon")]
fn mul([a, b]: Doubles, [c, d]: Doubles) -> Doubles {
    [vmulq_f64(a, c), vmulq_f64(b, d)]
}

#[inline]
#[target_feature(enable = "neon")]
fn div([a, b]: Doubles, [c, d]: Doubles) -> Doubles {
    [vdivq_f64(a, c), vdivq_f64(b, d)]
}

#[inline]
#[target_feature(enable = "neon")]
fn clamp(x: Doubles, least: Doubles, limit: Doubles) -> Doubles {
    // These instructions give the number if the other operand is a quiet NaN. Neither limit is a
    // zero, whose sign might be the other operand's.
    let clamp = |x, least, limit| vmaxnmq_f64(vminnmq_f64(x, limit), least);
    [clamp(x[0], least[0], limit[0]), clamp(x[1], least[1], limit[1])]
}

#[inline]
#[target_feature(enable = "neon")]
fn canonical(x: Doubles) -> Doubles {
    x.map(|x| vbslq_f64(vceqq_f64(x, x), x, vdupq_n_f64(CANONICAL_NAN)))
}

#[inline]
#[target_feature(enable = "neon")]
fn widen(x: Singles) -> Doubles {
    [vcvt_f64_f32(vget_low_f32(x)), vcvt_high_f64_f32(x)]
}

#[inline]
#[target_feature(enable = "neon")]
fn narrow([a, b]: Doubles) -> Singles {
    vcvt_high_f32_f64(vcvt_f32_f64(a), b)
}

#[inline]
#[target_feature(enable = "neon")]
fn load_f32<T: Plain<4>>(x: &[T; STEP]) -> Singles {
    // SAFETY: `x` is 16 readable bytes; the load needs no alignment.
    unsafe { vld1q_f32(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn load_f16<T: Plain<2>>(x: &[T; STEP]) -> Singles {
    let x = load_16(x);
    let wide: float32x4_t;
    // The intrinsic is Rust 1.94's.
    // SAFETY: an instruction of NEON, from a register to a register.
    unsafe {
        asm!("fcvtl {wide:v}.4s, {x:v}.4h", wide = lateout(vreg) wide, x = in(vreg) x,
             options(pure, nomem, nostack, preserves_flags));
    }
    wide
}

#[inline]
#[target_feature(enable = "neon")]
fn load_bf16<T: Plain<2>>(x: &[T; STEP]) -> Singles {
    vreinterpretq_f32_u32(vshll_n_u16::<16>(load_16(x)))
}

#[inline]
#[target_feature(enable = "neon")]
fn load_i32<T: Plain<4>>(x: &[T; STEP]) -> Doubles {
    // SAFETY: `x` is 16 readable bytes; the load needs no alignment.
    let x = unsafe { vld1q_s32(x.as_ptr().cast()) };
    [vcvtq_f64_s64(vmovl_s32(vget_low_s32(x))), vcvtq_f64_s64(vmovl_high_s32(x))]
}

#[inline]
#[target_feature(enable = "neon")]
fn save_f32<T: Plain<4>>(y: Singles, out: &mut [T; STEP]) {
    // SAFETY: `out` is 16 writable bytes; the store needs no alignment.
    unsafe { vst1q_f32(out.as_mut_ptr().cast(), y) }
}

#[inline]
#[target_feature(enable = "neon")]
fn save_f16<T: Plain<2>>(y: Singles, out: &mut [T; STEP]) {
    let half: uint16x4_t;
    // The intrinsic is Rust 1.94's.
    // SAFETY: an instruction of NEON, from a register to a register.
    unsafe {
        asm!("fcvtn {half:v}.4h, {y:v}.4s", half = lateout(vreg) half, y = in(vreg) y,
             options(pure, nomem, nostack, preserves_flags));
    }
    save_16(half, out);
}

#[inline]
#[target_feature(enable = "neon")]
fn save_bf16<T: Plain<2>>(y: Singles, out: &mut [T; STEP]) {
    let bits = vreinterpretq_u32_f32(y);
    let last = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
    // The upper halves of the sums.
    save_16(vaddhn_u32(bits, vaddq_u32(last, vdupq_n_u32(0x7fff))), out);
}

/// As the specification rounds: the integers are the lower halves of these sums.
#[inline]
#[target_feature(enable = "neon")]
fn save_i32<T: Plain<4>>(y: Doubles, out: &mut [T; STEP]) {
    let [a, b] = add(y, splat(INTEGERS));
    let integers = vuzp1q_s32(vreinterpretq_s32_f64(a), vreinterpretq_s32_f64(b));
    // SAFETY: `out` is 16 writable bytes; the store needs no alignment.
    unsafe { vst1q_s32(out.as_mut_ptr().cast(), integers) }
}

#[inline]
#[target_feature(enable = "neon")]
fn load_f64(x: &[f64; STEP]) -> Doubles {
    let (lower, upper) = x.split_at(STEP / 2);
    // SAFETY: `lower` and `upper` are 16 readable bytes each.
    unsafe { [vld1q_f64(lower.as_ptr()), vld1q_f64(upper.as_ptr())] }
}

#[inline]
#[target_feature(enable = "neon")]
fn save_f64([a, b]: Doubles, out: &mut [f64; STEP]) {
    let (lower, upper) = out.split_at_mut(STEP / 2);
    // SAFETY: `lower` is 16 writable bytes.
    unsafe { vst1q_f64(lower.as_mut_ptr(), a) }
    // SAFETY: so is `upper`.
    unsafe { vst1q_f64(upper.as_mut_ptr(), b) }
}

#[inline]
#[target_feature(enable = "neon")]
fn load_16<T: Plain<2>>(x: &[T; STEP]) -> uint16x4_t {
    // SAFETY: `x` is the 8 bytes that are read; the load needs no alignment.
    unsafe { vld1_u16(x.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn save_16<T: Plain<2>>(y: uint16x4_t, out: &mut [T; STEP]) {
    // SAFETY: `out` is the 8 bytes that are written; the store needs no alignment.
    unsafe { vst1_u16(out.as_mut_ptr().cast(), y) }
}

#[inline]
#[target_feature(enable = "neon")]
fn widen_lanes_f16(x: &[u16; LANES], out: &mut [[u8; 4]; LANES]) {
    save_f32(load_f16(x), out);
}

#[inline]
#[target_feature(enable = "neon")]
fn narrow_lanes_f16(x: &[[u8; 4]; LANES], out: &mut [u16; LANES]) {
    save_f16(load_f32(x), out);
}
