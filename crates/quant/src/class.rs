//! Blocks that hold a NaN or an infinity.
//!
//! No power of two bounds such a block, so it carries no values: each element is its *class*, one count in a field of
//! its own. Eight bits a field keep the counts of up to 64 workers apart in the sum.

use crate::WORKERS_MAX;

const FIELD_BITS: u32 = 8;
const FIELD: i32 = (1 << FIELD_BITS) - 1;
const _: () = assert!(WORKERS_MAX <= FIELD as u32);

const FINITE: i32 = 0;
const POSITIVE_INFINITY: i32 = 1;
const NEGATIVE_INFINITY: i32 = 1 << FIELD_BITS;
const NAN: i32 = 1 << (2 * FIELD_BITS);

/// The quiet NaN that every worker decodes to: `f32::NAN` leaves its bits open.
const CANONICAL_NAN: f32 = f32::from_bits(0x7fc0_0000);

/// The class of an element, as it is summed.
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

/// What the classes of all workers add up to. Any bits above the infinities count as a NaN: the sum is from the wire.
pub(crate) fn decode(sum: i32) -> f32 {
    let positive = sum & FIELD != 0;
    let negative = (sum >> FIELD_BITS) & FIELD != 0;
    let nan = sum >> (2 * FIELD_BITS) != 0;
    match (positive, negative, nan) {
        (true, false, false) => f32::INFINITY,
        (false, true, false) => f32::NEG_INFINITY,
        // Also where every worker's element was finite: its value was not carried, and no value is a safe guess.
        _ => CANONICAL_NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_of_64_workers_add_up_as_ieee_does() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        let rows: [(&[f32], f32); 8] = [
            (&[inf; 64], inf),
            (&[-inf; 64], -inf),
            (&[nan; 64], nan),
            (&[1.0; 64], nan),
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
