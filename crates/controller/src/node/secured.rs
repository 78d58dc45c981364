//! The connections of a switch behind TLS; in the clear one may ask how the switch fares, and
//! nothing else.

use std::io;

use axum::extract::Request;
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use fanin_limits::{Connection, Peer};
use fanin_tls::{Acceptor, HANDSHAKE};
use fanin_udp::NotInherited;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::Status;
use tonic::transport::server::Connected;

use super::address_of;
use super::limits::{CallLimits, GREETING, HANDSHAKE_COUNTS};
use crate::control_channel::Guarded;
use crate::page::PATHS;

/// What dashboards ask for, who have no certificate to look at.
pub(super) const METRICS: &str = "/metrics";
pub(super) const HEALTH: &str = "/healthz";
/// Where all calls are.
const CONTROL: &str = "/fanin.v1.Control/";
/// What somebody hears who asks for more in the clear.
const SPEAK_TLS: &str = "control is encrypted here: install the same version of fanin at both ends (in the clear only the page at /, \
                         /metrics and /healthz are answered)";

/// Who calls, as each request of a connection carries it.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    pub peer: Peer,
    /// Whether nobody listens.
    pub is_secured: bool,
}

/// A connection, whether or not behind TLS.
pub(super) trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Wire for S {}

/// A connection, and who it is of.
pub(super) type Secured = Guarded<Caller, Box<dyn Wire>>;

impl Connected for Secured {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        self.guard.clone()
    }
}

/// The connections that have said what they are, in the order in which they did: nobody waits for
/// others.
pub(super) fn secured(
    incoming: impl Stream<Item = io::Result<Connection>> + Send + 'static,
    acceptor: Acceptor,
    calls: CallLimits,
) -> impl Stream<Item = io::Result<Secured>> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        tokio::pin!(incoming);
        loop {
            let accepted = tokio::select! {
                () = sender.closed() => return,
                accepted = incoming.next() => accepted,
            };
            let (sender, acceptor, calls) = (sender.clone(), acceptor.clone(), calls.clone());
            match accepted {
                None => return,
                // Whoever serves may have ended.
                Some(Err(error)) => drop(sender.send(Err(error)).await),
                Some(Ok(connection)) => drop(tokio::spawn(async move {
                    let peer = connection.peer().connection.remote_addr();
                    match tokio::time::timeout(GREETING, greet(connection, &acceptor, &calls)).await {
                        Ok(Ok(secured)) => drop(sender.send(Ok(secured)).await),
                        Ok(Err(error)) => tracing::debug!(?peer, %error, "a connection is refused"),
                        Err(_) => tracing::debug!(?peer, "a connection says nothing"),
                    }
                })),
            }
        }
    });
    ReceiverStream::new(receiver)
}

async fn greet(connection: Connection, acceptor: &Acceptor, calls: &CallLimits) -> io::Result<Secured> {
    let mut caller = Caller { peer: connection.peer().clone(), is_secured: false };
    // A helper that outlives this process would keep the connection open, and its peer waiting.
    let guard = NotInherited::new(&connection);
    let mut guarded = Guarded::new(connection, guard);
    let mut first = [0];
    if guarded.stream.peek(&mut first).await? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if first != [HANDSHAKE] {
        return Ok(Guarded::new(Box::new(guarded), caller));
    }
    let address = address_of(caller.peer.connection.remote_addr());
    if !calls.turn(address, HANDSHAKE_COUNTS).await {
        return Err(io::ErrorKind::ResourceBusy.into());
    }
    let stream = acceptor.accept(guarded).await?;
    caller.is_secured = true;
    Ok(Guarded::new(Box::new(stream), caller))
}

/// Refuses what is asked in the clear and is not for everybody.
pub(super) async fn in_the_clear(request: Request, next: Next) -> Response {
    let is_secured = request.extensions().get().is_some_and(|caller: &Caller| caller.is_secured);
    // What nobody has here is nobody's secret: who takes this for another kind of service hears so.
    let is_call = request.method() == Method::POST;
    let is_unknown = is_call && !request.uri().path().starts_with(CONTROL);
    let path = request.uri().path();
    if is_secured || is_unknown || [METRICS, HEALTH].contains(&path) || PATHS.contains(&path) {
        return next.run(request).await;
    }
    // Who asks for a page knows nothing of gRPC's statuses.
    if is_call {
        return Status::failed_precondition(SPEAK_TLS).into_http();
    }
    (StatusCode::UPGRADE_REQUIRED, SPEAK_TLS).into_response()
}
