//! What every protocol's sender has: the stream that it cuts its tensors into, what it knows of the network between, how
//! much it may have on the way, whose turn it is where jobs share a machine, and what else all workers do alike.

mod congestion;
mod retransmission;
mod run;
mod stream;
mod turns;
mod worker_core;

pub(crate) use congestion::CongestionWindow;
pub use retransmission::RetransmissionConfig;
pub(crate) use retransmission::RoundTrip;
pub(crate) use run::Run;
pub(crate) use stream::{Chunk, Stream};
pub(crate) use turns::{Sender, Turns};
pub(crate) use worker_core::WorkerCore;
