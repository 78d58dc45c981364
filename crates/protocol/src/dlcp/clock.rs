//! A driver's clock that is set back, made one that only goes forward.

use crate::machine::Instant;

/// Timers that were missed while a clock stood still or jumped ahead are due at once, each timer
/// once. If the clock is set back, timers would wait for as long: so from there on the machine's
/// own time runs ahead of the driver's.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Clock {
    /// The driver's time, when it was read last.
    read: Instant,
    /// By how much the machine's time is ahead, in nanoseconds.
    ahead: u64,
}

impl Clock {
    /// The machine's time at the driver's `now`.
    pub(super) fn read(&mut self, now: Instant) -> Instant {
        self.ahead += self.read.0.saturating_sub(now.0);
        self.read = now;
        Instant(now.0.saturating_add(self.ahead))
    }

    /// The driver's time at the machine's `due`.
    pub(super) const fn due(&self, due: Instant) -> Instant {
        Instant(due.0.saturating_sub(self.ahead))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_goes_on_where_the_clock_is_set_back() {
        let mut clock = Clock::default();
        assert_eq!([10, 30, 20, 25].map(|now| clock.read(Instant(now)).0), [10, 30, 30, 35]);
        assert_eq!(clock.due(Instant(40)), Instant(30));
    }
}
