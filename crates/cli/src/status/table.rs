//! The report for people: tables of jobs, machines and racks.

use std::collections::{BTreeSet, HashMap};

use comfy_table::{Cell, CellAlignment, Table, presets};
use fanin_controller::protocols;

use super::{Dropped, Job, Loss, Member, Planned, Pool, Report, Service, State, Waiting};

pub(super) fn table(report: &Report<'_>) -> String {
    let Pool { units, free } = report.pool;
    let protocol = protocols::said(report.protocol);
    let head = format!(
        "switch {}: {}fanin {}, wire version {}, {} shard{}, {} of {units} units of memory in use",
        report.switch,
        if protocol == protocols::usual() { String::new() } else { format!("{}, ", protocol.title()) },
        report.version,
        report.wire_version,
        report.shards,
        if report.shards == 1 { "" } else { "s" },
        units.saturating_sub(free),
    );
    let has_fragments = protocol.aggregates();
    let tail =
        if has_fragments { fragments_table(report) } else { rack_table(report) } + &planned_table(report);
    if report.jobs.is_empty() {
        return format!("{head}\nno jobs{tail}");
    }
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    let unit = if has_fragments { "fragments" } else { "slots" };
    table.set_header(["JOB", "RANKS", "STATE", "WIRE", "IN FLIGHT", "IN USE", "SUMS", "RESENT", "WAITS FOR"]);
    for job in &report.jobs {
        let number = |number: u64| Cell::new(number).set_alignment(CellAlignment::Right);
        let mut row = vec![Cell::new(job.job), number(job.world_size.into())];
        match &job.state {
            State::Gathering { missing, .. } => {
                row.push(Cell::new("joining"));
                row.extend((0..5).map(|_| Cell::new("")));
                let missing: Vec<u32> = missing.iter().map(|rank| u32::from(*rank)).collect();
                row.push(Cell::new(ranks(missing.len(), shortened(&missing))));
            }
            State::Running {
                wire_dtype,
                security,
                in_flight,
                in_use,
                completed,
                retransmitted,
                waiting_for,
                ..
            } => {
                row.push(Cell::new("running"));
                row.push(Cell::new(match *security {
                    "tag" => (*wire_dtype).to_owned(),
                    security => format!("{wire_dtype}, {security}"),
                }));
                let numbers = [u64::from(*in_flight), u64::from(*in_use), *completed, *retransmitted];
                row.extend(numbers.map(number));
                let alike =
                    |one: &Waiting, next: &Waiting| (one.rank + 1, one.waiting) == (next.rank, next.waiting);
                let waits = |alike: &[Waiting]| {
                    let of: Vec<u32> = alike.iter().map(|waiting| waiting.rank.into()).collect();
                    format!("{} ({} {unit})", shortened(&of), alike[0].waiting)
                };
                let waits: Vec<String> = waiting_for.chunk_by(alike).map(waits).collect();
                row.push(Cell::new(ranks(waiting_for.len(), waits.join(", "))));
            }
            State::Aborted { reason, .. } => {
                row.push(Cell::new("aborted"));
                row.extend((0..5).map(|_| Cell::new("")));
                row.push(Cell::new(format!("nobody: {reason}")));
            }
        }
        table.add_row(row);
    }
    let losses: String = report.jobs.iter().filter_map(loss).collect();
    let plans: String = report.jobs.iter().filter_map(plan_table).collect();
    format!("{head}\n{}{losses}{plans}{tail}", table.trim_fmt())
}

/// The loss that a job may have, and has had here.
fn loss(job: &Job<'_>) -> Option<String> {
    let State::Running { loss: Some(Loss { bound, contributions }), .. } = job.state else { return None };
    let (name, percent) = (job.job, 100.0 * bound);
    Some(format!("\n\njob {name}: each rank may lose {percent} %; {contributions} contributions were lost"))
}

/// The sums of a job by service, and the places of its ranks.
fn plan_table(job: &Job<'_>) -> Option<String> {
    let State::Running { plan: Some(plan), members, .. } = &job.state else { return None };
    let number = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    let mut services = Table::new();
    services.load_style(presets::NOTHING);
    services.set_header(["SERVICE", "SHARE", "HOSTED BY"]);
    for Service { service, share, host, here } in &plan.services {
        let host = host.map_or("nobody of the job".into(), |rank| format!("rank {rank}"));
        let is_here = if *here { " (asked)" } else { "" };
        services.add_row([
            Cell::new(service),
            number(format!("{:.1} %", 100.0 * share)),
            Cell::new(host + is_here),
        ]);
    }
    let mut machines = Table::new();
    machines.load_style(presets::NOTHING);
    machines.set_header(["MACHINE", "ADDRESS", "RANKS", "MEASURED"]);
    let (known, elsewhere): (Vec<_>, Vec<_>) = members.iter().partition(|member| member.is_placed());
    for (of_machine, measured) in by_machine(&known) {
        let first = of_machine[0];
        machines.add_row([
            Cell::new(&first.name),
            Cell::new(&first.address),
            number(shortened(&ranks_of(&of_machine))),
            number(time(measured)),
        ]);
    }
    let elsewhere = ranks_of(&elsewhere);
    // A rank that speaks for others says so with his place: without it he is only a machine's
    // number.
    let are_machines = known.iter().any(|member| member.ranks.len() > 1);
    let elsewhere = match elsewhere.len() {
        0 => String::new(),
        count if are_machines => format!(
            "\nnot shown: where the ranks of {} are; a service keeps the places of about 100 machines",
            if count == 1 { "one more machine".into() } else { format!("{count} more machines") },
        ),
        count => format!(
            "\nnot shown: where {count} more are ({}); a service keeps the places of about 100 ranks",
            ranks(count, shortened(&elsewhere)),
        ),
    };
    let bound = plan.bound.as_ref().map_or_else(String::new, |bound| format!(", bound by {bound}"));
    let links = plan.links.as_ref().map_or_else(String::new, |links| format!("\nlinks: {links}"));
    Some(format!(
        "\n\njob {}: predicted {}{bound}; measured {}; imbalance {:.1} %{links}\n{}\n\n{}{elsewhere}",
        job.job,
        time(plan.predicted),
        // Small tensors wait for round trips and not for links.
        plan.measured.map_or("nothing (no tensor of 1 MiB yet)".into(), |measured| time(Some(measured))),
        100.0 * plan.imbalance,
        services.trim_fmt(),
        machines.trim_fmt(),
    ))
}

/// The ranks of each machine, in the order of the first of them, and what a byte takes of the one
/// that waits least for others.
fn by_machine<'a>(members: &[&'a Member]) -> Vec<(Vec<&'a Member>, Option<f64>)> {
    let mut places = HashMap::new();
    let mut machines: Vec<Vec<&Member>> = Vec::new();
    for &member in members {
        let place = (&member.machine, &member.name, &member.address);
        let machine = *places.entry(place).or_insert_with(|| {
            machines.push(Vec::new());
            machines.len() - 1
        });
        machines[machine].push(member);
    }
    let measured = |of: &[&Member]| of.iter().filter_map(|member| member.measured).min_by(f64::total_cmp);
    machines.into_iter().map(|of| (of.clone(), measured(&of))).collect()
}

fn ranks_of(members: &[&Member]) -> Vec<u32> {
    let ranks: BTreeSet<u32> = members.iter().flat_map(|member| member.ranks.iter().copied()).collect();
    ranks.into_iter().collect()
}

/// The time for a megabyte.
fn time(seconds_per_byte: Option<f64>) -> String {
    seconds_per_byte.map_or("-".into(), |seconds| format!("{:.3} ms/MB", seconds * 1e9))
}

/// 0, 1, 2, 5 as "0-2, 5".
fn shortened(ranks: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(*rank) => *last = *rank,
            _ => runs.push((*rank, *rank)),
        }
    }
    let run =
        |(first, last): (u32, u32)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    runs.into_iter().map(run).collect::<Vec<_>>().join(", ")
}

/// The racks on the way from whom was asked to the root.
fn rack_table(report: &Report<'_>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["RACK", "UPSTREAM", "IN USE", "JOB", "SUMS"]);
    let number = |number: u64| Cell::new(number).set_alignment(CellAlignment::Right);
    for rack in report.switches.iter().rev() {
        let whole = vec![Cell::new(rack.address), Cell::new(rack.upstream), number(rack.in_use.into())];
        for job in &rack.jobs {
            let of_job = [Cell::new(name_of(report, job.id)), number(job.aggregations)];
            table.add_row(whole.iter().cloned().chain(of_job));
        }
        if rack.jobs.is_empty() {
            table.add_row(whole);
        }
    }
    if table.is_empty() { String::new() } else { format!("\n\n{}", table.trim_fmt()) }
}

/// A running job's name, or its id where it has none any more.
fn name_of(report: &Report<'_>, id: u32) -> String {
    let is_it = |job: &&Job<'_>| matches!(job.state, State::Running { id: of_job, .. } if of_job == id);
    report.jobs.iter().find(is_it).map_or_else(|| id.to_string(), |job| job.job.to_owned())
}

/// The places where fragments are added: each switch on the way from whom was asked, and the
/// server.
fn fragments_table(report: &Report<'_>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    let protocol = report.protocol.to_uppercase();
    table.set_header([&*protocol, "AGGREGATORS", "IN USE", "JOB", "ADDED", "COLLISIONS"]);
    let number = |number: u64| Cell::new(number).set_alignment(CellAlignment::Right);
    for switch in report.switches.iter().rev() {
        let whole = vec![
            Cell::new(format!("switch {}", switch.address)),
            number(switch.aggregators.into()),
            number(switch.in_use.into()),
        ];
        for job in &switch.jobs {
            let of_job =
                [Cell::new(name_of(report, job.id)), number(job.aggregations), number(job.collisions)];
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

/// Which switch sums which share of each job, as GOAT plans it, and what came that is of no such
/// plan.
fn planned_table(report: &Report<'_>) -> String {
    let Some(Dropped { outdated, unplanned }) = report.dropped else { return String::new() };
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["PLANNED", "SUMMED AT", "SHARE", "AGGREGATORS"]);
    let number = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    let percent = |share: f64| number(format!("{:.1} %", 100.0 * share));
    for job in &report.jobs {
        let State::Running { planned, .. } = &job.state else { continue };
        for Planned { switch, share, aggregators } in planned {
            table.add_row([
                Cell::new(job.job),
                Cell::new(switch),
                percent(*share),
                number(aggregators.to_string()),
            ]);
        }
        let left = 1.0 - planned.iter().map(|planned| planned.share).sum::<f64>();
        table.add_row([Cell::new(job.job), Cell::new("server"), percent(left.max(0.0)), Cell::new("")]);
    }
    let of_switches = report.switches.iter().rev().filter_map(|switch| {
        let outdated = switch.outdated?;
        Some(format!(", at {} {outdated} of an older one", switch.address))
    });
    let of_switches: String = of_switches.collect();
    let shares = if table.is_empty() { String::new() } else { format!("\n\n{}", table.trim_fmt()) };
    format!(
        "{shares}\n\ndropped as not of the plan: at the server {outdated} of an older one and {unplanned} of none{of_switches}"
    )
}

fn ranks(count: usize, named: String) -> String {
    match count {
        0 => "nobody".into(),
        1 => format!("rank {named}"),
        _ => format!("ranks {named}"),
    }
}
