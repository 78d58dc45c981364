//! The server of a host, which sums for all jobs that name it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use fanin_protocol::dlcp::{JobConfig, Server as ServerMachine};
use fanin_protocol::{JobAborted, Summer, Verdict};
use fanin_wire::{JobId, ShardId};

use super::super::{Role, Station, Tenant};
use super::ledger::Ledger;
use super::{Treatment, block, blocks_of};
use crate::net::{ActorId, Context, Machine, Network, Nic, NodeId, Owner, Packet, SimAddress};

/// UDP port.
pub(super) const SERVER_PORT: u16 = 4803;

type ServerActor = Machine<ServerMachine<SimAddress>, Overseer>;

/// A server's place, and its jobs.
pub(super) struct Server {
    pub(super) node: NodeId,
    pub(super) actor: Cell<ActorId>,
    /// The host's NIC, if workers' machines are on the host, too.
    pub(super) nic: RefCell<Option<Rc<Nic>>>,
    pub(super) jobs: RefCell<Vec<Served>>,
}

/// One job.
#[derive(Clone)]
pub(super) struct Served {
    pub(super) config: JobConfig,
    pub(super) tenant: Tenant,
    /// The part of each of its tensors.
    pub(super) part: usize,
    pub(super) ledger: Rc<RefCell<Ledger>>,
    pub(super) treatment: Treatment,
}

impl Server {
    /// Contributions that came to sums, in packets.
    pub(super) fn aggregations(&self, network: &Network, id: JobId) -> u64 {
        network.actor::<ServerActor>(self.actor.get()).map_or(0, |machine| {
            let jobs = machine.owner.jobs.iter().zip(&machine.owner.aggregations);
            jobs.filter(|(served, _)| served.config.id == id).map(|(_, count)| count).sum()
        })
    }

    /// The progress of a job, unless the server is away.
    pub(super) fn standing(&self, network: &Network, id: JobId) -> Option<String> {
        let progress = network.actor::<ServerActor>(self.actor.get())?.machine.job_progress(id)?;
        Some(format!("{progress:?}"))
    }

    pub(super) fn remove(&self, network: &mut Network, id: JobId) {
        if network.actor::<ServerActor>(self.actor.get()).is_some() {
            network.with_actor(self.actor.get(), |machine: &mut ServerActor, context| {
                machine.machine.remove_job(id);
                machine.drain(context);
            });
        }
    }
}

impl Station for Server {
    fn role(&self) -> Role {
        Role::Lasting
    }

    fn place(&self, network: &mut Network) {
        let mut server = ServerMachine::new(ShardId(0));
        let jobs = self.jobs.borrow().clone();
        for served in &jobs {
            server.add_job(served.config.into()).expect("a scenario's jobs are checked when it is read");
        }
        let treatments: Vec<_> = jobs.iter().map(|served| (served.config.id, served.treatment)).collect();
        let of = move |packet: &[u8]| {
            let job = fanin_wire::Preamble::parse(packet).ok().map(|preamble| preamble.job);
            treatments.iter().find(|(id, _)| Some(*id) == job).map_or_else(Treatment::default, |(_, of)| *of)
        };
        let declare = of.clone();
        let owner = Overseer { aggregations: vec![0; jobs.len()], jobs };
        let mut machine = Machine::new(server, owner)
            .classified(move |_, packet| of(packet).class(packet))
            .declaring(move |packet| declare(packet).declared(packet));
        if let Some(nic) = &*self.nic.borrow() {
            machine = machine.behind(nic.clone());
        }
        self.actor.set(network.add_actor(self.node, SERVER_PORT, machine));
    }

    fn actor(&self) -> ActorId {
        self.actor.get()
    }

    /// A lasting server is never asked to.
    fn forget(&self, _network: &mut Network) {}
}

/// Notes what the machine takes.
struct Overseer {
    jobs: Vec<Served>,
    /// By job.
    aggregations: Vec<u64>,
}

impl Owner<ServerMachine<SimAddress>> for Overseer {
    fn event(
        &mut self,
        _machine: &mut ServerMachine<SimAddress>,
        _event: JobAborted,
        _context: &mut Context<'_>,
    ) {
        // The workers hear of an abort, and their owners judge it.
    }

    fn handled(&mut self, packet: &Packet<'_>, verdict: Verdict, _context: &mut Context<'_>) {
        // A packet that completes a sum is passed on.
        let is_in = matches!(verdict, Verdict::Absorb | Verdict::Multicast);
        let Some(block) = block(packet).filter(|_| is_in) else { return };
        let is_its = |served: &Served| served.config.id == block.preamble.job;
        let Some(at) = self.jobs.iter().position(is_its) else { return };
        let served = &self.jobs[at];
        self.aggregations[at] += 1;
        let rank = block.preamble.worker.0.into();
        served.ledger.borrow_mut().contributed(rank, &block.header, blocks_of(&served.tenant, served.part));
    }
}
