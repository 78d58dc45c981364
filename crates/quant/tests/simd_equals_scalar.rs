//! Every implementation equals the specification bit for bit: any bit pattern, any length, any
//! alignment.

use fanin_quant::{Divisor, Exponent, Isa, Kernels, Packing, Scale, WORKERS_MAX};
use proptest::collection::vec;
use proptest::prelude::*;

/// More than two iterations of the widest kernel, so that main loop, last registers and rest all
/// run.
const ELEMENTS_MAX: usize = 300;
const ALIGNMENTS: usize = 64;

fn scalar() -> &'static Kernels {
    Kernels::of(Isa::Scalar).expect("any machine has it")
}

/// The other implementations that this machine can run.
fn others() -> impl Iterator<Item = &'static Kernels> {
    Isa::ALL.into_iter().filter(|&isa| isa != Isa::Scalar).filter_map(Kernels::of)
}

/// Bits of an `f32`: uniform patterns are mostly huge or tiny, so also ordinary values and the
/// special ones.
fn f32_bits() -> impl Strategy<Value = u32> {
    prop_oneof![
        3 => any::<u32>(),
        4 => (-1.0f32..1.0).prop_map(f32::to_bits),
        1 => prop::sample::select(vec![
            0,
            1,
            0x007f_ffff,
            0x0080_0000,
            0x3f80_0000,
            0x7f7f_ffff,
            0x7f80_0000,
            0x7f80_0001,
            0x7fc0_0000,
            0x7fff_ffff,
        ])
        .prop_flat_map(|bits: u32| prop::sample::select(vec![bits, bits | 0x8000_0000])),
    ]
}

fn f32_block() -> impl Strategy<Value = Vec<f32>> {
    vec(f32_bits().prop_map(f32::from_bits), 0..ELEMENTS_MAX)
}

fn u16_block() -> impl Strategy<Value = Vec<u16>> {
    vec(
        prop_oneof![
            any::<u16>(),
            prop::sample::select(vec![0, 0x8000, 0x7bff, 0x7c00, 0x7e00, 0x7f7f, 0x7f80, 0x7fc0])
        ],
        0..ELEMENTS_MAX,
    )
}

fn sums() -> impl Strategy<Value = Vec<i32>> {
    vec(prop_oneof![any::<i32>(), -70..70, Just(i32::MIN), Just(i32::MAX)], 0..ELEMENTS_MAX)
}

fn scale() -> impl Strategy<Value = Scale> {
    let exponent = prop_oneof![8 => -149i16..=128, 3 => -4i16..=4, 1 => any::<i16>()];
    (exponent, 1..=WORKERS_MAX).prop_map(|(bits, workers)| Scale::new(Exponent::from_bits(bits), workers))
}

/// ATP's factor, and any other: the largest and the smallest too.
fn fixed_factor() -> impl Strategy<Value = Scale> {
    prop_oneof![Just(1e8), 1e-40f64..1e40, Just(f64::MAX), Just(f64::from_bits(1))].prop_map(Scale::of_factor)
}

fn fixed_point() -> impl Strategy<Value = Scale> {
    let exponent = prop_oneof![8 => -149i16..=128, 3 => -4i16..=4, 1 => any::<i16>()];
    (exponent, 1..=WORKERS_MAX, any::<bool>()).prop_map(|(bits, workers, whole)| {
        let scale = if whole { Scale::fixed_point_sum } else { Scale::fixed_point };
        scale(Exponent::from_bits(bits), workers)
    })
}

/// Some workers' payloads of any bytes, with bits of the special values of each type of float among
/// them.
fn payloads() -> impl Strategy<Value = (u32, usize, Vec<u8>)> {
    let eight = prop_oneof![
        4 => any::<u64>(),
        2 => prop::array::uniform2(f32_bits()).prop_map(|[low, high]| u64::from(high) << 32 | u64::from(low)),
        2 => (-1e3f64..1e3).prop_map(f64::to_bits),
        1 => prop::sample::select(vec![0, 1 << 63, 0x7ff0 << 48, 0xfff0 << 48, 0x7ff8 << 48, 0x7c00_7c00_fc00_8000, 0x7f80_7f80_ff80_8000]),
    ];
    (1u32..=9, 1..20usize).prop_flat_map(move |(workers, blocks)| {
        let words = 32 * blocks;
        vec(eight.clone(), workers as usize * words / 2)
            .prop_map(move |eights| (workers, words, eights.iter().flat_map(|x| x.to_le_bytes()).collect()))
    })
}

fn divisor() -> impl Strategy<Value = Divisor> {
    prop_oneof![Just(Divisor::One), Just(Divisor::Workers)]
}

/// A payload of `len` bytes that begins `offset` bytes after an allocation does, filled by `write`.
fn payload_at(offset: usize, len: usize, write: impl Fn(&mut [u8])) -> Vec<u8> {
    let mut bytes = vec![0xa5; offset + len + 1];
    write(&mut bytes[offset..offset + len]);
    assert_eq!(bytes[offset + len], 0xa5, "wrote past the end");
    assert!(bytes[..offset].iter().all(|&b| b == 0xa5), "wrote before the beginning");
    bytes.drain(..offset);
    bytes.truncate(len);
    bytes
}

/// The bytes of `sums` from `offset` on.
fn bytes_at(offset: usize, sums: &[i32]) -> Vec<u8> {
    let mut bytes = vec![0; offset];
    bytes.extend(sums.iter().flat_map(|sum| sum.to_le_bytes()));
    bytes
}

fn f32_to_bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

proptest! {
    #[test]
    fn exponents_are_equal(block in f32_block(), halves in u16_block(), skip in 0..4usize) {
        let block = &block[skip.min(block.len())..];
        let halves = &halves[skip.min(halves.len())..];
        for kernels in others() {
            prop_assert_eq!(kernels.exponent_f32(block), scalar().exponent_f32(block), "{:?}", kernels.isa());
            prop_assert_eq!(kernels.exponent_f16(halves), scalar().exponent_f16(halves), "{:?}", kernels.isa());
            prop_assert_eq!(kernels.exponent_bf16(halves), scalar().exponent_bf16(halves), "{:?}", kernels.isa());
        }
    }

    #[test]
    fn exponents_of_finite_blocks_are_equal(block in vec(-1.0f32..1.0, 0..ELEMENTS_MAX), peak in any::<prop::sample::Index>()) {
        // A single element stands out, at any place: each lane and the rest must be looked at.
        let mut block = block;
        if !block.is_empty() {
            let at = peak.index(block.len());
            block[at] = -1e30;
        }
        for kernels in others() {
            prop_assert_eq!(kernels.exponent_f32(&block), scalar().exponent_f32(&block), "{:?}", kernels.isa());
        }
    }

    #[test]
    fn quantised_f32_is_equal(block in f32_block(), scale in prop_oneof![scale(), fixed_factor()], offset in 0..ALIGNMENTS, skip in 0..4usize) {
        let block = &block[skip.min(block.len())..];
        let quantise = |kernels: &Kernels| payload_at(offset, 4 * block.len(), |out| kernels.quantize_f32(block, &scale, out));
        for kernels in others() {
            prop_assert_eq!(quantise(kernels), quantise(scalar()), "{:?}", kernels.isa());
        }
    }

    #[test]
    fn quantised_16_bit_formats_are_equal(block in u16_block(), scale in prop_oneof![scale(), fixed_factor()], offset in 0..ALIGNMENTS, skip in 0..4usize) {
        let block = &block[skip.min(block.len())..];
        let f16 = |kernels: &Kernels| payload_at(offset, 4 * block.len(), |out| kernels.quantize_f16(block, &scale, out));
        let bf16 = |kernels: &Kernels| payload_at(offset, 4 * block.len(), |out| kernels.quantize_bf16(block, &scale, out));
        for kernels in others() {
            prop_assert_eq!(f16(kernels), f16(scalar()), "{:?}", kernels.isa());
            prop_assert_eq!(bf16(kernels), bf16(scalar()), "{:?}", kernels.isa());
        }
    }

    #[test]
    fn dequantised_values_are_equal(sums in sums(), scale in scale(), divisor in divisor(), offset in 0..ALIGNMENTS) {
        let bytes = bytes_at(offset, &sums);
        let f32 = |kernels: &Kernels| {
            let mut out = vec![1.0f32; sums.len()];
            kernels.dequantize_f32(&bytes[offset..], &scale, divisor, &mut out);
            f32_to_bits(&out)
        };
        let f16 = |kernels: &Kernels| {
            let mut out = vec![1u16; sums.len()];
            kernels.dequantize_f16(&bytes[offset..], &scale, divisor, &mut out);
            out
        };
        let bf16 = |kernels: &Kernels| {
            let mut out = vec![1u16; sums.len()];
            kernels.dequantize_bf16(&bytes[offset..], &scale, divisor, &mut out);
            out
        };
        for kernels in others() {
            prop_assert_eq!(f32(kernels), f32(scalar()), "{:?}", kernels.isa());
            prop_assert_eq!(f16(kernels), f16(scalar()), "{:?}", kernels.isa());
            prop_assert_eq!(bf16(kernels), bf16(scalar()), "{:?}", kernels.isa());
        }
    }

    #[test]
    fn what_travels_as_bfloat16_is_equal(block in f32_block(), halves in u16_block(), offset in 0..ALIGNMENTS, skip in 0..4usize) {
        let block = &block[skip.min(block.len())..];
        let halves = &halves[skip.min(halves.len())..];
        let f32 = |kernels: &Kernels| payload_at(offset, 2 * block.len(), |out| kernels.encode_f32(block, out));
        let f16 = |kernels: &Kernels| payload_at(offset, 2 * halves.len(), |out| kernels.encode_f16(halves, out));
        for kernels in others() {
            prop_assert_eq!(f32(kernels), f32(scalar()), "{:?}", kernels.isa());
            prop_assert_eq!(f16(kernels), f16(scalar()), "{:?}", kernels.isa());
        }
    }

    #[test]
    fn bfloat16_sums_are_read_equally(sums in u16_block(), workers in 1..=WORKERS_MAX, divisor in divisor(), offset in 0..ALIGNMENTS) {
        let mut bytes = vec![0; offset];
        bytes.extend(sums.iter().flat_map(|sum| sum.to_le_bytes()));
        let f32 = |kernels: &Kernels| {
            let mut out = vec![1.0f32; sums.len()];
            kernels.decode_f32(&bytes[offset..], divisor, workers, &mut out);
            f32_to_bits(&out)
        };
        type Decode = fn(&Kernels, &[u8], Divisor, u32, &mut [u16]);
        let sixteen = |kernels: &Kernels, decode: Decode| {
            let mut out = vec![1u16; sums.len()];
            decode(kernels, &bytes[offset..], divisor, workers, &mut out);
            out
        };
        for kernels in others() {
            prop_assert_eq!(f32(kernels), f32(scalar()), "{:?}", kernels.isa());
            for decode in [Kernels::decode_f16 as Decode, Kernels::decode_bf16] {
                prop_assert_eq!(sixteen(kernels, decode), sixteen(scalar(), decode), "{:?}", kernels.isa());
            }
        }
    }

    #[test]
    fn bfloat16_is_added_equally(
        pairs in vec((any::<u16>(), any::<i32>()), 0..ELEMENTS_MAX), scale in fixed_point(), offset in 0..ALIGNMENTS
    ) {
        let (contribution, acc): (Vec<u16>, Vec<i32>) = pairs.into_iter().unzip();
        let mut bytes = vec![0; offset];
        bytes.extend(contribution.iter().flat_map(|bits| bits.to_le_bytes()));
        let slots = |kernels: &Kernels| {
            let (mut added, mut stored) = (acc.clone(), acc.clone());
            kernels.add_bf16(&mut added, &bytes[offset..], &scale);
            kernels.store_bf16(&mut stored, &bytes[offset..], &scale);
            (added, stored)
        };
        let written =
            |kernels: &Kernels| payload_at(offset, 2 * acc.len(), |out| kernels.write_bf16(&acc, &scale, out));
        // As adding is to quantise, and then to add.
        let mut quantised = vec![0; 4 * acc.len()];
        scalar().quantize_bf16(&contribution, &scale, &mut quantised);
        let mut added = acc.clone();
        scalar().add_le(&mut added, &quantised);
        let mut stored = vec![0; acc.len()];
        fanin_quant::store_le(&mut stored, &quantised);
        for kernels in others().chain([scalar()]) {
            prop_assert_eq!(slots(kernels), (added.clone(), stored.clone()), "{:?}", kernels.isa());
            prop_assert_eq!(written(kernels), written(scalar()), "{:?}", kernels.isa());
        }
    }

    #[test]
    fn what_travels_as_float32_is_equal(block in f32_block(), halves in u16_block(), offset in 0..ALIGNMENTS, skip in 0..4usize) {
        let block = &block[skip.min(block.len())..];
        let halves = &halves[skip.min(halves.len())..];
        let bytes = bytes_at(offset, &block.iter().map(|x| x.to_bits().cast_signed()).collect::<Vec<_>>());
        let widened = |kernels: &Kernels| {
            (
                payload_at(offset, 4 * block.len(), |out| kernels.widen_f32(block, out)),
                payload_at(offset, 4 * halves.len(), |out| kernels.widen_f16(halves, out)),
                payload_at(offset, 4 * halves.len(), |out| kernels.widen_bf16(halves, out)),
            )
        };
        let narrowed = |kernels: &Kernels| {
            let (mut f32, mut f16, mut bf16) = (vec![1.0; block.len()], vec![1; block.len()], vec![1; block.len()]);
            kernels.narrow_f32(&bytes[offset..], &mut f32);
            kernels.narrow_f16(&bytes[offset..], &mut f16);
            kernels.narrow_bf16(&bytes[offset..], &mut bf16);
            (f32_to_bits(&f32), f16, bf16)
        };
        prop_assert_eq!(&widened(scalar()).0, &bytes[offset..]);
        prop_assert_eq!(&narrowed(scalar()).0, &f32_to_bits(block));
        for kernels in others() {
            prop_assert_eq!(widened(kernels), widened(scalar()), "{:?}", kernels.isa());
            prop_assert_eq!(narrowed(kernels), narrowed(scalar()), "{:?}", kernels.isa());
        }
    }

    #[test]
    fn sums_of_what_travels_as_it_is_are_equal((workers, words, payloads) in payloads(), divisor in 1..=WORKERS_MAX, offset in 0..ALIGNMENTS) {
        let mut bytes = vec![0; offset];
        bytes.extend(payloads);
        let parts: Vec<_> = bytes[offset..].chunks_exact(4 * words).collect();
        prop_assert_eq!(parts.len(), workers as usize);
        type Sum = fn(&Kernels, &[&[u8]], u32, &mut [i32]);
        for sum in [Kernels::sum_f32 as Sum, Kernels::sum_f16, Kernels::sum_bf16, Kernels::sum_f64] {
            let sum = |kernels: &Kernels| {
                let mut words = vec![1; words];
                sum(kernels, &parts, divisor, &mut words);
                words
            };
            for kernels in others() {
                prop_assert_eq!(sum(kernels), sum(scalar()), "{:?}", kernels.isa());
            }
        }
    }

    #[test]
    fn what_travels_as_int8_or_int4_is_equal(
        packing in prop::sample::select(Packing::ALL.to_vec()), block in f32_block(), halves in u16_block(),
        payloads in vec(vec(any::<u8>(), 8 * 33), 1..9),
        divisor in 1..=WORKERS_MAX, seed in any::<u64>(), offset in 0..ALIGNMENTS, skip in 0..4usize
    ) {
        let block = &block[skip.min(block.len())..];
        let halves = &halves[skip.min(halves.len())..];
        let bytes = |elements: usize| elements.div_ceil(128).max(1) * 4 * packing.block_bytes();
        let packed = |kernels: &Kernels| {
            (
                payload_at(offset, bytes(block.len()), |out| kernels.pack_f32(packing, block, seed, out)),
                payload_at(offset, bytes(halves.len()), |out| kernels.pack_f16(packing, halves, seed, out)),
                payload_at(offset, bytes(halves.len()), |out| kernels.pack_bf16(packing, halves, seed, out)),
            )
        };
        let mut wire = vec![0; offset];
        wire.extend(payloads.iter().flatten());
        let bytes_of_two = 8 * packing.block_bytes();
        let parts: Vec<_> = wire[offset..].chunks_exact(8 * 33).map(|part| &part[..bytes_of_two]).collect();
        let unpacked = |kernels: &Kernels| {
            let elements = 256 - 13 * skip;
            let (mut f32, mut f16, mut bf16) = (vec![1.0; elements], vec![1; elements], vec![1; elements]);
            kernels.unpack_f32(packing, parts[0], &mut f32);
            kernels.unpack_f16(packing, parts[0], &mut f16);
            kernels.unpack_bf16(packing, parts[0], &mut bf16);
            (f32_to_bits(&f32), f16, bf16)
        };
        let summed = |kernels: &Kernels| {
            let mut words = vec![1; bytes_of_two / 4];
            kernels.sum_packed(packing, &parts, divisor, seed, &mut words);
            words
        };
        let fed_back = |kernels: &Kernels| {
            let mut residual: Vec<f32> = (0..block.len().max(halves.len())).map(|i| i as f32 / 7.0).collect();
            let (mut f32, mut f16, mut bf16) = (block.to_vec(), halves.to_vec(), halves.to_vec());
            kernels.feed_back_f32(packing, &mut f32, &mut residual[..block.len()]);
            kernels.feed_back_f16(packing, &mut f16, &mut residual[..halves.len()]);
            kernels.feed_back_bf16(packing, &mut bf16, &mut residual[..halves.len()]);
            // Which NaN a sum with one is, is the processor's choice.
            let number = |x: f32| if x.is_nan() { 0 } else { x.to_bits() };
            let wide = |bits: &u16| f32::from_bits(u32::from(*bits) << 16);
            let f16: Vec<u16> = f16.into_iter().map(|x| if x & 0x7fff > 0x7c00 { 0x7e00 } else { x }).collect();
            let f32: Vec<u32> = f32.into_iter().map(number).collect();
            (f32, f16, bf16.iter().map(wide).map(number).collect::<Vec<_>>(), f32_to_bits(&residual))
        };
        for kernels in others() {
            prop_assert_eq!(fed_back(kernels), fed_back(scalar()), "{:?}", kernels.isa());
            prop_assert_eq!(packed(kernels), packed(scalar()), "{:?}", kernels.isa());
            prop_assert_eq!(unpacked(kernels), unpacked(scalar()), "{:?}", kernels.isa());
            prop_assert_eq!(summed(kernels), summed(scalar()), "{:?}", kernels.isa());
        }
    }

    #[test]
    fn saturating_sums_are_equal(acc in sums(), contribution in sums(), offset in 0..ALIGNMENTS) {
        let elements = acc.len().min(contribution.len());
        let (acc, contribution) = (&acc[..elements], &contribution[..elements]);
        let limits = [i32::MIN, i32::MAX];
        let sum = |(a, b): (&i32, &i32)| match (*a, *b) {
            (a, _) if limits.contains(&a) => a,
            (_, b) if limits.contains(&b) => b,
            (a, b) => (i64::from(a) + i64::from(b)).clamp(i32::MIN.into(), i32::MAX.into()) as i32,
        };
        let expected: Vec<i32> = acc.iter().zip(contribution).map(sum).collect();
        let bytes = bytes_at(offset, contribution);
        for kernels in others().chain([scalar()]) {
            let mut acc = acc.to_vec();
            kernels.add_saturating_le(&mut acc, &bytes[offset..]);
            prop_assert_eq!(&acc, &expected, "{:?}", kernels.isa());
        }
    }

    #[test]
    fn sums_of_slots_are_equal(pairs in vec((any::<i32>(), any::<i32>()), 0..ELEMENTS_MAX), offset in 0..ALIGNMENTS) {
        let (acc, contribution): (Vec<i32>, Vec<i32>) = pairs.into_iter().unzip();
        let expected: Vec<i32> = acc.iter().zip(&contribution).map(|(a, b)| a.wrapping_add(*b)).collect();
        let bytes = bytes_at(offset, &contribution);
        for kernels in others().chain([scalar()]) {
            let mut acc = acc.clone();
            kernels.add_le(&mut acc, &bytes[offset..]);
            prop_assert_eq!(&acc, &expected, "{:?}", kernels.isa());
        }
    }
}

#[test]
fn every_f16_and_bf16_is_widened_equally() {
    let every: Vec<u16> = (0..=u16::MAX).collect();
    for m in [-24, -3, 16, 128] {
        let scale = Scale::new(Exponent::from_bits(m), 3);
        for kernels in others() {
            let run = |kernels: &Kernels| {
                let mut out = (vec![0; 4 * every.len()], vec![0; 4 * every.len()]);
                kernels.quantize_f16(&every, &scale, &mut out.0);
                kernels.quantize_bf16(&every, &scale, &mut out.1);
                out
            };
            assert!(run(kernels) == run(scalar()), "{:?}, m = {m}", kernels.isa());
        }
    }
}
