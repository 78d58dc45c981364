//! Any sequence of packets and commands at an ATP switch of each level and at a server: nothing
//! panics, answers stay bounded, and no aggregator is lost.
#![no_main]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fanin_protocol::atp::{
    AtpJobConfig, AtpServer, AtpSwitch, AtpSwitchConfig, Hashing, Overflow, Scaling, ServerJob, SwitchRoute,
};
use fanin_protocol::{Endpoint, Instant, Summer, Verdict};
use fanin_wire::{
    AbortReason, Collective, Directions, Dtype, Flags, Generation, GradientHeader, GradientPacket, JobId,
    Key, Kind, Op, Pattern, Preamble, ShardId, WireDtype, WorkerId, fragment_packet_bytes,
};
use libfuzzer_sys::fuzz_target;

const AGGREGATORS: u32 = 3;
const UP: u8 = 200;
const KEY: Key = Key::new(1);
/// Bytes of one operation.
const OPERATION: usize = 8;

/// Inputs, and packets that had an effect: a driver whose packets are all dropped would test
/// nothing.
static INPUTS: AtomicU64 = AtomicU64::new(0);
static COUNTED: AtomicU64 = AtomicU64::new(0);

/// Two racks of two workers, and one worker at the second level.
fn workers() -> Vec<Directions> {
    let mut workers: Vec<_> = [(0, 0), (0, 1), (1, 0), (1, 1)]
        .map(|(rack, bit)| Directions {
            level: 0,
            bitmaps: [1 << bit, 1 << rack, 0, 0],
            fan_in_degrees: [2, 3, 0, 0],
        })
        .to_vec();
    workers.push(Directions { level: 1, bitmaps: [0, 4, 0, 0], fan_in_degrees: [0, 3, 0, 0] });
    workers
}

fn config(id: u32) -> AtpJobConfig {
    AtpJobConfig {
        id: JobId(id),
        key: KEY,
        generation: Generation(0),
        workers: 5,
        elements: 64,
        window_max: 4,
        aggregators: AGGREGATORS,
        hashing: if id == 1 { Hashing::Hash } else { Hashing::Linear },
        scaling: if id == 1 { Scaling::Static } else { Scaling::Dynamic },
        overflow: Overflow::Reactive,
        congestion_control: true,
        wire_dtype: WireDtype::SharedExponent,
        originals_elements_max: 0,
    }
}

fn route(id: u32, level: u8) -> SwitchRoute<u8> {
    SwitchRoute { id: JobId(id), key: KEY, generation: Generation(0), workers: 5, upstream: UP, level }
}

/// A packet that the fuzzer chose: most fields are right, so that packets get far.
fn packet(operation: &[u8; OPERATION], level: u8, out: &mut [u8]) -> usize {
    let [choice, bitmaps, flags, sequence, index, exponents, value, kind] = *operation;
    let preamble = Preamble {
        kind: if kind == 255 { Kind::Abort } else { Kind::Gradient },
        job: JobId(1 + u32::from(choice >> 4 & 1)),
        generation: Generation(0),
        worker: WorkerId::ALL,
        shard: ShardId(0),
    };
    let bit = |set: u8| flags & set != 0;
    let header = GradientHeader {
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
        directions: Directions {
            level,
            bitmaps: [u32::from(bitmaps & 7), u32::from(bitmaps >> 3 & 7), u32::from(bitmaps >> 7), 0],
            fan_in_degrees: [2, if kind == 9 { 2 } else { 3 }, 0, 0],
        },
        sequence: if kind == 13 { u64::MAX - u64::from(sequence) } else { u64::from(sequence & 15) },
        aggregator_index: u32::from(index & 3),
        fragment: u32::from(sequence & 15) + u32::from(kind == 7),
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
    GradientPacket::write(out, KEY, &preamble, &header, elements, |payload| {
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
    let switch_config = AtpSwitchConfig {
        aggregators: AGGREGATORS,
        elements: 64,
        ways: 2,
        stale: Duration::from_nanos(3),
        ecn_threshold_packets: Some(2),
    };
    let mut switches = [AtpSwitch::new(switch_config), AtpSwitch::new(switch_config)];
    let mut server: AtpServer<u8> = AtpServer::new();
    for id in [1, 2] {
        for (level, switch) in (0..).zip(&mut switches) {
            switch.add_job(route(id, level)).expect("within its limits");
        }
        let job = ServerJob { config: config(id), workers: workers(), level: 2, restored: id == 2 };
        server.add_job(job).expect("a tree");
    }
    let mut train = vec![0; 65536];
    let mut out = vec![0; fragment_packet_bytes::<Directions>(256)];
    let mut waiting = [0usize; 3];
    for (at, operation) in bytes.as_chunks::<OPERATION>().0.iter().enumerate() {
        let now = Instant(at as u64 * 500_000);
        let machine = usize::from(operation[0] & 3);
        let job = JobId(1 + u32::from(operation[0] >> 4 & 1));
        let level = if operation[7] == 11 { operation[1] & 3 } else { machine.min(2) as u8 };
        let length = packet(operation, level, &mut out);
        if operation[0] & 224 == 224 {
            Key::new(0).seal(&mut out); // a stranger's
        }
        let from = if operation[0] & 4 != 0 { UP } else { operation[1] };
        let verdict = match machine {
            0 | 1 => switches[machine].handle_packet(now, from, &out[..length]),
            // A single child, most of the time.
            2 => server.handle_packet(now, from & 128, &out[..length]),
            _ => {
                match operation[1] % 16 {
                    0 => switches[0].remove_job(job),
                    1 => switches[0].add_job(route(job.0, operation[2] % 2)).expect("within its limits"),
                    2 => switches[1].abort_job(job, AbortReason::SwitchStopped),
                    3 => server.abort_job(job, AbortReason::SwitchStopped),
                    4 => {
                        let mut moved = workers();
                        moved.swap(0, usize::from(operation[2] % 5));
                        let again = server.set_up_again(job, Generation(0), &moved, 2);
                        assert!(again.is_ok());
                    }
                    5 => {
                        let mut bad = workers();
                        bad[1].bitmaps[0] = operation[2].into();
                        let _ = server.set_up_again(job, Generation(0), &bad, 2);
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
        // A switch sends a packet to 32 children at most, a server parameters and a request to all
        // of its children; an abort of the owner comes besides.
        let most = 32 * 2 * (waiting[machine] + 2);
        assert!(sent <= most, "{sent} packets for {}", waiting[machine]);
        waiting[machine] = 0;
    }
    let inputs = INPUTS.fetch_add(1, Ordering::Relaxed);
    assert!(inputs < 10_000 || COUNTED.load(Ordering::Relaxed) > 1000, "no packet has an effect");
});
