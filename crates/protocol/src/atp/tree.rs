//! Which workers a fragment comes from: the job's aggregation hierarchy, as the workers' directions
//! describe it (ATP §3.2, §3.4).
//!
//! Workers are counted by *position*, their order from left to right in the tree, so that what any
//! switch has below it is one range.

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;
use fanin_wire::{CHILDREN_MAX, Directions, GradientHeader, JobId, Key, LEVELS_MAX, Participants};

use super::AtpConfigError;
use super::ServerJob;
use crate::aggregation::{Admitted, Coverage, GoOn, Roster, Workers};
use crate::machine::Reason;

/// The child at one bit of a switch's bitmap.
#[derive(Clone, Debug)]
struct Child {
    /// The positions below it; one for a worker.
    below: Range<u16>,
    /// The switch that it is, if it is one.
    switch: Option<usize>,
}

/// A switch, or the server as if it were one.
#[derive(Clone, Debug)]
struct Switch {
    level: usize,
    children: Vec<Option<Child>>,
    fan_in_degree: u8,
}

/// The tree of a job.
#[derive(Clone, Debug)]
pub struct Tree {
    /// The root is the first.
    switches: Vec<Switch>,
    /// The level that packets have when they come to the server. From here up nobody aggregates.
    server_level: usize,
    /// By position.
    ranks: Vec<u16>,
}

impl Tree {
    /// The tree of workers with these directions, by rank.
    pub(super) fn new(directions: &[Directions], server_level: u8) -> Result<Self, AtpConfigError> {
        let server_level = usize::from(server_level);
        if server_level > LEVELS_MAX {
            return Err(AtpConfigError::Level(server_level as u8));
        }
        let used = |level: &usize| directions.iter().any(|worker| worker.bitmaps[*level] != 0);
        let top = (0..LEVELS_MAX).rev().find(used).ok_or(AtpConfigError::Place(0))?;
        for (rank, worker) in directions.iter().enumerate() {
            let start = usize::from(worker.level);
            let in_place = start <= top.min(server_level)
                && (0..LEVELS_MAX).all(|level| match worker.bitmaps[level] {
                    0 => level < start || level > top,
                    bitmap => level >= start && bitmap.is_power_of_two(),
                });
            if !in_place {
                return Err(AtpConfigError::Place(rank));
            }
        }
        let mut ranks: Vec<u16> = (0..directions.len() as u16).collect();
        ranks.sort_by_key(|rank| {
            let mut path = directions[usize::from(*rank)].bitmaps;
            path.reverse();
            path
        });
        let mut tree = Self { switches: vec![Switch::new(top)], server_level, ranks };
        for position in 0..tree.ranks.len() as u16 {
            let rank = usize::from(tree.ranks[usize::from(position)]);
            tree.insert(position, &directions[rank]).ok_or(AtpConfigError::Place(rank))?;
        }
        for (rank, worker) in directions.iter().enumerate() {
            tree.check_fan_in(rank, worker)?;
        }
        Ok(tree)
    }

    /// The tree of as many workers with other directions.
    pub(super) fn set_up_again<A>(
        &self,
        workers: &[Directions],
        level: u8,
    ) -> Result<GoOn<Self, A>, AtpConfigError> {
        if workers.len() != self.ranks.len() {
            return Err(AtpConfigError::Directions(workers.len()));
        }
        Ok(GoOn { roster: Self::new(workers, level)?, children: Vec::new(), keeps: true })
    }

    fn insert(&mut self, position: u16, worker: &Directions) -> Option<()> {
        let mut at = 0;
        loop {
            let next = self.switches.len();
            let switch = &mut self.switches[at];
            let level = switch.level;
            let place = &mut switch.children[worker.bitmaps[level].trailing_zeros() as usize];
            let is_worker = level == usize::from(worker.level);
            switch.fan_in_degree += u8::from(place.is_none());
            match place {
                None => {
                    let below = position..position + 1;
                    *place = Some(Child { below, switch: (!is_worker).then_some(next) });
                    if is_worker {
                        return Some(());
                    }
                    self.switches.push(Switch::new(level - 1));
                    at = next;
                }
                // Somebody else's place, or a worker where a switch must be.
                Some(child) => {
                    let below = child.switch.filter(|_| !is_worker)?;
                    child.below.end = position + 1;
                    at = below;
                }
            }
        }
    }

    fn check_fan_in(&self, rank: usize, worker: &Directions) -> Result<(), AtpConfigError> {
        let mut at = Some(0);
        while let Some(switch) = at.map(|at| &self.switches[at]) {
            let (level, is) = (switch.level, switch.fan_in_degree);
            let said = worker.fan_in_degrees[level];
            if level < self.server_level && said != is {
                return Err(AtpConfigError::FanIn { rank, level: level as u8, said, is });
            }
            at = switch.child(worker.bitmaps[level]).and_then(|child| child.switch);
        }
        Ok(())
    }

    /// The workers in a packet with these directions; `None` when nobody of this job sends such
    /// ones.
    ///
    /// From the top down, levels with one bit lead to a switch. The first level with several bits
    /// says which of its children are in, and those are in with all that is below them. Above the
    /// first level only complete sums are added. The packet's bits of the levels further down are
    /// those of the child that came last.
    fn covered(&self, directions: &Directions) -> Option<Coverage> {
        if usize::from(directions.level) != self.server_level {
            return None;
        }
        let mut switch = &self.switches[0];
        let (mut child, mut shared) = (0, self.ranks.len() > 1);
        loop {
            let bitmap = directions.bitmaps[switch.level];
            let unaggregated = switch.level >= self.server_level;
            if !unaggregated && directions.fan_in_degrees[switch.level] != switch.fan_in_degree {
                return None;
            }
            if !bitmap.is_power_of_two() {
                return (!unaggregated && bitmap != 0)
                    .then(|| switch.several(bitmap, child, shared))
                    .flatten();
            }
            let next = switch.child(bitmap)?;
            if unaggregated {
                (child, shared) = (next.below.start, next.below.len() > 1);
            }
            match next.switch {
                Some(at) => switch = &self.switches[at],
                None => {
                    let mut workers = Workers::default();
                    workers.insert(next.below.start.into());
                    return Some(Coverage { child, shared, ..Coverage::of(workers, next.below.start) });
                }
            }
        }
    }
}

impl<A> Roster<A> for Tree {
    type Label = Directions;
    type Job = ServerJob;

    fn identity(job: &ServerJob) -> (JobId, Key) {
        (job.config.id, job.config.key)
    }

    fn admit(job: ServerJob) -> Result<Admitted<Self, A>, AtpConfigError> {
        let config = job.config.check()?;
        if job.workers.len() != usize::from(config.workers) {
            return Err(AtpConfigError::Directions(job.workers.len()));
        }
        let roster = Self::new(&job.workers, job.level)?;
        Ok(Admitted { config, roster, restored: job.restored, children: Vec::new() })
    }

    fn workers(&self) -> usize {
        self.ranks.len()
    }

    fn rank(&self, position: usize) -> u16 {
        self.ranks[position]
    }

    fn coverage(&self, header: &GradientHeader) -> Result<Coverage, Reason> {
        self.covered(&header.directions).ok_or(Reason::OutOfRange)
    }

    /// The aggregator that the place uses from now on travels in the bitmap, which parameters do
    /// not need (ATP §3.6).
    fn answer(&self, _: u64, next_aggregator_index: u32, _: Participants) -> Directions {
        Directions { bitmaps: [next_aggregator_index, 0, 0, 0], ..Directions::default() }
    }
}

impl Switch {
    fn new(level: usize) -> Self {
        Self { level, children: vec![None; CHILDREN_MAX], fan_in_degree: 0 }
    }

    /// The child of a bitmap's lowest bit.
    fn child(&self, bitmap: u32) -> Option<&Child> {
        self.children.get(bitmap.trailing_zeros() as usize)?.as_ref()
    }

    /// The workers below the children in a bitmap of several bits.
    fn several(&self, mut bitmap: u32, child: u16, shared: bool) -> Option<Coverage> {
        let first = self.child(bitmap)?.below.start;
        let mut workers = Workers::default();
        while bitmap != 0 {
            workers.insert_range(&self.child(bitmap)?.below);
            bitmap &= bitmap - 1;
        }
        Some(Coverage { child, shared, ..Coverage::of(workers, first) })
    }
}
