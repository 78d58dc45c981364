//! What a session's threads share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fanin_udp::{Failure, WorkerDriver, WorkerJob};

use super::config::SessionConfig;
use super::pending::Pending;
use super::trace::SessionTrace;
use crate::SessionError;
use crate::error::Member;

/// One rank of a job, as long as it takes part.
pub(super) struct Shared {
    pub config: SessionConfig,
    pub member: Arc<Member>,
    /// [`SessionConfig::timeout`] as it is now, in nanoseconds.
    timeout_ns: AtomicU64,
    pub driver: WorkerDriver,
    pub trace: Option<SessionTrace>,
    pub pending: Arc<Pending>,
    /// The job as it is now; a restart of the switch changes it.
    job: Mutex<WorkerJob>,
}

impl Shared {
    pub fn new(
        config: SessionConfig,
        member: Member,
        driver: WorkerDriver,
        trace: Option<SessionTrace>,
        job: WorkerJob,
    ) -> Self {
        Self {
            member: Arc::new(member),
            timeout_ns: AtomicU64::new(nanoseconds(config.timeout)),
            driver,
            trace,
            pending: Arc::default(),
            job: Mutex::new(job),
            config,
        }
    }

    /// Ends the session with an error: all that is outstanding, and all that comes.
    pub fn fail(&self, error: SessionError) {
        tracing::error!(%error, rank = self.member.rank.0, "the session ends");
        self.driver.fail(Failure::Because(Arc::new(error)));
    }

    pub fn job(&self) -> WorkerJob {
        *self.job.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn timeout(&self) -> Duration {
        Duration::from_nanos(self.timeout_ns.load(Ordering::Relaxed))
    }

    pub fn set_timeout(&self, timeout: Duration) {
        self.timeout_ns.store(nanoseconds(timeout), Ordering::Relaxed);
    }

    pub fn set_job(&self, job: WorkerJob) {
        *self.job.lock().unwrap_or_else(PoisonError::into_inner) = job;
    }
}

/// Saturates after five centuries.
fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
