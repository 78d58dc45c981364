//! What admission knows of a protocol: who may join, and what each member of a job is told.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt::Debug;
use core::time::Duration;

use fanin_wire::{Dtype, JobId, LossBound, Rank, WireDtype};

use super::pool_size::RATE_DEFAULT_BPS;
use super::{Admission, HOPS_MAX, Hop, JoinRequest, Path, Refusal, Resume, SwitchTree};

/// A protocol as rooms outside its own know it: a value. Calls are by job, never by packet.
///
/// Its room says who may join and what each member is told, in messages of its own, which nobody else reads. Its machines are its
/// `Machines`.
pub trait Protocol: Debug + Send + Sync + 'static {
    /// Its name on command lines, in settings and in messages between machines: "switchml".
    fn name(&self) -> &'static str;

    /// Its name for people: "SwitchML".
    fn title(&self) -> &'static str;

    /// Whether tensors of a type are summed so.
    fn sums(&self, _dtype: Dtype) -> bool {
        true
    }

    /// How large float tensors travel, unless ranks ask for something else.
    fn travels_as(&self) -> WireDtype {
        WireDtype::Native
    }

    /// Whether a job may have several services.
    fn is_divided(&self) -> bool {
        false
    }

    /// Whether switches on the way have aggregators, for fragments in a window; else there are slots, and chunks in them.
    fn aggregates(&self) -> bool {
        false
    }

    /// Whether a plan says which switch sums what.
    fn plans(&self) -> bool {
        false
    }

    /// Whether it may lose a part of a tensor.
    fn may_lose(&self) -> bool {
        false
    }

    /// What bounds its jobs.
    fn limits(&self) -> Limits;

    /// Bytes of a packet of so many elements, without what every packet has: IP, UDP and what secures it.
    fn packet_bytes(&self, elements: usize, wire_dtype: WireDtype) -> usize;

    /// What it has against a request by itself. It is asked before the limits.
    ///
    /// # Errors
    /// Its reason.
    fn check(&self, _request: &JoinRequest) -> Result<(), Refusal> {
        Ok(())
    }

    /// Most elements that switches on a rank's way hold of a packet.
    fn elements_on_the_way(&self, _hops: &[Hop]) -> usize {
        usize::MAX
    }

    /// What the job will be, and what each member is told, now that all ranks are here.
    ///
    /// # Errors
    /// Why it cannot be.
    fn admit(&self, ranks: &Gathered<'_>) -> Result<(Terms, Seats), Refusal>;

    /// Who finds better seats than [`Self::admit`], where that takes its time; one for each service.
    fn planner(&self) -> Option<Box<dyn Planner>> {
        None
    }

    /// What a switch on the way makes of its part of a job.
    ///
    /// # Errors
    /// Why it cannot serve the job, for people.
    fn relayed(&self, part: &[u8], memory: &Memory) -> Result<Relayed, String>;

    /// What is wrong where a switch is told another part of a job than it has, of the same generation.
    fn conflict(&self, was: &[u8], is: &[u8]) -> Option<String> {
        (was != is).then(|| "it has another place here, or other ranks, than it had".into())
    }
}

/// What bounds a protocol's jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most ranks.
    pub ranks_max: u32,
    /// Most switches on a rank's way.
    pub hops_max: usize,
    /// Elements that a packet may have, the fewest first.
    pub packet_elements: &'static [usize],
    /// The numbers that ranks tell a service that lost its memory.
    pub counted: Counted,
}

/// The numbers of each shard by which a rank tells where its job is. A service that lost its memory asks for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// Nothing: workers answer what they are asked.
    Nothing,
    /// The exchanges that each slot has completed.
    Exchanges,
    /// The flows of which it has all sums, up to the first that lacks some.
    Flows,
}

impl Counted {
    /// Numbers of a shard that may have so many packets of a rank in flight.
    pub(super) const fn of_shard(self, in_flight: u16) -> u16 {
        match self {
            Self::Nothing => 0,
            Self::Exchanges => in_flight,
            Self::Flows => 1,
        }
    }
}

impl Limits {
    /// Those of a protocol whose packets have these lengths, and that has no other limit than jobs have.
    #[must_use]
    pub const fn new(ranks_max: u32, packet_elements: &'static [usize]) -> Self {
        Self { ranks_max, hops_max: HOPS_MAX, packet_elements, counted: Counted::Nothing }
    }
}

/// The ranks of a job that is to be admitted. They agree on what they must agree on.
#[derive(Debug)]
pub struct Gathered<'a> {
    /// What each asks for, in order of rank.
    pub requests: &'a [&'a JoinRequest],
    /// The switches on their ways.
    pub tree: &'a SwitchTree,
    /// Most elements that a packet can have on every rank's way.
    pub elements: u16,
    /// Shards of the job.
    pub shards: u8,
    /// What the kernel granted to each of its sockets.
    pub receive_buffer_bytes: usize,
}

impl<'a> Gathered<'a> {
    /// What any of them asked for: they agree.
    #[must_use]
    pub const fn any(&self) -> &'a JoinRequest {
        self.requests[0]
    }

    /// Ranks of the job.
    #[must_use]
    pub const fn world_size(&self) -> u16 {
        self.requests.len() as u16
    }

    /// Each rank's way: the switches that its packets go through, its own first.
    #[must_use]
    pub fn ways(&self) -> Vec<&'a [Hop]> {
        self.requests.iter().map(|request| request.hops.as_slice()).collect()
    }

    /// Packets that may be in flight, where a rank asked for a number.
    #[must_use]
    pub fn in_flight(&self) -> Option<u16> {
        self.requests.iter().find_map(|request| request.agreed.in_flight)
    }

    /// The slowest rank's rate.
    #[must_use]
    pub fn rate_bps(&self) -> u64 {
        let known = |request: &&JoinRequest| request.rate_bps.filter(|rate| *rate > 0);
        let rates = self.requests.iter().map(|request| known(request).unwrap_or(RATE_DEFAULT_BPS));
        rates.min().unwrap_or(RATE_DEFAULT_BPS)
    }

    /// What the ranks remember of the job, if they resume one.
    #[must_use]
    pub fn resumes(&self) -> Vec<&'a Resume> {
        self.requests.iter().filter_map(|request| request.resume.as_ref()).collect()
    }

    /// What decides how many packets are in flight, where so many send to one switch.
    #[must_use]
    pub fn path(&self, senders: u16) -> Path {
        let of_many = self.requests.iter().filter(|request| request.agreed.plan != 0);
        Path {
            rate_bps: self.rate_bps(),
            rtt: self.requests.iter().map(|request| request.rtt).max().unwrap_or(Duration::ZERO),
            senders,
            elements: self.elements,
            wire_dtype: self.any().agreed.wire_dtype,
            shards: self.shards,
            receive_buffer_bytes: self.receive_buffer_bytes,
            portion: of_many.map(|request| request.portion).max(),
        }
    }
}

/// What a job will be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Slots of a rank in a shard; of ATP, fragments. A rank that resumes keeps this number.
    pub in_flight: u16,
    /// Packets of a rank that may be in flight in a shard.
    pub window: u16,
    /// Elements of a full packet, as the protocol counts them.
    pub elements: u16,
    /// How the elements of large float tensors travel.
    pub wire_dtype: WireDtype,
    /// What each rank's part of a tensor may lose.
    pub loss_bound: LossBound,
    /// Memory that it takes of each shard of the service, in units of 256 elements.
    pub pool_units: u32,
}

/// What each member of a job is told, in messages of its protocol's own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seats {
    /// The service at the root.
    pub root: Vec<u8>,
    /// The switches of the job's tree, in its order.
    pub switches: Vec<Vec<u8>>,
    /// The ranks, in order.
    pub ranks: Vec<Vec<u8>>,
    /// Which part each switch sums, where it is planned: for people.
    pub shares: Vec<Share>,
}

/// Which part of a job a switch sums.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// The switch, by its place in the tree.
    pub switch: usize,
    /// Of what all ranks send, in millionths.
    pub millionths: u32,
    /// Its aggregators that the job has, in each shard.
    pub aggregators: u32,
}

/// Finds seats that take their time to find. It knows what earlier jobs have of the switches' memory.
pub trait Planner: Send + Sync {
    /// What each member of a job is told.
    ///
    /// # Errors
    /// Why there can be no plan.
    fn plan(&self, admission: &Admission) -> Result<Seats, String>;

    /// A job is over: its memory is another's.
    fn forget(&self, job: JobId);

    /// Jobs that another plan would suit better by now. They could have more of the switches' memory than when they were planned, or have
    /// more than their share of it.
    fn unsettled(&self) -> Vec<JobId>;
}

/// What a switch on the way has, for all jobs together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Cores that sum, each with a socket and memory of its own.
    pub shards: u8,
    /// Memory of each shard, in units of 256 elements: for protocols with slots.
    pub pool_units: u32,
    /// Aggregators of each shard: for protocols that have some.
    pub aggregators: u32,
}

/// What a switch on the way makes of its part of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Relayed {
    /// Memory that the job takes of each of its shards, in units of 256 elements.
    pub pool_units: u32,
    /// Whether it sums for ranks that are not below it, which may lack something when those below have left.
    pub serves_others: bool,
}

/// A message that no fanin sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

impl core::fmt::Display for Malformed {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "the message's {} is missing or out of range", self.0)
    }
}

impl core::error::Error for Malformed {}

impl From<Malformed> for String {
    fn from(malformed: Malformed) -> Self {
        format!("{malformed}")
    }
}

/// A number as the type that machines use.
///
/// # Errors
/// When it is out of range, the name of the field.
pub fn narrow<T: TryFrom<u32>>(value: u32, field: &'static str) -> Result<T, Malformed> {
    T::try_from(value).map_err(|_| Malformed(field))
}

/// A member's part of a job, of the message type `M`.
///
/// # Errors
/// When it is no such message.
pub fn read<M: prost::Message + Default>(part: &[u8]) -> Result<M, Malformed> {
    M::decode(part).map_err(|_| Malformed("part"))
}

/// The rank's part; none of a rank that the job does not have.
#[must_use]
pub fn part_of(seats: &Seats, rank: Rank) -> Option<&[u8]> {
    seats.ranks.get(usize::from(rank.0)).map(Vec::as_slice)
}
