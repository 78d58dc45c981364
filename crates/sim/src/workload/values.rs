//! The numbers that workers reduce in a workload: a function of the seed, so that the sum of any element is known without
//! keeping what went into it.
//!
//! Element `i` of a tensor at a worker is `(k + c) * 2^-26`, where `k` depends on tensor and element, and `c` on the worker
//! alone: 16 random bits, so that one contribution counted twice in place of another is seen. All are exact in an f32, and the
//! sums of 1,024 workers stay below 16, which a static factor of 10^8 can carry. Where a scenario wants overflows, some
//! blocks are 2^12 times as large.

use fanin_protocol::{Elements, Tensor};

/// `2^-26`.
const UNIT: f64 = 1.0 / 67_108_864.0;
/// How much larger the numbers of an overflowing block are, as a power of two.
const LARGE_SHIFT: u32 = 12;
/// Elements that overflow together.
const BLOCK: usize = 64;

/// What the numbers of a job's tensors depend on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Source {
    /// The scenario's seed, mixed with the job.
    pub seed: u64,
    /// Workers of the job.
    pub workers: u32,
    /// Share of blocks whose sum does not fit the static factor.
    pub large: f64,
    /// Whether the numbers are integers.
    pub integers: bool,
}

/// One worker's copy of a tensor.
#[derive(Clone, Debug)]
pub struct Gradient {
    /// Its number in the job.
    pub tensor: u64,
    numbers: Numbers,
}

#[derive(Clone, Debug)]
enum Numbers {
    Float32(Vec<f32>),
    Int32(Vec<i32>),
}

impl Tensor for Gradient {
    fn elements(&mut self) -> Elements<'_> {
        match &mut self.numbers {
            Numbers::Float32(x) => Elements::Float32(x),
            Numbers::Int32(x) => Elements::Int32(x),
        }
    }
}

impl Gradient {
    /// A copy of some of its elements.
    pub(crate) fn part(&self, range: std::ops::Range<usize>) -> Self {
        let numbers = match &self.numbers {
            Numbers::Float32(x) => Numbers::Float32(x[range].to_vec()),
            Numbers::Int32(x) => Numbers::Int32(x[range].to_vec()),
        };
        Self { tensor: self.tensor, numbers }
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
        match &self.numbers {
            Numbers::Float32(x) => x.len(),
            Numbers::Int32(x) => x.len(),
        }
    }
}

impl Source {
    /// What `worker` contributes to elements `from` to `from + elements` of a tensor; in the memory of `old` if there is one.
    #[must_use]
    pub fn contribution(
        &self,
        old: Option<Gradient>,
        tensor: u64,
        worker: u32,
        from: usize,
        elements: usize,
    ) -> Gradient {
        let (key, offset) = (self.key(tensor), self.offset(worker));
        let numbers = if self.integers {
            let mut numbers = match old.map(|old| old.numbers) {
                Some(Numbers::Int32(numbers)) => numbers,
                _ => Vec::new(),
            };
            numbers.clear();
            numbers.extend((from..from + elements).map(|i| pattern(key, i) + offset));
            Numbers::Int32(numbers)
        } else {
            let mut numbers = match old.map(|old| old.numbers) {
                Some(Numbers::Float32(numbers)) => numbers,
                _ => Vec::new(),
            };
            numbers.clear();
            numbers.extend((from..from + elements).map(|i| (pattern(key, i) + offset) as f32 * UNIT as f32));
            for (begin, end) in self.large_blocks(key, from, elements) {
                numbers[begin..end].iter_mut().for_each(|x| *x *= (1u32 << LARGE_SHIFT) as f32);
            }
            Numbers::Float32(numbers)
        };
        Gradient { tensor, numbers }
    }

    /// Digest of a result's bits, or the first element that is not within `bound` (and half a unit in the last place) of
    /// the sum of all workers' contributions; integers must be exact. The first `skip` elements are not looked at.
    pub fn check(&self, result: &Gradient, from: usize, skip: usize, bound: f64) -> Result<u64, usize> {
        let key = self.key(result.tensor);
        let offsets: i64 = (0..self.workers).map(|worker| i64::from(self.offset(worker))).sum();
        let workers = i64::from(self.workers);
        let exact = |i: usize| workers * i64::from(pattern(key, i)) + offsets;
        let mut digest = Digest::default();
        match &result.numbers {
            Numbers::Int32(sums) => {
                for (i, sum) in sums.iter().enumerate().skip(skip) {
                    // Integers are summed modulo 2^32.
                    if *sum != exact(from + i) as i32 {
                        return Err(i);
                    }
                    digest.add(sum.cast_unsigned());
                }
            }
            Numbers::Float32(sums) => {
                let mut large = self.large_blocks(key, from, sums.len()).peekable();
                for (i, sum) in sums.iter().enumerate().skip(skip) {
                    while large.peek().is_some_and(|(_, end)| *end <= i) {
                        large.next();
                    }
                    let shift =
                        if large.peek().is_some_and(|(begin, _)| *begin <= i) { LARGE_SHIFT } else { 0 };
                    let expected = exact(from + i) as f64 * UNIT * f64::from(1u32 << shift);
                    let half_unit = f64::from(f32::EPSILON) / 2.0 * (expected.abs() + bound);
                    let error = (f64::from(*sum) - expected).abs();
                    if error.is_nan() || error > bound + half_unit {
                        return Err(i);
                    }
                    digest.add(sum.to_bits());
                }
            }
        }
        Ok(digest.0)
    }

    fn key(&self, tensor: u64) -> u32 {
        (mix(self.seed ^ tensor.wrapping_mul(0x9e37_79b9_7f4a_7c15)) >> 32) as u32
    }

    fn offset(&self, worker: u32) -> i32 {
        (mix(self.seed.rotate_left(17) ^ u64::from(worker)) & 0xffff) as i32
    }

    /// Where numbers are large, counted from `from`.
    fn large_blocks(&self, key: u32, from: usize, elements: usize) -> impl Iterator<Item = (usize, usize)> {
        let least = (self.large * f64::from(u32::MAX)) as u32;
        let blocks = if least == 0 { 0..0 } else { from / BLOCK..(from + elements).div_ceil(BLOCK) };
        blocks.filter(move |block| (mix(u64::from(key) << 32 | *block as u64) as u32) < least).map(
            move |block| {
                let clamp = |i: usize| i.clamp(from, from + elements) - from;
                (clamp(block * BLOCK), clamp((block + 1) * BLOCK))
            },
        )
    }
}

/// Twenty bits with a sign. A multiplication and a shift: compilers turn it into vector code.
const fn pattern(key: u32, i: usize) -> i32 {
    ((i as u32).wrapping_mul(0x9e37_79b1).wrapping_add(key).wrapping_mul(0x85eb_ca6b) as i32) >> 12
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
    use super::*;

    const SOURCE: Source = Source { seed: 7, workers: 5, large: 0.0, integers: false };

    fn sum(source: &Source, workers: impl Iterator<Item = u32>) -> Gradient {
        let mut total = source.contribution(None, 3, 0, 100, 1000);
        total.elements_mut().fill(0.0);
        for worker in workers {
            let mut part = source.contribution(None, 3, worker, 100, 1000);
            for (sum, x) in total.elements_mut().iter_mut().zip(part.elements_mut()) {
                *sum += *x;
            }
        }
        total
    }

    impl Gradient {
        fn elements_mut(&mut self) -> &mut [f32] {
            match &mut self.numbers {
                Numbers::Float32(numbers) => numbers,
                Numbers::Int32(_) => panic!("floats"),
            }
        }
    }

    #[test]
    fn the_sum_of_all_contributions_passes() {
        for large in [0.0, 0.3] {
            let source = Source { large, ..SOURCE };
            assert!(source.check(&sum(&source, 0..5), 100, 0, 1e-8).is_ok());
        }
    }

    #[test]
    fn a_contribution_missing_doubled_or_exchanged_is_seen() {
        for workers in [&[0, 1, 2, 3][..], &[0, 1, 2, 3, 4, 4], &[0, 0, 2, 3, 4], &[0, 0, 3, 3, 4]] {
            assert_eq!(
                SOURCE.check(&sum(&SOURCE, workers.iter().copied()), 100, 0, 1e-6),
                Err(0),
                "{workers:?}"
            );
        }
        assert!(SOURCE.check(&sum(&SOURCE, 0..5), 101, 0, 1e-6).is_err(), "shifted by one element");
    }

    #[test]
    fn large_blocks_are_as_frequent_as_asked_and_too_large_for_the_static_factor() {
        let source = Source { large: 0.25, ..SOURCE };
        let blocks = source.large_blocks(source.key(1), 0, 64_000).count();
        assert!((200..300).contains(&blocks), "{blocks} of 1000");
        let mut gradient = source.contribution(None, 1, 0, 0, 64_000);
        let largest = gradient.elements_mut().iter().fold(0f32, |most, x| most.max(x.abs()));
        assert!(largest > 21.5);
    }

    #[test]
    fn digests_differ_with_any_bit() {
        let mut total = sum(&SOURCE, 0..5);
        let before = SOURCE.check(&total, 100, 0, 1e-6);
        let x = &mut total.elements_mut()[500];
        *x = f32::from_bits(x.to_bits() ^ 1);
        assert_ne!(SOURCE.check(&total, 100, 0, 1e-6), before);
    }
}
