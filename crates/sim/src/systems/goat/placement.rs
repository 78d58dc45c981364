//! Which switches a job's fragments come by, and how its parameters go down.
//!
//! The way from one machine to the next is the network's matter: each sends to the first
//! programmable switch on a shortest path.

use std::collections::BTreeMap;

use fanin_wire::AggregationNode;

use super::super::distance::first_hop;
use super::Goat;
use crate::net::{NodeId, Topology};

/// A job's switches and ways.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Placement {
    /// Each worker's next machine towards the server, from which its parameters come.
    pub(super) upstream: Vec<NodeId>,
    /// Each worker's first switch on the way to nodes that are not reached over that one.
    pub(super) first_hops: Vec<Vec<(AggregationNode, NodeId)>>,
    /// The switches that anything comes by.
    pub(super) switches: BTreeMap<NodeId, Hop>,
}

/// A switch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hop {
    /// The next machine towards the server.
    pub(super) upstream: NodeId,
    /// The next switch towards each node that sums.
    pub(super) next_hops: Vec<(AggregationNode, NodeId)>,
    /// Whether workers get their parameters by way of it.
    pub(super) has_workers: bool,
}

/// A switch's number in plans.
pub(super) fn number(topology: &Topology, switch: Option<NodeId>) -> AggregationNode {
    let at = switch.and_then(|switch| topology.programmable().position(|other| other == switch));
    at.map_or(AggregationNode::SERVER, |at| AggregationNode(1 + at as u16))
}

impl Goat {
    /// Where everything goes. A machine that cannot reach a node is told no way to it: its
    /// fragments go on towards the server. A server that cannot be reached is sent to all the same,
    /// and the job stands still.
    pub(super) fn place(&self, topology: &Topology, workers: &[NodeId]) -> Placement {
        let to_server = |from: NodeId| first_hop(topology, from, self.server).unwrap_or(self.server);
        let mut sums: Vec<NodeId> = self.nodes.iter().flatten().copied().flatten().collect();
        sums.extend(self.onward.iter().flat_map(BTreeMap::values));
        sums.sort_unstable();
        sums.dedup();
        let towards = |from: NodeId| -> Vec<(AggregationNode, NodeId)> {
            let others = sums.iter().filter(|node| **node != from);
            let way =
                |node: &NodeId| Some((number(topology, Some(*node)), first_hop(topology, from, *node)?));
            others.filter_map(way).collect()
        };
        let upstream: Vec<NodeId> = workers.iter().map(|worker| to_server(*worker)).collect();
        let mut first_hops: Vec<_> = workers.iter().map(|worker| towards(*worker)).collect();
        for (hops, upstream) in first_hops.iter_mut().zip(&upstream) {
            hops.retain(|(_, hop)| hop != upstream);
        }
        let mut switches: BTreeMap<NodeId, Hop> = BTreeMap::new();
        let mut next: Vec<NodeId> = upstream.iter().chain(&sums).copied().collect();
        next.extend(first_hops.iter().flatten().map(|(_, hop)| *hop));
        while let Some(switch) = next.pop() {
            if switch == self.server || switches.contains_key(&switch) {
                continue;
            }
            let found = Hop { upstream: to_server(switch), next_hops: towards(switch), has_workers: false };
            next.push(found.upstream);
            next.extend(found.next_hops.iter().map(|(_, hop)| *hop));
            switches.insert(switch, found);
        }
        for first in &upstream {
            let mut at = *first;
            while let Some(hop) = switches.get_mut(&at) {
                hop.has_workers = true;
                at = hop.upstream;
            }
        }
        Placement { upstream, first_hops, switches }
    }
}
