//! The thread that writes a timeline: messages become events, and events a file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::Duration;

use fanin_protocol::{Instant, Loss};
use fanin_udp::Clock;
use fanin_wire::Op;
use serde::Serialize;

use super::recorder::{Sample, Track};
use super::{Done, Message, QUEUE_MAX, Row, RowKind, Taken, TraceConfig, TracedAs};

/// How long the writer lets events gather: a burst costs one write, and its senders wake nobody.
const GATHER: Duration = Duration::from_millis(50);
const END: &str = "\n]\n";
/// Services have process numbers in timelines from here on: above all ranks'.
pub const SERVICES_IN_TRACES: u32 = 1_000_000;

/// Turns messages into events, and events into a file.
pub(super) struct Writer {
    file: File,
    process: u32,
    lost: Arc<AtomicU64>,
    /// Where the end of the array is.
    end: u64,
    /// Events to be written there, each with what stands before it.
    text: String,
    /// The lanes of each row, by the time at which they are free again. Slices of one lane must not
    /// overlap.
    lanes: BTreeMap<Row, Vec<(u64, Instant)>>,
    next_thread: u64,
    /// The services and switches that were sampled, by name: their process numbers.
    services: BTreeMap<String, u32>,
    /// The numbers that each track of a service shows for a session's job, but 0. A viewer draws them
    /// until others are written.
    shown: BTreeMap<(u32, Arc<str>, String), BTreeMap<String, f64>>,
}

#[derive(Serialize)]
struct Event<'a, A> {
    ph: &'a str,
    pid: u32,
    tid: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    name: &'a str,
    cat: &'a str,
    args: A,
}

#[derive(Serialize)]
struct Name<'a> {
    name: &'a str,
}

#[derive(Serialize)]
struct SortIndex {
    sort_index: u64,
}

#[derive(Serialize)]
struct AllReduceArguments<'a> {
    number: u64,
    job: &'a str,
    elements: usize,
    dtype: &'static str,
    op: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    shard: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    loss: Option<LossArguments>,
}

/// What the sum of a part lacks, as `protocol::Loss` has it.
#[derive(Serialize)]
struct LossArguments {
    contributions: u64,
    lost: u64,
    unsummed: u64,
    rounds: u32,
}

impl LossArguments {
    /// `None` where nothing can be lost.
    fn of(Loss { contributions, lost, unsummed, rounds, .. }: Loss) -> Option<Self> {
        (contributions > 0).then_some(Self { contributions, lost, unsummed, rounds })
    }
}

#[derive(Serialize)]
struct Number {
    number: u64,
}

impl Writer {
    pub(super) fn new(file: File, config: &TraceConfig, lost: Arc<AtomicU64>) -> Self {
        let mut writer = Self {
            file,
            process: config.rank,
            lost,
            end: 0,
            text: "[".into(),
            lanes: BTreeMap::new(),
            next_thread: 1,
            services: BTreeMap::new(),
            shown: BTreeMap::new(),
        };
        let kernel = |file: &str| {
            let text = std::fs::read_to_string(format!("/proc/sys/kernel/{file}")).ok()?;
            Some(text.trim().to_owned())
        };
        let host = kernel("hostname").unwrap_or_else(|| "unknown".into());
        let name = format!("rank {} on {host} (process {})", config.rank, std::process::id());
        writer.metadata("process_name", 0, Name { name: &name });
        // All processes of a boot have one clock. Two machines that do not tell are not one.
        if let Some(boot) = kernel("random/boot_id") {
            writer.metadata("boot", 0, Name { name: &boot });
        }
        writer.metadata("process_sort_index", 0, SortIndex { sort_index: config.rank.into() });
        writer
    }

    pub(super) fn run(&mut self, messages: &Receiver<Message>) -> io::Result<()> {
        while let Ok(first) = messages.recv() {
            // A burst comes while it sleeps, and is one write.
            thread::sleep(GATHER);
            let mut flushes = Vec::new();
            for message in std::iter::once(first).chain(messages.try_iter()).take(QUEUE_MAX) {
                match message {
                    Message::Done(row, done) => self.done(row, &done),
                    Message::Taken(row, taken) => self.taken(row, &taken),
                    Message::Service(job, sample) => self.service(&job, sample),
                    Message::Flush(job, flush) => {
                        self.ended(&job, Clock.now(), None);
                        flushes.push(flush);
                    }
                }
            }
            self.write()?;
            for flush in flushes {
                let _ = flush.send(());
            }
        }
        Ok(())
    }

    /// Puts the gathered events over the end of the array, and a new end after them.
    pub(super) fn write(&mut self) -> io::Result<()> {
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            let name = format!("{lost} events left out: more than the disk takes");
            let now = Some(micros(Clock.now()));
            self.event(&Event {
                ph: "i",
                pid: self.process,
                tid: 0,
                ts: now,
                dur: None,
                name: &name,
                cat: "fanin",
                args: (),
            });
        }
        let events = self.text.len() as u64;
        self.text.push_str(END);
        self.file.write_all_at(self.text.as_bytes(), self.end)?;
        self.end += events;
        self.text.clear();
        Ok(())
    }

    fn done(&mut self, row: Row, Done { collective, traced_as, submitted, outcome, done }: &Done) {
        let thread = self.lane(&row, *submitted, *done);
        let number = collective.number;
        let name = match traced_as {
            TracedAs::Ranks => format!("{} {number}", collective.kind.name().replace('_', "-")),
            TracedAs::Machines => format!("segment {number}"),
        };
        let arguments = AllReduceArguments {
            number,
            job: &row.job,
            elements: collective.elements,
            dtype: collective.dtype.name(),
            op: match collective.op {
                Op::Sum => "sum",
                Op::Average => "average",
            },
            shard: match row.kind {
                RowKind::Shard(shard) => Some(shard),
                _ => None,
            },
            error: outcome.as_ref().err().map(String::as_str),
            loss: outcome.as_ref().ok().and_then(|way| LossArguments::of(way.loss())),
        };
        self.slice(thread, &name, (*submitted, *done), arguments);
        let Ok(way) = outcome else { return };
        let mut begun = *submitted;
        for (phase, end) in way.phases(*done) {
            self.slice(thread, phase, (begun, end), Number { number });
            begun = end;
        }
    }

    fn taken(&mut self, row: Row, Taken { number, done, taken }: &Taken) {
        let thread = self.lane(&row, *done, *taken);
        self.slice(thread, &format!("hand-over {number}"), (*done, *taken), Number { number: *number });
    }

    fn service(&mut self, job: &Arc<str>, Sample { machine, from, tracks }: Sample) {
        let next = SERVICES_IN_TRACES + self.services.len() as u32;
        let pid = *self.services.entry(machine.clone()).or_insert(next);
        if pid == next {
            self.metadata_of(pid, "process_name", 0, Name { name: &machine });
            self.metadata_of(pid, "process_sort_index", 0, SortIndex { sort_index: pid.into() });
        }
        if tracks.is_empty() {
            self.ended(job, from, Some(pid));
        }
        for Track { name, values } in tracks {
            self.track((pid, Arc::clone(job), name), from, values);
        }
    }

    /// Writes what a track shows from now on, if that is something else. A number that is not there
    /// is 0.
    fn track(&mut self, track: (u32, Arc<str>, String), from: Instant, mut values: BTreeMap<String, f64>) {
        let shown = self.shown.remove(&track).unwrap_or_default();
        for key in shown.keys() {
            values.entry(key.clone()).or_insert(0.0);
        }
        if values.iter().any(|(key, value)| shown.get(key).copied().unwrap_or_default() != *value) {
            let (pid, _, name) = &track;
            let (pid, ts) = (*pid, Some(micros(from)));
            self.event(&Event { ph: "C", pid, tid: 0, ts, dur: None, name, cat: "fanin", args: &values });
        }
        values.retain(|_, value| *value != 0.0);
        if !values.is_empty() {
            self.shown.insert(track, values);
        }
    }

    /// Services do nothing more for a job from some moment on: all, or one.
    fn ended(&mut self, job: &str, from: Instant, service: Option<u32>) {
        let is_its = |(pid, of, _): &&(u32, Arc<str>, String)| {
            **of == *job && service.is_none_or(|service| service == *pid)
        };
        let its: Vec<_> = self.shown.keys().filter(is_its).cloned().collect();
        its.into_iter().for_each(|track| self.track(track, from, BTreeMap::new()));
    }

    /// The first lane of the row that is free from `begin` on, which is taken until `end`; a new
    /// one if there is none.
    fn lane(&mut self, row: &Row, begin: Instant, end: Instant) -> u64 {
        let lanes = self.lanes.entry(row.clone()).or_default();
        if let Some((thread, free)) = lanes.iter_mut().find(|(_, free)| *free <= begin) {
            *free = end;
            return *thread;
        }
        let thread = self.next_thread;
        self.next_thread += 1;
        lanes.push((thread, end));
        let mut name = match row.kind {
            RowKind::Memory => format!("memory of {}", row.job),
            RowKind::Shard(shard) => format!("shard {shard} of {}", row.job),
            RowKind::Program => format!("program of {}", row.job),
            RowKind::Failed => format!("failed of {}", row.job),
        };
        // They come in the order of their ends, so a shard's rows stay together only if they are
        // told to.
        let place = match row.kind {
            RowKind::Memory => 0,
            RowKind::Shard(shard) => 1 + shard as u64,
            RowKind::Program => 1000,
            RowKind::Failed => 1001,
        };
        if lanes.len() > 1 {
            name = format!("{name}, overlapping ({})", lanes.len());
        }
        self.metadata("thread_name", thread, Name { name: &name });
        self.metadata("thread_sort_index", thread, SortIndex { sort_index: place });
        thread
    }

    fn metadata(&mut self, name: &str, tid: u64, args: impl Serialize) {
        self.metadata_of(self.process, name, tid, args);
    }

    fn metadata_of(&mut self, pid: u32, name: &str, tid: u64, args: impl Serialize) {
        self.event(&Event { ph: "M", pid, tid, ts: None, dur: None, name, cat: "__metadata", args });
    }

    fn slice(&mut self, tid: u64, name: &str, (begin, end): (Instant, Instant), args: impl Serialize) {
        let dur = Some(end.since(begin).as_nanos() as f64 / 1e3);
        let ts = Some(micros(begin));
        self.event(&Event { ph: "X", pid: self.process, tid, ts, dur, name, cat: "fanin", args });
    }

    fn event(&mut self, event: &Event<'_, impl Serialize>) {
        let first = self.end == 0 && self.text == "[";
        self.text.push_str(if first { "\n" } else { ",\n" });
        // Strings and numbers always have a text.
        self.text.push_str(&serde_json::to_string(event).unwrap_or_default());
    }
}

/// Chrome's unit.
fn micros(time: Instant) -> f64 {
    time.0 as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::super::Way;
    use super::super::tests::Scratch;
    use super::*;
    use crate::error::Tensor;
    use fanin_protocol::TensorTimes;
    use fanin_udp::{CollectiveKind, PartTimes};
    use fanin_wire::Dtype;
    use serde_json::Value;

    fn writer(scratch: &Scratch) -> Writer {
        let file = File::create(scratch.file()).expect("a file");
        Writer::new(file, &scratch.config(), Arc::default())
    }

    fn row(kind: RowKind) -> Row {
        Row { job: "a \"job\"".into(), kind }
    }

    /// An all-reduce that was submitted and done at these times.
    fn done(number: u64, submitted: u64, done: u64) -> Done {
        let times = TensorTimes {
            first_sent: Instant(submitted + 1),
            first_result: Instant(submitted + 1),
            last_result: Instant(done - 1),
            loss: Loss::default(),
        };
        Done {
            collective: Tensor {
                kind: CollectiveKind::AllReduce,
                number,
                elements: 10,
                dtype: Dtype::Float32,
                op: Op::Sum,
            },
            traced_as: TracedAs::Ranks,
            submitted: Instant(submitted),
            outcome: Ok(Way::Shard(PartTimes { lane: 0, times })),
            done: Instant(done),
        }
    }

    fn slices(events: &[Value]) -> Vec<(&str, u64, f64, f64)> {
        let slices = events.iter().filter(|event| event["ph"] == "X");
        let number = |value: &Value| value.as_f64().expect("a number");
        slices
            .map(|event| {
                let (name, thread) = (event["name"].as_str(), event["tid"].as_u64());
                (name.expect("a name"), thread.expect("a row"), number(&event["ts"]), number(&event["dur"]))
            })
            .collect()
    }

    #[test]
    fn a_track_of_a_service_is_written_when_it_changes_and_ends_with_its_job() {
        let scratch = Scratch::new();
        let mut writer = writer(&scratch);
        let jobs: [Arc<str>; 2] = ["one".into(), "two".into()];
        let sample = |machine: &str, from: u64, numbers: &[(&str, f64)]| Sample {
            machine: machine.into(),
            from: Instant(1000 * from),
            tracks: vec![Track {
                name: "sums".into(),
                values: numbers.iter().map(|(key, value)| ((*key).to_owned(), *value)).collect(),
            }],
        };
        writer.service(&jobs[0], sample("service a", 1, &[("x", 0.0)]));
        writer.service(&jobs[0], sample("service a", 2, &[("x", 5.0)]));
        writer.service(&jobs[0], sample("service a", 3, &[("x", 5.0)]));
        writer.service(&jobs[0], sample("service a", 4, &[("y", 1.0)]));
        writer.service(&jobs[1], sample("service a", 5, &[("x", 7.0)]));
        writer.service(&jobs[0], sample("service b", 6, &[("x", 9.0)]));
        let nothing = Sample { machine: "service a".into(), from: Instant(7000), tracks: Vec::new() };
        writer.service(&jobs[0], nothing);
        writer.ended("one", Instant(8000), None);
        writer.ended("one", Instant(9000), None);
        writer.ended("two", Instant(9000), None);
        assert!(writer.shown.is_empty());
        writer.write().expect("written");
        let events = scratch.events();
        let counters: Vec<_> = events
            .iter()
            .filter(|event| event["ph"] == "C")
            .map(|event| {
                let number = |key: &str| event["args"][key].as_f64();
                let (at, pid) =
                    (event["ts"].as_f64().expect("a time"), event["pid"].as_u64().expect("a number"));
                (
                    at as u64,
                    pid as u32 - SERVICES_IN_TRACES,
                    event["name"].as_str().expect("a name"),
                    number("x"),
                    number("y"),
                )
            })
            .collect();
        assert_eq!(
            counters,
            [
                (2, 0, "sums", Some(5.0), None),
                (4, 0, "sums", Some(0.0), Some(1.0)),
                (5, 0, "sums", Some(7.0), None),
                (6, 1, "sums", Some(9.0), None),
                (7, 0, "sums", None, Some(0.0)),
                (8, 1, "sums", Some(0.0), None),
                (9, 0, "sums", Some(0.0), None),
            ]
        );
    }

    #[test]
    fn the_file_is_whole_after_every_write() {
        let scratch = Scratch::new();
        let mut writer = writer(&scratch);
        writer.write().expect("written");
        assert_eq!(scratch.events().len(), 3, "the process, its clock and its place");
        writer.done(row(RowKind::Shard(0)), &done(0, 1_000, 9_000));
        writer.write().expect("written");
        let events = scratch.events();
        assert_eq!(events[3]["args"]["name"], "shard 0 of a \"job\"");
        assert_eq!(
            slices(&events),
            [
                ("all-reduce 0", 1, 1.0, 8.0),
                ("queued", 1, 1.0, 0.001),
                ("exchanging", 1, 1.001, 7.998),
                ("completing", 1, 8.999, 0.001)
            ]
        );
        writer
            .taken(row(RowKind::Program), &Taken { number: 0, done: Instant(9_000), taken: Instant(9_500) });
        writer.write().expect("written");
        assert_eq!(slices(&scratch.events())[4], ("hand-over 0", 2, 9.0, 0.5));
    }

    #[test]
    fn all_reduces_that_overlap_are_drawn_below_each_other() {
        let scratch = Scratch::new();
        let mut writer = writer(&scratch);
        for (number, submitted, at) in [(0, 1_000, 5_000), (1, 2_000, 6_000), (2, 5_000, 7_000)] {
            writer.done(row(RowKind::Shard(0)), &done(number, submitted, at));
        }
        writer.write().expect("written");
        let events = scratch.events();
        let rows: Vec<_> =
            slices(&events).iter().filter(|slice| slice.0.starts_with("all")).map(|slice| slice.1).collect();
        assert_eq!(rows, [1, 2, 1]);
        let names: Vec<_> = events.iter().filter(|event| event["name"] == "thread_name").collect();
        assert_eq!(names[1]["args"]["name"], "shard 0 of a \"job\", overlapping (2)");
    }

    #[test]
    fn what_failed_and_what_was_left_out_is_told() {
        let scratch = Scratch::new();
        let mut writer = writer(&scratch);
        writer.done(row(RowKind::Failed), &Done { outcome: Err("rank 1 is lost".into()), ..done(7, 0, 10) });
        writer.lost.store(5, Ordering::Relaxed);
        writer.write().expect("written");
        let events = scratch.events();
        let failed = events.iter().find(|event| event["name"] == "all-reduce 7").expect("there");
        assert_eq!(failed["args"]["error"], "rank 1 is lost");
        assert!(
            events.last().is_some_and(|last| last["name"] == "5 events left out: more than the disk takes")
        );
    }
}
