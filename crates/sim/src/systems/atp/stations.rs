//! What jobs share: the aggregators of a switch, and the server of a host.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use fanin_protocol::atp::{
    AtpServer, AtpServerProgress, AtpSwitch, AtpSwitchConfig, AtpSwitchProgress, ServerJob, SwitchRoute,
};
use fanin_protocol::{JobAborted, Summer, Verdict};
use fanin_wire::{GradientPacket, JobId, Kind, Preamble};

use super::super::{Classify, Declare, Role, Station, Table, Tenant};
use super::window::Window;
use crate::net::{ActorId, Body, Context, Machine, Network, NodeId, Owner, Packet, SimAddress};
use crate::workload::Violation;

/// UDP ports.
pub(super) const SWITCH_PORT: u16 = 4800;
pub(super) const SERVER_PORT: u16 = 4802;

type SwitchMachine = Machine<AtpSwitch<SimAddress>, NoOwner>;
type ServerMachine = Machine<AtpServer<SimAddress>, ServerOwner>;

/// A programmable switch.
pub(super) struct Switch {
    pub(super) node: NodeId,
    pub(super) aggregators: u32,
    pub(super) ways: u8,
    pub(super) stale: Duration,
    pub(super) classify: Classify,
    pub(super) declare: Declare,
    pub(super) actor: Cell<ActorId>,
    pub(super) routes: RefCell<Vec<SwitchRoute<SimAddress>>>,
    /// Of the longest fragment.
    pub(super) elements: Cell<u16>,
}

impl Switch {
    /// With all its jobs and empty aggregators.
    fn machine(&self) -> SwitchMachine {
        let mut switch = AtpSwitch::new(AtpSwitchConfig {
            aggregators: self.aggregators,
            elements: self.elements.get(),
            ways: self.ways,
            stale: self.stale,
            ecn_threshold_packets: None,
        });
        for route in self.routes.borrow().iter() {
            switch.add_job(*route).expect("levels are those of a placement");
        }
        let (classify, declare) = (self.classify.clone(), self.declare.clone());
        Machine::new(switch, NoOwner)
            .classified(move |_, packet| classify(packet))
            .declaring(move |packet| declare(packet))
    }

    pub(super) fn progress(&self, network: &Network, id: JobId) -> Option<AtpSwitchProgress> {
        network.actor::<SwitchMachine>(self.actor.get())?.machine.progress(id)
    }
}

impl Station for Switch {
    fn role(&self) -> Role {
        Role::Switch
    }

    fn place(&self, network: &mut Network) {
        self.actor.set(network.add_actor(self.node, SWITCH_PORT, self.machine()));
    }

    fn actor(&self) -> ActorId {
        self.actor.get()
    }

    fn forget(&self, network: &mut Network) {
        network.replace_actor(self.actor.get(), self.machine());
    }

    fn table(&self, network: &Network) -> Option<Table> {
        let statistics = network.actor::<SwitchMachine>(self.actor.get())?.machine.statistics();
        Some(Table {
            aggregators: self.aggregators,
            in_use: statistics.in_use,
            aggregations: statistics.aggregations,
            collisions: Some(statistics.collisions),
            freed_by_parameters: Some(statistics.freed_by_parameters),
            freed_by_resend: Some(statistics.freed_by_resend),
            freed_stale: Some(statistics.freed_stale),
        })
    }
}

struct NoOwner;

impl Owner<AtpSwitch<SimAddress>> for NoOwner {
    fn event(
        &mut self,
        _machine: &mut AtpSwitch<SimAddress>,
        _event: JobAborted,
        _context: &mut Context<'_>,
    ) {
        // The workers hear of an abort, and their owners judge it.
    }
}

/// The server of a host.
pub(super) struct Server {
    pub(super) node: NodeId,
    pub(super) classify: Classify,
    pub(super) declare: Declare,
    pub(super) actor: Cell<ActorId>,
    pub(super) jobs: RefCell<Vec<Served>>,
}

/// One job, or one part of it.
#[derive(Clone)]
pub(super) struct Served {
    pub(super) job: ServerJob,
    pub(super) tenant: Tenant,
    pub(super) window: Rc<RefCell<Window>>,
}

impl Server {
    /// With all its jobs that live.
    fn machine(&self, restored: bool) -> ServerMachine {
        let mut server = AtpServer::new();
        let mut jobs = Vec::new();
        for served in self.jobs.borrow().iter().filter(|served| !served.tenant.is_dead()) {
            let job = ServerJob { restored, ..served.job.clone() };
            server.add_job(job).expect("a scenario's jobs are checked when it is read");
            jobs.push(served.clone());
        }
        let (classify, declare) = (self.classify.clone(), self.declare.clone());
        Machine::new(server, ServerOwner(jobs))
            .classified(move |_, packet| classify(packet))
            .declaring(move |packet| declare(packet))
    }

    /// Where a job stands, unless the server is away.
    pub(super) fn progress(&self, network: &Network, id: JobId) -> Option<AtpServerProgress> {
        network.actor::<ServerMachine>(self.actor.get())?.machine.progress(id)
    }

    pub(super) fn remove(&self, network: &mut Network, id: JobId) {
        if network.actor::<ServerMachine>(self.actor.get()).is_some() {
            network.with_actor(self.actor.get(), |machine: &mut ServerMachine, context| {
                machine.machine.remove_job(id);
                machine.drain(context);
            });
        }
    }
}

impl Station for Server {
    fn role(&self) -> Role {
        Role::Server
    }

    fn place(&self, network: &mut Network) {
        self.actor.set(network.add_actor(self.node, SERVER_PORT, self.machine(false)));
    }

    fn actor(&self) -> ActorId {
        self.actor.get()
    }

    fn forget(&self, network: &mut Network) {
        network.replace_actor(self.actor.get(), self.machine(true));
    }
}

struct ServerOwner(Vec<Served>);

impl Owner<AtpServer<SimAddress>> for ServerOwner {
    fn event(
        &mut self,
        _machine: &mut AtpServer<SimAddress>,
        _event: JobAborted,
        _context: &mut Context<'_>,
    ) {
        // The workers hear of an abort, and their owners judge it.
    }

    fn handled(&mut self, packet: &Packet<'_>, verdict: Verdict, context: &mut Context<'_>) {
        if !matches!(verdict, Verdict::Absorb | Verdict::Multicast) {
            return;
        }
        let Some(gradient) = gradient(packet) else { return };
        let Some(served) = self.0.iter().find(|served| served.job.config.id == gradient.preamble.job) else {
            return;
        };
        let sequence = gradient.header.sequence;
        let reused = served.window.borrow_mut().at_server(sequence, verdict == Verdict::Multicast);
        if let Some((rank, lacks)) = reused {
            let job = served.tenant.plan().name.clone();
            served.tenant.violated(context, Violation::ReusedEarly { job, rank, lacks, sequence });
        }
    }
}

pub(super) fn gradient<'a>(packet: &Packet<'a>) -> Option<GradientPacket<'a>> {
    let Body::Bytes(bytes) = packet.body else { return None };
    let preamble = Preamble::parse(bytes).ok().filter(|preamble| preamble.kind == Kind::Gradient)?;
    GradientPacket::parse(preamble, bytes).ok()
}
