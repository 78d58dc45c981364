//! `fanin sim`: a scenario in virtual time.

pub mod report;
mod watch;

use std::cell::RefCell;
use std::fs::File;
use std::io::{BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, anyhow, ensure};
use comfy_table::{CellAlignment, Table, presets};
use fanin_sim::scenario_file;
use fanin_sim::workload::{
    Glimpse, JobPlan, JobReport, Look, Measurement, Options, Report, RunError, Scenario, Workload,
    run as simulate,
};
use serde::Serialize;

use self::report::Shown;
use self::watch::Watch;
use crate::{output, scenario};

/// In the table; `--json` has all.
const LINKS_SHOWN: usize = 4;

// Lines of paragraphs are broken where the terminal ends.
const AFTER_HELP: &str = "\
A parameter of --sweep is a key of the scenario file, after the tables that it stands in: until, network.queue, job.0.workers, \
job.0.atp.window. An entry of a list of tables ([[job]], [[link]], ..) goes by its number, from 0, or its name; * stands for all \
of them. The file need not have the key. Values are as in the file, but need no quotes; 1..8 are all whole numbers from 1 to 8.

The folder of --out gets sweep.json (all figures of all runs), sweep.png (a plot), and scenario and result of every run. A sweep \
that was stopped goes on where it was. Runs that fail are named, with the command that plays each again; the others go on, and the \
exit status is 1.

Examples:
  fanin sim examples/sim/rack.toml
  fanin sim examples/sim/figure9.toml --seed 7 --json result.json
  fanin sim examples/sim/rack.toml --report rack.html
  fanin sim examples/sim/rack.toml --seed 2 --report both.html --against rack.html
  fanin sim examples/sim/rack.toml --pcap rack.pcap --trace rack.json   (for Wireshark, for ui.perfetto.dev)
  fanin sim examples/sim/rack.toml --seeds 9
  fanin sim examples/sim/rack.toml --sweep switch.aggregators=64,512 --sweep job.0.atp.window=64,256
  fanin sim examples/sim/rack.toml --sweep job.0.workers=1..8 --ray 10.0.0.9:6379";

/// Run a scenario in the packet-level simulator
///
/// Hosts, switches, queues and links in virtual time, and on them the same state machines that run
/// on sockets. Every sum is checked. The same seed gives the same bytes on every machine.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Arguments {
    /// Scenario (TOML); examples/sim has some, with comments
    file: PathBuf,
    /// Seed of everything random
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write the results as JSON; - for standard output, instead of the table
    #[arg(long, value_name = "OUT")]
    json: Option<PathBuf>,
    /// Write a page that shows what happened, where and when: one file for any browser, offline
    #[arg(long, value_name = "OUT.html")]
    report: Option<PathBuf>,
    /// Show another run beside it in the report: a report, or what --record --json wrote
    #[arg(long, value_name = "FILE", requires = "report")]
    against: Option<PathBuf>,
    /// Put into the JSON what a report shows, too: links over time, and each tensor's times
    #[arg(long, requires = "json")]
    record: bool,
    /// Show meanwhile how far the jobs are, and which links are busiest
    #[arg(long)]
    watch: bool,
    /// Write every packet as a pcap file
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    /// Write transmissions and queues as a Chrome trace
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    #[command(flatten)]
    many: Many,
}

/// The options of the Python package, which does many such runs.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Many runs")]
struct Many {
    /// Play it once for each of these values of a parameter, as in network.queue=100kB,1MB; of
    /// several sweeps, for every combination
    #[arg(long, value_name = "PARAMETER=VALUES")]
    sweep: Vec<String>,
    /// Play each with so many seeds, from --seed on; medians, with 95 % intervals from six seeds on
    #[arg(long, value_name = "N")]
    seeds: Option<u64>,
    /// Runs at a time [default: as many as there are cores]
    #[arg(long, value_name = "N")]
    jobs: Option<u64>,
    /// The folder for results and plot [default: the file's name and -sweep]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Run on a Ray cluster, whose nodes have this fanin; its address as ray.init takes it
    #[arg(long, value_name = "ADDRESS")]
    ray: Option<String>,
}

impl Many {
    const fn is_asked(&self) -> bool {
        !self.sweep.is_empty()
            || self.seeds.is_some()
            || self.jobs.is_some()
            || self.out.is_some()
            || self.ray.is_some()
    }
}

/// A result as a file.
#[derive(Serialize)]
struct Document<'a> {
    fanin: Program,
    /// As it was read, with what stood in a file beside it.
    scenario: serde_json::Value,
    seed: u64,
    result: &'a Report,
}

#[derive(Serialize)]
struct Program {
    version: &'static str,
    commit: &'static str,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if arguments.many.is_asked() {
        return crate::run::in_python("sim --sweep");
    }
    let file = arguments.file.display().to_string();
    let text = std::fs::read_to_string(&arguments.file)
        .with_context(|| format!("cannot read the scenario {file}"))?;
    let scenario = scenario::parse(&file, &text)?;
    if let Some(note) = endless(&scenario, &text) {
        output::warning(&note);
    }
    let other = arguments.check()?;
    let watch = std::io::stderr().is_terminal().then(|| {
        let until_s = scenario.until.as_secs_f64();
        Rc::new(RefCell::new(Watch::new(until_s, arguments.watch)))
    });
    let look = |watch: Rc<RefCell<Watch>>| -> Look {
        Box::new(move |glimpse: &Glimpse<'_>| watch.borrow_mut().look(glimpse))
    };
    let writer = |path: &Option<PathBuf>| path.as_deref().map(create).transpose();
    let options = Options {
        seed: arguments.seed,
        pcap: writer(&arguments.pcap)?,
        trace: writer(&arguments.trace)?,
        record: arguments.report.is_some() || arguments.record,
        progress: watch.clone().map(look),
    };
    let result = simulate(&scenario, options);
    watch.iter().for_each(|watch| watch.borrow_mut().erase());
    let report = result.map_err(|error| match error {
        RunError::Violation(..) => {
            anyhow!("{error}\nreplay: fanin sim {file} --seed {}", arguments.seed)
        }
        error => anyhow!(error),
    })?;
    let document = Document {
        fanin: Program { version: env!("CARGO_PKG_VERSION"), commit: env!("BUILD_COMMIT") },
        scenario: serde_json::to_value(scenario_file::whole(&file, &text)?)
            .context("the scenario as JSON")?,
        seed: arguments.seed,
        result: &report,
    };
    // First, as a disk may be full.
    match arguments.json.as_deref() {
        Some(path) if path.as_os_str() == "-" => output::line(&json(&document)?)?,
        _ => output::line(&table(&report))?,
    }
    write(arguments, &document, other)?;
    unfinished(&report)
}

impl Arguments {
    /// Whether all files can be written and read: now, and not after an hour of playing. Returns the
    /// run that is to be shown beside this one.
    fn check(&self) -> anyhow::Result<Option<serde_json::Value>> {
        let json = self.json.as_deref().filter(|path| path.as_os_str() != "-");
        let files = [Some(self.file.as_path()), json, self.report.as_deref(), self.against.as_deref()];
        if let Some(report) = &self.report {
            report::check_built()?;
            let is_same = |other: &&Path| same_file(other, report);
            let used = files.into_iter().flatten().filter(is_same).count() > 1;
            ensure!(!used, "--report {} is also another file of this run: name a new one", report.display());
            ensure!(report.as_os_str() != "-", "--report needs a file: it is a page, and no text");
        }
        [json, self.report.as_deref()].into_iter().flatten().try_for_each(check_writable)?;
        ensure!(
            !self.watch || std::io::stderr().is_terminal(),
            "--watch draws on a terminal, and standard error is none; --report writes a file"
        );
        self.against.as_deref().map(report::other).transpose()
    }
}

/// Whether two names are of one file, which need not be there.
fn same_file(one: &Path, other: &Path) -> bool {
    match (one.canonicalize(), other.canonicalize()) {
        (Ok(one), Ok(other)) => one == other,
        _ => one == other,
    }
}

/// Writes the files that were asked for.
fn write(
    arguments: &Arguments,
    document: &Document<'_>,
    other: Option<serde_json::Value>,
) -> anyhow::Result<()> {
    if let Some(path) = arguments.json.as_deref().filter(|path| path.as_os_str() != "-") {
        write_file(path, &(json(document)? + "\n"))?;
    }
    let Some(path) = &arguments.report else { return Ok(()) };
    let Arguments { file, seed, against, .. } = arguments;
    let mut command = vec!["fanin", "sim"];
    let (seed, shown) = (seed.to_string(), [file, path].map(|path| path.display().to_string()));
    command.extend([shown[0].as_str(), "--seed", &seed, "--report", &shown[1]]);
    let beside = against.as_ref().map(|path| path.display().to_string());
    command.extend(beside.iter().flat_map(|path| ["--against", path]));
    let mut report = Shown::new(shlex::try_join(command)?);
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    report.add(report::run(&name, serde_json::to_value(document)?)?)?;
    other.map_or(Ok(()), |other| report.add(other))?;
    write_file(path, &report.html()?)
}

/// A recording has millions of numbers, and each would have a line.
fn json(document: &Document<'_>) -> anyhow::Result<String> {
    let text = match document.result.recording {
        Some(_) => serde_json::to_string(document),
        None => serde_json::to_string_pretty(document),
    };
    Ok(text?)
}

fn write_file(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Which jobs have no end, where the file says no `until` either: nobody waits for the usual one on
/// purpose.
fn endless(scenario: &Scenario, text: &str) -> Option<String> {
    let file: toml::Table = toml::from_str(text).ok()?;
    let is_endless = |job: &&JobPlan| {
        let limit = match &job.workload {
            Workload::AllReduce { count, .. } => *count,
            Workload::Training { iterations, .. } => *iterations,
        };
        limit.is_none() && job.stop.is_none()
    };
    let names: Vec<_> = scenario.jobs.iter().filter(is_endless).map(|job| job.name.as_str()).collect();
    (!names.is_empty() && !file.contains_key("until")).then(|| {
        format!(
            "{} {} no end (`tensors`, `iterations` or `stop`), and the scenario no `until`: it is played to {} s of virtual \
             time, which may take an hour",
            names.join(", "),
            if names.len() == 1 { "has" } else { "have" },
            scenario.until.as_secs_f64(),
        )
    })
}

/// Whether a file can be written; what it has stays until there is something to replace it with.
fn check_writable(path: &Path) -> anyhow::Result<()> {
    let was_there = path.exists();
    File::options()
        .append(true)
        .create(true)
        .open(path)
        .with_context(|| format!("cannot write {}", path.display()))?;
    if !was_there {
        let _ = std::fs::remove_file(path);
    }
    Ok(())
}

/// A job that had so much to do and did not is a failure, though nothing was wrong with what it
/// did.
fn unfinished(report: &Report) -> anyhow::Result<()> {
    let jobs = report
        .jobs
        .iter()
        .filter_map(|job| job.unfinished.as_ref().map(|waits| format!("{}: {waits}", job.name)));
    let servers = report.parameter_servers.iter().filter_map(|job| {
        let flows = job.flow_times.unfinished + job.unopened;
        (flows > 0).then(|| format!("{}: {flows} flows have not arrived", job.name))
    });
    let late: Vec<String> = jobs.chain(servers).collect();
    if late.is_empty() {
        return Ok(());
    }
    Err(anyhow!(
        "the run ended at {:.6} s with unfinished jobs; give it a later `until`, or them less to do\n{}",
        report.ended_s,
        late.join("\n")
    ))
}

fn create(path: &Path) -> anyhow::Result<Box<dyn Write>> {
    let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(Box::new(BufWriter::new(file)))
}

fn table(report: &Report) -> String {
    let mut lines = Vec::new();
    if !report.title.is_empty() {
        lines.push(report.title.clone());
    }
    if !report.jobs.is_empty() {
        let header = [
            "JOB",
            "SYSTEM",
            "WORKERS",
            "Gbit/s a worker",
            "tensors",
            "samples/s",
            "at switches",
            "at servers",
            "sent again",
            "ended",
        ];
        lines.push(rows(&header, report.jobs.iter().map(job_row)));
        lines.extend(report.jobs.iter().filter(|job| !job.measurement.enough).map(not_measured));
    }
    if !report.servers.is_empty() {
        let header = ["server", "packets in", "MB in"];
        lines.push(rows(
            &header,
            report.servers.iter().map(|server| {
                vec![
                    server.host.clone(),
                    server.received_packets.to_string(),
                    format!("{:.1}", server.received_bytes as f64 / 1e6),
                ]
            }),
        ));
    }
    if !report.switches.is_empty() {
        let header = ["switch", "aggregators", "most in use", "aggregations", "collisions"];
        lines.push(rows(
            &header,
            report.switches.iter().map(|switch| {
                vec![
                    switch.name.clone(),
                    switch.aggregators.to_string(),
                    switch.in_use_max.to_string(),
                    switch.aggregations.to_string(),
                    counted(switch.collisions),
                ]
            }),
        ));
    }
    if !report.parameter_servers.is_empty() {
        let header = ["FLOWS OF", "WORKERS", "SERVERS", "MB", "sent again", "timeouts", "last arrived"];
        lines.push(rows(
            &header,
            report.parameter_servers.iter().map(|job| {
                vec![
                    job.name.clone(),
                    job.workers.to_string(),
                    job.servers.to_string(),
                    format!("{:.1}", job.delivered_bytes as f64 / 1e6),
                    job.retransmissions.to_string(),
                    counted(job.timeouts),
                    format!("{:.6} s", job.last_arrived_s),
                ]
            }),
        ));
    }
    if !report.background.is_empty() {
        let header = ["flow", "MB", "sent again"];
        lines.push(rows(
            &header,
            report.background.iter().map(|flow| {
                vec![
                    format!("{} to {}", flow.from, flow.to),
                    format!("{:.1}", flow.delivered_bytes as f64 / 1e6),
                    flow.retransmissions.to_string(),
                ]
            }),
        ));
    }
    lines.extend(times(report));
    lines.extend(busiest_links(report));
    let dropped: Vec<String> =
        report.drops.iter().map(|drop| format!("{} {}", drop.count, drop.name)).collect();
    let dropped = if dropped.is_empty() { "none".to_owned() } else { dropped.join(", ") };
    let sums = if report.jobs.is_empty() { "nothing was summed" } else { "every sum was right" };
    lines.push(format!(
        "{:.6} s of virtual time, {} packet-hops, dropped: {dropped}; {sums} (seed {}, digest {})",
        report.ended_s, report.packet_hops, report.seed, report.digest
    ));
    lines.join("\n")
}

/// How long tensors and flows took.
fn times(report: &Report) -> Option<String> {
    let tensors = report.jobs.iter().map(|job| (format!("tensors of {}", job.name), job.tensor_times));
    let pushes = report.parameter_servers.iter();
    let pushes = pushes.map(|job| (format!("flows of {}", job.name), job.flow_times));
    let flows = report.background.iter().filter_map(|flow| {
        let times = flow.times?;
        Some((format!("{} of {} flows, {} to {}", times.count, flow.flows, flow.from, flow.to), times))
    });
    let several = report.background.iter().filter(|flow| flow.times.is_some()).count() > 1;
    let all = report.flow_times.filter(|_| several).map(|times| ("all flows".to_owned(), times));
    let rows_of: Vec<_> =
        tensors.chain(pushes).chain(flows).chain(all).filter(|(_, times)| times.count > 0).collect();
    let header = ["time of", "ended", "not ended", "mean", "95 %", "99 %", "99.9 %", "longest"];
    let table = || {
        rows(
            &header,
            rows_of.iter().map(|(of, times)| {
                // How many there must be for each to be another than the longest, and of how many
                // one may be unfinished.
                let needed = [(1, 100), (20, 20), (100, 100), (1000, 1000), (1, usize::MAX)];
                let seconds = [times.mean_s, times.p95_s, times.p99_s, times.p999_s, times.max_s];
                let times_ms = seconds.into_iter().zip(needed).map(|(time, (needed, among))| {
                    let known =
                        times.count >= needed && times.unfinished.saturating_mul(among) <= times.count;
                    format!("{}{:.3} ms", if known { "" } else { "~" }, time * 1e3)
                });
                let counts = [times.count, times.unfinished].map(|count| count.to_string());
                [of.clone()].into_iter().chain(counts).chain(times_ms).collect()
            }),
        )
    };
    (!rows_of.is_empty()).then(table)
}

/// Directions of links that were busy for the longest time.
fn busiest_links(report: &Report) -> Option<String> {
    let mut links: Vec<_> = report.links.iter().collect();
    links.sort_by(|a, b| b.load.total_cmp(&a.load));
    links.truncate(LINKS_SHOWN);
    let header = ["busiest links", "Gbit/s", "busy", "most in an interval", "longest queue", "dropped"];
    let table = || {
        rows(
            &header,
            links.iter().map(|link| {
                vec![
                    format!("{} to {}", link.from, link.to),
                    format!("{:.1}", link.rate_gbps),
                    format!("{:.1} %", link.load * 100.0),
                    format!("{:.1} %", link.load_max * 100.0),
                    format!("{:.1} kB", link.queue_max_bytes as f64 / 1e3),
                    link.dropped.to_string(),
                ]
            }),
        )
    };
    (!links.is_empty()).then(table)
}

/// Why the throughputs of a job say little.
fn not_measured(job: &JobReport) -> String {
    let Measurement { window_s, completed, needed, .. } = job.measurement;
    let (what, more) = match job.training {
        Some(_) => ("iterations", "`iterations`"),
        None => ("tensors", "`tensors`"),
    };
    format!(
        "~ {}: not measured, {completed} {what} in the {window_s:.6} s after the warm-up and {needed} are needed: a later `until`, more {more} or a shorter `warm_up`",
        job.name
    )
}

fn job_row(job: &JobReport) -> Vec<String> {
    let about = if job.measurement.enough { "" } else { "~" };
    let samples = job.training.as_ref().map_or("-".to_owned(), |training| {
        format!("{about}{:.1} {}", training.samples_per_s, training.sample)
    });
    vec![
        job.name.clone(),
        job.system.to_owned(),
        job.workers.to_string(),
        format!("{about}{:.2}", job.aggregation_gbps),
        format!("{:.0}", job.tensors),
        samples,
        counted(job.counters.switch_aggregations),
        counted(job.counters.server_aggregations),
        counted(job.counters.retransmissions),
        match (job.finished_s, job.died_s, &job.unfinished) {
            (Some(at), ..) => format!("{at:.6} s"),
            (None, Some(at), _) => format!("died, {at:.6} s"),
            (None, None, Some(_)) => "unfinished".to_owned(),
            (None, None, None) => "runs on".to_owned(),
        },
    ]
}

/// A count that no machine has is no zero.
fn counted(count: Option<u64>) -> String {
    count.map_or("-".to_owned(), |count| count.to_string())
}

fn rows(header: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header.iter().copied());
    for row in rows {
        table.add_row(row);
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_cell_alignment(if index == 0 { CellAlignment::Left } else { CellAlignment::Right });
    }
    table.trim_fmt()
}
