//! The ranks that a rank waits for while a job gathers, as the switch tells who is there.
//!
//! A switch names who is absent when somebody loses patience. Ranks that began together lose it
//! together, and are absent to each other then. So a rank looks now and then, and blames those
//! alone that it never saw, or that went long before.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use fanin_protocol::control::Ranks;
use tokio::time::timeout;
use tonic::transport::Channel;

use super::status::{JobStatusState, SwitchStatus};
use crate::error::{absent, named};
use crate::proto::StatusRequest;
use crate::proto::control_client::ControlClient;

/// When a rank looks first, and how long it waits at most until it looks again: twice as long each
/// time.
const FIRST_LOOK: Duration = Duration::from_secs(1);
const LOOK_MAX: Duration = Duration::from_secs(30);
/// From the second look on it says for whom it waits.
const UNTOLD: Duration = Duration::from_secs(2);
/// How long the switch may take to say who is there.
const STATUS_PATIENCE: Duration = Duration::from_secs(1);
/// A rank that goes so shortly before this one loses patience may have lost its own.
const TOGETHER: Duration = Duration::from_secs(3);

/// Who was there.
#[derive(Debug, Default)]
pub(super) struct Absent {
    seen: Ranks,
    /// Of those, the ones that went away.
    gone: Ranks,
}

impl Absent {
    fn look(&mut self, present: &Ranks, left: Duration) {
        if left > TOGETHER {
            self.gone = self.seen.clone().without(present);
        }
        self.gone = std::mem::take(&mut self.gone).without(present);
        self.seen.extend(present.iter());
    }

    /// Of ranks that are missing now: those to blame, and which of them were there before.
    pub fn blamed(&self, missing: Ranks) -> (Ranks, Ranks) {
        let mut blamed = missing.clone().without(&self.seen);
        let gone = self.gone.iter().filter(|rank| missing.contains(*rank)).collect::<Ranks>();
        blamed.extend(gone.iter());
        // All were there, and one went just now.
        if blamed.is_empty() { (missing, gone) } else { (blamed, gone) }
    }

    /// Looks until `until`, and says of a job for whom it waits there; `name` is what ranks are
    /// called.
    pub async fn watch(
        &mut self,
        mut client: ControlClient<Channel>,
        (job, switch): (&str, &str),
        until: Instant,
        name: impl Fn(&Ranks) -> Ranks,
        say: impl Fn(&str),
    ) -> Infallible {
        let (began, mut pause) = (Instant::now(), FIRST_LOOK);
        let patience = until.saturating_duration_since(began).as_secs();
        loop {
            tokio::time::sleep(pause).await;
            pause = (2 * pause).min(LOOK_MAX);
            let left = until.saturating_duration_since(Instant::now());
            let Some((world_size, present)) = present(&mut client, job).await else { continue };
            self.look(&present, left);
            let missing = Ranks::all(world_size).without(&present);
            let waited = began.elapsed();
            if waited < UNTOLD || missing.is_empty() {
                continue;
            }
            let went = match name(&self.gone) {
                gone if gone.is_empty() => String::new(),
                gone => format!("; {}", absent(&gone, &gone, "join")),
            };
            let (missing, waited) = (named(&name(&missing)), waited.as_secs());
            say(&format!(
                "waiting for {missing} to join job {job:?} at switch {switch} ({waited} s of {patience} s){went}"
            ));
        }
    }
}

/// The size of a job that gathers, and the ranks that are there; `None` where the switch does not
/// say, or the job does not gather.
pub(super) async fn present(client: &mut ControlClient<Channel>, job: &str) -> Option<(u16, Ranks)> {
    let question = client.status(StatusRequest { job: Some(job.to_owned()), ..StatusRequest::default() });
    let reply = timeout(STATUS_PATIENCE, question).await.ok()?.ok()?;
    let status = SwitchStatus::try_from(reply.into_inner()).ok()?;
    status.jobs.into_iter().find_map(|job| match job.state {
        JobStatusState::Gathering { present } => Some((job.world_size, present)),
        JobStatusState::Running { .. } | JobStatusState::Aborted { .. } => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_never_came_is_blamed_and_not_who_lost_patience_too() {
        let long = Duration::from_secs(10);
        let mut absent = Absent::default();
        absent.look(&Ranks::from([1]), long);
        absent.look(&Ranks::from([1, 2, 3]), long);
        assert_eq!(absent.blamed(Ranks::from([0, 2, 3])), (Ranks::from([0]), Ranks::default()));
        // Just before this one does.
        absent.look(&Ranks::from([1, 3]), TOGETHER);
        assert_eq!(absent.blamed(Ranks::from([0, 2, 3])), (Ranks::from([0]), Ranks::default()));
    }

    #[test]
    fn who_was_there_and_went_is_told_from_who_never_came() {
        let long = Duration::from_secs(10);
        let mut absent = Absent::default();
        absent.look(&Ranks::from([1, 2, 3]), long);
        absent.look(&Ranks::from([1, 3]), long);
        assert_eq!(absent.blamed(Ranks::from([0, 2])), (Ranks::from([0, 2]), Ranks::from([2])));
        // It was started again.
        absent.look(&Ranks::from([1, 2, 3]), TOGETHER);
        assert_eq!(absent.blamed(Ranks::from([0, 3])), (Ranks::from([0]), Ranks::default()));
    }

    #[test]
    fn where_all_were_there_who_is_missing_now_is_blamed() {
        let mut absent = Absent::default();
        absent.look(&Ranks::from([0, 1]), Duration::from_secs(10));
        assert_eq!(absent.blamed(Ranks::from([0])), (Ranks::from([0]), Ranks::default()));
        assert_eq!(Absent::default().blamed(Ranks::from([0])), (Ranks::from([0]), Ranks::default()));
    }
}
