//! A switch with an upstream, as it is started and stopped.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fanin_protocol::atp::{AtpSwitchConfig, DEFAULT_WAYS};
use fanin_protocol::control::{Protocol, RegistryConfig};
use fanin_tls::{Acceptor, Trust};
use fanin_udp::{AtpSwitchDriver, GoatSwitchDriver, SHARDS_MAX, SwitchConfig, SwitchDriver};
use tokio::sync::watch;

use super::super::ServerError;
use super::super::crowd::Crowd;
use super::super::errands::Errands;
use super::super::http::{self, Served};
use super::super::on_the_way::OnTheWay;
use super::super::relay_metrics::text;
use super::super::routes::Routes;
use super::super::snapshots::Snapshots;
use super::{ELEMENTS, Relay, Service, lock};
use crate::client::connection::with_port;

/// Aggregators unless told otherwise: eight jobs with the window of a 10 Gbit/s link.
const AGGREGATORS_DEFAULT: u32 = 4096;
/// After so long without a contribution an aggregator was left behind: a worker would have sent again several times.
const STALE: Duration = Duration::from_secs(2);
/// How often jobs are looked for that are over.
const TICK: Duration = Duration::from_secs(1);
/// Of how many jobs ranks may wait at once that ask from one address: half as many as the upstream lets wait that ask from here.
const WAITING_OF_ONE_MAX: usize = 64;
/// How long a caller's host may not be heard of.
const SILENCE: Duration = Duration::from_secs(5);

/// What a switch with an upstream is told at its start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RackServerConfig {
    /// Address, and the port for TCP and UDP; 0 takes one that is free for both.
    pub listen: SocketAddr,
    /// The next switch towards the root, or the root, as `host:port`; the port is 4800 where it is missing.
    pub upstream: String,
    /// What it sums with.
    pub memory: RackMemory,
}

/// What a switch with an upstream sums with, for all jobs together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RackMemory {
    /// ATP.
    Aggregators(u32),
    /// GOAT.
    Planned(u32),
    /// SwitchML.
    Slots {
        /// Cores that sum, each with a socket and slots of its own: as many as the root has.
        shards: usize,
        /// Memory in each shard, in units of 256 elements.
        pool_units: u32,
    },
}

impl RackMemory {
    /// Cores that sum.
    #[must_use]
    pub const fn shards(self) -> usize {
        match self {
            Self::Aggregators(_) | Self::Planned(_) => 1,
            Self::Slots { shards, .. } => shards,
        }
    }

    /// Aggregators, if it has some and not slots.
    #[must_use]
    pub const fn aggregators(self) -> Option<u32> {
        match self {
            Self::Aggregators(aggregators) | Self::Planned(aggregators) => Some(aggregators),
            Self::Slots { .. } => None,
        }
    }
}

impl RackServerConfig {
    /// A switch of ATP with the usual number of aggregators. With none, it only forwards.
    #[must_use]
    pub fn atp(listen: SocketAddr, upstream: impl Into<String>) -> Self {
        Self { listen, upstream: upstream.into(), memory: RackMemory::Aggregators(AGGREGATORS_DEFAULT) }
    }

    /// A switch of GOAT with as many aggregators as one of ATP has.
    #[must_use]
    pub fn goat(listen: SocketAddr, upstream: impl Into<String>) -> Self {
        Self { listen, upstream: upstream.into(), memory: RackMemory::Planned(AGGREGATORS_DEFAULT) }
    }

    /// A rack of SwitchML with the usual memory, and one shard.
    #[must_use]
    pub fn switch_ml(listen: SocketAddr, upstream: impl Into<String>) -> Self {
        let pool_units = RegistryConfig::default().pool_units;
        Self { listen, upstream: upstream.into(), memory: RackMemory::Slots { shards: 1, pool_units } }
    }

    const fn protocol(&self) -> Protocol {
        match self.memory {
            RackMemory::Aggregators(_) => Protocol::Atp,
            RackMemory::Planned(_) => Protocol::Goat,
            RackMemory::Slots { .. } => Protocol::SwitchMl,
        }
    }
}

/// A running switch with an upstream. Dropping it stops it: its jobs wait for it as for one that crashed.
#[derive(Debug)]
pub struct RackServer {
    address: SocketAddr,
    pub(super) relay: Arc<Relay>,
    served: Option<Served>,
}

impl RackServer {
    /// Binds both ports and starts, under the identity of this process. The upstream need not be there yet; the key that it has first
    /// is believed.
    ///
    /// # Errors
    /// When the port is taken, the address is not ours, the upstream's is none, or a limit is out of range.
    pub fn start(config: RackServerConfig) -> Result<Self, ServerError> {
        Self::start_behind(config, Acceptor::of_process()?, Trust::default())
    }

    /// As [`Self::start`], for those whom `acceptor` takes, and at an upstream that is known by what `trust` says.
    ///
    /// # Errors
    /// As there.
    pub fn start_behind(
        config: RackServerConfig,
        acceptor: Acceptor,
        trust: Trust,
    ) -> Result<Self, ServerError> {
        let protocol = config.protocol();
        let shards = config.memory.shards();
        let of_shards = u8::try_from(shards).ok().filter(|_| (1..=SHARDS_MAX).contains(&shards));
        let of_shards = of_shards.ok_or(ServerError::Shards(shards))?;
        if let Some(asked) = config.memory.aggregators() {
            let max = AtpSwitchConfig::aggregators_max(ELEMENTS);
            if asked > max {
                return Err(ServerError::Aggregators { asked, max });
            }
        }
        let (upstream, _) = with_port(&config.upstream).map_err(ServerError::Upstream)?;
        let table = |aggregators, ways| AtpSwitchConfig {
            aggregators,
            elements: ELEMENTS,
            ways,
            stale: STALE,
            // Its queues are the sockets' buffers, which tell by loss.
            ecn_threshold_packets: None,
        };
        let bind = |listen| -> io::Result<Arc<dyn OnTheWay>> {
            Ok(match config.memory {
                RackMemory::Aggregators(aggregators) => {
                    Arc::new(AtpSwitchDriver::bind(listen, table(aggregators, DEFAULT_WAYS))?)
                }
                // Each fragment's is its own.
                RackMemory::Planned(aggregators) => {
                    Arc::new(GoatSwitchDriver::bind(listen, table(aggregators, 1))?)
                }
                RackMemory::Slots { shards, .. } => {
                    Arc::new(SwitchDriver::bind(SwitchConfig { listen, shards })?)
                }
            })
        };
        let (listener, driver) = http::bind(config.listen, bind)?;
        let address = driver.local_addr();
        let routes = Arc::<Mutex<Routes>>::default();
        let (asked, served_jobs) = (Arc::clone(&driver), Arc::clone(&routes));
        let relay = Arc::new(Relay {
            address,
            instance: rand::random(),
            protocol,
            memory: config.memory,
            shards: of_shards,
            upstream,
            trust,
            connection: Mutex::new(None),
            ended: Mutex::new(driver.events()),
            errands: Errands::start(Arc::clone(&driver)).map_err(ServerError::Runtime)?,
            driver,
            figures: Snapshots::new(move || {
                // Before the data path is asked, which may take its time: heartbeats need the lock.
                let names = lock(&served_jobs).names();
                asked.figures(names)
            }),
            routes,
            of_strangers: Mutex::default(),
            waiting: Crowd::new(usize::MAX, WAITING_OF_ONE_MAX),
            stops: watch::Sender::new(false),
        });
        let (scraped, key) = (Arc::clone(&relay), acceptor.fingerprint());
        let service = Service(Arc::clone(&relay));
        let asked = Arc::clone(&relay);
        let served = Served::start(
            (listener, acceptor),
            service,
            SILENCE,
            move || {
                let scraped = Arc::clone(&scraped);
                async move { text(scraped.memory, scraped.figures().await) }
            },
            move || asked.health(),
        )?;
        // The command says it on standard output.
        tracing::debug!(
            %address,
            upstream = relay.upstream,
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
