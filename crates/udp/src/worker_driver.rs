//! A worker on real sockets: one thread and one connected socket a shard.

use crate::clock::Clock;
use crate::failure::invalid;
use crate::io_loop::{self, Shard};
use crate::mailbox::{self, Post, mailbox};
use crate::part::{AllReduce, Part, PartTimes};
use crate::socket::{check_shards, connect};
use crate::train_socket::{Peer, TrainSocket};
use crate::{Failure, IoStatistics, Offload, RawTensor, WorkerJob};
use fanin_protocol::atp::{AtpWorker, AtpWorkerPlan};
use fanin_protocol::switchml::{JobConfig, Worker, WorkerPlan};
use fanin_protocol::{RetransmissionConfig, WorkerEvent, WorkerMachine, WorkerStatistics};
use fanin_wire::{Op, ShardId, SlotIndex, WorkerId};
use std::any::Any;
use std::io;
use std::net::SocketAddr;
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

/// Told once what became of an all-reduce, and when its parts were on their way (shards whose part was empty apart). It is
/// usually called by an I/O thread: it must be quick, must not block, and must not panic.
pub type Done = Box<dyn FnOnce(Result<Vec<PartTimes>, Failure>) + Send>;

/// Most elements of one collective on the wire; a longer tensor is reduced in pieces. Half of what the header can say.
const PIECE_ELEMENTS_MAX: usize = 1 << 31;

/// Fewest chunks for which it pays to wake one more shard's thread: most of a train.
const PART_CHUNKS_MIN: usize = 32;

/// One worker of an admitted job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerConfig {
    /// The job, as this worker was admitted to it.
    pub job: WorkerJob,
    /// Which of the job's workers this is.
    pub worker: WorkerId,
    /// The switch.
    pub switch: SocketAddr,
    /// Shards of the switch, 1 to [`crate::SHARDS_MAX`]; one with ATP.
    pub shards: usize,
    /// When to send again.
    pub retransmission: RetransmissionConfig,
}

/// A running worker. Dropping it fails what is outstanding, then stops and joins its threads.
#[derive(Debug)]
pub struct WorkerDriver {
    shared: Arc<Shared>,
    config: WorkerConfig,
    offload: Offload,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    lanes: Vec<Lane>,
    /// Held while an all-reduce is handed to the shards, so that all shards see the same order. Holds why nothing is taken
    /// any more.
    ended: Mutex<Option<Failure>>,
    outstanding: Arc<AtomicUsize>,
    progress: AtomicU64,
}

/// A shard's mailbox, which says what machine empties it.
#[derive(Debug)]
enum Lane {
    SwitchMl(Post<Command<Worker<Peer, Part>>>),
    Atp(Post<Command<AtpWorker<Peer, Part>>>),
}

/// What a thread is told that runs an `M`.
enum Command<M: WorkerMachine> {
    Any(AnyCommand),
    Suspend(SyncSender<M::Memory>),
    Resume { plan: M::Plan, socket: TrainSocket, reply: SyncSender<()> },
}

/// What a thread is told whatever it runs.
enum AnyCommand {
    Submit(Part, Op),
    Fail(Failure),
    Statistics(SyncSender<(WorkerStatistics, IoStatistics)>),
    Stop,
}

impl Lane {
    /// Gives the command back, as something to drop, when the thread has ended.
    fn send(&self, command: AnyCommand) -> Result<(), Box<dyn Any>> {
        match self {
            Self::SwitchMl(post) => {
                post.send(Command::Any(command)).map_err(|refused| Box::new(refused) as _)
            }
            Self::Atp(post) => post.send(Command::Any(command)).map_err(|refused| Box::new(refused) as _),
        }
    }

    /// Stops sending and taking. Returns how many exchanges each slot has completed: ATP has no slots.
    fn suspend(&self) -> Vec<u32> {
        match self {
            Self::SwitchMl(post) => post.ask(Command::Suspend).unwrap_or_default(),
            Self::Atp(post) => post.ask(Command::Suspend).map(|()| Vec::new()).unwrap_or_default(),
        }
    }

    /// Goes on through another socket.
    fn resume(
        &self,
        job: WorkerJob,
        shard: ShardId,
        switch: Peer,
        socket: TrainSocket,
        restore: &[SlotIndex],
    ) -> io::Result<()> {
        let resumed = match (self, job) {
            (Self::SwitchMl(post), WorkerJob::SwitchMl(job)) => {
                let config = JobConfig { shard, ..job };
                let plan = WorkerPlan { config, switch, restore: restore.to_vec() };
                post.ask(|reply| Command::Resume { plan, socket, reply })
            }
            (Self::Atp(post), WorkerJob::Atp { config, directions }) => {
                let (id, generation) = (config.id, config.generation);
                let plan = AtpWorkerPlan { id, generation, directions, upstream: switch };
                post.ask(|reply| Command::Resume { plan, socket, reply })
            }
            _ => return Err(invalid("a worker goes on in no job of another protocol")),
        };
        resumed.ok_or_else(|| io::Error::other(Failure::Stopped))
    }
}

impl WorkerDriver {
    /// Opens the sockets and starts the threads.
    ///
    /// # Errors
    /// When a number of `config` is outside its limit, or there is no route to the switch.
    pub fn start(config: WorkerConfig) -> io::Result<Self> {
        Self::start_with_offload(config, Offload::Detect)
    }

    /// As [`Self::start`], saying whether the kernel may cut and join trains.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_with_offload(config: WorkerConfig, offload: Offload) -> io::Result<Self> {
        let job = config.job;
        job.check()?;
        check_shards(config.shards)?;
        if u16::from(config.worker.0) >= job.workers() {
            return Err(invalid(format!("worker {} of a job of {}", config.worker.0, job.workers())));
        }
        if config.shards != 1 && matches!(job, WorkerJob::Atp { .. }) {
            return Err(invalid(format!("an ATP job in {} shards: it has one", config.shards)));
        }
        let (worker, switch) = (config.worker, Peer::from(config.switch));
        match job {
            WorkerJob::SwitchMl(job) => Self::launch(config, offload, Lane::SwitchMl, |shard| {
                Worker::new(JobConfig { shard, ..job }, worker, switch, config.retransmission)
            }),
            WorkerJob::Atp { config: job, directions } => Self::launch(config, offload, Lane::Atp, |_| {
                AtpWorker::new(job, directions, switch, config.retransmission)
            }),
        }
    }

    fn launch<M>(
        config: WorkerConfig,
        offload: Offload,
        lane: impl Fn(Post<Command<M>>) -> Lane,
        machine: impl Fn(ShardId) -> M,
    ) -> io::Result<Self>
    where
        M: WorkerMachine<Address = Peer, Tensor = Part, Plan: Send, Memory: Send> + Send + 'static,
    {
        let sockets = connect_all(config.switch, config.shards, offload)?;
        let (posts, mailboxes): (Vec<_>, Vec<_>) =
            (0..config.shards).map(|_| mailbox()).collect::<io::Result<Vec<_>>>()?.into_iter().unzip();
        let shared = Arc::new(Shared {
            lanes: posts.into_iter().map(lane).collect(),
            ended: Mutex::new(None),
            outstanding: Arc::default(),
            progress: AtomicU64::new(0),
        });
        // Dropped with what runs already, if one cannot be started.
        let driver = Self { shared, config, offload, threads: Mutex::default() };
        for ((index, socket), mailbox) in (0u8..).zip(sockets).zip(mailboxes) {
            let shard = WorkerShard { machine: machine(ShardId(index)), shared: Arc::clone(&driver.shared) };
            let thread = thread::Builder::new().name(format!("fanin-worker-{index}"));
            driver.threads().push(thread.spawn(move || io_loop::run(shard, socket, &mailbox))?);
        }
        Ok(driver)
    }

    /// Starts the sum of `tensor` over all workers, in place. All workers must submit alike tensors in the same order.
    ///
    /// Each shard takes a contiguous part of whole chunks. `done` is called once, when no thread here can reach the tensor
    /// any more: by the I/O thread that was last to finish, or in this call when the worker has ended. They may
    /// finish in another order than they were submitted in, and the calls for two that finish together may overlap.
    pub fn submit(&self, tensor: RawTensor, op: Op, done: Done) {
        let all_reduce = AllReduce::new(done, Arc::clone(&self.shared.outstanding));
        let ended = self.shared.ended();
        if let Some(failure) = ended.clone() {
            drop(ended);
            all_reduce.fail(failure);
            return;
        }
        let mut refused = Vec::new();
        let chunk = |piece: usize| self.config.job.packet_elements(tensor.dtype(), piece);
        let mut parts =
            parts(tensor.elements(), chunk, self.shared.lanes.len(), PIECE_ELEMENTS_MAX).peekable();
        let mut all_reduce = Some(all_reduce);
        while let Some(Cut { shard, range, piece }) = parts.next() {
            // The last part takes our reference with it: the I/O threads finish the all-reduce, not this one.
            let reference = if parts.peek().is_some() { all_reduce.clone() } else { all_reduce.take() };
            let Some(reference) = reference else { break };
            // SAFETY: the ranges are disjoint, and `tensor` itself is not used.
            let part = Part::new(unsafe { tensor.part(range) }, shard, piece, reference);
            refused.extend(self.shared.lanes[shard].send(AnyCommand::Submit(part, op)).err());
        }
        // Dropping what a lost thread refused may call `done`; not under the lock.
        drop(ended);
        drop(refused);
    }

    /// Stops sending and taking, because the switch is gone; what is outstanding waits. Returns for each shard how many
    /// exchanges each slot has completed, wrapping.
    #[must_use]
    pub fn suspend(&self) -> Vec<Vec<u32>> {
        self.shared.lanes.iter().map(Lane::suspend).collect()
    }

    /// Goes on under a switch with empty memory, handing the sums of the slots in `restore` (one list a shard) back to it.
    /// The job keeps its protocol, chunk length, wire dtype, slots and shards. The sockets are new: nothing of the old switch is left in them.
    ///
    /// # Errors
    /// When the job does not keep what it must, there is no route to the switch, or the worker has ended or ends
    /// meanwhile.
    pub fn resume(&self, job: WorkerJob, switch: SocketAddr, restore: &[Vec<SlotIndex>]) -> io::Result<()> {
        job.check()?;
        let (was, is) = (self.config.job.shape(), job.shape());
        let shards = self.shared.lanes.len();
        if (&was, shards) != (&is, restore.len()) {
            let message =
                format!("a job of {was} in {shards} shards cannot go on as one of {is} in {}", restore.len());
            return Err(invalid(message));
        }
        if let Some(failure) = self.shared.ended().clone() {
            return Err(io::Error::other(failure));
        }
        let sockets = connect_all(switch, shards, self.offload)?;
        for (((index, lane), socket), restore) in (0u8..).zip(&self.shared.lanes).zip(sockets).zip(restore) {
            lane.resume(job, ShardId(index), switch.into(), socket, restore)?;
        }
        // It may have failed meanwhile; the shards stay as that left them.
        self.shared.ended().clone().map_or(Ok(()), |failure| Err(io::Error::other(failure)))
    }

    /// Ends everything outstanding, and everything that is submitted later, with `failure`. The first failure stays.
    pub fn fail(&self, failure: Failure) {
        self.shared.fail(failure);
    }

    /// What everything that is submitted fails with, if it does.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        self.shared.ended().clone()
    }

    /// All-reduces whose `done` was not called yet.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.shared.outstanding.load(Ordering::Acquire)
    }

    /// Packets that counted, so far: while it moves, the job does.
    #[must_use]
    pub fn progress_marker(&self) -> u64 {
        self.shared.progress.load(Ordering::Relaxed)
    }

    /// Counters over all shards. `completed` is what the slowest shard has finished, pieces of very long tensors
    /// apart; `smoothed_rtt` is the slowest shard's.
    #[must_use]
    pub fn statistics(&self) -> WorkerStatistics {
        self.all_statistics().map(|(shard, _)| shard).reduce(add_statistics).unwrap_or_default()
    }

    /// System calls and what became of them, over all shards.
    #[must_use]
    pub fn io_statistics(&self) -> IoStatistics {
        self.all_statistics().fold(IoStatistics::default(), |mut sum, (_, shard)| {
            sum += shard;
            sum
        })
    }

    /// Fails what is outstanding and joins the threads: afterwards no tensor is touched and `done` of each was called. Whoever
    /// still asks it things gets no answer.
    pub fn stop(&self) {
        self.shared.fail(Failure::Stopped);
        for lane in &self.shared.lanes {
            let _ = lane.send(AnyCommand::Stop);
        }
        let threads = std::mem::take(&mut *self.threads());
        for thread in threads {
            // A `done` that held the last reference to the driver drops it on an I/O thread, which cannot await itself.
            if thread.thread().id() != thread::current().id() {
                // A thread that panicked has said so on standard error.
                let _ = thread.join();
            }
        }
    }

    fn threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all_statistics(&self) -> impl Iterator<Item = (WorkerStatistics, IoStatistics)> {
        self.shared
            .lanes
            .iter()
            .filter_map(|lane| mailbox::ask(|reply| lane.send(AnyCommand::Statistics(reply))))
    }
}

impl Drop for WorkerDriver {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn ended(&self) -> MutexGuard<'_, Option<Failure>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, failure: Failure) {
        let mut ended = self.ended();
        if ended.is_some() {
            return;
        }
        *ended = Some(failure.clone());
        // Under the lock: what was submitted before is in the mailboxes before this.
        for lane in &self.lanes {
            let _ = lane.send(AnyCommand::Fail(failure.clone()));
        }
    }
}

fn connect_all(switch: SocketAddr, shards: usize, offload: Offload) -> io::Result<Vec<TrainSocket>> {
    (0..shards).map(|_| TrainSocket::new(connect(switch)?, offload)).collect()
}

/// What one shard does of a tensor.
struct Cut {
    shard: usize,
    /// Elements of the tensor.
    range: Range<usize>,
    /// Elements of the piece that all shards do together: one collective on the wire.
    piece: usize,
}

/// How a tensor is cut: pieces of at most `piece_max` elements, and each piece into one part of whole chunks (whose length a
/// piece's decides) a shard (all
/// but the last part, whose last chunk may be shorter), if that has [`PART_CHUNKS_MIN`]. Every shard gets a part of every
/// piece, if only an empty one, so that all of them count collectives alike.
fn parts(
    elements: usize,
    chunk: impl Fn(usize) -> usize,
    shards: usize,
    piece_max: usize,
) -> impl Iterator<Item = Cut> {
    (0..elements.div_ceil(piece_max).max(1)).flat_map(move |piece| {
        let begin = piece * piece_max;
        let length = (elements - begin).min(piece_max);
        let chunk = chunk(length);
        let chunks = length.div_ceil(chunk);
        let used = chunks.div_ceil(PART_CHUNKS_MIN).clamp(1, shards);
        let cut = move |shard: usize| begin + (chunks * shard.min(used) / used * chunk).min(length);
        (0..shards).map(move |shard| Cut { shard, range: cut(shard)..cut(shard + 1), piece: length })
    })
}

fn add_statistics(mut sum: WorkerStatistics, shard: WorkerStatistics) -> WorkerStatistics {
    sum.packets_sent += shard.packets_sent;
    sum.received += shard.received;
    sum.retransmissions += shard.retransmissions;
    sum.smoothed_rtt = sum.smoothed_rtt.max(shard.smoothed_rtt);
    sum.completed = sum.completed.min(shard.completed);
    sum
}

struct WorkerShard<M> {
    machine: M,
    shared: Arc<Shared>,
}

impl<M> Drop for WorkerShard<M> {
    fn drop(&mut self) {
        // The other shards hold halves of the same tensors, and would wait for what nobody sends.
        if thread::panicking() {
            self.shared.fail(Failure::of_drop());
        }
    }
}

impl<M: WorkerMachine<Address = Peer, Tensor = Part>> Shard for WorkerShard<M> {
    type Machine = M;
    type Command = Command<M>;

    fn machine(&mut self) -> &mut M {
        &mut self.machine
    }

    /// A reply fails when nobody waits for it any more; that is no concern of ours.
    fn command(&mut self, command: Command<M>, socket: &mut TrainSocket) -> ControlFlow<()> {
        match command {
            Command::Any(AnyCommand::Submit(part, op)) => self.machine.submit(part, op),
            Command::Any(AnyCommand::Fail(failure)) => {
                for part in self.machine.abandon() {
                    part.fail(failure.clone());
                }
            }
            Command::Any(AnyCommand::Statistics(reply)) => {
                let _ = reply.send((self.machine.statistics(), socket.statistics));
            }
            Command::Any(AnyCommand::Stop) => return ControlFlow::Break(()),
            Command::Suspend(reply) => {
                let _ = reply.send(self.machine.suspend());
            }
            Command::Resume { plan, socket: new, reply } => {
                let statistics = socket.statistics;
                *socket = new;
                socket.statistics = statistics;
                self.machine.resume(Clock.now(), plan);
                let _ = reply.send(());
            }
        }
        ControlFlow::Continue(())
    }

    fn event(&mut self, event: WorkerEvent<Part>) {
        match event {
            WorkerEvent::Completed(part, times) => part.complete(times),
            // The other shards' tensors are halves of the same ones.
            WorkerEvent::Aborted(reason) => self.shared.fail(Failure::Aborted(reason)),
        }
    }

    fn progress(&mut self, packets: u64) {
        self.shared.progress.fetch_add(packets, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fanin_wire::{Generation, JobId, WireDtype};

    #[test]
    fn a_lane_hands_its_thread_no_plan_of_another_protocol() {
        let (post, mailbox) = mailbox().unwrap();
        let switch = SocketAddr::from(([127, 0, 0, 1], 4800));
        let job = JobConfig {
            id: JobId(1),
            generation: Generation(1),
            workers: 1,
            slots: 1,
            elements: 256,
            wire_dtype: WireDtype::Int32,
            shard: ShardId(0),
            resumed: true,
        };
        let socket = connect_all(switch, 1, Offload::Never).unwrap().remove(0);
        let resumed = Lane::Atp(post).resume(job.into(), ShardId(0), switch.into(), socket, &[]);
        assert_eq!(resumed.unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert!(mailbox.take().is_none());
    }

    #[test]
    fn a_tensor_is_cut_into_contiguous_parts_of_whole_chunks() {
        let cut = |elements, shards, piece_max| {
            parts(elements, |_| 4, shards, piece_max).map(|cut| (cut.shard, cut.range)).collect::<Vec<_>>()
        };
        assert_eq!(cut(10, 1, 1000), [(0, 0..10)]);
        assert_eq!(cut(133, 2, 1000), [(0, 0..68), (1, 68..133)]);
        assert_eq!(cut(0, 2, 1000), [(0, 0..0), (1, 0..0)]);
        assert_eq!(cut(300, 2, 160), [(0, 0..80), (1, 80..160), (0, 160..228), (1, 228..300)]);
    }

    #[test]
    fn a_short_last_piece_is_cut_by_its_own_chunks() {
        let chunk = |piece| if piece < 1000 { 8 } else { 4 };
        let cut: Vec<_> = parts(1000 + 65 * 8, chunk, 2, 1000).map(|cut| cut.range).collect();
        assert_eq!(cut, [0..500, 500..1000, 1000..1256, 1256..1520]);
    }

    #[test]
    fn parts_shorter_than_a_train_are_not_made() {
        let lengths = |elements| {
            parts(elements, |_| 4, 3, 1000).map(|cut| (cut.shard, cut.range.len())).collect::<Vec<_>>()
        };
        assert_eq!(lengths(3), [(0, 3), (1, 0), (2, 0)]);
        assert_eq!(lengths(4 * PART_CHUNKS_MIN), [(0, 128), (1, 0), (2, 0)]);
        assert_eq!(lengths(4 * PART_CHUNKS_MIN + 1), [(0, 64), (1, 65), (2, 0)]);
        assert_eq!(lengths(4 * 2 * PART_CHUNKS_MIN + 1), [(0, 84), (1, 88), (2, 85)]);
    }
}
