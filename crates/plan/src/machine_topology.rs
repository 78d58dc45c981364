//! The inside of a machine (BytePS §4.2): NUMA nodes, PCIe switches, GPUs, NICs, and the links
//! between them.
//!
//! A [`Strategy`] says how gradients of its GPUs come to the NIC and back. The load on each link is
//! counted from the topology ([`Traffic`]), and the slowest link's time is the strategy's.
//! [`planned`] does so for every strategy, and [`best`] chooses.
//!
//! All links are full duplex. A GPU ends every way but those over NVLink, which lead from GPU to
//! GPU.
//!
//! Deliberately absent: how a machine is read, and the copies.

mod intra_machine;
mod papers;
mod planner;
#[cfg(test)]
mod tests;
mod traffic;

use std::collections::{BTreeSet, VecDeque};
use std::error::Error;
use std::fmt;

pub use intra_machine::{Flow, Outside, Stage, Strategy};
pub use papers::{PaperRates, nvlink_based, pcie_only};
pub use planner::{Planned, best, planned};
pub use traffic::{Slowest, Traffic};

/// Parts of a machine at most: more than any has, and a ring over its GPUs is still found at once.
pub const PARTS_MAX: usize = 512;

/// A part of a machine, by its place in [`MachineTopology::parts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PartId(pub u16);

impl PartId {
    /// As an index.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The kind of a part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PartKind {
    /// A NUMA node: cores, and memory that takes and gives so much, reading and writing together;
    /// infinite where it is never the limit.
    Cpu {
        /// Bits a second.
        memory_bps: f64,
    },
    /// A PCIe switch.
    PcieSwitch,
    /// A GPU.
    Gpu,
    /// A network interface.
    Nic,
    /// A switch of NVLinks.
    NvSwitch,
    /// The other end of a NIC's cable.
    Network,
}

/// A part of a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Unique.
    pub name: String,
    /// What it is.
    pub kind: PartKind,
}

/// The kind of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// PCIe: between a NUMA node, a PCIe switch, a GPU or a NIC.
    Pcie,
    /// Between two NUMA nodes: QPI, UPI, Infinity Fabric.
    Socket,
    /// Between two GPUs, or a GPU and a switch of them.
    NvLink,
    /// A NIC's cable.
    Cable,
}

/// A link, the same in both directions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// The two parts that it joins. [`Direction::Forth`] is from the first to the second.
    pub ends: [PartId; 2],
    /// What it is.
    pub wire: Wire,
    /// Bits a second in each direction; infinite where it is never the limit.
    pub rate_bps: f64,
}

/// A direction of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From its first end to its second.
    Forth,
    /// From its second end to its first.
    Back,
}

/// The inside of a machine, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct MachineTopology {
    parts: Vec<Part>,
    links: Vec<Link>,
    peer_bps: f64,
    /// For each part, the parts that are one link away, each with that link.
    neighbours: Vec<Vec<(PartId, usize)>>,
}

impl MachineTopology {
    /// Checks parts and links. `peer_bps` is the most that a copy from GPU to GPU reaches if it
    /// leaves the PCIe switches; infinite if it is not known. The paper measures 80 Gbit/s there,
    /// and 105 within a switch (§4.2.1).
    ///
    /// # Errors
    /// Fails in these cases:
    /// - Two parts share a name, or a link cannot be.
    /// - A GPU or NIC has no way to a NUMA node, or a NIC does not have one cable.
    /// - There are more than [`PARTS_MAX`] parts.
    pub fn new(parts: Vec<Part>, links: Vec<Link>, peer_bps: f64) -> Result<Self, MachineError> {
        if parts.len() > PARTS_MAX {
            return Err(MachineError::TooManyParts(parts.len()));
        }
        let mut names = BTreeSet::new();
        if let Some(part) = parts.iter().find(|part| !names.insert(&part.name)) {
            return Err(MachineError::DuplicateName(part.name.clone()));
        }
        let limits = parts.iter().filter_map(|part| match part.kind {
            PartKind::Cpu { memory_bps } => Some((&part.name, memory_bps)),
            _ => None,
        });
        for (name, bps) in limits {
            rate(format!("the memory of {name}"), bps)?;
        }
        rate("a copy from GPU to GPU".into(), peer_bps)?;
        let mut neighbours: Vec<Vec<(PartId, usize)>> = vec![Vec::new(); parts.len()];
        let mut distinct: Vec<Link> = Vec::with_capacity(links.len());
        for (index, Link { ends: [a, b], wire, rate_bps }) in links.iter().copied().enumerate() {
            if a == b || a.index().max(b.index()) >= parts.len() {
                return Err(MachineError::Ends(index));
            }
            let [one, other] = [a, b].map(|end| &parts[end.index()]);
            if !wire.joins(one.kind, other.kind) {
                return Err(MachineError::Wire(wire, [one.name.clone(), other.name.clone()]));
            }
            rate(format!("the link {} - {}", one.name, other.name), rate_bps)?;
            let mut beside = neighbours[a.index()].iter();
            if let Some((_, link)) = beside.find(|(near, link)| *near == b && distinct[*link].wire == wire) {
                distinct[*link].rate_bps += rate_bps;
                continue;
            }
            neighbours[a.index()].push((b, distinct.len()));
            neighbours[b.index()].push((a, distinct.len()));
            distinct.push(links[index]);
        }
        let topology = Self { parts, links: distinct, peer_bps, neighbours };
        for part in topology.gpus().chain(topology.nics()) {
            if topology.way_up(part).is_none() {
                return Err(MachineError::NoCpu(topology.name(part).to_owned()));
            }
        }
        for nic in topology.nics() {
            let cables = topology.neighbours[nic.index()].iter();
            if cables.filter(|(_, link)| topology.links[*link].wire == Wire::Cable).count() != 1 {
                return Err(MachineError::Cables(topology.name(nic).to_owned()));
            }
        }
        let homes: Vec<_> =
            topology.gpus().chain(topology.nics()).map(|part| topology.cpu_of(part)).collect();
        if let Some([one, other]) = homes.windows(2).find(|pair| topology.route(pair[0], pair[1]).is_none()) {
            let names = [*one, *other].map(|cpu| topology.name(cpu).to_owned());
            return Err(MachineError::Apart(names));
        }
        Ok(topology)
    }

    /// All parts, in the order of their ids.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// All links; those between the same two parts are one, which carries what they carry together.
    #[must_use]
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// The most that a copy from GPU to GPU reaches if it leaves the PCIe switches.
    #[must_use]
    pub const fn peer_bps(&self) -> f64 {
        self.peer_bps
    }

    /// The name of a part for people.
    #[must_use]
    pub fn name(&self, part: PartId) -> &str {
        &self.parts[part.index()].name
    }

    /// What it is.
    #[must_use]
    pub fn kind(&self, part: PartId) -> PartKind {
        self.parts[part.index()].kind
    }

    /// The part of this name.
    #[must_use]
    pub fn part(&self, name: &str) -> Option<PartId> {
        self.ids().find(|part| self.name(*part) == name)
    }

    /// The ids of all parts.
    pub fn ids(&self) -> impl Iterator<Item = PartId> + use<> {
        // At most PARTS_MAX.
        (0..self.parts.len() as u16).map(PartId)
    }

    /// All GPUs.
    pub fn gpus(&self) -> impl Iterator<Item = PartId> + '_ {
        self.ids().filter(|part| self.kind(*part) == PartKind::Gpu)
    }

    /// All NICs.
    pub fn nics(&self) -> impl Iterator<Item = PartId> + '_ {
        self.ids().filter(|part| self.kind(*part) == PartKind::Nic)
    }

    /// The other end of a NIC's cable, and the rate of the cable.
    #[must_use]
    pub fn cable(&self, nic: PartId) -> (PartId, f64) {
        let mut near = self.neighbours[nic.index()].iter();
        let (network, link) =
            near.find(|(_, link)| self.links[*link].wire == Wire::Cable).expect("each NIC has one");
        (*network, self.links[*link].rate_bps)
    }

    /// The NUMA node that a GPU or NIC is next to.
    #[must_use]
    pub fn cpu_of(&self, part: PartId) -> PartId {
        *self.way_up(part).expect("each has one").last().expect("it ends at one")
    }

    /// The PCIe switch right below the NUMA node on the way to a GPU or NIC. `None` if the GPU or
    /// NIC is at the NUMA node itself.
    #[must_use]
    pub fn switch_of(&self, part: PartId) -> Option<PartId> {
        let way = self.way_up(part).expect("each has one");
        way.iter().rev().nth(1).copied().filter(|above| self.kind(*above) == PartKind::PcieSwitch)
    }

    /// The GPUs that are behind one PCIe switch together; one that is behind none is alone. In the
    /// order of their ids, as those in each.
    #[must_use]
    pub fn groups(&self) -> Vec<Vec<PartId>> {
        let mut groups: Vec<(Option<PartId>, Vec<PartId>)> = Vec::new();
        for gpu in self.gpus() {
            let switch = self.switch_of(gpu);
            match groups.iter_mut().find(|(its, _)| switch.is_some() && *its == switch) {
                Some((_, group)) => group.push(gpu),
                None => groups.push((switch, vec![gpu])),
            }
        }
        groups.into_iter().map(|(_, group)| group).collect()
    }

    /// The parts over PCIe to the NUMA node, which is the last.
    fn way_up(&self, part: PartId) -> Option<Vec<PartId>> {
        let is_cpu = |part: PartId| matches!(self.kind(part), PartKind::Cpu { .. });
        let pcie = |link: usize, _: PartId| self.links[link].wire == Wire::Pcie;
        let way = self.search(part, is_cpu, pcie)?;
        Some(way.into_iter().map(|(part, _)| part).collect())
    }

    /// The directions of links that bytes pass. From GPU to GPU they take an NVLink that joins the
    /// two, or one switch of NVLinks; everything else takes the shortest way over the other links.
    /// None if there is no way.
    #[must_use]
    pub fn route(&self, from: PartId, to: PartId) -> Option<Vec<(usize, Direction)>> {
        let way = self.nvlink_way(from, to).or_else(|| {
            self.search(from, |part| part == to, |link, _| self.links[link].wire != Wire::NvLink)
        })?;
        let mut before = from;
        let hop = |(part, link): (PartId, usize)| {
            let direction =
                if self.links[link].ends == [before, part] { Direction::Forth } else { Direction::Back };
            before = part;
            (link, direction)
        };
        Some(way.into_iter().map(hop).collect())
    }

    /// Whether one NVLink, or two and the switch between them, join two GPUs.
    pub(super) fn nvlink_joins(&self, one: PartId, other: PartId) -> bool {
        self.nvlink_way(one, other).is_some()
    }

    fn nvlink_way(&self, from: PartId, to: PartId) -> Option<Vec<(PartId, usize)>> {
        let both_gpus = [from, to].map(|end| self.kind(end)) == [PartKind::Gpu; 2];
        // GPUs do not forward by themselves: on a way of several hops they would be stages of their
        // own.
        let onward = |link: usize, part: PartId| {
            let forwards = part == to || self.kind(part) == PartKind::NvSwitch;
            self.links[link].wire == Wire::NvLink && forwards
        };
        if both_gpus { self.search(from, |part| part == to, onward) } else { None }
    }

    /// The shortest way: the parts after `from`, each with the link to it. GPUs and networks end
    /// every way.
    fn search(
        &self,
        from: PartId,
        found: impl Fn(PartId) -> bool,
        passes: impl Fn(usize, PartId) -> bool,
    ) -> Option<Vec<(PartId, usize)>> {
        let mut came: Vec<Option<(PartId, usize)>> = vec![None; self.parts.len()];
        let mut queue = VecDeque::from([from]);
        while let Some(part) = queue.pop_front() {
            if found(part) {
                let mut way = Vec::new();
                let mut at = part;
                while let Some((before, link)) = came[at.index()].filter(|_| at != from) {
                    way.push((at, link));
                    at = before;
                }
                way.reverse();
                return Some(way);
            }
            if part != from && matches!(self.kind(part), PartKind::Gpu | PartKind::Network) {
                continue;
            }
            for (next, link) in self.neighbours[part.index()].iter().copied() {
                if next != from && came[next.index()].is_none() && passes(link, next) {
                    came[next.index()] = Some((part, link));
                    queue.push_back(next);
                }
            }
        }
        None
    }
}

impl Wire {
    /// Whether it can be between these.
    const fn joins(self, one: PartKind, other: PartKind) -> bool {
        use PartKind::{Cpu, Gpu, Network, Nic, NvSwitch, PcieSwitch};
        match self {
            Self::Pcie => matches!(
                (one, other),
                (Cpu { .. } | PcieSwitch, PcieSwitch | Gpu | Nic)
                    | (PcieSwitch | Gpu | Nic, Cpu { .. } | PcieSwitch)
            ),
            Self::Socket => matches!((one, other), (Cpu { .. }, Cpu { .. })),
            Self::NvLink => matches!((one, other), (Gpu, Gpu | NvSwitch) | (NvSwitch, Gpu)),
            Self::Cable => matches!((one, other), (Nic, Network) | (Network, Nic)),
        }
    }
}

impl fmt::Display for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pcie => "PCIe",
            Self::Socket => "socket link",
            Self::NvLink => "NVLink",
            Self::Cable => "cable",
        })
    }
}

fn rate(what: String, bps: f64) -> Result<(), MachineError> {
    if bps > 0.0 { Ok(()) } else { Err(MachineError::Rate(what, bps)) }
}

/// Why a machine cannot be.
#[derive(Clone, Debug, PartialEq)]
pub enum MachineError {
    /// Two parts have this name.
    DuplicateName(String),
    /// The link of this index joins a part to itself, or to none.
    Ends(usize),
    /// This is not between such parts.
    Wire(Wire, [String; 2]),
    /// Something carries nothing.
    Rate(String, f64),
    /// No PCIe leads from it to a NUMA node.
    NoCpu(String),
    /// A NIC has one cable.
    Cables(String),
    /// Nothing joins two NUMA nodes that GPUs or NICs are at.
    Apart([String; 2]),
    /// So many.
    TooManyParts(usize),
}

impl fmt::Display for MachineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DuplicateName(name) => write!(f, "two parts are called {name}: name each once"),
            Self::Ends(link) => {
                write!(f, "link {link} joins a part to itself or to none: it needs two parts that are there")
            }
            Self::Wire(wire, [a, b]) => write!(f, "no {wire} can be between {a} and {b}"),
            Self::Rate(what, bps) => write!(f, "{what} carries {bps} bit/s, and must carry more than zero"),
            Self::NoCpu(name) => write!(f, "no PCIe leads from {name} to a NUMA node: say what it is under"),
            Self::Cables(name) => write!(f, "{name} has not one cable: say what its network carries, once"),
            Self::Apart([a, b]) => write!(f, "nothing joins {a} and {b}: say what is between them"),
            Self::TooManyParts(count) => write!(f, "{count} parts: at most {PARTS_MAX} are planned for"),
        }
    }
}

impl Error for MachineError {}
