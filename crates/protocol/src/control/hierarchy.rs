//! From each rank's way to the root to what sums where: the directions of its packets (ATP §3.4, §A.2), or the racks of SwitchML (§7).

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use fanin_wire::{CHILDREN_MAX, Directions, LEVELS_MAX, PLACES_MAX, Rank, WorkerId};

use super::{Hop, Refusal};
use crate::switchml::Contributions;

/// How a job's packets come together on the way to the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    /// Switches on the longest way.
    pub levels: u8,
    /// Of each rank's packets, in order of rank.
    pub directions: Vec<Directions>,
    /// Aggregators of the smallest switch: an index below this is valid at each of them. Without a switch, none.
    pub aggregators: u32,
}

/// How a SwitchML job's contributions come together (SwitchML §7): at the root, and in the racks before it, if there are any.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Racks {
    /// What the root gets.
    pub root: Contributions,
    /// Of each rank its place at the switch that it sends to.
    pub places: Vec<WorkerId>,
    racks: Vec<Rack>,
    /// Of each rank the racks on its way, the root's neighbour first.
    ways: Vec<Vec<usize>>,
}

/// A switch that sums for others, and sends its sum on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rack {
    /// Its place at its upstream.
    pub place: WorkerId,
    /// What it gets.
    pub contributions: Contributions,
}

impl Racks {
    /// The racks that a rank's packets go through, the root's neighbour first.
    pub fn way(&self, rank: Rank) -> impl ExactSizeIterator<Item = &Rack> {
        let way = self.ways.get(usize::from(rank.0)).map_or(&[][..], Vec::as_slice);
        way.iter().map(|rack| &self.racks[*rack])
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

/// A switch by its instance, or the root, which is no one's child: ATP's server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Parent {
    Switch(u64),
    Root,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Child {
    Switch(u64),
    Rank,
}

/// Who sends to whom, each child with the lowest rank that is it or is behind it: in the order of these.
#[derive(Debug, Default)]
struct Tree(BTreeMap<Parent, Vec<(Child, usize)>>);

impl Tree {
    fn of(paths: &[&[Hop]], children_max: usize) -> Result<Self, Refusal> {
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

    fn children(&self, parent: Parent) -> &[(Child, usize)] {
        self.0.get(&parent).map_or(&[], Vec::as_slice)
    }

    /// Which of a parent's children a switch or this rank is.
    fn place(&self, parent: Parent, child: Child, rank: usize) -> usize {
        let is_it = |other: &(Child, usize)| match child {
            Child::Switch(_) => other.0 == child,
            Child::Rank => *other == (child, rank),
        };
        self.children(parent).iter().position(is_it).unwrap_or(0)
    }
}

/// Levels count from the server's side, so that a switch has the same level on every way that leads through it: the last
/// before the server has the highest. The server merges by the level above, if it has several children.
pub(super) fn hierarchy(paths: &[&[Hop]]) -> Result<Hierarchy, Refusal> {
    let levels = paths.iter().map(|path| path.len()).max().unwrap_or(0);
    let tree = Tree::of(paths, CHILDREN_MAX)?;
    let needed = levels + usize::from(tree.children(Parent::Root).len() > 1);
    if needed > LEVELS_MAX {
        return Err(Refusal::TooManyLevels { levels: needed as u32 });
    }
    let of_rank = |(rank, path): (usize, &&[Hop])| {
        let mut directions = Directions { level: (levels - path.len()) as u8, ..Directions::default() };
        let mut child = Child::Rank;
        let parents = path.iter().map(|hop| Parent::Switch(hop.instance)).chain([Parent::Root]);
        for (level, parent) in (levels - path.len()..LEVELS_MAX).zip(parents) {
            directions.bitmaps[level] = 1 << tree.place(parent, child, rank);
            directions.fan_in_degrees[level] = tree.children(parent).len() as u8;
            if let Parent::Switch(instance) = parent {
                child = Child::Switch(instance);
            }
        }
        directions
    };
    Ok(Hierarchy {
        levels: levels as u8,
        directions: paths.iter().enumerate().map(of_rank).collect(),
        aggregators: paths.iter().copied().flatten().map(|hop| hop.aggregators).min().unwrap_or(0),
    })
}

/// Whether each switch on these ways has one upstream, whatever is below it.
pub(super) fn tree_of_any(paths: &[&[Hop]]) -> Result<(), Refusal> {
    Tree::of(paths, usize::MAX).map(drop)
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
    let mut indices: BTreeMap<u64, usize> = BTreeMap::new();
    for (rank, path) in paths.iter().enumerate() {
        let own = path.first().map_or(Parent::Root, |hop| Parent::Switch(hop.instance));
        racks.places.push(place(own, Child::Rank, rank));
        let mut way = Vec::with_capacity(path.len());
        let mut upstream = Parent::Root;
        for hop in path.iter().rev() {
            way.push(*indices.entry(hop.instance).or_insert_with(|| {
                let place = place(upstream, Child::Switch(hop.instance), rank);
                let contributions = contributions(Parent::Switch(hop.instance));
                racks.racks.push(Rack { place, contributions });
                racks.racks.len() - 1
            }));
            upstream = Parent::Switch(hop.instance);
        }
        racks.ways.push(way);
    }
    Ok(racks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    fn hop(instance: u64) -> Hop {
        Hop {
            instance,
            address: ([10, 0, 0, instance as u8], 4800).into(),
            aggregators: 100 + instance as u32,
            elements: 2048,
            receive_buffer_bytes: 16 << 20,
            mtu: 1500,
            rate_bps: None,
        }
    }

    fn of(paths: &[&[u64]]) -> Result<Hierarchy, Refusal> {
        let hops: Vec<Vec<Hop>> =
            paths.iter().map(|path| path.iter().map(|instance| hop(*instance)).collect()).collect();
        hierarchy(&hops.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }

    fn directions(level: u8, bitmaps: [u32; 4], fan_in_degrees: [u8; 4]) -> Directions {
        Directions { level, bitmaps, fan_in_degrees }
    }

    #[test]
    fn one_rack_counts_its_ranks() {
        let hierarchy = of(&[&[7], &[7], &[7]]).unwrap();
        assert_eq!((hierarchy.levels, hierarchy.aggregators), (1, 107));
        assert_eq!(hierarchy.directions[2], directions(0, [4, 1, 0, 0], [3, 1, 0, 0]));
    }

    #[test]
    fn two_racks_meet_at_the_server() {
        let hierarchy = of(&[&[7], &[8], &[7]]).unwrap();
        let expected = [
            directions(0, [1, 1, 0, 0], [2, 2, 0, 0]),
            directions(0, [1, 2, 0, 0], [1, 2, 0, 0]),
            directions(0, [2, 1, 0, 0], [2, 2, 0, 0]),
        ];
        assert_eq!(hierarchy.directions, expected);
        assert_eq!(hierarchy.aggregators, 107, "the smallest switch's");
    }

    #[test]
    fn a_rank_at_the_upper_switch_starts_at_its_level() {
        let hierarchy = of(&[&[7, 9], &[8, 9], &[9], &[]]).unwrap();
        assert_eq!(hierarchy.levels, 2);
        assert_eq!(hierarchy.directions[0], directions(0, [1, 1, 1, 0], [1, 3, 2, 0]));
        assert_eq!(hierarchy.directions[1], directions(0, [1, 2, 1, 0], [1, 3, 2, 0]));
        assert_eq!(hierarchy.directions[2], directions(1, [0, 4, 1, 0], [0, 3, 2, 0]));
        assert_eq!(hierarchy.directions[3], directions(2, [0, 0, 2, 0], [0, 0, 2, 0]));
    }

    #[test]
    fn without_a_switch_the_server_does_it_all() {
        let hierarchy = of(&[&[], &[]]).unwrap();
        assert_eq!((hierarchy.levels, hierarchy.aggregators), (0, 0));
        assert_eq!(hierarchy.directions[1], directions(0, [2, 0, 0, 0], [2, 0, 0, 0]));
    }

    fn racks_of(paths: &[&[u64]]) -> Result<Racks, Refusal> {
        let hops: Vec<Vec<Hop>> =
            paths.iter().map(|path| path.iter().map(|instance| hop(*instance)).collect()).collect();
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
        assert_eq!(racks.way(Rank(1)).len(), 0);
        assert_eq!(racks.widest(), 3);
    }

    #[test]
    fn racks_of_racks_and_ranks_beside_them_have_places_in_the_order_of_ranks() {
        let racks = racks_of(&[&[7, 9], &[], &[8, 9], &[7, 9], &[9]]).unwrap();
        assert_eq!(racks.root, contributions(&[0, 1], 0b01));
        assert_eq!(racks.places, [0, 1, 0, 1, 2].map(WorkerId));
        let way: Vec<&Rack> = racks.way(Rank(3)).collect();
        let (upper, lower) = (contributions(&[0, 2, 4], 0b011), contributions(&[0, 3], 0));
        assert_eq!(*way[0], Rack { place: WorkerId(0), contributions: upper });
        assert_eq!(*way[1], Rack { place: WorkerId(0), contributions: lower });
        let way: Vec<&Rack> = racks.way(Rank(2)).collect();
        assert_eq!(*way[1], Rack { place: WorkerId(1), contributions: contributions(&[2], 0) });
        assert_eq!(racks.way(Rank(4)).len(), 1);
        assert_eq!(racks.widest(), 3);
    }

    #[test]
    fn no_two_ranks_have_the_same_directions() {
        let paths: Vec<Vec<u64>> = (0..60).map(|rank| vec![rank / 6, 100 + rank / 30]).collect();
        let hierarchy = of(&paths.iter().map(Vec::as_slice).collect::<Vec<_>>()).unwrap();
        for (rank, one) in hierarchy.directions.iter().enumerate() {
            assert!(hierarchy.directions[..rank].iter().all(|other| other.bitmaps != one.bitmaps));
        }
    }

    #[test]
    fn a_switch_that_leads_two_ways_is_refused() {
        let address = hop(7).address;
        let disagree = |rank, other_rank| Refusal::PathsDisagree { rank, other_rank, switch: address };
        assert_eq!(of(&[&[7, 9], &[8, 9], &[7]]), Err(disagree(2, 0)));
        assert_eq!(of(&[&[7, 8, 7]]), Err(disagree(0, 0)), "a loop");
    }

    #[test]
    fn levels_and_children_have_limits() {
        assert_eq!(of(&[&[1, 2, 3, 4], &[1, 2, 3, 4]]).map(|found| found.levels), Ok(4));
        assert_eq!(of(&[&[1, 2, 3, 4], &[]]), Err(Refusal::TooManyLevels { levels: 5 }));
        assert_eq!(of(&[&[1, 2, 3, 4, 5]]), Err(Refusal::TooManyLevels { levels: 5 }));
        let crowd = |path: &'static [u64]| of(&vec![path; 33]);
        assert_eq!(of(&vec![&[7][..]; 32]).map(|found| found.directions[31].bitmaps[0]), Ok(1 << 31));
        let full = |switch| Err(Refusal::TooManyChildren { switch, children: 33 });
        assert_eq!(crowd(&[7]), full(Some(hop(7).address)));
        assert_eq!(crowd(&[]), full(None));
    }
}
