//! The addresses of one worker, one for each of its source ports, over which its packets come and
//! go in turn (DLCP §3.2.3).
//!
//! Only what is new teaches an address: a packet that was caught on its way and comes again, from
//! wherever, changes nothing. If nothing new has come for a while, there are two cases. The worker
//! waits for others, and is where it was; or its ports have all changed (a NAT), and it can only
//! say again what it said before. So every second train goes to the address of its last signal
//! then, and the others to those that were known.
//!
//! The way to a port may carry packets although the way from it does not. So a port counts as dead
//! by what is lost on the way to it, and not by what does not come from it.

use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;

use crate::dlcp::paths::{Paths, Turns};
use crate::dlcp::rate::Round;
use crate::machine::Instant;

/// How long the addresses from which something new came are used alone.
const KNOWN_FOR: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Addresses<A> {
    /// By path: from where something new came last.
    known: Vec<Option<A>>,
    /// When something new came, by any of them.
    heard: Option<Instant>,
    /// From where the last signal came, new or not.
    last: Option<A>,
    paths: Paths,
    /// Whether what goes to a worker of which nothing new came for long goes to the address of its
    /// last signal next.
    to_last: bool,
    /// The address for the packet that was written last.
    to: Option<A>,
}

/// The next packet's address and path.
struct Aim<A> {
    to: A,
    /// `None` for the address of the last signal.
    path: Option<u8>,
    turns: Turns,
}

impl<A: Copy + PartialEq> Addresses<A> {
    pub(super) fn new(paths: u8) -> Self {
        Self {
            known: vec![None; paths.into()],
            heard: None,
            last: None,
            paths: Paths::new(paths),
            to_last: false,
            to: None,
        }
    }

    /// Whether the worker was heard of.
    pub(super) const fn is_known(&self) -> bool {
        self.last.is_some()
    }

    /// A packet came, new or not.
    pub(super) const fn hears(&mut self) {
        self.paths.hears();
    }

    /// A signal came from here.
    pub(super) const fn heard(&mut self, from: A) {
        self.last = Some(from);
    }

    /// Something new came by a path, from here.
    pub(super) fn learn(&mut self, now: Instant, path: u8, from: A) {
        if let Some(known) = self.known.get_mut(usize::from(path)) {
            if *known != Some(from) {
                self.paths.readmit(path);
            }
            *known = Some(from);
            self.heard = Some(now);
        }
    }

    /// Takes the fate of a round of blocks, and returns what it says about the way.
    pub(super) fn judge(&mut self, now: Instant, round: Round) -> Round {
        self.paths.judge(now, round)
    }

    /// The path of the next train of blocks, if it goes by one.
    pub(super) fn path(&self, now: Instant) -> Option<u8> {
        if self.known.len() == 1 {
            return Some(0);
        }
        self.aim(self.paths.blocks, now).and_then(|aim| aim.path)
    }

    /// A train of blocks was written.
    pub(super) fn send_blocks(&mut self, now: Instant) {
        if let Some(turns) = self.send(self.paths.blocks, now) {
            self.paths.send_blocks(now, turns);
        }
    }

    /// A signal was written.
    pub(super) fn send_signal(&mut self, now: Instant) {
        if let Some(turns) = self.send(self.paths.signals, now) {
            self.paths.send_signal(now, turns);
        }
    }

    /// Returns the turns after what goes to the next address, if one is known.
    fn send(&mut self, turns: Turns, now: Instant) -> Option<Turns> {
        let aim = self.aim(turns, now);
        if !self.is_heard(now) {
            self.to_last = !self.to_last;
        }
        self.to = aim.as_ref().map(|aim| aim.to);
        aim.map(|aim| aim.turns)
    }

    /// Whether something new came not long ago.
    fn is_heard(&self, now: Instant) -> bool {
        self.heard.is_some_and(|heard| now.since(heard) < KNOWN_FOR)
    }

    fn aim(&self, turns: Turns, now: Instant) -> Option<Aim<A>> {
        let to_last = || Some(Aim { to: self.last?, path: None, turns });
        if self.to_last && !self.is_heard(now) {
            return to_last();
        }
        let to = |path: u8| self.known[usize::from(path)];
        let known = self.paths.next(now, turns, |path| to(path).is_some());
        let known = known.and_then(|(path, turns)| Some(Aim { to: to(path)?, path: Some(path), turns }));
        known.or_else(to_last)
    }

    /// Where that goes.
    pub(super) const fn to(&self) -> Option<&A> {
        self.to.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// The addresses of so many trains.
    fn trains(addresses: &mut Addresses<u16>, now: Instant, count: usize) -> Vec<u16> {
        let train = |_| {
            addresses.send_blocks(now);
            *addresses.to().expect("it was heard of")
        };
        (0..count).map(train).collect()
    }

    #[test]
    fn packets_go_in_turn_to_where_something_new_came_from() {
        let mut addresses = Addresses::new(4);
        addresses.heard(70);
        assert_eq!(trains(&mut addresses, Instant(0), 3), [70, 70, 70], "its last signal's");
        for (path, port) in [(0, 80), (1, 81), (3, 83)] {
            addresses.learn(Instant(0), path, port);
        }
        addresses.learn(Instant(0), 4, 84); // no path of the job
        let mut counts = [80, 81, 83].map(|port| (port, 0));
        for port in trains(&mut addresses, Instant(0), 30) {
            counts.iter_mut().find(|(known, _)| *known == port).expect("it is known").1 += 1;
        }
        assert_eq!(counts, [(80, 10), (81, 10), (83, 10)]);
        let next = addresses.path(Instant(0));
        addresses.send_signal(Instant(0));
        assert_eq!(addresses.path(Instant(0)), next, "signals have turns of their own");
    }

    #[test]
    fn what_comes_again_diverts_nothing_and_what_a_nat_changed_is_found() {
        let mut addresses = Addresses::new(2);
        addresses.learn(Instant(0), 0, 80);
        addresses.learn(Instant(0), 1, 81);
        // A signal that is not new, from another port.
        addresses.heard(99);
        let both = |mut ports: Vec<u16>| {
            ports.sort_unstable();
            ports.dedup();
            ports
        };
        assert_eq!(both(trains(&mut addresses, Instant(500 * MS), 4)), [80, 81]);
        // A port was changed, and the next new packet says so.
        addresses.learn(Instant(600 * MS), 1, 91);
        assert_eq!(both(trains(&mut addresses, Instant(700 * MS), 4)), [80, 91]);
        // From the other nothing new has come for long: the way there may carry packets all the same.
        assert_eq!(both(trains(&mut addresses, Instant(1500 * MS), 4)), [80, 91]);
        let mut lost = Round::NONE;
        (lost.by_path.sent, lost.by_path.missed) = ([9; _], [0; _]);
        lost.by_path.missed[0] = 9;
        addresses.hears();
        (0..2).for_each(|_| _ = addresses.judge(Instant(1500 * MS), lost));
        assert_eq!(trains(&mut addresses, Instant(1550 * MS), 3), [91, 91, 91], "it does not");
        // From none: it waits for others, or all of its ports were changed, and what it says comes
        // again.
        assert_eq!(both(trains(&mut addresses, Instant(2600 * MS), 12)), [80, 91, 99]);
        addresses.learn(Instant(2700 * MS), 0, 90);
        assert_eq!(both(trains(&mut addresses, Instant(2800 * MS), 4)), [90, 91]);
        // A path that was left out leads elsewhere.
        addresses.hears();
        (0..2).for_each(|_| _ = addresses.judge(Instant(2800 * MS), lost));
        assert_eq!(trains(&mut addresses, Instant(2900 * MS), 3), [91, 91, 91]);
        addresses.learn(Instant(2900 * MS), 0, 90);
        assert_eq!(trains(&mut addresses, Instant(2900 * MS), 3), [91, 91, 91], "that is where it led");
        addresses.learn(Instant(2900 * MS), 0, 95);
        assert_eq!(both(trains(&mut addresses, Instant(2900 * MS), 4)), [91, 95]);
    }
}
