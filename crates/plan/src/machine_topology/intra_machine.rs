//! How gradients come from the GPUs of a machine to its NICs, and sums back: the copies of each
//! strategy.

use std::collections::{BTreeMap, BTreeSet};

use super::{MachineTopology, PartId};
use crate::{Cluster, LoadSplit, Machine};

/// Steps in the search for a ring over NVLinks; what has none by then is taken as having none.
const RING_STEPS_MAX: usize = 100_000;

/// How gradients of the GPUs come to the NICs, and sums back.
#[derive(Clone, Debug, PartialEq)]
pub enum Strategy {
    /// CPU-assisted aggregation (§4.2.1): GPUs behind one PCIe switch sum, the NUMA nodes sum over
    /// switches. This part of the gradients goes whole from every GPU to memory instead
    /// (brute-force copy).
    CpuAssisted {
        /// `x` of Eqs. 8 and 9.
        brute_force: f64,
    },
    /// Reduce over NVLink to these GPUs, each an equal part, and broadcast from them (§4.2.2). With
    /// all GPUs it is reduce-scatter and all-gather.
    Roots(Vec<PartId>),
    /// The strategy that BytePS compares with in §4.2.1 and §7.3 (a): reduce-scatter over all GPUs,
    /// whatever switch they are behind, each copies its part, all-gather.
    Straightforward,
    /// A ring all-reduce over the GPUs of all machines: plain NCCL, without GPU-direct RDMA.
    Ring,
}

/// The cluster around a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outside {
    /// Machines that train, this one too; each has as many GPUs.
    pub machines: usize,
    /// Machines more that only sum.
    pub spares: usize,
}

impl Outside {
    /// This machine trains alone.
    pub const ALONE: Self = Self { machines: 1, spares: 0 };

    /// Bytes that the NICs carry in each direction for each byte of gradients, with a service on
    /// every machine (§4.1, Eq. 6). The shares of others that are summed here are included.
    ///
    /// # Panics
    /// When no machine trains.
    #[must_use]
    pub fn through_nics(self) -> f64 {
        if self.machines == 1 {
            return 0.0;
        }
        // Bits a second of a byte a second.
        const RATE: f64 = 8.0;
        let training = (0..self.machines).map(|index| Machine::training(format!("w{index}"), RATE));
        let spare = (0..self.spares).map(|index| Machine::spare(format!("s{index}"), RATE));
        let cluster = Cluster::new(training.chain(spare).collect()).expect("machines with links");
        LoadSplit::of(&cluster).seconds_per_byte
    }
}

/// When something happens to a part of the gradients: each stage waits for the one before, of the
/// same part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Among GPUs: reduce, or reduce-scatter.
    Reduce,
    /// From GPUs to memory.
    ToMemory,
    /// Sums of other NUMA nodes to those of the NICs.
    Gather,
    /// To services and back.
    Network,
    /// To other NUMA nodes.
    Spread,
    /// From memory to GPUs.
    FromMemory,
    /// Among GPUs: broadcast, or all-gather.
    Broadcast,
}

/// Bytes from one part to another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Flow {
    /// When.
    pub stage: Stage,
    /// Whose.
    pub from: PartId,
    /// For whom.
    pub to: PartId,
    /// The share of one GPU's gradients.
    pub share: f64,
}

/// The work of a strategy: its copies, and the memory read and written for sums.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Copies {
    pub(super) flows: Vec<Flow>,
    /// For each NUMA node that sums: each contribution is read once, and each sum written once.
    pub(super) summed: BTreeMap<PartId, f64>,
}

impl Copies {
    fn add(&mut self, stage: Stage, from: PartId, to: PartId, share: f64) {
        if share > 0.0 && from != to {
            self.flows.push(Flow { stage, from, to, share });
        }
    }

    /// A way in `stage`, and back in the stage that mirrors it.
    fn there_and_back(&mut self, stage: Stage, from: PartId, to: PartId, share: f64) {
        let back = match stage {
            Stage::Reduce => Stage::Broadcast,
            Stage::ToMemory => Stage::FromMemory,
            _ => Stage::Spread,
        };
        self.add(stage, from, to, share);
        self.add(back, to, from, share);
    }

    fn sums(&mut self, cpu: PartId, share: f64) {
        *self.summed.entry(cpu).or_default() += share;
    }

    /// A ring's reduce-scatter and all-gather over GPUs, of `share` of the gradients.
    fn ring_halves(&mut self, gpus: &[PartId], share: f64) {
        let part = share * (gpus.len() as f64 - 1.0) / gpus.len() as f64;
        for (from, to) in around(gpus) {
            self.add(Stage::Reduce, from, to, part);
            self.add(Stage::Broadcast, from, to, part);
        }
    }
}

/// Each and the next, the last and the first.
fn around(gpus: &[PartId]) -> impl Iterator<Item = (PartId, PartId)> + '_ {
    gpus.iter().copied().zip(gpus.iter().copied().cycle().skip(1))
}

impl Strategy {
    /// The copies; nothing where there is no GPU.
    ///
    /// # Panics
    /// For [`Self::Roots`] when NVLink does not reach from each root to all GPUs, or there is no
    /// root.
    #[must_use]
    pub(super) fn copies(&self, topology: &MachineTopology, outside: Outside) -> Copies {
        let mut copies = Copies::default();
        let gpus: Vec<_> = topology.gpus().collect();
        if gpus.is_empty() {
            return copies;
        }
        let through_nics = outside.through_nics();
        match self {
            Self::CpuAssisted { brute_force } => {
                let assisted = 1.0 - brute_force;
                // For each NUMA node: its groups, and its GPUs.
                let mut below: BTreeMap<PartId, [f64; 2]> = BTreeMap::new();
                for group in topology.groups() {
                    copies.ring_halves(&group, assisted);
                    let counts = below.entry(topology.cpu_of(group[0])).or_default();
                    counts[0] += 1.0;
                    counts[1] += group.len() as f64;
                    for gpu in &group {
                        let share = assisted / group.len() as f64 + brute_force;
                        copies.there_and_back(Stage::ToMemory, *gpu, topology.cpu_of(*gpu), share);
                    }
                }
                for (cpu, counts) in &below {
                    for (count, part) in counts.iter().zip([assisted, *brute_force]) {
                        if *count > 1.0 {
                            copies.sums(*cpu, part * (count + 1.0));
                        }
                    }
                }
                // Every NUMA node has a sum of all the gradients of its GPUs, and each NIC's one
                // its part of the whole.
                let homes = homes(topology);
                for (home, part) in &homes {
                    for cpu in below.keys().filter(|cpu| **cpu != *home) {
                        copies.there_and_back(Stage::Gather, *cpu, *home, *part);
                    }
                    if below.len() > 1 {
                        copies.sums(*home, part * (below.len() as f64 + 1.0));
                    }
                }
                network(&mut copies, topology, through_nics);
            }
            Self::Roots(roots) => {
                let part = 1.0 / roots.len() as f64;
                for root in roots {
                    let tree = nvlink_tree(topology, *root);
                    assert!(tree.len() + 1 == gpus.len(), "NVLink does not reach all GPUs from a root");
                    for (gpu, towards) in tree {
                        copies.there_and_back(Stage::Reduce, gpu, towards, part);
                    }
                }
                if through_nics > 0.0 {
                    to_homes(&mut copies, topology, roots.iter().map(|root| (*root, part)));
                    network(&mut copies, topology, through_nics);
                }
            }
            Self::Straightforward => {
                copies.ring_halves(&gpus, 1.0);
                if through_nics > 0.0 {
                    let part = 1.0 / gpus.len() as f64;
                    to_homes(&mut copies, topology, gpus.iter().map(|gpu| (*gpu, part)));
                    network(&mut copies, topology, through_nics);
                }
            }
            Self::Ring => ring(&mut copies, topology, outside),
        }
        copies
    }
}

/// The NUMA nodes of the NICs, and the part of the gradients that goes through each, by the rates
/// of the cables. Without a NIC it is the NUMA node of the first GPU.
fn homes(topology: &MachineTopology) -> BTreeMap<PartId, f64> {
    let mut homes = BTreeMap::new();
    for (nic, part) in nic_parts(topology) {
        *homes.entry(topology.cpu_of(nic)).or_insert(0.0) += part;
    }
    if homes.is_empty() {
        homes.extend(topology.gpus().next().map(|gpu| (topology.cpu_of(gpu), 1.0)));
    }
    homes
}

/// Which part of what goes out each NIC carries: all the same where they are of no known rate.
fn nic_parts(topology: &MachineTopology) -> Vec<(PartId, f64)> {
    let rates: Vec<_> = topology.nics().map(|nic| (nic, topology.cable(nic).1)).collect();
    let count = rates.len() as f64;
    let sum: f64 = rates.iter().map(|(_, bps)| bps).sum();
    rates.into_iter().map(|(nic, bps)| (nic, if sum.is_finite() { bps / sum } else { 1.0 / count })).collect()
}

/// The sums of this machine that GPUs hold go to memory, and to the NUMA nodes of the NICs.
fn to_homes(copies: &mut Copies, topology: &MachineTopology, held: impl Iterator<Item = (PartId, f64)>) {
    let mut at = BTreeMap::new();
    for (gpu, share) in held {
        let cpu = topology.cpu_of(gpu);
        copies.there_and_back(Stage::ToMemory, gpu, cpu, share);
        *at.entry(cpu).or_insert(0.0) += share;
    }
    for (home, part) in homes(topology) {
        for (cpu, share) in &at {
            copies.there_and_back(Stage::Gather, *cpu, home, share * part);
        }
    }
}

fn network(copies: &mut Copies, topology: &MachineTopology, through_nics: f64) {
    for (nic, part) in nic_parts(topology) {
        let (cpu, (outside, _)) = (topology.cpu_of(nic), topology.cable(nic));
        for (from, to) in [(cpu, nic), (nic, outside), (outside, nic), (nic, cpu)] {
            copies.add(Stage::Network, from, to, through_nics * part);
        }
    }
}

/// NVLink's GPUs below a root, each with the next one towards it: depth first, so that the tree has
/// few branches and each link carries a sum once.
pub(super) fn nvlink_tree(topology: &MachineTopology, root: PartId) -> Vec<(PartId, PartId)> {
    let mut tree = Vec::new();
    let mut seen = BTreeSet::from([root]);
    let mut way = vec![root];
    while let Some(at) = way.last().copied() {
        let next = topology.gpus().find(|gpu| !seen.contains(gpu) && topology.nvlink_joins(at, *gpu));
        if let Some(gpu) = next {
            seen.insert(gpu);
            tree.push((gpu, at));
            way.push(gpu);
        } else {
            way.pop();
        }
    }
    tree
}

/// All GPUs in the order of a ring: the first and the last nearest to the NIC, as NCCL has them.
fn ring_order(topology: &MachineTopology, nic: Option<PartId>) -> Vec<PartId> {
    let gpus: Vec<_> = topology.gpus().collect();
    let near = |gpu: &PartId| {
        let Some(nic) = nic else { return 0 };
        topology.route(*gpu, nic).map_or(usize::MAX, |way| way.len())
    };
    let mut by_nearness = gpus.clone();
    by_nearness.sort_by_key(near);
    let first = by_nearness[0];
    let last = by_nearness.get(1).copied().filter(|gpu| near(gpu) == near(&first));
    if let Some(order) = nvlink_ring(topology, first, last, gpus.len()) {
        return order;
    }
    let between = gpus.into_iter().filter(|gpu| *gpu != first && Some(*gpu) != last);
    [first].into_iter().chain(between).chain(last).collect()
}

/// A way over NVLinks from `first` to `last`, or anywhere, through all GPUs once.
fn nvlink_ring(
    topology: &MachineTopology,
    first: PartId,
    last: Option<PartId>,
    count: usize,
) -> Option<Vec<PartId>> {
    let mut way = vec![first];
    // For each GPU on the way: those still to be tried after it.
    let onward = |way: &[PartId]| -> Vec<PartId> {
        let at = way[way.len() - 1];
        let ends = way.len() + 1 == count;
        let mut next: Vec<_> = topology
            .gpus()
            .filter(|gpu| !way.contains(gpu) && topology.nvlink_joins(at, *gpu))
            .filter(|gpu| last.is_none_or(|last| (*gpu == last) == ends))
            .collect();
        next.reverse();
        next
    };
    let mut untried = vec![onward(&way)];
    for _ in 0..RING_STEPS_MAX {
        if way.len() == count {
            return Some(way);
        }
        match untried.last_mut()?.pop() {
            Some(gpu) => {
                way.push(gpu);
                untried.push(onward(&way));
            }
            None => {
                untried.pop();
                way.pop();
            }
        }
    }
    None
}

/// A ring through each NIC, of its part.
fn ring(copies: &mut Copies, topology: &MachineTopology, outside: Outside) {
    let mut rings: Vec<_> = nic_parts(topology).into_iter().map(|(nic, part)| (Some(nic), part)).collect();
    if rings.is_empty() || outside.machines == 1 {
        rings = vec![(None, 1.0)];
    }
    for (nic, part) in rings {
        let order = ring_order(topology, nic);
        let gpus = (order.len() * outside.machines) as f64;
        // Each half of a ring: reduce-scatter, and all-gather.
        let share = part * (gpus - 1.0) / gpus;
        for stage in [Stage::Reduce, Stage::Broadcast] {
            for (from, to) in around(&order).take(order.len() - usize::from(nic.is_some())) {
                copies.add(stage, from, to, share);
            }
            let Some(nic) = nic else { continue };
            let (cpu, (network, _)) = (topology.cpu_of(nic), topology.cable(nic));
            let out = [order[order.len() - 1], cpu, nic, network];
            let inward = [network, nic, cpu, order[0]];
            for way in [out, inward] {
                way.windows(2).for_each(|hop| copies.add(stage, hop[0], hop[1], share));
            }
        }
    }
}
