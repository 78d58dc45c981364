//! `main`: the command line, for the console script.

use pyo3::prelude::*;
use std::ffi::OsString;
use std::process::ExitCode;

/// The command line without `run`: switch, status, sim, version. Returns the exit status.
///
/// `argv` is without the program's name. SIGINT and SIGTERM are the commands' own while this runs.
#[pyfunction]
pub(crate) fn main(py: Python<'_>, argv: Vec<OsString>) -> PyResult<u8> {
    let signal = py.import("signal")?;
    let interrupt = signal.getattr("SIGINT")?;
    // Else Python's handler notes the signal as well, and raises KeyboardInterrupt after an orderly
    // end. Only the main thread may change handlers; elsewhere Python's stays.
    let previous = signal.call_method1("signal", (&interrupt, signal.getattr("SIG_DFL")?)).ok();
    let arguments = std::iter::once(OsString::from("fanin")).chain(argv);
    let code = py.detach(|| fanin_cli::main(arguments));
    if let Some(previous) = previous {
        signal.call_method1("signal", (interrupt, previous))?;
    }
    // ExitCode can be compared, but does not say its number.
    Ok((0..=u8::MAX).find(|&number| ExitCode::from(number) == code).unwrap_or(1))
}
