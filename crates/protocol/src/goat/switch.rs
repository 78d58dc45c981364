//! GOAT's rule for a switch: it sums fragments that are labelled with its own node, and sends the
//! others on by its table (GOAT §III-D, steps 3 and 4).
//!
//! The paper allocates by `HASH(<node, sub-model, fragment>) mod memory size`, and its plan gives
//! no switch more than fits. A random hash would send two fragments of such a plan to one
//! aggregator all the same: of 1,024 that draw from 8,192, one in sixteen. So the plan says where
//! the aggregators of each sub-model begin, and the hash is its fragments' numbers from there on.
//! This is the paper's own example (Figure 1: "fragment i will be hashed to memory unit i % N").
//!
//! An aggregator is its fragment's alone, until the job's stream comes to the same place of the
//! model again. So nothing is evicted. A fragment that is sent again is added if it was lost; the
//! sum so far is shown to the server, but stays. The fragment of the model's next turn takes the
//! aggregator over, since a worker that sends it has the parameters of this one. Parameters that
//! come by free it, too.
//!
//! A sum that is whole goes on to the server, or to another node on its way there that adds it to
//! others (*sums of sums*, which the paper has not). Its packet is then labelled with that node, and
//! says by its workers which contribution it is. Anything less than a whole sum goes to the server.
//! A whole sum that is shown again goes the sum's way: if it was lost, the node after this one has
//! it then.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use fanin_wire::{
    AggregationNode, Flags, Generation, JobId, Key, Participants, PlannedDirections, PlannedHeader, Rank,
    SubModel,
};

use super::plan::{PlannedSum, SubModels};
use crate::aggregation::{Children, ConfigError, Part, Route, Treatment};
use crate::machine::Reason;

/// A job at one switch: what the plan says of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GoatRoute<A> {
    /// The job.
    pub id: JobId,
    /// The key that its packets are tagged with.
    pub key: Key,
    /// The plan's generation: packets of another one are dropped, and counted.
    pub generation: Generation,
    /// Number of workers.
    pub workers: u16,
    /// This switch in the plan.
    pub node: AggregationNode,
    /// The next switch towards the server, or the server.
    pub upstream: A,
    /// The forwarding table: the next switch towards other nodes. Fragments for a node that is not
    /// in it go to the server.
    pub next_hops: Vec<(AggregationNode, A)>,
    /// The switches and workers that get the parameters from this switch, as far as it is known
    /// where they are.
    pub below: Vec<A>,
    /// Workers that send to this switch first, a bit for each rank, and are not among those in
    /// `below`. Their packets say where they are, and they are children behind the others, in order
    /// of rank.
    pub own: u128,
    /// The parts of the model.
    pub sub_models: SubModels,
    /// The sub-models that are summed here.
    pub sums: BTreeMap<SubModel, PlannedSum>,
    /// The job's window.
    pub window_max: u16,
    /// The switch's memory: its aggregators, of all jobs.
    pub aggregators: u32,
}

impl<A> GoatRoute<A> {
    /// The aggregator of a fragment that is summed here, and its sum.
    fn aggregator(&self, header: &PlannedHeader) -> Option<(u32, &PlannedSum)> {
        let PlannedDirections { sub_model, .. } = header.directions;
        let sum = self.sums.get(&sub_model)?;
        let fragment = header.aggregator_index;
        if fragment >= self.sub_models.fragments_of(sub_model) {
            return None;
        }
        let index =
            (u64::from(sum.first_aggregator) + u64::from(fragment)) % u64::from(self.aggregators.max(1));
        Some((index as u32, sum))
    }
}

impl<A: Copy + PartialEq + core::fmt::Debug> Route<A> for GoatRoute<A> {
    type Label = PlannedDirections;
    type Bits = u128;
    const FREES_STALE: bool = false;

    fn check(&self) -> Result<(), ConfigError> {
        if self.workers == 0 { Err(ConfigError::Workers(0)) } else { Ok(()) }
    }

    fn job(&self) -> (JobId, Key, Generation) {
        (self.id, self.key, self.generation)
    }

    fn workers(&self) -> u16 {
        self.workers
    }

    fn upstream(&self) -> &A {
        &self.upstream
    }

    fn neighbour(&self, number: u16) -> &[A] {
        core::slice::from_ref(&self.next_hops[usize::from(number)].1)
    }

    fn children(&self) -> Children<A> {
        Children::known(self.below.len() + self.own.count_ones() as usize, &self.below)
    }

    /// A fragment of a worker next to it, which nobody passes on to the switch but the worker.
    fn sender(&self, from: A, directions: &PlannedDirections) -> Result<Option<usize>, Reason> {
        let worker = directions.workers;
        let is_from_it =
            worker.is_power_of_two() && worker & self.own != 0 && !directions.passed && from != self.upstream;
        let before = (self.own & worker.wrapping_sub(1)).count_ones() as usize;
        Ok(is_from_it.then_some(self.below.len() + before))
    }

    fn treatment(&self, header: &PlannedHeader) -> Treatment<u128> {
        let PlannedDirections { passed, aggregation_node, workers, participants, .. } = header.directions;
        let Flags { resend, overflow, restore, .. } = header.flags;
        if passed || aggregation_node == AggregationNode::SERVER {
            // A sum of sums that the worker is planned for may have the worker in it.
            let summed = if overflow || restore { self.aggregator(header) } else { None };
            let given_up = summed.filter(|(_, sum)| sum.all() & workers != 0);
            return given_up.map_or(Treatment::Forward, |(index, _)| given_up_by(header, index));
        }
        if aggregation_node != self.node {
            // If nobody knows the way, the server sums: a table further on might send it back here.
            let hop = self.next_hops.iter().position(|(node, _)| *node == aggregation_node);
            return hop.map_or(Treatment::Forward, |hop| Treatment::Relay(hop as u16));
        }
        let Some((index, sum)) = self.aggregator(header) else { return Treatment::Forward };
        // The server refuses workers that the plan does not have here, and who is no participant.
        if !sum.awaits(workers, participants) {
            return Treatment::Forward;
        }
        if overflow || restore {
            return given_up_by(header, index);
        }
        let window = Some(u64::from(self.window_max).min(self.sub_models.fragments().into()));
        let fan_in_degree = sum.fan_in(participants);
        let part = Part { index, bit: workers, fan_in_degree, participants: participants.0, window };
        if resend { Treatment::Show(part) } else { Treatment::Add(part) }
    }

    /// A switch below may have participants below it.
    fn reaches(&self, child: usize, participants: Participants) -> bool {
        let Some(own) = child.checked_sub(self.below.len()) else { return true };
        let ranks = (0..u128::BITS as u16).filter(|rank| self.own >> rank & 1 != 0);
        ranks.map(Rank).nth(own).is_none_or(|rank| participants.contains(rank))
    }

    fn freed_by(&self, parameters: &PlannedHeader) -> Option<u32> {
        self.aggregator(parameters).map(|(index, _)| index)
    }

    fn onward(&self, directions: PlannedDirections) -> PlannedDirections {
        PlannedDirections { passed: true, ..directions }
    }

    fn of_sum(&self, directions: PlannedDirections, workers: u128) -> PlannedDirections {
        let is_whole = |sum: &&PlannedSum| sum.all() & directions.participants.0 == workers;
        let whole = self.sums.get(&directions.sub_model).filter(is_whole);
        match whole.map_or(AggregationNode::SERVER, |sum| sum.onward) {
            AggregationNode::SERVER => PlannedDirections { passed: true, workers, ..directions },
            aggregation_node => PlannedDirections { aggregation_node, workers, ..directions },
        }
    }
}

/// The treatment of original values, or of parameters that are handed back, at a switch where their
/// worker is summed.
///
/// Parameters that are handed back make the sum needless, whoever is in it. Original values take the
/// place of their worker's scaled values, so a sum with these is given up. A sum without them stays:
/// the server may have original values of some workers and wait for the sum of the others.
/// Meanwhile the former send theirs again, and would end that sum each time before it is whole.
fn given_up_by(header: &PlannedHeader, index: u32) -> Treatment<u128> {
    if header.flags.restore {
        Treatment::Discard(index)
    } else {
        Treatment::DiscardWith(index, header.directions.workers)
    }
}
