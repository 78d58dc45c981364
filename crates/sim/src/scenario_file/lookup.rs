//! Values that stand in several tables: hosts, nodes and links by their names, and classes.

use std::collections::BTreeSet;

use toml::Spanned;

use super::error::{Mistake, at, unknown};
use super::schema::Hosts;
use crate::net::{Class, DROP_CLASSES, LinkId, NodeId, PRIORITIES, Topology};

pub(super) fn host(topology: &Topology, name: &str, place: &Spanned<impl Sized>) -> Result<NodeId, Mistake> {
    let found = topology.hosts().find(|node| topology.get(*node).name == name);
    found.ok_or_else(|| {
        let known = topology.hosts().map(|node| topology.get(node).name.as_str());
        at(place, unknown("host", name, known))
    })
}

/// The named hosts, or so many of `among`, evenly spread.
pub(super) fn hosts(
    topology: &Topology,
    among: &[NodeId],
    given: &Spanned<Hosts>,
) -> Result<Vec<NodeId>, Mistake> {
    let found: Vec<NodeId> = match given.get_ref() {
        Hosts::Count(count) if !(1..=among.len()).contains(count) => {
            return Err(at(given, format!("from 1 to {} hosts", among.len())));
        }
        Hosts::Count(count) => (0..*count).map(|nth| among[nth * among.len() / count]).collect(),
        Hosts::Names(names) => {
            names.iter().map(|name| host(topology, name, given)).collect::<Result<_, _>>()?
        }
    };
    if found.is_empty() || found.iter().collect::<BTreeSet<_>>().len() < found.len() {
        return Err(at(given, "at least one host, and each once"));
    }
    Ok(found)
}

pub(super) fn node(topology: &Topology, name: &Spanned<String>) -> Result<NodeId, Mistake> {
    topology.node(name.get_ref()).ok_or_else(|| {
        let known = topology.nodes().iter().map(|node| node.name.as_str());
        at(name, unknown("node", name.get_ref(), known))
    })
}

pub(super) fn link(topology: &Topology, ends: &Spanned<[String; 2]>) -> Result<LinkId, Mistake> {
    let [a, b] = ends.get_ref();
    let [a, b] = [a, b].map(|end| node(topology, &Spanned::new(ends.span(), end.clone())));
    topology.link_between(a?, b?).ok_or_else(|| {
        let [a, b] = ends.get_ref();
        at(ends, format!("there is no link between {a} and {b}"))
    })
}

/// The number of a priority or a drop class.
pub(super) fn number_below(
    value: &Option<Spanned<u8>>,
    end: usize,
    key: &str,
) -> Result<Option<u8>, Mistake> {
    match value {
        Some(place) if usize::from(*place.get_ref()) >= end => {
            Err(at(place, format!("`{key}` is from 0 to {}", end - 1)))
        }
        value => Ok(value.as_ref().map(|value| *value.get_ref())),
    }
}

pub(super) fn class(
    priority: &Option<Spanned<u8>>,
    drop_class: &Option<Spanned<u8>>,
    sprayed: bool,
) -> Result<Class, Mistake> {
    Ok(Class {
        priority: number_below(priority, PRIORITIES, "priority")?.unwrap_or(0),
        drop_class: number_below(drop_class, DROP_CLASSES, "drop_class")?.unwrap_or(0),
        unimportant: false,
        sprayed,
    })
}
