//! Any sequence of packets at a switch with two jobs: nothing panics, and answers stay within the pool.
#![no_main]

use fanin_protocol::{Endpoint, Instant, JobConfig, Switch};
use fanin_wire::{Generation, JobId, MAGIC, ShardId, VERSION};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut switch: Switch<u8> = Switch::new(ShardId(0));
    for (id, resumed) in [(1, false), (2, true)] {
        switch.add_job(JobConfig {
            id: JobId(id),
            generation: Generation(0),
            workers: 2,
            slots: 3,
            elements: 256,
            shard: ShardId(0),
            resumed,
        });
    }
    let mut train = vec![0; 65536];
    let mut packet = vec![0; 32 + 1024];
    for header in bytes.chunks(22) {
        // The fields that a random packet would hardly ever have right, then the fuzzer's.
        packet[..2].copy_from_slice(&MAGIC.to_le_bytes());
        packet[2] = VERSION;
        packet[3] = header[0];
        packet[4..8].copy_from_slice(&[header[0] >> 4, 0, 0, 0]);
        packet[8..12].copy_from_slice(&[0, 0, header.get(1).copied().unwrap_or(0), 0]);
        packet[12..12 + header.len().saturating_sub(2)].copy_from_slice(header.get(2..).unwrap_or(&[]));
        let length = if header[0] & 8 == 0 { packet.len() } else { 32 };
        switch.handle_packet(Instant(0), header[0], &packet[..length]);
        let mut sent = 0;
        while let Some(transmit) = switch.poll_transmit(Instant(0), &mut train) {
            sent += transmit.to.len();
            assert!(sent <= 64 * 12, "more answers than the pools can hold");
        }
        while switch.poll_event().is_some() {}
    }
});
