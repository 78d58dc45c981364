//! Where a job's machines stand in the aggregation hierarchy (ATP §3.3, §3.4).
//!
//! A worker's packets go to its rack's switch, from there to the switch of the server's rack, from there to the server; what
//! is not programmable is left out. Workers in the server's rack, if there are others, join at the second level, as in the
//! paper's Figure 9.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};

use fanin_protocol::switchml::Contributions;
use fanin_wire::{CHILDREN_MAX, Directions, PLACES_MAX, Rank, WorkerId};

use super::atp::Help;
use crate::net::{NodeId, NodeKind, Topology};

/// A job's hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    /// By rank: what its packets say, and which node they go to.
    pub(crate) workers: Vec<(Directions, NodeId)>,
    /// The switches, each after those below it.
    pub(crate) switches: Vec<Hop>,
    /// The level that packets have when they come to the server.
    pub(crate) server_level: u8,
}

/// A switch on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hop {
    pub(crate) switch: NodeId,
    /// Which bitmap it uses.
    pub(crate) level: u8,
    /// Whom it forwards to.
    pub(crate) upstream: NodeId,
}

/// Why a job has no place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PlacementError {
    /// A node has more children than a bitmap has bits.
    Children { node: String, children: usize, most: usize },
    /// A host that no switch is next to.
    Unattached(String),
    /// SwitchML: no switch sums.
    NoSwitch,
}

impl std::fmt::Display for PlacementError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Children { node, children, most } => write!(
                f,
                "{node} would have {children} children in this job, and a bitmap holds {most}; spread the workers over more racks, or place the server in a rack of its own"
            ),
            Self::Unattached(host) => write!(f, "{host} is next to no switch"),
            Self::NoSwitch => f.write_str("SwitchML needs a programmable switch, and there is none"),
        }
    }
}

/// The switch that a host is attached to.
pub(crate) fn rack(topology: &Topology, host: NodeId) -> Result<NodeId, PlacementError> {
    let switch = topology.neighbours(host).map(|(node, _)| node).find(|node| topology.layer(*node).is_some());
    switch.ok_or_else(|| PlacementError::Unattached(topology.get(host).name.clone()))
}

pub(crate) fn programmable(topology: &Topology, node: NodeId) -> bool {
    matches!(topology.get(node).kind, NodeKind::Switch { programmable: true, .. })
}

/// Who sums what of a SwitchML job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pools {
    /// By rank: the switch that it sends to, and its place there.
    pub(crate) workers: Vec<(NodeId, WorkerId)>,
    pub(crate) switches: Vec<Pool>,
}

/// A switch of a SwitchML job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pool {
    pub(crate) switch: NodeId,
    pub(crate) contributions: Contributions,
    /// Whom a rack sends its sums to, and its place there.
    pub(crate) upstream: Option<(NodeId, WorkerId)>,
}

/// The switches of a SwitchML job: the workers' own where they are in one rack; else each rack's sums for its workers (SwitchML §7),
/// and the one that is nearest to all racks is the root. Workers whose rack's switch is not programmable send to the root.
pub(crate) fn pools(topology: &Topology, workers: &[NodeId]) -> Result<Pools, PlacementError> {
    let racks = workers.iter().map(|worker| rack(topology, *worker)).collect::<Result<Vec<_>, _>>()?;
    let root = nearest(topology, &racks).ok_or(PlacementError::NoSwitch)?;
    let mut sums = BTreeMap::from([(root, Contributions::default())]);
    let mut places = BTreeMap::new();
    let mut placed = Vec::with_capacity(workers.len());
    for (rank, rack) in racks.into_iter().enumerate() {
        let rank = Rank(rank as u16);
        let switch = if programmable(topology, rack) { rack } else { root };
        if switch != root && !sums.contains_key(&switch) {
            let at_root = sums.entry(root).or_default();
            let place = at_root.ranks.len();
            at_root.ranks.push(rank);
            at_root.racks |= 1_u64.checked_shl(place as u32).unwrap_or(0);
            places.insert(switch, WorkerId(place as u8));
        }
        let here = sums.entry(switch).or_default();
        placed.push((switch, WorkerId(here.ranks.len() as u8)));
        here.ranks.push(rank);
    }
    let most = PLACES_MAX as usize;
    if let Some((switch, sum)) = sums.iter().find(|(_, sum)| sum.ranks.len() > most) {
        let (node, children) = (topology.get(*switch).name.clone(), sum.ranks.len());
        return Err(PlacementError::Children { node, children, most });
    }
    let pool = |(switch, contributions)| {
        let upstream = places.get(&switch).map(|place| (root, *place));
        Pool { switch, contributions, upstream }
    };
    Ok(Pools { workers: placed, switches: sums.into_iter().map(pool).collect() })
}

/// The programmable switch with the fewest links to all racks together; of several the one nearest to the core, then the first.
fn nearest(topology: &Topology, racks: &[NodeId]) -> Option<NodeId> {
    let mut adjacent: BTreeMap<NodeId, Vec<NodeId>> = BTreeMap::new();
    for link in topology.links() {
        let [a, b] = link.ends;
        if topology.layer(a).is_some() && topology.layer(b).is_some() {
            adjacent.entry(a).or_default().push(b);
            adjacent.entry(b).or_default().push(a);
        }
    }
    let mut racks = racks.to_vec();
    racks.sort_unstable();
    racks.dedup();
    let mut links: BTreeMap<NodeId, Vec<usize>> = BTreeMap::new();
    for rack in &racks {
        let mut distance = BTreeMap::from([(*rack, 0)]);
        let mut next = VecDeque::from([*rack]);
        while let Some(switch) = next.pop_front() {
            let further = distance[&switch] + 1;
            for other in adjacent.get(&switch).into_iter().flatten() {
                distance.entry(*other).or_insert_with(|| {
                    next.push_back(*other);
                    further
                });
            }
        }
        for (switch, distance) in distance {
            links.entry(switch).or_default().push(distance);
        }
    }
    let reached = links.into_iter().filter(|(_, to)| to.len() == racks.len());
    let sums = reached.filter(|(switch, _)| programmable(topology, *switch));
    let best =
        sums.min_by_key(|(switch, to)| (to.iter().sum::<usize>(), Reverse(topology.layer(*switch)), *switch));
    best.map(|(switch, _)| switch)
}

/// The hierarchy of a job with a parameter server.
pub(crate) fn place(
    topology: &Topology,
    help: Help,
    workers: &[NodeId],
    server: NodeId,
) -> Result<Placement, PlacementError> {
    let racks = workers.iter().map(|worker| rack(topology, *worker)).collect::<Result<Vec<_>, _>>()?;
    let aggregates = |switch: NodeId| help != Help::None && programmable(topology, switch);
    let root = Some(rack(topology, server)?).filter(|root| help == Help::Way && aggregates(*root));
    let single = racks.iter().all(|rack| *rack == racks[0]);
    let too_many = |node: NodeId, children| {
        let node = topology.get(node).name.clone();
        PlacementError::Children { node, children, most: CHILDREN_MAX }
    };

    // Everybody in one rack: one level, whether its switch or the server sums.
    if single {
        if workers.len() > CHILDREN_MAX && aggregates(racks[0]) {
            return Err(too_many(racks[0], workers.len()));
        }
        if aggregates(racks[0]) {
            let first = racks[0];
            let mut switches = vec![Hop { switch: first, level: 0, upstream: server }];
            if let Some(root) = root.filter(|root| *root != first) {
                switches[0].upstream = root;
                switches.push(Hop { switch: root, level: 1, upstream: server });
            }
            let upper = if switches.len() > 1 { Some((0, 1)) } else { None };
            let workers =
                (0..workers.len()).map(|rank| (directions(0, (rank, workers.len()), upper), first)).collect();
            let server_level = switches.len() as u8;
            return Ok(Placement { workers, switches, server_level });
        }
    }

    // Groups of workers below a switch of the first level, in the order of their first ranks; the others on their own.
    let mut lower: Vec<(NodeId, usize)> = Vec::new();
    let mut alone = 0;
    for rack in &racks {
        if aggregates(*rack) && Some(*rack) != root {
            match lower.iter_mut().find(|(switch, _)| switch == rack) {
                Some((_, size)) => *size += 1,
                None => lower.push((*rack, 1)),
            }
        } else {
            alone += 1;
        }
    }
    let top = root.unwrap_or(server);
    // At a server that nobody helps, single workers form groups, for there may be more than a bitmap holds.
    if lower.is_empty() && root.is_none() {
        let groups = workers.len().div_ceil(CHILDREN_MAX);
        let directions_of = |rank: usize| {
            let group = rank / CHILDREN_MAX;
            let size = (workers.len() - group * CHILDREN_MAX).min(CHILDREN_MAX);
            directions(0, (rank % CHILDREN_MAX, size), (groups > 1).then_some((group, groups)))
        };
        let workers = (0..workers.len()).map(|rank| (directions_of(rank), server)).collect();
        return Ok(Placement { workers, switches: Vec::new(), server_level: 0 });
    }
    for (switch, size) in &lower {
        if *size > CHILDREN_MAX {
            return Err(too_many(*switch, *size));
        }
    }
    let children = lower.len() + alone;
    if children > CHILDREN_MAX {
        return Err(too_many(top, children));
    }
    let mut seen = vec![0; lower.len()];
    let mut next_alone = lower.len();
    let mut placed = Vec::with_capacity(workers.len());
    for rack in &racks {
        if let Some(group) = lower.iter().position(|(switch, _)| switch == rack) {
            let child = seen[group];
            seen[group] += 1;
            placed.push((directions(0, (child, lower[group].1), Some((group, children))), *rack));
        } else {
            placed.push((at_second_level(next_alone, children), top));
            next_alone += 1;
        }
    }
    let mut switches: Vec<Hop> =
        lower.iter().map(|(switch, _)| Hop { switch: *switch, level: 0, upstream: top }).collect();
    switches.extend(root.map(|root| Hop { switch: root, level: 1, upstream: server }));
    let server_level = if root.is_some() { 2 } else { 1 };
    Ok(Placement { workers: placed, switches, server_level })
}

/// Child `own.0` of `own.1` at the first level; its switch is child `upper.0` of `upper.1` at the second.
fn directions(level: u8, own: (usize, usize), upper: Option<(usize, usize)>) -> Directions {
    let mut directions = Directions { level, ..Directions::default() };
    for (at, (child, children)) in std::iter::once(own).chain(upper).enumerate() {
        directions.bitmaps[at] = 1 << child;
        directions.fan_in_degrees[at] = children as u8;
    }
    directions
}

fn at_second_level(child: usize, children: usize) -> Directions {
    let mut directions = Directions { level: 1, ..Directions::default() };
    directions.bitmaps[1] = 1 << child;
    directions.fan_in_degrees[1] = children as u8;
    directions
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::{LinkConfig, Parts, Programmable};
    use std::time::Duration;

    fn parts() -> Parts {
        Parts::uniform(LinkConfig::new(100_000_000_000, Duration::from_micros(1)))
    }

    fn named(topology: &Topology, names: &[&str]) -> Vec<NodeId> {
        names.iter().map(|name| topology.node(name).expect("a node")).collect()
    }

    fn figure9() -> (Topology, Vec<NodeId>, NodeId) {
        let mut topology = Topology::figure9(&parts());
        topology.set_programmable(&Programmable::Share(1.0)).expect("a share");
        let workers = named(&topology, &["w0", "w1", "w2", "w3", "w4", "w5"]);
        let server = topology.node("ps").expect("the server");
        (topology, workers, server)
    }

    #[test]
    fn figure_9_has_two_racks_and_two_workers_at_its_second_level() {
        let (topology, workers, server) = figure9();
        let placement = place(&topology, Help::Way, &workers, server).expect("a place");
        let sw = named(&topology, &["sw0", "sw1", "sw2"]);
        assert_eq!(
            placement.switches,
            [
                Hop { switch: sw[0], level: 0, upstream: sw[2] },
                Hop { switch: sw[1], level: 0, upstream: sw[2] },
                Hop { switch: sw[2], level: 1, upstream: server },
            ]
        );
        let expected = [
            (0, [1, 1], [2, 4], sw[0]),
            (0, [2, 1], [2, 4], sw[0]),
            (0, [1, 2], [2, 4], sw[1]),
            (0, [2, 2], [2, 4], sw[1]),
            (1, [0, 4], [0, 4], sw[2]),
            (1, [0, 8], [0, 4], sw[2]),
        ];
        for ((directions, upstream), (level, bitmaps, degrees, to)) in placement.workers.iter().zip(expected)
        {
            assert_eq!(directions.level, level);
            assert_eq!(directions.bitmaps[..2], bitmaps);
            assert_eq!(directions.fan_in_degrees[..2], degrees);
            assert_eq!(*upstream, to);
        }
    }

    #[test]
    fn a_rack_scale_service_sums_in_every_rack_for_itself() {
        let (topology, workers, server) = figure9();
        let placement = place(&topology, Help::Racks, &workers, server).expect("a place");
        assert_eq!(placement.switches.len(), 3);
        assert!(placement.switches.iter().all(|hop| hop.level == 0 && hop.upstream == server));
        let (last, upstream) = placement.workers[5];
        assert_eq!((last.bitmaps[..2].to_vec(), last.fan_in_degrees[..2].to_vec()), (vec![2, 4], vec![2, 3]));
        assert_eq!(topology.get(upstream).name, "sw2");
    }

    #[test]
    fn a_parameter_server_alone_has_every_worker_as_its_child() {
        let (topology, workers, server) = figure9();
        let placement = place(&topology, Help::None, &workers, server).expect("a place");
        assert!(placement.switches.is_empty());
        assert!(placement.workers.iter().all(|(directions, to)| *to == server && directions.level == 0));
        assert_eq!(placement.workers[5].0.bitmaps, [32, 0, 0, 0]);
    }

    #[test]
    fn more_children_than_a_bitmap_holds_are_refused() {
        let mut topology = Topology::one_rack(40, &parts()).expect("a rack");
        topology.set_programmable(&Programmable::Share(1.0)).expect("a share");
        let hosts: Vec<_> = topology.hosts().collect();
        assert_eq!(
            place(&topology, Help::Way, &hosts[..33], hosts[39]),
            Err(PlacementError::Children { node: "s0".into(), children: 33, most: CHILDREN_MAX })
        );
        let alone = place(&topology, Help::None, &hosts[..33], hosts[39]).expect("a server alone takes them");
        assert_eq!(alone.workers[32].0.bitmaps, [1, 2, 0, 0]);
        assert_eq!(alone.workers[32].0.fan_in_degrees, [1, 2, 0, 0]);
        assert_eq!(alone.workers[31].0.fan_in_degrees, [32, 2, 0, 0]);
    }

    #[test]
    fn thirty_two_racks_of_thirty_two_fill_two_levels() {
        let mut topology = Topology::leaf_spine(33, 2, 32, &parts()).expect("a leaf-spine");
        topology.set_programmable(&Programmable::Layers(vec![0])).expect("a layer");
        let hosts: Vec<_> = topology.hosts().collect();
        let placement = place(&topology, Help::Way, &hosts[..1024], hosts[1024]).expect("a place");
        assert_eq!(placement.switches.len(), 33);
        assert_eq!(placement.workers[1023].0.bitmaps, [1 << 31, 1 << 31, 0, 0]);
        assert_eq!(placement.workers[1023].0.fan_in_degrees, [32, 32, 0, 0]);
    }

    /// "switch: ranks, bitmap of racks, place at the upstream" of each.
    fn shown(topology: &Topology, pools: &Pools) -> Vec<String> {
        let name = |node: NodeId| &topology.get(node).name;
        let sum = |pool: &Pool| {
            let ranks: Vec<_> = pool.contributions.ranks.iter().map(|rank| rank.0).collect();
            let upstream = pool
                .upstream
                .map_or(String::new(), |(node, place)| format!(", {} of {}", place.0, name(node)));
            format!("{}: {ranks:?}, {:b}{upstream}", name(pool.switch), pool.contributions.racks)
        };
        pools.switches.iter().map(sum).collect()
    }

    #[test]
    fn a_switchml_job_of_one_rack_has_its_switch_alone() {
        let (topology, workers, _) = figure9();
        let found = pools(&topology, &workers[..2]).expect("a place");
        assert_eq!(shown(&topology, &found), ["sw0: [0, 1], 0"]);
    }

    #[test]
    fn racks_of_a_switchml_job_send_to_the_switch_nearest_to_all() {
        let (topology, workers, _) = figure9();
        let found = pools(&topology, &workers).expect("a place");
        let expected = ["sw0: [0, 1], 0, 0 of sw2", "sw1: [2, 3], 0, 1 of sw2", "sw2: [0, 2, 4, 5], 11"];
        assert_eq!(shown(&topology, &found), expected);
        let sw = named(&topology, &["sw0", "sw2"]);
        assert_eq!(found.workers[1], (sw[0], WorkerId(1)));
        assert_eq!(found.workers[5], (sw[1], WorkerId(3)));
    }

    #[test]
    fn workers_of_a_rack_that_does_not_sum_send_to_the_root() {
        let mut topology = Topology::leaf_spine(3, 2, 2, &parts()).expect("a leaf-spine");
        let hosts: Vec<_> = topology.hosts().collect();
        assert_eq!(pools(&topology, &hosts), Err(PlacementError::NoSwitch));
        topology.set_programmable(&Programmable::Layers(vec![1])).expect("a layer");
        let found = pools(&topology, &hosts).expect("a place");
        let spine = found.switches[0].switch;
        assert_eq!(topology.layer(spine), Some(1));
        assert_eq!(found.switches.len(), 1);
        assert!((0..6).all(|rank| found.workers[rank] == (spine, WorkerId(rank as u8))));
    }
}
