//! An hour of samples, in bounded memory.

use std::collections::{BTreeMap, VecDeque};

use super::view::{History, JobSeries, ServiceSeries};

/// Samples that are kept: an hour, where somebody looks all the time.
pub(super) const SAMPLES_MAX: usize = 3600;
/// Seconds that are kept.
pub(super) const KEPT: f64 = 3600.0;
/// Services and jobs with a history. With both, it takes at most 13 MB: (64 × 4 + 100 × 5) series of
/// 3,600 numbers of four bytes, in places for 4,096.
const SERVICES_MAX: usize = 64;
pub(super) const JOBS_MAX: usize = 100;

/// The numbers of a service: received, sent, resent, dropped.
pub(super) type OfService = [Option<f64>; 4];
/// The numbers of a job: summed, resent, lost, steps, in sums.
pub(super) type OfJob = [Option<f64>; 5];

#[derive(Debug)]
pub(super) struct Samples {
    times: VecDeque<f64>,
    services: Series<4>,
    jobs: Series<5>,
}

/// By name: a number for each time, NaN for none.
#[derive(Debug)]
struct Series<const N: usize> {
    rows: BTreeMap<String, [VecDeque<f32>; N]>,
    most: usize,
}

impl Default for Samples {
    fn default() -> Self {
        let times = VecDeque::new();
        Self { times, services: Series::at_most(SERVICES_MAX), jobs: Series::at_most(JOBS_MAX) }
    }
}

impl Samples {
    pub fn take(&mut self, now: f64, services: &[(&str, OfService)], jobs: &[(&str, OfJob)]) {
        let old = self.times.iter().take_while(|time| **time < now - KEPT).count();
        let old = old.max((self.times.len() + 1).saturating_sub(SAMPLES_MAX));
        self.times.drain(..old);
        self.services.take(old, self.times.len(), services);
        self.jobs.take(old, self.times.len(), jobs);
        self.times.push_back(now);
    }

    /// The samples after a time.
    pub fn after(&self, since: f64) -> History {
        let from = self.times.iter().take_while(|time| **time <= since).count();
        let services = self.services.rows.iter().map(|(name, rows)| {
            let [received, sent, resent, dropped] = rows.each_ref().map(|row| told(row, from));
            (name.clone(), ServiceSeries { received, sent, resent, dropped })
        });
        let jobs = self.jobs.rows.iter().map(|(name, rows)| {
            let [summed, resent, lost, steps, in_sums] = rows.each_ref().map(|row| told(row, from));
            (name.clone(), JobSeries { summed, resent, lost, steps, in_sums })
        });
        History {
            times: self.times.iter().skip(from).copied().collect(),
            services: services.collect(),
            jobs: jobs.collect(),
        }
    }
}

impl<const N: usize> Series<N> {
    const fn at_most(most: usize) -> Self {
        Self { rows: BTreeMap::new(), most }
    }

    /// Forgets the oldest, and takes the numbers of one more time after so many.
    fn take(&mut self, old: usize, times: usize, values: &[(&str, [Option<f64>; N])]) {
        self.rows.retain(|_, rows| {
            rows.iter_mut().for_each(|row| drop(row.drain(..old)));
            rows.iter().flatten().any(|value| !value.is_nan())
        });
        for (name, _) in values {
            if !self.rows.contains_key(*name) && self.rows.len() == self.most {
                // What is over makes way.
                let over = self.rows.keys().find(|known| !values.iter().any(|(name, _)| name == known));
                if let Some(over) = over.cloned() {
                    self.rows.remove(&over);
                }
            }
            if !self.rows.contains_key(*name) && self.rows.len() < self.most {
                let row = || VecDeque::from(vec![f32::NAN; times]);
                self.rows.insert((*name).to_owned(), std::array::from_fn(|_| row()));
            }
        }
        for (name, rows) in &mut self.rows {
            let now = values.iter().find(|(known, _)| known == name).map_or([None; N], |(_, now)| *now);
            for (row, value) in rows.iter_mut().zip(now) {
                row.push_back(value.map_or(f32::NAN, |value| value as f32));
            }
        }
    }
}

fn told(row: &VecDeque<f32>, from: usize) -> Vec<Option<f32>> {
    row.iter()
        .skip(from)
        .map(|value| Some(*value).filter(|value| value.is_finite()).map(four_digits))
        .collect()
}

/// Four digits: more are noise.
fn four_digits(value: f32) -> f32 {
    if value == 0.0 {
        return value;
    }
    let unit = 10f64.powi(f64::from(value).abs().log10().floor() as i32 - 3);
    ((f64::from(value) / unit).round() * unit) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_hour_is_kept_and_who_asks_gets_what_is_new() {
        let mut samples = Samples::default();
        for second in 0..10_000 {
            let value = [Some(f64::from(second)), None, None, None];
            samples.take(f64::from(second), &[("a", value)], &[]);
        }
        let all = samples.after(0.0);
        assert_eq!((all.times.len(), all.times[0]), (SAMPLES_MAX, 6400.0));
        assert_eq!(all.services["a"].received.len(), SAMPLES_MAX);
        let new = samples.after(9997.0);
        assert_eq!(new.times, [9998.0, 9999.0]);
        assert_eq!(
            (&new.services["a"].received, &new.services["a"].sent),
            (&vec![Some(9998.0), Some(9999.0)], &vec![None, None])
        );
    }

    #[test]
    fn who_comes_later_or_is_gone_has_gaps_and_is_forgotten_in_the_end() {
        let mut samples = Samples::default();
        let value = [Some(1.0); 5];
        samples.take(0.0, &[], &[("old", value)]);
        samples.take(1.0, &[], &[("new", value)]);
        let all = samples.after(-1.0);
        assert_eq!(
            (&all.jobs["old"].steps, &all.jobs["new"].steps),
            (&vec![Some(1.0), None], &vec![None, Some(1.0)])
        );
        samples.take(KEPT + 0.5, &[], &[]);
        assert_eq!(samples.after(-1.0).jobs.keys().collect::<Vec<_>>(), ["new"]);
    }

    #[test]
    fn a_thousand_jobs_take_no_more_than_a_hundred() {
        let names: Vec<_> = (0..1000).map(|job| format!("job {job}")).collect();
        let mut samples = Samples::default();
        let jobs: Vec<_> = names.iter().map(|name| (name.as_str(), [Some(1.0); 5])).collect();
        samples.take(0.0, &[], &jobs);
        assert_eq!(samples.after(-1.0).jobs.len(), JOBS_MAX);
        samples.take(1.0, &[], &[("new", [Some(1.0); 5])]);
        let jobs = samples.after(-1.0).jobs;
        assert!(jobs.len() == JOBS_MAX && jobs.contains_key("new"), "what is over makes way");
    }

    #[test]
    fn numbers_have_four_digits() {
        assert_eq!([0.0, 0.123_456, 98_765.4, -1.0].map(four_digits), [0.0, 0.1235, 98_770.0, -1.0]);
    }
}
