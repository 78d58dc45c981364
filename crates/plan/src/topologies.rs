//! The topologies that GOAT is evaluated on (§III-B, §VII).

use crate::topology::{Link, Node, NodeId, NodeKind, Topology, TopologyError};

/// Bytes of a Tofino that gradients can have (§VII-B).
pub const TESTBED_MEMORY_BYTES: u64 = 20_000_000;
/// Bytes of a Tofino 2 (§VII-D).
pub const SWITCH_MEMORY_BYTES: u64 = 64_000_000;

/// What links carry.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Between a host and its switch, in bits a second.
    pub host_bps: f64,
    /// Between two switches.
    pub core_bps: f64,
}

impl Rates {
    /// All links alike.
    #[must_use]
    pub const fn alike(bps: f64) -> Self {
        Self { host_bps: bps, core_bps: bps }
    }
}

/// Nodes and links that are being put together.
#[derive(Default)]
struct Plan {
    nodes: Vec<Node>,
    links: Vec<Link>,
}

impl Plan {
    fn add(&mut self, name: String, kind: NodeKind) -> NodeId {
        self.nodes.push(Node { name, kind });
        // A node that does not fit is refused by `Topology::new` for the number of nodes.
        NodeId((self.nodes.len() - 1) as u16)
    }

    fn switches(&mut self, name: &str, count: usize, memory_bytes: Option<u64>) -> Vec<NodeId> {
        (0..count)
            .map(|index| self.add(format!("{name}{index}"), NodeKind::Switch { memory_bytes }))
            .collect()
    }

    fn hosts(&mut self, name: &str, count: usize) -> Vec<NodeId> {
        (0..count).map(|index| self.add(format!("{name}{index}"), NodeKind::Host)).collect()
    }

    fn join(&mut self, a: NodeId, b: NodeId, rate_bps: f64) {
        self.links.push(Link { ends: [a, b], rate_bps });
    }

    fn done(self) -> Result<Topology, TopologyError> {
        Topology::new(self.nodes, self.links)
    }
}

/// Three switches, each joined to the other two: `s3` with the server `ps`, and `s1` and `s2` with
/// half of the workers `w1`, `w2`, .. each.
///
/// Figure 2 has 4 workers, and Figure 4, the testbed, 8. Neither figure draws a link between `s1`
/// and `s2`; it follows from Figure 2's sequences: `s2` receives `B1` and `B2` from `s1`, and `s3`
/// sends neither.
///
/// # Errors
/// When the number of workers is odd or too large.
pub fn triangle(workers: usize, memory_bytes: u64, rates: Rates) -> Result<Topology, TopologyError> {
    if workers == 0 || workers % 2 == 1 {
        return Err(TopologyError::Parameter(
            "number of workers: half of them are behind each of two switches",
        ));
    }
    check_size(workers + 4)?;
    let mut plan = Plan::default();
    let memory_bytes = Some(memory_bytes);
    let [s1, s2, s3] =
        [1, 2, 3].map(|index| plan.add(format!("s{index}"), NodeKind::Switch { memory_bytes }));
    let server = plan.add("ps".into(), NodeKind::Host);
    for (a, b) in [(s1, s3), (s2, s3), (s1, s2)] {
        plan.join(a, b, rates.core_bps);
    }
    plan.join(s3, server, rates.host_bps);
    for worker in 1..=workers {
        let host = plan.add(format!("w{worker}"), NodeKind::Host);
        plan.join(host, if worker <= workers / 2 { s1 } else { s2 }, rates.host_bps);
    }
    plan.done()
}

/// The testbed of §VII-B, Figure 4: 8 workers, one server, three switches of 20 MB, links of 100
/// Gbit/s.
#[must_use]
pub fn testbed() -> Topology {
    triangle(8, TESTBED_MEMORY_BYTES, Rates::alike(100e9)).expect("eight is even")
}

/// Every leaf is joined to every spine; hosts `h0`, `h1`, .. are spread over the leaves in turn of
/// blocks. §VII-D has 10 leaves, 10 spines, 50 hosts. No switch is programmable.
///
/// # Errors
/// When a number is zero or too large, or hosts do not divide by leaves.
pub fn leaf_spine(
    leaves: usize,
    spines: usize,
    hosts: usize,
    rates: Rates,
) -> Result<Topology, TopologyError> {
    if leaves == 0 || spines == 0 || hosts == 0 || !hosts.is_multiple_of(leaves) {
        return Err(TopologyError::Parameter("leaf-spine: leaves, spines, and as many hosts at each leaf"));
    }
    check_size(leaves.saturating_add(spines).saturating_add(hosts))?;
    let mut plan = Plan::default();
    let leaf = plan.switches("leaf", leaves, None);
    let spine = plan.switches("spine", spines, None);
    for leaf in &leaf {
        for spine in &spine {
            plan.join(*leaf, *spine, rates.core_bps);
        }
    }
    for (index, host) in plan.hosts("h", hosts).into_iter().enumerate() {
        plan.join(host, leaf[index / (hosts / leaves)], rates.host_bps);
    }
    plan.done()
}

/// A fat-tree of switches with `k` ports. It has `k` pods of `k / 2` edge and `k / 2` aggregation
/// switches, `(k / 2)²` core switches, and `hosts` at each edge switch. The paper (§VII-D) has 32
/// edge, 32 aggregation and 16 core switches and 192 hosts. There k = 8, with 6 hosts an edge
/// switch; a full one would have k / 2 = 4. No switch is programmable.
///
/// # Errors
/// When `k` is odd, or a number is zero or too large.
pub fn fat_tree(k: usize, hosts: usize, rates: Rates) -> Result<Topology, TopologyError> {
    if k == 0 || k % 2 == 1 || k > 128 || hosts == 0 {
        return Err(TopologyError::Parameter("fat-tree: an even k, and hosts at each edge switch"));
    }
    let half = k / 2;
    check_size((k * half).saturating_mul(hosts.saturating_add(2)).saturating_add(half * half))?;
    let mut plan = Plan::default();
    let core = plan.switches("core", half * half, None);
    let edge = plan.switches("edge", k * half, None);
    let aggregation = plan.switches("agg", k * half, None);
    for pod in 0..k {
        for up in 0..half {
            let aggregation = aggregation[pod * half + up];
            for other in 0..half {
                plan.join(edge[pod * half + other], aggregation, rates.core_bps);
                plan.join(aggregation, core[up * half + other], rates.core_bps);
            }
        }
    }
    for (index, host) in plan.hosts("h", k * half * hosts).into_iter().enumerate() {
        plan.join(host, edge[index / hosts], rates.host_bps);
    }
    plan.done()
}

/// The leaf-spine of §VII-D.
#[must_use]
pub fn paper_leaf_spine(rates: Rates) -> Topology {
    leaf_spine(10, 10, 50, rates).expect("fifty divide by ten")
}

/// The fat-tree of §VII-D.
#[must_use]
pub fn paper_fat_tree(rates: Rates) -> Topology {
    fat_tree(8, 6, rates).expect("eight is even")
}

/// Gives this share of the switches, drawn by `seed`, that much memory, as §VII-D does with 20 %
/// and 64 MB.
///
/// # Panics
/// When the share is not from 0 to 1.
pub fn make_programmable(topology: &mut Topology, share: f64, memory_bytes: u64, seed: u64) {
    assert!((0.0..=1.0).contains(&share), "a share of {share}");
    let mut switches: Vec<_> = topology.switches().collect();
    let count = (share * switches.len() as f64).round() as usize;
    let mut random = oorandom::Rand64::new(u128::from(seed));
    for drawn in 0..count {
        let other = random.rand_range(drawn as u64..switches.len() as u64) as usize;
        switches.swap(drawn, other);
        topology.set_memory_bytes(switches[drawn], Some(memory_bytes));
    }
}

fn check_size(nodes: usize) -> Result<(), TopologyError> {
    if nodes > crate::topology::NODES_MAX { Err(TopologyError::TooManyNodes(nodes)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(topology: &Topology) -> (usize, usize, usize) {
        (topology.hosts().count(), topology.switches().count(), topology.links().len())
    }

    #[test]
    fn the_papers_topologies_have_its_numbers() {
        let rates = Rates::alike(10e9);
        assert_eq!(counts(&testbed()), (9, 3, 12));
        assert_eq!(counts(&paper_leaf_spine(rates)), (50, 20, 150));
        assert_eq!(counts(&paper_fat_tree(rates)), (192, 80, 192 + 128 + 128));
        let tree = paper_fat_tree(rates);
        let distance = |a, b| tree.distance(tree.node(a).expect("a host"), tree.node(b).expect("a host"));
        assert_eq!([distance("h0", "h5"), distance("h0", "h6"), distance("h0", "h191")], [2, 4, 6].map(Some));
    }

    #[test]
    fn a_share_of_the_switches_is_programmable_by_seed() {
        let drawn = |seed| {
            let mut tree = paper_fat_tree(Rates::alike(10e9));
            make_programmable(&mut tree, 0.2, SWITCH_MEMORY_BYTES, seed);
            tree.programmable().collect::<Vec<_>>()
        };
        assert_eq!(drawn(1).len(), 16);
        assert_eq!(drawn(1), drawn(1));
        assert_ne!(drawn(1), drawn(2));
    }

    #[test]
    fn impossible_numbers_are_refused() {
        let rates = Rates::alike(1e9);
        for topology in [
            triangle(3, 1, rates),
            leaf_spine(3, 1, 4, rates),
            leaf_spine(1, 0, 4, rates),
            leaf_spine(1, usize::MAX, 4, rates),
            fat_tree(7, 1, rates),
            fat_tree(128, usize::MAX, rates),
        ] {
            topology.expect_err("refused");
        }
    }
}
