//! Applications and small networks that the tests share.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use fanin_sim::net::{
    Actor, ActorId, Body, Class, Context, LinkConfig, Network, NetworkConfig, NodeConfig, NodeId, Packet,
    Parts, QueueConfig, SimAddress, Time, Topology,
};

pub const PORT: u16 = 7;
pub const GBIT: u64 = 1_000_000_000;

/// The arrivals: when, from which node, its tag, whether it was marked.
pub type Arrivals = Rc<RefCell<Vec<(Time, u32, u64, bool)>>>;

/// Notes what arrives.
#[derive(Default)]
pub struct Sink {
    pub arrivals: Arrivals,
}

impl Actor for Sink {
    fn packet(&mut self, context: &mut Context<'_>, packet: &Packet<'_>) {
        let Body::Blank { tag, .. } = packet.body else { panic!("blank packets only") };
        self.arrivals.borrow_mut().push((context.time(), packet.from.node, tag, packet.ecn_marked));
    }
}

/// A packet to send.
#[derive(Clone, Copy)]
pub struct Shot {
    pub at: Time,
    pub to: NodeId,
    pub bytes: u32,
    pub tag: u64,
    pub class: Class,
}

impl Shot {
    /// A shot of an IP packet of `datagram` bytes.
    pub fn new(at: Time, to: NodeId, datagram: u32, tag: u64) -> Self {
        Self { at, to, bytes: datagram - 28, tag, class: Class::default() }
    }

    pub fn with_class(mut self, priority: u8, drop_class: u8) -> Self {
        self.class = Class { priority, drop_class, ..Class::DEFAULT };
        self
    }
}

/// Sends what it is given, each at its time.
pub struct Source(pub Vec<Shot>);

impl Actor for Source {
    fn start(&mut self, context: &mut Context<'_>) {
        for (at, shot) in self.0.iter().enumerate() {
            context.wake_at(shot.at, at as u64);
        }
    }

    fn packet(&mut self, _: &mut Context<'_>, _: &Packet<'_>) {}

    fn timer(&mut self, context: &mut Context<'_>, token: u64) {
        let Shot { to, bytes, tag, class, .. } = self.0[token as usize];
        context.send_blank(SimAddress::new(to, PORT), class, bytes, tag);
    }
}

pub fn network(topology: Topology, seed: u64) -> Network {
    Network::new(topology, NetworkConfig { seed, ..NetworkConfig::default() }).expect("a sound topology")
}

pub fn sink(network: &mut Network, node: NodeId) -> Arrivals {
    let sink = Sink::default();
    let arrivals = Rc::clone(&sink.arrivals);
    network.add_actor(node, PORT, sink);
    arrivals
}

pub fn source(network: &mut Network, node: NodeId, shots: Vec<Shot>) -> ActorId {
    network.add_actor(node, PORT + 1, Source(shots))
}

pub fn node(network: &Network, name: &str) -> NodeId {
    network.topology().node(name).expect("a node of this name")
}

/// A rack of links of 8 Gbit/s, a byte a nanosecond, and 1 us; the switch's queues as given.
pub fn rack(hosts: usize, queue: QueueConfig) -> Topology {
    let mut parts = Parts::uniform(byte_a_nano());
    parts.switch = NodeConfig::new(queue);
    Topology::one_rack(hosts, &parts).expect("some hosts")
}

pub fn byte_a_nano() -> LinkConfig {
    LinkConfig::new(8 * GBIT, Duration::from_micros(1))
}

/// Tags in the order of their arrival.
pub fn tags(arrivals: &Arrivals) -> Vec<u64> {
    arrivals.borrow().iter().map(|arrival| arrival.2).collect()
}
