//! The addresses of one worker, one for each of its source ports, over which its packets come and
//! go in turn (DLCP §3.2.3).
//!
//! Only what is new teaches an address: a packet that was caught on its way and comes again, from
//! wherever, changes nothing. If nothing new has come for a while, there are two cases. The worker
//! waits for others, and is where it was; or its ports have all changed (a NAT), and it can only
//! say again what it said before. So every second train goes to the address of its last signal
//! then, and the others to those that were known.

use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;

use crate::dlcp::turns::Turns;
use crate::machine::Instant;

/// How long the addresses from which something new came are used alone.
const KNOWN_FOR: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Addresses<A> {
    /// By path: from where something new came last, and when.
    paths: Vec<Option<(A, Instant)>>,
    /// From where the last signal came, new or not.
    last: Option<A>,
    /// The paths of trains of blocks, and of signals.
    blocks: Turns,
    signals: Turns,
    /// Whether what goes to a worker of which nothing new came for long goes to the address of its
    /// last signal next.
    to_last: bool,
    /// The address for the packet that was written last.
    to: Option<A>,
}

impl<A: Copy> Addresses<A> {
    pub(super) fn new(paths: u8) -> Self {
        let turns = Turns::new(paths);
        Self {
            paths: vec![None; paths.into()],
            last: None,
            blocks: turns,
            signals: turns,
            to_last: true,
            to: None,
        }
    }

    /// Whether the worker was heard of.
    pub(super) const fn is_known(&self) -> bool {
        self.last.is_some()
    }

    /// A signal came from here.
    pub(super) const fn heard(&mut self, from: A) {
        self.last = Some(from);
    }

    /// Something new came by a path, from here.
    pub(super) fn learn(&mut self, now: Instant, path: u8, from: A) {
        if let Some(known) = self.paths.get_mut(usize::from(path)) {
            *known = Some((from, now));
        }
    }

    /// The path of the next train of blocks.
    pub(super) const fn path(&self) -> u8 {
        self.blocks.path()
    }

    /// A train of blocks was written.
    pub(super) fn send_blocks(&mut self, now: Instant) {
        let mut turns = self.blocks;
        self.to = self.next(&mut turns, now);
        self.blocks = turns;
    }

    /// A signal was written.
    pub(super) fn send_signal(&mut self, now: Instant) {
        let mut turns = self.signals;
        self.to = self.next(&mut turns, now);
        self.signals = turns;
    }

    fn next(&mut self, turns: &mut Turns, now: Instant) -> Option<A> {
        let fresh = self.in_turn(turns, |heard| now.since(heard) < KNOWN_FOR);
        fresh.or_else(|| {
            self.to_last = !self.to_last;
            let known = if self.to_last { None } else { self.in_turn(turns, |_| true) };
            known.or(self.last)
        })
    }

    /// The address of the next path that has such a one; each has its turn in the rest of this
    /// round and the next.
    fn in_turn(&self, turns: &mut Turns, is_meant: impl Fn(Instant) -> bool) -> Option<A> {
        (0..2 * self.paths.len()).find_map(|_| {
            let known = self.paths[usize::from(turns.path())];
            turns.pass();
            known.filter(|(_, heard)| is_meant(*heard)).map(|(address, _)| address)
        })
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
        let next = addresses.path();
        addresses.send_signal(Instant(0));
        assert_eq!(addresses.path(), next, "signals have turns of their own");
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
        // From the other nothing new has come for long.
        assert_eq!(trains(&mut addresses, Instant(1500 * MS), 3), [91, 91, 91]);
        // From none: it waits for others, or all of its ports were changed, and what it says comes
        // again.
        assert_eq!(both(trains(&mut addresses, Instant(1700 * MS), 12)), [80, 91, 99]);
        addresses.learn(Instant(1800 * MS), 0, 90);
        assert_eq!(trains(&mut addresses, Instant(1900 * MS), 3), [90, 90, 90]);
    }
}
