//! A set of ranks.

use alloc::vec;
use alloc::vec::Vec;

use fanin_wire::{RANKS_MAX, Rank};

/// A set of ranks of one job. It prints as a person would list them: `0, 2 and 5-9`.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Ranks {
    /// Bit `r % 64` of word `r / 64` is rank `r`'s. The last word is not zero.
    words: Vec<u64>,
}

impl Ranks {
    /// Ranks 0 to `world_size` - 1.
    #[must_use]
    pub fn all(world_size: u16) -> Self {
        let mut words = vec![u64::MAX; usize::from(world_size / 64)];
        if !world_size.is_multiple_of(64) {
            words.push((1 << (world_size % 64)) - 1);
        }
        Self { words }
    }

    /// The set of a bitmap, 64 ranks a word, the lowest first; `None` where no job has such ranks.
    #[must_use]
    pub fn from_words(words: &[u64]) -> Option<Self> {
        let mut set = Self { words: words.to_vec() };
        set.trim();
        (set.words.len() <= (RANKS_MAX / 64) as usize).then_some(set)
    }

    /// Its bitmap, as short as it can be.
    #[must_use]
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Adds a rank; false when it was there before.
    pub fn insert(&mut self, rank: Rank) -> bool {
        let (word, bit) = place(rank);
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        let new = self.words[word] & bit == 0;
        self.words[word] |= bit;
        new
    }

    /// Removes a rank; false when it was not there.
    pub fn remove(&mut self, rank: Rank) -> bool {
        let had = self.contains(rank);
        if had {
            let (word, bit) = place(rank);
            self.words[word] &= !bit;
            self.trim();
        }
        had
    }

    /// Whether a rank is in the set.
    #[must_use]
    pub fn contains(&self, rank: Rank) -> bool {
        let (word, bit) = place(rank);
        self.words.get(word).is_some_and(|word| word & bit != 0)
    }

    /// The ranks that are here and not in `other`.
    #[must_use]
    pub fn without(mut self, other: &Self) -> Self {
        for (word, other) in self.words.iter_mut().zip(&other.words) {
            *word &= !other;
        }
        self.trim();
        self
    }

    /// Whether it is the empty set.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// How many ranks it has.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.words.iter().map(|word| word.count_ones()).sum()
    }

    /// The ranks in order.
    pub fn iter(&self) -> impl Iterator<Item = Rank> {
        (0..=u16::MAX).take(64 * self.words.len()).map(Rank).filter(|rank| self.contains(*rank))
    }

    fn trim(&mut self) {
        let last = self.words.iter().rposition(|word| *word != 0);
        self.words.truncate(last.map_or(0, |last| last + 1));
    }
}

fn place(rank: Rank) -> (usize, u64) {
    (usize::from(rank.0 / 64), 1 << (rank.0 % 64))
}

impl Extend<Rank> for Ranks {
    fn extend<I: IntoIterator<Item = Rank>>(&mut self, ranks: I) {
        for rank in ranks {
            self.insert(rank);
        }
    }
}

impl FromIterator<Rank> for Ranks {
    fn from_iter<I: IntoIterator<Item = Rank>>(ranks: I) -> Self {
        let mut set = Self::default();
        set.extend(ranks);
        set
    }
}

impl<const N: usize> From<[u16; N]> for Ranks {
    fn from(ranks: [u16; N]) -> Self {
        ranks.into_iter().map(Rank).collect()
    }
}

impl core::fmt::Display for Ranks {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let mut runs: Vec<(u16, u16)> = Vec::new();
        for Rank(rank) in self.iter() {
            match runs.last_mut() {
                Some((_, last)) if *last + 1 == rank => *last = rank,
                _ => runs.push((rank, rank)),
            }
        }
        // Two are as short side by side.
        let parts: Vec<(u16, u16)> = runs
            .into_iter()
            .flat_map(|(first, last)| match last - first {
                1 => vec![(first, first), (last, last)],
                _ => vec![(first, last)],
            })
            .collect();
        if parts.is_empty() {
            return f.write_str("none");
        }
        for (position, (first, last)) in parts.iter().enumerate() {
            f.write_str(match position {
                0 => "",
                _ if position + 1 == parts.len() => " and ",
                _ => ", ",
            })?;
            match first == last {
                true => write!(f, "{first}")?,
                false => write!(f, "{first}-{last}")?,
            }
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
        assert_eq!(Ranks::default().to_string(), "none");
        assert_eq!(Ranks::from([3]).to_string(), "3");
        assert_eq!(Ranks::from([3, 0]).to_string(), "0 and 3");
        assert_eq!(Ranks::from([63, 0, 5]).to_string(), "0, 5 and 63");
        assert_eq!(Ranks::from([1, 2]).to_string(), "1 and 2");
        assert_eq!(Ranks::from([9, 8, 4095, 1, 2, 3, 7]).to_string(), "1-3, 7-9 and 4095");
        assert_eq!(Ranks::all(256).to_string(), "0-255");
    }

    #[test]
    fn a_set_is_the_same_however_it_came_to_be() {
        for world_size in [1, 63, 64, 65, 4096] {
            let all = Ranks::all(world_size);
            assert_eq!(all, (0..world_size).map(Rank).collect());
            assert_eq!(all.len(), u32::from(world_size));
            assert_eq!((all.contains(Rank(world_size - 1)), all.contains(Rank(world_size))), (true, false));
            assert_eq!(Ranks::from_words(all.words()), Some(all.clone()));
            let mut less = all.clone();
            assert_eq!((less.remove(Rank(world_size - 1)), less.remove(Rank(world_size))), (true, false));
            assert_eq!((less.clone(), all.clone().without(&less).len()), (Ranks::all(world_size - 1), 1));
        }
        assert_eq!(Ranks::from_words(&[1, 0, 0]), Some(Ranks::from([0])));
        assert_eq!(Ranks::from_words(&[u64::MAX; 65]), None, "no job has so many");
    }
}
