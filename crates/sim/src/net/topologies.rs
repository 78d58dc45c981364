//! The standard topologies. All links and all nodes of a kind are alike; single ones can be changed
//! afterwards.

use super::ids::NodeId;
use super::topology::{LinkConfig, NodeConfig, Topology, TopologyError};

/// The parts that a standard topology is made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parts {
    /// Every host.
    pub host: NodeConfig,
    /// Every switch.
    pub switch: NodeConfig,
    /// Between a host and its switch.
    pub edge: LinkConfig,
    /// Between switches.
    pub core: LinkConfig,
}

impl Parts {
    /// All links alike, default nodes.
    #[must_use]
    pub const fn uniform(link: LinkConfig) -> Self {
        Self { host: NodeConfig::host(), switch: NodeConfig::switch(), edge: link, core: link }
    }
}

const HOSTS_MAX: usize = 1 << 14;

impl Topology {
    /// Hosts `h0`.. on one switch `s0`.
    ///
    /// # Errors
    /// Without hosts, or with too many.
    pub fn one_rack(hosts: usize, parts: &Parts) -> Result<Self, TopologyError> {
        count(hosts, "number of hosts")?;
        let mut topology = Self::new();
        let switch = topology.add_switch("s0", 0, parts.switch);
        topology.rack("h", 0, hosts, switch, parts);
        Ok(topology)
    }

    /// Hosts `l0`.. on a switch `s0`, `r0`.. on a switch `s1`, and one core link between the two:
    /// link 0.
    ///
    /// # Errors
    /// Without hosts on a side, or with too many.
    pub fn dumbbell(left: usize, right: usize, parts: &Parts) -> Result<Self, TopologyError> {
        count(left, "number of hosts on the left")?;
        count(right, "number of hosts on the right")?;
        let mut topology = Self::new();
        let switches = [0, 1].map(|at| topology.add_switch(format!("s{at}"), 0, parts.switch));
        topology.add_link(switches[0], switches[1], parts.core);
        topology.rack("l", 0, left, switches[0], parts);
        topology.rack("r", 0, right, switches[1], parts);
        Ok(topology)
    }

    /// ATP's Figure 9: switches `sw0` and `sw1` hang on `sw2`. Workers `w0` and `w1` hang on `sw0`,
    /// `w2` and `w3` on `sw1`, `w4`, `w5` and the parameter server `ps` on `sw2`. All three
    /// switches are next to hosts. Still `sw2` is layer 1, because the other racks' packets reach
    /// it second.
    #[must_use]
    pub fn figure9(parts: &Parts) -> Self {
        let mut topology = Self::new();
        let switches = [0, 0, 1].into_iter().enumerate();
        let switches: Vec<_> =
            switches.map(|(at, layer)| topology.add_switch(format!("sw{at}"), layer, parts.switch)).collect();
        for (rack, switch) in switches.iter().enumerate() {
            topology.rack("w", 2 * rack, 2, *switch, parts);
        }
        let server = topology.add_host("ps", parts.host);
        topology.add_link(server, switches[2], parts.edge);
        topology.add_link(switches[0], switches[2], parts.core);
        topology.add_link(switches[1], switches[2], parts.core);
        topology
    }

    /// `leaves` switches `leaf0`.. with `hosts` hosts each (`h0`.. in the order of leaves), every
    /// leaf linked to each of `spines` switches `spine0`...
    ///
    /// # Errors
    /// When a number is zero or too large.
    pub fn leaf_spine(
        leaves: usize,
        spines: usize,
        hosts: usize,
        parts: &Parts,
    ) -> Result<Self, TopologyError> {
        count(leaves, "number of leaves")?;
        count(spines, "number of spines")?;
        count(hosts.saturating_mul(leaves), "number of hosts")?;
        let mut topology = Self::new();
        let leaf_switches: Vec<_> =
            (0..leaves).map(|at| topology.add_switch(format!("leaf{at}"), 0, parts.switch)).collect();
        let spine_switches: Vec<_> =
            (0..spines).map(|at| topology.add_switch(format!("spine{at}"), 1, parts.switch)).collect();
        for (at, leaf) in leaf_switches.iter().enumerate() {
            topology.rack("h", at * hosts, hosts, *leaf, parts);
        }
        for leaf in &leaf_switches {
            for spine in &spine_switches {
                topology.add_link(*leaf, *spine, parts.core);
            }
        }
        Ok(topology)
    }

    /// Al-Fares et al.'s fat tree of switches with `k` ports:
    /// - `k` pods of `k/2` edge switches (`edge0`.., layer 0) and `k/2` aggregation switches
    ///   (`agg0`.., layer 1),
    /// - `(k/2)^2` core switches (`core0`.., layer 2),
    /// - `hosts` at each edge switch (`h0`..); Al-Fares et al. have `k/2`.
    ///
    /// # Errors
    /// When `k` is odd, less than 2 or more than 40, or there are no hosts, or too many.
    pub fn fat_tree(k: usize, hosts: usize, parts: &Parts) -> Result<Self, TopologyError> {
        if k < 2 || k % 2 == 1 || k > 40 {
            return Err(TopologyError::Parameter("k of a fat tree: even, from 2 to 40"));
        }
        let half = k / 2;
        count(hosts.saturating_mul(k * half), "number of hosts")?;
        let mut topology = Self::new();
        let mut layer = |name: &str, layer, switches| -> Vec<NodeId> {
            (0..switches).map(|at| topology.add_switch(format!("{name}{at}"), layer, parts.switch)).collect()
        };
        let edges = layer("edge", 0, k * half);
        let aggregations = layer("agg", 1, k * half);
        let cores = layer("core", 2, half * half);
        for (at, edge) in edges.iter().enumerate() {
            topology.rack("h", at * hosts, hosts, *edge, parts);
        }
        for pod in 0..k {
            for edge in &edges[pod * half..][..half] {
                for aggregation in &aggregations[pod * half..][..half] {
                    topology.add_link(*edge, *aggregation, parts.core);
                }
            }
            for (group, aggregation) in aggregations[pod * half..][..half].iter().enumerate() {
                for core in &cores[group * half..][..half] {
                    topology.add_link(*aggregation, *core, parts.core);
                }
            }
        }
        Ok(topology)
    }

    fn rack(&mut self, prefix: &str, first: usize, hosts: usize, switch: NodeId, parts: &Parts) {
        for at in first..first + hosts {
            let host = self.add_host(format!("{prefix}{at}"), parts.host);
            self.add_link(host, switch, parts.edge);
        }
    }
}

fn count(number: usize, what: &'static str) -> Result<(), TopologyError> {
    if (1..=HOSTS_MAX).contains(&number) { Ok(()) } else { Err(TopologyError::Parameter(what)) }
}
