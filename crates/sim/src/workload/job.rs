//! A job while it runs: its workers' programs, what they have under way, and the rules that their
//! results must keep.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use fanin_protocol::Instant;
use fanin_wire::WireDtype;
use oorandom::Rand64;

use super::checker::{Referee, Violation, first};
use super::meter::{Meter, Reading};
use super::program::{Program, Step};
use super::scenario::{JobPlan, Workload};
use super::schedule::Schedule;
use super::spans::Spans;
use super::values::{Given, Gradient, Inside, Latest, Numbers, Origin, Source, mix};
use crate::net::{ActorId, Context, NodeId, Time};

/// Tokens of timers and notices that belong to the job and not to a machine.
pub(crate) mod token {
    /// The job begins.
    pub(crate) const START: u64 = 1;
    /// The job submits nothing more.
    pub(crate) const STOP: u64 = 2;
    /// The program waited for this.
    pub(crate) const PROGRAM: u64 = 3;
    /// Parts of tensors wait for this machine.
    pub(crate) const SUBMIT: u64 = 4;
    /// A worker's lateness is over.
    pub(crate) const LATE: u64 = 5;
}

/// Tensors for each part that are cut before the cuts begin anew, at least: short ones go to
/// services by turns.
const TENSORS_CUT_MIN: usize = 64;

/// The contents of a tensor that came back.
#[derive(Clone, Copy)]
pub(crate) enum Contents<'a> {
    /// Each worker's contribution, once.
    All,
    /// The contributions of these.
    Inside(&'a Inside),
    /// In place of a sum the latest parameters, in pieces.
    Latest(&'a [Latest]),
}

/// A job, shared by the actors of all its workers.
pub(crate) struct Job {
    pub(crate) plan: JobPlan,
    schedule: Rc<Schedule>,
    /// Ranges by tensor, modulo their number, and part
    /// ([`System::cuts`](crate::systems::System::cuts)).
    cuts: Option<Vec<Vec<Range<usize>>>>,
    source: Origin,
    referee: Rc<Referee>,
    pub(crate) workers: Vec<WorkerState>,
    results: Digests,
    /// When a worker took in what it lacked last, or the job began.
    last_progress: Instant,
    /// Until when a worker computes or pauses.
    busy_until: Instant,
    /// When the last worker was finished.
    pub(crate) finished: Option<Instant>,
    /// When the job was over: the same, or when it died.
    over: Option<Instant>,
    /// Jobs that are not over, this one among them.
    open: Rc<Cell<usize>>,
    pub(crate) dead: bool,
    stopped: bool,
    /// If the run is recorded.
    pub(crate) spans: Option<Spans>,
}

pub(crate) struct WorkerState {
    program: Program,
    /// Draws how late it is.
    dice: Rand64,
    /// Tensors that are ready, in order: when each is submitted, and its elements.
    late: VecDeque<(Instant, u64, usize)>,
    /// When the last of them is.
    late_until: Instant,
    /// An actor for each machine: a job of several servers has a machine for each.
    pub(crate) actors: Vec<ActorId>,
    /// Parts of tensors that a machine is to take next.
    waiting: Vec<VecDeque<Gradient>>,
    /// Parts of a tensor that are not summed.
    parts: BTreeMap<u64, usize>,
    /// When a tensor was submitted.
    submitted: BTreeMap<u64, Instant>,
    /// Memory of tensors that are done.
    spare: Vec<Gradient>,
    pub(crate) finished: bool,
    /// Nobody has the rank at the moment.
    pub(crate) away: bool,
    /// The first tensor after it was started again: elements whose sum only the others have.
    lost: Option<(u64, usize)>,
    pub(crate) measures: Measures,
}

/// The results of a worker.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measures {
    /// Parameter bytes that came in completed tensors.
    pub(crate) bytes: u64,
    pub(crate) tensors: u64,
    pub(crate) iterations: u64,
    /// Whether the worker has begun.
    began: bool,
    /// The meter of tensors, or of iterations of training.
    pub(crate) meter: Meter,
    /// The time of each tensor, from its submission to its sum.
    pub(crate) latencies: Vec<Time>,
}

impl Job {
    pub(crate) fn new(
        index: usize,
        plan: &JobPlan,
        seed: u64,
        warm_up: Duration,
        referee: Rc<Referee>,
        open: Rc<Cell<usize>>,
    ) -> Self {
        open.set(open.get() + 1);
        let schedule = Schedule::new(&plan.workload);
        let schedule = Rc::new(if plan.system.is_asynchronous() { schedule.after_step() } else { schedule });
        let seed = mix(seed ^ (index as u64) << 48);
        let workers = plan.workers.len();
        let shards = plan.system.parts(workers);
        let worker = |rank: usize| WorkerState {
            program: Program::new(schedule.clone(), mix(seed ^ rank as u64)),
            dice: Rand64::new(mix(seed ^ rank as u64 ^ 1 << 40).into()),
            late: VecDeque::new(),
            late_until: Instant(0),
            actors: Vec::new(),
            waiting: vec![VecDeque::new(); shards],
            parts: BTreeMap::new(),
            submitted: BTreeMap::new(),
            spare: Vec::new(),
            finished: false,
            away: false,
            lost: None,
            measures: Measures { meter: Meter::new(plan.start, warm_up), ..Measures::default() },
        };
        let iteration = schedule.iteration();
        let iterations = (TENSORS_CUT_MIN * shards).div_ceil(iteration.len());
        Self {
            plan: plan.clone(),
            cuts: plan.system.cuts(&iteration.repeat(iterations)),
            source: Origin::Drawn(Source::new(plan, seed)),
            workers: (0..workers).map(worker).collect(),
            schedule,
            referee,
            results: Digests::default(),
            last_progress: Instant(0) + plan.start,
            busy_until: Instant(0),
            finished: None,
            over: None,
            open,
            dead: false,
            stopped: false,
            spans: None,
        }
    }

    /// Workers on this node, or of all nodes, stop to compute.
    pub(crate) fn interrupted(&mut self, node: Option<NodeId>, now: Instant) {
        let Some(spans) = &mut self.spans else { return };
        for (rank, at) in self.plan.workers.iter().enumerate() {
            if node.is_none_or(|node| node == *at) {
                spans.ends(rank, now);
            }
        }
    }

    /// Tensors after which the variables come again.
    pub(crate) fn tensors_per_step(&self) -> u64 {
        self.schedule.period()
    }

    /// Its workers have these numbers instead of drawn ones; nothing was submitted yet.
    pub(crate) fn give(&mut self, given: Given) {
        self.source = Origin::Given(given);
    }

    /// The sums of given numbers.
    pub(crate) fn sums(&self) -> Option<Numbers> {
        match &self.source {
            Origin::Given(given) => Some(given.sums.clone()),
            Origin::Drawn(_) => None,
        }
    }

    /// A timer or notice of worker `rank`'s machine `shard`; false if it was about nothing of the
    /// job's.
    pub(crate) fn told(&mut self, context: &mut Context<'_>, rank: usize, token: u64) {
        let mut steps = Vec::new();
        match token {
            token::START => {
                self.workers[rank].measures.began = true;
                self.workers[rank].program.start(&mut steps);
            }
            token::STOP => return self.stop(context),
            token::PROGRAM => self.workers[rank].program.timer(&mut steps),
            token::LATE => return self.submit_late(context, rank),
            _ => {}
        }
        self.take(context, rank, steps);
    }

    /// Nobody begins a tensor that no worker has begun: all stop at once, after what the furthest
    /// of them does. Where nobody waits for anybody, each ends what it has begun.
    fn stop(&mut self, context: &mut Context<'_>) {
        if std::mem::replace(&mut self.stopped, true) {
            return;
        }
        let end = self.workers.iter().map(|worker| worker.program.committed()).max().unwrap_or(0);
        for rank in 0..self.workers.len() {
            let mut steps = Vec::new();
            let own = self.workers[rank].program.committed();
            let end = if self.plan.system.is_asynchronous() { own } else { end };
            self.workers[rank].program.stop(end, &mut steps);
            self.take(context, rank, steps);
        }
    }

    /// The next part that worker `rank`'s machine `shard` is to submit.
    pub(crate) fn next_part(&mut self, rank: usize, shard: usize) -> Option<Gradient> {
        self.workers[rank].waiting[shard].pop_front()
    }

    /// Elements of a tensor, whether they are there or not.
    pub(crate) fn elements(&self, tensor: u64) -> usize {
        self.schedule.elements(tensor)
    }

    /// Which of the model's variables a tensor is the gradient of.
    pub(crate) fn variable(&self, tensor: u64) -> u64 {
        self.schedule.variable(tensor)
    }

    /// Which elements of a tensor are machine `shard`'s.
    pub(crate) fn range(&self, tensor: u64, shard: usize) -> Range<usize> {
        if let Some(cuts) = &self.cuts {
            return cuts[(tensor % cuts.len() as u64) as usize][shard].clone();
        }
        let (elements, shards) = (self.schedule.elements(tensor), self.workers[0].waiting.len());
        self.plan.system.range(self.schedule.variable(tensor), elements, shard, shards)
    }

    /// A part came back.
    pub(crate) fn completed(
        &mut self,
        context: &mut Context<'_>,
        (rank, shard): (usize, usize),
        part: Gradient,
        contents: Contents<'_>,
    ) {
        let now = context.now();
        let tensor = part.tensor;
        let range = self.range(tensor, shard);
        let (from, whole) = (range.start, part.whole());
        let lost = self.workers[rank].lost.take_if(|(lost, _)| *lost == tensor).map(|(_, elements)| elements);
        let checked = match contents {
            Contents::Inside(inside) => self.source.check_inside(&part, from, inside),
            Contents::All => self.source.check(&part, from, lost.unwrap_or(0)),
            Contents::Latest(pieces) => self.check_latest(rank, &part, pieces).map(|()| 0),
        };
        // Bits that it lacks cannot be compared, nor those that each worker may have for itself.
        let may_differ = match contents {
            Contents::All => lost.is_some(),
            Contents::Inside(inside) => lost.is_some() || inside.may_differ,
            Contents::Latest(_) => true,
        };
        match checked {
            Err(element) => {
                let element = self.source.element(whole, from, element);
                let violation = Violation::WrongSum { job: self.plan.name.clone(), rank, tensor, element };
                return self.referee.stop(context, violation);
            }
            Ok(_) if may_differ => {}
            Ok(digest) => {
                let least = || self.workers.iter().map(WorkerState::least).min().unwrap_or(0);
                if !self.results.agree((tensor, shard), digest, least) {
                    let violation = Violation::Disagreement { job: self.plan.name.clone(), rank, tensor };
                    return self.referee.stop(context, violation);
                }
            }
        }
        let worker = &mut self.workers[rank];
        worker.spare.push(part);
        let measures = &mut worker.measures;
        measures.bytes += 4 * range.len() as u64;
        let left = worker.parts.get_mut(&tensor).map(|left| {
            *left -= 1;
            *left
        });
        if left == Some(0) {
            worker.parts.remove(&tensor);
            worker.measures.tensors += 1;
            if matches!(self.plan.workload, Workload::AllReduce { .. }) {
                worker.measures.meter.count(now);
            }
            if let Some(since) = worker.submitted.remove(&tensor) {
                worker.measures.latencies.push(now.since(since).into());
                if let Some(spans) = &mut self.spans {
                    spans.summed(rank, tensor, since, now);
                }
            }
            let mut steps = Vec::new();
            if !worker.program.completed(tensor, &mut steps) {
                let violation = Violation::CompletedTwice { job: self.plan.name.clone(), rank, tensor };
                return self.referee.stop(context, violation);
            }
            self.take(context, rank, steps);
        } else if left.is_none() {
            let violation = Violation::CompletedTwice { job: self.plan.name.clone(), rank, tensor };
            self.referee.stop(context, violation);
        }
    }

    /// Whether all pieces of the latest parameters are there, and each is of who is said to be in,
    /// this worker's own delta last.
    fn check_latest(&self, rank: usize, part: &Gradient, pieces: &[Latest]) -> Result<(), usize> {
        let mut end = 0;
        for piece in pieces {
            if piece.at.start != end || piece.inside.get(rank) != Some(&Some(part.tensor)) {
                return Err(piece.at.start);
            }
            self.source.check_latest(part, 0, piece)?;
            end = piece.at.end;
        }
        if end == part.count() { Ok(()) } else { Err(end) }
    }

    /// The parameters that a service has at the end, of the variable that this tensor changed first.
    /// They are of who is said to be in, and if the job has finished, that is all deltas.
    pub(crate) fn check_parameters(
        &self,
        tensor: u64,
        numbers: &Gradient,
        piece: &Latest,
    ) -> Option<Violation> {
        let period = self.schedule.period();
        let last = |worker: &WorkerState| {
            let turns = worker.program.next_tensor().checked_sub(tensor + 1)? / period;
            Some(tensor + turns * period)
        };
        let all: Vec<_> = self.workers.iter().map(last).collect();
        let from = piece.at.start;
        let checked = match self.finished {
            Some(_) if piece.inside != all => Err(from),
            _ => self.source.check_latest(numbers, from, piece),
        };
        let element = self.source.element(numbers.whole(), 0, checked.err()?);
        Some(Violation::WrongParameters { job: self.plan.name.clone(), tensor, element })
    }

    /// Elements of each tensor after which the variables come again.
    pub(crate) fn iteration(&self) -> Vec<usize> {
        self.schedule.iteration()
    }

    fn take(&mut self, context: &mut Context<'_>, rank: usize, steps: Vec<Step>) {
        let now = context.now();
        for step in steps {
            match step {
                Step::Submit { tensor, elements } => self.ready(context, rank, tensor, elements),
                Step::Wait(length) => {
                    self.busy_until = self.busy_until.max(now + length);
                    let pauses = self.workers[rank].program.is_paused();
                    if let Some(spans) = self.spans.as_mut().filter(|_| !pauses) {
                        spans.computes(rank, now, now + length);
                    }
                    context.wake_after(length, token::PROGRAM);
                }
                Step::Iterated => {
                    let measures = &mut self.workers[rank].measures;
                    measures.iterations += 1;
                    measures.meter.count(now);
                }
                Step::Finished => {
                    self.workers[rank].finished = true;
                    if self.workers.iter().all(|worker| worker.finished) {
                        (self.finished, self.over) = (Some(now), Some(now));
                        self.close(context);
                    }
                }
            }
        }
    }

    /// A tensor is submitted when its worker's lateness with the step is over, and that of those
    /// before it.
    fn ready(&mut self, context: &mut Context<'_>, rank: usize, tensor: u64, elements: usize) {
        let worker = &mut self.workers[rank];
        if self.schedule.begins_step(tensor) {
            let late = self.plan.lateness.drawn(&mut worker.dice);
            worker.late_until = worker.late_until.max(context.now() + late);
        }
        let at = worker.late_until.max(context.now());
        worker.late.push_back((at, tensor, elements));
        self.submit_late(context, rank);
    }

    /// Submits whatever is ready, and comes back for the rest.
    fn submit_late(&mut self, context: &mut Context<'_>, rank: usize) {
        while let Some((at, tensor, elements)) = self.workers[rank].late.pop_front() {
            if at > context.now() {
                self.workers[rank].late.push_front((at, tensor, elements));
                self.busy_until = self.busy_until.max(at);
                return context.wake_at(at, token::LATE);
            }
            self.submit(context, rank, tensor, elements);
        }
    }

    fn submit(&mut self, context: &mut Context<'_>, rank: usize, tensor: u64, elements: usize) {
        debug_assert_eq!(elements, self.schedule.elements(tensor));
        let shards = self.workers[rank].waiting.len();
        let parts = (0..shards).map(|shard| (shard, self.range(tensor, shard)));
        let parts: Vec<_> = parts.filter(|(_, range)| !range.is_empty()).collect();
        self.workers[rank].parts.insert(tensor, parts.len());
        self.workers[rank].submitted.insert(tensor, context.now());
        for (shard, range) in parts {
            let old = self.workers[rank].spare.pop();
            // How a service's part travels depends on the whole tensor, unless all travel alike.
            let depends = self.cuts.is_some() && self.plan.system.wire_dtype() != WireDtype::Native;
            let whole = if depends { elements } else { range.len() };
            let of = |old, tensor| self.source.contribution(old, tensor, rank as u32, range.clone(), whole);
            let mut part = of(old, tensor);
            if self.plan.system.is_asynchronous()
                && let Some(before) = tensor.checked_sub(self.schedule.period())
            {
                part.subtract(&of(None, before));
            }
            let part = part.of_layer(self.schedule.layer(tensor));
            let worker = &mut self.workers[rank];
            worker.waiting[shard].push_back(part);
            context.notify(worker.actors[shard], token::SUBMIT);
        }
    }

    /// The measurements, worker by worker; the run ends now.
    pub(crate) fn readings(&self, now: Instant) -> Vec<Reading> {
        // A model's tensors come in iterations, one after the other.
        let in_flight = match self.plan.workload {
            Workload::AllReduce { in_flight, .. } => in_flight.into(),
            Workload::Training { .. } => 1,
        };
        let end = self.over.unwrap_or(now);
        let meters = self.workers.iter().map(|worker| worker.measures.meter);
        meters.map(|meter| meter.read(end, self.is_open(), in_flight)).collect()
    }

    /// Parameter bytes of what the meter counts.
    pub(crate) fn measured_bytes(&self) -> u64 {
        4 * self.schedule.elements_counted() as u64
    }

    /// A worker took in something that it lacked.
    pub(crate) fn progressed(&mut self, now: Instant) {
        self.last_progress = now;
    }

    /// Whether it should be running.
    pub(crate) fn is_open(&self) -> bool {
        self.over.is_none()
    }

    /// Whether it has stalled: none of its workers computes or pauses, and nothing has come to any
    /// of them for too long. It does not matter whether they have submitted something.
    pub(crate) fn stalled(&self, now: Instant, limit: Duration) -> bool {
        self.is_open() && now.since(self.last_progress.max(self.busy_until)) > limit
    }

    /// Whether it had to be over by `now` and is not.
    pub(crate) fn is_late(&self, now: Instant) -> bool {
        let limited = match self.plan.workload {
            Workload::AllReduce { count, .. } => count.is_some(),
            Workload::Training { iterations, .. } => iterations.is_some(),
        };
        self.is_open() && (limited || self.plan.stop.is_some_and(|stop| Instant(0) + stop < now))
    }

    /// The ranks that wait, for which tensor and for whom.
    pub(crate) fn waits(&self) -> String {
        let completed: Vec<u64> = self.workers.iter().map(|worker| worker.measures.tensors).collect();
        let all = |is: &dyn Fn(&WorkerState) -> bool| -> Vec<usize> {
            (0..self.workers.len()).filter(|rank| is(&self.workers[*rank])).collect()
        };
        let mut text = format!("tensors completed by each worker: {}", first(&completed));
        let mut add = |what: &str, ranks: &[usize]| {
            if !ranks.is_empty() {
                text += &format!("; {what}: ranks {}", first(ranks));
            }
        };
        if let Some(tensor) = self.workers.iter().filter_map(|worker| worker.parts.keys().min()).min() {
            let has = |worker: &WorkerState| worker.parts.contains_key(tensor);
            add(&format!("wait for tensor {tensor}"), &all(&has));
            add("have not submitted it", &all(&|worker| worker.program.next_tensor() <= *tensor));
        }
        add("have not begun", &all(&|worker| !worker.measures.began));
        add("away", &all(&|worker| worker.away));
        add("have done everything", &all(&|worker| worker.finished));
        text
    }

    /// The whole job is gone.
    pub(crate) fn die(&mut self, context: &mut Context<'_>) {
        if !std::mem::replace(&mut self.dead, true) && self.finished.is_none() {
            self.over = Some(context.now());
            self.interrupted(None, context.now());
            self.close(context);
        }
    }

    /// When it was gone, if it had not finished before.
    pub(crate) fn died(&self) -> Option<Instant> {
        self.over.filter(|_| self.finished.is_none())
    }

    /// Closes a job; after the last one there is nothing to wait for.
    fn close(&self, context: &mut Context<'_>) {
        self.open.set(self.open.get() - 1);
        if self.open.get() == 0 {
            context.stop();
        }
    }

    /// The node of worker `rank` was away: its timers are lost.
    pub(crate) fn restarted(&mut self, context: &mut Context<'_>, rank: usize) {
        if !self.workers[rank].measures.began {
            return self.schedule_start(context);
        }
        self.submit_late(context, rank);
        let mut steps = Vec::new();
        self.workers[rank].program.restarted(&mut steps);
        if let Some(stop) = self.plan.stop {
            context.wake_at(Instant(0) + stop, token::STOP);
        }
        self.take(context, rank, steps);
    }

    /// Sets the timers of a worker's beginning and end.
    pub(crate) fn schedule_start(&self, context: &mut Context<'_>) {
        context.wake_at(Instant(0) + self.plan.start, token::START);
        if let Some(stop) = self.plan.stop {
            context.wake_at(Instant(0) + stop, token::STOP);
        }
    }

    /// The place of a packet in the job's stream of tensors: its tensor, and its number within
    /// that.
    pub(crate) fn locate(&self, packet: u64, elements: usize) -> (u64, u32) {
        self.schedule.locate(packet, elements, |tensor| self.schedule.elements(tensor))
    }

    /// A new process takes rank `rank`, from `tensor` on; the sums of its first `lost` elements it
    /// lacks.
    pub(crate) fn respawned(&mut self, context: &mut Context<'_>, rank: usize, tensor: u64, lost: usize) {
        let worker = &mut self.workers[rank];
        worker.parts.clear();
        worker.submitted.clear();
        worker.waiting.iter_mut().for_each(VecDeque::clear);
        worker.late.clear();
        worker.away = false;
        worker.lost = (lost > 0).then_some((tensor, lost));
        if !worker.measures.began {
            return self.schedule_start(context);
        }
        let mut steps = Vec::new();
        worker.program.go_on_from(tensor, &mut steps);
        if let Some(stop) = self.plan.stop {
            context.wake_at(Instant(0) + stop, token::STOP);
        }
        self.take(context, rank, steps);
    }
}

impl WorkerState {
    /// Tensors that it has submitted and lacks.
    pub(crate) fn under_way(&self) -> usize {
        self.submitted.len()
    }

    /// The first tensor that it does not have.
    fn least(&self) -> u64 {
        let late = self.late.front().map(|(_, tensor, _)| *tensor);
        self.parts.keys().next().copied().or(late).unwrap_or_else(|| self.program.next_tensor())
    }
}

/// For parts of tensors that some workers have and some do not: the first one's bits.
#[derive(Default)]
struct Digests {
    kept: BTreeMap<(u64, usize), u64>,
    /// When there are more, those of tensors that everybody has are dropped.
    most: usize,
}

impl Digests {
    /// Whether a worker's bits are the first one's. `least` is the first tensor that somebody
    /// lacks.
    fn agree(&mut self, part: (u64, usize), digest: u64, least: impl FnOnce() -> u64) -> bool {
        let agree = *self.kept.entry(part).or_insert(digest) == digest;
        if self.kept.len() > self.most {
            self.kept = self.kept.split_off(&(least(), 0));
            // As many again come until the next time, so that looking at all workers costs little
            // for each of them.
            self.most = DIGESTS_KEPT.max(2 * self.kept.len());
        }
        agree
    }
}

const DIGESTS_KEPT: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_dropped_seldom_and_before_there_are_many_however_many_parts_a_tensor_has() {
        const PARTS: usize = 600;
        let (mut digests, mut looks) = (Digests::default(), 0);
        for tensor in 0..100 {
            for (worker, part) in (0..3).flat_map(|worker| (0..PARTS).map(move |part| (worker, part))) {
                // The last worker lacks the tensor before until it has this one.
                let mut least = || {
                    looks += 1;
                    tensor - u64::from(worker < 2 && tensor > 0)
                };
                assert!(digests.agree((tensor, part), tensor ^ part as u64, &mut least));
                assert!(!digests.agree((tensor, part), 1 << 40, least));
                assert!(digests.kept.len() <= 4 * PARTS);
            }
        }
        assert!(looks < 150, "{looks}: all workers were looked at too often");
    }
}
