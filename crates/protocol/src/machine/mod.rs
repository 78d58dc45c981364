//! The contract of all machines, and what they are handed: packets, the time, tensors. Also the
//! table of jobs of those that sum.

mod both;
mod endpoint;
mod job;
mod job_table;
mod lanes;
mod packet;
mod received;
mod summer;
mod tensor;
mod worker;

pub use both::{Both, Either};
pub use endpoint::{Endpoint, Instant, Reason, Transmit, Verdict};
pub use job::{Address, JobIdentity};
pub(crate) use job_table::{Abortion, JobTable, TableJob};
pub use lanes::{Lane, Lanes};
pub use packet::Packet;
pub use received::Received;
pub use summer::{JobAborted, JobProgress, Summer, TableStatistics};
pub(crate) use tensor::packing;
pub use tensor::{Elements, Layer, Tensor};
pub use worker::{Loss, TensorTimes, WorkerEvent, WorkerMachine, WorkerStatistics};
