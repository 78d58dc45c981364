//! Files of recorded trainings: fanin's own timelines (FANIN_TRACE), PyTorch's profiles of Gloo and of
//! NCCL (`nccl.rs`), and Chakra's execution traces (`chakra.rs`). A training that is profiled needs no
//! fanin.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail, ensure};
use fanin_wire::Dtype;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

pub(crate) mod chakra;
mod nccl;

/// A sum of one rank, in microseconds of its clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Asked {
    pub bytes: usize,
    pub submitted: f64,
    pub done: f64,
}

/// By job, rank and number.
type Jobs = BTreeMap<String, BTreeMap<u64, BTreeMap<u64, Asked>>>;

/// The sums in the events of a rank's timeline, by job and number.
pub(crate) fn sums_of_timeline(events: &[Value]) -> anyhow::Result<BTreeMap<(String, u64), Asked>> {
    let events = events.iter().map(Event::deserialize).collect::<Result<_, _>>();
    let mut jobs = Jobs::new();
    of_timeline(events.context("it is no timeline")?, &mut jobs)?;
    let of_job = |(job, ranks): (String, BTreeMap<u64, BTreeMap<u64, Asked>>)| {
        let sums = ranks.into_values().flatten();
        sums.map(move |(number, asked)| ((job.clone(), number), asked))
    };
    Ok(jobs.into_iter().flat_map(of_job).collect())
}

#[derive(Deserialize)]
#[serde(untagged)]
enum File {
    /// FANIN_TRACE's: the events alone.
    Timeline(Vec<Event>),
    Profile(Profile),
    Untimed(Untimed),
}

#[derive(Deserialize)]
struct Event {
    #[serde(default)]
    ph: String,
    #[serde(default)]
    name: String,
    /// In a profile: what it is an event of.
    #[serde(default)]
    cat: String,
    /// A number, except in what PyTorch's profiler says of itself.
    #[serde(default)]
    pid: Value,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: Value,
}

/// `torch.profiler.profile`'s, by `export_chrome_trace`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Profile {
    trace_events: Vec<Event>,
    #[serde(default)]
    distributed_info: DistributedInfo,
}

/// PyTorch's own execution trace, by `torch.profiler.ExecutionTraceObserver`.
#[derive(Deserialize)]
struct Untimed {
    schema: String,
    #[serde(rename = "nodes")]
    _nodes: Vec<IgnoredAny>,
}

#[derive(Default, Deserialize)]
struct DistributedInfo {
    #[serde(default)]
    rank: u64,
}

/// The arguments of a slice in FANIN_TRACE's timelines.
#[derive(Deserialize)]
struct AllReduce {
    number: u64,
    job: String,
    elements: usize,
    dtype: String,
    error: Option<String>,
}

/// The arguments of a sum in a profile, if shapes are recorded.
#[derive(Deserialize)]
struct Shapes {
    #[serde(rename = "Input Dims")]
    dims: Value,
    #[serde(rename = "Input type")]
    types: Vec<String>,
}

/// A file of gzip begins with it (RFC 1952, section 2.3.1).
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// The profiler's name for a sum by Gloo, from its submission to its end.
const GLOO: &str = "gloo:all_reduce";

/// The part of the sums' bytes that other collectives may carry.
const OTHERS_MAX: f64 = 0.01;

/// Bytes of collectives that are no sums, by name.
#[derive(Default)]
struct Others(BTreeMap<String, usize>);

/// The job that sums most, and the sums of each of its ranks, in their order.
pub(super) fn read(paths: &[PathBuf]) -> anyhow::Result<(String, Vec<Vec<Asked>>)> {
    let mut jobs = Jobs::new();
    for path in paths {
        read_one(path, &mut jobs)?;
    }
    let bytes = |ranks: &BTreeMap<u64, BTreeMap<u64, Asked>>| {
        ranks.values().flat_map(BTreeMap::values).map(|asked| asked.bytes).sum::<usize>()
    };
    let Some((job, ranks)) = jobs.into_iter().max_by_key(|(_, ranks)| bytes(ranks)) else {
        bail!(
            "no all-reduce that came out well is in the trace: FANIN_TRACE=trace.json writes one of a training on fanin, \
             and torch.profiler.profile(record_shapes=True) one of a training on Gloo or NCCL"
        );
    };
    Ok((job, ranks.into_values().map(|sums| sums.into_values().collect()).collect()))
}

fn read_one(path: &Path, jobs: &mut Jobs) -> anyhow::Result<()> {
    let name = path.display();
    let content = std::fs::read(path).with_context(|| format!("cannot read the trace {name}"))?;
    ensure!(!content.starts_with(&GZIP), "{name} is compressed: unpack it with gunzip");
    let file = serde_json::from_slice(&content)
        .with_context(|| format!("{name} is no timeline, such as FANIN_TRACE=trace.json writes"))?;
    match file {
        File::Timeline(events) => of_timeline(events, jobs),
        File::Profile(profile) => of_profile(profile, jobs),
        File::Untimed(Untimed { schema, .. }) => Err(anyhow!(
            "it is an execution trace of PyTorch ({schema}), which has no times: give the profile of the same run, \
             which torch.profiler.profile(record_shapes=True) exports with export_chrome_trace"
        )),
    }
    .with_context(|| format!("in {name}"))
}

fn of_timeline(events: Vec<Event>, jobs: &mut Jobs) -> anyhow::Result<()> {
    for Event { ph, name: slice, pid, ts, dur, args, .. } in events {
        if ph != "X" || !slice.starts_with("all-reduce ") {
            continue;
        }
        let sum: AllReduce = serde_json::from_value(args)
            .with_context(|| format!("{slice} has not what FANIN_TRACE writes of it"))?;
        if sum.error.is_some() {
            continue;
        }
        let dtype = Dtype::ALL.into_iter().find(|dtype| dtype.name() == sum.dtype);
        let dtype = dtype.with_context(|| format!("{slice} has the dtype {:?}", sum.dtype))?;
        let asked = Asked { bytes: sum.elements * dtype.element_bytes(), submitted: ts, done: ts + dur };
        let rank = pid.as_u64().with_context(|| format!("{slice} has no rank as its pid"))?;
        // A shard has a slice of its own.
        let of_rank = jobs.entry(format!("job {:?}", sum.job)).or_default().entry(rank).or_default();
        let known = of_rank.entry(sum.number).or_insert(asked);
        known.submitted = known.submitted.min(asked.submitted);
        known.done = known.done.max(asked.done);
    }
    Ok(())
}

fn of_profile(profile: Profile, jobs: &mut Jobs) -> anyhow::Result<()> {
    let mut events = profile.trace_events;
    if nccl::is_in(&events) {
        let sums = nccl::sums(&events)?;
        if !sums.is_empty() {
            let ranks = jobs.entry("a training on NCCL".to_owned()).or_default();
            let rank = profile.distributed_info.rank;
            let twice = ranks.insert(rank, (0..).zip(sums).collect()).is_some();
            ensure!(
                !twice,
                "another profile is of rank {rank}, too: give each rank's own profile, of one run"
            );
        }
        return Ok(());
    }
    events.retain(|event| event.name == GLOO);
    if events.is_empty() {
        return Ok(());
    }
    events.sort_by(|a, b| a.ts.total_cmp(&b.ts));
    let of_rank = jobs
        .entry("a training on Gloo".to_owned())
        .or_default()
        .entry(profile.distributed_info.rank)
        .or_default();
    for (number, event) in events.into_iter().enumerate() {
        let shapes: Shapes = serde_json::from_value(event.args)
            .context("its sums have no lengths: record with torch.profiler.profile(record_shapes=True)")?;
        let types: Option<Vec<usize>> = shapes.types.iter().map(|name| element_bytes(name)).collect();
        let types = types.with_context(|| format!("a sum has the types {:?}", shapes.types))?;
        let lengths: Vec<usize> = shapes.dims.as_array().into_iter().flatten().map(elements).collect();
        ensure!(lengths.len() == types.len(), "a sum has {} types of {} tensors", types.len(), lengths.len());
        let bytes = lengths.iter().zip(&types).map(|(elements, bytes)| elements * bytes).sum();
        let asked = Asked { bytes, submitted: event.ts, done: event.ts + event.dur };
        of_rank.insert(number as u64, asked);
    }
    Ok(())
}

impl Others {
    fn add(&mut self, name: &str, bytes: usize) {
        *self.0.entry(name.to_owned()).or_insert(0) += bytes;
    }

    /// Refuses a training whose network carries more than sums. DDP broadcasts buffers, and barriers
    /// carry nothing.
    fn check(&self, sums: &[Asked]) -> anyhow::Result<()> {
        let summed: usize = sums.iter().map(|sum| sum.bytes).sum();
        let more = |(name, bytes): &(&String, &usize)| {
            !matches!(&name[..], "broadcast" | "barrier") && **bytes as f64 > OTHERS_MAX * summed as f64
        };
        if let Some((name, bytes)) = self.0.iter().find(more) {
            bail!(
                "its ranks exchange {bytes} bytes by {name}, and {summed} by all-reduce: only data-parallel trainings \
                 are understood, which all-reduce their gradients, such as DistributedDataParallel's"
            );
        }
        Ok(())
    }
}

/// A type's length by its C++ name.
fn element_bytes(name: &str) -> Option<usize> {
    Some(match name {
        "double" | "long int" | "long" => 8,
        "float" | "int" => 4,
        "c10::Half" | "c10::BFloat16" | "short" => 2,
        "signed char" | "unsigned char" | "bool" => 1,
        _ => return None,
    })
}

/// The elements of a tensor by its dimensions.
fn elements(dims: &Value) -> usize {
    dims.as_array().into_iter().flatten().map(|length| length.as_u64().unwrap_or(0) as usize).product()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(events: &str) -> anyhow::Result<(String, Vec<Vec<Asked>>)> {
        let file = tempfile::NamedTempFile::with_suffix(".json").expect("a file");
        std::fs::write(&file, format!(r#"{{"schemaVersion":1,"distributedInfo":{{"backend":"gloo","rank":1}},"traceEvents":[{events}]}}"#))
            .expect("written");
        read(&[file.path().to_owned()])
    }

    fn sum(ts: f64, args: &str) -> String {
        format!(
            r#"{{"ph":"X","cat":"user_annotation","name":"gloo:all_reduce","pid":7,"tid":9,"ts":{ts},"dur":5.5,"args":{{{args}}}}}"#
        )
    }

    const METADATA: &str =
        r#"{"name":"process_labels","ph":"M","ts":0.0,"pid":"Spans","tid":0,"args":{"labels":"x"}}"#;

    #[test]
    fn sums_by_gloo_are_read_from_what_pytorchs_profiler_writes() {
        let later = sum(20.0, r#""Input Dims":[[3,5]],"Input type":["c10::BFloat16"]"#);
        let first = sum(10.0, r#""Input Dims":[[1000]],"Input type":["float"]"#);
        let (job, ranks) = profile(&[METADATA, &later, &first].join(",")).expect("sums");
        assert_eq!(job, "a training on Gloo");
        let asked = |bytes, submitted| Asked { bytes, submitted, done: submitted + 5.5 };
        assert_eq!(ranks, [[asked(4000, 10.0), asked(30, 20.0)]]);
    }

    #[test]
    fn a_profile_that_lacks_something_is_told_with_the_cure() {
        let refused = |events: &str| format!("{:#}", profile(events).expect_err("no sums"));
        assert!(refused(METADATA).contains("record_shapes=True"));
        assert!(refused(&sum(1.0, "")).contains("record_shapes=True"));
        let unknown = sum(1.0, r#""Input Dims":[[1]],"Input type":["c10::complex<float>"]"#);
        assert!(refused(&unknown).contains("complex"), "{}", refused(&unknown));
    }

    #[test]
    fn files_that_have_no_times_or_are_compressed_are_told_with_the_cure() {
        let refused = |content: &[u8]| {
            let file = tempfile::NamedTempFile::with_suffix(".json").expect("a file");
            std::fs::write(&file, content).expect("written");
            format!("{:#}", read(&[file.path().to_owned()]).expect_err("no sums"))
        };
        let observed = refused(
            br#"{"schema":"1.1.1-chakra.0.0.4","pid":1,"time":"","start_ts":1,"nodes":[{"id":2,"name":"aten::add","ctrl_deps":1}]}"#,
        );
        assert!(
            observed.contains("1.1.1-chakra.0.0.4") && observed.contains("export_chrome_trace"),
            "{observed}"
        );
        assert!(refused(&[0x1f, 0x8b, 8, 0]).contains("gunzip"));
    }

    #[test]
    fn ranks_on_nccl_are_told_apart_by_the_profile() {
        let of_rank = |rank: u64| {
            let file = tempfile::NamedTempFile::with_suffix(".json").expect("a file");
            let events = r#"{"ph":"X","cat":"cuda_runtime","name":"cudaLaunchKernel","ts":1.0,"dur":1.0,"args":{"correlation":1}},
                {"ph":"X","cat":"kernel","name":"gemm","ts":5.0,"dur":45.0,"args":{"device":0,"stream":7,"correlation":1}},
                {"ph":"X","cat":"cpu_op","name":"record_param_comms","ts":9.0,"dur":1.0,"args":{"External id":2,"Process Group Name":"0","In msg nelems":25,"dtype":"Half","Collective name":"allreduce"}},
                {"ph":"X","cat":"kernel","name":"ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)","ts":70.0,"dur":8.0,"args":{"External id":2,"device":0,"stream":20,"correlation":3}}"#;
            let text = format!(
                r#"{{"schemaVersion":1,"distributedInfo":{{"backend":"nccl","rank":{rank}}},"traceEvents":[{events}]}}"#
            );
            std::fs::write(&file, text).expect("written");
            file
        };
        let files = [of_rank(1), of_rank(0)];
        let (job, ranks) = read(&files.each_ref().map(|file| file.path().to_owned())).expect("sums");
        assert_eq!(job, "a training on NCCL");
        assert_eq!(ranks, [[Asked { bytes: 50, submitted: 50.0, done: 78.0 }]; 2]);
    }
}
