//! The senders of the server's fragments (GOAT §III-D, step 5). The server sums what switches have
//! summed and what workers send it directly, and refuses what is labelled by another plan.

use alloc::vec::Vec;
use fanin_wire::{
    AggregationNode, Generation, JobId, Key, Participants, PlannedDirections, PlannedHeader, Rank,
};

use super::GoatServer;
use super::plan::{GoatJobConfig, Onward, PlannedSum, SubModels, sums_of};
use crate::aggregation::{Admitted, ConfigError, Coverage, GoOn, Roster, Workers};
use crate::machine::Reason;

/// A job as its server is told of it.
#[derive(Clone, Debug)]
pub struct GoatServerJob<A> {
    /// The same as at the workers.
    pub config: GoatJobConfig,
    /// The plan.
    pub plan: ServerPlan<A>,
    /// Whether the job is under way: the server lost its memory, and workers hand back what they
    /// have.
    pub restored: bool,
}

/// A job's plan as its server has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerPlan<A> {
    /// The parts of the model.
    pub sub_models: SubModels,
    /// For each worker, by rank, the places where its fragments of each part are summed.
    pub nodes: Vec<Vec<AggregationNode>>,
    /// For each part, where sums of nodes go; behind the last one given they go to the server.
    pub onward: Vec<Onward>,
    /// The switches and workers that get the parameters from the server, as far as it is known
    /// where they are.
    pub children: Vec<A>,
    /// By rank: through which of these a worker gets them. A number behind the last of them is a
    /// worker's own, whose packets say where it is.
    pub ways: Vec<u16>,
}

/// The workers of a node, whose fragments and sums come to it.
#[derive(Clone, Copy, Debug)]
struct Group {
    node: AggregationNode,
    workers: u128,
    /// Whether its sum goes to the server, and not into another node's.
    is_last: bool,
}

impl Group {
    fn of((node, sum): (AggregationNode, PlannedSum)) -> Self {
        Self { node, workers: sum.all(), is_last: sum.onward == AggregationNode::SERVER }
    }
}

/// The workers that are summed at each node.
#[derive(Debug)]
pub struct Groups {
    sub_models: SubModels,
    /// By sub-model.
    groups: Vec<Vec<Group>>,
    ways: Vec<u16>,
    /// Children of which it is known where they are.
    known: usize,
}

impl Groups {
    fn new<A>(plan: &ServerPlan<A>, workers: usize) -> Result<Self, ConfigError> {
        let ServerPlan { sub_models, nodes, onward, children, ways } = plan;
        if nodes.len() != workers || ways.len() != workers {
            return Err(ConfigError::Assignments(nodes.len().min(ways.len())));
        }
        for (rank, assigned) in nodes.iter().enumerate() {
            let (said, is) = (assigned.len(), sub_models.count());
            if said != is || usize::from(ways[rank]) >= children.len().max(workers) {
                return Err(ConfigError::Assignment { rank, said, is });
            }
        }
        let nowhere = Onward::new();
        let groups = (0..sub_models.count()).map(|part| {
            let assigned = nodes.iter().map(|assigned| assigned[part]);
            let sums = sums_of(assigned, onward.get(part).unwrap_or(&nowhere))?;
            Ok(sums.into_iter().map(Group::of).collect())
        });
        Ok(Self {
            sub_models: sub_models.clone(),
            groups: groups.collect::<Result<_, _>>()?,
            ways: ways.clone(),
            known: children.len(),
        })
    }
}

impl<A: Copy> Roster<A> for Groups {
    type Label = PlannedDirections;
    type Job = GoatServerJob<A>;

    fn identity(job: &GoatServerJob<A>) -> (JobId, Key) {
        (job.config.id, job.config.key)
    }

    fn admit(job: GoatServerJob<A>) -> Result<Admitted<Self, A>, ConfigError> {
        job.config.check()?;
        let roster = Self::new(&job.plan, job.config.workers.into())?;
        let children = job.plan.children;
        Ok(Admitted { config: job.config.into(), roster, restored: job.restored, children })
    }

    fn workers(&self) -> usize {
        self.ways.len()
    }

    fn rank(&self, position: usize) -> u16 {
        position as u16
    }

    fn coverage(&self, header: &PlannedHeader) -> Result<Coverage, Reason> {
        let PlannedDirections { aggregation_node, sub_model, workers, participants, .. } = header.directions;
        let (planned, fragment) = self.sub_models.locate(header.sequence);
        if (planned, fragment) != (sub_model, header.aggregator_index) {
            return Err(Reason::Unplanned);
        }
        if workers == 0 || workers & !participants.0 != 0 {
            return Err(Reason::OutOfRange);
        }
        let groups = &self.groups[usize::from(sub_model.0)];
        let at = groups.iter().position(|group| group.node == aggregation_node).ok_or(Reason::Unplanned)?;
        let group = groups[at];
        if workers & !group.workers != 0 {
            return Err(Reason::Unplanned);
        }
        let mut set = Workers::default();
        (0..self.ways.len()).filter(|rank| workers >> rank & 1 != 0).for_each(|rank| set.insert(rank));
        let first = workers.trailing_zeros() as u16;
        let child = self.ways[usize::from(first)];
        let several_ways = (0..).zip(&self.ways).any(|(rank, way)| workers >> rank & 1 != 0 && *way != child);
        // A fragment from a switch is for its node by then, or summed.
        let is_own = workers.is_power_of_two() && usize::from(child) >= self.known;
        // What a node before the last one sums, the last one may still send with more.
        let is_whole = workers == group.workers & participants.0 && group.is_last;
        let is_part = !is_whole && aggregation_node != AggregationNode::SERVER;
        Ok(Coverage {
            child,
            several_ways,
            shared: several_ways || self.ways.iter().filter(|way| **way == child).count() > 1,
            teaches: is_own,
            part_of: is_part.then_some(at as u16),
            ..Coverage::of(set, first)
        })
    }

    fn participants(&self, label: &PlannedDirections) -> Participants {
        let all = u128::MAX >> (u128::BITS as usize - self.ways.len());
        if label.participants.0 & all == all { Participants::ALL } else { label.participants }
    }

    fn reaches(&self, child: usize, participants: Participants) -> bool {
        let is_below =
            |(rank, way): (u16, &u16)| usize::from(*way) == child && participants.contains(Rank(rank));
        (0..).zip(&self.ways).any(is_below)
    }

    fn answer(&self, sequence: u64, _: u32, participants: Participants) -> PlannedDirections {
        let (sub_model, _) = self.sub_models.locate(sequence);
        PlannedDirections { passed: true, sub_model, participants, ..PlannedDirections::default() }
    }
}

impl<A: Copy + PartialEq> GoatServer<A> {
    /// Goes on with another plan, in its generation. Contributions to unfinished fragments are
    /// forgotten: their workers send them again when they are told the plan. Returns the earliest
    /// sequence number that is not aggregated; `None` without such a job.
    ///
    /// # Errors
    /// When the plan is not one of the job's workers; the job is then as before.
    pub fn go_on_with(
        &mut self,
        job: JobId,
        generation: Generation,
        plan: &ServerPlan<A>,
    ) -> Result<Option<u64>, ConfigError> {
        self.go_on(job, generation, |before| {
            let roster = Groups::new(plan, before.ways.len())?;
            Ok(GoOn { roster, children: plan.children.clone(), keeps: false })
        })
    }
}
