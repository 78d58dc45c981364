//! Any sequence of packets at a DLCP server, a worker and a rank of a ring: nothing panics, and
//! what waits stays bounded.
#![no_main]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fanin_protocol::dlcp::{Finish, JobConfig, RateConfig, Ring, Server, ServerJob, Worker, WorkerPlan};
use fanin_protocol::{Elements, Endpoint, Instant, RetransmissionConfig, Summer, Tensor, Verdict, WorkerMachine};
use fanin_wire::{
    AbortReason, BlockHeader, BlockPacket, Collective, Dtype, FlowId, Generation, JobId, Key, Kind, LossBound,
    Op, Operation, Pattern, Preamble, Report, ShardId, Signal, SignalPacket, Start, Tag, WireDtype, WorkerId,
    block_packet_bytes,
};
use libfuzzer_sys::fuzz_target;

const KEY: Key = Key::new(1);
/// Bytes of one operation.
const OPERATION: usize = 8;
const WORKERS: u16 = 3;
const FLOWS: u16 = 2;
const FLOW_BLOCKS: u32 = 3;

/// Packets, and those that had an effect: a driver whose packets are all dropped would test
/// nothing. Inputs do not count: the fuzzer begins with such as are shorter than an operation.
static PACKETS: AtomicU64 = AtomicU64::new(0);
static COUNTED: AtomicU64 = AtomicU64::new(0);

struct Floats(Vec<f32>);

impl Tensor for Floats {
    fn elements(&mut self) -> Elements<'_> {
        Elements::Float32(&mut self.0)
    }
}

fn config() -> JobConfig {
    JobConfig {
        id: JobId(1),
        key: KEY,
        generation: Generation(0),
        workers: WORKERS,
        shard: ShardId(0),
        elements: 32,
        push_bound: LossBound::new(0.5).expect("below one"),
        pull_bound: LossBound::RELIABLE,
        flow_blocks: FLOW_BLOCKS,
        flows: FLOWS,
        window_blocks: 3 * FLOW_BLOCKS,
        rate: RateConfig::of_link(1_000_000_000, 200),
        finish: Finish::Stopped,
        quiet: Duration::from_micros(100),
        retransmission: RetransmissionConfig {
            floor: Duration::from_millis(1),
            ceiling: Duration::from_millis(50),
        },
        paths: 2,
        resumes_at: None,
    }
}

/// A packet that the fuzzer chose: most fields are right, so that packets get far.
fn packet(operation: &[u8; OPERATION]) -> Vec<u8> {
    let [kind, worker, flow, block, round, value, choice, key] = *operation;
    let preamble = Preamble {
        kind: if kind & 1 == 0 { Kind::Block } else { Kind::Signal },
        job: JobId(1),
        generation: Generation(0),
        worker: WorkerId(worker & 3),
        shard: ShardId(0),
    };
    let flow = FlowId(if flow > 250 { u32::MAX - u32::from(flow & 3) } else { u32::from(flow & 7) });
    let round = u16::from(round & 3);
    let elements = if choice & 64 == 0 { 96 } else { 40 + u32::from(value) };
    let collective = Collective {
        sequence: 0,
        dtype: if choice & 32 == 0 { Dtype::Float32 } else { Dtype::Int64 },
        op: if choice & 8 == 0 { Op::Sum } else { Op::Average },
        pattern: match choice & 7 {
            0..6 => Pattern::AllReduce,
            6 => Pattern::Reduce(WorkerId(1)),
            _ => Pattern::Broadcast(WorkerId(1)),
        },
        elements,
        wire_dtype: WireDtype::Native,
    };
    let bound = if choice & 128 == 0 { LossBound::new(0.5) } else { LossBound::new(0.25) };
    let mut bytes = vec![0; 2048];
    let length = match preamble.kind {
        Kind::Block => {
            let tag = Tag { priority: 1 + value % 7, important: value & 8 != 0, path: value & 1 };
            let contributions = if choice & 128 != 0 { u16::from(value & 3) } else { 1 };
            let (last, restored) = (block & 64 != 0, block & 32 != 0);
            let header = BlockHeader { flow, block: u32::from(block & 3), round, tag, contributions, last, restored };
            let payload = if contributions == 0 { 0 } else { [128, 128, 128, 32][usize::from(choice & 3)] };
            let length = block_packet_bytes(payload);
            BlockPacket::write(&mut bytes[..length], KEY, &preamble, &header, |payload| payload.fill(value));
            length
        }
        _ => {
            let missing = [block];
            let signal = match kind >> 1 & 7 {
                0 | 1 => Signal::Start(Start {
                    collective,
                    elements,
                    bound: bound.expect("below one"),
                    priority: 1 + value % 7,
                    has_blocks: collective.pattern.contributes(preamble.worker) != (value == 200),
                }),
                2 => Signal::Stop,
                3 => Signal::Confirm,
                4 => {
                    let (packets, period_us) = (u32::from(value), u32::from(block) * 10);
                    Signal::Report(Report { number: u32::from(choice), packets, period_us })
                }
                5 => Signal::Request { part: u16::from(choice >> 7), missing: &missing },
                _ => Signal::Finish,
            };
            let length = signal.packet_bytes();
            SignalPacket { preamble, flow, round, path: value % 3, signal }.write(&mut bytes[..length], KEY);
            length
        }
    };
    bytes.truncate(length);
    if key == 255 {
        Key::new(0).seal(&mut bytes); // a stranger's
    }
    bytes
}

/// Packets that a machine sends.
fn drain<E: Endpoint<Address = u8>>(machine: &mut E, now: Instant, train: &mut [u8]) {
    let mut sent = 0;
    while let Some(transmit) = machine.poll_transmit(now, train) {
        assert!(transmit.bytes > 0 && transmit.bytes <= train.len());
        sent += transmit.bytes.div_ceil(transmit.segment_bytes) * transmit.to.len();
        let most = 40 * usize::from(WORKERS) * usize::from(FLOWS) * FLOW_BLOCKS as usize;
        assert!(sent <= most, "it says no end of things");
    }
    while machine.poll_event().is_some() {}
}

fuzz_target!(|bytes: &[u8]| {
    let mut server: Server<u8> = Server::new(ShardId(0));
    server.add_job(ServerJob::from(config())).expect("within its limits");
    let mut worker = Worker::new(config(), WorkerId(0), 9_u8);
    // Between worker 2, to its left, and worker 1.
    let mut ring = Ring::new(config(), WorkerId(0), 8_u8, 7);
    let mut train = vec![0; 65536];
    let mut now = Instant(0);
    for operation in bytes.as_chunks::<OPERATION>().0 {
        let step = u64::from(operation[5]) << (operation[6] & 15);
        now = if operation[7] == 254 { Instant(now.0.saturating_sub(step)) } else { Instant(now.0 + step) };
        let packet = packet(operation);
        let verdict = match operation[7] & 3 {
            0 if operation[7] & 4 == 0 => worker.handle_packet(now, 9, &packet),
            0 => ring.handle_packet(now, 8, &packet),
            1 if operation[7] == 253 => {
                server.abort_job(JobId(1), AbortReason::SwitchStopped);
                server.add_job(ServerJob::from(config())).expect("within its limits");
                continue;
            }
            // The server has lost its memory; a worker may be told anything of where the job is.
            1 if operation[7] == 249 => {
                let counted = worker.suspend()[0];
                let resumes_at = FlowId(counted.wrapping_sub(u32::from(operation[2] & 3)));
                server = Server::new(ShardId(0));
                let job = ServerJob { resumes_at: vec![resumes_at], ..ServerJob::from(config()) };
                server.add_job(job).expect("within its limits");
                let config = JobConfig { resumes_at: Some(resumes_at), ..config() };
                worker.resume(now, WorkerPlan { config, place: WorkerId(0), server: 9 });
                continue;
            }
            2 if operation[7] > 230 => {
                let operation = Operation::from(if operation[6] & 8 == 0 { Op::Sum } else { Op::Average });
                worker.submit(Floats(vec![1.0; 96]), operation);
                ring.submit(Floats(vec![1.0; 96]), operation);
                Verdict::Absorb
            }
            _ => server.handle_packet(now, operation[1], &packet),
        };
        PACKETS.fetch_add(1, Ordering::Relaxed);
        COUNTED.fetch_add(u64::from(!matches!(verdict, Verdict::Drop(_))), Ordering::Relaxed);
        server.handle_timeout(now);
        worker.handle_timeout(now);
        ring.handle_timeout(now);
        drain(&mut server, now, &mut train);
        drain(&mut worker, now, &mut train);
        drain(&mut ring, now, &mut train);
        let progress = server.job_progress(JobId(1)).expect("it is there");
        assert!(progress.in_use <= 2 * u32::from(FLOWS) * FLOW_BLOCKS);
    }
    // A tenth to a fifth of what the fuzzer makes up has an effect.
    let packets = PACKETS.load(Ordering::Relaxed);
    assert!(packets < 10_000 || COUNTED.load(Ordering::Relaxed) > packets / 50, "no packet has an effect");
});
