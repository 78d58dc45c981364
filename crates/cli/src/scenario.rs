//! Scenario files as this command reads them. They may have GOAT's plans of `fanin plan`, which the
//! simulator does not know.

use fanin_plan::{
    GradientSchedule, Job, NodeId, Objective, Residence, SubModel, Workload, krgs, slowest_link,
};
use fanin_sim::net;
use fanin_sim::scenario_file::{FileError, Kind, parse_with};
use fanin_sim::systems::{self, goat};
use fanin_sim::workload::Scenario;

use crate::plan::topology;

/// Reads and checks a scenario. `name` is the file's.
///
/// # Errors
/// The first mistake, with its place.
pub fn parse(name: &str, text: &str) -> Result<Scenario, FileError> {
    let planned = |kind: Kind| if kind.name == GOAT.name { GOAT } else { kind };
    parse_with(&systems::ALL.map(planned), name, text)
}

const GOAT: Kind = Kind { resolve: |entry| goat::resolve_with(entry, &PLANNERS), ..goat::KIND };

/// As `fanin plan --planner` calls them.
const PLANNERS: [goat::Planner; 3] = [
    goat::Planner {
        name: "slowest",
        plan: |asked| plan(asked, |workload| slowest_link(workload, Residence::Step, SEED).schedule),
    },
    goat::Planner {
        name: "krgs",
        plan: |asked| plan(asked, |workload| krgs(workload, Objective::Reduction, SEED).schedule),
    },
    goat::Planner {
        name: "krgs-overhead",
        plan: |asked| plan(asked, |workload| krgs(workload, Objective::Overhead, SEED).schedule),
    },
];

/// A scenario is the same whatever it is played with.
const SEED: u64 = 0;

/// A job has its share of each switch's memory, and a plan of its own.
fn plan(
    asked: &goat::Asked<'_>,
    planner: impl FnOnce(&Workload) -> GradientSchedule,
) -> Result<goat::Nodes, String> {
    let of_file = |node: net::NodeId| NodeId(node.0 as u16);
    let topology = topology(asked.topology, u64::from(asked.aggregators) * asked.packet_bytes)?;
    let sub_models = asked.sub_models.iter().enumerate().map(|(part, packets)| SubModel {
        name: format!("g{part}"),
        bytes: u64::from(*packets) * asked.packet_bytes,
    });
    let job = Job {
        name: "the job".into(),
        workers: asked.workers.iter().map(|worker| of_file(*worker)).collect(),
        servers: vec![of_file(asked.server)],
        sub_models: sub_models.collect(),
    };
    let workload = Workload::new(topology, vec![job]).map_err(|error| error.to_string())?;
    let schedule = planner(&workload);
    let its = &schedule.jobs()[0];
    let node = |rank: usize, part: usize| {
        let node = its.aggregation_nodes(part)[rank];
        (node != its.root(part)).then(|| net::NodeId(node.0.into()))
    };
    let of_worker = |rank| (0..asked.sub_models.len()).map(|part| node(rank, part)).collect();
    Ok((0..asked.workers.len()).map(of_worker).collect())
}

#[cfg(test)]
mod tests {
    use super::parse;
    use fanin_sim::workload::{Options, Report, run};

    /// GOAT's testbed with two workers at each of two switches. Each switch has room for so many
    /// packets.
    fn testbed(aggregators: u32, goat: &str) -> String {
        let mut text = format!(
            "payload = \"sample\"\n[network]\ntopology = \"own\"\nqueue = \"10MB\"\n[switch]\naggregators = {aggregators}\n"
        );
        for switch in ["s1", "s2", "s3"] {
            text += &format!("[[node]]\nkind = \"switch\"\nname = \"{switch}\"\n");
        }
        for (host, switch) in [("w1", "s1"), ("w2", "s1"), ("w3", "s2"), ("w4", "s2"), ("ps", "s3")] {
            text += &format!("[[node]]\nkind = \"host\"\nname = \"{host}\"\n");
            text += &format!("[[link]]\nlink = [\"{host}\", \"{switch}\"]\n");
        }
        for (a, b) in [("s1", "s2"), ("s1", "s3"), ("s2", "s3")] {
            text += &format!("[[link]]\nlink = [\"{a}\", \"{b}\"]\n");
        }
        // 298 packets of 336 elements.
        text + "[[job]]\nsystem = \"goat\"\nworkers = [\"w1\", \"w2\", \"w3\", \"w4\"]\n"
            + "tensor = \"400kB\"\ntensors = 2\nlate = \"1ms\"\n[job.goat]\nserver = \"ps\"\ntimeout = \"50ms\"\n"
            + goat
    }

    fn play(text: &str) -> Report {
        let scenario = parse("test.toml", text).unwrap_or_else(|error| panic!("{error}"));
        run(&scenario, Options { seed: 1, ..Options::default() }).unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn planned_switches_sum_all_however_late_workers_are() {
        for planner in ["slowest", "krgs", "krgs-overhead", "nearest"] {
            let counters =
                play(&testbed(150, &format!("planner = \"{planner}\"\nsub_models = 6\n"))).jobs[0].counters;
            let at_server = counters.server_aggregations.expect("a server");
            assert!(at_server < 2 * 298 * 3, "{planner}: {at_server}");
            assert_eq!(counters.switch_collisions, Some(0), "{planner}");
        }
        let geryon = play(&testbed(150, "planner = \"server\"\nsub_models = 6\n")).jobs[0].counters;
        assert_eq!((geryon.server_aggregations, geryon.switch_aggregations), (Some(2 * 298 * 4), Some(0)));
        // Three links each.
        assert_eq!(geryon.gradient_hop_bytes, geryon.server_bytes.map(|bytes| 3 * bytes));
    }

    #[test]
    fn a_planner_that_is_none_is_answered_with_the_nearest() {
        let refused = |goat: &str| parse("test.toml", &testbed(150, goat)).expect_err("refused").to_string();
        assert!(refused("planner = \"slow\"\n").contains("`slowest`"), "{}", refused("planner = \"slow\"\n"));
        let both = refused("planner = \"krgs\"\nnodes = [\"s1\"]\n");
        assert!(both.contains("either `nodes` or a `planner`"), "{both}");
    }
}
