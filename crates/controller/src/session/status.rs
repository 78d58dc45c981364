//! What a switch says about itself.

use std::time::Duration;

use fanin_protocol::control::Ranks;
use fanin_tls::Trust;
use fanin_wire::{AbortReason, Generation, JobId, LossBound, RANKS_MAX, Rank, Security, WireDtype};
use tonic::{Code, Status};

use super::cancel::Cancel;
use super::split::{MemberStatus, Split};
use super::thread::runtime;
use super::warnings::say;
use crate::control_channel::{Connection, explain};
use crate::convert::{Malformed, loss_bound, narrow, ranks, security, shown, wire_dtype};
use crate::error::SessionError;
use crate::proto;

/// What a switch does.
#[derive(Clone, Debug, PartialEq)]
pub struct SwitchStatus {
    /// Version of the switch's package.
    pub version: String,
    /// Version of its packets.
    pub wire_version: u32,
    /// Its shards.
    pub shards: u32,
    /// Memory of each shard, in units of 256 elements.
    pub pool_units: u32,
    /// What of it no job has.
    pub pool_free: u32,
    /// Its jobs.
    pub jobs: Vec<JobStatus>,
    /// How they are summed.
    pub protocol: String,
    /// The switches on the way from whom was asked to the root, the root's neighbour first.
    pub relays: Vec<RelayStatus>,
    /// What its link carries, in bits a second, where it is known.
    pub rate_bps: Option<u64>,
    /// GOAT: packets that the server dropped because they are of another generation's plan.
    pub outdated: u64,
    /// GOAT: packets that the server dropped because its plan does not have them.
    pub unplanned: u64,
}

/// What a switch with an upstream does, of either protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayStatus {
    /// Its data port, as it names itself.
    pub address: String,
    /// Whom it asks, and sends to.
    pub upstream: String,
    /// ATP and GOAT: aggregators for all jobs together.
    pub aggregators: u32,
    /// Those, or SwitchML's slots, that gather now.
    pub in_use: u32,
    /// What it does for each job that it serves.
    pub jobs: Vec<RelayJob>,
    /// GOAT: packets that it dropped because they are of another generation's plan.
    pub outdated: u64,
}

/// What the plan of a GOAT job gives a switch.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedShare {
    /// Its data port, as its upstream sees it.
    pub switch: String,
    /// Of all ranks' fragments.
    pub share: f64,
    /// Those of its aggregators that the job has.
    pub aggregators: u32,
}

/// What a switch with an upstream does for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelayJob {
    /// The job.
    pub job: JobId,
    /// Fragments, or slots' exchanges, of which it got all contributions.
    pub aggregations: u64,
    /// ATP: fragments that found no aggregator free.
    pub collisions: u64,
}

/// What a job does.
#[derive(Clone, Debug, PartialEq)]
pub struct JobStatus {
    /// Its name.
    pub name: String,
    /// Its ranks.
    pub world_size: u16,
    /// What it does.
    pub state: JobStatusState,
}

/// What a job does.
#[derive(Clone, Debug, PartialEq)]
pub enum JobStatusState {
    /// It waits for ranks to join.
    Gathering {
        /// The ranks that are here.
        present: Ranks,
    },
    /// It runs.
    Running {
        /// Its id.
        job: JobId,
        /// Its generation.
        generation: Generation,
        /// Packets of a rank that may be in flight in a shard: its window.
        in_flight: u16,
        /// Its shards: no more than the switch has, nor any switch on the way.
        shards: u8,
        /// Elements of a chunk; twice as many where they travel as bfloat16, up to four times as
        /// int8, and up to eight times as int4.
        elements: u16,
        /// How the elements of float tensors travel.
        wire_dtype: WireDtype,
        /// How its packets are secured.
        security: Security,
        /// Slots, or ATP's fragments, that gather contributions now, over all shards.
        in_use: u32,
        /// Ranks that they wait for, and how many of them.
        waiting_for: Vec<(Rank, u32)>,
        /// Exchanges completed.
        completed: u64,
        /// Contributions that came again.
        retransmitted: u64,
        /// Ranks that left.
        left: Ranks,
        /// ATP and GOAT: packets that the server added up itself.
        aggregations: u64,
        /// ATP: fragments that found no aggregator free, on their whole way.
        collisions: u64,
        /// DLCP: which part of what each rank sends to this service may be lost.
        loss_bound: LossBound,
        /// DLCP: contributions that are not in its sums.
        lost: u64,
        /// GOAT: what each switch sums; the rest is the server's.
        planned: Vec<PlannedShare>,
        /// How it is shared, and which of its services this one is, as its ranks say.
        split: Option<Box<(Split, usize)>>,
        /// Its ranks, as they say.
        members: Vec<MemberStatus>,
    },
    /// It was aborted.
    Aborted {
        /// Its id.
        job: JobId,
        /// Why.
        reason: AbortReason,
    },
}

/// Asks a switch what it does. Must not be called from an asynchronous task.
///
/// # Errors
/// When it does not answer in `patience`, or is no switch.
pub fn switch_status(switch: &str, patience: Duration) -> Result<SwitchStatus, SessionError> {
    trusted_status(switch, patience, &Trust::default())
}

/// As [`switch_status`], of a switch that is known by what `trust` says.
///
/// # Errors
/// As there, and when it is not the switch.
pub fn trusted_status(switch: &str, patience: Duration, trust: &Trust) -> Result<SwitchStatus, SessionError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| SessionError::Local { what: "starting a runtime", cause: error.to_string() })?;
    let status = runtime.block_on(async {
        let (mut connection, _) = Connection::open(switch, patience, trust).await?;
        let lost = |cause: String| SessionError::NotASwitch { switch: switch.into(), cause };
        let reply = connection.client.status(proto::StatusRequest::default());
        let reply = tokio::time::timeout(patience, reply).await.map_err(|_| lost("it fell silent".into()))?;
        let reply = reply.map_err(|status| no_status(switch, &status))?;
        SwitchStatus::try_from(reply.into_inner()).map_err(|malformed| lost(malformed.to_string()))
    });
    runtime.shutdown_background();
    status
}

/// The bits a second that the link of a switch carries, and the bytes a second that its cores sum.
/// `None` if the switch does not know. Waits for a switch that is not there yet, until `cancel` is called, and says as `rank`, if
/// one is given, that it does. The switch is known by what `trust` says.
///
/// # Errors
/// When it does not answer in `patience`, or is no switch; [`SessionError::Closed`] when it was
/// cancelled.
pub fn switch_capacity(
    switch: &str,
    rank: Option<u32>,
    patience: Duration,
    cancel: &Cancel,
    trust: &Trust,
) -> Result<(Option<u64>, Option<u64>), SessionError> {
    let runtime = runtime("fanin-rate")?;
    let told = |text: &str| {
        if let Some(rank) = rank {
            say(rank, text);
        }
    };
    let reply = runtime.block_on(cancel.or(Connection::open_saying(switch, patience, trust, None, told)));
    runtime.shutdown_background();
    let (_, status) = reply?;
    Ok((status.rate_bps, status.summed_bytes_per_s))
}

/// The meaning of a failed call to learn what a switch does.
pub(super) fn no_status(switch: &str, status: &Status) -> SessionError {
    let (switch, cause) = (switch.to_owned(), explain(status));
    let is_answer = std::error::Error::source(status).is_none();
    match status.code() {
        // The switch itself says that it could not ask on, as one of ATP does without its upstream.
        Code::Unavailable | Code::FailedPrecondition if is_answer => SessionError::NoAnswer { switch, cause },
        _ => SessionError::NotASwitch { switch, cause },
    }
}

impl TryFrom<proto::StatusReply> for SwitchStatus {
    type Error = Malformed;

    fn try_from(reply: proto::StatusReply) -> Result<Self, Malformed> {
        Ok(Self {
            version: shown(reply.version),
            wire_version: reply.wire_version,
            shards: reply.shards,
            pool_units: reply.pool_units,
            pool_free: reply.pool_free,
            jobs: reply.jobs.into_iter().map(JobStatus::try_from).collect::<Result<_, _>>()?,
            protocol: shown(reply.protocol),
            relays: reply.relays.into_iter().map(RelayStatus::from).collect(),
            rate_bps: reply.rate_bps,
            outdated: reply.outdated,
            unplanned: reply.unplanned,
        })
    }
}

impl From<proto::Relay> for RelayStatus {
    fn from(switch: proto::Relay) -> Self {
        let job = |job: proto::RelayJob| RelayJob {
            job: JobId(job.job_id),
            aggregations: job.aggregations,
            collisions: job.collisions,
        };
        Self {
            address: shown(switch.address),
            upstream: shown(switch.upstream),
            aggregators: switch.aggregators,
            in_use: switch.in_use,
            jobs: switch.jobs.into_iter().map(job).collect(),
            outdated: switch.outdated,
        }
    }
}

impl TryFrom<proto::Job> for JobStatus {
    type Error = Malformed;

    fn try_from(job: proto::Job) -> Result<Self, Malformed> {
        use proto::job::State;
        let state = match job.state.ok_or(Malformed("state"))? {
            State::Gathering(gathering) => {
                JobStatusState::Gathering { present: ranks(&gathering.present, "present")? }
            }
            State::Running(running) => JobStatusState::Running {
                job: JobId(running.job_id),
                generation: Generation(narrow(running.generation, "generation")?),
                in_flight: narrow(running.in_flight, "in_flight")?,
                shards: narrow(running.shards, "shards")?,
                elements: narrow(running.elements, "elements")?,
                wire_dtype: wire_dtype(running.wire_dtype)?,
                security: security(running.security)?,
                in_use: running.in_use,
                waiting_for: (0..RANKS_MAX as u16)
                    .map(Rank)
                    .zip(running.waiting_for)
                    .filter(|(_, waiting)| *waiting > 0)
                    .collect(),
                completed: running.completed,
                retransmitted: running.retransmitted,
                left: ranks(&running.left, "left")?,
                aggregations: running.aggregations,
                collisions: running.collisions,
                loss_bound: loss_bound(running.loss_bound_millionths)?,
                lost: running.lost,
                planned: running
                    .planned
                    .into_iter()
                    .map(|proto::PlannedShare { switch, share, aggregators }| PlannedShare {
                        switch: shown(switch),
                        share,
                        aggregators,
                    })
                    .collect(),
                split: running.split.map(|told| {
                    let here = told.here as usize;
                    Box::new((told.into(), here))
                }),
                members: running.members.into_iter().map(MemberStatus::try_from).collect::<Result<_, _>>()?,
            },
            State::Aborted(aborted) => JobStatusState::Aborted {
                job: JobId(aborted.job_id),
                reason: aborted.reason.ok_or(Malformed("reason"))?.try_into()?,
            },
        };
        Ok(Self { name: shown(job.name), world_size: narrow(job.world_size, "world_size")?, state })
    }
}
