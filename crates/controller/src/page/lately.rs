//! The last collectives of a job, as its ranks tell them.
//!
//! No clocks are compared: a collective ends for all ranks at once, so a rank for which it took less
//! time began with it later, and was waited for.

use std::collections::BTreeMap;

use super::view::{Late, Sum};
use crate::proto;

/// Collectives that are kept, and the numbers of ranks in all of them.
const SUMS_MAX: usize = 200;
const CELLS_MAX: usize = 20_000;
/// Collectives of so many seconds are kept at least: more than ranks take until they tell.
const SPAN: f64 = 4.0;
/// A collective says who was late if so large a part of the ranks has told of it.
const TOLD: f64 = 0.9;

/// By number.
#[derive(Debug)]
pub(super) struct Lately {
    job: u32,
    /// Those with numbers that are multiples of this are kept.
    stride: u64,
    sums: BTreeMap<u64, Row>,
}

#[derive(Debug)]
struct Row {
    ended: f64,
    bytes: u64,
    collective: String,
    dtype: String,
    /// How long it took there, and how long the rank computed before.
    ranks: BTreeMap<u16, (f32, f32)>,
}

impl Default for Lately {
    fn default() -> Self {
        Self::of(0)
    }
}

impl Lately {
    const fn of(job: u32) -> Self {
        Self { job, stride: 1, sums: BTreeMap::new() }
    }

    /// Takes what the members of a job tell at this time.
    pub fn take(&mut self, job: u32, now: f64, members: &[proto::job::Member]) {
        if self.job != job {
            *self = Self::of(job);
        }
        let seconds = |microseconds: u64| microseconds as f64 * 1e-6;
        for member in members {
            let (Ok(rank), Some(work)) = (u16::try_from(member.rank), &member.work) else { continue };
            for done in work.done.iter().filter(|done| done.number.is_multiple_of(self.stride)) {
                let Some(total) = work.totals.get(done.total as usize) else { continue };
                let row = self.sums.entry(done.number).or_insert_with(|| Row {
                    ended: now - seconds(done.ago_us),
                    bytes: done.bytes,
                    collective: total.collective.clone(),
                    dtype: total.dtype.clone(),
                    ranks: BTreeMap::new(),
                });
                let times = (seconds(done.took_us) as f32, seconds(done.computed_us) as f32);
                row.ranks.insert(rank, times);
            }
        }
        let most = (CELLS_MAX / members.len().max(1)).clamp(4, SUMS_MAX);
        while self.sums.len() > most {
            let span = self.sums.last_key_value().zip(self.sums.first_key_value());
            let span = span.map_or(0.0, |((_, last), (_, first))| last.ended - first.ended);
            if span < SPAN {
                // Ranks tell one after the other: what is kept lasts until all have told.
                self.stride *= 2;
                self.sums.retain(|number, _| number.is_multiple_of(self.stride));
            } else {
                self.sums.pop_first();
            }
        }
    }

    /// The oldest first. Ranks tell one after the other, so it ends with the last one that all ranks
    /// have told.
    pub fn sums(&self) -> Vec<Sum> {
        let most = self.sums.values().map(|row| row.ranks.len()).max().unwrap_or(0);
        let last = self.sums.iter().rev().find(|(_, row)| row.ranks.len() == most).map(|(number, _)| *number);
        let sum = |(number, row): (&u64, &Row)| Sum {
            number: *number,
            ended: row.ended,
            bytes: row.bytes,
            collective: row.collective.clone(),
            dtype: row.dtype.clone(),
            ranks: row.ranks.iter().map(|(rank, (took, computed))| (*rank, *took, *computed)).collect(),
        };
        self.sums.iter().take_while(|(number, _)| Some(**number) <= last).map(sum).collect()
    }

    /// How late a rank was: `None` where no other rank told of the same collectives.
    pub fn late(&self, rank: u16) -> Option<Late> {
        let mut later: Vec<f64> = Vec::new();
        let mut was_last = 0;
        for row in self.shared() {
            let Some((own, _)) = row.ranks.get(&rank) else { continue };
            let earliest = row.ranks.values().map(|(took, _)| *took).fold(0.0, f32::max);
            later.push(f64::from(earliest - own));
            was_last += usize::from(row.last() == Some(rank));
        }
        later.sort_by(f64::total_cmp);
        let quartile = |quarter: usize| later[(later.len() - 1) * quarter / 4];
        (!later.is_empty()).then(|| Late {
            low: quartile(1),
            median: quartile(2),
            high: quartile(3),
            last: was_last as f64 / later.len() as f64,
            of: later.len(),
        })
    }

    /// By how much a rank was later than all others, where it was the last: the median.
    pub fn behind(&self, rank: u16) -> Option<f64> {
        let mut behind: Vec<f64> = Vec::new();
        for row in self.shared().filter(|row| row.last() == Some(rank)) {
            let others = row.ranks.iter().filter(|(other, _)| **other != rank);
            let next = others.map(|(_, (took, _))| *took).fold(f32::MAX, f32::min);
            behind.push(f64::from(next - row.ranks[&rank].0));
        }
        behind.sort_by(f64::total_cmp);
        behind.get(behind.len() / 2).copied()
    }

    /// How long a collective takes for the rank that waits longest: the median.
    pub fn typical(&self) -> Option<f64> {
        let longest = |row: &Row| row.ranks.values().map(|(took, _)| f64::from(*took)).fold(0.0, f64::max);
        let mut took: Vec<f64> = self.sums.values().map(longest).collect();
        took.sort_by(f64::total_cmp);
        took.get(took.len() / 2).copied()
    }

    /// When the last one ended.
    pub fn last_end(&self) -> Option<f64> {
        self.sums.values().map(|row| row.ended).max_by(f64::total_cmp)
    }

    /// The longest time between two ends.
    pub fn usual_pause(&self) -> Option<f64> {
        let mut ends: Vec<f64> = self.sums.values().map(|row| row.ended).collect();
        ends.sort_by(f64::total_cmp);
        ends.windows(2).map(|pair| pair[1] - pair[0]).max_by(f64::total_cmp)
    }

    /// The collectives of which nearly all ranks have told.
    fn shared(&self) -> impl Iterator<Item = &Row> {
        let most = self.sums.values().map(|row| row.ranks.len()).max().unwrap_or(0);
        let least = ((TOLD * most as f64).ceil() as usize).max(2);
        self.sums.values().filter(move |row| row.ranks.len() >= least)
    }
}

impl Row {
    /// The rank that began last.
    fn last(&self) -> Option<u16> {
        let last = self.ranks.iter().min_by(|(_, (one, _)), (_, (other, _))| one.total_cmp(other));
        last.map(|(rank, _)| *rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::job::Member;
    use crate::proto::work::{Done, Total};

    /// Ranks that took so many milliseconds each for each of so many collectives.
    fn told(took_ms: &[u64], numbers: std::ops::Range<u64>) -> Vec<Member> {
        let total = Total { collective: "all_reduce".into(), dtype: "float32".into(), count: 1, bytes: 4 };
        let member = |(rank, ms): (usize, &u64)| {
            let done = |number| Done { number, ago_us: 0, took_us: ms * 1000, bytes: 4, ..Done::default() };
            let done = numbers.clone().map(done).collect();
            let work = proto::Work { done, totals: vec![total.clone()], ..proto::Work::default() };
            Member { rank: rank as u32, work: Some(work), ..Member::default() }
        };
        took_ms.iter().enumerate().map(member).collect()
    }

    #[test]
    fn who_takes_less_time_was_waited_for() {
        let mut lately = Lately::default();
        lately.take(7, 100.0, &told(&[50, 49, 10, 48], 0..30));
        let late = lately.late(2).expect("it is in all");
        assert!((late.median - 0.040).abs() < 1e-6 && late.last == 1.0 && late.of == 30, "{late:?}");
        assert!(lately.late(0).is_some_and(|late| late.median == 0.0 && late.last == 0.0));
        assert!(lately.behind(2).is_some_and(|behind| (behind - 0.038).abs() < 1e-6));
        assert_eq!((lately.late(9), lately.behind(0)), (None, None));
        assert_eq!(lately.sums()[0].ranks.len(), 4);
    }

    #[test]
    fn what_only_some_ranks_have_told_is_not_shown_yet() {
        let mut lately = Lately::default();
        let mut members = told(&[50, 49], 0..30);
        members.truncate(1);
        lately.take(7, 100.0, &told(&[50, 49], 0..20));
        lately.take(7, 101.0, &members);
        assert_eq!(lately.sums().len(), 20);
    }

    #[test]
    fn of_512_ranks_that_tell_one_after_the_other_the_late_one_is_found() {
        let (mut lately, took) = (Lately::default(), [vec![50; 511], vec![10]].concat());
        for second in 0..20_u64 {
            // Half of the ranks tell, and then the others.
            for half in 0..2 {
                let now = second as f64 + half as f64 / 2.0;
                let members = told(&took, second * 64 + 32 * half..(second + 1) * 64 + 32 * half);
                let members: Vec<_> =
                    members.into_iter().filter(|member| u64::from(member.rank) % 2 == half).collect();
                lately.take(7, now, &members);
            }
        }
        let late = lately.late(511).expect("it is in some");
        assert!(late.of >= 10 && late.last == 1.0 && (late.median - 0.040).abs() < 1e-6, "{late:?}");
    }

    #[test]
    fn a_rank_alone_is_late_for_nobody() {
        let mut lately = Lately::default();
        lately.take(7, 100.0, &told(&[50], 0..30));
        assert_eq!(lately.late(0), None);
    }

    #[test]
    fn so_many_are_kept_and_those_of_another_job_are_not() {
        let mut lately = Lately::default();
        for second in 0..10 {
            lately.take(7, second as f64, &told(&[1, 2], second * 32..(second + 1) * 32));
        }
        let sums = lately.sums();
        assert_eq!((sums.len(), sums[0].number), (SUMS_MAX, 320 - SUMS_MAX as u64));
        lately.take(7, 10.0, &told(&vec![1; 4096], 320..336));
        assert!(lately.sums().len() <= CELLS_MAX / 4096, "{}", lately.sums().len());
        lately.take(8, 11.0, &told(&[1, 2], 0..1));
        assert_eq!(lately.sums().len(), 1);
    }
}
