//! A machine as TOML.

use std::collections::BTreeMap;

use fanin_plan::machine_topology::{
    Link, MachineError, MachineTopology, PARTS_MAX, Part, PartId, PartKind, Wire,
};
use fanin_sim::scenario_file::{FileError, Mistake, at, parse_file, unknown};
use fanin_units::Rate;
use serde::Deserialize;
use toml::Spanned;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// The rate of a copy from GPU to GPU that leaves the PCIe switches.
    peer_rate: Option<Rate>,
    cpu: Vec<CpuTable>,
    #[serde(default)]
    socket: Vec<JoinTable>,
    #[serde(default)]
    switch: Vec<UnderTable>,
    #[serde(default)]
    gpu: Vec<UnderTable>,
    #[serde(default)]
    nic: Vec<NicTable>,
    #[serde(default)]
    nvlink: Vec<JoinTable>,
    #[serde(default)]
    nvswitch: Vec<NvSwitchTable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CpuTable {
    name: Spanned<String>,
    /// Reading and writing together; never the limit unless given.
    memory: Option<Rate>,
}

/// The parts under a CPU or a PCIe switch.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UnderTable {
    name: Spanned<String>,
    /// So many, which are called by the name and a number from 0.
    count: Option<Spanned<usize>>,
    under: Spanned<String>,
    rate: Rate,
}

impl UnderTable {
    /// The names of all that it stands for; no more than can be.
    fn names(&self) -> Vec<String> {
        let name = self.name.get_ref();
        match &self.count {
            None => vec![name.clone()],
            Some(count) => {
                (0..PARTS_MAX.min(*count.get_ref())).map(|index| format!("{name}{index}")).collect()
            }
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NicTable {
    name: Spanned<String>,
    under: Spanned<String>,
    /// Of PCIe.
    rate: Rate,
    /// Of the cable.
    network: Rate,
}

/// Links between all that are named.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct JoinTable {
    between: Spanned<Vec<String>>,
    rate: Rate,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NvSwitchTable {
    name: Spanned<String>,
    /// All unless given.
    gpus: Option<Spanned<Vec<String>>>,
    /// The rate of each GPU's links to it together.
    rate: Rate,
}

pub(super) fn read(name: &str, text: &str) -> Result<MachineTopology, FileError> {
    parse_file(name, text, resolve)
}

/// Parts that have a name, and links between them.
#[derive(Default)]
struct Machine {
    parts: Vec<Part>,
    links: Vec<Link>,
    /// The place of each name.
    places: BTreeMap<String, Spanned<String>>,
}

fn rate(rate: Rate) -> f64 {
    rate.0 as f64
}

impl Machine {
    fn add(&mut self, place: &Spanned<String>, name: String, kind: PartKind) -> Result<PartId, Mistake> {
        if self.places.insert(name.clone(), place.clone()).is_some() {
            return Err(at(place, MachineError::DuplicateName(name)));
        }
        if self.parts.len() == PARTS_MAX {
            return Err(at(place, MachineError::TooManyParts(PARTS_MAX + 1)));
        }
        self.parts.push(Part { name, kind });
        Ok(PartId((self.parts.len() - 1) as u16))
    }

    fn join(&mut self, ends: [PartId; 2], wire: Wire, rate: Rate) {
        self.links.push(Link { ends, wire, rate_bps: rate.0 as f64 });
    }

    fn named(
        &self,
        place: &Spanned<impl Sized>,
        name: &str,
        what: &str,
        wanted: impl Fn(PartKind) -> bool,
    ) -> Result<PartId, Mistake> {
        let known = || self.parts.iter().enumerate().filter(|(_, part)| wanted(part.kind));
        let found = known().find(|(_, part)| part.name == name);
        let id = found.map(|(index, _)| PartId(index as u16));
        id.ok_or_else(|| at(place, unknown(what, name, known().map(|(_, part)| part.name.as_str()))))
    }

    /// The CPU or switch that something is under; `below` are switches that are written further
    /// down.
    fn above(&self, under: &Spanned<String>, below: &[UnderTable]) -> Result<PartId, Mistake> {
        let name = under.get_ref();
        if below.iter().any(|table| table.names().contains(name)) {
            return Err(at(
                under,
                format!("`{name}` is written further down: put it before what is under it"),
            ));
        }
        let wanted = |kind| matches!(kind, PartKind::Cpu { .. } | PartKind::PcieSwitch);
        self.named(under, under.get_ref(), "CPU or PCIe switch", wanted)
    }

    fn join_all(
        &mut self,
        table: &JoinTable,
        wire: Wire,
        what: &str,
        wanted: fn(PartKind) -> bool,
    ) -> Result<(), Mistake> {
        let ends = self.several(&table.between, "between", what, wanted)?;
        for (index, one) in ends.iter().enumerate() {
            for other in &ends[..index] {
                self.join([*other, *one], wire, table.rate);
            }
        }
        Ok(())
    }

    /// At least two, none twice.
    fn several(
        &self,
        names: &Spanned<Vec<String>>,
        key: &str,
        what: &str,
        wanted: fn(PartKind) -> bool,
    ) -> Result<Vec<PartId>, Mistake> {
        let mut ends = Vec::new();
        for name in names.get_ref() {
            let end = self.named(names, name, what, wanted)?;
            if ends.contains(&end) {
                return Err(at(names, format!("{name} is named twice")));
            }
            ends.push(end);
        }
        if ends.len() < 2 {
            return Err(at(names, format!("`{key}` names at least two, each a {what}")));
        }
        Ok(ends)
    }
}

fn resolve(file: File) -> Result<MachineTopology, Mistake> {
    let mut machine = Machine::default();
    for CpuTable { name, memory } in &file.cpu {
        let memory_bps = memory.map_or(f64::INFINITY, rate);
        machine.add(name, name.get_ref().clone(), PartKind::Cpu { memory_bps })?;
    }
    for table in &file.socket {
        machine.join_all(table, Wire::Socket, "CPU", |kind| matches!(kind, PartKind::Cpu { .. }))?;
    }
    // A switch stands after what it is under, so that none is under itself.
    for (tables, kind) in [(&file.switch, PartKind::PcieSwitch), (&file.gpu, PartKind::Gpu)] {
        for (index, table) in tables.iter().enumerate() {
            if let Some(count) = &table.count
                && !(1..=PARTS_MAX).contains(count.get_ref())
            {
                return Err(at(count, format!("from 1 to {PARTS_MAX}")));
            }
            let below = if kind == PartKind::PcieSwitch { &tables[index + 1..] } else { &[] };
            let above = machine.above(&table.under, below)?;
            for name in table.names() {
                let part = machine.add(&table.name, name, kind)?;
                machine.join([above, part], Wire::Pcie, table.rate);
            }
        }
    }
    for NicTable { name, under, rate, network } in &file.nic {
        let above = machine.above(under, &[])?;
        let nic = machine.add(name, name.get_ref().clone(), PartKind::Nic)?;
        let cable = machine.add(name, format!("network of {}", name.get_ref()), PartKind::Network)?;
        machine.join([above, nic], Wire::Pcie, *rate);
        machine.join([nic, cable], Wire::Cable, *network);
    }
    let is_gpu = |kind| kind == PartKind::Gpu;
    for table in &file.nvlink {
        machine.join_all(table, Wire::NvLink, "GPU", is_gpu)?;
    }
    for NvSwitchTable { name, gpus, rate } in &file.nvswitch {
        let ends = match gpus {
            None => {
                let all = machine.parts.iter().enumerate().filter(|(_, part)| is_gpu(part.kind));
                all.map(|(index, _)| PartId(index as u16)).collect()
            }
            Some(names) => machine.several(names, "gpus", "GPU", is_gpu)?,
        };
        let switch = machine.add(name, name.get_ref().clone(), PartKind::NvSwitch)?;
        ends.into_iter().for_each(|gpu| machine.join([switch, gpu], Wire::NvLink, *rate));
    }
    let Machine { parts, links, places } = machine;
    MachineTopology::new(parts, links, file.peer_rate.map_or(f64::INFINITY, rate)).map_err(|error| {
        let nowhere = Spanned::new(0..0, String::new());
        let place = match &error {
            MachineError::Apart([_, name]) => places.get(name).unwrap_or(&nowhere),
            _ => &nowhere,
        };
        match &error {
            MachineError::Apart(_) => at(place, format!("{error}, as a [[socket]]")),
            _ => at(place, &error),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: &str = r#"peer_rate = "80Gbit"
[[cpu]]
name = "cpu0"
memory = "600Gbit"
[[cpu]]
name = "cpu1"
[[socket]]
between = ["cpu0", "cpu1"]
rate = "300Gbit"
[[switch]]
name = "pcie"
count = 2
under = "cpu0"
rate = "105Gbit"
[[switch]]
name = "low"
under = "pcie1"
rate = "105Gbit"
[[gpu]]
name = "gpu"
count = 3
under = "low"
rate = "128Gbit"
[[gpu]]
name = "far"
under = "cpu1"
rate = "128Gbit"
[[nic]]
name = "mlx0"
under = "pcie0"
rate = "128Gbit"
network = "100Gbit"
[[nvlink]]
between = ["gpu0", "gpu1", "far"]
rate = "200Gbit"
[[nvswitch]]
name = "nv"
gpus = ["gpu2", "far"]
rate = "1.2Tbit"
"#;

    #[test]
    fn a_machine_is_read_with_its_links() {
        let machine = read("m.toml", MACHINE).expect("a machine");
        let part = |name| machine.part(name).expect("a part");
        assert_eq!(machine.gpus().count(), 4);
        assert_eq!(machine.peer_bps(), 80e9);
        assert_eq!(machine.kind(part("cpu0")), PartKind::Cpu { memory_bps: 600e9 });
        assert_eq!(machine.kind(part("cpu1")), PartKind::Cpu { memory_bps: f64::INFINITY });
        assert_eq!(machine.switch_of(part("gpu2")), Some(part("pcie1")));
        assert_eq!(machine.cable(part("mlx0")), (part("network of mlx0"), 100e9));
        let nvlinks: Vec<_> = machine
            .links()
            .iter()
            .filter(|link| link.wire == Wire::NvLink)
            .map(|link| link.rate_bps)
            .collect();
        assert_eq!(nvlinks, [200e9, 200e9, 200e9, 1.2e12, 1.2e12]);
    }

    #[test]
    fn mistakes_are_told_with_line_and_nearest_name() {
        for (right, wrong, line, words) in [
            (
                "under = \"low\"",
                "under = \"loww\"",
                22,
                "unknown CPU or PCIe switch `loww`; did you mean `low`?",
            ),
            ("network = ", "netwrok = ", 32, "unknown key `netwrok`; did you mean `network`?"),
            ("[[socket]]\n", "[[sokcet]]\n", 7, "unknown key `sokcet`; did you mean `socket`?"),
            ("\"gpu1\", \"far\"", "\"gpu1\", \"gup2\"", 34, "unknown GPU `gup2`; did you mean `gpu2`?"),
            ("\"gpu1\", \"far\"", "\"gpu0\", \"far\"", 34, "gpu0 is named twice"),
            ("\"gpu0\", \"gpu1\", \"far\"", "\"far\"", 34, "`between` names at least two"),
            ("name = \"far\"", "name = \"gpu1\"", 25, "two parts are called gpu1"),
            ("count = 3", "count = 0", 21, "from 1 to 512"),
            ("\"105Gbit\"", "\"105Gb\"", 14, "is no rate"),
            ("[\"gpu2\", \"far\"]", "[\"gpu2\", \"cpu0\"]", 38, "unknown GPU `cpu0`"),
            ("[\"gpu2\", \"far\"]", "[\"gpu2\", \"far\", \"gpu2\"]", 38, "gpu2 is named twice"),
            ("[\"gpu2\", \"far\"]", "[]", 38, "`gpus` names at least two, each a GPU"),
            ("under = \"cpu0\"", "under = \"low\"", 13, "`low` is written further down: put it before"),
        ] {
            let error = read("m.toml", &MACHINE.replacen(right, wrong, 1)).expect_err(wrong);
            assert!(error.to_string().contains(words), "{error}");
            assert_eq!(error.line(), line, "{error}");
        }
        let apart = MACHINE.replace("[[socket]]\nbetween = [\"cpu0\", \"cpu1\"]\nrate = \"300Gbit\"\n", "");
        let error = read("m.toml", &apart).expect_err("in two pieces");
        assert!(
            error.to_string().contains("say what is between them, as a [[socket]]") && error.line() > 0,
            "{error}"
        );
    }
}
