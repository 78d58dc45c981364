//! A sum of float32 without rounding, so that it does not depend on the order in which the values
//! come.

/// Sum of up to 2^20 float32: a fixed-point number whose lowest bit is the smallest subnormal,
/// 2^-149.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) struct ExactSum {
    /// Two's complement, lowest limb first: 277 bits for the largest float32, and room for carries
    /// and the sign.
    limbs: [u64; 5],
    /// Infinities that were added, by sign; a NaN counts as both.
    positive_infinity: bool,
    negative_infinity: bool,
}

impl ExactSum {
    pub(super) fn add(&mut self, value: f32) {
        let bits = value.to_bits();
        let biased = bits >> 23 & 0xff;
        let fraction = u64::from(bits & 0x7f_ffff);
        let negative = bits >> 31 != 0;
        if biased == 0xff {
            self.positive_infinity |= fraction != 0 || !negative;
            self.negative_infinity |= fraction != 0 || negative;
            return;
        }
        // Subnormals have the exponent of the smallest normal number and no leading one.
        let mantissa = if biased == 0 { fraction } else { fraction | 1 << 23 };
        let shift = biased.saturating_sub(1) as usize;
        let wide = u128::from(mantissa) << (shift % 64);
        let mut carry = false;
        for (i, limb) in self.limbs.iter_mut().enumerate().skip(shift / 64) {
            let part = match i - shift / 64 {
                0 => wide as u64,
                1 => (wide >> 64) as u64,
                _ => 0,
            };
            let (sum, first) = if negative { limb.overflowing_sub(part) } else { limb.overflowing_add(part) };
            let (sum, second) =
                if negative { sum.overflowing_sub(carry.into()) } else { sum.overflowing_add(carry.into()) };
            *limb = sum;
            carry = first | second;
        }
    }

    /// The nearest float64, ties to even.
    pub(super) fn to_f64(self) -> f64 {
        match (self.positive_infinity, self.negative_infinity) {
            (true, true) => return f64::NAN,
            (true, false) => return f64::INFINITY,
            (false, true) => return f64::NEG_INFINITY,
            (false, false) => {}
        }
        let negative = self.limbs[4] >> 63 != 0;
        let mut limbs = self.limbs;
        if negative {
            let mut carry = true;
            for limb in &mut limbs {
                (*limb, carry) = (!*limb).overflowing_add(carry.into());
            }
        }
        let Some(highest) = limbs.iter().rposition(|limb| *limb != 0) else { return 0.0 };
        // The highest 64 bits that are set; whether anything is below them decides ties only, so it
        // may stand in the lowest.
        let zeros = limbs[highest].leading_zeros();
        let mut top = limbs[highest] << zeros;
        let mut rest = false;
        if highest > 0 {
            if zeros > 0 {
                top |= limbs[highest - 1] >> (64 - zeros);
            }
            rest = limbs[highest - 1] << zeros != 0 || limbs[..highest - 1].iter().any(|limb| *limb != 0);
        }
        let magnitude = (top | u64::from(rest)) as f64;
        let exponent = highest as i32 * 64 - zeros as i32 - 149;
        let scaled = magnitude * f64::from_bits(u64::from((1023 + exponent).unsigned_abs()) << 52);
        if negative { -scaled } else { scaled }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    fn sum(values: &[f32]) -> f64 {
        let mut sum = ExactSum::default();
        values.iter().for_each(|value| sum.add(*value));
        sum.to_f64()
    }

    #[test]
    fn what_float64_would_lose_is_kept() {
        assert_eq!(sum(&[1e30, 1.0, -1e30]), 1.0);
        assert_eq!(sum(&[f32::MAX, f32::MAX, -f32::MAX]), f64::from(f32::MAX));
        assert_eq!(sum(&[f32::from_bits(1), -f32::MAX, f32::MAX]), f64::from(f32::from_bits(1)));
        assert_eq!(sum(&[-3.5, 1.25]), -2.25);
        assert_eq!(sum(&[1.0, -1.0]), 0.0);
        assert_eq!(sum(&[]), 0.0);
    }

    #[test]
    fn infinities_and_nan_come_out_as_in_any_float_sum() {
        assert_eq!(sum(&[1.0, f32::INFINITY]), f64::INFINITY);
        assert_eq!(sum(&[f32::NEG_INFINITY, 5.0]), f64::NEG_INFINITY);
        assert!(sum(&[f32::NEG_INFINITY, f32::INFINITY]).is_nan());
        assert!(sum(&[f32::NAN, 1.0]).is_nan());
    }

    #[test]
    fn a_thousand_of_the_largest_do_not_wrap() {
        let values: Vec<f32> = core::iter::repeat_n(f32::MIN, 1024).collect();
        assert_eq!(sum(&values), f64::from(f32::MIN) * 1024.0);
    }

    proptest! {
        #[test]
        fn two_values_sum_as_float64_does(a in any::<i32>(), b in any::<i32>(), e in -20i32..20) {
            // Mantissas of 24 bits and exponents this near: the sum of two is exact in float64.
            let (a, b) = ((a >> 8) as f32, (b >> 8) as f32 * f32::from_bits(((127 + e) as u32) << 23));
            prop_assert_eq!(sum(&[a, b]), f64::from(a) + f64::from(b));
        }

        #[test]
        fn the_order_does_not_matter(bits in proptest::collection::vec(any::<u32>(), 0..20)) {
            let mut values: Vec<f32> = bits.iter().map(|bits| f32::from_bits(*bits)).collect();
            let forwards = sum(&values).to_bits();
            values.reverse();
            prop_assert_eq!(sum(&values).to_bits(), forwards);
        }
    }
}
