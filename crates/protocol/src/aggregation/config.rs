//! The configuration of the machines of a job, given at their construction and checked there, and
//! given to a worker when it goes on.

use fanin_wire::{
    CHILDREN_MAX, Collective, Dtype, FRAGMENT_ELEMENTS, Generation, GradientHeader, JobId, Key, LEVELS_MAX,
    PLANNED_WORKERS_MAX, WireDtype, is_fragment,
};

use crate::transport::mix;

/// Most workers of a job: two levels of 32 (ATP §3.4).
pub const WORKERS_MAX: u16 = (CHILDREN_MAX * CHILDREN_MAX) as u16;
/// Most elements that a worker may have sent and not got back: window times elements of a fragment.
/// The server holds this many sums and parameters of each job.
pub const WINDOW_ELEMENTS_MAX: usize = 1 << 20;
/// Most aggregators of a shard of a switch.
pub const AGGREGATORS_MAX: u32 = 1 << 24;
/// Most elements in all aggregators of a shard: 4 GiB.
pub(super) const AGGREGATOR_ELEMENTS_MAX: u64 = 1 << 30;
/// In how many aggregators a fragment looks for a place, unless somebody says otherwise.
pub const DEFAULT_WAYS: u8 = 8;
/// Most of these.
pub const WAYS_MAX: u8 = 64;
/// Most jobs that a switch or a server holds.
pub const JOBS_MAX: usize = 1024;
/// Most parts of a model: their number has 16 bits.
pub const SUB_MODELS_MAX: usize = 1 << 16;
/// The fixed scaling factor (ATP §3.8).
const STATIC_FACTOR: f64 = 1e8;
/// The units of the fixed factor that the largest value of a fragment needs at least, for the fixed
/// factor to be fine enough. It is then rounded by 2^-9 of itself at most, as bfloat16 would round
/// it.
const UNITS_MIN: f64 = 256.0;

/// How a fragment finds its aggregator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Hashing {
    /// By a hash of job and place in the window, and by another one after a collision (ATP §3.5,
    /// §3.6).
    #[default]
    Hash,
    /// By the sequence number, wherever others are: the comparison of Figure 14.
    Linear,
    /// In turn within a part of the table that no other job uses, as long as the window: the static
    /// shares of Figures 13 and 14.
    Partition {
        /// Its first aggregator.
        first: u32,
    },
}

/// The factor of a float before it is rounded to an integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Scaling {
    /// 10^8, always (ATP §3.8).
    #[default]
    Static,
    /// 10^8; once overflows are frequent, a factor for each fragment by its largest value (ATP
    /// §B.3). Also for fragments of tiny values, which would be 0 under the fixed factor: as long
    /// as their factor is not agreed on, they go as original values.
    Dynamic,
}

/// How a sum that an int32 cannot hold is dealt with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Overflow {
    /// It saturates, and the server asks for the original values (ATP §3.8).
    #[default]
    Reactive,
    /// A worker whose value alone makes it possible sends the original values at once: the
    /// comparison of Table 1 (ATP §B.2).
    Proactive,
}

/// A job as its workers and its server see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobConfig {
    /// The job's id.
    pub id: JobId,
    /// The key that its packets are tagged with.
    pub key: Key,
    /// How often the job was set up again.
    pub generation: Generation,
    /// Number of workers, 1 to [`WORKERS_MAX`].
    pub workers: u16,
    /// Elements of a fragment, one of [`FRAGMENT_ELEMENTS`]; in a simulation perhaps
    /// [`SAMPLE_ELEMENTS`](fanin_wire::SAMPLE_ELEMENTS).
    pub elements: u16,
    /// Most fragments that a worker has sent and not got back; with `elements` no more than
    /// [`WINDOW_ELEMENTS_MAX`].
    pub window_max: u16,
    /// Aggregators that the indices are spread over: those of the switch that has fewest. With
    /// none, all is aggregated at the server.
    pub aggregators: u32,
    /// How a fragment finds its aggregator.
    pub hashing: Hashing,
    /// The factor of floats.
    pub scaling: Scaling,
    /// The reaction to a sum that does not fit.
    pub overflow: Overflow,
    /// Whether workers adjust their windows (ATP §3.7). Off only to measure what it is worth.
    pub congestion_control: bool,
    /// How the values of large float32 tensors travel, until a switch has added them:
    /// [`WireDtype::Bfloat16`], or [`WireDtype::SharedExponent`] for integers of four bytes.
    pub wire_dtype: WireDtype,
    /// Most elements of a float tensor whose original values go to the server at once, which sums
    /// them exactly; none in the paper.
    pub originals_elements_max: u32,
}

impl JobConfig {
    /// The configuration, if every number is within its limit.
    ///
    /// # Errors
    /// The first number that is not.
    pub fn check(self) -> Result<Self, ConfigError> {
        if self.workers == 0 || self.workers > WORKERS_MAX {
            return Err(ConfigError::Workers(self.workers));
        }
        if !is_fragment(self.elements.into()) {
            return Err(ConfigError::Elements(self.elements));
        }
        let window_elements = usize::from(self.window_max) * usize::from(self.elements);
        if window_elements == 0 || window_elements > WINDOW_ELEMENTS_MAX {
            return Err(ConfigError::Window { fragments: self.window_max, elements: self.elements });
        }
        if self.aggregators > AGGREGATORS_MAX {
            return Err(ConfigError::Aggregators(self.aggregators));
        }
        if let Hashing::Partition { first } = self.hashing
            && u64::from(first) + u64::from(self.window_max) > u64::from(self.aggregators)
        {
            return Err(ConfigError::Partition { first, fragments: self.window_max });
        }
        Ok(self)
    }

    /// The type of two bytes in which a worker's fragments of a tensor leave, if they do. The
    /// machine that adds them scales them. A proactive worker scales its own, to know whether a sum
    /// could overflow.
    pub(crate) fn contributes_as(&self, collective: Collective) -> Option<Dtype> {
        collective.half().filter(|_| self.overflow == Overflow::Reactive)
    }

    /// The longest payload of a fragment in bytes.
    pub(crate) const fn payload_bytes(&self) -> usize {
        self.elements as usize * 4
    }

    /// The place of a fragment in the window: its parameters come before the next of the same place
    /// is sent.
    pub(crate) const fn place(&self, sequence: u64) -> usize {
        (sequence % self.window_max as u64) as usize
    }

    /// The aggregator that a fragment uses, until the server moves its place elsewhere (ATP §3.5:
    /// `HASH(<job, sequence number>) % numAggregators`).
    ///
    /// The place is hashed, and not the sequence number, so that "the old index" which the server
    /// replaces after a collision is the same for all workers. It sends no two places of a job to
    /// one aggregator as long as there are as many aggregators as places. A job that collides with
    /// itself does so in every rack at once, and each such fragment comes to the server once from
    /// every worker. With 1,024 places drawn at random from 8,192, one in sixteen would.
    pub(crate) fn aggregator_index(&self, sequence: u64) -> u32 {
        let aggregators = u64::from(self.aggregators.max(1));
        let index = match self.hashing {
            Hashing::Hash => permuted(self.place(sequence) as u64 % aggregators, aggregators, self.id),
            Hashing::Linear => sequence % aggregators,
            Hashing::Partition { first } => u64::from(first) + self.place(sequence) as u64,
        };
        index as u32
    }

    /// The next index of a place after its fragment `sequence` met a collision at `index` (ATP
    /// §3.6: `HASH(<aggregatorIndex>) % numAggregators`).
    ///
    /// Job and sequence number are in the hash, not the index alone. Two jobs, or two places of
    /// one, that collide would otherwise meet again wherever they move. All places would end in the
    /// few aggregators that a hash of nothing but itself comes back to: about as many as the root
    /// of all.
    pub(crate) fn rehashed(&self, sequence: u64, index: u32) -> u32 {
        let seed = u64::from(self.id.0) << 32 | u64::from(index);
        (mix(mix(seed) ^ sequence) % u64::from(self.aggregators.max(1))) as u32
    }

    /// The factor of the values of a fragment with `exponent`.
    pub(crate) fn factor(&self, exponent: i16) -> f64 {
        factor(exponent, self.workers)
    }

    /// Whether the fixed factor is too coarse for values up to 2^`exponent`.
    pub(crate) fn is_tiny(&self, exponent: i16) -> bool {
        power_of_two(exponent.into()) * STATIC_FACTOR < UNITS_MIN
    }

    /// Whether values up to 2^`exponent` from all workers could saturate under the fixed factor.
    pub(crate) fn may_overflow(&self, exponent: i16) -> bool {
        let largest = power_of_two(exponent.into()) * STATIC_FACTOR + 0.5;
        largest * f64::from(self.workers) >= f64::from(i32::MAX)
    }
}

/// How a worker goes on in another generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerPlan<A, D> {
    /// The job's id: another one where a server that lost its memory admitted it anew.
    pub id: JobId,
    /// The key that its packets are tagged with, the id's own.
    pub key: Key,
    /// The generation.
    pub generation: Generation,
    /// The directions of the worker's packets: they may be summed in another place now.
    pub directions: D,
    /// The rack's switch, or the server where there is none.
    pub upstream: A,
}

/// The factor of the values of a fragment with `exponent`, in a job of so many workers.
///
/// Under an exponent m no sum of values up to 2^m saturates. Each counts at most (2^31 - 1 - n) / n
/// and half a unit for rounding (§B.3). That is one unit less than there, because the largest
/// integer means "saturated".
pub(super) fn factor(exponent: i16, workers: u16) -> f64 {
    if exponent == GradientHeader::STATIC_FACTOR {
        return STATIC_FACTOR;
    }
    let workers = f64::from(workers);
    (f64::from(i32::MAX) - workers) / workers * power_of_two(-i32::from(exponent))
}

/// 2^`exponent`, for any exponent that a float32 can have and some more.
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(u64::from((1023 + exponent.clamp(-1022, 1023)).unsigned_abs()) << 52)
}

/// Number `at` of a permutation of the numbers below `below`, each job's own: a Feistel network
/// over an even number of bits, gone through until it ends below.
fn permuted(at: u64, below: u64, job: JobId) -> u64 {
    let bits = u64::BITS - (below - 1).leading_zeros();
    let half = bits.div_ceil(2).max(1);
    let mut at = at;
    loop {
        for round in 0..FEISTEL_ROUNDS {
            let (left, right) = (at >> half, at & ((1 << half) - 1));
            let other = mix(u64::from(job.0) << 32 | round << 24 | right) & ((1 << half) - 1);
            at = right << half | (left ^ other);
        }
        if at < below {
            return at;
        }
    }
}

/// Four of them, with a good hash, are a permutation that cannot be told from a random one (Luby
/// and Rackoff, 1988).
const FEISTEL_ROUNDS: u64 = 4;

/// A number outside its limit, or directions that do not fit together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigError {
    /// No job has so many workers.
    Workers(u16),
    /// No packet carries so many elements.
    Elements(u16),
    /// No window, or one that is too large for fragments of so many elements.
    Window {
        /// Fragments of the window.
        fragments: u16,
        /// Elements of a fragment.
        elements: u16,
    },
    /// No switch has so many aggregators.
    Aggregators(u32),
    /// No fragment has so many aggregators, or none.
    Ways(u8),
    /// The job's part of the table would end beyond it.
    Partition {
        /// Its first aggregator.
        first: u32,
        /// How many it has.
        fragments: u16,
    },
    /// No hierarchy has such a level.
    Level(u8),
    /// The machine holds as many jobs as it can.
    Jobs,
    /// No model has such parts: none, too many, or one without fragments.
    SubModels(usize),
    /// The sum of a node goes on to others, and comes back to it.
    Onward,
    /// More workers than a plan's packets can name.
    PlannedWorkers(u16),
    /// The assignment of the worker of this rank is not one of the job's sub-models.
    Assignment {
        /// The worker.
        rank: usize,
        /// Sub-models that it says a node for.
        said: usize,
        /// How many there are.
        is: usize,
    },
    /// The server was told the assignments, or the ways down, of so many workers of a job with
    /// another number.
    Assignments(usize),
    /// The server was told the place of so many workers of a job with another number.
    Directions(usize),
    /// The worker of this rank stands in no place of its own: no bit where it needs one, several,
    /// or another's.
    Place(usize),
    /// The worker of this rank counts another number of children than a switch on its way has.
    FanIn {
        /// The worker.
        rank: usize,
        /// Level of the switch.
        level: u8,
        /// The number that the worker's packets state.
        said: u8,
        /// How many there are.
        is: u8,
    },
}

impl core::fmt::Display for ConfigError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Workers(n) => write!(f, "{n} workers: a job has 1 to {WORKERS_MAX}"),
            Self::Elements(n) => write!(f, "{n} elements a fragment: one of {FRAGMENT_ELEMENTS:?}"),
            Self::Window { fragments, elements } => write!(
                f,
                "a window of {fragments} fragments of {elements} elements: 1 to {WINDOW_ELEMENTS_MAX} elements in all"
            ),
            Self::Aggregators(n) => write!(f, "{n} aggregators: a switch has at most {AGGREGATORS_MAX}"),
            Self::Ways(n) => write!(f, "{n} ways: a fragment has 1 to {WAYS_MAX} aggregators"),
            Self::Partition { first, fragments } => {
                write!(f, "a part of {fragments} aggregators from {first} on: the table ends before")
            }
            Self::Level(level) => write!(f, "level {level}: a hierarchy has {LEVELS_MAX}, counted from 0"),
            Self::Jobs => write!(f, "no more than {JOBS_MAX} jobs at one machine"),
            Self::SubModels(n) => {
                write!(f, "{n} sub-models: 1 to {SUB_MODELS_MAX}, each of at least one fragment")
            }
            Self::Onward => write!(f, "a sum goes on to other nodes in a circle: none of them is the last"),
            Self::PlannedWorkers(n) => {
                write!(f, "{n} workers: a job with a plan has 1 to {PLANNED_WORKERS_MAX}")
            }
            Self::Assignment { rank, said, is } => {
                write!(f, "worker {rank} is told where {said} sub-models are summed; there are {is}")
            }
            Self::Assignments(n) => {
                write!(f, "assignments of {n} workers, which is not the number of workers")
            }
            Self::Directions(n) => write!(f, "directions of {n} workers, which is not the number of workers"),
            Self::Place(rank) => write!(f, "worker {rank} has no place of its own in the hierarchy"),
            Self::FanIn { rank, level, said, is } => {
                write!(
                    f,
                    "worker {rank} says that its switch of level {level} has {said} children; it has {is}"
                )
            }
        }
    }
}

impl core::error::Error for ConfigError {}
