//! A planner of our own: the time of the slowest link, for several jobs at once, and how far that
//! is from what no plan goes below.
//!
//! GOAT's programs count bytes times links. A step takes as long as its slowest link. A link
//! between switches with two of a rack's sub-models on it does not slow it down while the workers'
//! own links carry more. So here links have rates and jobs share them. A switch's memory follows
//! Little's law ([`Residence`]): slots times packet is at least rate times round trip.
//!
//! The bound is the linear program's (`relaxation.rs`), where sub-models may be divided. The plan
//! is a local search. It begins with the program's solution, cut into stretches that whole
//! sub-models are given to, and with the plans of others (KRGS, ATP's placement, BytePS' split). It
//! keeps the best of them, so that it is no worse than any. Again and again it takes a sub-model
//! out and puts it where links are least loaded. It minimises the sum over all links of their time
//! to a high power ([`POWERS`]), a maximum that also sees the second slowest link. Each job's own
//! sum counts too, so that a job that does not use the slowest link is not planned carelessly.

use std::collections::BTreeMap;

use crate::baselines::{byteps, first_switches};
use crate::gradient_schedule::{GradientSchedule, JobSchedule, Residence};
use crate::krgs::{Objective, krgs};
use crate::layout::stretches;
use crate::relaxation::{Class, Goal, Relaxed, links_of_class, relaxed};
use crate::sub_models::Workload;
use crate::topology::NodeId;

/// How much more a slow link counts than a fast one, one after the other.
const POWERS: [i32; 4] = [6, 12, 24, 48];
/// With each of them. It ends sooner where nothing gets better.
const PASSES_MAX: usize = 15;
/// A gain below this part is no gain.
const GAIN_MIN: f64 = 1e-9;

/// A plan, and what it is measured against.
#[derive(Clone, Debug, PartialEq)]
pub struct SlowestLinkPlan {
    /// The plan.
    pub schedule: GradientSchedule,
    /// How long the slowest link takes for a step.
    pub seconds: f64,
    /// No plan takes less.
    pub bound_s: f64,
}

impl SlowestLinkPlan {
    fn new(workload: &Workload, schedule: GradientSchedule, bound_s: f64) -> Self {
        Self { seconds: schedule.slowest(workload).seconds, schedule, bound_s }
    }

    /// By which part of the bound it takes longer than the bound.
    #[must_use]
    pub fn gap(&self) -> f64 {
        if self.bound_s > 0.0 { self.seconds / self.bound_s - 1.0 } else { 0.0 }
    }
}

/// Plans for the least time of the slowest link. The seed is KRGS'.
#[must_use]
pub fn slowest_link(workload: &Workload, residence: Residence, seed: u64) -> SlowestLinkPlan {
    let solution = relaxation(workload, residence);
    let mut search = Search::new(workload, residence, &solution);
    let mut candidates = vec![
        krgs(workload, Objective::Overhead, seed).schedule,
        krgs(workload, Objective::Reduction, seed).schedule,
        first_switches(workload, residence, solution.value),
    ];
    candidates.extend(byteps(workload, residence));
    let seconds = |plan: &GradientSchedule| plan.slowest(workload).seconds;
    let least = |plans: &[GradientSchedule]| {
        let least = plans.iter().min_by(|a, b| seconds(a).total_cmp(&seconds(b)));
        least.expect("there is KRGS' plan").clone()
    };
    let of_shares = search.of_shares(&solution);
    let of_shares = GradientSchedule::new(workload, of_shares, residence).expect("it kept to the memories");
    let starts = [least(&candidates), of_shares];
    // Of those that are as fast the first is taken: a plan whose other links have less, too.
    let mut plans: Vec<_> = starts.iter().map(|start| search.improved(start.jobs().to_vec())).collect();
    plans.extend(starts);
    plans.extend(candidates);
    SlowestLinkPlan::new(workload, least(&plans), solution.value)
}

/// The bound, and the shares that reach it.
fn relaxation(workload: &Workload, residence: Residence) -> Relaxed {
    let bytes: Vec<_> = workload.jobs().iter().map(crate::sub_models::Job::bytes).collect();
    let whole = relaxed(workload, &bytes, Goal::SlowestLink { memory_per_s: None });
    match residence {
        // If a step is longer than fragments stay, memory is used again and again.
        Residence::Seconds(seconds) if seconds < whole.value => {
            relaxed(workload, &bytes, Goal::SlowestLink { memory_per_s: Some(1.0 / seconds) })
        }
        _ => whole,
    }
}

/// The load of a sub-model on links, in bytes a byte.
type Carried = Vec<(usize, f64)>;

/// The facts shared by all sub-models of a job.
struct Places {
    classes: Vec<Class>,
    switches: Vec<NodeId>,
    roots: Vec<NodeId>,
    /// By class, and switch or root after all switches.
    from_class: Vec<Vec<Carried>>,
    /// By switch and root.
    from_switch: Vec<Vec<Carried>>,
}

/// Plans in the making.
struct Search<'a> {
    workload: &'a Workload,
    residence: Residence,
    places: Vec<Places>,
    /// Seconds that a byte takes, by link.
    seconds_per_byte: Vec<f64>,
    /// Bytes that a step has room for, by node; endless where it needs none.
    memory: Vec<f64>,
    spreads: BTreeMap<(NodeId, NodeId), Carried>,
    schedules: Vec<JobSchedule>,
    /// Seconds, by link.
    load: Vec<f64>,
    /// Bytes, by node.
    room: Vec<f64>,
}

impl<'a> Search<'a> {
    fn new(workload: &'a Workload, residence: Residence, solution: &Relaxed) -> Self {
        let topology = workload.topology();
        let places = workload.jobs().iter().zip(&solution.jobs).map(|(job, shares)| {
            let classes = &shares.classes;
            let mut switches: Vec<_> =
                shares.bundles.iter().flat_map(|bundle| bundle.switches.iter().copied()).collect();
            switches.sort_unstable();
            switches.dedup();
            let roots = &job.servers;
            let from_class = classes.iter().map(|class| {
                let ends = switches.iter().chain(roots);
                ends.map(|end| links_of_class(topology, &job.workers, class, *end)).collect()
            });
            let from_switch = switches
                .iter()
                .map(|switch| roots.iter().map(|root| topology.spread(*switch, *root)).collect());
            Places {
                from_class: from_class.collect(),
                from_switch: from_switch.collect(),
                classes: classes.clone(),
                roots: roots.clone(),
                switches,
            }
        });
        let part = residence.part(solution.value);
        // No step takes less than the bound, so there is at least this much room.
        let memory = |node| topology.memory_bytes(node).map_or(f64::INFINITY, |bytes| bytes as f64 / part);
        Self {
            places: places.collect(),
            seconds_per_byte: topology.links().iter().map(|link| 8.0 / link.rate_bps).collect(),
            memory: topology.ids().map(memory).collect(),
            spreads: BTreeMap::new(),
            schedules: Vec::new(),
            load: Vec::new(),
            room: Vec::new(),
            workload,
            residence,
        }
    }

    /// Gives whole sub-models to the stretches of the program's solution, the largest first, each
    /// to the stretch that lacks most.
    fn of_shares(&self, solution: &Relaxed) -> Vec<JobSchedule> {
        let mut room = self.memory.clone();
        let mut schedules = Vec::new();
        for (job, shares) in self.workload.jobs().iter().zip(&solution.jobs) {
            let stretches = stretches(shares);
            let mut lacks: Vec<_> = stretches.iter().map(|its| its.share * job.bytes() as f64).collect();
            let mut schedule = JobSchedule::at_server(job.workers.len(), job.sub_models.len(), job.server());
            let mut order: Vec<usize> = (0..job.sub_models.len()).collect();
            order.sort_by_key(|sub_model| std::cmp::Reverse(job.sub_models[*sub_model].bytes));
            for sub_model in order {
                let bytes = job.sub_models[sub_model].bytes as f64;
                let holders = |stretch: usize| {
                    let its = &stretches[stretch];
                    its.nodes.iter().chain([&its.root]).copied().collect::<std::collections::BTreeSet<_>>()
                };
                let fits =
                    |stretch: &usize| holders(*stretch).into_iter().all(|node| room[node.index()] >= bytes);
                let most = (0..stretches.len())
                    .filter(fits)
                    .max_by(|a, b| lacks[*a].total_cmp(&lacks[*b]).then(b.cmp(a)));
                let Some(stretch) = most else { continue };
                lacks[stretch] -= bytes;
                for node in holders(stretch) {
                    room[node.index()] -= bytes;
                }
                schedule.finish(sub_model, stretches[stretch].root);
                for (class, node) in shares.classes.iter().zip(&stretches[stretch].nodes) {
                    for worker in &class.members {
                        schedule.assign(*worker, sub_model, *node);
                    }
                }
            }
            schedules.push(schedule);
        }
        schedules
    }

    /// The plan that a start leads to.
    fn improved(&mut self, start: Vec<JobSchedule>) -> GradientSchedule {
        self.schedules = start;
        self.load = vec![0.0; self.seconds_per_byte.len()];
        self.room = self.memory.clone();
        let items: Vec<(usize, usize)> = self
            .workload
            .jobs()
            .iter()
            .enumerate()
            .flat_map(|(job, its)| (0..its.sub_models.len()).map(move |sub_model| (job, sub_model)))
            .collect();
        for (job, sub_model) in &items {
            self.put(*job, *sub_model, 1.0);
        }
        for power in POWERS {
            for _ in 0..PASSES_MAX {
                let slowest = self.load.iter().copied().fold(0.0, f64::max);
                let mut better = false;
                for (job, sub_model) in &items {
                    better |= self.moved(*job, *sub_model, slowest, power);
                }
                if !better {
                    break;
                }
            }
        }
        let schedules = std::mem::take(&mut self.schedules);
        GradientSchedule::new(self.workload, schedules, self.residence)
            .expect("each move kept to the memories")
    }

    /// The load of one worker or switch on links.
    fn spread(&mut self, from: NodeId, to: NodeId) -> &Carried {
        let topology = self.workload.topology();
        self.spreads.entry((from, to)).or_insert_with(|| topology.spread(from, to))
    }

    /// Adds what a sub-model carries and holds, or with -1 takes it away; the seconds that are its
    /// part of each link's.
    fn put(&mut self, job: usize, sub_model: usize, sign: f64) -> Vec<f64> {
        let its = &self.workload.jobs()[job];
        let bytes = its.sub_models[sub_model].bytes as f64;
        let (root, nodes) = self.schedules[job].clone_of(sub_model);
        let fan_in = self.schedules[job].fan_in(sub_model);
        let mut carried = vec![0.0; self.load.len()];
        let ways = its.workers.iter().copied().zip(nodes).chain(fan_in.keys().map(|node| (*node, root)));
        for (from, to) in ways {
            for (link, part) in self.spread(from, to) {
                carried[*link] += part * bytes;
            }
        }
        for (link, carried) in carried.iter_mut().enumerate() {
            *carried *= self.seconds_per_byte[link];
            self.load[link] += sign * *carried;
        }
        for node in fan_in.into_keys().chain([root]) {
            self.room[node.index()] -= sign * bytes;
        }
        carried
    }

    /// Takes a sub-model out and puts it where it loads slow links least. Whether that is somewhere
    /// better.
    fn moved(&mut self, job: usize, sub_model: usize, slowest: f64, power: i32) -> bool {
        let before = self.schedules[job].clone_of(sub_model);
        let old = self.put(job, sub_model, -1.0);
        let after = self.cheapest(job, sub_model, slowest, power);
        if after == before {
            self.put(job, sub_model, 1.0);
            return false;
        }
        self.schedules[job].replace(sub_model, &after);
        let new = self.put(job, sub_model, 1.0);
        let weight = |seconds: f64| (seconds / slowest).powi(power);
        // Only the links concerned are compared: the others' sum would swallow the change.
        let (mut change, mut size) = (0.0, 0.0);
        for (link, now) in self.load.iter().enumerate().filter(|(link, _)| old[*link] != new[*link]) {
            let was = weight(now - new[link] + old[link]);
            change += weight(*now) - was;
            size += was;
        }
        if change < -GAIN_MIN * size {
            return true;
        }
        self.put(job, sub_model, -1.0);
        self.schedules[job].replace(sub_model, &before);
        self.put(job, sub_model, 1.0);
        false
    }

    /// The root and the nodes that cost least, at a price of each link that is what its time
    /// weighs.
    fn cheapest(&self, job: usize, sub_model: usize, slowest: f64, power: i32) -> (NodeId, Vec<NodeId>) {
        let (its, places) = (&self.workload.jobs()[job], &self.places[job]);
        let bytes = its.sub_models[sub_model].bytes as f64;
        let prices: Vec<f64> = self
            .load
            .iter()
            .zip(&self.seconds_per_byte)
            .map(|(load, per_byte)| ((load + bytes * per_byte) / slowest).powi(power - 1) * per_byte)
            .collect();
        let price = |carried: &Carried| carried.iter().map(|(link, part)| part * prices[*link]).sum::<f64>();
        let from_class: Vec<Vec<f64>> =
            places.from_class.iter().map(|row| row.iter().map(price).collect()).collect();
        let mut best: Option<(f64, NodeId, Vec<NodeId>)> = None;
        for (root, node) in places.roots.iter().enumerate() {
            if self.room[node.index()] < bytes {
                continue;
            }
            let open: Vec<f64> = places.from_switch.iter().map(|row| price(&row[root])).collect();
            let may = |switch: &usize| self.room[places.switches[*switch].index()] >= bytes;
            let switches: Vec<usize> = (0..places.switches.len()).filter(may).collect();
            let direct = places.switches.len() + root;
            let (cost, ends) = cheapest_ends(&from_class, &open, &switches, direct);
            if best.as_ref().is_none_or(|(least, ..)| cost < *least) {
                let mut nodes = vec![*node; its.workers.len()];
                for (class, end) in places.classes.iter().zip(ends) {
                    for worker in class.members.iter().filter(|_| end != direct) {
                        nodes[*worker] = places.switches[end];
                    }
                }
                best = Some((cost, *node, nodes));
            }
        }
        let (_, root, nodes) = best.unwrap_or_else(|| {
            // There was room for it where it was.
            let (root, nodes) = self.schedules[job].clone_of(sub_model);
            (0.0, root, nodes)
        });
        (root, nodes)
    }
}

/// An end for each class, of `switches`, which cost something each, and `direct`, which does not:
/// one switch more as long as that is cheaper, and one less.
fn cheapest_ends(
    from_class: &[Vec<f64>],
    open: &[f64],
    switches: &[usize],
    direct: usize,
) -> (f64, Vec<usize>) {
    let mut chosen: Vec<usize> = Vec::new();
    let cost_of = |chosen: &[usize]| {
        let nearest = |row: &Vec<f64>| chosen.iter().map(|switch| row[*switch]).fold(row[direct], f64::min);
        let opening: f64 = chosen.iter().map(|switch| open[*switch]).sum();
        opening + from_class.iter().map(nearest).sum::<f64>()
    };
    let mut cost = cost_of(&chosen);
    loop {
        let more = switches.iter().filter(|switch| !chosen.contains(switch)).map(|switch| {
            let mut with = chosen.clone();
            with.push(*switch);
            with
        });
        let fewer = (0..chosen.len()).map(|place| {
            let mut without = chosen.clone();
            without.remove(place);
            without
        });
        let least = more.chain(fewer).map(|its| (cost_of(&its), its)).min_by(|a, b| a.0.total_cmp(&b.0));
        match least {
            Some((less, its)) if less < cost => (cost, chosen) = (less, its),
            _ => break,
        }
    }
    let end = |row: &Vec<f64>| {
        let least = chosen.iter().copied().min_by(|a, b| row[*a].total_cmp(&row[*b]));
        least.filter(|switch| row[*switch] < row[direct]).unwrap_or(direct)
    };
    (cost, from_class.iter().map(end).collect())
}

#[cfg(test)]
mod tests;
