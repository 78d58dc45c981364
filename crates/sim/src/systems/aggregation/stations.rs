//! The stations that jobs share: the aggregators of a switch, and the server of a host.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use fanin_protocol::aggregation::{
    Roster, Route, Server as ServerMachine, ServerProgress, Switch as SwitchMachine, SwitchConfig,
    SwitchProgress,
};
use fanin_protocol::{JobAborted, Summer, Verdict};
use fanin_wire::{FragmentPacket, JobId, Label, Preamble};

use super::super::{Classify, Declare, Role, Site, Station, Table, Tenant};
use super::window::Window;
use crate::net::{ActorId, Body, Context, Machine, Network, NodeId, Owner, Packet, SimAddress};
use crate::workload::Violation;

type SwitchActor<R> = Machine<SwitchMachine<SimAddress, R>, SwitchOwner>;
type ServerActor<R> = Machine<ServerMachine<SimAddress, R>, ServerOwner<R>>;

/// Gradients of each job that came to a station, on their way to the server. A station that loses
/// its memory counts on.
#[derive(Clone, Default)]
pub(crate) struct Came(Rc<RefCell<BTreeMap<JobId, CameOfJob>>>);

#[derive(Clone, Copy, Default)]
pub(crate) struct CameOfJob {
    pub(crate) bytes: u64,
    /// Times the links that they passed since they were sent.
    pub(crate) hop_bytes: u64,
}

impl Came {
    pub(crate) fn of(&self, job: JobId) -> CameOfJob {
        self.0.borrow().get(&job).copied().unwrap_or_default()
    }

    fn count<L: Label>(&self, packet: &Packet<'_>, fragment: &FragmentPacket<'_, L>) {
        if !fragment.header.flags.is_ack {
            let mut jobs = self.0.borrow_mut();
            let job = jobs.entry(fragment.preamble.job).or_default();
            job.bytes += u64::from(packet.datagram_bytes);
            job.hop_bytes += u64::from(packet.datagram_bytes) * u64::from(packet.hops);
        }
    }
}

/// A programmable switch.
pub(crate) struct Switch<R> {
    pub(crate) node: NodeId,
    port: u16,
    aggregators: u32,
    ways: u8,
    stale: Duration,
    classify: Classify,
    declare: Declare,
    actor: Cell<ActorId>,
    pub(crate) routes: RefCell<Vec<R>>,
    /// The elements of the longest fragment.
    pub(crate) elements: Cell<u16>,
    pub(crate) came: Came,
}

impl<R: Route<SimAddress> + 'static> Switch<R> {
    /// The one on a node of the site, at its port.
    pub(crate) fn on(site: &mut Site<'_>, node: NodeId, port: u16, declare: &Declare) -> Rc<Self> {
        let (switch, classify, declare) = (site.switch(), site.classify(), declare.clone());
        site.station(node, port, || Self {
            node,
            port,
            aggregators: switch.aggregators,
            ways: switch.ways,
            stale: switch.stale,
            classify,
            declare,
            actor: Cell::new(ActorId(u32::MAX)),
            routes: RefCell::default(),
            elements: Cell::new(0),
            came: Came::default(),
        })
    }

    /// With all its jobs and empty aggregators.
    fn machine(&self) -> SwitchActor<R> {
        let mut switch = SwitchMachine::new(SwitchConfig {
            aggregators: self.aggregators,
            elements: self.elements.get(),
            ways: self.ways,
            stale: self.stale,
            ecn_threshold_packets: None,
        });
        for route in self.routes.borrow().iter() {
            switch
                .add_job(route.clone())
                .expect("routes are made from a plan that was checked when its file was read");
        }
        let (classify, declare) = (self.classify.clone(), self.declare.clone());
        Machine::new(switch, SwitchOwner(self.came.clone()))
            .classified(move |_, packet| classify(packet))
            .declaring(move |packet| declare(packet))
    }

    pub(crate) fn progress(&self, network: &Network, id: JobId) -> Option<SwitchProgress> {
        network.actor::<SwitchActor<R>>(self.actor.get())?.machine.progress(id)
    }

    /// Tells the machine, if it is not away, of another place of a job's child.
    pub(crate) fn child_moved(&self, network: &mut Network, id: JobId, child: usize, to: SimAddress) {
        if network.actor::<SwitchActor<R>>(self.actor.get()).is_some() {
            network.with_actor(self.actor.get(), |machine: &mut SwitchActor<R>, _| {
                machine.machine.child_moved(id, child, to);
            });
        }
    }
}

impl<R: Route<SimAddress> + 'static> Station for Switch<R> {
    fn role(&self) -> Role {
        Role::Switch
    }

    fn place(&self, network: &mut Network) {
        self.actor.set(network.add_actor(self.node, self.port, self.machine()));
    }

    fn actor(&self) -> ActorId {
        self.actor.get()
    }

    fn forget(&self, network: &mut Network) {
        network.replace_actor(self.actor.get(), self.machine());
    }

    fn table(&self, network: &Network) -> Option<Table> {
        let statistics = network.actor::<SwitchActor<R>>(self.actor.get())?.machine.statistics();
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

struct SwitchOwner(Came);

impl<R: Route<SimAddress> + 'static> Owner<SwitchMachine<SimAddress, R>> for SwitchOwner {
    fn event(
        &mut self,
        _machine: &mut SwitchMachine<SimAddress, R>,
        _event: JobAborted,
        _context: &mut Context<'_>,
    ) {
        // The workers hear of an abort, and their owners judge it.
    }

    fn handled(&mut self, packet: &Packet<'_>, _verdict: Verdict, _context: &mut Context<'_>) {
        if let Some(fragment) = fragment::<R::Label>(packet) {
            self.0.count(packet, &fragment);
        }
    }
}

/// The server of a host.
pub(crate) struct Server<R: Roster<SimAddress>> {
    pub(crate) node: NodeId,
    port: u16,
    classify: Classify,
    declare: Declare,
    actor: Cell<ActorId>,
    pub(crate) jobs: RefCell<Vec<Served<R>>>,
    pub(crate) came: Came,
}

/// A job, or one part of it.
pub(crate) struct Served<R: Roster<SimAddress>> {
    pub(crate) id: JobId,
    pub(crate) job: R::Job,
    /// The same for a server that lost its memory.
    pub(crate) restored: fn(R::Job) -> R::Job,
    pub(crate) tenant: Tenant,
    pub(crate) window: Rc<RefCell<Window>>,
}

impl<R: Roster<SimAddress>> Clone for Served<R> {
    fn clone(&self) -> Self {
        let Self { id, job, restored, tenant, window } = self;
        Self {
            id: *id,
            job: job.clone(),
            restored: *restored,
            tenant: tenant.clone(),
            window: window.clone(),
        }
    }
}

impl<R: Roster<SimAddress> + 'static> Server<R> {
    /// The one on a node of the site, at its port.
    pub(crate) fn on(site: &mut Site<'_>, node: NodeId, port: u16, declare: &Declare) -> Rc<Self> {
        let (classify, declare) = (site.classify(), declare.clone());
        site.station(node, port, || Self {
            node,
            port,
            classify,
            declare,
            actor: Cell::new(ActorId(u32::MAX)),
            jobs: RefCell::default(),
            came: Came::default(),
        })
    }

    /// With all its jobs that live.
    fn machine(&self, restored: bool) -> ServerActor<R> {
        let mut server = ServerMachine::new();
        let mut jobs = Vec::new();
        for served in self.jobs.borrow().iter().filter(|served| !served.tenant.is_dead()) {
            let job = served.job.clone();
            let job = if restored { (served.restored)(job) } else { job };
            server.add_job(job).expect("a scenario's jobs are checked when it is read");
            jobs.push(served.clone());
        }
        let (classify, declare) = (self.classify.clone(), self.declare.clone());
        Machine::new(server, ServerOwner(jobs, self.came.clone()))
            .classified(move |_, packet| classify(packet))
            .declaring(move |packet| declare(packet))
    }

    /// The progress of a job, unless the server is away.
    pub(crate) fn progress(&self, network: &Network, id: JobId) -> Option<ServerProgress> {
        network.actor::<ServerActor<R>>(self.actor.get())?.machine.progress(id)
    }

    /// Tells the machine, if it is not away, of another place of a job's child.
    pub(crate) fn child_moved(&self, network: &mut Network, id: JobId, child: usize, to: SimAddress) {
        if network.actor::<ServerActor<R>>(self.actor.get()).is_some() {
            network.with_actor(self.actor.get(), |machine: &mut ServerActor<R>, _| {
                machine.machine.child_moved(id, child, to);
            });
        }
    }

    pub(crate) fn remove(&self, network: &mut Network, id: JobId) {
        if network.actor::<ServerActor<R>>(self.actor.get()).is_some() {
            network.with_actor(self.actor.get(), |machine: &mut ServerActor<R>, context| {
                machine.machine.remove_job(id);
                machine.drain(context);
            });
        }
    }
}

impl<R: Roster<SimAddress> + 'static> Station for Server<R> {
    fn role(&self) -> Role {
        Role::Server
    }

    fn place(&self, network: &mut Network) {
        self.actor.set(network.add_actor(self.node, self.port, self.machine(false)));
    }

    fn actor(&self) -> ActorId {
        self.actor.get()
    }

    fn forget(&self, network: &mut Network) {
        network.replace_actor(self.actor.get(), self.machine(true));
    }
}

struct ServerOwner<R: Roster<SimAddress>>(Vec<Served<R>>, Came);

impl<R: Roster<SimAddress> + 'static> Owner<ServerMachine<SimAddress, R>> for ServerOwner<R> {
    fn event(
        &mut self,
        _machine: &mut ServerMachine<SimAddress, R>,
        _event: JobAborted,
        _context: &mut Context<'_>,
    ) {
        // The workers hear of an abort, and their owners judge it.
    }

    fn handled(&mut self, packet: &Packet<'_>, verdict: Verdict, context: &mut Context<'_>) {
        let Some(fragment) = fragment::<R::Label>(packet) else { return };
        self.1.count(packet, &fragment);
        if !matches!(verdict, Verdict::Absorb | Verdict::Multicast) {
            return;
        }
        let Some(served) = self.0.iter().find(|served| served.id == fragment.preamble.job) else {
            return;
        };
        let sequence = fragment.header.sequence;
        let reused = served.window.borrow_mut().at_server(sequence, verdict == Verdict::Multicast);
        if let Some((rank, lacks)) = reused {
            let job = served.tenant.plan().name.clone();
            served.tenant.violated(context, Violation::ReusedEarly { job, rank, lacks, sequence });
        }
    }
}

/// The fragment that a packet is of, if it is one with such a label.
pub(super) fn fragment<'a, L: Label>(packet: &Packet<'a>) -> Option<FragmentPacket<'a, L>> {
    let Body::Bytes(bytes) = packet.body else { return None };
    parsed(bytes)
}

pub(crate) fn parsed<L: Label>(bytes: &[u8]) -> Option<FragmentPacket<'_, L>> {
    FragmentPacket::parse(Preamble::parse(bytes).ok()?, bytes).ok()
}
