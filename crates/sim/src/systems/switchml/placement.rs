//! The switches of a SwitchML job. If the workers are in one rack, it is their own switch. Else
//! each rack's switch sums for its workers (SwitchML §7), and the one that is nearest to all racks
//! is the root. Workers whose rack's switch is not programmable send to the root.

use std::collections::BTreeMap;

use fanin_protocol::switchml::{
    Contributions, JobConfig, RankTerms, SwitchJob, SwitchMl as Protocol, Upstream,
};
use fanin_wire::{JobId, Key, PLACES_MAX, Rank, WorkerId, chunk_packet_bytes};

use super::super::placement::{Path, PlacementError, Request, admit, nearest, programmable, rack};
use super::SwitchMl;
use crate::net::{NodeId, Topology};

/// The switch that sums each part of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Placement {
    /// By rank: the switch that it sends to, and its place there.
    pub(super) workers: Vec<(NodeId, WorkerId)>,
    pub(super) switches: Vec<Pool>,
    pub(super) config: JobConfig,
}

/// A switch of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pool {
    pub(super) switch: NodeId,
    pub(super) contributions: Contributions,
    /// The switch that a rack sends its sums to, and its place there.
    pub(super) upstream: Option<(NodeId, WorkerId)>,
}

impl SwitchMl {
    /// Whether workers have a place.
    pub(crate) fn fits(&self, topology: &Topology, workers: &[NodeId]) -> Result<(), PlacementError> {
        self.place(topology, workers, (JobId(0), Key::new(0))).map(|_| ())
    }

    /// The job's pools, as the registry has them.
    pub(super) fn place(
        &self,
        topology: &Topology,
        workers: &[NodeId],
        (id, key): (JobId, Key),
    ) -> Result<Placement, PlacementError> {
        let racks = workers.iter().map(|worker| rack(topology, *worker)).collect::<Result<Vec<_>, _>>()?;
        let root = nearest(topology, &racks).ok_or(PlacementError::NoSwitch)?;
        let way = |rack: &NodeId| Some(*rack).filter(|rack| *rack != root && programmable(topology, *rack));
        let request = Request {
            protocol: &Protocol,
            children_max: PLACES_MAX as usize,
            id,
            key,
            in_flight: Some(self.slots),
            path: Path { wire_dtype: self.wire_dtype, ..Path::default() },
            elements: self.elements,
            packet_bytes: chunk_packet_bytes(self.elements.into(), self.wire_dtype),
            ways: racks.iter().map(|rack| way(rack).into_iter().collect()).collect(),
            root,
            resumes: &[],
        };
        let admission = admit(topology, &request)?;
        let job = admission.identity();
        let of_switch = |part: &[u8]| SwitchJob::read(job, part, Some(root)).expect("a switch's own part");
        let SwitchJob { config, contributions, .. } = of_switch(&admission.seats.root);
        let at_root = Pool { switch: root, contributions, upstream: None };
        let mut pools = BTreeMap::from([(root, at_root)]);
        let mut placed = Vec::with_capacity(workers.len());
        for (rank, rack) in racks.iter().enumerate() {
            let switch = way(rack).unwrap_or(root);
            let own = RankTerms::read(job, &admission.seats.ranks[rank]).expect("a rank's own part");
            placed.push((switch, own.place));
            if let Some(part) = admission.way(Rank(rank as u16)).first() {
                pools.entry(switch).or_insert_with(|| {
                    let SwitchJob { contributions, upstream, .. } = of_switch(part);
                    let upstream = upstream.map(|Upstream { address, place }| (address, place));
                    Pool { switch, contributions, upstream }
                });
            }
        }
        Ok(Placement { workers: placed, switches: pools.into_values().collect(), config })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::{LinkConfig, Parts, Programmable};
    use fanin_wire::WireDtype;
    use std::time::Duration;

    fn pools(topology: &Topology, workers: &[NodeId]) -> Result<Placement, PlacementError> {
        let timeout = Duration::from_millis(1);
        let system = SwitchMl {
            elements: 256,
            wire_dtype: WireDtype::SharedExponent,
            slots: 16,
            window: 16,
            timeout,
            timeouts_only: false,
        };
        system.place(topology, workers, (JobId(1), Key::new(2)))
    }

    fn parts() -> Parts {
        Parts::uniform(LinkConfig::new(100_000_000_000, Duration::from_micros(1)))
    }

    fn named(topology: &Topology, names: &[&str]) -> Vec<NodeId> {
        names.iter().map(|name| topology.node(name).expect("a node")).collect()
    }

    fn figure9() -> (Topology, Vec<NodeId>) {
        let mut topology = Topology::figure9(&parts());
        topology.set_programmable(&Programmable::Share(1.0)).expect("a share");
        let workers = named(&topology, &["w0", "w1", "w2", "w3", "w4", "w5"]);
        (topology, workers)
    }

    /// "switch: ranks, bitmap of racks, place at the upstream" of each.
    fn shown(topology: &Topology, pools: &Placement) -> Vec<String> {
        let name = |node: NodeId| &topology.get(node).name;
        let sum = |pool: &Pool| {
            let ranks: Vec<_> = pool.contributions.ranks.iter().map(|rank| rank.0).collect();
            let upstream = pool
                .upstream
                .map_or(String::new(), |(node, place)| format!(", {} of {}", place.0, name(node)));
            format!("{}: {ranks:?}, {:b}{upstream}", name(pool.switch), pool.contributions.racks)
        };
        pools.switches.iter().map(sum).collect()
    }

    #[test]
    fn a_switchml_job_of_one_rack_has_its_switch_alone() {
        let (topology, workers) = figure9();
        let found = pools(&topology, &workers[..2]).expect("a place");
        assert_eq!(shown(&topology, &found), ["sw0: [0, 1], 0"]);
    }

    #[test]
    fn racks_of_a_switchml_job_send_to_the_switch_nearest_to_all() {
        let (topology, workers) = figure9();
        let found = pools(&topology, &workers).expect("a place");
        let expected = ["sw0: [0, 1], 0, 0 of sw2", "sw1: [2, 3], 0, 1 of sw2", "sw2: [0, 2, 4, 5], 11"];
        assert_eq!(shown(&topology, &found), expected);
        let sw = named(&topology, &["sw0", "sw2"]);
        assert_eq!(found.workers[1], (sw[0], WorkerId(1)));
        assert_eq!(found.workers[5], (sw[1], WorkerId(3)));
    }

    #[test]
    fn workers_of_a_rack_that_does_not_sum_send_to_the_root() {
        let mut topology = Topology::leaf_spine(3, 2, 2, &parts()).expect("a leaf-spine");
        let hosts: Vec<_> = topology.hosts().collect();
        assert_eq!(pools(&topology, &hosts), Err(PlacementError::NoSwitch));
        topology.set_programmable(&Programmable::Layers(vec![1])).expect("a layer");
        let found = pools(&topology, &hosts).expect("a place");
        let spine = found.switches[0].switch;
        assert_eq!(topology.layer(spine), Some(1));
        assert_eq!(found.switches.len(), 1);
        assert!((0..6).all(|rank| found.workers[rank] == (spine, WorkerId(rank as u8))));
    }
}
