//! Joining a job, for the first time or again after its switch restarted, and leaving it.

use std::time::{Duration, Instant};

use fanin_protocol::atp::Hashing;
use fanin_protocol::control::{FlowPlan, Protocol, Ranks, Refusal};
use fanin_protocol::goat::{Assignment, SubModels};
use fanin_protocol::switchml::JobConfig;
use fanin_udp::WorkerJob;
use fanin_wire::{
    AggregationNode, Directions, Generation, JobId, Key, LEVELS_MAX, LossBound, Rank, ShardId, SlotIndex,
    VERSION, WorkerId,
};

use super::absent::{Absent, present};
use super::config::{ServiceConfig, SessionConfig};
use super::connection::{Connection, explain};
use super::split::{Split, place};
use super::warnings::say;
use crate::convert::{Malformed, Refused, atp_job, goat_job, key, loss_bound, narrow, wire_dtype};
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
    pub job: WorkerJob,
    pub shards: usize,
    /// For each shard the slots that this rank hands back.
    pub restore: Vec<Vec<SlotIndex>>,
    pub heartbeat_timeout: Duration,
    /// Another one in a heartbeat's reply means that the switch restarted.
    pub switch_instance: u64,
}

/// What a rank remembers of a job that its switch forgot.
pub(super) struct Memory {
    pub job: WorkerJob,
    pub completed: Vec<Vec<u32>>,
}

impl From<&Memory> for proto::Resume {
    fn from(memory: &Memory) -> Self {
        let counts = |exchanges: &Vec<u32>| proto::Counts { exchanges: exchanges.clone() };
        let in_flight = memory.job.in_flight().into();
        Self {
            lineage: memory.job.key().lineage(),
            generation: memory.job.generation().0.into(),
            elements: memory.job.elements().into(),
            protocol: match memory.job {
                WorkerJob::SwitchMl { .. } => {
                    let completed = memory.completed.iter().map(counts).collect();
                    Some(proto::resume::Protocol::Switchml(proto::resume::SwitchMl {
                        slots: in_flight,
                        completed,
                    }))
                }
                WorkerJob::Atp { .. } => {
                    Some(proto::resume::Protocol::Atp(proto::resume::Atp { window: in_flight }))
                }
                WorkerJob::Goat { .. } => {
                    Some(proto::resume::Protocol::Goat(proto::resume::Atp { window: in_flight }))
                }
                // It begins anew: nobody asks.
                WorkerJob::Dlcp { .. } => None,
            },
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
    let request = proto::JoinRequest {
        wire_version: VERSION.into(),
        job: config.job.clone(),
        rank: config.rank,
        world_size: config.world_size,
        mtu_bytes: u32::try_from(mtu).unwrap_or(u32::MAX),
        rate_bps: service.rate_bps.or_else(|| super::path::rate_bps(connection.address)),
        rtt_ns: u64::try_from(connection.rtt.as_nanos()).unwrap_or(u64::MAX),
        resume: memory.map(proto::Resume::from),
        patience_ms: u64::try_from(patience.as_millis()).unwrap_or(u64::MAX),
        wire_dtype: proto::WireDtype::from(config.travels_as()).into(),
        security: proto::Security::from(config.security).into(),
        hops: Vec::new(),
        plan: service.plan,
        split: Some(Split::of(config).told(here.unwrap_or_default())),
        place: Some(place(config, connection)),
        host: super::path::host(connection.address),
        loss_bound_millionths: config.loss_bound.millionths(),
        paths: config.paths.into(),
        protocol: Some(match config.protocol {
            Protocol::SwitchMl => {
                let slots = config.slots.map(u32::from);
                proto::join_request::Protocol::Switchml(proto::join_request::SwitchMl { slots })
            }
            Protocol::Atp => {
                let window = config.window.map(u32::from);
                proto::join_request::Protocol::Atp(proto::join_request::Atp { window })
            }
            Protocol::Goat => {
                let (window, sub_models) = (config.window.map(u32::from), config.sub_models.clone());
                proto::join_request::Protocol::Goat(proto::join_request::Goat { window, sub_models })
            }
        }),
    };
    let began = Instant::now();
    let (mut asking, mut client) = (connection.client.clone(), connection.client.clone());
    let joining = client.join(request);
    tokio::pin!(joining);
    let mut absent = Absent::default();
    let replied = {
        let until = began.checked_add(patience).unwrap_or(began + FOREVER);
        let (names, own_name) = (|ranks: &Ranks| config.names(ranks), config.own_name().0);
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
            // Unless the switch ended the gathering at this very moment: then its answer is on the way.
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
            let taken = taken(admission, &switch, config);
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
    switch: &str,
    config: &SessionConfig,
) -> Result<Admitted, SessionError> {
    let mut admitted = Admitted::new(admission, Rank(config.rank as u16))
        .map_err(|malformed: Malformed| not_a_switch(switch, malformed.to_string()))?;
    match &mut admitted.job {
        // Nobody else need know.
        WorkerJob::Atp { config: job, .. } => job.congestion_control = config.congestion_control,
        WorkerJob::Goat { config: job, .. } => job.congestion_control = config.congestion_control,
        WorkerJob::SwitchMl { .. } | WorkerJob::Dlcp { .. } => {}
    }
    let of = |job: &WorkerJob| match job {
        WorkerJob::SwitchMl { .. } | WorkerJob::Dlcp { .. } => Protocol::SwitchMl,
        WorkerJob::Atp { .. } => Protocol::Atp,
        WorkerJob::Goat { .. } => Protocol::Goat,
    };
    let bound_of = |job: &WorkerJob| match job {
        WorkerJob::Dlcp { config, .. } => config.push_bound,
        WorkerJob::SwitchMl { .. } | WorkerJob::Atp { .. } | WorkerJob::Goat { .. } => LossBound::RELIABLE,
    };
    let unknown = match &admitted.job {
        job if of(job) != config.protocol => format!("protocol {}", config.protocol.name()),
        job if job.key().security() != config.security => format!("security {}", config.security.name()),
        job if bound_of(job) != config.loss_bound => format!("a loss bound of {}", config.loss_bound),
        WorkerJob::Dlcp { config: job, .. } if job.paths < config.paths => format!("{} paths", config.paths),
        WorkerJob::SwitchMl { config: job, .. } if job.wire_dtype != config.travels_as() => {
            format!("wire dtype {}", config.travels_as().name())
        }
        _ => return Ok(admitted),
    };
    Err(not_a_switch(switch, format!("it does not know {unknown}; install the same fanin on both")))
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
    fn new(admission: proto::Admission, rank: Rank) -> Result<Self, Malformed> {
        let heartbeat_timeout = Duration::from_millis(admission.heartbeat_timeout_ms);
        if heartbeat_timeout.is_zero() {
            return Err(Malformed("heartbeat_timeout_ms"));
        }
        let switch_instance = admission.switch_instance;
        let (job, shards, restore) = match &admission.protocol {
            Some(proto::admission::Protocol::Switchml(own)) => switch_ml_admission(&admission, own, rank)?,
            Some(proto::admission::Protocol::Atp(own)) => {
                (atp_admission(&admission, own)?, 1, vec![Vec::new()])
            }
            Some(proto::admission::Protocol::Goat(own)) => {
                (goat_admission(&admission, own, rank)?, 1, vec![Vec::new()])
            }
            Some(proto::admission::Protocol::Dlcp(own)) => dlcp_admission(&admission, own, rank)?,
            None => return Err(Malformed("protocol")),
        };
        Ok(Self { job, shards, restore, heartbeat_timeout, switch_instance })
    }
}

/// What a SwitchML job is for the worker that was admitted to it, its shards, and for each the slots that this rank hands back.
fn switch_ml_admission(
    admission: &proto::Admission,
    own: &proto::admission::SwitchMl,
    rank: Rank,
) -> Result<(WorkerJob, usize, Vec<Vec<SlotIndex>>), Malformed> {
    let config = JobConfig {
        id: JobId(admission.job_id),
        key: key(&admission.key)?,
        generation: Generation(narrow(admission.generation, "generation")?),
        workers: narrow(admission.world_size, "world_size")?,
        slots: narrow(own.slots, "slots")?,
        elements: narrow(own.elements, "elements")?,
        wire_dtype: wire_dtype(own.wire_dtype)?,
        shard: ShardId(0),
        resumed: admission.resumed,
    };
    let config = config.check().map_err(|_| Malformed("job"))?;
    let shards: u8 = narrow(own.shards, "shards")?;
    let slot = |slot: &u32| match narrow(*slot, "restore")? {
        slot if slot < config.slots => Ok(SlotIndex(slot)),
        _ => Err(Malformed("restore")),
    };
    let mut restore: Vec<Vec<SlotIndex>> = Vec::new();
    for shard in &own.restore {
        restore.push(shard.slots.iter().map(slot).collect::<Result<_, _>>()?);
    }
    if admission.resumed && restore.len() != usize::from(shards) {
        return Err(Malformed("restore"));
    }
    let place = match admission.route.as_ref().map(|route| &route.protocol) {
        None => WorkerId(narrow(rank.0.into(), "rank")?),
        // Every rack on the way took itself off.
        Some(Some(proto::route::Protocol::Switchml(route))) if route.racks.is_empty() => {
            WorkerId(narrow(route.place, "place")?)
        }
        Some(_) => return Err(Malformed("route")),
    };
    let job = WorkerJob::SwitchMl { config, place, has_racks: admission.route.is_some() };
    Ok((job, shards.into(), restore))
}

/// What a job with a loss bound is for the worker that was admitted to it, its shards, and for each that it hands nothing back.
fn dlcp_admission(
    admission: &proto::Admission,
    own: &proto::admission::Dlcp,
    rank: Rank,
) -> Result<(WorkerJob, usize, Vec<Vec<SlotIndex>>), Malformed> {
    let flows = FlowPlan {
        loss_bound: loss_bound(own.loss_bound_millionths)?,
        flow_blocks: own.flow_blocks,
        flows: narrow(own.flows, "flows")?,
        line_rate_bps: own.line_rate_bps,
        // A switch of before there were paths says none.
        paths: narrow::<u8>(own.paths, "paths")?.max(1),
    };
    let generation = Generation(narrow(admission.generation, "generation")?);
    let config = flows.job_config(
        (JobId(admission.job_id), key(&admission.key)?, generation),
        narrow(admission.world_size, "world_size")?,
        narrow(own.elements, "elements")?,
    );
    let config = config.check().map_err(|_| Malformed("job"))?;
    let shards = usize::from(narrow::<u8>(own.shards, "shards")?);
    let place = WorkerId(narrow(rank.0.into(), "rank")?);
    Ok((WorkerJob::Dlcp { config, place }, shards, vec![Vec::new(); shards]))
}

/// What an ATP job is for the worker that was admitted to it.
fn atp_admission(admission: &proto::Admission, own: &proto::admission::Atp) -> Result<WorkerJob, Malformed> {
    let config = atp_job(
        (
            JobId(admission.job_id),
            key(&admission.key)?,
            Generation(narrow(admission.generation, "generation")?),
        ),
        narrow(admission.world_size, "world_size")?,
        (narrow(own.window, "window")?, narrow(own.elements, "elements")?),
        own.aggregators,
        match proto::admission::atp::Hashing::try_from(own.hashing).map_err(|_| Malformed("hashing"))? {
            proto::admission::atp::Hashing::Hash => Hashing::Hash,
            proto::admission::atp::Hashing::Linear => Hashing::Linear,
        },
    );
    let config = config.check().map_err(|_| Malformed("job"))?;
    let mut fan_in_degrees = [0; LEVELS_MAX];
    for (degree, of_message) in fan_in_degrees.iter_mut().zip(&own.fan_in_degrees) {
        *degree = narrow(*of_message, "fan_in_degrees")?;
    }
    let directions = Directions {
        level: narrow(own.level, "level")?,
        bitmaps: own.bitmaps.as_slice().try_into().map_err(|_| Malformed("bitmaps"))?,
        fan_in_degrees,
    };
    // Every switch on the way took one level off: what is left are those below this worker.
    match admission.route.as_ref().and_then(|route| route.protocol.as_ref()) {
        Some(proto::route::Protocol::Atp(route)) if route.levels == own.level => {}
        _ => return Err(Malformed("route")),
    }
    Ok(WorkerJob::Atp { config, directions })
}

/// What a GOAT job is for the worker that was admitted to it.
fn goat_admission(
    admission: &proto::Admission,
    own: &proto::admission::Goat,
    rank: Rank,
) -> Result<WorkerJob, Malformed> {
    let config = goat_job(
        (
            JobId(admission.job_id),
            key(&admission.key)?,
            Generation(narrow(admission.generation, "generation")?),
        ),
        narrow(admission.world_size, "world_size")?,
        (narrow(own.window, "window")?, narrow(own.elements, "elements")?),
    );
    let sub_models = SubModels::new(&own.sub_models).map_err(|_| Malformed("sub_models"))?;
    config.check(&sub_models).map_err(|_| Malformed("job"))?;
    let node = |node: &u32| narrow(*node, "nodes").map(AggregationNode);
    let nodes = own.nodes.iter().map(node).collect::<Result<_, _>>()?;
    // All goes to its switch, or to the server, which knows the way.
    let assignment =
        Assignment::new(rank.0, sub_models, nodes, Vec::new()).map_err(|_| Malformed("nodes"))?;
    // Every switch on the way took itself off.
    match admission.route.as_ref().and_then(|route| route.protocol.as_ref()) {
        Some(proto::route::Protocol::Goat(route)) if route.switches.is_empty() => {}
        _ => return Err(Malformed("route")),
    }
    Ok(WorkerJob::Goat { config, assignment })
}
