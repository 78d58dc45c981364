//! The rotation: orthogonal, undone by the way back, and the same bits on every instruction set.

use fanin_quant::{Isa, Kernels, rotate_back_f32, rotate_f32};
use proptest::collection::vec;
use proptest::prelude::*;

/// Several blocks of most sizes, and what is left over.
const ELEMENTS_MAX: usize = 3000;
const EPSILON: f64 = f32::EPSILON as f64;

fn values() -> impl Strategy<Value = Vec<f32>> {
    let ordinary = -1.0f32..1.0;
    let spread = (-1.0f32..1.0, -30..30i32).prop_map(|(x, e)| x * 2f32.powi(e));
    prop_oneof![vec(ordinary, 0..ELEMENTS_MAX), vec(spread, 0..ELEMENTS_MAX)]
}

fn any_bits() -> impl Strategy<Value = Vec<f32>> {
    let bits = prop_oneof![
        2 => any::<u32>(),
        2 => prop::sample::select(vec![0x7f80_0000, 0xff80_0000, 0x7f80_0001, 0xffff_ffff, 0x7f7f_ffff, 1, 0]),
        60 => (-1.0f32..1.0).prop_map(f32::to_bits),
    ];
    vec(bits.prop_map(f32::from_bits), 0..ELEMENTS_MAX)
}

fn block() -> impl Strategy<Value = usize> {
    (0..13u32).prop_map(|exponent| 1 << exponent)
}

/// The lengths of the blocks of so many values: whole ones, then ever smaller powers of two.
fn lengths(mut left: usize, block: usize) -> Vec<usize> {
    let mut found = Vec::new();
    while left > 0 {
        found.push(block.min(1 << left.ilog2()));
        left -= found[found.len() - 1];
    }
    found
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

proptest! {
    #[test]
    fn norms_of_blocks_stay_and_the_way_back_undoes_it(before in values(), block in block(), seed in any::<u64>()) {
        let mut turned = before.clone();
        rotate_f32(&mut turned, block, seed);
        let mut back = turned.clone();
        rotate_back_f32(&mut back, block, seed);
        let mut start = 0;
        for length in lengths(before.len(), block) {
            let of_block = start..start + length;
            let whole = norm(&before[of_block.clone()]);
            // A rounding in each of log2(length) stages, and one of the factor.
            let error = f64::from(length.ilog2() + 2) * EPSILON * whole + 1e-40;
            prop_assert!((norm(&turned[of_block.clone()]) - whole).abs() <= error);
            let differences: Vec<f32> =
                before[of_block.clone()].iter().zip(&back[of_block]).map(|(a, b)| a - b).collect();
            prop_assert!(norm(&differences) <= 2.0 * error);
            start += length;
        }
    }

    #[test]
    fn every_instruction_set_has_the_same_bits(before in any_bits(), block in block(), seed in any::<u64>()) {
        let run = |isa: Isa| {
            let kernels = Kernels::of(isa)?;
            let (mut turned, mut back) = (before.clone(), before.clone());
            kernels.rotate_f32(&mut turned, block, seed);
            kernels.rotate_back_f32(&mut back, block, seed);
            Some(turned.iter().chain(&back).map(|x| x.to_bits()).collect::<Vec<_>>())
        };
        let specified = run(Isa::Scalar);
        for isa in Isa::ALL {
            if let Some(found) = run(isa) {
                prop_assert_eq!(Some(found), specified.clone(), "{:?}", isa);
            }
        }
    }

    #[test]
    fn a_sum_of_rotated_values_is_the_rotated_sum(
        (one, other) in (0..ELEMENTS_MAX).prop_flat_map(|n| (vec(-100..100i16, n), vec(-100..100i16, n))),
        seed in any::<u64>(),
    ) {
        // Small whole numbers in blocks of an even power: every partial sum is exact, and so is
        // this.
        let turned = |of: &[i16]| {
            let mut values: Vec<f32> = of.iter().map(|&x| f32::from(x)).collect();
            rotate_f32(&mut values, 1024, seed);
            values
        };
        let sum: Vec<i16> = one.iter().zip(&other).map(|(a, b)| a + b).collect();
        let of_sum = turned(&sum);
        let even = of_sum.len() / 1024 * 1024;
        for ((a, b), c) in turned(&one).iter().zip(turned(&other)).zip(&of_sum).take(even) {
            prop_assert_eq!(a + b, *c);
        }
    }

    #[test]
    fn what_is_not_finite_spreads_to_its_block_and_no_further(
        at in 0..2048usize,
        bits in prop::sample::select(vec![0x7f80_0000u32, 0xff80_0000, 0x7fc0_0000, 0xff80_0001]),
        seed in any::<u64>(),
    ) {
        let mut values = vec![1.0; 2048];
        values[at] = f32::from_bits(bits);
        rotate_f32(&mut values, 512, seed);
        for (place, x) in values.iter().enumerate() {
            prop_assert_eq!(x.is_nan(), place / 512 == at / 512);
            prop_assert!(!x.is_nan() || x.to_bits() == 0x7fc0_0000);
        }
        rotate_back_f32(&mut values, 512, seed);
        for (place, x) in values.iter().enumerate() {
            prop_assert_eq!(x.is_nan(), place / 512 == at / 512);
        }
    }
}

#[test]
fn what_is_lost_of_one_place_is_a_little_of_each() {
    const BLOCK: usize = 4096;
    const PACKET: usize = 350;
    let mut values = vec![0.0; BLOCK];
    values[77] = 1.0;
    rotate_f32(&mut values, BLOCK, 5);
    assert!(values.iter().all(|x| x.abs() == 1.0 / 64.0));
    values[PACKET..2 * PACKET].fill(0.0);
    rotate_back_f32(&mut values, BLOCK, 5);
    let kept = 1.0 - PACKET as f32 / BLOCK as f32;
    assert!((values[77] - kept).abs() < 1e-6);
    let largest =
        values.iter().enumerate().filter(|&(at, _)| at != 77).map(|(_, x)| x.abs()).fold(0.0, f32::max);
    // Each lost place had 1/4096 of it for each element, with a sign; those of neighbours may
    // agree, as here, and never give more.
    assert!(largest <= PACKET as f32 / BLOCK as f32, "{largest}");
    let error: Vec<f32> =
        values.iter().enumerate().map(|(at, x)| if at == 77 { 1.0 - x } else { *x }).collect();
    assert!((norm(&error) - (PACKET as f64 / BLOCK as f64).sqrt()).abs() < 1e-6);
}

#[test]
fn another_seed_has_other_signs_and_the_same_one_the_same() {
    let turned = |seed: u64| {
        let mut values = vec![1.0; 4096];
        rotate_f32(&mut values, 1, seed);
        values
    };
    assert_eq!(turned(1), turned(1));
    let minus = |values: &[f32]| values.iter().filter(|&&x| x < 0.0).count();
    for seed in 0..20 {
        // Five deviations of so many coins: 32 each.
        assert!(minus(&turned(seed)).abs_diff(2048) < 160);
        let products: Vec<f32> = turned(seed).iter().zip(turned(seed + 1)).map(|(a, b)| a * b).collect();
        assert!(minus(&products).abs_diff(2048) < 160);
    }
}

#[test]
fn the_rotation_is_the_papers_of_hadamard() {
    // The signs of seed 9, found with blocks of one, times the matrix of Sylvester over its root.
    let mut signs = vec![1.0f32; 8];
    rotate_f32(&mut signs, 1, 9);
    for column in 0..8 {
        let mut unit = vec![0.0f32; 8];
        unit[column] = 1.0;
        rotate_f32(&mut unit, 8, 9);
        for (row, x) in unit.iter().enumerate() {
            let sign = if (row & column).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
            assert_eq!(*x, signs[column] * sign * (0.5 * core::f32::consts::FRAC_1_SQRT_2));
        }
    }
}

#[test]
#[should_panic(expected = "a block of 48 elements, which is no power of two")]
fn a_block_is_a_power_of_two() {
    rotate_f32(&mut [0.0; 48], 48, 1);
}
