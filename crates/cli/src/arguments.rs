//! Values on the command line, checked where they are read.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use fanin_controller::protocols;
use fanin_udp::OnSockets;

/// The address at which a switch is looked for, and at which it listens, unless told otherwise.
pub(crate) const SWITCH_DEFAULT: &str = "127.0.0.1:4800";

/// A positive number of seconds.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no positive number of seconds");
    let seconds: f64 = text.strip_suffix('s').unwrap_or(text).trim_end().parse().map_err(|_| wrong())?;
    Duration::try_from_secs_f64(seconds).ok().filter(|duration| !duration.is_zero()).ok_or_else(wrong)
}

/// How gradients are summed.
pub(crate) fn protocol(text: &str) -> Result<&'static dyn OnSockets, String> {
    protocols::named(text).ok_or_else(|| format!("{text:?}: one of {}", protocols::names()))
}

/// An address of this machine, and a port.
pub(crate) fn listen(text: &str) -> Result<SocketAddr, String> {
    let mut addresses = text
        .to_socket_addrs()
        .map_err(|error| format!("{text:?} is no ADDR:PORT ({error}); try 0.0.0.0:4800 for all addresses"))?;
    addresses.next().ok_or_else(|| format!("{text:?} has no address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_positive_and_finite() {
        assert_eq!(seconds("5"), Ok(Duration::from_secs(5)));
        assert_eq!(seconds("0.25"), Ok(Duration::from_millis(250)));
        assert_eq!(seconds("2s"), Ok(Duration::from_secs(2)));
        for text in ["0", "-1", "nan", "inf", "1e300", "five", ""] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }

    #[test]
    fn protocols_are_called_by_their_names() {
        assert_eq!(protocol("switchml").map(|protocol| protocol.name()), Ok("switchml"));
        assert_eq!(protocol("atp").map(|protocol| protocol.name()), Ok("atp"));
        let refused = protocol("ATP").map(|protocol| protocol.name());
        assert_eq!(refused, Err("\"ATP\": one of switchml, dlcp, atp or goat".into()));
    }

    #[test]
    fn listen_wants_an_address_and_a_port() {
        assert_eq!(listen("127.0.0.1:0"), Ok(([127, 0, 0, 1], 0).into()));
        assert_eq!(listen("[::1]:7"), Ok(([0, 0, 0, 0, 0, 0, 0, 1], 7).into()));
        assert!(listen("127.0.0.1").is_err());
        assert!(listen("127.0.0.1:65536").is_err());
    }
}
