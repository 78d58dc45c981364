//! Serialisation, propagation, MTU.

use std::time::Duration;

use fanin_sim::net::{DropReason, LinkConfig, NodeConfig, Outcome, Parts, Time, Topology};

use crate::support::*;

#[test]
fn a_packet_is_stored_and_forwarded_at_exactly_the_sum_of_its_times() {
    for (rate, picos_per_byte) in [(100 * GBIT, 80), (10 * GBIT, 800), (25 * GBIT, 320)] {
        let parts = Parts::uniform(LinkConfig::new(rate, Duration::from_nanos(700)));
        let mut network = network(Topology::fat_tree(4, 2, &parts).unwrap(), 1);
        let (from, to) = (node(&network, "h0"), node(&network, "h15"));
        let arrivals = sink(&mut network, to);
        source(&mut network, from, vec![Shot::new(Time::from_nanos(3), to, 1500, 9)]);
        assert_eq!(network.run_until(Time::from_millis(1)), Outcome::Idle);
        // Six links through the core; 38 bytes of framing on each.
        let latency = 6 * (1538 * picos_per_byte + 700_000);
        assert_eq!(*arrivals.borrow(), [(Time(3_000 + latency), from.0, 9, false)]);
    }
}

#[test]
fn packets_sent_at_once_follow_each_other_at_the_links_rate() {
    // 3 Gbit/s: a byte takes 2 666.67 ps, and three packets exactly thrice as long as one.
    let parts = Parts::uniform(LinkConfig::new(3 * GBIT, Duration::ZERO));
    let mut network = network(Topology::one_rack(2, &parts).unwrap(), 1);
    let (from, to) = (node(&network, "h0"), node(&network, "h1"));
    let arrivals = sink(&mut network, to);
    source(&mut network, from, (0..3).map(|tag| Shot::new(Time::ZERO, to, 1000, tag)).collect());
    network.run_until(Time::from_millis(1));
    let times: Vec<u64> = arrivals.borrow().iter().map(|arrival| arrival.0.0).collect();
    let exact = |packets: u64| packets * 1038 * 8000 / 3;
    assert_eq!(times, [exact(2), exact(3), exact(4)]);
}

#[test]
fn a_short_packet_takes_the_time_of_the_shortest_frame() {
    let mut network = network(rack(2, NodeConfig::switch().queues[0]), 1);
    let (from, to) = (node(&network, "h0"), node(&network, "h1"));
    let arrivals = sink(&mut network, to);
    source(&mut network, from, vec![Shot::new(Time::ZERO, to, 29, 0)]);
    network.run_until(Time::from_millis(1));
    assert_eq!(arrivals.borrow()[0].0, Time::from_nanos(2 * (84 + 1000)));
}

#[test]
fn a_packet_longer_than_the_mtu_is_an_error_and_counted() {
    let mut parts = Parts::uniform(byte_a_nano().with_mtu(9000));
    parts.core = byte_a_nano().with_mtu(1500);
    let mut network = network(Topology::dumbbell(1, 1, &parts).unwrap(), 1);
    let (from, to) = (node(&network, "l0"), node(&network, "r0"));
    let arrivals = sink(&mut network, to);
    let lengths = [1500, 1501, 9000, 9001, u32::MAX];
    let shots = lengths.iter().map(|bytes| Shot::new(Time::ZERO, to, *bytes, (*bytes).into()));
    source(&mut network, from, shots.collect());
    network.run_until(Time::from_millis(1));
    assert_eq!(tags(&arrivals), [1500]);
    let topology = network.topology();
    let nic = topology.port(from, topology.neighbours(from).next().unwrap().1).unwrap();
    let bottleneck = topology.port(topology.node("s0").unwrap(), fanin_sim::net::LinkId(0)).unwrap();
    assert_eq!(network.port(nic).drops.of(DropReason::TooLong), 2);
    assert_eq!(network.port(bottleneck).drops.of(DropReason::TooLong), 2);
    assert_eq!(network.progress().packets, 0);
}

#[test]
fn a_packet_for_the_own_node_arrives_at_once_and_one_for_nobody_is_counted() {
    let mut network = network(rack(2, NodeConfig::switch().queues[0]), 1);
    let (here, there) = (node(&network, "h0"), node(&network, "h1"));
    let arrivals = sink(&mut network, here);
    let shots = [here, there].map(|to| Shot::new(Time::from_nanos(5), to, 100, 1));
    source(&mut network, here, shots.to_vec());
    network.run_until(Time::from_millis(1));
    assert_eq!(*arrivals.borrow(), [(Time::from_nanos(5), here.0, 1, false)]);
    assert_eq!(network.node(there).drops.of(DropReason::NoListener), 1);
    assert_eq!(network.node(here).sent_packets, 2);
}
