//! The ranks of a job as they find each other at a switch, before they know who is to sum.

use std::time::{Duration, Instant};

use fanin_protocol::control::{Ranks, Refusal};
use fanin_tls::Trust;
use fanin_udp::OnSockets;
use prost::bytes::Bytes;
use tokio::runtime::Runtime;
use tokio::task::{JoinHandle, JoinSet};
use tonic::Status;

use super::absent::Absent;
use super::admission::{FOREVER, refused};
use super::cancel::Cancel;
use super::services::PREDECESSOR;
use super::thread::runtime;
use super::warnings::say;
use crate::control_channel::{Connection, RETRY, Waiting, explain};
use crate::error::{ChainError, SessionError};
use crate::proto::{MeetRequest, meet_reply::Met, meet_reply::Outcome};
use crate::protocols;

/// The first round: each rank says at each switch at which place it names it.
const FIRST: &str = "switch";
/// The last one, which lasts while the ranks join.
const LAST: &str = "joins";
/// By how much a rank may hear later than another that one began anew, which left for that; and how
/// often it looks.
const TOLD: Duration = Duration::from_millis(500);
const LOOK: Duration = Duration::from_millis(10);
/// How much later than asked for a switch may answer.
const SILENCE: Duration = Duration::from_secs(5);

/// Who meets.
#[derive(Clone, Debug, PartialEq)]
pub struct MeetingConfig {
    /// The switches, each as `host:port`, in the order of the job.
    pub switches: Vec<String>,
    /// How the job is to be summed.
    pub protocol: &'static dyn OnSockets,
    /// Its name.
    pub job: String,
    /// This process's rank.
    pub rank: u32,
    /// Ranks of the job.
    pub world_size: u32,
    /// By what the switches are known.
    pub trust: Trust,
}

/// The ranks of a job at the first of the switches that rank 0 names. Its methods block and must
/// not be called from an asynchronous task.
#[derive(Debug)]
pub struct Meeting {
    config: MeetingConfig,
    connection: Connection,
    /// Which attempt at the job it is: drawn by the switch, and no other has it.
    attempt: u64,
    runtime: Option<Runtime>,
}

impl Meeting {
    /// Finds the switch where the ranks meet, and says on standard error for what it waits. Returns
    /// when all ranks have come, until `cancel` is called.
    ///
    /// # Errors
    /// As of a session that is joined; [`SessionError::JoinTimeout`] names the ranks that did not
    /// come in time, [`SessionError::Closed`] that it was cancelled.
    pub fn open(config: MeetingConfig, patience: Duration, cancel: &Cancel) -> Result<Self, SessionError> {
        let runtime = runtime("fanin-meeting")?;
        match runtime.block_on(cancel.or(find(&config, patience))) {
            Ok((connection, attempt)) => Ok(Self { config, connection, attempt, runtime: Some(runtime) }),
            Err(error) => {
                runtime.shutdown_background();
                Err(error)
            }
        }
    }

    /// Which attempt at the job it is: the same on all its ranks, and no other's.
    #[must_use]
    pub const fn attempt(&self) -> u64 {
        self.attempt
    }

    /// What each rank says in this round, in their order; each round once, in the same order on all
    /// ranks. `cancel` ends it.
    ///
    /// # Errors
    /// As [`Self::open`]; and [`SessionError::JoinRefused`] with [`Refusal::BeganAnew`] when a rank
    /// was started again since all met, so that they have to meet once more, or
    /// [`Refusal::WordsTooLong`], on all ranks, when they say too much.
    pub fn gather(
        &self,
        round: &str,
        text: String,
        patience: Duration,
        cancel: &Cancel,
    ) -> Result<Vec<String>, SessionError> {
        let Some(runtime) = &self.runtime else { return Err(SessionError::Closed) };
        let mut connection = self.connection.clone();
        let said = said(&self.config, (round, self.attempt), text, patience);
        let met = runtime.block_on(cancel.or(meet(&mut connection, said, patience)))?;
        let text = |text: Bytes| String::from_utf8(text.into()).map_err(|error| error.to_string());
        met.texts
            .into_iter()
            .map(text)
            .collect::<Result<_, _>>()
            .map_err(|cause| SessionError::NotASwitch { switch: self.connection.switch.clone(), cause })
    }

    /// The last of all: the rank joins until what is returned is dropped. When another one is
    /// started again meanwhile, `cancel` is called, with [`Refusal::BeganAnew`].
    #[must_use]
    pub fn joining(&self, patience: Duration, cancel: &Cancel) -> Joining {
        let (mut connection, joined, cancel) = (self.connection.clone(), cancel.clone(), cancel.clone());
        let (config, attempt, until) = (self.config.clone(), self.attempt, Instant::now() + patience);
        let told = async move {
            loop {
                let left = until.saturating_duration_since(Instant::now());
                let said = said(&config, (LAST, attempt), String::new(), left);
                match meet(&mut connection, MeetRequest { joins: true, ..said }, left).await {
                    Err(error @ SessionError::JoinRefused { reason: Refusal::BeganAnew { .. }, .. }) => {
                        return cancel.because(error);
                    }
                    // It restarts, or has still to see that the connection is gone on which this
                    // rank said so before.
                    Err(SessionError::JoinRefused {
                        reason: Refusal::DuplicateRank { .. } | Refusal::SwitchStopping,
                        ..
                    }) => {}
                    // Nothing of the services that it joins.
                    Ok(_) | Err(SessionError::JoinRefused { .. } | SessionError::JoinTimeout { .. }) => {
                        return;
                    }
                    // The connection broke, or the switch is another one now: who begins anew comes
                    // there, too.
                    Err(_) => {}
                }
                tokio::time::sleep(RETRY).await;
            }
        };
        let told = self.runtime.as_ref().map(|runtime| runtime.spawn(told));
        Joining { told, cancel: joined, rank: self.config.rank, until }
    }
}

/// That a rank joins a job, as the others of its meeting are told. Dropping it says that it does so
/// no more.
#[derive(Debug)]
pub struct Joining {
    told: Option<JoinHandle<()>>,
    cancel: Cancel,
    rank: u32,
    /// When it loses patience.
    until: Instant,
}

impl Joining {
    /// What became of it. Who failed for what others did may only not have been told yet why they
    /// did it: all are, at once. That a rank died is known before it can have been started again,
    /// which is waited for as others wait who only miss it.
    ///
    /// # Errors
    /// That of `joined`, unless another rank began anew.
    pub fn over<T>(self, joined: Result<T, SessionError>) -> Result<T, SessionError> {
        let soon = Instant::now() + TOLD;
        let mut has_said = false;
        loop {
            if let Some(cause) = self.cancel.cause() {
                return Err(cause);
            }
            let now = Instant::now();
            match &joined {
                Err(SessionError::RankLost { rank }) if now < self.until => {
                    if now >= soon && !has_said {
                        has_said = true;
                        let left = (self.until - now).as_secs();
                        let waits = "ended while the ranks joined; waiting for it to be started again";
                        say(self.rank, &format!("rank {} {waits} ({left} s at most)", rank.0));
                    }
                }
                Err(_) if now < soon => {}
                _ => return joined,
            }
            // What is waited for comes from a runtime, or from nobody: the cause has no waker for a
            // thread.
            std::thread::sleep(LOOK);
        }
    }
}

impl Drop for Joining {
    fn drop(&mut self) {
        self.told.iter().for_each(JoinHandle::abort);
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Meets at all switches at once, as ranks may name them in another order, and takes the one that
/// rank 0 names first.
async fn find(config: &MeetingConfig, patience: Duration) -> Result<(Connection, u64), SessionError> {
    let mut meeting = JoinSet::new();
    for (place, switch) in config.switches.iter().cloned().enumerate() {
        let config = config.clone();
        meeting.spawn(async move { first_round(&config, place, &switch, patience).await });
    }
    while let Some(ended) = meeting.join_next().await {
        let met = ended.map_err(|error| SessionError::Local { what: "meeting", cause: error.to_string() })?;
        // What is wrong at one of them would be when the job is joined there.
        let (connection, met) = met?;
        if met.texts.first().is_some_and(|text| *text == "0") {
            return Ok((connection, met.attempt));
        }
    }
    Err(SessionError::Address {
        switch: config.switches.join(","),
        cause: "none is the first that rank 0 names; all ranks name the same, in the same order".into(),
    })
}

async fn first_round(
    config: &MeetingConfig,
    place: usize,
    switch: &str,
    patience: Duration,
) -> Result<(Connection, Met), SessionError> {
    let began = Instant::now();
    let mut waiting = Waiting::new(patience);
    let saying = |text: &str| say(config.rank, text);
    let (mut connection, _) = Connection::open_saying(switch, patience, &config.trust, None, saying).await?;
    if !protocols::serves(&connection.protocol, config.protocol) {
        let (asked, served) = (config.protocol.name().into(), connection.protocol.clone());
        let reason = Refusal::ProtocolMismatch { asked, served };
        return Err(SessionError::JoinRefused { switch: connection.switch, job: config.job.clone(), reason });
    }
    let reached = Instant::now();
    loop {
        let left = patience.saturating_sub(began.elapsed());
        let said = said(config, (FIRST, 0), place.to_string(), left);
        match meet(&mut connection, said, left).await {
            Err(SessionError::Chain {
                error: error @ ChainError::UpstreamUnreachable { may_come: true, .. },
                job,
            }) => {
                if began.elapsed() + RETRY >= patience {
                    return Err(SessionError::Chain { error, job });
                }
                if waiting.is_due(true) {
                    say(config.rank, &waiting.says(&format!("the switches on the way: {error}")));
                }
            }
            // Its process may be dying just now.
            Err(SessionError::JoinRefused {
                reason: Refusal::JobRunning { .. } | Refusal::DuplicateRank { .. },
                ..
            }) if reached.elapsed() < PREDECESSOR.min(patience) => {}
            met => return Ok((connection, met?)),
        }
        tokio::time::sleep(RETRY).await;
    }
}

fn said(
    config: &MeetingConfig,
    (round, attempt): (&str, u64),
    text: String,
    patience: Duration,
) -> MeetRequest {
    MeetRequest {
        job: config.job.clone(),
        rank: config.rank,
        world_size: config.world_size,
        round: round.into(),
        attempt,
        text: text.into(),
        patience_ms: u64::try_from(patience.as_millis()).unwrap_or(u64::MAX),
        passed_on: 0,
        joins: false,
    }
}

async fn meet(
    connection: &mut Connection,
    said: MeetRequest,
    patience: Duration,
) -> Result<Met, SessionError> {
    let switch = connection.switch.clone();
    let (job, rank, world_size, joins) = (said.job.clone(), said.rank, said.world_size as usize, said.joins);
    let asking = connection.client.clone();
    let began = Instant::now();
    let lost = |cause: String| SessionError::SwitchLost { switch: switch.clone(), cause };
    // It answers when the patience is over, unless it is gone.
    let told = async {
        let mut pieces = connection.client.meet(said).await?.into_inner();
        let mut all = Met::default();
        while let Some(piece) = pieces.message().await? {
            match piece.outcome {
                Some(Outcome::Met(met)) if all.texts.len() + met.texts.len() <= world_size => {
                    all.attempt = met.attempt;
                    all.texts.extend(met.texts);
                }
                outcome => return Ok(outcome),
            }
        }
        Ok(Some(Outcome::Met(all)))
    };
    let told = tokio::time::timeout(patience.saturating_add(SILENCE), told);
    let mut absent = Absent::default();
    let told = if joins {
        told.await
    } else {
        let until = began.checked_add(patience).unwrap_or(began + FOREVER);
        let looking = absent.watch(asking, (&job, &switch), until, Ranks::clone, |text| say(rank, text));
        tokio::select! {
            told = told => told,
            never = looking => match never {},
        }
    };
    let told = told.map_err(|_| lost("it fell silent while the ranks met".into()))?;
    let told = told.map_err(|status: Status| lost(format!("while the ranks met: {}", explain(&status))))?;
    let malformed = |cause: String| SessionError::NotASwitch { switch: switch.clone(), cause };
    match told {
        Some(Outcome::Met(met)) if met.texts.len() == world_size => Ok(met),
        Some(Outcome::Met(_)) | None => Err(malformed("it did not say what all ranks said".into())),
        Some(Outcome::Refusal(refusal)) => Err(match refused(refusal, &switch, &job, began) {
            Ok(SessionError::JoinTimeout { switch, job, missing_ranks, waited, .. }) => {
                let (missing_ranks, gone) = absent.blamed(missing_ranks);
                SessionError::JoinTimeout { switch, job, missing_ranks, gone, waited }
            }
            Ok(error) => error,
            Err(error) => malformed(error.to_string()),
        }),
    }
}

#[cfg(test)]
mod tests {
    use fanin_wire::Rank;

    use super::*;

    const LOST: SessionError = SessionError::RankLost { rank: Rank(1) };

    fn joining(patience: Duration) -> (Joining, Cancel) {
        let cancel = Cancel::default();
        (Joining { told: None, cancel: cancel.clone(), rank: 0, until: Instant::now() + patience }, cancel)
    }

    fn began_anew() -> SessionError {
        let reason = Refusal::BeganAnew { rank: 1 };
        SessionError::JoinRefused { switch: "switch".into(), job: "job".into(), reason }
    }

    #[test]
    fn a_rank_that_died_is_waited_for_until_it_begins_anew_or_patience_is_over() {
        let (waits, cancel) = joining(Duration::from_secs(60));
        let begins_anew = std::thread::spawn(move || {
            // Later than a cause is waited for where no rank died.
            std::thread::sleep(TOLD * 3 / 2);
            cancel.because(began_anew());
        });
        assert_eq!(waits.over::<()>(Err(LOST)), Err(began_anew()));
        begins_anew.join().expect("no panic");
        assert_eq!(joining(TOLD).0.over::<()>(Err(LOST)), Err(LOST));
    }

    #[test]
    fn who_has_joined_as_another_begins_anew_joins_once_more() {
        let (late, cancel) = joining(Duration::from_secs(60));
        cancel.because(began_anew());
        assert_eq!(late.over(Ok(())), Err(began_anew()));
        assert_eq!(joining(Duration::from_secs(60)).0.over(Ok(())), Ok(()));
    }
}
