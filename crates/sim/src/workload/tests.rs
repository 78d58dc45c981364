use super::*;
use crate::scenario_file::parse;

fn play(text: &str) -> Report {
    let scenario = parse("test.toml", text).unwrap_or_else(|error| panic!("{error}"));
    run(&scenario, Options { seed: 1, ..Options::default() }).unwrap_or_else(|error| panic!("{error}"))
}

const RACK: &str = "[network]\ntopology = \"rack\"\nhosts = 5\n";

fn job(system: &str) -> String {
    format!("[[job]]\nsystem = \"{system}\"\nworkers = 4\ntensor = \"200kB\"\ntensors = 6\n")
}

#[test]
fn every_system_sums_in_one_rack() {
    for system in ["atp", "rss", "ps", "ps-n-to-n", "switchml", "ring"] {
        let report = play(&format!("{RACK}{}", job(system)));
        println!("{report:#?}");
        assert!(report.jobs[0].finished, "{system}");
        assert_eq!(report.jobs[0].tensors, 6.0, "{system}");
    }
}
