//! Newtypes for the numbers in a header: an index of one kind cannot be taken for another.

/// Most places of a switch: the worker bitmap of a slot is one 64-bit word.
pub const PLACES_MAX: u32 = 64;
/// Most ranks of one job: a switch whose places are switches all.
pub const RANKS_MAX: u32 = PLACES_MAX * PLACES_MAX;

/// A job on a switch. Drawn at random on admission, so that a packet of another switch's job is not
/// taken for ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct JobId(pub u32);

/// How often a job was restarted. A packet of an older generation is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Generation(pub u16);

/// A rank of a job, as control has it and as messages name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Rank(pub u16);

/// The ranks that contribute to a collective and get its sum, a bit for each.
///
/// The lowest bit is rank 0's. Bits above a job's last rank mean nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Participants(pub u128);

impl Participants {
    /// Everybody in the job.
    pub const ALL: Self = Self(u128::MAX);

    /// These ranks; `None` if one is above 127, which no set has room for.
    #[must_use]
    pub fn of(ranks: impl IntoIterator<Item = Rank>) -> Option<Self> {
        let bit = |rank: Rank| 1u128.checked_shl(rank.0.into());
        ranks.into_iter().try_fold(0, |set, rank| Some(set | bit(rank)?)).map(Self)
    }

    /// Whether this rank is one of them; every rank is one of all.
    #[must_use]
    pub fn contains(self, rank: Rank) -> bool {
        self == Self::ALL || 1u128.checked_shl(rank.0.into()).is_some_and(|bit| self.0 & bit != 0)
    }

    /// Whether all of them are in another set.
    #[must_use]
    pub const fn is_subset(self, other: Self) -> bool {
        self.0 & !other.0 == 0
    }
}

impl Default for Participants {
    fn default() -> Self {
        Self::ALL
    }
}

/// The contributor of a packet: a worker, or a rack, by its place at the switch that it sends to.
/// If all send to one switch, a worker's is its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct WorkerId(pub u8);

impl WorkerId {
    /// The addressee of a packet that goes to every worker of the job.
    pub const ALL: Self = Self(0xff);

    /// This worker's bit in a worker bitmap. The id must be below [`PLACES_MAX`].
    #[must_use]
    pub const fn bit(self) -> u64 {
        1 << (self.0 as u64 & 63)
    }
}

/// A core of the switch with its own socket and slots; shards share nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ShardId(pub u8);

/// A slot of a job's pool within one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct SlotIndex(pub u16);

impl SlotIndex {
    /// As an index into a table of slots.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The node that sums fragments in a plan (GOAT §III-D): a programmable switch by its number in the
/// job's plan, or the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct AggregationNode(pub u16);

impl AggregationNode {
    /// The server, which is in every plan.
    pub const SERVER: Self = Self(0);
}

/// A part of a model whose gradients a plan gives to aggregation nodes as a whole (GOAT §III-D).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct SubModel(pub u16);

/// A flow of a job (DLCP): a tensor, or a part of a long one. Its blocks come to a server under the
/// number under which their sums go back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct FlowId(pub u32);

/// The fraction of a flow's blocks that may be lost (DLCP §3.2.1), in millionths: at least 0, below
/// 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct LossBound(u32);

impl LossBound {
    /// Nothing may be lost.
    pub const RELIABLE: Self = Self(0);
    const ONE: u32 = 1_000_000;

    /// The nearest bound to `fraction`; `None` when that is not at least 0 and below 1.
    #[must_use]
    pub fn new(fraction: f64) -> Option<Self> {
        // The cast cuts, and a fraction just below 1 stays below.
        (0.0..1.0)
            .contains(&fraction)
            .then(|| Self(((fraction * f64::from(Self::ONE) + 0.5) as u32).min(Self::ONE - 1)))
    }

    /// From millionths; `None` for one and more.
    #[must_use]
    pub const fn from_millionths(millionths: u32) -> Option<Self> {
        if millionths < Self::ONE { Some(Self(millionths)) } else { None }
    }

    /// In millionths.
    #[must_use]
    pub const fn millionths(self) -> u32 {
        self.0
    }

    /// How many of so many blocks may be lost, rounded down: of less than 1/bound blocks none.
    #[must_use]
    pub const fn of_blocks(self, blocks: u32) -> u32 {
        (blocks as u64 * self.0 as u64 / Self::ONE as u64) as u32
    }
}

impl core::fmt::Display for LossBound {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} %", f64::from(self.0) * 100.0 / f64::from(Self::ONE))
    }
}
