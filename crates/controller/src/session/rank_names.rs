//! The names of ranks: a session of one rank of each machine numbers machines, and people number
//! the ranks of the job.

use std::sync::Arc;

use fanin_protocol::control::Ranks;
use fanin_wire::Rank;

use crate::error::SessionError;

/// What the ranks of a session are called, in their order; with none they are called as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankNames(Arc<[Rank]>);

impl From<Vec<u32>> for RankNames {
    /// Of ranks of a job.
    fn from(names: Vec<u32>) -> Self {
        Self(names.into_iter().map(|name| Rank(name as u16)).collect())
    }
}

impl RankNames {
    /// What a rank is called.
    pub(super) fn of(&self, rank: Rank) -> Rank {
        // One that is none of the session's keeps its number: the services made it up.
        self.0.get(usize::from(rank.0)).copied().unwrap_or(rank)
    }

    /// What ranks are called.
    pub(super) fn all(&self, ranks: &Ranks) -> Ranks {
        ranks.iter().map(|rank| self.of(rank)).collect()
    }

    /// The error, with what its ranks are called.
    pub(super) fn error(&self, mut error: SessionError) -> SessionError {
        match &mut error {
            SessionError::RankLost { rank }
            | SessionError::RankLeft { rank }
            | SessionError::Expelled { rank, .. } => *rank = self.of(*rank),
            SessionError::CollectiveMismatch { first: (first, _), second: (second, _) }
            | SessionError::LossBoundMismatch { first: (first, _), second: (second, _) }
            | SessionError::ParticipantsMismatch { first, second } => {
                (*first, *second) = (self.of(*first), self.of(*second));
            }
            SessionError::JoinTimeout { missing_ranks, gone, .. } => {
                (*missing_ranks, *gone) = (self.all(missing_ranks), self.all(gone));
            }
            SessionError::AllReduceTimeout { missing_ranks, .. } => *missing_ranks = self.all(missing_ranks),
            _ => {}
        }
        error
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_named_as_the_job_does_and_those_that_are_none_keep_their_number() {
        let names = RankNames::from(vec![1, 3]);
        let lost = |rank| SessionError::RankLost { rank: Rank(rank) };
        assert_eq!([0, 1, 2].map(|rank| names.error(lost(rank))), [lost(1), lost(3), lost(2)]);
        assert_eq!(names.all(&Ranks::from([0, 1])), Ranks::from([1, 3]));
        assert_eq!(RankNames::default().error(lost(1)), lost(1));
    }
}
