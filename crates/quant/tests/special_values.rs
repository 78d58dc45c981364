//! Zeros, infinities, NaNs, native integers, and whatever an attacker writes into an exponent.

use fanin_quant::*;

const NAN: u32 = 0x7fc0_0000;

/// Sends one element through the exchange, for any number of workers.
fn sum_of(elements: &[f32], divisor: Divisor) -> f32 {
    let exponents = elements.iter().map(|&x| exponent_f32(&[x]));
    let scale = Scale::new(exponents.max().expect("a worker"), elements.len() as u32);
    let mut slot = [0];
    let mut payload = [0; 4];
    for &x in elements {
        quantize_f32(&[x], &scale, &mut payload);
        add_le(&mut slot, &payload);
    }
    write_le(&slot, &mut payload);
    let mut out = [0.0];
    dequantize_f32(&payload, &scale, divisor, &mut out);
    out[0]
}

#[test]
fn nans_and_infinities_arrive_as_ieee_addition_gives_them() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let other_nan = f32::from_bits(0xff80_0001);
    for divisor in [Divisor::One, Divisor::Workers] {
        assert_eq!(sum_of(&[inf, 1.0, 0.0], divisor), inf);
        assert_eq!(sum_of(&[-inf, -inf], divisor), -inf);
        assert_eq!(sum_of(&[inf; 64], divisor), inf);
        for elements in [&[inf, -inf][..], &[nan, 1.0], &[other_nan], &[nan; 64], &[nan, inf]] {
            assert_eq!(sum_of(elements, divisor).to_bits(), NAN, "{elements:?}");
        }
    }
}

#[test]
fn finite_neighbour_of_an_infinity_becomes_nan_not_a_guess() {
    let block = [f32::INFINITY, 2.0];
    let scale = Scale::new(exponent_f32(&block), 1);
    let mut payload = [0; 8];
    quantize_f32(&block, &scale, &mut payload);
    let mut out = [0.0; 2];
    dequantize_f32(&payload, &scale, Divisor::One, &mut out);
    assert_eq!(out.map(f32::to_bits), [0x7f80_0000, NAN]);
    let mut halves = [0; 2];
    dequantize_f16(&payload, &scale, Divisor::One, &mut halves);
    assert_eq!(halves, [0x7c00, 0x7e00]);
    dequantize_bf16(&payload, &scale, Divisor::One, &mut halves);
    assert_eq!(halves, [0x7f80, 0x7fc0]);
}

#[test]
fn classes_of_16_bit_formats_are_those_of_f32() {
    let scale = Scale::new(Exponent::NON_FINITE, 64);
    let mut payload = [0; 16];
    let classes = [0, 1, 1 << 16, 1 << 16 | 1].map(i32::to_le_bytes);
    quantize_f32(&[1.0, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN], &scale, &mut payload);
    assert_eq!(payload.as_chunks().0, classes);
    quantize_f16(&[0x7bff, 0x7c00, 0xfc00, 0x7c01], &scale, &mut payload);
    assert_eq!(payload.as_chunks().0, classes);
    quantize_bf16(&[0x7f7f, 0x7f80, 0xff80, 0x7f81], &scale, &mut payload);
    assert_eq!(payload.as_chunks().0, classes);
}

#[test]
fn zeros_of_either_sign_sum_to_zero() {
    assert_eq!(exponent_f32(&[0.0, -0.0]), Exponent::ZERO);
    assert_eq!(exponent_f16(&[0x8000, 0]), Exponent::ZERO);
    assert_eq!(exponent_bf16(&[]), Exponent::ZERO);
    assert_eq!(sum_of(&[0.0, -0.0, -0.0], Divisor::Workers).to_bits(), 0);

    // If all were zero, sums that say otherwise are not believed.
    let mut out = [1.0];
    dequantize_f32(&[0xff; 4], &Scale::new(Exponent::ZERO, 2), Divisor::One, &mut out);
    assert_eq!(out, [0.0]);
}

#[test]
fn element_that_contradicts_its_exponent_saturates() {
    let scale = Scale::new(Exponent::from_bits(0), 1);
    let mut payload = [0; 16];
    quantize_f32(&[1e30, f32::NEG_INFINITY, f32::NAN, -f32::NAN], &scale, &mut payload);
    let limit = i32::MAX;
    assert_eq!(payload.as_chunks().0, [limit, -limit, limit, limit].map(i32::to_le_bytes));
}

#[test]
fn exponents_of_16_bit_formats_are_those_of_their_values() {
    assert_eq!(exponent_f16(&[0x3c00]), Exponent::from_bits(0)); // 1
    assert_eq!(exponent_f16(&[0xbc01]), Exponent::from_bits(1)); // just past -1
    assert_eq!(exponent_f16(&[0x7bff]), Exponent::from_bits(16)); // 65504
    assert_eq!(exponent_f16(&[0x0001]), Exponent::from_bits(-24)); // the smallest subnormal
    assert_eq!(exponent_f16(&[0x3c00, 0xfc00]), Exponent::NON_FINITE);
    assert_eq!(exponent_bf16(&[0x3f80]), Exponent::from_bits(0));
    assert_eq!(exponent_bf16(&[0x0001]), Exponent::from_bits(-133));
    assert_eq!(exponent_bf16(&[0x7fc0]), Exponent::NON_FINITE);
}

#[test]
fn result_too_large_for_the_type_is_an_infinity() {
    assert_eq!(sum_of(&[f32::MAX, f32::MAX], Divisor::One), f32::INFINITY);
    assert_eq!(sum_of(&[f32::MAX, f32::MAX], Divisor::Workers), f32::MAX);
    assert_eq!(sum_of(&[f32::MIN], Divisor::One), f32::MIN);

    let scale = Scale::new(Exponent::from_bits(17), 1);
    let mut payload = [0; 4];
    quantize_f32(&[100_000.0], &scale, &mut payload);
    let mut half = [0];
    dequantize_f16(&payload, &scale, Divisor::One, &mut half);
    assert_eq!(half, [0x7c00]);
}

#[test]
fn no_exponent_panics_and_none_but_finite_ones_carry_values() {
    let block = [1.0, -0.0, f32::INFINITY, f32::NAN, f32::MIN_POSITIVE];
    let halves = [0x3c00, 0x8000, 0x7c00, 0x7e01, 1];
    for bits in i16::MIN..=i16::MAX {
        let exponent = Exponent::from_bits(bits);
        for workers in [1, 3, 64, WORKERS_MAX] {
            let scale = Scale::new(exponent, workers);
            assert_eq!(scale.factor().is_some(), exponent.finite().is_some());
            let mut payload = [0xa5; 20];
            quantize_f16(&halves, &scale, &mut payload);
            quantize_bf16(&halves, &scale, &mut payload);
            quantize_f32(&block, &scale, &mut payload);
            for sums in [payload, [0x80; 20], [0xff; 20]] {
                for divisor in [Divisor::One, Divisor::Workers] {
                    dequantize_f32(&sums, &scale, divisor, &mut [0.0; 5]);
                    dequantize_f16(&sums, &scale, divisor, &mut [0; 5]);
                    dequantize_bf16(&sums, &scale, divisor, &mut [0; 5]);
                }
            }
        }
    }
}

#[test]
fn native_integers_sum_and_their_mean_truncates_toward_zero() {
    let mut payload = [0; 12];
    let mut slot = [0; 3];
    copy_i32(&[-7, 7, i32::MAX], &mut payload);
    store_le(&mut slot, &payload);
    copy_i32(&[0, 0, 1], &mut payload);
    add_le(&mut slot, &payload);
    assert_eq!(slot, [-7, 7, i32::MIN], "native integers wrap");
    write_le(&slot, &mut payload);
    let mut out = [0; 3];
    read_i32(&payload, Divisor::One, 2, &mut out);
    assert_eq!(out, slot);
    read_i32(&payload, Divisor::Workers, 2, &mut out);
    assert_eq!(out, [-3, 3, i32::MIN / 2]);
}

#[test]
#[should_panic(expected = "7 bytes of payload for 2 elements")]
fn payload_of_the_wrong_length_is_our_bug() {
    quantize_f32(&[1.0, 2.0], &Scale::new(Exponent::from_bits(1), 2), &mut [0; 7]);
}

#[test]
fn a_fixed_factor_turns_what_does_not_fit_into_a_limit() {
    let block = [
        0.0,
        1e-8,
        -1.0,
        21.47,
        -21.47,
        21.48,
        -21.48,
        f32::MAX,
        f32::MIN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        -f32::NAN,
    ];
    let mut payload = vec![0; 4 * block.len()];
    fanin_quant::quantize_f32(&block, &Scale::of_factor(1e8), &mut payload);
    let mut written = vec![0; block.len()];
    fanin_quant::store_le(&mut written, &payload);
    let (most, least) = (i32::MAX, i32::MIN);
    let exact = |x: f32| (f64::from(x) * 1e8).round() as i32;
    let ordinary = [0, 1, -100_000_000, exact(21.47), exact(-21.47)];
    assert_eq!(written[..5], ordinary);
    assert_eq!(written[5..], [most, least, most, least, most, least, most, most]);
}
