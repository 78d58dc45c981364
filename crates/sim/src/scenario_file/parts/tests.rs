use std::time::Duration;

use super::super::tests::{JOB, RACK, ok, refused};
use crate::net::{Buffer, Cost, NodeConfig, NodeId, Time, Topology};
use crate::scenario_file::{parse, whole};
use crate::workload::{Options, run};

fn node(topology: &Topology, name: &str) -> NodeId {
    topology.node(name).unwrap_or_else(|| panic!("no {name}"))
}

fn config(topology: &Topology, name: &str) -> NodeConfig {
    topology.get(node(topology, name)).config
}

/// Rate and delay of the link between two nodes.
fn link(topology: &Topology, a: &str, b: &str) -> (u64, Duration) {
    let link = topology.link_between(node(topology, a), node(topology, b)).expect("a link");
    let config = topology.links()[link.0 as usize].config;
    (config.rate_bps, config.delay)
}

const LEAF_SPINE: &str = "[network]\ntopology = \"leaf-spine\"\nleaves = 2\nspines = 2\nhosts = 5\n";

#[test]
fn single_nodes_and_links_differ_as_the_file_says_and_later_entries_add_to_earlier_ones() {
    let scenario = ok(&format!(
        r#"{LEAF_SPINE}{JOB}
[[node]]
name = "h*"
packet_cost = "10ns"
[[node]]
name = "h1"
byte_cost = "1ns"
cores = 4
queue = "1MB"
ecn = "10kB"
[[node]]
name = "leaf0"
packet_cost = "100ns"
shared_buffer = "2MB"
alpha = 2.0
[[link]]
link = ["spine*", "leaf*"]
rate = "40Gbit"
delay = "5us"
[[link]]
link = ["h2", "leaf0"]
rate = "10Gbit"
queue = "50kB"
ecn = "20kB"
"#
    ));
    let topology = &scenario.topology;
    let cost = |name| [config(topology, name).sends, config(topology, name).receives];
    assert_eq!(cost("h9"), [Cost::of_packet(Time(10_000)); 2]);
    assert_eq!(cost("h1"), [Cost { packet: Time(10_000), byte: Time(1_000), cores: 4 }; 2]);
    assert_eq!(cost("leaf0"), [Cost::NOTHING, Cost::of_packet(Time(100_000))]);
    assert_eq!(cost("leaf1"), [Cost::NOTHING; 2]);
    let nic = config(topology, "h1").queues[3];
    assert_eq!((nic.limit_bytes, nic.ecn_threshold_bytes), (1_000_000, Some(10_000)));
    assert_eq!(config(topology, "leaf0").buffer, Buffer::Shared { bytes: 2_000_000, alpha: 2.0 });
    assert_eq!(config(topology, "leaf1").buffer, Buffer::PerQueue);
    assert_eq!(link(topology, "leaf1", "spine0"), (40_000_000_000, Duration::from_micros(5)));
    assert_eq!(link(topology, "h2", "leaf0"), (10_000_000_000, Duration::from_micros(1)));
    assert_eq!(link(topology, "h3", "leaf0"), (100_000_000_000, Duration::from_micros(1)));
    let queues_of = |link| {
        let [a, b] = crate::net::LinkId::ports(link);
        [a, b].map(|port| topology.port_queues.get(&port).map(|queues| queues[7].limit_bytes))
    };
    let special = topology.link_between(node(topology, "h2"), node(topology, "leaf0")).expect("a link");
    assert_eq!(queues_of(special), [Some(50_000); 2]);
    assert_eq!(topology.port_queues.len(), 2);
}

#[test]
fn names_that_are_none_and_thresholds_that_are_never_reached_are_refused_with_their_line() {
    let with = |entry: &str| format!("{RACK}{JOB}{entry}");
    refused(&with("[[node]]\nname = \"h88\"\n"), 9, &["unknown node `h88`", "`h8`"]);
    refused(&with("[[node]]\nname = \"x*\"\n"), 9, &["unknown node `x*`", "known: s0, h0"]);
    refused(&with("[[link]]\nlink = [\"h1\", \"s1\"]\n"), 9, &["unknown node `s1`", "known: s0"]);
    refused(&with("[[link]]\nlink = [\"h1\", \"h*\"]\n"), 9, &["no link between h1 and h*"]);
    refused(&with("[[node]]\nname = \"h1\"\nkind = \"host\"\n"), 10, &["has its nodes already", "own"]);
    refused(&with("[[node]]\nname = \"h1\"\ncount = 2\n"), 10, &["`count`"]);
    refused(&with("[[node]]\nname = \"s0\"\nqueue = \"1kB\"\n"), 10, &["not even one packet"]);
    refused(&with("[[node]]\nname = \"s0\"\necn = \"1MB\"\n"), 8, &["1000000 bytes never reaches"]);
    refused(
        &with("[[link]]\nlink = [\"h1\", \"s0\"]\nqueue = \"2kB\"\necn = \"2kB\"\n"),
        8,
        &["never reaches"],
    );
    refused(&with("[[node]]\nname = \"h1\"\ncores = 0\n"), 10, &["from 1 to 1024 cores"]);
    refused(&with("[[link]]\nlink = [\"h1\", \"s0\"]\nspeed = \"1Gbit\"\n"), 10, &["unknown key `speed`"]);
}

const OWN: &str = r#"[network]
topology = "own"
rate = "10Gbit"
core_rate = "40Gbit"
[[node]]
name = "left"
kind = "switch"
[[node]]
name = "root"
kind = "switch"
layer = 1
[[node]]
name = "l"
kind = "host"
count = 3
[[node]]
name = "server"
kind = "host"
packet_cost = "5ns"
[[link]]
link = ["l*", "left"]
[[link]]
link = ["left", "root"]
[[link]]
link = ["server", "root"]
rate = "100Gbit"
"#;

#[test]
fn an_own_topology_is_its_nodes_and_links_and_jobs_run_on_it() {
    let job = "[[job]]\nsystem = \"atp\"\nworkers = [\"l0\", \"l1\", \"l2\"]\ntensor = \"100kB\"\ntensors = 3\n[job.atp]\nserver = \"server\"\n";
    let scenario = ok(&format!("{OWN}{job}"));
    let topology = &scenario.topology;
    let names: Vec<&str> = topology.nodes().iter().map(|node| node.name.as_str()).collect();
    assert_eq!(names, ["left", "root", "l0", "l1", "l2", "server"]);
    assert_eq!(topology.links().len(), 5);
    assert_eq!(topology.layer(node(topology, "root")), Some(1));
    assert_eq!(link(topology, "l2", "left").0, 10_000_000_000);
    assert_eq!(link(topology, "root", "left").0, 40_000_000_000);
    assert_eq!(link(topology, "root", "server").0, 100_000_000_000);
    assert_eq!(config(topology, "server").sends, Cost::of_packet(Time(5_000)));
    let report = run(&scenario, Options::default()).expect("right sums");
    assert!(report.jobs[0].finished);
    assert_eq!(report.jobs[0].counters.retransmissions, Some(0));
}

/// A scenario in a folder of its own, and nodes and links beside it; removed when it is dropped.
struct Beside(tempfile::TempDir);

impl Beside {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    /// The scenario's name, after the file beside it was written.
    fn scenario(&self, nodes: &str) -> String {
        std::fs::write(self.0.path().join("rack.toml"), nodes).expect("a file");
        self.0.path().join("scenario.toml").display().to_string()
    }
}

const NAMES_IT: &str =
    "[network]\ntopology = \"own\"\nfile = \"rack.toml\"\nrate = \"10Gbit\"\ncore_rate = \"40Gbit\"\n";

fn own_entries() -> &'static str {
    &OWN[OWN.find("[[node]]").expect("a node")..]
}

#[test]
fn nodes_and_links_in_a_file_of_their_own_are_those_of_the_scenario() {
    let beside = Beside::new();
    let job = "[[job]]\nsystem = \"atp\"\nworkers = [\"l0\", \"l1\", \"l2\"]\ntensor = \"100kB\"\ntensors = 3\n[job.atp]\nserver = \"server\"\n";
    let name = beside.scenario(own_entries());
    let digest = |scenario| run(&scenario, Options::default()).expect("right sums").digest;
    let there = parse(&name, &format!("{NAMES_IT}{job}")).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(digest(there), digest(ok(&format!("{OWN}{job}"))));
    // The scenario's own come after them, and change them.
    let slow = "[[link]]\nlink = [\"l2\", \"left\"]\nrate = \"1Gbit\"\n";
    let there = parse(&name, &format!("{NAMES_IT}{slow}{job}")).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(link(&there.topology, "l2", "left").0, 1_000_000_000);
    assert_eq!(link(&there.topology, "l1", "left").0, 10_000_000_000);
    let whole = whole(&name, &format!("{NAMES_IT}{slow}{job}")).expect("a table");
    let whole = toml::to_string(&whole).expect("TOML");
    assert!(!whole.contains("rack.toml"));
    assert_eq!(digest(ok(&whole)), digest(there));
}

#[test]
fn mistakes_in_a_file_of_nodes_and_links_are_named_with_it_its_line_and_the_nearest_name() {
    let beside = Beside::new();
    let refused = |scenario: &str, nodes: &str, file: &str, words: &[&str]| {
        let name = beside.scenario(nodes);
        let Err(error) = parse(&name, scenario) else { panic!("this was taken: {nodes}") };
        let error = error.to_string();
        let begin = format!("{}{file}", beside.0.path().join("").display());
        assert!(error.starts_with(&begin), "{error}");
        words.iter().for_each(|word| assert!(error.contains(word), "{word} in {error}"));
    };
    let scenario = format!("{NAMES_IT}{JOB}");
    let entry = |more: &str| format!("{}{more}", own_entries());
    let lines = own_entries().lines().count();
    let at = |line: usize, column: usize| format!("rack.toml:{}:{column}: ", lines + line);
    refused(
        &scenario,
        &entry("[[link]]\nlink = [\"lft\", \"root\"]\n"),
        &at(2, 8),
        &["unknown node `lft`; did you mean `left`?", "| link = [\"lft\", \"root\"]"],
    );
    refused(&scenario, &entry("[[node]]\nnmae = \"x\"\n"), &at(2, 1), &["unknown key `nmae`", "`name`"]);
    refused(&scenario, &entry("[[job]]\n"), &at(1, 3), &["unknown key `job`; known: node, link"]);
    refused(&scenario, "[[node]\n", "rack.toml:1:", &[]);
    refused(
        &format!("{scenario}[[node]]\nname = \"lft\"\n"),
        own_entries(),
        "scenario.toml:11:8: ",
        &["`left`"],
    );
    let lost = scenario.replace("rack.toml", "rak.toml");
    refused(&lost, "", "scenario.toml:3:8: ", &["cannot read", "rak.toml", "from the scenario's folder"]);
}

#[test]
fn an_own_topology_that_cannot_be_is_refused() {
    refused(&format!("[network]\ntopology = \"own\"\n{JOB}"), 2, &["[[node]]", "no host"]);
    let with = |more: &str| format!("{OWN}{more}{JOB}");
    refused(&with("[[node]]\nname = \"gone\"\nkind = \"host\"\n"), 2, &["no way from l0 to gone"]);
    refused(&with("[[node]]\nname = \"l1\"\nkind = \"host\"\n"), 28, &["two nodes are called l1"]);
    refused(&with("[[node]]\nname = \"l*\"\nkind = \"host\"\n"), 28, &["no `*`"]);
    refused(&with("[[node]]\nname = \"m\"\nkind = \"host\"\nlayer = 1\n"), 30, &["no layer"]);
    refused(&with("[[link]]\nlink = [\"root\", \"root\"]\n"), 28, &["joins two nodes"]);
    // Hosts forward nothing.
    let over_a_host = "[[node]]\nname = \"far\"\nkind = \"host\"\n[[link]]\nlink = [\"far\", \"server\"]\n";
    refused(&with(over_a_host), 2, &["no way from l0 to far"]);
}

#[test]
fn flows_that_follow_each_other_need_a_size_and_are_tcp() {
    let flow = |more: &str| format!("{RACK}[[background]]\nfrom = \"h0\"\nto = \"h1\"\n{more}");
    let plan = ok(&flow("kind = \"tcp\"\nsize = \"10kB\"\ncount = 3\nevery = \"1ms\"\n")).background[0];
    assert_eq!((plan.size, plan.count, plan.every), (Some(10_000), 3, Duration::from_millis(1)));
    refused(&flow("kind = \"constant\"\nrate = \"1Gbit\"\nsize = \"1kB\"\n"), 9, &["`size` is of tcp"]);
    refused(&flow("kind = \"tcp\"\nsize = \"0B\"\n"), 8, &["at least one byte"]);
    refused(&flow("kind = \"tcp\"\ncount = 3\n"), 8, &["need a `size`"]);
    refused(&flow("kind = \"tcp\"\nsize = \"1kB\"\ncount = 3\n"), 9, &["needs `every`"]);
    refused(&flow("kind = \"tcp\"\nsize = \"1kB\"\nevery = \"1ms\"\n"), 9, &["needs `count`"]);
    refused(&flow("kind = \"tcp\"\nsize = \"1kB\"\ncount = 0\nevery = \"1ms\"\n"), 9, &["from 1 to"]);
}

#[test]
fn one_slow_nic_slows_the_job_that_it_is_in() {
    let gbps = |more: &str| {
        let job = "[[job]]\nsystem = \"atp\"\nworkers = 4\ntensor = \"400kB\"\ntensors = 10\n";
        let scenario = ok(&format!("{RACK}{job}{more}"));
        run(&scenario, Options::default()).expect("right sums").jobs[0].aggregation_gbps
    };
    let (all_alike, one_slow) = (gbps(""), gbps("[[link]]\nlink = [\"h2\", \"s0\"]\nrate = \"25Gbit\"\n"));
    assert!((3.5..4.2).contains(&(all_alike / one_slow)), "{all_alike} and {one_slow} Gbit/s");
}
