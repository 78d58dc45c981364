//! Machines that talk over TCP-like connections: lines between them, and servers' places.
//!
//! Connections carry lengths. The messages themselves travel beside them, and are taken when their
//! bytes have arrived. A host's data for itself takes no time.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use super::{Counters, Role, Station};
use crate::net::{Actor, ActorId, Class, Context, FlowId, Network, NodeId, Notice, TcpConfig, Topology};
use crate::workload::TransportPlan;

/// A message's header: which tensor, which piece.
const HEADER_BYTES: u64 = 16;

/// A way from one machine to another, for messages `M`.
pub(super) struct Line<M> {
    /// None within a host.
    connection: Option<TcpConfig>,
    flow: Rc<Cell<Option<FlowId>>>,
    /// The messages that were sent and not taken, in order.
    mailbox: Rc<RefCell<VecDeque<M>>>,
}

impl<M> Clone for Line<M> {
    fn clone(&self) -> Self {
        let Self { connection, flow, mailbox } = self;
        Self { connection: *connection, flow: flow.clone(), mailbox: mailbox.clone() }
    }
}

/// Lines from each of some hosts to each of others.
pub(super) fn lines<M>(
    transport: &TransportPlan,
    topology: &Topology,
    class: Class,
    from: &[NodeId],
    to: &[NodeId],
) -> Vec<Vec<Line<M>>> {
    let line = |from: NodeId, to: NodeId| Line {
        connection: (from != to).then(|| transport.connection(topology, from, to, class)),
        flow: Rc::default(),
        mailbox: Rc::default(),
    };
    from.iter().map(|from| to.iter().map(|to| line(*from, *to)).collect()).collect()
}

impl<M> Line<M> {
    /// Once: connections outlive that a node is away.
    pub(super) fn open(&self, context: &mut Context<'_>) {
        if let (Some(connection), None) = (self.connection, self.flow.get()) {
            self.flow.set(Some(context.open_tcp(connection)));
        }
    }

    /// Sends a message with so many bytes of data.
    pub(super) fn send(&self, context: &mut Context<'_>, message: M, bytes: u64, arrived: Notice) {
        self.mailbox.borrow_mut().push_back(message);
        match self.flow.get() {
            Some(flow) => context.write(flow, HEADER_BYTES + bytes, Some(arrived)),
            None => context.notify(arrived.actor, arrived.token),
        }
    }

    /// The next message, when `told` that something came. Within a host it is all that was sent,
    /// since a notice is lost while that is away.
    pub(super) fn take(&self, told: bool) -> Option<M> {
        if told || self.connection.is_none() { self.mailbox.borrow_mut().pop_front() } else { None }
    }
}

/// The packets that connections sent, acknowledgements among them, and sent again.
pub(super) fn sent<'a, M: 'a>(lines: impl Iterator<Item = &'a Line<M>>, network: &Network) -> Counters {
    let flows = lines.filter_map(|line| line.flow.get()).map(|flow| network.flow(flow));
    let (packets, again) =
        flows.fold((0, 0), |sum, flow| (sum.0 + flow.sent_packets, sum.1 + flow.retransmissions));
    Counters { packets_sent: Some(packets), retransmissions: Some(again), ..Counters::default() }
}

/// A server's place. Two jobs have none in common.
pub(super) struct Place<A> {
    node: NodeId,
    port: u16,
    actor: Cell<Option<ActorId>>,
    /// Until it is placed.
    server: Cell<Option<A>>,
}

impl<A: Actor> Place<A> {
    pub(super) const fn new(node: NodeId, port: u16, server: A) -> Self {
        Self { node, port, actor: Cell::new(None), server: Cell::new(Some(server)) }
    }

    /// The server, once it is placed.
    pub(super) fn server<'a>(&self, network: &'a Network) -> Option<&'a A> {
        network.actor(self.actor.get()?)
    }
}

impl<A: Actor> Station for Place<A> {
    /// Nobody else has what it has summed.
    fn role(&self) -> Role {
        Role::Lasting
    }

    fn place(&self, network: &mut Network) {
        if let Some(server) = self.server.take() {
            self.actor.set(Some(network.add_actor(self.node, self.port, server)));
        }
    }

    fn actor(&self) -> ActorId {
        self.actor.get().expect("it is placed")
    }

    /// A lasting server is never asked to.
    fn forget(&self, _network: &mut Network) {}
}
