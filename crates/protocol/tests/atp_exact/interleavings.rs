//! A few fragments of a few workers in whatever order, with loss, duplicates, early timeouts and crashes in between: every order
//! if they can be counted, walks at random if they cannot. Whatever happened, the rest of the way leads to the exact sum,
//! without more faults.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use fanin_protocol::RetransmissionConfig;
use fanin_protocol::atp::{AtpSwitchConfig, Overflow, Scaling};
use fanin_testworld::{Random, World, each_seed};

use crate::case::{Case, Contents, ELEMENTS, Fault};
use crate::script::{Atp, crash, world};
use crate::tree::Tree;

/// How much may go wrong.
#[derive(Clone, Copy, Debug, Default)]
struct Limits {
    /// Packets lost or doubled.
    faults: usize,
    /// Timeouts while packets are on the way.
    timeouts: usize,
    /// Machines that lose their memory.
    crashes: usize,
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

/// A way through a case, from its beginning.
struct Walk {
    limits: Limits,
    world: World<Atp>,
    path: Vec<Step>,
}

impl Walk {
    fn new(case: &Case, limits: Limits) -> Self {
        let mut world = world(case.clone()).holding();
        (0..case.workers()).for_each(|rank| world.begin(case.worker(0, rank), 0));
        Self { limits, world, path: vec![] }
    }

    fn step(&mut self, step: Step) {
        self.path.push(step);
        match step {
            Step::Deliver(at) => {
                let packet = self.world.take_held(at);
                self.world.deliver(&packet);
            }
            Step::Lose(at) => drop(self.world.take_held(at)),
            Step::Double(at) => {
                let packet = self.world.held()[at].clone();
                self.world.deliver(&packet);
            }
            Step::Timeout(node) => self.world.time_out(node),
            Step::Crash(node) => crash(&mut self.world, node),
        }
    }

    /// Faults, timeouts and crashes so far.
    fn spent(&self) -> [usize; 3] {
        let count = |found: fn(&&Step) -> bool| self.path.iter().filter(found).count();
        [
            count(|step| matches!(step, Step::Lose(_) | Step::Double(_))),
            count(|step| matches!(step, Step::Timeout(_))),
            count(|step| matches!(step, Step::Crash(_))),
        ]
    }

    fn workers(&self) -> std::ops::Range<usize> {
        let case = &self.world.script.case;
        case.worker(0, 0)..case.worker(1, 0)
    }

    /// What can happen next.
    fn steps(&self) -> Vec<Step> {
        let Limits { faults, timeouts, crashes } = self.limits;
        let [faulty, timed_out, crashed] = self.spent();
        let held = self.world.held();
        let mut steps = vec![];
        for at in 0..held.len() {
            if at > 0 && held[at] == held[at - 1] {
                continue;
            }
            steps.push(Step::Deliver(at));
            if faulty < faults {
                steps.extend([Step::Lose(at), Step::Double(at)]);
            }
        }
        if timed_out < timeouts {
            let waiting = |node: &usize| self.world.due(*node).is_some();
            steps.extend(self.workers().filter(waiting).map(Step::Timeout));
        }
        if crashed < crashes {
            steps.extend((0..self.workers().start).map(Step::Crash));
        }
        steps
    }

    /// From here on nothing is lost: it must come to an end.
    fn finish(&mut self) {
        for _ in 0..300 {
            while let Some(last) = self.world.held().len().checked_sub(1) {
                let packet = self.world.take_held(last);
                self.world.deliver(&packet);
            }
            if self.world.missing() == 0 {
                self.check();
                return;
            }
            let due = self.workers().min_by_key(|node| self.world.due(*node).unwrap_or(u64::MAX));
            self.world.time_out(due.expect("a worker"));
        }
        panic!("no end: {:?} {}", self.path, self.world.standing());
    }

    fn check(&self) {
        for sum in self.workers().filter_map(|node| self.world.done(node, 0)) {
            let wrong = self.world.script.case.unlike(0, 0, sum);
            assert_eq!(wrong, None, "{:?} {:?}", self.path, self.world.script);
        }
    }

    fn hash(&self) -> u64 {
        struct Into(DefaultHasher);
        impl std::fmt::Write for Into {
            fn write_str(&mut self, text: &str) -> std::fmt::Result {
                self.0.write(text.as_bytes());
                Ok(())
            }
        }
        let mut hash = Into(DefaultHasher::new());
        let world = &self.world;
        write!(hash, "{:?} {} {:?}", self.spent(), world.ns(), world.machines()).expect("hashing");
        world.held().hash(&mut hash.0);
        hash.0.finish()
    }
}

/// Every way; how many states there are.
fn explore(case: &Case, limits: Limits) -> usize {
    let mut seen = HashSet::new();
    let mut open = vec![vec![]];
    while let Some(path) = open.pop() {
        let mut walk = Walk::new(case, limits);
        path.iter().for_each(|step| walk.step(*step));
        if !seen.insert(walk.hash()) {
            continue;
        }
        walk.check();
        open.extend(walk.steps().into_iter().map(|step| path.iter().copied().chain([step]).collect()));
        if walk.world.held().is_empty() {
            walk.finish();
        }
    }
    seen.len()
}

/// Fragments that all want one aggregator. Each is of one value; sums beyond 21.47 overflow.
fn case(tree: Tree, values: &'static [f32]) -> Case {
    let switch = AtpSwitchConfig {
        aggregators: 1,
        elements: ELEMENTS as u16,
        ways: 2,
        stale: Duration::from_millis(20),
        ecn_threshold_packets: None,
    };
    Case {
        tree,
        window_max: 1,
        aggregators: 1,
        switch,
        contents: Contents::OfRanks(values),
        tensors: vec![ELEMENTS],
        retransmission: RetransmissionConfig {
            floor: Duration::from_millis(2),
            ceiling: Duration::from_millis(50),
        },
        // A crash is a step; workers are not suspended meanwhile.
        fault: Fault::Crashes(0),
        ..Case::plain()
    }
}

/// A rack of two, and a worker at the second level.
fn two_levels() -> Tree {
    Tree { switches: vec![(Some(1), 0), (None, 1)], workers: [0, 0, 1].map(Some).to_vec() }
}

#[test]
fn every_way_of_one_fragment_ends_in_the_exact_sum() {
    let (fault, timeout) =
        (Limits { faults: 1, ..Limits::default() }, Limits { timeouts: 1, ..Limits::default() });
    for (case, limits, least) in [
        (case(Tree::one_rack(2), &[1.0, 10.0]), fault, 100),
        (case(Tree::one_rack(2), &[1.0, 10.0]), timeout, 100),
        (case(Tree::one_rack(3), &[1.0, 3.0, 9.0]), fault, 1000),
        (case(two_levels(), &[1.0, 3.0, 9.0]), fault, 1000),
    ] {
        let states = explore(&case, limits);
        assert!(states >= least, "only {states} states: {case:?}");
    }
}

fn walk(seed: u64) {
    const VALUES: [&[f32]; 3] = [&[1.0, 3.0, 9.0, 2.0], &[15.0, 14.0, 1.0, 0.5], &[15.0, 3.0, -14.0, 15.0]];
    let four_racked = Tree {
        switches: vec![(Some(2), 0), (Some(2), 0), (None, 1)],
        workers: [0, 0, 1, 1].map(Some).to_vec(),
    };
    let three_levels = Tree {
        switches: vec![(Some(1), 0), (Some(2), 1), (None, 2)],
        workers: [0, 0, 1, 2].map(Some).to_vec(),
    };
    let trees = [Tree::one_rack(2), Tree::one_rack(3), two_levels(), four_racked, three_levels];
    let mut random = Random(seed);
    let tensors = vec![random.pick(&[1, 2, 3, 5]) * ELEMENTS];
    let window_max = random.pick(&[1, 2, 3]);
    let aggregators = random.pick(&[0, 1, 1, 2]);
    let values = random.pick(&VALUES);
    let limits = Limits {
        faults: random.pick(&[0, 2, 6]),
        timeouts: random.pick(&[0, 2, 6]),
        crashes: random.pick(&[0, 0, 1, 2]),
    };
    let scaling = random.pick(&[Scaling::Static, Scaling::Dynamic]);
    let overflow = random.pick(&[Overflow::Reactive, Overflow::Reactive, Overflow::Proactive]);
    let case = case(random.pick(&trees), values).with_aggregators(aggregators);
    let mut walk = Walk::new(&Case { tensors, window_max, scaling, overflow, ..case }, limits);
    while !walk.world.held().is_empty() && walk.path.len() < 300 {
        let steps = walk.steps();
        let mut step = random.pick(&steps);
        if matches!(step, Step::Crash(_) | Step::Timeout(_)) && random.below(4) > 0 {
            // Not all of them at the very beginning.
            step = random.pick(&steps);
        }
        walk.step(step);
        walk.check();
    }
    walk.finish();
}

#[test]
fn random_walks_end_in_the_exact_sum() {
    each_seed(0..3000, walk);
}
