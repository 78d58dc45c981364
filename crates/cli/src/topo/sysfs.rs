//! This machine, as sysfs has it: PCIe's tree, NUMA nodes, GPUs and NICs by their classes, and what
//! their links and cables carry.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use fanin_plan::machine_topology::{Link, MachineTopology, Part, PartId, PartKind, Wire};
use nvml_wrapper::error::NvmlError;

use super::nvml::{self, Gpu};

/// PCI's classes, without the programming interface: Ethernet and InfiniBand controllers; 3D
/// controllers and processing accelerators.
const NICS: [u32; 2] = [0x0200, 0x0207];
const GPUS: [u32; 2] = [0x0302, 0x1200];
/// A VGA controller is a GPU where one of these made it, and else what a server shows its console
/// with.
const VGA: u32 = 0x0300;
const GPU_VENDORS: [u32; 3] = [NVIDIA, 0x1002, 0x8086];
const NVIDIA: u32 = 0x10de;

/// A machine, and what was not read or left out.
pub(super) struct Found {
    pub(super) topology: MachineTopology,
    pub(super) notes: Vec<String>,
}

/// A device of PCIe.
struct Device {
    address: String,
    /// From the root port to the one that it is at, and itself.
    way: Vec<PathBuf>,
    /// None where sysfs has none.
    node: Option<u32>,
}

impl Device {
    fn path(&self) -> &Path {
        self.way.last().expect("itself")
    }

    /// Bus and device: what its functions have in common, which share a link.
    fn card(&self) -> &str {
        self.address.rsplit_once('.').map_or(&self.address, |(card, _)| card)
    }
}

/// Reads this machine; `nvlinks` are asked for where there are several of NVIDIA's GPUs.
pub(super) fn read(
    sys: &Path,
    nvlinks: impl FnOnce() -> Result<Vec<Gpu>, NvmlError>,
) -> anyhow::Result<Found> {
    let devices = devices(sys)?;
    let mut machine = Machine::default();
    for node in nodes(sys) {
        machine.add(format!("node{node}"), PartKind::Cpu { memory_bps: f64::INFINITY });
    }
    // Which node is next to which, and what is between them, is not in sysfs.
    let cpus = machine.parts.len() as u16;
    for one in 0..cpus {
        for other in 0..one {
            machine.join(PartId(other), PartId(one), Wire::Socket, f64::INFINITY);
        }
    }
    if cpus > 1 {
        machine.notes.push(
            "what links between NUMA nodes carry is not in sysfs: they are never the limit here".into(),
        );
    }
    machine.notes.push("what memory carries is not in sysfs: it is never the limit here".into());
    let gpus: Vec<_> = devices.iter().filter(|device| is_gpu(device.path())).collect();
    let nics = machine.nics(&devices);
    let mut functions = BTreeMap::new();
    for device in gpus.iter().copied().chain(nics.iter().map(|(device, _, _)| *device)) {
        *functions.entry(device.card()).or_insert(0) += 1;
    }
    let shares = |device: &Device| functions[device.card()] > 1;
    let nvidia = gpus.iter().filter(|gpu| hex(&gpu.path().join("vendor")) == Some(NVIDIA)).count();
    for device in gpus {
        machine.hang(device, device.address.clone(), PartKind::Gpu, shares(device));
    }
    if nvidia > 1 {
        match nvlinks() {
            Ok(gpus) => machine.link_gpus(&gpus),
            Err(error) => machine.notes.push(format!(
                "NVLinks are not counted, as NVIDIA's library (NVML) does not tell of them: {error}"
            )),
        }
    }
    for (device, name, bps) in nics {
        let nic = machine.hang(device, name.clone(), PartKind::Nic, shares(device));
        let cable = machine.add(format!("network of {name}"), PartKind::Network);
        machine.join(nic, cable, Wire::Cable, bps);
    }
    let Machine { parts, links, notes, .. } = machine;
    let topology = MachineTopology::new(parts, links, f64::INFINITY)?;
    Ok(Found { topology, notes })
}

/// The numbers of the NUMA nodes; one where the kernel knows of none.
fn nodes(sys: &Path) -> Vec<u32> {
    let entries = fs::read_dir(sys.join("devices/system/node")).into_iter().flatten().flatten();
    let mut nodes: Vec<u32> =
        entries.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()).collect();
    nodes.sort_unstable();
    if nodes.is_empty() { vec![0] } else { nodes }
}

/// All devices of PCI, by address; a virtual function is its physical one's.
fn devices(sys: &Path) -> anyhow::Result<Vec<Device>> {
    let folder = sys.join("bus/pci/devices");
    let cure =
        || format!("cannot read {}: describe the machine in a file (fanin topo FILE)", folder.display());
    let mut devices = Vec::new();
    for entry in fs::read_dir(&folder).with_context(cure)?.flatten() {
        let Ok(path) = fs::canonicalize(entry.path()) else { continue };
        if path.join("physfn").exists() {
            continue;
        }
        let ancestors: Vec<_> = path.ancestors().collect();
        let is_host_bridge = |path: &Path| file_name(path).starts_with("pci");
        let way = ancestors.into_iter().take_while(|path| !is_host_bridge(path)).map(Path::to_path_buf);
        let mut way: Vec<_> = way.collect();
        way.reverse();
        // -1: the firmware does not say.
        let node = text(&path.join("numa_node")).and_then(|node| node.parse().ok());
        devices.push(Device { address: file_name(&path).to_owned(), way, node });
    }
    devices.sort_by(|a, b| a.address.cmp(&b.address));
    Ok(devices)
}

#[derive(Default)]
struct Machine {
    parts: Vec<Part>,
    links: Vec<Link>,
    notes: Vec<String>,
    switches: BTreeMap<PathBuf, PartId>,
}

impl Machine {
    fn add(&mut self, name: String, kind: PartKind) -> PartId {
        self.parts.push(Part { name, kind });
        // PARTS_MAX is checked with the topology; no machine has more devices than PCI has
        // addresses in a segment.
        PartId((self.parts.len() - 1) as u16)
    }

    fn join(&mut self, a: PartId, b: PartId, wire: Wire, rate_bps: f64) {
        self.links.push(Link { ends: [a, b], wire, rate_bps });
    }

    /// A device under its switches, which are made where they are not there yet. On the way down a
    /// root port comes first. Then come a switch's upstream port and one of its downstream ports,
    /// for each switch. So a switch begins at an upstream port. A function that shares its card's
    /// link is under the card, as under a switch.
    fn hang(&mut self, device: &Device, name: String, kind: PartKind, shares: bool) -> PartId {
        let mut above = self.node_of(device, &name);
        let (_, bridges) = device.way.split_last().expect("itself");
        for (index, upstream) in bridges.iter().enumerate().skip(1).step_by(2) {
            above = match self.switches.get(upstream) {
                Some(switch) => *switch,
                None => {
                    let switch = self.add(file_name(upstream).to_owned(), PartKind::PcieSwitch);
                    let bps = self.pcie_bps(upstream, Some(&bridges[index - 1]));
                    self.join(above, switch, Wire::Pcie, bps);
                    self.switches.insert(upstream.clone(), switch);
                    switch
                }
            };
        }
        let port = bridges.last().map(PathBuf::as_path);
        if !shares {
            let part = self.add(name, kind);
            let bps = self.pcie_bps(device.path(), port);
            self.join(above, part, Wire::Pcie, bps);
            return part;
        }
        let place = device.path().with_file_name(device.card());
        let card = match self.switches.get(&place) {
            Some(card) => *card,
            None => {
                let card = self.add(format!("card {}", device.card()), PartKind::PcieSwitch);
                let bps = self.pcie_bps(device.path(), port);
                self.join(above, card, Wire::Pcie, bps);
                self.switches.insert(place, card);
                card
            }
        };
        let part = self.add(name, kind);
        self.join(card, part, Wire::Pcie, f64::INFINITY);
        part
    }

    /// NVLinks between GPUs, and to NVSwitches, which are one here: each GPU has links to all of
    /// them.
    fn link_gpus(&mut self, gpus: &[Gpu]) {
        let parts = self.parts.iter().filter(|part| part.kind == PartKind::Gpu);
        let known: Vec<_> = parts.map(|part| part.name.clone()).collect();
        let (pairs, to_switches) = nvml::joined(gpus, &known);
        for ((one, other), bps) in pairs {
            if let (Some(one), Some(other)) = (self.gpu(&one), self.gpu(&other)) {
                self.join(one, other, Wire::NvLink, bps);
            }
        }
        let ends: Vec<_> =
            to_switches.into_iter().filter_map(|(gpu, bps)| Some((self.gpu(&gpu)?, bps))).collect();
        if !ends.is_empty() {
            let switch = self.add("NVSwitch".into(), PartKind::NvSwitch);
            for (gpu, bps) in ends {
                self.join(gpu, switch, Wire::NvLink, bps);
            }
        }
    }

    /// The GPU of this address; a note where sysfs has none.
    fn gpu(&mut self, address: &str) -> Option<PartId> {
        let place = self.parts.iter().position(|part| part.kind == PartKind::Gpu && part.name == address);
        if place.is_none() {
            self.notes.push(format!("{address} has NVLinks and is not in sysfs: they are not counted"));
        }
        place.map(|place| PartId(place as u16))
    }

    /// The NUMA node that a device is at.
    fn node_of(&mut self, device: &Device, name: &str) -> PartId {
        let named = device.node.map(|node| format!("node{node}"));
        let nodes =
            || self.parts.iter().enumerate().filter(|(_, it)| matches!(it.kind, PartKind::Cpu { .. }));
        let found = nodes().find(|(_, part)| named.as_ref() == Some(&part.name));
        if let Some((node, _)) = found {
            return PartId(node as u16);
        }
        if nodes().count() > 1 {
            let first = self.parts[0].name.clone();
            self.notes
                .push(format!("which NUMA node {name} is at is not in sysfs: it is counted with {first}"));
        }
        PartId(0)
    }

    /// The rate of a link in each direction, after encoding. A GPU that has nothing to do lowers
    /// its link's speed. So the speeds that both ends can reach count, if both say them, and not
    /// the speed of the moment; the width stays.
    fn pcie_bps(&mut self, below: &Path, above: Option<&Path>) -> f64 {
        let speed = |path: &Path, which: &str| -> Option<f64> {
            text(&path.join(format!("{which}_link_speed")))?.split(' ').next()?.parse().ok()
        };
        let name = file_name(below);
        let width = text(&below.join("current_link_width")).and_then(|width| width.parse::<u32>().ok());
        let (Some(now), Some(width @ 1..=32)) = (speed(below, "current"), width) else {
            self.notes
                .push(format!("what PCIe carries to {name} is not in sysfs: it is never the limit here"));
            return f64::INFINITY;
        };
        let most = match (speed(below, "max"), above.and_then(|above| speed(above, "max"))) {
            (Some(one), Some(other)) => one.min(other),
            _ => now,
        };
        if most > now {
            let note = "counted with what both ends can do, as an idle GPU lowers it";
            self.notes.push(format!("the link to {name} is at {now} of {most} GT/s now: {note}"));
        }
        let gigatransfers = most.max(now);
        // PCIe 1 and 2: 8b/10b; up to 5: 128b/130b; from 6 on: 236 bytes of packets in a flit of
        // 256.
        let encoding = match gigatransfers {
            slow if slow < 8.0 => 0.8,
            fast if fast < 64.0 => 128.0 / 130.0,
            _ => 236.0 / 256.0,
        };
        gigatransfers * 1e9 * f64::from(width) * encoding
    }

    /// The NICs that gradients take: those with the fastest cables; all that are up where no
    /// cable's rate is known.
    fn nics<'a>(&mut self, devices: &'a [Device]) -> Vec<(&'a Device, String, f64)> {
        let mut known = Vec::new();
        let mut unknown = Vec::new();
        for device in
            devices.iter().filter(|device| class(device.path()).is_some_and(|class| NICS.contains(&class)))
        {
            let interface = interface(device.path());
            let name = interface.as_deref().map_or(device.address.as_str(), file_name).to_owned();
            let up = interface
                .as_ref()
                .is_none_or(|path| text(&path.join("operstate")).is_some_and(|state| state == "up"));
            match cable_bps(device.path(), interface.as_deref()) {
                Some(bps) if up => known.push((device, name, bps)),
                None if up && interface.is_some() => unknown.push((device, name, f64::INFINITY)),
                _ => self.notes.push(format!("{name} is left out: it is down")),
            }
        }
        let fastest = known.iter().map(|(_, _, bps)| *bps).fold(0.0, f64::max);
        let (used, slower): (Vec<_>, Vec<_>) = known.into_iter().partition(|(_, _, bps)| *bps == fastest);
        for (_, name, bps) in slower {
            let rate = super::rate_text(bps);
            self.notes.push(format!("{name} ({rate}) is left out: another NIC is faster"));
        }
        let why = if used.is_empty() { "never the limit here" } else { "left out" };
        for (_, name, _) in &unknown {
            self.notes.push(format!("what the cable of {name} carries is not known: it is {why}"));
        }
        if used.is_empty() { unknown } else { used }
    }
}

fn is_gpu(device: &Path) -> bool {
    let vendor = hex(&device.join("vendor"));
    class(device).is_some_and(|class| {
        GPUS.contains(&class) || class == VGA && vendor.is_some_and(|vendor| GPU_VENDORS.contains(&vendor))
    })
}

/// Class and subclass.
fn class(device: &Path) -> Option<u32> {
    hex(&device.join("class")).map(|class| class >> 8)
}

fn hex(path: &Path) -> Option<u32> {
    u32::from_str_radix(text(path)?.strip_prefix("0x")?, 16).ok()
}

/// The folder of a NIC's first interface; those of virtual machines are a device further down.
fn interface(device: &Path) -> Option<PathBuf> {
    let folders = |path: PathBuf| {
        let mut found: Vec<_> =
            fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
        found.sort();
        found
    };
    let below = folders(device.to_path_buf()).into_iter().filter(|path| path.join("net").is_dir());
    let owners = [device.to_path_buf()].into_iter().chain(below);
    owners.flat_map(|owner| folders(owner.join("net"))).next()
}

/// Bits a second of a NIC's cable: an Ethernet interface says Mbit/s, an InfiniBand port "100
/// Gb/sec (4X EDR)".
fn cable_bps(device: &Path, interface: Option<&Path>) -> Option<f64> {
    let ethernet =
        interface.and_then(|path| text(&path.join("speed"))?.parse::<f64>().ok()).map(|mbit| mbit * 1e6);
    let infiniband = || {
        let name = fs::read_dir(device.join("infiniband")).ok()?.flatten().next()?;
        let rate = text(&name.path().join("ports/1/rate"))?;
        rate.split(' ').next()?.parse::<f64>().ok().map(|gbit| gbit * 1e9)
    };
    ethernet.filter(|bps| *bps > 0.0).or_else(infiniband)
}

fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn file_name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A made-up /sys, gone when the test ends.
    struct Sys(tempfile::TempDir);

    impl Sys {
        fn new(nodes: u32) -> Self {
            let sys = Self(tempfile::tempdir().expect("a folder"));
            for node in 0..nodes {
                fs::create_dir_all(sys.path().join(format!("devices/system/node/node{node}"))).expect("made");
            }
            fs::create_dir_all(sys.path().join("bus/pci/devices")).expect("made");
            sys
        }

        fn path(&self) -> &Path {
            self.0.path()
        }

        /// A device, or a port, at its way from the host bridge.
        fn device(&self, way: &str, files: &[(&str, &str)]) {
            let path = self.path().join("devices").join(way);
            fs::create_dir_all(&path).expect("made");
            for (name, text) in files {
                let file = path.join(name);
                fs::create_dir_all(file.parent().expect("a folder")).expect("made");
                fs::write(file, format!("{text}\n")).expect("written");
            }
            std::os::unix::fs::symlink(&path, self.path().join("bus/pci/devices").join(file_name(&path)))
                .expect("linked");
        }
    }

    const PORT: [(&str, &str); 4] = [
        ("class", "0x060400"),
        ("current_link_speed", "8.0 GT/s PCIe"),
        ("max_link_speed", "8.0 GT/s PCIe"),
        ("current_link_width", "16"),
    ];

    fn card<'a>(class: &'a str, vendor: &'a str, speed: &'a str, node: &'a str) -> [(&'a str, &'a str); 6] {
        [
            ("class", class),
            ("vendor", vendor),
            ("current_link_speed", speed),
            ("max_link_speed", "16.0 GT/s PCIe"),
            ("current_link_width", "16"),
            ("numa_node", node),
        ]
    }

    /// Two GPUs and a NIC behind one switch, a GPU at a root port of the other node, and what is
    /// none of it.
    fn server() -> Sys {
        let sys = Sys::new(2);
        let (root, up) = ("pci0000:00/0000:00:01.0", "pci0000:00/0000:00:01.0/0000:01:00.0");
        sys.device(root, &PORT);
        sys.device(up, &PORT);
        let gpu = |speed, node| card("0x030200", "0x10de", speed, node);
        for (port, address, speed) in
            [("02:00.0", "03:00.0", "2.5 GT/s PCIe"), ("02:01.0", "04:00.0", "8.0 GT/s PCIe")]
        {
            sys.device(&format!("{up}/0000:{port}"), &PORT);
            sys.device(&format!("{up}/0000:{port}/0000:{address}"), &gpu(speed, "0"));
        }
        let nic = card("0x020000", "0x15b3", "8.0 GT/s PCIe", "0");
        let of = |interface: &[(&'static str, &'static str)]| [&nic[..], interface].concat();
        sys.device(&format!("{up}/0000:02:02.0"), &PORT);
        let fast = [("net/mlx0/speed", "100000"), ("net/mlx0/operstate", "up")];
        sys.device(&format!("{up}/0000:02:02.0/0000:05:00.0"), &of(&fast));
        let slow = [("net/eno1/speed", "1000"), ("net/eno1/operstate", "up")];
        sys.device("pci0000:00/0000:00:02.0", &of(&slow));
        sys.device("pci0000:00/0000:00:03.0", &of(&[("net/eno2/operstate", "down")]));
        sys.device("pci0000:00/0000:00:04.0", &card("0x030000", "0x1a03", "2.5 GT/s PCIe", "0"));
        sys.device("pci0000:80/0000:80:01.0", &PORT);
        sys.device("pci0000:80/0000:80:01.0/0000:81:00.0", &card("0x030000", "0x10de", "8.0 GT/s PCIe", "1"));
        sys
    }

    /// No NVLinks.
    fn none() -> Result<Vec<Gpu>, NvmlError> {
        Ok(Vec::new())
    }

    #[test]
    fn nvlinks_join_the_gpus_of_sysfs_and_one_switch() {
        let sys = server();
        let gpu = |address: &str, others: &[&str]| Gpu {
            address: address.into(),
            others: others.iter().map(|other| (*other).to_owned()).collect(),
            rate_bps: 200e9,
        };
        let (one, two, three) = ("0000:03:00.0", "0000:04:00.0", "0000:81:00.0");
        let nvlinks = || {
            let unknown = gpu("0000:ff:00.0", &[one]);
            Ok(vec![
                gpu(one, &[two, two, "0000:ff:00.0"]),
                gpu(two, &[one, one]),
                gpu(three, &["switch"]),
                unknown,
            ])
        };
        let Found { topology, notes } = read(sys.path(), nvlinks).expect("a machine");
        let links = topology.links().iter().filter(|link| link.wire == Wire::NvLink);
        let named: Vec<_> =
            links.map(|link| (link.ends.map(|end| topology.name(end)), link.rate_bps)).collect();
        assert_eq!(named, [([one, two], 400e9), ([three, "NVSwitch"], 200e9)]);
        assert!(
            notes.iter().any(|note| note.contains("0000:ff:00.0 has NVLinks and is not in sysfs")),
            "{notes:?}"
        );
    }

    #[test]
    fn where_nvml_tells_nothing_that_is_noted_and_without_nvidias_gpus_nobody_asks() {
        let Found { notes, .. } =
            read(server().path(), || Err(NvmlError::DriverNotLoaded)).expect("a machine");
        assert!(notes.iter().any(|note| note.contains("NVLinks are not counted")), "{notes:?}");
        let sys = Sys::new(1);
        for port in ["02", "03"] {
            sys.device(
                &format!("pci0000:00/0000:00:{port}.0"),
                &card("0x030200", "0x1002", "8.0 GT/s PCIe", "0"),
            );
        }
        let found = read(sys.path(), || panic!("nobody is to ask")).expect("a machine");
        assert_eq!(found.topology.gpus().count(), 2);
    }

    #[test]
    fn switches_gpus_and_nics_are_where_sysfs_has_them() {
        let sys = server();
        let Found { topology, notes } = read(sys.path(), none).expect("a machine");
        let part = |name| topology.part(name).unwrap_or_else(|| panic!("{name} of {:?}", topology.parts()));
        let gpus: Vec<_> = topology.gpus().map(|gpu| topology.name(gpu)).collect();
        assert_eq!(gpus, ["0000:03:00.0", "0000:04:00.0", "0000:81:00.0"]);
        let switch = part("0000:01:00.0");
        for behind in ["0000:03:00.0", "0000:04:00.0", "mlx0"] {
            assert_eq!(topology.switch_of(part(behind)), Some(switch));
            assert_eq!(topology.cpu_of(part(behind)), part("node0"));
        }
        assert_eq!(topology.switch_of(part("0000:81:00.0")), None);
        assert_eq!(topology.cpu_of(part("0000:81:00.0")), part("node1"));
        assert_eq!(topology.cable(part("mlx0")), (part("network of mlx0"), 100e9));
        assert_eq!(topology.nics().count(), 1);
        // PCIe 3.0 x16: 8 GT/s on 16 lanes, 128b/130b. The first GPU is idle, and its switch's port
        // can do no more.
        for link in topology.links().iter().filter(|link| link.wire == Wire::Pcie) {
            assert_eq!(
                link.rate_bps.round(),
                126_030_769_231.0,
                "{:?}",
                topology.parts()[link.ends[1].index()]
            );
        }
        for note in [
            "0000:03:00.0 is at 2.5 of 8 GT/s now",
            "eno1 (1 Gbit/s) is left out",
            "eno2 is left out: it is down",
        ] {
            assert!(notes.iter().any(|it| it.contains(note)), "{notes:?}");
        }
    }

    #[test]
    fn functions_of_one_card_share_its_link() {
        let sys = Sys::new(1);
        let port = "pci0000:00/0000:00:01.0";
        sys.device(port, &PORT);
        let nic = card("0x020000", "0x15b3", "8.0 GT/s PCIe", "0");
        for (function, speed) in [("0", "net/p0/speed"), ("1", "net/p1/speed")] {
            let up = speed.replace("speed", "operstate");
            let files = [&nic[..], &[(speed, "100000"), (up.as_str(), "up")]].concat();
            sys.device(&format!("{port}/0000:01:00.{function}"), &files);
        }
        // A function of another card is a GPU, and a function that is none needs no share.
        sys.device("pci0000:00/0000:00:02.0", &PORT);
        sys.device("pci0000:00/0000:00:02.0/0000:02:00.0", &card("0x030200", "0x10de", "8.0 GT/s PCIe", "0"));
        sys.device("pci0000:00/0000:00:02.0/0000:02:00.1", &card("0x040300", "0x10de", "8.0 GT/s PCIe", "0"));
        let Found { topology, .. } = read(sys.path(), none).expect("a machine");
        let part = |name| topology.part(name).unwrap_or_else(|| panic!("{name} of {:?}", topology.parts()));
        let first_hop = |to| {
            let (link, _) = topology.route(part("node0"), part(to)).expect("a way")[0];
            (link, topology.links()[link].rate_bps.round())
        };
        let x16 = 126_030_769_231.0;
        assert_eq!(first_hop("p0"), first_hop("p1"));
        assert_eq!(first_hop("p0").1, x16);
        assert_eq!(topology.switch_of(part("p0")), Some(part("card 0000:01:00")));
        assert_eq!(first_hop("0000:02:00.0").1, x16);
        assert_eq!(topology.switch_of(part("0000:02:00.0")), None);
        assert_eq!(topology.parts().iter().filter(|part| part.kind == PartKind::PcieSwitch).count(), 1);
    }

    #[test]
    fn a_device_at_no_known_node_is_counted_with_the_first_and_noted_where_there_are_several() {
        for nodes in [1, 2] {
            let sys = Sys::new(nodes);
            sys.device("pci0000:00/0000:00:02.0", &card("0x030200", "0x10de", "8.0 GT/s PCIe", "-1"));
            let Found { topology, notes } = read(sys.path(), none).expect("a machine");
            let gpu = topology.part("0000:00:02.0").expect("a GPU");
            assert_eq!(topology.name(topology.cpu_of(gpu)), "node0");
            let note = "which NUMA node 0000:00:02.0 is at is not in sysfs: it is counted with node0";
            assert_eq!(notes.iter().any(|it| it == note), nodes > 1, "{notes:?}");
        }
    }

    #[test]
    fn a_virtual_machine_has_a_nic_of_no_known_rate_and_no_gpu() {
        let sys = Sys::new(1);
        let files = [("class", "0x020000"), ("numa_node", "-1"), ("virtio2/net/eth0/operstate", "up")];
        sys.device("pci0000:00/0000:00:03.0", &files);
        let Found { topology, notes } = read(sys.path(), none).expect("a machine");
        assert_eq!(topology.gpus().count(), 0);
        let nic = topology.part("eth0").expect("a NIC");
        assert_eq!(topology.cable(nic).1, f64::INFINITY);
        assert!(notes.iter().any(|note| note.contains("cable of eth0")), "{notes:?}");
    }

    #[test]
    fn without_pci_the_cure_is_a_file() {
        let error = read(Path::new("/nowhere"), none).map(|found| found.notes).expect_err("nothing there");
        assert!(format!("{error:#}").contains("fanin topo FILE"), "{error:#}");
    }

    #[test]
    fn an_infiniband_ports_rate_is_read() {
        let sys = Sys::new(1);
        let files = [("class", "0x020700"), ("infiniband/mlx5_0/ports/1/rate", "200 Gb/sec (4X HDR)")];
        sys.device("pci0000:00/0000:00:03.0", &files);
        let topology = read(sys.path(), none).expect("a machine").topology;
        assert_eq!(topology.cable(topology.part("0000:00:03.0").expect("by its address")).1, 200e9);
    }
}
