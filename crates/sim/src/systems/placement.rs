//! The places of a job's machines. The network says which switches are on a worker's way to the
//! root; the product's own registry decides with that when all ranks have asked to join.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use fanin_protocol::Instant;
use fanin_protocol::control::{
    Admission, Agreed, Hop, JoinDecision, JoinRequest, PORTION_WHOLE, Protocol, Refusal, Registry,
    RegistryConfig, Resume,
};
use fanin_wire::{IP_UDP_BYTES, JobId, Key, VERSION, WireDtype};

use crate::net::{NodeId, NodeKind, Topology};

/// Why a job has no place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PlacementError {
    /// A node has more children than a bitmap has bits.
    Children { node: String, children: u32, most: usize },
    /// The registry does not admit the job.
    Refused(Refusal),
    /// A host that no switch is next to.
    Unattached(String),
    /// SwitchML: no switch sums.
    NoSwitch,
}

impl std::fmt::Display for PlacementError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Children { node, children, most } => write!(
                f,
                "{node} would have {children} children in this job, and a bitmap holds {most}; spread the workers over more racks, or place the server in a rack of its own"
            ),
            Self::Refused(refusal) => refusal.fmt(f),
            Self::Unattached(host) => write!(f, "{host} is next to no switch"),
            Self::NoSwitch => f.write_str("SwitchML needs a programmable switch, and there is none"),
        }
    }
}

/// The switch that a host is attached to.
pub(super) fn rack(topology: &Topology, host: NodeId) -> Result<NodeId, PlacementError> {
    let switch = topology.neighbours(host).map(|(node, _)| node).find(|node| topology.layer(*node).is_some());
    switch.ok_or_else(|| PlacementError::Unattached(topology.get(host).name.clone()))
}

pub(super) fn programmable(topology: &Topology, node: NodeId) -> bool {
    matches!(topology.get(node).kind, NodeKind::Switch { programmable: true, .. })
}

/// The slowest of the hosts' first links: all machines of a job have one rate.
pub(super) fn line_rate(topology: &Topology, hosts: impl Iterator<Item = NodeId>) -> u64 {
    let first = hosts.filter_map(|host| topology.neighbours(host).next());
    first.map(|(_, link)| topology.links()[link.0 as usize].config.rate_bps).min().unwrap_or(1)
}

/// A job as its ranks ask for it.
pub(super) struct Request<'a> {
    pub(super) protocol: &'static dyn Protocol,
    /// Most children of a node.
    pub(super) children_max: usize,
    /// The job's number, which the registry draws.
    pub(super) id: JobId,
    pub(super) key: Key,
    /// Packets of a rank that may be in flight: slots, or a window. Without a number the registry
    /// chooses one for the path.
    pub(super) in_flight: Option<u16>,
    pub(super) path: Path,
    /// The elements of a packet, and how many bytes it has then.
    pub(super) elements: u16,
    pub(super) packet_bytes: usize,
    /// For each rank the switches on its way to the root, its own first.
    pub(super) ways: Vec<Vec<NodeId>>,
    pub(super) root: NodeId,
    /// By rank: what it remembers of the job, if all resume one.
    pub(super) resumes: &'a [Resume],
}

/// The way between ranks and the root, as the registry is told of it.
#[derive(Clone, Copy)]
pub(super) struct Path {
    pub(super) wire_dtype: WireDtype,
    /// The ranks' links.
    pub(super) rate_bps: Option<u64>,
    pub(super) rtt: Duration,
    /// If the root sums a part alone: what that is of the largest part, in parts of
    /// [`PORTION_WHOLE`].
    pub(super) portion: Option<u16>,
}

impl Default for Path {
    fn default() -> Self {
        Self { wire_dtype: WireDtype::SharedExponent, rate_bps: None, rtt: Duration::ZERO, portion: None }
    }
}

/// Asks the registry at the root for a place for all ranks, one after the other.
pub(super) fn admit(topology: &Topology, request: &Request<'_>) -> Result<Admission, PlacementError> {
    let config = RegistryConfig {
        // How switches' memory is shared out is the scenario's to say.
        pool_units: u32::MAX,
        ..RegistryConfig::default()
    };
    let mut drawn =
        [request.id.0.into(), (request.key.secret() >> 64) as u64, request.key.secret() as u64].into_iter();
    let draw = move || drawn.next().unwrap_or_default();
    let mut registry =
        Registry::new(config, vec![request.protocol], Box::new(draw)).expect("no limit is zero");
    let hop = |node: &NodeId| Hop {
        instance: node.0.into(),
        address: (Ipv4Addr::from(node.0), 0).into(),
        shards: 1,
        // All switches have as many: each index is valid everywhere.
        aggregators: u32::MAX,
        elements: request.elements,
        receive_buffer_bytes: config.receive_buffer_bytes,
        mtu: usize::MAX,
        rate_bps: None,
    };
    for (rank, way) in request.ways.iter().enumerate() {
        let decision = registry.join(
            Instant(0),
            JoinRequest {
                job: "job".into(),
                rank: rank as u32,
                world_size: request.ways.len() as u32,
                protocol: request.protocol.name().into(),
                agreed: Agreed {
                    in_flight: request.in_flight,
                    wire_dtype: request.path.wire_dtype,
                    plan: u64::from(request.path.portion.is_some()),
                    ..Agreed::default()
                },
                // The MTU gives packets the length that was asked for.
                mtu: request.packet_bytes + IP_UDP_BYTES,
                rate_bps: request.path.rate_bps,
                rtt: request.path.rtt,
                paths: 1,
                portion: request.path.portion.unwrap_or(PORTION_WHOLE),
                hops: way.iter().map(hop).collect(),
                patience: Duration::from_secs(1),
                wire_version: VERSION,
                resume: request.resumes.get(rank).cloned(),
                origin: None,
            },
        );
        match decision {
            JoinDecision::Waiting(_) => {}
            JoinDecision::Complete { outcome, .. } => {
                return outcome.map_err(|refusal| refused(topology, request, refusal));
            }
            JoinDecision::Refused { reason } => return Err(refused(topology, request, reason)),
            JoinDecision::Again { .. } => unreachable!("nobody resumes a job"),
        }
    }
    unreachable!("the last rank completes the job")
}

/// With the names that the nodes have here.
fn refused(topology: &Topology, request: &Request<'_>, refusal: Refusal) -> PlacementError {
    let Refusal::TooManyChildren { switch, children } = refusal else {
        return PlacementError::Refused(refusal);
    };
    let node = match switch.map(|address| address.ip()) {
        Some(IpAddr::V4(address)) => NodeId(address.into()),
        _ => request.root,
    };
    let most = request.children_max;
    PlacementError::Children { node: topology.get(node).name.clone(), children, most }
}

/// The programmable switch with the fewest links to all racks together; of several the one nearest
/// to the core, then the first.
pub(super) fn nearest(topology: &Topology, racks: &[NodeId]) -> Option<NodeId> {
    let mut adjacent: BTreeMap<NodeId, Vec<NodeId>> = BTreeMap::new();
    for link in topology.links() {
        let [a, b] = link.ends;
        if topology.layer(a).is_some() && topology.layer(b).is_some() {
            adjacent.entry(a).or_default().push(b);
            adjacent.entry(b).or_default().push(a);
        }
    }
    let mut racks = racks.to_vec();
    racks.sort_unstable();
    racks.dedup();
    let mut links: BTreeMap<NodeId, Vec<usize>> = BTreeMap::new();
    for rack in &racks {
        let mut distance = BTreeMap::from([(*rack, 0)]);
        let mut next = VecDeque::from([*rack]);
        while let Some(switch) = next.pop_front() {
            let further = distance[&switch] + 1;
            for other in adjacent.get(&switch).into_iter().flatten() {
                distance.entry(*other).or_insert_with(|| {
                    next.push_back(*other);
                    further
                });
            }
        }
        for (switch, distance) in distance {
            links.entry(switch).or_default().push(distance);
        }
    }
    let reached = links.into_iter().filter(|(_, to)| to.len() == racks.len());
    let sums = reached.filter(|(switch, _)| programmable(topology, *switch));
    let best =
        sums.min_by_key(|(switch, to)| (to.iter().sum::<usize>(), Reverse(topology.layer(*switch)), *switch));
    best.map(|(switch, _)| switch)
}
