//! Deterministic networks for the protocols' own state machines, in virtual time.
//!
//! [`net`] is a network of packets, with rates, queues, routes and topologies. It shows what the
//! protocols do to a network, and the network to them. [`workload`] puts jobs on it.
//! [`scenario_file`] reads what `fanin sim` plays. The same seed plays the same way on every
//! machine: nothing here reads a clock, an address or a hash map's order.
//!
//! Deliberately absent: sockets, threads, and control after the beginning, except that services
//! which die are taken over. The hostile world of `crates/protocol/tests/switchml` plays what leads
//! to that, ranks that fall silent, and services that restart.
#![forbid(unsafe_code)]

mod agenda;
pub mod net;
pub mod scenario_file;
pub mod systems;
pub mod workload;
