//! Which workers a fragment comes from, as its server counts them.
//!
//! Workers are counted by *position*: in a tree their order from left to right, so that what any
//! switch has below it is one range; else their rank.

use alloc::vec::Vec;
use core::ops::Range;
use fanin_wire::{FragmentHeader, JobId, Key, Label, Participants};

use crate::aggregation::{ConfigError, JobConfig, WORKERS_MAX};
use crate::machine::Reason;

const WORDS: usize = WORKERS_MAX as usize / 64;

/// A set of workers, by position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Workers([u64; WORDS]);

impl Workers {
    pub(crate) fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    pub(crate) fn contains(&self, position: usize) -> bool {
        self.0[position / 64] >> (position % 64) & 1 != 0
    }

    pub(crate) fn insert(&mut self, position: usize) {
        self.0[position / 64] |= 1 << (position % 64);
    }

    pub(crate) fn is_disjoint(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).all(|(a, b)| a & b == 0)
    }

    pub(crate) fn is_subset(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).all(|(a, b)| a & !b == 0)
    }

    pub(crate) fn extend(&mut self, other: &Self) {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a |= b);
    }

    pub(crate) fn insert_range(&mut self, range: &Range<u16>) {
        let (start, end) = (usize::from(range.start), usize::from(range.end));
        for (i, word) in self.0.iter_mut().enumerate() {
            let (from, to) = (start.max(i * 64), end.min(i * 64 + 64));
            if from < to {
                *word |= u64::MAX >> (64 - (to - from)) << (from % 64);
            }
        }
    }
}

/// The workers in a packet, and what its server makes of that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coverage {
    pub(crate) workers: Workers,
    pub(crate) count: u32,
    /// A position in it.
    pub(crate) first: u16,
    /// The server's child that it came through, as an index below the number of workers.
    pub(crate) child: u16,
    /// Whether some of them are below another child. Parameters that they lack go to all then, as
    /// it does not show which of them lacks them.
    pub(crate) several_ways: bool,
    /// Whether there are several workers below that child.
    pub(crate) shared: bool,
    /// Whether that child is where the packet came from: its address is learned then.
    pub(crate) teaches: bool,
    /// The group of workers of which these are some, if a switch may still send a sum with these and
    /// others. The parts of a group are set aside until then.
    pub(crate) part_of: Option<u16>,
}

impl Coverage {
    /// These workers, of whom `first` is one, alone at a child that is theirs.
    pub(crate) fn of(workers: Workers, first: u16) -> Self {
        let count = workers.count();
        let (child, shared) = (first, false);
        Self { workers, count, first, child, several_ways: false, shared, teaches: true, part_of: None }
    }
}

/// Which workers a job has, and which of them are in a fragment that comes to its server: a
/// protocol's own.
pub trait Roster<A>: Sized + core::fmt::Debug {
    /// The label of fragments.
    type Label: Label;
    /// The configuration of a job for a server.
    type Job: Clone;

    /// Which job that is, and the key of its packets.
    fn identity(job: &Self::Job) -> (JobId, Key);

    /// A job that was checked.
    fn admit(job: Self::Job) -> Result<Admitted<Self, A>, ConfigError>;

    /// How many there are.
    fn workers(&self) -> usize;

    /// The rank at a position.
    fn rank(&self, position: usize) -> u16;

    /// The workers in a fragment, or why nobody of this job sends such ones.
    fn coverage(&self, header: &FragmentHeader<Self::Label>) -> Result<Coverage, Reason>;

    /// The ranks that a fragment waits for: all, or a part of them.
    fn participants(&self, _label: &Self::Label) -> Participants {
        Participants::ALL
    }

    /// Whether a child gets what these participants get.
    fn reaches(&self, _child: usize, _participants: Participants) -> bool {
        true
    }

    /// The label of what is sent down about a fragment of these participants. Workers that agree on
    /// an aggregator for each place learn the next one of the fragment's place by it.
    fn answer(&self, sequence: u64, next_aggregator_index: u32, participants: Participants) -> Self::Label;
}

/// A job that a server can take.
#[derive(Debug)]
pub struct Admitted<R, A> {
    pub(crate) config: JobConfig,
    pub(crate) roster: R,
    /// Whether the job is under way: the server lost its memory, and workers hand back what they
    /// have.
    pub(crate) restored: bool,
    /// The addresses of the first children, if they are known before they send.
    pub(crate) children: Vec<A>,
}
