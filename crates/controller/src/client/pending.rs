//! The all-reduces that are under way, and since when: what a deadline needs to know.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fanin_wire::{Dtype, Op};

/// One all-reduce under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct AllReduce {
    /// Its submission, or the end of the one before it if that came later: a long queue that moves is not late.
    pub since: Instant,
    pub elements: usize,
    pub dtype: Dtype,
    pub op: Op,
}

impl std::fmt::Display for AllReduce {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let op = match self.op {
            Op::Sum => "sum",
            Op::Average => "average",
        };
        write!(f, "{} {} elements ({op})", self.elements, self.dtype.name())
    }
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

    /// Notes an all-reduce, and returns the number under which it is to be removed.
    pub fn insert(&self, all_reduce: AllReduce) -> u64 {
        let mut table = self.lock();
        let number = table.next;
        table.next += 1;
        table.under_way.insert(number, all_reduce);
        number
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
        let all_reduce = AllReduce { since: long_ago, elements: 1, dtype: Dtype::Int32, op: Op::Sum };
        let [first, second, third] = [(), (), ()].map(|()| pending.insert(all_reduce));
        pending.remove(third);
        assert_eq!(pending.oldest().map(|oldest| oldest.since), Some(long_ago), "only overtaken");
        let before = Instant::now();
        pending.remove(first);
        assert!(pending.oldest().is_some_and(|oldest| oldest.since >= before), "the queue moved");
        pending.remove(second);
        let later = Instant::now() + Duration::from_secs(100);
        pending.insert(AllReduce { since: later, ..all_reduce });
        assert_eq!(pending.oldest().map(|oldest| oldest.since), Some(later), "the queue was empty meanwhile");
    }
}
