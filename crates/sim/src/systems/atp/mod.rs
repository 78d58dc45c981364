//! ATP: switches on the way with memory that all jobs share, and a server behind them. Also the
//! systems that its paper compares it with, in which the same machines have less help: a rack-scale
//! service, a server alone, a server beside each worker. And ESA, whose switches give what is more
//! important an aggregator that something else waits in.

mod esa;
mod keys;
mod placement;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use fanin_protocol::aggregation::Route;
use fanin_protocol::atp::{AtpJobConfig, Hashing, Overflow, Scaling, ServerJob, SwitchRoute, Tree};
use fanin_wire::{Directions, Label, SAMPLE_ELEMENTS, WireDtype};

use super::aggregation::{Job, PACKET_KINDS, Part, Served, Server, Switch, Window, kind_of};
use super::{Machines, Site, System, Tenant};
use crate::net::{NodeId, SimAddress};
use esa::Esa;

pub(crate) use keys::{ATP, ESA, PS, PS_N_TO_N, RSS};

/// UDP ports.
const SWITCH_PORT: u16 = 4800;
const SERVER_PORT: u16 = 4802;
/// The port of ESA's switches, which have a memory of their own.
const ESA_PORT: u16 = 4804;

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
    /// The treatment of overflows.
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
    /// The same, and what is more important takes the place of what waits: ESA.
    Preemptive,
    /// The workers', each for itself: ATP §5.2.2's rack-scale service.
    Racks,
    /// None.
    None,
}

impl System for Atp {
    fn name(&self) -> &'static str {
        match (self.help, self.server) {
            (Help::Way, _) => "atp",
            (Help::Preemptive, _) => "esa",
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
        &PACKET_KINDS
    }

    fn kind_of(&self, packet: &[u8]) -> Option<&'static str> {
        kind_of::<Directions>(packet)
    }

    fn bound(&self, workers: usize, largest: f64) -> f64 {
        super::aggregation::bound(self.scaling, workers, largest)
    }

    fn packet_elements(&self) -> usize {
        self.elements.into()
    }

    fn plan(&self, tenant: Tenant, site: &mut Site<'_>) -> Box<dyn Machines> {
        if self.help != Help::Preemptive {
            return self.machines(tenant, site, SWITCH_PORT, |route| route);
        }
        let packets = tenant.plan().workload.packets(self.elements.into());
        self.machines(tenant, site, ESA_PORT, move |route| Esa { route, packets })
    }
}

impl Atp {
    /// With switches at this port, whose routes are made of ATP's.
    fn machines<R: Route<SimAddress> + 'static>(
        &self,
        tenant: Tenant,
        site: &mut Site<'_>,
        port: u16,
        route: impl Fn(SwitchRoute<SimAddress>) -> R,
    ) -> Box<dyn Machines> {
        let servers = match self.server {
            Some(server) => vec![server],
            None => tenant.plan().workers.clone(),
        };
        let parts = servers.into_iter().enumerate();
        let parts = parts.map(|(part, server)| self.part(&tenant, part, server, site, (port, &route)));
        let parts = parts.collect();
        Box::new(Job {
            tenant,
            timeout: self.timeout,
            elements: self.elements,
            switches_sum: self.help != Help::None,
            parts,
        })
    }

    fn part<R: Route<SimAddress> + 'static>(
        &self,
        tenant: &Tenant,
        part: usize,
        server: NodeId,
        site: &mut Site<'_>,
        (switch_port, route): (u16, &impl Fn(SwitchRoute<SimAddress>) -> R),
    ) -> Part<Directions, R, Tree> {
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
            elements: if plan.sampled { SAMPLE_ELEMENTS as u16 } else { placement.admission.terms.elements },
            window_max: placement.admission.terms.in_flight,
            aggregators: site.switch().aggregators,
            hashing: self.hashing,
            scaling: self.scaling,
            overflow: self.overflow,
            congestion_control: self.congestion_control,
            wire_dtype: WireDtype::SharedExponent,
            originals_elements_max: 0,
        };
        let config = config.check().expect("a scenario's numbers are checked when it is read");
        let window = Rc::new(RefCell::new(Window::new(self.window, plan.workers.len())));
        let declare = site.declare(Directions::HEADER_BYTES);
        let mut switches = Vec::new();
        for hop in &placement.switches {
            let station = Switch::on(site, hop.switch, switch_port, &declare);
            let port = if hop.upstream == server { SERVER_PORT } else { switch_port };
            station.routes.borrow_mut().push(route(SwitchRoute {
                id: config.id,
                key: config.key,
                generation: config.generation,
                workers: config.workers,
                upstream: SimAddress::new(hop.upstream, port),
                level: hop.level,
            }));
            station.elements.set(station.elements.get().max(config.elements));
            switches.push(station);
        }
        let workers = placement.workers.iter().map(|(directions, _)| *directions).collect();
        let job = ServerJob { config, workers, level: placement.server_level, restored: false };
        let station = Server::on(site, server, SERVER_PORT, &declare);
        station.jobs.borrow_mut().push(Served {
            id: config.id,
            job,
            restored: |job| ServerJob { restored: true, ..job },
            tenant: tenant.clone(),
            window: window.clone(),
        });
        let way_up = |(directions, upstream): &(Directions, NodeId)| {
            let port = if *upstream == server { SERVER_PORT } else { switch_port };
            (*directions, SimAddress::new(*upstream, port))
        };
        let workers = placement.workers.iter().map(way_up).collect();
        Part { config, workers, switches, server: station, window, declare, moved: None }
    }
}
