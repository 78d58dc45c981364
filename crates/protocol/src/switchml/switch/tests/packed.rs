//! Slots of a job whose floats travel as int8 or int4.

use super::*;
use crate::machine::packing;
use crate::switchml::{Contributions, Upstream};

const PACKED: [WireDtype; 2] = [WireDtype::Int8, WireDtype::Int4];

const fn mean_of(wire_dtype: WireDtype) -> Collective {
    Collective {
        sequence: 3,
        dtype: Dtype::Float32,
        op: Op::Average,
        pattern: Pattern::AllReduce,
        elements: 10_000,
        wire_dtype,
    }
}

fn config(wire_dtype: WireDtype, workers: u8, slots: u16) -> JobConfig {
    JobConfig { wire_dtype, ..super::config(workers, slots) }
}

/// Whole groups of four blocks: 7, or 15.
fn chunk_of(wire_dtype: WireDtype) -> usize {
    mean_of(wire_dtype).chunk_elements(config(wire_dtype, 1, 1).elements.into())
}

fn packet(
    wire_dtype: WireDtype,
    kind: Kind,
    worker: u8,
    (exchange, chunk): (u32, u32),
    payload: &[u8],
) -> Vec<u8> {
    let (job, generation) = (JobId(7), Generation(0));
    let preamble = Preamble { kind, job, generation, worker: WorkerId(worker), shard: ShardId(0) };
    let slot = SlotIndex(0);
    let header = SlotHeader { slot, next_exponent: 0, exchange, chunk, collective: mean_of(wire_dtype) };
    let mut packet = vec![0; SLOT_HEADER_BYTES + payload.len()];
    SlotPacket::write(&mut packet, KEY, &preamble, &header, chunk_of(wire_dtype), |to| {
        to.copy_from_slice(payload)
    });
    packet
}

/// Thirds, which no sum of powers of two is.
fn contribution(wire_dtype: WireDtype, worker: u8) -> Vec<u8> {
    let chunk = chunk_of(wire_dtype);
    let values: Vec<f32> = (0..chunk).map(|i| (i % 50) as f32 / 3.0 - f32::from(worker)).collect();
    let mut payload = vec![0; mean_of(wire_dtype).payload_bytes(chunk)];
    fanin_quant::pack_f32(packing(wire_dtype), &values, worker.into(), &mut payload);
    payload
}

fn contribute(wire_dtype: WireDtype, switch: &mut Switch<u8>, worker: u8, at: (u32, u32)) -> Verdict {
    let payload = contribution(wire_dtype, worker);
    switch.handle_packet(Instant(0), worker, &packet(wire_dtype, Kind::Update, worker, at, &payload))
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
            let collective = packet.header.collective;
            assert_eq!(collective, mean_of(collective.wire_dtype));
            out.push((to.clone(), packet.preamble.kind, packet.payload.to_vec()));
        }
    }
    out
}

fn values(wire_dtype: WireDtype, payload: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; chunk_of(wire_dtype)];
    fanin_quant::unpack_f32(packing(wire_dtype), payload, &mut values);
    values
}

/// The mean of the first three workers' contributions to a chunk, in any order.
fn mean(wire_dtype: WireDtype, order: [u8; 3], chunk: u32) -> Vec<u8> {
    let mut switch = switch(config(wire_dtype, 3, 1));
    for worker in order {
        contribute(wire_dtype, &mut switch, worker, (0, chunk));
    }
    sent(&mut switch).remove(0).2
}

#[test]
fn the_sum_is_divided_and_rounded_once_whatever_the_order() {
    for wire_dtype in PACKED {
        let payload = mean(wire_dtype, [0, 1, 2], 0);
        for order in [[2, 1, 0], [1, 2, 0]] {
            assert_eq!(mean(wire_dtype, order, 0), payload);
        }
        let parts = [0, 1, 2].map(|worker| values(wire_dtype, &contribution(wire_dtype, worker)));
        for (i, value) in values(wire_dtype, &payload).into_iter().enumerate() {
            let exact = (parts[0][i] + parts[1][i] + parts[2][i]) / 3.0;
            // The magnitude is below 16, so that a step is at most an eighth; or 2, and then some are
            // rounded to multiples of 4 steps.
            let most = if wire_dtype == WireDtype::Int8 { 0.125 } else { 8.0 };
            assert!((value - exact).abs() < most, "{i}: {value} of {exact}");
        }
    }
}

#[test]
fn another_chunk_of_like_numbers_is_rounded_by_another_chance() {
    for wire_dtype in PACKED {
        assert_ne!(mean(wire_dtype, [0, 1, 2], 0), mean(wire_dtype, [0, 1, 2], 1));
    }
}

#[test]
fn a_lost_result_comes_again_as_the_very_same_bits() {
    for wire_dtype in PACKED {
        let mut switch = switch(config(wire_dtype, 2, 1));
        contribute(wire_dtype, &mut switch, 0, (0, 0));
        contribute(wire_dtype, &mut switch, 1, (0, 0));
        let first = sent(&mut switch).remove(0);
        assert_eq!(contribute(wire_dtype, &mut switch, 1, (0, 0)), Verdict::ReplyUnicast);
        assert_eq!(sent(&mut switch), [(vec![1], Kind::Result, first.2)]);
    }
}

#[test]
fn a_sum_handed_back_is_sent_on_as_the_very_same_bits() {
    for wire_dtype in PACKED {
        let mut switch = switch(JobConfig { resumed: true, ..config(wire_dtype, 3, 1) });
        let sum: Vec<u8> =
            (0..mean_of(wire_dtype).payload_bytes(chunk_of(wire_dtype))).map(|i| i as u8).collect();
        let back = packet(wire_dtype, Kind::Restore, 2, (41, 41), &sum);
        assert_eq!(switch.handle_packet(Instant(0), 2, &back), Verdict::Multicast);
        assert_eq!(sent(&mut switch), [(vec![2], Kind::Result, sum)]);
    }
}

#[test]
fn a_racks_sum_is_rounded_too_and_not_divided() {
    for wire_dtype in PACKED {
        const ROOT: u8 = 9;
        let rack = |place| {
            let upstream = Upstream { address: ROOT, place: WorkerId(place) };
            let ranks = [2 * u16::from(place), 2 * u16::from(place) + 1].map(Rank).to_vec();
            let contributions = Contributions { ranks, racks: 0 };
            let mut switch = Switch::new(ShardId(0));
            let config = config(wire_dtype, 4, 1);
            switch.add_job(SwitchJob { config, contributions, upstream: Some(upstream) }).unwrap();
            contribute(wire_dtype, &mut switch, 0, (0, 0));
            contribute(wire_dtype, &mut switch, 1, (0, 0));
            let (to, kind, payload) = sent(&mut switch).remove(0);
            assert_eq!((to, kind), (vec![ROOT], Kind::Update));
            payload
        };
        let parts = [0, 1].map(|worker| values(wire_dtype, &contribution(wire_dtype, worker)));
        let sums = [rack(0), rack(1)];
        for (i, value) in values(wire_dtype, &sums[0]).into_iter().enumerate() {
            // The magnitude is at most 32.
            let most = if wire_dtype == WireDtype::Int8 { 0.5 } else { 16.0 };
            assert!((value - parts[0][i] - parts[1][i]).abs() < most, "{i}: {value}");
        }
        assert_ne!(sums[0], sums[1], "each rack has chances of its own");
    }
}

#[test]
fn integers_and_short_tensors_travel_as_in_any_job() {
    for wire_dtype in PACKED {
        let mut switch = switch(config(wire_dtype, 2, 2));
        for (worker, verdict) in [(0, Verdict::Absorb), (1, Verdict::Multicast)] {
            let contribution = Contribution { worker, slot: 1, value: i32::MAX, ..Default::default() };
            assert_eq!(contribution.to(&mut switch), verdict);
        }
        assert_eq!(super::sent(&mut switch), [(vec![0, 1], -2, 0)]);
        contribute(wire_dtype, &mut switch, 0, (0, 0));
        assert_eq!(contribute(wire_dtype, &mut switch, 1, (0, 0)), Verdict::Multicast);
    }
}

#[test]
fn workers_that_disagree_on_the_wire_dtype_are_both_named() {
    for wire_dtype in PACKED {
        let mut switch = switch(config(wire_dtype, 2, 1));
        contribute(wire_dtype, &mut switch, 0, (0, 0));
        let with_exponents = Collective { wire_dtype: WireDtype::SharedExponent, ..mean_of(wire_dtype) };
        let unlike = Contribution { worker: 1, collective: with_exponents, ..Default::default() };
        assert_eq!(unlike.to(&mut switch), Verdict::Drop(Reason::Aborted));
        let reason = AbortReason::Mismatch {
            first: (Rank(0), mean_of(wire_dtype)),
            second: (Rank(1), with_exponents),
        };
        assert_eq!(switch.poll_event(), Some(JobAborted { job: JobId(7), reason }));
        let said = alloc::format!("average of 10000 float32 sent as {} (all-reduce 3)", wire_dtype.name());
        assert_eq!(mean_of(wire_dtype).to_string(), said);
    }
}

#[test]
fn another_job_has_no_room_for_it() {
    for wire_dtype in PACKED {
        for other in WireDtype::ALL.into_iter().filter(|other| *other != wire_dtype) {
            let mut switch = switch(JobConfig { wire_dtype: other, ..config(wire_dtype, 1, 1) });
            assert_eq!(contribute(wire_dtype, &mut switch, 0, (0, 0)), Verdict::Drop(Reason::ChunkLength));
        }
    }
}
