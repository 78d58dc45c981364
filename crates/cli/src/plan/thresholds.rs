//! `fanin plan --thresholds`: where the queues of a port drop gradients.

use std::path::Path;

use anyhow::{Context, ensure};
use comfy_table::{Cell, CellAlignment, Table, presets};
use fanin_plan::{DroppingPort, ImpactCurve, LayerQueue, Thresholds};
use fanin_units::Size;
use serde::{Deserialize, Serialize};

use crate::output;

/// The table over queues and packets grows with the square of this: some seconds.
const PACKETS_MAX: u64 = 20_000;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    buffer: Size,
    #[serde(default = "mtu")]
    packet: Size,
    load: f64,
    #[serde(default = "half")]
    small_share: f64,
    queue: Vec<QueueTable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct QueueTable {
    size: Size,
    small: Vec<(f64, f64)>,
    large: Vec<(f64, f64)>,
}

const fn mtu() -> Size {
    Size(1500)
}

/// A median divides so.
const fn half() -> f64 {
    0.5
}

#[derive(Serialize)]
struct Report {
    queues: Vec<QueueReport>,
    /// Rounds of training that the losses add.
    impact_rounds: f64,
}

#[derive(Serialize)]
struct QueueReport {
    small_packets: usize,
    packets: usize,
    small_loss: f64,
    large_loss: f64,
}

pub(super) fn run(path: &Path, json: bool) -> anyhow::Result<()> {
    let name = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read the port {name}"))?;
    let file: File = toml::from_str(&text).with_context(|| format!("in {name}"))?;
    let load = file.load;
    let best = port(file).and_then(|port| Ok(port.best()?)).with_context(|| format!("in {name}"))?;
    let report = report(&best);
    let text = if json { serde_json::to_string(&report)? } else { shown(&report) };
    output::line(&text)?;
    if load >= 1.0 {
        output::warning(
            "a link that carries less than what comes loses most in its last queue, and there the model is wrong: to drop \
             small gradients sooner costs less (docs/protocols/dlcp.md)",
        );
    }
    Ok(())
}

fn port(file: File) -> anyhow::Result<DroppingPort> {
    ensure!(file.packet.0 > 0, "packet = 0: a packet has bytes");
    let packets = file.buffer.0 / file.packet.0;
    ensure!(
        packets <= PACKETS_MAX,
        "the buffer has room for {packets} packets: {PACKETS_MAX} at most are planned"
    );
    let queues = file.queue.into_iter().enumerate().map(|(index, table)| {
        let curve = |points, which| {
            ImpactCurve::new(points).with_context(|| format!("`{which}` of queue {}", index + 1))
        };
        Ok(LayerQueue {
            size: table.size.0 as f64,
            small: curve(table.small, "small")?,
            large: curve(table.large, "large")?,
        })
    });
    Ok(DroppingPort {
        queues: queues.collect::<anyhow::Result<_>>()?,
        small_share: file.small_share,
        load: file.load,
        buffer_packets: packets as usize,
    })
}

fn report(best: &Thresholds) -> Report {
    let queue = |queue: &fanin_plan::Threshold| QueueReport {
        small_packets: queue.small_packets,
        packets: queue.packets,
        small_loss: queue.small_loss,
        large_loss: queue.large_loss,
    };
    Report { queues: best.queues.iter().map(queue).collect(), impact_rounds: best.impact }
}

fn shown(report: &Report) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["QUEUE", "SMALL FROM", "ALL FROM", "LOST OF SMALL", "LOST OF LARGE"]);
    for (index, queue) in report.queues.iter().enumerate() {
        let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
        table.add_row([
            right(format!("{}", index + 1)),
            right(format!("{} packets", queue.small_packets)),
            right(format!("{} packets", queue.packets)),
            right(format!("{:.3} %", queue.small_loss * 100.0)),
            right(format!("{:.3} %", queue.large_loss * 100.0)),
        ]);
    }
    let text = format!(
        "{table}\n\nThe model (M/M/1/m) expects these losses to cost {:.3} rounds of training.",
        report.impact_rounds
    );
    text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}
