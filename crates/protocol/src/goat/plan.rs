//! The plan of a job for its machines: which part of the model each fragment is of, and where the
//! fragments of each part are summed. The plan is plain data here; its maker knows the network
//! (GOAT §IV).

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use fanin_wire::{
    AggregationNode, Generation, JobId, Key, PLANNED_WORKERS_MAX, Participants, SubModel, WireDtype,
};

use crate::aggregation::{ConfigError, Hashing, JobConfig, Overflow, SUB_MODELS_MAX, Scaling};

/// The parts of a model whose gradients are summed independently (GOAT §III-D, model partition), by
/// the fragments that each has.
///
/// The job's stream goes through the model again and again: fragment `s` of the stream is fragment
/// `s mod n` of the n that the model has. A stream that has other tensors in it is summed as
/// exactly, under the labels of whatever stands at these places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubModels {
    /// Behind the last fragment of each.
    ends: Arc<[u32]>,
}

impl SubModels {
    /// Parts of so many fragments.
    ///
    /// # Errors
    /// When there are none, or more than [`SUB_MODELS_MAX`], or one is empty, or together they are
    /// more than `u32::MAX`.
    pub fn new(fragments: &[u32]) -> Result<Self, ConfigError> {
        let wrong = ConfigError::SubModels(fragments.len());
        if fragments.is_empty() || fragments.len() > SUB_MODELS_MAX || fragments.contains(&0) {
            return Err(wrong);
        }
        let mut end = 0u32;
        let ends: Option<Vec<u32>> = fragments
            .iter()
            .map(|count| {
                end = end.checked_add(*count)?;
                Some(end)
            })
            .collect();
        Ok(Self { ends: ends.ok_or(wrong)?.into() })
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.ends.len()
    }

    /// Fragments of the whole model.
    #[must_use]
    pub fn fragments(&self) -> u32 {
        self.ends[self.ends.len() - 1]
    }

    /// Fragments of one of them; none of one that there is not.
    #[must_use]
    pub fn fragments_of(&self, sub_model: SubModel) -> u32 {
        let at = usize::from(sub_model.0);
        self.ends.get(at).map_or(0, |end| end - self.begin(at))
    }

    fn begin(&self, sub_model: usize) -> u32 {
        sub_model.checked_sub(1).map_or(0, |before| self.ends[before])
    }

    /// Which sub-model a fragment of the stream is of, and its number there.
    pub(super) fn locate(&self, sequence: u64) -> (SubModel, u32) {
        let at = (sequence % u64::from(self.fragments())) as u32;
        let sub_model = self.ends.partition_point(|end| *end <= at);
        (SubModel(sub_model as u16), at - self.begin(sub_model))
    }
}

/// A job as its workers and its server see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GoatJobConfig {
    /// The job's id.
    pub id: JobId,
    /// The key that its packets are tagged with.
    pub key: Key,
    /// The plan's generation: each plan of a job has its own.
    pub generation: Generation,
    /// Number of workers, 1 to [`PLANNED_WORKERS_MAX`].
    pub workers: u16,
    /// Elements of a fragment, as in ATP.
    pub elements: u16,
    /// Most fragments that a worker has sent and not got back: how far a worker may be before another
    /// one. If the model has fewer, it is that many: two of one label would be in one aggregator.
    pub window_max: u16,
    /// The factor of floats.
    pub scaling: Scaling,
    /// The reaction to a sum that does not fit.
    pub overflow: Overflow,
    /// Whether workers adjust their windows.
    pub congestion_control: bool,
    /// How the values of large float32 tensors travel, as in ATP.
    pub wire_dtype: WireDtype,
    /// Most elements of a float tensor whose original values go to the server at once, which sums
    /// them exactly.
    pub originals_elements_max: u32,
}

impl From<GoatJobConfig> for JobConfig {
    fn from(config: GoatJobConfig) -> Self {
        Self {
            id: config.id,
            key: config.key,
            generation: config.generation,
            workers: config.workers,
            elements: config.elements,
            window_max: config.window_max,
            // No aggregator is agreed on: the plan names it.
            aggregators: 0,
            hashing: Hashing::Linear,
            scaling: config.scaling,
            overflow: config.overflow,
            congestion_control: config.congestion_control,
            wire_dtype: config.wire_dtype,
            originals_elements_max: config.originals_elements_max,
        }
    }
}

impl GoatJobConfig {
    /// Whether every number is within its limit.
    ///
    /// # Errors
    /// The first number that is not.
    pub fn check(self) -> Result<(), ConfigError> {
        if usize::from(self.workers) > PLANNED_WORKERS_MAX {
            return Err(ConfigError::PlannedWorkers(self.workers));
        }
        JobConfig::from(self).check().map(drop)
    }
}

/// Where the sums of some nodes go, if not to the server: to another node that adds them. It is the
/// plan of one sub-model.
pub type Onward = BTreeMap<AggregationNode, AggregationNode>;

/// A sub-model that a switch sums.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlannedSum {
    /// The workers that the plan assigns to it here, a bit for each rank. Exactly these are waited
    /// for, and ..
    pub workers: u128,
    /// .. these sums of other nodes, each by its workers. No two of them have a worker in common.
    pub sums: Vec<u128>,
    /// The node that the sum goes to, or the server: a switch on the way there, so that whatever
    /// else goes there from these workers comes by that switch. Before a node other than the server,
    /// two contributions at least are added: a sum of one worker would look like that worker's own
    /// packet.
    pub onward: AggregationNode,
    /// The aggregator of its first fragment; the others follow, and go on from the beginning behind
    /// the last one.
    pub first_aggregator: u32,
}

impl PlannedSum {
    /// All workers in it.
    #[must_use]
    pub fn all(&self) -> u128 {
        self.sums.iter().fold(self.workers, |all, sum| all | sum)
    }

    /// How many contributions are waited for, if these participate (GOAT §V, `K_t^s`): a sum without
    /// any of them does not come.
    #[must_use]
    pub fn fan_in(&self, Participants(set): Participants) -> u8 {
        let sums = self.sums.iter().filter(|sum| **sum & set != 0);
        (self.workers & set).count_ones() as u8 + sums.count() as u8
    }

    /// Whether these workers are one contribution, if these participate.
    pub(super) fn awaits(&self, workers: u128, Participants(set): Participants) -> bool {
        let is_own = workers.is_power_of_two() && workers & self.workers & set != 0;
        is_own || workers != 0 && self.sums.iter().any(|sum| sum & set == workers)
    }
}

/// The sums of one sub-model, by their nodes, before they have aggregators. Of each worker, `nodes`
/// has the node that sums its fragments, by rank. The server's has its own workers alone.
///
/// # Errors
/// When a sum comes back to its node.
pub fn sums_of(
    nodes: impl IntoIterator<Item = AggregationNode>,
    onward: &Onward,
) -> Result<BTreeMap<AggregationNode, PlannedSum>, ConfigError> {
    let after = |node: &AggregationNode| onward.get(node).copied().unwrap_or_default();
    let mut sums: BTreeMap<AggregationNode, PlannedSum> = BTreeMap::new();
    for (rank, node) in nodes.into_iter().enumerate() {
        sums.entry(node).or_default().workers |= 1 << rank;
    }
    let mut all: BTreeMap<AggregationNode, u128> = BTreeMap::new();
    for (first, sum) in &sums {
        let way = core::iter::successors(Some(*first), |node| Some(after(node)));
        let way = way.take_while(|node| *node != AggregationNode::SERVER);
        for (passed, node) in way.enumerate() {
            if passed > onward.len() {
                return Err(ConfigError::Onward);
            }
            *all.entry(node).or_default() |= sum.workers;
        }
    }
    for (node, workers) in all {
        let to = after(&node);
        sums.entry(node).or_default().onward = to;
        if to != AggregationNode::SERVER {
            sums.entry(to).or_default().sums.push(workers);
        }
    }
    Ok(sums)
}

/// The assignment of a worker: where its fragments of each sub-model are summed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment<A> {
    rank: u16,
    sub_models: SubModels,
    nodes: Vec<AggregationNode>,
    first_hops: Vec<(AggregationNode, A)>,
    /// The lane of each sub-model: the fragments that go to one node are a lane.
    lanes: Vec<u16>,
}

impl<A> Assignment<A> {
    /// The assignment of the worker of this rank. It says for each sub-model who sums its
    /// fragments, and where fragments for a node go first, if not to the switch, or server, that
    /// parameters come from.
    ///
    /// # Errors
    /// When it has not one node for each sub-model, or no worker has such a rank.
    pub fn new(
        rank: u16,
        sub_models: SubModels,
        nodes: Vec<AggregationNode>,
        first_hops: Vec<(AggregationNode, A)>,
    ) -> Result<Self, ConfigError> {
        let (said, is) = (nodes.len(), sub_models.count());
        if said != is || usize::from(rank) >= PLANNED_WORKERS_MAX {
            return Err(ConfigError::Assignment { rank: rank.into(), said, is });
        }
        let mut distinct = nodes.clone();
        distinct.sort_unstable();
        distinct.dedup();
        let lane = |node| distinct.partition_point(|other| other < node) as u16;
        let lanes = nodes.iter().map(lane).collect();
        Ok(Self { rank, sub_models, nodes, first_hops, lanes })
    }

    /// The parts of the model.
    #[must_use]
    pub const fn sub_models(&self) -> &SubModels {
        &self.sub_models
    }

    /// For each of them who sums the worker's fragments.
    #[must_use]
    pub fn nodes(&self) -> &[AggregationNode] {
        &self.nodes
    }

    /// The bit of the worker.
    pub(super) const fn bit(&self) -> u128 {
        1 << self.rank
    }

    pub(super) const fn rank(&self) -> u16 {
        self.rank
    }

    /// Which sub-model a fragment of the stream is of, its number there, and who sums it.
    pub(super) fn locate(&self, sequence: u64) -> (SubModel, u32, AggregationNode) {
        let (sub_model, fragment) = self.sub_models.locate(sequence);
        (sub_model, fragment, self.nodes[usize::from(sub_model.0)])
    }

    /// The lanes of the sub-models.
    pub(super) fn lanes_of_sub_models(&self) -> &[u16] {
        &self.lanes
    }

    /// The first hops of fragments for some nodes.
    pub(super) fn first_hops(&self) -> &[(AggregationNode, A)] {
        &self.first_hops
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    #[test]
    fn a_stream_goes_through_the_model_again_and_again() {
        let sub_models = SubModels::new(&[2, 1, 3]).unwrap();
        let at: Vec<(u16, u32)> = (0..8).map(|s| sub_models.locate(s)).map(|(m, f)| (m.0, f)).collect();
        assert_eq!(at, [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2), (0, 0), (0, 1)]);
        let of = |sub_model| sub_models.fragments_of(SubModel(sub_model));
        assert_eq!(([of(0), of(1), of(2), of(3)], sub_models.fragments()), ([2, 1, 3, 0], 6));
    }

    #[test]
    fn sums_go_on_to_nodes_that_add_them() {
        let node = AggregationNode;
        let nodes = [1, 1, 2, 2, 3, 0].map(node);
        let found = |onward: &[(u16, u16)]| {
            let onward: Onward = onward.iter().map(|(from, to)| (node(*from), node(*to))).collect();
            sums_of(nodes, &onward).map(|sums| {
                let of = |(at, sum): (AggregationNode, PlannedSum)| {
                    let fan_in = u32::from(sum.fan_in(Participants::ALL));
                    assert_eq!(fan_in, sum.workers.count_ones() + sum.sums.len() as u32);
                    (at.0, sum.workers, sum.sums, sum.onward.0)
                };
                sums.into_iter().map(of).collect::<Vec<_>>()
            })
        };
        let alone = |at: u16, workers: u128| (at, workers, vec![], 0);
        let server = alone(0, 0b10_0000);
        let racks = [alone(1, 0b11), alone(2, 0b1100), alone(3, 0b1_0000)];
        assert_eq!(found(&[]).unwrap(), [&[server.clone()][..], &racks].concat());
        // One that has no worker of its own is in between; another is not asked for.
        assert_eq!(
            found(&[(1, 4), (2, 4), (4, 3), (7, 3)]).unwrap(),
            [
                server,
                (1, 0b11, vec![], 4),
                (2, 0b1100, vec![], 4),
                (3, 0b1_0000, vec![0b1111], 0),
                (4, 0, vec![0b11, 0b1100], 3)
            ]
        );
        for circle in [&[(1, 1)][..], &[(1, 4), (4, 5), (5, 4)]] {
            assert_eq!(found(circle), Err(ConfigError::Onward), "{circle:?}");
        }
    }

    #[test]
    fn a_sum_awaits_its_workers_one_by_one_and_sums_as_a_whole() {
        let sum = PlannedSum { workers: 0b11, sums: vec![0b1100], ..PlannedSum::default() };
        let awaited = [0b1, 0b10, 0b1100];
        let all = Participants::ALL;
        assert!(awaited.into_iter().all(|workers| sum.awaits(workers, all)));
        let others = [0, 0b11, 0b100, 0b1000, 0b1101, 0b1_0000];
        assert!(!others.into_iter().any(|workers| sum.awaits(workers, all)));
        assert_eq!((sum.all(), sum.fan_in(all)), (0b1111, 3));
    }

    #[test]
    fn a_sum_awaits_what_participants_contribute() {
        let sum = PlannedSum { workers: 0b11, sums: vec![0b1100, 0b11_0000], ..PlannedSum::default() };
        for (participants, awaited) in [
            (0b11_1111, &[0b1, 0b10, 0b1100, 0b11_0000][..]),
            (0b10_1001, &[0b1, 0b1000, 0b10_0000]),
            (0b00_1110, &[0b10, 0b1100]),
            (0b100_0000, &[]),
        ] {
            let participants = Participants(participants);
            let found: Vec<u128> = (0..128).filter(|workers| sum.awaits(*workers, participants)).collect();
            assert_eq!(found, awaited, "{participants:?}");
            assert_eq!(usize::from(sum.fan_in(participants)), awaited.len(), "{participants:?}");
        }
    }

    #[test]
    fn impossible_parts_are_refused() {
        for fragments in [&[][..], &[1, 0], &[u32::MAX, 1]] {
            assert_eq!(SubModels::new(fragments), Err(ConfigError::SubModels(fragments.len())));
        }
    }
}
