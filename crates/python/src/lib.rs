//! `fanin._fanin`: what Python sees of fanin. A file is one class.
//!
//! On the way of a gradient this room turns an address and a length into a tensor for the driver,
//! and keeps the Python object that owns the memory alive until the sum is in it. No thread that
//! waits holds the interpreter's lock, and the I/O threads never take it: a Python thread picks up
//! what they finish (`ledger`).
//!
//! Deliberately absent: torch, NumPy, the protocol, and any decision.

mod client;
mod command_line;
mod environment;
mod error;
mod error_feedback;
mod exchange;
mod interruptible;
mod ledger;
mod local;
mod meeting;
mod membership;
mod parameter_service;
mod parameters;
mod pending;
mod plan;
mod report;
mod rotation;
mod scenario;
mod settings;
mod simulation;
mod summation;
mod switch;
mod trust;
mod units;
mod workload;

/// The Rust binding: sockets, protocol and threads. It knows no torch and no NumPy, only memory.
#[pyo3::pymodule]
mod _fanin {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::client::Client;
    #[pymodule_export]
    use crate::command_line::main;
    #[pymodule_export]
    use crate::environment::{switch_address, warn_of_unknown_variables};
    #[pymodule_export]
    use crate::error_feedback::feed_back;
    #[pymodule_export]
    use crate::exchange::Exchange;
    #[pymodule_export]
    use crate::local::{LocalRanks, machine_id};
    #[pymodule_export]
    use crate::meeting::Meeting;
    #[pymodule_export]
    use crate::parameter_service::ParameterService;
    #[pymodule_export]
    use crate::parameters::{Exchanging, Parameters};
    #[pymodule_export]
    use crate::pending::Pending;
    #[pymodule_export]
    use crate::plan::{
        Gauge, cores, cut_off, fill, gauge_at, interface_address, plan, route_to, send_order, switch_capacity,
    };
    #[pymodule_export]
    use crate::report::{check_report, report_page};
    #[pymodule_export]
    use crate::rotation::rotated;
    #[pymodule_export]
    use crate::scenario::{check_scenario, layers, system_keys, whole_scenario};
    #[pymodule_export]
    use crate::simulation::simulated_sum;
    #[pymodule_export]
    use crate::summation::summed;
    #[pymodule_export]
    use crate::switch::Switch;
    #[pymodule_export]
    use crate::trust::Trust;
    #[pymodule_export]
    use crate::units::{rate_bps, size_bytes};
    #[pymodule_export]
    use crate::workload::{Workload, participation};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("variables", crate::environment::VARIABLES)?;
        module.add("former_variables", crate::environment::FORMER)?;
        module.add("priorities", fanin_wire::PRIORITIES - 1)?;
        module.add("assertions", cfg!(debug_assertions))?;
        module.add("version", env!("CARGO_PKG_VERSION"))
    }
}
