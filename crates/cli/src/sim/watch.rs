//! How far a simulation is, in the terminal; with `--watch`, what its jobs and links do as well.

use std::cmp::Reverse;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use fanin_sim::net::{Network, PortId, Time};
use fanin_sim::workload::Glimpse;
use ratatui::crossterm::terminal;

/// A run that is over sooner needs no line that says how far it is.
const QUIET: Duration = Duration::from_secs(2);
/// Between two pictures.
const REFRESH: Duration = Duration::from_millis(200);
const LINKS_SHOWN: usize = 6;
const JOBS_SHOWN: usize = 6;
const BAR: usize = 24;

/// A picture that is drawn over and over.
pub(super) struct Watch {
    began: Instant,
    /// When the next one is due.
    due: Instant,
    /// Whether jobs and links are in it.
    detailed: bool,
    /// Lines of the last picture.
    lines: usize,
    until_s: f64,
    /// When each port was looked at last, and how long it had been busy by then.
    looked: Time,
    busy: Vec<Time>,
}

impl Watch {
    pub(super) fn new(until_s: f64, detailed: bool) -> Self {
        let began = Instant::now();
        let due = began + if detailed { REFRESH } else { QUIET };
        Self { began, due, detailed, lines: 0, until_s, looked: Time::ZERO, busy: Vec::new() }
    }

    pub(super) fn look(&mut self, glimpse: &Glimpse<'_>) {
        let now = Instant::now();
        if now < self.due {
            return;
        }
        self.due = now + REFRESH;
        let progress = glimpse.network.progress();
        let (virtual_s, hops) = (progress.time.as_secs_f64(), progress.packet_hops as f64);
        let mut lines = vec![progress_line(virtual_s, self.until_s, hops, (now - self.began).as_secs_f64())];
        if self.detailed {
            lines.extend(jobs(glimpse));
            lines.extend(self.links(glimpse.network));
        }
        self.erase();
        // A terminal that does not know its size says 0.
        let size = terminal::size().ok().filter(|(columns, _)| *columns > 0);
        let width = size.map_or(80, |(columns, _)| usize::from(columns));
        self.lines = lines.len();
        for line in lines {
            // A line that wraps would be two, and the next picture would begin too low.
            let _ =
                writeln!(io::stderr(), "{}", line.chars().take(width.saturating_sub(1)).collect::<String>());
        }
    }

    /// Takes the last picture away.
    pub(super) fn erase(&mut self) {
        if let lines @ 1.. = std::mem::take(&mut self.lines) {
            let _ = write!(io::stderr(), "\x1b[{lines}A\r\x1b[J");
        }
    }

    /// The links that were busiest since the last picture.
    fn links(&mut self, network: &Network) -> Vec<String> {
        let topology = network.topology();
        let ports: Vec<PortId> = topology.ports().collect();
        let passed = network.time().since(self.looked).0.max(1) as f64;
        let busy: Vec<Time> = ports.iter().map(|port| network.passed(*port).busy).collect();
        self.busy.resize(ports.len(), Time::ZERO);
        let loads = ports.iter().zip(busy.iter().zip(&self.busy));
        let mut loads: Vec<(f64, PortId)> =
            loads.map(|(port, (now, before))| (now.since(*before).0 as f64 / passed, *port)).collect();
        (self.looked, self.busy) = (network.time(), busy);
        loads.sort_by(|a, b| b.0.total_cmp(&a.0));
        loads.truncate(LINKS_SHOWN);
        loads.retain(|(load, _)| *load > 0.0);
        let name = |node| topology.get(node).name.as_str();
        let names: Vec<String> = loads
            .iter()
            .map(|(_, port)| {
                let [from, to] = topology.ends(*port);
                format!("{} to {}", name(from), name(to))
            })
            .collect();
        let longest = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
        let line = |((load, port), name): (&(f64, PortId), &String)| {
            let statistics = network.port(*port);
            format!(
                "{name:longest$}  {} {:5.1} %  {:8.1} kB wait, {} dropped",
                bar(*load),
                100.0 * load,
                statistics.queue_bytes as f64 / 1e3,
                statistics.drops.total(),
            )
        };
        loads.iter().zip(&names).map(line).collect()
    }
}

/// How far the jobs are that have most left to do.
fn jobs(glimpse: &Glimpse<'_>) -> Vec<String> {
    let mut all: Vec<_> = glimpse.jobs().collect();
    let count = all.len();
    all.sort_by_key(|job| (job.finished, job.of.map(|of| Reverse(of.saturating_sub(job.done)))));
    all.truncate(JOBS_SHOWN);
    let longest = all.iter().map(|job| job.name.chars().count()).max().unwrap_or(0);
    let mut lines: Vec<String> = all
        .iter()
        .map(|job| {
            let of = job.of.map_or(String::new(), |of| format!(" of {of}"));
            let part = job.of.map_or(0.0, |of| job.done as f64 / of.max(1) as f64);
            format!("{:longest$}  {} {}{of} {}", job.name, bar(part), job.done, job.what)
        })
        .collect();
    if count > all.len() {
        lines.push(format!("and {} jobs more", count - all.len()));
    }
    lines
}

fn bar(part: f64) -> String {
    let full = (part.clamp(0.0, 1.0) * BAR as f64).round() as usize;
    format!("{}{}", "█".repeat(full), "░".repeat(BAR - full))
}

/// A line that says how far a run is after so many seconds. The seconds to go are those to `until`, if
/// it goes on as it did.
fn progress_line(virtual_s: f64, until_s: f64, packet_hops: f64, took_s: f64) -> String {
    let left_s = took_s * (until_s - virtual_s) / virtual_s;
    let left = if !left_s.is_finite() {
        String::new()
    } else if left_s < 100.0 {
        format!(", at most {left_s:.0} s to go")
    } else {
        format!(", at most {:.0} min to go", left_s / 60.0)
    };
    let (millions, rate) = (packet_hops / 1e6, packet_hops / took_s / 1e6);
    format!(
        "virtual time {virtual_s:.6} s of at most {until_s} s{left}, {millions:.1} million packet-hops, {rate:.1} million a second"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_says_how_long_it_takes_at_most() {
        assert_eq!(
            progress_line(0.5, 10.0, 4e6, 2.0),
            "virtual time 0.500000 s of at most 10 s, at most 38 s to go, 4.0 million packet-hops, 2.0 million a second"
        );
        assert!(progress_line(0.01, 10.0, 4e6, 2.0).contains(", at most 33 min to go, "));
        assert!(!progress_line(0.0, 10.0, 0.0, 2.0).contains("to go"));
    }
}
