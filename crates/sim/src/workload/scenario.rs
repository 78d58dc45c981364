//! The parts of a run, resolved and checked: nodes instead of names, machines' own types instead of
//! words.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use fanin_wire::{Dtype, NATIVE_ELEMENTS_MAX, WireDtype};

use super::models::{Layer, Model};
use super::parameter_server::ParameterServerPlan;
use super::schedule::Schedule;
use super::transport::TransportPlan;
use super::unlike::{Lateness, Rates};
use crate::net::{Class, LinkId, Multipath, NodeId, PortId, Topology};
use crate::systems::System;

/// A network, the jobs on it, and what goes wrong.
#[derive(Clone)]
pub struct Scenario {
    /// What it shows.
    pub title: String,
    /// When to stop at the latest.
    pub until: Duration,
    /// Interval of the time series.
    pub interval: Duration,
    /// The throughputs leave out what happens before.
    pub warm_up: Duration,
    /// A job whose workers wait, and to whom nothing comes for this long, has stalled.
    pub stall: Duration,
    /// Nodes and links.
    pub topology: Topology,
    /// Choice among equally short paths.
    pub multipath: Multipath,
    /// The programmable switches.
    pub switch: SwitchPlan,
    /// The jobs.
    pub jobs: Vec<JobPlan>,
    /// Flows of training with parameter servers.
    pub parameter_servers: Vec<ParameterServerPlan>,
    /// Flows that are no job's.
    pub background: Vec<BackgroundPlan>,
    /// The effects of single links on packets.
    pub losses: Vec<LossPlan>,
    /// What happens once.
    pub faults: Vec<FaultPlan>,
}

impl fmt::Debug for Scenario {
    /// All but what a node's queues are like, unless they differ.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |node: NodeId| format!("{} ({})", self.topology.get(node).name, node.0);
        let switches: Vec<String> = self.topology.switches().map(name).collect();
        let programmable: Vec<String> = self.topology.programmable().map(name).collect();
        let hosts: Vec<String> = self.topology.hosts().map(name).collect();
        let switch = self.topology.switches().next().map(|node| self.topology.get(node).config);
        let host = self.topology.hosts().next().map(|node| self.topology.get(node).config);
        let host = host.map(|config| (config.queues[0].limit_bytes, config.sends, config.receives));
        f.debug_struct("Scenario")
            .field("title", &self.title)
            .field("until", &self.until)
            .field("stall", &self.stall)
            .field("hosts", &hosts.join(" "))
            .field("switches", &switches.join(" "))
            .field("programmable", &programmable.join(" "))
            .field("host", &format_args!("{host:?}"))
            .field("link", &format_args!("{:?}", self.topology.links().first().map(|link| link.config)))
            .field("queue", &format_args!("{:?}", switch.map(|config| config.queues[0])))
            .field("multipath", &self.multipath)
            .field("switch", &self.switch)
            .field("jobs", &self.jobs)
            .field("parameter_servers", &self.parameter_servers)
            .field("background", &self.background)
            .field("losses", &format_args!("{:?}", self.losses))
            .field("faults", &self.faults)
            .finish()
    }
}

/// Every programmable switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchPlan {
    /// Aggregators.
    pub aggregators: u32,
    /// In how many of them a fragment of ATP's looks for a place.
    pub ways: u8,
    /// After how long an aggregator that nobody asks for is free again.
    pub stale: Duration,
}

/// One job.
#[derive(Clone, Debug)]
pub struct JobPlan {
    /// For reports.
    pub name: String,
    /// Who sums.
    pub system: Arc<dyn System>,
    /// Hosts by rank.
    pub workers: Vec<NodeId>,
    /// How queues treat its packets.
    pub class: Class,
    /// When its workers begin.
    pub start: Duration,
    /// When they submit nothing more.
    pub stop: Option<Duration>,
    /// What they do.
    pub workload: Workload,
    /// How fast their hosts send.
    pub rates: Rates,
    /// How late each is with every step: a tensor of the micro-benchmark, or an iteration.
    pub lateness: Lateness,
    /// Whether tensors are int32 instead of float32.
    pub integers: bool,
    /// Share of packets whose sum overflows ATP's static factor.
    pub large_values: f64,
    /// Whether packets carry the first few of their elements only, and the others in length alone.
    pub sampled: bool,
}

impl JobPlan {
    const fn dtype(&self) -> Dtype {
        if self.integers { Dtype::Int32 } else { Dtype::Float32 }
    }

    /// How a tensor of so many elements travels.
    pub(crate) fn travels_as(&self, tensor: usize) -> WireDtype {
        self.system.wire_dtype().of_tensor(self.dtype(), tensor)
    }

    /// Elements of a packet of a tensor of so many, and how many of them, the first, are there.
    pub(crate) fn packet(&self, tensor: usize) -> (usize, usize) {
        let whole = self.system.packet_elements();
        let sample = self.system.sample_elements().filter(|_| self.sampled).unwrap_or(whole);
        let of = |elements| self.travels_as(tensor).chunk_elements(elements, self.dtype());
        (of(whole), of(sample))
    }

    /// The payloads of a job whose packets carry samples: of short tensors, and of long ones.
    pub(crate) fn samples(&self) -> [SamplePayload; 2] {
        [0, NATIVE_ELEMENTS_MAX + 1].map(|tensor| {
            let bytes = |elements| self.travels_as(tensor).payload_bytes(elements, self.dtype());
            let (whole, carried) = self.packet(tensor);
            SamplePayload { bytes: bytes(carried), left_out_bytes: (bytes(whole) - bytes(carried)) as u32 }
        })
    }
}

/// The payload of a packet that carries a sample of its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SamplePayload {
    /// Its length.
    pub(crate) bytes: usize,
    /// By how much it would be longer with all of them.
    pub(crate) left_out_bytes: u32,
}

/// The work of a worker.
#[derive(Clone, Debug, PartialEq)]
pub enum Workload {
    /// Tensors of one size, always some under way: the micro-benchmark of ATP §5.1.
    AllReduce {
        /// Elements of each.
        elements: usize,
        /// How many are under way.
        in_flight: u32,
        /// How many in all.
        count: Option<u64>,
    },
    /// Iterations of a model: forward, then backward, whose gradients go out layer by layer from
    /// the last.
    Training {
        /// The model or the layers.
        trained: Trained,
        /// Samples of a worker in an iteration.
        batch: u32,
        /// How many in all.
        iterations: Option<u64>,
        /// The divisor of parameters and times.
        scale: f64,
        /// By how much a worker's times vary: each phase takes up to this share longer or shorter.
        jitter: f64,
        /// An off phase after so many iterations, and its length.
        pause: Option<(u64, Duration)>,
        /// Whether the forward pass of a layer waits for its own parameters alone, and not for
        /// those of all. An asynchronous worker's waits for nothing.
        overlap: bool,
        /// Most elements of a tensor: a longer gradient is several.
        partition: Option<usize>,
        /// In which order the tensors of an iteration are sent.
        order: SendOrder,
    },
}

/// In which order an iteration's gradients are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SendOrder {
    /// As back-propagation makes them.
    Ready,
    /// As the next forward pass needs them, if a byte takes so many seconds: all workers have the
    /// order from the beginning.
    Needed {
        /// The time of a sum, divided by its bytes.
        seconds_a_byte: f64,
    },
}

/// The subject of a training.
#[derive(Clone, Debug, PartialEq)]
pub enum Trained {
    /// A model by its name. The worker does so many floating-point operations in a second.
    Model(Model, f64),
    /// These layers, in the order of the forward pass.
    Layers(Vec<TimedLayer>),
}

/// A layer that says how long it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedLayer {
    /// Parameters, which is also the elements of its gradient.
    pub parameters: u64,
    /// How long its forward pass takes ..
    pub forward: Duration,
    /// .. and its backward pass.
    pub backward: Duration,
}

impl Trained {
    /// Its name in reports.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Model(model, _) => model.name(),
            Self::Layers(_) => "layers",
        }
    }

    /// The name of a sample, for reports.
    #[must_use]
    pub const fn sample(&self) -> &'static str {
        match self {
            Self::Model(model, _) => model.sample(),
            Self::Layers(_) => "samples",
        }
    }

    /// Its layers, in the order of the forward pass, for so many samples.
    #[must_use]
    pub fn layers(&self, batch: u32) -> Vec<TimedLayer> {
        match self {
            Self::Model(model, flops_per_s) => {
                let timed = |layer: Layer| TimedLayer {
                    parameters: layer.parameters,
                    forward: layer.forward(batch, *flops_per_s),
                    backward: layer.backward(batch, *flops_per_s),
                };
                model.layers().into_iter().map(timed).collect()
            }
            Self::Layers(layers) => layers.clone(),
        }
    }
}

impl Workload {
    /// Packets of so many elements that an iteration has, or a tensor of the micro-benchmark: the
    /// model, again and again.
    pub(crate) fn packets(&self, elements: usize) -> u64 {
        let tensors = Schedule::new(self).iteration();
        tensors.into_iter().map(|tensor| tensor.div_ceil(elements) as u64).sum()
    }
}

/// A flow beside the jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackgroundPlan {
    /// Sender.
    pub from: NodeId,
    /// Receiver.
    pub to: NodeId,
    /// Bits a second of a constant flow; none is TCP-like.
    pub rate_bps: Option<u64>,
    /// How it is sent; of a constant flow only whether its packets may be marked.
    pub transport: TransportPlan,
    /// How queues treat its packets.
    pub class: Class,
    /// When it begins.
    pub start: Duration,
    /// When it ends.
    pub stop: Option<Duration>,
    /// Bytes of a TCP-like flow; without end unless given.
    pub size: Option<u64>,
    /// So many flows, one after the other has begun ..
    pub count: u32,
    /// .. by this time.
    pub every: Duration,
    /// Each begins later than that by up to so much, as the seed draws it.
    pub spread: Duration,
}

/// The effects of one direction of a link on packets.
#[derive(Clone, Debug, PartialEq)]
pub struct LossPlan {
    /// The direction.
    pub port: PortId,
    /// Chance that a packet is lost; in the bad state only, if there are bursts.
    pub loss: f64,
    /// The same outside of bursts, if there are bursts.
    pub loss_between: f64,
    /// Chances to get into a burst, and out of it.
    pub burst: Option<(f64, f64)>,
    /// Packets that are lost, instead of chances.
    pub target: Option<Target>,
    /// Chance that a packet arrives twice.
    pub duplication: f64,
    /// Chance that one is held back.
    pub reordering: f64,
    /// For how long at most.
    pub held_back: Duration,
}

/// The kinds of TCP's packets.
pub(crate) const TCP_KINDS: [&str; 2] = ["segment", "acknowledgement"];

/// Packets that a link loses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Packets of this kind only: of TCP's, or of a system's ([`System::packet_kinds`]).
    pub kind: Option<String>,
    /// Which of these.
    pub which: Which,
}

/// Which of the packets that are counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Which {
    /// All.
    All,
    /// The packets of these numbers; the first is 0.
    Nth(Vec<u64>),
    /// The last of each so many.
    Every(u64),
}

/// Something that happens once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultPlan {
    /// When.
    pub at: Duration,
    /// What.
    pub fault: Fault,
}

/// What can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A link is away for a while.
    LinkFails(LinkId, Duration),
    /// A node is away for a while; a switch comes back with empty aggregators.
    NodeFails(NodeId, Duration),
    /// A switch loses its aggregators.
    SwitchForgets(NodeId),
    /// A job's server is away for a while and comes back without its memory.
    ServerRestarts(usize, Duration),
    /// A worker is away for a while, and another takes its rank.
    WorkerRespawns(usize, u16, Duration),
    /// The service on a host dies for good, for all jobs that it sums: others take over.
    ServiceDies(NodeId),
    /// All machines of a job vanish.
    JobDies(usize),
}
