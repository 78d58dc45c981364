//! Who is in which job where: joining, heartbeats, and what becomes of the lane to a service that died.

use std::rc::Rc;
use std::time::Duration;

use fanin_protocol::control::{
    Admission, Agreed, Command, HeartbeatReply, Hop, JoinDecision, JoinRequest, PORTION_WHOLE, Refusal,
    Registry, RegistryConfig, Resume, Ticket,
};
use fanin_protocol::switchml::{self, JobConfig, RankTerms, Switch, SwitchJob, WorkerPlan};
use fanin_protocol::{Instant, Lane, RetransmissionConfig, Summer, WorkerMachine};
use fanin_testworld::{Machine, World};
use fanin_wire::{AbortReason, Generation, JobId, Key, ShardId};
use oorandom::Rand64;

use crate::script::{CHUNK_ELEMENTS, HEARTBEAT, Happening, LaneMachine, Place, Rank, SwitchMl, fail, tell};

/// After how long a service believes that a worker does not live.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_millis(400);
/// A path that carries chunks of 256 elements.
const MTU: usize = 1280;
/// How long a service may be gone before another one takes over.
const TAKE_OVER: Duration = Duration::from_millis(100);

/// What admits to the jobs of a service, beside what sums them.
#[derive(Default)]
pub struct Service {
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
pub struct Seat {
    worker: u16,
    /// By the service that the lane began at.
    lane: usize,
    /// How often it asked to join: an answer to what it asked before is of no interest.
    attempt: u32,
}

/// What a worker knows of one lane.
pub struct Membership {
    /// The service where it is, or asks.
    at: Place,
    /// Job and generation while joined.
    joined: Option<(JobId, Generation)>,
    /// Of the job that it joined last.
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

pub enum Question {
    Join(Option<Resume>),
    /// Of a rank that shows this secret.
    Heartbeat(JobId, Generation, u64),
}

pub enum Answer {
    Admitted(Rc<Admission>),
    Heartbeat(HeartbeatReply),
    /// The switch says no.
    Refused(Refusal),
    /// Nobody listens there, or the connection broke.
    Broken,
}

pub fn start_service(world: &mut World<SwitchMl>, at: Place) {
    let service = &mut world.script.services[at];
    service.incarnation += 1;
    let incarnation = service.incarnation;
    let config = RegistryConfig { heartbeat_timeout: HEARTBEAT_TIMEOUT, ..RegistryConfig::default() };
    let seed = u128::from(world.script.scenario.seed) << 8 | u128::from(incarnation);
    let mut ids = Rand64::new(seed | (at as u128) << 80);
    let registry = Registry::new(config, vec![&switchml::SwitchMl], Box::new(move || ids.rand_u64()));
    service.registry = Some(registry.expect("the limits are not zero"));
    start_switch(world, at);
    world.happens_at(world.ns(), Happening::Tick { service: at, incarnation });
}

pub fn start_switch(world: &mut World<SwitchMl>, place: Place) {
    world.script.incarnations[place] += 1;
    world.replace(place, Machine::summer(Switch::<usize>::new(ShardId(0))));
}

/// A service dies, with all that it knows. It is back after `down`, if ever.
pub fn end_service(world: &mut World<SwitchMl>, at: Place, down: Option<Duration>) {
    let service = &mut world.script.services[at];
    service.is_gone |= down.is_none();
    // One that is away already comes back when it would have.
    if service.registry.take().is_none() {
        return;
    }
    world.script.counts.killed += u64::from(down.is_none());
    let waiting = std::mem::take(&mut service.waiting);
    world.die(at);
    for (_, seat) in waiting {
        reply(world, seat, Answer::Broken);
    }
    if let Some(down) = down {
        world.happens_in(down, Happening::ServiceIsBack { service: at });
    }
}

/// The connections break of those who wait for their job through a rack.
pub fn break_connections(world: &mut World<SwitchMl>, rack: usize) {
    for at in 0..world.script.services.len() {
        for (ticket, seat) in std::mem::take(&mut world.script.services[at].waiting) {
            if world.script.scenario.racks.way(seat.worker).contains(&rack) {
                world.script.services[at].registry.iter_mut().for_each(|registry| registry.withdraw(ticket));
                reply(world, seat, Answer::Broken);
            } else {
                world.script.services[at].waiting.push((ticket, seat));
            }
        }
    }
}

/// The connections of a worker that died break, and each service notices where it was waiting for the others.
pub fn withdraw(world: &mut World<SwitchMl>, worker: u16) {
    for Service { registry, waiting, .. } in &mut world.script.services {
        let Some(registry) = registry else { continue };
        while let Some(at) = waiting.iter().position(|(_, seat)| seat.worker == worker) {
            registry.withdraw(waiting.swap_remove(at).0);
        }
    }
}

/// The racks on a worker's way, which pass on what the root tells it, learn of its job what they do not know.
fn teach(world: &mut World<SwitchMl>, at: Place, worker: u16, job: JobId) {
    let registry = world.script.services[at].registry.as_ref();
    let Some(admission) = registry.and_then(|registry| registry.admission(job)) else { return };
    let (identity, way) = (admission.identity(), admission.way(fanin_wire::Rank(worker)));
    let parts: Vec<Vec<u8>> = way.into_iter().map(<[u8]>::to_vec).collect();
    let mut upstream = at;
    for (rack, part) in world.script.scenario.racks.way(worker).into_iter().rev().zip(parts) {
        let rack = world.script.rack(rack);
        let address = std::mem::replace(&mut upstream, rack);
        if world.is_down(rack) {
            continue;
        }
        let machine: &mut Switch<usize> = world.machine_mut(rack);
        if machine.job_progress(job).is_none() {
            let job = SwitchJob::read(identity, &part, Some(address)).expect("a rack's own part");
            machine.add_job(job).expect("an admission is within its limits");
        }
    }
}

/// Asks the service where a lane is.
fn ask(world: &mut World<SwitchMl>, worker: u16, lane: usize, question: Question) {
    let Membership { at, attempt, .. } = world.script.memberships[usize::from(worker)][lane];
    let incarnation = world.script.services[at].incarnation;
    let seat = Seat { worker, lane, attempt };
    tell(world, Happening::Ask { service: at, incarnation, seat, question });
}

fn reply(world: &mut World<SwitchMl>, seat: Seat, answer: Answer) {
    tell(world, Happening::Answer { seat, answer });
}

/// A worker says that it lives, wherever it has joined.
pub fn say_alive(world: &mut World<SwitchMl>, worker: u16) {
    for lane in 0..world.script.services.len() {
        let membership = &world.script.memberships[usize::from(worker)][lane];
        if let Some(((job, generation), key)) = membership.joined.zip(membership.key) {
            let secret = key.secret_of(fanin_wire::Rank(worker));
            ask(world, worker, lane, Question::Heartbeat(job, generation, secret));
        }
    }
}

/// Whether other services do what one did that died. No scenario has a worker besides that dies: who is missed there may be elsewhere.
fn takes_over(world: &World<SwitchMl>) -> bool {
    world.script.services.len() > 1 && world.script.scenario.crash.is_none()
}

/// A service hears a question, if it still runs.
pub fn answer(world: &mut World<SwitchMl>, at: Place, incarnation: u32, seat: Seat, question: Question) {
    let now = world.clock();
    let Seat { worker, lane, .. } = seat;
    let alive = !world.is_down(world.script.worker(worker));
    let way = world.script.scenario.racks.way(worker);
    if way.iter().any(|rack| world.is_down(world.script.rack(*rack))) {
        // A heartbeat is said again.
        if matches!(question, Question::Join(_)) {
            reply(world, seat, Answer::Broken);
        }
        return;
    }
    let hop = |rack: &usize| Hop {
        instance: *rack as u64,
        address: ([10, 0, 0, *rack as u8], 4800).into(),
        shards: 1,
        aggregators: 0,
        elements: 0,
        receive_buffer_bytes: 16 << 20,
        mtu: MTU,
        rate_bps: None,
    };
    let hops = way.iter().map(hop).collect();
    let takes_over = takes_over(world);
    let service = &mut world.script.services[at];
    let Some(registry) = service.registry.as_mut().filter(|_| incarnation == service.incarnation && alive)
    else {
        reply(world, seat, Answer::Broken);
        return;
    };
    match question {
        Question::Heartbeat(job, generation, secret) => {
            let heard = registry.heartbeat(now, job, fanin_wire::Rank(worker), generation, secret);
            let heard = heard.expect("a rank shows its own secret");
            teach(world, at, worker, job);
            reply(world, seat, Answer::Heartbeat(heard));
        }
        Question::Join(resume) => {
            // Nobody waits for long where the old one is back.
            let patience = match takes_over {
                false => Duration::from_secs(20),
                true if lane == at => TAKE_OVER,
                true => 4 * TAKE_OVER,
            };
            let request = JoinRequest {
                protocol: "switchml".into(),
                agreed: Agreed {
                    in_flight: Some(world.script.scenario.slots),
                    wire_dtype: world.script.scenario.wire_dtype,
                    ..Agreed::default()
                },
                portion: PORTION_WHOLE,
                job: if lane == at { "job".into() } else { format!("job~{lane}") },
                rank: worker.into(),
                world_size: world.script.scenario.workers.into(),
                mtu: MTU,
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
                JoinDecision::Complete { ticket, tickets, outcome, replaced } => {
                    service.waiting.push((ticket, seat));
                    if let Some(job) = replaced {
                        world.machine_mut::<Switch<usize>>(at).remove_job(job);
                    }
                    match outcome {
                        Ok(admission) => admit(world, at, lane, &tickets, admission),
                        Err(reason) => refuse(world, at, &tickets, &reason),
                    }
                }
                JoinDecision::Again { admission, .. } => {
                    teach(world, at, worker, admission.job);
                    reply(world, seat, Answer::Admitted(Rc::new(admission)));
                }
                JoinDecision::Refused { reason } => reply(world, seat, Answer::Refused(reason)),
            }
        }
    }
}

fn admit(world: &mut World<SwitchMl>, at: Place, lane: usize, tickets: &[Ticket], admission: Admission) {
    if !world.is_down(at) {
        let job = SwitchJob::read(admission.identity(), &admission.seats.root, None);
        let job = job.expect("the root's own part");
        world.machine_mut::<Switch<usize>>(at).add_job(job).expect("an admission is within its limits");
    }
    world.script.checker.admitted(admission.job, lane);
    world.script.counts.resumptions += u64::from(admission.resumed);
    if admission.resumed && lane != at {
        world.script.counts.taken_over += 1;
        for part in &admission.seats.ranks {
            let slots = terms(&admission, part).restore.iter().map(Vec::len).sum::<usize>();
            world.script.counts.handed_back += slots as u64;
        }
    }
    let admission = Rc::new(admission);
    for seat in served(world, at, tickets) {
        teach(world, at, seat.worker, admission.job);
        reply(world, seat, Answer::Admitted(Rc::clone(&admission)));
    }
}

fn refuse(world: &mut World<SwitchMl>, at: Place, tickets: &[Ticket], reason: &Refusal) {
    for seat in served(world, at, tickets) {
        reply(world, seat, Answer::Refused(reason.clone()));
    }
}

/// Those who have waited with these tickets.
fn served(world: &mut World<SwitchMl>, at: Place, tickets: &[Ticket]) -> Vec<Seat> {
    let waiting = &mut world.script.services[at].waiting;
    let (served, left): (Vec<_>, Vec<_>) =
        std::mem::take(waiting).into_iter().partition(|(ticket, _)| tickets.contains(ticket));
    *waiting = left;
    served.into_iter().map(|(_, seat)| seat).collect()
}

pub fn tick(world: &mut World<SwitchMl>, at: Place, incarnation: u32) {
    let now = world.clock();
    let service = &mut world.script.services[at];
    let Some(registry) = service.registry.as_mut().filter(|_| incarnation == service.incarnation) else {
        return;
    };
    let commands = registry.tick(now);
    world.happens_in(HEARTBEAT, Happening::Tick { service: at, incarnation });
    for command in commands {
        let switch: &mut Switch<usize> = world.machine_mut(at);
        match command {
            Command::Abort { job, reason } => switch.abort_job(job, reason),
            Command::Remove { job } => switch.remove_job(job),
            Command::Refuse { tickets, reason } => refuse(world, at, &tickets, &reason),
            // Heartbeats say so.
            Command::SetUpAgain { .. } => {}
        }
    }
    world.drain(at)
}

/// A worker hears the answer to its question.
pub fn hear(world: &mut World<SwitchMl>, Seat { worker, lane, attempt }: Seat, answer: Answer) {
    let takes_over = takes_over(world);
    let now = world.clock();
    let (is_down, services) = (world.is_down(world.script.worker(worker)), world.script.services.len());
    let is_out = is_down || world.script.failed[usize::from(worker)].is_some();
    let membership = &mut world.script.memberships[usize::from(worker)][lane];
    if is_out || attempt != membership.attempt {
        return;
    }
    match answer {
        Answer::Admitted(admission) => {
            membership.silent = None;
            go_on(world, worker, lane, &admission)
        }
        Answer::Heartbeat(HeartbeatReply::Alive { .. }) => {
            membership.silent = None;
        }
        Answer::Heartbeat(HeartbeatReply::Unknown | HeartbeatReply::SetUpAgain) => {
            membership.silent.get_or_insert(now);
            membership.asked = 0;
            rejoin(world, worker, lane);
        }
        Answer::Heartbeat(HeartbeatReply::Aborted(reason)) => fail(world, worker, reason),
        // A rank that died before the job began is missed, not expelled.
        Answer::Refused(Refusal::JoinTimeout { missing }) if !takes_over => {
            let dead = missing.iter().next().unwrap_or_default();
            fail(world, worker, AbortReason::Expelled(dead))
        }
        Answer::Refused(_) | Answer::Broken => {
            let since = *membership.silent.get_or_insert(now);
            let is_refused = matches!(answer, Answer::Refused(_));
            let is_over = is_refused || membership.asked > 0 || now.since(since) >= TAKE_OVER;
            if is_over && takes_over {
                // The next one, and its own as well, as it may be back.
                membership.asked += 1;
                membership.at = (lane + membership.asked) % services;
            }
            rejoin(world, worker, lane);
        }
    }
}

/// What a rank makes of its part.
fn terms(admission: &Admission, part: &[u8]) -> RankTerms {
    RankTerms::read(admission.identity(), part).expect("a rank's own part")
}

/// A worker's lane begins, or goes on.
fn go_on(world: &mut World<SwitchMl>, worker: u16, lane: usize, admission: &Admission) {
    let part = &admission.seats.ranks[usize::from(worker)];
    let RankTerms { config, place, restore, .. } = terms(admission, part);
    let config = JobConfig { window: world.script.scenario.window, ..config };
    let membership = &mut world.script.memberships[usize::from(worker)][lane];
    membership.joined = Some((config.id, config.generation));
    membership.key = Some(config.key);
    membership.asked = 0;
    let at = membership.at;
    let (node, now) = (world.script.worker(worker), world.clock());
    let first_hop = world.script.first_hop(worker, at);
    let rank: &mut Rank = world.machine_mut(node);
    if let Some(lane) = rank.lane(lane) {
        let restore = restore.into_iter().next().unwrap_or_default();
        (lane.peer, lane.job) = (first_hop, config.id);
        let plan = WorkerPlan { config, switch: first_hop, place, restore };
        lane.machine.resume(now, plan);
    } else {
        let machine = LaneMachine::new(config, place, first_hop, RetransmissionConfig::default());
        let shard = ShardId(0);
        if rank.admitted(lane, Lane { peer: first_hop, job: config.id, shard, machine }) {
            world.happens_at(world.ns(), Happening::Submit { worker });
        }
    }
    world.drain(node);
}

/// Joins, with what the worker still has of the lane's job.
pub fn rejoin(world: &mut World<SwitchMl>, worker: u16, lane: usize) {
    let membership = &mut world.script.memberships[usize::from(worker)][lane];
    membership.joined = None;
    membership.attempt += 1;
    let key = membership.key;
    let (node, in_flight) = (world.script.worker(worker), world.script.scenario.slots);
    let rank: &mut Rank = world.machine_mut(node);
    let resume = rank.lane(lane).zip(key).map(|(lane, key)| Resume {
        lineage: key.lineage(),
        generation: lane.machine.generation(),
        in_flight,
        elements: CHUNK_ELEMENTS as u16,
        completed: vec![lane.machine.suspend()],
    });
    ask(world, worker, lane, Question::Join(resume));
}
