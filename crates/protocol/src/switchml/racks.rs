//! From each rank's way to the root to the racks that sum first (SwitchML §7).

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use fanin_wire::{PLACES_MAX, Rank, WorkerId};

use super::Contributions;
use crate::control::{Child, Hop, Parent, Refusal, Tree};

/// How a SwitchML job's contributions come together (SwitchML §7): at the root, and in the racks before it, if there are any.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(super) struct Racks {
    /// What the root gets.
    pub root: Contributions,
    /// Of each rank its place at the switch that it sends to.
    pub places: Vec<WorkerId>,
    racks: Vec<Rack>,
}

/// A switch that sums for others, and sends its sum on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rack {
    /// Its place at its upstream.
    pub place: WorkerId,
    /// What it gets.
    pub contributions: Contributions,
}

impl Racks {
    /// The racks, in the order of the job's tree of switches.
    pub fn iter(&self) -> impl Iterator<Item = &Rack> {
        self.racks.iter()
    }

    /// Whether all ranks send to the root.
    #[must_use]
    pub const fn is_flat(&self) -> bool {
        self.racks.is_empty()
    }

    /// The most contributions that one switch gets.
    #[must_use]
    pub fn widest(&self) -> u8 {
        let racks = self.racks.iter().map(|rack| &rack.contributions);
        racks.chain([&self.root]).map(Contributions::count).max().unwrap_or(0)
    }
}

/// The racks of a SwitchML job: none where all ranks are at the root.
pub(super) fn racks(paths: &[&[Hop]]) -> Result<Racks, Refusal> {
    let tree = Tree::of(paths, PLACES_MAX as usize)?;
    let contributions = |parent: Parent| {
        let children = tree.children(parent);
        let racks = children.iter().enumerate().filter(|(_, (child, _))| matches!(child, Child::Switch(_)));
        Contributions {
            ranks: children.iter().map(|(_, rank)| Rank(*rank as u16)).collect(),
            racks: racks.fold(0, |bitmap, (place, _)| bitmap | 1 << place),
        }
    };
    let place = |parent, child, rank| WorkerId(tree.place(parent, child, rank) as u8);
    let mut racks = Racks { root: contributions(Parent::Root), ..Racks::default() };
    let mut seen: BTreeSet<u64> = BTreeSet::new();
    for (rank, path) in paths.iter().enumerate() {
        let own = path.first().map_or(Parent::Root, |hop| Parent::Switch(hop.instance));
        racks.places.push(place(own, Child::Rank, rank));
        let mut upstream = Parent::Root;
        for hop in path.iter().rev() {
            if seen.insert(hop.instance) {
                let place = place(upstream, Child::Switch(hop.instance), rank);
                let contributions = contributions(Parent::Switch(hop.instance));
                racks.racks.push(Rack { place, contributions });
            }
            upstream = Parent::Switch(hop.instance);
        }
    }
    Ok(racks)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn racks_of(paths: &[&[u64]]) -> Result<Racks, Refusal> {
        let hops: Vec<Vec<Hop>> =
            paths.iter().map(|path| path.iter().map(|instance| Hop::numbered(*instance)).collect()).collect();
        racks(&hops.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }

    fn contributions(ranks: &[u16], racks: u64) -> Contributions {
        Contributions { ranks: ranks.iter().copied().map(Rank).collect(), racks }
    }

    #[test]
    fn without_racks_each_ranks_place_is_its_own() {
        let racks = racks_of(&[&[], &[], &[]]).unwrap();
        assert_eq!(racks.root, contributions(&[0, 1, 2], 0));
        assert_eq!(racks.places, [0, 1, 2].map(WorkerId));
        assert!(racks.is_flat());
        assert_eq!(racks.widest(), 3);
    }

    #[test]
    fn racks_of_racks_and_ranks_beside_them_have_places_in_the_order_of_ranks() {
        let racks = racks_of(&[&[7, 9], &[], &[8, 9], &[7, 9], &[9]]).unwrap();
        assert_eq!(racks.root, contributions(&[0, 1], 0b01));
        assert_eq!(racks.places, [0, 1, 0, 1, 2].map(WorkerId));
        // Each stands behind the one above it.
        let all: Vec<&Rack> = racks.iter().collect();
        let (upper, lower) = (contributions(&[0, 2, 4], 0b011), contributions(&[0, 3], 0));
        assert_eq!(*all[0], Rack { place: WorkerId(0), contributions: upper });
        assert_eq!(*all[1], Rack { place: WorkerId(0), contributions: lower });
        assert_eq!(*all[2], Rack { place: WorkerId(1), contributions: contributions(&[2], 0) });
        assert_eq!(all.len(), 3);
        assert_eq!(racks.widest(), 3);
    }
}
