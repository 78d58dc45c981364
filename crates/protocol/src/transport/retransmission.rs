//! When to send again: how long a round trip takes.

use core::time::Duration;

use super::mix;
use crate::machine::Instant;

/// When a worker sends again what was not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetransmissionConfig {
    /// No sooner than this after the mean round trip.
    pub floor: Duration,
    /// No later than this, however often it was in vain; where others wait too, up to half as much
    /// again (`RoundTrip::spread`).
    pub ceiling: Duration,
}

impl Default for RetransmissionConfig {
    fn default() -> Self {
        // SwitchML §6.3 uses 1 ms on hosts that poll with cores to spare. If workers share cores, a
        // scheduler's time slices are longer than that, and every wait for one would look like a
        // loss. A worker that waits in vain sends few packets at a time, so it may ask often: a
        // late worker is noticed soon.
        Self { floor: Duration::from_millis(10), ceiling: Duration::from_millis(250) }
    }
}

/// The retransmission timeout from measured round trips, as RFC 6298 has it for TCP.
#[derive(Debug)]
pub(crate) struct RoundTrip {
    config: RetransmissionConfig,
    smoothed: Option<Duration>,
    variation: Duration,
    backoff: u32,
    backed_off: Option<Instant>,
}

impl RoundTrip {
    /// Before the first measurement.
    const INITIAL_TIMEOUT: Duration = Duration::from_millis(50);

    pub(crate) const fn new(config: RetransmissionConfig) -> Self {
        Self { config, smoothed: None, variation: Duration::ZERO, backoff: 0, backed_off: None }
    }

    /// Begins anew: what was measured was another path.
    pub(crate) const fn forget(&mut self) {
        *self = Self::new(self.config);
    }

    /// Takes the round trip of a packet that was sent once: RFC 6298 (2.2) and (2.3). Only that
    /// ends a back-off (5.7): while everything is sent twice, nothing shows that the timeout is
    /// long enough.
    ///
    /// A result waits for every worker, so a round trip contains the timeouts of the others. No
    /// sample counts for more than twice the mean, or they would all drive each other up; a sample
    /// beyond the ceiling tells of a late worker, not of the path.
    pub(crate) fn measure(&mut self, round_trip: Duration) {
        self.backoff = 0;
        if round_trip > self.config.ceiling {
            return;
        }
        match self.smoothed {
            None => {
                self.smoothed = Some(round_trip);
                self.variation = round_trip / 2;
            }
            Some(smoothed) => {
                let round_trip = round_trip.min((smoothed * 2).max(self.config.floor));
                self.variation = (self.variation * 3 + smoothed.abs_diff(round_trip)) / 4;
                self.smoothed = Some((smoothed * 7 + round_trip) / 8);
            }
        }
    }

    /// Takes note that a packet which was sent again is answered. It measures nothing, but a worker
    /// that is answered does not wait in vain. So the timeout is at most doubled, or a window that
    /// was lost whole would take one full back-off after another.
    pub(crate) fn answered_again(&mut self) {
        self.backoff = self.backoff.min(1);
    }

    pub(crate) fn smoothed(&self) -> Duration {
        self.smoothed.unwrap_or_default()
    }

    /// How long a packet waits that was sent before one which is answered, if a round trip was
    /// measured: results may cross (RFC 8985, 6.2).
    pub(crate) fn overtaken(&self) -> Option<Duration> {
        Some(self.smoothed? * 5 / 4)
    }

    /// The floor is a margin above the mean: results come in trains, between which a packet ages
    /// without a sample.
    pub(crate) fn timeout(&self) -> Duration {
        let margin = (self.variation * 4).max(self.config.floor);
        let measured = self.smoothed.map_or(Self::INITIAL_TIMEOUT, |smoothed| smoothed + margin);
        let timeout = measured.saturating_mul(1 << self.backoff.min(16));
        timeout.min(self.config.ceiling.max(self.config.floor))
    }

    /// The time by which a worker that times out together with others waits longer than the
    /// timeout: from the second time on by up to half, and by another part of that every time.
    /// `own` is a number that the others do not have, as far as it is known here.
    ///
    /// Results come to all workers at once, so all would send again at once. A queue that is too
    /// short for one packet of each drops those of the same workers every time, and the job stands
    /// still.
    pub(crate) fn spread(&self, own: u64) -> Duration {
        if self.backoff == 0 {
            return Duration::ZERO;
        }
        let part = mix(own ^ u64::from(self.backoff)) % 1024;
        self.timeout() * part as u32 / 2048
    }

    /// Doubles the timeout, once in a timeout: the packets of one window run out one after the
    /// other.
    pub(crate) fn back_off(&mut self, now: Instant) {
        if self.backed_off.is_none_or(|last| now.since(last) >= self.timeout()) {
            self.backoff = self.backoff.saturating_add(1);
            self.backed_off = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn the_timeout_is_the_round_trip_and_a_margin_and_never_above_the_ceiling() {
        let mut rtt = RoundTrip::new(RetransmissionConfig { floor: ms(2), ceiling: ms(100) });
        assert_eq!(rtt.timeout(), RoundTrip::INITIAL_TIMEOUT);
        for _ in 0..100 {
            rtt.measure(ms(10));
        }
        assert!(rtt.timeout() >= ms(12) && rtt.timeout() < ms(13), "{:?}", rtt.timeout());
        for i in 0..1000 {
            rtt.measure(if i % 5 == 0 { ms(90) } else { ms(10) });
        }
        assert!(rtt.timeout() < ms(50), "some late workers do not make it much longer: {:?}", rtt.timeout());
        let before = rtt.timeout();
        for _ in 0..100 {
            rtt.measure(ms(3000));
        }
        assert_eq!(rtt.timeout(), before, "a wait for a late worker is no round trip");
        for _ in 0..100 {
            rtt.measure(ms(99));
        }
        assert_eq!(rtt.timeout(), ms(100));
    }

    #[test]
    fn a_timeout_doubles_once_in_its_own_length_until_a_packet_that_was_sent_once_is_answered() {
        let mut rtt = RoundTrip::new(RetransmissionConfig { floor: ms(2), ceiling: ms(100) });
        for _ in 0..100 {
            rtt.measure(ms(8));
        }
        let at = |ms: u64| Instant(ms * 1_000_000);
        rtt.back_off(at(100));
        let doubled = rtt.timeout();
        assert!(doubled >= ms(20));
        rtt.back_off(at(101));
        assert_eq!(rtt.timeout(), doubled, "the next packet of the same window");
        rtt.back_off(at(130));
        assert_eq!(rtt.timeout(), doubled * 2);
        rtt.measure(ms(8));
        assert!(rtt.timeout() < ms(11));
    }

    #[test]
    fn those_who_time_out_together_wait_differently_long_from_the_second_time_on() {
        let mut rtt = RoundTrip::new(RetransmissionConfig { floor: ms(2), ceiling: ms(100) });
        rtt.measure(ms(8));
        assert_eq!(rtt.spread(1), Duration::ZERO);
        let mut before = [Duration::ZERO; 3];
        for at in [1, 2, 3] {
            rtt.back_off(Instant(at * 1_000_000_000));
            let spread = [0, 1, 2].map(|own| rtt.spread(own));
            assert!(spread.iter().all(|wait| *wait < rtt.timeout() / 2), "{spread:?}");
            assert!(spread[0] != spread[1] && spread[1] != spread[2] && spread[0] != spread[2], "{spread:?}");
            assert!(spread.iter().zip(before).all(|(wait, before)| *wait != before), "{spread:?} {before:?}");
            before = spread;
        }
    }
}
