//! What every member of a job knows of it, and what names a member.

use core::fmt::Debug;
use fanin_wire::{Generation, JobId, Key};

/// What every member of a job knows of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobIdentity {
    /// Drawn by the service that admitted the job.
    pub id: JobId,
    /// What its packets are tagged with.
    pub key: Key,
    /// How often the job was set up again.
    pub generation: Generation,
    /// Number of workers.
    pub workers: u16,
    /// Whether it continues a job that a service forgot.
    pub resumed: bool,
}

/// What names a peer.
pub trait Address: Copy + Debug + PartialEq + Send + Sync + 'static {}

impl<A: Copy + Debug + PartialEq + Send + Sync + 'static> Address for A {}
