//! The all-reduces of one client, from submission until somebody has seen their end.
//!
//! An I/O thread that finishes one leaves its number here. It cannot let go of the Python object
//! that owns the memory: for that it would need the interpreter's lock. A Python thread does it,
//! when it next comes by.

use crate::interruptible::{self, lock};
use crate::pending::Pending;
use fanin_controller::HandOver;
use fanin_protocol::Loss;
use pyo3::prelude::*;
use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, OnceLock};
use std::time::Duration;

/// The outcome of an all-reduce.
pub(crate) type Outcome = Result<(), fanin_controller::AllReduceError>;

/// The end of one all-reduce, awaited by Python threads and set by an I/O thread.
#[derive(Default)]
pub(crate) struct Completion {
    outcome: Mutex<Option<Outcome>>,
    /// Taken by the first Python thread that has the outcome.
    hand_over: Mutex<Option<HandOver>>,
    loss: OnceLock<Loss>,
    changed: Condvar,
}

impl Completion {
    pub(crate) fn set(&self, outcome: Outcome, hand_over: HandOver) {
        if outcome.is_ok() {
            let _ = self.loss.set(hand_over.loss); // it is done once
        }
        *lock(&self.hand_over) = Some(hand_over);
        *lock(&self.outcome) = Some(outcome);
        self.changed.notify_all();
    }

    /// A Python thread has the outcome, and the interpreter's lock.
    pub(crate) fn taken(&self) {
        if let Some(hand_over) = lock(&self.hand_over).take() {
            hand_over.taken();
        }
    }

    /// The part that the sum lacks; `None` before it is there.
    pub(crate) fn loss(&self) -> Option<Loss> {
        self.loss.get().copied()
    }

    pub(crate) fn outcome(&self) -> Option<Outcome> {
        lock(&self.outcome).clone()
    }

    /// `None` after `timeout`.
    pub(crate) fn wait(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<Option<Outcome>> {
        interruptible::wait(py, &self.outcome, &self.changed, timeout, None, |outcome| outcome.clone())
    }
}

/// Number of an all-reduce within its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Ticket {
    number: u64,
    /// Whether `next_completion` hands it out.
    notify: bool,
}

#[derive(Default)]
pub(crate) struct Ledger {
    /// Holds each pending object, and through it the memory, until its end was seen: a caller may
    /// drop his. Used by threads that hold the interpreter's lock, and no object is dropped under
    /// this one: its destructor may be Python that comes back here.
    held: Mutex<Held>,
    /// The all-reduces that the I/O threads have finished. They only take this lock, and hold it
    /// for a moment.
    finished: Mutex<Finished>,
    changed: Condvar,
}

#[derive(Default)]
struct Held {
    next_number: u64,
    pending: HashMap<Ticket, Py<Pending>>,
}

#[derive(Default)]
struct Finished {
    /// To be handed out.
    notify: VecDeque<Ticket>,
    /// To be let go.
    silent: Vec<Ticket>,
    /// Submitted with `notify` and not handed out yet.
    owed: usize,
    closed: bool,
}

impl Ledger {
    /// Enters an all-reduce before it is submitted. `make` creates its object.
    pub(crate) fn enter<'py>(
        &self,
        notify: bool,
        make: impl FnOnce(Ticket) -> PyResult<Bound<'py, Pending>>,
    ) -> PyResult<(Ticket, Bound<'py, Pending>)> {
        let number = {
            let mut held = lock(&self.held);
            held.next_number += 1;
            held.next_number
        };
        let ticket = Ticket { number, notify };
        let pending = make(ticket)?;
        lock(&self.held).pending.insert(ticket, pending.clone().unbind());
        if notify {
            lock(&self.finished).owed += 1;
        }
        Ok((ticket, pending))
    }

    /// Takes back an entry that was never submitted.
    pub(crate) fn cancel(&self, ticket: Ticket) {
        if ticket.notify {
            lock(&self.finished).owed -= 1;
            // It may have been the last that a closed client owed.
            self.changed.notify_all();
        }
        drop(self.take(ticket));
    }

    /// For the I/O threads: the all-reduce is over, and its memory out of their reach.
    pub(crate) fn finish(&self, ticket: Ticket) {
        let mut finished = lock(&self.finished);
        if ticket.notify {
            finished.notify.push_back(ticket);
            self.changed.notify_one();
        } else {
            finished.silent.push(ticket);
        }
    }

    /// The next finished all-reduce that was submitted with `notify`; `None` when there will be
    /// none any more.
    pub(crate) fn next(&self, py: Python<'_>) -> PyResult<Option<Py<Pending>>> {
        loop {
            let next = interruptible::wait(py, &self.finished, &self.changed, None, None, |finished| {
                let next = finished.notify.pop_front();
                if next.is_some() {
                    finished.owed -= 1;
                }
                let drained = finished.closed && finished.owed == 0;
                (next.is_some() || drained).then_some((next, drained))
            })?;
            let Some((next, drained)) = next else { continue };
            if drained {
                // The others wait for what will not come.
                self.changed.notify_all();
            }
            let Some(ticket) = next else { return Ok(None) };
            if let Some(pending) = self.take(ticket) {
                pending.get().taken();
                return Ok(Some(pending));
            }
        }
    }

    /// Lets go of an all-reduce whose end the caller has seen. Tickets that are to be handed out
    /// stay until they were.
    pub(crate) fn seen(&self, ticket: Ticket) {
        if !ticket.notify {
            drop(self.take(ticket));
        }
    }

    /// Lets go of all that are over and awaited by nobody. To be called now and then, with the
    /// interpreter's lock.
    pub(crate) fn reap(&self, _py: Python<'_>) {
        let silent = std::mem::take(&mut lock(&self.finished).silent);
        for ticket in silent {
            drop(self.take(ticket));
        }
    }

    /// Nothing is entered any more: who waits in [`Self::next`] gets what is left, and then `None`.
    pub(crate) fn close(&self) {
        lock(&self.finished).closed = true;
        self.changed.notify_all();
    }

    /// After [`Self::close`], once all are finished: lets go of those too that nobody fetched.
    pub(crate) fn abandon(&self, py: Python<'_>) {
        self.reap(py);
        let notify = {
            let mut finished = lock(&self.finished);
            let notify = std::mem::take(&mut finished.notify);
            finished.owed -= notify.len();
            notify
        };
        for ticket in notify {
            drop(self.take(ticket));
        }
    }

    fn take(&self, ticket: Ticket) -> Option<Py<Pending>> {
        lock(&self.held).pending.remove(&ticket)
    }
}
