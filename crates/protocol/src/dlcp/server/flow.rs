//! A flow of all workers at the server: what comes from each, the sums, and what goes back to each.

use alloc::vec::Vec;
use fanin_wire::{BlockHeader, FlowId, Start, WorkerId};

use crate::dlcp::config::JobConfig;
use crate::dlcp::flow::{Receiver, ReceiverConfig, Sender, Waiting};
use crate::dlcp::sums::{Memory, Sums};
use crate::machine::{Instant, Reason};

/// A flow under way.
#[derive(Debug)]
pub(super) struct Flow {
    pub(super) id: FlowId,
    /// Its first announcement.
    pub(super) start: Start,
    /// The worker that announced it first, and when.
    pub(super) first: (WorkerId, Instant),
    pub(super) blocks: u32,
    /// By place; `None` before it was announced from there.
    pub(super) pushes: Vec<Option<Receiver>>,
    /// By place; `None` for who gets nothing.
    pub(super) pulls: Vec<Option<Sender>>,
    pub(super) sums: Sums,
    /// The workers whose pull is in the server's line.
    pub(super) lined_up: u64,
    /// The workers whose push is at its end: nothing more is waited for from there.
    finished: u64,
}

impl Flow {
    pub(super) fn new(
        id: FlowId,
        start: Start,
        first: (WorkerId, Instant),
        config: &JobConfig,
        memory: Memory,
    ) -> Self {
        let blocks = config.blocks(&start.collective, start.elements);
        let places = || (0..config.workers).map(|place| WorkerId(place as u8));
        let receives = |worker| start.collective.pattern.receives(worker);
        let missing = config.pull_bound(&start.collective).of_blocks(blocks);
        let new = || Sender::streaming(blocks, config.rate).forgiving(missing);
        let pull = |worker| receives(worker).then(new);
        Self {
            id,
            start,
            first,
            blocks,
            pushes: places().map(|_| None).collect(),
            pulls: places().map(pull).collect(),
            sums: Sums::new(start.collective, config.workers, config.elements, blocks, memory),
            lined_up: 0,
            finished: 0,
        }
    }

    /// A worker announces it.
    pub(super) fn take_start(
        &mut self,
        now: Instant,
        worker: WorkerId,
        start: &Start,
        config: ReceiverConfig,
    ) {
        let blocks = if start.has_blocks { self.blocks } else { 0 };
        let is_answered = self.pulls[usize::from(worker.0)].is_some();
        let push = &mut self.pushes[usize::from(worker.0)];
        if push.is_none() {
            let mut new = Receiver::new(blocks, start.bound, config).answered(is_answered);
            let closed = (0..blocks).filter(|block| self.sums.is_closed(*block));
            closed.for_each(|block| new.forgo(now, block));
            *push = Some(new);
        }
        push.iter_mut().for_each(|push| push.take_start(now));
        self.close_what_is_decided(worker);
    }

    /// A block of a worker's.
    pub(super) fn take_block(
        &mut self,
        now: Instant,
        worker: WorkerId,
        &BlockHeader { block, round, tag, contributions, restored, .. }: &BlockHeader,
        payload: &[u8],
        waiting: &Waiting,
    ) -> Result<(), Reason> {
        let push = self.pushes[usize::from(worker.0)].as_mut().ok_or(Reason::Unannounced)?;
        let was_finished = push.is_finished();
        let is_inside = self.sums.inside(block) & worker.bit() != 0;
        // The block was let go, or was on its way when its sender was let off it: the sum without
        // it may be with others already.
        let is_late = !is_inside && (self.sums.is_closed(block) || push.has(block));
        push.take_block(now, block, round, waiting).map_err(|reason| match reason {
            Reason::Duplicate if is_late => Reason::Stale,
            reason => reason,
        })?;
        if is_late {
            self.close_what_is_decided(worker);
            return Err(Reason::Stale);
        }
        if restored {
            self.restore(now, block, contributions, payload);
            return Ok(());
        }
        let looked = push.let_go_before(now, block, tag.path);
        let is_at_its_end = push.is_finished() && !was_finished;
        if self.is_decided(block, worker.bit()) {
            self.close(block, Some((worker, payload)));
        } else {
            self.sums.contribute(block, worker, payload);
        }
        if is_at_its_end {
            self.close_what_is_decided(worker);
        } else {
            looked.for_each(|block| self.close_if_decided(block));
        }
        Ok(())
    }

    /// Takes a sum that a worker hands back. Nobody needs to contribute to it again.
    fn restore(&mut self, now: Instant, block: u32, contributions: u16, payload: &[u8]) {
        let workers = self.pushes.len() as u16;
        let expected = self.start.collective.pattern.contributions(workers);
        self.sums.restore(block, (contributions, expected), payload);
        self.closed(block);
        self.pushes.iter_mut().flatten().for_each(|push| push.forgo(now, block));
        (0..workers).for_each(|place| self.close_what_is_decided(WorkerId(place as u8)));
    }

    /// A block said that it is the last that a worker sends in this round.
    pub(super) fn take_last(&mut self, now: Instant, worker: WorkerId, round: u16, waiting: &mut Waiting) {
        if let Some(push) = &mut self.pushes[usize::from(worker.0)] {
            push.take_last(now, round, waiting);
            self.close_what_is_decided(worker);
        }
    }

    /// Notes that a worker's push may have come to its end, and decides what waited for it.
    pub(super) fn close_what_is_decided(&mut self, worker: WorkerId) {
        let push = self.pushes[usize::from(worker.0)].as_ref();
        if self.finished & worker.bit() == 0 && push.is_some_and(Receiver::is_finished) {
            self.finished |= worker.bit();
            (0..self.blocks).for_each(|block| self.close_if_decided(block));
        }
    }

    fn close_if_decided(&mut self, block: u32) {
        if !self.sums.is_closed(block) && self.is_decided(block, 0) {
            self.close(block, None);
        }
    }

    /// A block is decided when of each worker it is there, as those of `coming` are now, or will
    /// not come.
    fn is_decided(&self, block: u32, coming: u64) -> bool {
        let everyone = u64::MAX >> (64 - self.pushes.len());
        let mut lacking = everyone & !(self.sums.inside(block) | coming | self.finished);
        while lacking != 0 {
            let push = &self.pushes[lacking.trailing_zeros() as usize];
            if !push.as_ref().is_some_and(|push| push.has(block)) {
                return false;
            }
            // It was let go.
            lacking &= lacking - 1;
        }
        true
    }

    /// Decides once and for all who is in a block's sum.
    fn close(&mut self, block: u32, last: Option<(WorkerId, &[u8])>) {
        let workers = self.pushes.len() as u16;
        self.sums.close(block, self.start.collective.pattern.contributions(workers), last);
        self.closed(block);
    }

    /// The sum of a block is there for all.
    fn closed(&mut self, block: u32) {
        for pull in self.pulls.iter_mut().flatten() {
            pull.push(block);
            if self.sums.open() == 0 {
                pull.seal();
            }
        }
    }

    /// Whether a worker's push is at its end.
    pub(super) const fn is_finished(&self, worker: WorkerId) -> bool {
        self.finished & worker.bit() != 0
    }

    /// Whether all know that it is over: who gets a sum has it, and who gets none knows that it is
    /// enough.
    pub(super) fn is_over(&self) -> bool {
        self.pushes.iter().zip(&self.pulls).all(|(push, pull)| match (push, pull) {
            (_, Some(pull)) => pull.is_finished(),
            (Some(push), None) => push.is_confirmed(),
            (None, None) => false,
        })
    }

    /// A worker that says nothing though it is waited for.
    pub(super) fn silent(&self) -> Option<usize> {
        self.pushes.iter().zip(&self.pulls).position(|(push, pull)| {
            push.as_ref().is_some_and(Receiver::is_silent) || pull.as_ref().is_some_and(Sender::is_silent)
        })
    }

    /// These workers were heard of, if not in this flow. A worker announces its flows together and
    /// sends one after the other, so that one of them may say nothing for long.
    pub(super) fn excuse(&mut self, heard: u64) {
        let is_heard = |place: &usize| heard >> place & 1 != 0;
        for place in (0..self.pushes.len()).filter(is_heard) {
            self.pushes[place].iter_mut().for_each(Receiver::excuse);
            self.pulls[place].iter_mut().for_each(Sender::excuse);
        }
    }

    /// How many of a worker's blocks are waited for.
    pub(super) fn lacks(&self, place: usize) -> u32 {
        match &self.pushes[place] {
            None => self.blocks,
            Some(push) if push.is_finished() => 0,
            Some(push) => push.waits_for(),
        }
    }

    /// When a signal is due, or something is to be judged.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        let pushes = self.pushes.iter().flatten().filter_map(Receiver::poll_timeout);
        let pulls = self.pulls.iter().flatten().filter_map(Sender::poll_timeout);
        pushes.chain(pulls).min()
    }
}
