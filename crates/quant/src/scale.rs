//! The scale of a block's elements, which follows from its exponent and the number of workers.

use crate::Exponent;

/// The most workers that can share a sum: the most ranks of a job.
pub const WORKERS_MAX: u32 = 4096;

/// The largest magnitude that the sum of all workers may reach.
const SUM_MAX: i32 = i32::MAX;
/// The same in fixed point, as a power of two.
const SUM_MAX_LOG2: i16 = 30;
/// The largest bfloat16 that is an `i32`. Each level of racks may round its sums up, so that those
/// of all may be more than 2^30.
const ROUNDED_SUM_MAX: f64 = 2_139_095_040.0;

/// The divisor of a sum when it is turned back into a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Divisor {
    /// Nothing: the sum over the workers.
    One,
    /// The number of workers: their mean.
    Workers,
}

impl Divisor {
    /// The divisor of a sum over `workers`.
    pub(crate) fn value(self, workers: u32) -> f32 {
        assert_workers(workers);
        match self {
            Self::One => 1.0,
            // At most 4096: exact.
            Self::Workers => workers as f32,
        }
    }
}

/// A number of workers that no job has is our own bug.
pub(crate) fn assert_workers(workers: u32) {
    assert!((1..=WORKERS_MAX).contains(&workers), "{workers} workers, not 1..={WORKERS_MAX}");
}

/// How the elements of one block are written as integers, and their sums read.
///
/// | exponent | an element is written as | a sum `A` is read as |
/// |---|---|---|
/// | finite `m` | `round_ties_even(clamp(x * f, -L, L))` | `A * inverse` |
/// | [`ZERO`](Exponent::ZERO) | 0 | 0 |
/// | [`UNKNOWN`](Exponent::UNKNOWN) | its class | see below |
/// | [`NON_FINITE`](Exponent::NON_FINITE) | its class | see below |
///
/// Here `f = (2^31 - 1) / (n * 2^m)` and `L = floor((2^31 - 1) / n)`. A class is finite, +inf, -inf
/// or NaN. Its sum is what IEEE addition of the classes gives. If all were finite, it is NaN: their
/// values were not carried.
///
/// All in `f64`, each step rounded to nearest, ties to even. `f` is SwitchML's scaling factor
/// (§4.6). The paper's Theorem 2 asks for a slightly smaller one, so that rounding cannot carry a
/// sum past `2^31 - 1`. The clamp does that here, also if `|x| = 2^m` exactly and if an element is
/// larger than the exponent announced. It moves a value by less than 1, so that Theorem 1
/// (`|sum of x - A / f| <= n / f`) holds all the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    pub(crate) kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Zero,
    Finite(Finite),
    NonFinite,
}

/// The constants of a block that has a finite exponent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Finite {
    /// `f`.
    pub factor: f64,
    /// The limit to which an element is cut, integers: `-L`
    pub least: f64,
    /// and `L`.
    pub limit: f64,
    /// `1 / f`.
    inverse: f64,
    /// `1 / (f * n)`.
    inverse_mean: f64,
}

impl Scale {
    /// The scale of a block with this exponent (the maximum over the workers), summed over
    /// `workers` workers.
    ///
    /// # Panics
    /// If `workers` is not in `1..=`[`WORKERS_MAX`].
    #[must_use]
    pub fn new(exponent: Exponent, workers: u32) -> Self {
        assert_workers(workers);
        let kind = match exponent.finite() {
            Some(m) => Kind::Finite(Finite::new(m, workers)),
            None if exponent == Exponent::ZERO => Kind::Zero,
            None => Kind::NonFinite,
        };
        Self { kind }
    }

    /// The fixed point in which a switch adds bfloat16 contributions. An element is written as
    /// `round_ties_even(clamp(x * 2^k, -L, L))`, `k = 30 - ceil(log2(n)) - m`,
    /// `L = 2^(30 - ceil(log2(n)))`, and a sum is read as `A * 2^-k`, so that shifts and additions
    /// are all that a switch needs. Exponents without a finite value are treated as by
    /// [`Scale::new`].
    ///
    /// # Panics
    /// If `workers` is not in `1..=`[`WORKERS_MAX`].
    #[must_use]
    pub fn fixed_point(exponent: Exponent, workers: u32) -> Self {
        Self::of_fixed_point(exponent, workers, power_of_two(SUM_MAX_LOG2 - log2_ceil(workers)))
    }

    /// As [`Self::fixed_point`] for a number that is a whole sum already: it is cut to what an
    /// `i32` holds only. A sum that was read and rounded to bfloat16 is an integer in this scale,
    /// and reads as the very same bits again.
    ///
    /// # Panics
    /// If `workers` is not in `1..=`[`WORKERS_MAX`].
    #[must_use]
    pub fn fixed_point_sum(exponent: Exponent, workers: u32) -> Self {
        Self::of_fixed_point(exponent, workers, ROUNDED_SUM_MAX)
    }

    fn of_fixed_point(exponent: Exponent, workers: u32, limit: f64) -> Self {
        let mut scale = Self::new(exponent, workers);
        if let (Kind::Finite(finite), Some(m)) = (&mut scale.kind, exponent.finite()) {
            let k = SUM_MAX_LOG2 - log2_ceil(workers) - m;
            *finite = Finite {
                factor: power_of_two(k),
                least: -limit,
                limit,
                inverse: power_of_two(-k),
                inverse_mean: power_of_two(-k) / f64::from(workers),
            };
        }
        scale
    }

    /// The scale of a fixed factor, as ATP has it (§3.8): an element is written as
    /// `round_ties_even(clamp(x * f, -2^31, 2^31 - 1))`, whatever the others have. A value that
    /// does not fit becomes one of the two limits, and a NaN the upper one.
    /// [`add_saturating_le`](crate::add_saturating_le) keeps it there, so the receiver of the sum
    /// sees that it is none.
    ///
    /// # Panics
    /// If `factor` is not a finite number above zero.
    #[must_use]
    pub fn of_factor(factor: f64) -> Self {
        assert!(factor.is_finite() && factor > 0.0, "a scaling factor of {factor}");
        let inverse = 1.0 / factor;
        Self {
            kind: Kind::Finite(Finite {
                factor,
                least: f64::from(i32::MIN),
                limit: f64::from(i32::MAX),
                inverse,
                inverse_mean: inverse,
            }),
        }
    }

    /// The scaling factor `f`, where the block has one.
    #[must_use]
    pub fn factor(&self) -> Option<f64> {
        match self.kind {
            Kind::Finite(finite) => Some(finite.factor),
            Kind::Zero | Kind::NonFinite => None,
        }
    }
}

impl Finite {
    fn new(m: i16, workers: u32) -> Self {
        let n = f64::from(workers);
        let sum_max = f64::from(SUM_MAX);
        // The division by a power of two is exact, so f is within half an ulp of its definition;
        // likewise the inverses. Integer division is the floor.
        let limit = f64::from(SUM_MAX / workers as i32);
        Self {
            factor: sum_max / n * power_of_two(-m),
            least: -limit,
            limit,
            inverse: n / sum_max * power_of_two(m),
            inverse_mean: 1.0 / sum_max * power_of_two(m),
        }
    }

    /// The one multiplier that turns a sum into a value.
    pub fn inverse(&self, divisor: Divisor) -> f64 {
        match divisor {
            Divisor::One => self.inverse,
            Divisor::Workers => self.inverse_mean,
        }
    }
}

/// The smallest `c` with `workers <= 2^c`.
fn log2_ceil(workers: u32) -> i16 {
    workers.next_power_of_two().trailing_zeros() as i16
}

/// `2^m` for the exponents that a block, its fixed point or their inverse can have.
fn power_of_two(m: i16) -> f64 {
    debug_assert!((-179..=179).contains(&m));
    f64::from_bits(((i64::from(m) + 1023) as u64) << (f64::MANTISSA_DIGITS - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_two_are_exact() {
        assert_eq!(power_of_two(0), 1.0);
        assert_eq!(power_of_two(-3), 0.125);
        assert_eq!(power_of_two(-149), f64::from(f32::from_bits(1)));
        assert_eq!(power_of_two(127), f64::from(f32::from_bits(0x7f00_0000)));
    }

    #[test]
    fn factor_of_one_worker_fills_the_integer() {
        let scale = Scale::new(Exponent::from_bits(0), 1);
        assert_eq!(scale.factor(), Some(2_147_483_647.0));
    }

    #[test]
    #[should_panic(expected = "a scaling factor of inf")]
    fn a_factor_without_a_value_is_refused() {
        let _ = Scale::of_factor(f64::INFINITY);
    }

    #[test]
    #[should_panic(expected = "4097 workers, not 1..=4096")]
    fn more_workers_than_a_job_has_are_refused() {
        let _ = Scale::new(Exponent::ZERO, 4097);
    }
}
