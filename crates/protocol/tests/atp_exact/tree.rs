//! Which switch is whose parent.

use fanin_wire::{Directions, LEVELS_MAX};

/// A switch tree: each switch's parent (`None` below the server) and level; each worker's switch (`None`: at the server).
#[derive(Clone, Debug, Default)]
pub struct Tree {
    pub switches: Vec<(Option<usize>, u8)>,
    pub workers: Vec<Option<usize>>,
}

impl Tree {
    /// Workers at the server, no switch.
    pub fn direct(workers: usize) -> Self {
        Self { switches: vec![], workers: vec![None; workers] }
    }

    /// One rack's switch, the server behind it.
    pub fn one_rack(workers: usize) -> Self {
        Self { switches: vec![(None, 0)], workers: vec![Some(0); workers] }
    }

    /// Two racks of workers, and a third with the server and workers of its own (ATP Figure 9). A rack has workers.
    pub fn three_racks(workers: usize) -> Self {
        let racks = workers.min(2);
        let mut switches = vec![(Some(racks), 0); racks];
        switches.push((None, 1));
        Self { switches, workers: (0..workers).map(|rank| Some((rank % 3).min(racks))).collect() }
    }

    /// `racks` of `size` workers below one switch of the second level.
    pub fn racks(racks: usize, size: usize) -> Self {
        let mut switches = vec![(None, 1)];
        switches.extend((0..racks).map(|_| (Some(0), 0)));
        Self { switches, workers: (0..racks * size).map(|worker| Some(1 + worker / size)).collect() }
    }

    /// `levels` of switches, each with two children, and a worker besides at every switch above the first level.
    pub fn deep(levels: u8) -> Self {
        let mut tree = Self { switches: vec![(None, levels - 1)], workers: vec![] };
        let mut at = 0;
        while at < tree.switches.len() {
            let level = tree.switches[at].1;
            if level == 0 {
                tree.workers.extend([Some(at); 2]);
            } else {
                tree.workers.push(Some(at));
                tree.switches.extend([(Some(at), level - 1); 2]);
            }
            at += 1;
        }
        tree
    }

    /// The first level that no switch has.
    pub fn server_level(&self) -> u8 {
        self.switches.iter().map(|(_, level)| level + 1).max().unwrap_or(0)
    }

    /// The address of a switch, or of the server. Node 0 is the server; then come the switches, then the workers.
    pub fn node(switch: Option<usize>) -> usize {
        switch.map_or(0, |switch| 1 + switch)
    }

    /// Each worker's. A switch, or the server, gives its children bits in turn: first its switches, then its workers.
    pub fn directions(&self) -> Vec<Directions> {
        let mut children = vec![0u8; 1 + self.switches.len()];
        let mut bit_of = |parent: Option<usize>| {
            let count = &mut children[Self::node(parent)];
            *count += 1;
            *count - 1
        };
        let switch_bits: Vec<u8> = self.switches.iter().map(|(parent, _)| bit_of(*parent)).collect();
        let worker_bits: Vec<u8> = self.workers.iter().map(|parent| bit_of(*parent)).collect();
        let of_worker = |(parent, bit): (&Option<usize>, u8)| {
            let mut directions = Directions::default();
            let (mut at, mut bit) = (*parent, bit);
            directions.level = at.map_or(self.server_level(), |at| self.switches[at].1);
            loop {
                let level: usize = at.map_or(self.server_level(), |at| self.switches[at].1).into();
                // Below four levels of switches, the server needs no directions: it has one child.
                if level < LEVELS_MAX {
                    directions.bitmaps[level] = 1 << bit;
                    directions.fan_in_degrees[level] = children[Self::node(at)];
                }
                let Some(switch) = at else { break };
                (at, bit) = (self.switches[switch].0, switch_bits[switch]);
            }
            directions
        };
        self.workers.iter().zip(worker_bits).map(of_worker).collect()
    }
}
