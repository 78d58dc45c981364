//! The registry joined to the data path: decisions are taken under one lock and carried out before it is released, so that
//! no rank is told of a job that the data path does not know.

use std::collections::{BTreeMap, HashMap};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fanin_protocol::JobAborted;
use fanin_protocol::control::{
    Admission, Command, HeartbeatReply, JobState, JobView, JoinDecision, JoinRequest, Pool, Refusal,
    Registry, RegistryConfig, Ticket,
};
use fanin_wire::{AbortReason, Generation, JobId, WorkerId};
use tokio::sync::oneshot;

use crate::proto::AtpRoute;

use super::data_path::DataPath;

/// What a waiting rank is told.
pub(super) type Outcome = Result<Admission, NotAdmitted>;

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
        let mut state = self.jobs.lock();
        if state.waiting.remove(&self.ticket).is_some() {
            state.registry.withdraw(self.ticket);
        }
    }
}

/// Whether a rank waits or has its answer.
pub(super) enum Joined<'a> {
    Waiting(Place<'a>),
    Done(Outcome),
}

/// A job as `Status` and the metrics see it.
#[derive(Clone, Debug)]
pub(super) struct JobSnapshot {
    pub name: String,
    pub world_size: u8,
    pub state: JobState,
}

/// All jobs of a switch.
pub(super) struct Jobs {
    state: Mutex<State>,
    pub driver: Arc<dyn DataPath>,
    /// The registry counts time from here.
    origin: Instant,
}

struct State {
    registry: Registry,
    waiting: HashMap<Ticket, oneshot::Sender<Outcome>>,
    /// Jobs that the data path ended.
    ended: Option<Receiver<JobAborted>>,
    refusals: HashMap<&'static str, u64>,
    /// What the ranks of running jobs measured; an entry goes with its job.
    round_trips: HashMap<JobId, BTreeMap<WorkerId, Duration>>,
}

impl Jobs {
    pub fn new(registry: Registry, driver: Arc<dyn DataPath>) -> Self {
        let state = State {
            registry,
            waiting: HashMap::new(),
            ended: driver.events(),
            refusals: HashMap::new(),
            round_trips: HashMap::new(),
        };
        Self { state: Mutex::new(state), driver, origin: Instant::now() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic in one call must not end all others: the registry's own methods leave it consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> fanin_protocol::Instant {
        fanin_protocol::Instant::default() + self.origin.elapsed()
    }

    pub fn join(&self, request: JoinRequest) -> Joined<'_> {
        let (job, rank, world_size) = (request.job.clone(), request.rank, request.world_size);
        let mut state = self.lock();
        match state.registry.join(self.now(), request) {
            JoinDecision::Waiting(ticket) => {
                tracing::debug!(job, rank, world_size, "a rank waits");
                let (sender, outcome) = oneshot::channel();
                state.waiting.insert(ticket, sender);
                Joined::Waiting(Place { jobs: self, ticket, outcome })
            }
            JoinDecision::Complete { ticket, tickets, outcome } => {
                let outcome =
                    outcome.map_err(NotAdmitted::Refused).and_then(|job| self.configure(&mut state, job));
                match &outcome {
                    Ok(admitted) => tracing::info!(
                        job,
                        id = admitted.job.0,
                        generation = admitted.generation.0,
                        world_size,
                        slots = admitted.slots,
                        elements = admitted.elements,
                        wire_dtype = admitted.wire_dtype.name(),
                        "a job runs"
                    ),
                    Err(reason) => tracing::warn!(job, world_size, ?reason, "a job is not admitted"),
                }
                for other in tickets.into_iter().filter(|other| *other != ticket) {
                    state.answer(other, outcome.clone());
                }
                if let Err(NotAdmitted::Refused(reason)) = &outcome {
                    state.count_refusal(*reason);
                }
                Joined::Done(outcome)
            }
            JoinDecision::Again(admission) => {
                tracing::info!(job, rank, "a rank is told again of its job");
                Joined::Done(Ok(admission))
            }
            JoinDecision::Refused { reason } => {
                tracing::warn!(job, rank, world_size, %reason, "a rank is refused");
                state.count_refusal(reason);
                Joined::Done(Err(NotAdmitted::Refused(reason)))
            }
        }
    }

    /// Makes room for an admitted job in the data path, before any rank hears of it.
    fn configure(&self, state: &mut State, admission: Admission) -> Outcome {
        match self.driver.add_job(&admission) {
            Ok(()) => Ok(admission),
            Err(error) => {
                let commands = state.registry.aborted(self.now(), admission.job, AbortReason::SwitchStopped);
                self.carry_out(state, commands);
                Err(NotAdmitted::DataPath(error.to_string()))
            }
        }
    }

    /// A rank lives, and has measured this round trip.
    pub fn heartbeat(
        &self,
        job: JobId,
        rank: WorkerId,
        generation: Generation,
        rtt: Option<Duration>,
    ) -> HeartbeatReply {
        let mut state = self.lock();
        let reply = state.registry.heartbeat(self.now(), job, rank, generation);
        if let (HeartbeatReply::Alive { .. }, Some(rtt)) = (&reply, rtt) {
            // Of a rank that the job has, so that no more can be entered than there are ranks.
            state.round_trips.entry(job).or_default().insert(rank, rtt);
        }
        reply
    }

    /// The route of a job that runs here, as the first switch on the way to its workers is told it.
    pub fn route(&self, job: JobId) -> Option<AtpRoute> {
        let state = self.lock();
        let (levels, elements) = state.registry.levels(job)?;
        let is_it = |view: &JobView<'_>| matches!(view.state, JobState::Running { job: id, .. } if id == job);
        let name = state.registry.jobs().find(is_it)?.name.into();
        let timeout = state.registry.config().heartbeat_timeout;
        let heartbeat_timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        Some(AtpRoute { levels: levels.into(), elements: elements.into(), job: name, heartbeat_timeout_ms })
    }

    /// The round trips that a job's ranks have told.
    pub fn round_trips(&self, job: JobId) -> BTreeMap<WorkerId, Duration> {
        self.lock().round_trips.get(&job).cloned().unwrap_or_default()
    }

    pub fn leave(&self, job: JobId, rank: WorkerId) {
        let mut state = self.lock();
        let command = state.registry.leave(job, rank);
        tracing::debug!(id = job.0, rank = rank.0, "a rank leaves");
        self.carry_out(&mut state, command);
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
            self.driver.abort_job(job, reason);
            let command = state.registry.aborted(now, job, reason);
            self.carry_out(&mut state, command);
        }
        let commands = state.registry.tick(now);
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
                    self.driver.abort_job(job, reason);
                }
                Command::Remove { job } => {
                    state.round_trips.remove(&job);
                    tracing::info!(id = job.0, "a job is over");
                    self.driver.remove_job(job);
                }
                Command::Refuse { tickets, reason } => {
                    tracing::warn!(%reason, "a gathering is given up");
                    state.count_refusal(reason);
                    for ticket in tickets {
                        state.answer(ticket, Err(NotAdmitted::Refused(reason)));
                    }
                }
            }
        }
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
        self.lock().registry.jobs().map(owned).collect()
    }

    /// Whether some rank of an ended job has not heard how it ended.
    pub fn has_untold(&self) -> bool {
        let mut state = self.lock();
        let now = self.now();
        let commands = state.registry.tick(now);
        self.carry_out(&mut state, commands);
        state.registry.jobs().any(|view| matches!(view.state, JobState::Aborted { .. }))
    }

    /// Refused joins by reason.
    pub fn refusals(&self) -> Vec<(&'static str, u64)> {
        let mut refusals: Vec<_> = self.lock().refusals.iter().map(|(name, count)| (*name, *count)).collect();
        refusals.sort_unstable();
        refusals
    }
}

impl State {
    fn answer(&mut self, ticket: Ticket, outcome: Outcome) {
        if let Some(sender) = self.waiting.remove(&ticket) {
            // The rank may have hung up just now. It is silent then, and expelled.
            let _ = sender.send(outcome);
        }
    }

    fn count_refusal(&mut self, reason: Refusal) {
        *self.refusals.entry(reason.name()).or_default() += 1;
    }
}

impl std::fmt::Debug for Jobs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Jobs").field("driver", &self.driver).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::super::data_path;
    use super::*;
    use fanin_protocol::control::Protocol;

    #[test]
    fn a_round_trip_is_kept_for_a_rank_of_a_job_and_goes_with_the_job() {
        let driver = data_path::bind(([127, 0, 0, 1], 0).into(), Protocol::SwitchMl, 1).unwrap();
        let registry = Registry::new(RegistryConfig::default(), Box::new(|| 7)).unwrap();
        let jobs = Jobs::new(registry, driver);
        let request = JoinRequest {
            job: "job".into(),
            rank: 0,
            world_size: 1,
            slots: Some(1),
            mtu: 1500,
            rate_bps: None,
            rtt: Duration::ZERO,
            wire_dtype: fanin_wire::WireDtype::Int32,
            protocol: Protocol::SwitchMl,
            hops: Vec::new(),
            patience: Duration::from_secs(1),
            wire_version: fanin_wire::VERSION,
            resume: None,
        };
        let Joined::Done(Ok(Admission { job, generation, .. })) = jobs.join(request) else {
            panic!("not admitted")
        };
        let trip = Some(Duration::from_micros(50));
        for (job, rank) in [(job, 0), (job, 1), (JobId(8), 0)] {
            jobs.heartbeat(job, WorkerId(rank), generation, trip);
        }
        jobs.heartbeat(job, WorkerId(0), generation, None);
        let expected = HashMap::from([(job, BTreeMap::from([(WorkerId(0), Duration::from_micros(50))]))]);
        assert_eq!(jobs.lock().round_trips, expected);
        jobs.leave(job, WorkerId(0));
        jobs.heartbeat(job, WorkerId(0), generation, trip);
        assert!(jobs.lock().round_trips.is_empty());
    }
}
