//! `Exchange`: what two processes know of each other through a place that others read, too.

use fanin_controller as controller;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

/// An end of an exchange with other processes through a place that others read, too, such as a
/// store of torch's.
///
/// `public` is put there. Raises `OSError` where the system has no random numbers.
#[pyclass(frozen, module = "fanin._fanin")]
pub(crate) struct Exchange {
    exchange: controller::Exchange,
}

#[pymethods]
impl Exchange {
    #[new]
    fn new() -> PyResult<Self> {
        let exchange = controller::Exchange::new();
        exchange.map(|exchange| Self { exchange }).map_err(|_| PyOSError::new_err("no random numbers"))
    }

    /// The public key, which everybody may read: no other end has the same.
    #[getter]
    fn public(&self) -> String {
        hex(&self.exchange.public())
    }

    /// Bytes that this end and the one with that `public` have alone. Raises `ValueError` for what
    /// is none.
    fn key(&self, public: &str) -> PyResult<[u8; 32]> {
        self.exchange.key(&bytes(public)?).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// Text that the end with that `public` can open, and nobody else. Raises `ValueError` for what
    /// is none.
    fn seal(&self, public: &str, text: &str) -> PyResult<String> {
        let sealed = self.exchange.seal(&bytes(public)?, text.as_bytes());
        sealed.map(|sealed| hex(&sealed)).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// The text that the end with that `public` sealed for this one. Raises `ValueError` where it
    /// did not.
    fn open(&self, public: &str, sealed: &str) -> PyResult<String> {
        let opened = self.exchange.open(&bytes(public)?, &bytes(sealed)?);
        let opened = opened.map_err(|error| PyValueError::new_err(error.to_string()))?;
        String::from_utf8(opened).map_err(|error| PyValueError::new_err(error.to_string()))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> PyResult<Vec<u8>> {
    let wrong = || PyValueError::new_err("it has no hexadecimal digits");
    let (pairs, rest) = hex.as_bytes().as_chunks::<2>();
    let byte = |pair: &[u8; 2]| {
        let digits = std::str::from_utf8(pair).ok().filter(|_| pair.iter().all(u8::is_ascii_hexdigit))?;
        u8::from_str_radix(digits, 16).ok()
    };
    let bytes: Option<Vec<u8>> = pairs.iter().map(byte).collect();
    bytes.filter(|_| rest.is_empty()).ok_or_else(wrong)
}
