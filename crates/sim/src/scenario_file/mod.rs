//! Scenario files: TOML that says what the network is, which jobs run on it, and what goes wrong. `examples/sim` has some.
//!
//! A file is read whole and checked whole before anything runs: a name that is none is answered with the nearest one, and
//! whatever cannot be (a rate, a window, a fan-in) with the line that it stands in.

mod error;
mod jobs;
mod schema;
#[cfg(test)]
mod tests;
mod unit;

use std::ops::Range;
use std::time::Duration;

use toml::Spanned;

pub use error::FileError;
pub use schema::System;

use crate::net::{
    Buffer, LinkConfig, LinkId, Multipath, NodeConfig, NodeId, Parts, Programmable, QueueConfig, Topology,
    TopologyError,
};
use crate::workload::{BackgroundPlan, Fault, FaultPlan, LossPlan, Scenario, SwitchPlan};
use schema::{
    Background, BackgroundKind, FaultKind, File, Network, RoutingName, SwitchTable, TopologyName,
    WhichSwitches,
};

/// Intervals of a time series: beyond this nobody looks at them, and they fill the memory.
const INTERVALS_MAX: u128 = 1_000_000;

/// Reads and checks a scenario. `name` is the file's, for messages.
///
/// # Errors
/// The first mistake, with its place.
pub fn parse(name: &str, text: &str) -> Result<Scenario, FileError> {
    let file: File = toml::from_str(text).map_err(|error| FileError::of_toml(name, text, &error))?;
    resolve(file).map_err(|mistake| FileError::new(name, text, mistake.span, mistake.message))
}

/// Something that cannot be, and where it stands.
struct Mistake {
    span: Option<Range<usize>>,
    message: String,
}

/// A default stands nowhere.
fn at<T>(place: &Spanned<T>, message: impl std::fmt::Display) -> Mistake {
    let span = Some(place.span()).filter(|span| !span.is_empty());
    Mistake { span, message: message.to_string() }
}

fn resolve(file: File) -> Result<Scenario, Mistake> {
    let topology = topology(&file.network, &file.switch)?;
    let (until, interval) = (file.until.get_ref().0, file.interval.get_ref().0);
    if until.is_zero() {
        return Err(at(&file.until, "`until` must be later than the start"));
    }
    if interval.is_zero() || until.as_nanos() / interval.as_nanos() > INTERVALS_MAX {
        let message =
            format!("`interval` must not be zero, and fit into `until` at most {INTERVALS_MAX} times");
        return Err(at(&file.interval, message));
    }
    let jobs = jobs::resolve(&file, &topology)?;
    let background =
        file.background.iter().map(|flow| background(&topology, flow)).collect::<Result<_, _>>()?;
    let mut losses = Vec::new();
    for loss in &file.loss {
        losses.extend(losses_of(&topology, loss)?);
    }
    let faults =
        file.fault.iter().map(|fault| fault_of(&topology, &jobs, fault)).collect::<Result<_, _>>()?;
    Ok(Scenario {
        title: file.title,
        until,
        interval,
        warm_up: file.warm_up.0,
        stall: file.stall.0,
        topology,
        multipath: match file.network.routing {
            RoutingName::Flow => Multipath::PerFlow,
            RoutingName::Packet => Multipath::PerPacket,
        },
        switch: SwitchPlan { aggregators: *file.switch.aggregators.get_ref(), stale: file.switch.stale.0 },
        jobs,
        background,
        losses,
        faults,
    })
}

fn topology(network: &Network, switch: &SwitchTable) -> Result<Topology, Mistake> {
    let link = |rate: u64, delay: Duration| LinkConfig::new(rate, delay).with_mtu(*network.mtu.get_ref());
    let core_rate = network.core_rate.as_ref().unwrap_or(&network.rate);
    let mut queue = QueueConfig::tail_drop(network.queue.get_ref().0);
    if network.queue.get_ref().0 < u64::from(*network.mtu.get_ref()) {
        return Err(at(
            &network.queue,
            "a queue that holds not even one packet: make it longer than the MTU",
        ));
    }
    if let Some(threshold) = &network.ecn {
        if threshold.get_ref().0 >= network.queue.get_ref().0 {
            return Err(at(threshold, "`ecn` marks nothing when it is not below `queue`"));
        }
        queue = queue.with_ecn(threshold.get_ref().0);
    }
    let mut node = NodeConfig::new(queue);
    node.processing = switch.processing.0;
    if let Some(shared) = network.shared_buffer {
        node.buffer = Buffer::Shared { bytes: shared.0, alpha: network.alpha };
    }
    let delay = network.delay.0;
    let mut host = NodeConfig::host();
    for nic in host.queues.iter_mut().filter(|_| network.nic_ecn) {
        nic.ecn_threshold_bytes = queue.ecn_threshold_bytes;
    }
    let parts = Parts {
        host,
        switch: node,
        edge: link(network.rate.get_ref().0, delay),
        core: link(core_rate.get_ref().0, network.core_delay.map_or(delay, |delay| delay.0)),
    };
    let name = *network.topology.get_ref();
    let given = [
        (
            "hosts",
            &network.hosts,
            [TopologyName::Rack, TopologyName::Dumbbell, TopologyName::LeafSpine].contains(&name),
        ),
        ("leaves", &network.leaves, name == TopologyName::LeafSpine),
        ("spines", &network.spines, name == TopologyName::LeafSpine),
        ("k", &network.k, name == TopologyName::FatTree),
    ];
    for (key, value, means) in given {
        match value {
            Some(value) if !means => {
                return Err(at(value, format!("`{key}` has no meaning for this topology")));
            }
            None if means => {
                return Err(at(&network.topology, format!("this topology needs `{key}`")));
            }
            _ => {}
        }
    }
    let number = |value: &Option<Spanned<usize>>| value.as_ref().map_or(0, |value| *value.get_ref());
    let built = match name {
        TopologyName::Rack => Topology::one_rack(number(&network.hosts), &parts),
        TopologyName::Dumbbell => Topology::dumbbell(number(&network.hosts), number(&network.hosts), &parts),
        TopologyName::Figure9 => Ok(Topology::figure9(&parts)),
        TopologyName::LeafSpine => Topology::leaf_spine(
            number(&network.leaves),
            number(&network.spines),
            number(&network.hosts),
            &parts,
        ),
        TopologyName::FatTree => Topology::fat_tree(number(&network.k), &parts),
    };
    let mut topology = built.map_err(|error| at(&network.topology, error))?;
    set_programmable(&mut topology, switch)?;
    topology.check().map_err(|error| match error {
        TopologyError::Rate(_) => at(&network.rate, error),
        TopologyError::Mtu(_) => at(&network.mtu, "the MTU must be from 68 to 65535 bytes"),
        error => at(&network.topology, error),
    })?;
    Ok(topology)
}

fn set_programmable(topology: &mut Topology, switch: &SwitchTable) -> Result<(), Mistake> {
    let Some(which) = &switch.programmable else {
        return topology
            .set_programmable(&Programmable::Share(1.0))
            .map_err(|error| at(&switch.aggregators, error));
    };
    let chosen = match which.get_ref() {
        WhichSwitches::Names(names) => {
            for name in names {
                if !topology.switches().any(|node| topology.get(node).name == *name) {
                    let known = topology.switches().map(|node| topology.get(node).name.as_str());
                    return Err(at(which, error::unknown("switch", name, known)));
                }
            }
            Programmable::Names(names.clone())
        }
        WhichSwitches::Layers(layers) => Programmable::Layers(layers.clone()),
        WhichSwitches::Share(share) => Programmable::Share(*share),
    };
    topology.set_programmable(&chosen).map_err(|error| at(which, error))
}

fn host(topology: &Topology, name: &str, place: &Spanned<impl Sized>) -> Result<NodeId, Mistake> {
    let found = topology.hosts().find(|node| topology.get(*node).name == name);
    found.ok_or_else(|| {
        let known = topology.hosts().map(|node| topology.get(node).name.as_str());
        at(place, error::unknown("host", name, known))
    })
}

fn node(topology: &Topology, name: &Spanned<String>) -> Result<NodeId, Mistake> {
    topology.node(name.get_ref()).ok_or_else(|| {
        let known = topology.nodes().iter().map(|node| node.name.as_str());
        at(name, error::unknown("node", name.get_ref(), known))
    })
}

fn link(topology: &Topology, ends: &Spanned<[String; 2]>) -> Result<LinkId, Mistake> {
    let [a, b] = ends.get_ref();
    let [a, b] = [a, b].map(|end| node(topology, &Spanned::new(ends.span(), end.clone())));
    topology.link_between(a?, b?).ok_or_else(|| {
        let [a, b] = ends.get_ref();
        at(ends, format!("there is no link between {a} and {b}"))
    })
}

fn background(topology: &Topology, flow: &Spanned<Background>) -> Result<BackgroundPlan, Mistake> {
    let plan = flow.get_ref();
    let from = host(topology, plan.from.get_ref(), &plan.from)?;
    let to = host(topology, plan.to.get_ref(), &plan.to)?;
    if from == to {
        return Err(at(&plan.to, "a flow needs two hosts"));
    }
    let rate_bps = match (plan.kind.get_ref(), &plan.rate) {
        (BackgroundKind::Constant, Some(rate)) => Some(rate.get_ref().0),
        (BackgroundKind::Constant, None) => return Err(at(&plan.kind, "a constant flow needs a `rate`")),
        (BackgroundKind::Tcp, None) => None,
        (BackgroundKind::Tcp, Some(rate)) => {
            return Err(at(rate, "a tcp flow finds its rate itself; `rate` is for constant ones"));
        }
    };
    if let (Some(rate), Some((_, link))) = (&plan.rate, topology.neighbours(from).next())
        && rate.get_ref().0 > topology.links()[link.0 as usize].config.rate_bps
    {
        return Err(at(rate, "an impossible rate: the sender's link is slower"));
    }
    let (start, stop) = (plan.start.0, plan.stop.map(|stop| stop.0));
    if stop.is_some_and(|stop| stop <= start) {
        return Err(at(flow, "this flow stops before it starts"));
    }
    Ok(BackgroundPlan { from, to, rate_bps, start, stop })
}

fn losses_of(topology: &Topology, loss: &Spanned<schema::Loss>) -> Result<Vec<LossPlan>, Mistake> {
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
    let share = |share: Option<unit::Share>| share.map_or(0.0, |share| share.0);
    if let (Some(_), None) = (plan.reordering, plan.held_back) {
        return Err(at(loss, "`reordering` needs `held_back`: how long a packet waits at most"));
    }
    let mut plans = Vec::new();
    for link in links {
        for (end, port) in topology.links()[link.0 as usize].ends.into_iter().zip(link.ports()) {
            if from.is_none_or(|from| from == end) {
                plans.push(LossPlan {
                    port,
                    loss: share(plan.loss),
                    burst,
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

fn fault_of(
    topology: &Topology,
    jobs: &[crate::workload::JobPlan],
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
        if jobs[job].server.is_some() {
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
        FaultKind::JobDies => Fault::JobDies(job()?),
    };
    Ok(FaultPlan { at: plan.at.0, fault })
}
