//! The task that keeps a session honest at one service: heartbeats, and the service's return.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fanin_protocol::control::{Ranks, Refusal};
use fanin_wire::{AbortReason, Rank};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::admission::{Admitted, Memory, join, leave};
use super::config::SessionConfig;
use super::presence::News;
use super::shared::{Again, STAYS_FOR_OTHERS, Shared};
use super::warnings;
use crate::control_channel::{Connection, GREETED_WITHIN, RETRY, STAYS_AWAY, explain, is_gone};
use crate::convert::{ranks, substitute};
use crate::error::{ChainError, SessionError};
use crate::error::{Member, absent};
use crate::proto::heartbeat_reply::State;
use crate::proto::{HeartbeatReply, HeartbeatRequest};

/// How long a service may be gone before another one of the job takes over.
const TAKE_OVER: Duration = Duration::from_secs(3);
/// Heartbeats within the timeout after which the switch expels a silent rank: four may be lost.
pub const HEARTBEATS_PER_TIMEOUT: u32 = 5;

/// What a heartbeat found.
enum Pulse {
    Alive {
        left: Ranks,
        others_behind: bool,
    },
    /// The switch does not know the job.
    Forgotten {
        switch_instance: u64,
    },
    /// The job is set up again, and its ranks join again.
    SetUpAgain,
    Aborted(AbortReason),
    Unreachable(String),
}

struct Watch {
    shared: Arc<Shared>,
    service: usize,
    /// The switch that admitted the rank, as opposed to one that took its place.
    switch_instance: u64,
    /// Between two heartbeats: of the service where the lane is now.
    interval: Duration,
    /// Whether nobody listened there when it was asked last: its process is gone. One that does not
    /// answer may be stopped.
    is_dead: bool,
    /// Whether the rank asks another machine than the one where it joined last.
    has_moved: bool,
    /// Until when the switch is asked more often: the rank joined again not long ago.
    settles_until: Instant,
    /// Whether the switch was told last that the rank is behind.
    told_behind: bool,
    /// When the switch was told last what the rank did.
    told_work: Option<Instant>,
    /// What the switch says unasked.
    news: mpsc::Receiver<News>,
}

/// Watches a session at one service until it ends. Runs on the session's own runtime, which is all
/// that may stop it.
pub(super) async fn watch(
    shared: Arc<Shared>,
    service: usize,
    switch_instance: u64,
    news: mpsc::Receiver<News>,
) {
    let interval = shared.members[service].heartbeat_timeout / HEARTBEATS_PER_TIMEOUT;
    let mut watch = Watch {
        shared,
        service,
        switch_instance,
        interval,
        is_dead: false,
        has_moved: false,
        settles_until: Instant::now(),
        told_behind: false,
        told_work: None,
        news,
    };
    if let Err(error) = watch.run().await {
        watch.shared.fail(error);
        // The rank still lives: a switch that does not hear so would blame it for what another one
        // did.
        watch.linger().await;
    }
}

impl Watch {
    async fn run(&mut self) -> Result<(), SessionError> {
        let mut next_heartbeat = Instant::now();
        loop {
            if Instant::now() >= next_heartbeat {
                let pulse = self.heartbeat().await;
                next_heartbeat = Instant::now()
                    + if matches!(pulse, Pulse::Unreachable(_)) { RETRY } else { self.interval };
                self.act_on(pulse).await?;
            }
            if self.is_unsettled() {
                next_heartbeat = next_heartbeat.min(Instant::now() + RETRY);
            }
            let pause = next_heartbeat.saturating_duration_since(Instant::now());
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                Some((job, reply)) = self.news.recv() => {
                    // The job before a restart of the switch is no longer this one.
                    if job == self.shared.job(self.service) {
                        self.act_on(pulse(reply)).await?;
                    }
                }
            }
        }
    }

    /// Whether ranks tell each other, by heartbeats, who has caught up since they joined again. They
    /// do so often for a while, and then as usual.
    fn is_unsettled(&self) -> bool {
        Instant::now() < self.settles_until
            && (self.told_behind || self.shared.lane(self.service).others_behind)
    }

    /// Goes on with heartbeats for a session that has failed, until it is closed or the switch
    /// forgets it.
    async fn linger(&mut self) {
        while matches!(self.heartbeat().await, Pulse::Alive { .. } | Pulse::Unreachable(_)) {
            let until = tokio::time::Instant::now() + self.interval;
            // Heard, so that the stream goes on.
            while tokio::time::timeout_at(until, self.news.recv()).await.is_ok_and(|news| news.is_some()) {}
            tokio::time::sleep_until(until).await;
        }
    }

    async fn heartbeat(&mut self) -> Pulse {
        let job = self.shared.job(self.service);
        let (statistics, _) = self.shared.driver.latest_statistics_of(self.service);
        warnings::packets_lost(self.own_name(), &self.member().switch, &statistics);
        self.hold_against_plan();
        let (rtt, now) = (statistics.smoothed_rtt, Instant::now());
        self.told_behind = self.shared.is_behind(self.service);
        let message = HeartbeatRequest {
            job_id: job.id().0,
            rank: self.shared.rank.0.into(),
            generation: job.generation().0.into(),
            smoothed_rtt_ns: u64::try_from(rtt.as_nanos()).ok().filter(|rtt| *rtt > 0),
            passed_on: 0,
            secret: job.key().secret_of(self.shared.rank),
            seconds_per_byte: self.shared.pending.seconds_per_byte(),
            imbalance: self.shared.driver.imbalance(),
            host: crate::path::host(self.connection().address),
            behind: self.told_behind,
            work: Some(self.shared.pending.work(self.told_work.replace(now), now)),
        };
        let reply = match timeout(self.interval.max(RETRY), self.connection().client.heartbeat(message)).await
        {
            Err(_) => {
                self.is_dead = false;
                let is_root = self.shared.lane(self.service).way.is_empty();
                let beyond = if is_root { "" } else { ", from it or from its upstream" };
                return Pulse::Unreachable(format!("no answer to heartbeats{beyond}"));
            }
            Ok(Err(status)) => {
                let is_dead = is_gone(&status) || self.root_is_gone().await;
                if is_dead && !self.is_dead && self.may_be_taken_over() {
                    // Until now it only did not answer, which may last longer.
                    self.shared.lane(self.service).silent = None;
                }
                self.is_dead = is_dead;
                return Pulse::Unreachable(explain(&status));
            }
            Ok(Ok(reply)) => {
                self.is_dead = false;
                reply.into_inner()
            }
        };
        pulse(reply)
    }

    /// Whether the process of a root behind switches is gone, so that another service can take over.
    /// The switch next to the rank lives, and says that it does not answer.
    async fn root_is_gone(&self) -> bool {
        let root = self.shared.lane(self.service).way.last().copied();
        let Some(root) = root.filter(|_| self.may_be_taken_over()) else { return false };
        let asked = timeout(GREETED_WITHIN, TcpStream::connect(root)).await;
        asked.is_ok_and(|asked| asked.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused))
    }

    /// Rank 0 says if the plan does not fit: what it sees, all see.
    fn hold_against_plan(&self) {
        let config = &self.shared.config;
        let Some(planned) = config.prediction.as_ref().filter(|_| self.own_name() == 0) else { return };
        // A service that took over does more than was planned.
        let is_as_planned = self.shared.lanes().all(|lane| lane.name == config.job);
        if is_as_planned && let Some(measured) = self.shared.pending.misfit() {
            warnings::plan_does_not_fit(0, planned, measured, &config.links);
        }
    }

    async fn act_on(&mut self, pulse: Pulse) -> Result<(), SessionError> {
        match pulse {
            Pulse::Alive { left, others_behind } => {
                let mut lane = self.shared.lane(self.service);
                (lane.left, lane.silent, lane.others_behind) = (left, None, others_behind);
                Ok(())
            }
            // The service of a rank that left goes with it.
            Pulse::Aborted(reason) => {
                let host = self.left().filter(|rank| self.shared.hosts(*rank, self.service));
                let host = host.filter(|_| reason == AbortReason::SwitchStopped);
                Err(host.map_or_else(
                    || SessionError::from_abort(reason, self.member()),
                    |rank| SessionError::RankLeft { rank },
                ))
            }
            // It aborted the job so long ago that it forgot why; and this rank did not ask
            // meanwhile.
            Pulse::Forgotten { switch_instance } if switch_instance == self.switch_instance => {
                Err(self.member().expelled())
            }
            Pulse::Forgotten { .. } => self.rejoin(Again::SwitchRestarted).await,
            Pulse::SetUpAgain => self.rejoin(Again::SetUp).await,
            Pulse::Unreachable(cause) => {
                let since = self.silent_since();
                let gone = since.elapsed();
                if self.patience(since).is_zero() {
                    return Err(self.lost(gone, &cause));
                }
                // The data path goes on meanwhile: it may be only the control connection that
                // suffers.
                self.shared.lane(self.service).silent = Some((since, cause.clone()));
                if self.is_dead && self.may_be_taken_over() && gone >= TAKE_OVER {
                    // Who left does not join anywhere again.
                    if let Some(rank) = self.left() {
                        return match self.shared.pending.oldest() {
                            Some(_) if self.shared.hosts(rank, self.service) => {
                                Err(SessionError::RankLeft { rank })
                            }
                            Some(_) => {
                                let rank = self.shared.config.names.of(rank);
                                Err(died(&self.member().switch, &cause, rank))
                            }
                            None => Ok(()),
                        };
                    }
                    if !self.shared.begins_to_rejoin(self.service, Again::SwitchRestarted) {
                        return Ok(());
                    }
                    let taken_over = match self.suspended(since).await {
                        Ok(memory) => self.take_over(since, &memory).await,
                        Err(error) => Err(error),
                    };
                    self.shared.lane(self.service).rejoining = None;
                    return taken_over;
                }
                if gone >= self.stays_away() {
                    self.go_around(&cause).await?;
                }
                Ok(())
            }
        }
    }

    /// How long the switch next to the rank may be away before the rank asks the next one. The
    /// root hears nothing of the rank meanwhile.
    fn stays_away(&self) -> Duration {
        STAYS_AWAY.min(self.interval * HEARTBEATS_PER_TIMEOUT / 2)
    }

    /// Asks the next machine on the way from now on, if the switch that was asked does not answer.
    /// The root sees that the rank comes by another way, and has the job set up again.
    async fn go_around(&mut self, cause: &str) -> Result<(), SessionError> {
        let Some(connection) = self.next_that_answers().await else { return Ok(()) };
        // A rank that left does not join again.
        if let Some(rank) = self.left() {
            let rank = self.shared.config.names.of(rank);
            let lost = self.shared.pending.oldest().map(|_| died(&self.member().switch, cause, rank));
            return lost.map_or(Ok(()), Err);
        }
        let mut lane = self.shared.lane(self.service);
        let (away, by) = (&lane.connection.switch, &connection.switch);
        tracing::warn!(switch = away, by, rank = self.shared.rank.0, "the switch stays away");
        warnings::goes_around(self.own_name(), away, by);
        lane.connection = connection;
        self.has_moved = true;
        Ok(())
    }

    /// The next machine on the way that answers; `None` if the one does that is asked now. A switch
    /// answers a greeting by itself. If it does, one above it is silent, and it finds its own way.
    async fn next_that_answers(&self) -> Option<Connection> {
        let (asked, way) = {
            let lane = self.shared.lane(self.service);
            (lane.connection.switch.clone(), lane.way.clone())
        };
        let first = Some(&self.member().switch).filter(|first| **first != asked);
        let others: Vec<String> =
            first.cloned().into_iter().chain(way.iter().map(SocketAddr::to_string)).collect();
        let trust = &self.shared.config.trust;
        let is_asked_in_vain = others.is_empty()
            || !self.is_dead && Connection::open(&asked, GREETED_WITHIN, trust).await.is_ok();
        if is_asked_in_vain {
            return None;
        }
        for other in others {
            match Connection::open(&other, GREETED_WITHIN, trust).await {
                Ok((connection, _)) => return Some(connection),
                Err(error) => tracing::debug!(%error, "no way around the switch"),
            }
        }
        None
    }

    /// How much longer a switch that is gone since then may be gone: no longer than the oldest
    /// all-reduce may take. One of several that only does not answer may be in the process of a
    /// rank that is stopped, which is waited for as such.
    fn patience(&self, gone_since: Instant) -> Duration {
        let of_all_reduce = self.shared.timeout();
        let may_be_a_rank = self.may_be_taken_over() && !self.is_dead;
        let of_switch = if may_be_a_rank || self.is_set_up_again() {
            of_all_reduce
        } else {
            self.shared.config.switch_timeout
        };
        let of_switch = of_switch.min(of_all_reduce).saturating_sub(gone_since.elapsed());
        let oldest = self.shared.pending.oldest();
        oldest.map_or(of_switch, |oldest| of_all_reduce.saturating_sub(oldest.since.elapsed()).min(of_switch))
    }

    /// A rank that has left, as some service knows: the one that hosts this service, if it is among
    /// them.
    fn left(&self) -> Option<Rank> {
        let left = self.shared.left();
        left.iter().find(|rank| self.shared.hosts(*rank, self.service)).or_else(|| left.iter().next())
    }

    fn connection(&self) -> Connection {
        self.shared.lane(self.service).connection.clone()
    }

    fn own_name(&self) -> u16 {
        self.shared.config.own_name().0
    }

    fn member(&self) -> &Member {
        &self.shared.members[self.service]
    }

    /// Since when the service is gone.
    fn silent_since(&self) -> Instant {
        self.shared.lane(self.service).silent.take().map_or_else(Instant::now, |(since, _)| since)
    }

    /// Whether the job is set up again: other ranks are waited for, and not a switch.
    fn is_set_up_again(&self) -> bool {
        self.shared.lane(self.service).rejoining == Some(Again::SetUp)
    }

    fn lost(&self, gone: Duration, cause: &str) -> SessionError {
        lost(&self.member().switch, gone, cause)
    }

    /// Joins the job again, and goes on where it stopped.
    async fn rejoin(&mut self, again: Again) -> Result<(), SessionError> {
        if !self.shared.begins_to_rejoin(self.service, again) {
            return Ok(());
        }
        let since = self.silent_since();
        let (switch, rank) = (&self.member().switch, self.shared.rank.0);
        match again {
            Again::SwitchRestarted => {
                tracing::warn!(switch, rank, "the switch restarted; joining again");
                warnings::switch_restarted(self.own_name(), switch);
            }
            Again::SetUp => tracing::warn!(switch, rank, "the job is set up again; joining again"),
        }
        let rejoined = match self.suspended(since).await {
            Ok(memory) => self.rejoin_in_time(since, &memory).await,
            Err(error) => Err(error),
        };
        self.shared.lane(self.service).rejoining = None;
        rejoined
    }

    /// Stops the lane. Returns what its service must be told to go on, wherever that is.
    async fn suspended(&self, since: Instant) -> Result<Memory, SessionError> {
        let service = self.service;
        let completed = self.asked(since, move |shared| shared.driver.suspend(service)).await?;
        Ok(Memory { job: self.shared.job(self.service), completed })
    }

    /// What the data path answers, whose threads may stand still: heartbeats and deadlines do not
    /// wait for them.
    async fn asked<T: Send + 'static>(
        &self,
        since: Instant,
        question: impl FnOnce(&Shared) -> T + Send + 'static,
    ) -> Result<T, SessionError> {
        let shared = Arc::clone(&self.shared);
        let answer = spawn_blocking(move || question(&shared));
        let stands = |cause: String| SessionError::Local { what: "the data path", cause };
        match timeout(self.patience(since).max(RETRY), answer).await {
            Ok(answer) => answer.map_err(|error| stands(error.to_string())),
            Err(_) => {
                Err(stands("one of its threads stands still; is something blocked in a callback?".into()))
            }
        }
    }

    async fn rejoin_in_time(&mut self, since: Instant, memory: &Memory) -> Result<(), SessionError> {
        let mut fails_since = None;
        loop {
            let left = self.patience(since);
            // Ranks that came too late for it wait where another service takes over.
            let may_be_taken_over = self.may_be_taken_over() && !self.is_set_up_again();
            let left = if may_be_taken_over { left.min(TAKE_OVER) } else { left };
            // Two statements: each locks the lane.
            let name = self.shared.lane(self.service).name.clone();
            let connection = self.connection();
            let cause = match self.join_at(name, connection, left, memory).await {
                Ok(admitted) => return self.go_on(admitted, since).await,
                Err(SessionError::JoinTimeout { missing_ranks, gone, .. }) => {
                    if may_be_taken_over {
                        return self.take_over(since, memory).await;
                    }
                    return self.incomplete(since, memory, (missing_ranks, gone)).await;
                }
                // It has no room any more, or fewer shards than before.
                Err(SessionError::JoinRefused { reason, .. })
                    if self.may_be_taken_over() && !matches!(reason, Refusal::DuplicateRank { .. }) =>
                {
                    return self.take_over(since, memory).await;
                }
                Err(error) => passing(error)?,
            };
            if self.patience(since).is_zero() {
                return Err(self.lost(since.elapsed(), &cause));
            }
            let fails_since = *fails_since.get_or_insert_with(Instant::now);
            if fails_since.elapsed() >= self.stays_away() {
                self.go_around(&cause).await?;
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// These ranks of a job did not join again, and these have gone: the job goes on as it was, or
    /// is over.
    async fn incomplete(
        &mut self,
        since: Instant,
        memory: &Memory,
        (missing, gone): (Ranks, Ranks),
    ) -> Result<(), SessionError> {
        let [missing, gone] = [missing, gone].map(|ranks| self.shared.config.names.all(&ranks));
        let absent = absent(&missing, &gone, "join again");
        if !self.is_set_up_again() {
            return Err(self.lost(since.elapsed(), &format!("it restarted, but {absent}")));
        }
        match self.heartbeat().await {
            // This reason says more than the list of who did not come.
            Pulse::Aborted(reason) => return Err(SessionError::from_abort(reason, self.member())),
            // A rank left, with all that it needs. Where sums are counted, only a new job goes on.
            Pulse::Alive { left, .. } if !self.has_moved && memory.completed.iter().all(Vec::is_empty) => {
                let (service, job, shards) = (self.service, memory.job.clone(), memory.completed.len());
                let address = self.connection().address;
                let resumed = move |shared: &Shared| shared.driver.resume(service, job, shards, address);
                let resumed = self.asked(since, resumed).await?;
                resumed.map_err(|error| self.lost(since.elapsed(), &error.to_string()))?;
                self.shared.lane(self.service).left = left;
                return Ok(());
            }
            _ => {}
        }
        let cause = format!("a switch of the job stays away, or there is another plan, and {absent}");
        Err(SessionError::SwitchLost { switch: self.member().switch.clone(), cause })
    }

    /// Whether the job has other services, which can do what this one did.
    fn may_be_taken_over(&self) -> bool {
        self.shared.members.len() > 1
    }

    /// Lets another service of the job go on with what this one summed: the next one in their order
    /// that lives and can. Its own turn comes as well, as it may be back. Ranks that ask different
    /// ones wait for each other in vain, and ask on; none goes on before all are there.
    async fn take_over(&mut self, since: Instant, memory: &Memory) -> Result<(), SessionError> {
        let count = self.shared.members.len();
        let mut cause = String::from("no other service could take over");
        for other in (1..=count).cycle().map(|step| (self.service + step) % count) {
            let left = self.patience(since);
            if left.is_zero() {
                return Err(self.lost(since.elapsed(), &cause));
            }
            let switch = self.shared.members[other].switch.clone();
            let is_itself = other == self.service;
            if !is_itself && self.shared.lane(other).silent.is_some() {
                tokio::time::sleep(RETRY).await;
                continue;
            }
            // Ranks may have noticed one after the other, within a few heartbeats. Where the old
            // one is, nobody waits for long.
            let (name, reach, patience) = if is_itself {
                (self.shared.config.job.clone(), RETRY, TAKE_OVER)
            } else {
                (substitute(&self.shared.config.job, self.service), TAKE_OVER, 4 * TAKE_OVER)
            };
            let connection = match Connection::open(&switch, left.min(reach), &self.shared.config.trust).await
            {
                Ok((connection, _)) => connection,
                Err(error) => {
                    cause = error.to_string();
                    continue;
                }
            };
            cause = match self.join_at(name, connection, left.min(patience), memory).await {
                Ok(admitted) => {
                    if !is_itself {
                        warnings::taken_over(self.own_name(), &self.member().switch, &switch);
                    }
                    return self.go_on(admitted, since).await;
                }
                Err(error @ SessionError::JoinTimeout { .. }) => error.to_string(),
                // It has no room for it, or too few shards: the next one may.
                Err(error @ SessionError::JoinRefused { .. }) => error.to_string(),
                Err(error) => passing(error)?,
            };
            tokio::time::sleep(RETRY).await;
        }
        Err(self.lost(since.elapsed(), &cause))
    }

    /// Joins the job under a name at a service.
    async fn join_at(
        &self,
        name: String,
        mut connection: Connection,
        patience: Duration,
        memory: &Memory,
    ) -> Result<(Admitted, String, Connection), SessionError> {
        let service = &self.shared.config.services[self.service];
        let config = SessionConfig { job: name, ..self.shared.config.clone() };
        let admitted = join(&mut connection, &config, service, patience, Some(memory)).await?;
        Ok((admitted, config.job, connection))
    }

    /// Lets the lane go on as it was admitted.
    async fn go_on(
        &mut self,
        (admitted, name, mut connection): (Admitted, String, Connection),
        since: Instant,
    ) -> Result<(), SessionError> {
        let (service, job, address) = (self.service, admitted.job.clone(), connection.address);
        let shards = admitted.shards;
        let resumed = self.asked(since, move |shared| shared.driver.resume(service, job, shards, address));
        let resumed = resumed
            .await
            .and_then(|resumed| resumed.map_err(|error| self.lost(since.elapsed(), &error.to_string())));
        if let Err(error) = resumed {
            // The place is this rank's now, and the others would wait for it.
            leave(&mut connection, admitted.job.identity(), self.shared.rank).await;
            return Err(error);
        }
        let mut lane = self.shared.lane(self.service);
        (lane.job, lane.name, lane.connection) = (admitted.job.clone(), name, connection);
        lane.way = admitted.way;
        (lane.silent, lane.left, lane.others_behind) = (None, Ranks::default(), true);
        self.settles_until = Instant::now() + STAYS_FOR_OTHERS;
        self.has_moved = false;
        self.switch_instance = admitted.switch_instance;
        self.interval = admitted.heartbeat_timeout / HEARTBEATS_PER_TIMEOUT;
        tracing::info!(generation = admitted.job.generation().0, "joined again");
        Ok(())
    }
}

/// What was the matter, where another attempt may help.
fn passing(error: SessionError) -> Result<String, SessionError> {
    match error {
        SessionError::SwitchLost { cause, .. } => Ok(cause),
        // By this rank, whose question the server has not seen end: the switch that passed it on is
        // cut off.
        SessionError::JoinRefused { reason: reason @ Refusal::DuplicateRank { .. }, .. } => {
            Ok(reason.to_string())
        }
        // Others were there before, who may go: for this job there was a place.
        SessionError::JoinRefused {
            reason: reason @ (Refusal::TooManyJobs { .. } | Refusal::PoolExhausted { .. }),
            ..
        } => Ok(reason.to_string()),
        // The server is away again, or still, behind a switch that is not.
        SessionError::Chain { error: error @ ChainError::UpstreamUnreachable { .. }, .. } => {
            Ok(error.to_string())
        }
        error => Err(error),
    }
}

/// A service died and cannot be taken over, as a rank has left.
pub(super) fn died(switch: &str, cause: &str, rank: Rank) -> SessionError {
    let cause = format!("{cause}; rank {} left, so that no other service takes over", rank.0);
    SessionError::SwitchLost { switch: switch.into(), cause }
}

/// A service that was gone for so long is lost.
pub(super) fn lost(switch: &str, gone: Duration, cause: &str) -> SessionError {
    let cause = format!("gone for {:.1} s ({cause})", gone.as_secs_f64());
    SessionError::SwitchLost { switch: switch.into(), cause }
}

/// What a reply of the switch means.
fn pulse(reply: HeartbeatReply) -> Pulse {
    match reply.state {
        Some(State::Alive(alive)) => match ranks(&alive.left, "left") {
            Ok(left) => Pulse::Alive { left, others_behind: alive.others_behind },
            Err(malformed) => Pulse::Unreachable(malformed.to_string()),
        },
        Some(State::SetUpAgain(_)) => Pulse::SetUpAgain,
        Some(State::Unknown(_)) => Pulse::Forgotten { switch_instance: reply.switch_instance },
        Some(State::Aborted(reason)) => match reason.try_into() {
            Ok(reason) => Pulse::Aborted(reason),
            Err(malformed) => Pulse::Unreachable(malformed.to_string()),
        },
        None => Pulse::Unreachable("an answer without a state".into()),
    }
}
