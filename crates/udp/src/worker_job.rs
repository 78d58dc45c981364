//! The job of a worker, of any protocol.

use crate::failure::invalid;
use crate::train_socket::Peer;
use fanin_protocol::atp::AtpJobConfig;
use fanin_protocol::dlcp;
use fanin_protocol::goat::{Assignment, GoatJobConfig};
use fanin_protocol::switchml::JobConfig;
use fanin_wire::{Directions, Dtype, Generation, JobId, Key, WorkerId};
use std::io;

/// A job as one of its workers was admitted to it: what is summed how.
#[derive(Clone, Debug, PartialEq)]
pub enum WorkerJob {
    /// In the slots of a switch.
    SwitchMl {
        /// The job. The `shard` is the driver's to fill in.
        config: JobConfig,
        /// This worker's place at its switch: its rank, where no rack sums first.
        place: WorkerId,
        /// Whether racks sum first, on the way of whichever worker.
        has_racks: bool,
    },
    /// On the way to a server, in one shard.
    Atp {
        /// The job.
        config: AtpJobConfig,
        /// Of this worker's packets.
        directions: Directions,
    },
    /// Where a plan says, on the way to a server, in one shard.
    Goat {
        /// The job.
        config: GoatJobConfig,
        /// This worker's part of the plan.
        assignment: Assignment<Peer>,
    },
    /// In flows that may lose a bounded part.
    Dlcp {
        /// The job. The `shard` is the driver's to fill in.
        config: dlcp::JobConfig,
        /// This worker's place at its switch: its rank.
        place: WorkerId,
    },
}

/// The job of a switch alone, and the worker's rank.
impl From<(JobConfig, WorkerId)> for WorkerJob {
    fn from((config, place): (JobConfig, WorkerId)) -> Self {
        Self::SwitchMl { config, place, has_racks: false }
    }
}

/// What a job of any protocol has.
struct Common {
    id: JobId,
    key: Key,
    generation: Generation,
    workers: u16,
    in_flight: u16,
    elements: u16,
}

impl WorkerJob {
    const fn common(&self) -> Common {
        match *self {
            Self::SwitchMl {
                config: JobConfig { id, key, generation, workers, slots, elements, .. },
                ..
            } => Common { id, key, generation, workers, in_flight: slots, elements },
            Self::Atp {
                config: AtpJobConfig { id, key, generation, workers, window_max, elements, .. },
                ..
            } => Common { id, key, generation, workers, in_flight: window_max, elements },
            Self::Goat {
                config: GoatJobConfig { id, key, generation, workers, window_max, elements, .. },
                ..
            } => Common { id, key, generation, workers, in_flight: window_max, elements },
            Self::Dlcp {
                config: dlcp::JobConfig { id, key, generation, workers, flows, elements, .. },
                ..
            } => Common { id, key, generation, workers, in_flight: flows, elements },
        }
    }

    /// The job's id.
    #[must_use]
    pub const fn id(&self) -> JobId {
        self.common().id
    }

    /// What its packets are tagged with.
    #[must_use]
    pub const fn key(&self) -> Key {
        self.common().key
    }

    /// What a rank of it shows that it is of this job.
    #[must_use]
    pub const fn identity(&self) -> (JobId, Key) {
        (self.id(), self.key())
    }

    /// How often it was set up again.
    #[must_use]
    pub const fn generation(&self) -> Generation {
        self.common().generation
    }

    /// Packets of a worker that may be in flight, in a shard: slots, or the window of ATP and GOAT; of DLCP the flows.
    #[must_use]
    pub const fn in_flight(&self) -> u16 {
        self.common().in_flight
    }

    /// Elements of a chunk (twice as many where they travel as bfloat16, up to four times as int8) or a fragment.
    #[must_use]
    pub const fn elements(&self) -> u16 {
        self.common().elements
    }

    /// Paths that its packets take: source ports.
    pub(crate) const fn paths(&self) -> u8 {
        match self {
            // A switch knows a worker by one address.
            Self::SwitchMl { .. } | Self::Atp { .. } | Self::Goat { .. } => 1,
            Self::Dlcp { config, .. } => config.paths,
        }
    }

    /// Elements that one packet carries, of a tensor of `elements` elements.
    pub(crate) const fn packet_elements(&self, dtype: Dtype, elements: usize) -> usize {
        match self {
            Self::SwitchMl { config, .. } => config.chunk_elements(dtype, elements),
            Self::Atp { config, .. } => config.elements as usize,
            Self::Goat { config, .. } => config.elements as usize,
            // They travel as they are.
            Self::Dlcp { config, .. } => 4 * config.elements as usize / dtype.element_bytes(),
        }
    }

    /// Whether it has other collectives than all-reduces. A rack would not know behind which of its places a root is.
    #[must_use]
    pub const fn has_roots(&self) -> bool {
        matches!(self, Self::SwitchMl { has_racks: false, .. } | Self::Dlcp { .. })
    }

    /// Whether one switch or server gets all of its packets, in one shard.
    pub(crate) const fn has_one_lane(&self) -> bool {
        matches!(self, Self::Atp { .. } | Self::Goat { .. })
    }

    /// Whether every number is within its limit.
    pub(crate) fn check(&self) -> io::Result<()> {
        match self {
            Self::SwitchMl { config, place, .. } => {
                let config = config.check().map_err(invalid)?;
                if u16::from(place.0) >= config.workers {
                    return Err(invalid(format!("place {} in a job of {} workers", place.0, config.workers)));
                }
                Ok(())
            }
            Self::Atp { config, .. } => config.check().map(drop).map_err(invalid),
            Self::Goat { config, assignment } => config.check(assignment.sub_models()).map_err(invalid),
            Self::Dlcp { config, place } => {
                let config = config.check().map_err(invalid)?;
                if u16::from(place.0) >= config.workers {
                    return Err(invalid(format!("place {} in a job of {} workers", place.0, config.workers)));
                }
                Ok(())
            }
        }
    }

    /// What a job keeps when it goes on under another switch or server.
    pub(crate) fn shape(&self) -> String {
        let Common { workers, in_flight, elements, .. } = self.common();
        let (in_flight, how) = match self {
            Self::SwitchMl { config, .. } => (format!("{in_flight} slots"), config.wire_dtype.name()),
            Self::Atp { .. } => (format!("a window of {in_flight} fragments"), "ATP"),
            Self::Goat { .. } => (format!("a window of {in_flight} fragments"), "GOAT"),
            Self::Dlcp { .. } => (format!("{in_flight} flows with blocks"), "DLCP"),
        };
        format!("{workers} workers, {in_flight} of {elements} elements ({how})")
    }
}
