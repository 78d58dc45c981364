//! The limits of a service on TCP for those who connect and call, whoever they are.
//!
//! A connection has a place among as many as there may be ([`limited`]); one that asks for nothing
//! makes way for another, and ends after a while. A request comes within seconds and takes its
//! bytes from a [`Budget`], in which no address has all. Both services of fanin have this: the
//! control connection of a switch, and `fanin parameters`.
//!
//! Deliberately absent: what is asked.
#![forbid(unsafe_code)]

mod budget;
mod connections;
mod keepalive;
mod requests;

use std::net::{IpAddr, Ipv6Addr};

pub use budget::{Budget, Reservation};
pub use connections::{Connection, Open, Peer, connections_max, limited, raise_descriptors};
pub use keepalive::expect_answers;
pub use requests::{Arrival, answered, explain};

/// The host for which an address counts: a machine has all addresses of its network with IPv6 (a
/// /64), if it likes.
#[must_use]
pub fn host_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address @ IpAddr::V4(_) => address,
    }
}

/// The number out of `max` that one host may have, if another address may have `of_one_max`. A
/// network of IPv6 is a machine's, or has all machines of a cluster, and so may have half.
fn of_host_max(host: IpAddr, max: usize, of_one_max: usize) -> usize {
    if host.is_ipv6() { of_one_max.max(max / 2) } else { of_one_max }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_network_of_ipv6_are_one_host() {
        let host = |text: &str| host_of(text.parse().unwrap());
        assert_eq!(host("2001:db8:1:2:3:4:5:6"), host("2001:db8:1:2::1"));
        assert_ne!(host("2001:db8:1:2::1"), host("2001:db8:1:3::1"));
        assert_eq!(host("::ffff:10.0.0.1"), host("10.0.0.1"));
        assert_ne!(host("10.0.0.1"), host("10.0.0.2"));
    }
}
