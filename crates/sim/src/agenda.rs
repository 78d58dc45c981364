//! What happens when: a queue of events in virtual time, ties in the order of their making.
//!
//! A heap with four children a node, the events inside it: half as deep as a binary one, and the children that are
//! compared lie side by side.

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

#[derive(Debug)]
struct Entry<E> {
    /// Time, and below it the number of the event: one comparison for both.
    key: u128,
    event: E,
}

const CHILDREN: usize = 4;

/// Events by time.
#[derive(Debug)]
pub(crate) struct Agenda<T, E> {
    heap: Vec<Entry<E>>,
    made: u64,
    time: std::marker::PhantomData<T>,
}

impl<T: Moment, E> Agenda<T, E> {
    pub(crate) const fn new() -> Self {
        Self { heap: Vec::new(), made: 0, time: std::marker::PhantomData }
    }

    fn key(&mut self, when: T) -> u128 {
        self.made += 1;
        u128::from(when.to_ticks()) << 64 | u128::from(self.made)
    }

    pub(crate) fn at(&mut self, when: T, event: E) {
        let key = self.key(when);
        self.heap.push(Entry { key, event });
        self.rise(self.heap.len() - 1);
    }

    /// The next event, which stays.
    pub(crate) fn first(&self) -> Option<(T, &E)> {
        self.heap.first().map(|entry| (T::from_ticks((entry.key >> 64) as u64), &entry.event))
    }

    /// Takes the next event.
    pub(crate) fn next(&mut self) -> Option<(T, E)> {
        if self.heap.is_empty() {
            return None;
        }
        let Entry { key, event } = self.heap.swap_remove(0);
        self.sink();
        Some((T::from_ticks((key >> 64) as u64), event))
    }

    /// Puts another event in the place of the next: half the work of taking one and adding one.
    ///
    /// # Panics
    /// When there is none.
    pub(crate) fn replace_first(&mut self, when: T, event: E) {
        let key = self.key(when);
        self.heap[0] = Entry { key, event };
        self.sink();
    }

    pub(crate) fn len(&self) -> usize {
        self.heap.len()
    }

    fn rise(&mut self, mut at: usize) {
        while at > 0 {
            let parent = (at - 1) / CHILDREN;
            if self.heap[parent].key < self.heap[at].key {
                break;
            }
            self.heap.swap(parent, at);
            at = parent;
        }
    }

    /// The first entry goes down to its place.
    fn sink(&mut self) {
        let mut at = 0;
        loop {
            let first = at * CHILDREN + 1;
            let least = if let Some([a, b, c, d]) = self.heap.get(first..first + CHILDREN) {
                // Without branches that could not be foreseen.
                let (left, left_key) = if b.key < a.key { (1, b.key) } else { (0, a.key) };
                let (right, right_key) = if d.key < c.key { (3, d.key) } else { (2, c.key) };
                first + if right_key < left_key { right } else { left }
            } else {
                match (first..self.heap.len()).min_by_key(|child| self.heap[*child].key) {
                    Some(least) => least,
                    None => break,
                }
            };
            if self.heap[at].key < self.heap[least].key {
                break;
            }
            self.heap.swap(at, least);
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
