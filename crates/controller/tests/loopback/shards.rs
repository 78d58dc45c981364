//! Jobs in several shards, of any protocol: as many as the root has, and each switch on the way.

use std::net::SocketAddr;

use fanin_controller::{JobStatusState, RackServer, RackServerConfig, Session, switch_status};
use fanin_protocol::{atp, goat};
use fanin_udp::Peer;

use super::atp::{again, summing_with};
use super::away::{self, goes_on_without, ranks};
use super::*;

fn root(name: &str, shards: usize) -> SwitchServer {
    switch_with(|config| (config.protocol, config.shards) = (protocol(name), shards))
}

fn rack_config(name: &str, listen: SocketAddr, upstream: SocketAddr, shards: u8) -> RackServerConfig {
    let mut config = RackServerConfig::new(protocol(name), listen, upstream.to_string());
    config.rate_bps = Some(1_000_000_000);
    config.memory.shards = shards;
    config
}

fn rack(name: &str, upstream: SocketAddr, shards: u8) -> RackServer {
    let config = rack_config(name, ([127, 0, 0, 1], 0).into(), upstream, shards);
    RackServer::start(config).expect("a free port")
}

/// Sums that differ by rank and place, so long that each shard has a part of them.
fn sums_are_exact(name: &str, sessions: &[Session], seed: i32) {
    let (length, count) = (400_003, sessions.len() as i32);
    let value = |rank: i32, i: i32| rank * 1_000_003 + i * 7 + seed;
    let of_rank = |rank: i32| (0..length).map(|i| value(rank, i)).collect();
    let submitted: Vec<_> =
        (0..count).zip(sessions).map(|(rank, session)| submit(session, of_rank(rank), Op::Sum)).collect();
    let expected: Vec<i32> = (0..length).map(|i| (0..count).map(|rank| value(rank, i)).sum()).collect();
    for all_reduce in submitted {
        assert!(all_reduce.wait().expect("a sum") == expected, "{name}");
    }
    away::sums_are_exact(name, sessions, seed);
}

/// The shards of the only job.
pub(super) fn shards_of(root: &SwitchServer) -> u8 {
    job(root).1
}

/// The generation and the shards of the only job.
fn job(root: &SwitchServer) -> (u16, u8) {
    let status = switch_status(&root.address().to_string(), HANG).expect("a status");
    let [job] = &status.jobs[..] else { panic!("{status:?}") };
    let JobStatusState::Running { generation, shards, .. } = job.state else { panic!("{status:?}") };
    (generation.0, shards)
}

#[test]
fn a_job_has_as_many_shards_as_each_machine_on_its_ways_has() {
    for name in ["switchml", "atp", "goat"] {
        let root = root(name, 3);
        sums_are_exact(name, &ranks(name, &[root.address(); 2]), 1);
        let spine = rack(name, root.address(), 4);
        let racks = [rack(name, spine.address(), 3), rack(name, root.address(), 2)];
        let at = [racks[0].address(), racks[0].address(), racks[1].address(), spine.address()];
        let sessions = ranks(name, &at);
        assert_eq!(job(&root), (0, 2), "{name}");
        // A window in each of them.
        match name {
            "atp" => assert_eq!(terms::<atp::RankTerms>(&sessions[0]).windows, 2),
            "goat" => assert_eq!(terms::<goat::RankTerms<Peer>>(&sessions[0]).windows, 2),
            _ => {}
        }
        (2..5).for_each(|seed| sums_are_exact(name, &sessions, seed));
        let status = switch_status(&racks[0].address().to_string(), HANG).expect("a status");
        let own = &status.relays[1];
        assert!(own.jobs[0].aggregations > 0, "{name}: {own:?}");
    }
}

#[test]
fn a_job_keeps_its_shards_where_a_switch_of_few_of_them_is_gone_around() {
    for name in ["switchml", "atp", "goat"] {
        let root = root(name, 3);
        let (away, stays) = (rack(name, root.address(), 2), rack(name, root.address(), 3));
        let sessions = ranks(name, &[away.address(), away.address(), stays.address(), stays.address()]);
        goes_on_without(away, name, &root, &sessions);
        assert_eq!(job(&root), (1, 2), "{name}");
    }
}

#[test]
fn sums_go_on_where_a_rack_of_several_shards_is_started_again() {
    for name in ["switchml", "atp", "goat"] {
        let root = root(name, 2);
        let first = rack(name, root.address(), 2);
        let at = first.address();
        let sessions = ranks(name, &[at, at, root.address()]);
        let mut running = Some(first);
        summing_with(
            |round| sums_are_exact(name, &sessions, round),
            || {
                drop(running.take());
                running = Some(again(|| RackServer::start(rack_config(name, at, root.address(), 4))));
                wait_until(at, "it did not learn", |status| !status.relays[0].jobs.is_empty());
            },
        );
        sums_are_exact(name, &sessions, 9);
        assert_eq!(job(&root), (0, 2), "{name}");
    }
}
