//! The control connection's socket, behind TLS: of this process alone, and not of those that it
//! forks.

use std::collections::HashMap;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use fanin_limits::expect_answers;
use fanin_tls::{ClientStream, Fingerprint, Trust, Untrusted};
use fanin_udp::NotInherited;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tonic::codegen::{StdError, http};
use tonic::transport::{Channel, Endpoint};

use super::{GREETING, Guarded};
use crate::proto::REPLY_BYTES_MAX;
use crate::proto::control_client::ControlClient;

/// How long the switch's machine may not answer before another connection is tried.
const SILENCE: Duration = Duration::from_secs(2);
/// How long a connection may be under way before another one is begun beside it. The kernel begins
/// it again after a second, and then later and later: on a link that was cut for a moment the
/// switch would have taken the rank for dead by then.
const BESIDE: Duration = Duration::from_millis(250);
/// Connections that are under way at once, at most: the oldest makes room for another one.
const UNDER_WAY_MAX: usize = 16;

/// The calls of the switch at `address`, which `trust` knows as `switch`, `host:port`. It connects
/// with the first call, and again when the connection broke; each connection is judged anew.
pub(super) fn calls(address: SocketAddr, switch: &str, trust: &Trust) -> ControlClient<Channel> {
    let (switch, trust) = (switch.to_owned(), trust.clone());
    let connector = tower::service_fn(move |_: http::Uri| {
        let (switch, trust) = (switch.clone(), trust.clone());
        async move { connect(address, &switch, &trust).await }
    });
    // A name that stands in requests alone.
    let endpoint = Endpoint::from_static("http://switch").connect_timeout(GREETING);
    ControlClient::new(endpoint.connect_with_connector_lazy(connector))
        .max_decoding_message_size(REPLY_BYTES_MAX)
}

/// The connections of a process's sessions to services whose keys were told: sessions share them,
/// as a program may have hundreds of groups.
#[derive(Debug, Default)]
pub(crate) struct Lines(Mutex<HashMap<(SocketAddr, Fingerprint), Weak<Line>>>);

/// Such a connection, as long as some session has it.
#[derive(Debug)]
pub(crate) struct Line(ControlClient<Channel>);

impl Lines {
    /// As [`calls`], over the connection that another session has to the service, if one has.
    pub fn calls(
        &self,
        address: SocketAddr,
        switch: &str,
        trust: &Trust,
    ) -> (ControlClient<Channel>, Option<Arc<Line>>) {
        // A key that is believed at the first connection has to be seen for each group.
        let Some(told) = trust.told(switch) else { return (calls(address, switch, trust), None) };
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.retain(|_, line| line.strong_count() > 0);
        let known = lines.get(&(address, told)).and_then(Weak::upgrade);
        let line = known.unwrap_or_else(|| Arc::new(Line(calls(address, switch, trust))));
        lines.insert((address, told), Arc::downgrade(&line));
        (line.0.clone(), Some(line))
    }
}

async fn connect(
    address: SocketAddr,
    switch: &str,
    trust: &Trust,
) -> Result<TokioIo<ClientStream<Guarded<NotInherited>>>, StdError> {
    let stream = first(BESIDE, || TcpStream::connect(address)).await?;
    stream.set_nodelay(true)?;
    expect_answers(&stream, SILENCE)?;
    let guard = NotInherited::new(&stream);
    match trust.connect(switch, Guarded::new(stream, guard)).await {
        Ok(stream) => Ok(TokioIo::new(stream)),
        // As where it breaks before or after.
        Err(Untrusted::Io(error)) => Err(error.into()),
        Err(untrusted) => Err(untrusted.into()),
    }
}

/// What the first of several attempts comes to, of which one more begins after each `pause`.
async fn first<T, F>(pause: Duration, attempt: impl Fn() -> F) -> io::Result<T>
where
    T: Send + 'static,
    F: Future<Output = io::Result<T>> + Send + 'static,
{
    let (mut attempts, mut under_way) = (JoinSet::new(), VecDeque::new());
    loop {
        under_way.push_back(attempts.spawn(attempt()));
        if under_way.len() > UNDER_WAY_MAX
            && let Some(oldest) = under_way.pop_front()
        {
            oldest.abort();
        }
        let pause = sleep(pause);
        tokio::pin!(pause);
        loop {
            tokio::select! {
                Some(ended) = attempts.join_next() => match ended {
                    Ok(ended) => return ended,
                    // It made room.
                    Err(error) if error.is_cancelled() => {}
                    Err(error) => return Err(io::Error::other(error)),
                },
                () = &mut pause => break,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    const AT_ONCE: Duration = Duration::from_millis(1);

    #[tokio::test]
    async fn an_attempt_that_gets_no_answer_does_not_keep_the_next_one_waiting() {
        let begun = AtomicU32::new(0);
        // As on a link that is cut when the first three begin.
        let attempt = || {
            let number = begun.fetch_add(1, Ordering::Relaxed);
            async move {
                if number < 3 {
                    std::future::pending::<()>().await;
                }
                Ok(number)
            }
        };
        assert_eq!(first(AT_ONCE, attempt).await.expect("connected"), 3);
    }

    #[tokio::test]
    async fn a_refusal_is_told_at_once() {
        let refused = || async { Err::<(), _>(io::ErrorKind::ConnectionRefused.into()) };
        let refused = first(Duration::MAX, refused).await;
        assert_eq!(refused.expect_err("refused").kind(), io::ErrorKind::ConnectionRefused);
    }

    #[tokio::test]
    async fn attempts_go_on_however_long_none_is_answered_and_the_oldest_are_given_up() {
        let (begun, living) = (AtomicU32::new(0), Arc::new(()));
        let attempt = || {
            let (number, alive) = (begun.fetch_add(1, Ordering::Relaxed), Arc::clone(&living));
            async move {
                if number < 3 * UNDER_WAY_MAX as u32 {
                    std::future::pending::<()>().await;
                }
                Ok(Arc::strong_count(&alive))
            }
        };
        // Those under way, the one that made room just now, and the test's own.
        assert!(first(AT_ONCE, attempt).await.expect("connected") <= UNDER_WAY_MAX + 2);
    }
}
