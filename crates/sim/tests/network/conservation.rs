//! Each packet arrives or is counted as dropped, once, whatever goes wrong.

use std::time::Duration;

use fanin_sim::net::{
    Buffer, Class, ConstantRateConfig, Cost, DropReason, Drops, Impairment, LinkId, Loss, Multipath, Network,
    NetworkConfig, NodeConfig, NodeId, Outcome, PRIORITIES, Parts, QueueConfig, TcpConfig, Time, Topology,
    Transport,
};
use oorandom::Rand64;

use crate::support::*;

const MEMORY: u64 = 30_000;

fn chance(dice: &mut Rand64, most: f64) -> f64 {
    dice.rand_float() * most
}

fn one_of<T: Copy>(dice: &mut Rand64, all: &[T]) -> T {
    all[dice.rand_range(0..all.len() as u64) as usize]
}

/// A leaf-spine with small queues of all kinds, and links that do everything that links can.
fn troubled(seed: u64, dice: &mut Rand64) -> Network {
    let queue = QueueConfig::tail_drop(20_000).with_ecn(4_000).with_drop_threshold(1, 8_000);
    let mut parts = Parts::uniform(byte_a_nano());
    parts.core = byte_a_nano().with_mtu(1200);
    parts.host.queues = [QueueConfig::tail_drop(one_of(dice, &[64 << 20, 10_000])); PRIORITIES];
    parts.host.receives =
        Cost { byte: Time(one_of(dice, &[0, 500])), ..Cost::of_packet(Time(one_of(dice, &[0, 700_000]))) };
    parts.host.sends = Cost { cores: 2, ..Cost::of_packet(Time(one_of(dice, &[0, 300_000]))) };
    parts.switch = NodeConfig::new(queue);
    if dice.rand_float() < 0.3 {
        parts.switch = NodeConfig::new(QueueConfig::least_remaining(20_000));
    } else if dice.rand_float() < 0.3 {
        parts.switch.queues = QueueConfig::dlcp(20_000, 3_000, 0.5);
    }
    parts.switch.buffer = one_of(
        dice,
        &[Buffer::PerQueue, Buffer::PerPort { bytes: MEMORY }, Buffer::Shared { bytes: MEMORY, alpha: 2.0 }],
    );
    let topology = Topology::leaf_spine(3, 2, 2, &parts).unwrap();
    let multipath = one_of(dice, &[Multipath::PerFlow, Multipath::PerPacket]);
    let mut network = Network::new(topology, NetworkConfig { seed, multipath }).unwrap();
    for port in links(&network).flat_map(LinkId::ports) {
        let burst = Loss::GilbertElliott { to_bad: 0.01, to_good: 0.2, loss_good: 0.001, loss_bad: 0.5 };
        let impairment = Impairment {
            loss: if dice.rand_float() < 0.5 { burst } else { Loss::Uniform(chance(dice, 0.02)) },
            duplication: chance(dice, 0.02),
            reordering: chance(dice, 0.05),
            held_back: Duration::from_micros(20),
        };
        network.impair(port, impairment);
    }
    network
}

fn links(network: &Network) -> impl Iterator<Item = LinkId> + use<> {
    (0..network.topology().links().len() as u32).map(LinkId)
}

fn traffic(network: &mut Network, dice: &mut Rand64) {
    let hosts: Vec<NodeId> = network.topology().hosts().collect();
    for _ in 0..12 {
        let (from, to) = (one_of(dice, &hosts), one_of(dice, &hosts));
        if from == to {
            continue;
        }
        let (priority, drop_class) = (one_of(dice, &[0, 3, 7]), one_of(dice, &[0, 1]));
        let sprayed = dice.rand_float() < 0.2;
        let class = Class { priority, drop_class, sprayed, ..Class::DEFAULT };
        let flow = if dice.rand_float() < 0.5 {
            let pias =
                Transport::Pias { thresholds_bytes: [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000] };
            let transport = one_of(dice, &[Transport::NewReno, Transport::Dctcp, pias, Transport::Pfabric]);
            let flow =
                network.open_tcp(TcpConfig { class, transport, ecn: true, ..TcpConfig::new(from, to) });
            network.fill(flow);
            flow
        } else {
            network.start_constant_rate(ConstantRateConfig {
                from,
                to,
                class,
                rate_bps: dice.rand_range(1..6) * GBIT,
                datagram_bytes: one_of(dice, &[60, 1200, 1201]),
                ecn: false,
            })
        };
        network.at(Time::from_micros(900), move |network| network.stop_flow(flow));
    }
    // For somebody, for nobody, for a node that is not there.
    let shots = (0..300).map(|tag| {
        let to = one_of(dice, &[hosts[0], hosts[1], NodeId(1000)]);
        Shot::new(Time::from_micros(3 * tag), to, 500, tag)
    });
    let shots = shots.collect();
    source(network, hosts[5], shots);
    sink(network, hosts[0]);
}

fn failures(network: &mut Network, dice: &mut Rand64) {
    let links: Vec<_> = links(network).collect();
    let nodes = network.topology().nodes().len() as u64;
    for _ in 0..20 {
        let (at, down) = (dice.rand_range(0..800_000), dice.rand_range(100..100_000));
        let (at, back) = (Time::from_nanos(at), Time::from_nanos(at + down));
        if dice.rand_float() < 0.5 {
            let link = one_of(dice, &links);
            network.at(at, move |network| network.set_link(link, false));
            network.at(back, move |network| network.set_link(link, true));
        } else {
            let node = NodeId(dice.rand_range(0..nodes) as u32);
            network.at(at, move |network| network.set_node(node, false));
            network.at(back, move |network| network.set_node(node, true));
        }
    }
}

/// Plays a seed and returns why packets were dropped, and the run's digest.
fn play(seed: u64) -> (Vec<DropReason>, u64) {
    let mut dice = Rand64::new(seed.into());
    let mut network = troubled(seed, &mut dice);
    traffic(&mut network, &mut dice);
    failures(&mut network, &mut dice);
    assert_eq!(network.run_until(Time::from_millis(1000)), Outcome::Idle, "seed {seed}");
    assert_eq!(network.progress().packets, 0, "seed {seed}");
    let ports: Vec<_> = links(&network).flat_map(LinkId::ports).map(|port| network.port(port)).collect();
    let nodes: Vec<_> =
        (0..network.topology().nodes().len() as u32).map(|node| network.node(NodeId(node))).collect();
    let began: u64 = nodes.iter().map(|node| node.sent_packets).sum::<u64>()
        + ports.iter().map(|port| port.duplicated).sum::<u64>();
    let of = |reason| {
        let count = |drops: &Drops| drops.of(reason);
        let at_ports: u64 = ports.iter().map(|port| count(&port.drops)).sum();
        at_ports + nodes.iter().map(|node| count(&node.drops)).sum::<u64>()
    };
    // A packet that nobody listened to had arrived.
    let dropped: u64 = DropReason::ALL.into_iter().map(of).sum::<u64>() - of(DropReason::NoListener);
    let arrived: u64 = nodes.iter().map(|node| node.received_packets).sum();
    assert_eq!(began, arrived + dropped, "seed {seed}");
    assert!(ports.iter().all(|port| port.queue_bytes == 0), "seed {seed}");
    let reasons = DropReason::ALL.into_iter().filter(|reason| of(*reason) > 0).collect();
    (reasons, network.digest())
}

#[test]
fn every_packet_arrives_or_is_counted_as_dropped() {
    let played: Vec<_> = (0..60).map(play).collect();
    // The seeds see every reason but circles, for which there is no time between two routes.
    for reason in DropReason::ALL.into_iter().filter(|reason| *reason != DropReason::HopLimit) {
        assert!(played.iter().any(|(reasons, _)| reasons.contains(&reason)), "{reason:?}");
    }
    assert_eq!(play(7), played[7]);
}
