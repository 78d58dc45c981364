//! From each rank's way to the root to the tree of switches that sum for it.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use fanin_wire::Rank;

use super::tree::Tree;
use super::{Hop, JoinRequest, Refusal};

/// The switches of a job, and who is below whom.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SwitchTree {
    /// In the order in which the ranks' ways name them, from the ranks' side.
    pub switches: Vec<TreeSwitch>,
    /// Of each rank, in order.
    pub ranks: Vec<TreeRank>,
}

/// A switch of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeSwitch {
    /// As it introduced itself.
    pub hop: Hop,
    /// The switch above it, by its place among all; `None` where that is the root.
    pub upstream: Option<usize>,
}

/// A rank of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeRank {
    /// The switch that it sends to, by its place among all; `None` where that is the root.
    pub switch: Option<usize>,
    /// The slowest link on its way, where it is known.
    pub rate_bps: Option<u64>,
}

impl SwitchTree {
    /// The tree that the ways of all ranks form, in order of rank.
    pub(super) fn of(requests: &[&JoinRequest]) -> Result<Self, Refusal> {
        let ways: Vec<&[Hop]> = requests.iter().map(|request| request.hops.as_slice()).collect();
        let known = |request: &&JoinRequest| request.rate_bps.filter(|rate| *rate > 0);
        Self::of_ways(&ways, requests.iter().map(known))
    }

    /// The tree that these ways form, each the rank's own switch first, with the ranks' rates.
    pub(crate) fn of_ways(
        paths: &[&[Hop]],
        rates: impl Iterator<Item = Option<u64>>,
    ) -> Result<Self, Refusal> {
        // Each switch has one upstream, and none is met twice.
        Tree::of(paths, usize::MAX)?;
        let mut tree = Self { switches: Vec::new(), ranks: Vec::new() };
        let mut known: BTreeMap<u64, usize> = BTreeMap::new();
        for (path, rate_bps) in paths.iter().zip(rates) {
            let mut upstream = None;
            for hop in path.iter().rev() {
                upstream = Some(*known.entry(hop.instance).or_insert_with(|| {
                    tree.switches.push(TreeSwitch { hop: *hop, upstream });
                    tree.switches.len() - 1
                }));
            }
            tree.ranks.push(TreeRank { switch: upstream, rate_bps });
        }
        Ok(tree)
    }

    /// The aggregators of each switch.
    #[must_use]
    pub fn memories(&self) -> Vec<u32> {
        self.switches.iter().map(|switch| switch.hop.aggregators).collect()
    }

    /// The switches that a rank's packets go through, the root's neighbour first.
    #[must_use]
    pub fn way(&self, rank: Rank) -> Vec<usize> {
        let own = self.ranks.get(usize::from(rank.0)).and_then(|rank| rank.switch);
        let mut way: Vec<usize> =
            core::iter::successors(own, |switch| self.switches[*switch].upstream).collect();
        way.reverse();
        way
    }
}

#[cfg(test)]
impl SwitchTree {
    /// A tree of ranks that reach the root through these switches. A switch's number is also how many aggregators it has.
    pub(crate) fn by_number(paths: &[&[u64]]) -> Result<Self, Refusal> {
        let hop = |instance: &u64| Hop { aggregators: *instance as u32, ..Hop::numbered(*instance) };
        let hops: Vec<Vec<Hop>> = paths.iter().map(|path| path.iter().map(hop).collect()).collect();
        let ways: Vec<&[Hop]> = hops.iter().map(Vec::as_slice).collect();
        Self::of_ways(&ways, paths.iter().map(|_| None))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switches_stand_behind_those_above_them_and_know_their_upstream() {
        let tree = SwitchTree::by_number(&[&[7, 9], &[8, 9], &[9], &[]]).unwrap();
        let switches: Vec<_> =
            tree.switches.iter().map(|switch| (switch.hop.instance, switch.upstream)).collect();
        assert_eq!(switches, [(9, None), (7, Some(0)), (8, Some(0))]);
        let ways: Vec<_> = (0..4).map(|rank| tree.way(Rank(rank))).collect();
        assert_eq!(ways, [&[0, 1][..], &[0, 2], &[0], &[]]);
    }

    #[test]
    fn a_switch_that_leads_two_ways_is_refused() {
        assert!(matches!(
            SwitchTree::by_number(&[&[7, 9], &[7]]),
            Err(Refusal::PathsDisagree { rank: 1, other_rank: 0, .. })
        ));
    }
}
