//! The all-reduces that are under way, and since when: what a deadline needs to know.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fanin_wire::{Dtype, Op};

/// One all-reduce under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct AllReduce {
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
        self.lock().under_way.remove(&number);
    }

    /// The one that was submitted first.
    pub fn oldest(&self) -> Option<AllReduce> {
        self.lock().under_way.first_key_value().map(|(_, all_reduce)| *all_reduce)
    }
}
