//! The sliding window over the fragments of a job: which were sent, which came back, which were
//! overtaken (ATP §3.6, §3.7).
//!
//! Sequence number `s` has the place `s mod window_max`. A fragment is sent only when the window
//! has room for it from the first one that is missing on. So a place never has two fragments on the
//! way.
//!
//! Fragments of one *lane* take the same way, so that one which comes back overtakes those of its
//! lane alone that were sent before it.

use alloc::vec::Vec;
use core::ops::Range;

use crate::machine::Instant;
use crate::transport::SendOrder;

/// Parameters that must overtake a fragment for it to count as lost (ATP §3.7: "three consecutive
/// parameter packets other than the expected").
const OVERTAKING: usize = 3;

/// A fragment on the way, or not yet; when it is back, the next of its place is not sent yet.
#[derive(Clone, Copy, Debug)]
struct Fragment {
    /// The last sequence number of the place whose parameters came, if any did.
    finished: Option<u64>,
    /// The last one in which the worker takes no part.
    passed_over: Option<u64>,
    sent_again: bool,
    /// It was sent again because others overtook it.
    overtaken: bool,
    queued: bool,
    /// It goes with its original values.
    originals: bool,
    lane: u16,
}

/// The state of the fragment that was sent last in a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Its parameters came.
    Finished,
    /// It is on the way.
    Sent {
        /// Since when, if it was sent once: else it is not known which copy an answer answers
        /// (Karn's rule).
        since: Option<Instant>,
    },
    /// It was not sent yet.
    Ahead,
    /// The place has had a later one, or the worker takes no part in it.
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
    /// The places of the fragments on the way that do not wait to be sent again.
    order: SendOrder,
    /// Of each lane the last packets that were answered, in ascending order; 0 is none.
    newest: Vec<[u64; OVERTAKING]>,
    /// How many on the way were overtaken: lost, or not.
    doubtful: u32,
    /// The fragments that were on the way at the last timeout and were not looked at since.
    going_back: Range<u64>,
}

impl Window {
    pub(super) fn new(window_max: u16, lanes: usize) -> Self {
        let idle = Fragment {
            finished: None,
            passed_over: None,
            sent_again: false,
            overtaken: false,
            queued: false,
            originals: false,
            lane: 0,
        };
        Self {
            places: alloc::vec![idle; usize::from(window_max)],
            expected: 0,
            next: 0,
            in_flight: 0,
            order: SendOrder::new(window_max.into(), lanes),
            newest: alloc::vec![[0; OVERTAKING]; lanes],
            doubtful: 0,
            going_back: 0..0,
        }
    }

    /// Makes a window that was not used yet begin with this fragment. The others' agreement on the
    /// first fragment of each place is not known, so these go with their original values.
    pub(super) fn begin_at(&mut self, sequence: u64) {
        (self.expected, self.next) = (sequence, sequence);
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
        let place = self.place(sequence);
        let fragment = &self.places[place];
        if fragment.finished == Some(sequence) {
            Standing::Finished
        } else if sequence >= self.next {
            Standing::Ahead
        } else if sequence < self.expected || fragment.passed_over == Some(sequence) {
            Standing::Stale
        } else {
            let sent = self.order.sent(place);
            Standing::Sent { since: (!fragment.sent_again).then_some(sent) }
        }
    }

    /// Whether nothing of a fragment is awaited.
    fn is_over(&self, sequence: u64) -> bool {
        let fragment = self.fragment(sequence);
        fragment.finished == Some(sequence) || fragment.passed_over == Some(sequence)
    }

    /// Counts the next fragment as one in which the worker takes no part, if there is room for it.
    pub(super) fn pass_over(&mut self) -> bool {
        let has_room = self.next - self.expected < self.places.len() as u64;
        if has_room {
            let sequence = self.next;
            self.fragment_mut(sequence).passed_over = Some(sequence);
            self.next += 1;
            self.slide();
        }
        has_room
    }

    /// Goes on to the first fragment whose parameters are missing.
    fn slide(&mut self) {
        while self.expected < self.next && self.is_over(self.expected) {
            self.expected += 1;
        }
    }

    /// Whether the window lets the next fragment out when `congestion_window` packets may be on the
    /// way, and a fragment less than `reach` behind the first missing one.
    pub(super) fn has_room(&self, congestion_window: u32, reach: u64) -> bool {
        self.in_flight < congestion_window && self.next - self.expected < reach.min(self.places.len() as u64)
    }

    /// Counts the next fragment as sent, on a lane.
    pub(super) fn send_next(&mut self, now: Instant, lane: u16) {
        let place = self.place(self.next);
        self.places[place].lane = lane;
        self.leave(place, now, false);
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

    /// Whether a packet of this place is to be sent again, from now on; false when it was to be
    /// already.
    pub(super) fn queue(&mut self, sequence: u64) -> bool {
        let place = self.place(sequence);
        let fragment = &mut self.places[place];
        let first = !core::mem::replace(&mut fragment.queued, true);
        if first && fragment.finished != Some(sequence) {
            self.order.remove(place);
        }
        first
    }

    /// Takes a fragment that nobody may have out of those on the way, until it is sent again.
    pub(super) fn hold(&mut self, sequence: u64) {
        self.order.remove(self.place(sequence));
    }

    /// Notes that what was queued leaves.
    pub(super) fn send_again(&mut self, sequence: u64, now: Instant) {
        self.leave(self.place(sequence), now, true);
    }

    /// Puts a place's fragment at the end of those on the way.
    fn leave(&mut self, place: usize, now: Instant, sent_again: bool) {
        let fragment = &mut self.places[place];
        (fragment.sent_again, fragment.queued) = (sent_again, false);
        self.order.push(place, fragment.lane.into(), now);
    }

    /// Takes what was queued out: it is not to be sent.
    pub(super) fn unqueue(&mut self, sequence: u64) {
        self.fragment_mut(sequence).queued = false;
    }

    /// Counts the parameters of a fragment that is on the way as come; `mended` if it had to be
    /// sent again for that. Whether it was overtaken.
    pub(super) fn finish(&mut self, sequence: u64, mended: bool) -> bool {
        let place = self.place(sequence);
        let fragment = &mut self.places[place];
        let overtaken = core::mem::take(&mut fragment.overtaken);
        let lane = usize::from(fragment.lane);
        // If a fragment was sent again for nothing, its first packet was answered, which is of no
        // use here any more.
        let answered = !fragment.sent_again || mended;
        fragment.finished = Some(sequence);
        fragment.queued = false;
        fragment.originals = false;
        self.order.remove(place);
        self.doubtful -= u32::from(overtaken);
        self.in_flight -= 1;
        let (newest, packet) = (&mut self.newest[lane], self.order.number(place));
        if answered && packet > newest[0] {
            newest[0] = packet;
            newest.sort_unstable();
        }
        self.slide();
        overtaken
    }

    /// Whether a fragment on the way was overtaken, so that it is not known yet whether it was
    /// lost.
    pub(super) const fn doubts(&self) -> bool {
        self.doubtful > 0
    }

    /// The next fragment that three have overtaken of the lane that this one is on, which were sent
    /// after it was sent last. It must be queued then.
    pub(super) fn overtaken(&mut self, sequence: u64) -> Option<u64> {
        let lane = usize::from(self.fragment(sequence).lane);
        let oldest = self.order.oldest(lane)?;
        if self.order.number(oldest) >= self.newest[lane][0] {
            return None;
        }
        self.doubtful += u32::from(!core::mem::replace(&mut self.places[oldest].overtaken, true));
        // The fragment of a place that is on the way is the only one between `expected` and a
        // window further on.
        let places = self.places.len() as u64;
        let behind = (oldest as u64 + places - self.expected % places) % places;
        Some(self.expected + behind)
    }

    /// When the expected fragment was sent, if one is on the way.
    pub(super) fn expected_sent(&self) -> Option<Instant> {
        (self.expected < self.next).then(|| self.order.sent(self.place(self.expected)))
    }

    /// Begins with the expected fragment again: whatever is on the way may be lost.
    pub(super) fn go_back(&mut self) {
        self.going_back = self.expected..self.next;
    }

    /// The next of what was on the way when the window went back, and is not answered. It must be
    /// queued then.
    pub(super) fn still_unanswered(&mut self) -> Option<u64> {
        self.going_back.start = self.going_back.start.max(self.expected);
        while let Some(sequence) = self.going_back.next() {
            if !self.is_over(sequence) && !self.fragment(sequence).queued {
                return Some(sequence);
            }
        }
        None
    }

    /// Forgets what waits to be sent again: it is on the way, as it was before.
    pub(super) fn forget_queue(&mut self) {
        for fragment in &mut self.places {
            fragment.queued = false;
        }
        let is_on_the_way = |sequence: &u64| !self.is_over(*sequence);
        let on_the_way = (self.expected..self.next).filter(is_on_the_way);
        let mut on_the_way: Vec<usize> = on_the_way.map(|sequence| self.place(sequence)).collect();
        on_the_way.sort_unstable_by_key(|place| self.order.number(*place));
        self.order.take_lanes(self.newest.len());
        for place in on_the_way {
            self.order.append(place, self.places[place].lane.into());
        }
    }

    /// Goes on with other lanes, of which `lane` says each fragment's.
    pub(super) fn take_lanes(&mut self, lanes: usize, lane: impl Fn(u64) -> u16) {
        self.newest.clear();
        self.newest.resize(lanes, [0; OVERTAKING]);
        for sequence in self.expected..self.next {
            self.fragment_mut(sequence).lane = lane(sequence);
        }
        self.forget_queue();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_queued_and_forgotten_is_overtaken_as_before() {
        let mut window = Window::new(8, 1);
        (0..8).for_each(|_| window.send_next(Instant(0), 0));
        for sequence in [3, 0, 7] {
            assert!(window.queue(sequence));
        }
        window.forget_queue();
        for sequence in [1, 2, 4] {
            window.finish(sequence, false);
        }
        assert_eq!(window.overtaken(0), Some(0));
        window.queue(0);
        window.send_again(0, Instant(1));
        assert_eq!(window.overtaken(0), None, "two have overtaken 3");
        for sequence in [5, 6] {
            window.finish(sequence, false);
        }
        assert_eq!(window.overtaken(0), Some(3));
        window.queue(3);
        assert_eq!(window.overtaken(0), None, "nobody has overtaken 7");
        for sequence in [3, 7, 0] {
            window.finish(sequence, true);
        }
        assert_eq!((window.expected(), window.in_flight(), window.overtaken(0)), (8, 0, None));
    }

    #[test]
    fn what_comes_on_one_lane_overtakes_nothing_on_another() {
        let mut window = Window::new(12, 2);
        (0..12).for_each(|sequence| window.send_next(Instant(0), sequence % 2));
        // The odd ones' way is the shorter one.
        for sequence in [3, 5, 7, 9, 11] {
            window.finish(sequence, false);
            assert_eq!(window.overtaken(0), None);
        }
        assert_eq!(window.overtaken(3), Some(1), "three have overtaken it");
        window.queue(1);
        for sequence in [2, 4, 6] {
            window.finish(sequence, false);
        }
        assert_eq!(window.overtaken(3), None);
        assert_eq!(window.overtaken(2), Some(0));
        window.take_lanes(1, |_| 0);
        for sequence in [8, 10] {
            window.finish(sequence, false);
        }
        assert_eq!(window.overtaken(0), None, "under another plan all is sent again");
        for sequence in [0, 1] {
            window.finish(sequence, true);
        }
        assert_eq!((window.expected(), window.in_flight()), (12, 0));
    }

    #[test]
    fn a_place_that_hands_its_last_sum_back_while_its_next_one_comes_is_free_afterwards() {
        let mut window = Window::new(1, 1);
        window.send_next(Instant(0), 0);
        window.finish(0, false);
        window.send_next(Instant(1), 0);
        assert!(window.queue(0), "its parameters are asked for");
        window.finish(1, false);
        assert_eq!(window.order.count(), 0);
        window.send_next(Instant(2), 0);
        window.finish(2, false);
        assert_eq!((window.order.count(), window.overtaken(2)), (0, None));
    }
}
