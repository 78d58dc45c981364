//! What sums on the way to the root: aggregators of ATP or GOAT, or a rack's slots, behind one set of questions.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::Receiver;

use fanin_protocol::atp::{AtpSwitch, AtpSwitchStatistics};
use fanin_protocol::goat::GoatSwitch;
use fanin_protocol::switchml::Switch;
use fanin_protocol::{JobAborted, JobProgress, Received, Summer};
use fanin_udp::{Host, IoStatistics, Peer, ThreadEnded};
use fanin_wire::JobId;

use super::routes::Route;

/// The host of a machine on the way, whatever the protocol.
pub(super) trait OnTheWay: std::fmt::Debug + Send + Sync {
    fn local_addr(&self) -> SocketAddr;
    fn receive_buffer_bytes(&self) -> usize;
    fn events(&self) -> Option<Receiver<JobAborted>>;
    /// Lets the packets of a job through. When this returns they are taken.
    fn add(&self, job: JobId, route: &Route) -> io::Result<()>;
    /// Has a job's packets taken from these hosts of who is below, too.
    fn register(&self, job: JobId, hosts: &[IpAddr]);
    fn remove_job(&self, job: JobId);
    /// How everything is, and these jobs.
    fn figures(&self, names: Vec<(JobId, String)>) -> Figures;
    fn health(&self) -> Result<(), ThreadEnded>;
    /// Has this done on its threads.
    #[cfg(test)]
    fn occupy(&self, with: std::sync::Arc<dyn Fn() + Send + Sync>);
}

/// How a data path fares, at one time.
#[derive(Debug)]
pub(super) struct Figures {
    pub received: Received,
    /// Of the aggregators of ATP or GOAT; zeros when their thread has ended.
    pub aggregators: Option<AtpSwitchStatistics>,
    pub io: IoStatistics,
    /// By id, each with its name.
    pub jobs: Vec<(JobId, String, JobProgress)>,
}

impl Figures {
    /// Aggregators or slots that gather now.
    pub fn in_use(&self) -> u32 {
        let slots = || self.jobs.iter().map(|(_, _, progress)| progress.in_use).sum();
        self.aggregators.map_or_else(slots, |aggregators| aggregators.in_use)
    }
}

/// What a machine on the way has of its protocol's own.
trait Machine:
    Summer<Address = Peer, Job: Send + 'static, Error: Send + Sync + 'static> + Send + Sized + 'static
{
    fn add(host: &Host<Self>, job: JobId, route: &Route) -> io::Result<()>;
    /// How its aggregators are, of a protocol that has some.
    fn aggregators(host: &Host<Self>) -> Option<AtpSwitchStatistics>;
}

impl Machine for AtpSwitch<Peer> {
    fn add(host: &Host<Self>, job: JobId, route: &Route) -> io::Result<()> {
        host.add_route(route.switch_route(job).ok_or(io::ErrorKind::InvalidInput)?)
    }

    fn aggregators(host: &Host<Self>) -> Option<AtpSwitchStatistics> {
        Some(first(host.ask_all(|machine, _| machine.statistics())))
    }
}

impl Machine for GoatSwitch<Peer> {
    fn add(host: &Host<Self>, _: JobId, route: &Route) -> io::Result<()> {
        host.add_route(route.planned().ok_or(io::ErrorKind::InvalidInput)?)
    }

    fn aggregators(host: &Host<Self>) -> Option<AtpSwitchStatistics> {
        Some(first(host.ask_all(|machine: &mut Self, _| machine.statistics())))
    }
}

impl Machine for Switch<Peer> {
    fn add(host: &Host<Self>, _: JobId, route: &Route) -> io::Result<()> {
        host.add_rack(route.rack_job().ok_or(io::ErrorKind::InvalidInput)?)
    }

    fn aggregators(_: &Host<Self>) -> Option<AtpSwitchStatistics> {
        None
    }
}

/// What the one shard said; zeros where its thread has ended.
fn first<T: Default>(said: Vec<Option<T>>) -> T {
    said.into_iter().next().flatten().unwrap_or_default()
}

impl<M: Machine> OnTheWay for Host<M> {
    fn local_addr(&self) -> SocketAddr {
        Self::local_addr(self)
    }

    fn receive_buffer_bytes(&self) -> usize {
        Self::receive_buffer_bytes(self)
    }

    fn events(&self) -> Option<Receiver<JobAborted>> {
        Self::events(self)
    }

    fn add(&self, job: JobId, route: &Route) -> io::Result<()> {
        M::add(self, job, route)
    }

    fn register(&self, job: JobId, hosts: &[IpAddr]) {
        Self::register(self, job, hosts.iter().copied());
    }

    fn remove_job(&self, job: JobId) {
        Self::remove_job(self, job);
    }

    fn figures(&self, names: Vec<(JobId, String)>) -> Figures {
        let progress = |(job, name)| Some((job, name, self.job_progress(job)?));
        Figures {
            received: self.received(),
            aggregators: M::aggregators(self),
            io: self.io_statistics(),
            jobs: names.into_iter().filter_map(progress).collect(),
        }
    }

    fn health(&self) -> Result<(), ThreadEnded> {
        Self::health(self)
    }

    #[cfg(test)]
    fn occupy(&self, with: std::sync::Arc<dyn Fn() + Send + Sync>) {
        self.ask_all(move |_, _| with());
    }
}
