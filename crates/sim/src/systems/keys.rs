//! Keys that several systems have in their tables.

use std::time::Duration;

use toml::Spanned;

use crate::scenario_file::{Entry, Mistake, at};
use fanin_units::Time;

/// IPv4 and UDP, as the simulated network counts them.
const IP_UDP_BYTES: usize = 28;

/// How long a protocol's packets can be.
pub(super) struct PacketLengths<'a> {
    /// In elements.
    pub(super) elements: &'a [usize],
    /// The most of them that an IP packet takes.
    pub(super) for_mtu: &'a dyn Fn(usize) -> Option<usize>,
    /// UDP payload of a packet.
    pub(super) packet_bytes: &'a dyn Fn(usize) -> usize,
}

impl PacketLengths<'_> {
    /// Elements of a packet: as given, or as many as the MTU takes.
    pub(super) fn of(&self, entry: &Entry<'_>, given: Option<&Spanned<u16>>) -> Result<u16, Mistake> {
        let (lengths, mtu) = (self.elements, entry.mtu());
        let Some(given) = given else {
            let most = (self.for_mtu)(mtu).map(|elements| elements as u16);
            return most.ok_or_else(|| {
                entry.at_mtu(format!("no packet of {mtu} bytes carries even {} elements", lengths[0]))
            });
        };
        let count = usize::from(*given.get_ref());
        if !lengths.contains(&count) {
            return Err(at(given, format!("a packet carries {lengths:?} elements, one of these")));
        }
        if (self.packet_bytes)(count) + IP_UDP_BYTES > mtu {
            return Err(at(given, format!("{count} elements do not fit a packet of {mtu} bytes")));
        }
        Ok(*given.get_ref())
    }
}

/// Shortest wait for an answer.
pub(super) fn timeout(given: Option<&Spanned<Time>>) -> Result<Duration, Mistake> {
    match given {
        Some(timeout) if timeout.get_ref().0.is_zero() => Err(at(timeout, "`timeout` must not be zero")),
        Some(timeout) => Ok(timeout.get_ref().0),
        None => Ok(Duration::from_millis(1)),
    }
}
