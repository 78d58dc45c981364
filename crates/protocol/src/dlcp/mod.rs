//! DLCP: tensors may lose a bounded part of their packets, and packets say how much they matter
//! (Wang et al., 2020).
//!
//! The [`Worker`] cuts its tensors into flows of blocks and sends each block once, as fast as its
//! link. The [`Server`] sums what comes, decides once for each block whose contributions are in its
//! sum, and sends the sums back as flows of its own. In a [`Ring`] ranks sum without one. A flow's
//! two ends (`flow`) ask again only for what the loss bound does not forgive. How the paper became
//! code, and where it differs: `docs/protocols/dlcp.md`.

mod clock;
mod config;
mod flow;
mod flow_plan;
mod paths;
mod protocol;
mod rate;
mod rendezvous;
mod ring;
mod server;
mod sums;
mod tags;
mod worker;

pub use config::{
    ConfigError, FLOW_BLOCKS_MAX, FLOWS_MAX, Finish, JobConfig, RingPlan, ServerJob, WORKERS_MAX, WorkerPlan,
};
pub use flow_plan::FlowPlan;
pub use protocol::{Dlcp, RankTerms};
pub use rate::RateConfig;
pub use ring::Ring;
pub use server::Server;
pub use worker::Worker;
