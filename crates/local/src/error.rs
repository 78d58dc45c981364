//! The errors among the ranks of one machine.

use fanin_udp::CollectiveKind;
use fanin_wire::{Dtype, LossBound, Op, Participants, Pattern, RANKS_MAX, Rank, WorkerId};
use std::io;
use std::time::Duration;

/// Why there is no memory that the ranks of a machine share.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// It cannot be made.
    #[error("{wanted} bytes of shared memory in /dev/shm: {cause}")]
    Unusable {
        /// How much was asked for.
        wanted: usize,
        /// The operating system's answer.
        cause: io::Error,
    },
    /// The first rank's memory is not to be found, or not for this rank.
    #[error("the memory {name} of this machine's first rank in /dev/shm: {cause}")]
    Unreachable {
        /// Its name.
        name: String,
        /// The operating system's answer.
        cause: io::Error,
    },
    /// It was made for another group.
    #[error(
        "the memory {name} in /dev/shm was made for another group; do all ranks run the same fanin with the same settings?"
    )]
    Foreign {
        /// Its name.
        name: String,
    },
    /// Not every rank has come.
    #[error("ranks {missing:?} of this machine did not open its shared memory within {:.1} s", waited.as_secs_f64())]
    Incomplete {
        /// The ranks of the job that are missing.
        missing: Vec<u32>,
        /// How long was waited.
        waited: Duration,
    },
    /// A rank came and went.
    #[error("rank {rank} of this machine has ended; look at that rank's log")]
    Lost {
        /// Its rank in the job.
        rank: u32,
    },
}

/// Why the ranks of a machine sum no more. Ranks are the job's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LocalError {
    /// The process of a rank has ended.
    #[error("rank {rank} is lost: its process has ended; look at that rank's log")]
    Lost {
        /// The rank.
        rank: u32,
    },
    /// A rank left while others still needed it.
    #[error(
        "rank {rank} left the job while other ranks still wait for it; every rank must take part in every collective"
    )]
    Left {
        /// The rank.
        rank: u32,
    },
    /// Two ranks reduce different tensors at the same place of the stream.
    #[error(
        "ranks {} and {} disagree: rank {} calls {}, rank {} calls {}; every rank must call the same collectives on the same tensors in the same order",
        first.0, second.0, first.0, first.1, second.0, second.1
    )]
    Mismatch {
        /// A rank, and its tensor.
        first: (u32, Submission),
        /// The other.
        second: (u32, Submission),
    },
    /// An all-reduce did not complete in time.
    #[error("an all-reduce did not complete within {:.1} s: ranks {missing:?} of this machine did not take part", waited.as_secs_f64())]
    Timeout {
        /// The ranks that were waited for.
        missing: Vec<u32>,
        /// How long.
        waited: Duration,
    },
    /// Another rank of the machine has ended the job for a reason of its own.
    #[error("rank {rank} has ended the job; look at that rank's log")]
    Ended {
        /// The rank.
        rank: u32,
    },
    /// There is no memory that is shared any more: this is a copy of the process.
    #[error("this process was forked from a rank, and is none")]
    Forked,
}

/// A collective as ranks compare it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Submission {
    /// Its number among those that were submitted, from 0.
    pub number: u64,
    /// What it is.
    pub kind: CollectiveKind,
    /// The rank that gets the sum, or has what all get; 0 where there is no such rank.
    pub root: u8,
    /// Elements of each of its tensors.
    pub elements: usize,
    /// Their type.
    pub dtype: Dtype,
    /// Sum or average; sum where nothing is added.
    pub op: Op,
    /// How much of it may be lost between machines.
    pub loss_bound: LossBound,
    /// The ranks of the job that take part.
    pub participants: Participants,
}

impl std::fmt::Display for Submission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.op {
            _ if !self.kind.adds() => {}
            Op::Sum => f.write_str("sum of ")?,
            Op::Average => f.write_str("average of ")?,
        }
        write!(f, "{} {}", self.elements, self.dtype.name())?;
        match self.kind.pattern(WorkerId(self.root)) {
            _ if self.kind.is_sliced() => f.write_str(" a rank")?,
            Pattern::Reduce(root) => write!(f, " for rank {}", root.0)?,
            Pattern::Broadcast(root) => write!(f, " of rank {}", root.0)?,
            Pattern::AllReduce => {}
        }
        if self.participants != Participants::ALL {
            let takes_part = |rank: &u16| self.participants.contains(Rank(*rank));
            let ranks: Vec<_> = (0..RANKS_MAX as u16).filter(takes_part).collect();
            write!(f, " of ranks {ranks:?}")?;
        }
        write!(f, " ({} {})", self.kind.name().replace('_', "-"), self.number)
    }
}
