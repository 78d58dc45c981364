//! `BytePS` (Jiang et al., OSDI 2020) as fanin has it: services on hosts. Each sums its share of
//! every tensor in a pool of slots. The hosts are workers' or others.
//!
//! A worker has a machine for each service. Packets of all of them wait in one queue of its host, so
//! windows decide how the services share the link. Shares are those of the planner for the hosts'
//! links (§4.1), unless the file says others. The product's own code cuts tensors and chooses
//! windows. When a service dies for good, another one takes its part over (`take_over`).
//!
//! `asynchronous` has the other service of the paper, which adds deltas to parameters (§5).
//!
//! Deliberately absent: control connections. Ranks notice a death after the product's time.

mod asynchronous;
mod take_over;

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use fanin_plan::{Cluster, LoadSplit, Machine as Planned, PART_PACKETS_MIN, Placement};
use fanin_protocol::control::{PORTION_WHOLE, Resume};
use fanin_protocol::switchml::{JobConfig, RankTerms, SLOTS_MAX, SwitchJob, SwitchMl as Protocol, Worker};
use fanin_wire::{
    CHUNK_ELEMENTS, Dtype, JobId, Key, PLACES_MAX, SLOT_HEADER_BYTES, SlotIndex, WireDtype, WorkerId,
    chunk_packet_bytes,
};
use serde::Deserialize;
use toml::Spanned;

use super::distance::delay;
use super::keys::timeout;
use super::placement::{Path, PlacementError, Request, admit, line_rate};
use super::pools::{PACKET_KINDS, Pools, counters, kind_of};
use super::wire::{self, wire_dtype};
use super::worker::{WorkerOwner, retransmission};
use super::{Counters, Declare, Machines, Process, Site, System, Tenant};
use crate::net::{ActorId, Machine, Network, NodeId, SimAddress, Topology};
use crate::scenario_file::{Entry, Hosts, Kind, Mistake, at, keys};
use fanin_units::Time;

pub use asynchronous::Asynchronous;

/// UDP port of the services.
const SERVICE_PORT: u16 = 4805;
/// The shortest chunk: a service sums elements in so many words at once.
const SAMPLE_ELEMENTS: usize = CHUNK_ELEMENTS[0];
/// Slots for each packet of a window that the file gives, as admission has them.
const SLOTS_OF_WINDOW: u16 = 2;
/// How far the sum of shares may be from 1: they are written with a few digits.
const SHARES_OFF_MAX: f64 = 1e-6;
/// How long a service is gone before another one takes over: a rank's session has this time, too
/// (`TAKE_OVER` in `controller/session/watch.rs`).
const TAKE_OVER: Duration = Duration::from_secs(3);

/// A job's services, and how workers send to them.
#[derive(Clone, Debug)]
pub struct BytePs {
    /// Their hosts, which may be workers' too.
    pub services: Vec<NodeId>,
    /// The share of each of all bytes, above 0; 1 together.
    pub shares: Vec<f64>,
    /// Elements of a packet as int32.
    pub elements: u16,
    /// How large float tensors travel.
    pub wire_dtype: WireDtype,
    /// Most packets of a worker that are on the way to the service with the largest share. To others
    /// there are as many fewer as their shares are smaller. Admission chooses unless given.
    pub window: Option<u16>,
    /// Fewest packets of a part of a tensor that is cut.
    pub part_min: usize,
    /// Shortest wait for an answer.
    pub timeout: Duration,
    /// How long a service is gone before another one takes over.
    pub take_over: Duration,
}

pub(crate) const KIND: Kind = Kind { name: "byteps", keys: keys::<Keys>, resolve };

/// `[job.byteps]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Keys {
    /// Hosts by name, or how many of the workers'; all of these unless given.
    services: Option<Spanned<Hosts>>,
    /// A share for each service, which together are 1; the planner's unless given.
    shares: Option<Spanned<Vec<f64>>>,
    /// Elements of a packet; the most that the MTU takes unless given.
    elements: Option<Spanned<u16>>,
    /// How large float tensors travel; as they are, which is the product's default, unless given.
    wire_dtype: Option<Spanned<String>>,
    /// Packets of a worker that are on the way to the service with the largest share at most.
    window: Option<Spanned<u16>>,
    /// Fewest packets of a part of a tensor that is cut; as the product has it unless given.
    part_min: Option<Spanned<usize>>,
    /// Shortest wait for an answer before a packet is sent again.
    timeout: Option<Spanned<Time>>,
    /// How long a service is gone before another one takes over; as in the product unless given.
    take_over: Option<Spanned<Time>>,
    /// Whether services add deltas to parameters, and nobody waits for anybody (§5).
    asynchronous: bool,
}

impl Keys {
    /// The mistake in an asynchronous job that also says how packets of sums travel, or when a
    /// service is taken over.
    fn of_sums(&self) -> Option<Mistake> {
        fn mistake<T>(key: &str, given: &Option<Spanned<T>>) -> Option<Mistake> {
            let message = format!(
                "`{key}` is for sums by packets, and deltas travel by TCP to services that nobody takes over: leave it out, or `asynchronous`"
            );
            given.as_ref().map(|place| at(place, message))
        }
        mistake("elements", &self.elements)
            .or_else(|| mistake("wire_dtype", &self.wire_dtype))
            .or_else(|| mistake("window", &self.window))
            .or_else(|| mistake("part_min", &self.part_min))
            .or_else(|| mistake("timeout", &self.timeout))
            .or_else(|| mistake("take_over", &self.take_over))
    }
}

fn resolve(entry: &mut Entry<'_>) -> Result<Arc<dyn System>, Mistake> {
    let keys: Keys = entry.table()?;
    if !keys.asynchronous {
        entry.workers_between(1, PLACES_MAX as usize)?;
    } else if let Some(mistake) = keys.of_sums() {
        return Err(mistake);
    }
    let services = match &keys.services {
        Some(given) => entry.servers(given)?,
        None => entry.workers().to_vec(),
    };
    let shares = match shares(keys.shares.as_ref(), services.len())? {
        Some(given) => given,
        None => {
            planned(entry.topology(), entry.workers(), &services).map_err(|error| entry.at_workers(error))?
        }
    };
    // Workers do not join a service whose share is 0.
    let (services, shares) = services.into_iter().zip(shares).filter(|(_, share)| *share > 0.0).unzip();
    if keys.asynchronous {
        return Ok(Arc::new(Asynchronous { services, shares, transport: entry.transport(&None)? }));
    }
    let most = SLOTS_MAX / SLOTS_OF_WINDOW;
    let window = match &keys.window {
        Some(window) if !(1..=most).contains(window.get_ref()) => {
            return Err(at(window, format!("from 1 to {most} packets are on the way to a service")));
        }
        window => window.as_ref().map(|window| *window.get_ref()),
    };
    let wire_dtype = wire_dtype(entry, keys.wire_dtype.as_ref(), WireDtype::Native)?;
    let elements = wire::elements(entry, keys.elements.as_ref(), wire_dtype)?;
    let part_min = match &keys.part_min {
        Some(least) if *least.get_ref() == 0 => return Err(at(least, "a part has at least one packet")),
        least => least.as_ref().map_or(PART_PACKETS_MIN, |least| *least.get_ref()),
    };
    let timeout = timeout(keys.timeout.as_ref())?;
    let take_over = keys.take_over.as_ref().map_or(TAKE_OVER, |given| given.get_ref().0);
    let system = BytePs { services, shares, elements, wire_dtype, window, part_min, timeout, take_over };
    system.fits(entry.topology(), entry.workers()).map_err(|error| entry.at_workers(error))?;
    Ok(Arc::new(system))
}

/// A share for each of so many services, as a plan that shares the sums out (BytePS) has them.
fn shares(given: Option<&Spanned<Vec<f64>>>, services: usize) -> Result<Option<Vec<f64>>, Mistake> {
    let Some(place) = given else { return Ok(None) };
    let shares = place.get_ref();
    if shares.len() != services {
        let count = shares.len();
        return Err(at(
            place,
            format!("{count} `shares` for {services} services: one for each, in their order"),
        ));
    }
    let sum: f64 = shares.iter().sum();
    if shares.iter().any(|share| share.is_nan() || *share < 0.0) || (sum - 1.0).abs() > SHARES_OFF_MAX {
        return Err(at(place, format!("`shares` are none below 0, and 1 together: these are {sum}")));
    }
    Ok(Some(shares.clone()))
}

/// The shares with which no link waits for another (§4.1), if the network is nowhere narrower than
/// the hosts' links. Hosts that send no faster than a job's `rates` say count as fast as their links.
fn planned(topology: &Topology, workers: &[NodeId], services: &[NodeId]) -> Result<Vec<f64>, String> {
    let spare = services.iter().filter(|service| !workers.contains(service));
    let hosts: Vec<NodeId> = workers.iter().chain(spare).copied().collect();
    let machine = |host: &NodeId| {
        let rate_bps = line_rate(topology, [*host].into_iter()) as f64;
        Planned {
            trains: workers.contains(host),
            sums: services.contains(host),
            ..Planned::training(topology.get(*host).name.clone(), rate_bps)
        }
    };
    let cluster = Cluster::new(hosts.iter().map(machine).collect()).map_err(|error| error.to_string())?;
    let split = LoadSplit::of(&cluster);
    let of = |service: &NodeId| hosts.iter().position(|host| host == service).map(|at| split.shares[at]);
    Ok(services.iter().filter_map(of).collect())
}

/// A part of a job as it is admitted to a service.
struct Admitted {
    config: JobConfig,
    job: SwitchJob<SimAddress>,
    /// By rank: its place, and the slots whose last sum it hands back.
    ranks: Vec<(WorkerId, Vec<SlotIndex>)>,
}

impl BytePs {
    /// Whether workers have a place.
    pub(crate) fn fits(&self, topology: &Topology, workers: &[NodeId]) -> Result<(), PlacementError> {
        let admitted = |part| self.admitted(topology, workers, (part, part), (JobId(0), Key::new(0)), &[]);
        (0..self.services.len()).try_for_each(|part| admitted(part).map(|_| ()))
    }

    /// One part of the job at one service, as that one's registry has it. Ranks that have a part of
    /// which the service died show what they remember.
    fn admitted(
        &self,
        topology: &Topology,
        workers: &[NodeId],
        (part, service): (usize, usize),
        (id, key): (JobId, Key),
        resumes: &[Resume],
    ) -> Result<Admitted, PlacementError> {
        let root = self.services[service];
        let largest = self.shares.iter().copied().fold(0.0, f64::max);
        let portion = self.shares[part] / largest;
        let window = self.window.map(|window| (f64::from(window) * portion).round().max(1.0) as u16);
        let delays = workers.iter().filter_map(|worker| delay(topology, *worker, root));
        let request = Request {
            protocol: &Protocol,
            children_max: PLACES_MAX as usize,
            id,
            key,
            in_flight: window.map(|window| SLOTS_OF_WINDOW * window),
            path: Path {
                wire_dtype: self.wire_dtype,
                rate_bps: Some(line_rate(topology, workers.iter().copied())),
                rtt: 2 * delays.max().unwrap_or_default(),
                portion: (self.services.len() > 1)
                    .then_some((portion * f64::from(PORTION_WHOLE)).ceil() as u16),
            },
            elements: self.elements,
            packet_bytes: chunk_packet_bytes(self.elements.into(), self.wire_dtype),
            ways: vec![Vec::new(); workers.len()],
            root,
            resumes,
        };
        let admission = admit(topology, &request)?;
        let job = admission.identity();
        let rank = |part: &Vec<u8>| {
            let RankTerms { place, restore, .. } = RankTerms::read(job, part).expect("a rank's own part");
            (place, restore.into_iter().next().unwrap_or_default())
        };
        let ranks = admission.seats.ranks.iter().map(rank).collect();
        let job = SwitchJob::read(job, &admission.seats.root, None).expect("a service's own part");
        let config = JobConfig { window: window.unwrap_or(job.config.window), ..job.config };
        Ok(Admitted { config, job: SwitchJob { config, ..job }, ranks })
    }

    /// With packets as long as a job's are that carries samples, or not.
    const fn lengthened(&self, admitted: &mut Admitted, sampled: bool) {
        let elements = if sampled { SAMPLE_ELEMENTS as u16 } else { self.elements };
        admitted.config.elements = elements;
        admitted.job.config.elements = elements;
    }
}

impl System for BytePs {
    fn name(&self) -> &'static str {
        KIND.name
    }

    fn parts(&self, _workers: usize) -> usize {
        self.services.len()
    }

    fn cuts(&self, tensors: &[usize]) -> Option<Vec<Vec<Range<usize>>>> {
        let mut placement = Placement::new(&self.shares);
        let cut = |count: &usize| {
            let travels_as = self.wire_dtype.of_tensor(Dtype::Float32, *count);
            let elements = travels_as.chunk_elements(self.elements.into(), Dtype::Float32);
            let mut ranges = vec![0..0; self.services.len()];
            for (service, packets) in placement.place(count.div_ceil(elements), self.part_min) {
                let end = |packet: usize| (packet * elements).min(*count);
                ranges[service] = end(packets.start)..end(packets.end);
            }
            ranges
        };
        Some(tensors.iter().map(cut).collect())
    }

    /// Eqs. 3 and 4 for each host's link, and the slowest of them.
    fn seconds_a_byte(&self, topology: &Topology, workers: &[NodeId]) -> f64 {
        let n = workers.len() as f64;
        let share_of = |host: NodeId| self.services.iter().position(|service| *service == host);
        let of_host = |host: NodeId| {
            let share = share_of(host).map_or(0.0, |service| self.shares[service]);
            let carried = match (workers.contains(&host), share > 0.0) {
                (true, true) => 1.0 + (n - 2.0) * share,
                (true, false) => 1.0,
                (false, _) => n * share,
            };
            8.0 * carried / line_rate(topology, [host].into_iter()) as f64
        };
        workers.iter().chain(&self.services).map(|host| of_host(*host)).fold(0.0, f64::max)
    }

    fn services(&self) -> (&[NodeId], Duration) {
        (&self.services, self.take_over)
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
        let (topology, plan) = (site.topology(), tenant.plan());
        let declare = site.declare(SLOT_HEADER_BYTES);
        let (mut parts, mut pools) = (Vec::new(), Vec::new());
        for (part, node) in self.services.iter().enumerate() {
            let identity = (tenant.id(part), tenant.key(part));
            let mut admitted = self
                .admitted(topology, &plan.workers, (part, part), identity, &[])
                .expect("a scenario's placements are checked when it is read");
            self.lengthened(&mut admitted, plan.sampled);
            let at = Pools::at(site, (*node, SERVICE_PORT), &declare);
            at.add(admitted.job);
            pools.push(at);
            let places = admitted.ranks.into_iter().map(|(place, _)| place).collect();
            parts.push(Part { config: Cell::new(admitted.config), places, at: RefCell::new(vec![part]) });
        }
        let tenant = tenant.clone();
        Box::new(Job { system: self.clone(), tenant, parts, pools, declare })
    }
}

/// A part of each tensor in a run.
struct Part {
    /// As it was admitted last.
    config: Cell<JobConfig>,
    /// By rank, at the first of its services.
    places: Vec<WorkerId>,
    /// The services that have summed it, one after the other: the last one does.
    at: RefCell<Vec<usize>>,
}

impl Part {
    fn service(&self) -> usize {
        *self.at.borrow().last().expect("it begins at one")
    }
}

/// A job in a run.
struct Job {
    system: BytePs,
    tenant: Tenant,
    parts: Vec<Part>,
    /// By service.
    pools: Vec<Rc<Pools>>,
    declare: Declare,
}

impl Machines for Job {
    fn add_worker(&self, network: &mut Network, process: Process) -> ActorId {
        let part = &self.parts[process.part()];
        let (place, service) = (part.places[process.rank()], self.address(part.service()));
        let worker = Worker::new(part.config.get(), place, service, retransmission(self.system.timeout));
        let (node, port, class) = (process.node(), process.port(), self.tenant.plan().class);
        let declare = self.declare.clone();
        let machine = Machine::new(worker, WorkerOwner::new(process))
            .classified(move |_, _| class)
            .declaring(move |packet| declare(packet));
        network.add_actor(node, port, machine)
    }

    fn counters(&self, network: &Network) -> Counters {
        let of_part = |part: &Part| (part.at.borrow().clone(), part.config.get().id);
        let at = self.parts.iter().map(of_part).flat_map(|(at, id)| at.into_iter().map(move |at| (at, id)));
        let pools = at.map(|(service, id)| (&*self.pools[service], id));
        let (at_services, counters) = counters(&self.tenant, network, pools);
        let taken = self.parts.iter().map(|part| part.at.borrow().len() as u64 - 1).sum();
        Counters { server_aggregations: Some(at_services.aggregations), take_overs: Some(taken), ..counters }
    }

    fn standing(&self, network: &Network) -> String {
        let host = |service: usize| network.topology().get(self.system.services[service]).name.clone();
        let lost = (0..self.parts.len()).filter_map(|part| {
            let service = self.parts[part].service();
            let dead = !self.pools[service].is_alive(network);
            dead.then(|| format!("; nobody sums part {part}, as the service on {} died", host(service)))
        });
        lost.collect()
    }

    fn take_over(&self, network: &mut Network, node: NodeId) -> bool {
        let is_there = |part: &usize| self.system.services[self.parts[*part].service()] == node;
        let parts: Vec<usize> = (0..self.parts.len()).filter(is_there).collect();
        // Each is tried, also if one before could not be taken over.
        parts.into_iter().filter(|part| !self.is_taken_over(network, *part)).count() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::{LinkConfig, Parts, Programmable};
    use crate::scenario_file::parse;
    use crate::workload::{Options, Report, run};

    fn played(text: &str) -> Report {
        let scenario = parse("test.toml", text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        run(&scenario, Options { seed: 1, ..Options::default() }).unwrap_or_else(|error| panic!("{error}"))
    }

    fn refused(text: &str) -> String {
        parse("test.toml", text).expect_err("a mistake").to_string()
    }

    /// `trains` workers and `spares` hosts more at a switch, links of 10 Gbit/s. All are services.
    fn rack(trains: usize, spares: usize, job: &str, byteps: &str) -> String {
        let hosts = trains + spares;
        let services: Vec<String> = (0..hosts).map(|host| format!("\"h{host}\"")).collect();
        let services = services.join(", ");
        format!(
            "payload = \"sample\"\n[network]\ntopology = \"rack\"\nhosts = {hosts}\nrate = \"10Gbit\"\nqueue = \"8MB\"\n\
             [[job]]\nsystem = \"byteps\"\nworkers = {trains}\n{job}\n[job.byteps]\nservices = [{services}]\n{byteps}"
        )
    }

    const LONG: &str = "tensor = \"40MB\"\ntensors = 1\nin_flight = 1";

    /// How long a sum takes, by what a link takes to carry the tensor.
    fn by_link(spares: usize, byteps: &str) -> f64 {
        let job = &played(&rack(4, spares, LONG, byteps)).jobs[0];
        assert_eq!(job.counters.retransmissions, Some(0), "{spares} more, {byteps}");
        // A packet of 352 elements is 1,408 bytes of numbers in 1,514 on the link.
        job.finished_s.expect("it ends") / (40e6 * 8.0 / 10e9 * 1514.0 / 1408.0)
    }

    /// §4.1: 2 (n - 1) / n with no more machines, 1 with as many, and Eq. 6 between.
    #[test]
    fn a_sum_by_planned_services_takes_as_long_as_the_papers_formula_says() {
        let n = 4.0;
        for spares in [0, 1, 2, 4] {
            let k = spares as f64;
            let formula = if k < n { 2.0 * n * (n - 1.0) / (n * n + k * n - 2.0 * k) } else { 1.0 };
            let ratio = by_link(spares, "window = 64\n") / formula;
            assert!((0.99..1.03).contains(&ratio), "k = {k}: {ratio} times the formula's");
        }
    }

    #[test]
    fn wrong_shares_take_longer_than_the_planners() {
        let even = by_link(2, "window = 64\nshares = [0.2, 0.2, 0.2, 0.2, 0.1, 0.1]\n");
        assert!(even > 1.05 * by_link(2, "window = 64\n"), "{even}");
    }

    /// Without a window in the file admission chooses one for 10 Gbit/s and for hosts that take 200
    /// us: 256 packets of 1,448 bytes.
    #[test]
    fn windows_are_those_of_admission_unless_the_file_has_one() {
        let mut topology =
            Topology::one_rack(6, &Parts::uniform(LinkConfig::new(10_000_000_000, Duration::from_micros(1))))
                .expect("a rack");
        topology.set_programmable(&Programmable::Share(0.0)).expect("a share");
        let hosts: Vec<NodeId> = topology.hosts().collect();
        let windows = |window: Option<u16>| {
            let system = BytePs {
                services: hosts.clone(),
                shares: vec![0.1, 0.1, 0.1, 0.1, 0.3, 0.3],
                elements: 352,
                wire_dtype: WireDtype::Native,
                window,
                part_min: 1,
                timeout: Duration::from_millis(1),
                take_over: TAKE_OVER,
            };
            let identity = (JobId(1), Key::new(2));
            let of = |part| system.admitted(&topology, &hosts[..4], (part, part), identity, &[]);
            let config = |service: usize| of(service).expect("a place").config;
            [config(0), config(5)].map(|config| (config.window, config.slots))
        };
        assert_eq!(windows(None), [(256, 512), (256, 512)], "the product divides no window of a fast link");
        assert_eq!(windows(Some(60)), [(20, 40), (60, 120)]);
    }

    #[test]
    fn one_worker_and_hosts_of_unlike_links_have_their_services() {
        let alone = &played(&rack(1, 1, "tensor = \"1MB\"\ntensors = 2", "")).jobs[0];
        assert_eq!(alone.counters.server_aggregations, Some(2 * 711));
        // h0 has a tenth of the others' rate.
        let text =
            rack(3, 0, LONG, "window = 64\n") + "[[link]]\nlink = [\"h0\", \"s0\"]\nrate = \"1Gbit\"\n";
        let scenario = parse("test.toml", &text).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(scenario.jobs[0].system.parts(3), 2, "it sums nothing");
        // Its link carries the tensor once, and no more.
        let took = played(&text).jobs[0].finished_s.expect("it ends");
        assert!((1.0..1.1).contains(&(took / (40e6 * 8.0 / 1e9 * 1514.0 / 1408.0))), "{took} s");
    }

    #[test]
    fn many_services_get_their_shares_of_tensors_that_are_short_for_them() {
        for (services, elements) in [(3, 20 * 352), (100, 20 * 352), (48, 352)] {
            let system = BytePs {
                services: (0..services).map(NodeId).collect(),
                shares: vec![1.0 / f64::from(services); services as usize],
                elements: 352,
                wire_dtype: WireDtype::Native,
                window: None,
                part_min: PART_PACKETS_MIN,
                timeout: Duration::from_millis(1),
                take_over: TAKE_OVER,
            };
            let cuts = system.cuts(&vec![elements; 64 * services as usize]).expect("it cuts");
            let of = |service: usize| cuts.iter().map(|ranges| ranges[service].len()).sum::<usize>();
            let all: Vec<usize> = (0..services as usize).map(of).collect();
            let (least, most) = (all.iter().min().expect("some"), all.iter().max().expect("some"));
            assert!(most - least <= 2 * elements, "{services}: {least} to {most} elements");
        }
    }

    #[test]
    fn services_get_their_shares_of_short_tensors_too() {
        // 40 elements are one packet, and no part of another service's.
        let text = rack(3, 0, "tensor = \"160B\"\ntensors = 64", "shares = [0.5, 0.25, 0.25]\n");
        let report = played(&text);
        assert_eq!(report.jobs[0].counters.server_aggregations, Some(3 * 64));
        let scenario = parse("test.toml", &text).unwrap_or_else(|error| panic!("{error}"));
        let cuts = scenario.jobs[0].system.cuts(&[40; 64]).expect("it cuts");
        let of = |service: usize| cuts.iter().filter(|ranges| ranges[service] == (0..40)).count();
        assert_eq!([of(0), of(1), of(2)], [32, 16, 16]);
    }

    #[test]
    fn sums_survive_losses_however_packets_are_cut() {
        let text = rack(4, 1, "tensor = \"600kB\"\ntensors = 5", "elements = 64\nwindow = 20\n")
            .replace("payload = \"sample\"\n", "");
        let lossy = ["h0", "h2", "h4"].map(|host| {
            format!("[[loss]]\nlink = [\"{host}\", \"s0\"]\nloss = 0.02\n[[loss]]\nlink = [\"s0\", \"{host}\"]\nloss = 0.02\n")
        });
        let report = played(&format!("{text}{}", lossy.concat()));
        let counters = report.jobs[0].counters;
        assert!(counters.retransmissions > Some(0) && counters.answered_again > Some(0), "{counters:?}");
        // Each contribution once: 600 kB are 2,344 packets, and parts end where packets do.
        assert_eq!(counters.server_aggregations, Some(5 * 4 * 2_344));
    }

    #[test]
    fn a_service_without_a_share_is_none() {
        let text = rack(2, 1, LONG, "shares = [0, 0, 1]\n");
        let scenario = parse("test.toml", &text).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(scenario.jobs[0].system.parts(2), 1);
    }

    #[test]
    fn several_jobs_share_a_host_and_each_gets_its_own_sums() {
        let job = |workers: &str| {
            format!(
                "[[job]]\nsystem = \"byteps\"\nworkers = {workers}\ntensor = \"1MB\"\ntensors = 3\n[job.byteps]\nservices = [\"h0\", \"h3\"]\nshares = [0.5, 0.5]\n"
            )
        };
        let jobs = job("[\"h0\", \"h1\"]") + &job("[\"h0\", \"h2\"]");
        let report = played(&format!("[network]\ntopology = \"rack\"\nhosts = 4\n{jobs}"));
        let added: Vec<_> = report.jobs.iter().map(|job| job.counters.server_aggregations).collect();
        assert_eq!(added, [Some(2 * 3 * 711); 2]);
    }

    #[test]
    fn a_mistake_in_the_table_is_named() {
        let mistakes = [
            ("shares = [0.5, 0.5]\n", "2 `shares` for 3 services"),
            ("shares = [0.5, 0.5, 0.5]\n", "1 together: these are 1.5"),
            ("shares = [0.5, 0.7, -0.2]\n", "none below 0, and 1 together"),
            ("shares = [0.5, 0.5, nan]\n", "none below 0, and 1 together"),
            ("window = 0\n", "from 1 to 8192 packets"),
            ("part_min = 0\n", "at least one packet"),
            ("slots = 3\n", "window"),
        ];
        for (byteps, expected) in mistakes {
            let message = refused(&rack(2, 1, LONG, byteps));
            assert!(message.contains(expected), "{message}");
        }
    }

    /// A layer in front that is needed first, behind one that is four times as long.
    #[test]
    fn gradients_that_are_needed_first_overtake_others_in_partitions() {
        let layers = "layers = [{ bytes = \"1MB\", forward = \"5ms\", backward = \"1ms\" }, { bytes = \"32MB\", forward = \"30ms\", backward = \"1ms\" }]\niterations = 4\noverlap = true\n";
        let took = |more: &str| {
            let job = &played(&rack(4, 4, &format!("{layers}{more}"), "")).jobs[0];
            job.finished_s.expect("it ends")
        };
        let cut = took("partition = \"1MB\"\n");
        let sorted = took("partition = \"1MB\"\norder = \"needed\"\n");
        // The front layer's pass of 5 ms hides under the other's sum, three times.
        assert!((0.012..0.018).contains(&(cut - sorted)), "{cut} s and {sorted} s");
        let whole = took("order = \"needed\"\n");
        assert!(whole > sorted + 0.01, "a whole gradient is not overtaken: {whole} s and {sorted} s");
    }
}
