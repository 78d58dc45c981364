//! Any sequence of packets, plans and commands at two GOAT switches and a server: nothing panics,
//! answers stay bounded, and no aggregator is lost.
#![no_main]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fanin_protocol::goat::{
    GoatJobConfig, GoatRoute, GoatServer, GoatServerJob, GoatSwitch, GoatSwitchConfig, Onward, Overflow,
    PlannedSum, Scaling, ServerPlan, SubModels, sums_of,
};
use fanin_protocol::{Endpoint, Instant, Summer, Verdict};
use fanin_wire::{
    AbortReason, AggregationNode, Collective, Dtype, Flags, Generation, GradientHeader, JobId, Key, Kind, Op,
    Participants, Pattern, PlannedDirections, PlannedHeader, PlannedPacket, Preamble, ShardId, SubModel,
    WireDtype, WorkerId, fragment_packet_bytes,
};
use libfuzzer_sys::fuzz_target;

const AGGREGATORS: u32 = 3;
const WORKERS: usize = 5;
const UP: u8 = 200;
const KEY: Key = Key::new(1);
/// Bytes of one operation.
const OPERATION: usize = 8;
/// The parts of the model: four fragments.
const FRAGMENTS: [u32; 3] = [2, 1, 1];
/// The most recipients of a machine's packet: its workers, and a switch.
const CHILDREN: usize = WORKERS + 1;

/// Inputs, and packets that had an effect: a driver whose packets are all dropped would test
/// nothing.
static INPUTS: AtomicU64 = AtomicU64::new(0);
static COUNTED: AtomicU64 = AtomicU64::new(0);

/// The summing node, by worker and part: the server, a switch, or nobody that there is.
fn nodes(plan: u8) -> Vec<Vec<AggregationNode>> {
    let node = |rank: usize, part: usize| {
        AggregationNode(u16::from(plan.rotate_left((rank / 2 + 3 * part) as u32) & 3))
    };
    (0..WORKERS).map(|rank| (0..FRAGMENTS.len()).map(|part| node(rank, part)).collect()).collect()
}

/// Whether the first switch's sums go to the second one, by part.
fn onward(plan: u8, part: usize) -> Onward {
    let goes_on = plan >> (part + 3) & 1 != 0;
    goes_on.then_some((AggregationNode(1), AggregationNode(2))).into_iter().collect()
}

fn sub_models() -> SubModels {
    SubModels::new(&FRAGMENTS).expect("parts with fragments")
}

fn route(id: u32, switch: u16, plan: u8) -> GoatRoute<u8> {
    let node = AggregationNode(1 + switch);
    let mut sums = BTreeMap::new();
    for part in 0..FRAGMENTS.len() {
        let assigned = nodes(plan).into_iter().map(|assigned| assigned[part]);
        let mut of_all = sums_of(assigned, &onward(plan, part)).expect("no circle");
        let sum = of_all.remove(&node).unwrap_or_default();
        sums.insert(SubModel(part as u16), PlannedSum { first_aggregator: part as u32, ..sum });
    }
    GoatRoute {
        id: JobId(id),
        key: KEY,
        generation: Generation(0),
        workers: WORKERS as u16,
        node,
        upstream: UP,
        next_hops: vec![(AggregationNode(2 - switch), 100)],
        below: (0..CHILDREN as u8 - 1).collect(),
        // This worker's own packets say where it is.
        own: 1,
        sub_models: sub_models(),
        sums,
        window_max: 4,
        aggregators: AGGREGATORS,
    }
}

fn server_plan(plan: u8, change: u8) -> ServerPlan<u8> {
    let mut made = ServerPlan {
        sub_models: sub_models(),
        nodes: nodes(plan),
        onward: (0..FRAGMENTS.len()).map(|part| onward(plan, part)).collect(),
        children: vec![10, 11],
        ways: (0..WORKERS as u16).map(|rank| rank % 2).collect(),
    };
    // Plans that nobody should make.
    match change {
        0 => drop(made.nodes.pop()),
        1 => drop(made.nodes[2].pop()),
        2 => made.ways[1] = WORKERS as u16,
        3 => made.sub_models = SubModels::new(&[1, 1]).expect("parts with fragments"),
        4 => drop(made.ways.pop()),
        _ => {}
    }
    made
}

fn server_job(id: u32, plan: u8) -> GoatServerJob<u8> {
    let config = GoatJobConfig {
        id: JobId(id),
        key: KEY,
        generation: Generation(0),
        workers: WORKERS as u16,
        elements: 64,
        window_max: 4,
        scaling: if id == 1 { Scaling::Static } else { Scaling::Dynamic },
        overflow: Overflow::Reactive,
        congestion_control: true,
        wire_dtype: WireDtype::SharedExponent,
        originals_elements_max: 0,
    };
    GoatServerJob { config, plan: server_plan(plan, 255), restored: id == 2 }
}

/// A packet that the fuzzer chose: most fields are right, so that packets get far.
fn packet(operation: &[u8; OPERATION], plan: u8, out: &mut [u8]) -> usize {
    let [choice, workers, flags, sequence, node, exponents, value, kind] = *operation;
    let preamble = Preamble {
        kind: if kind == 255 { Kind::Abort } else { Kind::Planned },
        job: JobId(1 + u32::from(choice >> 4 & 1)),
        generation: Generation(0),
        worker: WorkerId::ALL,
        shard: ShardId(0),
    };
    let bit = |set: u8| flags & set != 0;
    let sequence = if kind == 13 { u64::MAX - u64::from(sequence) } else { u64::from(sequence & 15) };
    let (part, fragment) = [(0, 0), (0, 1), (1, 0), (2, 0)][(sequence % 4) as usize];
    let rank = usize::from(workers % WORKERS as u8);
    let header = PlannedHeader {
        flags: Flags {
            resend: bit(1),
            collision: bit(2),
            ecn: bit(4),
            is_ack: bit(8) && bit(128),
            overflow: bit(16) && bit(64),
            restore: bit(32) && bit(64),
            stalled: bit(1) && bit(64),
            half: choice & 48 == 32 && kind & 1 != 0,
        },
        directions: PlannedDirections {
            passed: bit(128),
            aggregation_node: if node < 240 { nodes(plan)[rank][part] } else { AggregationNode(node.into()) },
            sub_model: SubModel(if kind == 9 { u16::from(node) } else { part as u16 }),
            workers: if workers & 128 == 0 { 1 << rank } else { u128::from(workers & 31) },
            participants: if kind == 11 { Participants(node.into()) } else { Participants::ALL },
        },
        sequence,
        aggregator_index: fragment + u32::from(kind == 10) * u32::from(node),
        fragment: (sequence & 15) as u32 + u32::from(kind == 7),
        collective: Collective {
            sequence: 0,
            dtype: [Dtype::Float32, Dtype::Int32, Dtype::Bfloat16, Dtype::Int32][usize::from(choice >> 4 & 3)],
            op: if choice & 16 != 0 { Op::Average } else { Op::Sum },
            pattern: Pattern::AllReduce,
            elements: 1000,
            wire_dtype: WireDtype::SharedExponent,
        },
        exponent: if exponents < 250 { GradientHeader::STATIC_FACTOR } else { i16::from(exponents) },
        next_exponent: i16::from(exponents) - 100,
    };
    let elements = [64, 64, 64, 256, 0][usize::from(kind % 32).min(4) * usize::from(kind < 32)];
    let value = [i32::from(value), i32::MAX, i32::MIN, 1 << 30][usize::from(choice >> 6)];
    PlannedPacket::write(out, KEY, &preamble, &header, elements, |payload| {
        payload.as_chunks_mut().0.fill(value.to_le_bytes());
    })
}

/// Packets that a machine sends, each recipient's copy counted.
fn drain<E: Endpoint<Address = u8>>(machine: &mut E, now: Instant, train: &mut [u8]) -> usize {
    let mut sent = 0;
    while let Some(transmit) = machine.poll_transmit(now, train) {
        assert!(transmit.bytes > 0 && transmit.bytes <= train.len());
        sent += transmit.bytes.div_ceil(transmit.segment_bytes) * transmit.to.len();
    }
    while machine.poll_event().is_some() {}
    sent
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&first, bytes)) = bytes.split_first() else { return };
    let mut plan = first;
    let config = GoatSwitchConfig {
        aggregators: AGGREGATORS,
        elements: 64,
        ways: 2,
        stale: Duration::ZERO,
        ecn_threshold_packets: Some(2),
    };
    let mut switches = [GoatSwitch::new(config), GoatSwitch::new(config)];
    let mut server: GoatServer<u8> = GoatServer::new();
    for id in [1, 2] {
        for (at, switch) in (0..).zip(&mut switches) {
            switch.add_job(route(id, at, plan)).expect("within its limits");
        }
        server.add_job(server_job(id, plan)).expect("a plan");
    }
    let mut train = vec![0; 65536];
    let mut out = vec![0; fragment_packet_bytes::<PlannedDirections>(256)];
    let mut waiting = [0usize; 3];
    for (at, operation) in bytes.as_chunks::<OPERATION>().0.iter().enumerate() {
        let now = Instant(at as u64 * 500_000);
        let machine = usize::from(operation[0] & 3);
        let job = JobId(1 + u32::from(operation[0] >> 4 & 1));
        let length = packet(operation, plan, &mut out);
        if operation[0] & 224 == 224 {
            Key::new(0).seal(&mut out); // a stranger's
        }
        let from = if operation[0] & 4 != 0 { UP } else { operation[1] };
        let verdict = match machine {
            0 | 1 => switches[machine].handle_packet(now, from, &out[..length]),
            2 => server.handle_packet(now, from, &out[..length]),
            _ => {
                match operation[1] % 16 {
                    0 => switches[0].remove_job(job),
                    1 => switches[0].add_job(route(job.0, 0, plan)).expect("within its limits"),
                    2 => switches[1].abort_job(job, AbortReason::SwitchStopped),
                    3 => server.abort_job(job, AbortReason::SwitchStopped),
                    4 => {
                        plan = operation[2];
                        let again = server.go_on_with(job, Generation(0), &server_plan(plan, 255));
                        assert!(again.is_ok());
                    }
                    5 => {
                        let bad = server_plan(plan, operation[2] % 5);
                        assert!(server.go_on_with(job, Generation(0), &bad).is_err());
                    }
                    _ => {}
                }
                continue;
            }
        };
        COUNTED.fetch_add(u64::from(!matches!(verdict, Verdict::Drop(_))), Ordering::Relaxed);
        waiting[machine] += 1;
        for switch in &switches {
            assert!(switch.statistics().in_use <= AGGREGATORS);
        }
        if operation[0] & 8 != 0 {
            continue; // several packets before one drain
        }
        let sent = if machine < 2 {
            drain(&mut switches[machine], now, &mut train)
        } else {
            drain(&mut server, now, &mut train)
        };
        // Parameters and a request go to all children; an abort of the owner comes besides.
        let most = CHILDREN * 2 * (waiting[machine] + 2);
        assert!(sent <= most, "{sent} packets for {}", waiting[machine]);
        waiting[machine] = 0;
    }
    let inputs = INPUTS.fetch_add(1, Ordering::Relaxed);
    assert!(inputs < 10_000 || COUNTED.load(Ordering::Relaxed) > 1000, "no packet has an effect");
});
