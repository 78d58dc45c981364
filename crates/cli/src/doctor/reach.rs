//! From a name to a switch that answers over TCP.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use fanin_controller::{Probe, SessionError, SwitchStatus, Trust, resolve_switch};
use fanin_wire::VERSION;

use super::finding::{Check, Finding};
use super::stranger;
use crate::arguments::SWITCH_DEFAULT;

const OURS: &str = env!("CARGO_PKG_VERSION");

/// The switch's address, and why it is this one: argument before environment before default.
pub(super) fn choose(argument: Option<&str>, environment: Option<&str>) -> (String, Finding) {
    let (switch, why) = match (argument, environment) {
        (Some(argument), Some(other)) if other != argument => {
            (argument, format!("it was given as --switch, which overrules FANIN_SWITCH={other:?}"))
        }
        (Some(argument), _) => (argument, "it was given as --switch".into()),
        (None, Some(environment)) => (environment, "FANIN_SWITCH says so, and no --switch was given".into()),
        (None, None) => {
            (SWITCH_DEFAULT, "it is the default, with neither --switch nor FANIN_SWITCH given".into())
        }
    };
    (switch.into(), Finding::ok(Check::Switch, format!("{switch}: {why}")))
}

/// Nobody named a switch, and there is no need of one.
pub(super) fn none_chosen() -> Finding {
    Finding::ok(
        Check::Switch,
        format!(
            "none was named (--switch, FANIN_SWITCH), and none listens at {SWITCH_DEFAULT}: in torch's groups the first rank of each \
             machine hosts a service"
        ),
    )
}

/// Looks the name up: `host:port`, its addresses, and the finding.
pub(super) fn resolve(
    switch: &str,
    patience: Duration,
) -> Result<(String, Vec<SocketAddr>, Finding), Finding> {
    let (name, addresses) = resolve_switch(switch, patience).map_err(|error| match error {
        SessionError::Address { .. } => {
            Finding::problem(Check::Name, error.to_string(), "export FANIN_SWITCH=HOST:4800")
        }
        _ => Finding::problem(
            Check::Name,
            format!("{switch}: {error}"),
            format!("getent hosts {}; then add the name to /etc/hosts, or give the address", host(switch)),
        ),
    })?;
    let finding = names(&name, &addresses);
    Ok((name, addresses, finding))
}

fn names(name: &str, addresses: &[SocketAddr]) -> Finding {
    if name.parse::<SocketAddr>().is_ok() {
        return Finding::ok(Check::Name, format!("{name} is an address; there is no name to look up"));
    }
    let host = host(name);
    let list: Vec<_> = addresses.iter().map(|address| address.ip().to_string()).collect();
    let list = list.join(", ");
    if host != "localhost" && addresses.iter().any(|address| address.ip().is_loopback()) {
        // As Debian's installer writes it; ranks on other machines then look for the switch in the
        // wrong place.
        return Finding::warning(
            Check::Name,
            format!("{host} is {list}: this machine itself, for nobody else"),
            format!("remove {host} from the 127.0.x.x line of /etc/hosts, or give the switch's address"),
        );
    }
    Finding::ok(Check::Name, format!("{host} is {list}"))
}

fn host(switch: &str) -> &str {
    switch.rsplit_once(':').map_or(switch, |(host, _)| host)
}

/// Reaches the switch over TCP. The address is the one that took the connection, or else the first.
pub(super) fn control(
    name: &str,
    addresses: &[SocketAddr],
    patience: Duration,
    trust: &Trust,
) -> (SocketAddr, Vec<Finding>, Option<Probe>) {
    // Looking a name up gives one address at least.
    let mut address = addresses[0];
    let mut refusals = Vec::new();
    // An address behind which packets vanish must not keep us from the next.
    let share = patience / u32::try_from(addresses.len()).unwrap_or(u32::MAX);
    let mut connected = false;
    for candidate in addresses {
        match TcpStream::connect_timeout(candidate, share.max(Duration::from_millis(1))) {
            Ok(_) => {
                (address, connected) = (*candidate, true);
                break;
            }
            Err(error) => refusals.push((*candidate, error)),
        }
    }
    if !connected {
        return (address, vec![unreachable(&refusals)], None);
    }
    match Probe::open(name, patience, trust) {
        Ok(probe) => {
            let address = probe.address();
            let message = format!(
                "{address} takes connections and answers as a switch; handshake {:.2?}",
                probe.handshake()
            );
            (address, vec![Finding::ok(Check::Tcp, message)], Some(probe))
        }
        Err(error) => (address, vec![not_a_switch(address, &error, patience)], None),
    }
}

/// Nobody took the connection.
fn unreachable(refusals: &[(SocketAddr, io::Error)]) -> Finding {
    let Some((address, error)) = refusals.first() else {
        return Finding::problem(Check::Tcp, "there is no address to connect to", "fanin switch");
    };
    let (ip, port) = (address.ip(), address.port());
    let listen = if ip.is_loopback() { *address } else { SocketAddr::new([0; 4].into(), port) };
    let (what, mend) = match error.kind() {
        io::ErrorKind::ConnectionRefused => (
            format!("nobody listens on TCP {address}: the machine answers, but no switch runs there"),
            format!("fanin switch --listen {listen} (on {ip})"),
        ),
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => (
            format!("TCP {address} does not answer: the machine is down, or a firewall drops what comes"),
            format!("ping {ip}; on {ip}: {}", open_port(port, "tcp")),
        ),
        _ => (format!("TCP {address}: {error}"), format!("ip route get {ip}")),
    };
    let others = match refusals.len() {
        1 => String::new(),
        n => format!(" (and {} more addresses of the name)", n - 1),
    };
    Finding::problem(Check::Tcp, what + &others, mend)
}

/// The commands that usually open a port.
pub(super) fn open_port(port: u16, protocol: &str) -> String {
    format!("ufw allow {port}/{protocol}, or firewall-cmd --add-port={port}/{protocol}")
}

/// Somebody took the connection, but a session could not use it.
fn not_a_switch(address: SocketAddr, error: &SessionError, patience: Duration) -> Finding {
    match error {
        SessionError::ProtocolVersionMismatch { .. } => Finding::problem(
            Check::Version,
            format!("{error} (here is fanin {OURS})"),
            "install the same wheel on the switch and on every rank (`make wheel` in a clone of fanin builds it)",
        ),
        SessionError::NotASwitch { cause, .. } => {
            let who = match stranger::introduce(address, patience) {
                Some(words) => format!("it says {words}"),
                None => format!("it says nothing ({cause})"),
            };
            Finding::problem(
                Check::Tcp,
                format!("{address} takes connections, but is no fanin switch: {who}"),
                format!(
                    "give the switch's port (--switch {}:4800), or on {0}: ss -ltnp 'sport = :{}'",
                    address.ip(),
                    address.port()
                ),
            )
        }
        SessionError::Untrusted { .. } => Finding::problem(
            Check::Tcp,
            error.to_string(),
            "export FANIN_SECRET_FILE or FANIN_TLS_CA as the switch has it (docs/security.md)",
        ),
        _ => lost(error),
    }
}

/// A switch that answered before does not any more.
pub(super) fn lost(error: &SessionError) -> Finding {
    Finding::problem(Check::Tcp, error.to_string(), "fanin status; and look at the switch's log")
}

/// Versions of both sides, and the kernel's.
pub(super) fn version(status: &SwitchStatus) -> Finding {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let kernel = match kernel.trim() {
        "" => String::new(),
        kernel => format!("; kernel {kernel} here"),
    };
    if status.version == OURS {
        return Finding::ok(
            Check::Version,
            format!("fanin {OURS}, wire version {VERSION}, on both sides{kernel}"),
        );
    }
    // The wire version decides whether they understand each other, and it was compared when the
    // connection opened.
    Finding::warning(
        Check::Version,
        format!(
            "fanin {} on the switch, {OURS} here, both with wire version {VERSION}{kernel}",
            status.version
        ),
        "install the same wheel on the switch and on every rank (`make wheel` in a clone of fanin builds it)",
    )
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::*;

    #[test]
    fn the_argument_wins_over_the_environment_over_the_default_and_the_finding_says_so() {
        let chosen = |argument, environment| {
            let (switch, finding) = choose(argument, environment);
            (switch, finding.message)
        };
        let (switch, why) = chosen(Some("a:1"), Some("b:2"));
        assert!(switch == "a:1" && why.contains("overrules FANIN_SWITCH=\"b:2\""), "{why}");
        let (switch, why) = chosen(None, Some("b:2"));
        assert!(switch == "b:2" && why.contains("FANIN_SWITCH says so"), "{why}");
        let (switch, why) = chosen(None, None);
        assert!(switch == SWITCH_DEFAULT && why.contains("default"), "{why}");
    }

    #[test]
    fn a_name_that_means_only_this_machine_is_a_warning() {
        let loopback = [SocketAddr::from(([127, 0, 1, 1], 4800))];
        assert_eq!(names("gpu7:4800", &loopback).verdict, Verdict::Warning);
        assert_eq!(names("localhost:4800", &loopback).verdict, Verdict::Ok);
        assert_eq!(names("gpu7:4800", &[([10, 0, 0, 7], 4800).into()]).verdict, Verdict::Ok);
        assert_eq!(names("127.0.0.1:4800", &loopback).verdict, Verdict::Ok);
    }

    #[test]
    fn silence_and_refusal_are_mended_differently() {
        let refusals = |kind| [(SocketAddr::from(([10, 0, 0, 9], 4800)), io::Error::from(kind))];
        let refused = unreachable(&refusals(io::ErrorKind::ConnectionRefused));
        assert_eq!(refused.mend.as_deref(), Some("fanin switch --listen 0.0.0.0:4800 (on 10.0.0.9)"));
        let silent = unreachable(&refusals(io::ErrorKind::TimedOut));
        assert!(
            silent.message.contains("firewall") && silent.mend.is_some_and(|mend| mend.contains("4800/tcp"))
        );
    }

    #[test]
    fn another_wire_version_is_a_problem_and_another_package_a_warning() {
        let error = SessionError::ProtocolVersionMismatch { switch: "box:4800".into(), ours: 1, theirs: 2 };
        let finding = not_a_switch(([10, 0, 0, 9], 4800).into(), &error, Duration::from_secs(1));
        assert_eq!((finding.check, finding.verdict), (Check::Version, Verdict::Problem));
        assert!(finding.message.contains("wire version 2, this process 1"), "{}", finding.message);
        let status = |version: &str| SwitchStatus {
            rate_bps: None,
            version: version.into(),
            wire_version: 1,
            shards: 1,
            pool_units: 1,
            pool_free: 1,
            jobs: vec![],
            protocol: "switchml".into(),
            relays: vec![],
            outdated: 0,
            unplanned: 0,
        };
        assert_eq!(version(&status("999.0.0")).verdict, Verdict::Warning);
        assert_eq!(version(&status(OURS)).verdict, Verdict::Ok);
    }
}
