//! The code shared by systems with machines of the protocol room `aggregation`: their stations, and
//! a job in a run.

mod keys;
mod stations;
mod window;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use fanin_protocol::WorkerMachine;
use fanin_protocol::aggregation::{JobConfig, Roster, Route, Scaling, Way, Worker, WorkerPlan};
use fanin_wire::{Label, fragment_packet_bytes};

use super::worker::{WorkerOwner, retransmission};
use super::{Counters, Declare, Machines, Process, Tenant};
use crate::net::{ActorId, Machine, Network, NodeId, SimAddress};
use crate::workload::{Gradient, first};
pub(super) use keys::{OverflowName, ScalingName, fragments, server, window, window_max};
pub(super) use stations::{Served, Server, Switch};
use stations::{fragment, parsed};
pub(super) use window::Window;

/// Kinds of packets: a fragment on its way up, a sum on its way down.
const GRADIENT: &str = "gradient";
const PARAMETERS: &str = "parameters";
/// Both.
pub(super) const PACKET_KINDS: [&str; 2] = [GRADIENT, PARAMETERS];

/// Which of these a packet is, if it has such a label.
pub(super) fn kind_of<L: Label>(packet: &[u8]) -> Option<&'static str> {
    Some(if parsed::<L>(packet)?.header.flags.is_ack { PARAMETERS } else { GRADIENT })
}

/// How far an element of a float sum may be from the exact one
/// ([`System::bound`](super::System::bound)).
pub(super) fn bound(scaling: Scaling, workers: usize, largest: f64) -> f64 {
    let workers = workers as f64;
    // Each contribution is rounded once, to a multiple of the factor (ATP §3.8): n halves of a
    // unit.
    let fixed = workers / 2.0 / 1e8;
    // A factor of its own has the whole range of an int32, less n, for n times its largest value
    // (§B.3).
    let own = match scaling {
        Scaling::Static => 0.0,
        Scaling::Dynamic => workers / 2.0 * workers * largest / (f64::from(i32::MAX) - workers),
    };
    fixed.max(own) * (1.0 + 1e-6)
}

type WorkerActor<D> = Machine<Worker<SimAddress, Gradient, D>, WorkerOwner>;
/// Tells stations where the worker of this rank is from now on.
type Moved = Box<dyn Fn(&mut Network, usize, SimAddress)>;

/// A job in a run, whose fragments are labelled by `D`, routed by `R` and counted by `S`.
pub(super) struct Job<D, R, S: Roster<SimAddress>> {
    pub(super) tenant: Tenant,
    pub(super) timeout: Duration,
    /// The elements of a packet, also those that only its length counts.
    pub(super) elements: u16,
    /// Whether any switch does.
    pub(super) switches_sum: bool,
    /// A part for each server: all of them are one to the user.
    pub(super) parts: Vec<Part<D, R, S>>,
}

/// The part of a job at one server.
pub(super) struct Part<D, R, S: Roster<SimAddress>> {
    pub(super) config: JobConfig,
    /// The directions in a worker's packets, and the sender of its parameters.
    pub(super) workers: Vec<(D, SimAddress)>,
    pub(super) switches: Vec<Rc<Switch<R>>>,
    pub(super) server: Rc<Server<S>>,
    pub(super) window: Rc<RefCell<Window>>,
    pub(super) declare: Declare,
    /// Told that a worker has moved, if nobody learns it from the worker's packets.
    pub(super) moved: Option<Moved>,
}

impl<D, R, S: Roster<SimAddress>> Part<D, R, S> {
    fn depends_on(&self, node: NodeId) -> bool {
        self.server.node == node || self.switches.iter().any(|switch| switch.node == node)
    }

    fn moved(&self, network: &mut Network, rank: usize, to: SimAddress) {
        if let Some(moved) = &self.moved {
            moved(network, rank, to);
        }
    }
}

impl<D, R, S> Job<D, R, S>
where
    D: Way<SimAddress> + Clone + 'static,
    R: Route<SimAddress> + 'static,
    S: Roster<SimAddress> + 'static,
{
    fn worker(&self, process: Process) -> WorkerActor<D> {
        let (rank, part) = (process.rank(), &self.parts[process.part()]);
        let (directions, upstream) = part.workers[rank].clone();
        let worker = Worker::new(part.config, directions, upstream, retransmission(self.timeout))
            .with_packet_bytes(fragment_packet_bytes::<D::Label>(self.elements.into()));
        let declare = part.declare.clone();
        let (class, window) = (self.tenant.plan().class, part.window.clone());
        let owner = WorkerOwner::watched(process, move |packet| {
            let parameters = fragment::<D::Label>(packet)
                .filter(|fragment| fragment.header.flags.is_ack && !fragment.payload.is_empty());
            // Without, the server asks for something again: nothing has come.
            let Some(parameters) = parameters else { return false };
            window.borrow_mut().received(rank, parameters.header.sequence);
            true
        });
        Machine::new(worker, owner).classified(move |_, _| class).declaring(move |packet| declare(packet))
    }
}

impl<D, R, S> Machines for Job<D, R, S>
where
    D: Way<SimAddress> + Clone + 'static,
    R: Route<SimAddress> + 'static,
    S: Roster<SimAddress> + 'static,
{
    fn add_worker(&self, network: &mut Network, process: Process) -> ActorId {
        let (node, port) = (process.node(), process.port());
        let part = &self.parts[process.part()];
        part.moved(network, process.rank(), SimAddress::new(node, port));
        network.add_actor(node, port, self.worker(process))
    }

    fn counters(&self, network: &Network) -> Counters {
        let (mut switch_aggregations, mut switch_collisions) = (0, 0);
        let (mut server_aggregations, mut overflows) = (0, 0);
        let (mut server_bytes, mut gradient_hop_bytes) = (0, 0);
        for part in &self.parts {
            let at_server = part.server.came.of(part.config.id);
            server_bytes += at_server.bytes;
            gradient_hop_bytes += at_server.hop_bytes;
            for switch in &part.switches {
                gradient_hop_bytes += switch.came.of(part.config.id).hop_bytes;
                if let Some(progress) = switch.progress(network, part.config.id) {
                    switch_aggregations += progress.aggregations;
                    switch_collisions += progress.collisions;
                }
            }
            if let Some(progress) = part.server.progress(network, part.config.id) {
                server_aggregations += progress.aggregations;
                overflows += progress.overflows;
            }
        }
        let (mut packets_sent, mut retransmissions, mut proactive) = (0, 0, 0);
        for actor in self.tenant.machines() {
            if let Some(worker) = network.actor::<WorkerActor<D>>(actor) {
                packets_sent += worker.machine.statistics().packets_sent;
                retransmissions += worker.machine.statistics().retransmissions;
                proactive += worker.machine.progress().proactive;
            }
        }
        Counters {
            switch_aggregations: self.switches_sum.then_some(switch_aggregations),
            switch_collisions: self.switches_sum.then_some(switch_collisions),
            server_aggregations: Some(server_aggregations),
            server_bytes: Some(server_bytes),
            gradient_hop_bytes: Some(gradient_hop_bytes),
            packets_sent: Some(packets_sent),
            retransmissions: Some(retransmissions),
            overflows: Some(overflows),
            proactive: Some(proactive),
            ..Counters::default()
        }
    }

    fn standing(&self, network: &Network) -> String {
        let workers = self.tenant.machines().into_iter().filter_map(|actor| {
            let progress = network.actor::<WorkerActor<D>>(actor)?.machine.progress();
            Some(format!("expects {} sends {}", progress.expected, progress.next))
        });
        let servers = self.parts.iter().filter_map(|part| {
            let progress = part.server.progress(network, part.config.id)?;
            Some(format!("gathers {}", progress.earliest))
        });
        let (workers, servers): (Vec<_>, Vec<_>) = (workers.collect(), servers.collect());
        format!("; workers: {}; server: {}", first(&workers), first(&servers))
    }

    /// The controller tells the workers of all jobs that use a switch or server that it is back. A
    /// worker with something to send would find out without that. But a server that forgot as well
    /// may need what only a worker with nothing to send has.
    fn resume(&self, network: &mut Network, node: NodeId) {
        for (number, part) in self.parts.iter().enumerate().filter(|(_, part)| part.depends_on(node)) {
            for rank in 0..self.tenant.plan().workers.len() {
                let actor = self.tenant.machine(rank, number);
                if network.actor::<WorkerActor<D>>(actor).is_none() {
                    continue;
                }
                let (directions, upstream) = part.workers[rank].clone();
                network.with_actor(actor, |worker: &mut WorkerActor<D>, context| {
                    let (id, key, generation) =
                        (part.config.id, part.config.key, worker.machine.generation());
                    let plan = WorkerPlan { id, key, generation, directions, upstream };
                    worker.machine.resume(context.now(), plan);
                    worker.drain(context);
                });
            }
        }
    }

    /// On the same host but at another port (ATP §A.3). It begins where the server says that the
    /// job stands; the parameters of before it would copy from another worker.
    fn respawn(&self, network: &mut Network, mut process: Process) -> Option<ActorId> {
        let part = &self.parts[process.part()];
        let earliest = part.server.progress(network, part.config.id)?.earliest;
        let (tensor, fragment) = self.tenant.locate(earliest, self.elements.into());
        process.in_place_of_another(tensor, fragment as usize * usize::from(part.config.elements));
        part.window.borrow_mut().begins_at(process.rank(), earliest);
        let (node, port) = (process.node(), process.port());
        part.moved(network, process.rank(), SimAddress::new(node, port));
        let mut worker = self.worker(process);
        worker.machine.begin_at(earliest, tensor as u16, fragment);
        Some(network.add_actor(node, port, worker))
    }

    fn die(&self, network: &mut Network) {
        for part in &self.parts {
            part.server.remove(network, part.config.id);
        }
    }
}
