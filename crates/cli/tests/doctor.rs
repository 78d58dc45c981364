//! `fanin doctor` against switches, strangers, silence, and a firewall's work.

#[path = "../../controller/tests/loopback/ports.rs"]
mod ports;

use std::io::{self, BufRead, BufReader, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use fanin_controller::{
    JobStatusState, RackServer, RackServerConfig, Session, SessionConfig, SwitchServer, SwitchServerConfig,
    protocols, switch_status,
};
use fanin_udp::OnSockets;
use serde_json::Value;

/// Longer than anything here takes on a busy machine; only a hang reaches it.
const HANG: Duration = Duration::from_secs(60);

const CHECKS: [&str; 17] = [
    "switch",
    "machine",
    "local",
    "address",
    "service",
    "name",
    "tcp",
    "version",
    "udp",
    "mtu",
    "offload",
    "buffers",
    "interface",
    "rates",
    "heartbeat",
    "pool",
    "jobs",
];

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fanin"));
    command.arg("doctor").args(arguments).env_remove("FANIN_SWITCH");
    // The way to torch's store is this machine's own.
    command.env_remove("GLOO_SOCKET_IFNAME").env("MASTER_ADDR", "127.0.0.1");
    command
}

/// The doctor's words, as JSON, and how it ended.
struct Diagnosis {
    status: Option<i32>,
    report: Value,
    stderr: String,
}

impl Diagnosis {
    fn of(switch: impl ToString) -> Self {
        Self::from(command(&["--json", "--switch", &switch.to_string()]).output().expect("it runs"))
    }

    fn from(output: Output) -> Self {
        let report =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
        let stderr = String::from_utf8(output.stderr).expect("text");
        Self { status: output.status.code(), report, stderr }
    }

    fn all(&self, check: &str) -> Vec<&Value> {
        let findings = self.report["findings"].as_array().expect("findings");
        findings.iter().filter(|finding| finding["check"] == check).collect()
    }

    /// Verdict, message and mend of the first finding of a check.
    fn finding(&self, check: &str) -> (&str, &str, &str) {
        let all = self.all(check);
        let finding = all.first().unwrap_or_else(|| panic!("no {check} in {}", self.report));
        let text = |field: &str| finding[field].as_str().unwrap_or_default();
        (text("verdict"), text("message"), text("mend"))
    }
}

fn protocol(name: &str) -> &'static dyn OnSockets {
    protocols::named(name).expect("a protocol")
}

fn switch_with(change: impl FnOnce(&mut SwitchServerConfig)) -> SwitchServer {
    let mut config = SwitchServerConfig::new(([127, 0, 0, 1], 0).into());
    change(&mut config);
    SwitchServer::start(config).expect("a free port")
}

/// Serves each connection to a port of its own with `serve`, for as long as the test runs.
fn listen(serve: impl Fn(TcpStream) + Clone + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
    thread::spawn(move || {
        for connection in listener.incoming().flatten() {
            let serve = serve.clone();
            thread::spawn(move || serve(connection));
        }
    });
    address
}

/// Forwards TCP to `switch`, and no UDP, as a firewall or a container's port mapping does.
fn tcp_proxy(switch: SocketAddr) -> SocketAddr {
    fn pump(mut from: TcpStream, mut to: TcpStream) {
        let _ = io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Write);
    }
    listen(move |client| {
        let Ok(server) = TcpStream::connect(switch) else { return };
        let (Ok(client_too), Ok(server_too)) = (client.try_clone(), server.try_clone()) else { return };
        thread::spawn(move || pump(server_too, client_too));
        pump(client, server);
    })
}

#[test]
fn a_running_switch_on_this_machine_has_no_problem() {
    for shards in [1, 2] {
        let switch = switch_with(|config| config.shards = shards);
        let diagnosis = Diagnosis::of(switch.address());
        assert_eq!(diagnosis.status, Some(0), "{}", diagnosis.report);
        // How large buffers are, and how fast heartbeats, is the machine's affair.
        for check in
            CHECKS.into_iter().filter(|check| !["buffers", "heartbeat", "offload", "address"].contains(check))
        {
            assert_eq!(diagnosis.finding(check).0, "ok", "{check}: {}", diagnosis.report);
        }
        let (_, udp, _) = diagnosis.finding("udp");
        assert!(udp.contains("got its sum back"), "{udp}");
        let (_, mtu, _) = diagnosis.finding("mtu");
        assert!(mtu.contains("2048 elements") && mtu.contains("DF bit"), "{mtu}");
        assert!(diagnosis.finding("heartbeat").1.contains("5s of silence"), "{}", diagnosis.report);
        assert!(diagnosis.finding("interface").1.starts_with("lo "), "{}", diagnosis.report);
        let after = switch_status(&switch.address().to_string(), HANG).expect("a switch");
        assert!(
            after.jobs.is_empty() && after.pool_free == after.pool_units,
            "the probe has left: {after:?}"
        );
    }
}

#[test]
fn the_way_to_a_switch_is_measured_if_asked() {
    let switch = switch_with(|_| {});
    let told = Diagnosis::from(
        command(&["--json", "--measure", "--switch", &switch.address().to_string()])
            .output()
            .expect("it runs"),
    );
    let messages: Vec<_> =
        told.all("rates").iter().filter_map(|finding| finding["message"].as_str()).collect();
    assert_eq!(messages.len(), 2);
    // A machine that is busy may tell no rate.
    assert!(messages[1].contains("measured: "), "{messages:?}");
}

#[test]
fn a_switch_of_atp_is_examined_with_its_own_packets() {
    let server = switch_with(|config| config.protocol = protocol("atp"));
    let here = ([127, 0, 0, 1], 0).into();
    let rack = |upstream: String| {
        RackServer::start(RackServerConfig::new(protocol("atp"), here, upstream)).expect("a free port")
    };
    let switch = rack(server.address().to_string());
    let diagnosis = Diagnosis::of(switch.address());
    let (verdict, mtu, _) = diagnosis.finding("mtu");
    let packet =
        format!("packets of {} bytes", fanin_wire::fragment_packet_bytes::<fanin_wire::Directions>(2048));
    assert!(verdict == "ok" && mtu.contains("fragments of 2048") && mtu.contains(&packet), "{mtu}");
    assert_eq!(diagnosis.finding("udp").0, "ok", "{}", diagnosis.report);

    let (_held, nowhere) = ports::closed_port();
    let nowhere = nowhere.to_string();
    let lost = rack(nowhere.clone());
    let diagnosis = Diagnosis::of(lost.address());
    let said = diagnosis.report.to_string();
    assert!(
        diagnosis.status == Some(1) && said.contains(&nowhere) && said.contains("with the same --protocol"),
        "{said}"
    );
    assert!(!said.contains("not a fanin switch"), "{said}");
}

#[test]
fn a_switch_of_goat_and_its_root_are_examined_with_their_own_packets() {
    let root = switch_with(|config| config.protocol = protocol("goat"));
    let rack =
        RackServerConfig::new(protocol("goat"), ([127, 0, 0, 1], 0).into(), root.address().to_string());
    let rack = RackServer::start(rack).expect("a free port");
    for address in [rack.address(), root.address()] {
        let diagnosis = Diagnosis::of(address);
        let (verdict, mtu, _) = diagnosis.finding("mtu");
        assert!(verdict == "ok" && mtu.contains("fragments of 2048"), "{mtu}");
        assert_eq!(diagnosis.finding("udp").0, "ok", "{}", diagnosis.report);
    }
}

#[test]
fn the_json_has_one_shape() {
    let switch = switch_with(|_| {});
    let diagnosis = Diagnosis::of(switch.address());
    let report = &diagnosis.report;
    assert_eq!(report["switch"], switch.address().to_string());
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["wire_version"], fanin_wire::VERSION);
    assert!(["ok", "warning"].contains(&report["verdict"].as_str().expect("a verdict")), "{report}");
    assert_eq!(report["not_checked"], Value::Array(vec![]));
    let findings = report["findings"].as_array().expect("findings");
    assert_eq!(findings.iter().map(|finding| &finding["check"]).collect::<Vec<_>>(), CHECKS);
    for finding in findings {
        assert!(finding["message"].as_str().is_some_and(|message| !message.contains('\n')), "{finding}");
        assert_eq!(finding["mend"].is_string(), finding["verdict"] != "ok", "{finding}");
    }
}

#[test]
fn people_get_a_line_a_finding_and_the_mend_below() {
    let (_held, switch) = ports::closed_port();
    let switch = switch.to_string();
    let output = command(&["--switch", &switch]).output().expect("it runs");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let mut lines = stdout.lines().skip_while(|line| !line.starts_with("PROBLEM  tcp "));
    assert!(lines.next().is_some_and(|line| line.contains("nobody listens")), "{stdout}");
    let mend = lines.map(str::trim_start).find(|line| line.starts_with("mend: ")).expect("a mend");
    assert!(stdout.lines().all(|line| line.len() <= 100 || line.contains("mend: ")), "{stdout}");
    assert!(mend.starts_with(&format!("mend: fanin switch --listen {switch}")), "{stdout}");
    assert_eq!(stderr, "fanin: a problem with tcp\n");
    assert!(!stdout.contains('\x1b'), "no colours where nobody sees them: {stdout}");
}

#[test]
fn the_finding_says_where_the_address_came_from() {
    let held = [ports::closed_port(), ports::closed_port()];
    let [argument, environment] = held.each_ref().map(|(_, address)| address.to_string());
    let both = command(&["--json", "--switch", &argument]).env("FANIN_SWITCH", &environment).output();
    let both = Diagnosis::from(both.expect("it runs"));
    assert_eq!(both.report["switch"], argument);
    assert!(both.finding("switch").1.contains("overrules FANIN_SWITCH"), "{}", both.report);
    let one = command(&["--json"]).env("FANIN_SWITCH", &environment).output();
    let one = Diagnosis::from(one.expect("it runs"));
    assert_eq!(one.report["switch"], environment);
    assert!(one.finding("switch").1.contains("FANIN_SWITCH says so"), "{}", one.report);
}

#[test]
fn without_a_switch_the_machine_is_still_looked_at() {
    let (_held, nowhere) = ports::closed_port();
    let diagnosis = Diagnosis::of(nowhere);
    assert_eq!(diagnosis.status, Some(1));
    assert_eq!(diagnosis.finding("tcp").0, "problem");
    for check in ["mtu", "offload", "buffers", "interface"] {
        assert_ne!(diagnosis.finding(check).0, "problem", "{}", diagnosis.report);
    }
    assert_eq!(
        diagnosis.report["not_checked"],
        serde_json::json!(["version", "udp", "rates", "heartbeat", "pool", "jobs"])
    );
    assert_eq!(diagnosis.stderr, "fanin: a problem with tcp\n");
}

#[test]
fn it_says_which_machine_this_is_and_what_ranks_do_there_without_a_switch() {
    let settings = |more: &str| {
        format!(
            r#"[{{"name": "protocol", "value": "switchml"}}, {{"name": "security", "value": "tag"}}{more}]"#
        )
    };
    let of = |settings: &str, switch: &SocketAddr| {
        let arguments = ["--json", "--switch", &switch.to_string(), "--settings", settings];
        Diagnosis::from(command(&arguments).output().expect("it runs"))
    };
    let switch = switch_with(|_| {});
    let usual = of(&settings(""), &switch.address());
    assert_eq!(usual.status, Some(0), "{}", usual.report);
    let (_, machine, _) = usual.finding("machine");
    assert!(machine.starts_with(&fanin_controller::machine_id()), "{machine}");
    let (_, local, _) = usual.finding("local");
    assert!(local.contains("MiB free, 8 ranks need"), "{local}");
    let (verdict, address, mend) = usual.finding("address");
    assert_eq!(verdict, "warning", "a loopback address is no other machine's");
    assert!(
        address.starts_with("127.0.0.1 (lo): the route to the store (MASTER_ADDR=127.0.0.1)"),
        "{address}"
    );
    assert!(address.contains("tells no rate") && mend.contains("GLOO_SOCKET_IFNAME"), "{address} {mend}");
    let (_, service, _) = usual.finding("service");
    assert!(
        service.contains("listened on TCP and UDP 127.0.0.1:") && service.ends_with("and summed"),
        "{service}"
    );

    let said = r#", {"name": "machine", "value": "w7"}, {"name": "rate", "value": "1gbit"}, {"name": "plan", "value": "switch"}"#;
    let said = of(&settings(said), &switch.address());
    assert!(said.finding("machine").1.starts_with("w7, as FANIN_MACHINE says"), "{}", said.report);
    assert!(said.finding("address").1.contains("carries 1gbit, as FANIN_RATE says"), "{}", said.report);
    assert_eq!(said.finding("service").1, "ranks here host none: plan=switch");
}

#[test]
fn a_switch_that_is_named_needs_no_store_to_be_named() {
    let switch = switch_with(|_| {});
    let mut command = command(&["--json", "--switch", &switch.address().to_string()]);
    let named = Diagnosis::from(command.env_remove("MASTER_ADDR").output().expect("it runs"));
    let (verdict, address, _) = named.finding("address");
    assert_eq!(verdict, "ok", "{address}");
    assert!(
        address
            .contains(&format!("MASTER_ADDR is not set here, and the route to {} leaves", switch.address())),
        "{address}"
    );
}

#[test]
fn an_interface_that_is_not_there_is_a_problem() {
    let (_held, nowhere) = ports::closed_port();
    let output =
        command(&["--json", "--switch", &nowhere.to_string()]).env("GLOO_SOCKET_IFNAME", "none0").output();
    let diagnosis = Diagnosis::from(output.expect("it runs"));
    let (verdict, message, mend) = diagnosis.finding("address");
    assert_eq!(verdict, "problem");
    assert!(message.starts_with("GLOO_SOCKET_IFNAME is \"none0\": there is no such interface"), "{message}");
    assert!(mend.contains("ip -br address"), "{mend}");
}

#[test]
fn each_interface_of_several_is_examined() {
    let (_held, nowhere) = ports::closed_port();
    let output = command(&["--json", "--switch", &nowhere.to_string()])
        .env("GLOO_SOCKET_IFNAME", "lo, none0")
        .output();
    let diagnosis = Diagnosis::from(output.expect("it runs"));
    let addresses = diagnosis.all("address");
    let says = |index: usize| addresses[index]["message"].as_str().unwrap_or_default();
    assert_eq!(addresses.len(), 2, "{addresses:?}");
    assert!(
        says(0).starts_with("127.0.0.1 (lo): GLOO_SOCKET_IFNAME names lo; it tells no rate"),
        "{addresses:?}"
    );
    assert!(says(1).starts_with("GLOO_SOCKET_IFNAME is \"none0\": there is no such"), "{addresses:?}");
    assert_eq!(diagnosis.all("service").len(), 1);
}

#[test]
fn every_switch_of_several_is_examined() {
    let (one, other) = (switch_with(|_| {}), switch_with(|_| {}));
    let diagnosis = Diagnosis::of(format!("{},{}", one.address(), other.address()));
    assert_eq!(diagnosis.status, Some(0), "{}", diagnosis.report);
    for (finding, switch) in diagnosis.all("tcp").into_iter().zip([&one, &other]) {
        let address = switch.address().to_string();
        assert!(finding["message"].as_str().is_some_and(|text| text.starts_with(&address)), "{finding}");
    }
    assert_eq!(diagnosis.all("udp").len(), 2);
}

#[test]
fn an_address_that_is_none_ends_the_examination() {
    let diagnosis = Diagnosis::of("http://box:4800");
    let (verdict, message, mend) = diagnosis.finding("name");
    assert_eq!((diagnosis.status, verdict), (Some(1), "problem"), "{message}");
    assert!(mend.contains("FANIN_SWITCH="), "{mend}");
    assert_eq!(diagnosis.report["not_checked"].as_array().map(Vec::len), Some(CHECKS.len() - 6));
}

#[test]
fn a_web_server_on_the_port_is_named() {
    let web = listen(|mut connection| {
        let mut request = String::new();
        let Ok(reading) = connection.try_clone() else { return };
        let _ = BufReader::new(reading).read_line(&mut request);
        let _ = connection.write_all(b"HTTP/1.1 404 Not Found\r\nServer: paper\r\nContent-Length: 0\r\n\r\n");
    });
    let diagnosis = Diagnosis::of(web);
    let (verdict, message, mend) = diagnosis.finding("tcp");
    assert_eq!((diagnosis.status, verdict), (Some(1), "problem"), "{message}");
    assert!(message.contains("\"HTTP/1.1 404 Not Found\" of \"paper\""), "{message}");
    assert!(mend.contains("ss -ltnp"), "{mend}");
}

#[test]
fn a_port_that_says_nothing_is_given_up() {
    // Takes everything, answers nothing, hangs up never.
    let mute = listen(|mut connection| {
        let _ = io::copy(&mut connection, &mut io::sink());
    });
    let began = Instant::now();
    let diagnosis = Diagnosis::from(
        command(&["--json", "--timeout", "0.3", "--switch", &mute.to_string()]).output().expect("runs"),
    );
    let (verdict, message, _) = diagnosis.finding("tcp");
    assert_eq!((diagnosis.status, verdict), (Some(1), "problem"), "{message}");
    assert!(message.contains("it says nothing"), "{message}");
    assert!(began.elapsed() < HANG);
}

#[test]
fn udp_that_is_refused_while_tcp_works_is_told() {
    let switch = switch_with(|_| {});
    let diagnosis = Diagnosis::of(tcp_proxy(switch.address()));
    assert_eq!((diagnosis.status, diagnosis.finding("tcp").0), (Some(1), "ok"), "{}", diagnosis.report);
    let (verdict, message, mend) = diagnosis.finding("udp");
    assert_eq!(verdict, "problem");
    assert!(
        message.contains("UDP is blocked while TCP works") && message.contains("nobody listens"),
        "{message}"
    );
    assert!(mend.contains("/udp"), "{mend}");
    assert_eq!(diagnosis.stderr, "fanin: a problem with udp\n");
    assert_ne!(diagnosis.finding("heartbeat").0, "problem", "{}", diagnosis.report);
}

#[test]
fn udp_that_is_swallowed_while_tcp_works_is_told() {
    let switch = switch_with(|_| {});
    // A TCP port of which the UDP twin is free as well.
    let (proxy, _hole) = (0..16)
        .find_map(|_| {
            let proxy = tcp_proxy(switch.address());
            UdpSocket::bind(proxy).ok().map(|hole| (proxy, hole))
        })
        .expect("a port");
    let diagnosis = Diagnosis::of(proxy);
    let (verdict, message, _) = diagnosis.finding("udp");
    assert_eq!((diagnosis.status, verdict), (Some(1), "problem"), "{message}");
    assert!(message.contains("UDP is blocked while TCP works: packets do not reach"), "{message}");
    let after = switch_status(&switch.address().to_string(), HANG).expect("a switch");
    assert!(after.jobs.is_empty(), "the probe has left: {after:?}");
}

#[test]
fn a_pool_without_room_for_the_probe_is_a_warning() {
    let switch = switch_with(|config| config.pool_units = 1);
    let diagnosis = Diagnosis::of(switch.address());
    let (verdict, message, mend) = diagnosis.finding("udp");
    assert_eq!((diagnosis.status, verdict), (Some(0), "warning"), "{}", diagnosis.report);
    assert!(message.starts_with("not checked: the switch has no memory"), "{message}");
    assert!(mend.contains("--pool-units"), "{mend}");
    assert_eq!(diagnosis.report["not_checked"], serde_json::json!(["heartbeat"]));
}

#[test]
fn ranks_that_a_job_waits_for_are_named() {
    let switch = switch_with(|_| {});
    let address = switch.address().to_string();
    let rank = |rank| {
        let config = SessionConfig::new(address.clone(), "half", rank, 2);
        thread::spawn(move || Session::connect(config).expect("admitted"))
    };
    let first = rank(0);
    let until = Instant::now() + HANG;
    let gathers = || {
        let status = switch_status(&address, HANG).expect("a switch");
        status.jobs.iter().any(|job| matches!(job.state, JobStatusState::Gathering { .. }))
    };
    while !gathers() {
        assert!(Instant::now() < until, "the first rank never joins");
    }
    let diagnosis = Diagnosis::of(&address);
    let (verdict, message, mend) = diagnosis.finding("jobs");
    assert_eq!((diagnosis.status, verdict), (Some(0), "warning"), "{message}");
    assert!(message.contains("\"half\" has 1 of 2 ranks and waits for rank 1"), "{message}");
    assert!(mend.starts_with("start rank 1"), "{mend}");

    let second = rank(1);
    let _sessions = [first, second].map(|rank| rank.join().expect("no panic"));
    let complete = Diagnosis::of(&address);
    assert_eq!(complete.finding("jobs").1, "one runs; none waits for ranks to join");
}

#[test]
fn help_has_examples_and_tells_the_exit_statuses() {
    let help = command(&["--help"]).output().expect("it runs");
    let text = String::from_utf8_lossy(&help.stdout);
    assert!(help.status.success() && text.contains("Examples:") && text.contains("Exit status:"), "{text}");
    assert_eq!(command(&["--timeout", "0"]).output().expect("it runs").status.code(), Some(2));
}
