//! A switch's side of control: it admits ranks to jobs, tells them how their jobs are, and answers
//! people who ask.
//!
//! A node is one of two. A [`SwitchServer`] is the root of its jobs: it carries out what is decided
//! (`jobs`), and keeps what ranks report (`reports`) and say to each other before they join
//! (`meetings`). A [`RackServer`] is a relay: it passes calls on to its upstream, and keeps the way
//! of each job that goes through it (`routes`). Both answer the same calls (`service`, `relay`) on
//! one port (`http`), behind TLS (`secured`), and let no caller take all of what they have
//! (`limits`).
//!
//! Deliberately absent: the decisions, which are `fanin_protocol::control`'s; the sums, which the
//! data path has; and the other end of each call, which is `session`'s.

mod gauges;
mod http;
mod jobs;
mod limits;
mod meetings;
mod metrics;
mod relay;
mod relay_metrics;
mod reports;
mod routes;
mod secured;
mod service;
mod snapshots;
mod task_queue;
mod work;

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fanin_protocol::control::{ConfigError, Protocol, Registry, RegistryConfig};
use fanin_tls::{Acceptor, SetupError};
use fanin_udp::{Alone, DataPath, HostThreads, OnSockets, SHARDS_MAX, Serving};

use self::http::Served;
use self::jobs::Jobs;
use self::service::ControlService;
use crate::error::SessionError;
use crate::page::Token;
use crate::protocols;

pub use self::relay::{RackServer, RackServerConfig};

/// How often silence and overdue gatherings are looked for: a fraction of the shortest sensible
/// timeout.
const TICK: Duration = Duration::from_millis(100);
/// How long a stopping switch waits for ranks to hear of it.
const FAREWELL: Duration = Duration::from_millis(500);
/// Below this, pools are cut to less than what a fast path needs (see `pool_units`).
const RECEIVE_BUFFER_BYTES_MIN: usize = 4 << 20;

/// Cores for each shard: summing shares them with the kernel's network stack, and often with the
/// training.
const CORES_A_SHARD: usize = 4;
/// Fewest shards where there are as many cores: one thread would be too large a piece of the work
/// for the kernel to balance two cores with. With 4 ranks on the same 2 cores, two shards are a
/// tenth faster than one.
const SHARDS_AUTOMATIC_MIN: usize = 2;
/// Most shards that are chosen without a request: few workers have the rate to fill more.
const SHARDS_AUTOMATIC_MAX: usize = 8;

/// What a switch is told at its start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SwitchServerConfig {
    /// Address, and the port for TCP and UDP; 0 takes one that is free for both.
    pub listen: SocketAddr,
    /// How jobs are summed. What can share its port is served as well.
    pub protocol: &'static dyn OnSockets,
    /// Cores that sum, each with a socket and slots of its own.
    pub shards: usize,
    /// Memory in each shard, for all jobs together, in units of 256 elements.
    pub pool_units: u32,
    /// A rank that is silent for longer is expelled.
    pub heartbeat_timeout: Duration,
    /// A job whose ranks have not all joined is given up when they lose patience, and after this at
    /// the latest.
    pub join_timeout_max: Duration,
    /// What its link carries in each direction, in bits a second; else what the interface tells
    /// through which it is asked.
    pub rate_bps: Option<u64>,
    /// What callers of other machines show to see its page; without one they do not.
    pub page_token: Option<Token>,
}

impl SwitchServerConfig {
    /// The usual limits and protocol, and one shard.
    #[must_use]
    pub fn new(listen: SocketAddr) -> Self {
        let registry = RegistryConfig::default();
        Self {
            listen,
            protocol: protocols::usual(),
            shards: 1,
            pool_units: registry.pool_units,
            heartbeat_timeout: registry.heartbeat_timeout,
            join_timeout_max: registry.join_timeout_max,
            rate_bps: None,
            page_token: None,
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
    /// The protocol has no such switch.
    #[error("{0}")]
    Machine(String),
    /// The upstream's address is not one.
    #[error("--upstream: {0}")]
    Upstream(SessionError),
    /// It has no key.
    #[error(transparent)]
    Tls(#[from] SetupError),
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
    served: Option<Served>,
}

impl SwitchServer {
    /// Binds both ports and starts, under the identity of this process. When this returns, workers
    /// can join.
    ///
    /// # Errors
    /// When the port is taken, the address is not ours, or a limit is out of range.
    pub fn start(config: SwitchServerConfig) -> Result<Self, ServerError> {
        Self::start_behind(config, Acceptor::of_process()?)
    }

    /// As [`Self::start`], for those whom `acceptor` takes.
    ///
    /// # Errors
    /// As there.
    pub fn start_behind(config: SwitchServerConfig, acceptor: Acceptor) -> Result<Self, ServerError> {
        let shards = u8::try_from(config.shards)
            .ok()
            .filter(|shards| (1..=SHARDS_MAX).contains(&usize::from(*shards)));
        let shards = shards.ok_or(ServerError::Shards(config.shards))?;
        // One that is in no list is served alone.
        let alone = Alone(config.protocol);
        let served: &dyn Serving = protocols::served(config.protocol).map_or(&alone, |served| served);
        let (listener, driver) = http::bind(config.listen, |listen| served.root(listen, config.shards))?;
        Self::serve(config, shards, &served.protocols(), (listener, acceptor), driver)
    }

    fn serve(
        config: SwitchServerConfig,
        shards: u8,
        protocols: &[&'static dyn OnSockets],
        behind: (TcpListener, Acceptor),
        driver: Arc<dyn DataPath>,
    ) -> Result<Self, ServerError> {
        let address = driver.local_addr();
        let limits = RegistryConfig {
            shards,
            pool_units: config.pool_units,
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
        // From the operating system, not from a seed: a restarted switch must not draw the ids of
        // the one before, and nobody guess keys.
        let protocols = protocols.iter().map(|protocol| *protocol as &dyn Protocol).collect();
        let registry = Registry::new(limits, protocols, Box::new(rand::random::<u64>))?;
        let jobs = Arc::new(Jobs::new(registry, driver).map_err(ServerError::Runtime)?);
        let service = ControlService {
            jobs: Arc::clone(&jobs),
            instance: rand::random(),
            rate_bps: config.rate_bps,
            gauges: Arc::default(),
        };
        let (scraped, asked) = (Arc::clone(&jobs), Arc::clone(&jobs));
        let key = behind.1.fingerprint();
        let served = Served::start(
            behind,
            service,
            config.page_token,
            config.heartbeat_timeout,
            move |named| metrics::text(Arc::clone(&scraped), named),
            move || asked.health(),
        )?;
        let ticking = Arc::clone(&jobs);
        served.every(TICK, move || ticking.tick());
        // The command says it on standard output.
        tracing::debug!(
            %address,
            protocol = config.protocol.name(),
            shards,
            pool_units = config.pool_units,
            %key,
            "the switch listens"
        );
        Ok(Self { address, jobs, served: Some(served) })
    }

    /// Where it listens, TCP and UDP.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// The threads of its data path, for ranks of this process.
    #[must_use]
    pub fn threads(&self) -> HostThreads {
        self.jobs.driver.threads()
    }

    /// Whether nobody is in any job, nor waits for one.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.jobs.is_idle()
    }

    /// Tells all ranks that the switch goes, and ends it. Must not be called from an asynchronous
    /// task.
    pub fn stop(mut self) {
        self.shut_down();
    }

    fn shut_down(&mut self) {
        let Some(served) = self.served.take() else { return };
        self.jobs.stop();
        // The abort packets may be lost; a heartbeat says the same.
        let until = Instant::now() + FAREWELL;
        while Instant::now() < until && self.jobs.has_untold() {
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(served);
        tracing::info!(address = %self.address, "the switch stopped");
    }
}

impl Drop for SwitchServer {
    fn drop(&mut self) {
        self.shut_down();
    }
}

/// Locks, also after a panic: one in one call must not end all others, and what is locked here is
/// consistent between its methods.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The address for which a caller counts.
fn address_of(peer: Option<SocketAddr>) -> IpAddr {
    peer.map_or(IpAddr::from([0; 4]), |peer| peer.ip())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use fanin_protocol::control::Agreed;

    use super::*;
    use crate::control_channel::control_calls;
    use crate::proto::{HeartbeatRequest, JoinRequest, join_reply::Outcome};

    fn healthz(address: SocketAddr) -> String {
        let mut connection = std::net::TcpStream::connect(address).expect("a switch");
        connection
            .write_all(b"GET /healthz HTTP/1.1\r\nHost: switch\r\nConnection: close\r\n\r\n")
            .expect("sent");
        let mut answer = String::new();
        connection.read_to_string(&mut answer).expect("an answer");
        answer
    }

    #[test]
    fn a_thread_that_panics_is_named_to_who_asks_for_health_and_to_the_ranks() {
        let config = SwitchServerConfig::new(([127, 0, 0, 1], 0).into());
        let usual = protocols::usual();
        let (listener, driver) =
            http::bind(config.listen, |listen| usual.root(listen, 1)).expect("a free port");
        let behind = (listener, Acceptor::of_process().expect("a key"));
        let server =
            SwitchServer::serve(config, 1, &[usual], behind, Arc::clone(&driver)).expect("it starts");
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let mut client =
            runtime.block_on(async { control_calls(server.address(), &fanin_tls::Trust::default()) });
        let join = |rank| JoinRequest {
            job: "job".into(),
            rank,
            world_size: 1,
            wire_version: fanin_wire::VERSION.into(),
            mtu_bytes: 1500,
            patience_ms: 1000,
            protocol: "switchml".into(),
            settings: Agreed::default().values().into_iter().map(Into::into).collect(),
            ..JoinRequest::default()
        };
        let reply = runtime.block_on(client.join(join(0))).expect("an answer").into_inner();
        let Some(Outcome::Admission(admission)) = reply.outcome else { panic!("{reply:?}") };
        let key = crate::convert::key(&admission.key).expect("a key");
        let secret = key.secret_of(fanin_wire::Rank(0));
        let beat = HeartbeatRequest { job_id: admission.job_id, secret, ..HeartbeatRequest::default() };
        runtime.block_on(client.heartbeat(beat.clone())).expect("alive");
        assert!(healthz(server.address()).ends_with("\r\n\r\nok\n"));

        driver.occupy(Arc::new(|| panic!("on purpose")));
        while driver.health().is_ok() {
            std::thread::yield_now();
        }
        let answer = healthz(server.address());
        assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("fanin-switch-0"), "{answer}");
        for told in [
            runtime.block_on(client.heartbeat(beat)).map(drop).expect_err("no heartbeat"),
            runtime.block_on(client.join(join(0))).map(drop).expect_err("no admission"),
        ] {
            assert!(told.message().contains("fanin-switch-0"), "{told}");
        }
    }
}
