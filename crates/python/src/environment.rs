//! What the environment says beyond the settings of a job: logs, and variables that nobody reads.

use std::env;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Once;

use fanin_controller::SessionError;
use fanin_udp::probe_socket;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

pub(crate) use fanin_cli::environment::VARIABLES;

/// torchrun's: unlike the rank in a job, it is another one in every process of a run.
const RANK: &str = "RANK";
/// torchrun's: the rank among those of this machine.
const LOCAL_RANK: &str = "LOCAL_RANK";
/// With less a rank loses packets at 10 Gbit/s (docs/operations.md, socket buffers).
const BUFFER_BYTES_MIN: usize = 1 << 20;

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

/// Starts the logs that FANIN_LOG asks for, each line behind the rank, and looks for variables that nobody reads.
pub(crate) fn begin_rank(rank: u32) -> PyResult<()> {
    let launched = env::var(RANK).ok().and_then(|rank| rank.parse().ok());
    begin(&format!("rank {}", launched.unwrap_or(rank)))?;
    // The ranks of a machine have one environment: one of them is enough.
    if speaks_for_machine() {
        warn_of_unknown_variables();
        warn_of_machine();
    }
    Ok(())
}

/// Says on stderr, once a process, what of this machine costs speed whatever the switch.
fn warn_of_machine() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Nothing is sent: what the kernel grants here, it grants everywhere.
        let Ok(socket) = probe_socket(SocketAddr::from((Ipv4Addr::LOCALHOST, 9))) else { return };
        if socket.send_segments_max <= 1 || socket.receive_segments_max <= 1 {
            eprintln!(
                "fanin: this kernel does not cut or join trains of packets (UDP_SEGMENT, UDP_GRO), so that each packet is a \
                 system call, which costs speed; fanin doctor says more"
            );
        }
        let granted = socket.receive_buffer_bytes;
        if granted < BUFFER_BYTES_MIN {
            eprintln!(
                "fanin: this kernel grants a receive buffer of {} KiB, so that packets may be lost; sudo sysctl -w \
                 net.core.rmem_max={asked} net.core.wmem_max={asked}",
                granted >> 10,
                asked = socket.buffer_bytes_asked,
            );
        }
    });
}

/// Starts the logs that FANIN_LOG asks for, each line behind `who`. The first in a process names it.
pub(crate) fn begin(who: &str) -> PyResult<()> {
    fanin_cli::logging::start_if_asked(who).map_err(PyValueError::new_err)
}

/// Whether this rank is the one of its machine that says what is the machine's.
pub(crate) fn speaks_for_machine() -> bool {
    env::var(LOCAL_RANK).map_or(true, |rank| rank.trim() == "0")
}
