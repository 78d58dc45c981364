//! Which switches of a tree sum a part of the stream on its way to the root, and what that makes
//! the tree's links carry.
//!
//! A sum may be added to others on its way, so that a link carries a part once however many ranks
//! are behind it, if each switch at which ways meet has memory for the part.

use alloc::collections::BTreeSet;
use alloc::vec;
use alloc::vec::Vec;
use core::mem::take;

use fanin_wire::AggregationNode;

use super::Onward;
use super::admission::number;
use crate::control::{RATE_DEFAULT_BPS, SwitchTree};

/// Equal parts that an endless stream is cut into, where it has as many fragments: fine enough to
/// balance links by.
const EQUAL_PARTS: u32 = 32;
/// By how much the loads of links may differ that are the same.
const ROUNDING: f64 = 1e-9;

/// What comes to a switch on its way to the root.
#[derive(Clone, Copy, Debug)]
enum Waiting {
    /// The fragments of a rank.
    Rank(usize),
    /// The sum of a switch.
    Sum(usize),
}

/// Lets switches sum what would come to the server. Says where sums go instead.
///
/// Of each rank, `nodes` has who sums its fragments of the part. Ranks and switches may send some of
/// it to the server. A switch on its way adds that, if it sums some of the part already. It does so
/// too if two or more of these come by, and it `takes` the part. Switches are asked before those
/// above them, each once.
pub fn sum_on_the_way(
    tree: &SwitchTree,
    nodes: &mut [AggregationNode],
    mut takes: impl FnMut(usize) -> bool,
) -> Onward {
    let mut onward = Onward::new();
    let mut sums = vec![false; tree.switches.len()];
    let mut waiting: Vec<Vec<Waiting>> = vec![Vec::new(); tree.switches.len()];
    for (rank, node) in nodes.iter().enumerate() {
        match (switch(*node), tree.ranks[rank].switch) {
            (Some(node), _) => sums[node] = true,
            (None, Some(own)) => waiting[own].push(Waiting::Rank(rank)),
            (None, None) => {}
        }
    }
    // A switch stands behind the one above it.
    for at in (0..tree.switches.len()).rev() {
        let mut here = take(&mut waiting[at]);
        if sums[at] || here.len() > 1 && takes(at) {
            for one in here.drain(..) {
                match one {
                    Waiting::Rank(rank) => nodes[rank] = number(at),
                    Waiting::Sum(from) => {
                        onward.insert(number(from), number(at));
                    }
                }
            }
            here.push(Waiting::Sum(at));
        }
        if let Some(upstream) = tree.switches[at].upstream {
            waiting[upstream].extend(here);
        }
    }
    onward
}

/// What the links of a tree carry, in fragments in either direction.
#[derive(Clone, Debug)]
pub struct Load<'a> {
    tree: &'a SwitchTree,
    /// Of each switch's link to its upstream.
    of_switches: Vec<u64>,
    /// Of each rank's.
    of_ranks: Vec<u64>,
}

impl<'a> Load<'a> {
    /// Nothing.
    #[must_use]
    pub fn new(tree: &'a SwitchTree) -> Self {
        Self { tree, of_switches: vec![0; tree.switches.len()], of_ranks: vec![0; tree.ranks.len()] }
    }

    /// Adds a part of so many fragments: of each rank who sums them, and where sums go if not to the
    /// server.
    pub fn add(&mut self, nodes: &[AggregationNode], onward: &Onward, fragments: u32) {
        let mut sums = vec![false; self.tree.switches.len()];
        for (rank, node) in nodes.iter().enumerate() {
            self.of_ranks[rank] += u64::from(fragments);
            let to = switch(*node);
            self.send(self.tree.ranks[rank].switch, to, fragments);
            to.into_iter().for_each(|to| sums[to] = true);
        }
        onward.values().filter_map(|to| switch(*to)).for_each(|to| sums[to] = true);
        for from in (0..sums.len()).filter(|from| sums[*from]) {
            let to = onward.get(&number(from)).and_then(|to| switch(*to));
            self.send(Some(from), to, fragments);
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

    /// Seconds that each link takes for a bit of each fragment, the slowest first.
    #[must_use]
    pub fn seconds(&self) -> Vec<f64> {
        let seconds = |(fragments, rate_bps): (&u64, Option<u64>)| {
            *fragments as f64 / rate_bps.unwrap_or(RATE_DEFAULT_BPS).max(1) as f64
        };
        let rates = self.tree.switches.iter().map(|of| of.hop.rate_bps);
        let of_switches = self.of_switches.iter().zip(rates).map(seconds);
        let of_ranks = self.of_ranks.iter().zip(self.tree.ranks.iter().map(|of| of.rate_bps)).map(seconds);
        let mut all: Vec<f64> = of_switches.chain(of_ranks).collect();
        all.sort_unstable_by(|a, b| b.total_cmp(a));
        all
    }
}

/// A window over an endless stream: what the switches on the ranks' ways hold together, if their
/// links carry no more for it than for what one of them holds. Parts that are spread over several
/// switches of a way come to the later ones unsummed. `window` is the window for so much.
pub(super) fn window_of_tree(tree: &SwitchTree, memories: &[u32], window: impl Fn(u32) -> u16) -> u16 {
    let [of_one, of_all] = held(tree, memories).map(window);
    let is_as_fast = || slowest(tree, memories, of_all) <= slowest(tree, memories, of_one) * (1.0 + ROUNDING);
    if of_all > of_one && is_as_fast() { of_all } else { of_one }
}

/// How far ahead of others a rank of an endless stream should be, where the job has so much of each
/// switch's memory: `most` fragments at most.
///
/// Fragments that no switch holds come to the root once from every rank. A window that is shorter
/// than the `path` leaves links idle. Jobs that share a switch are taken to share links, too: each
/// fills its part of the path. The window that takes least time is best, or the longest of several.
pub(super) fn stretch(tree: &SwitchTree, memories: &[u32], path: u16, most: u16) -> u16 {
    let rates = tree.ranks.iter().map(|rank| rank.rate_bps.unwrap_or(RATE_DEFAULT_BPS).max(1));
    let rate_bps = rates.min().unwrap_or(RATE_DEFAULT_BPS) as f64;
    let scarce = tree.switches.iter().zip(memories).filter(|(_, memory)| **memory < most.into());
    let portions = scarce.map(|(of, memory)| f64::from(*memory) / f64::from(of.hop.aggregators.max(1)));
    let own_path = f64::from(path) * portions.fold(1.0, f64::min);
    let seconds = |window: u16| {
        let idle = own_path / f64::from(window) / rate_bps;
        slowest(tree, memories, window).max(idle)
    };
    let [_, of_all] = held(tree, memories);
    let windows = memories.iter().copied().chain([of_all, path.into(), most.into()]);
    let windows: BTreeSet<u16> = windows.map(|window| window.clamp(1, most.max(1).into()) as u16).collect();
    let (mut best, mut least) = (most, f64::INFINITY);
    for window in windows.into_iter().rev() {
        let seconds = seconds(window);
        if seconds < least * (1.0 - ROUNDING) {
            (best, least) = (window, seconds);
        }
    }
    best
}

/// Fragments that switches can hold for each rank: of the rank that finds least on its way, what the
/// largest of them there holds, and what they hold together. Ranks at the root need no switch.
fn held(tree: &SwitchTree, memories: &[u32]) -> [u32; 2] {
    [u32::max, u32::saturating_add].map(|join| {
        let of_way = |own| {
            let way = core::iter::successors(Some(own), |switch: &usize| tree.switches[*switch].upstream);
            way.map(|switch| memories[switch]).fold(0, join)
        };
        tree.ranks.iter().filter_map(|rank| rank.switch.map(of_way)).min().unwrap_or(0)
    })
}

/// Seconds of the slowest link for a bit of each fragment, on average over such a window. The job has
/// so much of each switch's memory.
fn slowest(tree: &SwitchTree, memories: &[u32], window: u16) -> f64 {
    let mut room = memories.to_vec();
    let mut load = Load::new(tree);
    for fragments in equal_parts(window) {
        let mut nodes = vec![AggregationNode::SERVER; tree.ranks.len()];
        let onward = sum_on_the_way(tree, &mut nodes, |switch| {
            let left = room[switch].checked_sub(fragments);
            room[switch] = left.unwrap_or(room[switch]);
            left.is_some()
        });
        load.add(&nodes, &onward, fragments);
    }
    load.seconds().first().map_or(0.0, |slowest| slowest / f64::from(window.max(1)))
}

/// A window in parts that differ by one fragment at most.
pub(super) fn equal_parts(window: u16) -> Vec<u32> {
    let window = u32::from(window);
    let count = window.min(EQUAL_PARTS);
    (0..count).map(|part| (part + 1) * window / count - part * window / count).collect()
}

/// A switch by its place in the tree; none is the server.
fn switch(node: AggregationNode) -> Option<usize> {
    usize::from(node.0).checked_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two racks of two ranks below a spine.
    fn leaf_spine() -> SwitchTree {
        SwitchTree::by_number(&[&[8, 7], &[8, 7], &[9, 7], &[9, 7]]).unwrap()
    }

    #[test]
    fn switches_that_two_ranks_or_sums_come_by_sum_if_they_take_the_part() {
        let tree = leaf_spine();
        let found = |takes: &[bool], from: [u16; 4]| {
            let mut nodes = from.map(AggregationNode);
            let onward = sum_on_the_way(&tree, &mut nodes, |switch| takes[switch]);
            let onward: Vec<_> = onward.iter().map(|(from, to)| (from.0, to.0)).collect();
            (nodes.map(|node| node.0), onward)
        };
        let at_first = |takes: &[bool]| found(takes, [0; 4]);
        assert_eq!(at_first(&[true; 3]), ([2, 2, 3, 3], vec![(2, 1), (3, 1)]));
        assert_eq!(at_first(&[false, true, true]), ([2, 2, 3, 3], vec![]));
        assert_eq!(at_first(&[true, false, true]), ([1, 1, 3, 3], vec![(3, 1)]));
        assert_eq!(at_first(&[true, false, false]), ([1; 4], vec![]));
        assert_eq!(at_first(&[false; 3]), ([0; 4], vec![]));
        // Somebody planned it, and has made room for that.
        assert_eq!(found(&[false; 3], [3; 4]), ([3; 4], vec![]));
        assert_eq!(found(&[false; 3], [2, 2, 1, 0]), ([2, 2, 1, 1], vec![(2, 1)]));
        assert_eq!(found(&[true; 3], [2, 2, 3, 3]), ([2, 2, 3, 3], vec![(2, 1), (3, 1)]));
    }

    #[test]
    fn what_a_tree_holds_is_the_most_that_each_rank_finds_on_its_way() {
        let held = |paths: &[&[u64]]| {
            let tree = SwitchTree::by_number(paths).unwrap();
            super::held(&tree, &tree.memories())
        };
        assert_eq!(held(&[&[7], &[7]]), [7, 7]);
        assert_eq!(held(&[&[7], &[8]]), [7, 7], "the smaller rack's");
        assert_eq!(held(&[&[7, 9], &[8, 9]]), [9, 16], "the upper one's, and with the smaller rack's");
        assert_eq!(held(&[&[9, 7], &[8, 7]])[0], 8, "the smaller rack's, as the upper one is smaller still");
        assert_eq!(held(&[&[7], &[]]), [7, 7], "who is at the root needs no switch");
        assert_eq!(held(&[&[], &[]]), [0, 0]);
        assert_eq!(held(&[&[7, 9], &[8, 9], &[9]]), [9, 9], "who finds the upper one alone");
        assert_eq!(held(&[&[7, 9], &[8, 9], &[]])[1], 16);
    }

    /// A rank's window is what switches hold of it, unless its link would be idle for longer than
    /// the root's link takes for what they do not hold.
    #[test]
    fn a_stretch_is_what_switches_hold_unless_ranks_links_would_be_idle() {
        let mut tree = leaf_spine();
        let mut stretch_of = |all: u32, memory: u32, path| {
            tree.switches.iter_mut().for_each(|switch| switch.hop.aggregators = all);
            super::stretch(&tree, &[memory; 3], path, 64)
        };
        let mut stretch = |memory, path| stretch_of(memory, memory, path);
        assert_eq!(stretch(64, 16), 64);
        assert_eq!(stretch(1_000, 16), 64, "it can use no more");
        assert_eq!(stretch(21, 16), 21);
        assert_eq!(stretch(16, 16), 16);
        // Of eight, each link carries one sum, and is idle for half of the time. Of sixteen, half comes to the
        // root from four ranks.
        assert_eq!(stretch(8, 16), 8);
        assert_eq!(stretch(0, 16), 64, "nothing is summed before the root");
        assert_eq!(stretch(8, 64), 64, "an eighth is summed before the root");
        assert_eq!(stretch(21, 48), 21, "half of each link is idle");
        assert_eq!(stretch(16, 48), 32, "half is summed before the root");
        assert_eq!(stretch_of(48, 16, 48), 16, "other jobs fill the links, too");
    }

    #[test]
    fn links_carry_fragments_up_and_down_and_sums_up() {
        let tree = leaf_spine();
        let of = |nodes: [u16; 4], onward: &[(u16, u16)]| {
            let mut load = Load::new(&tree);
            let onward = onward.iter().map(|(from, to)| (AggregationNode(*from), AggregationNode(*to)));
            load.add(&nodes.map(AggregationNode), &onward.collect(), 10);
            assert_eq!(load.of_ranks, [10; 4]);
            load.of_switches
        };
        assert_eq!(of([0; 4], &[]), [40, 20, 20]);
        assert_eq!(of([1; 4], &[]), [10, 20, 20]);
        assert_eq!(of([2, 2, 3, 3], &[]), [20, 10, 10]);
        assert_eq!(of([2, 2, 3, 3], &[(2, 1), (3, 1)]), [10; 3], "sums of sums");
        // Two go down to the other rack.
        assert_eq!(of([2; 4], &[]), [10, 30, 20]);
    }

    #[test]
    fn the_slowest_link_is_the_one_that_takes_longest() {
        let mut tree = leaf_spine();
        let slowest = |tree: &SwitchTree| {
            let mut load = Load::new(tree);
            load.add(&[number(1), number(1), number(2), number(2)], &Onward::new(), 10);
            load.seconds()[0]
        };
        assert_eq!(slowest(&tree), 20.0 / RATE_DEFAULT_BPS as f64);
        tree.switches[0].hop.rate_bps = Some(u64::MAX);
        assert_eq!(slowest(&tree), 10.0 / RATE_DEFAULT_BPS as f64);
        tree.ranks[3].rate_bps = Some(1_000);
        assert_eq!(slowest(&tree), 10.0 / 1_000.0);
    }
}
