//! A job from its admission to the last rank that hears of its end.

use alloc::string::String;
use alloc::vec::Vec;
use core::net::IpAddr;
use core::time::Duration;

use fanin_wire::{AbortReason, Rank};

use super::super::{Admission, JoinRequest, Ranks};
use super::{Denied, RegistryConfig, Renewal};
use crate::machine::Instant;

/// Heartbeat timeouts within which a rank says its first word after its admission. All ranks of many jobs may begin at once, on
/// few cores.
const FIRST_WORD: u32 = 4;

/// What is known of a rank's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    /// It may have been told then that it is admitted, and has said nothing since.
    Admitted(Instant),
    /// It asked something then, and has no stream.
    Heard(Instant),
    /// Its stream of this number is open: it lives, however silent it is.
    Attends(u64),
    /// Its stream ended then without a farewell.
    Gone(Instant),
}

/// A job that was admitted.
#[derive(Debug)]
pub(super) struct Job {
    pub name: String,
    /// What its ranks showed when they resumed it.
    pub lineage: Option<u64>,
    /// What its ranks are told.
    pub admission: Admission,
    /// From where all of its ranks asked, if that is one machine.
    pub origin: Option<IpAddr>,
    pub left: Ranks,
    /// When a rank left it last.
    pub left_last: Instant,
    /// Of a job that was resumed: which of its ranks were not heard since they were told.
    pub untold: Option<Ranks>,
    /// And which of them may lack sums that were under way.
    pub behind: Ranks,
    pub renewal: Renewal,
    pub life: Life,
}

#[derive(Debug)]
pub(super) enum Life {
    Running { presences: Vec<Presence> },
    Aborted { reason: AbortReason, since: Instant, heard: Ranks },
}

impl Job {
    /// Forgets what ranks are told, once all have heard it.
    pub fn forget_parts(&mut self) {
        if self.untold.is_none() {
            self.admission.seats.ranks = Vec::new();
        }
    }

    pub fn is_running(&self) -> bool {
        matches!(self.life, Life::Running { .. })
    }

    /// Whether who asks to join must do so here, or nowhere, as the name is the same. Somebody else's job that took the name does
    /// not keep those out who had it before their switch restarted.
    pub fn concerns(&self, request: &JoinRequest) -> bool {
        let of_lineage = |lineage| self.lineage == Some(lineage) || self.admission.key.lineage() == lineage;
        self.is_running() && self.name == request.job && request.lineage().is_none_or(of_lineage)
    }

    /// Whether a call in a rank's name is the rank's.
    pub fn authenticate(&self, rank: Rank, secret: u64) -> Result<(), Denied> {
        if secret == self.admission.key.secret_of(rank) { Ok(()) } else { Err(Denied { rank }) }
    }

    /// The admission, for a rank that did not get it and asks once more.
    pub fn admission_again(&mut self, now: Instant, rank: Rank, request: &JoinRequest) -> Option<Admission> {
        let (admission, unheard) = (&self.admission, self.untold.as_ref()?);
        let resume = request.resume.as_ref()?;
        let is_it = unheard.contains(rank)
            && request.world_size == u32::from(admission.world_size)
            && resume.generation.0.wrapping_add(1) == admission.generation.0
            && resume.is_of(admission)
            && admission.tree.way(rank).len() == request.hops.len();
        let Life::Running { presences } = &mut self.life else { return None };
        if !is_it {
            return None;
        }
        presences[usize::from(rank.0)] = Presence::Admitted(now);
        Some(admission.clone())
    }

    /// Whether a rank of the running job asks to go on with it. Its way has changed, or it was told
    /// to join again.
    pub fn is_resumed_by(&self, request: &JoinRequest) -> bool {
        let Some(resume) = &request.resume else { return false };
        let Admission { key, generation, world_size, .. } = &self.admission;
        self.is_running()
            && (resume.lineage, resume.generation) == (key.lineage(), *generation)
            && resume.is_of(&self.admission)
            && request.world_size == u32::from(*world_size)
    }

    /// No rank is silent until now; those with a stream have it still.
    pub fn hear_all(&mut self, now: Instant) {
        self.hear(now, &Ranks::all(self.admission.world_size));
    }

    /// These are not silent until now; those with a stream have it still.
    pub fn hear(&mut self, now: Instant, ranks: &Ranks) {
        let Life::Running { presences } = &mut self.life else { return };
        for rank in ranks.iter() {
            match presences.get_mut(usize::from(rank.0)) {
                None | Some(Presence::Attends(_)) => {}
                Some(Presence::Admitted(then)) => *then = now,
                Some(presence) => *presence = Presence::Heard(now),
            }
        }
    }

    /// The rank that is dead by now, the one first if there are several.
    pub fn dead(&self, now: Instant, config: &RegistryConfig) -> Option<Rank> {
        let overdue = |presence: &Presence| match *presence {
            Presence::Attends(_) => None,
            Presence::Admitted(then) => {
                (now.since(then) > config.heartbeat_timeout.saturating_mul(FIRST_WORD)).then_some(then)
            }
            Presence::Heard(then) => (now.since(then) > config.heartbeat_timeout).then_some(then),
            Presence::Gone(then) => (now.since(then) > config.return_timeout).then_some(then),
        };
        self.members()
            .filter_map(|(rank, presence)| Some((overdue(presence)?, rank)))
            .min_by_key(|(then, _)| *then)
            .map(|(_, rank)| rank)
    }

    /// A rank whose stream ended without a farewell.
    pub fn gone(&self) -> Option<Rank> {
        self.members().find(|(_, presence)| matches!(presence, Presence::Gone(_))).map(|(rank, _)| rank)
    }

    /// The ranks of a running job that did not leave.
    pub fn members(&self) -> impl Iterator<Item = (Rank, &Presence)> {
        let presences = match &self.life {
            Life::Running { presences } => presences.as_slice(),
            Life::Aborted { .. } => &[],
        };
        (0..self.admission.world_size).map(Rank).zip(presences).filter(|(rank, _)| !self.left.contains(*rank))
    }

    /// Whether the reason of its abort has no one left to tell.
    pub fn is_spent(&self, now: Instant, memory: Duration) -> bool {
        let Life::Aborted { since, .. } = &self.life else { return false };
        now.since(*since) > memory || self.untold_of_abort().is_some_and(|ranks| ranks.is_empty())
    }

    /// Whether nobody is in it but a rank that was taken for dead. That one is told if it asks, and need not be waited for.
    pub fn is_over(&self) -> bool {
        let Life::Aborted { reason, .. } = &self.life else { return false };
        let mut untold = self.untold_of_abort().unwrap_or_default();
        if let AbortReason::Expelled(dead) = reason {
            untold.remove(*dead);
        }
        untold.is_empty()
    }

    /// Who has not heard why the job was aborted; `None` while it runs.
    fn untold_of_abort(&self) -> Option<Ranks> {
        let Life::Aborted { heard, .. } = &self.life else { return None };
        Some(Ranks::all(self.admission.world_size).without(heard).without(&self.left))
    }
}
