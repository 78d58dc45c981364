//! The input and output of control: how a worker finds its switch, joins a job, and learns that something is wrong.
//!
//! From the top: a [`SwitchServer`] is a whole switch (or the server of ATP), the data path (`fanin-udp`) and the control
//! connection under one port number; a [`RackServer`] is a switch on the way to such a one; a [`Session`] is a worker's whole connection to it, and a [`Job`] adds the ranks of its machine. Every decision is made in `fanin_protocol::control`; here it
//! is asked for, carried out and reported. A gradient passes this room only as a pointer on its way to the driver.
//!
//! Deliberately absent: policy, packets, and Python.
#![forbid(unsafe_code)]

mod client;
mod convert;
mod error;
mod guarded;
pub mod proto;
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
pub use server::{RackMemory, RackServer, RackServerConfig, ServerError, SwitchServer, SwitchServerConfig};
