//! DLCP's machines of a case, what goes wrong with them, and its rules.

use std::collections::HashSet;

use fanin_protocol::dlcp::{JobConfig, Ring, Server, ServerJob, Worker, WorkerPlan};
use fanin_protocol::{Instant, Layer, Loss, Summer, WorkerMachine};
use fanin_testworld::{Machine, Network, Numbered, Random, Script, Sum, Values, Way, World};
use fanin_wire::{
    AbortReason, BlockPacket, FlowId, Generation, JobId, Kind, LossBound, Op, Operation, Pattern, Preamble,
    ShardId, Signal, SignalPacket, Tag, WorkerId,
};

use crate::case::{Case, ELEMENTS, Fault};
use crate::numbers::{inside, of_worker};

/// A worker's ports: one a path, so far apart.
const NODES: usize = 64;
const JOB: JobId = JobId(3);

#[derive(Debug)]
pub struct Dlcp {
    case: Case,
    /// Blocks by the path that they took.
    pub by_path: Vec<usize>,
    /// Blocks that workers sent again.
    pub pushed_again: u64,
    /// Flows that some worker has sent to their end.
    stopped: HashSet<FlowId>,
    /// Sums that lack something and went to workers before any of these had stopped: what they lacked was let go. Of no broadcasts.
    pub early_sums: u64,
    aborted: Option<AbortReason>,
    told: Vec<Option<AbortReason>>,
    /// The only tensor of each worker, if it is not a numbered one.
    values: Vec<Values>,
    generation: u16,
    /// The counts of workers that are suspended.
    counted: Vec<Option<u32>>,
    /// Sums that workers handed back.
    pub restored: u64,
}

pub enum Happening {
    /// A worker dies.
    Death { node: usize },
    /// A worker does not hear of its server any more.
    Suspension { node: usize },
    /// Another server is there, which knows what the workers have counted.
    Return,
}

/// Workers come first, at the nodes of their ranks, and then the server if there is one.
pub fn world(case: Case) -> World<Dlcp> {
    world_of_values(case, &[])
}

/// Each worker has one tensor, which is this.
pub fn world_of_values(case: Case, values: &[Values]) -> World<Dlcp> {
    let config = case.config().check().expect("a case is sound");
    let worker = |worker: usize| {
        let other = case.fault == Fault::OtherBound && worker + 1 == case.workers;
        let push_bound = if other { LossBound::RELIABLE } else { config.push_bound };
        let (config, id) = (JobConfig { push_bound, ..config }, WorkerId(worker as u8));
        if case.ring {
            let (left, right) = ((worker + case.workers - 1) % case.workers, (worker + 1) % case.workers);
            return Machine::worker(Ring::new(config, id, left, right));
        }
        Machine::worker(Worker::new(config, id, case.workers))
    };
    let mut machines: Vec<_> = (0..case.workers).map(worker).collect();
    if !case.ring {
        let mut server: Server<usize> = Server::new(ShardId(0));
        server.add_job(ServerJob::from(config)).expect("a case is sound");
        machines.push(Machine::summer(server));
    }
    let script = Dlcp {
        by_path: vec![0; case.paths.into()],
        pushed_again: 0,
        stopped: HashSet::new(),
        early_sums: 0,
        aborted: None,
        told: vec![None; case.workers],
        values: values.to_vec(),
        generation: 0,
        counted: vec![None; case.workers],
        restored: 0,
        case: case.clone(),
    };
    let mut world = World::new(script, Random(case.seed ^ 0x5eed), machines, case.tensors.len());
    world.begin_within(0..case.workers, case.late_us);
    if case.fault == Fault::Death {
        let node = world.random.below(case.workers as u64) as usize;
        let at = 10_000 + world.random.below(400_000);
        world.happens_at(at, Happening::Death { node });
    }
    let mut crash = 0;
    for _ in 0..case.crashes {
        crash += 1 + world.random.below(1000 * case.crash_us);
        // Workers notice one after the other, and those that have not go on meanwhile.
        let within = world.random.pick(&[1, 20_000, 2_000_000]);
        for node in 0..case.workers {
            let at = crash + world.random.below(within);
            world.happens_at(at, Happening::Suspension { node });
        }
        crash += within;
        world.happens_at(crash, Happening::Return);
    }
    world
}

/// A worker stops, and remembers where it is.
fn suspend(world: &mut World<Dlcp>, node: usize) {
    let worker: &mut Worker<usize, Numbered> = world.machine_mut(node);
    let counted = worker.suspend();
    assert_eq!(counted.len(), 1);
    world.script.counted[node] = Some(counted[0]);
}

/// A server without a memory goes on where the slowest worker is.
fn resume(world: &mut World<Dlcp>) {
    let Dlcp { case, counted, generation, .. } = &mut world.script;
    let counted: Vec<u32> = counted.iter_mut().map(|count| count.take().expect("suspended")).collect();
    *generation += 1;
    let resumes_at = counted.iter().min().copied().map(FlowId);
    let config = JobConfig { generation: Generation(*generation), resumes_at, ..case.config() };
    let workers = case.workers;
    let mut server: Server<usize> = Server::new(ShardId(0));
    let resumes_at = resumes_at.into_iter().collect();
    server.add_job(ServerJob { resumes_at, ..ServerJob::from(config) }).expect("a case is sound");
    world.replace(workers, Machine::summer(server));
    let now = world.clock();
    for node in 0..workers {
        let plan = WorkerPlan { config, place: WorkerId(node as u8), server: workers };
        world.machine_mut::<Worker<usize, Numbered>>(node).resume(now, plan);
        world.drain(node);
    }
}

impl Dlcp {
    /// Whether the network loses all that goes up, or down, by a path.
    fn is_dead(&self, now: u64, path: usize, is_up: bool) -> bool {
        let Fault::DeadPath { from_ns, down } = self.case.fault else { return false };
        now >= from_ns && path == if is_up { 0 } else { down }
    }

    /// Notes that a worker says that it has sent all of a flow; whether it dies of that.
    fn stops(&mut self, flow: FlowId, is_first_death: bool) -> bool {
        self.stopped.insert(flow);
        self.case.fault == Fault::DeathAfterStop && is_first_death
    }

    /// How many of a flow's blocks may lack a worker's contribution: in a ring, so many of each segment at each of its hops.
    fn allowed(&self, blocks: u32) -> u32 {
        let Case { workers, bound, ring, .. } = self.case;
        if !ring {
            return bound.of_blocks(blocks);
        }
        let ranks = workers as u32;
        let begin = |segment: u32| blocks * segment / ranks;
        (0..ranks).map(|segment| (ranks - 1) * bound.of_blocks(begin(segment + 1) - begin(segment))).sum()
    }
}

impl Script for Dlcp {
    type Happening = Happening;

    fn network(&self) -> Network {
        let Case { doubled: double_per_mille, jitter_us, data_loss: loss_per_mille, .. } = self.case;
        Network { loss_per_mille, double_per_mille, jitter_us, ..Network::default() }
    }

    fn jobs(&self) -> Vec<JobId> {
        vec![JOB]
    }

    fn tensor(&self, node: usize, number: usize) -> (Numbered, Operation) {
        let (count, (elements, op)) = (self.case.tensors.len() as u16, self.case.tensors[number]);
        // As a backward pass has it: the last layer first.
        let layer = Layer { index: count - 1 - number as u16, count };
        let pattern = self.case.pattern(number);
        // A broadcast has one contribution, which is no mean.
        let op = if let Pattern::Broadcast(_) = pattern { Op::Sum } else { op };
        let own = self.values.get(node).cloned();
        let values = own.unwrap_or_else(|| of_worker(self.case.dtype, node, elements));
        (Numbered { layer, ..Numbered::new(number, values) }, Operation { op, pattern })
    }

    fn happen(world: &mut World<Self>, happening: Happening) {
        match happening {
            // Of several that stop at the same moment, the first one dies.
            Happening::Death { node } if world.dead().is_none() => world.die(node),
            Happening::Death { .. } => {}
            Happening::Suspension { node } => suspend(world, node),
            Happening::Return => resume(world),
        }
    }

    /// A clock jumps after a millisecond, if it does.
    fn clock(&self, at: u64) -> Instant {
        // Far enough from zero for a day back.
        const ORIGIN: u64 = 100_000_000_000_000;
        let jump = match self.case.fault {
            Fault::Clock { jump_ns } if at >= 1_000_000 => jump_ns,
            _ => 0,
        };
        Instant((ORIGIN + at).saturating_add_signed(jump))
    }

    fn node_at(&self, address: usize) -> Option<usize> {
        Some(address % NODES)
    }

    /// `to` is a port.
    fn carry(world: &mut World<Self>, from: usize, to: usize, packet: &[u8]) -> Option<Way> {
        let (now, is_first_death) = (world.ns(), world.dead().is_none());
        let script = &mut world.script;
        let workers = script.case.workers;
        let tag = Tag::of_packet(packet);
        let is_up = from < workers;
        let path = if is_up { usize::from(tag.path) } else { to / NODES };
        let preamble = Preamble::parse(packet).expect("ours");
        let mut dies = false;
        let loss_per_mille = match preamble.kind {
            Kind::Block => {
                script.by_path[usize::from(tag.path)] += 1;
                let header = BlockPacket::parse(preamble, packet).expect("ours").header;
                let mut is_lost = script.case.drops_unimportant && !tag.important;
                if is_up && header.last {
                    dies |= script.stops(header.flow, is_first_death);
                }
                script.restored += u64::from(header.restored);
                if is_up {
                    script.pushed_again += u64::from(header.round > 0);
                    is_lost |= header.round == 0 && script.case.loses_queue == Some(tag.priority);
                } else {
                    let lacks = usize::from(header.contributions) < workers;
                    script.early_sums += u64::from(lacks && !script.stopped.contains(&header.flow));
                }
                if is_lost { 1000 } else { script.case.data_loss }
            }
            Kind::Signal => {
                let packet = SignalPacket::parse(preamble, packet).expect("ours");
                if is_up && packet.signal == Signal::Stop {
                    dies |= script.stops(packet.flow, is_first_death);
                }
                script.case.signal_loss
            }
            _ => script.case.signal_loss,
        };
        let late_ns = match script.case.fault {
            Fault::SlowPath { us } if path == 0 => 1000 * us,
            _ => 0,
        };
        let is_lost = script.is_dead(now, path, is_up);
        if dies {
            // What it has written leaves, and it hears nothing more.
            world.happens_at(now, Happening::Death { node: from });
        }
        let from = if is_up { from + NODES * path } else { from };
        (!is_lost).then_some(Way { from, to, loss_per_mille, late_ns })
    }

    fn after_drain(world: &mut World<Self>, node: usize, _sent: usize) {
        let Case { workers, ring, flows, flow_blocks, .. } = world.script.case;
        if !ring && node == workers {
            let in_use = server(world).in_use;
            let most = 2 * u32::from(flows) * flow_blocks;
            assert!(in_use <= most, "{in_use} blocks gather, where {most} may");
        }
    }

    fn gave_up(world: &mut World<Self>, node: usize, job: Option<JobId>, reason: AbortReason) {
        match job {
            Some(job) => {
                assert_eq!(job, JOB);
                assert_eq!(world.script.aborted.replace(reason), None, "said once");
            }
            None => world.script.told[node] = Some(reason),
        }
    }

    /// Whether nothing more is to be learned, though not all sleep.
    fn is_over(world: &World<Self>) -> bool {
        // Of a ring, the owners tell all what one was told.
        world.script.case.ring && told(world).iter().any(Option::is_some)
            || world.dead().is_some() && world.ns() > 120_000_000_000
    }

    /// Then all is done, and nobody waits for a confirmation.
    fn may_sleep(world: &World<Self>) -> bool {
        let has_dead = world.dead().is_some();
        if !has_dead && !world.script.case.ring {
            assert_eq!(server(world).in_use, 0, "{}", world.standing());
        }
        let has_ended = aborted(world).is_some() || told(world).iter().any(Option::is_some);
        has_dead || has_ended || world.missing() == 0
    }

    /// The rules.
    fn check(world: &World<Self>) {
        assert_eq!(aborted(world), None);
        let case = &world.script.case;
        let Case { workers, pull_bound, .. } = *case;
        for (number, (elements, op)) in case.tensors.iter().enumerate() {
            let result = |worker: usize| world.done(worker, number).expect("all are done");
            let pattern = case.pattern(number);
            // Whose elements are in the sum, and who gets it.
            let contributors: Vec<usize> =
                (0..workers).filter(|worker| pattern.contributes(WorkerId(*worker as u8))).collect();
            let receivers: Vec<usize> =
                (0..workers).filter(|worker| pattern.receives(WorkerId(*worker as u8))).collect();
            for worker in (0..workers).filter(|worker| !receivers.contains(worker)) {
                let own = of_worker(case.dtype, worker, *elements);
                let Sum { values, loss, .. } = result(worker);
                assert_eq!((values.bits(), *loss), (own.bits(), Loss::default()), "what was submitted");
            }
            let Sum { values, loss, .. } = result(receivers[0]);
            let of_block = 4 * ELEMENTS / values.element_bytes();
            let blocks = elements.div_ceil(of_block);
            let is_float = values.is_float();
            let may_keep = is_float && *op == Op::Average && pattern == Pattern::AllReduce;
            if pull_bound == LossBound::RELIABLE || !may_keep {
                for other in receivers.iter().map(|worker| result(*worker)) {
                    assert_eq!(
                        other.values.bits(),
                        values.bits(),
                        "tensor {number}: all ranks get the same bits"
                    );
                    let shared = |loss: &Loss| (loss.contributions, loss.lost, loss.unsummed, loss.kept);
                    assert_eq!(shared(&other.loss), shared(loss), "and are told the same");
                }
                assert_eq!(loss.kept, 0);
            }
            for worker in &receivers {
                let Sum { values, loss, .. } = result(*worker);
                assert_eq!(values.len(), *elements);
                let mut told = Loss { rounds: loss.rounds, kept: loss.kept, ..Loss::default() };
                // An own gradient that was kept looks like a mean of one alone.
                let (mut alone, mut may_be_kept) = (0, 0);
                for flow in (0..blocks).collect::<Vec<_>>().chunks(case.flow_blocks as usize) {
                    let mut missing = vec![0_u32; workers];
                    for block in flow {
                        let range = block * of_block..((block + 1) * of_block).min(*elements);
                        let inside = inside(values, range, *op, &contributors);
                        let inside =
                            inside.unwrap_or_else(|| panic!("tensor {number}, block {block}: no sum"));
                        if loss.kept > 0 && inside == 1 << worker {
                            alone += 1;
                        } else {
                            told.lost += contributors.len() as u64 - u64::from(inside.count_ones());
                            told.unsummed += u64::from(inside == 0);
                            for other in &contributors {
                                missing[*other] += u32::from(inside >> other & 1 == 0);
                            }
                        }
                        told.contributions += contributors.len() as u64;
                    }
                    let blocks = flow.len() as u32;
                    let is_bounded = is_float && contributors.len() == workers;
                    let allowed = if is_bounded { world.script.allowed(blocks) } else { 0 };
                    assert!(
                        missing.iter().all(|lost| *lost <= allowed),
                        "{missing:?} of {blocks} lost, {allowed} allowed"
                    );
                    may_be_kept += u64::from(pull_bound.of_blocks(blocks));
                }
                assert!(may_keep || loss.kept == 0);
                assert!(loss.kept <= alone.min(may_be_kept) || loss.kept == 0, "{} kept", loss.kept);
                told.lost += (alone - loss.kept) * (workers as u64 - 1);
                assert_eq!(told, *loss, "tensor {number} at worker {worker}: what was lost is told");
            }
        }
    }
}

/// What the server has of the job.
fn server(world: &World<Dlcp>) -> fanin_protocol::JobProgress {
    let server: &Server<usize> = world.machine(world.script.case.workers);
    server.job_progress(JOB).expect("it is there")
}

/// Over all tensors, as the first worker was told.
pub fn loss(world: &World<Dlcp>) -> Loss {
    let mut all = Loss::default();
    let sums = (0..world.script.case.tensors.len()).filter_map(|number| world.done(0, number));
    sums.for_each(|sum| all += sum.loss);
    all
}

/// Why the server gave the job up.
pub fn aborted(world: &World<Dlcp>) -> Option<AbortReason> {
    world.script.aborted
}

/// What each rank was told, if it was told anything.
pub fn told(world: &World<Dlcp>) -> &[Option<AbortReason>] {
    &world.script.told
}

pub fn workers_were_told(world: &World<Dlcp>) -> bool {
    told(world).iter().all(|told| *told == aborted(world))
}

/// Whether the server says that no rank but this is missing.
pub fn waits_for_nobody_but(world: &World<Dlcp>, rank: u16) -> bool {
    let waiting_for = server(world).waiting_for;
    waiting_for.iter().enumerate().all(|(other, count)| *count == 0 || other == usize::from(rank))
}
