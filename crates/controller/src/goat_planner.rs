//! Who finds the plan of a GOAT job: which switch sums which part of the stream for whom (GOAT
//! §IV).
//!
//! It is made once a generation, when all ranks are here, for the tree that their ways form.
//!
//! Jobs share the memory of switches: where it does not suffice for all, each has as much as any
//! other one. So when a job comes or goes, others may be planned anew.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use fanin_plan::{
    GradientSchedule, Job, Link, Node, NodeId, NodeKind, Residence, SubModel as Part, Topology, Workload,
    slowest_link,
};
use fanin_protocol::control::{Admission, Planner, RATE_DEFAULT_BPS, Seats, SwitchTree, TreeSwitch};
use fanin_protocol::goat::{Load, Onward, Plan, PlannedSum, number, sum_on_the_way, sums_of};
use fanin_wire::{AggregationNode, JobId, SubModel};

use self::aggregators::Aggregators;

mod aggregators;

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

/// Plans by the slowest link, with a job's share of the aggregators.
#[derive(Debug, Default)]
struct SlowestLink(Mutex<Aggregators>);

impl Planner for SlowestLink {
    fn plan(&self, admission: &Admission) -> Result<Seats, String> {
        Ok(self.found(admission)?.seats())
    }

    fn forget(&self, job: JobId) {
        lock(&self.0).forget(job);
    }

    fn unsettled(&self) -> Vec<JobId> {
        lock(&self.0).unsettled()
    }
}

impl SlowestLink {
    /// Other jobs may be planned meanwhile.
    fn found<'a>(&self, admission: &'a Admission) -> Result<Plan<'a>, String> {
        let Admission { job, terms, tree, seats, .. } = admission;
        let plan = Plan::of(terms, tree, seats)?;
        let ends: BTreeSet<_> = tree.ranks.iter().map(|rank| (rank.switch, rank.rate_bps)).collect();
        if tree.switches.len() * ends.len() > TREE_MAX {
            return Ok(plan);
        }
        let all = plan.fragments.iter().sum();
        let offered = lock(&self.0).offer(*job, tree, all);
        let mut plan = plan.for_memories(terms, &offered);
        // Parts that are alike fill the gap that jobs have left, or nearly all of several gaps; of
        // others some may find none that is long enough.
        let (longest, shortest) = (plan.fragments.iter().max(), plan.fragments.iter().min());
        let alike = longest.zip(shortest).is_some_and(|(longest, shortest)| longest - shortest <= 1);
        let step = longest.copied().filter(|_| alike).unwrap_or(1).max(1);
        let memories: Vec<u32> = {
            let aggregators = lock(&self.0);
            let room = |(switch, offered): (&TreeSwitch, &u32)| {
                let gaps = aggregators.free(switch.hop, None);
                let step = if gaps.len() == 1 { 1 } else { step };
                let room = gaps.iter().map(|gap| (gap.end - gap.start) / step * step).sum::<u32>();
                room.min(*offered)
            };
            tree.switches.iter().zip(&offered).map(room).collect()
        };
        let workload = workload(tree, &memories, &plan.fragments).map_err(|error| error.to_string())?;
        let by_links = nodes(&slowest_link(&workload, Residence::Step, SEED).schedule, tree);
        // The search knows nothing of sums of sums, and the other plan nothing of links.
        let starts = [std::mem::take(&mut plan.nodes), by_links];
        let plans = starts.map(|nodes| Found::after(tree, nodes, &plan.fragments, &memories));
        let [on_the_way, by_links] = plans;
        let found = if by_links.is_faster(&on_the_way) { by_links } else { on_the_way };
        (plan.nodes, plan.onward) = (found.nodes, found.onward);
        let mut aggregators = lock(&self.0);
        give_room(&mut plan, tree, *job, &mut aggregators)?;
        aggregators.settle(*job, tree, &memories, alike.then_some(step));
        Ok(plan)
    }
}

/// Who sums what, and where the sums go.
struct Found<'a> {
    nodes: Vec<Vec<AggregationNode>>,
    onward: Vec<Onward>,
    load: Load<'a>,
}

impl<'a> Found<'a> {
    /// What follows from a plan in which sums go to the server: with the memory that it leaves, they
    /// are added on their way. A sum of a single rank is none.
    fn after(
        tree: &'a SwitchTree,
        mut nodes: Vec<Vec<AggregationNode>>,
        fragments: &[u32],
        memories: &[u32],
    ) -> Self {
        let (mut room, mut load) = (memories.to_vec(), Load::new(tree));
        for (part, fragments) in fragments.iter().enumerate() {
            for (switch, room) in room.iter_mut().enumerate() {
                let mut summed: Vec<_> = nodes
                    .iter_mut()
                    .map(|own| &mut own[part])
                    .filter(|node| **node == number(switch))
                    .collect();
                match &mut summed[..] {
                    [] => {}
                    [alone] => **alone = AggregationNode::SERVER,
                    _ => *room = room.saturating_sub(*fragments),
                }
            }
        }
        let of_part = |(part, fragments): (usize, &u32)| {
            let mut of_part: Vec<AggregationNode> = nodes.iter().map(|own| own[part]).collect();
            let onward = sum_on_the_way(tree, &mut of_part, |switch| {
                // No link is spared to an upstream on its machine.
                if tree.switches[switch].hop.rate_bps == Some(u64::MAX) {
                    return false;
                }
                let left = room[switch].checked_sub(*fragments);
                room[switch] = left.unwrap_or(room[switch]);
                left.is_some()
            });
            nodes.iter_mut().zip(&of_part).for_each(|(own, node)| own[part] = *node);
            load.add(&of_part, &onward, *fragments);
            onward
        };
        let onward = fragments.iter().enumerate().map(of_part).collect();
        Self { nodes, onward, load }
    }

    /// Whether its slowest link takes less time, or as much and the next slowest less, and so on.
    fn is_faster(&self, other: &Self) -> bool {
        self.load.seconds() < other.load.seconds()
    }
}

/// Gives each planned sum its aggregators. What was to be added where none are left in a row is added
/// where its sum was to go.
fn give_room(
    plan: &mut Plan<'_>,
    tree: &SwitchTree,
    job: JobId,
    aggregators: &mut Aggregators,
) -> Result<(), String> {
    for (part, count) in plan.fragments.iter().enumerate() {
        let onward = &mut plan.onward[part];
        let sums = |nodes: &[Vec<AggregationNode>], onward: &Onward| {
            sums_of(nodes.iter().map(|own| own[part]), onward).map_err(|error| error.to_string())
        };
        let planned = sums(&plan.nodes, onward)?;
        let mut first = BTreeMap::new();
        // A switch stands behind the one above it, which has its room by then, or none.
        for (switch, its) in tree.switches.iter().enumerate() {
            let node = number(switch);
            if !planned.contains_key(&node) {
                continue;
            }
            match aggregators.take(its.hop, job, *count) {
                Some(first_aggregator) => {
                    first.insert(node, first_aggregator);
                }
                None => {
                    let to = onward.remove(&node).unwrap_or(AggregationNode::SERVER);
                    let to_it = |other: &&mut AggregationNode| **other == node;
                    plan.nodes.iter_mut().map(|own| &mut own[part]).filter(to_it).for_each(|own| *own = to);
                    onward.values_mut().filter(to_it).for_each(|other| *other = to);
                }
            }
        }
        onward.retain(|_, to| *to != AggregationNode::SERVER);
        for (node, sum) in sums(&plan.nodes, onward)? {
            if let Some(first_aggregator) = first.get(&node) {
                let sum = PlannedSum { first_aggregator: *first_aggregator, ..sum };
                plan.sums[usize::from(node.0) - 1].insert(SubModel(part as u16), sum);
            }
        }
    }
    Ok(())
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
