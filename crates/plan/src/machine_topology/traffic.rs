//! The load of a strategy on each link and each memory, and how long that takes.

use super::intra_machine::Copies;
use super::{Direction, Flow, Link, MachineTopology, Outside, PartId, PartKind, Strategy, Wire};

/// The load of a strategy on links and memories, for each byte of the gradients of one GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Traffic {
    /// Its copies.
    pub flows: Vec<Flow>,
    /// For each link: bytes forth and back.
    pub bytes: Vec<[f64; 2]>,
    /// For each link: seconds that these take. Copies from GPU to GPU that leave the PCIe switches
    /// go no faster than [`MachineTopology::peer_bps`].
    pub seconds: Vec<[f64; 2]>,
    /// For each NUMA node: bytes that are read and written, and the seconds that takes.
    pub memory: Vec<(PartId, f64, f64)>,
}

/// The link or memory that everything waits for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Slowest {
    /// A direction of the link of this index.
    Link(usize, Direction),
    /// The memory of a NUMA node.
    Memory(PartId),
    /// Nothing is moved, or nothing takes time.
    Nothing,
}

impl Traffic {
    /// Counts.
    ///
    /// # Panics
    /// As [`Strategy::Roots`] says.
    #[must_use]
    pub fn of(topology: &MachineTopology, strategy: &Strategy, outside: Outside) -> Self {
        Self::count(topology, strategy.copies(topology, outside))
    }

    fn count(topology: &MachineTopology, Copies { flows, summed }: Copies) -> Self {
        let mut bytes = vec![[0.0; 2]; topology.links().len()];
        let mut seconds = bytes.clone();
        let mut memory = vec![0.0; topology.parts().len()];
        for flow in &flows {
            let way = topology.route(flow.from, flow.to).expect("a machine is one piece");
            let leaves = leaves_switches(topology, flow, &way);
            for (link, direction) in way {
                let Link { wire, rate_bps, .. } = topology.links()[link];
                let slowed = leaves && wire == Wire::Pcie;
                let bps = if slowed { rate_bps.min(topology.peer_bps()) } else { rate_bps };
                bytes[link][direction as usize] += flow.share;
                seconds[link][direction as usize] += flow.share * 8.0 / bps;
            }
            memory[flow.from.index()] += flow.share;
            memory[flow.to.index()] += flow.share;
        }
        for (cpu, share) in summed {
            memory[cpu.index()] += share;
        }
        let memory = topology.ids().zip(memory).filter_map(|(part, bytes)| match topology.kind(part) {
            PartKind::Cpu { memory_bps } => Some((part, bytes, bytes * 8.0 / memory_bps)),
            _ => None,
        });
        Self { memory: memory.collect(), flows, bytes, seconds }
    }

    /// The link or memory that takes longest, and how long for a byte of gradients. If several take
    /// as long, it is the first.
    #[must_use]
    pub fn slowest(&self) -> (Slowest, f64) {
        let links = self.seconds.iter().enumerate().flat_map(|(link, [forth, back])| {
            [(Slowest::Link(link, Direction::Forth), *forth), (Slowest::Link(link, Direction::Back), *back)]
        });
        let memories = self.memory.iter().map(|(cpu, _, seconds)| (Slowest::Memory(*cpu), *seconds));
        let longer = |a: (Slowest, f64), b: (Slowest, f64)| if b.1 > a.1 { b } else { a };
        links.chain(memories).fold((Slowest::Nothing, 0.0), longer)
    }

    /// The times of each direction of a link and of each memory, in one order for all strategies of
    /// a machine.
    pub(super) fn all_seconds(&self) -> impl Iterator<Item = f64> + '_ {
        self.seconds.iter().flatten().copied().chain(self.memory.iter().map(|(_, _, seconds)| *seconds))
    }

    /// All links' bytes.
    pub(super) fn link_bytes(&self) -> f64 {
        self.bytes.iter().flatten().sum()
    }
}

impl MachineTopology {
    /// How many times as long a flow takes as the slowest PCIe link of its way would: a copy from
    /// GPU to GPU that leaves the PCIe switches.
    #[must_use]
    pub fn slowed(&self, flow: &Flow) -> f64 {
        let way = self.route(flow.from, flow.to).expect("a machine is one piece");
        if !leaves_switches(self, flow, &way) {
            return 1.0;
        }
        let links = way.iter().map(|(link, _)| self.links()[*link]).filter(|link| link.wire == Wire::Pcie);
        let bps = links.map(|link| link.rate_bps).fold(f64::INFINITY, f64::min);
        if bps.is_finite() { (bps / self.peer_bps()).max(1.0) } else { 1.0 }
    }
}

/// Whether it is a copy from GPU to GPU that passes a NUMA node.
fn leaves_switches(topology: &MachineTopology, flow: &Flow, way: &[(usize, Direction)]) -> bool {
    let gpu = |part: PartId| topology.kind(part) == PartKind::Gpu;
    let ends = way.iter().flat_map(|(link, _)| topology.links()[*link].ends);
    gpu(flow.from)
        && gpu(flow.to)
        && ends.into_iter().any(|end| matches!(topology.kind(end), PartKind::Cpu { .. }))
}
