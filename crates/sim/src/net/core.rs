//! The network without its actors: what an actor's [`Context`](super::Context) reaches.

use std::collections::BTreeMap;

use oorandom::Rand64;

use super::ahead::Look;
use super::config::{Multipath, NetworkConfig};
use super::cores::{Cores, Direction};
use super::flow::{Flow, Notice};
use super::ids::{ActorId, FlowId, LinkId, NodeId, PortId, SimAddress};
use super::packets::{Content, Ecn, PacketId, Packets, Record, UDP_HEADER_BYTES, wire_bytes};
use super::pcap::Pcap;
use super::port::{Link, Port, QueueConfigs, Queues, Seldom};
use super::queue::{Buffer, Class, DROP_CLASSES, PRIORITIES};
use super::routing::{Anchor, Edge, Graph, Routes, flow_choice, mix};
use super::statistics::{DropReason, NodeStatistics};
use super::time::Time;
use super::topology::{NodeKind, Topology, TopologyError};
use super::trace::Trace;
use crate::agenda::Agenda;

/// Longer than any way through a standard topology.
const HOPS_MAX: u8 = 64;
const DIGEST_PRIME: u64 = 0x9e37_79b9_7f4a_7c15;

/// What happens. Small, because the agenda moves it about.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    /// The last bit of the first packet on a link is at the other end. All packets on the link
    /// share one event: the agenda stays as short as there are links.
    Lands { port: PortId, epoch: u32 },
    /// The same of a packet that travels alone: it was held back, or is another's twin.
    Arrives(PacketId),
    /// A port's link is free, and packets wait.
    Wakes { port: PortId, epoch: u32 },
    /// The first packet that waits for a node's cores is through. All of them share one event, as a
    /// link's do.
    Handled { node: NodeId, epoch: u32, direction: Direction },
    /// A packet that a node sent to itself is there.
    Returns(PacketId),
    /// An actor begins.
    Starts { actor: ActorId, incarnation: u16 },
    /// A timer of an actor.
    Timer { actor: ActorId, incarnation: u16, token: u64 },
    /// Somebody is told something.
    Notice { actor: ActorId, token: u64 },
    /// A flow's own timer.
    Flow(FlowId),
    /// A hook of the network.
    Hook(u32),
}

/// A node at work. Most packets need only its first cache line.
#[repr(C, align(64))]
pub(crate) struct NodeState {
    pub(crate) up: bool,
    pub(crate) is_host: bool,
    /// Counts the times that it went down.
    pub(crate) epoch: u32,
    /// In all its queues.
    pub(crate) buffered_bytes: u64,
    pub(crate) statistics: NodeStatistics,
    pub(crate) buffer: Buffer,
    /// Packets of its actors go through these first, if that costs them anything ..
    pub(crate) sends: Option<Box<Cores>>,
    /// .. and what is for them through these.
    pub(crate) receives: Option<Box<Cores>>,
    /// Actors by port, sorted.
    pub(crate) listeners: Vec<(u16, ActorId)>,
    pub(crate) ports: Vec<PortId>,
}

impl NodeState {
    /// # Panics
    /// When packets cost it nothing.
    pub(crate) fn cores(&mut self, direction: Direction) -> &mut Cores {
        let cores = match direction {
            Direction::Sends => &mut self.sends,
            Direction::Receives => &mut self.receives,
        };
        cores.as_mut().expect("cores that packets are handed to")
    }
}

/// An actor as the network knows it.
pub(crate) struct Seat {
    pub(crate) address: SimAddress,
    /// Timers of earlier ones do not fire.
    pub(crate) incarnation: u16,
}

/// See the module.
pub(crate) struct Core {
    pub(crate) now: Time,
    pub(crate) dice: Rand64,
    pub(crate) stopped: bool,
    /// The buffer into which machines write their trains.
    pub(crate) train: Vec<u8>,
    pub(crate) topology: Topology,
    pub(crate) config: NetworkConfig,
    pub(crate) agenda: Agenda<Time, Event>,
    /// Of [`Self::look_ahead`].
    pub(crate) looks: Vec<Look>,
    pub(crate) packets: Packets,
    pub(crate) ports: Vec<Port>,
    pub(crate) queues: Queues,
    /// By port.
    pub(crate) seldom: Vec<Seldom>,
    pub(crate) links: Vec<Link>,
    pub(crate) queue_configs: Vec<QueueConfigs>,
    pub(crate) nodes: Vec<NodeState>,
    pub(crate) links_up: Vec<bool>,
    pub(crate) seats: Vec<Seat>,
    pub(crate) flows: Vec<Flow>,
    pub(crate) routes: Routes,
    /// The salt of the hash that chooses among paths.
    salt: u64,
    pub(crate) pcap: Option<Pcap>,
    pub(crate) trace: Option<Trace>,
    pub(crate) packet_hops: u64,
    pub(crate) digest: u64,
}

/// Ports as routing looks at them.
struct Ports<'a> {
    ports: &'a [Port],
    nodes: &'a [NodeState],
}

impl Graph for Ports<'_> {
    fn edges(&self, node: NodeId) -> impl Iterator<Item = Edge> {
        self.nodes[node.index()].ports.iter().map(|port| {
            let Port { peer, up, .. } = self.ports[port.index()];
            Edge { port: *port, to: peer, up }
        })
    }

    fn forwards(&self, node: NodeId) -> bool {
        !self.nodes[node.index()].is_host
    }
}

impl Core {
    pub(crate) fn new(topology: Topology, config: NetworkConfig) -> Result<Self, TopologyError> {
        topology.check()?;
        let mut nodes: Vec<_> = topology
            .nodes()
            .iter()
            .map(|node| NodeState {
                up: true,
                is_host: node.kind == NodeKind::Host,
                epoch: 0,
                ports: Vec::new(),
                buffer: node.config.buffer,
                buffered_bytes: 0,
                sends: Cores::of(node.config.sends, node.config.queues[0].limit_bytes),
                receives: Cores::of(node.config.receives, node.config.queues[0].limit_bytes),
                listeners: Vec::new(),
                statistics: NodeStatistics::default(),
            })
            .collect();
        // A node's ports share its configuration, and a standard topology has two or three in all,
        // and as many kinds of links.
        let mut queue_configs: Vec<QueueConfigs> = Vec::new();
        let mut links: Vec<Link> = Vec::new();
        let mut seldom = Vec::with_capacity(2 * topology.links().len());
        let mut of_node = vec![None; nodes.len()];
        let mut ports = Vec::with_capacity(2 * topology.links().len());
        for (at, link) in topology.links().iter().enumerate() {
            let kind = intern(&mut links, Link::new(&link.config));
            for (port, [node, peer]) in
                LinkId(at as u32).ports().into_iter().zip([link.ends, [link.ends[1], link.ends[0]]])
            {
                let mut intern = |queues: &QueueConfigs| intern(&mut queue_configs, *queues);
                let config = match topology.port_queues.get(&port) {
                    Some(own) => intern(own),
                    None => *of_node[node.index()]
                        .get_or_insert_with(|| intern(&topology.get(node).config.queues)),
                };
                ports.push(Port::new(node, peer, config, kind));
                seldom.push(Seldom::new(link.config.rate_bps));
                nodes[node.index()].ports.push(port);
            }
        }
        let anchors = nodes.iter().map(|node| match node.ports[..] {
            [nic] if node.is_host => {
                let switch = ports[nic.index()].peer;
                (!nodes[switch.index()].is_host).then_some(Anchor { switch, port: nic.opposite() })
            }
            _ => None,
        });
        let routes = Routes::new(&anchors.collect::<Vec<_>>());
        Ok(Self {
            now: Time::ZERO,
            dice: Rand64::new(u128::from(config.seed)),
            stopped: false,
            train: vec![0; 1 << 16],
            config,
            agenda: Agenda::new(),
            looks: Vec::new(),
            packets: Packets::default(),
            routes,
            salt: mix(config.seed),
            links_up: vec![true; topology.links().len()],
            queues: Queues::new(ports.len()),
            seldom,
            links,
            ports,
            queue_configs,
            nodes,
            seats: Vec::new(),
            flows: Vec::new(),
            pcap: None,
            trace: None,
            packet_hops: 0,
            digest: config.seed,
            topology,
        })
    }

    pub(crate) fn address(&self, actor: ActorId) -> SimAddress {
        self.seats[actor.0 as usize].address
    }

    pub(crate) fn wake_at(&mut self, actor: ActorId, at: Time, token: u64) {
        let incarnation = self.seats[actor.0 as usize].incarnation;
        self.agenda.at(at.max(self.now), Event::Timer { actor, incarnation, token });
    }

    pub(crate) fn notify(&mut self, Notice { actor, token }: Notice) {
        self.agenda.at(self.now, Event::Notice { actor, token });
    }

    /// Starts an actor, as soon as what happens now is over.
    pub(crate) fn start(&mut self, actor: ActorId) {
        let seat = &mut self.seats[actor.0 as usize];
        seat.incarnation = seat.incarnation.wrapping_add(1);
        let incarnation = seat.incarnation;
        self.agenda.at(self.now, Event::Starts { actor, incarnation });
    }

    /// The same payload to each of `to`; `declared_bytes` more of it are not there and count as if
    /// they were.
    pub(crate) fn send_bytes(
        &mut self,
        from: SimAddress,
        to: &[SimAddress],
        class: Class,
        payload: &[u8],
        declared_bytes: u32,
    ) {
        let datagram_bytes = payload.len() as u32 + declared_bytes + UDP_HEADER_BYTES;
        let buffer = self.packets.keep(payload);
        let ecn = if class.unimportant { Ecn::NotCapable } else { Ecn::Capable };
        for to in to {
            let record = outgoing(from, *to, class, datagram_bytes, Content::Bytes(buffer), ecn);
            let packet = self.packets.add(record);
            self.send(packet);
        }
        self.packets.let_go(buffer);
    }

    pub(crate) fn send_blank(
        &mut self,
        from: SimAddress,
        to: SimAddress,
        class: Class,
        bytes: u32,
        tag: u64,
    ) {
        let datagram_bytes = bytes.saturating_add(UDP_HEADER_BYTES);
        let record = outgoing(from, to, class, datagram_bytes, Content::Blank { tag }, Ecn::NotCapable);
        let packet = self.packets.add(record);
        self.send(packet);
    }

    /// A packet leaves the node that its sender lives on.
    pub(crate) fn send(&mut self, packet: PacketId) {
        let Record { from, to, datagram_bytes, class, .. } = *self.packets.get(packet);
        assert!(usize::from(class.priority) < PRIORITIES && usize::from(class.drop_class) < DROP_CLASSES);
        let node = &mut self.nodes[from.node as usize];
        node.statistics.sent_packets += 1;
        node.statistics.sent_bytes += u64::from(wire_bytes(datagram_bytes));
        if !node.up {
            self.drop_at_node(packet, NodeId(from.node), DropReason::NodeDown);
        } else if from.node == to.node {
            self.packets.get_mut(packet).epoch = node.epoch;
            self.agenda.at(self.now, Event::Returns(packet));
        } else if node.sends.is_none() {
            self.forward(packet, NodeId(from.node));
        } else {
            self.handle(packet, NodeId(from.node), Direction::Sends);
        }
    }

    /// A packet is at the other end of its link. If it is for this node and costs its cores
    /// nothing, it is to be delivered.
    pub(crate) fn arrives(&mut self, packet: PacketId) -> Option<PacketId> {
        let record = self.packets.get_mut(packet);
        let port = &mut self.ports[record.port.index()];
        if record.epoch != port.epoch {
            self.seldom[record.port.index()].drops.count(DropReason::LinkDown);
            self.packets.release(packet);
            return None;
        }
        let here = port.peer;
        record.hops += 1;
        let (to, hops) = (record.to.node, record.hops);
        let mixed = self.now.0 ^ u64::from(packet.0) << 40 ^ u64::from(record.datagram_bytes) << 20;
        self.digest = (self.digest.rotate_left(5) ^ mixed).wrapping_mul(DIGEST_PRIME);
        let node = &mut self.nodes[here.index()];
        if to == here.0 {
            if node.receives.is_none() {
                return Some(packet);
            }
            self.handle(packet, here, Direction::Receives);
        } else if node.is_host {
            self.drop_at_node(packet, here, DropReason::NoRoute);
        } else if hops >= HOPS_MAX {
            self.drop_at_node(packet, here, DropReason::HopLimit);
        } else {
            node.statistics.forwarded_packets += 1;
            self.forward(packet, here);
        }
        None
    }

    /// A packet that a node sent to itself is to be delivered, unless the node went down meanwhile.
    pub(crate) fn returns(&mut self, packet: PacketId) -> Option<PacketId> {
        let record = self.packets.get(packet);
        let node = NodeId(record.to.node);
        let state = &self.nodes[node.index()];
        if state.up && state.epoch == record.epoch {
            return Some(packet);
        }
        self.drop_at_node(packet, node, DropReason::NodeDown);
        None
    }

    pub(crate) fn drop_at_node(&mut self, packet: PacketId, node: NodeId, reason: DropReason) {
        self.nodes[node.index()].statistics.drops.count(reason);
        self.packets.release(packet);
    }

    pub(crate) fn forward(&mut self, packet: PacketId, here: NodeId) {
        let Record { from, to, class, .. } = *self.packets.get(packet);
        let destination = NodeId(to.node);
        if destination.index() >= self.nodes.len() {
            return self.drop_at_node(packet, here, DropReason::NoRoute);
        }
        if !self.routes.knows(destination) {
            self.routes.learn(destination, &Ports { ports: &self.ports, nodes: &self.nodes });
        }
        let works = |nic: PortId| self.ports[nic.index()].up;
        let port = self.routes.port(here, destination, works, |count| match self.config.multipath {
            Multipath::PerFlow if !class.sprayed => flow_choice(self.salt, from, to, here, count),
            _ => self.dice.rand_range(0..u64::from(count)) as u32,
        });
        match port {
            Some(port) => self.enqueue(packet, port),
            None => self.drop_at_node(packet, here, DropReason::NoRoute),
        }
    }

    /// The port by which a packet of a flow is about to leave, if that is known.
    pub(crate) fn likely_port(&self, here: NodeId, from: SimAddress, to: SimAddress) -> Option<PortId> {
        let destination = NodeId(to.node);
        if destination.index() >= self.nodes.len() || !self.routes.knows(destination) {
            return None;
        }
        self.routes.port(here, destination, |_| true, |count| flow_choice(self.salt, from, to, here, count))
    }

    /// A delivered packet counts in the digest with its beginning, where headers are.
    pub(crate) fn mix_in(&mut self, payload: &[u8]) {
        for word in payload[..payload.len().min(64)].chunks(8) {
            let mut bytes = [0; 8];
            bytes[..word.len()].copy_from_slice(word);
            self.digest = (self.digest.rotate_left(5) ^ u64::from_le_bytes(bytes)).wrapping_mul(DIGEST_PRIME);
        }
    }

    /// For everything that has its own dice.
    pub(crate) fn seed(&self, what: u64) -> u128 {
        u128::from(mix(self.config.seed)) << 64 | u128::from(mix(what))
    }

    pub(crate) fn names(&self) -> BTreeMap<PortId, String> {
        let name = |node: NodeId| self.topology.get(node).name.as_str();
        let ports = self.ports.iter().enumerate();
        ports
            .map(|(at, port)| (PortId(at as u32), format!("{} to {}", name(port.node), name(port.peer))))
            .collect()
    }
}

/// The place of the value in a list. The last ones are the likeliest.
fn intern<T: PartialEq>(known: &mut Vec<T>, value: T) -> u32 {
    let at = known.iter().rposition(|one| *one == value).unwrap_or_else(|| {
        known.push(value);
        known.len() - 1
    });
    at as u32
}

/// A packet that has not begun its way.
pub(crate) const fn outgoing(
    from: SimAddress,
    to: SimAddress,
    class: Class,
    datagram_bytes: u32,
    content: Content,
    ecn: Ecn,
) -> Record {
    Record {
        from,
        to,
        content,
        datagram_bytes,
        next: PacketId::NONE,
        next_at: Time::ZERO,
        port: PortId(0),
        epoch: 0,
        class,
        ecn,
        hops: 0,
        remaining: 0,
    }
}
