//! Workers, switches and a server, with a network between them that loses, doubles and reorders:
//! every tensor comes out as its exact sum at every worker.

use alloc::collections::VecDeque;
use core::time::Duration;

use super::*;
use crate::atp::{
    AtpJobConfig, AtpServer, AtpServerProgress, AtpSwitch, AtpSwitchConfig, AtpSwitchStatistics, AtpWorker,
    AtpWorkerPlan, Hashing, Overflow, Scaling, ServerJob, SwitchRoute,
};
use crate::machine::{Elements, Summer, Tensor, WorkerEvent, WorkerMachine};
use crate::transport::RetransmissionConfig;

const SERVER: u16 = 1;
const SWITCHES: u16 = 10;
const WORKERS: u16 = 1000;
/// Between two addresses of one worker, which may move so often.
const MOVED: u16 = 2048;
const MOVES_MAX: u16 = 31;

#[derive(Debug)]
enum Numbers {
    Float(Vec<f32>),
    Integer(Vec<i32>),
}

impl Tensor for Numbers {
    fn elements(&mut self) -> Elements<'_> {
        match self {
            Self::Float(values) => Elements::Float32(values),
            Self::Integer(values) => Elements::Int32(values),
        }
    }
}

impl Numbers {
    /// The first element that is not as expected, and what it should be. A factor that is no
    /// multiple of four rounds.
    fn unlike(&self, expected: &Self, scaling: Scaling) -> Option<(f64, f64)> {
        let tolerance = if scaling == Scaling::Static { 0.0 } else { 1e-5 };
        let (ours, theirs) = (self.values(), expected.values());
        assert_eq!(ours.len(), theirs.len());
        ours.into_iter().zip(theirs).find(|(a, b)| (a - b).abs() > tolerance || a.is_nan())
    }

    fn values(&self) -> Vec<f64> {
        match self {
            Self::Float(values) => values.iter().map(|x| f64::from(*x)).collect(),
            Self::Integer(values) => values.iter().map(|x| f64::from(*x)).collect(),
        }
    }
}

/// A switch tree: each switch's parent (`None` below the server) and level; each worker's switch
/// (`None`: at the server).
struct Tree {
    switches: Vec<(Option<usize>, u8)>,
    workers: Vec<Option<usize>>,
}

impl Tree {
    /// `racks` of `size` workers below one switch of the second level.
    fn racks(racks: usize, size: usize) -> Self {
        let mut switches = vec![(None, 1)];
        switches.extend((0..racks).map(|_| (Some(0), 0)));
        Self { switches, workers: (0..racks * size).map(|worker| Some(1 + worker / size)).collect() }
    }

    /// The paper's Figure 9.
    fn figure_9() -> Self {
        let workers = [1, 1, 2, 2, 0, 0].map(Some).to_vec();
        Self { switches: vec![(None, 1), (Some(0), 0), (Some(0), 0)], workers }
    }

    /// `levels` of switches, each with two children, and a worker besides at every switch above the
    /// first level.
    fn deep(levels: u8) -> Self {
        let mut tree = Self { switches: vec![(None, levels - 1)], workers: vec![] };
        let mut at = 0;
        while at < tree.switches.len() {
            let level = tree.switches[at].1;
            if level == 0 {
                tree.workers.extend([Some(at); 2]);
            } else {
                tree.workers.push(Some(at));
                tree.switches.extend([(Some(at), level - 1); 2]);
            }
            at += 1;
        }
        tree
    }

    /// The first level that no switch has.
    fn server_level(&self) -> u8 {
        self.switches.first().map_or(0, |(_, level)| level + 1)
    }

    fn directions(&self) -> Vec<Directions> {
        let mut children = vec![0u8; self.switches.len()];
        let mut at_server = 0u8;
        let mut bit_of = |parent: Option<usize>| {
            let count = parent.map_or(&mut at_server, |parent| &mut children[parent]);
            *count += 1;
            *count - 1
        };
        let switch_bits: Vec<u8> = self.switches.iter().map(|(parent, _)| bit_of(*parent)).collect();
        let worker_bits: Vec<u8> = self.workers.iter().map(|parent| bit_of(*parent)).collect();
        let of_worker = |(worker, parent): (usize, &Option<usize>)| {
            let mut directions = Directions::default();
            let (mut at, mut bit) = (*parent, worker_bits[worker]);
            directions.level = at.map_or(self.server_level(), |at| self.switches[at].1);
            while let Some(switch) = at {
                let level = usize::from(self.switches[switch].1);
                directions.bitmaps[level] = 1 << bit;
                directions.fan_in_degrees[level] = children[switch];
                (at, bit) = (self.switches[switch].0, switch_bits[switch]);
            }
            if at_server > 1 {
                directions.bitmaps[usize::from(self.server_level())] = 1 << bit;
            }
            directions
        };
        self.workers.iter().enumerate().map(of_worker).collect()
    }
}

/// In a thousand: what the network does to a packet.
#[derive(Clone, Copy, Default)]
struct Faults {
    loss: u64,
    duplication: u64,
    reordering: u64,
    /// A switch or the server loses its memory, in a million packets.
    crash: u64,
    /// A worker has another address from now on, in a million packets. Packets on their way to the
    /// old one are lost.
    moves: u64,
}

struct Network {
    config: AtpJobConfig,
    switch_config: AtpSwitchConfig,
    tree: Tree,
    workers: Vec<AtpWorker<u16, Numbers>>,
    switches: Vec<AtpSwitch<u16>>,
    server: AtpServer<u16>,
    wires: VecDeque<(u16, u16, Vec<u8>)>,
    now: u64,
    random: u64,
    faults: Faults,
    server_crashes: u64,
    /// How often each worker moved.
    moves: Vec<u16>,
}

fn config(workers: usize) -> AtpJobConfig {
    AtpJobConfig {
        id: JobId(3),
        key: KEY,
        generation: Generation(0),
        workers: workers as u16,
        elements: ELEMENTS as u16,
        window_max: 16,
        aggregators: 64,
        hashing: Hashing::Hash,
        scaling: Scaling::Static,
        overflow: Overflow::Reactive,
        congestion_control: true,
        originals_elements_max: 0,
    }
}

impl Network {
    fn new(tree: Tree, config: AtpJobConfig, table: u32, seed: u64) -> Self {
        let switch_config = AtpSwitchConfig {
            aggregators: table,
            elements: ELEMENTS as u16,
            ways: [1, 8][seed as usize / 2 % 2],
            stale: Duration::from_millis(50),
            ecn_threshold_packets: Some(64),
        };
        let retransmission =
            RetransmissionConfig { floor: Duration::from_millis(1), ceiling: Duration::from_millis(50) };
        let directions = tree.directions();
        let worker = |(rank, directions): (usize, &Directions)| {
            let upstream = tree.workers[rank].map_or(SERVER, |switch| SWITCHES + switch as u16);
            AtpWorker::new(config, *directions, upstream, retransmission)
        };
        let mut network = Self {
            config,
            switch_config,
            moves: vec![0; directions.len()],
            workers: directions.iter().enumerate().map(worker).collect(),
            switches: vec![],
            server: AtpServer::new(),
            tree,
            wires: VecDeque::new(),
            now: 0,
            random: seed * 2 + 1,
            faults: Faults::default(),
            server_crashes: 0,
        };
        network.switches = (0..network.tree.switches.len()).map(|at| network.new_switch(at)).collect();
        network.server = network.new_server(false);
        network
    }

    fn route(&self, at: usize) -> SwitchRoute<u16> {
        let (parent, level) = self.tree.switches[at];
        let upstream = parent.map_or(SERVER, |parent| SWITCHES + parent as u16);
        SwitchRoute { id: self.config.id, key: KEY, generation: self.config.generation, upstream, level }
    }

    fn new_switch(&self, at: usize) -> AtpSwitch<u16> {
        let mut switch = AtpSwitch::new(self.switch_config);
        switch.add_job(self.route(at)).unwrap();
        switch
    }

    fn new_server(&self, restored: bool) -> AtpServer<u16> {
        let mut server = AtpServer::new();
        let (workers, level) = (self.tree.directions(), self.tree.server_level());
        server.add_job(ServerJob { config: self.config, workers, level, restored }).unwrap();
        server
    }

    /// A number below `limit`.
    fn draw(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit
    }

    /// Each worker reduces two tensors; some sums are larger than the fixed factor allows, if
    /// `largest` is.
    fn submit(&mut self, elements: usize, largest: u64) -> [Numbers; 2] {
        let mut sums = [vec![0f64; elements], vec![0f64; elements]];
        for rank in 0..self.workers.len() {
            // Quarters: exact under the fixed factor, and so is their sum.
            let floats: Vec<f32> =
                (0..elements).map(|_| (self.draw(8 * largest) as f32 - 4.0 * largest as f32) / 4.0).collect();
            let range = if largest > 1 { 1 << 31 } else { 1 << 20 };
            let integers: Vec<i32> =
                (0..elements).map(|_| (self.draw(range) as i64 - (range / 2) as i64) as i32).collect();
            sums[0].iter_mut().zip(&floats).for_each(|(sum, x)| *sum += f64::from(*x));
            sums[1].iter_mut().zip(&integers).for_each(|(sum, x)| *sum += f64::from(*x));
            self.workers[rank].submit(Numbers::Float(floats), Op::Sum);
            self.workers[rank].submit(Numbers::Integer(integers), Op::Sum);
        }
        [
            Numbers::Float(sums[0].iter().map(|sum| *sum as f32).collect()),
            Numbers::Integer(sums[1].iter().map(|sum| *sum as i64 as i32).collect()),
        ]
    }

    /// The worker at an address, if it has not moved since.
    fn worker_at(&self, address: u16) -> Option<usize> {
        let rank = usize::from((address - WORKERS) % MOVED);
        (self.address_of(rank) == address).then_some(rank)
    }

    fn address_of(&self, rank: usize) -> u16 {
        WORKERS + rank as u16 + MOVED * self.moves[rank]
    }

    fn drain_worker(&mut self, rank: usize) {
        self.drain(self.address_of(rank));
    }

    fn drain(&mut self, address: u16) {
        let mut train = vec![0; 16384];
        loop {
            let now = Instant(self.now);
            let transmit = match address {
                SERVER => self.server.poll_transmit(now, &mut train),
                WORKERS.. => match self.worker_at(address) {
                    Some(rank) => self.workers[rank].poll_transmit(now, &mut train),
                    None => None,
                },
                _ => self.switches[usize::from(address - SWITCHES)].poll_transmit(now, &mut train),
            };
            let Some(transmit) = transmit else { break };
            let (to, bytes, segment_bytes) = (transmit.to.to_vec(), transmit.bytes, transmit.segment_bytes);
            for packet in train[..bytes].chunks(segment_bytes) {
                for to in &to {
                    self.carry(address, *to, packet.to_vec());
                }
            }
        }
    }

    fn carry(&mut self, from: u16, to: u16, packet: Vec<u8>) {
        let Faults { loss, duplication, reordering, .. } = self.faults;
        if self.draw(1000) < loss {
            return;
        }
        if self.draw(1000) < duplication {
            self.wires.push_back((from, to, packet.clone()));
        }
        let at = match self.draw(1000) < reordering {
            true => self.draw(self.wires.len() as u64 + 1) as usize,
            false => self.wires.len(),
        };
        self.wires.insert(at, (from, to, packet));
    }

    /// A machine loses its memory. Nobody needs to hear of a switch's while the server knows
    /// everything; else the job is set up in another generation.
    fn crash(&mut self) {
        let machines = self.switches.len() as u64 + 1;
        match self.draw(machines) as usize {
            0 => self.server_crashes += 1,
            at => self.switches[at - 1] = self.new_switch(at - 1),
        }
        if self.server_crashes == 0 {
            return;
        }
        self.config.generation.0 += 1;
        self.server = self.new_server(true);
        for at in 0..self.switches.len() {
            let route = self.route(at);
            self.switches[at].add_job(route).unwrap();
        }
        let directions = self.tree.directions();
        for (rank, directions) in directions.into_iter().enumerate() {
            let upstream = self.tree.workers[rank].map_or(SERVER, |switch| SWITCHES + switch as u16);
            let AtpJobConfig { id, key, generation, .. } = self.config;
            let plan = AtpWorkerPlan { id, key, generation, directions, upstream };
            self.workers[rank].resume(Instant(self.now), plan);
            self.drain_worker(rank);
        }
    }

    /// Runs until every worker has both tensors, and checks them.
    fn run(&mut self, expected: &[Numbers; 2]) {
        let mut done = vec![0; self.workers.len()];
        for rank in 0..self.workers.len() {
            self.drain_worker(rank);
        }
        for _ in 0..3_000_000 {
            if done.iter().all(|done| *done == 2) {
                return;
            }
            if self.faults.crash > 0 && self.draw(1_000_000) < self.faults.crash {
                self.crash();
            }
            if self.faults.moves > 0 && self.draw(1_000_000) < self.faults.moves {
                let rank = self.draw(self.workers.len() as u64) as usize;
                self.moves[rank] = MOVES_MAX.min(self.moves[rank] + 1);
            }
            let Some((from, to, packet)) = self.wires.pop_front() else {
                let due = self.workers.iter().filter_map(AtpWorker::poll_timeout).min();
                self.now = due.expect("somebody waits").0.max(self.now + 1);
                for rank in 0..self.workers.len() {
                    self.workers[rank].handle_timeout(Instant(self.now));
                    self.drain_worker(rank);
                }
                continue;
            };
            self.now += 500;
            let now = Instant(self.now);
            match to {
                SERVER => drop(self.server.handle_packet(now, from, &packet)),
                WORKERS.. => {
                    let Some(rank) = self.worker_at(to) else { continue };
                    self.workers[rank].handle_packet(now, from, &packet);
                    while let Some(event) = self.workers[rank].poll_event() {
                        let WorkerEvent::Completed(sum, _) = event else { panic!("{event:?}") };
                        let wrong = sum.unlike(&expected[done[rank]], self.config.scaling);
                        assert_eq!(wrong, None, "worker {rank}");
                        done[rank] += 1;
                    }
                }
                _ => drop(self.switches[usize::from(to - SWITCHES)].handle_packet(now, from, &packet)),
            }
            self.drain(to);
        }
        panic!("no end: {done:?}, {:?}", self.server_progress());
    }

    fn server_progress(&self) -> AtpServerProgress {
        self.server.progress(self.config.id).unwrap()
    }

    fn switch_statistics(&self) -> Vec<AtpSwitchStatistics> {
        self.switches.iter().map(AtpSwitch::statistics).collect()
    }
}

/// 40 fragments a tensor, in a window of 16.
const LENGTH: usize = 40 * ELEMENTS - 17;

#[test]
fn without_faults_the_server_hears_of_each_fragment_once() {
    let trees = [Tree::racks(2, 2), Tree::figure_9(), Tree::deep(3), Tree::deep(4)];
    for tree in trees {
        let config = AtpJobConfig { aggregators: 1 << 16, ..config(tree.workers.len()) };
        let mut network = Network::new(tree, config, 1 << 16, 1);
        let expected = network.submit(LENGTH, 1);
        network.run(&expected);
        let progress = network.server_progress();
        assert_eq!((progress.aggregations, progress.complete), (80, 80));
        for statistics in network.switch_statistics() {
            assert_eq!(
                (statistics.completed, statistics.in_use, statistics.freed_by_parameters),
                (80, 0, 80)
            );
        }
    }
}

#[test]
fn a_thousand_and_24_workers_in_two_levels() {
    let config = AtpJobConfig { aggregators: 1 << 16, ..config(1024) };
    let mut network = Network::new(Tree::racks(32, 32), config, 1 << 16, 5);
    let expected = network.submit(2 * ELEMENTS, 2);
    // Sums of so many saturate: then every worker's original values come.
    network.run(&expected);
    assert_eq!(network.server_progress().completed, 4);
    assert!(network.server_progress().overflows > 0);
}

#[test]
fn zero_aggregators_few_aggregators_and_one_for_all_are_exact() {
    for (said, table) in [(0, 0), (64, 0), (1, 1), (5, 5), (64, 8)] {
        for hashing in [Hashing::Hash, Hashing::Linear] {
            let config = AtpJobConfig { aggregators: said, hashing, ..config(6) };
            let mut network = Network::new(Tree::figure_9(), config, table, 2);
            let expected = network.submit(LENGTH, 1);
            network.run(&expected);
            let collisions: u64 = network.switch_statistics().iter().map(|switch| switch.collisions).sum();
            assert!(collisions > 0, "{said} of {table}");
            assert!(table == 0 || network.switch_statistics()[0].completed > 0, "{said} of {table}");
        }
    }
}

#[test]
fn workers_at_the_server_without_any_switch() {
    let mut network = Network::new(Tree { switches: vec![], workers: vec![None; 5] }, config(5), 0, 3);
    let expected = network.submit(LENGTH, 1);
    network.run(&expected);
    assert_eq!(network.server_progress().aggregations, 5 * 80 + network.server_progress().duplicates);
}

/// RSS: each rack aggregates for itself, and the server adds the racks (§5.2.2).
#[test]
fn racks_straight_at_the_server() {
    let workers = [0, 0, 1, 1, 2, 2].map(Some).to_vec();
    let tree = Tree { switches: vec![(None, 0), (None, 0), (None, 0)], workers };
    let mut network = Network::new(tree, AtpJobConfig { aggregators: 1 << 16, ..config(6) }, 1 << 16, 3);
    let expected = network.submit(LENGTH, 1);
    network.run(&expected);
    let progress = network.server_progress();
    assert_eq!((progress.aggregations, progress.partial), (3 * 80, 3 * 80), "three times ATP's");
}

#[test]
fn overflows_are_corrected_at_any_rate() {
    for (largest, scaling) in [(10, Scaling::Static), (1000, Scaling::Static), (20, Scaling::Dynamic)] {
        let config = AtpJobConfig { scaling, ..config(6) };
        let mut network = Network::new(Tree::figure_9(), config, 64, 4);
        let expected = network.submit(LENGTH, largest);
        network.faults.loss = 10;
        network.run(&expected);
        let progress = network.server_progress();
        // Most of 40 fragments of floats and 40 of integers, but where the factor follows.
        let (overflows, dynamic) = (progress.overflows, progress.dynamic_factors);
        match scaling {
            Scaling::Static => assert!(overflows > 50 && dynamic == 0, "{progress:?}"),
            Scaling::Dynamic => assert!(overflows < 60 && dynamic > 10, "{progress:?}"),
        }
    }
}

/// Old addresses stay in the network with what was sent from them.
#[test]
fn workers_that_move_go_on_from_where_they_are() {
    let mut moves = 0;
    for seed in 0..20 {
        // At the server, or below two levels of switches.
        let tree = match seed % 2 {
            0 => Tree { switches: vec![], workers: vec![None; 4] },
            _ => Tree::racks(2, 2),
        };
        let mut network = Network::new(tree, config(4), 64, seed);
        let expected = network.submit(LENGTH, 1);
        network.faults = Faults {
            loss: [0, 20][seed as usize / 2 % 2],
            duplication: 100,
            reordering: 300,
            moves: 20_000,
            ..Faults::default()
        };
        network.run(&expected);
        moves += network.moves.iter().sum::<u16>();
    }
    assert!(moves > 200, "{moves}");
}

#[test]
fn every_seed_is_exact_under_faults() {
    let mut server_crashes = 0;
    for seed in 0..100 {
        let tree = match seed % 4 {
            0 => Tree::racks(3, 2),
            1 => Tree::figure_9(),
            2 => Tree::deep(3),
            _ => Tree { switches: vec![(None, 0)], workers: vec![Some(0); 4] },
        };
        let table = [64, 7, 16, 3][seed as usize / 4 % 4];
        let config = AtpJobConfig { aggregators: table, ..config(tree.workers.len()) };
        let mut network = Network::new(tree, config, table, seed);
        let expected = network.submit(LENGTH, if seed % 3 == 0 { 12 } else { 1 });
        network.faults = Faults {
            loss: [0, 5, 50, 200][seed as usize / 16 % 4],
            duplication: [0, 100][seed as usize / 2 % 2],
            reordering: [0, 100, 500][seed as usize % 3],
            crash: [0, 2000][seed as usize / 8 % 2],
            moves: 0,
        };
        network.run(&expected);
        server_crashes += network.server_crashes;
    }
    assert!(server_crashes > 20, "{server_crashes}");
}
