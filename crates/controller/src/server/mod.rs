//! A switch: the data path and its control connection under one port number.

mod jobs;
mod metrics;
mod service;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use fanin_protocol::control::{ConfigError, Registry, RegistryConfig};
use fanin_udp::{SHARDS_MAX, SwitchConfig, SwitchDriver};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::service::Routes;
use tonic::transport::server::TcpIncoming;

use self::jobs::Jobs;
use self::service::ControlService;
use crate::proto::control_server::ControlServer;

/// How often silence and overdue gatherings are looked for: a fraction of the shortest sensible timeout.
const TICK: Duration = Duration::from_millis(100);
/// How long a stopping switch waits for ranks to hear of it.
const FAREWELL: Duration = Duration::from_millis(500);
/// How long open connections may take to end.
const HANG_UP: Duration = Duration::from_millis(500);
/// Ports that are tried when any will do: a TCP port that is free may be taken for UDP.
const PORT_ATTEMPTS: usize = 16;
/// Below this, pools are cut to less than what a fast path needs (see `pool_slots`).
const RECEIVE_BUFFER_BYTES_MIN: usize = 4 << 20;
/// The largest message is a resume: 64 shards of 16384 slots, whose counts take up to five bytes each.
const MESSAGE_BYTES_MAX: usize = 6 << 20;

/// Cores for each shard: summing shares them with the kernel's network stack, and often with the training.
const CORES_A_SHARD: usize = 4;
/// Fewest shards where there are as many cores: one thread would be too large a piece of the work for the kernel to
/// balance two cores with. With 4 ranks on the same 2 cores, two shards are a tenth faster than one.
const SHARDS_AUTOMATIC_MIN: usize = 2;
/// Most shards that are chosen without a request: few workers have the rate to fill more.
const SHARDS_AUTOMATIC_MAX: usize = 8;

/// What a switch is told at its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchServerConfig {
    /// Address, and the port for TCP and UDP; 0 takes one that is free for both.
    pub listen: SocketAddr,
    /// Cores that sum, each with a socket and slots of its own.
    pub shards: usize,
    /// Slots of 256 elements in each shard, for all jobs together.
    pub pool_slots: u32,
    /// A rank that is silent for longer is expelled.
    pub heartbeat_timeout: Duration,
    /// A job whose ranks have not all joined is given up when they lose patience, and after this at the latest.
    pub join_timeout_max: Duration,
}

impl SwitchServerConfig {
    /// The usual limits, and one shard.
    #[must_use]
    pub fn new(listen: SocketAddr) -> Self {
        let registry = RegistryConfig::default();
        Self {
            listen,
            shards: 1,
            pool_slots: registry.pool_slots,
            heartbeat_timeout: registry.heartbeat_timeout,
            join_timeout_max: registry.join_timeout_max,
        }
    }

    /// As many shards as suit this machine's cores, 1 to 8.
    #[must_use]
    pub fn automatic_shards() -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        (cores / CORES_A_SHARD).clamp(SHARDS_AUTOMATIC_MIN.min(cores), SHARDS_AUTOMATIC_MAX)
    }
}

/// Why a switch did not start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Another process has the port.
    #[error(
        "{protocol} port {} of {} is in use, perhaps by another switch; stop that one (fanin status shows it), or listen \
         elsewhere (--listen ADDR:PORT)",
        address.port(), address.ip()
    )]
    PortInUse {
        /// The address.
        address: SocketAddr,
        /// TCP or UDP.
        protocol: &'static str,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address} ({protocol}): {cause}; is it an address of this machine?")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// TCP or UDP.
        protocol: &'static str,
        /// The operating system's answer.
        cause: io::Error,
    },
    /// A switch of so many shards cannot be.
    #[error("{0} shards: a switch has 1 to {SHARDS_MAX}")]
    Shards(usize),
    /// A limit is out of its range.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The operating system gave no threads.
    #[error("cannot start the control threads: {0}")]
    Runtime(io::Error),
}

/// A running switch. Dropping it stops it.
#[derive(Debug)]
pub struct SwitchServer {
    address: SocketAddr,
    jobs: Arc<Jobs>,
    hang_up: Option<oneshot::Sender<()>>,
    serving: Option<JoinHandle<()>>,
    runtime: Option<Runtime>,
}

impl SwitchServer {
    /// Binds both ports and starts. When this returns, workers can join.
    ///
    /// # Errors
    /// When the port is taken, the address is not ours, or a limit is out of range.
    pub fn start(config: SwitchServerConfig) -> Result<Self, ServerError> {
        let shards = u8::try_from(config.shards)
            .ok()
            .filter(|shards| (1..=SHARDS_MAX).contains(&usize::from(*shards)));
        let shards = shards.ok_or(ServerError::Shards(config.shards))?;
        let (listener, driver) = bind(config.listen, config.shards)?;
        let address = driver.local_addr();
        let limits = RegistryConfig {
            shards,
            pool_slots: config.pool_slots,
            receive_buffer_bytes: driver.receive_buffer_bytes(),
            heartbeat_timeout: config.heartbeat_timeout,
            join_timeout_max: config.join_timeout_max,
            ..RegistryConfig::default()
        };
        if limits.receive_buffer_bytes < RECEIVE_BUFFER_BYTES_MIN {
            tracing::warn!(
                granted_bytes = limits.receive_buffer_bytes,
                "the kernel grants small receive buffers, so pools will be small; raise net.core.rmem_max"
            );
        }
        // From the operating system, not from a seed: a restarted switch must not draw the ids of the one before.
        let registry = Registry::new(limits, Box::new(rand::random::<u32>))?;
        let events = driver.events().unwrap_or_else(|| std::sync::mpsc::channel().1);
        let jobs = Arc::new(Jobs::new(registry, driver, events));

        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("fanin-control")
            .enable_all()
            .build()
            .map_err(ServerError::Runtime)?;
        let (hang_up, hung_up) = oneshot::channel();
        let listener = runtime
            .block_on(async { tokio::net::TcpListener::from_std(listener) })
            .map_err(ServerError::Runtime)?;
        let serving = runtime.spawn(serve(listener, Arc::clone(&jobs), config.heartbeat_timeout, hung_up));
        let ticking = Arc::clone(&jobs);
        runtime.spawn(async move {
            let mut interval = tokio::time::interval(TICK);
            interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                interval.tick().await;
                ticking.tick();
            }
        });
        tracing::info!(%address, shards, pool_slots = config.pool_slots, "the switch listens");
        Ok(Self { address, jobs, hang_up: Some(hang_up), serving: Some(serving), runtime: Some(runtime) })
    }

    /// Where it listens, TCP and UDP.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Tells all ranks that the switch goes, and ends it. Must not be called from an asynchronous task.
    pub fn stop(mut self) {
        self.shut_down();
    }

    fn shut_down(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        self.jobs.stop();
        // The abort packets may be lost; a heartbeat says the same.
        let until = Instant::now() + FAREWELL;
        while Instant::now() < until && self.jobs.has_untold() {
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(self.hang_up.take());
        if let Some(serving) = self.serving.take() {
            let _ = runtime.block_on(async { tokio::time::timeout(HANG_UP, serving).await });
        }
        runtime.shutdown_timeout(HANG_UP);
        tracing::info!(address = %self.address, "the switch stopped");
    }
}

impl Drop for SwitchServer {
    fn drop(&mut self) {
        self.shut_down();
    }
}

/// Binds TCP, then UDP under the same number.
fn bind(listen: SocketAddr, shards: usize) -> Result<(TcpListener, SwitchDriver), ServerError> {
    let failed = |protocol, address| {
        move |cause: io::Error| match cause.kind() {
            io::ErrorKind::AddrInUse => ServerError::PortInUse { address, protocol },
            _ => ServerError::Bind { address, protocol, cause },
        }
    };
    let mut attempts = if listen.port() == 0 { PORT_ATTEMPTS } else { 1 };
    loop {
        attempts -= 1;
        let listener = TcpListener::bind(listen).map_err(failed("TCP", listen))?;
        let address = listener.local_addr().map_err(failed("TCP", listen))?;
        listener.set_nonblocking(true).map_err(failed("TCP", address))?;
        match SwitchDriver::bind(SwitchConfig { listen: address, shards }).map_err(failed("UDP", address)) {
            Err(ServerError::PortInUse { .. }) if attempts > 0 => {}
            Err(error) => return Err(error),
            Ok(driver) => return Ok((listener, driver)),
        }
    }
}

/// Serves gRPC and plain HTTP on one port until `hung_up` resolves.
///
/// A host that vanished while its rank waited for others sends no farewell: only an unanswered ping, after `silence` at most
/// twice, ends its call and gives its place back.
async fn serve(
    listener: tokio::net::TcpListener,
    jobs: Arc<Jobs>,
    silence: Duration,
    hung_up: oneshot::Receiver<()>,
) {
    let control = ControlServer::new(ControlService { jobs: Arc::clone(&jobs), instance: rand::random() })
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    let router = Routes::new(control)
        .into_axum_router()
        .route("/healthz", get(async || "ok\n"))
        .route("/metrics", get(async move || scrape(&jobs)));
    let served = tonic::transport::Server::builder()
        .accept_http1(true)
        .http2_keepalive_interval(Some(silence))
        .http2_keepalive_timeout(Some(silence))
        .add_routes(Routes::from(router))
        .serve_with_incoming_shutdown(TcpIncoming::from(listener).with_nodelay(Some(true)), async {
            let _ = hung_up.await;
        })
        .await;
    if let Err(error) = served {
        tracing::error!(%error, "the control connection ended");
    }
}

fn scrape(jobs: &Arc<Jobs>) -> impl IntoResponse + use<> {
    match metrics::text(jobs) {
        Ok(text) => (StatusCode::OK, [(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text),
        Err(error) => {
            (StatusCode::INTERNAL_SERVER_ERROR, [(header::CONTENT_TYPE, "text/plain")], error.to_string())
        }
    }
}
