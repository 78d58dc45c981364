//! How often somebody may call: who calls more often waits, so that others are answered.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use axum::extract::Request;
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tonic::Status;
use tonic::transport::server::TcpConnectInfo;

/// Calls that one address may make in a second, for long: heartbeats of 64 ranks in as many jobs as run, for a quarter.
const CALLS_A_SECOND: u32 = 4096;
/// And at once, when it has made none for a while: two for each of these ranks as their jobs begin.
const CALLS_AT_ONCE: u32 = 8192;
/// Longer no call waits: so many are under way that one more is refused, and does not count.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// The calls of one address.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// When as many would have been made, at the rate that is allowed.
    due: Option<Instant>,
}

impl Calls {
    /// One more, that counts as so many. Returns how long it has to wait, `None` for longer than any may.
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

/// The calls of all who are connected.
#[derive(Clone, Debug, Default)]
pub(super) struct Callers(Arc<Mutex<HashMap<IpAddr, Weak<Mutex<Calls>>>>>);

/// Who calls, as each of its requests carries it.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    pub connection: TcpConnectInfo,
    /// Whether nobody listens.
    pub is_secured: bool,
    /// Of all its connections.
    calls: Arc<Mutex<Calls>>,
}

impl Callers {
    pub fn caller(&self, connection: TcpConnectInfo) -> Caller {
        let address = connection.remote_addr().map_or(IpAddr::from([0; 4]), |peer| peer.ip().to_canonical());
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, calls| calls.strong_count() > 0);
        let calls = all.get(&address).and_then(Weak::upgrade).unwrap_or_default();
        all.insert(address, Arc::downgrade(&calls));
        Caller { connection, is_secured: false, calls }
    }
}

/// What a caller hears who makes more calls than can wait.
pub(super) fn too_many() -> Status {
    Status::resource_exhausted("too many calls from this address; call less often")
}

/// Lets a call through when it is its turn.
pub(super) async fn in_turn(mut request: Request, next: Next) -> Response {
    if let Some(Caller { connection, calls, .. }) = request.extensions().get().cloned() {
        // By this the services know from where they are called.
        request.extensions_mut().insert(connection);
        let wait = calls.lock().unwrap_or_else(PoisonError::into_inner).one_more(Instant::now(), 1);
        match wait {
            Some(Duration::ZERO) => {}
            Some(wait) => tokio::time::sleep(wait).await,
            None if request.method() == Method::POST => return too_many().into_http(),
            // Who asks for metrics or health knows nothing of gRPC's statuses.
            None => return (StatusCode::TOO_MANY_REQUESTS, too_many().message().to_owned()).into_response(),
        }
    }
    next.run(request).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_calls_too_often_waits_and_who_pauses_does_not() {
        let (mut calls, start) = (Calls::default(), Instant::now());
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
    fn all_connections_of_an_address_count_together_and_are_forgotten_with_the_last() {
        let callers = Callers::default();
        let from =
            |last: u8| TcpConnectInfo { local_addr: None, remote_addr: Some(([10, 0, 0, last], 1).into()) };
        let (one, again, other) = (callers.caller(from(1)), callers.caller(from(1)), callers.caller(from(2)));
        assert!(Arc::ptr_eq(&one.calls, &again.calls) && !Arc::ptr_eq(&one.calls, &other.calls));
        drop((one, again));
        let _third = callers.caller(from(3));
        assert_eq!(callers.0.lock().unwrap().len(), 2);
    }
}
