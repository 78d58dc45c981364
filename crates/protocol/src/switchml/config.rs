//! The configuration of the machines of one job, given at their construction and checked there, and
//! given to a worker when it goes on.

use alloc::vec::Vec;
use fanin_wire::{
    CHUNK_ELEMENTS, Dtype, Generation, JobId, Key, PLACES_MAX, RANKS_MAX, Rank, ShardId, SlotIndex,
    WireDtype, WorkerId,
};

/// Most slots of one job in one shard.
pub const SLOTS_MAX: u16 = 16384;

/// A job as one shard sees it: the same on every switch and on every worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobConfig {
    /// The job's id, drawn by the switch.
    pub id: JobId,
    /// The key that its packets are tagged with.
    pub key: Key,
    /// How often the job was restarted.
    pub generation: Generation,
    /// Number of workers of the whole job, 1 to [`RANKS_MAX`].
    pub workers: u16,
    /// Slots of the pool in this shard, 1 to [`SLOTS_MAX`]; each has two versions.
    pub slots: u16,
    /// Packets of a worker that are on the way at most, 1 to `slots`. If there are more slots, one
    /// that lost a packet keeps no other from going on.
    pub window: u16,
    /// Elements of a chunk, one of [`CHUNK_ELEMENTS`]; twice as many where they travel as bfloat16,
    /// up to four times as int8, and up to eight as int4.
    pub elements: u16,
    /// How the elements of large float tensors travel.
    pub wire_dtype: WireDtype,
    /// The shard.
    pub shard: ShardId,
    /// Whether the job goes on after its switch lost its memory: sums may be handed back.
    pub resumed: bool,
}

impl JobConfig {
    /// The configuration, if every number is within its limit.
    pub fn check(self) -> Result<Self, ConfigError> {
        if self.workers == 0 || u32::from(self.workers) > RANKS_MAX {
            return Err(ConfigError::Workers(self.workers));
        }
        if self.slots == 0 || self.slots > SLOTS_MAX {
            return Err(ConfigError::Slots(self.slots));
        }
        if self.window == 0 || self.window > self.slots {
            return Err(ConfigError::Window { window: self.window, slots: self.slots });
        }
        if !CHUNK_ELEMENTS.contains(&usize::from(self.elements)) {
            return Err(ConfigError::Elements(self.elements));
        }
        Ok(self)
    }

    /// Elements of a chunk of a tensor, which has `elements` as a whole.
    #[must_use]
    pub const fn chunk_elements(&self, dtype: Dtype, elements: usize) -> usize {
        self.wire_dtype.of_tensor(dtype, elements).chunk_elements(self.elements as usize, dtype)
    }

    /// Words of 32 bits that a slot's sum takes: an element that is rounded on its way is added as
    /// an int32.
    pub(crate) const fn sum_words(&self) -> usize {
        self.wire_dtype.sum_words(self.elements as usize)
    }

    /// The longest payload that is kept beside those of other workers: as it is, or as int8 or
    /// int4.
    pub(crate) const fn gathered_bytes(&self) -> usize {
        match self.wire_dtype {
            WireDtype::Int8 | WireDtype::Int4 => self.payload_bytes_max(),
            _ => WireDtype::Native.payload_bytes_max(self.elements as usize),
        }
    }

    /// The longest payload.
    pub(crate) const fn payload_bytes_max(&self) -> usize {
        self.wire_dtype.payload_bytes_max(self.elements as usize)
    }
}

/// The contributions to one summer of a job: a switch alone gets all; if racks sum first, the root
/// and each rack get their own.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Contributions {
    /// The rank of each place, or the lowest one behind the rack: messages name ranks. 1 to
    /// [`PLACES_MAX`] places.
    pub ranks: Vec<Rank>,
    /// Bitmap of the places that are racks.
    pub racks: u64,
}

impl Contributions {
    /// The contributions of a switch alone: each rank has its own place.
    #[must_use]
    pub fn of_workers(workers: u16) -> Self {
        Self { ranks: (0..workers).map(Rank).collect(), racks: 0 }
    }

    /// How many there are to each chunk.
    #[must_use]
    pub fn count(&self) -> u8 {
        u8::try_from(self.ranks.len()).unwrap_or(u8::MAX)
    }

    /// Bitmap of all places.
    pub(super) fn everyone(&self) -> u64 {
        u64::MAX >> (PLACES_MAX - u32::from(self.count()))
    }
}

/// The destination of a rack's sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Upstream<A> {
    /// The next switch towards the root, or the root.
    pub address: A,
    /// The rack's place there.
    pub place: WorkerId,
}

/// A job as a switch is told of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwitchJob<A> {
    /// The configuration of all of its machines.
    pub config: JobConfig,
    /// The contributions that come to this switch.
    pub contributions: Contributions,
    /// The upstream of a rack; the root has none.
    pub upstream: Option<Upstream<A>>,
}

/// The job of a switch alone.
impl<A> From<JobConfig> for SwitchJob<A> {
    fn from(config: JobConfig) -> Self {
        Self { config, contributions: Contributions::of_workers(config.workers), upstream: None }
    }
}

impl<A> SwitchJob<A> {
    /// The job, if every number is within its limit.
    pub(super) fn check(self) -> Result<Self, ConfigError> {
        self.config.check()?;
        let places = self.contributions.ranks.len();
        if places == 0 || places > PLACES_MAX as usize {
            return Err(ConfigError::Contributions(places));
        }
        Ok(self)
    }
}

/// How a worker goes on under a switch with empty memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerPlan<A> {
    /// The job as the switch knows it. Slots, window, elements and wire dtype stay what they were.
    pub config: JobConfig,
    /// The switch.
    pub switch: A,
    /// The worker's place there.
    pub place: WorkerId,
    /// Slots whose last sum the worker hands back before it goes on, because another one lacks it.
    pub restore: Vec<SlotIndex>,
}

/// A number outside its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigError {
    /// No job has so many workers.
    Workers(u16),
    /// No pool has so many slots.
    Slots(u16),
    /// No worker has so many packets on the way.
    Window {
        /// The packets.
        window: u16,
        /// The slots that they go through.
        slots: u16,
    },
    /// No packet carries so many elements.
    Elements(u16),
    /// No switch tells so many contributions apart.
    Contributions(usize),
}

impl core::fmt::Display for ConfigError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Workers(n) => write!(f, "{n} workers: a job has 1 to {RANKS_MAX}"),
            Self::Slots(n) => write!(f, "{n} slots: a pool has 1 to {SLOTS_MAX}"),
            Self::Window { window, slots } => {
                write!(f, "{window} packets on the way: 1 to the {slots} slots")
            }
            Self::Elements(n) => write!(f, "{n} elements a chunk: one of {CHUNK_ELEMENTS:?}"),
            Self::Contributions(n) => write!(f, "{n} contributions: a switch gets 1 to {PLACES_MAX}"),
        }
    }
}

impl core::error::Error for ConfigError {}
