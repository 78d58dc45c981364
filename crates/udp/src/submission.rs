//! What a worker asks of its job for some tensors.

use crate::RawTensor;
use fanin_protocol::Layer;
use fanin_wire::{Dtype, LossBound, Op, Operation, Participants, Pattern, WorkerId};

/// A collective operation by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CollectiveKind {
    /// The sum of all, for all.
    AllReduce,
    /// The sum of all, for one.
    Reduce,
    /// What one has, for all.
    Broadcast,
    /// Of the sum of all, a slice for each.
    ReduceScatter,
    /// What each has, for all.
    AllGather,
}

impl CollectiveKind {
    /// Every kind.
    pub const ALL: [Self; 5] =
        [Self::AllReduce, Self::Reduce, Self::Broadcast, Self::ReduceScatter, Self::AllGather];

    /// As programs call it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::Reduce => "reduce",
            Self::Broadcast => "broadcast",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
        }
    }

    /// How the tensor, or the slice, of this root travels.
    #[must_use]
    pub const fn pattern(self, root: WorkerId) -> Pattern {
        match self {
            Self::AllReduce => Pattern::AllReduce,
            Self::Reduce | Self::ReduceScatter => Pattern::Reduce(root),
            Self::Broadcast | Self::AllGather => Pattern::Broadcast(root),
        }
    }

    /// Whether it has a slice for each rank, which is the slice's root, in place of one tensor.
    #[must_use]
    pub const fn is_sliced(self) -> bool {
        matches!(self, Self::ReduceScatter | Self::AllGather)
    }

    /// Whether numbers are added, and not only moved.
    #[must_use]
    pub const fn adds(self) -> bool {
        !matches!(self.pattern(WorkerId(0)), Pattern::Broadcast(_))
    }
}

/// One collective operation on tensors, in place. Every worker submits alike ones in the same order.
#[derive(Debug)]
pub struct Submission {
    pub(crate) kind: CollectiveKind,
    /// Each its own operation.
    pub(crate) parts: Vec<(RawTensor, Operation)>,
    layer: Layer,
    loss_bound: Option<LossBound>,
    participants: Participants,
    elements: usize,
    dtype: Dtype,
    op: Op,
}

impl Submission {
    /// The sum of all workers' tensors, or their average, takes the place of each.
    #[must_use]
    pub fn all_reduce(tensor: RawTensor, op: Op) -> Self {
        Self::new(CollectiveKind::AllReduce, vec![tensor], op, WorkerId(0))
    }

    /// The sum of all workers' tensors, or their average, takes the place of the root's. The others' stay as they are.
    #[must_use]
    pub fn reduce(tensor: RawTensor, op: Op, root: WorkerId) -> Self {
        Self::new(CollectiveKind::Reduce, vec![tensor], op, root)
    }

    /// The root's tensor takes the place of all others, whatever its bits are.
    #[must_use]
    pub fn broadcast(tensor: RawTensor, root: WorkerId) -> Self {
        Self::new(CollectiveKind::Broadcast, vec![tensor], Op::Sum, root)
    }

    /// Of as many slices as there are workers, the sum of all workers' `i`-th ones, or their average, takes the place of worker `i`'s. All
    /// other slices stay as they are.
    #[must_use]
    pub fn reduce_scatter(slices: Vec<RawTensor>, op: Op) -> Self {
        Self::new(CollectiveKind::ReduceScatter, slices, op, WorkerId(0))
    }

    /// Of as many slices as there are workers, worker `i`'s `i`-th one takes the place of all others' `i`-th ones.
    #[must_use]
    pub fn all_gather(slices: Vec<RawTensor>) -> Self {
        Self::new(CollectiveKind::AllGather, slices, Op::Sum, WorkerId(0))
    }

    /// Any kind of collective on its tensor, or on its slices in the order of their ranks. `op` counts where
    /// numbers are added, `root` where one tensor has a root.
    ///
    /// # Panics
    /// When a kind that has no slices has none or several tensors.
    #[must_use]
    pub fn new(kind: CollectiveKind, tensors: Vec<RawTensor>, op: Op, root: WorkerId) -> Self {
        assert!(kind.is_sliced() || tensors.len() == 1, "{} has one tensor", kind.name());
        let op = if kind.adds() { op } else { Op::Sum };
        let dtype = tensors.first().map_or(Dtype::Uint8, RawTensor::dtype);
        let elements = tensors.iter().map(RawTensor::elements).sum();
        let part = |(rank, tensor): (u32, RawTensor)| {
            let tensor = if kind.adds() { tensor } else { tensor.into_bytes() };
            let root = if kind.is_sliced() { WorkerId(rank as u8) } else { root };
            (tensor, Operation { op, pattern: kind.pattern(root) })
        };
        let parts = (0..).zip(tensors).map(part).collect();
        let participants = Participants::ALL;
        Self { kind, parts, layer: Layer::default(), loss_bound: None, participants, elements, dtype, op }
    }

    /// The same on gradients of this layer of a model, which is the same on all workers. Without it they
    /// count as the front layer's, whose packets go first (DLCP §3.2.2).
    #[must_use]
    pub const fn of_layer(mut self, layer: Layer) -> Self {
        self.layer = layer;
        self
    }

    /// The same with a loss bound of its own, the same on all workers, if the job may lose something
    /// (DLCP §3.2.1).
    #[must_use]
    pub const fn losing(mut self, loss_bound: Option<LossBound>) -> Self {
        self.loss_bound = loss_bound;
        self
    }

    /// The sum of these ranks' tensors alone, for them alone (GOAT §V). The others submit it, too, with the
    /// same set. They send nothing, and their tensors stay as they are. A job that has no such sets fails it.
    ///
    /// A set may differ from that of the submission before only once all ranks of that one have its sums.
    #[must_use]
    pub const fn among(mut self, participants: Participants) -> Self {
        self.participants = participants;
        self
    }

    /// What it is.
    #[must_use]
    pub const fn kind(&self) -> CollectiveKind {
        self.kind
    }

    /// Elements of all its tensors.
    #[must_use]
    pub const fn elements(&self) -> usize {
        self.elements
    }

    /// Their type.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Sum or average. Sum where nothing is added.
    #[must_use]
    pub const fn op(&self) -> Op {
        self.op
    }

    /// The layer of a model that it is of.
    #[must_use]
    pub const fn layer(&self) -> Layer {
        self.layer
    }

    /// How much of it may be lost, if not as much as the job says.
    #[must_use]
    pub const fn loss_bound(&self) -> Option<LossBound> {
        self.loss_bound
    }

    /// The ranks that contribute to it.
    #[must_use]
    pub const fn participants(&self) -> Participants {
        self.participants
    }

    /// Its tensors, in the order of their ranks where there is one for each, and what is done with each of them.
    #[must_use]
    pub fn into_parts(self) -> Vec<(RawTensor, Operation)> {
        self.parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "all_reduce has one tensor")]
    fn a_collective_without_slices_has_one_tensor() {
        let _ = Submission::new(CollectiveKind::AllReduce, Vec::new(), Op::Sum, WorkerId(0));
    }
}
