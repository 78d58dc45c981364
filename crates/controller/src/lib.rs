//! The input and output of control: how a worker finds its switch, joins a job, and learns that
//! something is wrong.
//!
//! There are two sides, and neither knows the other. A rank's is a [`Session`] (`session`): the
//! rank of a running job. The other is a node (`node`): a [`SwitchServer`] is a whole switch, the
//! data path (`fanin-udp`) and the control connection under one port number, and a [`RackServer`]
//! is a switch on the way to such a one. Both speak over a `control_channel`.
//!
//! Every decision is made in `fanin_protocol::control`; here it is asked for, carried out and
//! reported. A gradient passes this room only as a pointer on its way to the driver.
//!
//! A protocol is a value here: [`protocols`] lists them, and nobody else names one.
//!
//! Deliberately absent: policy, packets, and Python.
#![forbid(unsafe_code)]

mod control_channel;
mod convert;
mod error;
mod goat_planner;
mod node;
pub mod page;
mod path;
pub mod proto;
pub mod protocols;
mod session;

pub use control_channel::{control_calls, switch_address};
pub use error::{AllReduceError, ChainError, SessionError, Tensor, why_aborted};
pub use fanin_limits::raise_descriptors;
pub use fanin_local::{Cores, MemoryOfRanks, machine_id, memory_of_ranks};
pub use fanin_tls::{Acceptor, Exchange, Fingerprint, Identity, Secret, SetupError, Trust};
pub use node::{RackServer, RackServerConfig, ServerError, SwitchServer, SwitchServerConfig};
pub use path::{
    InterfaceError, Route, interface_address, interface_of, interface_rate_bps, linked_address, route,
    subnet_of,
};
pub use session::{
    Cancel, HEARTBEATS_PER_TIMEOUT, HandOver, JobStatus, JobStatusState, Joining, LocalRanks, Meeting,
    MeetingConfig, MemberStatus, Place, PlannedShare, Prediction, Probe, ProbeReport, ProbeSum, RankNames,
    RelayJob, RelayStatus, SERVICES_IN_TRACES, ServiceConfig, Session, SessionConfig, Share, Split,
    SwitchStatus, TraceConfig, cut_off, gauge_at, gauge_here, resolve_switch, switch_capacity, switch_status,
    trusted_status,
};
