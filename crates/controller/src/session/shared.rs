//! What a session's threads share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fanin_protocol::control::Ranks;
use fanin_udp::{Failure, Membership, WorkerDriver};
use fanin_wire::Rank;

use super::config::SessionConfig;
use super::pending::Pending;
use super::trace::SessionTrace;
use crate::control_channel::Connection;
use crate::error::Member;
use crate::error::SessionError;

/// One rank of a job, as long as it takes part.
pub(super) struct Shared {
    pub config: SessionConfig,
    pub rank: Rank,
    /// What it is at each service.
    pub members: Arc<[Member]>,
    /// Of each service.
    lanes: Vec<Mutex<Lane>>,
    /// [`SessionConfig::timeout`] as it is now, in nanoseconds.
    timeout_ns: AtomicU64,
    pub driver: WorkerDriver,
    pub trace: Option<SessionTrace>,
    pub pending: Arc<Pending>,
    /// Who is told when the session ends by itself.
    on_failure: Mutex<Option<OnFailure>>,
}

type OnFailure = Box<dyn FnOnce(SessionError) + Send>;

/// What is known of a job at one service.
#[derive(Clone, Debug)]
pub(super) struct Lane {
    /// The job as it is now; a restart of the service changes it.
    pub job: Membership,
    /// Its name there, and to whom one speaks of it; another service that takes over changes both.
    pub name: String,
    pub connection: Connection,
    /// Ranks that left there.
    pub left: Ranks,
    /// Since when the service does not answer, and what was the matter last.
    pub silent: Option<(Instant, String)>,
    /// Whether the rank is at joining it again.
    pub is_rejoining: bool,
}

impl Shared {
    /// Whether a service is in the process of a rank, and goes with it.
    pub fn hosts(&self, rank: Rank, service: usize) -> bool {
        self.config.services[service].home == Some(rank)
    }

    pub fn new(
        config: SessionConfig,
        members: Vec<Member>,
        driver: WorkerDriver,
        trace: Option<SessionTrace>,
        joined: impl IntoIterator<Item = (Membership, Connection)>,
    ) -> Self {
        let name = config.job.clone();
        let lane = |(job, connection)| {
            let (name, left) = (name.clone(), Ranks::default());
            Lane { job, name, connection, left, silent: None, is_rejoining: false }
        };
        Self {
            // Every service admitted the rank, so that it fits.
            rank: Rank(config.rank as u16),
            members: members.into(),
            lanes: joined.into_iter().map(lane).map(Mutex::new).collect(),
            timeout_ns: AtomicU64::new(nanoseconds(config.timeout)),
            driver,
            trace,
            pending: Arc::default(),
            on_failure: Mutex::default(),
            config,
        }
    }

    /// Ends the session with an error: all that is outstanding, and all that comes.
    pub fn fail(&self, error: SessionError) {
        tracing::error!(%error, rank = self.rank.0, "the session ends");
        self.driver.fail(Failure::Because(Arc::new(error)));
        self.tell_failure();
    }

    /// Why the session ended, if it did.
    pub fn failure(&self) -> Option<SessionError> {
        Some(SessionError::from_failure(&self.driver.failure()?, &self.members))
    }

    /// Ranks that have left, as some service knows.
    pub fn left(&self) -> Ranks {
        let mut left = Ranks::default();
        self.lanes().for_each(|lane| left.extend(lane.left.iter()));
        left
    }

    /// As [`super::joined::Session::on_failure`].
    pub fn on_failure(&self, told: OnFailure) {
        *self.on_failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(told);
        self.tell_failure();
    }

    /// Tells who wants to know it that the session has ended, if it has and its owner did not close it.
    pub fn tell_failure(&self) {
        let Some(error) = self.failure().filter(|error| !matches!(error, SessionError::Closed)) else {
            return;
        };
        let told = self.on_failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(told) = told {
            told(error);
        }
    }

    pub fn lane(&self, service: usize) -> MutexGuard<'_, Lane> {
        self.lanes[service].lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn lanes(&self) -> impl Iterator<Item = MutexGuard<'_, Lane>> {
        (0..self.lanes.len()).map(|service| self.lane(service))
    }

    pub fn job(&self, service: usize) -> Membership {
        self.lane(service).job.clone()
    }

    /// The services, with commas between.
    pub fn switches(&self) -> String {
        names(self.members.iter().map(|member| member.switch.as_str()))
    }

    pub fn timeout(&self) -> Duration {
        Duration::from_nanos(self.timeout_ns.load(Ordering::Relaxed))
    }

    pub fn set_timeout(&self, timeout: Duration) {
        self.timeout_ns.store(nanoseconds(timeout), Ordering::Relaxed);
    }
}

/// Services in one text.
pub(super) fn names<'a>(switches: impl Iterator<Item = &'a str>) -> String {
    switches.collect::<Vec<_>>().join(",")
}

/// Saturates after five centuries.
fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
