//! The places of a job's machines in the aggregation hierarchy (ATP §3.3, §3.4).
//!
//! A worker's packets go to its rack's switch, then to the switch of the server's rack, then to the
//! server. A switch that is not programmable is left out. Workers in the server's rack, if there
//! are others, join at the second level, as in the paper's Figure 9.

use fanin_protocol::atp::{Atp as Protocol, ServerJob};
use fanin_protocol::control::Admission;
use fanin_wire::{CHILDREN_MAX, Directions, JobId, Key, fragment_packet_bytes};

use super::super::placement::{Path, PlacementError, Request, admit, programmable, rack};
use super::{Atp, Help};
use crate::net::{NodeId, Topology};

/// A job's hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Placement {
    /// By rank: what its packets say, and which node they go to.
    pub(super) workers: Vec<(Directions, NodeId)>,
    /// The switches, each after those below it.
    pub(super) switches: Vec<Hop>,
    /// The level that packets have when they come to the server.
    pub(super) server_level: u8,
    pub(super) admission: Admission,
}

/// A switch on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hop {
    pub(super) switch: NodeId,
    /// Which bitmap it uses.
    pub(super) level: u8,
    /// The node that it forwards to.
    pub(super) upstream: NodeId,
}

impl Atp {
    /// Whether workers have a place, below this server or, without one, below each of theirs.
    pub(crate) fn fits(&self, topology: &Topology, workers: &[NodeId]) -> Result<(), PlacementError> {
        let servers: &[NodeId] = if self.server.is_some() { &[] } else { workers };
        for server in servers.iter().chain(&self.server) {
            self.place(topology, workers, *server, (JobId(0), Key::new(0)))?;
        }
        Ok(())
    }

    /// The hierarchy of a job with this server, as the registry has it.
    pub(super) fn place(
        &self,
        topology: &Topology,
        workers: &[NodeId],
        server: NodeId,
        (id, key): (JobId, Key),
    ) -> Result<Placement, PlacementError> {
        let aggregates = |switch: &NodeId| self.help != Help::None && programmable(topology, *switch);
        let root = Some(rack(topology, server)?)
            .filter(|root| matches!(self.help, Help::Way | Help::Preemptive) && aggregates(root));
        let way = |worker: &NodeId| -> Result<Vec<NodeId>, PlacementError> {
            let own = Some(rack(topology, *worker)?).filter(|own| aggregates(own) && Some(*own) != root);
            Ok(own.into_iter().chain(root).collect())
        };
        let mut ways = workers.iter().map(way).collect::<Result<Vec<_>, _>>()?;
        // At a server that nobody helps, workers form groups, for there may be more than a bitmap
        // holds: the server sums these first, as switches would.
        let is_alone = ways.iter().all(Vec::is_empty);
        if is_alone && workers.len() > CHILDREN_MAX {
            ways = (0..workers.len()).map(|rank| vec![NodeId((rank / CHILDREN_MAX) as u32)]).collect();
        }
        let request = Request {
            protocol: &Protocol,
            children_max: CHILDREN_MAX,
            id,
            key,
            in_flight: Some(self.window),
            path: Path::default(),
            elements: self.elements,
            packet_bytes: fragment_packet_bytes::<Directions>(self.elements.into()),
            ways,
            root: server,
            resumes: &[],
        };
        let admission = admit(topology, &request)?;
        let at_server = ServerJob::read(admission.identity(), &admission.seats.root);
        let ServerJob { workers: directions, level: levels, .. } = at_server.expect("the server's own part");
        let ways = if is_alone { vec![Vec::new(); workers.len()] } else { request.ways };
        let mut switches: Vec<Hop> = Vec::new();
        for way in &ways {
            for (at, switch) in way.iter().enumerate() {
                let level = levels - (way.len() - at) as u8;
                let upstream = way.get(at + 1).copied().unwrap_or(server);
                if switches.iter().all(|hop| hop.switch != *switch) {
                    switches.push(Hop { switch: *switch, level, upstream });
                }
            }
        }
        switches.sort_by_key(|hop| hop.level);
        let first = ways.iter().map(|way| way.first().copied().unwrap_or(server));
        Ok(Placement {
            workers: directions.into_iter().zip(first).collect(),
            switches,
            server_level: if is_alone { 0 } else { levels },
            admission,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::{LinkConfig, Parts, Programmable};
    use fanin_protocol::atp::{Hashing, Overflow, Scaling};
    use std::time::Duration;

    fn place(
        topology: &Topology,
        help: Help,
        workers: &[NodeId],
        server: NodeId,
    ) -> Result<Placement, PlacementError> {
        let atp = Atp {
            help,
            server: Some(server),
            elements: 64,
            window: 16,
            hashing: Hashing::Hash,
            scaling: Scaling::Static,
            overflow: Overflow::Reactive,
            congestion_control: true,
            timeout: Duration::from_millis(1),
        };
        atp.place(topology, workers, server, (JobId(1), Key::new(2)))
    }

    fn parts() -> Parts {
        Parts::uniform(LinkConfig::new(100_000_000_000, Duration::from_micros(1)))
    }

    fn named(topology: &Topology, names: &[&str]) -> Vec<NodeId> {
        names.iter().map(|name| topology.node(name).expect("a node")).collect()
    }

    fn figure9() -> (Topology, Vec<NodeId>, NodeId) {
        let mut topology = Topology::figure9(&parts());
        topology.set_programmable(&Programmable::Share(1.0)).expect("a share");
        let workers = named(&topology, &["w0", "w1", "w2", "w3", "w4", "w5"]);
        let server = topology.node("ps").expect("the server");
        (topology, workers, server)
    }

    #[test]
    fn figure_9_has_two_racks_and_two_workers_at_its_second_level() {
        let (topology, workers, server) = figure9();
        let placement = place(&topology, Help::Way, &workers, server).expect("a place");
        let sw = named(&topology, &["sw0", "sw1", "sw2"]);
        assert_eq!(
            placement.switches,
            [
                Hop { switch: sw[0], level: 0, upstream: sw[2] },
                Hop { switch: sw[1], level: 0, upstream: sw[2] },
                Hop { switch: sw[2], level: 1, upstream: server },
            ]
        );
        let expected = [
            (0, [1, 1], [2, 4], sw[0]),
            (0, [2, 1], [2, 4], sw[0]),
            (0, [1, 2], [2, 4], sw[1]),
            (0, [2, 2], [2, 4], sw[1]),
            (1, [0, 4], [0, 4], sw[2]),
            (1, [0, 8], [0, 4], sw[2]),
        ];
        for ((directions, upstream), (level, bitmaps, degrees, to)) in placement.workers.iter().zip(expected)
        {
            assert_eq!(directions.level, level);
            assert_eq!(directions.bitmaps[..2], bitmaps);
            assert_eq!(directions.fan_in_degrees[..2], degrees);
            assert_eq!(*upstream, to);
        }
    }

    #[test]
    fn a_rack_scale_service_sums_in_every_rack_for_itself() {
        let (topology, workers, server) = figure9();
        let placement = place(&topology, Help::Racks, &workers, server).expect("a place");
        assert_eq!(placement.switches.len(), 3);
        assert!(placement.switches.iter().all(|hop| hop.level == 0 && hop.upstream == server));
        let (last, upstream) = placement.workers[5];
        assert_eq!((last.bitmaps[..2].to_vec(), last.fan_in_degrees[..2].to_vec()), (vec![2, 4], vec![2, 3]));
        assert_eq!(topology.get(upstream).name, "sw2");
    }

    #[test]
    fn a_parameter_server_alone_has_every_worker_as_its_child() {
        let (topology, workers, server) = figure9();
        let placement = place(&topology, Help::None, &workers, server).expect("a place");
        assert!(placement.switches.is_empty());
        assert!(placement.workers.iter().all(|(directions, to)| *to == server && directions.level == 0));
        assert_eq!(placement.workers[5].0.bitmaps, [32, 0, 0, 0]);
    }

    #[test]
    fn more_children_than_a_bitmap_holds_are_refused() {
        let mut topology = Topology::one_rack(40, &parts()).expect("a rack");
        topology.set_programmable(&Programmable::Share(1.0)).expect("a share");
        let hosts: Vec<_> = topology.hosts().collect();
        assert_eq!(
            place(&topology, Help::Way, &hosts[..33], hosts[39]),
            Err(PlacementError::Children { node: "s0".into(), children: 33, most: CHILDREN_MAX })
        );
        let alone = place(&topology, Help::None, &hosts[..33], hosts[39]).expect("a server alone takes them");
        assert_eq!(alone.workers[32].0.bitmaps, [1, 2, 0, 0]);
        assert_eq!(alone.workers[32].0.fan_in_degrees, [1, 2, 0, 0]);
        assert_eq!(alone.workers[31].0.fan_in_degrees, [32, 2, 0, 0]);
    }

    #[test]
    fn thirty_two_racks_of_thirty_two_fill_two_levels() {
        let mut topology = Topology::leaf_spine(33, 2, 32, &parts()).expect("a leaf-spine");
        topology.set_programmable(&Programmable::Layers(vec![0])).expect("a layer");
        let hosts: Vec<_> = topology.hosts().collect();
        let placement = place(&topology, Help::Way, &hosts[..1024], hosts[1024]).expect("a place");
        assert_eq!(placement.switches.len(), 33);
        assert_eq!(placement.workers[1023].0.bitmaps, [1 << 31, 1 << 31, 1, 0]);
        assert_eq!(placement.workers[1023].0.fan_in_degrees, [32, 32, 1, 0]);
    }
}
