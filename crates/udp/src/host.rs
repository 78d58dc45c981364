//! Machines that serve one port, each with a socket and a thread of its own, and an owner who asks them things.

use crate::io_loop::Shard;
use crate::io_thread::{HostThreads, Lease, Room};
use crate::mailbox::Post;
use crate::ports::Ports;
use crate::registered::Registered;
use crate::socket::{bind, receive_buffer_bytes};
use crate::train_socket::{Peer, TrainSocket};
use crate::{IoStatistics, Offload, ThreadEnded};
use fanin_protocol::Endpoint;
use fanin_wire::JobId;
use std::io;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, PoisonError};

/// The shards of a machine, all on one port: each a thread. Dropping it stops the machines, and joins the threads on which nobody else lives;
/// its peers are not told.
pub struct Host<M: Endpoint> {
    address: SocketAddr,
    receive_buffer_bytes: usize,
    shards: Vec<Running<M>>,
    events: Mutex<Option<Receiver<M::Event>>>,
}

struct Running<M: Endpoint> {
    post: Post<Command<M>>,
    lease: Lease,
}

type Question<M> = Box<dyn FnOnce(&mut HostShard<M>, &mut Ports) + Send>;

pub(crate) enum Command<M: Endpoint> {
    Ask(Question<M>),
    Stop,
}

impl<M> Host<M>
where
    M: Endpoint<Address = Peer, Event: Send + 'static> + Send + 'static,
{
    /// Binds a socket for each of the machines, which are the shards in order, and starts their threads.
    ///
    /// # Errors
    /// When the address cannot be bound, another process has it, or the kernel cannot steer packets to several shards.
    pub fn bind(listen: SocketAddr, machines: impl IntoIterator<Item = M>) -> io::Result<Self> {
        Self::bind_with_offload(listen, machines, Offload::Detect)
    }

    /// As [`Self::bind`], saying whether the kernel may cut and join trains.
    ///
    /// # Errors
    /// As [`Self::bind`].
    pub fn bind_with_offload(
        listen: SocketAddr,
        machines: impl IntoIterator<Item = M>,
        offload: Offload,
    ) -> io::Result<Self> {
        let machines = Vec::from_iter(machines);
        let (sockets, address) = bind(listen, machines.len())?;
        let granted = sockets.iter().map(receive_buffer_bytes).collect::<io::Result<Vec<_>>>()?;
        let (events, receiver) = mpsc::channel();
        let mut host = Self {
            address,
            receive_buffer_bytes: granted.into_iter().min().unwrap_or(0),
            shards: Vec::with_capacity(machines.len()),
            events: Mutex::new(Some(receiver)),
        };
        for (index, (machine, socket)) in machines.into_iter().zip(sockets).enumerate() {
            let socket = TrainSocket::new(socket, offload)?;
            let room = Room::new()?;
            let (post, mailbox) = room.mailbox();
            let shard = HostShard { machine, registered: Registered::default(), events: events.clone() };
            let lease =
                room.move_in(shard, socket.into(), mailbox, Some(address), format!("fanin-switch-{index}"))?;
            host.shards.push(Running { post, lease });
        }
        Ok(host)
    }

    /// Where it listens.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Number of shards.
    #[must_use]
    pub const fn shards(&self) -> usize {
        self.shards.len()
    }

    /// Receive buffer that the kernel granted each shard, in bytes. What comes from all peers at once must fit.
    #[must_use]
    pub const fn receive_buffer_bytes(&self) -> usize {
        self.receive_buffer_bytes
    }

    /// What each shard's thread makes of the question, in the order of the shards; `None` from one that has ended.
    pub fn ask_all<R: Send + 'static>(
        &self,
        question: impl Fn(&mut M, IoStatistics) -> R + Clone + Send + 'static,
    ) -> Vec<Option<R>> {
        self.ask_shards(move |shard, ports| question(&mut shard.machine, ports.statistics()))
    }

    /// As [`Self::ask_all`], of all that is on the threads.
    pub(crate) fn ask_shards<R: Send + 'static>(
        &self,
        question: impl Fn(&mut HostShard<M>, &mut Ports) -> R + Clone + Send + 'static,
    ) -> Vec<Option<R>> {
        let asked = self.shards.iter().map(|shard| {
            let question = question.clone();
            let (reply, answer) = mpsc::sync_channel(1);
            let ask = move |shard: &mut HostShard<M>, ports: &mut Ports| {
                // Fails when nobody waits for it any more; that is no concern of the machine's.
                let _ = reply.send(question(shard, ports));
            };
            shard.post.send(Command::Ask(Box::new(ask))).is_ok().then_some(answer)
        });
        // All of them are at it before the first is waited for.
        let asked: Vec<_> = asked.collect();
        asked.into_iter().map(|answer| answer?.recv().ok()).collect()
    }

    /// What the machines tell. The first call takes the receiver.
    #[must_use]
    pub fn events(&self) -> Option<Receiver<M::Event>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Whether all its threads live.
    ///
    /// # Errors
    /// The first that has ended, though nobody stopped it.
    pub fn health(&self) -> Result<(), ThreadEnded> {
        self.shards.iter().try_for_each(|shard| shard.lease.health())
    }

    /// Its threads, for workers of this process.
    #[must_use]
    pub fn threads(&self) -> HostThreads {
        HostThreads::new(self.address, self.shards.iter().map(|shard| &shard.lease))
    }

    /// Stops the machines, and frees the port.
    pub fn shutdown(self) {
        drop(self);
    }
}

impl<M: Endpoint> Drop for Host<M> {
    fn drop(&mut self) {
        for shard in &self.shards {
            let _ = shard.post.send(Command::Stop);
        }
        for shard in self.shards.drain(..) {
            shard.lease.wait();
        }
    }
}

impl<M: Endpoint> std::fmt::Debug for Host<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host").field("address", &self.address).finish_non_exhaustive()
    }
}

pub(crate) fn stopped() -> io::Error {
    io::Error::other("the data path has stopped")
}

/// What a host has on a thread.
pub(crate) struct HostShard<M: Endpoint> {
    pub(crate) machine: M,
    pub(crate) registered: Registered,
    events: Sender<M::Event>,
}

impl<M: Endpoint<Address = Peer>> Shard for HostShard<M> {
    type Machine = M;
    type Command = Command<M>;

    fn machine(&mut self) -> &mut M {
        &mut self.machine
    }

    fn takes(&mut self, from: &Peer, job: JobId) -> bool {
        self.registered.takes(from, job)
    }

    fn command(&mut self, command: Command<M>, ports: &mut Ports) -> ControlFlow<()> {
        match command {
            Command::Ask(question) => question(self, ports),
            Command::Stop => return ControlFlow::Break(()),
        }
        ControlFlow::Continue(())
    }

    fn event(&mut self, event: M::Event) {
        // Nobody need listen.
        let _ = self.events.send(event);
    }
}

#[cfg(test)]
mod tests {
    use super::Host;
    use crate::ThreadEnded;
    use fanin_protocol::switchml::Switch;
    use fanin_wire::ShardId;
    use std::net::{Ipv4Addr, SocketAddr};

    #[test]
    fn a_thread_that_panics_is_named_and_the_others_go_on() {
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let switch = Host::bind(listen, [0, 1].map(ShardId).map(Switch::new)).unwrap();
        assert_eq!(switch.health(), Ok(()));
        let here = |_: &mut _, _| std::thread::current().name().map(str::to_owned);
        let names = switch.ask_all(here);
        assert_eq!(names, ["fanin-switch-0", "fanin-switch-1"].map(|name| Some(Some(name.to_owned()))));
        let answers = switch.ask_all(|_, _| {
            let name = std::thread::current().name().map(str::to_owned);
            assert_ne!(name.as_deref(), Some("fanin-switch-1"), "on purpose");
        });
        assert_eq!(answers, [Some(()), None]);
        // Its mailbox goes first, then the thread.
        while switch.health().is_ok() {
            std::thread::yield_now();
        }
        assert_eq!(switch.health(), Err(ThreadEnded { thread: "fanin-switch-1".into() }));
        assert_eq!(switch.ask_all(|_, _| ()), [Some(()), None]);
    }
}
