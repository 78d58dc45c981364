//! The worker's side: finding the switch, joining a job, and watching over it.

mod absent;
mod admission;
mod config;
mod job;
mod joined;
mod meeting;
mod oversight;
mod pending;
mod presence;
mod probe;
mod shared;
mod split;
mod status;
mod thread;
mod trace;
mod warnings;
mod watch;

pub use config::{ServiceConfig, SessionConfig};
pub use job::{Job, LocalRanks};
pub use joined::{Cancel, Session};
pub use meeting::{Joining, Meeting, MeetingConfig};
pub use probe::{Probe, ProbeReport, ProbeSum, cut_off, resolve_switch};
pub use split::{MemberStatus, Place, Prediction, Share, Split};
pub use status::{
    JobStatus, JobStatusState, PlannedShare, RelayJob, RelayStatus, SwitchStatus, switch_rate, switch_status,
    trusted_status,
};
pub use trace::{HandOver, TraceConfig};
pub use watch::HEARTBEATS_PER_TIMEOUT;
