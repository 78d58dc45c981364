//! The input and output of control: how a worker finds its switch, joins a job, and learns that something is wrong.
//!
//! From the top: a [`SwitchServer`] is a whole switch, the data path (`fanin-udp`) and the control
//! connection under one port number; a [`RackServer`] is a switch on the way to such a one; a [`Session`] is a worker's whole connection to it, and a [`Job`] adds the ranks of its machine. Every decision is made in `fanin_protocol::control`; here it
//! is asked for, carried out and reported. A gradient passes this room only as a pointer on its way to the driver.
//!
//! A protocol is a value here: [`protocols`] lists them, and nobody else names one.
//!
//! Deliberately absent: policy, packets, and Python.
#![forbid(unsafe_code)]

mod client;
mod convert;
mod error;
mod goat_planner;
mod guarded;
pub mod proto;
pub mod protocols;
mod server;

pub use client::{
    Cancel, HEARTBEATS_PER_TIMEOUT, HandOver, InterfaceError, Job, JobStatus, JobStatusState, Joining,
    LocalRanks, Meeting, MeetingConfig, MemberStatus, Place, PlannedShare, Prediction, Probe, ProbeReport,
    ProbeSum, RelayJob, RelayStatus, Route, ServiceConfig, Session, SessionConfig, Share, Split,
    SwitchStatus, TraceConfig, control_calls, cut_off, interface_address, interface_of, interface_rate_bps,
    resolve_switch, route, switch_address, switch_rate, switch_status, trusted_status,
};
pub use error::{AllReduceError, ChainError, SessionError, Tensor};
pub use fanin_guests::raise_descriptors;
pub use fanin_local::{MemoryOfRanks, machine_id, memory_of_ranks};
pub use fanin_tls::{Acceptor, Exchange, Fingerprint, Identity, Secret, SetupError, Trust};
pub use server::{RackServer, RackServerConfig, ServerError, SwitchServer, SwitchServerConfig};
