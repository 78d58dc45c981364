//! Quantities as people write them, in the one grammar of `fanin_units`.

use fanin_units::{Rate, Size};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Bits a second of "500mbit" or "1gbit". Raises `ValueError` with what to write.
#[pyfunction]
pub(crate) fn rate_bps(text: &str) -> PyResult<u64> {
    text.parse().map(|rate: Rate| rate.0).map_err(PyValueError::new_err)
}

/// Bytes of "25MB" (10^6 each) or "100MiB" (2^20). Raises `ValueError` with what to write.
#[pyfunction]
pub(crate) fn size_bytes(text: &str) -> PyResult<u64> {
    text.parse().map(|size: Size| size.0).map_err(PyValueError::new_err)
}
