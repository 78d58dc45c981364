//! A timeline of a process's all-reduces, in Chrome's trace format, which chrome://tracing and
//! Perfetto open.
//!
//! Who completes an all-reduce, often an I/O thread, leaves its times in a queue; a thread of the
//! file's own writes. After each write the file is whole: the next one begins on top of the bracket
//! that ends the array.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use fanin_protocol::{Instant, Loss};
use fanin_udp::{Clock, PartTimes};
use fanin_wire::Op;
use serde::Serialize;

use super::warnings::say;
use crate::error::Tensor;

/// All-reduces that wait to be written. More are left out, and counted.
const QUEUE_MAX: usize = 4096;
/// How long the writer lets them gather: a burst costs one write, and its senders wake nobody.
const GATHER: Duration = Duration::from_millis(50);
/// How long a session that ends waits for the file.
const FLUSH: Duration = Duration::from_secs(1);
const END: &str = "\n]\n";

/// Where a process writes its timeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceConfig {
    /// The file. All sessions of a process that name the same one share it; what it held before is
    /// overwritten.
    pub file: PathBuf,
    /// The process's rank, as the trace's process number. Files that are to be joined need
    /// different ones.
    pub rank: u32,
}

/// The file's other side: a queue to the thread that writes it.
#[derive(Debug)]
struct Trace {
    queue: SyncSender<Message>,
    lost: Arc<AtomicU64>,
}

#[derive(Debug)]
enum Message {
    Done(Row, Done),
    Taken(Row, Taken),
    Flush(SyncSender<()>),
}

/// A row of the viewer.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Row {
    job: Arc<str>,
    kind: RowKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum RowKind {
    Shard(usize),
    /// The threads that take results over.
    Program,
    Failed,
}

/// One shard's part of an all-reduce that is done, or all of one that failed.
#[derive(Debug)]
struct Done {
    all_reduce: Tensor,
    submitted: Instant,
    part: Result<PartTimes, String>,
    done: Instant,
}

#[derive(Debug)]
struct Taken {
    number: u64,
    done: Instant,
    taken: Instant,
}

/// A session's part in the trace.
#[derive(Clone, Debug)]
pub(super) struct SessionTrace {
    trace: Arc<Trace>,
    job: Arc<str>,
}

/// The way of a result from the data path to the program, which [`Self::taken`] ends: what is
/// measured where there is a trace.
#[derive(Debug, Default)]
pub struct HandOver {
    way: Option<(SessionTrace, u64, Instant)>,
    /// What the sum lacks, which is told everywhere.
    pub loss: Loss,
}

impl HandOver {
    /// For a sum that lacks so much, where there is no trace.
    pub(super) const fn losing(loss: Loss) -> Self {
        Self { way: None, loss }
    }

    /// Of what came of a collective, where there is no trace.
    pub(super) fn untraced<E>(outcome: &Result<Vec<PartTimes>, E>) -> Self {
        Self::losing(loss_of(outcome))
    }

    /// The program has the result.
    pub fn taken(self) {
        if let Some((session, number, done)) = self.way {
            let taken = Taken { number, done, taken: Clock.now() };
            session.send(RowKind::Program, |row| Message::Taken(row, taken));
        }
    }
}

impl SessionTrace {
    /// Joins the process's trace to `config.file`, which is made if it is not open yet.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn open(config: &TraceConfig, job: &str) -> io::Result<Self> {
        /// The traces of this process, and of one that it was forked from: those have no writer
        /// here.
        static OPEN: Mutex<BTreeMap<(u32, PathBuf), Arc<Trace>>> = Mutex::new(BTreeMap::new());
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (std::process::id(), config.file.clone());
        let trace = match open.get(&key) {
            Some(trace) => Arc::clone(trace),
            None => {
                let trace = Arc::new(Trace::create(config)?);
                open.insert(key, Arc::clone(&trace));
                trace
            }
        };
        Ok(Self { trace, job: job.into() })
    }

    /// An all-reduce is done. Never blocks.
    pub fn done(
        &self,
        all_reduce: Tensor,
        submitted: Instant,
        outcome: Result<Vec<PartTimes>, String>,
    ) -> HandOver {
        let loss = loss_of(&outcome);
        let done = Clock.now();
        let event = |part| Done { all_reduce, submitted, part, done };
        match outcome {
            Ok(parts) => {
                for part in parts {
                    self.send(RowKind::Shard(part.lane), |row| Message::Done(row, event(Ok(part))));
                }
            }
            Err(error) => self.send(RowKind::Failed, |row| Message::Done(row, event(Err(error)))),
        }
        HandOver { way: Some((self.clone(), all_reduce.number, done)), loss }
    }

    fn send(&self, kind: RowKind, message: impl FnOnce(Row) -> Message) {
        if self.trace.queue.try_send(message(Row { job: Arc::clone(&self.job), kind })).is_err() {
            self.trace.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until all that was done is in the file, unless that takes too long.
    pub fn flush(&self) {
        let until = std::time::Instant::now() + FLUSH;
        let (sender, written) = sync_channel(1);
        let mut message = Message::Flush(sender);
        while let Err(TrySendError::Full(back)) = self.trace.queue.try_send(message) {
            if std::time::Instant::now() > until {
                return;
            }
            message = back;
            // The writer empties the whole queue at a time; a session that ends may wait for that.
            thread::sleep(Duration::from_millis(1));
        }
        let _ = written.recv_timeout(until.saturating_duration_since(std::time::Instant::now()));
    }
}

impl Trace {
    fn create(config: &TraceConfig) -> io::Result<Self> {
        let file = File::create(&config.file)?;
        let lost = Arc::<AtomicU64>::default();
        let mut writer = Writer::new(file, config, Arc::clone(&lost));
        writer.write()?;
        let (queue, messages) = sync_channel(QUEUE_MAX);
        let TraceConfig { file: path, rank } = config.clone();
        thread::Builder::new().name("fanin-trace".into()).spawn(move || {
            if let Err(error) = writer.run(&messages) {
                // Nobody reads the file while training goes on, which it does.
                say(
                    rank,
                    &format!("the trace {} ends early ({error}); the training goes on", path.display()),
                );
                // Flushes are answered by the channel's end; all else is left out.
            }
        })?;
        Ok(Self { queue, lost })
    }
}

/// Turns messages into events, and events into a file.
struct Writer {
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

/// What the sum of a tensor lacks, over its parts.
fn loss_of<E>(outcome: &Result<Vec<PartTimes>, E>) -> Loss {
    let mut sum = Loss::default();
    outcome.iter().flatten().for_each(|part| sum += part.times.loss);
    sum
}

#[derive(Serialize)]
struct Number {
    number: u64,
}

impl Writer {
    fn new(file: File, config: &TraceConfig, lost: Arc<AtomicU64>) -> Self {
        let mut writer = Self {
            file,
            process: config.rank,
            lost,
            end: 0,
            text: "[".into(),
            lanes: BTreeMap::new(),
            next_thread: 1,
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

    fn run(&mut self, messages: &Receiver<Message>) -> io::Result<()> {
        while let Ok(first) = messages.recv() {
            thread::sleep(GATHER);
            let mut flushes = Vec::new();
            for message in std::iter::once(first).chain(messages.try_iter()).take(QUEUE_MAX) {
                match message {
                    Message::Done(row, done) => self.done(row, &done),
                    Message::Taken(row, taken) => self.taken(row, &taken),
                    Message::Flush(flush) => flushes.push(flush),
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
    fn write(&mut self) -> io::Result<()> {
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

    fn done(&mut self, row: Row, Done { all_reduce, submitted, part, done }: &Done) {
        let thread = self.lane(&row, *submitted, *done);
        let name = format!("{} {}", all_reduce.kind.name().replace('_', "-"), all_reduce.number);
        let arguments = AllReduceArguments {
            number: all_reduce.number,
            job: &row.job,
            elements: all_reduce.elements,
            dtype: all_reduce.dtype.name(),
            op: match all_reduce.op {
                Op::Sum => "sum",
                Op::Average => "average",
            },
            shard: part.as_ref().ok().map(|part| part.lane),
            error: part.as_ref().err().map(String::as_str),
            loss: part.as_ref().ok().and_then(|part| LossArguments::of(part.times.loss)),
        };
        self.slice(thread, &name, (*submitted, *done), arguments);
        if let Ok(PartTimes { times, .. }) = part {
            let number = || Number { number: all_reduce.number };
            self.slice(thread, "queued", (*submitted, times.first_sent), number());
            self.slice(thread, "exchanging", (times.first_sent, times.last_result), number());
            self.slice(thread, "completing", (times.last_result, *done), number());
        }
    }

    fn taken(&mut self, row: Row, Taken { number, done, taken }: &Taken) {
        let thread = self.lane(&row, *done, *taken);
        self.slice(thread, &format!("hand-over {number}"), (*done, *taken), Number { number: *number });
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
            RowKind::Shard(shard) => format!("shard {shard} of {}", row.job),
            RowKind::Program => format!("program of {}", row.job),
            RowKind::Failed => format!("failed of {}", row.job),
        };
        // They come in the order of their ends, so a shard's rows stay together only if they are
        // told to.
        let place = match row.kind {
            RowKind::Shard(shard) => shard as u64,
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
        self.event(&Event {
            ph: "M",
            pid: self.process,
            tid,
            ts: None,
            dur: None,
            name,
            cat: "__metadata",
            args,
        });
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
    use super::*;
    use fanin_protocol::TensorTimes;
    use fanin_udp::CollectiveKind;
    use fanin_wire::Dtype;
    use serde_json::Value;

    /// A folder of this test alone, which goes with it.
    struct Scratch(tempfile::TempDir);

    impl Scratch {
        fn new() -> Self {
            Self(tempfile::tempdir().expect("a folder"))
        }

        fn file(&self) -> PathBuf {
            self.0.path().join("trace.json")
        }

        fn config(&self) -> TraceConfig {
            TraceConfig { file: self.file(), rank: 3 }
        }

        fn events(&self) -> Vec<Value> {
            let text = std::fs::read_to_string(self.file()).expect("a trace");
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}"))
        }
    }

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
            all_reduce: Tensor {
                kind: CollectiveKind::AllReduce,
                number,
                elements: 10,
                dtype: Dtype::Float32,
                op: Op::Sum,
            },
            submitted: Instant(submitted),
            part: Ok(PartTimes { lane: 0, times }),
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
        writer.done(row(RowKind::Failed), &Done { part: Err("rank 1 is lost".into()), ..done(7, 0, 10) });
        writer.lost.store(5, Ordering::Relaxed);
        writer.write().expect("written");
        let events = scratch.events();
        let failed = events.iter().find(|event| event["name"] == "all-reduce 7").expect("there");
        assert_eq!(failed["args"]["error"], "rank 1 is lost");
        assert!(
            events.last().is_some_and(|last| last["name"] == "5 events left out: more than the disk takes")
        );
    }

    #[test]
    fn sessions_of_a_process_share_a_file_and_a_flush_leaves_nothing_behind() {
        let scratch = Scratch::new();
        let [first, second] =
            ["one", "two"].map(|job| SessionTrace::open(&scratch.config(), job).expect("open"));
        let kind = CollectiveKind::AllReduce;
        let all_reduce = |number| Tensor { kind, number, elements: 1, dtype: Dtype::Int32, op: Op::Average };
        for number in 0..2 * QUEUE_MAX as u64 {
            first.done(all_reduce(number), Clock.now(), Err("x".into()));
        }
        second.done(all_reduce(0), Clock.now(), Err("y".into()));
        second.flush();
        let events = scratch.events();
        let jobs = |job: &str| events.iter().filter(|event| event["args"]["job"] == job).count();
        assert!((1..=2 * QUEUE_MAX).contains(&jobs("one")), "{}", jobs("one"));
        let told: u64 = events
            .iter()
            .filter_map(|event| event["name"].as_str()?.split_once(" events left out")?.0.parse::<u64>().ok())
            .sum();
        assert_eq!(jobs("one") + jobs("two") + usize::try_from(told).expect("few"), 2 * QUEUE_MAX + 1);
    }

    #[test]
    fn a_file_that_cannot_be_written_is_an_error_at_once() {
        let config = TraceConfig { file: "/nowhere/at/all.json".into(), rank: 0 };
        assert!(
            SessionTrace::open(&config, "job").is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
        );
    }
}
