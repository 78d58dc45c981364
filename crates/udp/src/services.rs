//! The machines that sum, on real sockets: the root of SwitchML's and DLCP's jobs, SwitchML's rack, the switches and servers of ATP and GOAT.

use crate::failure::invalid;
use crate::host::{Host, HostShard, stopped};
use crate::ports::Ports;
use crate::root::Root;
use crate::socket::check_shards;
use crate::train_socket::Peer;
use crate::{IoStatistics, Offload};
use fanin_protocol::atp::{AtpServer, AtpSwitch, AtpSwitchConfig, SwitchRoute};
use fanin_protocol::goat::{GoatRoute, GoatServer, GoatSwitch, GoatSwitchConfig};
use fanin_protocol::switchml::{Switch, SwitchJob, Upstream};
use fanin_protocol::{Endpoint, JobProgress, Reason, Received, Summer};
use fanin_wire::{AbortReason, JobId, ShardId};
use std::io;
use std::net::{IpAddr, SocketAddr};

/// A running switch of SwitchML, the root or a rack.
pub type SwitchDriver = Host<Switch<Peer>>;
/// A running root: a switch of SwitchML that sums jobs with a loss bound, too.
pub type RootDriver = Host<Root>;
/// A running server of ATP.
pub type AtpServerDriver = Host<AtpServer<Peer>>;
/// A running switch of ATP.
pub type AtpSwitchDriver = Host<AtpSwitch<Peer>>;
/// A running server of GOAT.
pub type GoatServerDriver = Host<GoatServer<Peer>>;
/// A running switch of GOAT.
pub type GoatSwitchDriver = Host<GoatSwitch<Peer>>;

/// Where a switch listens, and on how many cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchConfig {
    /// Address and UDP port; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Shards, 1 to [`crate::SHARDS_MAX`]: each a thread with a socket and slots of its own.
    pub shards: usize,
}

impl SwitchDriver {
    /// Binds the sockets and starts the threads. The switch serves no job yet.
    ///
    /// # Errors
    /// When the address cannot be bound, another switch has it, or the kernel cannot steer packets to several shards.
    pub fn bind(config: SwitchConfig) -> io::Result<Self> {
        Self::bind_with_offload(config, Offload::Detect)
    }

    /// As [`Self::bind`], saying whether the kernel may cut and join trains.
    ///
    /// # Errors
    /// As [`Self::bind`].
    pub fn bind_with_offload(config: SwitchConfig, offload: Offload) -> io::Result<Self> {
        check_shards(config.shards)?;
        let machines = (0u8..).map(ShardId).map(Switch::new).take(config.shards);
        Self::start(config.listen, "fanin-switch", machines, offload)
    }
}

impl SwitchDriver {
    /// Takes in a job that it sums for its upstream, as a rack. When this returns its packets are answered. A job of the same id is
    /// forgotten.
    ///
    /// # Errors
    /// When the switch refuses the job, cannot send to its upstream, or has stopped.
    pub fn add_rack(&self, job: SwitchJob<SocketAddr>) -> io::Result<()> {
        let SwitchJob { config, contributions, upstream } = job;
        let above = upstream.map(|Upstream { address, .. }| address.ip());
        let upstream = upstream.map(|Upstream { address, place }| {
            let address = self.peer(address)?;
            Ok::<_, io::Error>(Upstream { address, place })
        });
        self.add_job(SwitchJob { config, contributions, upstream: upstream.transpose()? })?;
        self.register(config.id, above);
        Ok(())
    }
}

impl RootDriver {
    /// Binds the sockets and starts the threads. The root serves no job yet.
    ///
    /// # Errors
    /// As [`SwitchDriver::bind`].
    pub fn bind(config: SwitchConfig) -> io::Result<Self> {
        Self::bind_with_offload(config, Offload::Detect)
    }

    /// As [`Self::bind`], saying whether the kernel may cut and join trains.
    ///
    /// # Errors
    /// As [`Self::bind`].
    pub fn bind_with_offload(config: SwitchConfig, offload: Offload) -> io::Result<Self> {
        check_shards(config.shards)?;
        let machines = (0u8..).map(ShardId).map(Root::new).take(config.shards);
        Self::start(config.listen, "fanin-switch", machines, offload)
    }
}

impl AtpServerDriver {
    /// Binds the socket and starts the thread. The server has no job yet.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn bind(listen: SocketAddr) -> io::Result<Self> {
        Self::start(listen, "fanin-atp-server", [AtpServer::new()], Offload::Detect)
    }
}

impl AtpSwitchDriver {
    /// Binds the socket and starts the thread. The switch serves no job yet.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn bind(listen: SocketAddr, config: AtpSwitchConfig) -> io::Result<Self> {
        Self::start(listen, "fanin-atp-switch", [AtpSwitch::new(config)], Offload::Detect)
    }

    /// Lets a job through. When this returns its packets are taken. A job of the same id is forgotten.
    ///
    /// # Errors
    /// When the switch can serve no such job, cannot send to its upstream, or has stopped.
    pub fn add_route(&self, route: SwitchRoute<SocketAddr>) -> io::Result<()> {
        let above = route.upstream.ip();
        let upstream = self.peer(route.upstream)?;
        let SwitchRoute { id, key, generation, level, .. } = route;
        self.add_job(SwitchRoute { id, key, generation, upstream, level })?;
        self.register(id, [above]);
        Ok(())
    }
}

impl GoatServerDriver {
    /// Binds the socket and starts the thread. The server has no job yet.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn bind(listen: SocketAddr) -> io::Result<Self> {
        Self::start(listen, "fanin-goat-server", [GoatServer::new()], Offload::Detect)
    }
}

impl GoatSwitchDriver {
    /// Binds the socket and starts the thread. The switch serves no job yet.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn bind(listen: SocketAddr, config: GoatSwitchConfig) -> io::Result<Self> {
        Self::start(listen, "fanin-goat-switch", [GoatSwitch::new(config)], Offload::Detect)
    }

    /// Takes a job's plan. When this returns its packets are taken, and those of an older plan are not. A job of the same id is forgotten.
    ///
    /// # Errors
    /// When the switch can serve no such job, cannot send to one of its neighbours, or has stopped.
    pub fn add_route(&self, route: GoatRoute<SocketAddr>) -> io::Result<()> {
        let (job, above) = (route.id, route.upstream.ip());
        let neighbours = route.below.iter().map(SocketAddr::ip).collect::<Vec<_>>();
        let upstream = self.peer(route.upstream)?;
        let next_hops = route.next_hops.into_iter().map(|(node, hop)| Ok((node, self.peer(hop)?)));
        let below = route.below.into_iter().map(|child| self.peer(child));
        self.add_job(GoatRoute {
            upstream,
            next_hops: next_hops.collect::<io::Result<_>>()?,
            below: below.collect::<io::Result<_>>()?,
            id: route.id,
            key: route.key,
            generation: route.generation,
            node: route.node,
            own: route.own,
            sub_models: route.sub_models,
            sums: route.sums,
            window_max: route.window_max,
            aggregators: route.aggregators,
        })?;
        self.register(job, neighbours.into_iter().chain([above]));
        Ok(())
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
