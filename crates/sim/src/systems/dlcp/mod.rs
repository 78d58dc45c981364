//! DLCP (Wang et al., 2020): a server, or a ring of the workers, sums tensors. A bounded part may
//! be lost on the way. Their packets say to queues how much they matter.

mod keys;
mod ledger;
mod pushes;
mod server;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use fanin_protocol::dlcp::{Finish, JobConfig, RateConfig, Ring, Worker};
use fanin_protocol::{Loss, Verdict, WorkerEvent, WorkerMachine};
use fanin_wire::{
    BlockPacket, Generation, Kind, LossBound, Op, Preamble, SAMPLE_ELEMENTS, ShardId, Signal, SignalPacket,
    Tag, WorkerId, block_packet_bytes,
};

use super::placement::line_rate;
use super::worker::{BACK_OFF, retransmission};
use super::{Counters, Machines, Process, Site, System, Tenant};
use crate::net::{
    ActorId, Body, Class, Context, Machine, Network, Nic, NodeId, Owner, Packet, SimAddress, Topology,
};
use crate::workload::Gradient;
use ledger::{Ledger, Terms};
use server::{SERVER_PORT, Served, Server};

pub(crate) use keys::{KIND, PushKeys};
pub use pushes::PushPlan;
pub(crate) use pushes::Pushes;
use pushes::TRAIN_BYTES;

/// Kinds of packets: gradients on their way to the server or round a ring, and sums; what is said
/// of flows.
const BLOCK: &str = "block";
const SIGNAL: &str = "signal";

/// Ethernet with preamble, checksum and gap, IPv4 and UDP: what a link carries besides a UDP
/// payload.
pub(crate) const FRAMING_BYTES: usize = 66;

const ELEMENT_BYTES: u64 = 4;

/// The first port of the first job's ranks in a ring; the next job's ranks have the next ports.
const RING_PORT: u16 = 6000;

/// DLCP's configuration for a job.
#[derive(Clone, Debug)]
pub struct Dlcp {
    /// Who sums.
    pub way: Way,
    /// A tensor that is larger is divided evenly among all servers; a smaller one is at one of
    /// them.
    pub divide_above_bytes: u64,
    /// The loss bound of the flows back; above 0 a worker keeps its own gradient where it lacks a
    /// mean.
    pub pull_bound: LossBound,
    /// Elements of a packet.
    pub elements: u16,
    /// Packets of a flow: longer tensors are several.
    pub flow_blocks: u32,
    /// Flows that a worker has under way.
    pub flows: u16,
    /// How its flows are sent: to the server, or at each hop of a ring.
    pub sends: PushPlan,
}

/// Who sums.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Way {
    /// The servers on these hosts.
    Servers(Vec<NodeId>),
    /// The workers, in the order of their ranks.
    Ring,
}

impl System for Dlcp {
    fn name(&self) -> &'static str {
        "dlcp"
    }

    fn parts(&self, _workers: usize) -> usize {
        self.servers().len().max(1)
    }

    fn range(&self, variable: u64, elements: usize, part: usize, parts: usize) -> Range<usize> {
        let is_divided = ELEMENT_BYTES * elements as u64 > self.divide_above_bytes;
        if is_divided || parts == 1 {
            elements * part / parts..elements * (part + 1) / parts
        } else if part as u64 == variable % parts as u64 {
            0..elements
        } else {
            0..0
        }
    }

    fn timeout(&self) -> Duration {
        self.sends.timeout
    }

    fn timeout_max(&self) -> Duration {
        self.sends.timeout * BACK_OFF
    }

    /// How much a packet matters is decided by its sample: both are as large in the mean.
    fn sample_elements(&self) -> Option<usize> {
        Some(SAMPLE_ELEMENTS)
    }

    fn packet_kinds(&self) -> &'static [&'static str] {
        &[BLOCK, SIGNAL]
    }

    fn kind_of(&self, packet: &[u8]) -> Option<&'static str> {
        match Preamble::parse(packet).ok()?.kind {
            Kind::Block => Some(BLOCK),
            Kind::Signal => Some(SIGNAL),
            _ => None,
        }
    }

    /// Workers' numbers are such that floats sum to the very number. A sum that lacks some is
    /// checked by [`completed_inside`](Process::completed_inside).
    fn bound(&self, _workers: usize, _largest: f64) -> f64 {
        0.0
    }

    fn packet_elements(&self) -> usize {
        self.elements.into()
    }

    fn plan(&self, tenant: Tenant, site: &mut Site<'_>) -> Box<dyn Machines> {
        let plan = tenant.plan();
        let config = self.job_config(&tenant, site.topology());
        let treatment = Treatment {
            class: plan.class,
            declared: if plan.sampled { 4 * u32::from(self.elements - config.elements) } else { 0 },
            block_bytes: block_packet_bytes(4 * usize::from(config.elements)),
        };
        // A single machine has the link's rate; among several none knows what the others send.
        let hosts = plan.workers.iter().chain(self.servers()).copied().filter(|_| self.servers().len() > 1);
        let nics: BTreeMap<_, _> =
            hosts.map(|host| (host, Nic::new(config.rate.line_rate_bps, TRAIN_BYTES))).collect();
        let part = |part: usize| {
            let config = JobConfig { id: tenant.id(part), key: tenant.key(part), ..config };
            let ledger = Rc::new(RefCell::new(Ledger::new(Terms {
                job: plan.name.clone(),
                workers: plan.workers.len(),
                is_ring: self.way == Way::Ring,
                flow_blocks: self.flow_blocks,
                push_bound: if plan.integers { LossBound::RELIABLE } else { self.sends.loss_bound },
                pull_bound: if self.may_keep(plan.integers) { self.pull_bound } else { LossBound::RELIABLE },
                shares_nic: !nics.is_empty(),
            })));
            let server = self.servers().get(part).map(|node| {
                let (node, actor) = (*node, Cell::new(ActorId(u32::MAX)));
                let new = || Server { node, actor, nic: RefCell::default(), jobs: RefCell::default() };
                let server = site.station(node, SERVER_PORT, new);
                if let Some(nic) = nics.get(&node) {
                    server.nic.borrow_mut().get_or_insert_with(|| nic.clone());
                }
                let (ledger, tenant) = (ledger.clone(), tenant.clone());
                server.jobs.borrow_mut().push(Served { config, tenant, part, ledger, treatment });
                server
            });
            Part { config, server, ledger }
        };
        let parts = (0..self.parts(plan.workers.len())).map(part).collect();
        let lost = Rc::default();
        Box::new(Job { system: self.clone(), parts, tenant: tenant.clone(), nics, treatment, lost })
    }
}

impl Dlcp {
    fn servers(&self) -> &[NodeId] {
        match &self.way {
            Way::Servers(servers) => servers,
            Way::Ring => &[],
        }
    }

    /// Whether a worker may keep its own gradient.
    fn may_keep(&self, integers: bool) -> bool {
        self.pull_bound != LossBound::RELIABLE && self.way != Way::Ring && !integers
    }

    fn job_config(&self, tenant: &Tenant, topology: &Topology) -> JobConfig {
        let plan = tenant.plan();
        let hosts = plan.workers.iter().chain(self.servers()).copied();
        let config = JobConfig {
            id: tenant.id(0),
            key: tenant.key(0),
            generation: Generation(0),
            workers: plan.workers.len() as u16,
            shard: ShardId(0),
            elements: if plan.sampled { SAMPLE_ELEMENTS as u16 } else { self.elements },
            push_bound: self.sends.loss_bound,
            pull_bound: self.pull_bound,
            flow_blocks: self.flow_blocks,
            flows: self.flows,
            window_blocks: self.flow_blocks * u32::from(self.flows),
            rate: RateConfig {
                line_rate_bps: line_rate(topology, hosts),
                packet_bytes: (block_packet_bytes(4 * usize::from(self.elements)) + FRAMING_BYTES) as u32,
                period: self.sends.period,
                delta: self.sends.delta,
                ahead: self.sends.period / 10,
                calm_periods: 1,
                follows: self.sends.follows,
                sorts: self.sends.finish == Finish::Stopped,
            },
            finish: self.sends.finish,
            quiet: self.sends.quiet,
            retransmission: retransmission(self.sends.timeout),
            paths: 1,
            resumes_at: None,
        };
        config.check().expect("a scenario's numbers are checked when it is read")
    }
}

/// The treatment of a job's packets on the network.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Treatment {
    /// The job's; priority and importance are each packet's own.
    pub(crate) class: Class,
    /// By how many bytes a full block is longer than its sample ..
    pub(crate) declared: u32,
    /// .. which has so many.
    pub(crate) block_bytes: usize,
}

impl Treatment {
    /// As the packet's tag says (§3.2.2, §4.2).
    pub(crate) fn class(&self, packet: &[u8]) -> Class {
        let tag = Tag::of_packet(packet);
        Class { priority: tag.priority, unimportant: !tag.important, ..self.class }
    }

    pub(crate) fn declared(&self, packet: &[u8]) -> u32 {
        let is_full = packet.len() == self.block_bytes
            && Preamble::parse(packet).is_ok_and(|preamble| preamble.kind == Kind::Block);
        if is_full { self.declared } else { 0 }
    }
}

fn block<'a>(packet: &Packet<'a>) -> Option<BlockPacket<'a>> {
    let Body::Bytes(bytes) = packet.body else { return None };
    let preamble = Preamble::parse(bytes).ok().filter(|preamble| preamble.kind == Kind::Block)?;
    BlockPacket::parse(preamble, bytes).ok()
}

fn signal(packet: &[u8]) -> Option<SignalPacket<'_>> {
    let preamble = Preamble::parse(packet).ok().filter(|preamble| preamble.kind == Kind::Signal)?;
    SignalPacket::parse(preamble, packet).ok()
}

/// Whether a signal says that something got on: that packets came, or enough of them.
fn gets_on(packet: &Packet<'_>) -> bool {
    let Body::Bytes(bytes) = packet.body else { return false };
    match signal(bytes).map(|packet| packet.signal) {
        Some(Signal::Report(report)) => report.packets > 0,
        Some(Signal::Finish) => true,
        _ => false,
    }
}

/// The blocks of one part of each tensor of a job.
fn blocks_of(tenant: &Tenant, part: usize) -> impl Fn(u64) -> u32 + '_ {
    let elements = tenant.plan().system.packet_elements();
    move |tensor| tenant.range(tensor, part).len().div_ceil(elements) as u32
}

/// A job in a run.
struct Job {
    system: Dlcp,
    tenant: Tenant,
    /// Of each tensor.
    parts: Vec<Part>,
    /// By host, where several machines of one share it.
    nics: BTreeMap<NodeId, Rc<Nic>>,
    treatment: Treatment,
    /// The loss that workers were told of, for the tensors that came back.
    lost: Rc<Cell<Loss>>,
}

/// The part of a tensor that a server or the ring sums.
struct Part {
    config: JobConfig,
    server: Option<Rc<Server>>,
    ledger: Rc<RefCell<Ledger>>,
}

type WorkerActor = Machine<Worker<SimAddress, Gradient>, Overseen>;
type RingActor = Machine<Ring<SimAddress, Gradient>, Overseen>;

impl Job {
    fn machine<E>(&self, machine: E, process: Process) -> Machine<E, Overseen>
    where
        E: WorkerMachine<Address = SimAddress, Tensor = Gradient> + 'static,
    {
        let op = if self.system.may_keep(self.tenant.plan().integers) { Op::Average } else { Op::Sum };
        let (rank, part, tenant) = (process.rank(), process.part(), self.tenant.clone());
        let nic = self.nics.get(&process.node());
        let ledger = self.parts[part].ledger.clone();
        let owner = Overseen { process, ledger: ledger.clone(), lost: self.lost.clone(), op };
        let treatment = self.treatment;
        let machine = Machine::new(machine, owner)
            .classified(move |_, packet| {
                // All that leaves the machine passes here, also what is lost then.
                if let Some(SignalPacket { flow, round, signal: Signal::Request { .. }, .. }) = signal(packet)
                {
                    ledger.borrow_mut().asked(rank, flow, round, blocks_of(&tenant, part));
                }
                treatment.class(packet)
            })
            .declaring(move |packet| treatment.declared(packet));
        match nic {
            Some(nic) => machine.behind(nic.clone()),
            None => machine,
        }
    }
}

impl Machines for Job {
    fn add_worker(&self, network: &mut Network, process: Process) -> ActorId {
        let (node, rank) = (process.node(), process.rank());
        let (place, part) = (WorkerId(rank as u8), &self.parts[process.part()]);
        if let Some(server) = &part.server {
            let (port, server) = (process.port(), SimAddress::new(server.node, SERVER_PORT));
            let worker = Worker::new(part.config, place, server);
            return network.add_actor(node, port, self.machine(worker, process));
        }
        // A rank has to know where the next one will be.
        let port = RING_PORT + self.tenant.index as u16;
        let workers = &self.tenant.plan().workers;
        let neighbour = |rank: usize| SimAddress::new(workers[rank % workers.len()], port);
        let (left, right) = (neighbour(rank + workers.len() - 1), neighbour(rank + 1));
        network.add_actor(node, port, self.machine(Ring::new(part.config, place, left, right), process))
    }

    fn counters(&self, network: &Network) -> Counters {
        let (mut packets_sent, mut retransmissions) = (0, 0);
        for actor in self.tenant.machines() {
            let worker = network.actor::<WorkerActor>(actor).map(|actor| actor.machine.statistics());
            let rank = || network.actor::<RingActor>(actor).map(|actor| actor.machine.statistics());
            if let Some(statistics) = worker.or_else(rank) {
                packets_sent += statistics.packets_sent;
                retransmissions += statistics.retransmissions;
            }
        }
        let lost = self.lost.get();
        let added = |part: &Part| Some(part.server.as_ref()?.aggregations(network, part.config.id));
        Counters {
            server_aggregations: self.parts.iter().map(added).sum(),
            packets_sent: Some(packets_sent),
            retransmissions: Some(retransmissions),
            contributions: Some(lost.contributions),
            contributions_lost: Some(lost.lost),
            retransmission_rounds: Some(lost.rounds.into()),
            ..Counters::default()
        }
    }

    fn standing(&self, network: &Network) -> String {
        let of = |part: &Part| part.server.as_ref()?.standing(network, part.config.id);
        let progress = self.parts.iter().filter_map(of);
        progress.map(|progress| format!("; its server: {progress}")).collect()
    }

    fn die(&self, network: &mut Network) {
        for part in &self.parts {
            if let Some(server) = &part.server {
                server.remove(network, part.config.id);
            }
        }
    }
}

/// Owner of a worker's machine: notes what it takes, and has each sum checked against that.
struct Overseen {
    process: Process,
    ledger: Rc<RefCell<Ledger>>,
    lost: Rc<Cell<Loss>>,
    op: Op,
}

impl Overseen {
    fn completed(&self, context: &mut Context<'_>, sum: Gradient, told: Option<Loss>) {
        let of = (self.process.rank(), sum.tensor);
        let tenant = self.process.tenant();
        let blocks = blocks_of(tenant, self.process.part());
        let inside = self.ledger.borrow_mut().completed(of, told, blocks);
        let mut all = self.lost.get();
        all += told.unwrap_or_default();
        self.lost.set(all);
        match inside {
            Ok(inside) => self.process.completed_inside(context, sum, &inside),
            Err(violation) => tenant.violated(context, violation),
        }
    }
}

impl<E: WorkerMachine<Address = SimAddress, Tensor = Gradient> + 'static> Owner<E> for Overseen {
    fn start(&mut self, _machine: &mut E, context: &mut Context<'_>) {
        self.process.started(context);
    }

    fn event(&mut self, _machine: &mut E, event: WorkerEvent<Gradient>, context: &mut Context<'_>) {
        match event {
            WorkerEvent::Completed(sum, times) => {
                self.completed(context, sum, times.map(|times| times.loss));
            }
            WorkerEvent::Aborted(reason) => self.process.aborted(context, reason),
        }
    }

    fn timer(&mut self, _machine: &mut E, timer: u64, context: &mut Context<'_>) {
        self.process.timer(context, timer);
    }

    fn notice(&mut self, machine: &mut E, notice: u64, _context: &mut Context<'_>) {
        while notice == Process::SUBMIT
            && let Some(part) = self.process.next()
        {
            machine.submit(part, self.op);
        }
    }

    fn handled(&mut self, packet: &Packet<'_>, verdict: Verdict, context: &mut Context<'_>) {
        if verdict != Verdict::Absorb {
            return;
        }
        if let Some(block) = block(packet) {
            let tenant = self.process.tenant();
            let blocks = blocks_of(tenant, self.process.part());
            let came = self.ledger.borrow_mut().came(self.process.rank(), &block.header, blocks);
            if let Err(violation) = came {
                tenant.violated(context, violation);
            }
            self.process.progressed(context);
        } else if gets_on(packet) {
            self.process.progressed(context);
        }
    }
}
