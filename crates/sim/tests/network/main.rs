//! The packet-level network against what theory, or plain counting, says of it.

mod captures;
mod conservation;
mod dctcp;
mod disciplines;
mod failures;
mod flows;
mod hosts;
mod impairments;
mod links;
mod machines;
mod queueing_theory;
mod queues;
mod routes;
mod support;
mod thresholds;
mod topologies;
