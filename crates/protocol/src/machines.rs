//! What a driver knows of a protocol: which machines it has, and what each is told of a job.

use alloc::format;
use alloc::string::String;
use core::fmt::Debug;
use core::net::SocketAddr;
use fanin_wire::{Dtype, Generation, JobId, Key, Rank, ShardId, WorkerId};

use crate::control::{Agreed, Malformed, Memory, Protocol};
use crate::machine::{Address, JobIdentity, Summer, Tensor, WorkerMachine};
use crate::transport::RetransmissionConfig;

/// The terms of a rank of a job, as the job's protocol has them.
pub trait WorkerTerms: Clone + Debug + PartialEq + Send + Sync + 'static {
    /// The job, what its packets are tagged with, and how often it was set up.
    fn identity(&self) -> (JobId, Key, Generation);

    /// Whether every number is within its limit.
    ///
    /// # Errors
    /// What is wrong, for people.
    fn check(&self) -> Result<(), String>;

    /// Packets of a worker that may be in flight in a shard: slots, a window, or flows.
    fn in_flight(&self) -> u16;

    /// Elements of a packet that is full, as the protocol counts them.
    fn elements(&self) -> u16;

    /// Elements that one packet carries, of a tensor of `elements` elements.
    fn packet_elements(&self, dtype: Dtype, elements: usize) -> usize;

    /// Source ports that its packets are spread over. A switch mostly knows a worker by one address.
    fn paths(&self) -> u8 {
        1
    }

    /// Whether it has collectives other than all-reduces.
    fn has_roots(&self) -> bool {
        false
    }

    /// Whether a part of the ranks can sum alone: [`Tensor::participants`].
    fn has_participants(&self) -> bool {
        false
    }

    /// A wish of the rank that the job lacks, for people. A service that admits without it is of another version.
    fn lacks(&self, _asked: &Agreed, _paths: u8) -> Option<String> {
        None
    }

    /// The terms that a job keeps under another service, for people: "8 workers, a window of ...".
    fn shape(&self) -> String;
}

/// A rank's place is below its job's number of workers.
pub(crate) fn check_place(place: WorkerId, workers: u16) -> Result<(), String> {
    match u16::from(place.0) < workers {
        true => Ok(()),
        false => Err(format!("place {} in a job of {workers} workers", place.0)),
    }
}

/// Names a peer before it sends, as packets from there will.
pub type Peers<'a, A> = &'a dyn Fn(SocketAddr) -> Result<A, String>;

/// The choices that a rank makes alone. Nobody else need know them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnChoices {
    /// Whether its window shrinks when packets are lost, of a protocol that has that.
    pub congestion_control: bool,
    /// Windows that the ranks of its machine have side by side, this one included: of each job of
    /// theirs, one a shard.
    pub windows: u16,
}

/// The machines of a protocol, over addresses `A` and memory of tensors `T`.
pub trait Machines<A: Address, T: Tensor + Send + 'static>: Protocol {
    /// The terms of a rank.
    type Terms: WorkerTerms;
    /// The machine at a rank, one for each shard of each service.
    type Worker: WorkerMachine<Address = A, Tensor = T> + Send + 'static;
    /// The machine at the root, one for each shard.
    type Root: Summer<Address = A, Job: Send, Error: Send + Sync + 'static> + Send + 'static;
    /// The machine at a switch on the way there, one for each shard.
    type Relay: Summer<Address = A, Job: Send, Error: Send + Sync + 'static> + Send + 'static;

    /// Reads a rank's part of a job.
    ///
    /// # Errors
    /// When it is no such part.
    fn rank_terms(
        job: JobIdentity,
        rank: Rank,
        part: &[u8],
        own: OwnChoices,
    ) -> Result<Self::Terms, Malformed>;

    /// The worker of one shard, at a service that is at `peer`. The terms are checked.
    fn worker(terms: &Self::Terms, shard: ShardId, peer: A, when: RetransmissionConfig) -> Self::Worker;

    /// The plan by which that worker goes on at a service whose memory is empty.
    fn plan(terms: &Self::Terms, shard: ShardId, peer: A) -> <Self::Worker as WorkerMachine>::Plan;

    /// The machine of one shard at the root.
    fn root(shard: ShardId) -> Self::Root;

    /// Reads the root's part of a job.
    ///
    /// # Errors
    /// When the part is none, or names somebody to whom there is no way.
    fn root_job(
        job: JobIdentity,
        part: &[u8],
        peers: Peers<'_, A>,
    ) -> Result<<Self::Root as Summer>::Job, String>;

    /// The machine of one shard at a switch on the way, for all jobs.
    ///
    /// # Errors
    /// When there can be none, or none with so much memory.
    fn relay(shard: ShardId, memory: &Memory) -> Result<Self::Relay, String>;

    /// What it is told of a job that comes from `upstream`.
    ///
    /// # Errors
    /// As [`Self::root_job`].
    fn relay_job(
        job: JobIdentity,
        part: &[u8],
        upstream: SocketAddr,
        memory: &Memory,
        peers: Peers<'_, A>,
    ) -> Result<<Self::Relay as Summer>::Job, String>;
}
