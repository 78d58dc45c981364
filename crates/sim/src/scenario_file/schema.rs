//! The keys of a scenario file: what each means, in which unit, and what it is unless given.

use serde::{Deserialize, Deserializer};
use toml::Spanned;

use crate::systems::dlcp::PushKeys;
use crate::workload::Draw;
use fanin_units::{CoreTime, Rate, Share, Size, Time};

/// A whole file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    /// The point of the scenario, for reports.
    #[serde(default)]
    pub(super) title: String,
    /// When to stop at the latest.
    #[serde(default = "defaults::until")]
    pub(super) until: Spanned<Time>,
    /// Length of an interval of the time series.
    #[serde(default = "defaults::interval")]
    pub(super) interval: Spanned<Time>,
    /// The throughputs leave out what happens before.
    #[serde(default = "defaults::zero")]
    pub(super) warm_up: Time,
    /// A job whose workers wait and to whom nothing comes for this long has stalled, which is a
    /// violation.
    pub(super) stall: Option<Time>,
    #[serde(default = "defaults::payload")]
    pub(super) payload: Spanned<PayloadName>,
    pub(super) network: Network,
    #[serde(default)]
    pub(super) queue: Vec<Spanned<Queue>>,
    #[serde(default)]
    pub(super) node: Vec<Spanned<Node>>,
    #[serde(default)]
    pub(super) link: Vec<Spanned<Link>>,
    #[serde(default)]
    pub(super) switch: SwitchTable,
    #[serde(default)]
    pub(super) job: Vec<Spanned<Job>>,
    #[serde(default)]
    pub(super) parameter_server: Vec<Spanned<ParameterServer>>,
    #[serde(default)]
    pub(super) background: Vec<Spanned<Background>>,
    #[serde(default)]
    pub(super) loss: Vec<Spanned<Loss>>,
    #[serde(default)]
    pub(super) fault: Vec<Spanned<Fault>>,
}

/// A file of nodes and links alone.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TopologyFile {
    #[serde(default)]
    pub(super) node: Vec<Spanned<Node>>,
    #[serde(default)]
    pub(super) link: Vec<Spanned<Link>>,
}

/// What packets carry.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum PayloadName {
    /// All their elements.
    Full,
    /// The first few of each packet; the rest is there in length alone.
    Sample,
}

/// Shapes of networks.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum TopologyName {
    Rack,
    Dumbbell,
    Figure9,
    LeafSpine,
    FatTree,
    /// None but the file's own nodes and links.
    Own,
}

/// `[network]`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Network {
    pub(super) topology: Spanned<TopologyName>,
    /// The file with more `[[node]]` and `[[link]]` tables, which come before those of this file.
    pub(super) file: Option<Spanned<String>>,
    /// Hosts: of the rack, at each side of the dumbbell, at each leaf or edge switch.
    pub(super) hosts: Option<Spanned<usize>>,
    pub(super) leaves: Option<Spanned<usize>>,
    pub(super) spines: Option<Spanned<usize>>,
    /// Ports of a fat tree's switches.
    pub(super) k: Option<Spanned<usize>>,
    /// The rate of the links to hosts.
    #[serde(default = "defaults::rate")]
    pub(super) rate: Spanned<Rate>,
    /// The rate of the links between switches; as those to hosts unless given.
    pub(super) core_rate: Option<Spanned<Rate>>,
    #[serde(default = "defaults::delay")]
    pub(super) delay: Time,
    pub(super) core_delay: Option<Time>,
    /// Longest IP packet of every link.
    #[serde(default = "defaults::mtu")]
    pub(super) mtu: Spanned<u32>,
    /// The capacity of a switch's queue.
    #[serde(default = "defaults::queue")]
    pub(super) queue: Spanned<Size>,
    /// Queue length from which a switch marks, and a host's NIC.
    pub(super) ecn: Option<Spanned<Size>>,
    /// Whether a port marks by all that waits at it, and not by the packet's own queue.
    #[serde(default)]
    pub(super) ecn_by_port: bool,
    /// Whether NICs mark. A worker that begins hands its NIC a window at once, which is no
    /// congestion.
    #[serde(default = "defaults::yes")]
    pub(super) nic_ecn: bool,
    /// The queues of each port of a switch share this much memory.
    pub(super) port_buffer: Option<Spanned<Size>>,
    /// A switch's queues share this much memory.
    pub(super) shared_buffer: Option<Spanned<Size>>,
    /// How much of what is free of it one queue may take.
    #[serde(default = "defaults::alpha")]
    pub(super) alpha: Spanned<f64>,
    #[serde(default)]
    pub(super) routing: RoutingName,
    /// Which packet of a queue goes next, at switches and NICs.
    #[serde(default)]
    pub(super) order: OrderName,
    /// DLCP's queues at switches.
    pub(super) selective_dropping: Option<Spanned<SelectiveDropping>>,
    /// The cost to one of its cores of a packet that a host sends or receives ..
    #[serde(default)]
    pub(super) host_packet_cost: CoreTime,
    /// .. and each byte of it.
    #[serde(default)]
    pub(super) host_byte_cost: CoreTime,
    /// How many cores send, and how many receive.
    pub(super) host_cores: Option<Spanned<u16>>,
}

/// `[[queue]]`: what differs in some of a switch's queues, at each of its ports.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Queue {
    /// Which of the eight; all unless given.
    pub(super) priority: Option<Spanned<u8>>,
    /// What it holds.
    pub(super) limit: Option<Spanned<Size>>,
    /// The length from which it marks.
    pub(super) ecn: Option<Spanned<Size>>,
    /// Packets of this class ..
    pub(super) drop_class: Option<Spanned<u8>>,
    /// .. are dropped when they would make it longer than this.
    pub(super) drop_above: Option<Spanned<Size>>,
}

/// `[[node]]`: what differs at some nodes; with a `kind`, nodes of an own topology.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Node {
    /// Its name; of nodes that are there, also a pattern in which `*` stands for anything.
    pub(super) name: Spanned<String>,
    pub(super) kind: Option<Spanned<NodeKindName>>,
    /// So many of the kind, with their numbers from 0 on behind the name.
    pub(super) count: Option<Spanned<usize>>,
    /// The layer of a switch; 0 is next to the hosts.
    pub(super) layer: Option<Spanned<u8>>,
    /// The capacity of each of its queues.
    pub(super) queue: Option<Spanned<Size>>,
    /// The length from which they mark.
    pub(super) ecn: Option<Spanned<Size>>,
    /// The queues of each of its ports share this much memory.
    pub(super) port_buffer: Option<Spanned<Size>>,
    /// All its queues share this much memory.
    pub(super) shared_buffer: Option<Spanned<Size>>,
    pub(super) alpha: Option<Spanned<f64>>,
    /// The cost of a packet for a host both ways, and for a switch's machines that receive it ..
    pub(super) packet_cost: Option<CoreTime>,
    /// .. and each byte of it.
    pub(super) byte_cost: Option<CoreTime>,
    pub(super) cores: Option<Spanned<u16>>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum NodeKindName {
    Host,
    Switch,
}

/// `[[link]]`: what differs at some links; links of an own topology.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Link {
    /// The names of its two ends, or patterns.
    pub(super) link: Spanned<[String; 2]>,
    pub(super) rate: Option<Rate>,
    pub(super) delay: Option<Time>,
    /// The capacity of each of the queues at both its ends.
    pub(super) queue: Option<Spanned<Size>>,
    /// The length from which they mark.
    pub(super) ecn: Option<Spanned<Size>>,
}

/// How a packet chooses among paths that are equally short.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum RoutingName {
    /// By a hash of its flow.
    #[default]
    Flow,
    /// Each packet in turn.
    Packet,
}

/// Which packet of a queue goes next.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum OrderName {
    /// The one that came first.
    #[default]
    Arrival,
    /// pFabric's.
    LeastRemaining,
}

/// `selective_dropping` of `[network]`: of the queues 1 to 7, the queue 0 is for signals.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SelectiveDropping {
    /// The threshold of queue 1: the length from which unimportant packets are dropped and others
    /// marked.
    pub(super) threshold: Size,
    /// By how many times that it grows with every further queue.
    pub(super) step: f64,
}

/// `transport` of flows.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TransportTable {
    #[serde(default)]
    pub(super) kind: TransportName,
    /// Window at the start; ten segments unless given.
    pub(super) initial_window: Option<Spanned<Size>>,
    /// Bytes on the way at most.
    pub(super) receive_window: Option<Spanned<Size>>,
    /// Shortest retransmission timeout; of pFabric, the timeout.
    pub(super) rto_min: Option<Spanned<Time>>,
    /// Duplicate acknowledgements that mean a loss.
    pub(super) duplicates: Option<Spanned<u32>>,
    /// PIAS: the bytes after which a flow's packets go one queue further down.
    pub(super) demotion: Option<Spanned<Vec<Size>>>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum TransportName {
    #[default]
    Newreno,
    Dctcp,
    Pias,
    Pfabric,
}

/// `[[parameter_server]]`: the flows of one iteration of training.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ParameterServer {
    /// For reports; `servers0` and so on unless given.
    pub(super) name: Option<String>,
    /// Hosts by name, or how many, evenly spread over all.
    pub(super) workers: Spanned<Hosts>,
    /// The same, of the workers' hosts unless named; as many as workers unless given.
    pub(super) servers: Option<Spanned<Hosts>>,
    /// A tensor of this size ..
    pub(super) tensor: Option<Spanned<Size>>,
    /// .. or those of a model.
    pub(super) model: Option<Spanned<String>>,
    /// Samples of a worker in an iteration of the model.
    pub(super) batch: Option<Spanned<u32>>,
    /// Floating-point operations a second that a worker does, 1e13 unless given.
    pub(super) flops: Option<Spanned<f64>>,
    /// The divisor of sizes.
    pub(super) compression: Option<Spanned<f64>>,
    /// A tensor that is larger is divided among all servers.
    #[serde(default = "defaults::divide_above")]
    pub(super) divide_above: Size,
    /// For whom the server of a smaller one is drawn.
    #[serde(default)]
    pub(super) draw: Draw,
    /// By how much a worker's times vary, at most.
    pub(super) jitter: Option<Spanned<Share>>,
    #[serde(default = "defaults::zero")]
    pub(super) start: Time,
    pub(super) transport: Option<Spanned<TransportTable>>,
    /// Flows of DLCP in place of connections.
    pub(super) dlcp: Option<PushKeys>,
    pub(super) ecn: Option<Spanned<bool>>,
    pub(super) priority: Option<Spanned<u8>>,
    pub(super) drop_class: Option<Spanned<u8>>,
    #[serde(default)]
    pub(super) spray: bool,
}

/// `[switch]`: the programmable ones.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct SwitchTable {
    /// Names of switches, or numbers of layers, or a share of all; all unless given.
    pub(super) programmable: Option<Spanned<WhichSwitches>>,
    /// Aggregators of each; SwitchML's jobs share them out as slots.
    pub(super) aggregators: Spanned<u32>,
    /// In how many of them a fragment of ATP's looks for a place: 1 is the paper's.
    pub(super) ways: Spanned<u8>,
    /// After how long an aggregator that nobody asks for is free again.
    pub(super) stale: Time,
    /// Time that it takes to handle a packet.
    pub(super) processing: Time,
}

impl Default for SwitchTable {
    fn default() -> Self {
        Self {
            programmable: None,
            aggregators: Spanned::new(0..0, 8192),
            ways: Spanned::new(0..0, fanin_protocol::atp::DEFAULT_WAYS),
            stale: Time(std::time::Duration::from_millis(100)),
            processing: defaults::zero(),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum WhichSwitches {
    Names(Vec<String>),
    Layers(Vec<u8>),
    Share(f64),
}

impl<'de> Deserialize<'de> for WhichSwitches {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Any {
            Share(Share),
            Layers(Vec<u8>),
            Names(Vec<String>),
        }
        Any::deserialize(deserializer)
            .map(|any| match any {
                Any::Share(share) => Self::Share(share.0),
                Any::Layers(layers) => Self::Layers(layers),
                Any::Names(names) => Self::Names(names),
            })
            .map_err(|_| {
                serde::de::Error::custom(
                    "programmable switches: a list of names, a list of layers (0 is next to hosts), or a share as in \"50%\"",
                )
            })
    }
}

/// `[[job]]`, without the table of its system.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Job {
    /// For reports; `job0` and so on unless given.
    pub(super) name: Option<String>,
    /// Who sums.
    pub(super) system: Spanned<String>,
    /// Hosts by name, or how many of those that no job before has.
    pub(super) workers: Spanned<Hosts>,
    #[serde(default = "defaults::zero")]
    pub(super) start: Time,
    /// When it submits nothing more.
    pub(super) stop: Option<Time>,

    /// How fast workers' hosts send; as their links unless given.
    pub(super) rates: Option<Spanned<RatesTable>>,
    /// How long each worker waits before it sends the first tensor of a step; not at all unless
    /// given.
    pub(super) late: Option<Spanned<LateTable>>,

    /// Which queue of a port its packets wait in.
    pub(super) priority: Option<Spanned<u8>>,
    /// Which drop threshold holds for them.
    pub(super) drop_class: Option<Spanned<u8>>,
    /// Each packet takes a path of its own.
    #[serde(default)]
    pub(super) spray: bool,

    /// Micro-benchmark: bytes of each tensor.
    pub(super) tensor: Option<Spanned<Size>>,
    /// Micro-benchmark: how many are always under way.
    pub(super) in_flight: Option<Spanned<u32>>,
    /// Micro-benchmark: how many in all; without end unless given.
    pub(super) tensors: Option<Spanned<u64>>,

    /// Training: the model ..
    pub(super) model: Option<Spanned<String>>,
    /// .. or its layers, in the order of the forward pass.
    pub(super) layers: Option<Spanned<LayersTable>>,
    /// Layers: how many times as fast as they say the workers compute.
    pub(super) compute: Option<Spanned<f64>>,
    /// Training: samples that a worker handles in an iteration.
    pub(super) batch: Option<Spanned<u32>>,
    /// Training: how many in all; without end unless given.
    pub(super) iterations: Option<Spanned<u64>>,
    /// Training: divides the model's parameters and times alike, so that the network's share of the
    /// time stays.
    pub(super) scale: Option<Spanned<f64>>,
    /// Training: floating-point operations a second that a worker does, 1e13 unless given.
    pub(super) flops: Option<Spanned<f64>>,
    /// Training: by how much a worker's times vary, at most.
    pub(super) jitter: Option<Spanned<Share>>,
    /// Training: an off phase after so many iterations.
    pub(super) pause_every: Option<Spanned<u64>>,
    /// Training: how long it is.
    pub(super) pause: Option<Spanned<Time>>,
    /// Training: whether the forward pass of a layer waits for its own parameters alone. An
    /// asynchronous worker's waits for nothing.
    pub(super) overlap: Option<Spanned<bool>>,
    pub(super) partition: Option<Spanned<Size>>,
    pub(super) order: Option<Spanned<SendOrderName>>,

    #[serde(default)]
    pub(super) dtype: DtypeName,
    /// Share of packets whose sum overflows the static factor.
    pub(super) large_values: Option<Spanned<Share>>,
}

/// `layers` of a job.
#[derive(Clone, Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "layers: the name of a file of [[layer]] tables (fanin trace writes one), or a list as in [{ bytes = \"4MB\", forward = \"1ms\", backward = \"2ms\" }]"
)]
pub(super) enum LayersTable {
    Given(Vec<LayerTable>),
    /// Before it is read.
    File(String),
}

/// A layer, whose gradient is one tensor.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LayerTable {
    pub(super) bytes: Size,
    #[serde(default = "defaults::zero")]
    pub(super) forward: Time,
    #[serde(default = "defaults::zero")]
    pub(super) backward: Time,
}

/// A file of layers alone.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LayersFile {
    pub(super) layer: Vec<LayerTable>,
}

/// `rates` of a job.
#[derive(Clone, Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "rates: a list with one for each worker, or as in { most = \"10Gbit\", deviation = 0.2 }"
)]
pub(super) enum RatesTable {
    Given(Vec<Rate>),
    Drawn(DrawnRates),
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DrawnRates {
    pub(super) most: Rate,
    pub(super) deviation: Share,
}

/// `late` of a job.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "late: at most so long, as in \"50ms\" or { most = \"1s\", deviation = 0.2 }")]
pub(super) enum LateTable {
    Uniform(Time),
    Normal(DrawnLateness),
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DrawnLateness {
    pub(super) most: Time,
    pub(super) deviation: Share,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Hosts {
    Count(usize),
    Names(Vec<String>),
}

impl<'de> Deserialize<'de> for Hosts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Any {
            Count(usize),
            Names(Vec<String>),
        }
        Any::deserialize(deserializer)
            .map(|any| match any {
                Any::Count(count) => Self::Count(count),
                Any::Names(names) => Self::Names(names),
            })
            .map_err(|_| serde::de::Error::custom("workers: how many, or a list of hosts' names"))
    }
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum DtypeName {
    #[default]
    Float32,
    Int32,
}

/// In which order a training's gradients are sent.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum SendOrderName {
    Ready,
    Needed,
}

/// `[[background]]`: a flow that is no job's.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Background {
    pub(super) from: Spanned<String>,
    pub(super) to: Spanned<String>,
    pub(super) kind: Spanned<BackgroundKind>,
    /// The rate of a constant flow.
    pub(super) rate: Option<Spanned<Rate>>,
    /// The transport of a TCP-like flow.
    pub(super) transport: Option<Spanned<TransportTable>>,
    /// Whether its packets may be marked; those of a TCP-like flow unless told otherwise.
    pub(super) ecn: Option<Spanned<bool>>,
    pub(super) priority: Option<Spanned<u8>>,
    pub(super) drop_class: Option<Spanned<u8>>,
    #[serde(default)]
    pub(super) spray: bool,
    #[serde(default = "defaults::zero")]
    pub(super) start: Time,
    pub(super) stop: Option<Time>,
    /// Bytes of a TCP-like flow; without end unless given.
    pub(super) size: Option<Spanned<Size>>,
    /// So many such flows, ..
    pub(super) count: Option<Spanned<u32>>,
    /// .. each so long after the one before.
    pub(super) every: Option<Spanned<Time>>,
    /// Each begins later by up to so much, as the seed draws it.
    #[serde(default = "defaults::zero")]
    pub(super) spread: Time,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum BackgroundKind {
    /// As fast as the network lets it: additive increase, multiplicative decrease.
    Tcp,
    /// As fast as it says, whatever happens.
    Constant,
}

/// `[[loss]]`: what a link does to packets. Both directions unless `from` is given.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Loss {
    /// The two ends of one link; every link unless given.
    pub(super) link: Option<Spanned<[String; 2]>>,
    /// Only what leaves this end.
    pub(super) from: Option<Spanned<String>>,
    /// Chance that a packet is lost; of one in a burst, if there are bursts.
    pub(super) loss: Option<Spanned<Share>>,
    /// Bursts instead: chance to get into one, with every packet, and then the chance to get out of
    /// it.
    pub(super) burst_begin: Option<Spanned<Share>>,
    pub(super) burst_end: Option<Spanned<Share>>,
    /// Chance that a packet between two bursts is lost.
    pub(super) loss_between: Option<Spanned<Share>>,
    /// Instead of chances: packets of this kind, all of them unless `nth` or `every` says which.
    pub(super) only: Option<Spanned<String>>,
    /// The packets of these numbers; the first is 1.
    pub(super) nth: Option<Spanned<Vec<u64>>>,
    /// Every so many, one.
    pub(super) every: Option<Spanned<u64>>,
    pub(super) duplication: Option<Share>,
    /// Chance that a packet is held back for up to `held_back`.
    pub(super) reordering: Option<Share>,
    pub(super) held_back: Option<Time>,
}

/// `[[fault]]`: what happens once.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Fault {
    pub(super) at: Time,
    pub(super) kind: Spanned<FaultKind>,
    /// The two ends of the link that fails.
    pub(super) link: Option<Spanned<[String; 2]>>,
    /// The switch that fails or loses its memory, the host that fails or whose service dies.
    pub(super) node: Option<Spanned<String>>,
    /// The job whose worker or server dies, or that dies itself.
    pub(super) job: Option<Spanned<String>>,
    /// The rank of the worker that dies.
    pub(super) rank: Option<Spanned<u32>>,
    /// How long it is away.
    pub(super) down: Option<Time>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum FaultKind {
    /// A link carries nothing.
    LinkFails,
    /// A node neither takes nor forwards anything.
    NodeFails,
    /// A programmable switch starts with empty aggregators.
    SwitchForgets,
    /// A job's server dies and comes back without its memory.
    ServerRestarts,
    /// A worker dies and another takes its rank.
    WorkerRespawns,
    /// A service dies for good, and others take over.
    ServiceDies,
    /// All of a job's workers and its server vanish; its aggregators stay behind.
    JobDies,
}

mod defaults {
    use std::time::Duration;
    use toml::Spanned;

    use super::{PayloadName, Rate, Size, Time};

    /// Not written down anywhere.
    fn nowhere<T>(value: T) -> Spanned<T> {
        Spanned::new(0..0, value)
    }

    pub(super) fn until() -> Spanned<Time> {
        nowhere(Time(Duration::from_secs(10)))
    }

    pub(super) fn interval() -> Spanned<Time> {
        nowhere(Time(Duration::from_millis(10)))
    }

    pub(super) fn payload() -> Spanned<PayloadName> {
        nowhere(PayloadName::Full)
    }

    pub(super) const fn zero() -> Time {
        Time(Duration::ZERO)
    }

    pub(super) fn rate() -> Spanned<Rate> {
        nowhere(Rate(100_000_000_000))
    }

    pub(super) const fn delay() -> Time {
        Time(Duration::from_micros(1))
    }

    pub(super) fn mtu() -> Spanned<u32> {
        nowhere(1500)
    }

    pub(super) fn queue() -> Spanned<Size> {
        nowhere(Size(1_000_000))
    }

    /// DLCP §5.2.1.
    pub(super) const fn divide_above() -> Size {
        Size(4_000_000)
    }

    pub(super) fn alpha() -> Spanned<f64> {
        nowhere(1.0)
    }

    pub(super) const fn yes() -> bool {
        true
    }
}
