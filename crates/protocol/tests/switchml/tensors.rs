//! The numbers that workers reduce, and what must come of them.

use fanin_quant::{Exponent, Scale};
use fanin_testworld::Values;
use fanin_wire::{Dtype, Op, PACKED_BLOCK, Pattern, WireDtype};
use half::{bf16, f16};
use oorandom::Rand64;

use crate::scenario::{Scenario, TensorShape};

/// The tensor `index` as `worker` contributes it: a function of the seed, so that it need not be kept.
pub fn contribution(scenario: &Scenario, index: usize, worker: u16) -> Values {
    let TensorShape { dtype, elements, .. } = scenario.tensors[index];
    let seed = (u128::from(scenario.seed) << 32) | ((index as u128) << 8) | u128::from(worker);
    let mut dice = Rand64::new(seed);
    // Now and then one worker has a number that is none.
    let special =
        (elements > 0 && dice.rand_range(0..12) == 0).then(|| dice.rand_range(0..elements as u64) as usize);
    // Blocks of very different size, some all zero.
    let mut size = 0.0;
    let native = scenario.wire_dtype.of_tensor(dtype, elements) == WireDtype::Native;
    let mut number = |i: usize| {
        if native {
            // Elements of any magnitude, each beside others, and now and then one that is none.
            let magnitude = 10f64.powf(dice.rand_float() * 60.0 - 30.0);
            return match dice.rand_range(0..40) {
                special @ 0..4 => [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0][special as usize],
                sign => magnitude * if sign % 2 == 0 { 1.0 } else { -1.0 },
            };
        }
        if i.is_multiple_of(64) {
            size = [0.0, 1e-4, 1.0, 1000.0][dice.rand_range(0..4) as usize];
        }
        if special == Some(i) {
            return [f64::NAN, f64::INFINITY, f64::NEG_INFINITY][usize::from(worker) % 3];
        }
        (dice.rand_float() - 0.5) * size
    };
    let each = 0..elements;
    match dtype {
        Dtype::Float32 => Values::Float32(each.map(|i| number(i) as f32).collect()),
        Dtype::Float16 => {
            // As many orders of magnitude as the type has.
            let fit = |x: f64| if native { x.signum() * x.abs().powf(0.15) } else { x };
            Values::Float16(each.map(|i| f16::from_f32(fit(number(i)) as f32).to_bits()).collect())
        }
        Dtype::Bfloat16 => {
            Values::Bfloat16(each.map(|i| bf16::from_f32(number(i) as f32).to_bits()).collect())
        }
        Dtype::Float64 => Values::Float64(each.map(number).collect()),
        Dtype::Int32 => Values::Int32(each.map(|_| dice.rand_u64() as i32).collect()),
        Dtype::Int64 => Values::Int64(each.map(|_| dice.rand_u64() as i64).collect()),
        Dtype::Uint8 => Values::Uint8(each.map(|_| dice.rand_u64() as u8).collect()),
        Dtype::Int8 => Values::Int8(each.map(|_| dice.rand_u64() as i8).collect()),
    }
}

/// An element of a tensor of integers.
fn integer(values: &Values, i: usize) -> i64 {
    match values {
        Values::Int32(x) => x[i].into(),
        Values::Int64(x) => x[i],
        Values::Uint8(x) => x[i].into(),
        Values::Int8(x) => x[i].into(),
        _ => unreachable!("floats are no integers"),
    }
}

/// Whether element `i` is `value`, rounded to its type.
fn is(values: &Values, i: usize, value: f32) -> bool {
    match values {
        Values::Float32(x) => x[i].to_bits() == value.to_bits(),
        Values::Float16(x) => x[i] == f16::from_f32(value).to_bits(),
        Values::Bfloat16(x) => x[i] == bf16::from_f32(value).to_bits(),
        _ => false,
    }
}

fn block_exponent(values: &Values, range: std::ops::Range<usize>) -> Exponent {
    match values {
        Values::Float32(x) => fanin_quant::exponent_f32(&x[range]),
        Values::Float16(x) => fanin_quant::exponent_f16(&x[range]),
        Values::Bfloat16(x) => fanin_quant::exponent_bf16(&x[range]),
        _ => Exponent::ZERO,
    }
}

/// Every worker that has a tensor has what it should.
pub fn check(scenario: &Scenario, index: usize, done: &[(u16, &Values)], size_class: usize) {
    let pattern = scenario.tensors[index].pattern;
    let mut first: Option<Vec<u64>> = None;
    for (worker, values) in done {
        let bits = values.bits();
        let moved_from = match pattern {
            Pattern::Broadcast(root) => Some(root.0.into()),
            // It keeps what it had.
            Pattern::Reduce(root) if u16::from(root.0) != *worker => Some(*worker),
            _ => None,
        };
        if let Some(from) = moved_from {
            let expected = contribution(scenario, index, from).bits();
            assert!(
                bits == expected,
                "worker {worker} has not what {from} had of tensor {index}: {scenario:?}"
            );
            continue;
        }
        if let Some(first) = &first {
            assert!(*first == bits, "worker {worker} has other bits of tensor {index}: {scenario:?}");
            continue;
        }
        let wrong = wrong_element(scenario, index, values, size_class);
        assert_eq!(wrong, None, "worker {worker} has no sum of tensor {index}: {scenario:?}");
        first = Some(bits);
    }
}

/// The first element of `result` that is not the sum of all workers' contributions, if any.
///
/// Integers must be exact, and what travels as it is the very bits that `docs/protocols/switchml.md` defines: summed in the order
/// of the workers, each rack's sum rounded to the type. Other floats must be within n/f of the exact sum (SwitchML Theorem 1), and half a unit in the last place
/// of their type for the one rounding at the end. Floats that travelled as bfloat16 must be within the error that
/// `docs/protocols/switchml.md` states, and besides be the very bits that it defines, whatever the order of
/// arrival. The bits of floats that travelled as int8 or int4 are chance: they must be within the error.
fn wrong_element(scenario: &Scenario, index: usize, result: &Values, size_class: usize) -> Option<usize> {
    let TensorShape { dtype, op, elements, .. } = scenario.tensors[index];
    let n = u32::from(scenario.workers);
    let parts: Vec<Values> = (0..scenario.workers).map(|w| contribution(scenario, index, w)).collect();
    let divide = |sum: i64| if op == Op::Average { sum / i64::from(n) } else { sum };
    let integers = |wrap: fn(i64) -> i64| {
        (0..elements).find(|&i| {
            let sum = parts.iter().fold(0, |sum: i64, part| sum.wrapping_add(integer(part, i)));
            integer(result, i) != divide(wrap(sum))
        })
    };
    match dtype {
        Dtype::Int32 => return integers(|sum| (sum as i32).into()),
        Dtype::Int64 => return integers(|sum| sum),
        Dtype::Uint8 => return integers(|sum| (sum as u8).into()),
        Dtype::Int8 => return integers(|sum| (sum as i8).into()),
        Dtype::Float32 | Dtype::Float16 | Dtype::Bfloat16 | Dtype::Float64 => {}
    }
    let on_wire = scenario.wire_dtype.of_tensor(dtype, elements);
    if on_wire == WireDtype::Native {
        let (bits, n) = (result.bits(), (op == Op::Average).then_some(f64::from(n)));
        let of_rack = |parts: &[f64]| of_bits(dtype, in_order(dtype, parts.iter().copied(), None));
        return (0..elements).find(|&i| {
            let at_root = at_root(scenario, |w| parts[w].at(i), of_rack);
            bits[i] != in_order(dtype, at_root.into_iter(), n)
        });
    }
    let levels = (0..scenario.workers).map(|w| scenario.racks.way(w).len()).max().unwrap_or(0);
    // The sum of what is not finite; a finite neighbour was not carried, and must not look as if it was.
    let is_of_specials = |i: usize| {
        let specials = parts.iter().map(|part| part.at(i)).filter(|value| !value.is_finite());
        let expected = specials.reduce(|a, b| a + b).unwrap_or(f64::NAN);
        let value = result.at(i);
        value == expected || (value.is_nan() && expected.is_nan())
    };
    let block_elements = match on_wire {
        WireDtype::Int8 | WireDtype::Int4 => PACKED_BLOCK,
        _ => on_wire.chunk_elements(size_class, dtype),
    };
    let divisor = if op == Op::Average { f64::from(n) } else { 1.0 };
    let half_unit = match dtype {
        Dtype::Float32 => f64::from(f32::EPSILON) / 2.0,
        Dtype::Float16 => f64::from(f16::EPSILON) / 2.0,
        _ => f64::from(bf16::EPSILON) / 2.0,
    };
    // Below this a type has no normal numbers: its spacing is absolute.
    let smallest = if dtype == Dtype::Float16 { f64::from(f16::MIN_POSITIVE_SUBNORMAL) } else { 1e-40 };
    (0..elements).step_by(block_elements).find_map(|begin| {
        let range = begin..(begin + block_elements).min(elements);
        let exponent = parts.iter().map(|part| block_exponent(part, range.clone())).max()?;
        if exponent == Exponent::NON_FINITE {
            return range.into_iter().find(|&i| !is_of_specials(i));
        }
        if on_wire.is_packed() {
            let largest = |part: &Values| range.clone().map(|i| part.at(i).abs()).fold(0.0, f64::max);
            let sizes = parts.iter().map(largest).sum();
            return range.clone().find(|&i| {
                let error =
                    packed_error(on_wire, sizes, parts.iter().map(|part| part.at(i).abs()).sum(), levels);
                let exact: f64 = parts.iter().map(|part| part.at(i)).sum();
                let bound = (error + (exact.abs() + error) * half_unit * 1.01) / divisor + smallest;
                (result.at(i) - exact / divisor).abs() > bound
            });
        }
        if on_wire == WireDtype::Bfloat16 {
            let fixed_point = FixedPoint::new(exponent, n);
            return range.into_iter().find(|&i| {
                let exact: f64 = parts.iter().map(|part| part.at(i)).sum();
                let sizes: f64 = parts.iter().map(|part| part.at(i).abs()).sum();
                let error = fixed_point.error(exact, sizes, n, levels);
                let bound = (error + (exact.abs() + error) * half_unit * 1.01) / divisor + smallest;
                let of_rack = |parts: &[f64]| f64::from(fixed_point.sum(parts.iter().copied()));
                let sum = fixed_point.sum(at_root(scenario, |w| parts[w].at(i), of_rack).into_iter());
                let expected = if op == Op::Average { sum / n as f32 } else { sum };
                (result.at(i) - exact / divisor).abs() > bound || !is(result, i, expected)
            });
        }
        let error = Scale::new(exponent, n).factor().map_or(0.0, |f| f64::from(n) / f);
        range.into_iter().find(|&i| {
            let exact: f64 = parts.iter().map(|part| part.at(i)).sum::<f64>() / divisor;
            let bound = error / divisor + (exact.abs() + error) * half_unit * 1.01 + smallest;
            (result.at(i) - exact).abs() > bound
        })
    })
}

/// What comes to the root for an element: of the workers that send there their numbers, of racks what `of_rack` makes of theirs. Each
/// switch has its parts in the order of their lowest ranks.
fn at_root(scenario: &Scenario, number: impl Fn(usize) -> f64, of_rack: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let racks = &scenario.racks;
    // Of each rack, and last of the root: the lowest rank of each part, and the part.
    let root = racks.upstreams.len();
    let mut parts: Vec<Vec<(u16, f64)>> = vec![Vec::new(); root + 1];
    for worker in 0..scenario.workers {
        let own = racks.way(worker).first().copied().unwrap_or(root);
        parts[own].push((worker, number(usize::from(worker))));
    }
    let ordered = |mut parts: Vec<(u16, f64)>| {
        parts.sort_by_key(|(rank, _)| *rank);
        parts
    };
    // A rack's upstream comes before it.
    for rack in (0..root).rev() {
        let own = ordered(std::mem::take(&mut parts[rack]));
        if let Some((lowest, _)) = own.first() {
            let sum = of_rack(&own.iter().map(|(_, x)| *x).collect::<Vec<_>>());
            parts[racks.upstreams[rack].unwrap_or(root)].push((*lowest, sum));
        }
    }
    ordered(parts.swap_remove(root)).into_iter().map(|(_, x)| x).collect()
}

/// The number that has these bits.
fn of_bits(dtype: Dtype, bits: u64) -> f64 {
    match dtype {
        Dtype::Float64 => f64::from_bits(bits),
        Dtype::Float16 => f16::from_bits(bits as u16).to_f64(),
        Dtype::Bfloat16 => bf16::from_bits(bits as u16).to_f64(),
        _ => f64::from(f32::from_bits(bits as u32)),
    }
}

/// The bits of a sum, or a mean, that was made in the order of the workers and rounded once.
fn in_order(dtype: Dtype, mut contributions: impl Iterator<Item = f64>, divisor: Option<f64>) -> u64 {
    let first = contributions.next().unwrap_or(0.0);
    let (total, error) = contributions.fold((first, 0.0), |(total, error), x| {
        let sum: f64 = total + x;
        let of_x = sum - total;
        (sum, error + ((total - (sum - of_x)) + (x - of_x)))
    });
    let corrected = dtype == Dtype::Float64 && error != 0.0 && total.is_finite();
    let total = if corrected { total + error } else { total };
    let value = divisor.map_or(total, |n| total / n);
    // Searched for among all numbers of 16 bits; `beyond` is what an infinity stands for.
    let nearest = |infinity: u16, beyond: f64, value_of: fn(u16) -> f64| {
        let value_of = |bits| if bits == infinity { beyond } else { value_of(bits) };
        let magnitude = value.abs().min(beyond);
        let (mut below, mut above) = (0, infinity);
        while above - below > 1 {
            let middle = below.midpoint(above);
            if value_of(middle) <= magnitude { below = middle } else { above = middle }
        }
        let (down, up) = (magnitude - value_of(below), value_of(above) - magnitude);
        let nearest = if down < up || (down == up && below.is_multiple_of(2)) { below } else { above };
        u64::from(nearest | if value.is_sign_negative() { 0x8000 } else { 0 })
    };
    match dtype {
        Dtype::Float64 if value.is_nan() => 0x7ff8_0000_0000_0000,
        Dtype::Float64 => value.to_bits(),
        Dtype::Float16 if value.is_nan() => 0x7e00,
        Dtype::Float16 => nearest(0x7c00, 65536.0, |bits| f16::from_bits(bits).to_f64()),
        Dtype::Bfloat16 if value.is_nan() => 0x7fc0,
        Dtype::Bfloat16 => nearest(0x7f80, 2f64.powi(128), |bits| bf16::from_bits(bits).to_f64()),
        _ if value.is_nan() => 0x7fc0_0000,
        _ => (value as f32).to_bits().into(),
    }
}

/// How far a sum that travelled as int8 or int4 may be off: by a rounding of each contribution, of each rack's sum and of the sum of
/// all. `sizes` is the sum of the contributions' largest magnitudes in the block, and `own` that of the element's.
fn packed_error(wire_dtype: WireDtype, sizes: f64, own: f64, levels: usize) -> f64 {
    // Less than a step, or with coarse levels half of what is rounded.
    let rounding = |size: f64, own: f64| {
        let (part, of_own) = if wire_dtype == WireDtype::Int8 { (63.5, 0.0) } else { (6.0, 0.5) };
        size / part + own * of_own + 2f64.powi(-126)
    };
    // The contributions, the racks, the root; and at each but the first the additions in float32. Blocks' sizes grow by errors of
    // their largest elements, of which those of `sizes` itself are the most.
    let roundings = levels + 2;
    let (mut error, mut of_largest) = (0.0, 0.0);
    for _ in 0..roundings {
        let added = (sizes + of_largest) * 2f64.powi(-16);
        error += rounding(sizes + of_largest, own + error) + added;
        of_largest += rounding(sizes + of_largest, sizes + of_largest) + added;
    }
    error
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

    /// How far the sum may be from `exact`; `sizes` is the sum of the contributions' absolute values. Each level of racks rounds once more.
    fn error(&self, exact: f64, sizes: f64, workers: u32, levels: usize) -> f64 {
        let unit = 2f64.powi(-8);
        let Some(factor) = self.factor else { return 0.0 };
        let contributions = unit * sizes + f64::from(workers) / factor / 2.0;
        let rounding = unit + 2f64.powi(-23);
        let error = (0..levels).fold(contributions, |error, _| error + rounding * (sizes + error));
        error + rounding * (exact.abs() + error)
    }
}
