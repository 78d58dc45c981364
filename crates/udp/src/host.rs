//! A machine with a socket and a thread of its own, and an owner who asks it things.

use crate::io_loop::{self, Shard};
use crate::mailbox::{Post, mailbox};
use crate::socket::{bind, receive_buffer_bytes};
use crate::train_socket::{Peer, TrainSocket};
use crate::{IoStatistics, Offload};
use fanin_protocol::Endpoint;
use std::io;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};

type Question<M> = Box<dyn FnOnce(&mut M, IoStatistics) + Send>;

enum Command<M> {
    Ask(Question<M>),
    Stop,
}

/// A machine that serves one port from one thread. Dropping it stops and joins the thread.
pub(crate) struct Host<M: Endpoint> {
    address: SocketAddr,
    receive_buffer_bytes: usize,
    post: Post<Command<M>>,
    thread: Option<JoinHandle<()>>,
    events: Mutex<Option<Receiver<M::Event>>>,
}

impl<M> Host<M>
where
    M: Endpoint<Address = Peer, Event: Send + 'static> + Send + 'static,
{
    /// Binds the socket and starts the thread.
    pub(crate) fn bind(listen: SocketAddr, name: &str, machine: M) -> io::Result<Self> {
        let (sockets, address) = bind(listen, 1)?;
        let socket = sockets.into_iter().next().ok_or(io::ErrorKind::NotConnected)?;
        let receive_buffer_bytes = receive_buffer_bytes(&socket)?;
        let socket = TrainSocket::new(socket, Offload::Detect)?;
        let (post, mailbox) = mailbox()?;
        let (sender, receiver) = mpsc::channel();
        let shard = HostShard { machine, events: sender };
        let thread =
            thread::Builder::new().name(name.into()).spawn(move || io_loop::run(shard, socket, &mailbox))?;
        let events = Mutex::new(Some(receiver));
        Ok(Self { address, receive_buffer_bytes, post, thread: Some(thread), events })
    }

    pub(crate) const fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Receive buffer that the kernel granted, in bytes.
    pub(crate) const fn receive_buffer_bytes(&self) -> usize {
        self.receive_buffer_bytes
    }

    /// What the machine's thread makes of the question; `None` when it has ended.
    pub(crate) fn ask<R: Send + 'static>(
        &self,
        question: impl FnOnce(&mut M, IoStatistics) -> R + Send + 'static,
    ) -> Option<R> {
        self.post.ask(|reply| {
            Command::Ask(Box::new(move |machine: &mut M, io| {
                // Fails when nobody waits for it any more; that is no concern of the machine's.
                let _ = reply.send(question(machine, io));
            }))
        })
    }

    /// What the machine tells. The first call takes the receiver.
    pub(crate) fn events(&self) -> Option<Receiver<M::Event>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl<M: Endpoint> Drop for Host<M> {
    fn drop(&mut self) {
        let _ = self.post.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so on standard error.
            let _ = thread.join();
        }
    }
}

impl<M: Endpoint> std::fmt::Debug for Host<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host").field("address", &self.address).finish_non_exhaustive()
    }
}

struct HostShard<M: Endpoint> {
    machine: M,
    events: Sender<M::Event>,
}

impl<M: Endpoint<Address = Peer>> Shard for HostShard<M> {
    type Machine = M;
    type Command = Command<M>;

    fn machine(&mut self) -> &mut M {
        &mut self.machine
    }

    fn command(&mut self, command: Command<M>, socket: &mut TrainSocket) -> ControlFlow<()> {
        match command {
            Command::Ask(question) => question(&mut self.machine, socket.statistics),
            Command::Stop => return ControlFlow::Break(()),
        }
        ControlFlow::Continue(())
    }

    fn event(&mut self, event: M::Event) {
        // Nobody need listen.
        let _ = self.events.send(event);
    }
}
