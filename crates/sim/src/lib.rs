//! Deterministic worlds for the protocols' own state machines, in virtual time.
//!
//! [`net`] is a network of packets, with rates, queues, routes and topologies. It shows what the
//! protocols do to a network, and what a network does to them. [`workload`] puts jobs on it, and
//! [`scenario_file`] reads what `fanin sim` plays.
//!
//! A small world for SwitchML's faults alone stands beside it. Its network loses, duplicates,
//! reorders and delays. Its workers crash; its services restart, or die for good and are taken over
//! by others. A [`Scenario`] of this world is drawn from a seed; [`run`] plays it and returns what
//! the checker found wrong, if anything.
//!
//! The same seed plays the same way on every machine: nothing here reads a clock, an address or a
//! hash map's order.
//!
//! Deliberately absent: sockets, threads.
#![forbid(unsafe_code)]

mod agenda;
mod checker;
pub mod net;
mod scenario;
pub mod scenario_file;
pub mod systems;
mod tensors;
pub mod workload;
mod world;

pub use checker::Violation;
pub use scenario::{Death, Racks, Restart, Scenario, Services, TensorShape};
pub use world::{Report, run};
