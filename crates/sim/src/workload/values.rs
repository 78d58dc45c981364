//! The numbers that workers reduce in a workload: a function of the seed, so that the sum of any
//! element is known without keeping what went into it.
//!
//! An element is an integer times a unit. The integer is above zero, up to a sign that all workers
//! share, and identifies its origin. It has a part that depends on tensor and element, and a part
//! that is the worker's rank, turned by another amount in each element. So the sum's integer
//! changes in every element if a contribution is missing, doubled or in another's place. With more
//! than 64 workers a rank has several digits, and four elements one after the other show all of
//! them. No system may be wrong by half a unit, however it rounds: unit and integers are chosen so.
//! So a result that is wrong by less than its own bound is the sum, and no other result is.
//!
//! Floats that are rounded on their way, to bfloat16 or int8, have integers of few bits (`narrow`).
//!
//! If a scenario wants overflows, the numbers of some packets are 2^12 times as large. SwitchML and
//! ATP's dynamic scaling find one factor for a packet. So the bound of one packet does not cover an
//! error in the next.

mod given;
mod inside;
mod latest;
mod narrow;
#[cfg(test)]
mod tests;

use std::ops::Range;

use fanin_protocol::{Elements, Layer, Tensor};
use fanin_wire::NATIVE_ELEMENTS_MAX;

use super::scenario::JobPlan;
pub(crate) use given::{Given, Origin};
pub use inside::Inside;
pub(crate) use latest::Latest;
use narrow::Narrow;
pub(crate) use narrow::exact_workers_max;

/// How much larger the numbers of an overflowing packet are, as a power of two.
const LARGE_SHIFT: i32 = 12;
/// The number of a job's workers beyond which its sums are not exact in an f32 any more.
pub(crate) const WORKERS_MAX: u32 = 4096;
/// Values of a digit of a rank.
const DIGITS: u32 = 64;
/// Digits that a rank may have, where floats are not rounded to a few bits; element `i` shows digit
/// `i` modulo this.
const PLACES: usize = 4;
/// Digits that a rank may have at most.
const PLACES_MAX: usize = 8;
/// The part of half a unit that a result may be from the sum at most, whatever its system says of
/// itself.
const BOUND_MAX: f64 = 0.7;
/// The largest sum under ATP's static factor, 10^8.
const STATIC_SUM: f64 = 21.0;

/// The inputs of the numbers of a job's tensors.
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
    /// Both, of tensors of more than [`NATIVE_ELEMENTS_MAX`] elements.
    long: (usize, usize),
    /// The unit of floats; a power of two.
    unit: f64,
    /// Bits of the part that all workers share.
    common_bits: u32,
    /// Values of a digit, less one.
    digits: u32,
    /// Element `i` shows digit `i` modulo this.
    places: usize,
    /// How far a sum may be from the exact one: in a packet, and in one whose numbers are large.
    bounds: [f64; 2],
    /// The sum over all workers of a place's digit, by what it is turned by.
    totals: Vec<[u32; DIGITS as usize]>,
}

/// A worker's copy of a tensor.
#[derive(Clone, Debug)]
pub struct Gradient {
    /// Its number in the job.
    pub tensor: u64,
    numbers: Numbers,
    /// Elements of the tensor, also those that are there in length alone.
    whole: usize,
    /// The layer of the gradient.
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

    /// Takes `other` away from it, which is as long.
    pub(crate) fn subtract(&mut self, other: &Self) {
        match (&mut self.numbers, &other.numbers) {
            (Numbers::Float32(x), Numbers::Float32(y)) => x.iter_mut().zip(y).for_each(|(x, y)| *x -= y),
            (Numbers::Int32(x), Numbers::Int32(y)) => {
                x.iter_mut().zip(y).for_each(|(x, y)| *x = x.wrapping_sub(*y));
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

    /// Elements of the tensor, also those that are there in length alone.
    pub(crate) const fn whole(&self) -> usize {
        self.whole
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
        // Each contribution is off by up to half of 10^-8 under the static factor: together by a
        // quarter of a unit.
        let unit = power_of_two(floor_log2(2.0 * n * 1e-8) + 1);
        let most = [
            // A sum below 2^21 units is rounded by an eighth of a unit at most.
            2_097_152.0 / n,
            // SwitchML's Theorem 1 (and half of it ATP's dynamic scaling): a quarter of a unit.
            536_870_912.0 / (n * n),
            STATIC_SUM / (n * unit),
        ];
        let bits = floor_log2(most.into_iter().fold(f64::INFINITY, f64::min));
        let narrow = narrow::largest(plan.system.wire_dtype()).filter(|_| !plan.integers);
        let (bits, common_bits, digits, places) = match narrow {
            None => (bits, bits as u32 - 1, DIGITS.min(1 << (bits - 1)) - 1, PLACES),
            Some(largest) => {
                let Narrow { common_bits, digit_bits, places } =
                    narrow::fits(workers, largest).expect("a scenario's workers are counted when it is read");
                (common_bits.max(digit_bits) as i32 + 1, common_bits, digits_of(digit_bits), places)
            }
        };
        let bound = |largest: i32| plan.system.bound(plan.workers.len(), power_of_two(largest));
        let largest = bits + floor_log2(unit);
        let (packet, carried) = plan.packet(0);
        Self {
            seed,
            workers,
            large: plan.large_values,
            integers: plan.integers,
            packet,
            carried,
            long: plan.packet(NATIVE_ELEMENTS_MAX + 1),
            unit,
            common_bits,
            digits,
            places,
            bounds: [0, LARGE_SHIFT].map(|shift| {
                let hides = unit * power_of_two(shift) / 2.0;
                bound(largest + shift).min(hides * BOUND_MAX)
            }),
            totals: totals(workers, digits, places),
        }
    }

    /// Elements of a packet of a tensor of so many, and how many of them are there.
    const fn cut(&self, tensor: usize) -> (usize, usize) {
        if tensor > NATIVE_ELEMENTS_MAX { self.long } else { (self.packet, self.carried) }
    }

    /// The contribution of `worker` to some elements of a tensor, which has `whole` of them, without
    /// those that a sample leaves out. It takes the memory of `old` if there is one.
    #[must_use]
    pub fn contribution(
        &self,
        old: Option<Gradient>,
        tensor: u64,
        worker: u32,
        Range { start: from, end }: Range<usize>,
        whole: usize,
    ) -> Gradient {
        let (key, rank) = (self.key(tensor), self.rank(worker));
        let (elements, (packet, carried)) = (end - from, self.cut(whole));
        let integer = |i: usize| {
            let hash = hash(key, i);
            let digit = turned(rank[i % self.places], self.turn(hash), self.digits);
            signed(hash, 1 + self.common(hash) + digit)
        };
        let count = elements / packet * carried + (elements % packet).min(carried);
        let parts =
            (0..elements).step_by(packet).map(|begin| from + begin..from + elements.min(begin + carried));
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
                for (index, packet) in numbers.chunks_mut(carried).enumerate() {
                    if self.is_large(key, from, index) {
                        packet.iter_mut().for_each(|x| *x *= power_of_two(LARGE_SHIFT) as f32);
                    }
                }
            }
            Numbers::Float32(numbers)
        };
        Gradient { tensor, numbers, whole, layer: Layer::default() }
    }

    /// Which element of a tensor of `whole` elements is number `at` of those that are there, of the
    /// part that begins with element `from`.
    pub(crate) const fn element(&self, whole: usize, from: usize, at: usize) -> usize {
        let (packet, carried) = self.cut(whole);
        from + at / carried * packet + at % carried
    }

    /// Digest of a result's bits, or the first element that is too far from the sum of all workers'
    /// contributions for the job's system. The element is numbered among those that are there;
    /// integers must be exact. The first `skip` are not looked at.
    ///
    /// # Errors
    /// That element.
    pub fn check(&self, result: &Gradient, from: usize, skip: usize) -> Result<u64, usize> {
        let key = self.key(result.tensor);
        let exact = |i: usize| {
            let hash = hash(key, i);
            let digits = self.totals[i % self.places][self.turn(hash) as usize];
            signed(hash, self.workers * (1 + self.common(hash)) + digits)
        };
        let mut digest = Digest::default();
        match &result.numbers {
            Numbers::Int32(sums) => {
                for (i, sum) in sums.iter().enumerate().skip(skip) {
                    if *sum != exact(self.element(result.whole, from, i)) {
                        return Err(i);
                    }
                    digest.add(sum.cast_unsigned());
                }
            }
            Numbers::Float32(sums) => {
                let (elements, carried) = self.cut(result.whole);
                for (index, packet) in sums.chunks(carried).enumerate() {
                    let large = self.is_large(key, from, index);
                    let unit = if large { self.unit * power_of_two(LARGE_SHIFT) } else { self.unit };
                    let bound = self.bounds[usize::from(large)];
                    let (begin, first) = (index * carried, from + index * elements);
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

    fn rank(&self, worker: u32) -> [u32; PLACES_MAX] {
        rank(worker, self.workers, self.digits)
    }

    /// The part of an integer that all workers share.
    const fn common(&self, hash: u32) -> u32 {
        hash.unbounded_shr(u32::BITS - self.common_bits)
    }

    const fn turn(&self, hash: u32) -> u32 {
        hash >> 4 & self.digits
    }

    /// Whether the numbers of packet `index` of a part are large.
    fn is_large(&self, key: u32, from: usize, index: usize) -> bool {
        let share = (self.large * f64::from(u32::MAX)) as u32;
        share > 0 && (mix(mix(from as u64) ^ u64::from(key) << 32 ^ index as u64) as u32) < share
    }
}

/// Less one, the values of a digit of so many bits.
const fn digits_of(bits: u32) -> u32 {
    (1 << bits) - 1
}

/// Digits that tell so many workers apart.
const fn places_of(workers: u32, digits: u32) -> usize {
    let bits = u32::BITS - (workers - 1).leading_zeros();
    if bits == 0 { 1 } else { bits.div_ceil(digits.count_ones()) as usize }
}

/// A worker's digits; as many as it takes to tell all workers apart, and then these again.
fn rank(worker: u32, workers: u32, digits: u32) -> [u32; PLACES_MAX] {
    let (width, places) = (digits.count_ones(), places_of(workers, digits));
    std::array::from_fn(|place| worker >> ((place % places) as u32 * width) & digits)
}

const fn turned(digit: u32, turn: u32, digits: u32) -> u32 {
    (digit + turn) & digits
}

/// The sum over all workers of each place's digit, by what it is turned by.
fn totals(workers: u32, digits: u32, places: usize) -> Vec<[u32; DIGITS as usize]> {
    let mut totals = vec![[0; DIGITS as usize]; places];
    for rank in (0..workers).map(|worker| rank(worker, workers, digits)) {
        for (totals, digit) in totals.iter_mut().zip(rank) {
            let turns = totals.iter_mut().zip(0..);
            turns.for_each(|(total, turn)| *total += turned(digit, turn, digits));
        }
    }
    totals
}

/// The largest power of two that is not above `x`; of the number's bits, so that it is the same
/// everywhere.
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
