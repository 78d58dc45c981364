use super::*;
use crate::scenario_file::parse;

fn try_to_play(text: &str) -> Result<Report, RunError> {
    let scenario = parse("test.toml", text).unwrap_or_else(|error| panic!("{error}"));
    run(&scenario, Options { seed: 1, ..Options::default() })
}

fn play(text: &str) -> Report {
    try_to_play(text).unwrap_or_else(|error| panic!("{error}"))
}

const RACK: &str = "[network]\ntopology = \"rack\"\nhosts = 5\n";

fn job(system: &str) -> String {
    format!("[[job]]\nsystem = \"{system}\"\nworkers = 4\ntensor = \"200kB\"\ntensors = 6\n")
}

#[test]
fn every_system_sums_in_one_rack() {
    for system in ["atp", "rss", "ps", "ps-n-to-n", "switchml", "ring"] {
        for dtype in ["float32", "int32"] {
            let report = play(&format!("{RACK}{}dtype = \"{dtype}\"\n", job(system)));
            let job = &report.jobs[0];
            assert!(job.finished, "{system}");
            assert_eq!(job.tensors, 6.0, "{system}");
            // 100 Gbit/s, of which headers and framing take 6 to 9 %; a server alone has it all from everybody.
            let least = if system == "ps" { 10.0 } else { 25.0 };
            assert!((least..94.0).contains(&job.aggregation_gbps), "{system}: {}", job.aggregation_gbps);
        }
    }
}

#[test]
fn every_system_sums_over_racks_and_losses() {
    let network = "[network]\ntopology = \"leaf-spine\"\nleaves = 3\nspines = 2\nhosts = 2\nrouting = \"packet\"\n[[loss]]\nloss = \"1%\"\nduplication = \"1%\"\n";
    for system in ["atp", "rss", "ps", "ps-n-to-n", "ring"] {
        let report = play(&format!("{network}{}", job(system)));
        assert!(report.jobs[0].finished, "{system}");
        assert!(report.drops.iter().any(|drop| drop.name == "loss"), "{system}");
    }
}

/// ATP §5.2.2: "PS with RSS receives 3X more traffic than PS with ATP".
#[test]
fn a_rack_scale_service_sends_its_server_three_times_as_much() {
    let received = |system: &str| {
        let job = format!(
            "[[job]]\nsystem = \"{system}\"\nworkers = 6\nserver = \"ps\"\ntensor = \"400kB\"\ntensors = 5\nwindow = 32\n"
        );
        play(&format!("[network]\ntopology = \"figure9\"\n{job}")).servers[0].received_bytes as f64
    };
    let times = received("rss") / received("atp");
    assert!((2.8..3.2).contains(&times), "{times}");
}

#[test]
fn without_aggregators_everything_is_summed_at_the_server() {
    let report = play(&format!("{RACK}[switch]\naggregators = 0\n{}", job("atp")));
    let fragments = 6 * 50_000u64.div_ceil(336);
    assert_eq!(report.jobs[0].switch_aggregations, 0);
    assert!(report.jobs[0].server_aggregations >= 4 * fragments);
}

#[test]
fn a_table_smaller_than_one_window_loses_nothing() {
    let report = play(&format!("{RACK}[switch]\naggregators = 7\n{}", job("atp")));
    assert!(report.jobs[0].finished);
    assert!(report.jobs[0].switch_collisions > 0);
    assert!(report.switches[0].in_use_max <= 7);
}

#[test]
fn large_values_are_summed_from_their_originals() {
    let report = play(&format!("{RACK}{}large_values = \"5%\"\n", job("atp")));
    assert!(report.jobs[0].overflows > 0);
    assert_eq!(play(&format!("{RACK}{}", job("atp"))).jobs[0].overflows, 0);
}

#[test]
fn training_computes_and_communicates_at_once() {
    let training = |rate: &str| {
        play(&format!(
            "[network]\ntopology = \"rack\"\nhosts = 3\nrate = \"{rate}\"\n[[job]]\nsystem = \"atp\"\nworkers = 2\nmodel = \"resnet50\"\nbatch = 32\niterations = 4\nscale = 100\njitter = \"1%\"\n"
        ))
    };
    let report = training("100Gbit");
    let trained = report.jobs[0].training.as_ref().expect("it trains");
    assert_eq!(trained.iterations, 4);
    // 4.09 giga multiply-adds an image, three passes, 10 TFLOP/s: the network hides behind the computing.
    let alone = 1e13 / (4.09e9 * 6.0);
    assert!((0.9..1.01).contains(&(trained.samples_per_s / alone)), "{}", trained.samples_per_s);
    // 102 MB up and down 5 Gbit/s take 0.18 s at least, and the computing 0.08 s.
    let slow = training("5Gbit");
    let slow = slow.jobs[0].training.as_ref().expect("it trains").samples_per_s;
    assert!(slow < 32.0 / 0.16, "{slow}");
    assert!(slow > 32.0 / 0.35, "{slow}");
}

#[test]
fn a_pause_leaves_the_switch_to_others() {
    let report = play(
        "interval = \"1ms\"\n[network]\ntopology = \"rack\"\nhosts = 3\n[[job]]\nsystem = \"atp\"\nworkers = 2\nmodel = \"alexnet\"\niterations = 4\nscale = 1000\npause_every = 2\npause = \"5ms\"\n",
    );
    let quiet = report.jobs[0].series.switch_aggregations.split(|count| *count > 0).map(<[u64]>::len).max();
    assert!(quiet >= Some(4), "{:?}", report.jobs[0].series.switch_aggregations);
}

#[test]
fn background_flows_and_jobs_share_a_link() {
    let report = play(
        "until = \"20ms\"\ninterval = \"1ms\"\n[network]\ntopology = \"rack\"\nhosts = 4\nrate = \"10Gbit\"\necn = \"50kB\"\n[[job]]\nsystem = \"atp\"\nworkers = 2\ntensor = \"100kB\"\nstart = \"5ms\"\n[[background]]\nfrom = \"h0\"\nto = \"h2\"\nkind = \"constant\"\nrate = \"4Gbit\"\n",
    );
    let flow = &report.background[0].delivered_gbps;
    assert!(flow[2] > 3.5 && flow[2] < 4.0, "{flow:?}");
    assert!(report.jobs[0].aggregation_gbps > 2.0, "{}", report.jobs[0].aggregation_gbps);
}

#[test]
fn faults_leave_every_sum_right() {
    let faults = r#"
[[fault]]
at = "30us"
kind = "switch-forgets"
node = "s0"
[[fault]]
at = "60us"
kind = "worker-respawns"
job = "job0"
rank = 1
down = "1ms"
[[fault]]
at = "3ms"
kind = "server-restarts"
job = "job0"
down = "1ms"
[[fault]]
at = "6ms"
kind = "node-fails"
node = "s0"
down = "1ms"
[[fault]]
at = "8ms"
kind = "link-fails"
link = ["h2", "s0"]
down = "1ms"
"#;
    let job = job("atp").replace("tensors = 6", "tensors = 200");
    let report = play(&format!("{RACK}{job}{faults}"));
    assert!(report.jobs[0].finished);
    assert!(report.ended_s > 0.009, "all faults happened");
    assert!(report.jobs[0].retransmissions > 0);
}

#[test]
fn a_job_that_dies_leaves_its_aggregators_to_others_in_time() {
    let report = play(&format!(
        "[network]\ntopology = \"rack\"\nhosts = 8\n[switch]\naggregators = 30\nstale = \"1ms\"\n{}{}[[fault]]\nat = \"20us\"\nkind = \"job-dies\"\njob = \"job0\"\n",
        "[[job]]\nsystem = \"atp\"\nworkers = 4\ntensor = \"4MB\"\n",
        "[[job]]\nsystem = \"atp\"\nworkers = 2\ntensor = \"4MB\"\ntensors = 10\n",
    ));
    assert!(!report.jobs[0].finished);
    assert!(report.jobs[1].finished);
    assert!(report.switches[0].freed_stale > 0);
}

#[test]
fn a_job_that_cannot_go_on_is_a_violation_and_not_a_silence() {
    let text = format!(
        "until = \"5s\"\nstall = \"100ms\"\n{RACK}{}[[fault]]\nat = \"20us\"\nkind = \"link-fails\"\nlink = [\"h0\", \"s0\"]\ndown = \"4s\"\n",
        job("atp")
    );
    match try_to_play(&text) {
        Err(RunError::Violation(Violation::Stalled { job, .. }, at)) => {
            assert_eq!(job, "job0");
            assert!(at.as_secs_f64() < 0.2, "{at}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_same_seed_gives_the_same_report_and_another_seed_another() {
    let text = format!("{RACK}[[loss]]\nloss = \"1%\"\n{}", job("atp"));
    let scenario = parse("test.toml", &text).unwrap_or_else(|error| panic!("{error}"));
    let with =
        |seed| run(&scenario, Options { seed, ..Options::default() }).map_err(|error| error.to_string());
    assert_eq!(with(5), with(5));
    assert_ne!(with(5).map(|report| report.digest), with(6).map(|report| report.digest));
}
