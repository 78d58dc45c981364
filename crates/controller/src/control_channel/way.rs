//! The machines above a switch, which are asked in its place if it stays away.

use std::net::SocketAddr;
use std::time::Duration;

/// How long a switch may be away before those who ask it ask the next machine on the way to the
/// root. A supervisor has mostly started it again by then. With the usual heartbeat timeout the
/// root does not take the ranks behind it for dead so soon.
pub(crate) const STAYS_AWAY: Duration = Duration::from_millis(2500);

/// How long a machine may take to answer a greeting that is looked for in the place of another one.
pub(crate) const GREETED_WITHIN: Duration = Duration::from_secs(1);

/// The machines above the one at `asked`, as it told, the next one first. A loopback address is one
/// of the machine that told of it. Text that is no address is left out.
pub(crate) fn way_from(asked: SocketAddr, told: &[String]) -> Vec<SocketAddr> {
    let addresses = told.iter().filter_map(|address| address.parse().ok());
    let seen = addresses.scan(asked.ip(), |below, address: SocketAddr| {
        let ip = if address.ip().is_loopback() { *below } else { address.ip() };
        *below = ip;
        Some(SocketAddr::new(ip, address.port()))
    });
    seen.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loopback_address_is_one_of_the_machine_that_told_of_it() {
        let address = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let told = ["127.0.0.1:1", "10.0.0.7:2", "nowhere", "[::1]:3"].map(String::from);
        let seen = ["10.0.0.9:1", "10.0.0.7:2", "10.0.0.7:3"].map(address);
        assert_eq!(way_from(address("10.0.0.9:4800"), &told), seen);
        assert_eq!(way_from(address("127.0.0.1:4800"), &told[..1]), [address("127.0.0.1:1")]);
    }
}
