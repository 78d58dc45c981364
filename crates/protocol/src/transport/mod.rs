//! What a protocol's sender knows of the network between: how much it may have on the way.

mod congestion;

pub(crate) use congestion::CongestionWindow;
