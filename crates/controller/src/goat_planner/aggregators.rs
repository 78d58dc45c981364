//! Which job has which of the switches' aggregators, and how much each may have.
//!
//! A switch whose memory suffices for all jobs gives each what it can use. Else each has the same,
//! and those that can use less leave the rest to the others (max-min fairness).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::Range;

use fanin_protocol::control::{Hop, SwitchTree};
use fanin_protocol::goat::sum_on_the_way;
use fanin_wire::{AggregationNode, JobId};

/// The aggregators of all switches, by the switch's address: one that is started again has the same.
#[derive(Debug, Default)]
pub struct Aggregators {
    /// What jobs have of each switch.
    taken: BTreeMap<SocketAddr, Vec<(JobId, Range<u32>)>>,
    jobs: BTreeMap<JobId, Claims>,
}

/// What a job could use.
#[derive(Debug)]
struct Claims {
    /// Not while its plan is made.
    is_planned: bool,
    at: BTreeMap<SocketAddr, Claim>,
}

/// What a job could use of a switch's memory.
#[derive(Clone, Copy, Debug)]
struct Claim {
    switch: Hop,
    /// How much at most, as far as it is known.
    most: u32,
    /// How much it could have when it was planned.
    offered: u32,
}

impl Aggregators {
    /// Begins a job's plan: what it may have of each switch of its tree, where its stream has so many
    /// fragments.
    pub fn offer(&mut self, job: JobId, tree: &SwitchTree, fragments: u32) -> Vec<u32> {
        let sums = sums(tree);
        let claim = |(at, switch): (usize, &Hop)| {
            // At another switch it claims what it has taken.
            let most = if sums[at] { fragments.min(switch.aggregators) } else { 0 };
            (switch.address, Claim { switch: *switch, most, offered: 0 })
        };
        let switches: Vec<Hop> = tree.switches.iter().map(|switch| switch.hop).collect();
        let at = switches.iter().enumerate().map(claim).collect();
        self.jobs.insert(job, Claims { is_planned: false, at });
        let offered: Vec<u32> = switches
            .iter()
            .zip(sums)
            .map(|(switch, sums)| {
                let share = if sums { self.share(switch) } else { self.unclaimed(switch) };
                fragments.min(share).min(self.room(job, switch))
            })
            .collect();
        if let Some(claims) = self.jobs.get_mut(&job) {
            for (switch, offered) in switches.iter().zip(&offered) {
                claims.at.entry(switch.address).and_modify(|claim| claim.offered = *offered);
            }
        }
        offered
    }

    /// Ends a job's plan, which had so much of each switch of the tree to plan with. What it did not
    /// take of that is others'. All of its parts are as long as `step`, or one less; or they are any.
    pub fn settle(&mut self, job: JobId, tree: &SwitchTree, memories: &[u32], step: Option<u32>) {
        let Some(mut claims) = self.jobs.remove(&job) else { return };
        for (switch, memory) in tree.switches.iter().zip(memories) {
            let Some(claim) = claims.at.get_mut(&switch.hop.address) else { continue };
            let taken = self.taken(job, &claim.switch);
            // Another job may have been planned meanwhile.
            claim.offered = claim.offered.min(self.room(job, &claim.switch));
            let lacks = claim.offered < claim.most && step.is_none_or(|step| taken + step > *memory);
            if !lacks {
                claim.most = taken;
            }
        }
        claims.is_planned = true;
        self.jobs.insert(job, claims);
    }

    /// A job is over.
    pub fn forget(&mut self, job: JobId) {
        self.taken.retain(|_, taken| {
            taken.retain(|(other, _)| *other != job);
            !taken.is_empty()
        });
        self.jobs.remove(&job);
    }

    /// Jobs that another plan would suit better. Some have more of a switch than their share, which
    /// another job lacks. Others lacked some of it, and could have more now.
    pub fn unsettled(&self) -> Vec<JobId> {
        let planned = self.jobs.iter().filter(|(_, claims)| claims.is_planned);
        let is_unsettled = |job: JobId, claim: &Claim| {
            let Claim { switch, most, offered } = claim;
            let (taken, share) = (self.taken(job, switch), self.share(switch));
            if taken > share {
                return self.is_scarce(switch);
            }
            let (room, due) = (self.room(job, switch), share.min(*most));
            // It waits for what others give back, and is planned anew once.
            taken < *most && room.min(due) > *offered && (room >= due || !self.is_shared_unevenly(switch))
        };
        planned
            .filter(|(job, claims)| claims.at.values().any(|claim| is_unsettled(**job, claim)))
            .map(|(job, _)| *job)
            .collect()
    }

    /// The planned jobs' claims on a switch.
    fn claims(&self, switch: &Hop) -> impl Iterator<Item = (JobId, &Claim)> {
        let planned = self.jobs.iter().filter(|(_, claims)| claims.is_planned);
        planned.filter_map(|(job, claims)| Some((*job, claims.at.get(&switch.address)?)))
    }

    /// Whether some job has no room for what is its share of a switch.
    fn is_scarce(&self, switch: &Hop) -> bool {
        let share = self.share(switch);
        self.claims(switch).any(|(job, claim)| self.room(job, switch) < share.min(claim.most))
    }

    /// Whether some job has more than its share.
    fn is_shared_unevenly(&self, switch: &Hop) -> bool {
        let share = self.share(switch);
        self.claims(switch).any(|(job, _)| self.taken(job, switch) > share)
    }

    /// The most that a job may have of a switch, so that the others have as much, or all that they
    /// can use.
    fn share(&self, switch: &Hop) -> u32 {
        let claims = self.jobs.values().filter_map(|claims| claims.at.get(&switch.address));
        let mut claims: Vec<u32> = claims.map(|claim| claim.most).collect();
        claims.sort_unstable();
        let mut left = switch.aggregators;
        for (before, most) in claims.iter().enumerate() {
            let even = left / (claims.len() - before) as u32;
            if *most > even {
                return even;
            }
            left -= most;
        }
        switch.aggregators
    }

    /// What nobody claims of a switch.
    fn unclaimed(&self, switch: &Hop) -> u32 {
        let claims = self.jobs.values().filter_map(|claims| claims.at.get(&switch.address));
        claims.fold(switch.aggregators, |left, claim| left.saturating_sub(claim.most))
    }

    /// What no other job has of a switch.
    fn room(&self, job: JobId, switch: &Hop) -> u32 {
        self.free(*switch, Some(job)).into_iter().map(|gap| gap.end - gap.start).sum()
    }

    /// What a job has of a switch.
    fn taken(&self, job: JobId, switch: &Hop) -> u32 {
        let taken = self.taken.get(&switch.address).into_iter().flatten();
        taken.filter(|(other, _)| *other == job).map(|(_, range)| range.end - range.start).sum()
    }

    /// Ranges of a switch that no job has, or none but this one.
    pub fn free(&self, switch: Hop, but: Option<JobId>) -> Vec<Range<u32>> {
        let all = switch.aggregators;
        let taken = self.taken.get(&switch.address).into_iter().flatten();
        let others = taken.filter(|(job, _)| Some(*job) != but);
        let mut others: Vec<Range<u32>> = others.map(|(_, range)| range.clone()).collect();
        others.sort_unstable_by_key(|range| range.start);
        let (mut free, mut begin) = (Vec::new(), 0);
        for range in others.into_iter().chain(std::iter::once(all..all)) {
            if begin < range.start.min(all) {
                free.push(begin..range.start.min(all));
            }
            begin = begin.max(range.end);
        }
        free
    }

    /// So many in a row, for a job.
    pub fn take(&mut self, switch: Hop, job: JobId, count: u32) -> Option<u32> {
        let free = self.free(switch, None);
        let first = free.iter().find(|range| range.end - range.start >= count)?.start;
        self.taken.entry(switch.address).or_default().push((job, first..first + count));
        Some(first)
    }
}

/// Says of each switch of a tree whether it would sum on the way to the root with enough memory.
fn sums(tree: &SwitchTree) -> Vec<bool> {
    let mut sums = vec![false; tree.switches.len()];
    let mut nodes = vec![AggregationNode::SERVER; tree.ranks.len()];
    sum_on_the_way(tree, &mut nodes, |switch| {
        // No link is spared to an upstream on its machine.
        sums[switch] = tree.switches[switch].hop.rate_bps != Some(u64::MAX);
        sums[switch]
    });
    sums
}
