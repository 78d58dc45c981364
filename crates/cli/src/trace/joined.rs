//! The timelines of all ranks on one clock.
//!
//! Clocks of several machines differ. A service sends a sum to all ranks at once. So all have it at
//! about the same time, however late one of them asked for it, and the sums say by how much clocks
//! differ. Clocks also drift, so each stretch of time is compared by itself.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use comfy_table::{CellAlignment, Table, presets};
use fanin_controller::SERVICES_IN_TRACES;
use serde::Serialize;
use serde_json::Value;

use super::services::{ServiceOnTime, renumbered, services};
use crate::step::recorded::{Asked, sums_of_timeline};

/// A stretch of time, in microseconds, which has one difference of two clocks. A clock that is wrong
/// by ten in a million drifts by 100 us in it. From one stretch to the next the difference changes
/// evenly.
const STRETCH_US: f64 = 10e6;

/// A run on the clock of its first rank.
#[derive(Debug, Serialize)]
pub(super) struct Joined {
    /// By rank.
    pub ranks: Vec<RankOnTime>,
    /// Sums that all ranks have asked for.
    pub sums: usize,
    /// As the ranks saw them that asked.
    pub services: Vec<ServiceOnTime>,
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
    /// On the first rank's clock, nineteen of twenty sums ended at both within so many seconds of
    /// each other.
    pub within_s: f64,
    /// The part of the sums that it asked for later than the median rank, by more than the clocks
    /// of both may be wrong.
    pub late: f64,
    /// How long after the median rank it asked for these: the median.
    pub later_s: Option<f64>,
}

/// A rank's timeline.
struct Timeline {
    rank: u64,
    name: String,
    /// Ranks of one boot of a machine have one clock.
    boot: Option<String>,
    events: Vec<Value>,
    /// By job and number.
    sums: BTreeMap<(String, u64), Asked>,
}

/// By how much a clock is ahead of another, at moments of its own, in microseconds.
#[derive(Clone)]
struct Clock {
    /// Moment and difference.
    known: Vec<(f64, f64)>,
    /// How far the ends of nineteen of twenty sums are from each other.
    within: f64,
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
        let first = timelines.first().context("no timeline is given")?;
        let clocks = clocks(&timelines, first)?;
        let asked: Vec<BTreeMap<&(String, u64), f64>> = timelines
            .iter()
            .zip(&clocks)
            .map(|(one, clock)| {
                one.sums.iter().map(|(sum, asked)| (sum, clock.of_first(asked.submitted))).collect()
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
            // The earlier one of two: with two ranks the other one is it.
            let usual = by_time[(by_time.len() - 1) / 2];
            for (rank, later) in later.iter_mut().enumerate() {
                let after = of_sum[rank] - of_sum[usual];
                if after > clocks[rank].within + clocks[usual].within {
                    later.push(after);
                }
            }
        }
        let ranks = timelines.iter().zip(&clocks).zip(later).map(|((one, clock), mut later)| {
            let middle = clock.middle();
            RankOnTime {
                rank: one.rank,
                name: one.name.clone(),
                ahead_s: 1e-6 * (middle - clock.of_first(middle)),
                within_s: 1e-6 * clock.within,
                late: later.len() as f64 / common.len().max(1) as f64,
                later_s: (!later.is_empty()).then(|| 1e-6 * median(&mut later)),
            }
        });
        let (ranks, sums) = (ranks.collect(), common.len());
        let shifted = timelines.into_iter().zip(&clocks).map(|(one, clock)| {
            let events = one.events.into_iter().map(|mut event| {
                if let Some(at) = event.get("ts").and_then(Value::as_f64) {
                    event["ts"] = clock.of_first(at).into();
                }
                event
            });
            events.collect()
        });
        let events = renumbered(shifted.collect());
        Ok(Self { ranks, sums, services: services(&events), events })
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
            "asked late",
            "after the others",
        ]);
        for rank in &self.ranks {
            let RankOnTime { name, ahead_s, within_s, late, later_s, .. } = rank;
            table.add_row([
                name.clone(),
                format!("{ahead_s:.6} s"),
                format!("{:.3} ms", 1e3 * within_s),
                format!("{:.0} %", 100.0 * late),
                later_s.map_or("-".into(), |later| format!("{:.3} ms", 1e3 * later)),
            ]);
        }
        table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        let ranks = format!("{}\n{} sums that all ranks asked for", table.trim_fmt(), self.sums);
        if self.services.is_empty() {
            return ranks;
        }
        let mut table = Table::new();
        table.load_style(presets::NOTHING).set_header([
            "SERVICE",
            "job there",
            "summed",
            "while it sums",
            "waits most for",
        ]);
        for ServiceOnTime { name, job, megabytes, mbit_per_s, waits_for } in &self.services {
            table.add_row([
                name.clone(),
                job.clone(),
                format!("{megabytes:.1} MB"),
                mbit_per_s.map_or("-".into(), |rate| format!("{rate:.0} Mbit/s")),
                waits_for
                    .as_ref()
                    .map_or("-".into(), |(rank, percent)| format!("{rank}, {percent:.0} % of its work")),
            ]);
        }
        table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        format!("{ranks}\n\n{}", table.trim_fmt())
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
        let pids = events.iter().filter_map(|event| event["pid"].as_u64());
        let mut ranks: Vec<u64> = pids.filter(|pid| *pid < SERVICES_IN_TRACES.into()).collect();
        ranks.sort_unstable();
        ranks.dedup();
        let [rank] = ranks[..] else {
            bail!("it has {} ranks: give each rank's own file, as FANIN_TRACE writes it", ranks.len());
        };
        let told = |what: &str| {
            let event = events.iter().find(|event| event["name"] == what && event["pid"] == rank)?;
            event["args"]["name"].as_str().map(str::to_owned)
        };
        let name = told("process_name").unwrap_or_else(|| format!("rank {rank}"));
        let (boot, sums) = (told("boot"), sums_of_timeline(&events)?);
        Ok(Self { rank, name, boot, events, sums })
    }
}

/// The clocks of timelines, by that of the first: one for each boot of a machine.
fn clocks(timelines: &[Timeline], first: &Timeline) -> anyhow::Result<Vec<Clock>> {
    let mut of_boots: BTreeMap<&str, Clock> = BTreeMap::new();
    let mut clocks = Vec::with_capacity(timelines.len());
    for one in timelines {
        let boot = one.boot.as_deref();
        let known = match boot {
            _ if one.rank == first.rank => Some(Clock { known: vec![(0.0, 0.0)], within: 0.0 }),
            Some(boot) => of_boots.get(boot).cloned(),
            None => None,
        };
        let mut clock = known.map_or_else(|| Clock::of(one, first), Ok)?;
        clock.within = clock.apart(one, first);
        if let Some(boot) = boot {
            of_boots.entry(boot).or_insert_with(|| clock.clone());
        }
        clocks.push(clock);
    }
    Ok(clocks)
}

impl Clock {
    fn of(one: &Timeline, first: &Timeline) -> anyhow::Result<Self> {
        // By stretch of its own time: by how much later each sum ended, and when.
        let mut stretches: BTreeMap<i64, (Vec<f64>, f64)> = BTreeMap::new();
        for (sum, own) in &one.sums {
            let Some(its) = first.sums.get(sum) else { continue };
            let (ahead, moments) = stretches.entry((own.done / STRETCH_US) as i64).or_default();
            ahead.push(own.done - its.done);
            *moments += own.done;
        }
        ensure!(
            !stretches.is_empty(),
            "rank {} and rank {} have no all-reduce in common, so that their clocks cannot be compared",
            first.rank,
            one.rank
        );
        let known = stretches.into_values().map(|(mut ahead, moments)| {
            let moment = moments / ahead.len() as f64;
            (moment, median(&mut ahead))
        });
        Ok(Self { known: known.collect(), within: 0.0 })
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

/// The median of some numbers, which it sorts.
fn median(numbers: &mut [f64]) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Sums every 100 ms for half a minute, each of which the ranks exchange in 400 us. Rank 1's
    /// clock is ahead, and drifts; it asks as much later as `late_us` says.
    fn timelines(ahead_us: f64, drift: f64, late_us: f64) -> Vec<Timeline> {
        timelines_of(2, ahead_us, drift, late_us)
    }

    /// The same of more ranks, half of them, the odd ones, on the other machine. Each has a sum 200
    /// us after the rank before.
    fn timelines_of(ranks: u64, ahead_us: f64, drift: f64, late_us: f64) -> Vec<Timeline> {
        let of_rank = |rank: u64| {
            let told = |what: &str, name: String| json!({"ph": "M", "pid": rank, "tid": 0, "name": what, "args": {"name": name}});
            let is_other = rank % 2 == 1;
            let mut events = vec![told("process_name", format!("rank {rank} on m{}", rank % 2))];
            let boot = if is_other && (ahead_us, drift) != (0.0, 0.0) { "other" } else { "first" };
            events.push(told("boot", boot.into()));
            for number in 0..300_u64 {
                let asked = 1e5 * (number + 1) as f64;
                let own = if is_other { late_us } else { 0.0 };
                let done = asked + late_us + 400.0 + if ranks > 2 { 200.0 * rank as f64 } else { 0.0 };
                let clock = |at: f64| if is_other { at * (1.0 + drift) + ahead_us } else { at };
                let slice = |name: String, from: f64, to: f64, args: Value| json!({"ph": "X", "pid": rank, "tid": 1, "name": name, "ts": clock(from), "dur": clock(to) - clock(from), "args": args});
                let args = json!({"number": number, "job": "j", "elements": 1, "dtype": "float32"});
                events.push(slice(format!("all-reduce {number}"), asked + own, done, args));
                events.push(slice("exchanging".into(), asked + own + 5.0, done, json!({"number": number})));
            }
            Timeline::of(events).expect("a timeline")
        };
        (0..ranks).map(of_rank).collect()
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
        assert_eq!((first.late, first.later_s, late.ahead_s, late.within_s), (0.0, None, 0.0, 0.0));
        assert_eq!(late.late.to_bits(), 1.0_f64.to_bits());
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
    fn all_ranks_of_a_machine_have_one_clock_and_all_that_are_late_are_named() {
        let found = joined(timelines_of(5, 3e6, 1e-5, 41_000.0)).expect("joined");
        let late: Vec<bool> = found.ranks.iter().map(|rank| rank.late > 0.9).collect();
        assert_eq!(late, [false, true, false, true, false]);
        let ahead: Vec<f64> = found.ranks.iter().map(|rank| rank.ahead_s).collect();
        assert_eq!((ahead[0], ahead[2], ahead[4]), (0.0, 0.0, 0.0), "results that come later are no clock");
        assert!((ahead[1] - ahead[3]).abs() < 1e-9 && (ahead[1] - 3.0).abs() < 1e-3, "{ahead:?}");
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
