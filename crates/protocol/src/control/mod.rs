//! Which jobs a switch serves: admission, liveness, and the end of a job.
//!
//! A [`Registry`] is told what happened and when; it answers with a decision that carries its reason, and the shell around
//! it (the `controller` room) acts on it: it answers a waiting rank, configures the data path, counts, logs. One value makes
//! the log line, the metric and the error message.
//!
//! Deliberately absent: sockets, a clock, and any packet. The data path never asks the registry.

mod flow_plan;
mod gathering;
mod hierarchy;
mod pool_size;
mod ranks;
mod refusal;
mod registry;
mod request;
mod restore;
mod switch_tree;

pub use flow_plan::FlowPlan;
pub use hierarchy::{Hierarchy, Rack, Racks};
pub use pool_size::{
    HOST_PROCESSING, PORTION_WHOLE, Path, RATE_DEFAULT_BPS, SLOTS_AUTOMATIC_MAX, SLOTS_AUTOMATIC_MIN,
    SLOTS_AUTOMATIC_MIN_OF_MANY, pool_slots, pool_units,
};
pub use ranks::Ranks;
pub use refusal::{Refusal, ResumeField};
pub use registry::{
    Attendance, Command, ConfigError, Denied, Detached, HeartbeatReply, JobState, JobView, JoinDecision,
    Pool, Registry, RegistryConfig,
};
pub use request::{
    Admission, HOPS_MAX, Hop, JOB_NAME_BYTES_MAX, JoinRequest, NAMED_SUB_MODELS_MAX, Protocol, Resume,
    Ticket, is_job_name, is_unprintable,
};
pub use switch_tree::{SwitchTree, TreeRank, TreeSwitch};
