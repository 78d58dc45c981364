//! `[[job]]`: hosts found, numbers checked, the system's own limits.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use fanin_protocol::atp::{ATP_WORKERS_MAX, Hashing, Overflow, Scaling, WINDOW_ELEMENTS_MAX};
use fanin_protocol::switchml::SLOTS_MAX;
use fanin_wire::{
    CHUNK_ELEMENTS, FRAGMENT_ELEMENTS, RANKS_MAX, WireDtype, chunk_elements_for_mtu, chunk_packet_bytes,
    fragment_elements_for_mtu, fragment_packet_bytes,
};
use toml::Spanned;

use super::error::{self, Mistake, at};
use super::lookup::{class, host};
use super::schema::{DtypeName, File, HashingName, Hosts, Job, OverflowName, ScalingName, System};
use crate::net::{NodeId, Topology};
use crate::systems::atp::{Atp, Help};
use crate::systems::placement;
use crate::systems::ring::Ring;
use crate::systems::switchml::SwitchMl;
use crate::workload::models::{FLOPS_PER_S, Model};
use crate::workload::{JobPlan, Workload};

/// IPv4 and UDP, as the simulated network counts them.
const IP_UDP_BYTES: usize = 28;
/// ATP's window, in packets: beyond what a network of short delays needs.
const WINDOW: u16 = 1024;
/// Of a float32 as of an int32.
const ELEMENT_BYTES: u64 = 4;

pub(super) fn resolve(file: &File, topology: &Topology) -> Result<Vec<JobPlan>, Mistake> {
    if file.job.is_empty() && file.background.is_empty() {
        return Err(Mistake {
            span: None,
            message: "nothing to simulate: no [[job]], no [[background]]".into(),
        });
    }
    let mut taken = BTreeSet::new();
    let mut jobs: Vec<JobPlan> = Vec::new();
    for (number, job) in file.job.iter().enumerate() {
        let plan = resolve_one(file, topology, job, number, &mut taken)?;
        if jobs.iter().any(|other| other.name == plan.name) {
            return Err(at(job, format!("two jobs are called {}", plan.name)));
        }
        jobs.push(plan);
    }
    Ok(jobs)
}

fn resolve_one(
    file: &File,
    topology: &Topology,
    entry: &Spanned<Job>,
    number: usize,
    taken: &mut BTreeSet<NodeId>,
) -> Result<JobPlan, Mistake> {
    let job = entry.get_ref();
    let system = *job.system.get_ref();
    let workers = workers(topology, job, taken)?;
    let server = server(topology, job, taken)?;
    check_fan_in(topology, job, &workers, server)?;
    let (elements, window) = packets(file, job)?;
    let (hashing, window) = hashing(file, job, number, window)?;
    let (start, stop) = (job.start.0, job.stop.map(|stop| stop.0));
    if stop.is_some_and(|stop| stop <= start) {
        return Err(at(entry, "this job stops before it starts"));
    }
    let timeout = match &job.timeout {
        Some(timeout) if timeout.get_ref().0.is_zero() => {
            return Err(at(timeout, "`timeout` must not be zero"));
        }
        Some(timeout) => timeout.get_ref().0,
        None => Duration::from_millis(1),
    };
    if let Some(only) = job.timeouts_only.as_ref().filter(|_| system != System::Switchml) {
        return Err(at(only, "`timeouts_only` is about SwitchML, and this job is none"));
    }
    let atp = |help| Atp {
        help,
        server,
        elements,
        window,
        hashing,
        scaling: match job.scaling {
            ScalingName::Static => Scaling::Static,
            ScalingName::Dynamic => Scaling::Dynamic,
        },
        overflow: match job.overflow {
            OverflowName::Reactive => Overflow::Reactive,
            OverflowName::Proactive => Overflow::Proactive,
        },
        congestion_control: job.congestion_control,
        timeout,
    };
    Ok(JobPlan {
        name: job.name.clone().unwrap_or_else(|| format!("job{number}")),
        system: match system {
            System::Atp => Arc::new(atp(Help::Way)),
            System::Rss => Arc::new(atp(Help::Racks)),
            System::Ps | System::PsNToN => Arc::new(atp(Help::None)),
            System::Switchml => Arc::new(SwitchMl {
                elements,
                slots: window,
                timeout,
                timeouts_only: job.timeouts_only.as_ref().is_some_and(|only| *only.get_ref()),
            }),
            System::Ring => Arc::new(Ring),
        },
        workers,
        class: class(&job.priority, &job.drop_class)?,
        start,
        stop,
        workload: workload(job)?,
        integers: job.dtype == DtypeName::Int32,
        large_values: job.large_values.as_ref().map_or(0.0, |share| share.get_ref().0),
    })
}

fn workers(topology: &Topology, job: &Job, taken: &mut BTreeSet<NodeId>) -> Result<Vec<NodeId>, Mistake> {
    let found: Vec<NodeId> = match job.workers.get_ref() {
        Hosts::Count(count) => {
            let free: Vec<NodeId> = topology.hosts().filter(|node| !taken.contains(node)).collect();
            if free.len() < *count {
                let message =
                    format!("{count} workers, and only {} hosts that no job before has", free.len());
                return Err(at(&job.workers, message));
            }
            free.into_iter().take(*count).collect()
        }
        Hosts::Names(names) => {
            names.iter().map(|name| host(topology, name, &job.workers)).collect::<Result<_, _>>()?
        }
    };
    if found.iter().collect::<BTreeSet<_>>().len() < found.len() {
        return Err(at(&job.workers, "a host cannot be two workers of one job"));
    }
    let (least, most) = match job.system.get_ref() {
        System::Atp | System::Rss | System::Ps | System::PsNToN => (1, ATP_WORKERS_MAX.into()),
        System::Switchml => (1, RANKS_MAX as usize),
        System::Ring => (2, usize::MAX),
    };
    if found.len() < least {
        return Err(at(&job.workers, format!("at least {least} workers")));
    }
    if found.len() > most {
        let message =
            format!("{} workers: more than the {most} that this system's bitmaps hold", found.len());
        return Err(at(&job.workers, message));
    }
    taken.extend(&found);
    Ok(found)
}

fn server(topology: &Topology, job: &Job, taken: &mut BTreeSet<NodeId>) -> Result<Option<NodeId>, Mistake> {
    let needed = matches!(job.system.get_ref(), System::Atp | System::Rss | System::Ps);
    match &job.server {
        Some(server) if !needed => Err(at(server, "this system has no server of its own")),
        Some(server) => {
            let node = host(topology, server.get_ref(), server)?;
            taken.insert(node);
            Ok(Some(node))
        }
        None if needed => {
            let node = topology.hosts().filter(|node| !taken.contains(node)).last().ok_or_else(|| {
                at(
                    &job.system,
                    "no host is left for the server; name one with `server`, a worker's if need be",
                )
            })?;
            taken.insert(node);
            Ok(Some(node))
        }
        None => Ok(None),
    }
}

/// Whether the bitmaps hold the job's hierarchy.
fn check_fan_in(
    topology: &Topology,
    job: &Job,
    workers: &[NodeId],
    server: Option<NodeId>,
) -> Result<(), Mistake> {
    let system = *job.system.get_ref();
    let result = match (system, server) {
        (System::Switchml, _) => placement::pools(topology, workers).map(|_| ()),
        (System::Atp, Some(server)) => placement::place(topology, Help::Way, workers, server).map(|_| ()),
        (System::Rss, Some(server)) => placement::place(topology, Help::Racks, workers, server).map(|_| ()),
        _ => Ok(()),
    };
    result.map_err(|error| at(&job.workers, error))
}

/// Elements of a packet, and the window.
fn packets(file: &File, job: &Job) -> Result<(u16, u16), Mistake> {
    let mtu = *file.network.mtu.get_ref() as usize;
    let (lengths, fits, bytes): (&[usize], _, fn(usize) -> usize) = match job.system.get_ref() {
        System::Switchml => (&CHUNK_ELEMENTS, chunk_elements_for_mtu(mtu, WireDtype::Int32), |elements| {
            chunk_packet_bytes(elements, WireDtype::Int32)
        }),
        _ => (&FRAGMENT_ELEMENTS, fragment_elements_for_mtu(mtu), fragment_packet_bytes),
    };
    let elements = match &job.elements {
        Some(elements) => {
            let count = usize::from(*elements.get_ref());
            if !lengths.contains(&count) {
                return Err(at(elements, format!("a packet carries {lengths:?} elements, one of these")));
            }
            if bytes(count) + IP_UDP_BYTES > mtu {
                return Err(at(elements, format!("{count} elements do not fit a packet of {mtu} bytes")));
            }
            *elements.get_ref()
        }
        None => fits.map(|elements| elements as u16).ok_or_else(|| {
            at(&file.network.mtu, format!("no packet of {mtu} bytes carries even {} elements", lengths[0]))
        })?,
    };
    if *job.system.get_ref() == System::Switchml {
        return slots(file, job).map(|slots| (elements, slots));
    }
    let most = (WINDOW_ELEMENTS_MAX / usize::from(elements)).min(usize::from(u16::MAX)) as u16;
    let window = match &job.window {
        Some(window) if !(1..=most).contains(window.get_ref()) => {
            return Err(at(window, format!("a window of packets of {elements} elements: 1 to {most}")));
        }
        Some(window) => *window.get_ref(),
        None => WINDOW.min(most),
    };
    Ok((elements, window))
}

/// How a job's fragments find their aggregators; a job with a part of the table for itself has a window no longer than that.
fn hashing(file: &File, job: &Job, number: usize, window: u16) -> Result<(Hashing, u16), Mistake> {
    match job.hashing {
        HashingName::Hash => Ok((Hashing::Hash, window)),
        HashingName::Linear => Ok((Hashing::Linear, window)),
        HashingName::Partition => {
            let with_part = |jobs: &[Spanned<Job>]| {
                jobs.iter().filter(|job| job.get_ref().hashing == HashingName::Partition).count() as u32
            };
            let (aggregators, sharing) = (*file.switch.aggregators.get_ref(), with_part(&file.job));
            let part = aggregators / sharing;
            if part == 0 {
                let message = format!("{aggregators} aggregators are no part for each of {sharing} jobs");
                return Err(at(&job.system, message));
            }
            let first = part * with_part(&file.job[..number]);
            Ok((Hashing::Partition { first }, window.min(part.min(u16::MAX.into()) as u16)))
        }
    }
}

/// SwitchML's slots: two aggregators each, and as many for each job as for the others, running or not.
fn slots(file: &File, job: &Job) -> Result<u16, Mistake> {
    let sharing = file.job.iter().filter(|job| *job.get_ref().system.get_ref() == System::Switchml).count();
    let aggregators = *file.switch.aggregators.get_ref();
    let most = (aggregators / 2 / sharing as u32).min(SLOTS_MAX.into()) as u16;
    if most == 0 {
        let message =
            format!("{aggregators} aggregators are no slot for each of {sharing} jobs: a slot takes two");
        return Err(at(&job.system, message));
    }
    match &job.window {
        Some(window) if !(1..=most).contains(window.get_ref()) => {
            Err(at(window, format!("this job's part of the switch's memory is {most} slots")))
        }
        Some(window) => Ok(*window.get_ref()),
        None => Ok(most),
    }
}

fn workload(job: &Job) -> Result<Workload, Mistake> {
    match (&job.tensor, &job.model) {
        (Some(tensor), None) => all_reduce(job, tensor.get_ref().0, tensor),
        (None, Some(model)) => training(job, model),
        (Some(tensor), Some(_)) => Err(at(tensor, "a job has either a `tensor` or a `model`")),
        (None, None) => Err(at(
            &job.system,
            "this job has nothing to do: give it a `tensor` (a size) or a `model` (a name)",
        )),
    }
}

fn all_reduce(job: &Job, bytes: u64, place: &Spanned<super::unit::Size>) -> Result<Workload, Mistake> {
    const TRAINING: &str = "training, and this job reduces tensors of one size; it would need a `model`";
    refuse(&job.batch, "batch", TRAINING)?;
    refuse(&job.iterations, "iterations", TRAINING)?;
    refuse(&job.scale, "scale", TRAINING)?;
    refuse(&job.flops, "flops", TRAINING)?;
    refuse(&job.jitter, "jitter", TRAINING)?;
    refuse(&job.pause_every, "pause_every", TRAINING)?;
    refuse(&job.pause, "pause", TRAINING)?;
    if !(ELEMENT_BYTES..=1 << 30).contains(&bytes) {
        return Err(at(place, "a tensor has from 4 bytes to 1 GiB"));
    }
    let in_flight = job.in_flight.as_ref().map_or(2, |count| *count.get_ref());
    if let Some(place) = job.in_flight.as_ref().filter(|_| !(1..=1024).contains(&in_flight)) {
        return Err(at(place, "from 1 to 1024 tensors are under way"));
    }
    let count = job.tensors.as_ref().map(|count| *count.get_ref());
    if let Some(place) = job.tensors.as_ref().filter(|count| *count.get_ref() == 0) {
        return Err(at(place, "at least one tensor"));
    }
    Ok(Workload::AllReduce { elements: (bytes / ELEMENT_BYTES) as usize, in_flight, count })
}

fn training(job: &Job, name: &Spanned<String>) -> Result<Workload, Mistake> {
    const TENSORS: &str = "tensors of one size, and this job trains; it would need a `tensor`";
    refuse(&job.in_flight, "in_flight", TENSORS)?;
    refuse(&job.tensors, "tensors", TENSORS)?;
    let wanted = name.get_ref().to_lowercase();
    let model = Model::ALL.into_iter().find(|model| model.name() == wanted).ok_or_else(|| {
        at(name, error::unknown("model", name.get_ref(), Model::ALL.iter().map(|model| model.name())))
    })?;
    let number = |value: &Option<Spanned<f64>>, unless: f64, least: f64, what: &str| match value {
        Some(value) if !(least..=1e18).contains(value.get_ref()) => Err(at(value, what)),
        Some(value) => Ok(*value.get_ref()),
        None => Ok(unless),
    };
    let batch = job.batch.as_ref().map_or(32, |batch| *batch.get_ref());
    if let Some(place) = job.batch.as_ref().filter(|_| batch == 0) {
        return Err(at(place, "at least one sample"));
    }
    if let Some(place) = job.iterations.as_ref().filter(|count| *count.get_ref() == 0) {
        return Err(at(place, "at least one iteration"));
    }
    let pause = match (&job.pause_every, &job.pause) {
        (Some(every), _) if *every.get_ref() == 0 => {
            return Err(at(every, "an off phase after at least one iteration"));
        }
        (Some(every), Some(pause)) => Some((*every.get_ref(), pause.get_ref().0)),
        (None, None) => None,
        (Some(every), None) => return Err(at(every, "`pause_every` needs `pause`: how long")),
        (None, Some(pause)) => {
            return Err(at(pause, "`pause` needs `pause_every`: after how many iterations"));
        }
    };
    Ok(Workload::Training {
        model,
        batch,
        iterations: job.iterations.as_ref().map(|count| *count.get_ref()),
        scale: number(&job.scale, 1.0, 1.0, "`scale` divides; from 1 upwards")?,
        flops_per_s: number(&job.flops, FLOPS_PER_S, 1.0, "`flops` is operations a second, more than none")?,
        jitter: job.jitter.as_ref().map_or(0.0, |jitter| jitter.get_ref().0),
        pause,
    })
}

/// A key of the other workload.
fn refuse<T>(value: &Option<Spanned<T>>, key: &str, what: &str) -> Result<(), Mistake> {
    value.as_ref().map_or(Ok(()), |value| Err(at(value, format!("`{key}` is about {what}"))))
}
