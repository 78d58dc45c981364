//! Python's questions about scenario files.

use fanin_cli::scenario;
use fanin_sim::workload::TimedLayer;
use fanin_sim::{scenario_file, systems};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Reads a scenario file's text and plays nothing.
///
/// Raises `ValueError` with the first mistake; its text begins with `name`, line and column.
#[pyfunction]
pub(crate) fn check_scenario(name: &str, text: &str) -> PyResult<()> {
    scenario::parse(name, text).map(drop).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// A scenario file's text as JSON, with the nodes and links in it that stand in a file of their
/// own.
///
/// Raises `ValueError` with what keeps either file from being read.
#[pyfunction]
pub(crate) fn whole_scenario(name: &str, text: &str) -> PyResult<String> {
    let scenario =
        scenario_file::whole(name, text).map_err(|error| PyValueError::new_err(error.to_string()))?;
    Ok(serde_json::to_string(&scenario).expect("a table has names as keys"))
}

/// The layers of a file of `[[layer]]` tables, in the order of the forward pass. Each is its
/// parameters, and the seconds of its forward and of its backward pass.
///
/// Raises `ValueError` with the first mistake; its text begins with `name`.
#[pyfunction]
pub(crate) fn layers(name: &str, text: &str) -> PyResult<Vec<(u64, f64, f64)>> {
    let layers = scenario_file::parse_layers(name, text);
    let layers = layers.map_err(|error| PyValueError::new_err(error.to_string()))?;
    let told =
        |layer: TimedLayer| (layer.parameters, layer.forward.as_secs_f64(), layer.backward.as_secs_f64());
    Ok(layers.into_iter().map(told).collect())
}

/// The keys of the table `[job.SYSTEM]` that a simulated system has for itself.
///
/// Raises `ValueError` where there is no such system.
#[pyfunction]
pub(crate) fn system_keys(system: &str) -> PyResult<Vec<&'static str>> {
    let kind = systems::ALL.iter().find(|kind| kind.name == system);
    let kind = kind.ok_or_else(|| PyValueError::new_err(format!("there is no system {system}")))?;
    Ok((kind.keys)().to_vec())
}
