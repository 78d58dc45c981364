//! Sums of one machine's ranks, in the order of the ranks, and what becomes of them at the end.
//!
//! Floats are added in their own type, half precision in `f32` with one rounding at the end. Let
//! `u` be half a unit in the last place of the type that is added in. Then n ranks' sum is at most
//! `(n - 1) u` times the sum of magnitudes away from the exact one. A mean is divided in that type,
//! and is at most `u` times itself further away. Integers wrap, and their means are truncated
//! towards zero.

use fanin_quant::{narrow_bf16, narrow_f16, narrow_f32, widen_bf16, widen_f16};
use fanin_wire::Dtype;

/// Elements whose sums stay in the nearest cache while the ranks' go by.
const RUN: usize = 1024;

/// Rounds little-endian `f32` to half precision, as bits.
type Narrow = fn(&[u8], &mut [u16]);

/// Adds up `parts`, the elements of one rank each, in their order, and divides by `divisor`. It
/// writes the sum as elements of `sum_dtype`, which is `dtype` or, for half precision, float32.
///
/// # Panics
/// When there is no part, or their lengths differ.
pub(crate) fn sum(dtype: Dtype, parts: &[&[u8]], divisor: Option<u32>, sum_dtype: Dtype, out: &mut [u8]) {
    let elements = out.len() / sum_dtype.element_bytes();
    assert!(parts.iter().all(|part| part.len() == elements * dtype.element_bytes()));
    match dtype {
        Dtype::Float32 => {
            sum_of(parts, out, f32::from_le_bytes, |a, b| a + b, mean_f32(divisor), f32::to_le_bytes)
        }
        Dtype::Float64 => {
            sum_of(parts, out, f64::from_le_bytes, |a, b| a + b, mean_f64(divisor), f64::to_le_bytes)
        }
        Dtype::Float16 => {
            sum_of_half(parts, divisor, out, widen_f16, (sum_dtype == dtype).then_some(narrow_f16))
        }
        Dtype::Bfloat16 => {
            sum_of_half(parts, divisor, out, widen_bf16, (sum_dtype == dtype).then_some(narrow_bf16))
        }
        Dtype::Int32 => {
            sum_of(parts, out, i32::from_le_bytes, i32::wrapping_add, mean_i32(divisor), i32::to_le_bytes);
        }
        Dtype::Int64 => {
            sum_of(parts, out, i64::from_le_bytes, i64::wrapping_add, mean_i64(divisor), i64::to_le_bytes);
        }
        Dtype::Uint8 => {
            sum_of(parts, out, u8::from_le_bytes, u8::wrapping_add, mean_u8(divisor), u8::to_le_bytes)
        }
        Dtype::Int8 => {
            sum_of(parts, out, i8::from_le_bytes, i8::wrapping_add, mean_i8(divisor), i8::to_le_bytes)
        }
    }
}

/// Turns the sums of all machines, elements of `sum_dtype`, into what a tensor of `dtype` gets.
///
/// # Panics
/// When the lengths differ.
pub(crate) fn finish(sum_dtype: Dtype, sums: &[u8], divisor: Option<u32>, dtype: Dtype, out: &mut [u8]) {
    assert_eq!(sums.len() / sum_dtype.element_bytes(), out.len() / dtype.element_bytes());
    if divisor.is_none() && dtype == sum_dtype {
        return out.copy_from_slice(sums);
    }
    match dtype {
        Dtype::Float16 => finish_half(sums, divisor, out, narrow_f16),
        Dtype::Bfloat16 => finish_half(sums, divisor, out, narrow_bf16),
        _ => sum(dtype, &[sums], divisor, dtype, out),
    }
}

fn mean_f32(divisor: Option<u32>) -> impl Fn(f32) -> f32 {
    move |x| divisor.map_or(x, |n| x / n as f32)
}

fn mean_f64(divisor: Option<u32>) -> impl Fn(f64) -> f64 {
    move |x| divisor.map_or(x, |n| x / f64::from(n))
}

fn mean_i32(divisor: Option<u32>) -> impl Fn(i32) -> i32 {
    move |x| divisor.map_or(x, |n| (i64::from(x) / i64::from(n)) as i32)
}

fn mean_i64(divisor: Option<u32>) -> impl Fn(i64) -> i64 {
    move |x| divisor.map_or(x, |n| x / i64::from(n))
}

fn mean_u8(divisor: Option<u32>) -> impl Fn(u8) -> u8 {
    move |x| divisor.map_or(x, |n| (u32::from(x) / n) as u8)
}

fn mean_i8(divisor: Option<u32>) -> impl Fn(i8) -> i8 {
    move |x| divisor.map_or(x, |n| (i64::from(x) / i64::from(n)) as i8)
}

/// Whole loops over a run, so that the compiler makes vector instructions of them.
fn sum_of<const N: usize, T: Copy + Default>(
    parts: &[&[u8]],
    out: &mut [u8],
    read: impl Fn([u8; N]) -> T,
    add: impl Fn(T, T) -> T,
    mean: impl Fn(T) -> T,
    write: impl Fn(T) -> [u8; N],
) {
    let mut run = [T::default(); RUN];
    for (index, out) in out.as_chunks_mut::<N>().0.chunks_mut(RUN).enumerate() {
        let run = &mut run[..out.len()];
        // From the first one on, not from zero: a sum of negative zeros is one.
        for (total, x) in run.iter_mut().zip(elements(parts[0], index)) {
            *total = read(*x);
        }
        for part in &parts[1..] {
            for (total, x) in run.iter_mut().zip(elements(part, index)) {
                *total = add(*total, read(*x));
            }
        }
        for (total, out) in run.iter().zip(out) {
            *out = write(mean(*total));
        }
    }
}

/// The elements of a run, and what follows.
fn elements<const N: usize>(part: &[u8], run: usize) -> &[[u8; N]] {
    &part.as_chunks().0[run * RUN..]
}

/// With `narrow`, back in the ranks' own type.
fn sum_of_half(
    parts: &[&[u8]],
    divisor: Option<u32>,
    out: &mut [u8],
    widen: impl Fn(&[u16], &mut [u8]),
    narrow: Option<Narrow>,
) {
    let mean = mean_f32(divisor);
    let (mut run, mut bits, mut wide) = ([0.0f32; RUN], [0u16; RUN], [0u8; 4 * RUN]);
    let out_bytes = if narrow.is_some() { 2 } else { 4 };
    for (index, out) in out.chunks_mut(RUN * out_bytes).enumerate() {
        let count = out.len() / out_bytes;
        let (run, bits, wide) = (&mut run[..count], &mut bits[..count], &mut wide[..4 * count]);
        for (number, part) in parts.iter().enumerate() {
            read_bits(&part[2 * index * RUN..][..2 * count], bits);
            widen(bits, wide);
            for (total, x) in run.iter_mut().zip(wide.as_chunks().0) {
                let x = f32::from_le_bytes(*x);
                *total = if number == 0 { x } else { *total + x };
            }
        }
        for (total, x) in run.iter().zip(wide.as_chunks_mut().0) {
            *x = mean(*total).to_le_bytes();
        }
        match narrow {
            Some(narrow) => {
                narrow(wide, bits);
                write_bits(bits, out);
            }
            None => out.copy_from_slice(wide),
        }
    }
}

fn finish_half(sums: &[u8], divisor: Option<u32>, out: &mut [u8], narrow: Narrow) {
    let mean = mean_f32(divisor);
    let (mut run, mut wide, mut bits) = ([0.0f32; RUN], [0u8; 4 * RUN], [0u16; RUN]);
    for (sums, out) in sums.chunks(4 * RUN).zip(out.chunks_mut(2 * RUN)) {
        let count = out.len() / 2;
        let (run, wide, bits) = (&mut run[..count], &mut wide[..4 * count], &mut bits[..count]);
        narrow_f32(sums, run);
        for (x, wide) in run.iter().zip(wide.as_chunks_mut().0) {
            *wide = mean(*x).to_le_bytes();
        }
        narrow(wide, bits);
        write_bits(bits, out);
    }
}

fn read_bits(bytes: &[u8], bits: &mut [u16]) {
    for (bits, bytes) in bits.iter_mut().zip(bytes.as_chunks().0) {
        *bits = u16::from_le_bytes(*bytes);
    }
}

fn write_bits(bits: &[u16], bytes: &mut [u8]) {
    for (bits, bytes) in bits.iter().zip(bytes.as_chunks_mut().0) {
        *bytes = bits.to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes<const N: usize, T: Copy>(values: &[T], write: impl Fn(T) -> [u8; N]) -> Vec<u8> {
        values.iter().flat_map(|x| write(*x)).collect()
    }

    fn sums_of(dtype: Dtype, parts: &[Vec<u8>], divisor: Option<u32>, sum_dtype: Dtype) -> Vec<u8> {
        let parts: Vec<_> = parts.iter().map(Vec::as_slice).collect();
        let elements = parts[0].len() / dtype.element_bytes();
        let mut out = vec![0; elements * sum_dtype.element_bytes()];
        sum(dtype, &parts, divisor, sum_dtype, &mut out);
        out
    }

    #[test]
    fn floats_are_added_in_the_order_of_the_ranks() {
        // In any other order 1 is lost or kept elsewhere.
        let parts = [[1e8f32, 1.0], [1.0, 1e8], [-1e8, -1e8]].map(|part| bytes(&part, f32::to_le_bytes));
        let expected = [(1e8f32 + 1.0) - 1e8, (1.0f32 + 1e8) - 1e8];
        assert_eq!(sums_of(Dtype::Float32, &parts, None, Dtype::Float32), bytes(&expected, f32::to_le_bytes));
    }

    #[test]
    fn half_precision_is_rounded_once() {
        // 2048 + 1 is no float16, and is the even neighbour, 2048; 2048 + 1 + 1 is one.
        let parts = [0x6800u16, 0x3c00, 0x3c00].map(|bits| bits.to_le_bytes().to_vec());
        assert_eq!(sums_of(Dtype::Float16, &parts, None, Dtype::Float16), 0x6801u16.to_le_bytes());
        assert_eq!(sums_of(Dtype::Float16, &parts, None, Dtype::Float32), 2050.0f32.to_le_bytes());
        // 256 + 1 in bfloat16 likewise.
        let parts = [0x4380u16, 0x3f80, 0x3f80].map(|bits| bits.to_le_bytes().to_vec());
        assert_eq!(sums_of(Dtype::Bfloat16, &parts, None, Dtype::Bfloat16), 0x4381u16.to_le_bytes());
        assert_eq!(sums_of(Dtype::Bfloat16, &parts, Some(2), Dtype::Float32), 129.0f32.to_le_bytes());
    }

    #[test]
    fn a_mean_of_large_halves_does_not_overflow() {
        let largest = 0x7bffu16.to_le_bytes().to_vec();
        let parts = [largest.clone(), largest.clone()];
        assert_eq!(sums_of(Dtype::Float16, &parts, Some(2), Dtype::Float16), largest);
        let wide = sums_of(Dtype::Float16, &parts, None, Dtype::Float32);
        let mut out = [0; 2];
        finish(Dtype::Float32, &wide, Some(2), Dtype::Float16, &mut out);
        assert_eq!(out.to_vec(), largest);
    }

    #[test]
    fn integers_wrap_and_their_means_are_truncated_towards_zero() {
        let of = |parts: [i8; 3], divisor| {
            sums_of(Dtype::Int8, &parts.map(|x| vec![x.cast_unsigned()]), divisor, Dtype::Int8)[0]
                .cast_signed()
        };
        assert_eq!(
            (of([100, 100, 0], None), of([-5, -1, -1], Some(3)), of([5, 1, 1], Some(3))),
            (-56, -2, 2)
        );
        // A machine's part of a mean over more ranks than an int8 counts.
        assert_eq!(of([100, 20, 5], Some(1000)), 0);
        let mut out = [0; 8];
        finish(Dtype::Int64, &(-7i64).to_le_bytes(), Some(2), Dtype::Int64, &mut out);
        assert_eq!(i64::from_le_bytes(out), -3);
        let parts = [200u8, 50].map(|x| vec![x]);
        assert_eq!(sums_of(Dtype::Uint8, &parts, Some(2), Dtype::Uint8), [125]);
        let parts = [i32::MAX, 1].map(|x| x.to_le_bytes().to_vec());
        assert_eq!(sums_of(Dtype::Int32, &parts, None, Dtype::Int32), i32::MIN.to_le_bytes());
    }

    #[test]
    fn every_length_is_summed_to_its_end() {
        for count in [0, 1, RUN - 1, RUN, RUN + 1, 3 * RUN + 7] {
            let part: Vec<f32> = (0..count).map(|i| i as f32).collect();
            let parts = vec![bytes(&part, f32::to_le_bytes); 3];
            let expected: Vec<f32> = part.iter().map(|x| 3.0 * x).collect();
            assert_eq!(
                sums_of(Dtype::Float32, &parts, None, Dtype::Float32),
                bytes(&expected, f32::to_le_bytes)
            );
            let one = vec![0x3f80u16; count];
            let parts = vec![bytes(&one, u16::to_le_bytes); 3];
            assert_eq!(sums_of(Dtype::Bfloat16, &parts, Some(3), Dtype::Bfloat16), parts[0]);
            let mut out = vec![0; 2 * count];
            let sums = bytes(&vec![4.0f32; count], f32::to_le_bytes);
            finish(Dtype::Float32, &sums, Some(4), Dtype::Bfloat16, &mut out);
            assert_eq!(out, parts[0]);
        }
    }
}
