//! Parameters to which each worker adds by itself (BytePS §5): what they are at any time.
//!
//! A worker's first delta of a variable is its drawn contribution to the first tensor. Each further
//! one is the difference of its contributions to this tensor and the one before. So all deltas of a
//! worker up to a tensor make its contribution to that one. The parameters are therefore the sum of
//! one contribution of each worker, of tensors that may differ. However long a run is, they are as
//! small as sums are, and exact.
//!
//! A delta that is missing or in twice changes an element unless the worker's two contributions are
//! the same there. Two workers' deltas for the same two tensors are alike in about half of the
//! elements. So a few elements show what one element of a sum shows.

use std::ops::Range;

use super::{Gradient, Numbers, Origin, Source, hash, signed, turned};

/// A piece of a variable's latest parameters.
#[derive(Clone, Debug)]
pub(crate) struct Latest {
    /// Its elements, counted among those that are there.
    pub(crate) at: Range<usize>,
    /// By rank: the last tensor whose delta is in, with those of all before.
    pub(crate) inside: Vec<Option<u64>>,
}

impl Origin {
    /// [`Source::check_latest`].
    pub(crate) fn check_latest(&self, result: &Gradient, from: usize, latest: &Latest) -> Result<(), usize> {
        match self {
            Self::Drawn(source) => source.check_latest(result, from, latest),
            Self::Given(_) => unreachable!("`Given::new` refuses them"),
        }
    }
}

impl Source {
    /// Whether a piece is exactly the sum of who is in. The result's first element is number `from`
    /// of those that are there.
    ///
    /// # Errors
    /// The first element that is not, by its number among those that are there.
    pub(crate) fn check_latest(&self, result: &Gradient, from: usize, latest: &Latest) -> Result<(), usize> {
        let of_rank = |(rank, tensor): (usize, &Option<u64>)| {
            tensor.map(|tensor| (self.key(tensor), self.rank(rank as u32)))
        };
        let inside: Vec<_> = latest.inside.iter().enumerate().filter_map(of_rank).collect();
        let exact = |at: usize| {
            let i = self.element(result.whole, 0, at);
            let of = |(key, rank): &(u32, [u32; super::PLACES_MAX])| {
                let hash = hash(*key, i);
                let digit = turned(rank[i % self.places], self.turn(hash), self.digits);
                signed(hash, 1 + self.common(hash) + digit)
            };
            inside.iter().map(of).sum::<i32>()
        };
        let is_right = |at: &usize| match &result.numbers {
            Numbers::Int32(x) => x.get(at - from) == Some(&exact(*at)),
            Numbers::Float32(x) => {
                let expected = f64::from(exact(*at)) * self.unit;
                x.get(at - from).is_some_and(|x| (f64::from(*x) - expected).abs() == 0.0)
            }
        };
        latest.at.clone().find(|at| !is_right(at)).map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::net::{Class, NodeId};
    use crate::systems::ring::Ring;
    use crate::workload::{JobPlan, Workload};

    const WORKERS: u32 = 5;
    /// Few: each is a small variable.
    const ELEMENTS: usize = 8;

    fn source(integers: bool) -> Source {
        let plan = JobPlan {
            name: String::new(),
            system: std::sync::Arc::new(Ring::default()),
            workers: vec![NodeId(0); WORKERS as usize],
            class: Class::default(),
            start: Duration::ZERO,
            stop: None,
            workload: Workload::AllReduce { elements: ELEMENTS, in_flight: 1, count: None },
            rates: crate::workload::Rates::OfLinks,
            lateness: crate::workload::Lateness::None,
            integers,
            large_values: 0.0,
            sampled: false,
        };
        Source::new(&plan, 3)
    }

    fn delta(source: &Source, rank: u32, tensor: u64) -> Gradient {
        let of = |tensor| source.contribution(None, tensor, rank, 0..ELEMENTS, ELEMENTS);
        let mut delta = of(tensor);
        if let Some(before) = tensor.checked_sub(1) {
            delta.subtract(&of(before));
        }
        delta
    }

    /// Parameters after these deltas, in this order.
    fn parameters(source: &Source, deltas: impl IntoIterator<Item = (u32, u64)>) -> Gradient {
        let mut sum = delta(source, 0, 0);
        sum.subtract(&sum.clone());
        deltas.into_iter().for_each(|(rank, tensor)| sum.add(0, &delta(source, rank, tensor)));
        sum
    }

    /// The deltas that are said to be in them.
    fn latest(inside: [Option<u64>; WORKERS as usize]) -> Latest {
        Latest { at: 0..ELEMENTS, inside: inside.into() }
    }

    #[test]
    fn parameters_are_the_sum_of_all_deltas_whatever_their_order_and_however_many() {
        for integers in [false, true] {
            let source = source(integers);
            let all = (0..1000).flat_map(|tensor| [(2, tensor), (4, tensor)]);
            let sum = parameters(&source, all.chain([(0, 0), (0, 1)]));
            let said = latest([Some(1), None, Some(999), None, Some(999)]);
            assert_eq!(source.check_latest(&sum, 0, &said), Ok(()));
        }
    }

    #[test]
    fn a_delta_that_is_missing_in_twice_or_anothers_is_seen() {
        for integers in [false, true] {
            let source = source(integers);
            let right = [(0, 0), (1, 0), (0, 1), (3, 0), (1, 1), (0, 2)];
            let said = latest([Some(2), Some(1), None, Some(0), None]);
            assert_eq!(source.check_latest(&parameters(&source, right), 0, &said), Ok(()));
            for at in 0..right.len() {
                let mut missing = right.to_vec();
                let one = missing.remove(at);
                assert!(
                    source.check_latest(&parameters(&source, missing), 0, &said).is_err(),
                    "without {one:?}"
                );
                let twice = right.into_iter().chain([one]);
                assert!(source.check_latest(&parameters(&source, twice), 0, &said).is_err(), "{one:?} twice");
                let mut exchanged = right;
                exchanged[at].0 = 2;
                assert!(
                    source.check_latest(&parameters(&source, exchanged), 0, &said).is_err(),
                    "not {one:?}"
                );
            }
        }
    }
}
