//! What a rank told of its work, kept for who asks.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use fanin_udp::CollectiveKind;
use fanin_wire::Dtype;

use crate::proto;
use crate::proto::work::{Done, Total};

/// Most collectives that are taken of one heartbeat.
const TOLD_MAX: usize = 64;
/// Most that are kept of a rank, and of all ranks of a job.
const KEPT_MAX: usize = 4 * TOLD_MAX;
const KEPT_OF_JOB_MAX: usize = 1 << 16;
/// Kinds of collectives: those that there are.
const TOTALS_MAX: usize = 32;

/// Of what is asked.
#[derive(Debug)]
pub(super) struct WorkAsked {
    /// What ended in the last while.
    within: Duration,
    /// So many collectives of ranks: an answer has a length.
    left: usize,
}

impl WorkAsked {
    pub const fn lately(within: Duration) -> Self {
        Self { within, left: KEPT_OF_JOB_MAX }
    }
}

/// A rank's work, as it told it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct RankWork {
    /// With its end, the oldest first.
    done: VecDeque<(Instant, Done)>,
    totals: Vec<Total>,
    busy_us: u64,
    period: Option<u32>,
    heard: Option<Instant>,
}

impl RankWork {
    /// It told this now, in a job of so many ranks.
    pub fn heard(&mut self, work: proto::Work, now: Instant, ranks: usize) {
        let known = |total: &Total| {
            CollectiveKind::ALL.iter().any(|kind| kind.name() == total.collective)
                && Dtype::ALL.iter().any(|dtype| dtype.name() == total.dtype)
        };
        if work.totals.len() > TOTALS_MAX || !work.totals.iter().all(known) {
            return;
        }
        let counts = |done: &Done| (done.total as usize) < work.totals.len();
        for done in work.done.into_iter().take(TOLD_MAX).filter(counts) {
            let ended = now.checked_sub(Duration::from_micros(done.ago_us));
            self.done.extend(ended.map(|ended| (ended, done)));
        }
        let kept = (KEPT_OF_JOB_MAX / ranks.max(1)).clamp(1, KEPT_MAX);
        self.done.drain(..self.done.len().saturating_sub(kept));
        (self.totals, self.busy_us, self.period) = (work.totals, work.busy_us, work.period);
        self.heard = Some(now);
    }

    /// What it did in the last while, and all in all.
    pub fn told(&self, asked: &mut WorkAsked, now: Instant) -> proto::Work {
        let ago = |then: Instant| now.saturating_duration_since(then);
        let microseconds = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let lately = self.done.iter().filter(|(ended, _)| ago(*ended) <= asked.within).take(asked.left);
        let done: Vec<_> =
            lately.map(|(ended, done)| Done { ago_us: microseconds(ago(*ended)), ..*done }).collect();
        asked.left -= done.len();
        proto::Work {
            done,
            totals: self.totals.clone(),
            busy_us: self.busy_us,
            period: self.period,
            told_ago_us: self.heard.map(|heard| microseconds(ago(heard))),
        }
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
        let mut asked = WorkAsked { within: Duration::from_secs(9), left: 5 };
        let lengths = [(); 2].map(|()| kept.told(&mut asked, now).done.len());
        assert_eq!(lengths, [4, 1], "an answer is not longer, however many ranks there are");
    }

    #[test]
    fn a_rank_fills_no_more_than_its_place() {
        let (mut kept, now) = (RankWork::default(), Instant::now());
        for beat in 0..100 {
            kept.heard(work(beat * 1000..(beat + 1) * 1000), now, 4);
        }
        assert_eq!(kept.done.len(), KEPT_MAX);
        kept.heard(work(0..1000), now, 4096);
        assert_eq!(kept.done.len(), KEPT_OF_JOB_MAX / 4096);
    }

    #[test]
    fn names_that_nobody_has_are_not_kept() {
        let (mut kept, now) = (RankWork::default(), Instant::now());
        let markup = proto::Work { totals: vec![total("<script>")], ..work(0..1) };
        let beyond = proto::Work { totals: Vec::new(), ..work(0..1) };
        let many = proto::Work { totals: vec![total("all_reduce"); 33], ..work(0..1) };
        [markup, beyond, many].into_iter().for_each(|told| kept.heard(told, now, 1));
        assert!(kept.done.is_empty() && kept.totals.is_empty());
    }
}
