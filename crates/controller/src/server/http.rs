//! One port number: UDP for the data path, TCP for control, metrics and health.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use axum::http::{StatusCode, header};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::IntoResponse;
use axum::routing::get;
use fanin_guests::{connections_max, expect_answers, guests};
use fanin_tls::Acceptor;
use fanin_udp::ThreadEnded;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::service::Routes;

use super::calls::{Callers, in_turn};
use super::door::door;
use super::secured::{HEALTH, METRICS, in_the_clear, secured};
use super::{ServerError, metrics};
use crate::proto::REPLY_BYTES_MAX;
use crate::proto::control_server::{Control, ControlServer};

/// How long open connections may take to end.
const HANG_UP: Duration = Duration::from_millis(500);
/// Ports that are tried when any will do: a TCP port that is free may be taken for UDP.
const PORT_ATTEMPTS: usize = 16;
/// The largest request is one to join that resumes a job: 64 shards of 16384 slots, whose counts take up to five bytes each.
pub(super) const JOIN_BYTES_MAX: usize = 6 << 20;
/// All other requests are short, and so is the rest of that one.
pub(super) const REQUEST_BYTES_MAX: usize = 64 << 10;
/// The call that may be longer.
pub(super) const JOIN: &str = "/fanin.v1.Control/Join";

/// The call that stays open, and says no more than who attends.
pub(super) const ATTEND: &str = "/fanin.v1.Control/Attend";
const ATTEND_BYTES_MAX: usize = 1 << 10;

/// Most connections at once: two for each rank that a switch can serve at any sensible size, one to ask how it fares.
const CONNECTIONS_MAX: usize = 4096;
/// And from one address: more than any machine has ranks.
const CONNECTIONS_OF_ONE_MAX: usize = 512;
/// What a connection may have sent before anybody has looked at it.
const WINDOW_BYTES: u32 = 256 << 10;
/// What is around a request: a few short lines.
const HEADERS_BYTES_MAX: u32 = 4 << 10;

/// Calls of one connection that are open at once: an ATP switch passes those of all ranks below it on, a stream and a question each.
pub(super) const CALLS_MAX: u32 = 2 * 64 * 256;

/// Calls of one connection that may be given up before this process has looked at them.
const RESETS_MAX: usize = 1024;

/// The metrics, or that they could not be written.
type Scraped = Result<String, std::fmt::Error>;

/// Control, metrics and health, served until it is dropped.
#[derive(Debug)]
pub(super) struct Served {
    hang_up: Option<oneshot::Sender<()>>,
    serving: Option<JoinHandle<()>>,
    runtime: Option<Runtime>,
}

impl Served {
    /// Starts to serve. `silence` is how long a caller's host may not be heard of, in whole seconds and at least two; `health` says
    /// whether the data path works.
    pub fn start<F: Future<Output = Scraped> + Send + 'static>(
        (listener, acceptor): (TcpListener, Acceptor),
        service: impl Control,
        silence: Duration,
        scrape: impl Fn() -> F + Clone + Send + Sync + 'static,
        health: impl Fn() -> Result<(), ThreadEnded> + Clone + Send + Sync + 'static,
    ) -> Result<Self, ServerError> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("fanin-control")
            .enable_all()
            .build()
            .map_err(ServerError::Runtime)?;
        // What is accepted from a listening socket has its options (tcp(7)).
        expect_answers(&listener, silence).map_err(ServerError::Runtime)?;
        let (hang_up, hung_up) = oneshot::channel();
        let listener = runtime
            .block_on(async { tokio::net::TcpListener::from_std(listener) })
            .map_err(ServerError::Runtime)?;
        let serving = runtime.spawn(serve((listener, acceptor), service, scrape, health, hung_up));
        Ok(Self { hang_up: Some(hang_up), serving: Some(serving), runtime: Some(runtime) })
    }

    /// Does something again and again while it is served.
    pub fn every(&self, period: Duration, task: impl Fn() + Send + 'static) {
        let Some(runtime) = &self.runtime else { return };
        runtime.spawn(async move {
            let mut interval = tokio::time::interval(period);
            interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                interval.tick().await;
                task();
            }
        });
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        drop(self.hang_up.take());
        if let Some(serving) = self.serving.take() {
            let _ = runtime.block_on(async { tokio::time::timeout(HANG_UP, serving).await });
        }
        runtime.shutdown_timeout(HANG_UP);
    }
}

/// Binds TCP, then UDP under the same number.
pub(super) fn bind<D>(
    listen: SocketAddr,
    data_path: impl Fn(SocketAddr) -> io::Result<D>,
) -> Result<(TcpListener, D), ServerError> {
    let failed = |protocol, address| {
        move |cause: io::Error| match cause.kind() {
            io::ErrorKind::AddrInUse => ServerError::PortInUse { address, protocol },
            // The protocol has no such machine.
            io::ErrorKind::InvalidInput if cause.get_ref().is_some() => {
                ServerError::Machine(cause.to_string())
            }
            _ => ServerError::Bind { address, protocol, cause },
        }
    };
    let mut attempts = if listen.port() == 0 { PORT_ATTEMPTS } else { 1 };
    loop {
        attempts -= 1;
        let listener = TcpListener::bind(listen).map_err(failed("TCP", listen))?;
        let address = listener.local_addr().map_err(failed("TCP", listen))?;
        listener.set_nonblocking(true).map_err(failed("TCP", address))?;
        match data_path(address).map_err(failed("UDP", address)) {
            Err(ServerError::PortInUse { .. }) if attempts > 0 => {}
            Err(error) => return Err(error),
            Ok(data_path) => return Ok((listener, data_path)),
        }
    }
}

/// Serves gRPC behind TLS and plain HTTP on one port until `hung_up` resolves.
async fn serve<F: Future<Output = Scraped> + Send + 'static>(
    (listener, acceptor): (tokio::net::TcpListener, Acceptor),
    service: impl Control,
    scrape: impl Fn() -> F + Clone + Send + Sync + 'static,
    health: impl Fn() -> Result<(), ThreadEnded> + Clone + Send + Sync + 'static,
    hung_up: oneshot::Receiver<()>,
) {
    let service = Arc::new(service);
    let taking = |bytes| {
        ControlServer::from_arc(Arc::clone(&service))
            .max_decoding_message_size(bytes)
            .max_encoding_message_size(REPLY_BYTES_MAX)
    };
    let callers = Callers::default();
    let router = Routes::new(taking(REQUEST_BYTES_MAX))
        .into_axum_router()
        .route_service(JOIN, taking(JOIN_BYTES_MAX))
        .route_service(ATTEND, taking(ATTEND_BYTES_MAX))
        .route(HEALTH, get(async move || told(health())))
        .route(METRICS, get(async move || scraped(scrape().await)))
        .layer(from_fn(in_the_clear))
        .layer(from_fn_with_state(callers.clone(), in_turn));
    let connections = connections_max(CONNECTIONS_MAX);
    let of_one = CONNECTIONS_OF_ONE_MAX.min(connections.div_ceil(2));
    let guests = guests(door(listener), connections, of_one);
    let served = tonic::transport::Server::builder()
        .accept_http1(true)
        .max_concurrent_streams(CALLS_MAX)
        // The sessions of a process share a connection, and give their calls up together where this process stands still.
        .http2_max_pending_accept_reset_streams(Some(RESETS_MAX))
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .http2_max_header_list_size(HEADERS_BYTES_MAX)
        .add_routes(Routes::from(router))
        .serve_with_incoming_shutdown(secured(guests, acceptor, callers), async {
            let _ = hung_up.await;
        })
        .await;
    if let Err(error) = served {
        tracing::error!(%error, "the control connection ended");
    }
}

fn told(health: Result<(), ThreadEnded>) -> (StatusCode, String) {
    match health {
        Ok(()) => (StatusCode::OK, "ok\n".into()),
        Err(ended) => (StatusCode::SERVICE_UNAVAILABLE, format!("{ended}\n")),
    }
}

fn scraped(text: Scraped) -> impl IntoResponse {
    match text {
        Ok(text) => (StatusCode::OK, [(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text),
        Err(error) => {
            (StatusCode::INTERNAL_SERVER_ERROR, [(header::CONTENT_TYPE, "text/plain")], error.to_string())
        }
    }
}
