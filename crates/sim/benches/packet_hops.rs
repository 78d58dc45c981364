//! How many packet-hops a second one core simulates: a hop is a packet sent into a link, queues,
//! routing, statistics and delivery included.
//!
//! The criterion report is followed by figures of single runs in CPU time. They are the cost of a
//! hop as the number of packets grows by 64, in several scenes and in networks from 64 hosts to
//! 8,192, and rate and memory of a leaf-spine with 1,024 hosts. If a hop of a long run costs more
//! than one of a short run in the same network, some cost is not linear in packets: the long run
//! has full windows and queues, and so more in its caches. If a hop costs more in a larger network,
//! memory is further away. The benchmark fails in three cases: a scene is slower than 5 million
//! hops a second (with 1,024 hosts: 4 million); a hop of a long run costs more than twice one of a
//! short run in the same network; the process ever had more than 2 GB.
//!
//! `cargo bench -p fanin-sim` for all, `-- --quick` for a first look.
//! `cargo test --bench packet_hops` sees that it runs, and holds nothing to a limit: what is timed
//! depends on the machine.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput};
use fanin_sim::net::{
    Actor, Body, Class, ConstantRateConfig, Context, LinkConfig, Network, NetworkConfig, NodeConfig, NodeId,
    Outcome, Packet, Parts, QueueConfig, SimAddress, TcpConfig, Time, Topology,
};

const GBIT: u64 = 1_000_000_000;

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let mut group = criterion.benchmark_group("packet_hops");
    for (name, make, _) in SCENES {
        let hops = hops_of(make(HOPS)).0;
        group.throughput(Throughput::Elements(hops));
        group.bench_function(name, |bench| {
            bench.iter_batched_ref(
                || make(HOPS),
                |scene| black_box(scene.run()),
                criterion::BatchSize::PerIteration,
            );
        });
    }
    group.finish();
    // Cargo says so to a benchmark, and not to a test.
    if !std::env::args().any(|argument| argument == "--bench") {
        growth(4);
        by_hosts(4);
        thousand_hosts(100_000);
        return;
    }
    let (slowness, of_scenes) = growth(64);
    let growth = by_hosts(64).max(of_scenes);
    let memory_kib = thousand_hosts(20_000_000);
    assert!(slowness <= 1.0, "a hop costs {slowness:.2} times what it may");
    assert!(growth <= 2.0, "a hop of a long run costs {growth:.2} times one of a short run");
    assert!(memory_kib <= 2_000_000_000 / 1024, "{memory_kib} KiB are more than 2 GB");
}

/// Packet-hops of one iteration, about.
const HOPS: u64 = 300_000;

/// A network, and when it is over.
struct Scene {
    network: Network,
    end: Time,
}

impl Scene {
    fn run(&mut self) -> u64 {
        assert_ne!(self.network.run_until(self.end), Outcome::Stopped);
        self.network.progress().packet_hops
    }
}

type Make = fn(u64) -> Scene;

/// With the most nanoseconds that a hop may cost: 5 million a second, and where windows do not fit
/// into a core's own cache 4 million.
const SCENES: [(&str, Make, f64); 4] = [
    ("constant_rate/leaf_spine_64", |hops| constant_rate(4, 4, 16, hops), 200.0),
    ("tcp/leaf_spine_64", |hops| tcp(4, 4, 16, hops), 200.0),
    ("tcp/leaf_spine_1024", |hops| tcp(32, 16, 32, hops), 250.0),
    ("payload/rack_16", payload, 200.0),
];

/// And the CPU time that they took.
fn hops_of(mut scene: Scene) -> (u64, Duration) {
    let began = cpu_time();
    let hops = scene.run();
    (hops, cpu_time() - began)
}

/// The time of this thread: other work on the machine counts only by what it takes of its caches.
fn cpu_time() -> Duration {
    let status = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos = status.split(' ').next().and_then(|nanos| nanos.parse().ok());
    // Not on other systems.
    nanos.map_or_else(|| std::time::UNIX_EPOCH.elapsed().unwrap_or_default(), Duration::from_nanos)
}

fn leaf_spine(leaves: usize, spines: usize, hosts: usize) -> Network {
    let mut parts = Parts::uniform(LinkConfig::new(100 * GBIT, Duration::from_micros(1)));
    parts.switch = NodeConfig::new(QueueConfig::tail_drop(500_000).with_ecn(100_000));
    let topology = Topology::leaf_spine(leaves, spines, hosts, &parts).expect("a small one");
    Network::new(topology, NetworkConfig::default()).expect("sound")
}

/// Every host sends to one under another leaf: four links a packet.
fn pairs(network: &Network, hosts: usize) -> Vec<(NodeId, NodeId)> {
    let all: Vec<_> = network.topology().hosts().collect();
    (0..all.len()).map(|at| (all[at], all[(at * 7 + hosts) % all.len()])).filter(|(a, b)| a != b).collect()
}

fn constant_rate(leaves: usize, spines: usize, hosts: usize, hops: u64) -> Scene {
    let mut network = leaf_spine(leaves, spines, hosts);
    let pairs = pairs(&network, hosts);
    for (from, to) in &pairs {
        network.start_constant_rate(ConstantRateConfig {
            from: *from,
            to: *to,
            class: Class::default(),
            rate_bps: 50 * GBIT,
            datagram_bytes: 1500,
            ecn: false,
        });
    }
    // 1538 bytes at 50 Gbit/s take 246 ns.
    let end = Time::from_nanos(246 * hops / 4 / pairs.len() as u64);
    Scene { network, end }
}

fn tcp(leaves: usize, spines: usize, hosts: usize, hops: u64) -> Scene {
    let mut network = leaf_spine(leaves, spines, hosts);
    let pairs = pairs(&network, hosts);
    for (from, to) in &pairs {
        let flow = network.open_tcp(TcpConfig { ecn: true, ..TcpConfig::new(*from, *to) });
        network.write(flow, hops * 1460 / 8 / pairs.len() as u64, None);
    }
    Scene { network, end: Time::from_millis(60_000) }
}

/// Packets of 1,408 bytes that are copied in and looked at: every host sends what it gets on to the
/// next.
struct Relay {
    next: NodeId,
    left: u64,
    window: u64,
}

impl Relay {
    fn send(&mut self, context: &mut Context<'_>, payload: &[u8]) {
        if self.left > 0 {
            self.left -= 1;
            context.send(SimAddress::new(self.next, 1), Class::default(), payload);
        }
    }
}

impl Actor for Relay {
    fn start(&mut self, context: &mut Context<'_>) {
        for _ in 0..self.window {
            self.send(context, &[7; 1408]);
        }
    }

    fn packet(&mut self, context: &mut Context<'_>, packet: &Packet<'_>) {
        if let Body::Bytes(payload) = packet.body {
            self.send(context, payload);
        }
    }
}

fn payload(hops: u64) -> Scene {
    let parts = Parts::uniform(LinkConfig::new(100 * GBIT, Duration::from_micros(1)));
    let topology = Topology::one_rack(16, &parts).expect("a small one");
    let mut network = Network::new(topology, NetworkConfig::default()).expect("sound");
    let hosts: Vec<_> = network.topology().hosts().collect();
    for (at, host) in hosts.iter().enumerate() {
        let next = hosts[(at + 1) % hosts.len()];
        network.add_actor(*host, 1, Relay { next, left: hops / 2 / 16, window: 64 });
    }
    Scene { network, end: Time::from_millis(60_000) }
}

/// Nanoseconds a hop of runs and of those that are `times` as long, with the hops of a run. CPU
/// time is told in ticks of some milliseconds, so that many short runs count together; of the long
/// ones the best, as others may use the machine.
fn costs(times: u64, make: impl Fn(u64) -> Scene) -> [(u64, f64); 2] {
    let cost = |(hops, took): (u64, Duration)| took.as_nanos() as f64 / hops as f64;
    let short: Vec<_> = (0..16).map(|_| hops_of(make(1))).collect();
    let together = short.iter().fold((0, Duration::ZERO), |sum, run| (sum.0 + run.0, sum.1 + run.1));
    let long = (0..2).map(|_| hops_of(make(times))).min_by_key(|(_, took)| *took).expect("two");
    [(short[0].0, cost(together)), (long.0, cost(long))]
}

/// The largest part of what it may that a hop costs in any scene, and the most growth with the
/// number of packets.
fn growth(times: u64) -> (f64, f64) {
    println!("\nA hop's cost as the number of packets grows, ns:");
    let (mut slowness, mut growth) = (0.0_f64, 0.0_f64);
    for (name, make, most) in SCENES {
        let [(few, low), (many, high)] = costs(times, |times| make(HOPS * times));
        println!("{name:32} {low:6.0} ({few} hops) {high:6.0} ({many} hops)");
        slowness = slowness.max(low / most).max(high / most);
        growth = growth.max(high / low);
    }
    (slowness, growth)
}

/// The same in networks of all sizes; returns the most growth with the number of packets.
fn by_hosts(times: u64) -> f64 {
    println!("\nA hop's cost as the network and the number of packets grow, TCP, ns:");
    let sizes = [(4, 4, 16), (16, 16, 32), (32, 16, 32), (64, 32, 64), (128, 64, 64)];
    let growths = sizes.map(|(leaves, spines, hosts)| {
        let all = (leaves * hosts) as u64;
        // A few segments for each host at least.
        let scene = |times| tcp(leaves, spines, hosts, HOPS.max(125 * all) * times);
        let [(few, low), (many, high)] = costs(times, scene);
        println!("{all:6} hosts {low:6.0} ({few} hops) {high:6.0} ({many} hops)");
        high / low
    });
    growths.into_iter().fold(0.0, f64::max)
}

/// The most memory that this process ever had, in KiB; zero where the system does not say.
fn thousand_hosts(hops: u64) -> u64 {
    let (hops, took) = hops_of(tcp(32, 16, 32, hops));
    let rate = hops as f64 / took.as_secs_f64() / 1e6;
    println!("\nLeaf-spine of 1,024 hosts, TCP: {hops} hops, {rate:.2} million a second");
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = peak.and_then(|peak| peak.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0);
    println!("peak memory {kib} KiB");
    kib
}
