//! Blocks that hold a NaN or an infinity.
//!
//! No power of two bounds such a block, so it carries no values. Each element is its *class*, and
//! each of the two infinities has a count in a field of its own. A NaN is both, as their sum is
//! one. Sixteen bits a field keep the counts of all workers apart in the sum.

use crate::WORKERS_MAX;

const FIELD_BITS: u32 = 16;
const FIELD: i32 = (1 << FIELD_BITS) - 1;
const _: () = assert!(WORKERS_MAX < 1 << (FIELD_BITS - 1), "the upper field's highest bit is the sign");

const FINITE: i32 = 0;
const POSITIVE_INFINITY: i32 = 1;
const NEGATIVE_INFINITY: i32 = 1 << FIELD_BITS;
const NAN: i32 = POSITIVE_INFINITY | NEGATIVE_INFINITY;

/// The quiet NaN that every worker decodes to: `f32::NAN` leaves its bits open.
const CANONICAL_NAN: f32 = f32::from_bits(0x7fc0_0000);

/// The class of an element, in the form that is summed.
pub(crate) fn encode(x: f32) -> i32 {
    if x.is_nan() {
        NAN
    } else if x == f32::INFINITY {
        POSITIVE_INFINITY
    } else if x == f32::NEG_INFINITY {
        NEGATIVE_INFINITY
    } else {
        FINITE
    }
}

/// The value to which the classes of all workers add up.
pub(crate) fn decode(sum: i32) -> f32 {
    match (sum & FIELD != 0, sum >> FIELD_BITS != 0) {
        (true, false) => f32::INFINITY,
        (false, true) => f32::NEG_INFINITY,
        // Also where every worker's element was finite: its value was not carried, and no value is
        // a safe guess.
        _ => CANONICAL_NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_of_all_workers_add_up_as_ieee_does() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        const MANY: usize = WORKERS_MAX as usize;
        let rows: [(&[f32], f32); 8] = [
            (&[inf; MANY], inf),
            (&[-inf; MANY], -inf),
            (&[nan; MANY], nan),
            (&[1.0; MANY], nan),
            (&[inf, 1.0, -2.0], inf),
            (&[-inf, 0.0, 1.0], -inf),
            (&[inf, -inf], nan),
            (&[inf, nan], nan),
        ];
        for (elements, expected) in rows {
            let decoded = decode(elements.iter().map(|&x| encode(x)).sum());
            let expected = if expected.is_nan() { CANONICAL_NAN } else { expected };
            assert_eq!(decoded.to_bits(), expected.to_bits(), "{elements:?}");
        }
    }
}
