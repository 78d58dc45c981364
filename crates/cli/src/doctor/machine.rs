//! The equipment of this machine: offload, buffers, and the interface.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use fanin_controller::{Route, interface_rate_bps};
use fanin_protocol::control::{self, RATE_DEFAULT_BPS, window_packets};
use fanin_udp::{IoStatistics, SocketProbe};
use fanin_wire::{WireDtype, packet_bytes};

use super::finding::{Check, Finding};

/// Ranks that a switch's buffer is judged for.
const RANKS: u16 = 8;

/// The inputs of a job's window, which is computed as the switch does it.
pub(super) struct Window {
    pub rate_bps: Option<u64>,
    pub rtt: Duration,
    pub shards: u8,
    pub elements: u16,
}

impl Window {
    /// Bytes of receive buffer that keep `ranks` windows from being lost, or cut: double, since the
    /// kernel counts its own bookkeeping against the buffer (see `window_packets`).
    fn buffer_bytes(&self, ranks: u16) -> usize {
        let slots = window_packets(&control::Path {
            rate_bps: self.rate_bps.unwrap_or(RATE_DEFAULT_BPS),
            rtt: self.rtt,
            senders: ranks,
            elements: self.elements,
            wire_dtype: WireDtype::Native,
            shards: self.shards,
            receive_buffer_bytes: usize::MAX,
            portion: None,
        });
        2 * usize::from(ranks) * usize::from(slots) * packet_bytes(usize::from(self.elements))
    }
}

/// Whether a system call carries many packets.
pub(super) fn offload(socket: &SocketProbe, io: Option<&IoStatistics>, route: Option<&Route>) -> Finding {
    let missing = match (socket.send_segments_max > 1, socket.receive_segments_max > 1) {
        (true, true) => None,
        (false, true) => Some("UDP_SEGMENT (Linux 4.18)"),
        (true, false) => Some("UDP_GRO (Linux 5.0)"),
        (false, false) => Some("neither UDP_SEGMENT (Linux 4.18) nor UDP_GRO (Linux 5.0)"),
    };
    if let Some(missing) = missing {
        return Finding::warning(
            Check::Offload,
            format!("this kernel lacks {missing}: each packet is a system call, which costs speed"),
            "uname -r; a kernel of 5.0 or newer (containers such as gVisor lack it at any number)",
        );
    }
    let facts = format!(
        "UDP_SEGMENT cuts up to {} packets, UDP_GRO joins up to {}",
        socket.send_segments_max, socket.receive_segments_max
    );
    let Some(io) = io.filter(|io| io.packets_received > 0) else { return Finding::ok(Check::Offload, facts) };
    if io.trains_sent == io.packets_sent {
        let interface = route.and_then(|route| route.interface.as_deref()).unwrap_or("INTERFACE");
        return Finding::warning(
            Check::Offload,
            format!("{facts}, but {interface} took the probe's packets one by one"),
            format!("sudo ethtool -K {interface} tx on tx-udp-segmentation on"),
        );
    }
    // Packets of other senders may come between ours, so joined ones are told and not demanded.
    let used = format!(
        "; the probe sent {} packets in {} trains and received {} in {}",
        io.packets_sent, io.trains_sent, io.packets_received, io.trains_received
    );
    Finding::ok(Check::Offload, facts + &used)
}

/// Whether a window fits into the buffers that the kernel grants.
pub(super) fn buffers(socket: &SocketProbe, window: &Window) -> Finding {
    let limit = |name: &str| -> Option<usize> {
        std::fs::read_to_string(format!("/proc/sys/net/core/{name}")).ok()?.trim().parse().ok()
    };
    let limits = (limit("rmem_max"), limit("wmem_max"));
    judge_buffers(socket, limits, window.buffer_bytes(1), window.buffer_bytes(RANKS))
}

fn judge_buffers(
    socket: &SocketProbe,
    (rmem_max, wmem_max): (Option<usize>, Option<usize>),
    rank_bytes: usize,
    switch_bytes: usize,
) -> Finding {
    let asked = socket.buffer_bytes_asked;
    let (receive, send) = (socket.receive_buffer_bytes, socket.send_buffer_bytes);
    let known = |limit: Option<usize>| limit.map_or("unknown".into(), mib);
    let privileged = if rmem_max.is_some_and(|limit| receive > limit) {
        " (beyond the limit, as CAP_NET_ADMIN may)"
    } else {
        ""
    };
    let facts = format!(
        "asked {}, got {} to receive and {} to send{privileged}; rmem_max {}, wmem_max {}; a rank needs {}, a switch of \
         {RANKS} ranks {}",
        mib(asked),
        mib(receive),
        mib(send),
        known(rmem_max),
        known(wmem_max),
        mib(rank_bytes),
        mib(switch_bytes),
    );
    let mend = || format!("sudo sysctl -w net.core.rmem_max={asked} net.core.wmem_max={asked}");
    // More than is asked cannot be got; the switch cuts windows to what fits.
    if receive.min(send) < rank_bytes.min(asked) {
        Finding::warning(Check::Buffers, format!("{facts}: packets may be lost here"), mend())
    } else if receive < switch_bytes.min(asked) {
        Finding::warning(Check::Buffers, format!("{facts}: a switch here would make windows smaller"), mend())
    } else {
        Finding::ok(Check::Buffers, facts)
    }
}

/// Bytes for a person.
fn mib(bytes: usize) -> String {
    if bytes < 1 << 20 {
        format!("{} KiB", bytes.div_ceil(1 << 10))
    } else {
        format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
    }
}

/// The interface that packets leave through, and whether a faster one is idle. `said` is what
/// FANIN_RATE says of its link.
pub(super) fn interface(address: SocketAddr, route: Option<&Route>, said: Option<&str>) -> Finding {
    let Some(route) = route else {
        return Finding::problem(
            Check::Interface,
            format!("no route leads to {address}"),
            format!("ip route get {}", address.ip()),
        );
    };
    judge_interface(address, route, said, faster_interface(route))
}

fn judge_interface(
    address: SocketAddr,
    route: &Route,
    said: Option<&str>,
    faster: Option<(String, u64)>,
) -> Finding {
    let Some(name) = &route.interface else {
        return Finding::ok(
            Check::Interface,
            format!("packets to {} leave from {}, whose interface has no name", address.ip(), route.local),
        );
    };
    let rate = match (said, route.rate_bps) {
        (Some(said), _) => format!("carries {said}, as FANIN_RATE says"),
        (None, Some(rate)) => format!("runs at {}", gigabits(rate)),
        (None, None) => "tells no rate".into(),
    };
    let why = if address.ip() == route.local || address.ip().is_loopback() {
        "the switch is on this machine"
    } else {
        "the kernel's route leads there"
    };
    let facts = format!("{name} (source address {}) {rate}; {why}", route.local);
    match faster {
        Some((other, rate)) => Finding::warning(
            Check::Interface,
            format!("{facts}; {other} is faster ({}), but is not on the way", gigabits(rate)),
            format!("give the switch's address in {other}'s network; ip -br address show dev {other}"),
        ),
        None => Finding::ok(Check::Interface, facts),
    }
}

/// The rates of links, from which a plan follows who sums how much.
pub(super) fn rates(switch: &str, own_bps: Option<u64>, its_bps: Option<u64>) -> Finding {
    let silent = match (own_bps, its_bps) {
        (Some(own), Some(its)) => {
            return Finding::ok(
                Check::Rates,
                format!(
                    "this machine's link carries {}, that of {switch} {}: who sums how much follows from that",
                    gigabits(own),
                    gigabits(its)
                ),
            );
        }
        (Some(_), None) => format!("{switch} tells no rate"),
        (None, Some(_)) => "this machine's link tells no rate".into(),
        (None, None) => format!("neither this machine's link nor {switch} tells a rate"),
    };
    let here = own_bps.is_none().then_some("export FANIN_RATE=1gbit on every rank");
    let there = its_bps.is_none().then_some("fanin switch --rate 1gbit");
    let mend: Vec<_> = here.into_iter().chain(there).collect();
    Finding::warning(
        Check::Rates,
        format!("{silent}: {UNTOLD}"),
        format!("{}, with what the link carries", mend.join(", and ")),
    )
}

/// What becomes of a link whose rate nobody tells (`_rates.py`, `_services.py`).
pub(super) const UNTOLD: &str = "ranks measure it as they join (--measure does so now); if that cannot be, it is taken for \
     as fast as the slowest that is known, or all for equal where none is";

/// The rate of the way to a switch as it was measured, beside the rate that was told.
pub(super) fn measured(switch: &str, told_bps: Option<u64>, measured: Result<u64, String>) -> Finding {
    let rate = match measured {
        Ok(rate) => rate,
        Err(cause) => {
            return Finding::warning(
                Check::Rates,
                format!("the way to {switch} could not be measured: {cause}"),
                "let UDP through to every port of it, or tell the rates of the links (FANIN_RATE, fanin switch --rate)",
            );
        }
    };
    // To three digits: it is not more exact.
    let unit = 10_u64.pow(rate.max(1).ilog10().saturating_sub(2));
    let arrived = format!("{} arrive at {switch} from here", gigabits(rate / unit * unit));
    match told_bps {
        Some(told) if rate < told / 2 || told < rate / 2 => Finding::warning(
            Check::Rates,
            format!("{arrived}, and the slower of both links is told to carry {}", gigabits(told)),
            "if nothing else uses the links now, correct FANIN_RATE here or --rate there",
        ),
        _ => Finding::ok(Check::Rates, format!("measured: {arrived}")),
    }
}

/// A physical interface that is up and faster than the one that is used, where both tell their
/// rate.
fn faster_interface(route: &Route) -> Option<(String, u64)> {
    let used = route.rate_bps?;
    let interfaces = std::fs::read_dir("/sys/class/net").ok()?;
    interfaces
        .filter_map(|entry| {
            let (path, name) = {
                let entry = entry.ok()?;
                (entry.path(), entry.file_name().into_string().ok()?)
            };
            (is_up_and_physical(&path)).then_some(())?;
            let rate = interface_rate_bps(&name)?;
            (rate > used).then_some((name, rate))
        })
        .max_by_key(|(_, rate)| *rate)
}

/// Bridges and tunnels tell rates too, which are nobody's.
fn is_up_and_physical(interface: &Path) -> bool {
    let state = std::fs::read_to_string(interface.join("operstate"));
    interface.join("device").exists() && state.is_ok_and(|state| state.trim() == "up")
}

fn gigabits(bps: u64) -> String {
    format!("{} Gbit/s", bps as f64 / 1e9)
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::*;

    const MIB: usize = 1 << 20;

    fn socket(receive_buffer_bytes: usize) -> SocketProbe {
        SocketProbe {
            local: ([10, 0, 0, 5], 1).into(),
            buffer_bytes_asked: 16 * MIB,
            receive_buffer_bytes,
            send_buffer_bytes: 16 * MIB,
            send_segments_max: 64,
            receive_segments_max: 64,
        }
    }

    #[test]
    fn a_window_of_eight_ranks_at_ten_gigabit_needs_six_megabytes() {
        // 256 slots (the bandwidth-delay product of 10 Gbit/s and 250 us), 1448 bytes each, 8
        // ranks, twice.
        let window = Window { rate_bps: None, rtt: Duration::from_micros(50), shards: 1, elements: 352 };
        assert_eq!(window.buffer_bytes(8), 2 * 8 * 256 * 1448);
    }

    #[test]
    fn small_buffers_come_with_the_line_that_enlarges_them() {
        let judge = |receive| judge_buffers(&socket(receive), (Some(212_992), None), MIB, 6 * MIB);
        assert_eq!(judge(8 * MIB).verdict, Verdict::Ok);
        let finding = judge(2 * MIB);
        assert_eq!(finding.verdict, Verdict::Warning);
        assert_eq!(
            finding.mend.as_deref(),
            Some("sudo sysctl -w net.core.rmem_max=16777216 net.core.wmem_max=16777216")
        );
        assert!(judge(MIB / 2).message.ends_with("packets may be lost here"));
        // A window that no buffer holds is cut, and no setting would mend it.
        let long = judge_buffers(&socket(16 * MIB), (None, None), 64 * MIB, 512 * MIB);
        assert_eq!(long.verdict, Verdict::Ok);
    }

    #[test]
    fn offload_that_is_missing_or_not_used_is_a_warning() {
        let mut old = socket(MIB);
        old.receive_segments_max = 1;
        let finding = offload(&old, None, None);
        assert!(finding.verdict == Verdict::Warning && finding.message.contains("UDP_GRO"));

        let io = |trains_sent| IoStatistics {
            packets_sent: 40,
            packets_received: 40,
            trains_sent,
            trains_received: 9,
            ..IoStatistics::default()
        };
        assert_eq!(offload(&socket(MIB), Some(&io(40)), None).verdict, Verdict::Warning);
        assert_eq!(offload(&socket(MIB), Some(&io(5)), None).verdict, Verdict::Ok);
    }

    #[test]
    fn a_faster_interface_that_is_not_used_is_a_warning() {
        let route = Route {
            local: [10, 0, 0, 5].into(),
            interface: Some("eth0".into()),
            rate_bps: Some(1_000_000_000),
        };
        let address = SocketAddr::from(([10, 0, 0, 9], 4800));
        let finding = judge_interface(address, &route, None, None);
        assert!(finding.verdict == Verdict::Ok && finding.message.contains("eth0"), "{}", finding.message);
        let finding = judge_interface(address, &route, None, Some(("eth1".into(), 25_000_000_000)));
        assert_eq!(finding.verdict, Verdict::Warning);
        assert!(finding.message.contains("eth1 is faster (25 Gbit/s)"), "{}", finding.message);
        assert_eq!(interface(address, None, None).verdict, Verdict::Problem);
        let silent = Route { rate_bps: None, ..route };
        assert!(
            judge_interface(address, &silent, None, None)
                .message
                .contains("eth0 (source address 10.0.0.5) tells no rate;")
        );
        let said = judge_interface(address, &silent, Some("1gbit"), None).message;
        assert!(said.contains("carries 1gbit, as FANIN_RATE says"), "{said}");
    }

    #[test]
    fn what_is_measured_is_held_against_what_is_told() {
        let of = |told, rate| measured("box:4800", told, rate);
        for told in [None, Some(1_000_000_000)] {
            let finding = of(told, Ok(987_654_321));
            assert_eq!(finding.verdict, Verdict::Ok);
            assert_eq!(finding.message, "measured: 0.987 Gbit/s arrive at box:4800 from here");
        }
        for rate in [400_000_000, 2_100_000_000] {
            assert_eq!(of(Some(1_000_000_000), Ok(rate)).verdict, Verdict::Warning);
        }
        let finding = of(None, Err("no answer".into()));
        assert_eq!(finding.verdict, Verdict::Warning);
        assert_eq!(finding.message, "the way to box:4800 could not be measured: no answer");
    }

    #[test]
    fn rates_that_nobody_tells_are_named_with_what_is_taken_for_them() {
        let of = |own, its| rates("box:4800", own, its);
        assert_eq!(of(Some(1_000_000_000), Some(10_000_000_000)).verdict, Verdict::Ok);
        for (own, its, who, mend) in [
            (Some(1), None, "box:4800 tells no rate", "fanin switch --rate 1gbit, with"),
            (
                None,
                Some(1),
                "this machine's link tells no rate",
                "export FANIN_RATE=1gbit on every rank, with",
            ),
            (
                None,
                None,
                "neither this machine's link nor box:4800 tells a rate",
                "rank, and fanin switch --rate",
            ),
        ] {
            let finding = of(own, its);
            assert_eq!(finding.verdict, Verdict::Warning);
            assert_eq!(finding.message, format!("{who}: {UNTOLD}"));
            assert!(finding.mend.as_ref().is_some_and(|told| told.contains(mend)), "{finding:?}");
        }
    }
}
