//! Which jobs a switch serves: admission, liveness, and the end of a job.
//!
//! A [`Registry`] is told what happened and when; it answers with a decision that carries its reason, and the shell around
//! it (the `controller` room) acts on it: it answers a waiting rank, configures the data path, counts, logs. One value makes
//! the log line, the metric and the error message.
//!
//! Deliberately absent: sockets, a clock, any packet, and any protocol. Whoever admits jobs hands the [`Protocol`]s in that it serves, and each
//! says what its members are told. The data path never asks the registry.

mod agreed;
mod gathering;
mod pool_size;
mod protocol;
mod ranks;
mod refusal;
mod registry;
mod request;
mod switch_tree;
mod tree;

pub use agreed::Agreed;
pub(crate) use gathering::IN_FLIGHT_MAX;
pub use pool_size::{
    HOST_PROCESSING, PORTION_WHOLE, Path, RATE_DEFAULT_BPS, WINDOW_MAX, WINDOW_MIN, WINDOW_MIN_OF_MANY,
    pool_units, window_packets,
};
pub(crate) use pool_size::{UNIT_ELEMENTS, product_packets};
pub use protocol::{
    Counted, Gathered, Limits, Malformed, Memory, Planner, Protocol, Relayed, Seats, Share, Terms, narrow,
    part_of, read,
};
pub use ranks::Ranks;
pub use refusal::{Refusal, ResumeField};
pub use registry::{
    Attendance, Command, ConfigError, Denied, Detached, HeartbeatReply, JobState, JobView, JoinDecision,
    Pool, Registry, RegistryConfig,
};
pub use request::{
    Admission, HOPS_MAX, Hop, JOB_NAME_BYTES_MAX, JoinRequest, NAMED_SUB_MODELS_MAX, Resume, Ticket,
    is_job_name, is_unprintable,
};
pub use switch_tree::{SwitchTree, TreeRank, TreeSwitch};
pub(crate) use tree::{Child, Parent, Tree};
