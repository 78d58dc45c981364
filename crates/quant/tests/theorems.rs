//! SwitchML's Theorems 1 (bounded error) and 2 (no overflow), Appendix E, checked in exact
//! arithmetic.

use fanin_quant::{
    Divisor, Exponent, Scale, WORKERS_MAX, add_le, dequantize_f32, exponent_f32, quantize_f32, store_le,
};
use proptest::collection::vec;
use proptest::prelude::*;

/// The workers of a switch alone. More are rarer here, as they take long.
const WORKERS: std::ops::RangeInclusive<u32> = 1..=64;

/// Bits after the point of the fixed-point numbers below.
const POINT: i32 = 64;

/// An integer and the power of two that it is multiplied by to give `x`.
fn dyadic(x: f64) -> (i128, i32) {
    let bits = x.to_bits();
    let biased = (bits >> 52 & 0x7ff) as i32;
    assert!(biased != 0x7ff, "{x} has no value");
    let fraction = i128::from(bits & ((1 << 52) - 1));
    let (mantissa, exponent) =
        if biased == 0 { (fraction, -1074) } else { (fraction | 1 << 52, biased - 1075) };
    (if x < 0.0 { -mantissa } else { mantissa }, exponent)
}

/// `x * f`, rounded down to a fixed-point number: less than one unit from exact.
fn scaled_exactly(x: f32, factor: f64) -> i128 {
    // An f32's integer has 24 significant bits, once its trailing zeros are gone.
    let ((x, x_exponent), (f, f_exponent)) = (dyadic(f64::from(x)), dyadic(factor));
    let zeros = if x == 0 { 0 } else { x.trailing_zeros() as i32 };
    let product = (x >> zeros) * f;
    let shift = x_exponent + zeros + f_exponent + POINT;
    if shift >= 0 {
        assert!(product == 0 || product.unsigned_abs().leading_zeros() as i32 > shift + 1);
        product << shift
    } else {
        product >> (-shift).min(127)
    }
}

/// All workers' blocks through the whole exchange; the sums are kept in 64 bits too, where they
/// cannot overflow.
struct Exchange {
    scale: Scale,
    wide_sums: Vec<i64>,
    payload: Vec<u8>,
}

impl Exchange {
    fn run(blocks: &[Vec<f32>]) -> Self {
        let exponents = blocks.iter().map(|block| exponent_f32(block));
        let exponent = exponents.max().expect("at least one worker");
        let scale = Scale::new(exponent, blocks.len() as u32);
        let elements = blocks[0].len();
        let mut slot = vec![0; elements];
        let mut wide_sums = vec![0i64; elements];
        let mut payload = vec![0; 4 * elements];
        for (worker, block) in blocks.iter().enumerate() {
            quantize_f32(block, &scale, &mut payload);
            if worker == 0 {
                store_le(&mut slot, &payload);
            } else {
                add_le(&mut slot, &payload);
            }
            for (sum, q) in wide_sums.iter_mut().zip(payload.as_chunks().0) {
                *sum += i64::from(i32::from_le_bytes(*q));
            }
        }
        fanin_quant::write_le(&slot, &mut payload);
        Self { scale, wide_sums, payload }
    }

    fn sums(&self) -> impl Iterator<Item = i32> {
        self.payload.as_chunks().0.iter().map(|sum| i32::from_le_bytes(*sum))
    }

    fn values(&self, divisor: Divisor) -> Vec<f32> {
        let mut out = vec![0.0; self.wide_sums.len()];
        dequantize_f32(&self.payload, &self.scale, divisor, &mut out);
        out
    }
}

fn theorems_hold(blocks: &[Vec<f32>]) {
    let exchange = Exchange::run(blocks);
    let n = blocks.len() as i128;

    // Theorem 2: what the slot holds is the true sum, and it is not -2^31 either.
    for (narrow, &wide) in exchange.sums().zip(&exchange.wide_sums) {
        assert_eq!(i64::from(narrow), wide, "overflow");
        assert_ne!(narrow, i32::MIN);
    }

    let Some(factor) = exchange.scale.factor() else {
        assert!(blocks.iter().flatten().all(|&x| x == 0.0));
        assert!(exchange.values(Divisor::One).iter().all(|&y| y.to_bits() == 0));
        return;
    };
    let values = exchange.values(Divisor::One);
    let means = exchange.values(Divisor::Workers);
    for (element, (&sum, (&value, &mean))) in
        exchange.wide_sums.iter().zip(values.iter().zip(&means)).enumerate()
    {
        // Theorem 1, multiplied by f: |f * (sum of x) - A| <= n. Each of the n terms was rounded
        // down by less than 1.
        let exact: i128 = blocks.iter().map(|block| scaled_exactly(block[element], factor)).sum();
        let error = (exact - (i128::from(sum) << POINT)).abs();
        assert!(error + n <= n << POINT, "element {element}: {} / 2^64", error);

        // A decoded value is A / f to within the rounding of an f32; 1e-15 for that of the
        // multiplier.
        let quotient = sum as f64 / factor;
        for (decoded, exact) in [(value, quotient), (mean, quotient / n as f64)] {
            let ulp = (exact.abs() * (f64::powi(2.0, -24) + 1e-15)).max(f64::powi(2.0, -150));
            let overflow = decoded.is_infinite() && exact.abs() >= f64::from(f32::MAX);
            assert!(overflow || (f64::from(decoded) - exact).abs() <= ulp, "{decoded:e} for {exact:e}");
        }
    }
}

/// Blocks of finite bits whose magnitudes share a power of two, for all workers.
fn blocks() -> impl Strategy<Value = Vec<Vec<f32>>> {
    let workers = prop_oneof![19 => WORKERS, 1 => 65..=WORKERS_MAX];
    (workers, 1..24usize, prop_oneof![Just(0u32), 1..254u32]).prop_flat_map(|(workers, elements, top)| {
        let element = (any::<u32>(), 0..=top).prop_map(move |(bits, below)| {
            // Mostly near the top of the block, down to subnormals.
            let biased = if bits & 1 == 0 { top } else { top - below };
            f32::from_bits(bits & 0x807f_ffff | biased << 23)
        });
        vec(vec(element, elements), workers as usize)
    })
}

proptest! {
    #[test]
    fn error_is_bounded_and_nothing_overflows(blocks in blocks()) {
        theorems_hold(&blocks);
    }

    #[test]
    fn stale_exponent_saturates_instead_of_overflowing(bits in any::<u32>(), m in any::<i16>(), workers in 1..=WORKERS_MAX) {
        let scale = Scale::new(Exponent::from_bits(m), workers);
        let mut payload = [0; 4];
        quantize_f32(&[f32::from_bits(bits)], &scale, &mut payload);
        let q = i64::from(i32::from_le_bytes(payload));
        prop_assert!((q * i64::from(workers)).abs() <= i64::from(i32::MAX));
    }
}

#[test]
fn theorems_hold_where_all_workers_send_the_power_of_two_itself() {
    for workers in WORKERS.chain([1000, WORKERS_MAX]) {
        for m in (-149..=127i32).step_by(if WORKERS.contains(&workers) { 1 } else { 23 }) {
            let h = if m < -126 {
                f32::from_bits(1 << (m + 149))
            } else {
                f32::from_bits(((m + 127) as u32) << 23)
            };
            assert_eq!(exponent_f32(&[h]), Exponent::from_bits(m as i16));
            theorems_hold(&vec![vec![h, -h, h / 2.0, 0.0]; workers as usize]);
        }
        theorems_hold(&vec![vec![f32::MAX, f32::MIN]; workers as usize]);
    }
}

#[test]
fn factor_is_the_papers_to_within_an_ulp() {
    for workers in 1..=WORKERS_MAX {
        let factor = Scale::new(Exponent::from_bits(0), workers).factor().expect("finite");
        let (mantissa, exponent) = dyadic(factor);
        // |f * n - (2^31 - 1)| <= n * ulp(f) / 2, in units of ulp(f).
        let exact = i128::from(i32::MAX) << -exponent;
        let difference = (mantissa * i128::from(workers) - exact).abs();
        assert!(2 * difference <= i128::from(workers));
        for m in -149..=128i16 {
            let scaled = Scale::new(Exponent::from_bits(m), workers).factor().expect("finite");
            assert_eq!(scaled, factor * f64::powi(2.0, -i32::from(m)));
        }
    }
}

#[test]
fn papers_example_comes_out() {
    // Appendix E: 1.56 + 4.23 = 5.79, here with f = (2^31 - 1) / (2 * 2^3).
    let exchange = Exchange::run(&[vec![1.56], vec![4.23]]);
    assert_eq!(exchange.scale.factor(), Some(134_217_727.937_5));
    assert_eq!(exchange.values(Divisor::One), [5.79]);
    assert_eq!(exchange.values(Divisor::Workers), [2.895]);
}
