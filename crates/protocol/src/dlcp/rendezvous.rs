//! The agreement between two announcements of one flow.

use fanin_wire::{AbortReason, Collective, LossBound, Rank, Start};

/// The difference between two announcements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unlike {
    /// The tensors, or the parts that they are cut into.
    Tensors(Collective, Collective),
    /// Their loss bounds.
    Bounds(LossBound, LossBound),
}

impl Unlike {
    /// The difference, if any.
    pub(super) fn of(one: &Start, other: &Start) -> Option<Self> {
        if (one.collective, one.elements) != (other.collective, other.elements) {
            return Some(Self::Tensors(one.collective, other.collective));
        }
        (one.bound != other.bound).then_some(Self::Bounds(one.bound, other.bound))
    }

    /// Why a job cannot go on whose ranks `first` and `second` announced such.
    pub(super) const fn reason(self, first: Rank, second: Rank) -> AbortReason {
        match self {
            Self::Tensors(one, other) => {
                AbortReason::Mismatch { first: (first, one), second: (second, other) }
            }
            Self::Bounds(one, other) => {
                AbortReason::LossBounds { first: (first, one), second: (second, other) }
            }
        }
    }
}
