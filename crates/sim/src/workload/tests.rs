use std::time::Duration;

use super::*;
use crate::scenario_file::{Kind, parse};

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
    for Kind { name: system, .. } in crate::systems::ALL {
        for dtype in ["float32", "int32"] {
            let report = play(&format!("{RACK}{}dtype = \"{dtype}\"\n", job(system)));
            let job = &report.jobs[0];
            assert!(job.finished, "{system}");
            assert_eq!(job.tensors, 6.0, "{system}");
            // Headers and framing take 6 to 9 % of 100 Gbit/s. With a single server, which gets
            // everything from everybody, a quarter is the most.
            let least = if ["ps", "dlcp"].contains(&system) { 10.0 } else { 25.0 };
            assert!((least..94.0).contains(&job.aggregation_gbps), "{system}: {}", job.aggregation_gbps);
        }
    }
}

#[test]
fn every_system_sums_over_racks_and_losses() {
    let network = "[network]\ntopology = \"leaf-spine\"\nleaves = 3\nspines = 2\nhosts = 2\nrouting = \"packet\"\n[[loss]]\nloss = \"1%\"\nduplication = \"1%\"\n";
    for Kind { name: system, .. } in crate::systems::ALL {
        let report = play(&format!("{network}{}", job(system)));
        assert!(report.jobs[0].finished, "{system}");
        assert!(report.drops.iter().any(|drop| drop.name == "loss"), "{system}");
    }
}

/// The report of a scenario's run, and every transmission of every packet: when, from whom to whom,
/// how many bytes, marked or not.
fn played_and_traced(text: &str) -> (Report, String) {
    #[derive(Clone, Default)]
    struct Shared(std::rc::Rc<std::cell::RefCell<Vec<u8>>>);
    impl std::io::Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.borrow_mut().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let trace = Shared::default();
    let scenario = parse("test.toml", text).unwrap_or_else(|error| panic!("{error}"));
    let options = Options { seed: 1, trace: Some(Box::new(trace.clone())), ..Options::default() };
    let report = run(&scenario, options).unwrap_or_else(|error| panic!("{error}"));
    let log = String::from_utf8(trace.0.take()).expect("JSON");
    (report, log)
}

#[test]
fn a_sample_of_the_payload_takes_the_same_decisions_at_the_same_times() {
    let network = "until = \"2s\"\n[network]\ntopology = \"leaf-spine\"\nleaves = 4\nspines = 2\nhosts = 6\nqueue = \"80kB\"\necn = \"20kB\"\nhost_packet_cost = \"17.5ns\"\nhost_byte_cost = \"0.076ns\"\n[switch]\naggregators = 150\n[[loss]]\nloss = \"0.2%\"\nduplication = \"0.1%\"\n";
    let atp = "[[job]]\nsystem = \"atp\"\nworkers = 7\ntensor = \"200kB\"\ntensors = 3\n";
    let switchml = "[[job]]\nsystem = \"switchml\"\nworkers = 7\ntensors = 3\n";
    let jobs = [
        // Tensors that travel as blocks, short ones that travel in their own type, and racks.
        format!("{switchml}tensor = \"200kB\"\n[[job]]\nsystem = \"switchml\"\nworkers = 5\ntensor = \"10kB\"\ntensors = 9\n[job.switchml]\nelements = 64\nslots = 30\n"),
        format!("{switchml}tensor = \"100kB\"\ndtype = \"int32\"\n[[job]]\nsystem = \"switchml\"\nworkers = 4\nmodel = \"resnet50\"\nscale = 1000\niterations = 2\n[job.switchml]\ntimeouts_only = true\n"),
        format!("{atp}[job.atp]\nscaling = \"dynamic\"\n[[job]]\nsystem = \"atp\"\nworkers = 5\ntensor = \"100kB\"\ntensors = 4\n[job.atp]\nelements = 64\n"),
        format!("{atp}dtype = \"int32\"\n[[job]]\nsystem = \"ring\"\nworkers = 4\ntensor = \"100kB\"\ntensors = 3\n"),
        "[[job]]\nsystem = \"ps-n-to-n\"\nworkers = 4\nmodel = \"resnet50\"\nscale = 1000\niterations = 2\njitter = \"5%\"\n".to_string(),
        "[[job]]\nsystem = \"rss\"\nworkers = 7\ntensor = \"100kB\"\ntensors = 3\n[[job]]\nsystem = \"ps\"\nworkers = 5\ntensor = \"100kB\"\ntensors = 3\n".to_string(),
        format!("{atp}[[fault]]\nat = \"20us\"\nkind = \"worker-respawns\"\njob = \"job0\"\nrank = 2\ndown = \"3ms\"\n"),
    ];
    for jobs in jobs {
        let (full, all) = played_and_traced(&format!("{network}{jobs}"));
        let (sample, same) = played_and_traced(&format!("payload = \"sample\"\n{network}{jobs}"));
        let differs = all.lines().zip(same.lines()).find(|(one, other)| one != other);
        assert_eq!(differs, None, "{jobs}");
        assert_eq!(all.len(), same.len(), "{jobs}");
        assert!(full.packet_hops > 1000 && !full.drops.is_empty(), "{:?}", full.drops);
        // The digest is over the beginnings of packets too, and a tensor's length is there.
        let report = |report: Report| format!("{:?}", Report { digest: String::new(), ..report });
        assert_eq!(report(sample), report(full), "{jobs}");
    }
}

/// A job's hash sends no two of its fragments to one aggregator. A fragment that met another would
/// do so in all racks at once, and come to the server from every worker.
#[test]
fn a_job_over_eight_racks_takes_little_longer_than_its_bytes_on_one_link() {
    let network = "payload = \"sample\"\n[network]\ntopology = \"leaf-spine\"\nleaves = 9\nspines = 8\nhosts = 8\ncore_rate = \"400Gbit\"\necn = \"100kB\"\n";
    let report = play(&format!(
        "{network}[[job]]\nsystem = \"atp\"\nworkers = 64\ntensor = \"2MB\"\ntensors = 1\nin_flight = 1\n"
    ));
    assert_eq!((report.jobs[0].counters.switch_collisions, report.drops.len()), (Some(0), 0));
    // 1,344 of the 1,482 bytes of a packet on a link of 100 Gbit/s are elements.
    let ideal = 2e6 * 8.0 / 100e9 * 1482.0 / 1344.0;
    let took = report.jobs[0].finished_s.expect("it has finished");
    assert!(took < 1.2 * ideal, "{took} s, and {ideal} on a link that is never idle");
}

#[test]
fn a_sample_that_would_decide_otherwise_is_refused() {
    let refused = |job: &str| {
        let text = format!("payload = \"sample\"\n{RACK}{job}");
        parse("test.toml", &text).expect_err("refused").to_string()
    };
    assert!(
        refused(&format!("{}large_values = \"5%\"\n", job("atp"))).contains("most overflows would be in")
    );
}

/// A resend of every worker is 140 kB at the server's port. With one timeout for all, the port
/// drops the same ones for ever.
#[test]
fn a_queue_that_is_too_short_for_one_packet_of_each_worker_delays_and_does_not_stop() {
    let network =
        "[network]\ntopology = \"leaf-spine\"\nleaves = 5\nspines = 2\nhosts = 32\nqueue = \"60kB\"\n";
    let switch = "[switch]\nprogrammable = [0]\n";
    let report = play(&format!(
        "until = \"2s\"\n{network}{switch}[[job]]\nsystem = \"atp\"\nworkers = 96\ntensor = \"100kB\"\ntensors = 2\n"
    ));
    assert!(report.jobs[0].finished, "{:?}", report.drops);
    assert!(report.drops.iter().any(|drop| drop.name == "tail"));
}

/// ATP §5.2.2: "PS with RSS receives 3X more traffic than PS with ATP".
#[test]
fn a_rack_scale_service_sends_its_server_three_times_as_much() {
    let received = |system: &str| {
        let job = format!(
            "[[job]]\nsystem = \"{system}\"\nworkers = 6\ntensor = \"400kB\"\ntensors = 5\n[job.{system}]\nserver = \"ps\"\nwindow = 32\n"
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
    assert_eq!(report.jobs[0].counters.switch_aggregations, Some(0));
    assert!(report.jobs[0].counters.server_aggregations >= Some(4 * fragments));
}

#[test]
fn a_table_smaller_than_one_window_loses_nothing() {
    let report = play(&format!("{RACK}[switch]\naggregators = 7\n{}", job("atp")));
    assert!(report.jobs[0].finished);
    assert!(report.jobs[0].counters.switch_collisions > Some(0));
    assert!(report.switches[0].in_use_max <= 7);
}

#[test]
fn large_values_are_summed_from_their_originals() {
    let report = play(&format!("{RACK}{}large_values = \"5%\"\n", job("atp")));
    assert!(report.jobs[0].counters.overflows > Some(0));
    assert_eq!(play(&format!("{RACK}{}", job("atp"))).jobs[0].counters.overflows, Some(0));
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
    // 4.09 giga multiply-adds an image, three passes, 10 TFLOP/s: the network hides behind the
    // computing.
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
    let series = report.jobs[0].series.switch_aggregations.as_ref().expect("switches count");
    let quiet = series.split(|count| *count > 0).map(<[u64]>::len).max();
    assert!(quiet >= Some(4), "{series:?}");
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
    assert!(report.jobs[0].counters.retransmissions > Some(0));
}

/// When it comes to its `stop`, some workers have submitted a tensor that others have not, or one
/// is away.
#[test]
fn a_job_that_stops_finishes_what_any_worker_has_begun() {
    let stopped = |workload: &str, more: &str| {
        let job = format!("[[job]]\nsystem = \"atp\"\nworkers = 4\n{workload}");
        let report = play(&format!("until = \"1s\"\n{RACK}{job}{more}"));
        assert!(report.jobs[0].finished, "{workload}{more}: {:?}", report.jobs[0].unfinished);
    };
    let respawn =
        "[[fault]]\nat = \"60us\"\nkind = \"worker-respawns\"\njob = \"job0\"\nrank = 1\ndown = \"2ms\"\n";
    stopped("tensor = \"4MB\"\nin_flight = 1\nstop = \"50us\"\n", respawn);
    for stop in [100, 200, 300, 400] {
        let loss = "[[loss]]\nloss = \"3%\"\n";
        stopped(&format!("tensor = \"4kB\"\nstop = \"{stop}us\"\n"), loss);
        stopped(
            &format!("model = \"alexnet\"\nscale = 10000\njitter = \"50%\"\nstop = \"{stop}us\"\n"),
            loss,
        );
    }
}

/// Two outages of one thing overlap: the first one's end is not the second one's.
#[test]
fn what_fails_twice_is_back_when_the_last_outage_ends() {
    for what in [
        "kind = \"link-fails\"\nlink = [\"h0\", \"s0\"]",
        "kind = \"node-fails\"\nnode = \"s0\"",
        "kind = \"node-fails\"\nnode = \"h1\"",
        "kind = \"server-restarts\"\njob = \"job0\"",
    ] {
        let fault = |at: &str, down: &str| format!("[[fault]]\nat = \"{at}\"\n{what}\ndown = \"{down}\"\n");
        let job = job("atp").replace("tensors = 6", "tensors = 100");
        let report = play(&format!(
            "interval = \"1ms\"\n{RACK}{job}{}{}",
            fault("500us", "2ms"),
            fault("1500us", "8ms")
        ));
        assert!(report.jobs[0].finished && report.ended_s > 0.0095, "{what}: {}", report.ended_s);
        let throughput = &report.jobs[0].series.aggregation_gbps;
        assert!(
            throughput[0] > 1.0 && throughput[2..9].iter().all(|gbps| *gbps == 0.0),
            "{what}: {throughput:?}"
        );
    }
}

#[test]
fn a_job_that_dies_leaves_its_aggregators_to_others_in_time() {
    let report = play(&format!(
        "[network]\ntopology = \"rack\"\nhosts = 8\n[switch]\naggregators = 30\nstale = \"1ms\"\n{}{}[[fault]]\nat = \"20us\"\nkind = \"job-dies\"\njob = \"job0\"\n",
        "[[job]]\nsystem = \"atp\"\nworkers = 4\ntensor = \"4MB\"\n",
        "[[job]]\nsystem = \"atp\"\nworkers = 2\ntensor = \"4MB\"\ntensors = 10\n",
    ));
    assert!(!report.jobs[0].finished);
    assert_eq!((report.jobs[0].finished_s, report.jobs[0].died_s), (None, Some(20e-6)));
    assert!(report.jobs[1].finished);
    assert_eq!(report.jobs[1].died_s, None);
    assert!(report.jobs[1].finished_s < Some(report.ended_s));
    assert!(report.switches[0].freed_stale > Some(0));
}

/// Two switches aggregate for a job, and one forgets; the other's counts hide that its are smaller.
#[test]
fn what_was_counted_before_a_machine_lost_its_memory_is_counted_once() {
    let job = "[[job]]\nsystem = \"atp\"\nworkers = 6\ntensor = \"200kB\"\ntensors = 40\nlarge_values = \"5%\"\n[job.atp]\nserver = \"ps\"\n";
    let played = |more: &str| {
        play(&format!(
            "interval = \"50us\"\n[network]\ntopology = \"figure9\"\n[switch]\naggregators = 700\n{job}{more}"
        ))
    };
    let fault = |at: &str, kind: &str| format!("[[fault]]\nat = \"{at}\"\nkind = \"{kind}\"\n");
    // A fault in the middle: nearly nothing is done less often for it (switches add nothing that is
    // sent again), some more often.
    let whole = played("");
    for fault in [
        fault("350us", "switch-forgets\"\nnode = \"sw0"),
        fault("350us", "server-restarts\"\njob = \"job0\"\ndown = \"24us"),
        fault("350us", "worker-respawns\"\njob = \"job0\"\nrank = 3\ndown = \"24us"),
    ] {
        let report = played(&fault);
        let counted = |report: &Report| {
            let counters = report.jobs[0].counters;
            let counts = [counters.switch_aggregations, counters.packets_sent, counters.server_aggregations];
            counts.map(|count| count.expect("ATP counts"))
        };
        for (count, whole) in counted(&report).into_iter().zip(counted(&whole)) {
            assert!((whole * 94 / 100..whole * 2).contains(&count), "{fault}: {count} beside {whole}");
        }
        let counters = report.jobs[0].counters;
        let (series, switches) = (&report.jobs[0].series, &report.switches);
        let sum = |counts: &Option<Vec<u64>>| counts.as_ref().map(|counts| counts.iter().sum::<u64>());
        assert_eq!(sum(&series.switch_aggregations), counters.switch_aggregations);
        assert_eq!(sum(&series.server_aggregations), counters.server_aggregations);
        let at_switches = switches.iter().map(|switch| switch.aggregations).sum::<u64>();
        assert_eq!(Some(at_switches), counters.switch_aggregations);
        let collisions = switches.iter().map(|switch| switch.collisions).sum::<Option<u64>>();
        assert_eq!(collisions, counters.switch_collisions);
    }
}

#[test]
fn what_a_system_does_not_count_is_no_zero() {
    let counters = |system: &str| {
        let loss = "[[loss]]\nloss = \"1%\"\n";
        play(&format!("{RACK}{}{loss}", job(system))).jobs[0].counters
    };
    let ring = counters("ring");
    assert_eq!((ring.switch_aggregations, ring.server_aggregations, ring.overflows), (None, None, None));
    assert!(ring.retransmissions > Some(0) && ring.packets_sent > ring.retransmissions, "{ring:?}");
    let switchml = counters("switchml");
    assert_eq!((switchml.switch_collisions, switchml.server_aggregations), (None, None));
    assert!(switchml.retransmissions > Some(0), "{switchml:?}");
    assert_eq!(counters("atp").answered_again, None);
    let alone = counters("ps");
    assert_eq!(alone.switch_aggregations, None);
    assert!(alone.server_aggregations > Some(0), "{alone:?}");
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

#[test]
fn a_few_tensors_are_not_measured_beyond_what_the_link_carries() {
    for tensors in [2, 6, 40] {
        let report = play(&format!(
            "[network]\ntopology = \"rack\"\nhosts = 3\nrate = \"10Gbit\"\n[[job]]\nsystem = \"atp\"\nworkers = 2\ntensor = \"40kB\"\ntensors = {tensors}\n"
        ));
        let gbps = report.jobs[0].aggregation_gbps;
        assert!((1.0..10.0).contains(&gbps), "{tensors}: {gbps}");
    }
}

/// A ring whose worker 1 dies at 5 ms, and no other takes its place: connections are still
/// acknowledged, and no timer runs.
fn broken_ring(file: &str) -> Result<Report, RunError> {
    let job = "[[job]]\nsystem = \"ring\"\nworkers = 4\ntensor = \"200kB\"\n";
    let mut scenario = parse("test.toml", &format!("until = \"50ms\"\n{RACK}{job}{file}"))
        .unwrap_or_else(|error| panic!("{error}"));
    let fault = Fault::WorkerRespawns(0, 1, Duration::from_millis(1));
    scenario.faults.push(FaultPlan { at: Duration::from_millis(5), fault });
    run(&scenario, Options { seed: 1, ..Options::default() })
}

/// The violation's words, and when.
fn stall(result: Result<Report, RunError>) -> (String, f64) {
    match result {
        Err(RunError::Violation(Violation::Stalled { job, waits }, at)) => {
            assert_eq!(job, "job0");
            (waits, at.as_secs_f64())
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_deadlock_in_which_nobody_has_a_timer_names_who_waits_for_whom() {
    let (waits, at) = stall(broken_ring(""));
    assert!(at < 0.012, "{at}: nothing is left to happen");
    for words in ["wait for tensor ", ": ranks 0, 1, 2, 3", "away: ranks 1"] {
        assert!(waits.contains(words), "{words:?} is not in {waits:?}");
    }
}

#[test]
fn a_job_that_stands_still_is_seen_in_a_short_run_beside_others_that_do_not() {
    let flow = "[[background]]\nfrom = \"h4\"\nto = \"h0\"\nkind = \"constant\"\nrate = \"1Gbit\"\n";
    let (waits, at) = stall(broken_ring(flow));
    assert!((0.015..0.025).contains(&at), "{at}: a quarter of the run");
    assert!(waits.contains("away: ranks 1"), "{waits}");
}

/// Both workers die while they compute, and nobody takes their ranks: nothing is submitted that
/// they could wait for.
#[test]
fn a_job_that_has_submitted_nothing_and_stands_still_is_seen_and_one_that_computes_or_pauses_is_not() {
    let flow = "[[background]]\nfrom = \"h4\"\nto = \"h3\"\nkind = \"constant\"\nrate = \"1Gbit\"\n";
    let job = "[[job]]\nsystem = \"ring\"\nworkers = 2\nmodel = \"alexnet\"\nscale = 1000\n";
    let scenario = |more: &str| {
        let text = format!("until = \"60ms\"\nstall = \"4ms\"\n{RACK}{flow}{job}{more}");
        parse("test.toml", &text).unwrap_or_else(|error| panic!("{error}"))
    };
    let options = || Options { seed: 1, ..Options::default() };
    let pauses = scenario("pause_every = 1\npause = \"10ms\"\nflops = 1e12\n");
    assert!(run(&pauses, options()).is_ok_and(|report| report.jobs[0].tensors > 10.0));
    let mut broken = scenario("flops = 1e12\n");
    for rank in 0..2 {
        let fault = Fault::WorkerRespawns(0, rank, Duration::from_millis(1));
        broken.faults.push(FaultPlan { at: Duration::from_micros(10), fault });
    }
    let (waits, _) = stall(run(&broken, options()));
    assert!(waits.contains("away: ranks 0, 1") && !waits.contains("wait for tensor"), "{waits}");
}

#[test]
fn a_job_that_should_have_ended_and_has_not_says_who_waits() {
    let text = format!("until = \"20us\"\n{RACK}{}", job("atp"));
    let report = play(&text);
    let waits = report.jobs[0].unfinished.as_ref().expect("six tensors take longer");
    for words in ["tensors completed by each worker: ", "wait for tensor ", "ranks 0, 1, 2, 3", "expects "] {
        assert!(waits.contains(words), "{words:?} is not in {waits:?}");
    }
    assert_eq!((report.jobs[0].finished, report.jobs[0].finished_s), (false, None));
    let endless = play(&text.replace("tensors = 6", ""));
    assert_eq!(endless.jobs[0].unfinished, None, "it ends with the run");
    let stopped = play(&text.replace("tensors = 6", "stop = \"1us\""));
    assert!(stopped.jobs[0].unfinished.is_some(), "it was to end");
}

#[test]
fn many_workers_who_wait_are_named_by_a_few() {
    let network = "until = \"10us\"\n[network]\ntopology = \"rack\"\nhosts = 31\n";
    let job = "[[job]]\nsystem = \"atp\"\nworkers = 30\ntensor = \"4MB\"\ntensors = 1\n";
    let report = play(&format!("{network}{job}"));
    let waits = report.jobs[0].unfinished.as_ref().expect("it takes longer");
    assert!(waits.contains("ranks 0, 1, 2, 3, 4, 5, 6, 7, and 22 more of 30"), "{waits}");
}

/// A link is away for the second half of the run.
#[test]
fn a_job_that_stands_still_half_of_the_time_has_half_the_throughput() {
    let job = job("atp").replace("tensors = 6", "");
    let fault = "[[fault]]\nat = \"5ms\"\nkind = \"link-fails\"\nlink = [\"h0\", \"s0\"]\ndown = \"9ms\"\n";
    let text = format!("until = \"9ms\"\nwarm_up = \"1ms\"\n{RACK}{job}");
    let (whole, half) = (play(&text), play(&format!("{text}{fault}")));
    let share = half.jobs[0].aggregation_gbps / whole.jobs[0].aggregation_gbps;
    assert!((0.45..0.55).contains(&share), "{share}");
    assert!(whole.jobs[0].measurement.enough && half.jobs[0].measurement.enough);
}

#[test]
fn throughputs_of_too_few_tensors_or_iterations_are_marked() {
    let measured =
        |job: &str| play(&format!("until = \"1s\"\n{RACK}[[job]]\nworkers = 2\n{job}")).jobs[0].measurement;
    let tensors = |count: u64| measured(&format!("system = \"atp\"\ntensor = \"40kB\"\ntensors = {count}\n"));
    assert!(!tensors(5).enough, "two are under way");
    assert!(tensors(6).enough);
    let training = |count: u64| {
        measured(&format!("system = \"ring\"\nmodel = \"alexnet\"\nscale = 1000\niterations = {count}\n"))
    };
    assert_eq!((training(2).completed, training(2).needed, training(2).enough), (2, 3, false));
    assert!(training(3).enough);
}

#[test]
fn the_last_interval_of_a_series_is_as_long_as_it_was() {
    let flow = "[[background]]\nfrom = \"h0\"\nto = \"h1\"\nkind = \"constant\"\nrate = \"4Gbit\"\n";
    let ended = |until: &str| {
        let report = play(&format!("until = \"{until}\"\ninterval = \"1ms\"\n{RACK}{flow}"));
        (report.last_interval_s, report.background[0].delivered_gbps.clone())
    };
    let (length, rates) = ended("2250us");
    assert!((length - 250e-6).abs() < 1e-12 && rates.len() == 3, "{length} {rates:?}");
    assert!((rates[2] / rates[1] - 1.0).abs() < 0.02, "{rates:?}");
    let (length, rates) = ended("2ms");
    assert!((length - 1e-3).abs() < 1e-12 && rates.len() == 2, "{length} {rates:?}");
}

/// Two constant flows of 8 Gbit/s into one link of 10 Gbit/s: the bytes of each, and why packets
/// were dropped.
fn contend(network: &str, queues: &str, keys: [&str; 2]) -> ([u64; 2], Vec<&'static str>) {
    let flow = |from: &str, keys: &str| {
        format!(
            "[[background]]\nfrom = \"{from}\"\nto = \"h2\"\nkind = \"constant\"\nrate = \"8Gbit\"\n{keys}"
        )
    };
    let report = play(&format!(
        "until = \"4ms\"\n[network]\ntopology = \"rack\"\nhosts = 3\nrate = \"10Gbit\"\nqueue = \"100kB\"\n{network}{queues}{}{}",
        flow("h0", keys[0]),
        flow("h1", keys[1]),
    ));
    let delivered = [0, 1].map(|flow| report.background[flow].delivered_bytes);
    (delivered, report.drops.iter().map(|drop| drop.name).collect())
}

#[test]
fn the_lower_priority_gets_what_the_higher_leaves() {
    for high in [0, 1] {
        let mut keys = ["priority = 6\n"; 2];
        keys[high] = "priority = 5\n";
        let (delivered, drops) = contend("", "", keys);
        // 8 and 2 of 10 Gbit/s; headers and framing take 4 % of them.
        let gbps = [high, 1 - high].map(|flow| delivered[flow] as f64 * 8.0 / 4e6);
        assert!((7.3..8.0).contains(&gbps[0]) && (1.7..2.3).contains(&gbps[1]), "{gbps:?}");
        assert_eq!(drops, ["tail"]);
    }
}

#[test]
fn a_drop_class_gives_way_at_its_threshold() {
    let queue = "[[queue]]\npriority = 0\ndrop_class = 3\ndrop_above = \"10kB\"\n";
    for low in [0, 1] {
        let mut keys = [""; 2];
        keys[low] = "drop_class = 3\n";
        let (delivered, drops) = contend("", queue, keys);
        assert!(delivered[1 - low] > 3 * delivered[low], "{delivered:?}");
        assert_eq!(drops, ["selective"]);
    }
    assert_eq!(contend("", queue, ["", ""]).1, ["tail"], "the other classes know nothing of it");
}

#[test]
fn buffers_of_ports_and_switches_end_before_their_queues_do() {
    assert_eq!(contend("port_buffer = \"20kB\"\n", "", ["", ""]).1, ["buffer"]);
    assert_eq!(contend("shared_buffer = \"90kB\"\nalpha = 0.5\n", "", ["", ""]).1, ["buffer"]);
    assert_eq!(contend("port_buffer = \"200kB\"\n", "[[queue]]\nlimit = \"20kB\"\n", ["", ""]).1, ["tail"]);
}

#[test]
fn a_jobs_packets_are_of_its_priority_everywhere() {
    for system in ["atp", "ps", "switchml", "ring"] {
        let with = |of_job: u8, of_flow: u8| {
            let flow = format!(
                "[[background]]\nfrom = \"h3\"\nto = \"h1\"\nkind = \"constant\"\nrate = \"10Gbit\"\npriority = {of_flow}\nstop = \"5ms\"\n"
            );
            play(&format!(
                "until = \"1s\"\n[network]\ntopology = \"rack\"\nhosts = 4\nrate = \"10Gbit\"\n[[job]]\nsystem = \"{system}\"\nworkers = [\"h0\", \"h1\"]\ntensor = \"100kB\"\ntensors = 4\npriority = {of_job}\n{flow}"
            ))
            .jobs[0]
                .finished_s
                .expect("it has finished")
        };
        let (before, behind) = (with(2, 6), with(6, 2));
        assert!(before < 0.004 && behind > 0.005, "{system}: {before} {behind}");
    }
}

#[test]
fn a_tcp_flow_beside_marks_slows_down_and_one_without_ecn_loses() {
    let again = |ecn: bool| {
        let flow = |from: &str| {
            format!("[[background]]\nfrom = \"{from}\"\nto = \"h2\"\nkind = \"tcp\"\necn = {ecn}\n")
        };
        let report = play(&format!(
            "until = \"50ms\"\n[network]\ntopology = \"rack\"\nhosts = 3\nrate = \"10Gbit\"\nqueue = \"300kB\"\necn = \"50kB\"\n{}{}",
            flow("h0"),
            flow("h1")
        ));
        report.background.iter().map(|flow| flow.retransmissions).sum::<u64>()
    };
    assert_eq!(again(true), 0);
    assert!(again(false) > 0);
}

/// Packets that the way from `h0` loses, of a job whose only tensor has 149 fragments.
fn lost(system: &str, loss: &str) -> u64 {
    let report = play(&format!(
        "{RACK}[[job]]\nsystem = \"{system}\"\nworkers = 4\ntensor = \"200kB\"\ntensors = 1\n[[loss]]\nlink = [\"h0\", \"s0\"]\n{loss}"
    ));
    assert!(report.jobs[0].finished, "{system} {loss}");
    report.drops.iter().find(|drop| drop.name == "loss").map_or(0, |drop| drop.count)
}

#[test]
fn named_packets_are_lost_and_no_others() {
    let from = "from = \"h0\"\n";
    assert_eq!(lost("atp", &format!("{from}nth = [1, 5]\n")), 2);
    assert_eq!(lost("atp", "nth = [1, 5]\n"), 4, "each direction counts for itself");
    assert_eq!(lost("atp", "only = \"parameters\"\nnth = [3]\n"), 1);
    assert_eq!(lost("atp", "only = \"segment\"\n"), 0);
    assert_eq!(lost("switchml", "only = \"result\"\nnth = [2]\n"), 1);
    assert_eq!(lost("ring", "only = \"acknowledgement\"\nnth = [2]\n"), 2);
    // 149 fragments, and a few again.
    let every = lost("atp", "only = \"gradient\"\nevery = 10\n");
    assert!((14..40).contains(&every), "{every}");
}

#[test]
fn both_states_of_a_link_with_bursts_have_their_loss() {
    let share = |states: &str| {
        let report = play(&format!(
            "until = \"20ms\"\n[network]\ntopology = \"rack\"\nhosts = 2\nrate = \"10Gbit\"\n[[background]]\nfrom = \"h0\"\nto = \"h1\"\nkind = \"constant\"\nrate = \"9Gbit\"\n[[loss]]\nlink = [\"h0\", \"s0\"]\nburst_begin = \"5%\"\nburst_end = \"5%\"\n{states}"
        ));
        let lost = report.drops.iter().find(|drop| drop.name == "loss").map_or(0, |drop| drop.count) as f64;
        lost / (lost + report.background[0].delivered_bytes as f64 / 1472.0)
    };
    // Half of the time in each.
    for (states, expected) in [
        ("", 0.5),
        ("loss = \"60%\"\n", 0.3),
        ("loss = \"60%\"\nloss_between = \"20%\"\n", 0.4),
        ("loss_between = \"40%\"\n", 0.7),
    ] {
        let found = share(states);
        assert!((expected - 0.04..expected + 0.04).contains(&found), "{states}: {found}");
    }
}

/// A worker's host sends a tenth of what the others' do: 1.25 MB take it 10 ms, whatever sums, and
/// a fifth of that otherwise at most.
#[test]
fn a_worker_that_sends_slowly_is_waited_for_in_every_system() {
    for Kind { name: system, .. } in crate::systems::ALL {
        let job = format!(
            "[[job]]\nsystem = \"{system}\"\nworkers = 4\ntensor = \"1250kB\"\ntensors = 2\nin_flight = 1\n"
        );
        let alike = play(&format!("{RACK}{job}rates = [\"20Gbit\", \"20Gbit\", \"20Gbit\", \"20Gbit\"]\n"));
        let unlike = play(&format!("{RACK}{job}rates = [\"20Gbit\", \"1Gbit\", \"20Gbit\", \"20Gbit\"]\n"));
        let times = [alike, unlike].map(|report| report.jobs[0].tensor_times.mean_s);
        assert!(times[0] < 0.004 && times[1] > 0.01, "{system}: {times:?}");
    }
}

/// A step takes as long as the latest of its workers is late, at least, and what nobody is late
/// with as long as ever.
#[test]
fn late_workers_make_steps_longer_in_every_system() {
    for Kind { name: system, .. } in crate::systems::ALL {
        let of = |late: &str| {
            let report = play(&format!("{RACK}{}in_flight = 1\n{late}", job(system)));
            assert!(report.jobs[0].finished);
            report.ended_s
        };
        // Six steps of four workers: in the mean the latest is late by four fifths.
        let (never, late) = (of(""), of("late = \"10ms\"\n"));
        assert!(late > never + 0.030 && late < never + 0.065, "{system}: {never} {late}");
        let normal = of("late = { most = \"10ms\", deviation = 0.2 }\n");
        assert!(normal > never + 0.004 && normal < late, "{system}: {never} {normal} {late}");
    }
}

#[test]
fn rates_and_lateness_are_by_seed() {
    let text =
        format!("{RACK}{}rates = {{ most = \"10Gbit\", deviation = 0.2 }}\nlate = \"1ms\"\n", job("atp"));
    let scenario = parse("test.toml", &text).expect("a scenario");
    let digest = |seed| run(&scenario, Options { seed, ..Options::default() }).expect("a run").digest;
    assert_eq!(digest(1), digest(1));
    assert_ne!(digest(1), digest(2));
}

/// Workers wait for each other's iterations; passes, lateness and gradients come one after the
/// other.
#[test]
fn an_iteration_begins_late_and_no_gradient_overtakes_another() {
    let train = "[[job]]\nsystem = \"atp\"\nworkers = 4\nmodel = \"resnet18\"\nscale = 1000\niterations = 3\nflops = 1e15\n";
    let of = |late: &str| play(&format!("{RACK}{train}{late}")).ended_s;
    let (never, late) = (of(""), of("late = \"10ms\"\n"));
    assert!(late > never + 0.012 && late < never + 0.031, "{never} {late}");
}

/// A host of a late worker fails while the worker is late; another worker dies so, and another
/// process takes its rank.
#[test]
fn who_is_late_and_fails_submits_what_it_has_once() {
    let faults = "[[fault]]\nat = \"2ms\"\nkind = \"node-fails\"\nnode = \"h0\"\ndown = \"1ms\"\n[[fault]]\nat = \"3ms\"\nkind = \"worker-respawns\"\njob = \"job0\"\nrank = 1\ndown = \"5ms\"\n";
    let report = play(&format!("{RACK}{faults}{}late = \"10ms\"\n", job("atp")));
    assert!(report.jobs[0].finished);
}
