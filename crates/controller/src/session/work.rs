//! What a rank did of late, as it tells its services for people who ask them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::error::Tensor;
use crate::proto;

/// So many collectives are kept: more than are told at once.
const KEPT: usize = 2 * TOLD;
/// As many are told in a heartbeat.
const TOLD: usize = 64;
/// Collectives of this time are kept at least, if they are few enough.
const SPAN: Duration = Duration::from_secs(2);
/// Kinds of collectives that are told.
const TOTALS: usize = 32;
/// The repetition is looked for in so many collectives.
const SHAPES: usize = 512;
/// The longest step that is looked for. It is there a few times then.
const PERIOD_MAX: usize = SHAPES / 4;
/// The part of the collectives that repeat: a measurement or an epoch's end may come between.
const REPEATS: f64 = 0.98;
/// Times that differ by no more than this part are equally good.
const ALIKE: f64 = 0.005;

/// What repeats of a collective: its total, and its elements.
pub(super) type Shape = (usize, usize);

/// The collectives of a session that are done.
#[derive(Debug)]
pub(super) struct Work {
    done: VecDeque<Done>,
    /// Collectives with numbers that are multiples of this are kept. So a rank that keeps fewer keeps
    /// a part of what the others do.
    stride: u64,
    totals: Vec<Total>,
    shapes: VecDeque<Shape>,
    busy: Duration,
    /// Since when something is under way, or nothing is.
    turned: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
struct Done {
    number: u64,
    ended: Instant,
    took: Duration,
    computed: Duration,
    bytes: usize,
    total: usize,
}

#[derive(Clone, Copy, Debug)]
struct Total {
    collective: &'static str,
    dtype: &'static str,
    count: u64,
    bytes: u64,
}

impl Default for Work {
    fn default() -> Self {
        Self {
            done: VecDeque::new(),
            stride: 1,
            totals: Vec::new(),
            shapes: VecDeque::new(),
            busy: Duration::ZERO,
            turned: None,
        }
    }
}

impl Work {
    /// The first one begins after a time in which nothing was under way, which is returned.
    pub fn turns_busy(&mut self, now: Instant) -> Duration {
        self.turned.replace(now).map_or(Duration::ZERO, |idle| now.saturating_duration_since(idle))
    }

    /// The last one that was under way has ended.
    pub fn turns_idle(&mut self, now: Instant) {
        if let Some(busy) = self.turned.replace(now) {
            self.busy += now.saturating_duration_since(busy);
        }
    }

    /// One has ended now that took so long, and before which the rank computed for so long.
    pub fn done(&mut self, tensor: &Tensor, now: Instant, took: Duration, computed: Duration) {
        let (collective, dtype) = (tensor.kind.name(), tensor.dtype.name());
        let bytes = tensor.elements.saturating_mul(tensor.dtype.element_bytes());
        let known = |total: &Total| (total.collective, total.dtype) == (collective, dtype);
        let total = self.totals.iter().position(known).unwrap_or(self.totals.len());
        if total == TOTALS {
            return;
        }
        if total == self.totals.len() {
            self.totals.push(Total { collective, dtype, count: 0, bytes: 0 });
        }
        self.totals[total].count += 1;
        self.totals[total].bytes += bytes as u64;
        self.shapes.truncate(SHAPES - 1);
        self.shapes.push_front((total, tensor.elements));
        // After a burst there are few again.
        let last = self.done.back().map_or(now, |done| done.ended);
        if self.stride > 1 && now.saturating_duration_since(last) > SPAN / 16 {
            self.stride /= 2;
        }
        if !tensor.number.is_multiple_of(self.stride) {
            return;
        }
        self.done.push_back(Done { number: tensor.number, ended: now, took, computed, bytes, total });
        if self.done.len() > KEPT {
            let oldest = self.done.pop_front().map_or(now, |done| done.ended);
            let span = now.saturating_duration_since(oldest);
            if span < SPAN {
                self.stride *= 2;
                self.done.retain(|done| done.number.is_multiple_of(self.stride));
            }
        }
    }

    /// What was done after a moment, and since the beginning.
    pub fn told(&self, after: Option<Instant>, now: Instant, is_busy: bool) -> proto::Work {
        let news: Vec<_> =
            self.done.iter().filter(|done| after.is_none_or(|after| done.ended > after)).collect();
        let mut stride = self.stride;
        let count = |stride: u64| news.iter().filter(|done| done.number.is_multiple_of(stride)).count();
        while count(stride) > TOLD {
            stride *= 2;
        }
        let since_turn = self.turned.filter(|_| is_busy).map(|busy| now.saturating_duration_since(busy));
        proto::Work {
            done: news
                .into_iter()
                .filter(|done| done.number.is_multiple_of(stride))
                .map(|done| done.told(now))
                .collect(),
            totals: self.totals.iter().map(Total::told).collect(),
            busy_us: microseconds(self.busy + since_turn.unwrap_or_default()),
            period: None,
            told_ago_us: None,
        }
    }

    /// The last collectives, of which [`period`] says how they repeat.
    pub fn shapes(&self) -> Vec<Shape> {
        self.shapes.iter().copied().collect()
    }
}

/// After how many collectives they repeat: the shortest time that is about as good as the best. It
/// takes a while.
pub(super) fn period(shapes: &[Shape]) -> Option<u32> {
    let repeats = |period: usize| {
        let pairs = shapes.len() - period;
        let same = (period..shapes.len()).filter(|at| shapes[*at] == shapes[*at - period]).count();
        same as f64 / pairs as f64
    };
    let all: Vec<_> = (1..=PERIOD_MAX.min(shapes.len() / 4)).map(repeats).collect();
    let best = all.iter().copied().fold(REPEATS, f64::max);
    all.iter().position(|one| *one >= REPEATS.max(best - ALIKE)).map(|index| index as u32 + 1)
}

impl Done {
    fn told(&self, now: Instant) -> proto::work::Done {
        proto::work::Done {
            number: self.number,
            ago_us: microseconds(now.saturating_duration_since(self.ended)),
            took_us: microseconds(self.took),
            computed_us: microseconds(self.computed),
            bytes: self.bytes as u64,
            total: self.total as u32,
        }
    }
}

impl Total {
    fn told(&self) -> proto::work::Total {
        proto::work::Total {
            collective: self.collective.into(),
            dtype: self.dtype.into(),
            count: self.count,
            bytes: self.bytes,
        }
    }
}

fn microseconds(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fanin_udp::CollectiveKind;
    use fanin_wire::{Dtype, Op};

    fn tensor(number: u64, elements: usize) -> Tensor {
        let (kind, dtype) = (CollectiveKind::AllReduce, Dtype::Float32);
        Tensor { kind, number, elements, dtype, op: Op::Sum }
    }

    /// So many collectives, one in so long, each half of the time under way.
    fn worked(count: u64, each: Duration, elements: impl Fn(u64) -> usize) -> (Work, Instant) {
        let (mut work, mut now) = (Work::default(), Instant::now());
        for number in 0..count {
            let computed = work.turns_busy(now);
            now += each / 2;
            work.turns_idle(now);
            work.done(&tensor(number, elements(number)), now, each / 2, computed);
            now += each / 2;
        }
        (work, now)
    }

    #[test]
    fn a_rank_tells_what_it_did_since_it_told_last() {
        let each = Duration::from_millis(100);
        let (work, now) = worked(10, each, |_| 25);
        let told = work.told(Some(now - Duration::from_millis(200)), now, false);
        let numbers: Vec<_> = told.done.iter().map(|done| (done.number, done.ago_us)).collect();
        assert_eq!(numbers, [(8, 150_000), (9, 50_000)]);
        assert_eq!(
            (told.done[0].took_us, told.done[0].computed_us, told.done[0].bytes),
            (50_000, 50_000, 100)
        );
        assert_eq!(told.busy_us, 500_000);
        assert_eq!((told.totals[0].count, told.totals[0].bytes), (10, 1000));
        assert_eq!(
            (told.totals[0].collective.as_str(), told.totals[0].dtype.as_str()),
            ("all_reduce", "float32")
        );
    }

    #[test]
    fn ranks_tell_of_the_same_collectives_however_many_there_are() {
        let (work, now) = worked(100_000, Duration::from_micros(100), |_| 1);
        let second = |work: &Work, now| {
            let told = work.told(Some(now - Duration::from_secs(1)), now, false).done;
            told.into_iter().map(|done| done.number).collect::<Vec<_>>()
        };
        let all = second(&work, now);
        assert!((16..=TOLD).contains(&all.len()), "{}", all.len());
        // Another rank tells half a second later.
        let (work, now) = worked(105_000, Duration::from_micros(100), |_| 1);
        let others = second(&work, now);
        let both = all.iter().filter(|number| others.contains(number)).count();
        assert!(both >= all.len() / 2 - 1, "{both} of {} and {}", all.len(), others.len());
    }

    #[test]
    fn few_collectives_after_a_burst_are_all_told_soon() {
        let (mut work, mut now) = worked(20_000, Duration::from_micros(50), |_| 1);
        for number in 20_000..20_060 {
            now += Duration::from_millis(100);
            work.done(&tensor(number, 1), now, Duration::ZERO, Duration::ZERO);
        }
        assert_eq!(work.told(Some(now - Duration::from_secs(1)), now, false).done.len(), 10);
    }

    #[test]
    fn what_is_under_way_counts_as_work() {
        let (mut work, now) = worked(2, Duration::from_secs(1), |_| 1);
        work.turns_busy(now);
        let later = now + Duration::from_secs(3);
        assert_eq!(work.told(None, later, true).busy_us, 4_000_000);
    }

    #[test]
    fn a_step_is_what_repeats() {
        let period = |count, elements: fn(u64) -> usize| {
            super::period(&worked(count, Duration::from_millis(1), elements).0.shapes())
        };
        assert_eq!(period(1000, |number| [7, 5, 5, 5, 3][number as usize % 5]), Some(5));
        assert_eq!(period(1000, |_| 4), Some(1));
        assert_eq!(period(1000, |number| number as usize), None);
        assert_eq!(period(3, |_| 1), None, "too few to tell");
        assert_eq!(period(1000, |number| if number % 100 == 99 { 7 } else { 5 }), Some(100));
        // A measurement comes between.
        assert_eq!(
            period(1000, |number| if number == 777 { 99 } else { [7, 5, 3][number as usize % 3] }),
            Some(3)
        );
    }
}
