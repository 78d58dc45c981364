//! Kernels on `i32`: native integer tensors, and the switch's slots. All but the addition are
//! copies, which the compiler already turns into the fastest one there is.

use crate::scale::{Divisor, assert_workers};

/// Bytes of an element on the wire.
pub(crate) const ELEMENT_BYTES: usize = size_of::<i32>();

/// A length mismatch is our own bug, never the peer's: packets were measured when they were parsed.
#[inline]
pub(crate) fn assert_lengths(elements: usize, payload_bytes: usize) {
    assert!(
        payload_bytes.is_multiple_of(ELEMENT_BYTES) && payload_bytes / ELEMENT_BYTES == elements,
        "{payload_bytes} bytes of payload for {elements} elements"
    );
}

/// [`assert_lengths`] for a payload of bfloat16.
#[inline]
pub(crate) fn assert_bf16_lengths(elements: usize, payload_bytes: usize) {
    assert!(
        payload_bytes.is_multiple_of(2) && payload_bytes / 2 == elements,
        "{payload_bytes} bytes of payload for {elements} elements of bfloat16"
    );
}

/// Writes native integers as a payload.
///
/// # Panics
/// If `out` is not four bytes an element.
pub fn copy_i32(block: &[i32], out: &mut [u8]) {
    write_le(block, out);
}

/// Writes bfloat16 as a payload.
pub(crate) fn copy_bf16(block: &[u16], out: &mut [u8]) {
    assert_bf16_lengths(block.len(), out.len());
    for (x, e) in block.iter().zip(out.as_chunks_mut().0) {
        *e = x.to_le_bytes();
    }
}

/// Reads the sums of native integers; a mean is truncated toward zero.
///
/// # Panics
/// If `sums` is not four bytes an element, or `workers` is not in
/// `1..=`[`WORKERS_MAX`](crate::WORKERS_MAX).
pub fn read_i32(sums: &[u8], divisor: Divisor, workers: u32, out: &mut [i32]) {
    assert_workers(workers);
    store_le(out, sums);
    match divisor {
        Divisor::One => {}
        Divisor::Workers => {
            let n = workers as i32;
            for x in out {
                *x /= n;
            }
        }
    }
}

/// Replaces a slot's accumulator by a payload: the first contribution.
///
/// # Panics
/// If `payload` is not four bytes an element.
pub fn store_le(acc: &mut [i32], payload: &[u8]) {
    assert_lengths(acc.len(), payload.len());
    for (a, p) in acc.iter_mut().zip(payload.as_chunks().0) {
        *a = i32::from_le_bytes(*p);
    }
}

/// Writes a slot's accumulator as a payload: the result.
///
/// # Panics
/// If `out` is not four bytes an element.
pub fn write_le(acc: &[i32], out: &mut [u8]) {
    assert_lengths(acc.len(), out.len());
    for (a, p) in acc.iter().zip(out.as_chunks_mut().0) {
        *p = a.to_le_bytes();
    }
}
