//! The network held against ns-3: the scenario of `experiments/ns3/reference.json`, played here,
//! and the figures there.
//!
//! UDP must agree to the picosecond in the fate of every packet. The two TCP connections are
//! chaotic: one segment more in a window, and every later loss hits another. They must agree in
//! what they reach together, how they share, and how much is lost.

use std::time::Duration;

use fanin_sim::net::{
    Actor, Body, Class, Context, DropReason, LinkConfig, LinkId, Network, NetworkConfig, NodeConfig, NodeId,
    Packet, PortId, QueueConfig, SimAddress, TcpConfig, Time, Topology,
};
use serde::Deserialize;

/// Ethernet with preamble, checksum and gap, and IPv4 with UDP or TCP.
const UDP_OVERHEAD_BYTES: u32 = 38 + 28;
const TCP_OVERHEAD_BYTES: u32 = 38 + 40;
const UDP_PORT: u16 = 4800;

#[derive(Deserialize)]
struct Reference {
    network: Rates,
    flows: Vec<Flow>,
    ports: Vec<Port>,
    tcp: Tcp,
}

#[derive(Deserialize)]
struct Rates {
    senders: usize,
    receivers: usize,
    delay_ps: u64,
    sender_bps: u64,
    trunk_bps: u64,
    receiver_bps: u64,
    trunk_queue_bytes: u64,
    receiver_queue_bytes: u64,
}

#[derive(Clone, Deserialize)]
struct Flow {
    sender: usize,
    receiver: usize,
    start_ps: u64,
    interval_ps: u64,
    packets: u32,
    link_bytes: u32,
    #[serde(flatten)]
    fate: Fate,
}

impl Flow {
    fn sent_at(&self, number: u32) -> Time {
        Time(self.start_ps + u64::from(number) * self.interval_ps)
    }
}

/// The fate of a flow's packets.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct Fate {
    delivered: usize,
    latency_sum_ps: i64,
    latency_min_ps: i64,
    latency_p50_ps: i64,
    latency_p99_ps: i64,
    latency_max_ps: i64,
    last_delivery_ps: u64,
    digest: String,
}

const LOST: i64 = -1;

impl Fate {
    /// Computes it from the latencies in the order of sending.
    fn of(flow: &Flow, latencies: &[i64]) -> Self {
        let mut delivered: Vec<i64> = latencies.iter().copied().filter(|latency| *latency != LOST).collect();
        delivered.sort_unstable();
        let percentile = |percent: usize| delivered[(delivered.len() * percent).div_ceil(100) - 1];
        let arrived = (0..).zip(latencies).filter(|(_, latency)| **latency != LOST);
        Self {
            delivered: delivered.len(),
            latency_sum_ps: delivered.iter().sum(),
            latency_min_ps: delivered[0],
            latency_p50_ps: percentile(50),
            latency_p99_ps: percentile(99),
            latency_max_ps: percentile(100),
            last_delivery_ps: arrived
                .map(|(number, latency)| flow.sent_at(number).0 + latency.cast_unsigned())
                .max()
                .expect("every flow has packets that arrive"),
            digest: format!("{:016x}", digest(latencies)),
        }
    }
}

/// FNV-1a, as in crosscheck.cc.
fn digest(latencies: &[i64]) -> u64 {
    latencies.iter().flat_map(|latency| latency.to_le_bytes()).fold(0xcbf2_9ce4_8422_2325, |digest, byte| {
        (digest ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
struct Port {
    port: String,
    dropped: u64,
    queue_bytes_max: u64,
    /// Events of one port at the same picosecond, whose order would be each simulator's own.
    ties: u64,
}

#[derive(Deserialize)]
struct Tcp {
    start_ps: u64,
    stagger_ps: u64,
    end_ps: u64,
    link_bytes: u32,
    window_initial_segments: u64,
    window_max_segments: u64,
    rto_min_ps: u64,
    delivered_segments: Vec<u64>,
    dropped: u64,
}

fn reference() -> Reference {
    serde_json::from_str(include_str!("../../../experiments/ns3/reference.json"))
        .expect("crosscheck.cc's output")
}

/// A packet's flow and number in one word.
const fn mark(flow: usize, number: u32) -> u64 {
    (flow as u64) << 32 | number as u64
}

const fn unmark(mark: u64) -> (usize, u32) {
    ((mark >> 32) as usize, mark as u32)
}

/// Sends the flows that are its own.
struct Sender {
    /// Its number.
    sender: usize,
    flows: Vec<Flow>,
    receivers: Vec<NodeId>,
}

impl Actor for Sender {
    fn start(&mut self, context: &mut Context<'_>) {
        for (at, flow) in self.flows.iter().enumerate().filter(|(_, flow)| flow.sender == self.sender) {
            for number in 0..flow.packets {
                context.wake_at(flow.sent_at(number), mark(at, number));
            }
        }
    }

    fn timer(&mut self, context: &mut Context<'_>, token: u64) {
        let flow = &self.flows[unmark(token).0];
        let to = SimAddress::new(self.receivers[flow.receiver], UDP_PORT);
        context.send_blank(to, Class::default(), flow.link_bytes - UDP_OVERHEAD_BYTES, token);
    }

    fn packet(&mut self, _context: &mut Context<'_>, packet: &Packet<'_>) {
        panic!("nobody sends to a sender: {packet:?}");
    }
}

/// When which packet arrived.
#[derive(Default)]
struct Receiver {
    arrived: Vec<(u64, Time)>,
}

impl Actor for Receiver {
    fn packet(&mut self, context: &mut Context<'_>, packet: &Packet<'_>) {
        let Body::Blank { tag, .. } = packet.body else { panic!("only blanks are sent: {packet:?}") };
        self.arrived.push((tag, context.time()));
    }
}

/// The two switches and what hangs on them.
struct Dumbbell {
    network: Network,
    senders: Vec<NodeId>,
    receivers: Vec<NodeId>,
    trunk: PortId,
    receiver_ports: Vec<PortId>,
}

impl Dumbbell {
    fn new(rates: &Rates) -> Self {
        let mut topology = Topology::new();
        let delay = Duration::from_nanos(rates.delay_ps / 1000);
        let mut switch = |name, queue_bytes| {
            topology.add_switch(name, 0, NodeConfig::new(QueueConfig::tail_drop(queue_bytes)))
        };
        let near = switch("near", rates.trunk_queue_bytes);
        let far = switch("far", rates.receiver_queue_bytes);
        let hosts = |topology: &mut Topology, kind: &str, count, switch, rate_bps| -> Vec<(NodeId, LinkId)> {
            (0..count)
                .map(|number| {
                    let host = topology.add_host(format!("{kind}{number}"), NodeConfig::host());
                    (host, topology.add_link(switch, host, LinkConfig::new(rate_bps, delay)))
                })
                .collect()
        };
        let senders = hosts(&mut topology, "sender", rates.senders, near, rates.sender_bps);
        let receivers = hosts(&mut topology, "receiver", rates.receivers, far, rates.receiver_bps);
        let trunk = topology.add_link(near, far, LinkConfig::new(rates.trunk_bps, delay));
        Self {
            network: Network::new(topology, NetworkConfig::default()).expect("a topology that can be"),
            senders: senders.into_iter().map(|(host, _)| host).collect(),
            trunk: trunk.ports()[0],
            receiver_ports: receivers.iter().map(|(_, link)| link.ports()[0]).collect(),
            receivers: receivers.into_iter().map(|(host, _)| host).collect(),
        }
    }

    fn port(&self, name: &str, port: PortId) -> Port {
        let statistics = self.network.port(port);
        assert_eq!(statistics.drops.total(), statistics.drops.of(DropReason::Tail), "{name}");
        Port {
            port: name.to_owned(),
            dropped: statistics.drops.of(DropReason::Tail),
            queue_bytes_max: statistics.queue_bytes_max,
            ties: 0,
        }
    }
}

#[test]
fn every_udp_packet_fares_as_in_ns3() {
    let reference = reference();
    let mut dumbbell = Dumbbell::new(&reference.network);
    for (sender, host) in dumbbell.senders.iter().enumerate() {
        let (flows, receivers) = (reference.flows.clone(), dumbbell.receivers.clone());
        dumbbell.network.add_actor(*host, UDP_PORT, Sender { sender, flows, receivers });
    }
    let receivers: Vec<_> = dumbbell
        .receivers
        .iter()
        .map(|host| dumbbell.network.add_actor(*host, UDP_PORT, Receiver::default()))
        .collect();
    dumbbell.network.run_until(Time(reference.tcp.start_ps));

    let mut latencies: Vec<_> =
        reference.flows.iter().map(|flow| vec![LOST; flow.packets as usize]).collect();
    for (number, actor) in receivers.into_iter().enumerate() {
        for (tag, at) in &dumbbell.network.actor::<Receiver>(actor).expect("a receiver").arrived {
            let (flow, packet) = unmark(*tag);
            assert_eq!(reference.flows[flow].receiver, number);
            let latency = at.since(reference.flows[flow].sent_at(packet)).0.cast_signed();
            let earlier = std::mem::replace(&mut latencies[flow][packet as usize], latency);
            assert_eq!(earlier, LOST, "packet {packet} of flow {flow} arrived twice");
        }
    }
    for (number, (flow, latencies)) in reference.flows.iter().zip(&latencies).enumerate() {
        assert_eq!(Fate::of(flow, latencies), flow.fate, "flow {number}");
    }
    let mut ports = vec![dumbbell.port("trunk", dumbbell.trunk)];
    for (number, port) in dumbbell.receiver_ports.iter().enumerate() {
        ports.push(dumbbell.port(&format!("receiver{number}"), *port));
    }
    assert_eq!(ports, reference.ports);
    let (sent, delivered): (u64, usize) = reference.flows.iter().fold((0, 0), |(sent, delivered), flow| {
        (sent + u64::from(flow.packets), delivered + flow.fate.delivered)
    });
    assert_eq!(sent - delivered as u64, ports.iter().map(|port| port.dropped).sum::<u64>());
}

#[test]
fn tcp_connections_fill_and_share_a_port_as_in_ns3() {
    let Reference { network: rates, tcp, .. } = reference();
    let mut dumbbell = Dumbbell::new(&rates);
    let segment_bytes = tcp.link_bytes - TCP_OVERHEAD_BYTES;
    let mut flows = Vec::new();
    for (number, expected) in (0..).zip(&tcp.delivered_segments) {
        let sender = dumbbell.senders[flows.len()];
        let flow = dumbbell.network.open_tcp(TcpConfig {
            segment_bytes,
            window_initial_bytes: tcp.window_initial_segments * u64::from(segment_bytes),
            window_max_bytes: tcp.window_max_segments * u64::from(segment_bytes),
            rto_min: Duration::from_nanos(tcp.rto_min_ps / 1000),
            ..TcpConfig::new(sender, dumbbell.receivers[0])
        });
        dumbbell.network.at(Time(tcp.start_ps + number * tcp.stagger_ps), move |network| network.fill(flow));
        flows.push((flow, *expected));
    }
    dumbbell.network.run_until(Time(tcp.end_ps));

    let delivered: Vec<u64> = flows
        .iter()
        .map(|(flow, _)| dumbbell.network.flow(*flow).delivered_bytes / u64::from(segment_bytes))
        .collect();
    let dropped = dumbbell.port("receiver0", dumbbell.receiver_ports[0]).dropped;
    let within = |what, ours: u64, theirs: u64, tolerance: f64| {
        let ratio = ours as f64 / theirs as f64;
        assert!((ratio - 1.0).abs() <= tolerance, "{what}: {ours}, in ns-3 {theirs}");
    };
    within("together", delivered.iter().sum(), tcp.delivered_segments.iter().sum(), 0.001);
    for (ours, theirs) in delivered.iter().zip(&tcp.delivered_segments) {
        within("one connection", *ours, *theirs, 0.05);
    }
    within("dropped", dropped, tcp.dropped, 0.15);
}
