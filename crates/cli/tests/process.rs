//! The `fanin` command as a process: what it prints, how it ends, and what the workers make of its
//! death.

#[path = "../../controller/tests/loopback/ports.rs"]
mod ports;

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use fanin_controller::{Session, SessionConfig, SessionError, protocols};
use fanin_udp::{RawTensor, Submission};
use fanin_wire::{Dtype, LossBound, Op, WireDtype};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Longer than anything here takes on a busy machine; only a hang reaches it.
const HANG: Duration = Duration::from_secs(60);

fn fanin(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fanin"));
    command.args(arguments).env_remove("FANIN_SWITCH").env_remove("FANIN_LOG");
    command
}

fn output(arguments: &[&str]) -> Output {
    fanin(arguments).output().expect("the command runs")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("text")
}

/// A switch process, killed when the test ends.
struct Switch {
    process: Child,
    address: String,
    stdout: BufReader<ChildStdout>,
}

impl Switch {
    /// Starts one, and returns when it listens.
    fn start(listen: &str) -> Self {
        Self::start_with(listen, &[])
    }

    fn start_with(listen: &str, options: &[&str]) -> Self {
        let mut process = fanin(&["switch", "--listen", listen, "--json", "--log", "error"])
            .args(options)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the command runs");
        let mut stdout = BufReader::new(process.stdout.take().expect("piped"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("a line");
        let listening: serde_json::Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!(listening["event"], "listening", "{line}");
        let address = listening["address"].as_str().expect("an address").to_owned();
        Self { process, address, stdout }
    }

    fn signal(mut self, signal: Signal) -> ExitStatus {
        kill(Pid::from_raw(self.process.id() as i32), signal).expect("it lives");
        self.process.wait().expect("it ends")
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn connect(address: &str, rank: u32, change: impl FnOnce(&mut SessionConfig)) -> Session {
    let mut config = SessionConfig::new(address, "restart", rank, 2);
    change(&mut config);
    Session::connect(config).expect("admitted")
}

/// Sums `tensor` over all ranks, in place.
fn all_reduce(session: &Session, tensor: &mut Vec<i32>) -> Result<(), SessionError> {
    let (sender, done) = mpsc::channel();
    // SAFETY: the tensor is borrowed until `done` was called, below; where that never happens, the
    // process ends.
    let raw = unsafe { RawTensor::new(tensor.as_mut_ptr().cast(), tensor.len(), Dtype::Int32) };
    session.submit(Submission::all_reduce(raw.expect("a tensor"), Op::Sum), move |result, _| {
        let _ = sender.send(result.map_err(|error| error.cause));
    })?;
    done.recv_timeout(HANG).unwrap_or_else(|_| {
        eprintln!("an all-reduce hangs");
        std::process::abort()
    })
}

#[test]
fn a_switch_ends_cleanly_on_sigterm_and_sigint_and_frees_its_port() {
    let first = Switch::start("127.0.0.1:0");
    let address = first.address.clone();
    assert_eq!(first.signal(Signal::SIGTERM).code(), Some(0));
    let second = Switch::start(&address);
    assert_eq!(second.signal(Signal::SIGINT).code(), Some(0));
}

#[test]
fn the_line_for_people_names_the_address_and_the_metrics() {
    let mut process = fanin(&["switch", "--listen", "127.0.0.1:0"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("runs");
    let mut line = String::new();
    BufReader::new(process.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
    process.kill().expect("it lives");
    process.wait().expect("it ends");
    assert!(line.contains("listens on 127.0.0.1:") && line.contains("/metrics"), "{line}");
}

#[test]
fn status_shows_an_idle_switch() {
    let switch = Switch::start("127.0.0.1:0");
    let shown = output(&["status", "--switch", &switch.address]);
    assert!(shown.status.success() && text(&shown.stdout).ends_with("no jobs\n"), "{shown:?}");
    let json = output(&["status", "--switch", &switch.address, "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).expect("JSON");
    assert_eq!(
        (json["pool"]["free"].as_u64(), json["jobs"].as_array().map(Vec::len)),
        (Some(262_144), Some(0))
    );
}

#[test]
fn errors_are_one_line_with_cause_and_cure_and_exit_code_1() {
    let (_held, free) = ports::closed_port();
    let nobody = output(&["status", "--switch", &free.to_string(), "--timeout", "0.3"]);
    assert_eq!(nobody.status.code(), Some(1));
    let message = text(&nobody.stderr);
    assert!(message.starts_with(&format!("fanin: switch {free} did not answer")), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");

    let switch = Switch::start("127.0.0.1:0");
    let taken = output(&["switch", "--listen", &switch.address, "--log", "warn"]);
    assert_eq!(taken.status.code(), Some(1));
    assert!(text(&taken.stderr).contains("is in use"), "{taken:?}");

    let elsewhere = output(&["switch", "--listen", "203.0.113.1:0"]);
    assert_eq!(
        (elsewhere.status.code(), text(&elsewhere.stderr).lines().count()),
        (Some(1), 1),
        "{elsewhere:?}"
    );

    for line in
        [&["run", "--nproc-per-node", "4", "train.py"][..], &["bench", "allreduce"], &["netlab", "up"]]
    {
        let elsewhere = output(line);
        assert_eq!(elsewhere.status.code(), Some(1));
        assert!(text(&elsewhere.stderr).contains("`make wheel`"), "{elsewhere:?}");
    }
}

#[test]
fn a_command_line_that_cannot_be_understood_exits_with_2_and_help_with_0() {
    for line in [
        &["switch", "--listen", "nowhere"][..],
        &["switch", "--pool-units", "0"],
        &["switch", "--heartbeat-timeout", "-1"],
        &["nonsense"],
        &[],
    ] {
        assert_eq!(output(line).status.code(), Some(2), "{line:?}");
    }
    assert_eq!(output(&["--help"]).status.code(), Some(0));
    let help = output(&["switch", "--help"]);
    assert!(help.status.success() && text(&help.stdout).contains("Examples:"), "{help:?}");
}

#[test]
fn versions_are_told_to_people_and_programs() {
    assert!(text(&output(&["version"]).stdout).starts_with("fanin 0."));
    let json: serde_json::Value =
        serde_json::from_slice(&output(&["version", "--json"]).stdout).expect("JSON");
    assert_eq!(json["wire_version"], fanin_wire::VERSION);
}

/// Lets two ranks sum while what `start` starts is killed twice, each time to come back at its
/// address. Returns the job's generation.
fn survive_two_deaths(
    mortal: Switch,
    start: impl Fn(&str) -> Switch,
    asked: &str,
    choose: impl Fn(&mut SessionConfig) + Copy + Send + 'static,
) -> u16 {
    const ROUNDS: i32 = 60;
    const LENGTH: usize = 300_000;
    let address = mortal.address.clone();
    let (progress, rounds) = mpsc::channel();
    let ranks: Vec<_> = (0..2)
        .map(|rank| {
            let (asked, progress) = (asked.to_owned(), progress.clone());
            thread::spawn(move || {
                let session = connect(&asked, rank, choose);
                for round in 0..ROUNDS {
                    let mut tensor: Vec<i32> = (0..LENGTH as i32).map(|i| i ^ round).collect();
                    all_reduce(&session, &mut tensor).expect("the switch comes back in time");
                    assert!(
                        (0..).zip(&tensor).all(|(i, sum): (i32, _)| *sum == 2 * (i ^ round)),
                        "round {round}"
                    );
                    let _ = progress.send(round);
                }
                session.job().expect("open").generation().0
            })
        })
        .collect();
    let mut mortal = Some(mortal);
    for death in 1..=2 {
        while rounds.recv_timeout(HANG).expect("rounds go on") < 15 * death {}
        // SIGKILL: no farewell.
        drop(mortal.take());
        mortal = Some(start(&address));
    }
    let generations: Vec<u16> = ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect();
    assert_eq!(generations[0], generations[1]);
    generations[0]
}

/// Lets a protocol sum a rank's tensors.
fn by(protocol: &'static str) -> impl Fn(&mut SessionConfig) + Copy + Send + 'static {
    move |config| config.protocol = protocols::named(protocol).expect("a protocol")
}

fn survive_two_deaths_of_a_switch(options: &[&str]) {
    let start = |listen: &str| Switch::start_with(listen, options);
    let switch = start("127.0.0.1:0");
    let address = switch.address.clone();
    let generation = survive_two_deaths(switch, start, &address, by("switchml"));
    assert_eq!(generation, 2, "each restart is a generation");
}

#[test]
fn sums_stay_exact_when_the_switch_is_killed_and_comes_back() {
    survive_two_deaths_of_a_switch(&["--shards", "1"]);
}

#[test]
fn sums_stay_exact_over_deaths_with_several_shards_too() {
    survive_two_deaths_of_a_switch(&["--shards", "3"]);
    let start = |listen: &str| Switch::start_with(listen, &[&PATIENT_ATP[..], &["--shards", "3"]].concat());
    let server = start("127.0.0.1:0");
    let rack = ["--protocol", "atp", "--upstream", &server.address, "--shards", "2"];
    let rack = Switch::start_with("127.0.0.1:0", &rack);
    assert_eq!(survive_two_deaths(server, start, &rack.address, by("atp")), 2);
}

#[test]
fn sums_stay_exact_when_the_switch_of_a_job_with_a_loss_bound_is_killed_and_comes_back() {
    for shards in ["1", "3"] {
        let start = |listen: &str| Switch::start_with(listen, &["--shards", shards]);
        let switch = start("127.0.0.1:0");
        let address = switch.address.clone();
        let losing = |config: &mut SessionConfig| {
            config.agreed.loss_bound = LossBound::from_millionths(20_000).expect("below one");
            config.wire_dtype = Some(WireDtype::Native);
        };
        assert_eq!(survive_two_deaths(switch, start, &address, losing), 2, "{shards} shards");
    }
}

/// Longer than a machine that is busy may take to start a process again.
const PATIENT_ATP: [&str; 4] = ["--protocol", "atp", "--heartbeat-timeout", "20"];

#[test]
fn sums_stay_exact_when_the_server_of_atp_is_killed_and_comes_back() {
    let start = |listen: &str| Switch::start_with(listen, &PATIENT_ATP);
    let server = start("127.0.0.1:0");
    let rack = Switch::start_with("127.0.0.1:0", &["--protocol", "atp", "--upstream", &server.address]);
    assert_eq!(survive_two_deaths(server, start, &rack.address, by("atp")), 2);
}

#[test]
fn sums_stay_exact_when_a_switch_of_atp_is_killed_and_comes_back() {
    let server = Switch::start_with("127.0.0.1:0", &PATIENT_ATP);
    let options = ["--protocol", "atp", "--upstream", &server.address];
    let start = |listen: &str| Switch::start_with(listen, &options);
    let rack = start("127.0.0.1:0");
    let address = rack.address.clone();
    let generation = survive_two_deaths(rack, start, &address, by("atp"));
    assert_eq!(generation, 0, "the server lost nothing");
}

/// Which share of a job of three ranks is summed at a switch beside the way of two of them, where
/// the spine is started so. They have 20 Gbit/s to the spine, and the switch and its rank 10.
fn share_beside_the_way(spine_options: &[&str]) -> f64 {
    let root = Switch::start_with("127.0.0.1:0", &["--protocol", "goat"]);
    let below = |upstream: &str, options: &[&str]| {
        let common = ["--protocol", "goat", "--upstream", upstream];
        Switch::start_with("127.0.0.1:0", &[&common, options].concat())
    };
    let spine = below(&root.address, &[&["--aggregators", "0"], spine_options].concat());
    let with = below(&spine.address, &["--rate", "10gbit"]);
    let without = below(&spine.address, &["--aggregators", "0", "--rate", "20gbit"]);
    let ranks = [&with, &without, &without].map(|switch| switch.address.clone());
    let joining: Vec<_> = (0..)
        .zip(ranks)
        .map(|(rank, address)| {
            thread::spawn(move || {
                connect(&address, rank, |config| {
                    config.world_size = 3;
                    config.protocol = protocols::named("goat").expect("a protocol");
                })
            })
        })
        .collect();
    let sessions: Vec<_> = joining.into_iter().map(|rank| rank.join().expect("no panic")).collect();
    let shown = output(&["status", "--json", "--switch", &root.address]);
    drop(sessions);
    let status: serde_json::Value = serde_json::from_slice(&shown.stdout).expect("JSON");
    let planned = status["jobs"][0]["planned"].as_array().expect("a plan");
    let of_with = planned.iter().find(|share| share["switch"] == with.address.as_str());
    of_with.and_then(|share| share["share"].as_f64()).expect("its share")
}

/// A link from the spine to the root would carry all three ranks' arrays. So half of what the
/// others send goes down to the switch that sums, unless no link is there.
#[test]
fn a_root_on_the_machine_of_a_switch_is_planned_for_without_a_link_unless_its_rate_is_said() {
    let local = share_beside_the_way(&[]);
    assert!(local < 0.34, "the rank's at most that is there: {local}");
    let said = share_beside_the_way(&["--rate", "10gbit"]);
    assert!(said > 0.4, "half of all: {said}");
}

#[test]
fn options_of_the_other_protocol_are_refused_with_the_cure() {
    for (line, cure) in [
        (&["--upstream", "box:4800", "--heartbeat-timeout", "9"][..], "whose root decides that"),
        (&["--upstream", ":1"], "--upstream: "),
        (&["--aggregators", "7"], "--protocol atp or goat"),
        (&["--protocol", "atp", "--upstream", "box", "--join-timeout-max", "2"], "whose root decides that"),
        (&["--protocol", "goat", "--aggregators", "7"], "with --upstream"),
        (&["--protocol", "goat", "--upstream", "box", "--pool-units", "2"], "which has --aggregators"),
        (&["--protocol", "dlcp", "--upstream", "box"], "no switches on its way"),
        (&["--protocol", "goat", "--upstream", "box", "--aggregators", "524289"], "at most 524288"),
        (&["--protocol", "atp", "--upstream", ":1"], "give it like 10.0.0.9:4800"),
        (&["--protocol", "atp", "--upstream", ":1"], "--upstream: "),
        (&["--protocol", "atp", "--upstream", "box", "--aggregators", "524289"], "at most 524288"),
    ] {
        let refused = output(&[&["switch"], line].concat());
        let message = text(&refused.stderr);
        assert!(refused.status.code() == Some(1) && message.contains(cure), "{line:?}: {message}");
    }
}

#[test]
fn the_old_name_of_atps_root_answers_with_the_new_one() {
    for line in [&["server", "--listen", "0.0.0.0:4800"][..], &["server", "--help"]] {
        let refused = output(line);
        let message = text(&refused.stderr);
        let cure = format!("fanin switch --protocol atp {}", line[1..].join(" "));
        assert!(refused.status.code() == Some(1) && message.contains(&cure), "{message}");
    }
}

/// Two ranks of a job, of which the first gives up soon when the switch is gone.
fn hasty_and_patient(switch: &Switch) -> (Session, Session) {
    let patient = {
        let address = switch.address.clone();
        thread::spawn(move || connect(&address, 1, |_| {}))
    };
    let hasty = connect(&switch.address, 0, |config| config.switch_timeout = Duration::from_secs(2));
    (hasty, patient.join().expect("no panic"))
}

#[test]
fn a_rank_that_does_not_join_a_restarted_switch_is_named() {
    let switch = Switch::start("127.0.0.1:0");
    let address = switch.address.clone();
    let (hasty, mut other) = hasty_and_patient(&switch);
    drop(switch);
    other.close();
    let _switch = Switch::start(&address);
    let error = all_reduce(&hasty, &mut vec![1; 1000]).expect_err("rank 1 is gone");
    assert!(
        matches!(&error, SessionError::SwitchLost { cause, .. } if cause.contains("rank 1 did not")),
        "{error}"
    );
}

#[test]
fn a_switch_that_comes_back_with_fewer_shards_refuses_with_both_numbers() {
    let switch = Switch::start_with("127.0.0.1:0", &["--shards", "2"]);
    let address = switch.address.clone();
    let (hasty, _patient) = hasty_and_patient(&switch);
    drop(switch);
    let _switch = Switch::start_with(&address, &["--shards", "1"]);
    let error = all_reduce(&hasty, &mut vec![1; 1000]).expect_err("another switch");
    assert!(error.to_string().contains("rank 0 has shards 2, the job 1"), "{error}");
}

#[test]
fn a_switch_that_does_not_come_back_is_a_typed_error_in_time() {
    let switch = Switch::start("127.0.0.1:0");
    let (hasty, _patient) = hasty_and_patient(&switch);
    drop(switch);
    let began = Instant::now();
    let error = all_reduce(&hasty, &mut vec![1; 1000]).expect_err("no switch");
    assert!(matches!(error, SessionError::SwitchLost { .. }), "{error}");
    assert!(began.elapsed() < HANG / 2);
}

#[test]
fn a_server_that_does_not_come_back_is_named_through_the_switch() {
    let server = Switch::start_with("127.0.0.1:0", &["--protocol", "atp"]);
    let switch = Switch::start_with("127.0.0.1:0", &["--protocol", "atp", "--upstream", &server.address]);
    let mut config = SessionConfig::new(&switch.address, "lost", 0, 1);
    config.protocol = protocols::named("atp").expect("a protocol");
    config.switch_timeout = Duration::from_secs(4);
    let session = Session::connect(config).expect("admitted");
    let upstream = server.address.clone();
    drop(server);
    let error = all_reduce(&session, &mut vec![1; 1000]).expect_err("no server");
    let SessionError::SwitchLost { cause, .. } = &error else { panic!("{error}") };
    assert!(cause.contains(&upstream) && cause.contains("with the same --protocol"), "{cause}");
    let shown = output(&["status", "--switch", &switch.address]);
    let message = text(&shown.stderr);
    assert!(shown.status.code() == Some(1) && message.contains(&upstream), "{message}");
    assert!(!message.contains("not a fanin switch"), "{message}");
}

#[test]
fn nothing_but_its_line_is_printed_to_stdout() {
    let mut switch = Switch::start("127.0.0.1:0");
    kill(Pid::from_raw(switch.process.id() as i32), Signal::SIGTERM).expect("it lives");
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut switch.stdout, &mut rest).expect("text");
    assert_eq!(rest, "");
}
