//! ATP's machines of a case, and what goes wrong with them.

use fanin_protocol::atp::{
    AtpJobConfig, AtpServer, AtpServerProgress, AtpSwitch, AtpSwitchStatistics, AtpWorker, AtpWorkerPlan,
    ServerJob, SwitchRoute,
};
use fanin_protocol::{Summer, WorkerMachine};
use fanin_testworld::{Machine, Network, Numbered, Random, Script, Way, World};
use fanin_wire::{Generation, JobId, Operation};

use crate::case::{Case, ELEMENTS, Fault};
use crate::tree::Tree;

pub type Worker = AtpWorker<usize, Numbered>;
const SERVER: usize = 0;

#[derive(Debug)]
pub struct Atp {
    pub case: Case,
    pub generation: u16,
    pub server_crashes: u64,
    /// How often each worker moved, by node.
    pub moves: Vec<usize>,
    midway: usize,
}

/// Between two addresses of one node.
const MOVED: usize = 2048;
const MOVES_MAX: usize = 31;

pub fn world(case: Case) -> World<Atp> {
    let random = Random(case.seed ^ 0x5eed);
    let moves = vec![0; case.worker(case.jobs, 0)];
    let script = Atp { case, generation: 0, server_crashes: 0, moves, midway: 0 };
    let case = &script.case;
    let mut machines = vec![Machine::summer(script.server(false))];
    machines.extend((0..case.tree.switches.len()).map(|at| Machine::summer(script.switch(at))));
    for job in 0..case.jobs {
        machines.extend((0..case.workers()).map(|rank| Machine::worker(script.worker(job, rank))));
    }
    let (workers, late_us, tensors) = (case.worker(0, 0)..machines.len(), case.late_us, case.tensors.len());
    let is_once = matches!(case.fault, Fault::Server | Fault::Switches | Fault::Worker);
    let mut world = World::new(script, random, machines, tensors);
    world.begin_within(workers, late_us);
    let fault_at = 20_000 + world.random.below(1_000 * late_us.max(300));
    if is_once {
        world.happens_at(fault_at, ());
    }
    world
}

impl Atp {
    fn address(&self, node: usize) -> usize {
        node + MOVED * self.moves[node]
    }

    fn server(&self, restored: bool) -> AtpServer<usize> {
        let mut server = AtpServer::new();
        let (workers, level) = (self.case.tree.directions(), self.case.tree.server_level());
        for job in 0..self.case.jobs {
            let config = self.case.config(job, self.generation);
            server.add_job(ServerJob { config, workers: workers.clone(), level, restored }).expect("a tree");
        }
        server
    }

    fn switch(&self, at: usize) -> AtpSwitch<usize> {
        let mut switch = AtpSwitch::new(self.case.switch);
        (0..self.case.jobs).for_each(|job| switch.add_job(self.route(at, job)).expect("room for the job"));
        switch
    }

    fn route(&self, at: usize, job: usize) -> SwitchRoute<usize> {
        let AtpJobConfig { id, key, generation, workers, .. } = self.case.config(job, self.generation);
        let (parent, level) = self.case.tree.switches[at];
        SwitchRoute { id, key, generation, workers, upstream: Tree::node(parent), level }
    }

    fn worker(&self, job: usize, rank: usize) -> Worker {
        let AtpWorkerPlan { directions, upstream, .. } = self.plan(job, rank);
        let config = self.case.config(job, self.generation);
        AtpWorker::new(config, directions, upstream, self.case.retransmission)
    }

    fn plan(&self, job: usize, rank: usize) -> AtpWorkerPlan<usize> {
        let AtpJobConfig { id, key, generation, .. } = self.case.config(job, self.generation);
        let Tree { workers, .. } = &self.case.tree;
        let (directions, upstream) = (self.case.tree.directions()[rank], Tree::node(workers[rank]));
        AtpWorkerPlan { id, key, generation, directions, upstream }
    }
}

impl Script for Atp {
    /// The case's fault.
    type Happening = ();

    fn network(&self) -> Network {
        self.case.network
    }

    fn jobs(&self) -> Vec<JobId> {
        (0..self.case.jobs).map(|job| self.case.config(job, 0).id).collect()
    }

    fn tensor(&self, node: usize, number: usize) -> (Numbered, Operation) {
        let (job, rank) = self.case.job_and_rank(node);
        (Numbered::new(number, self.case.tensor(job, rank, number)), self.case.op(number).into())
    }

    fn happen(world: &mut World<Self>, (): ()) {
        match world.script.case.fault {
            Fault::None | Fault::Crashes(_) | Fault::Moves(_) => {}
            Fault::Switches => {
                (0..world.script.case.tree.switches.len()).for_each(|at| switch_forgets(world, at));
            }
            Fault::Server => server_forgets(world),
            Fault::Worker => replace_workers(world),
        }
    }

    fn carry(world: &mut World<Self>, from: usize, to: usize, _packet: &[u8]) -> Option<Way> {
        let loss_per_mille = world.script.case.network.loss_per_mille;
        Some(Way { from: world.script.address(from), to, loss_per_mille, late_ns: 0 })
    }

    /// Old addresses stay in the network with what was sent from them.
    fn node_at(&self, address: usize) -> Option<usize> {
        Some(address % MOVED).filter(|node| self.address(*node) == address)
    }

    fn before_packet(world: &mut World<Self>) {
        let workers = world.script.case.workers() as u64;
        match world.script.case.fault {
            Fault::Crashes(per_million) if world.random.below(1_000_000) < per_million => {
                let switches = world.script.case.tree.switches.len() as u64;
                let node = world.random.below(1 + switches) as usize;
                crash(world, node);
            }
            Fault::Moves(per_million) if world.random.below(1_000_000) < per_million => {
                let rank = world.random.below(workers) as usize;
                let moves = &mut world.script.moves[world.script.case.worker(0, rank)];
                *moves = MOVES_MAX.min(*moves + 1);
            }
            _ => {}
        }
    }

    /// The same bits everywhere, and the right ones.
    fn check(world: &World<Self>) {
        let case = &world.script.case;
        for job in 0..case.jobs {
            let first = case.worker(job, 0);
            for number in 0..case.tensors.len() {
                let sum = world.same_everywhere(first..first + case.workers(), number);
                assert_eq!(case.unlike(job, number, sum), None, "{case:?}");
            }
        }
    }
}

/// A machine loses its memory. Nobody needs to hear of a switch's while the server knows everything; else the job is set up in
/// another generation.
pub fn crash(world: &mut World<Atp>, node: usize) {
    match node {
        SERVER => world.script.server_crashes += 1,
        _ => switch_forgets(world, node - 1),
    }
    if world.script.server_crashes > 0 {
        server_forgets(world);
    }
}

/// The routes come back, and the server keeps what it has.
fn switch_forgets(world: &mut World<Atp>, at: usize) {
    let switch = world.script.switch(at);
    world.replace(1 + at, Machine::summer(switch));
}

/// The jobs go on in another generation.
fn server_forgets(world: &mut World<Atp>) {
    world.script.generation += 1;
    let server = world.script.server(true);
    world.replace(SERVER, Machine::summer(server));
    tell_switches(world);
    for job in 0..world.script.case.jobs {
        (0..world.script.case.workers()).for_each(|rank| resume(world, job, rank));
    }
}

fn tell_switches(world: &mut World<Atp>) {
    for job in 0..world.script.case.jobs {
        for at in 0..world.script.case.tree.switches.len() {
            let route = world.script.route(at, job);
            world.machine_mut::<AtpSwitch<usize>>(1 + at).add_job(route).expect("room for the job");
        }
    }
}

fn resume(world: &mut World<Atp>, job: usize, rank: usize) {
    let (node, now) = (world.script.case.worker(job, rank), world.clock());
    let plan = world.script.plan(job, rank);
    // A driver suspends its worker. One that only hears of the other generation must go on, too.
    let is_suspended = !matches!(world.script.case.fault, Fault::Crashes(_));
    let worker: &mut Worker = world.machine_mut(node);
    if is_suspended {
        worker.suspend();
    }
    worker.resume(now, plan);
    world.drain(node);
}

/// A worker of each job dies, and another takes its place.
fn replace_workers(world: &mut World<Atp>) {
    world.script.generation += 1;
    tell_switches(world);
    let generation = Generation(world.script.generation);
    for job in 0..world.script.case.jobs {
        let case = &world.script.case;
        let (id, level, directions) =
            (case.config(job, 0).id, case.tree.server_level(), case.tree.directions());
        let server: &mut AtpServer<usize> = world.machine_mut(SERVER);
        let earliest = server.set_up_again(id, generation, &directions, level);
        let earliest = earliest.expect("the same tree").expect("a job of the server");
        let workers = world.script.case.workers();
        let replaced = world.random.below(workers as u64) as usize;
        for rank in 0..workers {
            if rank != replaced {
                resume(world, job, rank);
                continue;
            }
            let (node, mut worker) = (world.script.case.worker(job, rank), world.script.worker(job, rank));
            let place = world.script.case.locate(earliest);
            if let Some((first, fragment)) = place {
                worker.begin_at(earliest, first as u16, fragment as u32);
                world.script.midway += usize::from(fragment > 0);
            }
            world.replace(node, Machine::worker(worker));
            let (first, fragment) = place.unwrap_or((world.script.case.tensors.len(), 0));
            let expected = |script: &Atp, number: usize| script.case.expected(job, number);
            world.begin_midway(node, (first, fragment * ELEMENTS), expected);
        }
    }
}

/// Whether a worker was replaced in the middle of a tensor.
pub fn was_replaced_midway(world: &World<Atp>) -> bool {
    world.script.midway > 0
}

/// What each switch counted.
pub fn switches(world: &World<Atp>) -> Vec<AtpSwitchStatistics> {
    world.all::<AtpSwitch<usize>>().map(AtpSwitch::statistics).collect()
}

/// What the server counted of a job.
pub fn server(world: &World<Atp>, job: usize) -> AtpServerProgress {
    let id = world.script.case.config(job, 0).id;
    world.machine::<AtpServer<usize>>(SERVER).progress(id).expect("a job")
}
