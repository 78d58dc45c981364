//! Plans from files, and the paper's example packet by packet.

use std::collections::BTreeMap;

use crate::scenario_file::parse;
use crate::workload::{Options, Report, run};

/// The paper's Figure 2(a): S1 and S2 have two workers each, S3 the server, all three are linked,
/// and each has room for so many fragments. The fragments of W2 and W4 come late, as in Figure
/// 2(b). Nobody sends anything twice.
fn figure_2(aggregators: u32, job: &str) -> String {
    let mut text = format!(
        "[network]\ntopology = \"own\"\nrate = \"10Gbit\"\n[switch]\naggregators = {aggregators}\nways = 1\n"
    );
    for switch in ["s1", "s2", "s3"] {
        text += &format!("[[node]]\nkind = \"switch\"\nname = \"{switch}\"\n");
    }
    for (host, switch, late) in [
        ("w1", "s1", ""),
        ("w2", "s1", "delay = \"1ms\"\n"),
        ("w3", "s2", ""),
        ("w4", "s2", "delay = \"1ms\"\n"),
        ("ps", "s3", ""),
    ] {
        text += &format!("[[node]]\nkind = \"host\"\nname = \"{host}\"\n");
        text += &format!("[[link]]\nlink = [\"{host}\", \"{switch}\"]\n{late}");
    }
    for (a, b) in [("s1", "s2"), ("s1", "s3"), ("s2", "s3")] {
        text += &format!("[[link]]\nlink = [\"{a}\", \"{b}\"]\n");
    }
    // Three fragments of 64 elements.
    text + "[[job]]\nworkers = [\"w1\", \"w2\", \"w3\", \"w4\"]\ntensor = \"768B\"\ntensors = 1\nin_flight = 1\n"
        + job
}

fn refused(text: &str) -> String {
    parse("test.toml", text).expect_err("refused").to_string()
}

fn play(text: &str) -> Report {
    let scenario = parse("test.toml", text).unwrap_or_else(|error| panic!("{error}"));
    run(&scenario, Options { seed: 1, ..Options::default() }).unwrap_or_else(|error| panic!("{error}"))
}

/// Counts arrivals at the server, and hops of fragments between switches and to the server. It
/// leaves out those from workers to their switches, and the parameters', which come back over seven
/// links.
fn counts(report: &Report) -> (u64, u64) {
    let counters = &report.jobs[0].counters;
    assert_eq!((counters.packets_sent, counters.retransmissions), (Some(12), Some(0)));
    (counters.server_aggregations.expect("a server"), report.packet_hops - 12 - 3 * 7)
}

#[test]
fn figure_2_with_a_plan_the_server_gets_three_fragments_over_thirteen_hops() {
    let goat = "system = \"goat\"\n[job.goat]\nserver = \"ps\"\nelements = 64\ntimeout = \"100ms\"\nnodes = [\"s1\", \"s2\", \"s3\"]\n";
    assert_eq!(counts(&play(&figure_2(1, goat))), (3, 13));
}

/// A fragment that collided is marked in ATP, and not summed further on (its Figure 7, box 2).
/// GOAT's Figure 2(b) has S3 sum B all the same: 7 and 17.
#[test]
fn figure_2_without_a_plan_atp_sums_the_one_fragment_that_found_room() {
    let atp =
        "system = \"atp\"\n[job.atp]\nserver = \"ps\"\nelements = 64\ntimeout = \"100ms\"\nwindow = 3\n";
    assert_eq!(counts(&play(&figure_2(1, atp))), (9, 19));
    // With room for all three, late workers cost nothing.
    assert_eq!(counts(&play(&figure_2(64, atp))), (3, 9));
}

/// A memory unit as the paper's Figure 2(b) has it: the first fragment has it until its parameters
/// come, and the others pass.
#[derive(Default)]
struct Unit(Option<(char, usize)>);

impl Unit {
    /// The fragment that the switch sends on of so many workers, if `all` are one.
    fn take(&mut self, fragment: char, workers: usize, all: usize) -> Option<(char, usize)> {
        let (held, count) = self.0.get_or_insert((fragment, 0));
        if *held != fragment {
            return Some((fragment, workers));
        }
        *count += workers;
        (*count == all).then_some((fragment, all))
    }
}

/// The figure's own ATP: what collided is summed further on.
#[test]
fn figure_2_as_the_paper_counts_atp_the_server_gets_seven_fragments_over_seventeen_hops() {
    let mut unit = Unit::default();
    let arrivals = ['A', 'B', 'C', 'A', 'B', 'C'];
    let outputs: Vec<_> = arrivals.iter().filter_map(|fragment| unit.take(*fragment, 1, 2)).collect();
    assert_eq!(outputs, [('B', 1), ('C', 1), ('A', 2), ('B', 1), ('C', 1)]);
    // S1's and S2's come to S3 in turn.
    let mut unit = Unit::default();
    let at_server: Vec<_> = outputs
        .iter()
        .flat_map(|output| [*output, *output])
        .filter_map(|(fragment, workers)| unit.take(fragment, workers, 4))
        .collect();
    let mut kinds: BTreeMap<(char, usize), usize> = BTreeMap::new();
    at_server.iter().for_each(|output| *kinds.entry(*output).or_default() += 1);
    assert_eq!(kinds, BTreeMap::from([(('A', 2), 2), (('B', 4), 1), (('C', 1), 4)]));
    assert_eq!((at_server.len(), 2 * outputs.len() + at_server.len()), (7, 17));
}

const LEAF_SPINE: &str = "[network]\ntopology = \"leaf-spine\"\nleaves = 4\nspines = 2\nhosts = 3\n";

fn job(goat: &str) -> String {
    format!("[[job]]\nsystem = \"goat\"\nworkers = 8\ntensor = \"200kB\"\ntensors = 3\n[job.goat]\n{goat}")
}

#[test]
fn without_names_parts_go_to_the_nearest_switches_that_have_room() {
    // 149 packets of 336 elements in six parts. Each switch has room for two of them.
    let report = play(&format!("{LEAF_SPINE}[switch]\naggregators = 60\n{}", job("sub_models = 6\n")));
    let used: Vec<u64> =
        report.switches.iter().map(|switch| switch.aggregations).filter(|count| *count > 0).collect();
    assert!(used.len() >= 3, "{used:?}");
    assert_eq!(report.jobs[0].counters.switch_collisions, Some(0));
    assert_eq!(report.jobs[0].counters.server_aggregations, Some(3 * 149), "each packet once");
    // Without room the server sums.
    let report = play(&format!("{LEAF_SPINE}[switch]\naggregators = 10\n{}", job("sub_models = 6\n")));
    assert_eq!(report.jobs[0].counters.server_aggregations, Some(3 * 149 * 8));
}

#[test]
fn switches_that_cannot_sum_pass_fragments_on_and_a_spine_sums() {
    let report = play(&format!(
        "{LEAF_SPINE}[switch]\nprogrammable = [\"spine1\"]\n{}",
        job(
            "nodes = [\"spine1\", \"server\", [\"spine1\", \"spine1\", \"server\", \"spine1\", \"spine1\", \"spine1\", \"spine1\", \"server\"]]\n"
        )
    ));
    let packets = [149 / 3, 149 * 2 / 3 - 149 / 3, 149 - 149 * 2 / 3];
    let at_server = packets[0] + 8 * packets[1] + 3 * packets[2];
    assert_eq!(report.jobs[0].counters.server_aggregations, Some(3 * at_server));
}

#[test]
fn plans_that_cannot_be_are_refused() {
    for (switch, goat, said) in [
        (
            "aggregators = 60\n",
            "nodes = [\"leaf0\"]\n",
            "leaf0 has 60 aggregators for this job, and its sub-models need 149",
        ),
        ("", "nodes = [\"leaf9\"]\n", "`leaf9` is no programmable switch"),
        ("programmable = [\"leaf0\"]\n", "nodes = [\"leaf1\"]\n", "`leaf1` is no programmable switch"),
        ("", "nodes = [[\"leaf0\"]]\n", "one for each of the 8"),
        ("", "nodes = []\n", "has 1 to 149 parts"),
        ("", "sub_models = 0\n", "has 1 to 149 parts"),
        ("", "sub_models = 2\nnodes = [\"leaf0\"]\n", "`nodes` says who sums 1 sub-models; there are 2"),
    ] {
        let text = format!("{LEAF_SPINE}[switch]\n{switch}{}", job(goat));
        assert!(refused(&text).contains(said), "{}", refused(&text));
    }
}

/// A switch that the plan needs fails with what it had summed, and is back without it.
#[test]
fn a_planned_switch_that_fails_and_comes_back_costs_time_alone() {
    let fault = "[[fault]]\nat = \"20us\"\nkind = \"node-fails\"\nnode = \"leaf0\"\ndown = \"3ms\"\n[[fault]]\nat = \"8ms\"\nkind = \"switch-forgets\"\nnode = \"leaf1\"\n";
    let report = play(&format!("{LEAF_SPINE}{fault}{}", job("sub_models = 6\n")));
    assert!(report.jobs[0].finished);
    assert!(report.jobs[0].counters.retransmissions.expect("workers count") > 0);
}

/// Two jobs have parts of each switch's memory that do not meet.
#[test]
fn jobs_share_the_switches_memory_without_meeting() {
    let report = play(&format!(
        "{LEAF_SPINE}[switch]\naggregators = 300\nways = 1\n{}{}",
        "[[job]]\nsystem = \"goat\"\nworkers = 5\ntensor = \"200kB\"\ntensors = 3\n",
        "[[job]]\nsystem = \"goat\"\nworkers = 5\ntensor = \"200kB\"\ntensors = 3\n[job.goat]\nwindow = 20\n"
    ));
    for job in &report.jobs {
        assert_eq!(job.counters.switch_collisions, Some(0));
        assert_eq!(job.counters.server_aggregations, Some(3 * 149));
    }
}
