//! In which order the partitions of gradients are sent, so that the next forward pass waits least.
//!
//! All ranks submit in one order, and no moment of one rank may change it. So the order is made
//! ahead. It is that of a queue that always sends next what is needed first, played in virtual time.
//! The times when gradients are there, and how long a byte takes, are known (BytePS §6.1;
//! ByteScheduler, SOSP 2019).

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A partition of gradients, which is sent in one piece.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Partition {
    /// Seconds from the first one that is there until it is.
    pub ready_s: f64,
    /// Its place in the order in which the next forward pass reads the parameters.
    pub needed: u64,
    /// Its length.
    pub bytes: u64,
}

/// The numbers of partitions in the order in which they are sent, if a byte takes so many seconds.
///
/// The next one is chosen when the one before is through: of those that are there, that which is
/// needed first. A credit of one, in ByteScheduler's words, which costs no pause here: what was
/// chosen ahead is submitted while others are on their way.
#[must_use]
pub fn send_order(partitions: &[Partition], seconds_a_byte: f64) -> Vec<usize> {
    // What is no number comes last.
    let ready =
        |number: usize| Some(partitions[number].ready_s).filter(|at| !at.is_nan()).unwrap_or(f64::INFINITY);
    let mut coming: Vec<usize> = (0..partitions.len()).collect();
    // The first at the end; of several at once the one of the lowest number.
    coming.sort_by(|one, other| ready(*other).total_cmp(&ready(*one)).then(other.cmp(one)));
    let mut there = BinaryHeap::new();
    let mut chosen = Vec::with_capacity(partitions.len());
    let mut now = 0.0_f64;
    loop {
        if there.is_empty() {
            let Some(next) = coming.last() else { return chosen };
            now = now.max(ready(*next));
        }
        while let Some(number) = coming.pop_if(|number| ready(*number) <= now) {
            there.push(Reverse((partitions[number].needed, number)));
        }
        if let Some(Reverse((_, number))) = there.pop() {
            chosen.push(number);
            now += (partitions[number].bytes as f64 * seconds_a_byte).max(0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn partition(ready_s: f64, needed: u64, bytes: u64) -> Partition {
        Partition { ready_s, needed, bytes }
    }

    #[test]
    fn the_first_layer_goes_first_of_what_is_there() {
        // The last layer's gradient comes first, and its other half waits while front layers come.
        let gradients =
            [partition(0.0, 2, 10), partition(0.0, 3, 10), partition(1.0, 1, 10), partition(2.0, 0, 10)];
        assert_eq!(send_order(&gradients, 0.2), [0, 3, 2, 1]);
        assert_eq!(send_order(&gradients, 0.05), [0, 1, 2, 3], "a fast network has nothing to choose");
        assert_eq!(send_order(&[], 1.0), [0; 0]);
    }

    proptest! {
        #[test]
        fn each_is_sent_once(
            gradients in prop::collection::vec((prop::num::f64::ANY, 0..20_u64, any::<u64>()), 0..50),
            seconds_a_byte in prop::num::f64::ANY,
        ) {
            let gradients: Vec<_> = gradients.into_iter().map(|(ready, needed, bytes)| partition(ready, needed, bytes)).collect();
            let mut order = send_order(&gradients, seconds_a_byte);
            order.sort_unstable();
            prop_assert_eq!(order, (0..gradients.len()).collect::<Vec<_>>());
        }
    }
}
