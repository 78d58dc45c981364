//! A rank's connections to all services that sum its job, from joining to leaving.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fanin_protocol::control::{JOB_NAME_BYTES_MAX, Refusal};
use fanin_udp::{Failure, Service, WorkerConfig, WorkerDriver};
use fanin_wire::{Rank, WorkerId};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use super::admission::{Admitted, FAREWELL, join, leave};
use super::cancel::Cancel;
use super::config::{ServiceConfig, SessionConfig};
use super::oversight::oversee;
use super::presence::{attend, attend_meanwhile};
use super::shared::{Shared, Watched, names};
use super::thread::SessionThread;
use super::trace::{TracedAs, record};
use super::warnings::{self, say};
use super::watch::watch;
use crate::control_channel::{Connection, Lines, RETRY, Waiting};
use crate::convert::{shown, substitute};
use crate::error::{ChainError, Member, SessionError};
use crate::page::{PageServer, Watch};
use crate::proto;

/// How long a new session waits at most until the switch has its stream.
const GREETED: Duration = Duration::from_secs(1);
/// How long a rank is asked for again that another process holds: longer than the neighbours of one
/// that died may stay to be heard (`NOTICED`).
pub(super) const PREDECESSOR: Duration = Duration::from_millis(2500);
/// How long a service may take to answer that listens already.
const HOST_PATIENCE: Duration = Duration::from_secs(10);

/// The services of a job, as this rank has joined them. Dropping it leaves the job: what is
/// outstanding fails with [`SessionError::Closed`], and no tensor is touched any more.
pub(super) struct Services {
    pub shared: Arc<Shared>,
    thread: Arc<SessionThread>,
    /// What watches the job: it ends with the session.
    watching: JoinSet<()>,
}

impl Services {
    /// Finds the services, joins the job at each, and returns when every rank has, until `cancel`
    /// is called.
    pub fn join(config: SessionConfig, cancel: &Cancel) -> Result<Self, SessionError> {
        let thread = SessionThread::shared()?;
        // It may wait for its port, and the thread has other sessions' heartbeats to send.
        let page = page_of_services(&config);
        let joining = join_all(config, page, cancel, &thread.lines);
        let (shared, instances, meanwhile) = thread.block_on(joining)?;
        let mut tasks = JoinSet::new();
        let mut greeted = Vec::new();
        for (service, switch_instance) in instances.into_iter().enumerate() {
            let (news, heard) = mpsc::channel(1);
            let (first, answered) = oneshot::channel();
            greeted.push(answered);
            tasks.spawn_on(attend(Arc::clone(&shared), service, news, first), thread.handle());
            let watching = watch(Arc::clone(&shared), service, switch_instance, heard);
            let failing = Arc::clone(&shared);
            tasks.spawn_on(supervise(watching, move |error| failing.fail(error)), thread.handle());
            // All ranks would hear the same of a service.
            if let Some(trace) = shared.trace.clone().filter(|_| shared.rank == Rank(0)) {
                tasks.spawn_on(record(Arc::clone(&shared), service, trace), thread.handle());
            }
        }
        let failing = Arc::clone(&shared);
        let overseeing = oversee(Arc::clone(&shared));
        tasks.spawn_on(supervise(overseeing, move |error| failing.fail(error)), thread.handle());
        // From here on the switches notice at once when the process dies.
        let all = async {
            let mut first = Ok(());
            for answered in greeted {
                first = first.and(answered.await.unwrap_or(Ok(())));
            }
            first
        };
        let greeted = thread.block_on(async { tokio::time::timeout(GREETED, all).await });
        // Not before the session's own streams are open: the rank would seem to have died.
        drop(meanwhile);
        let switch = shared.switches.clone();
        // Of several services another one takes over, whoever noticed what.
        let is_alone = shared.members.len() == 1;
        let services = Self { shared, thread, watching: tasks };
        match greeted {
            // Other ranks may not have been admitted, and have told that they were not. Nobody has
            // summed anything yet.
            Ok(Err(cause)) if is_alone => {
                drop(services);
                let cause = format!("it ended as the job began: {cause}");
                Err(SessionError::SwitchLost { switch, cause })
            }
            _ => Ok(services),
        }
    }
}

impl Drop for Services {
    fn drop(&mut self) {
        let Self { shared, thread, watching } = self;
        let mut watching = std::mem::take(watching);
        shared.stay_for_others();
        shared.driver.fail(Failure::Because(Arc::new(SessionError::Closed)));
        let leaving = shared.lanes().map(|lane| {
            let (mut connection, job, rank) = (lane.connection.clone(), lane.job.identity(), shared.rank);
            async move { leave(&mut connection, job, rank).await }
        });
        let leaving: JoinSet<()> = thread.block_on(async { leaving.collect() });
        thread.block_on(leaving.join_all());
        // A service may have let the rank in again meanwhile, which leaves that job then.
        shared.wait_while(FAREWELL, || shared.is_rejoining());
        // Not by the thread's own clock, which stands still while the thread is blocked.
        let (tell, ended) = std::sync::mpsc::channel();
        thread.spawn(async move {
            watching.shutdown().await;
            // Nobody may wait any more.
            let _ = tell.send(());
        });
        let _ = ended.recv_timeout(FAREWELL);
        // The watch may be at a question to the data path, and hold it until it is answered.
        shared.driver.stop();
        if let Some(trace) = &shared.trace {
            trace.flush();
        }
    }
}

/// What a rank of the job is, of each service which process of it admitted the rank, and the
/// streams that last until it has others.
async fn join_all(
    config: SessionConfig,
    page: Option<Arc<PageServer>>,
    cancel: &Cancel,
    lines: &Arc<Lines>,
) -> Result<(Arc<Shared>, Vec<u64>, JoinSet<SessionError>), SessionError> {
    let traced_as = if config.ranks_here.is_empty() { TracedAs::Ranks } else { TracedAs::Machines };
    // First of all: a run whose timeline was asked for should not begin without one.
    let trace = config.trace.as_ref().map(|trace| trace.open(&config.job, traced_as)).transpose()?;
    let (joined, meanwhile) = admissions(&config, cancel, lines).await?;
    // The services admitted the rank, so that it fits.
    let rank = Rank(config.rank as u16);
    let services = joined.iter().zip(&config.services).map(|((connection, admitted), service)| Service {
        job: admitted.job.clone(),
        switch: connection.address,
        shards: admitted.shards,
        share: service.share,
        home: service.home.and_then(|rank| u8::try_from(rank.0).ok()).map(WorkerId),
    });
    let driver = WorkerDriver::start(WorkerConfig {
        services: services.collect(),
        retransmission: config.retransmission,
        host: config.host.clone(),
    });
    let driver = match driver {
        Ok(driver) => driver,
        Err(error) => {
            leave_all(joined, rank).await;
            return Err(SessionError::Local { what: "opening the data path", cause: error.to_string() });
        }
    };
    for ((connection, admitted), service) in joined.iter().zip(&config.services) {
        tracing::info!(
            switch = connection.switch,
            job = config.job,
            rank = rank.0,
            protocol = config.protocol.name(),
            share = service.share,
            slots = admitted.job.in_flight(),
            elements = admitted.job.elements(),
            wire_dtype = config.travels_as().name(),
            security = config.agreed.security.name(),
            "joined"
        );
    }
    let members = joined.iter().map(|admitted| member(admitted, rank)).collect();
    let instances = joined.iter().map(|(_, admitted)| admitted.switch_instance).collect();
    let joined = joined.into_iter().map(|(connection, admitted)| (admitted, connection));
    let watched = Watched { trace, page };
    Ok((Arc::new(Shared::new(config, members, driver, watched, joined)), instances, meanwhile))
}

/// The page about the job that the services know.
fn page_of_services(config: &SessionConfig) -> Option<Arc<PageServer>> {
    page(config, || {
        let services = config.services.iter().map(|service| service.switch.clone()).collect();
        Watch::of_services(format!("rank 0 of {}", config.job), services, false, config.trust.clone())
    })
}

/// The page about the job, at rank 0, if it is asked for. A training goes on without one.
pub(super) fn page<F: Future<Output = ()> + Send + 'static>(
    config: &SessionConfig,
    watched: impl Fn() -> (Watch, F),
) -> Option<Arc<PageServer>> {
    let (listen, token) = config.page.filter(|_| config.own_name() == Rank(0))?;
    let page = PageServer::of_process(listen, token, watched);
    page.map_err(|error| say(0, &format!("FANIN_PAGE: {error}; the training goes on without a page"))).ok()
}

fn member((connection, admitted): &(Connection, Admitted), rank: Rank) -> Member {
    Member { switch: connection.switch.clone(), rank, heartbeat_timeout: admitted.heartbeat_timeout }
}

/// Joins the job at all services at once. When one does not admit the rank, or loses another one
/// meanwhile, or it is cancelled, it leaves those that have. One that has admitted it knows that it
/// lives, however long the others take: by the streams that come with the admissions.
async fn admissions(
    config: &SessionConfig,
    cancel: &Cancel,
    lines: &Arc<Lines>,
) -> Result<(Vec<(Connection, Admitted)>, JoinSet<SessionError>), SessionError> {
    if config.services.is_empty() {
        return Err(SessionError::Address { switch: String::new(), cause: "no switch is named".into() });
    }
    if !config.protocol.is_divided() && config.services.len() > 1 {
        let switch = names(config.services.iter().map(|service| service.switch.as_str()));
        return Err(SessionError::Address {
            switch,
            cause: format!("several, and a rank of {} has one switch", config.protocol.name()),
        });
    }
    // Where a service fails, another one takes over, under a longer name.
    let longest = match config.services.len() {
        1 => config.job.len(),
        several => substitute(&config.job, several - 1).len(),
    };
    if longest > JOB_NAME_BYTES_MAX {
        let (switch, job) = (config.services[0].switch.clone(), config.job.clone());
        let reason = Refusal::JobName { bytes: longest };
        return Err(SessionError::JoinRefused { switch, job, reason });
    }
    let mut joining = JoinSet::new();
    for (index, service) in config.services.iter().enumerate() {
        let (config, service, lines) = (config.clone(), service.clone(), Arc::clone(lines));
        joining.spawn(async move {
            let admitted = admission(&config, &service, &lines).await;
            (index, admitted.map_err(|error| because_of_host(config.names.error(error), &service)))
        });
    }
    let (mut joined, mut meanwhile) = (Vec::new(), JoinSet::new());
    loop {
        let error = tokio::select! {
            ended = joining.join_next() => match ended {
                None => break,
                Some(Ok((index, Ok(admitted)))) => {
                    if !joining.is_empty() {
                        // Every service admitted it, so that it fits.
                        let member = member(&admitted, Rank(config.rank as u16));
                        let (connection, job) = (admitted.0.clone(), admitted.1.job.clone());
                        meanwhile.spawn(attend_meanwhile(connection, job, member));
                    }
                    joined.push((index, admitted));
                    continue;
                }
                Some(Ok((_, Err(error)))) => error,
                Some(Err(error)) => SessionError::Local { what: "joining", cause: error.to_string() },
            },
            Some(Ok(lost)) = meanwhile.join_next() => config.names.error(lost),
            cause = cancel.cancelled() => cause,
        };
        // Those that are under way give the places back when they are dropped; some may just have
        // been admitted.
        joining.abort_all();
        while let Some(ended) = joining.join_next().await {
            joined.extend(ended.ok().and_then(|(index, admitted)| Some((index, admitted.ok()?))));
        }
        leave_all(joined.into_iter().map(|(_, admitted)| admitted).collect(), Rank(config.rank as u16)).await;
        return Err(error);
    }
    joined.sort_by_key(|(index, _)| *index);
    Ok((joined.into_iter().map(|(_, admitted)| admitted).collect(), meanwhile))
}

/// A service in a rank's process was there when its address was told: where it is no more, the rank
/// is not.
fn because_of_host(error: SessionError, service: &ServiceConfig) -> SessionError {
    let host = service.host.and_then(|rank| u16::try_from(rank).ok());
    match (host, error) {
        (
            Some(rank),
            SessionError::SwitchUnreachable { .. }
            | SessionError::NotASwitch { .. }
            | SessionError::SwitchLost { .. }
            | SessionError::JoinRefused { reason: Refusal::SwitchStopping, .. },
        ) => SessionError::RankLost { rank: Rank(rank) },
        (_, error) => error,
    }
}

async fn leave_all(joined: Vec<(Connection, Admitted)>, rank: Rank) {
    let leaving = joined.into_iter().map(|(mut connection, admitted)| async move {
        leave(&mut connection, admitted.job.identity(), rank).await;
    });
    leaving.collect::<JoinSet<()>>().join_all().await;
}

/// Finds a switch and joins the job, and says on standard error for what it waits. A rank that is
/// taken is asked for again for a moment: its process may be dying just now, and this one is to
/// take its place.
async fn admission(
    config: &SessionConfig,
    service: &ServiceConfig,
    lines: &Lines,
) -> Result<(Connection, Admitted), SessionError> {
    let began = Instant::now();
    let mut waiting = Waiting::new(config.join_timeout);
    let saying = |text: &str| say(config.own_name().0, text);
    // A switch may still be started; a rank's service listens already, or its process has ended.
    let patience = service.host.map_or(config.join_timeout, |_| config.join_timeout.min(HOST_PATIENCE));
    let (mut connection, _) =
        Connection::open_saying(&service.switch, patience, &config.trust, Some(lines), saying).await?;
    let began_joining = Instant::now();
    let (mut not_yet, mut passed_by) = (None, false);
    loop {
        let left = config.join_timeout.saturating_sub(began.elapsed());
        match join(&mut connection, config, service, left, None).await {
            // The switch next to the rank is there before the server is.
            Err(SessionError::Chain {
                error: error @ ChainError::UpstreamUnreachable { may_come: true, .. },
                job,
            }) => {
                if waiting.is_due(true) {
                    say(config.own_name().0, &waiting.says(&format!("the switches on the way: {error}")));
                }
                not_yet = Some(SessionError::Chain { error, job });
            }
            Err(SessionError::JoinRefused { reason, switch, job })
                if !passed_by && reason == Refusal::of_bound(config.agreed.loss_bound) =>
            {
                // A name may mean another machine here than at the rack.
                passed_by = true;
                let Some(root) = root_behind(&mut connection).await else {
                    return Err(SessionError::JoinRefused { reason, switch, job });
                };
                warnings::passes_by(config.own_name().0, &switch, &root);
                let left = config.join_timeout.saturating_sub(began.elapsed());
                (connection, _) =
                    Connection::open_saying(&root, left, &config.trust, Some(lines), saying).await?;
                continue;
            }
            Err(SessionError::JoinRefused {
                reason: Refusal::JobRunning { .. } | Refusal::DuplicateRank { .. },
                ..
            }) if began_joining.elapsed() < PREDECESSOR.min(config.join_timeout) => {}
            // No answer in what is left of the time, after the chain was not whole: that it was not
            // is the reason.
            Err(SessionError::JoinTimeout { missing_ranks, .. })
                if not_yet.is_some() && missing_ranks.is_empty() => {}
            joined => return Ok((connection, joined?)),
        }
        if began.elapsed() + RETRY >= config.join_timeout
            && let Some(error) = not_yet
        {
            return Err(error);
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// The root that the racks from this one on lead to, as it says; `None` of what is no rack.
async fn root_behind(connection: &mut Connection) -> Option<String> {
    let asked = connection.client.status(proto::StatusRequest::default());
    let reply = tokio::time::timeout(HOST_PATIENCE, asked).await.ok()?.ok()?.into_inner();
    // The last one before the root is named first.
    reply.relays.into_iter().next().map(|relay| shown(relay.upstream))
}

/// Ends the session if its watch panics: nobody else would notice a switch that is gone, or a
/// deadline.
async fn supervise(watching: impl Future<Output = ()> + Send + 'static, fail: impl FnOnce(SessionError)) {
    // Ends the watch where this is dropped, too.
    let mut watch = JoinSet::new();
    watch.spawn(watching);
    if let Some(Err(error)) = watch.join_next().await
        && error.is_panic()
    {
        fail(SessionError::Local { what: "watching the session", cause: error.to_string() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SwitchServer, SwitchServerConfig};

    #[tokio::test]
    async fn a_watch_that_panics_ends_the_session() {
        let mut failed = None;
        supervise(async { panic!("on purpose") }, |error| failed = Some(error)).await;
        assert!(
            matches!(failed, Some(SessionError::Local { what: "watching the session", .. })),
            "{failed:?}"
        );
    }

    #[tokio::test]
    async fn a_watch_that_is_stopped_by_a_close_fails_nothing() {
        let mut watching = JoinSet::new();
        watching.spawn(supervise(std::future::pending(), |error| panic!("{error}")));
        watching.abort_all();
        let ended = watching.join_next().await.expect("it was begun");
        assert!(ended.expect_err("it was stopped").is_cancelled());
    }

    #[test]
    fn a_rank_whose_service_is_gone_is_named_once_in_a_column_too() {
        // Nobody listens there.
        let services = ServiceConfig::all(vec![("127.0.0.1:1".into(), 1.0, None, Some(0))]);
        let (names, join_timeout) = (vec![1, 3].into(), Duration::from_millis(300));
        let config = SessionConfig { services, names, join_timeout, ..SessionConfig::new("", "job", 0, 2) };
        let error = Services::join(config, &Cancel::default()).map(drop);
        assert_eq!(error, Err(SessionError::RankLost { rank: Rank(0) }));
    }

    #[test]
    fn the_end_of_a_session_is_told_once_and_a_close_is_none() {
        let switch =
            SwitchServer::start(SwitchServerConfig::new(([127, 0, 0, 1], 0).into())).expect("a port");
        let told = [true, false].map(|is_lost| {
            let config = SessionConfig::new(switch.address().to_string(), "job", 0, 1);
            let services = Services::join(config, &Cancel::default()).expect("admitted");
            let (tell, told) = std::sync::mpsc::channel();
            let shared = Arc::clone(&services.shared);
            shared.on_failure(Box::new(move |error| tell.send(error).expect("somebody listens")));
            if is_lost {
                shared.fail(SessionError::RankLost { rank: Rank(3) });
            }
            drop(services);
            shared.fail(SessionError::RankLost { rank: Rank(4) });
            told.try_iter().collect::<Vec<_>>()
        });
        assert!(matches!(&told[0][..], [SessionError::RankLost { rank: Rank(3) }]), "{told:?}");
        assert!(told[1].is_empty(), "{told:?}");
    }

    #[test]
    fn sessions_of_a_process_share_a_thread_that_goes_on_for_those_that_stay() {
        let switch =
            SwitchServer::start(SwitchServerConfig::new(([127, 0, 0, 1], 0).into())).expect("a port");
        let services = |job: &str| {
            let config = SessionConfig::new(switch.address().to_string(), job, 0, 1);
            Services::join(config, &Cancel::default()).expect("admitted")
        };
        let (one, other) = (services("one"), services("other"));
        assert!(Arc::ptr_eq(&one.thread, &other.thread));
        drop(one);
        let (tell, told) = std::sync::mpsc::channel();
        other.thread.spawn(async move { tell.send(()) });
        told.recv().expect("the thread goes on for the other session");
        drop(other);
    }

    #[test]
    fn a_session_closes_with_its_threads_although_somebody_still_asks_them() {
        let switch =
            SwitchServer::start(SwitchServerConfig::new(([127, 0, 0, 1], 0).into())).expect("a port");
        let config = SessionConfig::new(switch.address().to_string(), "job", 0, 1);
        let services = Services::join(config, &Cancel::default()).expect("admitted");
        // As the watch does while it asks.
        let held = Arc::clone(&services.shared);
        assert!(held.driver.suspend(0).iter().all(|slots| !slots.is_empty()), "it answers");
        drop(services);
        assert!(held.driver.suspend(0).iter().all(Vec::is_empty), "it has no threads");
    }
}
