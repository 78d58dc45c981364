//! The code shared by every protocol's sender. It has the stream that tensors are cut into, facts
//! known of the network between, how much may be on the way, and whatever else all workers do alike.

mod congestion;
mod retransmission;
mod run;
mod send_order;
mod stream;
mod worker_core;

pub(crate) use congestion::CongestionWindow;
pub use retransmission::RetransmissionConfig;
pub(crate) use retransmission::RoundTrip;
pub(crate) use run::Run;
pub(crate) use send_order::SendOrder;
pub(crate) use stream::{Chunk, Stream};
pub(crate) use worker_core::WorkerCore;

/// A hash that every bit of the input reaches every bit of: the finalizer of SplitMix64 (Steele,
/// Lea and Flood, 2014).
pub(crate) const fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}
