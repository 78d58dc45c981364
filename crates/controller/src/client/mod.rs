//! The worker's side: finding the switch, joining a job, and watching over it.

mod admission;
mod connection;
mod path;
mod pending;
mod session;
mod status;
mod watch;

pub use session::{Session, SessionConfig};
pub use status::{JobStatus, JobStatusState, SwitchStatus, switch_status};
