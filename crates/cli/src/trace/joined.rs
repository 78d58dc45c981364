//! The timelines of all ranks on one clock.
//!
//! Clocks of several machines differ. The sums themselves say by how much: all ranks have a sum at
//! about the same time, however late one of them asked for it, as it comes from who summed it to all
//! at once. And nobody has a sum before all have begun to send for it, which no clock can
//! contradict. Clocks also drift, so that each stretch of time is compared by itself.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use serde_json::Value;

/// Over so much time, in microseconds, clocks differ by one number: they drift by a few microseconds
/// in a second.
const STRETCH_US: f64 = 10e6;

/// A run on the clock of its first rank.
#[derive(Debug, Serialize)]
pub(super) struct Joined {
    /// By rank.
    pub ranks: Vec<RankOnTime>,
    /// Sums that all ranks have asked for.
    pub sums: usize,
    #[serde(skip)]
    events: Vec<Value>,
}

/// A rank, compared with the others.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct RankOnTime {
    pub rank: u64,
    /// As its timeline calls it.
    pub name: String,
    /// By how much its clock is ahead of the first rank's, in seconds, in the middle of the run.
    pub ahead_s: f64,
    /// On that clock, nineteen of twenty sums ended at both ranks within so many seconds of each
    /// other.
    pub within_s: f64,
    /// The part of the sums that it asked for last, by more than that.
    pub last: f64,
    /// How long after the last of the others it asked for these: the median.
    pub later_s: Option<f64>,
}

/// A rank's timeline.
struct Timeline {
    rank: u64,
    name: String,
    events: Vec<Value>,
    /// By job and number.
    sums: BTreeMap<(String, u64), Times>,
}

/// A sum at one rank, in microseconds of its clock.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Times {
    submitted: f64,
    /// When the first shard began to send.
    sent: f64,
    done: f64,
}

/// By how much a clock is ahead of another, at moments of its own.
struct Clock {
    /// Moment and difference.
    known: Vec<(f64, f64)>,
    within: f64,
}

/// The sums of a stretch of time, at two ranks.
struct Stretch {
    /// By how much later each ended, by its own clock.
    ahead: Vec<f64>,
    /// When they ended, added up.
    moments: f64,
    /// A clock is ahead by so much at least ..
    least: f64,
    /// .. and at most.
    most: f64,
}

impl Default for Stretch {
    fn default() -> Self {
        Self { ahead: Vec::new(), moments: 0.0, least: f64::NEG_INFINITY, most: f64::INFINITY }
    }
}

/// The median of some numbers, which it sorts.
fn median(numbers: &mut [f64]) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(f64::NAN)
}

impl Joined {
    /// Joins timelines, of one run and different ranks.
    ///
    /// # Errors
    /// When a file is none, or has no sum in common with the first.
    pub fn read(paths: &[PathBuf]) -> anyhow::Result<Self> {
        let mut timelines = paths.iter().map(|path| Timeline::read(path)).collect::<Result<Vec<_>, _>>()?;
        timelines.sort_by_key(|timeline| timeline.rank);
        if let Some(two) = timelines.windows(2).find(|two| two[0].rank == two[1].rank) {
            bail!("two timelines are of rank {}: give one file a rank, all of one run", two[0].rank);
        }
        let (first, _) = timelines.split_first().context("no timeline is given")?;
        let clocks: Vec<Clock> =
            timelines.iter().map(|one| Clock::of(one, first)).collect::<Result<_, _>>()?;
        let asked: Vec<BTreeMap<&(String, u64), f64>> = timelines
            .iter()
            .zip(&clocks)
            .map(|(one, clock)| {
                one.sums.iter().map(|(sum, times)| (sum, clock.of_first(times.submitted))).collect()
            })
            .collect();
        let common: Vec<Vec<f64>> = first
            .sums
            .keys()
            .filter_map(|sum| asked.iter().map(|of_rank| of_rank.get(sum).copied()).collect())
            .collect();
        let mut later = vec![Vec::new(); timelines.len()];
        for of_sum in &common {
            let mut by_time: Vec<usize> = (0..of_sum.len()).collect();
            by_time.sort_by(|one, other| of_sum[*one].total_cmp(&of_sum[*other]));
            if let [.., before, last] = by_time[..]
                && of_sum[last] - of_sum[before] > clocks[last].within + clocks[before].within
            {
                later[last].push(of_sum[last] - of_sum[before]);
            }
        }
        let ranks = timelines.iter().zip(&clocks).zip(later).map(|((one, clock), mut later)| {
            let later_s = (!later.is_empty()).then(|| 1e-6 * median(&mut later));
            let middle = clock.middle();
            RankOnTime {
                rank: one.rank,
                name: one.name.clone(),
                ahead_s: 1e-6 * (middle - clock.of_first(middle)),
                within_s: 1e-6 * clock.within,
                last: later.len() as f64 / common.len().max(1) as f64,
                later_s,
            }
        });
        let (ranks, sums) = (ranks.collect(), common.len());
        let shifted = timelines.into_iter().zip(&clocks).flat_map(|(one, clock)| {
            one.events.into_iter().map(|mut event| {
                if let Some(at) = event.get("ts").and_then(Value::as_f64) {
                    event["ts"] = clock.of_first(at).into();
                }
                event
            })
        });
        Ok(Self { ranks, sums, events: shifted.collect() })
    }

    /// Writes the events of all, as chrome://tracing and Perfetto open them.
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_string(&self.events)?;
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// For people.
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::NOTHING).set_header([
            "RANK",
            "clock ahead of the first",
            "sums end within",
            "asked last",
            "after the others",
        ]);
        for rank in &self.ranks {
            let RankOnTime { name, ahead_s, within_s, last, later_s, .. } = rank;
            table.add_row([
                name.clone(),
                format!("{ahead_s:.6} s"),
                format!("{:.3} ms", 1e3 * within_s),
                format!("{:.0} %", 100.0 * last),
                later_s.map_or("-".into(), |later| format!("{:.3} ms", 1e3 * later)),
            ]);
        }
        table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        let sums = self.sums;
        format!("{}\n{sums} sums of all; a rank is last where clocks can tell", table.trim_fmt())
    }
}

impl Timeline {
    fn read(path: &Path) -> anyhow::Result<Self> {
        let name = path.display();
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read the trace {name}"))?;
        let events: Vec<Value> = serde_json::from_str(&text)
            .with_context(|| format!("{name} is no timeline, such as FANIN_TRACE=trace.json writes"))?;
        Self::of(events).with_context(|| format!("in {name}"))
    }

    fn of(events: Vec<Value>) -> anyhow::Result<Self> {
        let mut ranks: Vec<u64> = events.iter().filter_map(|event| event["pid"].as_u64()).collect();
        ranks.sort_unstable();
        ranks.dedup();
        let [rank] = ranks[..] else {
            bail!("it has {} ranks: give each rank's own file, as FANIN_TRACE writes it", ranks.len());
        };
        let named = events.iter().find(|event| event["name"] == "process_name");
        let name = named.and_then(|event| event["args"]["name"].as_str()).unwrap_or_default();
        let name = if name.is_empty() { format!("rank {rank}") } else { name.to_owned() };
        let mut sums: BTreeMap<(String, u64), Times> = BTreeMap::new();
        // The sum whose slices come next in each row.
        let mut of_row: BTreeMap<u64, (String, u64)> = BTreeMap::new();
        for event in &events {
            let (Some(slice), Some(row)) = (event["name"].as_str(), event["tid"].as_u64()) else { continue };
            let (Some(from), Some(long)) = (event["ts"].as_f64(), event["dur"].as_f64()) else { continue };
            let arguments = &event["args"];
            if slice.starts_with("all-reduce ") && arguments["error"].is_null() {
                let (Some(job), Some(number)) = (arguments["job"].as_str(), arguments["number"].as_u64())
                else {
                    bail!("{slice} has not what FANIN_TRACE writes of it");
                };
                let times = Times { submitted: from, sent: f64::INFINITY, done: from + long };
                let sum = (job.to_owned(), number);
                let known = sums.entry(sum.clone()).or_insert(times);
                known.submitted = known.submitted.min(from);
                known.done = known.done.max(from + long);
                of_row.insert(row, sum);
            } else if slice == "exchanging"
                && let Some(sum) = of_row.get(&row)
                && let Some(times) = sums.get_mut(sum)
            {
                times.sent = times.sent.min(from);
            }
        }
        Ok(Self { rank, name, events, sums })
    }
}

impl Clock {
    /// The clock of a timeline, by that of the first.
    fn of(one: &Timeline, first: &Timeline) -> anyhow::Result<Self> {
        if one.rank == first.rank {
            return Ok(Self { known: vec![(0.0, 0.0)], within: 0.0 });
        }
        let mut stretches: BTreeMap<i64, Stretch> = BTreeMap::new();
        for (sum, own) in &one.sums {
            let Some(its) = first.sums.get(sum) else { continue };
            let stretch = stretches.entry((own.done / STRETCH_US) as i64).or_default();
            stretch.ahead.push(own.done - its.done);
            stretch.moments += own.done;
            // It had begun when the first one was done, and the other way round.
            if own.sent.is_finite() && its.sent.is_finite() {
                stretch.least = stretch.least.max(own.sent - its.done);
                stretch.most = stretch.most.min(own.done - its.sent);
            }
        }
        ensure!(
            !stretches.is_empty(),
            "rank {} and rank {} have no all-reduce in common, so that their clocks cannot be compared",
            first.rank,
            one.rank
        );
        let mut known = Vec::with_capacity(stretches.len());
        for mut stretch in stretches.into_values() {
            ensure!(
                stretch.least <= stretch.most,
                "the clocks of ranks {} and {} jump against each other by {:.3} ms within {:.0} s: these are not \
                 timelines of one run, or a machine slept",
                first.rank,
                one.rank,
                1e-3 * (stretch.least - stretch.most),
                1e-6 * STRETCH_US
            );
            let moment = stretch.moments / stretch.ahead.len() as f64;
            known.push((moment, median(&mut stretch.ahead).clamp(stretch.least, stretch.most)));
        }
        let mut clock = Self { known, within: 0.0 };
        clock.within = clock.apart(one, first);
        // One machine has one clock, and nothing that was measured says otherwise.
        if clock.known.iter().all(|(_, ahead)| ahead.abs() <= clock.within) {
            clock.known = vec![(0.0, 0.0)];
            clock.within = clock.apart(one, first);
        }
        Ok(clock)
    }

    /// How far the ends of nineteen of twenty sums are from each other, on this clock.
    fn apart(&self, one: &Timeline, first: &Timeline) -> f64 {
        let both = one.sums.iter().filter_map(|(sum, own)| Some((own.done, first.sums.get(sum)?.done)));
        let mut apart: Vec<f64> = both.map(|(own, its)| (self.of_first(own) - its).abs()).collect();
        apart.sort_by(f64::total_cmp);
        apart.get((apart.len() * 19 / 20).min(apart.len().saturating_sub(1))).copied().unwrap_or(0.0)
    }

    /// The middle of the run.
    fn middle(&self) -> f64 {
        let moment = |known: Option<&(f64, f64)>| known.map_or(0.0, |(moment, _)| *moment);
        f64::midpoint(moment(self.known.first()), moment(self.known.last()))
    }

    /// A moment of its own, on the clock of the first.
    fn of_first(&self, at: f64) -> f64 {
        // Between two known moments, or beyond the last or first two.
        let next = self.known.partition_point(|(moment, _)| *moment <= at).max(1);
        let before = next.min(self.known.len().saturating_sub(1)).saturating_sub(1);
        let ahead = match self.known[before..] {
            [(from, one), (to, other), ..] => one + (other - one) * (at - from) / (to - from),
            [(_, one)] => one,
            [] => 0.0,
        };
        at - ahead
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Sums every 100 ms for half a minute, each of which the ranks exchange in 400 us. Rank 1's
    /// clock is ahead, and drifts; it asks as much later as `late_us` says.
    fn timelines(ahead_us: f64, drift: f64, late_us: f64) -> Vec<Timeline> {
        let of_rank = |rank: u64| {
            let mut events = vec![json!({
                "ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": format!("rank {rank} on m{rank}")},
            })];
            for number in 0..300_u64 {
                let asked = 1e5 * (number + 1) as f64;
                let own = if rank == 1 { late_us } else { 0.0 };
                let done = asked + late_us + 400.0;
                let clock = |at: f64| if rank == 1 { at * (1.0 + drift) + ahead_us } else { at };
                let slice = |name: String, from: f64, to: f64, args: Value| json!({"ph": "X", "pid": rank, "tid": 1, "name": name, "ts": clock(from), "dur": clock(to) - clock(from), "args": args});
                let args = json!({"number": number, "job": "j", "elements": 1, "dtype": "float32"});
                events.push(slice(format!("all-reduce {number}"), asked + own, done, args));
                events.push(slice("exchanging".into(), asked + own + 5.0, done, json!({"number": number})));
            }
            Timeline::of(events).expect("a timeline")
        };
        vec![of_rank(0), of_rank(1)]
    }

    fn joined(of: Vec<Timeline>) -> anyhow::Result<Joined> {
        let folder = tempfile::tempdir().expect("a folder");
        let paths = of.into_iter().map(|timeline| {
            let path = folder.path().join(format!("{}.json", timeline.rank));
            std::fs::write(&path, Value::from(timeline.events).to_string()).expect("written");
            path
        });
        Joined::read(&paths.collect::<Vec<_>>())
    }

    #[test]
    fn clocks_that_differ_and_drift_are_found_by_what_sums_say() {
        // Ten in a million is what a computer's quartz does.
        for (ahead_us, drift) in [(7e9, 0.0), (-3e6, 1e-5), (2_000.0, -1e-5)] {
            let found = joined(timelines(ahead_us, drift, 0.0)).expect("joined");
            let one = &found.ranks[1];
            assert!(one.within_s <= 60e-6, "half of what it drifts in ten seconds: {one:?}");
            let middle = 1e-6 * (ahead_us + drift * 15e6);
            assert!((one.ahead_s - middle).abs() <= 60e-6, "{one:?} beside {middle}");
            let begins = |rank: u64, name: &str| -> Vec<f64> {
                let its = found.events.iter().filter(|event| event["pid"] == rank && event["name"] == name);
                its.map(|event| event["ts"].as_f64().expect("a time")).collect()
            };
            for (one, other) in begins(0, "exchanging").into_iter().zip(begins(1, "exchanging")) {
                assert!((one - other).abs() <= 60.0, "{one} and {other}");
            }
        }
    }

    #[test]
    fn the_same_clock_is_left_as_it_is_and_who_is_late_is_named() {
        let found = joined(timelines(0.0, 0.0, 41_000.0)).expect("joined");
        let [first, late] = &found.ranks[..] else { panic!("two ranks") };
        assert_eq!((first.last, first.later_s, late.ahead_s, late.within_s), (0.0, None, 0.0, 0.0));
        assert_eq!(late.last.to_bits(), 1.0_f64.to_bits());
        assert!((late.later_s.expect("late") - 0.041).abs() < 1e-6, "{late:?}");
        let table = found.table();
        assert!(
            table.contains("rank 1 on m1") && table.contains("100 %") && table.contains("41.000 ms"),
            "{table}"
        );
        // On clocks that differ it is late by as much.
        let late = &joined(timelines(5e6, 1e-5, 41_000.0)).expect("joined").ranks[1];
        assert!((late.later_s.expect("late") - 0.041).abs() <= 60e-6, "{late:?}");
    }

    #[test]
    fn files_that_do_not_fit_together_are_refused() {
        let twice = vec![timelines(0.0, 0.0, 0.0).remove(0), timelines(0.0, 0.0, 0.0).remove(0)];
        let paths = tempfile::tempdir().expect("a folder");
        let of = |number: usize, text: &str| {
            let path = paths.path().join(format!("{number}.json"));
            std::fs::write(&path, text).expect("written");
            path
        };
        let files: Vec<PathBuf> = twice
            .into_iter()
            .enumerate()
            .map(|(number, one)| of(number, &Value::from(one.events).to_string()))
            .collect();
        let refused = |files: &[PathBuf]| format!("{:#}", Joined::read(files).expect_err("refused"));
        assert!(refused(&files).contains("two timelines are of rank 0"));
        assert!(refused(&[of(2, "{}")]).contains("no timeline"));
        let other =
            json!([{"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "rank 1"}}]);
        assert!(refused(&[files[0].clone(), of(3, &other.to_string())]).contains("no all-reduce in common"));
        let both = json!([{"pid": 0}, {"pid": 1}]);
        assert!(refused(&[of(4, &both.to_string())]).contains("it has 2 ranks"));
    }
}
