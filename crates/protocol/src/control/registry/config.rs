//! What a registry is told.

use core::time::Duration;

/// Limits of a registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegistryConfig {
    /// Shards of the switch.
    pub shards: u8,
    /// Memory in each shard, for all jobs together, in units of 256 elements.
    pub pool_units: u32,
    /// What the kernel granted to each of the switch's sockets.
    pub receive_buffer_bytes: usize,
    /// Most jobs that gather or run at once.
    pub jobs_max: u32,
    /// A rank that has no stream and is silent for longer is expelled.
    pub heartbeat_timeout: Duration,
    /// A rank whose stream ended is expelled unless it opens another one within this: a connection may break under a process
    /// that lives.
    pub return_timeout: Duration,
    /// A gathering is given up when its ranks lose patience, and after this at the latest.
    pub join_timeout_max: Duration,
    /// How long the reason of an abort is kept for ranks that have not heard it.
    pub abort_memory: Duration,
}

impl Default for RegistryConfig {
    fn default() -> Self {
        Self {
            shards: 1,
            pool_units: 262_144,
            receive_buffer_bytes: 16 << 20,
            jobs_max: 256,
            heartbeat_timeout: Duration::from_secs(5),
            return_timeout: Duration::from_millis(500),
            join_timeout_max: Duration::from_secs(3600),
            abort_memory: Duration::from_secs(60),
        }
    }
}

/// A limit that would make a registry useless.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The field that is zero.
    pub field: &'static str,
}

impl core::fmt::Display for ConfigError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} is zero; it must be at least one", self.field)
    }
}

impl core::error::Error for ConfigError {}
