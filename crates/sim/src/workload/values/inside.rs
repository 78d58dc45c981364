//! The exact sums that may lack contributions (DLCP): those of the ranks that are said to be in
//! each packet.

use super::{Digest, Gradient, LARGE_SHIFT, Numbers, Origin, Source, hash, power_of_two, signed, turned};

/// The ranks in each packet of a sum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inside {
    /// A bit a rank, packet by packet. Without any rank the sum is zero.
    pub packets: Vec<u64>,
    /// Whether it is the mean of who is in, and not as many times that as there are workers.
    pub is_mean: bool,
    /// Whether workers may have got different ones.
    pub may_differ: bool,
}

impl Inside {
    /// The factor of the sum of those who are in.
    pub(super) fn factor(&self, inside: u64, workers: usize) -> f64 {
        let times = if self.is_mean { 1.0 } else { workers as f64 };
        times / f64::from(inside.count_ones().max(1))
    }
}

impl Origin {
    /// [`Source::check_inside`].
    pub(crate) fn check_inside(
        &mut self,
        result: &Gradient,
        from: usize,
        inside: &Inside,
    ) -> Result<u64, usize> {
        match self {
            Self::Drawn(source) => source.check_inside(result, from, inside),
            Self::Given(given) => given.check_inside(&result.numbers, inside),
        }
    }
}

impl Source {
    /// Digest of a result's bits, for the part of a tensor that begins with element `from`. The
    /// error is the first element that is not the sum of who is in, by its number among those that
    /// are there. A sum that lacks somebody is scaled, so it is rounded twice. No sum is above 2^21
    /// units, so both errors are at most an eighth of the least that a contribution changes.
    /// Integers lack nobody.
    pub(crate) fn check_inside(&self, result: &Gradient, from: usize, inside: &Inside) -> Result<u64, usize> {
        let (key, workers) = (self.key(result.tensor), self.workers as usize);
        let ranks: Vec<_> = (0..self.workers).map(|worker| self.rank(worker)).collect();
        let exact = |i: usize, inside: u64| -> i64 {
            let hash = hash(key, i);
            let of = |rank: usize| {
                let digit = turned(ranks[rank][i % self.places], self.turn(hash), self.digits);
                i64::from(signed(hash, 1 + self.common(hash) + digit))
            };
            (0..workers).filter(|rank| inside >> rank & 1 != 0).map(of).sum()
        };
        let mut digest = Digest::default();
        for (index, packet) in inside.packets.iter().enumerate() {
            let begin = index * self.carried;
            let first = from + index * self.packet;
            let is_whole = packet.count_ones() == self.workers;
            match &result.numbers {
                Numbers::Int32(sums) => {
                    let Some(sums) = sums.get(begin..) else { return Err(begin) };
                    for (i, sum) in sums.iter().take(self.carried).enumerate() {
                        if !is_whole || i64::from(*sum) != exact(first + i, *packet) {
                            return Err(begin + i);
                        }
                        digest.add(sum.cast_unsigned());
                    }
                }
                Numbers::Float32(sums) => {
                    let Some(sums) = sums.get(begin..) else { return Err(begin) };
                    let large = if self.is_large(key, from, index) { power_of_two(LARGE_SHIFT) } else { 1.0 };
                    let times = self.unit * large * inside.factor(*packet, workers);
                    for (i, sum) in sums.iter().take(self.carried).enumerate() {
                        let expected = exact(first + i, *packet) as f64 * times;
                        let rounding = if is_whole && !inside.is_mean { 0.5 } else { 1.0 };
                        let error = (f64::from(*sum) - expected).abs();
                        if error.is_nan() || error > rounding * f64::from(f32::EPSILON) * expected.abs() {
                            return Err(begin + i);
                        }
                        digest.add(sum.to_bits());
                    }
                }
            }
        }
        let there = result.numbers.count();
        let spoken_of = inside.packets.len() * self.carried;
        if there > spoken_of { Err(spoken_of) } else { Ok(digest.0) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::net::{Class, NodeId};
    use crate::systems::ring::Ring;
    use crate::workload::{JobPlan, Workload};

    const WORKERS: usize = 5;
    /// Two packets of the ring's 64 elements, and one of three.
    const ELEMENTS: usize = 131;
    const PACKET: usize = 64;

    fn source(integers: bool) -> Source {
        let plan = JobPlan {
            name: String::new(),
            system: std::sync::Arc::new(Ring::default()),
            workers: vec![NodeId(0); WORKERS],
            class: Class::default(),
            start: Duration::ZERO,
            stop: None,
            workload: Workload::AllReduce { elements: ELEMENTS, in_flight: 1, count: None },
            rates: crate::workload::Rates::OfLinks,
            lateness: crate::workload::Lateness::None,
            integers,
            large_values: 0.5,
            sampled: false,
        };
        Source::new(&plan, 3)
    }

    /// A result whose packets have these ranks, each as often as named: a sum or a mean.
    fn result(source: &Source, packets: [&[u32]; 3], is_mean: bool) -> Gradient {
        let mut result = source.contribution(None, 9, 0, 0..ELEMENTS, ELEMENTS);
        let all: Vec<Gradient> = (0..WORKERS as u32)
            .map(|rank| source.contribution(None, 9, rank, 0..ELEMENTS, ELEMENTS))
            .collect();
        let of = |at: usize| {
            let ranks = packets[at / PACKET];
            let sum: f64 = ranks
                .iter()
                .map(|rank| match &all[*rank as usize].numbers {
                    Numbers::Float32(x) => f64::from(x[at]),
                    Numbers::Int32(x) => f64::from(x[at]),
                })
                .sum();
            let mean = (sum / ranks.len().max(1) as f64) as f32;
            match (is_mean, ranks.len() == WORKERS) {
                (true, _) => mean,
                (false, true) => sum as f32,
                (false, false) => (f64::from(mean) * WORKERS as f64) as f32,
            }
        };
        match &mut result.numbers {
            Numbers::Float32(x) => x.iter_mut().enumerate().for_each(|(at, x)| *x = of(at)),
            Numbers::Int32(x) => x.iter_mut().enumerate().for_each(|(at, x)| *x = of(at) as i32),
        }
        result
    }

    fn inside(packets: [u64; 3], is_mean: bool) -> Inside {
        Inside { packets: packets.into(), is_mean, may_differ: false }
    }

    const ALL: &[u32] = &[0, 1, 2, 3, 4];

    #[test]
    fn what_is_of_exactly_who_is_in_is_right() {
        let source = source(false);
        for is_mean in [false, true] {
            let found = result(&source, [ALL, &[0, 2, 3], &[4]], is_mean);
            assert!(source.check_inside(&found, 0, &inside([31, 0b1101, 16], is_mean)).is_ok());
            let nobody = result(&source, [ALL, &[], &[1, 2]], is_mean);
            assert!(source.check_inside(&nobody, 0, &inside([31, 0, 0b110], is_mean)).is_ok());
        }
    }

    #[test]
    fn a_contribution_that_is_missing_there_twice_or_anothers_is_seen_in_its_packet() {
        let source = source(false);
        let said = [31, 0b1101, 0b11000];
        for is_mean in [false, true] {
            for (wrong, first) in [
                ([&[0, 1, 2, 3][..], &[0, 2, 3], &[3, 4]], 0),
                ([&[0, 0, 1, 2, 3, 4], &[0, 2, 3], &[3, 4]], 0),
                ([&[0, 0, 2, 3, 4], &[0, 2, 3], &[3, 4]], 0),
                ([ALL, &[0, 2], &[3, 4]], PACKET),
                ([ALL, &[0, 1, 2, 3], &[3, 4]], PACKET),
                ([ALL, &[0, 2, 2, 3], &[3, 4]], PACKET),
                ([ALL, &[1, 2, 3], &[3, 4]], PACKET),
                ([ALL, &[], &[3, 4]], PACKET),
                ([ALL, &[0, 2, 3], &[3]], 2 * PACKET),
                ([ALL, &[0, 2, 3], &[3, 3, 4]], 2 * PACKET),
                ([ALL, &[0, 2, 3], &[2, 4]], 2 * PACKET),
            ] {
                let found = source.check_inside(&result(&source, wrong, is_mean), 0, &inside(said, is_mean));
                assert_eq!(found, Err(first), "{wrong:?}");
            }
        }
    }

    #[test]
    fn a_mean_of_the_wrong_count_or_half_a_packet_is_seen() {
        let source = source(false);
        let mut found = result(&source, [ALL, &[0, 2, 3], &[4]], true);
        let whole = found.clone();
        let Numbers::Float32(x) = &mut found.numbers else { panic!("floats") };
        x[PACKET..2 * PACKET].iter_mut().for_each(|x| *x *= 3.0 / 4.0);
        assert_eq!(source.check_inside(&found, 0, &inside([31, 0b1101, 16], true)), Err(PACKET));
        // The last element of a packet is of others than the rest.
        let mut found = whole;
        let other = result(&source, [ALL, &[0, 2], &[4]], true);
        found.set(2 * PACKET - 1, &other.part(2 * PACKET - 1..2 * PACKET));
        assert_eq!(source.check_inside(&found, 0, &inside([31, 0b1101, 16], true)), Err(2 * PACKET - 1));
        assert_eq!(
            source.check_inside(&other, 0, &Inside { packets: vec![31], ..inside([0; 3], true) }),
            Err(PACKET)
        );
    }

    #[test]
    fn integers_lack_nobody() {
        let source = source(true);
        let whole = result(&source, [ALL, ALL, ALL], false);
        assert!(source.check_inside(&whole, 0, &inside([31; 3], false)).is_ok());
        assert_eq!(source.check_inside(&whole, 0, &inside([31, 30, 31], false)), Err(PACKET));
        let lacks = result(&source, [ALL, ALL, &[0, 1, 2, 3]], false);
        assert_eq!(source.check_inside(&lacks, 0, &inside([31; 3], false)), Err(2 * PACKET));
    }
}
