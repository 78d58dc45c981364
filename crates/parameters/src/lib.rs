//! Asynchronous training with a service that only adds (BytePS §5, Figure 11b).
//!
//! A worker steps its own optimizer and sends by how much its parameters changed, the *delta*. The
//! [`Server`] adds it to the latest parameters, and answers with those. Nobody waits for anybody.
//! With the same order of exchanges, a parameter server that runs the optimizer would have the same
//! parameters (Theorem 2).
//!
//! A service runs by itself (`fanin parameters`), or in a worker's process. A worker cuts its
//! parameters among the services by the shares that it is told.
//!
//! `store` holds models in pieces. A piece is the unit of everything. The order between workers
//! holds for a piece. A piece's delta is added once, whatever is sent again. `snapshot` keeps a
//! checksum of each piece. Parameters travel by TCP, in order and whole: nothing is summed on the
//! way.
//!
//! Deliberately absent: who has which share, collectives, jobs, Python.
#![forbid(unsafe_code)]

mod client;
mod memory;
mod server;
mod snapshot;
mod store;

/// The messages, generated from `proto/parameters.proto`.
mod proto {
    #![allow(missing_docs, reason = "the protocol file is the documentation")]
    tonic::include_proto!("fanin.parameters.v1");
}

pub use client::{Exchanged, Parameters, ParametersConfig, ParametersError, Service};
pub use proto::Dtype;
pub use server::{Server, ServerConfig, ServerError};
pub use snapshot::SnapshotError;

/// Elements of a piece, a quarter of a megabyte of float32: what an answer has, and what a broken
/// connection costs.
const PIECE_ELEMENTS: usize = 1 << 16;
/// Workers that a model may have.
const WORKERS_MAX: u32 = 4096;

/// The key that only the workers of one training have: a peer that knows it is one of them.
pub type Key = [u8; 16];
