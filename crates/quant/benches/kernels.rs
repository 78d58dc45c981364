//! Throughput of the kernels over a 25 MB gradient (DDP's default bucket), one packet-sized block a
//! call as the data path does, beside `memcpy` of the same buffer in the same run.
//!
//! After the criterion report comes a table of the shares of `memcpy`'s bandwidth, where bandwidth
//! is bytes of the gradient as `f32` a second. `path` is what a worker does to send: the exponent
//! of a block one pool ahead, the scale, the quantisation. `_train` writes into the buffer of one
//! train of packets, again and again, as the data path does; the others write 25 MB, as `memcpy`
//! does. `sum_` is what a switch does where tensors travel as they are, with the payloads of all
//! workers: its bandwidth is that of the contributions, as `add_le`'s is.
//!
//! `cargo bench -p fanin-quant` for all, `-- --quick` for a first look, `-- --test` to see that it
//! runs, `-- Avx2` for one instruction set (with `memcpy` left out, there are no shares).

use std::cell::RefCell;
use std::hint::black_box;
use std::time::Instant;

use criterion::{Criterion, Throughput};
use fanin_quant::{Divisor, Isa, Kernels, PACKED_BLOCK, Packing, Scale};

/// Blocks of 1408 and 1024 bytes.
const BLOCK_ELEMENTS: [usize; 2] = [352, 256];
/// About 25 MB, in whole trains of whole blocks of either size.
const ELEMENTS: usize = 25_000_000 / 4 / GRAIN * GRAIN;
const GRAIN: usize = 352 * 256 * 2;
const GRADIENT_BYTES: usize = 4 * ELEMENTS;
/// Blocks between taking an exponent and sending the block: the slots of one pool.
const POOL_BLOCKS: usize = 128;
/// Blocks of one train of packets.
const TRAIN_BLOCKS: usize = 32;
const WORKERS: u32 = 8;

fn main() {
    let mut bench = Bench { criterion: Criterion::default().configure_from_args(), rows: Vec::new() };
    memcpy(&mut bench, "memcpy/before");
    for isa in Isa::ALL {
        match Kernels::of(isa) {
            Some(kernels) => {
                for block in BLOCK_ELEMENTS {
                    float32(&mut bench, kernels, block);
                    float16(&mut bench, kernels, block);
                    bfloat16_on_wire(&mut bench, kernels, 2 * block);
                    native(&mut bench, kernels, block);
                }
                for packing in Packing::ALL {
                    packed(&mut bench, kernels, packing);
                }
                rotation(&mut bench, kernels);
            }
            None => println!("{isa:?}: not on this machine"),
        }
    }
    memcpy(&mut bench, "memcpy/after");
    bench.criterion.final_summary();
    // Cargo says so to a benchmark, and not to a test, which measures nothing worth printing.
    if std::env::args().any(|argument| argument == "--bench") {
        bench.print_shares();
    }
}

/// There and back, which is twice the gradient, and so half of the bandwidth of either.
fn rotation(bench: &mut Bench, kernels: &'static Kernels) {
    for block in [1024, 4096] {
        let mut gradient = gradient();
        bench.measure(format!("{:?}/rotate_and_back/{block}", kernels.isa()), || {
            kernels.rotate_f32(black_box(&mut gradient), block, 1);
            kernels.rotate_back_f32(black_box(&mut gradient), block, 1);
        });
    }
}

/// Measured twice, for the better one: everything else is held against it.
fn memcpy(bench: &mut Bench, name: &str) {
    let source = gradient();
    let mut target = vec![0.0f32; ELEMENTS];
    bench.measure(name.into(), || target.copy_from_slice(black_box(&source)));
}

fn float32(bench: &mut Bench, kernels: &Kernels, block: usize) {
    let name = |kernel: &str| format!("{:?}/{kernel}/{block}", kernels.isa());
    let source = gradient();
    let mut payload = vec![0u8; GRADIENT_BYTES];
    let mut train = vec![0u8; 4 * TRAIN_BLOCKS * block];
    let mut target = vec![0.0f32; ELEMENTS];
    let mut pool = vec![0i32; POOL_BLOCKS * block];
    let scale = Scale::new(kernels.exponent_f32(&source), WORKERS);

    bench.measure(name("exponent_f32"), || {
        for x in black_box(&source).chunks_exact(block) {
            black_box(kernels.exponent_f32(x));
        }
    });
    bench.measure(name("quantize_f32"), || {
        for (x, q) in black_box(&source).chunks_exact(block).zip(payload.chunks_exact_mut(4 * block)) {
            kernels.quantize_f32(x, black_box(&scale), q);
        }
    });
    bench.measure(name("quantize_f32_train"), || {
        for xs in black_box(&source).chunks_exact(TRAIN_BLOCKS * block) {
            for (x, q) in xs.chunks_exact(block).zip(train.chunks_exact_mut(4 * block)) {
                kernels.quantize_f32(x, black_box(&scale), q);
            }
        }
    });
    bench.measure(name("path_f32"), || send(kernels, black_box(&source), block, &mut payload));
    bench.measure(name("path_f32_train"), || send(kernels, black_box(&source), block, &mut train));
    bench.measure(name("dequantize_f32"), || {
        for (a, y) in black_box(&payload).chunks_exact(4 * block).zip(target.chunks_exact_mut(block)) {
            kernels.dequantize_f32(a, black_box(&scale), Divisor::Workers, y);
        }
    });
    bench.measure(name("add_le"), || {
        for packets in black_box(&payload).chunks(4 * POOL_BLOCKS * block) {
            for (p, slot) in packets.chunks_exact(4 * block).zip(pool.chunks_exact_mut(block)) {
                kernels.add_le(slot, p);
            }
        }
    });
    bench.measure(name("add_saturating_le"), || {
        for packets in black_box(&payload).chunks(4 * POOL_BLOCKS * block) {
            for (p, slot) in packets.chunks_exact(4 * block).zip(pool.chunks_exact_mut(block)) {
                kernels.add_saturating_le(slot, p);
            }
        }
    });
}

fn float16(bench: &mut Bench, kernels: &Kernels, block: usize) {
    let name = |kernel: &str| format!("{:?}/{kernel}/{block}", kernels.isa());
    let source: Vec<u16> = gradient().iter().map(|&x| half::f16::from_f32(x).to_bits()).collect();
    let mut payload = vec![0u8; GRADIENT_BYTES];
    let mut target = vec![0u16; ELEMENTS];
    let scale = Scale::new(kernels.exponent_f16(&source), WORKERS);

    bench.measure(name("exponent_f16"), || {
        for x in black_box(&source).chunks_exact(block) {
            black_box(kernels.exponent_f16(x));
        }
    });
    type Quantize = fn(&Kernels, &[u16], &Scale, &mut [u8]);
    let quantize: [(&str, Quantize); 2] =
        [("quantize_f16", Kernels::quantize_f16), ("quantize_bf16", Kernels::quantize_bf16)];
    for (kernel, quantize) in quantize {
        bench.measure(name(kernel), || {
            for (x, q) in black_box(&source).chunks_exact(block).zip(payload.chunks_exact_mut(4 * block)) {
                quantize(kernels, x, black_box(&scale), q);
            }
        });
    }
    type Dequantize = fn(&Kernels, &[u8], &Scale, Divisor, &mut [u16]);
    let dequantize: [(&str, Dequantize); 2] =
        [("dequantize_f16", Kernels::dequantize_f16), ("dequantize_bf16", Kernels::dequantize_bf16)];
    for (kernel, dequantize) in dequantize {
        bench.measure(name(kernel), || {
            for (a, y) in black_box(&payload).chunks_exact(4 * block).zip(target.chunks_exact_mut(block)) {
                dequantize(kernels, a, black_box(&scale), Divisor::Workers, y);
            }
        });
    }
}

/// Both ends of a job whose floats travel as bfloat16: twice the elements a packet.
fn bfloat16_on_wire(bench: &mut Bench, kernels: &Kernels, block: usize) {
    let name = |kernel: &str| format!("{:?}/{kernel}/{block}", kernels.isa());
    let source = gradient();
    let halves: Vec<u16> = source.iter().map(|&x| half::f16::from_f32(x).to_bits()).collect();
    let mut payload = vec![0u8; GRADIENT_BYTES / 2];
    let mut train = vec![0u8; 2 * TRAIN_BLOCKS * block];
    let mut target = vec![0.0f32; ELEMENTS];
    let mut target_halves = vec![0u16; ELEMENTS];
    let mut pool = vec![0i32; POOL_BLOCKS * block];
    let scale = Scale::fixed_point(kernels.exponent_f32(&source), WORKERS);

    bench.measure(name("encode_f32_train"), || {
        for xs in black_box(&source).chunks_exact(TRAIN_BLOCKS * block) {
            for (x, e) in xs.chunks_exact(block).zip(train.chunks_exact_mut(2 * block)) {
                kernels.encode_f32(x, e);
            }
            black_box(&mut train);
        }
    });
    bench.measure(name("encode_f16"), || {
        for (x, e) in black_box(&halves).chunks_exact(block).zip(payload.chunks_exact_mut(2 * block)) {
            kernels.encode_f16(x, e);
        }
    });
    bench.measure(name("encode_f32"), || {
        for (x, e) in black_box(&source).chunks_exact(block).zip(payload.chunks_exact_mut(2 * block)) {
            kernels.encode_f32(x, e);
        }
    });
    bench.measure(name("decode_f32"), || {
        for (s, y) in black_box(&payload).chunks_exact(2 * block).zip(target.chunks_exact_mut(block)) {
            kernels.decode_f32(s, Divisor::Workers, WORKERS, y);
        }
    });
    type Decode = fn(&Kernels, &[u8], Divisor, u32, &mut [u16]);
    let decode: [(&str, Decode); 2] =
        [("decode_f16", Kernels::decode_f16), ("decode_bf16", Kernels::decode_bf16)];
    for (kernel, decode) in decode {
        bench.measure(name(kernel), || {
            for (s, y) in
                black_box(&payload).chunks_exact(2 * block).zip(target_halves.chunks_exact_mut(block))
            {
                decode(kernels, s, Divisor::Workers, WORKERS, y);
            }
        });
    }
    bench.measure(name("add_bf16"), || {
        for packets in black_box(&payload).chunks(2 * POOL_BLOCKS * block) {
            for (p, slot) in packets.chunks_exact(2 * block).zip(pool.chunks_exact_mut(block)) {
                kernels.add_bf16(slot, p, black_box(&scale));
            }
        }
    });
    bench.measure(name("write_bf16"), || {
        for packets in payload.chunks_mut(2 * POOL_BLOCKS * block) {
            for (p, slot) in packets.chunks_exact_mut(2 * block).zip(black_box(&pool).chunks_exact(block)) {
                kernels.write_bf16(slot, black_box(&scale), p);
            }
        }
    });
}

/// A switch's sums of what travels as it is: payloads of `words`, in each type's own elements.
/// Every worker has its share of the gradient.
fn native(bench: &mut Bench, kernels: &Kernels, words: usize) {
    let source = gradient();
    type Sum = fn(&Kernels, &[&[u8]], u32, &mut [i32]);
    let mut sums = |name: &str, sum: Sum, contributions: &[u8]| {
        let elements = words * 4 * ELEMENTS / contributions.len();
        let mut slot = vec![0i32; words];
        let payloads: Vec<_> = contributions.chunks_exact(4 * words).collect();
        bench.measure(format!("{:?}/{name}/{elements}", kernels.isa()), || {
            for payloads in black_box(&payloads).chunks_exact(WORKERS as usize) {
                sum(kernels, payloads, 1, &mut slot);
                black_box(&mut slot);
            }
        });
    };
    let bytes: Vec<u8> = source.iter().flat_map(|x| x.to_le_bytes()).collect();
    sums("sum_f32", Kernels::sum_f32, &bytes);
    let bytes: Vec<u8> = source.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect();
    sums("sum_f16", Kernels::sum_f16, &bytes);
    let bytes: Vec<u8> = source.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect();
    sums("sum_bf16", Kernels::sum_bf16, &bytes);
    let bytes: Vec<u8> = source.iter().flat_map(|&x| f64::from(x).to_le_bytes()).collect();
    sums("sum_f64", Kernels::sum_f64, &bytes);
}

/// A byte an element or half of one, in the payloads of an Ethernet frame of 1500 bytes.
fn packed(bench: &mut Bench, kernels: &Kernels, packing: Packing) {
    let block = match packing {
        Packing::Int8 => 1280,
        Packing::Int4 => 2560,
    };
    let payload_bytes = block / PACKED_BLOCK * packing.block_bytes();
    let name = |kernel: &str| format!("{:?}/{kernel}/{}/{block}", kernels.isa(), packing.name());
    let source = gradient();
    let mut packets = vec![0u8; ELEMENTS / block * payload_bytes];
    let mut target = vec![0.0f32; ELEMENTS];
    bench.measure(name("pack_f32"), || {
        for (x, p) in black_box(&source).chunks_exact(block).zip(packets.chunks_exact_mut(payload_bytes)) {
            kernels.pack_f32(packing, x, 1, p);
        }
    });
    bench.measure(name("unpack_f32"), || {
        for (p, y) in black_box(&packets).chunks_exact(payload_bytes).zip(target.chunks_exact_mut(block)) {
            kernels.unpack_f32(packing, p, y);
        }
    });
    let mut residual = vec![0.0f32; ELEMENTS];
    bench.measure(name("feed_back_f32"), || {
        kernels.feed_back_f32(packing, black_box(&mut target), &mut residual)
    });
    let payloads: Vec<_> = packets.chunks_exact(payload_bytes).collect();
    let mut slot = vec![0i32; payload_bytes / 4];
    bench.measure(name("sum_packed"), || {
        for payloads in black_box(&payloads).chunks_exact(WORKERS as usize) {
            kernels.sum_packed(packing, payloads, WORKERS, 1, &mut slot);
            black_box(&mut slot);
        }
    });
}

/// A worker's way to send a gradient, into a buffer that is used from its start again when it is
/// full.
fn send(kernels: &Kernels, source: &[f32], block: usize, out: &mut [u8]) {
    let mut exponents = [kernels.exponent_f32(&source[..block]); POOL_BLOCKS];
    let ahead = source.chunks_exact(block).cycle().skip(POOL_BLOCKS);
    let blocks = source.chunks_exact(block).zip(ahead);
    let mut index = 0;
    let mut at = 0;
    for (x, ahead) in blocks {
        let scale = Scale::new(exponents[index], WORKERS);
        kernels.quantize_f32(x, &scale, &mut out[at..at + 4 * block]);
        exponents[index] = kernels.exponent_f32(ahead);
        index = (index + 1) % POOL_BLOCKS;
        at += 4 * block;
        if at == out.len() {
            at = 0;
            black_box(&mut *out);
        }
    }
}

/// Values of many magnitudes and both signs; a linear congruential generator, so that every run
/// sees the same.
fn gradient() -> Vec<f32> {
    let mut state = 1u32;
    (0..ELEMENTS)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state.cast_signed() as f32 * 2.0f32.powi(-31 - (state >> 8 & 7) as i32)
        })
        .collect()
}

/// Criterion, and what it measured: it does not hand its own figures out.
struct Bench {
    criterion: Criterion,
    /// Name and seconds.
    rows: Vec<(String, f64)>,
}

impl Bench {
    fn measure(&mut self, name: String, mut work: impl FnMut()) {
        let samples = RefCell::new(Vec::new());
        let mut group = self.criterion.benchmark_group("kernels");
        group.throughput(Throughput::Bytes(GRADIENT_BYTES as u64)).sample_size(10);
        group.measurement_time(std::time::Duration::from_secs(1));
        group.warm_up_time(std::time::Duration::from_millis(300));
        group.bench_function(name.as_str(), |bencher| {
            bencher.iter_custom(|iterations| {
                let begin = Instant::now();
                for _ in 0..iterations {
                    work();
                }
                let elapsed = begin.elapsed();
                samples.borrow_mut().push(elapsed.as_secs_f64() / iterations as f64);
                elapsed
            });
        });
        group.finish();
        // The best sample: on a shared machine all noise is delay.
        if let Some(best) = samples.into_inner().into_iter().reduce(f64::min) {
            self.rows.push((name, best));
        }
    }

    fn print_shares(&self) {
        let memcpys = self.rows.iter().filter(|(name, _)| name.starts_with("memcpy"));
        let Some(memcpy) = memcpys.map(|&(_, seconds)| seconds).reduce(f64::min) else {
            return;
        };
        println!("\n{:<36} {:>8} {:>16}", "kernel", "GB/s", "share of memcpy");
        for (name, seconds) in &self.rows {
            let rate = GRADIENT_BYTES as f64 / seconds / 1e9;
            println!("{name:<36} {rate:>8.2} {:>14.0} %", 100.0 * memcpy / seconds);
        }
    }
}
