//! The plan of a GOAT job: which switch sums which part of the stream for whom, and what each machine is told of it (GOAT §III-D, §IV).
//!
//! It is made once a generation, when all ranks are here, for the tree that their ways form. Fragments go up and down that tree: where a plan sends one to a switch that
//! is not on its worker's way, the switch where both ways meet sends it down. So every machine speaks with its neighbours alone.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use fanin_plan::{
    GradientSchedule, Job, Link, Node, NodeId, NodeKind, Residence, SubModel as Part, Topology, Workload,
    slowest_link,
};
use fanin_protocol::control::{Admission, RATE_DEFAULT_BPS, SwitchTree};
use fanin_protocol::goat::{GoatJobConfig, GoatServerJob, PlannedSum, ServerPlan, SubModels};
use fanin_udp::Peer;
use fanin_wire::{AggregationNode, JobId, Rank, SubModel};

use crate::convert::goat_job;
use crate::proto;

/// Equal parts that an endless stream is cut into, where it has as many fragments: fine enough to balance links by.
const EQUAL_PARTS: u32 = 32;
/// What links are planned to carry, whatever a rank says: numbers further apart are more than a solver can work with.
const RATES_BPS: (u64, u64) = (1_000_000, 10_000_000_000_000);
/// Largest tree that is planned for: its switches times the places where it has ranks, as many variables as the linear programs have. Larger ones than any cluster has would
/// be solved for minutes; their ranks' gradients are summed at the server.
const TREE_MAX: usize = 1 << 13;
/// Its draws decide between plans that are as good.
const SEED: u64 = 0;

/// The aggregators of all switches that jobs have, by the switch's address: one that is started again has the same.
#[derive(Debug, Default)]
pub(super) struct Aggregators(BTreeMap<SocketAddr, Vec<(JobId, Range<u32>)>>);

/// A job's plan, and what each of its machines is told of it.
#[derive(Debug)]
pub(super) struct GoatPlan {
    config: GoatJobConfig,
    resumed: bool,
    tree: SwitchTree,
    sub_models: SubModels,
    /// Fragments of each.
    fragments: Vec<u32>,
    /// Of each rank, by part.
    nodes: Vec<Vec<AggregationNode>>,
    /// Of each switch of the tree.
    sums: Vec<BTreeMap<SubModel, PlannedSum>>,
}

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
    pub fn forget(&mut self, job: JobId) {
        self.0.retain(|_, taken| {
            taken.retain(|(other, _)| *other != job);
            !taken.is_empty()
        });
    }
}

impl GoatPlan {
    /// Plans for a job that all ranks have joined, with the aggregators that no other job has. Other jobs have theirs meanwhile.
    ///
    /// # Errors
    /// When there can be no plan: the job has more parts or ranks than are planned for.
    pub fn new(
        admission: &Admission,
        tree: &SwitchTree,
        aggregators: &Mutex<Aggregators>,
    ) -> io::Result<Self> {
        let mut plan = Self::at_the_server(admission, tree)?;
        let ends: BTreeSet<_> = tree.ranks.iter().map(|rank| (rank.switch, rank.rate_bps)).collect();
        if tree.switches.len() * ends.len() > TREE_MAX {
            return Ok(plan);
        }
        // Equal parts fill each gap that jobs have left; of others some may find none that is long enough.
        let longest = plan.fragments.iter().copied().max().unwrap_or(1);
        let step = if admission.sub_models.is_empty() { longest } else { 1 };
        let memories: Vec<u32> = {
            let aggregators = lock(aggregators);
            let room = |switch: usize| {
                let hop = tree.switches[switch].hop;
                let gaps = aggregators.free(hop.address, hop.aggregators).into_iter();
                gaps.map(|gap| (gap.end - gap.start) / step * step).sum::<u32>()
            };
            (0..tree.switches.len()).map(room).collect()
        };
        let workload = workload(tree, &memories, &plan.fragments).map_err(|error| invalid(&*error))?;
        plan.nodes = nodes(&slowest_link(&workload, Residence::Step, SEED).schedule, tree);
        plan.give_room(&mut lock(aggregators));
        Ok(plan)
    }

    /// Plans that no switch sums anything.
    ///
    /// # Errors
    /// When the job has more parts or ranks than there may be.
    pub fn at_the_server(admission: &Admission, tree: &SwitchTree) -> io::Result<Self> {
        let fragments = match &admission.sub_models[..] {
            [] => equal_parts(admission.in_flight),
            named => named.iter().map(|part| part.div_ceil(admission.elements.into()) as u32).collect(),
        };
        let sub_models = SubModels::new(&fragments).map_err(|error| invalid(&error))?;
        let who = (admission.job, admission.key, admission.generation);
        let config = goat_job(who, admission.world_size, (admission.in_flight, admission.elements));
        config.check(&sub_models).map_err(|error| invalid(&error))?;
        Ok(Self {
            config,
            resumed: admission.resumed,
            tree: tree.clone(),
            sub_models,
            nodes: vec![vec![AggregationNode::SERVER; fragments.len()]; tree.ranks.len()],
            sums: vec![BTreeMap::new(); tree.switches.len()],
            fragments,
        })
    }

    /// Gives each planned sum its aggregators. One that finds none in a row goes to the server.
    fn give_room(&mut self, aggregators: &mut Aggregators) {
        for (switch, its) in self.tree.switches.iter().enumerate() {
            for (part, count) in self.fragments.iter().enumerate() {
                let assigned = |nodes: &&mut Vec<AggregationNode>| nodes[part] == number(switch);
                let workers = (0..).zip(&self.nodes).filter(|(_, nodes)| nodes[part] == number(switch));
                let workers = workers.fold(0u128, |all, (rank, _)| all | 1 << rank);
                if workers == 0 {
                    continue;
                }
                let job = self.config.id;
                match aggregators.take(its.hop.address, its.hop.aggregators, job, *count) {
                    Some(first_aggregator) => {
                        let sum = PlannedSum { workers, first_aggregator };
                        self.sums[switch].insert(SubModel(part as u16), sum);
                    }
                    None => self
                        .nodes
                        .iter_mut()
                        .filter(assigned)
                        .for_each(|nodes| nodes[part] = AggregationNode::SERVER),
                }
            }
        }
    }

    /// What a rank is told.
    pub fn assignment(&self, rank: usize) -> proto::admission::Goat {
        proto::admission::Goat {
            window: self.config.window_max.into(),
            elements: self.config.elements.into(),
            sub_models: self.fragments.clone(),
            nodes: self.nodes[rank].iter().map(|node| node.0.into()).collect(),
        }
    }

    /// What the switches on a rank's way are told.
    pub fn route(&self, rank: Rank) -> proto::route::Goat {
        let switches = self.tree.way(rank).into_iter().map(|switch| self.told(switch));
        proto::route::Goat {
            window: self.config.window_max.into(),
            elements: self.config.elements.into(),
            sub_models: self.fragments.clone(),
            switches: switches.collect(),
        }
    }

    fn told(&self, switch: usize) -> proto::PlannedSwitch {
        let below =
            |upstream| (0..).zip(&self.tree.switches).filter(move |(_, of)| of.upstream == Some(upstream));
        // Down to where it is below, else up.
        let towards = |node: usize| {
            let mut at = node;
            while let Some(upstream) = self.tree.switches[at].upstream {
                if upstream == switch {
                    return self.tree.switches[at].hop.address.to_string();
                }
                at = upstream;
            }
            String::new()
        };
        let summing = (0..self.sums.len()).filter(|other| *other != switch && !self.sums[*other].is_empty());
        let own = (0..).zip(&self.tree.ranks).filter(|(_, rank)| rank.switch == Some(switch));
        let sum = |(sub_model, sum): (&SubModel, &PlannedSum)| proto::PlannedSum {
            sub_model: sub_model.0.into(),
            workers: sum.workers.to_le_bytes().into(),
            first_aggregator: sum.first_aggregator,
        };
        proto::PlannedSwitch {
            node: number(switch).0.into(),
            next_hops: summing
                .map(|node| proto::NextHop { node: number(node).0.into(), to: towards(node) })
                .collect(),
            below: below(switch).map(|(_, of): (usize, _)| of.hop.address.to_string()).collect(),
            own: own.fold(0u128, |all, (rank, _)| all | 1 << rank).to_le_bytes().into(),
            sums: self.sums[switch].iter().map(sum).collect(),
        }
    }

    /// What the server is told, which names its neighbours as `peer` does.
    pub fn server_job(
        &self,
        peer: impl Fn(SocketAddr) -> io::Result<Peer>,
    ) -> io::Result<GoatServerJob<Peer>> {
        let next_to_it: Vec<usize> =
            (0..self.tree.switches.len()).filter(|of| self.tree.switches[*of].upstream.is_none()).collect();
        let children = next_to_it.iter().map(|switch| peer(self.tree.switches[*switch].hop.address));
        let mut own = next_to_it.len() as u16;
        let way = |rank: usize| match self.tree.way(Rank(rank as u16)).first() {
            Some(first) => next_to_it.iter().position(|switch| switch == first).unwrap_or(0) as u16,
            None => {
                own += 1;
                own - 1
            }
        };
        let plan = ServerPlan {
            sub_models: self.sub_models.clone(),
            nodes: self.nodes.clone(),
            children: children.collect::<io::Result<_>>()?,
            ways: (0..self.nodes.len()).map(way).collect(),
        };
        Ok(GoatServerJob { config: self.config, plan, restored: self.resumed })
    }

    /// Which part of all ranks' fragments each switch sums; what is left is the server's.
    pub fn shares(&self) -> Vec<proto::PlannedShare> {
        let all = f64::from(self.sub_models.fragments()) * self.nodes.len() as f64;
        let of = |(switch, sums): (usize, &BTreeMap<SubModel, PlannedSum>)| {
            let fragments = |(part, _): &(&SubModel, &PlannedSum)| self.fragments[usize::from(part.0)];
            let summed =
                sums.iter().map(|sum| f64::from(fragments(&sum)) * f64::from(sum.1.workers.count_ones()));
            proto::PlannedShare {
                switch: self.tree.switches[switch].hop.address.to_string(),
                share: summed.sum::<f64>() / all,
                aggregators: sums.iter().map(|sum| fragments(&sum)).sum(),
            }
        };
        self.sums.iter().enumerate().map(of).collect()
    }
}

fn invalid(error: &dyn std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error.to_string())
}

fn lock(aggregators: &Mutex<Aggregators>) -> MutexGuard<'_, Aggregators> {
    aggregators.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A switch of the tree as packets name it.
fn number(switch: usize) -> AggregationNode {
    AggregationNode(switch as u16 + 1)
}

/// A window in parts that differ by one fragment at most.
fn equal_parts(window: u16) -> Vec<u32> {
    let window = u32::from(window);
    let count = window.min(EQUAL_PARTS);
    (0..count).map(|part| (part + 1) * window / count - part * window / count).collect()
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
