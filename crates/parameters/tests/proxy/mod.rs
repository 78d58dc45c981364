//! A way to a service on which connections break where a test says.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// HTTP/2 frames of the service: what has an answer in it.
const DATA: u8 = 0;

/// Passes all on, but for answers that are to be lost.
#[derive(Debug)]
pub struct Proxy {
    pub address: SocketAddr,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    /// The address of the service.
    service: SocketAddr,
    /// The next answer, with its connection.
    loses: AtomicBool,
    /// The bytes of answers that a connection passes on before it breaks.
    bytes_max: AtomicUsize,
    connections: AtomicUsize,
    /// How late an answer comes.
    late_ms: AtomicU64,
}

impl Proxy {
    pub fn to(service: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let state = Arc::new(State {
            service,
            loses: AtomicBool::new(false),
            bytes_max: AtomicUsize::new(usize::MAX),
            connections: AtomicUsize::new(0),
            late_ms: AtomicU64::new(0),
        });
        let shared = Arc::clone(&state);
        // Until the test's process ends.
        std::thread::spawn(move || {
            for worker in listener.incoming().flatten() {
                let state = Arc::clone(&shared);
                std::thread::spawn(move || state.pass(&worker));
            }
        });
        Self { address, state }
    }

    /// Each answer from here on comes so late.
    pub fn answer_after_ms(&self, late: u64) {
        self.state.late_ms.store(late, Ordering::SeqCst);
    }

    /// The service has done what it is asked next, and nobody hears of it.
    pub fn lose_an_answer(&self) {
        self.state.loses.store(true, Ordering::SeqCst);
    }

    /// Whether it is lost.
    pub fn has_lost_it(&self) -> bool {
        !self.state.loses.load(Ordering::SeqCst)
    }

    /// Each connection from here on breaks after so many bytes of answers.
    pub fn break_after(&self, bytes: usize) {
        self.state.bytes_max.store(bytes, Ordering::SeqCst);
    }

    pub fn connections(&self) -> usize {
        self.state.connections.load(Ordering::SeqCst)
    }
}

impl State {
    /// One connection. A service that is away is as one that hangs up.
    fn pass(self: &Arc<Self>, worker: &TcpStream) {
        let Ok(service) = TcpStream::connect(self.service) else { return };
        self.connections.fetch_add(1, Ordering::SeqCst);
        let (mut from, mut to) =
            (worker.try_clone().expect("a socket"), service.try_clone().expect("a socket"));
        let up = std::thread::spawn(move || {
            let _ = io::copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Both);
        });
        let _ = self.answers(&service, worker);
        for socket in [&service, worker] {
            let _ = socket.shutdown(Shutdown::Both);
        }
        let _ = up.join();
    }

    /// Frame by frame (RFC 9113, section 4.1), until one is to be lost.
    fn answers(&self, mut service: &TcpStream, mut worker: &TcpStream) -> io::Result<()> {
        let mut passed = 0;
        loop {
            let mut header = [0; 9];
            service.read_exact(&mut header)?;
            let [a, b, c, kind, ..] = header;
            let mut frame = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
            service.read_exact(&mut frame)?;
            if kind == DATA {
                std::thread::sleep(Duration::from_millis(self.late_ms.load(Ordering::SeqCst)));
                passed += frame.len();
                if passed > self.bytes_max.load(Ordering::SeqCst) || self.loses.swap(false, Ordering::SeqCst)
                {
                    return Ok(());
                }
            }
            worker.write_all(&header)?;
            worker.write_all(&frame)?;
        }
    }
}
