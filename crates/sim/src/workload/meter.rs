//! How fast a worker is: what it completed in a window, by the window's length.

use std::time::Duration;

use fanin_protocol::Instant;

/// How many must be completed for each one under way before the time between completions says
/// something.
const COMPLETED_PER_IN_FLIGHT: u64 = 3;

/// Counts completions of one kind (tensors of the micro-benchmark, iterations of training) in the
/// window of a measurement. The window is from the warm-up's end, or the job's start if that is
/// later, to the job's end or the run's.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Meter {
    begin: Instant,
    /// Completed within the window.
    counted: u64,
    /// For the first of these, the share of its time that is in the window: it may have begun
    /// before.
    of_first: f64,
    /// When the one before was completed, or the job began.
    last: Instant,
}

impl Meter {
    pub(crate) fn new(start: Duration, warm_up: Duration) -> Self {
        let start = Instant(0) + start;
        Self { begin: start.max(Instant(0) + warm_up), counted: 0, of_first: 1.0, last: start }
    }

    /// One was completed.
    pub(crate) fn count(&mut self, now: Instant) {
        if now > self.begin {
            if self.counted == 0 && self.last < self.begin {
                self.of_first = now.since(self.begin).div_duration_f64(now.since(self.last));
            }
            self.counted += 1;
        }
        self.last = now;
    }

    /// The reading of the window that ends at `end`, when `in_flight` are under way at once; if the
    /// run's end cut it short, the next are.
    pub(crate) fn read(&self, end: Instant, is_cut: bool, in_flight: u64) -> Reading {
        let window = end.since(self.begin);
        let mut per_second = 0.0;
        if self.counted > 0 && !window.is_zero() {
            let mut completed = self.counted as f64 - 1.0 + self.of_first;
            if is_cut {
                // The next one counts as much as a mean one had got by then, but never more than
                // all of it: a job that stands still loses.
                let mean = self.last.since(self.begin).div_f64(completed);
                completed += end.since(self.last).div_duration_f64(mean).min(1.0);
            }
            per_second = completed / window.as_secs_f64();
        }
        Reading { per_second, window, completed: self.counted, needed: COMPLETED_PER_IN_FLIGHT * in_flight }
    }
}

/// The reading of a meter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Reading {
    pub(crate) per_second: f64,
    pub(crate) window: Duration,
    /// Within the window, and how many there must be to say something.
    pub(crate) completed: u64,
    pub(crate) needed: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(time: u64) -> Duration {
        Duration::from_millis(time)
    }

    /// The reading of a meter for 10 to 40 ms of a run, in which completions were at these times,
    /// in milliseconds.
    fn read(completions: impl IntoIterator<Item = u64>) -> Reading {
        let mut meter = Meter::new(Duration::ZERO, ms(10));
        completions.into_iter().for_each(|at| meter.count(Instant(0) + ms(at)));
        meter.read(Instant(0) + ms(40), true, 2)
    }

    #[test]
    fn a_steady_pace_is_measured_whatever_is_under_way_at_both_ends() {
        for every in 1..6 {
            for first in 1..=every {
                let reading = read((first..=40).step_by(every as usize));
                let expected = 1000.0 / every as f64;
                assert!((reading.per_second / expected - 1.0).abs() < 1e-9, "{every} {first}: {reading:?}");
            }
        }
    }

    #[test]
    fn who_stops_half_way_has_half_the_throughput() {
        let (whole, half) = (read(1..=40), read(1..=25));
        assert_eq!((whole.completed, half.completed), (30, 15));
        // And the one that could be under way.
        assert!((half.per_second / whole.per_second - 16.0 / 30.0).abs() < 1e-9, "{half:?}");
    }

    #[test]
    fn who_begins_late_loses_the_time_before() {
        let reading = read([39, 40]);
        assert!(reading.per_second < 2.0 / 0.030 + 1e-9, "{reading:?}");
    }

    #[test]
    fn after_the_last_of_a_job_nothing_is_under_way() {
        let mut meter = Meter::new(ms(1), Duration::ZERO);
        (2..=11).for_each(|at| meter.count(Instant(0) + ms(at)));
        let reading = meter.read(Instant(0) + ms(21), false, 1);
        assert!((reading.per_second / 500.0 - 1.0).abs() < 1e-9, "10 in 20 ms: {reading:?}");
    }

    #[test]
    fn too_few_are_told() {
        let enough = |reading: Reading| reading.completed >= reading.needed;
        assert!(enough(read([13, 14, 15, 16, 17, 18])), "three for each of two that are under way");
        assert!(!enough(read([9, 10, 13, 14, 15, 16, 17])), "two were before");
        let nothing = read([]);
        assert_eq!((nothing.per_second, nothing.completed), (0.0, 0));
        assert_eq!(read([1]).per_second, 0.0);
    }
}
