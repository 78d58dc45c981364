//! GOAT's machines of a case, and what goes wrong with them.

use std::time::Duration;

use fanin_protocol::goat::{
    GoatServer, GoatServerJob, GoatServerProgress, GoatSwitch, GoatSwitchConfig, GoatSwitchStatistics,
    GoatWorker, GoatWorkerPlan,
};
use fanin_protocol::{RetransmissionConfig, Summer, WorkerMachine};
use fanin_testworld::{Machine, Network, Numbered, Random, Script, World};
use fanin_wire::{JobId, Op, Operation};

use crate::case::{Case, ELEMENTS, Fault, SERVER};

type Worker = GoatWorker<usize, Numbered>;

#[derive(Debug)]
pub struct Goat {
    case: Case,
    generation: u16,
    /// How many tensors may be submitted: the participants may change only once all of the ones before have
    /// their sums.
    allowed: usize,
    /// How many each worker has submitted.
    submitted: Vec<usize>,
}

pub enum Happening {
    /// The case's fault.
    Fault,
    /// Another plan takes over.
    Plan,
    /// A worker submits all that it may.
    Submit(usize),
}

pub fn world(case: Case) -> World<Goat> {
    let (random, late_us) = (Random(case.seed ^ 0x5eed), case.late_us);
    let (workers, tensors) = (case.worker(0)..case.worker(case.workers()), case.tensors.len());
    let has_fault = case.fault != Fault::None;
    let submitted = vec![0; case.workers()];
    let changes = !case.participants.is_empty();
    let script = Goat { case, generation: 0, allowed: 0, submitted };
    let mut machines = vec![Machine::summer(script.server(false))];
    machines.extend((0..script.case.switches).map(|at| Machine::summer(script.switch(at))));
    machines.extend((0..script.case.workers()).map(|rank| Machine::worker(script.worker(rank))));
    let mut world = World::new(script, random, machines, tensors);
    if changes {
        allow(&mut world);
    } else {
        world.begin_within(workers, late_us);
    }
    let fault_at = 20_000 + world.random.below(1_000 * late_us.max(300));
    if has_fault {
        world.happens_at(fault_at, Happening::Fault);
    }
    world
}

impl Goat {
    fn server(&self, restored: bool) -> GoatServer<usize> {
        let (config, plan) = (self.case.config(self.generation), self.case.server_plan());
        let mut server = GoatServer::new();
        server.add_job(GoatServerJob { config, plan, restored }).expect("a plan");
        server
    }

    fn switch(&self, at: usize) -> GoatSwitch<usize> {
        let mut switch = GoatSwitch::new(GoatSwitchConfig {
            aggregators: self.case.aggregators,
            elements: ELEMENTS as u16,
            ways: self.case.ways,
            stale: Duration::ZERO,
            ecn_threshold_packets: Some(20),
        });
        switch.add_job(self.case.route(at, self.generation)).expect("a route");
        switch
    }

    fn worker(&self, rank: usize) -> Worker {
        let floor = Duration::from_micros(self.case.retransmission_us);
        let retransmission = RetransmissionConfig { floor, ceiling: floor * 40 };
        let GoatWorkerPlan { directions, upstream, .. } = self.plan(rank);
        GoatWorker::new(self.case.config(self.generation), directions, upstream, retransmission)
    }

    fn plan(&self, rank: usize) -> GoatWorkerPlan<usize> {
        let config = self.case.config(self.generation);
        GoatWorkerPlan {
            id: config.id,
            key: config.key,
            generation: config.generation,
            directions: self.case.assignment(rank),
            upstream: self.case.upstream_of(rank),
        }
    }

    /// A switch that may die: nobody but it could pass on what its workers say, nor be the server's. So it is one without workers.
    fn spare_switch(&self) -> Option<usize> {
        let (case, at) = (&self.case, |at: &usize| Some(*at));
        let other = |it: &usize| {
            let is_first = case.attached.contains(&at(it)) || case.beside.contains(&at(it));
            !case.at_server.contains(it) && !is_first
        };
        let leaf = |at: &usize| case.links.iter().filter(|(a, b)| a == at || b == at).count() == 1;
        (0..case.switches).filter(other).find(leaf)
    }
}

impl Script for Goat {
    type Happening = Happening;

    fn network(&self) -> Network {
        self.case.network
    }

    fn jobs(&self) -> Vec<JobId> {
        vec![self.case.config(0).id]
    }

    fn tensor(&self, node: usize, number: usize) -> (Numbered, Operation) {
        let rank = node - self.case.worker(0);
        let participants = self.case.participants_of(number);
        let tensor = Numbered { participants, ..Numbered::new(number, self.case.tensor(rank, number)) };
        (tensor, Op::Sum.into())
    }

    fn happen(world: &mut World<Self>, what: Happening) {
        match what {
            Happening::Plan => return replan(world),
            Happening::Submit(rank) => return submit(world, rank),
            Happening::Fault => {}
        }
        let any = world.random.below(world.script.case.switches as u64) as usize;
        match world.script.case.fault {
            Fault::None => {}
            Fault::SwitchForgets => {
                let (address, switch) = (world.script.case.address(any), world.script.switch(any));
                world.replace(address, Machine::summer(switch));
            }
            Fault::SwitchDies => {
                if let Some(at) = world.script.spare_switch() {
                    world.die(world.script.case.address(at));
                    world.happens_at(world.ns() + 5_000_000, Happening::Plan);
                }
            }
            Fault::ServerForgets => {
                world.script.generation += 1;
                let server = world.script.server(true);
                world.replace(SERVER, Machine::summer(server));
                tell(world);
            }
            Fault::Replanned => replan(world),
        }
    }

    /// The next tensors follow once all that take part in these have them.
    fn after_drain(world: &mut World<Self>, _node: usize, _sent: usize) {
        let Goat { case, allowed, .. } = &world.script;
        if !(1..case.tensors.len()).contains(allowed) {
            return;
        }
        let has = |rank: usize, number| world.done(case.worker(rank), number).is_some();
        let is_over =
            |number| (0..case.workers()).all(|rank| !case.takes_part(rank, number) || has(rank, number));
        if (0..*allowed).all(is_over) {
            allow(world);
        }
    }

    /// The same bits with all that take part, and the right ones. The others keep their own.
    fn check(world: &World<Self>) {
        let case = &world.script.case;
        for number in 0..case.tensors.len() {
            let of = |rank: usize| &world.done(case.worker(rank), number).expect("all are done").values;
            let first = (0..case.workers()).find(|rank| case.takes_part(*rank, number));
            let sum = of(first.expect("one at least"));
            assert!(case.is_sum(number, sum), "tensor {number}: {case:?}");
            for rank in 0..case.workers() {
                let own =
                    if case.takes_part(rank, number) { sum.bits() } else { case.tensor(rank, number).bits() };
                assert_eq!(of(rank).bits(), own, "tensor {number} of rank {rank}: {case:?}");
            }
        }
    }
}

/// The tensors up to the next change of participants may be submitted. Each worker is late by itself, also one
/// that takes no part.
fn allow(world: &mut World<Goat>) {
    let Goat { case, allowed, .. } = &mut world.script;
    let participants = case.participants_of(*allowed);
    *allowed += 1;
    while *allowed < case.tensors.len() && case.participants_of(*allowed) == participants {
        *allowed += 1;
    }
    let (workers, late_us) = (case.workers(), case.late_us);
    for rank in 0..workers {
        let late = world.random.below(1000 * late_us + 1);
        world.happens_in(Duration::from_nanos(late), Happening::Submit(rank));
    }
}

fn submit(world: &mut World<Goat>, rank: usize) {
    let node = world.script.case.worker(rank);
    for number in world.script.submitted[rank]..world.script.allowed {
        world.submit(node, number);
    }
    world.script.submitted[rank] = world.script.allowed;
    world.drain(node);
}

/// Another plan, without who is dead.
fn replan(world: &mut World<Goat>) {
    let dead = world.dead();
    let script = &mut world.script;
    script.generation += 1;
    // Often in parts that are fewer fragments together, or more, than before.
    script.case.cut_anew(&mut Random(script.case.seed ^ 0xc07 ^ u64::from(script.generation)));
    script.case.plan = script.case.any_plan(&mut world.random);
    let (case, is_alive) = (&script.case, |switch: &usize| dead != Some(script.case.address(*switch)));
    let mut onward = case.any_onward(&mut Random(case.seed ^ u64::from(script.generation)));
    onward.iter_mut().for_each(|sums| sums.retain(|from, to| is_alive(from) && is_alive(to)));
    let alive = |assigned: &Vec<Option<usize>>| assigned.iter().map(|it| it.filter(is_alive)).collect();
    let plan = case.plan.iter().map(alive).collect();
    (script.case.plan, script.case.onward) = (plan, onward);
    let Goat { case, generation, .. } = &world.script;
    // As ranks that are told to join again have it: the server is a new one.
    if Random(case.seed ^ 0xa9e ^ u64::from(*generation)).below(2) == 0 {
        let server = world.script.server(true);
        world.replace(SERVER, Machine::summer(server));
        return tell(world);
    }
    let (config, plan, fragments) = (case.config(*generation), case.server_plan(), case.fragments());
    let server: &mut GoatServer<usize> = world.machine_mut(SERVER);
    let earliest = server.go_on_with(config.id, config.generation, &plan).expect("a plan");
    assert!(earliest.is_some_and(|earliest| earliest <= fragments));
    tell(world);
}

/// Switches and workers hear of the generation and its plan.
fn tell(world: &mut World<Goat>) {
    for at in 0..world.script.case.switches {
        let (address, route) =
            (world.script.case.address(at), world.script.case.route(at, world.script.generation));
        world.machine_mut::<GoatSwitch<usize>>(address).add_job(route).expect("a route");
    }
    for rank in 0..world.script.case.workers() {
        let (node, now, plan) = (world.script.case.worker(rank), world.clock(), world.script.plan(rank));
        let worker: &mut Worker = world.machine_mut(node);
        worker.suspend();
        worker.resume(now, plan);
        world.drain(node);
    }
}

/// What the server counted.
pub fn server(world: &World<Goat>) -> GoatServerProgress {
    let server: &GoatServer<usize> = world.machine(SERVER);
    server.progress(world.script.case.config(0).id).expect("a job")
}

/// What a switch counted.
pub fn switch(world: &World<Goat>, at: usize) -> GoatSwitchStatistics {
    world.machine::<GoatSwitch<usize>>(world.script.case.address(at)).statistics()
}
