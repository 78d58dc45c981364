//! SwitchML: a pool of slots on the workers' switch, or on the switches of their racks and a root.

mod placement;

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use fanin_protocol::RetransmissionConfig;
use fanin_protocol::switchml::{JobConfig, SLOTS_MAX, SwitchJob, Upstream, Worker};
use fanin_wire::{CHUNK_ELEMENTS, RANKS_MAX, SLOT_HEADER_BYTES, WireDtype, WorkerId};
use serde::Deserialize;
use toml::Spanned;

use super::keys::timeout;
use super::pools::{PACKET_KINDS, Pools, counters, kind_of};
use super::wire::{self, wire_dtype};
use super::worker::{WorkerOwner, retransmission};
use super::{Counters, Declare, Machines, Process, Site, System, Tenant};
use crate::net::{ActorId, Machine, Network, NodeId, SimAddress};
use crate::scenario_file::{Entry, Kind, Mistake, at, keys};
use fanin_units::Time;
use placement::Pool;

/// The shortest chunk: the switch sums elements in their own type in so many words at once.
const SAMPLE_ELEMENTS: usize = CHUNK_ELEMENTS[0];

/// UDP port.
const POOL_PORT: u16 = 4801;

/// SwitchML's configuration for a job.
#[derive(Clone, Debug)]
pub struct SwitchMl {
    /// Elements of a packet as int32.
    pub elements: u16,
    /// How large float tensors travel.
    pub wire_dtype: WireDtype,
    /// Slots of the job's pool.
    pub slots: u16,
    /// Packets of a worker that are on the way at most.
    pub window: u16,
    /// Shortest wait for an answer.
    pub timeout: Duration,
    /// Whether losses are noticed by it alone, always as long, and make no window smaller.
    pub timeouts_only: bool,
}

pub(crate) const KIND: Kind = Kind { name: "switchml", keys: keys::<Keys>, resolve };

/// `[job.switchml]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Keys {
    /// Elements of a packet; the most that the MTU takes unless given.
    elements: Option<Spanned<u16>>,
    /// How large float tensors travel; as in the paper unless given.
    wire_dtype: Option<Spanned<String>>,
    /// The slots of the job's part of the switches' memory; all unless given.
    slots: Option<Spanned<u16>>,
    /// Packets of a worker that are on the way at most; as many as there are slots unless given.
    window: Option<Spanned<u16>>,
    /// Shortest wait for an answer before a packet is sent again.
    timeout: Option<Spanned<Time>>,
    /// As in the paper: losses are noticed by the timeout alone, always as long, not by packets
    /// that were overtaken, and make no window smaller.
    timeouts_only: bool,
}

fn resolve(entry: &mut Entry<'_>) -> Result<Arc<dyn System>, Mistake> {
    let keys: Keys = entry.table()?;
    entry.workers_between(1, RANKS_MAX as usize)?;
    let slots = slots(entry, keys.slots.as_ref())?;
    let window = match keys.window {
        Some(window) if !(1..=slots).contains(window.get_ref()) => {
            return Err(at(&window, format!("1 to as many as there are slots, {slots}")));
        }
        Some(window) => window.into_inner(),
        None => slots,
    };
    let wire_dtype = wire_dtype(entry, keys.wire_dtype.as_ref(), WireDtype::SharedExponent)?;
    let system = SwitchMl {
        elements: wire::elements(entry, keys.elements.as_ref(), wire_dtype)?,
        wire_dtype,
        slots,
        window,
        timeout: timeout(keys.timeout.as_ref())?,
        timeouts_only: keys.timeouts_only,
    };
    system.fits(entry.topology(), entry.workers()).map_err(|error| entry.at_workers(error))?;
    Ok(Arc::new(system))
}

/// Two aggregators each, and as many for each job as for the others, running or not.
fn slots(entry: &Entry<'_>, given: Option<&Spanned<u16>>) -> Result<u16, Mistake> {
    let (_, sharing) = entry.among(|system, _| system == KIND.name);
    let aggregators = entry.switch().aggregators;
    let most = (aggregators / 2 / sharing as u32).min(SLOTS_MAX.into()) as u16;
    if most == 0 {
        let message =
            format!("{aggregators} aggregators are no slot for each of {sharing} jobs: a slot takes two");
        return Err(entry.at_system(message));
    }
    match given {
        Some(slots) if !(1..=most).contains(slots.get_ref()) => {
            Err(at(slots, format!("this job's part of the switch's memory is {most} slots")))
        }
        Some(slots) => Ok(*slots.get_ref()),
        None => Ok(most),
    }
}

impl System for SwitchMl {
    fn name(&self) -> &'static str {
        "switchml"
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn sample_elements(&self) -> Option<usize> {
        Some(SAMPLE_ELEMENTS)
    }

    fn packet_kinds(&self) -> &'static [&'static str] {
        PACKET_KINDS
    }

    fn kind_of(&self, packet: &[u8]) -> Option<&'static str> {
        kind_of(packet)
    }

    fn wire_dtype(&self) -> WireDtype {
        self.wire_dtype
    }

    fn bound(&self, workers: usize, largest: f64) -> f64 {
        wire::bound(self.wire_dtype, workers, largest)
    }

    fn packet_elements(&self) -> usize {
        self.elements.into()
    }

    fn plan(&self, tenant: Tenant, site: &mut Site<'_>) -> Box<dyn Machines> {
        let placement = self
            .place(site.topology(), &tenant.plan().workers, (tenant.id(0), tenant.key(0)))
            .expect("a scenario's placements are checked when it is read");
        let config = placement.config;
        let elements = if tenant.plan().sampled { SAMPLE_ELEMENTS as u16 } else { config.elements };
        let config = JobConfig { elements, window: self.window, ..config };
        let declare = site.declare(SLOT_HEADER_BYTES);
        let mut pools = Vec::new();
        for Pool { switch, contributions, upstream } in placement.switches {
            let upstream =
                upstream.map(|(node, place)| Upstream { address: SimAddress::new(node, POOL_PORT), place });
            let station = Pools::at(site, (switch, POOL_PORT), &declare);
            station.add(SwitchJob { config, contributions, upstream });
            pools.push(station);
        }
        Box::new(Job { system: self.clone(), config, workers: placement.workers, tenant, pools, declare })
    }
}

/// A job in a run.
struct Job {
    system: SwitchMl,
    config: JobConfig,
    /// By rank: the switch that it sends to, and its place there.
    workers: Vec<(NodeId, WorkerId)>,
    tenant: Tenant,
    /// On the switches that sum for it.
    pools: Vec<Rc<Pools>>,
    declare: Declare,
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
        let declare = self.declare.clone();
        let machine = Machine::new(worker, WorkerOwner::new(process))
            .classified(move |_, _| class)
            .declaring(move |packet| declare(packet));
        network.add_actor(node, port, machine)
    }

    fn counters(&self, network: &Network) -> Counters {
        let pools = self.pools.iter().map(|pools| (&**pools, self.config.id));
        let (at_switches, counters) = counters(&self.tenant, network, pools);
        Counters { switch_aggregations: Some(at_switches.aggregations), ..counters }
    }
}
