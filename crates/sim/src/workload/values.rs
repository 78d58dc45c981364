//! The numbers that workers reduce in a workload: a function of the seed, so that the sum of any element is known without
//! keeping what went into it.
//!
//! An element is an integer times a unit. The integer is above zero, up to a sign that all workers share, and says who it is of: a part
//! that depends on tensor and element, and one of the worker's rank, turned by another amount in each element. So a contribution that
//! is missing, doubled or in another's place changes the sum's integer in every single element. (Where there are more than
//! 64 workers a rank has several digits, and four elements one after the other show all of them.) Unit and integers are so that no
//! system may be wrong by half a unit, however it rounds: what is wrong by less than its own bound is the sum, and nothing else is.
//!
//! Where a scenario wants overflows, the numbers of some packets are 2^12 times as large. A packet is what SwitchML and ATP's
//! dynamic scaling find one factor for: the bound of the one does not cover what is wrong in the next.

mod given;
mod inside;

use fanin_protocol::{Elements, Layer, Tensor};

use super::scenario::JobPlan;
pub(crate) use given::{Given, Origin};
pub use inside::Inside;

/// How much larger the numbers of an overflowing packet are, as a power of two.
const LARGE_SHIFT: i32 = 12;
/// Of a job, beyond which its sums are not exact in an f32 any more.
pub(crate) const WORKERS_MAX: u32 = 4096;
/// Values of a digit of a rank.
const DIGITS: u32 = 64;
/// Digits that a rank may have; element `i` shows digit `i` modulo this.
const PLACES: usize = 4;
/// Of half a unit: how far a result may be from the sum at most, whatever its system says of itself.
const BOUND_MAX: f64 = 0.7;
/// What a sum under ATP's static factor, 10^8, may reach.
const STATIC_SUM: f64 = 21.0;

/// What the numbers of a job's tensors depend on.
#[derive(Clone, Debug)]
pub struct Source {
    seed: u64,
    workers: u32,
    /// Share of packets whose sum does not fit the static factor.
    large: f64,
    /// Whether the numbers are integers.
    integers: bool,
    /// Elements of a packet.
    packet: usize,
    /// How many of them, the first, are there: tensors consist of these.
    carried: usize,
    /// What floats are multiples of; a power of two.
    unit: f64,
    /// Integers are below two to the power of this.
    bits: u32,
    /// Less one.
    digits: u32,
    /// How far a sum may be from the exact one: in a packet, and in one whose numbers are large.
    bounds: [f64; 2],
    /// The sum over all workers of a place's digit, by what it is turned by.
    totals: Vec<[u32; DIGITS as usize]>,
}

/// One worker's copy of a tensor.
#[derive(Clone, Debug)]
pub struct Gradient {
    /// Its number in the job.
    pub tensor: u64,
    numbers: Numbers,
    /// Elements of the tensor, also those that are there in length alone.
    whole: usize,
    /// Whose gradient it is.
    layer: Layer,
}

/// The elements of a tensor, or some of them.
#[derive(Clone, Debug, PartialEq)]
pub enum Numbers {
    /// As gradients are.
    Float32(Vec<f32>),
    /// Summed modulo 2^32.
    Int32(Vec<i32>),
}

impl Numbers {
    fn part(&self, range: std::ops::Range<usize>) -> Self {
        match self {
            Self::Float32(x) => Self::Float32(x[range].to_vec()),
            Self::Int32(x) => Self::Int32(x[range].to_vec()),
        }
    }

    fn count(&self) -> usize {
        match self {
            Self::Float32(x) => x.len(),
            Self::Int32(x) => x.len(),
        }
    }
}

impl Tensor for Gradient {
    fn elements(&mut self) -> Elements<'_> {
        match &mut self.numbers {
            Numbers::Float32(x) => Elements::Float32(x),
            Numbers::Int32(x) => Elements::Int32(x),
        }
    }

    fn whole_elements(&mut self) -> usize {
        self.whole
    }

    fn layer(&self) -> Layer {
        self.layer
    }
}

impl Gradient {
    /// A copy of some of its elements.
    pub(crate) fn part(&self, range: std::ops::Range<usize>) -> Self {
        Self { numbers: self.numbers.part(range), ..*self }
    }

    /// The same, of this layer.
    pub(crate) const fn of_layer(mut self, layer: Layer) -> Self {
        self.layer = layer;
        self
    }

    /// Adds `part` to the elements from `from` on.
    pub(crate) fn add(&mut self, from: usize, part: &Self) {
        match (&mut self.numbers, &part.numbers) {
            (Numbers::Float32(x), Numbers::Float32(y)) => {
                x[from..].iter_mut().zip(y).for_each(|(x, y)| *x += y);
            }
            (Numbers::Int32(x), Numbers::Int32(y)) => {
                x[from..].iter_mut().zip(y).for_each(|(x, y)| *x = x.wrapping_add(*y));
            }
            _ => unreachable!("the tensors of a job have one type"),
        }
    }

    /// Replaces the elements from `from` on by `part`.
    pub(crate) fn set(&mut self, from: usize, part: &Self) {
        match (&mut self.numbers, &part.numbers) {
            (Numbers::Float32(x), Numbers::Float32(y)) => x[from..from + y.len()].copy_from_slice(y),
            (Numbers::Int32(x), Numbers::Int32(y)) => x[from..from + y.len()].copy_from_slice(y),
            _ => unreachable!("the tensors of a job have one type"),
        }
    }

    /// Number of elements.
    pub(crate) fn count(&self) -> usize {
        self.numbers.count()
    }
}

impl Source {
    /// The numbers of a job.
    ///
    /// # Panics
    /// When it has more than [`WORKERS_MAX`] workers.
    #[must_use]
    pub fn new(plan: &JobPlan, seed: u64) -> Self {
        let workers = plan.workers.len() as u32;
        assert!((1..=WORKERS_MAX).contains(&workers), "{workers} workers");
        let n = f64::from(workers);
        // Each contribution is off by up to half of 10^-8 under the static factor: together by a quarter of a unit.
        let unit = power_of_two(floor_log2(2.0 * n * 1e-8) + 1);
        let most = [
            // A sum below 2^21 units is rounded by an eighth of a unit at most.
            2_097_152.0 / n,
            // SwitchML's Theorem 1 (and half of it ATP's dynamic scaling): a quarter of a unit.
            536_870_912.0 / (n * n),
            STATIC_SUM / (n * unit),
        ];
        let bits = floor_log2(most.into_iter().fold(f64::INFINITY, f64::min));
        let digits = DIGITS.min(1 << (bits - 1));
        let bound = |largest: i32| plan.system.bound(plan.workers.len(), power_of_two(largest));
        let largest = bits + floor_log2(unit);
        let (packet, carried) = plan.packet();
        let mut source = Self {
            seed,
            workers,
            large: plan.large_values,
            integers: plan.integers,
            packet,
            carried,
            unit,
            bits: bits as u32,
            digits: digits - 1,
            bounds: [0, LARGE_SHIFT].map(|shift| {
                let hides = unit * power_of_two(shift) / 2.0;
                bound(largest + shift).min(hides * BOUND_MAX)
            }),
            totals: Vec::new(),
        };
        source.totals = (0..PLACES)
            .map(|place| {
                let mut totals = [0; DIGITS as usize];
                for (turn, total) in totals.iter_mut().enumerate() {
                    let digit = |worker| source.turned(source.rank(worker)[place], turn as u32);
                    *total = (0..workers).map(digit).sum();
                }
                totals
            })
            .collect();
        source
    }

    /// What `worker` contributes to elements `from` to `from + elements` of a tensor, as far as they are there; in the memory of
    /// `old` if there is one.
    #[must_use]
    pub fn contribution(
        &self,
        old: Option<Gradient>,
        tensor: u64,
        worker: u32,
        from: usize,
        elements: usize,
    ) -> Gradient {
        let (key, rank) = (self.key(tensor), self.rank(worker));
        let integer = |i: usize| {
            let hash = hash(key, i);
            let digit = self.turned(rank[i % PLACES], self.turn(hash));
            signed(hash, 1 + self.common(hash) + digit)
        };
        let count = elements / self.packet * self.carried + (elements % self.packet).min(self.carried);
        let parts = (0..elements)
            .step_by(self.packet)
            .map(|begin| from + begin..from + elements.min(begin + self.carried));
        let numbers = if self.integers {
            let mut numbers = match old.map(|old| old.numbers) {
                Some(Numbers::Int32(numbers)) => numbers,
                _ => Vec::new(),
            };
            numbers.clear();
            numbers.reserve_exact(count);
            parts.for_each(|part| numbers.extend(part.map(integer)));
            Numbers::Int32(numbers)
        } else {
            let mut numbers = match old.map(|old| old.numbers) {
                Some(Numbers::Float32(numbers)) => numbers,
                _ => Vec::new(),
            };
            numbers.clear();
            numbers.reserve_exact(count);
            let unit = self.unit as f32;
            parts.for_each(|part| numbers.extend(part.map(|i| integer(i) as f32 * unit)));
            if self.large > 0.0 {
                for (index, packet) in numbers.chunks_mut(self.carried).enumerate() {
                    if self.is_large(key, from, index) {
                        packet.iter_mut().for_each(|x| *x *= power_of_two(LARGE_SHIFT) as f32);
                    }
                }
            }
            Numbers::Float32(numbers)
        };
        Gradient { tensor, numbers, whole: elements, layer: Layer::default() }
    }

    /// Which element of a tensor is number `at` of those that are there, of the part that begins with element `from`.
    pub(crate) const fn element(&self, from: usize, at: usize) -> usize {
        from + at / self.carried * self.packet + at % self.carried
    }

    /// Digest of a result's bits, or the first element that is not as near to the sum of all workers' contributions as the
    /// job's system must come, by its number among those that are there; integers must be exact. The first `skip` are not looked at.
    ///
    /// # Errors
    /// That element.
    pub fn check(&self, result: &Gradient, from: usize, skip: usize) -> Result<u64, usize> {
        let key = self.key(result.tensor);
        let exact = |i: usize| {
            let hash = hash(key, i);
            let digits = self.totals[i % PLACES][self.turn(hash) as usize];
            signed(hash, self.workers * (1 + self.common(hash)) + digits)
        };
        let mut digest = Digest::default();
        match &result.numbers {
            Numbers::Int32(sums) => {
                for (i, sum) in sums.iter().enumerate().skip(skip) {
                    if *sum != exact(self.element(from, i)) {
                        return Err(i);
                    }
                    digest.add(sum.cast_unsigned());
                }
            }
            Numbers::Float32(sums) => {
                for (index, packet) in sums.chunks(self.carried).enumerate() {
                    let large = self.is_large(key, from, index);
                    let unit = if large { self.unit * power_of_two(LARGE_SHIFT) } else { self.unit };
                    let bound = self.bounds[usize::from(large)];
                    let (begin, first) = (index * self.carried, from + index * self.packet);
                    for (i, sum) in packet.iter().enumerate().skip(skip.saturating_sub(begin)) {
                        let expected = f64::from(exact(first + i)) * unit;
                        let half_unit = f64::from(f32::EPSILON) / 2.0 * (expected.abs() + bound);
                        let error = (f64::from(*sum) - expected).abs();
                        if error.is_nan() || error > bound + half_unit {
                            return Err(begin + i);
                        }
                        digest.add(sum.to_bits());
                    }
                }
            }
        }
        Ok(digest.0)
    }

    fn key(&self, tensor: u64) -> u32 {
        (mix(self.seed ^ tensor.wrapping_mul(0x9e37_79b9_7f4a_7c15)) >> 32) as u32
    }

    /// A worker's digits; as many as it takes to tell all workers apart, and then these again.
    fn rank(&self, worker: u32) -> [u32; PLACES] {
        let width = self.digits.count_ones();
        let places = (u32::BITS - (self.workers - 1).leading_zeros()).div_ceil(width).max(1);
        std::array::from_fn(|place| worker >> (place as u32 % places * width) & self.digits)
    }

    /// The part of an integer that all workers share.
    const fn common(&self, hash: u32) -> u32 {
        hash >> (u32::BITS + 1 - self.bits)
    }

    const fn turn(&self, hash: u32) -> u32 {
        hash >> 4 & self.digits
    }

    const fn turned(&self, digit: u32, turn: u32) -> u32 {
        (digit + turn) & self.digits
    }

    /// Whether the numbers of packet `index` of a part are large.
    fn is_large(&self, key: u32, from: usize, index: usize) -> bool {
        let share = (self.large * f64::from(u32::MAX)) as u32;
        share > 0 && (mix(mix(from as u64) ^ u64::from(key) << 32 ^ index as u64) as u32) < share
    }
}

/// The largest power of two that is not above `x`; of the number's bits, so that it is the same everywhere.
const fn floor_log2(x: f64) -> i32 {
    (x.to_bits() >> 52) as i32 - 1023
}

const fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// By the element's sign.
const fn signed(hash: u32, magnitude: u32) -> i32 {
    if hash & 1 == 0 { magnitude.cast_signed() } else { -magnitude.cast_signed() }
}

/// Compilers turn it into vector code.
const fn hash(key: u32, i: usize) -> u32 {
    let x = (i as u32).wrapping_mul(0x9e37_79b1).wrapping_add(key);
    let x = (x ^ x >> 15).wrapping_mul(0x85eb_ca6b);
    x ^ x >> 13
}

/// The finaliser of splitmix64.
pub const fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[derive(Default)]
struct Digest(u64);

impl Digest {
    const fn add(&mut self, bits: u32) {
        self.0 = (self.0 ^ bits as u64).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use fanin_protocol::atp::{Hashing, Overflow, Scaling};
    use fanin_quant::{Divisor, Scale, dequantize_f32, exponent_f32, quantize_f32};

    use super::*;
    use crate::net::{Class, NodeId};
    use crate::systems::System;
    use crate::systems::atp::{Atp, Help};
    use crate::systems::ring::Ring;
    use crate::systems::switchml::SwitchMl;
    use crate::workload::Workload;

    /// Who sums, and how its rounding goes.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Summer {
        Static,
        Dynamic,
        SwitchMl,
        Ring,
        Integers,
    }

    const ALL: [Summer; 5] =
        [Summer::Static, Summer::Dynamic, Summer::SwitchMl, Summer::Ring, Summer::Integers];
    /// Whose jobs have 1,024 workers at most.
    fn is_atp(summer: Summer) -> bool {
        [Summer::Static, Summer::Dynamic].contains(&summer)
    }

    const PACKET: usize = 64;
    /// Elements of the tensor, and its first in this part: the last packet is of two elements.
    const ELEMENTS: usize = 5 * PACKET + 2;
    const FROM: usize = 100;

    fn system(summer: Summer) -> Arc<dyn System> {
        let atp = |scaling| -> Arc<dyn System> {
            Arc::new(Atp {
                help: Help::Way,
                server: None,
                elements: PACKET as u16,
                window: 1,
                hashing: Hashing::Hash,
                scaling,
                overflow: Overflow::Reactive,
                congestion_control: true,
                timeout: Duration::from_millis(1),
            })
        };
        match summer {
            Summer::Static | Summer::Integers => atp(Scaling::Static),
            Summer::Dynamic => atp(Scaling::Dynamic),
            Summer::SwitchMl => Arc::new(SwitchMl {
                elements: PACKET as u16,
                slots: 1,
                timeout: Duration::from_millis(1),
                timeouts_only: false,
            }),
            Summer::Ring => Arc::new(Ring::default()),
        }
    }

    fn source(summer: Summer, workers: usize, large: f64) -> Source {
        let plan = JobPlan {
            name: String::new(),
            system: system(summer),
            workers: vec![NodeId(0); workers],
            class: Class::default(),
            start: Duration::ZERO,
            stop: None,
            workload: Workload::AllReduce { elements: ELEMENTS, in_flight: 1, count: None },
            integers: summer == Summer::Integers,
            large_values: large,
            sampled: false,
        };
        Source::new(&plan, 7)
    }

    /// What comes back when these workers' contributions are summed, instead of each worker's once.
    fn sum(summer: Summer, source: &Source, ranks: impl Iterator<Item = u32>) -> Gradient {
        let parts: Vec<Gradient> =
            ranks.map(|rank| source.contribution(None, 3, rank, FROM, ELEMENTS)).collect();
        if summer == Summer::Integers {
            let mut total = vec![0i32; ELEMENTS];
            for part in &parts {
                let Numbers::Int32(numbers) = &part.numbers else { panic!("integers") };
                total.iter_mut().zip(numbers).for_each(|(sum, x)| *sum = sum.wrapping_add(*x));
            }
            return Gradient {
                tensor: 3,
                numbers: Numbers::Int32(total),
                whole: ELEMENTS,
                layer: Layer::default(),
            };
        }
        let floats: Vec<&[f32]> = parts
            .iter()
            .map(|part| match &part.numbers {
                Numbers::Float32(numbers) => numbers.as_slice(),
                Numbers::Int32(_) => panic!("floats"),
            })
            .collect();
        let mut total = Vec::new();
        for begin in (0..ELEMENTS).step_by(PACKET) {
            let range = begin..(begin + PACKET).min(ELEMENTS);
            let packets: Vec<&[f32]> = floats.iter().map(|numbers| &numbers[range.clone()]).collect();
            total.extend(sum_packet(summer, source.workers, &packets));
        }
        Gradient { tensor: 3, numbers: Numbers::Float32(total), whole: ELEMENTS, layer: Layer::default() }
    }

    fn sum_packet(summer: Summer, workers: u32, packets: &[&[f32]]) -> Vec<f32> {
        let elements = packets[0].len();
        let in_floats = || {
            let add = |i: usize| packets.iter().fold(0f32, |sum, packet| sum + packet[i]);
            (0..elements).map(add).collect::<Vec<f32>>()
        };
        let exponent = packets.iter().map(|packet| exponent_f32(packet)).max().expect("workers");
        let range = f64::from(i32::MAX) - f64::from(workers);
        let scale = match summer {
            Summer::Ring | Summer::Integers => return in_floats(),
            Summer::Static => Scale::of_factor(1e8),
            Summer::Dynamic => {
                let m = exponent.finite().expect("numbers").into();
                Scale::of_factor(range / f64::from(workers) / power_of_two(m))
            }
            Summer::SwitchMl => Scale::new(exponent, workers),
        };
        let (mut bytes, mut sums) = (vec![0; 4 * elements], vec![0i64; elements]);
        for packet in packets {
            quantize_f32(packet, &scale, &mut bytes);
            for (sum, x) in sums.iter_mut().zip(bytes.as_chunks().0) {
                *sum += i64::from(i32::from_le_bytes(*x));
            }
        }
        if sums.iter().any(|sum| sum.abs() >= i64::from(i32::MAX)) {
            // ATP's server asks for the original values.
            return in_floats();
        }
        let bytes: Vec<u8> = sums.iter().flat_map(|sum| (*sum as i32).to_le_bytes()).collect();
        let mut total = vec![0.0; elements];
        dequantize_f32(&bytes, &scale, Divisor::One, &mut total);
        total
    }

    /// The first element where `wrong` differs from `right`, with only this one of the wrong ones.
    fn only(right: &Gradient, wrong: &Gradient, i: usize) -> Gradient {
        let mut mixed = right.clone();
        mixed.set(i, &wrong.part(i..i + 1));
        mixed
    }

    #[test]
    fn a_sample_is_the_first_elements_of_each_packet_and_a_missing_contribution_is_seen_in_it() {
        for summer in [Summer::Ring, Summer::Integers] {
            let whole = source(summer, 5, 0.0);
            let sample = Source { carried: 8, ..whole.clone() };
            let all = whole.contribution(None, 3, 2, FROM, ELEMENTS);
            let some = sample.contribution(None, 3, 2, FROM, ELEMENTS);
            // Five packets, and one of two elements.
            assert_eq!(some.count(), 5 * 8 + 2);
            let at = |gradient: &Gradient, i: usize| match &gradient.numbers {
                Numbers::Float32(x) => f64::from(x[i]),
                Numbers::Int32(x) => f64::from(x[i]),
            };
            for i in 0..some.count() {
                assert!(at(&some, i) == at(&all, sample.element(FROM, i) - FROM), "{i}");
            }
            let total = |ranks: std::ops::Range<u32>| {
                let mut parts = ranks.map(|rank| sample.contribution(None, 3, rank, FROM, ELEMENTS));
                let first = parts.next().expect("a worker");
                parts.fold(first, |mut sum, part| {
                    sum.add(0, &part);
                    sum
                })
            };
            assert!(sample.check(&total(0..5), FROM, 0).is_ok(), "{summer:?}");
            assert_eq!(sample.check(&total(0..4), FROM, 0), Err(0), "{summer:?}");
        }
    }

    #[test]
    fn the_sum_of_all_contributions_passes_whoever_rounds() {
        for workers in [1, 2, 3, 8, 63, 65, 200, 1024, 2049, 4096] {
            for summer in ALL {
                if is_atp(summer) && workers > 1024 {
                    continue;
                }
                for large in [0.0, 0.5] {
                    let source = source(summer, workers, large);
                    let right = sum(summer, &source, 0..workers as u32);
                    assert!(source.check(&right, FROM, 0).is_ok(), "{summer:?} {workers} {large}");
                }
            }
        }
    }

    /// Whatever the packet's numbers and those of the packets beside it are like, and if it is one element alone.
    #[test]
    fn a_contribution_missing_doubled_or_exchanged_is_seen_in_each_element() {
        for workers in [2, 3, 8, 64] {
            for (summer, large) in ALL.into_iter().flat_map(|summer| [(summer, 0.0), (summer, 0.5)]) {
                let source = source(summer, workers, large);
                let all = 0..workers as u32;
                let right = sum(summer, &source, all.clone());
                for victim in [0, workers as u32 / 2, workers as u32 - 1] {
                    let other = (victim + 1) % workers as u32;
                    let missing = sum(summer, &source, all.clone().filter(|rank| *rank != victim));
                    let doubled = sum(summer, &source, all.clone().chain([victim]));
                    let exchanged = sum(
                        summer,
                        &source,
                        all.clone().map(|rank| if rank == victim { other } else { rank }),
                    );
                    for (what, wrong) in
                        [("missing", missing), ("doubled", doubled), ("exchanged", exchanged)]
                    {
                        for i in 0..ELEMENTS {
                            let found = source.check(&only(&right, &wrong, i), FROM, 0);
                            assert_eq!(found, Err(i), "{what} {victim} of {workers}: {summer:?} {large}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn beyond_64_workers_four_elements_tell_all_of_them_apart() {
        for (workers, summer) in
            [65, 200, 1024, 4096].into_iter().flat_map(|workers| ALL.map(|summer| (workers, summer)))
        {
            if is_atp(summer) && workers > 1024 {
                continue;
            }
            let source = source(summer, workers, 0.5);
            let all = 0..workers as u32;
            let right = sum(summer, &source, all.clone());
            let victim = workers as u32 - 1;
            let missing = sum(summer, &source, all.clone().filter(|rank| *rank != victim));
            for i in 0..ELEMENTS {
                assert_eq!(source.check(&only(&right, &missing, i), FROM, 0), Err(i), "{summer:?} {workers}");
            }
            for other in [0, victim - 1, victim % 64, victim - 64] {
                let wrong =
                    sum(summer, &source, all.clone().map(|rank| if rank == victim { other } else { rank }));
                let found = source.check(&wrong, FROM, 0);
                assert!(found.is_err_and(|i| i < PLACES), "{other}: {summer:?} {workers}: {found:?}");
            }
        }
    }

    #[test]
    fn two_exchanges_that_would_cancel_in_one_element_do_not_in_all() {
        for summer in ALL {
            let source = source(summer, 5, 0.0);
            assert!(
                source.check(&sum(summer, &source, [0, 0, 3, 3, 4].into_iter()), FROM, 0).is_err(),
                "{summer:?}"
            );
            let right = sum(summer, &source, 0..5);
            assert!(source.check(&right, FROM + 1, 0).is_err(), "shifted by one element");
        }
    }

    /// No system may be off by as much as half of what one contribution changes, or the check could not tell.
    #[test]
    fn bounds_are_below_half_a_unit_in_every_packet() {
        let all =
            (1..=64).chain([65, 127, 128, 129, 500, 1000, 1024, 1025, 1448, 1449, 2048, 2049, 4095, 4096]);
        for workers in all {
            for summer in ALL {
                if is_atp(summer) && workers > 1024 {
                    continue;
                }
                let source = source(summer, workers, 0.5);
                for (found, shift) in source.bounds.into_iter().zip([0, LARGE_SHIFT]) {
                    let unit = source.unit * power_of_two(shift);
                    let largest = power_of_two(source.bits as i32);
                    let bound = system(summer).bound(workers, largest * unit);
                    assert_eq!(
                        found.to_bits(),
                        bound.to_bits(),
                        "{summer:?} {workers}: it is what the system says"
                    );
                    let rounding = largest * workers as f64 * f64::from(f32::EPSILON) / 2.0;
                    assert!(bound / unit + rounding < 0.5, "{summer:?} {workers}: {bound} beside {unit}");
                }
            }
        }
    }

    #[test]
    fn large_packets_are_as_frequent_as_asked_and_too_large_for_the_static_factor() {
        for workers in [1, 8, 1024] {
            let source = source(Summer::Static, workers, 0.25);
            let key = source.key(1);
            let large: Vec<usize> = (0..1000).filter(|index| source.is_large(key, 0, *index)).collect();
            assert!((200..300).contains(&large.len()), "{} of 1000", large.len());
            let numbers = source.contribution(None, 1, 0, 0, 1000 * PACKET);
            let Numbers::Float32(numbers) = numbers.numbers else { panic!("floats") };
            let most = |index: usize| {
                let packet = &numbers[index * PACKET..(index + 1) * PACKET];
                packet.iter().fold(0f32, |most, x| most.max(x.abs())) * workers as f32
            };
            for index in 0..1000 {
                assert_eq!(most(index) > 21.5, large.contains(&index), "{workers} {index}: {}", most(index));
            }
        }
    }

    #[test]
    fn digests_differ_with_any_bit() {
        let source = source(Summer::Static, 5, 0.0);
        let mut total = sum(Summer::Static, &source, 0..5);
        let before = source.check(&total, FROM, 0);
        let Numbers::Float32(numbers) = &mut total.numbers else { panic!("floats") };
        // Not every result that is another bit away is still near enough.
        let smallest = |one: &&mut f32, other: &&mut f32| one.abs().total_cmp(&other.abs());
        let number = numbers.iter_mut().min_by(smallest).expect("there are some");
        *number = f32::from_bits(number.to_bits() ^ 1);
        let after = source.check(&total, FROM, 0);
        assert!(before.is_ok() && after.is_ok() && before != after, "{before:?} {after:?}");
    }
}
