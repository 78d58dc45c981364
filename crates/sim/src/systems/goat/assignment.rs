//! Who sums which part of a model where a file does not say it: a rule that looks at one part after the other, and no planner.

use std::collections::BTreeMap;

use super::distance::distances;
use crate::net::{NodeId, Topology};

/// A job's part of the switches' memory.
pub(super) struct Room {
    share: u32,
    taken: BTreeMap<NodeId, u64>,
}

impl Room {
    /// So many aggregators of each switch.
    pub(super) const fn new(share: u32) -> Self {
        Self { share, taken: BTreeMap::new() }
    }

    pub(super) const fn share(&self) -> u32 {
        self.share
    }

    pub(super) fn taken(&self, node: NodeId) -> u64 {
        self.taken.get(&node).copied().unwrap_or_default()
    }

    /// Takes so many of a switch's, if it has them.
    pub(super) fn take(&mut self, node: NodeId, packets: u32) -> bool {
        let taken = self.taken.entry(node).or_default();
        let fits = *taken + u64::from(packets) <= u64::from(self.share);
        *taken += if fits { packets.into() } else { 0 };
        fits
    }
}

/// Each part goes, for all workers, to the switch over which its gradients cross the fewest links (GOAT Eq. 1), of those that have room
/// for it; to the server where none saves any.
pub(super) fn nearest(
    topology: &Topology,
    workers: &[NodeId],
    server: NodeId,
    sub_models: &[u32],
    room: &mut Room,
) -> Vec<Vec<Option<NodeId>>> {
    let links = |to: NodeId| -> Option<u64> {
        let distance = distances(topology, to);
        workers.iter().map(|worker| distance.get(worker).copied()).sum()
    };
    let from_server = distances(topology, server);
    let direct = links(server).unwrap_or(u64::MAX);
    let mut switches: Vec<(u64, NodeId)> = topology
        .programmable()
        .filter_map(|switch| Some((links(switch)? + from_server.get(&switch)?, switch)))
        .filter(|(links, _)| *links < direct)
        .collect();
    switches.sort_unstable();
    let place = |packets: &u32| switches.iter().map(|(_, at)| *at).find(|at| room.take(*at, *packets));
    let of_all: Vec<Option<NodeId>> = sub_models.iter().map(place).collect();
    vec![of_all; workers.len()]
}
