//! Each system's own rounding, and what a wrong sum looks like behind it. Sums that may lack
//! something: [`inside`].

use std::sync::Arc;
use std::time::Duration;

use fanin_protocol::atp::{Hashing, Overflow, Scaling};
use fanin_protocol::dlcp::Finish;
use fanin_quant::{
    Divisor, Exponent, Packing, Scale, add_bf16, decode_f32, dequantize_f32, encode_f32, exponent_f32,
    pack_f32, quantize_f32, sum_packed, unpack_f32, write_bf16,
};
use fanin_wire::{LossBound, WireDtype};

use super::*;
use crate::net::{Class, NodeId};
use crate::systems::System;
use crate::systems::atp::{Atp, Help};
use crate::systems::dlcp::{Dlcp, PushPlan, Way};
use crate::systems::ring::Ring;
use crate::systems::switchml::SwitchMl;
use crate::workload::Workload;

/// The way that a system sums and rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Summer {
    Static,
    Dynamic,
    SwitchMl,
    Bfloat16,
    Int8,
    Ring,
    Dlcp,
    Integers,
}

const ALL: [Summer; 8] = [
    Summer::Static,
    Summer::Dynamic,
    Summer::SwitchMl,
    Summer::Bfloat16,
    Summer::Int8,
    Summer::Ring,
    Summer::Dlcp,
    Summer::Integers,
];

/// Whether a job of it may have so many workers: ATP's have 1,024 at most. As many as bfloat16 and
/// int8 may have see every contribution.
fn may_have(summer: Summer, workers: usize) -> bool {
    match summer {
        Summer::Static | Summer::Dynamic => workers <= 1024,
        Summer::Bfloat16 => workers <= 128,
        Summer::Int8 => workers <= 64,
        _ => true,
    }
}

const PACKET: usize = 64;
/// Elements of the tensor, and its first in this part: the last packet is of two elements.
const ELEMENTS: usize = 5 * PACKET + 2;
const FROM: usize = 100;
const RANGE: Range<usize> = FROM..FROM + ELEMENTS;

fn system(summer: Summer) -> Arc<dyn System> {
    let atp = |scaling| -> Arc<dyn System> {
        Arc::new(Atp {
            help: Help::Way,
            server: None,
            elements: PACKET as u16,
            window: 1,
            hashing: Hashing::Hash,
            scaling,
            overflow: Overflow::Reactive,
            congestion_control: true,
            timeout: Duration::from_millis(1),
        })
    };
    let switchml = |wire_dtype| -> Arc<dyn System> {
        Arc::new(SwitchMl {
            elements: PACKET as u16,
            wire_dtype,
            slots: 1,
            window: 1,
            timeout: Duration::from_millis(1),
            timeouts_only: false,
        })
    };
    match summer {
        Summer::Static | Summer::Integers => atp(Scaling::Static),
        Summer::Dynamic => atp(Scaling::Dynamic),
        Summer::SwitchMl => switchml(WireDtype::SharedExponent),
        Summer::Bfloat16 => switchml(WireDtype::Bfloat16),
        Summer::Int8 => switchml(WireDtype::Int8),
        Summer::Ring => Arc::new(Ring::default()),
        Summer::Dlcp => Arc::new(Dlcp {
            way: Way::Ring,
            divide_above_bytes: 0,
            pull_bound: LossBound::RELIABLE,
            elements: PACKET as u16,
            flow_blocks: 1,
            flows: 1,
            sends: PushPlan {
                loss_bound: LossBound::RELIABLE,
                period: Duration::from_micros(200),
                delta: 2.0,
                follows: false,
                finish: Finish::Stopped,
                quiet: Duration::from_millis(1),
                timeout: Duration::from_millis(1),
            },
        }),
    }
}

fn source(summer: Summer, workers: usize, large: f64) -> Source {
    let plan = JobPlan {
        name: String::new(),
        system: system(summer),
        workers: vec![NodeId(0); workers],
        class: Class::default(),
        start: Duration::ZERO,
        stop: None,
        workload: Workload::AllReduce { elements: ELEMENTS, in_flight: 1, count: None },
        rates: crate::workload::Rates::OfLinks,
        lateness: crate::workload::Lateness::None,
        integers: summer == Summer::Integers,
        large_values: large,
        sampled: false,
    };
    Source::new(&plan, 7)
}

/// The result when these workers' contributions are summed, instead of each worker's once.
fn sum(summer: Summer, source: &Source, ranks: impl Iterator<Item = u32>) -> Gradient {
    let parts: Vec<Gradient> =
        ranks.map(|rank| source.contribution(None, 3, rank, RANGE, RANGE.end)).collect();
    if summer == Summer::Integers {
        let mut total = vec![0i32; ELEMENTS];
        for part in &parts {
            let Numbers::Int32(numbers) = &part.numbers else { panic!("integers") };
            total.iter_mut().zip(numbers).for_each(|(sum, x)| *sum = sum.wrapping_add(*x));
        }
        return Gradient {
            tensor: 3,
            numbers: Numbers::Int32(total),
            whole: ELEMENTS,
            layer: Layer::default(),
        };
    }
    let floats: Vec<&[f32]> = parts
        .iter()
        .map(|part| match &part.numbers {
            Numbers::Float32(numbers) => numbers.as_slice(),
            Numbers::Int32(_) => panic!("floats"),
        })
        .collect();
    let mut total = Vec::new();
    for begin in (0..ELEMENTS).step_by(PACKET) {
        let range = begin..(begin + PACKET).min(ELEMENTS);
        let packets: Vec<&[f32]> = floats.iter().map(|numbers| &numbers[range.clone()]).collect();
        total.extend(sum_packet(summer, source.workers, &packets));
    }
    Gradient { tensor: 3, numbers: Numbers::Float32(total), whole: ELEMENTS, layer: Layer::default() }
}

fn sum_packet(summer: Summer, workers: u32, packets: &[&[f32]]) -> Vec<f32> {
    let elements = packets[0].len();
    let in_floats = || {
        let add = |i: usize| packets.iter().fold(0f32, |sum, packet| sum + packet[i]);
        (0..elements).map(add).collect::<Vec<f32>>()
    };
    let exponent = packets.iter().map(|packet| exponent_f32(packet)).max().expect("workers");
    let range = f64::from(i32::MAX) - f64::from(workers);
    let scale = match summer {
        Summer::Bfloat16 => return sum_bfloat16(exponent, workers, packets),
        Summer::Int8 => return sum_int8(packets),
        Summer::Ring | Summer::Dlcp | Summer::Integers => return in_floats(),
        Summer::Static => Scale::of_factor(1e8),
        Summer::Dynamic => {
            let m = exponent.finite().expect("numbers").into();
            Scale::of_factor(range / f64::from(workers) / power_of_two(m))
        }
        Summer::SwitchMl => Scale::new(exponent, workers),
    };
    let (mut bytes, mut sums) = (vec![0; 4 * elements], vec![0i64; elements]);
    for packet in packets {
        quantize_f32(packet, &scale, &mut bytes);
        for (sum, x) in sums.iter_mut().zip(bytes.as_chunks().0) {
            *sum += i64::from(i32::from_le_bytes(*x));
        }
    }
    if sums.iter().any(|sum| sum.abs() >= i64::from(i32::MAX)) {
        // ATP's server asks for the original values.
        return in_floats();
    }
    let bytes: Vec<u8> = sums.iter().flat_map(|sum| (*sum as i32).to_le_bytes()).collect();
    let mut total = vec![0.0; elements];
    dequantize_f32(&bytes, &scale, Divisor::One, &mut total);
    total
}

fn sum_bfloat16(exponent: Exponent, workers: u32, packets: &[&[f32]]) -> Vec<f32> {
    let (scale, elements) = (Scale::fixed_point(exponent, workers), packets[0].len());
    let (mut bytes, mut sums, mut total) = (vec![0; 2 * elements], vec![0; elements], vec![0.0; elements]);
    for packet in packets {
        encode_f32(packet, &mut bytes);
        add_bf16(&mut sums, &bytes, &scale);
    }
    write_bf16(&sums, &scale, &mut bytes);
    decode_f32(&bytes, Divisor::One, workers, &mut total);
    total
}

/// Each is rounded by another chance, and so is the sum.
fn sum_int8(packets: &[&[f32]]) -> Vec<f32> {
    let words = Packing::Int8.block_bytes(); // Four blocks have four times as many bytes.
    let pack = |(seed, packet): (u64, &&[f32])| {
        let mut payload = vec![0; 4 * words];
        pack_f32(Packing::Int8, packet, seed, &mut payload);
        payload
    };
    let payloads: Vec<Vec<u8>> = (0..).zip(packets).map(pack).collect();
    let payloads: Vec<&[u8]> = payloads.iter().map(Vec::as_slice).collect();
    let (mut sum, mut total) = (vec![0; words], vec![0.0; packets[0].len()]);
    sum_packed(Packing::Int8, &payloads, 1, 99, &mut sum);
    let bytes: Vec<u8> = sum.iter().flat_map(|word| word.to_le_bytes()).collect();
    unpack_f32(Packing::Int8, &bytes, &mut total);
    total
}

/// The first element where `wrong` differs from `right`, with only this one of the wrong ones.
fn only(right: &Gradient, wrong: &Gradient, i: usize) -> Gradient {
    let mut mixed = right.clone();
    mixed.set(i, &wrong.part(i..i + 1));
    mixed
}

#[test]
fn a_sample_is_the_first_elements_of_each_packet_and_a_missing_contribution_is_seen_in_it() {
    for summer in [Summer::Ring, Summer::Integers] {
        let whole = source(summer, 5, 0.0);
        let sample = Source { carried: 8, ..whole.clone() };
        let all = whole.contribution(None, 3, 2, RANGE, RANGE.end);
        let some = sample.contribution(None, 3, 2, RANGE, RANGE.end);
        // Five packets, and one of two elements.
        assert_eq!(some.count(), 5 * 8 + 2);
        let at = |gradient: &Gradient, i: usize| match &gradient.numbers {
            Numbers::Float32(x) => f64::from(x[i]),
            Numbers::Int32(x) => f64::from(x[i]),
        };
        for i in 0..some.count() {
            assert!(at(&some, i) == at(&all, sample.element(RANGE.end, FROM, i) - FROM), "{i}");
        }
        let total = |ranks: std::ops::Range<u32>| {
            let mut parts = ranks.map(|rank| sample.contribution(None, 3, rank, RANGE, RANGE.end));
            let first = parts.next().expect("a worker");
            parts.fold(first, |mut sum, part| {
                sum.add(0, &part);
                sum
            })
        };
        assert!(sample.check(&total(0..5), FROM, 0).is_ok(), "{summer:?}");
        assert_eq!(sample.check(&total(0..4), FROM, 0), Err(0), "{summer:?}");
    }
}

#[test]
fn the_sum_of_all_contributions_passes_whoever_rounds() {
    for workers in [1, 2, 3, 8, 33, 63, 64, 65, 128, 200, 1024, 2049, 4096] {
        for summer in ALL {
            if !may_have(summer, workers) {
                continue;
            }
            for large in [0.0, 0.5] {
                let source = source(summer, workers, large);
                let right = sum(summer, &source, 0..workers as u32);
                assert!(source.check(&right, FROM, 0).is_ok(), "{summer:?} {workers} {large}");
            }
        }
    }
}

/// It holds whatever the packet's numbers and those of the packets beside it are like, and for a
/// packet of one element alone.
#[test]
fn a_contribution_missing_doubled_or_exchanged_is_seen_in_each_element() {
    for workers in [2, 3, 8, 21, 64] {
        for (summer, large) in ALL.into_iter().flat_map(|summer| [(summer, 0.0), (summer, 0.5)]) {
            let source = source(summer, workers, large);
            let all = 0..workers as u32;
            let right = sum(summer, &source, all.clone());
            for victim in [0, workers as u32 / 2, workers as u32 - 1] {
                let other = (victim + 1) % workers as u32;
                let missing = sum(summer, &source, all.clone().filter(|rank| *rank != victim));
                let doubled = sum(summer, &source, all.clone().chain([victim]));
                let exchanged =
                    sum(summer, &source, all.clone().map(|rank| if rank == victim { other } else { rank }));
                for (what, wrong) in [("missing", missing), ("doubled", doubled), ("exchanged", exchanged)] {
                    let mut unseen = 0;
                    for i in 0..ELEMENTS {
                        let found = source.check(&only(&right, &wrong, i), FROM, 0);
                        unseen = if found == Err(i) { 0 } else { unseen + 1 };
                        let most = if what == "exchanged" {
                            places_of(workers as u32, source.digits) - 1
                        } else {
                            0
                        };
                        assert!(unseen <= most, "{what} {victim} of {workers}: {summer:?} {large} {i}");
                    }
                }
            }
        }
    }
}

#[test]
fn beyond_64_workers_few_elements_tell_all_of_them_apart() {
    for (workers, summer) in
        [65, 128, 200, 1024, 4096].into_iter().flat_map(|workers| ALL.map(|summer| (workers, summer)))
    {
        if !may_have(summer, workers) {
            continue;
        }
        let source = source(summer, workers, 0.5);
        let all = 0..workers as u32;
        let right = sum(summer, &source, all.clone());
        let victim = workers as u32 - 1;
        let missing = sum(summer, &source, all.clone().filter(|rank| *rank != victim));
        for i in 0..ELEMENTS {
            assert_eq!(source.check(&only(&right, &missing, i), FROM, 0), Err(i), "{summer:?} {workers}");
        }
        for other in [0, victim - 1, victim % 64, victim - 64] {
            let wrong =
                sum(summer, &source, all.clone().map(|rank| if rank == victim { other } else { rank }));
            let found = source.check(&wrong, FROM, 0);
            assert!(found.is_err_and(|i| i < source.places), "{other}: {summer:?} {workers}: {found:?}");
        }
    }
}

#[test]
fn two_exchanges_that_would_cancel_in_one_element_do_not_in_all() {
    for summer in ALL {
        let source = source(summer, 5, 0.0);
        assert!(
            source.check(&sum(summer, &source, [0, 0, 3, 3, 4].into_iter()), FROM, 0).is_err(),
            "{summer:?}"
        );
        let right = sum(summer, &source, 0..5);
        assert!(source.check(&right, FROM + 1, 0).is_err(), "shifted by one element");
    }
}

/// No system may be off by as much as half of what one contribution changes, or the check could not
/// tell.
#[test]
fn bounds_are_below_half_a_unit_in_every_packet() {
    let all = (1..=64).chain([65, 127, 128, 129, 500, 1000, 1024, 1025, 1448, 1449, 2048, 2049, 4095, 4096]);
    for workers in all {
        for summer in ALL {
            if !may_have(summer, workers) {
                continue;
            }
            let source = source(summer, workers, 0.5);
            for (found, shift) in source.bounds.into_iter().zip([0, LARGE_SHIFT]) {
                let unit = source.unit * power_of_two(shift);
                let bits = source.common_bits.max(source.digits.count_ones()) + 1;
                let largest = power_of_two(bits as i32);
                let bound = system(summer).bound(workers, largest * unit);
                assert_eq!(
                    found.to_bits(),
                    bound.to_bits(),
                    "{summer:?} {workers}: it is what the system says"
                );
                let rounding = match narrow::largest(system(summer).wire_dtype()) {
                    None => largest * workers as f64 * f64::from(f32::EPSILON) / 2.0,
                    Some(exact) => {
                        let all = (workers as u32) << source.common_bits;
                        let sum = all + source.totals.iter().flatten().max().expect("a place");
                        assert!(sum + (1 << source.common_bits) + source.digits <= exact, "{workers}");
                        0.0
                    }
                };
                assert!(bound / unit + rounding < 0.5, "{summer:?} {workers}: {bound} beside {unit}");
            }
        }
    }
}

#[test]
fn as_many_workers_as_few_bits_can_show_are_allowed_and_no_more() {
    let most = WireDtype::ALL.map(|wire_dtype| (wire_dtype.name(), exact_workers_max(wire_dtype)));
    let all = WORKERS_MAX;
    let expected = [("shared_exponent", all), ("bfloat16", 128), ("int8", 64), ("int4", 1), ("native", all)];
    assert_eq!(most, expected);
}

#[test]
fn large_packets_are_as_frequent_as_asked_and_too_large_for_the_static_factor() {
    for workers in [1, 8, 1024] {
        let source = source(Summer::Static, workers, 0.25);
        let key = source.key(1);
        let large: Vec<usize> = (0..1000).filter(|index| source.is_large(key, 0, *index)).collect();
        assert!((200..300).contains(&large.len()), "{} of 1000", large.len());
        let numbers = source.contribution(None, 1, 0, 0..1000 * PACKET, 1000 * PACKET);
        let Numbers::Float32(numbers) = numbers.numbers else { panic!("floats") };
        let most = |index: usize| {
            let packet = &numbers[index * PACKET..(index + 1) * PACKET];
            packet.iter().fold(0f32, |most, x| most.max(x.abs())) * workers as f32
        };
        for index in 0..1000 {
            assert_eq!(most(index) > 21.5, large.contains(&index), "{workers} {index}: {}", most(index));
        }
    }
}

#[test]
fn digests_differ_with_any_bit() {
    let source = source(Summer::Static, 5, 0.0);
    let mut total = sum(Summer::Static, &source, 0..5);
    let before = source.check(&total, FROM, 0);
    let Numbers::Float32(numbers) = &mut total.numbers else { panic!("floats") };
    // Not every result that is another bit away is still near enough.
    let smallest = |one: &&mut f32, other: &&mut f32| one.abs().total_cmp(&other.abs());
    let number = numbers.iter_mut().min_by(smallest).expect("there are some");
    *number = f32::from_bits(number.to_bits() ^ 1);
    let after = source.check(&total, FROM, 0);
    assert!(before.is_ok() && after.is_ok() && before != after, "{before:?} {after:?}");
}
