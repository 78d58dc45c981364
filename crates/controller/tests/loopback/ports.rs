//! Ports for tests.

use std::net::SocketAddr;

use socket2::{Domain, Socket, Type};

/// A port on which nobody listens, nor can until what comes with it is dropped.
pub fn closed_port() -> (Socket, SocketAddr) {
    let held = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    held.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("a free port");
    let address = held.local_addr().ok().and_then(|address| address.as_socket()).expect("bound");
    (held, address)
}
