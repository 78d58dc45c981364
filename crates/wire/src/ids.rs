//! Newtypes for the numbers in a header: an index of one kind cannot be taken for another.

/// Most places of a switch: the worker bitmap of a slot is one 64-bit word.
pub const PLACES_MAX: u32 = 64;
/// Most ranks of one job: a switch whose places are switches all.
pub const RANKS_MAX: u32 = PLACES_MAX * PLACES_MAX;

/// A job on a switch. Drawn at random on admission, so that a packet of another switch's job is not taken for ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct JobId(pub u32);

/// How often a job was restarted. A packet of an older generation is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Generation(pub u16);

/// A rank of a job, as control has it and as messages name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Rank(pub u16);

/// Who is in a packet: a worker, or a rack, by its place at the switch that it sends to. Where all send to one switch, a worker's is its
/// rank.
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
