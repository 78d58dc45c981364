//! `Parameters`: a worker of asynchronous training, at the services that keep the latest
//! parameters.

use crate::client::limit;
use crate::interruptible::{lock, on_a_thread};
use fanin_parameters as parameters;
use fanin_parameters::{Dtype, Exchanged, ParametersConfig, ParametersError};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::sync::{Arc, Mutex};

/// A worker's parameters at services (`fanin parameters`) that share them in equal parts.
///
/// `services` are host:port, in an order that is the same for all workers; `key` is 16 bytes that
/// the workers of this training have alone, of which each service has one that is made of its place
/// in the order; `dtype` "float32" or "float64". Every call waits for a service that is away,
/// `timeout` seconds at most since it answered last, and then raises `SwitchUnreachable`;
/// `ParametersRefused` where one does not serve this training. Bytes of parameters are
/// little-endian.
#[pyclass(frozen, module = "fanin._fanin")]
pub(crate) struct Parameters(Arc<Mutex<parameters::Parameters>>);

#[pymethods]
impl Parameters {
    #[new]
    #[pyo3(signature = (services, key, worker, workers, dtype, elements, *, timeout))]
    fn new(
        services: Vec<String>,
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

    /// This worker is done. Once all are, the services forget the model.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        self.unless_interrupted(py, |parameters| parameters.leave())
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
