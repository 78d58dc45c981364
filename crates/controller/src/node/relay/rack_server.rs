//! A switch with an upstream, as it is started and stopped.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fanin_protocol::control::{Memory, RegistryConfig};
use fanin_tls::{Acceptor, Trust};
use fanin_udp::{OnSockets, SHARDS_MAX};
use tokio::sync::watch;

use super::super::http::{self, Served};
use super::super::limits::WaitingJobs;
use super::super::relay_metrics::text;
use super::super::routes::Routes;
use super::super::snapshots::Snapshots;
use super::super::task_queue::TaskQueue;
use super::super::{ServerError, lock};
use super::{Relay, RelayFigures, Service, Upstream};
use crate::control_channel::with_port;
use crate::page::Token;

/// Aggregators unless told otherwise: eight jobs with the window of a 10 Gbit/s link.
const AGGREGATORS_DEFAULT: u32 = 4096;
/// How often jobs are looked for that are over.
const TICK: Duration = Duration::from_secs(1);
/// How long a caller's host may not be heard of.
const SILENCE: Duration = Duration::from_secs(5);

/// What a switch with an upstream is told at its start.
#[derive(Clone, Debug, PartialEq)]
pub struct RackServerConfig {
    /// Address, and the port for TCP and UDP; 0 takes one that is free for both.
    pub listen: SocketAddr,
    /// The next switch towards the root, or the root, as `host:port`; the port is 4800 where it is
    /// missing.
    pub upstream: String,
    /// How the jobs are summed that go through it: as at the root.
    pub protocol: &'static dyn OnSockets,
    /// Its cores and memory, for all jobs together.
    pub memory: Memory,
    /// What its link to the upstream carries, in bits a second: for plans, and for the ranks'
    /// windows. `None` leaves that to the interface.
    pub rate_bps: Option<u64>,
    /// What callers of other machines show to see its page; without one they do not.
    pub page_token: Option<Token>,
}

impl RackServerConfig {
    /// A switch with the usual memory, and one shard.
    #[must_use]
    pub fn new(protocol: &'static dyn OnSockets, listen: SocketAddr, upstream: impl Into<String>) -> Self {
        let pool_units = RegistryConfig::default().pool_units;
        let memory = Memory { shards: 1, pool_units, aggregators: AGGREGATORS_DEFAULT };
        Self { listen, upstream: upstream.into(), protocol, memory, rate_bps: None, page_token: None }
    }
}

/// A running switch with an upstream. Dropping it stops it: its jobs wait for it as for one that
/// crashed.
#[derive(Debug)]
pub struct RackServer {
    address: SocketAddr,
    pub(super) relay: Arc<Relay>,
    served: Option<Served>,
}

impl RackServer {
    /// Binds both ports and starts, under the identity of this process. The upstream need not be
    /// there yet; the key that it has first is believed.
    ///
    /// # Errors
    /// When the port is taken, the address is not ours, the upstream's is none, or a limit is out
    /// of range.
    pub fn start(config: RackServerConfig) -> Result<Self, ServerError> {
        Self::start_behind(config, Acceptor::of_process()?, Trust::default())
    }

    /// As [`Self::start`], for those whom `acceptor` takes, and at an upstream that is known by
    /// what `trust` says.
    ///
    /// # Errors
    /// As there.
    pub fn start_behind(
        config: RackServerConfig,
        acceptor: Acceptor,
        trust: Trust,
    ) -> Result<Self, ServerError> {
        let RackServerConfig { protocol, memory, rate_bps, page_token, .. } = config;
        let shards = usize::from(memory.shards);
        if !(1..=SHARDS_MAX).contains(&shards) {
            return Err(ServerError::Shards(shards));
        }
        let (upstream, _) = with_port(&config.upstream).map_err(ServerError::Upstream)?;
        let (listener, driver) = http::bind(config.listen, |listen| protocol.relay(listen, memory))?;
        let address = driver.local_addr();
        let routes = Arc::<Mutex<Routes>>::default();
        let (asked, served_jobs) = (Arc::clone(&driver), Arc::clone(&routes));
        let relay = Arc::new(Relay {
            address,
            instance: rand::random(),
            protocol,
            memory,
            rate_bps,
            upstream: Upstream::new(upstream, trust),
            ended: Mutex::new(driver.events()),
            tasks: TaskQueue::start(Arc::clone(&driver)).map_err(ServerError::Runtime)?,
            driver,
            figures: Snapshots::new(move || {
                // Before the data path is asked, which may take its time: heartbeats need the lock.
                let names = lock(&served_jobs).names();
                let jobs: Vec<_> = names.iter().map(|(job, _)| *job).collect();
                RelayFigures { figures: asked.figures(&jobs), names }
            }),
            routes,
            of_strangers: Mutex::default(),
            waiting: WaitingJobs::at_relay(),
            stops: watch::Sender::new(false),
        });
        let (scraped, key) = (Arc::clone(&relay), acceptor.fingerprint());
        let service = Service(Arc::clone(&relay));
        let asked = Arc::clone(&relay);
        let served = Served::start(
            (listener, acceptor),
            service,
            page_token,
            SILENCE,
            move |named| {
                let scraped = Arc::clone(&scraped);
                async move { text(scraped.figures().await, named) }
            },
            move || asked.health(),
        )?;
        // The command says it on standard output.
        tracing::debug!(
            %address,
            upstream = relay.upstream.name(),
            protocol = protocol.name(),
            %key,
            "the switch listens"
        );
        let ticking = Arc::clone(&relay);
        served.every(TICK, move || ticking.tick());
        Ok(Self { address, relay, served: Some(served) })
    }

    /// Where it listens, TCP and UDP.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends it. Must not be called from an asynchronous task.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for RackServer {
    fn drop(&mut self) {
        if let Some(served) = self.served.take() {
            self.relay.stops.send_replace(true);
            drop(served);
            tracing::info!(address = %self.address, "the switch stopped");
        }
    }
}
