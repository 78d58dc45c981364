//! Sums of a job whose floats travel as bfloat16: their bits, how far off they may be, what becomes
//! of zeros, infinities and NaNs, and that a sum which is handed back stays what it was.

use fanin_quant::*;
use half::{bf16, f16};
use proptest::collection::vec;
use proptest::prelude::*;

const WORKERS: std::ops::RangeInclusive<usize> = 1..=64;
/// Unit roundoff of bfloat16: half of 2^-7, the spacing of its eight significant bits.
const U: f64 = 1.0 / 256.0;
/// The unit of a result, which is rounded to `f32` first.
const U_RESULT: f64 = U + 1.0 / (1 << 23) as f64;
/// Half the spacing of subnormal bfloat16 numbers, 2^-134.
const HALF_SUBNORMAL: f64 = 1.0 / (1u128 << 67) as f64 / (1u128 << 67) as f64;

fn exponent(elements: &[f32]) -> Exponent {
    elements.iter().map(|&x| exponent_f32(&[x])).max().expect("a worker")
}

/// Sends one element of each worker through the switch, in the order given, in a block of this
/// exponent.
fn sum_on_wire(elements: &[f32], exponent: Exponent) -> [u8; 2] {
    let scale = Scale::fixed_point(exponent, elements.len() as u32);
    let (mut slot, mut payload) = ([0x55], [0; 2]);
    for (worker, &x) in elements.iter().enumerate() {
        encode_f32(&[x], &mut payload);
        if worker == 0 {
            store_bf16(&mut slot, &payload, &scale);
        } else {
            add_bf16(&mut slot, &payload, &scale);
        }
    }
    write_bf16(&slot, &scale, &mut payload);
    payload
}

fn sum_in_block(elements: &[f32], exponent: Exponent, divisor: Divisor) -> f32 {
    let mut out = [0.0];
    decode_f32(&sum_on_wire(elements, exponent), divisor, elements.len() as u32, &mut out);
    out[0]
}

fn sum(elements: &[f32], divisor: Divisor) -> f32 {
    sum_in_block(elements, exponent(elements), divisor)
}

/// `k` of `docs/wire.md`, in its own words.
fn k(elements: &[f32], exponent: Exponent) -> Option<i32> {
    let log2_ceil = (0..).find(|c| 1 << c >= elements.len()).expect("at most 64");
    exponent.finite().map(|m| 30 - log2_ceil - i32::from(m))
}

/// The sum as `docs/wire.md` defines it, in arithmetic of another kind.
fn specified(elements: &[f32], exponent: Exponent) -> f32 {
    let Some(k) = k(elements, exponent) else { return 0.0 };
    let contribution = |x: &f32| {
        let rounded = f64::from(bf16::from_f32(*x)).clamp(-2f64.powi(128), 2f64.powi(128));
        (rounded * 2f64.powi(k)).round_ties_even() as i64
    };
    let sum: i64 = elements.iter().map(contribution).sum();
    assert!(sum.abs() <= 1 << 30, "no overflow");
    bf16::from_f32((sum as f64 * 2f64.powi(-k)) as f32).to_f32()
}

/// Numbers whose sum an `f64` holds exactly: integers of 24 bits, at most 20 binary orders of
/// magnitude apart; and the exponent of a block in which they are, which may hold larger ones.
fn elements() -> impl Strategy<Value = (Vec<f32>, Exponent)> {
    let number = (-(1i32 << 24)..=1 << 24, -20i32..=0);
    let above = prop_oneof![Just(0i16), 0i16..=32];
    (vec(number, WORKERS), -129i32..=103, above).prop_map(|(numbers, size, above)| {
        let scaled = |(x, e): (i32, i32)| (f64::from(x) * 2f64.powi(e + size)) as f32;
        let elements: Vec<f32> = numbers.into_iter().map(scaled).collect();
        let own = exponent(&elements);
        let block = own.finite().map_or(own, |m| Exponent::from_bits((m + above).min(Exponent::MAX.bits())));
        (elements, block)
    })
}

#[test]
fn a_sum_that_racks_of_racks_rounded_up_is_handed_back_as_it_was() {
    // Racks of 259 of 4,096 workers round to 260, those of three such and two workers more to 784
    // in place of 779: all that are at the block's maximum sum up to more than 2^30.
    let scale = Scale::fixed_point_sum(exponent(&[0.75]), 4096);
    for sum in [1_i32 << 30, (1 << 30) + (1 << 23), (1 << 30) + (1 << 26)] {
        for sum in [sum, -sum] {
            let (mut wire, mut slot, mut again) = ([0; 2], [7], [0; 2]);
            write_bf16(&[sum], &scale, &mut wire);
            store_bf16(&mut slot, &wire, &scale);
            write_bf16(&slot, &scale, &mut again);
            assert_eq!((slot, again), ([sum], wire));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn the_sum_is_the_specified_one_whatever_the_order((elements, block) in elements(), seed: u64) {
        let mut shuffled = elements.clone();
        shuffled.sort_by_key(|x| u64::from(x.to_bits()).wrapping_mul(seed | 1));
        let expected = specified(&elements, block).to_bits();
        prop_assert_eq!(sum_in_block(&elements, block, Divisor::One).to_bits(), expected);
        prop_assert_eq!(sum_in_block(&shuffled, block, Divisor::One).to_bits(), expected);
    }

    #[test]
    fn the_sum_is_within_the_stated_error((elements, block) in elements()) {
        let Some(k) = k(&elements, block) else { return Ok(()) };
        let n = elements.len() as f64;
        let exact: f64 = elements.iter().map(|&x| f64::from(x)).sum();
        let sizes: f64 = elements.iter().map(|&x| f64::from(x.abs())).sum();
        let before_result = U * sizes + n * 2f64.powi(-k - 1) + n * HALF_SUBNORMAL;
        let bound = before_result + U_RESULT * (exact.abs() + before_result);
        let result = sum_in_block(&elements, block, Divisor::One);
        if result.is_infinite() {
            prop_assert!(exact.abs() + bound >= 2f64.powi(128) - 2f64.powi(119));
        } else {
            let off = (f64::from(result) - exact).abs();
            prop_assert!(off <= bound, "{off:e} > {bound:e}");
        }
        // The mean is divided in f32; f16 and bfloat16 are rounded once more.
        let mean = sum_in_block(&elements, block, Divisor::Workers);
        if mean.is_finite() {
            let off = (f64::from(mean) - exact / n).abs();
            let size = exact.abs() + bound;
            prop_assert!(off <= (bound + size / (1 << 24) as f64) / n + 1e-45, "mean: {off:e}");
        }
    }

    #[test]
    fn a_sum_that_is_handed_back_stays_what_it_was((elements, block) in elements()) {
        let wire = sum_on_wire(&elements, block);
        let scale = Scale::fixed_point_sum(block, elements.len() as u32);
        let (mut slot, mut again) = ([7], [0; 2]);
        store_bf16(&mut slot, &wire, &scale);
        write_bf16(&slot, &scale, &mut again);
        prop_assert_eq!(again, wire);
    }

    #[test]
    fn sixteen_bit_tensors_are_rounded_once_more(bits: u16, workers in 1..=WORKERS_MAX) {
        let value = f32::from(bf16::from_bits(bits));
        for (divisor, n) in [(Divisor::One, 1.0), (Divisor::Workers, workers as f32)] {
            let (mut half, mut brain) = ([0], [0]);
            decode_f16(&bits.to_le_bytes(), divisor, workers, &mut half);
            decode_bf16(&bits.to_le_bytes(), divisor, workers, &mut brain);
            if value.is_nan() {
                prop_assert!(f16::from_bits(half[0]).is_nan() && bf16::from_bits(brain[0]).is_nan());
            } else {
                prop_assert_eq!(half[0], f16::from_f32(value / n).to_bits());
                prop_assert_eq!(brain[0], bf16::from_f32(value / n).to_bits());
            }
        }
    }
}

#[test]
fn a_sum_that_racks_have_rounded_up_is_handed_back_as_it_was() {
    // Contributions of 4,096 workers are 2^18 at most. Racks whose sums are ties round them up, and
    // racks of such racks again. So 21 of these units more than there are come to the next bfloat16
    // above 2^30.
    let exponent = Exponent::from_bits(5);
    for sign in [1, -1] {
        for sum in [(4096 + 21) << 18, (1 << 30) + (1 << 23), 2_139_095_040] {
            let (mut wire, mut slot, mut again) = ([0; 2], [0], [0; 2]);
            write_bf16(&[sign * sum], &Scale::fixed_point(exponent, WORKERS_MAX), &mut wire);
            store_bf16(&mut slot, &wire, &Scale::fixed_point_sum(exponent, WORKERS_MAX));
            assert!(sign * slot[0] > 1 << 30, "{slot:?}");
            write_bf16(&slot, &Scale::fixed_point(exponent, WORKERS_MAX), &mut again);
            assert_eq!(again, wire, "{sum}");
        }
    }
}

#[test]
fn what_travels_of_each_type_is_its_bfloat16() {
    let mut payload = [0; 2];
    for bits in 0..=u16::MAX {
        copy_bf16(&[bits], &mut payload);
        assert_eq!(u16::from_le_bytes(payload), bits);
        encode_f16(&[bits], &mut payload);
        let (encoded, value) = (bf16::from_le_bytes(payload), f16::from_bits(bits));
        assert!(encoded.is_nan() == value.is_nan());
        if !value.is_nan() {
            assert_eq!(encoded.to_bits(), bf16::from_f32(value.to_f32()).to_bits(), "{bits:#06x}");
        }
    }
}

#[test]
fn an_element_that_rounds_to_infinity_counts_as_the_power_of_two_that_it_is_next_to() {
    assert_eq!(sum(&[f32::MAX, f32::MIN], Divisor::One), 0.0);
    assert_eq!(sum(&[f32::MAX, -2f32.powi(127)], Divisor::One), 2f32.powi(127));
    assert_eq!(sum(&[f32::MAX], Divisor::One), f32::INFINITY);
    assert_eq!(sum(&[f32::MAX, f32::MAX], Divisor::Workers), f32::INFINITY, "the sum is out of range");
    let largest = bf16::MAX.to_f32();
    assert_eq!(sum(&[largest], Divisor::One), largest);
}

#[test]
fn nans_and_infinities_arrive_as_ieee_addition_gives_them_and_can_be_handed_back() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let rows: [(&[f32], f32); 7] = [
        (&[inf, 1.0, 0.0], inf),
        (&[-inf; 64], -inf),
        (&[inf, -inf], nan),
        (&[nan, 1.0], nan),
        (&[f32::from_bits(0x7f80_0001)], nan),
        (&[nan, inf], nan),
        (&[0.0, -0.0], 0.0),
    ];
    for (elements, expected) in rows {
        for divisor in [Divisor::One, Divisor::Workers] {
            let result = sum(elements, divisor);
            assert!(result == expected || (result.is_nan() && expected.is_nan()), "{elements:?}: {result}");
        }
        let wire = sum_on_wire(elements, exponent(elements));
        let scale = Scale::fixed_point_sum(exponent(elements), elements.len() as u32);
        let (mut slot, mut again) = ([7], [0; 2]);
        store_bf16(&mut slot, &wire, &scale);
        write_bf16(&slot, &scale, &mut again);
        assert_eq!(again, wire, "{elements:?}");
    }
}

#[test]
fn finite_neighbour_of_an_infinity_becomes_nan_not_a_guess() {
    let scale = Scale::fixed_point(Exponent::NON_FINITE, 1);
    let (mut payload, mut slot, mut out) = ([0; 4], [0; 2], [0.0; 2]);
    encode_f32(&[f32::INFINITY, 2.0], &mut payload);
    store_bf16(&mut slot, &payload, &scale);
    write_bf16(&slot, &scale, &mut payload);
    decode_f32(&payload, Divisor::One, 1, &mut out);
    assert_eq!(out.map(f32::to_bits), [0x7f80_0000, 0x7fc0_0000]);
}

#[test]
fn contributions_that_contradict_their_exponent_cannot_overflow_the_sum() {
    for (workers, step) in [(1, 1), (2, 1), (3, 1), (8, 1), (33, 1), (64, 1), (WORKERS_MAX, 97)] {
        for bits in (i16::MIN..=i16::MAX).step_by(step) {
            let scale = Scale::fixed_point(Exponent::from_bits(bits), workers);
            let mut slot = [0; 4];
            let payload: Vec<u8> =
                [0x7f80u16, 0xff80, 0x7fc0, 0x7f7f].iter().flat_map(|bits| bits.to_le_bytes()).collect();
            for _ in 0..workers {
                add_bf16(&mut slot, &payload, &scale);
            }
            assert!(slot.iter().all(|sum| sum.unsigned_abs() <= 1 << 30), "{bits} {workers} {slot:?}");
            write_bf16(&slot, &scale, &mut [0; 8]);
            if let Some(m) = Exponent::from_bits(bits).finite() {
                let bits_of_workers = i32::from(workers.next_power_of_two().trailing_zeros() as u8);
                assert_eq!(scale.factor(), Some(2f64.powi(30 - bits_of_workers - i32::from(m))));
            }
        }
    }
}

#[test]
#[should_panic(expected = "3 bytes of payload for 2 elements of bfloat16")]
fn payload_of_the_wrong_length_is_our_bug() {
    encode_f32(&[1.0, 2.0], &mut [0; 3]);
}

#[test]
#[should_panic(expected = "0 workers, not 1..=4096")]
fn a_mean_over_nobody_is_our_bug() {
    decode_f32(&[0; 2], Divisor::Workers, 0, &mut [0.0]);
}
