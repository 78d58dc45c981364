//! The exponent that a block's elements share (SwitchML §4.6: "the exponent of h rounded up to a
//! power of 2").

/// The smallest `m` with `h <= 2^m`, where `h` is the largest absolute value of a block; or why
/// there is no such `m`.
///
/// The constants are ordered so that the switch combines the workers' exponents by taking the
/// maximum, without knowing what they mean: `ZERO < -149..=128 < NON_FINITE < UNKNOWN`. No other
/// value can exist.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Exponent(i16);

impl Exponent {
    /// Every element of the block is zero.
    pub const ZERO: Self = Self(i16::MIN);
    /// The block holds a NaN or an infinity.
    pub const NON_FINITE: Self = Self(i16::MAX - 1);
    /// The worker does not know its next block yet.
    pub const UNKNOWN: Self = Self(i16::MAX);
    /// The least finite exponent: that of the smallest subnormal `f32`.
    pub const MIN: Self = Self(-149);
    /// The largest finite exponent: that of the largest `f32`.
    pub const MAX: Self = Self(128);

    /// Reads an exponent from the wire. Bits that no worker writes become
    /// [`NON_FINITE`](Self::NON_FINITE): the block then decodes to NaN, where a guess would decode
    /// to plausible garbage.
    #[must_use]
    pub const fn from_bits(bits: i16) -> Self {
        let exponent = Self(bits);
        match exponent {
            Self::ZERO | Self::UNKNOWN => exponent,
            _ if exponent.finite().is_some() => exponent,
            _ => Self::NON_FINITE,
        }
    }

    /// The wire representation.
    #[must_use]
    pub const fn bits(self) -> i16 {
        self.0
    }

    /// `m`, where the block has one: not for [`ZERO`](Self::ZERO), [`NON_FINITE`](Self::NON_FINITE)
    /// and [`UNKNOWN`](Self::UNKNOWN).
    #[must_use]
    pub const fn finite(self) -> Option<i16> {
        if self.0 >= Self::MIN.0 && self.0 <= Self::MAX.0 { Some(self.0) } else { None }
    }

    /// The exponent of `h`, given as the bits of an `f32` without its sign.
    pub(crate) const fn of_magnitude(magnitude: u32) -> Self {
        const INFINITY: u32 = f32::INFINITY.to_bits();
        const MANTISSA_BITS: u32 = f32::MANTISSA_DIGITS - 1;
        if magnitude == 0 {
            return Self::ZERO;
        }
        if magnitude >= INFINITY {
            return Self::NON_FINITE;
        }
        let biased = magnitude >> MANTISSA_BITS;
        let fraction = magnitude & ((1 << MANTISSA_BITS) - 1);
        if biased == 0 {
            // Subnormal: fraction * 2^-149, and ceil(log2(fraction)) is the bit length of
            // fraction - 1.
            let length = u32::BITS - (fraction - 1).leading_zeros();
            Self(Self::MIN.0 + length as i16)
        } else {
            Self(biased as i16 - 127 + (fraction != 0) as i16)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(value: f32) -> Exponent {
        Exponent::of_magnitude(value.abs().to_bits())
    }

    #[test]
    fn exponent_is_the_smallest_power_of_two_not_below_the_value() {
        let rows = [
            (1.0, 0),
            (f32::from_bits(1.0f32.to_bits() + 1), 1),
            (f32::from_bits(1.0f32.to_bits() - 1), 0),
            (-4.23, 3),
            (0.5, -1),
            (f32::MAX, 128),
            (f32::MIN_POSITIVE, -126),
            (f32::from_bits(1), -149),
            (f32::from_bits(2), -148),
            (f32::from_bits(3), -147),
            (f32::from_bits(0x0040_0000), -127),
            (f32::from_bits(0x0040_0001), -126),
            (f32::from_bits(0x007f_ffff), -126),
        ];
        for (value, expected) in rows {
            assert_eq!(of(value), Exponent(expected), "{value:e}");
        }
    }

    #[test]
    fn zeros_infinities_and_nans_have_no_power_of_two() {
        assert_eq!(of(-0.0), Exponent::ZERO);
        assert_eq!(of(f32::NEG_INFINITY), Exponent::NON_FINITE);
        assert_eq!(of(f32::NAN), Exponent::NON_FINITE);
        assert_eq!(of(f32::NAN).finite(), None);
    }

    #[test]
    fn maximum_lets_the_worst_worker_win() {
        let order = [Exponent::ZERO, Exponent::MIN, Exponent::MAX, Exponent::NON_FINITE, Exponent::UNKNOWN];
        assert!(order.is_sorted());
    }

    #[test]
    fn bits_that_no_worker_writes_poison_the_block() {
        for bits in i16::MIN..=i16::MAX {
            let exponent = Exponent::from_bits(bits);
            let written = matches!(bits, i16::MIN | -149..=128 | 32766 | 32767);
            let expected = if written { bits } else { Exponent::NON_FINITE.bits() };
            assert_eq!(exponent.bits(), expected);
        }
    }
}
