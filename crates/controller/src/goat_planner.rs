//! Who finds the plan of a GOAT job: which switch sums which part of the stream for whom (GOAT
//! §IV).
//!
//! It is made once a generation, when all ranks are here, for the tree that their ways form.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use fanin_plan::{
    GradientSchedule, Job, Link, Node, NodeId, NodeKind, Residence, SubModel as Part, Topology, Workload,
    slowest_link,
};
use fanin_protocol::control::{Admission, Planner, RATE_DEFAULT_BPS, Seats, SwitchTree};
use fanin_protocol::goat::{Plan, PlannedSum, number};
use fanin_wire::{AggregationNode, JobId, SubModel};

/// What links are planned to carry, whatever a rank says: numbers further apart are more than a
/// solver can work with.
const RATES_BPS: (u64, u64) = (1_000_000, 10_000_000_000_000);
/// Largest tree that is planned for: its switches times the places where it has ranks, as many
/// variables as the linear programs have. Larger ones than any cluster has would be solved for
/// minutes; their ranks' gradients are summed at the server.
const TREE_MAX: usize = 1 << 13;
/// Its draws decide between plans that are as good.
const SEED: u64 = 0;

/// A planner that knows of no job yet.
pub(crate) fn planner() -> Box<dyn Planner> {
    Box::<SlowestLink>::default()
}

/// Plans by the slowest link, with the aggregators that no other job has.
#[derive(Debug, Default)]
struct SlowestLink(Mutex<Aggregators>);

impl Planner for SlowestLink {
    fn plan(&self, admission: &Admission) -> Result<Seats, String> {
        Ok(self.found(admission)?.seats())
    }

    fn forget(&self, job: JobId) {
        lock(&self.0).forget(job);
    }
}

impl SlowestLink {
    /// Other jobs may be planned meanwhile.
    fn found<'a>(&self, admission: &'a Admission) -> Result<Plan<'a>, String> {
        let Admission { job, terms, tree, seats, .. } = admission;
        let mut plan = Plan::of(terms, tree, seats)?;
        let ends: BTreeSet<_> = tree.ranks.iter().map(|rank| (rank.switch, rank.rate_bps)).collect();
        if tree.switches.len() * ends.len() > TREE_MAX {
            return Ok(plan);
        }
        // Parts that are alike fill each gap that jobs have left; of others some may find none that
        // is long enough.
        let (longest, shortest) = (plan.fragments.iter().max(), plan.fragments.iter().min());
        let alike = longest.zip(shortest).is_some_and(|(longest, shortest)| longest - shortest <= 1);
        let step = longest.copied().filter(|_| alike).unwrap_or(1).max(1);
        let memories: Vec<u32> = {
            let aggregators = lock(&self.0);
            let room = |switch: usize| {
                let hop = tree.switches[switch].hop;
                let gaps = aggregators.free(hop.address, hop.aggregators).into_iter();
                gaps.map(|gap| (gap.end - gap.start) / step * step).sum::<u32>()
            };
            (0..tree.switches.len()).map(room).collect()
        };
        let workload = workload(tree, &memories, &plan.fragments).map_err(|error| error.to_string())?;
        plan.nodes = nodes(&slowest_link(&workload, Residence::Step, SEED).schedule, tree);
        give_room(&mut plan, tree, *job, &mut lock(&self.0));
        Ok(plan)
    }
}

/// Gives each planned sum its aggregators. One that finds none in a row goes to the server.
fn give_room(plan: &mut Plan<'_>, tree: &SwitchTree, job: JobId, aggregators: &mut Aggregators) {
    for (switch, its) in tree.switches.iter().enumerate() {
        for (part, count) in plan.fragments.iter().enumerate() {
            let assigned = |nodes: &&mut Vec<AggregationNode>| nodes[part] == number(switch);
            let workers = (0..).zip(&plan.nodes).filter(|(_, nodes)| nodes[part] == number(switch));
            let workers = workers.fold(0u128, |all, (rank, _)| all | 1 << rank);
            if workers == 0 {
                continue;
            }
            match aggregators.take(its.hop.address, its.hop.aggregators, job, *count) {
                Some(first_aggregator) => {
                    let sum = PlannedSum { workers, first_aggregator };
                    plan.sums[switch].insert(SubModel(part as u16), sum);
                }
                None => plan
                    .nodes
                    .iter_mut()
                    .filter(assigned)
                    .for_each(|nodes| nodes[part] = AggregationNode::SERVER),
            }
        }
    }
}

/// The aggregators of all switches that jobs have, by the switch's address: one that is started
/// again has the same.
#[derive(Debug, Default)]
struct Aggregators(BTreeMap<SocketAddr, Vec<(JobId, Range<u32>)>>);

impl Aggregators {
    /// Ranges of a switch that no job has.
    fn free(&self, switch: SocketAddr, all: u32) -> Vec<Range<u32>> {
        let mut taken: Vec<Range<u32>> =
            self.0.get(&switch).into_iter().flatten().map(|(_, range)| range.clone()).collect();
        taken.sort_unstable_by_key(|range| range.start);
        let (mut free, mut begin) = (Vec::new(), 0);
        for range in taken.into_iter().chain(std::iter::once(all..all)) {
            if begin < range.start.min(all) {
                free.push(begin..range.start.min(all));
            }
            begin = begin.max(range.end);
        }
        free
    }

    /// So many in a row, for a job.
    fn take(&mut self, switch: SocketAddr, all: u32, job: JobId, count: u32) -> Option<u32> {
        let free = self.free(switch, all);
        let first = free.iter().find(|range| range.end - range.start >= count)?.start;
        self.0.entry(switch).or_default().push((job, first..first + count));
        Some(first)
    }

    /// A job is over.
    fn forget(&mut self, job: JobId) {
        self.0.retain(|_, taken| {
            taken.retain(|(other, _)| *other != job);
            !taken.is_empty()
        });
    }
}

fn lock(aggregators: &Mutex<Aggregators>) -> MutexGuard<'_, Aggregators> {
    aggregators.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The tree as planners know it: its switches in their order, then the server, then the ranks.
fn workload(
    tree: &SwitchTree,
    memories: &[u32],
    fragments: &[u32],
) -> Result<Workload, Box<dyn std::error::Error>> {
    let host = |name: String| Node { name, kind: NodeKind::Host };
    let switch = |(at, memory): (usize, &u32)| Node {
        name: format!("switch {at}"),
        kind: NodeKind::Switch { memory_bytes: Some(u64::from(*memory)).filter(|memory| *memory > 0) },
    };
    let server = NodeId(tree.switches.len() as u16);
    let worker = |rank: usize| NodeId(server.0 + 1 + rank as u16);
    let nodes = memories.iter().enumerate().map(switch).chain([host("server".into())]);
    let nodes = nodes.chain((0..tree.ranks.len()).map(|rank| host(format!("rank {rank}"))));
    let end = |switch: Option<usize>| switch.map_or(server, |switch| NodeId(switch as u16));
    let link = |of: NodeId, to: Option<usize>, rate_bps: Option<u64>| Link {
        ends: [of, end(to)],
        rate_bps: rate_bps.unwrap_or(RATE_DEFAULT_BPS).clamp(RATES_BPS.0, RATES_BPS.1) as f64,
    };
    let of_switches = (0..).zip(&tree.switches);
    let of_switches = of_switches.map(|(at, of)| link(NodeId(at), of.upstream, of.hop.rate_bps));
    let of_ranks = tree.ranks.iter().enumerate();
    let of_ranks = of_ranks.map(|(rank, of)| link(worker(rank), of.switch, of.rate_bps));
    let topology = Topology::new(nodes.collect(), of_switches.chain(of_ranks).collect())?;
    // A fragment counts as a byte: aggregators hold one each, whatever its length.
    let part =
        |(at, fragments): (usize, &u32)| Part { name: format!("part {at}"), bytes: (*fragments).into() };
    let job = Job {
        name: "job".into(),
        workers: (0..tree.ranks.len()).map(worker).collect(),
        servers: vec![server],
        sub_models: fragments.iter().enumerate().map(part).collect(),
    };
    Ok(Workload::new(topology, vec![job])?)
}

/// Of each rank, where each part of its stream is summed.
fn nodes(schedule: &GradientSchedule, tree: &SwitchTree) -> Vec<Vec<AggregationNode>> {
    let job = &schedule.jobs()[0];
    let server = tree.switches.len();
    let of = |rank: usize, part: usize| match job.aggregation_nodes(part)[rank].index() {
        at if at == server => AggregationNode::SERVER,
        at => number(at),
    };
    let parts = 0..job.sub_models();
    (0..tree.ranks.len()).map(|rank| parts.clone().map(|part| of(rank, part)).collect()).collect()
}

#[cfg(test)]
mod tests;
