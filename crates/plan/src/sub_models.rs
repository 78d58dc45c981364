//! The work to be summed: jobs, cut into sub-models (GOAT §IV-A), on a topology.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt;

use crate::topology::{NodeId, Topology};

/// More workers or sub-models of a job than this are a mistake: a schedule has a cell for each
/// pair.
pub const CELLS_MAX: usize = 1 << 22;

/// More ways than this from a worker by a programmable switch to one of several servers are not
/// planned.
pub const WAYS_MAX: usize = 6_000;

/// A part of a model that is summed as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubModel {
    /// The name for people. No two of a job share one.
    pub name: String,
    /// `b(g)`: bytes of its gradients.
    pub bytes: u64,
}

impl SubModel {
    /// A model of so many bytes in sub-models of at most `bytes_max`, as equal as whole bytes
    /// allow. Without a sub-model where either is zero.
    #[must_use]
    pub fn divided(bytes: u64, bytes_max: u64) -> Vec<Self> {
        let count = if bytes_max == 0 { 0 } else { bytes.div_ceil(bytes_max) };
        (0..count)
            .map(|index| {
                let end = |index: u64| (u128::from(bytes) * u128::from(index) / u128::from(count)) as u64;
                Self { name: format!("g{index}"), bytes: end(index + 1) - end(index) }
            })
            .collect()
    }
}

/// A training whose gradients are summed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// The name for people. No two share one.
    pub name: String,
    /// `W`: hosts, in the order of the ranks.
    pub workers: Vec<NodeId>,
    /// The nodes that may finish a sum. GOAT has one, the parameter server `α`; planners that know
    /// one alone take the first. Several are BytePS' summation services; a programmable switch
    /// among them finishes sums as SwitchML's does. The first is a host, which has room for
    /// whatever switches have none for.
    pub servers: Vec<NodeId>,
    /// `G`.
    pub sub_models: Vec<SubModel>,
}

impl Job {
    /// `α`: the first of those who may finish a sum.
    ///
    /// # Panics
    /// When there is none, which a [`Workload`]'s jobs always have.
    #[must_use]
    pub fn server(&self) -> NodeId {
        self.servers[0]
    }

    /// Bytes of all sub-models.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.sub_models.iter().map(|sub_model| sub_model.bytes).sum()
    }
}

/// Jobs on a topology, which can be planned for.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    topology: Topology,
    jobs: Vec<Job>,
}

impl Workload {
    /// Checks the jobs.
    ///
    /// # Errors
    /// When a job has no workers, servers or sub-models, or names one twice or one of the wrong
    /// kind. When a worker has no way to a server.
    pub fn new(topology: Topology, jobs: Vec<Job>) -> Result<Self, WorkloadError> {
        let mut names = BTreeSet::new();
        for job in &jobs {
            if !names.insert(&job.name) {
                return Err(WorkloadError::DuplicateJob(job.name.clone()));
            }
            check(&topology, job)?;
        }
        Ok(Self { topology, jobs })
    }

    /// The network.
    #[must_use]
    pub const fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The jobs.
    #[must_use]
    pub fn jobs(&self) -> &[Job] {
        &self.jobs
    }
}

fn check(topology: &Topology, job: &Job) -> Result<(), WorkloadError> {
    let name = || job.name.clone();
    for (what, missing) in [
        ("workers", job.workers.is_empty()),
        ("servers", job.servers.is_empty()),
        ("sub-models", job.sub_models.is_empty()),
    ] {
        if missing {
            return Err(WorkloadError::Nothing { job: name(), what });
        }
    }
    let cells = job.workers.len().saturating_mul(job.sub_models.len());
    if cells > CELLS_MAX {
        return Err(WorkloadError::TooManyCells { job: name(), cells });
    }
    for (role, nodes) in [("worker", &job.workers), ("server", &job.servers)] {
        let mut seen = BTreeSet::new();
        for node in nodes {
            if node.index() >= topology.nodes().len() {
                return Err(WorkloadError::NoNode { job: name(), role, node: *node });
            }
            let node_name = || topology.name(*node).to_owned();
            let sums = role == "server" && topology.memory_bytes(*node).is_some();
            if !topology.is_host(*node) && !sums {
                return Err(WorkloadError::NotAHost { job: name(), role, node: node_name() });
            }
            if !seen.insert(*node) {
                return Err(WorkloadError::Twice { job: name(), what: node_name() });
            }
        }
    }
    if !topology.is_host(job.server()) {
        return Err(WorkloadError::FirstServer { job: name(), node: topology.name(job.server()).to_owned() });
    }
    // A variable for each, in the program of the slowest link.
    let ways = job.servers.len().saturating_mul(job.workers.len() * topology.programmable().count());
    if job.servers.len() > 1 && ways > WAYS_MAX {
        return Err(WorkloadError::TooManyWays { job: name(), ways });
    }
    let mut seen = BTreeSet::new();
    for sub_model in &job.sub_models {
        if sub_model.bytes == 0 {
            return Err(WorkloadError::Empty { job: name(), sub_model: sub_model.name.clone() });
        }
        if !seen.insert(&sub_model.name) {
            return Err(WorkloadError::Twice { job: name(), what: sub_model.name.clone() });
        }
    }
    for worker in &job.workers {
        for server in &job.servers {
            if topology.distance(*worker, *server).is_none() {
                let [worker, server] = [worker, server].map(|node| topology.name(*node).to_owned());
                return Err(WorkloadError::Disconnected { job: name(), worker, server });
            }
        }
    }
    Ok(())
}

/// Why jobs cannot be planned for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkloadError {
    /// Two jobs have this name.
    DuplicateJob(String),
    /// A job lacks something.
    Nothing {
        /// This job.
        job: String,
        /// What it lacks.
        what: &'static str,
    },
    /// A node that the topology does not have.
    NoNode {
        /// Named by this job.
        job: String,
        /// As its worker or server.
        role: &'static str,
        /// The node.
        node: NodeId,
    },
    /// A switch where a host is needed.
    NotAHost {
        /// Named by this job.
        job: String,
        /// As its worker or server.
        role: &'static str,
        /// The switch.
        node: String,
    },
    /// A worker, server or sub-model is named twice.
    Twice {
        /// By this job.
        job: String,
        /// What.
        what: String,
    },
    /// A sub-model without gradients.
    Empty {
        /// Of this job.
        job: String,
        /// The sub-model.
        sub_model: String,
    },
    /// No way leads from a worker to a server.
    Disconnected {
        /// Of this job.
        job: String,
        /// The worker.
        worker: String,
        /// The server.
        server: String,
    },
    /// A switch is first of those who finish sums.
    FirstServer {
        /// Of this job.
        job: String,
        /// The switch.
        node: String,
    },
    /// Servers times workers times programmable switches are more than [`WAYS_MAX`].
    TooManyWays {
        /// Of this job.
        job: String,
        /// So many.
        ways: usize,
    },
    /// Workers times sub-models are more than [`CELLS_MAX`].
    TooManyCells {
        /// Of this job.
        job: String,
        /// So many.
        cells: usize,
    },
}

impl WorkloadError {
    /// The job that cannot be planned for.
    #[must_use]
    pub fn job(&self) -> &str {
        match self {
            Self::DuplicateJob(job)
            | Self::Nothing { job, .. }
            | Self::NoNode { job, .. }
            | Self::NotAHost { job, .. }
            | Self::Twice { job, .. }
            | Self::Empty { job, .. }
            | Self::Disconnected { job, .. }
            | Self::FirstServer { job, .. }
            | Self::TooManyWays { job, .. }
            | Self::TooManyCells { job, .. } => job,
        }
    }
}

impl fmt::Display for WorkloadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DuplicateJob(name) => write!(f, "two jobs are called {name}: name each once"),
            Self::Nothing { job, what } => {
                write!(f, "job {job} has no {what}: it needs at least one of them")
            }
            Self::NoNode { job, role, node } => {
                write!(
                    f,
                    "job {job}: its {role} is node {}, and the topology has none of that number",
                    node.0
                )
            }
            Self::NotAHost { job, role: "server", node } => write!(
                f,
                "job {job}: its server {node} is a switch without memory: take a host, or give the switch memory"
            ),
            Self::NotAHost { job, role, node } => {
                write!(f, "job {job}: its {role} {node} is a switch: take a host")
            }
            Self::Twice { job, what } => write!(f, "job {job} has {what} twice: name each once"),
            Self::Empty { job, sub_model } => {
                write!(
                    f,
                    "job {job}: sub-model {sub_model} has 0 bytes: merge it with another, or leave it out"
                )
            }
            Self::Disconnected { job, worker, server } => write!(
                f,
                "job {job}: no way leads from worker {worker} to server {server}: a link is missing, or a switch between them is gone"
            ),
            Self::FirstServer { job, node } => write!(
                f,
                "job {job}: its first server {node} is a switch: name a host first, for what switches have no room for"
            ),
            Self::TooManyWays { job, ways } => write!(
                f,
                "job {job}: servers times workers times programmable switches are {ways}, and {WAYS_MAX} at most are planned: name fewer servers, or give fewer switches memory"
            ),
            Self::TooManyCells { job, cells } => write!(
                f,
                "job {job}: workers times sub-models are {cells}, and {CELLS_MAX} at most are planned: cut the model into fewer sub-models"
            ),
        }
    }
}

impl Error for WorkloadError {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topologies::{Rates, make_programmable, paper_fat_tree, testbed};

    fn job(topology: &Topology) -> Job {
        let node = |name: &str| topology.node(name).expect("a node");
        Job {
            name: "a".into(),
            workers: ["w1", "w2", "w8"].map(node).into(),
            servers: vec![node("ps")],
            sub_models: SubModel::divided(100, 30),
        }
    }

    #[test]
    fn a_model_is_divided_into_equal_parts_that_make_a_whole() {
        let bytes: Vec<_> = SubModel::divided(100, 30).iter().map(|part| part.bytes).collect();
        assert_eq!(bytes, [25; 4]);
        let bytes: Vec<_> = SubModel::divided(10, 4).iter().map(|part| part.bytes).collect();
        assert_eq!(bytes, [3, 3, 4]);
        assert!(SubModel::divided(0, 4).is_empty() && SubModel::divided(4, 0).is_empty());
    }

    #[test]
    fn what_cannot_be_planned_for_is_refused_with_cause_and_cure() {
        let topology = testbed();
        let refused = |change: &dyn Fn(&mut Job)| {
            let mut job = job(&topology);
            change(&mut job);
            Workload::new(topology.clone(), vec![job]).expect_err("refused").to_string()
        };
        let s1 = topology.node("s1").expect("a switch");
        assert!(refused(&|job| job.workers.clear()).contains("job a has no workers"));
        assert!(refused(&|job| job.servers.clear()).contains("job a has no servers"));
        assert!(refused(&|job| job.sub_models.clear()).contains("job a has no sub-models"));
        assert!(refused(&|job| job.workers[1] = job.workers[0]).contains("has w1 twice"));
        assert!(refused(&|job| job.workers[0] = s1).contains("worker s1 is a switch"));
        assert!(refused(&|job| job.workers[0] = NodeId(99)).contains("node 99"));
        assert!(refused(&|job| job.sub_models[1].name = "g0".into()).contains("has g0 twice"));
        assert!(refused(&|job| job.sub_models[1].bytes = 0).contains("g1 has 0 bytes"));
        let alike = Workload::new(topology.clone(), vec![job(&topology), job(&topology)]);
        assert!(alike.expect_err("refused").to_string().contains("two jobs are called a"));
        let mut plain = topology.clone();
        plain.set_memory_bytes(s1, None);
        let server = Job { servers: vec![job(&topology).server(), s1], ..job(&topology) };
        let unarmed = Workload::new(plain, vec![server.clone()]).expect_err("refused").to_string();
        assert!(unarmed.contains("server s1 is a switch without memory"), "{unarmed}");
        Workload::new(topology.clone(), vec![server]).expect("a switch with memory finishes sums");
        assert!(refused(&|job| job.servers = vec![s1]).contains("name a host first"));
    }

    #[test]
    fn more_ways_than_a_program_can_have_are_refused() {
        let mut tree = paper_fat_tree(Rates::alike(1e9));
        let hosts: Vec<_> = tree.hosts().collect();
        let own = Job {
            name: "own".into(),
            workers: hosts.clone(),
            servers: hosts.clone(),
            sub_models: SubModel::divided(100, 10),
        };
        Workload::new(tree.clone(), vec![own.clone()]).expect("no switch sums");
        make_programmable(&mut tree, 0.2, 1000, 0);
        let refused = Workload::new(tree.clone(), vec![own.clone()]).expect_err("too many").to_string();
        assert!(refused.contains("name fewer servers"), "{refused}");
        let one = Job { servers: hosts[..1].into(), ..own };
        Workload::new(tree, vec![one]).expect("one server");
    }
}
