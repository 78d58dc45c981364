//! `fanin status`: what a switch does.

use std::time::Duration;

use comfy_table::{Cell, CellAlignment, Table, presets};
use fanin_controller::{
    AtpSwitchJob, AtpSwitchStatus, JobStatus, JobStatusState, SwitchStatus, switch_status,
};
use fanin_protocol::control::Protocol;
use fanin_wire::AbortReason;
use serde::Serialize;

use crate::arguments::{SWITCH_DEFAULT, seconds};
use crate::output;

/// Show a switch's jobs and slots, and who waits for whom
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    fanin status\n  \
    fanin status --switch 10.0.0.9:4800 --json\n  \
    watch -n1 fanin status")]
pub(crate) struct Arguments {
    /// The switch
    #[arg(long, value_name = "HOST:PORT", default_value = SWITCH_DEFAULT, env = "FANIN_SWITCH")]
    switch: String,
    /// Seconds to wait for an answer
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    timeout: Duration,
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
    protocol: &'static str,
    pool: Pool,
    jobs: Vec<Job<'a>>,
    /// ATP's switches on the way to the server, the server's neighbour first.
    switches: Vec<Switch<'a>>,
}

#[derive(Serialize)]
struct Switch<'a> {
    address: &'a str,
    upstream: &'a str,
    aggregators: u32,
    in_use: u32,
    jobs: Vec<SwitchJob>,
}

/// What a switch did for the job of this id.
#[derive(Serialize)]
struct SwitchJob {
    id: u32,
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
    world_size: u8,
    #[serde(flatten)]
    state: State,
}

#[derive(Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
enum State {
    Gathering {
        joined: Vec<u8>,
        missing: Vec<u8>,
    },
    Running {
        id: u32,
        generation: u16,
        /// SwitchML.
        #[serde(skip_serializing_if = "Option::is_none")]
        slots: Option<u16>,
        /// ATP.
        #[serde(skip_serializing_if = "Option::is_none")]
        window: Option<u16>,
        elements: u16,
        wire_dtype: &'static str,
        in_use: u32,
        waiting_for: Vec<Waiting>,
        left: Vec<u8>,
        completed: u64,
        retransmitted: u64,
        /// ATP: at the server.
        aggregations: u64,
        collisions: u64,
    },
    Aborted {
        id: u32,
        reason: String,
    },
}

#[derive(Serialize)]
struct Waiting {
    rank: u8,
    /// Slots, or ATP's fragments, that wait for it.
    waiting: u32,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let status = switch_status(&arguments.switch, arguments.timeout)?;
    let report = report(&arguments.switch, &status);
    let text = if arguments.json { serde_json::to_string(&report)? } else { table(&report) };
    Ok(output::line(&text)?)
}

fn report<'a>(switch: &'a str, status: &'a SwitchStatus) -> Report<'a> {
    Report {
        switch,
        version: &status.version,
        wire_version: status.wire_version,
        shards: status.shards,
        protocol: status.protocol.name(),
        pool: Pool { units: status.pool_units, free: status.pool_free },
        jobs: status
            .jobs
            .iter()
            .map(|job| Job { job: &job.name, world_size: job.world_size, state: state(job, status.protocol) })
            .collect(),
        switches: status.switches.iter().map(switch_report).collect(),
    }
}

fn switch_report(switch: &AtpSwitchStatus) -> Switch<'_> {
    let job = |job: &AtpSwitchJob| SwitchJob {
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
    }
}

fn state(job: &JobStatus, protocol: Protocol) -> State {
    match &job.state {
        JobStatusState::Gathering { present } => {
            let is_here = |rank: &u8| present.contains(fanin_wire::WorkerId(*rank));
            let (joined, missing) = (0..job.world_size).partition(is_here);
            State::Gathering { joined, missing }
        }
        JobStatusState::Running {
            job,
            generation,
            in_flight,
            elements,
            wire_dtype,
            in_use,
            waiting_for,
            completed,
            retransmitted,
            left,
            aggregations,
            collisions,
        } => State::Running {
            id: job.0,
            generation: generation.0,
            slots: (protocol == Protocol::SwitchMl).then_some(*in_flight),
            window: (protocol == Protocol::Atp).then_some(*in_flight),
            elements: *elements,
            wire_dtype: wire_dtype.name(),
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
        },
        JobStatusState::Aborted { job, reason } => State::Aborted { id: job.0, reason: explain(reason) },
    }
}

pub(crate) fn explain(reason: &AbortReason) -> String {
    match reason {
        AbortReason::Expelled(rank) => format!("rank {} was lost", rank.0),
        AbortReason::Mismatch { first, second } => {
            format!("ranks {} and {} disagree: {} against {}", first.0.0, second.0.0, first.1, second.1)
        }
        AbortReason::SwitchStopped => "the switch stops".into(),
    }
}

fn table(report: &Report<'_>) -> String {
    let Pool { units, free } = report.pool;
    let head = format!(
        "switch {}: {}fanin {}, wire version {}, {} shard{}, {} of {units} units of memory in use",
        report.switch,
        if report.protocol == "atp" { "ATP, " } else { "" },
        report.version,
        report.wire_version,
        report.shards,
        if report.shards == 1 { "" } else { "s" },
        units.saturating_sub(free),
    );
    let tail = if report.protocol == "atp" { atp_table(report) } else { String::new() };
    if report.jobs.is_empty() {
        return format!("{head}\nno jobs{tail}");
    }
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    let (bound, unit) = if report.protocol == "atp" { ("WINDOW", "fragments") } else { ("SLOTS", "slots") };
    table.set_header(["JOB", "RANKS", "STATE", "WIRE", bound, "IN USE", "SUMS", "RESENT", "WAITS FOR"]);
    for job in &report.jobs {
        let number = |number: u64| Cell::new(number).set_alignment(CellAlignment::Right);
        let mut row = vec![Cell::new(job.job), number(job.world_size.into())];
        match &job.state {
            State::Gathering { missing, .. } => {
                row.push(Cell::new("joining"));
                row.extend((0..5).map(|_| Cell::new("")));
                row.push(Cell::new(ranks(missing.iter().map(u8::to_string))));
            }
            State::Running {
                wire_dtype,
                slots,
                window,
                in_use,
                completed,
                retransmitted,
                waiting_for,
                ..
            } => {
                row.push(Cell::new("running"));
                row.push(Cell::new(wire_dtype));
                let in_flight = slots.or(*window).unwrap_or_default();
                let numbers = [u64::from(in_flight), u64::from(*in_use), *completed, *retransmitted];
                row.extend(numbers.map(number));
                let waits = |waiting: &Waiting| format!("{} ({} {unit})", waiting.rank, waiting.waiting);
                row.push(Cell::new(ranks(waiting_for.iter().map(waits))));
            }
            State::Aborted { reason, .. } => {
                row.push(Cell::new("aborted"));
                row.extend((0..5).map(|_| Cell::new("")));
                row.push(Cell::new(format!("nobody: {reason}")));
            }
        }
        table.add_row(row);
    }
    format!("{head}\n{}{tail}", table.trim_fmt())
}

/// Where ATP's fragments are added: at each switch on the way from whom was asked, and at the server.
fn atp_table(report: &Report<'_>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["ATP", "AGGREGATORS", "IN USE", "JOB", "ADDED", "COLLISIONS"]);
    let number = |number: u64| Cell::new(number).set_alignment(CellAlignment::Right);
    let name = |id: u32| {
        let is_it = |job: &&Job<'_>| matches!(job.state, State::Running { id: of_job, .. } if of_job == id);
        report.jobs.iter().find(is_it).map_or_else(|| id.to_string(), |job| job.job.to_owned())
    };
    for switch in report.switches.iter().rev() {
        let whole = vec![
            Cell::new(format!("switch {}", switch.address)),
            number(switch.aggregators.into()),
            number(switch.in_use.into()),
        ];
        for job in &switch.jobs {
            let of_job = [Cell::new(name(job.id)), number(job.aggregations), number(job.collisions)];
            table.add_row(whole.iter().cloned().chain(of_job));
        }
        if switch.jobs.is_empty() {
            table.add_row(whole);
        }
    }
    for job in &report.jobs {
        if let State::Running { aggregations, collisions, .. } = job.state {
            let cells = ["server", "", "", job.job].map(Cell::new);
            table.add_row(cells.into_iter().chain([number(aggregations), number(collisions)]));
        }
    }
    if table.is_empty() { String::new() } else { format!("\n\n{}", table.trim_fmt()) }
}

fn ranks(ranks: impl Iterator<Item = String>) -> String {
    let ranks: Vec<String> = ranks.collect();
    match ranks.len() {
        0 => "nobody".into(),
        1 => format!("rank {}", ranks[0]),
        _ => format!("ranks {}", ranks.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fanin_protocol::control::Ranks;
    use fanin_wire::{Generation, JobId, WireDtype, WorkerId};

    fn status() -> SwitchStatus {
        let job = |name: &str, state| JobStatus { name: name.into(), world_size: 3, state };
        let running = JobStatusState::Running {
            job: JobId(9),
            generation: Generation(1),
            in_flight: 64,
            elements: 352,
            wire_dtype: WireDtype::Bfloat16,
            in_use: 12,
            waiting_for: vec![(WorkerId(2), 12)],
            completed: 1000,
            retransmitted: 3,
            left: Ranks(0),
            aggregations: 0,
            collisions: 0,
        };
        SwitchStatus {
            rate_bps: None,
            version: "0.1.0".into(),
            wire_version: 1,
            shards: 1,
            pool_units: 1024,
            pool_free: 896,
            jobs: vec![job("gpt", running), job("late", JobStatusState::Gathering { present: Ranks(0b101) })],
            protocol: Protocol::SwitchMl,
            switches: vec![],
        }
    }

    #[test]
    fn the_table_says_who_waits_for_whom() {
        let status = status();
        let text = table(&report("box:4800", &status));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "switch box:4800: fanin 0.1.0, wire version 1, 1 shard, 128 of 1024 units of memory in use"
        );
        assert!(lines[2].contains("running  bfloat16") && lines[2].ends_with("rank 2 (12 slots)"), "{text}");
        assert!(lines[3].contains("joining") && lines[3].ends_with("rank 1"), "{text}");
    }

    #[test]
    fn the_table_says_where_atp_adds() {
        let of_switch = AtpSwitchJob { job: JobId(9), aggregations: 500, collisions: 7 };
        let switch = AtpSwitchStatus {
            address: "10.0.1.9:4800".into(),
            upstream: "10.0.0.8:4800".into(),
            aggregators: 4096,
            in_use: 3,
            jobs: vec![of_switch],
        };
        let mut status = SwitchStatus { protocol: Protocol::Atp, switches: vec![switch], ..status() };
        if let JobStatusState::Running { aggregations, collisions, .. } = &mut status.jobs[0].state {
            (*aggregations, *collisions) = (200, 8);
        }
        let text = table(&report("box:4800", &status));
        assert!(text.starts_with("switch box:4800: ATP, fanin 0.1.0"), "{text}");
        assert!(text.contains(" WINDOW ") && !text.contains(" SLOTS "), "{text}");
        assert!(text.contains("rank 2 (12 fragments)"), "{text}");
        let json = serde_json::to_value(report("box:4800", &status)).expect("serialisable");
        assert_eq!((&json["jobs"][0]["window"], json["jobs"][0].get("slots")), (&64.into(), None));
        let cells = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let rows: Vec<Vec<String>> = text.lines().rev().take(2).map(cells).collect();
        assert_eq!(rows[1], ["switch", "10.0.1.9:4800", "4096", "3", "gpt", "500", "7"]);
        assert_eq!(rows[0], ["server", "gpt", "200", "8"]);
    }

    #[test]
    fn the_json_is_for_programs() {
        let status = status();
        let json = serde_json::to_value(report("box:4800", &status)).expect("serialisable");
        assert_eq!(json["pool"]["free"], 896);
        assert_eq!(json["jobs"][0]["state"], "running");
        assert_eq!(json["jobs"][0]["wire_dtype"], "bfloat16");
        assert_eq!(json["jobs"][0]["waiting_for"][0]["rank"], 2);
        assert_eq!(json["jobs"][1]["missing"][0], 1);
    }
}
