//! `fanin plan`: how fast a cluster can sum, and what would make it faster.

use std::path::PathBuf;

use anyhow::{Context, anyhow, ensure};
use comfy_table::{Cell, CellAlignment, Table, presets};
use fanin_plan::{Bound, Cluster, LoadSplit, Machine, lower_bound, one_switch, ring};
use fanin_units::{Rate, Size};
use fanin_wire::PLACES_MAX;
use serde::{Deserialize, Serialize};

use crate::output;
use crate::step::Step;

mod goat;
mod thresholds;

pub(crate) use goat::topology;

/// Spare machines more that are looked at.
const MORE: [usize; 4] = [1, 2, 4, 8];
/// How much faster a link is that one might buy.
const FASTER: f64 = 10.0;
/// A smaller gain is not worth a line.
const GAIN_MIN: f64 = 0.01;

/// Say how fast a cluster can sum, and what would make it faster
///
/// Says how long a sum takes for machines behind one link each. It compares one switch, a ring
/// (Gloo, NCCL), and the fastest split over all machines' own summation services (BytePS). It asks
/// no network: say what the links carry. Headers are not counted (6 % with an MTU of 1500), and
/// cores only if --sums says what they can add. A torch job plans the same from what its ranks say
/// (FANIN_RATE, FANIN_SWITCH).
///
/// With --trace it says how long a step of your training takes there. The timelines are those of a
/// run elsewhere, with one rank a machine. They are FANIN_TRACE's, PyTorch's profiles, or Chakra's
/// execution traces (see fanin trace). Headers are counted then.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    fanin plan --machines 8 --rate 1gbit\n  \
    fanin plan --machines 8 --rate 1gbit --spare 1 --spare-rate 10gbit\n  \
    fanin plan --cluster cluster.toml --size 100MB --json\n  \
    fanin plan --machines 8 --rate 10gbit --trace trace.*.json --compute 10\n\n\
    A cluster as a file:\n  \
    [[machine]]\n  \
    name = \"gpu\"\n  \
    count = 4\n  \
    rate = \"1gbit\"        # or up = and down =\n  \
    [[machine]]\n  \
    name = \"old\"\n  \
    rate = \"500mbit\"\n  \
    sums = false          # no service there\n  \
    [[machine]]\n  \
    name = \"spare\"\n  \
    trains = false        # it only sums\n  \
    rate = \"2.5gbit\"\n  \
    sums_at = \"20gbit\"    # what its cores can take in and add\n\n\
    A port whose queues drop gradients (DLCP), as a file for --thresholds:\n  \
    buffer = \"512kB\"\n  \
    load = 1.2            # what arrives by what the link carries\n  \
    [[queue]]             # the first layers; served first\n  \
    size = \"10MB\"\n  \
    small = [[0, 0], [0.016, 0], [0.05, 6]]  # loss, rounds that it costs (fanin profile)\n  \
    large = [[0, 0], [0.001, 0], [0.05, 30]]\n\n\
    Jobs on a topology, as a file for --goat (network, switch, node and link as in scenarios of fanin sim):\n  \
    memory = \"64MB\"       # of each programmable switch\n  \
    stay = \"1ms\"          # of a fragment in a switch; without it the whole step\n  \
    [network]\n  \
    topology = \"leaf-spine\"\n  \
    leaves = 10\n  \
    spines = 10\n  \
    hosts = 5\n  \
    rate = \"10gbit\"\n  \
    [switch]\n  \
    programmable = [\"leaf0\", \"spine1\"]\n  \
    [[job]]\n  \
    name = \"alexnet\"\n  \
    workers = 35\n  \
    servers = [\"h0\"]      # who finishes sums; several are BytePS' services\n  \
    size = \"221MB\"\n  \
    sub_model = \"2MB\"     # at most; or sub_models = [\"1MB\", ..]")]
pub(crate) struct Arguments {
    /// Machines that train
    #[arg(long, value_name = "N", required_unless_present_any = ["cluster", "thresholds", "goat"], conflicts_with = "cluster")]
    machines: Option<usize>,
    /// The rate of each one's link in each direction
    #[arg(long, required_unless_present_any = ["cluster", "thresholds", "goat"], conflicts_with = "cluster")]
    rate: Option<Rate>,
    /// Machines more that only sum
    #[arg(long, value_name = "K", default_value_t = 0, conflicts_with = "cluster")]
    spare: usize,
    /// The rate of their links [default: --rate]
    #[arg(long, value_name = "RATE", conflicts_with = "cluster")]
    spare_rate: Option<Rate>,
    /// The rate at which the cores of each machine can take in and add [default: never the limit]
    #[arg(long, value_name = "RATE", conflicts_with = "cluster")]
    sums: Option<Rate>,
    /// The cluster, as TOML
    #[arg(long, value_name = "FILE")]
    cluster: Option<PathBuf>,
    /// Instead: at which lengths the queues of a port drop gradients (DLCP Appendix B), as TOML
    #[arg(long, value_name = "FILE", conflicts_with_all = ["machines", "rate", "cluster", "size"])]
    thresholds: Option<PathBuf>,
    /// Instead: which switch sums which sub-model (GOAT), for jobs on a topology, as TOML
    #[arg(long, value_name = "FILE", conflicts_with_all = ["machines", "rate", "cluster", "size", "thresholds"])]
    goat: Option<PathBuf>,
    /// With --goat: the plan that is told in detail and drawn; all are compared
    #[arg(long, value_enum, default_value = "slowest", requires = "goat")]
    planner: goat::Planner,
    /// With --goat: where to draw the topology, its links coloured by load
    #[arg(long, value_name = "FILE", requires = "goat")]
    svg: Option<PathBuf>,
    /// Bytes of the tensor
    #[arg(long, default_value = "25MB")]
    size: Size,
    /// In place of one tensor: a step of a training, from timelines or layers (see fanin trace)
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with_all = ["size", "thresholds", "goat"])]
    trace: Vec<PathBuf>,
    /// With --trace: how many times as fast as there the machines compute
    #[arg(long, value_name = "TIMES", default_value_t = 1.0, requires = "trace", value_parser = times)]
    compute: f64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    machine: Vec<MachineTable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MachineTable {
    name: String,
    #[serde(default = "one")]
    count: usize,
    rate: Option<Rate>,
    up: Option<Rate>,
    down: Option<Rate>,
    #[serde(default = "yes")]
    trains: bool,
    #[serde(default = "yes")]
    sums: bool,
    sums_at: Option<Rate>,
}

const fn one() -> usize {
    1
}

const fn yes() -> bool {
    true
}

/// More than any job has; a typing error is told from a cluster.
const MACHINES_MAX: usize = 100_000;

#[derive(Serialize)]
struct Report {
    size_bytes: u64,
    /// The times are those of this step, and of a sum where there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<Step>,
    machines: Vec<Share>,
    split: Way,
    one_switch: Option<Way>,
    ring_s: f64,
    /// No way to sum on these machines takes less.
    lower_bound_s: f64,
    /// Machines that one might buy, and what the split would then take.
    purchases: Vec<Purchase>,
}

#[derive(Serialize)]
struct Share {
    name: String,
    trains: bool,
    up_bps: f64,
    down_bps: f64,
    /// Of every tensor.
    share: f64,
}

#[derive(Serialize)]
struct Way {
    time_s: f64,
    /// The machine that everybody waits for, and what of it.
    bound: Option<String>,
}

#[derive(Serialize)]
struct Purchase {
    what: String,
    split_s: f64,
    /// The time if one switch sums all.
    one_switch_s: Option<f64>,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if let Some(path) = &arguments.thresholds {
        return thresholds::run(path, arguments.json);
    }
    if let Some(path) = &arguments.goat {
        return goat::run(path, arguments.planner, arguments.svg.as_ref(), arguments.json);
    }
    let cluster = Cluster::new(machines(arguments)?)?;
    let step = match &arguments.trace[..] {
        [] => None,
        files => Some(Step::read(files)?.computing_faster(arguments.compute)),
    };
    let report = report(&cluster, arguments.size.0, step);
    let text =
        if arguments.json { serde_json::to_string(&report)? } else { shown(&report, arguments.compute) };
    Ok(output::line(&text)?)
}

fn times(text: &str) -> Result<f64, String> {
    let times = text.parse::<f64>().ok().filter(|times| times.is_finite() && *times > 0.0);
    times.ok_or_else(|| "it must be a number above 0, such as 10".into())
}

fn machines(arguments: &Arguments) -> anyhow::Result<Vec<Machine>> {
    let machines: Vec<_> = match &arguments.cluster {
        Some(path) => {
            let name = path.display();
            let text =
                std::fs::read_to_string(path).with_context(|| format!("cannot read the cluster {name}"))?;
            let file: File = toml::from_str(&text).map_err(|error| {
                anyhow!("in {name}: {}{}", error.to_string().trim_end(), nearest_key(&error))
            })?;
            ensure!(
                counted(file.machine.iter().map(|table| table.count)),
                "{name}: more than {MACHINES_MAX} machines"
            );
            file.machine.iter().map(of_table).collect::<Result<Vec<_>, _>>()?.concat()
        }
        None => {
            let rate = arguments.rate.expect("clap asks for it").0 as f64;
            let spare_rate = arguments.spare_rate.map_or(rate, |rate| rate.0 as f64);
            let (training, spare) = (arguments.machines.expect("clap asks for it"), arguments.spare);
            ensure!(counted([training, spare].into_iter()), "more than {MACHINES_MAX} machines");
            let training = (0..training).map(|index| Machine::training(format!("w{index}"), rate));
            let spare = (0..spare).map(|index| Machine::spare(format!("spare{index}"), spare_rate));
            let summed_bytes_per_s = bytes_per_s(arguments.sums);
            training.chain(spare).map(|machine| Machine { summed_bytes_per_s, ..machine }).collect()
        }
    };
    Ok(machines)
}

/// The key that was meant where there is none of that name: the message has both in backquotes, the
/// unknown one first.
fn nearest_key(error: &toml::de::Error) -> String {
    let mut names = error.message().split('`').skip(1).step_by(2);
    let Some(unknown) = names.next().filter(|_| error.message().starts_with("unknown field")) else {
        return String::new();
    };
    let near = |name: &&str| strsim::jaro_winkler(unknown, name) > 0.7;
    let best = names
        .filter(near)
        .max_by(|a, b| strsim::jaro_winkler(unknown, a).total_cmp(&strsim::jaro_winkler(unknown, b)));
    best.map_or_else(String::new, |name| format!("; did you mean {name}?"))
}

/// The rate of contributions; without a word about the cores they are never the limit.
fn bytes_per_s(sums_at: Option<Rate>) -> f64 {
    sums_at.map_or(f64::INFINITY, |rate| rate.0 as f64 / 8.0)
}

fn counted(counts: impl Iterator<Item = usize>) -> bool {
    counts.fold(0_usize, usize::saturating_add) <= MACHINES_MAX
}

fn of_table(table: &MachineTable) -> anyhow::Result<Vec<Machine>> {
    let MachineTable { name, count, rate, up, down, trains, sums, sums_at } = table;
    let (up, down) = match (rate, up, down) {
        (Some(rate), None, None) => (rate, rate),
        (None, Some(up), Some(down)) => (up, down),
        _ => anyhow::bail!("machine {name}: it needs `rate`, or both `up` and `down`"),
    };
    let machine = |index| Machine {
        name: if *count == 1 { name.clone() } else { format!("{name}{index}") },
        trains: *trains,
        sums: *sums,
        up_bps: up.0 as f64,
        down_bps: down.0 as f64,
        summed_bytes_per_s: bytes_per_s(*sums_at),
    };
    Ok((0..*count).map(machine).collect())
}

fn report(cluster: &Cluster, size_bytes: u64, step: Option<Step>) -> Report {
    let size_bytes = step.as_ref().map_or(size_bytes, Step::bytes);
    let time_s = |seconds_per_byte: f64| match &step {
        Some(step) => step.time_s(seconds_per_byte),
        None => seconds_per_byte * size_bytes as f64,
    };
    let way = |split: &LoadSplit| Way {
        time_s: time_s(split.seconds_per_byte),
        bound: bound(cluster, split.bound),
    };
    let split = LoadSplit::of(cluster);
    let switch = one_switch(cluster);
    let mut purchases = Vec::new();
    let mut buy = |what: String, machines: Vec<Machine>| {
        let cluster = Cluster::new(machines).expect("no worse than the one before");
        let after = LoadSplit::of(&cluster);
        let switch_after = one_switch(&cluster);
        let gains = |before: f64, after: f64| time_s(after) < time_s(before) * (1.0 - GAIN_MIN);
        let switch_gains = switch_after.as_ref().is_some_and(|after| {
            switch.as_ref().is_none_or(|before| gains(before.seconds_per_byte, after.seconds_per_byte))
        });
        if gains(split.seconds_per_byte, after.seconds_per_byte) || switch_gains {
            purchases.push(Purchase {
                what,
                split_s: time_s(after.seconds_per_byte),
                one_switch_s: switch_after.map(|switch| time_s(switch.seconds_per_byte)),
            });
        }
    };
    let rate = usual_rate_bps(cluster);
    // A machine alone has nothing to wait for.
    for more in MORE.into_iter().filter(|_| split.bound != Bound::Nothing) {
        let spare = (0..more).map(|index| Machine::spare(format!("more{index}"), rate));
        let plural = if more == 1 { "" } else { "s" };
        buy(
            format!(
                "{more} more machine{plural} of {} that only sum{}",
                rate_text(rate),
                if more == 1 { "s" } else { "" }
            ),
            cluster.machines().iter().cloned().chain(spare).collect(),
        );
    }
    let spare = cluster.machines().iter().enumerate().filter(|(_, machine)| !machine.trains && machine.sums);
    let link_bps = |machine: &Machine| machine.up_bps.min(machine.down_bps);
    let fast = spare.max_by(|(_, a), (_, b)| link_bps(a).total_cmp(&link_bps(b))).map(|(index, _)| index);
    let mut machines = cluster.machines().to_vec();
    let what = if let Some(fast) = fast {
        machines[fast].up_bps *= FASTER;
        machines[fast].down_bps *= FASTER;
        format!("{} for the link of {}", rate_text(machines[fast].up_bps), machines[fast].name)
    } else {
        machines.push(Machine::spare("switch", rate * FASTER));
        format!("one machine of {} that only sums", rate_text(rate * FASTER))
    };
    if split.bound != Bound::Nothing {
        buy(what, machines);
    }
    Report {
        size_bytes,
        machines: cluster
            .machines()
            .iter()
            .zip(&split.shares)
            .map(|(machine, share)| Share {
                name: machine.name.clone(),
                trains: machine.trains,
                up_bps: machine.up_bps,
                down_bps: machine.down_bps,
                share: *share,
            })
            .collect(),
        split: way(&split),
        one_switch: switch.as_ref().map(way),
        ring_s: time_s(ring(cluster)),
        lower_bound_s: time_s(lower_bound(cluster)),
        purchases,
        step,
    }
}

/// The rate of the machine in the middle, of those that train.
fn usual_rate_bps(cluster: &Cluster) -> f64 {
    let mut rates: Vec<_> = cluster
        .machines()
        .iter()
        .filter(|machine| machine.trains)
        .map(|machine| machine.up_bps.min(machine.down_bps))
        .collect();
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

fn bound(cluster: &Cluster, bound: Bound) -> Option<String> {
    let (machine, what) = match bound {
        Bound::Up(machine) => (machine, "the link out of"),
        Bound::Down(machine) => (machine, "the link into"),
        Bound::Summing(machine) => (machine, "the cores of"),
        Bound::Nothing => return None,
    };
    let machine = &cluster.machines()[machine];
    let either = matches!(bound, Bound::Up(_) | Bound::Down(_)) && machine.up_bps == machine.down_bps;
    Some(format!("{} {}", if either { "the link of" } else { what }, machine.name))
}

fn shown(report: &Report, faster: f64) -> String {
    let mut shares = Table::new();
    shares.load_style(presets::NOTHING);
    shares.set_header(["MACHINES", "", "LINK", "SHARE OF EACH TENSOR"]);
    for alike in report.machines.chunk_by(alike) {
        let (first, last) = (&alike[0], &alike[alike.len() - 1]);
        let names =
            if alike.len() == 1 { first.name.clone() } else { format!("{} .. {}", first.name, last.name) };
        let link = if first.up_bps == first.down_bps {
            rate_text(first.up_bps)
        } else {
            format!("{} up, {} down", rate_text(first.up_bps), rate_text(first.down_bps))
        };
        let does = if first.trains { "train" } else { "only sum" };
        let share =
            Cell::new(format!("{:.2} % each", first.share * 100.0)).set_alignment(CellAlignment::Right);
        shares.add_row([Cell::new(names), Cell::new(does), Cell::new(link), share]);
    }
    let mut ways = Table::new();
    ways.load_style(presets::NOTHING);
    let mut add = |way: &str, seconds: f64, note: &str| {
        let time = Cell::new(time_text(seconds)).set_alignment(CellAlignment::Right);
        ways.add_row([Cell::new(way), time, Cell::new(note)]);
    };
    let waits =
        |way: &Way| way.bound.as_ref().map_or_else(String::new, |bound| format!("all wait for {bound}"));
    if let Some(switch) = &report.one_switch {
        add("one switch", switch.time_s, &waits(switch));
    }
    add("a ring (Gloo, NCCL)", report.ring_s, "");
    let gain = report.ring_s / report.split.time_s;
    let gain = if gain > 1.0 + GAIN_MIN {
        format!("{gain:.2} times as fast as a ring")
    } else {
        "no gain over a ring".into()
    };
    let notes = [gain, waits(&report.split)];
    let notes: Vec<_> = notes.into_iter().filter(|note| !note.is_empty()).collect();
    add("fanin, by the shares above", report.split.time_s, &notes.join("; "));
    add("on these machines no way takes less than", report.lower_bound_s, "");
    for Purchase { what, split_s, one_switch_s } in &report.purchases {
        let switch =
            one_switch_s.map_or_else(String::new, |seconds| format!("; one switch: {}", time_text(seconds)));
        add(&format!("with {what}"), *split_s, &format!("the best shares{switch}"));
    }
    let size_mb = report.size_bytes as f64 / 1e6;
    if report.split.bound.is_none() {
        return format!("{shares}\n\nOne machine trains alone: nothing crosses the network.");
    }
    let training = report.machines.iter().filter(|machine| machine.trains).count();
    // It stands before all figures, because the best of them cannot be had.
    let limit = if training > PLACES_MAX as usize {
        format!(
            "A service sums for {PLACES_MAX} machines, and here are {training}: fanin refuses the shares below. For more, racks sum before one switch \
             (fanin switch --upstream).\n\n"
        )
    } else {
        String::new()
    };
    let what = match &report.step {
        Some(step) => step.shown(faster),
        None => format!("A sum of {size_mb} MB, headers not counted"),
    };
    let text = format!("{limit}{shares}\n\n{what}:\n{ways}");
    text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

fn alike(a: &Share, b: &Share) -> bool {
    let share = (a.share - b.share).abs() < 1e-6;
    (a.trains, a.up_bps, a.down_bps) == (b.trains, b.up_bps, b.down_bps) && share
}

fn rate_text(bps: f64) -> String {
    if bps >= 1e9 { format!("{} Gbit/s", bps / 1e9) } else { format!("{} Mbit/s", bps / 1e6) }
}

fn time_text(seconds: f64) -> String {
    format!("{:.1} ms", seconds * 1e3)
}
