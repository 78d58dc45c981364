//! What sums: the slots of a switch, or the server of ATP, behind one set of questions.

use std::io;
use std::net::SocketAddr;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use fanin_protocol::Reason;
use fanin_protocol::atp::{AtpServerEvent, Hashing, ServerJob};
use fanin_protocol::control::{Admission, Protocol};
use fanin_udp::{AtpServerDriver, IoStatistics, SwitchConfig, SwitchDriver};
use fanin_wire::{AbortReason, JobId};

use crate::convert::atp_job;

/// A data path of either protocol.
#[derive(Debug)]
pub(super) enum DataPath {
    SwitchMl(SwitchDriver),
    Atp(AtpServerDriver),
}

/// How far a job is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Progress {
    /// Slots, or ATP's fragments, that gather contributions now.
    pub in_use: u32,
    /// For each rank, how many of them wait for it.
    pub waiting_for: Vec<u32>,
    /// For each rank, how much later than the first its contributions came; ATP, whose switches mix them, does not know.
    pub lateness: Vec<Duration>,
    /// Sums completed.
    pub completed: u64,
    /// Contributions that came again.
    pub retransmitted: u64,
    /// ATP: packets that the server had to add up itself.
    pub aggregations: u64,
    /// ATP: fragments that found an aggregator taken.
    pub collisions: u64,
}

/// Packets received, by what became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Packets {
    pub absorb: u64,
    pub multicast: u64,
    pub reply_unicast: u64,
    pub dropped: [u64; Reason::ALL.len()],
}

/// Takes the next job that the data path ended, and why.
pub(super) type Ended = Box<dyn FnMut() -> Option<(JobId, AbortReason)> + Send>;

impl DataPath {
    pub fn bind(listen: SocketAddr, protocol: Protocol, shards: usize) -> io::Result<Self> {
        match protocol {
            Protocol::SwitchMl => SwitchDriver::bind(SwitchConfig { listen, shards }).map(Self::SwitchMl),
            Protocol::Atp => AtpServerDriver::bind(listen).map(Self::Atp),
        }
    }

    pub const fn local_addr(&self) -> SocketAddr {
        match self {
            Self::SwitchMl(driver) => driver.local_addr(),
            Self::Atp(driver) => driver.local_addr(),
        }
    }

    pub const fn shards(&self) -> usize {
        match self {
            Self::SwitchMl(driver) => driver.shards(),
            Self::Atp(_) => 1,
        }
    }

    pub const fn receive_buffer_bytes(&self) -> usize {
        match self {
            Self::SwitchMl(driver) => driver.receive_buffer_bytes(),
            Self::Atp(driver) => driver.receive_buffer_bytes(),
        }
    }

    /// The first call gets what happens; later ones nothing.
    pub fn ended(&self) -> Ended {
        match self {
            Self::SwitchMl(driver) => next_of(driver.events(), |event| event),
            Self::Atp(driver) => next_of(driver.events(), |event| match event {
                AtpServerEvent::Aborted { job, reason, .. } => (job, reason),
            }),
        }
    }

    /// Makes room for an admitted job.
    pub fn add_job(&self, admission: &Admission) -> io::Result<()> {
        match self {
            Self::SwitchMl(driver) => driver.add_job(admission.job_config()),
            Self::Atp(driver) => {
                let hierarchy = admission.hierarchy.as_ref().ok_or(io::ErrorKind::InvalidInput)?;
                let config = atp_job(
                    (admission.job, admission.generation),
                    admission.world_size,
                    (admission.slots, admission.elements),
                    hierarchy.aggregators,
                    Hashing::Hash,
                );
                driver.add_job(ServerJob {
                    config,
                    workers: hierarchy.directions.clone(),
                    level: hierarchy.levels,
                    restored: admission.resumed,
                })
            }
        }
    }

    pub fn remove_job(&self, job: JobId) {
        match self {
            Self::SwitchMl(driver) => driver.remove_job(job),
            Self::Atp(driver) => driver.remove_job(job),
        }
    }

    pub fn abort_job(&self, job: JobId, reason: AbortReason) {
        match self {
            Self::SwitchMl(driver) => driver.abort_job(job, reason),
            Self::Atp(driver) => driver.abort_job(job, reason),
        }
    }

    pub fn progress(&self, job: JobId) -> Option<Progress> {
        Some(match self {
            Self::SwitchMl(driver) => {
                let progress = driver.progress(job)?;
                Progress {
                    in_use: progress.slots_in_use,
                    waiting_for: progress.waiting_for.to_vec(),
                    lateness: progress.lateness.to_vec(),
                    completed: progress.completed,
                    retransmitted: progress.retransmitted,
                    ..Progress::default()
                }
            }
            Self::Atp(driver) => {
                let progress = driver.progress(job)?;
                let waiting = driver.waiting(job)?;
                Progress {
                    in_use: waiting.fragments,
                    waiting_for: waiting.ranks,
                    completed: progress.completed,
                    retransmitted: progress.duplicates,
                    aggregations: progress.aggregations,
                    collisions: progress.collisions,
                    ..Progress::default()
                }
            }
        })
    }

    pub fn packets(&self) -> Packets {
        match self {
            Self::SwitchMl(driver) => {
                let statistics = driver.statistics();
                Packets {
                    absorb: statistics.absorb,
                    multicast: statistics.multicast,
                    reply_unicast: statistics.reply_unicast,
                    dropped: statistics.dropped,
                }
            }
            Self::Atp(driver) => {
                let statistics = driver.statistics();
                Packets {
                    absorb: statistics.absorb,
                    multicast: statistics.multicast,
                    reply_unicast: statistics.reply_unicast,
                    dropped: statistics.dropped,
                }
            }
        }
    }

    pub fn io_statistics(&self) -> IoStatistics {
        match self {
            Self::SwitchMl(driver) => driver.io_statistics(),
            Self::Atp(driver) => driver.io_statistics(),
        }
    }
}

fn next_of<E: Send + 'static>(
    events: Option<Receiver<E>>,
    read: impl Fn(E) -> (JobId, AbortReason) + Send + 'static,
) -> Ended {
    Box::new(move || events.as_ref()?.try_recv().ok().map(&read))
}
