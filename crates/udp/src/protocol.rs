//! A protocol on sockets: what rooms that know no protocol start its machines by.

use crate::data_path::{DataPath, InRole, Role, Seat};
use crate::host::Host;
use crate::membership::Membership;
use crate::part::Part;
use crate::socket::check_shards;
use crate::train_socket::Peer;
use fanin_protocol::control::{Malformed, Memory, Protocol};
use fanin_protocol::{Both, Either, JobIdentity, Machines, OwnChoices, Summer};
use fanin_wire::{Rank, ShardId};
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::sync::Arc;

/// A [`Protocol`] whose machines run on sockets: every one that has [`Machines`].
pub trait OnSockets: Protocol {
    /// A job as a rank was admitted to it.
    ///
    /// # Errors
    /// When the part is none of this protocol's.
    fn membership(
        &'static self,
        job: JobIdentity,
        rank: Rank,
        part: &[u8],
        own: OwnChoices,
    ) -> Result<Membership, Malformed>;

    /// The data path of a root, which serves no job yet.
    ///
    /// # Errors
    /// When the address cannot be bound, another process has it, or the kernel cannot steer packets to several shards.
    fn root(&self, listen: SocketAddr, shards: usize) -> io::Result<Arc<dyn DataPath>>;

    /// The data path of a switch on the way to the root, which serves no job yet.
    ///
    /// # Errors
    /// As [`Self::root`], and when the protocol has no such switch, or none with so much memory.
    fn relay(&self, listen: SocketAddr, memory: Memory) -> io::Result<Arc<dyn DataPath>>;
}

impl<P: Machines<Peer, Part>> OnSockets for P {
    fn membership(
        &'static self,
        job: JobIdentity,
        rank: Rank,
        part: &[u8],
        own: OwnChoices,
    ) -> Result<Membership, Malformed> {
        Ok(Membership::of(self, P::rank_terms(job, rank, part, own)?))
    }

    fn root(&self, listen: SocketAddr, shards: usize) -> io::Result<Arc<dyn DataPath>> {
        start(listen, shards, |shard| Ok(P::root(shard)), AtRoot::<P>(PhantomData))
    }

    fn relay(&self, listen: SocketAddr, memory: Memory) -> io::Result<Arc<dyn DataPath>> {
        let machine = |shard| P::relay(shard, &memory);
        start(listen, memory.shards.into(), machine, OnTheWay::<P>(memory, PhantomData))
    }
}

impl PartialEq for dyn OnSockets {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

/// The protocols whose jobs one service admits, the usual one first.
pub trait Serving: fmt::Debug + Send + Sync {
    /// Each of them.
    fn protocols(&self) -> Vec<&'static dyn OnSockets>;

    /// The data path of a root that sums the jobs of all of them on one port.
    ///
    /// # Errors
    /// As [`OnSockets::root`].
    fn root(&self, listen: SocketAddr, shards: usize) -> io::Result<Arc<dyn DataPath>>;
}

/// One protocol alone.
#[derive(Clone, Copy, Debug)]
pub struct Alone(pub &'static dyn OnSockets);

impl Serving for Alone {
    fn protocols(&self) -> Vec<&'static dyn OnSockets> {
        vec![self.0]
    }

    fn root(&self, listen: SocketAddr, shards: usize) -> io::Result<Arc<dyn DataPath>> {
        self.0.root(listen, shards)
    }
}

/// Two protocols on one port, so that ranks need not know beforehand which of them their job will have.
#[derive(Clone, Copy, Debug)]
pub struct Together<P: 'static, Q: 'static>(pub &'static P, pub &'static Q);

impl<P: Machines<Peer, Part>, Q: Machines<Peer, Part>> Serving for Together<P, Q> {
    fn protocols(&self) -> Vec<&'static dyn OnSockets> {
        vec![self.0, self.1]
    }

    fn root(&self, listen: SocketAddr, shards: usize) -> io::Result<Arc<dyn DataPath>> {
        let machine = |shard| Ok(Both::new(P::root(shard), Q::root(shard)));
        start(listen, shards, machine, Self(self.0, self.1))
    }
}

/// Binds a socket for each shard's machine, and starts their threads.
fn start<R: Role>(
    listen: SocketAddr,
    shards: usize,
    machine: impl Fn(ShardId) -> Result<R::Machine, String>,
    role: R,
) -> io::Result<Arc<dyn DataPath>> {
    check_shards(shards)?;
    let machines = (0u8..).map(ShardId).take(shards).map(machine).collect::<Result<Vec<_>, _>>();
    let host = Host::bind(listen, machines.map_err(crate::failure::invalid)?)?;
    Ok(Arc::new(InRole { host, role }))
}

/// At the root, where its only protocol sums.
struct AtRoot<P>(PhantomData<fn() -> P>);

impl<P: Machines<Peer, Part>> Role for AtRoot<P> {
    type Machine = P::Root;

    fn job(
        &self,
        seat: &Seat<'_>,
        peers: &dyn Fn(SocketAddr) -> Result<Peer, String>,
    ) -> Result<<P::Root as Summer>::Job, String> {
        P::root_job(seat.job, seat.part, peers)
    }
}

impl<P: Machines<Peer, Part>, Q: Machines<Peer, Part>> Role for Together<P, Q> {
    type Machine = Both<P::Root, Q::Root>;

    fn job(
        &self,
        seat: &Seat<'_>,
        peers: &dyn Fn(SocketAddr) -> Result<Peer, String>,
    ) -> Result<<Self::Machine as Summer>::Job, String> {
        match seat.protocol == self.0.name() {
            true => P::root_job(seat.job, seat.part, peers).map(Either::First),
            false => Q::root_job(seat.job, seat.part, peers).map(Either::Second),
        }
    }
}

/// On the way to the root.
struct OnTheWay<P>(Memory, PhantomData<fn() -> P>);

impl<P: Machines<Peer, Part>> Role for OnTheWay<P> {
    type Machine = P::Relay;

    fn job(
        &self,
        seat: &Seat<'_>,
        peers: &dyn Fn(SocketAddr) -> Result<Peer, String>,
    ) -> Result<<P::Relay as Summer>::Job, String> {
        let upstream = seat.upstream.ok_or("a switch on the way without an upstream")?;
        P::relay_job(seat.job, seat.part, upstream, &self.0, peers)
    }
}
