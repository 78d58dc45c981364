//! `fanin topo`: the inside of a machine, and how gradients of its GPUs best come to its NIC and
//! back (BytePS §4.2).

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use fanin_plan::machine_topology::{
    Direction, MachineTopology, Outside, Part, PartId, PartKind, Planned, Slowest, Strategy, Wire, best,
    planned,
};
use fanin_units::Size;
use serde::Serialize;

use crate::output;

mod file;
mod nvml;
mod play;
mod shown;
mod sysfs;

/// More than any job has; a typing error is told from a cluster.
const MACHINES_MAX: usize = 100_000;

/// How gradients of a machine's GPUs best come to its NIC and back
///
/// Reads this machine from sysfs, or a file: PCIe's tree, NUMA nodes, GPUs and NICs, and what their
/// links carry. Counts what each strategy of BytePS §4.2 puts on each link, and says which is
/// fastest. The slowest link decides. NVIDIA's library tells the NVLinks (NVML). Nobody tells what
/// memory and links between sockets carry: say it in a file. It is a prediction: nothing is copied.
/// `fanin.torch.machine_hook` does what it recommends.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    fanin topo\n  \
    fanin topo --machines 8 --spare 2\n  \
    fanin topo examples/topo/nvlink.toml --machines 8 --play\n\n\
    A machine as a file:\n  \
    peer_rate = \"80Gbit\"   # from GPU to GPU across PCIe switches, where that was measured\n  \
    [[cpu]]\n  \
    name = \"cpu0\"\n  \
    memory = \"1Tbit\"       # reading and writing together; without it never the limit\n  \
    [[cpu]]\n  \
    name = \"cpu1\"\n  \
    [[socket]]\n  \
    between = [\"cpu0\", \"cpu1\"]\n  \
    rate = \"300Gbit\"       # of each direction, as all rates\n  \
    [[switch]]\n  \
    name = \"pcie0\"\n  \
    under = \"cpu0\"         # or a switch above it\n  \
    rate = \"105Gbit\"\n  \
    [[gpu]]\n  \
    name = \"gpu\"\n  \
    count = 4              # gpu0 to gpu3\n  \
    under = \"pcie0\"\n  \
    rate = \"105Gbit\"\n  \
    [[nic]]\n  \
    name = \"mlx0\"\n  \
    under = \"cpu1\"\n  \
    rate = \"105Gbit\"       # of PCIe\n  \
    network = \"100Gbit\"    # of its cable\n  \
    [[nvlink]]\n  \
    between = [\"gpu0\", \"gpu1\"]  # each with each; several links between two add up\n  \
    rate = \"200Gbit\"\n  \
    [[nvswitch]]\n  \
    name = \"nv\"\n  \
    gpus = [\"gpu2\", \"gpu3\"]     # all unless given\n  \
    rate = \"3.6Tbit\"")]
pub(crate) struct Arguments {
    /// The machine, as TOML [default: this one]
    file: Option<PathBuf>,
    /// Machines that train, all like this one
    #[arg(long, value_name = "N", default_value_t = 2)]
    machines: usize,
    /// Machines more that only sum
    #[arg(long, value_name = "K", default_value_t = 0)]
    spare: usize,
    /// Bytes of the gradients of one GPU
    #[arg(long, default_value = "1GB")]
    size: Size,
    /// Also play each strategy's copies over these links in the simulator
    #[arg(long)]
    play: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    size_bytes: u64,
    machines: usize,
    spares: usize,
    /// The load of NICs in each direction.
    network_bytes: f64,
    /// From GPU to GPU across PCIe switches; none where it is not known.
    peer_bps: Option<f64>,
    parts: Vec<PartReport>,
    links: Vec<LinkReport>,
    strategies: Vec<StrategyReport>,
    /// Its place among them; none without a GPU.
    chosen: Option<usize>,
    /// The parts that were not read, or left out.
    notes: Vec<String>,
}

#[derive(Serialize)]
struct PartReport {
    name: String,
    kind: &'static str,
    /// The rate of a CPU's memory, if it is known.
    memory_bps: Option<f64>,
}

#[derive(Serialize)]
struct LinkReport {
    ends: [String; 2],
    wire: &'static str,
    /// None where it is not known, and never the limit.
    rate_bps: Option<f64>,
}

#[derive(Serialize)]
struct StrategyReport {
    name: String,
    kind: &'static str,
    /// GPUs that are reduced to.
    roots: Vec<String>,
    /// `x` of Eqs. 8 and 9.
    brute_force: f64,
    /// Whether it is BytePS's, and not only compared with.
    candidate: bool,
    time_s: f64,
    slowest: Option<String>,
    /// As the links above: bytes from the first end to the second and back, and seconds that these
    /// take.
    loads: Vec<LoadReport>,
    memory: Vec<MemoryReport>,
    /// In the simulator, with `--play`.
    played_s: Option<f64>,
}

#[derive(Serialize)]
struct LoadReport {
    bytes: [f64; 2],
    time_s: [f64; 2],
}

#[derive(Serialize)]
struct MemoryReport {
    cpu: String,
    /// Read and written.
    bytes: f64,
    time_s: f64,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    ensure!(
        (1..=MACHINES_MAX).contains(&arguments.machines) && arguments.spare <= MACHINES_MAX,
        "from 1 to {MACHINES_MAX} machines that train, and at most as many more that only sum"
    );
    ensure!(arguments.size.0 > 0, "--size of at least one byte");
    let (topology, notes) = match &arguments.file {
        Some(path) => (of_file(path)?, Vec::new()),
        None => {
            let nvlinks = || nvml::read(nvml::LIBRARY.as_ref());
            let sysfs::Found { topology, notes } = sysfs::read(Path::new("/sys"), nvlinks)?;
            (topology, notes)
        }
    };
    let outside = Outside { machines: arguments.machines, spares: arguments.spare };
    let plans = planned(&topology, outside);
    let report = report(&topology, outside, &plans, arguments, notes);
    let text = if arguments.json {
        serde_json::to_string(&report)?
    } else {
        shown::text(&topology, &plans, &report)
    };
    Ok(output::line(&text)?)
}

fn of_file(path: &Path) -> anyhow::Result<MachineTopology> {
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read the machine {name}"))?;
    Ok(file::read(&name, &text)?)
}

fn report(
    topology: &MachineTopology,
    outside: Outside,
    plans: &[Planned],
    arguments: &Arguments,
    notes: Vec<String>,
) -> Report {
    let size_bytes = arguments.size.0;
    let bytes = size_bytes as f64;
    let name = |part: PartId| topology.name(part).to_owned();
    let known = |bps: f64| Some(bps).filter(|bps| bps.is_finite());
    let part = |Part { name, kind }: &Part| PartReport {
        name: name.clone(),
        kind: kind_name(*kind),
        memory_bps: if let PartKind::Cpu { memory_bps } = kind { known(*memory_bps) } else { None },
    };
    let strategy = |plan: &Planned| {
        let traffic = &plan.traffic;
        let load = |(moved, seconds): (&[f64; 2], &[f64; 2])| LoadReport {
            bytes: moved.map(|of_one| of_one * bytes),
            time_s: seconds.map(|of_one| of_one * bytes),
        };
        let memory = traffic.memory.iter().map(|(cpu, moved, seconds)| MemoryReport {
            cpu: name(*cpu),
            bytes: moved * bytes,
            time_s: seconds * bytes,
        });
        StrategyReport {
            name: strategy_name(topology, &plan.strategy),
            kind: match plan.strategy {
                Strategy::CpuAssisted { .. } => "cpu-assisted",
                Strategy::Roots(_) => "roots",
                Strategy::Straightforward => "straightforward",
                Strategy::Ring => "ring",
            },
            roots: if let Strategy::Roots(roots) = &plan.strategy {
                roots.iter().map(|root| name(*root)).collect()
            } else {
                Vec::new()
            },
            brute_force: if let Strategy::CpuAssisted { brute_force } = plan.strategy {
                brute_force
            } else {
                0.0
            },
            candidate: plan.is_candidate(),
            time_s: plan.seconds_per_byte * bytes,
            slowest: slowest_name(topology, plan),
            loads: traffic.bytes.iter().zip(&traffic.seconds).map(load).collect(),
            memory: memory.collect(),
            played_s: arguments.play.then(|| play::seconds(topology, &plan.traffic.flows, size_bytes)),
        }
    };
    Report {
        size_bytes,
        machines: outside.machines,
        spares: outside.spares,
        network_bytes: outside.through_nics() * bytes,
        peer_bps: known(topology.peer_bps()),
        parts: topology.parts().iter().map(part).collect(),
        links: topology
            .links()
            .iter()
            .map(|link| LinkReport {
                ends: link.ends.map(name),
                wire: match link.wire {
                    Wire::Pcie => "pcie",
                    Wire::Socket => "socket",
                    Wire::NvLink => "nvlink",
                    Wire::Cable => "cable",
                },
                rate_bps: known(link.rate_bps),
            })
            .collect(),
        strategies: plans.iter().map(strategy).collect(),
        chosen: best(plans).and_then(|best| plans.iter().position(|plan| std::ptr::eq(plan, best))),
        notes,
    }
}

const fn kind_name(kind: PartKind) -> &'static str {
    match kind {
        PartKind::Cpu { .. } => "CPU",
        PartKind::PcieSwitch => "PCIe switch",
        PartKind::Gpu => "GPU",
        PartKind::Nic => "NIC",
        PartKind::NvSwitch => "NVLink switch",
        PartKind::Network => "network",
    }
}

fn strategy_name(topology: &MachineTopology, strategy: &Strategy) -> String {
    match strategy {
        Strategy::CpuAssisted { brute_force: 0.0 } => "CPU-assisted aggregation".into(),
        Strategy::CpuAssisted { brute_force } => {
            format!("CPU-assisted aggregation, {:.1} % copied whole", brute_force * 100.0)
        }
        Strategy::Roots(roots) if roots.len() > 1 && roots.len() == topology.gpus().count() => {
            "reduce-scatter over NVLink, all GPUs".into()
        }
        Strategy::Roots(roots) => {
            let names: Vec<_> = roots.iter().map(|root| topology.name(*root)).collect();
            format!("reduce over NVLink to {}", names.join(", "))
        }
        Strategy::Straightforward => "reduce-scatter over all GPUs".into(),
        Strategy::Ring => "ring over the GPUs of all machines (NCCL)".into(),
    }
}

fn slowest_name(topology: &MachineTopology, plan: &Planned) -> Option<String> {
    match plan.traffic.slowest().0 {
        Slowest::Link(link, direction) => {
            let link = topology.links()[link];
            let [a, b] = link.ends.map(|end| topology.name(end));
            let (from, to) = if direction == Direction::Forth { (a, b) } else { (b, a) };
            Some(format!("{from} -> {to}, {}", rate_text(link.rate_bps)))
        }
        Slowest::Memory(cpu) => Some(format!("the memory of {}", topology.name(cpu))),
        Slowest::Nothing => None,
    }
}

fn rate_text(bps: f64) -> String {
    if bps.is_infinite() { "rate not known".into() } else { format!("{} Gbit/s", (bps / 1e8).round() / 10.0) }
}
