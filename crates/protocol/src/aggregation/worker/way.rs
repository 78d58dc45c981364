//! What a worker asks its protocol: how its fragments are labelled, and where they go.

use fanin_wire::{FragmentHeader, Label, Participants};

/// The places where a worker's fragments are summed, as its protocol has them.
pub trait Way<A>: core::fmt::Debug {
    /// The label of the fragments.
    type Label: Label;

    /// The label of a fragment of these participants, and its index; `agreed` is the one that all
    /// workers agreed on for its place.
    fn label(&self, sequence: u64, agreed: u32, participants: Participants) -> (Self::Label, u32);

    /// Whether the worker is one of them.
    fn takes_part(&self, _participants: Participants) -> bool {
        true
    }

    /// The index that the place of a fragment uses from now on, by its parameters.
    fn next_aggregator_index(parameters: &FragmentHeader<Self::Label>) -> u32;

    /// The most machines that send to one machine on the way.
    fn senders(&self, workers: u16) -> u16 {
        workers
    }

    /// `begin`, and what tells the worker from the job's others.
    fn mixed(&self, begin: u64) -> u64;

    /// A fragment may be sent if it is less than this behind the first missing one: the one at this
    /// distance has the label of that one.
    fn reach(&self) -> u64 {
        u64::MAX
    }

    /// How many lanes there are. Parameters that come back on one lane in another order than their
    /// fragments were sent count as lost, and on several they do not.
    fn lanes(&self) -> usize {
        1
    }

    /// The lane that a fragment takes.
    fn lane(&self, _sequence: u64) -> u16 {
        0
    }

    /// Which address a fragment goes to first, if not where parameters come from.
    fn first_hop(&self, _sequence: u64) -> Option<usize> {
        None
    }

    /// That address.
    fn address(&self, _hop: usize) -> &[A] {
        &[]
    }
}
