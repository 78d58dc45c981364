//! The world itself: one switch, racks before it or none, the workers of one job, and the network between them.

use std::time::Duration;

use fanin_protocol::control::{
    Admission, Command, HeartbeatReply, Hop, JoinDecision, JoinRequest, Protocol, Rack, Refusal, Registry,
    RegistryConfig, Resume, Ticket,
};
use fanin_protocol::switchml::{Switch, SwitchJob, Upstream, Worker, WorkerPlan};
use fanin_protocol::{
    Endpoint, Instant, JobAborted, RetransmissionConfig, Summer, Transmit, Verdict, WorkerEvent,
    WorkerMachine,
};
use fanin_wire::{AbortReason, Generation, JobId, Key, Operation, Pattern, ShardId, WorkerId};
use oorandom::Rand64;

use crate::agenda::Agenda;
use crate::checker::{Checker, Violation};
use crate::scenario::{Scenario, TensorShape};
use crate::tensors::Copy;

/// How often a worker says that it lives.
const HEARTBEAT: Duration = Duration::from_millis(50);
/// After how long the switch believes that it does not.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_millis(400);
/// How long the world may take for each switch on a worker's way: a retransmission that mends a loss far up must get there itself.
const PATIENCE: Duration = Duration::from_secs(120);
/// A path that carries chunks of 256 elements.
const MTU: usize = 1280;
const CHUNK_ELEMENTS: usize = 256;

/// What a run was like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Virtual time at the end.
    pub ended: Instant,
    /// Packets handed to the network.
    pub packets: u64,
    /// Those that it lost.
    pub lost: u64,
    /// Packets that workers sent again.
    pub retransmissions: u64,
    /// Times that the job went on under a new switch.
    pub resumptions: u64,
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
        worker: u8,
        packet: Vec<u8>,
    },
    /// The machine's timer, or nothing if it moved.
    Timer {
        worker: u8,
    },
    /// The driver has handled what there was, and asks the machine for its answers.
    DrainWorker {
        worker: u8,
    },
    DrainSwitch {
        switch: Place,
    },
    Submit {
        worker: u8,
    },
    Ask {
        worker: u8,
        incarnation: u32,
        question: Question,
    },
    Answer {
        worker: u8,
        answer: Answer,
    },
    Heartbeat {
        worker: u8,
    },
    Tick {
        incarnation: u32,
    },
    WorkerDies {
        worker: u8,
    },
    SwitchDies {
        down: Duration,
    },
    SwitchIsBack,
    RackDies {
        rack: usize,
        down: Duration,
    },
    RackIsBack {
        rack: usize,
    },
}

/// Who sends and receives packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Node {
    Worker(u8),
    Switch(Place),
}

/// The root, or a rack.
type Place = Option<usize>;

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

enum Question {
    Join(Option<Resume>),
    /// Of a rank that shows this secret.
    Heartbeat(JobId, Generation, u64),
}

enum Answer {
    Admitted(Box<Admission>),
    Heartbeat(JobId, Generation, HeartbeatReply),
    /// The switch says no.
    Refused(Refusal),
    /// Nobody listens there, or the connection broke.
    Broken,
}

struct Rank {
    machine: Option<Worker<(), Copy>>,
    /// Job and generation while joined.
    joined: Option<(JobId, Generation)>,
    /// Of the job that it joined last.
    key: Option<Key>,
    alive: bool,
    /// A drain is on the agenda.
    drains: bool,
    submitted: usize,
    failed: Option<AbortReason>,
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
    root: Summing,
    /// While the root runs.
    registry: Option<Registry>,
    racks: Vec<Summing>,
    waiting: Vec<(Ticket, u8)>,
    nodes: Vec<Rank>,
    resumptions: u64,
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
    let retransmissions = |node: &Rank| node.machine.as_ref().map_or(0, |m| m.statistics().retransmissions);
    Ok(Report {
        ended: world.fabric.now,
        packets: world.fabric.packets,
        lost: world.fabric.lost,
        retransmissions: world.nodes.iter().map(retransmissions).sum(),
        resumptions: world.resumptions,
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
        let node = |_| Rank {
            machine: None,
            joined: None,
            key: None,
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
            root: Summing::default(),
            registry: None,
            racks: (0..scenario.racks.upstreams.len()).map(|_| Summing::default()).collect(),
            waiting: Vec::new(),
            nodes: (0..scenario.workers).map(node).collect(),
            resumptions: 0,
            digest: 0,
            train: vec![0; 65536],
        };
        world.start_switch();
        (0..world.racks.len()).for_each(|rack| world.start_rack(rack));
        for worker in 0..scenario.workers {
            world.ask(worker, Question::Join(None));
            world.fabric.agenda.at(Instant(0), Event::Heartbeat { worker });
        }
        if let Some((worker, at)) = scenario.crash {
            world.fabric.agenda.at(at, Event::WorkerDies { worker });
        }
        for restart in &scenario.restarts {
            world.fabric.agenda.at(restart.at, Event::SwitchDies { down: restart.down });
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

    /// Memory is bounded: every packet in the network was in a slot's turn or a retransmission of it.
    fn check_bounds(&self) -> Result<(), Violation> {
        // Two copies of each packet, up and down; a timeout may send a slot again some times within the longest delay.
        let slots = usize::from(self.scenario.slots) * usize::from(self.scenario.workers);
        let most = 400 + 200 * slots * (1 + self.racks.len());
        let size = self.fabric.agenda.len();
        if size > most { Err(Violation::Unbounded { what: "network", size }) } else { Ok(()) }
    }

    fn happen(&mut self, event: Event) -> Result<(), Violation> {
        let now = self.fabric.now;
        match event {
            Event::ToSwitch { switch, from, packet } => {
                let summing = self.summing(switch);
                let Some(machine) = &mut summing.machine else { return Ok(()) };
                let verdict = machine.handle_packet(now, from, &packet);
                summing.handled += 1;
                let (drains, incarnation) =
                    (std::mem::replace(&mut summing.drains, true), summing.incarnation);
                self.note(&packet, verdict);
                let which = switch.map_or(0, |rack| rack + 1);
                self.checker.at_switch((which, incarnation), &packet, verdict)?;
                if !drains {
                    let wait = self.fabric.between(Duration::ZERO, self.scenario.round);
                    self.fabric.agenda.at(now + wait, Event::DrainSwitch { switch });
                }
            }
            Event::ToWorker { worker, packet } => {
                let node = &mut self.nodes[usize::from(worker)];
                if let Some(machine) = node.machine.as_mut().filter(|_| node.alive) {
                    let verdict = machine.handle_packet(now, (), &packet);
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
                if let Some(machine) = node.machine.as_mut().filter(|_| node.alive)
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
                self.summing(switch).drains = false;
                self.drain_switch(switch)?;
            }
            Event::Submit { worker } => self.submit(worker)?,
            Event::Ask { worker, incarnation, question } => self.answer(worker, incarnation, question)?,
            Event::Answer { worker, answer } => self.hear(worker, answer)?,
            Event::Heartbeat { worker } => {
                let node = &self.nodes[usize::from(worker)];
                if node.alive && node.failed.is_none() {
                    if let Some(((job, generation), key)) = node.joined.zip(node.key) {
                        let secret = key.secret_of(WorkerId(worker));
                        self.ask(worker, Question::Heartbeat(job, generation, secret));
                    }
                    self.fabric.agenda.at(now + HEARTBEAT, Event::Heartbeat { worker });
                }
            }
            Event::Tick { incarnation } => {
                if incarnation == self.root.incarnation
                    && let Some(registry) = &mut self.registry
                {
                    let commands = registry.tick(now);
                    self.fabric.agenda.at(now + HEARTBEAT, Event::Tick { incarnation });
                    self.obey(commands)?;
                }
            }
            Event::WorkerDies { worker } => {
                self.nodes[usize::from(worker)].alive = false;
                // Its connection breaks, and the switch notices if it was waiting for the others.
                if let (Some(registry), Some(at)) =
                    (&mut self.registry, self.waiting.iter().position(|(_, w)| *w == worker))
                {
                    registry.withdraw(self.waiting.swap_remove(at).0);
                }
            }
            Event::SwitchDies { down } => {
                self.root.machine = None;
                self.registry = None;
                for (_, worker) in std::mem::take(&mut self.waiting) {
                    self.fabric.tell(self.scenario, Event::Answer { worker, answer: Answer::Broken });
                }
                self.fabric.agenda.at(now + down, Event::SwitchIsBack);
            }
            Event::SwitchIsBack => self.start_switch(),
            Event::RackDies { rack, down } => {
                self.racks[rack].machine = None;
                // The connections of those who wait for their job through it break.
                for (ticket, worker) in std::mem::take(&mut self.waiting) {
                    if self.scenario.racks.way(worker).contains(&rack) {
                        self.registry.iter_mut().for_each(|registry| registry.withdraw(ticket));
                        self.fabric.tell(self.scenario, Event::Answer { worker, answer: Answer::Broken });
                    } else {
                        self.waiting.push((ticket, worker));
                    }
                }
                self.fabric.agenda.at(now + down, Event::RackIsBack { rack });
            }
            Event::RackIsBack { rack } => self.start_rack(rack),
        }
        Ok(())
    }

    fn summing(&mut self, switch: Place) -> &mut Summing {
        match switch {
            None => &mut self.root,
            Some(rack) => &mut self.racks[rack],
        }
    }

    fn start_switch(&mut self) {
        self.root.incarnation += 1;
        let incarnation = self.root.incarnation;
        let config = RegistryConfig { heartbeat_timeout: HEARTBEAT_TIMEOUT, ..RegistryConfig::default() };
        let mut ids = Rand64::new(u128::from(self.scenario.seed) << 8 | u128::from(incarnation));
        let registry = Registry::new(config, Box::new(move || ids.rand_u64()));
        self.root.machine = Some(Switch::new(ShardId(0)));
        self.registry = Some(registry.expect("the limits are not zero"));
        self.fabric.agenda.at(self.fabric.now, Event::Tick { incarnation });
    }

    fn start_rack(&mut self, rack: usize) {
        self.racks[rack].incarnation += 1;
        self.racks[rack].machine = Some(Switch::new(ShardId(0)));
    }

    /// The racks on a worker's way, which pass on what the root tells it, learn of its job what they do not know.
    fn teach(&mut self, worker: u8, job: JobId) {
        let Some((config, _, racks)) =
            self.registry.as_ref().and_then(|registry| registry.racks(job, WorkerId(worker)))
        else {
            return;
        };
        let racks: Vec<Rack> = racks.cloned().collect();
        let mut upstream = None;
        for (rack, Rack { place, contributions }) in
            self.scenario.racks.way(worker).into_iter().rev().zip(racks)
        {
            let address = Node::Switch(upstream.replace(rack));
            if let Some(machine) = &mut self.racks[rack].machine
                && machine.job_progress(job).is_none()
            {
                let upstream = Some(Upstream { address, place });
                let job = SwitchJob { config, contributions, upstream };
                machine.add_job(job).expect("an admission is within its limits");
            }
        }
    }

    fn ask(&mut self, worker: u8, question: Question) {
        let incarnation = self.root.incarnation;
        self.fabric.tell(self.scenario, Event::Ask { worker, incarnation, question });
    }

    /// The switch hears a question, if it still runs.
    fn answer(&mut self, worker: u8, incarnation: u32, question: Question) -> Result<(), Violation> {
        let now = self.fabric.now;
        let alive = self.nodes[usize::from(worker)].alive;
        let way = self.scenario.racks.way(worker);
        if way.iter().any(|rack| self.racks[*rack].machine.is_none()) {
            // A heartbeat is said again.
            if matches!(question, Question::Join(_)) {
                self.fabric.tell(self.scenario, Event::Answer { worker, answer: Answer::Broken });
            }
            return Ok(());
        }
        let hop = |rack: &usize| Hop {
            instance: *rack as u64,
            address: ([10, 0, 0, *rack as u8], 4800).into(),
            aggregators: 0,
            elements: 0,
            receive_buffer_bytes: 16 << 20,
            mtu: MTU,
        };
        let hops = way.iter().map(hop).collect();
        let incarnation_now = self.root.incarnation;
        let Some(registry) = self.registry.as_mut().filter(|_| incarnation == incarnation_now && alive)
        else {
            self.fabric.tell(self.scenario, Event::Answer { worker, answer: Answer::Broken });
            return Ok(());
        };
        match question {
            Question::Heartbeat(job, generation, secret) => {
                let reply = registry.heartbeat(now, job, WorkerId(worker), generation, secret);
                let reply = reply.expect("a rank shows its own secret");
                self.teach(worker, job);
                let answer = Answer::Heartbeat(job, generation, reply);
                self.fabric.tell(self.scenario, Event::Answer { worker, answer });
            }
            Question::Join(resume) => {
                let request = JoinRequest {
                    plan: 0,
                    job: "job".into(),
                    rank: worker.into(),
                    world_size: self.scenario.workers.into(),
                    in_flight: Some(self.scenario.slots),
                    mtu: MTU,
                    rate_bps: None,
                    rtt: Duration::ZERO,
                    patience: Duration::from_secs(20),
                    protocol: Protocol::SwitchMl,
                    hops,
                    wire_version: fanin_wire::VERSION,
                    wire_dtype: self.scenario.wire_dtype,
                    resume,
                    origin: None,
                };
                match registry.join(now, request) {
                    JoinDecision::Waiting(ticket) => self.waiting.push((ticket, worker)),
                    JoinDecision::Complete { ticket, tickets, outcome } => {
                        self.waiting.push((ticket, worker));
                        match outcome {
                            Ok(admission) => self.admit(&tickets, &admission),
                            Err(reason) => self.refuse(&tickets, &reason),
                        }
                    }
                    JoinDecision::Again { admission, .. } => {
                        self.teach(worker, admission.job);
                        let answer = Answer::Admitted(Box::new(admission));
                        self.fabric.tell(self.scenario, Event::Answer { worker, answer });
                    }
                    JoinDecision::Refused { reason } => {
                        let answer = Answer::Refused(reason);
                        self.fabric.tell(self.scenario, Event::Answer { worker, answer });
                    }
                }
            }
        }
        Ok(())
    }

    fn admit(&mut self, tickets: &[Ticket], admission: &Admission) {
        if let Some(switch) = &mut self.root.machine {
            switch.add_job(admission.root_job()).expect("an admission is within its limits");
        }
        self.resumptions += u64::from(admission.resumed);
        for (ticket, worker) in std::mem::take(&mut self.waiting) {
            if tickets.contains(&ticket) {
                self.teach(worker, admission.job);
                let answer = Answer::Admitted(Box::new(admission.clone()));
                self.fabric.tell(self.scenario, Event::Answer { worker, answer });
            } else {
                self.waiting.push((ticket, worker));
            }
        }
    }

    fn refuse(&mut self, tickets: &[Ticket], reason: &Refusal) {
        for (ticket, worker) in std::mem::take(&mut self.waiting) {
            if tickets.contains(&ticket) {
                let answer = Answer::Refused(*reason);
                self.fabric.tell(self.scenario, Event::Answer { worker, answer });
            } else {
                self.waiting.push((ticket, worker));
            }
        }
    }

    fn obey(&mut self, commands: Vec<Command>) -> Result<(), Violation> {
        for command in commands {
            let Some(switch) = &mut self.root.machine else { break };
            match command {
                Command::Abort { job, reason } => switch.abort_job(job, reason),
                Command::Remove { job } => switch.remove_job(job),
                Command::Refuse { tickets, reason } => self.refuse(&tickets, &reason),
            }
        }
        self.drain_switch(None)
    }

    /// A worker hears the answer to its question.
    fn hear(&mut self, worker: u8, answer: Answer) -> Result<(), Violation> {
        let node = &mut self.nodes[usize::from(worker)];
        if !node.alive || node.failed.is_some() {
            return Ok(());
        }
        match answer {
            Answer::Admitted(admission) => {
                let config = admission.job_config();
                let place = admission.racks.places[usize::from(worker)];
                node.joined = Some((config.id, config.generation));
                node.key = Some(config.key);
                match &mut node.machine {
                    Some(machine) => {
                        let restore =
                            admission.restore.get(usize::from(worker)).and_then(|shards| shards.first());
                        let restore = restore.cloned().unwrap_or_default();
                        machine.resume(self.fabric.now, WorkerPlan { config, switch: (), place, restore });
                    }
                    None => {
                        node.machine = Some(Worker::new(config, place, (), RetransmissionConfig::default()));
                        self.fabric.agenda.at(self.fabric.now, Event::Submit { worker });
                    }
                }
                self.drain_worker(worker)
            }
            Answer::Heartbeat(job, generation, reply) => {
                if node.joined != Some((job, generation)) {
                    return Ok(()); // of a job that is over
                }
                match reply {
                    HeartbeatReply::Alive { .. } => Ok(()),
                    HeartbeatReply::Unknown => {
                        self.rejoin(worker);
                        Ok(())
                    }
                    HeartbeatReply::Aborted(reason) => self.fail(worker, reason),
                }
            }
            // A rank that died before the job began is missed, not expelled.
            Answer::Refused(Refusal::JoinTimeout { missing }) => {
                let dead = missing.iter().next().unwrap_or_default();
                self.fail(worker, AbortReason::Expelled(dead))
            }
            Answer::Refused(_) | Answer::Broken => {
                self.rejoin(worker);
                Ok(())
            }
        }
    }

    /// Joins, with what the worker still has of the job.
    fn rejoin(&mut self, worker: u8) {
        let node = &mut self.nodes[usize::from(worker)];
        let was_joined = node.joined.take();
        // A refused heartbeat and a refused join may both come; only one of them asks again.
        if node.machine.is_some() && was_joined.is_none() && self.waiting.iter().any(|(_, w)| *w == worker) {
            return;
        }
        let resume = node.machine.as_mut().zip(node.key).map(|(machine, key)| Resume {
            lineage: key.lineage(),
            generation: machine.generation(),
            in_flight: self.scenario.slots,
            elements: CHUNK_ELEMENTS as u16,
            shards: 1,
            completed: vec![machine.suspend()],
        });
        self.ask(worker, Question::Join(resume));
    }

    fn fail(&mut self, worker: u8, reason: AbortReason) -> Result<(), Violation> {
        let expected = self.scenario.crash.map(|(worker, _)| AbortReason::Expelled(WorkerId(worker)));
        if expected != Some(reason) {
            return Err(Violation::WrongAbort { worker, reason });
        }
        self.nodes[usize::from(worker)].failed = Some(reason);
        Ok(())
    }

    fn submit(&mut self, worker: u8) -> Result<(), Violation> {
        let node = &mut self.nodes[usize::from(worker)];
        let Some(machine) = node.machine.as_mut().filter(|_| node.alive) else { return Ok(()) };
        if let Some(shape) = self.scenario.tensors.get(node.submitted) {
            let operation = Operation { op: shape.op, pattern: shape.pattern };
            machine.submit(Copy::contribution(self.scenario, node.submitted, worker), operation);
            node.submitted += 1;
            let pause = self.fabric.between(Duration::ZERO, self.scenario.pause);
            self.fabric.agenda.at(self.fabric.now + pause, Event::Submit { worker });
        }
        self.drain_worker(worker)
    }

    fn drain_worker(&mut self, worker: u8) -> Result<(), Violation> {
        let now = self.fabric.now;
        let node = &mut self.nodes[usize::from(worker)];
        let Some(machine) = &mut node.machine else { return Ok(()) };
        let mut sent = 0;
        let (switch, from) = (self.scenario.racks.way(worker).first().copied(), Node::Worker(worker));
        while let Some(Transmit { bytes, segment_bytes, .. }) = machine.poll_transmit(now, &mut self.train) {
            for packet in self.train[..bytes].chunks(segment_bytes) {
                sent += 1;
                self.fabric.carry(self.scenario, || Event::ToSwitch {
                    switch,
                    from,
                    packet: packet.to_vec(),
                });
            }
        }
        if sent > usize::from(self.scenario.slots) {
            return Err(Violation::Unbounded { what: "worker's window", size: sent });
        }
        if let Some(due) = machine.poll_timeout() {
            self.fabric.agenda.at(due.max(now), Event::Timer { worker });
        }
        let mut failed = None;
        while let Some(event) = machine.poll_event() {
            match event {
                WorkerEvent::Completed(tensor, _) => self.checker.completed(worker, &tensor)?,
                WorkerEvent::Aborted(reason) => failed = Some(reason),
            }
        }
        failed.map_or(Ok(()), |reason| self.fail(worker, reason))
    }

    fn drain_switch(&mut self, switch: Place) -> Result<(), Violation> {
        let now = self.fabric.now;
        let summing = match switch {
            None => &mut self.root,
            Some(rack) => &mut self.racks[rack],
        };
        let Some(machine) = &mut summing.machine else { return Ok(()) };
        let mut answers = 0;
        while let Some(Transmit { to, bytes, segment_bytes }) = machine.poll_transmit(now, &mut self.train) {
            answers += bytes.div_ceil(segment_bytes);
            let to = to.to_vec();
            for packet in self.train[..bytes].chunks(segment_bytes) {
                for &to in &to {
                    let event = || match to {
                        Node::Worker(worker) => Event::ToWorker { worker, packet: packet.to_vec() },
                        Node::Switch(to) => {
                            let from = Node::Switch(switch);
                            Event::ToSwitch { switch: to, from, packet: packet.to_vec() }
                        }
                    };
                    self.fabric.carry(self.scenario, event);
                }
            }
        }
        // One result, reply or packet to the upstream a packet handled, of the last two each two a slot at most, or an abort for
        // everybody. A result that is a root's alone is another one than that of the others.
        let handled = std::mem::take(&mut summing.handled);
        let slots = usize::from(self.scenario.slots);
        let has_roots = |shape: &TensorShape| matches!(shape.pattern, Pattern::Reduce(_));
        let of_packets = if self.scenario.tensors.iter().any(has_roots) {
            (2 * handled).min(6 * slots)
        } else {
            handled.min(if switch.is_some() { 6 } else { 4 } * slots)
        };
        if answers > of_packets + usize::from(self.scenario.workers) + 1 {
            return Err(Violation::Unbounded { what: "switch's answers", size: answers });
        }
        while let Some(JobAborted { job, reason }) = machine.poll_event() {
            if let (None, Some(registry)) = (switch, &mut self.registry) {
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
