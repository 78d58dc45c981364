//! The worker's side: finding the switch, joining a job, and watching over it.

mod absent;
mod admission;
mod config;
pub(crate) mod connection;
mod job;
mod meeting;
mod oversight;
pub(crate) mod path;
mod pending;
mod presence;
mod probe;
mod session;
mod shared;
mod socket;
mod split;
mod status;
mod trace;
mod warnings;
mod watch;

pub use config::{ServiceConfig, SessionConfig};
pub use connection::{control_calls, switch_address};
pub use job::{Job, LocalRanks};
pub use meeting::{Joining, Meeting, MeetingConfig};
pub use path::{InterfaceError, Route, interface_address, interface_of, interface_rate_bps, route};
pub use probe::{Probe, ProbeReport, ProbeSum, cut_off, resolve_switch};
pub use session::{Cancel, Session};
pub use split::{MemberStatus, Place, Prediction, Share, Split};
pub use status::{
    JobStatus, JobStatusState, PlannedShare, RelayJob, RelayStatus, SwitchStatus, switch_rate, switch_status,
    trusted_status,
};
pub use trace::{HandOver, TraceConfig};
pub use watch::HEARTBEATS_PER_TIMEOUT;
