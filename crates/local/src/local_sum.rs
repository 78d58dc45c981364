//! A rank's thread: it contributes, sums its column, speaks to the network, and reads the sums, whichever can go on.

use crate::cut::{Cut, Stretch};
use crate::error::{self, LocalError};
use crate::gate::{CONTRIBUTED, GATES, Party, READ, READY, SUMMED};
use crate::memory::SharedMemory;
use crate::sums;
use fanin_udp::{CollectiveKind, Failure, RawTensor, Submission};
use fanin_wire::{Dtype, Op, Operation, Pattern, WorkerId};
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Told once what became of a collective. It must be quick, must not block, and must not panic.
pub type Done = Box<dyn FnOnce(Result<(), Failure>) + Send>;

/// How often a rank that waits looks whether those that it waits for are alive.
const LOOK: Duration = Duration::from_millis(100);
/// The same while it has nothing to do.
const IDLE: Duration = Duration::from_secs(1);

/// What is above the ranks of a machine: the collectives over machines, of what stands in one column.
pub trait Network: Send {
    /// Starts a collective over the same column of all machines, in place, in which each machine is a rank. All machines submit alike ones in the same order.
    ///
    /// A failure that is a [`LocalError`] is told to the other ranks of the machine as it is; of any other they learn whose it was.
    fn submit(&self, submission: Submission, done: Done);
}

/// What a rank sums with.
pub struct LocalConfig {
    /// Opened by all ranks of the machine.
    pub memory: SharedMemory,
    /// For a rank that is a column of a group with other machines, and for no other.
    pub network: Option<Box<dyn Network>>,
    /// Of each rank of the whole job its machine, numbered from 0.
    pub machines: Vec<usize>,
    /// How long the ranks of the machine may keep a collective waiting, from its submission or the end of the one before it.
    pub timeout: Duration,
}

/// The sums of one rank with the others of its machine. Dropping it leaves them; what is outstanding fails.
#[derive(Debug)]
pub struct LocalSum {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the rank's thread shares with those that submit, and with the network's.
struct Shared {
    memory: SharedMemory,
    places: Places,
    inbox: Mutex<Inbox>,
    outstanding: Arc<AtomicUsize>,
    timeout_nanos: AtomicU64,
    /// Segments of this column that the network has summed, out of order.
    summed: Mutex<Summed>,
}

#[derive(Default)]
struct Inbox {
    items: VecDeque<Item>,
    next_number: u64,
    /// Why nothing is taken any more.
    ended: Option<Failure>,
    stopped: bool,
}

#[derive(Default)]
struct Summed {
    /// All before it are told.
    next: u64,
    early: BTreeSet<u64>,
}

/// Where the ranks of the job are.
struct Places {
    machines: Vec<usize>,
    /// All ranks, those of one machine one behind the other: tensors of which each rank has one stand so.
    order: Vec<usize>,
    /// As [`Cut`] wants them: of such tensors, and of a single one.
    of_each: Arc<[usize]>,
    of_one: Arc<[usize]>,
    /// This rank's.
    me: usize,
}

/// A collective. Dropped, it fails.
struct Item {
    number: u64,
    kind: CollectiveKind,
    op: Op,
    /// Of what has one.
    root: Option<WorkerId>,
    /// One; or one a rank, as [`Places`] orders them.
    tensors: Vec<RawTensor>,
    /// Which one this rank alone gets, or has what all get.
    own: Option<usize>,
    cut: Cut,
    submitted: Instant,
    outstanding: Arc<AtomicUsize>,
    done: Option<Done>,
}

/// How far the thread is with one of its tasks. All walk the same way.
#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    item: u64,
    /// Of the item.
    segment: usize,
    /// Of the segment.
    block: usize,
    /// Since the group began.
    segments: u64,
    blocks: u64,
}

struct Engine {
    shared: Arc<Shared>,
    network: Option<Box<dyn Network>>,
    items: VecDeque<Item>,
    contribute: Cursor,
    sum: Cursor,
    read: Cursor,
    /// When the last item was over.
    progressed: Instant,
    looked: Instant,
}

/// Why a task cannot go on: a gate is not open so far.
type Wish = (usize, u64);

impl LocalSum {
    /// Starts the rank's thread.
    ///
    /// # Errors
    /// When there is none to be had.
    ///
    /// # Panics
    /// When a rank has a network that is to have none, or the reverse; when the memory's ranks are not those of a machine.
    pub fn start(config: LocalConfig) -> io::Result<Self> {
        let LocalConfig { memory, network, machines, timeout } = config;
        let speaks = memory.group.networked && memory.me < memory.group.columns;
        assert_eq!(network.is_some(), speaks, "columns speak to a network where there is one");
        let places = Places::new(machines, memory.group.ranks[memory.me] as usize);
        let here = places.order[places.here()].iter().map(|rank| *rank as u32);
        assert!(here.eq(memory.group.ranks.iter().copied()), "a memory is for the ranks of its machine");
        let shared = Arc::new(Shared {
            memory,
            places,
            inbox: Mutex::default(),
            outstanding: Arc::default(),
            timeout_nanos: AtomicU64::default(),
            summed: Mutex::default(),
        });
        let now = Instant::now();
        let engine = Engine {
            shared: Arc::clone(&shared),
            network,
            items: VecDeque::new(),
            contribute: Cursor::default(),
            sum: Cursor::default(),
            read: Cursor::default(),
            progressed: now,
            looked: now,
        };
        let thread = thread::Builder::new().name("fanin-local".into()).spawn(move || engine.run())?;
        let local = Self { shared, thread: Mutex::new(Some(thread)) };
        local.set_timeout(timeout);
        Ok(local)
    }

    /// Starts a collective over all ranks of the job, in place. All ranks must submit alike ones in the same order.
    ///
    /// A sum has the same bits on all ranks that get it. How far it is from the exact one: `docs/local.md`.
    ///
    /// # Panics
    /// When the slices of a reduce_scatter or an all_gather are not of one length, and one a rank; when a root is none of the ranks.
    pub fn submit(&self, submission: Submission, done: Done) {
        let shared = &self.shared;
        if shared.memory.is_forked() {
            return done(Err(Failure::Because(Arc::new(LocalError::Forked))));
        }
        let mut inbox = shared.inbox();
        if let Some(failure) = inbox.ended.clone() {
            drop(inbox);
            return done(Err(failure));
        }
        let number = inbox.next_number;
        inbox.next_number += 1;
        shared.outstanding.fetch_add(1, Ordering::Relaxed);
        inbox.items.push_back(Item::new(shared, number, submission, done));
        drop(inbox);
        shared.memory.seat(shared.memory.me).ring();
    }

    /// Collectives whose `done` was not called yet.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.shared.outstanding.load(Ordering::Acquire)
    }

    /// Ranks of the job, on this machine, that have not contributed to what this rank has.
    #[must_use]
    pub fn awaited(&self) -> Vec<u32> {
        let memory = &self.shared.memory;
        if memory.is_forked() {
            return Vec::new();
        }
        let contributed = |rank: usize| memory.seat(rank).reached(CONTRIBUTED);
        let behind = |rank: &usize| contributed(*rank) < contributed(memory.me);
        (0..memory.layout.ranks).filter(behind).map(|rank| memory.group.ranks[rank]).collect()
    }

    /// Changes [`LocalConfig::timeout`], for what is under way too.
    pub fn set_timeout(&self, timeout: Duration) {
        let nanos = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        self.shared.timeout_nanos.store(nanos, Ordering::Relaxed);
    }

    /// Ends everything outstanding, here and on the machine's other ranks, and everything that is submitted later. The first failure stays.
    pub fn fail(&self, failure: Failure) {
        if !self.shared.memory.is_forked() {
            self.shared.fail(failure);
        }
    }

    /// What everything that is submitted fails with, if it does.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        self.shared.inbox().ended.clone()
    }

    /// Leaves the group, and returns when no tensor is touched any more. What is outstanding fails.
    pub fn stop(&self) {
        if self.shared.memory.is_forked() {
            // The thread is the parent's.
            return;
        }
        {
            let mut inbox = self.shared.inbox();
            inbox.stopped = true;
            inbox.ended.get_or_insert(Failure::Stopped);
        }
        self.shared.memory.seat(self.shared.memory.me).ring();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A `done` that held the last reference drops it on the rank's thread, which cannot await itself.
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != thread::current().id()) {
            // One that panicked has said so on standard error.
            let _ = thread.join();
        }
    }
}

impl Drop for LocalSum {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Arrives at a gate, and rings for those that waited for it.
    fn arrive(&self, gate: usize, unit: u64) {
        let memory = &self.memory;
        let layout = &memory.layout;
        let (slots, parties) = match gate {
            CONTRIBUTED => (layout.contributions, layout.ranks),
            SUMMED => (layout.contributions, layout.blocks.columns),
            READY => (layout.segments, layout.blocks.columns),
            _ => (layout.segments, layout.ranks),
        };
        memory.seat(memory.me).reach(gate, unit + 1);
        for rank in memory.gate(gate).arrive(unit, slots, parties) {
            // It looks at all gates anyway before it sleeps.
            if rank != memory.me || gate == READY {
                memory.seat(rank).ring();
            }
        }
    }

    /// The column's slice of a segment is the sum over all machines. They are told in order.
    fn is_ready(&self, segment: u64) {
        let mut summed = self.summed.lock().unwrap_or_else(PoisonError::into_inner);
        summed.early.insert(segment);
        loop {
            let next = summed.next;
            if !summed.early.remove(&next) {
                break;
            }
            self.arrive(READY, next);
            summed.next += 1;
        }
    }

    fn fail(&self, failure: Failure) {
        let ending = match &failure {
            Failure::Because(cause) => cause.downcast_ref::<LocalError>().and_then(Ending::of),
            _ => None,
        };
        {
            let mut inbox = self.inbox();
            inbox.ended.get_or_insert(failure);
            if inbox.stopped {
                // It has left, which is all that the others need to know.
                return;
            }
        }
        let ending = ending.unwrap_or(Ending::Ended(self.memory.group.ranks[self.memory.me]));
        self.end(ending);
    }

    fn end(&self, ending: Ending) {
        // The first one stays.
        let _ = self.memory.ended().compare_exchange(0, ending.pack(), Ordering::AcqRel, Ordering::Acquire);
        self.memory.ring_all();
    }
}

impl Places {
    fn new(machines: Vec<usize>, me: usize) -> Self {
        let mut order: Vec<usize> = (0..machines.len()).collect();
        order.sort_by_key(|rank| machines[*rank]);
        let is_first = |place: &usize| *place == 0 || machines[order[*place]] != machines[order[*place - 1]];
        let of_each = (0..order.len()).filter(is_first).chain([order.len()]).collect();
        Self { order, of_each, of_one: Arc::from([0, 1]), me, machines }
    }

    /// The places of this machine's ranks.
    fn here(&self) -> Range<usize> {
        let machine = self.machines[self.me];
        self.of_each[machine]..self.of_each[machine + 1]
    }

    fn machine(&self, rank: WorkerId) -> WorkerId {
        WorkerId(self.machines[usize::from(rank.0)] as u8)
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("memory", &self.memory).finish_non_exhaustive()
    }
}

/// Why a group has ended, in one word that all ranks see. Ranks of the job but where it says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Lost(u32),
    Left(u32),
    Ended(u32),
    /// Nobody came in time; by the job's rank that noticed.
    Timeout(u32),
    /// At a place of the blocks, two ranks of this machine.
    Mismatch {
        slot: u8,
        first: u8,
        second: u8,
    },
}

impl Ending {
    fn of(error: &LocalError) -> Option<Self> {
        match *error {
            LocalError::Lost { rank } => Some(Self::Lost(rank)),
            LocalError::Left { rank } => Some(Self::Left(rank)),
            _ => None,
        }
    }

    fn pack(self) -> u64 {
        let (kind, rest) = match self {
            Self::Lost(rank) => (1, rank),
            Self::Left(rank) => (2, rank),
            Self::Ended(rank) => (3, rank),
            Self::Timeout(rank) => (4, rank),
            Self::Mismatch { slot, first, second } => (5, u32::from_le_bytes([slot, first, second, 0])),
        };
        kind << 32 | u64::from(rest)
    }

    /// `None` while the group lives.
    fn unpack(word: u64) -> Option<Self> {
        let rest = word as u32;
        Some(match word >> 32 {
            0 => return None,
            1 => Self::Lost(rest),
            2 => Self::Left(rest),
            4 => Self::Timeout(rest),
            5 => {
                let [slot, first, second, _] = rest.to_le_bytes();
                Self::Mismatch { slot, first, second }
            }
            _ => Self::Ended(rest),
        })
    }
}

impl Drop for Item {
    fn drop(&mut self) {
        self.over(Err(Failure::Stopped));
    }
}

impl Item {
    fn new(shared: &Shared, number: u64, submission: Submission, done: Done) -> Self {
        let (memory, places) = (&shared.memory, &shared.places);
        let (kind, op) = (submission.kind(), submission.op());
        let mut root = None;
        let tensor = |(tensor, operation): (RawTensor, Operation)| {
            if let (
                CollectiveKind::Reduce | CollectiveKind::Broadcast,
                Pattern::Reduce(rank) | Pattern::Broadcast(rank),
            ) = (kind, operation.pattern)
            {
                root = Some(rank);
            }
            tensor
        };
        let mut tensors: Vec<_> = submission.into_parts().into_iter().map(tensor).collect();
        let is_each = matches!(kind, CollectiveKind::ReduceScatter | CollectiveKind::AllGather);
        let (groups, own) = if is_each {
            // Sorted by their places.
            let mut of_ranks: Vec<_> = tensors.into_iter().map(Some).collect();
            tensors = places.order.iter().filter_map(|rank| of_ranks[*rank].take()).collect();
            (&places.of_each, places.order.iter().position(|rank| *rank == places.me))
        } else {
            (&places.of_one, root.filter(|root| usize::from(root.0) == places.me).map(|_| 0))
        };
        let (dtype, elements) = (tensors[0].dtype(), tensors[0].elements());
        assert!(
            tensors.len() == groups[groups.len() - 1]
                && tensors.iter().all(|tensor| (tensor.dtype(), tensor.elements()) == (dtype, elements)),
            "one slice a rank, all alike"
        );
        Self {
            number,
            kind,
            op,
            root,
            tensors,
            own,
            cut: Cut::new(memory.layout.blocks, Arc::clone(groups), kind.adds(), dtype, elements),
            submitted: Instant::now(),
            outstanding: Arc::clone(&shared.outstanding),
            done: Some(done),
        }
    }

    /// Whether this rank gets something into a tensor.
    fn gets(&self, tensor: usize) -> bool {
        match self.kind {
            CollectiveKind::AllReduce => true,
            CollectiveKind::Reduce | CollectiveKind::ReduceScatter => self.own == Some(tensor),
            CollectiveKind::Broadcast | CollectiveKind::AllGather => self.own != Some(tensor),
        }
    }

    /// Whether what other columns sum is nothing to this rank, where there is no other machine.
    fn awaits_no_column(&self) -> bool {
        match self.kind {
            CollectiveKind::AllReduce => false,
            CollectiveKind::Reduce => self.own.is_none(),
            CollectiveKind::ReduceScatter | CollectiveKind::Broadcast | CollectiveKind::AllGather => true,
        }
    }

    /// The same over the machines, of a column's slices: one; or one a machine.
    fn over_machines(&self, places: &Places, mut slices: Vec<RawTensor>) -> Submission {
        let root = self.root.map_or(WorkerId(0), |rank| places.machine(rank));
        match (self.kind, slices.pop()) {
            (CollectiveKind::AllReduce, Some(slice)) => Submission::all_reduce(slice, Op::Sum),
            (CollectiveKind::Reduce, Some(slice)) => Submission::reduce(slice, Op::Sum, root),
            (CollectiveKind::Broadcast, Some(slice)) => Submission::broadcast(slice, root),
            (kind, last) => {
                slices.extend(last);
                match kind {
                    CollectiveKind::ReduceScatter => Submission::reduce_scatter(slices, Op::Sum),
                    _ => Submission::all_gather(slices),
                }
            }
        }
    }

    fn over(&mut self, result: Result<(), Failure>) {
        if let Some(done) = self.done.take() {
            // Before the callback: who was told that it is done must not count it any more.
            self.outstanding.fetch_sub(1, Ordering::Release);
            done(result);
        }
    }

    fn submission(&self) -> error::Submission {
        let Cut { dtype, elements, .. } = self.cut;
        let root = self.root.map_or(0, |root| root.0);
        error::Submission { number: self.number, kind: self.kind, root, elements, dtype, op: self.op }
    }
}

impl Cursor {
    fn pass_block(&mut self, cut: &Cut, blocks: usize) {
        self.block += 1;
        self.blocks += 1;
        if self.block == blocks {
            self.block = 0;
            self.pass_segment(cut);
        }
    }

    fn pass_segment(&mut self, cut: &Cut) {
        self.segment += 1;
        self.segments += 1;
        if self.segment == cut.segments() {
            self.segment = 0;
            self.item += 1;
        }
    }
}

impl Engine {
    fn run(mut self) {
        // A thread that panics must not keep the others waiting.
        struct Guard(Arc<Shared>);
        impl Drop for Guard {
            fn drop(&mut self) {
                if thread::panicking() {
                    self.0.fail(Failure::Stopped);
                }
                self.0.memory.leave();
            }
        }
        let _guard = Guard(Arc::clone(&self.shared));
        loop {
            let (ended, stopped) = {
                let mut inbox = self.shared.inbox();
                self.items.append(&mut inbox.items);
                (inbox.ended.clone(), inbox.stopped)
            };
            if let Some(failure) = ended {
                for mut item in self.items.drain(..) {
                    item.over(Err(failure.clone()));
                }
                if stopped {
                    return;
                }
                let seat = self.shared.memory.seat(self.shared.memory.me);
                let heard = seat.listen();
                if !self.shared.inbox().stopped {
                    seat.sleep(heard, IDLE);
                }
                continue;
            }
            if let Some(ending) = Ending::unpack(self.shared.memory.ended().load(Ordering::Acquire)) {
                let failure = Failure::Because(Arc::new(self.error(ending)));
                self.shared.inbox().ended.get_or_insert(failure);
                continue;
            }
            while self.step() {}
            self.wait();
        }
    }

    /// Does one thing, what frees most first; whether there was one.
    fn step(&mut self) -> bool {
        if self.shared.memory.ended().load(Ordering::Relaxed) != 0 {
            return false;
        }
        let wishes = self.wishes();
        let is_open = |wish: Option<Wish>| {
            wish.is_none_or(|(gate, until)| self.shared.memory.gate(gate).open() >= until)
        };
        let [contribute, sum, read] =
            wishes.map(|wishes| wishes.is_some_and(|wishes| wishes.into_iter().all(is_open)));
        if read {
            self.read();
        } else if sum {
            self.sum();
        } else if contribute {
            self.contribute();
        }
        read || sum || contribute
    }

    /// What each task waits for; `None` for one that has nothing to do.
    fn wishes(&self) -> [Option<[Option<Wish>; 2]>; 3] {
        let layout = &self.shared.memory.layout;
        // Free when the one before in its place is not needed any more.
        let free =
            |gate: usize, unit: u64, places: usize| Some((gate, (unit + 1).saturating_sub(places as u64)));
        let Cursor { blocks, segments, .. } = self.contribute;
        let contribute = self.item(self.contribute.item).map(|item| {
            // What is only moved is written to where it is read.
            let place = || free(READ, segments, layout.segments);
            [free(SUMMED, blocks, layout.contributions), if item.kind.adds() { None } else { place() }]
        });
        let is_column = self.shared.memory.me < layout.blocks.columns;
        let sum = (is_column && self.sum.blocks < blocks).then(|| {
            [Some((CONTRIBUTED, self.sum.blocks + 1)), free(READ, self.sum.segments, layout.segments)]
        });
        let before = if is_column { self.sum } else { self.contribute };
        let begun = (self.read.item, self.read.segment) < (before.item, before.segment);
        let read = self.item(self.read.item).filter(|_| begun).map(|item| {
            let is_there = !self.shared.memory.group.networked && item.awaits_no_column();
            [(!is_there).then_some((READY, self.read.segments + 1)), None]
        });
        [contribute, sum, read]
    }

    fn item(&self, number: u64) -> Option<&Item> {
        let first = self.items.front()?.number;
        self.items.get(usize::try_from(number.checked_sub(first)?).ok()?)
    }

    fn item_mut(&mut self, number: u64) -> &mut Item {
        let first = self.items.front().map_or(0, |item| item.number);
        &mut self.items[(number - first) as usize]
    }

    /// Writes this rank's part of a block, but for what it sums itself; or what it has for the others.
    fn contribute(&mut self) {
        let shared = Arc::clone(&self.shared);
        let (memory, mut at) = (&shared.memory, self.contribute);
        let item = self.item_mut(at.item);
        let submission = item.submission();
        let Item { tensors, cut, own, kind, .. } = item;
        let segment = cut.segment(at.segment);
        if kind.adds() {
            for column in (0..cut.columns()).filter(|column| *column != memory.me) {
                let mut offset = cut.piece_offset(column);
                for Stretch { tensor, of_tensor, .. } in cut.piece(segment, column, at.block) {
                    let of_tensor = bytes(cut.dtype, of_tensor);
                    let place = offset..offset + of_tensor.len();
                    offset = place.end;
                    // SAFETY: the gate SUMMED was open for the block that was in this place, and CONTRIBUTED is not yet told.
                    let place = unsafe { memory.own_contribution(at.blocks, place) };
                    place.copy_from_slice(&tensors[tensor].as_bytes()[of_tensor]);
                }
            }
        } else if let Some(own) = *own {
            let Stretch { of_tensor, of_segment, .. } = segment.of(own);
            // SAFETY: the gate READ was open for the segment that was in this place, and CONTRIBUTED is not yet told. Of several that
            // write, each has a place of its own, but for ranks that disagree: what these have written nobody reads.
            let place = unsafe { memory.own_result(at.segments, bytes(cut.sum_dtype, of_segment)).as_mut() };
            place.copy_from_slice(&tensors[own].as_bytes()[bytes(cut.dtype, of_tensor)]);
        }
        memory.seat(memory.me).submit((at.blocks % memory.layout.contributions as u64) as usize, submission);
        shared.arrive(CONTRIBUTED, at.blocks);
        at.pass_block(cut, segment.blocks);
        self.contribute = at;
    }

    /// Adds up this rank's column of a block, if there is something to add, and hands a whole segment on.
    fn sum(&mut self) {
        let shared = Arc::clone(&self.shared);
        let (memory, mut at) = (&shared.memory, self.sum);
        let (networked, world_size) = (memory.group.networked, shared.places.machines.len());
        let slot = (at.blocks % memory.layout.contributions as u64) as usize;
        let item = self.item_mut(at.item);
        let ours = item.submission();
        let other = |rank: &usize| memory.seat(*rank).submission(slot) != Some(ours);
        if let Some(other) = (0..memory.layout.ranks).find(other) {
            let ending = Ending::Mismatch { slot: slot as u8, first: memory.me as u8, second: other as u8 };
            return shared.end(ending);
        }
        let Item { tensors, cut, op, kind, .. } = &mut *item;
        let segment = cut.segment(at.segment);
        // Where there are other machines, the mean is taken of the whole sum, when it is read.
        let divisor = (*op == Op::Average && !networked).then_some(world_size as u32);
        let mut offset = cut.piece_offset(memory.me);
        let piece = if kind.adds() { Some(cut.piece(segment, memory.me, at.block)) } else { None };
        for Stretch { tensor, of_tensor, of_segment } in piece.into_iter().flatten() {
            let own: &[u8] = &tensors[tensor].as_bytes()[bytes(cut.dtype, of_tensor)];
            let theirs = offset..offset + own.len();
            offset = theirs.end;
            let parts: Vec<&[u8]> = (0..memory.layout.ranks)
                .map(|rank| {
                    if rank == memory.me {
                        return own;
                    }
                    // SAFETY: the gate CONTRIBUTED is open for the block, and SUMMED not yet told.
                    unsafe { memory.contribution(rank, at.blocks, theirs.clone()) }
                })
                .collect();
            // SAFETY: the gate READ was open for the segment that was in this place; READY is told after its last block, and this
            // rank reads no earlier.
            let sum = unsafe { memory.own_result(at.segments, bytes(cut.sum_dtype, of_segment)).as_mut() };
            sums::sum(cut.dtype, &parts, divisor, cut.sum_dtype, sum);
        }
        shared.arrive(SUMMED, at.blocks);
        let (number, is_last) = (at.segments, at.block + 1 == segment.blocks);
        let slices: Vec<_> = cut.slices(segment, memory.me).collect();
        let sum_dtype = cut.sum_dtype;
        at.pass_block(cut, segment.blocks);
        let goes_on = is_last && networked && slices.iter().any(|slice| !slice.is_empty());
        let slice = |slice: Range<usize>| {
            // SAFETY: as above, and what others have written here was before CONTRIBUTED: until READY is told, which `done` does.
            let memory = unsafe { memory.own_result(number, bytes(sum_dtype, slice.clone())) };
            // SAFETY: it is aligned, at the memory's page plus a multiple of its elements; it is mapped as long as `shared` lives,
            // which `done` holds.
            let tensor = unsafe { RawTensor::new(memory.cast().as_ptr(), slice.len(), sum_dtype) };
            let Ok(tensor) = tensor else {
                unreachable!("a slice of a mapping is aligned and fits into memory")
            };
            tensor
        };
        let over_machines =
            goes_on.then(|| item.over_machines(&shared.places, slices.into_iter().map(slice).collect()));
        self.sum = at;
        match (&self.network, over_machines) {
            (Some(network), Some(submission)) => {
                let shared = Arc::clone(&shared);
                network.submit(
                    submission,
                    Box::new(move |result| match result {
                        Ok(()) => shared.is_ready(number),
                        Err(failure) => shared.fail(failure),
                    }),
                );
            }
            _ if is_last => shared.is_ready(number),
            _ => {}
        }
    }

    /// Takes what this rank gets of a segment.
    fn read(&mut self) {
        let shared = Arc::clone(&self.shared);
        let (memory, mut at) = (&shared.memory, self.read);
        let (networked, world_size) = (memory.group.networked, shared.places.machines.len());
        let item = self.item_mut(at.item);
        let segment = item.cut.segment(at.segment);
        let divisor = (item.op == Op::Average && networked).then_some(world_size as u32);
        for tensor in 0..item.cut.tensors() {
            if !item.gets(tensor) {
                continue;
            }
            let Cut { dtype, sum_dtype, .. } = item.cut;
            let Stretch { of_tensor, of_segment, .. } = segment.of(tensor);
            // SAFETY: the gate READY is open for the segment, or CONTRIBUTED for what others wrote here, or it is what this rank summed itself;
            // READ is not yet told.
            let sums = unsafe { memory.result(at.segments, bytes(sum_dtype, of_segment)) };
            let out = &mut item.tensors[tensor].as_bytes()[bytes(dtype, of_tensor)];
            sums::finish(sum_dtype, sums, divisor, dtype, out);
        }
        shared.arrive(READ, at.segments);
        at.pass_segment(&item.cut);
        self.read = at;
        if at.segment == 0
            && let Some(mut item) = self.items.pop_front()
        {
            self.progressed = Instant::now();
            item.over(Ok(()));
        }
    }

    /// Sleeps until a task can go on, something is submitted, or somebody has to be looked after.
    fn wait(&mut self) {
        let shared = Arc::clone(&self.shared);
        let memory = &shared.memory;
        let seat = memory.seat(memory.me);
        let heard = seat.listen();
        let shut: Vec<Wish> = self.shut();
        for (gate, until) in &shut {
            memory.gate(*gate).want(memory.me, *until);
        }
        // Once more: what happened before the wishes were there has not rung.
        let is_as_it_was = self.shut() == shut && memory.ended().load(Ordering::SeqCst) == 0 && {
            let inbox = shared.inbox();
            inbox.items.is_empty() && inbox.ended.is_none()
        };
        if is_as_it_was && !self.end_if_left(&shut) {
            seat.sleep(heard, if self.items.is_empty() { IDLE } else { LOOK });
        }
        for gate in 0..GATES {
            memory.gate(gate).want_nothing(memory.me);
        }
        if self.looked.elapsed() >= LOOK {
            self.looked = Instant::now();
            self.look(&shut);
        }
    }

    /// What the tasks wait for now.
    fn shut(&self) -> Vec<Wish> {
        let wishes = self.wishes().into_iter().flatten().flatten().flatten();
        wishes.filter(|(gate, until)| self.shared.memory.gate(*gate).open() < *until).collect()
    }

    /// Ranks of this machine that have not arrived at what is waited for.
    fn awaited(&self, shut: &[Wish]) -> impl Iterator<Item = usize> {
        let memory = &self.shared.memory;
        let is_awaited = move |rank: &usize| {
            shut.iter().any(|(gate, until)| {
                let takes_part = *rank < memory.layout.blocks.columns || matches!(*gate, CONTRIBUTED | READ);
                takes_part && memory.seat(*rank).reached(*gate) < *until
            })
        };
        (0..memory.layout.ranks).filter(is_awaited).collect::<Vec<_>>().into_iter()
    }

    fn end_if_left(&self, shut: &[Wish]) -> bool {
        let memory = &self.shared.memory;
        let left = self.awaited(shut).find(|rank| memory.seat(*rank).party() == Party::Left);
        if let Some(rank) = left {
            self.shared.end(Ending::Left(memory.group.ranks[rank]));
        }
        left.is_some()
    }

    /// Whether everybody is alive, and the collectives take no longer than they may.
    fn look(&self, shut: &[Wish]) {
        let memory = &self.shared.memory;
        if let Some(rank) = (0..memory.layout.ranks).find(|rank| memory.is_dead(*rank)) {
            return self.shared.end(Ending::Lost(memory.group.ranks[rank]));
        }
        let Some(first) = self.items.front() else { return };
        let waited = first.submitted.max(self.progressed).elapsed();
        let timeout = Duration::from_nanos(self.shared.timeout_nanos.load(Ordering::Relaxed));
        // Whoever waits for the network alone is looked after by it, as long as that may take. After that he is stopped.
        let by_network = memory.group.networked && waited < timeout.saturating_mul(2);
        let by_ranks: Vec<Wish> =
            shut.iter().copied().filter(|(gate, _)| *gate != READY || !by_network).collect();
        let mut missing: Vec<u32> = self.awaited(&by_ranks).map(|rank| memory.group.ranks[rank]).collect();
        missing.retain(|rank| *rank != memory.group.ranks[memory.me]);
        if waited < timeout || missing.is_empty() {
            return;
        }
        let failure = Failure::Because(Arc::new(LocalError::Timeout { missing, waited }));
        self.shared.inbox().ended.get_or_insert(failure);
        self.shared.end(Ending::Timeout(memory.group.ranks[memory.me]));
    }

    /// What the end is to this rank.
    fn error(&self, ending: Ending) -> LocalError {
        let memory = &self.shared.memory;
        match ending {
            Ending::Lost(rank) => LocalError::Lost { rank },
            Ending::Left(rank) => LocalError::Left { rank },
            Ending::Ended(rank) | Ending::Timeout(rank) => LocalError::Ended { rank },
            Ending::Mismatch { slot, first, second } => {
                let of = |rank: u8| {
                    let submission = memory.seat(rank.into()).submission(slot.into());
                    submission.map(|submission| (memory.group.ranks[usize::from(rank)], submission))
                };
                match (of(first), of(second)) {
                    (Some(first), Some(second)) => LocalError::Mismatch { first, second },
                    _ => LocalError::Ended { rank: memory.group.ranks[usize::from(first)] },
                }
            }
        }
    }
}

/// So many elements, as bytes.
const fn bytes(dtype: Dtype, elements: Range<usize>) -> Range<usize> {
    let each = dtype.element_bytes();
    elements.start * each..elements.end * each
}
