//! Membership: joining, heartbeats, and the fate of the lane to a service that died.

use std::rc::Rc;
use std::time::Duration;

use fanin_protocol::control::{
    Admission, Agreed, Command, HeartbeatReply, Hop, JoinDecision, JoinRequest, PORTION_WHOLE, Protocol,
    Refusal, Registry, RegistryConfig, Resume, Ticket,
};
use fanin_protocol::switchml::{RankTerms, Switch, SwitchJob, SwitchMl, WorkerPlan};
use fanin_protocol::{Instant, Lane, Lanes, RetransmissionConfig, Summer, WorkerMachine};
use fanin_wire::{AbortReason, Generation, JobId, Key, Rank, ShardId};
use oorandom::Rand64;

use super::{CHUNK_ELEMENTS, Event, HEARTBEAT, HEARTBEAT_TIMEOUT, Machine, Node, Place, World};
use crate::checker::Violation;

/// How long a service may be gone before another one takes over.
const TAKE_OVER: Duration = Duration::from_millis(100);

/// The part of a service that admits to its jobs, beside the part that sums.
#[derive(Default)]
pub(super) struct Service {
    /// While it runs.
    pub registry: Option<Registry>,
    /// How often it was started.
    pub incarnation: u32,
    /// It does not come back.
    pub is_gone: bool,
    waiting: Vec<(Ticket, Seat)>,
}

/// A worker's place in the job of one lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seat {
    worker: u16,
    /// By the service that the lane began at.
    lane: usize,
    /// How often it asked to join: an answer to what it asked before is of no interest.
    attempt: u32,
}

/// A worker's knowledge of one lane.
pub(super) struct Membership {
    /// The service where it is, or asks.
    at: Place,
    /// Job and generation while joined.
    joined: Option<(JobId, Generation)>,
    /// The key of the job that it joined last.
    key: Option<Key>,
    attempt: u32,
    /// Since when nobody answers.
    silent: Option<Instant>,
    /// Services that it asked to take over since.
    asked: usize,
}

impl Membership {
    pub fn new(at: Place) -> Self {
        Self { at, joined: None, key: None, attempt: 0, silent: None, asked: 0 }
    }
}

pub(super) enum Question {
    Join(Option<Resume>),
    /// A heartbeat of a rank that shows this secret.
    Heartbeat(JobId, Generation, u64),
}

pub(super) enum Answer {
    Admitted(Rc<Admission>),
    Heartbeat(HeartbeatReply),
    /// The switch says no.
    Refused(Refusal),
    /// Nobody listens there, or the connection broke.
    Broken,
}

impl World<'_> {
    pub fn start_service(&mut self, at: Place) {
        let service = &mut self.services[at];
        service.incarnation += 1;
        let incarnation = service.incarnation;
        let config = RegistryConfig { heartbeat_timeout: HEARTBEAT_TIMEOUT, ..RegistryConfig::default() };
        let seed = u128::from(self.scenario.seed) << 8 | u128::from(incarnation);
        let mut ids = Rand64::new(seed | (at as u128) << 80);
        let registry = Registry::new(config, vec![&SwitchMl], Box::new(move || ids.rand_u64()));
        service.registry = Some(registry.expect("the limits are not zero"));
        self.start_switch(at);
        self.fabric.agenda.at(self.fabric.now, Event::Tick { service: at, incarnation });
    }

    pub fn start_switch(&mut self, place: Place) {
        self.switches[place].incarnation += 1;
        self.switches[place].machine = Some(Switch::new(ShardId(0)));
    }

    /// A service dies, with all that it knows. It is back after `down`, if ever.
    pub fn end_service(&mut self, at: Place, down: Option<Duration>) {
        let service = &mut self.services[at];
        service.is_gone |= down.is_none();
        // A service that is away already comes back when it would have.
        if service.registry.take().is_none() {
            return;
        }
        self.killed += u64::from(down.is_none());
        self.switches[at].machine = None;
        for (_, seat) in std::mem::take(&mut service.waiting) {
            self.reply(seat, Answer::Broken);
        }
        if let Some(down) = down {
            self.fabric.agenda.at(self.fabric.now + down, Event::ServiceIsBack { service: at });
        }
    }

    /// The connections break of those who wait for their job through a rack.
    pub fn break_connections(&mut self, rack: usize) {
        for at in 0..self.services.len() {
            for (ticket, seat) in std::mem::take(&mut self.services[at].waiting) {
                if self.scenario.racks.way(seat.worker).contains(&rack) {
                    self.services[at].registry.iter_mut().for_each(|registry| registry.withdraw(ticket));
                    self.reply(seat, Answer::Broken);
                } else {
                    self.services[at].waiting.push((ticket, seat));
                }
            }
        }
    }

    /// The connections of a worker that died break, and each service notices where it was waiting
    /// for the others.
    pub fn withdraw(&mut self, worker: u16) {
        for Service { registry, waiting, .. } in &mut self.services {
            let Some(registry) = registry else { continue };
            while let Some(at) = waiting.iter().position(|(_, seat)| seat.worker == worker) {
                registry.withdraw(waiting.swap_remove(at).0);
            }
        }
    }

    /// The racks on a worker's way, which pass on what the root tells it, learn of its job what
    /// they do not know.
    fn teach(&mut self, at: Place, worker: u16, job: JobId) {
        let registry = self.services[at].registry.as_ref();
        let Some(admission) = registry.and_then(|registry| registry.admission(job)) else { return };
        let identity = admission.identity();
        let parts: Vec<Vec<u8>> = admission.way(Rank(worker)).into_iter().map(<[u8]>::to_vec).collect();
        let mut upstream = at;
        for (rack, part) in self.scenario.racks.way(worker).into_iter().rev().zip(parts) {
            let rack = self.rack(rack);
            let address = Node::Switch(std::mem::replace(&mut upstream, rack));
            if let Some(machine) = &mut self.switches[rack].machine
                && machine.job_progress(job).is_none()
            {
                let job = SwitchJob::read(identity, &part, Some(address)).expect("a rack's own part");
                machine.add_job(job).expect("an admission is within its limits");
            }
        }
    }

    /// Asks the service where a lane is.
    fn ask(&mut self, worker: u16, lane: usize, question: Question) {
        let Membership { at, attempt, .. } = self.nodes[usize::from(worker)].memberships[lane];
        let incarnation = self.services[at].incarnation;
        let seat = Seat { worker, lane, attempt };
        self.fabric.tell(self.scenario, Event::Ask { service: at, incarnation, seat, question });
    }

    fn reply(&mut self, seat: Seat, answer: Answer) {
        self.fabric.tell(self.scenario, Event::Answer { seat, answer });
    }

    /// A worker says that it lives, wherever it has joined.
    pub fn say_alive(&mut self, worker: u16) {
        for lane in 0..self.services.len() {
            let membership = &self.nodes[usize::from(worker)].memberships[lane];
            if let Some(((job, generation), key)) = membership.joined.zip(membership.key) {
                let secret = key.secret_of(Rank(worker));
                self.ask(worker, lane, Question::Heartbeat(job, generation, secret));
            }
        }
    }

    /// Whether other services do what one did that died. No scenario has a worker besides that
    /// dies: who is missed there may be elsewhere.
    fn takes_over(&self) -> bool {
        self.services.len() > 1 && self.scenario.crash.is_none()
    }

    /// A service hears a question, if it still runs.
    pub fn answer(&mut self, at: Place, incarnation: u32, seat: Seat, question: Question) {
        let now = self.fabric.now;
        let Seat { worker, lane, .. } = seat;
        let alive = self.nodes[usize::from(worker)].alive;
        let way = self.scenario.racks.way(worker);
        if way.iter().any(|rack| self.switches[self.rack(*rack)].machine.is_none()) {
            // A heartbeat is said again.
            if matches!(question, Question::Join(_)) {
                self.reply(seat, Answer::Broken);
            }
            return;
        }
        let hop = |rack: &usize| Hop {
            instance: *rack as u64,
            address: ([10, 0, 0, *rack as u8], 4800).into(),
            aggregators: 0,
            elements: 0,
            receive_buffer_bytes: 16 << 20,
            mtu: super::MTU,
            rate_bps: None,
        };
        let hops = way.iter().map(hop).collect();
        let takes_over = self.takes_over();
        let service = &mut self.services[at];
        let Some(registry) =
            service.registry.as_mut().filter(|_| incarnation == service.incarnation && alive)
        else {
            self.reply(seat, Answer::Broken);
            return;
        };
        match question {
            Question::Heartbeat(job, generation, secret) => {
                let reply = registry.heartbeat(now, job, Rank(worker), generation, secret);
                let reply = reply.expect("a rank shows its own secret");
                self.teach(at, worker, job);
                self.reply(seat, Answer::Heartbeat(reply));
            }
            Question::Join(resume) => {
                // Nobody waits for long where the old one is back.
                let patience = match takes_over {
                    false => Duration::from_secs(20),
                    true if lane == at => TAKE_OVER,
                    true => 4 * TAKE_OVER,
                };
                let request = JoinRequest {
                    protocol: SwitchMl.name().into(),
                    agreed: Agreed {
                        in_flight: Some(self.scenario.slots),
                        wire_dtype: self.scenario.wire_dtype,
                        ..Agreed::default()
                    },
                    portion: PORTION_WHOLE,
                    job: if lane == at { "job".into() } else { format!("job~{lane}") },
                    rank: worker.into(),
                    world_size: self.scenario.workers.into(),
                    mtu: super::MTU,
                    rate_bps: None,
                    rtt: Duration::ZERO,
                    patience,
                    hops,
                    wire_version: fanin_wire::VERSION,
                    paths: 1,
                    resume,
                    origin: None,
                };
                match registry.join(now, request) {
                    JoinDecision::Waiting(ticket) => service.waiting.push((ticket, seat)),
                    JoinDecision::Complete { ticket, tickets, outcome } => {
                        service.waiting.push((ticket, seat));
                        match outcome {
                            Ok(admission) => self.admit(at, lane, &tickets, admission),
                            Err(reason) => self.refuse(at, &tickets, &reason),
                        }
                    }
                    JoinDecision::Again { admission, .. } => {
                        self.teach(at, worker, admission.job);
                        self.reply(seat, Answer::Admitted(Rc::new(admission)));
                    }
                    JoinDecision::Refused { reason } => self.reply(seat, Answer::Refused(reason)),
                }
            }
        }
    }

    fn admit(&mut self, at: Place, lane: usize, tickets: &[Ticket], admission: Admission) {
        if let Some(switch) = &mut self.switches[at].machine {
            let job = SwitchJob::read(admission.identity(), &admission.seats.root, None);
            switch.add_job(job.expect("the root's own part")).expect("an admission is within its limits");
        }
        self.checker.admitted(admission.job, lane);
        self.resumptions += u64::from(admission.resumed);
        if admission.resumed && lane != at {
            self.taken_over += 1;
            for part in &admission.seats.ranks {
                let RankTerms { restore, .. } =
                    RankTerms::read(admission.identity(), part).expect("a rank's own part");
                self.handed_back += restore.iter().map(Vec::len).sum::<usize>() as u64;
            }
        }
        let admission = Rc::new(admission);
        for seat in self.served(at, tickets) {
            self.teach(at, seat.worker, admission.job);
            self.reply(seat, Answer::Admitted(Rc::clone(&admission)));
        }
    }

    fn refuse(&mut self, at: Place, tickets: &[Ticket], reason: &Refusal) {
        for seat in self.served(at, tickets) {
            self.reply(seat, Answer::Refused(reason.clone()));
        }
    }

    /// The ranks that have waited with these tickets.
    fn served(&mut self, at: Place, tickets: &[Ticket]) -> Vec<Seat> {
        let waiting = &mut self.services[at].waiting;
        let (served, left): (Vec<_>, Vec<_>) =
            std::mem::take(waiting).into_iter().partition(|(ticket, _)| tickets.contains(ticket));
        *waiting = left;
        served.into_iter().map(|(_, seat)| seat).collect()
    }

    pub fn tick(&mut self, at: Place, incarnation: u32) -> Result<(), Violation> {
        let now = self.fabric.now;
        let service = &mut self.services[at];
        let Some(registry) = service.registry.as_mut().filter(|_| incarnation == service.incarnation) else {
            return Ok(());
        };
        let commands = registry.tick(now);
        self.fabric.agenda.at(now + HEARTBEAT, Event::Tick { service: at, incarnation });
        for command in commands {
            let Some(switch) = &mut self.switches[at].machine else { break };
            match command {
                Command::Abort { job, reason } => switch.abort_job(job, reason),
                Command::Remove { job } => switch.remove_job(job),
                Command::Refuse { tickets, reason } => self.refuse(at, &tickets, &reason),
            }
        }
        self.drain_switch(at)
    }

    /// A worker hears the answer to its question.
    pub fn hear(&mut self, Seat { worker, lane, attempt }: Seat, answer: Answer) -> Result<(), Violation> {
        let takes_over = self.takes_over();
        let node = &mut self.nodes[usize::from(worker)];
        let membership = &mut node.memberships[lane];
        if !node.alive || node.failed.is_some() || attempt != membership.attempt {
            return Ok(());
        }
        match answer {
            Answer::Admitted(admission) => {
                membership.silent = None;
                self.go_on(worker, lane, &admission)
            }
            Answer::Heartbeat(HeartbeatReply::Alive { .. }) => {
                membership.silent = None;
                Ok(())
            }
            Answer::Heartbeat(HeartbeatReply::Unknown) => {
                membership.silent.get_or_insert(self.fabric.now);
                membership.asked = 0;
                self.rejoin(worker, lane);
                Ok(())
            }
            Answer::Heartbeat(HeartbeatReply::Aborted(reason)) => self.fail(worker, reason),
            // A rank that died before the job began is missed, not expelled.
            Answer::Refused(Refusal::JoinTimeout { missing }) if !takes_over => {
                let dead = missing.iter().next().unwrap_or_default();
                self.fail(worker, AbortReason::Expelled(dead))
            }
            Answer::Refused(_) | Answer::Broken => {
                let since = *membership.silent.get_or_insert(self.fabric.now);
                let is_refused = matches!(answer, Answer::Refused(_));
                let is_over = is_refused || membership.asked > 0 || self.fabric.now.since(since) >= TAKE_OVER;
                if is_over && takes_over {
                    // The next one, and its own as well, as it may be back.
                    membership.asked += 1;
                    membership.at = (lane + membership.asked) % self.services.len();
                }
                self.rejoin(worker, lane);
                Ok(())
            }
        }
    }

    /// A worker's lane begins, or goes on.
    fn go_on(&mut self, worker: u16, lane: usize, admission: &Admission) -> Result<(), Violation> {
        let first_hop = self.first_hop(worker, self.nodes[usize::from(worker)].memberships[lane].at);
        let node = &mut self.nodes[usize::from(worker)];
        let part = &admission.seats.ranks[usize::from(worker)];
        let terms = RankTerms::read(admission.identity(), part).expect("a rank's own part");
        let RankTerms { config, place, restore, .. } = terms;
        let membership = &mut node.memberships[lane];
        membership.joined = Some((config.id, config.generation));
        membership.key = Some(config.key);
        membership.asked = 0;
        if let Some(lane) = node.lane(lane) {
            let restore = restore.into_iter().next().unwrap_or_default();
            (lane.peer, lane.job) = (first_hop, config.id);
            let plan = WorkerPlan { config, switch: first_hop, place, restore };
            lane.machine.resume(self.fabric.now, plan);
            return self.drain_worker(worker);
        }
        let machine = Machine::new(config, place, first_hop, RetransmissionConfig::default());
        node.joining[lane] = Some(Lane { peer: first_hop, job: config.id, shard: ShardId(0), machine });
        if node.joining.iter().all(Option::is_some) {
            node.lanes = Some(Lanes::new(std::mem::take(&mut node.joining).into_iter().flatten().collect()));
            self.fabric.agenda.at(self.fabric.now, Event::Submit { worker });
        }
        self.drain_worker(worker)
    }

    /// Joins, with what the worker still has of the lane's job.
    pub fn rejoin(&mut self, worker: u16, lane: usize) {
        let node = &mut self.nodes[usize::from(worker)];
        node.memberships[lane].joined = None;
        node.memberships[lane].attempt += 1;
        let key = node.memberships[lane].key;
        let resume = node.lane(lane).zip(key).map(|(lane, key)| Resume {
            lineage: key.lineage(),
            generation: lane.machine.generation(),
            in_flight: self.scenario.slots,
            elements: CHUNK_ELEMENTS as u16,
            completed: vec![lane.machine.suspend()],
        });
        self.ask(worker, lane, Question::Join(resume));
    }

    pub fn fail(&mut self, worker: u16, reason: AbortReason) -> Result<(), Violation> {
        let expected = self.scenario.crash.map(|(worker, _)| AbortReason::Expelled(Rank(worker)));
        if expected != Some(reason) {
            return Err(Violation::WrongAbort { worker, reason });
        }
        self.nodes[usize::from(worker)].failed = Some(reason);
        Ok(())
    }
}
