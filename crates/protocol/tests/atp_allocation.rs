//! A fragment costs no allocation, at no machine.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use fanin_protocol::atp::{
    AtpJobConfig, AtpServer, AtpSwitch, AtpSwitchConfig, AtpWorker, Hashing, Overflow, Scaling, ServerJob,
    SwitchRoute,
};
use fanin_protocol::{Elements, Endpoint, Instant, RetransmissionConfig, Summer, Tensor};
use fanin_wire::{Directions, Generation, JobId, Op};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all is left to the system's allocator; the counter is no memory of its own.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(address, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const ELEMENTS: usize = 64;
const SWITCH: u8 = 100;
const SERVER: u8 = 101;

struct Floats(Vec<f32>);

impl Tensor for Floats {
    fn elements(&mut self) -> Elements<'_> {
        Elements::Float32(&mut self.0)
    }
}

/// Hands everything that `machine` sends to whom it is for; whether there was anything.
fn carry<M: Endpoint<Address = u8>>(
    machine: &mut M,
    train: &mut [u8],
    mut deliver: impl FnMut(u8, &[u8]),
) -> bool {
    let mut any = false;
    while let Some(sent) = machine.poll_transmit(Instant(0), train) {
        any = true;
        let mut recipients = [0; 2];
        recipients[..sent.to.len()].copy_from_slice(sent.to);
        let (count, bytes, segment_bytes) = (sent.to.len(), sent.bytes, sent.segment_bytes);
        for packet in train[..bytes].chunks(segment_bytes) {
            recipients[..count].iter().for_each(|to| deliver(*to, packet));
        }
    }
    any
}

#[test]
fn a_tensor_of_thousands_of_fragments_allocates_no_more_than_a_small_one() {
    let config = AtpJobConfig {
        id: JobId(1),
        generation: Generation(0),
        workers: 2,
        elements: ELEMENTS as u16,
        window_max: 256,
        aggregators: 10_000,
        hashing: Hashing::Hash,
        scaling: Scaling::Static,
        overflow: Overflow::Reactive,
        congestion_control: true,
    };
    let directions =
        |rank: u8| Directions { level: 0, bitmaps: [1 << rank, 0, 0, 0], fan_in_degrees: [2, 0, 0, 0] };
    let mut switch = AtpSwitch::new(AtpSwitchConfig {
        aggregators: config.aggregators,
        elements: config.elements,
        stale: Duration::from_secs(1),
        ecn_threshold_packets: None,
    });
    let route = SwitchRoute { id: config.id, generation: config.generation, upstream: SERVER, level: 0 };
    switch.add_job(route).expect("room");
    let mut server = AtpServer::new();
    let workers = vec![directions(0), directions(1)];
    server.add_job(ServerJob { config, workers, level: 1, restored: false }).expect("a tree");
    let mut workers: Vec<AtpWorker<u8, Floats>> = (0..2)
        .map(|rank| AtpWorker::new(config, directions(rank), SWITCH, RetransmissionConfig::default()))
        .collect();
    let mut train = vec![0; 65536];
    let mut allocations_of = |fragments: usize| {
        for worker in &mut workers {
            worker.submit(Floats(vec![1.0; fragments * ELEMENTS]), Op::Sum);
        }
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        loop {
            let mut any = false;
            for (rank, worker) in workers.iter_mut().enumerate() {
                any |= carry(worker, &mut train, |_, packet| {
                    switch.handle_packet(Instant(0), rank as u8, packet);
                });
            }
            any |= carry(&mut switch, &mut train, |to, packet| {
                if to == SERVER {
                    server.handle_packet(Instant(0), SWITCH, packet);
                } else {
                    workers[usize::from(to)].handle_packet(Instant(0), SWITCH, packet);
                }
            });
            any |= carry(&mut server, &mut train, |_, packet| {
                switch.handle_packet(Instant(0), SERVER, packet);
            });
            if !any {
                break;
            }
        }
        let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
        assert!(
            workers.iter_mut().all(|worker| worker.poll_event().is_some()),
            "{fragments} fragments are done"
        );
        allocations
    };
    // Queues grow to their size.
    allocations_of(1000);
    let (small, large) = (allocations_of(1), allocations_of(5000));
    assert!(large <= small + 4, "{small}, {large}");
}
