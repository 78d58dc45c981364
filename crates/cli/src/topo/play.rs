//! A strategy's copies in the simulator: over the machine's links as packets, in a pipeline of
//! partitions (BytePS §6.1).
//!
//! Each partition of the gradients goes through the stages; a stage begins when all copies of the
//! one before have arrived, and stages of different partitions overlap. A window for each flow and
//! queues that hold all windows stand in for PCIe's reaction to congestion: nothing is lost. Memory
//! is not a limit here.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use fanin_plan::machine_topology::{Flow, MachineTopology, PartId, PartKind, Wire};
use fanin_sim::net::{
    Actor, Context, FlowId, LinkConfig, Network, NetworkConfig, NodeConfig, NodeId, Notice, Packet,
    QueueConfig, TcpConfig, Time, Topology,
};
use fanin_units::RATE_MAX_BPS;

/// §4.1: "small parts no larger than 4MB".
const PARTITION_BYTES: u64 = 4_000_000;
/// Partitions on their way.
const PARTITIONS: u64 = 16;
/// Packets are long: their headers are a thousandth.
const MTU: u32 = 65_535;
const SEGMENT_BYTES: u32 = 65_000;
/// The window of each flow. With shorter windows, flows that share a link with many others leave
/// their own other links idle. Times are then longer than the slowest link's: by up to a third with
/// 1 MB, and by 2 % with 16 MB.
const WINDOW_BYTES: u64 = 16_000_000;
const DELAY: Duration = Duration::from_nanos(500);
/// All windows fit.
const QUEUE: QueueConfig = QueueConfig::tail_drop(4 << 30);

/// A copy of a stage: its connection, and its part of the gradients.
struct Copy {
    flow: FlowId,
    share: f64,
}

/// Begins each stage of each partition.
struct Pipeline {
    stages: Vec<Vec<Copy>>,
    size_bytes: u64,
    /// For each partition that has begun: the copies of its stage that have not arrived.
    outstanding: Vec<usize>,
    ended: u64,
    finished: Rc<Cell<Option<Time>>>,
}

impl Pipeline {
    fn partitions(&self) -> u64 {
        self.size_bytes.div_ceil(PARTITION_BYTES)
    }

    fn begin(&mut self, context: &mut Context<'_>, partition: u64, stage: usize) {
        let bytes = PARTITION_BYTES.min(self.size_bytes - partition * PARTITION_BYTES) as f64;
        let copies = &self.stages[stage];
        self.outstanding[partition as usize] = copies.len();
        let token = partition * self.stages.len() as u64 + stage as u64;
        for Copy { flow, share } in copies {
            let arrived = Notice { actor: context.actor(), token };
            context.write(*flow, ((share * bytes).round() as u64).max(1), Some(arrived));
        }
    }

    fn next_partition(&mut self, context: &mut Context<'_>) {
        let partition = self.outstanding.len() as u64;
        if partition < self.partitions() {
            self.outstanding.push(0);
            self.begin(context, partition, 0);
        }
    }
}

impl Actor for Pipeline {
    fn start(&mut self, context: &mut Context<'_>) {
        (0..PARTITIONS).for_each(|_| self.next_partition(context));
    }

    fn packet(&mut self, _: &mut Context<'_>, _: &Packet<'_>) {}

    fn notice(&mut self, context: &mut Context<'_>, token: u64) {
        let stages = self.stages.len() as u64;
        let (partition, stage) = (token / stages, (token % stages) as usize);
        let outstanding = &mut self.outstanding[partition as usize];
        *outstanding -= 1;
        if *outstanding > 0 {
            return;
        }
        if stage + 1 < self.stages.len() {
            return self.begin(context, partition, stage + 1);
        }
        self.ended += 1;
        if self.ended == self.partitions() {
            self.finished.set(Some(context.time()));
        }
        self.next_partition(context);
    }
}

/// Seconds until all gradients are back at all GPUs.
pub(super) fn seconds(machine: &MachineTopology, flows: &[Flow], size_bytes: u64) -> f64 {
    let (topology, places) = network_of(machine);
    let mut network =
        Network::new(topology, NetworkConfig::default()).expect("links have rates and parts names");
    let mut flows = flows.to_vec();
    flows.sort_by_key(|flow| flow.stage);
    let mut connected = |flow: &Flow| {
        let (from, to) = (places[flow.from.index()], places[flow.to.index()]);
        let flow_id = network.open_tcp(TcpConfig {
            segment_bytes: SEGMENT_BYTES,
            window_initial_bytes: WINDOW_BYTES,
            window_max_bytes: WINDOW_BYTES,
            rto_min: Duration::from_secs(1),
            ..TcpConfig::new(from, to)
        });
        Copy { flow: flow_id, share: flow.share * machine.slowed(flow) }
    };
    let stages: Vec<Vec<Copy>> = flows
        .chunk_by(|a, b| a.stage == b.stage)
        .map(|stage| stage.iter().map(&mut connected).collect())
        .collect();
    let (Some(gpu), false) = (machine.gpus().next(), stages.is_empty()) else { return 0.0 };
    let finished = Rc::new(Cell::new(None));
    let pipeline =
        Pipeline { stages, size_bytes, outstanding: Vec::new(), ended: 0, finished: Rc::clone(&finished) };
    network.add_actor(places[gpu.index()], 1, pipeline);
    network.run_until(Time::MAX);
    finished.get().expect("nothing is lost").as_secs_f64()
}

/// The machine as a network, and the node of each part. A part at which copies begin or end is a
/// host, and a NUMA node a switch with its memory behind it. Each GPU is one port further from PCIe
/// than from NVLink, so that the shortest way between two that NVLink joins is that.
fn network_of(machine: &MachineTopology) -> (Topology, Vec<NodeId>) {
    let mut topology = Topology::new();
    let fastest = link(RATE_MAX_BPS as f64);
    let mut places = Vec::new();
    let mut ports = Vec::new();
    for part in machine.parts() {
        let (place, port) = match part.kind {
            PartKind::PcieSwitch | PartKind::NvSwitch => {
                let switch = topology.add_switch(&part.name, 0, NodeConfig::new(QUEUE));
                (switch, switch)
            }
            PartKind::Nic | PartKind::Network => {
                let host = topology.add_host(&part.name, NodeConfig::new(QUEUE));
                (host, host)
            }
            PartKind::Cpu { .. } | PartKind::Gpu => {
                let host = topology.add_host(format!("memory of {}", part.name), NodeConfig::new(QUEUE));
                let port = topology.add_switch(&part.name, 0, NodeConfig::new(QUEUE));
                topology.add_link(host, port, fastest);
                (host, port)
            }
        };
        places.push(place);
        ports.push(port);
    }
    for fanin_plan::machine_topology::Link { ends, wire, rate_bps } in machine.links() {
        let at = |part: &PartId| {
            let of_gpu = machine.kind(*part) == PartKind::Gpu && *wire == Wire::NvLink;
            if of_gpu { places[part.index()] } else { ports[part.index()] }
        };
        topology.add_link(at(&ends[0]), at(&ends[1]), link(*rate_bps));
    }
    (topology, places)
}

fn link(rate_bps: f64) -> LinkConfig {
    // A rate that is not known, or faster than the simulator's fastest link, is never the limit.
    LinkConfig::new(rate_bps.min(RATE_MAX_BPS as f64) as u64, DELAY).with_mtu(MTU)
}

#[cfg(test)]
mod tests {
    use fanin_plan::machine_topology::{Outside, PaperRates, nvlink_based, pcie_only, planned};

    use super::*;

    /// The slowest link's time is a bound, and a pipeline comes near it: links are kept busy
    /// whatever stage their copies are of.
    #[test]
    fn played_strategies_take_what_the_slowest_link_says() {
        let size_bytes = 200_000_000;
        let rates = PaperRates::MEASURED;
        for machine in [pcie_only(2, 4, &rates), nvlink_based(&rates)] {
            for plan in planned(&machine, Outside { machines: 8, spares: 0 }) {
                let predicted = plan.seconds_per_byte * size_bytes as f64;
                let played = seconds(&machine, &plan.traffic.flows, size_bytes) / predicted;
                assert!((0.999..1.15).contains(&played), "{:?}: {played}", plan.strategy);
            }
        }
    }

    #[test]
    fn gradients_shorter_than_a_partition_go_through_all_stages() {
        let machine = pcie_only(1, 1, &PaperRates::MEASURED);
        let plan = &planned(&machine, Outside { machines: 2, spares: 0 })[0];
        // To memory, to the NIC, beyond, and back: a megabyte over links of 105 and 100 Gbit/s, one
        // after the other.
        let played = seconds(&machine, &plan.traffic.flows, 1_000_000);
        assert!((3.0 * 8e-5..4.0 * 8e-5 + 1e-4).contains(&played), "{played}");
    }
}
