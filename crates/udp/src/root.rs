//! What sums at the root of a job: a switch's slots (SwitchML), or the flows of a job that has a loss bound (DLCP).
//!
//! Both live on one port, so that ranks need not know beforehand which of them their job will have. A packet says by its kind whose it is.

use crate::train_socket::Peer;
use fanin_protocol::dlcp::{self, Server, ServerJob};
use fanin_protocol::switchml::{self, Switch, SwitchJob};
use fanin_protocol::{Endpoint, Instant, JobAborted, JobProgress, Received, Summer, Transmit, Verdict};
use fanin_wire::{AbortReason, JobId, Key, Kind, Preamble, ShardId};

/// One shard of a root.
#[derive(Debug)]
pub struct Root {
    switch: Switch<Peer>,
    server: Server<Peer>,
}

/// A job as a root is told of it: all its shards alike.
#[derive(Clone, Debug, PartialEq)]
pub enum RootJob {
    /// In slots.
    Slots(SwitchJob<Peer>),
    /// In flows that may lose a bounded part.
    Flows(ServerJob),
}

/// Which number of a job is outside its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RootError {
    /// Of one in slots.
    Slots(switchml::ConfigError),
    /// Of one in flows.
    Flows(dlcp::ConfigError),
}

impl Root {
    pub(crate) fn new(shard: ShardId) -> Self {
        Self { switch: Switch::new(shard), server: Server::new(shard) }
    }
}

impl Endpoint for Root {
    type Address = Peer;
    type Event = JobAborted;

    fn handle_packet(&mut self, now: Instant, from: Peer, packet: &[u8]) -> Verdict {
        match Preamble::parse(packet) {
            Ok(Preamble { kind: Kind::Block | Kind::Signal, .. }) => {
                self.server.handle_packet(now, from, packet)
            }
            // What is none of ours is counted there, too.
            _ => self.switch.handle_packet(now, from, packet),
        }
    }

    fn handle_timeout(&mut self, now: Instant) {
        self.server.handle_timeout(now);
        self.switch.handle_timeout(now);
    }

    fn poll_transmit(&mut self, now: Instant, train: &mut [u8]) -> Option<Transmit<'_, Peer>> {
        match self.switch.poll_transmit(now, train) {
            None => self.server.poll_transmit(now, train),
            transmit => transmit,
        }
    }

    fn poll_event(&mut self) -> Option<JobAborted> {
        self.switch.poll_event().or_else(|| self.server.poll_event())
    }

    fn poll_timeout(&self) -> Option<Instant> {
        self.switch.poll_timeout().into_iter().chain(self.server.poll_timeout()).min()
    }
}

impl Summer for Root {
    type Job = RootJob;
    type Error = RootError;

    fn identity(job: &RootJob) -> (JobId, Key) {
        match job {
            RootJob::Slots(job) => Switch::<Peer>::identity(job),
            RootJob::Flows(job) => Server::<Peer>::identity(job),
        }
    }

    fn add_job(&mut self, job: RootJob) -> Result<(), RootError> {
        match job {
            RootJob::Slots(job) => self.switch.add_job(job).map_err(RootError::Slots),
            RootJob::Flows(job) => self.server.add_job(job).map_err(RootError::Flows),
        }
    }

    fn remove_job(&mut self, job: JobId) {
        self.switch.remove_job(job);
        self.server.remove_job(job);
    }

    fn abort_job(&mut self, job: JobId, reason: AbortReason) {
        self.switch.abort_job(job, reason);
        self.server.abort_job(job, reason);
    }

    fn job_progress(&self, job: JobId) -> Option<JobProgress> {
        self.switch.job_progress(job).or_else(|| self.server.job_progress(job))
    }

    fn received(&self) -> Received {
        let mut sum = self.switch.received();
        sum += self.server.received();
        sum
    }
}

impl core::fmt::Display for RootError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Slots(error) => error.fmt(f),
            Self::Flows(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for RootError {}
