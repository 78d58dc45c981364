//! Tensors that say what they hold.

use fanin_protocol::{Elements, Layer, Tensor};
use fanin_wire::{LossBound, Participants};

/// A tensor with its place in the job.
#[derive(Clone, Debug)]
pub struct Numbered {
    /// Which of its worker's tensors it is.
    pub number: usize,
    /// Its place in the model.
    pub layer: Layer,
    /// Its own loss bound.
    pub loss_bound: Option<LossBound>,
    /// The ranks that contribute to it.
    pub participants: Participants,
    /// Its elements.
    pub values: Values,
}

/// Elements of one type.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "each is called as its dtype")]
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

impl Numbered {
    /// A tensor that is no layer of a model.
    #[must_use]
    pub fn new(number: usize, values: Values) -> Self {
        Self { number, layer: Layer::default(), loss_bound: None, participants: Participants::ALL, values }
    }
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

    fn loss_bound(&self) -> Option<LossBound> {
        self.loss_bound
    }

    fn participants(&self) -> Participants {
        self.participants
    }
}

impl Values {
    /// How many elements there are.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "no test asks")]
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

    /// Bytes of one element.
    #[must_use]
    pub const fn element_bytes(&self) -> usize {
        match self {
            Self::Float64(_) | Self::Int64(_) => 8,
            Self::Float32(_) | Self::Int32(_) => 4,
            Self::Float16(_) | Self::Bfloat16(_) => 2,
            Self::Int8(_) | Self::Uint8(_) => 1,
        }
    }

    /// Whether the elements are no integers.
    #[must_use]
    pub const fn is_float(&self) -> bool {
        matches!(self, Self::Float32(_) | Self::Float64(_) | Self::Float16(_) | Self::Bfloat16(_))
    }

    /// The bits, for results that must be the same on all ranks.
    #[must_use]
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

    /// An element.
    #[must_use]
    pub fn at(&self, at: usize) -> f64 {
        match self {
            Self::Float32(x) => x[at].into(),
            Self::Float64(x) => x[at],
            Self::Float16(x) => of_half(x[at]),
            Self::Bfloat16(x) => f32::from_bits(u32::from(x[at]) << 16).into(),
            Self::Int32(x) => x[at].into(),
            Self::Int64(x) => x[at] as f64,
            Self::Int8(x) => x[at].into(),
            Self::Uint8(x) => x[at].into(),
        }
    }

    /// All elements, to be compared with a tolerance.
    #[must_use]
    pub fn to_f64(&self) -> Vec<f64> {
        (0..self.len()).map(|at| self.at(at)).collect()
    }

    /// A number as this type has it: the nearest one; integers are cut off towards zero.
    #[must_use]
    pub fn rounded(&self, value: f64) -> f64 {
        match self {
            Self::Int32(_) | Self::Int64(_) | Self::Int8(_) | Self::Uint8(_) => value.trunc(),
            Self::Float32(_) => f64::from(value as f32),
            Self::Float64(_) => value,
            Self::Float16(_) => of_half(float16_bits(value)),
            Self::Bfloat16(_) => f64::from(f32::from_bits(u32::from(bfloat16_bits(value as f32)) << 16)),
        }
    }
}

/// The nearest bfloat16, ties to even, as a worker rounds parameters.
#[must_use]
pub const fn bfloat16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// The nearest float16 of a number that is none of its least or largest.
#[must_use]
pub fn float16_bits(value: f64) -> u16 {
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
        31 if mantissa > 0 => f64::NAN,
        31 => f64::INFINITY,
        0 => f64::from(mantissa) / 1024.0 / 16384.0,
        _ => (1.0 + f64::from(mantissa) / 1024.0) * (f64::from(exponent) - 15.0).exp2(),
    };
    if bits >> 15 == 0 { value } else { -value }
}
