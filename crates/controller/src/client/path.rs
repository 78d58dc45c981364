//! What the way to the switch is like: measured where it can be, assumed where it cannot.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use nix::ifaddrs::getifaddrs;

/// How packets to a switch leave this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The address that they are sent from.
    pub local: IpAddr,
    /// The interface that has this address.
    pub interface: Option<String>,
    /// Its rate; `None` where it does not tell, as virtual ones do not.
    pub rate_bps: Option<u64>,
}

/// Asks the kernel how it would send to `switch`; `None` when it would not. Nothing is sent.
#[must_use]
pub fn route(switch: SocketAddr) -> Option<Route> {
    let local = local_address(switch)?;
    let interface = interface_of(local);
    let rate_bps = interface.as_deref().and_then(interface_rate_bps);
    Some(Route { local, interface, rate_bps })
}

/// The rate of the interface through which `switch` is reached; `None` where it does not tell, as virtual ones do not.
pub(crate) fn rate_bps(switch: SocketAddr) -> Option<u64> {
    route(switch)?.rate_bps
}

/// The rate of an interface of this machine, in bits a second; `None` where it does not tell.
#[must_use]
pub fn interface_rate_bps(interface: &str) -> Option<u64> {
    if interface.contains('/') {
        return None;
    }
    let speed = std::fs::read_to_string(format!("/sys/class/net/{interface}/speed")).ok()?;
    // Mbit/s; -1 where the link is down or has no rate.
    let mbps: i64 = speed.trim().parse().ok()?;
    u64::try_from(mbps).ok().filter(|mbps| *mbps > 0)?.checked_mul(1_000_000)
}

/// The local address that the kernel routes to `switch` from. Nothing is sent.
fn local_address(switch: SocketAddr) -> Option<IpAddr> {
    let any: SocketAddr = if switch.is_ipv4() { ([0; 4], 0).into() } else { ([0_u16; 8], 0).into() };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(switch).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

fn interface_of(address: IpAddr) -> Option<String> {
    let has_address = |interface: &nix::ifaddrs::InterfaceAddress| {
        let storage = interface.address.as_ref()?;
        let ip = match address {
            IpAddr::V4(_) => IpAddr::V4(storage.as_sockaddr_in()?.ip()),
            IpAddr::V6(_) => IpAddr::V6(storage.as_sockaddr_in6()?.ip()),
        };
        (ip == address).then_some(())
    };
    getifaddrs()
        .ok()?
        .find(|interface| has_address(interface).is_some())
        .map(|interface| interface.interface_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_address_belongs_to_the_loopback_interface_which_has_no_rate() {
        let switch = SocketAddr::from(([127, 0, 0, 1], 4800));
        assert_eq!(local_address(switch), Some(IpAddr::from([127, 0, 0, 1])));
        assert_eq!(interface_of(IpAddr::from([127, 0, 0, 1])).as_deref(), Some("lo"));
        assert_eq!(rate_bps(switch), None);
    }
}
