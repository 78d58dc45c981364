//! Planners decide which switch sums which part of a model, if a file does not say it. The rules
//! here look at one part after the other; a caller with a better plan hands it in
//! ([`resolve_with`](super::resolve_with)).

use std::collections::BTreeMap;

use super::super::distance::distances;
use crate::net::{NodeId, Topology};

/// By rank, for each part of the model, the switch that sums it, or the server.
pub type Nodes = Vec<Vec<Option<NodeId>>>;

/// The question to a planner.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The network.
    pub topology: &'a Topology,
    /// Hosts by rank.
    pub workers: &'a [NodeId],
    /// The server's host.
    pub server: NodeId,
    /// Packets of each part of the model.
    pub sub_models: &'a [u32],
    /// Payload of a packet.
    pub packet_bytes: u64,
    /// Packets that each programmable switch has room for: the job's share of its memory.
    pub aggregators: u32,
}

/// A planner, as `planner` in files names it.
#[derive(Clone, Copy, Debug)]
pub struct Planner {
    /// Its name.
    pub name: &'static str,
    /// A plan, or why there is none.
    pub plan: fn(&Asked<'_>) -> Result<Nodes, String>,
}

/// This crate's.
pub(super) const PLANNERS: [Planner; 2] = [
    Planner { name: "nearest", plan: |asked| Ok(nearest(asked)) },
    // Geryon: all gradients to the server, by shortest paths.
    Planner {
        name: "server",
        plan: |asked| Ok(vec![vec![None; asked.sub_models.len()]; asked.workers.len()]),
    },
];

impl Asked<'_> {
    /// A switch that has too few aggregators for a plan, and how many it needs.
    pub(super) fn too_full(&self, nodes: &Nodes) -> Option<(NodeId, u64)> {
        let mut needs: BTreeMap<NodeId, u64> = BTreeMap::new();
        for (part, packets) in self.sub_models.iter().enumerate() {
            let mut switches: Vec<NodeId> = nodes.iter().filter_map(|assigned| assigned[part]).collect();
            switches.sort_unstable();
            switches.dedup();
            switches.into_iter().for_each(|switch| *needs.entry(switch).or_default() += u64::from(*packets));
        }
        needs.into_iter().find(|(_, needs)| *needs > u64::from(self.aggregators))
    }
}

/// For all workers, each part goes to the switch that makes its gradients cross the fewest links
/// (GOAT Eq. 1), among switches with room. It goes to the server if no switch saves a link.
pub(super) fn nearest(asked: &Asked<'_>) -> Nodes {
    let links = |to: NodeId| -> Option<u64> {
        let distance = distances(asked.topology, to);
        asked.workers.iter().map(|worker| distance.get(worker).copied()).sum()
    };
    let from_server = distances(asked.topology, asked.server);
    let direct = links(asked.server).unwrap_or(u64::MAX);
    let mut switches: Vec<(u64, NodeId)> = asked
        .topology
        .programmable()
        .filter_map(|switch| Some((links(switch)? + from_server.get(&switch)?, switch)))
        .filter(|(links, _)| *links < direct)
        .collect();
    switches.sort_unstable();
    let mut left: BTreeMap<NodeId, u32> = BTreeMap::new();
    let mut takes = |switch: NodeId, packets: u32| {
        let left = left.entry(switch).or_insert(asked.aggregators);
        let fits = packets <= *left;
        *left -= if fits { packets } else { 0 };
        fits
    };
    let place = |packets: &u32| switches.iter().map(|(_, at)| *at).find(|at| takes(*at, *packets));
    let of_all: Vec<Option<NodeId>> = asked.sub_models.iter().map(place).collect();
    vec![of_all; asked.workers.len()]
}
