//! The packets of a sender that wait for an answer, in the order of sending.

use alloc::vec::Vec;

use crate::machine::Instant;

/// Places whose packets are on the way, a list for each lane. The lists are threaded through a
/// table, so that every operation is O(1) and none allocates.
#[derive(Debug)]
pub(crate) struct SendOrder {
    /// A link for each place, and behind these one for each lane, which is both ends of its list.
    links: Vec<Link>,
    places: usize,
    /// Places in the lists.
    count: u32,
    /// Packets sent so far: numbers the next one.
    packets: u64,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    /// A link to itself is in no list; for the ends of a lane that means empty.
    previous: u32,
    next: u32,
    /// When the place sent last, and which packet that was.
    sent: Instant,
    number: u64,
}

impl SendOrder {
    pub(crate) fn new(places: usize, lanes: usize) -> Self {
        let mut order = Self { links: Vec::new(), places, count: 0, packets: 0 };
        order.take_lanes(lanes);
        order
    }

    /// Empties the lists, and goes on with so many.
    pub(crate) fn take_lanes(&mut self, lanes: usize) {
        let unsent = Link { previous: 0, next: 0, sent: Instant(0), number: 0 };
        self.links.resize(self.places + lanes, unsent);
        for (own, link) in (0..).zip(&mut self.links) {
            (link.previous, link.next) = (own, own);
        }
        self.count = 0;
    }

    /// The place whose packet was sent first.
    pub(crate) fn oldest(&self, lane: usize) -> Option<usize> {
        let ends = self.places + lane;
        let first = self.links[ends].next as usize;
        (first != ends).then_some(first)
    }

    /// A packet leaves: its place goes to the end of the lane's list, wherever it was.
    pub(crate) fn push(&mut self, place: usize, lane: usize, now: Instant) {
        self.remove(place);
        self.packets += 1;
        (self.links[place].sent, self.links[place].number) = (now, self.packets);
        self.append(place, lane);
    }

    /// Puts a place that is in no list to the end of one, as what it sent last.
    pub(crate) fn append(&mut self, place: usize, lane: usize) {
        let ends = self.places + lane;
        let last = self.links[ends].previous;
        self.count += 1;
        (self.links[place].previous, self.links[place].next) = (last, ends as u32);
        self.links[last as usize].next = place as u32;
        self.links[ends].previous = place as u32;
    }

    /// Takes a place out, if it is in.
    pub(crate) fn remove(&mut self, place: usize) {
        let Link { previous, next, .. } = self.links[place];
        self.count -= u32::from(previous as usize != place);
        self.links[previous as usize].next = next;
        self.links[next as usize].previous = previous;
        let link = &mut self.links[place];
        (link.previous, link.next) = (place as u32, place as u32);
    }

    /// Places in the lists.
    pub(crate) const fn count(&self) -> u32 {
        self.count
    }

    /// When a place sent last.
    pub(crate) fn sent(&self, place: usize) -> Instant {
        self.links[place].sent
    }

    /// The number of the packet that a place sent last; 0 is none.
    pub(crate) fn number(&self, place: usize) -> u64 {
        self.links[place].number
    }

    /// The number of the next packet.
    pub(crate) const fn next_number(&self) -> u64 {
        self.packets + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_leave_in_the_order_of_sending_and_from_the_middle() {
        let mut order = SendOrder::new(4, 2);
        assert_eq!(order.oldest(0), None);
        for (place, at) in [(2, 10), (0, 20), (3, 30)] {
            order.push(place, 0, Instant(at));
        }
        order.push(1, 1, Instant(35));
        order.remove(0);
        order.push(2, 0, Instant(40));
        assert_eq!((order.oldest(0), order.oldest(1)), (Some(3), Some(1)));
        order.remove(3);
        order.remove(3);
        assert_eq!(order.count(), 2);
        assert_eq!(
            order.oldest(0).map(|place| (place, order.sent(place), order.number(place))),
            Some((2, Instant(40), 5))
        );
        order.take_lanes(1);
        assert_eq!((order.oldest(0), order.count(), order.next_number()), (None, 0, 6));
        order.append(2, 0);
        assert_eq!(order.oldest(0).map(|place| order.number(place)), Some(5));
        order.remove(2);
        assert_eq!((order.oldest(0), order.count()), (None, 0), "the last has left");
    }
}
