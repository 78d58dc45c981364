//! Slots of chunks that travel as they are.

use super::*;

/// Words of a payload.
const WORDS: usize = ELEMENTS;

fn collective(dtype: Dtype, op: Op) -> Collective {
    Collective {
        sequence: 0,
        dtype,
        op,
        pattern: Pattern::AllReduce,
        elements: 1000,
        wire_dtype: WireDtype::Native,
    }
}

/// A packet with `head` at the start of its payload and zeros after it.
fn packet(kind: Kind, worker: u8, exchange: u32, collective: Collective, head: &[u8]) -> Vec<u8> {
    let preamble = Preamble {
        kind,
        job: JobId(7),
        generation: Generation(0),
        worker: WorkerId(worker),
        shard: ShardId(0),
    };
    let header = SlotHeader { slot: SlotIndex(0), next_exponent: 5, exchange, chunk: exchange, collective };
    let mut packet = vec![0; packet_bytes(WORDS)];
    let elements = collective.chunk_elements(ELEMENTS);
    let length = SlotPacket::write(&mut packet, KEY, &preamble, &header, elements, |payload| {
        payload[..head.len()].copy_from_slice(head);
    });
    assert_eq!(length, packet.len());
    packet
}

fn floats(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// The payload of each packet that the switch has to send, and to whom it goes.
fn sent(switch: &mut Switch<u8>) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut out = Vec::new();
    let mut train = vec![0; 65536];
    while let Some(Transmit { to, bytes, segment_bytes }) = switch.poll_transmit(Instant(0), &mut train) {
        let to = to.to_vec();
        for packet in train[..bytes].chunks(segment_bytes) {
            let preamble = Preamble::parse(packet).unwrap();
            let packet = SlotPacket::parse(&preamble, packet).unwrap();
            assert_eq!(packet.header.next_exponent, 5);
            out.push((to.clone(), packet.payload.to_vec()));
        }
    }
    out
}

#[test]
fn floats_are_summed_in_the_order_of_the_ranks_whatever_comes_first_or_twice() {
    // In float64, too, an order decides: 2^60 takes 1 in and gives it back only where -2^60 comes
    // before.
    let contributions = [[1.0], [2f32.powi(60)], [-(2f32.powi(60))], [0.25]];
    let collective = collective(Dtype::Float32, Op::Sum);
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 2, 0, 3]] {
        let mut switch = switch(config(4, 1));
        for worker in order {
            let packet =
                packet(Kind::Update, worker, 0, collective, &floats(&contributions[usize::from(worker)]));
            let verdict = switch.handle_packet(Instant(0), worker, &packet);
            let last = worker == order[3];
            assert_eq!(verdict, if last { Verdict::Multicast } else { Verdict::Absorb });
            let again = if last { Verdict::ReplyUnicast } else { Verdict::Drop(Reason::Duplicate) };
            assert_eq!(switch.handle_packet(Instant(0), worker, &packet), again);
        }
        let results = sent(&mut switch);
        assert_eq!(results.len(), 2, "to all, and once more to who asked twice");
        for (_, payload) in results {
            assert_eq!(payload[..8], floats(&[0.25, 0.0])[..], "{order:?}");
        }
    }
}

#[test]
fn averages_are_divided_before_they_are_rounded() {
    type Row<'a> = (Dtype, &'a [&'a [u8]], &'a [u8]);
    let rows: [Row<'_>; 5] = [
        // 40,000 in float16, twice: the sum is out of range.
        (Dtype::Float16, &[&[0xe2, 0x78], &[0xe2, 0x78]], &[0xe2, 0x78]),
        (Dtype::Float64, &[&3f64.to_le_bytes(), &4f64.to_le_bytes()], &3.5f64.to_le_bytes()),
        // Integers wrap first: 300 is 44.
        (Dtype::Int64, &[&(-4i64).to_le_bytes(), &(-3i64).to_le_bytes()], &(-3i64).to_le_bytes()),
        (Dtype::Uint8, &[&[200, 7], &[100, 8]], &[22, 7]),
        (Dtype::Int8, &[&[253, 100], &[252, 27]], &[253, 63]),
    ];
    for (dtype, contributions, average) in rows {
        let mut switch = switch(config(2, 1));
        for (worker, contribution) in (0..).zip(contributions) {
            let packet = packet(Kind::Update, worker, 0, collective(dtype, Op::Average), contribution);
            switch.handle_packet(Instant(0), worker, &packet);
        }
        assert_eq!(sent(&mut switch)[0].1[..average.len()], *average, "{dtype:?}");
    }
}

#[test]
fn what_is_handed_back_takes_the_place_of_what_gathers() {
    let collective = collective(Dtype::Float32, Op::Sum);
    let mut switch = switch(JobConfig { resumed: true, ..config(3, 1) });
    let late = packet(Kind::Update, 2, 41, collective, &floats(&[7.0]));
    assert_eq!(switch.handle_packet(Instant(0), 2, &late), Verdict::Absorb);
    let back = packet(Kind::Restore, 0, 41, collective, &floats(&[-0.0, f32::INFINITY]));
    assert_eq!(switch.handle_packet(Instant(0), 0, &back), Verdict::Multicast);
    assert_eq!(sent(&mut switch)[0].1[..8], floats(&[-0.0, f32::INFINITY])[..]);
    // The next exchange finds no trace of what had gathered.
    for worker in 0..3 {
        let next = packet(Kind::Update, worker, 42, collective, &floats(&[f32::from(worker)]));
        switch.handle_packet(Instant(0), worker, &next);
    }
    assert_eq!(sent(&mut switch)[0].1[..4], floats(&[3.0])[..]);
}

#[test]
fn a_packet_without_elements_of_such_a_tensor_harms_nobody() {
    let mut switch = switch(config(1, 1));
    for dtype in [Dtype::Float32, Dtype::Int64] {
        let mut empty = packet(Kind::Update, 0, 0, collective(dtype, Op::Average), &[]);
        empty.truncate(fanin_wire::SLOT_HEADER_BYTES);
        switch.handle_packet(Instant(0), 0, &empty);
    }
    assert_eq!(sent(&mut switch)[0].1, []);
}
