//! GOAT as a value: its limits, who plans, what its members are told, and its machines.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::{String, ToString};
use core::net::SocketAddr;

use fanin_wire::{
    AggregationNode, Dtype, FRAGMENT_ELEMENTS, Generation, JobId, Key, PLANNED_WORKERS_MAX,
    PlannedDirections, Rank, ShardId, WireDtype, fragment_packet_bytes,
};

use super::admission::{admit, is_same_plan, rank_terms, root_job, route};
use super::{
    Assignment, GoatJobConfig, GoatRoute, GoatServer, GoatServerJob, GoatSwitch, GoatWorker, GoatWorkerPlan,
};
use crate::aggregation::admission;
use crate::control::{
    Gathered, Hop, JoinRequest, Limits, Malformed, Memory, Planner, Protocol, Refusal, Relayed, Seats, Terms,
};
use crate::machine::{Address, JobIdentity, Tensor};
use crate::machines::{Machines, OwnChoices, Peers, WorkerTerms};
use crate::transport::RetransmissionConfig;

/// The protocol. See [`goat`](super).
#[derive(Clone, Copy, Debug)]
pub struct Goat {
    /// Who plans which switch sums what; without it the server sums all.
    pub planner: Option<fn() -> Box<dyn Planner>>,
}

/// What a rank of a GOAT job is told. `A` names a peer's address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankTerms<A> {
    /// The job.
    pub config: GoatJobConfig,
    /// The rank's part of the plan.
    pub assignment: Assignment<A>,
    /// Windows that its machine has side by side, this one included.
    pub windows: u16,
}

impl Protocol for Goat {
    fn name(&self) -> &'static str {
        "goat"
    }

    fn title(&self) -> &'static str {
        "GOAT"
    }

    fn sums(&self, dtype: Dtype) -> bool {
        crate::aggregation::sums(dtype)
    }

    fn travels_as(&self) -> WireDtype {
        WireDtype::SharedExponent
    }

    fn aggregates(&self) -> bool {
        true
    }

    fn plans(&self) -> bool {
        true
    }

    fn limits(&self) -> Limits {
        Limits::new(PLANNED_WORKERS_MAX as u32, &FRAGMENT_ELEMENTS)
    }

    fn packet_bytes(&self, elements: usize, _: WireDtype) -> usize {
        fragment_packet_bytes::<PlannedDirections>(elements)
    }

    fn check(&self, request: &JoinRequest) -> Result<(), Refusal> {
        admission::check(request)
    }

    fn elements_on_the_way(&self, hops: &[Hop]) -> usize {
        admission::elements_held(hops)
    }

    fn admit(&self, ranks: &Gathered<'_>) -> Result<(Terms, Seats), Refusal> {
        admit(ranks)
    }

    fn planner(&self) -> Option<Box<dyn Planner>> {
        self.planner.map(|planner| planner())
    }

    fn relayed(&self, part: &[u8], memory: &Memory) -> Result<Relayed, String> {
        let (id, key, generation) = (JobId(0), Key::new(0), Generation(0));
        let nobody = JobIdentity { id, key, generation, workers: 0, resumed: false };
        let GoatRoute { own, sums, .. } = route(nobody, part, ([0; 4], 0).into(), memory)?;
        let serves_others = sums.values().any(|sum| sum.all() & !own != 0);
        Ok(Relayed { pool_units: 0, serves_others })
    }

    fn conflict(&self, was: &[u8], is: &[u8]) -> Option<String> {
        let other = "it has another plan here, of the same generation: start its ranks again";
        (!is_same_plan(was, is)).then(|| other.into())
    }
}

impl<A: Address> WorkerTerms for RankTerms<A> {
    fn identity(&self) -> (JobId, Key, Generation) {
        (self.config.id, self.config.key, self.config.generation)
    }

    fn check(&self) -> Result<(), String> {
        self.config.check().map_err(|error| error.to_string())
    }

    fn in_flight(&self) -> u16 {
        self.config.window_max
    }

    fn elements(&self) -> u16 {
        self.config.elements
    }

    fn packet_elements(&self, _: Dtype, _: usize) -> usize {
        self.config.elements.into()
    }

    fn has_participants(&self) -> bool {
        true
    }

    fn shape(&self) -> String {
        let GoatJobConfig { workers, window_max, elements, .. } = self.config;
        format!("{workers} workers, a window of {window_max} fragments of {elements} elements (GOAT)")
    }
}

impl<A: Address, T: Tensor + Send + 'static> Machines<A, T> for Goat {
    type Terms = RankTerms<A>;
    type Worker = GoatWorker<A, T>;
    type Root = GoatServer<A>;
    type Relay = GoatSwitch<A>;

    fn rank_terms(
        job: JobIdentity,
        rank: Rank,
        part: &[u8],
        own: OwnChoices,
    ) -> Result<RankTerms<A>, Malformed> {
        let mut terms = rank_terms(job, rank, part)?;
        terms.config.congestion_control = own.congestion_control;
        terms.windows = own.windows;
        Ok(terms)
    }

    fn worker(terms: &RankTerms<A>, shard: ShardId, peer: A, when: RetransmissionConfig) -> GoatWorker<A, T> {
        GoatWorker::new(terms.config, terms.assignment.clone(), peer, when)
            .in_shard(shard)
            .beside(terms.windows)
    }

    fn plan(terms: &RankTerms<A>, _: ShardId, upstream: A) -> GoatWorkerPlan<A> {
        let GoatJobConfig { id, key, generation, .. } = terms.config;
        GoatWorkerPlan { id, key, generation, directions: terms.assignment.clone(), upstream }
    }

    fn root(shard: ShardId) -> GoatServer<A> {
        GoatServer::of_shard(shard)
    }

    fn root_job(job: JobIdentity, part: &[u8], peers: Peers<'_, A>) -> Result<GoatServerJob<A>, String> {
        root_job(job, part, peers)
    }

    /// Each fragment's aggregator is its own.
    fn relay(shard: ShardId, memory: &Memory) -> Result<GoatSwitch<A>, String> {
        Ok(GoatSwitch::of_shard(shard, admission::table(memory, 1)?))
    }

    fn relay_job(
        job: JobIdentity,
        part: &[u8],
        upstream: SocketAddr,
        memory: &Memory,
        peers: Peers<'_, A>,
    ) -> Result<GoatRoute<A>, String> {
        let route = route(job, part, upstream, memory)?;
        let next_hop = |(node, hop): (AggregationNode, SocketAddr)| Ok((node, peers(hop)?));
        Ok(GoatRoute {
            id: route.id,
            key: route.key,
            generation: route.generation,
            workers: route.workers,
            node: route.node,
            upstream: peers(route.upstream)?,
            next_hops: route.next_hops.into_iter().map(next_hop).collect::<Result<_, String>>()?,
            below: route.below.into_iter().map(peers).collect::<Result<_, _>>()?,
            own: route.own,
            sums: route.sums,
            window_max: route.window_max,
            sub_models: route.sub_models,
            aggregators: route.aggregators,
        })
    }
}
