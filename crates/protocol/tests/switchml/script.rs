//! SwitchML's machines and services of a scenario, what happens to them, and what must hold meanwhile.

use std::fmt;
use std::time::Duration;

use fanin_protocol::switchml::{Switch, Worker};
use fanin_protocol::{
    Endpoint, Instant, Lane, Lanes, Reason, Transmit, Verdict, WorkerEvent, WorkerMachine, WorkerStatistics,
};
use fanin_testworld::{Machine, Network, Numbered, Packet, Random, Script, Working, World};
use fanin_wire::{AbortReason, JobId, Operation, Pattern, ShardId};

use crate::checker::Checker;
use crate::membership::{
    self, Answer, Membership, Question, Seat, Service, break_connections, end_service, rejoin, say_alive,
    start_service, start_switch, withdraw,
};
use crate::scenario::{Death, Scenario, TensorShape};
use crate::tensors::{check, contribution};

/// How often a worker says that it lives.
pub const HEARTBEAT: Duration = Duration::from_millis(50);
/// How long the world may take for each switch on a worker's way: a retransmission that mends a loss far up must get there itself.
const PATIENCE: Duration = Duration::from_secs(120);
pub const CHUNK_ELEMENTS: usize = 256;

/// Which switch: the services come first, and then the racks. Workers come after these, so that a switch's node is its place.
pub type Place = usize;

pub type LaneMachine = Worker<Place, Numbered>;

/// A worker with a lane for each service.
pub struct Rank {
    /// Once all have admitted it.
    lanes: Option<Lanes<LaneMachine>>,
    /// Until then.
    joining: Vec<Option<Lane<LaneMachine>>>,
    submitted: usize,
}

impl Rank {
    fn new(services: usize) -> Self {
        Self { lanes: None, joining: (0..services).map(|_| None).collect(), submitted: 0 }
    }

    pub fn lane(&mut self, lane: usize) -> Option<&mut Lane<LaneMachine>> {
        match &mut self.lanes {
            Some(lanes) => lanes.lane(lane),
            None => self.joining[lane].as_mut(),
        }
    }

    /// A service has admitted it; whether it was the last one.
    pub fn admitted(&mut self, lane: usize, machine: Lane<LaneMachine>) -> bool {
        self.joining[lane] = Some(machine);
        let all = self.joining.iter().all(Option::is_some);
        if all {
            self.lanes = Some(Lanes::new(std::mem::take(&mut self.joining).into_iter().flatten().collect()));
        }
        all
    }
}

impl fmt::Debug for Rank {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} submitted", self.submitted)
    }
}

impl Endpoint for Rank {
    type Address = Place;
    type Event = WorkerEvent<Numbered>;

    fn receive(
        &mut self,
        now: Instant,
        from: &Place,
        packet: &fanin_protocol::Packet<'_>,
    ) -> Result<Verdict, Reason> {
        self.lanes.as_mut().ok_or(Reason::UnknownJob)?.receive(now, from, packet)
    }

    fn count(&mut self, verdict: Verdict) -> Verdict {
        self.lanes.as_mut().map_or(verdict, |lanes| lanes.count(verdict))
    }

    fn handle_timeout(&mut self, now: Instant) {
        self.lanes.iter_mut().for_each(|lanes| lanes.handle_timeout(now));
    }

    fn poll_transmit(&mut self, now: Instant, train: &mut [u8]) -> Option<Transmit<'_, Place>> {
        self.lanes.as_mut()?.poll_transmit(now, train)
    }

    fn poll_event(&mut self) -> Option<WorkerEvent<Numbered>> {
        self.lanes.as_mut()?.poll_event().map(|(_, event)| event)
    }

    fn poll_timeout(&self) -> Option<Instant> {
        self.lanes.as_ref()?.poll_timeout()
    }
}

impl Working for Rank {
    /// Tensors go to the lanes in turn, each whole.
    fn take_in(&mut self, tensor: Numbered, operation: Operation) {
        let lanes = self.lanes.as_mut().expect("it was admitted everywhere");
        let count = lanes.iter().count();
        let lane = lanes.lane(self.submitted % count).expect("as many lanes as services");
        lane.machine.submit(tensor, operation);
        self.submitted += 1;
    }

    fn counted(&self) -> WorkerStatistics {
        let mut all = WorkerStatistics::default();
        for lane in self.lanes.iter().flat_map(Lanes::iter) {
            let WorkerStatistics { packets_sent, retransmissions, completed, .. } = lane.machine.statistics();
            all.packets_sent += packets_sent;
            all.retransmissions += retransmissions;
            all.completed += completed;
        }
        all
    }

    fn standing(&self) -> (usize, u64) {
        let lanes = || self.lanes.iter().flat_map(Lanes::iter).map(|lane| &lane.machine);
        (lanes().map(LaneMachine::outstanding).sum(), lanes().map(LaneMachine::progress).sum())
    }
}

/// What a run was like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Virtual time at the end.
    pub ended: Duration,
    /// Packets handed to the network.
    pub packets: u64,
    /// Those that it lost.
    pub lost: u64,
    /// Packets that workers sent again.
    pub retransmissions: u64,
    pub counts: Counts,
    /// A digest of everything that happened, in order.
    pub digest: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Times that the job, or a lane of it, went on under a new switch.
    pub resumptions: u64,
    /// Those where another service took over.
    pub taken_over: u64,
    /// Slots whose last exchange was handed to it.
    pub handed_back: u64,
    /// Services that ended for good.
    pub killed: u64,
}

pub enum Happening {
    Submit { worker: u16 },
    Ask { service: Place, incarnation: u32, seat: Seat, question: Question },
    Answer { seat: Seat, answer: Answer },
    Heartbeat { worker: u16 },
    Tick { service: Place, incarnation: u32 },
    WorkerDies { worker: u16 },
    ServiceDies { service: Place, down: Option<Duration> },
    ServiceIsBack { service: Place },
    RackDies { rack: usize, down: Duration },
    RackIsBack { rack: usize },
}

pub struct SwitchMl {
    pub scenario: Scenario,
    pub checker: Checker,
    pub services: Vec<Service>,
    /// How often each switch was started.
    pub incarnations: Vec<u32>,
    /// Packets that each switch has handled since it sent.
    handled: Vec<usize>,
    /// By worker and lane.
    pub memberships: Vec<Vec<Membership>>,
    pub failed: Vec<Option<AbortReason>>,
    pub counts: Counts,
    digest: u64,
}

impl fmt::Debug for SwitchMl {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:?}", self.scenario)
    }
}

impl SwitchMl {
    fn switches(&self) -> usize {
        self.incarnations.len()
    }

    /// The node of a worker.
    pub fn worker(&self, worker: u16) -> usize {
        self.switches() + usize::from(worker)
    }

    /// Where a rack is among the switches.
    pub fn rack(&self, rack: usize) -> Place {
        self.services.len() + rack
    }

    /// Where a worker's packets to a service go.
    pub fn first_hop(&self, worker: u16, service: Place) -> Place {
        self.scenario.racks.way(worker).first().map_or(service, |rack| self.rack(*rack))
    }

    /// Mixes what happened into the digest (FNV-1a).
    fn note(&mut self, now: u64, packet: &[u8], verdict: Verdict) {
        let verdict = match verdict {
            Verdict::Absorb => 1,
            Verdict::Multicast => 2,
            Verdict::ReplyUnicast => 3,
            Verdict::Drop(reason) => 4 + reason as u8,
            Verdict::Forward => u8::MAX,
        };
        for byte in packet.iter().take(64).chain(&now.to_le_bytes()).chain([&verdict]) {
            self.digest = (self.digest ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

/// Plays a scenario to its end.
pub fn run(scenario: &Scenario) -> Report {
    let world = world(scenario).play();
    Report {
        ended: world.now(),
        packets: world.packets(),
        lost: world.lost(),
        retransmissions: world.retransmissions(),
        counts: world.script.counts,
        digest: world.script.digest,
    }
}

fn world(scenario: &Scenario) -> World<SwitchMl> {
    let count = scenario.services.count;
    let switches = count + scenario.racks.upstreams.len();
    let workers = usize::from(scenario.workers);
    let script = SwitchMl {
        scenario: scenario.clone(),
        checker: Checker::new(scenario.workers),
        services: (0..count).map(|_| Service::default()).collect(),
        incarnations: vec![0; switches],
        handled: vec![0; switches],
        memberships: (0..workers).map(|_| (0..count).map(Membership::new).collect()).collect(),
        failed: vec![None; workers],
        counts: Counts::default(),
        digest: 0,
    };
    let mut machines: Vec<_> =
        (0..switches).map(|_| Machine::summer(Switch::<usize>::new(ShardId(0)))).collect();
    machines.extend((0..workers).map(|_| Machine::worker(Rank::new(count))));
    let mut world = World::new(script, Random(scenario.seed), machines, scenario.tensors.len());
    (0..count).for_each(|service| start_service(&mut world, service));
    (count..switches).for_each(|rack| start_switch(&mut world, rack));
    for worker in 0..scenario.workers {
        (0..count).for_each(|lane| rejoin(&mut world, worker, lane));
        world.happens_at(0, Happening::Heartbeat { worker });
    }
    if let Some((worker, at)) = scenario.crash {
        world.happens_at(at.0, Happening::WorkerDies { worker });
    }
    for restart in &scenario.restarts {
        world.happens_at(restart.at.0, Happening::ServiceDies { service: 0, down: Some(restart.down) });
    }
    for Death { service, at, down } in &scenario.services.deaths {
        world.happens_at(at.0, Happening::ServiceDies { service: *service, down: *down });
    }
    for (rack, restart) in &scenario.racks.restarts {
        world.happens_at(restart.at.0, Happening::RackDies { rack: *rack, down: restart.down });
    }
    world
}

impl Script for SwitchMl {
    type Happening = Happening;

    fn network(&self) -> Network {
        let Scenario { loss, duplication, reordering, held_back, delay, .. } = self.scenario;
        let per_mille = |chance: f64| (chance * 1000.0).round() as u64;
        Network {
            loss_per_mille: per_mille(loss),
            double_per_mille: per_mille(duplication),
            delay_us: delay.as_micros() as u64,
            jitter_us: 2 * delay.as_micros() as u64,
            reordered_per_mille: per_mille(reordering),
            held_back_us: held_back.as_micros() as u64,
        }
    }

    fn jobs(&self) -> Vec<JobId> {
        vec![]
    }

    fn tensor(&self, node: usize, number: usize) -> (Numbered, Operation) {
        let TensorShape { op, pattern, .. } = self.scenario.tensors[number];
        let worker = (node - self.switches()) as u16;
        let values = contribution(&self.scenario, number, worker);
        (Numbered::new(number, values), Operation { op, pattern })
    }

    fn patience(&self) -> Duration {
        let way = |worker| self.scenario.racks.way(worker).len() as u32;
        PATIENCE * (1 + (0..self.scenario.workers).map(way).max().unwrap_or(0))
    }

    fn round(&self) -> Option<Duration> {
        Some(self.scenario.round)
    }

    /// Every living worker has all its tensors or knows why not.
    fn is_over(world: &World<Self>) -> bool {
        let tensors = world.script.scenario.tensors.len();
        (0..world.script.scenario.workers).all(|worker| {
            let node = world.script.worker(worker);
            let has_all = || (0..tensors).all(|number| world.done(node, number).is_some());
            world.is_down(node) || world.script.failed[usize::from(worker)].is_some() || has_all()
        })
    }

    fn happen(world: &mut World<Self>, what: Happening) {
        match what {
            Happening::Submit { worker } => submit(world, worker),
            Happening::Ask { service, incarnation, seat, question } => {
                membership::answer(world, service, incarnation, seat, question);
            }
            Happening::Answer { seat, answer } => membership::hear(world, seat, answer),
            Happening::Heartbeat { worker } => {
                let is_out = world.script.failed[usize::from(worker)].is_some();
                if !is_out && !world.is_down(world.script.worker(worker)) {
                    say_alive(world, worker);
                    world.happens_in(HEARTBEAT, Happening::Heartbeat { worker });
                }
            }
            Happening::Tick { service, incarnation } => membership::tick(world, service, incarnation),
            Happening::WorkerDies { worker } => {
                world.die(world.script.worker(worker));
                withdraw(world, worker);
            }
            Happening::ServiceDies { service, down } => end_service(world, service, down),
            Happening::ServiceIsBack { service } => {
                if !world.script.services[service].is_gone {
                    start_service(world, service);
                }
            }
            Happening::RackDies { rack, down } => {
                world.die(world.script.rack(rack));
                break_connections(world, rack);
                world.happens_in(down, Happening::RackIsBack { rack });
            }
            Happening::RackIsBack { rack } => start_switch(world, world.script.rack(rack)),
        }
    }

    fn gave_up(world: &mut World<Self>, node: usize, job: Option<JobId>, reason: AbortReason) {
        let now = world.clock();
        match job {
            // A rack has no registry.
            Some(job) => {
                let service = world.script.services.get_mut(node);
                if let Some(registry) = service.and_then(|service| service.registry.as_mut()) {
                    registry.aborted(now, job, reason);
                }
            }
            None => fail(world, (node - world.script.switches()) as u16, reason),
        }
    }

    /// Memory is bounded: every packet in the network was in a slot's turn or a retransmission of it.
    fn before_packet(world: &mut World<Self>) {
        let script = &world.script;
        // Two copies of each packet, up and down; a timeout may send a slot again some times within the longest delay.
        let slots = usize::from(script.scenario.slots) * usize::from(script.scenario.workers);
        let most = 400 + 200 * slots * script.switches();
        let size = world.ahead();
        assert!(size <= most, "{size} events are ahead, where {most} may be: {}", world.standing());
    }

    fn after_packet(world: &mut World<Self>, node: usize, packet: &Packet, verdict: Verdict) {
        let now = world.ns();
        let script = &mut world.script;
        script.note(now, &packet.bytes, verdict);
        if node < script.switches() {
            script.handled[node] += 1;
            script.checker.at_switch((node, script.incarnations[node]), &packet.bytes, verdict);
        } else {
            let worker = (node - script.switches()) as u16;
            script.checker.at_worker(worker, &packet.bytes, verdict);
        }
    }

    fn after_drain(world: &mut World<Self>, node: usize, sent: usize) {
        let script = &mut world.script;
        let Scenario { slots, workers, tensors, .. } = &script.scenario;
        let services = script.services.len();
        let slots = usize::from(*slots) * services;
        if node >= script.incarnations.len() {
            assert!(sent <= slots, "{node} sends {sent} packets: {:?}", script.scenario);
            return;
        }
        // One result, reply or packet to the upstream a packet handled, of the last two each two a slot at most, or an abort for
        // everybody. A result that is a root's alone is another one than that of the others. A service has the job of its own
        // lane, and those that it took over.
        let handled = std::mem::take(&mut script.handled[node]);
        let has_roots = |shape: &TensorShape| matches!(shape.pattern, Pattern::Reduce(_));
        let of_packets = if tensors.iter().any(has_roots) {
            (2 * handled).min(6 * slots)
        } else {
            handled.min(if node >= services { 6 } else { 4 } * slots)
        };
        let most = of_packets + services * (usize::from(*workers) + 1);
        assert!(sent <= most, "{node} answers with {sent} packets, {most} at most: {:?}", script.scenario);
    }

    fn check(world: &World<Self>) {
        let script = &world.script;
        for number in 0..script.scenario.tensors.len() {
            let of = |worker| (worker, world.done(script.worker(worker), number));
            let done = (0..script.scenario.workers).map(of);
            let done: Vec<_> = done.filter_map(|(worker, sum)| Some((worker, &sum?.values))).collect();
            check(&script.scenario, number, &done, CHUNK_ELEMENTS);
        }
    }
}

fn submit(world: &mut World<SwitchMl>, worker: u16) {
    let node = world.script.worker(worker);
    let rank: &Rank = world.machine(node);
    if rank.lanes.is_none() || world.is_down(node) {
        return;
    }
    let submitted = rank.submitted;
    if submitted < world.script.scenario.tensors.len() {
        world.submit(node, submitted);
        let pause = between(world, Duration::ZERO, world.script.scenario.pause);
        world.happens_in(pause, Happening::Submit { worker });
    }
    world.drain(node);
}

/// A worker cannot go on.
pub fn fail(world: &mut World<SwitchMl>, worker: u16, reason: AbortReason) {
    let script = &mut world.script;
    let expected = script.scenario.crash.map(|(dead, _)| AbortReason::Expelled(fanin_wire::Rank(dead)));
    assert_eq!(expected, Some(reason), "worker {worker}: {:?}", script.scenario);
    script.failed[usize::from(worker)] = Some(reason);
}

pub fn between(world: &mut World<SwitchMl>, least: Duration, most: Duration) -> Duration {
    let (least, most) = (least.as_nanos() as u64, most.as_nanos() as u64);
    Duration::from_nanos(least + world.random.below(most.max(least) + 1 - least))
}

/// The control connection: slow and reliable.
pub fn tell(world: &mut World<SwitchMl>, what: Happening) {
    let delay = world.script.scenario.delay;
    let after = between(world, delay * 2, delay * 20);
    world.happens_in(after, what);
}
