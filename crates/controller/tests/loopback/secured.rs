//! Packets that are authenticated or encrypted: by every protocol, past somebody in between who reads and changes them.

use std::collections::BTreeMap;

use fanin_controller::{JobStatusState, RackServer, RackServerConfig};
use fanin_protocol::control::Refusal;
use fanin_wire::{LossBound, PREAMBLE_BYTES, SEALED_HEAD_BYTES, Security};

use super::between::Between;
use super::http::fetch;
use super::*;

/// A way on which jobs are summed: what must live as long, where each of three ranks joins, and the
/// service whose packets pass somebody in between.
struct Way {
    _services: (SwitchServer, Option<RackServer>),
    at: Vec<SocketAddr>,
    between: Between,
    /// Whose metrics count what was changed: both ends of what is between.
    ends: Vec<SocketAddr>,
}

/// What ranks ask for, and its services serve: a loss bound alone says that a job is DLCP's.
fn protocol_of(name: &str) -> &'static dyn OnSockets {
    match name {
        "atp" | "goat" => protocol(name),
        _ => protocol("switchml"),
    }
}

fn way(name: &str) -> Way {
    let protocol = protocol_of(name);
    let root = switch_with(|config| config.protocol = protocol);
    let here = ([127, 0, 0, 1], 0).into();
    let of_root = Between::new(root.address());
    let above = of_root.address.to_string();
    let rack = match name {
        "racks" | "atp" => Some(RackServerConfig::new(protocol, here, above)),
        "goat" => {
            // Switches of GOAT know each other by their addresses, so that nobody passes on what
            // they say to each other.
            let mut config = RackServerConfig::new(protocol, here, root.address().to_string());
            config.memory.aggregators = 4096;
            Some(config)
        }
        _ => None,
    };
    let rack = rack.map(|config| RackServer::start(config).expect("a free port"));
    let (between, at) = match &rack {
        Some(rack) if name == "goat" => {
            let between = Between::new(rack.address());
            let at = vec![between.address; 3];
            (between, at)
        }
        // The last rank joins beside the rack.
        Some(rack) => {
            let at = vec![rack.address(), rack.address(), of_root.address];
            (of_root, at)
        }
        None => {
            let at = vec![of_root.address; 3];
            (of_root, at)
        }
    };
    let ends = rack.iter().map(RackServer::address).chain([root.address()]).collect();
    Way { _services: (root, rack), at, between, ends }
}

/// A rank of a job there.
fn asking(way: &Way, name: &str, rank: u32, security: Security) -> SessionConfig {
    let at = way.at[rank as usize].to_string();
    let mut config = SessionConfig::new(at, format!("{name} {security:?}"), rank, way.at.len() as u32);
    config.protocol = protocol_of(name);
    config.agreed.security = security;
    match name {
        "bfloat16" => config.wire_dtype = Some(WireDtype::Bfloat16),
        "int8" => config.wire_dtype = Some(WireDtype::Int8),
        "int4" => config.wire_dtype = Some(WireDtype::Int4),
        "shared_exponent" => config.wire_dtype = Some(WireDtype::SharedExponent),
        "dlcp" => {
            config.agreed.loss_bound = LossBound::from_millionths(10_000).expect("below one");
            config.paths = 2;
        }
        _ => {}
    }
    config
}

fn ranks(way: &Way, name: &str, security: Security) -> Vec<Session> {
    let connecting: Vec<_> = (0..way.at.len() as u32)
        .map(|rank| {
            let config = asking(way, name, rank, security);
            thread::spawn(move || Session::connect(config))
        })
        .collect();
    connecting.into_iter().map(|rank| rank.join().expect("no panic").expect("admitted")).collect()
}

/// What the integers of a rank begin with again and again, as bytes: four of them in a row are in no packet by chance.
const PATTERN: [i32; 4] = [0x5ead_beef, 0x1bad_cafe, 0x0dd_ba11, 0x5ca1_ab1e];

/// Sums integers, and floats that every way of travelling keeps; DLCP may lose some of the latter, but not change any.
fn sums_are_right(sessions: &[Session], may_lose: bool) {
    let count = sessions.len() as i32;
    let integers: Vec<i32> = PATTERN.iter().copied().cycle().take(40_000).collect();
    let submitted: Vec<_> =
        sessions.iter().map(|session| submit(session, integers.clone(), Op::Sum)).collect();
    let sums: Vec<i32> = integers.iter().map(|value| value.wrapping_mul(count)).collect();
    for all_reduce in submitted {
        // ATP's and GOAT's integers saturate; these are far too large for that not to show.
        let saturated = |value: &i32| {
            (i64::from(*value) * i64::from(count)).clamp(i32::MIN.into(), i32::MAX.into()) as i32
        };
        let got = all_reduce.wait().expect("a sum");
        assert!(got == sums || got == integers.iter().map(saturated).collect::<Vec<_>>());
    }
    let floats = vec![1.0f32; 40_000];
    let submitted: Vec<_> = sessions.iter().map(|session| submit(session, floats.clone(), Op::Sum)).collect();
    for all_reduce in submitted {
        let sums = all_reduce.wait().expect("a sum");
        let is_right = |sum: &f32| (sum - count as f32).abs() < 1e-3 || may_lose && *sum == 0.0;
        assert!(sums.iter().all(is_right));
    }
}

/// Packets that the services dropped because they were not authentic.
fn forged(way: &Way) -> u64 {
    let count = |at: &SocketAddr| -> u64 {
        let metrics = fetch(*at, "/metrics");
        let forged = metrics.lines().filter(|line| line.contains("\"forged\"") && !line.starts_with('#'));
        forged.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>() as u64
    };
    way.ends.iter().map(count).sum()
}

/// Whether somebody who reads packets sees what ranks sent.
fn is_readable(packets: &[Vec<u8>]) -> bool {
    let pattern: Vec<u8> = PATTERN.iter().flat_map(|value| value.to_le_bytes()).collect();
    packets.iter().any(|packet| packet.windows(pattern.len()).any(|window| window == pattern))
}

const WAYS: [&str; 9] =
    ["native", "shared_exponent", "bfloat16", "int8", "int4", "racks", "dlcp", "atp", "goat"];

#[test]
fn who_stands_between_changes_no_sum_of_any_protocol_and_reads_none_that_is_encrypted() {
    for name in WAYS {
        for security in [Security::Authenticate, Security::Encrypt] {
            let way = way(name);
            let sessions = ranks(&way, name, security);
            way.between.changes_one_of(23);
            // Half as many packets take twice as many sums to have one in 23 changed as often.
            for _ in 0..if name == "int4" { 6 } else { 3 } {
                sums_are_right(&sessions, name == "dlcp");
            }
            let heard = way.between.heard();
            assert!(heard.len() > 500, "{name}: {} packets passed", heard.len());
            assert!(forged(&way) > 0, "{name} {security:?}: no service saw that packets were changed");
            let at_ranks: u64 = sessions.iter().map(|session| session.io_statistics().forged).sum();
            assert!(at_ranks > 0, "{name} {security:?}: no rank saw it");
            assert_eq!(is_readable(&heard), security == Security::Authenticate, "{name} {security:?}");
            let status = switch_status(&way.ends[way.ends.len() - 1].to_string(), HANG).expect("a status");
            let JobStatusState::Running { security: said, .. } = status.jobs[0].state else { panic!() };
            assert_eq!(said, security);
        }
    }
}

/// The same somebody changes sums where headers are tagged alone: `docs/security.md` says so, and
/// this is what the other tests would not see.
#[test]
fn who_stands_between_changes_sums_where_headers_are_tagged_alone() {
    let way = way("native");
    let sessions = ranks(&way, "native", Security::Tag);
    way.between.changes_one_of(23);
    let ones = || vec![1.0f32; 400_000];
    let submitted: Vec<_> = sessions.iter().map(|session| submit(session, ones(), Op::Sum)).collect();
    let sums: Vec<_> = submitted.into_iter().map(|sum| sum.wait().expect("a sum")).collect();
    assert!(sums.iter().flatten().any(|sum| *sum != 3.0));
}

/// A rack that is started again has the key of a job that goes on.
#[test]
fn no_nonce_is_used_twice_under_a_key_also_when_a_switch_is_started_again() {
    let root = switch();
    let upstream = root.address().to_string();
    let rack = RackServer::start(RackServerConfig::new(
        protocol("switchml"),
        ([127, 0, 0, 1], 0).into(),
        &*upstream,
    ));
    let rack = rack.expect("a free port");
    let (address, between) = (rack.address(), Between::new(rack.address()));
    let connecting: Vec<_> = (0..2)
        .map(|rank| {
            let mut config = SessionConfig::new(between.address.to_string(), "again", rank, 2);
            config.agreed.security = Security::Encrypt;
            thread::spawn(move || Session::connect(config))
        })
        .collect();
    let sessions = connecting.into_iter().map(|rank| rank.join().expect("no panic").expect("admitted"));
    let sessions: Vec<_> = sessions.collect();
    sums_are_right(&sessions, false);
    let mut running = Some(rack);
    for _ in 0..2 {
        drop(running.take());
        let config = RackServerConfig::new(protocol("switchml"), address, &*upstream);
        running = Some(super::atp::again(|| RackServer::start(config.clone())));
        sums_are_right(&sessions, false);
    }
    let mut nonces = BTreeMap::new();
    for packet in between.heard() {
        let nonce = packet[PREAMBLE_BYTES..SEALED_HEAD_BYTES].to_vec();
        // A switch sends one result to several.
        let before = nonces.insert(nonce, packet.clone());
        assert!(before.is_none_or(|before| before == packet), "{packet:02x?}");
    }
    assert!(nonces.len() > 500, "{} packets passed", nonces.len());
}

#[test]
fn ranks_that_ask_for_another_security_are_all_told() {
    let switch = switch();
    let ask = |rank, security| {
        let mut config = config(&switch, "unlike", rank, 2);
        config.agreed.security = security;
        thread::spawn(move || Session::connect(config))
    };
    let asked = [ask(0, Security::Encrypt), ask(1, Security::Authenticate)];
    for rank in asked {
        let error = rank.join().expect("no panic").expect_err("they do not agree");
        let SessionError::JoinRefused { reason: Refusal::Mismatch { field, asked, job_has, .. }, .. } =
            &error
        else {
            panic!("{error}")
        };
        assert!(field.starts_with("security ("), "{error}");
        let mut named = [&**asked, &**job_has];
        named.sort_unstable();
        assert_eq!(named, [Security::Authenticate, Security::Encrypt].map(Security::name), "{error}");
        assert!(error.to_string().contains("FANIN_SECURITY"), "{error}");
    }
}
