//! Blocks and signals (DLCP).

use super::*;

#[test]
fn blocks_are_the_golden_bytes_both_ways() {
    let treated = |priority, important, path| Tag { priority, important, path };
    let rows = [
        ("block_push", 352, (0, 1, false, false), treated(3, false, 2)),
        ("block_pull", 352, (1, 4, false, false), treated(7, true, 0)),
        ("block_unsummed", 0, (0, 0, false, false), treated(7, true, 0)),
        ("block_last", 0, (0, 0, true, false), treated(7, true, 0)),
        ("block_restored", 352, (0, 3, false, true), treated(7, true, 0)),
    ];
    for (name, elements, (round, contributions, last, restored), tag) in rows {
        let mut expected = golden()[name].clone();
        expected.extend((0..elements).flat_map(|value: i32| (value as f32 - 1.0).to_le_bytes()));
        let (flow, block) = (FlowId(0x0102_0304), 0x0a0b);
        let header = BlockHeader { flow, block, round, tag, contributions, last, restored };
        let mut out = vec![0xa5; block_packet_bytes(4 * elements as usize)];
        let preamble = preamble(Kind::Block, WorkerId(3));
        BlockPacket::write(&mut out, KEY, &preamble, &header, |payload| {
            payload.copy_from_slice(&expected[BLOCK_HEADER_BYTES..]);
        });
        assert_eq!(out, expected, "{name}");
        let parsed = BlockPacket::parse(Preamble::parse(&out).unwrap(), &out).unwrap();
        assert_eq!(
            (parsed.preamble, parsed.header, parsed.payload),
            (preamble, header, &out[36..]),
            "{name}"
        );
        assert_eq!((Tag::of_packet(&out), Tag::of_any(&out)), (tag, Some(tag)), "{name}");
    }
}

fn start() -> Start {
    let collective =
        Collective { dtype: Dtype::Float32, wire_dtype: WireDtype::Native, ..header().collective };
    Start { collective, elements: 900_000, bound: bound(10_000), priority: 3, has_blocks: true }
}

#[test]
fn signals_are_the_golden_bytes_both_ways() {
    let without_blocks = Start { bound: LossBound::RELIABLE, has_blocks: false, ..start() };
    for (name, round, signal) in [
        ("signal_start", 0, Signal::Start(start())),
        ("signal_start_without_blocks", 0, Signal::Start(without_blocks)),
        ("signal_stop", 5, Signal::Stop),
        ("signal_confirm", 0, Signal::Confirm),
        ("signal_report", 0, Signal::Report(Report { number: 9, packets: 100, period_us: 200 })),
        ("signal_request", 5, Signal::Request { part: 1, missing: &[0x81, 0, 0x10] }),
        ("signal_finish", 5, Signal::Finish),
    ] {
        let preamble = preamble(Kind::Signal, WorkerId(3));
        let packet = SignalPacket { preamble, flow: FlowId(0x0102_0304), round, path: 0, signal };
        let mut out = vec![0xa5; signal.packet_bytes()];
        packet.write(&mut out, KEY);
        assert_eq!(out, golden()[name], "{name}");
        assert_eq!(SignalPacket::parse(Preamble::parse(&out).unwrap(), &out), Ok(packet), "{name}");
        assert_eq!((Tag::of_packet(&out), Tag::of_any(&out)), (Tag::SIGNAL, Some(Tag::SIGNAL)), "{name}");
        let on_path = SignalPacket { path: PATHS_MAX - 1, ..packet };
        on_path.write(&mut out, KEY);
        assert_eq!(SignalPacket::parse(Preamble::parse(&out).unwrap(), &out), Ok(on_path), "{name}");
        assert_eq!(Tag::of_packet(&out), Tag { path: PATHS_MAX - 1, ..Tag::SIGNAL }, "{name}");
        for length in 0..out.len() {
            // A request may be shorter, and then has the wrong tag.
            let shorter = SignalPacket::parse(preamble, &out[..length]);
            assert!(shorter.is_err() || name == "signal_request", "{name}: {length} bytes of it");
        }
    }
}

#[test]
fn a_block_or_a_signal_with_an_impossible_field_is_malformed() {
    let block = |name: &str, at: usize, byte: u8| {
        let mut bytes = golden()[name].clone();
        bytes[at] = byte;
        BlockPacket::parse(preamble(Kind::Block, WorkerId(3)), &bytes).map(|_| ())
    };
    assert_eq!(block("block_push", 22, 0x80), Ok(()));
    assert_eq!(block("block_push", 22, 8), Err(WireError::Field("priority")));
    assert_eq!(block("block_push", 23, PATHS_MAX), Err(WireError::Field("path")));
    assert_eq!(block("block_push", 26, 1), Ok(()));
    assert_eq!(block("block_push", 26, 2), Err(WireError::Field("last")));
    assert_eq!(block("block_push", 27, 2), Err(WireError::Field("restored")));
    let mut unsummed = golden()["block_unsummed"].clone();
    unsummed.push(0);
    let parsed = BlockPacket::parse(preamble(Kind::Block, WorkerId(3)), &unsummed);
    assert_eq!(parsed, Err(WireError::PayloadLength(1)), "nobody's contribution is no payload");
    let short = BlockPacket::parse(preamble(Kind::Block, WorkerId(3)), &unsummed[..35]);
    assert_eq!(short, Err(WireError::Truncated { need: 36, have: 35 }));

    let signal = |name: &str, changes: &[(usize, u8)]| {
        let mut bytes = golden()[name].clone();
        changes.iter().for_each(|(at, byte)| bytes[*at] = *byte);
        SignalPacket::parse(preamble(Kind::Signal, WorkerId(3)), &bytes).map(|_| ())
    };
    for (name, changes, field) in [
        ("signal_stop", &[(18, 7)][..], "signal"),
        ("signal_stop", &[(18, 0)], "signal"),
        ("signal_stop", &[(19, PATHS_MAX)], "path"),
        ("signal_start", &[(22, 9)], "dtype"),
        ("signal_start", &[(28, 0), (29, 0), (30, 0)], "elements"),
        // 16,000,000 millionths and more
        ("signal_start", &[(35, 1)], "bound"),
        ("signal_start", &[(36, 0)], "priority"),
        ("signal_start", &[(36, 8)], "priority"),
        ("signal_start", &[(37, 2)], "zero"),
        ("signal_start", &[(38, 1)], "zero"),
        ("signal_request", &[(22, 1)], "zero"),
    ] {
        assert_eq!(signal(name, changes), Err(WireError::Field(field)), "{name} {changes:?}");
    }
    let mut long = vec![0; SIGNAL_BYTES_MAX + 1];
    long[..24].copy_from_slice(&golden()["signal_request"][..24]);
    let parsed = SignalPacket::parse(preamble(Kind::Signal, WorkerId(3)), &long);
    assert_eq!(parsed, Err(WireError::PayloadLength(513)));
    long.pop();
    assert!(SignalPacket::parse(preamble(Kind::Signal, WorkerId(3)), &long).is_ok());
}
