//! The protocols, as state machines that own no socket, no clock and no thread.
//!
//! On the way of a gradient this room stands twice: the [`Worker`] cuts the tensor into chunks and quantises each straight
//! into a train of packets; the [`Switch`] adds the chunks of all workers in a slot and answers with the sum, which the
//! worker turns back into floats in place. Simulator and socket driver run the very same code through [`Endpoint`].
//!
//! Deliberately absent: input and output, time, threads, unsafe code. The crate builds without an operating system.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod atp;
mod config;
pub mod control;
mod endpoint;
mod run;
mod switch;
mod tensor;
mod transport;
mod worker;

pub use config::{ConfigError, JobConfig, RetransmissionConfig, SLOTS_MAX};
pub use endpoint::{Endpoint, Instant, Reason, Transmit, Verdict};
pub use switch::{JobProgress, Switch, SwitchEvent, SwitchStatistics};
pub use tensor::{Elements, Tensor};
pub use worker::{TensorTimes, Worker, WorkerEvent, WorkerStatistics};
