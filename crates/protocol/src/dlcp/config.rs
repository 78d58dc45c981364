//! The configuration of the machines of one job, given at their construction and checked there.

use alloc::vec::Vec;
use core::time::Duration;
use fanin_wire::{
    BlockHeader, CHUNK_ELEMENTS, Collective, Dtype, FlowId, Generation, JobId, Key, LossBound, Op, PATHS_MAX,
    PLACES_MAX, Pattern, Rank, SAMPLE_ELEMENTS, ShardId, WireDtype, WorkerId,
};

use super::flow::ReceiverConfig;
use super::rate::RateConfig;
use crate::transport::RetransmissionConfig;

/// Most workers of a job: who is in a sum is one word.
pub const WORKERS_MAX: u16 = PLACES_MAX as u16;
/// Most flows that a worker has under way.
pub const FLOWS_MAX: u16 = 256;
/// Most blocks of a flow: 64 requests speak of all.
pub const FLOW_BLOCKS_MAX: u32 = 64 * fanin_wire::REQUEST_BLOCKS;

/// When the receiver of a flow says that it has enough.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Finish {
    /// When its sender has stopped and nothing more comes, so that nothing is missing but what was
    /// lost. From the first request on, when the bound is met.
    #[default]
    Stopped,
    /// The moment the bound is met, as in the paper (§3.2.1). Without any loss the last part of
    /// each flow is missing then.
    BoundMet,
}

/// A job as one shard sees it: the same at its server and at every worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct JobConfig {
    /// The job's id, drawn by the server.
    pub id: JobId,
    /// The key that its packets are tagged with.
    pub key: Key,
    /// How often the job was restarted.
    pub generation: Generation,
    /// Number of workers, 1 to [`WORKERS_MAX`].
    pub workers: u16,
    /// The shard.
    pub shard: ShardId,
    /// Words of four bytes that a full block has, one of [`CHUNK_ELEMENTS`]; the paper's 1,400
    /// bytes are nearest to 352.
    pub elements: u16,
    /// The loss bound of each worker's part of a float tensor on its way to the server (§3.2.1),
    /// unless the tensor has its own.
    pub push_bound: LossBound,
    /// The loss bound on the way back. Above 0 a worker keeps its own gradient where it lacks a
    /// mean (Appendix A), and the ranks' tensors differ from then on; sums are never lost.
    pub pull_bound: LossBound,
    /// Blocks of a flow, 1 to [`FLOW_BLOCKS_MAX`]: longer tensors are several flows.
    pub flow_blocks: u32,
    /// Flows that a worker has under way, 1 to [`FLOWS_MAX`]. The server has room for twice as
    /// many: what is further ahead waits.
    pub flows: u16,
    /// Blocks of flows that a worker has under way, though two flows may be in any case. The server
    /// has room for twice as many.
    pub window_blocks: u32,
    /// How fast a flow is sent.
    pub rate: RateConfig,
    /// When the receiver of a flow of contributions has enough.
    pub finish: Finish,
    /// How long nothing more must have come after a stop before its receiver asks for what is
    /// missing: signals overtake data in queues.
    pub quiet: Duration,
    /// When a signal that was not answered is sent again.
    pub retransmission: RetransmissionConfig,
    /// Source ports of a worker that packets are spread over (§3.2.3), 1 to [`PATHS_MAX`].
    pub paths: u8,
    /// The first flow that some worker lacks sums of, if the server lost its memory.
    pub resumes_at: Option<FlowId>,
}

impl JobConfig {
    /// The configuration, if every number is within its limit.
    ///
    /// # Errors
    /// [`ConfigError`] names the number.
    pub fn check(self) -> Result<Self, ConfigError> {
        if self.workers == 0 || self.workers > WORKERS_MAX {
            return Err(ConfigError::Workers(self.workers));
        }
        let elements = usize::from(self.elements);
        if elements != SAMPLE_ELEMENTS && !CHUNK_ELEMENTS.contains(&elements) {
            return Err(ConfigError::Elements(self.elements));
        }
        if self.flow_blocks == 0 || self.flow_blocks > FLOW_BLOCKS_MAX {
            return Err(ConfigError::FlowBlocks(self.flow_blocks));
        }
        if self.flows == 0 || self.flows > FLOWS_MAX {
            return Err(ConfigError::Flows(self.flows));
        }
        if self.paths == 0 || self.paths > PATHS_MAX {
            return Err(ConfigError::Paths(self.paths));
        }
        self.rate.check().map_err(|()| ConfigError::Rate)?;
        if self.retransmission.ceiling.is_zero() {
            return Err(ConfigError::Ceiling);
        }
        Ok(self)
    }

    /// Most flows at the server. A worker may lack sums of its first flow while another has all of those
    /// that it may have under way. A worker that is further ahead waits.
    pub(super) const fn flows_max(&self) -> usize {
        2 * self.flows as usize
    }

    /// Blocks of flows that there may be: workers may be a window apart.
    pub(super) fn blocks_max(&self) -> u64 {
        2 * u64::from(self.window_blocks).max(2 * u64::from(self.flow_blocks))
    }

    /// Whether some worker may have begun a flow with a server that lost its memory. It is reliable:
    /// each block is one that a worker hands back, or nobody has its sum.
    pub(super) fn is_made_again(&self, flow: FlowId) -> bool {
        let is_near = |first: FlowId| (flow.0.wrapping_sub(first.0) as usize) < self.flows_max();
        self.resumes_at.is_some_and(is_near)
    }

    /// The configuration of the receiver of a flow of contributions.
    pub(super) fn receiver(&self) -> ReceiverConfig {
        let (period, ceiling) = (self.rate.period, self.retransmission.ceiling);
        let (finish, quiet, stretch) = (self.finish, self.quiet, self.rate.stretch());
        let (calm_periods, paths) = (self.rate.calm_periods, self.paths);
        ReceiverConfig { period, calm_periods, ceiling, finish, quiet, stretch, paths }
    }

    /// The configuration of the receiver of a flow of sums. It stops when all of them are made, and
    /// nobody may end it before: a worker that did would give its tensor back while the server
    /// still asks for it.
    pub(super) fn receiver_of_sums(&self) -> ReceiverConfig {
        ReceiverConfig { finish: Finish::Stopped, ..self.receiver() }
    }

    /// Whether a worker's stop rides on the last block of a round.
    ///
    /// The last blocks of a stretch are those that queues may drop. A stop that is lost with its block
    /// is said a millisecond later, and most flows of a fast network take less than that. A job whose
    /// flows end as soon as their bound is met expects such losses. So its workers say stop at once,
    /// as in the paper (§3.2.1).
    pub(super) const fn stops_ride(&self) -> bool {
        matches!(self.finish, Finish::Stopped)
    }

    /// Bytes of a full block.
    pub(super) const fn block_bytes(&self) -> usize {
        4 * self.elements as usize
    }

    /// The loss bound of a worker's part of a tensor, which may have its `own`. An integer is not a
    /// gradient, and a broadcast tensor has no second contribution.
    pub(super) const fn push_bound(&self, collective: &Collective, own: Option<LossBound>) -> LossBound {
        match own {
            _ if !may_lose(collective) => LossBound::RELIABLE,
            Some(own) => own,
            None => self.push_bound,
        }
    }

    /// The loss bound of its sum: one's own gradient takes the place of a mean, and of nothing
    /// else.
    pub(super) const fn pull_bound(&self, collective: &Collective) -> LossBound {
        match (collective.pattern, collective.op, is_float(collective.dtype)) {
            (Pattern::AllReduce, Op::Average, true) => self.pull_bound,
            _ => LossBound::RELIABLE,
        }
    }

    /// Bytes of the element type that travels.
    pub(super) const fn element_bytes(collective: &Collective) -> usize {
        match collective.wire_dtype {
            WireDtype::Native => collective.dtype.element_bytes(),
            WireDtype::SharedExponent | WireDtype::Bfloat16 | WireDtype::Int8 | WireDtype::Int4 => 4,
        }
    }

    /// Blocks of a flow of so many elements.
    pub(super) fn blocks(&self, collective: &Collective, elements: u32) -> u32 {
        let of_block = self.block_bytes() / Self::element_bytes(collective);
        u32::try_from((elements as usize).div_ceil(of_block)).unwrap_or(u32::MAX)
    }

    /// Bytes of a block that was named so: none of one that is the sum of nothing.
    pub(super) fn bytes_of_sum(&self, collective: &Collective, elements: u32, header: &BlockHeader) -> usize {
        match header.contributions {
            0 => 0,
            _ => self.bytes_of_block(collective, elements, header.block),
        }
    }

    /// Bytes of one of its blocks: the last may be shorter.
    pub(super) fn bytes_of_block(&self, collective: &Collective, elements: u32, block: u32) -> usize {
        let bytes = elements as usize * Self::element_bytes(collective);
        bytes.saturating_sub(block as usize * self.block_bytes()).min(self.block_bytes())
    }
}

/// Whether anything of a worker's part may be lost, whatever the bound.
pub(super) const fn may_lose(collective: &Collective) -> bool {
    matches!(collective.pattern, Pattern::AllReduce | Pattern::Reduce(_)) && is_float(collective.dtype)
}

const fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::Float32 | Dtype::Float16 | Dtype::Bfloat16 | Dtype::Float64)
}

/// A job as its server is told of it.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerJob {
    /// The configuration of all of its machines.
    pub config: JobConfig,
    /// The rank of each place: messages name ranks.
    pub ranks: Vec<Rank>,
    /// The rate of the server's own link, in bits a second. To each worker it sends no faster than
    /// the job's line rate.
    pub link_rate_bps: u64,
    /// By shard, of a job whose server lost its memory: where it resumes.
    pub resumes_at: Vec<FlowId>,
}

/// The ranks' numbers are their places, and the server's link is as fast as theirs.
impl From<JobConfig> for ServerJob {
    fn from(config: JobConfig) -> Self {
        let link_rate_bps = config.rate.line_rate_bps;
        let ranks = (0..config.workers).map(Rank).collect();
        Self { config, ranks, link_rate_bps, resumes_at: Vec::new() }
    }
}

/// The plan by which a worker goes on with a server that has an empty memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkerPlan<A> {
    /// The job there; of its numbers only the id, the key, the generation, the shard and where it
    /// resumes may be others than before.
    pub config: JobConfig,
    /// The worker's place.
    pub place: WorkerId,
    /// The server.
    pub server: A,
}

/// The plan by which a rank of a ring goes on between other neighbours.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RingPlan<A> {
    /// The job; of its numbers only the id, the key, the generation and the shard may be others
    /// than before.
    pub config: JobConfig,
    /// The rank that sends to this one.
    pub left: A,
    /// To whom it sends.
    pub right: A,
}

/// Which number is outside its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigError {
    /// Workers of the job.
    Workers(u16),
    /// The server was told of another number of ranks than workers.
    Ranks(usize),
    /// Words of a block.
    Elements(u16),
    /// Blocks of a flow.
    FlowBlocks(u32),
    /// Flows under way.
    Flows(u16),
    /// Paths of a worker.
    Paths(u8),
    /// A link without a rate, packets without a length, a period of nothing, a delta below 1, or no
    /// reports.
    Rate,
    /// Signals would be sent again without a pause, and nobody could answer before he counts as
    /// silent.
    Ceiling,
}

impl core::fmt::Display for ConfigError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match *self {
            Self::Workers(workers) => {
                write!(f, "{workers} workers: a DLCP server sums for 1 to {WORKERS_MAX}")
            }
            Self::Ranks(ranks) => write!(f, "{ranks} ranks are named: name one for each worker"),
            Self::Elements(elements) => {
                write!(f, "blocks of {elements} words: choose one of {CHUNK_ELEMENTS:?}")
            }
            Self::FlowBlocks(blocks) => {
                write!(f, "flows of {blocks} blocks: choose 1 to {FLOW_BLOCKS_MAX}")
            }
            Self::Flows(flows) => write!(f, "{flows} flows under way: choose 1 to {FLOWS_MAX}"),
            Self::Paths(paths) => write!(f, "{paths} paths: choose 1 to {PATHS_MAX}"),
            Self::Ceiling => {
                f.write_str("signals wait no time for an answer: choose a retransmission ceiling above 0")
            }
            Self::Rate => f.write_str(
                "the rate control needs a link's rate, a packet's length, a period, a delta of 1 or more, and reports",
            ),
        }
    }
}

impl core::error::Error for ConfigError {}
