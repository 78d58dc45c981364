//! `Parameters`: a worker of asynchronous training, at the services that keep the latest
//! parameters.

use crate::client::limit;
use crate::interruptible::{lock, on_a_thread, wait};
use fanin_parameters as parameters;
use fanin_parameters::{Dtype, Exchanged, ParametersConfig, ParametersError, Service};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::mem;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

/// A worker's parameters at the services that share them.
///
/// A service is its host:port, its share, and the rank in whose process it is (None: it is `fanin
/// parameters`). Their order is the same for all workers. `key` is 16 bytes that the workers of this
/// training have alone. Each service has a key that is made of it and of its place in the order.
/// `dtype` is "float32" or "float64". Every call waits for a service that is away, `timeout` seconds at
/// most since it answered last, and then raises `SwitchUnreachable`; `ParametersRefused` where one
/// does not serve this training. For a service of a rank it raises `RankLost` in place of
/// `SwitchUnreachable`, and at once if the rank's process has ended. Bytes of parameters are
/// little-endian.
#[pyclass(frozen, module = "fanin._fanin")]
pub(crate) struct Parameters(Arc<Mutex<parameters::Parameters>>);

#[pymethods]
impl Parameters {
    #[new]
    #[pyo3(signature = (services, key, worker, workers, dtype, elements, *, timeout))]
    fn new(
        services: Vec<(String, f64, Option<u32>)>,
        key: [u8; 16],
        worker: u32,
        workers: u32,
        dtype: &str,
        elements: usize,
        timeout: f64,
    ) -> PyResult<Self> {
        let dtype = match dtype {
            "float32" => Dtype::Float32,
            "float64" => Dtype::Float64,
            other => return Err(PyValueError::new_err(format!("{other} is neither float32 nor float64"))),
        };
        let patience = limit(timeout)?;
        let service = |(address, share, host)| Service { address, share, host };
        let services = services.into_iter().map(service).collect();
        let config = ParametersConfig { services, key, worker, workers, dtype, elements, patience };
        let made = parameters::Parameters::new(config);
        let made = made.map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(Self(Arc::new(Mutex::new(made))))
    }

    /// Makes the model at the services, of these first parameters. A single worker does, before the
    /// others ask for it.
    fn create(&self, py: Python<'_>, first: &[u8]) -> PyResult<()> {
        let first = first.to_vec();
        self.unless_interrupted(py, move |parameters| parameters.create(&first))
    }

    /// Adds a delta; returns the latest parameters, and how many deltas of this worker the services
    /// have lost that no call has told. Without a delta, asks alone.
    fn exchange<'py>(&self, py: Python<'py>, delta: Option<&[u8]>) -> PyResult<(Bound<'py, PyBytes>, u64)> {
        let delta = delta.map(<[u8]>::to_vec);
        let exchanged = self.unless_interrupted(py, move |parameters| parameters.exchange(delta.as_deref()));
        let Exchanged { latest, lost } = exchanged?;
        Ok((PyBytes::new(py, &latest), lost))
    }

    /// Begins an exchange in the background. Its end is waited for before the next call.
    fn begin_exchange(&self, delta: &[u8]) -> PyResult<Exchanging> {
        let (parameters, delta) = (Arc::clone(&self.0), delta.to_vec());
        let meeting = Arc::new((Mutex::new(State::Waiting), Condvar::new()));
        let theirs = Arc::clone(&meeting);
        thread::Builder::new().name("fanin-delta".into()).spawn(move || {
            let done = lock(&parameters).exchange(Some(&delta));
            *lock(&theirs.0) = State::Done(done);
            theirs.1.notify_all();
        })?;
        Ok(Exchanging(meeting))
    }

    /// This worker is done. Once all are, the services forget the model.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        self.unless_interrupted(py, |parameters| parameters.leave())
    }
}

/// An exchange that is under way. It goes on if nobody waits for it.
#[pyclass(frozen, module = "fanin._fanin")]
pub(crate) struct Exchanging(Arc<(Mutex<State>, Condvar)>);

enum State {
    Waiting,
    Done(Result<Exchanged, ParametersError>),
    Taken,
}

#[pymethods]
impl Exchanging {
    /// Waits for its end, and returns what `Parameters.exchange` returns, or raises its errors. A
    /// signal handler that raises ends the waiting alone, and the exchange may be waited for again;
    /// else it is waited for once.
    fn wait<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyBytes>, u64)> {
        let (state, changed) = &*self.0;
        let found = wait(py, state, changed, None, None, |state| match mem::replace(state, State::Taken) {
            State::Waiting => {
                *state = State::Waiting;
                None
            }
            State::Done(done) => Some(Some(done)),
            State::Taken => Some(None),
        })?;
        let taken = || PyRuntimeError::new_err("the exchange was waited for before");
        let Exchanged { latest, lost } =
            found.flatten().ok_or_else(taken)?.map_err(|error| to_python(py, &error))?;
        Ok((PyBytes::new(py, &latest), lost))
    }
}

impl Parameters {
    fn unless_interrupted<T: Send + 'static>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut parameters::Parameters) -> Result<T, ParametersError> + Send + 'static,
    ) -> PyResult<T> {
        let parameters = Arc::clone(&self.0);
        let done = on_a_thread(py, "fanin-delta", None, || {}, move || work(&mut lock(&parameters)))?;
        done.map_err(|error| to_python(py, &error))
    }
}

fn to_python(py: Python<'_>, error: &ParametersError) -> PyErr {
    let make = || {
        let fields = PyDict::new(py);
        let class = match error {
            ParametersError::Unreachable { service, waited, .. } => {
                fields.set_item("switch", service)?;
                fields.set_item("waited", waited.as_secs_f64())?;
                "SwitchUnreachable"
            }
            ParametersError::Gone { service, rank, .. } => {
                fields.set_item("switch", service)?;
                fields.set_item("rank", rank)?;
                "RankLost"
            }
            ParametersError::Refused { service, .. } => {
                fields.set_item("switch", service)?;
                "ParametersRefused"
            }
            ParametersError::Malformed(_) | ParametersError::Local(_) => "FaninError",
        };
        let class = py.import("fanin.errors")?.getattr(class)?;
        Ok(PyErr::from_value(class.call((error.to_string(),), Some(&fields))?))
    };
    make().unwrap_or_else(|error| error)
}
