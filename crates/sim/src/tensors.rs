//! The numbers that workers reduce, and what must come of them.

use fanin_protocol::{Elements, Tensor};
use fanin_quant::{Exponent, Scale};
use fanin_wire::{Dtype, Op, WireDtype};
use half::{bf16, f16};
use oorandom::Rand64;

use crate::scenario::{Scenario, TensorShape};

/// One worker's copy of a tensor.
#[derive(Clone, Debug)]
pub(crate) struct Copy {
    /// Which of the scenario's tensors.
    pub(crate) index: usize,
    pub(crate) numbers: Numbers,
}

#[derive(Clone, Debug)]
pub(crate) enum Numbers {
    Float32(Vec<f32>),
    Float16(Vec<u16>),
    Bfloat16(Vec<u16>),
    Int32(Vec<i32>),
}

impl Tensor for Copy {
    fn elements(&mut self) -> Elements<'_> {
        match &mut self.numbers {
            Numbers::Float32(x) => Elements::Float32(x),
            Numbers::Float16(x) => Elements::Float16(x),
            Numbers::Bfloat16(x) => Elements::Bfloat16(x),
            Numbers::Int32(x) => Elements::Int32(x),
        }
    }
}

impl Copy {
    /// The tensor `index` as `worker` contributes it: a function of the seed, so that it need not be kept.
    pub(crate) fn contribution(scenario: &Scenario, index: usize, worker: u8) -> Self {
        let TensorShape { dtype, elements, .. } = scenario.tensors[index];
        let seed = (u128::from(scenario.seed) << 32) | ((index as u128) << 8) | u128::from(worker);
        let mut dice = Rand64::new(seed);
        // Now and then one worker has a number that is none.
        let special = (elements > 0 && dice.rand_range(0..12) == 0)
            .then(|| dice.rand_range(0..elements as u64) as usize);
        // Blocks of very different size, some all zero.
        let mut size = 0.0;
        let mut number = |i: usize| {
            if i.is_multiple_of(64) {
                size = [0.0, 1e-4, 1.0, 1000.0][dice.rand_range(0..4) as usize];
            }
            if special == Some(i) {
                return [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][usize::from(worker) % 3];
            }
            ((dice.rand_float() - 0.5) * size) as f32
        };
        let numbers = match dtype {
            Dtype::Float32 => Numbers::Float32((0..elements).map(number).collect()),
            Dtype::Float16 => {
                Numbers::Float16((0..elements).map(|i| f16::from_f32(number(i)).to_bits()).collect())
            }
            Dtype::Bfloat16 => {
                Numbers::Bfloat16((0..elements).map(|i| bf16::from_f32(number(i)).to_bits()).collect())
            }
            Dtype::Int32 => Numbers::Int32((0..elements).map(|_| dice.rand_u64() as i32).collect()),
        };
        Self { index, numbers }
    }

    /// The bits of every element, to compare workers by.
    pub(crate) fn bits(&self) -> Vec<u32> {
        match &self.numbers {
            Numbers::Float32(x) => x.iter().map(|x| x.to_bits()).collect(),
            Numbers::Float16(x) | Numbers::Bfloat16(x) => x.iter().map(|x| u32::from(*x)).collect(),
            Numbers::Int32(x) => x.iter().map(|x| x.cast_unsigned()).collect(),
        }
    }

    fn value(&self, i: usize) -> f64 {
        match &self.numbers {
            Numbers::Float32(x) => f64::from(x[i]),
            Numbers::Float16(x) => f64::from(f16::from_bits(x[i])),
            Numbers::Bfloat16(x) => f64::from(bf16::from_bits(x[i])),
            Numbers::Int32(x) => f64::from(x[i]),
        }
    }

    /// Whether element `i` is `value`, rounded to its type.
    fn is(&self, i: usize, value: f32) -> bool {
        match &self.numbers {
            Numbers::Float32(x) => x[i].to_bits() == value.to_bits(),
            Numbers::Float16(x) => x[i] == f16::from_f32(value).to_bits(),
            Numbers::Bfloat16(x) => x[i] == bf16::from_f32(value).to_bits(),
            Numbers::Int32(_) => false,
        }
    }

    fn block_exponent(&self, range: std::ops::Range<usize>) -> Exponent {
        match &self.numbers {
            Numbers::Float32(x) => fanin_quant::exponent_f32(&x[range]),
            Numbers::Float16(x) => fanin_quant::exponent_f16(&x[range]),
            Numbers::Bfloat16(x) => fanin_quant::exponent_bf16(&x[range]),
            Numbers::Int32(_) => Exponent::ZERO,
        }
    }
}

/// The first element of `result` that is not the sum of all workers' contributions, if any.
///
/// Integers must be exact. Floats must be within n/f of the exact sum (SwitchML Theorem 1), and half a unit in the last place
/// of their type for the one rounding at the end. Floats that travelled as bfloat16 must be within the error that
/// `docs/protocols/switchml.md` states, and besides be the very bits that it defines, whatever the order of arrival.
pub(crate) fn wrong_element(scenario: &Scenario, result: &Copy, chunk_elements: usize) -> Option<usize> {
    let TensorShape { dtype, op, elements } = scenario.tensors[result.index];
    let n = u32::from(scenario.workers);
    let parts: Vec<Copy> =
        (0..scenario.workers).map(|w| Copy::contribution(scenario, result.index, w)).collect();
    if let Numbers::Int32(sums) = &result.numbers {
        return (0..elements).find(|&i| {
            let sum = parts.iter().fold(0i32, |sum, part| match &part.numbers {
                Numbers::Int32(x) => sum.wrapping_add(x[i]),
                _ => sum,
            });
            let expected = if op == Op::Average { sum / n.cast_signed() } else { sum };
            sums[i] != expected
        });
    }
    let on_wire = scenario.wire_dtype.of_tensor(dtype);
    let divisor = if op == Op::Average { f64::from(n) } else { 1.0 };
    let half_unit = match dtype {
        Dtype::Float32 => f64::from(f32::EPSILON) / 2.0,
        Dtype::Float16 => f64::from(f16::EPSILON) / 2.0,
        _ => f64::from(bf16::EPSILON) / 2.0,
    };
    // Below this a type has no normal numbers: its spacing is absolute.
    let smallest = if dtype == Dtype::Float16 { f64::from(f16::MIN_POSITIVE_SUBNORMAL) } else { 1e-40 };
    (0..elements).step_by(chunk_elements).find_map(|begin| {
        let range = begin..(begin + chunk_elements).min(elements);
        let exponent = parts.iter().map(|part| part.block_exponent(range.clone())).max()?;
        if exponent == Exponent::NON_FINITE {
            return range.into_iter().find(|&i| {
                // The sum of what is not finite; a finite neighbour was not carried, and must not look as if it was.
                let specials = parts.iter().map(|part| part.value(i)).filter(|value| !value.is_finite());
                let expected = specials.reduce(|a, b| a + b).unwrap_or(f64::NAN);
                let value = result.value(i);
                !(value == expected || (value.is_nan() && expected.is_nan()))
            });
        }
        if on_wire == WireDtype::Bfloat16 {
            let fixed_point = FixedPoint::new(exponent, n);
            return range.into_iter().find(|&i| {
                let exact: f64 = parts.iter().map(|part| part.value(i)).sum();
                let sizes: f64 = parts.iter().map(|part| part.value(i).abs()).sum();
                let error = fixed_point.error(exact, sizes, n);
                let bound = (error + (exact.abs() + error) * half_unit * 1.01) / divisor + smallest;
                let sum = fixed_point.sum(parts.iter().map(|part| part.value(i)));
                let expected = if op == Op::Average { sum / n as f32 } else { sum };
                (result.value(i) - exact / divisor).abs() > bound || !result.is(i, expected)
            });
        }
        let error = Scale::new(exponent, n).factor().map_or(0.0, |f| f64::from(n) / f);
        range.into_iter().find(|&i| {
            let exact: f64 = parts.iter().map(|part| part.value(i)).sum::<f64>() / divisor;
            let bound = error / divisor + (exact.abs() + error) * half_unit * 1.01 + smallest;
            (result.value(i) - exact).abs() > bound
        })
    })
}

/// A sum that travelled as bfloat16, as its definition reads, in arithmetic that has no order: integers.
struct FixedPoint {
    /// `2^k`; none where all contributions are zero.
    factor: Option<f64>,
}

impl FixedPoint {
    fn new(exponent: Exponent, workers: u32) -> Self {
        let bits_of_workers = (0..).find(|bits| workers <= 1 << bits).unwrap_or(0);
        let k = exponent.finite().map(|m| 30 - bits_of_workers - i32::from(m));
        Self { factor: k.map(|k| 2f64.powi(k)) }
    }

    fn sum(&self, contributions: impl Iterator<Item = f64>) -> f32 {
        let Some(factor) = self.factor else { return 0.0 };
        // Exact: a contribution is an f32.
        let rounded = |x: f64| f64::from(bf16::from_f32(x as f32));
        let sum: i64 = contributions.map(|x| (rounded(x) * factor).round_ties_even() as i64).sum();
        f32::from(bf16::from_f32((sum as f64 / factor) as f32))
    }

    /// How far the sum may be from `exact`; `sizes` is the sum of the contributions' absolute values.
    fn error(&self, exact: f64, sizes: f64, workers: u32) -> f64 {
        let unit = 2f64.powi(-8);
        let Some(factor) = self.factor else { return 0.0 };
        let contributions = unit * sizes + f64::from(workers) / factor / 2.0;
        contributions + (unit + 2f64.powi(-23)) * (exact.abs() + contributions)
    }
}
