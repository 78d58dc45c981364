//! The rotation of gradients that may be lost, for whoever measures what it is worth.

use fanin_quant::{rotate_back_f32, rotate_f32};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Float32 values, in the machine's order of bytes, rotated in blocks of `block` of them by the
/// signs of `seed`; or rotated `back`.
///
/// A NaN or an infinity spreads to all of its block, as NaN. Raises `ValueError` for a block that
/// is no power of two, and for bytes that are no whole number of values.
#[pyfunction]
pub(crate) fn rotated<'py>(
    py: Python<'py>,
    values: &[u8],
    block: usize,
    seed: u64,
    back: bool,
) -> PyResult<Bound<'py, PyBytes>> {
    let (words, rest) = values.as_chunks::<4>();
    if !rest.is_empty() || !block.is_power_of_two() {
        return Err(PyValueError::new_err(format!(
            "{} bytes in blocks of {block} values: no whole number of them, or no power of two",
            values.len()
        )));
    }
    let mut turned: Vec<f32> = words.iter().map(|word| f32::from_ne_bytes(*word)).collect();
    py.detach(|| {
        if back { rotate_back_f32(&mut turned, block, seed) } else { rotate_f32(&mut turned, block, seed) }
    });
    let bytes: Vec<u8> = turned.iter().flat_map(|x| x.to_ne_bytes()).collect();
    Ok(PyBytes::new(py, &bytes))
}
