//! `[[job]]`: hosts found, numbers checked; what a system's own table says is the system's to read.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use fanin_wire::Dtype;
use toml::Spanned;

use super::entry::{Entry, OwnTable};
use super::error::{self, Mistake, at};
use super::lookup::{class, host};
use super::schema::{
    DtypeName, File, Hosts, Job, LateTable, LayerTable, LayersTable, PayloadName, RatesTable, SendOrderName,
};
use crate::net::{Cost, NodeId, Topology};
use crate::systems::System;
use crate::workload::models::{FLOPS_PER_S, Model};
use crate::workload::{JobPlan, Lateness, Rates, SendOrder, TimedLayer, Trained, WORKERS_MAX, Workload};

/// The size of a float32 and of an int32.
const ELEMENT_BYTES: u64 = 4;
/// Tensors that gradients are cut into in an iteration, at most: packets name a layer by 16 bits.
const PARTITIONS_MAX: f64 = 65_535.0;
const TENSOR_BYTES: RangeInclusive<u64> = ELEMENT_BYTES..=1 << 30;

pub(super) fn resolve(
    file: &File,
    tables: &[OwnTable<'_>],
    topology: &Topology,
) -> Result<Vec<JobPlan>, Mistake> {
    if file.job.is_empty() && file.background.is_empty() && file.parameter_server.is_empty() {
        return Err(Mistake {
            span: None,
            message: "nothing to simulate: no [[job]], no [[parameter_server]], no [[background]]".into(),
        });
    }
    let mut taken = BTreeSet::new();
    let mut jobs: Vec<JobPlan> = Vec::new();
    for (number, job) in file.job.iter().enumerate() {
        let plan = resolve_one(file, tables, topology, number, &mut taken)?;
        if jobs.iter().any(|other| other.name == plan.name) {
            return Err(at(job, format!("two jobs are called {}", plan.name)));
        }
        jobs.push(plan);
    }
    Ok(jobs)
}

fn resolve_one(
    file: &File,
    tables: &[OwnTable<'_>],
    topology: &Topology,
    number: usize,
    taken: &mut BTreeSet<NodeId>,
) -> Result<JobPlan, Mistake> {
    let place = &file.job[number];
    let job = place.get_ref();
    let workers = workers(topology, job, taken)?;
    let mut entry = Entry { file, topology, number, workers: &workers, taken, tables };
    let system = (tables[number].kind.resolve)(&mut entry)?;
    let sampled = sampled(file, job, &*system)?;
    match system.is_asynchronous() {
        true => fits_asynchronous(job)?,
        false => may_overlap(job)?,
    }
    let rates = rates(topology, job, &workers)?;
    let (start, stop) = (job.start.0, job.stop.map(|stop| stop.0));
    if stop.is_some_and(|stop| stop <= start) {
        return Err(at(place, "this job stops before it starts"));
    }
    let seconds_a_byte = system.seconds_a_byte(topology, &workers) * sent(&*system);
    Ok(JobPlan {
        name: job.name.clone().unwrap_or_else(|| format!("job{number}")),
        system,
        workers,
        class: class(&job.priority, &job.drop_class, job.spray)?,
        start,
        stop,
        workload: workload(job, seconds_a_byte)?,
        rates,
        lateness: match job.late.as_ref().map(Spanned::get_ref) {
            None => Lateness::None,
            Some(LateTable::Uniform(most)) => Lateness::Uniform(most.0),
            Some(LateTable::Normal(it)) => Lateness::Normal { most: it.most.0, deviation: it.deviation.0 },
        },
        integers: job.dtype == DtypeName::Int32,
        large_values: job.large_values.as_ref().map_or(0.0, |share| share.get_ref().0),
        sampled,
    })
}

/// The bytes that a float of a long tensor takes on its way, as a part of its own.
fn sent(system: &dyn System) -> f64 {
    let (wire_dtype, dtype) = (system.wire_dtype(), Dtype::Float32);
    let elements = wire_dtype.chunk_elements(system.packet_elements(), dtype);
    wire_dtype.payload_bytes(elements, dtype) as f64 / (dtype.element_bytes() * elements) as f64
}

/// How fast workers' hosts send: a core of theirs keeps to it, so that none may have other work.
fn rates(topology: &Topology, job: &Job, workers: &[NodeId]) -> Result<Rates, Mistake> {
    let Some(given) = &job.rates else { return Ok(Rates::OfLinks) };
    if workers.iter().any(|worker| topology.get(*worker).config.sends != Cost::NOTHING) {
        let message = "`rates` are kept by a host's core, which has no time that `packet_cost` and `byte_cost` take: give the one or the other";
        return Err(at(given, message));
    }
    match given.get_ref() {
        RatesTable::Given(rates) if rates.len() != workers.len() => {
            Err(at(given, format!("{} rates of {} workers", rates.len(), workers.len())))
        }
        RatesTable::Given(rates) => Ok(Rates::Given(rates.iter().map(|rate| rate.0).collect())),
        RatesTable::Drawn(it) => Ok(Rates::Drawn { most_bps: it.most.0, deviation: it.deviation.0 }),
    }
}

/// Whether packets carry a sample of their elements.
fn sampled(file: &File, job: &Job, system: &dyn System) -> Result<bool, Mistake> {
    if *file.payload.get_ref() == PayloadName::Full {
        return Ok(false);
    }
    if system.sample_elements().is_none() {
        let message = format!(
            "what {} decides depends on all of a tensor, and not on a sample: it needs `payload = \"full\"`",
            system.name()
        );
        return Err(at(&job.system, message));
    }
    if let Some(large) = job.large_values.as_ref().filter(|large| large.get_ref().0 > 0.0) {
        let message =
            "most overflows would be in elements that a sample leaves out; they need `payload = \"full\"`";
        return Err(at(large, message));
    }
    Ok(true)
}

/// Checks that sums have something to overlap with, where they are to.
fn may_overlap(job: &Job) -> Result<(), Mistake> {
    if let Some(overlap) = job.overlap.as_ref().filter(|overlap| *overlap.get_ref())
        && let Some(LayersTable::Given(tables)) = job.layers.as_ref().map(Spanned::get_ref)
        && tables.iter().all(|layer| layer.forward.0.is_zero())
    {
        let message = "no layer says how long its forward pass takes (`forward`), and a recorded step never does: \
                       nothing can overlap with it";
        return Err(at(overlap, message));
    }
    Ok(())
}

/// Checks the keys of a job whose workers exchange parameters and wait for nobody.
fn fits_asynchronous(job: &Job) -> Result<(), Mistake> {
    if let Some(order) = job.order.as_ref().filter(|order| *order.get_ref() == SendOrderName::Needed) {
        let message = "an asynchronous worker sends all parameters after its step, and no forward pass waits for some of them: leave `order` out";
        return Err(at(order, message));
    }
    if let Some(large) = job.large_values.as_ref().filter(|large| large.get_ref().0 > 0.0) {
        let message = "numbers that are large in some tensors alone cannot be told in parameters, which tensors change in turn: leave `large_values` out";
        return Err(at(large, message));
    }
    Ok(())
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
    if found.len() > WORKERS_MAX as usize {
        let message = format!("{} workers: a job has at most {WORKERS_MAX}", found.len());
        return Err(at(&job.workers, message));
    }
    taken.extend(&found);
    Ok(found)
}

/// The work of a job, where a byte takes so long to be summed.
pub(super) fn workload(job: &Job, seconds_a_byte: f64) -> Result<Workload, Mistake> {
    match (&job.tensor, &job.model, &job.layers) {
        (Some(tensor), None, None) => all_reduce(job, tensor.get_ref().0, tensor),
        (None, Some(name), None) => {
            refuse(&job.compute, "compute", "`layers`; a `model` has `flops`")?;
            let flops_per_s = number(&job.flops, FLOPS_PER_S, 1.0, FLOPS_MEANING)?;
            training(
                job,
                Trained::Model(model(name)?, flops_per_s),
                batch(&job.batch, BATCH)?,
                seconds_a_byte,
            )
        }
        (None, None, Some(given)) => {
            refuse(&job.flops, "flops", "a `model`; `layers` have times, and `compute` divides them")?;
            training(job, Trained::Layers(layers(job, given)?), batch(&job.batch, 1)?, seconds_a_byte)
        }
        (None, None, None) => Err(at(
            &job.system,
            "this job has nothing to do: give it a `tensor` (a size), a `model` (a name) or `layers`",
        )),
        (Some(tensor), ..) => Err(at(tensor, "a job has either a `tensor`, a `model` or `layers`")),
        (None, Some(model), Some(_)) => Err(at(model, "a job has either a `model` or `layers`")),
    }
}

fn all_reduce(job: &Job, bytes: u64, place: &Spanned<fanin_units::Size>) -> Result<Workload, Mistake> {
    const TRAINING: &str =
        "training, and this job reduces tensors of one size; it would need a `model` or `layers`";
    refuse(&job.batch, "batch", TRAINING)?;
    refuse(&job.iterations, "iterations", TRAINING)?;
    refuse(&job.scale, "scale", TRAINING)?;
    refuse(&job.flops, "flops", TRAINING)?;
    refuse(&job.compute, "compute", TRAINING)?;
    refuse(&job.jitter, "jitter", TRAINING)?;
    refuse(&job.pause_every, "pause_every", TRAINING)?;
    refuse(&job.pause, "pause", TRAINING)?;
    refuse(&job.overlap, "overlap", TRAINING)?;
    refuse(&job.partition, "partition", TRAINING)?;
    refuse(&job.order, "order", TRAINING)?;
    if !TENSOR_BYTES.contains(&bytes) {
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

/// The layers of a job. A file of layers was read before.
fn layers(job: &Job, given: &Spanned<LayersTable>) -> Result<Vec<TimedLayer>, Mistake> {
    let LayersTable::Given(tables) = given.get_ref() else { unreachable!("a file is read before") };
    let compute = number(&job.compute, 1.0, COMPUTE_MIN, "`compute` divides times: from 0.001 upwards")?;
    timed(tables, compute).map_err(|message| at(given, message))
}

/// Layers whose passes take as long as they say, divided by `compute`.
pub(super) fn timed(tables: &[LayerTable], compute: f64) -> Result<Vec<TimedLayer>, String> {
    if tables.is_empty() {
        return Err("at least one layer".into());
    }
    if let Some(wrong) = tables.iter().position(|layer| !TENSOR_BYTES.contains(&layer.bytes.0)) {
        return Err(format!("layer {wrong} (the first one is 0) has not from 4 bytes to 1 GiB"));
    }
    let timed = |layer: &LayerTable| TimedLayer {
        parameters: layer.bytes.0 / ELEMENT_BYTES,
        forward: layer.forward.0.div_f64(compute),
        backward: layer.backward.0.div_f64(compute),
    };
    Ok(tables.iter().map(timed).collect())
}

fn training(job: &Job, trained: Trained, batch: u32, seconds_a_byte: f64) -> Result<Workload, Mistake> {
    const TENSORS: &str = "tensors of one size, and this job trains; it would need a `tensor`";
    refuse(&job.in_flight, "in_flight", TENSORS)?;
    refuse(&job.tensors, "tensors", TENSORS)?;
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
    let overlap = job.overlap.as_ref().is_some_and(|overlap| *overlap.get_ref());
    if let (true, Some(place)) = (overlap, &job.pause_every) {
        return Err(at(
            place,
            "where passes `overlap` there is no moment between two iterations for an off phase",
        ));
    }
    let order = match &job.order {
        Some(order) if *order.get_ref() == SendOrderName::Needed && !overlap => {
            return Err(at(
                order,
                "`order = \"needed\"` is about `overlap = true`: without it the next forward pass waits for all",
            ));
        }
        Some(order) if *order.get_ref() == SendOrderName::Needed => SendOrder::Needed { seconds_a_byte },
        _ => SendOrder::Ready,
    };
    let scale = number(&job.scale, 1.0, 1.0, "`scale` divides; from 1 upwards")?;
    if let Some(place) = &job.partition {
        let bytes = ELEMENT_BYTES * trained.layers(1).iter().map(|layer| layer.parameters).sum::<u64>();
        let least = (bytes as f64 / scale / PARTITIONS_MAX).max(ELEMENT_BYTES as f64).ceil();
        if (place.get_ref().0 as f64) < least {
            let message = format!(
                "`partition` is at least {least} bytes here: an iteration has at most {PARTITIONS_MAX} tensors"
            );
            return Err(at(place, message));
        }
    }
    Ok(Workload::Training {
        trained,
        batch,
        iterations: job.iterations.as_ref().map(|count| *count.get_ref()),
        scale,
        jitter: job.jitter.as_ref().map_or(0.0, |jitter| jitter.get_ref().0),
        pause,
        overlap,
        partition: job.partition.as_ref().map(|size| (size.get_ref().0 / ELEMENT_BYTES) as usize),
        order,
    })
}

pub(super) const FLOPS_MEANING: &str = "`flops` is operations a second, more than none";

pub(super) fn model(name: &Spanned<String>) -> Result<Model, Mistake> {
    let wanted = name.get_ref().to_lowercase();
    Model::ALL.into_iter().find(|model| model.name() == wanted).ok_or_else(|| {
        at(name, error::unknown("model", name.get_ref(), Model::ALL.iter().map(|model| model.name())))
    })
}

/// Samples of a worker in an iteration, as far as one machine could have any.
const BATCH_MAX: u32 = 1_000_000;

/// The longest times, divided by it, still fit into a `Duration`.
const COMPUTE_MIN: f64 = 1e-3;

/// The samples in an iteration of a model, unless the file says otherwise.
pub(super) const BATCH: u32 = 32;

/// Samples of a worker in an iteration.
pub(super) fn batch(given: &Option<Spanned<u32>>, unless: u32) -> Result<u32, Mistake> {
    match given {
        Some(place) if !(1..=BATCH_MAX).contains(place.get_ref()) => {
            Err(at(place, format!("from 1 to {BATCH_MAX} samples")))
        }
        given => Ok(given.as_ref().map_or(unless, |batch| *batch.get_ref())),
    }
}

pub(super) fn number(
    value: &Option<Spanned<f64>>,
    unless: f64,
    least: f64,
    what: &str,
) -> Result<f64, Mistake> {
    match value {
        Some(value) if !(least..=1e18).contains(value.get_ref()) => Err(at(value, what)),
        Some(value) => Ok(*value.get_ref()),
        None => Ok(unless),
    }
}

/// A key of the other workload.
pub(super) fn refuse<T>(value: &Option<Spanned<T>>, key: &str, what: &str) -> Result<(), Mistake> {
    value.as_ref().map_or(Ok(()), |value| Err(at(value, format!("`{key}` is about {what}"))))
}
