//! Ring all-reduce with bounded flows (DLCP §5.1.2).
//!
//! A part of a tensor is cut into as many segments as there are ranks. In n - 1 steps of the
//! reduce-scatter a rank adds its own to the segment that comes from its left and hands it on to
//! its right. In n - 1 steps of the all-gather the sums go round. Each step is a flow between two
//! neighbours, and a block goes on as soon as it is there. Each carries the count of its
//! contributions. A block that is lost in the reduce-scatter, as far as the bound forgives that,
//! begins anew with the receiver's own. In the all-gather nothing is lost, so that all ranks get
//! the same bits, and know the same of what is missing.

mod part;

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use fanin_wire::{
    AbortReason, BlockHeader, BlockPacket, FlowId, Generation, Kind, LossBound, Operation, Pattern, Preamble,
    Rank, Signal, SignalPacket, Tag, WireDtype, WorkerId, block_packet_bytes,
};

use self::part::{Part, Steps};
use super::clock::Clock;
use super::config::{JobConfig, RingPlan};
use super::flow::Waiting;
use super::rate::Pacer;
use super::tags;
use crate::machine::{
    Endpoint, Instant, Packet, Reason, Tensor, Transmit, Verdict, WorkerEvent, WorkerMachine,
    WorkerStatistics,
};
use crate::transport::{Run, Stream, WorkerCore};

/// A shard of one rank of a ring. `A` names a neighbour, `T` holds a tensor's memory.
#[derive(Debug)]
pub struct Ring<A, T> {
    /// Its peer is the right neighbour.
    core: WorkerCore<A, T>,
    left: [A; 1],
    config: JobConfig,
    steps: Steps,
    clock: Clock,
    /// Parts that are not complete, in their order; some may have been announced from the left
    /// before they were submitted here.
    parts: VecDeque<Part>,
    /// Number of the first of them, and of the next that is submitted.
    first: u32,
    submitted: u32,
    /// The facts known of the ways to the left and to the right.
    to_left: Waiting,
    to_right: Waiting,
    /// Flows whose end the right neighbour wants confirmed, and those that are over and that the
    /// left one lacks the end of.
    confirms: VecDeque<FlowId>,
    finishes: VecDeque<FlowId>,
    link: Pacer,
    path: u8,
}

/// Which neighbour a train is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Left,
    Right,
}

impl<A: Copy, T: Tensor> Ring<A, T> {
    /// The rank at place `rank` of an admitted job, between these neighbours. The configuration's
    /// `pull_bound` means nothing here.
    ///
    /// # Panics
    /// When the configuration was not checked, or the rank is not one of the job's: admission does
    /// that.
    #[must_use]
    pub fn new(config: JobConfig, rank: WorkerId, left: A, right: A) -> Self {
        let config = config.check().expect("a job is checked at admission");
        assert!(u16::from(rank.0) < config.workers, "place {} of {} ranks", rank.0, config.workers);
        let stream = Stream::new(usize::from(config.elements), WireDtype::Native);
        Self {
            core: WorkerCore::new(stream, right, config.retransmission),
            left: [left],
            config,
            steps: Steps { ranks: config.workers.into(), rank: rank.0.into() },
            clock: Clock::default(),
            parts: VecDeque::new(),
            first: 0,
            submitted: 0,
            to_left: Waiting::new(config.retransmission),
            to_right: Waiting::new(config.retransmission),
            confirms: VecDeque::new(),
            finishes: VecDeque::new(),
            link: Pacer::default(),
            path: 0,
        }
    }

    fn preamble(&self, kind: Kind) -> Preamble {
        let JobConfig { id, generation, shard, .. } = self.config;
        Preamble { kind, job: id, generation, worker: WorkerId(self.steps.rank as u8), shard }
    }

    /// Parts from the first on of which anything may be on its way. Behind them is what was
    /// submitted and waits.
    fn window(&self) -> usize {
        2 * usize::from(self.config.flows)
    }

    /// The place in `parts`, and the step, of a flow.
    fn place_of(&self, flow: FlowId) -> Result<(usize, u32), Reason> {
        let steps = self.steps.count();
        let begin = self.first.wrapping_mul(steps);
        let ahead = flow.0.wrapping_sub(begin);
        if ahead > u32::MAX / 2 {
            return Err(Reason::Stale);
        }
        // A rank is as far ahead of its neighbour as it may have parts under way, which that one
        // has not begun.
        let place = (ahead / steps) as usize;
        if place >= self.window() {
            return Err(Reason::Ahead);
        }
        Ok((place, ahead % steps))
    }

    fn flow_of(first: u32, steps: Steps, place: usize, step: u32) -> FlowId {
        FlowId(first.wrapping_add(place as u32).wrapping_mul(steps.count()).wrapping_add(step))
    }

    fn take_block(&mut self, now: Instant, packet: &BlockPacket<'_>) -> Result<(), Reason> {
        let (place, step) = self.place_of(packet.header.flow)?;
        let part = self.parts.get_mut(place).ok_or(Reason::Unannounced)?;
        part.take_block(now, (step, packet), &self.config, &self.to_left, &mut self.core.stream)?;
        part.go_on(&mut self.core.stream);
        Ok(())
    }

    fn take_signal(&mut self, now: Instant, packet: &SignalPacket<'_>) -> Result<(), Reason> {
        let SignalPacket { flow, round, signal, .. } = *packet;
        let (place, step) = match (self.place_of(flow), signal) {
            // It is over here, and whoever still asks has not heard.
            (Err(Reason::Stale), Signal::Start(_) | Signal::Stop) => {
                return remember(&mut self.finishes, flow);
            }
            (Err(Reason::Stale), Signal::Finish) => return remember(&mut self.confirms, flow),
            (found, _) => found?,
        };
        if let Signal::Start(start) = signal {
            if self.config.blocks(&start.collective, start.elements) > self.config.flow_blocks {
                return Err(Reason::OutOfRange);
            }
            while self.parts.len() <= place {
                self.parts.push_back(Part::new(self.steps));
            }
        }
        let part = self.parts.get_mut(place).ok_or(Reason::Unannounced)?;
        match signal {
            Signal::Start(start) => {
                if let Err(unlike) = part.take_start(now, step, &start, &self.config)? {
                    self.core
                        .end(unlike.reason(Rank(self.steps.left() as u16), Rank(self.steps.rank as u16)));
                    return Ok(());
                }
            }
            Signal::Stop => part.incoming(step)?.take_stop(now, round, &mut self.to_left)?,
            Signal::Confirm => part.incoming(step)?.take_confirm(now, &mut self.to_left)?,
            Signal::Report(report) => {
                part.outgoing(step)?.take_report(now, round, report, &mut self.to_right)?;
            }
            Signal::Request { part: number, missing } => {
                part.outgoing(step)?.take_request(now, round, number, missing, &mut self.to_right)?;
            }
            Signal::Finish => {
                part.outgoing(step)?.take_finish(now, &mut self.to_right);
                remember(&mut self.confirms, flow)?;
            }
        }
        part.go_on(&mut self.core.stream);
        Ok(())
    }

    /// Gives back the tensors of which both neighbours have all that they need: what the right one
    /// may still ask for is read from there.
    fn end_parts(&mut self, now: Instant) {
        while self.parts.front().is_some_and(Part::is_over) {
            let Some(part) = self.parts.pop_front() else { break };
            part.end(now, &mut self.core);
            self.first = self.first.wrapping_add(1);
        }
        self.begin();
    }

    /// Begins the parts that may be under way.
    fn begin(&mut self) {
        for part in self.parts.iter_mut().take(self.config.flows.into()) {
            part.begin();
        }
    }

    /// Cuts what was just submitted into parts.
    fn cut(&mut self, begin: u64, mut elements: u32, priority: u8, bound: Option<LossBound>) {
        let mut chunk = begin;
        while chunk < self.core.stream.end() {
            let Some(place) = self.core.stream.locate(chunk) else { unreachable!("it was just submitted") };
            let collective = place.collective();
            let of_part = self.config.flow_blocks as usize * place.chunk_elements();
            let of_part = elements.min(u32::try_from(of_part).unwrap_or(u32::MAX));
            let blocks = self.config.blocks(&collective, of_part);
            let at = self.submitted.wrapping_sub(self.first) as usize;
            while self.parts.len() <= at {
                self.parts.push_back(Part::new(self.steps));
            }
            let start = part::start(&self.config, collective, of_part, (priority, bound));
            let place = (chunk, self.submitted);
            let submitted = self.parts[at].submit(start, place, &self.config, &mut self.core.stream);
            if let Err(unlike) = submitted {
                self.core.end(unlike.reason(Rank(self.steps.left() as u16), Rank(self.steps.rank as u16)));
                return;
            }
            self.submitted = self.submitted.wrapping_add(1);
            elements -= of_part;
            chunk += u64::from(blocks);
        }
    }

    /// Writes the next signal that is due.
    fn write_signal(&mut self, now: Instant, train: &mut [u8]) -> Option<(Side, usize)> {
        let (preamble, key) = (self.preamble(Kind::Signal), self.config.key);
        let write = |flow, (round, signal): (u16, Signal<'_>), train: &mut [u8]| {
            let bytes = signal.packet_bytes();
            SignalPacket { preamble, flow, round, path: 0, signal }.write(&mut train[..bytes], key);
            bytes
        };
        if let Some(flow) = self.confirms.pop_front() {
            return Some((Side::Right, write(flow, (0, Signal::Confirm), train)));
        }
        if let Some(flow) = self.finishes.pop_front() {
            return Some((Side::Left, write(flow, (0, Signal::Finish), train)));
        }
        let window = self.window();
        let Self { parts, first, steps, to_left, to_right, .. } = self;
        let parts = parts.iter_mut().enumerate().take(window);
        for (place, part) in parts.filter(|(_, part)| part.has_signals(now)) {
            for (step, push) in part.senders() {
                if let Some(signal) = push.poll_signal(now, to_right) {
                    return Some((
                        Side::Right,
                        write(Self::flow_of(*first, *steps, place, step), signal, train),
                    ));
                }
            }
            for (step, pull) in part.receivers() {
                if let Some(signal) = pull.poll_signal(now, to_left) {
                    return Some((
                        Side::Left,
                        write(Self::flow_of(*first, *steps, place, step), signal, train),
                    ));
                }
            }
        }
        None
    }

    /// Writes blocks of one flow, all to be treated alike, as far as its rate and the link let them
    /// leave.
    fn write_blocks(&mut self, now: Instant, train: &mut [u8]) -> Run {
        let preamble = self.preamble(Kind::Block);
        let window = self.window();
        let Self { core, config, parts, first, steps, link, path, .. } = self;
        let mut run = Run::default();
        let parts = parts.iter_mut().enumerate().take(window);
        for (place, part) in parts.filter(|(_, part)| part.due().blocks.is_some()) {
            if !link.is_open(now, &config.rate) {
                break;
            }
            let Some((shape, senders)) = part.sending() else { continue };
            for (step, push) in senders {
                let flow = Self::flow_of(*first, *steps, place, step);
                let segment = steps.segment(shape.blocks, steps.sends(step));
                let may_be_dropped =
                    steps.bound(&shape.start, step).of_blocks(segment.end - segment.start) > 0;
                let mut treatment = None;
                while link.is_open(now, &config.rate) && push.is_open(now) {
                    let next = push.peek(|block| {
                        let mut chunk = core.stream.locate(shape.chunk(segment.start + block))?;
                        let range = chunk.range();
                        Some(!may_be_dropped || tags::is_important(&chunk.elements(), range, shape.median))
                    });
                    let Some((block, important)) = next else { break };
                    let of_part = segment.start + block;
                    let tag = Tag { priority: shape.start.priority, important, path: *path };
                    let bytes = config.bytes_of_block(&shape.start.collective, shape.start.elements, of_part);
                    let packet_bytes = block_packet_bytes(bytes);
                    if treatment.is_some_and(|of_train| of_train != tag) || !run.takes(packet_bytes, train) {
                        break;
                    }
                    treatment = Some(tag);
                    let Some(mut chunk) = core.stream.locate(shape.chunk(of_part)) else { break };
                    chunk.sent(now);
                    let contributions = shape.counts[of_part as usize];
                    let header = BlockHeader {
                        flow,
                        block,
                        round: push.round(),
                        tag,
                        contributions,
                        last: false,
                        restored: false,
                    };
                    BlockPacket::write(
                        run.packet(packet_bytes, train),
                        config.key,
                        &preamble,
                        &header,
                        |payload| {
                            part::copy_to(&mut chunk, payload);
                        },
                    );
                    core.statistics.packets_sent += 1;
                    core.statistics.retransmissions += u64::from(push.round() > 0);
                    push.sent(now, config.rate.line_rate_bps, Some(0));
                    link.sent(now, &config.rate, config.rate.line_rate_bps);
                }
                if !run.is_empty() {
                    *path = (*path + 1) % config.paths;
                    return run;
                }
            }
        }
        run
    }
}

/// Queues a flow to be answered about, once.
fn remember(flows: &mut VecDeque<FlowId>, flow: FlowId) -> Result<(), Reason> {
    const MOST: usize = 1024;
    if flows.contains(&flow) {
        return Err(Reason::Duplicate);
    }
    if flows.len() >= MOST {
        return Err(Reason::OutboxFull);
    }
    flows.push_back(flow);
    Ok(())
}

impl<A: Copy, T: Tensor> Endpoint for Ring<A, T> {
    type Address = A;
    type Event = WorkerEvent<T>;

    fn receive(&mut self, now: Instant, _from: &A, packet: &Packet<'_>) -> Result<Verdict, Reason> {
        let now = self.clock.read(now);
        self.core.check(&self.preamble(Kind::Block), self.config.key, packet)?;
        let Packet { preamble, bytes } = *packet;
        let from = u32::from(preamble.worker.0);
        match preamble.kind {
            Kind::Block if from == self.steps.left() => {
                self.take_block(now, &BlockPacket::parse(preamble, bytes)?)?;
            }
            Kind::Signal => {
                let signal = SignalPacket::parse(preamble, bytes)?;
                let is_of_sender = matches!(signal.signal, Signal::Start(_) | Signal::Stop | Signal::Confirm);
                let sender = if is_of_sender { self.steps.left() } else { self.steps.right() };
                if from != sender {
                    return Err(Reason::OutOfRange);
                }
                self.take_signal(now, &signal)?;
            }
            Kind::Abort => self.core.abort(packet)?,
            Kind::Block => return Err(Reason::OutOfRange),
            _ => return Err(Reason::Unexpected),
        }
        self.end_parts(now);
        Ok(Verdict::Absorb)
    }

    fn count(&mut self, verdict: Verdict) -> Verdict {
        self.core.count(verdict)
    }

    fn handle_timeout(&mut self, now: Instant) {
        let now = self.clock.read(now);
        if !self.core.is_running() {
            return;
        }
        let window = self.window();
        let mut is_silent = false;
        for part in self.parts.iter_mut().take(window).filter(|part| part.has_signals(now)) {
            part.receivers().for_each(|(_, pull)| pull.handle_timeout(now));
            part.go_on(&mut self.core.stream);
            is_silent |= part.senders().any(|(_, push)| push.is_silent());
        }
        // A left neighbour may be silent because its own is; a right one that answers nothing is
        // gone.
        if is_silent {
            self.core.end(AbortReason::Expelled(Rank(self.steps.right() as u16)));
        }
        self.end_parts(now);
    }

    fn poll_transmit(&mut self, now: Instant, train: &mut [u8]) -> Option<Transmit<'_, A>> {
        let now = self.clock.read(now);
        if !self.core.is_running() {
            return None;
        }
        let mut signal = self.write_signal(now, train);
        if signal.is_none() {
            let run = self.write_blocks(now, train);
            if !run.is_empty() {
                return run.to(self.core.peer());
            }
            // The last of a round may have been what a stop waited for.
            signal = self.write_signal(now, train);
        }
        let (side, bytes) = signal?;
        self.core.statistics.packets_sent += 1;
        let to = if side == Side::Left { &self.left } else { self.core.peer() };
        Some(Transmit { to, bytes, segment_bytes: bytes })
    }

    fn poll_event(&mut self) -> Option<WorkerEvent<T>> {
        self.core.poll_event()
    }

    fn poll_timeout(&self) -> Option<Instant> {
        if !self.core.is_running() {
            return None;
        }
        // A confirm leaves at once; and of a rank that is alone nothing comes that would end a
        // part.
        if !self.confirms.is_empty() || self.parts.front().is_some_and(Part::is_over) {
            return Some(Instant(0));
        }
        let due = self
            .parts
            .iter()
            .take(self.window())
            .filter_map(|part| part.poll_timeout(self.link.opens_at()))
            .min();
        due.map(|due| self.clock.due(due))
    }
}

impl<A: Copy, T: Tensor> WorkerMachine for Ring<A, T> {
    type Tensor = T;
    type Plan = RingPlan<A>;

    /// # Panics
    /// As [`WorkerMachine::submit`] says, and for what is no all-reduce.
    fn submit(&mut self, tensor: T, operation: impl Into<Operation>) {
        let operation = operation.into();
        assert_eq!(operation.pattern, Pattern::AllReduce, "a ring has no root");
        let begin = self.core.stream.end();
        let mut tensor = tensor;
        let bound = tensor.loss_bound();
        let (elements, priority) = (tensor.elements().count() as u32, tags::priority(tensor.layer()));
        self.core.submit(tensor, operation);
        self.cut(begin, elements, priority, bound);
        if self.core.is_running() {
            self.begin();
        }
    }

    fn suspend(&mut self) -> Vec<u32> {
        self.core.suspend();
        Vec::new()
    }

    /// Flows under way are lost with a neighbour. A rank that has such ends; others go on.
    fn resume(&mut self, _now: Instant, plan: RingPlan<A>) {
        if !self.core.resume(plan.right) {
            return;
        }
        self.left = [plan.left];
        let JobConfig { id, key, generation, shard, .. } = plan.config;
        self.config = JobConfig { id, key, generation, shard, ..self.config };
        if self.parts.iter().any(Part::is_under_way) {
            self.core.end(AbortReason::SwitchStopped);
            return;
        }
        let submitted = self.submitted.wrapping_sub(self.first);
        self.parts.truncate(submitted as usize);
        (self.first, self.submitted) = (0, submitted);
        self.confirms.clear();
        self.finishes.clear();
        self.to_left = Waiting::new(self.config.retransmission);
        self.to_right = Waiting::new(self.config.retransmission);
        self.begin();
    }

    fn abandon(&mut self) -> impl Iterator<Item = T> {
        self.parts.clear();
        self.core.abandon()
    }

    fn generation(&self) -> Generation {
        self.config.generation
    }

    fn outstanding(&self) -> usize {
        self.core.stream.outstanding()
    }

    fn statistics(&self) -> WorkerStatistics {
        WorkerStatistics { smoothed_rtt: self.to_right.smoothed(), ..self.core.statistics() }
    }
}
