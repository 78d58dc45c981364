//! A collective of a rank.

use super::{Counts, DoneOf, Places, Shared};
use crate::cut::Cut;
use crate::error;
use fanin_udp::{CollectiveKind, Failure, RawTensor, Submission};
use fanin_wire::{Op, Operation, Pattern, WorkerId};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// A collective. Dropped, it fails.
pub(super) struct Item {
    pub number: u64,
    pub kind: CollectiveKind,
    pub op: Op,
    /// The root of a collective that has one.
    pub root: Option<WorkerId>,
    /// A single tensor; or one a rank, as [`Places`] orders them.
    pub tensors: Vec<RawTensor>,
    /// Which one this rank alone gets, or has what all get.
    pub own: Option<usize>,
    pub cut: Cut,
    pub submitted: Instant,
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
        let mut root = None;
        let tensor = |(tensor, operation): (RawTensor, Operation)| {
            if let (
                CollectiveKind::Reduce | CollectiveKind::Broadcast,
                Pattern::Reduce(rank) | Pattern::Broadcast(rank),
            ) = (kind, operation.pattern)
            {
                root = Some(rank);
            }
            tensor
        };
        let mut tensors: Vec<_> = submission.into_parts().into_iter().map(tensor).collect();
        let is_each = matches!(kind, CollectiveKind::ReduceScatter | CollectiveKind::AllGather);
        let (groups, own) = if is_each {
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
            tensors,
            own,
            cut: Cut::new(memory.layout.blocks, Arc::clone(groups), kind.adds(), dtype, elements),
            submitted: Instant::now(),
            counts: Arc::clone(&shared.counts),
            done: Some(done),
        }
    }

    /// Whether this rank gets something into a tensor.
    pub fn gets(&self, tensor: usize) -> bool {
        match self.kind {
            CollectiveKind::AllReduce => true,
            CollectiveKind::Reduce | CollectiveKind::ReduceScatter => self.own == Some(tensor),
            CollectiveKind::Broadcast | CollectiveKind::AllGather => self.own != Some(tensor),
        }
    }

    /// Whether what other columns sum is nothing to this rank, where there is no other machine.
    pub fn awaits_no_column(&self) -> bool {
        match self.kind {
            CollectiveKind::AllReduce => false,
            CollectiveKind::Reduce => self.own.is_none(),
            CollectiveKind::ReduceScatter | CollectiveKind::Broadcast | CollectiveKind::AllGather => true,
        }
    }

    /// The same over the machines, of a column's slices: one; or one a machine.
    pub fn over_machines(&self, places: &Places, mut slices: Vec<RawTensor>) -> Submission {
        let root = self.root.map_or(WorkerId(0), |rank| places.machine(rank));
        match (self.kind, slices.pop()) {
            (CollectiveKind::AllReduce, Some(slice)) => Submission::all_reduce(slice, Op::Sum),
            (CollectiveKind::Reduce, Some(slice)) => Submission::reduce(slice, Op::Sum, root),
            (CollectiveKind::Broadcast, Some(slice)) => Submission::broadcast(slice, root),
            (kind, last) => {
                slices.extend(last);
                match kind {
                    CollectiveKind::ReduceScatter => Submission::reduce_scatter(slices, Op::Sum),
                    _ => Submission::all_gather(slices),
                }
            }
        }
    }

    pub fn over(&mut self, result: Result<(), Failure>) {
        if let Some(done) = self.done.take() {
            // Before the callback: who was told that it is done must not count it any more.
            self.counts.outstanding.fetch_sub(1, Ordering::Release);
            let completed = match self.kind {
                CollectiveKind::AllReduce => &self.counts.completed,
                _ => &self.counts.others_completed,
            };
            completed.fetch_add(u64::from(result.is_ok()), Ordering::Relaxed);
            done(self.number, result);
        }
    }

    pub fn submission(&self) -> error::Submission {
        let Cut { dtype, elements, .. } = self.cut;
        let root = self.root.map_or(0, |root| root.0);
        error::Submission { number: self.number, kind: self.kind, root, elements, dtype, op: self.op }
    }
}
