//! One port number: UDP for the data path, TCP for control, metrics, health and the page.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::IntoResponse;
use axum::routing::get;
use fanin_limits::expect_answers;
use fanin_tls::Acceptor;
use fanin_udp::ThreadEnded;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::service::Routes;
use tonic::transport::server::TcpConnectInfo;
use tonic::{Request, Response};

use super::limits::{
    self, ATTEND, ATTEND_BYTES_MAX, CallLimits, JOIN, JOIN_BYTES_MAX, REQUEST_BYTES_MAX, in_turn,
};
use super::secured::{HEALTH, METRICS, in_the_clear, secured};
use super::{ServerError, metrics};
use crate::page::{self, Answer, Answers, Named, Token, Watch};
use crate::proto::control_server::{Control, ControlServer};
use crate::proto::{REPLY_BYTES_MAX, StatusRequest};

/// How long open connections may take to end.
const HANG_UP: Duration = Duration::from_millis(500);
/// Ports that are tried when any will do: a TCP port that is free may be taken for UDP.
const PORT_ATTEMPTS: usize = 16;

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
    /// Starts to serve. `silence` is how long a caller's host may not be heard of, in whole seconds
    /// and at least two; `health` says whether the data path works.
    pub fn start<F: Future<Output = Scraped> + Send + 'static>(
        (listener, acceptor): (TcpListener, Acceptor),
        service: impl Control,
        page_token: Option<Token>,
        silence: Duration,
        scrape: impl Fn(Named) -> F + Clone + Send + Sync + 'static,
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
        let service = Arc::new(service);
        let address = listener.local_addr().map_err(ServerError::Runtime)?;
        let name = shown_as(address);
        let watch = Watch::new(format!("switch {name}"));
        runtime.spawn(watch.clone().run(Itself { address, name, service: Arc::clone(&service) }));
        let seen = watch.clone();
        let scrape = move || scrape(seen.named());
        let page = page::answers(watch, page_token);
        let serving = runtime.spawn(serve((listener, acceptor), service, page, scrape, health, hung_up));
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

/// What a switch answers for its own page.
struct Itself<C> {
    address: SocketAddr,
    /// Its address for people.
    name: String,
    service: Arc<C>,
}

impl<C: Control> Answers for Itself<C> {
    fn ask(&self, work: Duration) -> Pin<Box<dyn Future<Output = Vec<Answer>> + Send + '_>> {
        let work_ms = u32::try_from(work.as_millis()).unwrap_or(u32::MAX);
        let mut question = Request::new(StatusRequest { work_ms, ..StatusRequest::default() });
        let here = TcpConnectInfo { local_addr: Some(self.address), remote_addr: None };
        question.extensions_mut().insert(here);
        Box::pin(async {
            let reply = self.service.status(question).await;
            let reply = reply.map(Response::into_inner).map_err(|status| status.message().to_owned());
            vec![Answer { address: self.name.clone(), ago: Duration::ZERO, reply }]
        })
    }
}

/// An address that others can use: a machine's name in place of all of its addresses.
fn shown_as(address: SocketAddr) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    match host.as_deref().map(str::trim) {
        Some(host) if address.ip().is_unspecified() && !host.is_empty() => {
            format!("{host}:{}", address.port())
        }
        _ => address.to_string(),
    }
}

/// Serves gRPC behind TLS and plain HTTP on one port until `hung_up` resolves.
async fn serve<F: Future<Output = Scraped> + Send + 'static>(
    (listener, acceptor): (tokio::net::TcpListener, Acceptor),
    service: Arc<impl Control>,
    page: Router,
    scrape: impl Fn() -> F + Clone + Send + Sync + 'static,
    health: impl Fn() -> Result<(), ThreadEnded> + Clone + Send + Sync + 'static,
    hung_up: oneshot::Receiver<()>,
) {
    let taking = |bytes| {
        ControlServer::from_arc(Arc::clone(&service))
            .max_decoding_message_size(bytes)
            .max_encoding_message_size(REPLY_BYTES_MAX)
    };
    let calls = CallLimits::default();
    let router = Routes::new(taking(REQUEST_BYTES_MAX))
        .into_axum_router()
        .route_service(JOIN, taking(JOIN_BYTES_MAX))
        .route_service(ATTEND, taking(ATTEND_BYTES_MAX))
        .route(HEALTH, get(async move || health_answer(health())))
        .route(METRICS, get(async move || metrics_answer(scrape().await)))
        .merge(page)
        .layer(from_fn(in_the_clear))
        .layer(from_fn_with_state(calls.clone(), in_turn));
    let connections = limits::connections(listener);
    let served = limits::server()
        .add_routes(Routes::from(router))
        .serve_with_incoming_shutdown(secured(connections, acceptor, calls), async {
            let _ = hung_up.await;
        })
        .await;
    if let Err(error) = served {
        tracing::error!(%error, "the control connection ended");
    }
}

fn health_answer(health: Result<(), ThreadEnded>) -> (StatusCode, String) {
    match health {
        Ok(()) => (StatusCode::OK, "ok\n".into()),
        Err(ended) => (StatusCode::SERVICE_UNAVAILABLE, format!("{ended}\n")),
    }
}

fn metrics_answer(text: Scraped) -> impl IntoResponse {
    match text {
        Ok(text) => (StatusCode::OK, [(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text),
        Err(error) => {
            (StatusCode::INTERNAL_SERVER_ERROR, [(header::CONTENT_TYPE, "text/plain")], error.to_string())
        }
    }
}
