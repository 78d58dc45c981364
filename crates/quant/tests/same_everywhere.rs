//! Machines of different processors share a sum, so the kernels give the same bits on all of them.
//! The digests below are of one x86-64 with AVX-512; the test runs on AArch64 too (`make
//! test-arm`).

use fanin_quant::*;

const ELEMENTS: usize = 1 << 12;
const WORKERS: u32 = 5;

/// Bits by a linear congruential generator. Every eighth pattern is special: of either sign, a
/// zero, a subnormal, an infinity or a NaN, quiet or not.
fn bits(seed: u32) -> impl Iterator<Item = u32> {
    const SPECIAL: [u32; 8] =
        [0, 1, 0x007f_ffff, 0x7f7f_ffff, 0x7f80_0000, 0x7f80_0001, 0x7fc0_0000, 0x7fff_ffff];
    let mut state = seed;
    core::iter::repeat_with(move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        match state >> 29 {
            0 => SPECIAL[(state >> 26) as usize & 7] | state << 8 & 0x8000_0000,
            1 => state.rotate_left(11),
            // Between 2^-8 and 2.
            _ => (state & 0x807f_ffff) | (119 + (state >> 24 & 7)) << 23,
        }
    })
}

fn singles(seed: u32) -> Vec<f32> {
    bits(seed).take(ELEMENTS).map(f32::from_bits).collect()
}

/// As [`singles`], but only the first blocks have special elements.
fn mostly_finite(seed: u32) -> Vec<f32> {
    let ordinary = |x: u32| f32::from_bits(x & 0x807f_ffff | (119 + (x >> 24 & 7)) << 23);
    bits(seed)
        .take(ELEMENTS)
        .enumerate()
        .map(|(at, x)| if at < 512 { f32::from_bits(x) } else { ordinary(x) })
        .collect()
}

/// Any 16 bits: subnormals, infinities and NaNs of both types are among them.
fn halves(seed: u32) -> Vec<u16> {
    bits(seed).take(ELEMENTS).map(|x| (x >> 8) as u16).collect()
}

fn payloads() -> Vec<Vec<u8>> {
    (0..WORKERS).map(|seed| bits(seed).take(ELEMENTS).flat_map(u32::to_le_bytes).collect()).collect()
}

/// FNV-1a.
fn digest(words: impl IntoIterator<Item = u32>) -> u64 {
    words.into_iter().flat_map(u32::to_le_bytes).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

fn of_bytes(len: usize, write: impl FnOnce(&mut [u8])) -> u64 {
    let mut out = vec![0; len];
    write(&mut out);
    digest(out.into_iter().map(u32::from))
}

fn of_singles(write: impl FnOnce(&mut [f32])) -> u64 {
    let mut out = vec![0.0; ELEMENTS];
    write(&mut out);
    digest(out.into_iter().map(f32::to_bits))
}

fn of_halves(write: impl FnOnce(&mut [u16])) -> u64 {
    let mut out = vec![0; ELEMENTS];
    write(&mut out);
    digest(out.into_iter().map(u32::from))
}

fn of_words(write: impl FnOnce(&mut [i32])) -> u64 {
    let mut out: Vec<i32> = bits(99).take(ELEMENTS).map(u32::cast_signed).collect();
    write(&mut out);
    digest(out.into_iter().map(i32::cast_unsigned))
}

#[test]
fn kernels_give_the_same_bits_on_every_processor() {
    let (x, h, tame) = (singles(1), halves(2), mostly_finite(4));
    let all = payloads();
    let all: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
    let half = &all[0][..2 * ELEMENTS];
    let scale = Scale::new(Exponent::from_bits(1), WORKERS);
    let fixed = Scale::fixed_point(Exponent::from_bits(1), WORKERS);
    let mean = Divisor::Workers;
    let rows = [
        ("exponent_f32", digest(x.chunks(7).map(|x| exponent_f32(x).bits() as u32)), 0xd19b_ba5a_1239_0c7d),
        ("exponent_f16", digest(h.chunks(7).map(|h| exponent_f16(h).bits() as u32)), 0x0229_dcba_384c_9115),
        ("exponent_bf16", digest(h.chunks(7).map(|h| exponent_bf16(h).bits() as u32)), 0xe812_a1cd_a336_2292),
        ("quantize_f32", of_bytes(4 * ELEMENTS, |out| quantize_f32(&x, &scale, out)), 0xb7c9_aabe_3e5a_01a8),
        ("quantize_f16", of_bytes(4 * ELEMENTS, |out| quantize_f16(&h, &scale, out)), 0x704a_75dc_bdbe_c86b),
        (
            "quantize_bf16",
            of_bytes(4 * ELEMENTS, |out| quantize_bf16(&h, &scale, out)),
            0x65e6_956c_4c20_2cab,
        ),
        (
            "dequantize_f32",
            of_singles(|out| dequantize_f32(all[0], &scale, mean, out)),
            0xc6ec_18f2_bb4c_0c44,
        ),
        ("dequantize_f16", of_halves(|out| dequantize_f16(all[0], &scale, mean, out)), 0xf7ad_16d7_226e_96ce),
        (
            "dequantize_bf16",
            of_halves(|out| dequantize_bf16(all[0], &scale, mean, out)),
            0x8524_8987_f301_af7b,
        ),
        ("add_le", of_words(|acc| add_le(acc, all[0])), 0x5b49_a9a6_21d0_e3fb),
        ("add_saturating_le", of_words(|acc| add_saturating_le(acc, all[0])), 0xd9b3_12b7_c768_629a),
        ("widen_f16", of_bytes(4 * ELEMENTS, |out| widen_f16(&h, out)), 0x2103_2955_63ec_6489),
        ("widen_bf16", of_bytes(4 * ELEMENTS, |out| widen_bf16(&h, out)), 0x82bb_a983_67e8_9c7e),
        ("narrow_f16", of_halves(|out| narrow_f16(all[0], out)), 0x441a_f1bb_1edb_5ae7),
        ("narrow_bf16", of_halves(|out| narrow_bf16(all[0], out)), 0xd307_72d5_39a6_c9db),
        ("encode_f32", of_bytes(2 * ELEMENTS, |out| encode_f32(&x, out)), 0x7dcb_837a_1804_d98a),
        ("encode_f16", of_bytes(2 * ELEMENTS, |out| encode_f16(&h, out)), 0xfab9_8038_a415_ea15),
        ("decode_f32", of_singles(|out| decode_f32(half, mean, WORKERS, out)), 0x7827_7c5c_005d_e6c2),
        ("decode_f16", of_halves(|out| decode_f16(half, mean, WORKERS, out)), 0xcc30_0561_29e8_3d99),
        ("decode_bf16", of_halves(|out| decode_bf16(half, mean, WORKERS, out)), 0x444b_51ff_1faf_997e),
        ("store_bf16", of_words(|acc| store_bf16(acc, half, &fixed)), 0x4e49_aa4f_5aaf_cbc9),
        ("add_bf16", of_words(|acc| add_bf16(acc, half, &fixed)), 0xccd6_0ec2_07d3_9edb),
        ("write_bf16", of_bytes(2 * ELEMENTS, |out| of_words_as_bytes(&fixed, out)), 0xd095_4a83_2ac7_3701),
        ("sum_f32", of_words(|sum| sum_f32(&all, WORKERS, sum)), 0xa4e5_f9d3_9120_df8b),
        ("sum_f16", of_words(|sum| sum_f16(&all, WORKERS, sum)), 0x3fba_ac64_e49d_e6a1),
        ("sum_bf16", of_words(|sum| sum_bf16(&all, WORKERS, sum)), 0x20a2_dcaa_7107_88e8),
        ("sum_f64", of_words(|sum| sum_f64(&all, WORKERS, sum)), 0x1d1e_d5aa_a5f9_866e),
        ("rotate_f32", of_singles(|out| rotate(&tame, out, rotate_f32)), 0xd753_377c_86b7_7c2c),
        ("rotate_back_f32", of_singles(|out| rotate(&tame, out, rotate_back_f32)), 0xc1c3_9c1f_f8df_e283),
    ];
    let different: Vec<_> = rows.iter().filter(|(_, digest, expected)| digest != expected).collect();
    assert!(different.is_empty(), "{different:#x?}");
}

#[test]
fn what_travels_as_int8_or_int4_is_the_same_bits_on_every_processor() {
    let (h, tame) = (halves(2), mostly_finite(4));
    let digests = Packing::ALL.map(|packing| {
        let bytes = ELEMENTS / PACKED_BLOCK * packing.block_bytes();
        let packed: Vec<Vec<u8>> = (0..WORKERS)
            .map(|seed| {
                let mut payload = vec![0; bytes];
                pack_f32(packing, &mostly_finite(seed), u64::from(seed), &mut payload);
                payload
            })
            .collect();
        let packed: Vec<&[u8]> = packed.iter().map(Vec::as_slice).collect();
        [
            ("pack_f32", of_bytes(bytes, |out| pack_f32(packing, &tame, 7, out))),
            ("pack_f16", of_bytes(bytes, |out| pack_f16(packing, &h, 7, out))),
            ("pack_bf16", of_bytes(bytes, |out| pack_bf16(packing, &h, 7, out))),
            ("unpack_f32", of_singles(|out| unpack_f32(packing, packed[1], out))),
            ("unpack_f16", of_halves(|out| unpack_f16(packing, packed[1], out))),
            ("unpack_bf16", of_halves(|out| unpack_bf16(packing, packed[1], out))),
            ("sum_packed", of_words(|sum| sum_packed(packing, &packed, WORKERS, 7, &mut sum[..bytes / 4]))),
            ("feed_back_f32", fed_back(packing, &tame, feed_back_f32, f32::to_bits)),
            ("feed_back_f16", fed_back(packing, &h, feed_back_f16, u32::from)),
            ("feed_back_bf16", fed_back(packing, &h, feed_back_bf16, u32::from)),
        ]
    });
    let expected = [
        [
            ("pack_f32", 0x1ee4_bfef_8b1c_4fdc),
            ("pack_f16", 0x30f6_9987_a46a_99e2),
            ("pack_bf16", 0x35f4_a1bc_c8e7_312d),
            ("unpack_f32", 0x92a4_6712_a582_a896),
            ("unpack_f16", 0x1428_6792_32a5_5ad6),
            ("unpack_bf16", 0x0225_da71_7eea_3b2e),
            ("sum_packed", 0xa1e0_449d_2414_75db),
            ("feed_back_f32", 0x66a4_fb08_1015_a670),
            ("feed_back_f16", 0xdb73_9978_b2f0_3bdd),
            ("feed_back_bf16", 0xedf4_f27b_c012_3dc3),
        ],
        [
            ("pack_f32", 0xa705_8f2d_98be_0f2f),
            ("pack_f16", 0x7edf_9a46_2147_d44e),
            ("pack_bf16", 0xdf8e_36d4_d556_1b58),
            ("unpack_f32", 0xb8b2_94f1_6b3e_4267),
            ("unpack_f16", 0x18d6_8f75_b5ba_6e15),
            ("unpack_bf16", 0xf6a6_3260_0f17_19c7),
            ("sum_packed", 0xe760_eadd_407f_9b7a),
            ("feed_back_f32", 0x23a1_616d_575a_126b),
            ("feed_back_f16", 0x96f6_23e5_4684_153a),
            ("feed_back_bf16", 0xd5f3_56b7_5204_dfa2),
        ],
    ];
    assert_eq!(digests, expected, "{digests:#x?}");
}

fn of_words_as_bytes(scale: &Scale, out: &mut [u8]) {
    let acc: Vec<i32> = bits(3).take(ELEMENTS).map(u32::cast_signed).collect();
    write_bf16(&acc, scale, out);
}

/// The digest of the values and of their residuals. A residual is always finite.
fn fed_back<T: Copy>(
    packing: Packing,
    values: &[T],
    feed_back: fn(Packing, &mut [T], &mut [f32]),
    bits: fn(T) -> u32,
) -> u64 {
    let mut residual = mostly_finite(5);
    residual.rotate_left(512);
    residual[ELEMENTS - 512..].fill(-0.0);
    let mut values = values.to_vec();
    feed_back(packing, &mut values, &mut residual);
    digest(values.into_iter().map(bits).chain(residual.into_iter().map(f32::to_bits)))
}

fn rotate(x: &[f32], out: &mut [f32], rotation: fn(&mut [f32], usize, u64)) {
    out.copy_from_slice(x);
    rotation(out, 64, 7);
}
