//! What a session is told.

use std::time::Duration;

use fanin_protocol::RetransmissionConfig;
use fanin_protocol::control::Protocol;
use fanin_wire::WireDtype;

use super::trace::TraceConfig;

/// What a session is told at its start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionConfig {
    /// The switch as `host:port`; the port is 4800 where it is missing.
    pub switch: String,
    /// Name of the job: ranks with the same name meet.
    pub job: String,
    /// This process's rank.
    pub rank: u32,
    /// Ranks of the job.
    pub world_size: u32,
    /// SwitchML: slots a shard; computed from the path where it is `None`.
    pub slots: Option<u16>,
    /// ATP: fragments that may be in flight; computed from the path where it is `None`.
    pub window: Option<u16>,
    /// How the job's gradients are summed; the same on every rank.
    pub protocol: Protocol,
    /// How the elements of float tensors travel; the same on every rank.
    pub wire_dtype: WireDtype,
    /// ATP: whether this rank's window shrinks when packets are lost (§3.7). Off where links lose packets without being full.
    pub congestion_control: bool,
    /// How long one all-reduce may take, from its submission or from the end of the one before it.
    pub timeout: Duration,
    /// How long to wait at the start, for the switch and then for the other ranks; the switch may have a lower limit.
    pub join_timeout: Duration,
    /// How long a switch may be gone before the session gives up; at most `timeout`.
    pub switch_timeout: Duration,
    /// When packets are sent again.
    pub retransmission: RetransmissionConfig,
    /// Where to write a timeline, if at all.
    pub trace: Option<TraceConfig>,
}

impl SessionConfig {
    /// A session with the usual time limits.
    #[must_use]
    pub fn new(switch: impl Into<String>, job: impl Into<String>, rank: u32, world_size: u32) -> Self {
        Self {
            switch: switch.into(),
            job: job.into(),
            rank,
            world_size,
            slots: None,
            window: None,
            protocol: Protocol::SwitchMl,
            wire_dtype: WireDtype::Int32,
            congestion_control: true,
            timeout: Duration::from_secs(300),
            join_timeout: Duration::from_secs(300),
            switch_timeout: Duration::from_secs(30),
            retransmission: RetransmissionConfig::default(),
            trace: None,
        }
    }
}
