//! Python's reports of many simulations: of sweeps and reproductions.

use std::fmt::Display;
use std::path::PathBuf;

use fanin_cli::report::{self, Shown};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde_json::Value;

/// Raises `ValueError` if this fanin was built without the page that shows reports.
#[pyfunction]
pub(crate) fn check_report() -> PyResult<()> {
    report::check_built().map_err(|error| PyValueError::new_err(error.to_string()))
}

/// The file that shows runs: of each, its name, and the path of what `fanin sim --json` wrote. A
/// sweep and a reproduction are JSON as page/src/report/contract.ts has it.
///
/// Raises `ValueError` with what cannot be read, or if this fanin was built without the page.
#[pyfunction]
#[pyo3(signature = (command, runs, sweep=None, reproduction=None))]
pub(crate) fn report_page(
    command: String,
    runs: Vec<(String, PathBuf)>,
    sweep: Option<&str>,
    reproduction: Option<&str>,
) -> PyResult<String> {
    let page = || -> Result<String, String> {
        let parsed = |text: &str| serde_json::from_str::<Value>(text).map_err(|error| error.to_string());
        let mut shown =
            Shown::new(command).with(sweep.map(parsed).transpose()?, reproduction.map(parsed).transpose()?);
        for (name, path) in runs {
            let wrong = |error: &dyn Display| format!("{}: {error}", path.display());
            let text = std::fs::read_to_string(&path).map_err(|error| wrong(&error))?;
            let run = report::run(&name, parsed(&text)?).and_then(|run| shown.add(run));
            run.map_err(|error| wrong(&error))?;
        }
        shown.html().map_err(|error| error.to_string())
    };
    page().map_err(PyValueError::new_err)
}
