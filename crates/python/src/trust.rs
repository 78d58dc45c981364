//! `Trust`: by what the services of a job are known.

use crate::error::setup_to_python;
use fanin_controller as controller;
use fanin_controller::{Fingerprint, switch_address};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::path::PathBuf;

/// The way to know services: by a key that was told, by the authorities in `tls_ca`, by the secret
/// in `secret_file`, or else by the key that a service showed first (docs/security.md).
///
/// Raises `FaninError` where a file cannot be read, or does not hold what it should.
#[pyclass(frozen, module = "fanin._fanin")]
pub(crate) struct Trust {
    trust: controller::Trust,
}

#[pymethods]
impl Trust {
    #[new]
    #[pyo3(signature = (tls_ca=None, secret_file=None))]
    fn new(py: Python<'_>, tls_ca: Option<PathBuf>, secret_file: Option<PathBuf>) -> PyResult<Self> {
        controller::Trust::read(tls_ca.as_deref(), secret_file.as_deref())
            .map(|trust| Self { trust })
            .map_err(|error| setup_to_python(py, &error))
    }

    /// From now on the service, host:port, has this key. Raises `ValueError` for what is no
    /// fingerprint.
    fn insist(&self, service: &str, fingerprint: &str) -> PyResult<()> {
        let fingerprint = fingerprint.parse().map_err(PyValueError::new_err)?;
        self.trust.insist(&named(service), fingerprint);
        Ok(())
    }

    /// The fingerprint of the service's key, if it was told or is what the service is known by
    /// since its first connection.
    fn fingerprint(&self, service: &str) -> Option<String> {
        self.trust.fingerprint(&named(service)).as_ref().map(Fingerprint::to_string)
    }
}

impl Trust {
    /// The given trust; if there is none, the first key of a service is believed.
    pub(crate) fn of(trust: Option<&Self>) -> controller::Trust {
        trust.map(|trust| trust.trust.clone()).unwrap_or_default()
    }
}

/// The service as everything here names it.
fn named(service: &str) -> String {
    switch_address(service).unwrap_or_else(|_| service.into())
}
