//! The worker of either protocol, as its driver runs it.

use crate::clock::Clock;
use crate::part::Part;
use crate::train_socket::Peer;
use fanin_protocol::atp::{AtpJobConfig, AtpWorker};
use fanin_protocol::switchml::{JobConfig, Worker};
use fanin_protocol::{Endpoint, WorkerEvent, WorkerStatistics};
use fanin_wire::{Directions, Dtype, Generation, JobId, Op, ShardId, SlotIndex};
use std::io;

/// A job as one of its workers was admitted to it: what is summed how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerJob {
    /// In the slots of one switch. The `shard` is the driver's to fill in.
    SwitchMl(JobConfig),
    /// On the way to a server, in one shard.
    Atp {
        /// The job.
        config: AtpJobConfig,
        /// Of this worker's packets.
        directions: Directions,
    },
}

impl From<JobConfig> for WorkerJob {
    fn from(config: JobConfig) -> Self {
        Self::SwitchMl(config)
    }
}

impl WorkerJob {
    /// The job's id.
    #[must_use]
    pub const fn id(&self) -> JobId {
        match self {
            Self::SwitchMl(config) => config.id,
            Self::Atp { config, .. } => config.id,
        }
    }

    /// How often it was set up again.
    #[must_use]
    pub const fn generation(&self) -> Generation {
        match self {
            Self::SwitchMl(config) => config.generation,
            Self::Atp { config, .. } => config.generation,
        }
    }

    /// Packets of a worker that may be in flight, in a shard: slots, or ATP's window.
    #[must_use]
    pub const fn in_flight(&self) -> u16 {
        match self {
            Self::SwitchMl(config) => config.slots,
            Self::Atp { config, .. } => config.window_max,
        }
    }

    /// Elements of a chunk (twice as many where they travel as bfloat16) or a fragment.
    #[must_use]
    pub const fn elements(&self) -> u16 {
        match self {
            Self::SwitchMl(config) => config.elements,
            Self::Atp { config, .. } => config.elements,
        }
    }

    pub(crate) fn workers(&self) -> u16 {
        match self {
            Self::SwitchMl(config) => config.workers.into(),
            Self::Atp { config, .. } => config.workers,
        }
    }

    /// Elements that one packet carries, of a tensor of `elements` elements.
    pub(crate) const fn packet_elements(&self, dtype: Dtype, elements: usize) -> usize {
        match self {
            Self::SwitchMl(config) => config.chunk_elements(dtype, elements),
            Self::Atp { config, .. } => config.elements as usize,
        }
    }

    pub(crate) fn check(self) -> io::Result<Self> {
        let invalid = |error: Box<dyn std::error::Error + Send + Sync>| {
            io::Error::new(io::ErrorKind::InvalidInput, error)
        };
        Ok(match self {
            Self::SwitchMl(config) => Self::SwitchMl(config.check().map_err(|error| invalid(error.into()))?),
            Self::Atp { config, directions } => {
                Self::Atp { config: config.check().map_err(|error| invalid(error.into()))?, directions }
            }
        })
    }

    /// As one shard sees it.
    pub(crate) const fn in_shard(self, shard: ShardId) -> Self {
        match self {
            Self::SwitchMl(config) => Self::SwitchMl(JobConfig { shard, ..config }),
            atp @ Self::Atp { .. } => atp,
        }
    }

    /// What a job keeps when it goes on under another switch or server.
    pub(crate) fn shape(&self) -> String {
        match self {
            Self::SwitchMl(job) => format!(
                "{} workers, {} slots of {} elements ({})",
                job.workers,
                job.slots,
                job.elements,
                job.wire_dtype.name()
            ),
            Self::Atp { config, .. } => format!(
                "{} workers, a window of {} fragments of {} elements (ATP)",
                config.workers, config.window_max, config.elements
            ),
        }
    }
}

const OTHER_PROTOCOL: &str = "a driver resumes no job of another shape, of which the protocol is a part";

/// What a shard of the driver runs.
pub(crate) trait WorkerMachine:
    Endpoint<Address = Peer, Event = WorkerEvent<Part>> + Send + 'static
{
    fn submit(&mut self, part: Part, op: Op);
    /// Completed exchanges of each slot, of which ATP has none.
    fn suspend(&mut self) -> Vec<u32>;
    /// Goes on under a switch or a server with empty memory. The job is of the machine's own protocol.
    fn resume(&mut self, job: WorkerJob, switch: Peer, restore: &[SlotIndex]);
    fn abandon(&mut self) -> Vec<Part>;
    fn statistics(&self) -> WorkerStatistics;
}

impl WorkerMachine for Worker<Peer, Part> {
    fn submit(&mut self, part: Part, op: Op) {
        Self::submit(self, part, op);
    }

    fn suspend(&mut self) -> Vec<u32> {
        Self::suspend(self)
    }

    fn resume(&mut self, job: WorkerJob, switch: Peer, restore: &[SlotIndex]) {
        let WorkerJob::SwitchMl(config) = job else { panic!("{OTHER_PROTOCOL}") };
        Self::resume(self, config, switch, restore);
    }

    fn abandon(&mut self) -> Vec<Part> {
        Self::abandon(self).collect()
    }

    fn statistics(&self) -> WorkerStatistics {
        Self::statistics(self)
    }
}

impl WorkerMachine for AtpWorker<Peer, Part> {
    fn submit(&mut self, part: Part, op: Op) {
        Self::submit(self, part, op);
    }

    fn suspend(&mut self) -> Vec<u32> {
        Self::suspend(self);
        Vec::new()
    }

    fn resume(&mut self, job: WorkerJob, switch: Peer, _: &[SlotIndex]) {
        let WorkerJob::Atp { config, directions } = job else { panic!("{OTHER_PROTOCOL}") };
        self.rename(config.id);
        Self::resume(self, Clock.now(), config.generation, directions, switch);
    }

    fn abandon(&mut self) -> Vec<Part> {
        Self::abandon(self).collect()
    }

    fn statistics(&self) -> WorkerStatistics {
        Self::statistics(self)
    }
}
