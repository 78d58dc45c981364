//! What a rank told of its work, kept for who asks.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use fanin_udp::CollectiveKind;
use fanin_wire::Dtype;

use crate::proto;
use crate::proto::work::{Done, Total};

/// Most collectives that are taken of one heartbeat.
const TOLD_MAX: usize = 64;
/// Most that are kept of a rank, and of all ranks of a job: 1.3 MB.
const KEPT_MAX: usize = 4 * TOLD_MAX;
const KEPT_OF_JOB_MAX: usize = 1 << 14;
/// Most that are told in one answer; a total counts as two.
const ANSWERED_MAX: usize = 1 << 15;

/// How much of it is asked.
#[derive(Debug)]
pub(super) struct WorkAsked {
    /// What was heard in the last while.
    within: Duration,
    /// So many collectives of ranks: an answer has a length.
    left: usize,
}

impl WorkAsked {
    pub const fn lately(within: Duration) -> Self {
        Self { within, left: ANSWERED_MAX }
    }
}

/// A rank's work, as it told it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct RankWork {
    /// The oldest first.
    done: VecDeque<Kept>,
    totals: Vec<KeptTotal>,
    busy_us: u64,
    period: Option<u32>,
    heard: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Kept {
    heard: Instant,
    ended: Instant,
    done: Done,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct KeptTotal {
    collective: CollectiveKind,
    dtype: Dtype,
    count: u64,
    bytes: u64,
}

impl RankWork {
    /// It told this now, in a job of so many ranks.
    pub fn heard(&mut self, work: proto::Work, now: Instant, ranks: usize) {
        let Some(totals) = work.totals.iter().map(KeptTotal::of).collect::<Option<Vec<_>>>() else { return };
        let is_new = |(index, total): (usize, &KeptTotal)| {
            !totals[..index]
                .iter()
                .any(|other| (other.collective, other.dtype) == (total.collective, total.dtype))
        };
        // So there are no more than kinds.
        if !totals.iter().enumerate().all(is_new) {
            return;
        }
        let most = (KEPT_OF_JOB_MAX / ranks.max(1)).clamp(1, KEPT_MAX);
        let told = || work.done.iter().take(TOLD_MAX).filter(|done| (done.total as usize) < totals.len());
        // Ranks tell at unlike moments. All keep the same ones.
        let mut stride = 1;
        while told().filter(|done| done.number.is_multiple_of(stride)).count() > most.div_ceil(2) {
            stride *= 2;
        }
        for done in told().filter(|done| done.number.is_multiple_of(stride)) {
            let ended = now.checked_sub(Duration::from_micros(done.ago_us));
            self.done.extend(ended.map(|ended| Kept { heard: now, ended, done: *done }));
        }
        self.done.drain(..self.done.len().saturating_sub(most));
        (self.totals, self.busy_us, self.period) = (totals, work.busy_us, work.period);
        self.heard = Some(now);
    }

    /// What it did in the last while, and all in all.
    pub fn told(&self, asked: &mut WorkAsked, now: Instant) -> proto::Work {
        let ago = |then: Instant| now.saturating_duration_since(then);
        let microseconds = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let Some(left) = asked.left.checked_sub(2 * self.totals.len()) else { return proto::Work::default() };
        let lately = self.done.iter().filter(|kept| ago(kept.heard) <= asked.within).take(left);
        let done: Vec<_> =
            lately.map(|kept| Done { ago_us: microseconds(ago(kept.ended)), ..kept.done }).collect();
        asked.left = left - done.len();
        proto::Work {
            done,
            totals: self.totals.iter().map(KeptTotal::told).collect(),
            busy_us: self.busy_us,
            period: self.period,
            told_ago_us: self.heard.map(|heard| microseconds(ago(heard))),
        }
    }
}

impl KeptTotal {
    /// Nothing for names that nobody has.
    fn of(total: &Total) -> Option<Self> {
        let collective = CollectiveKind::ALL.into_iter().find(|kind| kind.name() == total.collective)?;
        let dtype = Dtype::ALL.into_iter().find(|dtype| dtype.name() == total.dtype)?;
        Some(Self { collective, dtype, count: total.count, bytes: total.bytes })
    }

    fn told(&self) -> Total {
        let (collective, dtype) = (self.collective.name().into(), self.dtype.name().into());
        Total { collective, dtype, count: self.count, bytes: self.bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn total(collective: &str) -> Total {
        Total { collective: collective.into(), dtype: "float32".into(), count: 1, bytes: 4 }
    }

    fn work(numbers: impl IntoIterator<Item = u64>) -> proto::Work {
        let done = |number| Done { number, ago_us: 1000, took_us: 10, ..Done::default() };
        proto::Work {
            done: numbers.into_iter().map(done).collect(),
            totals: vec![total("all_reduce")],
            ..proto::Work::default()
        }
    }

    #[test]
    fn what_was_done_lately_is_told_with_its_age() {
        let (mut kept, start) = (RankWork::default(), Instant::now());
        kept.heard(work(0..2), start, 1);
        kept.heard(work(2..4), start + Duration::from_secs(1), 1);
        let now = start + Duration::from_millis(1500);
        let mut asked = WorkAsked::lately(Duration::from_secs(1));
        let told = kept.told(&mut asked, now);
        let ages: Vec<_> = told.done.iter().map(|done| (done.number, done.ago_us)).collect();
        assert_eq!(ages, [(2, 501_000), (3, 501_000)]);
        assert_eq!(told.told_ago_us, Some(500_000));
        let mut asked = WorkAsked { within: Duration::from_secs(9), left: 9 };
        let lengths = [(); 3].map(|()| kept.told(&mut asked, now).done.len());
        assert_eq!(lengths, [4, 1, 0], "an answer is not longer, however many ranks there are");
        assert_eq!(kept.told(&mut asked, now), proto::Work::default());
    }

    #[test]
    fn a_rank_fills_no_more_than_its_place_and_all_ranks_keep_the_same() {
        let (mut kept, now) = (RankWork::default(), Instant::now());
        for beat in 0..100 {
            kept.heard(work(beat * 64..(beat + 1) * 64), now, 4);
        }
        assert_eq!(kept.done.len(), KEPT_MAX);
        let numbers = |first: u64| {
            let mut kept = RankWork::default();
            kept.heard(work(first..first + 64), now, 4096);
            kept.done.iter().map(|kept| kept.done.number).collect::<Vec<_>>()
        };
        assert_eq!((numbers(0), numbers(32)), (vec![0, 32], vec![32, 64]));
    }

    #[test]
    fn names_that_nobody_has_are_not_kept() {
        let (mut kept, now) = (RankWork::default(), Instant::now());
        let markup = proto::Work { totals: vec![total("<script>")], ..work(0..1) };
        let beyond = proto::Work { totals: Vec::new(), ..work(0..1) };
        let twice = proto::Work { totals: vec![total("all_reduce"); 2], ..work(0..1) };
        [markup, beyond, twice].into_iter().for_each(|told| kept.heard(told, now, 1));
        assert!(kept.done.is_empty() && kept.totals.is_empty());
    }
}
