//! ATP: best-effort aggregation of many jobs in many racks (Lao et al., NSDI 2021).
//!
//! The way of a fragment: a worker cuts its tensors into fragments, numbers them in one stream, and
//! sends each with its [`Directions`] to its rack's [`AtpSwitch`]. The switch adds fragments of the
//! same sequence number in an *aggregator*, if the one that the fragment hashes to is free, and
//! sends the sum on towards the job's [`AtpServer`]. If it is not free, the fragment goes on
//! unsummed. A switch of the next level does the same with what comes from below. The server adds
//! whatever arrives, whole sums, partial ones and single fragments, until every worker is in, and
//! answers with the parameters. They return hop by hop through the same switches, which free the
//! aggregator. Workers send lost packets again marked *resend*, which makes the switches give up
//! what they hold.
//!
//! Two things that every machine relies on:
//!
//! - The *place* of a fragment is its sequence number modulo the job's window. A worker sends the
//!   next fragment of a place only when it has the parameters of the last one. So the server needs
//!   one gathering and one finished fragment a place, and all workers agree on the aggregator that
//!   a place uses.
//! - A parameter packet names the aggregator that its fragment used, which the switches free. It
//!   also names the one that the fragment's place uses from now on (in the first bitmap) and the
//!   exponent of that next fragment (`next_exponent`). A worker that hands parameters back
//!   (`restore`) puts both, as it got them, where they were.
//!
//! The machines are those of [`aggregation`](crate::aggregation); here is what ATP tells them: the
//! hierarchy that directions describe.

mod hierarchy;
mod protocol;
mod switch;
#[cfg(test)]
mod tests;
mod tree;

use alloc::vec::Vec;
use fanin_wire::{Directions, Generation, GradientHeader, JobId, Participants};

pub use crate::aggregation::{
    AGGREGATORS_MAX, ConfigError as AtpConfigError, DEFAULT_WAYS, Hashing, JOBS_MAX as ATP_JOBS_MAX,
    JobConfig as AtpJobConfig, Overflow, Scaling, ServerProgress as AtpServerProgress,
    SwitchConfig as AtpSwitchConfig, SwitchProgress as AtpSwitchProgress,
    SwitchStatistics as AtpSwitchStatistics, WAYS_MAX, WINDOW_ELEMENTS_MAX, WORKERS_MAX as ATP_WORKERS_MAX,
    WorkerProgress as AtpWorkerProgress,
};
use crate::aggregation::{Server, Switch, Way, Worker, WorkerPlan};
use crate::transport::mix;
pub use protocol::{Atp, RankTerms};
pub use switch::SwitchRoute;
pub use tree::Tree;

/// A worker of an ATP job. `A` names the rack's switch (or the server where there is none), `T`
/// holds a tensor's memory.
pub type AtpWorker<A, T> = Worker<A, T, Directions>;
/// How it goes on in another generation.
pub type AtpWorkerPlan<A> = WorkerPlan<A, Directions>;
/// A switch: a table of aggregators, and for each job the way up and down. `A` names a peer's
/// address.
pub type AtpSwitch<A> = Switch<A, SwitchRoute<A>>;
/// A parameter server of any number of jobs. `A` names a peer's address.
pub type AtpServer<A> = Server<A, Tree>;

/// A job as its server is told of it.
#[derive(Clone, Debug)]
pub struct ServerJob {
    /// The same as at the workers.
    pub config: AtpJobConfig,
    /// The directions that each worker sends its fragments with, by rank.
    pub workers: Vec<Directions>,
    /// The level that packets have when they come here: one more than that of the last switch on
    /// their way. Directions of this level and above, with one bit each, tell the server's own
    /// children apart where it has several.
    pub level: u8,
    /// Whether the job is under way: the server lost its memory, and workers hand back what they
    /// have.
    pub restored: bool,
}

impl<A: Copy + PartialEq> AtpServer<A> {
    /// Sets the job up again after a worker moved (ATP §A.3): a new generation, and everybody's new
    /// directions. The server keeps what it has aggregated. Returns the earliest sequence number
    /// that it has not; `None` when it has no such job.
    ///
    /// A new generation is needed, because packets with the old fan-in degrees must not meet those
    /// with the new in a switch: it would take a rack for complete that is not.
    ///
    /// # Errors
    /// When the directions do not form a tree of as many workers as the job has; the job is then as
    /// before.
    pub fn set_up_again(
        &mut self,
        job: JobId,
        generation: Generation,
        workers: &[Directions],
        level: u8,
    ) -> Result<Option<u64>, AtpConfigError> {
        self.go_on(job, generation, |before| before.set_up_again(workers, level))
    }
}

/// The same directions for all fragments: the switches on the way sum whatever they have room for.
impl<A> Way<A> for Directions {
    type Label = Self;

    fn label(&self, _sequence: u64, agreed: u32, _: Participants) -> (Self, u32) {
        (*self, agreed)
    }

    fn next_aggregator_index(parameters: &GradientHeader) -> u32 {
        next_aggregator_index(parameters)
    }

    fn senders(&self, _workers: u16) -> u16 {
        self.fan_in_degrees.iter().copied().max().unwrap_or(0).into()
    }

    fn mixed(&self, begin: u64) -> u64 {
        self.bitmaps.iter().fold(begin, |own, bits| mix(own ^ u64::from(*bits)))
    }
}

/// The aggregator that the place of these parameters uses from now on: it travels in the bitmap,
/// which parameters do not need (ATP §3.6).
const fn next_aggregator_index(parameters: &GradientHeader) -> u32 {
    parameters.directions.bitmaps[0]
}
