//! `Meeting`: the ranks of a job at a switch, before they know who is to sum.

use crate::client::limit;
use crate::error::to_python;
use crate::interruptible::{lock, on_a_thread};
use crate::settings::protocol_of;
use crate::trust::Trust;
use fanin_controller as controller;
use fanin_controller::{Cancel, MeetingConfig, SessionError};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex};

/// The ranks of a job, at the first of the switches that rank 0 names.
///
/// `switches` are host:port, in the order of the job, which are known as `trust` says; `protocol`
/// as of a `Client`. The constructor blocks, without the interpreter's lock, until all ranks have
/// come, `timeout` seconds at most. Raises the errors of `fanin.errors`, of which `JoinTimeout`
/// names the ranks that did not.
#[pyclass(frozen, module = "fanin._fanin")]
pub(crate) struct Meeting {
    /// `None` once it is closed.
    meeting: Mutex<Option<Arc<controller::Meeting>>>,
    /// Which attempt at the job it is: the same on all its ranks, and no other's.
    #[pyo3(get)]
    attempt: u64,
}

#[pymethods]
impl Meeting {
    #[new]
    #[pyo3(signature = (switches, protocol, job, rank, world_size, *, timeout, trust=None))]
    #[expect(clippy::too_many_arguments, reason = "the signature is Python's")]
    fn new(
        py: Python<'_>,
        switches: Vec<String>,
        protocol: &str,
        job: String,
        rank: u32,
        world_size: u32,
        timeout: f64,
        trust: Option<&Trust>,
    ) -> PyResult<Self> {
        let (protocol, trust) = (protocol_of(protocol)?, Trust::of(trust));
        let config = MeetingConfig { switches, protocol, job, rank, world_size, trust };
        let patience = limit(timeout)?;
        let meeting = unless_interrupted(py, move |cancel| {
            controller::Meeting::open(config, patience, cancel).map(Arc::new)
        })?;
        Ok(Self { attempt: meeting.attempt(), meeting: Mutex::new(Some(meeting)) })
    }

    /// The words of each rank under this name, in their order; `text` is this rank's. Every rank
    /// calls with the same names in the same order, each once. Blocks and raises as the constructor
    /// does; `BeganAnew` when a rank was started again since all met, so that they have to meet
    /// once more, and `JoinRefused`, on all ranks, when they say too much.
    #[pyo3(signature = (name, text, *, timeout))]
    fn gather(&self, py: Python<'_>, name: String, text: String, timeout: f64) -> PyResult<Vec<String>> {
        let patience = limit(timeout)?;
        let meeting = self.open().ok_or_else(|| to_python(py, &SessionError::Closed))?;
        unless_interrupted(py, move |cancel| meeting.gather(&name, text, patience, cancel))
    }

    /// Hangs up. Idempotent.
    fn close(&self) {
        drop(lock(&self.meeting).take());
    }
}

impl Meeting {
    /// `None` once it is closed.
    pub(crate) fn open(&self) -> Option<Arc<controller::Meeting>> {
        lock(&self.meeting).clone()
    }
}

fn unless_interrupted<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce(&Cancel) -> Result<T, SessionError> + Send + 'static,
) -> PyResult<T> {
    let cancel = Cancel::default();
    let cancelled = cancel.clone();
    let done = on_a_thread(py, "fanin-meet", None, || cancel.cancel(), move || work(&cancelled))?;
    done.map_err(|error| to_python(py, &error))
}
