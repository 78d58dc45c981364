//! One lane's part of a tensor, and the count of parts that are still out.

use crate::{CollectiveKind, Done, Failure, RawTensor};
use fanin_protocol::{Elements, Layer, Tensor, TensorTimes};
use fanin_wire::{LossBound, Participants};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// When one lane was at work on its part of an all-reduce, by [`crate::Clock`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartTimes {
    /// The lane: one a shard, the first service's shards first.
    pub lane: usize,
    /// From its first packet to its last result, over all pieces of a very long tensor.
    pub times: TensorTimes,
}

/// An all-reduce, or another collective, that waits for its parts. It calls `done` when the last part is gone, whatever became of the parts: from
/// then on nobody here can reach the tensor's memory.
pub(crate) struct AllReduce {
    ledger: Mutex<Ledger>,
    counts: Arc<Counts>,
    kind: CollectiveKind,
}

struct Ledger {
    /// The times of the lanes that are done, or the first failure.
    outcome: Result<Vec<PartTimes>, Failure>,
    /// Taken when it is called.
    done: Option<Done>,
}

/// How many all-reduces of a driver are under way, and how many came out well.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) outstanding: AtomicUsize,
    pub(crate) completed: AtomicU64,
    /// Other collectives that did.
    pub(crate) others_completed: AtomicU64,
}

impl AllReduce {
    /// Counted as outstanding until `done` was called.
    pub(crate) fn new(kind: CollectiveKind, done: Done, counts: Arc<Counts>) -> Arc<Self> {
        counts.outstanding.fetch_add(1, Ordering::Relaxed);
        let ledger = Mutex::new(Ledger { outcome: Ok(Vec::new()), done: Some(done) });
        Arc::new(Self { ledger, counts, kind })
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, lane: usize, times: TensorTimes) {
        let Ok(all) = &mut self.ledger().outcome else { return };
        match all.iter_mut().find(|part| part.lane == lane) {
            Some(PartTimes { times: whole, .. }) => {
                whole.first_sent = whole.first_sent.min(times.first_sent);
                whole.first_result = whole.first_result.min(times.first_result);
                whole.last_result = whole.last_result.max(times.last_result);
                whole.loss += times.loss;
            }
            None => all.push(PartTimes { lane, times }),
        }
    }

    pub(crate) fn fail(&self, failure: Failure) {
        let outcome = &mut self.ledger().outcome;
        if outcome.is_ok() {
            *outcome = Err(failure);
        }
    }
}

impl Drop for AllReduce {
    fn drop(&mut self) {
        let Ledger { outcome, done } = self.ledger.get_mut().unwrap_or_else(PoisonError::into_inner);
        let (outcome, done) = (std::mem::replace(outcome, Ok(Vec::new())), done.take());
        // Before the callback: who was told that it is done must not count it any more.
        if outcome.is_ok() {
            let completed = match self.kind {
                CollectiveKind::AllReduce => &self.counts.completed,
                _ => &self.counts.others_completed,
            };
            completed.fetch_add(1, Ordering::Relaxed);
        }
        self.counts.outstanding.fetch_sub(1, Ordering::Release);
        if let Some(done) = done {
            done(outcome);
        }
    }
}

/// A part of a tensor on its way through a machine. Dropping it without completing it fails the all-reduce, so that a
/// machine that is lost with its thread answers too.
pub struct Part {
    tensor: RawTensor,
    lane: usize,
    /// Elements of the whole that this is a part of.
    whole: usize,
    layer: Layer,
    loss_bound: Option<LossBound>,
    participants: Participants,
    all_reduce: Option<Arc<AllReduce>>,
}

impl Part {
    pub(crate) const fn new(
        tensor: RawTensor,
        lane: usize,
        whole: usize,
        (layer, loss_bound, participants): (Layer, Option<LossBound>, Participants),
        all_reduce: Arc<AllReduce>,
    ) -> Self {
        Self { tensor, lane, whole, layer, loss_bound, participants, all_reduce: Some(all_reduce) }
    }

    /// Without `times` when the part is empty.
    pub(crate) fn complete(mut self, times: Option<TensorTimes>) {
        if let (Some(all_reduce), Some(times)) = (self.all_reduce.take(), times) {
            all_reduce.note(self.lane, times);
        }
    }

    pub(crate) fn fail(mut self, failure: Failure) {
        if let Some(all_reduce) = self.all_reduce.take() {
            all_reduce.fail(failure);
        }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if let Some(all_reduce) = self.all_reduce.take() {
            all_reduce.fail(Failure::of_drop());
        }
    }
}

impl Tensor for Part {
    fn elements(&mut self) -> Elements<'_> {
        self.tensor.as_elements()
    }

    fn whole_elements(&mut self) -> usize {
        self.whole
    }

    fn layer(&self) -> Layer {
        self.layer
    }

    fn loss_bound(&self) -> Option<LossBound> {
        self.loss_bound
    }

    fn participants(&self) -> Participants {
        self.participants
    }
}
