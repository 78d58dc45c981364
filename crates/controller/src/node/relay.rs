//! A switch with an upstream: what it sums with, and the control connection that it passes on
//! towards the root.
//!
//! A worker knows its own switch alone, and a switch its upstream alone. Each asks the next one
//! what it was asked, adds itself to a request to join, and learns from the answer what it needs to
//! serve the job, before whom it asks for gets the answer. A switch that restarted learns the same
//! from the next heartbeat.

use std::iter;
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fanin_protocol::control::{HOPS_MAX, Memory};
use fanin_protocol::{JobAborted, JobProgress, Reason};
use fanin_udp::{DataPath, Figures, OnSockets, Seat, ThreadEnded};
use fanin_wire::{FRAGMENT_ELEMENTS, Generation, JobId, Rank, VERSION};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status, Streaming};

use super::jobs::{for_log, unhealthy};
use super::limits::{CallRate, STATUS_COUNTS, WaitingJobs, too_many};
use super::routes::{Route, Routes};
use super::service::{MeetReplies, Replies, dropped, hosts, meet_replies, refused, seen_from, traffic};
use super::snapshots::Snapshots;
use super::task_queue::TaskQueue;
use super::{address_of, lock};
use crate::control_channel::{Connection, explain};
use crate::convert::{Malformed, key, narrow};
use crate::error::ChainError;
use crate::path;
use crate::proto::{self, control_server::Control};

mod rack_server;
#[cfg(test)]
mod tests;
mod upstream;

pub use rack_server::{RackServer, RackServerConfig};
use upstream::{Unanswered, Upstream};

/// What the data path has to say, and how its jobs are called.
#[derive(Debug)]
pub(super) struct RelayFigures {
    pub figures: Figures,
    pub names: Vec<(JobId, String)>,
}

/// Elements of the longest fragment: any that a packet can carry.
const ELEMENTS: u16 = FRAGMENT_ELEMENTS[FRAGMENT_ELEMENTS.len() - 1] as u16;
/// How long the upstream may take to answer a connection for a rank that joins.
const JOIN_PATIENCE: Duration = Duration::from_secs(3);
/// How long it may take otherwise: who asks waits a second at most, asks again, and should hear who
/// does not answer.
const PATIENCE: Duration = Duration::from_millis(500);
/// As many calls one of a stranger counts: all of them leave three quarters of what the upstream
/// takes from here to the ranks.
const STRANGER_COUNTS: u32 = 4;

/// What its calls share.
#[derive(Debug)]
struct Relay {
    address: SocketAddr,
    instance: u64,
    protocol: &'static dyn OnSockets,
    memory: Memory,
    /// What its link to the upstream carries, if somebody said so.
    rate_bps: Option<u64>,
    upstream: Upstream,
    driver: Arc<dyn DataPath>,
    tasks: TaskQueue<dyn DataPath>,
    figures: Snapshots<RelayFigures>,
    /// Jobs that the server ended.
    ended: Mutex<Option<Receiver<JobAborted>>>,
    routes: Arc<Mutex<Routes>>,
    /// Calls of whom it does not know: the upstream hears them and those of all ranks here from one
    /// address.
    of_strangers: Mutex<CallRate>,
    /// Jobs of which ranks wait to be admitted, by where they ask from.
    waiting: WaitingJobs,
    /// The streams of ranks end, and say nothing of the ranks.
    stops: watch::Sender<bool>,
}

impl Relay {
    /// The connection to the upstream, a new one where there is none.
    async fn upstream(&self, patience: Duration) -> Result<Connection, ChainError> {
        let connected = self.upstream.connection(patience, self.protocol.name()).await;
        connected.map_err(|Unanswered { cause, may_come }| self.unreachable(&cause, may_come))
    }

    fn unreachable(&self, cause: &str, may_come: bool) -> ChainError {
        ChainError::UpstreamUnreachable {
            switch: self.name(),
            upstream: self.upstream.name(),
            cause: cause.into(),
            may_come,
        }
    }

    /// What became of a call to the upstream: its own answer, if only to refuse, or that there was
    /// none.
    fn answered<R>(&self, reply: Result<Response<R>, Status>) -> Result<R, Failed> {
        match reply {
            Ok(reply) => {
                self.upstream.answered();
                Ok(reply.into_inner())
            }
            // A status that came from there has no source here.
            Err(status)
                if std::error::Error::source(&status).is_none() && status.code() != Code::Cancelled =>
            {
                self.upstream.answered();
                Err(Failed::Refused(status))
            }
            Err(status) => {
                // Its name may lead elsewhere by now.
                self.upstream.broke();
                Err(Failed::Chain(self.unreachable(&explain(&status), true)))
            }
        }
    }

    /// Its address as the upstream sees it, if it listens on all of its own.
    fn name(&self) -> String {
        if !self.address.ip().is_unspecified() {
            return self.address.to_string();
        }
        let ip = self.upstream.address().and_then(path::route).map_or(self.address.ip(), |route| route.local);
        SocketAddr::new(ip, self.address.port()).to_string()
    }

    /// The address that its packets to the upstream leave from.
    fn host(&self, connection: &Connection) -> String {
        match self.address.ip() {
            ip if ip.is_unspecified() => path::host(connection.address),
            ip => ip.to_string(),
        }
    }

    fn mismatch(&self, cause: String) -> ChainError {
        ChainError::RouteMismatch { switch: self.name(), upstream: self.upstream.name(), cause }
    }

    /// Serves a job that the upstream admitted or knows, and takes itself off the route.
    async fn learn_route(
        &self,
        member: (JobId, Generation, Rank),
        connection: &Connection,
        message: &mut proto::Route,
    ) -> Result<(), ChainError> {
        let (id, generation, rank) = member;
        let route = Route::take((id, generation), connection.address, message, (self.protocol, &self.memory));
        let route = route.map_err(|cause| self.mismatch(cause))?;
        let free = self.memory.pool_units.saturating_sub(lock(&self.routes).pool_units_beside(&route));
        let asked = route.relayed.pool_units;
        if asked > free {
            return Err(self.mismatch(format!(
                "it needs {asked} units of memory in each shard, {free} are free: start it with a larger --pool-units"
            )));
        }
        self.learn(rank, route).await
    }

    /// Serves a job that the upstream admitted or knows.
    async fn learn(&self, rank: Rank, route: Route) -> Result<(), ChainError> {
        let mismatch = |cause: String| self.mismatch(cause);
        let (sender, learned) = oneshot::channel();
        {
            // Tasks are sent under the lock, in the order of what they are sent for.
            let mut known = lock(&self.routes);
            if known.heard(rank, &route, self.protocol, Instant::now()).map_err(mismatch)? {
                return Ok(());
            }
            let (routes, protocol) = (Arc::clone(&self.routes), self.protocol);
            self.tasks.send(move |driver| {
                // Who asks may have gone.
                let _ = sender.send(serve((driver, protocol), &routes, rank, route));
            });
        }
        match learned.await {
            Ok(served) => served.map_err(mismatch)?,
            Err(_) => return Err(mismatch("it shuts down".into())),
        }
        Ok(())
    }

    fn tick(&self) {
        let mut routes = lock(&self.routes);
        for job in routes.overdue(Instant::now()) {
            tracing::info!(id = job.0, "nobody here takes part in a job any more");
            self.tasks.send(move |driver| driver.remove_job(job));
        }
        drop(routes);
        let ended = lock(&self.ended);
        for JobAborted { job, reason } in ended.iter().flat_map(Receiver::try_iter) {
            tracing::warn!(id = job.0, ?reason, "a job is ended");
        }
    }

    /// What the data path has to say; `None` when the switch shuts down.
    async fn figures(&self) -> Option<Arc<RelayFigures>> {
        self.figures.current().await
    }

    async fn describe(&self) -> Result<proto::Relay, Failed> {
        let current = self.figures().await;
        let current = current.ok_or_else(|| Status::unavailable("the switch shuts down"))?;
        let figures = &current.figures;
        let job = |(job, progress): (&JobId, &JobProgress)| proto::RelayJob {
            job_id: job.0,
            // A rack's slots count what they complete.
            aggregations: progress.aggregations + progress.completed,
            collisions: progress.collisions,
            ranks: lock(&self.routes).ranks(*job).words().to_vec(),
        };
        Ok(proto::Relay {
            address: self.name(),
            upstream: self.upstream.name(),
            aggregators: figures.table.map_or(0, |table| table.aggregators),
            outdated: dropped(&figures.received, Reason::Generation),
            in_use: figures.in_use(),
            jobs: figures.jobs.iter().map(job).collect(),
            traffic: Some(traffic(figures)),
            rate_bps: self.rate_bps,
            shards: self.memory.shards.into(),
        })
    }

    /// Passes on that a rank joins, whose packets come from these hosts.
    async fn join(
        &self,
        mut request: proto::JoinRequest,
        hosts: Vec<IpAddr>,
    ) -> Result<proto::Admission, Failed> {
        self.health().map_err(|ended| unhealthy(&ended))?;
        if request.hops.iter().any(|hop| hop.instance == self.instance) {
            return Err(Failed::Chain(ChainError::Loop { switch: self.name() }));
        }
        let mut connection = self.upstream(JOIN_PATIENCE).await?;
        let mtu = fanin_udp::path_mtu(connection.address)
            .map_err(|error| self.unreachable(&format!("no route: {error}"), true))?;
        let upward = path::upward(connection.address, self.rate_bps);
        request.hops.push(proto::Hop {
            instance: self.instance,
            port: self.address.port().into(),
            // Whom we ask sees it.
            address: String::new(),
            receive_buffer_bytes: self.driver.receive_buffer_bytes() as u64,
            mtu_bytes: u32::try_from(mtu).unwrap_or(u32::MAX),
            shards: self.memory.shards.into(),
            aggregators: self.memory.aggregators,
            elements: u32::from(ELEMENTS),
            rate_bps: upward.link_bps,
        });
        request.host = self.host(&connection);
        let rtt_ns = u64::try_from(connection.rtt.as_nanos()).unwrap_or(u64::MAX);
        request.rtt_ns = request.rtt_ns.saturating_add(rtt_ns);
        request.rate_bps = request.rate_bps.into_iter().chain(upward.way_bps).min();
        let rank = request.rank;
        let reply = self.answered(connection.client.join(request).await)?;
        let mut admission = match reply.outcome.ok_or(Malformed("outcome"))? {
            proto::join_reply::Outcome::Admission(admission) => admission,
            proto::join_reply::Outcome::Refusal(refusal) => return Err(Failed::Passed(refusal)),
        };
        if let Err(error) = self.learn_admission(rank, &mut admission, &connection, hosts).await {
            // The rank hears a refusal, so it will not leave the place that it was given above.
            if let (Ok(key), Ok(worker)) = (key(&admission.key), narrow(rank, "rank").map(Rank)) {
                let secret = key.secret_of(worker);
                let leave = proto::LeaveRequest { job_id: admission.job_id, rank, passed_on: 1, secret };
                let _ = tokio::time::timeout(PATIENCE, connection.client.leave(leave)).await;
            }
            return Err(error);
        }
        Ok(admission)
    }

    async fn meet(&self, mut request: proto::MeetRequest) -> Result<Streaming<proto::MeetReply>, Failed> {
        request.passed_on = one_more(request.passed_on)?;
        self.pass_a_stranger(1)?;
        let mut connection = self.upstream(JOIN_PATIENCE).await?;
        self.answered(connection.client.meet(request).await)
    }

    /// Serves the job of a rank that was admitted above, and takes itself off the route that the
    /// rank hears.
    async fn learn_admission(
        &self,
        rank: u32,
        admission: &mut proto::Admission,
        connection: &Connection,
        hosts: Vec<IpAddr>,
    ) -> Result<(), Failed> {
        let generation = Generation(narrow(admission.generation, "generation")?);
        let member = (JobId(admission.job_id), generation, Rank(narrow(rank, "rank")?));
        if admission.protocol != self.protocol.name() {
            let (its, own) = (&admission.protocol, self.protocol.name());
            return Err(self.mismatch(format!("it is summed by {its}, and this switch serves {own}")).into());
        }
        let route = admission.route.as_mut().ok_or(Malformed("route"))?;
        self.learn_route(member, connection, route).await?;
        self.pass_way(&mut admission.way, connection);
        if let Some(registered) = self.register(member.0, member.2, hosts) {
            // Fails when nobody does the tasks any more, which `health` says.
            let _ = registered.await;
        }
        Ok(())
    }

    /// This switch, and those below it, ask these machines if one above them stays away.
    fn pass_way(&self, way: &mut Vec<String>, connection: &Connection) {
        self.upstream.learn_way(way, connection);
        way.insert(0, connection.address.to_string());
    }

    /// A rank's packets come here from these hosts. If that is new, says when they are taken from
    /// there.
    fn register(&self, job: JobId, rank: Rank, hosts: Vec<IpAddr>) -> Option<oneshot::Receiver<()>> {
        let mut routes = lock(&self.routes);
        routes.sends_from(job, rank, &hosts).then(|| {
            let (sender, registered) = oneshot::channel();
            self.tasks.send(move |driver| {
                driver.register(job, &hosts);
                // Nobody need wait.
                let _ = sender.send(());
            });
            registered
        })
    }

    async fn heartbeat(
        &self,
        mut request: proto::HeartbeatRequest,
        hosts: Vec<IpAddr>,
    ) -> Result<proto::HeartbeatReply, Failed> {
        self.health().map_err(|ended| unhealthy(&ended))?;
        request.passed_on = one_more(request.passed_on)?;
        let generation = Generation(narrow(request.generation, "generation")?);
        let member = (JobId(request.job_id), generation, Rank(narrow(request.rank, "rank")?));
        self.authenticate(member.0, member.2, request.secret)?;
        let mut connection = self.upstream(PATIENCE).await?;
        request.host = self.host(&connection);
        // The rank hangs up when it has waited for long.
        let asked = self.upstream.asked();
        let reply = connection.client.heartbeat(request).await;
        asked.ends();
        let reply = self.answered(reply)?;
        let is_of_job = reply.route.is_some();
        let reply = self.learned(member, &connection, reply).await?;
        if is_of_job {
            self.register(member.0, member.2, hosts);
        }
        Ok(reply)
    }

    /// Opens a rank's stream to the upstream, and passes on what comes from there and, if the rank
    /// dies, that.
    async fn attend(
        self: Arc<Self>,
        mut asks: Streaming<proto::AttendRequest>,
    ) -> Result<mpsc::Receiver<Result<proto::HeartbeatReply, Status>>, Failed> {
        let asked = asks.message().await.map_err(Failed::Refused)?;
        let mut request = asked.ok_or(Malformed("attendance"))?;
        let is_next_to_us = request.passed_on == 0;
        request.passed_on = one_more(request.passed_on)?;
        let generation = Generation(narrow(request.generation, "generation")?);
        let member = (JobId(request.job_id), generation, Rank(narrow(request.rank, "rank")?));
        self.authenticate(member.0, member.2, request.secret)?;
        let mut connection = self.upstream(PATIENCE).await?;
        let (ours, passed_on) = mpsc::channel(1);
        let gone = proto::AttendRequest { gone: true, ..request };
        // It is empty.
        let _ = ours.send(request).await;
        let mut above = self.answered(connection.client.attend(ReceiverStream::new(passed_on)).await)?;
        let (replies, stream) = mpsc::channel(1);
        let mut stops = self.stops.subscribe();
        tokio::spawn(async move {
            // Until then the upstream ends the stream, and hears before that what became of the
            // rank.
            let mut lives = true;
            loop {
                let dies = async {
                    loop {
                        tokio::select! {
                            asked = asks.message() => match asked {
                                Ok(Some(request)) if request.gone => return true,
                                Ok(Some(_)) => {}
                                Ok(None) | Err(_) => return is_next_to_us,
                            },
                            () = replies.closed() => return is_next_to_us,
                        }
                    }
                };
                tokio::select! {
                    biased;
                    () = async { drop(stops.wait_for(|stops| *stops).await) } => return,
                    reply = above.message() => {
                        let reply = match reply {
                            Ok(Some(reply)) => self
                                .learned(member, &connection, reply)
                                .await
                                .map_err(|error| Status::from(Failed::Chain(error))),
                            Ok(None) => return,
                            Err(status) => Err(status),
                        };
                        let ends = reply.is_err();
                        let _ = replies.send(reply).await;
                        if ends {
                            return;
                        }
                    }
                    at_the_rank = dies, if lives => {
                        if !at_the_rank {
                            return;
                        }
                        let _ = ours.send(gone).await;
                        lives = false;
                    }
                }
            }
        });
        Ok(stream)
    }

    /// What the upstream says of a rank's job, with this switch taken off the route.
    async fn learned(
        &self,
        member: (JobId, Generation, Rank),
        connection: &Connection,
        mut reply: proto::HeartbeatReply,
    ) -> Result<proto::HeartbeatReply, ChainError> {
        if let Some(route) = &mut reply.route {
            self.learn_route(member, connection, route).await?;
            self.pass_way(&mut reply.way, connection);
        }
        Ok(reply)
    }

    async fn leave(&self, mut request: proto::LeaveRequest) -> Result<proto::LeaveReply, Failed> {
        request.passed_on = one_more(request.passed_on)?;
        let (job, rank) = (JobId(request.job_id), Rank(narrow(request.rank, "rank")?));
        self.authenticate(job, rank, request.secret)?;
        // Whether or not the server hears of it.
        self.forget(job, rank);
        let mut connection = self.upstream(PATIENCE).await?;
        self.answered(connection.client.leave(request).await)
    }

    /// Of a job that is not known here the server says whose call it is.
    fn authenticate(&self, job: JobId, rank: Rank, secret: u64) -> Result<(), Status> {
        let is_known = lock(&self.routes).authenticate(job, rank, secret).map_err(refused)?;
        if is_known { Ok(()) } else { self.pass_a_stranger(1) }
    }

    /// Whether one more call of who may be anybody is passed on, which counts as so many at the
    /// upstream.
    fn pass_a_stranger(&self, counts: u32) -> Result<(), Status> {
        let mut calls = lock(&self.of_strangers);
        calls.one_more(Instant::now(), STRANGER_COUNTS * counts).map(drop).ok_or_else(too_many)
    }

    fn forget(&self, job: JobId, rank: Rank) {
        let mut routes = lock(&self.routes);
        if routes.leave(job, rank) {
            self.tasks.send(move |driver| driver.remove_job(job));
        }
    }

    /// Whether the data path works, and is told what is decided.
    fn health(&self) -> Result<(), ThreadEnded> {
        self.driver.health()?;
        self.tasks.health()
    }

    async fn status(&self, mut request: proto::StatusRequest) -> Result<proto::StatusReply, Failed> {
        if request.job.as_deref() == Some("") {
            // The greeting of who connects: it asks what this is, and not how the server fares.
            return Ok(proto::StatusReply {
                version: env!("CARGO_PKG_VERSION").into(),
                wire_version: VERSION.into(),
                shards: self.memory.shards.into(),
                protocol: self.protocol.name().into(),
                ..proto::StatusReply::default()
            });
        }
        request.passed_on = one_more(request.passed_on)?;
        self.pass_a_stranger(1 + STATUS_COUNTS)?;
        let mut connection = self.upstream(PATIENCE).await?;
        let mut reply = self.answered(connection.client.status(request).await)?;
        reply.relays.push(self.describe().await?);
        Ok(reply)
    }
}

/// Lets the packets of a job through, whose route was not known when this task was sent.
fn serve(
    (driver, protocol): (&dyn DataPath, &dyn OnSockets),
    routes: &Mutex<Routes>,
    rank: Rank,
    route: Route,
) -> Result<(), String> {
    if lock(routes).heard(rank, &route, protocol, Instant::now())? {
        return Ok(());
    }
    let seat =
        Seat { job: route.job, protocol: protocol.name(), part: &route.part, upstream: Some(route.upstream) };
    driver.add_job(&seat).map_err(|error| error.to_string())?;
    let over = lock(routes).insert(rank, route, Instant::now());
    over.into_iter().for_each(|job| driver.remove_job(job));
    Ok(())
}

/// Counts who passed a question on: more than there can be levels go round in circles.
fn one_more(passed_on: u32) -> Result<u32, Failed> {
    if passed_on as usize >= HOPS_MAX {
        let text = format!("passed on by {HOPS_MAX} switches already; do their --upstream form a loop?");
        return Err(Failed::Refused(Status::failed_precondition(text)));
    }
    Ok(passed_on + 1)
}

/// Why a question was not answered.
enum Failed {
    Chain(ChainError),
    /// By who was asked.
    Passed(proto::Refusal),
    Refused(Status),
}

impl From<ChainError> for Failed {
    fn from(error: ChainError) -> Self {
        Self::Chain(error)
    }
}

impl From<Status> for Failed {
    fn from(status: Status) -> Self {
        Self::Refused(status)
    }
}

impl From<Malformed> for Failed {
    fn from(malformed: Malformed) -> Self {
        Self::Refused(malformed.into())
    }
}

impl From<Failed> for Status {
    fn from(failed: Failed) -> Self {
        match failed {
            Failed::Refused(status) => status,
            Failed::Chain(error) => Self::unavailable(error.to_string()),
            Failed::Passed(_) => Self::failed_precondition("refused"),
        }
    }
}

struct Service(Arc<Relay>);

#[tonic::async_trait]
impl Control for Service {
    type MeetStream = MeetReplies;

    async fn meet(&self, request: Request<proto::MeetRequest>) -> Result<Response<MeetReplies>, Status> {
        use proto::meet_reply::Outcome;
        let address = address_of(request.remote_addr());
        let request = request.into_inner();
        let _waiting = self.0.waiting.enter(address, for_log(&request.job))?;
        match self.0.meet(request).await {
            Ok(replies) => Ok(Response::new(Box::pin(replies))),
            // As to one that joins: the upstream may come yet.
            Err(Failed::Chain(error)) => Ok(meet_replies(iter::once(Outcome::Refusal(error.into())))),
            Err(failed) => Err(failed.into()),
        }
    }

    async fn join(&self, request: Request<proto::JoinRequest>) -> Result<Response<proto::JoinReply>, Status> {
        use proto::join_reply::Outcome;
        let peer = request.remote_addr();
        let message = seen_from(request)?;
        let hosts = hosts(peer, &message.host);
        let (job, rank) = (for_log(&message.job), message.rank);
        let address = address_of(peer);
        let _waiting = self.0.waiting.enter(address, job.clone())?;
        self.0.pass_a_stranger(1)?;
        let refused =
            |reason: &dyn std::fmt::Display| tracing::warn!(job, rank, %reason, "a rank is refused");
        // When the rank hangs up, this future is dropped, and with it the call to the upstream.
        let outcome = match self.0.join(message, hosts).await {
            Ok(admission) => Outcome::Admission(admission),
            Err(Failed::Chain(error)) => {
                refused(&error);
                Outcome::Refusal(error.into())
            }
            Err(Failed::Passed(refusal)) => Outcome::Refusal(refusal),
            Err(Failed::Refused(status)) => return Err(status),
        };
        Ok(Response::new(proto::JoinReply { outcome: Some(outcome) }))
    }

    async fn heartbeat(
        &self,
        request: Request<proto::HeartbeatRequest>,
    ) -> Result<Response<proto::HeartbeatReply>, Status> {
        let peer = request.remote_addr();
        let request = request.into_inner();
        let hosts = hosts(peer, &request.host);
        Ok(Response::new(self.0.heartbeat(request, hosts).await?))
    }

    type AttendStream = Replies;

    async fn attend(
        &self,
        request: Request<Streaming<proto::AttendRequest>>,
    ) -> Result<Response<Replies>, Status> {
        let stream = Arc::clone(&self.0).attend(request.into_inner()).await?;
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn leave(
        &self,
        request: Request<proto::LeaveRequest>,
    ) -> Result<Response<proto::LeaveReply>, Status> {
        Ok(Response::new(self.0.leave(request.into_inner()).await?))
    }

    async fn status(
        &self,
        request: Request<proto::StatusRequest>,
    ) -> Result<Response<proto::StatusReply>, Status> {
        Ok(Response::new(self.0.status(request.into_inner()).await?))
    }

    /// No plan follows from a rack's link, nor from those above it.
    async fn measure(
        &self,
        _: Request<proto::MeasureRequest>,
    ) -> Result<Response<proto::MeasureReply>, Status> {
        Err(Status::unimplemented("a switch with an upstream has no rate that a plan follows from"))
    }
}
