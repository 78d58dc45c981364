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
        let allocations =
            allocations_of(&cluster, &mut [vec![0.5f32; 1 << 20], vec![0.5; 1 << 20]], Dtype::Float32);
        assert!(allocations < PER_ALL_REDUCE_MAX, "{allocations}");
        // As they are: a slot's contributions find room where another's were, or in as many places as there are slots.
        let allocations =
            allocations_of(&cluster, &mut [vec![0.5f64; 1 << 19], vec![0.5; 1 << 19]], Dtype::Float64);
        let slots = 2 * usize::from(cluster.job.slots);
        assert!(allocations < PER_ALL_REDUCE_MAX + slots, "{allocations}");
    }
}

/// Those of an all-reduce of thousands of packets, after one in which queues grew to their size.
fn allocations_of<E>(cluster: &Cluster, tensors: &mut [Vec<E>], dtype: Dtype) -> usize {
    cluster.all_reduce(tensors, dtype, Op::Sum);
    let packets = cluster.switch.received().packets;
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    cluster.all_reduce(tensors, dtype, Op::Sum);
    let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
    assert!(cluster.switch.received().packets - packets > 4096);
    allocations
}
