//! ATP: switches on the way with memory that all jobs share, and a server behind them; and what its paper compares it with, in
//! which the same machines have less help: a rack-scale service, a server alone, a server beside each worker.

mod keys;
mod placement;
mod stations;
mod window;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use fanin_protocol::WorkerMachine;
use fanin_protocol::atp::{
    AtpJobConfig, AtpWorker, AtpWorkerPlan, Hashing, Overflow, Scaling, ServerJob, SwitchRoute,
};
use fanin_wire::{Directions, GradientPacket, Kind, Preamble, SAMPLE_ELEMENTS, fragment_packet_bytes};

use super::worker::{WorkerOwner, retransmission};
use super::{Counters, Declare, Machines, Process, Site, System, Tenant};
use crate::net::{ActorId, Machine, Network, NodeId, SimAddress};
use crate::workload::{Gradient, first};
use placement::Placement;
use stations::{SERVER_PORT, SWITCH_PORT, Served, Server, Switch, gradient};
use window::Window;

pub(crate) use keys::{ATP, PS, PS_N_TO_N, RSS};

/// Kinds of packets: a fragment on its way up, a sum on its way down.
const GRADIENT: &str = "gradient";
const PARAMETERS: &str = "parameters";

type WorkerActor = Machine<AtpWorker<SimAddress, Gradient>, WorkerOwner>;

/// ATP's machines in one of their configurations.
#[derive(Clone, Debug)]
pub struct Atp {
    /// Which switches aggregate.
    pub help: Help,
    /// The server's host; none is a server beside each worker, which sums its part of each tensor.
    pub server: Option<NodeId>,
    /// Elements of a packet.
    pub elements: u16,
    /// Packets of a worker under way, at most.
    pub window: u16,
    /// Choice of aggregators.
    pub hashing: Hashing,
    /// The factor.
    pub scaling: Scaling,
    /// What happens with overflows.
    pub overflow: Overflow,
    /// Whether workers adjust their windows.
    pub congestion_control: bool,
    /// Shortest wait for an answer.
    pub timeout: Duration,
}

/// Which switches aggregate for a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Help {
    /// All on the way: ATP.
    Way,
    /// The workers', each for itself: ATP §5.2.2's rack-scale service.
    Racks,
    /// None.
    None,
}

impl System for Atp {
    fn name(&self) -> &'static str {
        match (self.help, self.server) {
            (Help::Way, _) => "atp",
            (Help::Racks, _) => "rss",
            (Help::None, Some(_)) => "ps",
            (Help::None, None) => "ps-n-to-n",
        }
    }

    fn parts(&self, workers: usize) -> usize {
        if self.server.is_some() { 1 } else { workers }
    }

    fn server(&self) -> Option<NodeId> {
        self.server
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn sample_elements(&self) -> Option<usize> {
        Some(SAMPLE_ELEMENTS)
    }

    fn packet_kinds(&self) -> &'static [&'static str] {
        &[GRADIENT, PARAMETERS]
    }

    fn kind_of(&self, packet: &[u8]) -> Option<&'static str> {
        let preamble = Preamble::parse(packet).ok().filter(|preamble| preamble.kind == Kind::Gradient)?;
        let gradient = GradientPacket::parse(preamble, packet).ok()?;
        Some(if gradient.header.flags.is_ack { PARAMETERS } else { GRADIENT })
    }

    fn bound(&self, workers: usize, largest: f64) -> f64 {
        let workers = workers as f64;
        // Each contribution is rounded once, to a multiple of the factor (ATP §3.8): n halves of a unit.
        let fixed = workers / 2.0 / 1e8;
        // A factor of its own has the whole range of an int32, less n, for n times its largest value (§B.3).
        let own = match self.scaling {
            Scaling::Static => 0.0,
            Scaling::Dynamic => workers / 2.0 * workers * largest / (f64::from(i32::MAX) - workers),
        };
        fixed.max(own) * (1.0 + 1e-6)
    }

    fn packet_elements(&self) -> usize {
        self.elements.into()
    }

    fn plan(&self, tenant: Tenant, site: &mut Site<'_>) -> Box<dyn Machines> {
        let servers = match self.server {
            Some(server) => vec![server],
            None => tenant.plan().workers.clone(),
        };
        let parts =
            servers.into_iter().enumerate().map(|(part, server)| self.part(&tenant, part, server, site));
        let parts = parts.collect();
        Box::new(Job { config: self.clone(), tenant, parts })
    }
}

impl Atp {
    fn part(&self, tenant: &Tenant, part: usize, server: NodeId, site: &mut Site<'_>) -> Part {
        let plan = tenant.plan();
        let identity = (tenant.id(part), tenant.key(part));
        let placement = self
            .place(site.topology(), &plan.workers, server, identity)
            .expect("a scenario's placements are checked when it is read");
        let config = AtpJobConfig {
            id: placement.admission.job,
            key: placement.admission.key,
            generation: placement.admission.generation,
            workers: placement.admission.world_size,
            elements: if plan.sampled { SAMPLE_ELEMENTS as u16 } else { placement.admission.elements },
            window_max: placement.admission.in_flight,
            aggregators: site.switch().aggregators,
            hashing: self.hashing,
            scaling: self.scaling,
            overflow: self.overflow,
            congestion_control: self.congestion_control,
            originals_elements_max: 0,
        };
        let config = config.check().expect("a scenario's numbers are checked when it is read");
        let window = Rc::new(RefCell::new(Window::new(self.window, plan.workers.len())));
        let (classify, declare) = (site.classify(), site.declare(fragment_packet_bytes(SAMPLE_ELEMENTS)));
        let mut switches = Vec::new();
        for hop in &placement.switches {
            let (switch, classify, declare) = (site.switch(), classify.clone(), declare.clone());
            let station = site.station(hop.switch, SWITCH_PORT, || Switch {
                node: hop.switch,
                aggregators: switch.aggregators,
                ways: switch.ways,
                stale: switch.stale,
                classify,
                declare,
                actor: Cell::new(ActorId(u32::MAX)),
                routes: RefCell::default(),
                elements: Cell::new(0),
            });
            let port = if hop.upstream == server { SERVER_PORT } else { SWITCH_PORT };
            station.routes.borrow_mut().push(SwitchRoute {
                id: config.id,
                key: config.key,
                generation: config.generation,
                upstream: SimAddress::new(hop.upstream, port),
                level: hop.level,
            });
            station.elements.set(station.elements.get().max(config.elements));
            switches.push(station);
        }
        let workers = placement.workers.iter().map(|(directions, _)| *directions).collect();
        let job = ServerJob { config, workers, level: placement.server_level, restored: false };
        let server = site.station(server, SERVER_PORT, || Server {
            node: server,
            classify,
            declare: declare.clone(),
            actor: Cell::new(ActorId(u32::MAX)),
            jobs: RefCell::default(),
        });
        server.jobs.borrow_mut().push(Served { job, tenant: tenant.clone(), window: window.clone() });
        Part { config, placement, switches, server, window, declare }
    }
}

/// A job in a run.
struct Job {
    config: Atp,
    tenant: Tenant,
    /// One for each server: all of them are one to the user.
    parts: Vec<Part>,
}

/// One server's part of a job.
struct Part {
    config: AtpJobConfig,
    placement: Placement,
    switches: Vec<Rc<Switch>>,
    server: Rc<Server>,
    window: Rc<RefCell<Window>>,
    declare: Declare,
}

impl Part {
    /// What a worker's packets say, and where they go first.
    fn way_up(&self, rank: usize) -> (Directions, SimAddress) {
        let (directions, upstream) = self.placement.workers[rank];
        let port = if upstream == self.server.node { SERVER_PORT } else { SWITCH_PORT };
        (directions, SimAddress::new(upstream, port))
    }

    fn depends_on(&self, node: NodeId) -> bool {
        self.server.node == node || self.switches.iter().any(|switch| switch.node == node)
    }
}

impl Job {
    fn worker(&self, process: Process) -> WorkerActor {
        let (rank, part) = (process.rank(), &self.parts[process.part()]);
        let (directions, upstream) = part.way_up(rank);
        let timeout = retransmission(self.config.timeout);
        let worker = AtpWorker::new(part.config, directions, upstream, timeout)
            .with_packet_bytes(fragment_packet_bytes(self.config.elements.into()));
        let declare = part.declare.clone();
        let (class, window) = (self.tenant.plan().class, part.window.clone());
        let owner = WorkerOwner::watched(process, move |packet| {
            let parameters = gradient(packet)
                .filter(|gradient| gradient.header.flags.is_ack && !gradient.payload.is_empty());
            // Without, the server asks for something again: nothing has come.
            let Some(parameters) = parameters else { return false };
            window.borrow_mut().received(rank, parameters.header.sequence);
            true
        });
        Machine::new(worker, owner).classified(move |_, _| class).declaring(move |packet| declare(packet))
    }
}

impl Machines for Job {
    fn add_worker(&self, network: &mut Network, process: Process) -> ActorId {
        let (node, port) = (process.node(), process.port());
        network.add_actor(node, port, self.worker(process))
    }

    fn counters(&self, network: &Network) -> Counters {
        let (mut switch_aggregations, mut switch_collisions) = (0, 0);
        let (mut server_aggregations, mut overflows) = (0, 0);
        for part in &self.parts {
            for switch in &part.switches {
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
            if let Some(worker) = network.actor::<WorkerActor>(actor) {
                packets_sent += worker.machine.statistics().packets_sent;
                retransmissions += worker.machine.statistics().retransmissions;
                proactive += worker.machine.progress().proactive;
            }
        }
        let aggregates = self.config.help != Help::None;
        Counters {
            switch_aggregations: aggregates.then_some(switch_aggregations),
            switch_collisions: aggregates.then_some(switch_collisions),
            server_aggregations: Some(server_aggregations),
            packets_sent: Some(packets_sent),
            retransmissions: Some(retransmissions),
            overflows: Some(overflows),
            proactive: Some(proactive),
            ..Counters::default()
        }
    }

    fn standing(&self, network: &Network) -> String {
        let workers = self.tenant.machines().into_iter().filter_map(|actor| {
            let progress = network.actor::<WorkerActor>(actor)?.machine.progress();
            Some(format!("expects {} sends {}", progress.expected, progress.next))
        });
        let servers = self.parts.iter().filter_map(|part| {
            let progress = part.server.progress(network, part.config.id)?;
            Some(format!("gathers {}", progress.earliest))
        });
        let (workers, servers): (Vec<_>, Vec<_>) = (workers.collect(), servers.collect());
        format!("; workers: {}; server: {}", first(&workers), first(&servers))
    }

    /// The controller tells the workers of all jobs that use a switch or server that it is back. They would find out by
    /// themselves, but for one who has nothing to send: a server that forgot as well may need what only he has.
    fn resume(&self, network: &mut Network, node: NodeId) {
        for (number, part) in self.parts.iter().enumerate().filter(|(_, part)| part.depends_on(node)) {
            for rank in 0..self.tenant.plan().workers.len() {
                let actor = self.tenant.machine(rank, number);
                if network.actor::<WorkerActor>(actor).is_none() {
                    continue;
                }
                let (directions, upstream) = part.way_up(rank);
                network.with_actor(actor, |worker: &mut WorkerActor, context| {
                    let (id, key, generation) =
                        (part.config.id, part.config.key, worker.machine.generation());
                    let plan = AtpWorkerPlan { id, key, generation, directions, upstream };
                    worker.machine.resume(context.now(), plan);
                    worker.drain(context);
                });
            }
        }
    }

    /// On the same host but at another port (ATP §A.3). It begins where the server says that the job stands; the parameters of
    /// before it would copy from another worker.
    fn respawn(&self, network: &mut Network, mut process: Process) -> Option<ActorId> {
        let part = &self.parts[process.part()];
        let earliest = part.server.progress(network, part.config.id)?.earliest;
        let (tensor, fragment) = self.tenant.locate(earliest, self.config.elements.into());
        process.in_place_of_another(tensor, fragment as usize * usize::from(part.config.elements));
        part.window.borrow_mut().begins_at(process.rank(), earliest);
        let (node, port) = (process.node(), process.port());
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
