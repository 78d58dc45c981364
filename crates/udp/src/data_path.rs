//! The machines that sum, on real sockets, behind one set of questions, whatever their protocol.

use crate::failure::invalid;
use crate::host::{Host, HostShard, stopped};
use crate::ports::Ports;
use crate::train_socket::Peer;
use crate::{HostThreads, IoStatistics, ThreadEnded};
use fanin_protocol::{
    Endpoint, JobAborted, JobIdentity, JobProgress, Reason, Received, Summer, TableStatistics,
};
use fanin_wire::{AbortReason, JobId};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::Receiver;

/// A job as one machine that sums is told of it.
#[derive(Clone, Copy, Debug)]
pub struct Seat<'a> {
    /// The job.
    pub job: JobIdentity,
    /// Its protocol, by name.
    pub protocol: &'a str,
    /// What the protocol tells this machine.
    pub part: &'a [u8],
    /// The next machine towards the root, of a switch on the way.
    pub upstream: Option<SocketAddr>,
}

/// How a data path fares, at one time.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// Packets by verdict.
    pub received: Received,
    /// System calls and what became of them.
    pub io: IoStatistics,
    /// How its aggregators are, where it has some.
    pub table: Option<TableStatistics>,
    /// The jobs that were asked for, but for those that it does not know.
    pub jobs: BTreeMap<JobId, JobProgress>,
}

impl Figures {
    /// Aggregators or slots that gather now.
    #[must_use]
    pub fn in_use(&self) -> u32 {
        let slots = || self.jobs.values().map(|progress| progress.in_use).sum();
        self.table.map_or_else(slots, |table| table.in_use)
    }
}

/// The host of a machine that sums. Calls are by job or by figure, never by packet.
pub trait DataPath: fmt::Debug + Send + Sync {
    /// Where it listens.
    fn local_addr(&self) -> SocketAddr;
    /// Its threads, each with a socket.
    fn shards(&self) -> usize;
    /// Receive buffer that the kernel granted each shard, in bytes.
    fn receive_buffer_bytes(&self) -> usize;
    /// What its machines tell. The first call takes the receiver.
    fn events(&self) -> Option<Receiver<JobAborted>>;
    /// Makes room for a job. When this returns its packets are taken.
    ///
    /// # Errors
    /// When the machine refuses the job, cannot send to whom it must, or has stopped.
    fn add_job(&self, seat: &Seat<'_>) -> io::Result<()>;
    /// Has a job's packets taken from these hosts of its members, too.
    fn register(&self, job: JobId, hosts: &[IpAddr]);
    /// Forgets a job.
    fn remove_job(&self, job: JobId);
    /// Tells a job's workers, now and whenever they send again, that it cannot go on.
    fn abort_job(&self, job: JobId, reason: AbortReason);
    /// How everything is, and these jobs.
    fn figures(&self, jobs: &[JobId]) -> Figures;
    /// Whether all its threads live.
    ///
    /// # Errors
    /// The first that has ended, though nobody stopped it.
    fn health(&self) -> Result<(), ThreadEnded>;
    /// Its threads, for workers of this process.
    fn threads(&self) -> HostThreads;
    /// Has this done on its threads: for tests of what happens when they are busy, or end.
    #[doc(hidden)]
    fn occupy(&self, with: std::sync::Arc<dyn Fn() + Send + Sync>);
}

/// What a host's machine does in the tree of machines, and how it reads what it is told of a job.
pub(crate) trait Role: Send + Sync + 'static {
    type Machine: Summer<Address = Peer, Job: Send + 'static, Error: Send + Sync + 'static> + Send + 'static;

    fn job(
        &self,
        seat: &Seat<'_>,
        peers: &dyn Fn(SocketAddr) -> Result<Peer, String>,
    ) -> Result<<Self::Machine as Summer>::Job, String>;
}

/// A host with its role.
pub(crate) struct InRole<R: Role> {
    pub(crate) host: Host<R::Machine>,
    pub(crate) role: R,
}

impl<R: Role> fmt::Debug for InRole<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.host.fmt(f)
    }
}

impl<R: Role> DataPath for InRole<R> {
    fn local_addr(&self) -> SocketAddr {
        self.host.local_addr()
    }

    fn shards(&self) -> usize {
        self.host.shards()
    }

    fn receive_buffer_bytes(&self) -> usize {
        self.host.receive_buffer_bytes()
    }

    fn events(&self) -> Option<Receiver<JobAborted>> {
        self.host.events()
    }

    fn add_job(&self, seat: &Seat<'_>) -> io::Result<()> {
        let named = RefCell::new(Vec::new());
        let peers = |address: SocketAddr| {
            named.borrow_mut().push(address.ip());
            self.host.peer(address).map_err(|error| error.to_string())
        };
        self.host.add_job(self.role.job(seat, &peers).map_err(invalid)?)?;
        // Whom a switch on the way is told of sends to it: its upstream, and the switches below it.
        if seat.upstream.is_some() {
            self.host.register(seat.job.id, named.into_inner());
        }
        Ok(())
    }

    fn register(&self, job: JobId, hosts: &[IpAddr]) {
        self.host.register(job, hosts.iter().copied());
    }

    fn remove_job(&self, job: JobId) {
        self.host.remove_job(job);
    }

    fn abort_job(&self, job: JobId, reason: AbortReason) {
        self.host.abort_job(job, reason);
    }

    fn figures(&self, jobs: &[JobId]) -> Figures {
        let progress = |job: &JobId| Some((*job, self.host.job_progress(*job)?));
        let tables = self.host.ask_all(|machine, _| machine.table()).into_iter().flatten().flatten();
        Figures {
            received: self.host.received(),
            io: self.host.io_statistics(),
            table: tables.reduce(|mut sum, shard| {
                sum += shard;
                sum
            }),
            jobs: jobs.iter().filter_map(progress).collect(),
        }
    }

    fn health(&self) -> Result<(), ThreadEnded> {
        self.host.health()
    }

    fn threads(&self) -> HostThreads {
        self.host.threads()
    }

    fn occupy(&self, with: std::sync::Arc<dyn Fn() + Send + Sync>) {
        self.host.ask_all(move |_, _| with());
    }
}

impl<M> Host<M>
where
    M: Endpoint<Address = Peer, Event: Send + 'static> + Send + 'static,
{
    /// Somebody's address as packets from there have it.
    ///
    /// # Errors
    /// When the host's sockets cannot send there.
    pub fn peer(&self, address: SocketAddr) -> io::Result<Peer> {
        reachable(self.local_addr(), address).map(Peer::from)
    }
}

/// What any machine that sums is asked, over all its shards.
impl<M> Host<M>
where
    M: Summer<Address = Peer, Job: Send + 'static, Error: Send + Sync + 'static> + Send + 'static,
{
    /// Takes a job in, in every shard. When this returns its packets are answered. A job of the same id is forgotten.
    ///
    /// # Errors
    /// When the machine refuses the job, or has stopped.
    pub fn add_job(&self, job: M::Job) -> io::Result<()> {
        let added = self.ask_shards(move |shard, ports| {
            let (id, key) = M::identity(&job);
            shard.machine.add_job(job.clone()).inspect(|()| ports.seals.add(id, key))
        });
        for added in added {
            added.ok_or_else(stopped)?.map_err(invalid)?;
        }
        Ok(())
    }

    /// Members of a job that is here send from these hosts. When this returns its packets are taken from there, and from where was registered
    /// before; until the first time they are from anywhere.
    pub fn register(&self, job: JobId, hosts: impl IntoIterator<Item = IpAddr>) {
        let hosts = Vec::from_iter(hosts);
        self.ask_shards(move |shard, _| {
            // It may be over by now.
            if shard.machine.job_progress(job).is_some() {
                hosts.iter().for_each(|host| shard.registered.register(job, *host));
            }
        });
    }

    /// Forgets a job, in every shard. When this returns its packets are unknown.
    pub fn remove_job(&self, job: JobId) {
        self.ask_shards(move |shard, ports| {
            shard.machine.remove_job(job);
            shard.registered.forget(job);
            ports.seals.forget(job);
        });
    }

    /// Tells the job's workers, now and whenever they send again, that it cannot go on.
    pub fn abort_job(&self, job: JobId, reason: AbortReason) {
        self.ask_all(move |machine, _| machine.abort_job(job, reason));
    }

    /// How far a job is; `None` when there is no such job.
    #[must_use]
    pub fn job_progress(&self, job: JobId) -> Option<JobProgress> {
        let shards = self.ask_all(move |machine, _| machine.job_progress(job)).into_iter();
        shards.flatten().flatten().reduce(|mut sum, shard| {
            sum += shard;
            sum
        })
    }

    /// Packets by verdict.
    #[must_use]
    pub fn received(&self) -> Received {
        let mut sum = Received::default();
        let received = |shard: &mut HostShard<M>, ports: &mut Ports| {
            let mut received = shard.machine.received();
            received.packets += shard.registered.foreign + ports.seals.forged;
            received.dropped[Reason::Foreign as usize] += shard.registered.foreign;
            received.dropped[Reason::Forged as usize] += ports.seals.forged;
            received
        };
        self.ask_shards(received).into_iter().flatten().for_each(|shard| sum += shard);
        sum
    }

    /// System calls and what became of them.
    #[must_use]
    pub fn io_statistics(&self) -> IoStatistics {
        let mut sum = IoStatistics::default();
        self.ask_all(|_, io| io).into_iter().flatten().for_each(|shard| sum += shard);
        sum
    }
}

/// `upstream` as a socket that is bound to `local` names it.
fn reachable(local: SocketAddr, upstream: SocketAddr) -> io::Result<SocketAddr> {
    match (local, upstream.ip()) {
        (SocketAddr::V6(_), IpAddr::V4(ip)) => {
            Ok(SocketAddr::new(ip.to_ipv6_mapped().into(), upstream.port()))
        }
        (SocketAddr::V4(_), IpAddr::V6(_)) => {
            let message = format!("listening on {local}, which is IPv4, it cannot send to {upstream}");
            Err(invalid(message))
        }
        _ => Ok(upstream),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upstream_is_named_in_the_family_of_the_socket() {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        let (v4, v6) = (address("10.0.0.9:4800"), address("[fd00::9]:4800"));
        let name = |local, upstream| reachable(local, upstream).ok();
        assert_eq!(name(address("0.0.0.0:1"), v4), Some(v4));
        assert_eq!(name(address("[::]:1"), v6), Some(v6));
        assert_eq!(name(address("[::]:1"), v4), Some(address("[::ffff:10.0.0.9]:4800")));
        assert_eq!(name(address("0.0.0.0:1"), v6), None);
    }
}
