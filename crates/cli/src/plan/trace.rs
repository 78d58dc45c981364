//! A training's step as timelines have it (FANIN_TRACE): how long it computes before each of its
//! sums. Its time on other links, or with faster processors, follows from that.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use fanin_wire::Dtype;
use serde::{Deserialize, Serialize};

/// How often a step has to repeat.
const REPEATS_MIN: usize = 3;
/// Bytes that travel for each byte that is summed, with headers and an MTU of 1500.
const HEADERS: f64 = 1.06;

/// A step of synchronous training, in seconds from when all sums of the step before are there.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Step {
    sums: Vec<Sum>,
    /// What it took where it was recorded.
    measured_s: f64,
    /// The steps whose medians these are.
    steps: usize,
    ranks: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Sum {
    bytes: f64,
    /// When the slowest rank asks for it.
    ready_s: f64,
}

/// A sum of one rank, in microseconds of its clock.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Asked {
    bytes: usize,
    submitted: f64,
    done: f64,
}

#[derive(Deserialize)]
struct Event {
    ph: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    pid: u64,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: serde_json::Value,
}

#[derive(Deserialize)]
struct AllReduce {
    number: u64,
    job: String,
    elements: usize,
    dtype: String,
    error: Option<String>,
}

/// By job, rank and number.
type Jobs = BTreeMap<String, BTreeMap<u64, BTreeMap<u64, Asked>>>;

impl Step {
    /// The step that repeats in the timelines of a job's ranks: one rank, or all.
    pub fn read(paths: &[PathBuf]) -> anyhow::Result<Self> {
        let mut jobs = Jobs::new();
        for path in paths {
            read(path, &mut jobs)?;
        }
        let bytes = |ranks: &BTreeMap<u64, BTreeMap<u64, Asked>>| {
            ranks.values().flat_map(BTreeMap::values).map(|asked| asked.bytes).sum::<usize>()
        };
        let Some((job, ranks)) = jobs.into_iter().max_by_key(|(_, ranks)| bytes(ranks)) else {
            bail!(
                "no all-reduce that came out well is in the trace: FANIN_TRACE=trace.json writes one of a training"
            );
        };
        let of_ranks: Vec<Vec<Asked>> =
            ranks.into_values().map(|sums| sums.into_values().collect()).collect();
        Self::of(&of_ranks).with_context(|| format!("in the trace of job {job:?}"))
    }

    fn of(ranks: &[Vec<Asked>]) -> anyhow::Result<Self> {
        let steps: Vec<Self> = ranks.iter().map(|sums| of_rank(sums)).collect::<Result<_, _>>()?;
        let (first, others) = steps.split_first().expect("a job has a rank");
        let mut step = Self { ranks: ranks.len(), ..first.clone() };
        for other in others {
            let alike = step.sums.iter().map(|sum| sum.bytes).eq(other.sums.iter().map(|sum| sum.bytes));
            ensure!(alike, "its ranks have unlike steps: give the files of one run");
            // All wait for the slowest.
            for (sum, theirs) in step.sums.iter_mut().zip(&other.sums) {
                sum.ready_s = sum.ready_s.max(theirs.ready_s);
            }
            step.measured_s = step.measured_s.max(other.measured_s);
            step.steps = step.steps.min(other.steps);
        }
        Ok(step)
    }

    /// With processors that are so many times as fast.
    pub fn computing_faster(mut self, times: f64) -> Self {
        self.sums.iter_mut().for_each(|sum| sum.ready_s /= times);
        self
    }

    pub fn bytes(&self) -> u64 {
        self.sums.iter().map(|sum| sum.bytes as u64).sum()
    }

    /// What it takes if sums take so long, one after the other.
    pub fn time_s(&self, seconds_per_byte: f64) -> f64 {
        self.sums
            .iter()
            .fold(0.0, |free: f64, sum| free.max(sum.ready_s) + sum.bytes * HEADERS * seconds_per_byte)
    }

    /// For people: the line above the table.
    pub fn shown(&self, faster: f64) -> String {
        let faster =
            if faster == 1.0 { String::new() } else { format!(" ({faster} times as fast as there)") };
        format!(
            "A step of {} sum{}, {:.1} MB. Computing alone takes {:.1} ms{faster}. Medians of {} steps of {} rank{}; with \
             the sums, a step took {:.1} ms there",
            self.sums.len(),
            plural(self.sums.len()),
            self.bytes() as f64 / 1e6,
            self.time_s(0.0) * 1e3,
            self.steps,
            self.ranks,
            plural(self.ranks),
            self.measured_s * 1e3,
        )
    }
}

fn read(path: &Path, jobs: &mut Jobs) -> anyhow::Result<()> {
    let name = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read the trace {name}"))?;
    let events: Vec<Event> = serde_json::from_str(&text)
        .with_context(|| format!("{name} is no timeline, such as FANIN_TRACE=trace.json writes"))?;
    for Event { ph, name: slice, pid, ts, dur, args } in events {
        if ph != "X" || !slice.starts_with("all-reduce ") {
            continue;
        }
        let sum: AllReduce = serde_json::from_value(args)
            .with_context(|| format!("{name}: {slice} has not what FANIN_TRACE writes of it"))?;
        if sum.error.is_some() {
            continue;
        }
        let dtype = Dtype::ALL.into_iter().find(|dtype| dtype.name() == sum.dtype);
        let dtype = dtype.with_context(|| format!("{name}: {slice} has the dtype {:?}", sum.dtype))?;
        let asked = Asked { bytes: sum.elements * dtype.element_bytes(), submitted: ts, done: ts + dur };
        // A shard has a slice of its own.
        let of_rank = jobs.entry(sum.job).or_default().entry(pid).or_default();
        let known = of_rank.entry(sum.number).or_insert(asked);
        known.submitted = known.submitted.min(asked.submitted);
        known.done = known.done.max(asked.done);
    }
    Ok(())
}

/// The step that a rank's sums, in their order, repeat.
fn of_rank(sums: &[Asked]) -> anyhow::Result<Step> {
    let before: Vec<f64> = sums
        .iter()
        .scan(f64::NEG_INFINITY, |latest, sum| {
            let before = *latest;
            *latest = latest.max(sum.done);
            Some(before)
        })
        .collect();
    let Some((first, length)) = repeated(sums, &before) else {
        bail!(
            "no step repeats {REPEATS_MIN} times, with all its sums done before the next one's begin: record some steps \
             more, of DistributedDataParallel or another synchronous optimizer that does not sum under the next forward pass"
        );
    };
    let count = (sums.len() - first) / length;
    let begins = || (0..count).map(|step| first + step * length);
    let seconds = |micros: f64| micros / 1e6;
    let of_step = |place: usize| Sum {
        bytes: sums[first + place].bytes as f64,
        ready_s: seconds(median(begins().map(|begin| sums[begin + place].submitted - before[begin]))),
    };
    let took = begins().map(|begin| {
        let done = sums[begin..begin + length].iter().map(|sum| sum.done).fold(f64::NEG_INFINITY, f64::max);
        done - before[begin]
    });
    Ok(Step {
        sums: (0..length).map(of_step).collect(),
        measured_s: seconds(median(took)),
        steps: count,
        ranks: 1,
    })
}

/// The first sum of the first step, and how many sums each step has, up to the end. A step is as
/// short as can be. It begins after a pause: all sums before it are done. If it has several pauses,
/// it begins after the longest.
fn repeated(sums: &[Asked], before: &[f64]) -> Option<(usize, usize)> {
    (1..=sums.len() / REPEATS_MIN).find_map(|length| {
        let unlike = (length..sums.len()).rev().find(|at| sums[*at].bytes != sums[*at - length].bytes);
        // The first sum has none before it that it could wait for.
        let from = unlike.map_or(0, |at| at + 1 - length).max(1);
        let pause = |first: usize| {
            let pauses = (first..sums.len()).step_by(length).map(|at| sums[at].submitted - before[at]);
            pauses.fold(f64::INFINITY, f64::min)
        };
        let first = (from..from + length).max_by(|a, b| pause(*a).total_cmp(&pause(*b)))?;
        let repeats = sums.len().saturating_sub(first) / length;
        (repeats >= REPEATS_MIN && pause(first) > 0.0).then_some((first, length))
    })
}

const fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of sums. Each sum is asked for so many microseconds after the step before, has so many
    /// bytes, and takes a microsecond a byte.
    fn recorded(warm_up: &[usize], step: &[(f64, usize)], steps: usize) -> Vec<Asked> {
        let mut sums = Vec::new();
        let mut free = 0.0;
        for bytes in warm_up {
            sums.push(Asked { bytes: *bytes, submitted: free, done: free + 1.0 });
            free += 1.0;
        }
        for _ in 0..steps {
            let begin = free;
            for (ready, bytes) in step {
                let submitted = begin + ready;
                free = f64::max(free, submitted) + *bytes as f64;
                sums.push(Asked { bytes: *bytes, submitted, done: free });
            }
        }
        sums
    }

    #[test]
    fn the_step_that_repeats_is_found_behind_what_came_once() {
        let step = [(100.0, 40), (110.0, 40), (160.0, 7)];
        let found = of_rank(&recorded(&[3, 3, 3, 3, 40], &step, 4)).expect("it repeats");
        let ready: Vec<f64> = found.sums.iter().map(|sum| (sum.ready_s * 1e6).round()).collect();
        assert_eq!((ready, found.steps, found.bytes()), (vec![100.0, 110.0, 160.0], 4, 87));
        // The second sum ends at 180, and then the third one takes 7.
        assert_eq!((found.measured_s * 1e6).round(), 187.0);
        assert_eq!((found.time_s(1e-6 / HEADERS) * 1e6).round(), 187.0, "as fast as there");
        assert_eq!((found.time_s(0.0) * 1e6).round(), 160.0, "no sum takes time");
        assert_eq!(
            (found.computing_faster(10.0).time_s(1e-6 / HEADERS) * 1e6).round(),
            97.0,
            "10, and all sums"
        );
    }

    #[test]
    fn sums_of_one_length_are_a_step_where_they_wait_for_computing() {
        let found = of_rank(&recorded(&[], &[(50.0, 100), (60.0, 100)], 5)).expect("it repeats");
        assert_eq!((found.sums.len(), found.steps), (2, 4));
    }

    #[test]
    fn all_wait_for_the_slowest_rank() {
        let of = |first: f64, second: f64| recorded(&[5], &[(first, 10), (second, 20)], 3);
        let found = Step::of(&[of(60.0, 80.0), of(50.0, 90.0)]).expect("alike");
        let ready: Vec<f64> = found.sums.iter().map(|sum| (sum.ready_s * 1e6).round()).collect();
        assert_eq!((ready, found.ranks), (vec![60.0, 90.0], 2));
        let unlike = Step::of(&[of(60.0, 80.0), recorded(&[5], &[(30.0, 10)], 4)]).expect_err("unlike");
        assert!(unlike.to_string().contains("one run"), "{unlike}");
    }

    #[test]
    fn what_does_not_repeat_or_sums_under_the_next_forward_pass_is_told() {
        let once = recorded(&[1, 2, 3, 4, 5, 6], &[], 0);
        let overlapping: Vec<Asked> =
            (0..30).map(|i| Asked { bytes: 1 + i % 2, submitted: i as f64, done: i as f64 + 5.0 }).collect();
        for sums in [Vec::new(), once, overlapping] {
            let error = of_rank(&sums).expect_err("no step").to_string();
            assert!(error.contains("repeats") && error.contains("forward"), "{error}");
        }
    }
}
