//! Conversions of IEEE half precision (f16) and bfloat16, as raw bits.
//!
//! Written out: the usual crate brings procedural macros into a crate that otherwise has next to no
//! dependency. The tests hold these to it, bit for bit.

/// Exact for every value; NaNs keep their payload and become quiet, as F16C makes them.
#[inline]
pub(crate) fn f32_from_f16(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff);
    let unsigned = match magnitude >> 10 {
        // Subnormal or zero: an integer times 2^-24. Both factors and the product are exact.
        0 => (magnitude as f32 * f32::from_bits((127 - 24) << 23)).to_bits(),
        0x1f if magnitude == 0x7c00 => 0x7f80_0000,
        0x1f => 0x7fc0_0000 | magnitude << 13,
        _ => (magnitude << 13) + ((127 - 15) << 23),
    };
    f32::from_bits(sign | unsigned)
}

/// Rounds to nearest, ties to even; too large becomes an infinity, a NaN becomes quiet.
#[inline]
pub(crate) fn f16_from_f32(x: f32) -> u16 {
    /// The least magnitude that rounds to infinity: half way between the largest f16 and 2^16.
    const OVERFLOW: u32 = 0x477f_f000;
    /// The least normal f16, 2^-14.
    const NORMAL: u32 = 0x3880_0000;
    let bits = x.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    let unsigned = if magnitude > 0x7f80_0000 {
        0x7e00 | (magnitude >> 13) as u16 & 0x01ff
    } else if magnitude >= OVERFLOW {
        0x7c00
    } else if magnitude >= NORMAL {
        // A carry out of the mantissa lands in the exponent, where it belongs.
        let rebiased = magnitude - ((127 - 15) << 23);
        ((rebiased + 0x0fff + (rebiased >> 13 & 1)) >> 13) as u16
    } else {
        // Subnormal: adding 0.5 puts 2^-24 at the last bit of the f32, and the addition rounds.
        const HALF: f32 = 0.5;
        ((f32::from_bits(magnitude) + HALF).to_bits() - HALF.to_bits()) as u16
    };
    sign | unsigned
}

/// Exact: a bfloat16 is the upper half of an `f32`.
#[inline]
pub(crate) fn f32_from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Rounds to nearest, ties to even; too large becomes an infinity, a NaN becomes quiet.
#[inline]
pub(crate) fn bf16_from_f32(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x0040;
    }
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn widening_equals_the_reference_for_every_bit_pattern() {
        for bits in 0..=u16::MAX {
            assert_eq!(
                f32_from_f16(bits).to_bits(),
                f16::from_bits(bits).to_f32_const().to_bits(),
                "{bits:#06x}"
            );
            let bf = bf16::from_bits(bits);
            if !bf.is_nan() {
                assert_eq!(f32_from_bf16(bits).to_bits(), bf.to_f32_const().to_bits(), "{bits:#06x}");
            }
        }
    }

    #[test]
    fn narrowing_equals_the_reference_around_every_half_way_point() {
        for upper in 0..=u16::MAX {
            for lower in
                [0, 1, 0x0fff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x7fff, 0x8000, 0x8001, 0xf000, 0xffff]
            {
                let x = f32::from_bits(u32::from(upper) << 16 | lower);
                assert_eq!(f16_from_f32(x), f16::from_f32_const(x).to_bits(), "{:#010x}", x.to_bits());
                assert_eq!(bf16_from_f32(x), bf16::from_f32_const(x).to_bits(), "{:#010x}", x.to_bits());
            }
        }
    }
}
