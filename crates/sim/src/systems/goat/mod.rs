//! GOAT: switches that sum the parts of a model that a plan gives them, however late workers are,
//! and a server behind them.

mod keys;
mod placement;
mod planners;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use fanin_protocol::goat::{
    Assignment, GoatJobConfig, GoatRoute, GoatServerJob, Groups, Onward, Overflow, PlannedSum, Scaling,
    ServerPlan, SubModels, sums_of,
};
use fanin_wire::{
    AggregationNode, Generation, Label, PlannedDirections, SAMPLE_ELEMENTS, SubModel, WireDtype,
};

use super::aggregation::{Job, PACKET_KINDS, Part, Served, Server, Switch, Window, kind_of};
use super::{Machines, Site, System, Tenant};
use crate::net::{NodeId, SimAddress, Topology};
use placement::{Placement, number};

pub use super::distance::on_the_way;
pub use keys::{KIND, resolve_with};
pub use planners::{Asked, Nodes, Planner};

/// UDP ports.
const SWITCH_PORT: u16 = 4810;
const SERVER_PORT: u16 = 4812;

/// GOAT's machines, and the plan that they follow.
#[derive(Clone, Debug)]
pub struct Goat {
    /// The server's host.
    pub server: NodeId,
    /// Elements of a packet.
    pub elements: u16,
    /// Packets of a worker under way, at most; no more than the plan has.
    pub window: u16,
    /// Packets of each part of the model.
    pub sub_models: Vec<u32>,
    /// By rank, for each of them, the switch that sums it, or the server.
    pub nodes: Vec<Vec<Option<NodeId>>>,
    /// For each of them, to which other switches the sums of some switches go, on their way to the
    /// server; behind the last one given they go to the server.
    pub onward: Vec<BTreeMap<NodeId, NodeId>>,
    /// The number of the job's first aggregator at each switch.
    pub first_aggregator: u32,
    /// The factor.
    pub scaling: Scaling,
    /// The treatment of overflows.
    pub overflow: Overflow,
    /// Whether workers adjust their windows.
    pub congestion_control: bool,
    /// Shortest wait for an answer.
    pub timeout: Duration,
}

impl System for Goat {
    fn name(&self) -> &'static str {
        KIND.name
    }

    fn server(&self) -> Option<NodeId> {
        Some(self.server)
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn sample_elements(&self) -> Option<usize> {
        Some(SAMPLE_ELEMENTS)
    }

    fn packet_kinds(&self) -> &'static [&'static str] {
        &PACKET_KINDS
    }

    fn kind_of(&self, packet: &[u8]) -> Option<&'static str> {
        kind_of::<PlannedDirections>(packet)
    }

    fn bound(&self, workers: usize, largest: f64) -> f64 {
        super::aggregation::bound(self.scaling, workers, largest)
    }

    fn packet_elements(&self) -> usize {
        self.elements.into()
    }

    fn plan(&self, tenant: Tenant, site: &mut Site<'_>) -> Box<dyn Machines> {
        let part = self.part(&tenant, site);
        let (timeout, elements) = (self.timeout, self.elements);
        Box::new(Job { tenant, timeout, elements, switches_sum: true, parts: vec![part] })
    }
}

/// The place of a child in its machine's list.
struct ChildOf<M> {
    machine: Rc<M>,
    child: usize,
}

impl Goat {
    fn part(
        &self,
        tenant: &Tenant,
        site: &mut Site<'_>,
    ) -> Part<Assignment<SimAddress>, GoatRoute<SimAddress>, Groups> {
        let plan = tenant.plan();
        let topology = site.topology();
        let placement = self.place(topology, &plan.workers);
        let sub_models =
            SubModels::new(&self.sub_models).expect("a scenario's plan is checked when it is read");
        let config = GoatJobConfig {
            id: tenant.id(0),
            key: tenant.key(0),
            generation: Generation(0),
            workers: plan.workers.len() as u16,
            elements: if plan.sampled { SAMPLE_ELEMENTS as u16 } else { self.elements },
            window_max: self.window,
            scaling: self.scaling,
            overflow: self.overflow,
            congestion_control: self.congestion_control,
            wire_dtype: WireDtype::SharedExponent,
            originals_elements_max: 0,
        };
        let address =
            |node: NodeId| SimAddress::new(node, if node == self.server { SERVER_PORT } else { SWITCH_PORT });
        let nodes: Vec<Vec<AggregationNode>> = self
            .nodes
            .iter()
            .map(|assigned| assigned.iter().map(|node| number(topology, *node)).collect())
            .collect();
        let onward: Vec<Onward> =
            (0..self.sub_models.len()).map(|part| self.onward_of(topology, part)).collect();
        let sums = onward.iter().enumerate().map(|(part, onward)| {
            sums_of(nodes.iter().map(|assigned| assigned[part]), onward)
                .expect("sums go towards the server, and none comes back")
        });
        let sums: Vec<_> = sums.collect();
        let hops = |hops: &[(AggregationNode, NodeId)]| -> Vec<(AggregationNode, SimAddress)> {
            hops.iter().map(|(node, hop)| (*node, address(*hop))).collect()
        };
        let declare = site.declare(PlannedDirections::HEADER_BYTES);
        let workers = (0..plan.workers.len())
            .map(|rank| {
                let first_hops = hops(&placement.first_hops[rank]);
                let assignment =
                    Assignment::new(rank as u16, sub_models.clone(), nodes[rank].clone(), first_hops)
                        .expect("a scenario's plan is checked when it is read");
                (assignment, address(placement.upstream[rank]))
            })
            .collect();
        let mut switches = Vec::new();
        let mut at_switches: BTreeMap<usize, ChildOf<Switch<GoatRoute<SimAddress>>>> = BTreeMap::new();
        for (node, hop) in &placement.switches {
            let station = Switch::on(site, *node, SWITCH_PORT, &declare);
            let (mut below, own) = children(&placement, *node, address);
            for rank in own {
                at_switches.insert(rank, ChildOf { machine: station.clone(), child: below.len() });
                // It has a port when it is added.
                below.push(SimAddress::new(plan.workers[rank], 0));
            }
            station.routes.borrow_mut().push(GoatRoute {
                id: config.id,
                key: config.key,
                generation: config.generation,
                workers: config.workers,
                node: number(site.topology(), Some(*node)),
                upstream: address(hop.upstream),
                next_hops: hops(&hop.next_hops),
                below,
                own: 0,
                sub_models: sub_models.clone(),
                sums: self.sums(&sums, number(site.topology(), Some(*node))),
                window_max: self.window,
                aggregators: site.switch().aggregators,
            });
            station.elements.set(station.elements.get().max(config.elements));
            switches.push(station);
        }
        let server = Server::on(site, self.server, SERVER_PORT, &declare);
        let (mut of_server, own) = children(&placement, self.server, address);
        let mut ways = vec![0; plan.workers.len()];
        let mut at_server: BTreeMap<usize, ChildOf<Server<Groups>>> = BTreeMap::new();
        for rank in own {
            ways[rank] = of_server.len() as u16;
            at_server.insert(rank, ChildOf { machine: server.clone(), child: of_server.len() });
            of_server.push(SimAddress::new(plan.workers[rank], 0));
        }
        for (rank, first) in placement.upstream.iter().enumerate().filter(|(_, first)| **first != self.server)
        {
            let mut last = *first;
            while placement.switches[&last].upstream != self.server {
                last = placement.switches[&last].upstream;
            }
            let way = of_server.iter().position(|child| *child == address(last));
            ways[rank] = way.expect("the server has all switches that are next to it") as u16;
        }
        let window = Rc::new(RefCell::new(Window::new(self.window, plan.workers.len())));
        let server_plan = ServerPlan { sub_models, nodes, onward, children: of_server, ways };
        server.jobs.borrow_mut().push(Served {
            id: config.id,
            job: GoatServerJob { config, plan: server_plan, restored: false },
            restored: |job| GoatServerJob { restored: true, ..job },
            tenant: tenant.clone(),
            window: window.clone(),
        });
        let id = config.id;
        let moved = move |network: &mut _, rank: usize, to| {
            if let Some(ChildOf { machine, child }) = at_switches.get(&rank) {
                if let Some(route) = machine.routes.borrow_mut().iter_mut().find(|route| route.id == id) {
                    route.below[*child] = to;
                }
                machine.child_moved(network, id, *child, to);
            }
            if let Some(ChildOf { machine, child }) = at_server.get(&rank) {
                if let Some(served) = machine.jobs.borrow_mut().iter_mut().find(|served| served.id == id) {
                    served.job.plan.children[*child] = to;
                }
                machine.child_moved(network, id, *child, to);
            }
        };
        Part {
            config: config.into(),
            workers,
            switches,
            server,
            window,
            declare,
            moved: Some(Box::new(moved)),
        }
    }

    /// The sub-models that a switch sums, and their aggregators.
    fn sums(
        &self,
        of_parts: &[BTreeMap<AggregationNode, PlannedSum>],
        node: AggregationNode,
    ) -> BTreeMap<SubModel, PlannedSum> {
        let mut first_aggregator = self.first_aggregator;
        let mut sums = BTreeMap::new();
        for ((part, packets), of_part) in (0..).zip(&self.sub_models).zip(of_parts) {
            if let Some(sum) = of_part.get(&node) {
                sums.insert(SubModel(part), PlannedSum { first_aggregator, ..sum.clone() });
                first_aggregator += packets;
            }
        }
        sums
    }

    /// Where sums of a part go, if not to the server.
    fn onward_of(&self, topology: &Topology, part: usize) -> Onward {
        let node = |switch: &NodeId| number(topology, Some(*switch));
        let sums = self.onward.get(part).into_iter().flatten();
        sums.map(|(from, to)| (node(from), node(to))).collect()
    }
}

/// The switches that get parameters from a machine, and the ranks of the workers.
fn children(
    placement: &Placement,
    of: NodeId,
    address: impl Fn(NodeId) -> SimAddress,
) -> (Vec<SimAddress>, Vec<usize>) {
    let below = |(_, hop): &(&NodeId, &placement::Hop)| hop.upstream == of && hop.has_workers;
    let switches = placement.switches.iter().filter(below).map(|(node, _)| address(*node));
    let own = placement.upstream.iter().enumerate().filter(|(_, upstream)| **upstream == of);
    (switches.collect(), own.map(|(rank, _)| rank).collect())
}
