//! Several servers of a job, each behind switches of its own: ATP §A.5, and racks of SwitchML.

use std::net::SocketAddr;

use fanin_controller::{RackServer, RackServerConfig, ServiceConfig, Session, SessionError};
use fanin_protocol::control::Refusal;
use fanin_wire::WireDtype;

use super::away::{goes_on_without, sums_are_exact};
use super::*;

/// A root of the protocol, and a switch before it.
fn chain(name: &str) -> (SwitchServer, RackServer) {
    let root = switch_with(|config| config.protocol = protocol(name));
    let config =
        RackServerConfig::new(protocol(name), ([127, 0, 0, 1], 0).into(), root.address().to_string());
    let rack = RackServer::start(config).expect("a free port");
    (root, rack)
}

/// A rank that shares its tensors among these services.
fn config(name: &str, services: &[(SocketAddr, f64)], rank: u32, world_size: u32) -> SessionConfig {
    let services = services.iter().map(|(at, share)| (at.to_string(), *share, None, None)).collect();
    SessionConfig {
        services: ServiceConfig::all(services),
        protocol: protocol(name),
        wire_dtype: Some(WireDtype::SharedExponent),
        ..SessionConfig::new("", "shared", rank, world_size)
    }
}

fn ranks(name: &'static str, world_size: u32, at: &[SocketAddr]) -> Vec<Session> {
    let services: Vec<_> = at.iter().map(|at| (*at, 1.0)).collect();
    let connecting: Vec<_> = (0..world_size)
        .map(|rank| {
            let config = config(name, &services, rank, world_size);
            thread::spawn(move || Session::connect(config))
        })
        .collect();
    connecting.into_iter().map(|rank| rank.join().expect("no panic").expect("admitted")).collect()
}

/// Aggregations of the only job at the switch there.
fn aggregations(switch: SocketAddr) -> u64 {
    let status = switch_status(&switch.to_string(), HANG).expect("a status");
    let [job] = &status.relays[0].jobs[..] else { panic!("{status:?}") };
    job.aggregations
}

#[test]
fn servers_have_equal_shares_of_a_job_and_sums_are_exact() {
    for name in ["atp", "switchml"] {
        let chains = [chain(name), chain(name), chain(name)];
        let at = chains.each_ref().map(|(_, switch)| switch.address());
        let sessions = ranks(name, 3, &at);
        for seed in 0..3 {
            sums_are_exact(name, &sessions, seed);
        }
        let counted = at.map(aggregations);
        let (least, most) = (counted.iter().min().expect("three"), counted.iter().max().expect("three"));
        // A share is whole fragments.
        assert!(*least > 0 && most - least <= most / 20, "{name}: {counted:?}");
    }
}

#[test]
fn the_switch_of_one_server_that_stays_away_is_gone_around_and_the_others_sum_on() {
    for name in ["atp", "switchml"] {
        let [(root, away), (_other, stays)] = [chain(name), chain(name)];
        let sessions = ranks(name, 3, &[away.address(), stays.address()]);
        goes_on_without(away, name, &root, &sessions);
    }
}

#[test]
fn ranks_that_share_a_job_in_unlike_ways_are_refused() {
    let [(_first, one), (_second, other)] = [chain("atp"), chain("atp")];
    let at = [one.address(), other.address()];
    let connecting = [[1.0, 1.0], [1.0, 3.0]].map(|shares| {
        let services: Vec<_> = at.into_iter().zip(shares).collect();
        let rank = u32::from(shares[1] > 1.0);
        let config = SessionConfig { join_timeout: HANG, ..config("atp", &services, rank, 2) };
        thread::spawn(move || Session::connect(config).map(drop))
    });
    let answers = connecting.map(|rank| rank.join().expect("no panic").expect_err("unlike"));
    let is_refusal = |error: &SessionError| {
        matches!(error, SessionError::JoinRefused { reason: Refusal::Mismatch { .. }, .. })
    };
    assert!(answers.iter().any(is_refusal), "{answers:?}");
}
