//! The linear program behind the planners: sub-models may be divided, and everything is in parts of
//! a job's bytes.
//!
//! GOAT's programs (Eqs. 1 and 4) are, for every sub-model `g`, the same constraints on `x_g` and
//! `y_g`, and one row a switch joins them: `Σ_g b(g) x_g ≤ B`. So if `x_g, y_g` are an optimum,
//! then so is for all of them their mean, weighted by `b(g)`: one sub-model as large as the job
//! stands for all. In the same way one class stands for workers that see the network alike, those
//! of a rack. So the program is small whatever the model and the racks are.

use std::collections::{BTreeMap, BTreeSet};

use microlp::{ComparisonOp, OptimizationDirection, Problem, Variable};

use crate::sub_models::Workload;
use crate::topology::{NodeId, Topology};

/// A share of a job below this is the solver's rounding.
pub(crate) const SHARE_MIN: f64 = 1e-7;

/// How much the second goal weighs where the first one leaves a choice.
const TIE_BREAK: f64 = 1e-3;
/// The most variables of one job for which each set of switches has bundles of its own.
const VARIABLES_MAX: usize = 2_000;

/// The quantity that a program makes small or large.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Goal {
    /// Eq. 4: as much traffic less by aggregation as possible. Among equals the least of Eq. 1, if
    /// `tie_break`.
    Reduction { tie_break: bool },
    /// Eq. 1: as little traffic as possible.
    Overhead,
    /// The least time of the slowest link. A switch has `memory_per_s` bytes for each byte of its
    /// memory and each second of that time (Little's law). With `None` the memory does not depend
    /// on the time.
    SlowestLink { memory_per_s: Option<f64> },
}

/// Workers that see the network alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Class {
    /// Their places among the job's workers.
    pub(crate) members: Vec<usize>,
    /// One of them.
    pub(crate) host: NodeId,
}

/// Switches that may sum before a root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bundle {
    pub(crate) root: NodeId,
    pub(crate) switches: Vec<NodeId>,
    /// Whether each of them sums all that the root finishes here.
    pub(crate) whole: bool,
}

/// The program's result for one job: shares of its bytes. They are divided among bundles; in each a
/// class sends to its switches or to its root.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct JobShares {
    pub(crate) classes: Vec<Class>,
    pub(crate) bundles: Vec<Bundle>,
    /// The share that the root of each bundle finishes.
    pub(crate) finished: Vec<f64>,
    /// The part of it that each class sends to each switch: `y`.
    pub(crate) sent: Vec<Vec<Vec<f64>>>,
    /// The part of it that each class sends to the root.
    pub(crate) direct: Vec<Vec<f64>>,
    /// The part of it that each switch sums; for all bundles it is its `x`.
    pub(crate) summed: Vec<Vec<f64>>,
}

/// The program's optimum.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Relaxed {
    pub(crate) jobs: Vec<JobShares>,
    /// The goal's value: bytes times links, or seconds.
    pub(crate) value: f64,
}

struct JobVariables {
    finished: Vec<Variable>,
    sent: Vec<Vec<Vec<Variable>>>,
    direct: Vec<Vec<Variable>>,
    summed: Vec<Vec<Variable>>,
}

/// Solves the program. For each job `bytes` count, which may be less than it has.
///
/// # Panics
/// When the solver finds none, although everything at the servers is one.
pub(crate) fn relaxed(workload: &Workload, bytes: &[u64], goal: Goal) -> Relaxed {
    let direction = match goal {
        Goal::Reduction { .. } => OptimizationDirection::Maximize,
        Goal::Overhead | Goal::SlowestLink { .. } => OptimizationDirection::Minimize,
    };
    let mut problem = Problem::new(direction);
    let seconds = match goal {
        Goal::SlowestLink { .. } => Some(problem.add_var(1.0, (0.0, f64::INFINITY))),
        _ => None,
    };
    let mut rows = Rows::default();
    let mut jobs = Vec::new();
    let mut variables = Vec::new();
    for (job, bytes) in bytes.iter().enumerate() {
        let shares = places(workload, job, goal);
        variables.push({
            let workers = &workload.jobs()[job].workers;
            add_job(&mut problem, &mut rows, workload.topology(), workers, &shares, *bytes as f64, goal)
        });
        jobs.push(shares);
    }
    rows.add(&mut problem, workload.topology(), goal, seconds);
    let solution = problem.solve().expect("everything at the servers is a solution");
    let value = |variable: &Variable| {
        let value = solution[*variable];
        if value < SHARE_MIN { 0.0 } else { value }
    };
    let table = |table: &[Vec<Variable>]| table.iter().map(|row| row.iter().map(value).collect()).collect();
    for (shares, its) in jobs.iter_mut().zip(&variables) {
        shares.finished = its.finished.iter().map(value).collect();
        shares.sent = its.sent.iter().map(|of_root| table(of_root)).collect();
        shares.direct = table(&its.direct);
        shares.summed = table(&its.summed);
    }
    Relaxed { jobs, value: solution.objective() }
}

/// Bytes that a share makes links carry and switches hold.
#[derive(Default)]
struct Rows {
    links: BTreeMap<usize, Vec<(Variable, f64)>>,
    memory: BTreeMap<NodeId, Vec<(Variable, f64)>>,
}

impl Rows {
    fn carry(&mut self, variable: Variable, links: &[(usize, f64)], bytes: f64) {
        for (link, part) in links {
            self.links.entry(*link).or_default().push((variable, part * bytes));
        }
    }

    fn add(self, problem: &mut Problem, topology: &Topology, goal: Goal, seconds: Option<Variable>) {
        let memory_per_s = match goal {
            Goal::SlowestLink { memory_per_s } => memory_per_s,
            _ => None,
        };
        for (switch, row) in self.memory {
            let bytes = topology.memory_bytes(switch).expect("it sums") as f64;
            let mut row: Vec<_> =
                merged(row).into_iter().map(|(variable, held)| (variable, held / bytes)).collect();
            let room = match (memory_per_s, seconds) {
                (Some(per_s), Some(seconds)) => {
                    row.push((seconds, -per_s));
                    0.0
                }
                _ => 1.0,
            };
            problem.add_constraint(&row[..], ComparisonOp::Le, room);
        }
        let Some(seconds) = seconds else { return };
        if let Some(per_s) = memory_per_s {
            // If a step is shorter than a fragment's stay, the memory does not depend on the time:
            // another program.
            problem.add_constraint([(seconds, 1.0)], ComparisonOp::Ge, 1.0 / per_s);
        }
        // Links of a class's workers are alike: one row.
        let mut seen = BTreeSet::new();
        for (link, row) in self.links {
            let mut row: Vec<_> = merged(row)
                .into_iter()
                .map(|(variable, bytes)| (variable, bytes * 8.0 / topology.links()[link].rate_bps))
                .collect();
            let key: Vec<_> = row.iter().map(|(variable, time)| (variable.idx(), time.to_bits())).collect();
            if seen.insert(key) {
                row.push((seconds, -1.0));
                problem.add_constraint(&row[..], ComparisonOp::Le, 0.0);
            }
        }
    }
}

/// Each variable once.
fn merged(row: Vec<(Variable, f64)>) -> Vec<(Variable, f64)> {
    let mut by_index: BTreeMap<usize, (Variable, f64)> = BTreeMap::new();
    for (variable, bytes) in row {
        by_index.entry(variable.idx()).or_insert((variable, 0.0)).1 += bytes;
    }
    by_index.into_values().collect()
}

/// The switches that may sum each share of a job.
fn places(workload: &Workload, job: usize, goal: Goal) -> JobShares {
    let (topology, its) = (workload.topology(), &workload.jobs()[job]);
    let roots = match goal {
        Goal::SlowestLink { .. } => its.servers.clone(),
        _ => vec![its.server()],
    };
    let reached = |switch: &NodeId| {
        let mut by = its.workers.iter().chain(&roots);
        !roots.contains(switch) && by.all(|node| topology.distance(*node, *switch).is_some())
    };
    let switches: Vec<_> = topology.programmable().filter(reached).collect();
    let classes = classes(topology, &its.workers, &switches, &roots, goal);
    let divided = matches!(goal, Goal::SlowestLink { .. });
    let bundles = if divided && variables(switches.len(), classes.len(), roots.len()) <= VARIABLES_MAX {
        // A job that opens a switch for a half only has no half of a switch. With bundles for each
        // set of switches, the program has only solutions that plans have.
        let sets = (0..1_u64 << switches.len()).map(|set| {
            let chosen = switches.iter().enumerate().filter(|(place, _)| set >> place & 1 == 1);
            chosen.map(|(_, switch)| *switch).collect::<Vec<_>>()
        });
        let of_set = |switches: Vec<NodeId>| {
            roots.iter().map(move |root| Bundle { root: *root, switches: switches.clone(), whole: true })
        };
        sets.flat_map(of_set).collect()
    } else {
        let of_root = |root: &NodeId| Bundle { root: *root, switches: switches.clone(), whole: false };
        roots.iter().map(of_root).collect()
    };
    JobShares {
        classes,
        bundles,
        finished: Vec::new(),
        sent: Vec::new(),
        direct: Vec::new(),
        summed: Vec::new(),
    }
}

/// How many variables all sets of switches would make.
fn variables(switches: usize, classes: usize, roots: usize) -> usize {
    if switches > 12 {
        return usize::MAX;
    }
    ((classes * roots) << switches).saturating_mul(switches / 2 + 1)
}

fn classes(
    topology: &Topology,
    workers: &[NodeId],
    switches: &[NodeId],
    roots: &[NodeId],
    goal: Goal,
) -> Vec<Class> {
    let mut classes: BTreeMap<Vec<u64>, Class> = BTreeMap::new();
    for (place, host) in workers.iter().enumerate() {
        let far =
            || switches.iter().chain(roots).map(|to| u64::from(topology.distance(*host, *to).unwrap_or(0)));
        let key = match goal {
            // No way from a worker is in Eq. 4.
            Goal::Reduction { .. } => Vec::new(),
            Goal::Overhead => far().collect(),
            Goal::SlowestLink { .. } => {
                let mut joined: Vec<_> = topology
                    .neighbours(*host)
                    .iter()
                    .flat_map(|(node, link)| [u64::from(node.0), topology.links()[*link].rate_bps.to_bits()])
                    .collect();
                joined.extend(roots.contains(host).then_some(place as u64));
                joined
            }
        };
        let class = classes.entry(key).or_insert(Class { members: Vec::new(), host: *host });
        class.members.push(place);
    }
    classes.into_values().collect()
}

fn add_job(
    problem: &mut Problem,
    rows: &mut Rows,
    topology: &Topology,
    workers: &[NodeId],
    shares: &JobShares,
    bytes: f64,
    goal: Goal,
) -> JobVariables {
    let JobShares { classes, bundles, .. } = shares;
    let far = |from: NodeId, to: NodeId| f64::from(topology.distance(from, to).expect("checked"));
    let links_count = matches!(goal, Goal::SlowestLink { .. });
    // The cost or the saving of a share, in bytes times links.
    let cost_sent = |class: &Class, to: NodeId, root: NodeId| match goal {
        Goal::Reduction { tie_break } => {
            let saved = workers.len() as f64 * far(to, root);
            let ways = class.members.iter().map(|member| far(workers[*member], to)).sum::<f64>();
            // In the mean over the workers smaller than one link's difference to one of them.
            let ways = if tie_break { TIE_BREAK * ways / workers.len() as f64 } else { 0.0 };
            (saved - ways) * bytes
        }
        Goal::Overhead => class.members.len() as f64 * far(class.host, to) * bytes,
        Goal::SlowestLink { .. } => 0.0,
    };
    let cost_direct = |class: &Class, to: NodeId| match goal {
        Goal::Overhead => class.members.len() as f64 * far(class.host, to) * bytes,
        _ => 0.0,
    };
    let cost_summed = |from: NodeId, to: NodeId| match goal {
        Goal::Reduction { .. } => -far(from, to) * bytes,
        Goal::Overhead => far(from, to) * bytes,
        Goal::SlowestLink { .. } => 0.0,
    };
    let share = (0.0, 1.0);
    let finished: Vec<_> = bundles.iter().map(|_| problem.add_var(0.0, share)).collect();
    let whole: Vec<_> = finished.iter().map(|variable| (*variable, 1.0)).collect();
    problem.add_constraint(&whole[..], ComparisonOp::Eq, 1.0);
    let (mut sent, mut direct, mut summed) = (Vec::new(), Vec::new(), Vec::new());
    for (Bundle { root, switches, whole }, finished) in bundles.iter().zip(&finished) {
        let summed_by = |from: &NodeId| {
            if *whole { *finished } else { problem.add_var(cost_summed(*from, *root), share) }
        };
        let its_summed: Vec<_> = switches.iter().map(summed_by).collect();
        let mut its_sent = Vec::new();
        let mut its_direct = Vec::new();
        for class in classes {
            let to_switches: Vec<_> =
                switches.iter().map(|to| problem.add_var(cost_sent(class, *to, *root), share)).collect();
            // Without switches a class sends a root all that the root finishes.
            let to_root = if switches.is_empty() {
                *finished
            } else {
                problem.add_var(cost_direct(class, *root), share)
            };
            if !switches.is_empty() {
                let all = to_switches.iter().chain([&to_root]).map(|variable| (*variable, 1.0));
                let row: Vec<_> = all.chain([(*finished, -1.0)]).collect();
                problem.add_constraint(&row[..], ComparisonOp::Eq, 0.0);
            }
            // y ≤ x, which goes without saying where x is the whole.
            for (y, x) in to_switches.iter().zip(&its_summed).filter(|_| !whole) {
                problem.add_constraint([(*y, 1.0), (*x, -1.0)], ComparisonOp::Le, 0.0);
            }
            if links_count {
                for (variable, to) in to_switches.iter().zip(switches).chain([(&to_root, root)]) {
                    rows.carry(*variable, &links_of_class(topology, workers, class, *to), bytes);
                }
            }
            its_sent.push(to_switches);
            its_direct.push(to_root);
        }
        for (variable, from) in its_summed.iter().zip(switches) {
            rows.memory.entry(*from).or_default().push((*variable, bytes));
            if links_count {
                rows.carry(*variable, &topology.spread(*from, *root), bytes);
            }
        }
        if !topology.is_host(*root) {
            rows.memory.entry(*root).or_default().push((*finished, bytes));
        }
        sent.push(its_sent);
        direct.push(its_direct);
        summed.push(its_summed);
    }
    JobVariables { finished, sent, direct, summed }
}

/// The load on links of all workers of a class.
pub(crate) fn links_of_class(
    topology: &Topology,
    job: &[NodeId],
    class: &Class,
    to: NodeId,
) -> Vec<(usize, f64)> {
    let mut carried: BTreeMap<usize, f64> = BTreeMap::new();
    for (link, part) in topology.spread(class.host, to) {
        match topology.neighbours(class.host).iter().position(|(_, own)| *own == link) {
            // Each has a link of its own to where they meet.
            Some(place) => {
                for member in &class.members {
                    let (_, own) = topology.neighbours(job[*member])[place];
                    *carried.entry(own).or_insert(0.0) += part;
                }
            }
            None => *carried.entry(link).or_insert(0.0) += part * class.members.len() as f64,
        }
    }
    carried.into_iter().collect()
}
