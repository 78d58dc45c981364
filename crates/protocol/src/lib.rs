//! The protocols, as state machines that own no socket, no clock and no thread.
//!
//! On the way of a gradient this room stands twice. A worker cuts the tensor into chunks and
//! quantises each straight into a train of packets. A switch adds the chunks of all workers and
//! answers with the sum, which the worker turns back into floats in place. Simulator and socket
//! driver run the very same code through [`Endpoint`].
//!
//! A protocol is a room of its own, [`switchml`], [`atp`], [`goat`] or [`dlcp`], and knows no other. What they share is below them: the
//! contract of all machines (`machine`), what a sender has (`transport`), how switches help a server (`aggregation`), and who admits jobs
//! ([`control`]). To all others a protocol is a value: a [`Protocol`](control::Protocol), and the [`Machines`] that it has.
//!
//! Deliberately absent: input and output, time, threads, unsafe code. The crate builds without an
//! operating system.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod aggregation;
pub mod atp;
pub mod control;
pub mod dlcp;
pub mod goat;
mod machine;
mod machines;
pub mod switchml;
mod transport;

pub use machine::{
    Address, Both, Either, Elements, Endpoint, Instant, JobAborted, JobIdentity, JobProgress, Lane, Lanes,
    Layer, Loss, Reason, Received, Summer, TableStatistics, Tensor, TensorTimes, Transmit, Verdict,
    WorkerEvent, WorkerMachine, WorkerStatistics,
};
pub use machines::{Machines, OwnChoices, Peers, WorkerTerms};
pub use transport::RetransmissionConfig;
