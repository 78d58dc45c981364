//! A job at its server: a window of fragments, and whom they come from.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;
use fanin_wire::{
    Abort, AbortReason, FragmentHeader, FragmentPacket, Generation, GradientHeader, Key, Kind, Label,
    Participants, Preamble, Rank, ShardId, WorkerId,
};

use super::fragment::{
    Finished, Spare, Subject, Unfinished, finished_by_hand, is_sent_again, request_header,
};
use super::{Admitted, Coverage, GoOn, Roster, ServerProgress};
use crate::aggregation::children::Children;
use crate::aggregation::halves::Halves;
use crate::aggregation::{ConfigError, Hashing, JobConfig, Scaling};
use crate::machine::{Abortion, Instant, JobProgress, Packet, Reason, TableJob, Transmit, Verdict};

/// How soon the same fragment is asked for again: every worker that waits for it asks, and each
/// request is answered by all. It is also how soon a child gets the same parameters again: all
/// workers below it ask, and each answer reaches all of them, so that answers to each would be as
/// many times as much as was lost.
const REQUEST_INTERVAL: Duration = Duration::from_millis(1);
/// No job comes so far; windows can be added to what is below without a thought.
const SEQUENCE_MAX: u64 = u64::MAX >> 1;
/// Overflows are counted over so many fragments.
const OVERFLOW_PERIOD: u32 = 1024;
/// Overflows in a period that are frequent: more than 0.1 %, up to which training does not slow
/// down (ATP §3.8).
const OVERFLOWS_FREQUENT: u32 = 2;

/// The recipients of a place's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum To {
    Nobody,
    /// The child that asked.
    Child(u16),
    All,
}

impl To {
    /// The recipients of an answer to a worker that sent something again.
    const fn who_lacks(sender: &Coverage) -> Self {
        if sender.several_ways { Self::All } else { Self::Child(sender.child) }
    }
}

#[derive(Debug)]
struct Place<L> {
    gathering: Unfinished,
    finished: Option<Finished>,
    /// Whether it is certain which fragment is next: not so after a restart, until one is finished
    /// here.
    anchored: bool,
    /// Whether its last parameters were handed back. They may be older than those that others have,
    /// if their worker was in no sum since then. A later fragment may be next, therefore.
    by_hand: bool,
    parameters_to: To,
    /// To whom the finished parameters went last because they were asked for, and when.
    answered: Option<(To, Instant)>,
    /// The request, until it is sent.
    request: Option<FragmentHeader<L>>,
    /// When the fragment before the one that is gathered was last asked for.
    requested_before: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outgoing {
    Parameters,
    Request,
}

#[derive(Debug)]
pub(super) struct Job<A, R: Roster<A>> {
    config: JobConfig,
    roster: R,
    places: Vec<Place<R::Label>>,
    /// Sums of what is gathered, `elements` for each place.
    sums: Vec<i64>,
    /// The memory that no fragment needs now.
    spare: Spare,
    /// The finished parameters, `elements` of four bytes for each place.
    parameters: Vec<u8>,
    halves: Halves,
    children: Children<A>,
    /// The children that a train goes to, if it does not go to all.
    some: Vec<A>,
    /// Places that have something to send; each stands here once for each kind.
    outgoing: VecDeque<(usize, Outgoing)>,
    /// The highest sequence number that is finished.
    newest: Option<u64>,
    abortion: Abortion,
    abort_pending: bool,
    /// Fragments and overflows of this period, and overflows of the one before.
    period: (u32, u32, u32),
    progress: ServerProgress,
}

impl<A: Copy + PartialEq, R: Roster<A>> Job<A, R> {
    pub(super) fn new(admitted: Admitted<R, A>) -> Self {
        let Admitted { config, roster, restored, children } = admitted;
        let (window, elements) = (usize::from(config.window_max), usize::from(config.elements));
        let place = |sequence| Place {
            gathering: Unfinished::new(sequence),
            finished: None,
            anchored: !restored,
            by_hand: false,
            parameters_to: To::Nobody,
            answered: None,
            request: None,
            requested_before: None,
        };
        Self {
            config,
            children: Children::known(roster.workers(), &children),
            spare: Spare::new(roster.workers(), window),
            roster,
            places: (0..u64::from(config.window_max)).map(place).collect(),
            sums: vec![0; window * elements],
            parameters: vec![0; window * elements * 4],
            halves: Halves::default(),
            some: Vec::new(),
            outgoing: VecDeque::with_capacity(2 * window),
            newest: None,
            abortion: Abortion::None,
            abort_pending: false,
            period: (0, 0, 0),
            progress: ServerProgress::default(),
        }
    }

    /// How many workers these participants are.
    fn expected(&self, participants: Participants) -> u32 {
        let workers = self.roster.workers();
        if participants == Participants::ALL {
            return workers as u32;
        }
        (0..workers).filter(|at| participants.contains(Rank(self.roster.rank(*at)))).count() as u32
    }

    /// Takes a packet that is authentic.
    pub(super) fn receive(&mut self, now: Instant, from: A, packet: &Packet<'_>) -> Result<Verdict, Reason> {
        let Packet { preamble, bytes } = *packet;
        let packet = FragmentPacket::<R::Label>::parse(preamble, bytes)?;
        if packet.header.flags.is_ack {
            return Err(Reason::Unexpected);
        }
        let sender = self.roster.coverage(&packet.header)?;
        if packet.elements() != usize::from(self.config.elements) {
            return Err(Reason::ChunkLength);
        }
        self.progress.bytes_received += bytes.len() as u64;
        let mut halves = core::mem::take(&mut self.halves);
        let verdict = match halves.widen(packet, self.config.workers) {
            Ok(packet) => self.take(now, from, &packet, &sender),
            Err(reason) => Err(reason),
        };
        self.halves = halves;
        verdict
    }

    /// Takes a fragment with elements of four bytes.
    fn take(
        &mut self,
        now: Instant,
        from: A,
        packet: &FragmentPacket<'_, R::Label>,
        sender: &Coverage,
    ) -> Result<Verdict, Reason> {
        let header = &packet.header;
        if !self.abortion.is_none() {
            self.learn(sender, from);
            self.abort_pending = true;
            return Err(Reason::Aborted);
        }
        if header.sequence > SEQUENCE_MAX {
            return Err(Reason::OutOfRange);
        }
        let at = self.config.place(header.sequence);
        let place = &mut self.places[at];
        if place.by_hand && place.gathering.subject.is_none() && header.sequence > place.gathering.sequence {
            place.anchored = false;
        }
        // A server that lost its memory takes the first fragment it hears of for the current one,
        // until it hears of a later one.
        if !place.anchored
            && (place.gathering.subject.is_none() || header.sequence > place.gathering.sequence)
        {
            place.gathering.begin(header.sequence, &mut self.spare);
        }
        let verdict = match header.sequence.cmp(&place.gathering.sequence) {
            core::cmp::Ordering::Equal => self.contribute(now, at, packet, sender),
            // Its worker would need parameters that do not exist yet.
            core::cmp::Ordering::Greater => Err(Reason::Ahead),
            core::cmp::Ordering::Less => self.late(now, at, packet, sender),
        };
        if verdict == Err(Reason::Duplicate) {
            self.progress.duplicates += 1;
        }
        // A copy that the network held back says where its child was, and not where it is.
        if !matches!(verdict, Err(Reason::Stale | Reason::Ahead)) {
            self.learn(sender, from);
        }
        verdict
    }

    pub(super) fn child_moved(&mut self, child: usize, to: A) {
        self.children.learn(child, to);
    }

    fn learn(&mut self, sender: &Coverage, from: A) {
        if sender.teaches {
            self.children.learn(sender.child.into(), from);
        }
    }

    /// A packet of the fragment that its place gathers.
    fn contribute(
        &mut self,
        now: Instant,
        at: usize,
        packet: &FragmentPacket<'_, R::Label>,
        sender: &Coverage,
    ) -> Result<Verdict, Reason> {
        let FragmentPacket { header, payload, .. } = packet;
        let elements = usize::from(self.config.elements);
        let participants = self.roster.participants(&header.directions);
        let workers = self.expected(participants);
        let is_earliest = self.spare.is_short() && self.earliest_gathering() == Some(header.sequence);
        let sums = &mut self.sums[at * elements..][..elements];
        let place = &mut self.places[at];
        let gathering = &mut place.gathering;
        let subject = Subject {
            collective: header.collective,
            fragment: header.fragment,
            participants,
            first: sender.first,
        };
        let first = *gathering.subject.get_or_insert(subject);
        if first != (Subject { first: first.first, ..subject }) {
            self.disagree(first, subject);
            return Err(Reason::Aborted);
        }
        if header.flags.restore {
            // A server that forgot takes parameters also before it asks: who has nothing else to
            // send makes itself known with them.
            if gathering.requested.is_none() && place.anchored {
                return Err(Reason::Unexpected);
            }
            self.restore(at, packet, participants);
            return Ok(Verdict::Multicast);
        }
        gathering.hear(header.flags, sender);
        let added = if header.flags.overflow {
            gathering.add_original(header.collective.dtype, sender, payload, sums, &mut self.spare)
        } else {
            gathering.add_scaled(header, sender, payload, sums, &mut self.spare, is_earliest)
        };
        // Congestion and collisions are news even when the values are not (Figure 7, box 7).
        gathering.ecn |= header.flags.ecn;
        gathering.collision |= header.flags.collision;
        if let Err(reason) = added {
            // A worker that sends scaled values again has not heard that the original ones are
            // wanted. With anything that is sent again to a server that forgot, somebody may not
            // have heard that he has the parameters.
            let unheard = gathering.originals_only && !header.flags.overflow || !place.anchored;
            if is_sent_again(header.flags) && unheard && self.request(now, at, header) {
                return Ok(Verdict::ReplyUnicast);
            }
            return Err(reason);
        }
        gathering.aggregator_index = header.aggregator_index;
        gathering.next_exponent = gathering.next_exponent.max(header.next_exponent);
        self.progress.aggregations += 1;
        self.progress.complete += u64::from(sender.count == workers);
        self.progress.partial += u64::from(sender.count > 1 && sender.count < workers);
        if gathering.gathered() < workers {
            // Perhaps the others have this fragment behind them, and only this server forgot.
            if is_sent_again(header.flags) && !place.anchored {
                self.request(now, at, header);
            }
            return Ok(Verdict::Absorb);
        }
        gathering.add_aside(sums, &mut self.spare);
        if gathering.saturated {
            gathering.await_originals(&mut self.spare);
            self.progress.overflows += 1;
            self.request(now, at, header);
            return Ok(Verdict::Absorb);
        }
        self.finish(at, header);
        // All lacked its parameters, so all sent it again, and much of that is still on its way.
        self.places[at].answered = is_sent_again(header.flags).then_some((To::All, now));
        Ok(Verdict::Multicast)
    }

    /// Sends finished parameters to a child below which they were lost, unless another worker there
    /// was just answered.
    fn answer(&mut self, now: Instant, at: usize, sender: &Coverage) -> Result<Verdict, Reason> {
        let answered = &mut self.places[at].answered;
        let to = To::who_lacks(sender);
        let just_now = answered.is_some_and(|(last, when)| {
            (last == To::All || last == to) && now.since(when) < REQUEST_INTERVAL
        });
        if just_now && sender.shared {
            return Err(Reason::Duplicate);
        }
        *answered = Some((to, now));
        let place = &mut self.places[at];
        // Unless they are about to leave: then they were not lost.
        if let Some(finished) = place.finished.as_mut().filter(|_| place.parameters_to == To::Nobody) {
            finished.lost = true;
        }
        self.send_parameters(at, to);
        Ok(Verdict::ReplyUnicast)
    }

    /// A packet of a fragment before the one that its place gathers.
    fn late(
        &mut self,
        now: Instant,
        at: usize,
        packet: &FragmentPacket<'_, R::Label>,
        sender: &Coverage,
    ) -> Result<Verdict, Reason> {
        let FragmentPacket { header, .. } = packet;
        let place = &mut self.places[at];
        let previous = header.sequence + u64::from(self.config.window_max) == place.gathering.sequence;
        let has_parameters = place.finished.is_some_and(|finished| finished.sequence == header.sequence);
        if !is_sent_again(header.flags) {
            return Err(Reason::Stale);
        }
        if has_parameters {
            // The parameters were lost: they go to the child that lacks them.
            return self.answer(now, at, sender);
        }
        if previous && !place.anchored {
            // A worker that is ahead has the parameters which this server forgot.
            if header.flags.restore {
                let finished = finished_by_hand(header, self.roster.participants(&header.directions));
                self.store_parameters(at, finished, packet.payload);
                return Ok(Verdict::Multicast);
            }
            return if self.request(now, at, header) {
                Ok(Verdict::ReplyUnicast)
            } else {
                Err(Reason::Stale)
            };
        }
        // A worker that was started again and knows nothing: the newest parameters tell it where
        // the job is (ATP §A.3).
        let newest = self.newest.ok_or(Reason::Stale)?;
        self.send_parameters(self.config.place(newest), To::who_lacks(sender));
        Ok(Verdict::ReplyUnicast)
    }

    /// All workers are in: the sums become parameters.
    fn finish(&mut self, at: usize, header: &FragmentHeader<R::Label>) {
        let elements = usize::from(self.config.elements);
        let gathering = &self.places[at].gathering;
        gathering.write_parameters(
            &self.config,
            header.collective,
            &self.sums[at * elements..][..elements],
            &mut self.parameters[at * elements * 4..][..elements * 4],
        );
        let sequence = gathering.sequence;
        let index = gathering.aggregator_index;
        self.progress.collisions += u64::from(gathering.collision);
        let next_aggregator_index = match self.config.hashing {
            Hashing::Linear | Hashing::Partition { .. } => {
                self.config.aggregator_index(sequence + u64::from(self.config.window_max))
            }
            Hashing::Hash if gathering.collision => {
                self.progress.rehashes += 1;
                self.config.rehashed(sequence, index)
            }
            Hashing::Hash => index,
        };
        let finished = Finished {
            sequence,
            collective: header.collective,
            fragment: header.fragment,
            participants: self.roster.participants(&header.directions),
            ecn: gathering.ecn,
            lost: gathering.lost,
            aggregator_index: index,
            next_aggregator_index,
            next_exponent: self.next_factor(at),
        };
        self.finished(at, finished);
    }

    /// The exponent that the next fragment of a place is to be scaled by (ATP §B.3).
    ///
    /// "Only when the overflow happens frequently": more than 0.1 % of the last one or two thousand
    /// fragments overflowed, or would have under the fixed factor. The latter keeps it from going
    /// back and forth. Tiny values get their factor always: under the fixed one nothing would be
    /// left of them.
    fn next_factor(&mut self, at: usize) -> i16 {
        let gathering = &self.places[at].gathering;
        let (fragments, overflows, before) = &mut self.period;
        let exponent = gathering.exponent();
        let avoided = exponent != GradientHeader::STATIC_FACTOR && self.config.may_overflow(exponent);
        *overflows += u32::from(gathering.originals_only || avoided);
        *fragments += 1;
        let frequent = *overflows >= OVERFLOWS_FREQUENT || *before >= OVERFLOWS_FREQUENT;
        if *fragments == OVERFLOW_PERIOD {
            self.period = (0, 0, *overflows);
        }
        match (self.config.scaling, gathering.next_known()) {
            (Scaling::Dynamic, Some(exponent))
                if frequent && self.config.may_overflow(exponent) || self.config.is_tiny(exponent) =>
            {
                self.progress.dynamic_factors += 1;
                exponent
            }
            _ => GradientHeader::STATIC_FACTOR,
        }
    }

    /// A worker hands back the parameters of the fragment that a place gathers.
    fn restore(&mut self, at: usize, packet: &FragmentPacket<'_, R::Label>, participants: Participants) {
        let bytes = self.config.payload_bytes();
        self.parameters[at * bytes..][..bytes].copy_from_slice(packet.payload);
        self.finished(at, finished_by_hand(&packet.header, participants));
        self.places[at].by_hand = true;
    }

    /// Keeps parameters that were handed back for a fragment whose successor is being gathered.
    fn store_parameters(&mut self, at: usize, finished: Finished, payload: &[u8]) {
        let bytes = self.config.payload_bytes();
        self.parameters[at * bytes..][..bytes].copy_from_slice(payload);
        let place = &mut self.places[at];
        place.finished = Some(finished);
        place.answered = None;
        place.anchored = true;
        place.by_hand = true;
        self.progress.completed += 1;
        self.newest = self.newest.max(Some(finished.sequence));
        self.send_parameters(at, To::All);
    }

    /// The parameters of what a place gathered are there: it goes on to the next fragment.
    fn finished(&mut self, at: usize, finished: Finished) {
        let place = &mut self.places[at];
        let next = finished.sequence + u64::from(self.config.window_max);
        place.gathering.begin(next, &mut self.spare);
        place.anchored = true;
        place.by_hand = false;
        place.finished = Some(finished);
        place.answered = None;
        place.request = None;
        place.requested_before = None;
        self.progress.completed += 1;
        self.newest = self.newest.max(Some(finished.sequence));
        self.send_parameters(at, To::All);
    }

    fn send_parameters(&mut self, at: usize, to: To) {
        let place = &mut self.places[at];
        if place.parameters_to == To::Nobody {
            self.outgoing.push_back((at, Outgoing::Parameters));
            place.parameters_to = to;
        } else if place.parameters_to != to {
            place.parameters_to = To::All;
        }
    }

    /// Asks all workers for what they have of a fragment: parameters, or original values. Not if it
    /// did a moment ago.
    fn request(&mut self, now: Instant, at: usize, header: &FragmentHeader<R::Label>) -> bool {
        let place = &mut self.places[at];
        let Unfinished { sequence, requested, .. } = &mut place.gathering;
        let requested = if header.sequence == *sequence { requested } else { &mut place.requested_before };
        if requested.is_some_and(|asked| now.since(asked) < REQUEST_INTERVAL) {
            return false;
        }
        *requested = Some(now);
        match &mut place.request {
            None => {
                place.request = Some(*header);
                self.outgoing.push_back((at, Outgoing::Request));
            }
            // The one before goes first: its successor waits for who lacks it.
            Some(waiting) if header.sequence < waiting.sequence => *waiting = *header,
            Some(_) => {}
        }
        self.progress.requests += 1;
        true
    }

    /// Two workers do not reduce the same, or not with the same others.
    fn disagree(&mut self, first: Subject, second: Subject) {
        let rank = |subject: Subject| Rank(self.roster.rank(subject.first.into()));
        let named = |subject: Subject| (rank(subject), subject.collective);
        let reason = if first.participants == second.participants {
            AbortReason::Mismatch { first: named(first), second: named(second) }
        } else {
            AbortReason::Participants { first: rank(first), second: rank(second) }
        };
        self.stop(Abortion::New(reason));
    }

    pub(super) fn abort(&mut self, reason: AbortReason) {
        if self.abortion.is_none() {
            self.stop(Abortion::Known(reason));
        }
    }

    fn stop(&mut self, abortion: Abortion) {
        self.abortion = abortion;
        self.abort_pending = true;
        // Admission gives the job's memory to others at once: the reason, and whom to tell, is all
        // that is still needed.
        self.places = Vec::new();
        self.sums = Vec::new();
        self.parameters = Vec::new();
        self.outgoing = VecDeque::new();
        self.spare = Spare::default();
    }

    pub(super) fn go_on(
        &mut self,
        generation: Generation,
        of: impl FnOnce(&R) -> Result<GoOn<R, A>, ConfigError>,
    ) -> Result<u64, ConfigError> {
        let GoOn { roster: after, children, keeps } = of(&self.roster)?;
        let workers = self.roster.workers();
        let mut positions = vec![0; workers];
        for position in 0..workers {
            positions[usize::from(after.rank(position))] = position;
        }
        for place in &mut self.places {
            let renamed = |position| positions[usize::from(self.roster.rank(position))];
            if keeps {
                place.gathering.rename(renamed, workers);
            } else {
                place.gathering.begin(place.gathering.sequence, &mut self.spare);
            }
            place.parameters_to = To::Nobody;
            place.answered = None;
            place.request = None;
        }
        self.roster = after;
        self.config.generation = generation;
        self.outgoing.clear();
        self.children = Children::known(workers, &children);
        Ok(self.earliest())
    }

    /// A place's first fragment after a restart may long be over.
    fn earliest_gathering(&self) -> Option<u64> {
        let known = self.places.iter().filter(|place| place.anchored || place.gathering.subject.is_some());
        known.map(|place| place.gathering.sequence).min()
    }

    fn earliest(&self) -> u64 {
        self.places.iter().map(|place| place.gathering.sequence).min().unwrap_or(0)
    }

    pub(super) fn job_progress(&self) -> JobProgress {
        let mut progress = JobProgress {
            waiting_for: vec![0; self.roster.workers()],
            completed: self.progress.completed,
            retransmitted: self.progress.duplicates,
            aggregations: self.progress.aggregations,
            collisions: self.progress.collisions,
            ..JobProgress::default()
        };
        for gathering in self.places.iter().map(|place| &place.gathering).filter(|found| found.gathered() > 0)
        {
            progress.in_use += 1;
            let participants = gathering.subject.map_or(Participants::ALL, |subject| subject.participants);
            for position in 0..self.roster.workers() {
                let rank = usize::from(self.roster.rank(position));
                let is_awaited = participants.contains(Rank(rank as u16)) && !gathering.has(position);
                progress.waiting_for[rank] += u32::from(is_awaited);
            }
        }
        progress
    }

    pub(super) fn progress(&self) -> ServerProgress {
        ServerProgress { earliest: self.earliest(), ..self.progress }
    }

    pub(super) fn poll_transmit(&mut self, shard: ShardId, train: &mut [u8]) -> Option<Transmit<'_, A>> {
        let preamble = Preamble {
            kind: R::Label::KIND,
            job: self.config.id,
            generation: self.config.generation,
            worker: WorkerId::ALL,
            shard,
        };
        if let Some(reason) = self.abortion.reason() {
            self.abort_pending = false;
            let abort = Abort { preamble: Preamble { kind: Kind::Abort, ..preamble }, reason };
            let abort = abort.to_bytes(self.config.key);
            train[..abort.len()].copy_from_slice(&abort);
            let to = self.children.addresses();
            return Some(Transmit { to, bytes: abort.len(), segment_bytes: abort.len() });
        }
        let (elements, payload_bytes) = (usize::from(self.config.elements), self.config.payload_bytes());
        let mut run: Option<(To, Participants, usize)> = None;
        let mut bytes = 0;
        while let Some(&(at, what)) = self.outgoing.front() {
            let place = &mut self.places[at];
            let (to, participants, header, payload) = match (what, place.request, place.finished) {
                (Outgoing::Request, Some(request), _) => {
                    let participants = self.roster.participants(&request.directions);
                    let directions = self.roster.answer(request.sequence, 0, participants);
                    (To::All, participants, request_header(request, directions), &[][..])
                }
                (Outgoing::Parameters, _, Some(finished)) => {
                    let payload = &self.parameters[at * payload_bytes..][..payload_bytes];
                    let (next, participants) = (finished.next_aggregator_index, finished.participants);
                    let directions = self.roster.answer(finished.sequence, next, participants);
                    (place.parameters_to, participants, finished.header(directions), payload)
                }
                // The request was answered in the meantime, and its parameters stand behind.
                _ => {
                    self.outgoing.pop_front();
                    continue;
                }
            };
            let elements = if payload.is_empty() { 0 } else { elements };
            let segment_bytes = header.packet_bytes(elements);
            let next = (to, participants, segment_bytes);
            if *run.get_or_insert(next) != next || bytes + segment_bytes > train.len() {
                break;
            }
            let out = &mut train[bytes..];
            let half = header.collective.half().filter(|_| header.flags.half);
            let halves = &mut self.halves;
            bytes +=
                FragmentPacket::write(out, self.config.key, &preamble, &header, elements, |out| match half {
                    Some(half) => halves.narrow(half, payload, out),
                    None => out.copy_from_slice(payload),
                });
            match what {
                Outgoing::Request => place.request = None,
                Outgoing::Parameters => place.parameters_to = To::Nobody,
            }
            self.outgoing.pop_front();
        }
        let (to, participants, segment_bytes) = run.filter(|_| bytes > 0)?;
        let to = match to {
            To::Child(child) => self.children.address(child.into()),
            To::All | To::Nobody if participants == Participants::ALL => self.children.addresses(),
            To::All | To::Nobody => {
                let is_meant = |child| self.roster.reaches(child, participants);
                self.children.addresses_of(is_meant, &mut self.some);
                &self.some
            }
        };
        Some(Transmit { to, bytes, segment_bytes })
    }
}

impl<A: Copy + PartialEq, R: Roster<A>> TableJob for Job<A, R> {
    #[inline]
    fn membership(&self) -> (Generation, Key) {
        (self.config.generation, self.config.key)
    }

    #[inline]
    fn takes(&self, kind: Kind) -> bool {
        kind == R::Label::KIND
    }

    fn abortion(&mut self) -> &mut Abortion {
        &mut self.abortion
    }

    fn has_pending(&mut self) -> bool {
        !self.children.addresses().is_empty() && (self.abort_pending || !self.outgoing.is_empty())
    }
}
