//! What happens when: a queue of events in virtual time, ties in the order of their making.
//!
//! A heap with four children a node, the events inside it: half as deep as a binary one, and the children that are
//! compared lie side by side.

#[derive(Debug)]
struct Entry<T, E> {
    when: T,
    /// Breaks ties.
    made: u64,
    event: E,
}

impl<T: Ord + Copy, E> Entry<T, E> {
    fn key(&self) -> (T, u64) {
        (self.when, self.made)
    }
}

const CHILDREN: usize = 4;

/// Events by time.
#[derive(Debug)]
pub(crate) struct Agenda<T, E> {
    heap: Vec<Entry<T, E>>,
    made: u64,
}

impl<T: Ord + Copy, E> Agenda<T, E> {
    pub(crate) const fn new() -> Self {
        Self { heap: Vec::new(), made: 0 }
    }

    pub(crate) fn at(&mut self, when: T, event: E) {
        self.heap.push(Entry { when, made: self.made, event });
        self.made += 1;
        self.rise(self.heap.len() - 1);
    }

    /// When the next event is.
    pub(crate) fn due(&self) -> Option<T> {
        self.heap.first().map(|entry| entry.when)
    }

    pub(crate) fn next(&mut self) -> Option<(T, E)> {
        if self.heap.is_empty() {
            return None;
        }
        let Entry { when, event, .. } = self.heap.swap_remove(0);
        self.sink();
        Some((when, event))
    }

    pub(crate) fn len(&self) -> usize {
        self.heap.len()
    }

    fn rise(&mut self, mut at: usize) {
        while at > 0 {
            let parent = (at - 1) / CHILDREN;
            if self.heap[parent].key() <= self.heap[at].key() {
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
            let last = (first + CHILDREN).min(self.heap.len());
            let Some(least) = (first..last).min_by_key(|child| self.heap[*child].key()) else { break };
            if self.heap[at].key() <= self.heap[least].key() {
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
            let when = dice.rand_range(0..300);
            agenda.at(when, made);
            expected.push((when, made));
        }
        expected.sort_unstable();
        assert_eq!(agenda.due(), Some(expected[0].0));
        let came: Vec<_> = std::iter::from_fn(|| agenda.next()).collect();
        assert_eq!(came, expected);
        assert_eq!(agenda.len(), 0);
    }
}
