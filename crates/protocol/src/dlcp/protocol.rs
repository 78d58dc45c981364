//! DLCP as a value: its limits, what its members are told, and its machines.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::net::SocketAddr;

use fanin_wire::{
    CHUNK_ELEMENTS, Dtype, FlowId, Generation, JobId, Key, LossBound, Rank, ShardId, WireDtype, WorkerId,
    chunk_packet_bytes,
};
use prost::Message;

use super::flow_plan::FlowPlan;
use super::{JobConfig, Server, ServerJob, WORKERS_MAX, Worker, WorkerPlan};
use crate::control::{
    Agreed, Counted, Gathered, JoinRequest, Limits, Malformed, Memory, Protocol, Refusal, Relayed, Resume,
    ResumeField, Seats, Terms, narrow, read,
};
use crate::machine::{Address, JobIdentity, Tensor};
use crate::machines::{Machines, OwnChoices, Peers, WorkerTerms, check_place};
use crate::transport::RetransmissionConfig;

/// The protocol. See [`dlcp`](super).
#[derive(Clone, Copy, Debug)]
pub struct Dlcp;

/// What a rank of a job with a loss bound is told.
#[derive(Clone, Debug, PartialEq)]
pub struct RankTerms {
    /// The job, in the first shard.
    pub config: JobConfig,
    /// The rank's place at its switch: its number.
    pub place: WorkerId,
    /// By shard, of a job that goes on: the first flow that some rank lacks sums of.
    pub resumes_at: Vec<FlowId>,
}

/// What all members are told.
#[derive(Clone, PartialEq, Message)]
struct Part {
    /// In millionths.
    #[prost(uint32, tag = "1")]
    loss_bound: u32,
    /// Words of four bytes of a block.
    #[prost(uint32, tag = "2")]
    elements: u32,
    /// Blocks of a flow, and flows that a rank may have under way in a shard.
    #[prost(uint32, tag = "3")]
    flow_blocks: u32,
    #[prost(uint32, tag = "4")]
    flows: u32,
    /// How fast a flow begins.
    #[prost(uint64, tag = "5")]
    line_rate_bps: u64,
    /// Source ports of a rank in a shard.
    #[prost(uint32, tag = "6")]
    paths: u32,
    /// Blocks of flows that a rank may have under way in a shard.
    #[prost(uint32, tag = "7")]
    window_blocks: u32,
    /// By shard, of a job that goes on: the first flow that some rank lacks sums of.
    #[prost(uint32, repeated, tag = "8")]
    resumes_at: Vec<u32>,
}

impl Part {
    fn config(&self, job: JobIdentity) -> Result<JobConfig, Malformed> {
        let JobIdentity { id, key, generation, workers, .. } = job;
        let flows = FlowPlan {
            loss_bound: LossBound::from_millionths(self.loss_bound).ok_or(Malformed("loss_bound"))?,
            flow_blocks: self.flow_blocks,
            flows: narrow(self.flows, "flows")?,
            line_rate_bps: self.line_rate_bps,
            paths: narrow(self.paths, "paths")?,
            window_blocks: self.window_blocks,
        };
        let config = flows.job_config((id, key, generation), workers, narrow(self.elements, "elements")?);
        config.check().map_err(|_| Malformed("job"))
    }

    fn resumes_at(&self) -> Vec<FlowId> {
        self.resumes_at.iter().copied().map(FlowId).collect()
    }
}

impl RankTerms {
    /// What a rank makes of its part of a job.
    ///
    /// # Errors
    /// When it is no such part.
    pub fn read(job: JobIdentity, rank: Rank, part: &[u8]) -> Result<Self, Malformed> {
        let part = read::<Part>(part)?;
        let (config, resumes_at) = (part.config(job)?, part.resumes_at());
        Ok(Self { config, place: WorkerId(narrow(rank.0.into(), "rank")?), resumes_at })
    }

    /// The job in a shard.
    fn of_shard(&self, shard: ShardId) -> JobConfig {
        let resumes_at = self.resumes_at.get(usize::from(shard.0)).copied();
        JobConfig { shard, resumes_at, ..self.config }
    }
}

/// By shard, the first flow that one of these ranks lacks sums of.
fn resumes_at(ranks: &[&Resume]) -> Result<Vec<u32>, Refusal> {
    let Some(first) = ranks.first() else { return Ok(Vec::new()) };
    let of_shard = |shard: usize| ranks.iter().filter_map(move |rank| rank.completed[shard].first().copied());
    let earliest = |shard: usize| {
        // Numbers wrap: they are compared with one of them.
        let ahead = |flow: u32| flow.wrapping_sub(first.completed[shard][0]).cast_signed();
        let (least, most) = (
            of_shard(shard).min_by_key(|flow| ahead(*flow)),
            of_shard(shard).max_by_key(|flow| ahead(*flow)),
        );
        let (least, most) = (least.unwrap_or_default(), most.unwrap_or_default());
        if most.wrapping_sub(least) > 3 * u32::from(first.in_flight) {
            let behind = of_shard(shard).position(|flow| flow == least).unwrap_or_default() as u32;
            let field = ResumeField::Counts;
            return Err(Refusal::ResumeMismatch { rank: behind, field, rank_has: least, job_has: most });
        }
        Ok(least)
    };
    (0..first.completed.len()).map(earliest).collect()
}

impl Protocol for Dlcp {
    fn name(&self) -> &'static str {
        "dlcp"
    }

    fn title(&self) -> &'static str {
        "DLCP"
    }

    fn is_divided(&self) -> bool {
        true
    }

    fn may_lose(&self) -> bool {
        true
    }

    fn limits(&self) -> Limits {
        Limits { counted: Counted::Flows, ..Limits::new(WORKERS_MAX.into(), &CHUNK_ELEMENTS) }
    }

    fn packet_bytes(&self, elements: usize, wire_dtype: WireDtype) -> usize {
        chunk_packet_bytes(elements, wire_dtype)
    }

    fn check(&self, request: &JoinRequest) -> Result<(), Refusal> {
        let bound = request.agreed.loss_bound;
        if bound == LossBound::RELIABLE {
            let reason = "dlcp sums jobs with a loss bound: set one (loss_bound, or FANIN_LOSS_BOUND), or use switchml";
            return Err(Refusal::Unserved { reason: reason.into() });
        }
        match request.hops.is_empty() {
            true => Ok(()),
            false => Err(Refusal::of_bound(bound)),
        }
    }

    fn admit(&self, ranks: &Gathered<'_>) -> Result<(Terms, Seats), Refusal> {
        let (workers, bound) = (ranks.world_size(), ranks.any().agreed.loss_bound);
        // Blocks of a flow wait for all workers side by side: those of many workers are shorter, so that their flows fit into a pool.
        let words = CHUNK_ELEMENTS.into_iter().rev().map(|words| words as u16);
        let fits = |words: &u16| *words <= ranks.elements && FlowPlan::fits(workers, *words);
        let resumes = ranks.resumes();
        let resumes_at = resumes_at(&resumes)?;
        let elements = match resumes.first() {
            // Its ranks keep blocks of this length.
            Some(resume) => resume.elements,
            None => words.into_iter().find(fits).unwrap_or(ranks.elements),
        };
        // Shards share the link.
        let of_shard = ranks.rate_bps() / u64::from(ranks.shards.max(1));
        let paths = ranks.requests.iter().map(|request| request.paths).max().unwrap_or(1).max(1);
        let flows = FlowPlan::new(bound, workers, elements, of_shard.max(1)).over(paths);
        let terms = Terms {
            in_flight: flows.flows,
            window: flows.flows,
            elements,
            wire_dtype: WireDtype::Native,
            loss_bound: bound,
            pool_units: flows.pool_units(workers, elements),
        };
        let part = Part {
            loss_bound: bound.millionths(),
            elements: elements.into(),
            flow_blocks: flows.flow_blocks,
            flows: flows.flows.into(),
            line_rate_bps: flows.line_rate_bps,
            paths: flows.paths.into(),
            window_blocks: flows.window_blocks,
            resumes_at,
        };
        let part = part.encode_to_vec();
        let ranks = (0..workers).map(|_| part.clone()).collect();
        Ok((terms, Seats { root: part, switches: Vec::new(), ranks, shares: Vec::new() }))
    }

    fn relayed(&self, _: &[u8], _: &Memory) -> Result<Relayed, String> {
        Err(NO_SWITCHES.into())
    }
}

/// What a switch before another one hears.
const NO_SWITCHES: &str = "a job with a loss bound has no switches on its way";

impl WorkerTerms for RankTerms {
    fn identity(&self) -> (JobId, Key, Generation) {
        (self.config.id, self.config.key, self.config.generation)
    }

    fn check(&self) -> Result<(), String> {
        let config = self.config.check().map_err(|error| error.to_string())?;
        check_place(self.place, config.workers)
    }

    fn in_flight(&self) -> u16 {
        self.config.flows
    }

    fn elements(&self) -> u16 {
        self.config.elements
    }

    /// Elements travel as they are.
    fn packet_elements(&self, dtype: Dtype, _: usize) -> usize {
        4 * usize::from(self.config.elements) / dtype.element_bytes()
    }

    fn paths(&self) -> u8 {
        self.config.paths
    }

    fn has_roots(&self) -> bool {
        true
    }

    fn lacks(&self, asked: &Agreed, paths: u8) -> Option<String> {
        if self.config.push_bound != asked.loss_bound {
            return Some(format!("a loss bound of {}", asked.loss_bound));
        }
        (self.config.paths < paths).then(|| format!("{paths} paths"))
    }

    fn shape(&self) -> String {
        let JobConfig { workers, flows, elements, .. } = self.config;
        format!("{workers} workers, {flows} flows with blocks of {elements} elements (DLCP)")
    }
}

impl<A: Address, T: Tensor + Send + 'static> Machines<A, T> for Dlcp {
    type Terms = RankTerms;
    type Worker = Worker<A, T>;
    type Root = Server<A>;
    type Relay = Server<A>;

    fn rank_terms(job: JobIdentity, rank: Rank, part: &[u8], _: OwnChoices) -> Result<RankTerms, Malformed> {
        RankTerms::read(job, rank, part)
    }

    fn worker(
        terms: &RankTerms,
        shard: ShardId,
        peer: A,
        retransmission: RetransmissionConfig,
    ) -> Worker<A, T> {
        Worker::new(JobConfig { retransmission, ..terms.of_shard(shard) }, terms.place, peer)
    }

    fn plan(terms: &RankTerms, shard: ShardId, server: A) -> WorkerPlan<A> {
        WorkerPlan { config: terms.of_shard(shard), place: terms.place, server }
    }

    fn root(shard: ShardId) -> Server<A> {
        Server::new(shard)
    }

    fn root_job(job: JobIdentity, part: &[u8], _: Peers<'_, A>) -> Result<ServerJob, String> {
        let part = read::<Part>(part)?;
        let (config, resumes_at) = (part.config(job)?, part.resumes_at());
        // Who sends faster than this machine's link is held back by its kernel.
        Ok(ServerJob { link_rate_bps: u64::MAX, resumes_at, ..ServerJob::from(config) })
    }

    fn relay(_: ShardId, _: &Memory) -> Result<Server<A>, String> {
        Err(NO_SWITCHES.into())
    }

    fn relay_job(
        _: JobIdentity,
        _: &[u8],
        _: SocketAddr,
        _: &Memory,
        _: Peers<'_, A>,
    ) -> Result<ServerJob, String> {
        Err(NO_SWITCHES.into())
    }
}
