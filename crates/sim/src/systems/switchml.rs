//! SwitchML: a pool of slots on the workers' switch, or on the switches of their racks and a root.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use fanin_protocol::switchml::{JobConfig, Switch, SwitchJob, Upstream, Worker};
use fanin_protocol::{JobAborted, RetransmissionConfig, Summer, WorkerMachine};
use fanin_wire::{Generation, JobId, ShardId, WireDtype, WorkerId};

use super::placement::{self, Pool};
use super::worker::{WorkerOwner, retransmission};
use super::{Classify, Counters, Machines, Process, Role, Site, Station, System, Tenant};
use crate::net::{ActorId, Context, Machine, Network, NodeId, Owner, SimAddress};
use crate::workload::Gradient;

/// UDP port.
const POOL_PORT: u16 = 4801;

type WorkerActor = Machine<Worker<SimAddress, Gradient>, WorkerOwner>;

/// SwitchML's configuration for a job.
#[derive(Clone, Debug)]
pub struct SwitchMl {
    /// Elements of a packet.
    pub elements: u16,
    /// Slots of the job's pool.
    pub slots: u16,
    /// Shortest wait for an answer.
    pub timeout: Duration,
    /// Whether losses are noticed by it alone, always as long.
    pub timeouts_only: bool,
}

impl SwitchMl {
    fn config(&self, id: JobId, tenant: &Tenant) -> JobConfig {
        JobConfig {
            id,
            key: tenant.key(0),
            generation: Generation(1),
            workers: tenant.plan().workers.len() as u16,
            slots: self.slots,
            elements: self.elements,
            wire_dtype: WireDtype::Int32,
            shard: ShardId(0),
            resumed: false,
        }
    }
}

impl System for SwitchMl {
    fn name(&self) -> &'static str {
        "switchml"
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    /// SwitchML Theorem 1: n / f, where f leaves room for n times the largest value.
    fn bound(&self, workers: usize, largest: f64) -> f64 {
        let workers = workers as f64;
        workers * workers * largest * 4.0 / 2f64.powi(31)
    }

    fn plan(&self, tenant: Tenant, site: &mut Site<'_>) -> Box<dyn Machines> {
        let pools = placement::pools(site.topology(), &tenant.plan().workers)
            .expect("a scenario's placements are checked when it is read");
        let config = self.config(tenant.id(0), &tenant);
        for Pool { switch, contributions, upstream } in pools.switches {
            let upstream =
                upstream.map(|(node, place)| Upstream { address: SimAddress::new(node, POOL_PORT), place });
            let classify = site.classify();
            let station = site.station(switch, POOL_PORT, || Pools {
                node: switch,
                classify,
                actor: Cell::new(ActorId(u32::MAX)),
                jobs: RefCell::default(),
            });
            station.jobs.borrow_mut().push(SwitchJob { config, contributions, upstream });
        }
        Box::new(Job { system: self.clone(), config, workers: pools.workers, tenant })
    }
}

/// All jobs' pools on one switch.
struct Pools {
    node: NodeId,
    classify: Classify,
    actor: Cell<ActorId>,
    jobs: RefCell<Vec<SwitchJob<SimAddress>>>,
}

impl Station for Pools {
    fn role(&self) -> Role {
        Role::Switch
    }

    fn place(&self, network: &mut Network) {
        let mut switch = Switch::new(ShardId(0));
        for job in self.jobs.borrow().iter() {
            switch.add_job(job.clone()).expect("a scenario's jobs are checked when it is read");
        }
        let classify = self.classify.clone();
        let machine = Machine::new(switch, NoOwner).classified(move |packet| classify(packet));
        self.actor.set(network.add_actor(self.node, POOL_PORT, machine));
    }

    fn actor(&self) -> ActorId {
        self.actor.get()
    }

    /// Pools stay as they are: how jobs are admitted again is the fault world's to try.
    fn forget(&self, _network: &mut Network) {}
}

struct NoOwner;

impl Owner<Switch<SimAddress>> for NoOwner {
    fn event(&mut self, _machine: &mut Switch<SimAddress>, _event: JobAborted, _context: &mut Context<'_>) {}
}

/// A job in a run.
struct Job {
    system: SwitchMl,
    config: JobConfig,
    /// By rank: the switch that it sends to, and its place there.
    workers: Vec<(NodeId, WorkerId)>,
    tenant: Tenant,
}

impl Machines for Job {
    fn add_worker(&self, network: &mut Network, process: Process) -> ActorId {
        let (switch, place) = self.workers[process.rank()];
        let (switch, timeout) = (SimAddress::new(switch, POOL_PORT), self.system.timeout);
        let worker = |retransmission| Worker::new(self.config, place, switch, retransmission);
        let worker = if self.system.timeouts_only {
            // A timeout that never changes.
            worker(RetransmissionConfig { floor: timeout, ceiling: timeout }).with_timeouts_only()
        } else {
            worker(retransmission(timeout))
        };
        let (node, port, class) = (process.node(), process.port(), self.tenant.plan().class);
        let machine = Machine::new(worker, WorkerOwner::new(process)).classified(move |_| class);
        network.add_actor(node, port, machine)
    }

    fn counters(&self, network: &Network) -> Counters {
        let mut counters = Counters::default();
        for actor in self.tenant.machines() {
            if let Some(worker) = network.actor::<WorkerActor>(actor) {
                counters.packets_sent += worker.machine.statistics().packets_sent;
                counters.retransmissions += worker.machine.statistics().retransmissions;
            }
        }
        counters
    }
}
