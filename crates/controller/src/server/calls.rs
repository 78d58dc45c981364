//! How often somebody may call: who calls more often waits, so that others are answered.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use tonic::transport::server::TcpConnectInfo;

/// Calls that one address may make in a second, for long: heartbeats of 64 ranks in as many jobs as run, for a quarter.
const CALLS_A_SECOND: u32 = 4096;
/// And at once, when it has made none for a while: two for each of these ranks as their jobs begin.
const CALLS_AT_ONCE: u32 = 8192;

/// The calls of one address.
#[derive(Debug, Default)]
struct Calls {
    /// When as many would have been made, at the rate that is allowed.
    due: Option<Instant>,
}

impl Calls {
    /// One more. Returns how long it has to wait.
    fn one_more(&mut self, now: Instant) -> Duration {
        let each = Duration::from_secs(1) / CALLS_A_SECOND;
        let due = self.due.map_or(now, |due| due.max(now)) + each;
        self.due = Some(due);
        (due - now).saturating_sub(each * CALLS_AT_ONCE)
    }
}

/// The calls of all who are connected.
#[derive(Clone, Debug, Default)]
pub(super) struct Callers(Arc<Mutex<HashMap<IpAddr, Weak<Mutex<Calls>>>>>);

/// Who calls, as each of its requests carries it.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    pub connection: TcpConnectInfo,
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
        Caller { connection, calls }
    }
}

/// Lets a call through when it is its turn.
pub(super) async fn in_turn(mut request: Request, next: Next) -> Response {
    if let Some(Caller { connection, calls }) = request.extensions().get().cloned() {
        // By this the services know from where they are called.
        request.extensions_mut().insert(connection);
        let wait = calls.lock().unwrap_or_else(PoisonError::into_inner).one_more(Instant::now());
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
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
            assert_eq!(calls.one_more(start), Duration::ZERO);
        }
        let second = Duration::from_secs(1);
        let waits: Vec<_> = (0..CALLS_A_SECOND).map(|_| calls.one_more(start)).collect();
        assert!(waits.is_sorted() && waits[0] > Duration::ZERO);
        let last = waits[waits.len() - 1];
        assert!(last > second * 99 / 100 && last <= second, "{last:?}");
        let burst = second * CALLS_AT_ONCE / CALLS_A_SECOND;
        assert_eq!(calls.one_more(start + second + burst), Duration::ZERO);
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
