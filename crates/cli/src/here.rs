//! The services of this machine: which processes sum, and where they listen.
//!
//! A rank's own service has a port that nobody chose. Nothing is written down for it: the kernel
//! knows who listens.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;

/// The thread that every process with a service has (`fanin_controller`).
const THREAD: &str = "fanin-control";
/// TCP's state of a socket that listens, in /proc/net/tcp.
const LISTENS: &str = "0A";

/// The addresses at which processes of this machine sum, as far as this user may look: in this
/// network namespace, one address a service.
pub(crate) fn services() -> Vec<SocketAddr> {
    let listening = sockets(&["/proc/net/tcp", "/proc/net/tcp6"], |state| state == LISTENS);
    // A service has both under one number: what else its process listens on has not.
    let data = sockets(&["/proc/net/udp", "/proc/net/udp6"], |_| true);
    let mut found = BTreeSet::new();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let path = process.path();
        if !sums(&path) {
            continue;
        }
        let inodes = inodes(&path);
        let of_process = |sockets: &[(SocketAddr, u64)]| -> HashSet<SocketAddr> {
            sockets.iter().filter(|(_, inode)| inodes.contains(inode)).map(|(address, _)| *address).collect()
        };
        found.extend(of_process(&listening).intersection(&of_process(&data)));
    }
    found.into_iter().map(reachable).collect()
}

/// Whether the process has a service.
fn sums(process: &Path) -> bool {
    let mut threads = fs::read_dir(process.join("task")).into_iter().flatten().flatten();
    threads
        .any(|thread| fs::read_to_string(thread.path().join("comm")).is_ok_and(|name| name.trim() == THREAD))
}

/// The sockets of a process.
fn inodes(process: &Path) -> HashSet<u64> {
    let files = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    let inode = |file: fs::DirEntry| {
        let target = fs::read_link(file.path()).ok()?;
        target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
    };
    files.filter_map(inode).collect()
}

/// The bound sockets of the kernel's tables, with their inodes.
fn sockets(tables: &[&str], wanted: impl Fn(&str) -> bool) -> Vec<(SocketAddr, u64)> {
    let text: String = tables.iter().filter_map(|table| fs::read_to_string(table).ok()).collect();
    let socket = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (local, state, inode) = (fields.get(1)?, fields.get(3)?, fields.get(9)?);
        wanted(state).then_some((address(local)?, inode.parse().ok()?))
    };
    text.lines().filter_map(socket).collect()
}

/// `0100007F:12C0` is 127.0.0.1:4800: words of 32 bits in the machine's own order, and a port.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let word = |at: usize| u32::from_str_radix(ip.get(at..at + 8)?, 16).ok().map(u32::to_ne_bytes);
    let ip = match ip.len() {
        8 => IpAddr::V4(Ipv4Addr::from(word(0)?)),
        32 => {
            let words = [word(0)?, word(8)?, word(16)?, word(24)?];
            let bytes: [u8; 16] = words.concat().try_into().ok()?;
            IpAddr::V6(Ipv6Addr::from(bytes))
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?))
}

/// A service that listens on every address is asked at this machine's own.
fn reachable(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        ip if !ip.is_unspecified() => address,
        IpAddr::V4(_) => (Ipv4Addr::LOCALHOST, address.port()).into(),
        IpAddr::V6(_) => (Ipv6Addr::LOCALHOST, address.port()).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_addresses_are_read() {
        let loopback = u32::from_ne_bytes([127, 0, 0, 1]);
        assert_eq!(address(&format!("{loopback:08X}:12C0")), Some(([127, 0, 0, 1], 4800).into()));
        let last = u32::from_ne_bytes([0, 0, 0, 1]);
        assert_eq!(address(&format!("{:024X}{last:08X}:0050", 0)), Some((Ipv6Addr::LOCALHOST, 80).into()));
        assert_eq!(address("0100007F"), None);
        assert_eq!(address("01:12C0"), None);
    }

    #[test]
    fn who_listens_on_all_addresses_is_asked_at_this_machines() {
        assert_eq!(reachable(([0, 0, 0, 0], 4800).into()), ([127, 0, 0, 1], 4800).into());
        assert_eq!(reachable((Ipv6Addr::UNSPECIFIED, 4800).into()), (Ipv6Addr::LOCALHOST, 4800).into());
        assert_eq!(reachable(([10, 0, 0, 1], 1).into()), ([10, 0, 0, 1], 1).into());
    }
}
