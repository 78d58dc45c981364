//! A job at a switch: the packets that wait on its way up and down.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use fanin_wire::{
    ABORT_BYTES, Abort, Flags, FragmentHeader, FragmentPacket, Generation, GradientHeader, Key, Kind, Label,
    Participants, Preamble, ShardId, WorkerId,
};

use super::{Route, SwitchConfig, SwitchProgress};
use crate::aggregation::aggregator_table::{Aggregate, AggregatorTable, Identifier};
use crate::aggregation::children::Children;
use crate::aggregation::passing::{Passing, PassingPacket};
use crate::machine::{Abortion, Reason, TableJob, Verdict};
use crate::transport::Run;

/// The packets that wait to go on towards the server, or to a neighbour.
#[derive(Debug)]
enum Upward<L> {
    /// The sum of a fragment, which is in its aggregator, under the header of the packet that came
    /// last.
    Sum(u32, FragmentHeader<L>),
    Passing(PassingPacket),
    Relayed(u16, PassingPacket),
}

/// Whom a train is for.
#[derive(Clone, Copy, Debug)]
pub(super) enum To {
    /// The children that these participants' parameters go to.
    Children(Participants),
    Upstream,
    Neighbour(u16),
}

#[derive(Debug)]
pub(super) struct Job<A, R: Route<A>> {
    pub(super) route: R,
    shard: ShardId,
    /// By bit.
    pub(super) children: Children<A>,
    /// Elements of four bytes, and of two, which take turns: a train has packets of one size.
    up: [VecDeque<Upward<R::Label>>; 2],
    /// Whose turn it is.
    turn: usize,
    down: VecDeque<(Participants, PassingPacket)>,
    /// The children that a train goes to, if it does not go to all.
    some: Vec<A>,
    pub(super) abortion: Abortion,
    /// Whether the children are to be told so: one packet between two drains is enough.
    abort_pending: bool,
    pub(super) progress: SwitchProgress,
}

impl<A: Copy + PartialEq, R: Route<A>> Job<A, R> {
    pub(super) fn new(shard: ShardId, route: R) -> Self {
        Self {
            shard,
            children: route.children(),
            route,
            up: [VecDeque::new(), VecDeque::new()],
            turn: 0,
            down: VecDeque::new(),
            some: Vec::new(),
            abortion: Abortion::None,
            abort_pending: false,
            progress: SwitchProgress::default(),
        }
    }

    /// Packets that wait to go up.
    fn waiting_up(&self) -> usize {
        self.up.iter().map(VecDeque::len).sum()
    }

    /// Takes note of a fragment of a job that cannot go on: the children are told so.
    pub(super) fn refuse(&mut self) -> Reason {
        self.abort_pending = true;
        Reason::Aborted
    }

    /// Sends a packet from above on to the children.
    pub(super) fn multicast(
        &mut self,
        config: &SwitchConfig,
        passing: &mut Passing,
        bytes: &[u8],
        participants: Participants,
    ) -> Result<Verdict, Reason> {
        // A switch that lost its memory knows no children: they send again, and ask the server.
        if self.children.addresses().is_empty() {
            return Err(Reason::Unexpected);
        }
        let waiting = copied(bytes, config.is_congested(self.down.len()), passing)?;
        self.down.push_back((participants, waiting));
        Ok(Verdict::Multicast)
    }

    /// Sends a fragment on to a neighbour as it came, but for the mark of a queue that is too long.
    pub(super) fn relay(
        &mut self,
        config: &SwitchConfig,
        passing: &mut Passing,
        bytes: &[u8],
        half: bool,
        to: u16,
    ) -> Result<Verdict, Reason> {
        let waiting = copied(bytes, config.is_congested(self.waiting_up()), passing)?;
        self.up[usize::from(half)].push_back(Upward::Relayed(to, waiting));
        self.progress.forwards += 1;
        Ok(Verdict::Forward)
    }

    /// Sends a fragment on as it is, but for its level and for what `more` flags it has.
    pub(super) fn forward(
        &mut self,
        config: &SwitchConfig,
        passing: &mut Passing,
        packet: &FragmentPacket<'_, R::Label>,
        more: Flags,
    ) -> Result<Verdict, Reason> {
        let mut header = packet.header;
        header.directions = self.route.onward(header.directions);
        header.flags.resend |= more.resend;
        header.flags.collision |= more.collision;
        self.pass(config, passing, header, packet.elements(), |out| {
            out.copy_from_slice(packet.payload);
        })
    }

    /// Sends what an aggregator holds by now in place of a packet's own value and bitmap (Figure
    /// 17, box 7).
    pub(super) fn forward_partial(
        &mut self,
        config: &SwitchConfig,
        passing: &mut Passing,
        header: FragmentHeader<R::Label>,
        sum: &Aggregate<'_, R::Bits>,
        stalled: bool,
    ) -> Result<Verdict, Reason> {
        let mut header = self.header_of_sum(header, sum);
        header.flags.stalled = stalled;
        self.pass(config, passing, header, sum.value.len(), |out| fanin_quant::write_le(sum.value, out))
    }

    /// Sends what the fragment's aggregator holds in place of its own value and bitmap (Figure 7,
    /// box 6).
    pub(super) fn forward_sum(
        &mut self,
        config: &SwitchConfig,
        index: u32,
        header: &FragmentHeader<R::Label>,
    ) -> Verdict {
        let header = self.marked(config, *header);
        self.up[0].push_back(Upward::Sum(index, header));
        self.progress.forwards += 1;
        Verdict::Forward
    }

    fn pass(
        &mut self,
        config: &SwitchConfig,
        passing: &mut Passing,
        header: FragmentHeader<R::Label>,
        elements: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<Verdict, Reason> {
        let ((_, key, _), preamble) = (self.route.job(), self.preamble(R::Label::KIND));
        let header = self.marked(config, header);
        let waiting = passing.push(header.packet_bytes(elements), |out| {
            FragmentPacket::write(out, key, &preamble, &header, elements, fill);
        });
        let waiting = Upward::Passing(waiting.ok_or(Reason::OutboxFull)?);
        self.up[usize::from(header.flags.half)].push_back(waiting);
        self.progress.forwards += 1;
        Ok(Verdict::Forward)
    }

    fn header_of_sum(
        &self,
        mut header: FragmentHeader<R::Label>,
        sum: &Aggregate<'_, R::Bits>,
    ) -> FragmentHeader<R::Label> {
        header.directions = self.route.of_sum(header.directions, sum.bitmap);
        header.flags.ecn |= sum.ecn;
        header.flags.half = false;
        header.next_exponent = sum.next_exponent;
        header
    }

    /// With the mark of a queue that is too long.
    fn marked(
        &self,
        config: &SwitchConfig,
        mut header: FragmentHeader<R::Label>,
    ) -> FragmentHeader<R::Label> {
        header.flags.ecn |= config.is_congested(self.waiting_up());
        header
    }

    fn preamble(&self, kind: Kind) -> Preamble {
        let (job, _, generation) = self.route.job();
        Preamble { kind, job, generation, worker: WorkerId::ALL, shard: self.shard }
    }

    pub(super) fn abort(&mut self, abortion: Abortion, passing: &mut Passing) {
        self.abortion = abortion;
        self.abort_pending = true;
        self.forget_waiting(passing);
    }

    pub(super) fn forget_waiting(&mut self, passing: &mut Passing) {
        for waiting in self.up.iter_mut().flat_map(|up| up.drain(..)) {
            if let Upward::Passing(packet) | Upward::Relayed(_, packet) = waiting {
                passing.take(packet);
            }
        }
        for (_, packet) in self.down.drain(..) {
            passing.take(packet);
        }
    }

    /// Writes the next train, and says whom it is for.
    pub(super) fn write(
        &mut self,
        table: &AggregatorTable<R::Bits>,
        passing: &mut Passing,
        train: &mut [u8],
    ) -> (Run, To) {
        // Parameters first: they free workers, and aggregators further down.
        if self.abort_pending || !self.down.is_empty() {
            let (run, participants) = self.write_down(passing, train);
            return (run, To::Children(participants));
        }
        let (run, neighbour) = self.write_up(table, passing, train);
        (run, neighbour.map_or(To::Upstream, To::Neighbour))
    }

    /// Where a train goes.
    pub(super) fn addresses(&self, to: To) -> &[A] {
        match to {
            To::Children(Participants::ALL) => self.children.addresses(),
            To::Children(_) => &self.some,
            To::Neighbour(number) => self.route.neighbour(number),
            To::Upstream => core::slice::from_ref(self.route.upstream()),
        }
    }

    /// Writes what goes to the children next into `train`: packets of one size for the same
    /// participants. Says who these are.
    fn write_down(&mut self, passing: &mut Passing, train: &mut [u8]) -> (Run, Participants) {
        let mut run = Run::default();
        if let Some(reason) = self.abortion.reason() {
            let abort = Abort { preamble: self.preamble(Kind::Abort), reason };
            run.packet(ABORT_BYTES, train).copy_from_slice(&abort.to_bytes(self.route.job().1));
            self.abort_pending = false;
            return (run, Participants::ALL);
        }
        let next = self.down.front().map_or(Participants::ALL, |(participants, _)| *participants);
        while self.down.front().is_some_and(|(set, packet)| *set == next && run.takes(packet.len(), train))
            && let Some((_, packet)) = self.down.pop_front()
        {
            run.packet(packet.len(), train).copy_from_slice(passing.take(packet));
        }
        if next != Participants::ALL {
            self.children.addresses_of(|child| self.route.reaches(child, next), &mut self.some);
        }
        (run, next)
    }

    /// Writes what goes up next into `train`, as long as it has one size and one way: sums straight
    /// from their aggregators. Says which neighbour it goes to, if it does not go towards the
    /// server.
    fn write_up(
        &mut self,
        table: &AggregatorTable<R::Bits>,
        passing: &mut Passing,
        train: &mut [u8],
    ) -> (Run, Option<u16>) {
        let mut run = Run::default();
        let preamble = self.preamble(R::Label::KIND);
        let key = self.route.job().1;
        let mut to = None;
        let turn = if self.up[self.turn].is_empty() { 1 - self.turn } else { self.turn };
        self.turn = 1 - turn;
        while let Some(next) = self.up[turn].front() {
            let way = if let Upward::Relayed(neighbour, _) = next { Some(*neighbour) } else { None };
            if !run.is_empty() && way != to {
                break;
            }
            to = way;
            match next {
                Upward::Sum(index, header) => {
                    let identifier = Identifier::of(&preamble, header);
                    // Freed meanwhile, by a resend that took the sum along, or by parameters that
                    // made it worthless.
                    if let Some(sum) = table.sum(*index, &identifier) {
                        let elements = sum.value.len();
                        let header = self.header_of_sum(*header, &sum);
                        let bytes = header.packet_bytes(elements);
                        if !run.takes(bytes, train) {
                            break;
                        }
                        let out = run.packet(bytes, train);
                        FragmentPacket::write(out, key, &preamble, &header, elements, |out| {
                            fanin_quant::write_le(sum.value, out);
                        });
                    }
                    self.up[turn].pop_front();
                }
                Upward::Passing(packet) | Upward::Relayed(_, packet) => {
                    if !run.takes(packet.len(), train) {
                        break;
                    }
                    if let Some(Upward::Passing(packet) | Upward::Relayed(_, packet)) =
                        self.up[turn].pop_front()
                    {
                        run.packet(packet.len(), train).copy_from_slice(passing.take(packet));
                    }
                }
            }
        }
        (run, to)
    }
}

impl<A: Copy + PartialEq, R: Route<A>> TableJob for Job<A, R> {
    #[inline]
    fn membership(&self) -> (Generation, Key) {
        let (_, key, generation) = self.route.job();
        (generation, key)
    }

    #[inline]
    fn takes(&self, kind: Kind) -> bool {
        kind == R::Label::KIND || kind == Kind::Abort
    }

    fn abortion(&mut self) -> &mut Abortion {
        &mut self.abortion
    }

    fn has_pending(&mut self) -> bool {
        self.waiting_up() > 0
            || !self.down.is_empty()
            || self.abort_pending && !self.children.addresses().is_empty()
    }
}

/// A packet as it came, but for the mark of a queue that is too long.
fn copied(bytes: &[u8], mark: bool, passing: &mut Passing) -> Result<PassingPacket, Reason> {
    let waiting = passing.push(bytes.len(), |out| {
        out.copy_from_slice(bytes);
        if mark {
            GradientHeader::mark_ecn(out);
        }
    });
    waiting.ok_or(Reason::OutboxFull)
}
