//! The contract of all machines, and what they are handed: packets, the time, tensors.

mod endpoint;
mod tensor;
mod worker;

pub use endpoint::{Endpoint, Instant, Reason, Transmit, Verdict};
pub use tensor::{Elements, Tensor};
pub use worker::{TensorTimes, WorkerEvent, WorkerStatistics};
