//! The two machines of BytePS's paper (Figures 6(a) and 8(a)).

use super::{Link, MachineTopology, Part, PartId, PartKind, Wire};

/// The rates of links of the paper's machines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PaperRates {
    /// PCIe 3.0 x16: 105 Gbit/s measured, 128 in theory (§4.2.1).
    pub pcie_bps: f64,
    /// From GPU to GPU across PCIe switches: 80 Gbit/s measured (§4.2.1).
    pub peer_bps: f64,
    /// The NIC's cable has 100 Gbit/s; RDMA reaches 90 (§7.1).
    pub nic_bps: f64,
    /// QPI: more than 300 Gbit/s (§4.2.1).
    pub socket_bps: f64,
    /// The rate of each NUMA node's memory. "More than 300 Gbit/s" in §4.2.1; §5 has up to 1024 for
    /// six channels, reading and writing together.
    pub memory_bps: f64,
}

impl PaperRates {
    /// As measured; memory is never the limit.
    pub const MEASURED: Self = Self {
        pcie_bps: 105e9,
        peer_bps: 80e9,
        nic_bps: 100e9,
        socket_bps: 300e9,
        memory_bps: f64::INFINITY,
    };
}

/// The rate of one NVLink of a V100; six of them are the 1.2 Tbit/s of §4.2.2.
const NVLINK_BPS: f64 = 200e9;
/// The pairs of eight V100s that NVLinks join, and how many: NVIDIA's DGX-1, which the paper's
/// machine is like (§4.2.3).
const NVLINKS: [(u16, u16, f64); 16] = [
    (0, 1, 1.0),
    (0, 2, 1.0),
    (0, 3, 2.0),
    (0, 4, 2.0),
    (1, 2, 2.0),
    (1, 3, 1.0),
    (1, 5, 2.0),
    (2, 3, 2.0),
    (2, 6, 1.0),
    (3, 7, 1.0),
    (4, 5, 1.0),
    (4, 6, 1.0),
    (4, 7, 2.0),
    (5, 6, 2.0),
    (5, 7, 1.0),
    (6, 7, 2.0),
];

/// Parts that are being put together.
#[derive(Default)]
struct Parts {
    parts: Vec<Part>,
    links: Vec<Link>,
}

impl Parts {
    fn add(&mut self, name: String, kind: PartKind) -> PartId {
        self.parts.push(Part { name, kind });
        PartId((self.parts.len() - 1) as u16)
    }

    fn join(&mut self, a: PartId, b: PartId, wire: Wire, rate_bps: f64) {
        self.links.push(Link { ends: [a, b], wire, rate_bps });
    }

    fn cpus(&mut self, rates: &PaperRates) -> [PartId; 2] {
        let kind = PartKind::Cpu { memory_bps: rates.memory_bps };
        let cpus = [0, 1].map(|index| self.add(format!("cpu{index}"), kind));
        self.join(cpus[0], cpus[1], Wire::Socket, rates.socket_bps);
        cpus
    }

    fn nic(&mut self, under: PartId, rates: &PaperRates) {
        let [nic, network] = [("nic", PartKind::Nic), ("network", PartKind::Network)]
            .map(|(name, kind)| self.add(name.into(), kind));
        self.join(under, nic, Wire::Pcie, rates.pcie_bps);
        self.join(nic, network, Wire::Cable, rates.nic_bps);
    }

    /// PCIe switches, the same number under each CPU, and so many GPUs under each switch.
    fn gpus(
        &mut self,
        cpus: [PartId; 2],
        switches: u16,
        gpus: u16,
        rates: &PaperRates,
    ) -> (Vec<PartId>, Vec<PartId>) {
        let (mut all_switches, mut all_gpus) = (Vec::new(), Vec::new());
        for index in 0..switches {
            let switch = self.add(format!("pcie{index}"), PartKind::PcieSwitch);
            let cpu = cpus[usize::from(index * 2 / switches)];
            self.join(cpu, switch, Wire::Pcie, rates.pcie_bps);
            all_switches.push(switch);
            for gpu in 0..gpus {
                let gpu = self.add(format!("gpu{}", index * gpus + gpu), PartKind::Gpu);
                self.join(switch, gpu, Wire::Pcie, rates.pcie_bps);
                all_gpus.push(gpu);
            }
        }
        (all_switches, all_gpus)
    }

    fn done(self, rates: &PaperRates) -> MachineTopology {
        MachineTopology::new(self.parts, self.links, rates.peer_bps).expect("a machine that can be")
    }
}

/// Figures 6(a) and 7: two CPUs, `switches` PCIe switches with `gpus` GPUs each, and a NIC at a CPU
/// with lanes of its own. The paper's has two and four.
///
/// # Panics
/// When a rate is not greater than zero.
#[must_use]
pub fn pcie_only(switches: u16, gpus: u16, rates: &PaperRates) -> MachineTopology {
    let mut parts = Parts::default();
    let cpus = parts.cpus(rates);
    parts.gpus(cpus, switches, gpus, rates);
    parts.nic(cpus[0], rates);
    parts.done(rates)
}

/// Figure 8(a): two CPUs, four PCIe switches with two GPUs each, NVLinks between GPUs, and a NIC
/// that shares the first PCIe switch with two of them.
///
/// # Panics
/// When a rate is not greater than zero.
#[must_use]
pub fn nvlink_based(rates: &PaperRates) -> MachineTopology {
    let mut parts = Parts::default();
    let cpus = parts.cpus(rates);
    let (switches, gpus) = parts.gpus(cpus, 4, 2, rates);
    parts.nic(switches[0], rates);
    for (a, b, count) in NVLINKS {
        parts.join(gpus[usize::from(a)], gpus[usize::from(b)], Wire::NvLink, count * NVLINK_BPS);
    }
    parts.done(rates)
}
