//! A switch that stays away: its ranks, and the switches below it, go on by the next machine above it.

use std::net::SocketAddr;

use fanin_controller::{JobStatusState, RackServer, RackServerConfig, Session, switch_status};
use fanin_wire::{Generation, WireDtype};

use super::atp::summing_with;
use super::*;

/// A root of the protocol.
fn root(name: &str) -> SwitchServer {
    switch_with(|config| config.protocol = protocol(name))
}

/// A switch of the protocol below that one, at a link that no other switch shares.
fn below(name: &str, upstream: SocketAddr) -> RackServer {
    below_at(name, ([127, 0, 0, 1], 0).into(), upstream)
}

fn below_at(name: &str, listen: SocketAddr, upstream: SocketAddr) -> RackServer {
    let mut config = RackServerConfig::new(protocol(name), listen, upstream.to_string());
    config.rate_bps = Some(1_000_000_000);
    RackServer::start(config).expect("a free port")
}

/// A rank at each of these switches.
pub(super) fn ranks(name: &'static str, at: &[SocketAddr]) -> Vec<Session> {
    let connecting: Vec<_> = (0..at.len() as u32)
        .zip(at)
        .map(|(rank, switch)| {
            let mut config = SessionConfig::new(switch.to_string(), "goes on", rank, at.len() as u32);
            (config.protocol, config.wire_dtype) = (protocol(name), Some(WireDtype::SharedExponent));
            thread::spawn(move || Session::connect(config))
        })
        .collect();
    connecting.into_iter().map(|rank| rank.join().expect("no panic").expect("admitted")).collect()
}

pub(super) fn sums_are_exact(name: &str, sessions: &[Session], seed: i32) {
    match name {
        "switchml" => super::racks::sums_are_exact(sessions, seed),
        _ => super::atp::sums_are_exact(sessions, seed),
    }
}

/// Waits until the only job runs in this generation.
fn in_generation(root: SocketAddr, number: u16) {
    wait_until(root, "the job is not set up again", |status| {
        let [job] = &status.jobs[..] else { return false };
        matches!(job.state, JobStatusState::Running { generation, .. } if generation == Generation(number))
    });
}

/// Stops a switch while ranks sum, until their job is set up again; sums are exact then, too.
pub(super) fn goes_on_without(away: RackServer, name: &str, root: &SwitchServer, sessions: &[Session]) {
    let mut running = Some(away);
    summing_with(
        |round| sums_are_exact(name, sessions, round),
        || {
            drop(running.take());
            in_generation(root.address(), 1);
        },
    );
    sums_are_exact(name, sessions, 2);
}

#[test]
fn ranks_go_on_without_a_switch_that_stays_away() {
    for name in ["atp", "goat", "switchml"] {
        let root = root(name);
        let (away, stays) = (below(name, root.address()), below(name, root.address()));
        let sessions = ranks(name, &[away.address(), away.address(), stays.address(), stays.address()]);
        sums_are_exact(name, &sessions, 1);
        goes_on_without(away, name, &root, &sessions);
        let status = switch_status(&stays.address().to_string(), HANG).expect("a status");
        assert!(status.relays[0].jobs[0].aggregations > 0, "{name}: {status:?}");
    }
}

#[test]
fn switches_go_on_without_the_one_above_them_that_stays_away() {
    for name in ["atp", "goat", "switchml"] {
        let root = root(name);
        let spine = below(name, root.address());
        let racks = [below(name, spine.address()), below(name, spine.address())];
        let at = [&racks[0], &racks[1], &racks[0], &racks[1]].map(RackServer::address);
        let sessions = ranks(name, &at);
        sums_are_exact(name, &sessions, 1);
        goes_on_without(spine, name, &root, &sessions);
        for rack in &racks {
            let status = switch_status(&rack.address().to_string(), HANG).expect("a status");
            let [own] = &status.relays[..] else { panic!("{status:?}") };
            assert_eq!(own.upstream, root.address().to_string());
            assert!(own.jobs.len() == 1 && own.jobs[0].aggregations > 0, "{name}: {own:?}");
        }
    }
}

#[test]
fn a_switch_and_the_one_above_it_that_stay_away_are_both_gone_around() {
    let root = root("atp");
    let spine = below("atp", root.address());
    let (away, stays) = (below("atp", spine.address()), below("atp", spine.address()));
    let sessions = ranks("atp", &[away.address(), away.address(), stays.address()]);
    let mut running = Some((away, spine));
    summing_with(
        |round| sums_are_exact("atp", &sessions, round),
        || {
            drop(running.take());
            // In one step or two: the rank's, and the other switch's.
            wait_until(root.address(), "the job does not go on", |status| {
                let [job] = &status.jobs[..] else { return false };
                matches!(job.state, JobStatusState::Running { generation, .. } if generation.0 > 0)
            });
        },
    );
    sums_are_exact("atp", &sessions, 2);
}

#[test]
fn a_rack_that_was_restarted_goes_around_the_switch_above_it_too() {
    let root = root("atp");
    let spine = below("atp", root.address());
    let rack = below("atp", spine.address());
    let (above, at) = (spine.address(), rack.address());
    let sessions = ranks("atp", &[at, at]);
    sums_are_exact("atp", &sessions, 1);
    drop(rack);
    let rack = below_at("atp", at, above);
    wait_until(at, "it does not learn its job", |status| !status.relays[0].jobs.is_empty());
    sums_are_exact("atp", &sessions, 2);
    goes_on_without(spine, "atp", &root, &sessions);
    let status = switch_status(&rack.address().to_string(), HANG).expect("a status");
    assert_eq!(status.relays[0].upstream, root.address().to_string());
}
