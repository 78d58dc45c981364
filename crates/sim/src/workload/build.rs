//! Puts a scenario's machines on its network's nodes.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::checker::Referee;
use super::job::Job;
use super::scenario::Scenario;
use super::tenant::{Ports, Tenant};
use crate::net::{Network, NodeId};
use crate::systems::{Machines, Site, Station};

/// What stands where, so that it can be asked, and built again after a fault.
pub(crate) struct Layout {
    pub(crate) scenario: Rc<Scenario>,
    pub(crate) referee: Rc<Referee>,
    /// Switches first, each in the order of nodes.
    pub(crate) stations: Vec<(NodeId, Rc<dyn Station>)>,
    pub(crate) jobs: Vec<JobPlace>,
}

pub(crate) struct JobPlace {
    pub(crate) job: Rc<RefCell<Job>>,
    pub(crate) tenant: Tenant,
    pub(crate) machines: Box<dyn Machines>,
}

impl Layout {
    /// Adds all machines of a scenario to a network that has none.
    pub(crate) fn build(scenario: &Rc<Scenario>, seed: u64, network: &mut Network) -> Self {
        let referee = Rc::new(Referee::default());
        let (ports, open) = (Rc::new(Ports::default()), Rc::new(Cell::new(0)));
        let mut site = Site::new(&scenario.topology, scenario.switch);
        let mut jobs = Vec::new();
        for (index, plan) in scenario.jobs.iter().enumerate() {
            let job = Job::new(index, plan, seed, scenario.warm_up, referee.clone(), open.clone());
            let job = Rc::new(RefCell::new(job));
            let tenant = Tenant {
                job: job.clone(),
                scenario: scenario.clone(),
                index,
                seed,
                referee: referee.clone(),
                ports: ports.clone(),
            };
            let machines = site.plan(plan, tenant.clone());
            jobs.push(JobPlace { job, tenant, machines });
        }
        let stations = site.into_stations();
        for (_, station) in &stations {
            station.place(network);
        }
        for place in &jobs {
            for rank in 0..place.tenant.plan().workers.len() {
                let processes = (0..place.tenant.parts()).map(|part| place.tenant.process(rank, part));
                let machines = processes.map(|process| place.machines.add_worker(network, process));
                let machines = machines.collect();
                place.job.borrow_mut().workers[rank].actors = machines;
            }
        }
        Self { scenario: scenario.clone(), referee, stations, jobs }
    }

    /// What stands on a node.
    pub(crate) fn at(&self, node: NodeId) -> impl Iterator<Item = &Rc<dyn Station>> {
        self.stations.iter().filter(move |(at, _)| *at == node).map(|(_, station)| station)
    }
}
