//! An observer's notes of the contributions that a job's machines took in, block by block. They say
//! who must be in each sum, and how much each flow may lack. They rest on packets and verdicts, and
//! not on what machines say of themselves.

use std::collections::{BTreeMap, VecDeque};

use fanin_protocol::Loss;
use fanin_wire::{BlockHeader, FlowId, LossBound};

use crate::workload::{Inside, Violation};

/// A job, as far as its books go.
#[derive(Clone, Debug)]
pub(super) struct Terms {
    pub(super) job: String,
    pub(super) workers: usize,
    pub(super) is_ring: bool,
    pub(super) flow_blocks: u32,
    /// The loss bound of a flow to the server, or of a hop of a ring; nothing for integers.
    pub(super) push_bound: LossBound,
    /// The loss bound on the way back; above 0 sums are means.
    pub(super) pull_bound: LossBound,
    /// Whether machines wait for a NIC: a request that is of no use any more when that is free is a
    /// round, and nobody sees it.
    pub(super) shares_nic: bool,
}

/// The books of a job.
#[derive(Debug)]
pub(super) struct Ledger {
    terms: Terms,
    /// From the first tensor that some worker lacks.
    tensors: VecDeque<Entry>,
    first: u64,
    /// The flow, or part of a ring, that the tensor behind the last begins with.
    next: u32,
}

/// One tensor.
#[derive(Debug)]
struct Entry {
    /// Its first flow, or part.
    flow: u32,
    blocks: u32,
    /// By block: whose contributions went into its sum.
    inside: Vec<u64>,
    /// By rank: blocks whose means came there; empty where none may be missing.
    pulled: Vec<Vec<bool>>,
    /// For a ring: how many contributions were in a block when it came; 0 if it did not come. The
    /// key is the rank it came to and the step of a part's reduce-scatter. The index is the block
    /// in the segment that goes there.
    came: BTreeMap<(usize, u32), Vec<u16>>,
    /// By rank and flow of the tensor: the last round in which the rank asked its sender for
    /// missing blocks.
    asked: BTreeMap<(usize, u32), u16>,
    /// Ranks that have it.
    done: u64,
}

impl Ledger {
    pub(super) const fn new(terms: Terms) -> Self {
        Self { terms, tensors: VecDeque::new(), first: 0, next: 0 }
    }

    const fn ranks(&self) -> u32 {
        self.terms.workers as u32
    }

    const fn everyone(&self) -> u64 {
        u64::MAX >> (64 - self.terms.workers)
    }

    /// The next tensor has so many blocks.
    fn append(&mut self, blocks: u32) {
        let Terms { workers, flow_blocks, is_ring, pull_bound, .. } = self.terms;
        // In a ring each block has at least the contribution of the rank where its sum is complete.
        let last = |block: u32| if is_ring { 1 << self.completes_at(blocks, block) } else { 0 };
        let pulled = if pull_bound == LossBound::RELIABLE { 0 } else { workers };
        self.tensors.push_back(Entry {
            flow: self.next,
            blocks,
            inside: (0..blocks).map(last).collect(),
            pulled: vec![vec![false; blocks as usize]; pulled],
            came: BTreeMap::new(),
            asked: BTreeMap::new(),
            // A block that is whole in other parts needs no contribution.
            done: if blocks == 0 { self.everyone() } else { 0 },
        });
        self.next += blocks.div_ceil(flow_blocks);
    }

    /// The blocks of a part of a tensor that has so many.
    fn part(&self, blocks: u32, part: u32) -> std::ops::Range<u32> {
        let begin = part * self.terms.flow_blocks;
        begin..blocks.min(begin + self.terms.flow_blocks)
    }

    /// A segment of so many blocks of a ring.
    const fn segment(&self, blocks: u32, segment: u32) -> std::ops::Range<u32> {
        let (blocks, ranks) = (blocks as u64, self.ranks() as u64);
        (blocks * segment as u64 / ranks) as u32..(blocks * (segment as u64 + 1) / ranks) as u32
    }

    /// Flows of a part of a ring to each rank.
    const fn steps(&self) -> u32 {
        if self.terms.workers == 1 { 1 } else { 2 * (self.ranks() - 1) }
    }

    /// The segment that comes to a rank in a step of the reduce-scatter.
    const fn comes(&self, rank: u32, step: u32) -> u32 {
        (rank + 2 * self.ranks() - 1 - step) % self.ranks()
    }

    /// The rank where a block's sum is complete: that which is left of the rank whose segment it
    /// is.
    fn completes_at(&self, blocks: u32, block: u32) -> u32 {
        let part = self.part(blocks, block / self.terms.flow_blocks);
        let (at, of) = (block - part.start, part.end - part.start);
        let segment = (0..self.ranks()).find(|segment| self.segment(of, *segment).contains(&at)).unwrap_or(0);
        (segment + self.ranks() - 1) % self.ranks()
    }

    /// The tensor of a flow or part, and which of its it is. `blocks_of` knows all tensors.
    fn find(&mut self, flow: u32, blocks_of: impl Fn(u64) -> u32) -> Option<(usize, u32)> {
        while flow >= self.next {
            let tensor = self.first + self.tensors.len() as u64;
            self.append(blocks_of(tensor));
        }
        let at = self.tensors.partition_point(|entry| entry.flow <= flow).checked_sub(1)?;
        Some((at, flow - self.tensors[at].flow))
    }

    /// The server took a worker's block.
    pub(super) fn contributed(&mut self, rank: usize, header: &BlockHeader, blocks_of: impl Fn(u64) -> u32) {
        let Some((at, flow)) = self.find(header.flow.0, blocks_of) else { return };
        let block = flow * self.terms.flow_blocks + header.block;
        if let Some(inside) = self.tensors[at].inside.get_mut(block as usize) {
            *inside |= 1 << rank;
        }
    }

    /// A worker took a block from its server, or from its left neighbour.
    ///
    /// # Errors
    /// It says that others are in it than are.
    pub(super) fn came(
        &mut self,
        rank: usize,
        header: &BlockHeader,
        blocks_of: impl Fn(u64) -> u32,
    ) -> Result<(), Violation> {
        if self.terms.is_ring {
            return self.came_round(rank, header, blocks_of);
        }
        let Some((at, flow)) = self.find(header.flow.0, blocks_of) else { return Ok(()) };
        let block = flow * self.terms.flow_blocks + header.block;
        let pulled = self.tensors[at].pulled.get_mut(rank).and_then(|all| all.get_mut(block as usize));
        if let Some(pulled) = pulled {
            *pulled = true;
        }
        Ok(())
    }

    /// It carries the sender's contribution, and those of an unbroken run of ranks before the
    /// sender. Each of these took the block from the one before.
    fn came_round(
        &mut self,
        rank: usize,
        header: &BlockHeader,
        blocks_of: impl Fn(u64) -> u32,
    ) -> Result<(), Violation> {
        let (ranks, steps) = (self.ranks(), self.steps());
        let Some((at, part)) = self.find(header.flow.0 / steps, blocks_of) else { return Ok(()) };
        let step = header.flow.0 % steps;
        if step + 1 >= ranks {
            return Ok(()); // The all-gather changes no sum.
        }
        let blocks = self.part(self.tensors[at].blocks, part);
        let segment = self.segment(blocks.end - blocks.start, self.comes(rank as u32, step));
        let left = (rank + self.terms.workers - 1) % self.terms.workers;
        let entry = &mut self.tensors[at];
        let (flow, block) = (part * steps + step, header.block as usize);
        let before = step.checked_sub(1).and_then(|_| entry.came.get(&(left, flow - 1))?.get(block));
        let inside = before.copied().unwrap_or(0) + 1;
        if header.contributions != inside {
            let (job, tensor, said) = (self.terms.job.clone(), self.first + at as u64, header.contributions);
            return Err(Violation::Miscounted { job, rank, tensor, said, inside });
        }
        let all = entry.came.entry((rank, flow)).or_insert_with(|| vec![0; segment.len()]);
        if let Some(came) = all.get_mut(block) {
            *came = inside;
        }
        let block = blocks.start + segment.start + header.block;
        if step + 2 == ranks
            && let Some(all) = entry.inside.get_mut(block as usize)
        {
            let before = |back: u32| 1 << ((rank as u32 + ranks - back) % ranks);
            *all = (0..=u32::from(inside)).map(before).fold(0, |all: u64, bit| all | bit);
        }
        Ok(())
    }

    /// A rank sends a request for what it lacks of a flow that comes to it. A request that is lost
    /// on the way is a round nevertheless.
    pub(super) fn asked(&mut self, rank: usize, flow: FlowId, round: u16, blocks_of: impl Fn(u64) -> u32) {
        let steps = if self.terms.is_ring { self.steps() } else { 1 };
        if let Some((at, of_tensor)) = self.find(flow.0 / steps, blocks_of) {
            let last = self.tensors[at].asked.entry((rank, of_tensor * steps + flow.0 % steps)).or_default();
            *last = round.max(*last);
        }
    }

    /// A rank has a tensor's sum, and was told that so much is lost: who must be in it, or the rule
    /// that is broken already.
    pub(super) fn completed(
        &mut self,
        (rank, tensor): (usize, u64),
        told: Option<Loss>,
        blocks_of: impl Fn(u64) -> u32,
    ) -> Result<Inside, Violation> {
        while tensor >= self.first + self.tensors.len() as u64 {
            let next = self.first + self.tensors.len() as u64;
            self.append(blocks_of(next));
        }
        let at = (tensor.saturating_sub(self.first)) as usize;
        let entry = &self.tensors[at];
        if let Some((rank, lost, allowed)) = self.too_much(entry, rank) {
            let job = self.terms.job.clone();
            return Err(Violation::LostMore { job, rank, tensor, lost, allowed });
        }
        let is_mean = self.terms.pull_bound != LossBound::RELIABLE;
        let packets: Vec<u64> = (0..entry.blocks as usize)
            .map(|block| match entry.pulled.get(rank) {
                // Its own gradient stays.
                Some(pulled) if !pulled[block] => 1 << rank,
                _ => entry.inside[block],
            })
            .collect();
        let kept = entry.pulled.get(rank).map_or(0, |all| all.iter().filter(|pulled| !**pulled).count());
        let missing = |block: usize| match entry.pulled.get(rank) {
            Some(pulled) if !pulled[block] => 0,
            _ => u64::from(self.ranks() - entry.inside[block].count_ones()),
        };
        let lost = Loss {
            contributions: u64::from(entry.blocks) * u64::from(self.ranks()),
            lost: (0..entry.blocks as usize).map(missing).sum(),
            unsummed: packets.iter().filter(|packet| **packet == 0).count() as u64,
            kept: kept as u64,
            rounds: entry
                .asked
                .iter()
                .filter(|((of, _), _)| *of == rank)
                .map(|(_, round)| u32::from(*round))
                .sum(),
        };
        let unseen = |told: Loss| Loss { rounds: told.rounds.min(lost.rounds), ..told };
        let told = if self.terms.shares_nic { told.map(unseen) } else { told };
        if told != Some(lost) {
            return Err(Violation::LossMistold { job: self.terms.job.clone(), rank, tensor });
        }
        self.tensors[at].done |= 1 << rank;
        let everyone = self.everyone();
        while self.tensors.front().is_some_and(|entry| entry.done == everyone) {
            self.tensors.pop_front();
            self.first += 1;
        }
        Ok(Inside { packets, is_mean, may_differ: is_mean })
    }

    /// The rank whose flow lacks more than it may: how much, and how much it may.
    fn too_much(&self, entry: &Entry, rank: usize) -> Option<(usize, u32, u32)> {
        let Terms { workers, flow_blocks, push_bound, pull_bound, is_ring, .. } = self.terms;
        for part in 0..entry.blocks.div_ceil(flow_blocks) {
            let range = self.part(entry.blocks, part);
            let of_part = range.end - range.start;
            let blocks = range.start as usize..range.end as usize;
            if let Some(pulled) = entry.pulled.get(rank) {
                let kept = pulled[blocks.clone()].iter().filter(|pulled| !**pulled).count() as u32;
                let allowed = pull_bound.of_blocks(of_part);
                if kept > allowed {
                    return Some((rank, kept, allowed));
                }
            }
            if is_ring {
                let (ranks, steps) = (self.ranks(), self.steps());
                for (rank, step) in (0..ranks).flat_map(|rank| (0..ranks - 1).map(move |step| (rank, step))) {
                    let sent = self.segment(of_part, self.comes(rank, step)).len() as u32;
                    let came = entry.came.get(&(rank as usize, part * steps + step));
                    let lost = came.map_or(sent, |all| all.iter().filter(|came| **came == 0).count() as u32);
                    let allowed = push_bound.of_blocks(sent);
                    if lost > allowed {
                        return Some((rank as usize, lost, allowed));
                    }
                }
                continue;
            }
            let allowed = push_bound.of_blocks(of_part);
            for rank in 0..workers {
                let inside = &entry.inside[blocks.clone()];
                let lost = inside.iter().filter(|inside| **inside >> rank & 1 == 0).count() as u32;
                if lost > allowed {
                    return Some((rank, lost, allowed));
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use fanin_wire::Tag;

    use super::*;

    /// Two workers whose tensors are two flows, of ten blocks and of four.
    fn ledger(is_ring: bool, pull: f64) -> Ledger {
        let bound = |share| LossBound::new(share).expect("below one");
        Ledger::new(Terms {
            job: "job".into(),
            workers: 2,
            is_ring,
            flow_blocks: 10,
            push_bound: bound(0.2),
            pull_bound: bound(pull),
            shares_nic: false,
        })
    }

    fn blocks_of(_: u64) -> u32 {
        14
    }

    #[test]
    fn of_tensors_that_are_whole_in_other_parts_nobody_says_anything() {
        let blocks_of = |tensor: u64| if tensor % 3 == 1 { 14 } else { 0 };
        let mut ledger = ledger(false, 0.0);
        for tensor in [1, 4] {
            for (flow, block) in (0..10).map(|block| (0, block)).chain((0..4).map(|block| (1, block))) {
                let flow = flow + 2 * (tensor / 3);
                (0..2).for_each(|rank| ledger.contributed(rank, &header(flow as u32, block), blocks_of));
            }
            for rank in 0..2 {
                let told = Loss { contributions: 28, ..Loss::default() };
                let inside = ledger.completed((rank, tensor), Some(told), blocks_of).expect("all is well");
                assert_eq!(inside.packets, [3; 14]);
            }
        }
        assert!(ledger.tensors.is_empty(), "nobody waits for {:?}", ledger.tensors);
    }

    #[test]
    fn a_request_that_a_nic_held_back_may_be_told_and_not_one_fewer_than_were_seen() {
        let told = |rounds| Some(Loss { rounds, ..told(1).expect("it is one") });
        for (rounds, is_right) in [(7, false), (8, true), (9, true)] {
            let mut ledger = without(&[(2, 5)]);
            ledger.terms.shares_nic = true;
            assert_eq!(
                ledger.completed((0, 1), told(rounds), super::tests::blocks_of).is_ok(),
                is_right,
                "{rounds}"
            );
        }
    }

    fn header(flow: u32, block: u32) -> BlockHeader {
        let (tag, round) = (Tag::SIGNAL, 0);
        BlockHeader { flow: FlowId(flow), block, round, tag, contributions: 1, last: false, restored: false }
    }

    /// All blocks of the second tensor from both workers, but these of the second worker's.
    fn without(missing: &[(u32, u32)]) -> Ledger {
        let mut ledger = ledger(false, 0.0);
        for (flow, block) in (0..10).map(|block| (2, block)).chain((0..4).map(|block| (3, block))) {
            ledger.contributed(0, &header(flow, block), blocks_of);
            if !missing.contains(&(flow, block)) {
                ledger.contributed(1, &header(flow, block), blocks_of);
            }
        }
        // For each worker, for the sums: seven rounds of one flow and one of another, whose request
        // was lost once.
        for rank in 0..2 {
            (1..=7).for_each(|round| ledger.asked(rank, FlowId(2), round, blocks_of));
            (0..2).for_each(|_| ledger.asked(rank, FlowId(3), 1, blocks_of));
        }
        ledger
    }

    const fn told(lost: u64) -> Option<Loss> {
        Some(Loss { contributions: 28, lost, unsummed: 0, kept: 0, rounds: 8 })
    }

    #[test]
    fn who_is_in_is_whose_blocks_were_taken() {
        let inside = without(&[(2, 3), (2, 9)]).completed((0, 1), told(2), blocks_of).expect("all is well");
        let mut packets = vec![3; 14];
        (packets[3], packets[9]) = (1, 1);
        assert_eq!(inside, Inside { packets, is_mean: false, may_differ: false });
    }

    #[test]
    fn what_is_lost_beyond_the_bound_or_told_wrong_is_seen() {
        let more = |missing: &[(u32, u32)], lost, allowed| {
            let found = without(missing).completed((0, 1), told(missing.len() as u64), blocks_of);
            assert_eq!(
                found,
                Err(Violation::LostMore { job: "job".into(), rank: 1, tensor: 1, lost, allowed }),
                "{missing:?}"
            );
        };
        more(&[(2, 0), (2, 1), (2, 2)], 3, 2);
        // The bound holds for each flow: of four blocks none may be missing.
        more(&[(3, 1)], 1, 0);
        let right = told(1).expect("it is one");
        let others = [Loss { kept: 1, ..right }, Loss { rounds: 7, ..right }, Loss { rounds: 9, ..right }];
        for wrong in others.map(Some).into_iter().chain([told(0), told(2), None]) {
            let found = without(&[(2, 5)]).completed((1, 1), wrong, blocks_of);
            assert_eq!(
                found,
                Err(Violation::LossMistold { job: "job".into(), rank: 1, tensor: 1 }),
                "{wrong:?}"
            );
        }
        assert!(without(&[(2, 5)]).completed((1, 1), told(1), blocks_of).is_ok());
    }

    #[test]
    fn a_mean_that_did_not_come_leaves_the_own_gradient_as_far_as_the_bound_goes() {
        let pulled = |missing: &[u32]| {
            let mut ledger = ledger(false, 0.1);
            for (flow, block) in (0..10).map(|block| (0, block)).chain((0..4).map(|block| (1, block))) {
                (0..2).for_each(|rank| ledger.contributed(rank, &header(flow, block), blocks_of));
                if flow == 1 || !missing.contains(&block) {
                    ledger.came(1, &header(flow, block), blocks_of).expect("the server is right");
                }
            }
            let kept = missing.len() as u64;
            let told = Loss { contributions: 28, lost: 0, unsummed: 0, kept, rounds: 0 };
            ledger.completed((1, 0), Some(told), blocks_of)
        };
        let inside = pulled(&[4]).expect("one of ten may be missing");
        assert_eq!((inside.packets[4], inside.packets[5], inside.is_mean), (2, 3, true));
        assert!(matches!(pulled(&[4, 5]), Err(Violation::LostMore { rank: 1, lost: 2, allowed: 1, .. })));
    }

    #[test]
    fn a_block_that_is_lost_in_a_ring_is_of_the_rank_where_it_began_anew() {
        let round = |missing: &[u32]| {
            let mut ledger = ledger(true, 0.0);
            // Five of the ten blocks go from rank 0 to 1 and five the other way; two of the four
            // do.
            for (flow, blocks) in [(0, 5), (2, 2)] {
                for block in 0..blocks {
                    ledger.came(1, &header(flow, block), blocks_of).expect("of its left neighbour alone");
                    if flow == 2 || !missing.contains(&block) {
                        ledger.came(0, &header(flow, block), blocks_of).expect("of its left neighbour alone");
                    }
                }
            }
            // The first part's reduce-scatter, and the second's all-gather.
            ledger.asked(1, FlowId(0), 2, blocks_of);
            ledger.asked(1, FlowId(3), 1, blocks_of);
            ledger.asked(0, FlowId(1), 1, blocks_of);
            let told = Loss { contributions: 28, lost: missing.len() as u64, rounds: 3, ..Loss::default() };
            ledger.completed((1, 0), Some(told), blocks_of)
        };
        let inside = round(&[2]).expect("one of five may be missing");
        let alone: Vec<usize> = (0..14).filter(|block| inside.packets[*block] != 3).collect();
        assert_eq!(alone, [7], "the third of the segment that ends at rank 0");
        assert_eq!(inside.packets[7], 1);
        assert!(matches!(round(&[2, 3]), Err(Violation::LostMore { rank: 0, lost: 2, allowed: 1, .. })));
    }

    const RANKS: usize = 4;
    /// Ten a segment.
    const OF_FOUR: u32 = 40;

    /// The contributions that a rank in a ring has added for each block, by rank and block: a bit a
    /// rank.
    type Held = [[u64; OF_FOUR as usize]; RANKS];

    /// Sends a tensor round a ring of four. Its packets are lost as `is_lost` says of rank, step
    /// and block, and say of what their sender has what `says` does. Returns who is in each block,
    /// as the ring had it.
    fn round(
        ledger: &mut Ledger,
        is_lost: impl Fn(usize, u32, u32) -> bool,
        says: impl Fn(u64) -> u32,
    ) -> Result<Vec<u64>, Violation> {
        let mut held: Held = std::array::from_fn(|rank| [1 << rank; OF_FOUR as usize]);
        for step in 0..3 {
            let before = held;
            for (rank, here) in held.iter_mut().enumerate() {
                let left = (rank + 3) % RANKS;
                // Its own segment goes on a step after the other.
                let segment = (left + RANKS - step as usize) % RANKS;
                for block in (0..10).filter(|block| !is_lost(rank, step, *block)) {
                    let at = 10 * segment + block as usize;
                    let contributions = says(before[left][at]) as u16;
                    ledger.came(rank, &BlockHeader { contributions, ..header(step, block) }, |_| OF_FOUR)?;
                    here[at] |= before[left][at];
                }
            }
        }
        Ok((0..OF_FOUR as usize).map(|block| held[(block / 10 + 3) % RANKS][block]).collect())
    }

    fn ring_of_four() -> Ledger {
        let mut ledger = ledger(true, 0.0);
        (ledger.terms.workers, ledger.terms.flow_blocks) = (RANKS, OF_FOUR);
        ledger
    }

    #[test]
    fn who_is_in_a_rings_sum_is_the_unbroken_row_of_hops_at_which_it_came() {
        // Two of ten at each hop, others at each.
        let is_lost = |rank: usize, step: u32, block: u32| (3 * rank as u32 + step + 7 * block) % 10 < 2;
        let mut ledger = ring_of_four();
        let held = round(&mut ledger, is_lost, u64::count_ones).expect("it says what is so");
        let lost = held.iter().map(|inside| 4 - u64::from(inside.count_ones())).sum();
        let told = Loss { contributions: 160, lost, ..Loss::default() };
        assert!(lost > 24 && held.contains(&15), "{held:?}: more than the packets themselves");
        let inside = ledger.completed((2, 0), Some(told), |_| OF_FOUR).expect("all is well");
        assert_eq!(inside.packets, held);
    }

    #[test]
    fn a_ring_that_begins_anew_with_what_came_is_seen() {
        // Every packet comes, and each rank passes on its own contribution alone: each sum is of
        // two.
        let found = round(&mut ring_of_four(), |_, _, _| false, |_| 1);
        let wrong = Violation::Miscounted { job: "job".into(), rank: 0, tensor: 0, said: 1, inside: 2 };
        assert_eq!(found, Err(wrong));
        // The same, and it says that all are in: its sums are not those.
        let mut ledger = ring_of_four();
        round(&mut ledger, |_, _, _| false, u64::count_ones).expect("it says what should be so");
        let told = |lost| Some(Loss { contributions: 160, lost, ..Loss::default() });
        let mistold = Violation::LossMistold { job: "job".into(), rank: 1, tensor: 0 };
        assert_eq!(ledger.completed((1, 0), told(80), |_| OF_FOUR), Err(mistold));
        let whole = Inside { packets: vec![15; 40], is_mean: false, may_differ: false };
        assert_eq!(ledger.completed((1, 0), told(0), |_| OF_FOUR), Ok(whole));
    }
}
