//! Hosts, switches that may hold gradients, and the links between them: how far it is from one to
//! another, and on which ways (GOAT §IV-A).
//!
//! Hosts do not forward. If there are several shortest ways, packets of one flow take one, chosen
//! by a hash ([`Topology::route`]). In the mean over flows each next hop gets an equal part
//! ([`Topology::spread`]), and loads are planned with that.

use std::collections::{BTreeMap, VecDeque};
use std::error::Error;
use std::fmt;

/// More nodes than this are a mistake: all distances are kept.
pub const NODES_MAX: usize = 4096;
/// Farther away than any node is.
const UNREACHABLE: u16 = u16::MAX;

/// A node of a topology: its place in the order of their making.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u16);

impl NodeId {
    /// For tables by node.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The use of a node for gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeKind {
    /// Workers and servers run there; it does not forward.
    Host,
    /// It forwards, and sums if it has memory for that.
    Switch {
        /// `B(s)`: bytes of gradients that it can hold; none where it is not programmable.
        memory_bytes: Option<u64>,
    },
}

/// A host or a switch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// The name for people. No two nodes share one.
    pub name: String,
    /// The use of the node for gradients.
    pub kind: NodeKind,
}

/// A link joins two nodes, alike in both directions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// The nodes.
    pub ends: [NodeId; 2],
    /// Bits a second in each direction.
    pub rate_bps: f64,
}

/// A network that can be planned for.
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    nodes: Vec<Node>,
    links: Vec<Link>,
    /// For each node, the nodes that are one link away, each with that link.
    neighbours: Vec<Vec<(NodeId, usize)>>,
    /// Links of the shortest way, by (from, to).
    distances: Vec<u16>,
}

impl Topology {
    /// Checks the nodes and links.
    ///
    /// # Errors
    /// Fails when two nodes share a name, or there are more than [`NODES_MAX`] nodes. Fails when a
    /// link ends at no node or carries nothing, or a switch has no memory.
    pub fn new(nodes: Vec<Node>, links: Vec<Link>) -> Result<Self, TopologyError> {
        if nodes.len() > NODES_MAX {
            return Err(TopologyError::TooManyNodes(nodes.len()));
        }
        let mut names = BTreeMap::new();
        for (index, node) in nodes.iter().enumerate() {
            if names.insert(&node.name, index).is_some() {
                return Err(TopologyError::DuplicateName(node.name.clone()));
            }
            if node.kind == (NodeKind::Switch { memory_bytes: Some(0) }) {
                return Err(TopologyError::NoMemory(node.name.clone()));
            }
        }
        let mut neighbours = vec![Vec::new(); nodes.len()];
        for (index, link) in links.iter().enumerate() {
            let [a, b] = link.ends;
            if a == b || a.index().max(b.index()) >= nodes.len() {
                return Err(TopologyError::Ends(index));
            }
            if !link.rate_bps.is_finite() || link.rate_bps <= 0.0 {
                let [a, b] = link.ends.map(|end| nodes[end.index()].name.clone());
                return Err(TopologyError::Rate { ends: [a, b], rate_bps: link.rate_bps });
            }
            neighbours[a.index()].push((b, index));
            neighbours[b.index()].push((a, index));
        }
        let mut topology = Self { nodes, links, neighbours, distances: Vec::new() };
        topology.measure();
        Ok(topology)
    }

    fn measure(&mut self) {
        let count = self.nodes.len();
        self.distances = vec![UNREACHABLE; count * count];
        let mut queue = VecDeque::new();
        for to in 0..count {
            let row = to * count;
            self.distances[row + to] = 0;
            queue.push_back(to);
            while let Some(node) = queue.pop_front() {
                // A node that is not the end of a way has to forward.
                if node != to && self.nodes[node].kind == NodeKind::Host {
                    continue;
                }
                for (other, _) in &self.neighbours[node] {
                    let place = row + other.index();
                    if self.distances[place] == UNREACHABLE {
                        self.distances[place] = self.distances[row + node] + 1;
                        queue.push_back(other.index());
                    }
                }
            }
        }
    }

    /// All nodes, in the order of their ids.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// All links. Links of nodes that are gone stay, and nothing goes over them.
    #[must_use]
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// The ids of all nodes.
    pub fn ids(&self) -> impl Iterator<Item = NodeId> + use<> {
        // At most NODES_MAX.
        (0..self.nodes.len() as u16).map(NodeId)
    }

    /// The name of a node for people.
    #[must_use]
    pub fn name(&self, node: NodeId) -> &str {
        &self.nodes[node.index()].name
    }

    /// The node of this name.
    #[must_use]
    pub fn node(&self, name: &str) -> Option<NodeId> {
        self.ids().find(|node| self.name(*node) == name)
    }

    /// Whether it is a host.
    #[must_use]
    pub fn is_host(&self, node: NodeId) -> bool {
        self.nodes[node.index()].kind == NodeKind::Host
    }

    /// Bytes of gradients that a switch can hold, if it is programmable.
    #[must_use]
    pub fn memory_bytes(&self, node: NodeId) -> Option<u64> {
        match self.nodes[node.index()].kind {
            NodeKind::Host => None,
            NodeKind::Switch { memory_bytes } => memory_bytes,
        }
    }

    /// Changes what a switch can hold; a host stays what it is.
    pub fn set_memory_bytes(&mut self, node: NodeId, bytes: Option<u64>) {
        if let NodeKind::Switch { memory_bytes } = &mut self.nodes[node.index()].kind {
            *memory_bytes = bytes.filter(|bytes| *bytes > 0);
        }
    }

    /// All hosts.
    pub fn hosts(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.ids().filter(|node| self.is_host(*node))
    }

    /// All switches.
    pub fn switches(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.ids().filter(|node| !self.is_host(*node))
    }

    /// `S`: the switches that can sum.
    pub fn programmable(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.ids().filter(|node| self.memory_bytes(*node).is_some())
    }

    /// The nodes that are one link away, each with that link.
    #[must_use]
    pub fn neighbours(&self, node: NodeId) -> &[(NodeId, usize)] {
        &self.neighbours[node.index()]
    }

    /// `D`: links of the shortest way, if there is a way.
    #[must_use]
    pub fn distance(&self, from: NodeId, to: NodeId) -> Option<u32> {
        let distance = self.distances[to.index() * self.nodes.len() + from.index()];
        (distance != UNREACHABLE).then_some(u32::from(distance))
    }

    /// The next hops of shortest ways.
    fn onward(&self, node: NodeId, to: NodeId) -> impl Iterator<Item = (NodeId, usize)> + '_ {
        let distance = self.distance(node, to).unwrap_or(0);
        self.neighbours(node).iter().copied().filter(move |(next, _)| {
            let forwards = *next == to || !self.is_host(*next);
            forwards && distance > 0 && self.distance(*next, to) == Some(distance - 1)
        })
    }

    /// The nodes after `from` and the links to them that packets of one flow pass, `to` being the
    /// last; nothing where there is no way. Among equal next hops a hash of `flow`, of the end and
    /// of the node decides, as ECMP does. So the ways of one flow number to one end are a tree.
    #[must_use]
    pub fn route(&self, from: NodeId, to: NodeId, flow: u64) -> Vec<(NodeId, usize)> {
        let mut way = Vec::new();
        let mut node = from;
        while node != to {
            let equal: Vec<_> = self.onward(node, to).collect();
            if equal.is_empty() {
                return Vec::new();
            }
            let place = u64::from(to.0) << 16 | u64::from(node.0);
            let chosen = equal[(mixed(mixed(flow) ^ place) % equal.len() as u64) as usize];
            way.push(chosen);
            node = chosen.0;
        }
        way
    }

    /// Which part of what goes from one node to another each link carries, where every next hop
    /// gets as much.
    #[must_use]
    pub fn spread(&self, from: NodeId, to: NodeId) -> Vec<(usize, f64)> {
        let mut parts = BTreeMap::new();
        // By node; all of one step are as far from the end.
        let mut step = BTreeMap::from([(from, 1.0)]);
        while !step.is_empty() {
            let mut next_step = BTreeMap::new();
            for (node, part) in step {
                let equal: Vec<_> = self.onward(node, to).collect();
                for (next, link) in &equal {
                    let part = part / equal.len() as f64;
                    *parts.entry(*link).or_insert(0.0) += part;
                    *next_step.entry(*next).or_insert(0.0) += part;
                }
            }
            step = next_step;
        }
        parts.into_iter().collect()
    }
}

/// SplitMix64's finalizer: every bit depends on all.
const fn mixed(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

/// Why a topology cannot be.
#[derive(Clone, Debug, PartialEq)]
pub enum TopologyError {
    /// Two nodes have this name.
    DuplicateName(String),
    /// The link of this index joins a node to itself, or to none.
    Ends(usize),
    /// A link carries nothing.
    Rate {
        /// What it joins.
        ends: [String; 2],
        /// The given rate.
        rate_bps: f64,
    },
    /// A programmable switch without memory.
    NoMemory(String),
    /// So many.
    TooManyNodes(usize),
    /// A parameter of a standard topology that is zero, odd or too large.
    Parameter(&'static str),
}

impl fmt::Display for TopologyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DuplicateName(name) => write!(f, "two nodes are called {name}: name each once"),
            Self::Ends(link) => {
                write!(f, "link {link} joins a node to itself or to none: it needs two nodes that are there")
            }
            Self::Rate { ends: [a, b], rate_bps } => {
                write!(f, "the link {a} - {b} carries {rate_bps} bit/s, and must carry more than zero")
            }
            Self::NoMemory(name) => {
                write!(f, "switch {name} has 0 bytes for gradients: leave its memory out if it cannot sum")
            }
            Self::TooManyNodes(count) => {
                write!(
                    f,
                    "{count} nodes: at most {NODES_MAX} are planned, so plan for one job's pod at a time"
                )
            }
            Self::Parameter(what) => write!(f, "impossible {what}"),
        }
    }
}

impl Error for TopologyError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str) -> Node {
        Node { name: name.into(), kind: NodeKind::Host }
    }

    fn switch(name: &str) -> Node {
        Node { name: name.into(), kind: NodeKind::Switch { memory_bytes: Some(1) } }
    }

    fn links(ends: &[(u16, u16)]) -> Vec<Link> {
        ends.iter().map(|(a, b)| Link { ends: [NodeId(*a), NodeId(*b)], rate_bps: 1e9 }).collect()
    }

    /// a and b behind two switches that two more join.
    fn diamond() -> Topology {
        let nodes = vec![host("a"), switch("s"), switch("u"), switch("v"), switch("t"), host("b")];
        Topology::new(nodes, links(&[(0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5)])).expect("a topology")
    }

    #[test]
    fn flows_take_one_way_each_and_all_ways_together() {
        let diamond = diamond();
        let (a, b) = (NodeId(0), NodeId(5));
        assert_eq!(diamond.distance(a, b), Some(4));
        let middles: std::collections::BTreeSet<_> = (0..64)
            .map(|flow| {
                let way = diamond.route(a, b, flow);
                assert_eq!(way, diamond.route(a, b, flow));
                assert_eq!((way.len(), way[3]), (4, (b, 5)));
                way[1].0
            })
            .collect();
        assert_eq!(middles, [NodeId(2), NodeId(3)].into());
        assert_eq!(diamond.spread(a, b), [(0, 1.0), (1, 0.5), (2, 0.5), (3, 0.5), (4, 0.5), (5, 1.0)]);
        assert!(diamond.route(a, a, 0).is_empty() && diamond.spread(a, a).is_empty());
    }

    #[test]
    fn hosts_do_not_forward() {
        let nodes = vec![host("a"), host("b"), host("c")];
        let line = Topology::new(nodes, links(&[(0, 1), (1, 2)])).expect("a topology");
        assert_eq!(line.distance(NodeId(0), NodeId(1)), Some(1));
        assert_eq!(line.distance(NodeId(0), NodeId(2)), None);
        assert!(line.route(NodeId(0), NodeId(2), 0).is_empty());
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_name() {
        let refused = |nodes, links| Topology::new(nodes, links).expect_err("refused").to_string();
        assert!(refused(vec![host("a"), host("a")], vec![]).contains("two nodes are called a"));
        assert!(refused(vec![host("a")], links(&[(0, 0)])).contains("link 0"));
        assert!(refused(vec![host("a")], links(&[(0, 1)])).contains("link 0"));
        let none = Node { name: "s".into(), kind: NodeKind::Switch { memory_bytes: Some(0) } };
        assert!(refused(vec![none], vec![]).contains("switch s has 0 bytes"));
        for rate_bps in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let slow = vec![Link { ends: [NodeId(0), NodeId(1)], rate_bps }];
            assert!(refused(vec![host("a"), host("b")], slow).contains("the link a - b"));
        }
        let many = (0..=NODES_MAX).map(|index| host(&index.to_string())).collect();
        assert!(refused(many, vec![]).contains("4097 nodes"));
    }
}
