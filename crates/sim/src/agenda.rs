//! What happens when: a queue of events in virtual time, ties in the order of their making.
//!
//! Most events are a link's delay away, and there are as many as links. In one heap each would go through many levels; so
//! what is due soon is put into a wheel of spans of time, unsorted, and only the span that is the present one is a heap, which is
//! small. What is further away than the wheel reaches is in another heap until its span is the present one.

use fanin_protocol::Instant;

/// A point in time that an agenda can be ordered by.
pub(crate) trait Moment: Copy {
    fn to_ticks(self) -> u64;
    fn from_ticks(ticks: u64) -> Self;
}

impl Moment for Instant {
    fn to_ticks(self) -> u64 {
        self.0
    }

    fn from_ticks(ticks: u64) -> Self {
        Self(ticks)
    }
}

/// Ticks of a span, as a power of two: 8 ns of a network's picoseconds. A packet of 100 bytes takes as long at 100 Gbit/s.
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

impl<E> Entry<E> {
    const fn ticks(&self) -> u64 {
        (self.key >> 64) as u64
    }

    const fn span(&self) -> u64 {
        self.ticks() >> SPAN_BITS
    }
}

/// Events by time.
#[derive(Debug)]
pub(crate) struct Agenda<T, E> {
    /// Those of the present span and of before.
    present: Heap<E>,
    span: u64,
    /// Those of the next [`SPANS`] spans but for the present one, by their span's number modulo that.
    wheel: Vec<Vec<Entry<E>>>,
    /// Which of these there are.
    occupied: [u64; WORDS],
    /// Those further away when they were made.
    far: Heap<E>,
    made: u64,
    length: usize,
    time: std::marker::PhantomData<T>,
}

impl<T: Moment, E> Agenda<T, E> {
    pub(crate) fn new() -> Self {
        Self {
            present: Heap::new(),
            span: 0,
            wheel: std::iter::repeat_with(Vec::new).take(SPANS).collect(),
            occupied: [0; WORDS],
            far: Heap::new(),
            made: 0,
            length: 0,
            time: std::marker::PhantomData,
        }
    }

    fn entry(&mut self, when: T, event: E) -> Entry<E> {
        self.made += 1;
        Entry { key: u128::from(when.to_ticks()) << 64 | u128::from(self.made), event }
    }

    pub(crate) fn at(&mut self, when: T, event: E) {
        let entry = self.entry(when, event);
        self.length += 1;
        self.put(entry);
    }

    fn put(&mut self, entry: Entry<E>) {
        let ahead = entry.span().saturating_sub(self.span);
        if ahead == 0 {
            self.present.push(entry);
        } else if ahead < SPANS as u64 {
            let at = entry.span() as usize % SPANS;
            self.occupied[at / 64] |= 1 << (at % 64);
            self.wheel[at].push(entry);
        } else {
            self.far.push(entry);
        }
    }

    /// Goes on to the next span in which something happens, if nothing does in the present one.
    fn turn(&mut self) {
        if self.present.0.is_empty() && self.length > 0 {
            let far = self.far.0.first().map(Entry::span);
            let next = self.next_on_wheel().into_iter().chain(far).min();
            self.span = next.expect("events are on the wheel or beyond it");
            let at = self.span as usize % SPANS;
            self.occupied[at / 64] &= !(1 << (at % 64));
            let Self { wheel, present, .. } = self;
            wheel[at].drain(..).for_each(|entry| present.push(entry));
            while self.far.0.first().is_some_and(|entry| entry.span() == self.span) {
                let entry = self.far.pop().expect("the first");
                self.present.push(entry);
            }
        }
    }

    /// The first span on the wheel after the present one in which something happens.
    fn next_on_wheel(&self) -> Option<u64> {
        let begin = (self.span as usize + 1) % SPANS;
        let (word, bit) = (begin / 64, begin % 64);
        // The first word twice: from the bit on, and at the end what is before it.
        let masks = [(word, !0 << bit)]
            .into_iter()
            .chain((1..WORDS).map(|further| ((word + further) % WORDS, !0)))
            .chain([(word, (1 << bit) - 1)]);
        masks.into_iter().find_map(|(word, mask)| {
            let found = self.occupied[word] & mask;
            (found != 0).then(|| {
                let at = word * 64 + found.trailing_zeros() as usize;
                self.span + 1 + ((at + SPANS - begin) % SPANS) as u64
            })
        })
    }

    /// The next event, which stays.
    pub(crate) fn first(&mut self) -> Option<(T, &E)> {
        self.turn();
        self.present.0.first().map(|entry| (T::from_ticks(entry.ticks()), &entry.event))
    }

    /// Takes the next event.
    pub(crate) fn next(&mut self) -> Option<(T, E)> {
        self.turn();
        let entry = self.present.pop()?;
        self.length -= 1;
        Some((T::from_ticks(entry.ticks()), entry.event))
    }

    /// Puts another event in the place of the next.
    ///
    /// # Panics
    /// When there is none.
    pub(crate) fn replace_first(&mut self, when: T, event: E) {
        self.turn();
        let entry = self.entry(when, event);
        if entry.span() <= self.span {
            // Half the work of taking one and adding one.
            self.present.0[0] = entry;
            self.present.sink();
        } else {
            self.present.pop();
            self.put(entry);
        }
    }

    pub(crate) const fn len(&self) -> usize {
        self.length
    }
}

const CHILDREN: usize = 4;

/// With four children a node, the events inside it: half as deep as a binary one, and the children that are compared lie
/// side by side.
#[derive(Debug)]
struct Heap<E>(Vec<Entry<E>>);

impl<E> Heap<E> {
    const fn new() -> Self {
        Self(Vec::new())
    }

    fn push(&mut self, entry: Entry<E>) {
        self.0.push(entry);
        self.rise(self.0.len() - 1);
    }

    fn pop(&mut self) -> Option<Entry<E>> {
        if self.0.is_empty() {
            return None;
        }
        let entry = self.0.swap_remove(0);
        self.sink();
        Some(entry)
    }

    fn rise(&mut self, mut at: usize) {
        while at > 0 {
            let parent = (at - 1) / CHILDREN;
            if self.0[parent].key < self.0[at].key {
                break;
            }
            self.0.swap(parent, at);
            at = parent;
        }
    }

    /// The first entry goes down to its place.
    fn sink(&mut self) {
        let mut at = 0;
        loop {
            let first = at * CHILDREN + 1;
            let least = if let Some([a, b, c, d]) = self.0.get(first..first + CHILDREN) {
                // Without branches that could not be foreseen.
                let (left, left_key) = if b.key < a.key { (1, b.key) } else { (0, a.key) };
                let (right, right_key) = if d.key < c.key { (3, d.key) } else { (2, c.key) };
                first + if right_key < left_key { right } else { left }
            } else {
                match (first..self.0.len()).min_by_key(|child| self.0[*child].key) {
                    Some(least) => least,
                    None => break,
                }
            };
            if self.0[at].key < self.0[least].key {
                break;
            }
            self.0.swap(at, least);
            at = least;
        }
    }
}

#[cfg(test)]
mod tests {
    use oorandom::Rand64;

    use super::*;

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
        assert_eq!(agenda.first(), Some((expected[0].0, &expected[0].1)));
        let came: Vec<_> = std::iter::from_fn(|| agenda.next()).collect();
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
            let (mut when, replaces) = (Instant(now + dice.rand_range(0..reach)), dice.rand_range(0..3) == 0);
            let makes = made < 20_000 && (agenda.len() < 3 || dice.rand_range(0..2) == 0);
            if makes && !(replaces && agenda.len() > 0) {
                agenda.at(when, made);
            } else {
                let ((time, count), event) = expected.pop_first().expect("as many as in the agenda");
                assert_eq!(agenda.first(), Some((time, &event)), "{count}");
                now = time.0;
                if makes {
                    when = when.max(time);
                    agenda.replace_first(when, made);
                } else {
                    assert_eq!(agenda.next(), Some((time, event)));
                    continue;
                }
            }
            expected.insert((when, made), made);
            made += 1;
            assert_eq!(agenda.len(), expected.len());
        }
        assert!(now > 1 << 26, "many turns of the wheel");
    }

    #[test]
    fn a_replaced_event_takes_its_place_as_one_that_was_made_now() {
        let mut agenda = Agenda::new();
        for (when, event) in [(1, 'a'), (2, 'b'), (3, 'c'), (3, 'd')] {
            agenda.at(Instant(when), event);
        }
        agenda.replace_first(Instant(3), 'e');
        agenda.replace_first(Instant(0), 'f');
        let came: String = std::iter::from_fn(|| agenda.next()).map(|(_, event)| event).collect();
        assert_eq!(came, "fcde");
    }
}
