//! A job at the server.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;
use fanin_wire::{
    Abort, AbortReason, BlockHeader, BlockPacket, Collective, FlowId, Generation, Key, Kind, LossBound,
    PRIORITIES, Preamble, Signal, SignalPacket, Start, Tag, WorkerId, block_packet_bytes,
};

use super::addresses::Addresses;
use super::flow::Flow;
use crate::dlcp::config::{JobConfig, ServerJob, may_lose};
use crate::dlcp::flow::{Sender, Waiting};
use crate::dlcp::rate::{Pacer, Round, WayRate};
use crate::dlcp::rendezvous::Unlike;
use crate::dlcp::sums::{Memory, words_of_block};
use crate::machine::{Abortion, Instant, JobProgress, Packet, Reason, TableJob, Transmit, Verdict};
use crate::transport::Run;

/// A train that was written: the places that it is for, and its lengths.
#[derive(Clone, Copy, Debug)]
pub(super) struct Written {
    places: u64,
    bytes: usize,
    segment_bytes: usize,
}

#[derive(Debug)]
pub(super) struct Job<A> {
    job: ServerJob,
    /// Flows under way, in their order, and such as are over behind one that is not.
    flows: VecDeque<Option<Flow>>,
    /// Number of the first of them.
    first: FlowId,
    /// The memory of flows that are over.
    spare: Vec<Memory>,
    /// By place.
    addresses: Vec<Addresses<A>>,
    /// Places that were heard of since that was looked at.
    heard: u64,
    /// By place.
    waiting: Vec<Waiting>,
    /// Flows whose end is to be confirmed, by place.
    confirms: VecDeque<(usize, FlowId)>,
    /// By priority: who has blocks to send of which flow.
    sending: [VecDeque<(FlowId, usize)>; PRIORITIES as usize],
    /// Blocks of the train that is being written.
    blocks: Vec<u32>,
    /// The recipients of the last train.
    recipients: Vec<A>,
    /// The server's own link.
    link: Pacer,
    /// By place: the worker's link, which all flows to it share.
    to: Vec<Pacer>,
    /// By place: how fast the way to the worker is.
    ways: Vec<WayRate>,
    /// The slowest of these. All sums leave at this rate, as one train reaches all workers.
    way_bps: u64,
    /// Whether a signal may be due.
    may_signal: bool,
    /// Not later than anything is due, once it was looked for since `may_be_due`.
    due: Option<Instant>,
    may_be_due: bool,
    abortion: Abortion,
    /// Places to be told of it.
    abort_pending: u64,
    completed: u64,
    /// Contributions that are not in the sums of flows that are over.
    lost: u64,
    retransmitted: u64,
    lateness: Vec<Duration>,
}

impl<A: Copy + PartialEq> Job<A> {
    pub(super) fn new(job: ServerJob) -> Self {
        let workers = usize::from(job.config.workers);
        Self {
            flows: VecDeque::new(),
            first: job.config.resumes_at.unwrap_or(FlowId(0)),
            spare: Vec::new(),
            addresses: (0..workers).map(|_| Addresses::new(job.config.paths)).collect(),
            heard: 0,
            waiting: (0..workers).map(|_| Waiting::new(job.config.retransmission)).collect(),
            confirms: VecDeque::new(),
            sending: Default::default(),
            blocks: Vec::new(),
            recipients: Vec::with_capacity(workers),
            link: Pacer::default(),
            to: vec![Pacer::default(); workers],
            ways: vec![WayRate::new(&job.config.rate); workers],
            way_bps: job.config.rate.line_rate_bps,
            may_signal: false,
            due: None,
            may_be_due: false,
            abortion: Abortion::None,
            abort_pending: 0,
            completed: 0,
            lost: 0,
            retransmitted: 0,
            lateness: vec![Duration::ZERO; workers],
            job,
        }
    }

    const fn config(&self) -> &JobConfig {
        &self.job.config
    }

    /// Takes a packet that is authentic. Its sender was heard once the whole packet is readable.
    pub(super) fn receive(&mut self, now: Instant, from: A, packet: &Packet<'_>) -> Result<Verdict, Reason> {
        let Packet { preamble, bytes } = *packet;
        if preamble.kind == Kind::Block {
            let packet = BlockPacket::parse(preamble, bytes)?;
            self.hear(from, &preamble)?;
            self.take_block(now, from, &packet)
        } else {
            let packet = SignalPacket::parse(preamble, bytes)?;
            self.hear(from, &preamble)?;
            self.take_signal(now, from, &packet)
        }
    }

    /// Notes that a worker is there.
    fn hear(&mut self, from: A, preamble: &Preamble) -> Result<(), Reason> {
        if u16::from(preamble.worker.0) >= self.config().workers {
            return Err(Reason::OutOfRange);
        }
        self.heard |= preamble.worker.bit();
        self.addresses[usize::from(preamble.worker.0)].hears();
        if self.abortion != Abortion::None {
            // A worker that comes after the end is told of it, too.
            if preamble.kind == Kind::Signal {
                self.addresses[usize::from(preamble.worker.0)].heard(from);
            }
            self.abort_pending |= preamble.worker.bit();
            return Err(Reason::Aborted);
        }
        Ok(())
    }

    /// The place in `flows` of one that may be under way.
    fn place_of(&self, flow: FlowId) -> Result<usize, Reason> {
        let at = flow.0.wrapping_sub(self.first.0);
        match at as usize {
            _ if at > u32::MAX / 2 => Err(Reason::Stale),
            at if at >= self.config().flows_max() => Err(Reason::Ahead),
            at => Ok(at),
        }
    }

    fn flow(&mut self, id: FlowId) -> Result<&mut Flow, Reason> {
        let at = self.place_of(id)?;
        self.flows.get_mut(at).and_then(Option::as_mut).ok_or(Reason::Unannounced)
    }

    fn take_block(&mut self, now: Instant, from: A, packet: &BlockPacket<'_>) -> Result<Verdict, Reason> {
        let BlockPacket { preamble: Preamble { worker, .. }, header, payload } = *packet;
        let at = self.place_of(header.flow)?;
        let Self { job: ServerJob { config, .. }, flows, waiting, addresses, .. } = self;
        let flow = flows.get_mut(at).and_then(Option::as_mut).ok_or(Reason::Unannounced)?;
        let Start { collective, elements, .. } = flow.start;
        let may_be = match header.restored {
            true => config.is_made_again(header.flow) && may_restore(worker, &collective, &header, config),
            false => header.contributions == 1,
        };
        if header.block >= flow.blocks || !may_be {
            return Err(Reason::OutOfRange);
        }
        if payload.len() != config.bytes_of_sum(&collective, elements, &header) {
            return Err(Reason::ChunkLength);
        }
        let open = flow.sums.open();
        let waiting = &mut waiting[usize::from(worker.0)];
        let outcome = flow.take_block(now, worker, &header, payload, waiting);
        if header.last {
            flow.take_last(now, worker, header.round, waiting);
        }
        if outcome.is_ok() && config.paths > 1 {
            addresses[usize::from(worker.0)].learn(now, header.tag.path, from);
        }
        let decided = open - flow.sums.open();
        // A receiver looks at what came no sooner than that, but for its end.
        let due = now + config.rate.period.min(config.quiet);
        self.may_signal |= flow.is_finished(worker);
        if outcome == Err(Reason::Duplicate) {
            self.retransmitted += 1;
        }
        self.due = Some(self.due.map_or(due, |old| old.min(due)));
        self.decided(at, decided);
        outcome.map(|()| if decided > 0 { Verdict::Multicast } else { Verdict::Absorb })
    }

    /// Notes that so many blocks of a flow were decided.
    fn decided(&mut self, at: usize, blocks: u32) {
        let Some(flow) = self.flows[at].as_ref().filter(|_| blocks > 0) else { return };
        self.completed += u64::from(blocks);
        self.may_signal = true;
        self.may_be_due = true;
        for place in 0..flow.pulls.len() {
            self.line_up(at, place);
        }
    }

    /// Puts a pull that has blocks to send into its line, if it is not there.
    fn line_up(&mut self, at: usize, place: usize) {
        let Some(flow) = &mut self.flows[at] else { return };
        let has_blocks = flow.pulls[place].as_ref().is_some_and(Sender::has_blocks);
        if has_blocks && flow.lined_up & 1 << place == 0 {
            flow.lined_up |= 1 << place;
            self.sending[usize::from(flow.start.priority)].push_back((flow.id, place));
        }
    }

    fn take_signal(&mut self, now: Instant, from: A, packet: &SignalPacket<'_>) -> Result<Verdict, Reason> {
        let place = usize::from(packet.preamble.worker.0);
        // Also one that comes again may have to be answered where it is from.
        self.addresses[place].heard(from);
        let is_over = self.place_of(packet.flow) == Err(Reason::Stale);
        let outcome = self.act_on(now, packet);
        if outcome.is_ok() && !is_over {
            self.addresses[place].learn(now, packet.path, from);
        }
        outcome
    }

    /// Does what a signal says; an error where that is nothing new.
    fn act_on(&mut self, now: Instant, packet: &SignalPacket<'_>) -> Result<Verdict, Reason> {
        let SignalPacket { preamble: Preamble { worker, .. }, flow: id, round, signal, .. } = *packet;
        let place = usize::from(worker.0);
        self.may_signal = true;
        self.may_be_due = true;
        if signal == Signal::Finish && self.place_of(id) == Err(Reason::Stale) {
            return self.confirm(place, id);
        }
        if let Signal::Start(start) = signal {
            return self.take_start(now, worker, id, &start);
        }
        let at = self.place_of(id)?;
        let flow = self.flows.get_mut(at).and_then(Option::as_mut).ok_or(Reason::Unannounced)?;
        let waiting = &mut self.waiting[place];
        let push = || Reason::Unannounced;
        let nothing = || Reason::Unexpected;
        match signal {
            Signal::Start(_) => unreachable!("it is taken above"),
            Signal::Stop => {
                flow.pushes[place].as_mut().ok_or_else(push)?.take_stop(now, round, waiting)?;
                let open = flow.sums.open();
                flow.close_what_is_decided(worker);
                let decided = open - flow.sums.open();
                self.decided(at, decided);
            }
            Signal::Confirm => {
                flow.pushes[place].as_mut().ok_or_else(push)?.take_confirm(now, waiting)?;
                self.forget_what_is_over();
            }
            Signal::Report(report) => {
                flow.pulls[place].as_mut().ok_or_else(nothing)?.take_report(now, round, report, waiting)?;
            }
            Signal::Request { part, missing } => {
                let pull = flow.pulls[place].as_mut().ok_or_else(nothing)?;
                let over = pull.take_request(now, round, part, missing, waiting)?;
                self.is_over(now, place, over);
                self.line_up(at, place);
            }
            Signal::Finish => {
                let pull = flow.pulls[place].as_mut().ok_or_else(nothing)?;
                if flow.sums.open() > 0 {
                    return Err(Reason::Unexpected);
                }
                let is_new = !pull.is_finished();
                let over = pull.take_finish(now, waiting);
                self.is_over(now, place, over);
                self.forget_what_is_over();
                let confirmed = self.confirm(place, id)?;
                return if is_new { Ok(confirmed) } else { Err(Reason::Duplicate) };
            }
        }
        Ok(Verdict::Absorb)
    }

    /// A round of sums to a worker is over.
    fn is_over(&mut self, now: Instant, place: usize, round: Round) {
        let round = self.addresses[place].judge(now, round);
        self.ways[place].is_over(now, &self.job.config.rate, round);
        self.way_bps = self.ways.iter().map(WayRate::bps).min().unwrap_or(self.way_bps);
    }

    /// The rendezvous of a worker's flow (§3.2.1).
    fn take_start(
        &mut self,
        now: Instant,
        worker: WorkerId,
        id: FlowId,
        start: &Start,
    ) -> Result<Verdict, Reason> {
        let at = self.place_of(id)?;
        let config = *self.config();
        if config.blocks(&start.collective, start.elements) > config.flow_blocks {
            return Err(Reason::OutOfRange);
        }
        // Integers are all there when they are summed: a bound for them is no member's to say.
        if start.bound != LossBound::RELIABLE && !may_lose(&start.collective) {
            return Err(Reason::OutOfRange);
        }
        if start.has_blocks != start.collective.pattern.contributes(worker) {
            return Err(Reason::Unexpected);
        }
        if self.flows.get(at).is_none_or(Option::is_none) && !self.has_room(start) {
            return Err(Reason::Ahead);
        }
        if self.flows.len() <= at {
            self.flows.resize_with(at + 1, || None);
        }
        let flow = self.flows[at].get_or_insert_with(|| {
            Flow::new(id, *start, (worker, now), &config, self.spare.pop().unwrap_or_default())
        });
        let (first, since) = flow.first;
        let rank = |worker: WorkerId| self.job.ranks[usize::from(worker.0)];
        if let Some(unlike) = Unlike::of(&flow.start, start) {
            self.end(Abortion::New(unlike.reason(rank(first), rank(worker))));
            return Ok(Verdict::Multicast);
        }
        let place = usize::from(worker.0);
        let is_new = flow.pushes[place].is_none();
        let open = flow.sums.open();
        flow.take_start(now, worker, start, config.receiver());
        let decided = open - flow.sums.open();
        if is_new {
            self.lateness[place] += now.since(since);
        }
        self.decided(at, decided);
        if is_new { Ok(Verdict::Absorb) } else { Err(Reason::Duplicate) }
    }

    /// Whether the blocks of another flow are no more than workers may be apart by.
    fn has_room(&self, start: &Start) -> bool {
        let under_way: u64 = self.flows.iter().flatten().map(|flow| u64::from(flow.blocks)).sum();
        let more = self.config().blocks(&start.collective, start.elements);
        under_way + u64::from(more) <= self.config().blocks_max()
    }

    fn confirm(&mut self, place: usize, flow: FlowId) -> Result<Verdict, Reason> {
        if self.confirms.contains(&(place, flow)) {
            return Err(Reason::Duplicate);
        }
        if self.confirms.len() >= self.config().flows_max() * self.addresses.len() {
            return Err(Reason::OutboxFull);
        }
        self.confirms.push_back((place, flow));
        Ok(Verdict::ReplyUnicast)
    }

    fn forget_what_is_over(&mut self) {
        while self.flows.front().is_some_and(|flow| flow.as_ref().is_some_and(Flow::is_over)) {
            if let Some(over) = self.flows.pop_front().flatten() {
                self.lost += over.sums.lost();
                self.keep(over.sums.into_memory());
            }
            self.first = FlowId(self.first.0.wrapping_add(1));
        }
    }

    /// Keeps the memory of a flow that is over. All that is kept or in use is no more than what
    /// flows under way may need.
    fn keep(&mut self, memory: Memory) {
        let in_use: usize = self.flows.iter().flatten().map(|flow| flow.sums.words()).sum();
        let kept: usize = self.spare.iter().map(Memory::words).sum();
        let of_block = words_of_block(self.config().elements);
        if in_use + kept + memory.words() <= self.config().blocks_max() as usize * of_block {
            self.spare.push(memory);
        }
    }

    pub(super) fn handle_timeout(&mut self, now: Instant) {
        if self.due.is_none_or(|due| due > now) {
            return;
        }
        let heard = core::mem::take(&mut self.heard);
        for at in 0..self.flows.len() {
            let Some(flow) = &mut self.flows[at] else { continue };
            flow.excuse(heard);
            let open = flow.sums.open();
            for place in 0..flow.pushes.len() {
                if let Some(push) = &mut flow.pushes[place] {
                    push.handle_timeout(now);
                    flow.close_what_is_decided(WorkerId(place as u8));
                }
            }
            let (decided, silent) = (open - flow.sums.open(), flow.silent());
            self.decided(at, decided);
            if let Some(place) = silent {
                self.end(Abortion::New(AbortReason::Expelled(self.job.ranks[place])));
                return;
            }
        }
        self.may_signal = true;
        self.may_be_due = true;
    }

    /// Finds out when something is due.
    fn look_ahead(&mut self) {
        let signals = self.flows.iter().flatten().filter_map(Flow::poll_timeout).min();
        let blocks = self.sending.iter().flatten().filter_map(|(id, place)| {
            let at = self.place_of(*id).ok()?;
            let pull = self.flows.get(at)?.as_ref()?.pulls[*place].as_ref()?;
            let opens_at = pull.opens_at().max(self.link.opens_at()).max(self.to[*place].opens_at());
            Some(opens_at.max(pull.gathers_until()))
        });
        self.due = signals.into_iter().chain(blocks.min()).min();
        self.may_be_due = false;
    }

    /// Not later than something is due.
    pub(super) const fn poll_timeout(&self) -> Option<Instant> {
        self.due
    }

    /// Writes the next train.
    pub(super) fn write(&mut self, now: Instant, train: &mut [u8]) -> Option<Written> {
        if let Some(reason) = self.abortion.reason() {
            return self.write_abort(now, reason, train);
        }
        let written = self.write_confirm(now, train);
        let written =
            written.or_else(|| self.write_signal(now, train)).or_else(|| self.write_blocks(now, train));
        // The last of a round may have been all that a stop waited for.
        let written = written.or_else(|| self.write_signal(now, train));
        match written {
            Some(_) => self.may_be_due = true,
            None if self.may_be_due => self.look_ahead(),
            None => {}
        }
        written
    }

    /// The recipients of a train.
    pub(super) fn transmit(&mut self, written: Written) -> Option<Transmit<'_, A>> {
        let Written { places, bytes, segment_bytes } = written;
        self.recipients.clear();
        let addresses = self.addresses.iter().enumerate().filter(|(place, _)| places >> place & 1 != 0);
        self.recipients.extend(addresses.filter_map(|(_, addresses)| addresses.to()));
        (!self.recipients.is_empty()).then_some(Transmit { to: &self.recipients, bytes, segment_bytes })
    }

    fn preamble(&self, kind: Kind, worker: WorkerId) -> Preamble {
        let JobConfig { id, generation, shard, .. } = *self.config();
        Preamble { kind, job: id, generation, worker, shard }
    }

    fn write_confirm(&mut self, now: Instant, train: &mut [u8]) -> Option<Written> {
        let (place, flow) = self.confirms.pop_front()?;
        let preamble = self.preamble(Kind::Signal, WorkerId(place as u8));
        let packet = SignalPacket { preamble, flow, round: 0, path: 0, signal: Signal::Confirm };
        let bytes = packet.signal.packet_bytes();
        packet.write(&mut train[..bytes], self.config().key);
        self.addresses[place].send_signal(now);
        Some(Written { places: 1 << place, bytes, segment_bytes: bytes })
    }

    fn write_signal(&mut self, now: Instant, train: &mut [u8]) -> Option<Written> {
        if !self.may_signal {
            return None;
        }
        let JobConfig { id, generation, shard, key, .. } = *self.config();
        for flow in self.flows.iter_mut().flatten() {
            for (place, waiting) in self.waiting.iter().enumerate() {
                let push = flow.pushes[place].as_mut();
                let mut signal = push.and_then(|push| push.poll_signal(now, waiting));
                if signal.is_none() {
                    signal = flow.pulls[place].as_mut().and_then(|pull| pull.poll_signal(now, waiting));
                }
                let Some((round, signal)) = signal else { continue };
                let worker = WorkerId(place as u8);
                let preamble = Preamble { kind: Kind::Signal, job: id, generation, worker, shard };
                let bytes = signal.packet_bytes();
                // A worker learns nothing from the path of a server, which has one port.
                let packet = SignalPacket { preamble, flow: flow.id, round, path: 0, signal };
                packet.write(&mut train[..bytes], key);
                self.addresses[place].send_signal(now);
                return Some(Written { places: 1 << place, bytes, segment_bytes: bytes });
            }
        }
        self.may_signal = false;
        None
    }

    /// Writes sums of one flow, as far as rates and links let them leave: to one worker, and to
    /// those who would get the same ones next.
    fn write_blocks(&mut self, now: Instant, train: &mut [u8]) -> Option<Written> {
        if self.sending.iter().all(VecDeque::is_empty) || !self.link.is_open(now, &self.job.config.rate) {
            return None;
        }
        for priority in 0..self.sending.len() {
            for _ in 0..self.sending[priority].len() {
                let (id, place) = self.sending[priority].pop_front()?;
                let (run, last) = self.write_pull(now, id, place, train);
                let places = 1 << place | self.send_along(now, id, place, last);
                if let Ok(flow) = self.flow(id) {
                    flow.lined_up &= !(1 << place);
                    let at = self.place_of(id).ok()?;
                    self.line_up(at, place);
                }
                if let Some(transmit) = run.to(&[place]) {
                    let to = self.addresses.iter_mut().enumerate().filter(|(to, _)| places >> to & 1 != 0);
                    to.for_each(|(_, addresses)| addresses.send_blocks(now));
                    let Transmit { bytes, segment_bytes, .. } = transmit;
                    return Some(Written { places, bytes, segment_bytes });
                }
            }
        }
        None
    }

    /// Returns whether the train ends a round, too.
    fn write_pull(&mut self, now: Instant, id: FlowId, place: usize, train: &mut [u8]) -> (Run, bool) {
        // A sum is the same for all.
        let preamble = self.preamble(Kind::Block, WorkerId::ALL);
        let (config, by) = (*self.config(), self.addresses[place].path(now));
        // A worker learns nothing from it.
        let path = by.unwrap_or_default();
        let (mut run, mut ends) = (Run::default(), false);
        self.blocks.clear();
        let (mut link, mut to, is_known) = (self.link, self.to[place], self.addresses[place].is_known());
        let way_bps = self.way_bps;
        let link_rate_bps = self.job.link_rate_bps;
        let Ok(at) = self.place_of(id) else { return (run, false) };
        let Self { flows, blocks, .. } = self;
        let Some(Flow { start, sums, pulls, .. }) = flows.get_mut(at).and_then(Option::as_mut) else {
            return (run, false);
        };
        let Some(pull) = pulls[place].as_mut().filter(|_| is_known) else { return (run, false) };
        if pull.gathers(now) {
            return (run, false);
        }
        while link.is_open(now, &config.rate) && to.is_open(now, &config.rate) && pull.is_open(now) {
            // The sum is of many workers' gradients, and so all important (§3.2.1, loss bound
            // setting).
            let Some((block, important)) = pull.peek(|_| Some(true)) else { break };
            let Some(contributions) = sums.contributions(block) else { break };
            let tag = Tag { priority: start.priority, important, path };
            let (round, last) = (pull.round(), pull.is_last());
            let header = BlockHeader { flow: id, block, round, tag, contributions, last, restored: false };
            let bytes = config.bytes_of_sum(&start.collective, start.elements, &header);
            let packet_bytes = block_packet_bytes(bytes);
            if !run.takes(packet_bytes, train) {
                break;
            }
            ends |= last;
            BlockPacket::write(run.packet(packet_bytes, train), config.key, &preamble, &header, |payload| {
                sums.write(block, payload);
            });
            blocks.push(block);
            pull.sent(now, way_bps, by);
            if last {
                pull.stop_rides(now);
            }
            link.sent(now, &config.rate, link_rate_bps);
            to.sent(now, &config.rate, way_bps);
        }
        (self.link, self.to[place]) = (link, to);
        // The last of a round is followed by a stop. Every sum in line is wanted, so that none is
        // left without having been sent.
        self.may_signal |= !run.is_empty();
        (run, ends)
    }

    /// The other workers that the train just written to `place` reaches: those that would get just
    /// that next, and now. Each worker's link is paced as if it had been written for it.
    fn send_along(&mut self, now: Instant, id: FlowId, place: usize, last: bool) -> u64 {
        let Ok(at) = self.place_of(id) else { return 0 };
        let way_bps = self.way_bps;
        let Self { job: ServerJob { config, link_rate_bps, .. }, flows, addresses, link, to, blocks, .. } =
            self;
        let Some(pulls) = flows.get_mut(at).and_then(Option::as_mut).map(|flow| &mut flow.pulls) else {
            return 0;
        };
        let Some(round) = pulls[place].as_ref().map(Sender::round).filter(|_| !blocks.is_empty()) else {
            return 0;
        };
        let (rate, packets, mut places) = (&config.rate, blocks.len(), 0);
        for (other, pull) in pulls.iter_mut().enumerate().filter(|(other, _)| *other != place) {
            let (mut ours, mut theirs) = (*link, to[other]);
            if let Some(pull) = pull.as_mut().filter(|_| addresses[other].is_known())
                && ours.send_all(now, rate, *link_rate_bps, packets)
                && theirs.send_all(now, rate, way_bps, packets)
                && pull.send_along(now, (round, way_bps, addresses[other].path(now)), blocks, last)
            {
                (*link, to[other]) = (ours, theirs);
                places |= 1 << other;
            }
        }
        places
    }

    fn write_abort(&mut self, now: Instant, reason: AbortReason, train: &mut [u8]) -> Option<Written> {
        let known = |place: &u32| self.addresses.get(*place as usize).is_some_and(Addresses::is_known);
        let pending = (0..u64::BITS).filter(|place| self.abort_pending >> place & 1 != 0);
        let place = pending.into_iter().find(known)? as usize;
        self.abort_pending &= !(1 << place);
        let abort = Abort { preamble: self.preamble(Kind::Abort, WorkerId(place as u8)), reason }
            .to_bytes(self.config().key);
        train[..abort.len()].copy_from_slice(&abort);
        self.addresses[place].send_signal(now);
        Some(Written { places: 1 << place, bytes: abort.len(), segment_bytes: abort.len() })
    }

    pub(super) fn abort(&mut self, reason: AbortReason) {
        if self.abortion == Abortion::None {
            self.end(Abortion::Known(reason));
        }
    }

    fn end(&mut self, abortion: Abortion) {
        self.abortion = abortion;
        self.abort_pending = u64::MAX >> (64 - self.addresses.len());
        self.flows.clear();
        self.spare.clear();
        self.confirms.clear();
        self.sending = Default::default();
        self.due = None;
    }

    pub(super) fn progress(&self) -> JobProgress {
        let lacks = |place| self.flows.iter().flatten().map(|flow| flow.lacks(place)).sum();
        JobProgress {
            in_use: self.flows.iter().flatten().map(|flow| flow.sums.open()).sum(),
            waiting_for: (0..self.addresses.len()).map(lacks).collect(),
            lateness: self.lateness.clone(),
            completed: self.completed,
            lost: self.lost + self.flows.iter().flatten().map(|flow| flow.sums.lost()).sum::<u64>(),
            retransmitted: self.retransmitted,
            ..JobProgress::default()
        }
    }
}

/// Whether a worker may have a sum of so many contributions.
fn may_restore(worker: WorkerId, collective: &Collective, header: &BlockHeader, config: &JobConfig) -> bool {
    let expected = collective.pattern.contributions(config.workers);
    let is_sum = header.contributions == expected || may_lose(collective) && header.contributions < expected;
    is_sum && collective.pattern.receives(worker)
}

/// Time decides whether a job has something to send, so the server polls each job itself.
impl<A: Copy + PartialEq> TableJob for Job<A> {
    #[inline]
    fn membership(&self) -> (Generation, Key) {
        (self.config().generation, self.config().key)
    }

    #[inline]
    fn takes(&self, kind: Kind) -> bool {
        matches!(kind, Kind::Block | Kind::Signal)
    }

    fn abortion(&mut self) -> &mut Abortion {
        &mut self.abortion
    }
}
