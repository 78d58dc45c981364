//! What stands between ranks and a switch, and may swallow what the switch sends.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Longest datagram.
const DATAGRAM: usize = 65_535;

/// Passes on what comes to a port, TCP and UDP, and what comes back. Its threads end with the test's process.
pub struct Between {
    pub address: SocketAddr,
    swallows: Arc<AtomicBool>,
}

impl Between {
    pub fn new(switch: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound");
        let swallows = Arc::<AtomicBool>::default();
        thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(there)) = (client, TcpStream::connect(switch)) else { continue };
                pipe(&client, &there);
                pipe(&there, &client);
            }
        });
        let here = UdpSocket::bind(address).expect("the same port is free");
        let silent = Arc::clone(&swallows);
        thread::spawn(move || {
            let mut ways = HashMap::new();
            let mut datagram = vec![0; DATAGRAM];
            while let Ok((bytes, from)) = here.recv_from(&mut datagram) {
                let way = ways.entry(from).or_insert_with(|| way_back(switch, &here, from, &silent));
                // Nobody may listen there any more.
                let _ = way.send(&datagram[..bytes]);
            }
        });
        Self { address, swallows }
    }

    /// From now on no datagram comes back.
    pub fn swallows_answers(&self) {
        self.swallows.store(true, Ordering::Relaxed);
    }
}

/// A socket to the switch whose answers go back to `client`.
fn way_back(switch: SocketAddr, here: &UdpSocket, client: SocketAddr, silent: &Arc<AtomicBool>) -> UdpSocket {
    let there = UdpSocket::bind("127.0.0.1:0").expect("a free port");
    there.connect(switch).expect("a way");
    let (answers, here) = (there.try_clone().expect("a descriptor"), here.try_clone().expect("a descriptor"));
    let silent = Arc::clone(silent);
    thread::spawn(move || {
        let mut datagram = vec![0; DATAGRAM];
        while let Ok(bytes) = answers.recv(&mut datagram) {
            if !silent.load(Ordering::Relaxed) {
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
