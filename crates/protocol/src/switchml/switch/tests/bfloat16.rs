//! Slots of a job whose floats travel as bfloat16.

use super::*;

const CHUNK: usize = 2 * ELEMENTS;
const SUM_OF_FLOATS: Collective = Collective {
    sequence: 0,
    dtype: Dtype::Float32,
    op: Op::Sum,
    pattern: Pattern::AllReduce,
    elements: 1000,
    wire_dtype: WireDtype::Bfloat16,
};
const ONE: u16 = 0x3f80;
const NAN: u16 = 0x7fc0;
const INFINITY: u16 = 0x7f80;

fn config(workers: u8, slots: u16) -> JobConfig {
    JobConfig { wire_dtype: WireDtype::Bfloat16, ..super::config(workers, slots) }
}

/// A packet with `bits` as its first elements and zeros after them.
fn packet(kind: Kind, worker: u8, exchange: u32, exponent: i16, bits: &[u16]) -> Vec<u8> {
    let preamble = Preamble {
        kind,
        job: JobId(7),
        generation: Generation(0),
        worker: WorkerId(worker),
        shard: ShardId(0),
    };
    let header = SlotHeader {
        slot: SlotIndex(0),
        next_exponent: 0,
        exchange,
        chunk: exchange,
        collective: SUM_OF_FLOATS,
    };
    let mut packet = vec![0; chunk_packet_bytes(ELEMENTS, WireDtype::Bfloat16)];
    let length = SlotPacket::write(&mut packet, KEY, &preamble, &header, CHUNK, |payload| {
        let elements = begin_bfloat16_payload(payload, exponent);
        for (bits, element) in bits.iter().zip(elements.chunks_exact_mut(2)) {
            element.copy_from_slice(&bits.to_le_bytes());
        }
    });
    assert_eq!(length, packet.len());
    packet
}

fn contribute(switch: &mut Switch<u8>, worker: u8, exponent: i16, bits: &[u16]) -> Verdict {
    switch.handle_packet(Instant(0), worker, &packet(Kind::Update, worker, 0, exponent, bits))
}

/// Recipients, exponent and first four elements of each packet that the switch has to send, and the
/// payload as it is.
type Sent = (Vec<u8>, i16, [u16; 4], Vec<u8>);

fn sent(switch: &mut Switch<u8>) -> Vec<Sent> {
    let mut out = Vec::new();
    let mut train = vec![0; 65536];
    while let Some(Transmit { to, bytes, segment_bytes }) = switch.poll_transmit(Instant(0), &mut train) {
        let to = to.to_vec();
        for packet in train[..bytes].chunks(segment_bytes) {
            let preamble = Preamble::parse(packet).unwrap();
            let packet = SlotPacket::parse(&preamble, packet).unwrap();
            assert_eq!(packet.header.collective, SUM_OF_FLOATS);
            let (exponent, elements) = bfloat16_payload(packet.payload).unwrap();
            let first = |i: usize| u16::from_le_bytes([elements[2 * i], elements[2 * i + 1]]);
            out.push((to.clone(), exponent, [0, 1, 2, 3].map(first), packet.payload.to_vec()));
        }
    }
    out
}

#[test]
fn the_sum_is_rounded_once_whatever_the_order() {
    // 1 + 2^-8 + 2^-8: each addition of a bfloat16 accumulator would round the small ones away.
    let small = 0x3b80;
    let contributions = [[ONE, ONE, 0x8000, ONE], [small, 0xbf80, 0x8000, ONE], [small, 0, 0, ONE]];
    let mut payloads = Vec::new();
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        let mut switch = switch(config(3, 1));
        for worker in order {
            contribute(&mut switch, worker, 0, &contributions[usize::from(worker)]);
        }
        let results = sent(&mut switch);
        assert_eq!(results.len(), 1);
        let (to, exponent, first, payload) = results[0].clone();
        assert_eq!((to, exponent, first), (vec![0, 1, 2], 0, [0x3f81, 0, 0, 0x4040]));
        payloads.push(payload);
    }
    assert!(payloads.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn a_contribution_with_another_exponent_is_dropped_and_counted() {
    let mut switch = switch(config(2, 1));
    assert_eq!(contribute(&mut switch, 0, 1, &[ONE]), Verdict::Absorb);
    assert_eq!(contribute(&mut switch, 1, 2, &[ONE]), Verdict::Drop(Reason::Exponent));
    assert_eq!(switch.received().dropped[Reason::Exponent as usize], 1);
    assert_eq!(contribute(&mut switch, 1, 1, &[ONE]), Verdict::Multicast, "it left no trace");
    assert_eq!(sent(&mut switch)[0].2[0], 0x4000);
}

#[test]
fn a_lost_result_comes_again_as_the_very_same_bits() {
    let mut switch = switch(config(2, 1));
    contribute(&mut switch, 0, 0, &[0x3eab, 0x3dcd]);
    contribute(&mut switch, 1, 0, &[0x3e2b, 0x3e4d]);
    let first = sent(&mut switch).remove(0);
    assert_eq!(contribute(&mut switch, 1, 0, &[0x3e2b, 0x3e4d]), Verdict::ReplyUnicast);
    let again = sent(&mut switch).remove(0);
    assert_eq!((again.0, again.3), (vec![1], first.3));
}

#[test]
fn a_sum_handed_back_is_sent_on_as_the_very_same_bits() {
    for (exponent, bits) in [
        // Three times the exponent's 1, which no single contribution reaches; subnormals; the ends
        // of the range; classes.
        (0, [0x4040, 0xc040, 0x3eab, 0x0000]),
        (-126, [0x0101, 0x8001, 0x0000, 0x0080]),
        (128, [INFINITY, 0xff80, 0x7f7f, 0x7180]),
        (32766, [NAN, INFINITY, 0xff80, NAN]),
    ] {
        let mut switch = switch(JobConfig { resumed: true, ..config(3, 1) });
        let back = packet(Kind::Restore, 2, 41, exponent, &bits);
        assert_eq!(switch.handle_packet(Instant(0), 2, &back), Verdict::Multicast);
        let (_, exponent_sent, first, _) = sent(&mut switch).remove(0);
        assert_eq!((exponent_sent, first), (exponent, bits));
    }
}

#[test]
fn nan_and_infinity_are_summed_as_what_they_are() {
    let mut switch = switch(config(2, 1));
    contribute(&mut switch, 0, 32766, &[NAN, INFINITY, INFINITY, ONE]);
    contribute(&mut switch, 1, 32766, &[ONE, ONE, 0xff80, ONE]);
    assert_eq!(sent(&mut switch)[0].2, [NAN, INFINITY, NAN, NAN]);
}

#[test]
fn integers_travel_as_int32_in_half_the_chunk() {
    let mut switch = switch(config(2, 2));
    for (worker, verdict) in [(0, Verdict::Absorb), (1, Verdict::Multicast)] {
        let contribution = Contribution { worker, slot: 1, value: i32::MAX, ..Default::default() };
        assert_eq!(contribution.to(&mut switch), verdict);
    }
    // The neighbouring slot's sum is not touched by twice as many elements.
    contribute(&mut switch, 0, 0, &[ONE; CHUNK]);
    assert_eq!(super::sent(&mut switch), [(vec![0, 1], -2, 0)]);
    contribute(&mut switch, 1, 0, &[ONE; CHUNK]);
    let payload = sent(&mut switch).remove(0).3;
    let twice = u16::to_le_bytes(0x4000);
    assert!(payload[4..].chunks(2).all(|element| element == twice) && payload.len() == 4 + 2 * CHUNK);
}

#[test]
fn workers_that_disagree_on_the_wire_dtype_are_both_named() {
    let mut switch = switch(config(2, 1));
    contribute(&mut switch, 0, 0, &[ONE]);
    let with_exponents = Collective { wire_dtype: WireDtype::SharedExponent, ..SUM_OF_FLOATS };
    let unlike = Contribution { worker: 1, collective: with_exponents, ..Default::default() };
    assert_eq!(unlike.to(&mut switch), Verdict::Drop(Reason::Aborted));
    let reason = AbortReason::Mismatch { first: (Rank(0), SUM_OF_FLOATS), second: (Rank(1), with_exponents) };
    assert_eq!(switch.poll_event(), Some(JobAborted { job: JobId(7), reason }));
    assert_eq!(SUM_OF_FLOATS.to_string(), "sum of 1000 float32 sent as bfloat16 (all-reduce 0)");
    assert_eq!(with_exponents.to_string(), "sum of 1000 float32 sent with shared exponents (all-reduce 0)");
}

#[test]
fn a_job_of_shared_exponents_has_no_room_for_bfloat16() {
    let mut switch = switch(super::config(1, 1));
    assert_eq!(contribute(&mut switch, 0, 0, &[ONE]), Verdict::Drop(Reason::ChunkLength));
    let back = packet(Kind::Restore, 0, 0, 0, &[ONE]);
    let mut resumed = super::switch(JobConfig { resumed: true, ..super::config(1, 1) });
    assert_eq!(resumed.handle_packet(Instant(0), 0, &back), Verdict::Drop(Reason::ChunkLength));
}
