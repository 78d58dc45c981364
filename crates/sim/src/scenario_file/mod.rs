//! Scenario files: TOML that says what the network is, which jobs run on it, and what goes wrong.
//! `examples/sim` has some.
//!
//! A file is read whole and checked whole before anything runs. An unknown name is answered with
//! the nearest one, and an impossible value (a rate, a window, a fan-in) with its line.

mod beside;
mod entry;
mod error;
mod flows;
mod jobs;
mod lookup;
mod network;
mod parameter_server;
mod parts;
mod schema;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::time::Duration;

use fanin_protocol::atp::WAYS_MAX;
use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeTable, Deserializer};

pub use entry::{Entry, Kind, keys};
pub use error::{FileError, Mistake, at, unknown};
pub(crate) use schema::{Hosts, TransportTable};

use crate::net::{LinkId, Multipath, NodeId, Topology};
use crate::systems;
use crate::workload::{
    Fault, FaultPlan, JobPlan, LossPlan, Scenario, SwitchPlan, TCP_KINDS, Target, TimedLayer, Which,
};
use beside::Texts;
use entry::{OwnTable, own_tables};
use lookup::{link, node};
use schema::{FaultKind, File, LayersFile, RoutingName, SwitchTable};

/// Intervals of a time series: beyond this nobody looks at them, and they fill the memory.
const INTERVALS_MAX: u128 = 1_000_000;

/// The time for which a job may stand still unless the file says otherwise. It is a part of the
/// run, or so many of its timeouts, which grow while nothing comes.
const STALL_SHARE: u32 = 4;
const STALL_TIMEOUTS: u32 = 4;
const STALL_MAX: Duration = Duration::from_secs(2);

/// The tables that describe a network.
const OF_NETWORK: [&str; 5] = ["network", "switch", "queue", "node", "link"];

/// Reads and checks a scenario. `name` is the file's, for messages and for what lies beside it.
///
/// # Errors
/// The first mistake, with its place.
pub fn parse(name: &str, text: &str) -> Result<Scenario, FileError> {
    parse_with(&systems::ALL, name, text)
}

/// [`parse`], with other systems than this crate's.
///
/// # Errors
/// The first mistake, with its place.
pub fn parse_with(kinds: &[Kind], name: &str, text: &str) -> Result<Scenario, FileError> {
    let mut texts = Texts::new(name, text);
    read(kinds, text, &mut texts).map_err(|mistake| texts.locate(mistake))
}

/// Reads a file of another purpose that describes a network as scenarios do: `[network]`,
/// `[switch]`, `[[queue]]`, `[[node]]` and `[[link]]`. Its other tables are read as `T`, and
/// `resolve` says what they come to on that network.
///
/// # Errors
/// The first mistake, with its place.
pub fn parse_on_network<T: serde::de::DeserializeOwned, R>(
    name: &str,
    text: &str,
    resolve: impl FnOnce(&Topology, T) -> Result<R, Mistake>,
) -> Result<R, FileError> {
    let of_toml = |error| Mistake::of_toml(&error);
    let mut texts = Texts::new(name, text);
    let read = || {
        let mut document = DeTable::parse(text).map_err(of_toml)?;
        let table = document.get_mut();
        let mut others = DeTable::new();
        let keys: Vec<_> =
            table.keys().filter(|key| !OF_NETWORK.contains(&key.get_ref().as_ref())).cloned().collect();
        for key in keys {
            if let Some(value) = table.remove(&key) {
                others.insert(key, value);
            }
        }
        let mut file = File::deserialize(Deserializer::from(document)).map_err(of_toml)?;
        texts.read_beside(&mut file)?;
        let topology = network::resolve(&file)?;
        let others = Deserializer::from(Spanned::new(0..text.len(), others));
        resolve(&topology, T::deserialize(others).map_err(of_toml)?)
    };
    read().map_err(|mistake| texts.locate(mistake))
}

/// Reads a file of another purpose that describes no network of the simulator's. It is read as `T`,
/// and `resolve` says what that comes to.
///
/// # Errors
/// The first mistake, with its place.
pub fn parse_file<T: serde::de::DeserializeOwned, R>(
    name: &str,
    text: &str,
    resolve: impl FnOnce(T) -> Result<R, Mistake>,
) -> Result<R, FileError> {
    let read = toml::from_str(text).map_err(|error| Mistake::of_toml(&error));
    read.and_then(resolve).map_err(|mistake| Texts::new(name, text).locate(mistake))
}

/// Reads a file of `[[layer]]` tables, which a job may name as its `layers`: in the order of the
/// forward pass. `name` is the file's.
///
/// # Errors
/// The first mistake, with its place.
pub fn parse_layers(name: &str, text: &str) -> Result<Vec<TimedLayer>, FileError> {
    parse_file(name, text, |file: LayersFile| {
        jobs::timed(&file.layer, 1.0).map_err(|message| Mistake { span: None, message })
    })
}

/// A scenario as a table, with the nodes and links of the file that it may name in place of that
/// name: one file says all.
///
/// # Errors
/// The mistake that keeps it from being read; [`parse`] says whether it can be played.
pub fn whole(name: &str, text: &str) -> Result<toml::Table, FileError> {
    let mut texts = Texts::new(name, text);
    texts.merged().map_err(|mistake| texts.locate(mistake))
}

fn read(kinds: &[Kind], text: &str, texts: &mut Texts<'_>) -> Result<Scenario, Mistake> {
    let of_toml = |error| Mistake::of_toml(&error);
    let mut document = DeTable::parse(text).map_err(of_toml)?;
    let tables = own_tables(document.get_mut(), kinds)?;
    let mut file = File::deserialize(Deserializer::from(document)).map_err(of_toml)?;
    texts.read_beside(&mut file)?;
    resolve(&file, &tables)
}

/// `[switch]` as jobs see it. Mistakes in it are told by [`resolve`].
fn switch_plan(file: &File) -> SwitchPlan {
    let SwitchTable { aggregators, ways, stale, .. } = &file.switch;
    SwitchPlan { aggregators: *aggregators.get_ref(), ways: *ways.get_ref(), stale: stale.0 }
}

fn resolve(file: &File, tables: &[OwnTable<'_>]) -> Result<Scenario, Mistake> {
    let topology = network::resolve(file)?;
    if !(1..=WAYS_MAX).contains(file.switch.ways.get_ref()) {
        return Err(at(
            &file.switch.ways,
            format!("a fragment has 1 to {WAYS_MAX} aggregators to choose from"),
        ));
    }
    let (until, interval) = (file.until.get_ref().0, file.interval.get_ref().0);
    if until.is_zero() {
        return Err(at(&file.until, "`until` must be later than the start"));
    }
    if interval.is_zero() || until.as_nanos() / interval.as_nanos() > INTERVALS_MAX {
        let message =
            format!("`interval` must not be zero, and fit into `until` at most {INTERVALS_MAX} times");
        return Err(at(&file.interval, message));
    }
    let jobs = jobs::resolve(file, tables, &topology)?;
    let parameter_servers = parameter_server::resolve(file, &topology)?;
    let background = flows::resolve(file, &topology)?;
    let mut losses = Vec::new();
    for loss in &file.loss {
        losses.extend(losses_of(&topology, &jobs, loss)?);
    }
    let faults: Vec<FaultPlan> =
        file.fault.iter().map(|fault| fault_of(&topology, &jobs, fault)).collect::<Result<_, _>>()?;
    someone_takes_over(file, &topology, &jobs, &faults)?;
    // An outage is no stall: what is away comes back, or is taken over, perhaps one after the other.
    let outage = file.fault.iter().filter_map(|fault| fault.get_ref().down).map(|down| down.0).max();
    let taken_over = faults.iter().map(|plan| match plan.fault {
        Fault::ServiceDies(node) => {
            with_service(&jobs, node).map(|job| job.system.services().1).max().unwrap_or_default()
        }
        _ => Duration::ZERO,
    });
    let outage = outage.unwrap_or_default() + taken_over.sum::<Duration>();
    let timeout = jobs.iter().map(|job| job.system.timeout()).max();
    let stall =
        (until / STALL_SHARE).min(STALL_MAX).max(timeout.unwrap_or_default() * STALL_TIMEOUTS) + outage;
    Ok(Scenario {
        title: file.title.clone(),
        until,
        interval,
        warm_up: file.warm_up.0,
        stall: file.stall.map_or(stall, |stall| stall.0),
        topology,
        multipath: match file.network.routing {
            RoutingName::Flow => Multipath::PerFlow,
            RoutingName::Packet => Multipath::PerPacket,
        },
        switch: switch_plan(file),
        jobs,
        parameter_servers,
        background,
        losses,
        faults,
    })
}

fn losses_of(
    topology: &Topology,
    jobs: &[JobPlan],
    loss: &Spanned<schema::Loss>,
) -> Result<Vec<LossPlan>, Mistake> {
    let plan = loss.get_ref();
    let links: Vec<LinkId> = match &plan.link {
        Some(ends) => vec![link(topology, ends)?],
        None => (0..topology.links().len() as u32).map(LinkId).collect(),
    };
    let from = plan.from.as_ref().map(|name| node(topology, name)).transpose()?;
    let burst = match (&plan.burst_begin, &plan.burst_end) {
        (Some(begin), Some(end)) => Some((begin.get_ref().0, end.get_ref().0)),
        (None, None) => None,
        (Some(one), None) | (None, Some(one)) => {
            return Err(at(one, "bursts need both `burst_begin` and `burst_end`"));
        }
    };
    let share = |share: Option<fanin_units::Share>| share.map_or(0.0, |share| share.0);
    if let (Some(between), None) = (&plan.loss_between, &burst) {
        return Err(at(between, "`loss_between` needs bursts: `burst_begin` and `burst_end`"));
    }
    let target = target(jobs, plan)?;
    if let (Some(_), None) = (plan.reordering, plan.held_back) {
        return Err(at(loss, "`reordering` needs `held_back`: how long a packet waits at most"));
    }
    let mut plans = Vec::new();
    for link in links {
        for (end, port) in topology.links()[link.0 as usize].ends.into_iter().zip(link.ports()) {
            if from.is_none_or(|from| from == end) {
                plans.push(LossPlan {
                    port,
                    loss: share(plan.loss.as_ref().map(|loss| *loss.get_ref())),
                    loss_between: share(plan.loss_between.as_ref().map(|loss| *loss.get_ref())),
                    burst,
                    target: target.clone(),
                    duplication: share(plan.duplication),
                    reordering: share(plan.reordering),
                    held_back: plan.held_back.map_or(Duration::ZERO, |time| time.0),
                });
            }
        }
    }
    match &plan.from {
        Some(from) if plans.is_empty() => Err(at(from, "this is no end of that link")),
        _ => Ok(plans),
    }
}

/// The packets that an entry names, if it does.
fn target(jobs: &[JobPlan], plan: &schema::Loss) -> Result<Option<Target>, Mistake> {
    if let Some(only) = &plan.only {
        let of_systems = jobs.iter().flat_map(|job| job.system.packet_kinds());
        let known: BTreeSet<&str> = TCP_KINDS.iter().chain(of_systems).copied().collect();
        if !known.contains(only.get_ref().as_str()) {
            let message = error::unknown("kind of packet", only.get_ref(), known.into_iter());
            return Err(at(only, format!("{message} (those of the jobs' systems, and of TCP)")));
        }
    }
    let which = match (&plan.nth, &plan.every) {
        (Some(nth), Some(_)) => return Err(at(nth, "either `nth` or `every`")),
        (Some(nth), None) if nth.get_ref().contains(&0) => return Err(at(nth, "the first packet is 1")),
        (Some(nth), None) => Which::Nth(nth.get_ref().iter().map(|nth| nth - 1).collect()),
        (None, Some(every)) if *every.get_ref() == 0 => {
            return Err(at(every, "`every` is at least 1, which is all"));
        }
        (None, Some(every)) => Which::Every(*every.get_ref()),
        (None, None) if plan.only.is_none() => return Ok(None),
        (None, None) => Which::All,
    };
    if let Some(chance) = plan.loss.as_ref().or(plan.burst_begin.as_ref()) {
        return Err(at(chance, "losses are either chances or named packets (`only`, `nth`, `every`)"));
    }
    Ok(Some(Target { kind: plan.only.as_ref().map(|kind| kind.get_ref().clone()), which }))
}

fn fault_of(
    topology: &Topology,
    jobs: &[JobPlan],
    fault: &Spanned<schema::Fault>,
) -> Result<FaultPlan, Mistake> {
    let plan = fault.get_ref();
    let kind = *plan.kind.get_ref();
    let needs = |key: &str| at(&plan.kind, format!("this kind of fault needs `{key}`"));
    let down = || plan.down.map(|time| time.0).ok_or_else(|| needs("down"));
    let job = || {
        let name = plan.job.as_ref().ok_or_else(|| needs("job"))?;
        let found = jobs.iter().position(|job| job.name == *name.get_ref());
        found.ok_or_else(|| {
            at(name, error::unknown("job", name.get_ref(), jobs.iter().map(|job| job.name.as_str())))
        })
    };
    let node_of = || node(topology, plan.node.as_ref().ok_or_else(|| needs("node"))?);
    let has_server = |job: usize| {
        if jobs[job].system.server().is_some() {
            Ok(job)
        } else {
            Err(at(&plan.kind, "this job has no server of its own"))
        }
    };
    let fault = match kind {
        FaultKind::LinkFails => {
            Fault::LinkFails(link(topology, plan.link.as_ref().ok_or_else(|| needs("link"))?)?, down()?)
        }
        FaultKind::NodeFails => Fault::NodeFails(node_of()?, down()?),
        FaultKind::SwitchForgets => {
            let switch = node_of()?;
            if !topology.programmable().any(|node| node == switch) {
                return Err(at(&plan.kind, "only a programmable switch has something to forget"));
            }
            Fault::SwitchForgets(switch)
        }
        FaultKind::ServerRestarts => Fault::ServerRestarts(has_server(job()?)?, down()?),
        FaultKind::WorkerRespawns => {
            let job = has_server(job()?)?;
            let rank = plan.rank.as_ref().ok_or_else(|| needs("rank"))?;
            let workers = jobs[job].workers.len();
            let found = u16::try_from(*rank.get_ref()).ok().filter(|rank| usize::from(*rank) < workers);
            let rank = found.ok_or_else(|| at(rank, format!("this job has ranks 0 to {}", workers - 1)))?;
            Fault::WorkerRespawns(job, rank, down()?)
        }
        FaultKind::ServiceDies => {
            let host = node_of()?;
            if with_service(jobs, host).next().is_none() {
                let services = jobs.iter().flat_map(|job| job.system.services().0);
                let names: BTreeSet<&str> = services.map(|node| topology.get(*node).name.as_str()).collect();
                let there = match names.len() {
                    0 => "no job has any: only those of `byteps` are, and not with `asynchronous`".into(),
                    _ => format!("those are on {}", Vec::from_iter(names).join(", ")),
                };
                let message = format!(
                    "no service is on {} that another one takes over: {there}",
                    topology.get(host).name
                );
                return Err(at(plan.node.as_ref().ok_or_else(|| needs("node"))?, message));
            }
            Fault::ServiceDies(host)
        }
        FaultKind::JobDies => Fault::JobDies(job()?),
    };
    Ok(FaultPlan { at: plan.at.0, fault })
}

/// The jobs with a service on a host that others take over.
fn with_service(jobs: &[JobPlan], host: NodeId) -> impl Iterator<Item = &JobPlan> {
    jobs.iter().filter(move |job| job.system.services().0.contains(&host))
}

/// Checks that no job loses its last service.
fn someone_takes_over(
    file: &File,
    topology: &Topology,
    jobs: &[JobPlan],
    faults: &[FaultPlan],
) -> Result<(), Mistake> {
    let mut in_order: Vec<_> = faults.iter().zip(&file.fault).collect();
    in_order.sort_by_key(|(plan, _)| plan.at);
    let mut dead = BTreeSet::new();
    for (plan, place) in in_order {
        let Fault::ServiceDies(host) = plan.fault else { continue };
        dead.insert(host);
        let is_last = |job: &&JobPlan| job.system.services().0.iter().all(|service| dead.contains(service));
        if let Some(job) = with_service(jobs, host).find(is_last) {
            let (host, name) = (&topology.get(host).name, &job.name);
            let message = format!(
                "the service on {host} is the last of {name} that lives, and nobody could take over: leave this fault out, or give {name} one more host in `services`"
            );
            return Err(at(place, message));
        }
    }
    Ok(())
}
