//! The task that keeps a session honest: heartbeats, the switch's return, ranks that left, deadlines.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fanin_protocol::control::{Protocol, Ranks, Refusal};
use fanin_wire::{AbortReason, WorkerId};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::admission::{Memory, join, leave};
use super::connection::{Connection, RETRY, explain};
use super::presence::News;
use super::shared::Shared;
use super::status::{JobStatusState, SwitchStatus};
use super::warnings::{self, say};
use crate::error::{Tensor, named};
use crate::proto::heartbeat_reply::State;
use crate::proto::{HeartbeatReply, HeartbeatRequest, StatusRequest};
use crate::{ChainError, SessionError};

/// How often deadlines are looked at.
const TICK: Duration = Duration::from_millis(100);
/// Heartbeats within the timeout after which the switch expels a silent rank: four may be lost.
pub const HEARTBEATS_PER_TIMEOUT: u32 = 5;
/// How long nothing may move before it is asked whether a rank that left is to blame.
const STANDSTILL: Duration = Duration::from_millis(100);
/// How long nothing may move before the rank says for whom it waits, and then after twice as long each time.
const PATIENCE_UNTOLD: Duration = Duration::from_secs(5);
/// How long the switch may take to say whom it waits for.
const STATUS_PATIENCE: Duration = Duration::from_secs(1);

/// What a heartbeat found.
enum Pulse {
    Alive {
        left: Ranks,
    },
    /// The switch does not know the job.
    Forgotten {
        switch_instance: u64,
    },
    Aborted(AbortReason),
    Unreachable(String),
}

/// When a session last saw something move.
struct Progress {
    marker: u64,
    since: Instant,
    /// When it is asked next whether a rank that left is to blame.
    blame: Instant,
    /// How long nothing may move before somebody is told.
    untold: Duration,
}

impl Progress {
    fn now(marker: u64) -> Self {
        let since = Instant::now();
        Self { marker, since, blame: since + STANDSTILL, untold: PATIENCE_UNTOLD }
    }
}

struct Watch {
    shared: Arc<Shared>,
    connection: Connection,
    /// The switch that admitted the rank, as opposed to one that took its place.
    switch_instance: u64,
    left: Ranks,
    /// Since when the switch does not answer, and what was the matter last.
    silent: Option<(Instant, String)>,
    progress: Progress,
    /// What the switch says unasked.
    news: mpsc::Receiver<News>,
}

/// Watches a session until it ends. Runs on the session's own runtime, which is all that may stop it.
pub(super) async fn watch(
    shared: Arc<Shared>,
    connection: Connection,
    switch_instance: u64,
    news: mpsc::Receiver<News>,
) {
    let interval = shared.member.heartbeat_timeout / HEARTBEATS_PER_TIMEOUT;
    let progress = Progress::now(shared.driver.progress_marker());
    let mut watch =
        Watch { shared, connection, switch_instance, left: Ranks::default(), silent: None, progress, news };
    if let Err(error) = watch.run(interval).await {
        watch.shared.fail(error);
        // The rank still lives: a switch that does not hear so would blame it for what another one did.
        watch.linger(interval).await;
    }
}

impl Watch {
    async fn run(&mut self, interval: Duration) -> Result<(), SessionError> {
        let mut next_heartbeat = Instant::now();
        loop {
            if Instant::now() >= next_heartbeat {
                let pulse = self.heartbeat(interval).await;
                next_heartbeat =
                    Instant::now() + if matches!(pulse, Pulse::Unreachable(_)) { RETRY } else { interval };
                self.act_on(pulse).await?;
            }
            self.check_deadline().await?;
            self.check_standstill().await?;
            let pause = next_heartbeat.saturating_duration_since(Instant::now()).min(TICK);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                Some((job, reply)) = self.news.recv() => {
                    // The job before a restart of the switch is no longer this one.
                    if job == self.shared.job() {
                        self.act_on(pulse(reply)).await?;
                    }
                }
            }
        }
    }

    /// Goes on with heartbeats for a session that has failed, until it is closed or the switch forgets it.
    async fn linger(&mut self, interval: Duration) {
        while matches!(self.heartbeat(interval).await, Pulse::Alive { .. } | Pulse::Unreachable(_)) {
            let until = tokio::time::Instant::now() + interval;
            // Heard, so that the stream goes on.
            while tokio::time::timeout_at(until, self.news.recv()).await.is_ok_and(|news| news.is_some()) {}
            tokio::time::sleep_until(until).await;
        }
    }

    async fn heartbeat(&mut self, patience: Duration) -> Pulse {
        let job = self.shared.job();
        let statistics = self.shared.driver.statistics();
        warnings::packets_lost(self.shared.member.rank.0, &self.shared.member.switch, &statistics);
        let rtt = statistics.smoothed_rtt;
        let message = HeartbeatRequest {
            job_id: job.id().0,
            rank: self.shared.member.rank.0.into(),
            generation: job.generation().0.into(),
            smoothed_rtt_ns: u64::try_from(rtt.as_nanos()).ok().filter(|rtt| *rtt > 0),
            passed_on: 0,
        };
        let reply = match timeout(patience.max(RETRY), self.connection.client.heartbeat(message)).await {
            Err(_) => {
                let beyond = match self.shared.config.protocol {
                    Protocol::SwitchMl => "",
                    Protocol::Atp => ", from it or from its upstream",
                };
                return Pulse::Unreachable(format!("no answer to heartbeats{beyond}"));
            }
            Ok(Err(status)) => return Pulse::Unreachable(explain(&status)),
            Ok(Ok(reply)) => reply.into_inner(),
        };
        pulse(reply)
    }

    async fn act_on(&mut self, pulse: Pulse) -> Result<(), SessionError> {
        match pulse {
            Pulse::Alive { left } => {
                self.left = left;
                self.silent = None;
                Ok(())
            }
            Pulse::Aborted(reason) => Err(SessionError::from_abort(reason, &self.shared.member)),
            // It aborted the job so long ago that it forgot why; and this rank did not ask meanwhile.
            Pulse::Forgotten { switch_instance } if switch_instance == self.switch_instance => {
                Err(self.shared.member.expelled())
            }
            Pulse::Forgotten { .. } => self.rejoin().await,
            Pulse::Unreachable(cause) => {
                let since = self.silent.take().map_or_else(Instant::now, |(since, _)| since);
                let gone = since.elapsed();
                if self.patience(since).is_zero() {
                    return Err(self.lost(gone, &cause));
                }
                // The data path goes on meanwhile: it may be only the control connection that suffers.
                self.silent = Some((since, cause));
                Ok(())
            }
        }
    }

    /// How much longer a switch that is gone since then may be gone: no longer than the oldest all-reduce may take.
    fn patience(&self, gone_since: Instant) -> Duration {
        let of_all_reduce = self.shared.timeout();
        let of_switch =
            self.shared.config.switch_timeout.min(of_all_reduce).saturating_sub(gone_since.elapsed());
        let oldest = self.shared.pending.oldest();
        oldest.map_or(of_switch, |oldest| of_all_reduce.saturating_sub(oldest.since.elapsed()).min(of_switch))
    }

    fn lost(&self, gone: Duration, cause: &str) -> SessionError {
        SessionError::SwitchLost {
            switch: self.shared.member.switch.clone(),
            cause: format!("gone for {:.1} s ({cause})", gone.as_secs_f64()),
        }
    }

    /// Joins the job again under a switch that restarted, and goes on where it stopped.
    async fn rejoin(&mut self) -> Result<(), SessionError> {
        let since = self.silent.take().map_or_else(Instant::now, |(since, _)| since);
        let completed = self.shared.driver.suspend();
        let memory = Memory { job: self.shared.job(), completed };
        tracing::warn!(
            switch = self.shared.member.switch,
            rank = self.shared.member.rank.0,
            "the switch restarted; joining again"
        );
        warnings::switch_restarted(self.shared.member.rank.0, &self.shared.member.switch);
        loop {
            let left = self.patience(since);
            let cause = match join(&mut self.connection, &self.shared.config, left, Some(&memory)).await {
                Ok(admitted) => {
                    let resumed =
                        self.shared.driver.resume(admitted.job, self.connection.address, &admitted.restore);
                    if let Err(error) = resumed {
                        // The place is this rank's now, and the others would wait for it.
                        leave(&mut self.connection, admitted.job.id(), self.shared.member.rank).await;
                        return Err(self.lost(since.elapsed(), &error.to_string()));
                    }
                    self.shared.set_job(admitted.job);
                    self.switch_instance = admitted.switch_instance;
                    self.progress = Progress::now(self.shared.driver.progress_marker());
                    tracing::info!(generation = admitted.job.generation().0, "joined again");
                    return Ok(());
                }
                Err(SessionError::JoinTimeout { missing_ranks, .. }) => {
                    let who = if missing_ranks.is_empty() {
                        "some ranks".into()
                    } else {
                        format!("rank {missing_ranks}")
                    };
                    return Err(
                        self.lost(since.elapsed(), &format!("it restarted, but {who} did not join again"))
                    );
                }
                Err(SessionError::SwitchLost { cause, .. }) => cause,
                // By this rank, whose question the server has not seen end: the switch that passed it on is cut off.
                Err(SessionError::JoinRefused { reason: reason @ Refusal::DuplicateRank { .. }, .. }) => {
                    reason.to_string()
                }
                // The server is away again, or still, behind a switch that is not.
                Err(SessionError::Chain {
                    error: error @ ChainError::UpstreamUnreachable { .. }, ..
                }) => error.to_string(),
                Err(error) => return Err(error),
            };
            if self.patience(since).is_zero() {
                return Err(self.lost(since.elapsed(), &cause));
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Ends the session when the oldest all-reduce took too long, and asks the switch whom to blame.
    async fn check_deadline(&mut self) -> Result<(), SessionError> {
        let Some(oldest) = self.shared.pending.oldest() else { return Ok(()) };
        let waited = oldest.since.elapsed();
        if waited < self.shared.timeout() {
            return Ok(());
        }
        if let Some((since, cause)) = &self.silent {
            return Err(self.lost(since.elapsed(), cause));
        }
        Err(SessionError::AllReduceTimeout {
            missing_ranks: self.awaited().await.unwrap_or_default(),
            waited,
            switch: self.shared.member.switch.clone(),
            tensor: oldest.tensor,
        })
    }

    /// When nothing moves: ends the session if it waits in vain for a rank that left, and says now and then for whom it waits.
    async fn check_standstill(&mut self) -> Result<(), SessionError> {
        let marker = self.shared.driver.progress_marker();
        let Some(oldest) = self.shared.pending.oldest().filter(|_| marker == self.progress.marker) else {
            self.progress = Progress::now(marker);
            return Ok(());
        };
        let now = Instant::now();
        let stands = now - self.progress.since;
        if stands >= self.progress.untold {
            self.progress.untold *= 2;
            if let Some(awaited) = self.awaited().await.filter(|awaited| !awaited.is_empty()) {
                let rank = self.shared.member.rank.0;
                say(rank, &still_waiting(stands, awaited, &oldest.tensor, self.shared.timeout()));
            }
        }
        if self.left.is_empty() || now < self.progress.blame {
            return Ok(());
        }
        // A rank that left after it gave all it owed is not to blame: only one that a slot waits for.
        let awaited = self.awaited().await.unwrap_or_default();
        let to_blame: Option<WorkerId> = awaited.iter().find(|rank| self.left.contains(*rank));
        self.progress.blame = now + STANDSTILL;
        to_blame.map_or(Ok(()), |rank| Err(SessionError::RankLeft { rank }))
    }

    /// The ranks whose contributions the switch waits for; `None` when it does not say.
    async fn awaited(&mut self) -> Option<Ranks> {
        let question = StatusRequest { job: Some(self.shared.config.job.clone()), passed_on: 0 };
        let reply = timeout(STATUS_PATIENCE, self.connection.client.status(question)).await.ok()?.ok()?;
        let status = SwitchStatus::try_from(reply.into_inner()).ok()?;
        let id = self.shared.job().id();
        status.jobs.into_iter().find_map(|job| match job.state {
            JobStatusState::Running { job, waiting_for, .. } if job == id => {
                Some(waiting_for.into_iter().map(|(rank, _)| rank).collect())
            }
            _ => None,
        })
    }
}

/// What a reply of the switch means.
fn pulse(reply: HeartbeatReply) -> Pulse {
    match reply.state {
        Some(State::Alive(alive)) => Pulse::Alive { left: Ranks(alive.left) },
        Some(State::Unknown(_)) => Pulse::Forgotten { switch_instance: reply.switch_instance },
        Some(State::Aborted(reason)) => match reason.try_into() {
            Ok(reason) => Pulse::Aborted(reason),
            Err(malformed) => Pulse::Unreachable(malformed.to_string()),
        },
        None => Pulse::Unreachable("an answer without a state".into()),
    }
}

/// What is said of an all-reduce that waits for ranks of which the switch knows that they live.
fn still_waiting(stands: Duration, awaited: Ranks, tensor: &Tensor, timeout: Duration) -> String {
    format!(
        "waiting for {} in {tensor} for {} s; connected but silent: stopped, or busy elsewhere? (timeout {} s)",
        named(awaited),
        stands.as_secs(),
        timeout.as_secs(),
    )
}
