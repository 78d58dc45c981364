//! The sliding window over the fragments of a job: which were sent, which came back, which were overtaken (ATP §3.6, §3.7).
//!
//! Sequence number `s` has the place `s mod window_max`. A fragment is sent only when the window has room for it from the
//! first one that is missing on, so a place never has two fragments on the way.

use alloc::vec::Vec;

use crate::machine::Instant;

/// Parameters that must overtake a fragment for it to count as lost (ATP §3.7: "three consecutive parameter packets other than
/// the expected").
const OVERTAKING: usize = 3;

/// One fragment on the way, or not yet; when it is back, the next of its place is not sent yet.
#[derive(Clone, Copy, Debug)]
struct Fragment {
    /// The last sequence number of the place whose parameters came, if any did.
    finished: Option<u64>,
    sent: Instant,
    /// The first sequence number that had not been sent when this was sent last: parameters from there on overtake it.
    overtaken_from: u64,
    sent_again: bool,
    queued: bool,
    /// It goes with its original values.
    originals: bool,
}

/// What a place says of the fragment that was sent last in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Its parameters came.
    Finished,
    /// It is on the way.
    Sent {
        /// Since when, if it was sent once: else it is not known which copy an answer answers (Karn's rule).
        since: Option<Instant>,
    },
    /// It was not sent yet.
    Ahead,
    /// The place has had a later one.
    Stale,
}

/// The window of one worker.
#[derive(Debug)]
pub(super) struct Window {
    places: Vec<Fragment>,
    /// The first sequence number whose parameters are missing.
    expected: u64,
    /// The first that was not sent.
    next: u64,
    /// Sent and not back.
    in_flight: u32,
    /// The largest sequence numbers that are back, in ascending order; 0 counts as none.
    newest: [u64; OVERTAKING],
    /// Everything before it was looked at for having been overtaken.
    scanned: u64,
}

impl Window {
    pub(super) fn new(window_max: u16) -> Self {
        let idle = Fragment {
            finished: None,
            sent: Instant(0),
            overtaken_from: 0,
            sent_again: false,
            queued: false,
            originals: false,
        };
        Self {
            places: alloc::vec![idle; usize::from(window_max)],
            expected: 0,
            next: 0,
            in_flight: 0,
            newest: [0; OVERTAKING],
            scanned: 0,
        }
    }

    /// Makes a window that was not used yet begin with this fragment. What the others agreed on for the first fragment of each
    /// place is not known, so these go with their original values.
    pub(super) fn begin_at(&mut self, sequence: u64) {
        (self.expected, self.next, self.scanned) = (sequence, sequence, sequence);
        for fragment in &mut self.places {
            fragment.originals = true;
        }
    }

    pub(super) const fn expected(&self) -> u64 {
        self.expected
    }

    pub(super) const fn next(&self) -> u64 {
        self.next
    }

    pub(super) const fn in_flight(&self) -> u32 {
        self.in_flight
    }

    pub(super) fn place(&self, sequence: u64) -> usize {
        (sequence % self.places.len() as u64) as usize
    }

    fn fragment(&self, sequence: u64) -> &Fragment {
        &self.places[self.place(sequence)]
    }

    fn fragment_mut(&mut self, sequence: u64) -> &mut Fragment {
        let place = self.place(sequence);
        &mut self.places[place]
    }

    pub(super) fn standing(&self, sequence: u64) -> Standing {
        let fragment = self.fragment(sequence);
        if fragment.finished == Some(sequence) {
            Standing::Finished
        } else if sequence >= self.next {
            Standing::Ahead
        } else if sequence < self.expected {
            Standing::Stale
        } else {
            Standing::Sent { since: (!fragment.sent_again).then_some(fragment.sent) }
        }
    }

    /// Whether the window lets the next fragment out when `congestion_window` packets may be on the way.
    pub(super) fn has_room(&self, congestion_window: u32) -> bool {
        self.in_flight < congestion_window && self.next - self.expected < self.places.len() as u64
    }

    /// Counts the next fragment as sent.
    pub(super) fn send_next(&mut self, now: Instant) {
        let overtaken_from = self.next + 1;
        let fragment = self.fragment_mut(self.next);
        fragment.sent = now;
        fragment.overtaken_from = overtaken_from;
        fragment.sent_again = false;
        self.next += 1;
        self.in_flight += 1;
    }

    /// Whether a fragment goes out with its original values.
    pub(super) fn originals(&self, sequence: u64) -> bool {
        self.fragment(sequence).originals
    }

    pub(super) fn set_originals(&mut self, sequence: u64) {
        self.fragment_mut(sequence).originals = true;
    }

    /// Whether a packet of this place is to be sent again, from now on; false when it was to be already.
    pub(super) fn queue(&mut self, sequence: u64) -> bool {
        !core::mem::replace(&mut self.fragment_mut(sequence).queued, true)
    }

    /// Notes that what was queued leaves.
    pub(super) fn send_again(&mut self, sequence: u64, now: Instant) {
        let overtaken_from = self.next;
        let fragment = self.fragment_mut(sequence);
        fragment.queued = false;
        fragment.sent = now;
        fragment.overtaken_from = overtaken_from;
        fragment.sent_again = true;
    }

    /// Takes what was queued out: it is not to be sent.
    pub(super) fn unqueue(&mut self, sequence: u64) {
        self.fragment_mut(sequence).queued = false;
    }

    /// Counts the parameters of a fragment that is on the way as come.
    pub(super) fn finish(&mut self, sequence: u64) {
        let fragment = self.fragment_mut(sequence);
        fragment.finished = Some(sequence);
        fragment.queued = false;
        fragment.originals = false;
        self.in_flight -= 1;
        if sequence > self.newest[0] {
            self.newest[0] = sequence;
            self.newest.sort_unstable();
        }
        while self.expected < self.next && self.fragment(self.expected).finished == Some(self.expected) {
            self.expected += 1;
        }
    }

    /// The next fragment that three later ones have overtaken since it was sent last. It must be queued then.
    ///
    /// Whoever was sent once is looked at once; one that was sent again only while it is the expected one.
    pub(super) fn overtaken(&mut self) -> Option<u64> {
        let third = self.newest[0];
        self.scanned = self.scanned.max(self.expected);
        while self.scanned < third {
            let sequence = self.scanned;
            self.scanned += 1;
            let fragment = self.fragment(sequence);
            if fragment.finished != Some(sequence) && !fragment.sent_again && !fragment.queued {
                return Some(sequence);
            }
        }
        let expected = self.fragment(self.expected);
        let again = self.expected < self.next
            && expected.sent_again
            && !expected.queued
            && third >= expected.overtaken_from;
        again.then_some(self.expected)
    }

    /// When the expected fragment was sent, if one is on the way.
    pub(super) fn expected_sent(&self) -> Option<Instant> {
        (self.expected < self.next).then(|| self.fragment(self.expected).sent)
    }

    /// What is on the way, in order, but for what waits to be sent again.
    pub(super) fn unanswered(&self) -> impl Iterator<Item = u64> + '_ {
        (self.expected..self.next).filter(|sequence| {
            let fragment = self.fragment(*sequence);
            fragment.finished != Some(*sequence) && !fragment.queued
        })
    }

    /// Forgets what waits to be sent again.
    pub(super) fn forget_queue(&mut self) {
        for fragment in &mut self.places {
            fragment.queued = false;
        }
    }
}
