//! A part of a tensor on its way round the ring.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use core::cell::Cell;
use core::ops::Range;
use fanin_quant::{Exponent, Scale};
use fanin_wire::{BlockHeader, BlockPacket, Collective, LossBound, Op, Start, WireDtype};

use crate::dlcp::config::JobConfig;
use crate::dlcp::flow::{Receiver, Sender, Waiting};
use crate::dlcp::rendezvous::Unlike;
use crate::dlcp::sums;
use crate::dlcp::tags;
use crate::machine::{Instant, Loss, Reason, Tensor};
use crate::transport::{Chunk, Stream, WorkerCore};

/// Which segment goes where in which step. Steps 0 to n - 2 are the reduce-scatter, n - 1 to 2 n -
/// 3 the all-gather.
#[derive(Clone, Copy, Debug)]
pub(super) struct Steps {
    pub(super) ranks: u32,
    pub(super) rank: u32,
}

impl Steps {
    /// Flows that a rank sends of a part, and that it gets; one that is alone counts as having one.
    pub(super) const fn count(self) -> u32 {
        if self.ranks == 1 { 1 } else { 2 * (self.ranks - 1) }
    }

    pub(super) const fn left(self) -> u32 {
        (self.rank + self.ranks - 1) % self.ranks
    }

    pub(super) const fn right(self) -> u32 {
        (self.rank + 1) % self.ranks
    }

    const fn reduces(self, step: u32) -> bool {
        step + 1 < self.ranks
    }

    /// Whether what comes in this step is the sum once the own contribution is added.
    const fn completes(self, step: u32) -> bool {
        step + 2 == self.ranks
    }

    /// The segment that this rank sends in a step: its own first, then what came in the step
    /// before.
    pub(super) const fn sends(self, step: u32) -> u32 {
        // In the all-gather one further, and so the same way round once more.
        let from = if self.reduces(step) { self.rank } else { self.rank + 1 };
        let back = if self.reduces(step) { step } else { step - (self.ranks - 1) };
        (from + self.ranks - back) % self.ranks
    }

    /// The segment that comes in a step: what the left neighbour sends.
    const fn receives(self, step: u32) -> u32 {
        Self { rank: self.left(), ..self }.sends(step)
    }

    /// The blocks of a segment of a part that has so many.
    pub(super) const fn segment(self, blocks: u32, segment: u32) -> Range<u32> {
        let (blocks, ranks) = (blocks as u64, self.ranks as u64);
        (blocks * segment as u64 / ranks) as u32..(blocks * (segment as u64 + 1) / ranks) as u32
    }

    /// The loss bound of a step.
    pub(super) const fn bound(self, start: &Start, step: u32) -> LossBound {
        if self.reduces(step) { start.bound } else { LossBound::RELIABLE }
    }
}

/// A block that came before the part was submitted here.
#[derive(Debug)]
struct Early {
    step: u32,
    block: u32,
    contributions: u16,
    payload: Box<[u8]>,
}

/// The facts known of a part once it is submitted here.
#[derive(Debug)]
pub(super) struct Shape {
    pub(super) start: Start,
    /// The stream's chunk that is its first block.
    first_chunk: u64,
    pub(super) blocks: u32,
    /// The median; a block whose mean magnitude is above it is important.
    pub(super) median: f32,
    /// How many contributions are in what the tensor holds of each block.
    pub(super) counts: Vec<u16>,
    /// Blocks that are not what all ranks will have.
    lacks: u32,
    config: JobConfig,
}

impl Shape {
    /// The stream's chunk that is this block.
    pub(super) const fn chunk(&self, block: u32) -> u64 {
        self.first_chunk + block as u64
    }
}

#[derive(Debug)]
pub(super) struct Part {
    steps: Steps,
    /// As it was announced first, from the left or here.
    start: Option<Start>,
    shape: Option<Shape>,
    has_begun: bool,
    /// By step.
    pulls: Vec<Option<Receiver>>,
    /// By step: whether it is decided what begins anew.
    decided: Vec<bool>,
    /// By step.
    pushes: Vec<Option<Sender>>,
    early: Vec<Early>,
    /// When something of it is due, once that was looked for since anything of it changed.
    due: Cell<Option<Due>>,
}

/// When a part has something to say, and when it may send blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Due {
    pub(super) signals: Option<Instant>,
    pub(super) blocks: Option<Instant>,
}

/// The announcement of a part by a rank, in each step.
pub(super) fn start(
    config: &JobConfig,
    collective: Collective,
    elements: u32,
    (priority, bound): (u8, Option<LossBound>),
) -> Start {
    let bound = config.push_bound(&collective, bound);
    Start { collective, elements, bound, priority, has_blocks: true }
}

impl Part {
    pub(super) fn new(steps: Steps) -> Self {
        let flows = || 0..steps.count();
        Self {
            steps,
            start: None,
            shape: None,
            has_begun: false,
            pulls: flows().map(|_| None).collect(),
            decided: vec![false; steps.count() as usize],
            pushes: flows().map(|_| None).collect(),
            early: Vec::new(),
            due: Cell::new(None),
        }
    }

    pub(super) fn incoming(&mut self, step: u32) -> Result<&mut Receiver, Reason> {
        self.due.set(None);
        self.pulls[step as usize].as_mut().ok_or(Reason::Unannounced)
    }

    pub(super) fn outgoing(&mut self, step: u32) -> Result<&mut Sender, Reason> {
        self.due.set(None);
        self.pushes[step as usize].as_mut().ok_or(Reason::Unexpected)
    }

    pub(super) fn senders(&mut self) -> impl Iterator<Item = (u32, &mut Sender)> {
        self.due.set(None);
        (0..).zip(&mut self.pushes).filter_map(|(step, push)| Some((step, push.as_mut()?)))
    }

    pub(super) fn receivers(&mut self) -> impl Iterator<Item = (u32, &mut Receiver)> {
        self.due.set(None);
        (0..).zip(&mut self.pulls).filter_map(|(step, pull)| Some((step, pull.as_mut()?)))
    }

    /// The flows that have blocks to send.
    pub(super) fn sending(&mut self) -> Option<(&Shape, impl Iterator<Item = (u32, &mut Sender)>)> {
        self.due.set(None);
        let senders = (0..).zip(&mut self.pushes).filter_map(|(step, push)| Some((step, push.as_mut()?)));
        Some((self.shape.as_ref()?, senders.filter(|(_, push)| push.has_blocks())))
    }

    /// The left neighbour announces what it sends in a step. An error within says that this rank
    /// has another tensor, or bound.
    pub(super) fn take_start(
        &mut self,
        now: Instant,
        step: u32,
        start: &Start,
        config: &JobConfig,
    ) -> Result<Result<(), Unlike>, Reason> {
        if let Some(unlike) = self.start.as_ref().and_then(|own| Unlike::of(start, own)) {
            return Ok(Err(unlike));
        }
        let blocks = config.blocks(&start.collective, start.elements);
        let segment = self.steps.segment(blocks, self.steps.receives(step));
        if segment.is_empty() || self.steps.ranks == 1 {
            return Err(Reason::Unexpected);
        }
        self.due.set(None);
        self.start.get_or_insert(*start);
        let bound = self.steps.bound(start, step);
        let new = || Receiver::new(segment.end - segment.start, bound, config.receiver());
        self.pulls[step as usize].get_or_insert_with(new).take_start(now);
        Ok(Ok(()))
    }

    /// A block comes from the left.
    pub(super) fn take_block<T: Tensor>(
        &mut self,
        now: Instant,
        (step, packet): (u32, &BlockPacket<'_>),
        config: &JobConfig,
        waiting: &Waiting,
        stream: &mut Stream<T>,
    ) -> Result<(), Reason> {
        self.due.set(None);
        let BlockPacket { header: BlockHeader { block, round, contributions, .. }, payload, .. } = *packet;
        let pull = self.pulls[step as usize].as_mut().ok_or(Reason::Unannounced)?;
        let Some(Start { collective, elements, .. }) = self.start else { return Err(Reason::Unannounced) };
        let segment = self.steps.segment(config.blocks(&collective, elements), self.steps.receives(step));
        // A segment has been at so many ranks before.
        let most = if self.steps.reduces(step) { step + 1 } else { self.steps.ranks };
        if block >= segment.end - segment.start || contributions == 0 || u32::from(contributions) > most {
            return Err(Reason::OutOfRange);
        }
        if payload.len() != config.bytes_of_block(&collective, elements, segment.start + block) {
            return Err(Reason::ChunkLength);
        }
        if self.decided[step as usize] {
            // It began anew without what this brings.
            return Err(Reason::Stale);
        }
        pull.take_block(now, block, round, waiting)?;
        if self.shape.is_some() {
            self.put(step, block, contributions, payload, stream);
        } else {
            self.early.push(Early { step, block, contributions, payload: payload.into() });
        }
        Ok(())
    }

    /// Puts a block where it belongs, and sends it on.
    fn put<T: Tensor>(
        &mut self,
        step: u32,
        block: u32,
        contributions: u16,
        payload: &[u8],
        stream: &mut Stream<T>,
    ) {
        let Some(shape) = &mut self.shape else { return };
        let of_part = self.steps.segment(shape.blocks, self.steps.receives(step)).start + block;
        let Some(mut chunk) = stream.locate(shape.chunk(of_part)) else { return };
        if self.steps.reduces(step) {
            let mut own = vec![0; payload.len()];
            copy_to(&mut chunk, &mut own);
            sums::add(&shape.start.collective, payload, &mut own);
            copy_from(&mut chunk, &own, 1, Op::Sum);
            self.count(step, of_part, contributions + 1, stream);
        } else {
            copy_from(&mut chunk, payload, 1, Op::Sum);
            self.count(step, of_part, contributions, stream);
        }
        self.forward(step, block);
    }

    /// So many contributions are in what the tensor has of a block; after the last step of the
    /// reduce-scatter that is its sum.
    fn count<T: Tensor>(&mut self, step: u32, of_part: u32, contributions: u16, stream: &mut Stream<T>) {
        let Some(shape) = &mut self.shape else { return };
        shape.counts[of_part as usize] = contributions;
        if self.steps.reduces(step) && !self.steps.completes(step) {
            return;
        }
        shape.lacks -= 1;
        if self.steps.completes(step)
            && let Some(mut chunk) = stream.locate(shape.chunk(of_part))
        {
            complete(&shape.config, &shape.start, of_part, contributions, &mut chunk);
        }
    }

    /// A block goes on in the next step.
    fn forward(&mut self, step: u32, block: u32) {
        let (steps, next) = (self.steps, step + 1);
        if next == steps.count() {
            return;
        }
        let Some(Shape { start, blocks, config, .. }) = &self.shape else { return };
        let segment = steps.segment(*blocks, steps.sends(next));
        let new = || Sender::streaming(segment.end - segment.start, config.rate).announced(*start);
        self.pushes[next as usize].get_or_insert_with(new).push(block);
    }

    /// Ends a flow from the left: each block that did not come begins anew with the own
    /// contribution, and that is all that goes on.
    pub(super) fn go_on<T: Tensor>(&mut self, stream: &mut Stream<T>) {
        if self.shape.is_none() {
            return;
        }
        for step in 0..self.steps.count() {
            let at = step as usize;
            let Some(pull) = self.pulls[at].as_ref().filter(|pull| pull.is_finished()) else { continue };
            if self.decided[at] {
                continue;
            }
            self.decided[at] = true;
            self.due.set(None);
            let missing: Vec<u32> = (0..pull.blocks()).filter(|block| !pull.has(*block)).collect();
            for block in missing {
                let Some(shape) = &self.shape else { return };
                let of_part = self.steps.segment(shape.blocks, self.steps.receives(step)).start + block;
                self.count(step, of_part, 1, stream);
                self.forward(step, block);
            }
            if let Some(push) = self.pushes.get_mut(at + 1).and_then(Option::as_mut) {
                push.seal();
            }
        }
    }

    /// It is submitted here, as the part of this number, whose first block is this chunk of the
    /// stream.
    pub(super) fn submit<T: Tensor>(
        &mut self,
        start: Start,
        (first_chunk, number): (u64, u32),
        config: &JobConfig,
        stream: &mut Stream<T>,
    ) -> Result<(), Unlike> {
        if let Some(unlike) = self.start.as_ref().and_then(|other| Unlike::of(other, &start)) {
            return Err(unlike);
        }
        self.start = Some(start);
        self.due.set(None);
        let blocks = config.blocks(&start.collective, start.elements);
        let mut median = 0.0;
        if let Some(mut chunk) = stream.locate(first_chunk).filter(|_| start.bound.of_blocks(blocks) > 0) {
            let begin = chunk.range().start;
            let range = begin..begin + start.elements as usize;
            median = tags::median_magnitude(&chunk.elements(), range, number.into());
        }
        let counts = vec![1; blocks as usize];
        self.shape =
            Some(Shape { start, first_chunk, blocks, median, counts, lacks: blocks, config: *config });
        for Early { step, block, contributions, payload } in core::mem::take(&mut self.early) {
            self.put(step, block, contributions, &payload, stream);
        }
        self.go_on(stream);
        Ok(())
    }

    /// Sends the own segment.
    pub(super) fn begin(&mut self) {
        let Some(shape) = self.shape.as_mut().filter(|_| !self.has_begun) else { return };
        self.has_begun = true;
        self.due.set(None);
        if self.steps.ranks == 1 {
            shape.lacks = 0;
            return;
        }
        let segment = self.steps.segment(shape.blocks, self.steps.sends(0));
        if !segment.is_empty() {
            let blocks = segment.end - segment.start;
            self.pushes[0] = Some(Sender::announcing(shape.start, blocks, shape.config.rate));
        }
    }

    /// Whether anything of it has been sent, or announced from the left.
    pub(super) fn is_under_way(&self) -> bool {
        self.has_begun || self.pulls.iter().any(Option::is_some)
    }

    /// Whether the tensor has what all have, and the right neighbour has all that it needs of it.
    pub(super) fn is_over(&self) -> bool {
        let Some(shape) = self.shape.as_ref().filter(|shape| self.has_begun && shape.lacks == 0) else {
            return false;
        };
        let sends = |step| {
            self.steps.ranks > 1 && !self.steps.segment(shape.blocks, self.steps.sends(step)).is_empty()
        };
        (0..)
            .zip(&self.pushes)
            .all(|(step, push)| !sends(step) || push.as_ref().is_some_and(Sender::is_finished))
    }

    /// Counts its blocks as done.
    pub(super) fn end<A, T: Tensor>(self, now: Instant, core: &mut WorkerCore<A, T>) {
        let Some(shape) = self.shape else { return };
        let mut rounds = self.pulls.iter().flatten().map(|pull| u32::from(pull.round())).sum();
        for (block, count) in (0..).zip(&shape.counts) {
            let Some(mut chunk) = core.stream.locate(shape.chunk(block)) else { return };
            // A rank that is alone sent nothing.
            chunk.sent(now);
            let contributions = self.steps.ranks.into();
            let lost = u64::from(self.steps.ranks) - u64::from(*count);
            let rounds = core::mem::take(&mut rounds);
            *chunk.loss() += Loss { contributions, lost, rounds, ..Loss::default() };
            let finished = chunk.finish_chunk(now);
            core.finished(finished);
        }
    }

    pub(super) fn poll_timeout(&self, link_opens: Instant) -> Option<Instant> {
        let Due { signals, blocks } = self.due();
        signals.into_iter().chain(blocks.map(|opens| opens.max(link_opens))).min()
    }

    /// When something of it is due. All parts are asked with each packet that leaves, and a packet
    /// changes one of them.
    pub(super) fn due(&self) -> Due {
        let found = self.due.get().unwrap_or_else(|| {
            let pulls = self.pulls.iter().flatten().filter_map(Receiver::poll_timeout);
            let pushes = self.pushes.iter().flatten();
            let signals = pulls.chain(pushes.clone().filter_map(Sender::poll_timeout)).min();
            Due { signals, blocks: pushes.filter(|push| push.has_blocks()).map(Sender::opens_at).min() }
        });
        self.due.set(Some(found));
        found
    }

    /// Whether it has something to say, or to act on.
    pub(super) fn has_signals(&self, now: Instant) -> bool {
        self.due().signals.is_some_and(|due| due <= now)
    }
}

/// Makes what a block's contributions add up to what its operation asks for.
fn complete<T: Tensor>(
    config: &JobConfig,
    start: &Start,
    block: u32,
    contributions: u16,
    chunk: &mut Chunk<'_, T>,
) {
    let Start { collective, elements, .. } = start;
    let mut sum = vec![0; config.bytes_of_block(collective, *elements, block)];
    copy_to(chunk, &mut sum);
    sums::scale(collective, &mut sum, contributions.into(), config.workers.into());
    copy_from(chunk, &sum, config.workers, collective.op);
}

/// Writes a chunk as it travels.
pub(super) fn copy_to<T: Tensor>(chunk: &mut Chunk<'_, T>, payload: &mut [u8]) {
    let range = chunk.range();
    match chunk.collective().wire_dtype {
        WireDtype::Native => chunk.elements().copy_to(range, payload),
        WireDtype::SharedExponent | WireDtype::Bfloat16 | WireDtype::Int8 | WireDtype::Int4 => {
            chunk.elements().quantize(range, &Scale::new(Exponent::ZERO, 1), payload);
        }
    }
}

/// Replaces a chunk by what travelled. An int32 is divided here.
fn copy_from<T: Tensor>(chunk: &mut Chunk<'_, T>, payload: &[u8], ranks: u16, op: Op) {
    let range = chunk.range();
    match chunk.collective().wire_dtype {
        WireDtype::Native => chunk.elements().copy_from(range, payload),
        WireDtype::SharedExponent | WireDtype::Bfloat16 | WireDtype::Int8 | WireDtype::Int4 => {
            let (scale, ranks) = (Scale::new(Exponent::ZERO, ranks.into()), ranks.into());
            chunk.elements().dequantize(range, payload, &scale, ranks, op);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_segment_visits_all_ranks_and_its_sum_all_once_more() {
        for ranks in 2..9 {
            let of = |rank| Steps { ranks, rank };
            for rank in 0..ranks {
                let steps = of(rank);
                assert_eq!(steps.sends(0), rank);
                for step in 0..steps.count() {
                    assert_eq!(steps.receives(step), of(steps.left()).sends(step));
                    if step + 1 < steps.count() {
                        assert_eq!(steps.sends(step + 1), steps.receives(step), "what comes goes on");
                    }
                }
                let reduced: Vec<_> = (0..ranks - 1).map(|step| steps.receives(step)).collect();
                assert!((0..ranks).all(|segment| reduced.contains(&segment) != (segment == rank)));
                let gathered: Vec<_> = (ranks - 1..steps.count()).map(|step| steps.receives(step)).collect();
                assert!((0..ranks).all(|segment| gathered.contains(&segment) != (segment == reduced[reduced.len() - 1])));
            }
            let segments: Vec<_> = (0..ranks).flat_map(|segment| of(0).segment(13, segment)).collect();
            assert_eq!(segments, (0..13).collect::<Vec<_>>());
        }
    }
}
