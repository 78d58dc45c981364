//! What a session is told.

use std::net::SocketAddr;
use std::time::Duration;

use fanin_protocol::RetransmissionConfig;
use fanin_protocol::control::Agreed;
use fanin_tls::Trust;
use fanin_udp::{HostThreads, OnSockets};
use fanin_wire::{Rank, WireDtype};

use super::rank_names::RankNames;
use super::split::Prediction;
use super::trace::TraceConfig;
use crate::page::Token;
use crate::protocols;

/// A service that sums, as a session is told of it.
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceConfig {
    /// A switch as `host:port`; the port is 4800 where it is missing.
    pub switch: String,
    /// The part of all tensors that it sums; the parts of all services are the whole. The same on
    /// every rank.
    pub share: f64,
    /// The planned rate between this rank and the service, in bits a second. Without one the
    /// interface's rate decides.
    pub rate_bps: Option<u64>,
    /// The rank in whose process it is, if it is in one's.
    pub host: Option<u32>,
    /// That rank among those of the session: slices of its go through this service.
    pub home: Option<Rank>,
    /// A fingerprint of all services' shares and hosts and of this one's place among them, which
    /// all ranks must agree on; zero where it is alone.
    pub plan: u64,
}

impl ServiceConfig {
    /// The services with these addresses, shares, rates and hosts, each with the fingerprint of the
    /// whole.
    #[must_use]
    pub fn all(services: Vec<(String, f64, Option<u64>, Option<u32>)>) -> Vec<Self> {
        let agreed: Vec<[u64; 2]> = services
            .iter()
            .map(|(_, share, _, host)| [share.to_bits(), host.map_or(u64::MAX, u64::from)])
            .collect();
        let fingerprint = |index: usize| match agreed.len() {
            1 => 0,
            // FNV-1a over the bits of the shares and homes, then the place.
            _ => agreed
                .iter()
                .copied()
                .flatten()
                .chain([index as u64])
                .flat_map(u64::to_le_bytes)
                .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                    (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
                }),
        };
        let with_plan = |(index, (switch, share, rate_bps, host))| Self {
            switch,
            share,
            rate_bps,
            host,
            home: host.and_then(|rank: u32| u16::try_from(rank).ok()).map(Rank),
            plan: fingerprint(index),
        };
        services.into_iter().enumerate().map(with_plan).collect()
    }
}

/// What a session is told at its start.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionConfig {
    /// The services that sum, in the same order on every rank. One, with a protocol whose jobs are
    /// not divided.
    pub services: Vec<ServiceConfig>,
    /// What they take, if that was planned: large all-reduces are held against it.
    pub prediction: Option<Prediction>,
    /// The rates that their links were told to carry, and those assumed for the others: for people.
    pub links: String,
    /// Which machine this is: the same for its ranks.
    pub machine: String,
    /// The ranks that this one speaks for, itself among them; none if it speaks for itself alone.
    pub ranks_here: Vec<u32>,
    /// What its ranks are called to people and in errors.
    pub names: RankNames,
    /// Name of the job: ranks with the same name meet.
    pub job: String,
    /// This process's rank.
    pub rank: u32,
    /// Ranks of the job.
    pub world_size: u32,
    /// The settings that are the same on every rank. A `wire_dtype` or `plan` here is ignored:
    /// `wire_dtype` below and the service's plan replace them.
    pub agreed: Agreed,
    /// How the job's gradients are summed; the same on every rank. With a loss bound, one takes its
    /// place that may lose something.
    pub protocol: &'static dyn OnSockets,
    /// How the elements of large float tensors travel, the same on every rank; the protocol's own
    /// way if it is `None`.
    pub wire_dtype: Option<WireDtype>,
    /// With a loss bound: source ports in each shard that this rank's packets take in turn, at most
    /// [`PATHS_MAX`](fanin_wire::PATHS_MAX). All ranks of a job have as many as the one that asks
    /// for most.
    pub paths: u8,
    /// Whether this rank's window shrinks when packets are lost, of a protocol that has that (ATP
    /// §3.7). Off where links lose packets without being full.
    pub congestion_control: bool,
    /// Jobs that the ranks of this machine have side by side, this one included.
    pub columns: u16,
    /// How long one all-reduce may take, from its submission or from the end of the one before it.
    pub timeout: Duration,
    /// How long to wait at the start, for the switch and then for the other ranks; the switch may
    /// have a lower limit.
    pub join_timeout: Duration,
    /// How long a switch may be gone before the session gives up; at most `timeout`.
    pub switch_timeout: Duration,
    /// When packets are sent again.
    pub retransmission: RetransmissionConfig,
    /// The bytes that an IP packet to the services may have; as many as the kernel says of the path
    /// if it is `None`.
    pub mtu: Option<usize>,
    /// Where to write a timeline, if at all.
    pub trace: Option<TraceConfig>,
    /// Where rank 0 serves a page about the job, and what callers from other machines show.
    pub page: Option<(SocketAddr, Option<Token>)>,
    /// The threads of a service that this process hosts. Packets to it touch no socket if it is one
    /// of `services`.
    pub host: Option<HostThreads>,
    /// By what the services are known.
    pub trust: Trust,
}

impl SessionConfig {
    /// What the rank itself is called.
    pub(super) fn own_name(&self) -> Rank {
        // One that is none of the job's is refused when it joins.
        self.names.of(Rank(self.rank as u16))
    }

    /// How the elements of large float tensors travel.
    pub(super) fn travels_as(&self) -> WireDtype {
        self.wire_dtype.unwrap_or_else(|| self.protocol.travels_as())
    }

    /// What all ranks must ask for alike, at a service with this fingerprint of the plan.
    pub(super) fn agreed_at(&self, plan: u64) -> Agreed {
        Agreed { wire_dtype: self.travels_as(), plan, ..self.agreed.clone() }
    }

    /// The protocol that sums the job.
    pub(super) fn protocol(&self) -> &'static dyn OnSockets {
        protocols::with_bound(self.protocol, self.agreed.loss_bound)
    }

    /// A session at one switch, with the usual time limits.
    #[must_use]
    pub fn new(switch: impl Into<String>, job: impl Into<String>, rank: u32, world_size: u32) -> Self {
        Self {
            services: ServiceConfig::all(vec![(switch.into(), 1.0, None, None)]),
            prediction: None,
            links: String::new(),
            machine: fanin_local::machine_id(),
            ranks_here: Vec::new(),
            names: RankNames::default(),
            job: job.into(),
            rank,
            world_size,
            agreed: Agreed::default(),
            protocol: protocols::usual(),
            wire_dtype: None,
            paths: 1,
            congestion_control: true,
            columns: 1,
            timeout: Duration::from_secs(300),
            join_timeout: Duration::from_secs(300),
            switch_timeout: Duration::from_secs(30),
            retransmission: RetransmissionConfig::default(),
            mtu: None,
            trace: None,
            page: None,
            host: None,
            trust: Trust::default(),
        }
    }
}
