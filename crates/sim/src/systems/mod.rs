//! Systems under test: what sums for a job, each in a file or a room of its own.
//!
//! A [`System`] is what one job's table in a scenario file says, checked. When a run begins, it is
//! asked once for the job's [`Machines`]. It says which [`Station`]s the job needs (a switch's
//! aggregators, a server: machines that jobs share), and afterwards adds each worker's machine. The
//! rest of the simulator knows these three traits and no system. A new system is a file here. A
//! system outside of this crate hands its [`Kind`] to
//! [`parse_with`](crate::scenario_file::parse_with), as `tests/toy_system.rs` does.
//!
//! Deliberately absent: what workers submit and what their sums must be (`workload`), how packets
//! travel (`net`).

use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use fanin_wire::{FRAGMENT_ELEMENTS, Preamble, WireDtype};
use serde::Serialize;

use crate::net::{ActorId, Class, Network, NodeId, Topology};
use crate::scenario_file::Kind;
use crate::workload::{JobPlan, Process, SamplePayload, SwitchPlan, Tenant, Violation};

mod aggregation;
pub mod atp;
pub mod byteps;
mod distance;
pub mod dlcp;
pub mod goat;
mod keys;
mod lines;
pub(crate) mod placement;
mod pools;
pub mod ring;
pub mod switchml;
pub mod tcp_ps;
mod wire;
mod worker;

/// The systems that this crate has.
pub const ALL: [Kind; 11] = [
    atp::ATP,
    atp::ESA,
    atp::RSS,
    atp::PS,
    atp::PS_N_TO_N,
    goat::KIND,
    switchml::KIND,
    byteps::KIND,
    ring::KIND,
    tcp_ps::KIND,
    dlcp::KIND,
];

/// The system of one job, as its table in the scenario file configures it. Everything in it has
/// been checked.
pub trait System: Debug + Send + Sync {
    /// As scenario files and reports call it.
    fn name(&self) -> &'static str;

    /// Parts that each tensor is cut into: a worker has a machine for each.
    fn parts(&self, _workers: usize) -> usize {
        1
    }

    /// Which elements of a tensor are one part's, of so many; none where the tensor is whole in
    /// others. `variable` is which of the model's it is the gradient of ([`Tenant::variable`]).
    fn range(&self, _variable: u64, elements: usize, part: usize, parts: usize) -> Range<usize> {
        elements * part / parts..elements * (part + 1) / parts
    }

    /// The ranges of tensors that come in this order, by tensor and part. Systems that cut a tensor by
    /// what came before it have this in place of [`System::range`].
    fn cuts(&self, _tensors: &[usize]) -> Option<Vec<Vec<Range<usize>>>> {
        None
    }

    /// How long a byte of a tensor takes to be summed at least, in seconds: from the first link to
    /// the last.
    fn seconds_a_byte(&self, topology: &Topology, workers: &[NodeId]) -> f64 {
        8.0 / placement::line_rate(topology, workers.iter().copied()) as f64
    }

    /// The host of the server that can be restarted, and that knows where the job stands when
    /// another process takes a worker's rank. Without one, neither fault can be asked for.
    fn server(&self) -> Option<NodeId> {
        None
    }

    /// The hosts of services that may die for good, and how long one is gone before another takes
    /// its part over. Of those that nobody takes over there are none.
    fn services(&self) -> (&[NodeId], Duration) {
        (&[], Duration::ZERO)
    }

    /// Whether workers send by how much their parameters changed, in all, and get the latest back
    /// without waiting for each other, in place of sums (BytePS §5).
    fn is_asynchronous(&self) -> bool {
        false
    }

    /// How long a worker waits before it asks for something again, at least: a job that waits for a
    /// few of these has not stalled.
    fn timeout(&self) -> Duration {
        Duration::from_millis(1)
    }

    /// How many of its elements, the first, a packet carries where a scenario wants a sample, and
    /// the others in length alone: no decision depends on those. None where nobody has made sure of
    /// that.
    fn sample_elements(&self) -> Option<usize> {
        None
    }

    /// The longest time that a worker waits for the same thing, when each time nothing has come. A
    /// job may stand still for so long if most packets are lost.
    fn timeout_max(&self) -> Duration {
        self.timeout() * worker::BACK_OFF
    }

    /// The kinds of its packets, in the words that `only` of a scenario's `[[loss]]` says.
    fn packet_kinds(&self) -> &'static [&'static str] {
        &[]
    }

    /// Which of these a packet is, if it is one of the system's.
    fn kind_of(&self, _packet: &[u8]) -> Option<&'static str> {
        None
    }

    /// The distance of an element of a float sum from the exact one, at most, besides the one
    /// rounding at the end. `workers` contribute numbers below `largest`, a power of two, to the
    /// element's packet. They have so few bits that sums of floats are exact; and no bound is so
    /// wide that it hides a worker's contribution.
    fn bound(&self, workers: usize, largest: f64) -> f64;

    /// How float tensors of more than [`NATIVE_ELEMENTS_MAX`](fanin_wire::NATIVE_ELEMENTS_MAX)
    /// elements travel. Packets carry more of them if elements are shorter.
    fn wire_dtype(&self) -> WireDtype {
        WireDtype::Native
    }

    /// Elements of a packet, each of four bytes. They share what decides their rounding, where each
    /// packet has a factor of its own.
    fn packet_elements(&self) -> usize {
        FRAGMENT_ELEMENTS[0]
    }

    /// Finds out which machines a job needs where, and asks the site for the stations among them.
    /// Called once a run, in the order of the jobs, before anything is on the network.
    fn plan(&self, tenant: Tenant, site: &mut Site<'_>) -> Box<dyn Machines>;
}

/// A job's machines in a run.
pub trait Machines {
    /// Adds the machine of one part of a worker's tensors to the worker's host. All stations are
    /// there. The machine takes tensors from the process, and gives it their sums.
    fn add_worker(&self, network: &mut Network, process: Process) -> ActorId;

    /// The machines' counts. A machine that lost its memory counts from zero again; its earlier
    /// counts are kept for it.
    fn counters(&self, network: &Network) -> Counters;

    /// The state of each machine, to find out who waits for whom; empty if there is nothing to say.
    fn standing(&self, _network: &Network) -> String {
        String::new()
    }

    /// The machines on `node` are back without their memory: workers that depend on them are told.
    fn resume(&self, _network: &mut Network, _node: NodeId) {}

    /// The service on `node` has been gone for as long as [`System::services`] says: another one
    /// takes over what it summed. False if that cannot be yet, and is to be tried again.
    fn take_over(&self, _network: &mut Network, _node: NodeId) -> bool {
        true
    }

    /// Checks the state that is left when the run is over, of a job that has finished or has not.
    fn check(&self, _network: &Network) -> Option<Violation> {
        None
    }

    /// Adds the machine of a process that takes a dead worker's rank, or not yet: then it is asked
    /// again. Only of systems with a [`System::server`].
    fn respawn(&self, _network: &mut Network, _process: Process) -> Option<ActorId> {
        None
    }

    /// All workers are gone for good. Stations forget the job, except what only time can tell them.
    fn die(&self, _network: &mut Network) {}
}

/// A machine on a switch or a host, for all jobs that use it.
pub trait Station: Any {
    /// What it is.
    fn role(&self) -> Role;

    /// Adds the machine to its node: all jobs have been planned.
    fn place(&self, network: &mut Network);

    /// The machine's number; only asked once it is placed.
    fn actor(&self) -> ActorId;

    /// Puts a machine without memory in the place of what is there. Nothing happens where a system
    /// does not say how its jobs are admitted again.
    fn forget(&self, network: &mut Network);

    /// The use of a switch's memory since it lost it last: earlier use is kept for it.
    fn table(&self, _network: &Network) -> Option<Table> {
        None
    }
}

/// The kind of a [`Station`], for reports and faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// On a programmable switch: forgets when the switch does.
    Switch,
    /// On a host: restarts when a job's server does.
    Server,
    /// On a host: may die for good, and other services of its jobs take over.
    Service,
    /// A server that does neither. Its losses cannot be brought back, so its jobs name no
    /// [`System::server`].
    Lasting,
}

/// The counts of a job's machines, for reports: a system leaves out what it does not have, or does
/// not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Packets that switches added.
    pub switch_aggregations: Option<u64>,
    /// Packets that found no room at a switch.
    pub switch_collisions: Option<u64>,
    /// Contributions that came again to a sum that a switch or a service had, and were answered
    /// with it.
    pub answered_again: Option<u64>,
    /// Packets that servers added: whole sums, partial ones and single contributions.
    pub server_aggregations: Option<u64>,
    /// Bytes of gradients that came to servers, as IP packets.
    pub server_bytes: Option<u64>,
    /// Bytes of gradients on their way to servers times the links that they passed, for those that
    /// arrived. Parameters, which come back, are not included.
    pub gradient_hop_bytes: Option<u64>,
    /// Packets that workers sent.
    pub packets_sent: Option<u64>,
    /// The part of them that was sent again.
    pub retransmissions: Option<u64>,
    /// Packets whose sum saturated.
    pub overflows: Option<u64>,
    /// Workers' packets that went past the switches as original values, since their sum could
    /// overflow (ATP §B.2).
    pub proactive: Option<u64>,
    /// Contributions of packets that the sums would have if nothing had been lost, over the tensors
    /// that came back (DLCP).
    pub contributions: Option<u64>,
    /// The part of them that is not in the sums.
    pub contributions_lost: Option<u64>,
    /// How often workers asked again for packets of a flow: for sums of a server's, for all in a
    /// ring.
    pub retransmission_rounds: Option<u64>,
    /// How often a service went on with a part of the tensors whose service had died.
    pub take_overs: Option<u64>,
}

/// The use of a switch's memory, by all jobs; a count that a system cannot have is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Its size.
    pub aggregators: u32,
    /// The aggregators that are in use now.
    pub in_use: u32,
    /// Packets added.
    pub aggregations: u64,
    /// Packets that found no room.
    pub collisions: Option<u64>,
    /// Freed by parameters.
    pub freed_by_parameters: Option<u64>,
    /// Freed by packets sent again.
    pub freed_by_resend: Option<u64>,
    /// Freed because they were left behind.
    pub freed_stale: Option<u64>,
}

/// The counts of machines that may lose their memory.
pub(crate) trait Counted: Copy {
    /// Both counts, each with its like, as `of` has it.
    fn with(self, other: Self, of: impl Fn(u64, u64) -> u64) -> Self;
}

impl Counted for Counters {
    fn with(self, other: Self, of: impl Fn(u64, u64) -> u64) -> Self {
        let of = |one, other| of_both(one, other, &of);
        Self {
            switch_aggregations: of(self.switch_aggregations, other.switch_aggregations),
            switch_collisions: of(self.switch_collisions, other.switch_collisions),
            answered_again: of(self.answered_again, other.answered_again),
            server_aggregations: of(self.server_aggregations, other.server_aggregations),
            server_bytes: of(self.server_bytes, other.server_bytes),
            gradient_hop_bytes: of(self.gradient_hop_bytes, other.gradient_hop_bytes),
            packets_sent: of(self.packets_sent, other.packets_sent),
            retransmissions: of(self.retransmissions, other.retransmissions),
            overflows: of(self.overflows, other.overflows),
            proactive: of(self.proactive, other.proactive),
            contributions: of(self.contributions, other.contributions),
            contributions_lost: of(self.contributions_lost, other.contributions_lost),
            retransmission_rounds: of(self.retransmission_rounds, other.retransmission_rounds),
            take_overs: of(self.take_overs, other.take_overs),
        }
    }
}

impl Counted for Table {
    /// Sizes and what is in use now are no counts, so they do not change.
    fn with(self, other: Self, of: impl Fn(u64, u64) -> u64) -> Self {
        let of_both = |one, other| of_both(one, other, &of);
        Self {
            aggregations: of(self.aggregations, other.aggregations),
            collisions: of_both(self.collisions, other.collisions),
            freed_by_parameters: of_both(self.freed_by_parameters, other.freed_by_parameters),
            freed_by_resend: of_both(self.freed_by_resend, other.freed_by_resend),
            freed_stale: of_both(self.freed_stale, other.freed_stale),
            ..self
        }
    }
}

/// None where neither counts.
fn of_both(one: Option<u64>, other: Option<u64>, of: impl Fn(u64, u64) -> u64) -> Option<u64> {
    match (one, other) {
        (None, None) => None,
        _ => Some(of(one.unwrap_or(0), other.unwrap_or(0))),
    }
}

/// Something of those jobs that have it, by job id.
type OfJobs<T> = Rc<RefCell<BTreeMap<u32, T>>>;

/// By node and port; the second is the same station, to be found as what it is.
type Stations = BTreeMap<(NodeId, u16), (Rc<dyn Station>, Rc<dyn Any>)>;

/// How packets are treated in queues.
pub type Classify = Rc<dyn Fn(&[u8]) -> Class>;
/// By how many bytes a packet is longer on the network than what its machine wrote.
pub type Declare = Rc<dyn Fn(&[u8]) -> u32>;

/// The network before anything stands on it, and what will.
pub struct Site<'a> {
    topology: &'a Topology,
    switch: SwitchPlan,
    classes: OfJobs<Class>,
    declared_bytes: OfJobs<Vec<SamplePayload>>,
    stations: Stations,
}

impl<'a> Site<'a> {
    pub(crate) fn new(topology: &'a Topology, switch: SwitchPlan) -> Self {
        let (classes, declared_bytes) = (OfJobs::default(), OfJobs::default());
        Self { topology, switch, classes, declared_bytes, stations: Stations::new() }
    }

    /// Nodes and links.
    #[must_use]
    pub const fn topology(&self) -> &'a Topology {
        self.topology
    }

    /// Every programmable switch.
    #[must_use]
    pub const fn switch(&self) -> SwitchPlan {
        self.switch
    }

    /// The station at a port of a node: the one that another job has asked for, or a new one.
    ///
    /// # Panics
    /// When something else stands there: ports of stations are constants, each of one system.
    pub fn station<S: Station>(&mut self, node: NodeId, port: u16, new: impl FnOnce() -> S) -> Rc<S> {
        let (_, station) = self.stations.entry((node, port)).or_insert_with(|| {
            let station = Rc::new(new());
            (station.clone(), station)
        });
        station.clone().downcast().expect("a port of one system")
    }

    /// How packets of machines are treated that several jobs share: by the job that a packet is of.
    #[must_use]
    pub fn classify(&self) -> Classify {
        let classes = self.classes.clone();
        Rc::new(move |bytes: &[u8]| {
            let classes = classes.borrow();
            if classes.is_empty() {
                return Class::default();
            }
            let job = Preamble::parse(bytes).ok().map(|preamble| preamble.job.0);
            job.and_then(|job| classes.get(&job).copied()).unwrap_or_default()
        })
    }

    /// The extra length of packets beyond what machines wrote, if they wrote a sample behind so many
    /// bytes of header. It is the elements that the sample leaves out, in the job of the packet.
    #[must_use]
    pub fn declare(&self, header_bytes: usize) -> Declare {
        let declared_bytes = self.declared_bytes.clone();
        Rc::new(move |packet: &[u8]| {
            let declared_bytes = declared_bytes.borrow();
            if declared_bytes.is_empty() {
                return 0;
            }
            let job = Preamble::parse(packet).ok().and_then(|preamble| declared_bytes.get(&preamble.job.0));
            // Requests and aborts carry no elements.
            let is_so_long = |sample: &&SamplePayload| header_bytes + sample.bytes == packet.len();
            job.and_then(|samples| samples.iter().find(is_so_long)).map_or(0, |sample| sample.left_out_bytes)
        })
    }

    pub(crate) fn plan(&mut self, plan: &JobPlan, tenant: Tenant) -> Box<dyn Machines> {
        if plan.sampled {
            let samples = plan.samples();
            let ids = (0..plan.system.parts(plan.workers.len())).map(|part| tenant.id(part).0);
            self.declared_bytes.borrow_mut().extend(ids.map(|id| (id, samples.to_vec())));
        }
        if plan.class != Class::default() {
            let ids = (0..plan.system.parts(plan.workers.len())).map(|part| (tenant.id(part).0, plan.class));
            self.classes.borrow_mut().extend(ids);
        }
        plan.system.plan(tenant, self)
    }

    /// The stations of all nodes, switches first.
    pub(crate) fn into_stations(self) -> Vec<(NodeId, Rc<dyn Station>)> {
        let stations = self.stations.into_iter().map(|((node, _), (station, _))| (node, station));
        let (mut switches, servers): (Vec<_>, Vec<_>) =
            stations.partition(|(_, station)| station.role() == Role::Switch);
        switches.extend(servers);
        switches
    }
}
