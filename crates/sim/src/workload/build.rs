//! Puts a scenario's machines on its network's nodes.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use fanin_protocol::atp::{
    AtpJobConfig, AtpServer, AtpSwitch, AtpSwitchConfig, AtpWorker, ServerJob, SwitchRoute,
};
use fanin_protocol::switchml::{JobConfig, Switch, SwitchJob, Upstream, Worker};
use fanin_protocol::{RetransmissionConfig, Summer};
use fanin_wire::{Directions, Generation, JobId, Key, Preamble, ShardId, WireDtype};

use super::actors::{Begins, PoolOwner, ServerOwner, SwitchOwner, Window, WorkerOwner};
use super::checker::Referee;
use super::job::Job;
use super::mailbox::Mailbox;
use super::placement::{self, Placement, Pool, Pools};
use super::ring::RingWorker;
use super::scenario::{JobPlan, Scenario};
use super::values::Gradient;
use crate::net::{ActorId, Class, Machine, Network, NodeId, SimAddress, TcpConfig};
use crate::scenario_file::System;

/// UDP ports.
const SWITCH_PORT: u16 = 4800;
const POOL_PORT: u16 = 4801;
const SERVER_PORT: u16 = 4802;
const FIRST_WORKER_PORT: u16 = 5000;
/// How much longer than its shortest a worker's timeout grows while nothing comes back.
const BACK_OFF: u32 = 16;

pub(crate) type SwitchMachine = Machine<AtpSwitch<SimAddress>, SwitchOwner>;
pub(crate) type ServerMachine = Machine<AtpServer<SimAddress>, ServerOwner>;
pub(crate) type AtpMachine = Machine<AtpWorker<SimAddress, Gradient>, WorkerOwner>;
pub(crate) type PoolWorkerMachine = Machine<Worker<SimAddress, Gradient>, WorkerOwner>;

/// What stands where, so that it can be asked, and built again after a fault.
pub(crate) struct Layout {
    pub(crate) scenario: Rc<Scenario>,
    pub(crate) referee: Rc<Referee>,
    pub(crate) switches: BTreeMap<NodeId, SwitchPlace>,
    /// SwitchML's.
    pools: BTreeMap<NodeId, Vec<SwitchJob<SimAddress>>>,
    pub(crate) servers: BTreeMap<NodeId, ServerPlace>,
    pub(crate) jobs: Vec<JobPlace>,
    /// The last port that a worker's machine took, by host.
    ports: RefCell<BTreeMap<NodeId, u16>>,
    /// Jobs that are not over.
    open: Rc<Cell<usize>>,
}

pub(crate) struct SwitchPlace {
    pub(crate) actor: ActorId,
    routes: Vec<SwitchRoute<SimAddress>>,
    elements: u16,
}

pub(crate) struct ServerPlace {
    pub(crate) actor: ActorId,
    jobs: Vec<(ServerJob, String, Rc<RefCell<Window>>)>,
}

pub(crate) struct JobPlace {
    pub(crate) job: Rc<RefCell<Job>>,
    /// One for each server: all of them are one to the user.
    pub(crate) shards: Vec<Shard>,
    /// SwitchML's.
    pools: Option<Pools>,
}

/// One server's part of a job.
pub(crate) struct Shard {
    pub(crate) id: JobId,
    /// Of systems with a server: where its machines stand.
    pub(crate) server: Option<NodeId>,
    pub(crate) placement: Option<Placement>,
    pub(crate) config: Option<AtpJobConfig>,
    pub(crate) window: Option<Rc<RefCell<Window>>>,
}

/// The id of a job's part. Ids are drawn at random on admission; here they are numbers that hash differently.
fn job_id(seed: u64, job: usize, shard: usize) -> JobId {
    JobId((super::values::mix(seed ^ (job as u64) << 32 ^ (shard as u64) << 52) & 0xffff_ffff) as u32)
}

/// The key of a job's part, which is not another's.
pub(crate) fn key_of(id: JobId) -> Key {
    Key(u128::from(id.0) << 64 | 1)
}

impl Layout {
    /// Adds all machines of a scenario to a network that has none.
    pub(crate) fn build(scenario: &Rc<Scenario>, seed: u64, network: &mut Network) -> Self {
        let mut layout = Self {
            scenario: scenario.clone(),
            referee: Rc::new(Referee::default()),
            switches: BTreeMap::new(),
            pools: BTreeMap::new(),
            servers: BTreeMap::new(),
            jobs: Vec::new(),
            ports: RefCell::default(),
            open: Rc::default(),
        };
        for (index, plan) in scenario.jobs.iter().enumerate() {
            layout.plan(index, plan, seed);
        }
        layout.place_switches(network);
        for (index, plan) in scenario.jobs.iter().enumerate() {
            for rank in 0..plan.workers.len() {
                layout.add_worker(network, index, rank);
            }
        }
        layout
    }

    /// Finds out which machines a job needs where.
    fn plan(&mut self, index: usize, plan: &JobPlan, seed: u64) {
        let servers: Vec<Option<NodeId>> = match plan.system {
            System::PsNToN => plan.workers.iter().copied().map(Some).collect(),
            _ => vec![plan.server],
        };
        let (warm_up, referee) = (self.scenario.warm_up, self.referee.clone());
        let job = Job::new(index, plan, seed, servers.len(), warm_up, referee, self.open.clone());
        let job = Rc::new(RefCell::new(job));
        let shards = servers.iter().enumerate().map(|(shard, server)| {
            let id = job_id(seed, index, shard);
            let Some(server) = *server else {
                return Shard { id, server: None, placement: None, config: None, window: None };
            };
            let system = if plan.system == System::PsNToN { System::Ps } else { plan.system };
            let placement = placement::place(&self.scenario.topology, system, &plan.workers, server)
                .expect("a scenario's placements are checked when it is read");
            let config = atp_config(plan, id, self.scenario.switch.aggregators);
            let window = Rc::new(RefCell::new(Window::new(plan.window, plan.workers.len())));
            for hop in &placement.switches {
                let port = if hop.upstream == server { SERVER_PORT } else { SWITCH_PORT };
                let upstream = SimAddress::new(hop.upstream, port);
                let route = SwitchRoute {
                    id,
                    key: config.key,
                    generation: config.generation,
                    upstream,
                    level: hop.level,
                };
                let place = self.switches.entry(hop.switch).or_insert_with(|| SwitchPlace {
                    actor: ActorId(u32::MAX),
                    routes: Vec::new(),
                    elements: 0,
                });
                place.routes.push(route);
                place.elements = place.elements.max(plan.elements);
            }
            let workers = placement.workers.iter().map(|(directions, _)| *directions).collect();
            let job = ServerJob { config, workers, level: placement.server_level, restored: false };
            let place = self
                .servers
                .entry(server)
                .or_insert_with(|| ServerPlace { actor: ActorId(u32::MAX), jobs: Vec::new() });
            place.jobs.push((job, plan.name.clone(), window.clone()));
            Shard {
                id,
                server: Some(server),
                placement: Some(placement),
                config: Some(config),
                window: Some(window),
            }
        });
        let shards: Vec<Shard> = shards.collect();
        let pools = (plan.system == System::Switchml).then(|| {
            placement::pools(&self.scenario.topology, &plan.workers)
                .expect("a scenario's placements are checked when it is read")
        });
        if let Some(pools) = &pools {
            let config = pool_config(plan, shards[0].id);
            for Pool { switch, contributions, upstream } in pools.switches.iter().cloned() {
                let upstream = upstream.map(|(node, place)| {
                    let address = SimAddress::new(node, POOL_PORT);
                    Upstream { address, place }
                });
                let job = SwitchJob { config, contributions, upstream };
                self.pools.entry(switch).or_default().push(job);
            }
        }
        self.jobs.push(JobPlace { job, shards, pools });
    }

    fn place_switches(&mut self, network: &mut Network) {
        for node in self.switches.keys().copied().collect::<Vec<_>>() {
            let machine = self.switch_machine(node);
            let actor = network.add_actor(node, SWITCH_PORT, machine);
            self.switches.entry(node).and_modify(|place| place.actor = actor);
        }
        for (node, jobs) in &self.pools {
            let mut switch = Switch::new(ShardId(0));
            for job in jobs {
                switch.add_job(job.clone()).expect("a scenario's jobs are checked when it is read");
            }
            network.add_actor(*node, POOL_PORT, Machine::new(switch, PoolOwner).classified(self.classify()));
        }
        for node in self.servers.keys().copied().collect::<Vec<_>>() {
            let machine = self.server_machine(node, false);
            let actor = network.add_actor(node, SERVER_PORT, machine);
            self.servers.entry(node).and_modify(|place| place.actor = actor);
        }
    }

    /// A switch with all its jobs and empty aggregators.
    pub(crate) fn switch_machine(&self, node: NodeId) -> SwitchMachine {
        let place = &self.switches[&node];
        let aggregators = self.scenario.switch.aggregators;
        let mut switch = AtpSwitch::new(AtpSwitchConfig {
            aggregators,
            elements: place.elements,
            stale: self.scenario.switch.stale,
            ecn_threshold_packets: None,
        });
        for route in &place.routes {
            switch.add_job(*route).expect("levels are those of a placement");
        }
        Machine::new(switch, SwitchOwner { aggregators, referee: self.referee.clone() })
            .classified(self.classify())
    }

    /// A host's server with all its jobs that live.
    pub(crate) fn server_machine(&self, node: NodeId, restored: bool) -> ServerMachine {
        let mut server = AtpServer::new();
        let mut windows = Vec::new();
        for (job, name, window) in &self.servers[&node].jobs {
            let dead = self.jobs.iter().any(|place| {
                place.job.borrow().dead && place.shards.iter().any(|shard| shard.id == job.config.id)
            });
            if !dead {
                windows.push((job.config.id, name.clone(), window.clone()));
                let job = ServerJob { restored, ..job.clone() };
                server.add_job(job).expect("a scenario's jobs are checked when it is read");
            }
        }
        Machine::new(server, ServerOwner { windows, referee: self.referee.clone() })
            .classified(self.classify())
    }

    /// The machine of a worker that talks to a server.
    pub(crate) fn atp_worker(&self, index: usize, rank: usize, shard: usize) -> Option<AtpMachine> {
        let (directions, upstream) = self.way_up(index, rank, shard)?;
        let config = self.jobs[index].shards[shard].config?;
        let timeout = self.scenario.jobs[index].timeout;
        let machine = AtpWorker::new(config, directions, upstream, retransmission(timeout));
        let class = self.scenario.jobs[index].class;
        Some(Machine::new(machine, self.worker_owner(index, rank, shard)).classified(move |_| class))
    }

    /// What a worker's packets say, and where they go first.
    pub(crate) fn way_up(&self, index: usize, rank: usize, shard: usize) -> Option<(Directions, SimAddress)> {
        let part = &self.jobs[index].shards[shard];
        let (directions, upstream) = part.placement.as_ref()?.workers[rank];
        let port = if Some(upstream) == part.server { SERVER_PORT } else { SWITCH_PORT };
        Some((directions, SimAddress::new(upstream, port)))
    }

    /// By the job that a packet is of: jobs share switches and servers.
    fn classify(&self) -> impl Fn(&[u8]) -> Class + 'static {
        let classes: BTreeMap<u32, Class> = self
            .jobs
            .iter()
            .zip(&self.scenario.jobs)
            .filter(|(_, plan)| plan.class != Class::default())
            .flat_map(|(place, plan)| place.shards.iter().map(|shard| (shard.id.0, plan.class)))
            .collect();
        move |bytes| {
            if classes.is_empty() {
                return Class::default();
            }
            let job = Preamble::parse(bytes).ok().map(|preamble| preamble.job.0);
            job.and_then(|job| classes.get(&job).copied()).unwrap_or_default()
        }
    }

    fn worker_owner(&self, index: usize, rank: usize, shard: usize) -> WorkerOwner {
        let place = &self.jobs[index];
        WorkerOwner {
            job: place.job.clone(),
            rank,
            shard,
            window: place.shards[shard].window.clone(),
            referee: self.referee.clone(),
            begins: Begins::First,
        }
    }

    /// A port of a host that no worker's machine has had.
    pub(crate) fn port(&self, node: NodeId) -> u16 {
        let mut ports = self.ports.borrow_mut();
        let port = ports.entry(node).or_insert(FIRST_WORKER_PORT - 1);
        *port += 1;
        *port
    }

    fn add_worker(&self, network: &mut Network, index: usize, rank: usize) {
        let (place, plan) = (&self.jobs[index], &self.scenario.jobs[index]);
        let node = plan.workers[rank];
        let actors: Vec<ActorId> = match plan.system {
            System::Switchml => {
                let pools = place.pools.as_ref().expect("a SwitchML job has pools");
                let (switch, own) = pools.workers[rank];
                let config = pool_config(plan, place.shards[0].id);
                let class = plan.class;
                let (timeout, switch) = (plan.timeout, SimAddress::new(switch, POOL_PORT));
                let worker = |retransmission| Worker::new(config, own, switch, retransmission);
                let machine = if plan.timeouts_only {
                    // A timeout that never changes.
                    let fixed = RetransmissionConfig { floor: timeout, ceiling: timeout };
                    worker(fixed).with_timeouts_only()
                } else {
                    worker(retransmission(timeout))
                };
                vec![network.add_actor(
                    node,
                    self.port(node),
                    Machine::new(machine, self.worker_owner(index, rank, 0)).classified(move |_| class),
                )]
            }
            System::Ring => vec![self.add_ring_worker(network, index, rank, self.port(node))],
            System::Atp | System::Rss | System::Ps | System::PsNToN => (0..place.shards.len())
                .filter_map(|shard| self.atp_worker(index, rank, shard))
                .map(|machine| network.add_actor(node, self.port(node), machine))
                .collect(),
        };
        place.job.borrow_mut().workers[rank].actors = actors;
    }

    fn add_ring_worker(&self, network: &mut Network, index: usize, rank: usize, port: u16) -> ActorId {
        let (place, plan) = (&self.jobs[index], &self.scenario.jobs[index]);
        let workers = plan.workers.len();
        let mut job = place.job.borrow_mut();
        // Mailbox `r` is that of what worker `r` sends.
        if job.mailboxes.is_empty() {
            job.mailboxes = (0..workers).map(|_| Rc::new(RefCell::new(Mailbox::default()))).collect();
        }
        let mailboxes = (job.mailboxes[(rank + workers - 1) % workers].clone(), job.mailboxes[rank].clone());
        drop(job);
        let ends = (plan.workers[rank], plan.workers[(rank + 1) % workers]);
        let mtu = self
            .scenario
            .topology
            .neighbours(ends.0)
            .next()
            .map_or(1500, |(_, link)| self.scenario.topology.links()[link.0 as usize].config.mtu);
        let connection =
            TcpConfig { segment_bytes: mtu - 40, class: plan.class, ..TcpConfig::new(ends.0, ends.1) };
        let worker = RingWorker::new(place.job.clone(), rank, connection, mailboxes);
        network.add_actor(ends.0, port, worker)
    }
}

fn atp_config(plan: &JobPlan, id: JobId, aggregators: u32) -> AtpJobConfig {
    let config = AtpJobConfig {
        id,
        key: key_of(id),
        generation: Generation(1),
        workers: plan.workers.len() as u16,
        elements: plan.elements,
        window_max: plan.window,
        aggregators,
        hashing: plan.hashing,
        scaling: plan.scaling,
        overflow: plan.overflow,
        congestion_control: plan.congestion_control,
        originals_elements_max: 0,
    };
    config.check().expect("a scenario's numbers are checked when it is read")
}

fn pool_config(plan: &JobPlan, id: JobId) -> JobConfig {
    JobConfig {
        id,
        key: key_of(id),
        generation: Generation(1),
        workers: plan.workers.len() as u16,
        slots: plan.window,
        elements: plan.elements,
        wire_dtype: WireDtype::Int32,
        shard: ShardId(0),
        resumed: false,
    }
}

fn retransmission(timeout: Duration) -> RetransmissionConfig {
    RetransmissionConfig { floor: timeout, ceiling: timeout * BACK_OFF }
}
