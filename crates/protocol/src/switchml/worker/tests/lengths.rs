//! Chunks of every length.

use fanin_wire::{CHUNK_ELEMENTS, chunk_packet_bytes};
use proptest::prelude::*;

use super::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn sums_are_exact_with_chunks_of_every_length(
        elements in prop::sample::select(CHUNK_ELEMENTS.to_vec()),
        wire_dtype in prop::sample::select(WireDtype::ALL.to_vec()),
        (workers, slots) in (1_u8..5, 1_u16..9),
        lengths in prop::collection::vec(0_usize..1500, 1..4),
        (mut dice, one_in) in (any::<u64>(), 8_u64..50),
    ) {
        // The numbers have five bits at most, and their sum has seven: exact in every wire dtype but
        // int4. There, numbers and sums are levels.
        let float = |w: usize, i: usize| match wire_dtype {
            WireDtype::Int4 => if w < 2 { (i % 4) as f32 } else { 0.0 },
            _ => (i % 29 + w) as f32,
        };
        let mut rack = Rack::with_chunks(workers, slots, elements, wire_dtype);
        for (w, worker) in rack.workers.iter_mut().enumerate() {
            for length in &lengths {
                let floats = (0..*length).map(|i| float(w, i)).collect();
                worker.submit(Numbers::Float(floats), Op::Sum);
                let integers = (0..*length as i32).map(|i| (i << 20) + w as i32).collect();
                worker.submit(Numbers::Int(integers), Op::Sum);
            }
        }
        let mut longest = 0;
        loop {
            rack.settle(|packet| {
                longest = longest.max(packet.len());
                // Knuth's generator.
                dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (dice >> 33).is_multiple_of(one_in)
            });
            if !rack.sleep() {
                break;
            }
        }
        prop_assert!(longest <= chunk_packet_bytes(elements, wire_dtype), "{longest} bytes");
        let (n, offset) = (usize::from(workers), (0..usize::from(workers)).sum::<usize>());
        for done in &rack.done {
            prop_assert_eq!(done.len(), 2 * lengths.len());
            for length in &lengths {
                let floats = (0..*length).map(|i| (0..n).map(|w| float(w, i)).sum()).collect();
                prop_assert!(done.contains(&Numbers::Float(floats)));
                let sum = |i: i32| (i << 20).wrapping_mul(n as i32) + offset as i32;
                prop_assert!(done.contains(&Numbers::Int((0..*length as i32).map(sum).collect())));
            }
        }
    }
}
