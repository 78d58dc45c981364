//! A set of ranks, as small as the worker bitmap of a slot.

use fanin_wire::{WORKERS_MAX, WorkerId};

/// A set of ranks of one job. It prints as a person would list them: `0, 2 and 5`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Ranks(pub u64);

impl Ranks {
    /// Ranks 0 to `world_size` - 1.
    #[must_use]
    pub const fn all(world_size: u8) -> Self {
        if world_size as u32 >= WORKERS_MAX { Self(u64::MAX) } else { Self((1 << world_size) - 1) }
    }

    /// Adds a rank; false when it was there before. The rank must be below [`WORKERS_MAX`].
    pub const fn insert(&mut self, rank: WorkerId) -> bool {
        let new = self.0 & rank.bit() == 0;
        self.0 |= rank.bit();
        new
    }

    /// Whether a rank is in the set.
    #[must_use]
    pub const fn contains(self, rank: WorkerId) -> bool {
        (rank.0 as u32) < WORKERS_MAX && self.0 & rank.bit() != 0
    }

    /// The ranks that are here and not in `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The ranks that are here or in `other`.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether it is the empty set.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// How many ranks it has.
    #[must_use]
    pub const fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// The ranks in order.
    pub fn iter(self) -> impl Iterator<Item = WorkerId> {
        (0..64).map(WorkerId).filter(move |rank| self.contains(*rank))
    }
}

impl FromIterator<WorkerId> for Ranks {
    fn from_iter<I: IntoIterator<Item = WorkerId>>(ranks: I) -> Self {
        let mut set = Self::default();
        for rank in ranks {
            set.insert(rank);
        }
        set
    }
}

impl core::fmt::Display for Ranks {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let count = self.len() as usize;
        if count == 0 {
            return f.write_str("none");
        }
        for (position, rank) in self.iter().enumerate() {
            let before = match position {
                0 => "",
                _ if position + 1 == count => " and ",
                _ => ", ",
            };
            write!(f, "{before}{}", rank.0)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn ranks_print_as_a_person_lists_them() {
        let ranks = |ranks: &[u8]| ranks.iter().copied().map(WorkerId).collect::<Ranks>().to_string();
        assert_eq!(ranks(&[]), "none");
        assert_eq!(ranks(&[3]), "3");
        assert_eq!(ranks(&[3, 0]), "0 and 3");
        assert_eq!(ranks(&[63, 0, 5]), "0, 5 and 63");
    }

    #[test]
    fn all_ranks_of_the_largest_job_fill_the_word() {
        assert_eq!(Ranks::all(64).len(), 64);
        assert_eq!(Ranks::all(1), Ranks(1));
        assert!(!Ranks::all(64).contains(WorkerId::ALL));
    }
}
