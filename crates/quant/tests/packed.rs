//! A byte an element, or half of one: how far off, in expectation right, not changed by rounding
//! again, and never a wrong number.

use fanin_quant::*;
use half::{bf16, f16};
use proptest::collection::vec;
use proptest::prelude::*;

/// The levels, in steps.
fn levels(packing: Packing) -> Vec<f64> {
    match packing {
        Packing::Int8 => (0..=127).map(f64::from).collect(),
        Packing::Int4 => vec![0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
    }
}

/// The largest magnitude that has a step.
fn largest(packing: Packing) -> f32 {
    match packing {
        Packing::Int8 => 127.0 * 121.0f32.exp2(),
        Packing::Int4 => 12.0 * 124.0f32.exp2(),
    }
}

/// The largest level.
fn most(packing: Packing) -> f64 {
    levels(packing).into_iter().fold(0.0, f64::max)
}

/// The two levels about a magnitude in steps; one that is a level is both.
fn about(packing: Packing, steps: f64) -> (f64, f64) {
    let levels = levels(packing);
    let above = levels.iter().copied().find(|level| *level >= steps).unwrap_or(f64::INFINITY);
    let below = levels.iter().copied().rfind(|level| *level <= steps).unwrap_or(0.0);
    (below, above)
}

fn packings() -> impl Strategy<Value = Packing> {
    prop::sample::select(Packing::ALL.to_vec())
}

/// Four blocks of steps and integers.
fn group_bytes(packing: Packing) -> usize {
    4 * packing.block_bytes()
}

fn payload_of(packing: Packing, elements: usize) -> Vec<u8> {
    vec![0xaa; elements.div_ceil(4 * PACKED_BLOCK).max(1) * group_bytes(packing)]
}

fn packed(packing: Packing, values: &[f32], seed: u64) -> Vec<u8> {
    let mut payload = payload_of(packing, values.len());
    pack_f32(packing, values, seed, &mut payload);
    payload
}

fn unpacked(packing: Packing, payload: &[u8], elements: usize) -> Vec<f32> {
    let mut values = vec![7.0; elements];
    unpack_f32(packing, payload, &mut values);
    values
}

fn rounded(packing: Packing, values: &[f32], seed: u64) -> Vec<f32> {
    unpacked(packing, &packed(packing, values, seed), values.len())
}

fn summed(packing: Packing, payloads: &[Vec<u8>], divisor: u32, seed: u64) -> Vec<u8> {
    let payloads: Vec<_> = payloads.iter().map(Vec::as_slice).collect();
    let mut sum = vec![7; payloads[0].len() / 4];
    sum_packed(packing, &payloads, divisor, seed, &mut sum);
    let mut payload = vec![0; 4 * sum.len()];
    write_le(&sum, &mut payload);
    payload
}

/// The least power of two, down to 2^-126, by which the magnitude is at most the largest level.
fn step(packing: Packing, block: &[f32]) -> f64 {
    let magnitude = block.iter().fold(0.0f64, |max, x| max.max(f64::from(x.abs())));
    let mut step = 2.0f64.powi(-126);
    while magnitude > most(packing) * step {
        step *= 2.0;
    }
    step
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// The magnitudes differ by much, as gradients' do, or by all that there is; zeros are among them.
fn finite(magnitudes: std::ops::Range<f64>) -> impl Strategy<Value = f32> {
    prop_oneof![
        12 => (magnitudes, any::<bool>()).prop_map(|(exponent, negative)| {
            let x = (exponent.exp2() as f32).min(largest(Packing::Int4));
            if negative { -x } else { x }
        }),
        1 => prop::sample::select(vec![0.0f32, -0.0]),
    ]
}

fn values() -> impl Strategy<Value = Vec<f32>> {
    prop_oneof![vec(finite(-20.0..3.0), 1..300), vec(finite(-149.0..128.0), 1..300)]
}

proptest! {
    #[test]
    fn an_element_becomes_a_level_beside_it_and_itself_where_that_is_one(packing in packings(), x in values(), seed in any::<u64>()) {
        let y = rounded(packing, &x, seed);
        for (x, y) in x.chunks(PACKED_BLOCK).zip(y.chunks(PACKED_BLOCK)) {
            let step = step(packing, x);
            for (x, y) in x.iter().zip(y) {
                let (x, y) = (f64::from(*x), f64::from(*y));
                let (below, above) = about(packing, x.abs() / step);
                prop_assert!(y * x >= 0.0);
                let y = y.abs() / step;
                prop_assert!(y == below || y == above, "{} became {} steps of {}", x, y, step);
            }
        }
    }

    #[test]
    fn the_largest_magnitude_is_more_than_half_of_the_largest_level(packing in packings(), x in vec(finite(-100.0..127.0), 1..=PACKED_BLOCK)) {
        let magnitude = x.iter().fold(0.0f64, |max, x| max.max(f64::from(x.abs())));
        prop_assume!(magnitude > 0.0);
        let byte = packed(packing, &x, 1)[0];
        let step = 2.0f64.powi(i32::from(byte) - 127);
        prop_assert!(step * most(packing) / 2.0 <= magnitude && magnitude <= step * most(packing), "{} of {}", step, magnitude);
    }

    #[test]
    fn what_was_rounded_stays_whatever_the_seed(packing in packings(), x in values(), seeds in any::<[u64; 2]>()) {
        let once = rounded(packing, &x, seeds[0]);
        prop_assert_eq!(bits(&rounded(packing, &once, seeds[1])), bits(&once));
    }

    #[test]
    fn the_seed_and_the_place_alone_decide(packing in packings(), x in vec(finite(-20.0..3.0), PACKED_BLOCK..200), seed in any::<u64>()) {
        let payload = packed(packing, &x, seed);
        prop_assert_eq!(&packed(packing, &x, seed), &payload);
        // The content of other blocks changes nothing, and a longer payload has zeros behind.
        let mut other = x.clone();
        other[PACKED_BLOCK..].fill(0.25);
        prop_assert_eq!(&unpacked(packing, &packed(packing, &other, seed), PACKED_BLOCK), &unpacked(packing, &payload, PACKED_BLOCK));
        let mut longer = vec![0xaa; payload.len() + group_bytes(packing)];
        pack_f32(packing, &x, seed, &mut longer);
        let all = unpacked(packing, &longer, longer.len() / packing.block_bytes() * PACKED_BLOCK);
        prop_assert_eq!(&all[..x.len()], &unpacked(packing, &payload, x.len())[..]);
        prop_assert!(all[x.len()..].iter().all(|x| *x == 0.0));
    }

    #[test]
    fn a_sum_is_off_by_one_rounding_of_its_own(
        packing in packings(),
        rows in (1..=64usize).prop_flat_map(|workers| vec(vec(finite(-20.0..3.0), 2 * PACKED_BLOCK), workers)),
        mean in any::<bool>(), seed in any::<u64>()
    ) {
        let payloads: Vec<_> = rows.iter().enumerate().map(|(i, row)| packed(packing, row, i as u64)).collect();
        let divisor = if mean { rows.len() as u32 } else { 1 };
        let sum = unpacked(packing, &summed(packing, &payloads, divisor, seed), 2 * PACKED_BLOCK);
        let parts: Vec<_> = payloads.iter().map(|payload| unpacked(packing, payload, 2 * PACKED_BLOCK)).collect();
        // In float32, in this order, and rounded as any other block.
        let exact: Vec<f32> = (0..2 * PACKED_BLOCK)
            .map(|i| parts.iter().fold(0.0f32, |sum, part| sum + part[i]) / divisor as f32)
            .collect();
        prop_assert_eq!(bits(&sum), bits(&rounded(packing, &exact, seed)));
    }

    #[test]
    fn what_rounding_takes_is_left_as_the_residual_and_the_rest_travels_unchanged(
        packing in packings(),
        steps in (1..100usize).prop_flat_map(|elements| vec(vec(finite(-20.0..3.0), elements), 1..5)), seed in any::<u64>()
    ) {
        let mut residual = vec![0.0; steps[0].len()];
        for gradient in &steps {
            let total: Vec<f32> = gradient.iter().zip(&residual).map(|(x, rest)| x + rest).collect();
            let mut values = gradient.clone();
            feed_back_f32(packing, &mut values, &mut residual);
            prop_assert_eq!(bits(&rounded(packing, &values, seed)), bits(&values));
            for ((total, values), residual) in
                total.chunks(PACKED_BLOCK).zip(values.chunks(PACKED_BLOCK)).zip(residual.chunks(PACKED_BLOCK))
            {
                let step = step(packing, total);
                for ((total, value), rest) in total.iter().zip(values).zip(residual) {
                    let steps = f64::from(total.abs()) / step;
                    let (below, above) = about(packing, steps);
                    prop_assert_eq!(f64::from(rest.abs()) / step, (steps - below).min(above - steps), "the nearest");
                    prop_assert_eq!(f64::from(*value) + f64::from(*rest), f64::from(*total), "nothing is lost");
                }
            }
        }
    }

    #[test]
    fn the_residual_of_a_half_counts_its_own_rounding(packing in packings(), halves in vec(any::<u16>(), 1..100), seed in any::<u64>()) {
        type FeedBack = fn(Packing, &mut [u16], &mut [f32]);
        type Kind = (FeedBack, fn(u16) -> f32);
        let kinds: [Kind; 2] =
            [(feed_back_f16, |x| f16::from_bits(x).to_f32()), (feed_back_bf16, |x| bf16::from_bits(x).to_f32())];
        for (feed_back, widen) in kinds {
            let (mut values, mut residual) = (halves.clone(), vec![0.125; halves.len()]);
            feed_back(packing, &mut values, &mut residual);
            let wide = |halves: &[u16]| halves.iter().map(|x| widen(*x)).collect::<Vec<_>>();
            for ((x, y), rest) in wide(&halves).iter().zip(wide(&values)).zip(&residual) {
                prop_assert!(rest.is_finite());
                prop_assert!(!y.is_finite() || *rest == 0.0 || y + rest == x + 0.125, "{} is {} and {}", x, y, rest);
            }
            if wide(&values).iter().all(|y| y.abs() <= largest(packing)) {
                let unchanged = rounded(packing, &wide(&values), seed);
                prop_assert!(unchanged.iter().zip(wide(&values)).all(|(a, b)| *a == b));
            }
        }
    }

    #[test]
    fn a_half_is_rounded_as_the_float32_that_it_is(packing in packings(), bits in vec(any::<u16>(), 1..200), seed in any::<u64>()) {
        type Pack = fn(Packing, &[u16], u64, &mut [u8]);
        type Unpack = fn(Packing, &[u8], &mut [u16]);
        let widen_f16 = |x: &u16| f16::from_bits(*x).to_f32();
        let widen_bf16 = |x: &u16| bf16::from_bits(*x).to_f32();
        let narrow_f16 = |x: f32| f16::from_f32(x).to_bits();
        let narrow_bf16 = |x: f32| bf16::from_f32(x).to_bits();
        type Kind = (Pack, Unpack, fn(&u16) -> f32, fn(f32) -> u16);
        let kinds: [Kind; 2] =
            [(pack_f16, unpack_f16, widen_f16, narrow_f16), (pack_bf16, unpack_bf16, widen_bf16, narrow_bf16)];
        for (pack, unpack, widen, narrow) in kinds {
            let wide: Vec<f32> = bits.iter().map(widen).collect();
            let mut payload = payload_of(packing, bits.len());
            pack(packing, &bits, seed, &mut payload);
            prop_assert_eq!(&payload, &packed(packing, &wide, seed));
            let mut narrowed = vec![1; bits.len()];
            unpack(packing, &payload, &mut narrowed);
            let expected: Vec<u16> = unpacked(packing, &payload, bits.len()).into_iter().map(narrow).collect();
            prop_assert_eq!(narrowed, expected);
        }
    }

    #[test]
    fn nothing_that_a_network_brings_is_a_panic(packing in packings(), bytes in vec(any::<u8>(), 2 * 4 * (1 + PACKED_BLOCK)), divisor in 1..=WORKERS_MAX) {
        let payloads: Vec<_> = bytes.chunks_exact(group_bytes(packing)).map(<[u8]>::to_vec).collect();
        let sum = summed(packing, &payloads, divisor, 1);
        unpacked(packing, &sum, 4 * PACKED_BLOCK);
        unpacked(packing, &payloads[0], 4 * PACKED_BLOCK);
    }
}

#[test]
fn the_expectation_is_the_value() {
    for packing in Packing::ALL {
        const SEEDS: u64 = 4096;
        // A step of 1, and fractions of it on both sides of zero; with four bits also coarse levels.
        let mut x = [0.0; PACKED_BLOCK];
        for (i, x) in x.iter_mut().enumerate() {
            *x = (i as f32 - 15.5) / 16.0 * if packing == Packing::Int8 { 1.37 } else { 10.96 };
        }
        x[0] = most(packing) as f32;
        let mut sums = [0.0f64; PACKED_BLOCK];
        let mut products = 0.0;
        for seed in 0..SEEDS {
            let y = rounded(packing, &x, seed);
            sums.iter_mut().zip(&y).for_each(|(sum, y)| *sum += f64::from(*y));
            products += f64::from((y[1] - x[1]) * (y[2] - x[2]));
        }
        // A fraction's deviation is at most half the distance of two levels; five of them.
        let distance = if packing == Packing::Int8 { 1.0 } else { 4.0 };
        let bound = 5.0 * 0.5 * distance / (SEEDS as f64).sqrt();
        for (x, sum) in x.iter().zip(sums) {
            let mean = sum / SEEDS as f64;
            assert!((mean - f64::from(*x)).abs() < bound, "{x}: {mean}");
        }
        assert!(
            (products / SEEDS as f64).abs() < distance * bound / 2.0,
            "neighbours are not rounded together: {products}"
        );
    }
}

#[test]
fn places_are_rounded_each_by_its_own_chance() {
    for packing in Packing::ALL {
        let mut x = vec![0.5; 32 * 1024];
        x.iter_mut().step_by(PACKED_BLOCK).for_each(|x| *x = most(packing) as f32);
        let ups = rounded(packing, &x, 3).iter().filter(|y| **y == 1.0).count() as f64;
        let half = (x.len() - x.len() / PACKED_BLOCK) as f64 / 2.0;
        assert!((ups - half).abs() < 5.0 * 0.5 * (2.0 * half).sqrt(), "{ups} of {half} expected");
    }
}

#[test]
fn a_block_that_is_not_finite_is_so_for_all_and_the_next_is_not() {
    for packing in Packing::ALL {
        let mut x = vec![1.0; 4 * PACKED_BLOCK];
        (x[3], x[4], x[5], x[6]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX);
        let ones = vec![1.0; 4 * PACKED_BLOCK];
        let mut less = ones.clone();
        less[4] = f32::NEG_INFINITY;
        for parts in [vec![&x], vec![&x, &ones], vec![&ones, &x, &ones]] {
            let payloads: Vec<_> = parts.iter().map(|part| packed(packing, part, 1)).collect();
            let y = unpacked(packing, &summed(packing, &payloads, 1, 1), x.len());
            assert!(y[3].is_nan() && y[4] == f32::INFINITY && y[5] == f32::NEG_INFINITY, "{y:?}");
            assert_eq!(y[6], f32::INFINITY, "above what has a step");
            assert!(y[..PACKED_BLOCK].iter().all(|y| !y.is_finite()), "none of it is a wrong number: {y:?}");
            assert!(y[PACKED_BLOCK..].iter().all(|y| *y == parts.len() as f32));
        }
        let y = unpacked(
            packing,
            &summed(packing, &[packed(packing, &x, 1), packed(packing, &less, 1)], 1, 1),
            x.len(),
        );
        assert!(y[4].is_nan(), "infinities of both signs");
        assert!(y[0].is_nan() && y[5] == f32::NEG_INFINITY);
        // An infinity in one block is one in the sum whatever other block was not finite.
        let mut other = ones;
        other[7] = f32::INFINITY;
        let y = unpacked(
            packing,
            &summed(packing, &[packed(packing, &x, 1), packed(packing, &other, 1)], 2, 1),
            x.len(),
        );
        assert_eq!((y[4], y[7]), (f32::INFINITY, f32::INFINITY));
    }
}

#[test]
fn a_block_that_is_not_finite_has_no_residual() {
    for packing in Packing::ALL {
        let mut x = vec![1.3; 3 * PACKED_BLOCK];
        (x[3], x[PACKED_BLOCK], x[2 * PACKED_BLOCK]) = (f32::NAN, f32::NEG_INFINITY, most(packing) as f32);
        let mut residual = vec![0.25; x.len()];
        feed_back_f32(packing, &mut x, &mut residual);
        assert!(residual[..2 * PACKED_BLOCK].iter().all(|rest| *rest == 0.0), "{residual:?}");
        assert!(x[3].is_nan() && x[PACKED_BLOCK] == f32::NEG_INFINITY && x[4] == 1.55);
        assert_eq!(
            (x[2 * PACKED_BLOCK + 1], residual[2 * PACKED_BLOCK + 1]),
            (2.0, -0.45000005),
            "by steps of 1"
        );
    }
}

#[test]
fn a_sum_that_is_too_large_is_infinite() {
    for packing in Packing::ALL {
        let large = packed(packing, &[largest(packing); 4 * PACKED_BLOCK], 1);
        assert_eq!(unpacked(packing, &large, 1), [largest(packing)]);
        let y = unpacked(packing, &summed(packing, &[large.clone(), large], 1, 1), 4 * PACKED_BLOCK);
        assert!(y.iter().all(|y| *y == f32::INFINITY), "{y:?}");
    }
}

#[test]
fn zeros_and_what_is_far_below_the_least_step() {
    for packing in Packing::ALL {
        assert_eq!(bits(&rounded(packing, &[0.0, -0.0], 1)), [0, 0]);
        let tiny = f32::from_bits(1);
        let y = rounded(packing, &[tiny; 64], 1);
        assert!(y.iter().all(|y| *y == 0.0 || *y == f32::MIN_POSITIVE), "{y:?}");
        assert!(packed(packing, &[0.0; 8], 1).iter().skip(4).all(|q| *q == 0));
    }
}
