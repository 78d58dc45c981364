//! Shares of a job, laid out along its bytes: from where to where which node sums for whom.
//!
//! The linear program says how much of a job's bytes goes where. Whether what two classes send to one switch are the same bytes, it leaves open, as long as
//! no more is summed than its `x`. Here it is decided: the bytes are cut into stretches, in each of which a class has one node and few switches sum, so that most
//! sub-models are in one stretch and are whole where they are summed.

use crate::relaxation::{JobShares, SHARE_MIN};
use crate::topology::NodeId;

/// A part of a job's bytes for which everything goes one way.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stretch {
    /// Of the job's bytes.
    pub(crate) share: f64,
    /// Who finishes the sums.
    pub(crate) root: NodeId,
    /// Where each class sends its part.
    pub(crate) nodes: Vec<NodeId>,
}

/// Cuts a job's bytes. The stretches make a whole. As far as the shares let it they are kept; what is left over goes straight to roots.
pub(crate) fn stretches(shares: &JobShares) -> Vec<Stretch> {
    let mut left = shares.clone();
    let mut whole = 1.0;
    let mut all = Vec::new();
    while whole > SHARE_MIN {
        let root = largest(&left.finished);
        let chosen = choose(&left, root);
        // At least one of what is left is used up by each stretch, so there are not more than variables.
        let used = uses(&left, root, &chosen);
        let share = used.iter().copied().filter(|used| *used > SHARE_MIN).fold(whole, f64::min);
        spend(&mut left, root, &chosen, share);
        whole -= share;
        let nodes =
            chosen.iter().map(|choice| choice.map_or(shares.roots[root], |switch| shares.switches[switch]));
        all.push(Stretch { share, root: shares.roots[root], nodes: nodes.collect() });
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

/// A switch for each class, or none where it sends to the root: as few switches as sum for all, of those that have something left.
fn choose(left: &JobShares, root: usize) -> Vec<Option<usize>> {
    let classes = left.classes.len();
    let may = |class: usize, switch: usize| {
        left.sent[class][switch] > SHARE_MIN && left.summed[switch][root] > SHARE_MIN
    };
    let mut chosen: Vec<Option<usize>> = vec![None; classes];
    let mut open: Vec<usize> = (0..classes).collect();
    loop {
        let covers = |switch: usize| open.iter().filter(|class| may(**class, switch)).count();
        let best =
            (0..left.switches.len()).max_by_key(|switch| (covers(*switch), std::cmp::Reverse(*switch)));
        let Some(switch) = best.filter(|switch| covers(*switch) > 0) else { return chosen };
        // A class that has as much to send straight as to send there keeps the switches few.
        open.retain(|class| {
            let takes = may(*class, switch);
            if takes {
                chosen[*class] = Some(switch);
            }
            !takes
        });
        if open.is_empty() {
            return chosen;
        }
    }
}

/// What is left of everything that a choice uses.
fn uses(left: &JobShares, root: usize, chosen: &[Option<usize>]) -> Vec<f64> {
    let mut used = vec![left.finished[root]];
    for (class, choice) in chosen.iter().enumerate() {
        used.push(match choice {
            Some(switch) => left.sent[class][*switch].min(left.summed[*switch][root]),
            None => left.direct[class][root],
        });
    }
    used
}

fn spend(left: &mut JobShares, root: usize, chosen: &[Option<usize>], share: f64) {
    let less = |value: &mut f64| *value = (*value - share).max(0.0);
    less(&mut left.finished[root]);
    let mut summing = vec![false; left.switches.len()];
    for (class, choice) in chosen.iter().enumerate() {
        match choice {
            Some(switch) => {
                less(&mut left.sent[class][*switch]);
                summing[*switch] = true;
            }
            None => less(&mut left.direct[class][root]),
        }
    }
    for (switch, summing) in summing.into_iter().enumerate() {
        if summing {
            less(&mut left.summed[switch][root]);
        }
    }
}
