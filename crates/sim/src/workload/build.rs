//! Puts a scenario's machines on its network's nodes.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::checker::Referee;
use super::job::Job;
use super::scenario::Scenario;
use super::tenant::{Ports, Tenant};
use crate::net::{Network, NodeId};
use crate::systems::{Counted, Counters, Machines, Site, Station, Table};

/// The places of all machines, so that they can be asked, and built again after a fault.
pub(crate) struct Layout {
    pub(crate) scenario: Rc<Scenario>,
    pub(crate) referee: Rc<Referee>,
    /// Switches first, each in the order of nodes.
    pub(crate) stations: Vec<StationPlace>,
    pub(crate) jobs: Vec<JobPlace>,
}

pub(crate) struct StationPlace {
    pub(crate) node: NodeId,
    pub(crate) station: Rc<dyn Station>,
    /// Its counts before it lost its memory.
    lost: Cell<Table>,
}

impl StationPlace {
    /// The use of its memory since the run began.
    pub(crate) fn table(&self, network: &Network) -> Option<Table> {
        Some(self.station.table(network)?.with(self.lost.get(), u64::wrapping_add))
    }
}

pub(crate) struct JobPlace {
    pub(crate) job: Rc<RefCell<Job>>,
    pub(crate) tenant: Tenant,
    pub(crate) machines: Box<dyn Machines>,
    /// The machines' counts before they lost their memory.
    lost: Cell<Counters>,
}

impl JobPlace {
    /// Its machines' counts since the run began.
    pub(crate) fn counters(&self, network: &Network) -> Counters {
        self.machines.counters(network).with(self.lost.get(), u64::wrapping_add)
    }
}

impl Layout {
    /// Adds all machines of a scenario to a network that has none.
    pub(crate) fn build(scenario: &Rc<Scenario>, seed: u64, network: &mut Network) -> Self {
        let referee = Rc::new(Referee::default());
        // Flows of parameter servers are to end, too: no job's end is the run's.
        let waits = usize::from(!scenario.parameter_servers.is_empty());
        let (ports, open) = (Rc::new(Ports::default()), Rc::new(Cell::new(waits)));
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
            jobs.push(JobPlace { job, tenant, machines, lost: Cell::default() });
        }
        let stations = site.into_stations().into_iter();
        let stations: Vec<StationPlace> =
            stations.map(|(node, station)| StationPlace { node, station, lost: Cell::default() }).collect();
        for place in &stations {
            place.station.place(network);
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

    /// The stations on a node.
    pub(crate) fn at(&self, node: NodeId) -> impl Iterator<Item = &Rc<dyn Station>> {
        self.stations.iter().filter(move |place| place.node == node).map(|place| &place.station)
    }

    /// Takes the memory of machines. Each machine's counts are kept for itself: sums would hide a
    /// machine that counts from zero again beside others that do not.
    pub(crate) fn taking(&self, network: &mut Network, take: impl FnOnce(&mut Network)) {
        let counters: Vec<_> = self.jobs.iter().map(|place| place.counters(network)).collect();
        let tables: Vec<_> = self.stations.iter().map(|place| place.table(network)).collect();
        take(network);
        for (place, before) in self.jobs.iter().zip(counters) {
            place.lost.set(before.with(place.machines.counters(network), u64::saturating_sub));
        }
        for (place, before) in self.stations.iter().zip(tables) {
            let left = place.station.table(network).unwrap_or_default();
            place.lost.set(before.unwrap_or_default().with(left, u64::saturating_sub));
        }
    }
}
