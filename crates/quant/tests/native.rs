//! Sums of what travels as it is: each element is right to its own magnitude, bit for bit what the
//! order of the workers gives.

use fanin_quant::*;
use half::{bf16, f16};
use proptest::collection::vec;
use proptest::prelude::*;

const WORKERS: std::ops::RangeInclusive<usize> = 1..=64;
/// Words of the shortest payload; a block's elements are summed together, so that each has
/// neighbours.
const WORDS: usize = 32;

type Sum = fn(&[&[u8]], u32, &mut [i32]);

/// The sum of the workers' payloads, one row each.
fn summed(sum: Sum, rows: &[Vec<u8>], divisor: Divisor) -> Vec<u8> {
    let mut words = [7; WORDS];
    let workers = rows.len() as u32;
    let divisor = if divisor == Divisor::Workers { workers } else { 1 };
    let rows: Vec<_> = rows.iter().map(Vec::as_slice).collect();
    sum(&rows, divisor, &mut words);
    let mut payload = vec![0; 4 * WORDS];
    write_le(&words, &mut payload);
    payload
}

/// Element by element, where `rows[worker]` has one number of each element.
fn sum_f32s(rows: &[Vec<f32>], divisor: Divisor) -> Vec<f32> {
    let rows: Vec<Vec<u8>> =
        rows.iter().map(|row| row.iter().flat_map(|x| x.to_le_bytes()).collect()).collect();
    let payload = summed(sum_f32, &rows, divisor);
    payload.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect()
}

fn sum_f64s(rows: &[Vec<f64>], divisor: Divisor) -> Vec<f64> {
    let rows: Vec<Vec<u8>> =
        rows.iter().map(|row| row.iter().flat_map(|x| x.to_le_bytes()).collect()).collect();
    let payload = summed(sum_f64, &rows, divisor);
    payload.as_chunks().0.iter().map(|x| f64::from_le_bytes(*x)).collect()
}

fn sum_16s(sum: Sum, rows: &[Vec<u16>], divisor: Divisor) -> Vec<u16> {
    let rows: Vec<Vec<u8>> =
        rows.iter().map(|row| row.iter().flat_map(|x| x.to_le_bytes()).collect()).collect();
    let payload = summed(sum, &rows, divisor);
    payload.as_chunks().0.iter().map(|x| u16::from_le_bytes(*x)).collect()
}

/// Numbers of any magnitude from 1e-30 to 1e30, and now and then one that is none.
fn number() -> impl Strategy<Value = f32> {
    prop_oneof![
        16 => (-30.0f64..30.0, prop::bool::ANY).prop_map(|(size, negative)| {
            (10f64.powf(size) * if negative { -1.0 } else { 1.0 }) as f32
        }),
        1 => prop::sample::select(vec![0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY]),
    ]
}

/// The exact sum of some numbers, as an integer times 2^-149: they are all multiples of it.
fn exact(column: &[f32]) -> num::Fixed {
    column.iter().map(|x| num::Fixed::from_f32(*x)).sum()
}

/// Just enough of long arithmetic to know a sum of `f32` or `f64` exactly.
mod num {
    /// Two's complement, lowest limb first; the unit is 2^-1074.
    #[derive(Clone, Copy, PartialEq)]
    pub struct Fixed([u64; 36]);

    impl Fixed {
        pub fn from_f32(x: f32) -> Self {
            Self::from_f64(f64::from(x))
        }

        pub fn from_f64(x: f64) -> Self {
            assert!(x.is_finite());
            let bits = x.to_bits();
            let biased = (bits >> 52 & 0x7ff) as usize;
            let fraction = bits & ((1 << 52) - 1);
            let (mantissa, shift) =
                if biased == 0 { (fraction, 0) } else { (fraction | 1 << 52, biased - 1) };
            let wide = u128::from(mantissa) << (shift % 64);
            let mut limbs = [0; 36];
            (limbs[shift / 64], limbs[shift / 64 + 1]) = (wide as u64, (wide >> 64) as u64);
            if x.is_sign_negative() { Self(limbs).negated() } else { Self(limbs) }
        }

        fn negated(self) -> Self {
            let mut carry = true;
            Self(self.0.map(|limb| {
                let (limb, next) = (!limb).overflowing_add(carry.into());
                carry = next;
                limb
            }))
        }

        /// Distance to `x`, as an `f64` that is at most a part in 2^50 off.
        pub fn distance(self, x: f64) -> f64 {
            let mut difference = [self, Self::from_f64(-x)].into_iter().sum::<Self>();
            if difference.0[35] >> 63 != 0 {
                difference = difference.negated();
            }
            let Some(top) = difference.0.iter().rposition(|limb| *limb != 0) else { return 0.0 };
            // In two factors: 2^-1074 times 2^64 alone would leave the range on the way.
            let lower = if top > 0 { difference.0[top - 1] as f64 / 2f64.powi(64) } else { 0.0 };
            let half = |exponent: i32| 2f64.powi(exponent / 2);
            let exponent = 64 * top as i32 - 1074;
            (difference.0[top] as f64 + lower) * half(exponent) * half(exponent + exponent % 2)
        }
    }

    impl std::iter::Sum for Fixed {
        fn sum<I: Iterator<Item = Self>>(numbers: I) -> Self {
            numbers.fold(Self([0; 36]), |a, b| {
                let mut carry = false;
                Self(std::array::from_fn(|i| {
                    let (sum, first) = a.0[i].overflowing_add(b.0[i]);
                    let (sum, second) = sum.overflowing_add(carry.into());
                    carry = first | second;
                    sum
                }))
            })
        }
    }
}

/// The 16-bit number next to `x`, ties to even, found among all of them; `beyond` is what an
/// infinity stands for. (The conversions from `f64` of the crate `half` look at the upper bits
/// alone.)
fn nearest(x: f64, beyond: f64, value: impl Fn(u16) -> f64) -> u16 {
    let infinity = (0..0x7fff).find(|bits| value(*bits).is_infinite()).unwrap();
    if x.is_nan() {
        return infinity + (infinity & infinity.wrapping_neg()) / 2;
    }
    let value = |bits: u16| if bits == infinity { beyond } else { value(bits) };
    let sign = if x.is_sign_negative() { 0x8000 } else { 0 };
    let (mut below, mut above) = (0, infinity);
    if x.abs() >= beyond {
        return sign | infinity;
    }
    while above - below > 1 {
        let middle = (below + above) / 2;
        if value(middle) <= x.abs() { below = middle } else { above = middle }
    }
    let (down, up) = (x.abs() - value(below), value(above) - x.abs());
    sign | if down < up || down == up && below % 2 == 0 { below } else { above }
}

/// The sum as IEEE 754 has it where a number is none; the sign of a NaN does not count.
fn special(column: &[f32]) -> Option<f64> {
    let finite = column.iter().all(|x| x.is_finite());
    (!finite).then(|| column.iter().map(|x| f64::from(*x)).sum())
}

fn columns<T: Copy>(rows: &[Vec<T>]) -> impl Iterator<Item = Vec<T>> {
    (0..rows[0].len()).map(|i| rows.iter().map(|row| row[i]).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// The bound of docs/protocols/switchml.md: half a unit in the last place of its own sum, and n
    /// 2^-53 of its own terms.
    #[test]
    fn each_element_is_right_to_its_own_magnitude(rows in vec(vec(number(), WORDS), WORKERS)) {
        let n = rows.len() as f64;
        for (divisor, by) in [(Divisor::One, 1.0), (Divisor::Workers, n)] {
            for (column, result) in columns(&rows).zip(sum_f32s(&rows, divisor)) {
                if let Some(expected) = special(&column) {
                    let expected = if expected.is_nan() { f32::from_bits(0x7fc0_0000) } else { expected as f32 };
                    prop_assert_eq!(result.to_bits(), expected.to_bits(), "{:?}", column);
                    continue;
                }
                let sizes: f64 = column.iter().map(|x| f64::from(x.abs())).sum();
                let half_unit = f64::from(result.abs()) * 2f64.powi(-24) + 2f64.powi(-150);
                // A division moves the result by a rounding in f64 more, and what is compared is
                // the sum.
                let off = exact(&column).distance(f64::from(result) * by);
                let bound = (half_unit * by + (n + 1.0) * 2f64.powi(-53) * sizes) * (1.0 + 2f64.powi(-40));
                prop_assert!(off <= bound, "{:e} > {:e} of {:?}", off, bound, column);
            }
        }
    }

    #[test]
    fn sixteen_bit_sums_are_rounded_once(rows in vec(vec(number(), 2 * WORDS), 1..9usize)) {
        let halves: Vec<Vec<u16>> =
            rows.iter().map(|row| row.iter().map(|x| f16::from_f32(x.rem_euclid(9.0)).to_bits()).collect()).collect();
        for (column, result) in columns(&halves).zip(sum_16s(sum_f16, &halves, Divisor::One)) {
            let sum: f64 = column.iter().map(|x| f64::from(f16::from_bits(*x))).sum();
            let expected = nearest(sum, 65536.0, |bits| f16::from_bits(bits).to_f64());
            prop_assert_eq!(result, expected, "{:?}", column);
        }
        let brains: Vec<Vec<u16>> =
            rows.iter().map(|row| row.iter().map(|x| bf16::from_f32(*x).to_bits()).collect()).collect();
        for (column, result) in columns(&brains).zip(sum_16s(sum_bf16, &brains, Divisor::Workers)) {
            let n = column.len() as f64;
            let mean = column.iter().map(|x| f64::from(bf16::from_bits(*x))).reduce(|a, b| a + b).unwrap() / n;
            let expected = nearest(mean, 2f64.powi(128), |bits| bf16::from_bits(bits).to_f64());
            prop_assert_eq!(result, expected, "{:?}", column);
        }
    }

    /// Sum2's bound: the sum rounded once, and n^2 2^-106 of its terms.
    #[test]
    fn float64_is_summed_as_if_with_twice_the_digits(
        rows in vec(vec((-300.0f64..300.0, -1.0f64..1.0), WORDS / 2), WORKERS), near: bool,
    ) {
        let power = |size: f64| 10f64.powf(if near { size / 30.0 } else { size });
        let rows: Vec<Vec<f64>> =
            rows.iter().map(|row| row.iter().map(|(size, x)| x * power(*size)).collect()).collect();
        let n = rows.len() as f64;
        for (column, result) in columns(&rows).zip(sum_f64s(&rows, Divisor::One)) {
            let sizes: f64 = column.iter().map(|x| x.abs()).sum();
            let exact: num::Fixed = column.iter().map(|x| num::Fixed::from_f64(*x)).sum();
            let bound = result.abs() * 2f64.powi(-53) + n * n * 2f64.powi(-106) * sizes + f64::from_bits(1);
            prop_assert!(exact.distance(result) <= bound * (1.0 + 2f64.powi(-40)), "{:?}", column);
        }
        for (sum, mean) in sum_f64s(&rows, Divisor::One).iter().zip(sum_f64s(&rows, Divisor::Workers)) {
            prop_assert_eq!(mean.to_bits(), (sum / n).to_bits());
        }
    }

    #[test]
    fn integers_wrap_and_their_means_are_truncated(
        long in vec(vec(any::<i64>(), WORDS / 2), WORKERS), bytes in vec(vec(any::<u8>(), 4 * WORDS), WORKERS),
    ) {
        let rows: Vec<Vec<u8>> = long.iter().map(|row| row.iter().flat_map(|x| x.to_le_bytes()).collect()).collect();
        let mut acc = [0; WORDS];
        rows.iter().for_each(|row| add_i64_le(&mut acc, row));
        let sums: Vec<i64> = columns(&long).map(|column| column.iter().fold(0, |a: i64, b| a.wrapping_add(*b))).collect();
        prop_assert_eq!(as_i64(&acc), sums.clone());
        mean_i64(&mut acc, long.len() as u32);
        prop_assert_eq!(as_i64(&acc), sums.iter().map(|sum| sum / long.len() as i64).collect::<Vec<_>>());

        let mut acc = [0; WORDS];
        bytes.iter().for_each(|row| add_i8_le(&mut acc, row));
        let sums: Vec<u8> = columns(&bytes).map(|column| column.iter().fold(0, |a: u8, b| a.wrapping_add(*b))).collect();
        prop_assert_eq!(as_bytes(&acc), sums.clone());
        let n = bytes.len();
        let (mut unsigned, mut signed) = (acc, acc);
        mean_u8(&mut unsigned, n as u32);
        mean_i8(&mut signed, n as u32);
        prop_assert_eq!(as_bytes(&unsigned), sums.iter().map(|sum| sum / n as u8).collect::<Vec<_>>());
        let means: Vec<u8> = sums.iter().map(|sum| (i32::from(sum.cast_signed()) / n as i32) as u8).collect();
        prop_assert_eq!(as_bytes(&signed), means);
    }
}

fn as_bytes(acc: &[i32]) -> Vec<u8> {
    let mut payload = vec![0; 4 * acc.len()];
    write_le(acc, &mut payload);
    payload
}

fn as_i64(acc: &[i32]) -> Vec<i64> {
    as_bytes(acc).as_chunks().0.iter().map(|x| i64::from_le_bytes(*x)).collect()
}

#[test]
fn a_small_number_beside_a_large_one_keeps_its_bits_and_a_nan_its_place() {
    let mut row = vec![0.0; WORDS];
    row[..4].copy_from_slice(&[0.123_456_79, 1e9, 1e30, -1e-30]);
    let mut other = row.clone();
    (row[4], other[5]) = (f32::NAN, f32::INFINITY);
    let sums = sum_f32s(&[row.clone(), other], Divisor::One);
    assert_eq!(sums[..4], [2.0 * row[0], 2e9, 2e30, -2e-30]);
    assert!(sums[4].is_nan() && sums[5] == f32::INFINITY);
    assert!(sums[6..].iter().all(|x| *x == 0.0));
}

#[test]
fn one_worker_gets_back_what_it_gave_bit_for_bit() {
    let row: Vec<f32> = (0..WORDS as u32).map(|i| f32::from_bits(i.wrapping_mul(0x8765_4321))).collect();
    assert!(row.iter().all(|x| !x.is_nan()));
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&sum_f32s(std::slice::from_ref(&row), Divisor::Workers)), bits(&row));
    let zeros = vec![vec![-0.0; WORDS / 2]; 3];
    assert!(sum_f64s(&zeros, Divisor::Workers).iter().all(|x| x.to_bits() == (-0.0f64).to_bits()));
}

#[test]
fn a_mean_of_float16_does_not_overflow_where_its_sum_does() {
    let large = f16::from_f32(40_000.0).to_bits();
    let rows = vec![vec![large; 2 * WORDS]; 4];
    assert!(sum_16s(sum_f16, &rows, Divisor::Workers).iter().all(|x| *x == large));
    assert!(sum_16s(sum_f16, &rows, Divisor::One).iter().all(|x| *x == f16::INFINITY.to_bits()));
}

#[test]
fn infinities_and_the_ends_of_the_range_of_float64_are_as_ieee_has_them() {
    let (max, inf) = (f64::MAX, f64::INFINITY);
    for (column, expected) in [
        (vec![inf, 1.0, 2.0], inf),
        (vec![-inf, max, max], -inf),
        (vec![-inf, max, inf], f64::NAN),
        (vec![-inf, max, 1.0], -inf),
        (vec![max, -max, 1.0], 1.0),
        (vec![1e300, 1.0, -1e300], 1.0),
        (vec![max, max], inf),
        (vec![f64::NAN, 1.0], f64::NAN),
    ] {
        let rows: Vec<Vec<f64>> = column.iter().map(|x| vec![*x; WORDS / 2]).collect();
        for sum in sum_f64s(&rows, Divisor::One) {
            let expected = if expected.is_nan() { 0x7ff8_0000_0000_0000 } else { expected.to_bits() };
            assert_eq!(sum.to_bits(), expected, "{column:?}");
        }
    }
}

#[test]
#[should_panic(expected = "132 bytes of payload 1 for 32 words")]
fn payloads_of_the_wrong_length_are_our_bug() {
    sum_f32(&[&[0; 128], &[0; 132]], 1, &mut [0; 32]);
}
