//! How a system moves in (CONTRIBUTING.md): a server that sums what it is sent, with all that a
//! system needs and nothing else. It stands outside of the crate, so that what it uses is public.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use fanin_protocol::{Elements, Tensor};
use fanin_sim::net::{Actor, ActorId, Body, Context, Network, NodeId, Packet, SimAddress};
use fanin_sim::scenario_file::{Entry, Kind, Mistake, keys, parse, parse_with};
use fanin_sim::systems::{Counters, Machines, Role, Site, Station, System};
use fanin_sim::workload::{Gradient, Options, Process, Report, RunError, Tenant, Violation, run};
use serde::Deserialize;
use toml::Spanned;

const PORT: u16 = 4900;
/// Floats of a packet.
const CHUNK: usize = 256;
/// Job, tensor and chunk, which are how a packet begins.
type Header = (u32, u64, u32);
const HEADER_BYTES: usize = 16;

// 1. The content of scenario files: the name, and the keys of `[job.toy]`.

const TOY: Kind = Kind { name: "toy", keys: keys::<Keys>, resolve };

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Keys {
    server: Spanned<String>,
    /// A mistake for the checkers to find: it leaves out one contribution of so many.
    leaves_out: Option<u64>,
}

fn resolve(entry: &mut Entry<'_>) -> Result<Arc<dyn System>, Mistake> {
    let keys: Keys = entry.table()?;
    entry.workers_between(1, 64)?;
    Ok(Arc::new(Toy { server: entry.host(&keys.server)?, leaves_out: keys.leaves_out }))
}

// 2. A job's configuration, and what it needs where.

#[derive(Debug)]
struct Toy {
    server: NodeId,
    leaves_out: Option<u64>,
}

impl System for Toy {
    fn name(&self) -> &'static str {
        TOY.name
    }

    /// Floats are added one after the other, with one rounding each.
    fn bound(&self, workers: usize, largest: f64) -> f64 {
        (workers * workers) as f64 * largest * f64::from(f32::EPSILON)
    }

    fn packet_kinds(&self) -> &'static [&'static str] {
        &["chunk"]
    }

    fn kind_of(&self, packet: &[u8]) -> Option<&'static str> {
        (packet.len() > HEADER_BYTES).then_some("chunk")
    }

    fn plan(&self, tenant: Tenant, site: &mut Site<'_>) -> Box<dyn Machines> {
        let server = site.station(self.server, PORT, || Server {
            node: self.server,
            leaves_out: self.leaves_out,
            actor: Cell::new(ActorId(u32::MAX)),
            jobs: RefCell::default(),
        });
        server.jobs.borrow_mut().insert(tenant.id(0).0, tenant.plan().workers.len());
        Box::new(Job { id: tenant.id(0).0, server })
    }
}

// 3. The machine that jobs share.

struct Server {
    node: NodeId,
    leaves_out: Option<u64>,
    actor: Cell<ActorId>,
    /// Workers, by job.
    jobs: RefCell<BTreeMap<u32, usize>>,
}

impl Server {
    fn machine(&self) -> Summer {
        let (jobs, leaves_out) = (self.jobs.borrow().clone(), self.leaves_out);
        Summer { jobs, leaves_out, sums: BTreeMap::new(), added: BTreeMap::new(), seen: 0 }
    }
}

impl Station for Server {
    fn role(&self) -> Role {
        Role::Server
    }

    fn place(&self, network: &mut Network) {
        self.actor.set(network.add_actor(self.node, PORT, self.machine()));
    }

    fn actor(&self) -> ActorId {
        self.actor.get()
    }

    fn forget(&self, network: &mut Network) {
        network.replace_actor(self.actor.get(), self.machine());
    }
}

struct Summer {
    jobs: BTreeMap<u32, usize>,
    leaves_out: Option<u64>,
    sums: BTreeMap<Header, (Vec<SimAddress>, Vec<f32>)>,
    /// Packets, by job.
    added: BTreeMap<u32, u64>,
    seen: u64,
}

impl Actor for Summer {
    fn packet(&mut self, context: &mut Context<'_>, packet: &Packet<'_>) {
        let Some((header, numbers)) = read(packet) else { return };
        let (from, sum) = self.sums.entry(header).or_insert_with(|| (Vec::new(), vec![0.0; numbers.len()]));
        self.seen += 1;
        if self.leaves_out.is_none_or(|one_of| !self.seen.is_multiple_of(one_of)) {
            sum.iter_mut().zip(&numbers).for_each(|(sum, number)| *sum += number);
        }
        *self.added.entry(header.0).or_default() += 1;
        from.push(packet.from);
        if from.len() == self.jobs[&header.0]
            && let Some((workers, sum)) = self.sums.remove(&header)
        {
            for worker in workers {
                send(context, worker, header, &sum);
            }
        }
    }
}

// 4. A job in a run: its workers' machines, and what they counted.

struct Job {
    id: u32,
    server: Rc<Server>,
}

impl Machines for Job {
    fn add_worker(&self, network: &mut Network, process: Process) -> ActorId {
        let (node, port) = (process.node(), process.port());
        let server = SimAddress::new(self.server.node, PORT);
        network.add_actor(node, port, Worker { process, job: self.id, server, tensors: BTreeMap::new() })
    }

    fn counters(&self, network: &Network) -> Counters {
        let server = network.actor::<Summer>(self.server.actor.get());
        let added = server.and_then(|server| server.added.get(&self.id).copied());
        Counters { server_aggregations: Some(added.unwrap_or(0)), ..Counters::default() }
    }
}

struct Worker {
    process: Process,
    job: u32,
    server: SimAddress,
    /// Under way, with the number of chunks whose sums have not come.
    tensors: BTreeMap<u64, (Gradient, usize)>,
}

impl Actor for Worker {
    fn start(&mut self, context: &mut Context<'_>) {
        self.process.started(context);
    }

    fn timer(&mut self, context: &mut Context<'_>, token: u64) {
        self.process.timer(context, token);
    }

    fn notice(&mut self, context: &mut Context<'_>, token: u64) {
        while token == Process::SUBMIT
            && let Some(mut gradient) = self.process.next()
        {
            let tensor = gradient.tensor;
            let mut chunks = 0;
            for chunk in floats(&mut gradient).chunks(CHUNK) {
                send(context, self.server, (self.job, tensor, chunks as u32), chunk);
                chunks += 1;
            }
            self.tensors.insert(tensor, (gradient, chunks));
        }
    }

    fn packet(&mut self, context: &mut Context<'_>, packet: &Packet<'_>) {
        let Some(((_, tensor, chunk), sum)) = read(packet) else { return };
        let Some((gradient, left)) = self.tensors.get_mut(&tensor) else { return };
        self.process.progressed(context);
        let from = chunk as usize * CHUNK;
        floats(gradient)[from..from + sum.len()].copy_from_slice(&sum);
        *left -= 1;
        if *left == 0
            && let Some((gradient, _)) = self.tensors.remove(&tensor)
        {
            self.process.completed(context, gradient);
        }
    }
}

fn floats(gradient: &mut Gradient) -> &mut [f32] {
    match gradient.elements() {
        Elements::Float32(numbers) => numbers,
        _ => panic!("the scenario says float32"),
    }
}

fn send(context: &mut Context<'_>, to: SimAddress, (job, tensor, chunk): Header, numbers: &[f32]) {
    let mut bytes = [job.to_le_bytes().as_slice(), &tensor.to_le_bytes(), &chunk.to_le_bytes()].concat();
    numbers.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
    context.send(to, fanin_sim::net::Class::default(), &bytes);
}

fn read(packet: &Packet<'_>) -> Option<(Header, Vec<f32>)> {
    let Body::Bytes(bytes) = packet.body else { return None };
    let (header, numbers) = bytes.split_at_checked(HEADER_BYTES)?;
    let word = |at: usize| header[at..at + 4].try_into().map(u32::from_le_bytes).ok();
    let tensor = u64::from(word(4)?) | u64::from(word(8)?) << 32;
    let numbers =
        numbers.chunks_exact(4).map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]));
    Some(((word(0)?, tensor, word(12)?), numbers.collect()))
}

// 5. It is played, with every checker on.

fn play(more: &str) -> Result<Report, RunError> {
    let job = format!(
        "[[job]]\nsystem = \"toy\"\nworkers = 3\ntensor = \"10kB\"\ntensors = 5\n[job.toy]\nserver = \"h8\"\n{more}"
    );
    let text = format!("[network]\ntopology = \"rack\"\nhosts = 9\n{job}{job}");
    let scenario = parse_with(&[TOY], "toy.toml", &text).unwrap_or_else(|error| panic!("{error}"));
    run(&scenario, Options { seed: 1, ..Options::default() })
}

#[test]
fn a_system_from_outside_sums_for_two_jobs_at_one_server() {
    let report = play("").unwrap_or_else(|error| panic!("{error}"));
    for job in &report.jobs {
        assert!(job.finished && job.system == "toy");
        assert_eq!(job.tensors, 5.0);
        // 2,500 floats are ten packets.
        assert_eq!(job.counters.server_aggregations, Some(3 * 5 * 10));
    }
    assert_eq!(report.servers[0].host, "h8");
    assert_eq!(report.servers[0].received_packets, 2 * 3 * 5 * 10);
}

/// Nobody has said what its decisions depend on.
#[test]
fn a_sample_of_the_payload_is_refused_for_it() {
    let text = "payload = \"sample\"\n[network]\ntopology = \"rack\"\nhosts = 3\n[[job]]\nsystem = \"toy\"\nworkers = 2\ntensor = \"1kB\"\n[job.toy]\nserver = \"h2\"\n";
    let refused = parse_with(&[TOY], "toy.toml", text).map(drop).expect_err("refused").to_string();
    assert!(refused.contains("what toy decides depends on all of a tensor"), "{refused}");
}

#[test]
fn what_it_leaves_out_is_found() {
    match play("leaves_out = 100\n") {
        Err(RunError::Violation(Violation::WrongSum { job, .. }, _)) => assert!(job.starts_with("job")),
        other => panic!("{other:?}"),
    }
}

/// It sends nothing again, so that the tensor never comes.
#[test]
fn its_packets_can_be_named_in_losses() {
    let loss =
        |kind: &str| play(&format!("[[loss]]\nonly = \"{kind}\"\nnth = [7]\nlink = [\"h0\", \"s0\"]\n"));
    match loss("chunk") {
        Err(RunError::Violation(Violation::Stalled { .. }, _)) => {}
        other => panic!("{other:?}"),
    }
    assert!(loss("segment").is_ok());
}

#[test]
fn its_table_is_read_as_any_systems() {
    let text = "[network]\ntopology = \"rack\"\nhosts = 3\n[[job]]\nsystem = \"toy\"\nworkers = 2\ntensor = \"1kB\"\n[job.toy]\nsevrer = \"h2\"\n";
    let refused = |kinds: &[Kind], text: &str| match parse_with(kinds, "toy.toml", text) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("this was taken"),
    };
    assert!(refused(&[TOY], text).starts_with("toy.toml:9:1: unknown key `sevrer`; did you mean `server`?"));
    assert!(
        refused(&[TOY], &text.replace("sevrer", "server").replace("h2", "h7")).contains("unknown host `h7`")
    );
    assert!(
        refused(&[TOY], text.split("[job.toy]").next().unwrap_or_default())
            .contains("missing field `server`")
    );
    assert!(parse("toy.toml", text).is_err_and(|error| error.to_string().contains("unknown system `toy`")));
}
