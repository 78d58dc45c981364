//! KRGS: knapsack-based randomized rounding for gradient scheduling (GOAT §IV-C, Algorithm 1).
//!
//! The linear program's optimum says which part of a sub-model each switch sums (`x`) and which
//! part of it each worker sends there (`y`). The rounding makes a choice of it: `k(g) = ⌊Σ x⌋`
//! switches are drawn, one from each of `k(g)` knapsacks, with a probability of `x` by the
//! knapsack's sum. For each worker one of those is drawn with a probability of `y / x`, or the
//! server. In the mean no switch holds more than twice what the program gave it (Theorem 5). If a
//! switch holds more than it has room for, sub-models are moved.
//!
//! In these places the code takes one of two readings of the paper, or deviates from it.
//! - §IV-C's text rounds `Σ x` up, its Algorithm 1 and Lemma 3 round it down. The code rounds down:
//!   rounded up, a knapsack's sum may be anything above zero.
//! - `Σ y / x` over the chosen switches may be above one, if a worker's part lies at several of
//!   them. Then they share the one.
//! - Eq. 4 should have the optima of Eq. 1, and does not. It subtracts Eq. 2, which depends on `y`,
//!   so no worker's way to a switch is left in it. As printed it sends all of a sub-model to one
//!   switch as far from the server as can be. Both are objectives here. Among the optima of Eq. 4,
//!   the code takes the one with the least of Eq. 1.

use oorandom::Rand64;

use crate::gradient_schedule::{GradientSchedule, JobSchedule, Residence};
use crate::layout::stretches;
use crate::relaxation::{Class, Goal, JobShares, relaxed};
use crate::sub_models::{Job, Workload};
use crate::topology::{NodeId, Topology};

/// The solver rounds: a sum of shares that should be whole is off by at most this.
const ROUNDING: f64 = 1e-6;

/// The quantity that KRGS makes large or small.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objective {
    /// Eq. 4 as printed: aggregation saves as many bytes times links as possible behind the
    /// aggregation nodes.
    Reduction,
    /// Eq. 1: as few bytes times links as possible.
    Overhead,
}

/// The result of KRGS for a workload.
#[derive(Clone, Debug, PartialEq)]
pub struct Krgs {
    /// The plan. All servers but each job's first are left out.
    pub schedule: GradientSchedule,
    /// The objective's value, in bytes times links.
    pub value: f64,
    /// The linear program's optimum, which no plan goes beyond.
    pub bound: f64,
    /// How many times its memory the fullest switch would have held before sub-models were moved:
    /// Theorem 5 bounds it.
    pub rounded_fill: f64,
}

/// Plans by KRGS.
#[must_use]
pub fn krgs(workload: &Workload, objective: Objective, seed: u64) -> Krgs {
    let topology = workload.topology();
    let largest =
        topology.programmable().filter_map(|switch| topology.memory_bytes(switch)).max().unwrap_or(0);
    let fits = |bytes: u64| bytes <= largest;
    let bytes: Vec<u64> = workload
        .jobs()
        .iter()
        .map(|job| job.sub_models.iter().map(|part| part.bytes).filter(|bytes| fits(*bytes)).sum())
        .collect();
    let (goal, bound) = match objective {
        Objective::Reduction => {
            let bound = relaxed(workload, &bytes, Goal::Reduction { tie_break: false }).value;
            (Goal::Reduction { tie_break: true }, Some(bound))
        }
        Objective::Overhead => (Goal::Overhead, None),
    };
    let solution = relaxed(workload, &bytes, goal);
    let bound = bound.unwrap_or(solution.value) + beyond(workload, objective, &fits);
    let mut random = Rand64::new(u128::from(seed));
    let mut rounded = Vec::new();
    for ((job, shares), bytes) in workload.jobs().iter().zip(&solution.jobs).zip(&bytes) {
        let fractional = Fractional::of(job, shares, *bytes, &fits);
        rounded.push(fractional.rounded(job, &mut random));
    }
    let mut room = Room::new(workload, rounded);
    let rounded_fill = room.fill();
    room.repair(objective);
    let schedule = GradientSchedule::new(workload, room.schedules, Residence::Step).expect("repaired");
    let value = value(workload, &schedule, objective);
    Krgs { schedule, value, bound, rounded_fill }
}

/// The part of the bound that is due to sub-models for which no switch has room.
fn beyond(workload: &Workload, objective: Objective, fits: &impl Fn(u64) -> bool) -> f64 {
    if objective == Objective::Reduction {
        return 0.0;
    }
    let of_job = |job: &Job| {
        let ways = job.workers.iter().map(|worker| workload.topology().distance(*worker, job.server()));
        let links: u32 = ways.flatten().sum();
        let left_out =
            job.sub_models.iter().map(|part| part.bytes).filter(|bytes| !fits(*bytes)).sum::<u64>();
        f64::from(links) * left_out as f64
    };
    workload.jobs().iter().map(of_job).sum()
}

/// The objective of a plan, whoever made it.
#[must_use]
pub fn value(workload: &Workload, schedule: &GradientSchedule, objective: Objective) -> f64 {
    let jobs = workload.jobs().iter().zip(schedule.jobs()).enumerate();
    jobs.map(|(index, (job, its))| match objective {
        Objective::Overhead => schedule.traffic(workload, index).hop_bytes as f64,
        Objective::Reduction => (0..its.sub_models())
            .map(|sub_model| {
                let saved = its.fan_in(sub_model).into_iter().map(|(node, workers)| {
                    (workers as f64 - 1.0) * far(workload.topology(), node, its.root(sub_model))
                });
                saved.sum::<f64>() * job.sub_models[sub_model].bytes as f64
            })
            .sum(),
    })
    .sum()
}

fn far(topology: &Topology, from: NodeId, to: NodeId) -> f64 {
    f64::from(topology.distance(from, to).expect("checked"))
}

/// `x̃` and `ỹ` of one job.
#[derive(Debug)]
pub(crate) struct Fractional {
    pub(crate) switches: Vec<NodeId>,
    pub(crate) classes: Vec<Class>,
    /// By sub-model and switch.
    pub(crate) x: Vec<Vec<f64>>,
    /// By sub-model, class and switch.
    pub(crate) y: Vec<Vec<Vec<f64>>>,
}

impl Fractional {
    /// Sub-models lie on the stretches one after the other, as the job has them.
    fn of(job: &Job, shares: &JobShares, bytes: u64, fits: &impl Fn(u64) -> bool) -> Self {
        let (switches, classes) = (shares.bundles[0].switches.clone(), shares.classes.clone());
        let stretches = stretches(shares);
        let mut x = Vec::new();
        let mut y = Vec::new();
        let mut begin = 0;
        for part in &job.sub_models {
            let mut its_x = vec![0.0; switches.len()];
            let mut its_y = vec![vec![0.0; switches.len()]; classes.len()];
            if fits(part.bytes) {
                let of_all = |at: u64| at as f64 / bytes as f64;
                let (from, to) = (of_all(begin), of_all(begin + part.bytes));
                begin += part.bytes;
                let mut reached = 0.0;
                for stretch in &stretches {
                    let share = (to.min(reached + stretch.share) - from.max(reached)).max(0.0) / (to - from);
                    reached += stretch.share;
                    for (switch, node) in switches.iter().enumerate() {
                        let users = stretch.nodes.iter().enumerate().filter(|(_, its)| *its == node);
                        let mut used = false;
                        for (class, _) in users {
                            its_y[class][switch] += share;
                            used = true;
                        }
                        if used {
                            its_x[switch] += share;
                        }
                    }
                }
            }
            x.push(its_x);
            y.push(its_y);
        }
        Self { switches, classes, x, y }
    }

    /// Algorithm 1, steps 2 and 3.
    pub(crate) fn rounded(&self, job: &Job, random: &mut Rand64) -> JobSchedule {
        let workers = job.workers.len();
        let mut nodes = vec![job.server(); workers * self.x.len()];
        for (sub_model, (x, y)) in self.x.iter().zip(&self.y).enumerate() {
            let assigned = assigned(x, random);
            for (class, y) in self.classes.iter().zip(y) {
                for worker in &class.members {
                    if let Some(switch) = selected(x, y, &assigned, random) {
                        nodes[sub_model * workers + worker] = self.switches[switch];
                    }
                }
            }
        }
        JobSchedule::new(vec![job.server(); self.x.len()], nodes)
    }
}

/// `k(g)` knapsacks of `x`, each with a sum above 0.5 (Lemma 3): the largest first, each into the
/// emptiest.
pub(crate) fn knapsacks(x: &[f64]) -> Vec<Vec<usize>> {
    let count = (x.iter().sum::<f64>() + ROUNDING).floor() as usize;
    let mut order: Vec<usize> = (0..x.len()).filter(|switch| x[*switch] > 0.0).collect();
    order.sort_by(|a, b| x[*b].total_cmp(&x[*a]).then(a.cmp(b)));
    let mut knapsacks: Vec<(f64, Vec<usize>)> = vec![(0.0, Vec::new()); count];
    for switch in order {
        let emptiest = knapsacks.iter_mut().min_by(|a, b| a.0.total_cmp(&b.0));
        if let Some((sum, switches)) = emptiest {
            *sum += x[switch];
            switches.push(switch);
        }
    }
    knapsacks.into_iter().map(|(_, switches)| switches).collect()
}

/// `S(g)`: one switch from each knapsack.
pub(crate) fn assigned(x: &[f64], random: &mut Rand64) -> Vec<usize> {
    let draw = |knapsack: Vec<usize>| {
        let weights: Vec<_> = knapsack.iter().map(|switch| x[*switch]).collect();
        knapsack[drawn(&weights, weights.iter().sum(), random).unwrap_or(knapsack.len() - 1)]
    };
    knapsacks(x).into_iter().map(draw).collect()
}

/// The switch of `S(g)` that a worker's part goes to, or none for the server.
pub(crate) fn selected(x: &[f64], y: &[f64], assigned: &[usize], random: &mut Rand64) -> Option<usize> {
    let chances: Vec<_> = assigned.iter().map(|switch| (y[*switch] / x[*switch]).min(1.0)).collect();
    let whole = chances.iter().sum::<f64>();
    // A remainder by rounding alone gives the server no chance.
    let whole = if whole > 1.0 - ROUNDING { whole } else { 1.0 };
    drawn(&chances, whole, random).map(|place| assigned[place])
}

/// A place, with chances of its weight by `whole`; none with what is left of it.
fn drawn(weights: &[f64], whole: f64, random: &mut Rand64) -> Option<usize> {
    let mut point = random.rand_float() * whole;
    for (place, weight) in weights.iter().enumerate() {
        point -= weight;
        if point < 0.0 {
            return Some(place);
        }
    }
    None
}

/// Plans that are being fitted into the switches' memories.
struct Room<'a> {
    workload: &'a Workload,
    schedules: Vec<JobSchedule>,
    /// Bytes that are left in each switch, below zero where it holds too much.
    left: Vec<i128>,
}

impl<'a> Room<'a> {
    fn new(workload: &'a Workload, schedules: Vec<JobSchedule>) -> Self {
        let topology = workload.topology();
        let mut left: Vec<_> =
            topology.ids().map(|node| i128::from(topology.memory_bytes(node).unwrap_or(0))).collect();
        for (job, schedule) in workload.jobs().iter().zip(&schedules) {
            for (sub_model, part) in job.sub_models.iter().enumerate() {
                let root = Some(job.server()).filter(|root| !topology.is_host(*root));
                for node in schedule.fan_in(sub_model).into_keys().chain(root) {
                    left[node.index()] -= i128::from(part.bytes);
                }
            }
        }
        Self { workload, schedules, left }
    }

    /// How many times its memory the fullest switch holds.
    fn fill(&self) -> f64 {
        let topology = self.workload.topology();
        let fill = |switch: NodeId| {
            let have = i128::from(topology.memory_bytes(switch)?);
            Some((have - self.left[switch.index()]) as f64 / have as f64)
        };
        topology.programmable().filter_map(fill).fold(0.0, f64::max)
    }

    /// Moves sub-models away from where they do not fit, and offers the room that is left to what
    /// goes to the server.
    fn repair(&mut self, objective: Objective) {
        let switches: Vec<_> = self.workload.topology().programmable().collect();
        for switch in &switches {
            while self.left[switch.index()] < 0
                && let Some((job, sub_model)) = self.to_evict(*switch)
            {
                self.send(job, sub_model, *switch, self.workload.jobs()[job].server());
            }
        }
        let mut parts: Vec<_> = self
            .workload
            .jobs()
            .iter()
            .enumerate()
            .flat_map(|(job, its)| {
                its.sub_models.iter().enumerate().map(move |(sub_model, part)| (part.bytes, job, sub_model))
            })
            .collect();
        parts.sort_by_key(|(bytes, job, sub_model)| (std::cmp::Reverse(*bytes), *job, *sub_model));
        for (_, job, sub_model) in parts {
            let server = self.workload.jobs()[job].server();
            let best = switches
                .iter()
                .map(|switch| (self.gain(job, sub_model, *switch, objective), *switch))
                .filter(|(gain, _)| *gain > 0.0)
                .max_by(|(a, switch), (b, other)| a.total_cmp(b).then(other.cmp(switch)));
            if let Some((_, switch)) = best {
                self.send(job, sub_model, server, switch);
            }
        }
    }

    /// The smallest sub-model that makes the rest fit, or else the largest.
    fn to_evict(&self, switch: NodeId) -> Option<(usize, usize)> {
        let over = -self.left[switch.index()];
        let mut held = Vec::new();
        for (job, (its, schedule)) in self.workload.jobs().iter().zip(&self.schedules).enumerate() {
            for (sub_model, part) in its.sub_models.iter().enumerate() {
                if its.server() != switch && schedule.fan_in(sub_model).contains_key(&switch) {
                    held.push((i128::from(part.bytes), job, sub_model));
                }
            }
        }
        held.sort_unstable();
        let enough = held.iter().find(|(bytes, ..)| *bytes >= over).or(held.last());
        enough.map(|(_, job, sub_model)| (*job, *sub_model))
    }

    /// The gain if `switch` summed what goes straight to the server; none if that is not possible.
    fn gain(&self, job: usize, sub_model: usize, switch: NodeId, objective: Objective) -> f64 {
        let (topology, its, schedule) =
            (self.workload.topology(), &self.workload.jobs()[job], &self.schedules[job]);
        let server = its.server();
        let bytes = its.sub_models[sub_model].bytes;
        let holds = schedule.fan_in(sub_model).contains_key(&switch);
        if switch == server || (!holds && self.left[switch.index()] < i128::from(bytes)) {
            return 0.0;
        }
        let Some(onward) = topology.distance(switch, server) else { return 0.0 };
        let mut gain = if holds { 0.0 } else { -f64::from(onward) };
        for (worker, node) in its.workers.iter().zip(schedule.aggregation_nodes(sub_model)) {
            if *node != server {
                continue;
            }
            let Some(way) = topology.distance(*worker, switch) else { return 0.0 };
            gain += match objective {
                Objective::Reduction => f64::from(onward),
                Objective::Overhead => far(topology, *worker, server) - f64::from(way),
            };
        }
        gain * bytes as f64
    }

    /// Sends what goes to one node to another.
    fn send(&mut self, job: usize, sub_model: usize, from: NodeId, to: NodeId) {
        let its = &self.workload.jobs()[job];
        let bytes = i128::from(its.sub_models[sub_model].bytes);
        let schedule = &mut self.schedules[job];
        if from != its.server() {
            self.left[from.index()] += bytes;
        }
        if to != its.server() && !schedule.fan_in(sub_model).contains_key(&to) {
            self.left[to.index()] -= bytes;
        }
        for worker in 0..its.workers.len() {
            if schedule.aggregation_nodes(sub_model)[worker] == from {
                schedule.assign(worker, sub_model, to);
            }
        }
    }
}

#[cfg(test)]
mod tests;
