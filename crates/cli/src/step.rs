//! A training's step: how long it computes before each of its sums. Timelines and other recordings
//! have it (`step/recorded.rs`), and files of layers, as `fanin trace` writes them and `fanin sim`
//! reads them. Its time on other links, or with faster processors, follows from that.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use comfy_table::{CellAlignment, Table, presets};
use fanin_sim::scenario_file::parse_layers;
use fanin_sim::workload::TimedLayer;
use serde::Serialize;

pub(crate) mod recorded;

use recorded::{Asked, chakra};

/// How often a step has to repeat.
const REPEATS_MIN: usize = 3;
/// Bytes that travel for each byte that is summed, with headers and an MTU of 1500.
const HEADERS: f64 = 1.06;
/// A layer's parameters are float32.
const ELEMENT_BYTES: u64 = 4;

/// A step of synchronous training, in seconds from when all sums of the step before are there.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Step {
    sums: Vec<Sum>,
    /// If it was recorded, and not written down.
    recorded: Option<Recorded>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Recorded {
    /// The time of a step with its sums, where it was recorded.
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

impl Step {
    /// The step that repeats in the timelines of a job's ranks (one rank, or all), that of their
    /// graphs, or that of a file of layers.
    pub fn read(paths: &[PathBuf]) -> anyhow::Result<Self> {
        if let Some(path) = paths.iter().find(|path| has_layers(path)) {
            ensure!(paths.len() == 1, "layers are one file, and {} are given", paths.len());
            return Self::of_layers(path);
        }
        if let Some(path) = paths.iter().find(|path| chakra::is_chakra(path)) {
            let alike = paths.iter().all(|path| chakra::is_chakra(path));
            ensure!(
                alike,
                "{} is of Chakra (.et), and others are not: give the files of one run",
                path.display()
            );
            return Self::of_graphs(paths);
        }
        let (job, ranks) = recorded::read(paths)?;
        Self::of(&ranks).with_context(|| format!("in the trace of {job}"))
    }

    /// The step of Chakra's execution traces, of which each rank has one.
    fn of_graphs(paths: &[PathBuf]) -> anyhow::Result<Self> {
        let of_graph = |path: &PathBuf| {
            let step = match chakra::read(path)? {
                chakra::Trace::Timed(sums) => of_rank(&sums),
                chakra::Trace::Steps(steps) => of_steps(&steps),
            };
            step.with_context(|| format!("in {}", path.display()))
        };
        Self::slowest(paths.iter().map(of_graph).collect::<Result<_, _>>()?)
    }

    fn of_layers(path: &Path) -> anyhow::Result<Self> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read the layers {name}"))?;
        let layers = parse_layers(&name, &text)?;
        // A backward pass begins behind the forward pass, with the last layer.
        let mut ready: Duration = layers.iter().map(|layer| layer.forward).sum();
        let asked = |layer: &TimedLayer| {
            ready += layer.backward;
            Sum { bytes: (ELEMENT_BYTES * layer.parameters) as f64, ready_s: ready.as_secs_f64() }
        };
        Ok(Self { sums: layers.iter().rev().map(asked).collect(), recorded: None })
    }

    /// The file of layers that [`Self::read`] and `fanin sim` take, which have float32 alone. A
    /// timeline has no layers: each sum is one, and all that is computed before it is its backward
    /// pass.
    pub fn layers(&self) -> anyhow::Result<String> {
        let mut before_s = 0.0;
        let mut tables = Vec::new();
        for sum in &self.sums {
            let backward_ns = 1e9 * (sum.ready_s - before_s).max(0.0);
            before_s = before_s.max(sum.ready_s);
            let bytes = (sum.bytes as u64).next_multiple_of(ELEMENT_BYTES);
            tables.push(format!("[[layer]]\nbytes = \"{bytes}B\"\nbackward = \"{backward_ns:.0}ns\"\n"));
        }
        tables.reverse();
        let text = format!("# {}.\n\n{}", self.shown(1.0), tables.join("\n"));
        parse_layers("the step", &text).context("it cannot be written as layers")?;
        Ok(text)
    }

    /// For people: when each sum is asked for.
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::NOTHING).set_header(["SUM", "bytes", "asked for at"]);
        for (number, sum) in self.sums.iter().enumerate() {
            table.add_row([
                number.to_string(),
                format!("{:.0}", sum.bytes),
                format!("{:.3} ms", 1e3 * sum.ready_s),
            ]);
        }
        table.column_iter_mut().for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        table.trim_fmt()
    }

    fn of(ranks: &[Vec<Asked>]) -> anyhow::Result<Self> {
        Self::slowest(ranks.iter().map(|sums| of_rank(sums)).collect::<Result<_, _>>()?)
    }

    /// Joins the steps of all ranks: every sum waits for the rank that asks last.
    fn slowest(steps: Vec<(Vec<Sum>, Option<Recorded>)>) -> anyhow::Result<Self> {
        let ranks = steps.len();
        let slower = |one: (Vec<Sum>, Option<Recorded>), other: (Vec<Sum>, Option<Recorded>)| {
            ensure!(are_alike(&one.0, &other.0), "its ranks have unlike steps: give the files of one run");
            let latest =
                |(sum, theirs): (&Sum, &Sum)| Sum { ready_s: sum.ready_s.max(theirs.ready_s), ..*sum };
            let sums = one.0.iter().zip(&other.0).map(latest).collect();
            let recorded = one.1.zip(other.1).map(|(one, other)| Recorded {
                measured_s: one.measured_s.max(other.measured_s),
                steps: one.steps.min(other.steps),
                ranks,
            });
            Ok((sums, recorded))
        };
        let mut steps = steps.into_iter();
        let first = steps.next().context("no rank's recording is given")?;
        let (sums, recorded) = steps.try_fold(first, slower)?;
        Ok(Self { sums, recorded })
    }

    /// With processors that are so many times as fast.
    pub fn computing_faster(mut self, times: f64) -> Self {
        self.sums.iter_mut().for_each(|sum| sum.ready_s /= times);
        self
    }

    pub fn bytes(&self) -> u64 {
        self.sums.iter().map(|sum| sum.bytes as u64).sum()
    }

    /// The time of a step whose sums take so long for a byte, one after the other.
    pub fn time_s(&self, seconds_per_byte: f64) -> f64 {
        self.sums
            .iter()
            .fold(0.0, |free: f64, sum| free.max(sum.ready_s) + sum.bytes * HEADERS * seconds_per_byte)
    }

    /// For people: the line above the table.
    pub fn shown(&self, faster: f64) -> String {
        let than = if self.recorded.is_some() { " as there" } else { "" };
        let faster = if faster == 1.0 { String::new() } else { format!(" ({faster} times as fast{than})") };
        let recorded = self.recorded.map_or_else(String::new, |Recorded { measured_s, steps, ranks }| {
            format!(
                ". Medians of {steps} steps of {ranks} rank{}; with the sums, a step took {:.1} ms there",
                plural(ranks),
                1e3 * measured_s,
            )
        });
        format!(
            "A step of {} sum{}, {:.1} MB. Computing alone takes {:.1} ms{faster}{recorded}",
            self.sums.len(),
            plural(self.sums.len()),
            self.bytes() as f64 / 1e6,
            self.time_s(0.0) * 1e3,
        )
    }
}

/// Whether a file has layers, and is no timeline.
pub(crate) fn has_layers(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "toml")
}

/// The step that a rank's sums, in their order, repeat.
fn of_rank(sums: &[Asked]) -> anyhow::Result<(Vec<Sum>, Option<Recorded>)> {
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
    let recorded = Recorded { measured_s: seconds(median(took)), steps: count, ranks: 1 };
    Ok(((0..length).map(of_step).collect(), Some(recorded)))
}

/// The step that a rank's graph has, from its beginning on. The times of its sums are not measured.
/// If there are several, computing may have begun before the first one was recorded, so the others
/// count.
fn of_steps(steps: &[Vec<Asked>]) -> anyhow::Result<(Vec<Sum>, Option<Recorded>)> {
    let mut begins = 0.0;
    let mut from_begin = Vec::new();
    for step in steps {
        let ready = |sum: &Asked| Sum { bytes: sum.bytes as f64, ready_s: (sum.submitted - begins) / 1e6 };
        from_begin.push(step.iter().map(ready).collect::<Vec<_>>());
        begins = step.iter().fold(begins, |latest, sum| latest.max(sum.done));
    }
    let whole = &from_begin[usize::from(from_begin.len() > 1)..];
    let first = whole.first().context("it has no sums")?;
    ensure!(
        whole.iter().all(|step| are_alike(first, step)),
        "computing waits for sums {} times, and not for equal ones: only data-parallel trainings are understood, whose \
         steps are alike and wait for their sums once",
        steps.len() - 1
    );
    ensure!(
        whole.iter().flatten().all(|sum| sum.ready_s >= 0.0),
        "its steps sum under the next forward pass: give one step alone"
    );
    let of_step =
        |place: usize| Sum { ready_s: median(whole.iter().map(|step| step[place].ready_s)), ..first[place] };
    Ok(((0..first.len()).map(of_step).collect(), None))
}

/// Whether two steps have equally long sums.
fn are_alike(one: &[Sum], other: &[Sum]) -> bool {
    one.iter().map(|sum| sum.bytes).eq(other.iter().map(|sum| sum.bytes))
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
        let found = Step::of(&[recorded(&[3, 3, 3, 3, 40], &step, 4)]).expect("it repeats");
        let ready: Vec<f64> = found.sums.iter().map(|sum| (sum.ready_s * 1e6).round()).collect();
        let Recorded { measured_s, steps, .. } = found.recorded.expect("it is");
        assert_eq!((ready, steps, found.bytes()), (vec![100.0, 110.0, 160.0], 4, 87));
        // The second sum ends at 180, and then the third one takes 7.
        assert_eq!((measured_s * 1e6).round(), 187.0);
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
        let (sums, found) = of_rank(&recorded(&[], &[(50.0, 100), (60.0, 100)], 5)).expect("it repeats");
        assert_eq!((sums.len(), found.map(|it| it.steps)), (2, Some(4)));
    }

    #[test]
    fn a_graphs_step_begins_where_the_sums_before_it_are_done() {
        let at = |submitted: f64, bytes: usize| Asked { bytes, submitted, done: submitted + 10.0 };
        let ready = |steps: &[Vec<Asked>]| {
            let (sums, recorded) = of_steps(steps).expect("a step");
            assert_eq!(recorded, None, "nobody measured it");
            sums.iter().map(|sum| (sum.ready_s * 1e6).round()).collect::<Vec<_>>()
        };
        let (first, second) = (vec![at(70.0, 4), at(90.0, 8)], vec![at(181.0, 4), at(211.0, 8)]);
        assert_eq!(ready(std::slice::from_ref(&first)), [70.0, 90.0]);
        assert_eq!(ready(&[first.clone(), second.clone()]), [81.0, 111.0], "from 100 on");
        let cut_off = vec![at(5.0, 8)];
        assert_eq!(ready(&[cut_off, first.clone(), second.clone()]), [68.0, 93.0], "medians");
        let error = of_steps(&[first.clone(), second, vec![at(300.0, 4)]]).expect_err("unlike").to_string();
        assert!(error.contains("data-parallel"), "{error}");
        let error = of_steps(&[first, vec![at(95.0, 4)]]).expect_err("under the next").to_string();
        assert!(error.contains("one step alone"), "{error}");
    }

    #[test]
    fn all_wait_for_the_slowest_rank() {
        let of = |first: f64, second: f64| recorded(&[5], &[(first, 10), (second, 20)], 3);
        let found = Step::of(&[of(60.0, 80.0), of(50.0, 90.0)]).expect("alike");
        let ready: Vec<f64> = found.sums.iter().map(|sum| (sum.ready_s * 1e6).round()).collect();
        assert_eq!((ready, found.recorded.map(|it| it.ranks)), (vec![60.0, 90.0], Some(2)));
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

    #[test]
    fn a_step_that_is_written_as_layers_is_read_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let files = [folder.path().join("step.toml")];
        let step = Step::of(&[recorded(&[5], &[(50.0, 100), (40.0, 7), (60.0, 20)], 3)]).expect("it repeats");
        std::fs::write(&files[0], step.layers().expect("layers")).expect("written");
        let read = Step::read(&files).expect("layers");
        let sums: Vec<(f64, f64)> =
            read.sums.iter().map(|sum| (sum.bytes, (sum.ready_s * 1e6).round())).collect();
        // A sum waits for those before it in the queue, and its elements are whole.
        assert_eq!(sums, [(100.0, 50.0), (8.0, 50.0), (20.0, 60.0)]);
        std::fs::write(&files[0], "[[layer]]\nbytes = \"8B\"\nforward = \"1ms\"\nbackward = \"3ms\"\n[[layer]]\nbytes = \"4B\"\nforward = \"2ms\"\nbackward = \"4ms\"\n")
            .expect("written");
        let sums = Step::read(&files).expect("layers").sums;
        let sums: Vec<(f64, f64)> = sums.iter().map(|sum| (sum.bytes, (sum.ready_s * 1e3).round())).collect();
        assert_eq!(sums, [(4.0, 7.0), (8.0, 10.0)], "the last layer's gradient is the first");
        for (text, cause) in [
            ("", "missing field `layer`"),
            ("layer = []", "at least one layer"),
            ("[[layer]]\nbytes = 4", "step.toml:2:9"),
            ("[[layer]]\nbites = \"4B\"", "did you mean `bytes`?"),
        ] {
            std::fs::write(&files[0], text).expect("written");
            let error = Step::read(&files).expect_err("no step").to_string();
            assert!(error.contains(cause) && error.contains("step.toml"), "{error}");
        }
        let error = Step::read(&[files.clone(), files].concat()).expect_err("two files").to_string();
        assert!(error.contains("layers are one file"), "{error}");
        let long = Step { sums: vec![Sum { bytes: 2e9, ready_s: 1.0 }], recorded: None };
        let error = format!("{:#}", long.layers().expect_err("too long"));
        assert!(error.contains("1 GiB"), "{error}");
    }
}
