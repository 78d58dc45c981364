//! A small deterministic world for the protocol's own state machines: virtual time, and a network that loses, duplicates,
//! reorders and delays; workers that crash, a switch that restarts.
//!
//! A [`Scenario`] is drawn from a seed; [`run`] plays it and returns what the [`Checker`](checker) found wrong, if
//! anything. The same seed plays the same way on every machine: nothing here reads a clock, an address or a hash map's order.
//!
//! Deliberately absent: bandwidth and queues, sockets, threads.
#![forbid(unsafe_code)]

mod agenda;
mod checker;
pub mod net;
mod scenario;
pub mod scenario_file;
mod tensors;
pub mod workload;
mod world;

pub use checker::Violation;
pub use scenario::{Restart, Scenario};
pub use world::{Report, run};
