//! Ways through the network: all shortest paths by number of links, found for a destination when it is first needed.

use std::collections::{BTreeMap, VecDeque};

use super::ids::{NodeId, PortId, SimAddress};

/// The ports of a node that lead to a destination on a shortest path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hop {
    /// Of one port, the port; of several, where they begin in [`Routes::sets`].
    first: u32,
    count: u32,
}

const UNREACHABLE: Hop = Hop { first: 0, count: 0 };

/// A port as routing sees it.
pub(crate) struct Edge {
    pub(crate) port: PortId,
    pub(crate) to: NodeId,
    pub(crate) up: bool,
}

/// What routing needs to know of the network.
pub(crate) trait Graph {
    fn nodes(&self) -> usize;
    fn edges(&self, node: NodeId) -> impl Iterator<Item = Edge>;
    /// It may carry packets of others.
    fn forwards(&self, node: NodeId) -> bool;
}

/// Where a host with one NIC hangs: all ways to it are those to its switch, and one more link. A table for each switch
/// instead of each host is what fits into a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Anchor {
    pub(crate) switch: NodeId,
    /// The switch's port to the host.
    pub(crate) port: PortId,
}

#[derive(Debug)]
pub(crate) struct Routes {
    anchors: Vec<Option<Anchor>>,
    /// By destination (of an anchored one its switch) and then by node.
    to: Vec<Option<Box<[Hop]>>>,
    sets: Vec<PortId>,
    interned: BTreeMap<Vec<PortId>, u32>,
}

impl Routes {
    pub(crate) fn new(anchors: Vec<Option<Anchor>>) -> Self {
        let to = vec![None; anchors.len()];
        Self { anchors, to, sets: Vec::new(), interned: BTreeMap::new() }
    }

    /// Something went down or came up.
    pub(crate) fn forget(&mut self) {
        *self = Self::new(std::mem::take(&mut self.anchors));
    }

    pub(crate) fn knows(&self, to: NodeId) -> bool {
        let to = self.anchors[to.index()].map_or(to, |anchor| anchor.switch);
        self.to[to.index()].is_some()
    }

    /// The port of `node` that leads `to`; `choose` picks one of several. `None` when there is no way.
    ///
    /// # Panics
    /// When the destination is not known: [`Self::learn`] first.
    pub(crate) fn port(&self, node: NodeId, to: NodeId, choose: impl FnOnce(u32) -> u32) -> Option<PortId> {
        let to = match self.anchors[to.index()] {
            Some(Anchor { switch, port }) if switch == node => return Some(port),
            Some(Anchor { switch, .. }) => switch,
            None => to,
        };
        let hops = self.to[to.index()].as_ref().expect("learnt before");
        match hops[node.index()] {
            UNREACHABLE => None,
            Hop { first, count: 1 } => Some(PortId(first)),
            Hop { first, count } => Some(self.sets[(first + choose(count)) as usize]),
        }
    }

    /// Finds all shortest ways to a destination, by breadth first search from it.
    pub(crate) fn learn(&mut self, to: NodeId, graph: &impl Graph) {
        let to = self.anchors[to.index()].map_or(to, |anchor| anchor.switch);
        const FAR: u32 = u32::MAX;
        let mut distance = vec![FAR; graph.nodes()];
        let mut hops = vec![UNREACHABLE; graph.nodes()].into_boxed_slice();
        let mut reached = VecDeque::from([to]);
        distance[to.index()] = 0;
        let mut set = Vec::new();
        while let Some(node) = reached.pop_front() {
            let here = distance[node.index()];
            set.clear();
            for edge in graph.edges(node).filter(|edge| edge.up) {
                let there = &mut distance[edge.to.index()];
                if *there == FAR && (node == to || graph.forwards(node)) {
                    *there = here + 1;
                    reached.push_back(edge.to);
                }
                if here > 0 && *there == here - 1 && (edge.to == to || graph.forwards(edge.to)) {
                    set.push(edge.port);
                }
            }
            hops[node.index()] = match set[..] {
                [] => UNREACHABLE,
                [port] => Hop { first: port.0, count: 1 },
                _ => Hop { first: self.intern(&set), count: set.len() as u32 },
            };
        }
        self.to[to.index()] = Some(hops);
    }

    fn intern(&mut self, set: &[PortId]) -> u32 {
        if let Some(first) = self.interned.get(set) {
            return *first;
        }
        let first = self.sets.len() as u32;
        self.sets.extend_from_slice(set);
        self.interned.insert(set.to_vec(), first);
        first
    }
}

/// Which of `count` equally short ways a flow takes at `node`: another hash at every node, or the flows that met at
/// one would stay together at the next. The salt makes it another for every seed: which flows meet is chance.
pub(crate) fn flow_choice(salt: u64, from: SimAddress, to: SimAddress, node: NodeId, count: u32) -> u32 {
    let pair = |address: SimAddress| u64::from(address.node) << 16 | u64::from(address.port);
    let mixed = mix(mix(salt ^ pair(from) ^ u64::from(node.0) << 40) ^ pair(to).rotate_left(17));
    (((mixed >> 32) * u64::from(count)) >> 32) as u32
}

/// `SplitMix64`'s finalizer.
pub(crate) const fn mix(mut bits: u64) -> u64 {
    bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ bits >> 31
}
