//! The registry joined to the data path. Decisions are taken under one lock, and carried out in
//! their order by a thread that holds none: no rank is told of a job before the data path knows it,
//! and none waits for the data path with a heartbeat.

use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use fanin_limits::Budget;
use fanin_protocol::JobAborted;
use fanin_protocol::control::{
    Admission, Attendance, Command, Denied, Detached, HeartbeatReply, JOB_NAME_BYTES_MAX, JobState, JobView,
    JoinDecision, JoinRequest, Pool, Protocol, Ranks, Refusal, Registry, RegistryConfig, Share, Ticket,
};
use fanin_udp::{Clock, DataPath, Figures, ThreadEnded};
use fanin_wire::{AbortReason, Generation, JobId, Rank};
use tokio::sync::{oneshot, watch};
use tonic::Status;

use self::preparation::{Admitted, Preparation};
use self::table::{Asking, Table};
use super::limits::{WaitingJobs, WaitingRank, reports_budget};
use super::lock;
use super::meetings::{Meetings, NotHeard, Present};
use super::reports::{JobReport, Report, Told};
use super::snapshots::Snapshots;
use super::task_queue::TaskQueue;
use crate::proto;

mod preparation;
mod table;
#[cfg(test)]
mod tests;

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
pub(super) struct Place<'a> {
    jobs: &'a Jobs,
    ticket: Ticket,
    outcome: oneshot::Receiver<Outcome>,
}

impl Place<'_> {
    /// Waits until every rank is here, or the gathering is given up.
    pub async fn outcome(&mut self) -> Outcome {
        (&mut self.outcome).await.unwrap_or(Err(NotAdmitted::Refused(Refusal::SwitchStopping)))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.jobs.lock().withdraw(self.ticket);
    }
}

/// Whether a rank waits or has its answer.
pub(super) enum Joined<'a> {
    Waiting(Place<'a>),
    Done(Outcome),
}

/// A rank, as it speaks of itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caller {
    pub job: JobId,
    pub rank: Rank,
    pub generation: Generation,
    pub secret: u64,
    /// Switches that passed on what it says.
    pub passed_on: u32,
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
    table: Arc<Mutex<Table>>,
    pub driver: Arc<dyn DataPath>,
    tasks: TaskQueue<dyn DataPath>,
    figures: Snapshots<Figures>,
    preparation: Preparation,
    waiting: WaitingJobs,
    /// Memory for what ranks report that wait.
    reports_budget: Budget,
    /// Ranks that have still to find each other.
    meetings: Meetings,
}

impl Jobs {
    /// Whether nobody is in any job, nor waits for one.
    pub fn is_idle(&self) -> bool {
        self.meetings.is_empty() && self.lock().registry.is_idle()
    }

    /// # Errors
    /// When the operating system gives no thread.
    pub fn new(registry: Registry, driver: Arc<dyn DataPath>) -> io::Result<Self> {
        let waiting = WaitingJobs::at_root(registry.config().jobs_max);
        let planner = |protocol: &&dyn Protocol| Some((protocol.name(), protocol.planner()?));
        let planners = registry.protocols().iter().filter_map(planner).collect();
        let table = Arc::new(Mutex::new(Table::new(registry, driver.events())));
        let (asked, running) = (Arc::clone(&driver), Arc::clone(&table));
        let figures = Snapshots::new(move || {
            let running = lock(&running).running();
            asked.figures(&running)
        });
        Ok(Self {
            tasks: TaskQueue::start(Arc::clone(&driver))?,
            driver,
            figures,
            preparation: Preparation::new(Arc::clone(&table), planners),
            waiting,
            reports_budget: reports_budget(),
            meetings: Meetings::default(),
            table,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }

    /// A rank begins to wait.
    ///
    /// # Errors
    /// When ranks of too many jobs wait already that ask from the same address.
    pub fn wait(&self, address: IpAddr, request: &JoinRequest) -> Result<WaitingRank, Status> {
        // Those that resume jobs of one name wait for each other only if they show the same.
        let lineage = request.lineage().map_or_else(String::new, |lineage| format!("\n{lineage}"));
        self.waiting.enter(address, for_log(&request.job) + &lineage)
    }

    /// Takes off a request what it reports of the rank and its job, if there is memory for it while
    /// the rank waits.
    pub fn take_report(&self, address: IpAddr, request: &mut proto::JoinRequest) -> Report {
        Report::take(request, address, &self.reports_budget)
    }

    /// A rank says something to the others of its job before they join.
    ///
    /// Where a job of this name and size runs that it did not leave, it is refused at once, as it
    /// would be when it joined. What columns of the job run is for the joins to see: when all ranks
    /// have met, those that they were have left or ended.
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

    /// A rank asks to join, whose packets will come from these hosts; from the first of them it
    /// calls.
    pub fn join(&self, request: JoinRequest, mut hosts: Vec<IpAddr>) -> Joined<'_> {
        let (job, rank, world_size) = (for_log(&request.job), request.rank, request.world_size);
        let mut table = self.lock();
        // The name of a job that runs is known to all. Who may end it is where its ranks were.
        let from = hosts.first().copied();
        let ended = table.make_way(&request, from);
        self.carry_out(&mut table, ended);
        let decision = table.registry.join(Clock.now(), request);
        let mut wait = |table: &mut Table, ticket| {
            let (answer, outcome) = oneshot::channel();
            let hosts = std::mem::take(&mut hosts);
            table.waiting.insert(ticket, Asking { rank: Rank(rank as u16), hosts, answer });
            Joined::Waiting(Place { jobs: self, ticket, outcome })
        };
        let reason = match decision {
            JoinDecision::Waiting(ticket) => {
                tracing::debug!(job, rank, world_size, "a rank waits");
                return wait(&mut table, ticket);
            }
            JoinDecision::Complete { ticket, tickets, outcome: Ok(admission), replaced } => {
                if let Some(before) = replaced {
                    table.jobs.remove(&before);
                    self.tasks.send(move |driver| driver.remove_job(before));
                }
                table.begin(admission.job);
                let admitted = Admitted { name: job, admission, tickets, from, replaces: replaced };
                self.preparation.begin(&self.tasks, admitted);
                // Last: a place that a panic drops would lock the table once more.
                return wait(&mut table, ticket);
            }
            JoinDecision::Complete { ticket, tickets, outcome: Err(reason), replaced } => {
                tracing::warn!(job, world_size, ?reason, "a job is not admitted");
                self.carry_out(&mut table, replaced.map(|job| Command::Remove { job }));
                let others = tickets.into_iter().filter(|other| *other != ticket);
                others.for_each(|other| table.answer(other, Err(NotAdmitted::Refused(reason.clone()))));
                reason
            }
            JoinDecision::Again { ticket, admission } => {
                tracing::info!(job, rank, "a rank is told again of its job");
                if let Some(late) = table.preparing.get_mut(&admission.job) {
                    // It may be planned yet.
                    late.push(ticket);
                } else {
                    // After the job itself: the data path may not know it yet.
                    let table = Arc::clone(&self.table);
                    self.tasks.send(move |driver| {
                        let hosts = lock(&table).register(admission.job, &[ticket]);
                        driver.register(admission.job, &hosts);
                        lock(&table).answer(ticket, Ok(Arc::new(admission)));
                    });
                }
                // Last, as above.
                return wait(&mut table, ticket);
            }
            JoinDecision::Refused { reason } => {
                tracing::warn!(job, rank, world_size, %reason, "a rank is refused");
                reason
            }
        };
        table.count_refusal(&reason);
        Joined::Done(Err(NotAdmitted::Refused(reason)))
    }

    /// A rank that was admitted reports of the job and of itself.
    pub fn report(&self, job: JobId, rank: u32, report: Report) {
        // The job may have ended since.
        if let (Some(running), Ok(rank)) = (self.lock().jobs.get_mut(&job), u16::try_from(rank)) {
            Arc::make_mut(&mut running.report).joined(Rank(rank), report);
        }
    }

    /// A rank lives, and has measured this.
    pub fn heartbeat(
        &self,
        caller: Caller,
        told: Told,
        hosts: Vec<IpAddr>,
    ) -> Result<HeartbeatReply, Denied> {
        let Caller { job, rank, generation, secret, .. } = caller;
        let mut table = self.lock();
        let reply = table.registry.heartbeat(Clock.now(), job, rank, generation, secret);
        let reply = table.allowed(job, reply)?;
        let reply = table.by_way_of(&caller, reply);
        if let HeartbeatReply::Alive { left } = &reply
            && !left.contains(rank)
        {
            // Of a rank that the job has, so that no more can be entered than there are ranks.
            if let Some(running) = table.jobs.get_mut(&job) {
                Arc::make_mut(&mut running.report).told(rank, told, Instant::now());
            }
            if table.sends_from(job, rank, &hosts) {
                self.tasks.send(move |driver| driver.register(job, &hosts));
            }
        }
        Ok(reply)
    }

    /// As [`Registry::caught_up`].
    pub fn caught_up(&self, job: JobId, rank: Rank) {
        self.lock().registry.caught_up(job, rank);
    }

    /// As [`Registry::others_behind`].
    pub fn others_behind(&self, job: JobId, rank: Rank) -> bool {
        self.lock().registry.others_behind(job, rank)
    }

    /// A rank opens its stream.
    pub fn attend(&self, caller: Caller) -> Result<Attending, Denied> {
        let Caller { job, rank, generation, secret, .. } = caller;
        let mut table = self.lock();
        let attending = table.registry.attend(Clock.now(), job, rank, generation, secret);
        let (reply, attendance) = table.allowed(job, attending)?;
        let reply = table.by_way_of(&caller, reply);
        let stays = attendance.zip(table.jobs.get_mut(&job)).map(|(attendance, running)| {
            let (current, superseded) = oneshot::channel();
            running.streams.insert(rank, current);
            Stays { attendance, news: running.news.subscribe(), superseded }
        });
        Ok(Attending { rank, reply, stays })
    }

    /// A rank's stream ended.
    pub fn detached(&self, attendance: Attendance, cause: Detached) {
        tracing::debug!(id = attendance.job.0, rank = attendance.rank.0, ?cause, "a rank's stream ended");
        self.lock().registry.detached(Clock.now(), attendance, cause);
    }

    /// What those on a rank's way need to serve a job that runs here; `None` where there is nobody
    /// who would.
    pub fn route(&self, job: JobId, rank: Rank) -> Option<proto::Route> {
        let table = self.lock();
        let limits = table.registry.config();
        let admission = table.registry.admission(job)?;
        let parts: Vec<Vec<u8>> = admission.way(rank).into_iter().map(<[u8]>::to_vec).collect();
        (!parts.is_empty()).then_some(())?;
        Some(proto::Route {
            job: table.name_of(job)?,
            key: admission.key.to_bytes().into(),
            heartbeat_timeout_ms: u64::try_from(limits.heartbeat_timeout.as_millis()).unwrap_or(u64::MAX),
            lineage: table.registry.lineage(job),
            world_size: admission.world_size.into(),
            shards: admission.shards.into(),
            parts,
        })
    }

    /// Which part of a job each switch sums, where there is a plan.
    pub fn shares(&self, job: JobId) -> Vec<proto::PlannedShare> {
        let table = self.lock();
        let Some(admission) = table.registry.admission(job) else { return Vec::new() };
        let share = |share: &Share| proto::PlannedShare {
            switch: admission.tree.switches[share.switch].hop.address.to_string(),
            share: f64::from(share.millionths) / 1e6,
            aggregators: share.aggregators.saturating_mul(admission.shards.into()),
        };
        admission.seats.shares.iter().map(share).collect()
    }

    /// What a job's ranks have reported.
    pub fn reported(&self, job: JobId) -> Arc<JobReport> {
        self.lock().jobs.get(&job).map(|running| Arc::clone(&running.report)).unwrap_or_default()
    }

    pub fn leave(&self, job: JobId, rank: Rank, secret: u64) -> Result<(), Denied> {
        let mut table = self.lock();
        let command = table.registry.leave(Clock.now(), job, rank, secret);
        let command = table.allowed(job, command)?;
        tracing::debug!(id = job.0, rank = rank.0, "a rank leaves");
        self.carry_out(&mut table, command);
        let left = table.registry.jobs().find_map(|view| match view.state {
            JobState::Running { job: id, left, .. } if id == job => Some(left),
            _ => None,
        });
        if let Some(left) = left {
            table.tell(job, HeartbeatReply::Alive { left });
        }
        Ok(())
    }

    /// Acts on what the data path found out and on what is overdue.
    pub fn tick(&self) {
        let mut table = self.lock();
        let now = Clock.now();
        while let Some(JobAborted { job, reason }) =
            table.ended.as_ref().and_then(|ended| ended.try_recv().ok())
        {
            tracing::warn!(id = job.0, ?reason, "the data path aborts a job");
            // One shard found out; the others must hear of it.
            self.tasks.send(move |driver| driver.abort_job(job, reason));
            self.preparation.forget(&self.tasks, job);
            table.tell(job, HeartbeatReply::Aborted(reason));
            let command = table.registry.aborted(now, job, reason);
            self.carry_out(&mut table, command);
        }
        for job in std::mem::take(&mut table.without_room) {
            let command = table.registry.aborted(now, job, AbortReason::SwitchStopped);
            self.carry_out(&mut table, command);
        }
        let commands = table.overdue(now);
        self.carry_out(&mut table, commands);
    }

    /// Ends all jobs and admits no more.
    pub fn stop(&self) {
        let mut table = self.lock();
        let commands = table.registry.stop(Clock.now());
        self.carry_out(&mut table, commands);
    }

    fn carry_out(&self, table: &mut Table, commands: impl IntoIterator<Item = Command>) {
        for command in commands {
            match command {
                Command::Abort { job, reason } => {
                    tracing::warn!(id = job.0, ?reason, "a job is aborted");
                    table.tell(job, HeartbeatReply::Aborted(reason));
                    self.tasks.send(move |driver| driver.abort_job(job, reason));
                    self.preparation.forget(&self.tasks, job);
                }
                Command::SetUpAgain { job } => {
                    tracing::info!(id = job.0, "a job is set up again");
                    table.tell(job, HeartbeatReply::SetUpAgain);
                }
                Command::Remove { job } => {
                    self.preparation.forget(&self.tasks, job);
                    table.jobs.remove(&job);
                    tracing::info!(id = job.0, "a job is over");
                    self.tasks.send(move |driver| driver.remove_job(job));
                }
                Command::Refuse { tickets, reason } => {
                    tracing::warn!(%reason, "a gathering is given up");
                    table.count_refusal(&reason);
                    for ticket in tickets {
                        table.answer(ticket, Err(NotAdmitted::Refused(reason.clone())));
                    }
                }
            }
        }
    }

    /// Whether the data path works, and is told what is decided.
    pub fn health(&self) -> Result<(), ThreadEnded> {
        self.driver.health()?;
        self.tasks.health()
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
        let mut table = self.lock();
        let commands = table.overdue(Clock.now());
        self.carry_out(&mut table, commands);
        table.registry.jobs().any(|view| matches!(view.state, JobState::Aborted { .. }))
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

impl std::fmt::Debug for Jobs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Jobs").field("driver", &self.driver).finish_non_exhaustive()
    }
}
