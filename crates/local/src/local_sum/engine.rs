//! The rank's thread, as it goes from one of its tasks to the next.

use super::item::Item;
use super::{Ending, Network, Shared};
use crate::cut::{Cut, Stretch};
use crate::error::LocalError;
use crate::gate::{CONTRIBUTED, GATES, Party, READ, READY, SUMMED};
use crate::sums;
use fanin_udp::{Failure, Loss, RawTensor};
use fanin_wire::Dtype;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// How often a rank that waits looks whether those that it waits for are alive.
const LOOK: Duration = Duration::from_millis(100);
/// The same while it has nothing to do.
const IDLE: Duration = Duration::from_secs(1);

/// How far the thread is with one of its tasks. All walk the same way.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cursor {
    item: u64,
    /// Of the item.
    segment: usize,
    /// Of the segment.
    block: usize,
    /// Since the group began.
    segments: u64,
    blocks: u64,
}

pub(super) struct Engine {
    pub shared: Arc<Shared>,
    pub network: Option<Box<dyn Network>>,
    pub items: VecDeque<Item>,
    pub contribute: Cursor,
    pub sum: Cursor,
    pub read: Cursor,
    /// When the last item was over.
    pub progressed: Instant,
    pub looked: Instant,
}

/// Why a task cannot go on: a gate is not open so far.
type Wish = (usize, u64);

impl Cursor {
    fn pass_block(&mut self, cut: &Cut, blocks: usize) {
        self.block += 1;
        self.blocks += 1;
        if self.block == blocks {
            self.block = 0;
            self.pass_segment(cut);
        }
    }

    fn pass_segment(&mut self, cut: &Cut) {
        self.segment += 1;
        self.segments += 1;
        if self.segment == cut.segments() {
            self.segment = 0;
            self.item += 1;
        }
    }
}

impl Engine {
    pub fn run(mut self) {
        // A thread that panics must not keep the others waiting.
        struct Guard(Arc<Shared>);
        impl Drop for Guard {
            fn drop(&mut self) {
                if thread::panicking() {
                    self.0.fail(Failure::Stopped);
                }
                self.0.memory.leave();
            }
        }
        let _guard = Guard(Arc::clone(&self.shared));
        loop {
            let (ended, stopped) = {
                let mut inbox = self.shared.inbox();
                self.items.append(&mut inbox.items);
                (inbox.ended.clone(), inbox.stopped)
            };
            if let Some(failure) = ended {
                if !stopped {
                    self.read_what_is_whole();
                }
                for mut item in self.items.drain(..) {
                    item.over(Err(failure.clone()));
                }
                if stopped {
                    return;
                }
                let seat = self.shared.memory.seat(self.shared.memory.me);
                let heard = seat.listen();
                if !self.shared.inbox().stopped {
                    seat.sleep(heard, IDLE);
                }
                continue;
            }
            if let Some(ending) = Ending::unpack(self.shared.memory.ended().load(Ordering::Acquire)) {
                let failure = Failure::Because(Arc::new(self.error(ending)));
                self.shared.inbox().ended.get_or_insert(failure);
                continue;
            }
            while self.step() {}
            self.wait();
        }
    }

    /// Does one thing, what frees most first; whether there was one.
    fn step(&mut self) -> bool {
        if self.shared.memory.ended().load(Ordering::Relaxed) != 0 {
            return false;
        }
        let [contribute, sum, read] = self.possible();
        if read {
            self.read();
        } else if sum {
            self.sum();
        } else if contribute {
            self.contribute();
        }
        read || sum || contribute
    }

    /// A sum that is whole is every rank's, even if somebody got it sooner and is gone.
    fn read_what_is_whole(&mut self) {
        while let [_, _, true] = self.possible() {
            self.read();
        }
    }

    /// The tasks that can go on.
    fn possible(&self) -> [bool; 3] {
        let is_open = |wish: Option<Wish>| {
            wish.is_none_or(|(gate, until)| self.shared.memory.gate(gate).open() >= until)
        };
        self.wishes().map(|wishes| wishes.is_some_and(|wishes| wishes.into_iter().all(is_open)))
    }

    /// The wishes of each task; `None` for one that has nothing to do.
    fn wishes(&self) -> [Option<[Option<Wish>; 2]>; 3] {
        let layout = &self.shared.memory.layout;
        // Free when the one before in its place is not needed any more.
        let free =
            |gate: usize, unit: u64, places: usize| Some((gate, (unit + 1).saturating_sub(places as u64)));
        let Cursor { blocks, segments, .. } = self.contribute;
        let contribute = self.item(self.contribute.item).map(|item| {
            // Bytes that are only moved are written to where they are read.
            let place = || free(READ, segments, layout.segments);
            [free(SUMMED, blocks, layout.contributions), if item.kind.adds() { None } else { place() }]
        });
        let is_column = self.shared.memory.me < layout.blocks.columns;
        let sum = (is_column && self.sum.blocks < blocks).then(|| {
            [Some((CONTRIBUTED, self.sum.blocks + 1)), free(READ, self.sum.segments, layout.segments)]
        });
        let before = if is_column { self.sum } else { self.contribute };
        let begun = (self.read.item, self.read.segment) < (before.item, before.segment);
        let read = self.item(self.read.item).filter(|_| begun).map(|item| {
            let is_there = !self.shared.memory.group.networked && item.awaits_no_column();
            [(!is_there).then_some((READY, self.read.segments + 1)), None]
        });
        [contribute, sum, read]
    }

    fn item(&self, number: u64) -> Option<&Item> {
        let first = self.items.front()?.number;
        self.items.get(usize::try_from(number.checked_sub(first)?).ok()?)
    }

    fn item_mut(&mut self, number: u64) -> &mut Item {
        let first = self.items.front().map_or(0, |item| item.number);
        &mut self.items[(number - first) as usize]
    }

    /// Writes this rank's part of a block, except the column that it sums itself. If nothing is
    /// added, writes what it has for the others.
    fn contribute(&mut self) {
        let shared = Arc::clone(&self.shared);
        let (memory, mut at) = (&shared.memory, self.contribute);
        let number = at.item;
        let item = self.item_mut(number);
        item.begun.get_or_insert_with(Instant::now);
        let submission = item.submission();
        let Item { tensors, cut, own, kind, .. } = item;
        let segment = cut.segment(at.segment);
        if !submission.participants.contains(memory.rank()) {
            // Nobody reads what it would write.
        } else if kind.adds() {
            for column in (0..cut.columns()).filter(|column| *column != memory.me) {
                let mut offset = cut.piece_offset(column);
                for Stretch { tensor, of_tensor, .. } in cut.piece(segment, column, at.block) {
                    let of_tensor = bytes(cut.dtype, of_tensor);
                    let place = offset..offset + of_tensor.len();
                    offset = place.end;
                    // SAFETY: the gate SUMMED was open for the block that was in this place, and
                    // CONTRIBUTED is not yet told.
                    let place = unsafe { memory.own_contribution(at.blocks, place) };
                    place.copy_from_slice(&tensors[tensor].as_bytes()[of_tensor]);
                }
            }
        } else if let Some(own) = *own {
            let Stretch { of_tensor, of_segment, .. } = segment.of(own);
            // SAFETY: the gate READ was open for the segment that was in this place, and
            // CONTRIBUTED is not yet told. Ranks that write have a place each. Ranks that disagree
            // may not, and nobody reads what these have written.
            let place = unsafe { memory.own_result(at.segments, bytes(cut.sum_dtype, of_segment)).as_mut() };
            place.copy_from_slice(&tensors[own].as_bytes()[bytes(cut.dtype, of_tensor)]);
        }
        memory.seat(memory.me).submit((at.blocks % memory.layout.contributions as u64) as usize, submission);
        shared.arrive(CONTRIBUTED, at.blocks);
        at.pass_block(cut, segment.blocks);
        if at.item != number {
            item.contributed = Some(Instant::now());
        }
        self.contribute = at;
    }

    /// Adds up this rank's column of a block, if there is something to add, and hands a whole
    /// segment on.
    fn sum(&mut self) {
        let shared = Arc::clone(&self.shared);
        let (memory, mut at) = (&shared.memory, self.sum);
        let (networked, world_size) = (memory.group.networked, shared.places.machines.len());
        let slot = (at.blocks % memory.layout.contributions as u64) as usize;
        let item = self.item_mut(at.item);
        let ours = item.submission();
        let other = |rank: &usize| memory.seat(*rank).submission(slot) != Some(ours);
        if let Some(other) = (0..memory.layout.ranks).find(other) {
            let ending = Ending::Mismatch { slot: slot as u8, first: memory.me as u8, second: other as u8 };
            return shared.end(ending);
        }
        // If there are other machines, the mean is taken of the whole sum, when it is read.
        let divisor = item.divisor(world_size).filter(|_| !networked);
        let Item { tensors, cut, kind, .. } = &mut *item;
        let segment = cut.segment(at.segment);
        let mut offset = cut.piece_offset(memory.me);
        let piece = if kind.adds() { Some(cut.piece(segment, memory.me, at.block)) } else { None };
        for Stretch { tensor, of_tensor, of_segment } in piece.into_iter().flatten() {
            let own: &[u8] = &tensors[tensor].as_bytes()[bytes(cut.dtype, of_tensor)];
            let theirs = offset..offset + own.len();
            offset = theirs.end;
            let parts: Vec<&[u8]> = (0..memory.layout.ranks)
                .filter(|rank| ours.participants.contains(memory.rank_of(*rank)))
                .map(|rank| {
                    if rank == memory.me {
                        return own;
                    }
                    // SAFETY: the gate CONTRIBUTED is open for the block, and SUMMED not yet told.
                    unsafe { memory.contribution(rank, at.blocks, theirs.clone()) }
                })
                .collect();
            // SAFETY: the gate READ was open for the segment that was in this place; READY is told
            // after its last block, and this rank reads no earlier.
            let sum = unsafe { memory.own_result(at.segments, bytes(cut.sum_dtype, of_segment)).as_mut() };
            if !parts.is_empty() {
                sums::sum(cut.dtype, &parts, divisor, cut.sum_dtype, sum);
            }
        }
        shared.arrive(SUMMED, at.blocks);
        let (number, is_last) = (at.segments, at.block + 1 == segment.blocks);
        let slices: Vec<_> = cut.slices(segment, memory.me).collect();
        let sum_dtype = cut.sum_dtype;
        at.pass_block(cut, segment.blocks);
        let goes_on = is_last && networked && slices.iter().any(|slice| !slice.is_empty());
        let slice = |slice: Range<usize>| {
            // SAFETY: as above, and what others have written here was before CONTRIBUTED: until
            // READY is told, which `done` does.
            let memory = unsafe { memory.own_result(number, bytes(sum_dtype, slice.clone())) };
            // SAFETY: it is aligned, at the memory's page plus a multiple of its elements; it is
            // mapped as long as `shared` lives, which `done` holds.
            let tensor = unsafe { RawTensor::new(memory.cast().as_ptr(), slice.len(), sum_dtype) };
            let Ok(tensor) = tensor else {
                unreachable!("a slice of a mapping is aligned and fits into memory")
            };
            tensor
        };
        let over_machines =
            goes_on.then(|| item.over_machines(&shared.places, slices.into_iter().map(slice).collect()));
        self.sum = at;
        match (&self.network, over_machines) {
            (Some(network), Some(submission)) => {
                let shared = Arc::clone(&shared);
                network.submit(
                    submission,
                    Box::new(move |result| match result {
                        Ok(loss) => shared.is_ready(number, loss),
                        Err(failure) => shared.fail(failure),
                    }),
                );
            }
            _ if is_last => shared.is_ready(number, Loss::default()),
            _ => {}
        }
    }

    /// Takes what this rank gets of a segment.
    fn read(&mut self) {
        let summed = Instant::now();
        let shared = Arc::clone(&self.shared);
        let (memory, mut at) = (&shared.memory, self.read);
        let (networked, world_size) = (memory.group.networked, shared.places.machines.len());
        let item = self.item_mut(at.item);
        if networked && (0..item.cut.tensors()).any(|tensor| item.gets(tensor)) {
            let slot = memory.segment_slot(at.segments);
            (0..memory.layout.blocks.columns).for_each(|column| item.loss += memory.seat(column).loss(slot));
        }
        let segment = item.cut.segment(at.segment);
        let divisor = item.divisor(world_size).filter(|_| networked);
        let takes_part = item.participants.contains(memory.rank());
        for tensor in 0..item.cut.tensors() {
            if !takes_part || !item.gets(tensor) {
                continue;
            }
            let Cut { dtype, sum_dtype, .. } = item.cut;
            let Stretch { of_tensor, of_segment, .. } = segment.of(tensor);
            // SAFETY: the gate READY is open for the segment, or CONTRIBUTED for what others wrote
            // here, or it is what this rank summed itself; READ is not yet told.
            let sums = unsafe { memory.result(at.segments, bytes(sum_dtype, of_segment)) };
            let out = &mut item.tensors[tensor].as_bytes()[bytes(dtype, of_tensor)];
            sums::finish(sum_dtype, sums, divisor, dtype, out);
        }
        shared.arrive(READ, at.segments);
        at.pass_segment(&item.cut);
        self.read = at;
        if at.segment == 0
            && let Some(mut item) = self.items.pop_front()
        {
            self.progressed = Instant::now();
            let completed = item.completed(summed);
            item.over(Ok(completed));
        }
    }

    /// Sleeps until a task can go on, something is submitted, or somebody has to be looked after.
    fn wait(&mut self) {
        let shared = Arc::clone(&self.shared);
        let memory = &shared.memory;
        let seat = memory.seat(memory.me);
        let heard = seat.listen();
        let shut: Vec<Wish> = self.shut();
        for (gate, until) in &shut {
            memory.gate(*gate).want(memory.me, *until);
        }
        // Once more: what happened before the wishes were there has not rung.
        let is_as_it_was = self.shut() == shut && memory.ended().load(Ordering::SeqCst) == 0 && {
            let inbox = shared.inbox();
            inbox.items.is_empty() && inbox.ended.is_none()
        };
        if is_as_it_was && !self.end_if_left(&shut) {
            seat.sleep(heard, if self.items.is_empty() { IDLE } else { LOOK });
        }
        for gate in 0..GATES {
            memory.gate(gate).want_nothing(memory.me);
        }
        if self.looked.elapsed() >= LOOK {
            self.looked = Instant::now();
            self.look(&shut);
        }
    }

    /// The wishes of the tasks now.
    fn shut(&self) -> Vec<Wish> {
        let wishes = self.wishes().into_iter().flatten().flatten().flatten();
        wishes.filter(|(gate, until)| self.shared.memory.gate(*gate).open() < *until).collect()
    }

    /// Ranks of this machine that have not arrived at what is waited for.
    fn awaited(&self, shut: &[Wish]) -> impl Iterator<Item = usize> {
        let memory = &self.shared.memory;
        let is_awaited = move |rank: &usize| {
            shut.iter().any(|(gate, until)| {
                let takes_part = *rank < memory.layout.blocks.columns || matches!(*gate, CONTRIBUTED | READ);
                takes_part && memory.seat(*rank).reached(*gate) < *until
            })
        };
        (0..memory.layout.ranks).filter(is_awaited).collect::<Vec<_>>().into_iter()
    }

    fn end_if_left(&self, shut: &[Wish]) -> bool {
        let memory = &self.shared.memory;
        let left = self.awaited(shut).find(|rank| memory.seat(*rank).party() == Party::Left);
        if let Some(rank) = left {
            self.shared.end(Ending::Left(memory.group.ranks[rank]));
        }
        left.is_some()
    }

    /// Whether everybody is alive, and the collectives take no longer than they may.
    fn look(&self, shut: &[Wish]) {
        let memory = &self.shared.memory;
        if let Some(rank) = (0..memory.layout.ranks).find(|rank| memory.is_dead(*rank)) {
            return self.shared.end(Ending::Lost(memory.group.ranks[rank]));
        }
        let Some(first) = self.items.front() else { return };
        let waited = first.submitted.max(self.progressed).elapsed();
        let timeout = Duration::from_nanos(self.shared.timeout_nanos.load(Ordering::Relaxed));
        // The network looks after a rank that waits for it alone, as long as that may take. After
        // that he is stopped.
        let by_network = memory.group.networked && waited < timeout.saturating_mul(2);
        let by_ranks: Vec<Wish> =
            shut.iter().copied().filter(|(gate, _)| *gate != READY || !by_network).collect();
        let mut missing: Vec<u32> = self.awaited(&by_ranks).map(|rank| memory.group.ranks[rank]).collect();
        missing.retain(|rank| *rank != memory.group.ranks[memory.me]);
        if waited < timeout || missing.is_empty() {
            return;
        }
        let failure = Failure::Because(Arc::new(LocalError::Timeout { missing, waited }));
        self.shared.inbox().ended.get_or_insert(failure);
        self.shared.end(Ending::Timeout(memory.group.ranks[memory.me]));
    }

    /// The error that the end is to this rank.
    fn error(&self, ending: Ending) -> LocalError {
        let memory = &self.shared.memory;
        match ending {
            Ending::Lost(rank) => LocalError::Lost { rank },
            Ending::Left(rank) => LocalError::Left { rank },
            Ending::Ended(rank) | Ending::Timeout(rank) => LocalError::Ended { rank },
            Ending::Mismatch { slot, first, second } => {
                let of = |rank: u8| {
                    let submission = memory.seat(rank.into()).submission(slot.into());
                    submission.map(|submission| (memory.group.ranks[usize::from(rank)], submission))
                };
                match (of(first), of(second)) {
                    (Some(first), Some(second)) => LocalError::Mismatch { first, second },
                    _ => LocalError::Ended { rank: memory.group.ranks[usize::from(first)] },
                }
            }
        }
    }
}

/// So many elements, as bytes.
const fn bytes(dtype: Dtype, elements: Range<usize>) -> Range<usize> {
    let each = dtype.element_bytes();
    elements.start * each..elements.end * each
}
