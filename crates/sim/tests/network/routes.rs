//! Which way packets go.

use std::time::Duration;

use fanin_sim::net::{
    Class, ConstantRateConfig, DropReason, LinkConfig, Multipath, Network, NetworkConfig, Parts, TcpConfig,
    Time, Topology,
};

use crate::support::*;

/// Packets that each of the first leaf's uplinks carried.
fn uplinks(network: &Network) -> Vec<u64> {
    let topology = network.topology();
    let leaf = node(network, "leaf0");
    topology
        .neighbours(leaf)
        .filter(|(other, _)| topology.layer(*other) == Some(1))
        .map(|(_, link)| network.port(topology.port(leaf, link).unwrap()).sent_packets)
        .collect()
}

fn leaf_spine(multipath: Multipath, seed: u64) -> Network {
    let parts = Parts::uniform(byte_a_nano());
    let topology = Topology::leaf_spine(2, 4, 8, &parts).unwrap();
    Network::new(topology, NetworkConfig { seed, multipath }).unwrap()
}

#[test]
fn flows_spread_over_equal_paths_and_each_keeps_to_one() {
    let mut network = leaf_spine(Multipath::PerFlow, 5);
    // 8 * 8 * 16 flows of 10 segments: one a flow.
    for flow in 0..1024 {
        let [from, to] = [flow % 8, 8 + flow / 8 % 8].map(|host| node(&network, &format!("h{host}")));
        let flow = network.open_tcp(TcpConfig { segment_bytes: 100, ..TcpConfig::new(from, to) });
        network.write(flow, 1000, None);
    }
    network.run_until(Time::from_millis(100));
    let sent = uplinks(&network);
    assert_eq!(sent.iter().sum::<u64>(), 10_240);
    // 256 flows each; a binomial's standard deviation is 14.
    assert!(sent.iter().all(|packets| packets % 10 == 0 && (2000..3120).contains(packets)), "{sent:?}");
}

#[test]
fn which_flows_meet_differs_between_seeds_and_not_between_runs() {
    let ways = |seed| {
        let mut network = leaf_spine(Multipath::PerFlow, seed);
        let ways: Vec<usize> = (0..8)
            .map(|host| {
                let [from, to] = [host, 8 + host].map(|host| node(&network, &format!("h{host}")));
                let before = uplinks(&network);
                let flow = network.open_tcp(TcpConfig::new(from, to));
                network.write(flow, 1000, None);
                network.run_until(network.time() + Duration::from_millis(1));
                let after = uplinks(&network);
                (0..4).find(|way| after[*way] > before[*way]).expect("it took one of four")
            })
            .collect();
        ways
    };
    assert_eq!(ways(1), ways(1));
    let others: Vec<_> = (2..12).map(ways).collect();
    // Two seeds agree on all eight flows with a chance of one in 65,536.
    assert!(others.iter().all(|other| *other != ways(1)), "{others:?}");
}

#[test]
fn the_hash_of_a_second_layer_does_not_follow_that_of_the_first() {
    // In a fat tree, all flows of one edge switch that meet at one aggregation switch still use
    // both its uplinks.
    let parts = Parts::uniform(byte_a_nano());
    let mut network = network(Topology::fat_tree(4, 2, &parts).unwrap(), 5);
    for flow in 0..400 {
        let [from, to] = [flow % 2, 4 + flow % 12].map(|host| node(&network, &format!("h{host}")));
        let flow = network.open_tcp(TcpConfig { segment_bytes: 100, ..TcpConfig::new(from, to) });
        network.write(flow, 100, None);
    }
    network.run_until(Time::from_millis(100));
    let topology = network.topology();
    for aggregation in ["agg0", "agg1"].map(|name| node(&network, name)) {
        for (core, link) in topology.neighbours(aggregation) {
            if topology.layer(core) == Some(2) {
                let sent = network.port(topology.port(aggregation, link).unwrap()).sent_packets;
                assert!((60..140).contains(&sent), "{sent} of 400 on one of four ways");
            }
        }
    }
}

#[test]
fn spraying_spreads_the_packets_of_one_flow() {
    for (multipath, spreads) in [(Multipath::PerPacket, true), (Multipath::PerFlow, false)] {
        let mut network = leaf_spine(multipath, 5);
        let (from, to) = (node(&network, "h0"), node(&network, "h8"));
        network.start_constant_rate(ConstantRateConfig {
            from,
            to,
            class: Class::default(),
            rate_bps: 8 * GBIT,
            datagram_bytes: 962,
            ecn: false,
        });
        network.run_until(Time::from_millis(4));
        let sent = uplinks(&network);
        let spread = sent.iter().filter(|packets| (850..1150).contains(*packets)).count();
        assert_eq!(spread, if spreads { 4 } else { 0 }, "{sent:?}");
        assert!(sent.iter().sum::<u64>() >= 3990);
    }
}

#[test]
fn packets_take_the_shortest_way_and_hosts_forward_nothing() {
    // Two switches that only a host with two NICs joins: there is no way.
    let mut topology = Topology::new();
    let config = fanin_sim::net::NodeConfig::switch();
    let link = LinkConfig::new(8 * GBIT, Duration::from_micros(1));
    let switches = [0, 1].map(|at| topology.add_switch(format!("s{at}"), 0, config));
    let hosts = [0, 1, 2].map(|at| topology.add_host(format!("h{at}"), config));
    for (host, switch) in [(0, 0), (1, 1), (2, 0), (2, 1)] {
        topology.add_link(hosts[host], switches[switch], link);
    }
    let mut network = network(topology, 1);
    let arrivals = sink(&mut network, hosts[2]);
    sink(&mut network, hosts[1]);
    let shots = [1, 2].map(|to| Shot::new(Time::ZERO, hosts[to], 100, to as u64));
    source(&mut network, hosts[0], shots.to_vec());
    network.run_until(Time::from_millis(1));
    assert_eq!(tags(&arrivals), [2]);
    assert_eq!(network.node(hosts[0]).drops.of(DropReason::NoRoute), 1);
}
