//! `fanin plan --goat`: which switch sums which sub-model.

use std::path::{Path, PathBuf};

use anyhow::Context;
use comfy_table::{Cell, CellAlignment, Table, presets};
use fanin_plan::{
    GradientSchedule, Job, Node, NodeId, NodeKind, Objective, Residence, SubModel, Topology, Workload,
    at_servers, byteps, first_switches, krgs, slowest_link,
};
use fanin_sim::net;
use fanin_sim::scenario_file::{Mistake, at, parse_on_network, unknown};
use fanin_units::{Size, Time};
use serde::{Deserialize, Serialize};
use toml::Spanned;

use super::{rate_text, time_text};
use crate::output;

mod picture;

/// The aim of a planner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Planner {
    /// The least time of the slowest link
    Slowest,
    /// GOAT's KRGS on its Eq. 4: the most traffic less behind the switches that sum
    Krgs,
    /// KRGS on Eq. 1: the least bytes times links
    KrgsOverhead,
}

impl Planner {
    const fn name(self) -> &'static str {
        match self {
            Self::Slowest => "the slowest link (fanin)",
            Self::Krgs => "KRGS, Eq. 4 (GOAT)",
            Self::KrgsOverhead => "KRGS, Eq. 1",
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// Bytes of gradients in each programmable switch.
    memory: Spanned<Size>,
    /// How long a fragment stays in a switch; the whole step unless given.
    stay: Option<Spanned<Time>>,
    #[serde(default)]
    seed: u64,
    /// Switches that have another memory.
    #[serde(default)]
    switch_memory: Vec<SwitchMemory>,
    job: Vec<Spanned<JobTable>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SwitchMemory {
    name: Spanned<String>,
    memory: Spanned<Size>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct JobTable {
    name: Spanned<String>,
    /// Hosts by name, or how many of those that are no server, evenly spread.
    workers: Spanned<Hosts>,
    /// The nodes that may finish sums. GOAT's server is the first.
    servers: Spanned<Vec<String>>,
    /// The size of the model ..
    size: Option<Spanned<Size>>,
    /// .. that is cut into sub-models of at most this.
    #[serde(default = "two_megabytes")]
    sub_model: Spanned<Size>,
    /// Or: each sub-model's.
    sub_models: Option<Spanned<Vec<Size>>>,
}

fn two_megabytes() -> Spanned<Size> {
    Spanned::new(0..0, Size(2_000_000))
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "workers: how many, or a list of hosts' names")]
enum Hosts {
    Count(usize),
    Names(Vec<String>),
}

/// The content of a file.
struct Asked {
    workload: Workload,
    residence: Residence,
    seed: u64,
}

#[derive(Serialize)]
struct Report {
    /// The plan that is drawn and told in detail.
    planner: &'static str,
    plans: Vec<PlanReport>,
    /// No plan's slowest link takes less.
    slowest_link_bound_s: f64,
    switches: Vec<SwitchReport>,
    jobs: Vec<JobReport>,
}

#[derive(Serialize)]
struct PlanReport {
    name: &'static str,
    slowest_link_s: f64,
    slowest_link: Option<String>,
    /// The bytes of all jobs, as GOAT §VII-A has it.
    server_bytes: u64,
    in_network_bytes: u64,
    hop_bytes: u64,
    /// The quantity that the planner makes large or small, and its linear program's optimum.
    value: Option<f64>,
    bound: Option<f64>,
}

#[derive(Serialize)]
struct SwitchReport {
    name: String,
    memory_bytes: u64,
    /// Gradients that it sums in a step.
    summed_bytes: u64,
    sub_models: usize,
}

#[derive(Serialize)]
struct JobReport {
    name: String,
    size_bytes: u64,
    workers: Vec<String>,
    /// All that the job waits for, in a step.
    slowest_link_s: f64,
    sub_models: Vec<SubModelReport>,
}

#[derive(Serialize)]
struct SubModelReport {
    name: String,
    bytes: u64,
    root: String,
    /// The node of each worker's part, in the order of the workers.
    aggregation_nodes: Vec<String>,
}

pub(super) fn run(path: &Path, planner: Planner, svg: Option<&PathBuf>, json: bool) -> anyhow::Result<()> {
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read the topology {name}"))?;
    let asked = parse_on_network(&name, &text, resolve)?;
    let (report, schedule) = report(&asked, planner);
    if let Some(svg) = svg {
        let picture = picture::svg(&asked.workload, &schedule, planner.name());
        std::fs::write(svg, picture).with_context(|| format!("cannot write {}", svg.display()))?;
    }
    let text = if json { serde_json::to_string(&report)? } else { shown(&asked.workload, &report) };
    Ok(output::line(&text)?)
}

fn resolve(network: &net::Topology, file: File) -> Result<Asked, Mistake> {
    let mut topology =
        topology(network, file.memory.get_ref().0).map_err(|message| at(&file.memory, message))?;
    if file.memory.get_ref().0 == 0 {
        return Err(at(
            &file.memory,
            "a switch without memory is none that sums: name those that do in [switch] programmable",
        ));
    }
    for SwitchMemory { name, memory } in &file.switch_memory {
        let named =
            |topology: &Topology| topology.programmable().find(|node| topology.name(*node) == name.get_ref());
        let switch = named(&topology).ok_or_else(|| {
            let known: Vec<_> = topology.programmable().map(|node| topology.name(node)).collect();
            at(name, unknown("programmable switch", name.get_ref(), known.into_iter()))
        })?;
        topology.set_memory_bytes(switch, Some(memory.get_ref().0));
    }
    let jobs =
        file.job.iter().map(|job| of_table(&topology, job.get_ref())).collect::<Result<Vec<_>, _>>()?;
    let residence =
        file.stay.as_ref().map_or(Residence::Step, |stay| Residence::Seconds(stay.get_ref().0.as_secs_f64()));
    if let (Residence::Seconds(0.0), Some(stay)) = (residence, &file.stay) {
        return Err(at(stay, "a fragment stays for a round trip at least"));
    }
    let workload = Workload::new(topology, jobs).map_err(|error| {
        // If two jobs have one name, the second.
        let names = file.job.iter().rev().map(|job| &job.get_ref().name);
        let place = names.clone().find(|name| name.get_ref() == error.job());
        at(place.expect("it is one of the file's"), error)
    })?;
    Ok(Asked { workload, residence, seed: file.seed })
}

/// The simulator's topology, as planners see it: each node has the same number. Switches without
/// memory do not sum.
pub(crate) fn topology(network: &net::Topology, memory_bytes: u64) -> Result<Topology, String> {
    let programmable: Vec<_> = network.programmable().collect();
    let nodes = network.nodes().iter().enumerate().map(|(index, node)| Node {
        name: node.name.clone(),
        kind: match node.kind {
            net::NodeKind::Host => NodeKind::Host,
            net::NodeKind::Switch { .. } => NodeKind::Switch {
                memory_bytes: programmable
                    .contains(&net::NodeId(index as u32))
                    .then_some(memory_bytes)
                    .filter(|bytes| *bytes > 0),
            },
        },
    });
    let links = network.links().iter().map(|link| fanin_plan::Link {
        // A node that does not fit is refused for the number of nodes.
        ends: link.ends.map(|end| NodeId(end.0 as u16)),
        rate_bps: link.config.rate_bps as f64,
    });
    Topology::new(nodes.collect(), links.collect()).map_err(|error| error.to_string())
}

fn of_table(topology: &Topology, table: &JobTable) -> Result<Job, Mistake> {
    let servers = table.servers.get_ref().iter().map(|name| {
        topology.node(name).ok_or_else(|| {
            let known = topology.nodes().iter().map(|node| node.name.as_str());
            at(&table.servers, unknown("node", name, known))
        })
    });
    let servers: Vec<_> = servers.collect::<Result<_, _>>()?;
    let free: Vec<_> = topology.hosts().filter(|host| !servers.contains(host)).collect();
    let workers = match table.workers.get_ref() {
        Hosts::Count(count) if !(1..=free.len()).contains(count) => {
            return Err(at(&table.workers, format!("from 1 to {} workers, beside the servers", free.len())));
        }
        Hosts::Count(count) => (0..*count).map(|nth| free[nth * free.len() / count]).collect(),
        Hosts::Names(names) => {
            let host = |name: &String| {
                topology.hosts().find(|node| topology.name(*node) == name).ok_or_else(|| {
                    let known = topology.hosts().map(|node| topology.name(node));
                    at(&table.workers, unknown("host", name, known))
                })
            };
            names.iter().map(host).collect::<Result<_, _>>()?
        }
    };
    let sub_models = match (&table.size, &table.sub_models) {
        (Some(size), None) => {
            let (bytes, most) = (size.get_ref().0, table.sub_model.get_ref().0);
            if bytes == 0 || most == 0 {
                return Err(at(if bytes == 0 { size } else { &table.sub_model }, "at least one byte"));
            }
            if bytes / most > fanin_plan::CELLS_MAX as u64 {
                return Err(at(
                    &table.sub_model,
                    "this makes more sub-models than are planned: take larger ones",
                ));
            }
            SubModel::divided(bytes, most)
        }
        (None, Some(sizes)) => {
            let part = |(index, size): (usize, &Size)| SubModel { name: format!("g{index}"), bytes: size.0 };
            sizes.get_ref().iter().enumerate().map(part).collect()
        }
        _ => {
            return Err(at(
                &table.name,
                "a job needs `size`, or `sub_models` with each one's size, and not both",
            ));
        }
    };
    Ok(Job { name: table.name.get_ref().clone(), workers, servers, sub_models })
}

fn report(asked: &Asked, planner: Planner) -> (Report, GradientSchedule) {
    let Asked { workload, residence, seed } = asked;
    let slowest = slowest_link(workload, *residence, *seed);
    let (reduction, overhead) =
        (krgs(workload, Objective::Reduction, *seed), krgs(workload, Objective::Overhead, *seed));
    let of =
        |name, schedule: &GradientSchedule, value, bound| plan_report(workload, name, schedule, value, bound);
    let mut plans = vec![
        of("all at the servers (Geryon)", &at_servers(workload), None, None),
        of(
            "the first switch on the way (ATP)",
            &first_switches(workload, *residence, slowest.bound_s),
            None,
            None,
        ),
    ];
    if let Some(split) = byteps(workload, *residence) {
        plans.push(of("shares by links (BytePS)", &split, None, None));
    }
    for (planner, its) in [(Planner::Krgs, &reduction), (Planner::KrgsOverhead, &overhead)] {
        plans.push(of(planner.name(), &its.schedule, Some(its.value), Some(its.bound)));
    }
    plans.push(of(Planner::Slowest.name(), &slowest.schedule, Some(slowest.seconds), Some(slowest.bound_s)));
    let schedule = match planner {
        Planner::Slowest => slowest.schedule,
        Planner::Krgs => reduction.schedule,
        Planner::KrgsOverhead => overhead.schedule,
    };
    let topology = workload.topology();
    let name = |node: NodeId| topology.name(node).to_owned();
    let held = schedule.held_bytes(workload);
    let switches = topology.programmable().map(|switch| SwitchReport {
        name: name(switch),
        memory_bytes: topology.memory_bytes(switch).unwrap_or(0),
        summed_bytes: held.get(&switch).copied().unwrap_or(0),
        sub_models: schedule
            .jobs()
            .iter()
            .map(|job| {
                (0..job.sub_models()).filter(|part| job.aggregation_nodes(*part).contains(&switch)).count()
            })
            .sum(),
    });
    let jobs = workload.jobs().iter().zip(schedule.jobs()).enumerate().map(|(index, (job, its))| JobReport {
        name: job.name.clone(),
        size_bytes: job.bytes(),
        workers: job.workers.iter().map(|worker| name(*worker)).collect(),
        slowest_link_s: schedule.slowest_of_job(workload, index).seconds,
        sub_models: job
            .sub_models
            .iter()
            .enumerate()
            .map(|(part, sub_model)| SubModelReport {
                name: sub_model.name.clone(),
                bytes: sub_model.bytes,
                root: name(its.root(part)),
                aggregation_nodes: its.aggregation_nodes(part).iter().map(|node| name(*node)).collect(),
            })
            .collect(),
    });
    let report = Report {
        planner: planner.name(),
        plans,
        slowest_link_bound_s: slowest.bound_s,
        switches: switches.collect(),
        jobs: jobs.collect(),
    };
    (report, schedule)
}

fn plan_report(
    workload: &Workload,
    name: &'static str,
    schedule: &GradientSchedule,
    value: Option<f64>,
    bound: Option<f64>,
) -> PlanReport {
    let slowest = schedule.slowest(workload);
    let mut report = PlanReport {
        name,
        slowest_link_s: slowest.seconds,
        slowest_link: slowest.link.map(|link| link_name(workload.topology(), link)),
        server_bytes: 0,
        in_network_bytes: 0,
        hop_bytes: 0,
        value,
        bound,
    };
    for job in 0..workload.jobs().len() {
        let traffic = schedule.traffic(workload, job);
        report.server_bytes += traffic.server_bytes;
        report.in_network_bytes += traffic.in_network_bytes;
        report.hop_bytes += traffic.hop_bytes;
    }
    report
}

fn link_name(topology: &Topology, link: usize) -> String {
    let its = &topology.links()[link];
    let [a, b] = its.ends.map(|end| topology.name(end));
    format!("{a} - {b}, {}", rate_text(its.rate_bps))
}

fn shown(workload: &Workload, report: &Report) -> String {
    let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    let mut plans = Table::new();
    plans.load_style(presets::NOTHING);
    plans.set_header(["PLAN", "SLOWEST LINK", "", "TO SERVERS", "BYTES X LINKS", "OF ITS BOUND"]);
    for plan in &report.plans {
        let of_bound = match (plan.value, plan.bound) {
            (Some(value), Some(bound)) if bound > 0.0 => format!("{:.1} %", value / bound * 100.0),
            _ => String::new(),
        };
        plans.add_row([
            Cell::new(plan.name),
            right(time_text(plan.slowest_link_s)),
            Cell::new(plan.slowest_link.as_deref().unwrap_or("")),
            right(bytes_text(plan.server_bytes)),
            right(bytes_text(plan.hop_bytes)),
            right(of_bound),
        ]);
    }
    let bound = time_text(report.slowest_link_bound_s);
    let mut text = format!(
        "{plans}\n\nNo plan's slowest link takes less than {bound}. Headers are not counted; results come back as contributions went.\n\nIn detail: {}\n",
        report.planner
    );
    let mut switches = Table::new();
    switches.load_style(presets::NOTHING);
    switches.set_header(["SWITCH", "MEMORY", "SUMS IN A STEP", "SUB-MODELS"]);
    for switch in &report.switches {
        switches.add_row([
            Cell::new(&switch.name),
            right(bytes_text(switch.memory_bytes)),
            right(bytes_text(switch.summed_bytes)),
            right(switch.sub_models.to_string()),
        ]);
    }
    if report.switches.is_empty() {
        text += "No switch sums: name some in [switch] programmable.\n";
    } else {
        text += &format!("{switches}\n");
    }
    for (job, its) in workload.jobs().iter().zip(&report.jobs) {
        text += &format!(
            "\njob {}: {} workers, {} in {} sub-models; its slowest link takes {}",
            its.name,
            job.workers.len(),
            bytes_text(its.size_bytes),
            job.sub_models.len(),
            time_text(its.slowest_link_s)
        );
    }
    text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

fn bytes_text(bytes: u64) -> String {
    match bytes as f64 {
        bytes if bytes >= 1e9 => format!("{:.2} GB", bytes / 1e9),
        bytes => format!("{:.1} MB", bytes / 1e6),
    }
}
