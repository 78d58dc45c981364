//! Virtual time.

use std::fmt;
use std::ops::{Add, Sub};
use std::time::Duration;

use fanin_protocol::Instant;

use crate::agenda::Moment;

/// A point in virtual time, or a length of it, in picoseconds: a byte at 100 Gbit/s takes 80 of
/// them. Reaches 213 days.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(pub u64);

impl Time {
    /// The beginning.
    pub const ZERO: Self = Self(0);
    /// Later than everything.
    pub const MAX: Self = Self(u64::MAX);

    /// From nanoseconds.
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos.saturating_mul(1000))
    }

    /// From microseconds.
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self::from_nanos(micros.saturating_mul(1000))
    }

    /// From milliseconds.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self::from_micros(millis.saturating_mul(1000))
    }

    /// The time as a machine sees it: the whole nanoseconds that have passed.
    #[must_use]
    pub const fn instant(self) -> Instant {
        Instant(self.0 / 1000)
    }

    /// In seconds, to print or to divide by.
    #[must_use]
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e12
    }

    /// Time since `earlier`; zero if that is later.
    #[must_use]
    #[inline]
    pub const fn since(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }
}

impl Moment for Time {
    #[inline]
    fn to_ticks(self) -> u64 {
        self.0
    }

    #[inline]
    fn from_ticks(ticks: u64) -> Self {
        Self(ticks)
    }
}

impl From<Instant> for Time {
    fn from(instant: Instant) -> Self {
        Self::from_nanos(instant.0)
    }
}

impl From<Duration> for Time {
    fn from(duration: Duration) -> Self {
        u64::try_from(duration.as_nanos()).map_or(Self::MAX, Self::from_nanos)
    }
}

impl Add for Time {
    type Output = Self;

    #[inline]
    fn add(self, later: Self) -> Self {
        Self(self.0.saturating_add(later.0))
    }
}

impl Add<Duration> for Time {
    type Output = Self;

    #[inline]
    fn add(self, later: Duration) -> Self {
        self + Self::from(later)
    }
}

impl Sub for Time {
    type Output = Self;

    #[inline]
    fn sub(self, earlier: Self) -> Self {
        self.since(earlier)
    }
}

impl fmt::Display for Time {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:.6} s", self.as_secs_f64())
    }
}
