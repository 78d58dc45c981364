//! A fragment costs no allocation, at no machine; what ended costs no memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

use fanin_protocol::atp::{
    AtpJobConfig, AtpServer, AtpSwitch, AtpSwitchConfig, AtpWorker, DEFAULT_WAYS, Hashing, Overflow, Scaling,
    ServerJob, SwitchRoute,
};
use fanin_protocol::{
    Elements, Endpoint, Instant, RetransmissionConfig, Summer, Tensor, WorkerEvent, WorkerMachine,
};
use fanin_wire::{AbortReason, Directions, Generation, JobId, Key, Op, Rank, WireDtype};

struct Counting;

thread_local! {
    /// Of this thread, which runs one test: how often it took memory, and how many bytes it holds.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
    static BYTES: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: all is left to the system's allocator; the counters take no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        BYTES.set(BYTES.get().wrapping_add(layout.size()));
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // What another thread took may be given back here.
        BYTES.set(BYTES.get().wrapping_sub(layout.size()));
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

const CONFIG: AtpJobConfig = AtpJobConfig {
    id: JobId(1),
    key: Key::new(1),
    generation: Generation(0),
    workers: 2,
    elements: ELEMENTS as u16,
    window_max: 256,
    aggregators: 10_000,
    hashing: Hashing::Hash,
    scaling: Scaling::Static,
    overflow: Overflow::Reactive,
    congestion_control: true,
    wire_dtype: WireDtype::SharedExponent,
    originals_elements_max: 0,
};

fn directions(rank: u8) -> Directions {
    Directions { level: 0, bitmaps: [1 << rank, 0, 0, 0], fan_in_degrees: [2, 0, 0, 0] }
}

/// A job of two workers below one switch.
struct Rack {
    workers: [AtpWorker<u8, Floats>; 2],
    switch: AtpSwitch<u8>,
    server: AtpServer<u8>,
    train: Vec<u8>,
}

impl Rack {
    fn new() -> Self {
        let mut switch = AtpSwitch::new(AtpSwitchConfig {
            aggregators: CONFIG.aggregators,
            elements: CONFIG.elements,
            ways: DEFAULT_WAYS,
            stale: Duration::from_secs(1),
            ecn_threshold_packets: None,
        });
        let route = SwitchRoute {
            id: CONFIG.id,
            key: CONFIG.key,
            generation: CONFIG.generation,
            workers: CONFIG.workers,
            upstream: SERVER,
            level: 0,
        };
        switch.add_job(route).expect("room");
        let mut server = AtpServer::new();
        let workers = vec![directions(0), directions(1)];
        server.add_job(ServerJob { config: CONFIG, workers, level: 1, restored: false }).expect("a tree");
        let worker = |rank| AtpWorker::new(CONFIG, directions(rank), SWITCH, RetransmissionConfig::default());
        Self { workers: [worker(0), worker(1)], switch, server, train: vec![0; 65536] }
    }

    /// Carries everything until nobody has anything to send.
    fn settle(&mut self) {
        let Self { workers, switch, server, train } = self;
        loop {
            let mut any = false;
            for (rank, worker) in (0..).zip(workers.iter_mut()) {
                any |= carry(worker, train, |_, packet| {
                    switch.handle_packet(Instant(0), rank, packet);
                });
            }
            any |= carry(switch, train, |to, packet| {
                if to == SERVER {
                    server.handle_packet(Instant(0), SWITCH, packet);
                } else {
                    workers[usize::from(to)].handle_packet(Instant(0), SWITCH, packet);
                }
            });
            any |= carry(server, train, |_, packet| {
                switch.handle_packet(Instant(0), SERVER, packet);
            });
            if !any {
                break;
            }
        }
    }

    /// How often memory was taken to sum a tensor of so many fragments.
    fn allocations_of(&mut self, fragments: usize, value: f32) -> usize {
        for worker in &mut self.workers {
            worker.submit(Floats(vec![value; fragments * ELEMENTS]), Op::Sum);
        }
        let before = ALLOCATIONS.get();
        self.settle();
        let allocations = ALLOCATIONS.get() - before;
        for worker in &mut self.workers {
            let Some(WorkerEvent::Completed(Floats(sum), _)) = worker.poll_event() else {
                panic!("{fragments} fragments are not done")
            };
            assert!(sum.iter().all(|sum| *sum == 2.0 * value));
        }
        allocations
    }
}

#[test]
fn a_tensor_of_thousands_of_fragments_allocates_no_more_than_a_small_one() {
    // The second is too large for the fixed factor: every fragment of it overflows, and goes with original values.
    for value in [1.0, 1e6] {
        let mut rack = Rack::new();
        // Queues grow to their size.
        rack.allocations_of(1000, value);
        let (small, large) = (rack.allocations_of(1, value), rack.allocations_of(5000, value));
        assert!(large <= small + 4, "{value}: {small}, {large}");
        let overflows = rack.server.progress(CONFIG.id).expect("a job").overflows;
        assert_eq!(overflows, if value > 1.0 { 6001 } else { 0 });
    }
}

/// Admission gives what an aborted job had to the next one, and the reason is kept for a while.
#[test]
fn an_aborted_job_keeps_no_memory_but_the_reason_and_whom_to_tell() {
    let disagree = |rack: &mut Rack| {
        rack.workers[0].submit(Floats(vec![1.0; ELEMENTS]), Op::Sum);
        rack.workers[1].submit(Floats(vec![1.0; ELEMENTS + 1]), Op::Sum);
        rack.settle();
        // What the switch did not add to the other's waits there until it is sent again.
        rack.workers[0].handle_timeout(Instant(1 << 40));
    };
    let expel = |rack: &mut Rack| {
        rack.server.abort_job(CONFIG.id, AbortReason::Expelled(Rank(1)));
    };
    for abort in [disagree as fn(&mut Rack), expel] {
        let mut rack = Rack::new();
        // The memory that overflows need is there too.
        rack.allocations_of(300, 1e6);
        abort(&mut rack);
        rack.settle();
        for worker in &mut rack.workers {
            assert!(matches!(worker.poll_event(), Some(WorkerEvent::Aborted(_))));
        }
        let before = BYTES.get();
        rack.server.remove_job(CONFIG.id);
        let kept = before - BYTES.get();
        // A sum and a parameter for each element of the window are 196,608 bytes.
        assert!(kept < 8192, "{kept} bytes");
    }
}
