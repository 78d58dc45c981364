//! What a switch holds of a job is what admission counted, and no more, whatever its workers send.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use fanin_protocol::control::pool_units;
use fanin_protocol::switchml::{JobConfig, Switch};
use fanin_protocol::{Endpoint, Instant, Summer, Verdict};
use fanin_wire::{
    Collective, Dtype, Generation, JobId, Key, Kind, Op, Pattern, Preamble, ShardId, SlotHeader, SlotIndex,
    SlotPacket, WireDtype, WorkerId, chunk_packet_bytes,
};

struct Counting;

thread_local! {
    /// Bytes that this thread, which runs one test, holds.
    static BYTES: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: all is left to the system's allocator; the counter takes no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.set(BYTES.get().wrapping_add(layout.size()));
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        BYTES.set(BYTES.get().wrapping_sub(layout.size()));
        // SAFETY: as above.
        unsafe { System.dealloc(address, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Of a unit of the pool, as `fanin switch --help` has it.
const UNIT_BYTES: usize = 2200;
/// What a job has besides its slots.
const JOB_BYTES: usize = 16 << 10;
const KEY: Key = Key::new(7);

/// A chunk of a tensor that travels so.
fn packet(config: &JobConfig, wire_dtype: WireDtype, worker: u8, slot: u16, exchange: u32) -> Vec<u8> {
    let preamble = Preamble {
        kind: Kind::Update,
        job: config.id,
        generation: config.generation,
        worker: WorkerId(worker),
        shard: config.shard,
    };
    let collective = Collective {
        sequence: exchange as u16,
        dtype: Dtype::Float32,
        op: Op::Sum,
        pattern: Pattern::AllReduce,
        elements: 1 << 20,
        wire_dtype,
    };
    let header =
        SlotHeader { slot: SlotIndex(slot), next_exponent: 0, exchange, chunk: exchange, collective };
    let elements = collective.chunk_elements(config.elements.into());
    let mut packet = vec![0; chunk_packet_bytes(config.elements.into(), config.wire_dtype)];
    let bytes = SlotPacket::write(&mut packet, KEY, &preamble, &header, elements, |_| {});
    packet.truncate(bytes);
    packet
}

#[test]
fn contributions_that_are_kept_side_by_side_fit_into_what_was_counted() {
    const SLOTS: u16 = 8;
    for (workers, elements) in [(1, 352), (8, 352), (64, 32), (64, 352), (64, 2048)] {
        for wire_dtype in WireDtype::ALL {
            let config = JobConfig {
                id: JobId(1),
                key: KEY,
                generation: Generation(0),
                workers,
                slots: SLOTS,
                window: SLOTS,
                elements,
                wire_dtype,
                shard: ShardId(0),
                resumed: false,
            };
            let places = u8::try_from(workers).unwrap();
            let mut packets = Vec::new();
            // Large tensors and small ones, by turns in each slot; the last contribution is never there.
            for (exchange, of) in (0..).zip([wire_dtype, WireDtype::Native, wire_dtype, WireDtype::Native]) {
                let senders = if exchange < 3 { places } else { places.max(2) - 1 };
                for slot in 0..SLOTS {
                    packets.extend((0..senders).map(|worker| packet(&config, of, worker, slot, exchange)));
                }
            }
            let mut train = vec![0; 65536];
            let before = BYTES.get();
            let mut switch: Switch<u8> = Switch::new(config.shard);
            switch.add_job(config.into()).expect("a job");
            let mut most = 0;
            for packet in &packets {
                let verdict = switch.handle_packet(Instant(0), 0, packet);
                assert!(matches!(verdict, Verdict::Absorb | Verdict::Multicast), "{verdict:?}");
                while switch.poll_transmit(Instant(0), &mut train).is_some() {}
                most = most.max(BYTES.get() - before);
            }
            let units = pool_units(SLOTS, elements, wire_dtype, places);
            let counted = units as usize * UNIT_BYTES + JOB_BYTES;
            assert!(
                most <= counted,
                "{workers} workers, {elements} {wire_dtype:?}: {most} of {counted} bytes"
            );
            let gathered = usize::from(SLOTS) * usize::from(workers) * usize::from(elements) * 4;
            assert!(workers == 1 || most > gathered, "{workers} workers, {elements}: {most} gather");
        }
    }
}
