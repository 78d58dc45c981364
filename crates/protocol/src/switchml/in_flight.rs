//! The slots of a worker that wait for an answer, in the order in which they sent.

use alloc::vec::Vec;
use fanin_wire::SlotIndex;

use crate::machine::Instant;

/// By how many packets one must be overtaken to count as lost, a quarter of the window in use
/// within these. All workers send their slots in the order of the results, so results come in the
/// order of sending but for trains that cross: three full ones.
const OVERTAKEN_MIN: u64 = 8;
const OVERTAKEN_MAX: u64 = 128;

/// Slots in flight in the order of sending: a list threaded through a table, so that every
/// operation is O(1) and none allocates.
#[derive(Debug)]
pub(super) struct InFlight {
    /// A link for each slot, and one more that is both ends of the list.
    links: Vec<Link>,
    /// Slots in the list.
    count: u32,
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
        Self { links, count: 0, pushed: 0, newest_answered: 0 }
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
        self.count += 1;
        self.links[slot.index()] = Link { previous: last, next: ends as u16, sent, number: self.pushed };
        self.links[usize::from(last)].next = slot.0;
        self.links[ends].previous = slot.0;
    }

    /// Takes a slot out, if it is in.
    pub(super) fn remove(&mut self, slot: SlotIndex) {
        let Link { previous, next, .. } = self.links[slot.index()];
        self.count -= u32::from(previous != slot.0);
        self.links[usize::from(previous)].next = next;
        self.links[usize::from(next)].previous = previous;
        let link = &mut self.links[slot.index()];
        (link.previous, link.next) = (slot.0, slot.0);
    }

    /// Slots in the list.
    pub(super) const fn count(&self) -> u32 {
        self.count
    }

    /// The number of the packet that this slot sent last.
    pub(super) fn number(&self, slot: SlotIndex) -> u64 {
        self.links[slot.index()].number
    }

    /// The number of the next packet that is put in.
    pub(super) const fn next_number(&self) -> u64 {
        self.pushed + 1
    }

    /// Notes that the packet that this slot sent last was answered. It must be clear that it was
    /// that one.
    pub(super) fn answered(&mut self, slot: SlotIndex) {
        self.newest_answered = self.newest_answered.max(self.links[slot.index()].number);
    }

    /// Whether a packet that was sent after this slot's was answered already.
    pub(super) fn is_overtaken(&self, slot: SlotIndex) -> bool {
        self.number(slot) < self.newest_answered
    }

    /// The oldest slot in flight, if a packet that was sent long after its own was answered
    /// already, where so many may be on the way.
    pub(super) fn overtaken(&self, window: u32) -> Option<SlotIndex> {
        let (slot, _) = self.oldest()?;
        let margin = (u64::from(window) / 4).clamp(OVERTAKEN_MIN, OVERTAKEN_MAX);
        (self.links[slot.index()].number + margin < self.newest_answered).then_some(slot)
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
        assert_eq!(list.count(), 1);
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
        assert_eq!(list.overtaken(40), None);
        list.answered(SlotIndex(11));
        assert_eq!(list.overtaken(40), Some(SlotIndex(0)));
        assert_eq!(list.overtaken(100), None, "where more are on the way more may cross");
        // Sent again, it is the newest.
        list.push(SlotIndex(0), Instant(1));
        assert_eq!(list.overtaken(40), None);
    }
}
