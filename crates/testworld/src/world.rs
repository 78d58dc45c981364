//! The machines, the network between them, and what happens when.

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use fanin_protocol::{Instant, Loss, Reason, WorkerEvent};
use fanin_wire::Tag;

use crate::{Machine, Packet, Random, Script, Values};

/// So many events are a machine that never sleeps.
const TOO_MANY: u64 = 20_000_000;
/// A driver sleeps at least so many nanoseconds.
const NAP: u64 = 100;

enum Event<H> {
    Packet(Packet),
    Timer(usize),
    Drain(usize),
    Begin(usize),
    Happening(H),
}

/// A tensor that a worker completed.
#[derive(Clone, Debug)]
pub struct Sum {
    /// What it holds.
    pub values: Values,
    /// What the worker says that it lacks.
    pub loss: Loss,
    /// The first element for which the worker was there. A worker that took another's place lacks those before.
    pub since: usize,
}

/// Machines and the network between them. Each machine is at a node.
pub struct World<S: Script> {
    /// The case.
    pub script: S,
    /// Decides what chance decides.
    pub random: Random,
    machines: Vec<Machine>,
    /// How many tensors each worker has.
    tensors: usize,
    now: u64,
    agenda: BTreeMap<(u64, u64), Event<S::Happening>>,
    events: u64,
    /// When each machine's earliest timer is on the agenda.
    timers: Vec<Option<u64>>,
    /// Which drivers have packets handled that their machines have not answered.
    drains: Vec<bool>,
    down: Vec<bool>,
    /// By node and tensor.
    done: Vec<Vec<Option<Sum>>>,
    /// The tensor with which each worker began, and the first element of it for which the worker was there.
    since: Vec<(usize, usize)>,
    missing: usize,
    packets: u64,
    lost: u64,
    /// The packets on their way, if the test decides what becomes of them.
    held: Option<Vec<Packet>>,
    train: Vec<u8>,
}

impl<S: Script> World<S> {
    /// A world at its beginning. Each of its workers has so many tensors.
    #[must_use]
    pub fn new(script: S, random: Random, machines: Vec<Machine>, tensors: usize) -> Self {
        let is_worker = |machine: &&Machine| matches!(machine, Machine::Worker(_));
        Self {
            script,
            random,
            tensors,
            now: 0,
            agenda: BTreeMap::new(),
            events: 0,
            timers: vec![None; machines.len()],
            drains: vec![false; machines.len()],
            down: vec![false; machines.len()],
            done: vec![vec![None; tensors]; machines.len()],
            since: vec![(0, 0); machines.len()],
            missing: tensors * machines.iter().filter(is_worker).count(),
            packets: 0,
            lost: 0,
            held: None,
            train: vec![0; 65536],
            machines,
        }
    }

    /// Packets stay on their way until the test says otherwise, and timers run when it says so.
    #[must_use]
    pub fn holding(mut self) -> Self {
        self.held = Some(vec![]);
        self
    }

    /// Plays to the end, and checks every sum.
    #[must_use]
    pub fn play(mut self) -> Self {
        self.run();
        S::check(&self);
        self
    }

    /// Plays to the end. Only a case that ends in an abort has no sums to check.
    pub fn run(&mut self) {
        let too_late = self.script.patience().as_nanos() as u64;
        while !S::is_over(self) {
            let Some(((at, _), event)) = self.agenda.pop_first() else {
                assert!(S::may_sleep(self), "nothing happens any more: {}", self.standing());
                return;
            };
            assert!(at < too_late, "never done: {}", self.standing());
            assert!(self.events < TOO_MANY, "never sleeps: {}", self.standing());
            self.now = at;
            match event {
                Event::Packet(packet) => {
                    S::before_packet(self);
                    self.deliver(&packet);
                }
                Event::Timer(node) => {
                    if self.timers[node] == Some(at) {
                        self.timers[node] = None;
                        self.wake(node);
                    }
                }
                Event::Drain(node) => {
                    self.drains[node] = false;
                    self.drain(node);
                }
                Event::Begin(node) => self.begin(node, 0),
                Event::Happening(what) => S::happen(self, what),
            }
        }
    }

    fn schedule(&mut self, at: u64, event: Event<S::Happening>) {
        self.agenda.insert((at, self.events), event);
        self.events += 1;
    }

    /// Workers begin at a time within `late_us`, each at its own.
    pub fn begin_within(&mut self, workers: Range<usize>, late_us: u64) {
        for node in workers {
            let at = self.random.below(1000 * late_us + 1);
            self.schedule(at, Event::Begin(node));
        }
    }

    /// A worker begins then, and not when it was to begin otherwise.
    pub fn begin_at(&mut self, node: usize, at: u64) {
        self.begin_never(node);
        self.schedule(at, Event::Begin(node));
    }

    fn begin_never(&mut self, node: usize) {
        self.agenda.retain(|_, event| !matches!(event, Event::Begin(other) if *other == node));
    }

    /// Something happens then.
    pub fn happens_at(&mut self, at: u64, what: S::Happening) {
        self.schedule(at, Event::Happening(what));
    }

    /// Something happens after so long.
    pub fn happens_in(&mut self, after: Duration, what: S::Happening) {
        self.happens_at(self.now + after.as_nanos() as u64, what);
    }

    /// A worker submits its tensors from this one on.
    pub fn begin(&mut self, node: usize, from: usize) {
        (from..self.tensors).for_each(|number| self.submit(node, number));
        self.drain(node);
    }

    /// A worker takes a tensor in.
    ///
    /// # Panics
    /// When no worker is at the node.
    pub fn submit(&mut self, node: usize, number: usize) {
        let (tensor, operation) = self.script.tensor(node, number);
        let Machine::Worker(worker) = &mut self.machines[node] else { panic!("{node} is no worker") };
        worker.take_in(tensor, operation);
    }

    /// Hands a packet over.
    pub fn deliver(&mut self, packet: &Packet) {
        let Some(node) = self.script.node_at(packet.to).filter(|node| !self.down[*node]) else { return };
        let now = self.script.clock(self.now);
        let verdict = self.machines[node].handle_packet(now, packet.from, &packet.bytes);
        S::after_packet(self, node, packet, verdict);
        let Some(round) = self.script.round() else { return self.drain(node) };
        if !std::mem::replace(&mut self.drains[node], true) {
            let wait = self.random.below(round.as_nanos() as u64 + 1);
            self.schedule(self.now + wait, Event::Drain(node));
        }
    }

    /// A machine's driver wakes, whether or not anything is due.
    fn wake(&mut self, node: usize) {
        if !self.down[node] {
            let now = self.script.clock(self.now);
            self.machines[node].handle_timeout(now);
            self.drain(node);
        }
    }

    /// When the machine at a node wants to be woken.
    #[must_use]
    pub fn due(&self, node: usize) -> Option<u64> {
        self.machines[node].poll_timeout().map(|due| due.0)
    }

    /// It becomes as late as a machine waits for, and the machine is woken.
    pub fn time_out(&mut self, node: usize) {
        if let Some(due) = self.due(node) {
            self.now = self.now.max(due);
            self.wake(node);
        }
    }

    /// Lets a machine send, tell and go to sleep.
    pub fn drain(&mut self, node: usize) {
        if self.down[node] {
            return;
        }
        let now = self.script.clock(self.now);
        // Not a new one each time: to clear it would take most of the time.
        let (mut train, mut sent_packets) = (std::mem::take(&mut self.train), 0);
        while let Some(sent) = self.machines[node].poll_transmit(now, &mut train) {
            let (recipients, bytes, segment_bytes) = (sent.to.to_vec(), sent.bytes, sent.segment_bytes);
            let packets = || train[..bytes].chunks(segment_bytes);
            let kinds = || packets().map(Tag::of_packet);
            assert!(kinds().zip(kinds().skip(1)).all(|(a, b)| a == b), "a train is of one kind");
            sent_packets += packets().count();
            for to in recipients {
                packets().for_each(|packet| self.send(node, to, packet));
            }
        }
        self.train = train;
        if let Some(held) = &mut self.held {
            // In one order, so that the order of sending makes no two states of one.
            held.sort();
        }
        self.take_events(node);
        S::after_drain(self, node, sent_packets);
        // A clock that jumps brings the timer's time with it.
        let due = self.machines[node].poll_timeout().filter(|_| self.held.is_none());
        let due = due.map(|due| self.now + due.0.saturating_sub(now.0).max(NAP));
        if let Some(due) = due.filter(|due| self.timers[node].is_none_or(|old| *due < old)) {
            self.timers[node] = Some(due);
            self.schedule(due, Event::Timer(node));
        }
    }

    fn send(&mut self, from: usize, to: usize, bytes: &[u8]) {
        let Some(way) = S::carry(self, from, to, bytes) else { return };
        let packet = || Packet { to: way.to, from: way.from, bytes: bytes.to_vec() };
        if let Some(held) = &mut self.held {
            held.push(packet());
            return;
        }
        let arrivals = self.script.network().arrivals(&way, &mut self.random);
        self.packets += 1;
        self.lost += u64::from(arrivals.is_empty());
        for after in arrivals {
            self.schedule(self.now + after, Event::Packet(packet()));
        }
    }

    fn take_events(&mut self, node: usize) {
        let mut gave_up = Vec::new();
        match &mut self.machines[node] {
            Machine::Summer(machine) => {
                let aborted = std::iter::from_fn(|| machine.poll_event());
                gave_up.extend(aborted.map(|aborted| (Some(aborted.job), aborted.reason)));
            }
            Machine::Worker(machine) => {
                while let Some(event) = machine.poll_event() {
                    match event {
                        WorkerEvent::Completed(tensor, times) => {
                            let loss = times.map_or(Loss::default(), |times| times.loss);
                            let place = &mut self.done[node][tensor.number];
                            assert!(place.is_none(), "{node} completed {} twice", tensor.number);
                            let (first, element) = self.since[node];
                            let since = if tensor.number == first { element } else { 0 };
                            *place = Some(Sum { values: tensor.values, loss, since });
                            self.missing -= 1;
                        }
                        WorkerEvent::Aborted(reason) => gave_up.push((None, reason)),
                    }
                }
            }
        }
        for (job, reason) in gave_up {
            S::gave_up(self, node, job, reason);
        }
    }

    /// The machine at a node.
    ///
    /// # Panics
    /// When it is another one.
    #[must_use]
    pub fn machine<M: Any>(&self, node: usize) -> &M {
        self.machines[node].downcast().expect("another machine is there")
    }

    /// The machine at a node.
    ///
    /// # Panics
    /// When it is another one.
    pub fn machine_mut<M: Any>(&mut self, node: usize) -> &mut M {
        self.machines[node].downcast_mut().expect("another machine is there")
    }

    /// The machines that are an `M`, in the order of nodes.
    pub fn all<M: Any>(&self) -> impl Iterator<Item = &M> {
        self.machines.iter().filter_map(Machine::downcast)
    }

    /// All machines.
    #[must_use]
    pub fn machines(&self) -> &[Machine] {
        &self.machines
    }

    /// Another machine is at a node from now on, and is up: it has lost its memory, or is a successor.
    pub fn replace(&mut self, node: usize, machine: Machine) {
        self.machines[node] = machine;
        self.down[node] = false;
    }

    /// A worker took another's place, which is gone with all it had, and begins with an element of a tensor. It gets no sum of
    /// what was before; `expected` stands for those.
    pub fn begin_midway(
        &mut self,
        node: usize,
        (first, element): (usize, usize),
        expected: impl Fn(&S, usize) -> Values,
    ) {
        for number in 0..self.tensors {
            self.missing += usize::from(self.done[node][number].is_some());
            self.done[node][number] = (number < first).then(|| {
                let values = expected(&self.script, number);
                let since = values.len();
                Sum { values, loss: Loss::default(), since }
            });
            self.missing -= usize::from(number < first);
        }
        self.since[node] = (first, element);
        self.begin_never(node);
        self.begin(node, first);
    }

    /// A machine hears and says nothing, until another one is at its node.
    pub fn die(&mut self, node: usize) {
        self.down[node] = true;
    }

    /// Whether the machine at a node hears and says nothing.
    #[must_use]
    pub fn is_down(&self, node: usize) -> bool {
        self.down[node]
    }

    /// The first node whose machine hears and says nothing.
    #[must_use]
    pub fn dead(&self) -> Option<usize> {
        self.down.iter().position(|down| *down)
    }

    /// Nanoseconds since the beginning.
    #[must_use]
    pub const fn ns(&self) -> u64 {
        self.now
    }

    /// Time since the beginning.
    #[must_use]
    pub const fn now(&self) -> Duration {
        Duration::from_nanos(self.now)
    }

    /// What the machines' clocks say.
    #[must_use]
    pub fn clock(&self) -> Instant {
        self.script.clock(self.now)
    }

    /// Tensors that workers still wait for.
    #[must_use]
    pub const fn missing(&self) -> usize {
        self.missing
    }

    /// What the worker at a node has of a tensor.
    #[must_use]
    pub fn done(&self, node: usize, number: usize) -> Option<&Sum> {
        self.done[node][number].as_ref()
    }

    /// The sum that these workers have, from one that has all of it if there is one. All have the same bits, each from the element
    /// on for which it was there.
    ///
    /// # Panics
    /// When a worker has none, or other bits.
    #[must_use]
    pub fn same_everywhere(&self, workers: Range<usize>, number: usize) -> &Sum {
        let of = |node: usize| self.done(node, number).expect("all are done");
        let whole = workers.clone().map(of).min_by_key(|sum| sum.since).expect("a worker");
        let bits = whole.values.bits();
        for node in workers {
            let since = of(node).since.max(whole.since);
            let own = of(node).values.bits();
            assert_eq!(own[since..], bits[since..], "tensor {number} of node {node}: {:?}", self.script);
        }
        whole
    }

    /// Packets on their way, in a world that holds them.
    #[must_use]
    pub fn held(&self) -> &[Packet] {
        self.held.as_deref().unwrap_or_default()
    }

    /// Takes a packet that is held.
    pub fn take_held(&mut self, at: usize) -> Packet {
        self.held.as_mut().expect("a world that holds its packets").remove(at)
    }

    /// Packets that were handed to the network, each to one recipient.
    #[must_use]
    pub const fn packets(&self) -> u64 {
        self.packets
    }

    /// Packets of which no copy arrives.
    #[must_use]
    pub const fn lost(&self) -> u64 {
        self.lost
    }

    /// Events that are still to come: packets on their way, timers, and what the script has planned.
    #[must_use]
    pub fn ahead(&self) -> usize {
        self.agenda.len()
    }

    /// Packets that workers sent again.
    #[must_use]
    pub fn retransmissions(&self) -> u64 {
        let of = |machine: &Machine| match machine {
            Machine::Worker(worker) => worker.counted().retransmissions,
            Machine::Summer(_) => 0,
        };
        self.machines.iter().map(of).sum()
    }

    /// Packets that machines dropped for this reason.
    #[must_use]
    pub fn dropped(&self, reason: Reason) -> u64 {
        self.machines.iter().map(|machine| machine.received().dropped[reason as usize]).sum()
    }

    /// The case, and what every machine counted, for a failure.
    #[must_use]
    pub fn standing(&self) -> String {
        let jobs = self.script.jobs();
        let machines: Vec<_> = self.machines.iter().map(|machine| machine.standing(&jobs)).collect();
        format!("{:?} after {} ns\n{}", self.script, self.now, machines.join("\n"))
    }
}
