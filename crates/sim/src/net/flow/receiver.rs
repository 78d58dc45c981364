//! The receiving half of a TCP-like connection.

use std::collections::{BTreeMap, VecDeque};

use super::Notice;

#[derive(Debug, Default)]
pub(crate) struct Receiver {
    /// Everything before it is here.
    expected: u64,
    /// The segments that came ahead of it: first byte, and the one after the last.
    ahead: BTreeMap<u64, u64>,
    /// The notices that wait for a byte; ascending.
    waiting: VecDeque<(u64, Notice)>,
}

impl Receiver {
    /// Takes a segment and returns how many bytes of it are new.
    pub(crate) fn segment(&mut self, sequence: u64, bytes: u32) -> u64 {
        let (mut first, mut end) = (sequence.max(self.expected), sequence + u64::from(bytes));
        if first >= end {
            return 0;
        }
        if first == self.expected && self.ahead.is_empty() {
            self.expected = end;
            return end - first;
        }
        let mut fresh = end - first;
        // Merge with all that it touches or overlaps.
        while let Some((start, stop)) = self.ahead.range(..=end).next_back().map(|(a, b)| (*a, *b)) {
            if stop < first {
                break;
            }
            self.ahead.remove(&start);
            let overlap = stop.min(end).saturating_sub(start.max(first));
            fresh -= overlap.min(fresh);
            (first, end) = (first.min(start), end.max(stop));
        }
        if first == self.expected {
            self.expected = end;
        } else {
            self.ahead.insert(first, end);
        }
        fresh
    }

    pub(crate) const fn expected(&self) -> u64 {
        self.expected
    }

    pub(crate) fn wait(&mut self, end: u64, notice: Notice) {
        self.waiting.push_back((end, notice));
    }

    /// The next one whose byte is here.
    pub(crate) fn arrived(&mut self) -> Option<Notice> {
        let (end, notice) = *self.waiting.front()?;
        if end > self.expected {
            return None;
        }
        self.waiting.pop_front();
        Some(notice)
    }
}

#[cfg(test)]
mod tests {
    use oorandom::Rand64;

    use super::*;

    #[test]
    fn segments_in_any_order_and_overlapping_are_each_byte_once() {
        for seed in 0..200 {
            let mut dice = Rand64::new(seed);
            let mut receiver = Receiver::default();
            let mut have = vec![false; 1000];
            while receiver.expected() < 1000 {
                let first = dice.rand_range(0..1000);
                let bytes = dice.rand_range(1..(1001 - first).min(90) + 1).min(1000 - first);
                let fresh = receiver.segment(first, bytes as u32);
                let span = &mut have[first as usize..(first + bytes) as usize];
                assert_eq!(fresh, span.iter().filter(|here| !**here).count() as u64, "seed {seed}");
                span.fill(true);
                let expected = have.iter().position(|here| !here).unwrap_or(1000);
                assert_eq!(receiver.expected(), expected as u64, "seed {seed}");
            }
        }
    }
}
