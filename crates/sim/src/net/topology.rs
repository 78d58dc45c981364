//! Which nodes there are and what links them, before anything moves.

use std::collections::BTreeMap;
use std::time::Duration;

use super::ids::{LinkId, NodeId, PortId};
use super::queue::{Buffer, PRIORITIES, QueueConfig};
use super::time::Time;
use fanin_units::RATE_MAX_BPS;

/// The treatment of packets that are not for the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeKind {
    /// Nothing: it has machines on it, and NICs.
    Host,
    /// It forwards them.
    Switch {
        /// 0 is next to the hosts.
        layer: u8,
        /// Machines may live on it, and packets may be addressed to it.
        programmable: bool,
    },
}

/// The cost of packets for a node in one direction: each occupies one core, and the next free one
/// takes the next packet. At most as much waits for a core as a queue of priority 0 holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Of a packet.
    pub packet: Time,
    /// The time for each byte of its frame: the IP packet and Ethernet's header of 14 bytes.
    pub byte: Time,
    /// Cores; none is taken as one.
    pub cores: u16,
}

impl Cost {
    /// As if the node had as many cores as it needs.
    pub const NOTHING: Self = Self::of_packet(Time::ZERO);

    /// A single core that takes as long for every packet.
    #[must_use]
    pub const fn of_packet(packet: Time) -> Self {
        Self { packet, byte: Time::ZERO, cores: 1 }
    }

    pub(crate) const fn is_nothing(&self) -> bool {
        self.packet.0 == 0 && self.byte.0 == 0
    }

    /// The time for a frame of so many bytes.
    #[must_use]
    pub const fn of(&self, bytes: u32) -> Time {
        Time(self.packet.0.saturating_add(self.byte.0.saturating_mul(bytes as u64)))
    }
}

/// A node's own properties.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NodeConfig {
    /// The memory that its queues share or have of their own.
    pub buffer: Buffer,
    /// The queues of each of its ports, by priority.
    pub queues: [QueueConfig; PRIORITIES],
    /// The cost of a packet that its machines and flows send to another node.
    pub sends: Cost,
    /// The cost of a packet that is for them.
    pub receives: Cost,
}

impl NodeConfig {
    /// All ports alike, all priorities alike, each queue with its own memory, packets that cost
    /// nothing.
    #[must_use]
    pub const fn new(queue: QueueConfig) -> Self {
        Self {
            buffer: Buffer::PerQueue,
            queues: [queue; PRIORITIES],
            sends: Cost::NOTHING,
            receives: Cost::NOTHING,
        }
    }

    /// A host: its NIC holds 64 MiB, more than any window, so that a sender loses nothing to
    /// itself.
    #[must_use]
    pub const fn host() -> Self {
        Self::new(QueueConfig::tail_drop(64 << 20))
    }

    /// A switch: 1 MB a queue, no marks.
    #[must_use]
    pub const fn switch() -> Self {
        Self::new(QueueConfig::tail_drop(1_000_000))
    }
}

/// A link's properties, the same in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkConfig {
    /// Bits a second, counted with all framing.
    pub rate_bps: u64,
    /// Time of a bit on its way.
    pub delay: Duration,
    /// Longest IP packet, in bytes; a longer one is dropped and counted as an error.
    pub mtu: u32,
}

impl LinkConfig {
    /// With an MTU of 1500 bytes.
    #[must_use]
    pub const fn new(rate_bps: u64, delay: Duration) -> Self {
        Self { rate_bps, delay, mtu: 1500 }
    }

    /// Another MTU.
    #[must_use]
    pub const fn with_mtu(mut self, mtu: u32) -> Self {
        self.mtu = mtu;
        self
    }
}

/// A node as it was added.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Unique.
    pub name: String,
    /// Host or switch.
    pub kind: NodeKind,
    /// Its properties.
    pub config: NodeConfig,
}

/// A link as it was added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// What it joins.
    pub ends: [NodeId; 2],
    /// Its properties.
    pub config: LinkConfig,
}

/// Why a topology cannot be.
#[derive(Clone, Debug, PartialEq)]
pub enum TopologyError {
    /// Two nodes have this name.
    DuplicateName(String),
    /// A link's end does not exist, or both are the same.
    Ends(LinkId),
    /// A rate of nothing, or so high that a byte takes less than a picosecond.
    Rate(LinkId),
    /// An MTU below the smallest of IPv4, 68 bytes.
    Mtu(LinkId),
    /// A buffer of nothing, or an `alpha` that is not a positive number.
    Buffer(String),
    /// More nodes or links than can be numbered.
    TooLarge,
    /// A parameter of a standard topology that is zero, odd or too large.
    Parameter(&'static str),
    /// No node of this name.
    UnknownNode(String),
    /// A share outside 0 to 1.
    Share(f64),
}

impl std::fmt::Display for TopologyError {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::DuplicateName(name) => write!(out, "two nodes are called {name}"),
            Self::Ends(link) => write!(out, "link {} joins a node to itself or to none", link.0),
            Self::Rate(link) => write!(out, "link {}: the rate must be from 1 bit/s to 8 Tbit/s", link.0),
            Self::Mtu(link) => write!(out, "link {}: the MTU must be from 68 to 65535 bytes", link.0),
            Self::Buffer(name) => {
                write!(out, "{name}: a buffer needs bytes, and a shared one an alpha greater than zero")
            }
            Self::TooLarge => write!(out, "at most 65536 nodes and 1048576 links"),
            Self::Parameter(what) => write!(out, "impossible {what}"),
            Self::UnknownNode(name) => write!(out, "there is no node {name}"),
            Self::Share(share) => write!(out, "a share of {share} is not from 0 to 1"),
        }
    }
}

impl std::error::Error for TopologyError {}

/// Which switches are programmable.
#[derive(Clone, Debug, PartialEq)]
pub enum Programmable {
    /// These.
    Names(Vec<String>),
    /// The switches of these layers; 0 is next to the hosts.
    Layers(Vec<u8>),
    /// This share of all, from 0 to 1, evenly spread over them in the order of their making;
    /// rounded to the nearest number of switches.
    Share(f64),
}

/// Nodes and links.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Topology {
    pub(crate) nodes: Vec<Node>,
    pub(crate) links: Vec<Link>,
    /// Queues of single ports that differ from their node's.
    pub(crate) port_queues: BTreeMap<PortId, [QueueConfig; PRIORITIES]>,
}

impl Topology {
    /// Nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a host.
    pub fn add_host(&mut self, name: impl Into<String>, config: NodeConfig) -> NodeId {
        self.add(name.into(), NodeKind::Host, config)
    }

    /// Adds a switch that is not programmable.
    pub fn add_switch(&mut self, name: impl Into<String>, layer: u8, config: NodeConfig) -> NodeId {
        self.add(name.into(), NodeKind::Switch { layer, programmable: false }, config)
    }

    fn add(&mut self, name: String, kind: NodeKind, config: NodeConfig) -> NodeId {
        self.nodes.push(Node { name, kind, config });
        NodeId(self.nodes.len() as u32 - 1)
    }

    /// Joins two nodes.
    pub fn add_link(&mut self, a: NodeId, b: NodeId, config: LinkConfig) -> LinkId {
        self.links.push(Link { ends: [a, b], config });
        LinkId(self.links.len() as u32 - 1)
    }

    /// Gives one port queues of its own.
    pub fn set_port_queues(&mut self, port: PortId, queues: [QueueConfig; PRIORITIES]) {
        self.port_queues.insert(port, queues);
    }

    /// Changes a link, for one that is unlike the others of a standard topology.
    ///
    /// # Panics
    /// When there is no such link.
    pub fn set_link(&mut self, link: LinkId, config: LinkConfig) {
        self.links[link.index()].config = config;
    }

    /// Changes a node.
    ///
    /// # Panics
    /// When there is no such node.
    pub fn set_node(&mut self, node: NodeId, config: NodeConfig) {
        self.nodes[node.index()].config = config;
    }

    /// Makes switches programmable, besides those that are.
    ///
    /// # Errors
    /// When a name is not that of a switch, or a share is not from 0 to 1.
    pub fn set_programmable(&mut self, which: &Programmable) -> Result<(), TopologyError> {
        let chosen: Vec<NodeId> = match which {
            Programmable::Names(names) => names
                .iter()
                .map(|name| {
                    let switch = self.node(name).filter(|node| self.layer(*node).is_some());
                    switch.ok_or_else(|| TopologyError::UnknownNode(name.clone()))
                })
                .collect::<Result<_, _>>()?,
            Programmable::Layers(layers) => self
                .switches()
                .filter(|node| self.layer(*node).is_some_and(|layer| layers.contains(&layer)))
                .collect(),
            Programmable::Share(share) => {
                if !(0.0..=1.0).contains(share) {
                    return Err(TopologyError::Share(*share));
                }
                let switches: Vec<_> = self.switches().collect();
                let count = (share * switches.len() as f64).round() as usize;
                (0..count).map(|nth| switches[nth * switches.len() / count]).collect()
            }
        };
        for node in chosen {
            if let NodeKind::Switch { programmable, .. } = &mut self.nodes[node.index()].kind {
                *programmable = true;
            }
        }
        Ok(())
    }

    /// The node of this name.
    #[must_use]
    pub fn node(&self, name: &str) -> Option<NodeId> {
        self.nodes.iter().position(|node| node.name == name).map(|at| NodeId(at as u32))
    }

    /// The node that was added as `node`.
    ///
    /// # Panics
    /// When there is no such node.
    #[must_use]
    pub fn get(&self, node: NodeId) -> &Node {
        &self.nodes[node.index()]
    }

    /// All nodes, in the order of their making.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// All links, in the order of their making.
    #[must_use]
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    fn ids(&self) -> impl Iterator<Item = NodeId> + use<> {
        (0..self.nodes.len() as u32).map(NodeId)
    }

    /// All hosts, in the order of their making.
    pub fn hosts(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.ids().filter(|node| self.get(*node).kind == NodeKind::Host)
    }

    /// All switches, in the order of their making.
    pub fn switches(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.ids().filter(|node| self.layer(*node).is_some())
    }

    /// The switches that machines may live on.
    pub fn programmable(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.ids().filter(|node| matches!(self.get(*node).kind, NodeKind::Switch { programmable: true, .. }))
    }

    /// A switch's layer.
    #[must_use]
    pub fn layer(&self, node: NodeId) -> Option<u8> {
        match self.get(node).kind {
            NodeKind::Host => None,
            NodeKind::Switch { layer, .. } => Some(layer),
        }
    }

    /// The nodes that are one link away from `node`, each with that link.
    pub fn neighbours(&self, node: NodeId) -> impl Iterator<Item = (NodeId, LinkId)> + '_ {
        self.links.iter().enumerate().filter_map(move |(at, link)| match link.ends {
            [a, b] if a == node => Some((b, LinkId(at as u32))),
            [a, b] if b == node => Some((a, LinkId(at as u32))),
            _ => None,
        })
    }

    /// The first link between two nodes.
    #[must_use]
    pub fn link_between(&self, a: NodeId, b: NodeId) -> Option<LinkId> {
        self.neighbours(a).find(|(other, _)| *other == b).map(|(_, link)| link)
    }

    /// Both ports of all links, in the order of their making.
    pub fn ports(&self) -> impl Iterator<Item = PortId> + use<> {
        (0..self.links.len() as u32).flat_map(|link| LinkId(link).ports())
    }

    /// The node that sends by a port, and the one that receives.
    ///
    /// # Panics
    /// When there is no such port.
    #[must_use]
    pub fn ends(&self, port: PortId) -> [NodeId; 2] {
        let [first, second] = self.links[port.link().index()].ends;
        if port == port.link().ports()[0] { [first, second] } else { [second, first] }
    }

    /// The port of `node` that sends into `link`.
    #[must_use]
    pub fn port(&self, node: NodeId, link: LinkId) -> Option<PortId> {
        let end = self.links.get(link.index())?.ends.iter().position(|end| *end == node)?;
        Some(link.ports()[end])
    }

    /// # Errors
    /// When it cannot be.
    pub(crate) fn check(&self) -> Result<(), TopologyError> {
        if self.nodes.len() > 1 << 16 || self.links.len() > 1 << 20 {
            return Err(TopologyError::TooLarge);
        }
        let mut names = std::collections::BTreeSet::new();
        for node in &self.nodes {
            if !names.insert(&node.name) {
                return Err(TopologyError::DuplicateName(node.name.clone()));
            }
            let (bytes, alpha) = match node.config.buffer {
                Buffer::PerQueue => (1, 1.0),
                Buffer::PerPort { bytes } => (bytes, 1.0),
                Buffer::Shared { bytes, alpha } => (bytes, alpha),
            };
            if bytes == 0 || !alpha.is_finite() || alpha <= 0.0 {
                return Err(TopologyError::Buffer(node.name.clone()));
            }
        }
        for (at, link) in self.links.iter().enumerate() {
            let id = LinkId(at as u32);
            let [a, b] = link.ends;
            if a == b || a.index().max(b.index()) >= self.nodes.len() {
                return Err(TopologyError::Ends(id));
            }
            if link.config.rate_bps == 0 || link.config.rate_bps > RATE_MAX_BPS {
                return Err(TopologyError::Rate(id));
            }
            if !(68..=65_535).contains(&link.config.mtu) {
                return Err(TopologyError::Mtu(id));
            }
        }
        Ok(())
    }
}
