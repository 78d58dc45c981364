//! What rounding to int8 takes of a gradient, kept for the next one.

use fanin_protocol::{Elements, Tensor};
use fanin_quant::{feed_back_bf16, feed_back_f16, feed_back_f32};
use fanin_udp::RawTensor;
use fanin_wire::Dtype;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Adds to `elements` floats of `dtype` at `address` the float32 at `residual`, one for each, leaves of that the nearest that
/// travels as int8 unchanged, and in `residual` what is missing.
///
/// Nobody else may use either memory until it returns, and both must be there. Raises `ValueError` for another dtype, and for an
/// address that is none of such elements.
#[pyfunction]
pub(crate) fn feed_back(
    py: Python<'_>,
    address: usize,
    elements: usize,
    dtype: &str,
    residual: usize,
) -> PyResult<()> {
    let tensor = |address: usize, dtype| {
        // SAFETY: Python's side of the contract, as documented.
        unsafe { RawTensor::new(std::ptr::with_exposed_provenance_mut(address), elements, dtype) }
            .map_err(|error| PyValueError::new_err(error.to_string()))
    };
    let refused = || PyValueError::new_err(format!("dtype {dtype:?}: one of float32, float16 and bfloat16"));
    let mut values = tensor(address, dtype.parse().map_err(|_| refused())?)?;
    let mut residual = tensor(residual, Dtype::Float32)?;
    py.detach(|| match (values.elements(), residual.elements()) {
        (Elements::Float32(x), Elements::Float32(residual)) => Ok(feed_back_f32(x, residual)),
        (Elements::Float16(x), Elements::Float32(residual)) => Ok(feed_back_f16(x, residual)),
        (Elements::Bfloat16(x), Elements::Float32(residual)) => Ok(feed_back_bf16(x, residual)),
        _ => Err(refused()),
    })
}
