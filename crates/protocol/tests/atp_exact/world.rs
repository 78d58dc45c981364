//! The machines, and a network that loses, doubles, delays and reorders.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::time::Duration;

use fanin_protocol::atp::{
    AtpJobConfig, AtpServer, AtpServerProgress, AtpSwitch, AtpSwitchConfig, AtpWorker, AtpWorkerPlan,
    ServerJob, SwitchRoute,
};
use fanin_protocol::{Endpoint, Instant, RetransmissionConfig, Summer, WorkerEvent, WorkerMachine};
use fanin_wire::Generation;

use crate::case::{Case, ELEMENTS, Fault, Numbered, Numbers, Random};

/// Nothing takes longer than this, in nanoseconds, unless it hangs.
const TOO_LATE: u64 = 600_000_000_000;

enum Machine {
    Server(Box<AtpServer<usize>>),
    Switch(Box<AtpSwitch<usize>>),
    Worker(Box<AtpWorker<usize, Numbered>>),
}

impl Machine {
    fn handle(&mut self, now: Instant, from: usize, packet: &[u8]) {
        match self {
            Self::Server(machine) => machine.handle_packet(now, from, packet),
            Self::Switch(machine) => machine.handle_packet(now, from, packet),
            Self::Worker(machine) => machine.handle_packet(now, from, packet),
        };
    }

    /// Everything that it sends now, packet by packet.
    fn drain(&mut self, now: Instant, train: &mut [u8], mut send: impl FnMut(usize, &[u8])) {
        loop {
            let sent = match self {
                Self::Server(machine) => machine.poll_transmit(now, train),
                Self::Switch(machine) => machine.poll_transmit(now, train),
                Self::Worker(machine) => machine.poll_transmit(now, train),
            };
            let Some(sent) = sent else { return };
            let (recipients, bytes, segment_bytes) = (sent.to.to_vec(), sent.bytes, sent.segment_bytes);
            for packet in train[..bytes].chunks(segment_bytes) {
                recipients.iter().for_each(|recipient| send(*recipient, packet));
            }
        }
    }
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Packet { to: usize, from: usize, bytes: Vec<u8> },
    Timer { node: usize },
    Begin { node: usize },
    Fault,
}

pub struct World {
    pub case: Case,
    random: Random,
    now: u64,
    machines: Vec<Machine>,
    agenda: BinaryHeap<Reverse<(u64, u64, Event)>>,
    events: u64,
    /// By node and tensor.
    done: Vec<Vec<Option<Numbers>>>,
    /// By node and tensor: the first element that it was there for.
    since: Vec<Vec<usize>>,
    missing: usize,
    generation: u16,
    train: Vec<u8>,
}

impl World {
    pub fn new(case: Case) -> Self {
        let mut random = Random(case.seed ^ 0x5eed);
        let mut machines = vec![Machine::Server(Box::default())];
        machines.extend((0..case.switches()).map(|_| Self::switch(&case)));
        let mut begins = Vec::new();
        for job in 0..case.jobs {
            for rank in 0..case.workers {
                begins.push((random.below(1000 * case.late_us + 1), machines.len()));
                machines.push(Machine::Worker(Self::worker(&case, job, rank, 0)));
            }
        }
        let fault_at = 20_000 + random.below(1_000 * case.late_us.max(300));
        let mut world = Self {
            random,
            now: 0,
            agenda: BinaryHeap::new(),
            events: 0,
            done: vec![vec![None; case.tensors.len()]; machines.len()],
            since: vec![vec![0; case.tensors.len()]; machines.len()],
            missing: case.jobs * case.workers * case.tensors.len(),
            generation: 0,
            train: vec![0; 65536],
            machines,
            case,
        };
        for (at, node) in begins {
            world.schedule(at, Event::Begin { node });
        }
        if world.case.fault != Fault::None {
            world.schedule(fault_at, Event::Fault);
        }
        world.admit(false);
        world
    }

    fn switch(case: &Case) -> Machine {
        Machine::Switch(Box::new(AtpSwitch::new(AtpSwitchConfig {
            aggregators: case.aggregators,
            elements: ELEMENTS as u16,
            ways: case.ways,
            stale: Duration::from_millis(5),
            ecn_threshold_packets: Some(20),
        })))
    }

    fn worker(case: &Case, job: usize, rank: usize, generation: u16) -> Box<AtpWorker<usize, Numbered>> {
        let (directions, upstream) = case.place(rank);
        let retransmission =
            RetransmissionConfig { floor: Duration::from_micros(500), ceiling: Duration::from_millis(20) };
        Box::new(AtpWorker::new(case.config(job, generation), directions, upstream, retransmission))
    }

    /// Tells server and switches of all jobs.
    fn admit(&mut self, restored: bool) {
        let Self { case, machines, generation, .. } = self;
        for job in 0..case.jobs {
            let config = case.config(job, *generation);
            for (node, machine) in machines.iter_mut().enumerate() {
                match machine {
                    Machine::Server(server) => {
                        let workers = (0..case.workers).map(|rank| case.place(rank).0).collect();
                        let level = case.server_level();
                        server.add_job(ServerJob { config, workers, level, restored }).expect("a tree");
                    }
                    Machine::Switch(switch) => {
                        let last = case.switches();
                        let (upstream, level) =
                            if node == last { (0, u8::from(last > 1)) } else { (last, 0) };
                        let route = SwitchRoute {
                            id: config.id,
                            key: config.key,
                            generation: config.generation,
                            upstream,
                            level,
                        };
                        switch.add_job(route).expect("room for the job");
                    }
                    Machine::Worker(_) => {}
                }
            }
        }
    }

    fn schedule(&mut self, at: u64, event: Event) {
        self.agenda.push(Reverse((at, self.events, event)));
        self.events += 1;
    }

    fn first_worker(&self) -> usize {
        1 + self.case.switches()
    }

    fn drain(&mut self, node: usize) {
        let now = Instant(self.now);
        let mut packets = Vec::new();
        self.machines[node].drain(now, &mut self.train, |to, bytes| packets.push((to, bytes.to_vec())));
        for (to, bytes) in packets {
            let copies = 1 + u64::from(self.random.below(1000) < self.case.double_per_mille);
            for _ in 0..copies {
                if self.random.below(1000) < self.case.loss_per_mille {
                    continue;
                }
                let delay = 5_000 + self.random.below(1000 * (self.case.delay_us - 5) + 1);
                self.schedule(self.now + delay, Event::Packet { to, from: node, bytes: bytes.clone() });
            }
        }
        if let Machine::Worker(worker) = &mut self.machines[node] {
            while let Some(event) = worker.poll_event() {
                let WorkerEvent::Completed(tensor, _) = event else { panic!("{event:?}: {:?}", self.case) };
                assert!(self.done[node][tensor.which].replace(tensor.numbers).is_none());
                self.missing -= 1;
            }
            if let Some(due) = worker.poll_timeout() {
                self.schedule(due.0.max(self.now + 1), Event::Timer { node });
            }
        }
    }

    fn job_and_rank(&self, node: usize) -> (usize, usize) {
        let worker = node - self.first_worker();
        (worker / self.case.workers, worker % self.case.workers)
    }

    /// A worker submits its tensors from this one on.
    fn begin(&mut self, node: usize, from: usize) {
        let (job, rank) = self.job_and_rank(node);
        for which in from..self.case.tensors.len() {
            let numbers = self.case.tensor(job, rank, which);
            if let Machine::Worker(worker) = &mut self.machines[node] {
                worker.submit(Numbered { which, numbers }, Case::op(which));
            }
        }
        self.drain(node);
    }

    fn fault(&mut self) {
        match self.case.fault {
            Fault::None => {}
            Fault::Switches => {
                for machine in &mut self.machines {
                    if matches!(machine, Machine::Switch(_)) {
                        *machine = Self::switch(&self.case);
                    }
                }
                self.admit_keeping_the_server();
            }
            Fault::Server => {
                self.generation += 1;
                self.machines[0] = Machine::Server(Box::default());
                self.admit(true);
                (self.first_worker()..self.machines.len()).for_each(|node| self.resume(node));
            }
            Fault::Worker => self.replace_workers(),
        }
    }

    /// The routes come back, the server keeps what it has.
    fn admit_keeping_the_server(&mut self) {
        let server = core::mem::replace(&mut self.machines[0], Machine::Server(Box::default()));
        self.admit(false);
        self.machines[0] = server;
    }

    fn resume(&mut self, node: usize) {
        let (job, rank) = self.job_and_rank(node);
        let AtpJobConfig { id, key, generation, .. } = self.case.config(job, self.generation);
        let (directions, upstream) = self.case.place(rank);
        if let Machine::Worker(worker) = &mut self.machines[node] {
            worker.suspend();
            let plan = AtpWorkerPlan { id, key, generation, directions, upstream };
            worker.resume(Instant(self.now), plan);
        }
        self.drain(node);
    }

    fn replace_workers(&mut self) {
        self.generation += 1;
        self.admit_keeping_the_server();
        let generation = self.generation;
        for job in 0..self.case.jobs {
            let Machine::Server(server) = &mut self.machines[0] else { panic!("node 0 is the server") };
            let directions: Vec<_> = (0..self.case.workers).map(|rank| self.case.place(rank).0).collect();
            let level = self.case.server_level();
            let id = self.case.config(job, generation).id;
            let earliest = server.set_up_again(id, Generation(generation), &directions, level);
            let earliest = earliest.expect("the same tree").expect("a job of the server");
            let place = self.case.locate(earliest);
            let (first, fragment) = place.unwrap_or((self.case.tensors.len(), 0));
            let replaced = self.random.below(self.case.workers as u64) as usize;
            for rank in 0..self.case.workers {
                let node = self.first_worker() + job * self.case.workers + rank;
                if rank != replaced {
                    self.resume(node);
                    continue;
                }
                let mut worker = Self::worker(&self.case, job, rank, generation);
                if place.is_some() {
                    worker.begin_at(earliest, first as u16, fragment as u32);
                }
                self.machines[node] = Machine::Worker(worker);
                // What the dead one had is gone with it; what was summed before, its successor never gets.
                for (which, elements) in self.case.tensors.iter().enumerate() {
                    let missing = self.done[node][which].is_none();
                    let never = which < first;
                    self.since[node][which] = match which.cmp(&first) {
                        Ordering::Less => *elements,
                        Ordering::Equal => fragment * ELEMENTS,
                        Ordering::Greater => 0,
                    };
                    self.done[node][which] = never.then(|| self.case.expected(job, which));
                    match (missing, never) {
                        (true, true) => self.missing -= 1,
                        (false, false) => self.missing += 1,
                        _ => {}
                    }
                }
                self.agenda.retain(
                    |Reverse((_, _, event))| !matches!(event, Event::Begin { node: other } if *other == node),
                );
                self.begin(node, first);
            }
        }
    }

    pub fn run(mut self) -> Self {
        while self.missing > 0 {
            let Some(Reverse((at, _, event))) = self.agenda.pop() else {
                panic!("nothing happens any more: {:?}\n{}", self.case, self.standing())
            };
            assert!(at < TOO_LATE, "never done: {:?}\n{}", self.case, self.standing());
            self.now = at;
            let now = Instant(at);
            match event {
                Event::Packet { to, from, bytes } => {
                    self.machines[to].handle(now, from, &bytes);
                    self.drain(to);
                }
                Event::Timer { node } => {
                    if let Machine::Worker(worker) = &mut self.machines[node]
                        && worker.poll_timeout().is_some_and(|due| due <= now)
                    {
                        worker.handle_timeout(now);
                        self.drain(node);
                    }
                }
                Event::Begin { node } => self.begin(node, 0),
                Event::Fault => self.fault(),
            }
        }
        self
    }

    /// The same bits everywhere, and the right ones.
    pub fn check(self) -> Self {
        for which in 0..self.case.tensors.len() {
            for job in 0..self.case.jobs {
                let expected = self.case.expected(job, which);
                let first = self.first_worker() + job * self.case.workers;
                let of_first = self.done[first][which].as_ref().expect("all are done").values();
                for node in first + 1..first + self.case.workers {
                    let done = self.done[node][which].as_ref().expect("all are done").values();
                    let since = self.since[node][which].max(self.since[first][which]);
                    let differ =
                        done[since..].iter().zip(&of_first[since..]).any(|(a, b)| a.to_bits() != b.to_bits());
                    assert!(!differ, "workers differ: {:?}", self.case);
                }
                let (wanted, tolerance) = (expected.values(), self.case.tolerance(job, which));
                assert_eq!(of_first.len(), wanted.len());
                let since = self.since[first][which];
                for (i, (got, wanted)) in of_first.iter().zip(&wanted).enumerate().skip(since) {
                    assert!(
                        (got - wanted).abs() <= tolerance[i]
                            || got == wanted
                            || got.is_nan() && wanted.is_nan(),
                        "job {job}, element {i} of tensor {which} is {got} and should be {wanted}: {:?}",
                        self.case
                    );
                }
            }
        }
        self
    }

    /// Whether a worker was replaced in the middle of a tensor.
    pub fn was_replaced_midway(&self) -> bool {
        let lengths = || self.case.tensors.iter();
        self.since
            .iter()
            .any(|since| since.iter().zip(lengths()).any(|(since, all)| (1..*all).contains(since)))
    }

    /// What every machine counted, for a failure.
    fn standing(&self) -> String {
        let lines = self.machines.iter().map(|machine| match machine {
            Machine::Server(server) => {
                let jobs = (0..self.case.jobs).map(|job| server.progress(self.case.config(job, 0).id));
                format!("{:?} {:?}", server.received(), jobs.collect::<Vec<_>>())
            }
            Machine::Switch(switch) => format!("{:?}", switch.statistics()),
            Machine::Worker(worker) => format!("{:?} {:?}", worker.progress(), worker.statistics()),
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    pub fn server(&self, job: usize) -> AtpServerProgress {
        let Machine::Server(server) = &self.machines[0] else { panic!("node 0 is the server") };
        server.progress(self.case.config(job, 0).id).expect("a job")
    }

    pub fn retransmissions(&self) -> u64 {
        let workers = self.machines.iter().filter_map(|machine| match machine {
            Machine::Worker(worker) => Some(worker.statistics().retransmissions),
            _ => None,
        });
        workers.sum()
    }
}
