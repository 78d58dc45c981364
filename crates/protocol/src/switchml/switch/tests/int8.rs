//! Slots of a job whose floats travel as int8.

use super::*;
use crate::switchml::{Contributions, Upstream};

/// Seven groups of four blocks.
const CHUNK: usize = 896;
const MEAN: Collective = Collective {
    sequence: 3,
    dtype: Dtype::Float32,
    op: Op::Average,
    pattern: Pattern::AllReduce,
    elements: 10_000,
    wire_dtype: WireDtype::Int8,
};

fn config(workers: u8, slots: u16) -> JobConfig {
    JobConfig { wire_dtype: WireDtype::Int8, ..super::config(workers, slots) }
}

fn packet(kind: Kind, worker: u8, (exchange, chunk): (u32, u32), payload: &[u8]) -> Vec<u8> {
    let (job, generation) = (JobId(7), Generation(0));
    let preamble = Preamble { kind, job, generation, worker: WorkerId(worker), shard: ShardId(0) };
    let slot = SlotIndex(0);
    let header = SlotHeader { slot, next_exponent: 0, exchange, chunk, collective: MEAN };
    let mut packet = vec![0; SLOT_HEADER_BYTES + payload.len()];
    SlotPacket::write(&mut packet, KEY, &preamble, &header, CHUNK, |to| to.copy_from_slice(payload));
    packet
}

/// Thirds, which no sum of powers of two is.
fn contribution(worker: u8) -> Vec<u8> {
    let values: Vec<f32> = (0..CHUNK).map(|i| (i % 50) as f32 / 3.0 - f32::from(worker)).collect();
    let mut payload = vec![0; MEAN.payload_bytes(CHUNK)];
    fanin_quant::pack_f32(&values, worker.into(), &mut payload);
    payload
}

fn contribute(switch: &mut Switch<u8>, worker: u8, at: (u32, u32)) -> Verdict {
    switch.handle_packet(Instant(0), worker, &packet(Kind::Update, worker, at, &contribution(worker)))
}

/// To whom a switch sends, as what, and the payload.
fn sent(switch: &mut Switch<u8>) -> Vec<(Vec<u8>, Kind, Vec<u8>)> {
    let mut out = Vec::new();
    let mut train = vec![0; 65536];
    while let Some(Transmit { to, bytes, segment_bytes }) = switch.poll_transmit(Instant(0), &mut train) {
        let to = to.to_vec();
        for packet in train[..bytes].chunks(segment_bytes) {
            let preamble = Preamble::parse(packet).unwrap();
            let packet = SlotPacket::parse(&preamble, packet).unwrap();
            assert_eq!(packet.header.collective, MEAN);
            out.push((to.clone(), packet.preamble.kind, packet.payload.to_vec()));
        }
    }
    out
}

fn values(payload: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; CHUNK];
    fanin_quant::unpack_f32(payload, &mut values);
    values
}

/// The mean of the first three workers' contributions to a chunk, in any order.
fn mean(order: [u8; 3], chunk: u32) -> Vec<u8> {
    let mut switch = switch(config(3, 1));
    for worker in order {
        contribute(&mut switch, worker, (0, chunk));
    }
    sent(&mut switch).remove(0).2
}

#[test]
fn the_sum_is_divided_and_rounded_once_whatever_the_order() {
    let payload = mean([0, 1, 2], 0);
    for order in [[2, 1, 0], [1, 2, 0]] {
        assert_eq!(mean(order, 0), payload);
    }
    let parts = [0, 1, 2].map(|worker| values(&contribution(worker)));
    for (i, value) in values(&payload).into_iter().enumerate() {
        let exact = (parts[0][i] + parts[1][i] + parts[2][i]) / 3.0;
        // The magnitude is below 16, so that a step is at most an eighth.
        assert!((value - exact).abs() < 0.125, "{i}: {value} of {exact}");
    }
}

#[test]
fn another_chunk_of_like_numbers_is_rounded_by_another_chance() {
    assert_ne!(mean([0, 1, 2], 0), mean([0, 1, 2], 1));
}

#[test]
fn a_lost_result_comes_again_as_the_very_same_bits() {
    let mut switch = switch(config(2, 1));
    contribute(&mut switch, 0, (0, 0));
    contribute(&mut switch, 1, (0, 0));
    let first = sent(&mut switch).remove(0);
    assert_eq!(contribute(&mut switch, 1, (0, 0)), Verdict::ReplyUnicast);
    assert_eq!(sent(&mut switch), [(vec![1], Kind::Result, first.2)]);
}

#[test]
fn a_sum_handed_back_is_sent_on_as_the_very_same_bits() {
    let mut switch = switch(JobConfig { resumed: true, ..config(3, 1) });
    let sum: Vec<u8> = (0..MEAN.payload_bytes(CHUNK)).map(|i| i as u8).collect();
    let back = packet(Kind::Restore, 2, (41, 41), &sum);
    assert_eq!(switch.handle_packet(Instant(0), 2, &back), Verdict::Multicast);
    assert_eq!(sent(&mut switch), [(vec![2], Kind::Result, sum)]);
}

#[test]
fn a_racks_sum_is_rounded_to_int8_too_and_not_divided() {
    const ROOT: u8 = 9;
    let rack = |place| {
        let upstream = Upstream { address: ROOT, place: WorkerId(place) };
        let ranks = [2 * u16::from(place), 2 * u16::from(place) + 1].map(Rank).to_vec();
        let contributions = Contributions { ranks, racks: 0 };
        let mut switch = Switch::new(ShardId(0));
        let config = config(4, 1);
        switch.add_job(SwitchJob { config, contributions, upstream: Some(upstream) }).unwrap();
        contribute(&mut switch, 0, (0, 0));
        contribute(&mut switch, 1, (0, 0));
        let (to, kind, payload) = sent(&mut switch).remove(0);
        assert_eq!((to, kind), (vec![ROOT], Kind::Update));
        payload
    };
    let parts = [0, 1].map(|worker| values(&contribution(worker)));
    let sums = [rack(0), rack(1)];
    for (i, value) in values(&sums[0]).into_iter().enumerate() {
        // The magnitude is at most 32.
        assert!((value - parts[0][i] - parts[1][i]).abs() < 0.5, "{i}: {value}");
    }
    assert_ne!(sums[0], sums[1], "each rack has chances of its own");
}

#[test]
fn integers_and_short_tensors_travel_as_in_any_job() {
    let mut switch = switch(config(2, 2));
    for (worker, verdict) in [(0, Verdict::Absorb), (1, Verdict::Multicast)] {
        let contribution = Contribution { worker, slot: 1, value: i32::MAX, ..Default::default() };
        assert_eq!(contribution.to(&mut switch), verdict);
    }
    assert_eq!(super::sent(&mut switch), [(vec![0, 1], -2, 0)]);
    contribute(&mut switch, 0, (0, 0));
    assert_eq!(contribute(&mut switch, 1, (0, 0)), Verdict::Multicast);
}

#[test]
fn workers_that_disagree_on_the_wire_dtype_are_both_named() {
    let mut switch = switch(config(2, 1));
    contribute(&mut switch, 0, (0, 0));
    let with_exponents = Collective { wire_dtype: WireDtype::SharedExponent, ..MEAN };
    let unlike = Contribution { worker: 1, collective: with_exponents, ..Default::default() };
    assert_eq!(unlike.to(&mut switch), Verdict::Drop(Reason::Aborted));
    let reason = AbortReason::Mismatch { first: (Rank(0), MEAN), second: (Rank(1), with_exponents) };
    assert_eq!(switch.poll_event(), Some(JobAborted { job: JobId(7), reason }));
    assert_eq!(MEAN.to_string(), "average of 10000 float32 sent as int8 (all-reduce 3)");
}

#[test]
fn another_job_has_no_room_for_int8() {
    for wire_dtype in [WireDtype::SharedExponent, WireDtype::Bfloat16, WireDtype::Native] {
        let mut switch = switch(JobConfig { wire_dtype, ..config(1, 1) });
        assert_eq!(contribute(&mut switch, 0, (0, 0)), Verdict::Drop(Reason::ChunkLength));
    }
}
