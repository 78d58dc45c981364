//! Which switches of a tree sum a part of the stream on its way to the root, and what that makes
//! the tree's links carry.

use alloc::vec;
use alloc::vec::Vec;
use core::mem::take;

use fanin_wire::AggregationNode;

use super::admission::number;
use crate::control::{RATE_DEFAULT_BPS, SwitchTree};

/// Lets switches sum what ranks would send to the server: the first on the way of two or more of
/// them that `takes` the part. Asked are those behind others before those others, each once. Of each
/// rank, `nodes` has who sums its fragments of the part.
pub(super) fn sum_on_the_way(
    tree: &SwitchTree,
    nodes: &mut [AggregationNode],
    mut takes: impl FnMut(usize) -> bool,
) {
    let mut waiting: Vec<Vec<usize>> = vec![Vec::new(); tree.switches.len()];
    for (rank, of) in tree.ranks.iter().enumerate() {
        if let Some(switch) = of.switch.filter(|_| nodes[rank] == AggregationNode::SERVER) {
            waiting[switch].push(rank);
        }
    }
    // A switch stands behind the one above it.
    for switch in (0..tree.switches.len()).rev() {
        let ranks = take(&mut waiting[switch]);
        if ranks.len() > 1 && takes(switch) {
            ranks.into_iter().for_each(|rank| nodes[rank] = number(switch));
        } else if let Some(upstream) = tree.switches[switch].upstream {
            waiting[upstream].extend(ranks);
        }
    }
}

/// What the links of a tree carry, in fragments in either direction.
#[derive(Clone, Debug)]
pub(super) struct Load<'a> {
    tree: &'a SwitchTree,
    /// Of each switch's link to its upstream.
    of_switches: Vec<u64>,
    /// Of each rank's.
    of_ranks: Vec<u64>,
}

impl<'a> Load<'a> {
    /// Nothing.
    pub(super) fn new(tree: &'a SwitchTree) -> Self {
        Self { tree, of_switches: vec![0; tree.switches.len()], of_ranks: vec![0; tree.ranks.len()] }
    }

    /// Adds a part of so many fragments.
    pub(super) fn add(&mut self, nodes: &[AggregationNode], fragments: u32) {
        let mut sums = vec![false; self.tree.switches.len()];
        for (rank, node) in nodes.iter().enumerate() {
            self.of_ranks[rank] += u64::from(fragments);
            let to = switch(*node);
            self.send(self.tree.ranks[rank].switch, to, fragments);
            to.into_iter().for_each(|to| sums[to] = true);
        }
        for from in (0..sums.len()).filter(|from| sums[*from]) {
            self.send(Some(from), None, fragments);
        }
    }

    /// From a switch to another one, or to the root.
    fn send(&mut self, mut from: Option<usize>, mut to: Option<usize>, fragments: u32) {
        // The one that stands behind the other is not above it.
        while from != to {
            let lower = if from > to { &mut from } else { &mut to };
            if let Some(switch) = *lower {
                self.of_switches[switch] += u64::from(fragments);
                *lower = self.tree.switches[switch].upstream;
            }
        }
    }

    /// Seconds that the slowest link takes for a bit of each fragment.
    pub(super) fn slowest(&self) -> f64 {
        let seconds = |(fragments, rate_bps): (&u64, Option<u64>)| {
            *fragments as f64 / rate_bps.unwrap_or(RATE_DEFAULT_BPS).max(1) as f64
        };
        let rates = self.tree.switches.iter().map(|of| of.hop.rate_bps);
        let of_switches = self.of_switches.iter().zip(rates).map(seconds);
        let of_ranks = self.of_ranks.iter().zip(self.tree.ranks.iter().map(|of| of.rate_bps)).map(seconds);
        of_switches.chain(of_ranks).fold(0.0, f64::max)
    }
}

/// A switch by its place in the tree; none is the server.
fn switch(node: AggregationNode) -> Option<usize> {
    usize::from(node.0).checked_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVER: AggregationNode = AggregationNode::SERVER;

    /// Two racks of two ranks below a spine.
    fn leaf_spine() -> SwitchTree {
        SwitchTree::by_number(&[&[8, 7], &[8, 7], &[9, 7], &[9, 7]]).unwrap()
    }

    #[test]
    fn the_first_switch_that_two_ranks_pass_sums_if_it_takes_the_part() {
        let tree = leaf_spine();
        let nodes = |takes: &[bool]| {
            let mut nodes = [SERVER; 4];
            sum_on_the_way(&tree, &mut nodes, |switch| takes[switch]);
            nodes.map(|node| node.0)
        };
        assert_eq!(nodes(&[true; 3]), [2, 2, 3, 3]);
        assert_eq!(nodes(&[true, false, true]), [1, 1, 3, 3]);
        assert_eq!(nodes(&[true, false, false]), [1; 4]);
        assert_eq!(nodes(&[false; 3]), [0; 4]);
        let mut beside = [number(2), SERVER, SERVER, SERVER];
        sum_on_the_way(&tree, &mut beside, |switch| switch == 1);
        assert_eq!(beside, [number(2), SERVER, SERVER, SERVER], "nobody else is in the first rack");
    }

    #[test]
    fn links_carry_fragments_up_and_down_and_sums_up() {
        let tree = leaf_spine();
        let of = |nodes: [u16; 4]| {
            let mut load = Load::new(&tree);
            load.add(&nodes.map(AggregationNode), 10);
            assert_eq!(load.of_ranks, [10; 4]);
            load.of_switches
        };
        assert_eq!(of([0; 4]), [40, 20, 20]);
        assert_eq!(of([1; 4]), [10, 20, 20]);
        assert_eq!(of([2, 2, 3, 3]), [20, 10, 10]);
        // Two go down to the other rack.
        assert_eq!(of([2; 4]), [10, 30, 20]);
    }

    #[test]
    fn the_slowest_link_is_the_one_that_takes_longest() {
        let mut tree = leaf_spine();
        let slowest = |tree: &SwitchTree| {
            let mut load = Load::new(tree);
            load.add(&[number(1), number(1), number(2), number(2)], 10);
            load.slowest()
        };
        assert_eq!(slowest(&tree), 20.0 / RATE_DEFAULT_BPS as f64);
        tree.switches[0].hop.rate_bps = Some(u64::MAX);
        assert_eq!(slowest(&tree), 10.0 / RATE_DEFAULT_BPS as f64);
        tree.ranks[3].rate_bps = Some(1_000);
        assert_eq!(slowest(&tree), 10.0 / 1_000.0);
    }
}
