//! The world itself: one service or several, racks before it or none, the workers of one job, and
//! the network between them.

use std::time::Duration;

use fanin_protocol::switchml::{Switch, Worker};
use fanin_protocol::{
    Endpoint, Instant, JobAborted, Lane, Lanes, Transmit, Verdict, WorkerEvent, WorkerMachine,
};
use fanin_wire::{AbortReason, Operation, Pattern};
use oorandom::Rand64;

use self::membership::{Answer, Membership, Question, Seat, Service};
use crate::agenda::Agenda;
use crate::checker::{Checker, Violation};
use crate::scenario::{Death, Scenario, TensorShape};
use crate::tensors::Copy;

mod membership;

/// How often a worker says that it lives.
const HEARTBEAT: Duration = Duration::from_millis(50);
/// After how long the switch believes that it does not.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_millis(400);
/// How long the world may take for each switch on a worker's way: a retransmission that mends a
/// loss far up must get there itself.
const PATIENCE: Duration = Duration::from_secs(120);
/// A path that carries chunks of 256 elements.
const MTU: usize = 1280;
const CHUNK_ELEMENTS: usize = 256;

/// The report of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Virtual time at the end.
    pub ended: Instant,
    /// Packets handed to the network.
    pub packets: u64,
    /// The packets that it lost.
    pub lost: u64,
    /// Packets that workers sent again.
    pub retransmissions: u64,
    /// Times that the job, or a lane of it, went on under a new switch.
    pub resumptions: u64,
    /// The lanes that another service took over.
    pub taken_over: u64,
    /// Slots whose last exchange was handed to it.
    pub handed_back: u64,
    /// Services that ended for good.
    pub killed: u64,
    /// A digest of everything that happened, in order.
    pub digest: u64,
}

enum Event {
    ToSwitch {
        switch: Place,
        from: Node,
        packet: Vec<u8>,
    },
    ToWorker {
        worker: u16,
        from: Place,
        packet: Vec<u8>,
    },
    /// The machine's timer, or nothing if it moved.
    Timer {
        worker: u16,
    },
    /// The driver has handled what there was, and asks the machine for its answers.
    DrainWorker {
        worker: u16,
    },
    DrainSwitch {
        switch: Place,
    },
    Submit {
        worker: u16,
    },
    Ask {
        service: Place,
        incarnation: u32,
        seat: Seat,
        question: Question,
    },
    Answer {
        seat: Seat,
        answer: Answer,
    },
    Heartbeat {
        worker: u16,
    },
    Tick {
        service: Place,
        incarnation: u32,
    },
    WorkerDies {
        worker: u16,
    },
    ServiceDies {
        service: Place,
        down: Option<Duration>,
    },
    ServiceIsBack {
        service: Place,
    },
    RackDies {
        rack: usize,
        down: Duration,
    },
    RackIsBack {
        rack: usize,
    },
}

/// A sender and receiver of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Node {
    Worker(u16),
    Switch(Place),
}

/// Which switch: the services come first, and then the racks.
type Place = usize;

type Machine = Worker<Place, Copy>;

/// What sums somewhere.
#[derive(Default)]
struct Summing {
    machine: Option<Switch<Node>>,
    /// How often it was started.
    incarnation: u32,
    /// A drain is on the agenda.
    drains: bool,
    /// Packets that were handled since the last drain.
    handled: usize,
}

struct Rank {
    /// A lane for each service, once all have admitted it.
    lanes: Option<Lanes<Machine>>,
    /// Until then.
    joining: Vec<Option<Lane<Machine>>>,
    memberships: Vec<Membership>,
    alive: bool,
    /// A drain is on the agenda.
    drains: bool,
    submitted: usize,
    failed: Option<AbortReason>,
}

impl Rank {
    fn lane(&mut self, lane: usize) -> Option<&mut Lane<Machine>> {
        match &mut self.lanes {
            Some(lanes) => lanes.lane(lane),
            None => self.joining[lane].as_mut(),
        }
    }
}

struct Fabric {
    dice: Rand64,
    agenda: Agenda<Instant, Event>,
    now: Instant,
    packets: u64,
    lost: u64,
}

struct World<'a> {
    scenario: &'a Scenario,
    fabric: Fabric,
    checker: Checker<'a>,
    services: Vec<Service>,
    switches: Vec<Summing>,
    nodes: Vec<Rank>,
    resumptions: u64,
    taken_over: u64,
    handed_back: u64,
    killed: u64,
    digest: u64,
    train: Vec<u8>,
}

/// Plays a scenario to its end.
///
/// # Errors
/// The first rule that was broken.
pub fn run(scenario: &Scenario) -> Result<Report, Violation> {
    let mut world = World::new(scenario);
    world.play()?;
    let lanes = world.nodes.iter_mut().filter_map(|node| node.lanes.as_mut()).flat_map(Lanes::iter_mut);
    let retransmissions = lanes.map(|lane| lane.machine.statistics().retransmissions).sum();
    Ok(Report {
        ended: world.fabric.now,
        packets: world.fabric.packets,
        lost: world.fabric.lost,
        retransmissions,
        resumptions: world.resumptions,
        taken_over: world.taken_over,
        handed_back: world.handed_back,
        killed: world.killed,
        digest: world.digest,
    })
}

impl Fabric {
    /// Puts a packet on its way: it arrives never, once or twice, some time.
    fn carry(&mut self, scenario: &Scenario, mut event: impl FnMut() -> Event) {
        self.packets += 1;
        if self.dice.rand_float() < scenario.loss {
            self.lost += 1;
            return;
        }
        let copies = if self.dice.rand_float() < scenario.duplication { 2 } else { 1 };
        for _ in 0..copies {
            let mut delay = self.between(scenario.delay, scenario.delay * 3);
            if self.dice.rand_float() < scenario.reordering {
                delay += self.between(Duration::ZERO, scenario.held_back);
            }
            self.agenda.at(self.now + delay, event());
        }
    }

    fn between(&mut self, least: Duration, most: Duration) -> Duration {
        let (least, most) = (least.as_nanos() as u64, most.as_nanos() as u64);
        Duration::from_nanos(self.dice.rand_range(least..most.max(least) + 1))
    }

    /// The control connection: slow and reliable.
    fn tell(&mut self, scenario: &Scenario, event: Event) {
        let delay = self.between(scenario.delay * 2, scenario.delay * 20);
        self.agenda.at(self.now + delay, event);
    }
}

impl<'a> World<'a> {
    fn new(scenario: &'a Scenario) -> Self {
        let count = scenario.services.count;
        let node = |_| Rank {
            lanes: None,
            joining: (0..count).map(|_| None).collect(),
            memberships: (0..count).map(Membership::new).collect(),
            alive: true,
            drains: false,
            submitted: 0,
            failed: None,
        };
        let mut world = Self {
            scenario,
            fabric: Fabric {
                dice: Rand64::new(u128::from(scenario.seed)),
                agenda: Agenda::new(),
                now: Instant(0),
                packets: 0,
                lost: 0,
            },
            checker: Checker::new(scenario, CHUNK_ELEMENTS),
            services: (0..count).map(|_| Service::default()).collect(),
            switches: (0..count + scenario.racks.upstreams.len()).map(|_| Summing::default()).collect(),
            nodes: (0..scenario.workers).map(node).collect(),
            resumptions: 0,
            taken_over: 0,
            handed_back: 0,
            killed: 0,
            digest: 0,
            train: vec![0; 65536],
        };
        (0..count).for_each(|service| world.start_service(service));
        (count..world.switches.len()).for_each(|rack| world.start_switch(rack));
        for worker in 0..scenario.workers {
            (0..count).for_each(|lane| world.rejoin(worker, lane));
            world.fabric.agenda.at(Instant(0), Event::Heartbeat { worker });
        }
        if let Some((worker, at)) = scenario.crash {
            world.fabric.agenda.at(at, Event::WorkerDies { worker });
        }
        for restart in &scenario.restarts {
            let down = Some(restart.down);
            world.fabric.agenda.at(restart.at, Event::ServiceDies { service: 0, down });
        }
        for Death { service, at, down } in &scenario.services.deaths {
            world.fabric.agenda.at(*at, Event::ServiceDies { service: *service, down: *down });
        }
        for (rack, restart) in &scenario.racks.restarts {
            world.fabric.agenda.at(restart.at, Event::RackDies { rack: *rack, down: restart.down });
        }
        world
    }

    fn play(&mut self) -> Result<(), Violation> {
        let way = |worker| self.scenario.racks.way(worker).len() as u32;
        let levels = 1 + (0..self.scenario.workers).map(way).max().unwrap_or(0);
        let deadline = Instant(0) + PATIENCE * levels;
        while !self.settled() {
            let completed = || self.checker.completed.iter().map(std::collections::BTreeSet::len).collect();
            let Some((now, event)) = self.fabric.agenda.next().filter(|(now, _)| *now < deadline) else {
                return Err(Violation::NoProgress { completed: completed(), at: self.fabric.now });
            };
            self.fabric.now = now;
            self.happen(event)?;
            self.check_bounds()?;
        }
        Ok(())
    }

    /// Whether every living worker has all its tensors or knows why not.
    fn settled(&self) -> bool {
        let tensors = self.scenario.tensors.len();
        self.nodes
            .iter()
            .zip(&self.checker.completed)
            .all(|(node, completed)| !node.alive || node.failed.is_some() || completed.len() == tensors)
    }

    /// Memory is bounded: every packet in the network was in a slot's turn or a retransmission of
    /// it.
    fn check_bounds(&self) -> Result<(), Violation> {
        // Two copies of each packet, up and down; a timeout may send a slot again some times within
        // the longest delay.
        let slots = usize::from(self.scenario.slots) * usize::from(self.scenario.workers);
        let most = 400 + 200 * slots * self.switches.len();
        let size = self.fabric.agenda.len();
        if size > most { Err(Violation::Unbounded { what: "network", size }) } else { Ok(()) }
    }

    fn happen(&mut self, event: Event) -> Result<(), Violation> {
        let now = self.fabric.now;
        match event {
            Event::ToSwitch { switch, from, packet } => {
                let summing = &mut self.switches[switch];
                let Some(machine) = &mut summing.machine else { return Ok(()) };
                let verdict = machine.handle_packet(now, from, &packet);
                summing.handled += 1;
                let (drains, incarnation) =
                    (std::mem::replace(&mut summing.drains, true), summing.incarnation);
                self.note(&packet, verdict);
                self.checker.at_switch((switch, incarnation), &packet, verdict)?;
                if !drains {
                    let wait = self.fabric.between(Duration::ZERO, self.scenario.round);
                    self.fabric.agenda.at(now + wait, Event::DrainSwitch { switch });
                }
            }
            Event::ToWorker { worker, from, packet } => {
                let node = &mut self.nodes[usize::from(worker)];
                if let Some(machine) = node.lanes.as_mut().filter(|_| node.alive) {
                    let verdict = machine.handle_packet(now, from, &packet);
                    let drains = std::mem::replace(&mut node.drains, true);
                    self.note(&packet, verdict);
                    self.checker.at_worker(worker, &packet, verdict);
                    if !drains {
                        let wait = self.fabric.between(Duration::ZERO, self.scenario.round);
                        self.fabric.agenda.at(now + wait, Event::DrainWorker { worker });
                    }
                }
            }
            Event::Timer { worker } => {
                let node = &mut self.nodes[usize::from(worker)];
                if let Some(machine) = node.lanes.as_mut().filter(|_| node.alive)
                    && machine.poll_timeout().is_some_and(|due| due <= now)
                {
                    machine.handle_timeout(now);
                    self.drain_worker(worker)?;
                }
            }
            Event::DrainWorker { worker } => {
                self.nodes[usize::from(worker)].drains = false;
                self.drain_worker(worker)?;
            }
            Event::DrainSwitch { switch } => {
                self.switches[switch].drains = false;
                self.drain_switch(switch)?;
            }
            Event::Submit { worker } => self.submit(worker)?,
            Event::Ask { service, incarnation, seat, question } => {
                self.answer(service, incarnation, seat, question);
            }
            Event::Answer { seat, answer } => self.hear(seat, answer)?,
            Event::Heartbeat { worker } => {
                let node = &self.nodes[usize::from(worker)];
                if node.alive && node.failed.is_none() {
                    self.say_alive(worker);
                    self.fabric.agenda.at(now + HEARTBEAT, Event::Heartbeat { worker });
                }
            }
            Event::Tick { service, incarnation } => self.tick(service, incarnation)?,
            Event::WorkerDies { worker } => {
                self.nodes[usize::from(worker)].alive = false;
                self.withdraw(worker);
            }
            Event::ServiceDies { service, down } => self.end_service(service, down),
            Event::ServiceIsBack { service } => {
                if !self.services[service].is_gone {
                    self.start_service(service);
                }
            }
            Event::RackDies { rack, down } => {
                let place = self.rack(rack);
                self.switches[place].machine = None;
                self.break_connections(rack);
                self.fabric.agenda.at(now + down, Event::RackIsBack { rack });
            }
            Event::RackIsBack { rack } => self.start_switch(self.rack(rack)),
        }
        Ok(())
    }

    /// The place of a rack among the switches.
    fn rack(&self, rack: usize) -> Place {
        self.services.len() + rack
    }

    /// The first hop of a worker's packets to a service.
    fn first_hop(&self, worker: u16, service: Place) -> Place {
        self.scenario.racks.way(worker).first().map_or(service, |rack| self.rack(*rack))
    }

    fn submit(&mut self, worker: u16) -> Result<(), Violation> {
        let node = &mut self.nodes[usize::from(worker)];
        let Some(lanes) = node.lanes.as_mut().filter(|_| node.alive) else { return Ok(()) };
        // Tensors go to the lanes in turn, each whole.
        let lane = lanes.lane(node.submitted % self.services.len());
        if let Some((shape, lane)) = self.scenario.tensors.get(node.submitted).zip(lane) {
            let operation = Operation { op: shape.op, pattern: shape.pattern };
            lane.machine.submit(Copy::contribution(self.scenario, node.submitted, worker), operation);
            node.submitted += 1;
            let pause = self.fabric.between(Duration::ZERO, self.scenario.pause);
            self.fabric.agenda.at(self.fabric.now + pause, Event::Submit { worker });
        }
        self.drain_worker(worker)
    }

    fn drain_worker(&mut self, worker: u16) -> Result<(), Violation> {
        let now = self.fabric.now;
        let node = &mut self.nodes[usize::from(worker)];
        let Some(machine) = &mut node.lanes else { return Ok(()) };
        let mut sent = 0;
        let from = Node::Worker(worker);
        while let Some(Transmit { to, bytes, segment_bytes }) = machine.poll_transmit(now, &mut self.train) {
            let switch = to[0];
            for packet in self.train[..bytes].chunks(segment_bytes) {
                sent += 1;
                self.fabric.carry(self.scenario, || Event::ToSwitch {
                    switch,
                    from,
                    packet: packet.to_vec(),
                });
            }
        }
        if sent > usize::from(self.scenario.slots) * self.services.len() {
            return Err(Violation::Unbounded { what: "worker's window", size: sent });
        }
        if let Some(due) = machine.poll_timeout() {
            self.fabric.agenda.at(due.max(now), Event::Timer { worker });
        }
        let mut failed = None;
        while let Some((_, event)) = machine.poll_event() {
            match event {
                WorkerEvent::Completed(tensor, _) => self.checker.completed(worker, &tensor)?,
                WorkerEvent::Aborted(reason) => failed = Some(reason),
            }
        }
        failed.map_or(Ok(()), |reason| self.fail(worker, reason))
    }

    fn drain_switch(&mut self, switch: Place) -> Result<(), Violation> {
        let now = self.fabric.now;
        let summing = &mut self.switches[switch];
        let Some(machine) = &mut summing.machine else { return Ok(()) };
        let mut answers = 0;
        while let Some(Transmit { to, bytes, segment_bytes }) = machine.poll_transmit(now, &mut self.train) {
            answers += bytes.div_ceil(segment_bytes);
            let to = to.to_vec();
            for packet in self.train[..bytes].chunks(segment_bytes) {
                for &to in &to {
                    let event = || match to {
                        Node::Worker(worker) => {
                            Event::ToWorker { worker, from: switch, packet: packet.to_vec() }
                        }
                        Node::Switch(to) => {
                            let from = Node::Switch(switch);
                            Event::ToSwitch { switch: to, from, packet: packet.to_vec() }
                        }
                    };
                    self.fabric.carry(self.scenario, event);
                }
            }
        }
        // At most one result, reply or packet to the upstream a packet handled (for the last two,
        // two a slot at most), or an abort for everybody. A result that is a root's alone is
        // another one than that of the others.
        let handled = std::mem::take(&mut summing.handled);
        // A service has the job of its own lane, and those that it took over.
        let services = self.services.len();
        let slots = usize::from(self.scenario.slots) * services;
        let has_roots = |shape: &TensorShape| matches!(shape.pattern, Pattern::Reduce(_));
        let of_packets = if self.scenario.tensors.iter().any(has_roots) {
            (2 * handled).min(6 * slots)
        } else {
            handled.min(if switch >= services { 6 } else { 4 } * slots)
        };
        if answers > of_packets + services * (usize::from(self.scenario.workers) + 1) {
            return Err(Violation::Unbounded { what: "switch's answers", size: answers });
        }
        while let Some(JobAborted { job, reason }) = machine.poll_event() {
            if let Some(registry) =
                self.services.get_mut(switch).and_then(|service| service.registry.as_mut())
            {
                registry.aborted(now, job, reason);
            }
        }
        Ok(())
    }

    /// Mixes what happened into the digest (FNV-1a).
    fn note(&mut self, packet: &[u8], verdict: Verdict) {
        let verdict = match verdict {
            Verdict::Absorb => 1,
            Verdict::Multicast => 2,
            Verdict::ReplyUnicast => 3,
            Verdict::Drop(reason) => 4 + reason as u8,
            Verdict::Forward => u8::MAX,
        };
        let time = self.fabric.now.0.to_le_bytes();
        for byte in packet.iter().take(64).chain(&time).chain([&verdict]) {
            self.digest = (self.digest ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}
