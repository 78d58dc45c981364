//! The network: actors, links, and the time that drives them.

use std::any::Any;
use std::io;
use std::time::Duration;

use oorandom::Rand64;

use super::actor::Actor;
use super::config::NetworkConfig;
use super::context::Context;
use super::core::{Core, Event, Seat};
use super::cores::Direction;
use super::flow::{ConstantRateConfig, FlowStatistics, Notice, TcpConfig};
use super::ids::{ActorId, FlowId, LinkId, NodeId, PortId, SimAddress};
use super::impairment::{Faults, Impairment};
use super::packets::{Content, PacketId};
use super::pcap::Pcap;
use super::queue::PRIORITIES;
use super::statistics::{DropReason, NodeStatistics, Passed, PortStatistics, QueueStatistics};
use super::time::Time;
use super::topology::{NodeKind, Topology, TopologyError};
use super::trace::Trace;

/// Why a run came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// An actor or a hook stopped it.
    Stopped,
    /// Nothing is left to happen, except hooks that repeat.
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
    /// Packets that are anywhere now.
    pub packets: usize,
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
    /// By number; the core knows where they sit.
    actors: Vec<Box<dyn Actor>>,
    hooks: Vec<Option<Hook>>,
    hooks_free: Vec<u32>,
    /// Events that are only the next of a hook that repeats.
    repeating: usize,
    events: u64,
    progress: Option<Tell>,
    observer: Option<Observer>,
    running: bool,
}

enum Hook {
    Once(Box<dyn FnOnce(&mut Network)>),
    Every(Time, Box<dyn FnMut(&mut Network) -> bool>),
}

/// The callback that is told how far the run is, and every how many events.
struct Tell {
    every: u64,
    tell: Box<dyn FnMut(&Network)>,
}

/// The callback that looks on at a time, and says when it does so next.
struct Observer {
    at: Time,
    look: Box<dyn FnMut(&Network) -> Time>,
}

impl Network {
    /// # Errors
    /// When the topology cannot be.
    pub fn new(topology: Topology, config: NetworkConfig) -> Result<Self, TopologyError> {
        Ok(Self {
            core: Core::new(topology, config)?,
            actors: Vec::new(),
            hooks: Vec::new(),
            hooks_free: Vec::new(),
            repeating: 0,
            events: 0,
            progress: None,
            observer: None,
            running: false,
        })
    }

    /// The topology that it was made of.
    #[must_use]
    pub fn topology(&self) -> &Topology {
        &self.core.topology
    }

    /// The time.
    #[must_use]
    pub fn time(&self) -> Time {
        self.core.now
    }

    /// How far the run is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        Progress {
            time: self.core.now,
            events: self.events,
            packet_hops: self.core.packet_hops,
            packets: self.core.packets.alive(),
        }
    }

    /// A number that stands for everything that happened: every packet that arrived anywhere, and
    /// when.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.core.digest
    }

    /// Puts an actor on a node; it is started when the run begins, or goes on.
    ///
    /// # Panics
    /// When there is no such node, it is a switch that is not programmable, the port is taken, or
    /// it is one of [`SimAddress::FLOW_PORTS`](super::SimAddress::FLOW_PORTS).
    pub fn add_actor(&mut self, node: NodeId, port: u16, actor: impl Actor) -> ActorId {
        assert!(port < SimAddress::FLOW_PORTS, "port {port} belongs to flows");
        let kind = self.core.topology.get(node).kind;
        assert!(
            !matches!(kind, NodeKind::Switch { programmable: false, .. }),
            "{} is not programmable",
            self.core.topology.get(node).name
        );
        let id = ActorId(self.actors.len() as u32);
        let listeners = &mut self.core.nodes[node.index()].listeners;
        match listeners.binary_search_by_key(&port, |(port, _)| *port) {
            Ok(_) => panic!("port {port} of {} is taken", self.core.topology.get(node).name),
            Err(at) => listeners.insert(at, (port, id)),
        }
        self.actors.push(Box::new(actor));
        self.core.seats.push(Seat { address: SimAddress::new(node, port), incarnation: 0 });
        self.core.start(id);
        id
    }

    /// Puts another in an actor's place, at its address: a process that was started again. The new
    /// one is started as by [`Self::add_actor`]; the old one's timers do not fire any more.
    ///
    /// # Panics
    /// When there is no such actor.
    pub fn replace_actor(&mut self, id: ActorId, actor: impl Actor) -> Box<dyn Actor> {
        let old = std::mem::replace(&mut self.actors[id.0 as usize], Box::new(actor));
        self.core.start(id);
        old
    }

    /// An actor, if it is of this type.
    #[must_use]
    pub fn actor<T: Actor>(&self, id: ActorId) -> Option<&T> {
        (self.actors[id.0 as usize].as_ref() as &dyn Any).downcast_ref()
    }

    /// Acts as an actor, now.
    ///
    /// # Panics
    /// When there is no such actor, or it is of another type.
    pub fn with_actor<T: Actor, R>(
        &mut self,
        id: ActorId,
        act: impl FnOnce(&mut T, &mut Context<'_>) -> R,
    ) -> R {
        let actor = (self.actors[id.0 as usize].as_mut() as &mut dyn Any).downcast_mut();
        act(actor.expect("an actor of this type"), &mut Context { core: &mut self.core, actor: id })
    }

    /// Tells an actor something, now.
    pub fn notify(&mut self, notice: Notice) {
        self.core.notify(notice);
    }

    /// Does something at a time; now, if it has passed.
    pub fn at(&mut self, at: impl Into<Time>, act: impl FnOnce(&mut Self) + 'static) {
        self.hook(at.into(), Hook::Once(Box::new(act)));
    }

    /// Does something again and again, first after one `period`, as long as it returns true:
    /// samples.
    ///
    /// # Panics
    /// When the period is zero.
    pub fn every(&mut self, period: Duration, act: impl FnMut(&mut Self) -> bool + 'static) {
        let period = Time::from(period);
        assert!(period > Time::ZERO, "a period of nothing");
        self.repeating += 1;
        self.hook(self.core.now + period, Hook::Every(period, Box::new(act)));
    }

    /// Calls `tell` every `events` events. It looks on, and so cannot change the run.
    pub fn on_progress(&mut self, events: u64, tell: impl FnMut(&Self) + 'static) {
        self.progress = Some(Tell { every: events.max(1), tell: Box::new(tell) });
    }

    /// Calls `look` at a time, after all that happens then, and again whenever it says. Unlike
    /// [`Self::every`] it is no event, so a run is the same with it and without.
    pub fn observe(&mut self, at: impl Into<Time>, look: impl FnMut(&Self) -> Time + 'static) {
        self.observer = Some(Observer { at: at.into(), look: Box::new(look) });
    }

    /// Lets the observer look on at all its times before `until`.
    fn observed(&mut self, until: Time) {
        while let Some(mut observer) = self.observer.take_if(|observer| observer.at < until) {
            self.core.now = observer.at.max(self.core.now);
            // A time that does not come later would be looked at for ever.
            observer.at = (observer.look)(self).max(Time(self.core.now.0.saturating_add(1)));
            self.observer = Some(observer);
        }
    }

    /// Goes on until nothing is left to happen, somebody stops it, or the time is up.
    ///
    /// # Panics
    /// When a hook calls it: the run that called the hook is not over.
    pub fn run_until(&mut self, end: impl Into<Time>) -> Outcome {
        assert!(!self.running, "a hook must not run the network that runs it");
        self.running = true;
        self.core.stopped = false;
        let outcome = self.go_on(end.into());
        self.running = false;
        outcome
    }

    fn go_on(&mut self, end: Time) -> Outcome {
        loop {
            if self.core.stopped {
                return Outcome::Stopped;
            }
            if self.core.agenda.len() == self.repeating {
                return Outcome::Idle;
            }
            if self.core.agenda.turn() {
                self.core.look_ahead();
            }
            let Some((now, event)) = self.core.agenda.next_until(end) else {
                self.observed(end);
                self.core.now = end.max(self.core.now);
                return Outcome::TimeUp;
            };
            self.observed(now);
            self.core.now = now;
            self.events += 1;
            self.happens(event);
            if let Some(mut told) =
                self.progress.take_if(|Tell { every, .. }| self.events.is_multiple_of(*every))
            {
                (told.tell)(self);
                self.progress = Some(told);
            }
        }
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

    /// Appends `bytes` to what a connection sends; `arrived` is told when the last of them is at
    /// the receiver, and all before it.
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

    /// The record of a flow.
    #[must_use]
    pub fn flow(&self, flow: FlowId) -> FlowStatistics {
        self.core.flow_statistics(flow)
    }

    /// Gives one direction of a link its faults, in place of those that it had. The dice go on: the
    /// same faults in two intervals take different packets.
    ///
    /// # Panics
    /// When a chance is not from 0 to 1: [`Impairment::is_sound`].
    pub fn impair(&mut self, port: PortId, impairment: Impairment) {
        assert!(impairment.is_sound(), "a chance that is not from 0 to 1");
        let seed = self.core.seed(port.0.into());
        self.core.ports[port.index()].special = true;
        let faults = &mut self.core.seldom[port.index()].faults;
        let dice = faults.take().map_or_else(|| Rand64::new(seed), |before| before.dice);
        *faults = Some(Box::new(Faults::new(impairment, dice)));
    }

    /// Takes a link down, or up again. Packets that are queued for it or on it are lost, and routes
    /// are found anew.
    pub fn set_link(&mut self, link: LinkId, up: bool) {
        self.core.set_link(link, up);
    }

    /// Whether a node is there.
    #[must_use]
    pub fn is_up(&self, node: NodeId) -> bool {
        self.core.nodes[node.index()].up
    }

    /// Takes a node down, with all its links and actors, or up again. When it comes back its actors
    /// are started: a machine that should have lost its memory is replaced while it is down.
    pub fn set_node(&mut self, node: NodeId, up: bool) {
        if !self.core.set_node(node, up) {
            return;
        }
        for (_, actor) in self.core.nodes[node.index()].listeners.clone() {
            if up {
                self.core.start(actor);
            } else {
                let seat = &mut self.core.seats[actor.0 as usize];
                seat.incarnation = seat.incarnation.wrapping_add(1);
            }
        }
    }

    /// A direction of a link.
    #[must_use]
    pub fn port(&self, port: PortId) -> PortStatistics {
        let state = &self.core.ports[port.index()];
        let seldom = &self.core.seldom[port.index()];
        let mut statistics = PortStatistics {
            sent_packets: state.sent_packets,
            sent_bytes: state.sent_bytes,
            busy: state.busy,
            drops: seldom.drops,
            marked: 0,
            duplicated: seldom.duplicated,
            held_back: seldom.held_back,
            queue_bytes: self.core.queues.bytes(port),
            queue_bytes_max: 0,
        };
        for priority in 0..PRIORITIES {
            let queue = self.queue(port, priority as u8);
            statistics.drops.add(&queue.drops);
            statistics.marked += queue.marked;
            statistics.queue_bytes_max = statistics.queue_bytes_max.max(queue.bytes_max);
        }
        statistics
    }

    /// How long one direction of a link has been busy: what [`Self::port`] has too, sooner.
    #[must_use]
    pub fn busy(&self, port: PortId) -> Time {
        self.core.ports[port.index()].busy
    }

    /// Counts of one direction of a link until now.
    #[must_use]
    pub fn passed(&self, port: PortId) -> Passed {
        let state = &self.core.ports[port.index()];
        let mut passed = Passed {
            busy: state.busy.since(state.busy_until.since(self.core.now)),
            dropped: self.core.seldom[port.index()].drops.total(),
            ..Passed::default()
        };
        for priority in 0..PRIORITIES {
            let queue = self.core.queues.get(port, priority);
            passed.queued_byte_ns += queue.byte_ns(self.core.now);
            passed.marked += queue.marked;
            passed.dropped += self.core.seldom[port.index()].queue_drops(priority).total();
        }
        passed
    }

    /// A queue of a port.
    #[must_use]
    pub fn queue(&self, port: PortId, priority: u8) -> QueueStatistics {
        let priority = usize::from(priority);
        let drops = self.core.seldom[port.index()].queue_drops(priority);
        self.core.queues.get(port, priority).statistics(self.core.now, drops)
    }

    /// A node.
    #[must_use]
    pub fn node(&self, node: NodeId) -> NodeStatistics {
        self.core.nodes[node.index()].statistics
    }

    /// Writes what is sent into links as a pcap file, with nanoseconds.
    pub fn capture(&mut self, ports: &Ports, out: impl io::Write + 'static) {
        self.core.pcap = Some(Pcap::new(Box::new(out)));
        for port in self.chosen(ports) {
            self.core.ports[port].special = true;
            self.core.seldom[port].captured = true;
        }
    }

    /// Writes transmissions and queue lengths as a Chrome trace, which Perfetto opens.
    pub fn trace(&mut self, ports: &Ports, out: impl io::Write + 'static) {
        let chosen = self.chosen(ports);
        let mut names = self.core.names();
        names.retain(|port, _| chosen.contains(&port.index()));
        self.core.trace = Some(Trace::new(Box::new(out), names));
        for port in chosen {
            self.core.ports[port].special = true;
            self.core.seldom[port].traced = true;
        }
    }

    /// Closes capture and trace.
    ///
    /// # Errors
    /// When either could not be written.
    pub fn finish(&mut self) -> io::Result<()> {
        let pcap = self.core.pcap.take().map_or(Ok(()), Pcap::finish);
        pcap.and(self.core.trace.take().map_or(Ok(()), Trace::finish))
    }

    fn chosen(&self, ports: &Ports) -> Vec<usize> {
        match ports {
            Ports::All => (0..self.core.ports.len()).collect(),
            Ports::Links(links) => links.iter().flat_map(|link| link.ports()).map(PortId::index).collect(),
        }
    }

    fn hook(&mut self, at: Time, hook: Hook) {
        let index = self.hooks_free.pop().unwrap_or_else(|| {
            self.hooks.push(None);
            self.hooks.len() as u32 - 1
        });
        self.hooks[index as usize] = Some(hook);
        self.core.agenda.at(at.max(self.core.now), Event::Hook(index));
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Lands { port, epoch } => {
                let (packet, next) = self.core.lands(port, epoch);
                if let Some(packet) = packet.and_then(|packet| self.core.arrives(packet)) {
                    self.deliver(packet);
                }
                self.again(next, event);
            }
            Event::Wakes { port, epoch } => {
                let next = self.core.wakes(port, epoch);
                self.again(next, event);
            }
            Event::Arrives(packet) => {
                if let Some(packet) = self.core.arrives(packet) {
                    self.deliver(packet);
                }
            }
            Event::Handled { node, epoch, direction } => {
                let (packet, next) = self.core.handled(node, epoch, direction);
                match (packet, direction) {
                    (Some(packet), Direction::Sends) => self.core.forward(packet, node),
                    (Some(packet), Direction::Receives) => self.deliver(packet),
                    (None, _) => {}
                }
                self.again(next, event);
            }
            Event::Returns(packet) => {
                if let Some(packet) = self.core.returns(packet) {
                    self.deliver(packet);
                }
            }
            Event::Starts { actor, incarnation } => {
                if self.is_current(actor, incarnation) {
                    self.act(actor, |actor, context| actor.start(context));
                }
            }
            Event::Timer { actor, incarnation, token } => {
                if self.is_current(actor, incarnation) {
                    self.act(actor, |actor, context| actor.timer(context, token));
                }
            }
            Event::Notice { actor, token } => {
                if self.core.nodes[self.core.address(actor).node as usize].up {
                    self.act(actor, |actor, context| actor.notice(context, token));
                }
            }
            Event::Flow(flow) => self.core.flow_due(flow),
            Event::Hook(index) => self.call(index),
        }
    }

    /// The same happens once more, if there is a time for it.
    fn again(&mut self, when: Option<Time>, event: Event) {
        if let Some(when) = when {
            self.core.agenda.at(when, event);
        }
    }

    fn is_current(&self, actor: ActorId, incarnation: u16) -> bool {
        let seat = &self.core.seats[actor.0 as usize];
        seat.incarnation == incarnation && self.core.nodes[seat.address.node as usize].up
    }

    fn act(&mut self, id: ActorId, act: impl FnOnce(&mut dyn Actor, &mut Context<'_>)) {
        let mut context = Context { core: &mut self.core, actor: id };
        act(self.actors[id.0 as usize].as_mut(), &mut context);
    }

    fn deliver(&mut self, packet: PacketId) {
        let record = *self.core.packets.get(packet);
        let node = &mut self.core.nodes[record.to.node as usize];
        node.statistics.received_packets += 1;
        node.statistics.received_bytes += u64::from(record.wire_bytes());
        if matches!(record.content, Content::Segment { .. } | Content::Datagram { .. }) {
            return self.core.flow_packet(packet);
        }
        let Ok(at) = node.listeners.binary_search_by_key(&record.to.port, |(port, _)| *port) else {
            return self.core.drop_at_node(packet, NodeId(record.to.node), DropReason::NoListener);
        };
        let (_, actor) = node.listeners[at];
        if let Content::Bytes(buffer) = record.content {
            // The packet is released when the actor is through with the payload, or what it sends
            // would get it.
            let payload = self.core.packets.take(buffer);
            self.core.mix_in(&payload);
            let view = record.view(&payload);
            self.act(actor, |actor, context| actor.packet(context, &view));
            self.core.packets.put_back(buffer, payload);
        } else {
            let view = record.view(&[]);
            self.act(actor, |actor, context| actor.packet(context, &view));
        }
        self.core.packets.release(packet);
    }

    fn call(&mut self, index: u32) {
        let hook = self.hooks[index as usize].take();
        match hook {
            Some(Hook::Once(act)) => {
                self.hooks_free.push(index);
                act(self);
            }
            Some(Hook::Every(period, mut act)) => {
                if act(self) {
                    self.hooks[index as usize] = Some(Hook::Every(period, act));
                    self.core.agenda.at(self.core.now + period, Event::Hook(index));
                } else {
                    self.repeating -= 1;
                    self.hooks_free.push(index);
                }
            }
            None => {}
        }
    }
}
