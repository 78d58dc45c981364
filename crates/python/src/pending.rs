//! `Pending`: an all-reduce under way.

use crate::error::{all_reduce_to_python, to_python};
use crate::interruptible::{duration, lock};
use crate::ledger::{Completion, Ticket};
use crate::membership::Membership;
use fanin_controller::{SessionError, Tensor};
use fanin_protocol::Loss;
use pyo3::exceptions::PyRuntimeError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, OnceLock};

/// An all-reduce under way. Made by `Client.submit`.
#[pyclass(frozen, module = "fanin._fanin")]
pub(crate) struct Pending {
    /// The owner of the memory. The garbage collector may clear it once the client holds this
    /// object no longer.
    keep: Mutex<Option<Py<PyAny>>>,
    ticket: Ticket,
    /// Its name, once the session has given it one: before anybody can wait.
    tensor: OnceLock<Tensor>,
    completion: Arc<Completion>,
    membership: Arc<Membership>,
}

impl Pending {
    pub(crate) const fn new(
        keep: Py<PyAny>,
        ticket: Ticket,
        completion: Arc<Completion>,
        membership: Arc<Membership>,
    ) -> Self {
        Self { keep: Mutex::new(Some(keep)), ticket, tensor: OnceLock::new(), completion, membership }
    }

    /// It was submitted, and errors are to call it so.
    pub(crate) fn submitted(&self, tensor: Tensor) {
        let _ = self.tensor.set(tensor);
    }

    /// For the trace: Python has it.
    pub(crate) fn taken(&self) {
        self.completion.taken();
    }
}

#[pymethods]
impl Pending {
    /// The object that was given to `submit`.
    #[getter]
    fn keep(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        lock(&self.keep).as_ref().map(|keep| keep.clone_ref(py))
    }

    /// Blocks until the sum is in the memory; other Python threads run meanwhile.
    ///
    /// Raises the typed error of `fanin.errors` if the all-reduce failed, and `AllReduceTimeout`
    /// when it is not over after `timeout` seconds. It stays under way then, and the memory in use.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let timeout = duration(timeout)?;
        if self.membership.is_forked() {
            return Err(to_python(py, &SessionError::Closed));
        }
        match (self.completion.wait(py, timeout)?, timeout, self.tensor.get()) {
            (Some(outcome), ..) => {
                self.taken();
                if let Some(ledger) = self.membership.ledger() {
                    ledger.seen(self.ticket);
                }
                outcome.map_err(|error| all_reduce_to_python(py, &error))
            }
            (None, Some(timeout), Some(tensor)) => Err(self.membership.wait_timed_out(py, timeout, *tensor)),
            (None, ..) => Err(PyRuntimeError::new_err("a wait without timeout timed out")),
        }
    }

    /// Whether `wait` would return, or raise the error of the all-reduce, at once.
    fn done(&self) -> bool {
        self.membership.is_forked() || self.completion.outcome().is_some()
    }

    /// The part that the sum lacks if the job has a loss bound. It says how many contributions its
    /// blocks would have, how many of these are not in it, how many blocks have nobody's and are
    /// zero, and how often some were asked for again. All zero elsewhere; None while there is no
    /// sum.
    fn loss(&self) -> Option<(u64, u64, u64, u32)> {
        let Loss { contributions, lost, unsummed, rounds, .. } = self.completion.loss()?;
        Some((contributions, lost, unsummed, rounds))
    }

    /// Why the all-reduce failed; None if it did not, or is still under way.
    fn exception(&self, py: Python<'_>) -> Option<PyErr> {
        if self.membership.is_forked() {
            return Some(to_python(py, &SessionError::Closed));
        }
        self.completion.outcome()?.err().map(|error| all_reduce_to_python(py, &error))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        // Held by another thread: then it is in use, and certainly no garbage.
        match self.keep.try_lock() {
            Ok(keep) => visit.call(&*keep),
            Err(_) => Ok(()),
        }
    }

    fn __clear__(&self) {
        // While the all-reduce is under way the ledger holds this object, so that it is no garbage.
        let keep = lock(&self.keep).take();
        drop(keep);
    }
}
