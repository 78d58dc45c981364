//! `[job.goat]`.

use std::sync::Arc;

use fanin_protocol::goat::SUB_MODELS_MAX;
use fanin_wire::{PLANNED_WORKERS_MAX, PlannedDirections};
use serde::Deserialize;
use toml::Spanned;

use super::super::System;
use super::super::aggregation::{OverflowName, ScalingName, fragments, server, window, window_max};
use super::super::keys::timeout;
use super::Goat;
use super::planners::{Asked, Nodes, PLANNERS, Planner, nearest};
use crate::net::{NodeId, Topology};
use crate::scenario_file::{Entry, Kind, Mistake, at, keys, unknown};
use fanin_units::Time;

/// The system, with this crate's planners.
pub const KIND: Kind = Kind { name: "goat", keys: keys::<Keys>, resolve: |entry| resolve(entry, &PLANNERS) };

/// The word for the server among the names of switches.
const SERVER: &str = "server";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Keys {
    /// The parameter server's host; the last that no job before has, unless given.
    server: Option<Spanned<String>>,
    /// Elements of a packet; the most that the MTU takes unless given.
    elements: Option<Spanned<u16>>,
    /// Packets that a worker has under way at most; a whole model unless given.
    window: Option<Spanned<u16>>,
    /// Into how many parts the model is cut.
    sub_models: Option<Spanned<usize>>,
    /// For each of them who sums it ..
    nodes: Option<Spanned<Vec<Names>>>,
    /// .. or who decides that.
    planner: Option<Spanned<String>>,
    scaling: ScalingName,
    overflow: OverflowName,
    congestion_control: bool,
    /// Shortest wait for an answer before a packet is sent again.
    timeout: Option<Spanned<Time>>,
}

impl Default for Keys {
    fn default() -> Self {
        Self {
            server: None,
            elements: None,
            window: None,
            sub_models: None,
            nodes: None,
            planner: None,
            scaling: ScalingName::Static,
            overflow: OverflowName::Reactive,
            congestion_control: true,
            timeout: None,
        }
    }
}

/// A switch, or the server, for all workers, or one for each.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Names {
    OfAll(String),
    OfEach(Vec<String>),
}

/// GOAT of a file that may name other planners, besides this crate's.
///
/// # Errors
/// What cannot be.
pub fn resolve_with(entry: &mut Entry<'_>, planners: &[Planner]) -> Result<Arc<dyn System>, Mistake> {
    resolve(entry, &[planners, &PLANNERS].concat())
}

fn resolve(entry: &mut Entry<'_>, planners: &[Planner]) -> Result<Arc<dyn System>, Mistake> {
    let keys: Keys = entry.table()?;
    entry.workers_between(1, PLANNED_WORKERS_MAX)?;
    let server = server(entry, keys.server.as_ref())?;
    let elements = fragments::<PlannedDirections>().of(entry, keys.elements.as_ref())?;
    let packets = entry.workload()?.packets(elements.into());
    let packets =
        u32::try_from(packets).map_err(|_| entry.at_system("a model has fewer than 2^32 packets"))?;
    let whole = u16::try_from(packets).unwrap_or(u16::MAX).min(window_max(elements));
    let window = match &keys.window {
        Some(given) => window(elements, Some(given))?.min(whole),
        None => whole,
    };
    let sub_models = sub_models(entry, &keys, packets)?;
    let (before, sharing) = entry.among(|name, _| name == KIND.name);
    let share = entry.switch().aggregators / sharing as u32;
    let asked = Asked {
        topology: entry.topology(),
        workers: entry.workers(),
        server,
        sub_models: &sub_models,
        packet_bytes: 4 * u64::from(elements),
        aggregators: share,
    };
    let nodes = match (&keys.nodes, &keys.planner) {
        (Some(_), Some(planner)) => return Err(at(planner, "either `nodes` or a `planner`")),
        (Some(given), None) => given_nodes(&asked, given)?,
        (None, Some(name)) => {
            let planner = planners.iter().find(|planner| planner.name == name.get_ref());
            let planner = planner.ok_or_else(|| {
                at(name, unknown("planner", name.get_ref(), planners.iter().map(|planner| planner.name)))
            })?;
            (planner.plan)(&asked).map_err(|message| at(name, message))?
        }
        (None, None) => nearest(&asked),
    };
    if let Some((switch, needs)) = asked.too_full(&nodes) {
        let (name, has) = (&asked.topology.get(switch).name, asked.aggregators);
        let message = format!(
            "{name} has {has} aggregators for this job, and its sub-models need {needs}; give it fewer, or raise `aggregators`"
        );
        return Err(match (&keys.nodes, &keys.planner) {
            (Some(given), _) => at(given, message),
            (None, Some(planner)) => at(planner, message),
            (None, None) => entry.at_system(message),
        });
    }
    Ok(Arc::new(Goat {
        server,
        elements,
        window,
        sub_models,
        nodes,
        onward: Vec::new(),
        first_aggregator: share * before as u32,
        scaling: keys.scaling.into(),
        overflow: keys.overflow.into(),
        congestion_control: keys.congestion_control,
        timeout: timeout(keys.timeout.as_ref())?,
    }))
}

/// Packets of each part: as many parts as said, or as there are switches that may sum, as equal as
/// can be.
fn sub_models(entry: &Entry<'_>, keys: &Keys, packets: u32) -> Result<Vec<u32>, Mistake> {
    let most = SUB_MODELS_MAX.min(packets as usize);
    let count = match (&keys.sub_models, &keys.nodes) {
        (Some(given), _) if !(1..=most).contains(given.get_ref()) => {
            return Err(at(given, format!("a model of {packets} packets has 1 to {most} parts")));
        }
        (Some(given), Some(nodes)) if *given.get_ref() != nodes.get_ref().len() => {
            let (said, is) = (nodes.get_ref().len(), given.get_ref());
            return Err(at(nodes, format!("`nodes` says who sums {said} sub-models; there are {is}")));
        }
        (Some(given), _) => *given.get_ref(),
        (None, Some(nodes)) if !(1..=most).contains(&nodes.get_ref().len()) => {
            return Err(at(nodes, format!("a model of {packets} packets has 1 to {most} parts")));
        }
        (None, Some(nodes)) => nodes.get_ref().len(),
        (None, None) => entry.topology().programmable().count().clamp(1, most),
    };
    let (packets, count) = (u64::from(packets), count as u64);
    let end = |part: u64| packets * part / count;
    Ok((0..count).map(|part| (end(part + 1) - end(part)) as u32).collect())
}

/// The switches that the file names, by rank and part.
fn given_nodes(asked: &Asked<'_>, given: &Spanned<Vec<Names>>) -> Result<Nodes, Mistake> {
    let workers = asked.workers.len();
    let mut nodes = vec![Vec::new(); workers];
    for names in given.get_ref() {
        if let Names::OfEach(names) = names
            && names.len() != workers
        {
            let message =
                format!("a sub-model has one node for all workers, or one for each of the {workers}");
            return Err(at(given, message));
        }
        for (rank, assigned) in nodes.iter_mut().enumerate() {
            let name = match names {
                Names::OfAll(name) => name,
                Names::OfEach(names) => &names[rank],
            };
            assigned.push(if name == SERVER { None } else { Some(switch(asked.topology, name, given)?) });
        }
    }
    Ok(nodes)
}

fn switch(topology: &Topology, name: &str, given: &Spanned<Vec<Names>>) -> Result<NodeId, Mistake> {
    let found = topology.node(name).filter(|node| topology.programmable().any(|other| other == *node));
    found.ok_or_else(|| {
        at(given, format!("`{name}` is no programmable switch of this network, nor \"{SERVER}\""))
    })
}
