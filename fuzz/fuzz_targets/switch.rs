//! Any sequence of packets at a switch with jobs of int32, bfloat16, int8 and int4:
//! nothing panics, and answers stay within the pool.
#![no_main]

use std::sync::atomic::{AtomicU64, Ordering};

use fanin_protocol::switchml::{JobConfig, Switch};
use fanin_protocol::{Endpoint, Instant, Summer, Verdict};
use fanin_wire::{Generation, JobId, Key, MAGIC, ShardId, VERSION, WireDtype};
use libfuzzer_sys::fuzz_target;

const SLOTS: u16 = 3;
const WORKERS: u16 = 2;
const KEY: Key = Key::new(1);

/// Inputs, and packets that reached a slot: a driver whose packets are all foreign would test
/// nothing.
static INPUTS: AtomicU64 = AtomicU64::new(0);
static COUNTED: AtomicU64 = AtomicU64::new(0);

fuzz_target!(|bytes: &[u8]| {
    let mut switch: Switch<u8> = Switch::new(ShardId(0));
    for (id, resumed, wire_dtype) in [
        (1, false, WireDtype::SharedExponent),
        (2, true, WireDtype::Bfloat16),
        (3, true, WireDtype::Int8),
        (4, true, WireDtype::Int4),
    ] {
        let config = JobConfig {
            id: JobId(id),
            key: KEY,
            generation: Generation(0),
            workers: WORKERS,
            slots: SLOTS,
            window: SLOTS,
            elements: 256,
            wire_dtype,
            shard: ShardId(0),
            resumed,
        };
        switch.add_job(config.into()).expect("within its limits");
    }
    let mut train = vec![0; 65536];
    let mut packet = vec![0; 40 + 4 + 1024];
    for event in bytes.chunks(6) {
        let at = |i: usize| event.get(i).copied().unwrap_or(0);
        let choice = at(0);
        // The fields that a random packet would hardly ever have right are right; the others are
        // the fuzzer's.
        packet[..2].copy_from_slice(&MAGIC.to_le_bytes());
        packet[2] = VERSION;
        packet[3] = 1 + (choice & 1) * 2; // update or restore
        let job = 1 + (choice >> 1 & 1) * (1 + (at(1) >> 4 & 3) % 3);
        packet[4..12].copy_from_slice(&[job, 0, 0, 0, 0, 0, at(1) & 3, 0]);
        packet[12..16].copy_from_slice(&[at(1) >> 2 & 3, 0, at(2), at(3)]);
        packet[16..20].copy_from_slice(&(u32::from(at(4) & 15)).wrapping_sub(4).to_le_bytes());
        packet[20..24].copy_from_slice(&u32::from(at(4) >> 6).to_le_bytes());
        let (bfloat16, native) = (choice & 32 != 0, choice & 64 != 0);
        packet[24..32].copy_from_slice(&[0, 0, 1 + (at(5) & 7), 1 + (at(5) >> 7), 100, 0, 0, 0]);
        // Both bits are int8's, and a job of int4 has that in their place.
        let int4 = bfloat16 && native && job == 4;
        packet[26] |= if int4 { 0x20 } else { u8::from(bfloat16) << 7 | u8::from(native) << 6 };
        // A stranger's, now and then.
        let key = if choice & 192 == 192 { Key::new(0) } else { KEY };
        key.seal(&mut packet);
        packet[40..44].copy_from_slice(&[at(5), if bfloat16 { at(3) } else { 0 }, 0, 0]);
        packet[44] = at(5);
        let length = match (bfloat16, native) {
            _ if choice & 8 != 0 => 40,
            _ if int4 => 40 + 15 * 68,
            (true, true) => 40 + 7 * 132, // int8
            (true, false) => packet.len(),
            (false, _) => packet.len() - 4,
        };
        let verdict = switch.handle_packet(Instant(0), at(1) & 3, &packet[..length]);
        assert!(key == KEY || matches!(verdict, Verdict::Drop(_)), "a stranger has an effect");
        COUNTED.fetch_add(u64::from(!matches!(verdict, Verdict::Drop(_))), Ordering::Relaxed);
        if choice & 16 != 0 {
            continue; // several packets before one drain
        }
        let mut sent = 0;
        while let Some(transmit) = switch.poll_transmit(Instant(0), &mut train) {
            sent += transmit.bytes.div_ceil(transmit.segment_bytes) * transmit.to.len();
        }
        // A result to each worker and a reply, for each packet since the last drain.
        let most = bytes.len().div_ceil(6) * usize::from(WORKERS + 1);
        assert!(sent <= most + 2 * usize::from(WORKERS), "{sent} answers");
        while switch.poll_event().is_some() {}
    }
    let inputs = INPUTS.fetch_add(1, Ordering::Relaxed);
    assert!(inputs < 10_000 || COUNTED.load(Ordering::Relaxed) > 1000, "no packet reaches a slot");
});
