//! A plan of GOAT: for each worker and sub-model the node that sums it, and what that makes links,
//! switches and servers carry.
//!
//! A contribution goes from its worker to its aggregation node. A switch adds what comes there and
//! sends one sum on to the sub-model's root, the server that finishes it. Results return the same
//! way. The root sends one to each switch, and to each worker that it sums for itself. Each switch
//! sends one to each of its workers. So a link carries as much in each direction as contributions
//! make it carry in both. [`GradientSchedule::link_bytes`] is that.
//!
//! A plan of this kind cannot say three things. The first is a sum of sums on the way: a switch
//! adds for its workers alone, so racks, then pods, then the root are not one plan. The second is a
//! ring's order of neighbours; its load equals one server's beside each worker. The third is a
//! sub-model that a worker sends to two nodes, in parts.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fmt;

use crate::sub_models::Workload;
use crate::topology::{NodeId, Topology};

/// How long a fragment needs room in a switch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Residence {
    /// For the whole step, however late workers are: a switch has room for all gradients of its
    /// sub-models (GOAT Eq. 1).
    Step,
    /// For so many seconds, a round trip and by how much workers are late: by Little's law a switch
    /// has room for what passes in that time.
    Seconds(f64),
}

impl Residence {
    /// Which part of the gradients that pass in a step is in the switch at a time.
    #[must_use]
    pub fn part(self, step_s: f64) -> f64 {
        match self {
            Self::Step => 1.0,
            // A step of no time has nothing that passes.
            Self::Seconds(seconds) if step_s > seconds => seconds / step_s,
            Self::Seconds(_) => 1.0,
        }
    }
}

/// The places where the gradients of one job are summed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobSchedule {
    /// The node that finishes each sub-model's sum.
    roots: Vec<NodeId>,
    /// The destination of each worker's part of it, by (sub-model, worker).
    aggregation_nodes: Vec<NodeId>,
}

impl JobSchedule {
    /// Takes the roots of the sub-models, and an aggregation node for each worker of the first
    /// sub-model, of the second, and so on.
    ///
    /// # Panics
    /// When the second is no multiple of the first.
    #[must_use]
    pub fn new(roots: Vec<NodeId>, aggregation_nodes: Vec<NodeId>) -> Self {
        assert!(!roots.is_empty() && aggregation_nodes.len().is_multiple_of(roots.len()));
        Self { roots, aggregation_nodes }
    }

    /// Everything goes to one server.
    #[must_use]
    pub fn at_server(workers: usize, sub_models: usize, server: NodeId) -> Self {
        Self::new(vec![server; sub_models], vec![server; workers * sub_models])
    }

    /// How many sub-models there are.
    #[must_use]
    pub fn sub_models(&self) -> usize {
        self.roots.len()
    }

    /// How many workers there are.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.aggregation_nodes.len() / self.roots.len()
    }

    /// The node that finishes a sub-model's sum.
    #[must_use]
    pub fn root(&self, sub_model: usize) -> NodeId {
        self.roots[sub_model]
    }

    /// The destination of each worker's part of a sub-model.
    #[must_use]
    pub fn aggregation_nodes(&self, sub_model: usize) -> &[NodeId] {
        let workers = self.workers();
        &self.aggregation_nodes[sub_model * workers..(sub_model + 1) * workers]
    }

    /// Sends a worker's part of a sub-model elsewhere.
    pub fn assign(&mut self, worker: usize, sub_model: usize, node: NodeId) {
        let workers = self.workers();
        self.aggregation_nodes[sub_model * workers + worker] = node;
    }

    /// Lets another server finish a sub-model's sum. A worker that sent its part to the old root
    /// still does.
    pub fn finish(&mut self, sub_model: usize, root: NodeId) {
        self.roots[sub_model] = root;
    }

    /// A sub-model's root and aggregation nodes.
    pub(crate) fn clone_of(&self, sub_model: usize) -> (NodeId, Vec<NodeId>) {
        (self.root(sub_model), self.aggregation_nodes(sub_model).to_vec())
    }

    pub(crate) fn replace(&mut self, sub_model: usize, (root, nodes): &(NodeId, Vec<NodeId>)) {
        let workers = self.workers();
        self.roots[sub_model] = *root;
        self.aggregation_nodes[sub_model * workers..(sub_model + 1) * workers].copy_from_slice(nodes);
    }

    /// `S(g)`: who sums a sub-model before its root does, each with the number of its workers.
    #[must_use]
    pub fn fan_in(&self, sub_model: usize) -> BTreeMap<NodeId, usize> {
        let mut counts = BTreeMap::new();
        for node in self.aggregation_nodes(sub_model) {
            if *node != self.root(sub_model) {
                *counts.entry(*node).or_insert(0) += 1;
            }
        }
        counts
    }

    /// The nodes with room for a sub-model, if every node that sums it needs some: those before its
    /// root, and the root.
    fn holders(&self, sub_model: usize) -> BTreeSet<NodeId> {
        let mut holders: BTreeSet<_> = self.aggregation_nodes(sub_model).iter().copied().collect();
        holders.insert(self.root(sub_model));
        holders
    }
}

/// The load of a job's gradients on the network in one step (GOAT §VII-A). Contributions alone:
/// results come back as they went.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Traffic {
    /// Aggregation overhead of the server: bytes that reach it.
    pub server_bytes: u64,
    /// In-network aggregation amount: bytes that workers send and that do not reach it.
    pub in_network_bytes: u64,
    /// Communication overhead: bytes times links that they pass.
    pub hop_bytes: u64,
}

/// The link that everybody waits for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlowestLink {
    /// Its index in the topology; none where nothing crosses a link.
    pub link: Option<usize>,
    /// How long it takes with what it carries in a step.
    pub seconds: f64,
}

/// The places where the gradients of all jobs of a workload are summed, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientSchedule {
    jobs: Vec<JobSchedule>,
}

impl GradientSchedule {
    /// Checks a plan.
    ///
    /// # Errors
    /// When it does not have this workload's shape, or needs more memory than a switch has. When it
    /// sends something to a node that cannot sum it or cannot be reached.
    pub fn new(
        workload: &Workload,
        jobs: Vec<JobSchedule>,
        residence: Residence,
    ) -> Result<Self, ScheduleError> {
        if jobs.len() != workload.jobs().len() {
            return Err(ScheduleError::Shape { job: None });
        }
        let topology = workload.topology();
        for (job, schedule) in workload.jobs().iter().zip(&jobs) {
            if schedule.sub_models() != job.sub_models.len() || schedule.workers() != job.workers.len() {
                return Err(ScheduleError::Shape { job: Some(job.name.clone()) });
            }
            for (sub_model, its) in job.sub_models.iter().enumerate() {
                let root = schedule.root(sub_model);
                let foreign = |node: NodeId| ScheduleError::CannotSum {
                    job: job.name.clone(),
                    sub_model: its.name.clone(),
                    node: name_of(topology, node),
                };
                if !job.servers.contains(&root) {
                    return Err(foreign(root));
                }
                for (worker, node) in job.workers.iter().zip(schedule.aggregation_nodes(sub_model)) {
                    let known = node.index() < topology.nodes().len();
                    if *node != root && (!known || topology.memory_bytes(*node).is_none()) {
                        return Err(foreign(*node));
                    }
                    for (from, to) in [(*worker, *node), (*node, root)] {
                        if topology.distance(from, to).is_none() {
                            let [from, to] = [from, to].map(|end| name_of(topology, end));
                            return Err(ScheduleError::NoWay { job: job.name.clone(), from, to });
                        }
                    }
                }
            }
        }
        let schedule = Self { jobs };
        let step_s = schedule.slowest(workload).seconds;
        let part = residence.part(step_s);
        for (node, held_bytes) in schedule.held_bytes(workload) {
            let (need, have) =
                ((held_bytes as f64 * part).ceil() as u64, topology.memory_bytes(node).unwrap_or(0));
            if need > have {
                return Err(ScheduleError::Memory { switch: name_of(topology, node), need, have });
            }
        }
        Ok(schedule)
    }

    /// A schedule for each job, in the workload's order.
    #[must_use]
    pub fn jobs(&self) -> &[JobSchedule] {
        &self.jobs
    }

    /// Bytes of gradients that pass each switch which sums some.
    #[must_use]
    pub fn held_bytes(&self, workload: &Workload) -> BTreeMap<NodeId, u64> {
        let mut held = BTreeMap::new();
        for (job, schedule) in workload.jobs().iter().zip(&self.jobs) {
            for (sub_model, its) in job.sub_models.iter().enumerate() {
                for node in schedule.holders(sub_model) {
                    if !workload.topology().is_host(node) {
                        *held.entry(node).or_insert(0) += its.bytes;
                    }
                }
            }
        }
        held
    }

    /// Bytes that one job makes each link carry in each direction: contributions in both, as
    /// results go the other way.
    #[must_use]
    pub fn job_link_bytes(&self, workload: &Workload, job: usize) -> Vec<f64> {
        let mut bytes = vec![0.0; workload.topology().links().len()];
        for ((from, to), sent) in self.sent(workload, job) {
            for (link, part) in workload.topology().spread(from, to) {
                bytes[link] += part * sent as f64;
            }
        }
        bytes
    }

    /// Bytes that all jobs together make each link carry in each direction.
    #[must_use]
    pub fn link_bytes(&self, workload: &Workload) -> Vec<f64> {
        let mut all = vec![0.0; workload.topology().links().len()];
        for job in 0..self.jobs.len() {
            for (sum, bytes) in all.iter_mut().zip(self.job_link_bytes(workload, job)) {
                *sum += bytes;
            }
        }
        all
    }

    /// The link that takes longest with what all jobs make it carry.
    #[must_use]
    pub fn slowest(&self, workload: &Workload) -> SlowestLink {
        slowest(workload.topology(), &self.link_bytes(workload), |_| true)
    }

    /// The one that takes longest of those that a job uses: what the job waits for.
    #[must_use]
    pub fn slowest_of_job(&self, workload: &Workload, job: usize) -> SlowestLink {
        let own = self.job_link_bytes(workload, job);
        slowest(workload.topology(), &self.link_bytes(workload), |link| own[link] > 0.0)
    }

    /// The load of a job's gradients on the network.
    #[must_use]
    pub fn traffic(&self, workload: &Workload, job: usize) -> Traffic {
        let (its, schedule) = (&workload.jobs()[job], &self.jobs[job]);
        let mut traffic = Traffic::default();
        for ((from, to), bytes) in self.sent(workload, job) {
            let hops = workload.topology().distance(from, to).expect("checked when it was made");
            traffic.hop_bytes += u64::from(hops) * bytes;
        }
        for (sub_model, part) in its.sub_models.iter().enumerate() {
            let root = schedule.root(sub_model);
            let nodes = schedule.aggregation_nodes(sub_model);
            let sending = its.workers.iter().zip(nodes).filter(|(worker, _)| **worker != root);
            let direct = sending.clone().filter(|(_, node)| **node == root).count();
            let reach = (direct + schedule.fan_in(sub_model).len()) as u64;
            traffic.server_bytes += reach * part.bytes;
            traffic.in_network_bytes += (sending.count() as u64).saturating_sub(reach) * part.bytes;
        }
        traffic
    }

    /// Bytes by where they go from and to.
    fn sent(&self, workload: &Workload, job: usize) -> BTreeMap<(NodeId, NodeId), u64> {
        let (its, schedule) = (&workload.jobs()[job], &self.jobs[job]);
        let mut sent = BTreeMap::new();
        for (sub_model, part) in its.sub_models.iter().enumerate() {
            let root = schedule.root(sub_model);
            for (worker, node) in its.workers.iter().zip(schedule.aggregation_nodes(sub_model)) {
                *sent.entry((*worker, *node)).or_insert(0) += part.bytes;
            }
            for node in schedule.fan_in(sub_model).into_keys() {
                *sent.entry((node, root)).or_insert(0) += part.bytes;
            }
        }
        sent
    }
}

fn slowest(topology: &Topology, bytes: &[f64], counts: impl Fn(usize) -> bool) -> SlowestLink {
    let mut slowest = SlowestLink { link: None, seconds: 0.0 };
    for (link, (its, bytes)) in topology.links().iter().zip(bytes).enumerate() {
        let seconds = bytes * 8.0 / its.rate_bps;
        if seconds > slowest.seconds && counts(link) {
            slowest = SlowestLink { link: Some(link), seconds };
        }
    }
    slowest
}

fn name_of(topology: &Topology, node: NodeId) -> String {
    topology.nodes().get(node.index()).map_or_else(|| format!("node {}", node.0), |node| node.name.clone())
}

/// Why a plan is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScheduleError {
    /// It is for other jobs, or for a job with other workers or sub-models.
    Shape {
        /// That one.
        job: Option<String>,
    },
    /// A sub-model is to be summed by who cannot, or finished by who is none of the job's servers.
    CannotSum {
        /// Of this job.
        job: String,
        /// The sub-model.
        sub_model: String,
        /// Who cannot.
        node: String,
    },
    /// No way leads to an aggregation node, or from it to a root.
    NoWay {
        /// Of this job.
        job: String,
        /// The node at which it would begin.
        from: String,
        /// The node at which it would end.
        to: String,
    },
    /// A switch is to hold more than it can.
    Memory {
        /// This one.
        switch: String,
        /// Bytes that it needs.
        need: u64,
        /// Bytes that it has.
        have: u64,
    },
}

impl fmt::Display for ScheduleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shape { job: None } => f.write_str("the plan is for another number of jobs: plan again"),
            Self::Shape { job: Some(job) } => {
                write!(f, "job {job}: the plan is for other workers or sub-models: plan again")
            }
            Self::CannotSum { job, sub_model, node } => write!(
                f,
                "job {job}: {node} cannot sum sub-model {sub_model}: take a programmable switch, or a server of the job"
            ),
            Self::NoWay { job, from, to } => {
                write!(f, "job {job}: no way leads from {from} to {to}: plan again for what is left")
            }
            Self::Memory { switch, need, have } => {
                write!(
                    f,
                    "switch {switch} would hold {need} bytes and has {have}: move sub-models to the server"
                )
            }
        }
    }
}

impl Error for ScheduleError {}

#[cfg(test)]
mod tests;
