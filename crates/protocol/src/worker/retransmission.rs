//! When to send again: what is in flight, oldest first, and how long a round trip takes.

use alloc::vec::Vec;
use core::time::Duration;
use fanin_wire::SlotIndex;

use crate::{Instant, RetransmissionConfig};

/// By how many packets one must be overtaken to count as lost, a quarter of the window within these. All workers send their
/// slots in the order of the results, so results come in the order of sending but for trains that cross: three full ones.
const OVERTAKEN_MIN: u64 = 8;
const OVERTAKEN_MAX: u64 = 128;

/// Slots in flight in the order of sending: a list threaded through a table, so that every operation is O(1) and
/// none allocates.
#[derive(Debug)]
pub(super) struct InFlight {
    /// One link a slot, and one more that is both ends of the list.
    links: Vec<Link>,
    /// Packets put in so far: numbers the next one.
    pushed: u64,
    /// The largest number of a packet that was answered.
    newest_answered: u64,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    previous: u16,
    next: u16,
    sent: Instant,
    number: u64,
}

impl InFlight {
    pub(super) fn new(slots: u16) -> Self {
        // A link to itself is in no list; for the last one that means empty.
        let links =
            (0..=slots).map(|own| Link { previous: own, next: own, sent: Instant(0), number: 0 }).collect();
        Self { links, pushed: 0, newest_answered: 0 }
    }

    pub(super) fn oldest(&self) -> Option<(SlotIndex, Instant)> {
        let ends = self.links.len() - 1;
        let first = usize::from(self.links[ends].next);
        (first != ends).then(|| (SlotIndex(first as u16), self.links[first].sent))
    }

    /// Puts a slot at the end of the list, wherever it was.
    pub(super) fn push(&mut self, slot: SlotIndex, sent: Instant) {
        self.remove(slot);
        let ends = self.links.len() - 1;
        let last = self.links[ends].previous;
        self.pushed += 1;
        self.links[slot.index()] = Link { previous: last, next: ends as u16, sent, number: self.pushed };
        self.links[usize::from(last)].next = slot.0;
        self.links[ends].previous = slot.0;
    }

    /// Takes a slot out, if it is in.
    pub(super) fn remove(&mut self, slot: SlotIndex) {
        let Link { previous, next, .. } = self.links[slot.index()];
        self.links[usize::from(previous)].next = next;
        self.links[usize::from(next)].previous = previous;
        let link = &mut self.links[slot.index()];
        (link.previous, link.next) = (slot.0, slot.0);
    }

    /// Notes that the packet that this slot sent last was answered. It must be clear that it was that one.
    pub(super) fn answered(&mut self, slot: SlotIndex) {
        self.newest_answered = self.newest_answered.max(self.links[slot.index()].number);
    }

    /// The oldest slot in flight, if a packet that was sent long after its own was answered already.
    pub(super) fn overtaken(&self) -> Option<SlotIndex> {
        let (slot, _) = self.oldest()?;
        let slots = self.links.len() as u64 - 1;
        let margin = (slots / 4).clamp(OVERTAKEN_MIN, OVERTAKEN_MAX);
        (self.links[slot.index()].number + margin < self.newest_answered).then_some(slot)
    }
}

/// The retransmission timeout from measured round trips, as RFC 6298 has it for TCP.
#[derive(Debug)]
pub(crate) struct RoundTrip {
    config: RetransmissionConfig,
    smoothed: Option<Duration>,
    variation: Duration,
    backoff: u32,
    backed_off: Option<Instant>,
}

impl RoundTrip {
    /// Before the first measurement.
    const INITIAL_TIMEOUT: Duration = Duration::from_millis(50);

    pub(crate) const fn new(config: RetransmissionConfig) -> Self {
        Self { config, smoothed: None, variation: Duration::ZERO, backoff: 0, backed_off: None }
    }

    /// Takes the round trip of a packet that was sent once: RFC 6298 (2.2) and (2.3). Only that ends a back-off (5.7):
    /// while everything is sent twice, nothing shows that the timeout is long enough.
    ///
    /// A result waits for every worker, so a round trip contains the timeouts of the others. No sample counts for more than
    /// twice the mean, or they would all drive each other up; one beyond the ceiling tells of a late worker, not of the path.
    pub(crate) fn measure(&mut self, round_trip: Duration) {
        self.backoff = 0;
        if round_trip > self.config.ceiling {
            return;
        }
        match self.smoothed {
            None => {
                self.smoothed = Some(round_trip);
                self.variation = round_trip / 2;
            }
            Some(smoothed) => {
                let round_trip = round_trip.min((smoothed * 2).max(self.config.floor));
                self.variation = (self.variation * 3 + smoothed.abs_diff(round_trip)) / 4;
                self.smoothed = Some((smoothed * 7 + round_trip) / 8);
            }
        }
    }

    /// Takes note that a packet which was sent again is answered. That measures nothing, but who is answered does not wait in
    /// vain: the timeout is not more than doubled, or a window that was lost whole would take one full back-off after another.
    pub(crate) fn answered_again(&mut self) {
        self.backoff = self.backoff.min(1);
    }

    pub(crate) fn smoothed(&self) -> Duration {
        self.smoothed.unwrap_or_default()
    }

    /// The floor is a margin above the mean: results come in trains, between which a packet ages without a sample.
    pub(crate) fn timeout(&self) -> Duration {
        let margin = (self.variation * 4).max(self.config.floor);
        let measured = self.smoothed.map_or(Self::INITIAL_TIMEOUT, |smoothed| smoothed + margin);
        let timeout = measured.saturating_mul(1 << self.backoff.min(16));
        timeout.min(self.config.ceiling.max(self.config.floor))
    }

    /// How often the timeout was doubled.
    pub(crate) const fn backoff(&self) -> u32 {
        self.backoff
    }

    /// Doubles the timeout, once in a timeout: the packets of one window run out one after the other.
    pub(crate) fn back_off(&mut self, now: Instant) {
        if self.backed_off.is_none_or(|last| now.since(last) >= self.timeout()) {
            self.backoff = self.backoff.saturating_add(1);
            self.backed_off = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_leave_in_the_order_of_sending_and_from_the_middle() {
        let mut list = InFlight::new(4);
        assert_eq!(list.oldest(), None);
        for (slot, at) in [(2, 10), (0, 20), (3, 30)] {
            list.push(SlotIndex(slot), Instant(at));
        }
        list.remove(SlotIndex(0));
        list.push(SlotIndex(2), Instant(40));
        assert_eq!(list.oldest(), Some((SlotIndex(3), Instant(30))));
        list.remove(SlotIndex(3));
        list.remove(SlotIndex(1));
        assert_eq!(list.oldest(), Some((SlotIndex(2), Instant(40))));
        list.remove(SlotIndex(2));
        assert_eq!(list.oldest(), None);
    }

    #[test]
    fn a_packet_is_overtaken_when_one_sent_long_after_it_is_answered() {
        let mut list = InFlight::new(40);
        for slot in 0..30 {
            list.push(SlotIndex(slot), Instant(0));
        }
        // A quarter of 40 may cross.
        list.answered(SlotIndex(10));
        assert_eq!(list.overtaken(), None);
        list.answered(SlotIndex(11));
        assert_eq!(list.overtaken(), Some(SlotIndex(0)));
        // Sent again, it is the newest.
        list.push(SlotIndex(0), Instant(1));
        assert_eq!(list.overtaken(), None);
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn the_timeout_is_the_round_trip_and_a_margin_and_never_above_the_ceiling() {
        let mut rtt = RoundTrip::new(RetransmissionConfig { floor: ms(2), ceiling: ms(100) });
        assert_eq!(rtt.timeout(), RoundTrip::INITIAL_TIMEOUT);
        for _ in 0..100 {
            rtt.measure(ms(10));
        }
        assert!(rtt.timeout() >= ms(12) && rtt.timeout() < ms(13), "{:?}", rtt.timeout());
        for i in 0..1000 {
            rtt.measure(if i % 5 == 0 { ms(90) } else { ms(10) });
        }
        assert!(rtt.timeout() < ms(50), "some late workers do not make it much longer: {:?}", rtt.timeout());
        let before = rtt.timeout();
        for _ in 0..100 {
            rtt.measure(ms(3000));
        }
        assert_eq!(rtt.timeout(), before, "a wait for a late worker is no round trip");
        for _ in 0..100 {
            rtt.measure(ms(99));
        }
        assert_eq!(rtt.timeout(), ms(100));
    }

    #[test]
    fn a_timeout_doubles_once_in_its_own_length_until_a_packet_that_was_sent_once_is_answered() {
        let mut rtt = RoundTrip::new(RetransmissionConfig { floor: ms(2), ceiling: ms(100) });
        for _ in 0..100 {
            rtt.measure(ms(8));
        }
        let at = |ms: u64| Instant(ms * 1_000_000);
        rtt.back_off(at(100));
        let doubled = rtt.timeout();
        assert!(doubled >= ms(20));
        rtt.back_off(at(101));
        assert_eq!(rtt.timeout(), doubled, "the next packet of the same window");
        rtt.back_off(at(130));
        assert_eq!(rtt.timeout(), doubled * 2);
        rtt.measure(ms(8));
        assert!(rtt.timeout() < ms(11));
    }
}
