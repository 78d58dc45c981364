//! `fanin status`: what a switch does, as a report that is JSON or a table.

mod table;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::time::Duration;

use fanin_controller::protocols;
use fanin_controller::{
    JobStatus, JobStatusState, MemberStatus, PlannedShare, RelayJob, RelayStatus, SessionError, Split,
    SwitchStatus, trusted_status, why_aborted,
};
use fanin_udp::OnSockets;
use fanin_wire::{LossBound, Rank, WireDtype};
use serde::Serialize;

use self::table::table;
use crate::arguments::{SWITCH_DEFAULT, seconds};
use crate::tls::Known;
use crate::{here, output};

/// Show jobs and slots, who waits for whom, and how a job is shared among its services
///
/// Any service of a job shows the whole of it. It shows who sums which share, what the plan takes
/// and what bounds it, what was measured, and which ranks are on which machine.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    fanin status                                   this machine's services, or FANIN_SWITCH\n  \
    fanin status --switch 10.0.0.9:4800 --json\n  \
    fanin status --switch a:4800,b:4800            several, one after the other; of --json a line each\n  \
    watch -n1 fanin status")]
pub(crate) struct Arguments {
    /// The switches, or services of ranks [default: FANIN_SWITCH, or the services on this machine,
    /// or 127.0.0.1:4800]
    #[arg(long, value_name = "HOST:PORT[,..]", env = "FANIN_SWITCH")]
    switch: Option<String>,
    /// Seconds to wait for an answer
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds, allow_negative_numbers = true)]
    timeout: Duration,
    #[command(flatten)]
    known: Known,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    switch: &'a str,
    version: &'a str,
    wire_version: u32,
    shards: u32,
    protocol: &'a str,
    pool: Pool,
    jobs: Vec<Job<'a>>,
    /// The switches on the way to the root (ATP: the server), its neighbour first.
    switches: Vec<Switch<'a>>,
    /// GOAT: packets that the root dropped.
    #[serde(skip_serializing_if = "Option::is_none")]
    dropped: Option<Dropped>,
}

/// Packets that are of no plan that is in force.
#[derive(Serialize)]
struct Dropped {
    /// Packets of another generation.
    outdated: u64,
    /// Packets of this generation, whose plan does not have them.
    unplanned: u64,
}

#[derive(Serialize)]
struct Switch<'a> {
    address: &'a str,
    upstream: &'a str,
    /// ATP's and GOAT's.
    aggregators: u32,
    /// Aggregators or slots that gather.
    in_use: u32,
    jobs: Vec<SwitchJob>,
    /// GOAT: packets that it dropped because they have another generation's plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    outdated: Option<u64>,
}

/// The work of a switch for the job of this id.
#[derive(Serialize)]
struct SwitchJob {
    id: u32,
    /// For a rack: results that it handed on.
    aggregations: u64,
    collisions: u64,
}

/// Memory in units of 256 elements, each shard.
#[derive(Serialize)]
struct Pool {
    units: u32,
    free: u32,
}

#[derive(Serialize)]
struct Job<'a> {
    job: &'a str,
    world_size: u16,
    #[serde(flatten)]
    state: State<'a>,
}

#[derive(Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
enum State<'a> {
    Gathering {
        joined: Vec<u16>,
        missing: Vec<u16>,
    },
    Running {
        id: u32,
        generation: u16,
        /// Of a rank in a shard: SwitchML's slots, the fragments of ATP and GOAT.
        in_flight: u16,
        shards: u8,
        elements: u16,
        wire_dtype: &'static str,
        security: &'static str,
        in_use: u32,
        waiting_for: Vec<Waiting>,
        left: Vec<u16>,
        completed: u64,
        retransmitted: u64,
        /// ATP and GOAT: at the server.
        aggregations: u64,
        collisions: u64,
        /// The loss bound of each rank's contributions, and how many were lost; none if nothing may
        /// be.
        #[serde(skip_serializing_if = "Option::is_none")]
        loss: Option<Loss>,
        /// GOAT: what each switch sums; the rest is the server's.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        planned: Vec<Planned<'a>>,
        /// How it is shared among its services; as its ranks told it, as what follows.
        #[serde(skip_serializing_if = "Option::is_none")]
        plan: Option<Box<JobPlan>>,
        members: Vec<Member>,
    },
    Aborted {
        id: u32,
        reason: String,
    },
}

#[derive(Serialize)]
struct Planned<'a> {
    switch: &'a str,
    /// The share of all ranks' fragments.
    share: f64,
    /// The aggregators that the job has.
    aggregators: u32,
}

#[derive(Serialize)]
struct Loss {
    bound: f64,
    contributions: u64,
}

/// Times are seconds for a byte as it travels.
#[derive(Serialize)]
struct JobPlan {
    services: Vec<Service>,
    /// Headers apart; none where it was not planned.
    predicted: Option<f64>,
    bound: Option<String>,
    /// The rates that the links were told to carry, and those that were assumed for links that tell
    /// nothing; none if no share follows from them.
    links: Option<String>,
    /// The time of the rank that waits least for others; none before the first large all-reduce.
    measured: Option<f64>,
    imbalance: f64,
}

#[derive(Serialize)]
struct Service {
    service: String,
    share: f64,
    /// The rank in whose process it is, if it is in one's.
    host: Option<u32>,
    /// Whether this is who was asked.
    here: bool,
}

#[derive(Serialize)]
struct Member {
    rank: u16,
    /// The ranks for which it speaks.
    ranks: Vec<u32>,
    machine: String,
    name: String,
    address: String,
    measured: Option<f64>,
    imbalance: f64,
}

impl Member {
    /// Whether the service keeps where it is: it has room for so many.
    fn is_placed(&self) -> bool {
        !(self.machine.is_empty() && self.name.is_empty() && self.address.is_empty())
    }
}

#[derive(Serialize)]
struct Waiting {
    rank: u16,
    /// Slots, or ATP's fragments, that wait for it.
    waiting: u32,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let switches = asked(arguments.switch.as_deref(), here::services);
    let trust = arguments.known.trust()?;
    let is_guessed = arguments.switch.as_deref().is_none_or(|named| named.trim().is_empty())
        && switches == [SWITCH_DEFAULT];
    let mut silent = Vec::new();
    for (index, switch) in switches.iter().enumerate() {
        // A guessed service is on this machine, or nowhere.
        let patience =
            if is_guessed { arguments.timeout.min(Duration::from_secs(1)) } else { arguments.timeout };
        let status = match trusted_status(switch, patience, &trust) {
            Ok(status) => status,
            // The others have something to say.
            Err(error) => {
                silent.push(silence(&error, is_guessed));
                continue;
            }
        };
        let report = report(switch, &status);
        let text = if arguments.json { serde_json::to_string(&report)? } else { table(&report) };
        let gap = if arguments.json || index + 1 == switches.len() { "" } else { "\n" };
        output::line(&(text + gap))?;
    }
    anyhow::ensure!(silent.is_empty(), silent.join("\n"));
    Ok(())
}

/// Why nothing is shown.
fn silence(error: &SessionError, is_guessed: bool) -> String {
    match error {
        SessionError::SwitchUnreachable { switch, .. } if is_guessed => format!(
            "no job runs here: no rank on this machine hosts a service, and no switch answers at {switch}; name one that \
             is elsewhere (fanin status --switch HOST:PORT)"
        ),
        error => error.to_string(),
    }
}

/// The services to ask: those that were named, or those that are here, or those that would be here
/// by default.
pub(crate) fn asked(named: Option<&str>, here: impl FnOnce() -> Vec<SocketAddr>) -> Vec<String> {
    match named.map(str::trim).filter(|named| !named.is_empty()) {
        Some(named) => named.split(',').map(|switch| switch.trim().to_owned()).collect(),
        None => match here() {
            here if here.is_empty() => vec![SWITCH_DEFAULT.into()],
            here => here.iter().map(SocketAddr::to_string).collect(),
        },
    }
}

fn report<'a>(switch: &'a str, status: &'a SwitchStatus) -> Report<'a> {
    let protocol = protocols::said(&status.protocol);
    Report {
        switch,
        version: &status.version,
        wire_version: status.wire_version,
        shards: status.shards,
        protocol: &status.protocol,
        pool: Pool { units: status.pool_units, free: status.pool_free },
        jobs: status
            .jobs
            .iter()
            .map(|job| Job { job: &job.name, world_size: job.world_size, state: state(job, protocol) })
            .collect(),
        switches: status.relays.iter().map(|relay| switch_report(relay, protocol)).collect(),
        dropped: protocol
            .plans()
            .then_some(Dropped { outdated: status.outdated, unplanned: status.unplanned }),
    }
}

fn switch_report<'a>(switch: &'a RelayStatus, protocol: &dyn OnSockets) -> Switch<'a> {
    let job = |job: &RelayJob| SwitchJob {
        id: job.job.0,
        aggregations: job.aggregations,
        collisions: job.collisions,
    };
    Switch {
        address: &switch.address,
        upstream: &switch.upstream,
        aggregators: switch.aggregators,
        in_use: switch.in_use,
        jobs: switch.jobs.iter().map(job).collect(),
        outdated: protocol.plans().then_some(switch.outdated),
    }
}

fn state<'a>(job: &'a JobStatus, protocol: &dyn OnSockets) -> State<'a> {
    match &job.state {
        JobStatusState::Gathering { present } => {
            let is_here = |rank: &u16| present.contains(Rank(*rank));
            let (joined, missing) = (0..job.world_size).partition(is_here);
            State::Gathering { joined, missing }
        }
        JobStatusState::Running {
            job,
            generation,
            in_flight,
            shards,
            elements,
            wire_dtype,
            security,
            in_use,
            waiting_for,
            completed,
            retransmitted,
            left,
            aggregations,
            collisions,
            loss_bound,
            lost,
            planned,
            split,
            members,
        } => State::Running {
            id: job.0,
            generation: generation.0,
            in_flight: *in_flight,
            shards: *shards,
            elements: *elements,
            wire_dtype: match wire_dtype {
                WireDtype::SharedExponent if protocol.aggregates() => "integers",
                _ => wire_dtype.name(),
            },
            security: security.name(),
            in_use: *in_use,
            waiting_for: waiting_for
                .iter()
                .map(|(rank, waiting)| Waiting { rank: rank.0, waiting: *waiting })
                .collect(),
            left: left.iter().map(|rank| rank.0).collect(),
            completed: *completed,
            retransmitted: *retransmitted,
            aggregations: *aggregations,
            collisions: *collisions,
            loss: (*loss_bound != LossBound::RELIABLE)
                .then(|| Loss { bound: f64::from(loss_bound.millionths()) / 1e6, contributions: *lost }),
            planned: planned
                .iter()
                .map(|PlannedShare { switch, share, aggregators }| Planned {
                    switch,
                    share: *share,
                    aggregators: *aggregators,
                })
                .collect(),
            plan: split.as_ref().map(|told| Box::new(plan(&told.0, told.1, members))),
            members: members.iter().map(member).collect(),
        },
        JobStatusState::Aborted { job, reason } => State::Aborted { id: job.0, reason: why_aborted(reason) },
    }
}

fn plan(split: &Split, here: usize, members: &[MemberStatus]) -> JobPlan {
    let measured = members.iter().filter_map(|member| member.seconds_per_byte);
    JobPlan {
        services: split
            .shares
            .iter()
            .enumerate()
            .map(|(index, share)| Service {
                service: share.service.clone(),
                share: share.share,
                host: share.host,
                here: index == here,
            })
            .collect(),
        predicted: split.prediction.as_ref().map(|told| told.seconds_per_byte),
        bound: split.prediction.as_ref().map(|told| told.bound.clone()),
        links: Some(split.links.clone()).filter(|links| !links.is_empty()),
        measured: measured.min_by(f64::total_cmp),
        imbalance: members.iter().map(|member| member.imbalance).fold(0.0, f64::max),
    }
}

fn member(member: &MemberStatus) -> Member {
    let ranks = match &member.place.ranks[..] {
        [] => vec![member.rank.0.into()],
        ranks => ranks.to_vec(),
    };
    Member {
        rank: member.rank.0,
        ranks,
        machine: member.place.machine.clone(),
        name: member.place.name.clone(),
        address: member.place.address.clone(),
        measured: member.seconds_per_byte,
        imbalance: member.imbalance,
    }
}
