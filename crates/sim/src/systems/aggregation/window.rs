//! Which fragments each worker has: no place of a window goes to another fragment while a worker
//! lacks what was there.

use std::collections::VecDeque;

/// Which fragments each worker of a job has, to see that none is forgotten while one lacks it.
pub(crate) struct Window {
    length: u64,
    workers: Vec<Received>,
    /// Not above any worker's lowest.
    least: u64,
}

#[derive(Clone, Default)]
struct Received {
    /// The first that it lacks.
    lowest: u64,
    /// Whether it has those from there on.
    ahead: VecDeque<bool>,
}

impl Window {
    pub(crate) fn new(length: u16, workers: usize) -> Self {
        Self { length: length.into(), workers: vec![Received::default(); workers], least: 0 }
    }

    pub(crate) fn received(&mut self, rank: usize, sequence: u64) {
        let worker = &mut self.workers[rank];
        // A fragment beyond the window cannot be taken; its own rule is the server's.
        let Some(at) = sequence.checked_sub(worker.lowest).filter(|at| *at < 4 * self.length) else { return };
        let at = at as usize;
        if worker.ahead.len() <= at {
            worker.ahead.resize(at + 1, false);
        }
        worker.ahead[at] = true;
        while worker.ahead.front() == Some(&true) {
            worker.ahead.pop_front();
            worker.lowest += 1;
        }
    }

    /// Another worker takes a rank; it needs nothing below `sequence`.
    pub(crate) fn begins_at(&mut self, rank: usize, sequence: u64) {
        self.workers[rank] = Received { lowest: sequence, ahead: VecDeque::new() };
    }

    /// A worker that lacks a fragment below `needed`, and which.
    fn lacks(&mut self, needed: u64) -> Option<(usize, u64)> {
        if self.least >= needed {
            return None;
        }
        self.least = self.workers.iter().map(|worker| worker.lowest).min().unwrap_or(u64::MAX);
        let rank = self.workers.iter().position(|worker| worker.lowest < needed)?;
        Some((rank, self.workers[rank].lowest))
    }

    /// The server took a fragment in; with `complete`, it was the last one of its sum.
    ///
    /// The server keeps one sum that gathers and one that is done for each place of the window. A
    /// fragment that begins to gather takes the place of what was done two windows before; one that
    /// is complete that of the last window.
    pub(crate) fn at_server(&mut self, sequence: u64, complete: bool) -> Option<(usize, u64)> {
        let windows = if complete { 1 } else { 2 };
        let overwritten = sequence.checked_sub(windows * self.length)?;
        self.lacks(overwritten + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_taken_while_a_worker_lacks_what_was_there_is_seen() {
        let mut window = Window::new(2, 2);
        for sequence in [0, 1, 2] {
            window.received(0, sequence);
        }
        window.received(1, 1);
        // Worker 1 lacks 0: 2 and 3 may gather, but not complete, and 4 may not gather.
        assert_eq!(window.at_server(3, false), None);
        assert_eq!(window.at_server(2, true), Some((1, 0)));
        assert_eq!(window.at_server(4, false), Some((1, 0)));
        window.received(1, 0);
        assert_eq!(window.at_server(2, true), None);
        assert_eq!(window.at_server(3, true), None);
        assert_eq!(window.at_server(4, true), Some((1, 2)));
        window.begins_at(1, 4);
        assert_eq!(window.at_server(4, true), None);
    }
}
