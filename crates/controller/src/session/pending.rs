//! The all-reduces that are under way, and since when: what a deadline needs to know.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fanin_udp::Submission;
use fanin_wire::WireDtype;

use super::pace::Pace;
use super::work::{Work, period};
use crate::error::Tensor;
use crate::proto;

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
    /// How long nothing was under way before it.
    computed: Duration,
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
    pace: Pace,
    work: Work,
}

/// The part of an all-reduce that networks see.
#[derive(Clone, Copy, Debug)]
pub(super) struct Travelled {
    /// Headers apart.
    pub bytes: usize,
    /// From its first result to its last one: no rank was waited for meanwhile, unless it paused.
    pub flowed: Duration,
}

impl Pending {
    /// All-reduces of a job whose plan says so many seconds a byte.
    pub fn planned(seconds_per_byte: Option<f64>) -> Self {
        Self(Mutex::new(Table { pace: Pace::planned(seconds_per_byte), ..Table::default() }))
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes an all-reduce that begins now, and returns its name.
    pub fn insert(&self, submission: &Submission, now: Instant) -> Tensor {
        let mut table = self.lock();
        let tensor = Tensor::of(submission, table.next);
        table.next += 1;
        let is_first = table.under_way.is_empty();
        let computed = if is_first { table.work.turns_busy(now) } else { Duration::ZERO };
        table.under_way.insert(tensor.number, AllReduce { since: now, tensor, computed });
        tensor
    }

    /// Notes that an all-reduce has ended; `travelled` is given if it came out well.
    pub fn remove(&self, number: u64, now: Instant, travelled: Option<Travelled>) {
        let mut table = self.lock();
        // One that was overtaken is no nearer to its end.
        let is_oldest = table.under_way.first_key_value().is_some_and(|(oldest, _)| *oldest == number);
        let ended = table.under_way.remove(&number);
        let large = travelled.filter(|travelled| travelled.bytes >= LARGE_BYTES);
        if let (Some(ended), Some(Travelled { bytes, flowed })) = (ended, large) {
            let since = table.last_end.map_or(ended.since, |end| end.max(ended.since));
            table.took.truncate(LATELY - 1);
            let took = now.saturating_duration_since(since);
            table.took.push_front(took.as_secs_f64() / bytes as f64);
            table.pace.note(now, took.min(flowed).as_secs_f64() / bytes as f64);
        }
        if is_oldest {
            table.last_end = Some(now);
        }
        let Some(AllReduce { since, tensor, computed }) = ended else { return };
        if table.under_way.is_empty() {
            table.work.turns_idle(now);
        }
        table.work.done(&tensor, now, now.saturating_duration_since(since), computed);
    }

    /// What was done after a moment, and since the beginning.
    pub fn work(&self, after: Option<Instant>, now: Instant) -> proto::Work {
        let (told, shapes) = {
            let table = self.lock();
            (table.work.told(after, now, !table.under_way.is_empty()), table.work.shapes())
        };
        // No collective waits for this.
        proto::Work { period: period(&shapes), ..told }
    }

    /// What a byte of large tensors takes of late, in seconds: the median. `None` before the first.
    pub fn seconds_per_byte(&self) -> Option<f64> {
        let mut took: Vec<f64> = self.lock().took.iter().copied().collect();
        let middle = took.len() / 2;
        (!took.is_empty()).then(|| *took.select_nth_unstable_by(middle, f64::total_cmp).1)
    }

    /// The seconds that a byte takes at least, if that does not fit the plan: once.
    pub fn misfit(&self) -> Option<f64> {
        self.lock().pace.misfit()
    }

    /// The number of the next one.
    pub fn next(&self) -> u64 {
        self.lock().next
    }

    /// The one that was submitted first.
    pub fn oldest(&self) -> Option<AllReduce> {
        let table = self.lock();
        let oldest = *table.under_way.first_key_value()?.1;
        let since = table.last_end.map_or(oldest.since, |end| end.max(oldest.since));
        Some(AllReduce { since, ..oldest })
    }
}

/// How many bytes of a tensor travel, headers apart, in a job of this wire dtype. If it
/// `aggregates`, switches make integers of what comes in two bytes.
pub(super) fn bytes_on_wire(tensor: &Tensor, wire_dtype: WireDtype, aggregates: bool) -> usize {
    let each = match wire_dtype.of_tensor(tensor.dtype, tensor.elements) {
        WireDtype::SharedExponent if aggregates => tensor.dtype.element_bytes(),
        WireDtype::SharedExponent => 4,
        WireDtype::Bfloat16 => 2,
        WireDtype::Int8 => 1,
        WireDtype::Int4 => return tensor.elements.div_ceil(2),
        WireDtype::Native => tensor.dtype.element_bytes(),
    };
    tensor.elements.saturating_mul(each)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fanin_udp::CollectiveKind;
    use fanin_wire::{Dtype, Op};

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
        let ends = |milliseconds: u64, bytes: Option<usize>| {
            let number = pending.insert(&Submission::all_gather(vec![]), start).number;
            let travelled = bytes.map(|bytes| Travelled { bytes, flowed: Duration::ZERO });
            pending.remove(number, start + Duration::from_millis(milliseconds), travelled);
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

    /// Ends an all-reduce each 500 ms, of so many bytes, which flowed for so long.
    fn at_pace(pending: &Pending, count: u32, bytes: usize, flowed: Duration) {
        let mut now = Instant::now();
        for _ in 0..count {
            let number = pending.insert(&Submission::all_gather(vec![]), now).number;
            now += Duration::from_millis(500);
            pending.remove(number, now, Some(Travelled { bytes, flowed }));
        }
    }

    #[test]
    fn large_tensors_alone_are_held_against_the_plan() {
        // 100 ms for the shortest large one.
        let pending = Pending::planned(Some(0.1 / LARGE_BYTES as f64));
        at_pace(&pending, 100, LARGE_BYTES - 1, Duration::from_millis(500));
        assert_eq!(pending.misfit(), None);
        at_pace(&pending, 100, LARGE_BYTES, Duration::from_millis(250));
        assert_eq!(pending.misfit(), Some(0.25 / LARGE_BYTES as f64));
    }

    #[test]
    fn a_plan_fits_though_a_rank_comes_late_with_every_tensor() {
        let pending = Pending::planned(Some(0.1 / LARGE_BYTES as f64));
        at_pace(&pending, 100, LARGE_BYTES, Duration::from_millis(100));
        assert_eq!(pending.misfit(), None);
        assert_eq!(pending.seconds_per_byte(), Some(0.5 / LARGE_BYTES as f64), "the wait is shown");
    }

    #[test]
    fn a_tensor_that_begins_before_the_last_one_ends_counts_from_that_end() {
        let pending = Pending::planned(Some(0.1 / LARGE_BYTES as f64));
        let start = Instant::now();
        let numbers = [(); 100].map(|()| pending.insert(&Submission::all_gather(vec![]), start).number);
        for (number, ended) in numbers.into_iter().zip(1..) {
            let flowed = Duration::from_millis(600);
            let travelled = Travelled { bytes: LARGE_BYTES, flowed };
            pending.remove(number, start + Duration::from_millis(150) * ended, Some(travelled));
        }
        assert_eq!(pending.misfit(), None);
    }

    #[test]
    fn bytes_are_counted_as_they_travel() {
        let tensor = |dtype, elements| {
            let kind = CollectiveKind::AllReduce;
            Tensor { kind, number: 0, elements, dtype, op: Op::Sum }
        };
        let bytes = |dtype, elements, wire_dtype| bytes_on_wire(&tensor(dtype, elements), wire_dtype, false);
        let integers = |dtype| bytes_on_wire(&tensor(dtype, 100_000), WireDtype::SharedExponent, true);
        assert_eq!([Dtype::Float32, Dtype::Int32, Dtype::Float16].map(integers), [400_000, 400_000, 200_000]);
        assert_eq!(bytes(Dtype::Float32, 100_000, WireDtype::SharedExponent), 400_000);
        assert_eq!(bytes(Dtype::Float32, 100_000, WireDtype::Bfloat16), 200_000);
        assert_eq!(bytes(Dtype::Float32, 100_000, WireDtype::Int8), 100_000);
        assert_eq!(bytes(Dtype::Float32, 100_001, WireDtype::Int4), 50_001);
        assert_eq!(bytes(Dtype::Float16, 100_000, WireDtype::SharedExponent), 400_000);
        assert_eq!(bytes(Dtype::Float16, 100_000, WireDtype::Native), 200_000);
        assert_eq!(bytes(Dtype::Float64, 100_000, WireDtype::Bfloat16), 800_000);
    }
}
