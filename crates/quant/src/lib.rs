//! Quantisation: floating-point gradients to 32-bit integers that a switch can add, and back.
//!
//! The arithmetic is SwitchML's block floating point (§4.6, Appendix E): the elements of one
//! packet, a *block*, share one power-of-two [`Exponent`]. Each is scaled by
//! `f = (2^31 - 1) / (n * 2^m)` ([`Scale`]) and rounded to an `i32`. So the sum over `n` workers
//! cannot overflow, and does not depend on the order of arrival.
//!
//! The way of a gradient through this crate:
//!
//! 1. A worker takes the exponent of a block that it will send soon ([`exponent_f32`]) and
//!    announces it.
//! 2. The switch answers with the maximum over the workers, which becomes the block's [`Scale`].
//! 3. The worker quantises the block straight into a packet ([`quantize_f32`]).
//! 4. The switch adds packets into a slot and writes the result ([`store_le`], [`add_le`],
//!    [`write_le`]).
//! 5. The worker dequantises the result straight into the gradient ([`dequantize_f32`]).
//!
//! `int32` tensors skip the scaling ([`copy_i32`], [`read_i32`]).
//!
//! In a job whose floats travel as bfloat16, steps 3 to 5 differ. The worker rounds
//! ([`encode_f32`]). The switch adds in fixed point ([`Scale::fixed_point`], [`store_bf16`],
//! [`add_bf16`]) and rounds the sum ([`write_bf16`]). The worker widens ([`decode_f32`]).
//!
//! Tensors that travel in their own type, such as small ones, have no exponent. The switch sums
//! integers as they come ([`add_i64_le`], [`add_i8_le`]) and floats in the order of the workers,
//! when all are there ([`sum_f32`]).
//!
//! In a job whose floats travel as int8 or int4 there are no exponents to agree on. The worker rounds
//! ([`pack_f32`]). The switch sums in the order of the workers, when all are there, and rounds the
//! sum ([`sum_packed`]). The worker widens ([`unpack_f32`]). The error of a worker's rounding may
//! be added to its next gradient ([`feed_back_f32`]).
//!
//! In ATP (§3.8) the caller chooses the factor ([`Scale::of_factor`]). A switch adds with
//! saturation ([`add_saturating_le`]), and the server divides. Parameters of `f32` tensors travel as
//! `f32` ([`narrow_f32`]), as do the original values if a sum overflowed ([`widen_f32`]).
//!
//! Tensors that may be lost on their way are rotated before, and their sum is rotated back
//! ([`rotate_f32`], [`rotate_back_f32`]).
//!
//! Map:
//! - `exponent`: the shared exponent.
//! - `scale`: what a block's exponent makes of its elements.
//! - `class`: blocks with a NaN or an infinity.
//! - `float16`: conversions of f16 and bf16.
//! - `scalar`: **the specification** of every kernel.
//! - `vectors`: the kernels of instruction sets, as one text. They equal the specification bit for
//!   bit, which the property tests hold.
//! - `avx2`, `avx512` and `neon`: the registers and operations that this text is written in.
//! - `kernels`: the choice between them, made once at run time.
//! - `integer`: the kernels on `i32`.
//! - `native`: sums in the tensor's own type.
//! - `packed`: one byte an element, or half of one.
//! - `rotation`: the randomised Hadamard rotation.
//!
//! Like all of Rust, the kernels assume the default floating-point environment: a thread that
//! flushes subnormals to zero must not run them.
//!
//! Deliberately absent: packets, slots, zero-padding of a short last block (the caller's),
//! allocation, errors. All lengths are the caller's own arithmetic, so a mismatch is an assertion;
//! every *value*, also one that came from the network, is accepted without a panic.
#![no_std]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod class;
mod exponent;
mod float16;
mod integer;
mod kernels;
mod native;
#[cfg(all(target_arch = "aarch64", target_endian = "little", target_feature = "neon"))]
mod neon;
mod packed;
mod rotation;
mod scalar;
mod scale;
#[cfg(any(
    target_arch = "x86_64",
    all(target_arch = "aarch64", target_endian = "little", target_feature = "neon")
))]
mod vectors;

pub use exponent::Exponent;
pub use integer::{copy_i32, read_i32, store_le, write_le};
#[doc(hidden)]
pub use kernels::{Isa, Kernels};
pub use native::{add_i8_le, add_i64_le, mean_i8, mean_i64, mean_u8};
pub use packed::{PACKED_BLOCK, Packing};
pub use scale::{Divisor, Scale, WORKERS_MAX};

/// The shared exponent of a block of `f32`; [`Exponent::ZERO`] for an empty one.
#[must_use]
pub fn exponent_f32(block: &[f32]) -> Exponent {
    Kernels::detected().exponent_f32(block)
}

/// The shared exponent of a block of IEEE half-precision elements, given as raw bits.
#[must_use]
pub fn exponent_f16(block: &[u16]) -> Exponent {
    Kernels::detected().exponent_f16(block)
}

/// The shared exponent of a block of bfloat16 elements, given as raw bits.
#[must_use]
pub fn exponent_bf16(block: &[u16]) -> Exponent {
    Kernels::detected().exponent_bf16(block)
}

/// Quantises a block into little-endian `i32` at any alignment.
///
/// # Panics
/// If `out` is not four bytes an element.
pub fn quantize_f32(block: &[f32], scale: &Scale, out: &mut [u8]) {
    Kernels::detected().quantize_f32(block, scale, out);
}

/// [`quantize_f32`] for IEEE half-precision elements (raw bits), converted exactly to `f32` first.
///
/// # Panics
/// If `out` is not four bytes an element.
pub fn quantize_f16(block: &[u16], scale: &Scale, out: &mut [u8]) {
    Kernels::detected().quantize_f16(block, scale, out);
}

/// [`quantize_f32`] for bfloat16 elements (raw bits), converted exactly to `f32` first.
///
/// # Panics
/// If `out` is not four bytes an element.
pub fn quantize_bf16(block: &[u16], scale: &Scale, out: &mut [u8]) {
    Kernels::detected().quantize_bf16(block, scale, out);
}

/// Turns little-endian sums `A` back into values: `A / f`, or their mean over the workers (see
/// [`Divisor`]), rounded to the nearest `f32`, ties to even; what is too large for the type becomes
/// an infinity.
///
/// # Panics
/// If `sums` is not four bytes an element.
pub fn dequantize_f32(sums: &[u8], scale: &Scale, divisor: Divisor, out: &mut [f32]) {
    Kernels::detected().dequantize_f32(sums, scale, divisor, out);
}

/// [`dequantize_f32`], then rounded to IEEE half precision (raw bits), ties to even.
///
/// # Panics
/// If `sums` is not four bytes an element.
pub fn dequantize_f16(sums: &[u8], scale: &Scale, divisor: Divisor, out: &mut [u16]) {
    Kernels::detected().dequantize_f16(sums, scale, divisor, out);
}

/// [`dequantize_f32`], then rounded to bfloat16 (raw bits), ties to even.
///
/// # Panics
/// If `sums` is not four bytes an element.
pub fn dequantize_bf16(sums: &[u8], scale: &Scale, divisor: Divisor, out: &mut [u16]) {
    Kernels::detected().dequantize_bf16(sums, scale, divisor, out);
}

/// Rounds a block to little-endian bfloat16 at any alignment, to nearest, ties to even. A NaN stays
/// a NaN; what is at least half way from the largest bfloat16 to 2^128 becomes an infinity.
///
/// # Panics
/// If `out` is not two bytes an element.
pub fn encode_f32(block: &[f32], out: &mut [u8]) {
    Kernels::detected().encode_f32(block, out);
}

/// [`encode_f32`] for IEEE half-precision elements (raw bits), converted exactly to `f32` first.
///
/// # Panics
/// If `out` is not two bytes an element.
pub fn encode_f16(block: &[u16], out: &mut [u8]) {
    Kernels::detected().encode_f16(block, out);
}

/// Writes bfloat16 elements (raw bits) unchanged.
///
/// # Panics
/// If `out` is not two bytes an element.
pub fn copy_bf16(block: &[u16], out: &mut [u8]) {
    integer::copy_bf16(block, out);
}

/// Turns little-endian bfloat16 sums back into values, or into their mean over the workers. It
/// divides in `f32`; without a division the values are exact.
///
/// # Panics
/// If `sums` is not two bytes an element, or `workers` is not in `1..=`[`WORKERS_MAX`].
pub fn decode_f32(sums: &[u8], divisor: Divisor, workers: u32, out: &mut [f32]) {
    Kernels::detected().decode_f32(sums, divisor, workers, out);
}

/// [`decode_f32`], then rounded to IEEE half precision (raw bits), ties to even.
///
/// # Panics
/// If `sums` is not two bytes an element, or `workers` is not in `1..=`[`WORKERS_MAX`].
pub fn decode_f16(sums: &[u8], divisor: Divisor, workers: u32, out: &mut [u16]) {
    Kernels::detected().decode_f16(sums, divisor, workers, out);
}

/// [`decode_f32`], then rounded to bfloat16 (raw bits), ties to even.
///
/// # Panics
/// If `sums` is not two bytes an element, or `workers` is not in `1..=`[`WORKERS_MAX`].
pub fn decode_bf16(sums: &[u8], divisor: Divisor, workers: u32, out: &mut [u16]) {
    Kernels::detected().decode_bf16(sums, divisor, workers, out);
}

/// Replaces a slot's accumulator by a bfloat16 payload in the fixed point of `scale`, one of
/// [`Scale::fixed_point`] or [`Scale::fixed_point_sum`].
///
/// # Panics
/// If `payload` is not two bytes an element.
pub fn store_bf16(acc: &mut [i32], payload: &[u8], scale: &Scale) {
    Kernels::detected().store_bf16(acc, payload, scale);
}

/// Adds a bfloat16 payload to a slot's accumulator in the fixed point of `scale`, that of
/// [`Scale::fixed_point`].
///
/// # Panics
/// If `payload` is not two bytes an element.
pub fn add_bf16(acc: &mut [i32], payload: &[u8], scale: &Scale) {
    Kernels::detected().add_bf16(acc, payload, scale);
}

/// Writes a slot's accumulator in fixed point as a bfloat16 payload: `A * 2^-k`, rounded to `f32`
/// and then to bfloat16, both to nearest, ties to even.
///
/// # Panics
/// If `out` is not two bytes an element.
pub fn write_bf16(acc: &[i32], scale: &Scale, out: &mut [u8]) {
    Kernels::detected().write_bf16(acc, scale, out);
}

/// Adds a payload of little-endian `i32` to a slot's accumulator, wrapping. Quantised sums cannot
/// overflow (SwitchML Theorem 2), and native integers wrap as they do in the tensor library.
///
/// # Panics
/// If `payload` is not four bytes an element.
pub fn add_le(acc: &mut [i32], payload: &[u8]) {
    Kernels::detected().add_le(acc, payload);
}

/// Adds a payload of little-endian `i32` to an accumulator, saturating (ATP §3.8). `i32::MAX` and
/// `i32::MIN` say that the sum is not known; an accumulator that holds one keeps it, and a
/// payload's becomes the accumulator's.
///
/// # Panics
/// If `payload` is not four bytes an element.
pub fn add_saturating_le(acc: &mut [i32], payload: &[u8]) {
    Kernels::detected().add_saturating_le(acc, payload);
}

/// Writes a block unchanged, in little-endian `f32` at any alignment, for a server that sums
/// originals.
///
/// # Panics
/// If `out` is not four bytes an element.
pub fn widen_f32(block: &[f32], out: &mut [u8]) {
    Kernels::detected().widen_f32(block, out);
}

/// [`widen_f32`] for IEEE half-precision elements (raw bits), converted exactly.
///
/// # Panics
/// If `out` is not four bytes an element.
pub fn widen_f16(block: &[u16], out: &mut [u8]) {
    Kernels::detected().widen_f16(block, out);
}

/// [`widen_f32`] for bfloat16 elements (raw bits), converted exactly.
///
/// # Panics
/// If `out` is not four bytes an element.
pub fn widen_bf16(block: &[u16], out: &mut [u8]) {
    Kernels::detected().widen_bf16(block, out);
}

/// Reads little-endian `f32` at any alignment: parameters from a server.
///
/// # Panics
/// If `values` is not four bytes an element.
pub fn narrow_f32(values: &[u8], out: &mut [f32]) {
    Kernels::detected().narrow_f32(values, out);
}

/// [`narrow_f32`], rounded to IEEE half precision (raw bits), ties to even.
///
/// # Panics
/// If `values` is not four bytes an element.
pub fn narrow_f16(values: &[u8], out: &mut [u16]) {
    Kernels::detected().narrow_f16(values, out);
}

/// [`narrow_f32`], rounded to bfloat16 (raw bits), ties to even.
///
/// # Panics
/// If `values` is not four bytes an element.
pub fn narrow_bf16(values: &[u8], out: &mut [u16]) {
    Kernels::detected().narrow_bf16(values, out);
}

/// Sums `payloads` in their order: in `f64`, divided there by `divisor`, and rounded once to `f32`.
/// `payloads` has all workers' payloads, and then `divisor` is their number for a mean; or it has
/// only some, as in a rack. A sum without a value is one NaN, whatever the NaNs were.
///
/// # Panics
/// If one of `payloads` is not as long as `sum`, `sum` is no multiple of 32 words, or their number
/// or `divisor` is not in `1..=`[`WORKERS_MAX`].
pub fn sum_f32(payloads: &[&[u8]], divisor: u32, sum: &mut [i32]) {
    Kernels::detected().sum_f32(payloads, divisor, sum);
}

/// [`sum_f32`] for IEEE half-precision elements, rounded once to their type.
///
/// # Panics
/// As [`sum_f32`].
pub fn sum_f16(payloads: &[&[u8]], divisor: u32, sum: &mut [i32]) {
    Kernels::detected().sum_f16(payloads, divisor, sum);
}

/// [`sum_f32`] for bfloat16 elements, rounded once to their type.
///
/// # Panics
/// As [`sum_f32`].
pub fn sum_bf16(payloads: &[&[u8]], divisor: u32, sum: &mut [i32]) {
    Kernels::detected().sum_bf16(payloads, divisor, sum);
}

/// [`sum_f32`] for `f64`, with the errors of the additions carried along (Ogita, Rump and Oishi
/// 2005, Sum2): as if summed with twice the digits and rounded once. A mean is rounded once more.
///
/// # Panics
/// As [`sum_f32`].
pub fn sum_f64(payloads: &[&[u8]], divisor: u32, sum: &mut [i32]) {
    Kernels::detected().sum_f64(payloads, divisor, sum);
}

/// Rounds values to blocks of [`PACKED_BLOCK`] integers that share a step. Chance picks one of the
/// two neighbouring levels, so that the expectation is the value. A value that can be represented
/// stays unchanged. The chance depends only on `seed` and the element's place. Room in the payload
/// that is left is filled with zeros.
///
/// The error of an element is less than the distance of those levels. With [`Packing::Int8`] this is
/// the block's step, at most 1/63.5 of the largest magnitude in the block. With [`Packing::Int4`] it
/// is the step, at most 1/6 of that magnitude, or half of the element itself, whichever is more.
/// Either is at least 2^-126.
///
/// A block with a NaN, an infinity or a magnitude above 127 * 2^121 (with four bits 12 * 2^124) is
/// not finite: see [`unpack_f32`].
///
/// # Panics
/// If `payload` is no multiple of four blocks, of [`Packing::block_bytes`] each, or has no room for
/// the values.
pub fn pack_f32(packing: Packing, values: &[f32], seed: u64, payload: &mut [u8]) {
    Kernels::detected().pack_f32(packing, values, seed, payload);
}

/// [`pack_f32`] for IEEE half-precision elements (raw bits), converted exactly to `f32` first.
///
/// # Panics
/// As [`pack_f32`].
pub fn pack_f16(packing: Packing, values: &[u16], seed: u64, payload: &mut [u8]) {
    Kernels::detected().pack_f16(packing, values, seed, payload);
}

/// [`pack_f32`] for bfloat16 elements (raw bits), converted exactly to `f32` first.
///
/// # Panics
/// As [`pack_f32`].
pub fn pack_bf16(packing: Packing, values: &[u16], seed: u64, payload: &mut [u8]) {
    Kernels::detected().pack_bf16(packing, values, seed, payload);
}

/// Turns the first elements of a payload of [`pack_f32`] or [`sum_packed`] back into values,
/// exactly. In a block that is not finite an infinity is one (what was too large, too), and
/// everything else a NaN.
///
/// # Panics
/// As [`pack_f32`].
pub fn unpack_f32(packing: Packing, payload: &[u8], out: &mut [f32]) {
    Kernels::detected().unpack_f32(packing, payload, out);
}

/// [`unpack_f32`], then rounded to IEEE half precision (raw bits), ties to even: what was above
/// 65,024 may be an infinity.
///
/// # Panics
/// As [`pack_f32`].
pub fn unpack_f16(packing: Packing, payload: &[u8], out: &mut [u16]) {
    Kernels::detected().unpack_f16(packing, payload, out);
}

/// [`unpack_f32`] to bfloat16 (raw bits), which have the digits for it.
///
/// # Panics
/// As [`pack_f32`].
pub fn unpack_bf16(packing: Packing, payload: &[u8], out: &mut [u16]) {
    Kernels::detected().unpack_bf16(packing, payload, out);
}

/// Adds `residual` to the values, leaves of that in each the nearest that a payload can hold, ties
/// to even, and in `residual` what is missing. The blocks are as in [`pack_f32`], from the first
/// value on. [`pack_f32`] then changes nothing any more.
///
/// A block that is not finite (as [`pack_f32`] has it) keeps its values, and has no residual.
///
/// # Panics
/// If there is not one residual for each value.
pub fn feed_back_f32(packing: Packing, values: &mut [f32], residual: &mut [f32]) {
    Kernels::detected().feed_back_f32(packing, values, residual);
}

/// [`feed_back_f32`] for IEEE half-precision elements (raw bits).
///
/// # Panics
/// As [`feed_back_f32`].
pub fn feed_back_f16(packing: Packing, values: &mut [u16], residual: &mut [f32]) {
    Kernels::detected().feed_back_f16(packing, values, residual);
}

/// [`feed_back_f32`] for bfloat16 elements (raw bits).
///
/// # Panics
/// As [`feed_back_f32`].
pub fn feed_back_bf16(packing: Packing, values: &mut [u16], residual: &mut [f32]) {
    Kernels::detected().feed_back_bf16(packing, values, residual);
}

/// Sums payloads of [`pack_f32`] in their order, in `f32`, divides by `divisor`, and rounds the
/// result as [`pack_f32`] does. A block that is not finite in one of them, or becomes so, is not
/// finite in the sum.
///
/// # Panics
/// If one of `payloads` is not as long as `sum`, or as [`pack_f32`] has it; or if their number or
/// `divisor` is not in `1..=`[`WORKERS_MAX`].
pub fn sum_packed(packing: Packing, payloads: &[&[u8]], divisor: u32, seed: u64, sum: &mut [i32]) {
    Kernels::detected().sum_packed(packing, payloads, divisor, seed, sum);
}

/// Rotates values in blocks of `block` elements, a power of two, and the rest in blocks of smaller
/// ones. It applies the signs that `seed` and an element's place give, then the Hadamard matrix
/// over the root of its size. Norms of blocks stay, except for rounding.
///
/// Not finite in a block, whether it was so or became it, spreads: all of the block is then one
/// NaN, also when rotated back.
///
/// # Panics
/// If `block` is no power of two.
pub fn rotate_f32(values: &mut [f32], block: usize, seed: u64) {
    Kernels::detected().rotate_f32(values, block, seed);
}

/// Turns back what [`rotate_f32`] has rotated with the same block and seed.
///
/// # Panics
/// If `block` is no power of two.
pub fn rotate_back_f32(values: &mut [f32], block: usize, seed: u64) {
    Kernels::detected().rotate_back_f32(values, block, seed);
}
