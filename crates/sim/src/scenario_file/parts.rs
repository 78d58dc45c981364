//! `[[node]]` and `[[link]]`: what is unlike the rest of a network, and of an own one, what there
//! is at all.

use std::collections::{BTreeMap, VecDeque};

use toml::Spanned;

use super::error::{Mistake, at, unknown};
use super::network::{buffer, cores, holds_a_packet};
use super::schema::{File, Link, Node, NodeKindName, TopologyName};
use crate::net::{LinkConfig, LinkId, NodeConfig, NodeId, NodeKind, Parts, QueueConfig, Time, Topology};

#[cfg(test)]
mod tests;

/// Nodes that one entry makes, and pairs of nodes that it may join: as many as there are hosts and
/// links at most.
const NODES_MAX: usize = 1 << 14;
const PAIRS_MAX: usize = 1 << 20;

/// Makes and changes nodes, then links, in the order of their entries.
pub(super) fn apply(file: &File, parts: &Parts, topology: &mut Topology) -> Result<(), Mistake> {
    let own = *file.network.topology.get_ref() == TopologyName::Own;
    let mtu = *file.network.mtu.get_ref();
    for entry in &file.node {
        let node = entry.get_ref();
        let nodes = match &node.kind {
            Some(kind) if !own => {
                let message = "`kind` makes a node, and this topology has its nodes already; `topology = \"own\"` has none but yours";
                return Err(at(kind, message));
            }
            Some(kind) => make(node, *kind.get_ref(), parts, topology)?,
            None => existing(node, topology)?,
        };
        for id in nodes {
            let mut config = topology.get(id).config;
            let is_host = topology.get(id).kind == NodeKind::Host;
            change_node(entry, mtu, is_host, &mut config)?;
            topology.set_node(id, config);
        }
    }
    let mut known: BTreeMap<[NodeId; 2], LinkId> = BTreeMap::new();
    if own {
        known.extend(topology.links().iter().zip(0..).map(|(link, at)| (pair(link.ends), LinkId(at))));
    }
    for entry in &file.link {
        let links =
            if own { join(entry, parts, topology, &mut known)? } else { joined(entry.get_ref(), topology)? };
        for id in links {
            change_link(entry, mtu, id, topology)?;
        }
    }
    if own { connected(file, topology) } else { Ok(()) }
}

fn make(
    node: &Node,
    kind: NodeKindName,
    parts: &Parts,
    topology: &mut Topology,
) -> Result<Vec<NodeId>, Mistake> {
    let name = node.name.get_ref();
    if name.is_empty() || name.contains('*') {
        return Err(at(&node.name, "a new node's name is not empty and has no `*`"));
    }
    if let (NodeKindName::Host, Some(layer)) = (kind, &node.layer) {
        return Err(at(layer, "a host is in no layer"));
    }
    let names: Vec<String> = match &node.count {
        Some(count) if !(1..=NODES_MAX).contains(count.get_ref()) => {
            return Err(at(count, format!("from 1 to {NODES_MAX} nodes")));
        }
        Some(count) => (0..*count.get_ref()).map(|number| format!("{name}{number}")).collect(),
        None => vec![name.clone()],
    };
    let taken: std::collections::BTreeSet<&str> =
        topology.nodes().iter().map(|node| node.name.as_str()).collect();
    if let Some(twice) = names.iter().find(|name| taken.contains(name.as_str())) {
        return Err(at(&node.name, format!("two nodes are called {twice}")));
    }
    let layer = node.layer.as_ref().map_or(0, |layer| *layer.get_ref());
    let made = names.into_iter().map(|name| match kind {
        NodeKindName::Host => topology.add_host(name, parts.host),
        NodeKindName::Switch => topology.add_switch(name, layer, parts.switch),
    });
    Ok(made.collect())
}

fn existing(node: &Node, topology: &Topology) -> Result<Vec<NodeId>, Mistake> {
    if let Some(count) = &node.count {
        return Err(at(count, "`count` is of nodes that `kind` makes"));
    }
    if let Some(layer) = &node.layer {
        return Err(at(layer, "`layer` is of switches that `kind` makes"));
    }
    matching(topology, node.name.get_ref(), &node.name)
}

/// The nodes that a pattern means: at least one.
fn matching(topology: &Topology, pattern: &str, place: &Spanned<impl Sized>) -> Result<Vec<NodeId>, Mistake> {
    let nodes = topology.nodes().iter().zip(0..);
    let found: Vec<NodeId> =
        nodes.filter(|(node, _)| matches(pattern, &node.name)).map(|(_, id)| NodeId(id)).collect();
    if found.is_empty() {
        let names = topology.nodes().iter().map(|node| node.name.as_str());
        return Err(at(place, unknown("node", pattern, names)));
    }
    Ok(found)
}

/// `*` stands for anything, also for nothing.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((begin, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(name) = name.strip_prefix(begin) else { return false };
    name.char_indices().map(|(at, _)| at).chain([name.len()]).any(|at| matches(rest, &name[at..]))
}

fn change_node(
    entry: &Spanned<Node>,
    mtu: u32,
    is_host: bool,
    config: &mut NodeConfig,
) -> Result<(), Mistake> {
    let node = entry.get_ref();
    for queue in &mut config.queues {
        if let Some(limit) = &node.queue {
            queue.limit_bytes = holds_a_packet(limit, mtu)?;
        }
        if let Some(ecn) = &node.ecn {
            marks_by_length(ecn, queue)?;
            queue.ecn_threshold_bytes = Some(ecn.get_ref().0);
        }
        sound(entry, queue)?;
    }
    if let Some(memory) = buffer(&node.port_buffer, &node.shared_buffer, node.alpha.as_ref(), mtu)? {
        config.buffer = memory;
    }
    // Machines on a switch send for nothing, as everywhere.
    let sides = if is_host {
        &mut [&mut config.sends, &mut config.receives][..]
    } else {
        &mut [&mut config.receives]
    };
    for side in sides {
        if let Some(packet) = node.packet_cost {
            side.packet = Time(packet.0);
        }
        if let Some(byte) = node.byte_cost {
            side.byte = Time(byte.0);
        }
        if node.cores.is_some() {
            side.cores = cores(&node.cores)?;
        }
    }
    Ok(())
}

/// A threshold of marks takes the place of another one, and of no drops.
fn marks_by_length(ecn: &Spanned<fanin_units::Size>, queue: &QueueConfig) -> Result<(), Mistake> {
    match queue.drops_unmarkable {
        true => Err(at(
            ecn,
            "`selective_dropping` has thresholds of its own, by which it also drops; leave `ecn` out",
        )),
        false => Ok(()),
    }
}

/// Thresholds that a queue reaches.
fn sound(entry: &Spanned<impl Sized>, queue: &QueueConfig) -> Result<(), Mistake> {
    let thresholds = queue.drop_thresholds_bytes.iter().chain([&queue.ecn_threshold_bytes]).flatten();
    match thresholds.max().filter(|threshold| **threshold >= queue.limit_bytes) {
        Some(threshold) => {
            let limit = queue.limit_bytes;
            let message = format!(
                "a queue of {limit} bytes never reaches a threshold of {threshold}; give both, `queue` and `ecn`"
            );
            Err(at(entry, message))
        }
        None => Ok(()),
    }
}

fn pair([a, b]: [NodeId; 2]) -> [NodeId; 2] {
    [a.min(b), a.max(b)]
}

fn ends(link: &Link, topology: &Topology) -> Result<[Vec<NodeId>; 2], Mistake> {
    let [a, b] = link.link.get_ref();
    Ok([matching(topology, a, &link.link)?, matching(topology, b, &link.link)?])
}

/// The links that an entry means: at least one.
fn joined(link: &Link, topology: &Topology) -> Result<Vec<LinkId>, Mistake> {
    let ends = ends(link, topology)?.map(|nodes| {
        let mut is_end = vec![false; topology.nodes().len()];
        nodes.into_iter().for_each(|node| is_end[node.0 as usize] = true);
        is_end
    });
    let is_meant = |[a, b]: [NodeId; 2]| {
        let is = |end: usize, node: NodeId| ends[end][node.0 as usize];
        (is(0, a) && is(1, b)) || (is(0, b) && is(1, a))
    };
    let links = topology.links().iter().zip(0..);
    let found: Vec<LinkId> =
        links.filter(|(link, _)| is_meant(link.ends)).map(|(_, id)| LinkId(id)).collect();
    if found.is_empty() {
        let [a, b] = link.link.get_ref();
        return Err(at(&link.link, format!("there is no link between {a} and {b}")));
    }
    Ok(found)
}

/// The same, after those have been made that were missing.
fn join(
    entry: &Spanned<Link>,
    parts: &Parts,
    topology: &mut Topology,
    known: &mut BTreeMap<[NodeId; 2], LinkId>,
) -> Result<Vec<LinkId>, Mistake> {
    let place = &entry.get_ref().link;
    let [these, those] = ends(entry.get_ref(), topology)?;
    if these.len().saturating_mul(those.len()) > PAIRS_MAX {
        return Err(at(place, format!("more than {PAIRS_MAX} pairs of nodes")));
    }
    let mut links = Vec::new();
    for a in &these {
        for b in those.iter().filter(|b| *b != a) {
            links.push(*known.entry(pair([*a, *b])).or_insert_with(|| {
                let to_host = [a, b].iter().any(|end| topology.layer(**end).is_none());
                topology.add_link(*a, *b, if to_host { parts.edge } else { parts.core })
            }));
        }
    }
    if links.is_empty() { Err(at(place, "a link joins two nodes")) } else { Ok(links) }
}

fn change_link(entry: &Spanned<Link>, mtu: u32, id: LinkId, topology: &mut Topology) -> Result<(), Mistake> {
    let link = entry.get_ref();
    let crate::net::Link { ends, config } = topology.links()[id.0 as usize];
    let config = LinkConfig {
        rate_bps: link.rate.map_or(config.rate_bps, |rate| rate.0),
        delay: link.delay.map_or(config.delay, |delay| delay.0),
        ..config
    };
    topology.set_link(id, config);
    if link.queue.is_none() && link.ecn.is_none() {
        return Ok(());
    }
    for (node, port) in ends.into_iter().zip(id.ports()) {
        let mut queues = topology.port_queues.get(&port).copied().unwrap_or(topology.get(node).config.queues);
        for queue in &mut queues {
            if let Some(limit) = &link.queue {
                queue.limit_bytes = holds_a_packet(limit, mtu)?;
            }
            if let Some(ecn) = &link.ecn {
                marks_by_length(ecn, queue)?;
                queue.ecn_threshold_bytes = Some(ecn.get_ref().0);
            }
            sound(entry, queue)?;
        }
        topology.set_port_queues(port, queues);
    }
    Ok(())
}

/// Every host reaches every other, over switches.
fn connected(file: &File, topology: &Topology) -> Result<(), Mistake> {
    let place = &file.network.topology;
    let Some(first) = topology.hosts().next() else {
        let message =
            "an own topology is made of [[node]]s with a `kind` and of [[link]]s, and this one has no host";
        return Err(at(place, message));
    };
    let mut adjacent = vec![Vec::new(); topology.nodes().len()];
    for [a, b] in topology.links().iter().map(|link| link.ends) {
        adjacent[a.0 as usize].push(b);
        adjacent[b.0 as usize].push(a);
    }
    let mut reached = vec![false; topology.nodes().len()];
    reached[first.0 as usize] = true;
    let mut next = VecDeque::from([first]);
    while let Some(node) = next.pop_front() {
        for other in &adjacent[node.0 as usize] {
            if !std::mem::replace(&mut reached[other.0 as usize], true) && topology.layer(*other).is_some() {
                next.push_back(*other);
            }
        }
    }
    match topology.hosts().find(|host| !reached[host.0 as usize]) {
        Some(lost) => {
            let name = |node: NodeId| &topology.get(node).name;
            Err(at(place, format!("there is no way from {} to {}", name(first), name(lost))))
        }
        None => Ok(()),
    }
}
