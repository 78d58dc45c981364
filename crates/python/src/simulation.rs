//! `simulated_sum`: numbers from Python through the simulator's network and machines.

use fanin_cli::scenario;
use fanin_sim::workload::{Numbers, RunError, sum};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// The sum of `contributions` as a simulated job makes it, and the report of the run as JSON.
///
/// `scenario` is a scenario file's text: one job that sums one tensor (`tensors = 1`).
/// `contributions` are all ranks' elements one rank after the other, float32 or int32 as the job's
/// `dtype` says, in this machine's byte order; the sum is returned likewise. Nothing but `seed` is
/// random.
///
/// Raises `ValueError` for a scenario with a mistake or numbers that are not its job's,
/// `RuntimeError` where a rule was broken.
#[pyfunction]
pub(crate) fn simulated_sum<'py>(
    py: Python<'py>,
    scenario: &str,
    seed: u64,
    contributions: &[u8],
) -> PyResult<(Bound<'py, PyBytes>, String)> {
    let scenario =
        scenario::parse("scenario", scenario).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let Some(job) = scenario.jobs.first() else {
        return Err(PyValueError::new_err("the scenario has no job"));
    };
    let (workers, integers) = (job.workers.len(), job.integers);
    let (words, []) = contributions.as_chunks() else {
        return Err(PyValueError::new_err("contributions have four bytes an element"));
    };
    if !words.len().is_multiple_of(workers) {
        let message = format!("{} elements are not as many for each of {workers} workers", words.len());
        return Err(PyValueError::new_err(message));
    }
    let row = |row: &[[u8; 4]]| {
        if integers {
            Numbers::Int32(row.iter().map(|word| i32::from_ne_bytes(*word)).collect())
        } else {
            Numbers::Float32(row.iter().map(|word| f32::from_ne_bytes(*word)).collect())
        }
    };
    let rows = words.chunks((words.len() / workers).max(1)).map(row).collect();
    let (sums, report) = py.detach(|| sum(&scenario, seed, rows)).map_err(|error| match error {
        RunError::Violation(..) => PyRuntimeError::new_err(error.to_string()),
        error => PyValueError::new_err(error.to_string()),
    })?;
    let bytes: Vec<u8> = match sums {
        Numbers::Float32(sums) => sums.iter().flat_map(|sum| sum.to_ne_bytes()).collect(),
        Numbers::Int32(sums) => sums.iter().flat_map(|sum| sum.to_ne_bytes()).collect(),
    };
    let report = serde_json::to_string(&report).expect("a report is numbers and names");
    Ok((PyBytes::new(py, &bytes), report))
}
