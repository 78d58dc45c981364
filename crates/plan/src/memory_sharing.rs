//! The effect of memory that fragments share on gradients that arrive at different times: the
//! algorithmic overheads of ATP and ESA (GOAT §III, §VII-D).
//!
//! A switch has units of memory, and a fragment's number says which one is its own. The fragment
//! that comes first has it until all contributions have come (ATP), or until a more important one
//! comes (ESA). A fragment that finds its unit taken goes on to the next switch on the way to the
//! server. As in Figure 2 of the paper, once one contribution has gone past a switch, the fragment
//! is not begun there any more. Packets take no time on their way, and a unit is free as soon as
//! its sum has left. So this module computes how much goes where, but no times. `sim` plays the
//! same with packets.

use std::collections::BTreeMap;

use oorandom::Rand64;

use crate::gradient_schedule::Traffic;
use crate::sub_models::Workload;
use crate::topology::NodeId;

/// The rule for a unit that is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing<'a> {
    /// Who has it: ATP.
    FirstCome,
    /// The fragment of the higher priority, by its number: ESA. The partial sum of the other goes
    /// on.
    Preemptive(&'a [u64]),
}

/// How a job's gradients are sent where switches share their memory among fragments.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedMemory<'a> {
    /// Bytes of a fragment, and of a unit.
    pub fragment_bytes: u64,
    /// The rule for units.
    pub sharing: Sharing<'a>,
    /// Which of equal ways the job takes.
    pub ways: Ways,
}

/// The choice among equal ways ([`crate::Topology::route`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ways {
    /// All take those of one flow, which are a tree.
    Tree(u64),
    /// Each worker is a flow of its own, and what leaves a switch that sums is that switch's. A
    /// number draws them.
    Each(u64),
}

impl Ways {
    /// The flow of what this node sends.
    fn of(self, sender: NodeId) -> u64 {
        match self {
            Self::Tree(flow) => flow,
            Self::Each(drawn) => drawn << 16 | u64::from(sender.0),
        }
    }
}

/// A sum on its way: how many workers are in it.
#[derive(Clone, Copy, Debug)]
struct Partial {
    fragment: usize,
    workers: usize,
}

/// Something on its way.
struct Moving {
    /// Where it is.
    at: NodeId,
    /// The last sender: a worker, or a switch that sums.
    sender: NodeId,
    partial: Partial,
}

/// Units of one switch.
#[derive(Default)]
struct Units {
    count: u64,
    /// Workers whose way leads through the switch.
    fan_in: usize,
    taken: BTreeMap<u64, Partial>,
    /// Fragments that went past.
    passed: Vec<bool>,
}

impl Units {
    /// The sums that go on when this comes.
    fn take_in(&mut self, came: Partial, sharing: Sharing<'_>) -> Vec<Partial> {
        let unit = came.fragment as u64 % self.count;
        match self.taken.get_mut(&unit) {
            Some(held) if held.fragment == came.fragment => {
                held.workers += came.workers;
                let all = held.workers >= self.fan_in;
                if all { self.taken.remove(&unit).into_iter().collect() } else { Vec::new() }
            }
            // All that can come is in it.
            _ if came.workers >= self.fan_in => vec![came],
            _ if self.passed[came.fragment] => vec![came],
            None => {
                self.taken.insert(unit, came);
                Vec::new()
            }
            Some(held) => match sharing {
                Sharing::Preemptive(priorities) if priorities[came.fragment] > priorities[held.fragment] => {
                    let evicted = std::mem::replace(held, came);
                    self.passed[evicted.fragment] = true;
                    vec![evicted]
                }
                _ => {
                    self.passed[came.fragment] = true;
                    vec![came]
                }
            },
        }
    }
}

impl SharedMemory<'_> {
    /// The load on the network of contributions that come in this order, as (worker, fragment). All
    /// of them belong to the job's first server, and incomplete sums go there at the end.
    ///
    /// # Panics
    /// When a worker, fragment or priority is not there, or fragments have no bytes.
    #[must_use]
    pub fn traffic(&self, workload: &Workload, job: usize, arrivals: &[(usize, usize)]) -> Traffic {
        let (topology, its) = (workload.topology(), &workload.jobs()[job]);
        let fragments = arrivals.iter().map(|(_, fragment)| fragment + 1).max().unwrap_or(0);
        let units = |node: NodeId| topology.memory_bytes(node).map_or(0, |bytes| bytes / self.fragment_bytes);
        let sums = |node: NodeId| node != its.server() && units(node) > 0;
        let onward = |at: NodeId, sender: NodeId| {
            topology.route(at, its.server(), self.ways.of(sender)).first().map(|(next, _)| *next)
        };
        // By where something is and who sent it.
        let mut next: BTreeMap<(NodeId, NodeId), Option<NodeId>> = BTreeMap::new();
        let mut switches: BTreeMap<NodeId, Units> = BTreeMap::new();
        for worker in &its.workers {
            let (mut at, mut sender) = (*worker, *worker);
            while let Some(then) = *next.entry((at, sender)).or_insert_with(|| onward(at, sender)) {
                at = then;
                if sums(at) {
                    sender = at;
                    let fresh =
                        || Units { count: units(at), passed: vec![false; fragments], ..Units::default() };
                    switches.entry(at).or_insert_with(fresh).fan_in += 1;
                }
            }
        }
        let (mut hops, mut reached) = (0, 0);
        let mut drain = |switches: &mut BTreeMap<NodeId, Units>, moving: &mut Vec<Moving>| {
            while let Some(Moving { at, sender, partial }) = moving.pop() {
                let Some(at) = next[&(at, sender)] else {
                    reached += 1;
                    continue;
                };
                hops += 1;
                match switches.get_mut(&at) {
                    Some(its) => {
                        let on = its.take_in(partial, self.sharing).into_iter();
                        moving.extend(on.map(|partial| Moving { at, sender: at, partial }));
                    }
                    None => moving.push(Moving { at, sender, partial }),
                }
            }
        };
        let mut moving = Vec::new();
        for (worker, fragment) in arrivals {
            let worker = its.workers[*worker];
            let partial = Partial { fragment: *fragment, workers: 1 };
            moving.push(Moving { at: worker, sender: worker, partial });
            drain(&mut switches, &mut moving);
        }
        // The farthest first: what they send on may complete a sum.
        let mut order: Vec<_> = switches.keys().copied().collect();
        order.sort_by_key(|switch| std::cmp::Reverse(topology.distance(*switch, its.server())));
        for at in order {
            let left = std::mem::take(&mut switches.get_mut(&at).expect("it is one of them").taken);
            moving.extend(left.into_values().map(|partial| Moving { at, sender: at, partial }));
            drain(&mut switches, &mut moving);
        }
        // A worker that is the server sends nothing.
        let sent = arrivals.iter().filter(|(worker, _)| its.workers[*worker] != its.server()).count();
        let own = arrivals.len() - sent;
        let reach = (reached - own) as u64;
        Traffic {
            server_bytes: reach * self.fragment_bytes,
            in_network_bytes: (sent as u64 - reach) * self.fragment_bytes,
            hop_bytes: hops * self.fragment_bytes,
        }
    }
}

/// The order in which so many fragments of each worker come, if they send at these rates and begin
/// together. If several come at once, the first worker's is first.
#[must_use]
pub fn arrivals(rates_bps: &[f64], fragments: usize) -> Vec<(usize, usize)> {
    let mut order: Vec<_> = (0..fragments)
        .flat_map(|fragment| (0..rates_bps.len()).map(move |worker| (worker, fragment)))
        .collect();
    let time = |(worker, fragment): &(usize, usize)| (*fragment + 1) as f64 / rates_bps[*worker];
    order.sort_by(|a, b| time(a).total_cmp(&time(b)));
    order
}

/// Rates of workers (§VII-D), as a ratio of the best rate: normally distributed around 1, within 0
/// to 1.
///
/// # Panics
/// When the deviation is below zero or above one.
#[must_use]
pub fn worker_rates(workers: usize, rate_bps: f64, deviation: f64, seed: u64) -> Vec<f64> {
    assert!((0.0..=1.0).contains(&deviation), "a deviation of {deviation}");
    let mut random = Rand64::new(u128::from(seed));
    let mut ratio = || loop {
        // Box and Muller.
        let (radius, angle) = (1.0 - random.rand_float(), std::f64::consts::TAU * random.rand_float());
        let ratio = 1.0 - (deviation * (-2.0 * radius.ln()).sqrt() * angle.cos()).abs();
        if ratio > 0.0 {
            return ratio;
        }
    };
    (0..workers).map(|_| rate_bps * ratio()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::baselines::at_servers;
    use crate::krgs::{Objective, krgs};
    use crate::random_workloads;
    use crate::sub_models::{Job, SubModel};
    use crate::topologies::{
        Rates, SWITCH_MEMORY_BYTES, leaf_spine, make_programmable, paper_leaf_spine, triangle,
    };
    use proptest::prelude::*;

    fn figure_2() -> Workload {
        let topology = triangle(4, 1, Rates::alike(1e9)).expect("a topology");
        let node = |name: &str| topology.node(name).expect("a node");
        let job = Job {
            name: "figure 2".into(),
            workers: ["w1", "w2", "w3", "w4"].map(node).into(),
            servers: vec![node("ps")],
            sub_models: SubModel::divided(3, 1),
        };
        Workload::new(topology, vec![job]).expect("a workload")
    }

    const ATP: SharedMemory<'static> =
        SharedMemory { fragment_bytes: 1, sharing: Sharing::FirstCome, ways: Ways::Tree(0) };

    /// GOAT §III-B, Figure 2(b): `A1, B1, C1, A2, B2, C2` come to one switch and
    /// `A3, B3, C3, A4, B4, C4` to the other. 7 fragments reach the server, and switches send 17.
    #[test]
    fn fragments_that_come_one_after_the_other_are_summed_at_the_server() {
        let in_turn = [(0, 2), (1, 3)].into_iter();
        let arrivals: Vec<_> = in_turn
            .flat_map(|(one, other)| (0..3).flat_map(move |fragment| [(one, fragment), (other, fragment)]))
            .collect();
        let traffic = ATP.traffic(&figure_2(), 0, &arrivals);
        assert_eq!((traffic.server_bytes, traffic.in_network_bytes), (7, 5));
        // The figure counts what switches send: without the 12 links from workers to their
        // switches.
        assert_eq!(traffic.hop_bytes - 12, 17);
    }

    /// §III-B: where `A1, A2, B1, B2, C1, C2` come, each switch sums all.
    #[test]
    fn fragments_that_come_together_are_summed_on_the_way() {
        let traffic = ATP.traffic(&figure_2(), 0, &arrivals(&[1.0; 4], 3));
        assert_eq!(traffic, Traffic { server_bytes: 3, in_network_bytes: 9, hop_bytes: 12 + 6 + 3 });
    }

    /// The workers are behind one leaf, which does not sum. A tree has one spine for both, which
    /// sums them; as flows of their own they meet in one case of eight.
    #[test]
    fn workers_with_ways_of_their_own_are_summed_only_where_these_meet() {
        let mut topology = leaf_spine(3, 8, 6, Rates::alike(1e9)).expect("a topology");
        for spine in 0..8 {
            let spine = topology.node(&format!("spine{spine}")).expect("a node");
            topology.set_memory_bytes(spine, Some(1));
        }
        let host = |name| topology.node(name).expect("a node");
        let job = Job {
            name: "two".into(),
            workers: vec![host("h0"), host("h1")],
            servers: vec![host("h5")],
            sub_models: SubModel::divided(1, 1),
        };
        let workload = Workload::new(topology, vec![job]).expect("a workload");
        let reached =
            |ways| SharedMemory { ways, ..ATP }.traffic(&workload, 0, &[(0, 0), (1, 0)]).server_bytes;
        let apart = |ways: fn(u64) -> Ways| (0..32).filter(|drawn| reached(ways(*drawn)) == 2).count();
        assert_eq!(apart(Ways::Tree), 0);
        assert!((20..32).contains(&apart(Ways::Each)), "{}", apart(Ways::Each));
    }

    /// A late fragment of a high priority takes the place of one that waits, whose sum so far goes
    /// on.
    #[test]
    fn what_is_more_important_takes_the_place_of_what_waits() {
        let workload = figure_2();
        // A1, A3, then all of B, then the rest of A.
        let order = [(0, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 1), (1, 0), (3, 0)];
        let first_come = ATP.traffic(&workload, 0, &order);
        // A waits at s1 and s2, B goes by, is held at s3 and leaves as one; then A12 and A34 are
        // summed there.
        assert_eq!((first_come.server_bytes, first_come.hop_bytes), (2, 8 + 4 + 2 + 2));
        let esa = SharedMemory { sharing: Sharing::Preemptive(&[0, 1]), ..ATP };
        let preemptive = esa.traffic(&workload, 0, &order);
        // B1 evicts A1 from s1, and B12 evicts it from s3; after that A3, A2 and A4 go past s3.
        // With B they are five.
        assert_eq!((preemptive.server_bytes, preemptive.hop_bytes), (5, 8 + 2 + 1 + 2 + 1 + 1 + 4));
    }

    /// Figure 16: workers at one rate are summed where they meet; the more unlike they are, the
    /// more goes to the server. Exp 6 and 7: GOAT's plan leaves the server least.
    #[test]
    fn unlike_rates_cost_those_that_share_memory() {
        let mut topology = paper_leaf_spine(Rates::alike(10e9));
        make_programmable(&mut topology, 0.2, SWITCH_MEMORY_BYTES, 5);
        let hosts: Vec<_> = topology.hosts().collect();
        let job = Job {
            name: "alexnet".into(),
            workers: hosts[..35].into(),
            servers: vec![hosts[49]],
            sub_models: SubModel::divided(221_000_000, 1_000_000),
        };
        let workload = Workload::new(topology, vec![job]).expect("a workload");
        let priorities: Vec<u64> = (0..221).collect();
        let of = |sharing, deviation| {
            let shared = SharedMemory { fragment_bytes: 1_000_000, sharing, ways: Ways::Tree(0) };
            shared.traffic(&workload, 0, &arrivals(&worker_rates(35, 10e9, deviation, 1), 221))
        };
        let geryon = at_servers(&workload).traffic(&workload, 0);
        let goat = krgs(&workload, Objective::Overhead, 0).schedule.traffic(&workload, 0);
        for sharing in [Sharing::FirstCome, Sharing::Preemptive(&priorities)] {
            let alike = of(sharing, 0.0);
            let unlike = of(sharing, 0.2);
            assert!(alike.server_bytes < unlike.server_bytes && alike.hop_bytes < unlike.hop_bytes);
            assert!(unlike.server_bytes <= geryon.server_bytes && unlike.hop_bytes <= geryon.hop_bytes);
            assert!(goat.server_bytes < unlike.server_bytes, "{goat:?} {unlike:?}");
        }
    }

    #[test]
    fn rates_are_at_most_the_rate_and_by_seed() {
        let rates = worker_rates(1000, 10e9, 0.2, 3);
        assert_eq!(rates, worker_rates(1000, 10e9, 0.2, 3));
        assert!(rates.iter().all(|rate| *rate > 0.0 && *rate <= 10e9));
        // The mean of a half of a normal distribution: sqrt(2 / pi) deviations below.
        let mean = rates.iter().sum::<f64>() / 1000.0;
        assert!((mean / 10e9 - (1.0 - 0.2 * 0.797_885)).abs() < 0.02, "{mean}");
        assert_eq!(worker_rates(3, 10e9, 0.0, 3), [10e9; 3]);
    }

    proptest! {
        /// Every contribution is in what reaches the server or in a sum that does, and none passes
        /// more links than without sums.
        #[test]
        fn shared_memory_makes_no_more_traffic_than_none(
            seed in 0..10_000_u64, deviation in 0.0..0.5_f64, preemptive in any::<bool>(), each in any::<bool>(),
        ) {
            let workload = random_workloads::workload(seed, 1, 1, 0.2);
            let job = &workload.jobs()[0];
            let bytes = 1_000_000;
            let fragments = (job.bytes() / bytes) as usize;
            let priorities: Vec<u64> = (0..fragments as u64).collect();
            let sharing = if preemptive { Sharing::Preemptive(&priorities) } else { Sharing::FirstCome };
            let ways = if each { Ways::Each(seed) } else { Ways::Tree(seed) };
            let shared = SharedMemory { fragment_bytes: bytes, sharing, ways };
            let order = arrivals(&worker_rates(job.workers.len(), 1e10, deviation, seed), fragments);
            let traffic = shared.traffic(&workload, 0, &order);
            let far: u32 = job.workers.iter().filter_map(|worker| workload.topology().distance(*worker, job.server())).sum();
            let none = u64::from(far) * fragments as u64 * bytes;
            prop_assert!(traffic.hop_bytes <= none);
            let sent = job.workers.iter().filter(|worker| **worker != job.server()).count() as u64;
            prop_assert_eq!(traffic.server_bytes + traffic.in_network_bytes, sent * fragments as u64 * bytes);
            prop_assert!(traffic.server_bytes >= fragments as u64 * bytes);
        }
    }
}
