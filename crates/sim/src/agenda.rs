//! A queue of events in virtual time. Events of one time come in the order of their making.
//!
//! Most events are a link's delay away, and there are as many as links. In one heap each would go
//! through many levels. So events that are due soon go into a wheel of spans of time. A span is
//! sorted when it becomes the present one. The few events that are made for the present span
//! meanwhile are in a heap. Events further away than the wheel reaches are in another heap, until
//! their span is the present one.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// A point in time that an agenda can be ordered by.
pub(crate) trait Moment: Copy {
    fn to_ticks(self) -> u64;
    fn from_ticks(ticks: u64) -> Self;
}

/// Ticks of a span, as a power of two: 8 ns of a network's picoseconds. A packet of 100 bytes takes
/// as long at 100 Gbit/s.
const SPAN_BITS: u32 = 13;
/// Spans of the wheel: 8 us, in which most links deliver.
const SPANS: usize = 1024;
const WORDS: usize = SPANS / 64;

#[derive(Debug)]
struct Entry<E> {
    /// Time, and below it the number of the event: one comparison for both.
    key: u128,
    event: E,
}

/// The next one is the greatest, as the end of a sorted vector and the head of a heap have it.
impl<E> Ord for Entry<E> {
    #[inline]
    fn cmp(&self, other: &Self) -> Ordering {
        other.key.cmp(&self.key)
    }
}

impl<E> PartialOrd for Entry<E> {
    #[inline]
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl<E> Eq for Entry<E> {}

impl<E> Entry<E> {
    #[inline]
    const fn ticks(&self) -> u64 {
        (self.key >> 64) as u64
    }

    #[inline]
    const fn span(&self) -> u64 {
        self.ticks() >> SPAN_BITS
    }
}

/// Events by time.
#[derive(Debug)]
pub(crate) struct Agenda<T, E> {
    /// The events that the present span began with, the next one last.
    present: Vec<Entry<E>>,
    /// Later made events of the present span, and of earlier ones.
    late: BinaryHeap<Entry<E>>,
    span: u64,
    /// Events of the next [`SPANS`] spans after the present one, by the span's number modulo
    /// [`SPANS`].
    wheel: Vec<Vec<Entry<E>>>,
    /// Which of these there are.
    occupied: [u64; WORDS],
    /// Events that were further away when they were made.
    far: BinaryHeap<Entry<E>>,
    made: u64,
    length: usize,
    time: std::marker::PhantomData<T>,
}

impl<T: Moment, E> Agenda<T, E> {
    pub(crate) fn new() -> Self {
        Self {
            present: Vec::new(),
            late: BinaryHeap::new(),
            span: 0,
            wheel: std::iter::repeat_with(Vec::new).take(SPANS).collect(),
            occupied: [0; WORDS],
            far: BinaryHeap::new(),
            made: 0,
            length: 0,
            time: std::marker::PhantomData,
        }
    }

    fn entry(&mut self, when: T, event: E) -> Entry<E> {
        self.made += 1;
        Entry { key: u128::from(when.to_ticks()) << 64 | u128::from(self.made), event }
    }

    #[inline]
    pub(crate) fn at(&mut self, when: T, event: E) {
        let entry = self.entry(when, event);
        self.length += 1;
        self.put(entry);
    }

    #[inline]
    fn put(&mut self, entry: Entry<E>) {
        let ahead = entry.span().saturating_sub(self.span);
        if ahead == 0 {
            self.late.push(entry);
        } else if ahead < SPANS as u64 {
            let at = entry.span() as usize % SPANS;
            self.occupied[at / 64] |= 1 << (at % 64);
            self.wheel[at].push(entry);
        } else {
            self.far.push(entry);
        }
    }

    /// Goes on to the next span in which something happens, if nothing is left in the present one.
    /// Returns whether it did.
    #[inline]
    pub(crate) fn turn(&mut self) -> bool {
        if !self.present.is_empty() || !self.late.is_empty() || self.length == 0 {
            return false;
        }
        let far = self.far.peek().map(Entry::span);
        let next = self.next_on_wheel().into_iter().chain(far).min();
        self.span = next.expect("events are on the wheel or beyond it");
        let at = self.span as usize % SPANS;
        self.occupied[at / 64] &= !(1 << (at % 64));
        std::mem::swap(&mut self.present, &mut self.wheel[at]);
        while self.far.peek().is_some_and(|entry| entry.span() == self.span) {
            self.present.extend(self.far.pop());
        }
        self.present.sort_unstable_by_key(|entry| Reverse(entry.key));
        true
    }

    /// Events that the present span began with and that have not happened yet, in no order.
    pub(crate) fn present(&self) -> impl ExactSizeIterator<Item = &E> {
        self.present.iter().map(|entry| &entry.event)
    }

    /// The first span on the wheel after the present one in which something happens.
    fn next_on_wheel(&self) -> Option<u64> {
        let begin = (self.span as usize + 1) % SPANS;
        let (word, bit) = (begin / 64, begin % 64);
        let ahead = self.occupied[word] >> bit;
        if ahead != 0 {
            return Some(self.span + 1 + u64::from(ahead.trailing_zeros()));
        }
        // At last the first word again: what is in it now is before the bit.
        (1..=WORDS).find_map(|further| {
            let found = self.occupied[(word + further) % WORDS];
            let distance = (further * 64 - bit) as u64 + u64::from(found.trailing_zeros());
            (found != 0).then_some(self.span + 1 + distance)
        })
    }

    /// Takes the next event, if it is not after `end`.
    #[inline]
    pub(crate) fn next_until(&mut self, end: T) -> Option<(T, E)> {
        self.turn();
        let late = self.late.peek().is_some_and(|late| self.present.last().is_none_or(|first| late > first));
        let ticks = if late { self.late.peek() } else { self.present.last() }?.ticks();
        if ticks > end.to_ticks() {
            return None;
        }
        let entry = if late { self.late.pop() } else { self.present.pop() }?;
        self.length -= 1;
        Some((T::from_ticks(ticks), entry.event))
    }

    pub(crate) const fn len(&self) -> usize {
        self.length
    }
}

#[cfg(test)]
mod tests {
    use fanin_protocol::Instant;
    use oorandom::Rand64;

    use super::*;

    impl Moment for Instant {
        fn to_ticks(self) -> u64 {
            self.0
        }

        fn from_ticks(ticks: u64) -> Self {
            Self(ticks)
        }
    }

    #[test]
    fn events_come_by_time_and_ties_in_the_order_of_their_making() {
        let mut dice = Rand64::new(1);
        let mut agenda = Agenda::new();
        let mut expected = Vec::new();
        for made in 0..5000_u32 {
            let when = Instant(dice.rand_range(0..300));
            agenda.at(when, made);
            expected.push((when, made));
        }
        expected.sort_unstable();
        let came: Vec<_> = std::iter::from_fn(|| agenda.next_until(Instant(u64::MAX))).collect();
        assert_eq!(came, expected);
        assert_eq!(agenda.len(), 0);
    }

    /// On the wheel, beyond it, in the span that comes a turn later, and back.
    #[test]
    fn events_far_and_near_come_by_time_while_others_are_made() {
        let mut dice = Rand64::new(2);
        let (mut agenda, mut expected, mut made) = (Agenda::new(), std::collections::BTreeMap::new(), 0_u32);
        let mut now = 0;
        while made < 20_000 || agenda.len() > 0 {
            let reach = 1 << dice.rand_range(0..30);
            let when = Instant(now + dice.rand_range(0..reach));
            if made < 20_000 && (agenda.len() < 3 || dice.rand_range(0..2) == 0) {
                agenda.at(when, made);
                expected.insert((when, made), made);
                made += 1;
            } else if let Some((time, event)) = agenda.next_until(when) {
                assert_eq!(expected.pop_first(), Some(((time, event), event)));
                now = time.0;
            } else {
                let (((next, _), _), end) = (expected.first_key_value().expect("as many"), when);
                assert!(*next > end, "{next:?} is not after {end:?}");
            }
            assert_eq!(agenda.len(), expected.len());
        }
        assert!(now > 1 << 26, "many turns of the wheel");
    }
}
