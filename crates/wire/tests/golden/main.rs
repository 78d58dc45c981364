//! The bytes on the wire, as `golden/packets.txt` has them for readers in every language.

use fanin_wire::*;
use std::collections::BTreeMap;

mod dlcp;
mod lengths;

fn golden() -> BTreeMap<String, Vec<u8>> {
    include_str!("../../golden/packets.txt")
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| {
            let (name, hex) = line.split_once(' ').expect("name and hex");
            let hex: String = hex.split_whitespace().collect();
            let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex");
            (name.to_owned(), (0..hex.len()).step_by(2).map(byte).collect())
        })
        .collect()
}

/// A key of the bytes 0, 1, ... 15.
const KEY: Key = Key::new(0x0f0e_0d0c_0b0a_0908_0706_0504_0302_0100);

fn preamble(kind: Kind, worker: WorkerId) -> Preamble {
    Preamble { kind, job: JobId(0xdead_beef), generation: Generation(0x0102), worker, shard: ShardId(1) }
}

fn header() -> SlotHeader {
    SlotHeader {
        slot: SlotIndex(0x0304),
        next_exponent: -5,
        exchange: 0x1122_3345,
        chunk: 0x0a0b_0c0d,
        collective: Collective {
            sequence: 7,
            dtype: Dtype::Bfloat16,
            op: Op::Average,
            pattern: Pattern::AllReduce,
            elements: 1_000_000,
            wire_dtype: WireDtype::SharedExponent,
        },
    }
}

fn header_of_bfloat16() -> SlotHeader {
    let collective = Collective { wire_dtype: WireDtype::Bfloat16, ..header().collective };
    SlotHeader { collective, ..header() }
}

#[test]
fn slot_packets_are_the_golden_bytes_both_ways() {
    for (name, kind, worker, elements) in [
        ("update_256", Kind::Update, WorkerId(3), 256),
        ("probe", Kind::Update, WorkerId(3), 0),
        ("result_256", Kind::Result, WorkerId::ALL, 256),
        ("restore_256", Kind::Restore, WorkerId(63), 256),
    ] {
        // The file has the header; the payload counts up from -1.
        let mut expected = golden()[name].clone();
        for value in 0..elements as i32 {
            expected.extend((value - 1).to_le_bytes());
        }
        let mut out = vec![0; packet_bytes(elements)];
        let bytes =
            SlotPacket::write(&mut out, KEY, &preamble(kind, worker), &header(), elements, |payload| {
                for (value, out) in (-1i32..).zip(payload.chunks_exact_mut(4)) {
                    out.copy_from_slice(&value.to_le_bytes());
                }
            });
        assert_eq!(bytes, out.len());
        assert_eq!(out, expected, "{name}");
        let read = Preamble::parse(&out).unwrap();
        let parsed = SlotPacket::parse(&read, &out).unwrap();
        assert_eq!(*parsed.preamble, preamble(kind, worker));
        assert_eq!(parsed.header, header());
        assert_eq!(parsed.header.pool_version(), 1);
        assert_eq!(parsed.payload.len(), elements * 4);
    }
}

#[test]
fn bfloat16_packets_are_the_golden_bytes_both_ways() {
    for (name, kind, worker, elements) in [
        ("update_bfloat16_512", Kind::Update, WorkerId(3), 512),
        ("probe_bfloat16", Kind::Update, WorkerId(3), 0),
        ("result_bfloat16_512", Kind::Result, WorkerId::ALL, 512),
        ("restore_bfloat16_512", Kind::Restore, WorkerId(63), 512),
    ] {
        let mut expected = golden()[name].clone();
        for bits in 0..elements as u16 {
            expected.extend((0x3f80 + bits).to_le_bytes());
        }
        let mut out = vec![0xa5; expected.len()];
        let bytes = SlotPacket::write(
            &mut out,
            KEY,
            &preamble(kind, worker),
            &header_of_bfloat16(),
            elements,
            |payload| {
                if !payload.is_empty() {
                    let elements = begin_bfloat16_payload(payload, -7);
                    for (bits, out) in (0x3f80u16..).zip(elements.chunks_exact_mut(2)) {
                        out.copy_from_slice(&bits.to_le_bytes());
                    }
                }
            },
        );
        assert_eq!(bytes, out.len());
        assert_eq!(out, expected, "{name}");
        let read = Preamble::parse(&out).unwrap();
        let parsed = SlotPacket::parse(&read, &out).unwrap();
        assert_eq!(parsed.header, header_of_bfloat16());
        assert_eq!(parsed.elements(), elements);
        let payload = bfloat16_payload(parsed.payload).map(|(exponent, elements)| (exponent, elements.len()));
        assert_eq!(payload, (elements > 0).then_some((-7, 2 * elements)));
    }
}

#[test]
fn packets_of_int8_and_int4_are_the_golden_bytes_both_ways() {
    for (wire_dtype, elements) in [(WireDtype::Int8, 1280), (WireDtype::Int4, 2560)] {
        let collective = Collective { wire_dtype, ..header().collective };
        let header = SlotHeader { collective, ..header() };
        for (kind, worker, of_kind) in [
            (Kind::Update, WorkerId(3), "update"),
            (Kind::Result, WorkerId::ALL, "result"),
            (Kind::Restore, WorkerId(63), "restore"),
        ] {
            let name = format!("{of_kind}_{}_{elements}", wire_dtype.name());
            // A step for each block, from 2^-7 on, and bytes that count up from 0x81: elements from
            // -127, or two in a byte.
            let steps = (0..elements / PACKED_BLOCK).map(|i| 120 + i as u8);
            let bytes = collective.payload_bytes(elements) - elements / PACKED_BLOCK;
            let payload: Vec<u8> =
                steps.chain((0..bytes).map(|i| ((i % 255) as u8).wrapping_add(0x81))).collect();
            let mut expected = golden()[name.as_str()].clone();
            expected.extend(&payload);
            let mut out = vec![0xa5; expected.len()];
            let bytes = SlotPacket::write(&mut out, KEY, &preamble(kind, worker), &header, elements, |to| {
                to.copy_from_slice(&payload)
            });
            assert_eq!(bytes, out.len());
            assert_eq!(out, expected, "{name}");
            let read = Preamble::parse(&out).unwrap();
            let parsed = SlotPacket::parse(&read, &out).unwrap();
            assert_eq!((parsed.header, parsed.elements(), parsed.payload), (header, elements, &payload[..]));
        }
    }
}

#[test]
fn packets_with_a_root_are_the_golden_bytes_both_ways() {
    let bytes: Vec<u8> = (0..1024).map(|i| (i as u8).wrapping_sub(1)).collect();
    let integers: Vec<u8> = (0..256i32).flat_map(|i| (i - 1).to_le_bytes()).collect();
    let (sum, average, moved) = (
        Collective { op: Op::Sum, pattern: Pattern::Reduce(WorkerId(5)), ..header().collective },
        Collective { op: Op::Average, pattern: Pattern::Reduce(WorkerId(5)), ..header().collective },
        Collective {
            op: Op::Sum,
            pattern: Pattern::Broadcast(WorkerId(63)),
            dtype: Dtype::Uint8,
            wire_dtype: WireDtype::Native,
            ..header().collective
        },
    );
    for (name, kind, worker, collective, payload) in [
        ("update_reduce_256", Kind::Update, WorkerId(3), sum, &integers[..]),
        ("result_reduce_others", Kind::Result, WorkerId::ALL, average, &[]),
        ("update_broadcast_1024", Kind::Update, WorkerId(63), moved, &bytes[..]),
        ("update_broadcast_others", Kind::Update, WorkerId(3), moved, &[]),
    ] {
        let expected = [golden()[name].clone(), payload.to_vec()].concat();
        let header = SlotHeader { collective, ..header() };
        let elements = if payload.is_empty() { 0 } else { collective.chunk_elements(256) };
        let mut out = vec![0xa5; expected.len()];
        SlotPacket::write(&mut out, KEY, &preamble(kind, worker), &header, elements, |out| {
            out.copy_from_slice(payload);
        });
        assert_eq!(out, expected, "{name}");
        let read = Preamble::parse(&out).unwrap();
        let parsed = SlotPacket::parse(&read, &out).unwrap();
        assert_eq!((parsed.header, parsed.payload), (header, payload), "{name}");
    }
}

#[test]
fn every_operation_is_read_back_and_no_other_byte_is_one() {
    let mut operations = vec![];
    for op in [Op::Sum, Op::Average] {
        operations.push((op, Pattern::AllReduce));
        operations.extend((0..64).map(|root| (op, Pattern::Reduce(WorkerId(root)))));
    }
    operations.extend((0..64).map(|root| (Op::Sum, Pattern::Broadcast(WorkerId(root)))));
    let mut known = std::collections::BTreeSet::new();
    for (op, pattern) in operations {
        let collective = Collective {
            op,
            pattern,
            dtype: Dtype::Uint8,
            wire_dtype: WireDtype::Native,
            ..header().collective
        };
        let mut out = vec![0; packet_bytes(0)];
        let header = SlotHeader { collective, ..header() };
        SlotPacket::write(&mut out, KEY, &preamble(Kind::Update, WorkerId(3)), &header, 0, |_| {});
        let read = Preamble::parse(&out).unwrap();
        let parsed = SlotPacket::parse(&read, &out).unwrap();
        assert_eq!(parsed.header.collective, collective);
        assert!(known.insert(out[27]), "{collective}");
    }
    let mut packet = golden()["update_broadcast_others"].clone();
    for byte in 0..=255 {
        packet[27] = byte;
        let read = Preamble::parse(&packet).unwrap();
        let parsed = SlotPacket::parse(&read, &packet);
        assert_eq!(parsed.is_ok(), known.contains(&byte), "{byte}: {parsed:?}");
    }
    // Nothing is scaled that is only moved.
    let mut scaled = golden()["update_reduce_256"].clone();
    scaled[27] = 0xc0;
    let read = Preamble::parse(&scaled).unwrap();
    let parsed = SlotPacket::parse(&read, &scaled);
    assert_eq!(parsed.err(), Some(WireError::Field("dtype")));
}

#[test]
fn packets_of_elements_as_they_are_are_the_golden_bytes_both_ways() {
    let floats: Vec<u8> = (0..128).flat_map(|i| (f64::from(i) - 1.0).to_le_bytes()).collect();
    let bytes: Vec<u8> = (0..1024).map(|i| (i as u8).wrapping_sub(1)).collect();
    for (name, kind, worker, dtype, payload) in [
        ("update_float64_128", Kind::Update, WorkerId(3), Dtype::Float64, &floats),
        ("result_float64_128", Kind::Result, WorkerId::ALL, Dtype::Float64, &floats),
        ("restore_float64_128", Kind::Restore, WorkerId(63), Dtype::Float64, &floats),
        ("update_uint8_1024", Kind::Update, WorkerId(3), Dtype::Uint8, &bytes),
    ] {
        let expected = [golden()[name].clone(), payload.clone()].concat();
        let collective = Collective { dtype, wire_dtype: WireDtype::Native, ..header().collective };
        let header = SlotHeader { collective, ..header() };
        let elements = collective.chunk_elements(256);
        let mut out = vec![0xa5; expected.len()];
        let bytes = SlotPacket::write(&mut out, KEY, &preamble(kind, worker), &header, elements, |out| {
            out.copy_from_slice(payload)
        });
        assert_eq!(bytes, out.len());
        assert_eq!(out, expected, "{name}");
        let read = Preamble::parse(&out).unwrap();
        let parsed = SlotPacket::parse(&read, &out).unwrap();
        assert_eq!((parsed.header, parsed.elements()), (header, elements));
        assert_eq!(parsed.payload, payload);
    }
}

#[test]
fn a_tensor_travels_the_same_on_every_worker_by_its_type_and_length_alone() {
    use Dtype::*;
    for job in WireDtype::ALL {
        for dtype in [Float32, Float16, Bfloat16] {
            for elements in [0, 1, NATIVE_ELEMENTS_MAX] {
                assert_eq!(
                    job.of_tensor(dtype, elements),
                    WireDtype::Native,
                    "small ones are right element by element"
                );
            }
            assert_eq!(job.of_tensor(dtype, NATIVE_ELEMENTS_MAX + 1), job);
        }
        for dtype in [Float64, Int64, Uint8, Int8] {
            assert_eq!(job.of_tensor(dtype, 1 << 30), WireDtype::Native);
        }
        assert_eq!(job.of_tensor(Int32, 1), WireDtype::SharedExponent);
    }
    assert_eq!(Dtype::ALL.map(|dtype| dtype.name().parse()), Dtype::ALL.map(Ok));
}

#[test]
fn a_payload_of_the_other_wire_dtype_is_malformed() {
    let parse = |bytes: &[u8]| SlotPacket::parse(&Preamble::parse(bytes).unwrap(), bytes).map(|_| ());
    let mut packet = golden()["update_bfloat16_512"].clone();
    packet.resize(40 + 1024, 0);
    assert_eq!(parse(&packet), Err(WireError::PayloadLength(1024)));
    packet.resize(40 + 4 + 1024, 0);
    assert_eq!(parse(&packet), Ok(()));
    packet[42] = 1;
    assert_eq!(parse(&packet), Err(WireError::Field("zero")));
    packet[42] = 0;
    packet[26] = 0x03; // as int32
    assert_eq!(parse(&packet), Err(WireError::PayloadLength(1028)));
    for dtype in [0xc3, 0x23] {
        packet[26] = dtype; // as int8, as int4
        assert_eq!(parse(&packet), Err(WireError::PayloadLength(1028)));
    }
    // int32 travels as bfloat16, int8, int4 or, in two ways, as it is; float64 and int64 are rounded.
    // The others are no ways to travel, or no types.
    for dtype in [0x84, 0x44, 0xc4, 0x24, 0x05, 0x86, 0xc5, 0x26, 0x63, 0xa3, 0xe3, 0xc0, 0x40, 0x09, 0x49] {
        packet[26] = dtype;
        assert_eq!(parse(&packet), Err(WireError::Field("dtype")), "{dtype:#x}");
    }
    packet.truncate(40 + 1024);
    packet[26] = 0x41;
    assert_eq!(parse(&packet), Ok(()), "256 float32 as they are");
    packet.truncate(40 + 1020);
    assert_eq!(parse(&packet), Err(WireError::PayloadLength(1020)));
}

fn bound(millionths: u32) -> LossBound {
    LossBound::from_millionths(millionths).unwrap()
}

#[test]
fn abort_packets_are_the_golden_bytes_both_ways() {
    let short = Collective { elements: 100, ..header().collective };
    let long = Collective { elements: 200, dtype: Dtype::Float32, ..short };
    for (name, reason) in [
        ("abort_expelled", AbortReason::Expelled(Rank(9))),
        ("abort_mismatch", AbortReason::Mismatch { first: (Rank(0), short), second: (Rank(5), long) }),
        (
            "abort_mismatch_of_wire_dtypes",
            AbortReason::Mismatch {
                first: (Rank(0), short),
                second: (Rank(5), Collective { wire_dtype: WireDtype::Bfloat16, ..short }),
            },
        ),
        (
            "abort_mismatch_of_ranks",
            AbortReason::Mismatch { first: (Rank(63), short), second: (Rank(4095), long) },
        ),
        ("abort_switch_stopped", AbortReason::SwitchStopped),
        (
            "abort_loss_bounds",
            AbortReason::LossBounds { first: (Rank(0), bound(10_000)), second: (Rank(5), bound(50_000)) },
        ),
        ("abort_participants", AbortReason::Participants { first: Rank(0), second: Rank(127) }),
    ] {
        let abort = Abort { preamble: preamble(Kind::Abort, WorkerId::ALL), reason };
        let bytes = abort.to_bytes(KEY);
        assert_eq!(bytes.as_slice(), golden()[name], "{name}");
        assert_eq!(Abort::parse(Preamble::parse(&bytes).unwrap(), &bytes), Ok(abort));
    }
}

/// Worker 4 of 5 below child 2 of 3.
fn directions(level: u8, bitmap0: u32) -> Directions {
    Directions { level, bitmaps: [bitmap0, 1 << 2, 0, 0], fan_in_degrees: [5, 3, 0, 0] }
}

#[test]
fn gradient_packets_are_the_golden_bytes_both_ways() {
    let none = Flags::default();
    let up = GradientHeader {
        flags: none,
        directions: directions(0, 1 << 4),
        sequence: 0x1_2345_6789,
        aggregator_index: 0x00ab_cdef,
        fragment: 0x0a0b_0c0d,
        collective: header().collective,
        exponent: GradientHeader::STATIC_FACTOR,
        next_exponent: -5,
    };
    let down = Directions { bitmaps: [0x0012_3456, 0, 0, 0], ..Directions::default() };
    let is_ack = Flags { is_ack: true, ..none };
    for (name, elements, header) in [
        ("fragment_64", 64, GradientHeader { exponent: 3, ..up }),
        (
            "sum_64",
            64,
            GradientHeader {
                flags: Flags { resend: true, collision: true, ecn: true, ..none },
                directions: directions(2, 0b11111),
                ..up
            },
        ),
        (
            "stalled_64",
            64,
            GradientHeader {
                flags: Flags { resend: true, stalled: true, ..none },
                directions: directions(1, 0b10011),
                ..up
            },
        ),
        ("fragment_half_64", 64, GradientHeader { flags: Flags { half: true, ..none }, exponent: 3, ..up }),
        ("parameters_64", 64, GradientHeader { flags: is_ack, directions: down, ..up }),
        (
            "parameters_half_64",
            64,
            GradientHeader { flags: Flags { half: true, ..is_ack }, directions: down, ..up },
        ),
        (
            "request",
            0,
            GradientHeader {
                flags: Flags { overflow: true, ..is_ack },
                directions: Directions::default(),
                next_exponent: GradientHeader::STATIC_FACTOR,
                ..up
            },
        ),
        ("originals_64", 64, GradientHeader { flags: Flags { resend: true, overflow: true, ..none }, ..up }),
        (
            "restored_64",
            64,
            GradientHeader {
                flags: Flags { resend: true, restore: true, ..none },
                aggregator_index: 0x0012_3456,
                ..up
            },
        ),
    ] {
        let preamble = Preamble { shard: ShardId(0), ..preamble(Kind::Gradient, WorkerId::ALL) };
        let mut expected = golden()[name].clone();
        let each = if header.flags.half { 2 } else { 4 };
        for value in 0..elements as i32 {
            expected.extend(&(value - 1).to_le_bytes()[..each]);
        }
        let mut out = vec![0xa5; header.packet_bytes(elements)];
        let bytes = GradientPacket::write(&mut out, KEY, &preamble, &header, elements, |payload| {
            for (value, out) in (-1i32..).zip(payload.chunks_exact_mut(each)) {
                out.copy_from_slice(&value.to_le_bytes()[..each]);
            }
        });
        assert_eq!(bytes, out.len());
        assert_eq!(out, expected, "{name}");
        let parsed = GradientPacket::parse(Preamble::parse(&out).unwrap(), &out).unwrap();
        assert_eq!((parsed.preamble, parsed.header), (preamble, header), "{name}");
        assert_eq!((parsed.elements(), parsed.payload.len()), (elements, elements * each));
        // The mark of a congested queue is one bit.
        GradientHeader::mark_ecn(&mut out);
        let marked = GradientPacket::parse(preamble, &out).unwrap().header;
        assert_eq!(marked.flags, Flags { ecn: true, ..header.flags });
        assert_eq!(GradientHeader { flags: header.flags, ..marked }, header);
    }
    let mut update = golden()["update_256"].clone();
    update.resize(packet_bytes(256), 0);
    let before = update.clone();
    GradientHeader::mark_ecn(&mut update);
    assert_eq!(update, before, "only gradient packets have that bit");
}

#[test]
fn planned_packets_are_the_golden_bytes_both_ways() {
    let none = Flags::default();
    let up = PlannedHeader {
        flags: none,
        directions: PlannedDirections {
            passed: false,
            aggregation_node: AggregationNode(0x0102),
            sub_model: SubModel(0x0304),
            workers: 1 << 100,
            participants: Participants::ALL,
        },
        sequence: 0x1_2345_6789,
        aggregator_index: 0x00ab_cdef,
        fragment: 0x0a0b_0c0d,
        collective: header().collective,
        exponent: 3,
        next_exponent: -5,
    };
    let directions = up.directions;
    let whole = PlannedDirections { passed: true, workers: 1 << 100 | 0b1011, ..directions };
    let down =
        PlannedDirections { passed: true, sub_model: SubModel(0x0304), ..PlannedDirections::default() };
    let of_some = PlannedDirections { participants: Participants(1 << 100 | 0b1111), ..whole };
    let is_ack = Flags { is_ack: true, ..none };
    for (name, elements, header) in [
        ("planned_64", 64, up),
        ("planned_sum_64", 64, PlannedHeader { directions: whole, ..up }),
        ("planned_sum_of_some_64", 64, PlannedHeader { directions: of_some, ..up }),
        (
            "planned_shown_64",
            64,
            PlannedHeader { flags: Flags { resend: true, stalled: true, ..none }, directions: whole, ..up },
        ),
        (
            "planned_parameters_64",
            64,
            PlannedHeader { flags: is_ack, directions: down, exponent: PlannedHeader::STATIC_FACTOR, ..up },
        ),
        (
            "planned_request",
            0,
            PlannedHeader { flags: Flags { overflow: true, ..is_ack }, directions: down, ..up },
        ),
    ] {
        let preamble = Preamble { shard: ShardId(0), ..preamble(Kind::Planned, WorkerId::ALL) };
        let mut out = vec![0xa5; fragment_packet_bytes::<PlannedDirections>(elements)];
        PlannedPacket::write(&mut out, KEY, &preamble, &header, elements, |payload| {
            for (value, out) in (-1i32..).zip(payload.chunks_exact_mut(4)) {
                out.copy_from_slice(&value.to_le_bytes());
            }
        });
        assert_eq!(out[..PLANNED_HEADER_BYTES], golden()[name], "{name}");
        let parsed = PlannedPacket::parse(Preamble::parse(&out).unwrap(), &out).unwrap();
        assert_eq!((parsed.preamble, parsed.header), (preamble, header), "{name}");
        assert_eq!(parsed.payload.len(), elements * 4);
        GradientHeader::mark_ecn(&mut out);
        let marked = PlannedPacket::parse(preamble, &out).unwrap().header;
        assert_eq!(marked.flags, Flags { ecn: true, ..header.flags });
        assert!(KEY.authenticates(&out));
        // The two kinds are not taken for each other.
        assert!(matches!(GradientPacket::parse(preamble, &out), Err(WireError::Kind(10))));
    }
    let mut bad = golden()["planned_64"].clone();
    bad[12] = 2;
    let preamble = Preamble::parse(&bad).unwrap();
    assert_eq!(PlannedPacket::parse(preamble, &bad).map(|_| ()), Err(WireError::Field("passed")));
}

#[test]
fn a_gradient_packet_with_an_impossible_field_is_malformed() {
    let parse = |bytes: &[u8]| GradientPacket::parse(Preamble::parse(bytes).unwrap(), bytes).map(|_| ());
    let mut good = golden()["fragment_64"].clone();
    good.resize(fragment_packet_bytes::<Directions>(64), 0);
    assert_eq!(parse(&good), Ok(()));
    let mut half = good.clone();
    half[13] = 128;
    assert_eq!(parse(&half[..72 + 128]), Ok(()));
    assert_eq!(parse(&half[..72 + 127]), Err(WireError::PayloadLength(127)));
    assert_eq!(parse(&half), Err(WireError::PayloadLength(256)), "64 elements have 128 bytes");
    half[34] = 1;
    assert_eq!(parse(&half[..72 + 128]), Err(WireError::Field("flags")), "float32 has no half");
    for (at, byte, error) in [
        (12, 5, WireError::Field("level")),
        (34, 9, WireError::Field("dtype")),
        (35, 0, WireError::Field("op")),
        (56, 33, WireError::Field("fan_in_degrees")),
        (62, 1, WireError::Field("zero")),
        (63, 1, WireError::Field("zero")),
    ] {
        let mut bad = good.clone();
        bad[at] = byte;
        assert_eq!(parse(&bad), Err(error), "byte {at}");
    }
    assert_eq!(parse(&good[..71]), Err(WireError::Truncated { need: 72, have: 71 }));
    assert_eq!(parse(&good[..72 + 252]), Err(WireError::PayloadLength(252)));
    let probe = &golden()["probe"];
    let preamble = Preamble::parse(probe).unwrap();
    assert!(matches!(GradientPacket::parse(preamble, probe), Err(WireError::Kind(1))));
}

#[test]
fn only_the_key_of_its_job_makes_a_header_authentic() {
    for (name, packet) in golden() {
        assert!(KEY.authenticates(&packet), "{name}");
        const GRADIENT: u8 = Kind::Gradient as u8;
        const PLANNED: u8 = Kind::Planned as u8;
        const ABORT: u8 = Kind::Abort as u8;
        const BLOCK: u8 = Kind::Block as u8;
        const SIGNAL: u8 = Kind::Signal as u8;
        let header = match packet[3] {
            GRADIENT => GRADIENT_HEADER_BYTES,
            PLANNED => PLANNED_HEADER_BYTES,
            ABORT => ABORT_BYTES,
            BLOCK => BLOCK_HEADER_BYTES,
            SIGNAL => packet.len(),
            _ => SLOT_HEADER_BYTES,
        };
        assert_eq!(packet.len().min(header), header);
        for length in 0..header {
            assert!(!KEY.authenticates(&packet[..length]), "{name}: {length} bytes of it");
        }
        for bit in 0..8 * header {
            let mut forged = packet.clone();
            forged[bit / 8] ^= 1 << (bit % 8);
            // A queue on the way may set the one; with another kind the tag stands elsewhere.
            let is_ecn =
                [GRADIENT, PLANNED].contains(&packet[3]) && bit == 8 * GradientHeader::FLAGS_OFFSET + 2;
            assert_eq!(KEY.authenticates(&forged), is_ecn, "{name}: bit {bit}");
        }
        let other = Key::new(KEY.secret() ^ 1 << 127);
        assert!(!other.authenticates(&packet), "{name}");
        let mut sealed = packet.clone();
        sealed[header - TAG_BYTES..header].fill(0);
        KEY.seal(&mut sealed);
        assert_eq!(sealed, packet, "{name}");
    }
    let mut bytes: [u8; Key::BYTES] = core::array::from_fn(|i| i as u8);
    for (number, security) in (0..).zip(Security::ALL) {
        bytes[16] = number;
        assert_eq!(Key::from_bytes(&bytes), Some(KEY.with(security)));
        assert_eq!(KEY.with(security).to_bytes(), bytes);
    }
    bytes[16] = 3;
    assert_eq!((Key::from_bytes(&bytes), Key::from_bytes(&bytes[..16])), (None, None));
    assert_eq!(format!("{KEY:?}"), "Key(..)", "it does not get into a log");
}

#[test]
fn another_version_is_refused_with_both_versions() {
    let mut bytes = golden()["probe"].clone();
    bytes[2] = 9;
    assert_eq!(Preamble::parse(&bytes), Err(WireError::Version { theirs: 9, ours: VERSION }));
}

mod any_bytes {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parsing_arbitrary_bytes_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..1500)) {
            if let Ok(preamble) = Preamble::parse(&bytes) {
                let _ = SlotPacket::parse(&preamble, &bytes);
                let _ = Abort::parse(preamble, &bytes);
                let _ = GradientPacket::parse(preamble, &bytes);
                let _ = PlannedPacket::parse(preamble, &bytes);
                let _ = BlockPacket::parse(preamble, &bytes);
                let _ = SignalPacket::parse(preamble, &bytes);
            }
        }

        #[test]
        fn parsing_a_damaged_packet_never_panics(at in 0usize..32, byte in any::<u8>(), length in 0usize..1056) {
            let mut bytes = golden()["update_256"].clone();
            bytes[at] = byte;
            bytes.resize(length, 0);
            if let Ok(preamble) = Preamble::parse(&bytes)
                && let Ok(packet) = SlotPacket::parse(&preamble, &bytes)
            {
                let of_class = |class: &usize| packet.header.collective.chunk_elements(*class) == packet.elements();
                prop_assert!(CHUNK_ELEMENTS.iter().any(of_class) || packet.payload.is_empty());
            }
        }

        #[test]
        fn a_damaged_gradient_packet_never_panics_and_what_is_accepted_is_written_back_the_same(
            damage in proptest::collection::vec((0usize..72, any::<u8>()), 0..4),
            class in 0usize..6,
        ) {
            let mut bytes = golden()["sum_64"].clone();
            for (at, byte) in damage {
                bytes[at] = byte;
            }
            bytes.resize(fragment_packet_bytes::<Directions>(FRAGMENT_ELEMENTS.get(class).copied().unwrap_or(0)), 7);
            KEY.seal(&mut bytes);
            if let Ok(preamble) = Preamble::parse(&bytes)
                && let Ok(packet) = GradientPacket::parse(preamble, &bytes)
            {
                let mut again = vec![0; bytes.len()];
                let elements = packet.elements();
                GradientPacket::write(&mut again, KEY, &preamble, &packet.header, elements, |payload| {
                    payload.copy_from_slice(packet.payload);
                });
                prop_assert_eq!(again, bytes);
            }
        }
    }
}
