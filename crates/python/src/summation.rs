//! Sums as a summation service makes them, for whoever measures how fast that is (BytePS, Figure
//! 9b).

use fanin_quant::Kernels;
use fanin_wire::Dtype;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

/// Words of a packet that fills an Ethernet frame of 1500 bytes.
const PACKET_WORDS: usize = 352;
/// The kernels sum a multiple of so many words at a time.
const WORDS_MULTIPLE: usize = 32;
/// Workers of a sum.
const CONTRIBUTIONS_MAX: usize = 64;

/// The sum of `contributions`, little-endian floats of `dtype` (float32, float16 or bfloat16), one
/// packet after the other in one slot, as a service sums what travels as it is.
///
/// Raises `ValueError` for another dtype, for none or more than 64 contributions, and where they
/// are not all as long, in multiples of 128 bytes.
#[pyfunction]
pub(crate) fn summed<'py>(
    py: Python<'py>,
    contributions: Vec<PyBackedBytes>,
    dtype: &str,
) -> PyResult<Bound<'py, PyBytes>> {
    let refused = |message: String| Err(PyValueError::new_err(message));
    let sum = match dtype.parse() {
        Ok(Dtype::Float32) => Kernels::sum_f32,
        Ok(Dtype::Float16) => Kernels::sum_f16,
        Ok(Dtype::Bfloat16) => Kernels::sum_bf16,
        _ => return refused(format!("dtype {dtype:?}: one of float32, float16 and bfloat16")),
    };
    let (count, bytes) = (contributions.len(), contributions.first().map_or(0, |one| one.len()));
    if !(1..=CONTRIBUTIONS_MAX).contains(&count) {
        return refused(format!("{count} contributions: from 1 to {CONTRIBUTIONS_MAX}"));
    }
    if !bytes.is_multiple_of(4 * WORDS_MULTIPLE) || contributions.iter().any(|one| one.len() != bytes) {
        return refused(format!(
            "contributions of as many bytes each, in multiples of {}",
            4 * WORDS_MULTIPLE
        ));
    }
    PyBytes::new_with(py, bytes, |out| {
        py.detach(|| {
            let (kernels, mut slot) = (Kernels::detected(), [0; PACKET_WORDS]);
            let mut payloads = Vec::with_capacity(count);
            for (packet, out) in out.chunks_mut(4 * PACKET_WORDS).enumerate() {
                let from = packet * 4 * PACKET_WORDS;
                payloads.clear();
                payloads.extend(contributions.iter().map(|one| &one[from..from + out.len()]));
                let slot = &mut slot[..out.len() / 4];
                sum(kernels, &payloads, 1, slot);
                fanin_quant::write_le(slot, out);
            }
        });
        Ok(())
    })
}
