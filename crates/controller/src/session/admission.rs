//! Joining a job, for the first time or again after its switch restarted, and leaving it.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use fanin_protocol::control::{Ranks, Refusal};
use fanin_protocol::{JobIdentity, OwnChoices};
use fanin_udp::{Membership, OnSockets};
use fanin_wire::{Generation, JobId, Key, Rank, VERSION};

use super::absent::{Absent, present};
use super::config::{ServiceConfig, SessionConfig};
use super::split::{Split, place};
use super::warnings::say;
use crate::control_channel::{Connection, explain, way_from};
use crate::convert::{Malformed, Refused, key, narrow};
use crate::error::SessionError;
use crate::proto;

/// How much longer a rank waits that has run out of patience, for what the switch has to say to it.
const LAST_ANSWER: Duration = Duration::from_secs(1);
/// Longer than any job.
pub(super) const FOREVER: Duration = Duration::from_secs(1 << 32);
/// How long a closing session waits for the switch to hear of it.
pub(super) const FAREWELL: Duration = Duration::from_secs(1);

/// A job as the switch admitted this rank to it.
#[derive(Clone, Debug)]
pub(super) struct Admitted {
    pub job: Membership,
    pub shards: usize,
    pub heartbeat_timeout: Duration,
    /// Another one in a heartbeat's reply means that the switch restarted.
    pub switch_instance: u64,
    /// The machines that the rank asks if its switch stays away, the next one first.
    pub way: Vec<SocketAddr>,
}

/// What a rank remembers of a job that its switch forgot.
pub(super) struct Memory {
    pub job: Membership,
    pub completed: Vec<Vec<u32>>,
}

impl From<&Memory> for proto::Resume {
    fn from(memory: &Memory) -> Self {
        let counts = |exchanges: &Vec<u32>| proto::Counts { exchanges: exchanges.clone() };
        Self {
            lineage: memory.job.key().lineage(),
            generation: memory.job.generation().0.into(),
            elements: memory.job.elements().into(),
            in_flight: memory.job.in_flight().into(),
            completed: memory.completed.iter().map(counts).collect(),
        }
    }
}

/// Joins the job at one service, and waits up to `patience` for all other ranks.
pub(super) async fn join(
    connection: &mut Connection,
    config: &SessionConfig,
    service: &ServiceConfig,
    patience: Duration,
    memory: Option<&Memory>,
) -> Result<Admitted, SessionError> {
    let switch = connection.switch.clone();
    let mtu = config.mtu.map_or_else(|| fanin_udp::path_mtu(connection.address), Ok);
    let mtu = mtu
        .map_err(|error| SessionError::Local { what: "finding the path's MTU", cause: error.to_string() })?;
    let here = config.services.iter().position(|other| other.switch == service.switch);
    let agreed = config.agreed_at(service.plan);
    let request = proto::JoinRequest {
        wire_version: VERSION.into(),
        job: config.job.clone(),
        rank: config.rank,
        world_size: config.world_size,
        mtu_bytes: u32::try_from(mtu).unwrap_or(u32::MAX),
        rate_bps: service.rate_bps.or_else(|| crate::path::rate_bps(connection.address)),
        rtt_ns: u64::try_from(connection.rtt.as_nanos()).unwrap_or(u64::MAX),
        resume: memory.map(proto::Resume::from),
        patience_ms: u64::try_from(patience.as_millis()).unwrap_or(u64::MAX),
        hops: Vec::new(),
        split: Some(Split::of(config).told(here.unwrap_or_default())),
        place: Some(place(config, connection)),
        host: crate::path::host(connection.address),
        paths: config.paths.into(),
        protocol: config.protocol().name().into(),
        settings: agreed.values().into_iter().map(Into::into).collect(),
    };
    let began = Instant::now();
    let (mut asking, mut client) = (connection.client.clone(), connection.client.clone());
    let joining = client.join(request);
    tokio::pin!(joining);
    let mut absent = Absent::default();
    let replied = {
        let until = began.checked_add(patience).unwrap_or(began + FOREVER);
        let (names, own_name) = (|ranks: &Ranks| config.names.all(ranks), config.own_name().0);
        let (of_job, asking) = ((&*config.job, &*switch), asking.clone());
        let looking = absent.watch(asking, of_job, until, names, |text| say(own_name, text));
        tokio::select! {
            reply = &mut joining => Some(reply),
            () = tokio::time::sleep(patience) => None,
            never = looking => match never {},
        }
    };
    let timed_out = |missing| {
        let (missing_ranks, gone) = absent.blamed(missing);
        let (switch, job, waited) = (switch.clone(), config.job.clone(), began.elapsed());
        SessionError::JoinTimeout { switch, job, missing_ranks, gone, waited }
    };
    let reply = match replied {
        Some(reply) => reply,
        None => {
            // Asked while this rank still waits: its place in the gathering keeps the job visible.
            let there = present(&mut asking, &config.job).await;
            let missing = there.map(|(ranks, there)| Ranks::all(ranks).without(&there)).unwrap_or_default();
            // The switch may have ended the gathering at this very moment: then its answer is on
            // the way.
            let answer = async {
                if missing.is_empty() {
                    tokio::time::timeout(LAST_ANSWER, &mut joining).await.ok()
                } else {
                    None
                }
            };
            answer.await.ok_or_else(|| timed_out(missing))?
        }
    };
    let reply = reply.map_err(|status| SessionError::SwitchLost {
        switch: switch.clone(),
        cause: format!("while joining: {}", explain(&status)),
    })?;
    let malformed = |malformed: Malformed| not_a_switch(&switch, malformed.to_string());
    match reply.into_inner().outcome.ok_or(Malformed("outcome")).map_err(malformed)? {
        proto::join_reply::Outcome::Admission(admission) => {
            let (job, key) = (JobId(admission.job_id), key(&admission.key).map_err(malformed)?);
            let taken = taken(admission, connection, config);
            if taken.is_err() {
                // The others would wait for this rank until it has been silent for long.
                leave(connection, (job, key), Rank(config.rank as u16)).await;
            }
            taken
        }
        proto::join_reply::Outcome::Refusal(refusal) => {
            Err(match refused(refusal, &switch, &config.job, began).map_err(malformed)? {
                SessionError::JoinTimeout { missing_ranks, .. } => timed_out(missing_ranks),
                error => error,
            })
        }
    }
}

/// What a rank makes of a refusal that came a while after it `began` to ask.
pub(super) fn refused(
    refusal: proto::Refusal,
    switch: &str,
    job: &str,
    began: Instant,
) -> Result<SessionError, Malformed> {
    let (switch, job) = (switch.to_owned(), job.to_owned());
    Ok(match Refused::try_from(refusal)? {
        Refused::Chain(error) => SessionError::Chain { job, error },
        Refused::Registry(Refusal::JoinTimeout { missing: missing_ranks }) => {
            let (gone, waited) = (Ranks::default(), began.elapsed());
            SessionError::JoinTimeout { switch, job, missing_ranks, gone, waited }
        }
        Refused::Registry(Refusal::VersionMismatch { theirs, ours }) => {
            // The switch's "ours" is the other one's here.
            SessionError::ProtocolVersionMismatch { switch, ours: theirs.into(), theirs: ours.into() }
        }
        Refused::Registry(reason) => SessionError::JoinRefused { switch, job, reason },
    })
}

/// The job that a switch admits this rank to, if it is the one that was asked for.
fn taken(
    admission: proto::Admission,
    connection: &Connection,
    config: &SessionConfig,
) -> Result<Admitted, SessionError> {
    let switch = &*connection.switch;
    let wrong = |malformed: Malformed| not_a_switch(switch, malformed.to_string());
    let asked = config.protocol();
    if admission.protocol != asked.name() {
        let cause = format!(
            "it admits to a job of protocol {:?}; install the same fanin on both",
            admission.protocol
        );
        return Err(not_a_switch(switch, cause));
    }
    let rank = Rank(config.rank as u16);
    let admitted = Admitted::new(asked, &admission, connection.address, rank, config).map_err(wrong)?;
    let unsecured = admitted.job.key().security() != config.agreed.security;
    let unsecured = unsecured.then(|| format!("security {}", config.agreed.security.name()));
    let unknown = unsecured.or_else(|| admitted.job.lacks(&config.agreed_at(0), config.paths));
    if let Some(unknown) = unknown {
        let cause = format!("it does not know {unknown}; install the same fanin on both");
        return Err(not_a_switch(switch, cause));
    }
    Ok(admitted)
}

fn not_a_switch(switch: &str, cause: String) -> SessionError {
    SessionError::NotASwitch { switch: switch.into(), cause }
}

/// Tells the switch that a rank is done, if it listens.
pub(super) async fn leave(connection: &mut Connection, (job, key): (JobId, Key), rank: Rank) {
    let secret = key.secret_of(rank);
    let message = proto::LeaveRequest { job_id: job.0, rank: rank.0.into(), passed_on: 0, secret };
    let left = tokio::time::timeout(FAREWELL, connection.client.leave(message)).await;
    if !matches!(left, Ok(Ok(_))) {
        tracing::debug!(rank = rank.0, "the switch did not hear that the rank leaves");
    }
}

impl Admitted {
    /// What a rank was told.
    fn new(
        protocol: &'static dyn OnSockets,
        admission: &proto::Admission,
        by: SocketAddr,
        rank: Rank,
        config: &SessionConfig,
    ) -> Result<Self, Malformed> {
        let heartbeat_timeout = Duration::from_millis(admission.heartbeat_timeout_ms);
        if heartbeat_timeout.is_zero() {
            return Err(Malformed("heartbeat_timeout_ms"));
        }
        // Every switch on the way took its own part off.
        if admission.route.as_ref().is_some_and(|route| !route.parts.is_empty()) {
            return Err(Malformed("route"));
        }
        let job = JobIdentity {
            id: JobId(admission.job_id),
            key: key(&admission.key)?,
            generation: Generation(narrow(admission.generation, "generation")?),
            workers: narrow(admission.world_size, "world_size")?,
            resumed: admission.resumed,
        };
        let shards = narrow::<u8>(admission.shards, "shards")?;
        let services = u16::try_from(config.services.len()).unwrap_or(u16::MAX);
        let windows = config.columns.saturating_mul(services).saturating_mul(shards.into());
        let own = OwnChoices { congestion_control: config.congestion_control, windows };
        Ok(Self {
            job: protocol.membership(job, rank, &admission.part, own)?,
            shards: shards.into(),
            heartbeat_timeout,
            switch_instance: admission.switch_instance,
            way: way_from(by, &admission.way),
        })
    }
}
