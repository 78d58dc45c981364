//! The linear program behind the planners: sub-models may be divided, and everything is in parts of a job's bytes.
//!
//! GOAT's programs (Eqs. 1 and 4) are, for every sub-model `g`, the same constraints on `x_g` and `y_g`, and one row a switch joins them:
//! `Σ_g b(g) x_g ≤ B`. So if `x_g, y_g` are an optimum, then so is for all of them their mean, weighted by `b(g)`: one sub-model as large as the job stands for
//! all. In the same way one class stands for workers that see the network alike, those of a rack. What is left is small whatever the model and
//! the racks are.

use std::collections::{BTreeMap, BTreeSet};

use microlp::{ComparisonOp, OptimizationDirection, Problem, Variable};

use crate::sub_models::Workload;
use crate::topology::{NodeId, Topology};

/// What is below this share of a job is the solver's rounding.
pub(crate) const SHARE_MIN: f64 = 1e-7;

/// What a program is to make small or large.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Goal {
    /// Eq. 4: as much traffic less by aggregation as possible. Of equals the least of Eq. 1, if `tie_break`.
    Reduction { tie_break: bool },
    /// Eq. 1: as little traffic as possible.
    Overhead,
    /// As little time of the slowest link as possible, with `memory_per_s` bytes for each byte of a switch and second of that time (Little's law), or with
    /// the memory as it is.
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

/// What the program makes of one job. Shares of its bytes, by class, switch and root.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct JobShares {
    pub(crate) classes: Vec<Class>,
    /// Switches that may sum for it.
    pub(crate) switches: Vec<NodeId>,
    pub(crate) roots: Vec<NodeId>,
    /// What each root finishes.
    pub(crate) finished: Vec<f64>,
    /// What each class sends to each switch: `y`.
    pub(crate) sent: Vec<Vec<f64>>,
    /// What each class sends to each root.
    pub(crate) direct: Vec<Vec<f64>>,
    /// What each switch sends to each root; all of it is its `x`.
    pub(crate) summed: Vec<Vec<f64>>,
}

/// The program's optimum.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Relaxed {
    pub(crate) jobs: Vec<JobShares>,
    /// Of the goal: bytes times links, or seconds.
    pub(crate) value: f64,
}

struct JobVariables {
    finished: Vec<Variable>,
    sent: Vec<Vec<Variable>>,
    direct: Vec<Vec<Variable>>,
    summed: Vec<Vec<Variable>>,
}

/// Solves the program. Of each job `bytes` count, which may be less than it has.
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
        shares.sent = table(&its.sent);
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
            let mut row: Vec<_> = row.into_iter().map(|(variable, held)| (variable, held / bytes)).collect();
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
            // Where a step is shorter than a fragment's stay, the memory is as it is, and that is another program.
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

/// Who may sum what for a job.
fn places(workload: &Workload, job: usize, goal: Goal) -> JobShares {
    let (topology, its) = (workload.topology(), &workload.jobs()[job]);
    let roots = match goal {
        Goal::SlowestLink { .. } => its.servers.clone(),
        _ => vec![its.server()],
    };
    let reached = |switch: &NodeId| {
        let by = its.workers.iter().chain(&roots);
        !roots.contains(switch) && by.clone().all(|node| topology.distance(*node, *switch).is_some())
    };
    let switches: Vec<_> = topology.programmable().filter(reached).collect();
    JobShares {
        classes: classes(topology, &its.workers, &switches, &roots, goal),
        switches,
        roots,
        finished: Vec::new(),
        sent: Vec::new(),
        direct: Vec::new(),
        summed: Vec::new(),
    }
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
    let JobShares { classes, switches, roots, .. } = shares;
    let far = |from: NodeId, to: NodeId| f64::from(topology.distance(from, to).expect("checked"));
    let links_count = matches!(goal, Goal::SlowestLink { .. });
    // What a share costs, or saves, in bytes times links.
    let cost_sent = |class: &Class, to: NodeId| match goal {
        Goal::Reduction { tie_break } => {
            let saved = workers.len() as f64 * far(to, roots[0]);
            // Smaller than one link's difference, for all workers together.
            let way = if tie_break { 1e-3 * far(class.host, to) } else { 0.0 };
            (saved - way) * bytes
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
    let finished: Vec<_> = roots.iter().map(|_| problem.add_var(0.0, share)).collect();
    let sent: Vec<Vec<_>> = classes
        .iter()
        .map(|class| switches.iter().map(|to| problem.add_var(cost_sent(class, *to), share)).collect())
        .collect();
    let direct: Vec<Vec<_>> = classes
        .iter()
        .map(|class| {
            // Without switches a class sends each root what the root finishes.
            let add = |(root, to): (usize, &NodeId)| {
                if switches.is_empty() {
                    finished[root]
                } else {
                    problem.add_var(cost_direct(class, *to), share)
                }
            };
            roots.iter().enumerate().map(add).collect()
        })
        .collect();
    let summed: Vec<Vec<_>> = switches
        .iter()
        .map(|from| roots.iter().map(|to| problem.add_var(cost_summed(*from, *to), share)).collect())
        .collect();
    let whole: Vec<_> = finished.iter().map(|variable| (*variable, 1.0)).collect();
    problem.add_constraint(&whole[..], ComparisonOp::Eq, 1.0);
    for (class, host) in classes.iter().enumerate() {
        let all = sent[class].iter().chain(&direct[class]).map(|variable| (*variable, 1.0));
        if !switches.is_empty() {
            problem.add_constraint(&all.collect::<Vec<_>>()[..], ComparisonOp::Eq, 1.0);
        }
        for (switch, to) in switches.iter().enumerate() {
            // y ≤ x.
            let mut row: Vec<_> = summed[switch].iter().map(|variable| (*variable, -1.0)).collect();
            row.push((sent[class][switch], 1.0));
            problem.add_constraint(&row[..], ComparisonOp::Le, 0.0);
            if links_count {
                rows.carry(sent[class][switch], &links_of_class(topology, workers, host, *to), bytes);
            }
        }
        for (root, to) in roots.iter().enumerate().filter(|_| links_count) {
            rows.carry(direct[class][root], &links_of_class(topology, workers, host, *to), bytes);
        }
    }
    if roots.len() > 1 && !switches.is_empty() {
        for (root, finished) in finished.iter().enumerate() {
            let passing = summed.iter().chain(&direct).map(|row| row[root]);
            for variable in passing {
                problem.add_constraint([(variable, 1.0), (*finished, -1.0)], ComparisonOp::Le, 0.0);
            }
        }
    }
    for (switch, from) in switches.iter().enumerate() {
        for (root, to) in roots.iter().enumerate() {
            rows.memory.entry(*from).or_default().push((summed[switch][root], bytes));
            if links_count {
                rows.carry(summed[switch][root], &topology.spread(*from, *to), bytes);
            }
        }
    }
    for (root, node) in roots.iter().enumerate() {
        if !topology.is_host(*node) {
            rows.memory.entry(*node).or_default().push((finished[root], bytes));
        }
    }
    JobVariables { finished, sent, direct, summed }
}

/// What all of a class make links carry.
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
