//! The receiver of a flow.

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;
use core::time::Duration;
use fanin_wire::{LossBound, PATHS_MAX, REQUEST_BLOCKS, Report, Signal};

use super::retry::{ROUNDS_MAX, Retry, Waiting};
use super::sender::{is_set, part_bytes, parts};
use crate::dlcp::config::Finish;
use crate::machine::{Instant, Reason};

/// Reports on nothing after which a sender that has not stopped counts as silent. They soon come as
/// seldom as `ceiling` says.
const SILENT_REPORTS_MAX: u32 = 50;
/// After so many they come no more seldom.
const SELDOM: u32 = 16;

/// The configuration shared by all receivers of a job.
#[derive(Clone, Copy, Debug)]
pub(in crate::dlcp) struct ReceiverConfig {
    /// How often it reports.
    pub(in crate::dlcp) period: Duration,
    /// Periods between reports while less is lost than comes.
    pub(in crate::dlcp) calm_periods: u32,
    /// Reports on nothing are twice as far apart each time, up to this.
    pub(in crate::dlcp) ceiling: Duration,
    pub(in crate::dlcp) finish: Finish,
    /// How long nothing more must have come before a stop is believed.
    pub(in crate::dlcp) quiet: Duration,
    /// Blocks that a sender sorts at a time.
    pub(in crate::dlcp) stretch: u32,
    /// Paths that it spreads trains over.
    pub(in crate::dlcp) paths: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Receiving,
    /// Enough has come. Blocks on their way are taken until the sender confirms.
    Finishing,
    Confirmed,
}

/// A flow as its receiver has it.
#[derive(Debug)]
pub(in crate::dlcp) struct Receiver {
    config: ReceiverConfig,
    blocks: u32,
    /// A bit for each block that has not come and was not let go.
    missing: Vec<u8>,
    lacks: u32,
    /// How many may be missing.
    allowed: u32,
    /// How many of these were let go before the end.
    let_go: u32,
    /// By path: the last stretch of which something came by it.
    stretches: [u32; PATHS_MAX as usize],
    /// Blocks before this one were looked at for that.
    passed: u32,
    /// Blocks before this one are to be looked at next, and since when.
    passing: Option<(u32, Instant)>,
    state: State,
    round: u16,
    /// When this round's stop came.
    stopped: Option<Instant>,
    /// When the last data packet came.
    last_block: Instant,
    request: Retry,
    next_part: u16,
    finish: Retry,
    /// Whether its sender hears of the end otherwise, too.
    is_answered: bool,
    /// Whether a start waits for its answer.
    answers: bool,
    /// Packets since the last report, which was at `reported`: `None` before there was anything to
    /// measure.
    packets: u32,
    reported: Option<Instant>,
    report: u32,
    silent_reports: u32,
    /// Blocks of the first round before the last one that came: so many were sent, or a stretch
    /// more or less.
    sent: u32,
    /// How many of them had not come at the last report.
    behind: u32,
    /// Whether more was lost than came, once.
    is_congested: bool,
}

impl Receiver {
    pub(in crate::dlcp) fn new(blocks: u32, bound: LossBound, config: ReceiverConfig) -> Self {
        let mut missing = vec![0xff; blocks.div_ceil(8) as usize];
        if let (Some(last), bits @ 1..) = (missing.last_mut(), blocks % 8) {
            *last >>= 8 - bits;
        }
        let mut receiver = Self {
            config,
            blocks,
            missing,
            lacks: blocks,
            allowed: bound.of_blocks(blocks),
            let_go: 0,
            stretches: [0; _],
            passed: 0,
            passing: None,
            state: State::Receiving,
            round: 0,
            stopped: None,
            last_block: Instant(0),
            request: Retry::default(),
            next_part: 0,
            finish: Retry::default(),
            is_answered: false,
            answers: false,
            packets: 0,
            reported: None,
            report: 0,
            silent_reports: 0,
            sent: 0,
            behind: 0,
            is_congested: false,
        };
        receiver.judge(Instant(0));
        receiver
    }

    /// The same, of a sender that may get sums back: by them it knows that it is enough.
    pub(in crate::dlcp) fn answered(self, is_answered: bool) -> Self {
        Self { is_answered, ..self }
    }

    /// Whether the bound is met and the flow at its end.
    pub(in crate::dlcp) fn is_finished(&self) -> bool {
        self.state != State::Receiving
    }

    pub(in crate::dlcp) fn is_confirmed(&self) -> bool {
        self.state == State::Confirmed
    }

    /// Whether a block came, or was let go.
    pub(in crate::dlcp) fn has(&self, block: u32) -> bool {
        !is_set(&self.missing, block)
    }

    /// Blocks of the flow.
    pub(in crate::dlcp) const fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Blocks that have not come.
    pub(in crate::dlcp) const fn lacks(&self) -> u32 {
        self.lacks
    }

    /// Blocks that may still come: of what has not come, those that were not let go.
    pub(in crate::dlcp) const fn waits_for(&self) -> u32 {
        self.lacks - self.let_go
    }

    /// How often it asked again.
    pub(in crate::dlcp) const fn round(&self) -> u16 {
        self.round
    }

    /// Whether its sender said nothing for too long, or only what never comes.
    pub(in crate::dlcp) const fn is_silent(&self) -> bool {
        self.request.is_vain()
            || self.finish.is_vain()
            || self.silent_reports > SILENT_REPORTS_MAX
            || self.round == ROUNDS_MAX
    }

    /// Its sender is alive, and perhaps has not come to this flow.
    pub(in crate::dlcp) fn excuse(&mut self) {
        self.silent_reports = self.silent_reports.min(SELDOM);
        self.request.excuse();
        self.finish.excuse();
    }

    /// The rendezvous came, or came once more: it is answered with a report, of nothing.
    pub(in crate::dlcp) fn take_start(&mut self, now: Instant) {
        self.answers = true;
        self.reported.get_or_insert(now);
    }

    /// Notes that a block came. Its bytes are the caller's to put where they belong, if it is the
    /// first.
    pub(in crate::dlcp) fn take_block(
        &mut self,
        now: Instant,
        block: u32,
        round: u16,
        waiting: &Waiting,
    ) -> Result<(), Reason> {
        if block >= self.blocks {
            return Err(Reason::OutOfRange);
        }
        if self.state == State::Confirmed {
            return Err(Reason::Stale);
        }
        if self.packets == 0 && self.silent_reports > 0 {
            // The rate after a pause is not measured over the pause.
            self.measure_from(now);
        }
        self.packets = self.packets.saturating_add(1);
        self.last_block = now;
        self.reported.get_or_insert(now);
        if round == self.round {
            // Not answered: of a request in several parts, one may be lost.
            self.request.postpone(now, waiting);
        }
        if self.has(block) {
            return Err(Reason::Duplicate);
        }
        self.strike_off(block);
        self.lacks -= 1;
        if round == 0 {
            self.sent = self.sent.max(block + 1);
            let lost = self.missing_of_sent().saturating_sub(self.behind);
            self.is_congested |= lost > self.packets + self.config.stretch;
        }
        self.judge(now);
        Ok(())
    }

    /// Blocks of the first round that were sent before one that came, and did not come.
    fn missing_of_sent(&self) -> u32 {
        self.sent.saturating_sub(self.blocks - self.lacks)
    }

    /// Lets lost blocks go, as far as the bound allows, so that they need not be waited for until
    /// the flow ends. A block is lost if its sender sends it long before `block`, which came by a
    /// path, and long before others that came by each other path, and if it did not come in the
    /// time in which blocks on their way come. A block on a path where more waits than on others
    /// was not lost. Returns the blocks that were looked at.
    pub(in crate::dlcp) fn let_go_before(&mut self, now: Instant, block: u32, path: u8) -> Range<u32> {
        // A sender mixes blocks within a stretch.
        let stretch = self.config.stretch;
        let stretches = &mut self.stretches[..self.config.paths.into()];
        let Some(of_path) = stretches.get_mut(usize::from(path)) else { return 0..0 };
        *of_path = (block / stretch).max(*of_path);
        let everywhere = stretches.iter().copied().min().unwrap_or_default();
        let sent_before = everywhere.saturating_sub(1) * stretch;
        if self.state != State::Receiving || self.round > 0 {
            return 0..0;
        }
        if self.passing.is_none() && sent_before > self.passed {
            self.passing = Some((sent_before, now));
        }
        let Some((end, _)) = self.passing.take_if(|(_, since)| *since + self.config.quiet <= now) else {
            return 0..0;
        };
        let looked = self.passed..end;
        self.passed = end;
        for block in looked.clone() {
            if self.let_go < self.allowed && is_set(&self.missing, block) {
                self.strike_off(block);
                self.let_go += 1;
            }
        }
        self.judge(now);
        looked
    }

    /// A block need not come any more: its sum is known.
    pub(in crate::dlcp) fn forgo(&mut self, now: Instant, block: u32) {
        if !self.has(block) {
            self.strike_off(block);
            self.lacks -= 1;
            self.judge(now);
        }
    }

    /// A block said that it is the last of a round.
    pub(in crate::dlcp) fn take_last(&mut self, now: Instant, round: u16, waiting: &mut Waiting) {
        if self.state == State::Receiving && round == self.round && self.stopped.is_none() {
            self.stop(now, waiting);
        }
    }

    fn strike_off(&mut self, block: u32) {
        self.missing[block as usize / 8] &= !(1 << (block % 8));
    }

    /// All of this round was sent.
    pub(in crate::dlcp) fn take_stop(
        &mut self,
        now: Instant,
        round: u16,
        waiting: &mut Waiting,
    ) -> Result<(), Reason> {
        if self.state == State::Finishing {
            // It has not heard that it is enough.
            self.finish.want();
            return Err(Reason::Duplicate);
        }
        if self.state == State::Confirmed || round != self.round {
            return Err(Reason::Stale);
        }
        if self.stopped.is_some() {
            return Err(Reason::Duplicate);
        }
        self.stop(now, waiting);
        Ok(())
    }

    fn stop(&mut self, now: Instant, waiting: &mut Waiting) {
        self.request.answered(now, false, waiting);
        self.silent_reports = 0;
        self.stopped = Some(now);
        self.judge(now);
    }

    /// The sender knows that it is over.
    pub(in crate::dlcp) fn take_confirm(
        &mut self,
        now: Instant,
        waiting: &mut Waiting,
    ) -> Result<(), Reason> {
        if self.state != State::Finishing {
            return Err(Reason::Unexpected);
        }
        self.finish.answered(now, true, waiting);
        self.state = State::Confirmed;
        Ok(())
    }

    /// Acts on what is due.
    pub(in crate::dlcp) fn handle_timeout(&mut self, now: Instant) {
        self.judge(now);
    }

    /// Finishes where enough has come, and asks for what is missing where it has not and nothing
    /// more comes.
    fn judge(&mut self, now: Instant) {
        if self.state != State::Receiving {
            return;
        }
        let is_met = self.lacks <= self.allowed;
        // A repeated request waits no longer than the bound asks for. The first time all blocks may
        // come, and are waited for: else the last of each tensor would be lost each time
        // (docs/protocols/dlcp.md).
        let is_enough = self.round > 0 || self.config.finish == Finish::BoundMet || self.is_quiet(now);
        if self.waits_for() == 0 || is_met && is_enough {
            self.state = State::Finishing;
            self.request = Retry::default();
            // A sender that has more to send is let off it at once.
            match self.is_answered && (self.lacks == 0 || self.stopped.is_some()) {
                true => self.finish.want_soon(now),
                false => self.finish.want(),
            }
        } else if self.is_quiet(now) {
            self.round = self.round.saturating_add(1);
            self.stopped = None;
            self.next_part = 0;
            self.request.want();
            self.measure_from(now);
        }
    }

    fn measure_from(&mut self, now: Instant) {
        self.packets = 0;
        self.silent_reports = 0;
        self.reported = Some(now);
    }

    /// Whether the sender stopped, and what it had sent had time to come.
    fn is_quiet(&self, now: Instant) -> bool {
        self.quiet_at().is_some_and(|at| at <= now)
    }

    fn quiet_at(&self) -> Option<Instant> {
        self.stopped.map(|stopped| stopped.max(self.last_block) + self.config.quiet)
    }

    /// The next signal that is due.
    pub(in crate::dlcp) fn poll_signal(
        &mut self,
        now: Instant,
        waiting: &Waiting,
    ) -> Option<(u16, Signal<'_>)> {
        if core::mem::take(&mut self.answers) {
            return Some((
                self.round,
                Signal::Report(Report { number: self.report, packets: 0, period_us: 0 }),
            ));
        }
        if self.finish.is_due(now) {
            self.finish.sent(now, waiting);
            return Some((self.round, Signal::Finish));
        }
        if self.request.is_due(now) {
            let part = self.next_part;
            self.next_part += 1;
            if u32::from(self.next_part) == parts(self.blocks) {
                self.next_part = 0;
                self.request.sent(now, waiting);
            }
            let begin = usize::from(part) * REQUEST_BLOCKS as usize / 8;
            let missing = &self.missing[begin..begin + part_bytes(self.blocks, part)];
            return Some((self.round, Signal::Request { part, missing }));
        }
        self.report(now).map(|report| (self.round, Signal::Report(report)))
    }

    /// The report that is due. Another stands in for one that is lost, so none is sent again.
    fn report(&mut self, now: Instant) -> Option<Report> {
        let since = self.reported.filter(|_| self.report_at().is_some_and(|due| due <= now))?;
        let packets = core::mem::take(&mut self.packets);
        self.silent_reports = if packets == 0 { self.silent_reports + 1 } else { 0 };
        self.reported = Some(now);
        self.report = self.report.wrapping_add(1);
        self.behind = self.missing_of_sent();
        let period_us = u32::try_from(now.since(since).as_micros()).unwrap_or(u32::MAX).max(1);
        Some(Report { number: self.report, packets, period_us })
    }

    /// When to report next. A flow that is over is not measured.
    fn report_at(&self) -> Option<Instant> {
        let is_coming = self.state == State::Receiving && self.stopped.is_none();
        let reported = self.reported.filter(|_| is_coming)?;
        let ReceiverConfig { period, ceiling, calm_periods, .. } = self.config;
        if calm_periods > 1 && self.packets > 0 && self.round == 0 && !self.is_congested {
            // Also when nothing more comes: all may be lost.
            return Some((reported + period * calm_periods).min(self.last_block + period));
        }
        let interval = period.saturating_mul(1 << self.silent_reports.min(SELDOM));
        Some(reported + interval.min(ceiling.max(period)))
    }

    /// When something is due.
    pub(in crate::dlcp) fn poll_timeout(&self) -> Option<Instant> {
        let answer = self.answers.then_some(Instant(0));
        let quiet = self.quiet_at().filter(|_| self.state == State::Receiving);
        let signals = [self.finish.poll_timeout(), self.request.poll_timeout()];
        [answer, quiet, self.report_at()].into_iter().chain(signals).flatten().min()
    }
}
