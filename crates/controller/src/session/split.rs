//! What a rank tells its services for people who ask them: how the job is shared, where the rank
//! is, and how it fares.

use fanin_wire::Rank;

use super::config::{ServiceConfig, SessionConfig};
use crate::control_channel::Connection;
use crate::convert::{Malformed, narrow, shown};
use crate::path::route;
use crate::proto;

/// How the tensors of a job are shared among its services.
#[derive(Clone, Debug, PartialEq)]
pub struct Split {
    /// In the order of the job.
    pub shares: Vec<Share>,
    /// What they take, if that was planned.
    pub prediction: Option<Prediction>,
    /// What the links were told to carry, and what was taken for those that tell nothing; empty
    /// where no share follows from it.
    pub links: String,
}

/// What one service has of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Share {
    /// The service, as a rank was told of it.
    pub service: String,
    /// Its part of all tensors; what all have together is the whole.
    pub share: f64,
    /// The rank in whose process it is, if it is in one's.
    pub host: Option<u32>,
}

/// What a plan says of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// What it takes to sum a byte as it travels, headers apart.
    pub seconds_per_byte: f64,
    /// What takes that long.
    pub bound: String,
    /// What a ring of the machines, such as Gloo's, takes for a byte on the same links.
    pub ring_seconds_per_byte: Option<f64>,
}

impl Prediction {
    /// Everything takes so many times as long.
    pub(super) fn scale(&mut self, times: f64) {
        self.seconds_per_byte *= times;
        self.ring_seconds_per_byte.iter_mut().for_each(|ring| *ring *= times);
    }
}

/// Where a rank is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Which machine: equal for its ranks.
    pub machine: String,
    /// Its name, for people.
    pub name: String,
    /// Its address on the way to the service.
    pub address: String,
    /// The ranks that are there, where this one speaks for all of them.
    pub ranks: Vec<u32>,
}

/// A rank of a job, as it tells of itself.
#[derive(Clone, Debug, PartialEq)]
pub struct MemberStatus {
    /// Its number at the service.
    pub rank: Rank,
    /// Where it is.
    pub place: Place,
    /// What a byte of large tensors took of late as it travels, from a tensor's submission or the
    /// end of the one before: a median.
    pub seconds_per_byte: Option<f64>,
    /// By how much the service that is furthest from its share misses it, as a fraction of all
    /// packets of the rank.
    pub imbalance: f64,
}

impl Split {
    /// As a session is told it.
    pub(super) fn of(config: &SessionConfig) -> Self {
        let total: f64 = config.services.iter().map(|service| service.share).sum();
        let share = |service: &ServiceConfig| Share {
            service: service.switch.clone(),
            share: service.share / total,
            host: service.host,
        };
        Self {
            shares: config.services.iter().map(share).collect(),
            prediction: config.prediction.clone(),
            links: config.links.clone(),
        }
    }

    /// As the service at this place among them is told it.
    pub(super) fn told(self, here: usize) -> proto::Split {
        let ring_seconds_per_byte = self.prediction.as_ref().and_then(|told| told.ring_seconds_per_byte);
        let (seconds_per_byte, bound) =
            self.prediction.map(|told| (told.seconds_per_byte, told.bound)).unzip();
        proto::Split {
            shares: self.shares.into_iter().map(proto::split::Share::from).collect(),
            here: u32::try_from(here).unwrap_or(u32::MAX),
            seconds_per_byte,
            bound: bound.unwrap_or_default(),
            links: self.links,
            ring_seconds_per_byte,
        }
    }
}

impl From<Share> for proto::split::Share {
    fn from(Share { service, share, host }: Share) -> Self {
        Self { service, share, host }
    }
}

impl From<proto::Split> for Split {
    fn from(told: proto::Split) -> Self {
        let share = |told: proto::split::Share| Share {
            service: shown(told.service),
            share: told.share,
            host: told.host,
        };
        let (bound, ring_seconds_per_byte) = (shown(told.bound), told.ring_seconds_per_byte);
        let prediction = |seconds_per_byte| Prediction { seconds_per_byte, bound, ring_seconds_per_byte };
        Self {
            shares: told.shares.into_iter().map(share).collect(),
            prediction: told.seconds_per_byte.map(prediction),
            links: shown(told.links),
        }
    }
}

/// Where this rank is, as it tells the service at the end of `connection`.
pub(super) fn place(config: &SessionConfig, connection: &Connection) -> proto::Place {
    let address = route(connection.address).map(|route| route.local.to_string()).unwrap_or_default();
    proto::Place { address, ..here(config) }
}

/// The same without an address.
pub(super) fn here(config: &SessionConfig) -> proto::Place {
    let host = || std::fs::read_to_string("/proc/sys/kernel/hostname").map(|name| name.trim().to_owned());
    let name = if config.machine == fanin_local::machine_id() { host().ok() } else { None };
    proto::Place {
        name: name.unwrap_or_else(|| config.machine.clone()),
        machine: config.machine.clone(),
        address: String::new(),
        ranks: config.ranks_here.clone(),
    }
}

impl TryFrom<proto::job::Member> for MemberStatus {
    type Error = Malformed;

    fn try_from(told: proto::job::Member) -> Result<Self, Malformed> {
        let proto::Place { machine, name, address, ranks } = told.place.unwrap_or_default();
        Ok(Self {
            rank: Rank(narrow(told.rank, "rank")?),
            place: Place { machine: shown(machine), name: shown(name), address: shown(address), ranks },
            seconds_per_byte: told.seconds_per_byte,
            imbalance: told.imbalance,
        })
    }
}
