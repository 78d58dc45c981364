//! A byte an element: how far off, in expectation right, not changed by rounding again, and never a
//! wrong number.

use fanin_quant::*;
use half::{bf16, f16};
use proptest::collection::vec;
use proptest::prelude::*;

/// Four blocks of steps and integers.
const GROUP_BYTES: usize = 4 * (1 + INT8_BLOCK);
/// The largest magnitude that has a step.
const LARGEST: f32 = f32::from_bits(0x7f7e_0000);

fn payload_of(elements: usize) -> Vec<u8> {
    vec![0xaa; elements.div_ceil(4 * INT8_BLOCK).max(1) * GROUP_BYTES]
}

fn packed(values: &[f32], seed: u64) -> Vec<u8> {
    let mut payload = payload_of(values.len());
    pack_f32(values, seed, &mut payload);
    payload
}

fn unpacked(payload: &[u8], elements: usize) -> Vec<f32> {
    let mut values = vec![7.0; elements];
    unpack_f32(payload, &mut values);
    values
}

fn rounded(values: &[f32], seed: u64) -> Vec<f32> {
    unpacked(&packed(values, seed), values.len())
}

fn summed(payloads: &[Vec<u8>], divisor: u32, seed: u64) -> Vec<u8> {
    let payloads: Vec<_> = payloads.iter().map(Vec::as_slice).collect();
    let mut sum = vec![7; payloads[0].len() / 4];
    sum_packed(&payloads, divisor, seed, &mut sum);
    let mut payload = vec![0; 4 * sum.len()];
    write_le(&sum, &mut payload);
    payload
}

/// The least power of two, down to 2^-126, by which the magnitude is at most 127.
fn step(block: &[f32]) -> f64 {
    let magnitude = block.iter().fold(0.0f64, |max, x| max.max(f64::from(x.abs())));
    let mut step = 2.0f64.powi(-126);
    while magnitude > 127.0 * step {
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
            let x = (exponent.exp2() as f32).min(LARGEST);
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
    fn an_element_is_off_by_less_than_its_blocks_step_and_by_nothing_where_that_can_be(x in values(), seed in any::<u64>()) {
        let y = rounded(&x, seed);
        for (x, y) in x.chunks(INT8_BLOCK).zip(y.chunks(INT8_BLOCK)) {
            let step = step(x);
            for (x, y) in x.iter().zip(y) {
                let (x, y) = (f64::from(*x), f64::from(*y));
                prop_assert!((y - x).abs() < step, "{} became {} by steps of {}", x, y, step);
                prop_assert_eq!(y / step, (y / step).round());
                prop_assert!(x / step != (x / step).round() || x == y, "{} can be represented and became {}", x, y);
            }
        }
    }

    #[test]
    fn the_step_is_no_more_than_one_part_in_63_and_a_half_of_the_largest_magnitude(x in vec(finite(-100.0..128.0), 1..=INT8_BLOCK)) {
        let magnitude = x.iter().fold(0.0f64, |max, x| max.max(f64::from(x.abs())));
        prop_assume!(magnitude > 0.0);
        let byte = packed(&x, 1)[0];
        let step = 2.0f64.powi(i32::from(byte) - 127);
        prop_assert!(step * 63.5 <= magnitude && magnitude <= step * 127.0, "{} of {}", step, magnitude);
    }

    #[test]
    fn what_was_rounded_stays_whatever_the_seed(x in values(), seeds in any::<[u64; 2]>()) {
        let once = rounded(&x, seeds[0]);
        prop_assert_eq!(bits(&rounded(&once, seeds[1])), bits(&once));
    }

    #[test]
    fn the_seed_and_the_place_alone_decide(x in vec(finite(-20.0..3.0), INT8_BLOCK..200), seed in any::<u64>()) {
        let payload = packed(&x, seed);
        prop_assert_eq!(&packed(&x, seed), &payload);
        // The content of other blocks changes nothing, and a longer payload has zeros behind.
        let mut other = x.clone();
        other[INT8_BLOCK..].fill(0.25);
        prop_assert_eq!(&unpacked(&packed(&other, seed), INT8_BLOCK), &unpacked(&payload, INT8_BLOCK));
        let mut longer = vec![0xaa; payload.len() + GROUP_BYTES];
        pack_f32(&x, seed, &mut longer);
        let all = unpacked(&longer, longer.len() / (1 + INT8_BLOCK) * INT8_BLOCK);
        prop_assert_eq!(&all[..x.len()], &unpacked(&payload, x.len())[..]);
        prop_assert!(all[x.len()..].iter().all(|x| *x == 0.0));
    }

    #[test]
    fn a_sum_is_off_by_less_than_a_step_of_its_own(
        rows in (1..=64usize).prop_flat_map(|workers| vec(vec(finite(-20.0..3.0), 2 * INT8_BLOCK), workers)),
        mean in any::<bool>(), seed in any::<u64>()
    ) {
        let payloads: Vec<_> = rows.iter().enumerate().map(|(i, row)| packed(row, i as u64)).collect();
        let divisor = if mean { rows.len() as u32 } else { 1 };
        let sum = unpacked(&summed(&payloads, divisor, seed), 2 * INT8_BLOCK);
        let parts: Vec<_> = payloads.iter().map(|payload| unpacked(payload, 2 * INT8_BLOCK)).collect();
        // In float32, in this order, and rounded as any other block.
        let exact: Vec<f32> = (0..2 * INT8_BLOCK)
            .map(|i| parts.iter().fold(0.0f32, |sum, part| sum + part[i]) / divisor as f32)
            .collect();
        prop_assert_eq!(bits(&sum), bits(&rounded(&exact, seed)));
    }

    #[test]
    fn what_rounding_takes_is_left_as_the_residual_and_the_rest_travels_unchanged(
        steps in (1..100usize).prop_flat_map(|elements| vec(vec(finite(-20.0..3.0), elements), 1..5)), seed in any::<u64>()
    ) {
        let mut residual = vec![0.0; steps[0].len()];
        for gradient in &steps {
            let total: Vec<f32> = gradient.iter().zip(&residual).map(|(x, rest)| x + rest).collect();
            let mut values = gradient.clone();
            feed_back_f32(&mut values, &mut residual);
            prop_assert_eq!(bits(&rounded(&values, seed)), bits(&values));
            for ((total, values), residual) in
                total.chunks(INT8_BLOCK).zip(values.chunks(INT8_BLOCK)).zip(residual.chunks(INT8_BLOCK))
            {
                let step = step(total);
                for ((total, value), rest) in total.iter().zip(values).zip(residual) {
                    prop_assert!(f64::from(rest.abs()) <= step / 2.0, "the nearest");
                    prop_assert_eq!(f64::from(*value) + f64::from(*rest), f64::from(*total), "nothing is lost");
                }
            }
        }
    }

    #[test]
    fn the_residual_of_a_half_counts_its_own_rounding(halves in vec(any::<u16>(), 1..100), seed in any::<u64>()) {
        type FeedBack = fn(&mut [u16], &mut [f32]);
        type Kind = (FeedBack, fn(u16) -> f32);
        let kinds: [Kind; 2] =
            [(feed_back_f16, |x| f16::from_bits(x).to_f32()), (feed_back_bf16, |x| bf16::from_bits(x).to_f32())];
        for (feed_back, widen) in kinds {
            let (mut values, mut residual) = (halves.clone(), vec![0.125; halves.len()]);
            feed_back(&mut values, &mut residual);
            let wide = |halves: &[u16]| halves.iter().map(|x| widen(*x)).collect::<Vec<_>>();
            for ((x, y), rest) in wide(&halves).iter().zip(wide(&values)).zip(&residual) {
                prop_assert!(rest.is_finite());
                prop_assert!(!y.is_finite() || *rest == 0.0 || y + rest == x + 0.125, "{} is {} and {}", x, y, rest);
            }
            if wide(&values).iter().all(|y| y.abs() <= LARGEST) {
                let unchanged = rounded(&wide(&values), seed);
                prop_assert!(unchanged.iter().zip(wide(&values)).all(|(a, b)| *a == b));
            }
        }
    }

    #[test]
    fn a_half_is_rounded_as_the_float32_that_it_is(bits in vec(any::<u16>(), 1..200), seed in any::<u64>()) {
        type Pack = fn(&[u16], u64, &mut [u8]);
        type Unpack = fn(&[u8], &mut [u16]);
        let widen_f16 = |x: &u16| f16::from_bits(*x).to_f32();
        let widen_bf16 = |x: &u16| bf16::from_bits(*x).to_f32();
        let narrow_f16 = |x: f32| f16::from_f32(x).to_bits();
        let narrow_bf16 = |x: f32| bf16::from_f32(x).to_bits();
        type Kind = (Pack, Unpack, fn(&u16) -> f32, fn(f32) -> u16);
        let kinds: [Kind; 2] =
            [(pack_f16, unpack_f16, widen_f16, narrow_f16), (pack_bf16, unpack_bf16, widen_bf16, narrow_bf16)];
        for (pack, unpack, widen, narrow) in kinds {
            let wide: Vec<f32> = bits.iter().map(widen).collect();
            let mut payload = payload_of(bits.len());
            pack(&bits, seed, &mut payload);
            prop_assert_eq!(&payload, &packed(&wide, seed));
            let mut narrowed = vec![1; bits.len()];
            unpack(&payload, &mut narrowed);
            let expected: Vec<u16> = unpacked(&payload, bits.len()).into_iter().map(narrow).collect();
            prop_assert_eq!(narrowed, expected);
        }
    }

    #[test]
    fn nothing_that_a_network_brings_is_a_panic(bytes in vec(any::<u8>(), 2 * GROUP_BYTES), divisor in 1..=WORKERS_MAX) {
        let payloads: Vec<_> = bytes.chunks(GROUP_BYTES).map(<[u8]>::to_vec).collect();
        let sum = summed(&payloads, divisor, 1);
        unpacked(&sum, 4 * INT8_BLOCK);
        unpacked(&payloads[0], 4 * INT8_BLOCK);
    }
}

#[test]
fn the_expectation_is_the_value() {
    const SEEDS: u64 = 4096;
    // A step of 1, and fractions of it on both sides of zero.
    let mut x = [0.0; INT8_BLOCK];
    for (i, x) in x.iter_mut().enumerate() {
        *x = (i as f32 - 15.5) / 16.0 * 1.37;
    }
    x[0] = 127.0;
    let mut sums = [0.0f64; INT8_BLOCK];
    let mut products = 0.0;
    for seed in 0..SEEDS {
        let y = rounded(&x, seed);
        sums.iter_mut().zip(&y).for_each(|(sum, y)| *sum += f64::from(*y));
        products += f64::from((y[1] - x[1]) * (y[2] - x[2]));
    }
    // A fraction's deviation is at most half a step; five of them.
    let bound = 5.0 * 0.5 / (SEEDS as f64).sqrt();
    for (x, sum) in x.iter().zip(sums) {
        let mean = sum / SEEDS as f64;
        assert!((mean - f64::from(*x)).abs() < bound, "{x}: {mean}");
    }
    assert!((products / SEEDS as f64).abs() < bound / 2.0, "neighbours are not rounded together: {products}");
}

#[test]
fn places_are_rounded_each_by_its_own_chance() {
    let mut x = vec![0.5; 32 * 1024];
    x.iter_mut().step_by(INT8_BLOCK).for_each(|x| *x = 127.0);
    let ups = rounded(&x, 3).iter().filter(|y| **y == 1.0).count() as f64;
    let half = (x.len() - x.len() / INT8_BLOCK) as f64 / 2.0;
    assert!((ups - half).abs() < 5.0 * 0.5 * (2.0 * half).sqrt(), "{ups} of {half} expected");
}

#[test]
fn a_block_that_is_not_finite_is_so_for_all_and_the_next_is_not() {
    let mut x = vec![1.0; 4 * INT8_BLOCK];
    (x[3], x[4], x[5], x[6]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX);
    let ones = vec![1.0; 4 * INT8_BLOCK];
    let mut less = ones.clone();
    less[4] = f32::NEG_INFINITY;
    for parts in [vec![&x], vec![&x, &ones], vec![&ones, &x, &ones]] {
        let payloads: Vec<_> = parts.iter().map(|part| packed(part, 1)).collect();
        let y = unpacked(&summed(&payloads, 1, 1), x.len());
        assert!(y[3].is_nan() && y[4] == f32::INFINITY && y[5] == f32::NEG_INFINITY, "{y:?}");
        assert_eq!(y[6], f32::INFINITY, "above what has a step");
        assert!(y[..INT8_BLOCK].iter().all(|y| !y.is_finite()), "none of it is a wrong number: {y:?}");
        assert!(y[INT8_BLOCK..].iter().all(|y| *y == parts.len() as f32));
    }
    let y = unpacked(&summed(&[packed(&x, 1), packed(&less, 1)], 1, 1), x.len());
    assert!(y[4].is_nan(), "infinities of both signs");
    assert!(y[0].is_nan() && y[5] == f32::NEG_INFINITY);
    // An infinity in one block is one in the sum whatever other block was not finite.
    let mut other = ones;
    other[7] = f32::INFINITY;
    let y = unpacked(&summed(&[packed(&x, 1), packed(&other, 1)], 2, 1), x.len());
    assert_eq!((y[4], y[7]), (f32::INFINITY, f32::INFINITY));
}

#[test]
fn a_block_that_is_not_finite_has_no_residual() {
    let mut x = vec![1.3; 3 * INT8_BLOCK];
    (x[3], x[INT8_BLOCK], x[2 * INT8_BLOCK]) = (f32::NAN, f32::NEG_INFINITY, 100.0);
    let mut residual = vec![0.25; x.len()];
    feed_back_f32(&mut x, &mut residual);
    assert!(residual[..2 * INT8_BLOCK].iter().all(|rest| *rest == 0.0), "{residual:?}");
    assert!(x[3].is_nan() && x[INT8_BLOCK] == f32::NEG_INFINITY && x[4] == 1.55);
    assert_eq!((x[2 * INT8_BLOCK + 1], residual[2 * INT8_BLOCK + 1]), (2.0, -0.45000005), "by steps of 1");
}

#[test]
fn a_sum_that_is_too_large_is_infinite() {
    let large = packed(&[LARGEST; 4 * INT8_BLOCK], 1);
    assert_eq!(unpacked(&large, 1), [LARGEST]);
    let y = unpacked(&summed(&[large.clone(), large], 1, 1), 4 * INT8_BLOCK);
    assert!(y.iter().all(|y| *y == f32::INFINITY), "{y:?}");
}

#[test]
fn zeros_and_what_is_far_below_the_least_step() {
    assert_eq!(bits(&rounded(&[0.0, -0.0], 1)), [0, 0]);
    let tiny = f32::from_bits(1);
    let y = rounded(&[tiny; 64], 1);
    assert!(y.iter().all(|y| *y == 0.0 || *y == f32::MIN_POSITIVE), "{y:?}");
    assert!(packed(&[0.0; 8], 1).iter().skip(4).all(|q| *q == 0));
}
