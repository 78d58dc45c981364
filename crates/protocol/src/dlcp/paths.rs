//! The paths that packets to a peer take (DLCP §3.2.3): in which order, and which of them are dead.

use core::time::Duration;

use fanin_wire::PATHS_MAX;

use super::rate::Round;
use crate::machine::Instant;

const MOST: usize = PATHS_MAX as usize;
/// In so many rounds, one after the other, a path has to lose all of its blocks. A queue that is full
/// loses whole trains, too, but not always those of one path.
const ROUNDS: u32 = 2;
/// So many blocks it has to lose, and others have to carry as many since.
const TELLING: u32 = 8;
/// How long a path is left out the first time, and at most. The time doubles.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(16);
/// If nothing has answered for so long, the last path that worked may be dead: no path is left out.
const UNANSWERED: Duration = Duration::from_millis(250);

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

/// Blocks of a round that left by each path, and how many of them were missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::dlcp) struct ByPath {
    pub(super) sent: [u32; MOST],
    pub(super) missed: [u32; MOST],
}

impl ByPath {
    pub(super) const NONE: Self = Self { sent: [0; _], missed: [0; _] };

    fn carried(&self) -> u32 {
        self.sent.iter().zip(&self.missed).map(|(sent, missed)| sent.saturating_sub(*missed)).sum()
    }
}

#[derive(Clone, Copy, Debug)]
struct Fate {
    /// The last rounds in which it lost all of its blocks, one after the other, and these blocks.
    rounds: u32,
    lost: u32,
    /// Blocks that all paths had carried before the first of these rounds.
    before: u64,
    /// If it is dead: when it is tried again. And how long after that the next time.
    until: Option<Instant>,
    pause: Duration,
}

impl Fate {
    const ALIVE: Self = Self { rounds: 0, lost: 0, before: 0, until: None, pause: PAUSE };
}

/// The paths to a peer. Dead ones are left out: routers choose a path by addresses and ports, and may
/// not notice that it loses all.
#[derive(Clone, Debug)]
pub(super) struct Paths {
    paths: usize,
    /// The turns of trains of blocks, and of signals.
    pub(super) blocks: Turns,
    pub(super) signals: Turns,
    fates: [Fate; MOST],
    /// Blocks that all paths have carried.
    carried: u64,
    /// When the first packet left after the last one came.
    asked: Option<Instant>,
}

impl Paths {
    pub(super) const fn new(paths: u8) -> Self {
        let (turns, fates) = (Turns::new(paths), [Fate::ALIVE; _]);
        Self { paths: paths as usize, blocks: turns, signals: turns, fates, carried: 0, asked: None }
    }

    /// A train of blocks leaves, and these are the turns after it.
    pub(super) fn send_blocks(&mut self, now: Instant, after: Turns) {
        self.blocks = after;
        self.asked.get_or_insert(now);
    }

    /// A signal leaves, and these are the turns after it.
    pub(super) fn send_signal(&mut self, now: Instant, after: Turns) {
        self.signals = after;
        self.asked.get_or_insert(now);
    }

    /// A packet of the peer came.
    pub(super) const fn hears(&mut self) {
        self.asked = None;
    }

    /// A path leads elsewhere now.
    pub(super) fn readmit(&mut self, path: u8) {
        if let Some(fate) = self.fates.get_mut(usize::from(path)) {
            *fate = Fate::ALIVE;
        }
    }

    /// The next of the paths that are meant, and the turns after it. If all of them are left out,
    /// none is.
    pub(super) fn next(
        &self,
        now: Instant,
        turns: Turns,
        is_meant: impl Fn(u8) -> bool,
    ) -> Option<(u8, Turns)> {
        let tried = self.tried(now);
        let is_alive = |path: u8| {
            let path = usize::from(path);
            Some(path) == tried || self.fates.get(path).is_some_and(|fate| fate.until.is_none())
        };
        if self.asked.is_some_and(|asked| now.since(asked) >= UNANSWERED) {
            return turns.next(is_meant);
        }
        turns.next(|path| is_meant(path) && is_alive(path)).or_else(|| turns.next(is_meant))
    }

    /// The dead path that is tried again: one at a time, as a flow that loses more than half is
    /// halved.
    fn tried(&self, now: Instant) -> Option<usize> {
        self.fates.iter().position(|fate| fate.until.is_some_and(|until| until <= now))
    }

    /// Takes the fate of a round of a flow. Returns it without its losses on dead paths, as they do not
    /// show that the way is full.
    pub(super) fn judge(&mut self, now: Instant, mut round: Round) -> Round {
        if self.paths == 1 {
            return round;
        }
        let ByPath { sent, missed } = round.by_path;
        let before = self.carried;
        self.carried += u64::from(round.by_path.carried());
        for path in (0..self.paths).filter(|path| sent[*path] > 0) {
            let fate = &mut self.fates[path];
            if missed[path] < sent[path] {
                *fate = Fate::ALIVE;
                continue;
            }
            if fate.rounds == 0 {
                fate.before = before;
            }
            fate.rounds = fate.rounds.saturating_add(1);
            fate.lost = fate.lost.saturating_add(sent[path]);
            let others = self.carried - fate.before;
            if fate.rounds >= ROUNDS && fate.lost >= TELLING && others >= u64::from(TELLING) {
                fate.until = Some(now + fate.pause);
                fate.pause = (2 * fate.pause).min(PAUSE_MAX);
            }
        }
        if self.fates[..self.paths].iter().all(|fate| fate.until.is_some()) {
            self.fates = [Fate::ALIVE; _];
        }
        for path in (0..self.paths).filter(|path| self.fates[*path].until.is_some()) {
            round.forget(path);
        }
        round
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

    /// A round of (sent, missed) by path.
    fn round(by_path: &[(u32, u32)]) -> Round {
        let mut round = Round::NONE;
        for (path, (sent, missed)) in by_path.iter().enumerate() {
            (round.by_path.sent[path], round.by_path.missed[path]) = (*sent, *missed);
            round.packets += sent;
            round.missed += missed;
        }
        round
    }

    /// Whether a path of three is left out.
    fn has(of_three: &Paths, now: Instant, path: u8) -> bool {
        let mut turns = Turns::new(3);
        !(0..30).any(|_| {
            let (next, after) = of_three.next(now, turns, |_| true).expect("each is meant");
            turns = after;
            next == path
        })
    }

    /// The paths of three that are left out, and how many packets and losses count.
    fn judged(of_three: &mut Paths, at: u64, by_path: &[(u32, u32)]) -> (Vec<u8>, [u32; 2]) {
        let rest = of_three.judge(Instant(at), round(by_path));
        let out = (0..3).filter(|path| has(of_three, Instant(at), *path)).collect();
        (out, [rest.packets - rest.left_out, rest.missed])
    }

    const DEAD: [(u32, u32); 3] = [(100, 1), (100, 100), (100, 2)];

    #[test]
    fn a_path_that_loses_all_twice_is_left_out_and_longer_each_time() {
        let mut paths = Paths::new(3);
        assert_eq!(judged(&mut paths, 5, &DEAD), (Vec::new(), [300, 103]));
        assert_eq!(judged(&mut paths, 5, &DEAD), ([1].to_vec(), [200, 3]));
        assert!(has(&paths, Instant(4 + SECOND), 1) && !has(&paths, Instant(5 + SECOND), 1));
        // It is tried again.
        let mut at = 10 * SECOND;
        for pause in [2, 4, 8, 16, 16] {
            assert_eq!(judged(&mut paths, at, &DEAD), ([1].to_vec(), [200, 3]));
            at += pause * SECOND;
            assert!(has(&paths, Instant(at - 1), 1) && !has(&paths, Instant(at), 1), "{pause} s");
        }
        let alive = [(100, 0), (100, 99), (100, 0)];
        assert_eq!(judged(&mut paths, at, &alive), (Vec::new(), [300, 99]));
        assert_eq!(judged(&mut paths, at, &DEAD).0, [], "as if it had never been dead");
    }

    #[test]
    fn dead_paths_are_tried_again_one_by_one() {
        let mut paths = Paths::new(3);
        let dead = [(100, 100), (100, 100), (100, 0)];
        (0..2).for_each(|_| drop(judged(&mut paths, 0, &dead)));
        assert_eq!(judged(&mut paths, SECOND, &[]).0, [1], "the first is tried");
        assert_eq!(judged(&mut paths, SECOND, &[(9, 9), (0, 0), (9, 0)]).0, [0], "and then the second");
        assert_eq!(judged(&mut paths, SECOND, &[(0, 0), (9, 0), (9, 0)]).0, [0]);
    }

    #[test]
    fn a_late_round_that_a_path_carried_brings_it_back() {
        let mut paths = Paths::new(3);
        (0..2).for_each(|_| drop(judged(&mut paths, 5, &DEAD)));
        assert_eq!(judged(&mut paths, 6, &[(0, 0), (9, 8)]).0, []);
    }

    #[test]
    fn a_way_that_is_full_or_broken_leaves_no_path_out() {
        let mut paths = Paths::new(3);
        for lost in [97, 100, 50, 100] {
            (0..9).for_each(|_| assert_eq!(judged(&mut paths, 5, &[(100, lost); 3]).0, []));
        }
        // Whole trains are lost, now of one path and now of another.
        for carries in [0, 1, 2, 0, 1, 2] {
            let mut trains = [(45, 45); 3];
            trains[carries].1 = 0;
            let (out, _) = judged(&mut paths, 5, &trains);
            assert!(!out.contains(&(carries as u8)), "{out:?}, {carries} carries");
        }
    }

    #[test]
    fn a_few_blocks_at_a_time_tell_as_much_in_the_end() {
        let mut paths = Paths::new(3);
        for round in 1..=8 {
            let (out, _) = judged(&mut paths, 5, &[(1, 0), (1, 1)]);
            assert_eq!(out, if round < 8 { &[][..] } else { &[1] }, "round {round}");
        }
    }

    #[test]
    fn what_others_carried_before_says_nothing_about_a_path() {
        let mut paths = Paths::new(3);
        judged(&mut paths, 5, &[(100, 0); 3]);
        // All is lost for a while, of which each path gets its part.
        for path in [0, 1, 2, 0, 1, 2] {
            let mut trains = [(0, 0); 3];
            trains[path] = (45, 45);
            assert_eq!(judged(&mut paths, 6, &trains).0, []);
        }
    }

    #[test]
    fn none_is_left_out_while_nothing_answers_or_if_all_would_be() {
        let mut paths = Paths::new(3);
        (0..2).for_each(|_| drop(judged(&mut paths, 5, &DEAD)));
        let at = |ms: u64| Instant(5 + ms * 1_000_000);
        paths.send_signal(at(0), Turns::new(3));
        paths.send_blocks(at(200), Turns::new(3));
        assert!(has(&paths, at(249), 1) && !has(&paths, at(250), 1));
        paths.hears();
        paths.send_blocks(at(260), Turns::new(3));
        assert!(has(&paths, at(270), 1));
        let rest = [(9, 9), (0, 0), (9, 0)];
        (0..2).for_each(|_| drop(judged(&mut paths, 6, &rest)));
        assert!(has(&paths, Instant(6), 0) && !has(&paths, Instant(6), 2));
        paths.carried += 9;
        assert_eq!(judged(&mut paths, 6, &[(0, 0), (0, 0), (9, 9)]).0, [0, 1]);
        paths.carried += 9;
        assert_eq!(judged(&mut paths, 6, &[(0, 0), (0, 0), (9, 9)]).0, []);
    }

    #[test]
    fn a_job_with_one_path_has_no_other() {
        let mut one = Paths::new(1);
        (0..3).for_each(|_| assert_eq!(judged(&mut one, 5, &[(100, 100)]), (Vec::new(), [100, 100])));
    }
}
