//! The worker labels the fragments of each sub-model with the node that its assignment names (GOAT
//! §III-D, steps 1 and 2).

use fanin_wire::{Participants, PlannedDirections, PlannedHeader, Rank};

use super::plan::Assignment;
use crate::aggregation::Way;
use crate::transport::mix;

impl<A: core::fmt::Debug> Way<A> for Assignment<A> {
    type Label = PlannedDirections;

    /// The index is the fragment's number within its sub-model.
    fn label(&self, sequence: u64, _: u32, participants: Participants) -> (PlannedDirections, u32) {
        let (sub_model, fragment, aggregation_node) = self.locate(sequence);
        let workers = self.bit();
        let directions =
            PlannedDirections { passed: false, aggregation_node, sub_model, workers, participants };
        (directions, fragment)
    }

    fn takes_part(&self, participants: Participants) -> bool {
        participants.contains(Rank(self.rank()))
    }

    /// None is agreed on: each fragment has its own aggregator.
    fn next_aggregator_index(_parameters: &PlannedHeader) -> u32 {
        0
    }

    fn mixed(&self, begin: u64) -> u64 {
        mix(begin ^ u64::from(self.rank()))
    }

    /// Two of one label would be in one aggregator.
    fn reach(&self) -> u64 {
        self.sub_models().fragments().into()
    }

    /// A lane for each node: sums of several nodes come back in any order.
    fn lanes(&self) -> usize {
        self.lanes_of_sub_models().iter().max().map_or(1, |last| usize::from(*last) + 1)
    }

    fn lane(&self, sequence: u64) -> u16 {
        let (sub_model, ..) = self.locate(sequence);
        self.lanes_of_sub_models()[usize::from(sub_model.0)]
    }

    fn first_hop(&self, sequence: u64) -> Option<usize> {
        let (_, _, node) = self.locate(sequence);
        self.first_hops().iter().position(|(other, _)| *other == node)
    }

    fn address(&self, hop: usize) -> &[A] {
        core::slice::from_ref(&self.first_hops()[hop].1)
    }
}
