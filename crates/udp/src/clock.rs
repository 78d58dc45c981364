//! The drivers' clock.

use fanin_protocol::Instant;
use rustix::time::{ClockId, clock_gettime};

/// `CLOCK_MONOTONIC`, which all processes of a machine read alike: nanoseconds since it booted.
#[derive(Clone, Copy, Debug)]
pub struct Clock;

impl Clock {
    /// The time.
    #[must_use]
    pub fn now(self) -> Instant {
        let time = clock_gettime(ClockId::Monotonic);
        // Neither is negative, and the sum lasts for five centuries.
        Instant(time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_goes_on() {
        let first = Clock.now();
        assert!(first > Instant(0) && Clock.now() >= first);
    }
}
