//! The error of rounding a gradient to int8 or int4, kept for the next one.

use fanin_quant::{Packing, feed_back_bf16, feed_back_f16, feed_back_f32};
use fanin_udp::RawTensor;
use fanin_wire::Dtype;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Adds the float32 at `residual` to `elements` floats of `dtype` at `address`, one to each. Each
/// sum becomes the nearest number that travels unchanged as `wire_dtype`. The difference goes into
/// `residual`.
///
/// Nobody else may use either memory until it returns, and both must be there. Raises `ValueError`
/// for another dtype or wire dtype, and for an address that is none of such elements.
#[pyfunction]
pub(crate) fn feed_back(
    py: Python<'_>,
    address: usize,
    elements: usize,
    dtype: &str,
    residual: usize,
    wire_dtype: &str,
) -> PyResult<()> {
    let refused = || PyValueError::new_err(format!("dtype {dtype:?}: one of float32, float16 and bfloat16"));
    let packing = Packing::ALL.into_iter().find(|packing| packing.name() == wire_dtype).ok_or_else(|| {
        let names = Packing::ALL.map(Packing::name).join(" and ");
        PyValueError::new_err(format!("wire_dtype {wire_dtype:?}: one of {names}"))
    })?;
    let dtype = dtype.parse().map_err(|_| refused())?;
    for (address, dtype) in [(address, dtype), (residual, Dtype::Float32)] {
        // SAFETY: dropped at once, and nothing is read or written by it: it says whether such a
        // tensor could be there.
        unsafe { RawTensor::new(std::ptr::with_exposed_provenance_mut(address), elements, dtype) }
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
    }
    py.detach(|| {
        // SAFETY: as for every slice below: the address is aligned and not null, as was checked,
        // and Python's side of the contract, as documented, is that so many elements are there,
        // which only we use.
        let residual = unsafe { slice(residual, elements) };
        match dtype {
            // SAFETY: as above.
            Dtype::Float32 => feed_back_f32(packing, unsafe { slice(address, elements) }, residual),
            // SAFETY: as above; elements of half precision are their bits.
            Dtype::Float16 => feed_back_f16(packing, unsafe { slice(address, elements) }, residual),
            // SAFETY: as above.
            Dtype::Bfloat16 => feed_back_bf16(packing, unsafe { slice(address, elements) }, residual),
            _ => return Err(refused()),
        }
        Ok(())
    })
}

/// # Safety
/// So many elements are at the address, which is aligned for them and not null, and nobody else
/// uses them.
unsafe fn slice<'a, T>(address: usize, elements: usize) -> &'a mut [T] {
    if elements == 0 {
        return &mut [];
    }
    // SAFETY: the caller's.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address), elements) }
}
