//! Any bytes: parsing returns, and what it accepts it writes back the same.
#![no_main]

use fanin_wire::{
    Abort, BlockPacket, FragmentPacket, GradientPacket, Key, Label, MAGIC, PlannedPacket, Preamble, SignalPacket,
    SlotPacket, VERSION,
};
use libfuzzer_sys::fuzz_target;

const KEY: Key = Key::new(1);

fn parse(bytes: &[u8]) {
    let _ = KEY.authenticates(bytes);
    let Ok(preamble) = Preamble::parse(bytes) else { return };
    let mut sealed = bytes.to_vec();
    KEY.seal(&mut sealed);
    let bytes = sealed.as_slice();
    if let Ok(packet) = SlotPacket::parse(&preamble, bytes) {
        let mut out = vec![0; bytes.len()];
        let written = SlotPacket::write(&mut out, KEY, &preamble, &packet.header, packet.elements(), |payload| {
            payload.copy_from_slice(packet.payload);
        });
        assert_eq!(&out[..written], bytes);
    }
    if let Ok(packet) = GradientPacket::parse(preamble, bytes) {
        write_again(&packet, bytes);
    }
    if let Ok(packet) = PlannedPacket::parse(preamble, bytes) {
        write_again(&packet, bytes);
    }
    if let Ok(packet) = BlockPacket::parse(preamble, bytes) {
        let mut out = vec![0; bytes.len()];
        BlockPacket::write(&mut out, KEY, &preamble, &packet.header, |payload| {
            payload.copy_from_slice(packet.payload);
        });
        assert_eq!(out, bytes);
    }
    if let Ok(packet) = SignalPacket::parse(preamble, bytes) {
        let mut out = vec![0; packet.signal.packet_bytes()];
        packet.write(&mut out, KEY);
        assert_eq!(out, bytes);
    }
    if let Ok(abort) = Abort::parse(preamble, bytes) {
        let again = abort.to_bytes(KEY);
        assert!(KEY.authenticates(&again));
        assert_eq!(Abort::parse(preamble, &again), Ok(abort));
    }
}

fn write_again<L: Label>(packet: &FragmentPacket<'_, L>, bytes: &[u8]) {
    let mut out = vec![0; bytes.len()];
    let elements = packet.elements();
    let written = FragmentPacket::write(&mut out, KEY, &packet.preamble, &packet.header, elements, |payload| {
        payload.copy_from_slice(packet.payload);
    });
    assert_eq!(&out[..written], bytes);
}

fuzz_target!(|bytes: &[u8]| {
    parse(bytes);
    // Three bytes decide whether it is ours at all: with them right the rest is reached.
    let mut ours = bytes.to_vec();
    if let Some(head) = ours.first_chunk_mut() {
        let [m0, m1] = MAGIC.to_le_bytes();
        *head = [m0, m1, VERSION];
    }
    parse(&ours);
    // With a length that counts, so is what comes after it. These are a payload as int32, as
    // bfloat16, as int8 and as int4, and none. Then come two fragments of a gradient, of four and
    // two bytes an element, and a start, a report and a stop.
    for length in [40 + 1024, 40 + 4 + 1024, 40 + 924, 40 + 1020, 72, 72 + 256, 72 + 128, 48, 40, 28] {
        ours.resize(length, 0);
        parse(&ours);
    }
});
