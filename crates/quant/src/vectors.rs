//! The kernels of every instruction set with vectors, as one text.
//!
//! The naive way is a trait of registers, with kernels that are generic over it. It fails twice.
//! Intrinsics need `unsafe` outside functions with a `#[target_feature]`, an attribute that a safe
//! method of a trait cannot have. The length of an array may not depend on a type parameter, and
//! arrays of fixed length spare the bounds checks. So the text is a macro, `kernels!`. The modules
//! `avx2`, `avx512` and `neon` expand it, each beside the registers and operations that it needs:
//!
//! - `Doubles`: a register of `STEP` `f64`, in which all arithmetic is done.
//! - `Singles`: a register of as many `f32`.
//! - `Bits`: a register of `LANES` words of 32 bits, or of twice as many of 16 bits.
//! - `load_f32`, `load_f16`, `load_bf16`, `load_i32` read a step of that type.
//! - `save_f32`, `save_f16`, `save_bf16`, `save_i32` write a step, rounded to nearest, ties to
//!   even. `save_bf16` keeps the canonical NaN, and need know no other.
//! - `load_f64` and `save_f64` read and write a step as it is.
//! - `widen` and `narrow` go from `Singles` to `Doubles` and back.
//! - `splat`, `add`, `mul`, `div`: arithmetic.
//! - `clamp`: as the specification does it, so that a NaN becomes the limit.
//! - `canonical` replaces every NaN by one.
//! - `zero`, `magnitudes_32`, `magnitudes_16`, `max_32`, `max_16`, `largest_32` and `largest_16`
//!   make up the exponent pass.
//! - `widen_lanes_f16` and `narrow_lanes_f16` convert `LANES` elements, without arithmetic.
//!
//! Loads and stores go through fixed-size arrays, so that their bounds are the type's. The
//! specification handles the rest at the end of a block; packet-sized blocks leave none.
//!
//! Most kernels need no intrinsics. They are the specification, compiled for the instruction set:
//! the compiler makes vector instructions of it.

/// An element in memory, of `BYTES` bytes, that vectors are loaded from and stored to.
///
/// # Safety
/// The type has that size and no padding, and every pattern of its bytes is a value.
pub(crate) unsafe trait Plain<const BYTES: usize>: Copy {}

// SAFETY: floats, integers and bytes take any bits, and have this size.
unsafe impl Plain<4> for f32 {}
// SAFETY: as above.
unsafe impl Plain<4> for i32 {}
// SAFETY: as above.
unsafe impl Plain<4> for [u8; 4] {}
// SAFETY: as above.
unsafe impl Plain<2> for u16 {}
// SAFETY: as above.
unsafe impl Plain<2> for [u8; 2] {}

/// The specification, compiled for an instruction set.
macro_rules! compiled {
    ($features:literal: $($name:ident($($argument:ident: $type:ty),*);)*) => {$(
        #[target_feature(enable = $features)]
        pub(crate) fn $name($($argument: $type),*) {
            $crate::scalar::$name($($argument),*);
        }
    )*};
}

/// All kernels of an instruction set, in the module that has its registers and operations.
macro_rules! kernels {
    ($features:literal) => {
        use crate::integer::ELEMENT_BYTES;
        use crate::native::{BLOCK, sum_blocks, to_odd};
        use crate::packed::Packing;
        use crate::scalar;
        use crate::scale::Finite;

        /// Elements of one iteration.
        const ITERATION: usize = 4 * STEP;

        #[target_feature(enable = $features)]
        pub(crate) fn magnitude_f32(block: &[f32]) -> u32 {
            let (registers, rest) = block.as_chunks::<LANES>();
            let max = magnitude(registers, |max, x| magnitudes_32(max, x), |a, b| max_32(a, b));
            scalar::magnitude_f32(rest).max(largest_32(max))
        }

        #[target_feature(enable = $features)]
        pub(crate) fn magnitude_16(block: &[u16]) -> u16 {
            let (registers, rest) = block.as_chunks::<{ 2 * LANES }>();
            let max = magnitude(registers, |max, x| magnitudes_16(max, x), |a, b| max_16(a, b));
            scalar::magnitude_16(rest).max(largest_16(max))
        }

        #[inline]
        #[target_feature(enable = $features)]
        fn magnitude<T>(
            registers: &[T],
            step: impl Fn(Bits, &T) -> Bits,
            max_of: impl Fn(Bits, Bits) -> Bits,
        ) -> Bits {
            let (iterations, last) = registers.as_chunks::<4>();
            // Four accumulators: a maximum waits for the one before.
            let mut max = [zero(); 4];
            for iteration in iterations {
                for (max, x) in max.iter_mut().zip(iteration) {
                    *max = step(*max, x);
                }
            }
            for (max, x) in max.iter_mut().zip(last) {
                *max = step(*max, x);
            }
            max_of(max_of(max[0], max[1]), max_of(max[2], max[3]))
        }

        #[target_feature(enable = $features)]
        pub(crate) fn quantize_f32(block: &[f32], scale: &Finite, out: &mut [u8]) {
            quantize(block, scale, out, |x| load_f32(x), scalar::quantize_f32);
        }

        #[target_feature(enable = $features)]
        pub(crate) fn quantize_f16(block: &[u16], scale: &Finite, out: &mut [u8]) {
            quantize(block, scale, out, |x| load_f16(x), scalar::quantize_f16);
        }

        #[target_feature(enable = $features)]
        pub(crate) fn quantize_bf16(block: &[u16], scale: &Finite, out: &mut [u8]) {
            quantize(block, scale, out, |x| load_bf16(x), scalar::quantize_bf16);
        }

        #[inline]
        #[target_feature(enable = $features)]
        fn quantize<T>(
            block: &[T],
            scale: &Finite,
            out: &mut [u8],
            load: impl Fn(&[T; STEP]) -> Singles,
            rest: impl Fn(&[T], &Finite, &mut [u8]),
        ) {
            let factor = splat(scale.factor);
            let limit = splat(scale.limit);
            let least = splat(scale.least);
            let (xs, xs_rest) = block.as_chunks::<ITERATION>();
            let (qs, qs_rest) = out.as_chunks_mut::<{ ITERATION * ELEMENT_BYTES }>();
            for (x, q) in xs.iter().zip(qs) {
                let steps = x.as_chunks::<STEP>().0.iter();
                for (x, q) in steps.zip(q.as_chunks_mut().0.as_chunks_mut::<STEP>().0) {
                    save_i32(clamp(mul(widen(load(x)), factor), least, limit), q);
                }
            }
            rest(xs_rest, scale, qs_rest);
        }

        #[target_feature(enable = $features)]
        pub(crate) fn dequantize_f32(sums: &[u8], inverse: f64, out: &mut [f32]) {
            dequantize(sums, inverse, out, |y, out| save_f32(y, out), scalar::dequantize_f32);
        }

        #[target_feature(enable = $features)]
        pub(crate) fn dequantize_f16(sums: &[u8], inverse: f64, out: &mut [u16]) {
            dequantize(sums, inverse, out, |y, out| save_f16(y, out), scalar::dequantize_f16);
        }

        #[target_feature(enable = $features)]
        pub(crate) fn dequantize_bf16(sums: &[u8], inverse: f64, out: &mut [u16]) {
            // A finite scale makes no NaN.
            dequantize(sums, inverse, out, |y, out| save_bf16(y, out), scalar::dequantize_bf16);
        }

        #[inline]
        #[target_feature(enable = $features)]
        fn dequantize<T>(
            sums: &[u8],
            inverse: f64,
            out: &mut [T],
            store: impl Fn(Singles, &mut [T; STEP]),
            rest: impl Fn(&[u8], f64, &mut [T]),
        ) {
            let factor = splat(inverse);
            let (sums, sums_rest) = sums.as_chunks::<{ ITERATION * ELEMENT_BYTES }>();
            let (ys, ys_rest) = out.as_chunks_mut::<ITERATION>();
            for (a, y) in sums.iter().zip(ys) {
                let steps = a.as_chunks().0.as_chunks::<STEP>().0.iter();
                for (a, y) in steps.zip(y.as_chunks_mut::<STEP>().0) {
                    store(narrow(mul(load_i32(a), factor)), y);
                }
            }
            rest(sums_rest, inverse, ys_rest);
        }

        #[target_feature(enable = $features)]
        pub(crate) fn widen_f16(block: &[u16], out: &mut [u8]) {
            let (xs, xs_rest) = block.as_chunks::<LANES>();
            let (ws, ws_rest) = out.as_chunks_mut().0.as_chunks_mut::<LANES>();
            for (x, w) in xs.iter().zip(ws) {
                widen_lanes_f16(x, w);
            }
            scalar::widen_f16(xs_rest, ws_rest.as_flattened_mut());
        }

        #[target_feature(enable = $features)]
        pub(crate) fn narrow_f16(values: &[u8], out: &mut [u16]) {
            let (vs, vs_rest) = values.as_chunks().0.as_chunks::<LANES>();
            let (ys, ys_rest) = out.as_chunks_mut::<LANES>();
            for (v, y) in vs.iter().zip(ys) {
                narrow_lanes_f16(v, y);
            }
            scalar::narrow_f16(vs_rest.as_flattened(), ys_rest);
        }

        #[target_feature(enable = $features)]
        pub(crate) fn sum_f32(payloads: &[&[u8]], divisor: Option<f64>, sum: &mut [i32]) {
            let Some((first, others)) = payloads.split_first() else { return };
            let divisor = divisor.map(|n| splat(n));
            // The sums stay in registers while the payloads go by; the specification's go through
            // memory.
            let (iterations, rest) = sum.as_chunks_mut::<ITERATION>();
            assert!(rest.is_empty(), "a payload is a multiple of 32 words");
            for (at, out) in iterations.iter_mut().enumerate() {
                let mut totals = [splat(0.0); ITERATION / STEP];
                for (total, x) in totals.iter_mut().zip(steps(first, at)) {
                    *total = widen(load_f32(x));
                }
                for payload in others {
                    for (total, x) in totals.iter_mut().zip(steps(payload, at)) {
                        *total = add(*total, widen(load_f32(x)));
                    }
                }
                for (total, out) in totals.into_iter().zip(out.as_chunks_mut::<STEP>().0) {
                    let mean = divisor.map_or(total, |n| div(total, n));
                    save_f32(narrow(canonical(mean)), out);
                }
            }
        }

        /// The elements of one iteration over a payload of four bytes an element.
        fn steps(payload: &[u8], iteration: usize) -> &[[[u8; 4]; STEP]] {
            let (steps, _) = payload.as_chunks().0.as_chunks();
            &steps[iteration * (ITERATION / STEP)..][..ITERATION / STEP]
        }

        #[target_feature(enable = $features)]
        pub(crate) fn sum_f16(payloads: &[&[u8]], divisor: Option<f64>, sum: &mut [i32]) {
            sum_16::<false>(payloads, divisor, sum);
        }

        #[target_feature(enable = $features)]
        pub(crate) fn sum_bf16(payloads: &[&[u8]], divisor: Option<f64>, sum: &mut [i32]) {
            sum_16::<true>(payloads, divisor, sum);
        }

        /// Sums of elements of two bytes, bfloat16 or IEEE's.
        #[inline]
        #[target_feature(enable = $features)]
        fn sum_16<const BRAIN: bool>(payloads: &[&[u8]], divisor: Option<f64>, sum: &mut [i32]) {
            let load = |x: &[[u8; 2]; STEP]| widen(if BRAIN { load_bf16(x) } else { load_f16(x) });
            // Whole steps: payloads are whole multiples of 64 elements.
            let begin = |totals: &mut [f64], part: &[[u8; 2]]| {
                let totals = totals.as_chunks_mut::<STEP>().0.iter_mut();
                for (total, x) in totals.zip(part.as_chunks::<STEP>().0) {
                    save_f64(load(x), total);
                }
            };
            let add_part = |totals: &mut [f64], part: &[[u8; 2]]| {
                let totals = totals.as_chunks_mut::<STEP>().0.iter_mut();
                for (total, x) in totals.zip(part.as_chunks::<STEP>().0) {
                    save_f64(add(load_f64(total), load(x)), total);
                }
            };
            let finish = |totals: &[f64], out: &mut [[u8; 2]]| {
                let mut odd = [0.0; BLOCK];
                for (odd, total) in odd.iter_mut().zip(totals) {
                    *odd = to_odd(*total);
                }
                let odd = odd.as_chunks::<STEP>().0.iter();
                for (odd, out) in odd.zip(out.as_chunks_mut::<STEP>().0) {
                    if BRAIN {
                        save_bf16(load_f32(odd), out);
                    } else {
                        save_f16(load_f32(odd), out);
                    }
                }
            };
            sum_blocks(payloads, divisor, sum, begin, add_part, finish);
        }

        $crate::vectors::compiled! {
            $features:
            add_le(acc: &mut [i32], payload: &[u8]);
            add_saturating_le(acc: &mut [i32], payload: &[u8]);
            widen_f32(block: &[f32], out: &mut [u8]);
            widen_bf16(block: &[u16], out: &mut [u8]);
            narrow_f32(values: &[u8], out: &mut [f32]);
            narrow_bf16(values: &[u8], out: &mut [u16]);
            encode_f32(block: &[f32], out: &mut [u8]);
            encode_f16(block: &[u16], out: &mut [u8]);
            decode_f32(sums: &[u8], divisor: f32, out: &mut [f32]);
            decode_f16(sums: &[u8], divisor: f32, out: &mut [u16]);
            decode_bf16(sums: &[u8], divisor: f32, out: &mut [u16]);
            store_bf16(acc: &mut [i32], payload: &[u8], scale: &Finite);
            add_bf16(acc: &mut [i32], payload: &[u8], scale: &Finite);
            write_bf16(acc: &[i32], inverse: f64, out: &mut [u8]);
            sum_f64(payloads: &[&[u8]], divisor: Option<f64>, sum: &mut [i32]);
            pack_f32(packing: Packing, values: &[f32], seed: u64, payload: &mut [u8]);
            pack_f16(packing: Packing, values: &[u16], seed: u64, payload: &mut [u8]);
            pack_bf16(packing: Packing, values: &[u16], seed: u64, payload: &mut [u8]);
            unpack_f32(packing: Packing, payload: &[u8], out: &mut [f32]);
            unpack_f16(packing: Packing, payload: &[u8], out: &mut [u16]);
            unpack_bf16(packing: Packing, payload: &[u8], out: &mut [u16]);
            feed_back_f32(packing: Packing, values: &mut [f32], residual: &mut [f32]);
            feed_back_f16(packing: Packing, values: &mut [u16], residual: &mut [f32]);
            feed_back_bf16(packing: Packing, values: &mut [u16], residual: &mut [f32]);
            sum_packed(packing: Packing, payloads: &[&[u8]], divisor: Option<f32>, seed: u64, sum: &mut [i32]);
            rotate_f32(values: &mut [f32], block: usize, seed: u64);
            rotate_back_f32(values: &mut [f32], block: usize, seed: u64);
        }
    };
}

pub(crate) use {compiled, kernels};
