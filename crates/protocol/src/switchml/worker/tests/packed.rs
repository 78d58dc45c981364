//! Workers whose floats travel as int8 or int4.

use super::*;

const PACKED: [WireDtype; 2] = [WireDtype::Int8, WireDtype::Int4];
const BLOCK: usize = 32;

/// Whole groups of four blocks: 7, or 15.
fn chunk_of(wire_dtype: WireDtype) -> usize {
    wire_dtype.chunk_elements(ELEMENTS, fanin_wire::Dtype::Float32)
}

fn packet_of(wire_dtype: WireDtype) -> usize {
    fanin_wire::SLOT_HEADER_BYTES + wire_dtype.payload_bytes(chunk_of(wire_dtype), fanin_wire::Dtype::Float32)
}

/// The magnitudes differ from block to block, and are never a sum of few powers of two.
fn gradient(length: usize, worker: usize) -> Vec<f32> {
    let size = |i: usize| 10f32.powi((i / BLOCK % 7) as i32 - 3);
    (0..length).map(|i| ((i * 37 + worker * 11) % 101) as f32 / 3.0 * size(i) - size(i)).collect()
}

fn submit(rack: &mut Rack, op: Op, tensor: impl Fn(usize) -> Numbers) {
    for (w, worker) in rack.workers.iter_mut().enumerate() {
        worker.submit(tensor(w), op);
    }
}

#[test]
fn a_sum_is_off_by_less_than_the_steps_and_the_same_bits_everywhere() {
    for wire_dtype in PACKED {
        const WORKERS: usize = 3;
        let mut rack = Rack::with_wire_dtype(WORKERS as u8, 4, wire_dtype);
        let lengths = [
            1,
            chunk_of(wire_dtype) - 1,
            chunk_of(wire_dtype),
            chunk_of(wire_dtype) + 1,
            chunk_of(wire_dtype) * 4 * 3 + 17,
        ];
        for length in lengths {
            submit(&mut rack, Op::Average, |w| Numbers::Float(gradient(length, w)));
            submit(&mut rack, Op::Sum, |w| {
                Numbers::Int((0..length as i32).map(|i| (i << 20) + w as i32).collect())
            });
        }
        rack.settle(|_| false);
        assert_eq!(rack.probes, 0, "there is no exponent to agree on");
        for done in &mut rack.done {
            done.sort_by_key(|tensor| match tensor {
                Numbers::Int(x) => (x.len(), 1),
                Numbers::Float(x) => (x.len(), 0),
                _ => unreachable!(),
            });
            for (i, length) in lengths.into_iter().enumerate() {
                let Numbers::Float(means) = &done[2 * i] else { panic!() };
                let parts: Vec<_> = (0..WORKERS).map(|w| gradient(length, w)).collect();
                for begin in (0..length).step_by(BLOCK) {
                    let range = begin..(begin + BLOCK).min(length);
                    let magnitude = |part: &[f32]| part.iter().fold(0.0f32, |max, x| max.max(x.abs()));
                    let sizes: f32 = parts.iter().map(|part| magnitude(&part[range.clone()])).sum();
                    // The error of each contribution, and of the mean, whose magnitude is at most the
                    // mean of theirs and their errors.
                    let part = if wire_dtype == WireDtype::Int8 { 63.5 } else { 2.0 };
                    let bound = (sizes / part + (sizes + sizes / part) / part) / WORKERS as f32;
                    for i in range {
                        let exact: f32 = parts.iter().map(|part| part[i]).sum::<f32>() / WORKERS as f32;
                        assert!((means[i] - exact).abs() < bound, "{i}: {} of {exact}", means[i]);
                    }
                }
                let sums = (0..length as i32).map(|i| (i << 20).wrapping_mul(3) + 3).collect();
                assert_eq!(done[2 * i + 1], Numbers::Int(sums));
            }
        }
        assert!(rack.done.iter().all(|done| *done == rack.done[0]));
    }
}

#[test]
fn a_packet_carries_whole_groups_and_there_are_no_others() {
    for wire_dtype in PACKED {
        let mut rack = Rack::with_wire_dtype(1, 8, wire_dtype);
        rack.workers[0].submit(Numbers::Float(vec![1.0; 8 * chunk_of(wire_dtype)]), Op::Sum);
        let mut lengths = Vec::new();
        rack.settle(|packet| {
            lengths.push(packet.len());
            false
        });
        assert_eq!(lengths, [packet_of(wire_dtype); 16]);
    }
}

#[test]
fn what_can_be_represented_arrives_unchanged() {
    for wire_dtype in PACKED {
        let mut rack = Rack::with_wire_dtype(2, 2, wire_dtype);
        // As int4 a sum of 3 is the largest that has steps of 1 below it, whatever else is there.
        let different = if wire_dtype == WireDtype::Int8 { 60 } else { 2 };
        let integers = |w: usize| (0..5000).map(|i| (i % different) as f32 + w as f32).collect::<Vec<_>>();
        submit(&mut rack, Op::Sum, |w| Numbers::Float(integers(w)));
        submit(&mut rack, Op::Average, |w| Numbers::Half(vec![[0x3c00, 0x4200][w]; 50])); // 1 and 3
        submit(&mut rack, Op::Sum, |w| Numbers::Bfloat(vec![[0x3f80, 0x4040][w]; 50]));
        rack.settle(|_| false);
        for done in &rack.done {
            let sums = (0..5000).map(|i| 2.0 * (i % different) as f32 + 1.0).collect();
            let expected =
                [Numbers::Float(sums), Numbers::Half(vec![0x4000; 50]), Numbers::Bfloat(vec![0x4080; 50])];
            assert!(expected.iter().all(|tensor| done.contains(tensor)) && done.len() == 3, "{done:?}");
        }
    }
}

#[test]
fn each_worker_and_each_tensor_is_rounded_by_chances_of_its_own() {
    for wire_dtype in PACKED {
        // Half way between two steps, beside what makes the step 1.
        let most = if wire_dtype == WireDtype::Int8 { 127.0 } else { 12.0 };
        let x = || {
            (0..chunk_of(wire_dtype)).map(|i| if i % BLOCK == 0 { most } else { 0.5 }).collect::<Vec<f32>>()
        };
        let mut rack = Rack::with_wire_dtype(2, 1, wire_dtype);
        let mut payloads = Vec::new();
        for _ in 0..2 {
            submit(&mut rack, Op::Sum, |_| Numbers::Float(x()));
        }
        rack.settle(|packet| {
            if fanin_wire::Preamble::parse(packet).unwrap().kind == Kind::Update {
                payloads.push(packet[fanin_wire::SLOT_HEADER_BYTES..].to_vec());
            }
            false
        });
        assert_eq!(payloads.len(), 4);
        for (i, payload) in payloads.iter().enumerate() {
            assert!(!payloads[..i].contains(payload), "{i}");
        }
    }
}

#[test]
fn what_is_lost_is_sent_again_as_the_same_bits() {
    for wire_dtype in PACKED {
        let run = |lost_of: usize| {
            let mut rack = Rack::with_wire_dtype(2, 8, wire_dtype);
            submit(&mut rack, Op::Average, |w| Numbers::Float(gradient(20 * chunk_of(wire_dtype), w)));
            let mut count = 0;
            let mut lost = |_: &[u8]| {
                count += 1;
                count % lost_of == 0
            };
            rack.settle(&mut lost);
            while rack.sleep() {
                rack.settle(&mut lost);
            }
            let sent_again = rack.workers[0].statistics().retransmissions;
            assert!(rack.done.iter().all(|done| *done == rack.done[0] && done.len() == 1));
            (rack.done.remove(0), sent_again)
        };
        let (expected, sent_again) = run(usize::MAX);
        assert_eq!(sent_again, 0);
        for lost_of in [3, 5, 7] {
            let (done, sent_again) = run(lost_of);
            assert!(sent_again > 0);
            assert!(done == expected, "one in {lost_of} lost");
        }
    }
}

#[test]
fn after_the_switch_lost_its_memory_all_workers_have_the_same_bits() {
    for wire_dtype in PACKED {
        let tensor = |w| Numbers::Float(gradient(6 * chunk_of(wire_dtype), w));
        let expected = {
            let mut rack = Rack::with_wire_dtype(3, 2, wire_dtype);
            submit(&mut rack, Op::Sum, tensor);
            rack.settle(|_| false);
            rack.done[0].clone()
        };
        let mut rack = Rack::with_wire_dtype(3, 2, wire_dtype);
        submit(&mut rack, Op::Sum, tensor);
        // Worker 2 hears no sum: it falls one exchange behind.
        rack.exchange(2, packet_of(wire_dtype));
        let completed: Vec<_> = rack.workers.iter_mut().map(Worker::suspend).collect();
        assert_eq!(completed, [[1, 1], [1, 1], [0, 0]]);
        let config = rack.forget();
        rack.resume(config, [vec![SlotIndex(0)], vec![SlotIndex(1)], vec![]]);
        rack.finish();
        assert!(rack.done.iter().all(|done| *done == expected));
    }
}
