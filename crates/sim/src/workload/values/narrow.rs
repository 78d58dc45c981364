//! Numbers of few bits, for jobs whose floats are rounded on their way: bfloat16 and int8.
//!
//! Rounding may hide a contribution. So the integers are so small that contributions and sums travel
//! as they are. The sum of a rack's workers is smaller than that of all, and travels, too. An int8
//! has the step of its block of 32; all integers are multiples of the unit, so the step is at most
//! the unit while no sum is above 127. A sum that has a contribution twice must be below that, or
//! the rounding could turn it into the right one.

use fanin_wire::WireDtype;

use super::{PLACES, PLACES_MAX, WORKERS_MAX, digits_of, places_of, totals};

/// Bits of the part that all workers share, and of a digit: the first that fit.
const WIDTHS: [(u32, u32); 7] = [(6, 6), (5, 5), (4, 4), (3, 3), (2, 2), (1, 1), (0, 1)];

/// Integers of a job.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Narrow {
    pub(super) common_bits: u32,
    pub(super) digit_bits: u32,
    pub(super) places: usize,
}

/// Most workers whose sums travel as they are, so that every contribution can be seen in them.
pub(crate) fn exact_workers_max(wire_dtype: WireDtype) -> u32 {
    let Some(largest) = largest(wire_dtype) else { return WORKERS_MAX };
    (1..=WORKERS_MAX).take_while(|workers| fits(*workers, largest).is_some()).last().unwrap_or_default()
}

/// The largest integer that travels as it is, with all below it. There is none if floats travel with
/// all of their bits, or in a system's own fixed point.
pub(super) const fn largest(wire_dtype: WireDtype) -> Option<u32> {
    match wire_dtype {
        WireDtype::SharedExponent | WireDtype::Native => None,
        WireDtype::Bfloat16 => Some(1 << 8),
        WireDtype::Int8 => Some(127),
        // The next one, 5, is rounded to 4 or 6.
        WireDtype::Int4 => Some(4),
    }
}

/// The most bits with which no sum is above `largest`, nor one that has a contribution twice.
pub(super) fn fits(workers: u32, largest: u32) -> Option<Narrow> {
    WIDTHS.into_iter().find_map(|(common_bits, digit_bits)| {
        let digits = digits_of(digit_bits);
        let needed = places_of(workers, digits);
        let places = needed.max(PLACES);
        if needed > PLACES_MAX {
            return None;
        }
        let most = totals(workers, digits, places).into_iter().flatten().max().unwrap_or_default();
        let sum = (workers << common_bits) + most;
        let contribution = (1 << common_bits) + digits;
        (sum + contribution <= largest).then_some(Narrow { common_bits, digit_bits, places })
    })
}
