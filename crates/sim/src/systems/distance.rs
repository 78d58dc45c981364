//! Shortest paths between nodes, over switches alone.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::net::{NodeId, Topology};

/// Links between a node and each of those that can be reached.
pub(super) fn distances(topology: &Topology, from: NodeId) -> BTreeMap<NodeId, u64> {
    let mut distance = BTreeMap::from([(from, 0)]);
    let mut next = VecDeque::from([from]);
    while let Some(at) = next.pop_front() {
        // Hosts pass nothing on.
        if at != from && topology.layer(at).is_none() {
            continue;
        }
        let further = distance[&at] + 1;
        for (other, _) in topology.neighbours(at) {
            distance.entry(other).or_insert_with(|| {
                next.push_back(other);
                further
            });
        }
    }
    distance
}

/// How long a shortest path between two nodes takes, of several the one over the first nodes.
pub(super) fn delay(topology: &Topology, from: NodeId, to: NodeId) -> Option<Duration> {
    let distance = distances(topology, to);
    let (mut at, mut whole) = (from, Duration::ZERO);
    while at != to {
        let left = *distance.get(&at)?;
        let nearer =
            topology.neighbours(at).filter(|(node, _)| distance.get(node).is_some_and(|of| of + 1 == left));
        let passes = nearer.filter(|(node, _)| *node == to || topology.layer(*node).is_some());
        let (next, link) = passes.min()?;
        whole += topology.links()[link.0 as usize].config.delay;
        at = next;
    }
    Some(whole)
}

/// The first programmable switch on a shortest path between two nodes, of several paths one on
/// which there is one early; `to` where there is none, and nothing where there is no path.
pub(super) fn first_hop(topology: &Topology, from: NodeId, to: NodeId) -> Option<NodeId> {
    let distance = distances(topology, to);
    let mut at = from;
    while at != to {
        let left = *distance.get(&at)?;
        let nearer = |node: &NodeId| distance.get(node).is_some_and(|distance| distance + 1 == left);
        let on_the_way: Vec<NodeId> = topology.neighbours(at).map(|(node, _)| node).filter(nearer).collect();
        let sums = |node: &NodeId| topology.programmable().any(|other| other == *node);
        if let Some(switch) = on_the_way.iter().copied().filter(sums).min() {
            return Some(switch);
        }
        at = on_the_way.into_iter().filter(|node| *node == to || topology.layer(*node).is_some()).min()?;
    }
    Some(to)
}

/// The programmable switches that what a switch sends to a host comes by, in order.
pub fn on_the_way(topology: &Topology, from: NodeId, to: NodeId) -> Vec<NodeId> {
    let next = |at: &NodeId| first_hop(topology, *at, to).filter(|hop| *hop != to);
    std::iter::successors(next(&from), next).collect()
}
