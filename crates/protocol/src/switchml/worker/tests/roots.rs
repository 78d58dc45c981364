//! Sums for one worker, and elements of one for all.

use fanin_wire::{Dtype, Op, Pattern, SLOT_HEADER_BYTES};

use super::*;

fn to(root: u8, op: Op) -> Operation {
    Operation { op, pattern: Pattern::Reduce(WorkerId(root)) }
}

fn from(root: u8) -> Operation {
    Operation { op: Op::Sum, pattern: Pattern::Broadcast(WorkerId(root)) }
}

#[test]
fn a_root_alone_gets_the_sum_and_the_others_keep_what_they_have() {
    for wire_dtype in [WireDtype::SharedExponent, WireDtype::Bfloat16, WireDtype::Native] {
        let mut rack = Rack::with_wire_dtype(3, 4, wire_dtype);
        for (w, worker) in rack.workers.iter_mut().enumerate() {
            worker.submit(Numbers::Float(vec![w as f32 + 1.0; 20 * ELEMENTS + 3]), to(1, Op::Average));
            worker.submit(Numbers::Short(vec![w as f32 + 1.0; 3]), to(2, Op::Sum));
            worker.submit(Numbers::Int(vec![w as i32 + 1; 3 * ELEMENTS]), to(0, Op::Sum));
            // The slots go on with everybody's sums.
            worker.submit(Numbers::Float(vec![1.0; 9]), Op::Sum);
        }
        rack.settle(|_| false);
        for (w, done) in rack.done.iter().enumerate() {
            let own = w as f32 + 1.0;
            let float = |root, sum| if w == root { sum } else { own };
            let expected = [
                Numbers::Float(vec![float(1, 2.0); 20 * ELEMENTS + 3]),
                Numbers::Short(vec![float(2, 6.0); 3]),
                Numbers::Int(vec![if w == 0 { 6 } else { w as i32 + 1 }; 3 * ELEMENTS]),
                Numbers::Float(vec![3.0; 9]),
            ];
            for expected in expected {
                assert!(done.contains(&expected), "{wire_dtype:?}: worker {w} has no {expected:?}");
            }
            assert_eq!(done.len(), 4);
        }
    }
}

#[test]
fn what_one_has_all_get_bit_by_bit() {
    let mut rack = Rack::new(3, 4);
    let bytes = |w: i8| (0..5 * 4 * ELEMENTS as i32 + 7).map(|i| (i as i8).wrapping_mul(w + 1)).collect();
    for (w, worker) in rack.workers.iter_mut().enumerate() {
        for root in [2, 0] {
            worker.submit(Numbers::Byte(bytes(w as i8)), from(root));
        }
    }
    rack.settle(|_| false);
    assert!(rack.done.iter().all(|done| *done == [Numbers::Byte(bytes(2)), Numbers::Byte(bytes(0))]));
}

#[test]
fn who_has_nothing_to_say_or_to_get_sends_and_gets_headers_alone() {
    let mut rack = Rack::new(2, 4);
    for worker in &mut rack.workers {
        worker.submit(Numbers::Int(vec![1; 4 * ELEMENTS]), to(1, Op::Sum));
        worker.submit(Numbers::Byte(vec![1; 4 * 4 * ELEMENTS]), from(1));
    }
    let mut headers = 0;
    rack.settle(|packet| {
        headers += usize::from(packet.len() == SLOT_HEADER_BYTES);
        false
    });
    // Results to worker 0 of the sum, and its contributions to what worker 1 says.
    assert_eq!(headers, 4 + 4);
}

#[test]
fn a_worker_whose_part_is_missing_is_named_by_what_it_lacks() {
    let mut rack = Rack::new(2, 1);
    let collective = Collective {
        sequence: 0,
        dtype: Dtype::Int8,
        op: Op::Sum,
        pattern: Pattern::Broadcast(WorkerId(1)),
        elements: 4,
        wire_dtype: WireDtype::Native,
    };
    let mut offer = |worker: u8, root: u8, elements: usize| {
        let collective = Collective { pattern: Pattern::Broadcast(WorkerId(root)), ..collective };
        let header = SlotHeader { slot: SlotIndex(0), next_exponent: 0, exchange: 0, chunk: 0, collective };
        let preamble = Preamble {
            kind: Kind::Update,
            job: JobId(1),
            generation: Generation(0),
            worker: WorkerId(worker),
            shard: ShardId(0),
        };
        let mut packet = vec![0; 2048];
        let bytes = SlotPacket::write(&mut packet, KEY, &preamble, &header, elements, |out| out.fill(7));
        rack.switch.handle_packet(Instant(0), worker.into(), &packet[..bytes])
    };
    assert_eq!(offer(0, 2, 0), Verdict::Drop(Reason::OutOfRange), "a root that is none of the job's");
    assert_eq!(offer(0, 1, 4 * ELEMENTS), Verdict::Drop(Reason::ChunkLength), "not its to say");
    assert_eq!(offer(1, 1, 0), Verdict::Drop(Reason::ChunkLength), "the root says nothing");
    assert_eq!(offer(0, 1, 0), Verdict::Absorb);
    assert_eq!(offer(1, 1, 4 * ELEMENTS), Verdict::Multicast);
}
