//! What happens when: a queue of events in virtual time, ties in the order of their making.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use fanin_protocol::Instant;

#[derive(Debug)]
pub(crate) struct Agenda<E> {
    order: BinaryHeap<Reverse<(Instant, u64)>>,
    events: BTreeMap<u64, E>,
    made: u64,
}

impl<E> Agenda<E> {
    pub(crate) const fn new() -> Self {
        Self { order: BinaryHeap::new(), events: BTreeMap::new(), made: 0 }
    }

    pub(crate) fn at(&mut self, when: Instant, event: E) {
        self.order.push(Reverse((when, self.made)));
        self.events.insert(self.made, event);
        self.made += 1;
    }

    pub(crate) fn next(&mut self) -> Option<(Instant, E)> {
        let Reverse((when, key)) = self.order.pop()?;
        self.events.remove(&key).map(|event| (when, event))
    }

    pub(crate) fn len(&self) -> usize {
        self.events.len()
    }
}
