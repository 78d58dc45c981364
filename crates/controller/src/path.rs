//! What the way to the switch is like: measured where it can be, assumed where it cannot.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

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

/// The address that packets to `switch` leave from, as the control protocol has it; empty where
/// there is no way.
pub(crate) fn host(switch: SocketAddr) -> String {
    local_address(switch).map(|local| local.to_string()).unwrap_or_default()
}

/// The rate of the interface through which `switch` is reached; `None` where it does not tell, as
/// virtual ones do not.
pub(crate) fn rate_bps(switch: SocketAddr) -> Option<u64> {
    route(switch)?.rate_bps
}

/// What a switch tells of its link to its upstream, in bits a second. The plan of which switch sums
/// what needs it, and the slowest link on a rank's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Upward {
    /// The link itself; `None` where it does not tell.
    pub link_bps: Option<u64>,
    /// What it leaves of the rank's own rate; `None` where that is all, or not known.
    pub way_bps: Option<u64>,
}

/// The link to `upstream`, which carries what somebody said, or what its interface tells. There is
/// none to an upstream on this machine: nothing there is slower than a link.
pub(crate) fn upward(upstream: SocketAddr, said_bps: Option<u64>) -> Upward {
    let ip = upstream.ip().to_canonical();
    let is_here = ip.is_loopback() || interface_of(ip).is_some();
    if said_bps.is_none() && is_here {
        return Upward { link_bps: Some(u64::MAX), way_bps: None };
    }
    let link_bps = said_bps.or_else(|| rate_bps(upstream));
    Upward { link_bps, way_bps: link_bps }
}

/// The rate of the interface of this machine that has `address`; `None` where it does not tell.
pub(crate) fn rate_bps_at(address: IpAddr) -> Option<u64> {
    interface_rate_bps(&interface_of(address)?)
}

/// The bytes that a packet may have at the interface of this machine that has `address`; `None`
/// where none has.
pub(crate) fn mtu_at(address: IpAddr) -> Option<usize> {
    let mtu = std::path::Path::new("/sys/class/net").join(interface_of(address)?).join("mtu");
    std::fs::read_to_string(mtu).ok()?.trim().parse().ok()
}

/// The rate of an interface of this machine, in bits a second; `None` where it does not tell, and
/// where what it tells is none: a pair of virtual interfaces says 10 Gbit/s, and a bridge the same
/// of its ports.
#[must_use]
pub fn interface_rate_bps(interface: &str) -> Option<u64> {
    if interface.contains('/') {
        return None;
    }
    let directory = std::path::Path::new("/sys/class/net").join(interface);
    let uevent = std::fs::read_to_string(directory.join("uevent")).unwrap_or_default();
    let on_devices =
        ["DEVTYPE=bond", "DEVTYPE=vlan"].iter().any(|kind| uevent.lines().any(|line| line == *kind));
    if !on_devices && !directory.join("device").exists() {
        return None;
    }
    let speed = std::fs::read_to_string(directory.join("speed")).ok()?;
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

/// Why nobody can listen at an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InterfaceError {
    /// There is none of this name.
    #[error("there is no such interface here (ip -br link)")]
    Absent,
    /// It is not up.
    #[error("the interface is down (ip link set dev NAME up)")]
    Down,
    /// It has no address.
    #[error("the interface has no address (ip address add ADDR/BITS dev NAME)")]
    NoAddress,
    /// It is up, and nothing is at its other end.
    #[error("the interface has no carrier: is its cable in, and the other end up (ip -br link)?")]
    NoCarrier,
}

/// An address of an interface of this machine, IPv4 where it has one.
///
/// # Errors
/// When nobody can listen there.
pub fn interface_address(interface: &str) -> Result<IpAddr, InterfaceError> {
    let found: Vec<_> = getifaddrs()
        .map(|all| all.filter(|found| found.interface_name == interface).collect())
        .unwrap_or_default();
    if found.is_empty() {
        return Err(InterfaceError::Absent);
    }
    if !found.iter().any(|found| found.flags.contains(InterfaceFlags::IFF_UP)) {
        return Err(InterfaceError::Down);
    }
    let mut addresses: Vec<IpAddr> = found.iter().filter_map(ip_of).collect();
    addresses.sort_by_key(IpAddr::is_ipv6);
    addresses.first().copied().ok_or(InterfaceError::NoAddress)
}

/// As [`interface_address`], of an interface that has others beside it: one without a carrier is
/// left out.
///
/// # Errors
/// When nobody can listen there, or it has no carrier.
pub fn linked_address(interface: &str) -> Result<IpAddr, InterfaceError> {
    let address = interface_address(interface)?;
    let is_running = getifaddrs().is_ok_and(|mut all| {
        all.any(|found| {
            found.interface_name == interface && found.flags.contains(InterfaceFlags::IFF_RUNNING)
        })
    });
    if is_running { Ok(address) } else { Err(InterfaceError::NoCarrier) }
}

/// The network that an address of this machine is in: its own first address.
#[must_use]
pub fn subnet_of(address: IpAddr) -> Option<IpAddr> {
    let found = getifaddrs().ok()?.find(|found| ip_of(found) == Some(address))?;
    let mask = found.netmask?;
    match address {
        IpAddr::V4(own) => mask.as_sockaddr_in().map(|mask| IpAddr::V4(own & mask.ip())),
        IpAddr::V6(own) => mask.as_sockaddr_in6().map(|mask| IpAddr::V6(own & mask.ip())),
    }
}

fn ip_of(found: &nix::ifaddrs::InterfaceAddress) -> Option<IpAddr> {
    let storage = found.address.as_ref()?;
    let v4 = storage.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
    v4.or_else(|| storage.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
}

/// The interface of this machine that has `address`.
#[must_use]
pub fn interface_of(address: IpAddr) -> Option<String> {
    getifaddrs().ok()?.find(|found| ip_of(found) == Some(address)).map(|interface| interface.interface_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_that_nobody_can_listen_at_says_why() {
        assert_eq!(interface_address("lo"), Ok(IpAddr::from([127, 0, 0, 1])));
        assert_eq!(interface_address("no such"), Err(InterfaceError::Absent));
        assert_eq!(linked_address("lo"), Ok(IpAddr::from([127, 0, 0, 1])));
    }

    #[test]
    fn an_address_is_in_the_subnet_of_its_mask() {
        assert_eq!(subnet_of(IpAddr::from([127, 0, 0, 1])), Some(IpAddr::from([127, 0, 0, 0])));
        assert_eq!(subnet_of(IpAddr::from([192, 0, 2, 1])), None);
    }

    #[test]
    fn the_loopback_address_belongs_to_the_loopback_interface_which_has_no_rate() {
        let switch = SocketAddr::from(([127, 0, 0, 1], 4800));
        assert_eq!(local_address(switch), Some(IpAddr::from([127, 0, 0, 1])));
        assert_eq!(interface_of(IpAddr::from([127, 0, 0, 1])).as_deref(), Some("lo"));
        assert_eq!(rate_bps(switch), None);
    }

    #[test]
    fn no_link_leads_to_an_upstream_on_this_machine_unless_somebody_says_its_rate() {
        let here = SocketAddr::from(([127, 0, 0, 2], 4800));
        assert_eq!(upward(here, None), Upward { link_bps: Some(u64::MAX), way_bps: None });
        let said = Some(500_000_000);
        assert_eq!(upward(here, said), Upward { link_bps: said, way_bps: said });
        // An address for documents, which no machine has.
        let there = SocketAddr::from(([192, 0, 2, 1], 4800));
        let told = rate_bps(there);
        assert_eq!(upward(there, None), Upward { link_bps: told, way_bps: told });
        assert_eq!(upward(there, said), Upward { link_bps: said, way_bps: said });
    }
}
