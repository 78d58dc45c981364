//! Workers whose floats travel as bfloat16.

use super::*;

const CHUNK: usize = 2 * ELEMENTS;

fn rack(workers: u8, slots: u16) -> Rack {
    Rack::with_wire_dtype(workers, slots, WireDtype::Bfloat16)
}

fn floats(length: usize, worker: usize) -> Vec<f32> {
    // Integers of seven bits, whose sums over three have eight at most: exact.
    (0..length).map(|i| (i % 43) as f32 + worker as f32).collect()
}

#[test]
fn tensors_of_any_type_form_one_stream_and_integers_stay_exact() {
    let mut rack = rack(3, 4);
    let lengths = [1, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK * 4 * 3 + 17];
    for (w, worker) in rack.workers.iter_mut().enumerate() {
        for length in lengths {
            worker.submit(Numbers::Float(floats(length, w)), Op::Sum);
            let integers = (0..length as i32).map(|i| (i << 20) + w as i32).collect();
            worker.submit(Numbers::Int(integers), Op::Sum);
        }
    }
    rack.settle(|_| false);
    for done in &mut rack.done {
        done.sort_by_key(|tensor| match tensor {
            Numbers::Int(x) => (x.len(), 1),
            Numbers::Float(x) => (x.len(), 0),
            _ => unreachable!(),
        });
        for (i, length) in lengths.into_iter().enumerate() {
            let sums = (0..length).map(|i| 3.0 * (i % 43) as f32 + 3.0).collect();
            assert_eq!(done[2 * i], Numbers::Float(sums));
            let sums = (0..length as i32).map(|i| (i << 20).wrapping_mul(3) + 3).collect();
            assert_eq!(done[2 * i + 1], Numbers::Int(sums));
        }
    }
}

#[test]
fn a_packet_carries_twice_the_elements_in_four_bytes_more() {
    let mut rack = rack(1, 8);
    rack.workers[0].submit(Numbers::Float(vec![1.0; 8 * CHUNK]), Op::Sum);
    let mut lengths = Vec::new();
    rack.settle(|packet| {
        lengths.push(packet.len());
        false
    });
    // Eight probes and their answers, then the whole tensor and its sum.
    let full = fanin_wire::SLOT_HEADER_BYTES + 4 + 4 * ELEMENTS;
    assert_eq!(lengths.iter().filter(|length| **length == full).count(), 16);
    assert_eq!(lengths.len(), 32);
}

#[test]
fn each_type_is_rounded_and_averaged_as_stated() {
    let mut rack = rack(3, 2);
    for (w, worker) in rack.workers.iter_mut().enumerate() {
        let w16 = [0x3c00, 0x4000, 0x4200][w]; // 1, 2, 3
        let wb16 = [0x3f80, 0x4000, 0x4040][w];
        worker.submit(Numbers::Float(vec![w as f32 + 1.0; 5]), Op::Average);
        worker.submit(Numbers::Half(vec![w16; 5]), Op::Average);
        worker.submit(Numbers::Bfloat(vec![wb16; 5]), Op::Sum);
        // 1 + 2^-9 rounds to 1 on its way, and a third of 3 is 1 again.
        worker.submit(Numbers::Float(vec![1.0 + 2f32.powi(-9); 5]), Op::Average);
        worker.submit(Numbers::Float(vec![[1.0, 0.0, 0.0][w]; 5]), Op::Average);
    }
    rack.settle(|_| false);
    for done in &rack.done {
        assert_eq!(done[0], Numbers::Float(vec![2.0; 5]));
        assert_eq!(done[1], Numbers::Half(vec![0x4000; 5]));
        assert_eq!(done[2], Numbers::Bfloat(vec![0x40c0; 5]));
        assert_eq!(done[3], Numbers::Float(vec![1.0; 5]));
        assert_eq!(done[4], Numbers::Float(vec![1.0 / 3.0; 5]), "divided in float32");
    }
}

#[test]
fn what_is_lost_is_sent_again() {
    let mut rack = rack(2, 8);
    for worker in &mut rack.workers {
        worker.submit(Numbers::Float(floats(20 * CHUNK, 1)), Op::Sum);
    }
    let mut count = 0;
    rack.settle(|_| {
        count += 1;
        count % 7 == 0
    });
    while rack.sleep() {
        rack.settle(|_| false);
    }
    let expected = Numbers::Float((0..20 * CHUNK).map(|i| 2.0 * (i % 43) as f32 + 2.0).collect());
    assert!(rack.done.iter().all(|done| *done == [expected.clone()]));
    assert!(rack.workers[0].statistics().retransmissions > 0);
}

#[test]
fn a_result_with_another_exponent_is_not_believed() {
    let mut rack = rack(1, 1);
    rack.workers[0].submit(Numbers::Float(vec![3.0; 5]), Op::Sum);
    let mut train = vec![0; 65536];
    let mut turn = |rack: &mut Rack| {
        let bytes = rack.workers[0].poll_transmit(rack.now, &mut train).unwrap().bytes;
        rack.switch.handle_packet(rack.now, 0, &train[..bytes]);
        let bytes = rack.switch.poll_transmit(rack.now, &mut train).unwrap().bytes;
        train[..bytes].to_vec()
    };
    let probe = turn(&mut rack);
    assert_eq!(rack.workers[0].handle_packet(rack.now, (), &probe), Verdict::Absorb);
    let good = turn(&mut rack);
    let mut bad = good.clone();
    bad[fanin_wire::SLOT_HEADER_BYTES] ^= 1;
    let worker = &mut rack.workers[0];
    assert_eq!(worker.handle_packet(rack.now, (), &bad), Verdict::Drop(Reason::Exponent));
    assert_eq!(worker.handle_packet(rack.now, (), &good), Verdict::Absorb);
}

#[test]
fn after_the_switch_lost_its_memory_all_workers_have_the_same_bits() {
    // Thirds have no end in binary: everything is rounded.
    let tensor = |w: usize| Numbers::Float((0..6 * CHUNK).map(|i| (i + w) as f32 / 3.0).collect());
    let expected = {
        let mut rack = rack(3, 2);
        for w in 0..3 {
            rack.workers[w].submit(tensor(w), Op::Sum);
        }
        rack.settle(|_| false);
        rack.done[0].clone()
    };
    let mut rack = rack(3, 2);
    for w in 0..3 {
        rack.workers[w].submit(tensor(w), Op::Sum);
    }
    // Worker 2 hears the answers to the probes, and no sum: it falls one exchange behind.
    rack.exchange(3, fanin_wire::SLOT_HEADER_BYTES);
    rack.exchange(2, fanin_wire::chunk_packet_bytes(ELEMENTS, WireDtype::Bfloat16));
    let completed: Vec<_> = rack.workers.iter_mut().map(Worker::suspend).collect();
    assert_eq!(completed, [[2, 2], [2, 2], [1, 1]]);
    let config = rack.forget();
    rack.resume(config, [vec![SlotIndex(0)], vec![SlotIndex(1)], vec![]]);
    rack.finish();
    assert!(rack.done.iter().all(|done| *done == expected));
}
