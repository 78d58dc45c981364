//! The worker: cuts tensors into flows, pushes them to the server, and puts the sums that flow back
//! in their place.
//!
//! Flow `f` is the same part of the same tensor on every worker, as all submit alike tensors in the
//! same order. Its blocks are pushed from the tensor itself, and their sums replace them one by
//! one. A sum is there only when it is decided who is in it, so nobody asks for what it replaced.
//! The way back needs no rendezvous, as a worker that pushes a flow waits for its sums.
//!
//! If the server loses its memory, all workers begin again at the first flow that one of them lacks
//! sums of. A worker sends its own block again, or the sum if it has it.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use fanin_quant::{Exponent, Scale};
use fanin_wire::{
    AbortReason, BlockHeader, BlockPacket, CHUNK_ELEMENTS, Collective, FlowId, Generation, Kind, LossBound,
    Operation, Preamble, Signal, SignalPacket, Start, Tag, WireDtype, WorkerId, block_packet_bytes,
};

mod kept;

use self::kept::{Held, Kept};
use super::clock::Clock;
use super::config::{JobConfig, WorkerPlan};
use super::flow::{Receiver, Sender, Waiting};
use super::paths::Paths;
use super::rate::{Pacer, Round, WayRate};
use super::tags;
use crate::machine::{
    Endpoint, Instant, Loss, Packet, Reason, Tensor, Transmit, Verdict, WorkerEvent, WorkerMachine,
    WorkerStatistics,
};
use crate::transport::{Chunk, Run, Stream, WorkerCore};

/// What nobody brought.
static ZEROS: [u8; 4 * CHUNK_ELEMENTS[CHUNK_ELEMENTS.len() - 1]] = [0; _];

/// A shard of one worker. `A` names the server, `T` holds a tensor's memory.
#[derive(Debug)]
pub struct Worker<A, T> {
    core: WorkerCore<A, T>,
    config: JobConfig,
    worker: WorkerId,
    clock: Clock,
    /// Flows that are not complete, and complete ones behind one that is not.
    flows: VecDeque<Flow>,
    /// Number of the first of them.
    first: FlowId,
    /// The complete flows before the first of them that other workers may lack sums of.
    kept: VecDeque<Flow>,
    /// The last flow that all workers have begun: it has sums.
    begun: FlowId,
    /// Memory of flows that nobody lacks.
    spare: Vec<Vec<u8>>,
    /// Complete flows whose end the server has not confirmed.
    finishing: VecDeque<(FlowId, Receiver)>,
    /// Flows whose end is to be confirmed, at most as many as may be under way.
    confirms: VecDeque<FlowId>,
    waiting: Waiting,
    /// Sums that came, and flows of which the server has enough. Other signals go on for ever where
    /// blocks are lost, and bring nothing.
    advances: u64,
    /// The worker's own link, and how fast the way to the server is.
    link: Pacer,
    way: WayRate,
    /// The paths of trains of blocks (§3.2.3), and of signals.
    paths: Paths,
}

/// A flow of a tensor, both ways.
#[derive(Debug)]
struct Flow {
    /// The stream's chunk that is its first block.
    first_chunk: u64,
    /// The one that its tensor begins with, and elements of the tensor before it.
    tensor: u64,
    offset: usize,
    blocks: u32,
    start: Start,
    /// The median; a block whose mean magnitude is above it is important.
    median: f32,
    /// `None` before it began.
    push: Option<Sender>,
    pull: Receiver,
    /// Whether each of its blocks has its sum, or will not get one.
    is_complete: bool,
    /// Which way its start went last.
    start_path: u8,
    /// Its sums, which its server may have to be told again. The tensor is given back once all of its
    /// flows are whole.
    kept: Kept,
}

impl<A: Copy, T: Tensor> Worker<A, T> {
    /// A worker of an admitted job, which is `worker` to its server.
    ///
    /// # Panics
    /// When the configuration was not checked, or the worker is not one of the job's: admission
    /// does that.
    #[must_use]
    pub fn new(config: JobConfig, worker: WorkerId, server: A) -> Self {
        let config = config.check().expect("a job is checked at admission");
        assert!(u16::from(worker.0) < config.workers, "place {} of {} workers", worker.0, config.workers);
        let stream = Stream::new(usize::from(config.elements), WireDtype::Native);
        Self {
            core: WorkerCore::new(stream, server, config.retransmission),
            config,
            worker,
            clock: Clock::default(),
            flows: VecDeque::new(),
            first: FlowId(0),
            kept: VecDeque::new(),
            begun: FlowId(u32::MAX),
            spare: Vec::new(),
            finishing: VecDeque::new(),
            confirms: VecDeque::new(),
            waiting: Waiting::new(config.retransmission),
            advances: 0,
            link: Pacer::default(),
            way: WayRate::new(&config.rate),
            paths: Paths::new(config.paths),
        }
    }

    const fn preamble(&self, kind: Kind) -> Preamble {
        Preamble {
            kind,
            job: self.config.id,
            generation: self.config.generation,
            worker: self.worker,
            shard: self.config.shard,
        }
    }

    /// Cuts what was just submitted into flows.
    fn cut(&mut self, begin: u64, mut elements: u32, priority: u8, bound: Option<LossBound>) {
        let (mut chunk, mut offset) = (begin, 0);
        while chunk < self.core.stream.end() {
            let Some(place) = self.core.stream.locate(chunk) else { unreachable!("it was just submitted") };
            let collective = place.collective();
            let of_flow = self.config.flow_blocks as usize * place.chunk_elements();
            let of_flow = elements.min(u32::try_from(of_flow).unwrap_or(u32::MAX));
            let blocks = self.config.blocks(&collective, of_flow);
            let start = Start {
                collective,
                elements: of_flow,
                bound: self.config.push_bound(&collective, bound),
                priority,
                has_blocks: collective.pattern.contributes(self.worker),
            };
            let pull = pull(&self.config, self.worker, &collective, blocks);
            self.flows.push_back(Flow {
                first_chunk: chunk,
                tensor: begin,
                offset,
                blocks,
                start,
                median: 0.0,
                push: None,
                pull,
                is_complete: false,
                start_path: 0,
                kept: Kept::default(),
            });
            elements -= of_flow;
            offset += of_flow as usize;
            chunk += u64::from(blocks);
        }
    }

    /// How many of the first flows may be under way: two, and others as far as the window goes.
    fn under_way(&self) -> usize {
        let mut blocks = 0_u64;
        let fits = |(number, flow): &(usize, &Flow)| {
            blocks += u64::from(flow.blocks);
            *number < 2 || blocks <= self.config.window_blocks.into()
        };
        self.flows.iter().take(self.config.flows.into()).enumerate().take_while(fits).count()
    }

    /// Begins the flows that may be under way.
    fn begin(&mut self) {
        let under_way = self.under_way();
        let Self { core, config, flows, first, spare, .. } = self;
        for (number, flow) in flows.iter_mut().take(under_way).enumerate() {
            if flow.push.is_some() {
                continue;
            }
            if config.is_made_again(id_of(*first, number)) {
                flow.start.bound = LossBound::RELIABLE;
            }
            if flow.kept.is_empty() {
                flow.kept = Kept::new(flow.blocks, config.block_bytes());
                if flow.start.collective.wire_dtype != WireDtype::Native {
                    flow.kept.lie_beside(spare);
                }
            }
            flow.push = Some(Sender::announcing(flow.start, flow.blocks, config.rate));
            let may_be_dropped = flow.start.bound.of_blocks(flow.blocks) > 0;
            if let Some(mut place) = core.stream.locate(flow.first_chunk).filter(|_| may_be_dropped) {
                let begin = place.range().start;
                let seed = u64::from(first.0) + number as u64;
                let range = begin..begin + flow.start.elements as usize;
                flow.median = tags::median_magnitude(&place.elements(), range, seed);
            }
        }
    }

    /// The place in `flows` of one that has begun.
    fn place_of(&self, flow: FlowId) -> Result<usize, Reason> {
        let at = flow.0.wrapping_sub(self.first.0);
        if at > u32::MAX / 2 {
            return Err(Reason::Stale);
        }
        let has_begun = self.flows.get(at as usize).is_some_and(|flow| flow.push.is_some());
        if has_begun { Ok(at as usize) } else { Err(Reason::Ahead) }
    }

    /// A sum, in its place.
    fn take_block(&mut self, now: Instant, packet: &BlockPacket<'_>) -> Result<Verdict, Reason> {
        let BlockPacket { header, payload, .. } = packet;
        let place = self.place_of(header.flow)?;
        let flow = &mut self.flows[place];
        let Start { collective, elements, .. } = flow.start;
        let workers = self.config.workers;
        let bytes = self.config.bytes_of_sum(&collective, elements, header);
        if header.block >= flow.blocks || header.contributions > workers {
            return Err(Reason::OutOfRange);
        }
        if payload.len() != bytes {
            return Err(Reason::ChunkLength);
        }
        if flow.is_complete {
            return Err(Reason::Stale);
        }
        let taken = flow.pull.take_block(now, header.block, header.round, &self.waiting);
        if header.last {
            flow.pull.take_last(now, header.round, &mut self.waiting);
        }
        if let Err(reason) = taken {
            self.complete(now, place);
            return Err(reason);
        }
        self.advances += 1;
        let id = id_of(self.first, place);
        if is_after(id, self.begun) {
            self.begun = id;
        }
        if flow.kept.of(header.block) != Held::Nothing {
            // It was handed back, and is here.
            self.complete(now, place);
            return Ok(Verdict::Absorb);
        }
        let is_last = flow.pull.lacks() == 0;
        let chunk = flow.first_chunk + u64::from(header.block);
        let mut part = self.core.stream.locate(chunk).ok_or(Reason::Unexpected)?;
        let expected = collective.pattern.contributions(workers);
        *part.loss() += Loss {
            contributions: expected.into(),
            lost: expected.saturating_sub(header.contributions).into(),
            unsummed: (header.contributions == 0).into(),
            kept: 0,
            rounds: if is_last { flow.pull.round().into() } else { 0 },
        };
        let range = part.range();
        let zeros = &ZEROS[..range.len() * JobConfig::element_bytes(&collective)];
        let sum = if header.contributions == 0 { zeros } else { payload };
        if collective.wire_dtype == WireDtype::Native {
            part.elements().copy_from(range, sum);
        } else {
            let (scale, op) = (Scale::new(Exponent::ZERO, workers.into()), collective.op);
            part.elements().dequantize(range, sum, &scale, workers.into(), op);
        }
        let what = Held::Sum(header.contributions);
        flow.kept.keep(header.block, what, bytes, |kept| kept.copy_from_slice(payload));
        let (tensor, finished) = (flow.tensor, part.finish_chunk(now));
        self.give_back(tensor, finished);
        self.complete(now, place);
        Ok(Verdict::Absorb)
    }

    fn take_signal(&mut self, now: Instant, packet: &SignalPacket<'_>) -> Result<Verdict, Reason> {
        let SignalPacket { flow, round, signal, .. } = *packet;
        // The end of what is complete here.
        if let Signal::Confirm | Signal::Stop = signal
            && let Some(at) = self.finishing.iter().position(|(other, _)| *other == flow)
        {
            let (_, pull) = &mut self.finishing[at];
            if signal == Signal::Confirm {
                pull.take_confirm(now, &mut self.waiting)?;
                self.finishing.remove(at);
            } else {
                pull.take_stop(now, round, &mut self.waiting)?;
            }
            return Ok(Verdict::Absorb);
        }
        if signal == Signal::Finish && self.place_of(flow) == Err(Reason::Stale) {
            // It is over here, so that its sender is not needed any more.
            return self.confirm(flow);
        }
        let place = self.place_of(flow)?;
        let Flow { push: Some(push), pull, .. } = &mut self.flows[place] else { return Err(Reason::Ahead) };
        match signal {
            Signal::Report(report) => push.take_report(now, round, report, &mut self.waiting)?,
            Signal::Request { part, missing } => {
                let over = push.take_request(now, round, part, missing, &mut self.waiting)?;
                self.is_over(now, over);
            }
            Signal::Finish => {
                self.advances += u64::from(!push.is_finished());
                let over = push.take_finish(now, &mut self.waiting);
                self.is_over(now, over);
                self.complete(now, place);
                return self.confirm(flow);
            }
            Signal::Stop => {
                pull.take_stop(now, round, &mut self.waiting)?;
                self.complete(now, place);
            }
            Signal::Confirm => pull.take_confirm(now, &mut self.waiting)?,
            Signal::Start(_) => return Err(Reason::Unexpected),
        }
        Ok(Verdict::Absorb)
    }

    /// A round of blocks is over.
    fn is_over(&mut self, now: Instant, round: Round) {
        let round = self.paths.judge(now, round);
        self.way.is_over(now, &self.config.rate, round);
    }

    fn confirm(&mut self, flow: FlowId) -> Result<Verdict, Reason> {
        if self.confirms.contains(&flow) {
            return Err(Reason::Duplicate);
        }
        if self.confirms.len() >= 2 * usize::from(self.config.flows) {
            return Err(Reason::OutboxFull);
        }
        self.confirms.push_back(flow);
        Ok(Verdict::Absorb)
    }

    /// Ends a flow whose sums are there, as far as its bound asks for them, and begins others in
    /// its place.
    fn complete(&mut self, now: Instant, place: usize) {
        let flow = &mut self.flows[place];
        let receives = flow.start.collective.pattern.receives(self.worker);
        let is_pushed = flow.push.as_ref().is_some_and(Sender::is_finished);
        if flow.is_complete || !flow.pull.is_finished() || !receives && !is_pushed {
            return;
        }
        flow.is_complete = true;
        // Sums say that the server had enough, and may come before it says so.
        let over = flow.push.as_mut().map_or(Round::NONE, Sender::end);
        self.is_over(now, over);
        let flow = &mut self.flows[place];
        let mut rounds = u32::from(flow.pull.round());
        let Start { collective, elements, .. } = flow.start;
        let (tensor, mut finished) = (flow.tensor, None);
        for block in 0..flow.blocks {
            if flow.kept.of(block) != Held::Nothing {
                continue;
            }
            let Some(mut part) = self.core.stream.locate(flow.first_chunk + u64::from(block)) else { break };
            let bytes = self.config.bytes_of_block(&collective, elements, block);
            flow.kept.keep(block, Held::Own, bytes, |kept| write_own(&mut part, &collective, kept));
            if receives {
                // The own gradient stays (Appendix A).
                let contributions = self.config.workers.into();
                let rounds = core::mem::take(&mut rounds);
                *part.loss() += Loss { contributions, kept: 1, rounds, ..Loss::default() };
            }
            finished = part.finish_chunk(now);
        }
        self.give_back(tensor, finished);
        while self.flows.front().is_some_and(|flow| flow.is_complete) {
            let Some(mut flow) = self.flows.pop_front() else { break };
            if self.receives(&flow) && !flow.pull.is_confirmed() {
                let again = pull(&self.config, self.worker, &flow.start.collective, 0);
                self.finishing.push_back((self.first, core::mem::replace(&mut flow.pull, again)));
            }
            self.kept.push_back(flow);
            self.first = id_of(self.first, 1);
        }
        self.forget();
        self.begin();
    }

    fn receives(&self, flow: &Flow) -> bool {
        flow.start.collective.pattern.receives(self.worker)
    }

    /// Writes the next signal that is due.
    fn write_signal(&mut self, now: Instant, train: &mut [u8]) -> Option<usize> {
        let preamble = self.preamble(Kind::Signal);
        let (key, worker, waiting) = (self.config.key, self.worker, &self.waiting);
        let paths = &mut self.paths;
        let (path, after) = paths.next(now, paths.signals, |_| true)?;
        let mut write = |flow, (round, signal): (u16, Signal<'_>), train: &mut [u8]| {
            paths.send_signal(now, after);
            let packet = SignalPacket { preamble, flow, round, path, signal };
            let bytes = signal.packet_bytes();
            packet.write(&mut train[..bytes], key);
            bytes
        };
        if let Some(flow) = self.confirms.pop_front() {
            return Some(write(flow, (0, Signal::Confirm), train));
        }
        for (number, flow) in self.flows.iter_mut().enumerate() {
            let Some(push) = &mut flow.push else { break };
            let id = id_of(self.first, number);
            if !flow.is_complete
                && let Some(signal) = push.poll_signal(now, waiting)
            {
                if let Signal::Start(_) = signal.1 {
                    flow.start_path = path;
                }
                return Some(write(id, signal, train));
            }
            if flow.start.collective.pattern.receives(worker)
                && let Some(signal) = flow.pull.poll_signal(now, waiting)
            {
                return Some(write(id, signal, train));
            }
        }
        for (id, pull) in &mut self.finishing {
            if let Some(signal) = pull.poll_signal(now, waiting) {
                return Some(write(*id, signal, train));
            }
        }
        None
    }

    /// Writes blocks of one flow, all to be treated alike, as far as its rate and the link let them
    /// leave.
    fn write_blocks(&mut self, now: Instant, train: &mut [u8]) -> Run {
        let (preamble, under_way) = (self.preamble(Kind::Block), self.under_way());
        let Self { core, config, worker, flows, first, link, way, paths, .. } = self;
        let mut run = Run::default();
        let Some((next_path, after)) = paths.next(now, paths.blocks, |_| true) else { return run };
        // Front layers first; of one priority, in the order of submission.
        let mut order: Vec<_> = (0..under_way).filter(|at| flows[*at].may_send(config)).collect();
        order.sort_by_key(|at| flows[*at].start.priority);
        for at in order {
            let id = id_of(*first, at);
            let Flow { first_chunk, blocks, start, median, push: Some(push), pull, start_path, kept, .. } =
                &mut flows[at]
            else {
                continue;
            };
            // A block that overtook its flow's start would be dropped: until that is answered,
            // blocks follow it.
            let path = if push.is_announcing() { *start_path } else { next_path };
            let may_be_dropped = start.bound.of_blocks(*blocks) > 0;
            let receives = start.collective.pattern.receives(*worker);
            let is_made_again = config.is_made_again(id);
            let mut treatment = None;
            while link.is_open(now, &config.rate) && push.is_open(now) {
                let next = push.peek(|block| {
                    // A block that has its sum is not needed any more.
                    let is_needed = !receives || !pull.has(block);
                    if is_made_again {
                        return is_needed.then_some(true);
                    }
                    let mut part =
                        core.stream.locate(*first_chunk + u64::from(block)).filter(|_| is_needed)?;
                    let range = part.range();
                    Some(!may_be_dropped || tags::is_important(&part.elements(), range, *median))
                });
                let Some((block, important)) = next else { break };
                let tag = Tag { priority: start.priority, important, path };
                let held = if is_made_again { kept.of(block) } else { Held::Nothing };
                let (contributions, restored) = match held {
                    Held::Sum(count) => (count, true),
                    Held::Own | Held::Nothing => (1, false),
                };
                let (round, last) = (push.round(), config.stops_ride() && push.is_last());
                let header = BlockHeader { flow: id, block, round, tag, contributions, last, restored };
                let packet_bytes =
                    block_packet_bytes(config.bytes_of_sum(&start.collective, start.elements, &header));
                if treatment.is_some_and(|of_train| of_train != tag) || !run.takes(packet_bytes, train) {
                    break;
                }
                treatment = Some(tag);
                let mut part = core.stream.locate(*first_chunk + u64::from(block));
                if part.is_none() && held == Held::Nothing {
                    break;
                }
                let packet = run.packet(packet_bytes, train);
                BlockPacket::write(packet, config.key, &preamble, &header, |payload| match &mut part {
                    // A sum of nothing.
                    _ if payload.is_empty() => {}
                    Some(part) if held == Held::Nothing || kept.is_in_tensor() => {
                        part.sent(now);
                        write_own(part, &start.collective, payload);
                    }
                    _ => kept.write(block, payload),
                });
                core.statistics.packets_sent += 1;
                core.statistics.retransmissions += u64::from(push.round() > 0);
                push.sent(now, way.bps(), Some(path));
                if last {
                    push.stop_rides(now);
                }
                link.sent(now, &config.rate, way.bps());
            }
            if !run.is_empty() {
                // The next train takes the next path: blocks may overtake each other (§3.2.3).
                paths.send_blocks(now, after);
                break;
            }
        }
        run
    }
}

/// The receiver of a flow's sums.
fn pull(config: &JobConfig, worker: WorkerId, collective: &Collective, blocks: u32) -> Receiver {
    let awaited = if collective.pattern.receives(worker) { blocks } else { 0 };
    Receiver::new(awaited, config.pull_bound(collective), config.receiver_of_sums())
}

/// Writes a worker's own contribution, as it travels.
fn write_own<T: Tensor>(part: &mut Chunk<'_, T>, collective: &Collective, payload: &mut [u8]) {
    let range = part.range();
    match collective.wire_dtype {
        WireDtype::Native => part.elements().copy_to(range, payload),
        _ => part.elements().quantize(range, &Scale::new(Exponent::ZERO, 1), payload),
    }
}

/// The number of a flow so many after another.
const fn id_of(first: FlowId, number: usize) -> FlowId {
    FlowId(first.0.wrapping_add(number as u32))
}

/// Whether a flow is after another; numbers wrap.
const fn is_after(flow: FlowId, other: FlowId) -> bool {
    flow.0.wrapping_sub(other.0).cast_signed() > 0
}

impl Flow {
    /// Whether it has blocks to push, and need not wait for an answer first.
    fn may_send(&self, config: &JobConfig) -> bool {
        let waits = |push: &Sender| config.paths > 1 && push.waits_for_its_start();
        !self.is_complete && self.push.as_ref().is_some_and(|push| push.has_blocks() && !waits(push))
    }
}

impl<A: Copy, T: Tensor> Endpoint for Worker<A, T> {
    type Address = A;
    type Event = WorkerEvent<T>;

    fn receive(&mut self, now: Instant, _from: &A, packet: &Packet<'_>) -> Result<Verdict, Reason> {
        let now = self.clock.read(now);
        self.core.check(&self.preamble(Kind::Block), self.config.key, packet)?;
        self.paths.hears();
        let Packet { preamble, bytes } = *packet;
        // A sum is for all. A packet of this worker's own is no sum, should it come back.
        let whose = if preamble.kind == Kind::Block { WorkerId::ALL } else { self.worker };
        if preamble.worker != whose {
            return Err(Reason::OutOfRange);
        }
        match preamble.kind {
            Kind::Block => self.take_block(now, &BlockPacket::parse(preamble, bytes)?),
            Kind::Signal => self.take_signal(now, &SignalPacket::parse(preamble, bytes)?),
            Kind::Abort => {
                self.core.abort(packet)?;
                Ok(Verdict::Absorb)
            }
            Kind::Update | Kind::Result | Kind::Restore | Kind::Gradient | Kind::Query | Kind::Planned => {
                Err(Reason::Unexpected)
            }
        }
    }

    fn count(&mut self, verdict: Verdict) -> Verdict {
        self.core.count(verdict)
    }

    fn handle_timeout(&mut self, now: Instant) {
        let now = self.clock.read(now);
        // From the last: flows that are complete leave the front.
        for place in (0..self.under_way()).rev() {
            if self.flows[place].push.is_some() {
                self.flows[place].pull.handle_timeout(now);
                self.complete(now, place);
            }
        }
    }

    fn poll_transmit(&mut self, now: Instant, train: &mut [u8]) -> Option<Transmit<'_, A>> {
        let now = self.clock.read(now);
        if !self.core.is_running() {
            return None;
        }
        if let Some(bytes) = self.write_signal(now, train) {
            self.core.statistics.packets_sent += 1;
            return Some(Transmit { to: self.core.peer(), bytes, segment_bytes: bytes });
        }
        let run = self.write_blocks(now, train);
        if run.is_empty() {
            // The last of a round may have been what nobody needs any more: then its stop is due.
            let bytes = self.write_signal(now, train)?;
            return Some(Transmit { to: self.core.peer(), bytes, segment_bytes: bytes });
        }
        run.to(self.core.peer())
    }

    fn poll_event(&mut self) -> Option<WorkerEvent<T>> {
        self.core.poll_event()
    }

    fn poll_timeout(&self) -> Option<Instant> {
        if !self.core.is_running() {
            return None;
        }
        let flows = self.flows.iter().take(self.under_way()).filter_map(|flow| {
            let push = flow.push.as_ref()?;
            let pull = if self.receives(flow) { flow.pull.poll_timeout() } else { None };
            let blocks = flow.may_send(&self.config).then(|| push.opens_at().max(self.link.opens_at()));
            let signals = if flow.is_complete { None } else { push.poll_timeout() };
            [pull, blocks, signals].into_iter().flatten().min()
        });
        let finishing = self.finishing.iter().filter_map(|(_, pull)| pull.poll_timeout());
        let confirms = (!self.confirms.is_empty()).then_some(Instant(0));
        flows.chain(finishing).chain(confirms).min().map(|due| self.clock.due(due))
    }
}

impl<A: Copy, T: Tensor> WorkerMachine for Worker<A, T> {
    type Tensor = T;
    type Plan = WorkerPlan<A>;

    fn submit(&mut self, tensor: T, operation: impl Into<Operation>) {
        let begin = self.core.stream.end();
        let mut tensor = tensor;
        let bound = tensor.loss_bound();
        let (elements, priority) = (tensor.elements().count() as u32, tags::priority(tensor.layer()));
        self.core.submit(tensor, operation.into());
        self.cut(begin, elements, priority, bound);
        if self.core.is_running() {
            self.begin();
        }
    }

    /// Returns the first flow that lacks sums.
    fn suspend(&mut self) -> Vec<u32> {
        self.core.suspend();
        Vec::from([self.lacking().0])
    }

    fn resume(&mut self, _now: Instant, plan: WorkerPlan<A>) {
        if !self.core.resume(plan.server) {
            return;
        }
        let JobConfig { id, key, generation, shard, resumes_at, .. } = plan.config;
        self.config = JobConfig { id, key, generation, shard, resumes_at, ..self.config };
        self.worker = plan.place;
        self.way = WayRate::new(&self.config.rate);
        self.paths = Paths::new(self.config.paths);
        self.finishing.clear();
        self.confirms.clear();
        self.waiting = Waiting::new(self.config.retransmission);
        let goes_on = match resumes_at {
            Some(flow) => self.go_back(flow),
            None => self.begin_anew(),
        };
        if !goes_on {
            self.core.end(AbortReason::SwitchStopped);
            return;
        }
        self.begin();
    }

    fn abandon(&mut self) -> impl Iterator<Item = T> {
        self.flows.clear();
        self.kept.clear();
        self.spare.clear();
        self.core.abandon()
    }

    fn generation(&self) -> Generation {
        self.config.generation
    }

    fn outstanding(&self) -> usize {
        self.core.stream.outstanding()
    }

    fn statistics(&self) -> WorkerStatistics {
        WorkerStatistics { smoothed_rtt: self.waiting.smoothed(), ..self.core.statistics() }
    }

    fn progress(&self) -> u64 {
        self.advances
    }
}
