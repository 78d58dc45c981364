//! The sender of a flow.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use fanin_wire::{REQUEST_BLOCKS, Report, Signal, Start};

use super::retry::{ROUNDS_MAX, Retry, Waiting};
use crate::dlcp::paths::ByPath;
use crate::dlcp::rate::{Pacer, Rate, RateConfig, Round};
use crate::machine::{Instant, Reason};

/// A flow as its sender has it.
#[derive(Debug)]
pub(in crate::dlcp) struct Sender {
    blocks: u32,
    /// Whether its receiver may end it without all of its blocks.
    is_forgiven: bool,
    /// To be announced; `None` where the receiver knows of the flow anyway.
    start: Option<(Start, Retry)>,
    /// The blocks to be sent in this round.
    to_send: VecDeque<u32>,
    /// The next of it, and whether it is important.
    lined_up: VecDeque<(u32, bool)>,
    /// Whether all blocks of the round are known. A server's become known as they are summed.
    is_sealed: bool,
    /// Since when blocks that are there wait for others.
    gathers_since: Option<Instant>,
    round: u16,
    /// Parts of the request for this round that have come.
    parts: u64,
    stop: Retry,
    stopped: bool,
    finished: bool,
    rate: Rate,
    pacer: Pacer,
    /// This round so far, and the one before while parts of the request are missing.
    this_round: Round,
    last_round: Round,
    /// By block: the path that it took last. Empty before a block took another than the first.
    path_of: Vec<u8>,
    /// Packets since `measured_since`.
    sent: u32,
    measured_since: Option<Instant>,
    /// Whether no report of this round was believed yet.
    is_first: bool,
    /// Number of the last report.
    report: u32,
}

impl Sender {
    /// The sender of a tensor that is there as a whole, and has to be announced.
    pub(in crate::dlcp) fn announcing(start: Start, blocks: u32, rate: RateConfig) -> Self {
        let blocks = if start.has_blocks { blocks } else { 0 };
        let to_send = (0..blocks).collect();
        let is_forgiven = start.bound.of_blocks(blocks) > 0;
        let announced = Self::streaming(blocks, rate).announced(start);
        Self { to_send, is_sealed: true, is_forgiven, ..announced }
    }

    /// The same, but to somebody who has to be told of it.
    pub(in crate::dlcp) fn announced(mut self, start: Start) -> Self {
        let mut retry = Retry::default();
        retry.want();
        self.start = Some((start, retry));
        self
    }

    /// The sender of blocks that come to be one after the other, to a receiver that expects them.
    pub(in crate::dlcp) fn streaming(blocks: u32, rate: RateConfig) -> Self {
        Self {
            blocks,
            is_forgiven: false,
            start: None,
            to_send: VecDeque::new(),
            lined_up: VecDeque::new(),
            is_sealed: false,
            gathers_since: None,
            round: 0,
            parts: 0,
            stop: Retry::default(),
            stopped: false,
            finished: false,
            rate: Rate::new(rate),
            pacer: Pacer::default(),
            this_round: Round::NONE,
            last_round: Round::NONE,
            path_of: Vec::new(),
            sent: 0,
            measured_since: None,
            is_first: true,
            report: 0,
        }
    }

    /// The same of sums of which so many may be missing.
    pub(in crate::dlcp) const fn forgiving(mut self, blocks: u32) -> Self {
        self.is_forgiven = blocks > 0;
        self
    }

    /// A block that is there now.
    pub(in crate::dlcp) fn push(&mut self, block: u32) {
        self.to_send.push_back(block);
    }

    /// Whether the blocks that are there had better wait for others: a train of a few costs as much
    /// as a full one. They wait no longer than a link takes for a full one.
    pub(in crate::dlcp) fn gathers(&mut self, now: Instant) -> bool {
        self.gathers_since.get_or_insert(now);
        self.gathers_until() > now
    }

    /// How long they do.
    pub(in crate::dlcp) fn gathers_until(&self) -> Instant {
        let config = self.rate.config();
        let is_full = self.waiting() >= config.train() as usize;
        let since = self.gathers_since.filter(|_| !is_full && !self.is_sealed && self.round == 0);
        since.map_or(Instant(0), |since| since + config.ahead)
    }

    /// All blocks are there.
    pub(in crate::dlcp) fn seal(&mut self) {
        self.is_sealed = true;
        self.stop_if_all_is_sent();
    }

    pub(in crate::dlcp) const fn is_finished(&self) -> bool {
        self.finished
    }

    /// How fast it may send now.
    #[cfg(test)]
    pub(in crate::dlcp) const fn bps(&self) -> u64 {
        self.rate.bps()
    }

    /// Whether its start was said and not answered.
    pub(in crate::dlcp) fn is_announcing(&self) -> bool {
        self.start.is_some_and(|(_, retry)| retry != Retry::default())
    }

    /// Whether the first of several trains has left before its start was answered. The others wait: they
    /// would have to follow it on its path, which may be dead.
    pub(in crate::dlcp) fn waits_for_its_start(&self) -> bool {
        self.is_announcing() && self.this_round.packets > 0
    }

    /// How often blocks were asked for again.
    pub(in crate::dlcp) const fn round(&self) -> u16 {
        self.round
    }

    /// Whether its receiver said nothing for too long, or nothing else than that it lacks
    /// something.
    pub(in crate::dlcp) fn is_silent(&self) -> bool {
        self.stop.is_vain()
            || self.start.is_some_and(|(_, retry)| retry.is_vain())
            || self.round == ROUNDS_MAX
    }

    /// Its receiver is alive, and perhaps has not come to this flow.
    pub(in crate::dlcp) fn excuse(&mut self) {
        self.stop.excuse();
    }

    /// The next signal that is due.
    pub(in crate::dlcp) fn poll_signal(
        &mut self,
        now: Instant,
        waiting: &Waiting,
    ) -> Option<(u16, Signal<'static>)> {
        if let Some((start, retry)) = &mut self.start
            && retry.is_due(now)
        {
            retry.sent(now, waiting);
            return Some((0, Signal::Start(*start)));
        }
        if self.stop.is_due(now) {
            self.stop.sent(now, waiting);
            return Some((self.round, Signal::Stop));
        }
        None
    }

    /// Whether it has blocks to send, now or later.
    pub(in crate::dlcp) fn has_blocks(&self) -> bool {
        !self.to_send.is_empty() || !self.lined_up.is_empty()
    }

    /// The next block, and whether it is important. `importance` is asked once about each block,
    /// and says `None` of one that nobody needs any more.
    pub(in crate::dlcp) fn peek(
        &mut self,
        mut importance: impl FnMut(u32) -> Option<bool>,
    ) -> Option<(u32, bool)> {
        while self.lined_up.is_empty() && !self.to_send.is_empty() {
            let mut others = VecDeque::new();
            for _ in 0..self.rate.config().stretch().min(self.to_send.len() as u32) {
                let Some(block) = self.to_send.pop_front() else { break };
                match importance(block) {
                    // A block that is requested again is one that the bound does not forgive.
                    Some(is_important) if is_important || self.round > 0 => {
                        self.lined_up.push_back((block, true));
                    }
                    Some(_) => others.push_back((block, false)),
                    None => {}
                }
            }
            self.lined_up.append(&mut others);
        }
        let next = self.lined_up.front().copied();
        if next.is_none() {
            self.stop_if_all_is_sent();
        }
        next
    }

    /// Whether the rate lets a packet leave.
    pub(in crate::dlcp) fn is_open(&mut self, now: Instant) -> bool {
        self.pacer.is_open(now, self.rate.config())
    }

    /// When it does, where it does not now.
    pub(in crate::dlcp) const fn opens_at(&self) -> Instant {
        self.pacer.opens_at()
    }

    /// The block that [`Self::peek`] showed leaves, by a way of that rate, and by a path if that is
    /// known.
    pub(in crate::dlcp) fn sent(&mut self, now: Instant, way_bps: u64, path: Option<u8>) {
        self.pacer.sent(now, self.rate.config(), self.rate.bps());
        self.left(now, way_bps, path);
    }

    /// Whether the block that [`Self::peek`] showed is the last of its round.
    pub(in crate::dlcp) fn is_last(&self) -> bool {
        self.are_last(1)
    }

    /// Whether so many more blocks are all of the round.
    fn are_last(&self, blocks: usize) -> bool {
        self.is_sealed && self.waiting() == blocks
    }

    /// Blocks of the round that are there and have not left.
    fn waiting(&self) -> usize {
        self.to_send.len() + self.lined_up.len()
    }

    /// The last block of the round left, and said that it is.
    pub(in crate::dlcp) fn stop_rides(&mut self, now: Instant) {
        if self.stopped {
            self.stop.want_soon(now);
        }
    }

    /// Lets blocks that leave to another receiver in this round leave to this one with them, and
    /// returns whether they do. They must be what would go next, and now, and all of it important.
    /// If they are the `last` ones of the round there, they must be so here, and the reverse.
    pub(in crate::dlcp) fn send_along(
        &mut self,
        now: Instant,
        (round, way_bps, path): (u16, u64, Option<u8>),
        blocks: &[u32],
        last: bool,
    ) -> bool {
        let next = self.lined_up.iter().map(|(block, _)| block).chain(&self.to_send);
        let is_alike = self.round == round && last == self.are_last(blocks.len());
        if !is_alike || !next.take(blocks.len()).eq(blocks) {
            return false;
        }
        if !self.pacer.send_all(now, self.rate.config(), self.rate.bps(), blocks.len()) {
            return false;
        }
        for _ in blocks {
            self.peek(|_| Some(true));
            self.left(now, way_bps, path);
        }
        self.stop_rides(now);
        true
    }

    fn left(&mut self, now: Instant, way_bps: u64, path: Option<u8>) {
        let left = self.lined_up.pop_front();
        // 255 stands for a path that is not known, as 0 is the first.
        let number = path.unwrap_or(u8::MAX);
        if number > 0 && self.path_of.is_empty() {
            self.path_of.resize(self.blocks as usize, 0);
        }
        if let Some(of_block) = left.and_then(|(block, _)| self.path_of.get_mut(block as usize)) {
            *of_block = number;
        }
        let time = self.rate.config().packet_time(self.rate.bps().min(way_bps));
        self.this_round.leaves(now, time, path);
        self.gathers_since = None;
        self.sent = self.sent.saturating_add(1);
        self.measured_since.get_or_insert(now);
        self.stop_if_all_is_sent();
    }

    /// Nothing is left to send: says so at once (§3.2.1).
    fn stop_if_all_is_sent(&mut self) {
        if self.is_sealed && !self.has_blocks() && !self.finished && !self.stopped && self.blocks > 0 {
            self.stopped = true;
            self.stop.want();
        }
    }

    /// Takes a report of what came in a period of this round, or the answer to the start.
    pub(in crate::dlcp) fn take_report(
        &mut self,
        now: Instant,
        round: u16,
        report: Report,
        waiting: &mut Waiting,
    ) -> Result<(), Reason> {
        let is_answer = report.period_us == 0;
        self.started(now, is_answer, waiting);
        if !is_answer && (round != self.round || report.number <= self.report) {
            return Err(Reason::Stale);
        }
        self.report = self.report.max(report.number);
        let Some(since) = self.measured_since.filter(|_| self.sent > 0 && !is_answer) else { return Ok(()) };
        let config = self.rate.config();
        if self.is_first && now.since(since) < config.period + waiting.smoothed() {
            // It was measured from before the first block can have come: that is no congestion.
            return Ok(());
        }
        self.is_first = false;
        // Packets that leave together may all be in a short period; on average they keep to the
        // rate.
        let sending = config.bps(self.sent, now.since(since)).min(self.rate.bps());
        let period = core::time::Duration::from_micros(report.period_us.into());
        let receiving = config.bps(report.packets, period);
        self.this_round.fastest_bps = self.this_round.fastest_bps.max(receiving);
        self.rate.reported(sending, receiving);
        self.sent = 0;
        self.measured_since = Some(now);
        Ok(())
    }

    /// Blocks are missing, and a round of them begins. The last part of the request returns the round
    /// before.
    pub(in crate::dlcp) fn take_request(
        &mut self,
        now: Instant,
        round: u16,
        part: u16,
        missing: &[u8],
        waiting: &mut Waiting,
    ) -> Result<Round, Reason> {
        let begins = self.round.checked_add(1) == Some(round) && self.stopped;
        if self.finished || !begins && round != self.round || round == 0 {
            return Err(Reason::Stale);
        }
        let first = u32::from(part) * REQUEST_BLOCKS;
        if first >= self.blocks || missing.len() != part_bytes(self.blocks, part) {
            return Err(Reason::OutOfRange);
        }
        if begins {
            self.started(now, false, waiting);
            self.stop.answered(now, false, waiting);
            (self.round, self.parts, self.is_sealed, self.stopped) = (round, 0, false, false);
            self.rate.restart();
            (self.sent, self.measured_since, self.is_first) = (0, None, true);
            self.last_round = core::mem::replace(&mut self.this_round, Round::NONE);
        }
        if self.parts & 1 << part != 0 {
            return Err(Reason::Duplicate);
        }
        self.parts |= 1 << part;
        let last = self.blocks.min(first + REQUEST_BLOCKS);
        for block in (first..last).filter(|block| is_set(missing, block - first)) {
            self.to_send.push_back(block);
            self.last_round.misses(self.path_of.get(block as usize).copied().unwrap_or(0));
        }
        if self.parts.count_ones() < parts(self.blocks) {
            return Ok(Round::NONE);
        }
        self.seal();
        Ok(core::mem::replace(&mut self.last_round, Round::NONE))
    }

    /// The receiver has enough. Returns the last round.
    pub(in crate::dlcp) fn take_finish(&mut self, now: Instant, waiting: &mut Waiting) -> Round {
        self.started(now, false, waiting);
        self.stop.answered(now, false, waiting);
        self.to_send.clear();
        self.lined_up.clear();
        self.finished = true;
        self.end()
    }

    /// The flow is over, by what else its sender knows. Returns the last round. If blocks may be missing,
    /// it says of none by which path it came.
    pub(in crate::dlcp) const fn end(&mut self) -> Round {
        let mut over = core::mem::replace(&mut self.this_round, Round::NONE);
        if self.is_forgiven {
            over.by_path = ByPath::NONE;
        }
        over
    }

    /// Any answer shows that the flow is known.
    fn started(&mut self, now: Instant, is_answer: bool, waiting: &mut Waiting) {
        if let Some((_, retry)) = &mut self.start {
            retry.answered(now, is_answer, waiting);
        }
    }

    /// When a signal is due; blocks are when [`Self::opens_at`] says.
    pub(in crate::dlcp) fn poll_timeout(&self) -> Option<Instant> {
        let start = self.start.as_ref().and_then(|(_, retry)| retry.poll_timeout());
        [start, self.stop.poll_timeout()].into_iter().flatten().min()
    }
}

/// Requests that it takes to speak of so many blocks.
pub(super) fn parts(blocks: u32) -> u32 {
    blocks.div_ceil(REQUEST_BLOCKS)
}

/// Bytes of the bitmap in one of them.
pub(super) fn part_bytes(blocks: u32, part: u16) -> usize {
    let left = blocks.saturating_sub(u32::from(part) * REQUEST_BLOCKS);
    left.min(REQUEST_BLOCKS).div_ceil(8) as usize
}

pub(super) fn is_set(bitmap: &[u8], bit: u32) -> bool {
    bitmap.get(bit as usize / 8).is_some_and(|byte| byte >> (bit % 8) & 1 != 0)
}
