//! ATP as a value: its limits, what its members are told, and its machines.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::net::SocketAddr;

use fanin_wire::{
    Directions, Dtype, FRAGMENT_ELEMENTS, Generation, JobId, Key, LEVELS_MAX, NATIVE_ELEMENTS_MAX, Rank,
    ShardId, WireDtype, fragment_packet_bytes,
};
use prost::Message;

use super::hierarchy::{Hierarchy, hierarchy};
use super::{
    AGGREGATORS_MAX, ATP_WORKERS_MAX, AtpJobConfig, AtpServer, AtpSwitch, AtpWorker, AtpWorkerPlan,
    DEFAULT_WAYS, Hashing, Overflow, Scaling, ServerJob, SwitchRoute,
};
use crate::aggregation::admission::{self, ELEMENTS};
use crate::control::{
    Gathered, Hop, JoinRequest, Limits, Malformed, Memory, Protocol, Refusal, Relayed, Seats, Terms,
    WINDOW_MIN, narrow, read, window_packets,
};
use crate::machine::{Address, JobIdentity, Tensor};
use crate::machines::{Machines, OwnChoices, Peers, WorkerTerms};
use crate::transport::RetransmissionConfig;

/// The protocol. See [`atp`](super).
#[derive(Clone, Copy, Debug)]
pub struct Atp;

/// The terms of a rank of an ATP job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankTerms {
    /// The job.
    pub config: AtpJobConfig,
    /// The directions of the rank's packets.
    pub directions: Directions,
    /// Windows that the ranks of its machine have side by side, this one included.
    pub windows: u16,
}

/// The part that all members are told.
#[derive(Clone, PartialEq, Message)]
struct Common {
    /// Packets of a rank that may be in flight.
    #[prost(uint32, tag = "1")]
    window: u32,
    /// Elements of a fragment.
    #[prost(uint32, tag = "2")]
    elements: u32,
    /// Indices of aggregators are below this, which every switch of the job has; 0 where it has none.
    #[prost(uint32, tag = "3")]
    aggregators: u32,
    /// Whether large floats travel as bfloat16.
    #[prost(bool, tag = "4")]
    bfloat16: bool,
}

/// The directions of a rank's packets: the level that they reach first, and at each level the rank's bit and the number of
/// contributions.
#[derive(Clone, PartialEq, Message)]
struct Way {
    #[prost(uint32, tag = "1")]
    level: u32,
    #[prost(uint32, repeated, tag = "2")]
    bitmaps: Vec<u32>,
    #[prost(uint32, repeated, tag = "3")]
    fan_in_degrees: Vec<u32>,
}

#[derive(Clone, PartialEq, Message)]
struct RankPart {
    #[prost(message, required, tag = "1")]
    common: Common,
    #[prost(message, required, tag = "2")]
    way: Way,
}

#[derive(Clone, PartialEq, Message)]
struct SwitchPart {
    /// Its own, which tells how many may be below it.
    #[prost(uint32, tag = "1")]
    level: u32,
    #[prost(uint32, tag = "2")]
    elements: u32,
}

#[derive(Clone, PartialEq, Message)]
struct RootPart {
    #[prost(message, required, tag = "1")]
    common: Common,
    /// The level that packets have when they come here.
    #[prost(uint32, tag = "2")]
    level: u32,
    /// By rank.
    #[prost(message, repeated, tag = "3")]
    ways: Vec<Way>,
}

impl Common {
    /// The job as it was admitted, to its server and to its workers alike. What nobody chooses is chosen here.
    fn config(&self, job: JobIdentity) -> Result<AtpJobConfig, Malformed> {
        let JobIdentity { id, key, generation, workers, .. } = job;
        let config = AtpJobConfig {
            id,
            key,
            generation,
            workers,
            elements: narrow(self.elements, "elements")?,
            window_max: narrow(self.window, "window")?,
            aggregators: self.aggregators,
            hashing: Hashing::Hash,
            // Gradients of any size: with the paper's fixed factor, sums of 21.5 and more overflow (ATP §3.8, §B.3).
            scaling: Scaling::Dynamic,
            overflow: Overflow::Reactive,
            congestion_control: true,
            wire_dtype: admission::wire_dtype(self.bfloat16),
            // As with SwitchML: a vector of metrics has elements of any size, and a NaN beside them.
            originals_elements_max: NATIVE_ELEMENTS_MAX as u32,
        };
        config.check().map_err(|_| Malformed("job"))
    }
}

impl From<&Directions> for Way {
    fn from(directions: &Directions) -> Self {
        Self {
            level: directions.level.into(),
            bitmaps: directions.bitmaps.to_vec(),
            fan_in_degrees: directions.fan_in_degrees.iter().copied().map(u32::from).collect(),
        }
    }
}

impl TryFrom<&Way> for Directions {
    type Error = Malformed;

    fn try_from(way: &Way) -> Result<Self, Malformed> {
        let mut fan_in_degrees = [0; LEVELS_MAX];
        for (degree, of_message) in fan_in_degrees.iter_mut().zip(&way.fan_in_degrees) {
            *degree = narrow(*of_message, "fan_in_degrees")?;
        }
        let bitmaps = way.bitmaps.as_slice().try_into().map_err(|_| Malformed("bitmaps"))?;
        Ok(Self { level: narrow(way.level, "level")?, bitmaps, fan_in_degrees })
    }
}

impl ServerJob {
    /// Reads the server's part of a job.
    ///
    /// # Errors
    /// When it is no such part.
    pub fn read(job: JobIdentity, part: &[u8]) -> Result<Self, Malformed> {
        let RootPart { common, level, ways } = read(part)?;
        let workers = ways.iter().map(Directions::try_from).collect::<Result<_, _>>()?;
        let level = narrow(level, "level")?;
        Ok(Self { config: common.config(job)?, workers, level, restored: job.resumed })
    }
}

impl Protocol for Atp {
    fn name(&self) -> &'static str {
        "atp"
    }

    fn title(&self) -> &'static str {
        "ATP"
    }

    fn sums(&self, dtype: Dtype) -> bool {
        crate::aggregation::sums(dtype)
    }

    fn travels_as(&self) -> WireDtype {
        WireDtype::SharedExponent
    }

    /// Among several servers, each behind switches of its own (§A.5).
    fn is_divided(&self) -> bool {
        true
    }

    fn aggregates(&self) -> bool {
        true
    }

    fn limits(&self) -> Limits {
        Limits { hops_max: LEVELS_MAX, ..Limits::new(ATP_WORKERS_MAX.into(), &FRAGMENT_ELEMENTS) }
    }

    fn packet_bytes(&self, elements: usize, _: WireDtype) -> usize {
        fragment_packet_bytes::<Directions>(elements)
    }

    fn check(&self, request: &JoinRequest) -> Result<(), Refusal> {
        admission::check(request)
    }

    fn elements_on_the_way(&self, hops: &[Hop]) -> usize {
        admission::elements_held(hops)
    }

    fn admit(&self, ranks: &Gathered<'_>) -> Result<(Terms, Seats), Refusal> {
        let Hierarchy { levels, senders, directions, aggregators } = hierarchy(&ranks.ways())?;
        let mut path = ranks.path(senders);
        // Sums have four bytes, however large values travel.
        path.wire_dtype = WireDtype::SharedExponent;
        // What a receive buffer does not hold is found out by the congestion window.
        let window = || window_packets(&path).max(WINDOW_MIN);
        let terms = admission::terms(ranks, ranks.in_flight().unwrap_or_else(window));
        let elements = terms.elements.into();
        // More than an index can name help nobody.
        let aggregators = aggregators.min(AGGREGATORS_MAX);
        let bfloat16 = terms.wire_dtype == WireDtype::Bfloat16;
        let common = Common { window: terms.in_flight.into(), elements, aggregators, bfloat16 };
        let rank = |directions: &Directions| RankPart { common: common.clone(), way: directions.into() };
        // The last switch before the server has the highest level.
        let level = |mut switch: usize| {
            let mut above = 1;
            while let Some(upstream) = ranks.tree.switches[switch].upstream {
                (switch, above) = (upstream, above + 1);
            }
            u32::from(levels) - above
        };
        let switches =
            (0..ranks.tree.switches.len()).map(|switch| SwitchPart { level: level(switch), elements });
        let ways = directions.iter().map(Way::from).collect();
        let seats = Seats {
            root: RootPart { common: common.clone(), level: levels.into(), ways }.encode_to_vec(),
            switches: switches.map(|part| part.encode_to_vec()).collect(),
            ranks: directions.iter().map(|directions| rank(directions).encode_to_vec()).collect(),
            shares: Vec::new(),
        };
        Ok((terms, seats))
    }

    fn relayed(&self, part: &[u8], _: &Memory) -> Result<Relayed, String> {
        let SwitchPart { elements, .. } = read(part)?;
        if elements > u32::from(ELEMENTS) {
            return Err(format!("its fragments have {elements} elements, aggregators here hold {ELEMENTS}"));
        }
        Ok(Relayed::default())
    }

    fn conflict(&self, was: &[u8], is: &[u8]) -> Option<String> {
        let level = |part: &[u8]| read(part).map(|part: SwitchPart| part.level).ok();
        match (level(was), level(is)) {
            (Some(was), Some(is)) if was != is => Some(format!("it was at level {was} here, and is at {is}")),
            _ => None,
        }
    }
}

impl WorkerTerms for RankTerms {
    fn identity(&self) -> (JobId, Key, Generation) {
        (self.config.id, self.config.key, self.config.generation)
    }

    fn check(&self) -> Result<(), String> {
        self.config.check().map(drop).map_err(|error| error.to_string())
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

    fn shape(&self) -> String {
        let AtpJobConfig { workers, window_max, elements, .. } = self.config;
        format!("{workers} workers, a window of {window_max} fragments of {elements} elements (ATP)")
    }
}

impl<A: Address, T: Tensor + Send + 'static> Machines<A, T> for Atp {
    type Terms = RankTerms;
    type Worker = AtpWorker<A, T>;
    type Root = AtpServer<A>;
    type Relay = AtpSwitch<A>;

    fn rank_terms(job: JobIdentity, _: Rank, part: &[u8], own: OwnChoices) -> Result<RankTerms, Malformed> {
        let RankPart { common, way } = read(part)?;
        let config = common.config(job)?;
        let OwnChoices { congestion_control, windows } = own;
        Ok(RankTerms {
            config: AtpJobConfig { congestion_control, ..config },
            directions: Directions::try_from(&way)?,
            windows,
        })
    }

    fn worker(terms: &RankTerms, shard: ShardId, peer: A, when: RetransmissionConfig) -> AtpWorker<A, T> {
        AtpWorker::new(terms.config, terms.directions, peer, when).in_shard(shard).beside(terms.windows)
    }

    fn plan(terms: &RankTerms, _: ShardId, upstream: A) -> AtpWorkerPlan<A> {
        let AtpJobConfig { id, key, generation, .. } = terms.config;
        AtpWorkerPlan { id, key, generation, directions: terms.directions, upstream }
    }

    fn root(shard: ShardId) -> AtpServer<A> {
        AtpServer::of_shard(shard)
    }

    fn root_job(job: JobIdentity, part: &[u8], _: Peers<'_, A>) -> Result<ServerJob, String> {
        Ok(ServerJob::read(job, part)?)
    }

    fn relay(shard: ShardId, memory: &Memory) -> Result<AtpSwitch<A>, String> {
        Ok(AtpSwitch::of_shard(shard, admission::table(memory, DEFAULT_WAYS)?))
    }

    fn relay_job(
        job: JobIdentity,
        part: &[u8],
        upstream: SocketAddr,
        _: &Memory,
        peers: Peers<'_, A>,
    ) -> Result<SwitchRoute<A>, String> {
        let SwitchPart { level, .. } = read(part)?;
        let JobIdentity { id, key, generation, workers, .. } = job;
        let level = narrow(level, "level")?;
        Ok(SwitchRoute { id, key, generation, workers, upstream: peers(upstream)?, level })
    }
}
