//! Parts of sums that a server sets aside: they count until the whole sum of their group takes
//! their place.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;

use super::{Coverage, Workers};
use crate::machine::Reason;

/// Some of a group of workers that a switch sums, without the others.
#[derive(Debug)]
pub(super) struct Aside {
    pub(super) group: u16,
    pub(super) workers: Workers,
    pub(super) count: u32,
    pub(super) saturated: bool,
    pub(super) sums: Box<[i64]>,
}

impl Aside {
    /// Goes on empty, for another group.
    pub(super) fn begin(&mut self, group: u16) {
        (self.group, self.count, self.workers, self.saturated) = (group, 0, Workers::default(), false);
    }

    /// Adds a part. If the part has some of what is here in it again and more besides, it replaces
    /// it: a switch shows it, which by then has more of those who are summed there. A worker that
    /// is lost so is summed elsewhere, by itself, and sends again: it could never be put in the
    /// place of a switch's last sum.
    pub(super) fn add(&mut self, from: &Coverage, payload: &[u8]) -> Result<(), Reason> {
        let replace = !from.workers.is_disjoint(&self.workers) || self.count == 0;
        if self.count > 0 && from.workers.is_subset(&self.workers) {
            return Err(Reason::Duplicate);
        }
        if replace {
            (self.count, self.workers, self.saturated) = (0, Workers::default(), false);
        }
        self.count += from.count;
        self.workers.extend(&from.workers);
        for (sum, term) in self.sums.iter_mut().zip(payload.as_chunks().0) {
            let term = i32::from_le_bytes(*term);
            self.saturated |= term == i32::MAX || term == i32::MIN;
            *sum = i64::from(term) + if replace { 0 } else { *sum };
        }
        Ok(())
    }
}

/// A job's room for parts: as many as it has places, and besides as many as one fragment can have.
/// The latter are for the earliest fragment alone, so that it is always finished, and all after it
/// in their turn: what found no room is sent again.
#[derive(Debug, Default)]
pub(super) struct AsideRoom {
    spare: Vec<Box<[i64]>>,
    in_use: usize,
    places: usize,
    groups: usize,
}

impl AsideRoom {
    /// No two parts of a fragment have a worker in common.
    pub(super) const fn new(workers: usize, window: usize) -> Self {
        Self { spare: Vec::new(), in_use: 0, places: window, groups: workers }
    }

    /// Whether what is left is for the earliest fragment alone.
    pub(super) const fn is_short(&self) -> bool {
        self.in_use >= self.places
    }

    /// An empty one, if there is room for this fragment.
    pub(super) fn take(&mut self, group: u16, elements: usize, is_earliest: bool) -> Option<Aside> {
        if self.is_short() && !(is_earliest && self.in_use < self.places + self.groups) {
            return None;
        }
        self.in_use += 1;
        let sums = self.spare.pop().unwrap_or_else(|| vec![0; elements].into());
        Some(Aside { group, workers: Workers::default(), count: 0, saturated: false, sums })
    }

    pub(super) fn give_back(&mut self, aside: Aside) {
        self.in_use -= 1;
        self.spare.push(aside.sums);
    }
}
