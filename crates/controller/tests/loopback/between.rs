//! Somebody between ranks and a switch, who reads what passes, may change it, and may swallow what the switch sends.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

/// Ports that are tried before there is none.
const PORTS_TRIED: usize = 100;
/// Longest datagram.
const DATAGRAM: usize = 65_535;

/// Passes on what comes to a port, TCP and UDP, and what comes back. Its threads end with the test's process.
pub struct Between {
    pub address: SocketAddr,
    meddling: Arc<Meddling>,
}

/// The fate of datagrams.
#[derive(Default)]
struct Meddling {
    swallows: AtomicBool,
    /// One of so many datagrams is changed; none where it is zero.
    changes: AtomicUsize,
    passed: AtomicUsize,
    /// Datagrams that passed, both ways, before any change.
    heard: Mutex<Vec<Vec<u8>>>,
}

/// Datagrams that are kept.
const HEARD_MAX: usize = 20_000;

impl Meddling {
    /// Reads one, and changes a bit of it near its end, where a payload is.
    fn meddle(&self, datagram: &mut [u8]) {
        let mut heard = self.heard.lock().expect("no panic");
        if heard.len() < HEARD_MAX {
            heard.push(datagram.to_vec());
        }
        let (passed, changes) =
            (self.passed.fetch_add(1, Ordering::Relaxed), self.changes.load(Ordering::Relaxed));
        if changes > 0 && passed.is_multiple_of(changes) {
            let at = datagram.len() - 1 - passed / changes % (datagram.len() / 2);
            datagram[at] ^= 1;
        }
    }
}

impl Between {
    pub fn new(switch: SocketAddr) -> Self {
        // Another test's socket may have the same number on UDP.
        let both = || {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
            let address = listener.local_addr().expect("bound");
            UdpSocket::bind(address).ok().map(|here| (listener, here, address))
        };
        let (listener, here, address) =
            (0..PORTS_TRIED).find_map(|_| both()).expect("a port that is free on both");
        let meddling = Arc::<Meddling>::default();
        thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(there)) = (client, TcpStream::connect(switch)) else { continue };
                pipe(&client, &there);
                pipe(&there, &client);
            }
        });
        let there = Arc::clone(&meddling);
        thread::spawn(move || {
            let mut ways = HashMap::new();
            let mut datagram = vec![0; DATAGRAM];
            while let Ok((bytes, from)) = here.recv_from(&mut datagram) {
                let way = ways.entry(from).or_insert_with(|| way_back(switch, &here, from, &there));
                there.meddle(&mut datagram[..bytes]);
                // Nobody may listen there any more.
                let _ = way.send(&datagram[..bytes]);
            }
        });
        Self { address, meddling }
    }

    /// From now on no datagram comes back.
    pub fn swallows_answers(&self) {
        self.meddling.swallows.store(true, Ordering::Relaxed);
    }

    /// From now on one of so many datagrams is changed on its way.
    pub fn changes_one_of(&self, count: usize) {
        self.meddling.changes.store(count, Ordering::Relaxed);
    }

    /// The datagrams that passed.
    pub fn heard(&self) -> Vec<Vec<u8>> {
        self.meddling.heard.lock().expect("no panic").clone()
    }
}

/// A socket to the switch whose answers go back to `client`.
fn way_back(switch: SocketAddr, here: &UdpSocket, client: SocketAddr, meddling: &Arc<Meddling>) -> UdpSocket {
    let there = UdpSocket::bind("127.0.0.1:0").expect("a free port");
    there.connect(switch).expect("a way");
    let (answers, here) = (there.try_clone().expect("a descriptor"), here.try_clone().expect("a descriptor"));
    let meddling = Arc::clone(meddling);
    thread::spawn(move || {
        let mut datagram = vec![0; DATAGRAM];
        while let Ok(bytes) = answers.recv(&mut datagram) {
            if !meddling.swallows.load(Ordering::Relaxed) {
                meddling.meddle(&mut datagram[..bytes]);
                let _ = here.send_to(&datagram[..bytes], client);
            }
        }
    });
    there
}

fn pipe(from: &TcpStream, to: &TcpStream) {
    let (mut from, mut to) = (from.try_clone().expect("a descriptor"), to.try_clone().expect("a descriptor"));
    thread::spawn(move || {
        let _ = io::copy(&mut from, &mut to);
        let _ = to.shutdown(std::net::Shutdown::Write);
    });
}
