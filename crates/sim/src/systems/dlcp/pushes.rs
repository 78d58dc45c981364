//! Flows of DLCP without anybody's sums, to be compared with connections that carry the same
//! (§5.2.1). From each worker to each server there are the product's two machines, which are a job
//! of one worker whose sums nobody gets.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use fanin_protocol::dlcp::{Finish, JobConfig, RateConfig, Server, Worker};
use fanin_protocol::{
    Elements, Instant, JobAborted, Layer, Summer, Tensor, Verdict, WorkerEvent, WorkerMachine,
};
use fanin_wire::{
    Generation, JobId, Key, LossBound, Op, Operation, Pattern, Preamble, SAMPLE_ELEMENTS, ShardId, Signal,
    SignalPacket, WorkerId, block_packet_bytes,
};

use super::super::placement::line_rate;
use super::super::worker::retransmission;
use super::keys::{FLOW_BLOCKS, FLOWS, elements_for_mtu};
use super::{FRAMING_BYTES, Treatment, block};
use crate::net::{
    ActorId, Body, Class, Context, Machine, Network, Nic, NodeId, Owner, Packet, SimAddress, Time,
};
use crate::workload::{Push, mtu};

/// The first UDP port of such machines, on each host.
const FIRST_PORT: u16 = 20_000;
const ELEMENT_BYTES: u64 = 4;
/// Thirty samples, or the longest signal.
pub(super) const TRAIN_BYTES: usize = 2048;

/// How flows are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PushPlan {
    /// The loss bound of each flow, as a part of its packets.
    pub loss_bound: LossBound,
    /// How often receivers report.
    pub period: std::time::Duration,
    /// How many times as much as arrives is sent when that is congestion.
    pub delta: f64,
    /// Whether all flows on a way have a rate that follows what arrives.
    pub follows: bool,
    /// When a receiver has enough.
    pub finish: Finish,
    /// How long nothing more must have come after a stop.
    pub quiet: std::time::Duration,
    /// Shortest wait for an answer to a signal.
    pub timeout: std::time::Duration,
}

/// The record of the flows of an entry.
#[derive(Debug, Default)]
pub(crate) struct Books {
    /// By flow: when it was opened, and when its sender heard that enough of it was there.
    pub(crate) times: Vec<(Time, Option<Time>)>,
    pub(crate) packets: u64,
    pub(crate) packets_arrived: u64,
    pub(crate) delivered_bytes: u64,
    pub(crate) retransmission_rounds: u64,
}

/// The flows of an entry.
pub(crate) struct Pushes {
    plan: PushPlan,
    class: Class,
    /// By worker's and server's host: the sender.
    senders: BTreeMap<(NodeId, NodeId), ActorId>,
    ports: Rc<RefCell<BTreeMap<NodeId, u16>>>,
    nics: BTreeMap<NodeId, Rc<Nic>>,
    books: Rc<RefCell<Books>>,
}

type SenderActor = Machine<Worker<SimAddress, Part>, Sender>;

impl Pushes {
    /// `ports` are those that all entries' machines have taken.
    pub(crate) fn new(plan: PushPlan, class: Class, ports: Rc<RefCell<BTreeMap<NodeId, u16>>>) -> Self {
        Self { plan, class, senders: BTreeMap::new(), ports, nics: BTreeMap::new(), books: Rc::default() }
    }

    pub(crate) fn books(&self) -> std::cell::Ref<'_, Books> {
        self.books.borrow()
    }

    /// Packets sent by workers, and those of them that were sent again.
    pub(crate) fn sent(&self, network: &Network) -> (u64, u64) {
        let machines = self.senders.values().filter_map(|actor| network.actor::<SenderActor>(*actor));
        machines
            .map(|actor| actor.machine.statistics())
            .fold((0, 0), |sum, of| (sum.0 + of.packets_sent, sum.1 + of.retransmissions))
    }

    /// A worker has a tensor for a server, now.
    pub(crate) fn open(&mut self, network: &mut Network, push: &Push) {
        let elements =
            elements_for_mtu(mtu(network.topology(), push.from) as usize).unwrap_or(SAMPLE_ELEMENTS);
        let whole = push.bytes.div_ceil(ELEMENT_BYTES) as usize;
        let packets = whole.div_ceil(elements);
        let sender = match self.senders.get(&(push.from, push.to)) {
            Some(sender) => *sender,
            None => self.add(network, push, elements),
        };
        let part = {
            let mut books = self.books.borrow_mut();
            books.times.push((network.time(), None));
            books.packets += packets as u64;
            let number = books.times.len() - 1;
            let last = (whole - (packets - 1) * elements).min(SAMPLE_ELEMENTS);
            Part::new(number, whole, (packets - 1) * SAMPLE_ELEMENTS + last, push.layer)
        };
        network.with_actor(sender, |actor: &mut SenderActor, context| {
            let pattern = Pattern::Reduce(NOBODY);
            actor.machine.submit(part, Operation { op: Op::Sum, pattern });
            actor.drain(context);
        });
    }

    /// Adds both machines of a pair.
    fn add(&mut self, network: &mut Network, push: &Push, elements: usize) -> ActorId {
        let id = JobId(self.senders.len() as u32);
        let config = JobConfig {
            id,
            key: Key::new(u128::from(id.0)),
            generation: Generation(0),
            workers: 1,
            shard: ShardId(0),
            elements: SAMPLE_ELEMENTS as u16,
            push_bound: self.plan.loss_bound,
            pull_bound: LossBound::RELIABLE,
            flow_blocks: FLOW_BLOCKS,
            flows: FLOWS,
            window_blocks: FLOW_BLOCKS * FLOWS as u32,
            rate: RateConfig {
                line_rate_bps: line_rate(network.topology(), std::iter::once(push.from)),
                packet_bytes: (block_packet_bytes(4 * elements) + FRAMING_BYTES) as u32,
                period: self.plan.period,
                delta: self.plan.delta,
                ahead: self.plan.period / 10,
                calm_periods: 1,
                follows: self.plan.follows,
                sorts: self.plan.finish == Finish::Stopped,
            },
            finish: self.plan.finish,
            quiet: self.plan.quiet,
            retransmission: retransmission(self.plan.timeout),
            paths: 1,
            resumes_at: None,
        };
        let treatment = Treatment {
            class: self.class,
            declared: (4 * (elements - SAMPLE_ELEMENTS)) as u32,
            block_bytes: block_packet_bytes(4 * SAMPLE_ELEMENTS),
        };
        let mut server = Server::new(ShardId(0));
        server.add_job(config.into()).expect("a scenario's numbers are checked when it is read");
        let receiver = Receiver { books: self.books.clone(), treatment };
        let (port, of_worker) = (self.port(push.to), self.port(push.from));
        let server = Machine::new(server, receiver)
            .classified(move |_, packet| treatment.class(packet))
            .declaring(move |packet| treatment.declared(packet));
        network.add_actor(push.to, port, server);
        let worker = Worker::new(config, WorkerId(0), SimAddress::new(push.to, port));
        let nic =
            self.nics.entry(push.from).or_insert_with(|| Nic::new(config.rate.line_rate_bps, TRAIN_BYTES));
        let worker = Machine::new(worker, Sender(self.books.clone()))
            .behind(nic.clone())
            .classified(move |_, packet| treatment.class(packet))
            .declaring(move |packet| treatment.declared(packet));
        let sender = network.add_actor(push.from, of_worker, worker);
        self.senders.insert((push.from, push.to), sender);
        sender
    }

    fn port(&self, host: NodeId) -> u16 {
        let mut ports = self.ports.borrow_mut();
        let port = ports.entry(host).or_insert(FIRST_PORT);
        *port += 1;
        *port
    }
}

/// A place that no worker has: sums stay where they are.
const NOBODY: WorkerId = WorkerId(1);

/// The data from a worker to a server: the first elements of each packet.
#[derive(Debug)]
struct Part {
    number: usize,
    numbers: Vec<f32>,
    whole: usize,
    layer: Layer,
}

impl Part {
    /// The packets' magnitudes are evenly distributed, so that about half of the packets are
    /// important.
    fn new(number: usize, whole: usize, count: usize, layer: Layer) -> Self {
        let of = |at: usize| {
            let hash = (at as u32 / SAMPLE_ELEMENTS as u32).wrapping_mul(0x9e37_79b1)
                ^ (number as u32).wrapping_mul(0x85eb_ca6b);
            let hash = (hash ^ hash >> 15).wrapping_mul(0xc2b2_ae35);
            (hash >> 8) as f32
        };
        Self { number, numbers: (0..count).map(of).collect(), whole, layer }
    }
}

impl Tensor for Part {
    fn elements(&mut self) -> Elements<'_> {
        Elements::Float32(&mut self.numbers)
    }

    fn whole_elements(&mut self) -> usize {
        self.whole
    }

    fn layer(&self) -> Layer {
        self.layer
    }
}

/// Owner of a worker's end.
struct Sender(Rc<RefCell<Books>>);

impl Owner<Worker<SimAddress, Part>> for Sender {
    fn event(
        &mut self,
        _machine: &mut Worker<SimAddress, Part>,
        event: WorkerEvent<Part>,
        context: &mut Context<'_>,
    ) {
        // A flow that was given up has no end, and the report says so.
        if let WorkerEvent::Completed(part, _) = event {
            self.0.borrow_mut().times[part.number].1 = Some(context.now().since(Instant(0)).into());
        }
    }

    fn handled(&mut self, packet: &Packet<'_>, verdict: Verdict, _context: &mut Context<'_>) {
        let Body::Bytes(bytes) = packet.body else { return };
        let Ok(preamble) = Preamble::parse(bytes) else { return };
        let signal = SignalPacket::parse(preamble, bytes).map(|packet| packet.signal);
        if let (Ok(Signal::Request { part: 0, .. }), Verdict::Absorb) = (signal, verdict) {
            self.0.borrow_mut().retransmission_rounds += 1;
        }
    }
}

/// Owner of a server's end.
struct Receiver {
    books: Rc<RefCell<Books>>,
    treatment: Treatment,
}

impl Owner<Server<SimAddress>> for Receiver {
    fn event(&mut self, _machine: &mut Server<SimAddress>, _event: JobAborted, _context: &mut Context<'_>) {}

    fn handled(&mut self, packet: &Packet<'_>, verdict: Verdict, _context: &mut Context<'_>) {
        let (Some(block), Body::Bytes(bytes)) = (block(packet), packet.body) else { return };
        if matches!(verdict, Verdict::Absorb | Verdict::Multicast) {
            let mut books = self.books.borrow_mut();
            books.packets_arrived += 1;
            books.delivered_bytes += block.payload.len() as u64 + u64::from(self.treatment.declared(bytes));
        }
    }
}
