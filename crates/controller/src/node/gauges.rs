//! The gauges of a switch, by which ranks that are about to join measure its link.

use std::net::SocketAddr;
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

/// Those that are open, and until when.
#[derive(Debug, Default)]
pub(super) struct Gauges(Mutex<Vec<(Gauge, Instant)>>);

impl Gauges {
    /// Opens one where the switch was asked, at `here`.
    pub(super) fn open(&self, here: Option<SocketAddr>) -> Result<MeasureReply, Status> {
        let here = here.ok_or_else(|| Status::internal("the connection has no address"))?;
        let (mut open, now) = (lock(&self.0), Instant::now());
        open.retain(|(_, until)| *until > now);
        if open.len() >= GAUGES_MAX {
            return Err(Status::resource_exhausted("other jobs measure its link just now"));
        }
        let ticket = rand::random();
        let gauge = Gauge::open(here.ip().to_canonical(), ticket, LIFE)
            .map_err(|error| Status::unavailable(format!("it cannot open a port to measure at: {error}")))?;
        let port = gauge.address().port().into();
        open.push((gauge, now + LIFE));
        Ok(MeasureReply { port, ticket })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_gauges_are_open_than_a_few() {
        let (gauges, here) = (Gauges::default(), Some(([127, 0, 0, 1], 4800).into()));
        let open: Vec<_> = (0..GAUGES_MAX).map(|_| gauges.open(here).expect("a port")).collect();
        assert!(open.iter().all(|one| one.port > 0));
        assert_ne!(open[0].ticket, open[1].ticket);
        let refused = gauges.open(here).expect_err("one too many");
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        gauges.0.lock().expect("no panic").iter_mut().for_each(|(_, until)| *until = Instant::now());
        gauges.open(here).expect("their time is over");
    }
}
