//! Jobs as they look from outside.

use fanin_wire::{AbortReason, Generation, JobId, LossBound, Security, WireDtype};

use super::super::Ranks;
use super::job::Life;
use super::{Job, Registry};

/// A job as it looks from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobView<'a> {
    /// Its name.
    pub name: &'a str,
    /// Ranks of it.
    pub world_size: u16,
    /// What it does.
    pub state: JobState,
}

/// The state of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobState {
    /// It waits for ranks.
    Gathering {
        /// The ranks that are here.
        present: Ranks,
    },
    /// It runs.
    Running {
        /// Its id.
        job: JobId,
        /// Its generation.
        generation: Generation,
        /// Packets of a rank that may be in flight in a shard.
        in_flight: u16,
        /// Its shards.
        shards: u8,
        /// Elements of a full packet, as the job's protocol counts them.
        elements: u16,
        /// How the elements of float tensors travel.
        wire_dtype: WireDtype,
        /// How its packets are secured.
        security: Security,
        /// Which part of a rank's contributions may be lost.
        loss_bound: LossBound,
        /// Ranks that left it.
        left: Ranks,
    },
    /// It was aborted; the reason is kept for a while.
    Aborted {
        /// Its id.
        job: JobId,
        /// Why.
        reason: AbortReason,
    },
}

impl Registry {
    /// Whether nobody is in any job, nor gathers for one.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.gatherings.is_empty() && self.jobs.values().all(Job::is_over)
    }

    /// All jobs: those that gather by name, then those that were admitted by id.
    pub fn jobs(&self) -> impl Iterator<Item = JobView<'_>> {
        let gathering = self.gatherings.iter().map(|((name, _), gathering)| JobView {
            name,
            world_size: gathering.world_size(),
            state: JobState::Gathering { present: gathering.present() },
        });
        let admitted = self.jobs.iter().map(|(id, job)| JobView {
            name: &job.name,
            world_size: job.admission.world_size,
            state: match job.life {
                Life::Running { .. } => JobState::Running {
                    job: *id,
                    generation: job.admission.generation,
                    in_flight: job.admission.terms.window,
                    shards: job.admission.shards,
                    elements: job.admission.terms.elements,
                    wire_dtype: job.admission.terms.wire_dtype,
                    security: job.admission.key.security(),
                    loss_bound: job.admission.terms.loss_bound,
                    left: job.left.clone(),
                },
                Life::Aborted { reason, .. } => JobState::Aborted { job: *id, reason },
            },
        });
        gathering.chain(admitted)
    }
}
