//! Which part of a job's gradients is summed where, and which may be lost: pure functions to a
//! plan.
//!
//! It stands beside the way of a gradient: a plan is made before the first one, and the data path
//! only looks it up.
//!
//! Deliberately absent: the network, which it never asks (whoever calls it knows or measured the
//! rates), and the clock.
#![forbid(unsafe_code)]

mod baselines;
mod cluster;
mod gradient_schedule;
mod krgs;
mod layout;
mod load_split;
pub mod machine_topology;
mod memory_sharing;
mod participation;
mod placement;
#[cfg(test)]
mod random_workloads;
mod relaxation;
mod send_order;
mod slowest_link;
mod sub_models;
mod thresholds;
pub mod topologies;
mod topology;

pub use baselines::{at_servers, byteps, first_switches};
pub use cluster::{Cluster, ClusterError, Machine};
pub use gradient_schedule::{GradientSchedule, JobSchedule, Residence, ScheduleError, SlowestLink, Traffic};
pub use krgs::{Krgs, Objective, krgs};
pub use load_split::{Bound, LoadSplit, lower_bound, one_switch, ring};
pub use memory_sharing::{SharedMemory, Sharing, Ways, arrivals, worker_rates};
pub use participation::{Convergence, Participation, ParticipationError};
pub use placement::{PART_PACKETS_MIN, Placement, SHARE_WHOLE};
pub use send_order::{Partition, send_order};
pub use slowest_link::{SlowestLinkPlan, slowest_link};
pub use sub_models::{CELLS_MAX, Job, SubModel, WAYS_MAX, Workload, WorkloadError};
pub use thresholds::{DroppingPort, ImpactCurve, LayerQueue, Threshold, ThresholdError, Thresholds};
pub use topology::{Link, NODES_MAX, Node, NodeId, NodeKind, Topology, TopologyError};
