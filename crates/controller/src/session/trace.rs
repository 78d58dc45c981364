//! A timeline of a process's all-reduces, in Chrome's trace format, which chrome://tracing and
//! Perfetto open.
//!
//! Who completes an all-reduce, often an I/O thread, leaves its times in a queue; a thread of the
//! file's own writes. After each write the file is whole: the next one begins on top of the bracket
//! that ends the array.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use fanin_local::Completed;
use fanin_protocol::{Instant, Loss};
use fanin_udp::{Clock, PartTimes};

use self::recorder::Sample;
use self::writer::Writer;
use super::warnings::say;
use crate::error::{AllReduceError, SessionError, Tensor};

mod recorder;
mod writer;

pub(super) use self::recorder::record;
pub use self::writer::SERVICES_IN_TRACES;

/// All-reduces that wait to be written. More are left out, and counted.
const QUEUE_MAX: usize = 4096;
/// How long a session that ends waits for the file.
const FLUSH: Duration = Duration::from_secs(1);

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

/// The collectives that a session has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TracedAs {
    /// Those of the program.
    Ranks,
    /// Those between machines whose ranks sum first. Each is a segment of a tensor.
    Machines,
}

/// The file's other side: a queue to the thread that writes it.
#[derive(Debug)]
struct Trace {
    /// Its writer is in this process, and in no process that was forked from it.
    process: u32,
    queue: SyncSender<Message>,
    lost: Arc<AtomicU64>,
}

#[derive(Debug)]
enum Message {
    Done(Row, Done),
    Taken(Row, Taken),
    Service(Arc<str>, Sample),
    /// All of a job is to be in the file, which ends.
    Flush(Arc<str>, SyncSender<()>),
}

/// A row of the viewer.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Row {
    job: Arc<str>,
    kind: RowKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum RowKind {
    /// The ranks of a machine.
    Memory,
    Shard(usize),
    /// The threads that take results over.
    Program,
    Failed,
}

/// A shard's part of a collective that is done, or a machine's, or a collective that failed.
#[derive(Debug)]
struct Done {
    collective: Tensor,
    traced_as: TracedAs,
    submitted: Instant,
    outcome: Result<Way, String>,
    done: Instant,
}

/// The way of a collective from its submission to its end.
#[derive(Debug)]
enum Way {
    Shard(PartTimes),
    Memory(MemoryTimes),
}

/// [`Completed`], by the driver's clock.
#[derive(Debug)]
struct MemoryTimes {
    begun: Instant,
    contributed: Instant,
    summed: Instant,
    loss: Loss,
}

impl Way {
    /// Each phase's name and end. The last one ends with the collective.
    fn phases(&self, done: Instant) -> Vec<(&'static str, Instant)> {
        let mut phases = match self {
            Self::Shard(PartTimes { times, .. }) => {
                vec![("queued", times.first_sent), ("exchanging", times.last_result)]
            }
            Self::Memory(times) => {
                vec![("queued", times.begun), ("contributing", times.contributed), ("awaiting", times.summed)]
            }
        };
        phases.push(("completing", done));
        phases
    }

    const fn loss(&self) -> Loss {
        match self {
            Self::Shard(part) => part.times.loss,
            Self::Memory(times) => times.loss,
        }
    }
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
    traced_as: TracedAs,
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

impl TraceConfig {
    /// A session's part in the file, which is made if it is not open yet.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(super) fn open(&self, job: &str, traced_as: TracedAs) -> Result<SessionTrace, SessionError> {
        SessionTrace::open(self, job, traced_as).map_err(|error| SessionError::Local {
            what: "opening the trace file (FANIN_TRACE)",
            cause: format!("{}: {error}", self.file.display()),
        })
    }
}

impl SessionTrace {
    fn open(config: &TraceConfig, job: &str, traced_as: TracedAs) -> io::Result<Self> {
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
        Ok(Self { trace, job: job.into(), traced_as })
    }

    /// A collective of the services is done. Never blocks.
    pub fn done(
        &self,
        collective: Tensor,
        submitted: Instant,
        outcome: &Result<Vec<PartTimes>, AllReduceError>,
    ) -> HandOver {
        let done = Clock.now();
        let ways = outcome.as_ref().map(|parts| parts.iter().copied().map(Way::Shard));
        self.send_done(collective, (submitted, done), ways);
        self.hand_over(collective, done, loss_of(outcome))
    }

    /// A collective of a machine's ranks is done. Never blocks.
    pub fn done_here(
        &self,
        collective: Tensor,
        submitted: std::time::Instant,
        outcome: &Result<Completed, AllReduceError>,
    ) -> HandOver {
        let now = std::time::Instant::now();
        // Both read one clock of the machine.
        let done = Clock.now();
        let by_driver = |moment: std::time::Instant| {
            Instant(done.0.saturating_sub(now.saturating_duration_since(moment).as_nanos() as u64))
        };
        let ways = outcome.as_ref().map(|&Completed { loss, begun, contributed, summed }| {
            let [begun, contributed, summed] = [begun, contributed, summed].map(by_driver);
            [Way::Memory(MemoryTimes { begun, contributed, summed, loss })]
        });
        self.send_done(collective, (by_driver(submitted), done), ways);
        self.hand_over(collective, done, outcome.as_ref().map(|done| done.loss).unwrap_or_default())
    }

    fn send_done(
        &self,
        collective: Tensor,
        (submitted, done): (Instant, Instant),
        ways: Result<impl IntoIterator<Item = Way>, &AllReduceError>,
    ) {
        let traced_as = self.traced_as;
        let event = |outcome| Done { collective, traced_as, submitted, outcome, done };
        match ways {
            Ok(ways) => {
                for way in ways {
                    let kind = match &way {
                        Way::Shard(part) => RowKind::Shard(part.lane),
                        Way::Memory(_) => RowKind::Memory,
                    };
                    self.send(kind, |row| Message::Done(row, event(Ok(way))));
                }
            }
            Err(error) => {
                self.send(RowKind::Failed, |row| Message::Done(row, event(Err(error.cause.to_string()))));
            }
        }
    }

    fn hand_over(&self, collective: Tensor, done: Instant, loss: Loss) -> HandOver {
        HandOver { way: Some((self.clone(), collective.number, done)), loss }
    }

    fn send(&self, kind: RowKind, message: impl FnOnce(Row) -> Message) {
        self.queue(|job| message(Row { job, kind }));
    }

    /// A service's work for the job.
    fn service(&self, sample: Sample) {
        self.queue(|job| Message::Service(job, sample));
    }

    fn queue(&self, message: impl FnOnce(Arc<str>) -> Message) {
        if self.trace.process != std::process::id() {
            return;
        }
        if self.trace.queue.try_send(message(Arc::clone(&self.job))).is_err() {
            self.trace.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until all that was done is in the file, unless that takes too long.
    pub fn flush(&self) {
        if self.trace.process != std::process::id() {
            return;
        }
        let until = std::time::Instant::now() + FLUSH;
        let (sender, written) = sync_channel(1);
        let mut message = Message::Flush(Arc::clone(&self.job), sender);
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
        Ok(Self { process: std::process::id(), queue, lost })
    }
}

/// What the sum of a tensor lacks, over its parts.
fn loss_of<E>(outcome: &Result<Vec<PartTimes>, E>) -> Loss {
    let mut sum = Loss::default();
    outcome.iter().flatten().for_each(|part| sum += part.times.loss);
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use fanin_udp::CollectiveKind;
    use fanin_wire::{Dtype, Op};
    use serde_json::Value;

    /// A folder of this test alone, which goes with it.
    pub struct Scratch(tempfile::TempDir);

    impl Scratch {
        pub fn new() -> Self {
            Self(tempfile::tempdir().expect("a folder"))
        }

        pub fn file(&self) -> PathBuf {
            self.0.path().join("trace.json")
        }

        pub fn config(&self) -> TraceConfig {
            TraceConfig { file: self.file(), rank: 3 }
        }

        pub fn events(&self) -> Vec<Value> {
            let text = std::fs::read_to_string(self.file()).expect("a trace");
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}"))
        }
    }

    #[test]
    fn sessions_of_a_process_share_a_file_and_a_flush_leaves_nothing_behind() {
        let scratch = Scratch::new();
        let [first, second] = ["one", "two"]
            .map(|job| SessionTrace::open(&scratch.config(), job, TracedAs::Ranks).expect("open"));
        let kind = CollectiveKind::AllReduce;
        let all_reduce = |number| Tensor { kind, number, elements: 1, dtype: Dtype::Int32, op: Op::Average };
        let fail = |session: &SessionTrace, number| {
            let (tensor, switch) = (all_reduce(number), "sw:4800".into());
            let error =
                AllReduceError { cause: SessionError::Closed, tensor, switch, waited: Duration::ZERO };
            session.done(tensor, Clock.now(), &Err(error));
        };
        (0..2 * QUEUE_MAX as u64).for_each(|number| fail(&first, number));
        fail(&second, 0);
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
            SessionTrace::open(&config, "job", TracedAs::Ranks)
                .is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
        );
    }
}
