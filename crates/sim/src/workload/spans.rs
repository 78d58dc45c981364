//! The times at which each rank of a job computed, submitted a tensor and had its sum. Pictures show
//! them, so only the first are kept.

use std::collections::BTreeMap;

use fanin_protocol::Instant;
use serde::Serialize;

/// Entries of each list; the jobs of a run share them equally.
const KEPT_MAX: usize = 40_000;

/// All that is kept of one job.
pub(crate) struct Spans {
    kept_max: usize,
    workers: usize,
    tensors: BTreeMap<u64, Whole>,
    of_ranks: Vec<(usize, u64, Instant, Instant)>,
    computing: Vec<(usize, Instant, Instant)>,
    /// By rank, how it computed last.
    last: Vec<Stretch>,
    left_out: LeftOut,
}

/// A time in which a rank computed without a pause.
#[derive(Clone, Default)]
struct Stretch {
    /// Its place in the list, if it is there.
    kept: Option<usize>,
    until: Option<Instant>,
}

/// A tensor over all ranks.
struct Whole {
    submitted: [Instant; 2],
    summed: [Instant; 2],
    /// Ranks that have its sum.
    count: usize,
}

/// How many entries of each list were not kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// Tensors over all ranks.
    pub tensors: u64,
    /// Tensors of single ranks.
    pub spans: u64,
    /// Times in which a rank computed.
    pub computing: u64,
}

/// The same in seconds, for a report.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct JobSpans {
    /// Tensors that all ranks have. Each is a number, the first and the last submission, and the
    /// first and the last arrival of the sum.
    pub tensors: Vec<(u64, f64, f64, f64, f64)>,
    /// Each tensor of a rank: rank, number, submitted, summed.
    pub spans: Vec<(usize, u64, f64, f64)>,
    /// Times in which a rank computed: rank, from, to.
    pub computing: Vec<(usize, f64, f64)>,
    /// The lists have the first in time.
    pub left_out: LeftOut,
}

impl Spans {
    pub(crate) fn new(workers: usize, jobs: usize) -> Self {
        Self {
            kept_max: (KEPT_MAX / jobs.max(1)).max(1),
            workers,
            tensors: BTreeMap::new(),
            of_ranks: Vec::new(),
            computing: Vec::new(),
            last: vec![Stretch::default(); workers],
            left_out: LeftOut::default(),
        }
    }

    /// A stretch that begins as the last one ended prolongs it.
    pub(crate) fn computes(&mut self, rank: usize, from: Instant, to: Instant) {
        let Stretch { kept, until } = &mut self.last[rank];
        let goes_on = until.replace(to) == Some(from);
        match *kept {
            Some(at) if goes_on => self.computing[at].2 = to,
            None if goes_on => {}
            _ if self.computing.len() < self.kept_max => {
                *kept = Some(self.computing.len());
                self.computing.push((rank, from, to));
            }
            _ => {
                *kept = None;
                self.left_out.computing += 1;
            }
        }
    }

    /// The rank computes no longer.
    pub(crate) fn ends(&mut self, rank: usize, now: Instant) {
        let Stretch { kept, .. } = std::mem::take(&mut self.last[rank]);
        if let Some(kept) = kept {
            self.computing[kept].2 = self.computing[kept].2.min(now);
        }
    }

    pub(crate) fn summed(&mut self, rank: usize, tensor: u64, submitted: Instant, now: Instant) {
        if self.of_ranks.len() < self.kept_max {
            self.of_ranks.push((rank, tensor, submitted, now));
        } else {
            self.left_out.spans += 1;
        }
        // Their numbers begin at 0 and have no gaps.
        if tensor >= self.kept_max as u64 {
            self.left_out.tensors += u64::from(rank == 0);
            return;
        }
        let fresh = || Whole { submitted: [submitted; 2], summed: [now; 2], count: 0 };
        let whole = self.tensors.entry(tensor).or_insert_with(fresh);
        whole.count += 1;
        for (extremes, at) in [(&mut whole.submitted, submitted), (&mut whole.summed, now)] {
            *extremes = [extremes[0].min(at), extremes[1].max(at)];
        }
    }

    /// The run has ended; nobody computes beyond that.
    pub(crate) fn report(&self, ended: Instant) -> JobSpans {
        let s = |at: Instant| at.0 as f64 / 1e9;
        let all = self.tensors.iter().filter(|(_, whole)| whole.count >= self.workers);
        let tensors = all.map(|(tensor, Whole { submitted, summed, .. })| {
            (*tensor, s(submitted[0]), s(submitted[1]), s(summed[0]), s(summed[1]))
        });
        let spans = self.of_ranks.iter().map(|&(rank, tensor, from, to)| (rank, tensor, s(from), s(to)));
        let computing = self.computing.iter().map(|&(rank, from, to)| (rank, s(from), s(to.min(ended))));
        JobSpans {
            tensors: tensors.collect(),
            spans: spans.collect(),
            computing: computing.collect(),
            left_out: self.left_out,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_is_whole_when_all_ranks_have_it_and_phases_without_a_gap_are_one() {
        let mut spans = Spans::new(2, 1);
        spans.computes(0, Instant(0), Instant(5));
        spans.computes(1, Instant(0), Instant(4));
        spans.computes(0, Instant(5), Instant(9));
        spans.computes(0, Instant(10), Instant(11));
        spans.summed(0, 0, Instant(9), Instant(20));
        spans.summed(1, 0, Instant(4), Instant(21));
        spans.summed(1, 1, Instant(5), Instant(30));
        let found = spans.report(Instant(100));
        assert_eq!(found.computing, [(0, 0.0, 9e-9), (1, 0.0, 4e-9), (0, 10e-9, 11e-9)]);
        assert_eq!(found.tensors, [(0, 4e-9, 9e-9, 20e-9, 21e-9)]);
        assert_eq!(found.spans.len(), 3);
        assert_eq!(found.left_out, LeftOut::default());
    }

    #[test]
    fn nobody_computes_beyond_a_fault_or_the_end() {
        let mut spans = Spans::new(2, 1);
        spans.computes(0, Instant(0), Instant(50));
        spans.ends(0, Instant(20));
        spans.computes(0, Instant(50), Instant(60));
        spans.computes(1, Instant(0), Instant(200));
        let found = spans.report(Instant(100));
        assert_eq!(found.computing, [(0, 0.0, 20e-9), (0, 50e-9, 60e-9), (1, 0.0, 100e-9)]);
    }

    #[test]
    fn stretches_that_were_not_kept_are_counted_once() {
        let mut spans = Spans::new(1, KEPT_MAX);
        for at in 0..10 {
            spans.computes(0, Instant(at), Instant(at + 1));
        }
        spans.computes(0, Instant(20), Instant(21));
        spans.computes(0, Instant(21), Instant(22));
        assert_eq!(spans.report(Instant(100)).left_out.computing, 1);
    }

    #[test]
    fn the_first_are_kept_and_the_others_counted() {
        let mut spans = Spans::new(2, KEPT_MAX / 4);
        for tensor in 0..6 {
            for rank in 0..2 {
                spans.computes(rank, Instant(10 * tensor), Instant(10 * tensor + 1));
                spans.summed(rank, tensor, Instant(10 * tensor + 1), Instant(10 * tensor + 2));
            }
        }
        let found = spans.report(Instant(100));
        let lengths = [found.tensors.len(), found.spans.len(), found.computing.len()];
        assert_eq!(lengths, [4, 4, 4], "each list has its own limit");
        assert_eq!(found.left_out, LeftOut { tensors: 2, spans: 8, computing: 8 });
        assert_eq!(found.spans.last(), Some(&(1, 1, 11e-9, 12e-9)));
    }
}
