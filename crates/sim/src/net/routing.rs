//! Ways through the network: all shortest paths by number of links, found for a destination when it
//! is first needed.

use std::collections::{BTreeMap, VecDeque};

use super::ids::{NodeId, PortId, SimAddress};

/// The ports of a node that lead to a destination on a shortest path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hop {
    /// A single port, or for several the place where they begin in [`Routes::sets`].
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

/// The facts about the network that routing needs.
pub(crate) trait Graph {
    fn edges(&self, node: NodeId) -> impl Iterator<Item = Edge>;
    /// It may carry packets of others.
    fn forwards(&self, node: NodeId) -> bool;
}

/// The place of a host with one NIC: all ways to it are those to its switch, and one more link.
/// Tables for switches instead of hosts fit into a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Anchor {
    pub(crate) switch: NodeId,
    /// The switch's port to the host.
    pub(crate) port: PortId,
}

/// A node among the routers, which are all nodes without an anchor.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Its own number, or that of the switch that it hangs on.
    router: u32,
    /// The switch's port to it, of a host with an anchor.
    port: PortId,
}

/// Of routers themselves.
const NO_PORT: PortId = PortId(u32::MAX);

#[derive(Debug)]
pub(crate) struct Routes {
    /// By node.
    places: Vec<Place>,
    routers: Vec<NodeId>,
    /// By destination and then by node, both routers.
    to: Vec<Option<Box<[Hop]>>>,
    sets: Vec<PortId>,
    interned: BTreeMap<Vec<PortId>, u32>,
}

impl Routes {
    pub(crate) fn new(anchors: &[Option<Anchor>]) -> Self {
        let nodes = (0..anchors.len() as u32).map(NodeId);
        let routers: Vec<_> = nodes.filter(|node| anchors[node.index()].is_none()).collect();
        let number = |node| routers.binary_search(&node).expect("a router") as u32;
        let place = |(node, anchor): (u32, &Option<Anchor>)| match anchor {
            Some(Anchor { switch, port }) => Place { router: number(*switch), port: *port },
            None => Place { router: number(NodeId(node)), port: NO_PORT },
        };
        let places = (0..).zip(anchors).map(place).collect();
        let to = vec![None; routers.len()];
        Self { places, routers, to, sets: Vec::new(), interned: BTreeMap::new() }
    }

    /// Something went down or came up.
    pub(crate) fn forget(&mut self) {
        self.to.fill(None);
        self.sets.clear();
        self.interned.clear();
    }

    #[inline]
    pub(crate) fn knows(&self, to: NodeId) -> bool {
        self.to[self.places[to.index()].router as usize].is_some()
    }

    /// The port of `node` that leads `to`; `choose` picks one of several, and `works` says whether
    /// a host's NIC does. `None` when there is no way.
    ///
    /// # Panics
    /// When the destination is not known: [`Self::learn`] first.
    #[inline]
    pub(crate) fn port(
        &self,
        node: NodeId,
        to: NodeId,
        works: impl FnOnce(PortId) -> bool,
        choose: impl FnOnce(u32) -> u32,
    ) -> Option<PortId> {
        let (here, there) = (self.places[node.index()], self.places[to.index()]);
        if here.port != NO_PORT {
            let nic = here.port.opposite();
            let reached = here.router == there.router || self.hop(here, there) != UNREACHABLE;
            return (reached && works(nic)).then_some(nic);
        }
        if here.router == there.router {
            return Some(there.port);
        }
        match self.hop(here, there) {
            UNREACHABLE => None,
            Hop { first, count: 1 } => Some(PortId(first)),
            Hop { first, count } => Some(self.sets[(first + choose(count)) as usize]),
        }
    }

    #[inline]
    fn hop(&self, from: Place, to: Place) -> Hop {
        self.to[to.router as usize].as_ref().expect("learnt before")[from.router as usize]
    }

    /// Finds all shortest ways to a destination, by breadth first search from it.
    pub(crate) fn learn(&mut self, to: NodeId, graph: &impl Graph) {
        const FAR: u32 = u32::MAX;
        let root = self.places[to.index()].router;
        let mut distance = vec![FAR; self.routers.len()];
        let mut hops = vec![UNREACHABLE; self.routers.len()].into_boxed_slice();
        let mut reached = VecDeque::from([self.routers[root as usize]]);
        distance[root as usize] = 0;
        let mut set = Vec::new();
        while let Some(node) = reached.pop_front() {
            let number = self.places[node.index()].router as usize;
            let here = distance[number];
            set.clear();
            for edge in graph.edges(node).filter(|edge| edge.up) {
                let place = self.places[edge.to.index()];
                if place.port != NO_PORT {
                    continue; // No way leads through it.
                }
                let there = &mut distance[place.router as usize];
                if *there == FAR && (number == root as usize || graph.forwards(node)) {
                    *there = here + 1;
                    reached.push_back(edge.to);
                }
                if here > 0 && *there == here - 1 && (place.router == root || graph.forwards(edge.to)) {
                    set.push(edge.port);
                }
            }
            hops[number] = match set[..] {
                [] => UNREACHABLE,
                [port] => Hop { first: port.0, count: 1 },
                _ => Hop { first: self.intern(&set), count: set.len() as u32 },
            };
        }
        self.to[root as usize] = Some(hops);
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

/// The choice of a flow among `count` equally short ways at `node`. Each node hashes otherwise, or
/// the flows that met at one would stay together at the next. The salt differs by seed: which flows
/// meet is chance.
#[inline]
pub(crate) fn flow_choice(salt: u64, from: SimAddress, to: SimAddress, node: NodeId, count: u32) -> u32 {
    let pair = |address: SimAddress| u64::from(address.node) << 16 | u64::from(address.port);
    let mixed = mix(mix(salt ^ pair(from) ^ u64::from(node.0) << 40) ^ pair(to).rotate_left(17));
    (((mixed >> 32) * u64::from(count)) >> 32) as u32
}

/// `SplitMix64`'s finalizer.
#[inline]
pub(crate) const fn mix(mut bits: u64) -> u64 {
    bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ bits >> 31
}
