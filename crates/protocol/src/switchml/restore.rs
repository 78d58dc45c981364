//! Who hands which result back to a switch that lost its memory.

use alloc::vec::Vec;

use fanin_wire::{Rank, SlotIndex};

use crate::control::Refusal;

/// For each rank and shard the slots whose last result that rank hands back.
///
/// `completed` holds, for each rank in order, the completed exchanges of each slot of each shard; all have the same shape.
/// A slot that all ranks completed equally often needs no one: nobody waits for a result that others have. Where they
/// differ, all ranks that are ahead hand back what they have: mostly the whole result that the others lack, and the first to come is enough;
/// of a sum that only a root got, their parts of it, and then each is needed. No two can differ by more than one, because a slot's
/// next exchange completes only with every worker's contribution, which each sends after it has the previous result
/// (SwitchML §4.5).
pub(super) fn restorers(completed: &[&[Vec<u32>]]) -> Result<Vec<Vec<Vec<SlotIndex>>>, Refusal> {
    let shards = completed.first().map_or(0, |rank| rank.len());
    let mut restore: Vec<Vec<Vec<SlotIndex>>> =
        completed.iter().map(|_| (0..shards).map(|_| Vec::new()).collect()).collect();
    for shard in 0..shards {
        let slots = completed.first().map_or(0, |rank| rank[shard].len());
        for slot in 0..slots {
            let Some(ahead) = ahead(completed, shard, slot)? else { continue };
            let is_ahead = |rank: &usize| completed[*rank][shard][slot] == ahead;
            for rank in (0..completed.len()).filter(is_ahead) {
                restore[rank][shard].push(SlotIndex(slot as u16));
            }
        }
    }
    Ok(restore)
}

/// What those have completed who are one exchange ahead in a slot; `None` when all are equal.
fn ahead(completed: &[&[Vec<u32>]], shard: usize, slot: usize) -> Result<Option<u32>, Refusal> {
    let count = |rank: usize| completed[rank][shard][slot];
    // Relative to rank 0, since the counts wrap: "highest" has no meaning for the numbers themselves.
    let relative = |rank: usize| count(rank).wrapping_sub(count(0)) as i32;
    let (mut lowest, mut highest) = (0, 0);
    for rank in 0..completed.len() {
        if relative(rank) < relative(lowest) {
            lowest = rank;
        }
        if relative(rank) > relative(highest) {
            highest = rank;
        }
    }
    match relative(highest).wrapping_sub(relative(lowest)) {
        0 => Ok(None),
        1 => Ok(Some(count(highest))),
        _ => Err(Refusal::ResumeGap {
            ahead: Rank(highest as u16),
            behind: Rank(lowest as u16),
            shard: shard as u8,
            slot: slot as u16,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use proptest::prelude::*;

    fn assign(ranks: &[&[u32]]) -> Result<Vec<Vec<u16>>, Refusal> {
        let shaped: Vec<Vec<Vec<u32>>> = ranks.iter().map(|counts| vec![counts.to_vec()]).collect();
        let views: Vec<&[Vec<u32>]> = shaped.iter().map(Vec::as_slice).collect();
        let restore = restorers(&views)?;
        Ok(restore.iter().map(|rank| rank[0].iter().map(|slot| slot.0).collect()).collect())
    }

    #[test]
    fn equal_slots_need_no_restorer() {
        assert_eq!(assign(&[&[7, 8], &[7, 8]]), Ok(vec![vec![], vec![]]));
    }

    #[test]
    fn the_rank_that_is_ahead_restores() {
        assert_eq!(assign(&[&[7, 9], &[8, 8]]), Ok(vec![vec![1], vec![0]]));
    }

    #[test]
    fn a_count_that_wrapped_is_ahead_of_the_largest() {
        assert_eq!(assign(&[&[u32::MAX], &[0]]), Ok(vec![vec![], vec![0]]));
    }

    #[test]
    fn all_that_are_ahead_restore() {
        assert_eq!(assign(&[&[1, 1], &[1, 0], &[0, 0]]), Ok(vec![vec![0, 1], vec![0], vec![]]));
    }

    #[test]
    fn two_exchanges_apart_cannot_be() {
        let gap = |ahead, behind| Refusal::ResumeGap {
            ahead: Rank(ahead),
            behind: Rank(behind),
            shard: 0,
            slot: 0,
        };
        assert_eq!(assign(&[&[4], &[5], &[3]]), Err(gap(1, 2)));
        assert_eq!(
            assign(&[&[0], &[1 << 31]]),
            Err(gap(0, 1)),
            "half the number space apart, neither is ahead"
        );
    }

    proptest! {
        #[test]
        fn who_is_ahead_restores_and_nobody_else(
            base: u32, lead in prop::collection::vec(prop::collection::vec(0_u32..=1, 8), 1..8)
        ) {
            let counts: Vec<Vec<u32>> =
                lead.iter().map(|rank| rank.iter().map(|by| base.wrapping_add(*by)).collect()).collect();
            let views: Vec<&[u32]> = counts.iter().map(Vec::as_slice).collect();
            let restore = assign(&views).expect("no gap");
            for slot in 0..8_u16 {
                let ahead: Vec<bool> = lead.iter().map(|rank| rank[usize::from(slot)] == 1).collect();
                let differs = ahead.iter().any(|&a| a) && !ahead.iter().all(|&a| a);
                for (rank, ahead) in ahead.iter().enumerate() {
                    prop_assert_eq!(restore[rank].contains(&slot), differs && *ahead);
                }
            }
        }
    }
}
