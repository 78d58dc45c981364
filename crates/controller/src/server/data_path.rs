//! What sums: the root of SwitchML's and DLCP's jobs, or the server of ATP or GOAT, behind one set of questions.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use fanin_protocol::atp::{Hashing, ServerJob};
use fanin_protocol::control::Protocol;
use fanin_protocol::dlcp;
use fanin_protocol::goat::GoatServerJob;
use fanin_protocol::{JobAborted, JobProgress, Received, Summer};
use fanin_udp::{
    AtpServerDriver, GoatServerDriver, Host, HostThreads, IoStatistics, Peer, RootDriver, RootJob,
    SwitchConfig, ThreadEnded,
};
use fanin_wire::{AbortReason, JobId};
use tonic::Status;

use super::jobs::Agreed;
use crate::convert::atp_job;

/// The host of a machine that sums, whatever the protocol. See [`Host`].
pub(super) trait DataPath: std::fmt::Debug + Send + Sync {
    fn local_addr(&self) -> SocketAddr;
    fn shards(&self) -> usize;
    fn receive_buffer_bytes(&self) -> usize;
    fn events(&self) -> Option<Receiver<JobAborted>>;
    /// Makes room for an admitted job.
    fn add_job(&self, agreed: &Agreed) -> io::Result<()>;
    /// Has a job's packets taken from these hosts of its members, too.
    fn register(&self, job: JobId, hosts: &[IpAddr]);
    fn remove_job(&self, job: JobId);
    fn abort_job(&self, job: JobId, reason: AbortReason);
    /// How everything is, and these jobs.
    fn figures(&self, jobs: &[JobId]) -> Figures;
    fn health(&self) -> Result<(), ThreadEnded>;
    fn threads(&self) -> HostThreads;
}

/// What a rank hears of a data path that moves no packets, instead of waiting for its sums.
pub(super) fn unhealthy(ended: &ThreadEnded) -> Status {
    Status::internal(ended.to_string())
}

/// How a data path fares, at one time.
#[derive(Clone, Debug, Default)]
pub(super) struct Figures {
    pub received: Received,
    pub io: IoStatistics,
    /// Not of those that it does not know.
    pub jobs: BTreeMap<JobId, JobProgress>,
}

/// Binds the data path of a protocol.
pub(super) fn bind(listen: SocketAddr, protocol: Protocol, shards: usize) -> io::Result<Arc<dyn DataPath>> {
    Ok(match protocol {
        Protocol::SwitchMl => Arc::new(RootDriver::bind(SwitchConfig { listen, shards })?),
        Protocol::Atp => Arc::new(AtpServerDriver::bind(listen)?),
        Protocol::Goat => Arc::new(GoatServerDriver::bind(listen)?),
    })
}

/// How a host names whom it sends to before they send.
type Names<'a> = &'a dyn Fn(SocketAddr) -> io::Result<Peer>;

/// A job as its machine is told of it.
trait Admitted: Sized {
    fn of(agreed: &Agreed, peer: Names<'_>) -> io::Result<Self>;
}

impl Admitted for RootJob {
    fn of(Agreed { admission, .. }: &Agreed, _: Names<'_>) -> io::Result<Self> {
        Ok(match admission.flow_config() {
            // Who sends faster than this machine's link is held back by its kernel.
            Some(config) => {
                Self::Flows(dlcp::ServerJob { link_rate_bps: u64::MAX, ..dlcp::ServerJob::from(config) })
            }
            None => Self::Slots(admission.root_job()),
        })
    }
}

impl Admitted for ServerJob {
    fn of(Agreed { admission, .. }: &Agreed, _: Names<'_>) -> io::Result<Self> {
        let hierarchy = admission.hierarchy.as_ref().ok_or(io::ErrorKind::InvalidInput)?;
        let config = atp_job(
            (admission.job, admission.key, admission.generation),
            admission.world_size,
            (admission.in_flight, admission.elements),
            hierarchy.aggregators,
            Hashing::Hash,
        );
        Ok(Self {
            config,
            workers: hierarchy.directions.clone(),
            level: hierarchy.levels,
            restored: admission.resumed,
        })
    }
}

impl Admitted for GoatServerJob<Peer> {
    fn of(agreed: &Agreed, peer: Names<'_>) -> io::Result<Self> {
        agreed.plan.as_ref().ok_or(io::ErrorKind::InvalidInput)?.server_job(peer)
    }
}

impl<M> DataPath for Host<M>
where
    M: Summer<Address = Peer, Job: Admitted + Send + 'static, Error: Send + Sync + 'static> + Send + 'static,
{
    fn local_addr(&self) -> SocketAddr {
        Self::local_addr(self)
    }

    fn shards(&self) -> usize {
        Self::shards(self)
    }

    fn receive_buffer_bytes(&self) -> usize {
        Self::receive_buffer_bytes(self)
    }

    fn events(&self) -> Option<Receiver<JobAborted>> {
        Self::events(self)
    }

    fn add_job(&self, agreed: &Agreed) -> io::Result<()> {
        Self::add_job(self, M::Job::of(agreed, &|address| self.peer(address))?)
    }

    fn register(&self, job: JobId, hosts: &[IpAddr]) {
        Self::register(self, job, hosts.iter().copied());
    }

    fn remove_job(&self, job: JobId) {
        Self::remove_job(self, job);
    }

    fn abort_job(&self, job: JobId, reason: AbortReason) {
        Self::abort_job(self, job, reason);
    }

    fn figures(&self, jobs: &[JobId]) -> Figures {
        let progress = |job: &JobId| Some((*job, Self::job_progress(self, *job)?));
        Figures {
            received: Self::received(self),
            io: Self::io_statistics(self),
            jobs: jobs.iter().filter_map(progress).collect(),
        }
    }

    fn health(&self) -> Result<(), ThreadEnded> {
        Self::health(self)
    }

    fn threads(&self) -> HostThreads {
        Self::threads(self)
    }
}
