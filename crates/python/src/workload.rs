//! `Workload` and `participation`: GOAT's planner, as its paper's figures ask for it.

use std::collections::BTreeMap;

use fanin_plan::topologies::{Rates, paper_fat_tree, paper_leaf_spine, triangle};
use fanin_plan::{
    Convergence, GradientSchedule, Job, NodeId, Objective, Participation, Residence, SharedMemory, Sharing,
    SubModel, Topology, Traffic, Ways, at_servers, first_switches, krgs, slowest_link,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// A training on one of GOAT's topologies (§III-B, §VII), whose gradients can be planned for.
///
/// `topology` is `triangle` (workers `w1` and on, server `ps`, switches `s1` to `s3`), `leaf-spine`
/// or `fat-tree`; its links carry `rate_bps` each. `memory` names the switches that sum, each with
/// its bytes. The model of `size` bytes is cut into sub-models of at most `sub_model` bytes.
///
/// Raises `ValueError` for what is not there or cannot be planned for.
#[pyclass(frozen)]
pub(crate) struct Workload {
    workload: fanin_plan::Workload,
}

#[pymethods]
impl Workload {
    #[new]
    #[pyo3(signature = (topology, memory, workers, server, size, sub_model, rate_bps))]
    fn new(
        topology: &str,
        memory: BTreeMap<String, u64>,
        workers: Vec<String>,
        server: &str,
        size: u64,
        sub_model: u64,
        rate_bps: f64,
    ) -> PyResult<Self> {
        let rates = Rates::alike(rate_bps);
        let mut topology = match topology {
            // The memory is given below: one without any is none.
            "triangle" => triangle(workers.len(), 1, rates).map_err(refused)?,
            "leaf-spine" => paper_leaf_spine(rates),
            "fat-tree" => paper_fat_tree(rates),
            other => return Err(refused(format!("no topology {other}: triangle, leaf-spine or fat-tree"))),
        };
        let switches: Vec<_> = topology.switches().collect();
        for switch in switches {
            let bytes = memory.get(topology.name(switch)).copied();
            topology.set_memory_bytes(switch, bytes.filter(|bytes| *bytes > 0));
        }
        for name in memory.keys() {
            if !topology.switches().any(|switch| topology.name(switch) == name) {
                return Err(refused(format!("no switch {name} on this topology")));
            }
        }
        let workers = workers.iter().map(|name| node(&topology, name)).collect::<PyResult<_>>()?;
        let servers = vec![node(&topology, server)?];
        let sub_models = SubModel::divided(size, sub_model);
        let job = Job { name: "job".into(), workers, servers, sub_models };
        Ok(Self { workload: fanin_plan::Workload::new(topology, vec![job]).map_err(refused)? })
    }

    /// The plan of a planner: `krgs` (Eq. 4), `krgs-overhead` (Eq. 1), `slowest`, `first-switches`
    /// (ATP's placement) or `at-server` (Geryon).
    ///
    /// Returns `server_bytes`, `in_network_bytes` and `hop_bytes` of contributions; of
    /// `server_bytes`, the `direct_bytes` that no switch summed; `slowest_s`, what the slowest link
    /// takes; and the `nodes`: for each sub-model the name of each worker's aggregation node.
    fn plan<'py>(&self, py: Python<'py>, planner: &str, seed: u64) -> PyResult<Bound<'py, PyDict>> {
        let workload = &self.workload;
        let schedule = match planner {
            "krgs" => krgs(workload, Objective::Reduction, seed).schedule,
            "krgs-overhead" => krgs(workload, Objective::Overhead, seed).schedule,
            "slowest" => slowest_link(workload, Residence::Step, seed).schedule,
            "first-switches" => first_switches(workload, Residence::Step, 0.0),
            "at-server" => at_servers(workload),
            other => {
                let known = "krgs, krgs-overhead, slowest, first-switches or at-server";
                return Err(refused(format!("no planner {other}: {known}")));
            }
        };
        let answer = counted(py, schedule.traffic(workload, 0))?;
        answer.set_item("direct_bytes", self.direct_bytes(&schedule))?;
        answer.set_item("slowest_s", schedule.slowest(workload).seconds)?;
        let (job, topology) = (&schedule.jobs()[0], workload.topology());
        let names = |sub_model| job.aggregation_nodes(sub_model).iter().map(|node| topology.name(*node));
        let nodes = (0..job.sub_models()).map(|sub_model| names(sub_model).collect::<Vec<_>>());
        answer.set_item("nodes", nodes.collect::<Vec<_>>())?;
        Ok(answer)
    }

    /// The load of fragments of so many bytes on the network, if switches share their memory among
    /// them and contributions come in this order, as (worker, fragment).
    ///
    /// Without `priorities`, one a fragment, who came first keeps a unit (ATP); with them, who is
    /// more important takes it (ESA). `ways` is `tree`, one flow for all workers, or `each`;
    /// `drawn` chooses among equal ways.
    ///
    /// Returns `server_bytes`, `in_network_bytes` and `hop_bytes`.
    #[pyo3(signature = (arrivals, fragment_bytes, priorities, ways, drawn))]
    fn shared_memory<'py>(
        &self,
        py: Python<'py>,
        arrivals: Vec<(usize, usize)>,
        fragment_bytes: u64,
        priorities: Option<Vec<u64>>,
        ways: &str,
        drawn: u64,
    ) -> PyResult<Bound<'py, PyDict>> {
        let workers = self.workload.jobs()[0].workers.len();
        let fragments = priorities.as_ref().map_or(usize::MAX, Vec::len);
        if fragment_bytes == 0 {
            return Err(refused("a fragment of 0 bytes"));
        }
        if arrivals.iter().any(|(worker, fragment)| *worker >= workers || *fragment >= fragments) {
            return Err(refused("an arrival of a worker, or of a fragment, that is not there"));
        }
        let ways = match ways {
            "tree" => Ways::Tree(drawn),
            "each" => Ways::Each(drawn),
            other => return Err(refused(format!("no ways {other}: tree or each"))),
        };
        let sharing = priorities.as_deref().map_or(Sharing::FirstCome, Sharing::Preemptive);
        let shared = SharedMemory { fragment_bytes, sharing, ways };
        counted(py, py.detach(|| shared.traffic(&self.workload, 0, &arrivals)))
    }
}

impl Workload {
    fn direct_bytes(&self, schedule: &GradientSchedule) -> u64 {
        let (its, schedule) = (&self.workload.jobs()[0], &schedule.jobs()[0]);
        let parts = its.sub_models.iter().enumerate().map(|(sub_model, part)| {
            let root = schedule.root(sub_model);
            let direct = schedule.aggregation_nodes(sub_model).iter().filter(|node| **node == root);
            direct.count() as u64 * part.bytes
        });
        parts.sum()
    }
}

/// The workers that the next epoch waits for, by their places among the workers: GOAT's Algorithm
/// 2.
///
/// `intervals` are the seconds that each worker took last; `rounds` of epochs are played. `loss` is
/// how far the training is above its least loss, `variance` that of a worker's gradient, and
/// `square` the mean square of the gradient that is to be reached (Eq. 36).
///
/// Raises `ValueError` where nobody can be waited for.
#[pyfunction]
pub(crate) fn participation(
    intervals: Vec<f64>,
    rounds: usize,
    loss: f64,
    variance: f64,
    square: f64,
) -> PyResult<Vec<usize>> {
    let convergence =
        Convergence { loss_above_least: loss, gradient_variance: variance, gradient_square: square };
    Participation::of(&intervals, rounds, &convergence).map(|decided| decided.workers).map_err(refused)
}

fn counted(py: Python<'_>, traffic: Traffic) -> PyResult<Bound<'_, PyDict>> {
    let answer = PyDict::new(py);
    answer.set_item("server_bytes", traffic.server_bytes)?;
    answer.set_item("in_network_bytes", traffic.in_network_bytes)?;
    answer.set_item("hop_bytes", traffic.hop_bytes)?;
    Ok(answer)
}

fn node(topology: &Topology, name: &str) -> PyResult<NodeId> {
    topology.node(name).ok_or_else(|| refused(format!("no node {name} on this topology")))
}

fn refused(why: impl ToString) -> PyErr {
    PyValueError::new_err(why.to_string())
}
