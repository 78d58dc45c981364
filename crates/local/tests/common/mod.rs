//! Groups of ranks to try, as threads of this process.
#![allow(dead_code, reason = "not every test needs everything")]

use fanin_local::{Completed, Done, Group, LocalConfig, LocalSum, Network, SharedMemory};
use fanin_udp::{CollectiveKind, Failure, Loss, RawTensor, Submission};
use fanin_wire::{Dtype, LossBound, Op, Participants, Pattern, Rank, WorkerId};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Longer than anything takes.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A name that no other test has.
pub fn name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("fanin-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// The memory of a group, opened by all of its ranks.
pub fn memories(group: &Group) -> Vec<SharedMemory> {
    let name = name();
    let first = SharedMemory::create(&name, group.clone()).expect("room in /dev/shm");
    let others = (1..group.ranks.len())
        .map(|me| SharedMemory::open(&name, group.clone(), me, PATIENCE).expect("the first rank's memory"));
    std::iter::once(first).chain(others).collect()
}

pub fn start(memory: SharedMemory, network: Option<Box<dyn Network>>, machines: Vec<usize>) -> LocalSum {
    LocalSum::start(LocalConfig { memory, network, machines, timeout: PATIENCE }).expect("a thread")
}

/// A single machine without a network.
pub fn machine(ranks: usize) -> Vec<LocalSum> {
    let group = Group { ranks: (0..ranks as u32).collect(), columns: ranks, networked: false };
    memories(&group).into_iter().map(|memory| start(memory, None, vec![0; ranks])).collect()
}

/// An answer to come.
pub type Answer = mpsc::Receiver<Result<Completed, Failure>>;

/// Starts an all-reduce of memory that stays where it is until the answer has come.
pub fn submit(rank: &LocalSum, memory: &mut [u8], dtype: Dtype, op: Op) -> Answer {
    submit_any(rank, &mut [memory], &Call { dtype, op, ..Call::default() })
}

/// A collective of tensors.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub kind: CollectiveKind,
    pub root: usize,
    pub dtype: Dtype,
    /// Of each tensor.
    pub elements: usize,
    pub op: Op,
    pub loss_bound: Option<LossBound>,
    pub participants: Participants,
}

impl Default for Call {
    fn default() -> Self {
        let (kind, dtype) = (CollectiveKind::AllReduce, Dtype::Float32);
        let participants = Participants::ALL;
        Self { kind, root: 0, dtype, elements: 0, op: Op::Sum, loss_bound: None, participants }
    }
}

impl Call {
    pub fn tensors(&self, ranks: usize) -> usize {
        if self.kind.is_sliced() { ranks } else { 1 }
    }
}

/// Starts a collective of memory that stays where it is until the answer has come.
pub fn submit_any(rank: &LocalSum, memory: &mut [&mut [u8]], call: &Call) -> Answer {
    let raw = |memory: &mut &mut [u8]| {
        let elements = memory.len() / call.dtype.element_bytes();
        // SAFETY: the callers wait for the answer before they touch the memory, or let it go.
        unsafe { RawTensor::new(memory.as_mut_ptr(), elements, call.dtype) }.expect("memory of the heap")
    };
    let tensors = memory.iter_mut().map(raw).collect();
    let submission = Submission::new(call.kind, tensors, call.op, WorkerId(call.root as u8));
    let submission = submission.losing(call.loss_bound).among(call.participants);
    let (sender, answer) = mpsc::channel();
    rank.submit(submission, Box::new(move |_, result| drop(sender.send(result))));
    answer
}

/// Machines that each have the same columns, and a network between them that answers in any order.
/// The ranks of a machine follow each other.
pub fn cluster(machines: &[usize]) -> Vec<LocalSum> {
    spread(machines.iter().enumerate().flat_map(|(machine, count)| vec![machine; *count]).collect())
}

/// The same, of each rank its machine.
pub fn spread(machines: Vec<usize>) -> Vec<LocalSum> {
    let count = machines.iter().max().expect("a machine") + 1;
    let of = |machine| (0u32..).zip(&machines).filter(move |(_, of)| **of == machine).map(|(rank, _)| rank);
    let columns = (0..count).map(|machine| of(machine).count()).min().expect("a machine");
    let hub = hub(count);
    let mut ranks = Vec::new();
    for machine in 0..count {
        let group = Group { ranks: of(machine).collect(), columns, networked: true };
        for (me, memory) in memories(&group).into_iter().enumerate() {
            let speaks = Speaks { machine, column: me, next: AtomicU64::new(0), hub: hub.clone() };
            let network = (me < columns).then(|| Box::new(speaks) as Box<dyn Network>);
            ranks.push((group.ranks[me], start(memory, network, machines.clone())));
        }
    }
    ranks.sort_by_key(|(rank, _)| *rank);
    ranks.into_iter().map(|(_, rank)| rank).collect()
}

type OfMachine = (usize, Submission, Done);
type Slice = ((usize, u64), OfMachine);

struct Speaks {
    machine: usize,
    column: usize,
    next: AtomicU64,
    hub: mpsc::Sender<Slice>,
}

impl Network for Speaks {
    fn submit(&self, submission: Submission, done: Done) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let slice = ((self.column, number), (self.machine, submission, done));
        self.hub.send(slice).expect("the hub lives as long as its ranks");
    }
}

/// Does what the machines submit alike, and tells the latest first.
fn hub(machines: usize) -> mpsc::Sender<Slice> {
    let (sender, slices) = mpsc::channel::<Slice>();
    thread::spawn(move || {
        let mut waiting: HashMap<(usize, u64), Vec<OfMachine>> = HashMap::new();
        while let Ok(first) = slices.recv() {
            let mut whole = Vec::new();
            for (key, slice) in std::iter::once(first).chain(slices.try_iter()) {
                let alike = waiting.entry(key).or_default();
                alike.push(slice);
                if alike.len() == machines {
                    whole.extend(waiting.remove(&key).map(|alike| (key.1, alike)));
                }
            }
            for (number, mut alike) in whole.into_iter().rev() {
                alike.sort_by_key(|(machine, ..)| *machine);
                // Unlike losses of a column's slices.
                let is_bound = alike[0].1.loss_bound().is_some();
                let lost = if is_bound { number + 1 } else { 0 };
                let loss = Loss { contributions: machines as u64, lost, rounds: 1, ..Loss::default() };
                let participants = alike[0].1.participants();
                assert!(alike.iter().all(|(_, submission, _)| submission.participants() == participants));
                let (submissions, done): (Vec<_>, Vec<_>) =
                    alike.into_iter().map(|(_, submission, done)| (submission.into_parts(), done)).unzip();
                let takes_part = |machine: usize| participants.contains(Rank(machine as u16));
                let taking = (0..).zip(submissions).filter(|(machine, _)| takes_part(*machine));
                over_machines(taking.unzip());
                for done in done {
                    done(Ok(loss));
                }
            }
        }
    });
    sender
}

fn over_machines((numbers, mut machines): (Vec<usize>, Vec<Vec<(RawTensor, fanin_wire::Operation)>>)) {
    for part in 0..machines[0].len() {
        let operation = machines[0][part].1;
        let dtype = machines[0][part].0.dtype();
        assert!(machines.iter().all(|parts| parts.len() == machines[0].len() && parts[part].1 == operation));
        let all: Vec<_> = machines.iter_mut().map(|parts| parts[part].0.as_bytes().to_vec()).collect();
        let result = match operation.pattern {
            Pattern::Broadcast(root) => all[usize::from(root.0)].clone(),
            _ => all.into_iter().reduce(|a, b| add(dtype, &a, &b)).expect("a machine"),
        };
        for (machine, parts) in numbers.iter().zip(&mut machines) {
            if operation.pattern.receives(WorkerId(*machine as u8)) {
                parts[part].0.as_bytes().copy_from_slice(&result);
            }
        }
    }
}

/// The sum of two tensors, element by element.
pub fn add(dtype: Dtype, a: &[u8], b: &[u8]) -> Vec<u8> {
    fn each<const N: usize>(a: &[u8], b: &[u8], add: impl Fn([u8; N], [u8; N]) -> [u8; N]) -> Vec<u8> {
        let pairs = a.as_chunks().0.iter().zip(b.as_chunks().0);
        pairs.flat_map(|(a, b)| add(*a, *b)).collect()
    }
    match dtype {
        Dtype::Float32 => each(a, b, |a, b| (f32::from_le_bytes(a) + f32::from_le_bytes(b)).to_le_bytes()),
        Dtype::Float64 => each(a, b, |a, b| (f64::from_le_bytes(a) + f64::from_le_bytes(b)).to_le_bytes()),
        Dtype::Int32 => {
            each(a, b, |a, b| i32::from_le_bytes(a).wrapping_add(i32::from_le_bytes(b)).to_le_bytes())
        }
        Dtype::Int64 => {
            each(a, b, |a, b| i64::from_le_bytes(a).wrapping_add(i64::from_le_bytes(b)).to_le_bytes())
        }
        Dtype::Uint8 | Dtype::Int8 => each(a, b, |[a], [b]| [a.wrapping_add(b)]),
        Dtype::Float16 | Dtype::Bfloat16 => panic!("machines' sums of half precision are float32"),
    }
}

/// A small whole number as an element.
pub fn element(dtype: Dtype, value: i64) -> Vec<u8> {
    match dtype {
        Dtype::Float32 => (value as f32).to_le_bytes().to_vec(),
        Dtype::Float64 => (value as f64).to_le_bytes().to_vec(),
        Dtype::Float16 => half::f16::from_f32(value as f32).to_le_bytes().to_vec(),
        Dtype::Bfloat16 => half::bf16::from_f32(value as f32).to_le_bytes().to_vec(),
        Dtype::Int32 => (value as i32).to_le_bytes().to_vec(),
        Dtype::Int64 => value.to_le_bytes().to_vec(),
        Dtype::Uint8 | Dtype::Int8 => vec![value as u8],
    }
}

/// A tensor of `rank`: whole numbers of which a sum of some, and a mean of four, is exact in every
/// type.
pub fn tensor(dtype: Dtype, elements: usize, rank: usize, number: usize) -> Vec<u8> {
    (0..elements).flat_map(|i| element(dtype, value(i, rank, number))).collect()
}

fn value(i: usize, rank: usize, number: usize) -> i64 {
    ((i * 7 + i / 1000 + rank * 3 + number) % 8 * 4) as i64 / 4
}

/// The result that all ranks get.
pub fn expected(dtype: Dtype, elements: usize, ranks: usize, number: usize, op: Op) -> Vec<u8> {
    let sum = |i| (0..ranks).map(|rank| value(i, rank, number)).sum::<i64>();
    let of = |i| match (op, dtype) {
        (Op::Sum, _) => element(dtype, sum(i)),
        (Op::Average, Dtype::Float32) => (sum(i) as f32 / ranks as f32).to_le_bytes().to_vec(),
        (Op::Average, Dtype::Float64) => (sum(i) as f64 / ranks as f64).to_le_bytes().to_vec(),
        (Op::Average, Dtype::Float16) => {
            half::f16::from_f32(sum(i) as f32 / ranks as f32).to_le_bytes().to_vec()
        }
        (Op::Average, Dtype::Bfloat16) => {
            half::bf16::from_f32(sum(i) as f32 / ranks as f32).to_le_bytes().to_vec()
        }
        (Op::Average, _) => element(dtype, sum(i) / ranks as i64),
    };
    (0..elements).flat_map(of).collect()
}
