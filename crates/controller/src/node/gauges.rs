//! The gauges of a switch, by which ranks that are about to join measure its link.

use std::net::{IpAddr, SocketAddr};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use fanin_udp::Gauge;
use tonic::Status;

use super::lock;
use crate::proto::MeasureReply;

/// How long a gauge is open: for the ranks to hear of it and to fill it.
const LIFE: Duration = Duration::from_secs(5);
/// Most that are open at once. Jobs that measure at the same time would measure each other.
const GAUGES_MAX: usize = 4;

/// The open gauges, with their callers, and when they end.
#[derive(Debug, Default)]
pub(super) struct Gauges(Mutex<Vec<(Gauge, IpAddr, Instant)>>);

impl Gauges {
    /// Opens one where the switch was asked, at `here`, for the caller at `from`. A caller has one
    /// at most: its last one ends.
    pub(super) fn open(
        &self,
        here: Option<SocketAddr>,
        from: Option<SocketAddr>,
    ) -> Result<MeasureReply, Status> {
        let (here, from) = here.zip(from).ok_or_else(|| Status::internal("the connection has no address"))?;
        let from = from.ip().to_canonical();
        let (mut open, now) = (lock(&self.0), Instant::now());
        open.retain(|(_, caller, until)| *caller != from && *until > now);
        if open.len() >= GAUGES_MAX {
            return Err(Status::resource_exhausted("other jobs measure its link just now"));
        }
        let ticket = rand::random();
        let gauge = Gauge::open(here.ip().to_canonical(), ticket, LIFE)
            .map_err(|error| Status::unavailable(format!("it cannot open a port to measure at: {error}")))?;
        let port = gauge.address().port().into();
        open.push((gauge, from, now + LIFE));
        Ok(MeasureReply { port, ticket })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_gauges_are_open_than_a_few() {
        let (gauges, here) = (Gauges::default(), Some(([127, 0, 0, 1], 4800).into()));
        let from = |caller: usize| Some(SocketAddr::from(([10, 0, 0, caller as u8], 9)));
        let open: Vec<_> =
            (0..GAUGES_MAX).map(|caller| gauges.open(here, from(caller)).expect("a port")).collect();
        assert!(open.iter().all(|one| one.port > 0));
        assert_ne!(open[0].ticket, open[1].ticket);
        let refused = gauges.open(here, from(GAUGES_MAX)).expect_err("one too many");
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        gauges.0.lock().expect("no panic").iter_mut().for_each(|(.., until)| *until = Instant::now());
        gauges.open(here, from(GAUGES_MAX)).expect("their time is over");
    }

    #[test]
    fn a_caller_keeps_no_others_from_measuring() {
        let (gauges, here) = (Gauges::default(), Some(([127, 0, 0, 1], 4800).into()));
        for port in 1..100 {
            gauges.open(here, Some(([10, 0, 0, 1], port).into())).expect("its last one ends");
            // The same address, as a socket for both versions of IP has it.
            let mapped = std::net::Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped();
            gauges.open(here, Some((mapped, port).into())).expect("its last one ends");
        }
        assert_eq!(gauges.0.lock().expect("no panic").len(), 1);
        gauges.open(here, Some(([10, 0, 0, 2], 1).into())).expect("a port");
    }
}
