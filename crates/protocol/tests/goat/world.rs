//! The machines of a case, and the network between them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use fanin_protocol::goat::{
    GoatServer, GoatServerJob, GoatServerProgress, GoatSwitch, GoatSwitchConfig, GoatSwitchStatistics,
    GoatWorker, GoatWorkerPlan,
};
use fanin_protocol::{Endpoint, Instant, Reason, RetransmissionConfig, Summer, WorkerEvent, WorkerMachine};
use fanin_wire::{Generation, Op};

use crate::case::{Case, ELEMENTS, Fault, Numbered, Numbers, Random, SERVER};

/// A run that lasts longer stands still.
const TOO_LATE: u64 = 600_000_000_000;

enum Machine {
    Server(Box<GoatServer<usize>>),
    Switch(Box<GoatSwitch<usize>>),
    Worker(Box<GoatWorker<usize, Numbered>>),
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Packet { to: usize, from: usize, bytes: Vec<u8> },
    Timer { node: usize },
    Begin { node: usize },
    Fault,
    Plan,
}

pub struct World {
    pub case: Case,
    random: Random,
    now: u64,
    machines: Vec<Machine>,
    agenda: BinaryHeap<Reverse<(u64, u64, Event)>>,
    events: u64,
    done: Vec<Vec<Option<Numbers>>>,
    missing: usize,
    generation: u16,
    dead: Option<usize>,
    pub completed_at: u64,
}

impl World {
    pub fn new(case: Case) -> Self {
        let mut random = Random(case.seed ^ 0x5eed);
        let mut machines = vec![Machine::Server(Box::default())];
        machines.extend((0..case.switches).map(|_| Self::switch(&case)));
        let mut begins = Vec::new();
        for rank in 0..case.workers() {
            begins.push((random.below(1000 * case.late_us + 1), machines.len()));
            machines.push(Machine::Worker(Self::new_worker(&case, rank)));
        }
        let fault_at = 20_000 + random.below(1_000 * case.late_us.max(300));
        let mut world = Self {
            random,
            now: 0,
            agenda: BinaryHeap::new(),
            events: 0,
            done: vec![vec![None; case.tensors.len()]; case.workers()],
            missing: case.workers() * case.tensors.len(),
            generation: 0,
            dead: None,
            completed_at: 0,
            machines,
            case,
        };
        for (at, node) in begins {
            world.schedule(at, Event::Begin { node });
        }
        if world.case.fault != Fault::None {
            world.schedule(fault_at, Event::Fault);
        }
        world.admit_server(false);
        world.admit_switches();
        world
    }

    /// Workers begin when it is said, in the order of ranks.
    pub fn beginning_at(mut self, begins_us: &[u64]) -> Self {
        self.agenda.retain(|Reverse((_, _, event))| !matches!(event, Event::Begin { .. }));
        for (rank, at) in begins_us.iter().enumerate() {
            let node = self.case.worker(rank);
            self.schedule(at * 1000, Event::Begin { node });
        }
        self
    }

    fn switch(case: &Case) -> Machine {
        Machine::Switch(Box::new(GoatSwitch::new(GoatSwitchConfig {
            aggregators: case.aggregators,
            elements: ELEMENTS as u16,
            ways: case.ways,
            stale: Duration::ZERO,
            ecn_threshold_packets: Some(20),
        })))
    }

    fn new_worker(case: &Case, rank: usize) -> Box<GoatWorker<usize, Numbered>> {
        let floor = Duration::from_micros(case.retransmission_us);
        let retransmission = RetransmissionConfig { floor, ceiling: floor * 40 };
        let upstream = case.upstream_of(rank);
        Box::new(GoatWorker::new(case.config(0), case.assignment(rank), upstream, retransmission))
    }

    fn admit_server(&mut self, restored: bool) {
        let (config, plan) = (self.case.config(self.generation), self.case.server_plan());
        if let Machine::Server(server) = &mut self.machines[SERVER] {
            server.add_job(GoatServerJob { config, plan, restored }).expect("a plan");
        }
    }

    fn admit_switches(&mut self) {
        for at in 0..self.case.switches {
            let route = self.case.route(at, self.generation);
            if let Machine::Switch(switch) = &mut self.machines[self.case.address(at)] {
                switch.add_job(route).expect("a route");
            }
        }
    }

    fn schedule(&mut self, at: u64, event: Event) {
        self.agenda.push(Reverse((at, self.events, event)));
        self.events += 1;
    }

    fn drain(&mut self, node: usize) {
        let now = Instant(self.now);
        let mut packets = Vec::new();
        let mut train = vec![0; 65536];
        loop {
            let sent = match &mut self.machines[node] {
                Machine::Server(machine) => machine.poll_transmit(now, &mut train),
                Machine::Switch(machine) => machine.poll_transmit(now, &mut train),
                Machine::Worker(machine) => machine.poll_transmit(now, &mut train),
            };
            let Some(sent) = sent else { break };
            let (recipients, bytes, segment_bytes) = (sent.to.to_vec(), sent.bytes, sent.segment_bytes);
            for packet in train[..bytes].chunks(segment_bytes) {
                packets.extend(recipients.iter().map(|to| (*to, packet.to_vec())));
            }
        }
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
        let first = self.case.worker(0);
        if let Machine::Worker(worker) = &mut self.machines[node] {
            while let Some(event) = worker.poll_event() {
                let WorkerEvent::Completed(tensor, _) = event else { panic!("{event:?}: {:?}", self.case) };
                assert!(self.done[node - first][tensor.which].replace(tensor.numbers).is_none());
                self.missing -= 1;
            }
            if let Some(due) = worker.poll_timeout() {
                self.schedule(due.0.max(self.now + 1), Event::Timer { node });
            }
        }
    }

    fn begin(&mut self, node: usize) {
        let rank = node - self.case.worker(0);
        for which in 0..self.case.tensors.len() {
            let numbers = self.case.tensor(rank, which);
            if let Machine::Worker(worker) = &mut self.machines[node] {
                worker.submit(Numbered { which, numbers }, Op::Sum);
            }
        }
        self.drain(node);
    }

    fn fault(&mut self) {
        let any = self.random.below(self.case.switches as u64) as usize;
        match self.case.fault {
            Fault::None => {}
            Fault::SwitchForgets => {
                let address = self.case.address(any);
                self.machines[address] = Self::switch(&self.case);
                let route = self.case.route(any, self.generation);
                if let Machine::Switch(switch) = &mut self.machines[address] {
                    switch.add_job(route).expect("a route");
                }
            }
            Fault::SwitchDies => {
                // Nobody but it could pass on what its workers say, nor be the server's: so it is one without workers, or none.
                let (case, at) = (&self.case, |at: &usize| Some(*at));
                let other = |it: &usize| {
                    let is_first = case.attached.contains(&at(it)) || case.beside.contains(&at(it));
                    !case.at_server.contains(it) && !is_first
                };
                let leaf =
                    |at: &usize| self.case.links.iter().filter(|(a, b)| a == at || b == at).count() == 1;
                self.dead = (0..self.case.switches).filter(other).find(leaf);
                if self.dead.is_some() {
                    self.schedule(self.now + 5_000_000, Event::Plan);
                }
            }
            Fault::ServerForgets => {
                self.generation += 1;
                self.machines[SERVER] = Machine::Server(Box::default());
                self.admit_server(true);
                self.admit_switches();
                (0..self.case.workers()).for_each(|rank| self.resume(rank));
            }
            Fault::Replanned => self.replan(),
        }
    }

    /// Another plan, without who is dead.
    fn replan(&mut self) {
        self.generation += 1;
        self.case.plan = self.case.any_plan(&mut self.random);
        for assigned in self.case.plan.iter_mut().flatten() {
            *assigned = assigned.filter(|switch| Some(*switch) != self.dead);
        }
        let (config, plan) = (self.case.config(self.generation), self.case.server_plan());
        if let Machine::Server(server) = &mut self.machines[SERVER] {
            let earliest = server.go_on_with(config.id, config.generation, &plan).expect("a plan");
            assert!(earliest.is_some_and(|earliest| earliest <= self.case.fragments()));
        }
        self.admit_switches();
        (0..self.case.workers()).for_each(|rank| self.resume(rank));
    }

    fn resume(&mut self, rank: usize) {
        let (node, config) = (self.case.worker(rank), self.case.config(self.generation));
        let plan = GoatWorkerPlan {
            id: config.id,
            key: config.key,
            generation: Generation(self.generation),
            directions: self.case.assignment(rank),
            upstream: self.case.upstream_of(rank),
        };
        if let Machine::Worker(worker) = &mut self.machines[node] {
            worker.suspend();
            worker.resume(Instant(self.now), plan);
        }
        self.drain(node);
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
                    if self.dead.is_some_and(|dead| self.case.address(dead) == to) {
                        continue;
                    }
                    match &mut self.machines[to] {
                        Machine::Server(machine) => drop(machine.handle_packet(now, from, &bytes)),
                        Machine::Switch(machine) => drop(machine.handle_packet(now, from, &bytes)),
                        Machine::Worker(machine) => drop(machine.handle_packet(now, from, &bytes)),
                    }
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
                Event::Begin { node } => self.begin(node),
                Event::Fault => self.fault(),
                Event::Plan => self.replan(),
            }
        }
        self.completed_at = self.now;
        self
    }

    /// The same bits everywhere, and the right ones.
    pub fn check(self) -> Self {
        for which in 0..self.case.tensors.len() {
            let first = self.done[0][which].as_ref().expect("all are done");
            assert!(self.case.is_sum(which, first), "tensor {which}: {:?}", self.case);
            for rank in 1..self.case.workers() {
                assert_eq!(self.done[rank][which].as_ref(), Some(first), "worker {rank}: {:?}", self.case);
            }
        }
        self
    }

    fn standing(&self) -> String {
        let lines = self.machines.iter().map(|machine| match machine {
            Machine::Server(server) => {
                format!("{:?} {:?}", server.received(), server.progress(self.case.config(0).id))
            }
            Machine::Switch(switch) => format!("{:?}", switch.statistics()),
            Machine::Worker(worker) => format!("{:?} {:?}", worker.progress(), worker.statistics()),
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    pub fn server(&self) -> GoatServerProgress {
        let Machine::Server(server) = &self.machines[SERVER] else { panic!("node 0 is the server") };
        server.progress(self.case.config(0).id).expect("a job")
    }

    pub fn statistics(&self, switch: usize) -> GoatSwitchStatistics {
        let Machine::Switch(switch) = &self.machines[self.case.address(switch)] else { panic!("a switch") };
        switch.statistics()
    }

    /// Packets that machines dropped for this reason.
    pub fn dropped(&self, reason: Reason) -> u64 {
        let of = |machine: &Machine| match machine {
            Machine::Server(server) => server.received(),
            Machine::Switch(switch) => switch.received(),
            Machine::Worker(worker) => worker.statistics().received,
        };
        self.machines.iter().map(|machine| of(machine).dropped[reason as usize]).sum()
    }

    pub fn retransmissions(&self) -> u64 {
        let of = |machine: &Machine| match machine {
            Machine::Worker(worker) => worker.statistics().retransmissions,
            _ => 0,
        };
        self.machines.iter().map(of).sum()
    }
}
