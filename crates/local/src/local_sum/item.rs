//! A collective of a rank.

use super::{Completed, Counts, DoneOf, Places, Shared};
use crate::cut::Cut;
use crate::error;
use fanin_udp::{CollectiveKind, Failure, Layer, Loss, RawTensor, Submission};
use fanin_wire::{LossBound, Op, Participants, Pattern, WorkerId};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

/// A collective. Dropped, it fails.
pub(super) struct Item {
    pub number: u64,
    pub kind: CollectiveKind,
    pub op: Op,
    /// The root of a collective that has one.
    pub root: Option<WorkerId>,
    /// Between machines.
    pub layer: Layer,
    pub loss_bound: Option<LossBound>,
    /// Ranks of the job.
    pub participants: Participants,
    /// The losses of the segments that were read.
    pub loss: Loss,
    /// A single tensor; or one a rank, as [`Places`] orders them.
    pub tensors: Vec<RawTensor>,
    /// Which one this rank alone gets, or has what all get.
    pub own: Option<usize>,
    pub cut: Cut,
    pub submitted: Instant,
    /// When the rank began to contribute, and when it had.
    pub begun: Option<Instant>,
    pub contributed: Option<Instant>,
    pub counts: Arc<Counts>,
    pub done: Option<DoneOf>,
}

impl Drop for Item {
    fn drop(&mut self) {
        self.over(Err(Failure::Stopped));
    }
}

impl Item {
    pub fn new(shared: &Shared, number: u64, submission: Submission, done: DoneOf) -> Self {
        let (memory, places) = (&shared.memory, &shared.places);
        let (kind, op) = (submission.kind(), submission.op());
        let (layer, loss_bound) = (submission.layer(), submission.loss_bound());
        let participants = submission.participants();
        let (mut tensors, operations): (Vec<_>, Vec<_>) = submission.into_parts().into_iter().unzip();
        let is_sliced = kind.is_sliced();
        let root = match operations[0].pattern {
            Pattern::Reduce(root) | Pattern::Broadcast(root) if !is_sliced => Some(root),
            _ => None,
        };
        let (groups, own) = if is_sliced {
            // Sorted by their places.
            let mut of_ranks: Vec<_> = tensors.into_iter().map(Some).collect();
            tensors = places.order.iter().filter_map(|rank| of_ranks[*rank].take()).collect();
            (&places.of_each, places.order.iter().position(|rank| *rank == places.me))
        } else {
            (&places.of_one, root.filter(|root| usize::from(root.0) == places.me).map(|_| 0))
        };
        let (dtype, elements) = (tensors[0].dtype(), tensors[0].elements());
        assert!(
            tensors.len() == groups[groups.len() - 1]
                && tensors.iter().all(|tensor| (tensor.dtype(), tensor.elements()) == (dtype, elements)),
            "one slice a rank, all alike"
        );
        Self {
            number,
            kind,
            op,
            root,
            layer,
            loss_bound,
            participants,
            loss: Loss::default(),
            tensors,
            own,
            cut: Cut::new(memory.layout.blocks, Arc::clone(groups), kind.adds(), dtype, elements),
            submitted: Instant::now(),
            begun: None,
            contributed: None,
            counts: Arc::clone(&shared.counts),
            done: Some(done),
        }
    }

    /// Whether this rank gets something into a tensor.
    pub fn gets(&self, tensor: usize) -> bool {
        match self.pattern() {
            Pattern::AllReduce => true,
            Pattern::Reduce(_) => self.own == Some(tensor),
            Pattern::Broadcast(_) => self.own != Some(tensor),
        }
    }

    /// Whether what other columns sum is nothing to this rank, where there is no other machine.
    pub fn awaits_no_column(&self) -> bool {
        match self.pattern() {
            Pattern::AllReduce => false,
            Pattern::Reduce(_) => self.kind.is_sliced() || self.own.is_none(),
            Pattern::Broadcast(_) => true,
        }
    }

    fn pattern(&self) -> Pattern {
        self.kind.pattern(self.root.unwrap_or(WorkerId(0)))
    }

    /// The divisor of an average in a job of so many ranks.
    pub fn divisor(&self, world_size: usize) -> Option<u32> {
        let count = match self.participants {
            Participants::ALL => world_size as u32,
            some => some.0.count_ones(),
        };
        (self.op == Op::Average).then_some(count)
    }

    /// The same over the machines, of a column's slices: one; or one a machine.
    pub fn over_machines(&self, places: &Places, slices: Vec<RawTensor>) -> Submission {
        let root = self.root.map_or(WorkerId(0), |rank| places.machine(rank));
        let submission = Submission::new(self.kind, slices, Op::Sum, root);
        let participants = places.machines_of(self.participants);
        submission.of_layer(self.layer).losing(self.loss_bound).among(participants)
    }

    /// It came out well; this rank read the last part of its sum from `summed` on.
    pub fn completed(&self, summed: Instant) -> Completed {
        let (Some(begun), Some(contributed)) = (self.begun, self.contributed) else {
            unreachable!("the last part is read when all is contributed")
        };
        Completed { loss: self.loss, begun, contributed, summed }
    }

    pub fn over(&mut self, result: Result<Completed, Failure>) {
        if let Some(done) = self.done.take() {
            // Before the callback: who was told that it is done must not count it any more.
            self.counts.outstanding.fetch_sub(1, Ordering::Release);
            let completed = match self.kind {
                CollectiveKind::AllReduce => &self.counts.completed,
                _ => &self.counts.others_completed,
            };
            if let Ok(Completed { loss, .. }) = result {
                completed.fetch_add(1, Ordering::Relaxed);
                *self.counts.loss.lock().unwrap_or_else(PoisonError::into_inner) += loss;
            }
            done(self.number, result);
        }
    }

    pub fn submission(&self) -> error::Submission {
        let Cut { dtype, elements, .. } = self.cut;
        let root = self.root.map_or(0, |root| root.0);
        let Self { number, kind, op, .. } = *self;
        let loss_bound = self.loss_bound.unwrap_or_default();
        let participants = self.participants;
        error::Submission { number, kind, root, elements, dtype, op, loss_bound, participants }
    }
}
