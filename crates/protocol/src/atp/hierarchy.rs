//! From each rank's way to the root to the directions of its packets (ATP §3.4, §A.2).

use alloc::vec::Vec;

use fanin_wire::{CHILDREN_MAX, Directions, LEVELS_MAX};

use crate::control::{Child, Hop, Parent, Refusal, Tree};

/// How a job's packets come together on the way to the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hierarchy {
    /// Switches on the longest way.
    pub levels: u8,
    /// Of each rank's packets, in order of rank.
    pub directions: Vec<Directions>,
    /// Ranks and switches that send to one switch, or to the root: the most.
    pub senders: u16,
    /// Aggregators of the smallest switch: an index below this is valid at each of them. Without a switch, none.
    pub aggregators: u32,
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
    let parents = paths.iter().copied().flatten().map(|hop| Parent::Switch(hop.instance));
    let senders = parents.chain([Parent::Root]).map(|parent| tree.children(parent).len()).max();
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
        senders: senders.unwrap_or(0) as u16,
        directions: paths.iter().enumerate().map(of_rank).collect(),
        aggregators: paths.iter().copied().flatten().map(|hop| hop.aggregators).min().unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    fn of(paths: &[&[u64]]) -> Result<Hierarchy, Refusal> {
        let hops: Vec<Vec<Hop>> =
            paths.iter().map(|path| path.iter().map(|instance| Hop::numbered(*instance)).collect()).collect();
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
        assert_eq!(hierarchy.senders, 2, "to a rack, and to the root");
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
        let address = Hop::numbered(7).address;
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
        assert_eq!(crowd(&[7]), full(Some(Hop::numbered(7).address)));
        assert_eq!(crowd(&[]), full(None));
    }
}
