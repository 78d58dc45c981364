//! Ring all-reduce over TCP-like connections, each worker's to the next: the baseline that ATP §5.1
//! calls Horovod.
//!
//! A tensor is cut into as many chunks as there are workers. In step `s` worker `r` sends chunk
//! `r - s`: in the first `n - 1` steps what it has summed of it, in the others the sum (Patarasuk
//! and Yuan, 2009). Steps of different tensors overlap. The connection carries lengths; the numbers
//! themselves travel beside it and are taken when their bytes have arrived.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use toml::Spanned;

use super::{Counters, Machines, Process, Site, System, Tenant};
use crate::net::{Actor, ActorId, Context, FlowId, Network, Notice, Packet, TcpConfig};
use crate::scenario_file::{Entry, Kind, Mistake, at, keys};
use crate::workload::{Gradient, mtu};
use fanin_units::Size;

/// A message's header: which tensor, which step.
const HEADER_BYTES: u64 = 16;
/// Token: a message from the worker before has arrived.
const ARRIVED: u64 = 100;
/// The bytes of the MTU that IP and TCP take.
const IP_TCP_BYTES: u32 = 40;

/// A ring of a job's workers, in the order of their ranks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ring {
    /// The most that a connection has on the way; [`TcpConfig`]'s unless given.
    pub receive_window_bytes: Option<u64>,
}

pub(crate) const KIND: Kind = Kind { name: "ring", keys: keys::<Keys>, resolve };

/// `[job.ring]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Keys {
    /// The most that a connection has on the way; 4 MiB unless given.
    receive_window: Option<Spanned<Size>>,
}

fn resolve(entry: &mut Entry<'_>) -> Result<Arc<dyn System>, Mistake> {
    let keys: Keys = entry.table()?;
    entry.workers_between(2, usize::MAX)?;
    let receive_window_bytes = match &keys.receive_window {
        Some(window) if window.get_ref().0 == 0 => {
            return Err(at(window, "`receive_window` must not be zero: nothing would be sent"));
        }
        Some(window) => Some(window.get_ref().0),
        None => None,
    };
    Ok(Arc::new(Ring { receive_window_bytes }))
}

impl System for Ring {
    fn name(&self) -> &'static str {
        "ring"
    }

    fn sample_elements(&self) -> Option<usize> {
        Some(fanin_wire::SAMPLE_ELEMENTS)
    }

    fn timeout_max(&self) -> Duration {
        TcpConfig::RTO_MAX
    }

    /// Workers' numbers are such that floats sum to the very number.
    fn bound(&self, _workers: usize, _largest: f64) -> f64 {
        0.0
    }

    fn plan(&self, tenant: Tenant, site: &mut Site<'_>) -> Box<dyn Machines> {
        let workers = &tenant.plan().workers;
        let topology = site.topology();
        let connection = |rank: usize| {
            let (from, to) = (workers[rank], workers[(rank + 1) % workers.len()]);
            let mtu = mtu(topology, from);
            let class = tenant.plan().class;
            let usual = TcpConfig::new(from, to);
            let window_max_bytes = self.receive_window_bytes.unwrap_or(usual.window_max_bytes);
            TcpConfig { segment_bytes: mtu - IP_TCP_BYTES, class, window_max_bytes, ..usual }
        };
        let connections = (0..workers.len()).map(connection).collect();
        let mailboxes = workers.iter().map(|_| Mailbox::default()).collect();
        Box::new(Job { connections, mailboxes, flows: Rc::default() })
    }
}

/// A ring in a run.
struct Job {
    /// From each worker to the next.
    connections: Vec<TcpConfig>,
    /// By rank: what a worker has sent and the next has not taken.
    mailboxes: Vec<Mailbox>,
    /// The connections that are open: they outlive the workers.
    flows: Rc<RefCell<Vec<FlowId>>>,
}

impl Machines for Job {
    fn add_worker(&self, network: &mut Network, process: Process) -> ActorId {
        let (node, port, rank) = (process.node(), process.port(), process.rank());
        let before = (rank + self.mailboxes.len() - 1) % self.mailboxes.len();
        let worker = RingWorker {
            process,
            connection: self.connections[rank],
            from_previous: self.mailboxes[before].clone(),
            to_next: self.mailboxes[rank].clone(),
            flow: None,
            flows: self.flows.clone(),
            tensors: BTreeMap::new(),
            early: Vec::new(),
        };
        network.add_actor(node, port, worker)
    }

    /// The packets that connections sent, acknowledgements among them, and sent again.
    fn counters(&self, network: &Network) -> Counters {
        let (mut packets_sent, mut retransmissions) = (0, 0);
        for flow in self.flows.borrow().iter() {
            packets_sent += network.flow(*flow).sent_packets;
            retransmissions += network.flow(*flow).retransmissions;
        }
        Counters {
            packets_sent: Some(packets_sent),
            retransmissions: Some(retransmissions),
            ..Counters::default()
        }
    }
}

/// A chunk of a tensor.
struct Message {
    tensor: u64,
    step: usize,
    chunk: Gradient,
}

/// The messages under way to a worker, in order.
type Mailbox = Rc<RefCell<VecDeque<Message>>>;

/// A worker of a ring.
struct RingWorker {
    process: Process,
    /// To the next worker.
    connection: TcpConfig,
    from_previous: Mailbox,
    to_next: Mailbox,
    flow: Option<FlowId>,
    /// The job's.
    flows: Rc<RefCell<Vec<FlowId>>>,
    tensors: BTreeMap<u64, Gradient>,
    /// Came before the tensor was submitted here.
    early: Vec<Message>,
}

impl RingWorker {
    fn workers(&self) -> usize {
        self.process.tenant().plan().workers.len()
    }

    fn send(&self, context: &mut Context<'_>, tensor: u64, step: usize) {
        let workers = self.workers();
        let Some(gradient) = self.tensors.get(&tensor) else { return };
        let rank = self.process.rank();
        let index = (rank + 2 * workers - step) % workers;
        let range = chunk(gradient.count(), workers, index);
        let elements = chunk(self.process.tenant().elements(tensor), workers, index).len();
        let bytes = HEADER_BYTES + 4 * elements as u64;
        self.to_next.borrow_mut().push_back(Message { tensor, step, chunk: gradient.part(range) });
        let next = self.process.tenant().machine((rank + 1) % workers, 0);
        if let Some(flow) = self.flow {
            context.write(flow, bytes, Some(Notice { actor: next, token: ARRIVED }));
        }
    }

    fn take(&mut self, context: &mut Context<'_>, message: Message) {
        let workers = self.workers();
        let Some(gradient) = self.tensors.get_mut(&message.tensor) else {
            return self.early.push(message);
        };
        let index = (self.process.rank() + 2 * workers - 1 - message.step) % workers;
        let range = chunk(gradient.count(), workers, index);
        if message.step < workers - 1 {
            gradient.add(range.start, &message.chunk);
        } else {
            gradient.set(range.start, &message.chunk);
        }
        if message.step < 2 * workers - 3 {
            return self.send(context, message.tensor, message.step + 1);
        }
        if let Some(gradient) = self.tensors.remove(&message.tensor) {
            self.process.completed(context, gradient);
        }
    }
}

/// Elements of one of `chunks` of a tensor.
fn chunk(elements: usize, chunks: usize, index: usize) -> std::ops::Range<usize> {
    elements * index / chunks..elements * (index + 1) / chunks
}

impl Actor for RingWorker {
    fn start(&mut self, context: &mut Context<'_>) {
        // Connections outlive that a node is away.
        if self.flow.is_none() {
            let flow = context.open_tcp(self.connection);
            self.flow = Some(flow);
            self.flows.borrow_mut().push(flow);
        }
        self.process.started(context);
    }

    fn packet(&mut self, _context: &mut Context<'_>, _packet: &Packet<'_>) {}

    fn timer(&mut self, context: &mut Context<'_>, timer: u64) {
        self.process.timer(context, timer);
    }

    fn notice(&mut self, context: &mut Context<'_>, notice: u64) {
        match notice {
            Process::SUBMIT => {
                let Some(part) = self.process.next() else { return };
                let tensor = part.tensor;
                self.tensors.insert(tensor, part);
                self.send(context, tensor, 0);
                let (ready, early) =
                    std::mem::take(&mut self.early).into_iter().partition(|message| message.tensor == tensor);
                self.early = early;
                let ready: Vec<Message> = ready;
                for message in ready {
                    self.take(context, message);
                }
            }
            ARRIVED => {
                let message = self.from_previous.borrow_mut().pop_front();
                if let Some(message) = message {
                    self.process.progressed(context);
                    self.take(context, message);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_a_tensor_once() {
        for (elements, workers) in [(10, 3), (2, 5), (0, 4), (1000, 7)] {
            let mut next = 0;
            for index in 0..workers {
                let range = chunk(elements, workers, index);
                assert_eq!(range.start, next);
                next = range.end;
            }
            assert_eq!(next, elements);
        }
    }
}
