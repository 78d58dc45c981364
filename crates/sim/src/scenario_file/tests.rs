use super::*;
use crate::net::{Cost, Order, QueueConfig, Time};
use crate::workload::models::Model;
use crate::workload::{JobPlan, Trained, Workload};

pub(super) const RACK: &str = "[network]\ntopology = \"rack\"\nhosts = 9\n";
pub(super) const JOB: &str = "[[job]]\nsystem = \"atp\"\nworkers = 8\ntensor = \"4MB\"\n";

pub(super) fn ok(text: &str) -> Scenario {
    parse("test.toml", text).unwrap_or_else(|error| panic!("{error}"))
}

/// The job's system is configured so.
#[track_caller]
fn says(job: &JobPlan, words: &[&str]) {
    let system = format!("{:?}", job.system);
    for word in words {
        assert!(system.contains(word), "{word:?} is not in: {system}");
    }
}

/// The file is refused, at this line, with a message that has all of `words`.
#[track_caller]
pub(super) fn refused(text: &str, line: usize, words: &[&str]) {
    let Err(error) = parse("test.toml", text) else { panic!("this was taken:\n{text}") };
    let message = error.to_string();
    assert_eq!(error.line(), line, "{message}");
    if line > 0 {
        assert!(message.starts_with(&format!("test.toml:{line}:")), "{message}");
    }
    for word in words {
        assert!(message.contains(word), "{word:?} is not in: {message}");
    }
}

/// Why the file is refused.
#[track_caller]
pub(super) fn wrong(text: &str) -> String {
    let Err(error) = parse("test.toml", text) else { panic!("this was taken:\n{text}") };
    error.to_string()
}

const FLOW: &str = "[[background]]\nfrom = \"h0\"\nto = \"h1\"\nkind = \"tcp\"\n";

#[test]
fn a_short_file_has_sensible_defaults() {
    let scenario = ok(&format!("{RACK}{JOB}"));
    let job = &scenario.jobs[0];
    assert_eq!(job.name, "job0");
    assert_eq!(job.workers.len(), 8);
    assert_eq!(scenario.topology.get(job.system.server().expect("ATP has a server")).name, "h8");
    says(job, &["elements: 336"]); // Fills an Ethernet frame.
    assert_eq!(job.workload, Workload::AllReduce { elements: 1_000_000, in_flight: 2, count: None });
    assert_eq!(scenario.topology.programmable().count(), 1);
}

#[test]
fn a_job_may_stand_still_for_a_part_of_the_run_unless_said_otherwise() {
    let stall = |head: &str, tail: &str| ok(&format!("{head}{RACK}{JOB}{tail}")).stall;
    let ms = std::time::Duration::from_millis;
    assert_eq!(stall("", ""), ms(2000), "of ten seconds");
    assert_eq!(stall("until = \"50ms\"\n", ""), ms(50) / 4);
    assert_eq!(stall("until = \"2ms\"\n", ""), ms(4), "four timeouts");
    assert_eq!(stall("until = \"2ms\"\nstall = \"1ms\"\n", ""), ms(1));
    let outage = "[[fault]]\nat = \"1ms\"\nkind = \"node-fails\"\nnode = \"s0\"\ndown = \"7ms\"\n";
    assert_eq!(stall("until = \"50ms\"\n", outage), ms(50) / 4 + ms(7));
}

#[test]
fn every_key_has_its_effect() {
    let scenario = ok(r#"
title = "all keys"
until = "3s"
interval = "5ms"
warm_up = "100ms"
stall = "1s"

[network]
topology = "leaf-spine"
leaves = 2
spines = 2
hosts = 4
rate = "25Gbit"
core_rate = "100Gbit"
delay = "2us"
core_delay = "3us"
mtu = 9000
queue = "2MB"
ecn = "100kB"
shared_buffer = "16MB"
alpha = 0.5
routing = "packet"

[switch]
programmable = ["leaf0", "leaf1"]
aggregators = 100
stale = "10ms"
processing = "1us"

[[job]]
name = "train"
system = "atp"
workers = ["h0", "h1", "h4"]
start = "1ms"
stop = "2s"
model = "VGG16"
batch = 16
iterations = 5
scale = 100.0
flops = 5e12
jitter = "10%"
pause_every = 2
pause = "10ms"
dtype = "int32"
large_values = "1%"

[job.atp]
server = "h5"
elements = 1024
window = 64
hashing = "linear"
scaling = "dynamic"
overflow = "proactive"
congestion_control = false
timeout = "2ms"

[[background]]
from = "h2"
to = "h6"
kind = "constant"
rate = "10Gbit"
start = "5ms"
stop = "1s"

[[loss]]
link = ["h0", "leaf0"]
from = "h0"
loss = "1%"
burst_begin = 0.1
burst_end = 0.5
duplication = "2%"
reordering = "3%"
held_back = "50us"

[[fault]]
at = "10ms"
kind = "link-fails"
link = ["leaf0", "spine1"]
down = "1ms"

[[fault]]
at = "20ms"
kind = "worker-respawns"
job = "train"
rank = 2
down = "1ms"
"#);
    let job = &scenario.jobs[0];
    assert!(job.integers);
    says(
        job,
        &[
            "server: Some(NodeId(",
            "elements: 1024",
            "window: 64",
            "Linear",
            "Dynamic",
            "Proactive",
            "congestion_control: false",
            "2ms",
        ],
    );
    let Workload::Training { trained, batch, jitter, pause, .. } = &job.workload else { panic!("it trains") };
    assert_eq!((trained, *batch, *jitter), (&Trained::Model(Model::Vgg16, 5e12), 16, 0.1));
    assert_eq!(*pause, Some((2, Duration::from_millis(10))));
    assert_eq!(scenario.topology.programmable().count(), 2);
    assert_eq!(scenario.losses.len(), 1, "one direction of one link");
    assert_eq!(scenario.losses[0].burst, Some((0.1, 0.5)));
    assert_eq!(scenario.background[0].rate_bps, Some(10_000_000_000));
    assert_eq!(scenario.faults[1].fault, Fault::WorkerRespawns(0, 2, Duration::from_millis(1)));
    assert_eq!(scenario.multipath, Multipath::PerPacket);
}

#[test]
fn an_unknown_key_is_named_with_its_line_and_the_nearest_one() {
    refused(
        &format!("{RACK}\n[[job]]\nsystem = \"atp\"\nwrokers = 8\ntensor = \"4MB\"\n"),
        7,
        &["unknown key `wrokers`", "did you mean `workers`?", "7 | wrokers = 8"],
    );
    refused(&format!("untill = \"1s\"\n{RACK}{JOB}"), 1, &["`untill`", "`until`"]);
    refused("[network]\ntopology = \"rack\"\nhosts = 3\nhost = 4\n", 4, &["`host`", "`hosts`"]);
    refused("[network]\ntopology = \"rack\"\nhosts = 3\nxyzzy = 4\n", 4, &["`xyzzy`", "known: topology, "]);
}

#[test]
fn an_unknown_name_is_answered_with_the_nearest_one() {
    refused("[network]\ntopology = \"figure-9\"\n", 2, &["`figure-9`", "`figure9`"]);
    refused(&format!("{RACK}[[job]]\nsystem = \"switch-ml\"\nworkers = 2\n"), 5, &["`switchml`"]);
    refused(
        &format!("{RACK}[[job]]\nsystem = \"atp\"\nworkers = 2\nmodel = \"vgg-16\"\n"),
        7,
        &["unknown model `vgg-16`", "`vgg16`"],
    );
    refused(&format!("{RACK}{JOB}[job.atp]\nserver = \"h88\"\n"), 9, &["unknown host `h88`", "`h8`"]);
    refused(
        &format!("{RACK}[switch]\nprogrammable = [\"sw0\"]\n{JOB}"),
        5,
        &["unknown switch `sw0`", "known: s0"],
    );
    refused(
        &format!("{RACK}{JOB}[[fault]]\nat = \"1s\"\nkind = \"job-dies\"\njob = \"job1\"\n"),
        11,
        &["unknown job `job1`", "`job0`"],
    );
}

#[test]
fn impossible_rates_and_times_are_refused() {
    refused("[network]\ntopology = \"rack\"\nhosts = 2\nrate = \"0Gbit\"\n", 4, &["impossible rate"]);
    refused("[network]\ntopology = \"rack\"\nhosts = 2\nrate = \"-1Gbit\"\n", 4, &["no rate"]);
    refused(&format!("[network]\ntopology = \"rack\"\nhosts = 9\nrate = \"9Tbit\"\n{JOB}"), 4, &["8Tbit"]);
    refused(&format!("until = \"0s\"\n{RACK}{JOB}"), 1, &["`until`"]);
    refused(&format!("interval = \"0s\"\n{RACK}{JOB}"), 1, &["`interval`"]);
    refused(
        &format!(
            "{RACK}[[background]]\nfrom = \"h0\"\nto = \"h1\"\nkind = \"constant\"\nrate = \"200Gbit\"\n"
        ),
        8,
        &["impossible rate"],
    );
}

#[test]
fn impossible_rates_and_lateness_of_workers_are_refused() {
    refused(&format!("{RACK}{JOB}rates = [\"1Gbit\"]\n"), 8, &["1 rates of"]);
    refused(&format!("{RACK}{JOB}rates = \"fast\"\n"), 8, &["rates: a list", "deviation"]);
    refused(&format!("{RACK}{JOB}rates = {{ most = \"1Gbit\" }}\n"), 8, &["rates: a list", "deviation"]);
    refused(&format!("{RACK}{JOB}late = \"slow\"\n"), 8, &["late: at most so long"]);
    refused(
        &format!("{RACK}{JOB}late = {{ most = \"1s\", deviation = 2 }}\n"),
        8,
        &["late: at most so long"],
    );
    let busy = RACK.replace("hosts = ", "host_byte_cost = \"1ns\"\nhosts = ");
    refused(
        &format!("{busy}{JOB}rates = {{ most = \"1Gbit\", deviation = 0.1 }}\n"),
        9,
        &["`packet_cost`", "the one or the other"],
    );
}

#[test]
fn more_workers_than_there_are_or_than_bitmaps_hold_are_refused() {
    refused(&format!("{RACK}[[job]]\nsystem = \"ring\"\nworkers = 10\n"), 6, &["10 workers", "only 9 hosts"]);
    let rack = |hosts: usize| format!("[network]\ntopology = \"rack\"\nhosts = {hosts}\n");
    let job = |system: &str, workers: usize| {
        format!("[[job]]\nsystem = \"{system}\"\nworkers = {workers}\ntensor = \"4kB\"\n")
    };
    refused(&(rack(40) + &job("atp", 33)), 6, &["s0 would have 33 children", "32"]);
    refused(&(rack(1100) + &job("atp", 1025)), 6, &["1025 workers", "1024"]);
    refused(&(rack(80) + &job("switchml", 65)), 6, &["s0 would have 65 children", "64"]);
    refused(&(rack(4100) + &job("switchml", 4097)), 6, &["4097 workers", "4096"]);
    refused(&(rack(4100) + &job("ring", 4097)), 6, &["4097 workers", "4096"]);
    refused(&(rack(9) + &job("atp", 0)), 6, &["at least 1"]);
    refused(&(rack(9) + &job("ring", 1)), 6, &["at least 2"]);
}

#[test]
fn a_fan_in_that_does_not_add_up_is_refused() {
    // 31 other racks and 4 workers of the server's own rack: 35 children of its switch.
    let network = "[network]\ntopology = \"leaf-spine\"\nleaves = 32\nspines = 1\nhosts = 4\n";
    let workers: Vec<String> =
        (0..128).filter(|host| host % 4 == 0 || *host > 124).map(|host| format!("\"h{host}\"")).collect();
    let job = |server| {
        format!(
            "[[job]]\nsystem = \"atp\"\nworkers = [{}]\ntensor = \"1MB\"\n[job.atp]\nserver = \"{server}\"\n",
            workers.join(", ")
        )
    };
    refused(&format!("{network}{}", job("h124")), 8, &["leaf31", "children"]);
    ok(&format!("{network}{}", job("h1")));
    let racks = |programmable: &str| {
        format!(
            "[network]\ntopology = \"leaf-spine\"\nleaves = 2\nspines = 1\nhosts = 4\n[switch]\nprogrammable = {programmable}\n[[job]]\nsystem = \"switchml\"\nworkers = 8\ntensor = \"1MB\"\n"
        )
    };
    ok(&racks("[0]"));
    refused(&racks("\"0%\""), 10, &["programmable"]);
}

#[test]
fn no_aggregators_are_fine_for_atp_and_no_slots_are_not_for_switchml() {
    let none = "[switch]\naggregators = 0\n";
    assert_eq!(ok(&format!("{RACK}{none}{JOB}")).switch.aggregators, 0);
    refused(&format!("{RACK}{none}{}", JOB.replace("atp", "switchml")), 7, &["0 aggregators", "two"]);
    refused(&format!("{RACK}[switch]\nways = 0\n{JOB}"), 5, &["1 to 64 aggregators"]);
    assert_eq!(ok(&format!("{RACK}[switch]\nways = 1\n{JOB}")).switch.ways, 1);
    let jobs = "[[job]]\nsystem = \"switchml\"\nworkers = 2\ntensor = \"4kB\"\n".repeat(3);
    let scenario = ok(&format!("{RACK}[switch]\naggregators = 60\n{jobs}"));
    scenario.jobs.iter().for_each(|job| says(job, &["slots: 10"])); // Two aggregators a slot, three jobs.
}

#[test]
fn packets_that_do_not_fit_are_refused() {
    refused(&format!("{RACK}{JOB}[job.atp]\nelements = 100\n"), 9, &["[64, 256, 336, 1024, 2048]"]);
    refused(&format!("{RACK}{JOB}[job.atp]\nelements = 1024\n"), 9, &["do not fit", "1500"]);
    let pool = JOB.replace("atp", "switchml");
    refused(&format!("{RACK}{pool}[job.switchml]\nelements = 48\n"), 9, &["[32, 64, 256, 352, 1024, 2048]"]);
    let ring = JOB.replace("atp", "ring");
    refused(&format!("{RACK}{ring}[job.ring]\nreceive_window = \"0kB\"\n"), 9, &["must not be zero"]);
    says(&ok(&format!("{RACK}{ring}[job.ring]\nreceive_window = \"64kB\"\n")).jobs[0], &["64000"]);
    refused(&format!("{RACK}mtu = 200\n{JOB}"), 4, &["200 bytes"]);
    refused(&format!("{RACK}{JOB}[job.atp]\nwindow = 0\n"), 9, &["1 to "]);
    refused(&format!("{RACK}{JOB}[job.atp]\nwindow = 5000\n"), 9, &["1 to 3120"]);
    refused(&format!("{RACK}queue = \"1kB\"\n{JOB}"), 4, &["not even one packet"]);
    refused(&format!("{RACK}ecn = \"2MB\"\n{JOB}"), 4, &["marks nothing"]);
}

#[test]
fn a_job_has_one_thing_to_do() {
    let job = "[[job]]\nsystem = \"ring\"\nworkers = 2\n";
    refused(&format!("{RACK}{job}"), 5, &["nothing to do"]);
    refused(&format!("{RACK}{job}tensor = \"4MB\"\nmodel = \"vgg16\"\n"), 7, &["either"]);
    refused(&format!("{RACK}{job}tensor = \"4MB\"\nbatch = 3\n"), 8, &["`batch` is about training"]);
    refused(&format!("{RACK}{job}model = \"vgg16\"\ntensors = 3\n"), 8, &["`tensors` is about"]);
    let beside = job.replace("ring", "ps-n-to-n") + "tensor = \"4MB\"\n";
    refused(&format!("{RACK}{beside}[job.ps-n-to-n]\nserver = \"h5\"\n"), 9, &["no server of its own"]);
    refused(RACK, 0, &["nothing to simulate"]);
}

#[test]
fn layers_say_themselves_how_long_they_take() {
    let job = "[[job]]\nsystem = \"ring\"\nworkers = 2\n";
    let front = "{ bytes = \"4MB\", forward = \"10ms\", backward = \"20ms\" }";
    let with = |more: &str| {
        format!("{RACK}{job}layers = [{front}, {{ bytes = \"400B\", backward = \"1ms\" }}]\n{more}")
    };
    let trained = |text: &str| match ok(text).jobs.remove(0).workload {
        Workload::Training { trained: Trained::Layers(layers), batch, .. } => (layers, batch),
        other => panic!("it trains {other:?}"),
    };
    let (layers, batch) = trained(&with("compute = 10.0\noverlap = true\n"));
    let times: Vec<_> = layers.iter().map(|layer| (layer.forward, layer.backward)).collect();
    let ms = |ms: f64| Duration::from_secs_f64(ms / 1e3);
    assert_eq!(times, [(ms(1.0), ms(2.0)), (ms(0.0), ms(0.1))]);
    assert_eq!((layers[0].parameters, layers[1].parameters, batch), (1_000_000, 100, 1));
    assert_eq!(trained(&with("batch = 64\n")).1, 64);

    refused(&with("flops = 1e12\n"), 8, &["`flops` is about a `model`", "`compute`"]);
    refused(&with("compute = 0.0\n"), 8, &["from 0.001"]);
    refused(&with("tensors = 3\n"), 8, &["`tensors` is about"]);
    refused(&with("model = \"vgg16\"\n"), 8, &["either a `model` or `layers`"]);
    refused(&format!("{RACK}{job}model = \"vgg16\"\ncompute = 2.0\n"), 8, &["`flops`"]);
    refused(&format!("{RACK}{job}layers = []\n"), 7, &["at least one layer"]);
    refused(
        &format!("{RACK}{job}layers = [{{ bytes = \"2B\" }}]\n"),
        7,
        &["from 4 bytes to 1 GiB", "layer 0"],
    );
    refused(&format!("{RACK}{job}layers = [{{ bytes = \"4MB\", froward = \"1s\" }}]\n"), 7, &["fanin trace"]);
    let recorded = "layers = [{ bytes = \"4B\", backward = \"1ms\" }]\noverlap = true\n";
    refused(&format!("{RACK}{job}{recorded}"), 8, &["`forward`", "a recorded step"]);
}

#[test]
fn layers_may_stand_in_a_file_beside_the_scenario() {
    let folder = tempfile::tempdir().expect("a folder");
    let scenario = folder.path().join("scenario.toml");
    let name = scenario.to_str().expect("a name");
    let job = format!("{RACK}[[job]]\nsystem = \"ring\"\nworkers = 2\nlayers = \"step.toml\"\n");
    let error = parse(name, &job).expect_err("no file").to_string();
    assert!(error.contains("step.toml") && error.contains("the scenario's folder"), "{error}");
    std::fs::write(folder.path().join("step.toml"), "[[layer]]\nbytes = \"8B\"\nforward = \"1ms\"\n")
        .expect("written");
    let expected = ok(&job.replace("\"step.toml\"", "[{ bytes = \"8B\", forward = \"1ms\" }]"));
    assert_eq!(parse(name, &job).expect("it is there").jobs[0].workload, expected.jobs[0].workload);
    // One file says all.
    let whole = toml::to_string(&whole(name, &job).expect("it is read")).expect("text");
    assert_eq!(ok(&whole).jobs[0].workload, expected.jobs[0].workload);
    std::fs::write(folder.path().join("step.toml"), "[[layer]]\nbites = \"8B\"\n").expect("written");
    let error = parse(name, &job).expect_err("a mistake").to_string();
    assert!(error.contains("step.toml:2:1") && error.contains("did you mean `bytes`?"), "{error}");
}

#[test]
fn topologies_take_their_own_numbers_and_no_others() {
    refused("[network]\ntopology = \"rack\"\n", 2, &["needs `hosts`"]);
    refused("[network]\ntopology = \"figure9\"\nk = 4\n", 3, &["`k` has no meaning"]);
    refused("[network]\ntopology = \"fat-tree\"\nk = 3\n", 2, &["even"]);
    let hosts = |more: &str| {
        ok(&format!("[network]\ntopology = \"fat-tree\"\nk = 8\n{more}{JOB}")).topology.hosts().count()
    };
    assert_eq!([hosts(""), hosts("hosts = 6\n")], [128, 192]);
    refused("[network]\ntopology = \"rack\"\nhosts = 0\n", 2, &["number of hosts"]);
}

#[test]
fn what_is_no_toml_is_refused_with_its_line() {
    refused("[network\ntopology = 1\n", 1, &[]);
    refused("[network]\ntopology = \"rack\"\nhosts = \"nine\"\n", 3, &["a whole number"]);
}

#[test]
fn static_shares_are_equal_parts_of_the_table_and_bound_the_window() {
    let job = |name: &str, more: &str| {
        format!("[[job]]\nname = \"{name}\"\nsystem = \"atp\"\nworkers = 2\ntensor = \"4MB\"\n{more}")
    };
    let part = "[job.atp]\nhashing = \"partition\"\n";
    let text = format!(
        "{RACK}[switch]\naggregators = 100\n{}{}{}",
        job("a", part),
        job("b", ""),
        job("c", &format!("{part}window = 20\n"))
    );
    let expected =
        [["first: 0 }", "window: 50,"], ["hashing: Hash", "window: 1024,"], ["first: 50 }", "window: 20,"]];
    for (job, expected) in ok(&text).jobs.iter().zip(expected) {
        says(job, &expected);
    }
    refused(&text.replace("= 100", "= 1"), 8, &["no part for each of 2 jobs"]);
}

#[test]
fn a_systems_keys_are_in_its_own_table_and_nowhere_else() {
    let only = "timeouts_only = true\n";
    refused(&format!("{RACK}{JOB}{only}"), 8, &["unknown key `timeouts_only`"]);
    refused(&format!("{RACK}{JOB}[job.atp]\n{only}"), 9, &["unknown key `timeouts_only`"]);
    refused(&format!("{RACK}{JOB}[job.atp]\nhashin = \"linear\"\n"), 9, &["did you mean `hashing`?"]);
    let flat = ["window = 3\n", "hashing = \"linear\"\n", "server = \"h8\"\n"];
    for (key, name) in flat.into_iter().zip(["window", "hashing", "server"]) {
        refused(&format!("{RACK}{JOB}{key}"), 8, &[&format!("`{name}`"), "it stands in the table [job.atp]"]);
    }
    refused(
        &format!("{RACK}{}{only}", JOB.replace("atp", "switchml")),
        8,
        &["`timeouts_only` is a key of switchml alone", "[job.switchml]"],
    );
    let text = format!("{RACK}{}[job.switchml]\n{only}slots = 7\n", JOB.replace("atp", "switchml"));
    says(&ok(&text).jobs[0], &["timeouts_only: true", "slots: 7,"]);
    refused(
        &text.replace("[job.switchml]", "[job.atp]"),
        8,
        &["switchml", "[job.switchml]", "not [job.atp]"],
    );
    let ring = format!("{RACK}{}[job.ring]\nwindow = 7\n", JOB.replace("atp", "ring"));
    refused(&ring, 9, &["unknown key `window`; known: receive_window"]);
    let ps = format!("{RACK}{}[job.ps]\nhashing = \"hash\"\n", JOB.replace("atp", "ps"));
    refused(&ps, 9, &["`hashing` is about aggregators"]);
    refused(&format!("{RACK}{}", JOB.replace("atp", "atpp")), 5, &["unknown system `atpp`", "`atp`"]);
}

#[test]
fn nics_mark_as_switches_do_unless_told_not_to() {
    let threshold = |more: &str| {
        let scenario = ok(&format!("{RACK}ecn = \"100kB\"\n{more}{JOB}"));
        ["h0", "s0"].map(|name| {
            let node = scenario.topology.node(name).expect("a node");
            scenario.topology.get(node).config.queues[0].ecn_threshold_bytes
        })
    };
    assert_eq!(threshold(""), [Some(100_000); 2]);
    assert_eq!(threshold("nic_ecn = false\n"), [None, Some(100_000)]);
}

#[test]
fn hosts_cost_both_ways_what_the_file_says() {
    let costs = "host_packet_cost = \"17.5ns\"\nhost_byte_cost = \"0.076ns\"\nhost_cores = 2\n";
    let configs = |text: &str| {
        let topology = ok(&format!("{RACK}{text}{JOB}")).topology;
        ["h0", "h8", "s0"].map(|name| topology.get(topology.node(name).expect("of the rack")).config)
    };
    let cost = Cost { packet: Time(17_500), byte: Time(76), cores: 2 };
    let [first, last, switch] = configs(costs);
    assert!([first.sends, first.receives, last.sends, last.receives].iter().all(|side| *side == cost));
    assert!([switch.sends, switch.receives].iter().all(|side| *side == Cost::NOTHING));
    assert!(configs("")[..2].iter().all(|host| [host.sends, host.receives] == [Cost::NOTHING; 2]));
    refused(&format!("{RACK}host_cores = 0\n{JOB}"), 4, &["from 1 to 1024 cores"]);
    refused(&format!("{RACK}host_byte_cost = \"76\"\n{JOB}"), 4, &["no time of a core", "17.5ns"]);
    // 131.5 ns for 1514 bytes, which are 1538 on the link.
    let flow = "[[background]]\nfrom = \"h0\"\nto = \"h1\"\nkind = \"constant\"\nrate = ";
    let costs = costs.replace("host_cores = 2\n", "");
    ok(&format!("{RACK}{costs}{flow}\"92Gbit\"\n"));
    refused(&format!("{RACK}{costs}{flow}\"93Gbit\"\n"), 10, &["the sender's cores handle 92.8"]);
}

#[test]
fn queues_and_buffers_that_cannot_be_are_refused() {
    let queue = |keys: &str| format!("{RACK}{JOB}[[queue]]\n{keys}\n");
    refused(&queue("priority = 8"), 9, &["`priority` is from 0 to 7"]);
    refused(&queue("drop_class = 1"), 8, &["both `drop_class` and `drop_above`"]);
    refused(&queue("drop_class = 1\ndrop_above = \"1MB\""), 10, &["drops nothing"]);
    refused(&queue("drop_above = \"1kB\"\ndrop_clas = 1"), 10, &["`drop_clas`", "`drop_class`"]);
    refused(&queue("limit = \"1kB\""), 9, &["not even one packet"]);
    refused(&queue("ecn = \"2MB\""), 8, &["marks nothing"]);
    refused(&format!("{RACK}port_buffer = \"1MB\"\nshared_buffer = \"1MB\"\n{JOB}"), 4, &["either"]);
    refused(&format!("{RACK}shared_buffer = \"1kB\"\n{JOB}"), 4, &["not even one packet"]);
    refused(&format!("{RACK}shared_buffer = \"1MB\"\nalpha = 0.0\n{JOB}"), 5, &["`alpha`"]);
    refused(&format!("{RACK}{JOB}priority = 9\n"), 8, &["`priority` is from 0 to 7"]);
    let ecn = ok(&queue("priority = 3\necn = \"9kB\""));
    let config = ecn.topology.get(ecn.topology.node("s0").expect("a switch")).config;
    assert_eq!([2, 3, 4].map(|queue| config.queues[queue].ecn_threshold_bytes), [None, Some(9000), None]);
}

#[test]
fn losses_are_chances_or_named_packets() {
    let loss = |keys: &str| format!("{RACK}{JOB}[[loss]]\n{keys}\n");
    refused(&loss("only = \"gradiant\""), 9, &["`gradiant`", "did you mean `gradient`?"]);
    refused(&loss("only = \"update\""), 9, &["unknown kind of packet `update`", "of the jobs' systems"]);
    refused(&loss("only = \"gradient\"\nloss = \"1%\""), 10, &["either chances or named"]);
    refused(&loss("nth = [0]"), 9, &["the first packet is 1"]);
    refused(&loss("every = 0"), 9, &["at least 1"]);
    refused(&loss("nth = [1]\nevery = 2"), 9, &["either `nth` or `every`"]);
    refused(&loss("loss_between = \"1%\""), 9, &["needs bursts"]);
}

#[test]
fn queues_of_dlcp_and_pfabric_are_made() {
    let network = |keys: &str| {
        let text = RACK.replace("hosts = 9", &format!("hosts = 9\nqueue = \"500kB\"\n{keys}"));
        let scenario = ok(&format!("{text}{FLOW}"));
        let topology = &scenario.topology;
        let config = |node| topology.get(node).config.queues;
        (config(topology.switches().next().unwrap()), config(topology.hosts().next().unwrap()))
    };
    let (switch, nic) = network("order = \"least-remaining\"");
    assert!(switch.iter().chain(&nic).all(|queue| queue.order == Order::LeastRemaining));
    assert_eq!(switch[3], QueueConfig::least_remaining(500_000));
    let (switch, nic) = network("selective_dropping = { threshold = \"50kB\", step = 0.5 }");
    assert_eq!(switch, QueueConfig::dlcp(500_000, 50_000, 0.5));
    assert!(switch[0].ecn_threshold_bytes.is_none() && !switch[0].drops_unmarkable, "signals");
    assert!(
        switch[0].reserved && switch[1..].iter().chain(&nic).all(|queue| !queue.reserved),
        "signals alone"
    );
    let thresholds: Vec<u64> = switch[1..].iter().map(|queue| queue.ecn_threshold_bytes.unwrap()).collect();
    assert_eq!(thresholds, [50_000, 75_000, 100_000, 125_000, 150_000, 175_000, 200_000]);
    assert!(nic.iter().all(|queue| !queue.drops_unmarkable));
}

#[test]
fn queues_that_cannot_be_are_refused() {
    let refused = |keys: &str, words: &str| {
        let text = RACK.replace("hosts = 9", &format!("hosts = 9\nqueue = \"100kB\"\n{keys}"));
        let message = wrong(&format!("{text}{FLOW}"));
        assert!(message.contains(words), "{keys}: {message}");
    };
    refused("order = \"least-remainin\"", "did you mean `least-remaining`?");
    refused("selective_dropping = { threshold = \"50kB\", step = 0.5 }", "the last queue is 200000 bytes");
    refused("selective_dropping = { threshold = \"5kB\", step = -1.0 }", "not negative");
    refused("selective_dropping = { threshold = \"0B\", step = 1.0 }", "at least one byte");
    refused("ecn = \"9kB\"\nselective_dropping = { threshold = \"5kB\", step = 1.0 }", "no `ecn`");
    refused("selective_dropping = { treshold = \"5kB\", step = 1.0 }", "did you mean `threshold`?");
}
