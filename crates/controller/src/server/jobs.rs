//! The registry joined to the data path. Decisions are taken under one lock, and carried out in their order by a thread that
//! holds none: no rank is told of a job before the data path knows it, and none waits for the data path with a heartbeat.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Instant;

use fanin_guests::{Room, host_of};
use fanin_protocol::JobAborted;
use fanin_protocol::control::{
    Admission, Attendance, Command, Denied, Detached, HeartbeatReply, JOB_NAME_BYTES_MAX, JobState, JobView,
    JoinDecision, JoinRequest, Planner, Pool, Protocol, Ranks, Refusal, Registry, RegistryConfig, Share,
    Ticket,
};
use fanin_udp::{DataPath, Figures, Seat as SeatOfJob, ThreadEnded};
use fanin_wire::{AbortReason, Generation, JobId, Rank};
use tokio::sync::{oneshot, watch};
use tonic::Status;

use crate::proto;

use super::crowd::{Crowd, Place};
use super::errands::Errands;
use super::meetings::{Meetings, NotHeard, Present};
use super::snapshots::Snapshots;
use super::told::{Measured, Told, Word, words};

#[cfg(test)]
mod tests;

/// Of the jobs that may wait or run at once, those of which ranks wait that ask from one address: half, so that others have room.
const OF_ONE_ADDRESS: u32 = 2;

/// What a waiting rank is told: of a job that runs from now on, or why it is not admitted.
pub(super) type Outcome = Result<Arc<Admission>, NotAdmitted>;

/// What a rank hears of a data path that moves no packets, instead of waiting for its sums.
pub(super) fn unhealthy(ended: &ThreadEnded) -> Status {
    Status::internal(ended.to_string())
}

/// Why a rank is not admitted.
#[derive(Clone, Debug)]
pub(super) enum NotAdmitted {
    /// The registry refused it.
    Refused(Refusal),
    /// The data path failed; a fault of ours.
    DataPath(String),
}

/// A rank's place in a gathering. Dropping it withdraws the rank, if it still waits.
pub(super) struct Seat<'a> {
    jobs: &'a Jobs,
    ticket: Ticket,
    outcome: oneshot::Receiver<Outcome>,
}

impl Seat<'_> {
    /// Waits until every rank is here, or the gathering is given up.
    pub async fn outcome(&mut self) -> Outcome {
        (&mut self.outcome).await.unwrap_or(Err(NotAdmitted::Refused(Refusal::SwitchStopping)))
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let mut state = self.jobs.lock();
        if state.waiting.remove(&self.ticket).is_some() {
            state.registry.withdraw(self.ticket);
        }
    }
}

/// Whether a rank waits or has its answer.
pub(super) enum Joined<'a> {
    Waiting(Seat<'a>),
    Done(Outcome),
}

/// A rank's stream, as it begins.
pub(super) struct Attending {
    pub rank: Rank,
    /// How the job is.
    pub reply: HeartbeatReply,
    /// What follows, while it runs.
    pub stays: Option<Stays>,
}

/// A rank's stream that stays open.
pub(super) struct Stays {
    pub attendance: Attendance,
    /// How the job is, whenever that changes.
    pub news: watch::Receiver<HeartbeatReply>,
    /// Resolves when the rank has opened another stream.
    pub superseded: oneshot::Receiver<()>,
}

/// A job as `Status` and the metrics see it.
#[derive(Clone, Debug)]
pub(super) struct JobSnapshot {
    pub name: String,
    pub world_size: u16,
    pub state: JobState,
}

/// All jobs of a switch.
pub(super) struct Jobs {
    state: Arc<Mutex<State>>,
    pub driver: Arc<dyn DataPath>,
    errands: Errands<dyn DataPath>,
    figures: Snapshots<Figures>,
    /// The registry counts time from here.
    origin: Instant,
    /// Jobs of which ranks wait to be admitted, by where they ask from.
    waiting: Crowd,
    /// What these tell.
    words: Room,
    /// Ranks that have still to find each other.
    meetings: Meetings,
    /// By the name of the protocol, where one has a planner. Not locked with the registry: plans take their time.
    planners: Arc<HashMap<&'static str, Box<dyn Planner>>>,
    /// Plans are made one at a time for each host that asks for them.
    planning: Mutex<HashMap<IpAddr, Weak<Mutex<()>>>>,
}

/// A rank that waits.
struct Asking {
    rank: Rank,
    /// From which it will send.
    hosts: Vec<IpAddr>,
    answer: oneshot::Sender<Outcome>,
}

struct State {
    registry: Registry,
    waiting: HashMap<Ticket, Asking>,
    /// Jobs that the data path ended.
    ended: Option<Receiver<JobAborted>>,
    /// Jobs for which it had no room.
    without_room: Vec<JobId>,
    refusals: HashMap<&'static str, u64>,
    /// Calls in a rank's name without its secret.
    denied: u64,
    /// Jobs of which no rank knows yet that it is admitted: a plan, and room in the data path, take their time. Each with ranks that asked
    /// once more meanwhile.
    preparing: HashMap<JobId, Vec<Ticket>>,
    /// What the ranks of running jobs tell; an entry goes with its job. Who asks for it copies it where no other waits.
    told: HashMap<JobId, Arc<Told>>,
    /// How each running job is, for the streams of its ranks.
    news: HashMap<JobId, watch::Sender<HeartbeatReply>>,
    /// From which hosts each of their ranks sends.
    hosts: HashMap<JobId, BTreeMap<Rank, Vec<IpAddr>>>,
    /// The stream that each of their ranks has now: another one takes its place, and so ends it.
    streams: HashMap<JobId, BTreeMap<Rank, oneshot::Sender<()>>>,
}

impl Jobs {
    /// Whether nobody is in any job, nor waits for one.
    pub fn is_idle(&self) -> bool {
        self.meetings.is_empty() && self.lock().registry.jobs().next().is_none()
    }

    /// # Errors
    /// When the operating system gives no thread.
    pub fn new(registry: Registry, driver: Arc<dyn DataPath>) -> io::Result<Self> {
        let planner = |protocol: &&dyn Protocol| Some((protocol.name(), protocol.planner()?));
        let planners = Arc::new(registry.protocols().iter().filter_map(planner).collect());
        let state = State {
            registry,
            waiting: HashMap::new(),
            ended: driver.events(),
            without_room: Vec::new(),
            refusals: HashMap::new(),
            denied: 0,
            preparing: HashMap::new(),
            told: HashMap::new(),
            news: HashMap::new(),
            hosts: HashMap::new(),
            streams: HashMap::new(),
        };
        let state = Arc::new(Mutex::new(state));
        let errands = Errands::start(Arc::clone(&driver))?;
        let (asked, running) = (Arc::clone(&driver), Arc::clone(&state));
        let figures = Snapshots::new(move || {
            let running = lock(&running).running();
            asked.figures(&running)
        });
        let jobs_max = lock(&state).registry.config().jobs_max;
        let waiting = Crowd::new(usize::MAX, (jobs_max / OF_ONE_ADDRESS).max(1) as usize);
        let (origin, meetings) = (Instant::now(), Meetings::default());
        let (words, planning) = (words(), Mutex::default());
        Ok(Self { state, driver, errands, figures, origin, waiting, words, meetings, planners, planning })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn now(&self) -> fanin_protocol::Instant {
        since(self.origin)
    }

    /// A place for a rank that waits; `None` when ranks of too many jobs wait already that ask from the same address.
    pub fn wait(&self, address: IpAddr, request: &JoinRequest) -> Option<Place> {
        // Those that resume jobs of one name wait for each other only if they show the same.
        let lineage = request.lineage().map_or_else(String::new, |lineage| format!("\n{lineage}"));
        self.waiting.enter(address, for_log(&request.job) + &lineage)
    }

    /// Takes off a request what it tells of the rank and its job, if there is room for it while the rank waits.
    pub fn word_of(&self, address: IpAddr, request: &mut proto::JoinRequest) -> Word {
        Word::of(request, address, &self.words)
    }

    /// A rank says something to the others of its job before they join.
    ///
    /// Where a job of this name and size runs that it did not leave, it is refused at once, as it would be when it joined. What columns of the job
    /// run is for the joins to see: when all ranks have met, those that they were have left or ended.
    pub fn meet(&self, from: IpAddr, request: proto::MeetRequest) -> Result<Present, NotHeard> {
        if request.attempt == 0 {
            let (rank, world_size) = (request.rank, request.world_size);
            let runs = self.lock().registry.jobs().any(|job| {
                let JobState::Running { left, .. } = job.state else { return false };
                let is_it = job.name == request.job && u32::from(job.world_size) == world_size;
                is_it && !left.iter().any(|left| u32::from(left.0) == rank)
            });
            if runs {
                // Others may join other services still, where they wait for this rank.
                self.meetings.begins_anew(&request.job, rank, world_size);
                return Err(Refusal::JobRunning { rank, world_size }.into());
            }
        }
        self.meetings.enter(from, request)
    }

    /// A rank asks to join, whose packets will come from these hosts; from the first of them it calls.
    pub fn join(&self, request: JoinRequest, hosts: Vec<IpAddr>) -> Joined<'_> {
        let (job, rank, world_size) = (for_log(&request.job), request.rank, request.world_size);
        let mut state = self.lock();
        // The name of a job that runs is known to all. Who may end it is where its ranks were.
        let from = hosts.first().copied();
        let State { registry, hosts: of_jobs, .. } = &mut *state;
        let is_of = |job: JobId| {
            from.is_some_and(|from| {
                of_jobs.get(&job).is_some_and(|ranks| ranks.values().any(|hosts| hosts.contains(&from)))
            })
        };
        let ended = registry.make_way(self.now(), &request, is_of);
        self.carry_out(&mut state, ended);
        let asking = |answer| Asking { rank: Rank(rank as u16), hosts, answer };
        match state.registry.join(self.now(), request) {
            JoinDecision::Waiting(ticket) => {
                tracing::debug!(job, rank, world_size, "a rank waits");
                let (sender, outcome) = oneshot::channel();
                state.waiting.insert(ticket, asking(sender));
                Joined::Waiting(Seat { jobs: self, ticket, outcome })
            }
            JoinDecision::Complete { ticket, tickets, outcome } => {
                let reason = match outcome {
                    Ok(admission) => {
                        let (sender, outcome) = oneshot::channel();
                        state.waiting.insert(ticket, asking(sender));
                        let alive = HeartbeatReply::Alive { left: Ranks::default() };
                        state.news.insert(admission.job, watch::channel(alive).0);
                        state.preparing.insert(admission.job, Vec::new());
                        self.make_room(job, admission, tickets, from);
                        return Joined::Waiting(Seat { jobs: self, ticket, outcome });
                    }
                    Err(reason) => reason,
                };
                tracing::warn!(job, world_size, ?reason, "a job is not admitted");
                state.count_refusal(&reason);
                for other in tickets.into_iter().filter(|other| *other != ticket) {
                    state.answer(other, Err(NotAdmitted::Refused(reason.clone())));
                }
                Joined::Done(Err(NotAdmitted::Refused(reason)))
            }
            JoinDecision::Again { ticket, admission } => {
                tracing::info!(job, rank, "a rank is told again of its job");
                let (sender, outcome) = oneshot::channel();
                state.waiting.insert(ticket, asking(sender));
                if let Some(late) = state.preparing.get_mut(&admission.job) {
                    // It may be planned yet.
                    late.push(ticket);
                    return Joined::Waiting(Seat { jobs: self, ticket, outcome });
                }
                // After the job itself: the data path may not know it yet.
                let state = Arc::clone(&self.state);
                self.errands.send(move |driver| {
                    let hosts = lock(&state).register(admission.job, &[ticket]);
                    driver.register(admission.job, &hosts);
                    lock(&state).answer(ticket, Ok(Arc::new(admission)));
                });
                Joined::Waiting(Seat { jobs: self, ticket, outcome })
            }
            JoinDecision::Refused { reason } => {
                tracing::warn!(job, rank, world_size, %reason, "a rank is refused");
                state.count_refusal(&reason);
                Joined::Done(Err(NotAdmitted::Refused(reason)))
            }
        }
    }

    /// Makes an admitted job's plan and room for it in the data path, and then tells the ranks that wait for it.
    fn make_room(&self, name: String, admission: Admission, tickets: Vec<Ticket>, from: Option<IpAddr>) {
        let (state, planners) = (Arc::clone(&self.state), Arc::clone(&self.planners));
        let (job, origin, waiting) = (admission.job, self.origin, tickets.clone());
        let room = move |driver: &dyn DataPath, admission: Result<Admission, String>| {
            let added = admission.and_then(|admission| {
                let part = &admission.seats.root;
                let (protocol, upstream) = (admission.protocol, None);
                let seat = SeatOfJob { job: admission.identity(), protocol, part, upstream };
                driver.add_job(&seat).map_err(|error| error.to_string())?;
                Ok(admission)
            });
            let outcome = match added {
                Ok(admission) => {
                    tracing::info!(
                        job = name,
                        id = job.0,
                        protocol = admission.protocol,
                        generation = admission.generation.0,
                        world_size = admission.world_size,
                        in_flight = admission.terms.in_flight,
                        elements = admission.terms.elements,
                        wire_dtype = admission.terms.wire_dtype.name(),
                        "a job runs"
                    );
                    // No rank sends before it is admitted, and none is admitted before its packets are taken.
                    let hosts = lock(&state).register(job, &tickets);
                    driver.register(job, &hosts);
                    // What is in it grows with the ranks, and each of them waits for an answer.
                    Ok(Arc::new(admission))
                }
                Err(error) => {
                    tracing::warn!(job = name, error, "the data path has no room for a job");
                    // Some of its shards may have had it.
                    driver.remove_job(job);
                    planners.values().for_each(|planner| planner.forget(job));
                    lock(&state).without_room.push(job);
                    Err(NotAdmitted::DataPath(error))
                }
            };
            let (late, hosts) = {
                let mut state = lock(&state);
                let late = state.preparing.remove(&job).unwrap_or_default();
                // Their silence counts from here.
                state.registry.awaits_shell(since(origin), job);
                let hosts = if outcome.is_ok() { state.register(job, &late) } else { Vec::new() };
                (late, hosts)
            };
            if !hosts.is_empty() {
                driver.register(job, &hosts);
            }
            let mut state = lock(&state);
            for ticket in tickets.into_iter().chain(late) {
                state.answer(ticket, outcome.clone());
            }
        };
        // Without switches there is nothing to plan.
        if !self.planners.contains_key(admission.protocol) || admission.tree.switches.is_empty() {
            return self.errands.send(move |driver| room(driver, Ok(admission)));
        }
        // Whose tree is large waits for its plan, and no other job does.
        let (planners, errands, known) =
            (Arc::clone(&self.planners), self.errands.sender(), Arc::clone(&self.state));
        let turn = self.turn_to_plan(from);
        let planning = thread::Builder::new().name("fanin-plan".into()).spawn(move || {
            let planner = &planners[admission.protocol];
            let turn = lock(&turn);
            let planned = catch_unwind(AssertUnwindSafe(|| planner.plan(&admission)));
            let planned = planned.unwrap_or_else(|_| {
                tracing::error!(id = admission.job.0, "no plan is found; all is summed at the root");
                planner.forget(admission.job);
                Ok(admission.seats.clone())
            });
            drop(turn);
            errands.send(move |driver| {
                let planned = planned.and_then(|seats| {
                    let mut known = lock(&known);
                    // It may be over.
                    if !known.running().contains(&admission.job) {
                        return Err("the job ended before it was planned".into());
                    }
                    known.registry.planned(admission.job, seats.clone());
                    Ok(Admission { seats, ..admission })
                });
                room(driver, planned);
            });
        });
        if let Err(error) = planning {
            // The lock is held here.
            let state = Arc::clone(&self.state);
            self.errands.send(move |_| {
                let mut state = lock(&state);
                let late = state.preparing.remove(&job).unwrap_or_default();
                state.without_room.push(job);
                let outcome = Err(NotAdmitted::DataPath(format!("no thread to plan in: {error}")));
                waiting.into_iter().chain(late).for_each(|ticket| state.answer(ticket, outcome.clone()));
            });
        }
    }

    /// Held while a plan is made for somebody who asks from there: nobody has more than one core.
    fn turn_to_plan(&self, from: Option<IpAddr>) -> Arc<Mutex<()>> {
        let host = host_of(from.unwrap_or(IpAddr::from([0; 4])));
        let mut all = lock(&self.planning);
        all.retain(|_, turn| turn.strong_count() > 0);
        let turn = all.get(&host).and_then(Weak::upgrade).unwrap_or_default();
        all.insert(host, Arc::downgrade(&turn));
        turn
    }

    /// A rank that was admitted tells of the job and of itself.
    pub fn tell(&self, job: JobId, rank: u32, word: Word) {
        let mut state = self.lock();
        // It may have ended since.
        if let (true, Ok(rank)) = (state.news.contains_key(&job), u16::try_from(rank)) {
            Arc::make_mut(state.told.entry(job).or_default()).joined(Rank(rank), word);
        }
    }

    /// A rank lives, and has measured this.
    pub fn heartbeat(
        &self,
        job: JobId,
        rank: Rank,
        generation: Generation,
        secret: u64,
        measured: Measured,
        hosts: Vec<IpAddr>,
    ) -> Result<HeartbeatReply, Denied> {
        let mut state = self.lock();
        let reply = state.registry.heartbeat(self.now(), job, rank, generation, secret);
        let reply = state.allowed(job, reply)?;
        if let HeartbeatReply::Alive { left } = &reply
            && !left.contains(rank)
        {
            // Of a rank that the job has, so that no more can be entered than there are ranks.
            Arc::make_mut(state.told.entry(job).or_default()).measured(rank, measured);
            if state.sends_from(job, rank, &hosts) {
                self.errands.send(move |driver| driver.register(job, &hosts));
            }
        }
        Ok(reply)
    }

    /// A rank opens its stream.
    pub fn attend(
        &self,
        job: JobId,
        rank: Rank,
        generation: Generation,
        secret: u64,
    ) -> Result<Attending, Denied> {
        let mut state = self.lock();
        let attending = state.registry.attend(self.now(), job, rank, generation, secret);
        let (reply, attendance) = state.allowed(job, attending)?;
        let news = state.news.get(&job).map(watch::Sender::subscribe);
        let stays = attendance.zip(news).map(|(attendance, news)| {
            let (current, superseded) = oneshot::channel();
            state.streams.entry(job).or_default().insert(rank, current);
            Stays { attendance, news, superseded }
        });
        Ok(Attending { rank, reply, stays })
    }

    /// A rank's stream ended.
    pub fn detached(&self, attendance: Attendance, cause: Detached) {
        tracing::debug!(id = attendance.job.0, rank = attendance.rank.0, ?cause, "a rank's stream ended");
        self.lock().registry.detached(self.now(), attendance, cause);
    }

    /// What those on a rank's way need to serve a job that runs here; `None` where there is nobody who would.
    pub fn route(&self, job: JobId, rank: Rank) -> Option<proto::Route> {
        let state = self.lock();
        let limits = state.registry.config();
        let admission = state.registry.admission(job)?;
        let parts: Vec<Vec<u8>> = admission.way(rank).into_iter().map(<[u8]>::to_vec).collect();
        (!parts.is_empty()).then_some(())?;
        Some(proto::Route {
            job: state.name_of(job)?,
            key: admission.key.to_bytes().into(),
            heartbeat_timeout_ms: u64::try_from(limits.heartbeat_timeout.as_millis()).unwrap_or(u64::MAX),
            lineage: state.registry.lineage(job),
            world_size: admission.world_size.into(),
            parts,
        })
    }

    /// Which part of a job each switch sums, where there is a plan.
    pub fn shares(&self, job: JobId) -> Vec<proto::PlannedShare> {
        let state = self.lock();
        let Some(admission) = state.registry.admission(job) else { return Vec::new() };
        let share = |share: &Share| proto::PlannedShare {
            switch: admission.tree.switches[share.switch].hop.address.to_string(),
            share: f64::from(share.millionths) / 1e6,
            aggregators: share.aggregators,
        };
        admission.seats.shares.iter().map(share).collect()
    }

    /// What a job's ranks have told.
    pub fn told(&self, job: JobId) -> Arc<Told> {
        self.lock().told.get(&job).cloned().unwrap_or_default()
    }

    pub fn leave(&self, job: JobId, rank: Rank, secret: u64) -> Result<(), Denied> {
        let mut state = self.lock();
        let command = state.registry.leave(self.now(), job, rank, secret);
        let command = state.allowed(job, command)?;
        tracing::debug!(id = job.0, rank = rank.0, "a rank leaves");
        self.carry_out(&mut state, command);
        let left = state.registry.jobs().find_map(|view| match view.state {
            JobState::Running { job: id, left, .. } if id == job => Some(left),
            _ => None,
        });
        if let Some(left) = left {
            state.tell(job, HeartbeatReply::Alive { left });
        }
        Ok(())
    }

    /// Acts on what the data path found out and on what is overdue.
    pub fn tick(&self) {
        let mut state = self.lock();
        let now = self.now();
        while let Some(JobAborted { job, reason }) =
            state.ended.as_ref().and_then(|ended| ended.try_recv().ok())
        {
            tracing::warn!(id = job.0, ?reason, "the data path aborts a job");
            // One shard found out; the others must hear of it.
            self.errands.send(move |driver| driver.abort_job(job, reason));
            self.give_back(job);
            state.tell(job, HeartbeatReply::Aborted(reason));
            let command = state.registry.aborted(now, job, reason);
            self.carry_out(&mut state, command);
        }
        for job in std::mem::take(&mut state.without_room) {
            let command = state.registry.aborted(now, job, AbortReason::SwitchStopped);
            self.carry_out(&mut state, command);
        }
        let commands = state.overdue(now);
        self.carry_out(&mut state, commands);
    }

    /// Ends all jobs and admits no more.
    pub fn stop(&self) {
        let mut state = self.lock();
        let commands = state.registry.stop(self.now());
        self.carry_out(&mut state, commands);
    }

    fn carry_out(&self, state: &mut State, commands: impl IntoIterator<Item = Command>) {
        for command in commands {
            match command {
                Command::Abort { job, reason } => {
                    tracing::warn!(id = job.0, ?reason, "a job is aborted");
                    state.tell(job, HeartbeatReply::Aborted(reason));
                    self.errands.send(move |driver| driver.abort_job(job, reason));
                    self.give_back(job);
                }
                Command::Remove { job } => {
                    self.give_back(job);
                    state.told.remove(&job);
                    state.news.remove(&job);
                    state.streams.remove(&job);
                    state.hosts.remove(&job);
                    tracing::info!(id = job.0, "a job is over");
                    self.errands.send(move |driver| driver.remove_job(job));
                }
                Command::Refuse { tickets, reason } => {
                    tracing::warn!(%reason, "a gathering is given up");
                    state.count_refusal(&reason);
                    for ticket in tickets {
                        state.answer(ticket, Err(NotAdmitted::Refused(reason.clone())));
                    }
                }
            }
        }
    }

    /// A job's part of the switches' memory is another's from now on.
    fn give_back(&self, job: JobId) {
        let planners = Arc::clone(&self.planners);
        // After the errand that makes room for the job.
        self.errands.send(move |_| planners.values().for_each(|planner| planner.forget(job)));
    }

    /// Whether the data path works, and is told what is decided.
    pub fn health(&self) -> Result<(), ThreadEnded> {
        self.driver.health()?;
        self.errands.health()
    }

    /// What the data path has to say; `None` when the switch shuts down.
    pub async fn figures(&self) -> Option<Arc<Figures>> {
        self.figures.current().await
    }

    /// The protocol of most of its jobs, by name.
    pub fn protocol(&self) -> &'static str {
        self.lock().registry.protocols()[0].name()
    }

    pub fn config(&self) -> RegistryConfig {
        *self.lock().registry.config()
    }

    pub fn pool(&self) -> Pool {
        self.lock().registry.pool()
    }

    pub fn snapshot(&self) -> Vec<JobSnapshot> {
        let owned = |view: JobView<'_>| JobSnapshot {
            name: view.name.into(),
            world_size: view.world_size,
            state: view.state,
        };
        let mut jobs: Vec<_> = self.lock().registry.jobs().map(owned).collect();
        let meeting = |(name, world_size, present): (String, u32, Ranks)| JobSnapshot {
            name,
            world_size: u16::try_from(world_size).unwrap_or(u16::MAX),
            state: JobState::Gathering { present },
        };
        jobs.extend(self.meetings.jobs().into_iter().map(meeting));
        jobs
    }

    /// Whether some rank of an ended job has not heard how it ended.
    pub fn has_untold(&self) -> bool {
        let mut state = self.lock();
        let commands = state.overdue(self.now());
        self.carry_out(&mut state, commands);
        state.registry.jobs().any(|view| matches!(view.state, JobState::Aborted { .. }))
    }

    /// Calls in a rank's name without its secret.
    pub fn denied(&self) -> u64 {
        self.lock().denied
    }

    /// Refused joins by reason.
    pub fn refusals(&self) -> Vec<(&'static str, u64)> {
        let mut refusals: Vec<_> = self.lock().refusals.iter().map(|(name, count)| (*name, *count)).collect();
        refusals.sort_unstable();
        refusals
    }
}

/// A name that may be any, as it gets into a log.
pub(super) fn for_log(name: &str) -> String {
    name.chars().take(JOB_NAME_BYTES_MAX).collect()
}

fn since(origin: Instant) -> fanin_protocol::Instant {
    fanin_protocol::Instant::default() + origin.elapsed()
}

fn lock<T>(state: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic in one call must not end all others: the registry's own methods leave it consistent.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn running(&self) -> Vec<JobId> {
        let id = |view: JobView<'_>| match view.state {
            JobState::Running { job, .. } => Some(job),
            JobState::Gathering { .. } | JobState::Aborted { .. } => None,
        };
        self.registry.jobs().filter_map(id).collect()
    }

    /// What is to be done by now.
    fn overdue(&mut self, now: fanin_protocol::Instant) -> Vec<Command> {
        for job in self.preparing.keys() {
            self.registry.awaits_shell(now, *job);
        }
        self.registry.tick(now)
    }

    fn name_of(&self, job: JobId) -> Option<String> {
        let is_it = |view: &JobView<'_>| matches!(view.state, JobState::Running { job: id, .. } if id == job);
        Some(self.registry.jobs().find(is_it)?.name.into())
    }

    fn answer(&mut self, ticket: Ticket, outcome: Outcome) {
        if let Some(asking) = self.waiting.remove(&ticket) {
            // The rank may have hung up just now. It is silent then, and expelled.
            let _ = asking.answer.send(outcome);
        }
    }

    /// Notes from where ranks send that are about to be told that they are admitted. Returns these hosts, for the data path.
    fn register(&mut self, job: JobId, tickets: &[Ticket]) -> Vec<IpAddr> {
        let asking = tickets.iter().filter_map(|ticket| self.waiting.get(ticket));
        let each: Vec<_> = asking.map(|asking| (asking.rank, asking.hosts.clone())).collect();
        for (rank, hosts) in &each {
            self.sends_from(job, *rank, hosts);
        }
        each.into_iter().flat_map(|(_, hosts)| hosts).collect()
    }

    /// Notes from where a rank of a running job sends; whether that is new.
    fn sends_from(&mut self, job: JobId, rank: Rank, hosts: &[IpAddr]) -> bool {
        if !self.news.contains_key(&job) {
            return false;
        }
        let known = self.hosts.entry(job).or_default().entry(rank).or_default();
        let is_new = known != hosts;
        if is_new {
            *known = hosts.to_vec();
        }
        is_new
    }

    /// Tells a job's ranks how it is.
    fn tell(&self, job: JobId, news: HeartbeatReply) {
        if let Some(ranks) = self.news.get(&job) {
            ranks.send_replace(news);
        }
    }

    /// What a call in a rank's name comes to; counted where it has no effect.
    fn allowed<T>(&mut self, job: JobId, called: Result<T, Denied>) -> Result<T, Denied> {
        called.inspect_err(|denied| {
            self.denied += 1;
            // Whoever likes can make as many as he likes.
            tracing::debug!(id = job.0, %denied, "a call is refused");
        })
    }

    fn count_refusal(&mut self, reason: &Refusal) {
        *self.refusals.entry(reason.name()).or_default() += 1;
    }
}

impl std::fmt::Debug for Jobs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Jobs").field("driver", &self.driver).finish_non_exhaustive()
    }
}
