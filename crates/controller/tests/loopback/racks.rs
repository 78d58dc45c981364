//! Racks of SwitchML (§7): ranks behind racks, racks behind racks, and each of them that goes away.

use std::net::SocketAddr;
use std::thread;

use fanin_controller::{
    ChainError, RackServer, RackServerConfig, Session, SessionConfig, SessionError, switch_status,
};
use fanin_protocol::control::Memory;
use fanin_wire::{Collective, Op, Rank, WireDtype};

use super::atp::{again, summing_with};
use super::{HANG, protocol, submit, switch, switch_with, wait_until};

fn rack_config(listen: SocketAddr, upstream: SocketAddr) -> RackServerConfig {
    RackServerConfig::new(protocol("switchml"), listen, upstream.to_string())
}

fn rack(upstream: SocketAddr) -> RackServer {
    RackServer::start(rack_config(([127, 0, 0, 1], 0).into(), upstream)).expect("a free port")
}

/// A rank for each of the switches that it is to ask.
fn ranks(job: &str, at: &[SocketAddr], wire_dtype: WireDtype) -> Vec<Session> {
    let world_size = at.len() as u32;
    let connecting: Vec<_> = (0..world_size)
        .zip(at)
        .map(|(rank, switch)| {
            let mut config = SessionConfig::new(switch.to_string(), job, rank, world_size);
            config.wire_dtype = Some(wire_dtype);
            thread::spawn(move || Session::connect(config))
        })
        .collect();
    connecting.into_iter().map(|rank| rank.join().expect("no panic").expect("admitted")).collect()
}

/// Sums of every way in which numbers travel: integers, floats in blocks, and few floats as they are.
pub(super) fn sums_are_exact(sessions: &[Session], seed: i32) {
    // Whole numbers, so that each type can hold their sums.
    sums_of_are_exact(sessions, seed, |rank, i| ((i + rank) % 31) as f32);
}

fn sums_of_are_exact(sessions: &[Session], seed: i32, float: impl Fn(i32, i32) -> f32) {
    let (length, count) = (50_003, sessions.len() as i32);
    let value = |rank: i32, i: i32| rank * 1_000_003 + i * 7 + seed;
    let expected: Vec<i32> = (0..length).map(|i| (0..count).map(|rank| value(rank, i)).sum()).collect();
    let submitted: Vec<_> = (0..count)
        .zip(sessions)
        .map(|(rank, session)| submit(session, (0..length).map(|i| value(rank, i)).collect(), Op::Sum))
        .collect();
    for all_reduce in submitted {
        assert!(all_reduce.wait().expect("a sum") == expected);
    }
    for (length, tolerance) in [(length, 2e-2), (100, 0.0)] {
        let submitted: Vec<_> = (0..count)
            .zip(sessions)
            .map(|(rank, session)| submit(session, (0..length).map(|i| float(rank, i)).collect(), Op::Sum))
            .collect();
        let expected: Vec<f32> = (0..length).map(|i| (0..count).map(|rank| float(rank, i)).sum()).collect();
        let mut bits = None;
        for all_reduce in submitted {
            let sums = all_reduce.wait().expect("a sum");
            let is_near =
                |(sum, expected): (&f32, &f32)| (sum - expected).abs() <= tolerance * expected.abs();
            assert!(sums.iter().zip(&expected).all(is_near));
            let same: Vec<u32> = sums.iter().map(|sum| sum.to_bits()).collect();
            assert!(*bits.get_or_insert(same.clone()) == same, "every rank has the same bits");
        }
    }
}

#[test]
fn two_racks_of_two_ranks_sum_under_a_root() {
    let root = switch();
    let racks = [rack(root.address()), rack(root.address())];
    let at = [0, 0, 1, 1].map(|of: usize| racks[of].address());
    for wire_dtype in WireDtype::ALL {
        let sessions = ranks("racks", &at, wire_dtype);
        if wire_dtype == WireDtype::Int4 {
            // A rank's numbers, its rack's and the root's are levels.
            sums_of_are_exact(&sessions, 1, |rank, i| if rank % 2 == 0 { (i % 4) as f32 } else { 0.0 });
        } else {
            sums_are_exact(&sessions, 1);
        }
    }
}

#[test]
fn racks_of_racks_and_ranks_beside_them_sum_in_as_many_shards_as_the_root_has() {
    let root = switch_with(|config| config.shards = 2);
    let rack = |upstream: SocketAddr| {
        let mut config = rack_config(([127, 0, 0, 1], 0).into(), upstream);
        config.memory = Memory { shards: 2, pool_units: 65_536, ..config.memory };
        RackServer::start(config).expect("a free port")
    };
    let spine = rack(root.address());
    let (left, right) = (rack(spine.address()), rack(spine.address()));
    let at = [left.address(), root.address(), right.address(), spine.address(), left.address()];
    let sessions = ranks("levels", &at, WireDtype::SharedExponent);
    sums_are_exact(&sessions, 2);
    let status = switch_status(&left.address().to_string(), HANG).expect("a status");
    let on_the_way: Vec<_> = status.relays.iter().map(|switch| switch.address.clone()).collect();
    assert_eq!(on_the_way, [spine.address(), left.address()].map(|address| address.to_string()));
    assert!(status.relays.iter().all(|switch| switch.jobs[0].aggregations > 0), "{status:?}");
}

#[test]
fn a_rack_that_restarts_learns_its_jobs_and_the_sums_go_on() {
    let root = switch();
    let first = rack(root.address());
    let address = first.address();
    let sessions = ranks("goes on", &[address, address, root.address()], WireDtype::SharedExponent);
    let mut running = Some(first);
    summing_with(
        |round| sums_are_exact(&sessions, round),
        || {
            for _ in 0..3 {
                drop(running.take());
                let config = rack_config(address, root.address());
                let second = again(|| RackServer::start(config.clone()));
                // Nobody joins again: heartbeats alone tell it.
                wait_until(address, "it did not learn", |status| !status.relays[0].jobs.is_empty());
                running = Some(second);
            }
        },
    );
}

#[test]
fn ranks_of_different_racks_that_disagree_are_named_to_all() {
    let root = switch();
    let racks = [rack(root.address()), rack(root.address())];
    let at = [0, 0, 1, 1].map(|of: usize| racks[of].address());
    let sessions = ranks("unlike", &at, WireDtype::SharedExponent);
    // Ranks 2 and 3 agree with each other, and with nobody else.
    let lengths = [10_000, 10_000, 9_999, 9_999];
    let submitted: Vec<_> = sessions
        .iter()
        .zip(lengths)
        .map(|(session, length)| submit(session, vec![1_i32; length], Op::Sum))
        .collect();
    for all_reduce in submitted {
        let error = all_reduce.wait().expect_err("they disagree");
        let SessionError::CollectiveMismatch { first, second } = error else { panic!("{error}") };
        let mut named = [first, second].map(|(rank, Collective { elements, .. })| (rank, elements));
        named.sort();
        assert_eq!(named, [(Rank(0), 10_000), (Rank(2), 9_999)], "one of each rack, the lowest");
    }
}

#[test]
fn a_rack_of_too_little_memory_is_refused_with_the_cure() {
    let root = switch();
    let config = rack_config(([127, 0, 0, 1], 0).into(), root.address());
    let memory = Memory { pool_units: 1, ..config.memory };
    let rack = RackServer::start(RackServerConfig { memory, ..config }).expect("a free port");
    let config = SessionConfig::new(rack.address().to_string(), "refused", 0, 1);
    let error = Session::connect(config).expect_err("refused");
    assert!(matches!(&error, SessionError::Chain { error: ChainError::RouteMismatch { .. }, .. }), "{error}");
    assert!(error.to_string().contains("start it with a larger --pool-units"), "{error}");
}

#[test]
fn a_rack_of_the_other_protocol_is_refused() {
    let root = switch();
    let listen = ([127, 0, 0, 1], 0).into();
    let config = RackServerConfig::new(protocol("atp"), listen, root.address().to_string());
    let rack = RackServer::start(config).expect("a free port");
    let error = Session::connect(SessionConfig::new(rack.address().to_string(), "other", 0, 1));
    let error = error.expect_err("refused");
    let SessionError::Chain {
        error: ChainError::UpstreamUnreachable { switch, upstream, cause, may_come },
        ..
    } = error
    else {
        panic!("{error}")
    };
    assert_eq!((switch, upstream), (rack.address().to_string(), root.address().to_string()));
    assert_eq!((&*cause, may_come), ("it serves switchml, and this switch atp", false));
}
