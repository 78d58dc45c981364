//! What a switch with an upstream knows of the jobs that it serves.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use fanin_protocol::JobIdentity;
use fanin_protocol::control::{Denied, Memory, Protocol, Ranks, Relayed};
use fanin_wire::{Generation, JobId, RANKS_MAX, Rank};

use crate::convert::{key, narrow};
use crate::proto;

/// A job's way through the switch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Route {
    pub job: JobIdentity,
    pub upstream: SocketAddr,
    /// What its protocol tells this switch.
    pub part: Vec<u8>,
    /// What the protocol makes of that here.
    pub relayed: Relayed,
    name: String,
    lineage: Option<u64>,
    heartbeat_timeout: Duration,
}

impl Route {
    /// The route that the upstream tells, which takes this switch's part off it; or what is wrong
    /// with it.
    pub fn take(
        (id, generation): (JobId, Generation),
        upstream: SocketAddr,
        message: &mut proto::Route,
        (protocol, memory): (&dyn Protocol, &Memory),
    ) -> Result<Self, String> {
        if message.parts.is_empty() {
            return Err("it counts too few switches on the way".into());
        }
        let (its, own) = (message.shards, memory.shards);
        if its == 0 {
            return Err("it does not say how many shards: install the same fanin on both".into());
        }
        if its > own.into() {
            return Err(format!("it has {its} shards, this one {own}: start it with --shards {its}"));
        }
        let part = message.parts.remove(0);
        let (key, workers) = (key(&message.key)?, narrow(message.world_size, "world_size")?);
        Ok(Self {
            job: JobIdentity { id, key, generation, workers, resumed: false },
            upstream,
            relayed: protocol.relayed(&part, memory)?,
            part,
            name: message.job.clone(),
            lineage: message.lineage,
            heartbeat_timeout: Duration::from_millis(message.heartbeat_timeout_ms),
        })
    }

    /// Whether a job is over where this one begins: the root admits no other of its name, but to
    /// ranks that resume theirs.
    fn follows(&self, before: &Self) -> bool {
        let of_lineage = |lineage| before.lineage == Some(lineage) || before.job.key.lineage() == lineage;
        self.name == before.name && self.lineage.is_none_or(of_lineage)
    }
}

#[derive(Debug)]
struct Entry {
    route: Route,
    /// The ranks that were heard of through this switch and did not leave.
    ranks: Ranks,
    /// From which hosts their packets come here.
    hosts: BTreeMap<Rank, Vec<IpAddr>>,
    heard: Instant,
}

/// All jobs of a switch.
#[derive(Debug, Default)]
pub(super) struct Routes(BTreeMap<JobId, Entry>);

impl Routes {
    /// A rank of a job lives here. Whether its route is known; if not, the data path must be told
    /// before [`Self::insert`].
    pub fn heard(
        &mut self,
        rank: Rank,
        route: &Route,
        protocol: &dyn Protocol,
        now: Instant,
    ) -> Result<bool, String> {
        if u32::from(rank.0) >= RANKS_MAX {
            return Err(format!("rank {}", rank.0));
        }
        match self.0.get_mut(&route.job.id) {
            Some(known) if known.route == *route => {
                known.ranks.insert(rank);
                known.heard = now;
                Ok(true)
            }
            // The same job cannot be at two places of the tree.
            Some(known) if known.route.job.generation == route.job.generation => {
                protocol.conflict(&known.route.part, &route.part).map_or(Ok(false), Err)
            }
            _ => Ok(false),
        }
    }

    /// A job is served from now on. Returns jobs that are over, which are forgotten.
    pub fn insert(&mut self, rank: Rank, route: Route, now: Instant) -> Vec<JobId> {
        let job = route.job.id;
        tracing::info!(id = job.0, job = route.name, generation = route.job.generation.0, "serves a job");
        let is_before = |(id, entry): &(&JobId, &Entry)| **id != job && route.follows(&entry.route);
        let before: Vec<JobId> = self.0.iter().filter(is_before).map(|(id, _)| *id).collect();
        for old in &before {
            self.0.remove(old);
        }
        let ranks = [rank].into_iter().collect();
        self.0.insert(job, Entry { route, ranks, hosts: BTreeMap::new(), heard: now });
        before
    }

    /// The ranks of a job that were heard of here and did not leave.
    pub fn ranks(&self, job: JobId) -> Ranks {
        self.0.get(&job).map_or_else(Ranks::default, |entry| entry.ranks.clone())
    }

    /// Notes from where a rank's packets come; whether that is new, and its job is served here.
    pub fn sends_from(&mut self, job: JobId, rank: Rank, hosts: &[IpAddr]) -> bool {
        let Some(entry) = self.0.get_mut(&job).filter(|entry| entry.ranks.contains(rank)) else {
            return false;
        };
        let known = entry.hosts.entry(rank).or_default();
        let is_new = known != hosts;
        if is_new {
            *known = hosts.to_vec();
        }
        is_new
    }

    /// Whether a call in a rank's name is the rank's; false of a job that is not known here.
    pub fn authenticate(&self, job: JobId, rank: Rank, secret: u64) -> Result<bool, Denied> {
        match self.0.get(&job) {
            Some(entry) if entry.route.job.key.secret_of(rank) != secret => Err(Denied { rank }),
            entry => Ok(entry.is_some()),
        }
    }

    /// A rank left; true when it was the last one here, and the job is forgotten. One that is
    /// summed here for ranks elsewhere is kept until it is overdue.
    pub fn leave(&mut self, job: JobId, rank: Rank) -> bool {
        let Some(entry) = self.0.get_mut(&job) else { return false };
        let is_last = entry.ranks.remove(rank) && entry.ranks.is_empty();
        // Who is elsewhere, and is summed here, may lack what came last.
        let is_over = is_last && !entry.route.relayed.serves_others;
        if is_over {
            self.0.remove(&job);
        }
        is_over
    }

    /// Forgets the jobs of which no rank was heard for long. Most are over; one whose ranks here
    /// were stopped for a while, as in a debugger, is served again with their next heartbeat.
    pub fn overdue(&mut self, now: Instant) -> Vec<JobId> {
        let is_overdue = |entry: &Entry| now - entry.heard > 2 * entry.route.heartbeat_timeout;
        let over: Vec<JobId> =
            self.0.iter().filter(|(_, entry)| is_overdue(entry)).map(|(job, _)| *job).collect();
        for job in &over {
            self.0.remove(job);
        }
        over
    }

    /// Memory that its jobs but this one take of each shard. A job that follows another has its
    /// memory, too.
    pub fn pool_units_beside(&self, route: &Route) -> u32 {
        let stays = |(id, entry): &(&JobId, &Entry)| **id != route.job.id && !route.follows(&entry.route);
        self.0.iter().filter(stays).map(|(_, entry)| entry.route.relayed.pool_units).sum()
    }

    pub fn names(&self) -> Vec<(JobId, String)> {
        self.0.iter().map(|(job, entry)| (*job, entry.route.name.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use fanin_protocol::Machines;
    use fanin_protocol::control::{
        Admission, Agreed, Hop, JoinDecision, JoinRequest, PORTION_WHOLE, Registry, RegistryConfig,
    };
    use fanin_protocol::goat::{Goat, Plan, PlannedSum};
    use fanin_udp::{OnSockets, Part};
    use fanin_wire::{Key, SubModel, VERSION, WireDtype};

    use super::*;
    use crate::protocols;

    const JOB: JobId = JobId(7);
    const KEY: Key = Key::new(9);

    const MEMORY: Memory = Memory { shards: 1, pool_units: 1 << 20, aggregators: 8 };

    fn protocol(name: &str) -> &'static dyn OnSockets {
        protocols::named(name).expect("a protocol")
    }

    /// What the switch next to the root takes off what it hears of a job, of which `levels`
    /// switches are on the way.
    fn route(generation: u16, levels: usize) -> Route {
        let hop = |instance: usize| Hop {
            instance: instance as u64,
            address: ([10, 0, 0, instance as u8], 4800).into(),
            shards: 1,
            aggregators: 8,
            elements: 2048,
            receive_buffer_bytes: 16 << 20,
            mtu: 1500,
            rate_bps: None,
        };
        let hops = (0..levels).map(hop).collect();
        let admission = admitted(protocol("atp"), vec![JoinRequest { hops, ..asked() }]);
        let way = admission.way(Rank(0));
        taken("atp", generation, 9, way.first().map(|part| part.to_vec())).expect("a route")
    }

    fn asked() -> JoinRequest {
        let agreed = Agreed { wire_dtype: WireDtype::SharedExponent, ..Agreed::default() };
        JoinRequest {
            job: "a".into(),
            rank: 0,
            world_size: 1,
            protocol: String::new(),
            agreed,
            mtu: 1500,
            rate_bps: None,
            rtt: Duration::ZERO,
            paths: 1,
            portion: PORTION_WHOLE,
            hops: Vec::new(),
            patience: Duration::from_secs(1),
            wire_version: VERSION,
            resume: None,
            origin: None,
        }
    }

    fn admitted(protocol: &'static dyn Protocol, ranks: Vec<JoinRequest>) -> Admission {
        let mut registry =
            Registry::new(RegistryConfig::default(), vec![protocol], Box::new(|| 7)).expect("limits");
        let mut decisions = ranks.into_iter().map(|request| {
            registry.join(Default::default(), JoinRequest { protocol: protocol.name().into(), ..request })
        });
        match decisions.by_ref().last().expect("a rank") {
            JoinDecision::Complete { outcome: Ok(admission), .. } => admission,
            other => panic!("{other:?}"),
        }
    }

    fn message(part: Option<Vec<u8>>) -> proto::Route {
        proto::Route {
            job: "a".into(),
            heartbeat_timeout_ms: 1000,
            key: KEY.to_bytes().into(),
            lineage: None,
            parts: part.into_iter().collect(),
            world_size: 3,
            shards: 1,
        }
    }

    fn taken(name: &str, generation: u16, upstream: u16, part: Option<Vec<u8>>) -> Result<Route, String> {
        let mut message = message(part);
        let upstream = ([10, 0, 0, 9], upstream).into();
        let route =
            Route::take((JOB, Generation(generation)), upstream, &mut message, (protocol(name), &MEMORY));
        assert!(message.parts.is_empty(), "it took its part off");
        route
    }

    /// What the switch does; whether the data path had to be told, and which jobs are over.
    fn learn(
        routes: &mut Routes,
        job: JobId,
        rank: u16,
        route: Route,
        now: Instant,
    ) -> Result<(bool, Vec<JobId>), String> {
        learn_of("atp", routes, job, rank, route, now)
    }

    fn learn_of(
        name: &str,
        routes: &mut Routes,
        id: JobId,
        rank: u16,
        route: Route,
        now: Instant,
    ) -> Result<(bool, Vec<JobId>), String> {
        let route = Route { job: JobIdentity { id, ..route.job }, ..route };
        let known = routes.heard(Rank(rank), &route, protocol(name), now)?;
        let over = if known { Vec::new() } else { routes.insert(Rank(rank), route, now) };
        Ok((!known, over))
    }

    #[test]
    fn a_job_is_told_to_the_data_path_once_and_again_when_it_changed() {
        let (mut routes, now) = (Routes::default(), Instant::now());
        for (generation, rank, told) in [(0, 0, true), (0, 1, false), (1, 0, true)] {
            let learned = learn(&mut routes, JOB, rank, route(generation, 1), now);
            assert_eq!(learned, Ok((told, vec![])), "generation {generation}, rank {rank}");
        }
        assert_eq!(routes.names(), [(JOB, "a".into())]);
    }

    #[test]
    fn a_rank_of_a_job_that_is_served_speaks_with_its_secret() {
        let (mut routes, now, rank) = (Routes::default(), Instant::now(), Rank(1));
        assert_eq!(routes.authenticate(JOB, rank, 0), Ok(false), "who knows the job decides");
        learn(&mut routes, JOB, 1, route(0, 1), now).expect("new");
        assert_eq!(routes.authenticate(JOB, rank, KEY.secret_of(rank)), Ok(true));
        for secret in [0, KEY.secret_of(Rank(0))] {
            assert_eq!(routes.authenticate(JOB, rank, secret), Err(Denied { rank }));
        }
    }

    #[test]
    fn a_job_goes_when_another_one_has_its_name() {
        let (mut routes, now) = (Routes::default(), Instant::now());
        let mut over = |job, generation| {
            learn(&mut routes, JobId(job), 0, route(generation, 1), now).expect("consistent").1
        };
        assert_eq!(over(9, 0), []);
        assert_eq!(over(8, 1), [JobId(9)], "the server restarted");
        assert_eq!(over(8, 1), []);
        assert_eq!(routes.names(), [(JobId(8), "a".into())]);
    }

    #[test]
    fn a_job_that_is_resumed_has_the_place_of_its_own_and_leaves_another_of_its_name_alone() {
        let (mut routes, now) = (Routes::default(), Instant::now());
        let mut over = |job, key, lineage| {
            let route = route(0, 1);
            let identity = JobIdentity { key: Key::new(key), ..route.job };
            let route = Route { job: identity, lineage, ..route };
            learn(&mut routes, JobId(job), 0, route, now).expect("consistent").1
        };
        // Somebody took the name while the switch was started again, and then its ranks came back.
        assert_eq!(over(1, 1, None), []);
        assert_eq!(over(2, 2, Some(Key::new(9).lineage())), []);
        assert_eq!(over(1, 1, None), [], "both are heard");
        assert_eq!(over(3, 3, Some(Key::new(2).lineage())), [JobId(2)], "it was resumed again");
        assert_eq!(routes.names().len(), 2);
    }

    #[test]
    fn a_job_cannot_be_at_two_levels() {
        let (mut routes, now) = (Routes::default(), Instant::now());
        learn(&mut routes, JOB, 0, route(0, 1), now).expect("new");
        let error = learn(&mut routes, JOB, 1, route(0, 2), now).expect_err("elsewhere");
        assert_eq!(error, "it was at level 0 here, and is at 1");
        let error = taken("atp", 0, 9, None).expect_err("no switch");
        assert_eq!(error, "it counts too few switches on the way");
    }

    #[test]
    fn a_job_of_more_shards_than_the_switch_has_is_refused_with_the_cure() {
        let mut divided = proto::Route { shards: 2, ..message(Some(Vec::new())) };
        let error = Route::take(
            (JOB, Generation(0)),
            ([10, 0, 0, 9], 9).into(),
            &mut divided,
            (protocol("atp"), &MEMORY),
        );
        let error = error.expect_err("fewer shards");
        assert!(error.contains("it has 2 shards, this one 1: start it with --shards 2"), "{error}");
    }

    #[test]
    fn a_job_ends_with_its_last_rank_or_by_silence() {
        let (mut routes, now) = (Routes::default(), Instant::now());
        for rank in [0, 3] {
            learn(&mut routes, JOB, rank, route(0, 1), now).expect("consistent");
        }
        assert_eq!([0, 0, 3, 3].map(|rank| routes.leave(JOB, Rank(rank))), [false, false, true, false]);
        learn(&mut routes, JOB, 0, route(0, 1), now).expect("new");
        assert_eq!(routes.overdue(now + Duration::from_secs(2)), []);
        assert_eq!(routes.overdue(now + Duration::from_millis(2001)), [JOB]);
        assert_eq!(routes.names(), []);
    }

    /// A switch with 8 aggregators next to ranks 0 and 1, which sums two sub-models of 4 fragments.
    fn planned(upstream: u16, sums: [(u128, u32); 2]) -> Route {
        let hop = |instance: u8| Hop {
            instance: instance.into(),
            address: ([10, 0, 0, instance], 4800).into(),
            shards: 1,
            aggregators: 8,
            elements: 64,
            receive_buffer_bytes: 16 << 20,
            mtu: 1500,
            rate_bps: None,
        };
        let rank =
            |(rank, instance)| JoinRequest { rank, world_size: 3, hops: vec![hop(instance)], ..asked() };
        let admission = admitted(protocol("goat"), [(0, 1), (1, 1), (2, 2)].map(rank).to_vec());
        let mut plan = Plan::of_model(&admission.terms, &admission.tree, vec![4, 4]);
        for (sub_model, (workers, first_aggregator)) in (0..).zip(sums) {
            let sum = PlannedSum { workers, first_aggregator, ..PlannedSum::default() };
            plan.sums[0].insert(SubModel(sub_model), sum);
        }
        taken("goat", 0, upstream, Some(plan.seats().switches.remove(0))).expect("a route")
    }

    #[test]
    fn a_job_that_is_summed_for_ranks_elsewhere_outlives_the_ranks_here() {
        for (workers, is_over) in [(0b11, true), (0b110, false)] {
            let (mut routes, now) = (Routes::default(), Instant::now());
            let route = planned(1, [(0b11, 0), (workers, 4)]);
            learn_of("goat", &mut routes, JOB, 0, route, now).expect("new");
            assert_eq!(routes.leave(JOB, Rank(0)), is_over);
            assert_eq!(routes.names().is_empty(), is_over);
            routes.overdue(now + Duration::from_millis(2001));
            assert_eq!(routes.names(), []);
        }
    }

    #[test]
    fn another_plan_of_the_same_generation_is_refused_and_another_address_is_not() {
        let (mut routes, now) = (Routes::default(), Instant::now());
        let mut told = |upstream, workers| {
            let route = planned(upstream, [(0b11, 0), (workers, 4)]);
            learn_of("goat", &mut routes, JOB, 0, route, now).map(|told| told.0)
        };
        assert_eq!([told(1, 0b11), told(1, 0b11), told(2, 0b11)], [Ok(true), Ok(false), Ok(true)]);
        assert!(told(2, 0b111).is_err_and(|error| error.contains("another plan")));
    }

    #[test]
    fn what_does_not_fit_into_a_switch_that_has_less_memory_now_is_sent_on() {
        for (first, count) in [(4, 2), (5, 1), (8, 1), (u32::MAX, 1)] {
            let Route { job, upstream, part, .. } = planned(1, [(0b11, 0), (0b11, first)]);
            let route =
                <Goat as Machines<SocketAddr, Part>>::relay_job(job, &part, upstream, &MEMORY, &|address| {
                    Ok(address)
                });
            assert_eq!(route.expect("a route").sums.len(), count);
        }
    }
}
