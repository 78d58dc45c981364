//! The findings of the probing job: UDP, the packet's length, and heartbeats.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use fanin_controller::{HEARTBEATS_PER_TIMEOUT, ProbeReport, ProbeSum, SessionError};
use fanin_protocol::control::Refusal;
use fanin_udp::OnSockets;
use fanin_wire::{CHUNK_ELEMENTS_DEFAULT, IP_UDP_BYTES, WireDtype};

use super::finding::{Check, Finding};
use super::reach::open_port;

type Outcome = Result<ProbeReport, SessionError>;

/// MTU of an ordinary Ethernet, and one that passes most tunnels.
const MTU_ETHERNET: usize = 1500;
const MTU_TUNNEL: usize = 1280;

/// Whether packets came back at all, or only short ones.
fn answered(report: &ProbeReport) -> bool {
    report.io.packets_received > 0
}

/// UDP there and back, and the sum.
pub(super) fn udp(outcome: &Outcome, address: SocketAddr) -> Finding {
    let (ip, port) = (address.ip(), address.port());
    let report = match outcome {
        Ok(report) => report,
        Err(error) => return not_admitted(error),
    };
    match &report.sum {
        ProbeSum::Right { took } => {
            let again = match report.worker.retransmissions {
                0 => String::new(),
                n => format!(", {n} packets sent again"),
            };
            let (sent, received) = (report.io.packets_sent, report.io.packets_received);
            Finding::ok(
                Check::Udp,
                format!(
                    "a job of one rank got its sum back from {address} in {took:.2?} ({sent} packets out, {received} in{again})"
                ),
            )
        }
        ProbeSum::Wrong => Finding::problem(
            Check::Udp,
            format!("packets pass, but the sum from {address} is wrong: something on the way changes them"),
            format!("report it, with the output of fanin doctor --json and of fanin version on {ip}"),
        ),
        ProbeSum::Failed(error) => Finding::problem(
            Check::Udp,
            format!("the probing job ended: {error}"),
            "fanin status; and look at the switch's log",
        ),
        // The MTU's finding says that.
        ProbeSum::Missing if answered(report) => {
            Finding::ok(Check::Udp, format!("short packets pass to {address} and back"))
        }
        ProbeSum::Missing if report.io.unreachable > 0 => Finding::problem(
            Check::Udp,
            format!(
                "UDP is blocked while TCP works: {address} refuses UDP packets, as where nobody listens on that port"
            ),
            format!(
                "forward UDP {port} beside TCP (docker run -p {port}:{port}/udp -p {port}:{port}/tcp); on {ip}: {}",
                open_port(port, "udp")
            ),
        ),
        ProbeSum::Missing if report.exchanges_at_switch.is_some_and(|exchanges| exchanges > 0) => {
            Finding::problem(
                Check::Udp,
                format!(
                    "UDP is blocked while TCP works: packets reach {address}, its answers do not come back"
                ),
                format!("let answers in, here: ufw allow proto udp from {ip} port {port}"),
            )
        }
        ProbeSum::Missing => Finding::problem(
            Check::Udp,
            format!("UDP is blocked while TCP works: packets do not reach {address}"),
            format!("on {ip}, and on firewalls between: {}", open_port(port, "udp")),
        ),
    }
}

/// There was no probing job.
fn not_admitted(error: &SessionError) -> Finding {
    let SessionError::JoinRefused { reason, .. } = error else {
        return Finding::problem(Check::Udp, error.to_string(), "fanin status; and look at the switch's log");
    };
    match reason {
        // Jobs that run now are well, so this is no problem of the path.
        Refusal::PoolExhausted { .. } => Finding::warning(
            Check::Udp,
            format!("not checked: the switch has no memory for a probing job ({reason})"),
            "fanin status (which jobs have them); or fanin switch --pool-units N with more",
        ),
        Refusal::TooManyJobs { .. } => Finding::warning(
            Check::Udp,
            format!("not checked: the switch takes no probing job ({reason})"),
            "fanin status; wait until a job ends",
        ),
        // The MTU's finding says that.
        Refusal::MtuTooSmall { .. } => {
            Finding::warning(Check::Udp, "not checked: no packet fits the path's MTU", "mend the MTU first")
        }
        _ => Finding::problem(
            Check::Udp,
            format!("the switch refused a probing job: {reason}"),
            "fanin status; and look at the switch's log",
        ),
    }
}

/// Elements of the longest packet that passes a path.
fn longest(protocol: &dyn OnSockets, mtu: usize) -> Option<usize> {
    let fits = |elements: &usize| bytes(protocol, *elements) + IP_UDP_BYTES <= mtu;
    protocol.limits().packet_elements.iter().rev().copied().find(fits)
}

/// Bytes of a packet of so many elements.
fn bytes(protocol: &dyn OnSockets, elements: usize) -> usize {
    protocol.packet_bytes(elements, WireDtype::Native)
}

/// The chunk length that follows from the MTU, if the MTU is known.
pub(super) fn chunk_elements(
    protocol: &dyn OnSockets,
    mtu: &io::Result<usize>,
    report: Option<&Outcome>,
) -> u16 {
    if let Some(Ok(report)) = report {
        return report.job.elements();
    }
    let elements = mtu.as_ref().ok().and_then(|mtu| longest(protocol, *mtu));
    elements.unwrap_or(CHUNK_ELEMENTS_DEFAULT) as u16
}

/// The path MTU, the chunks that fit it, and whether they pass unfragmented.
pub(super) fn mtu(
    protocol: &dyn OnSockets,
    mtu: &io::Result<usize>,
    address: SocketAddr,
    report: Option<&Outcome>,
) -> Finding {
    let what = if protocol.aggregates() { "fragment" } else { "chunk" };
    let shortest = protocol.limits().packet_elements[0];
    let mtu = match mtu {
        Ok(mtu) => *mtu,
        Err(error) => {
            return Finding::problem(
                Check::Mtu,
                format!("the path to {address} has no MTU: {error}"),
                format!("ip route get {}", address.ip()),
            );
        }
    };
    let Some(elements) = longest(protocol, mtu) else {
        let need = bytes(protocol, shortest) + IP_UDP_BYTES;
        return Finding::problem(
            Check::Mtu,
            format!("MTU {mtu} to {address}: not even the shortest {what} fits, which needs {need}"),
            set_mtu(address, need.max(MTU_TUNNEL)),
        );
    };
    let facts = |elements: usize| {
        format!(
            "MTU {mtu} to {address}: {what}s of {elements} elements, packets of {} bytes",
            bytes(protocol, elements)
        )
    };
    let Some(Ok(report)) = report else {
        return Finding::ok(
            Check::Mtu,
            format!("{} (as the kernel knows it; none was sent)", facts(elements)),
        );
    };
    let admitted = usize::from(report.job.elements());
    match report.sum {
        ProbeSum::Missing if answered(report) => Finding::problem(
            Check::Mtu,
            format!(
                "short packets pass to {address}, full ones of {} bytes do not: a link on the way has an MTU below {mtu}, and \
                 nobody says so",
                bytes(protocol, admitted)
            ),
            set_mtu(address, if mtu > MTU_ETHERNET { MTU_ETHERNET } else { MTU_TUNNEL }),
        ),
        ProbeSum::Right { .. } if elements < admitted => Finding::warning(
            Check::Mtu,
            format!("{}; it was more when the probe began", facts(elements)),
            "fanin doctor (again: the kernel has just learned a smaller MTU)",
        ),
        ProbeSum::Right { .. } => {
            Finding::ok(Check::Mtu, format!("{}, which pass with the DF bit", facts(admitted)))
        }
        _ => Finding::ok(Check::Mtu, format!("{} (as the kernel knows it; none came back)", facts(admitted))),
    }
}

fn set_mtu(address: SocketAddr, mtu: usize) -> String {
    let interface = fanin_controller::route(address).and_then(|route| route.interface);
    format!("sudo ip link set dev {} mtu {mtu}", interface.as_deref().unwrap_or("INTERFACE"))
}

/// Round trips of heartbeats against what the switch puts up with.
pub(super) fn heartbeat(report: &ProbeReport) -> Finding {
    let limit = report.heartbeat_timeout;
    let interval = limit / HEARTBEATS_PER_TIMEOUT;
    let (Some(worst), count) = (report.heartbeats.last().copied(), report.heartbeats.len()) else {
        return Finding::problem(
            Check::Heartbeat,
            "the switch answers no heartbeat; it would expel every rank",
            "fanin status; and look at the switch's log",
        );
    };
    let median = report.heartbeats[count / 2];
    let lost = match report.heartbeats_lost {
        0 => String::new(),
        n => format!(", {n} unanswered"),
    };
    let facts = format!(
        "round trip {median:.2?}, worst of {count} {worst:.2?}{lost}; one goes every {interval:?}, and {limit:?} of silence expel"
    );
    let mend = || {
        let longer = Duration::from_secs(worst.as_secs().saturating_add(1).saturating_mul(10)).max(limit * 2);
        format!("fanin switch --heartbeat-timeout {} (start it with more)", longer.as_secs().max(1))
    };
    if worst >= limit {
        Finding::problem(Check::Heartbeat, facts, mend())
    } else if worst >= interval || report.heartbeats_lost > 0 {
        Finding::warning(Check::Heartbeat, facts, mend())
    } else {
        Finding::ok(Check::Heartbeat, facts)
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::*;
    use fanin_controller::protocols;
    use fanin_protocol::switchml::{JobConfig, SwitchMl};
    use fanin_udp::Membership;
    use fanin_wire::{Generation, JobId, Key, ShardId, WorkerId};

    fn address() -> SocketAddr {
        ([10, 0, 0, 9], 4800).into()
    }

    fn report(sum: ProbeSum) -> ProbeReport {
        ProbeReport {
            job: Membership::of(
                &SwitchMl,
                (
                    JobConfig {
                        id: JobId(1),
                        key: Key::new(1),
                        generation: Generation(0),
                        workers: 1,
                        slots: 8,
                        window: 8,
                        elements: 352,
                        wire_dtype: Default::default(),
                        shard: ShardId(0),
                        resumed: false,
                    },
                    WorkerId(0),
                )
                    .into(),
            ),
            sum,
            io: Default::default(),
            worker: Default::default(),
            exchanges_at_switch: None,
            heartbeat_timeout: Duration::from_secs(5),
            heartbeats: vec![Duration::from_millis(1), Duration::from_millis(2)],
            heartbeats_lost: 0,
        }
    }

    fn refused(reason: Refusal) -> Outcome {
        Err(SessionError::JoinRefused { switch: "box:4800".into(), job: "probe".into(), reason })
    }

    #[test]
    fn each_kind_of_silence_is_told_apart() {
        let silent = || report(ProbeSum::Missing);
        let finding = udp(&Ok(silent()), address());
        assert!(finding.message.contains("do not reach"), "{}", finding.message);

        let mut reached = silent();
        reached.exchanges_at_switch = Some(8);
        let finding = udp(&Ok(reached), address());
        assert!(finding.message.contains("answers do not come back"), "{}", finding.message);

        let mut refused = silent();
        refused.io.unreachable = 3;
        let finding = udp(&Ok(refused), address());
        assert!(finding.message.contains("nobody listens") && finding.verdict == Verdict::Problem);
    }

    #[test]
    fn a_path_that_swallows_only_full_packets_is_a_matter_of_the_mtu() {
        let mut short = report(ProbeSum::Missing);
        short.io.packets_received = 8;
        let short = Ok(short);
        assert_eq!(udp(&short, address()).verdict, Verdict::Ok);
        let finding = mtu(protocols::said("switchml"), &Ok(1500), address(), Some(&short));
        assert_eq!(finding.verdict, Verdict::Problem);
        assert!(finding.message.contains("full ones of 1448 bytes do not"), "{}", finding.message);
    }

    #[test]
    fn an_mtu_without_room_for_a_chunk_says_how_much_is_needed() {
        let finding = mtu(protocols::said("switchml"), &Ok(200), address(), None);
        assert!(finding.verdict == Verdict::Problem && finding.message.contains("needs 216"));
        let finding = mtu(protocols::said("atp"), &Ok(1000), address(), None);
        assert!(finding.verdict == Verdict::Ok && finding.message.contains("fragments of "), "{finding:?}");
        let finding = mtu(protocols::said("atp"), &Ok(300), address(), None);
        assert!(finding.message.contains("the shortest fragment fits, which needs 376"), "{finding:?}");
        let reason = Refusal::MtuTooSmall { mtu: 200, need: 216 };
        assert_eq!(udp(&refused(reason), address()).verdict, Verdict::Warning);
    }

    #[test]
    fn a_full_pool_is_a_check_not_made_and_another_refusal_a_problem() {
        let finding = udp(&refused(Refusal::PoolExhausted { asked: 64, free: 1 }), address());
        assert!(finding.verdict == Verdict::Warning && finding.message.starts_with("not checked"));
        assert_eq!(udp(&refused(Refusal::SwitchStopping), address()).verdict, Verdict::Problem);
    }

    #[test]
    fn heartbeats_are_judged_against_interval_and_limit() {
        let verdict = |worst_ms, lost| {
            let mut report = report(ProbeSum::Missing);
            report.heartbeats = vec![Duration::from_millis(1), Duration::from_millis(worst_ms)];
            report.heartbeats_lost = lost;
            heartbeat(&report).verdict
        };
        assert_eq!(verdict(2, 0), Verdict::Ok);
        assert_eq!(verdict(2, 1), Verdict::Warning);
        assert_eq!(verdict(1000, 0), Verdict::Warning);
        assert_eq!(verdict(5000, 0), Verdict::Problem);
        let mut mute = report(ProbeSum::Missing);
        mute.heartbeats.clear();
        assert_eq!(heartbeat(&mute).verdict, Verdict::Problem);
    }
}
