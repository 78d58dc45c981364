//! The network: actors, links, and the time that drives them.

use std::io;
use std::time::Duration;

use super::actor::Actor;
use super::context::Context;
use super::core::Core;
use super::flow::{ConstantRateConfig, FlowStatistics, Notice, TcpConfig};
use super::ids::{ActorId, FlowId, LinkId, NodeId, PortId};
use super::impairment::Impairment;
use super::statistics::{NodeStatistics, PortStatistics, QueueStatistics};
use super::time::Time;
use super::topology::{Topology, TopologyError};

/// How packets choose among equally short paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Multipath {
    /// All packets of a flow (addresses and ports) the same one, by hash.
    #[default]
    PerFlow,
    /// Each packet its own, by the dice.
    PerPacket,
}

/// What holds for the whole network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct NetworkConfig {
    /// All randomness comes from it.
    pub seed: u64,
    /// Choice of paths.
    pub multipath: Multipath,
}

/// Why a run came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// An actor or a hook stopped it.
    Stopped,
    /// Nothing is left to happen, but for hooks that repeat.
    Idle,
    /// The time is up.
    TimeUp,
}

/// How far a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Virtual time.
    pub time: Time,
    /// Events so far.
    pub events: u64,
    /// Packets sent into links so far.
    pub packet_hops: u64,
}

/// Which ports a capture or a trace is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ports {
    /// All.
    All,
    /// Both directions of these links.
    Links(Vec<LinkId>),
}

/// A topology that lives.
pub struct Network {
    core: Core,
    actors: Vec<Box<dyn Actor>>,
}

impl Network {
    /// # Errors
    /// When the topology cannot be.
    pub fn new(_topology: Topology, _config: NetworkConfig) -> Result<Self, TopologyError> {
        todo!()
    }

    /// The topology that it was made of.
    #[must_use]
    pub fn topology(&self) -> &Topology {
        todo!()
    }

    /// The time.
    #[must_use]
    pub fn time(&self) -> Time {
        self.core.now
    }

    /// How far the run is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        todo!()
    }

    /// A number that stands for everything that happened: every packet that arrived anywhere, and when.
    #[must_use]
    pub fn digest(&self) -> u64 {
        todo!()
    }

    /// Puts an actor on a node; it is started when the run begins, or goes on.
    ///
    /// # Panics
    /// When there is no such node, it is a switch that is not programmable, the port is taken, or it is one of
    /// [`SimAddress::FLOW_PORTS`](super::SimAddress::FLOW_PORTS).
    pub fn add_actor(&mut self, _node: NodeId, _port: u16, _actor: impl Actor) -> ActorId {
        todo!()
    }

    /// Puts another in an actor's place, at its address: a process that was started again. The new one is started as by
    /// [`Self::add_actor`]; the old one's timers do not fire any more.
    ///
    /// # Panics
    /// When there is no such actor.
    pub fn replace_actor(&mut self, _id: ActorId, _actor: impl Actor) -> Box<dyn Actor> {
        todo!()
    }

    /// An actor, if it is of this type.
    #[must_use]
    pub fn actor<T: Actor>(&self, _id: ActorId) -> Option<&T> {
        todo!()
    }

    /// Acts as an actor, now.
    ///
    /// # Panics
    /// When there is no such actor, or it is of another type.
    pub fn with_actor<T: Actor, R>(
        &mut self,
        _id: ActorId,
        _act: impl FnOnce(&mut T, &mut Context<'_>) -> R,
    ) -> R {
        let _ = &self.actors;
        todo!()
    }

    /// Tells an actor something, now.
    pub fn notify(&mut self, notice: Notice) {
        self.core.notify(notice);
    }

    /// Does something at a time; now, if it has passed.
    pub fn at(&mut self, _at: impl Into<Time>, _act: impl FnOnce(&mut Self) + 'static) {
        todo!()
    }

    /// Does something again and again, first after one `period`, as long as it returns true: samples.
    ///
    /// # Panics
    /// When the period is zero.
    pub fn every(&mut self, _period: Duration, _act: impl FnMut(&mut Self) -> bool + 'static) {
        todo!()
    }

    /// Is told how far the run is, every `events` events. It sees no more than this, and so cannot change the run.
    pub fn on_progress(&mut self, _events: u64, _tell: impl FnMut(Progress) + 'static) {
        todo!()
    }

    /// Goes on until nothing is left to happen, somebody stops it, or the time is up.
    pub fn run_until(&mut self, _end: impl Into<Time>) -> Outcome {
        todo!()
    }

    /// Ends the run after this event.
    pub fn stop(&mut self) {
        self.core.stopped = true;
    }

    /// Opens a TCP-like connection, over which nothing is sent yet.
    ///
    /// # Panics
    /// When an end does not exist, both are the same, or a segment has no bytes.
    pub fn open_tcp(&mut self, config: TcpConfig) -> FlowId {
        self.core.open_tcp(config)
    }

    /// Appends `bytes` to what a connection sends; `arrived` is told when the last of them is at the receiver, and all
    /// before it.
    ///
    /// # Panics
    /// When the flow is not a connection.
    pub fn write(&mut self, flow: FlowId, bytes: u64, arrived: Option<Notice>) {
        self.core.write(flow, bytes, arrived);
    }

    /// Sends for ever.
    ///
    /// # Panics
    /// When the flow is not a connection.
    pub fn fill(&mut self, flow: FlowId) {
        self.core.fill(flow);
    }

    /// Starts a constant-rate flow.
    ///
    /// # Panics
    /// When an end does not exist, both are the same, or the rate or the packet is impossible.
    pub fn start_constant_rate(&mut self, config: ConstantRateConfig) -> FlowId {
        self.core.start_constant_rate(config)
    }

    /// Ends a flow: it sends nothing any more, and nobody is told.
    pub fn stop_flow(&mut self, flow: FlowId) {
        self.core.stop_flow(flow);
    }

    /// What a flow did.
    #[must_use]
    pub fn flow(&self, _flow: FlowId) -> FlowStatistics {
        todo!()
    }

    /// Gives one direction of a link its faults.
    pub fn impair(&mut self, _port: PortId, _impairment: Impairment) {
        todo!()
    }

    /// Takes a link down, or up again. What is queued for it or on it is lost, and routes are found anew.
    pub fn set_link(&mut self, _link: LinkId, _up: bool) {
        todo!()
    }

    /// Takes a node down, with all its links and actors, or up again. When it comes back its actors are started: a
    /// machine that should have lost its memory is replaced while it is down.
    pub fn set_node(&mut self, _node: NodeId, _up: bool) {
        todo!()
    }

    /// One direction of a link.
    #[must_use]
    pub fn port(&self, _port: PortId) -> PortStatistics {
        todo!()
    }

    /// One queue of a port.
    #[must_use]
    pub fn queue(&self, _port: PortId, _priority: u8) -> QueueStatistics {
        todo!()
    }

    /// A node.
    #[must_use]
    pub fn node(&self, _node: NodeId) -> NodeStatistics {
        todo!()
    }

    /// Writes what is sent into links as a pcap file, with nanoseconds.
    pub fn capture(&mut self, _ports: &Ports, _out: impl io::Write + 'static) {
        todo!()
    }

    /// Writes transmissions and queue lengths as a Chrome trace, which Perfetto opens.
    pub fn trace(&mut self, _ports: &Ports, _out: impl io::Write + 'static) {
        todo!()
    }

    /// Closes capture and trace.
    ///
    /// # Errors
    /// When either could not be written.
    pub fn finish(&mut self) -> io::Result<()> {
        todo!()
    }
}
