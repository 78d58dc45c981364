//! How often somebody may call, and how much at once: who calls more often waits, so that others
//! are answered.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use fanin_limits::{Arrival, Budget, answered, host_of};
use tonic::Status;

use super::{ATTEND, CALLS_MAX, JOIN, JOIN_BYTES_MAX, REQUEST_BYTES_MAX};
use crate::node::secured::Caller;
use crate::node::{address_of, lock};

/// Calls that one address may make in a second, for long: heartbeats of 64 ranks in as many jobs
/// as run, for a quarter.
const CALLS_A_SECOND: u32 = 4096;
/// And at once, when it has made none for a while: two for each of these ranks as their jobs begin.
const CALLS_AT_ONCE: u32 = 8192;
/// A handshake costs more than a call, and counts as so many.
pub(in crate::node) const HANDSHAKE_COUNTS: u32 = 2;
/// A question about all jobs counts as so many.
pub(in crate::node) const STATUS_COUNTS: u32 = 8;
/// Calls of one address that are open at once, and of all.
const OPEN_OF_ONE_MAX: usize = CALLS_MAX as usize;
const OPEN_MAX: usize = 4 * OPEN_OF_ONE_MAX;
/// Bytes of requests that are on their way from one address, and from all, without the first 4 KiB
/// of each.
const ARRIVING_OF_ONE_MAX: usize = 64 << 20;
const ARRIVING_MAX: usize = 2 * ARRIVING_OF_ONE_MAX;
/// Longer no call waits: so many are under way that one more is refused, and does not count.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// How often one address calls.
#[derive(Debug, Default)]
pub(in crate::node) struct CallRate {
    /// When as many would have been made, at the rate that is allowed.
    due: Option<Instant>,
}

impl CallRate {
    /// One more, that counts as so many. Returns how long it has to wait, `None` for longer than
    /// any may.
    pub fn one_more(&mut self, now: Instant, counts: u32) -> Option<Duration> {
        let each = Duration::from_secs(1) / CALLS_A_SECOND;
        let due = self.due.map_or(now, |due| due.max(now)) + each * counts;
        let wait = (due - now).saturating_sub(each * CALLS_AT_ONCE);
        (wait <= WAIT_MAX).then(|| {
            self.due = Some(due);
            wait
        })
    }
}

/// The limits for the calls of all addresses.
#[derive(Clone, Debug)]
pub(in crate::node) struct CallLimits {
    made: Arc<Mutex<HashMap<IpAddr, CallRate>>>,
    open: Budget,
    arriving: Budget,
}

impl Default for CallLimits {
    fn default() -> Self {
        let arriving = Budget::new(ARRIVING_MAX, ARRIVING_OF_ONE_MAX);
        Self { made: Arc::default(), open: Budget::new(OPEN_MAX, OPEN_OF_ONE_MAX), arriving }
    }
}

impl CallLimits {
    /// Waits until it is the turn of so many calls of an address; whether that is soon.
    pub async fn turn(&self, address: IpAddr, counts: u32) -> bool {
        let Some(wait) = self.one_more(address, Instant::now(), counts) else { return false };
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        true
    }

    /// One more of somebody, as [`CallRate::one_more`] has it.
    fn one_more(&self, address: IpAddr, now: Instant, counts: u32) -> Option<Duration> {
        let mut made = lock(&self.made);
        let host = host_of(address);
        if !made.contains_key(&host) {
            // Who made none for long is as one who never did.
            made.retain(|_, calls| calls.due.is_some_and(|due| due > now));
        }
        made.entry(host).or_default().one_more(now, counts)
    }
}

/// For what costs more than a call: whose it is.
#[derive(Clone, Debug)]
pub(in crate::node) struct Toll {
    calls: CallLimits,
    address: IpAddr,
}

impl Toll {
    /// Waits as for so many calls.
    ///
    /// # Errors
    /// When that would be for too long.
    pub async fn pay(&self, counts: u32) -> Result<(), Status> {
        if self.calls.turn(self.address, counts).await { Ok(()) } else { Err(too_many()) }
    }
}

/// What a caller hears who makes more calls than can wait.
pub(in crate::node) fn too_many() -> Status {
    Status::resource_exhausted("too many calls from this address; call less often")
}

/// Lets a call through when it is its turn, and its request is here.
pub(in crate::node) async fn in_turn(
    State(calls): State<CallLimits>,
    mut request: Request,
    next: Next,
) -> Response {
    let Some(Caller { peer, .. }) = request.extensions().get().cloned() else {
        return next.run(request).await;
    };
    let address = address_of(peer.connection.remote_addr());
    // By this the services know from where they are called.
    request.extensions_mut().insert(peer.connection.clone());
    request.extensions_mut().insert(Toll { calls: calls.clone(), address });
    let refused = |is_call: bool| match is_call {
        true => too_many().into_http(),
        // Who asks for metrics or health knows nothing of gRPC's statuses.
        false => (StatusCode::TOO_MANY_REQUESTS, too_many().message().to_owned()).into_response(),
    };
    let (is_call, path) = (request.method() == Method::POST, request.uri().path());
    let arrival = Arrival {
        is_stream: path == ATTEND,
        bytes_max: if path == JOIN { JOIN_BYTES_MAX } else { REQUEST_BYTES_MAX },
    };
    let Some(wait) = calls.one_more(address, Instant::now(), 1) else { return refused(is_call) };
    let Some(place) = calls.open.take(address, 1) else { return refused(is_call) };
    let open = (peer.call(), place);
    if !wait.is_zero() {
        tokio::time::sleep(wait).await;
    }
    if is_call {
        request = match arrival.of(request, calls.arriving.take(address, 0)).await {
            Ok(request) => request,
            Err(status) => return status.into_http(),
        };
    }
    let answer = next.run(request).await;
    // An answer to what is no call is short, and has its length.
    if is_call { answered(answer, open) } else { answer }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_calls_too_often_waits_and_who_pauses_does_not() {
        let (mut calls, start) = (CallRate::default(), Instant::now());
        for _ in 0..CALLS_AT_ONCE {
            assert_eq!(calls.one_more(start, 1), Some(Duration::ZERO));
        }
        let second = Duration::from_secs(1);
        let waits: Vec<_> =
            (0..CALLS_A_SECOND).map(|_| calls.one_more(start, 1).expect("its turn comes")).collect();
        assert!(waits.is_sorted() && waits[0] > Duration::ZERO);
        let last = waits[waits.len() - 1];
        assert!(last > second * 99 / 100 && last <= second, "{last:?}");
        let burst = second * CALLS_AT_ONCE / CALLS_A_SECOND;
        for _ in 0..100_000 {
            assert_eq!(calls.one_more(start, 1), None, "that would wait longer than a second");
        }
        let later = start + second / 2;
        let wait = calls.one_more(later, 1).expect("who was refused is not counted");
        assert!(wait > second * 49 / 100 && wait < second * 51 / 100, "{wait:?}");
        assert_eq!(calls.one_more(start + second + burst, 1), Some(Duration::ZERO));
    }

    #[test]
    fn an_address_is_forgotten_when_its_calls_are_over() {
        let (calls, start) = (CallLimits::default(), Instant::now());
        let from = |last: u8| IpAddr::from([10, 0, 0, last]);
        let call = |last, now| calls.one_more(from(last), now, CALLS_AT_ONCE).map(|wait| wait.is_zero());
        assert_eq!((call(1, start), call(2, start)), (Some(true), Some(true)), "each has its own");
        assert_eq!(call(1, start), None, "all connections of an address count together");
        assert_eq!(call(3, start + Duration::from_secs(60)), Some(true));
        assert_eq!(lock(&calls.made).len(), 1);
    }
}
