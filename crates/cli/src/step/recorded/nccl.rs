//! Profiles of NCCL, by `torch.profiler.profile`.
//!
//! A kernel of NCCL begins late: it waits for its launch, and behind other sums. The host submits
//! early: it runs ahead of the GPU. So neither moment is when a sum is asked for. In PyTorch the
//! stream of NCCL waits for what the current stream was given before ("Sync Streams" in
//! ProcessGroupNCCL.cpp). So a sum is asked for when the host has submitted it and the last kernel
//! that was launched before is done.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use anyhow::{Context, bail, ensure};
use serde::Deserialize;
use serde_json::Value;

use super::{Asked, Event, Others};

/// PyTorch's profiler notes each collective under this name, when the host submits it.
const COLLECTIVE: &str = "record_param_comms";
/// Another stream that computes for more than this part of the first one's time is not understood.
const ASIDE_MAX: f64 = 0.25;

#[derive(Deserialize)]
struct Collective {
    #[serde(rename = "Collective name")]
    name: String,
    #[serde(rename = "In msg nelems")]
    elements: i64,
    dtype: String,
    #[serde(rename = "Process Group Name", default)]
    group: Value,
    /// Older profiles have it in place of the name.
    #[serde(rename = "Process Group ID", default)]
    group_id: Value,
    #[serde(rename = "Group size", default)]
    group_size: Value,
}

/// The work of the stream on which the training computes: when each piece was launched, and when
/// all up to it are done.
struct Computing(Vec<(f64, f64)>);

/// Whether NCCL ran in a profile.
pub(super) fn is_in(events: &[Event]) -> bool {
    events.iter().any(|event| event.name.starts_with("nccl"))
}

/// The sums of a rank, in their order.
pub(super) fn sums(events: &[Event]) -> anyhow::Result<Vec<Asked>> {
    ensure!(
        events.iter().any(is_kernel),
        "the profiler recorded NCCL on the host alone: record with \
         torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])"
    );
    let computing = Computing::of(events)?;
    let noted: HashMap<u64, &Event> = events
        .iter()
        .filter(|event| event.name == COLLECTIVE)
        .filter_map(|event| Some((id(event, "External id")?, event)))
        .collect();
    let first_noted = noted.values().map(|event| event.ts).fold(f64::INFINITY, f64::min);
    let (mut sums, mut groups, mut others) = (BTreeMap::new(), BTreeSet::new(), Others::default());
    for kernel in events.iter().filter(|event| is_kernel(event) && event.name.starts_with("nccl")) {
        let noted = id(kernel, "External id").and_then(|id| Some((id, *noted.get(&id)?)));
        let Some((id, host)) = noted else {
            // The host submitted it before the profile began.
            if kernel.ts < first_noted && first_noted.is_finite() {
                continue;
            }
            bail!(
                "{} has no {COLLECTIVE} of the host, as in a CUDA graph or with PyTorch before 2.2: record without \
                 CUDA graphs, with ProfilerActivity.CPU and ProfilerActivity.CUDA",
                kernel.name
            );
        };
        let Collective { name, elements, dtype, group, group_id, group_size } =
            Collective::deserialize(&host.args)
                .with_context(|| format!("{COLLECTIVE} has not what PyTorch 2.2 and later write of it"))?;
        let element_bytes =
            element_bytes(&dtype).with_context(|| format!("{name} has the dtype {dtype:?}"))?;
        let bytes = usize::try_from(elements).unwrap_or(0).saturating_mul(element_bytes);
        if !matches!(&name[..], "allreduce" | "allreduce_coalesced") {
            others.add(&name, bytes);
            continue;
        }
        let group = [group, group_id, group_size].into_iter().find(|told| !told.is_null());
        groups.insert(group.unwrap_or_default().to_string());
        let submitted = host.ts.max(computing.done_before(host.ts)).min(kernel.ts);
        let asked = Asked { bytes, submitted, done: kernel.ts + kernel.dur };
        // Several kernels may sum what one call asked for.
        let known = sums.entry(id).or_insert(asked);
        known.submitted = known.submitted.min(asked.submitted);
        known.done = known.done.max(asked.done);
    }
    ensure!(
        groups.len() <= 1,
        "it has sums of several process groups ({}): only data-parallel trainings are understood, with one group",
        groups.into_iter().collect::<Vec<_>>().join(", ")
    );
    let mut sums: Vec<Asked> = sums.into_values().collect();
    others.check(&sums)?;
    sums.sort_by(|a, b| a.submitted.total_cmp(&b.submitted));
    Ok(sums)
}

impl Computing {
    fn of(events: &[Event]) -> anyhow::Result<Self> {
        let mut streams: BTreeMap<(u64, u64), f64> = BTreeMap::new();
        for kernel in events.iter().filter(|event| is_kernel(event) && !event.name.starts_with("nccl")) {
            *streams.entry(stream(kernel)?).or_insert(0.0) += kernel.dur;
        }
        let mut longest: Vec<((u64, u64), f64)> = streams.into_iter().collect();
        longest.sort_by(|a, b| b.1.total_cmp(&a.1));
        let Some(&(computing, took)) = longest.first() else {
            bail!("it has no kernels beside those of NCCL: record a training");
        };
        if let Some(((_, aside), _)) = longest.get(1).filter(|(_, aside)| *aside > ASIDE_MAX * took) {
            bail!(
                "the training computes on several streams ({} and {aside}), and nothing says for which a sum waits: \
                 record it with one stream",
                computing.1
            );
        }
        let launched: HashMap<u64, f64> = events
            .iter()
            .filter(|event| matches!(&event.cat[..], "cuda_runtime" | "cuda_driver"))
            .filter_map(|event| Some((id(event, "correlation")?, event.ts)))
            .collect();
        ensure!(
            !launched.is_empty(),
            "the profile has no launches of kernels: record with ProfilerActivity.CPU, too"
        );
        let mut work = Vec::new();
        for event in events.iter().filter(|event| is_work(event) && !event.name.starts_with("nccl")) {
            if stream(event)? == computing {
                let launch = id(event, "correlation").and_then(|id| launched.get(&id).copied());
                // Work without a launch is older than the profile.
                work.push((launch.unwrap_or(f64::NEG_INFINITY), event.ts + event.dur));
            }
        }
        work.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut done = f64::NEG_INFINITY;
        for piece in &mut work {
            done = done.max(piece.1);
            piece.1 = done;
        }
        Ok(Self(work))
    }

    /// When all is done that was launched before a moment.
    fn done_before(&self, moment: f64) -> f64 {
        let launched = self.0.partition_point(|(launch, _)| *launch < moment);
        launched.checked_sub(1).map_or(f64::NEG_INFINITY, |last| self.0[last].1)
    }
}

fn is_kernel(event: &Event) -> bool {
    event.cat == "kernel"
}

/// Whether a GPU does it.
fn is_work(event: &Event) -> bool {
    matches!(&event.cat[..], "kernel" | "gpu_memcpy" | "gpu_memset")
}

fn id(event: &Event, key: &str) -> Option<u64> {
    event.args.get(key)?.as_u64()
}

/// The device, and the stream on it.
fn stream(event: &Event) -> anyhow::Result<(u64, u64)> {
    let stream = id(event, "device").zip(id(event, "stream"));
    stream.with_context(|| format!("{} has no device and stream", event.name))
}

/// A type's length by the name that PyTorch gives it in `record_param_comms`.
fn element_bytes(name: &str) -> Option<usize> {
    Some(match name {
        "Double" | "Long" => 8,
        "Float" | "Int" => 4,
        "Half" | "BFloat16" | "Short" => 2,
        "Byte" | "Char" | "Bool" => 1,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Events as PyTorch wrote them in May 2024, of a ResNet on two GPUs. They have the fields that
    /// are read, and its names of kernels and streams.
    fn collective(id: u64, ts: f64, name: &str, elements: u64, group: &str) -> String {
        format!(
            r#"{{"ph":"X","cat":"cpu_op","name":"record_param_comms","pid":2910249,"tid":2919752,"ts":{ts},"dur":189.626,"args":{{"External id":{id},"Process Group Name":"{group}","Group size":2,"In msg nelems":{elements},"Out msg nelems":{elements},"dtype":"Float","Collective name":"{name}"}}}}"#
        )
    }

    fn nccl(id: u64, ts: f64, dur: f64) -> String {
        format!(
            r#"{{"ph":"X","cat":"kernel","name":"ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)","pid":0,"tid":40,"ts":{ts},"dur":{dur},"args":{{"External id":{id},"device":0,"stream":40,"correlation":{id}}}}}"#
        )
    }

    /// A kernel and its launch.
    fn kernel(correlation: u64, launch: f64, ts: f64, dur: f64, stream: u64) -> String {
        format!(
            r#"{{"ph":"X","cat":"cuda_runtime","name":"cudaLaunchKernel","pid":2910249,"tid":2919752,"ts":{launch},"dur":6.1,"args":{{"cbid":211,"correlation":{correlation}}}}},{{"ph":"X","cat":"kernel","name":"void cudnn::bn_bw_1C11_kernel_new","pid":0,"tid":{stream},"ts":{ts},"dur":{dur},"args":{{"device":0,"context":1,"stream":{stream},"correlation":{correlation}}}}}"#
        )
    }

    fn read(events: &[String]) -> anyhow::Result<Vec<Asked>> {
        let events: Vec<Event> = serde_json::from_str(&format!("[{}]", events.join(","))).expect("JSON");
        assert!(is_in(&events));
        sums(&events)
    }

    #[test]
    fn a_sum_is_asked_for_when_the_kernels_launched_before_it_are_done() {
        let events = [
            kernel(1, 100.0, 110.0, 300.0, 7),
            collective(21, 120.0, "allreduce", 1000, "0"),
            // The host runs ahead: this one is launched behind the sum.
            kernel(2, 130.0, 410.0, 500.0, 7),
            nccl(21, 415.0, 2000.0),
            collective(22, 140.0, "allreduce", 50, "0"),
            // It is ready at 910, and NCCL is busy with the first sum.
            nccl(22, 2415.0, 80.0),
            // The GPU is idle, and the host is late.
            collective(23, 3000.0, "allreduce", 7, "0"),
            nccl(23, 3050.0, 10.0),
        ];
        let asked = |bytes, submitted, done| Asked { bytes, submitted, done };
        let expected = [asked(4000, 410.0, 2415.0), asked(200, 910.0, 2495.0), asked(28, 3000.0, 3060.0)];
        assert_eq!(read(&events).expect("sums"), expected);
    }

    #[test]
    fn copies_count_and_kernels_older_than_the_profile_too() {
        let old = kernel(1, 0.0, 5.0, 100.0, 7).replace("cudaLaunchKernel", "cudaEventQuery").replacen(
            "\"correlation\":1}",
            "\"correlation\":99}",
            1,
        );
        let copy = kernel(2, 20.0, 105.0, 50.0, 7).replace(r#""cat":"kernel""#, r#""cat":"gpu_memcpy""#);
        let at = |events: &[String]| read(events).expect("sums")[0].submitted;
        let sum = [collective(21, 30.0, "allreduce", 1, "0"), nccl(21, 200.0, 1.0)];
        assert_eq!(at(&[std::slice::from_ref(&old), &sum[..]].concat()), 105.0);
        assert_eq!(at(&[&[old, copy], &sum[..]].concat()), 155.0);
    }

    #[test]
    fn kernels_beside_the_stream_that_computes_do_not_count_unless_they_are_many() {
        let sum = [collective(21, 30.0, "allreduce", 1, "0"), nccl(21, 500.0, 1.0)];
        let with = |aside: f64| {
            read(&[&[kernel(1, 1.0, 5.0, 100.0, 7), kernel(2, 2.0, 300.0, aside, 20)], &sum[..]].concat())
        };
        assert_eq!(with(25.0).expect("sums")[0].submitted, 105.0);
        let error = with(26.0).expect_err("two streams").to_string();
        assert!(error.contains("7 and 20") && error.contains("one stream"), "{error}");
    }

    #[test]
    fn other_collectives_are_named_unless_they_carry_little() {
        let computing = kernel(1, 1.0, 5.0, 100.0, 7);
        let sum = [collective(21, 30.0, "allreduce", 10_000, "0"), nccl(21, 500.0, 1.0)];
        let with = |name: &str, elements: u64| {
            let other = [collective(22, 31.0, name, elements, "0"), nccl(22, 501.0, 1.0)];
            read(&[std::slice::from_ref(&computing), &sum[..], &other].concat())
        };
        assert_eq!(with("_allgather_base", 100).expect("a metric").len(), 1);
        assert_eq!(with("broadcast", 90_000).expect("DDP's buffers").len(), 1);
        let error = with("_allgather_base", 101).expect_err("too much").to_string();
        assert!(error.contains("_allgather_base") && error.contains("data-parallel"), "{error}");
    }

    #[test]
    fn a_profile_that_lacks_something_is_told_with_the_cure() {
        let computing = kernel(1, 1.0, 5.0, 100.0, 7);
        let (sum, run) = (collective(21, 30.0, "allreduce", 10, "0"), nccl(21, 500.0, 1.0));
        let refused = |events: &[String]| format!("{:#}", read(events).expect_err("no sums"));
        let host = r#"{"ph":"X","cat":"user_annotation","name":"nccl:all_reduce","ts":31.0,"dur":5.0}"#;
        let without_kernels = refused(&[sum.clone(), host.to_owned()]);
        assert!(without_kernels.contains("ProfilerActivity.CUDA"), "{without_kernels}");
        let without_note = refused(&[computing.clone(), run.clone()]);
        assert!(without_note.contains("CUDA graph") && without_note.contains("2.2"), "{without_note}");
        let no_launch = refused(&[computing.replace("cuda_runtime", "x"), sum.clone(), run.clone()]);
        assert!(no_launch.contains("ProfilerActivity.CPU"), "{no_launch}");
        assert!(refused(&[sum.clone(), run.clone()]).contains("a training"));
        let dtype = refused(&[computing.clone(), sum.replace("Float", "ComplexFloat"), run.clone()]);
        assert!(dtype.contains("ComplexFloat"), "{dtype}");
        let group = [collective(22, 40.0, "allreduce", 10, "tensor"), nccl(22, 700.0, 1.0)];
        let groups = refused(&[&[computing.clone(), sum.clone(), run.clone()], &group[..]].concat());
        assert!(groups.contains("\"0\"") && groups.contains("\"tensor\""), "{groups}");
        let with_id = |event: &String| event.replace("Process Group Name\":\"0\"", "Process Group ID\":0");
        let other = [
            with_id(&group[0]).replace("Process Group Name\":\"tensor\"", "Process Group ID\":3"),
            group[1].clone(),
        ];
        let ids = refused(&[&[computing.clone(), with_id(&sum), run.clone()], &other[..]].concat());
        assert!(ids.contains("(0, 3)"), "{ids}");
        // A sum that was under way as the profile began.
        let before = nccl(9, 2.0, 3.0);
        assert_eq!(read(&[computing, before, sum, run]).expect("one sum").len(), 1);
    }
}
