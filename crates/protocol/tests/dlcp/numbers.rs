//! Numbers that tell who is in their sum.

use fanin_testworld::{Values, float16_bits};
use fanin_wire::{Dtype, Op};

/// As many of worker `worker`: 2^worker, and its other sign at every third, so that a block's magnitudes differ from place to place.
pub fn of_worker(dtype: Dtype, worker: usize, elements: usize) -> Values {
    let value = |at: usize| weight(worker) * sign(at);
    let all = (0..elements).map(value);
    match dtype {
        Dtype::Float32 => Values::Float32(all.map(|x| x as f32).collect()),
        Dtype::Float64 => Values::Float64(all.collect()),
        Dtype::Bfloat16 => Values::Bfloat16(all.map(|x| ((x as f32).to_bits() >> 16) as u16).collect()),
        Dtype::Int32 => Values::Int32(all.map(|x| x as i32).collect()),
        Dtype::Int64 => Values::Int64(all.map(|x| x as i64).collect()),
        Dtype::Float16 => Values::Float16(all.map(float16_bits).collect()),
        Dtype::Int8 => Values::Int8(all.map(|x| x as i8).collect()),
        Dtype::Uint8 => Values::Uint8(all.map(|x| x.abs() as u8).collect()),
    }
}

/// Whose contributions the block `range` of this result is the sum of, all of its elements alike; `None` if it is no such sum.
pub fn inside(values: &Values, range: std::ops::Range<usize>, op: Op, contributors: &[usize]) -> Option<u64> {
    let everyone = contributors.iter().map(|worker| 1_u64 << worker).sum();
    let is_sum_of = |inside: &u64| {
        let expected = sum_of(values, *inside, op, contributors.len());
        range.clone().all(|at| at_its_place(values, at) == expected)
    };
    // Of integers nothing may be missing, and a quotient says less.
    let least = if values.is_float() { 0 } else { everyone };
    let of_these = (least..=everyone).filter(|inside| inside & !everyone == 0);
    let found: Vec<u64> = of_these.filter(is_sum_of).collect();
    assert!(found.len() <= 1, "sums that cannot be told apart: {found:?}");
    found.first().copied()
}

/// An element, without the sign of its place.
fn at_its_place(values: &Values, at: usize) -> f64 {
    if let Values::Uint8(_) = values { values.at(at) } else { values.at(at) * sign(at) }
}

/// The sum that these workers' contributions are: where some are missing, as many times their mean as there are workers.
fn sum_of(values: &Values, inside: u64, op: Op, workers: usize) -> f64 {
    let count = inside.count_ones() as usize;
    let sum: f64 = (0..64).filter(|worker| inside >> worker & 1 != 0).map(weight).sum();
    match op {
        _ if inside == 0 => 0.0,
        Op::Sum if count == workers => values.rounded(sum),
        Op::Sum => values.rounded(values.rounded(sum / count as f64) * workers as f64),
        Op::Average => values.rounded(sum / count as f64),
    }
}

const fn sign(at: usize) -> f64 {
    if at.is_multiple_of(3) { -1.0 } else { 1.0 }
}

fn weight(worker: usize) -> f64 {
    (1_u64 << worker) as f64
}
