//! Shares of a job, laid out along its bytes: from where to where which node sums for whom.
//!
//! The linear program says how much of a job's bytes goes where. It leaves open whether two classes
//! send the same bytes to one switch, as long as no more is summed than its `x`. This module
//! decides it. It cuts the bytes into stretches. In each stretch a class has one node, and few
//! switches sum. So most sub-models are in one stretch and stay whole.

use std::cmp::Reverse;

use crate::relaxation::{JobShares, SHARE_MIN};
use crate::topology::NodeId;

/// A part of a job's bytes for which everything goes one way.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stretch {
    /// The share of the job's bytes.
    pub(crate) share: f64,
    /// The node that finishes the sums.
    pub(crate) root: NodeId,
    /// The destination of each class's part.
    pub(crate) nodes: Vec<NodeId>,
}

/// Cuts a job's bytes. The stretches make a whole. As far as the shares let it they are kept; what
/// is left over goes straight to roots.
pub(crate) fn stretches(shares: &JobShares) -> Vec<Stretch> {
    let mut left = shares.clone();
    let mut whole = 1.0;
    let mut all: Vec<Stretch> = Vec::new();
    while whole > SHARE_MIN {
        let bundle = largest(&left.finished);
        let chosen = choose(&left, bundle);
        // Each stretch uses something up, so there are not more of them than variables.
        let used = uses(&left, bundle, &chosen);
        let share = used.into_iter().filter(|used| *used > SHARE_MIN).fold(whole, f64::min);
        spend(&mut left, bundle, &chosen, share);
        whole -= share;
        let its = &shares.bundles[bundle];
        let nodes =
            chosen.iter().map(|choice| choice.map_or(its.root, |switch| its.switches[switch])).collect();
        all.push(Stretch { share, root: its.root, nodes });
    }
    if let Some(last) = all.last_mut() {
        last.share += whole;
    }
    all
}

fn largest(values: &[f64]) -> usize {
    let rising = (0..values.len()).max_by(|a, b| values[*a].total_cmp(&values[*b]).then(b.cmp(a)));
    rising.expect("a job has a server")
}

/// A switch for each class, or none where it sends to the root: as few switches as sum for all, of
/// those that have something left.
fn choose(left: &JobShares, bundle: usize) -> Vec<Option<usize>> {
    let its = &left.bundles[bundle];
    let may = |class: usize, switch: usize| {
        let summed = its.whole || left.summed[bundle][switch] > SHARE_MIN;
        summed && left.sent[bundle][class][switch] > SHARE_MIN
    };
    let mut chosen: Vec<Option<usize>> = vec![None; left.classes.len()];
    let mut open: Vec<usize> = (0..chosen.len()).collect();
    while !open.is_empty() {
        let covers = |switch: usize| open.iter().filter(|class| may(**class, switch)).count();
        let best = (0..its.switches.len()).max_by_key(|switch| (covers(*switch), Reverse(*switch)));
        let Some(switch) = best.filter(|switch| covers(*switch) > 0) else { break };
        for class in open.extract_if(.., |class| may(*class, switch)) {
            chosen[class] = Some(switch);
        }
    }
    chosen
}

/// The shares left of everything that a choice uses.
fn uses(left: &JobShares, bundle: usize, chosen: &[Option<usize>]) -> Vec<f64> {
    let mut used = vec![left.finished[bundle]];
    for (class, choice) in chosen.iter().enumerate() {
        match choice {
            Some(switch) => {
                used.push(left.sent[bundle][class][*switch]);
                if !left.bundles[bundle].whole {
                    used.push(left.summed[bundle][*switch]);
                }
            }
            None => used.push(left.direct[bundle][class]),
        }
    }
    used
}

fn spend(left: &mut JobShares, bundle: usize, chosen: &[Option<usize>], share: f64) {
    let less = |value: &mut f64| *value = (*value - share).max(0.0);
    less(&mut left.finished[bundle]);
    let mut summing = vec![false; left.bundles[bundle].switches.len()];
    for (class, choice) in chosen.iter().enumerate() {
        match choice {
            Some(switch) => {
                less(&mut left.sent[bundle][class][*switch]);
                summing[*switch] = true;
            }
            None => less(&mut left.direct[bundle][class]),
        }
    }
    for (switch, _) in summing.into_iter().enumerate().filter(|(_, summing)| *summing) {
        less(&mut left.summed[bundle][switch]);
    }
}
