//! DCTCP against ns-3's, and PIAS, which is DCTCP with queues.

use std::time::Duration;

use fanin_sim::net::{
    DropReason, LinkConfig, Network, NetworkConfig, NodeConfig, NodeId, PortId, QueueConfig, TcpConfig, Time,
    Topology, Transport,
};
use serde::Deserialize;

use crate::support::*;

/// Ethernet with preamble, checksum and gap, and IPv4 with TCP.
const OVERHEAD_BYTES: u32 = 38 + 40;

/// How far mean queues may be apart. Chosen: one segment is in ns-3's device, where its queue does
/// not count it, and up to 1.2 more are unexplained. Windows that grew while they are being
/// shortened would make 4.8.
const MEAN_SEGMENTS: f64 = 2.5;

/// experiments/ns3/dctcp.cc's output.
#[derive(Deserialize)]
struct Reference {
    sender_bps: u64,
    receiver_bps: u64,
    stagger_ps: u64,
    measured_from_ps: u64,
    end_ps: u64,
    link_bytes: u32,
    window_initial_segments: u64,
    window_max_bytes: u64,
    scenes: Vec<Scene>,
}

#[derive(Deserialize)]
struct Scene {
    senders: usize,
    delay_ps: u64,
    threshold_segments: u64,
    queue_segments_mean: f64,
    dropped: u64,
    delivered_segments: Vec<u64>,
}

/// Senders `l0`.. on one switch, and the port to the receiver.
fn funnel(reference: &Reference, scene: &Scene) -> (Network, NodeId, PortId) {
    let delay = Duration::from_nanos(scene.delay_ps / 1000);
    let threshold = scene.threshold_segments * u64::from(reference.link_bytes);
    let mut topology = Topology::new();
    let switch = NodeConfig::new(QueueConfig::tail_drop(u64::MAX).with_ecn(threshold));
    let switch = topology.add_switch("s0", 0, switch);
    for sender in 0..scene.senders {
        let host = topology.add_host(format!("l{sender}"), NodeConfig::host());
        topology.add_link(host, switch, LinkConfig::new(reference.sender_bps, delay));
    }
    let receiver = topology.add_host("r", NodeConfig::host());
    let link = topology.add_link(switch, receiver, LinkConfig::new(reference.receiver_bps, delay));
    (Network::new(topology, NetworkConfig::default()).unwrap(), receiver, link.ports()[0])
}

#[test]
fn dctcp_keeps_the_queue_that_ns3s_keeps_and_fills_the_link() {
    let reference: Reference = serde_json::from_str(include_str!("../../../../experiments/ns3/dctcp.json"))
        .expect("dctcp.cc's output");
    let mut differs = Vec::new();
    for scene in &reference.scenes {
        let (mut network, receiver, port) = funnel(&reference, scene);
        let segment_bytes = reference.link_bytes - OVERHEAD_BYTES;
        let mut flows = Vec::new();
        for sender in 0..scene.senders {
            let from = node(&network, &format!("l{sender}"));
            let flow = network.open_tcp(TcpConfig {
                segment_bytes,
                transport: Transport::Dctcp,
                window_initial_bytes: reference.window_initial_segments * u64::from(segment_bytes),
                window_max_bytes: reference.window_max_bytes,
                ..TcpConfig::new(from, receiver)
            });
            let at = Time(reference.stagger_ps * sender as u64);
            network.at(at, move |network| network.fill(flow));
            flows.push(flow);
        }
        let delivered = |network: &Network| -> Vec<u64> {
            let bytes = flows.iter().map(|flow| network.flow(*flow).delivered_bytes);
            bytes.map(|bytes| bytes / u64::from(segment_bytes)).collect()
        };
        let (from, end) = (Time(reference.measured_from_ps), Time(reference.end_ps));
        network.run_until(from);
        let (before, earlier) = (delivered(&network), network.queue(port, 0).packets_mean);
        network.run_until(end);
        let queue = network.queue(port, 0);
        let (from, end) = (from.as_secs_f64(), end.as_secs_f64());
        let mean = (queue.packets_mean * end - earlier * from) / (end - from);
        let segments: Vec<u64> =
            delivered(&network).iter().zip(before).map(|(now, then)| now - then).collect();
        let what = format!("{} senders, {} ps", scene.senders, scene.delay_ps);
        println!("{what}: {mean:.2} in ns-3 {:.2}; {segments:?}", scene.queue_segments_mean);
        let (ours, theirs): (u64, u64) = (segments.iter().sum(), scene.delivered_segments.iter().sum());
        let agrees = (queue.drops.total(), scene.dropped) == (0, 0)
            && (mean - scene.queue_segments_mean).abs() < MEAN_SEGMENTS
            && (ours as f64 / theirs as f64 - 1.0).abs() < 0.001;
        if !agrees {
            differs.push(what);
        }
    }
    assert_eq!(differs, [""; 0]);
}

#[test]
fn a_flow_of_pias_sinks_through_the_queues_by_the_bytes_that_it_sent() {
    let thresholds = [10_000, 20_000, 40_000, u64::MAX, u64::MAX, u64::MAX, u64::MAX];
    let mut network = network(rack(2, QueueConfig::tail_drop(1 << 20)), 1);
    let (from, to) = (node(&network, "h0"), node(&network, "h1"));
    let flow = network.open_tcp(TcpConfig {
        transport: Transport::Pias { thresholds_bytes: thresholds },
        segment_bytes: 1000,
        window_initial_bytes: 100_000,
        ..TcpConfig::new(from, to)
    });
    // The packets that wait at the NIC, by queue, when all 50 segments were handed to it at once,
    // but for the one that is being sent.
    network.write(flow, 50_000, None);
    let nic = network.topology().port(from, network.topology().neighbours(from).next().unwrap().1).unwrap();
    let waits: Vec<u64> = (0..8).map(|priority| network.queue(nic, priority).packets).collect();
    assert_eq!(waits, [9, 10, 20, 10, 0, 0, 0, 0]);
    network.run_until(Time::from_millis(10));
    assert_eq!(network.flow(flow).delivered_bytes, 50_000);
    // Acknowledgements have no bytes before them.
    let back = network.topology().port(to, network.topology().neighbours(to).next().unwrap().1).unwrap();
    assert!((1..8).all(|priority| network.queue(back, priority).bytes_max == 0));
    assert_eq!(network.port(nic).drops.of(DropReason::Tail), 0);
}
