//! The task that keeps a session honest as a whole: deadlines, and ranks that left.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fanin_protocol::control::Ranks;
use fanin_wire::Rank;
use tokio::task::{JoinHandle, JoinSet, spawn_blocking};
use tokio::time::timeout;

use super::connection::{Connection, explain, was_refused, with_port};
use super::path::route;
use super::probe::cut_off;
use super::shared::Shared;
use super::status::{JobStatusState, SwitchStatus};
use super::warnings::say;
use super::watch::{died, lost};
use crate::SessionError;
use crate::error::{Tensor, named};
use crate::proto::StatusRequest;

/// How often deadlines are looked at.
const TICK: Duration = Duration::from_millis(100);
/// How long nothing may move before it is asked whether a rank that left is to blame.
const STANDSTILL: Duration = Duration::from_millis(100);
/// How long nothing may move before the rank says for whom it waits, and then after twice as long each time.
const PATIENCE_UNTOLD: Duration = Duration::from_secs(5);
/// How long a switch may take to say whom it waits for.
const STATUS_PATIENCE: Duration = Duration::from_secs(1);

/// How long a service that waits for this rank may take to answer, over TCP and over UDP, when it is asked whether anything can get there.
const WAY_PATIENCE: Duration = Duration::from_secs(2);

/// When a session last saw something move.
struct Progress {
    marker: u64,
    since: Instant,
    /// When it is asked next whether a rank that left is to blame.
    blame: Instant,
    /// How long nothing may move before somebody is told.
    untold: Duration,
    /// Looks whether this rank is cut off from a service that waits for it.
    probing: Option<JoinHandle<Option<CutOff>>>,
    /// What was found so, for the first time.
    cut_off: Option<CutOff>,
}

impl Progress {
    fn now(marker: u64) -> Self {
        let since = Instant::now();
        let blame = since + STANDSTILL;
        Self { marker, since, blame, untold: PATIENCE_UNTOLD, probing: None, cut_off: None }
    }
}

/// A service that a rank does not reach any more, and the cause.
struct CutOff {
    switch: String,
    cause: String,
}

struct Oversight {
    shared: Arc<Shared>,
    progress: Progress,
}

/// Oversees a session until it ends. Runs on the session's own runtime, which is all that may stop it.
pub(super) async fn oversee(shared: Arc<Shared>) {
    let progress = Progress::now(shared.driver.progress_marker());
    let mut oversight = Oversight { shared, progress };
    match oversight.run().await {
        Err(error) => oversight.shared.fail(error),
        // The data path may have been the first to know.
        Ok(()) => oversight.shared.tell_failure(),
    }
}

impl Oversight {
    async fn run(&mut self) -> Result<(), SessionError> {
        loop {
            tokio::time::sleep(TICK).await;
            if self.shared.driver.failure().is_some() {
                return Ok(());
            }
            // Who is at joining again has a patience of its own, and more to say.
            if self.shared.lanes().any(|lane| lane.is_rejoining) {
                self.progress = Progress::now(self.shared.driver.progress_marker());
                continue;
            }
            self.check_deadline().await?;
            self.check_standstill().await?;
        }
    }

    /// Ends the session when the oldest all-reduce took too long, and asks the switch whom to blame.
    async fn check_deadline(&mut self) -> Result<(), SessionError> {
        let Some(oldest) = self.shared.pending.oldest() else { return Ok(()) };
        let waited = oldest.since.elapsed();
        if waited < self.shared.timeout() {
            return Ok(());
        }
        for (member, lane) in self.shared.members.iter().zip(self.shared.lanes()) {
            if let Some((since, cause)) = &lane.silent {
                return Err(lost(&member.switch, since.elapsed(), cause));
            }
        }
        Err(SessionError::AllReduceTimeout {
            missing_ranks: self.awaited().await,
            waited,
            switch: self.shared.switches(),
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
            let awaited = self.awaited_by_each().await;
            self.probe_who_waits_for_us(&awaited);
            let awaited: Ranks = awaited.iter().flat_map(Ranks::iter).collect();
            if !awaited.is_empty() {
                let awaited = self.shared.config.names(&awaited);
                say(
                    self.shared.config.own_name().0,
                    &still_waiting(stands, &awaited, &oldest.tensor, self.shared.timeout()),
                );
            }
        }
        self.check_probe(stands).await?;
        let left = self.shared.left();
        if left.is_empty() || now < self.progress.blame {
            return Ok(());
        }
        // A rank that left after it gave all it owed is not to blame: only one that a slot waits for.
        let awaited = self.awaited().await;
        let to_blame: Option<Rank> = awaited.iter().find(|rank| left.contains(*rank));
        self.progress.blame = now + STANDSTILL;
        let Some(rank) = to_blame else { return Ok(()) };
        Err(self.why_left(rank, &left).await)
    }

    /// That a rank left, or the service that died before: ranks that were not admitted there yet left for that, and so nobody can take over.
    /// The services of those who left went with them.
    async fn why_left(&self, rank: Rank, left: &Ranks) -> SessionError {
        let mut asked = JoinSet::new();
        let went = |service| left.iter().any(|rank| self.shared.hosts(rank, service));
        for (service, lane) in self.shared.lanes().enumerate().filter(|(service, _)| !went(*service)) {
            let mut client = lane.connection.client.clone();
            let greeting = StatusRequest { job: Some(String::new()), passed_on: 0 };
            asked.spawn(async move {
                let reply = timeout(STATUS_PATIENCE, client.status(greeting)).await.ok()?;
                reply.err().filter(was_refused).map(|status| (service, explain(&status)))
            });
        }
        while let Some(answer) = asked.join_next().await {
            if let Some((service, cause)) = answer.ok().flatten() {
                let rank = self.shared.config.name(rank);
                return died(&self.shared.members[service].switch, &cause, rank);
            }
        }
        SessionError::RankLeft { rank }
    }

    /// A service that waits for this rank although nothing moves here may not get its packets, or this rank not what it sends.
    fn probe_who_waits_for_us(&mut self, awaited: &[Ranks]) {
        if self.progress.probing.is_some() {
            return;
        }
        let rank = self.shared.rank;
        let suspects = self.shared.lanes().zip(awaited).filter(|(_, awaited)| awaited.contains(rank));
        let suspects: Vec<_> = suspects.map(|(lane, _)| lane.connection.clone()).collect();
        if suspects.is_empty() {
            return;
        }
        let look = move || {
            suspects.into_iter().find_map(|Connection { switch, address, .. }| {
                let here = route(address).map(|route| route.local.to_string()).unwrap_or_default();
                let cause = cut_off(&switch, WAY_PATIENCE)?;
                Some(CutOff { switch, cause: format!("{cause}, from {here}") })
            })
        };
        self.progress.probing = Some(spawn_blocking(look));
    }

    /// Ends the session when this rank was cut off twice from a service, seconds apart, and nothing moved in between.
    async fn check_probe(&mut self, stands: Duration) -> Result<(), SessionError> {
        let Some(probing) = self.progress.probing.take_if(|probing| probing.is_finished()) else {
            return Ok(());
        };
        let found = probing.await.ok().flatten();
        let before = self.progress.cut_off.take();
        let Some(found) = found else { return Ok(()) };
        if before.is_some_and(|before| before.switch == found.switch) {
            let CutOff { switch, cause } = found;
            let port = with_port(&switch).map_or(0, |(_, port)| port);
            return Err(SessionError::SwitchUnreachable { switch, port, waited: stands, cause });
        }
        say(
            self.shared.config.own_name().0,
            &format!("switch {} waits for this rank, but is cut off ({})", found.switch, found.cause),
        );
        self.progress.cut_off = Some(found);
        Ok(())
    }

    /// The ranks whose contributions some service waits for, as far as the services say.
    async fn awaited(&self) -> Ranks {
        self.awaited_by_each().await.iter().flat_map(Ranks::iter).collect()
    }

    /// The same of each service, in their order; none where it does not say.
    async fn awaited_by_each(&self) -> Vec<Ranks> {
        let mut asked = JoinSet::new();
        for (service, lane) in self.shared.lanes().enumerate() {
            let (mut client, id) = (lane.connection.client.clone(), lane.job.id());
            let question = StatusRequest { job: Some(lane.name.clone()), passed_on: 0 };
            asked.spawn(async move {
                let reply = timeout(STATUS_PATIENCE, client.status(question)).await.ok()?.ok()?;
                let status = SwitchStatus::try_from(reply.into_inner()).ok()?;
                status.jobs.into_iter().find_map(|job| match job.state {
                    JobStatusState::Running { job, waiting_for, .. } if job == id => {
                        Some((service, waiting_for.into_iter().map(|(rank, _)| rank).collect::<Ranks>()))
                    }
                    _ => None,
                })
            });
        }
        let mut awaited = vec![Ranks::default(); asked.len()];
        while let Some(answer) = asked.join_next().await {
            if let Some((service, ranks)) = answer.ok().flatten() {
                awaited[service] = ranks;
            }
        }
        awaited
    }
}

/// What is said of an all-reduce that waits for ranks of which the switch knows that they live.
fn still_waiting(stands: Duration, awaited: &Ranks, tensor: &Tensor, timeout: Duration) -> String {
    format!(
        "waiting for {} in {tensor} for {} s; connected but silent: stopped, or busy elsewhere? (timeout {} s)",
        named(awaited),
        stands.as_secs(),
        timeout.as_secs(),
    )
}
