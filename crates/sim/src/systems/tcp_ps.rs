//! Parameter servers over TCP-like connections: what frameworks do by themselves and, with a
//! partition and a credit, `ByteScheduler` (Peng et al., SOSP 2019). They are the baselines of DLCP
//! §5.1.
//!
//! Each server sums what it holds of the tensors and sends the sum to all workers. The gradient of
//! variable `x` begins at server `x`, counted round, and each further piece of it is at the next.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use fanin_protocol::Tensor;
use serde::Deserialize;
use toml::Spanned;

use super::lines::{Line, Place, lines, sent};
use super::{Counters, Machines, Process, Site, Station, System, Tenant};
use crate::net::{Actor, ActorId, Context, Network, NodeId, Notice, Packet, TcpConfig};
use crate::scenario_file::{Entry, Hosts, Kind, Mistake, TransportTable, at, keys};
use crate::workload::{Gradient, TransportPlan};
use fanin_units::Size;

const ELEMENT_BYTES: u64 = 4;
/// The first port of the first job's servers; the next job's servers have the next ports.
const FIRST_PORT: u16 = 7000;
/// Token: what the server counts with was sent to it, and some of it is there.
const CREDIT: u64 = 100;
/// Tokens from here on: a message has arrived from the server, or at the server from the worker, of
/// this number.
const ARRIVED: u64 = 1000;

/// A job's servers, and how workers send to them.
#[derive(Clone, Debug)]
pub struct TcpPs {
    /// Their hosts, which may be workers' too.
    pub servers: Vec<NodeId>,
    /// Tensors are cut into pieces of at most so many bytes; none are unless given.
    pub partition_bytes: Option<u64>,
    /// The most of a worker that is on its way to servers, front layers first. If it is not given,
    /// everything is sent as soon as it is ready, in that order.
    pub credit_bytes: Option<u64>,
    /// The transport of the connections, both ways.
    pub transport: TransportPlan,
}

pub(crate) const KIND: Kind = Kind { name: "tcp-ps", keys: keys::<Keys>, resolve };

/// `[job.tcp-ps]`
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Keys {
    /// Hosts by name, or how many of the workers'; all of these unless given.
    servers: Option<Spanned<Hosts>>,
    partition: Option<Spanned<Size>>,
    credit: Option<Spanned<Size>>,
    transport: Option<Spanned<TransportTable>>,
}

fn resolve(entry: &mut Entry<'_>) -> Result<Arc<dyn System>, Mistake> {
    let keys: Keys = entry.table()?;
    let servers = match &keys.servers {
        Some(given) => entry.servers(given)?,
        None => entry.workers().to_vec(),
    };
    let bytes = |given: &Option<Spanned<Size>>, key: &str| match given {
        Some(place) if place.get_ref().0 < ELEMENT_BYTES => {
            Err(at(place, format!("`{key}` of at least an element, which is {ELEMENT_BYTES} bytes")))
        }
        given => Ok(given.as_ref().map(|place| place.get_ref().0)),
    };
    Ok(Arc::new(TcpPs {
        servers,
        partition_bytes: bytes(&keys.partition, "partition")?,
        credit_bytes: bytes(&keys.credit, "credit")?,
        transport: entry.transport(&keys.transport)?,
    }))
}

impl System for TcpPs {
    fn name(&self) -> &'static str {
        "tcp-ps"
    }

    fn sample_elements(&self) -> Option<usize> {
        Some(fanin_wire::SAMPLE_ELEMENTS)
    }

    fn timeout(&self) -> Duration {
        self.transport.rto_min
    }

    fn timeout_max(&self) -> Duration {
        TcpConfig::RTO_MAX.max(self.transport.rto_min)
    }

    /// Workers' numbers are such that floats sum to the very number.
    fn bound(&self, _workers: usize, _largest: f64) -> f64 {
        0.0
    }

    fn plan(&self, tenant: Tenant, site: &mut Site<'_>) -> Box<dyn Machines> {
        let (topology, plan) = (site.topology(), tenant.plan());
        let (workers, class) = (&plan.workers, plan.class);
        let lines = |from: &[NodeId], to: &[NodeId]| lines(&self.transport, topology, class, from, to);
        let (up, down) = (lines(workers, &self.servers), lines(&self.servers, workers));
        let on_the_way: Vec<_> = workers.iter().map(|_| Rc::new(Cell::new(0))).collect();
        let column = |number: usize| up.iter().map(|lines| lines[number].clone()).collect();
        let port = FIRST_PORT + tenant.index as u16;
        let server = |(number, node): (usize, &NodeId)| {
            let server = ServerActor {
                tenant: tenant.clone(),
                number,
                from: column(number),
                to: down[number].clone(),
                on_the_way: on_the_way.clone(),
                sums: BTreeMap::new(),
                aggregations: 0,
            };
            site.station(*node, port, || Place::new(*node, port, server))
        };
        let servers = self.servers.iter().enumerate().map(server).collect();
        Box::new(Job { system: self.clone(), tenant: tenant.clone(), servers, up, down, on_the_way })
    }
}

impl TcpPs {
    /// Into how many pieces a tensor is cut.
    fn pieces(&self, elements: usize) -> usize {
        let bytes = ELEMENT_BYTES * elements as u64;
        self.partition_bytes.map_or(1, |most| bytes.div_ceil(most) as usize)
    }
}

/// A message from one end to another.
struct Message {
    tensor: u64,
    piece: usize,
    numbers: Gradient,
    /// As they travel.
    bytes: u64,
}

/// A job in a run. Lines up are by worker and server, those down by server and worker.
struct Job {
    system: TcpPs,
    tenant: Tenant,
    servers: Vec<Rc<Place<ServerActor>>>,
    up: Vec<Vec<Line<Message>>>,
    down: Vec<Vec<Line<Message>>>,
    /// By worker: bytes that it has sent and that no server has.
    on_the_way: Vec<Rc<Cell<u64>>>,
}

impl Machines for Job {
    fn add_worker(&self, network: &mut Network, process: Process) -> ActorId {
        let (node, port, rank) = (process.node(), process.port(), process.rank());
        let worker = WorkerActor {
            process,
            system: self.system.clone(),
            servers: self.servers.clone(),
            to: self.up[rank].clone(),
            from: self.down.iter().map(|lines| lines[rank].clone()).collect(),
            on_the_way: self.on_the_way[rank].clone(),
            waiting: BTreeSet::new(),
            tensors: BTreeMap::new(),
        };
        network.add_actor(node, port, worker)
    }

    fn counters(&self, network: &Network) -> Counters {
        let added = self.servers.iter().filter_map(|server| server.server(network));
        let added = added.map(|server| server.aggregations).sum();
        let lines = self.up.iter().chain(&self.down).flatten();
        Counters { server_aggregations: Some(added), ..sent(lines, network) }
    }

    fn standing(&self, network: &Network) -> String {
        let open = |server: &Rc<Place<ServerActor>>| {
            let actor = server.server(network)?;
            let ((tensor, piece), (count, _)) = actor.sums.first_key_value()?;
            let missing = self.tenant.plan().workers.len() - count;
            Some(format!("; server {} lacks {missing} of tensor {tensor}, piece {piece}", actor.number))
        };
        self.servers.iter().filter_map(open).collect()
    }
}

/// One server.
struct ServerActor {
    tenant: Tenant,
    number: usize,
    /// By worker.
    from: Vec<Line<Message>>,
    to: Vec<Line<Message>>,
    /// By worker: what it counts as on the way to any server.
    on_the_way: Vec<Rc<Cell<u64>>>,
    /// By tensor and piece: of how many workers it is, and what it is so far.
    sums: BTreeMap<(u64, usize), (usize, Gradient)>,
    aggregations: u64,
}

impl ServerActor {
    fn take(&mut self, context: &mut Context<'_>, rank: usize, mut told: bool) {
        while let Some(message) = self.from[rank].take(std::mem::take(&mut told)) {
            self.add(context, rank, message);
        }
    }

    fn add(&mut self, context: &mut Context<'_>, rank: usize, message: Message) {
        let Message { tensor, piece, numbers, bytes } = message;
        self.on_the_way[rank].set(self.on_the_way[rank].get() - bytes);
        // This tells what an acknowledgement tells half a round trip later.
        context.notify(self.tenant.machine(rank, 0), CREDIT);
        self.aggregations += 1;
        let count = match self.sums.entry((tensor, piece)) {
            btree_map::Entry::Vacant(entry) => entry.insert((1, numbers)).0,
            btree_map::Entry::Occupied(mut entry) => {
                let (count, sum) = entry.get_mut();
                sum.add(0, &numbers);
                *count += 1;
                *count
            }
        };
        if count < self.to.len() {
            return;
        }
        let Some((_, sum)) = self.sums.remove(&(tensor, piece)) else { return };
        for (rank, line) in self.to.iter().enumerate() {
            let arrived = Notice { actor: self.tenant.machine(rank, 0), token: ARRIVED + self.number as u64 };
            line.send(context, Message { tensor, piece, numbers: sum.clone(), bytes }, bytes, arrived);
        }
    }
}

impl Actor for ServerActor {
    fn start(&mut self, context: &mut Context<'_>) {
        self.to.iter().for_each(|line| line.open(context));
        (0..self.from.len()).for_each(|rank| self.take(context, rank, false));
    }

    fn packet(&mut self, _context: &mut Context<'_>, _packet: &Packet<'_>) {}

    fn timer(&mut self, _context: &mut Context<'_>, _timer: u64) {}

    fn notice(&mut self, context: &mut Context<'_>, notice: u64) {
        if let Some(rank) = notice.checked_sub(ARRIVED) {
            self.take(context, rank as usize, true);
        }
    }
}

/// One worker.
struct WorkerActor {
    process: Process,
    system: TcpPs,
    servers: Vec<Rc<Place<ServerActor>>>,
    /// By server.
    to: Vec<Line<Message>>,
    from: Vec<Line<Message>>,
    /// Bytes that no server has yet.
    on_the_way: Rc<Cell<u64>>,
    /// The pieces still to be sent: by layer if there is a credit, tensor and piece.
    waiting: BTreeSet<(u16, u64, usize)>,
    /// The tensors that are not summed, and how many pieces of each.
    tensors: BTreeMap<u64, (Gradient, usize)>,
}

impl WorkerActor {
    /// Elements of a tensor, whether they are there or not.
    fn elements(&self, tensor: u64) -> usize {
        self.process.tenant().elements(tensor)
    }

    fn pieces(&self, tensor: u64) -> usize {
        self.system.pieces(self.elements(tensor))
    }

    /// Which server has a piece.
    fn server(&self, tensor: u64, piece: usize) -> usize {
        (self.process.tenant().variable(tensor) as usize + piece) % self.servers.len()
    }

    fn submit(&mut self, part: Gradient) {
        let (tensor, pieces) = (part.tensor, self.pieces(part.tensor));
        let order = if self.system.credit_bytes.is_some() { part.layer().index } else { 0 };
        self.waiting.extend((0..pieces).map(|piece| (order, tensor, piece)));
        self.tensors.insert(tensor, (part, pieces));
    }

    /// Sends the pieces that may be sent now.
    fn send(&mut self, context: &mut Context<'_>) {
        while let Some((order, tensor, piece)) = self.waiting.first().copied() {
            let elements = share(self.elements(tensor), self.pieces(tensor), piece).len();
            let (bytes, on_the_way) = (ELEMENT_BYTES * elements as u64, self.on_the_way.get());
            // However large it is, one goes.
            if self.system.credit_bytes.is_some_and(|most| on_the_way > 0 && on_the_way + bytes > most) {
                return;
            }
            self.waiting.remove(&(order, tensor, piece));
            let Some((gradient, _)) = self.tensors.get(&tensor) else { continue };
            self.on_the_way.set(on_the_way + bytes);
            let numbers = gradient.part(share(gradient.count(), self.pieces(tensor), piece));
            let server = self.server(tensor, piece);
            let token = ARRIVED + self.process.rank() as u64;
            let arrived = Notice { actor: self.servers[server].actor(), token };
            self.to[server].send(context, Message { tensor, piece, numbers, bytes }, bytes, arrived);
        }
    }

    fn take(&mut self, context: &mut Context<'_>, server: usize, mut told: bool) {
        while let Some(message) = self.from[server].take(std::mem::take(&mut told)) {
            self.process.progressed(context);
            let Message { tensor, piece, numbers, .. } = message;
            let pieces = self.pieces(tensor);
            let btree_map::Entry::Occupied(mut entry) = self.tensors.entry(tensor) else { continue };
            let (gradient, left) = entry.get_mut();
            gradient.set(share(gradient.count(), pieces, piece).start, &numbers);
            *left -= 1;
            if *left == 0 {
                let (gradient, _) = entry.remove();
                self.process.completed(context, gradient);
            }
        }
    }
}

/// Elements of one of a tensor's pieces.
const fn share(elements: usize, pieces: usize, piece: usize) -> Range<usize> {
    elements * piece / pieces..elements * (piece + 1) / pieces
}

impl Actor for WorkerActor {
    fn start(&mut self, context: &mut Context<'_>) {
        self.to.iter().for_each(|line| line.open(context));
        self.process.started(context);
        // Notices were lost while the node was away, of what is within it.
        (0..self.from.len()).for_each(|server| self.take(context, server, false));
        self.send(context);
    }

    fn packet(&mut self, _context: &mut Context<'_>, _packet: &Packet<'_>) {}

    fn timer(&mut self, context: &mut Context<'_>, timer: u64) {
        self.process.timer(context, timer);
    }

    fn notice(&mut self, context: &mut Context<'_>, notice: u64) {
        match notice {
            Process::SUBMIT => {
                while let Some(part) = self.process.next() {
                    self.submit(part);
                }
            }
            CREDIT => self.process.progressed(context),
            ARRIVED.. => self.take(context, (notice - ARRIVED) as usize, true),
            _ => {}
        }
        self.send(context);
    }
}

#[cfg(test)]
mod tests {
    use crate::scenario_file::parse;
    use crate::workload::{Options, Report, Scenario, run};

    const RACK: &str = "[network]\ntopology = \"rack\"\nhosts = 6\nrate = \"10Gbit\"\n";

    fn scenario(job: &str) -> Scenario {
        let text = format!("{RACK}[[job]]\nsystem = \"tcp-ps\"\n{job}");
        parse("test.toml", &text).unwrap_or_else(|error| panic!("{error}"))
    }

    fn played(job: &str) -> Report {
        run(&scenario(job), Options::default()).unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn sums_are_right_with_pieces_and_without_wherever_servers_are() {
        for (workers, keys) in [
            ("4", ""),
            ("4", "servers = 1\n"),
            ("4", "servers = [\"h5\"]\n"),
            ("4", "servers = [\"h0\", \"h5\"]\npartition = \"100kB\"\n"),
            ("4", "partition = \"100kB\"\ncredit = \"300kB\"\n"),
            ("4", "partition = \"4B\"\ncredit = \"4B\"\ntransport = { kind = \"dctcp\" }\n"),
            ("1", ""),
        ] {
            let tensor = if keys.contains("4B\"\nc") { "4kB" } else { "1MB" };
            let report = played(&format!(
                "workers = {workers}\ntensor = \"{tensor}\"\ntensors = 5\n[job.tcp-ps]\n{keys}"
            ));
            let job = &report.jobs[0];
            assert!(job.finished, "{keys}");
            assert!(job.counters.server_aggregations >= Some(5), "{keys}: {:?}", job.counters);
        }
    }

    /// A server's link carries as much as all workers send there.
    #[test]
    fn more_servers_carry_more() {
        let time = |servers: u32| {
            let keys = format!(
                "workers = 4\ntensor = \"4MB\"\ntensors = 16\nin_flight = 8\n[job.tcp-ps]\nservers = {servers}\npartition = \"500kB\"\ntransport = {{ receive_window = \"60kB\" }}\n"
            );
            played(&keys).ended_s
        };
        let [one, four] = [time(1), time(4)];
        // Three others send to one host and get from it, and each sends to three others and gets
        // from them: a quarter. Connections that share a link do not fill it.
        assert!((2.0..=4.2).contains(&(one / four)), "{one} s and {four} s");
    }

    #[test]
    fn with_a_credit_front_layers_overtake_and_passes_that_overlap_end_sooner() {
        let time = |keys: &str, more: &str| {
            let job = format!(
                "workers = 4\nmodel = \"vgg16\"\nscale = 100.0\niterations = 4\n{more}[job.tcp-ps]\nservers = 4\n{keys}"
            );
            played(&job).ended_s
        };
        let scheduled = "partition = \"40kB\"\ncredit = \"120kB\"\n";
        let plain = time("", "");
        let both = time(scheduled, "overlap = true\n");
        assert!(both < 0.9 * plain, "{both} s and {plain} s");
        let no_overlap = time(scheduled, "");
        assert!(both < no_overlap, "{both} s and {no_overlap} s");
    }

    #[test]
    fn mistakes_name_their_key() {
        for (keys, words) in [
            ("servers = 5\n", "from 1 to 4 hosts"),
            ("servers = [\"h9\"]\n", "unknown host `h9`"),
            ("partition = \"3B\"\n", "`partition` of at least an element"),
            ("credit = \"0B\"\n", "`credit` of at least an element"),
            ("transport = { kind = \"pias\" }\n", "needs `demotion`"),
            ("windows = 3\n", "unknown key `windows`"),
        ] {
            let text = format!(
                "{RACK}[[job]]\nsystem = \"tcp-ps\"\nworkers = 4\ntensor = \"1MB\"\n[job.tcp-ps]\n{keys}"
            );
            let message = parse("test.toml", &text).expect_err(keys).to_string();
            assert!(message.contains(words), "{keys}: {message}");
        }
    }
}
