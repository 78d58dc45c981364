//! A plan as a picture: the topology from the hosts up. Each link has the colour of the time that
//! it takes. Each switch shows the part of its memory that is used.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write;

use fanin_plan::{GradientSchedule, NodeId, Topology, Workload};

use super::super::time_text;
use super::bytes_text;

const MARGIN: f64 = 30.0;
/// Between rows of nodes.
const ROW: f64 = 130.0;
/// Above the first row: the title.
const HEAD: f64 = 70.0;
/// Below the last one: the legend.
const FOOT: f64 = 120.0;
const WIDTH_MIN: f64 = 960.0;
const WIDTH_MAX: f64 = 2400.0;
/// A switch's box.
const BOX: (f64, f64) = (64.0, 26.0);
/// A host's place, at best.
const HOST: f64 = 30.0;
/// Of a letter.
const LETTER: f64 = 6.5;

/// The places where nodes are drawn.
struct Places {
    of: Vec<(f64, f64)>,
    width: f64,
    height: f64,
    /// From one host to the next.
    pitch: f64,
}

/// The picture, as SVG.
pub(super) fn svg(workload: &Workload, schedule: &GradientSchedule, planner: &str) -> String {
    let topology = workload.topology();
    let places = places(topology);
    let slowest = schedule.slowest(workload);
    let seconds: Vec<f64> = schedule
        .link_bytes(workload)
        .iter()
        .zip(topology.links())
        .map(|(bytes, link)| bytes * 8.0 / link.rate_bps)
        .collect();
    let (width, height) = (places.width, places.height);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    let _ = writeln!(
        out,
        "<text x=\"{MARGIN}\" y=\"28\" font-size=\"17\" font-weight=\"bold\">{}</text>",
        escaped(&format!("Planned for: {planner}"))
    );
    let jobs: Vec<_> = workload
        .jobs()
        .iter()
        .map(|job| format!("{}: {} workers, {}", job.name, job.workers.len(), bytes_text(job.bytes())))
        .collect();
    let _ =
        writeln!(out, "<text x=\"{MARGIN}\" y=\"47\" fill=\"#555555\">{}</text>", escaped(&jobs.join("; ")));
    // Slow links last, so that they lie above others.
    let mut order: Vec<usize> = (0..seconds.len()).collect();
    order.sort_by(|a, b| seconds[*a].total_cmp(&seconds[*b]));
    for link in order {
        let [a, b] = topology.links()[link].ends.map(|end| places.of[end.index()]);
        let part = if slowest.seconds > 0.0 { seconds[link] / slowest.seconds } else { 0.0 };
        let _ = writeln!(
            out,
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{}\" stroke-width=\"{:.1}\"><title>{}</title></line>",
            a.0,
            a.1,
            b.0,
            b.1,
            colour(part),
            1.0 + 3.0 * part,
            escaped(&format!("{}: {}", super::link_name(topology, link), time_text(seconds[link])))
        );
    }
    let held = schedule.held_bytes(workload);
    for node in topology.ids() {
        let at = places.of[node.index()];
        if topology.is_host(node) {
            let above = topology.neighbours(node).iter().any(|(other, _)| places.of[other.index()].1 > at.1);
            host(&mut out, workload, node, at, places.pitch, above);
        } else {
            switch(&mut out, topology, node, at, held.get(&node).copied());
        }
    }
    legend(&mut out, height, slowest.seconds);
    out + "</svg>\n"
}

/// Rows by the way to the nearest host, hosts below; each node in the middle of those below it.
fn places(topology: &Topology) -> Places {
    let level = levels(topology);
    let rows = level.iter().copied().max().unwrap_or(0);
    let mut by_row: BTreeMap<usize, Vec<NodeId>> = BTreeMap::new();
    for node in topology.ids() {
        by_row.entry(level[node.index()]).or_default().push(node);
    }
    let hosts = by_row.get(&0).map_or(1, Vec::len) as f64;
    let switches =
        by_row.iter().filter(|(row, _)| **row > 0).map(|(_, nodes)| nodes.len()).max().unwrap_or(1) as f64;
    let width = (hosts * HOST).max(switches * (BOX.0 + 8.0)).clamp(WIDTH_MIN, WIDTH_MAX) + 2.0 * MARGIN;
    let height = HEAD + ROW * rows as f64 + FOOT;
    let mut of = vec![(0.0, 0.0); level.len()];
    // Hosts in the order of the switches that they are at.
    let at = |host: &NodeId| topology.neighbours(*host).first().map(|(switch, _)| *switch);
    let mut pitch = 0.0;
    for (row, nodes) in &mut by_row {
        match row {
            0 => nodes.sort_by_key(|host| (at(host), *host)),
            _ => {
                let below = |node: &NodeId| {
                    let xs =
                        topology.neighbours(*node).iter().filter(|(other, _)| level[other.index()] < *row);
                    let (sum, count) = xs.fold((0.0_f64, 0.0_f64), |(sum, count), (other, _)| {
                        (sum + of[other.index()].0, count + 1.0)
                    });
                    if count > 0.0 { sum / count } else { 0.0 }
                };
                let mut middles: Vec<(f64, NodeId)> = nodes.iter().map(|node| (below(node), *node)).collect();
                middles.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
                *nodes = middles.into_iter().map(|(_, node)| node).collect();
            }
        }
        let step = (width - 2.0 * MARGIN) / nodes.len() as f64;
        if *row == 0 {
            pitch = step;
        }
        for (place, node) in nodes.iter().enumerate() {
            let y = HEAD + ROW * (rows - *row) as f64 + BOX.1;
            of[node.index()] = (MARGIN + step * (place as f64 + 0.5), y);
        }
    }
    Places { of, width, height, pitch }
}

/// Hosts 0, their switches 1, and so on up. A switch that has few hosts beside those that have most
/// is no leaf, and its hosts are above it.
fn levels(topology: &Topology) -> Vec<usize> {
    let hosts_at =
        |node: NodeId| topology.neighbours(node).iter().filter(|(other, _)| topology.is_host(*other)).count();
    let most = topology.switches().map(hosts_at).max().unwrap_or(0);
    let mut level: Vec<Option<usize>> = vec![None; topology.nodes().len()];
    let mut queue: VecDeque<NodeId> =
        topology.switches().filter(|node| hosts_at(*node) > 0 && hosts_at(*node) * 2 >= most).collect();
    for leaf in &queue {
        level[leaf.index()] = Some(1);
    }
    while let Some(node) = queue.pop_front() {
        let above = level[node.index()].map(|level| level + 1);
        for (other, _) in topology.neighbours(node) {
            if level[other.index()].is_none() && !topology.is_host(*other) {
                level[other.index()] = above;
                queue.push_back(*other);
            }
        }
    }
    let of = |node: NodeId| match topology.neighbours(node).first() {
        Some((switch, _)) if topology.is_host(node) => match level[switch.index()] {
            Some(level) if level > 1 => level + 1,
            _ => 0,
        },
        // The nodes that nothing joins to the rest.
        _ => level[node.index()].unwrap_or(usize::from(!topology.is_host(node))),
    };
    topology.ids().map(of).collect()
}

fn host(out: &mut String, workload: &Workload, node: NodeId, (x, y): (f64, f64), pitch: f64, above: bool) {
    let serves = workload.jobs().iter().any(|job| job.servers.contains(&node));
    let trains = workload.jobs().iter().any(|job| job.workers.contains(&node));
    let (fill, stroke) = match (serves, trains) {
        (true, _) => ("#f2c14e", "#8a6d1a"),
        (false, true) => ("#dfe7f5", "#3b5b92"),
        (false, false) => ("#f4f4f4", "#bbbbbb"),
    };
    let radius = (pitch / 2.0 - 1.0).clamp(2.5, 9.0);
    let _ = writeln!(
        out,
        "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius:.1}\" fill=\"{fill}\" stroke=\"{stroke}\"/>"
    );
    // Names that would lie on each other are written upwards.
    let name = workload.topology().name(node);
    let fits = LETTER * name.chars().count() as f64 <= pitch;
    let name = escaped(name);
    let low = y + radius + 5.0;
    if above {
        let _ = writeln!(out, "<text x=\"{:.1}\" y=\"{:.1}\">{name}</text>", x + radius + 5.0, y + 4.0);
    } else if fits {
        let _ =
            writeln!(out, "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{name}</text>", low + 9.0);
    } else if pitch >= 10.0 || serves {
        let _ = writeln!(
            out,
            "<text x=\"{x:.1}\" y=\"{low:.1}\" font-size=\"9\" text-anchor=\"end\" transform=\"rotate(-90 {x:.1} {low:.1}) translate(0 3)\">{name}</text>"
        );
    }
}

fn switch(out: &mut String, topology: &Topology, node: NodeId, (x, y): (f64, f64), held: Option<u64>) {
    let (left, top) = (x - BOX.0 / 2.0, y - BOX.1 / 2.0);
    let memory = topology.memory_bytes(node);
    let stroke = if memory.is_some() { "#1f7a4d" } else { "#999999" };
    let _ = writeln!(
        out,
        "<rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{}\" height=\"{}\" rx=\"4\" fill=\"#ffffff\" stroke=\"{stroke}\" stroke-width=\"{}\"/>",
        BOX.0,
        BOX.1,
        if memory.is_some() { 2 } else { 1 }
    );
    if let (Some(memory), Some(held)) = (memory, held) {
        let part = (held as f64 / memory as f64).min(1.0);
        let _ = writeln!(
            out,
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{}\" rx=\"3\" fill=\"#a9dcc0\"/>",
            left + 1.0,
            top + 1.0,
            (BOX.0 - 2.0) * part,
            BOX.1 - 2.0
        );
        let _ = writeln!(
            out,
            "<text x=\"{x:.1}\" y=\"{:.1}\" font-size=\"9\" text-anchor=\"middle\" fill=\"#1f7a4d\">{}</text>",
            y + 9.0,
            escaped(&bytes_text(held))
        );
    }
    let low = if held.is_some() { y - 2.0 } else { y + 4.0 };
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{low:.1}\" text-anchor=\"middle\">{}</text>",
        escaped(topology.name(node))
    );
}

fn legend(out: &mut String, height: f64, slowest_s: f64) {
    let y = height - 22.0;
    let steps = 40;
    for step in 0..steps {
        let part = f64::from(step) / f64::from(steps - 1);
        let _ = writeln!(
            out,
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"5.2\" height=\"10\" fill=\"{}\"/>",
            MARGIN + 55.0 + 5.0 * f64::from(step),
            y - 9.0,
            colour(part)
        );
    }
    let _ = writeln!(out, "<text x=\"{MARGIN}\" y=\"{y:.1}\">a link: 0</text>");
    let _ = writeln!(
        out,
        "<text x=\"{:.1}\" y=\"{y:.1}\">{} for a step</text>",
        MARGIN + 262.0,
        escaped(&time_text(slowest_s))
    );
    let x = MARGIN + 400.0;
    for (dx, fill, stroke, text) in [
        (0.0, "#f2c14e", "#8a6d1a", "server"),
        (70.0, "#dfe7f5", "#3b5b92", "worker"),
        (145.0, "#f4f4f4", "#bbbbbb", "other host"),
    ] {
        let _ = writeln!(
            out,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"6\" fill=\"{fill}\" stroke=\"{stroke}\"/><text x=\"{:.1}\" y=\"{y:.1}\">{text}</text>",
            x + dx,
            y - 4.0,
            x + dx + 10.0
        );
    }
    let _ = writeln!(
        out,
        "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"16\" height=\"11\" rx=\"3\" fill=\"#a9dcc0\" stroke=\"#1f7a4d\" stroke-width=\"2\"/><text x=\"{:.1}\" y=\"{y:.1}\">a switch that sums, by its memory: how much in a step</text>",
        x + 235.0,
        y - 10.0,
        x + 257.0
    );
}

/// From grey over yellow to red.
fn colour(part: f64) -> String {
    const STOPS: [(f64, [f64; 3]); 4] = [
        (0.0, [214.0, 218.0, 224.0]),
        (0.4, [120.0, 170.0, 214.0]),
        (0.75, [240.0, 170.0, 60.0]),
        (1.0, [200.0, 30.0, 40.0]),
    ];
    let part = part.clamp(0.0, 1.0);
    let above = STOPS.iter().position(|(stop, _)| part <= *stop).unwrap_or(STOPS.len() - 1).max(1);
    let ((low, from), (high, to)) = (STOPS[above - 1], STOPS[above]);
    let between = (part - low) / (high - low);
    let [red, green, blue] =
        [0, 1, 2].map(|place| (from[place] + (to[place] - from[place]) * between).round() as u8);
    format!("#{red:02x}{green:02x}{blue:02x}")
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
