//! A machine and its strategies, for people.

use std::fmt::Write;

use comfy_table::{Cell, CellAlignment, Table, presets};
use fanin_plan::machine_topology::{MachineTopology, PartId, PartKind, Planned, Wire};

use super::{Report, kind_name, rate_text};

pub(super) fn text(topology: &MachineTopology, plans: &[Planned], report: &Report) -> String {
    let chosen = report.chosen.map(|index| &plans[index]);
    let mut text = tree(topology, chosen, report.size_bytes as f64);
    let (gigabytes, machines) = (report.size_bytes as f64 / 1e9, report.machines);
    if let Some(index) = report.chosen {
        let strategy = &report.strategies[index];
        let spares =
            if report.spares > 0 { format!(" and {} that only sum", report.spares) } else { String::new() };
        let plural = if machines == 1 { "" } else { "s" };
        let _ = write!(
            text,
            "\n\n{gigabytes} GB of gradients of each GPU, {machines} machine{plural} that train{}{spares}; UP and DOWN are of the first strategy:\n{}\n",
            if machines == 1 { "s" } else { "" },
            strategies(report, index)
        );
        let _ = write!(text, "\nTake {}: {}.", strategy.name, duration(strategy.time_s));
    } else {
        text += "\n\nno GPU: there is nothing to sum in this machine before its NIC";
    }
    for note in &report.notes {
        let _ = write!(text, "\nnote: {note}");
    }
    text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

/// The tree of the machine's parts, each with the load of its link upwards.
fn tree(topology: &MachineTopology, chosen: Option<&Planned>, size_bytes: f64) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["PART", "LINK", "UP", "DOWN", "BUSY"]);
    for cpu in topology.ids().filter(|part| matches!(topology.kind(*part), PartKind::Cpu { .. })) {
        let memory = match topology.kind(cpu) {
            PartKind::Cpu { memory_bps } if memory_bps.is_finite() => {
                format!("memory {}", rate_text(memory_bps))
            }
            _ => String::new(),
        };
        table.add_row([format!("CPU {}", topology.name(cpu)), memory]);
        under(topology, cpu, "", chosen, size_bytes, &mut table);
    }
    let wires = topology
        .links()
        .iter()
        .enumerate()
        .filter(|(_, link)| matches!(link.wire, Wire::Socket | Wire::NvLink));
    for (index, link) in wires {
        let [a, b] = link.ends.map(|end| topology.name(end));
        let part = format!("{} {a} - {b}", link.wire);
        // From the second end to the first, as up is.
        add(&mut table, part, (index, false), link.rate_bps, chosen, size_bytes);
    }
    table.to_string()
}

fn under(
    topology: &MachineTopology,
    above: PartId,
    indent: &str,
    chosen: Option<&Planned>,
    size_bytes: f64,
    table: &mut Table,
) {
    let links = topology.links().iter().enumerate();
    let below: Vec<_> = links
        .filter(|(_, link)| matches!(link.wire, Wire::Pcie | Wire::Cable) && link.ends[0] == above)
        .map(|(index, link)| (index, link.ends[1], link.rate_bps))
        .collect();
    for (place, (index, part, bps)) in below.iter().enumerate() {
        let last = place + 1 == below.len();
        let (branch, further) = if last { ("`- ", "   ") } else { ("|- ", "|  ") };
        let name = if topology.kind(*part) == PartKind::Network {
            "network".to_owned()
        } else {
            format!("{} {}", kind_name(topology.kind(*part)), topology.name(*part))
        };
        add(table, format!("{indent}{branch}{name}"), (*index, true), *bps, chosen, size_bytes);
        under(topology, *part, &format!("{indent}{further}"), chosen, size_bytes, table);
    }
}

/// A link's row; with `downwards` from its first end to its second.
fn add(
    table: &mut Table,
    part: String,
    (link, downwards): (usize, bool),
    bps: f64,
    chosen: Option<&Planned>,
    size_bytes: f64,
) {
    let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    let mut row = vec![Cell::new(part), right(rate_text(bps))];
    if let Some(plan) = chosen {
        let ([forth, back], seconds) = (plan.traffic.bytes[link], plan.traffic.seconds[link]);
        let (down, up) = if downwards { (forth, back) } else { (back, forth) };
        row.extend([up, down].map(|bytes| right(format!("{:.2} GB", bytes * size_bytes / 1e9))));
        row.push(right(duration(seconds[0].max(seconds[1]) * size_bytes)));
    }
    table.add_row(row);
}

fn strategies(report: &Report, chosen: usize) -> String {
    let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    let mut header = vec!["STRATEGY", "TIME", "ALL WAIT FOR"];
    let played = report.strategies.iter().any(|strategy| strategy.played_s.is_some());
    if played {
        header.insert(2, "PLAYED");
    }
    table.set_header(header);
    let first = [chosen].into_iter();
    for index in first.chain((0..report.strategies.len()).filter(|index| *index != chosen)) {
        let strategy = &report.strategies[index];
        let compared = if strategy.candidate { "" } else { " (compared)" };
        let mut row =
            vec![Cell::new(format!("{}{compared}", strategy.name)), right(duration(strategy.time_s))];
        row.extend(strategy.played_s.map(|seconds| right(duration(seconds))));
        row.push(Cell::new(strategy.slowest.as_deref().unwrap_or("")));
        table.add_row(row);
    }
    table.to_string()
}

fn duration(seconds: f64) -> String {
    format!("{:.1} ms", seconds * 1e3)
}
