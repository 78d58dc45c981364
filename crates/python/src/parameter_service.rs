//! `ParameterService`: what keeps a part of the parameters of asynchronous training, in this
//! process.

use crate::interruptible::lock;
use fanin_parameters::{Key, Server, ServerConfig};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use rustix::process::{Pid, getpid};
use std::mem;
use std::net::{AddrParseError, SocketAddr};
use std::sync::{Mutex, PoisonError};

/// A parameter service inside this process, on threads of its own, which keeps nothing on a disk.
///
/// `listen` is an address and a port, TCP; port 0 takes a free one, and `address` tells which. It
/// serves only the trainings of these `keys`, each of 16 bytes.
///
/// Raises `OSError` when the address cannot be listened on, and `ValueError` when it is none.
#[pyclass(frozen, module = "fanin._fanin")]
pub(crate) struct ParameterService {
    address: SocketAddr,
    running: Mutex<Option<Server>>,
    /// The process that started it. A fork of it has none of its threads, and could only wait for
    /// them.
    owner: Pid,
}

#[pymethods]
impl ParameterService {
    #[new]
    fn new(py: Python<'_>, listen: &str, keys: Vec<Key>) -> PyResult<Self> {
        let listen: SocketAddr = listen.parse().map_err(|error: AddrParseError| {
            PyValueError::new_err(format!("{listen:?} is no ADDRESS:PORT: {error}"))
        })?;
        let config = ServerConfig { listen, snapshots: None, trainings: Some(keys) };
        let server = py.detach(|| Server::start(&config));
        let server = server.map_err(|error| PyOSError::new_err(error.to_string()))?;
        Ok(Self { address: server.address(), running: Mutex::new(Some(server)), owner: getpid() })
    }

    /// The address at which it listens, as host:port.
    #[getter]
    fn address(&self) -> String {
        self.address.to_string()
    }

    /// Ends it, and forgets what it has. Idempotent. In a process that was forked from the service's
    /// it does nothing.
    fn stop(&self, py: Python<'_>) {
        if getpid() == self.owner {
            // It has no folder whose last save could fail.
            py.detach(|| drop(lock(&self.running).take()));
        }
    }
}

impl Drop for ParameterService {
    fn drop(&mut self) {
        let running = self.running.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if getpid() != self.owner {
            mem::forget(running);
            return;
        }
        // Detached when it can be, as it takes a moment. An interpreter that is ending drops it
        // with the closure.
        let _ = Python::try_attach(|py| py.detach(|| drop(running)));
    }
}
