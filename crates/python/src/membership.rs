//! A rank's membership in a job: the session, and the all-reduces that Python still has to hear of.

use crate::error::to_python;
use crate::interruptible::on_a_thread;
use crate::ledger::{Ledger, Ticket};
use fanin_controller::{
    Cancel, JobStatusState, LocalRanks, Meeting, Session, SessionConfig, SessionError, Tensor, Trust,
    trusted_status,
};
use fanin_protocol::control::Ranks;
use pyo3::prelude::*;
use rustix::process::{Pid, getpid};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread;
use std::time::Duration;

/// How long the switch may take to say for whom an all-reduce waits.
const STATUS_PATIENCE: Duration = Duration::from_secs(1);

/// The state that a client and its all-reduces share. It lives until the last of them is gone.
pub(crate) struct Membership {
    services: Vec<String>,
    /// By what they are known.
    trust: Trust,
    pub(crate) job: String,
    /// `None` once closed. Never held while Python code may run, as that could close it.
    session: RwLock<Option<Session>>,
    /// The process that joined. A process that it forked inherits the object, but not the threads
    /// behind it.
    owner: Pid,
    ledger: Ledger,
}

impl Membership {
    /// Joins; returns when all ranks have, or a signal handler or `look` raised.
    pub(crate) fn join(
        py: Python<'_>,
        config: SessionConfig,
        local: Option<LocalRanks>,
        meeting: Option<Arc<Meeting>>,
        look: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let services = config.services.iter().map(|service| service.switch.clone()).collect();
        let (job, trust) = (config.job.clone(), config.trust.clone());
        let cancel = Cancel::default();
        let cancelled = cancel.clone();
        // A session that comes although it was cancelled is closed.
        let joined = on_a_thread(
            py,
            "fanin-join",
            look,
            || cancel.cancel(),
            move || {
                let joining = meeting.map(|meeting| meeting.joining(config.join_timeout, &cancelled));
                let joined = Session::connect_unless(config, local, &cancelled);
                match joining {
                    Some(joining) => joining.over(joined),
                    None => joined,
                }
            },
        );
        let session = joined?.map_err(|error| to_python(py, &error))?;
        Ok(Self {
            services,
            trust,
            job,
            session: RwLock::new(Some(session)),
            owner: getpid(),
            ledger: Ledger::default(),
        })
    }

    /// The result of `with` for the session; `None` once it is closed, and in a forked process.
    pub(crate) fn with_session<R>(&self, with: impl FnOnce(&Session) -> R) -> Option<R> {
        if self.is_forked() {
            return None;
        }
        self.session.read().unwrap_or_else(PoisonError::into_inner).as_ref().map(with)
    }

    /// `None` in a forked process, where another thread of the parent may have held its locks for
    /// ever.
    pub(crate) fn ledger(&self) -> Option<&Ledger> {
        (!self.is_forked()).then_some(&self.ledger)
    }

    /// For the I/O threads, which no forked process has.
    pub(crate) fn finish(&self, ticket: Ticket) {
        self.ledger.finish(ticket);
    }

    /// Leaves the job. When this returns no memory is touched any more. Blocks: call it without the
    /// interpreter's lock.
    pub(crate) fn leave(&self) {
        if self.is_forked() {
            // The membership is the parent's; and a lock that another of its threads held at the
            // fork stays locked here.
            return;
        }
        let session = self.session.write().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut session) = session {
            session.close();
        }
        self.ledger.close();
    }

    pub(crate) fn is_forked(&self) -> bool {
        getpid() != self.owner
    }

    /// The exception for a wait that was too short, naming the ranks that the switch waits for.
    pub(crate) fn wait_timed_out(&self, py: Python<'_>, waited: Duration, tensor: Tensor) -> PyErr {
        let error = py.detach(|| SessionError::AllReduceTimeout {
            missing_ranks: self.missing_ranks(),
            waited,
            switch: self.switch(),
            tensor,
        });
        to_python(py, &error)
    }

    /// The services, with commas between.
    pub(crate) fn switch(&self) -> String {
        self.services.join(",")
    }

    /// For whom the services wait; none where they cannot be asked.
    fn missing_ranks(&self) -> Ranks {
        if let Some(awaited) = self.with_session(Session::awaited).flatten() {
            return awaited;
        }
        // All at once: one that is gone takes its time.
        let answers = thread::scope(|scope| {
            let ask = |service: &String| {
                let service = service.clone();
                scope.spawn(move || trusted_status(&service, STATUS_PATIENCE, &self.trust))
            };
            let asked: Vec<_> = self.services.iter().map(ask).collect();
            asked.into_iter().filter_map(|asked| asked.join().ok()?.ok()).collect::<Vec<_>>()
        });
        let jobs = answers.into_iter().flat_map(|status| status.jobs).filter(|job| job.name == self.job);
        jobs.flat_map(|job| match job.state {
            JobStatusState::Running { waiting_for, .. } => waiting_for,
            _ => Vec::new(),
        })
        .map(|(rank, _)| rank)
        .collect()
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if self.is_forked() {
            // Closing would wait for threads that this process does not have.
            std::mem::forget(self.session.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}
