//! Plans of other systems for a workload, of the same kind as ours: Geryon, ATP, BytePS.

use crate::cluster::{Cluster, Machine};
use crate::gradient_schedule::{GradientSchedule, JobSchedule, Residence};
use crate::load_split::LoadSplit;
use crate::sub_models::{Job, Workload};
use crate::topology::NodeId;

/// Geryon, and a parameter server without switches that sum: all gradients go to the job's first
/// server by shortest ways.
#[must_use]
pub fn at_servers(workload: &Workload) -> GradientSchedule {
    let jobs = workload.jobs().iter();
    let jobs = jobs.map(|job| JobSchedule::at_server(job.workers.len(), job.sub_models.len(), job.server()));
    GradientSchedule::new(workload, jobs.collect(), Residence::Step).expect("a server needs no memory")
}

/// ATP's placement, as GOAT §VII-A has it. A worker's gradients go to the first server by a
/// shortest way, and the first programmable switch on it with room for the sub-model sums them.
/// Each worker is a flow. `step_s` is the least time of a step; the room depends on it if fragments
/// do not stay for the whole step.
#[must_use]
pub fn first_switches(workload: &Workload, residence: Residence, step_s: f64) -> GradientSchedule {
    let topology = workload.topology();
    let part = residence.part(step_s);
    let mut left: Vec<_> =
        topology.ids().map(|node| topology.memory_bytes(node).unwrap_or(0) as f64 / part).collect();
    let mut jobs = Vec::new();
    for job in workload.jobs() {
        let mut schedule = JobSchedule::at_server(job.workers.len(), job.sub_models.len(), job.server());
        let ways: Vec<_> = job
            .workers
            .iter()
            .enumerate()
            .map(|(flow, worker)| topology.route(*worker, job.server(), flow as u64))
            .collect();
        for (sub_model, its) in job.sub_models.iter().enumerate() {
            let bytes = its.bytes as f64;
            for (worker, way) in ways.iter().enumerate() {
                let holders = schedule.fan_in(sub_model);
                let first = way.iter().map(|(node, _)| *node).find(|node| {
                    let sums = topology.memory_bytes(*node).is_some();
                    sums && (holders.contains_key(node) || left[node.index()] >= bytes)
                });
                if let Some(node) = first {
                    if !holders.contains_key(&node) {
                        left[node.index()] -= bytes;
                    }
                    schedule.assign(worker, sub_model, node);
                }
            }
        }
        jobs.push(schedule);
    }
    GradientSchedule::new(workload, jobs, residence).expect("it fits into what a step leaves free")
}

/// BytePS' split over each job's servers, by their links alone: no switch sums before them. A
/// sub-model is one server's, so that shares are met as well as sub-models let them be. None where
/// a job's server is a switch without room for that.
#[must_use]
pub fn byteps(workload: &Workload, residence: Residence) -> Option<GradientSchedule> {
    let of_job = |job: &Job| {
        let mut machines: Vec<NodeId> = job.workers.clone();
        machines.extend(job.servers.iter().filter(|server| !job.workers.contains(server)));
        let described = machines.iter().map(|node| {
            let rates = workload.topology().neighbours(*node).iter();
            let rate_bps = rates.map(|(_, link)| workload.topology().links()[*link].rate_bps).sum();
            Machine {
                trains: job.workers.contains(node),
                sums: job.servers.contains(node),
                ..Machine::training(workload.topology().name(*node), rate_bps)
            }
        });
        let split = LoadSplit::of(&Cluster::new(described.collect()).expect("a job trains and has servers"));
        let mut owed: Vec<_> = split.shares.iter().map(|share| share * job.bytes() as f64).collect();
        let mut order: Vec<usize> = (0..job.sub_models.len()).collect();
        order.sort_by_key(|sub_model| std::cmp::Reverse(job.sub_models[*sub_model].bytes));
        let mut roots = vec![job.server(); job.sub_models.len()];
        for sub_model in order {
            let sums = (0..machines.len()).filter(|machine| job.servers.contains(&machines[*machine]));
            let most = sums.max_by(|a, b| owed[*a].total_cmp(&owed[*b]).then(b.cmp(a)));
            let machine = most.expect("a job has servers");
            owed[machine] -= job.sub_models[sub_model].bytes as f64;
            roots[sub_model] = machines[machine];
        }
        let nodes = roots.iter().flat_map(|root| vec![*root; job.workers.len()]).collect();
        JobSchedule::new(roots, nodes)
    };
    GradientSchedule::new(workload, workload.jobs().iter().map(of_job).collect(), residence).ok()
}
