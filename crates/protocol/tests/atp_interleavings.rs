//! A few fragments of a few workers in whatever order, with loss, duplicates, early timeouts and restarts in between: all of
//! the ways where they can be counted, walks at random where they cannot. Whatever happened, the rest of the way leads
//! to the exact sum, without more faults.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hasher};
use std::time::Duration;

use fanin_protocol::atp::{
    AtpJobConfig, AtpServer, AtpSwitch, AtpSwitchConfig, AtpWorker, AtpWorkerPlan, Hashing, Overflow,
    Scaling, ServerJob, SwitchRoute,
};
use fanin_protocol::{
    Elements, Endpoint, Instant, RetransmissionConfig, Summer, Tensor, WorkerEvent, WorkerMachine,
};
use fanin_wire::{Directions, Generation, JobId, Key, Op};

const ELEMENTS: usize = 64;
const SERVER: usize = 0;
const JOB: JobId = JobId(7);
const KEY: Key = Key::new(0x0123_4567_89ab_cdef_0011_2233_4455_6677);

#[derive(Debug)]
struct Floats(Vec<f32>);

impl Tensor for Floats {
    fn elements(&mut self) -> Elements<'_> {
        Elements::Float32(&mut self.0)
    }
}

/// What is explored: how large, and how much may go wrong.
#[derive(Clone, Debug)]
struct Scope {
    /// Each switch's next hop and level. Node 0 is the server; switches, then workers follow.
    switches: &'static [(usize, u8)],
    /// Each worker's next hop, and its bit there.
    workers: &'static [(usize, u32)],
    fragments: usize,
    window_max: u16,
    aggregators: u32,
    /// Workers' values in a fragment; sums beyond 21.47 overflow.
    values: &'static [f32],
    /// Packets lost or doubled.
    faults: u32,
    /// Timeouts while packets are on the way.
    timeouts: u32,
    /// Machines that lose their memory.
    crashes: u32,
    scaling: Scaling,
    overflow: Overflow,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Deliver(usize),
    Lose(usize),
    /// Delivers it and leaves it on the way.
    Double(usize),
    Timeout(usize),
    Crash(usize),
}

struct World {
    scope: Scope,
    generation: u16,
    server: AtpServer<usize>,
    switches: Vec<AtpSwitch<usize>>,
    workers: Vec<AtpWorker<usize, Floats>>,
    /// Packets on the way: to, from, bytes; sorted, so that the order of sending makes no two states of one.
    wires: Vec<(usize, usize, Vec<u8>)>,
    now: u64,
    done: Vec<Option<Vec<f32>>>,
}

impl World {
    fn new(scope: &Scope) -> Self {
        let mut world = Self {
            scope: scope.clone(),
            generation: 0,
            server: AtpServer::new(),
            switches: vec![],
            workers: vec![],
            wires: vec![],
            now: 0,
            done: vec![None; scope.workers.len()],
        };
        world.server = world.new_server(false);
        world.switches = (0..scope.switches.len()).map(|at| world.new_switch(at)).collect();
        let retransmission =
            RetransmissionConfig { floor: Duration::from_millis(2), ceiling: Duration::from_millis(50) };
        for (rank, (upstream, _)) in scope.workers.iter().enumerate() {
            let mut worker =
                AtpWorker::new(world.config(), world.directions(rank), *upstream, retransmission);
            let values = (0..scope.fragments).flat_map(|at| [world.value(rank, at); ELEMENTS]);
            worker.submit(Floats(values.collect()), Op::Sum);
            world.workers.push(worker);
        }
        (0..scope.workers.len()).for_each(|rank| world.drain(world.worker(rank)));
        world
    }

    fn value(&self, rank: usize, fragment: usize) -> f32 {
        self.scope.values[rank] + fragment as f32 * 0.25
    }

    fn worker(&self, rank: usize) -> usize {
        1 + self.scope.switches.len() + rank
    }

    fn config(&self) -> AtpJobConfig {
        AtpJobConfig {
            id: JOB,
            key: KEY,
            generation: Generation(self.generation),
            workers: self.scope.workers.len() as u16,
            elements: ELEMENTS as u16,
            window_max: self.scope.window_max,
            aggregators: self.scope.aggregators,
            hashing: Hashing::Hash,
            scaling: self.scope.scaling,
            overflow: self.scope.overflow,
            congestion_control: true,
            originals_elements_max: 0,
        }
    }

    /// The bit of a switch is that of its number.
    fn directions(&self, rank: usize) -> Directions {
        let Scope { switches, workers, .. } = &self.scope;
        let children = |node: usize| {
            let racks = switches.iter().filter(|(up, _)| *up == node).count();
            (racks + workers.iter().filter(|(up, _)| *up == node).count()) as u8
        };
        let (mut at, bit) = workers[rank];
        let mut bitmap = 1 << bit;
        let mut directions = Directions::default();
        if at != SERVER {
            directions.level = switches[at - 1].1;
        }
        while at != SERVER {
            let (up, level) = switches[at - 1];
            directions.bitmaps[usize::from(level)] = bitmap;
            directions.fan_in_degrees[usize::from(level)] = children(at);
            (at, bitmap) = (up, 1 << (at - 1));
        }
        directions
    }

    fn new_server(&self, restored: bool) -> AtpServer<usize> {
        let mut server = AtpServer::new();
        let workers = (0..self.scope.workers.len()).map(|rank| self.directions(rank)).collect();
        let level = self.scope.switches.iter().map(|(_, level)| level + 1).max().unwrap_or(0);
        server.add_job(ServerJob { config: self.config(), workers, level, restored }).expect("a tree");
        server
    }

    fn route(&self, at: usize) -> SwitchRoute<usize> {
        let (upstream, level) = self.scope.switches[at];
        SwitchRoute { id: JOB, key: KEY, generation: Generation(self.generation), upstream, level }
    }

    fn new_switch(&self, at: usize) -> AtpSwitch<usize> {
        let mut switch = AtpSwitch::new(AtpSwitchConfig {
            aggregators: self.scope.aggregators,
            elements: ELEMENTS as u16,
            ways: 2,
            stale: Duration::from_millis(20),
            ecn_threshold_packets: None,
        });
        switch.add_job(self.route(at)).expect("room");
        switch
    }

    /// A switch comes back empty; a server too, and the job goes on in another generation.
    fn crash(&mut self, node: usize) {
        if node != SERVER {
            self.switches[node - 1] = self.new_switch(node - 1);
            // While the server knows everything, nobody needs to hear of it.
            if self.generation == 0 {
                return;
            }
        }
        self.generation += 1;
        self.server = self.new_server(true);
        for at in 0..self.switches.len() {
            let route = self.route(at);
            self.switches[at].add_job(route).expect("room");
        }
        for rank in 0..self.workers.len() {
            let AtpJobConfig { id, generation, .. } = self.config();
            let (directions, upstream) = (self.directions(rank), self.scope.workers[rank].0);
            let plan = AtpWorkerPlan { id, key: KEY, generation, directions, upstream };
            self.workers[rank].resume(Instant(self.now), plan);
            self.drain(self.worker(rank));
        }
    }

    fn drain(&mut self, node: usize) {
        let first_worker = self.worker(0);
        let mut train = [0; 4096];
        loop {
            let now = Instant(self.now);
            let sent = match node {
                SERVER => self.server.poll_transmit(now, &mut train),
                _ if node < first_worker => self.switches[node - 1].poll_transmit(now, &mut train),
                _ => self.workers[node - first_worker].poll_transmit(now, &mut train),
            };
            let Some(sent) = sent else { break };
            let (to, bytes, segment_bytes) = (sent.to.to_vec(), sent.bytes, sent.segment_bytes);
            for packet in train[..bytes].chunks(segment_bytes) {
                self.wires.extend(to.iter().map(|to| (*to, node, packet.to_vec())));
            }
        }
        self.wires.sort();
        if let Some(rank) = node.checked_sub(first_worker) {
            while let Some(event) = self.workers[rank].poll_event() {
                let WorkerEvent::Completed(Floats(sum), _) = event else { panic!("{event:?}") };
                assert!(self.done[rank].replace(sum).is_none());
            }
        }
    }

    fn deliver(&mut self, (to, from, bytes): (usize, usize, Vec<u8>)) {
        let (now, first_worker) = (Instant(self.now), self.worker(0));
        match to {
            SERVER => self.server.handle_packet(now, from, &bytes),
            _ if to < first_worker => self.switches[to - 1].handle_packet(now, from, &bytes),
            _ => self.workers[to - first_worker].handle_packet(now, from, &bytes),
        };
        self.drain(to);
    }

    fn time_out(&mut self, rank: usize) {
        if let Some(due) = self.workers[rank].poll_timeout() {
            self.now = self.now.max(due.0);
            self.workers[rank].handle_timeout(Instant(self.now));
            self.drain(self.worker(rank));
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Deliver(at) => {
                let packet = self.wires.remove(at);
                self.deliver(packet);
            }
            Step::Lose(at) => drop(self.wires.remove(at)),
            Step::Double(at) => {
                let packet = self.wires[at].clone();
                self.deliver(packet);
            }
            Step::Timeout(rank) => self.time_out(rank),
            Step::Crash(node) => self.crash(node),
        }
    }

    fn steps(&self, path: &[Step]) -> Vec<Step> {
        let count = |found: fn(&Step) -> bool| path.iter().filter(|step| found(step)).count() as u32;
        let faults = count(|step| matches!(step, Step::Lose(_) | Step::Double(_)));
        let timeouts = count(|step| matches!(step, Step::Timeout(_)));
        let crashes = count(|step| matches!(step, Step::Crash(_)));
        let mut steps = vec![];
        for at in 0..self.wires.len() {
            if at > 0 && self.wires[at] == self.wires[at - 1] {
                continue;
            }
            steps.push(Step::Deliver(at));
            if faults < self.scope.faults {
                steps.extend([Step::Lose(at), Step::Double(at)]);
            }
        }
        if timeouts < self.scope.timeouts {
            let waiting = |rank: &usize| self.workers[*rank].poll_timeout().is_some();
            steps.extend((0..self.workers.len()).filter(waiting).map(Step::Timeout));
        }
        if crashes < self.scope.crashes {
            steps.extend((0..=self.switches.len()).map(Step::Crash));
        }
        steps
    }

    /// From here on nothing is lost: it must come to an end.
    fn finish(&mut self, path: &[Step]) {
        for _ in 0..300 {
            while let Some(packet) = self.wires.pop() {
                self.deliver(packet);
            }
            if self.done.iter().all(Option::is_some) {
                return;
            }
            let due = (0..self.workers.len())
                .min_by_key(|rank| self.workers[*rank].poll_timeout().map_or(u64::MAX, |due| due.0));
            self.time_out(due.expect("a worker"));
        }
        panic!("no end: {path:?} {:?}", self.scope);
    }

    fn check(&self, path: &[Step]) {
        for (rank, sum) in self.done.iter().enumerate() {
            let Some(sum) = sum else { continue };
            for (at, fragment) in sum.chunks(ELEMENTS).enumerate() {
                let expected: f32 = (0..self.workers.len()).map(|rank| self.value(rank, at)).sum();
                // A factor that is no multiple of four rounds.
                let tolerance = if self.scope.scaling == Scaling::Static { 0.0 } else { 1e-5 };
                assert!(
                    fragment.iter().all(|x| (x - expected).abs() <= tolerance),
                    "worker {rank}, fragment {at} is {} and should be {expected}: {path:?} {:?}",
                    fragment[0],
                    self.scope
                );
            }
        }
    }

    fn hash(&self, path: &[Step]) -> u64 {
        struct Into(DefaultHasher);
        impl std::fmt::Write for Into {
            fn write_str(&mut self, text: &str) -> std::fmt::Result {
                self.0.write(text.as_bytes());
                Ok(())
            }
        }
        let mut hash = Into(DefaultHasher::new());
        let spent = path.iter().map(|step| match step {
            Step::Deliver(_) => 0,
            Step::Lose(_) | Step::Double(_) => 1,
            Step::Timeout(_) => 100,
            Step::Crash(_) => 10_000,
        });
        let spent: u32 = spent.sum();
        let Self { server, switches, workers, wires, now, .. } = self;
        write!(hash, "{spent} {now} {server:?} {switches:?} {workers:?}").expect("hashing");
        for (to, from, bytes) in wires {
            hash.0.write_usize(to * 100 + from);
            hash.0.write(bytes);
        }
        hash.0.finish()
    }
}

/// Every way; how many states there are.
fn explore(scope: &Scope) -> usize {
    let mut seen = HashSet::new();
    let mut open = vec![vec![]];
    while let Some(path) = open.pop() {
        let mut world = World::new(scope);
        path.iter().for_each(|step| world.step(*step));
        if !seen.insert(world.hash(&path)) {
            continue;
        }
        world.check(&path);
        open.extend(world.steps(&path).into_iter().map(|step| path.iter().copied().chain([step]).collect()));
        if world.wires.is_empty() {
            world.finish(&path);
            world.check(&path);
        }
    }
    seen.len()
}

/// A rack of two, in which all fragments want one aggregator.
const RACK: Scope = Scope {
    switches: &[(SERVER, 0)],
    workers: &[(1, 0), (1, 1)],
    fragments: 1,
    window_max: 1,
    aggregators: 1,
    values: &[1.0, 10.0],
    faults: 0,
    timeouts: 0,
    crashes: 0,
    scaling: Scaling::Static,
    overflow: Overflow::Reactive,
};
const RACK_OF_THREE: Scope = Scope { workers: &[(1, 0), (1, 1), (1, 2)], values: &[1.0, 3.0, 9.0], ..RACK };
/// A rack of two, and a worker at the second level.
const TWO_LEVELS: Scope = Scope {
    switches: &[(2, 0), (SERVER, 1)],
    workers: &[(1, 0), (1, 1), (2, 5)],
    values: &[1.0, 3.0, 9.0],
    ..RACK
};

#[test]
fn every_way_of_one_fragment_ends_in_the_exact_sum() {
    for (scope, least) in [
        (Scope { faults: 1, ..RACK }, 100),
        (Scope { timeouts: 1, ..RACK }, 100),
        (Scope { faults: 1, ..RACK_OF_THREE }, 1000),
        (Scope { faults: 1, ..TWO_LEVELS }, 1000),
    ] {
        let states = explore(&scope);
        assert!(states >= least, "only {states} states: {scope:?}");
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ x >> 31) % n as u64) as usize
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())].clone()
    }
}

fn walk(seed: u64) {
    const FOUR_RACKED: Scope = Scope {
        switches: &[(3, 0), (3, 0), (SERVER, 1)],
        workers: &[(1, 0), (1, 1), (2, 0), (2, 1)],
        ..RACK
    };
    const THREE_LEVELS: Scope = Scope {
        switches: &[(2, 0), (3, 1), (SERVER, 2)],
        workers: &[(1, 0), (1, 1), (2, 5), (3, 6)],
        ..RACK
    };
    const VALUES: [&[f32]; 3] = [&[1.0, 3.0, 9.0, 2.0], &[15.0, 14.0, 1.0, 0.5], &[15.0, 3.0, -14.0, 15.0]];
    let mut random = Random(seed);
    let scope = Scope {
        fragments: random.pick(&[1, 2, 3, 5]),
        window_max: random.pick(&[1, 2, 3]),
        aggregators: random.pick(&[0, 1, 1, 2]),
        values: random.pick(&VALUES),
        faults: random.pick(&[0, 2, 6]),
        timeouts: random.pick(&[0, 2, 6]),
        crashes: random.pick(&[0, 0, 1, 2]),
        scaling: random.pick(&[Scaling::Static, Scaling::Dynamic]),
        overflow: random.pick(&[Overflow::Reactive, Overflow::Reactive, Overflow::Proactive]),
        ..random.pick(&[RACK, RACK_OF_THREE, TWO_LEVELS, FOUR_RACKED, THREE_LEVELS])
    };
    let mut world = World::new(&scope);
    let mut path = vec![];
    while !world.wires.is_empty() && path.len() < 300 {
        let steps = world.steps(&path);
        let mut step = random.pick(&steps);
        if matches!(step, Step::Crash(_) | Step::Timeout(_)) && random.below(4) > 0 {
            // Not all of them at the very beginning.
            step = random.pick(&steps);
        }
        path.push(step);
        world.step(step);
        world.check(&path);
    }
    world.finish(&path);
    world.check(&path);
}

#[test]
fn random_walks_end_in_the_exact_sum() {
    (0..3000).for_each(walk);
}
