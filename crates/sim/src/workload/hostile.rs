//! Scenarios that a seed draws: small jobs of every system in networks where everything goes wrong
//! that can.

mod shrink;
#[cfg(test)]
mod tests;
mod trouble;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fanin_protocol::atp::{DEFAULT_WAYS, Hashing, Overflow, Scaling};
use fanin_protocol::dlcp::Finish;
use fanin_wire::{CHUNK_ELEMENTS, FRAGMENT_ELEMENTS, LossBound, NATIVE_ELEMENTS_MAX, WireDtype};
use oorandom::Rand64;

pub use self::shrink::shrink;
use self::trouble::{deaths, faults, losses, numbered};
use super::models::Model;
use super::parameter_server::{Draw, ParameterServerPlan, Sends, TensorPlan};
use super::scenario::{BackgroundPlan, JobPlan, Scenario, SendOrder, SwitchPlan, Trained, Workload};
use super::transport::TransportPlan;
use super::unlike::{Lateness, Rates};
use crate::net::{
    Buffer, Class, Cost, LinkConfig, LinkId, Multipath, NodeConfig, NodeId, Order, PRIORITIES, Parts,
    Programmable, QueueConfig, Time, Topology, TopologyError, Transport,
};
use crate::systems::System;
use crate::systems::atp::{Atp, Help};
use crate::systems::byteps::{Asynchronous, BytePs};
use crate::systems::dlcp::{Dlcp, PushPlan, Way};
use crate::systems::goat::{Goat, on_the_way};
use crate::systems::ring::Ring;
use crate::systems::switchml::SwitchMl;
use crate::systems::tcp_ps::TcpPs;

/// How long floats may travel, for systems that have a choice.
const WIRE_DTYPES: [WireDtype; 4] =
    [WireDtype::SharedExponent, WireDtype::Native, WireDtype::Bfloat16, WireDtype::Int8];
/// How long faults keep coming.
const TROUBLE: Duration = Duration::from_millis(20);
/// Longer than any packet is under way: nothing that a dead worker sent arrives after another took
/// its rank.
const BURIED: Duration = Duration::from_millis(3);

/// Without anything new for so many of their longest timeouts, jobs have stalled. A window of one
/// packet, over links that lose in bursts, has nothing new for twelve once in some 10,000 runs.
const PATIENCE: u32 = 100;
/// From a worker to its server and back, in the largest of these networks.
const PORTS_ON_THE_WAY: u32 = 12;
/// The least that a link carries in a nanosecond: 1 Gbit/s.
const BITS_A_NANO: u64 = 1;
/// More than the largest packet of a job has on a link.
const PACKET_BITS: u64 = 8 * 1_500;

/// Draws a scenario of one to three jobs, most of them ATP's. The network is a rack, Figure 9's, a
/// leaf-spine, a fat tree or a dumbbell, in which an eighth of the switches cannot aggregate. Some
/// jobs train, some have priorities, some are sprayed or sampled, some stop early; other flows are
/// beside them, also to parameter servers. Switches' ports have their own memory or share it, and
/// queues in the order of arrival, pFabric's or DLCP's. Links differ, and hosts' cores and NICs are
/// slow and small. A failed part may fail again before it is back.
///
/// Among what it leaves out (docs/simulator.md): a server does not lose its memory in a run in
/// which a worker is started again. Parameters that only the dead worker had got would be in
/// nobody's memory, and no protocol could tell what they were.
#[must_use]
pub fn hostile(seed: u64) -> Scenario {
    let mut dice = Dice(Rand64::new(u128::from(seed) ^ 0xa7b0_0000_0000));
    // From dice of their own, so that what else is drawn stays as it was.
    let [
        mut dlcp_dice,
        mut more_dice,
        mut ps_dice,
        mut goat_dice,
        mut unlike_dice,
        mut esa_dice,
        mut onward_dice,
        mut byteps_dice,
        mut services_dice,
        mut wire_dice,
    ] = [
        0xd1c9_0000_0000,
        0x3a75_0000_0000,
        0x7c95_0000_0000,
        0x60a7_0000_0000,
        0x1a7e_0000_0000,
        0xe5a0_0000_0000,
        0x50e5_0000_0000,
        0xb17e_0000_0000,
        0x5e71_0000_0000,
        0x317e_0000_0000,
    ]
    .map(|which| Dice(Rand64::new(u128::from(seed) ^ which)));
    let topology = topology(&mut dice, &mut more_dice);
    let aggregators = dice.among(&[0, 1, 3, 16, 64, 512]);
    let mut jobs: Vec<JobPlan> = (0..dice.range(1, 4))
        .map(|index| {
            let wire_dtype = wire_dice.among(&WIRE_DTYPES);
            job(&mut dice, &topology, aggregators, index, (esa_dice.one_in(6), wire_dtype))
        })
        .collect();
    jobs.iter_mut().for_each(|job| {
        if dlcp_dice.one_in(8) {
            let mut system = dlcp(&mut dlcp_dice, &topology, job);
            if let (Way::Servers(at), true) = (&mut system.way, ps_dice.one_in(2)) {
                *at = servers(&mut ps_dice, &topology);
            }
            job.system = Arc::new(system);
        } else if job.system.name() == "ring" && ps_dice.one_in(2) {
            job.system = Arc::new(tcp_ps(&mut ps_dice, &topology));
        } else if job.system.name() == "atp" && goat_dice.one_in(3) {
            let mut system = goat(&mut goat_dice, &topology, job);
            system.onward = onward(&mut onward_dice, &topology, &system);
            job.system = Arc::new(system);
        }
        if matches!(job.system.name(), "switchml" | "ps" | "rss") && byteps_dice.one_in(3) {
            let take_over = services_dice.time(Duration::ZERO, TROUBLE / 4);
            let wire_dtype = match job.integers {
                true => WireDtype::Native,
                false => wire_dice.among(&WIRE_DTYPES),
            };
            let system = BytePs { take_over, wire_dtype, ..byteps(&mut byteps_dice, &topology, job) };
            job.system = match services_dice.one_in(4) {
                true => Arc::new(asynchronous(&mut services_dice, &system)),
                false => Arc::new(system),
            };
        }
        lengthen(&mut wire_dice, job);
        if let Workload::Training { pause: None, overlap, .. } = &mut job.workload {
            *overlap = ps_dice.one_in(2);
        }
        if let Workload::Training { overlap, partition, order, .. } = &mut job.workload {
            *partition = byteps_dice.among(&[None, None, Some(40), Some(300)]);
            if *overlap && byteps_dice.one_in(2) {
                *order = SendOrder::Needed { seconds_a_byte: byteps_dice.among(&[1e-9, 1e-7]) };
            }
        }
        (job.rates, job.lateness) = unlike(&mut unlike_dice, &topology, job);
        job.class.sprayed = more_dice.one_in(8);
        // Overflows would be in elements that a sample leaves out.
        let may_be = job.system.sample_elements().is_some() && job.large_values == 0.0;
        job.sampled = may_be && more_dice.one_in(4);
        if job.system.is_asynchronous() {
            // Such numbers could not be told in parameters.
            job.large_values = 0.0;
        }
    });
    let parameter_servers =
        if more_dice.one_in(6) { vec![parameter_server(&mut more_dice, &topology)] } else { Vec::new() };
    let background = background(&mut dice, &topology);
    let perfect = dice.one_in(8);
    let losses = if perfect { Vec::new() } else { losses(&mut dice, &topology, &jobs) };
    let mut faults = faults(&mut dice, &topology, &jobs);
    faults.extend(deaths(&mut services_dice, &jobs));
    let timeout_max = jobs.iter().map(|job| job.system.timeout_max()).max().unwrap_or_default();
    // If one worker alone still sends, each of the losses by number may cost it a timeout on each
    // link of its way there and back.
    let lost = losses.iter().filter_map(|plan| plan.target.as_ref()).map(numbered).max().unwrap_or_default();
    let stall = timeout_max * (PATIENCE + lost * PORTS_ON_THE_WAY) + TROUBLE + BURIED;
    Scenario {
        title: format!("hostile seed {seed}"),
        until: (stall * 4).max(Duration::from_secs(200)),
        interval: Duration::from_secs(1),
        warm_up: Duration::ZERO,
        stall,
        topology,
        multipath: dice.among(&[Multipath::PerFlow, Multipath::PerPacket]),
        switch: SwitchPlan {
            aggregators,
            ways: more_dice.among(&[1, 2, DEFAULT_WAYS]),
            stale: dice.time(Duration::from_micros(500), Duration::from_millis(20)),
        },
        jobs,
        parameter_servers,
        background,
        losses,
        faults,
    }
}

struct Dice(Rand64);

impl Dice {
    fn range(&mut self, from: u64, to: u64) -> u64 {
        self.0.rand_range(from..to)
    }

    fn one_in(&mut self, many: u64) -> bool {
        self.range(0, many) == 0
    }

    fn among<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.range(0, values.len() as u64) as usize]
    }

    fn time(&mut self, least: Duration, most: Duration) -> Duration {
        Duration::from_nanos(self.range(least.as_nanos() as u64, most.as_nanos() as u64 + 1))
    }

    /// Up to `most`, and often zero.
    fn chance(&mut self, most: f64) -> f64 {
        if self.one_in(3) { 0.0 } else { self.0.rand_float() * most }
    }
}

fn link(dice: &mut Dice) -> LinkConfig {
    LinkConfig::new(
        dice.among(&[1_000_000_000, 10_000_000_000, 100_000_000_000]),
        dice.time(Duration::from_nanos(200), Duration::from_micros(50)),
    )
}

fn topology(dice: &mut Dice, more_dice: &mut Dice) -> Topology {
    let mut parts = Parts::uniform(link(dice));
    // The shortest queue holds one multicast to as many children as there may be. A switch makes
    // all copies at once and in one order, so that a shorter queue would lose the last child's copy
    // every time.
    let mut queue = QueueConfig::tail_drop(dice.among(&[20_000, 50_000, 1_000_000]));
    if dice.one_in(2) {
        queue = queue.with_ecn(dice.range(500, 3_000));
        // Only DLCP's jobs have packets that cannot be marked.
        queue.drops_unmarkable = queue.ecn_threshold_bytes.is_some_and(|threshold| threshold % 2 == 0);
    }
    let drop_class = dice.among(&[0, 0, 1]);
    if drop_class > 0 {
        queue = queue.with_drop_threshold(drop_class, 20_000);
    }
    if more_dice.one_in(8) {
        queue.order = Order::LeastRemaining;
    }
    parts.switch = NodeConfig::new(queue);
    if more_dice.one_in(8) {
        parts.switch.queues = QueueConfig::dlcp(queue.limit_bytes, 3_000, 0.5);
    }
    parts.switch.buffer = match dice.range(0, 4) {
        0 => Buffer::PerPort { bytes: dice.among(&[20_000, 60_000]) },
        1 => Buffer::Shared { bytes: 200_000, alpha: dice.among(&[0.5, 1.0, 8.0]) },
        _ => Buffer::PerQueue,
    };
    parts.switch.receives = Cost::of_packet(Time(dice.among(&[0, 500_000])));
    if dice.one_in(3) {
        // As much as one packet in 20 ns to 2 us on each core, and up to 0.1 ns a byte.
        let packet = Time(dice.among(&[20_000, 500_000, 2_000_000]));
        let cost = Cost { packet, byte: Time(dice.range(0, 100)), cores: dice.range(1, 4) as u16 };
        (parts.host.sends, parts.host.receives) = (cost, cost);
    }
    if dice.one_in(3) {
        // A NIC that loses what its own machines send at once; and its node's cores hold no more.
        parts.host.queues = [QueueConfig::tail_drop(dice.among(&[20_000, 60_000, 200_000])); PRIORITIES];
    }
    let built = match more_dice.range(0, 12) {
        0 => Topology::fat_tree(4, more_dice.range(1, 3) as usize, &parts),
        1 => Topology::dumbbell(more_dice.range(1, 5) as usize, more_dice.range(1, 5) as usize, &parts),
        _ => usual_topology(dice, &parts),
    };
    let mut topology = built.expect("the numbers are not zero");
    if dice.one_in(3) {
        for at in 0..topology.links().len() as u32 {
            if dice.one_in(3) {
                topology.set_link(LinkId(at), link(dice));
            }
        }
    }
    let switches: Vec<NodeId> = topology.switches().collect();
    let chosen: Vec<String> = switches
        .into_iter()
        .filter(|_| !dice.one_in(8))
        .map(|switch| topology.get(switch).name.clone())
        .collect();
    topology.set_programmable(&Programmable::Names(chosen)).expect("these are names of switches");
    topology
}

fn usual_topology(dice: &mut Dice, parts: &Parts) -> Result<Topology, TopologyError> {
    match dice.range(0, 3) {
        0 => Topology::one_rack(dice.range(2, 10) as usize, parts),
        1 => Ok(Topology::figure9(parts)),
        _ => {
            let (leaves, spines, hosts) = (dice.range(1, 5), dice.range(1, 3), dice.range(2, 5));
            Topology::leaf_spine(leaves as usize, spines as usize, hosts as usize, parts)
        }
    }
}

/// The flows of one iteration, which need no sums.
fn parameter_server(dice: &mut Dice, topology: &Topology) -> ParameterServerPlan {
    let hosts: Vec<NodeId> = topology.hosts().collect();
    let first = dice.range(0, hosts.len() as u64) as usize;
    let count = dice.range(1, hosts.len() as u64) as usize;
    let others: Vec<NodeId> = hosts.iter().cycle().skip(first).take(hosts.len()).copied().collect();
    let (workers, servers) = others.split_at(count);
    let mut ready = Duration::ZERO;
    let tensors = (0..dice.range(1, 6)).map(|_| {
        ready += dice.time(Duration::ZERO, TROUBLE / 8);
        TensorPlan { bytes: dice.among(&[1, 1_500, 40_000, 250_000]), ready }
    });
    let tensors = tensors.collect();
    let time = |dice: &mut Dice, us: &[u64]| Duration::from_micros(dice.among(us));
    let sends = if dice.one_in(2) {
        Sends::Dlcp(PushPlan {
            loss_bound: LossBound::new(dice.among(&[0.0, 0.01, 0.3])).expect("below one"),
            period: time(dice, &[50, 200, 1000]),
            delta: dice.among(&[1.0, 2.0]),
            finish: dice.among(&[Finish::Stopped, Finish::BoundMet]),
            quiet: time(dice, &[20, 100, 1000]),
            timeout: time(dice, &[300, 1000, 5000]),
            follows: dice.one_in(2),
        })
    } else {
        let (transport, ecn) = (TRANSPORTS[dice.range(0, 4) as usize], dice.one_in(2));
        Sends::Connections(TransportPlan { transport, ecn, ..TransportPlan::default() })
    };
    ParameterServerPlan {
        name: "push".into(),
        workers: workers.to_vec(),
        servers: servers[..servers.len().min(3)].to_vec(),
        tensors,
        divide_above_bytes: 100_000,
        draw: if dice.one_in(2) { Draw::Once } else { Draw::EachWorker },
        jitter: dice.among(&[0.0, 0.1]),
        start: dice.time(Duration::ZERO, TROUBLE / 4),
        class: Class { sprayed: dice.one_in(2), ..Class::DEFAULT },
        sends,
    }
}

/// Short tensors travel as they are, so that most of a job whose long ones do not are made longer.
fn lengthen(dice: &mut Dice, job: &mut JobPlan) {
    let is_of_few_bits = matches!(job.system.wire_dtype(), WireDtype::Bfloat16 | WireDtype::Int8);
    match &mut job.workload {
        Workload::AllReduce { elements, .. } if is_of_few_bits && !dice.one_in(4) => {
            *elements += NATIVE_ELEMENTS_MAX;
        }
        _ => {}
    }
}

/// A job; where it is ATP's, perhaps ESA's in its place, and where it is SwitchML's, with this wire
/// dtype.
fn job(
    dice: &mut Dice,
    topology: &Topology,
    aggregators: u32,
    index: u64,
    (esa, wire_dtype): (bool, WireDtype),
) -> JobPlan {
    let mut hosts: Vec<NodeId> = topology.hosts().collect();
    for at in (1..hosts.len()).rev() {
        hosts.swap(at, dice.range(0, at as u64 + 1) as usize);
    }
    // The server may be on a worker's host.
    let server = dice.among(&hosts);
    let workers: Vec<NodeId> = hosts[..dice.range(1, hosts.len() as u64 + 1) as usize].to_vec();
    let window = dice.among(&[1, 2, 5, 16, 64]);
    let timeout =
        dice.among(&[Duration::from_micros(300), Duration::from_millis(1), Duration::from_millis(5)]);
    let pool = SwitchMl {
        elements: dice.among(&[CHUNK_ELEMENTS[0], CHUNK_ELEMENTS[1], CHUNK_ELEMENTS[2]]) as u16,
        wire_dtype,
        slots: window,
        window: if index.is_multiple_of(2) { window } else { window.div_ceil(2) },
        timeout,
        // The paper's worker sends the same again at the same times. Packets beyond what the links
        // carry are lost at the same times, too, and may never get through.
        timeouts_only: dice.one_in(4)
            && u64::from(window) * workers.len() as u64 * PACKET_BITS / BITS_A_NANO
                < timeout.as_nanos() as u64 / 2,
    };
    let system: Arc<dyn System> = match dice.range(0, 10) {
        0 if workers.len() > 1 => Arc::new(Ring::default()),
        // Without a programmable switch there is none.
        1 | 2 if pool.fits(topology, &workers).is_ok() => Arc::new(pool),
        drawn => {
            let (help, server) = match drawn {
                3 => (Help::None, None),
                4 => (Help::None, Some(server)),
                5 => (Help::Racks, Some(server)),
                _ if esa => (Help::Preemptive, Some(server)),
                _ => (Help::Way, Some(server)),
            };
            // A part of the aggregators for each of as many jobs as there may be, and one for
            // nobody.
            let part = aggregators / 4;
            let (hashing, window) = match dice.range(0, 4) {
                0 | 1 => (Hashing::Hash, window),
                2 if part > 0 => (Hashing::Partition { first: part * index as u32 }, window.min(part as u16)),
                _ => (Hashing::Linear, window),
            };
            let atp = Atp {
                help,
                server,
                elements: dice.among(&[FRAGMENT_ELEMENTS[0], FRAGMENT_ELEMENTS[0], FRAGMENT_ELEMENTS[1]])
                    as u16,
                window,
                hashing,
                scaling: dice.among(&[Scaling::Static, Scaling::Static, Scaling::Dynamic]),
                overflow: dice.among(&[Overflow::Reactive, Overflow::Reactive, Overflow::Proactive]),
                congestion_control: !dice.one_in(4),
                timeout,
            };
            debug_assert!(atp.fits(topology, &workers).is_ok(), "few hosts have few children");
            Arc::new(atp)
        }
    };
    let start = if dice.one_in(2) { Duration::ZERO } else { dice.time(Duration::ZERO, TROUBLE / 4) };
    let stop = dice.one_in(6).then(|| start + dice.time(Duration::from_nanos(1), TROUBLE / 4));
    JobPlan {
        name: format!("job{index}"),
        workload: workload(dice, system.packet_elements()),
        rates: Rates::OfLinks,
        lateness: Lateness::None,
        system,
        workers,
        class: match dice.range(0, 4) {
            0 => Class { priority: dice.range(0, PRIORITIES as u64) as u8, ..Class::DEFAULT },
            1 => Class { drop_class: 1, ..Class::DEFAULT },
            _ => Class::default(),
        },
        start,
        stop,
        integers: dice.one_in(4),
        large_values: dice.among(&[0.0, 0.0, 0.02, 0.3]),
        sampled: false,
    }
}

/// How fast workers send, where nothing else costs their hosts time, and how late each is.
fn unlike(dice: &mut Dice, topology: &Topology, job: &JobPlan) -> (Rates, Lateness) {
    let may_be = job.workers.iter().all(|worker| topology.get(*worker).config.sends == Cost::NOTHING);
    let rate = |dice: &mut Dice| dice.among(&[1_000_000_000, 3_000_000_000, 10_000_000_000]);
    let rates = match dice.range(0, 8) {
        0 if may_be => Rates::Given(job.workers.iter().map(|_| rate(dice)).collect()),
        1 if may_be => Rates::Drawn { most_bps: rate(dice), deviation: dice.among(&[0.0, 0.2]) },
        _ => Rates::OfLinks,
    };
    let most = dice.time(Duration::from_micros(1), TROUBLE / 4);
    let lateness = match dice.range(0, 8) {
        0 => Lateness::Uniform(most),
        1 => Lateness::Normal { most, deviation: dice.among(&[0.1, 0.5]) },
        _ => Lateness::None,
    };
    (rates, lateness)
}

/// GOAT in the place of ATP, with a plan that nobody thought about: its parts need not be the
/// model's, nor fit the switches' memory.
fn goat(dice: &mut Dice, topology: &Topology, job: &JobPlan) -> Goat {
    let switches: Vec<NodeId> = topology.programmable().collect();
    let sub_models: Vec<u32> = (0..dice.range(1, 6)).map(|_| dice.among(&[1, 2, 7, 30, 100])).collect();
    let mut nodes = vec![Vec::new(); job.workers.len()];
    for _ in &sub_models {
        let any = |dice: &mut Dice| (!switches.is_empty()).then(|| dice.among(&switches));
        let (of_all, several) = (any(dice), dice.one_in(2));
        for assigned in &mut nodes {
            assigned.push(match dice.range(0, 8) {
                0 => None,
                1 | 2 if several => any(dice),
                _ => of_all,
            });
        }
    }
    let packets: u32 = sub_models.iter().sum();
    Goat {
        server: job.system.server().expect("ATP has one"),
        elements: job.system.packet_elements() as u16,
        window: dice.among(&[1, 5, 64]).min(packets as u16),
        sub_models,
        nodes,
        onward: Vec::new(),
        first_aggregator: dice.among(&[0, 0, 50]),
        scaling: dice.among(&[Scaling::Static, Scaling::Static, Scaling::Dynamic]),
        overflow: dice.among(&[Overflow::Reactive, Overflow::Reactive, Overflow::Proactive]),
        congestion_control: !dice.one_in(4),
        timeout: job.system.timeout(),
    }
}

/// Where the sums of most switches of most plans go: to other switches on their way.
fn onward(dice: &mut Dice, topology: &Topology, system: &Goat) -> Vec<BTreeMap<NodeId, NodeId>> {
    if dice.one_in(4) {
        return Vec::new();
    }
    let ways: Vec<(NodeId, Vec<NodeId>)> =
        topology.programmable().map(|at| (at, on_the_way(topology, at, system.server))).collect();
    let mut of_part = || {
        let mut onward = BTreeMap::new();
        for (at, way) in ways.iter().filter(|(_, way)| !way.is_empty()) {
            if !dice.one_in(4) {
                onward.insert(*at, dice.among(way));
            }
        }
        onward
    };
    system.sub_models.iter().map(|_| of_part()).collect()
}

/// DLCP in the place of a job's system.
fn dlcp(dice: &mut Dice, topology: &Topology, job: &JobPlan) -> Dlcp {
    let hosts: Vec<NodeId> = topology.hosts().collect();
    let is_ring = job.workers.len() > 1 && dice.one_in(3);
    let mut bound = |shares: &[f64]| LossBound::new(dice.among(shares)).expect("below one");
    let (loss_bound, pull_bound) = (bound(&[0.0, 0.01, 0.1, 0.4]), bound(&[0.0, 0.0, 0.2]));
    let time = |dice: &mut Dice, us: &[u64]| Duration::from_micros(dice.among(us));
    Dlcp {
        way: if is_ring { Way::Ring } else { Way::Servers(vec![dice.among(&hosts)]) },
        divide_above_bytes: 10_000,
        pull_bound: if is_ring { LossBound::RELIABLE } else { pull_bound },
        elements: dice.among(&[CHUNK_ELEMENTS[0], CHUNK_ELEMENTS[1], CHUNK_ELEMENTS[2]]) as u16,
        flow_blocks: dice.among(&[3, 16, 4096]),
        flows: dice.among(&[1, 2, 8]),
        sends: PushPlan {
            loss_bound,
            period: time(dice, &[50, 200, 1000]),
            delta: dice.among(&[1.0, 2.0]),
            finish: dice.among(&[Finish::Stopped, Finish::Stopped, Finish::BoundMet]),
            quiet: time(dice, &[20, 100, 1000]),
            timeout: time(dice, &[300, 1000, 5000]),
            follows: dice.one_in(2),
        },
    }
}

/// Up to three hosts in a row.
fn servers(dice: &mut Dice, topology: &Topology) -> Vec<NodeId> {
    let hosts: Vec<NodeId> = topology.hosts().collect();
    let (first, count) = (dice.range(0, hosts.len() as u64) as usize, dice.range(1, 4) as usize);
    (first..first + count.min(hosts.len())).map(|at| hosts[at % hosts.len()]).collect()
}

/// Connections to servers in the place of a ring's.
fn tcp_ps(dice: &mut Dice, topology: &Topology) -> TcpPs {
    let bytes = |dice: &mut Dice| dice.one_in(2).then(|| dice.among(&[4, 1_000, 20_000]));
    let (servers, partition_bytes) = (servers(dice, topology), bytes(dice));
    TcpPs {
        servers,
        partition_bytes,
        credit_bytes: bytes(dice),
        transport: TransportPlan { transport: dice.among(&TRANSPORTS), ..TransportPlan::default() },
    }
}

/// `BytePS` in the place of a job's system.
fn byteps(dice: &mut Dice, topology: &Topology, job: &JobPlan) -> BytePs {
    let services = servers(dice, topology);
    // 1 of 1, 1 of 3 and 2 of 3, and so on.
    let whole = (services.len() * (services.len() + 1) / 2) as f64;
    BytePs {
        shares: (1..=services.len()).map(|part| part as f64 / whole).collect(),
        services,
        // As long as that system's: tensors are so many packets of it.
        elements: job.system.packet_elements() as u16,
        wire_dtype: WireDtype::Native,
        window: dice.among(&[None, Some(1), Some(2), Some(16)]),
        part_min: dice.among(&[1, 5, 32]),
        timeout: job.system.timeout(),
        take_over: Duration::ZERO,
    }
}

/// Services at the same hosts that add deltas.
fn asynchronous(dice: &mut Dice, system: &BytePs) -> Asynchronous {
    let transport = TransportPlan { transport: dice.among(&TRANSPORTS), ..TransportPlan::default() };
    Asynchronous { services: system.services.clone(), shares: system.shares.clone(), transport }
}

fn workload(dice: &mut Dice, packet: usize) -> Workload {
    if dice.one_in(5) {
        let (model, parameters) = dice.among(&[(Model::AlexNet, 61e6), (Model::ResNet18, 12e6)]);
        // As many parameters as the tensors below have elements, and milliseconds to compute them.
        let scale = parameters / dice.range(1, 30 * packet as u64) as f64;
        return Workload::Training {
            batch: 32,
            iterations: Some(dice.range(1, 5)),
            trained: Trained::Model(model, 1e14 / scale * dice.among(&[1.0, 10.0])),
            scale,
            jitter: dice.among(&[0.0, 0.1, 0.9]),
            pause: dice.one_in(3).then(|| (dice.range(1, 3), dice.time(Duration::ZERO, TROUBLE / 4))),
            overlap: false,
            partition: None,
            order: SendOrder::Ready,
        };
    }
    Workload::AllReduce {
        elements: match dice.range(0, 6) {
            0 => 1,
            1 => packet,
            _ => dice.range(1, 60 * packet as u64) as usize,
        },
        in_flight: dice.range(1, 4) as u32,
        count: Some(dice.range(1, 8)),
    }
}

/// The reaction to congestion of the flows beside the jobs.
const TRANSPORTS: [Transport; 4] = [
    Transport::NewReno,
    Transport::Dctcp,
    Transport::Pias { thresholds_bytes: [2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000] },
    Transport::Pfabric,
];

/// Up to two flows between any two hosts: slow ones that nothing slows down, and short ones that
/// give way.
fn background(dice: &mut Dice, topology: &Topology) -> Vec<BackgroundPlan> {
    let hosts: Vec<NodeId> = topology.hosts().collect();
    let plans = (0..dice.range(0, 5).saturating_sub(2)).map(|_| {
        let from = dice.range(0, hosts.len() as u64) as usize;
        let to = (from + dice.range(1, hosts.len() as u64) as usize) % hosts.len();
        let start = dice.time(Duration::ZERO, TROUBLE / 4);
        let rate_bps = dice.one_in(2).then(|| dice.among(&[50_000_000, 500_000_000]));
        let sizes = dice.among(&[1_000, 15_000, 200_000]);
        BackgroundPlan {
            from: hosts[from],
            to: hosts[to],
            rate_bps,
            transport: TransportPlan {
                // From nothing but who they are, so that what else is drawn stays as it was.
                transport: TRANSPORTS[(from + to) % TRANSPORTS.len()],
                ecn: dice.one_in(2),
                ..TransportPlan::default()
            },
            class: Class { priority: dice.range(0, PRIORITIES as u64) as u8, ..Class::DEFAULT },
            start,
            stop: Some(start + dice.time(Duration::from_nanos(1), TROUBLE)),
            size: rate_bps.is_none().then_some(sizes),
            count: if rate_bps.is_none() { dice.range(1, 20) as u32 } else { 1 },
            every: dice.time(Duration::from_micros(10), TROUBLE / 20),
            spread: dice.time(Duration::ZERO, TROUBLE / 20),
        }
    });
    plans.collect()
}
