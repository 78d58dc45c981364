//! ATP: racks of ranks, their switches and a server, and each of them that goes away.

use std::net::SocketAddr;

use fanin_controller::{AtpSwitchServer, AtpSwitchServerConfig, ChainError};
use fanin_protocol::control::{Protocol, Ranks, Refusal};
use fanin_wire::{WireDtype, WorkerId};

use super::*;

fn server_with(change: impl FnOnce(&mut SwitchServerConfig)) -> SwitchServer {
    switch_with(|config| {
        config.protocol = Protocol::Atp;
        change(config);
    })
}

fn server() -> SwitchServer {
    server_with(|_| {})
}

fn rack_with(upstream: SocketAddr, change: impl FnOnce(&mut AtpSwitchServerConfig)) -> AtpSwitchServer {
    let mut config = AtpSwitchServerConfig::new(([127, 0, 0, 1], 0).into(), upstream.to_string());
    change(&mut config);
    AtpSwitchServer::start(config).expect("a free port")
}

fn rack(upstream: SocketAddr) -> AtpSwitchServer {
    rack_with(upstream, |_| {})
}

/// A rank for each of the switches (or the server) that it is to ask.
fn ranks(job: &str, at: &[SocketAddr]) -> Vec<Session> {
    let world_size = at.len() as u32;
    let connecting: Vec<_> = (0..world_size)
        .zip(at)
        .map(|(rank, switch)| {
            let mut config = SessionConfig::new(switch.to_string(), job, rank, world_size);
            config.protocol = Protocol::Atp;
            thread::spawn(move || Session::connect(config))
        })
        .collect();
    connecting.into_iter().map(|rank| rank.join().expect("no panic").expect("admitted")).collect()
}

/// Sums tensors that differ by rank and place, of a length that fills many fragments and the last one in part.
fn sums_are_exact(sessions: &[Session], seed: i32) {
    let (length, count) = (100_003, sessions.len() as i32);
    let value = |rank: i32, i: i32| rank * 1_000_003 + i * 7 + seed;
    let integers: Vec<_> = (0..count)
        .zip(sessions)
        .map(|(rank, session)| submit(session, (0..length).map(|i| value(rank, i)).collect(), Op::Sum))
        .collect();
    // Whole numbers, so that the sums are known to the bit: they stay far below what float32 tells apart.
    let float = |rank: i32, i: i32| ((i + rank) % 97) as f32;
    let floats: Vec<_> = (0..count)
        .zip(sessions)
        .map(|(rank, session)| submit(session, (0..length).map(|i| float(rank, i)).collect(), Op::Sum))
        .collect();
    let expected: Vec<i32> = (0..length).map(|i| (0..count).map(|rank| value(rank, i)).sum()).collect();
    for all_reduce in integers {
        assert!(all_reduce.wait().expect("a sum") == expected);
    }
    let expected: Vec<f32> = (0..length).map(|i| (0..count).map(|rank| float(rank, i)).sum()).collect();
    let mut bits = None;
    for all_reduce in floats {
        let sums = all_reduce.wait().expect("a sum");
        assert!(sums.iter().zip(&expected).all(|(sum, expected)| (sum - expected).abs() < 1e-3));
        let same: Vec<u32> = sums.iter().map(|sum| sum.to_bits()).collect();
        assert!(*bits.get_or_insert(same.clone()) == same, "every rank has the same bits");
    }
}

#[test]
fn one_rack_sums_exactly() {
    let server = server();
    let rack = rack(server.address());
    let sessions = ranks("a", &[rack.address(); 3]);
    sums_are_exact(&sessions, 1);
    sums_are_exact(&sessions, 2);
}
