//! Execution traces of MLCommons Chakra (`*.et`): a rank's work as a graph.
//!
//! Numbers of fields and kinds are those of Chakra's `schema/protobuf/et_def.proto`. The schema has
//! start times, and Chakra's converter writes none. So the graph is played as that converter
//! simulates it: the host and each stream do a node at a time, and sums follow each other. A step
//! ends where computing waits for its sums. So one step is enough, and the times of sums do not count.
//!
//! Absent are nodes that have no durations, remote memory, and the links of several dimensions.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};
use std::path::Path;

use anyhow::{Context, anyhow, bail, ensure};
use prost::Message;

use super::{Asked, GZIP, Others};

/// The sums of a rank.
pub(in crate::step) enum Trace {
    /// By their start times, in their order.
    Timed(Vec<Asked>),
    /// By step, in microseconds from the beginning of the graph.
    Steps(Vec<Vec<Asked>>),
}

/// The file's first message.
#[derive(Clone, PartialEq, Message)]
struct GlobalMetadata {
    #[prost(string, tag = "1")]
    version: String,
}

#[derive(Clone, PartialEq, Message)]
struct Node {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(string, tag = "2")]
    name: String,
    #[prost(enumeration = "NodeType", tag = "3")]
    r#type: i32,
    /// When it runs. `ctrl_deps` (4) are the calls that it was made in, and do not say that.
    #[prost(uint64, repeated, tag = "5")]
    data_deps: Vec<u64>,
    #[prost(uint64, tag = "6")]
    start_time_micros: u64,
    #[prost(uint64, tag = "7")]
    duration_micros: u64,
    #[prost(message, repeated, tag = "10")]
    attr: Vec<Attribute>,
}

/// The values that are read, of those that an attribute may have.
#[derive(Clone, PartialEq, Message)]
struct Attribute {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(int32, optional, tag = "7")]
    int32_val: Option<i32>,
    #[prost(int64, optional, tag = "9")]
    int64_val: Option<i64>,
    #[prost(uint32, optional, tag = "11")]
    uint32_val: Option<u32>,
    #[prost(uint64, optional, tag = "13")]
    uint64_val: Option<u64>,
    #[prost(bool, optional, tag = "27")]
    bool_val: Option<bool>,
    #[prost(message, optional, tag = "28")]
    bool_list: Option<BoolList>,
    #[prost(string, optional, tag = "29")]
    string_val: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct BoolList {
    #[prost(bool, repeated, tag = "1")]
    values: Vec<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, prost::Enumeration)]
enum NodeType {
    Invalid = 0,
    Metadata = 1,
    MemLoad = 2,
    MemStore = 3,
    Comp = 4,
    CommSend = 5,
    CommRecv = 6,
    CommColl = 7,
}

/// `CollectiveCommType`, in its order.
const COLLECTIVES: [&str; 10] = [
    "all-reduce",
    "reduce",
    "all-gather",
    "gather",
    "scatter",
    "broadcast",
    "all-to-all",
    "reduce-scatter",
    "reduce-scatter-block",
    "barrier",
];

/// Does a node at a time.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
enum Place {
    Host,
    /// With the number of the stream.
    Device(i64),
    Network,
}

/// A node in the graph.
struct Work {
    place: Place,
    duration: f64,
    /// Indices.
    after: Vec<usize>,
    /// If it is a sum: its bytes.
    sum: Option<usize>,
}

/// When a node is played.
#[derive(Clone, Copy, Default)]
struct Played {
    /// When all that it waits for is done, except sums before it.
    ready: f64,
    end: f64,
    /// How often computing waited for sums on the way to it.
    step: usize,
    /// Whether a device computed something on the way to it.
    computed: bool,
}

pub(crate) fn is_chakra(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "et")
}

pub(in crate::step) fn read(path: &Path) -> anyhow::Result<Trace> {
    let name = path.display();
    let content = std::fs::read(path).with_context(|| format!("cannot read the trace {name}"))?;
    ensure!(!content.starts_with(&GZIP), "{name} is compressed: unpack it with gunzip");
    let nodes =
        decode(&content).with_context(|| format!("{name} is no execution trace of Chakra (et_def.proto)"))?;
    of_nodes(&nodes).with_context(|| format!("in {name}"))
}

/// Messages with their lengths before them.
fn decode(mut content: &[u8]) -> anyhow::Result<Vec<Node>> {
    GlobalMetadata::decode_length_delimited(&mut content)?;
    let mut nodes = Vec::new();
    while !content.is_empty() {
        let node = Node::decode_length_delimited(&mut content);
        nodes.push(node.with_context(|| format!("node {} of the file", nodes.len()))?);
    }
    Ok(nodes)
}

fn of_nodes(nodes: &[Node]) -> anyhow::Result<Trace> {
    let works = nodes.iter().map(|node| node.work().with_context(|| node.shown()));
    let mut works = works.collect::<anyhow::Result<Vec<Work>>>()?;
    let sums: Vec<usize> = (0..works.len()).filter(|at| works[*at].sum.is_some()).collect();
    ensure!(
        !sums.is_empty(),
        "it has no all-reduce, which is a COMM_COLL_NODE with the attributes comm_type = 0 and comm_size"
    );
    check_network(nodes, &sums)?;
    if sums.iter().all(|at| nodes[*at].start_time_micros > 0) {
        let mut asked: Vec<Asked> = sums
            .iter()
            .map(|at| Asked {
                bytes: works[*at].sum.unwrap_or_default(),
                submitted: nodes[*at].start_time_micros as f64,
                done: nodes[*at].start_time_micros as f64 + works[*at].duration,
            })
            .collect();
        asked.sort_by(|a, b| a.submitted.total_cmp(&b.submitted));
        return Ok(Trace::Timed(asked));
    }
    let index: HashMap<u64, usize> = nodes.iter().enumerate().map(|(at, node)| (node.id, at)).collect();
    ensure!(index.len() == nodes.len(), "nodes share an id");
    for (node, work) in nodes.iter().zip(&mut works) {
        let known = |id: &u64| {
            let found = index.get(id).copied();
            found.ok_or_else(|| anyhow!("{} waits for node {id}, which is not there", node.shown()))
        };
        work.after = node.data_deps.iter().map(known).collect::<Result<_, _>>()?;
    }
    let played = play(nodes, &works)?;
    let on_device = |at: &usize| matches!(works[*at].place, Place::Device(_)) && works[*at].duration > 0.0;
    let computes = (0..works.len()).any(|at| on_device(&at));
    ensure!(
        computes || works.iter().any(|work| work.place == Place::Host && work.duration > 0.0),
        "its nodes have no durations (duration_micros), and its sums no start times: give a trace that has them"
    );
    if let Some(at) = sums.iter().find(|at| computes && !played[**at].computed) {
        bail!(
            "{} waits for no computing on a device, as chakra_converter leaves out the edges from kernels to NCCL: \
             give PyTorch's profile of the same run itself",
            nodes[*at].shown()
        );
    }
    let mut steps: BTreeMap<usize, Vec<Asked>> = BTreeMap::new();
    for at in sums {
        let Played { ready, end, step, .. } = played[at];
        let bytes = works[at].sum.unwrap_or_default();
        steps.entry(step).or_default().push(Asked { bytes, submitted: ready, done: end });
    }
    let mut steps: Vec<Vec<Asked>> = steps.into_values().collect();
    steps.iter_mut().for_each(|step| step.sort_by(|a, b| a.submitted.total_cmp(&b.submitted)));
    Ok(Trace::Steps(steps))
}

/// Refuses several process groups, and what is no data-parallel training.
fn check_network(nodes: &[Node], sums: &[usize]) -> anyhow::Result<()> {
    let groups: BTreeSet<String> = sums.iter().map(|at| nodes[*at].group()).collect();
    ensure!(
        groups.len() == 1,
        "it has sums of several process groups (pg_name or involved_dim {}): only data-parallel trainings are \
         understood, with one group",
        groups.into_iter().collect::<Vec<_>>().join(", ")
    );
    let mut others = Others::default();
    for node in nodes.iter().filter(|node| !node.is_on_host()) {
        match node.r#type() {
            NodeType::CommColl => match node.collective()? {
                "all-reduce" | "barrier" => {}
                other => others.add(other, node.bytes()?),
            },
            NodeType::CommSend | NodeType::CommRecv => others.add("send and receive", node.bytes()?),
            _ => {}
        }
    }
    let summed = sums.iter().map(|at| Ok(Asked { bytes: nodes[*at].bytes()?, submitted: 0.0, done: 0.0 }));
    others.check(&summed.collect::<anyhow::Result<Vec<_>>>()?)
}

/// Plays all nodes. A place takes them in the order in which they can begin, and then by their order
/// in the file.
fn play(nodes: &[Node], works: &[Work]) -> anyhow::Result<Vec<Played>> {
    let mut then = vec![Vec::new(); works.len()];
    let mut waits: Vec<usize> = works.iter().map(|work| work.after.len()).collect();
    for (at, work) in works.iter().enumerate() {
        work.after.iter().for_each(|before| then[*before].push(at));
    }
    let mut played = vec![Played::default(); works.len()];
    let mut free: HashMap<Place, f64> = HashMap::new();
    // Times are whole microseconds, which u64 orders.
    let mut able: BinaryHeap<Reverse<(u64, usize)>> =
        (0..works.len()).filter(|at| waits[*at] == 0).map(|at| Reverse((0, at))).collect();
    let mut count = 0;
    while let Some(Reverse((able_at, at))) = able.pop() {
        count += 1;
        let work = &works[at];
        let mut now = Played {
            computed: matches!(work.place, Place::Device(_)) && work.duration > 0.0,
            ..Played::default()
        };
        for before in &work.after {
            let (is_sum, before) = (works[*before].sum.is_some(), &played[*before]);
            now.ready = now.ready.max(if is_sum && work.sum.is_some() { before.ready } else { before.end });
            now.step = now.step.max(before.step + usize::from(is_sum && work.sum.is_none()));
            now.computed |= before.computed;
        }
        let free = free.entry(work.place).or_insert(0.0);
        now.end = free.max(able_at as f64) + work.duration;
        *free = now.end;
        played[at] = now;
        for next in &then[at] {
            waits[*next] -= 1;
            if waits[*next] == 0 {
                let able_at = works[*next].after.iter().map(|before| played[*before].end);
                able.push(Reverse((able_at.fold(0.0, f64::max) as u64, *next)));
            }
        }
    }
    if let Some(at) = (0..works.len()).find(|at| count < works.len() && waits[*at] > 0) {
        bail!("{} waits for itself, by way of data_deps", nodes[at].shown());
    }
    Ok(played)
}

impl Node {
    fn shown(&self) -> String {
        format!("node {} ({})", self.id, self.name)
    }

    fn work(&self) -> anyhow::Result<Work> {
        let (duration, after) = (self.duration_micros as f64, Vec::new());
        let place = match self.r#type() {
            NodeType::MemLoad | NodeType::MemStore => {
                bail!("it is remote memory, which is not understood: give a trace without such nodes")
            }
            NodeType::Comp if self.duration_micros == 0 && self.number("num_ops").is_some() => bail!(
                "it has operations (num_ops) and no duration: give a trace with durations, such as one that was recorded"
            ),
            _ if self.is_on_host() => Place::Host,
            NodeType::CommSend | NodeType::CommRecv | NodeType::CommColl => Place::Network,
            _ => Place::Device(self.number("stream").unwrap_or(0)),
        };
        let is_sum = place == Place::Network
            && self.r#type() == NodeType::CommColl
            && self.collective()? == "all-reduce";
        let sum = if is_sum { Some(self.bytes()?) } else { None };
        Ok(Work { place, duration, after, sum })
    }

    /// A node without the attribute is on a device, as for Chakra's own reader (`et_feeder_node.cpp`).
    fn is_on_host(&self) -> bool {
        self.attribute("is_cpu_op").and_then(|attribute| attribute.bool_val).unwrap_or(false)
    }

    fn collective(&self) -> anyhow::Result<&'static str> {
        let number =
            self.number("comm_type").context("it is a collective without the attribute comm_type")?;
        let name = usize::try_from(number).ok().and_then(|number| COLLECTIVES.get(number));
        name.copied().with_context(|| format!("its comm_type is {number}, which et_def.proto does not have"))
    }

    fn bytes(&self) -> anyhow::Result<usize> {
        let bytes = self.number("comm_size").or_else(|| self.number("tensor_size"));
        let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
        bytes.with_context(|| format!("{} has no length (comm_size)", self.shown()))
    }

    /// The ranks that it is among.
    fn group(&self) -> String {
        let name = self.attribute("pg_name").and_then(|attribute| attribute.string_val.as_deref());
        let dimensions = self.attribute("involved_dim").and_then(|attribute| attribute.bool_list.as_ref());
        match (name, dimensions) {
            (None, Some(dimensions)) => format!("{:?}", dimensions.values),
            (name, _) => format!("{:?}", name.unwrap_or_default()),
        }
    }

    fn number(&self, name: &str) -> Option<i64> {
        let attribute = self.attribute(name)?;
        attribute
            .int64_val
            .or_else(|| attribute.int32_val.map(i64::from))
            .or_else(|| attribute.uint32_val.map(i64::from))
            .or_else(|| attribute.uint64_val.and_then(|value| value.try_into().ok()))
    }

    fn attribute(&self, name: &str) -> Option<&Attribute> {
        self.attr.iter().find(|attribute| attribute.name == name)
    }
}

#[cfg(test)]
#[path = "chakra/tests.rs"]
mod tests;
