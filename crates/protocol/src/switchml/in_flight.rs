//! The slots of a worker that wait for an answer, in the order in which they sent.

use fanin_wire::SlotIndex;

use crate::machine::Instant;
use crate::transport::SendOrder;

/// By how many packets one must be overtaken to count as lost, a quarter of the window in use
/// within these. All workers send their slots in the order of the results, so results come in the
/// order of sending but for trains that cross: three full ones.
const OVERTAKEN_MIN: u64 = 8;
const OVERTAKEN_MAX: u64 = 128;

/// Slots in flight in the order of sending.
#[derive(Debug)]
pub(super) struct InFlight {
    order: SendOrder,
    /// The largest number of a packet that was answered.
    newest_answered: u64,
}

impl InFlight {
    pub(super) fn new(slots: u16) -> Self {
        Self { order: SendOrder::new(slots.into(), 1), newest_answered: 0 }
    }

    pub(super) fn oldest(&self) -> Option<(SlotIndex, Instant)> {
        let slot = self.order.oldest(0)?;
        Some((SlotIndex(slot as u16), self.order.sent(slot)))
    }

    /// A slot's packet leaves.
    pub(super) fn push(&mut self, slot: SlotIndex, sent: Instant) {
        self.order.push(slot.index(), 0, sent);
    }

    /// Takes a slot out, if it is in.
    pub(super) fn remove(&mut self, slot: SlotIndex) {
        self.order.remove(slot.index());
    }

    pub(super) const fn count(&self) -> u32 {
        self.order.count()
    }

    /// The number of the packet that this slot sent last.
    pub(super) fn number(&self, slot: SlotIndex) -> u64 {
        self.order.number(slot.index())
    }

    pub(super) const fn next_number(&self) -> u64 {
        self.order.next_number()
    }

    /// Notes that the packet that this slot sent last was answered. It must be clear that it was
    /// that one.
    pub(super) fn answered(&mut self, slot: SlotIndex) {
        self.newest_answered = self.newest_answered.max(self.number(slot));
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
        (self.number(slot) + margin < self.newest_answered).then_some(slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
