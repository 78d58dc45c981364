//! A protocol's own state machine as an actor.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use fanin_protocol::{Endpoint, Instant, Verdict};

use super::actor::Actor;
use super::context::Context;
use super::ids::{ActorId, SimAddress};
use super::packet::{Body, Packet};
use super::queue::Class;

/// The owner of a machine: hears its events and does to it what its user would. After each call the
/// machine is drained.
///
/// A closure `FnMut(&mut E, E::Event, &mut Context)` is an owner that only hears events.
pub trait Owner<E: Endpoint<Address = SimAddress>> {
    /// As [`Actor::start`].
    fn start(&mut self, _machine: &mut E, _context: &mut Context<'_>) {}
    /// The machine told this.
    fn event(&mut self, machine: &mut E, event: E::Event, context: &mut Context<'_>);
    /// A timer that the owner set. `u64::MAX` and the one before are the machine's own tokens.
    fn timer(&mut self, _machine: &mut E, _token: u64, _context: &mut Context<'_>) {}
    /// As [`Actor::notice`].
    fn notice(&mut self, _machine: &mut E, _token: u64, _context: &mut Context<'_>) {}
    /// The machine's verdict on a packet: for checkers.
    fn handled(&mut self, _packet: &Packet<'_>, _verdict: Verdict, _context: &mut Context<'_>) {}
}

impl<E, F> Owner<E> for F
where
    E: Endpoint<Address = SimAddress>,
    F: FnMut(&mut E, E::Event, &mut Context<'_>),
{
    fn event(&mut self, machine: &mut E, event: E::Event, context: &mut Context<'_>) {
        self(machine, event, context);
    }
}

const OWN_TIMER: u64 = u64::MAX;
const NIC_TIMER: u64 = OWN_TIMER - 1;
/// Ethernet with preamble, checksum and gap, IPv4 and UDP.
const FRAMING_BYTES: u64 = 66;

/// How a machine's packet is treated in queues.
type Classify<E> = Box<dyn Fn(&E, &[u8]) -> Class>;
/// By how many bytes a packet is longer than what the machine wrote.
type Declare = Box<dyn Fn(&[u8]) -> u32>;

/// A host's NIC, which takes packets no faster than it sends. Its machines wait for it in turn,
/// rather than all of them for each packet.
#[derive(Debug)]
pub struct Nic {
    rate_bps: u64,
    /// The number of bytes that a machine writes for it at a time. For packets that declare most of
    /// their bytes, a train that fills a buffer is a MB on the link.
    train_bytes: usize,
    /// When it has sent all that it was given.
    free_at: Cell<Instant>,
    /// Machines that have something for it.
    waiting: RefCell<VecDeque<ActorId>>,
    /// Whether the first of them will be called.
    is_called: Cell<bool>,
    /// How often its host had failed when that was so.
    epoch: Cell<u32>,
}

impl Nic {
    /// How much it holds, in time.
    const HOLDS: Duration = Duration::from_micros(2);

    /// A NIC that sends `rate_bps`, for machines that write `train_bytes` at a time. No packet is
    /// longer.
    #[must_use]
    pub fn new(rate_bps: u64, train_bytes: usize) -> Rc<Self> {
        let (free_at, waiting, is_called, epoch) = Default::default();
        Rc::new(Self { rate_bps, train_bytes, free_at, waiting, is_called, epoch })
    }

    /// A host that fails takes with it whom its NIC would have called: all its machines begin anew
    /// when it is back.
    fn begin(&self, epoch: u32) {
        if self.epoch.replace(epoch) != epoch {
            self.waiting.borrow_mut().clear();
            self.is_called.set(false);
        }
    }

    /// Whether it takes something from a machine whose turn it is not.
    fn is_free(&self, now: Instant) -> bool {
        self.free_at.get() <= now + Self::HOLDS && self.waiting.borrow().is_empty()
    }

    fn takes(&self, now: Instant, bytes: u64) {
        let sent = Duration::from_nanos((8_000_000_000 * bytes).div_ceil(self.rate_bps.max(1)));
        self.free_at.set(self.free_at.get().max(now) + sent);
    }

    /// A machine's turn comes after those that wait.
    fn enrol(&self, actor: ActorId) {
        let mut waiting = self.waiting.borrow_mut();
        if !waiting.contains(&actor) {
            waiting.push_back(actor);
        }
    }

    /// It is the turn of the first: it is called no more.
    fn begin_turn(&self) {
        self.waiting.borrow_mut().pop_front();
        self.is_called.set(false);
    }

    /// Calls the next one for when all is sent.
    fn call_next(&self, context: &mut Context<'_>) {
        if let Some(next) = self.waiting.borrow().front()
            && !self.is_called.replace(true)
        {
            let at = self.free_at.get().max(context.now());
            context.core.wake_at(*next, at.into(), NIC_TIMER);
        }
    }
}

/// A machine and its owner.
pub struct Machine<E, O> {
    /// The machine. A caller that changes it from outside does so through
    /// [`Network::with_actor`](super::Network::with_actor), and then calls [`Machine::drain`].
    pub machine: E,
    /// Its owner.
    pub owner: O,
    classify: Classify<E>,
    declare: Declare,
    nic: Option<Rc<Nic>>,
    /// The recipients of the train that is being sent.
    recipients: Vec<SimAddress>,
    /// The earliest timer that is set.
    timer: Option<Instant>,
}

impl<E, O> Machine<E, O>
where
    E: Endpoint<Address = SimAddress>,
    O: Owner<E>,
{
    /// All packets in the default class.
    pub fn new(machine: E, owner: O) -> Self {
        let (classify, declare) = (Box::new(|_: &E, _: &[u8]| Class::default()), Box::new(|_: &[u8]| 0_u32));
        Self { machine, owner, classify, declare, nic: None, recipients: Vec::new(), timer: None }
    }

    /// How each of the machine's packets is treated in queues, by the packet or by what the machine
    /// knows of it.
    #[must_use]
    pub fn classified(mut self, classify: impl Fn(&E, &[u8]) -> Class + 'static) -> Self {
        self.classify = Box::new(classify);
        self
    }

    /// How many bytes longer than what the machine wrote its packets are on the network: it carries
    /// a sample of their elements.
    #[must_use]
    pub fn declaring(mut self, declare: impl Fn(&[u8]) -> u32 + 'static) -> Self {
        self.declare = Box::new(declare);
        self
    }

    /// The NIC that it shares with others of its host.
    #[must_use]
    pub fn behind(mut self, nic: Rc<Nic>) -> Self {
        self.nic = Some(nic);
        self
    }

    /// Sends what the machine has to send, tells its owner what it has to tell, until nothing is
    /// left, and sets its timer.
    pub fn drain(&mut self, context: &mut Context<'_>) {
        self.drain_in_turn(context, false);
    }

    /// The same, where the NIC takes one train from it in any case if it is its turn.
    fn drain_in_turn(&mut self, context: &mut Context<'_>, mut is_its_turn: bool) {
        let now = context.now();
        let mut train = std::mem::take(&mut context.core.train);
        let at_a_time = self.nic.as_ref().map_or(train.len(), |nic| nic.train_bytes);
        loop {
            while self.nic.as_ref().is_none_or(|nic| std::mem::take(&mut is_its_turn) || nic.is_free(now))
                && let Some(transmit) = self.machine.poll_transmit(now, &mut train[..at_a_time])
            {
                let (bytes, segment_bytes) = (transmit.bytes, transmit.segment_bytes);
                self.recipients.clear();
                self.recipients.extend_from_slice(transmit.to);
                // A packet for its own host does not pass the NIC.
                let own = context.address().node;
                let leaving = self.recipients.iter().filter(|to| to.node != own).count() as u64;
                for packet in train[..bytes].chunks(segment_bytes) {
                    let class = (self.classify)(&self.machine, packet);
                    let declared = (self.declare)(packet);
                    if let Some(nic) = &self.nic {
                        nic.takes(now, leaving * (packet.len() as u64 + u64::from(declared) + FRAMING_BYTES));
                    }
                    context.send_to_all(&self.recipients, class, packet, declared);
                }
            }
            let Some(event) = self.machine.poll_event() else { break };
            self.owner.event(&mut self.machine, event, context);
        }
        context.core.train = train;
        let mut due = self.machine.poll_timeout();
        if let Some(nic) = &self.nic {
            // A machine whose packets are due now waits for its turn.
            if due.is_some_and(|due| due <= now) && !nic.is_free(now) {
                nic.enrol(context.actor());
                due = None;
            }
            nic.call_next(context);
        }
        if let Some(due) = due
            && self.timer.is_none_or(|timer| due < timer)
        {
            self.timer = Some(due.max(now));
            context.wake_at(due, OWN_TIMER);
        }
    }

    fn act_on_time(&mut self, now: Instant) {
        if self.machine.poll_timeout().is_some_and(|due| due <= now) {
            self.machine.handle_timeout(now);
        }
    }
}

impl<E, O> Actor for Machine<E, O>
where
    E: Endpoint<Address = SimAddress> + 'static,
    O: Owner<E> + 'static,
{
    fn start(&mut self, context: &mut Context<'_>) {
        self.timer = None;
        if let Some(nic) = &self.nic {
            nic.begin(context.core.nodes[context.node().index()].epoch);
        }
        self.owner.start(&mut self.machine, context);
        self.drain(context);
    }

    fn packet(&mut self, context: &mut Context<'_>, packet: &Packet<'_>) {
        let Body::Bytes(bytes) = packet.body else { return };
        let verdict = self.machine.handle_packet(context.now(), packet.from, bytes);
        self.owner.handled(packet, verdict, context);
        self.drain(context);
    }

    fn timer(&mut self, context: &mut Context<'_>, token: u64) {
        let now = context.now();
        if token == NIC_TIMER
            && let Some(nic) = &self.nic
        {
            nic.begin_turn();
            self.act_on_time(now);
            return self.drain_in_turn(context, true);
        }
        if token != OWN_TIMER {
            self.owner.timer(&mut self.machine, token, context);
            return self.drain(context);
        }
        if self.timer.is_none_or(|timer| timer > now) {
            return; // An earlier one took its place.
        }
        self.timer = None;
        self.act_on_time(now);
        self.drain(context);
    }

    fn notice(&mut self, context: &mut Context<'_>, token: u64) {
        self.owner.notice(&mut self.machine, token, context);
        self.drain(context);
    }
}
