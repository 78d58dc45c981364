//! Threads of I/O, and who lives on them: a service's machine, a worker's lanes, or both.

use crate::ThreadEnded;
use crate::io_loop::{self, Seat, Shard, Tenant};
use crate::mailbox::{Bell, Mailbox, Post, mailbox};
use crate::ports::Ports;
use crate::train_socket::Peer;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};

/// A thread that runs machines, until none is left on it.
#[derive(Debug)]
struct IoThread {
    bell: Bell,
    door: Arc<Door>,
    handle: JoinHandle<()>,
}

/// Who wants to live on a thread; `None` once it has ended.
struct Door(Mutex<Option<Vec<Box<dyn Tenant>>>>);

/// A machine that lives on a thread, as its owner knows it.
#[derive(Debug)]
pub(crate) struct Lease {
    thread: Arc<IoThread>,
    /// Ends with the tenant.
    ended: Mutex<Receiver<Infallible>>,
}

/// The threads of a service, for workers of the same process.
///
/// A [`crate::WorkerDriver`] that is told of them has its lanes on them, beside the service's machines: what they say to each other touches no
/// socket, and what the network brings for both wakes one thread. Where the service has ended it has threads of its own.
#[derive(Clone, Debug)]
pub struct HostThreads {
    /// Where the service listens.
    pub(crate) address: SocketAddr,
    threads: Arc<[Weak<IoThread>]>,
}

impl HostThreads {
    pub(crate) fn new<'a>(address: SocketAddr, leases: impl Iterator<Item = &'a Lease>) -> Self {
        Self { address, threads: leases.map(|lease| Arc::downgrade(&lease.thread)).collect() }
    }

    pub(crate) fn count(&self) -> usize {
        self.threads.len()
    }
}

impl PartialEq for HostThreads {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.threads, &other.threads)
    }
}

/// A place on a thread, which may be still to start.
pub(crate) struct Room {
    bell: Bell,
    thread: Option<Arc<IoThread>>,
}

impl Room {
    /// On a thread of its own.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { bell: Bell::new()?, thread: None })
    }

    /// On the thread of a host's shard of that number, if there is one.
    pub(crate) fn beside(threads: &HostThreads, number: usize) -> Option<Self> {
        let thread = threads.threads.get(number)?.upgrade()?;
        Some(Self { bell: thread.bell.clone(), thread: Some(thread) })
    }

    /// A mailbox for who moves in.
    pub(crate) fn mailbox<C>(&self) -> (Post<C>, Mailbox<C>) {
        mailbox(&self.bell)
    }

    /// Runs a shard here. Its neighbours call it `address`, or a guest where it has none; a thread of its own is called `name`.
    pub(crate) fn move_in<S>(
        self,
        shard: S,
        ports: Ports,
        mailbox: Mailbox<S::Command>,
        address: Option<SocketAddr>,
        name: String,
    ) -> io::Result<Lease>
    where
        S: Shard<Command: Send + 'static> + Send + 'static,
    {
        static GUESTS: AtomicU64 = AtomicU64::new(0);
        let Self { bell, thread } = self;
        let peer = address.map_or_else(|| Peer::Guest(GUESTS.fetch_add(1, Ordering::Relaxed)), Peer::from);
        let (ends, ended) = channel();
        let mut tenant: Box<dyn Tenant> = Box::new(Seat { shard, ports, mailbox, peer, _ends: ends });
        let ended = Mutex::new(ended);
        if let Some(thread) = thread {
            match thread.door.admit(tenant) {
                Ok(()) => {
                    bell.ring();
                    return Ok(Lease { thread, ended });
                }
                // The host has ended meanwhile, and nobody is left to hear the bell.
                Err(refused) => tenant = refused,
            }
        }
        let door = Arc::new(Door(Mutex::new(Some(vec![tenant]))));
        let handle = thread::Builder::new().name(name).spawn({
            let (closing, bell) = (Closing(Arc::clone(&door)), bell.clone());
            move || io_loop::run(&bell, |tenants| closing.0.enter(tenants))
        })?;
        Ok(Lease { thread: Arc::new(IoThread { bell, door, handle }), ended })
    }
}

impl Lease {
    /// Waits until the machine, which was told to end, is gone. On its own thread it cannot.
    pub(crate) fn wait(self) {
        if self.is_current() {
            return;
        }
        let _ = self.ended.lock().unwrap_or_else(PoisonError::into_inner).recv();
        // Whose machine was the last one sees the thread out.
        if let Some(thread) = Arc::into_inner(self.thread) {
            // A thread that panicked has said so on standard error.
            let _ = thread.handle.join();
        }
    }

    /// Whether this is the thread.
    pub(crate) fn is_current(&self) -> bool {
        self.thread.handle.thread().id() == thread::current().id()
    }

    /// Whether the thread lives.
    pub(crate) fn health(&self) -> Result<(), ThreadEnded> {
        let handle = &self.thread.handle;
        if handle.is_finished() { Err(ThreadEnded::named(handle.thread().name())) } else { Ok(()) }
    }
}

impl Door {
    fn lock(&self) -> MutexGuard<'_, Option<Vec<Box<dyn Tenant>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the newcomer back where the thread has ended.
    fn admit(&self, tenant: Box<dyn Tenant>) -> Result<(), Box<dyn Tenant>> {
        match &mut *self.lock() {
            Some(newcomers) => newcomers.push(tenant),
            None => return Err(tenant),
        }
        Ok(())
    }

    /// Lets newcomers in, or closes for good where nobody is within.
    fn enter(&self, tenants: &mut Vec<Box<dyn Tenant>>) -> ControlFlow<()> {
        let mut newcomers = self.lock();
        tenants.append(newcomers.get_or_insert_default());
        if tenants.is_empty() {
            *newcomers = None;
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    }
}

impl std::fmt::Debug for Door {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Door").finish_non_exhaustive()
    }
}

/// Closes the door when the thread ends, also by a panic.
struct Closing(Arc<Door>);

impl Drop for Closing {
    fn drop(&mut self) {
        let newcomers = self.0.lock().take();
        // Not under the lock: it may call somebody.
        drop(newcomers);
    }
}
