//! What a switch with an upstream knows of the jobs that it serves.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use fanin_protocol::atp::SwitchRoute;
use fanin_protocol::control::{Denied, Ranks, pool_units};
use fanin_protocol::goat::{GoatRoute, PlannedSum, SubModels};
use fanin_protocol::switchml::{Contributions, JobConfig, SwitchJob, Upstream};
use fanin_wire::{AggregationNode, Generation, JobId, Key, RANKS_MAX, Rank, ShardId, SubModel, WorkerId};

use crate::convert::{Malformed, key, narrow, wire_dtype};
use crate::proto;

/// A job's way through the switch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Route {
    generation: Generation,
    key: Key,
    upstream: SocketAddr,
    name: String,
    lineage: Option<u64>,
    heartbeat_timeout: Duration,
    pub way: Way,
}

/// What is summed on the way, as each protocol has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Atp {
        /// The level of this switch, and so how many may be below it.
        level: u8,
        elements: u16,
    },
    /// As the plan has it.
    Goat(GoatRoute<SocketAddr>),
    SwitchMl {
        config: JobConfig,
        shards: u8,
        contributions: Contributions,
        /// This switch's at its upstream.
        place: WorkerId,
    },
}

impl Route {
    /// The route that the upstream of a switch of ATP tells, or what is wrong with it.
    pub fn atp(
        generation: Generation,
        upstream: SocketAddr,
        message: &proto::Route,
        own: &proto::route::Atp,
    ) -> Result<Self, String> {
        let level = own.levels.checked_sub(1).and_then(|level| u8::try_from(level).ok());
        let level = level.ok_or_else(|| format!("it counts {} switches on the way", own.levels))?;
        let elements = u16::try_from(own.elements)
            .map_err(|_| format!("its fragments have {} elements", own.elements))?;
        let key = key(&message.key).map_err(|malformed| malformed.to_string())?;
        let heartbeat_timeout = Duration::from_millis(message.heartbeat_timeout_ms);
        let way = Way::Atp { level, elements };
        let (name, lineage) = (message.job.clone(), message.lineage);
        Ok(Self { generation, key, upstream, name, lineage, heartbeat_timeout, way })
    }

    /// The route that a rack's upstream tells, whose own part of it is `rack`.
    pub fn switch_ml(
        (id, generation): (JobId, Generation),
        upstream: SocketAddr,
        message: &proto::Route,
        own: &proto::route::SwitchMl,
        rack: &proto::Rack,
    ) -> Result<Self, Malformed> {
        let key = key(&message.key)?;
        let config = JobConfig {
            id,
            key,
            generation,
            workers: narrow(own.world_size, "world_size")?,
            slots: narrow(own.slots, "slots")?,
            elements: narrow(own.elements, "elements")?,
            wire_dtype: wire_dtype(own.wire_dtype)?,
            shard: ShardId(0),
            resumed: false,
        };
        let rank = |rank: &u32| match narrow(*rank, "ranks")? {
            rank if rank < config.workers => Ok(Rank(rank)),
            _ => Err(Malformed("ranks")),
        };
        let ranks = rack.ranks.iter().map(rank).collect::<Result<_, Malformed>>()?;
        let way = Way::SwitchMl {
            config,
            shards: narrow(own.shards, "shards")?,
            contributions: Contributions { ranks, racks: rack.racks },
            place: WorkerId(narrow(rack.place, "place")?),
        };
        let heartbeat_timeout = Duration::from_millis(message.heartbeat_timeout_ms);
        let (name, lineage) = (message.job.clone(), message.lineage);
        Ok(Self { generation, key, upstream, name, lineage, heartbeat_timeout, way })
    }

    /// Whether a job is over where this one begins: the server admits no other of its name, but to ranks that resume theirs.
    fn follows(&self, before: &Self) -> bool {
        let of_lineage = |lineage| before.lineage == Some(lineage) || before.key.lineage() == lineage;
        self.name == before.name && self.lineage.is_none_or(of_lineage)
    }

    /// Whether ranks that are not next to this switch are summed here.
    fn sums_for_others(&self) -> bool {
        match &self.way {
            Way::Goat(route) => route.sums.values().any(|sum| sum.workers & !route.own != 0),
            _ => false,
        }
    }

    /// The route that the upstream of a switch of GOAT tells, whose own part of the plan is `planned`.
    pub fn goat(
        (id, generation): (JobId, Generation),
        upstream: SocketAddr,
        message: &proto::Route,
        own: &proto::route::Goat,
        (planned, aggregators): (&proto::PlannedSwitch, u32),
    ) -> Result<Self, Malformed> {
        let key = key(&message.key)?;
        let address = |text: &str| text.parse::<SocketAddr>().map_err(|_| Malformed("address"));
        let next_hop = |hop: &proto::NextHop| {
            let to = if hop.to.is_empty() { upstream } else { address(&hop.to)? };
            Ok((AggregationNode(narrow(hop.node, "node")?), to))
        };
        let sub_models = SubModels::new(&own.sub_models).map_err(|_| Malformed("sub_models"))?;
        let sum = |sum: &proto::PlannedSum| {
            let sub_model = SubModel(narrow(sum.sub_model, "sub_model")?);
            let fragments = sub_models.fragments_of(sub_model);
            if fragments == 0 {
                return Err(Malformed("sums"));
            }
            let (workers, first_aggregator) = (workers(&sum.workers)?, sum.first_aggregator);
            // A switch that was started again with less memory sends on what it was planned to sum.
            let fits = first_aggregator.checked_add(fragments).is_some_and(|end| end <= aggregators);
            Ok(fits.then_some((sub_model, PlannedSum { workers, first_aggregator })))
        };
        let route = GoatRoute {
            id,
            key,
            generation,
            node: AggregationNode(narrow(planned.node, "node")?),
            upstream,
            next_hops: planned.next_hops.iter().map(next_hop).collect::<Result<_, Malformed>>()?,
            below: planned.below.iter().map(|child| address(child)).collect::<Result<_, _>>()?,
            own: workers(&planned.own)?,
            sums: planned
                .sums
                .iter()
                .filter_map(|planned| sum(planned).transpose())
                .collect::<Result<_, _>>()?,
            window_max: narrow(own.window, "window")?,
            sub_models,
            aggregators,
        };
        let heartbeat_timeout = Duration::from_millis(message.heartbeat_timeout_ms);
        let (name, lineage) = (message.job.clone(), message.lineage);
        Ok(Self { generation, key, upstream, name, lineage, heartbeat_timeout, way: Way::Goat(route) })
    }

    /// The job as a switch of GOAT is told of it.
    pub fn planned(&self) -> Option<GoatRoute<SocketAddr>> {
        match &self.way {
            Way::Goat(route) => Some(route.clone()),
            Way::Atp { .. } | Way::SwitchMl { .. } => None,
        }
    }

    /// The job as a switch of ATP is told of it.
    pub const fn switch_route(&self, id: JobId) -> Option<SwitchRoute<SocketAddr>> {
        let Self { generation, key, upstream, .. } = *self;
        match self.way {
            Way::Atp { level, .. } => Some(SwitchRoute { id, key, generation, upstream, level }),
            Way::Goat(_) | Way::SwitchMl { .. } => None,
        }
    }

    /// The job as a rack of SwitchML is told of it.
    pub fn rack_job(&self) -> Option<SwitchJob<SocketAddr>> {
        match &self.way {
            Way::Atp { .. } | Way::Goat(_) => None,
            Way::SwitchMl { config, contributions, place, .. } => Some(SwitchJob {
                config: *config,
                contributions: contributions.clone(),
                upstream: Some(Upstream { address: self.upstream, place: *place }),
            }),
        }
    }

    /// Memory that it takes of each shard of a rack, in units of 256 elements.
    pub fn pool_units(&self) -> u32 {
        match &self.way {
            Way::Atp { .. } | Way::Goat(_) => 0,
            Way::SwitchMl { config, contributions, .. } => {
                pool_units(config.slots, config.elements, config.wire_dtype, contributions.count())
            }
        }
    }
}

/// A bitmap of ranks as it came.
fn workers(bytes: &[u8]) -> Result<u128, Malformed> {
    bytes.try_into().map(u128::from_le_bytes).map_err(|_| Malformed("workers"))
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
    /// A rank of a job lives here. Whether its route is known; if not, the data path must be told before [`Self::insert`].
    pub fn heard(&mut self, job: JobId, rank: Rank, route: &Route, now: Instant) -> Result<bool, String> {
        if u32::from(rank.0) >= RANKS_MAX {
            return Err(format!("rank {}", rank.0));
        }
        match self.0.get_mut(&job) {
            Some(known) if known.route == *route => {
                known.ranks.insert(rank);
                known.heard = now;
                Ok(true)
            }
            // The same job cannot be at two places of the hierarchy.
            Some(known) if known.route.generation == route.generation => match (&known.route.way, &route.way)
            {
                (Way::Atp { level: was, .. }, Way::Atp { level, .. }) if was != level => {
                    Err(format!("it was at level {was} here, and is at {level}"))
                }
                (Way::Goat(was), Way::Goat(is)) if !is_same_plan(was, is) => {
                    Err("it has another plan here, of the same generation: start its ranks again".into())
                }
                (was, is @ Way::SwitchMl { .. }) if was != is => {
                    Err("it has another place here, or other ranks, than it had".into())
                }
                _ => Ok(false),
            },
            _ => Ok(false),
        }
    }

    /// A job is served from now on. Returns jobs that are over, which are forgotten.
    pub fn insert(&mut self, job: JobId, rank: Rank, route: Route, now: Instant) -> Vec<JobId> {
        tracing::info!(id = job.0, job = route.name, generation = route.generation.0, "serves a job");
        let is_before = |(id, entry): &(&JobId, &Entry)| **id != job && route.follows(&entry.route);
        let before: Vec<JobId> = self.0.iter().filter(is_before).map(|(id, _)| *id).collect();
        for old in &before {
            self.0.remove(old);
        }
        let ranks = [rank].into_iter().collect();
        self.0.insert(job, Entry { route, ranks, hosts: BTreeMap::new(), heard: now });
        before
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
            Some(entry) if entry.route.key.secret_of(rank) != secret => Err(Denied { rank }),
            entry => Ok(entry.is_some()),
        }
    }

    /// A rank left; true when it was the last one here, and the job is forgotten. One that is summed here for ranks elsewhere is kept until
    /// it is overdue.
    pub fn leave(&mut self, job: JobId, rank: Rank) -> bool {
        let Some(entry) = self.0.get_mut(&job) else { return false };
        let is_last = entry.ranks.remove(rank) && entry.ranks.is_empty();
        // Who is elsewhere, and is summed here, may lack what came last.
        let is_over = is_last && !entry.route.sums_for_others();
        if is_over {
            self.0.remove(&job);
        }
        is_over
    }

    /// Forgets the jobs of which no rank was heard for long. Most are over; one whose ranks here were stopped for a while, as in a
    /// debugger, is served again with their next heartbeat.
    pub fn overdue(&mut self, now: Instant) -> Vec<JobId> {
        let is_overdue = |entry: &Entry| now - entry.heard > 2 * entry.route.heartbeat_timeout;
        let over: Vec<JobId> =
            self.0.iter().filter(|(_, entry)| is_overdue(entry)).map(|(job, _)| *job).collect();
        for job in &over {
            self.0.remove(job);
        }
        over
    }

    /// Memory that its jobs but this one take of each shard of a rack. A job that follows another has its memory, too.
    pub fn pool_units_beside(&self, job: JobId, route: &Route) -> u32 {
        let stays = |(id, entry): &(&JobId, &Entry)| **id != job && !route.follows(&entry.route);
        self.0.iter().filter(stays).map(|(_, entry)| entry.route.pool_units()).sum()
    }

    pub fn names(&self) -> Vec<(JobId, String)> {
        self.0.iter().map(|(job, entry)| (*job, entry.route.name.clone())).collect()
    }
}

/// Whatever the addresses of its neighbours are.
fn is_same_plan(was: &GoatRoute<SocketAddr>, is: &GoatRoute<SocketAddr>) -> bool {
    let of = |route: &GoatRoute<SocketAddr>| (route.node, route.own, route.window_max);
    of(was) == of(is) && was.sums == is.sums && was.sub_models == is.sub_models
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: JobId = JobId(7);
    const KEY: Key = Key::new(9);

    fn route(generation: u16, levels: u32) -> Route {
        let message = proto::Route {
            job: "a".into(),
            heartbeat_timeout_ms: 1000,
            key: KEY.to_bytes().into(),
            lineage: None,
            protocol: None,
        };
        let own = proto::route::Atp { levels, elements: 256 };
        Route::atp(Generation(generation), ([10, 0, 0, 9], 4800).into(), &message, &own).expect("a route")
    }

    /// What the switch does; whether the data path had to be told, and which jobs are over.
    fn learn(
        routes: &mut Routes,
        job: JobId,
        rank: u16,
        route: Route,
        now: Instant,
    ) -> Result<(bool, Vec<JobId>), String> {
        let known = routes.heard(job, Rank(rank), &route, now)?;
        let over = if known { Vec::new() } else { routes.insert(job, Rank(rank), route, now) };
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
            let route = Route { key: Key::new(key), lineage, ..route(0, 1) };
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
        let (message, none) = (proto::Route::default(), proto::route::Atp::default());
        let error =
            Route::atp(Generation(0), ([10, 0, 0, 9], 1).into(), &message, &none).expect_err("no switch");
        assert_eq!(error, "it counts 0 switches on the way");
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
        let message = proto::Route {
            job: "a".into(),
            heartbeat_timeout_ms: 1000,
            key: KEY.to_bytes().into(),
            lineage: None,
            protocol: None,
        };
        let bits = |workers: u128| workers.to_le_bytes().to_vec();
        let sum = |(sub_model, (workers, first_aggregator)): (u32, (u128, u32))| proto::PlannedSum {
            sub_model,
            workers: bits(workers),
            first_aggregator,
        };
        let switch = proto::PlannedSwitch {
            node: 1,
            own: bits(0b11),
            sums: (0..).zip(sums).map(sum).collect(),
            ..proto::PlannedSwitch::default()
        };
        let own = proto::route::Goat {
            window: 8,
            elements: 64,
            sub_models: vec![4, 4],
            ..proto::route::Goat::default()
        };
        let upstream = ([10, 0, 0, 9], upstream).into();
        Route::goat((JOB, Generation(0)), upstream, &message, &own, (&switch, 8)).expect("a route")
    }

    #[test]
    fn a_job_that_is_summed_for_ranks_elsewhere_outlives_the_ranks_here() {
        for (workers, is_over) in [(0b11, true), (0b110, false)] {
            let (mut routes, now) = (Routes::default(), Instant::now());
            learn(&mut routes, JOB, 0, planned(1, [(0b11, 0), (workers, 4)]), now).expect("new");
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
            learn(&mut routes, JOB, 0, planned(upstream, [(0b11, 0), (workers, 4)]), now).map(|told| told.0)
        };
        assert_eq!([told(1, 0b11), told(1, 0b11), told(2, 0b11)], [Ok(true), Ok(false), Ok(true)]);
        assert!(told(2, 0b111).is_err_and(|error| error.contains("another plan")));
    }

    #[test]
    fn what_does_not_fit_into_a_switch_that_has_less_memory_now_is_sent_on() {
        for (first, count) in [(4, 2), (5, 1), (8, 1), (u32::MAX, 1)] {
            let Way::Goat(route) = planned(1, [(0b11, 0), (0b11, first)]).way else { panic!("GOAT's") };
            assert_eq!(route.sums.len(), count);
        }
    }
}
