//! Which part of a job's gradients is summed where, and which may be lost: pure functions to a plan.
//!
//! It stands beside the way of a gradient: a plan is made before the first one, and the data path only looks it up.
//!
//! Deliberately absent: the network, which it never asks (whoever calls it knows or measured the rates), and the clock.
#![forbid(unsafe_code)]

mod cluster;
mod load_split;
mod placement;
mod thresholds;

pub use cluster::{Cluster, ClusterError, Machine};
pub use load_split::{Bound, LoadSplit, lower_bound, one_switch, ring};
pub use placement::{Placement, SHARE_WHOLE};
pub use thresholds::{DroppingPort, ImpactCurve, LayerQueue, Threshold, ThresholdError, Thresholds};
