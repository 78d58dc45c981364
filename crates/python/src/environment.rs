//! Variables of the environment beyond the settings of a job: logs, and variables that nobody
//! reads.

use std::env;

use fanin_controller::SessionError;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

pub(crate) use fanin_cli::environment::{FORMER, VARIABLES};

/// torchrun's: unlike the rank in a job, it is another one in every process of a run.
const RANK: &str = "RANK";
/// torchrun's: the rank among those of this machine.
const LOCAL_RANK: &str = "LOCAL_RANK";

/// "host:port" of what names a switch: "box", "box:4800", "4900" (a port of this machine).
///
/// Raises `ValueError` for what names none; its message goes on where "X is ...: " ends.
#[pyfunction]
pub(crate) fn switch_address(text: &str) -> PyResult<String> {
    fanin_controller::switch_address(text).map_err(|error| {
        let cause = match error {
            SessionError::Address { cause, .. } => cause,
            other => other.to_string(),
        };
        PyValueError::new_err(format!("it must be one HOST:PORT, such as 10.0.0.9:4800 ({cause})"))
    })
}

/// Says on stderr, once a process, which variables look like fanin's and are not.
#[pyfunction]
pub(crate) fn warn_of_unknown_variables() {
    fanin_cli::environment::warn_of_unknown();
}

/// Starts the logs that FANIN_LOG asks for, each line behind the rank, and looks for variables that
/// nobody reads.
pub(crate) fn begin_rank(rank: u32) -> PyResult<()> {
    let launched = env::var(RANK).ok().and_then(|rank| rank.parse().ok());
    begin(&format!("rank {}", launched.unwrap_or(rank)))?;
    // The ranks of a machine have one environment: one of them is enough.
    if speaks_for_machine() {
        warn_of_unknown_variables();
        fanin_cli::machine::warn();
    }
    Ok(())
}

/// As [`begin`] for a switch: in a rank's process its lines are the rank's.
pub(crate) fn begin_switch() -> PyResult<()> {
    env::var(RANK).map_or_else(|_| begin("switch"), |rank| begin(&format!("rank {}", rank.trim())))
}

/// Starts the logs that FANIN_LOG asks for, each line behind `who`. The first in a process names
/// it.
pub(crate) fn begin(who: &str) -> PyResult<()> {
    fanin_cli::logging::start_if_asked(who).map_err(PyValueError::new_err)
}

/// Whether this rank is the one of its machine that says what is the machine's.
pub(crate) fn speaks_for_machine() -> bool {
    env::var(LOCAL_RANK).map_or(true, |rank| rank.trim() == "0")
}
