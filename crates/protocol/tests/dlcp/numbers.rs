//! Tensors of numbers that tell who is in their sum.

use fanin_protocol::{Elements, Layer, Tensor};
use fanin_wire::{Dtype, Op};

/// A tensor of one type, with its place in the job.
#[derive(Clone, Debug)]
pub struct Numbered {
    pub number: usize,
    pub layer: Layer,
    pub values: Values,
}

#[derive(Clone, Debug)]
pub enum Values {
    Float32(Vec<f32>),
    Float64(Vec<f64>),
    Float16(Vec<u16>),
    Bfloat16(Vec<u16>),
    Int32(Vec<i32>),
    Int64(Vec<i64>),
    Int8(Vec<i8>),
    Uint8(Vec<u8>),
}

impl Tensor for Numbered {
    fn elements(&mut self) -> Elements<'_> {
        match &mut self.values {
            Values::Float32(x) => Elements::Float32(x),
            Values::Float64(x) => Elements::Float64(x),
            Values::Float16(x) => Elements::Float16(x),
            Values::Bfloat16(x) => Elements::Bfloat16(x),
            Values::Int32(x) => Elements::Int32(x),
            Values::Int64(x) => Elements::Int64(x),
            Values::Int8(x) => Elements::Int8(x),
            Values::Uint8(x) => Elements::Uint8(x),
        }
    }

    fn layer(&self) -> Layer {
        self.layer
    }
}

impl Values {
    /// As many of worker `worker`: 2^worker, and its other sign at every third, so that a block's magnitudes differ from place to place.
    pub fn of_worker(dtype: Dtype, worker: usize, elements: usize) -> Self {
        let value = |at: usize| weight(worker) * sign(at);
        let all = (0..elements).map(value);
        match dtype {
            Dtype::Float32 => Self::Float32(all.map(|x| x as f32).collect()),
            Dtype::Float64 => Self::Float64(all.collect()),
            Dtype::Bfloat16 => Self::Bfloat16(all.map(|x| ((x as f32).to_bits() >> 16) as u16).collect()),
            Dtype::Int32 => Self::Int32(all.map(|x| x as i32).collect()),
            Dtype::Int64 => Self::Int64(all.map(|x| x as i64).collect()),
            Dtype::Float16 => Self::Float16(all.map(half).collect()),
            Dtype::Int8 => Self::Int8(all.map(|x| x as i8).collect()),
            Dtype::Uint8 => Self::Uint8(all.map(|x| x.abs() as u8).collect()),
        }
    }

    pub fn len(&self) -> usize {
        match self {
            Self::Float32(x) => x.len(),
            Self::Float64(x) => x.len(),
            Self::Float16(x) | Self::Bfloat16(x) => x.len(),
            Self::Int32(x) => x.len(),
            Self::Int64(x) => x.len(),
            Self::Int8(x) => x.len(),
            Self::Uint8(x) => x.len(),
        }
    }

    pub fn element_bytes(&self) -> usize {
        match self {
            Self::Float64(_) | Self::Int64(_) => 8,
            Self::Float32(_) | Self::Int32(_) => 4,
            Self::Float16(_) | Self::Bfloat16(_) => 2,
            Self::Int8(_) | Self::Uint8(_) => 1,
        }
    }

    /// The bits, for what must be the same on all ranks.
    pub fn bits(&self) -> Vec<u64> {
        match self {
            Self::Float32(x) => x.iter().map(|x| x.to_bits().into()).collect(),
            Self::Float64(x) => x.iter().map(|x| x.to_bits()).collect(),
            Self::Float16(x) | Self::Bfloat16(x) => x.iter().map(|x| (*x).into()).collect(),
            Self::Int32(x) => x.iter().map(|x| *x as u64).collect(),
            Self::Int64(x) => x.iter().map(|x| *x as u64).collect(),
            Self::Int8(x) => x.iter().map(|x| *x as u64).collect(),
            Self::Uint8(x) => x.iter().map(|x| (*x).into()).collect(),
        }
    }

    /// An element, without the sign of its place.
    fn at(&self, at: usize) -> f64 {
        let value = match self {
            Self::Float32(x) => x[at].into(),
            Self::Float64(x) => x[at],
            Self::Float16(x) => of_half(x[at]),
            Self::Bfloat16(x) => f32::from_bits(u32::from(x[at]) << 16).into(),
            Self::Int32(x) => x[at].into(),
            Self::Int64(x) => x[at] as f64,
            Self::Int8(x) => x[at].into(),
            Self::Uint8(x) => return x[at].into(),
        };
        value * sign(at)
    }

    /// Whose contributions the block `range` of this result is the sum of, all of its elements alike; `None` if it is no such sum.
    pub fn inside(&self, range: std::ops::Range<usize>, op: Op, contributors: &[usize]) -> Option<u64> {
        let everyone = contributors.iter().map(|worker| 1_u64 << worker).sum();
        let is_sum_of = |inside: &u64| {
            let expected = self.sum_of(*inside, op, contributors.len());
            range.clone().all(|at| self.at(at) == expected)
        };
        // Of integers nothing may be missing, and a quotient says less.
        let least = if self.is_float() { 0 } else { everyone };
        let of_these = (least..=everyone).filter(|inside| inside & !everyone == 0);
        let found: Vec<u64> = of_these.filter(is_sum_of).collect();
        assert!(found.len() <= 1, "sums that cannot be told apart: {found:?}");
        found.first().copied()
    }

    pub const fn is_float(&self) -> bool {
        matches!(self, Self::Float32(_) | Self::Float64(_) | Self::Float16(_) | Self::Bfloat16(_))
    }

    /// To the nearest of its type; integers are divided towards zero.
    fn rounded(&self, value: f64) -> f64 {
        match self {
            Self::Int32(_) | Self::Int64(_) | Self::Int8(_) | Self::Uint8(_) => value.trunc(),
            Self::Float32(_) => f64::from(value as f32),
            Self::Float64(_) => value,
            Self::Float16(_) => of_half(half(value)),
            Self::Bfloat16(_) => {
                let bits = (value as f32).to_bits();
                f64::from(f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000))
            }
        }
    }

    /// The sum that these workers' contributions are: where some are missing, as many times their mean as there are workers.
    fn sum_of(&self, inside: u64, op: Op, workers: usize) -> f64 {
        let count = inside.count_ones() as usize;
        let sum: f64 = (0..64).filter(|worker| inside >> worker & 1 != 0).map(weight).sum();
        match op {
            _ if inside == 0 => 0.0,
            Op::Sum if count == workers => self.rounded(sum),
            Op::Sum => self.rounded(self.rounded(sum / count as f64) * workers as f64),
            Op::Average => self.rounded(sum / count as f64),
        }
    }
}

const fn sign(at: usize) -> f64 {
    if at.is_multiple_of(3) { -1.0 } else { 1.0 }
}

fn weight(worker: usize) -> f64 {
    (1_u64 << worker) as f64
}

/// The nearest float16 of a number that is none of its least or largest.
fn half(value: f64) -> u16 {
    if value == 0.0 {
        return 0;
    }
    let exponent = value.abs().log2().floor();
    let mantissa = (value.abs() / exponent.exp2() * 1024.0).round_ties_even() as u16;
    // A mantissa that was rounded up to 2,048 carries into the exponent.
    let bits = ((exponent + 15.0) as u16) << 10;
    (bits + (mantissa - 1024)) | (u16::from(value < 0.0) << 15)
}

fn of_half(bits: u16) -> f64 {
    let (exponent, mantissa) = (bits >> 10 & 31, bits & 1023);
    let value = match exponent {
        0 => f64::from(mantissa) / 1024.0 / 16384.0,
        _ => (1.0 + f64::from(mantissa) / 1024.0) * (f64::from(exponent) - 15.0).exp2(),
    };
    if bits >> 15 == 0 { value } else { -value }
}
