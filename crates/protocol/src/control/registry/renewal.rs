//! Jobs that run and are set up again (ATP §A.3). The ranks of such a job come by other ways than
//! before, or the root can have a better plan.
//!
//! All ranks join again with what they remember, as after a restart of the root. A job in the next
//! generation takes the place of the one before. The root forgets the sums that were under way;
//! the ranks make them again.

use alloc::vec::Vec;

use fanin_wire::{AbortReason, JobId, Rank};

use super::super::{Ranks, Refusal};
use super::job::{Job, Life};
use super::{Command, Registry};
use crate::machine::Instant;

/// Whether a running job is set up again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Renewal {
    None,
    /// Nobody was told yet.
    Begun,
    /// The shell tells its ranks.
    Told,
}

impl Registry {
    /// Sets a running job up again, unless a rank has left, which joins nowhere again. Returns
    /// whether the job is set up again.
    pub fn set_up_again(&mut self, job: JobId) -> bool {
        let Some(job) = self.jobs.get_mut(&job).filter(|job| job.is_running() && job.left.is_empty()) else {
            return false;
        };
        if job.renewal == Renewal::None {
            job.renewal = Renewal::Begun;
        }
        true
    }

    /// A rank was heard through so many switches. If it joined through more or fewer, its job is
    /// set up again. Returns whether that is so.
    pub fn came_by(&mut self, job: JobId, rank: Rank, switches: u32) -> bool {
        let way = self.admission(job).map(|admission| admission.tree.way(rank).len());
        way.is_some_and(|way| way != switches as usize) && self.set_up_again(job)
    }

    /// A rank that waits for its job to be set up again says nothing else, and lives.
    pub(super) fn hear_those_that_wait(&mut self, now: Instant) {
        for gathering in self.gatherings.values() {
            if let Some(job) = gathering.replaces.and_then(|job| self.jobs.get_mut(&job)) {
                job.hear(now, &gathering.present());
            }
        }
    }

    /// Gives up gatherings of which some rank does not come. A job that could not be set up again
    /// in time is over.
    pub(super) fn given_up(&mut self, now: Instant) -> Vec<Command> {
        let (mut commands, mut late) = (Vec::new(), Vec::new());
        let jobs = &self.jobs;
        self.gatherings.retain(|_, gathering| {
            let missing = gathering.missing();
            let gone = gathering.replaces.and_then(|job| absent(jobs.get(&job), &missing));
            if gone.is_none() {
                if now < gathering.deadline() {
                    return true;
                }
                // Its other ranks may have stopped.
                late.extend(gathering.replaces.zip(missing.iter().next()));
            }
            let reason = Refusal::JoinTimeout { missing: gone.unwrap_or(missing) };
            commands.push(Command::Refuse { tickets: gathering.tickets(), reason });
            false
        });
        commands.extend(self.expel(now, late));
        commands
    }

    /// Jobs of which the shell has still to tell the ranks that they are set up again.
    pub(super) fn begun_anew(&mut self) -> Vec<Command> {
        let begun = self.jobs.iter_mut().filter(|(_, job)| job.is_running() && job.renewal == Renewal::Begun);
        let told = begun.map(|(id, job)| {
            job.renewal = Renewal::Told;
            Command::SetUpAgain { job: *id }
        });
        told.collect()
    }
}

/// The ranks for which the others wait in vain: the one that died, or those that left. If the job
/// is over, all that are missing.
fn absent(job: Option<&Job>, missing: &Ranks) -> Option<Ranks> {
    match job {
        Some(Job { life: Life::Aborted { reason: AbortReason::Expelled(rank), .. }, .. }) => {
            Some(Ranks::from([rank.0]))
        }
        Some(job) if !job.left.is_empty() => Some(job.left.clone()),
        Some(job) if job.is_running() => None,
        _ => Some(missing.clone()),
    }
}
