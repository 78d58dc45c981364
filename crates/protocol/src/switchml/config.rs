//! What the machines of one job are told at their construction, checked there, and a worker when it goes on.

use alloc::vec::Vec;
use fanin_wire::{CHUNK_ELEMENTS, Dtype, Generation, JobId, Key, ShardId, SlotIndex, WORKERS_MAX, WireDtype};

/// Most slots of one job in one shard.
pub const SLOTS_MAX: u16 = 16384;

/// One job as one shard sees it: the same on the switch and on every worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobConfig {
    /// The job's id, drawn by the switch.
    pub id: JobId,
    /// What its packets are tagged with.
    pub key: Key,
    /// How often the job was restarted.
    pub generation: Generation,
    /// Number of workers, 1 to [`WORKERS_MAX`].
    pub workers: u8,
    /// Slots of the pool in this shard, 1 to [`SLOTS_MAX`]; each has two versions.
    pub slots: u16,
    /// Elements of a chunk, one of [`CHUNK_ELEMENTS`]; twice as many where they travel as bfloat16.
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
        if self.workers == 0 || u32::from(self.workers) > WORKERS_MAX {
            return Err(ConfigError::Workers(self.workers));
        }
        if self.slots == 0 || self.slots > SLOTS_MAX {
            return Err(ConfigError::Slots(self.slots));
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

    /// Words of 32 bits that a slot's sum takes: an element that is rounded on its way is added as an int32.
    pub(crate) const fn sum_words(&self) -> usize {
        self.wire_dtype.sum_words(self.elements as usize)
    }

    /// The longest payload.
    pub(crate) const fn payload_bytes_max(&self) -> usize {
        self.wire_dtype.payload_bytes_max(self.elements as usize)
    }

    /// Bitmap of all workers.
    pub(crate) const fn everyone(&self) -> u64 {
        u64::MAX >> (64 - self.workers as u32)
    }
}

/// How a worker goes on under a switch with empty memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerPlan<A> {
    /// The job as the switch knows it. Slots, elements and wire dtype stay what they were.
    pub config: JobConfig,
    /// The switch.
    pub switch: A,
    /// Slots whose last sum the worker hands back before it goes on, because another one lacks it.
    pub restore: Vec<SlotIndex>,
}

/// A number outside its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigError {
    /// No job has so many workers.
    Workers(u8),
    /// No pool has so many slots.
    Slots(u16),
    /// No packet carries so many elements.
    Elements(u16),
}

impl core::fmt::Display for ConfigError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Workers(n) => write!(f, "{n} workers: a job has 1 to {WORKERS_MAX}"),
            Self::Slots(n) => write!(f, "{n} slots: a pool has 1 to {SLOTS_MAX}"),
            Self::Elements(n) => write!(f, "{n} elements a chunk: one of {CHUNK_ELEMENTS:?}"),
        }
    }
}

impl core::error::Error for ConfigError {}
