//! The all-reduces that are under way, and since when: what a deadline needs to know.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fanin_wire::{Dtype, Op};

use crate::error::Tensor;

/// One all-reduce under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct AllReduce {
    /// Its submission, or the end of the one before it if that came later: a long queue that moves is not late.
    pub since: Instant,
    pub tensor: Tensor,
}

/// All-reduces under way, in the order in which they were submitted. One lock an all-reduce, none a packet.
#[derive(Debug, Default)]
pub(super) struct Pending(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    next: u64,
    under_way: BTreeMap<u64, AllReduce>,
    /// When one ended last.
    last_end: Option<Instant>,
}

impl Pending {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes an all-reduce that begins now, and returns its name.
    pub fn insert(&self, elements: usize, dtype: Dtype, op: Op, now: Instant) -> Tensor {
        let mut table = self.lock();
        let tensor = Tensor { number: table.next, elements, dtype, op };
        table.next += 1;
        table.under_way.insert(tensor.number, AllReduce { since: now, tensor });
        tensor
    }

    pub fn remove(&self, number: u64) {
        let mut table = self.lock();
        // One that was overtaken is no nearer to its end.
        let is_oldest = table.under_way.first_key_value().is_some_and(|(oldest, _)| *oldest == number);
        table.under_way.remove(&number);
        if is_oldest {
            table.last_end = Some(Instant::now());
        }
    }

    /// The one that was submitted first.
    pub fn oldest(&self) -> Option<AllReduce> {
        let table = self.lock();
        let oldest = *table.under_way.first_key_value()?.1;
        let since = table.last_end.map_or(oldest.since, |end| end.max(oldest.since));
        Some(AllReduce { since, ..oldest })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn time_counts_from_the_later_of_submission_and_the_end_of_the_one_before() {
        let pending = Pending::default();
        let long_ago = Instant::now() - Duration::from_secs(100);
        let insert = |now| pending.insert(1, Dtype::Int32, Op::Sum, now).number;
        let [first, second, third] = [(), (), ()].map(|()| insert(long_ago));
        pending.remove(third);
        assert_eq!(pending.oldest().map(|oldest| oldest.since), Some(long_ago), "only overtaken");
        let before = Instant::now();
        pending.remove(first);
        assert!(pending.oldest().is_some_and(|oldest| oldest.since >= before), "the queue moved");
        pending.remove(second);
        let later = Instant::now() + Duration::from_secs(100);
        insert(later);
        assert_eq!(pending.oldest().map(|oldest| oldest.since), Some(later), "the queue was empty meanwhile");
    }
}
