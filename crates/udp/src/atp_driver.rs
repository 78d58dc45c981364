//! ATP's switch and server on real sockets, each a thread.

use crate::IoStatistics;
use crate::host::Host;
use crate::train_socket::Peer;
use fanin_protocol::atp::{
    AtpServer, AtpServerEvent, AtpServerProgress, AtpServerStatistics, AtpServerWaiting, AtpSwitch,
    AtpSwitchConfig, AtpSwitchEvent, AtpSwitchProgress, AtpSwitchStatistics, ServerJob, SwitchRoute,
};
use fanin_wire::{AbortReason, JobId};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::Receiver;

/// A running ATP switch. Dropping it stops and joins its thread.
#[derive(Debug)]
pub struct AtpSwitchDriver(Host<AtpSwitch<Peer>>);

/// A running ATP server. Dropping it stops and joins its thread; its workers are not told (see [`Self::abort_job`]).
#[derive(Debug)]
pub struct AtpServerDriver(Host<AtpServer<Peer>>);

impl AtpSwitchDriver {
    /// Binds the socket and starts the thread. The switch serves no job yet.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn bind(listen: SocketAddr, config: AtpSwitchConfig) -> io::Result<Self> {
        Host::bind(listen, "fanin-atp-switch", AtpSwitch::new(config)).map(Self)
    }

    /// Where it listens.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.0.local_addr()
    }

    /// Lets a job through. When this returns its packets are taken. A job of the same id is forgotten.
    ///
    /// # Errors
    /// When the switch can serve no such job, cannot send to its upstream, or has stopped.
    pub fn add_job(&self, route: SwitchRoute<SocketAddr>) -> io::Result<()> {
        let upstream = Peer::from(reachable(self.local_addr(), route.upstream)?);
        let SwitchRoute { id, generation, level, .. } = route;
        let route = SwitchRoute { id, generation, upstream, level };
        self.0.ask(move |machine, _| machine.add_job(route)).ok_or_else(stopped)?.map_err(invalid)
    }

    /// Forgets a job. When this returns its packets are unknown.
    pub fn remove_job(&self, job: JobId) {
        self.0.ask(move |machine, _| machine.remove_job(job));
    }

    /// How far a job is here; `None` when there is no such job.
    #[must_use]
    pub fn progress(&self, job: JobId) -> Option<AtpSwitchProgress> {
        self.0.ask(move |machine, _| machine.progress(job)).flatten()
    }

    /// Packets by verdict, and what became of the aggregators.
    #[must_use]
    pub fn statistics(&self) -> AtpSwitchStatistics {
        self.0.ask(|machine, _| machine.statistics()).unwrap_or_default()
    }

    /// System calls and what became of them.
    #[must_use]
    pub fn io_statistics(&self) -> IoStatistics {
        self.0.ask(|_, io| io).unwrap_or_default()
    }

    /// Jobs that the server ended. The first call takes the receiver.
    #[must_use]
    pub fn events(&self) -> Option<Receiver<AtpSwitchEvent>> {
        self.0.events()
    }
}

impl AtpServerDriver {
    /// Binds the socket and starts the thread. The server has no job yet.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn bind(listen: SocketAddr) -> io::Result<Self> {
        Host::bind(listen, "fanin-atp-server", AtpServer::new()).map(Self)
    }

    /// Where it listens.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.0.local_addr()
    }

    /// Receive buffer that the kernel granted, in bytes. What comes from all children at once must fit.
    #[must_use]
    pub const fn receive_buffer_bytes(&self) -> usize {
        self.0.receive_buffer_bytes()
    }

    /// Takes a job in. When this returns its packets are answered.
    ///
    /// # Errors
    /// When a number of `config` is outside its limit, the directions do not add up, or the server has stopped.
    pub fn add_job(&self, job: ServerJob) -> io::Result<()> {
        self.0.ask(move |machine, _| machine.add_job(job)).ok_or_else(stopped)?.map_err(invalid)
    }

    /// Forgets a job. When this returns its packets are unknown.
    pub fn remove_job(&self, job: JobId) {
        self.0.ask(move |machine, _| machine.remove_job(job));
    }

    /// Tells the job's workers, now and whenever they send again, that it cannot go on.
    pub fn abort_job(&self, job: JobId, reason: AbortReason) {
        self.0.ask(move |machine, _| machine.abort_job(job, reason));
    }

    /// How far a job is; `None` when there is no such job.
    #[must_use]
    pub fn progress(&self, job: JobId) -> Option<AtpServerProgress> {
        self.0.ask(move |machine, _| machine.progress(job)).flatten()
    }

    /// Whom a job waits for; `None` when there is no such job.
    #[must_use]
    pub fn waiting(&self, job: JobId) -> Option<AtpServerWaiting> {
        self.0.ask(move |machine, _| machine.waiting(job)).flatten()
    }

    /// Packets by verdict.
    #[must_use]
    pub fn statistics(&self) -> AtpServerStatistics {
        self.0.ask(|machine, _| machine.statistics()).unwrap_or_default()
    }

    /// System calls and what became of them.
    #[must_use]
    pub fn io_statistics(&self) -> IoStatistics {
        self.0.ask(|_, io| io).unwrap_or_default()
    }

    /// Jobs that the data path ended, and why. The first call takes the receiver.
    #[must_use]
    pub fn events(&self) -> Option<Receiver<AtpServerEvent>> {
        self.0.events()
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
            Err(io::Error::new(io::ErrorKind::InvalidInput, message))
        }
        _ => Ok(upstream),
    }
}

fn stopped() -> io::Error {
    io::Error::other("the data path has stopped")
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
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
