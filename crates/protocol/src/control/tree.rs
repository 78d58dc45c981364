//! Who sends to whom, as the ranks' ways to the root say.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::{Hop, Refusal};

/// A switch by its instance, or the root, which is no one's child: the service that admits jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Parent {
    Switch(u64),
    Root,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Child {
    Switch(u64),
    Rank,
}

/// Who sends to whom, each child with the lowest rank that is it or is behind it: in the order of these.
#[derive(Debug, Default)]
pub(crate) struct Tree(BTreeMap<Parent, Vec<(Child, usize)>>);

impl Tree {
    pub fn of(paths: &[&[Hop]], children_max: usize) -> Result<Self, Refusal> {
        let mut tree = Self::default();
        let mut upstream: BTreeMap<u64, (Parent, usize)> = BTreeMap::new();
        for (rank, path) in paths.iter().enumerate() {
            let mut child = Child::Rank;
            for (position, hop) in path.iter().enumerate() {
                tree.join(Parent::Switch(hop.instance), child, rank);
                let next = path.get(position + 1).map_or(Parent::Root, |next| Parent::Switch(next.instance));
                let (known, other_rank) = *upstream.entry(hop.instance).or_insert((next, rank));
                if known != next {
                    return Err(Refusal::PathsDisagree {
                        rank: rank as u32,
                        other_rank: other_rank as u32,
                        switch: hop.address,
                    });
                }
                child = Child::Switch(hop.instance);
            }
            tree.join(Parent::Root, child, rank);
        }
        for (parent, children) in &tree.0 {
            if children.len() > children_max {
                let is_parent = |hop: &&Hop| *parent == Parent::Switch(hop.instance);
                let switch = paths.iter().copied().flatten().find(is_parent).map(|hop| hop.address);
                return Err(Refusal::TooManyChildren { switch, children: children.len() as u32 });
            }
        }
        Ok(tree)
    }

    fn join(&mut self, parent: Parent, child: Child, rank: usize) {
        let children = self.0.entry(parent).or_default();
        let is_it = |other: &(Child, usize)| match child {
            Child::Switch(_) => other.0 == child,
            Child::Rank => false,
        };
        if !children.iter().any(is_it) {
            children.push((child, rank));
        }
    }

    pub fn children(&self, parent: Parent) -> &[(Child, usize)] {
        self.0.get(&parent).map_or(&[], Vec::as_slice)
    }

    /// Which of a parent's children a switch or this rank is.
    pub fn place(&self, parent: Parent, child: Child, rank: usize) -> usize {
        let is_it = |other: &(Child, usize)| match child {
            Child::Switch(_) => other.0 == child,
            Child::Rank => *other == (child, rank),
        };
        self.children(parent).iter().position(is_it).unwrap_or(0)
    }
}
