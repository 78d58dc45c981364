//! The jobs of a switch: the registry's decisions, who waits for them, and what is known of each
//! job beside them.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use fanin_protocol::JobAborted;
use fanin_protocol::control::{
    Command, Denied, HeartbeatReply, JobState, JobView, JoinRequest, Ranks, Refusal, Registry, Ticket,
};
use fanin_udp::Clock;
use fanin_wire::{JobId, Rank};
use tokio::sync::{oneshot, watch};

use super::{Caller, Outcome};
use crate::node::reports::JobReport;

/// A rank that waits.
pub struct Asking {
    pub rank: Rank,
    /// From which it will send.
    pub hosts: Vec<IpAddr>,
    pub answer: oneshot::Sender<Outcome>,
}

/// What is known of a running job.
pub struct Running {
    /// What its ranks report. Who asks for it copies it where no other waits.
    pub report: Arc<JobReport>,
    /// How it is, for the streams of its ranks.
    pub news: watch::Sender<HeartbeatReply>,
    /// From which hosts each of its ranks sends.
    pub hosts: BTreeMap<Rank, Vec<IpAddr>>,
    /// The stream that each of its ranks has now: another one takes its place, and so ends it.
    pub streams: BTreeMap<Rank, oneshot::Sender<()>>,
}

impl Default for Running {
    fn default() -> Self {
        let news = watch::Sender::new(HeartbeatReply::Alive { left: Ranks::default() });
        Self { report: Arc::default(), news, hosts: BTreeMap::new(), streams: BTreeMap::new() }
    }
}

/// What is decided and known of all jobs, behind one lock.
pub struct Table {
    pub registry: Registry,
    pub waiting: HashMap<Ticket, Asking>,
    /// Jobs that the data path ended.
    pub ended: Option<Receiver<JobAborted>>,
    /// Jobs that could not begin: they had no plan, or no room in the data path.
    pub without_room: Vec<JobId>,
    pub refusals: HashMap<&'static str, u64>,
    /// Calls in a rank's name without its secret.
    pub denied: u64,
    /// Jobs of which no rank knows yet that it is admitted: a plan, and room in the data path, take
    /// their time. Each with ranks that asked once more meanwhile.
    pub preparing: HashMap<JobId, Vec<Ticket>>,
    /// An entry goes with its job.
    pub jobs: HashMap<JobId, Running>,
}

impl Table {
    pub fn new(registry: Registry, ended: Option<Receiver<JobAborted>>) -> Self {
        Self {
            registry,
            waiting: HashMap::new(),
            ended,
            without_room: Vec::new(),
            refusals: HashMap::new(),
            denied: 0,
            preparing: HashMap::new(),
            jobs: HashMap::new(),
        }
    }

    /// A job is admitted, and its ranks have still to hear of it.
    pub fn begin(&mut self, job: JobId) {
        self.jobs.insert(job, Running::default());
        self.preparing.insert(job, Vec::new());
    }

    /// A job's ranks are about to hear of it. Returns those that asked once more meanwhile.
    pub fn prepared(&mut self, job: JobId) -> Vec<Ticket> {
        // Their silence counts from here.
        self.registry.awaits_shell(Clock.now(), job);
        self.preparing.remove(&job).unwrap_or_default()
    }

    /// Ends jobs in whose place somebody may begin another one, who asks to join from there.
    pub fn make_way(
        &mut self,
        request: &JoinRequest,
        from: Option<IpAddr>,
    ) -> impl Iterator<Item = Command> + use<> {
        let Self { registry, jobs, .. } = self;
        let is_of = |job: JobId| {
            let mut hosts = jobs.get(&job).into_iter().flat_map(|running| running.hosts.values().flatten());
            from.is_some_and(|from| hosts.any(|host| *host == from))
        };
        registry.make_way(Clock.now(), request, is_of).into_iter()
    }

    /// A rank waits no more.
    pub fn withdraw(&mut self, ticket: Ticket) {
        if self.waiting.remove(&ticket).is_some() {
            self.registry.withdraw(ticket);
        }
    }

    pub fn running(&self) -> Vec<JobId> {
        let id = |view: JobView<'_>| match view.state {
            JobState::Running { job, .. } => Some(job),
            JobState::Gathering { .. } | JobState::Aborted { .. } => None,
        };
        self.registry.jobs().filter_map(id).collect()
    }

    /// What is to be done by now.
    pub fn overdue(&mut self, now: fanin_protocol::Instant) -> Vec<Command> {
        for job in self.preparing.keys() {
            self.registry.awaits_shell(now, *job);
        }
        self.registry.tick(now)
    }

    pub fn name_of(&self, job: JobId) -> Option<String> {
        let is_it = |view: &JobView<'_>| matches!(view.state, JobState::Running { job: id, .. } if id == job);
        Some(self.registry.jobs().find(is_it)?.name.into())
    }

    pub fn answer(&mut self, ticket: Ticket, outcome: Outcome) {
        if let Some(asking) = self.waiting.remove(&ticket) {
            // The rank may have hung up just now. It is silent then, and expelled.
            let _ = asking.answer.send(outcome);
        }
    }

    /// Notes from where ranks send that are about to be told that they are admitted. Returns these
    /// hosts, for the data path.
    pub fn register(&mut self, job: JobId, tickets: &[Ticket]) -> Vec<IpAddr> {
        let asking = tickets.iter().filter_map(|ticket| self.waiting.get(ticket));
        let each: Vec<_> = asking.map(|asking| (asking.rank, asking.hosts.clone())).collect();
        for (rank, hosts) in &each {
            self.sends_from(job, *rank, hosts);
        }
        each.into_iter().flat_map(|(_, hosts)| hosts).collect()
    }

    /// Notes from where a rank of a running job sends; whether that is new.
    pub fn sends_from(&mut self, job: JobId, rank: Rank, hosts: &[IpAddr]) -> bool {
        let Some(running) = self.jobs.get_mut(&job) else { return false };
        let known = running.hosts.entry(rank).or_default();
        let is_new = known != hosts;
        if is_new {
            *known = hosts.to_vec();
        }
        is_new
    }

    /// Tells a job's ranks how it is.
    pub fn tell(&self, job: JobId, news: HeartbeatReply) {
        if let Some(running) = self.jobs.get(&job) {
            running.news.send_replace(news);
        }
    }

    /// What a call in a rank's name comes to; counted where it has no effect.
    pub fn allowed<T>(&mut self, job: JobId, called: Result<T, Denied>) -> Result<T, Denied> {
        called.inspect_err(|denied| {
            self.denied += 1;
            // Whoever likes can make as many as he likes.
            tracing::debug!(id = job.0, %denied, "a call is refused");
        })
    }

    /// Turns a reply into "set up again" if the rank comes by another way.
    pub fn by_way_of(&mut self, caller: &Caller, reply: HeartbeatReply) -> HeartbeatReply {
        let Caller { job, rank, passed_on, .. } = *caller;
        match reply {
            HeartbeatReply::Alive { .. } if self.registry.came_by(job, rank, passed_on) => {
                HeartbeatReply::SetUpAgain
            }
            reply => reply,
        }
    }

    pub fn count_refusal(&mut self, reason: &Refusal) {
        *self.refusals.entry(reason.name()).or_default() += 1;
    }
}
