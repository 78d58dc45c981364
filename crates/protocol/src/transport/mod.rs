//! What every protocol's sender has: the stream that it cuts its tensors into, what it knows of the network between, how
//! much it may have on the way, and whose turn it is where jobs share a machine.

mod congestion;
mod retransmission;
mod stream;
mod turns;

pub(crate) use congestion::CongestionWindow;
pub use retransmission::RetransmissionConfig;
pub(crate) use retransmission::RoundTrip;
pub(crate) use stream::Stream;
pub(crate) use turns::{Sender, Turns};
