//! A randomised Hadamard rotation: what a lost packet takes with it is a little of each element,
//! and not all of some.
//!
//! The places of a packet are neighbours, whose parts of an element may agree in sign. Then an
//! element gets of another at most that other times the part of the block that is lost.
//!
//! Signs by chance, then the Hadamard matrix of the block's length, divided by its root:
//! orthogonal, so that norms stay and the rotation back is the transpose. Sums and means of blocks
//! that were rotated alike are the rotated sums and means.
//!
//! The functions are the specification, as in [`scalar`](crate::scalar), and the compiler makes
//! code of it for each instruction set. It has single additions and products in a fixed order, so
//! that every one has the same bits.

/// The NaN that all of a block has in which one was: which bits an addition leaves in it is the
/// processor's choice.
const CANONICAL_NAN: f32 = f32::from_bits(0x7fc0_0000);
/// Elements whose signs are of one word.
const WORD: usize = 64;
/// Elements of the first stages, which the compiler keeps in registers.
const TILE: usize = 16;

/// See [`crate::rotate_f32`].
#[inline(always)]
pub(crate) fn rotate_f32(values: &mut [f32], block: usize, seed: u64) {
    flip_signs(values, seed);
    for_each_block(values, block, hadamard);
}

/// See [`crate::rotate_back_f32`].
#[inline(always)]
pub(crate) fn rotate_back_f32(values: &mut [f32], block: usize, seed: u64) {
    for_each_block(values, block, hadamard);
    flip_signs(values, seed);
}

/// # Panics
/// If a block of so many elements is none.
pub(crate) fn assert_block(block: usize) {
    assert!(block.is_power_of_two(), "a block of {block} elements, which is no power of two");
}

/// The rest is rotated in blocks of smaller powers of two: nothing of a tensor is padded.
#[inline(always)]
fn for_each_block(mut values: &mut [f32], block: usize, rotate: impl Fn(&mut [f32])) {
    while !values.is_empty() {
        let length = block.min(1 << values.len().ilog2());
        let (first, rest) = values.split_at_mut(length);
        rotate(first);
        values = rest;
    }
}

/// The transpose of itself.
#[inline(always)]
fn hadamard(block: &mut [f32]) {
    // First, so that no partial sum is too large where the result is not.
    let factor = one_over_root(block.len());
    for x in &mut *block {
        *x *= factor;
    }
    let mut half = 1;
    let (tiles, rest) = block.as_chunks_mut::<TILE>();
    if rest.is_empty() {
        for tile in tiles {
            stage(tile, 1);
            stage(tile, 2);
            stage(tile, 4);
            stage(tile, 8);
        }
        half = TILE;
    }
    while half < block.len() {
        stage(block, half);
        half *= 2;
    }
    // Each result has a part of each element, so a NaN is in all of them, and an infinity leaves
    // none of them finite.
    if block.iter().any(|x| !x.is_finite()) {
        block.fill(CANONICAL_NAN);
    }
}

/// Sums and differences of elements that lie `half` apart.
#[inline(always)]
fn stage(block: &mut [f32], half: usize) {
    for pair in block.chunks_exact_mut(2 * half) {
        let (first, second) = pair.split_at_mut(half);
        for (x, y) in first.iter_mut().zip(second) {
            (*x, *y) = (*x + *y, *x - *y);
        }
    }
}

/// The value for a power of two: exact if its root is one, else rounded once.
#[inline(always)]
fn one_over_root(length: usize) -> f32 {
    let exponent = length.ilog2();
    let whole = f32::from_bits((127 - exponent / 2) << 23);
    if exponent.is_multiple_of(2) { whole } else { whole * core::f32::consts::FRAC_1_SQRT_2 }
}

/// The sign of an element is a function of the seed and its place alone, so that who rotates back
/// may do so anywhere.
#[inline(always)]
fn flip_signs(values: &mut [f32], seed: u64) {
    for (place, word) in values.chunks_mut(WORD).enumerate() {
        let signs = random_word(seed, place as u64);
        for (at, x) in word.iter_mut().enumerate() {
            let sign = (signs >> at) as u32 & 1;
            *x = f32::from_bits(x.to_bits() ^ sign << 31);
        }
    }
}

/// The word of this number in the sequence of SplitMix64 (Steele, Lea and Flood 2014) from this
/// seed on.
#[inline(always)]
const fn random_word(seed: u64, number: u64) -> u64 {
    let mut x = seed.wrapping_add((number.wrapping_add(1)).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
