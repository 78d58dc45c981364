//! SwitchML as a value: its limits, what its members are told, and its machines.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::net::SocketAddr;

use fanin_wire::{
    CHUNK_ELEMENTS, Dtype, Generation, JobId, Key, LossBound, RANKS_MAX, Rank, ShardId, SlotIndex, WireDtype,
    WorkerId, chunk_packet_bytes,
};

use super::admission::{self, SwitchPart};
use super::{JobConfig, Switch, SwitchJob, Worker, WorkerPlan};
use crate::control::{
    Agreed, Counted, Gathered, JoinRequest, Limits, Malformed, Memory, Protocol, Refusal, Relayed, Seats,
    Terms,
};
use crate::machine::{Address, JobIdentity, Tensor};
use crate::machines::{Machines, OwnChoices, Peers, WorkerTerms, check_place};
use crate::transport::RetransmissionConfig;

/// The protocol. See [`switchml`](super).
#[derive(Clone, Copy, Debug)]
pub struct SwitchMl;

/// What a rank of a SwitchML job is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankTerms {
    /// The job, in the first shard.
    pub config: JobConfig,
    /// The rank's place at its switch: its number, where no rack sums first.
    pub place: WorkerId,
    /// Whether racks sum first, on the way of whichever rank.
    pub has_racks: bool,
    /// For each shard the slots whose last sum the rank hands back to a switch with an empty memory.
    pub restore: Vec<Vec<SlotIndex>>,
}

/// The job of a switch alone, and the rank's place.
impl From<(JobConfig, WorkerId)> for RankTerms {
    fn from((config, place): (JobConfig, WorkerId)) -> Self {
        Self { config, place, has_racks: false, restore: Vec::new() }
    }
}

impl Protocol for SwitchMl {
    fn name(&self) -> &'static str {
        "switchml"
    }

    fn title(&self) -> &'static str {
        "SwitchML"
    }

    fn is_divided(&self) -> bool {
        true
    }

    fn limits(&self) -> Limits {
        Limits { counted: Counted::Exchanges, ..Limits::new(RANKS_MAX, &CHUNK_ELEMENTS) }
    }

    fn packet_bytes(&self, elements: usize, wire_dtype: WireDtype) -> usize {
        chunk_packet_bytes(elements, wire_dtype)
    }

    fn check(&self, request: &JoinRequest) -> Result<(), Refusal> {
        match request.agreed.loss_bound {
            LossBound::RELIABLE => Ok(()),
            bound => Err(Refusal::of_bound(bound)),
        }
    }

    fn admit(&self, ranks: &Gathered<'_>) -> Result<(Terms, Seats), Refusal> {
        admission::admit(ranks)
    }

    fn relayed(&self, part: &[u8], _: &Memory) -> Result<Relayed, String> {
        let part = SwitchPart::read(part)?;
        Ok(Relayed { pool_units: part.pool_units()?, serves_others: false })
    }
}

impl WorkerTerms for RankTerms {
    fn identity(&self) -> (JobId, Key, Generation) {
        (self.config.id, self.config.key, self.config.generation)
    }

    fn check(&self) -> Result<(), String> {
        let config = self.config.check().map_err(|error| error.to_string())?;
        check_place(self.place, config.workers)
    }

    fn in_flight(&self) -> u16 {
        self.config.slots
    }

    fn elements(&self) -> u16 {
        self.config.elements
    }

    fn packet_elements(&self, dtype: Dtype, elements: usize) -> usize {
        self.config.chunk_elements(dtype, elements)
    }

    /// A rack would not know behind which of its places a root is.
    fn has_roots(&self) -> bool {
        !self.has_racks
    }

    fn lacks(&self, asked: &Agreed, _: u8) -> Option<String> {
        let is_other = self.config.wire_dtype != asked.wire_dtype;
        is_other.then(|| format!("wire dtype {}", asked.wire_dtype.name()))
    }

    fn shape(&self) -> String {
        let JobConfig { workers, slots, elements, wire_dtype, .. } = self.config;
        format!("{workers} workers, {slots} slots of {elements} elements ({})", wire_dtype.name())
    }
}

impl<A: Address, T: Tensor + Send + 'static> Machines<A, T> for SwitchMl {
    type Terms = RankTerms;
    type Worker = Worker<A, T>;
    type Root = Switch<A>;
    type Relay = Switch<A>;

    fn rank_terms(job: JobIdentity, _: Rank, part: &[u8], _: OwnChoices) -> Result<RankTerms, Malformed> {
        RankTerms::read(job, part)
    }

    fn worker(terms: &RankTerms, shard: ShardId, peer: A, when: RetransmissionConfig) -> Worker<A, T> {
        Worker::new(JobConfig { shard, ..terms.config }, terms.place, peer, when)
    }

    fn plan(terms: &RankTerms, shard: ShardId, switch: A) -> WorkerPlan<A> {
        let config = JobConfig { shard, ..terms.config };
        let restore = terms.restore.get(usize::from(shard.0)).cloned().unwrap_or_default();
        WorkerPlan { config, switch, place: terms.place, restore }
    }

    fn root(shard: ShardId) -> Switch<A> {
        Switch::new(shard)
    }

    fn root_job(job: JobIdentity, part: &[u8], _: Peers<'_, A>) -> Result<SwitchJob<A>, String> {
        Ok(SwitchJob::read(job, part, None)?)
    }

    fn relay(shard: ShardId, _: &Memory) -> Result<Switch<A>, String> {
        Ok(Switch::new(shard))
    }

    fn relay_job(
        job: JobIdentity,
        part: &[u8],
        upstream: SocketAddr,
        _: &Memory,
        peers: Peers<'_, A>,
    ) -> Result<SwitchJob<A>, String> {
        Ok(SwitchJob::read(job, part, Some(peers(upstream)?))?)
    }
}
