//! The all-reduces that are under way, and since when: what a deadline needs to know.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fanin_udp::Submission;
use fanin_wire::WireDtype;

use crate::error::Tensor;

/// Shorter ones tell of round trips, and not of rates.
const LARGE_BYTES: usize = 1 << 20;
/// As many are what was of late.
const LATELY: usize = 31;

/// One all-reduce under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct AllReduce {
    /// Its submission, or the end of the one before it if that came later: a long queue that moves
    /// is not late.
    pub since: Instant,
    pub tensor: Tensor,
}

/// All-reduces under way, in the order in which they were submitted. One lock an all-reduce, none a
/// packet.
#[derive(Debug, Default)]
pub(super) struct Pending(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    next: u64,
    under_way: BTreeMap<u64, AllReduce>,
    /// When one ended last.
    last_end: Option<Instant>,
    /// Seconds a byte of the large ones that came out well of late.
    took: VecDeque<f64>,
}

impl Pending {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes an all-reduce that begins now, and returns its name.
    pub fn insert(&self, submission: &Submission, now: Instant) -> Tensor {
        let mut table = self.lock();
        let tensor = Tensor::of(submission, table.next);
        table.next += 1;
        table.under_way.insert(tensor.number, AllReduce { since: now, tensor });
        tensor
    }

    /// One has ended; `bytes` of it travelled, if it came out well.
    pub fn remove(&self, number: u64, now: Instant, bytes: Option<usize>) {
        let mut table = self.lock();
        // One that was overtaken is no nearer to its end.
        let is_oldest = table.under_way.first_key_value().is_some_and(|(oldest, _)| *oldest == number);
        let ended = table.under_way.remove(&number);
        if let (Some(ended), Some(bytes)) = (ended, bytes.filter(|bytes| *bytes >= LARGE_BYTES)) {
            let since = table.last_end.map_or(ended.since, |end| end.max(ended.since));
            table.took.truncate(LATELY - 1);
            table.took.push_front(now.saturating_duration_since(since).as_secs_f64() / bytes as f64);
        }
        if is_oldest {
            table.last_end = Some(now);
        }
    }

    /// What a byte of large tensors takes of late, in seconds: the median. `None` before the first.
    pub fn seconds_per_byte(&self) -> Option<f64> {
        let mut took: Vec<f64> = self.lock().took.iter().copied().collect();
        let middle = took.len() / 2;
        (!took.is_empty()).then(|| *took.select_nth_unstable_by(middle, f64::total_cmp).1)
    }

    /// The one that was submitted first.
    pub fn oldest(&self) -> Option<AllReduce> {
        let table = self.lock();
        let oldest = *table.under_way.first_key_value()?.1;
        let since = table.last_end.map_or(oldest.since, |end| end.max(oldest.since));
        Some(AllReduce { since, ..oldest })
    }
}

/// How many bytes of a tensor travel, headers apart, in a job of this wire dtype.
pub(super) fn bytes_on_wire(tensor: &Tensor, wire_dtype: WireDtype) -> usize {
    let each = match wire_dtype.of_tensor(tensor.dtype, tensor.elements) {
        WireDtype::SharedExponent => 4,
        WireDtype::Bfloat16 => 2,
        WireDtype::Int8 => 1,
        WireDtype::Native => tensor.dtype.element_bytes(),
    };
    tensor.elements.saturating_mul(each)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fanin_udp::CollectiveKind;
    use fanin_wire::{Dtype, Op};
    use std::time::Duration;

    #[test]
    fn time_counts_from_the_later_of_submission_and_the_end_of_the_one_before() {
        let pending = Pending::default();
        let long_ago = Instant::now() - Duration::from_secs(100);
        let insert = |now| pending.insert(&Submission::all_gather(vec![]), now).number;
        let [first, second, third] = [(), (), ()].map(|()| insert(long_ago));
        pending.remove(third, Instant::now(), None);
        assert_eq!(pending.oldest().map(|oldest| oldest.since), Some(long_ago), "only overtaken");
        let before = Instant::now();
        pending.remove(first, Instant::now(), None);
        assert!(pending.oldest().is_some_and(|oldest| oldest.since >= before), "the queue moved");
        pending.remove(second, Instant::now(), None);
        let later = Instant::now() + Duration::from_secs(100);
        insert(later);
        assert_eq!(pending.oldest().map(|oldest| oldest.since), Some(later), "the queue was empty meanwhile");
    }
    #[test]
    fn what_a_byte_takes_is_the_median_of_large_tensors_that_came_out_well() {
        let pending = Pending::default();
        let start = Instant::now();
        let ends = |milliseconds: u64, bytes| {
            let number = pending.insert(&Submission::all_gather(vec![]), start).number;
            pending.remove(number, start + Duration::from_millis(milliseconds), bytes);
        };
        ends(1, Some(LARGE_BYTES - 1));
        ends(2, None);
        assert_eq!(pending.seconds_per_byte(), None);
        // Each counts from the end of the one before: 8, 10 and 980 ms.
        for end in [10, 20, 1000] {
            ends(end, Some(LARGE_BYTES));
        }
        let of_megabyte =
            |pending: &Pending| pending.seconds_per_byte().unwrap_or_default() * LARGE_BYTES as f64;
        assert!((of_megabyte(&pending) - 0.010).abs() < 1e-9, "{}", of_megabyte(&pending));
        for end in 1..=LATELY as u64 {
            ends(1000 + 50 * end, Some(LARGE_BYTES));
        }
        assert!((of_megabyte(&pending) - 0.050).abs() < 1e-9, "the older ones are forgotten");
    }

    #[test]
    fn bytes_are_counted_as_they_travel() {
        let bytes = |dtype, elements, wire_dtype| {
            bytes_on_wire(
                &Tensor { kind: CollectiveKind::AllReduce, number: 0, elements, dtype, op: Op::Sum },
                wire_dtype,
            )
        };
        assert_eq!(bytes(Dtype::Float32, 100_000, WireDtype::SharedExponent), 400_000);
        assert_eq!(bytes(Dtype::Float32, 100_000, WireDtype::Bfloat16), 200_000);
        assert_eq!(bytes(Dtype::Float32, 100_000, WireDtype::Int8), 100_000);
        assert_eq!(bytes(Dtype::Float16, 100_000, WireDtype::SharedExponent), 400_000);
        assert_eq!(bytes(Dtype::Float16, 100_000, WireDtype::Native), 200_000);
        assert_eq!(bytes(Dtype::Float64, 100_000, WireDtype::Bfloat16), 800_000);
    }
}
