//! What every protocol's sender has: the stream that it cuts its tensors into, what it knows of the network between, and
//! how much it may have on the way.

mod congestion;
mod retransmission;
mod stream;

pub(crate) use congestion::CongestionWindow;
pub use retransmission::RetransmissionConfig;
pub(crate) use retransmission::RoundTrip;
pub(crate) use stream::Stream;
