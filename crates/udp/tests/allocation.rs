//! A packet costs no allocation: neither in the driver nor in the machines that it runs.

mod common;

use common::Cluster;
use fanin_udp::Offload;
use fanin_wire::{Dtype, Op};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

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

/// Channels, boxes and replies for an all-reduce on each worker; far fewer than its packets.
const PER_ALL_REDUCE_MAX: usize = 64;

#[test]
fn an_all_reduce_of_thousands_of_packets_allocates_no_more_than_a_small_one() {
    for offload in [Offload::Detect, Offload::Never] {
        let cluster = Cluster::start(2, 2, offload);
        let mut tensors = vec![vec![0.5f32; 1 << 20]; 2];
        // Queues grow to their size.
        cluster.all_reduce(&mut tensors, Dtype::Float32, Op::Sum);
        let packets = cluster.switch.received().packets;
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        cluster.all_reduce(&mut tensors, Dtype::Float32, Op::Sum);
        let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
        assert!(cluster.switch.received().packets - packets > 4096);
        assert!(allocations < PER_ALL_REDUCE_MAX, "{allocations}");
    }
}
