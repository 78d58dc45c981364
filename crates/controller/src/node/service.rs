//! The control protocol as the switch serves it.

use std::iter;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use fanin_limits::host_of;
use fanin_local::Cores;
use fanin_protocol::control::{
    Admission, Agreed, Denied, Detached, HeartbeatReply, Hop, JobState, JoinRequest, PORTION_WHOLE, Resume,
    part_of,
};
use fanin_protocol::{Reason, Received};
use fanin_udp::Figures;
use fanin_wire::{Generation, JobId, Rank, VERSION};
use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::address_of;
use super::gauges::Gauges;
use super::jobs::{Attending, Caller, JobSnapshot, Jobs, Joined, NotAdmitted, Stays, unhealthy};
use super::limits::{REQUEST_BYTES_MAX, STATUS_COUNTS, Toll};
use super::meetings::{NotHeard, Pieces};
use super::reports::{Measurements, Told};
use super::work::WorkAsked;
use crate::convert::{Malformed, narrow};
use crate::path::{mtu_at, rate_bps_at};
use crate::proto::{self, control_server::Control};

/// What the ranks that meet said, in pieces.
pub(super) type MeetReplies = Pin<Box<dyn Stream<Item = Result<proto::MeetReply, Status>> + Send>>;

/// An answer to one that meets: pieces of what was said, or one refusal.
pub(super) fn meet_replies(
    outcomes: impl Iterator<Item = proto::meet_reply::Outcome> + Send + 'static,
) -> Response<MeetReplies> {
    let reply = |outcome| Ok(proto::MeetReply { outcome: Some(outcome) });
    Response::new(Box::pin(tokio_stream::iter(outcomes.map(reply))))
}

/// The server's half of a rank's stream.
pub(super) type Replies = ReceiverStream<Result<proto::HeartbeatReply, Status>>;

/// Answers the workers.
#[derive(Clone)]
pub(super) struct ControlService {
    pub jobs: Arc<Jobs>,
    /// Tells this switch from the one before and the one after.
    pub instance: u64,
    /// What its link carries; else what the interface tells.
    pub rate_bps: Option<u64>,
    /// By which it is measured else.
    pub gauges: Arc<Gauges>,
}

impl From<Malformed> for Status {
    fn from(malformed: Malformed) -> Self {
        Self::invalid_argument(malformed.to_string())
    }
}

/// What a caller hears who shows no rank's secret.
pub(super) fn refused(denied: Denied) -> Status {
    Status::permission_denied(denied.to_string())
}

#[tonic::async_trait]
impl Control for ControlService {
    type MeetStream = MeetReplies;

    async fn meet(&self, request: Request<proto::MeetRequest>) -> Result<Response<MeetReplies>, Status> {
        use proto::meet_reply::Outcome;
        let from = address_of(request.remote_addr());
        let request = request.into_inner();
        let patience = Duration::from_millis(request.patience_ms).min(self.jobs.config().join_timeout_max);
        // When the rank hangs up, this future is dropped, and what it said with it.
        let outcome = match self.jobs.meet(from, request) {
            Ok(mut present) => present.others(patience).await,
            Err(not_heard) => Err(not_heard),
        };
        match outcome {
            Ok(met) => Ok(meet_replies(Pieces::of(met).map(Outcome::Met))),
            Err(NotHeard::Refused(refusal)) => Ok(meet_replies(iter::once(Outcome::Refusal(refusal.into())))),
            Err(NotHeard::Failed(status)) => Err(status),
        }
    }

    async fn join(&self, request: Request<proto::JoinRequest>) -> Result<Response<proto::JoinReply>, Status> {
        let peer = request.remote_addr();
        let here = request.local_addr();
        let mut request = seen_from(request)?;
        let hosts = hosts(peer, &request.host);
        // Not a byte more of it while the rank waits than is kept after that.
        let portion = request.split.as_ref().map_or(PORTION_WHOLE, portion);
        let address = address_of(peer);
        let report = self.jobs.take_report(address, &mut request);
        let mut request = join_request(request, portion)?;
        // The rank knows its own end of the path. A link that is narrower at this one loses
        // packets, and nobody says so.
        let ours = here.and_then(|here| mtu_at(here.ip().to_canonical()));
        request.mtu = ours.map_or(request.mtu, |mtu| mtu.min(request.mtu));
        request.origin = peer.and_then(|peer| origin(peer, here));
        let rank = request.rank;
        let _waiting = self.jobs.wait(address, &request)?;
        self.jobs.health().map_err(|ended| unhealthy(&ended))?;
        let outcome = match self.jobs.join(request, hosts) {
            // When the rank hangs up, this future is dropped, and its place with it.
            Joined::Waiting(mut place) => place.outcome().await,
            Joined::Done(outcome) => outcome,
        };
        let outcome = match outcome {
            Ok(admission) => {
                let worker = Rank(rank as u16);
                self.jobs.report(admission.job, rank, report);
                let timeout = self.jobs.config().heartbeat_timeout;
                let mut admitted = admission_for(&admission, worker, timeout, self.instance);
                admitted.route = self.jobs.route(admission.job, worker).map(Box::new);
                proto::join_reply::Outcome::Admission(admitted)
            }
            Err(NotAdmitted::Refused(reason)) => proto::join_reply::Outcome::Refusal(reason.into()),
            Err(NotAdmitted::DataPath(cause)) => return Err(Status::internal(cause)),
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
        let rank = Rank(narrow(request.rank, "rank")?);
        let generation = Generation(narrow(request.generation, "generation")?);
        let measured = Measurements {
            round_trip: request.smoothed_rtt_ns.map(Duration::from_nanos),
            seconds_per_byte: request.seconds_per_byte,
            imbalance: request.imbalance,
        };
        let (job, secret, passed_on) = (JobId(request.job_id), request.secret, request.passed_on);
        let caller = Caller { job, rank, generation, secret, passed_on };
        let told = Told { measured, work: request.work };
        let reply = self.jobs.heartbeat(caller, told, hosts).map_err(refused)?;
        if !request.behind && matches!(reply, HeartbeatReply::Alive { .. }) {
            self.jobs.caught_up(job, rank);
        }
        // After the registry heard it: no rank is to blame.
        self.jobs.health().map_err(|ended| unhealthy(&ended))?;
        Ok(Response::new(self.reply((job, rank), reply, request.passed_on > 0)))
    }

    type AttendStream = Replies;

    async fn attend(
        &self,
        request: Request<Streaming<proto::AttendRequest>>,
    ) -> Result<Response<Replies>, Status> {
        let mut asks = request.into_inner();
        let who = asks.message().await?.ok_or(Malformed("attendance"))?;
        let rank = Rank(narrow(who.rank, "rank")?);
        let generation = Generation(narrow(who.generation, "generation")?);
        let (job, secret, passed_on) = (JobId(who.job_id), who.secret, who.passed_on);
        let attending = self.jobs.attend(Caller { job, rank, generation, secret, passed_on });
        let attending = attending.map_err(refused)?;
        let (replies, stream) = mpsc::channel(1);
        tokio::spawn(self.clone().attended(who, attending, asks, replies));
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn leave(
        &self,
        request: Request<proto::LeaveRequest>,
    ) -> Result<Response<proto::LeaveReply>, Status> {
        let request = request.into_inner();
        let rank = Rank(narrow(request.rank, "rank")?);
        self.jobs.leave(JobId(request.job_id), rank, request.secret).map_err(refused)?;
        Ok(Response::new(proto::LeaveReply {}))
    }

    async fn status(
        &self,
        request: Request<proto::StatusRequest>,
    ) -> Result<Response<proto::StatusReply>, Status> {
        let asked_at = request.local_addr();
        let toll = request.extensions().get::<Toll>().cloned();
        let proto::StatusRequest { job: wanted, work_ms, .. } = request.into_inner();
        // All but the greeting of who connects, which is of no job.
        if let Some(toll) = toll.filter(|_| wanted.as_deref() != Some("")) {
            toll.pay(STATUS_COUNTS).await?;
        }
        let (config, pool) = (self.jobs.config(), self.jobs.pool());
        let mut jobs = self.jobs.snapshot();
        jobs.retain(|job| wanted.as_ref().is_none_or(|wanted| *wanted == job.name));
        if wanted.is_none() {
            jobs.iter_mut().for_each(keep_secret);
        }
        // A greeting needs none.
        let needs_figures =
            work_ms > 0 || jobs.iter().any(|job| matches!(job.state, JobState::Running { .. }));
        let figures = match needs_figures {
            true => self.jobs.figures().await.ok_or_else(|| Status::unavailable("the switch shuts down"))?,
            false => Arc::default(),
        };
        let mut work = (work_ms > 0).then(|| WorkAsked::lately(Duration::from_millis(work_ms.into())));
        let jobs = jobs.into_iter().map(|job| describe(&self.jobs, &figures, job, work.as_mut())).collect();
        // The first time it takes a moment.
        let cores = tokio::task::spawn_blocking(Cores::of_process).await.ok();
        let sums = |cores: Cores| cores.summed_bytes_per_s * cores.count.min(config.shards.into()) as u64;
        Ok(Response::new(proto::StatusReply {
            version: env!("CARGO_PKG_VERSION").into(),
            wire_version: VERSION.into(),
            shards: config.shards.into(),
            pool_units: pool.units,
            pool_free: pool.free,
            jobs,
            protocol: self.jobs.protocol().into(),
            relays: Vec::new(),
            rate_bps: self.rate_bps.or_else(|| rate_bps_at(asked_at?.ip().to_canonical())),
            summed_bytes_per_s: cores.map(sums),
            outdated: dropped(&figures.received, Reason::Generation),
            unplanned: dropped(&figures.received, Reason::Unplanned),
            traffic: Some(traffic(&figures)),
            instance: self.instance,
            refused: self.jobs.refusals().iter().map(|(_, count)| count).sum(),
            denied: self.jobs.denied(),
        }))
    }

    async fn measure(
        &self,
        request: Request<proto::MeasureRequest>,
    ) -> Result<Response<proto::MeasureReply>, Status> {
        let (asked_at, from) = (request.local_addr(), request.remote_addr());
        if let Some(toll) = request.extensions().get::<Toll>().cloned() {
            toll.pay(STATUS_COUNTS).await?;
        }
        Ok(Response::new(self.gauges.open(asked_at, from)?))
    }
}

/// Packets of a data path that were dropped for this reason.
pub(super) fn dropped(received: &Received, reason: Reason) -> u64 {
    received.dropped[reason as usize]
}

/// What the sockets of a data path moved.
pub(super) fn traffic(figures: &Figures) -> proto::Traffic {
    let Figures { received, io, .. } = figures;
    proto::Traffic {
        packets_received: io.packets_received,
        bytes_received: io.bytes_received,
        packets_sent: io.packets_sent,
        bytes_sent: io.bytes_sent,
        dropped: received.dropped.iter().sum::<u64>() - dropped(received, Reason::Duplicate),
    }
}

impl ControlService {
    /// An answer, and for a rank whose question was passed on its way, for those on it who forgot
    /// the job.
    fn reply(
        &self,
        (job, rank): (JobId, Rank),
        reply: HeartbeatReply,
        passed_on: bool,
    ) -> proto::HeartbeatReply {
        use proto::heartbeat_reply::{Alive, SetUpAgain, State, Unknown};
        let mut route = None;
        let state = match reply {
            HeartbeatReply::Alive { left } => {
                route = passed_on.then(|| self.jobs.route(job, rank)).flatten();
                let others_behind = self.jobs.others_behind(job, rank);
                State::Alive(Alive { left: left.words().to_vec(), others_behind })
            }
            HeartbeatReply::Unknown => State::Unknown(Unknown {}),
            HeartbeatReply::SetUpAgain => State::SetUpAgain(SetUpAgain {}),
            HeartbeatReply::Aborted(reason) => State::Aborted(reason.into()),
        };
        proto::HeartbeatReply { state: Some(state), switch_instance: self.instance, route, way: Vec::new() }
    }

    /// Tells a rank how its job is, until that or the rank's stream ends.
    async fn attended(
        self,
        who: proto::AttendRequest,
        attending: Attending,
        mut asks: Streaming<proto::AttendRequest>,
        replies: mpsc::Sender<Result<proto::HeartbeatReply, Status>>,
    ) {
        let job = JobId(who.job_id);
        let passed_on = who.passed_on > 0;
        // If nobody listens any more, the end of the stream says so below.
        let _ = replies.send(Ok(self.reply((job, attending.rank), attending.reply, passed_on))).await;
        let Some(Stays { attendance, mut news, mut superseded }) = attending.stays else { return };
        let broken = match who.passed_on {
            0 => Detached::AtTheRank,
            _ => Detached::OnTheWay,
        };
        let cause = loop {
            tokio::select! {
                // The rank has another stream, or every rank left.
                _ = &mut superseded => return,
                changed = news.changed() => if changed.is_err() { return },
                asked = asks.message() => match asked {
                    Ok(Some(request)) if request.gone => break Detached::AtTheRank,
                    Ok(Some(_)) => continue,
                    Ok(None) | Err(_) => break broken,
                },
                () = replies.closed() => break broken,
            }
            let reply = news.borrow_and_update().clone();
            let goes_on = !matches!(reply, HeartbeatReply::Aborted(_));
            let _ = replies.send(Ok(self.reply((job, attending.rank), reply, passed_on))).await;
            if !goes_on {
                return;
            }
        };
        self.jobs.detached(attendance, cause);
    }
}

/// Cuts the part off a name that only those should know who may still join.
fn keep_secret(job: &mut JobSnapshot) {
    if let (JobState::Gathering { .. }, Some(at)) = (&job.state, job.name.find('#')) {
        job.name.replace_range(at + 1.., "...");
    }
}

/// A request of which the switch that passed it on is named as it is seen from here.
///
/// # Errors
/// When it is longer than others, but for what it resumes.
pub(super) fn seen_from(request: Request<proto::JoinRequest>) -> Result<proto::JoinRequest, Status> {
    let peer = request.remote_addr();
    let mut message = request.into_inner();
    let length = message.encoded_len() - message.resume.as_ref().map_or(0, Message::encoded_len);
    if length > REQUEST_BYTES_MAX {
        return Err(Status::out_of_range(format!(
            "a request to join of {length} bytes, without what it resumes; the limit is {REQUEST_BYTES_MAX}"
        )));
    }
    if let (Some(hop), Some(peer)) = (message.hops.last_mut(), peer) {
        hop.address = peer.ip().to_canonical().to_string();
    }
    Ok(message)
}

/// The hosts that packets of who calls come from: that of the call, which is all that is seen of it
/// behind a NAT, and the one that it tells of, whose packets may leave from another address than
/// its calls.
pub(super) fn hosts(peer: Option<SocketAddr>, told: &str) -> Vec<IpAddr> {
    let mut hosts: Vec<IpAddr> = peer.map(|peer| peer.ip().to_canonical()).into_iter().collect();
    let told = told.parse().ok().map(|told: IpAddr| told.to_canonical());
    hosts.extend(told.filter(|told| !told.is_unspecified() && !hosts.contains(told)));
    hosts
}

/// The machine that a rank's use of memory and places counts for: who calls, be it another switch,
/// for anybody can say that he is one. This switch's own machine may use all.
fn origin(peer: SocketAddr, here: Option<SocketAddr>) -> Option<IpAddr> {
    let ip = peer.ip().to_canonical();
    let is_ours = ip.is_loopback() || here.is_some_and(|here| here.ip().to_canonical() == ip);
    (!is_ours).then(|| host_of(ip))
}

fn hop(message: &proto::Hop) -> Result<Hop, Malformed> {
    let ip: IpAddr = message.address.parse().map_err(|_| Malformed("address"))?;
    Ok(Hop {
        instance: message.instance,
        address: (ip, narrow(message.port, "port")?).into(),
        shards: narrow(message.shards, "shards")?,
        aggregators: message.aggregators,
        elements: narrow(message.elements, "elements")?,
        receive_buffer_bytes: usize::try_from(message.receive_buffer_bytes).unwrap_or(usize::MAX),
        mtu: narrow(message.mtu_bytes, "mtu_bytes")?,
        rate_bps: message.rate_bps,
    })
}

fn resume(message: proto::Resume) -> Result<Resume, Malformed> {
    Ok(Resume {
        lineage: message.lineage,
        generation: Generation(narrow(message.generation, "generation")?),
        in_flight: narrow(message.in_flight, "in_flight")?,
        elements: narrow(message.elements, "elements")?,
        completed: message.completed.into_iter().map(|counts| counts.exchanges).collect(),
    })
}

/// What part this service's share is of the largest, whatever the shares say: it decides about
/// speed alone.
fn portion(split: &proto::Split) -> u16 {
    let largest = split.shares.iter().map(|share| share.share).fold(0.0, f64::max);
    let own = split.shares.get(split.here as usize).map_or(0.0, |own| own.share);
    let portion = own / largest * f64::from(PORTION_WHOLE);
    // Neither infinite nor no number, where the largest is above zero.
    if portion.is_finite() { portion.ceil().clamp(0.0, PORTION_WHOLE.into()) as u16 } else { PORTION_WHOLE }
}

fn join_request(message: proto::JoinRequest, portion: u16) -> Result<JoinRequest, Malformed> {
    let is_ours = message.wire_version == u32::from(VERSION) && !message.protocol.is_empty();
    let settings = message.settings.iter().map(|setting| (setting.number, setting.value.as_slice()));
    // A rank of another version says its settings otherwise: the registry refuses it by its version.
    let agreed = if is_ours { Agreed::read(settings)? } else { Agreed::default() };
    Ok(JoinRequest {
        job: message.job,
        rank: message.rank,
        world_size: message.world_size,
        protocol: message.protocol,
        agreed,
        mtu: narrow(message.mtu_bytes, "mtu_bytes")?,
        rate_bps: message.rate_bps,
        rtt: Duration::from_nanos(message.rtt_ns),
        patience: Duration::from_millis(message.patience_ms),
        wire_version: narrow(message.wire_version, "wire_version")?,
        paths: message.paths,
        portion,
        hops: message.hops.iter().map(hop).collect::<Result<_, _>>()?,
        resume: message.resume.map(resume).transpose()?,
        origin: None,
    })
}

/// What one rank is told of its job; the route is the caller's to fill in.
fn admission_for(
    admission: &Admission,
    rank: Rank,
    heartbeat_timeout: Duration,
    switch_instance: u64,
) -> proto::Admission {
    proto::Admission {
        job_id: admission.job.0,
        generation: admission.generation.0.into(),
        world_size: admission.world_size.into(),
        resumed: admission.resumed,
        heartbeat_timeout_ms: u64::try_from(heartbeat_timeout.as_millis()).unwrap_or(u64::MAX),
        switch_instance,
        key: admission.key.to_bytes().into(),
        route: None,
        way: Vec::new(),
        protocol: admission.protocol.into(),
        shards: admission.shards.into(),
        part: part_of(&admission.seats, rank).map(<[u8]>::to_vec).unwrap_or_default(),
    }
}

/// A job with its progress.
fn describe(jobs: &Jobs, figures: &Figures, job: JobSnapshot, work: Option<&mut WorkAsked>) -> proto::Job {
    use proto::job::{Aborted, Gathering, Running, State};
    let state = match job.state {
        JobState::Gathering { present } => State::Gathering(Gathering { present: present.words().to_vec() }),
        JobState::Running {
            job: id,
            generation,
            in_flight,
            shards,
            elements,
            wire_dtype,
            security,
            loss_bound,
            left,
        } => {
            let progress = figures.jobs.get(&id).cloned().unwrap_or_default();
            let reported = jobs.reported(id);
            State::Running(Running {
                job_id: id.0,
                generation: generation.0.into(),
                in_flight: in_flight.into(),
                shards: shards.into(),
                elements: elements.into(),
                left: left.words().to_vec(),
                in_use: progress.in_use,
                waiting_for: progress.waiting_for.into_iter().take(job.world_size.into()).collect(),
                completed: progress.completed,
                retransmitted: progress.retransmitted,
                wire_dtype: proto::WireDtype::from(wire_dtype).into(),
                security: proto::Security::from(security).into(),
                aggregations: progress.aggregations,
                collisions: progress.collisions,
                members: reported.described(work),
                split: reported.split.clone(),
                loss_bound_millionths: loss_bound.millionths(),
                lost: progress.lost,
                planned: jobs.shares(id),
            })
        }
        JobState::Aborted { job: id, reason } => {
            State::Aborted(Aborted { job_id: id.0, reason: Some(reason.into()) })
        }
    };
    proto::Job { name: job.name, world_size: job.world_size.into(), state: Some(state) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_come_from_where_the_call_does_and_from_where_their_sender_says() {
        let (peer, ip) = (|text: &str| text.parse().ok(), |text: &str| text.parse::<IpAddr>().unwrap());
        assert_eq!(hosts(peer("10.0.0.1:7"), "192.168.0.2"), [ip("10.0.0.1"), ip("192.168.0.2")], "by a NAT");
        assert_eq!(hosts(peer("[::ffff:10.0.0.1]:7"), "10.0.0.1"), [ip("10.0.0.1")], "the same one");
        for told in ["", "0.0.0.0", "anywhere"] {
            assert_eq!(hosts(peer("[fd00::1]:7"), told), [ip("fd00::1")], "{told:?} is none");
        }
    }

    #[test]
    fn a_rank_of_another_version_reaches_the_registry_without_settings() {
        let ours = proto::JoinRequest {
            wire_version: VERSION.into(),
            protocol: "switchml".into(),
            ..proto::JoinRequest::default()
        };
        assert!(join_request(ours.clone(), PORTION_WHOLE).is_err(), "its settings are missing");
        let older = proto::JoinRequest { wire_version: u32::from(VERSION) - 1, ..ours.clone() };
        let nameless = proto::JoinRequest { protocol: String::new(), ..ours };
        for other in [older, nameless] {
            let told = (other.wire_version, other.protocol.clone());
            let request = join_request(other, PORTION_WHOLE).expect("a request to refuse");
            assert_eq!((u32::from(request.wire_version), request.protocol), told);
        }
    }

    #[test]
    fn who_calls_from_one_machine_counts_together_unless_it_is_the_switchs() {
        let address = |ip: [u8; 4]| SocketAddr::from((ip, 1));
        let (here, other) = (address([10, 0, 0, 1]), address([10, 0, 0, 2]));
        assert_eq!(origin(other, Some(here)), Some(other.ip()));
        assert_eq!(origin(here, Some(here)), None);
        assert_eq!(origin("[::ffff:10.0.0.1]:1".parse().unwrap(), Some(here)), None, "the same one");
        assert_eq!(origin(address([127, 0, 0, 2]), Some(here)), None);
    }
}
