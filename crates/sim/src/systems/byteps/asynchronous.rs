//! The service that only adds (§5, Figure 11b): a worker steps its own optimizer and sends by how much
//! its parameters changed. Each service adds that to its share of them at once, and answers with the
//! latest. Nobody waits for anybody.
//!
//! As in the product (`crates/parameters`, `fanin.torch.DeltaOptimizer`), each service has one piece
//! of the model, by its share. A piece travels by TCP in shorter ones, which are added and answered
//! one by one. Deltas leave when the backward pass is over. With `overlap` the next batch begins then.
//! Its deltas leave when it is computed and all answers are there.
//!
//! Deliberately absent: snapshots, and services that die.

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use super::super::lines::{Line, Place, lines, sent};
use super::super::{Counters, Machines, Process, Site, Station, System, Tenant};
use super::KIND;
use crate::net::{Actor, ActorId, Context, Network, NodeId, Notice, Packet, TcpConfig};
use crate::workload::{Gradient, Latest, TransportPlan, Violation};

const ELEMENT_BYTES: u64 = 4;
/// Most elements of a piece, as the product has them (`PIECE_ELEMENTS` in `crates/parameters`).
const PIECE_ELEMENTS: usize = 1 << 16;
/// The first port of the first job's services; the next job's have the next ports.
const FIRST_PORT: u16 = 8000;
/// Tokens from here on: a message has arrived from the service, or from the worker, of this number.
const ARRIVED: u64 = 1000;

/// A job's services, which add.
#[derive(Clone, Debug)]
pub struct Asynchronous {
    /// Their hosts, which may be workers' too.
    pub services: Vec<NodeId>,
    /// The share of each of the model, above 0; 1 together.
    pub shares: Vec<f64>,
    /// The transport of the connections, both ways.
    pub transport: TransportPlan,
}

impl System for Asynchronous {
    fn name(&self) -> &'static str {
        KIND.name
    }

    fn is_asynchronous(&self) -> bool {
        true
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
        let workers = &plan.workers;
        let lines = |from: &[NodeId], to: &[NodeId]| lines(&self.transport, topology, plan.class, from, to);
        let (up, down) = (lines(workers, &self.services), lines(&self.services, workers));
        let pieces = Rc::new(self.cut(&tenant.iteration()));
        let port = FIRST_PORT + tenant.index as u16;
        let service = |(number, node): (usize, &NodeId)| {
            let service = ServiceActor {
                tenant: tenant.clone(),
                number,
                from: up.iter().map(|lines| lines[number].clone()).collect(),
                to: down[number].clone(),
                pieces: pieces.clone(),
                parameters: BTreeMap::new(),
                added: 0,
            };
            site.station(*node, port, || Place::new(*node, port, service))
        };
        let services = self.services.iter().enumerate().map(service).collect();
        Box::new(Job { tenant: tenant.clone(), services, up, down, pieces })
    }
}

impl Asynchronous {
    /// The pieces of each tensor of an iteration, which together are the model.
    fn cut(&self, iteration: &[usize]) -> Vec<Vec<Piece>> {
        let model: usize = iteration.iter().sum();
        let (mut sum, mut begin) = (0.0, 0);
        let mut parts: Vec<Range<usize>> = Vec::new();
        for share in &self.shares {
            sum += share;
            let end = ((model as f64 * sum) as usize).min(model);
            parts.push(begin..end);
            begin = end;
        }
        // Rounding is nobody's part.
        if let Some(last) = parts.last_mut() {
            last.end = model;
        }
        let mut first = 0;
        let of_tensor = |elements: &usize| {
            let tensor = first..first + elements;
            first = tensor.end;
            let mut pieces = Vec::new();
            for (service, part) in parts.iter().enumerate() {
                let (begin, end) = (part.start.max(tensor.start), part.end.min(tensor.end));
                pieces.extend((begin..end).step_by(PIECE_ELEMENTS).map(|begin| Piece {
                    service,
                    elements: begin - tensor.start..end.min(begin + PIECE_ELEMENTS) - tensor.start,
                }));
            }
            pieces
        };
        iteration.iter().map(of_tensor).collect()
    }
}

/// A part of a tensor.
#[derive(Clone, Debug, PartialEq)]
struct Piece {
    service: usize,
    elements: Range<usize>,
}

impl Piece {
    /// As they travel.
    const fn bytes(&self) -> u64 {
        ELEMENT_BYTES * (self.elements.end - self.elements.start) as u64
    }

    /// Its elements among those that are there, where packets of so many carry so many.
    fn carried(&self, (packet, carried): (usize, usize)) -> Range<usize> {
        let at = |element: usize| element / packet * carried + (element % packet).min(carried);
        at(self.elements.start)..at(self.elements.end)
    }
}

/// A delta, or the latest parameters.
struct Message {
    tensor: u64,
    piece: usize,
    numbers: Gradient,
    /// By rank: the last tensor whose delta is in them; of a delta nobody's.
    inside: Vec<Option<u64>>,
}

/// A job in a run. Lines up are by worker and service, those down by service and worker.
struct Job {
    tenant: Tenant,
    services: Vec<Rc<Place<ServiceActor>>>,
    up: Vec<Vec<Line<Message>>>,
    down: Vec<Vec<Line<Message>>>,
    /// By place in an iteration.
    pieces: Rc<Vec<Vec<Piece>>>,
}

impl Machines for Job {
    fn add_worker(&self, network: &mut Network, process: Process) -> ActorId {
        let (node, port, rank) = (process.node(), process.port(), process.rank());
        let worker = WorkerActor {
            process,
            services: self.services.clone(),
            to: self.up[rank].clone(),
            from: self.down.iter().map(|lines| lines[rank].clone()).collect(),
            pieces: self.pieces.clone(),
            tensors: BTreeMap::new(),
        };
        network.add_actor(node, port, worker)
    }

    fn counters(&self, network: &Network) -> Counters {
        let added = self.services.iter().filter_map(|service| service.server(network));
        let added = added.map(|service| service.added).sum();
        let lines = self.up.iter().chain(&self.down).flatten();
        Counters { server_aggregations: Some(added), ..sent(lines, network) }
    }

    fn check(&self, network: &Network) -> Option<Violation> {
        let mut services = self.services.iter().filter_map(|service| service.server(network));
        services.find_map(|service| {
            let mut all = service.parameters.iter();
            all.find_map(|((place, piece), parameters)| {
                let at = self.pieces[*place][*piece].carried(self.tenant.plan().packet(0));
                let piece = Latest { at, inside: parameters.inside.clone() };
                self.tenant.check_parameters(*place as u64, &parameters.latest, &piece)
            })
        })
    }
}

/// One service.
struct ServiceActor {
    tenant: Tenant,
    number: usize,
    /// By worker.
    from: Vec<Line<Message>>,
    to: Vec<Line<Message>>,
    pieces: Rc<Vec<Vec<Piece>>>,
    /// By place in an iteration and piece.
    parameters: BTreeMap<(usize, usize), Parameters>,
    added: u64,
}

/// The latest parameters of a piece.
struct Parameters {
    latest: Gradient,
    /// By rank: the last tensor whose delta is in.
    inside: Vec<Option<u64>>,
}

impl ServiceActor {
    fn take(&mut self, context: &mut Context<'_>, rank: usize, mut told: bool) {
        while let Some(message) = self.from[rank].take(std::mem::take(&mut told)) {
            self.add(context, rank, message);
        }
    }

    fn add(&mut self, context: &mut Context<'_>, rank: usize, delta: Message) {
        let Message { tensor, piece, numbers, .. } = delta;
        let place = (tensor % self.pieces.len() as u64) as usize;
        let workers = self.to.len();
        let Parameters { latest, inside } = self.parameters.entry((place, piece)).or_insert_with(|| {
            let mut latest = numbers.clone();
            latest.subtract(&numbers);
            Parameters { latest, inside: vec![None; workers] }
        });
        latest.add(0, &numbers);
        #[cfg(test)]
        tests::spoil(latest, &numbers, self.added, tests::When::Added);
        inside[rank] = Some(tensor);
        let answer = Message { tensor, piece, numbers: latest.clone(), inside: inside.clone() };
        let arrived = Notice { actor: self.tenant.machine(rank, 0), token: ARRIVED + self.number as u64 };
        self.to[rank].send(context, answer, self.pieces[place][piece].bytes(), arrived);
        #[cfg(test)]
        tests::spoil(latest, &numbers, self.added, tests::When::Answered);
        self.added += 1;
    }
}

impl Actor for ServiceActor {
    fn start(&mut self, context: &mut Context<'_>) {
        self.to.iter().for_each(|line| line.open(context));
        (0..self.from.len()).for_each(|rank| self.take(context, rank, false));
    }

    fn packet(&mut self, _context: &mut Context<'_>, _packet: &Packet<'_>) {}

    fn notice(&mut self, context: &mut Context<'_>, notice: u64) {
        if let Some(rank) = notice.checked_sub(ARRIVED) {
            self.take(context, rank as usize, true);
        }
    }
}

/// One worker.
struct WorkerActor {
    process: Process,
    services: Vec<Rc<Place<ServiceActor>>>,
    /// By service.
    to: Vec<Line<Message>>,
    from: Vec<Line<Message>>,
    pieces: Rc<Vec<Vec<Piece>>>,
    /// The tensors that are under way: the latest parameters so far, and by piece of whom.
    tensors: BTreeMap<u64, (Gradient, BTreeMap<usize, Latest>)>,
}

impl WorkerActor {
    fn pieces(&self, tensor: u64) -> &[Piece] {
        &self.pieces[(tensor % self.pieces.len() as u64) as usize]
    }

    fn carried(&self, piece: &Piece) -> Range<usize> {
        piece.carried(self.process.tenant().plan().packet(0))
    }

    fn send_all(&mut self, context: &mut Context<'_>) {
        while let Some(delta) = self.process.next() {
            self.send(context, delta);
        }
    }

    fn send(&mut self, context: &mut Context<'_>, delta: Gradient) {
        let tensor = delta.tensor;
        for (number, piece) in self.pieces(tensor).iter().enumerate() {
            let numbers = delta.part(self.carried(piece));
            let token = ARRIVED + self.process.rank() as u64;
            let arrived = Notice { actor: self.services[piece.service].actor(), token };
            let message = Message { tensor, piece: number, numbers, inside: Vec::new() };
            self.to[piece.service].send(context, message, piece.bytes(), arrived);
        }
        self.tensors.insert(tensor, (delta, BTreeMap::new()));
    }

    fn take(&mut self, context: &mut Context<'_>, service: usize, mut told: bool) {
        while let Some(message) = self.from[service].take(std::mem::take(&mut told)) {
            self.process.progressed(context);
            let Message { tensor, piece, numbers, inside } = message;
            let (at, pieces) = (self.carried(&self.pieces(tensor)[piece]), self.pieces(tensor).len());
            let Some((latest, answered)) = self.tensors.get_mut(&tensor) else { continue };
            latest.set(at.start, &numbers);
            answered.insert(piece, Latest { at, inside });
            if answered.len() == pieces
                && let Some((latest, answered)) = self.tensors.remove(&tensor)
            {
                let answered: Vec<Latest> = answered.into_values().collect();
                self.process.completed_latest(context, latest, &answered);
            }
        }
    }
}

impl Actor for WorkerActor {
    fn start(&mut self, context: &mut Context<'_>) {
        self.to.iter().for_each(|line| line.open(context));
        self.process.started(context);
        // Notices were lost while the node was away, of what is within it.
        (0..self.from.len()).for_each(|service| self.take(context, service, false));
        self.send_all(context);
    }

    fn packet(&mut self, _context: &mut Context<'_>, _packet: &Packet<'_>) {}

    fn timer(&mut self, context: &mut Context<'_>, timer: u64) {
        self.process.timer(context, timer);
    }

    fn notice(&mut self, context: &mut Context<'_>, notice: u64) {
        match notice {
            Process::SUBMIT => self.send_all(context),
            ARRIVED.. => self.take(context, (notice - ARRIVED) as usize, true),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::scenario_file::parse;
    use crate::workload::{Options, Report, RunError, run};

    /// When a service loses a delta, or adds it once more.
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub(super) enum When {
        Added,
        Answered,
    }

    thread_local! {
        /// The delta that a service loses, or adds once more.
        static SPOILT: Cell<Option<(u64, When, bool)>> = const { Cell::new(None) };
    }

    /// Spoils the parameters after delta `number` if a test wants it.
    pub(super) fn spoil(latest: &mut Gradient, delta: &Gradient, number: u64, when: When) {
        match SPOILT.get() {
            Some((spoilt, at, true)) if (spoilt, at) == (number, when) => latest.subtract(delta),
            Some((spoilt, at, false)) if (spoilt, at) == (number, when) => latest.add(0, delta),
            _ => {}
        }
    }

    /// Workers on the first hosts of six.
    fn text(job: &str, byteps: &str) -> String {
        format!(
            "[network]\ntopology = \"rack\"\nhosts = 6\nrate = \"10Gbit\"\nqueue = \"8MB\"\n[[job]]\nsystem = \"byteps\"\nworkers = 4\n{job}\n[job.byteps]\nasynchronous = true\n{byteps}"
        )
    }

    fn play(text: &str) -> Result<Report, RunError> {
        let scenario = parse("test.toml", text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        run(&scenario, Options { seed: 1, ..Options::default() })
    }

    fn played(text: &str) -> Report {
        play(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
    }

    const TENSORS: &str = "tensor = \"600kB\"\ntensors = 6\nin_flight = 2";
    const LAYERS: &str = "layers = [{ bytes = \"40kB\", forward = \"1ms\", backward = \"1ms\" }, { bytes = \"960kB\", forward = \"1ms\", backward = \"1ms\" }]";
    const SPARES: &str = "services = [\"h4\", \"h5\"]\n";

    #[test]
    fn all_parameters_are_the_sum_of_all_deltas_wherever_services_are() {
        let training = format!("{LAYERS}\niterations = 5\njitter = \"50%\"");
        let overlaps = format!("{training}\noverlap = true");
        for job in [TENSORS, "tensor = \"4B\"\ntensors = 40", &training, &overlaps] {
            for byteps in ["", SPARES, "services = 1\n", "services = [\"h0\", \"h5\"]\nshares = [0.1, 0.9]\n"]
            {
                for dtype in ["float32", "int32"] {
                    for payload in ["full", "sample"] {
                        let text = text(&format!("{job}\ndtype = \"{dtype}\""), byteps);
                        let report = played(&format!("payload = \"{payload}\"\n{text}"));
                        assert!(report.jobs[0].finished, "{text}");
                    }
                }
            }
        }
        // 150,000 elements: 75,000 for each service, which are two pieces.
        assert_eq!(played(&text(TENSORS, SPARES)).jobs[0].counters.server_aggregations, Some(4 * 6 * 4));
    }

    #[test]
    fn deltas_survive_losses_and_hosts_that_are_away() {
        let faults = ["h1", "h4"].map(|host| {
            format!("[[fault]]\nat = \"1ms\"\nkind = \"node-fails\"\nnode = \"{host}\"\ndown = \"3ms\"\n")
        });
        let report =
            played(&format!("{}[[loss]]\nloss = \"1%\"\n{}", text(TENSORS, SPARES), faults.concat()));
        assert!(report.jobs[0].counters.retransmissions > Some(0));
    }

    /// 48 deltas come to each service. A loss after the last answer shows in the end alone.
    #[test]
    fn a_delta_that_a_service_loses_or_adds_twice_is_found() {
        for when in [When::Added, When::Answered] {
            for (number, is_lost) in [(0, true), (0, false), (17, true), (17, false), (47, true), (47, false)]
            {
                SPOILT.set(Some((number, when, is_lost)));
                let found = play(&text(TENSORS, SPARES));
                SPOILT.set(None);
                let Err(RunError::Violation(violation, _)) = found else {
                    panic!("delta {number}, {is_lost}")
                };
                let in_the_end = matches!(violation, Violation::WrongParameters { .. });
                assert!(in_the_end || matches!(violation, Violation::WrongSum { .. }), "{violation}");
                assert_eq!(in_the_end, number == 47 && when == When::Answered, "{violation}");
            }
        }
    }

    #[test]
    fn a_model_is_cut_in_one_piece_for_each_service_and_these_in_shorter_ones() {
        let system = Asynchronous {
            services: (0..3).map(NodeId).collect(),
            shares: vec![0.5, 0.25, 0.25],
            transport: TransportPlan::default(),
        };
        let piece = |service, elements| Piece { service, elements };
        assert_eq!(
            system.cut(&[100_000, 60, 100_000, 40]),
            [
                vec![piece(0, 0..65_536), piece(0, 65_536..100_000)],
                vec![piece(0, 0..50), piece(1, 50..60)],
                vec![piece(1, 0..50_015), piece(2, 50_015..100_000)],
                vec![piece(2, 0..40)],
            ]
        );
    }

    /// One worker's link is a tenth of the others'. A sum waits for it, and deltas do not.
    #[test]
    fn a_slow_worker_keeps_no_other_from_its_iterations() {
        let per_second = |rates: &str, asynchronous: bool| {
            let text = text(&format!("{LAYERS}\n{rates}"), SPARES)
                .replace("asynchronous = true", &format!("asynchronous = {asynchronous}"));
            let report = played(&format!("until = \"300ms\"\n{text}"));
            report.jobs[0].training.as_ref().expect("it trains").iterations_per_s
        };
        let slow = "rates = [\"500Mbit\", \"10Gbit\", \"10Gbit\", \"10Gbit\"]";
        let [deltas, sums] = [true, false].map(|asynchronous| per_second(slow, asynchronous));
        // Iterations of three fast workers and a slow one in the mean, and of four as slow as that.
        let fast = per_second("", true);
        assert!(deltas > 0.75 * fast, "{deltas} where all fast ones make {fast}");
        assert!(sums < 0.3 * fast, "{sums} beside {fast}");
    }

    /// Computing takes 4 ms, an exchange 1 or 9 ms. The shorter of the two costs nothing.
    #[test]
    fn an_exchange_goes_on_under_the_next_batch() {
        for (rate, hidden_ms) in [("10Gbit", 1.0..1.7), ("1Gbit", 3.9..4.1)] {
            let seconds = |overlap: bool| {
                let rates = format!("rates = [\"{rate}\", \"{rate}\", \"{rate}\", \"{rate}\"]");
                let job = format!("{LAYERS}\niterations = 20\noverlap = {overlap}\n{rates}");
                played(&text(&job, SPARES)).jobs[0].finished_s.expect("it finished")
            };
            let hidden = 1e3 * (seconds(false) - seconds(true)) / 19.0;
            assert!(hidden_ms.contains(&hidden), "{hidden} ms an iteration at {rate}");
        }
    }

    #[test]
    fn mistakes_name_their_key_and_the_cure() {
        let dies = "[[fault]]\nat = \"1ms\"\nkind = \"service-dies\"\nnode = \"h4\"\n";
        for (job, byteps, words) in [
            (TENSORS, "elements = 64\n", "`elements` is for sums by packets"),
            (TENSORS, "window = 4\n", "leave it out, or `asynchronous`"),
            (TENSORS, "part_min = 4\n", "`part_min` is for"),
            (TENSORS, "timeout = \"1ms\"\n", "`timeout` is for"),
            (TENSORS, "take_over = \"1s\"\n", "nobody takes over"),
            (&format!("{TENSORS}\nlarge_values = \"1%\""), "", "leave `large_values` out"),
            (&format!("{LAYERS}\noverlap = true\norder = \"needed\""), "", "leave `order` out"),
            (TENSORS, &format!("{SPARES}{dies}"), "not with `asynchronous`"),
        ] {
            let text = text(job, byteps);
            let message = parse("test.toml", &text).expect_err(words).to_string();
            assert!(message.contains(words) && message.contains("test.toml:"), "{message}");
        }
        // A recorded step has no forward pass, and an exchange goes on under all of it.
        let recorded = "layers = [{ bytes = \"4B\", backward = \"1ms\" }]\niterations = 2\noverlap = true";
        assert!(played(&text(recorded, "")).jobs[0].finished);
    }
}
