//! What a rank asks for, and what it gets.

use alloc::string::String;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use fanin_wire::{Dtype, Generation, JobId, Key, LossBound, Security, ShardId, SlotIndex, WireDtype};

use super::{FlowPlan, Hierarchy, Racks, Ranks, SwitchTree};
use crate::dlcp;
use crate::switchml::{JobConfig, SwitchJob};

/// Most parts of a model that ranks may name when they join a job of GOAT.
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

/// Most switches on a rank's way to the root. ATP's packets have room for [`LEVELS_MAX`](fanin_wire::LEVELS_MAX) levels only.
pub const HOPS_MAX: usize = 8;

/// How a job's gradients are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Protocol {
    /// In the slots of a switch, and of racks before it (SwitchML).
    #[default]
    SwitchMl,
    /// In aggregators of the switches on the way to a server, as far as there are any (ATP).
    Atp,
    /// In aggregators of switches that a plan gives each part of the stream, and at a server (GOAT).
    Goat,
}

impl Protocol {
    /// Whether tensors of a type are summed so. Fragments have floats and 32-bit integers alone.
    #[must_use]
    pub const fn sums(self, dtype: Dtype) -> bool {
        match self {
            Self::SwitchMl => true,
            Self::Atp | Self::Goat => {
                matches!(dtype, Dtype::Float32 | Dtype::Float16 | Dtype::Bfloat16 | Dtype::Int32)
            }
        }
    }

    /// Whether its packets are fragments, which switches help to sum and a server finishes.
    #[must_use]
    pub const fn has_fragments(self) -> bool {
        matches!(self, Self::Atp | Self::Goat)
    }

    /// Its name on command lines and in messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::SwitchMl => "switchml",
            Self::Atp => "atp",
            Self::Goat => "goat",
        }
    }
}

impl core::str::FromStr for Protocol {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        [Self::SwitchMl, Self::Atp, Self::Goat].into_iter().find(|protocol| protocol.name() == name).ok_or(())
    }
}

/// A switch that passed a rank's request on towards the root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop {
    /// Drawn when the switch started: what tells one from another.
    pub instance: u64,
    /// Its data port, as whom it asked sees it: for messages.
    pub address: SocketAddr,
    /// ATP and GOAT: aggregators that all jobs share.
    pub aggregators: u32,
    /// ATP and GOAT: elements of the longest fragment that an aggregator holds.
    pub elements: u16,
    /// What the kernel granted to each of its sockets.
    pub receive_buffer_bytes: usize,
    /// MTU of its path to whom it asked.
    pub mtu: usize,
    /// What its link to whom it asked carries, where it is known.
    pub rate_bps: Option<u64>,
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
    /// Packets of a rank that may be in flight in a shard (slots, or the window of ATP and GOAT), where the user overrides what is computed.
    pub in_flight: Option<u16>,
    /// MTU of the rank's path to the switch in bytes.
    pub mtu: usize,
    /// Rate of the rank's interface, where it is known.
    pub rate_bps: Option<u64>,
    /// The rank's round trip to the switch.
    pub rtt: Duration,
    /// How the elements of the job's large float tensors travel, as the asking rank wishes.
    pub wire_dtype: WireDtype,
    /// How the job's packets are secured, as the asking rank wishes.
    pub security: Security,
    /// What it believes that each rank's part of a tensor may lose; above nothing the job is summed by DLCP.
    pub loss_bound: LossBound,
    /// Source ports that its packets are to be spread over, where something may be lost; a job has as many as the rank that asks for most.
    pub paths: u32,
    /// How it believes that tensors are cut among the job's services, and which of them this one is: a fingerprint.
    pub plan: u64,
    /// What part this service's share is of the largest one's, in parts of [`PORTION_WHOLE`](super::PORTION_WHOLE).
    pub portion: u16,
    /// How it believes that the job is summed.
    pub protocol: Protocol,
    /// GOAT: elements of each part of the model that it wants planned by itself; with none, the stream is cut into equal parts.
    pub sub_models: Vec<u64>,
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
    /// Packets of a rank that may be in flight in a shard: slots, or ATP's window.
    pub in_flight: u16,
    /// Elements of a chunk.
    pub elements: u16,
    /// Shards of the switch.
    pub shards: u8,
    /// Completed exchanges of each slot of each shard; they wrap. None with ATP, whose workers answer resends.
    pub completed: Vec<Vec<u32>>,
}

impl Resume {
    /// How many exchange counts it holds.
    pub(super) fn counts(&self) -> usize {
        self.completed.iter().map(Vec::len).sum()
    }
}

/// Names one waiting rank towards the shell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// A job as it was admitted: the same for all ranks, but for what each restores.
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
    /// Packets of a rank that may be in flight in a shard: slots, or ATP's window.
    pub in_flight: u16,
    /// Elements of a chunk (twice as many where they travel as bfloat16, up to four times as int8) or, with ATP, of a fragment.
    pub elements: u16,
    /// How the elements of float tensors travel.
    pub wire_dtype: WireDtype,
    /// Shards of the switch.
    pub shards: u8,
    /// Whether it continues a job that a switch forgot.
    pub resumed: bool,
    /// How the packets come together; of ATP jobs alone.
    pub hierarchy: Option<Hierarchy>,
    /// The switches that a plan is made for; of GOAT jobs alone.
    pub switches: Option<SwitchTree>,
    /// Elements of each part of the model that the ranks named; none where the stream is cut into equal parts.
    pub sub_models: Vec<u64>,
    /// How tensors become flows; of jobs with a loss bound alone.
    pub flows: Option<FlowPlan>,
    /// What the switch gets, and the racks before it; of SwitchML jobs alone.
    pub racks: Racks,
    /// For each rank and shard the slots whose last result that rank hands back. Empty unless resumed.
    pub restore: Vec<Vec<Vec<SlotIndex>>>,
}

impl Admission {
    /// All ranks of the job.
    #[must_use]
    pub fn ranks(&self) -> Ranks {
        Ranks::all(self.world_size)
    }

    /// The job as SwitchML's machines are told of it, in the first shard.
    #[must_use]
    pub const fn job_config(&self) -> JobConfig {
        JobConfig {
            id: self.job,
            key: self.key,
            generation: self.generation,
            workers: self.world_size,
            slots: self.in_flight,
            elements: self.elements,
            wire_dtype: self.wire_dtype,
            shard: ShardId(0),
            resumed: self.resumed,
        }
    }

    /// The job as DLCP's machines are told of it, in the first shard; `None` for one without a loss bound.
    #[must_use]
    pub fn flow_config(&self) -> Option<dlcp::JobConfig> {
        let who = (self.job, self.key, self.generation);
        self.flows.map(|flows| flows.job_config(who, self.world_size, self.elements))
    }

    /// The job as the switch at the root is told of it.
    #[must_use]
    pub fn root_job<A>(&self) -> SwitchJob<A> {
        SwitchJob { config: self.job_config(), contributions: self.racks.root.clone(), upstream: None }
    }
}
