//! A rank's thread: it contributes, sums its column, speaks to the network, and reads the sums,
//! whichever can go on.

use crate::error::LocalError;
use crate::gate::{CONTRIBUTED, Party, READY, SUMMED};
use crate::memory::SharedMemory;
use fanin_udp::{Failure, Loss, Submission};
use fanin_wire::{Participants, Rank, WorkerId};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

mod engine;
mod item;

use self::engine::{Cursor, Engine};
use self::item::Item;

/// Told once what became of a collective, and what its sum lacks. It must be quick, must not block,
/// and must not panic.
pub type Done = Box<dyn FnOnce(Result<Loss, Failure>) + Send>;
/// Told once what became of a collective that this rank submitted, and the collective's number. It
/// must be quick, must not block, and must not panic.
pub type DoneOf = Box<dyn FnOnce(u64, Result<Completed, Failure>) + Send>;

/// A collective that came out well.
#[derive(Clone, Copy, Debug)]
pub struct Completed {
    /// The part that its sum lacks.
    pub loss: Loss,
    /// This rank's thread began to write its tensors for the others.
    pub begun: Instant,
    /// All of them were written. Long tensors wait for room meanwhile.
    pub contributed: Instant,
    /// This rank's thread began to read the last part of the sum.
    pub summed: Instant,
}

/// The network above the ranks of a machine: the collectives over machines, of one column's part.
pub trait Network: Send {
    /// Starts a collective over the same column of all machines, in place, in which each machine is
    /// a rank. All machines submit alike ones in the same order.
    ///
    /// The other ranks of the machine are told a failure that is a [`LocalError`]. If it is another
    /// error, they only learn whose it was.
    fn submit(&self, submission: Submission, done: Done);
}

/// The settings of a rank's sums.
pub struct LocalConfig {
    /// Opened by all ranks of the machine.
    pub memory: SharedMemory,
    /// For a rank that is a column of a group with other machines, and for no other.
    pub network: Option<Box<dyn Network>>,
    /// The machine of each rank of the whole job, numbered from 0.
    pub machines: Vec<usize>,
    /// How long the ranks of the machine may keep a collective waiting, from its submission or the
    /// end of the one before it.
    pub timeout: Duration,
}

/// The sums of one rank with the others of its machine. Dropping it leaves them; what is
/// outstanding fails.
#[derive(Debug)]
pub struct LocalSum {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The state that the rank's thread shares with those that submit, and with the network's.
struct Shared {
    memory: SharedMemory,
    places: Places,
    inbox: Mutex<Inbox>,
    counts: Arc<Counts>,
    timeout_nanos: AtomicU64,
    /// Segments of this column that the network has summed, out of order.
    summed: Mutex<Summed>,
}

/// What became of the collectives of this rank.
#[derive(Default)]
struct Counts {
    outstanding: AtomicUsize,
    /// All-reduces that came out well, and other collectives.
    completed: AtomicU64,
    others_completed: AtomicU64,
    /// What their sums lack.
    loss: Mutex<Loss>,
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
    early: BTreeMap<u64, Loss>,
}

/// The places of the ranks of the job.
struct Places {
    machines: Vec<usize>,
    /// All ranks, those of one machine one behind the other. Tensors, one a rank, stand in this
    /// order.
    order: Vec<usize>,
    /// As [`Cut`] wants them: of such tensors, and of a single one.
    of_each: Arc<[usize]>,
    of_one: Arc<[usize]>,
    /// This rank's.
    me: usize,
}

impl LocalSum {
    /// Starts the rank's thread.
    ///
    /// # Errors
    /// When there is none to be had.
    ///
    /// # Panics
    /// When a rank has a network that is to have none, or the reverse; when the memory's ranks are
    /// not those of a machine.
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
            counts: Arc::default(),
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

    /// Starts a collective over all ranks of the job, in place. All ranks must submit alike ones in
    /// the same order.
    ///
    /// A sum has the same bits on all ranks that get it. How far it is from the exact one:
    /// `docs/local.md`.
    ///
    /// Returns the number of the collective among all that were submitted, from 0. In a process that
    /// was forked from the rank's, every collective fails at once and is number 0.
    ///
    /// # Panics
    /// When the slices of a reduce_scatter or an all_gather are not of one length, and one a rank;
    /// when a root is none of the ranks.
    pub fn submit(&self, submission: Submission, done: DoneOf) -> u64 {
        let shared = &self.shared;
        if shared.memory.is_forked() {
            // A thread of the parent may have held the lock.
            done(0, Err(Failure::Because(Arc::new(LocalError::Forked))));
            return 0;
        }
        let mut inbox = shared.inbox();
        let number = inbox.next_number;
        inbox.next_number += 1;
        if let Some(failure) = inbox.ended.clone() {
            drop(inbox);
            done(number, Err(failure));
            return number;
        }
        shared.counts.outstanding.fetch_add(1, Ordering::Relaxed);
        inbox.items.push_back(Item::new(shared, number, submission, done));
        drop(inbox);
        shared.memory.seat(shared.memory.me).ring();
        number
    }

    /// Collectives whose `done` was not called yet.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.shared.counts.outstanding.load(Ordering::Acquire)
    }

    /// All-reduces that came out well.
    #[must_use]
    pub fn completed(&self) -> u64 {
        self.shared.counts.completed.load(Ordering::Relaxed)
    }

    /// Collectives other than all-reduces that came out well.
    #[must_use]
    pub fn others_completed(&self) -> u64 {
        self.shared.counts.others_completed.load(Ordering::Relaxed)
    }

    /// How much the sums lack that this rank got.
    #[must_use]
    pub fn loss(&self) -> Loss {
        *self.shared.counts.loss.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// The machine's ranks that have left.
    pub fn left(&self) -> Vec<u32> {
        let memory = &self.shared.memory;
        if memory.is_forked() {
            return Vec::new();
        }
        let has_left = |rank: &usize| memory.seat(*rank).party() == Party::Left;
        (0..memory.layout.ranks).filter(has_left).map(|rank| memory.group.ranks[rank]).collect()
    }

    /// Changes [`LocalConfig::timeout`], for what is under way too.
    pub fn set_timeout(&self, timeout: Duration) {
        let nanos = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        self.shared.timeout_nanos.store(nanos, Ordering::Relaxed);
    }

    /// Ends everything outstanding, here and on the machine's other ranks, and everything that is
    /// submitted later. The first failure stays.
    pub fn fail(&self, failure: Failure) {
        if !self.shared.memory.is_forked() {
            self.shared.fail(failure);
        }
    }

    /// The failure of everything that is submitted, if there is one.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        self.shared.inbox().ended.clone()
    }

    /// Leaves the group, and returns when no tensor is touched any more. Outstanding collectives
    /// fail.
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
        // A `done` that held the last reference drops it on the rank's thread, which cannot await
        // itself.
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != thread::current().id()) {
            // A thread that panicked has said so on standard error.
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

    /// The column's slice of a segment is the sum over all machines, less what was lost. They are told
    /// in order.
    fn is_ready(&self, segment: u64, loss: Loss) {
        let mut summed = self.summed.lock().unwrap_or_else(PoisonError::into_inner);
        summed.early.insert(segment, loss);
        loop {
            let next = summed.next;
            let Some(loss) = summed.early.remove(&next) else { break };
            self.memory.seat(self.memory.me).lose(self.memory.segment_slot(next), loss);
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

    /// The machines of these ranks.
    fn machines_of(&self, ranks: Participants) -> Participants {
        if ranks == Participants::ALL {
            return ranks;
        }
        let takes_part = |rank: &usize| ranks.contains(Rank(*rank as u16));
        let machine = |rank: usize| Rank(self.machines[rank] as u16);
        let machines = Participants::of((0..self.machines.len()).filter(takes_part).map(machine));
        // A set that names each machine is everybody.
        let is_some = |set: &Participants| (set.0.count_ones() as usize) < self.of_each.len() - 1;
        machines.filter(is_some).unwrap_or_default()
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

/// Why a group has ended, in one word that all ranks see. Ranks of the job but where it says
/// otherwise.
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
