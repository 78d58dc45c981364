//! The machines, and a network that loses, doubles, delays and reorders.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet};
use std::time::Duration;

use fanin_protocol::dlcp::{JobConfig, Ring, Server, ServerJob, Worker};
use fanin_protocol::{Endpoint, Instant, Layer, Loss, Summer, WorkerEvent, WorkerMachine};
use fanin_wire::{
    AbortReason, BlockPacket, FlowId, JobId, Kind, LossBound, Op, Operation, Pattern, Preamble, ShardId,
    Signal, SignalPacket, Tag, WorkerId,
};

use crate::case::{Case, ELEMENTS, Fault, Random};
use crate::numbers::{Numbered, Values};

/// Nothing takes longer than this unless it hangs.
const TOO_LATE: u64 = 600_000_000_000;
/// A worker's ports: one a path, so far apart.
const NODES: usize = 64;
/// So many happenings are a machine that never sleeps.
const TOO_MANY: u64 = 20_000_000;

enum Machine {
    Server(Box<Server<usize>>),
    Worker(Box<Worker<usize, Numbered>>),
    Ring(Box<Ring<usize, Numbered>>),
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Packet { to: usize, from: usize, bytes: Vec<u8> },
    Timer { node: usize },
    Begin { node: usize },
    Death { node: usize },
}

pub struct World {
    case: Case,
    random: Random,
    now: u64,
    machines: Vec<Machine>,
    /// When each machine's earliest timer is on the agenda.
    timers: Vec<Option<u64>>,
    agenda: BinaryHeap<Reverse<(u64, u64, Event)>>,
    events: u64,
    /// By worker and tensor.
    done: Vec<Vec<Option<(Values, Loss)>>>,
    told: Vec<Option<AbortReason>>,
    aborted: Option<AbortReason>,
    dead: Option<usize>,
    by_path: Vec<usize>,
    pushed_again: u64,
    /// Flows that some worker has sent to their end.
    stopped: HashSet<FlowId>,
    early_sums: u64,
    train: Vec<u8>,
    /// The only tensor of each worker, where it is not a numbered one.
    values: Vec<Values>,
}

impl World {
    /// Each worker has one tensor, which is this.
    pub fn of_values(case: Case, values: &[Values]) -> Self {
        Self { values: values.to_vec(), ..Self::new(case) }
    }

    pub fn new(case: Case) -> Self {
        let mut random = Random(case.seed ^ 0x5eed);
        let config = case.config().check().expect("a case is sound");
        let mut machines: Vec<_> = (0..case.workers)
            .map(|worker| {
                let other = case.fault == Fault::OtherBound && worker + 1 == case.workers;
                let push_bound = if other { LossBound::RELIABLE } else { config.push_bound };
                let config = JobConfig { push_bound, ..config };
                if case.ring {
                    let (left, right) =
                        ((worker + case.workers - 1) % case.workers, (worker + 1) % case.workers);
                    return Machine::Ring(Box::new(Ring::new(config, WorkerId(worker as u8), left, right)));
                }
                Machine::Worker(Box::new(Worker::new(config, WorkerId(worker as u8), case.workers)))
            })
            .collect();
        if !case.ring {
            let mut server = Server::new(ShardId(0));
            server.add_job(ServerJob::from(config)).expect("a case is sound");
            machines.push(Machine::Server(Box::new(server)));
        }
        let begins: Vec<_> = (0..case.workers)
            .map(|node| (random.below(1000 * case.late_us + 1), Event::Begin { node }))
            .collect();
        let death = (case.fault == Fault::Death).then(|| {
            let node = random.below(case.workers as u64) as usize;
            (10_000 + random.below(400_000), Event::Death { node })
        });
        let mut world = Self {
            random,
            now: 0,
            timers: vec![None; machines.len()],
            agenda: BinaryHeap::new(),
            events: 0,
            done: vec![vec![None; case.tensors.len()]; case.workers],
            told: vec![None; case.workers],
            aborted: None,
            dead: None,
            by_path: vec![0; case.paths.into()],
            pushed_again: 0,
            stopped: HashSet::new(),
            early_sums: 0,
            train: vec![0; 65536],
            values: vec![],
            machines,
            case,
        };
        for (at, event) in begins.into_iter().chain(death) {
            world.schedule(at, event);
        }
        world
    }

    fn schedule(&mut self, at: u64, event: Event) {
        self.events += 1;
        self.agenda.push(Reverse((at, self.events, event)));
    }

    /// A machine's clock: it jumps after a millisecond, where it does.
    fn clock(&self, at: u64) -> Instant {
        // Far enough from zero for a day back.
        const ORIGIN: u64 = 100_000_000_000_000;
        let jump = match self.case.fault {
            Fault::Clock { jump_ns } if at >= 1_000_000 => jump_ns,
            _ => 0,
        };
        Instant((ORIGIN + at).saturating_add_signed(jump))
    }

    pub fn run(&mut self) {
        while let Some(Reverse((at, _, event))) = self.agenda.pop() {
            self.now = at;
            assert!(at < TOO_LATE, "stuck: {}", self.standing());
            assert!(self.events < TOO_MANY, "never sleeps: {}", self.standing());
            match event {
                Event::Packet { to, from, bytes } => {
                    let now = self.clock(at);
                    match &mut self.machines[to] {
                        Machine::Server(machine) => machine.handle_packet(now, from, &bytes),
                        Machine::Worker(machine) => machine.handle_packet(now, from, &bytes),
                        Machine::Ring(machine) => machine.handle_packet(now, from, &bytes),
                    };
                    self.drain(to);
                }
                Event::Timer { node } => {
                    if self.timers[node] != Some(at) {
                        continue;
                    }
                    self.timers[node] = None;
                    let now = self.clock(at);
                    match &mut self.machines[node] {
                        Machine::Server(machine) => machine.handle_timeout(now),
                        Machine::Worker(machine) => machine.handle_timeout(now),
                        Machine::Ring(machine) => machine.handle_timeout(now),
                    }
                    self.drain(node);
                }
                Event::Begin { node } => self.begin(node),
                Event::Death { node } => self.dead = Some(node),
            }
            if self.is_over() {
                return;
            }
        }
        // All sleep: then all is done, and nobody waits for a confirmation.
        let is_done = |done: &Vec<Option<_>>| done.iter().all(Option::is_some);
        let has_ended = self.aborted.is_some() || self.told.iter().any(Option::is_some);
        assert!(
            self.dead.is_some() || has_ended || self.done.iter().all(is_done),
            "all sleep: {}",
            self.standing()
        );
        if let (None, Some(Machine::Server(server))) = (self.dead, self.machines.last()) {
            let progress = server.job_progress(JobId(3)).expect("it is there");
            assert_eq!(progress.in_use, 0, "{}", self.standing());
        }
    }

    /// Whether nothing more is to be learned, though not all sleep.
    fn is_over(&self) -> bool {
        // Of a ring, the owners tell all what one was told.
        self.case.ring && self.told.iter().any(Option::is_some)
            || self.dead.is_some() && self.now > 120_000_000_000
    }

    fn begin(&mut self, node: usize) {
        let tensors = self.case.tensors.clone();
        let count = tensors.len() as u16;
        for (number, (elements, op)) in tensors.into_iter().enumerate() {
            // As a backward pass has it: the last layer first.
            let layer = Layer { index: count - 1 - number as u16, count };
            let pattern = self.case.pattern(number);
            // A broadcast has one contribution, which is no mean.
            let op = if let Pattern::Broadcast(_) = pattern { Op::Sum } else { op };
            let operation = Operation { op, pattern };
            let own = self.values.get(node).cloned();
            let values = own.unwrap_or_else(|| Values::of_worker(self.case.dtype, node, elements));
            let tensor = Numbered { number, layer, values };
            match &mut self.machines[node] {
                Machine::Server(_) => unreachable!("only workers begin"),
                Machine::Worker(worker) => worker.submit(tensor, operation),
                Machine::Ring(rank) => rank.submit(tensor, operation),
            }
        }
        self.drain(node);
    }

    fn drain(&mut self, node: usize) {
        if self.dead == Some(node) {
            return;
        }
        let now = self.clock(self.now);
        // Not a new one each time: to clear it would take most of the time.
        let mut train = std::mem::take(&mut self.train);
        loop {
            let sent = match &mut self.machines[node] {
                Machine::Server(machine) => machine.poll_transmit(now, &mut train),
                Machine::Worker(machine) => machine.poll_transmit(now, &mut train),
                Machine::Ring(machine) => machine.poll_transmit(now, &mut train),
            };
            let Some(sent) = sent else { break };
            let (to, bytes, segment_bytes) = (sent.to.to_vec(), sent.bytes, sent.segment_bytes);
            let packets: Vec<Vec<u8>> = train[..bytes].chunks(segment_bytes).map(<[u8]>::to_vec).collect();
            assert!(
                packets.windows(2).all(|two| Tag::of_packet(&two[0]) == Tag::of_packet(&two[1])),
                "a train is of one kind"
            );
            for recipient in to {
                packets.iter().for_each(|packet| self.send(node, recipient, packet));
            }
        }
        self.train = train;
        self.take_events(node);
        let due = match &self.machines[node] {
            Machine::Server(machine) => machine.poll_timeout(),
            Machine::Worker(machine) => machine.poll_timeout(),
            Machine::Ring(machine) => machine.poll_timeout(),
        };
        // A driver sleeps at least for a moment; and a clock that jumps brings the timer's time with it.
        let due = due.map(|due| self.now + due.0.saturating_sub(now.0).max(100));
        if let Some(due) = due.filter(|due| self.timers[node].is_none_or(|old| *due < old)) {
            self.timers[node] = Some(due);
            self.schedule(due, Event::Timer { node });
        }
    }

    /// Whether the network loses all that goes up, or down, by a path.
    fn is_dead(&self, path: usize, is_up: bool) -> bool {
        let Fault::DeadPath { from_ns, down } = self.case.fault else { return false };
        self.now >= from_ns && path == if is_up { 0 } else { down }
    }

    /// `to` is a port.
    fn send(&mut self, from: usize, to: usize, packet: &[u8]) {
        let tag = Tag::of_packet(packet);
        let is_up = from < self.case.workers;
        let path = if is_up { usize::from(tag.path) } else { to / NODES };
        let (from_port, to) = if is_up { (from + NODES * path, to) } else { (from, to % NODES) };
        let preamble = Preamble::parse(packet).expect("ours");
        let loss = match preamble.kind {
            Kind::Block => {
                self.by_path[usize::from(tag.path)] += 1;
                let header = BlockPacket::parse(preamble, packet).expect("ours").header;
                let mut is_lost = self.case.drops_unimportant && !tag.important;
                if from < self.case.workers {
                    self.pushed_again += u64::from(header.round > 0);
                    is_lost |= header.round == 0 && self.case.loses_queue == Some(tag.priority);
                } else {
                    let lacks = usize::from(header.contributions) < self.case.workers;
                    self.early_sums += u64::from(lacks && !self.stopped.contains(&header.flow));
                }
                if is_lost { 1000 } else { self.case.data_loss }
            }
            Kind::Signal => {
                let packet = SignalPacket::parse(preamble, packet).expect("ours");
                if from < self.case.workers && packet.signal == Signal::Stop {
                    self.stopped.insert(packet.flow);
                    if self.case.fault == Fault::DeathAfterStop && self.dead.is_none() {
                        // What it has written leaves, and it hears nothing more.
                        self.schedule(self.now, Event::Death { node: from });
                    }
                }
                self.case.signal_loss
            }
            _ => self.case.signal_loss,
        };
        if self.is_dead(path, is_up) {
            return;
        }
        let slow_us = match self.case.fault {
            Fault::SlowPath { us } if path == 0 => us,
            _ => 0,
        };
        let copies = 1 + u64::from(self.random.below(1000) < self.case.doubled);
        for _ in 0..copies {
            if self.random.below(1000) < loss {
                continue;
            }
            let at = self.now + 5_000 + 1000 * slow_us + self.random.below(1000 * self.case.jitter_us + 1);
            self.schedule(at, Event::Packet { to, from: from_port, bytes: packet.to_vec() });
        }
    }

    fn take_events(&mut self, node: usize) {
        match &mut self.machines[node] {
            Machine::Server(machine) => {
                while let Some(event) = machine.poll_event() {
                    assert_eq!(event.job, JobId(3));
                    assert_eq!(self.aborted.replace(event.reason), None, "said once");
                }
                let progress = machine.job_progress(JobId(3)).expect("it is there");
                let most = 2 * u32::from(self.case.flows) * self.case.flow_blocks;
                assert!(progress.in_use <= most, "{} blocks gather, where {most} may", progress.in_use);
            }
            Machine::Worker(machine) => {
                let events: Vec<_> = std::iter::from_fn(|| machine.poll_event()).collect();
                self.tell(node, events);
            }
            Machine::Ring(machine) => {
                let events: Vec<_> = std::iter::from_fn(|| machine.poll_event()).collect();
                self.tell(node, events);
            }
        }
    }

    fn tell(&mut self, node: usize, events: Vec<WorkerEvent<Numbered>>) {
        for event in events {
            match event {
                WorkerEvent::Completed(tensor, times) => {
                    let loss = times.map_or(Loss::default(), |times| times.loss);
                    let place = &mut self.done[node][tensor.number];
                    assert!(place.replace((tensor.values, loss)).is_none(), "completed twice");
                }
                WorkerEvent::Aborted(reason) => self.told[node] = Some(reason),
            }
        }
    }

    /// The rules.
    pub fn check(&self) {
        assert_eq!(self.aborted, None);
        let Case { workers, pull_bound, .. } = self.case;
        for (number, (elements, op)) in self.case.tensors.iter().enumerate() {
            let results: Vec<&(Values, Loss)> =
                self.done.iter().map(|done| done[number].as_ref().expect("all are done")).collect();
            let (values, _) = results[0];
            let of_block = 4 * ELEMENTS / values.element_bytes();
            let blocks = elements.div_ceil(of_block);
            let is_float = values.is_float();
            let pattern = self.case.pattern(number);
            let may_keep = is_float && *op == Op::Average && pattern == Pattern::AllReduce;
            // Whose elements are in the sum, and who gets it.
            let contributors: Vec<usize> =
                (0..workers).filter(|worker| pattern.contributes(WorkerId(*worker as u8))).collect();
            let receivers: Vec<usize> =
                (0..workers).filter(|worker| pattern.receives(WorkerId(*worker as u8))).collect();
            for worker in (0..workers).filter(|worker| !receivers.contains(worker)) {
                let own = Values::of_worker(self.case.dtype, worker, *elements);
                let (values, loss) = results[worker];
                assert_eq!((values.bits(), *loss), (own.bits(), Loss::default()), "what was submitted");
            }
            let (values, loss) = results[receivers[0]];
            let results: Vec<_> = receivers.iter().map(|worker| (*worker, results[*worker])).collect();
            if pull_bound == LossBound::RELIABLE || !may_keep {
                for (_, (other, other_loss)) in &results {
                    assert_eq!(other.bits(), values.bits(), "tensor {number}: all ranks get the same bits");
                    let shared = |loss: &Loss| (loss.contributions, loss.lost, loss.unsummed, loss.kept);
                    assert_eq!(shared(other_loss), shared(loss), "and are told the same");
                }
                assert_eq!(loss.kept, 0);
            }
            for (worker, (values, loss)) in &results {
                assert_eq!(values.len(), *elements);
                let mut told = Loss { rounds: loss.rounds, kept: loss.kept, ..Loss::default() };
                // An own gradient that was kept looks like a mean of one alone.
                let (mut alone, mut may_be_kept) = (0, 0);
                for flow in (0..blocks).collect::<Vec<_>>().chunks(self.case.flow_blocks as usize) {
                    let mut missing = vec![0_u32; workers];
                    for block in flow {
                        let range = block * of_block..((block + 1) * of_block).min(*elements);
                        let inside = values.inside(range, *op, &contributors);
                        let inside =
                            inside.unwrap_or_else(|| panic!("tensor {number}, block {block}: no sum"));
                        if loss.kept > 0 && inside == 1 << worker {
                            alone += 1;
                        } else {
                            told.lost += contributors.len() as u64 - u64::from(inside.count_ones());
                            told.unsummed += u64::from(inside == 0);
                            for other in &contributors {
                                missing[*other] += u32::from(inside >> other & 1 == 0);
                            }
                        }
                        told.contributions += contributors.len() as u64;
                    }
                    let blocks = flow.len() as u32;
                    let is_bounded = is_float && contributors.len() == workers;
                    let allowed = if is_bounded { self.allowed(blocks) } else { 0 };
                    assert!(
                        missing.iter().all(|lost| *lost <= allowed),
                        "{missing:?} of {blocks} lost, {allowed} allowed"
                    );
                    may_be_kept += u64::from(pull_bound.of_blocks(blocks));
                }
                assert!(may_keep || loss.kept == 0);
                assert!(loss.kept <= alone.min(may_be_kept) || loss.kept == 0, "{} kept", loss.kept);
                told.lost += (alone - loss.kept) * (workers as u64 - 1);
                assert_eq!(told, *loss, "tensor {number} at worker {worker}: what was lost is told");
            }
        }
    }

    /// How many of a flow's blocks may lack a worker's contribution: in a ring, so many of each segment at each of its hops.
    fn allowed(&self, blocks: u32) -> u32 {
        let Case { workers, bound, ring, .. } = self.case;
        if !ring {
            return bound.of_blocks(blocks);
        }
        let ranks = workers as u32;
        let begin = |segment: u32| blocks * segment / ranks;
        (0..ranks).map(|segment| (ranks - 1) * bound.of_blocks(begin(segment + 1) - begin(segment))).sum()
    }

    /// Over all tensors, as the first worker was told.
    pub fn loss(&self) -> Loss {
        let mut all = Loss::default();
        self.done[0].iter().flatten().for_each(|(_, loss)| all += *loss);
        all
    }

    pub fn values(&self, worker: usize, tensor: usize) -> &Values {
        &self.done[worker][tensor].as_ref().expect("it is done").0
    }

    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.now)
    }

    pub fn retransmissions(&self) -> u64 {
        let of = |machine: &Machine| match machine {
            Machine::Worker(worker) => worker.statistics().retransmissions,
            Machine::Ring(rank) => rank.statistics().retransmissions,
            Machine::Server(_) => 0,
        };
        self.machines.iter().map(of).sum()
    }

    /// Blocks that workers sent again.
    pub fn pushed_again(&self) -> u64 {
        self.pushed_again
    }

    /// Sums that lack something and went to workers before any of these had stopped: what they lack was let go. Of no broadcasts.
    pub fn early_sums(&self) -> u64 {
        self.early_sums
    }

    pub fn blocks_by_path(&self) -> &[usize] {
        &self.by_path
    }

    pub fn dead(&self) -> Option<u16> {
        self.dead.map(|node| node as u16)
    }

    pub fn aborted(&self) -> Option<AbortReason> {
        self.aborted
    }

    /// What each rank was told, where it was told anything.
    pub fn told(&self) -> &[Option<AbortReason>] {
        &self.told
    }

    pub fn workers_were_told(&self) -> bool {
        self.told.iter().all(|told| *told == self.aborted)
    }

    /// Whether the server says that no rank but this is missing.
    pub fn waits_for_nobody_but(&self, rank: u16) -> bool {
        let Some(Machine::Server(server)) = self.machines.last() else { unreachable!("it is the last") };
        let progress = server.job_progress(JobId(3)).expect("it is there");
        progress
            .waiting_for
            .iter()
            .enumerate()
            .all(|(other, count)| *count == 0 || other == usize::from(rank))
    }

    fn standing(&self) -> String {
        let of = |machine: &Machine| match machine {
            Machine::Worker(worker) => format!("{} outstanding", worker.outstanding()),
            Machine::Ring(rank) => format!("{} outstanding, {:?}", rank.outstanding(), rank.statistics()),
            Machine::Server(server) => format!("{:?} {:?}", server.job_progress(JobId(3)), server.received()),
        };
        format!(
            "{:?} after {} ns: {}",
            self.case,
            self.now,
            self.machines.iter().map(of).collect::<Vec<_>>().join("; ")
        )
    }
}
