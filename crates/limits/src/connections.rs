//! The connections of a service, each with its place among as many as there may be.
//!
//! To close those that come when all places are taken would let whoever connects first, and says
//! nothing, keep all others out. So a newcomer has the place of the connection that has asked for
//! nothing for longest; a connection with an open call (a rank's, as long as it lives) keeps its
//! own. A connection that nobody wants ends by itself after [`QUIET_MAX`].

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::time::{Instant, Sleep};
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::{Connected, TcpConnectInfo};

use crate::{host_of, of_host_max};

/// How long a connection may be open without a call.
const QUIET_MAX: Duration = Duration::from_secs(60);
/// The time for which nobody is accepted when there are no descriptors. A connection that could not
/// be accepted stays in the kernel's queue, and would be tried again at once.
const PAUSE: Duration = Duration::from_millis(100);
/// Descriptors that are left for all else.
const DESCRIPTORS_KEPT: usize = 64;

/// Lets this process have as many open files as it may. A process has 1,024 by default, and may
/// have more.
pub fn raise_descriptors() {
    if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // As many as before, then.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
    }
}

/// As many connections as are asked for, if this process may have so many open files: without a
/// descriptor none could be accepted, even to be closed.
#[must_use]
pub fn connections_max(asked: usize) -> usize {
    let may = getrlimit(Resource::RLIMIT_NOFILE).map_or(usize::MAX, |(may, _)| may as usize);
    asked.min(may.saturating_sub(DESCRIPTORS_KEPT).max(may / 2)).max(1)
}

/// A connection that has a place.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    peer: Peer,
    /// Resolves when another one has its place.
    makes_way: oneshot::Receiver<()>,
    /// When it may have been quiet for too long.
    looks: Pin<Box<Sleep>>,
    is_over: bool,
    _place: Place,
}

/// The peer of a connection, as each request of the connection carries it.
#[derive(Clone, Debug)]
pub struct Peer {
    /// From where, and to where.
    pub connection: TcpConnectInfo,
    quiet: Quiet,
}

/// Which calls a connection has.
#[derive(Clone, Debug)]
struct Quiet(Arc<Calls>);

#[derive(Debug)]
struct Calls {
    open: AtomicUsize,
    /// When the last one ended, or the connection was made.
    since: Mutex<Instant>,
}

/// A call of a connection, until it is dropped.
#[derive(Debug)]
pub struct Open(Quiet);

#[derive(Debug)]
struct Place {
    number: u64,
    places: Arc<Mutex<Places>>,
}

#[derive(Debug)]
struct Places {
    max: usize,
    of_one_max: usize,
    next: u64,
    taken: HashMap<u64, Taken>,
}

#[derive(Debug)]
struct Taken {
    host: IpAddr,
    quiet: Quiet,
    /// Dropped when another one has the place.
    _makes_way: oneshot::Sender<()>,
}

impl Quiet {
    fn new() -> Self {
        Self(Arc::new(Calls { open: AtomicUsize::new(0), since: Mutex::new(Instant::now()) }))
    }

    /// Since when there is no call.
    fn since(&self) -> Option<Instant> {
        (self.0.open.load(Ordering::Acquire) == 0).then(|| *lock(&self.0.since))
    }
}

impl Peer {
    /// A call begins: the connection keeps its place as long as there is one.
    #[must_use]
    pub fn call(&self) -> Open {
        self.quiet.0.open.fetch_add(1, Ordering::AcqRel);
        Open(self.quiet.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        *lock(&self.0.0.since) = Instant::now();
        self.0.0.open.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Places {
    fn enter(&mut self, host: IpAddr, quiet: Quiet) -> Option<(u64, oneshot::Receiver<()>)> {
        let of_one = self.taken.values().filter(|taken| taken.host == host).count();
        let of_one_max = of_host_max(host, self.max, self.of_one_max);
        if self.taken.len() >= self.max || of_one >= of_one_max {
            let longest = self.taken.iter().filter(|(_, taken)| of_one < of_one_max || taken.host == host);
            let longest = longest.filter_map(|(number, taken)| Some((taken.quiet.since()?, *number))).min();
            self.taken.remove(&longest?.1);
        }
        let (makes_way, made) = oneshot::channel();
        let number = self.next;
        self.next += 1;
        self.taken.insert(number, Taken { host, quiet, _makes_way: makes_way });
        Some((number, made))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.places).taken.remove(&self.number);
    }
}

/// The connections that have a place, at most `max` of them and `of_one_max` from one address (of
/// IPv6, half from one network). The others are closed as they come.
pub fn limited(
    incoming: impl Stream<Item = io::Result<TcpStream>>,
    max: usize,
    of_one_max: usize,
) -> impl Stream<Item = io::Result<Connection>> {
    let places = Places { max, of_one_max, next: 0, taken: HashMap::new() };
    let places = Arc::new(Mutex::new(places));
    let in_time = incoming.then(async |accepted| {
        if accepted.as_ref().is_err_and(lacks_something) {
            tokio::time::sleep(PAUSE).await;
        }
        accepted
    });
    in_time.filter_map(move |accepted| match accepted {
        Ok(stream) => {
            let connection = stream.connect_info();
            let host = host_of(connection.remote_addr()?.ip());
            let peer = Peer { connection, quiet: Quiet::new() };
            let (number, makes_way) = lock(&places).enter(host, peer.quiet.clone())?;
            let place = Place { number, places: Arc::clone(&places) };
            let looks = Box::pin(tokio::time::sleep(QUIET_MAX));
            Some(Ok(Connection { stream, peer, makes_way, looks, is_over: false, _place: place }))
        }
        Err(error) => Some(Err(error)),
    })
}

/// Whether the same would be said of the next connection at once.
fn lacks_something(error: &io::Error) -> bool {
    use nix::errno::Errno;
    let lacks = [Errno::EMFILE, Errno::ENFILE, Errno::ENOBUFS, Errno::ENOMEM];
    error.raw_os_error().is_some_and(|raw| lacks.contains(&Errno::from_raw(raw)))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Connection {
    /// The peer.
    #[must_use]
    pub const fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Waits for the first bytes, and leaves them where they are. There are none where the
    /// connection is to end.
    ///
    /// # Errors
    /// Where it broke.
    pub async fn peek(&mut self, into: &mut [u8]) -> io::Result<usize> {
        std::future::poll_fn(|context| match self.stream.poll_peek(context, &mut ReadBuf::new(into)) {
            Poll::Pending if self.poll_over(context) => Poll::Ready(Ok(0)),
            peeked => peeked,
        })
        .await
    }

    /// Whether it is to end: for another one, or as it was quiet for long.
    fn poll_over(&mut self, context: &mut Context<'_>) -> bool {
        if self.is_over || Pin::new(&mut self.makes_way).poll(context).is_ready() {
            self.is_over = true;
        }
        while !self.is_over && self.looks.as_mut().poll(context).is_ready() {
            let ends = self.peer.quiet.since().unwrap_or_else(Instant::now) + QUIET_MAX;
            self.is_over = ends <= Instant::now();
            self.looks.as_mut().reset(ends);
        }
        self.is_over
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match Pin::new(&mut self.stream).poll_read(context, buffer) {
            // As if the other end had said all that it had to say.
            Poll::Pending if self.poll_over(context) => Poll::Ready(Ok(())),
            read => read,
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::io::AsyncReadExt;
    use tokio::net::TcpListener;
    use tokio_stream::wrappers::TcpListenerStream;

    use super::*;

    fn places(max: usize, of_one_max: usize) -> Places {
        Places { max, of_one_max, next: 0, taken: HashMap::new() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_newcomer_has_the_place_of_who_asked_for_nothing_for_longest() {
        let [one, other, third] = [1, 2, 3].map(|last| IpAddr::from([10, 0, 0, last]));
        let mut places = places(3, 2);
        let mut enter = |host| {
            let peer = Peer {
                connection: TcpConnectInfo { local_addr: None, remote_addr: None },
                quiet: Quiet::new(),
            };
            places.enter(host, peer.quiet.clone()).map(|(_, makes_way)| (peer, makes_way))
        };
        let is_here = |makes_way: &mut oneshot::Receiver<()>| {
            makes_way.try_recv() == Err(oneshot::error::TryRecvError::Empty)
        };
        let mut first = enter(one).expect("a place");
        let calls = first.0.call();
        tokio::time::advance(Duration::from_secs(1)).await;
        let mut second = enter(one).expect("a place");
        tokio::time::advance(Duration::from_secs(1)).await;
        let mut last = enter(other).expect("a place");
        // An address has no more than two places.
        let mut again = enter(one).expect("the second one's place");
        assert!(is_here(&mut first.1) && !is_here(&mut second.1) && is_here(&mut last.1));
        tokio::time::advance(Duration::from_secs(1)).await;
        drop(calls);
        // All places are taken: the other address's has been quiet for longest.
        let newcomer = enter(third).expect("the last one's place");
        assert!(is_here(&mut first.1) && is_here(&mut again.1) && !is_here(&mut last.1));
        let _calls = [first.0.call(), again.0.call(), newcomer.0.call()];
        assert!(enter(other).is_none(), "all of them are served");
    }

    #[tokio::test]
    async fn a_connection_without_a_call_ends_and_one_with_a_call_does_not() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let mut connections = std::pin::pin!(limited(TcpListenerStream::new(listener), 9, 9));
        let _silent = TcpStream::connect(address).await.expect("connected");
        let mut silent = connections.next().await.expect("listens").expect("accepted");
        let _asks = TcpStream::connect(address).await.expect("connected");
        let mut asks = connections.next().await.expect("listens").expect("accepted");
        let call = asks.peer.call();
        tokio::time::pause();
        let (mut byte, began) = ([0], Instant::now());
        assert_eq!(silent.read(&mut byte).await.expect("an end"), 0);
        assert!(began.elapsed() >= QUIET_MAX);
        let waits = tokio::time::timeout(QUIET_MAX * 9, asks.read(&mut byte)).await;
        assert!(waits.is_err(), "its call is open");
        drop(call);
        assert_eq!(asks.read(&mut byte).await.expect("an end"), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn without_descriptors_nobody_is_accepted_again_and_again() {
        let asked = Cell::new(0);
        let full = std::iter::repeat_with(|| {
            asked.set(asked.get() + 1);
            Err(io::Error::from_raw_os_error(nix::errno::Errno::EMFILE as i32))
        });
        let mut connections = std::pin::pin!(limited(tokio_stream::iter(full), 9, 9));
        let all = async { while connections.next().await.expect("goes on").is_err() {} };
        assert!(tokio::time::timeout(Duration::from_secs(1), all).await.is_err());
        assert!(asked.get() <= 11, "{}", asked.get());
    }

    #[test]
    fn there_are_no_more_connections_than_descriptors() {
        let (may, _) = getrlimit(Resource::RLIMIT_NOFILE).expect("known");
        assert!(connections_max(usize::MAX) < may as usize);
        assert_eq!(connections_max(1), 1);
    }
}
