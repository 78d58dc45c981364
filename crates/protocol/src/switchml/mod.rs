//! SwitchML: a switch sums chunks in a static pool of slots (Sapio et al., NSDI 2021).
//!
//! The [`Worker`] cuts its tensors into chunks and keeps one packet in flight a slot. The
//! [`Switch`] adds the chunks of all workers in a slot and answers with the sum, which is the
//! permission for the slot's next chunk. A switch with an upstream is a rack (§7): its sum is one
//! contribution there, and the answer goes to its workers. How the paper became code, and where it
//! differs: `docs/protocols/switchml.md`.

mod admission;
mod config;
mod exchange;
mod in_flight;
mod native_sums;
mod protocol;
mod racks;
mod restore;
mod slot_pool;
mod switch;
mod window;
mod worker;

pub use config::{ConfigError, Contributions, JobConfig, SLOTS_MAX, SwitchJob, Upstream, WorkerPlan};
pub use protocol::{RankTerms, SwitchMl};
pub use switch::Switch;
pub use worker::Worker;
