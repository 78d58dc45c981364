//! An all-reduce of 25 MB float32 (DDP's default bucket) and one of 4 KB among the ranks of one
//! machine, as threads, which wait and copy as processes do. For comparison, as many threads copy
//! the tensor once each, all at a time.
//!
//! `cargo bench -p fanin-local` for all, `-- --quick` for a first look, `-- --test` to see that it
//! runs.

use criterion::{Criterion, Throughput};
use fanin_local::{Group, LocalConfig, LocalSum, SharedMemory};
use fanin_udp::{RawTensor, Submission};
use fanin_wire::{Dtype, Op};
use std::hint::black_box;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

const BYTES: [usize; 2] = [25_000_000, 4096];
const RANKS: [usize; 3] = [2, 4, 8];
const PATIENCE: Duration = Duration::from_secs(60);

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    for bytes in BYTES {
        for ranks in RANKS {
            let mut group = criterion.benchmark_group(format!("{bytes} bytes, {ranks} ranks"));
            group.throughput(Throughput::Bytes(bytes as u64)).sample_size(10);
            let mut tensors = vec![vec![1u8; bytes]; ranks];
            let mut copies = tensors.clone();
            group.bench_function("copy", |bencher| {
                bencher.iter(|| {
                    thread::scope(|scope| {
                        for (from, to) in tensors.iter().zip(&mut copies) {
                            scope.spawn(|| to.copy_from_slice(black_box(from)));
                        }
                    });
                });
            });
            for dtype in [Dtype::Float32, Dtype::Float16, Dtype::Bfloat16] {
                let machine = machine(ranks);
                group.bench_function(dtype.name(), |bencher| {
                    bencher.iter(|| all_reduce(&machine, &mut tensors, dtype))
                });
            }
            group.finish();
        }
    }
    criterion.final_summary();
}

fn machine(ranks: usize) -> Vec<LocalSum> {
    let name = format!("fanin-bench-{}", std::process::id());
    let group = Group { ranks: (0..ranks as u32).collect(), columns: ranks, networked: false };
    let first = SharedMemory::create(&name, group.clone()).expect("room in /dev/shm");
    let others =
        (1..ranks).map(|me| SharedMemory::open(&name, group.clone(), me, PATIENCE).expect("the memory"));
    let memories: Vec<_> = std::iter::once(first).chain(others).collect();
    let start = |memory| {
        let config = LocalConfig { memory, network: None, machines: vec![0; ranks], timeout: PATIENCE };
        LocalSum::start(config).expect("a thread")
    };
    memories.into_iter().map(start).collect()
}

fn all_reduce(machine: &[LocalSum], tensors: &mut [Vec<u8>], dtype: Dtype) {
    let (sender, answers) = mpsc::channel();
    for (rank, tensor) in machine.iter().zip(tensors) {
        let elements = tensor.len() / dtype.element_bytes();
        // SAFETY: nobody touches it until all answers are here.
        let tensor =
            unsafe { RawTensor::new(tensor.as_mut_ptr(), elements, dtype) }.expect("memory of the heap");
        let sender = sender.clone();
        rank.submit(
            Submission::all_reduce(tensor, Op::Average),
            Box::new(move |_, result| drop(sender.send(result))),
        );
    }
    drop(sender);
    for answer in answers {
        answer.expect("a sum");
    }
}
