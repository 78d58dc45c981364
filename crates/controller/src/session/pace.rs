//! Whether large all-reduces take as long as planned.
//!
//! The naive way compares the time of an all-reduce with the plan. It blames a link for a rank that
//! computes longer, as all others wait for it. So a tensor's time counts from its first result:
//! all ranks have begun with it by then. A plan does not fit when many tensors in a row
//! are too slow: other traffic, or a rank that pauses, slows some of them.

use std::time::{Duration, Instant};

/// A tensor that takes as many times as long as planned is too slow.
const TOO_SLOW: f64 = 2.0;
/// As many are too slow in a row.
const IN_A_ROW: u32 = 8;
/// They are for as long.
const SUSTAINED: Duration = Duration::from_secs(2);

/// The large all-reduces of a job, held against its plan.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// The seconds a byte that the plan says, if there is one.
    planned: Option<f64>,
    /// The last ones, if they were too slow.
    slow: Option<Slow>,
    verdict: Verdict,
}

/// All-reduces in a row that were too slow.
#[derive(Clone, Copy, Debug)]
struct Slow {
    /// The first one ended.
    since: Instant,
    count: u32,
    /// The seconds a byte of the fastest one.
    fastest: f64,
}

#[derive(Debug, Default)]
enum Verdict {
    #[default]
    Fits,
    /// Nobody was told yet.
    Misfit(f64),
    Told,
}

impl Pace {
    pub const fn planned(seconds_per_byte: Option<f64>) -> Self {
        Self { planned: seconds_per_byte, slow: None, verdict: Verdict::Fits }
    }

    /// Notes a large all-reduce that ended now, and took so many seconds a byte.
    pub fn note(&mut self, now: Instant, seconds_per_byte: f64) {
        let Some(planned) = self.planned else { return };
        if seconds_per_byte < TOO_SLOW * planned {
            self.slow = None;
            return;
        }
        let slow = self.slow.get_or_insert(Slow { since: now, count: 0, fastest: seconds_per_byte });
        slow.count += 1;
        slow.fastest = slow.fastest.min(seconds_per_byte);
        let is_sustained = now.saturating_duration_since(slow.since) >= SUSTAINED;
        if slow.count >= IN_A_ROW && is_sustained && matches!(self.verdict, Verdict::Fits) {
            self.verdict = Verdict::Misfit(slow.fastest);
        }
    }

    /// The fastest all-reduce that does not fit the plan, in seconds a byte: returned once.
    pub fn misfit(&mut self) -> Option<f64> {
        let Verdict::Misfit(fastest) = self.verdict else { return None };
        self.verdict = Verdict::Told;
        Some(fastest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plan of a second a byte, and all-reduces that end each so many milliseconds.
    fn verdict(every_ms: u64, took: &[f64]) -> Option<f64> {
        let mut pace = Pace::planned(Some(1.0));
        noted(&mut pace, every_ms, took);
        pace.misfit()
    }

    fn noted(pace: &mut Pace, every_ms: u64, took: &[f64]) {
        let mut now = Instant::now();
        for seconds in took {
            now += Duration::from_millis(every_ms);
            pace.note(now, *seconds);
        }
    }

    #[test]
    fn a_plan_fits_if_less_than_twice_its_time_is_taken() {
        assert_eq!(verdict(1000, &[1.99; 100]), None);
    }

    #[test]
    fn a_plan_does_not_fit_if_twice_its_time_is_taken_for_long() {
        assert_eq!(verdict(1000, &[2.0; 8]), Some(2.0));
        assert_eq!(verdict(1000, &[4.0, 2.5, 4.0, 3.0, 4.0, 4.0, 4.0, 4.0]), Some(2.5), "at least so long");
    }

    #[test]
    fn a_few_or_a_moment_say_nothing() {
        assert_eq!(verdict(10_000, &[9.0; 7]), None);
        assert_eq!(verdict(20, &[9.0; 100]), None, "1.98 s");
        assert_eq!(verdict(20, &[9.0; 101]), Some(9.0));
    }

    #[test]
    fn one_that_takes_as_long_as_planned_acquits_those_before() {
        let mut took = [9.0; 15];
        took[7] = 1.0;
        assert_eq!(verdict(1000, &took), None);
    }

    #[test]
    fn a_misfit_is_told_once() {
        let mut pace = Pace::planned(Some(1.0));
        for told in [Some(3.0), None] {
            noted(&mut pace, 1000, &[3.0; 20]);
            assert_eq!(pace.misfit(), told);
            noted(&mut pace, 1000, &[1.0]);
        }
    }

    #[test]
    fn nothing_is_held_against_no_plan() {
        let mut pace = Pace::planned(None);
        noted(&mut pace, 1000, &[9.0; 100]);
        assert_eq!(pace.misfit(), None);
    }
}
