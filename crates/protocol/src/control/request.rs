//! What a rank asks for, and what it gets.

use alloc::string::String;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use fanin_wire::{Generation, JobId, Key, Rank};

use super::{Agreed, Ranks, Seats, SwitchTree, Terms};
use crate::machine::JobIdentity;

/// Most parts of a model that ranks may name when they join a job.
pub const NAMED_SUB_MODELS_MAX: usize = 256;

/// Longest job name in bytes.
pub const JOB_NAME_BYTES_MAX: usize = 128;

/// Whether a job can be called so: what a person sees of the name is the name.
#[must_use]
pub fn is_job_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= JOB_NAME_BYTES_MAX && !name.chars().any(is_unprintable)
}

/// Whether a character is not seen, and can change how those around it are: controls, separators of lines, marks of direction, and joiners.
#[must_use]
pub fn is_unprintable(c: char) -> bool {
    let is_format = matches!(
        c,
        '\u{ad}'
            | '\u{61c}'
            | '\u{180e}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e007f}'
    );
    c.is_control() || is_format
}

/// Most switches on a rank's way to the root; a protocol may have room for fewer.
pub const HOPS_MAX: usize = 8;

/// A switch that passed a rank's request on towards the root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop {
    /// Drawn when the switch started: what tells one from another.
    pub instance: u64,
    /// Its data port, as whom it asked sees it: for messages.
    pub address: SocketAddr,
    /// Cores that sum, each with a socket and memory of its own.
    pub shards: u8,
    /// Aggregators of each, which all jobs share, of a protocol that has some.
    pub aggregators: u32,
    /// Elements of the longest packet that one holds.
    pub elements: u16,
    /// What the kernel granted to each of its sockets.
    pub receive_buffer_bytes: usize,
    /// MTU of its path to whom it asked.
    pub mtu: usize,
    /// What its link to whom it asked carries, where it is known.
    pub rate_bps: Option<u64>,
}

#[cfg(test)]
impl Hop {
    /// A switch of that number, for tests.
    pub(crate) fn numbered(instance: u64) -> Self {
        Self {
            instance,
            address: ([10, 0, 0, instance as u8], 4800).into(),
            shards: 1,
            aggregators: 100 + instance as u32,
            elements: 2048,
            receive_buffer_bytes: 16 << 20,
            mtu: 1500,
            rate_bps: None,
        }
    }
}

/// A rank's wish to join a job, as it came from the network: nothing in it is trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JoinRequest {
    /// Name of the job; ranks with the same name meet.
    pub job: String,
    /// The asking rank.
    pub rank: u32,
    /// Ranks of the job, as the asking rank believes.
    pub world_size: u32,
    /// The protocol that is to sum the job, by name.
    pub protocol: String,
    /// What all ranks must ask for alike.
    pub agreed: Agreed,
    /// MTU of the rank's path to the switch in bytes.
    pub mtu: usize,
    /// Rate of the rank's interface, where it is known.
    pub rate_bps: Option<u64>,
    /// The rank's round trip to the switch.
    pub rtt: Duration,
    /// Source ports that its packets are to be spread over, where something may be lost; a job has as many as the rank that asks for most.
    pub paths: u32,
    /// What part this service's share is of the largest one's, in parts of [`PORTION_WHOLE`](super::PORTION_WHOLE).
    pub portion: u16,
    /// The switches that passed the request on, the rank's own first.
    pub hops: Vec<Hop>,
    /// How long the rank will wait for the others.
    pub patience: Duration,
    /// The wire version that the rank speaks.
    pub wire_version: u8,
    /// What the rank still has of a job that a switch forgot.
    pub resume: Option<Resume>,
    /// From which machine it was asked, a rank's or that of the switch which passed it on; `None` from the switch's own.
    pub origin: Option<IpAddr>,
}

impl JoinRequest {
    /// What tells those who resume a job from anybody else who asks for one of its name.
    #[must_use]
    pub fn lineage(&self) -> Option<u64> {
        self.resume.as_ref().map(|resume| resume.lineage)
    }
}

/// A rank's memory of a job whose switch restarted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resume {
    /// What only its ranks can know: [`Key::lineage`] of its key.
    pub lineage: u64,
    /// The generation that was running.
    pub generation: Generation,
    /// Packets of a rank that may be in flight in a shard.
    pub in_flight: u16,
    /// Elements of a full packet, as its protocol counts them.
    pub elements: u16,
    /// The numbers that its protocol counts ([`Counted`](super::Counted)) in each shard. They wrap.
    pub completed: Vec<Vec<u32>>,
}

impl Resume {
    /// Whether a job was admitted with what is remembered.
    pub(super) fn is_of(&self, admission: &Admission) -> bool {
        let Admission { terms, shards, .. } = admission;
        (self.in_flight, self.elements, self.completed.len())
            == (terms.in_flight, terms.elements, usize::from(*shards))
    }

    /// How many exchange counts it holds.
    pub(super) fn counts(&self) -> usize {
        self.completed.iter().map(Vec::len).sum()
    }
}

/// Names one waiting rank towards the shell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// A job as it was admitted: the same for all ranks, but for what each is told by its protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admission {
    /// Drawn at random.
    pub job: JobId,
    /// Drawn at random, and told to the job's members alone.
    pub key: Key,
    /// 0, or one more than the generation that is resumed.
    pub generation: Generation,
    /// Ranks of the job.
    pub world_size: u16,
    /// Its shards.
    pub shards: u8,
    /// Whether it continues a job that a service forgot.
    pub resumed: bool,
    /// The protocol that sums it, by name.
    pub protocol: &'static str,
    /// What all members have of it.
    pub terms: Terms,
    /// The switches on the ranks' ways.
    pub tree: SwitchTree,
    /// What each member is told.
    pub seats: Seats,
}

impl Admission {
    /// All ranks of the job.
    #[must_use]
    pub fn ranks(&self) -> Ranks {
        Ranks::all(self.world_size)
    }

    /// What every member knows of it.
    #[must_use]
    pub const fn identity(&self) -> JobIdentity {
        let Self { job: id, key, generation, world_size: workers, resumed, .. } = *self;
        JobIdentity { id, key, generation, workers, resumed }
    }

    /// What the switches on a rank's way are told, the root's neighbour first.
    #[must_use]
    pub fn way(&self, rank: Rank) -> Vec<&[u8]> {
        let parts = &self.seats.switches;
        self.tree.way(rank).into_iter().filter_map(|switch| parts.get(switch)).map(Vec::as_slice).collect()
    }
}
