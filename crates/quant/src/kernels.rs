//! The choice of an implementation, made once at run time.

use core::sync::atomic::{AtomicU8, Ordering};

use crate::class;
use crate::exponent::Exponent;
use crate::float16::{bf16_from_f32, f16_from_f32, f32_from_bf16, f32_from_f16};
use crate::integer::{assert_bf16_lengths, assert_lengths};
use crate::native::assert_payloads;
use crate::packed::{Packing, assert_packed, assert_residual, assert_room};
use crate::rotation::assert_block;
use crate::scale::{Divisor, Finite, Kind, Scale};

/// An instruction set that the kernels are written for, worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Isa {
    /// Any machine.
    Scalar,
    /// x86-64 with AVX2 and F16C (Haswell, Zen).
    Avx2,
    /// x86-64 with AVX-512 F, BW and VL (Skylake-SP, Zen 4).
    Avx512,
    /// Little-endian AArch64, which has it always.
    Neon,
}

impl Isa {
    /// Every instruction set, worst first.
    pub const ALL: [Self; 4] = [Self::Scalar, Self::Avx2, Self::Avx512, Self::Neon];

    /// Whether this machine has it. Asks the processor; slow in a virtual machine.
    #[must_use]
    pub fn available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => x86::avx2(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => x86::avx512(),
            #[cfg(all(target_arch = "aarch64", target_endian = "little", target_feature = "neon"))]
            Self::Neon => true,
            _ => false,
        }
    }

    fn table(self) -> &'static Kernels {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => &AVX2,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => &AVX512,
            #[cfg(all(target_arch = "aarch64", target_endian = "little", target_feature = "neon"))]
            Self::Neon => &NEON,
            _ => &SCALAR,
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    cpufeatures::new!(cpu_avx2, "avx2", "fma");
    cpufeatures::new!(cpu_avx512, "avx512f", "avx512bw", "avx512vl");

    pub(super) fn avx2() -> bool {
        cpu_avx2::get() && f16c()
    }

    pub(super) fn avx512() -> bool {
        cpu_avx512::get() && avx2()
    }

    /// CPUID leaf 1, ECX bit 29: the one feature that `cpufeatures` does not know. Its registers
    /// are AVX's.
    fn f16c() -> bool {
        // Safe from Rust 1.94 on, unsafe before.
        #[allow(unused_unsafe)]
        // SAFETY: every x86-64 processor has CPUID with leaf 1.
        let leaf = unsafe { core::arch::x86_64::__cpuid(1) };
        leaf.ecx >> 29 & 1 == 1
    }
}

/// The kernels of one instruction set.
///
/// The table is private and only handed out for an [`Isa`] that is available: that is what makes
/// calling it sound.
pub struct Kernels {
    isa: Isa,
    magnitude_f32: unsafe fn(&[f32]) -> u32,
    magnitude_16: unsafe fn(&[u16]) -> u16,
    quantize_f32: unsafe fn(&[f32], &Finite, &mut [u8]),
    quantize_f16: unsafe fn(&[u16], &Finite, &mut [u8]),
    quantize_bf16: unsafe fn(&[u16], &Finite, &mut [u8]),
    dequantize_f32: unsafe fn(&[u8], f64, &mut [f32]),
    dequantize_f16: unsafe fn(&[u8], f64, &mut [u16]),
    dequantize_bf16: unsafe fn(&[u8], f64, &mut [u16]),
    add_le: unsafe fn(&mut [i32], &[u8]),
    add_saturating_le: unsafe fn(&mut [i32], &[u8]),
    widen_f32: unsafe fn(&[f32], &mut [u8]),
    widen_f16: unsafe fn(&[u16], &mut [u8]),
    widen_bf16: unsafe fn(&[u16], &mut [u8]),
    narrow_f32: unsafe fn(&[u8], &mut [f32]),
    narrow_f16: unsafe fn(&[u8], &mut [u16]),
    narrow_bf16: unsafe fn(&[u8], &mut [u16]),
    encode_f32: unsafe fn(&[f32], &mut [u8]),
    encode_f16: unsafe fn(&[u16], &mut [u8]),
    decode_f32: unsafe fn(&[u8], f32, &mut [f32]),
    decode_f16: unsafe fn(&[u8], f32, &mut [u16]),
    decode_bf16: unsafe fn(&[u8], f32, &mut [u16]),
    store_bf16: unsafe fn(&mut [i32], &[u8], &Finite),
    add_bf16: unsafe fn(&mut [i32], &[u8], &Finite),
    write_bf16: unsafe fn(&[i32], f64, &mut [u8]),
    sum_f32: Sum,
    sum_f16: Sum,
    sum_bf16: Sum,
    sum_f64: Sum,
    pack_f32: unsafe fn(Packing, &[f32], u64, &mut [u8]),
    pack_f16: unsafe fn(Packing, &[u16], u64, &mut [u8]),
    pack_bf16: unsafe fn(Packing, &[u16], u64, &mut [u8]),
    unpack_f32: unsafe fn(Packing, &[u8], &mut [f32]),
    unpack_f16: unsafe fn(Packing, &[u8], &mut [u16]),
    unpack_bf16: unsafe fn(Packing, &[u8], &mut [u16]),
    feed_back_f32: unsafe fn(Packing, &mut [f32], &mut [f32]),
    feed_back_f16: unsafe fn(Packing, &mut [u16], &mut [f32]),
    feed_back_bf16: unsafe fn(Packing, &mut [u16], &mut [f32]),
    sum_packed: SumPacked,
    rotate_f32: Rotation,
    rotate_back_f32: Rotation,
}

type Sum = unsafe fn(&[&[u8]], Option<f64>, &mut [i32]);
type SumPacked = unsafe fn(Packing, &[&[u8]], Option<f32>, u64, &mut [i32]);
type Rotation = unsafe fn(&mut [f32], usize, u64);

macro_rules! table {
    ($isa:ident, $module:ident) => {
        Kernels {
            isa: Isa::$isa,
            magnitude_f32: crate::$module::magnitude_f32,
            magnitude_16: crate::$module::magnitude_16,
            quantize_f32: crate::$module::quantize_f32,
            quantize_f16: crate::$module::quantize_f16,
            quantize_bf16: crate::$module::quantize_bf16,
            dequantize_f32: crate::$module::dequantize_f32,
            dequantize_f16: crate::$module::dequantize_f16,
            dequantize_bf16: crate::$module::dequantize_bf16,
            add_le: crate::$module::add_le,
            add_saturating_le: crate::$module::add_saturating_le,
            widen_f32: crate::$module::widen_f32,
            widen_f16: crate::$module::widen_f16,
            widen_bf16: crate::$module::widen_bf16,
            narrow_f32: crate::$module::narrow_f32,
            narrow_f16: crate::$module::narrow_f16,
            narrow_bf16: crate::$module::narrow_bf16,
            encode_f32: crate::$module::encode_f32,
            encode_f16: crate::$module::encode_f16,
            decode_f32: crate::$module::decode_f32,
            decode_f16: crate::$module::decode_f16,
            decode_bf16: crate::$module::decode_bf16,
            store_bf16: crate::$module::store_bf16,
            add_bf16: crate::$module::add_bf16,
            write_bf16: crate::$module::write_bf16,
            sum_f32: crate::$module::sum_f32,
            sum_f16: crate::$module::sum_f16,
            sum_bf16: crate::$module::sum_bf16,
            sum_f64: crate::$module::sum_f64,
            pack_f32: crate::$module::pack_f32,
            pack_f16: crate::$module::pack_f16,
            pack_bf16: crate::$module::pack_bf16,
            unpack_f32: crate::$module::unpack_f32,
            unpack_f16: crate::$module::unpack_f16,
            unpack_bf16: crate::$module::unpack_bf16,
            feed_back_f32: crate::$module::feed_back_f32,
            feed_back_f16: crate::$module::feed_back_f16,
            feed_back_bf16: crate::$module::feed_back_bf16,
            sum_packed: crate::$module::sum_packed,
            rotate_f32: crate::$module::rotate_f32,
            rotate_back_f32: crate::$module::rotate_back_f32,
        }
    };
}

static SCALAR: Kernels = table!(Scalar, scalar);
#[cfg(target_arch = "x86_64")]
static AVX2: Kernels = table!(Avx2, avx2);
#[cfg(target_arch = "x86_64")]
static AVX512: Kernels = table!(Avx512, avx512);
#[cfg(all(target_arch = "aarch64", target_endian = "little", target_feature = "neon"))]
static NEON: Kernels = table!(Neon, neon);

impl Kernels {
    /// The best kernels of this machine. After the first call, one relaxed load.
    #[inline]
    #[must_use]
    pub fn detected() -> &'static Self {
        const UNDETECTED: u8 = u8::MAX;
        static BEST: AtomicU8 = AtomicU8::new(UNDETECTED);

        #[cold]
        fn detect() -> &'static Kernels {
            let best = Isa::ALL.into_iter().rfind(|isa| isa.available()).unwrap_or(Isa::Scalar);
            // Racing threads store the same value, and it guards no other memory: relaxed is
            // enough.
            BEST.store(best as u8, Ordering::Relaxed);
            best.table()
        }

        const AVX2: u8 = Isa::Avx2 as u8;
        const AVX512: u8 = Isa::Avx512 as u8;
        const NEON: u8 = Isa::Neon as u8;
        match BEST.load(Ordering::Relaxed) {
            UNDETECTED => detect(),
            AVX512 => Isa::Avx512.table(),
            AVX2 => Isa::Avx2.table(),
            NEON => Isa::Neon.table(),
            _ => Isa::Scalar.table(),
        }
    }

    /// The kernels of one instruction set, if this machine has it. For tests and benchmarks.
    #[must_use]
    pub fn of(isa: Isa) -> Option<&'static Self> {
        isa.available().then(|| isa.table())
    }

    /// Which instruction set these kernels are written for.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// See [`crate::exponent_f32`].
    #[must_use]
    pub fn exponent_f32(&self, block: &[f32]) -> Exponent {
        // SAFETY: a table is only handed out where its instruction set is available.
        Exponent::of_magnitude(unsafe { (self.magnitude_f32)(block) })
    }

    /// See [`crate::exponent_f16`].
    #[must_use]
    pub fn exponent_f16(&self, block: &[u16]) -> Exponent {
        // SAFETY: a table is only handed out where its instruction set is available.
        let magnitude = unsafe { (self.magnitude_16)(block) };
        Exponent::of_magnitude(f32_from_f16(magnitude).to_bits())
    }

    /// See [`crate::exponent_bf16`].
    #[must_use]
    pub fn exponent_bf16(&self, block: &[u16]) -> Exponent {
        // SAFETY: a table is only handed out where its instruction set is available.
        let magnitude = unsafe { (self.magnitude_16)(block) };
        Exponent::of_magnitude(f32_from_bf16(magnitude).to_bits())
    }

    /// See [`crate::quantize_f32`].
    pub fn quantize_f32(&self, block: &[f32], scale: &Scale, out: &mut [u8]) {
        quantize(block, scale, out, self.quantize_f32, |x| x);
    }

    /// See [`crate::quantize_f16`].
    pub fn quantize_f16(&self, block: &[u16], scale: &Scale, out: &mut [u8]) {
        quantize(block, scale, out, self.quantize_f16, f32_from_f16);
    }

    /// See [`crate::quantize_bf16`].
    pub fn quantize_bf16(&self, block: &[u16], scale: &Scale, out: &mut [u8]) {
        quantize(block, scale, out, self.quantize_bf16, f32_from_bf16);
    }

    /// See [`crate::dequantize_f32`].
    pub fn dequantize_f32(&self, sums: &[u8], scale: &Scale, divisor: Divisor, out: &mut [f32]) {
        dequantize(sums, scale, divisor, out, self.dequantize_f32, |x| x);
    }

    /// See [`crate::dequantize_f16`].
    pub fn dequantize_f16(&self, sums: &[u8], scale: &Scale, divisor: Divisor, out: &mut [u16]) {
        dequantize(sums, scale, divisor, out, self.dequantize_f16, f16_from_f32);
    }

    /// See [`crate::dequantize_bf16`].
    pub fn dequantize_bf16(&self, sums: &[u8], scale: &Scale, divisor: Divisor, out: &mut [u16]) {
        dequantize(sums, scale, divisor, out, self.dequantize_bf16, bf16_from_f32);
    }

    /// See [`crate::add_le`].
    pub fn add_le(&self, acc: &mut [i32], payload: &[u8]) {
        assert_lengths(acc.len(), payload.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.add_le)(acc, payload) }
    }

    /// See [`crate::add_saturating_le`].
    pub fn add_saturating_le(&self, acc: &mut [i32], payload: &[u8]) {
        assert_lengths(acc.len(), payload.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.add_saturating_le)(acc, payload) }
    }

    /// See [`crate::widen_f32`].
    pub fn widen_f32(&self, block: &[f32], out: &mut [u8]) {
        assert_lengths(block.len(), out.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.widen_f32)(block, out) }
    }

    /// See [`crate::widen_f16`].
    pub fn widen_f16(&self, block: &[u16], out: &mut [u8]) {
        assert_lengths(block.len(), out.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.widen_f16)(block, out) }
    }

    /// See [`crate::widen_bf16`].
    pub fn widen_bf16(&self, block: &[u16], out: &mut [u8]) {
        assert_lengths(block.len(), out.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.widen_bf16)(block, out) }
    }

    /// See [`crate::narrow_f32`].
    pub fn narrow_f32(&self, values: &[u8], out: &mut [f32]) {
        assert_lengths(out.len(), values.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.narrow_f32)(values, out) }
    }

    /// See [`crate::narrow_f16`].
    pub fn narrow_f16(&self, values: &[u8], out: &mut [u16]) {
        assert_lengths(out.len(), values.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.narrow_f16)(values, out) }
    }

    /// See [`crate::narrow_bf16`].
    pub fn narrow_bf16(&self, values: &[u8], out: &mut [u16]) {
        assert_lengths(out.len(), values.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.narrow_bf16)(values, out) }
    }

    /// See [`crate::encode_f32`].
    pub fn encode_f32(&self, block: &[f32], out: &mut [u8]) {
        assert_bf16_lengths(block.len(), out.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.encode_f32)(block, out) }
    }

    /// See [`crate::encode_f16`].
    pub fn encode_f16(&self, block: &[u16], out: &mut [u8]) {
        assert_bf16_lengths(block.len(), out.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.encode_f16)(block, out) }
    }

    /// See [`crate::decode_f32`].
    pub fn decode_f32(&self, sums: &[u8], divisor: Divisor, workers: u32, out: &mut [f32]) {
        assert_bf16_lengths(out.len(), sums.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.decode_f32)(sums, divisor.value(workers), out) }
    }

    /// See [`crate::decode_f16`].
    pub fn decode_f16(&self, sums: &[u8], divisor: Divisor, workers: u32, out: &mut [u16]) {
        assert_bf16_lengths(out.len(), sums.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.decode_f16)(sums, divisor.value(workers), out) }
    }

    /// See [`crate::decode_bf16`].
    pub fn decode_bf16(&self, sums: &[u8], divisor: Divisor, workers: u32, out: &mut [u16]) {
        assert_bf16_lengths(out.len(), sums.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.decode_bf16)(sums, divisor.value(workers), out) }
    }

    /// See [`crate::store_bf16`].
    pub fn store_bf16(&self, acc: &mut [i32], payload: &[u8], scale: &Scale) {
        assert_bf16_lengths(acc.len(), payload.len());
        match &scale.kind {
            // SAFETY: a table is only handed out where its instruction set is available.
            Kind::Finite(scale) => unsafe { (self.store_bf16)(acc, payload, scale) },
            Kind::Zero => acc.fill(0),
            Kind::NonFinite => {
                for (a, class) in acc.iter_mut().zip(classes(payload)) {
                    *a = class;
                }
            }
        }
    }

    /// See [`crate::add_bf16`].
    pub fn add_bf16(&self, acc: &mut [i32], payload: &[u8], scale: &Scale) {
        assert_bf16_lengths(acc.len(), payload.len());
        match &scale.kind {
            // SAFETY: a table is only handed out where its instruction set is available.
            Kind::Finite(scale) => unsafe { (self.add_bf16)(acc, payload, scale) },
            Kind::Zero => {}
            Kind::NonFinite => {
                for (a, class) in acc.iter_mut().zip(classes(payload)) {
                    *a = a.wrapping_add(class);
                }
            }
        }
    }

    /// See [`crate::write_bf16`].
    pub fn write_bf16(&self, acc: &[i32], scale: &Scale, out: &mut [u8]) {
        assert_bf16_lengths(acc.len(), out.len());
        match &scale.kind {
            // SAFETY: a table is only handed out where its instruction set is available.
            Kind::Finite(scale) => unsafe { (self.write_bf16)(acc, scale.inverse(Divisor::One), out) },
            Kind::Zero => out.fill(0),
            Kind::NonFinite => {
                for (&a, s) in acc.iter().zip(out.as_chunks_mut().0) {
                    *s = bf16_from_f32(class::decode(a)).to_le_bytes();
                }
            }
        }
    }

    /// See [`crate::sum_f32`].
    pub fn sum_f32(&self, payloads: &[&[u8]], divisor: u32, sum: &mut [i32]) {
        let divisor = assert_payloads(payloads, divisor, sum.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.sum_f32)(payloads, divisor, sum) }
    }

    /// See [`crate::sum_f16`].
    pub fn sum_f16(&self, payloads: &[&[u8]], divisor: u32, sum: &mut [i32]) {
        let divisor = assert_payloads(payloads, divisor, sum.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.sum_f16)(payloads, divisor, sum) }
    }

    /// See [`crate::sum_bf16`].
    pub fn sum_bf16(&self, payloads: &[&[u8]], divisor: u32, sum: &mut [i32]) {
        let divisor = assert_payloads(payloads, divisor, sum.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.sum_bf16)(payloads, divisor, sum) }
    }

    /// See [`crate::sum_f64`].
    pub fn sum_f64(&self, payloads: &[&[u8]], divisor: u32, sum: &mut [i32]) {
        let divisor = assert_payloads(payloads, divisor, sum.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.sum_f64)(payloads, divisor, sum) }
    }

    /// See [`crate::pack_f32`].
    pub fn pack_f32(&self, packing: Packing, values: &[f32], seed: u64, payload: &mut [u8]) {
        assert_room(packing, values.len(), payload.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.pack_f32)(packing, values, seed, payload) }
    }

    /// See [`crate::pack_f16`].
    pub fn pack_f16(&self, packing: Packing, values: &[u16], seed: u64, payload: &mut [u8]) {
        assert_room(packing, values.len(), payload.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.pack_f16)(packing, values, seed, payload) }
    }

    /// See [`crate::pack_bf16`].
    pub fn pack_bf16(&self, packing: Packing, values: &[u16], seed: u64, payload: &mut [u8]) {
        assert_room(packing, values.len(), payload.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.pack_bf16)(packing, values, seed, payload) }
    }

    /// See [`crate::unpack_f32`].
    pub fn unpack_f32(&self, packing: Packing, payload: &[u8], out: &mut [f32]) {
        assert_room(packing, out.len(), payload.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.unpack_f32)(packing, payload, out) }
    }

    /// See [`crate::unpack_f16`].
    pub fn unpack_f16(&self, packing: Packing, payload: &[u8], out: &mut [u16]) {
        assert_room(packing, out.len(), payload.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.unpack_f16)(packing, payload, out) }
    }

    /// See [`crate::unpack_bf16`].
    pub fn unpack_bf16(&self, packing: Packing, payload: &[u8], out: &mut [u16]) {
        assert_room(packing, out.len(), payload.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.unpack_bf16)(packing, payload, out) }
    }

    /// See [`crate::feed_back_f32`].
    pub fn feed_back_f32(&self, packing: Packing, values: &mut [f32], residual: &mut [f32]) {
        assert_residual(values.len(), residual.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.feed_back_f32)(packing, values, residual) }
    }

    /// See [`crate::feed_back_f16`].
    pub fn feed_back_f16(&self, packing: Packing, values: &mut [u16], residual: &mut [f32]) {
        assert_residual(values.len(), residual.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.feed_back_f16)(packing, values, residual) }
    }

    /// See [`crate::feed_back_bf16`].
    pub fn feed_back_bf16(&self, packing: Packing, values: &mut [u16], residual: &mut [f32]) {
        assert_residual(values.len(), residual.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.feed_back_bf16)(packing, values, residual) }
    }

    /// See [`crate::sum_packed`].
    pub fn sum_packed(&self, packing: Packing, payloads: &[&[u8]], divisor: u32, seed: u64, sum: &mut [i32]) {
        let divisor = assert_packed(packing, payloads, divisor, sum.len());
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.sum_packed)(packing, payloads, divisor, seed, sum) }
    }

    /// See [`crate::rotate_f32`].
    pub fn rotate_f32(&self, values: &mut [f32], block: usize, seed: u64) {
        assert_block(block);
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.rotate_f32)(values, block, seed) }
    }

    /// See [`crate::rotate_back_f32`].
    pub fn rotate_back_f32(&self, values: &mut [f32], block: usize, seed: u64) {
        assert_block(block);
        // SAFETY: a table is only handed out where its instruction set is available.
        unsafe { (self.rotate_back_f32)(values, block, seed) }
    }
}

/// The classes of a bfloat16 payload's elements.
fn classes(payload: &[u8]) -> impl Iterator<Item = i32> + '_ {
    payload.as_chunks().0.iter().map(|bits| class::encode(f32_from_bf16(u16::from_le_bytes(*bits))))
}

/// Blocks without a finite exponent are rare and carry no values: one plain loop serves every
/// instruction set.
#[inline]
fn quantize<T: Copy>(
    block: &[T],
    scale: &Scale,
    out: &mut [u8],
    finite: unsafe fn(&[T], &Finite, &mut [u8]),
    widen: impl Fn(T) -> f32,
) {
    assert_lengths(block.len(), out.len());
    match &scale.kind {
        // SAFETY: `finite` is from a table, which is only handed out where its instruction set is
        // available.
        Kind::Finite(scale) => unsafe { finite(block, scale, out) },
        Kind::Zero => out.fill(0),
        Kind::NonFinite => {
            for (&x, q) in block.iter().zip(out.as_chunks_mut().0) {
                *q = class::encode(widen(x)).to_le_bytes();
            }
        }
    }
}

/// The way back of [`quantize`].
#[inline]
fn dequantize<T: Copy>(
    sums: &[u8],
    scale: &Scale,
    divisor: Divisor,
    out: &mut [T],
    finite: unsafe fn(&[u8], f64, &mut [T]),
    narrow: impl Fn(f32) -> T,
) {
    assert_lengths(out.len(), sums.len());
    match &scale.kind {
        // SAFETY: `finite` is from a table, which is only handed out where its instruction set is
        // available.
        Kind::Finite(scale) => unsafe { finite(sums, scale.inverse(divisor), out) },
        // The sums do not matter: no worker had anything but zeros to add.
        Kind::Zero => out.fill(narrow(0.0)),
        Kind::NonFinite => {
            for (a, y) in sums.as_chunks().0.iter().zip(out) {
                *y = narrow(class::decode(i32::from_le_bytes(*a)));
            }
        }
    }
}
