//! The paths that packets to a peer take (DLCP §3.2.3): in which order, and which of them lose all.

use core::time::Duration;

use fanin_wire::PATHS_MAX;

use super::rate::Round;
use crate::machine::Instant;

const MOST: usize = PATHS_MAX as usize;
/// So many blocks tell whether a path carries them.
const TELLING: u32 = 8;
/// What became of earlier blocks counts as much as so many.
const REMEMBERED: u32 = 16;
/// How long a path that lost all is left out. If the last path that works dies too, the others are
/// tried again that soon.
const LEFT_OUT_FOR: Duration = Duration::from_secs(1);

/// Each path has its turn once a round, and a round begins with any of them. In one order for ever,
/// some packets follow each other again and again, such as the stops of two flows that are not
/// answered. Then one packet could always be on the same path, which may be dead.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turns {
    paths: u8,
    path: u8,
    /// How many of the round have had their turn.
    done: u8,
    random: u32,
}

impl Turns {
    pub(super) const fn new(paths: u8) -> Self {
        Self { paths, path: 0, done: 0, random: 0x9e37_79b9 }
    }

    /// The next path that is meant, and the turns after it. Each has its turn in the rest of this
    /// round and the next.
    pub(super) fn next(mut self, is_meant: impl Fn(u8) -> bool) -> Option<(u8, Self)> {
        (0..2 * u16::from(self.paths)).find_map(|_| {
            let path = self.path;
            self.pass();
            is_meant(path).then_some((path, self))
        })
    }

    const fn pass(&mut self) {
        if self.paths == 1 {
            return;
        }
        (self.path, self.done) = ((self.path + 1) % self.paths, self.done + 1);
        if self.done == self.paths {
            // Marsaglia's xorshift, which comes to every number but 0.
            self.random ^= self.random << 13;
            self.random ^= self.random >> 17;
            self.random ^= self.random << 5;
            (self.path, self.done) = ((self.random % self.paths as u32) as u8, 0);
        }
    }
}

/// Blocks that left by each path, and how many of them were missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::dlcp) struct ByPath {
    pub(super) sent: [u32; MOST],
    pub(super) missed: [u32; MOST],
}

impl ByPath {
    pub(super) const NONE: Self = Self { sent: [0; _], missed: [0; _] };

    pub(super) fn add(&mut self, other: &Self) {
        let counts = self.sent.iter_mut().chain(&mut self.missed);
        counts.zip(other.sent.iter().chain(&other.missed)).for_each(|(own, more)| *own += more);
    }

    /// Whether a path carries at least half of the blocks.
    fn carries(&self, path: usize) -> bool {
        self.sent[path] >= TELLING && 2 * self.missed[path] < self.sent[path]
    }

    /// Whether it loses more than three quarters of them.
    fn loses(&self, path: usize) -> bool {
        self.sent[path] >= TELLING && 4 * self.missed[path] > 3 * self.sent[path]
    }

    /// Lets later blocks count for more.
    const fn age(&mut self, path: usize) {
        while self.sent[path] > REMEMBERED {
            self.sent[path] /= 2;
            self.missed[path] /= 2;
        }
    }
}

/// The paths that lose what others carry. Routers choose a path by addresses and ports, and may not
/// notice that it is dead.
#[derive(Clone, Debug)]
pub(super) struct LeftOut {
    paths: usize,
    blocks: ByPath,
    /// By path: until when it is left out.
    until: [Instant; MOST],
}

impl LeftOut {
    pub(super) const fn new(paths: u8) -> Self {
        Self { paths: paths as usize, blocks: ByPath::NONE, until: [Instant(0); _] }
    }

    fn has(&self, now: Instant, path: u8) -> bool {
        self.until.get(usize::from(path)).is_some_and(|until| now < *until)
    }

    /// The next of the paths that are meant, and the turns after it. If all of them are left out,
    /// none is.
    pub(super) fn next(
        &self,
        now: Instant,
        turns: Turns,
        is_meant: impl Fn(u8) -> bool,
    ) -> Option<(u8, Turns)> {
        let others = turns.next(|path| is_meant(path) && !self.has(now, path));
        others.or_else(|| turns.next(is_meant))
    }

    /// Takes the fate of a round of a flow, and returns it without what paths lost that are left
    /// out: that says nothing about how full the way is.
    pub(super) fn judge(&mut self, now: Instant, mut round: Round) -> Round {
        if self.paths == 1 {
            return round;
        }
        self.blocks.add(&round.by_path);
        let some_carry = (0..self.paths).any(|path| self.blocks.carries(path));
        for path in 0..self.paths {
            if some_carry && self.blocks.loses(path) {
                self.until[path] = now + LEFT_OUT_FOR;
                (self.blocks.sent[path], self.blocks.missed[path]) = (0, 0);
            }
            self.blocks.age(path);
            if now < self.until[path] {
                round.forget(path);
            }
        }
        // The blocks that leave before a start is answered all take its path. A way that is full
        // lets some of them through.
        let used = round.by_path.sent.iter().filter(|sent| **sent > 0).count();
        if round.missed == round.packets && used < self.paths { Round::NONE } else { round }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    const SECOND: u64 = 1_000_000_000;

    fn order(mut turns: Turns, count: usize, is_meant: impl Fn(u8) -> bool) -> Vec<u8> {
        let mut next = |_| {
            let (path, after) = turns.next(&is_meant).expect("one is meant");
            turns = after;
            path
        };
        (0..count).map(&mut next).collect()
    }

    #[test]
    fn all_paths_have_as_many_turns_and_no_packet_of_a_pattern_has_always_the_same() {
        for paths in 1..=PATHS_MAX {
            let order = order(Turns::new(paths), 64 * usize::from(paths), |_| true);
            for path in 0..paths {
                assert_eq!(order.iter().filter(|other| **other == path).count(), 64);
                for pattern in 1..=16 {
                    let all = order.chunks_exact(pattern).all(|packets| packets[0] == path);
                    assert!(!all || paths == 1, "{paths} paths, {pattern} packets");
                }
            }
        }
    }

    #[test]
    fn paths_that_are_not_meant_have_no_turn() {
        let order = order(Turns::new(4), 300, |path| path != 2);
        for path in 0..4 {
            let turns = order.iter().filter(|other| **other == path).count();
            assert!(if path == 2 { turns == 0 } else { (90..=110).contains(&turns) }, "{path}: {turns}");
        }
        assert_eq!(Turns::new(4).next(|_| false).map(|(path, _)| path), None);
    }

    /// A round of (sent, missed) by path, which took a microsecond a block.
    fn round(by_path: &[(u32, u32)]) -> Round {
        let mut round = Round::NONE;
        for (path, (sent, missed)) in by_path.iter().enumerate() {
            (round.by_path.sent[path], round.by_path.missed[path]) = (*sent, *missed);
            round.packets += sent;
            round.missed += missed;
        }
        Round { time: Duration::from_micros(round.packets.into()), ..round }
    }

    /// Of three paths: those that are left out, and the packets, those that were missed and the
    /// microseconds that count.
    fn judged(left_out: &mut LeftOut, now: Instant, by_path: &[(u32, u32)]) -> (Vec<u8>, [u32; 3]) {
        let rest = left_out.judge(now, round(by_path));
        let out = (0..3).filter(|path| left_out.has(now, *path)).collect();
        (out, [rest.packets, rest.missed, rest.time.as_micros() as u32])
    }

    #[test]
    fn a_path_that_loses_what_others_carry_is_left_out_for_a_second_and_counts_for_nothing() {
        let mut paths = LeftOut::new(3);
        let dead = [(100, 1), (100, 100), (100, 2)];
        assert_eq!(judged(&mut paths, Instant(5), &dead), ([1].to_vec(), [200, 3, 200]));
        assert!(paths.has(Instant(4 + SECOND), 1) && !paths.has(Instant(5 + SECOND), 1));
        // It is tried again, and is as dead as before; the next time it carries all.
        assert_eq!(judged(&mut paths, Instant(2 * SECOND), &dead), ([1].to_vec(), [200, 3, 200]));
        let alive = [(100, 0); 3];
        assert_eq!(judged(&mut paths, Instant(4 * SECOND), &alive), (Vec::new(), [300, 0, 300]));
    }

    #[test]
    fn a_way_that_is_full_leaves_no_path_out() {
        let mut paths = LeftOut::new(3);
        let full = [(100, 97); 3];
        assert_eq!(judged(&mut paths, Instant(5), &full), (Vec::new(), [300, 291, 300]));
        // One that loses half is no dead one.
        let half = [(100, 1), (100, 50), (100, 2)];
        (0..9).for_each(|_| assert_eq!(judged(&mut paths, Instant(5), &half).0, []));
    }

    #[test]
    fn a_few_blocks_at_a_time_tell_as_much_in_the_end() {
        let mut paths = LeftOut::new(3);
        for round in 1..=8 {
            let (out, _) = judged(&mut paths, Instant(5), &[(1, 0), (1, 1)]);
            assert_eq!(out, if round < 8 { &[][..] } else { &[1] }, "round {round}");
        }
        // A path that worked for long and dies.
        (0..100).for_each(|_| assert_eq!(judged(&mut paths, Instant(3 * SECOND), &[(10, 0); 3]).0, []));
        let dies = [(10, 10), (10, 0), (10, 0)];
        let round = (1..=9).find(|_| judged(&mut paths, Instant(4 * SECOND), &dies).0 == [0]);
        assert!(round.is_some_and(|round| round <= 5), "{round:?}");
    }

    #[test]
    fn blocks_that_took_some_of_the_paths_and_were_all_lost_say_nothing_about_the_way() {
        let of = |by_path: &[_]| judged(&mut LeftOut::new(3), Instant(5), by_path);
        assert_eq!(of(&[(0, 0), (100, 100)]), (Vec::new(), [0; 3]));
        assert_eq!(of(&[(7, 7), (100, 100)]), (Vec::new(), [0; 3]));
        assert_eq!(of(&[(0, 0), (100, 97)]).1, [100, 97, 100]);
        assert_eq!(of(&[(9, 9), (100, 100), (9, 9)]).1, [118, 118, 118], "no path carries anything");
        // A job with one path has no other to tell.
        let mut one = LeftOut::new(1);
        assert_eq!(judged(&mut one, Instant(5), &[(100, 100)]), (Vec::new(), [100, 100, 100]));
    }
}
