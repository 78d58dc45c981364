//! The acts of an actor.

use std::time::Duration;

use fanin_protocol::Instant;
use oorandom::Rand64;

use super::core::Core;
use super::flow::{ConstantRateConfig, Notice, TcpConfig};
use super::ids::{ActorId, FlowId, NodeId, SimAddress};
use super::queue::Class;
use super::time::Time;

/// The network, as one actor reaches it.
pub struct Context<'a> {
    pub(crate) core: &'a mut Core,
    pub(crate) actor: ActorId,
}

impl Context<'_> {
    /// The time, in the nanoseconds of the machines.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.core.now.instant()
    }

    /// The time, exactly.
    #[must_use]
    pub fn time(&self) -> Time {
        self.core.now
    }

    /// Who is acting.
    #[must_use]
    pub fn actor(&self) -> ActorId {
        self.actor
    }

    /// Where it lives.
    #[must_use]
    pub fn address(&self) -> SimAddress {
        self.core.address(self.actor)
    }

    /// The node that it lives on.
    #[must_use]
    pub fn node(&self) -> NodeId {
        NodeId(self.address().node)
    }

    /// Sends a UDP payload. A payload for the own node arrives at once, in an event of its own.
    pub fn send(&mut self, to: SimAddress, class: Class, payload: &[u8]) {
        self.send_to_all(&[to], class, payload, 0);
    }

    /// Sends the same UDP payload to several, in their order. It is `declared_bytes` longer than
    /// what is given: nobody sees these, and they take their time on links and their place in
    /// queues.
    pub fn send_to_all(&mut self, to: &[SimAddress], class: Class, payload: &[u8], declared_bytes: u32) {
        self.core.send_bytes(self.address(), to, class, payload, declared_bytes);
    }

    /// Sends a UDP payload of `bytes` that has no content but `tag`.
    pub fn send_blank(&mut self, to: SimAddress, class: Class, bytes: u32, tag: u64) {
        self.core.send_blank(self.address(), to, class, bytes, tag);
    }

    /// Calls [`Actor::timer`](super::Actor::timer) once, at `at` or now if that has passed. Timers
    /// cannot be taken back: who does not need one any more ignores it.
    pub fn wake_at(&mut self, at: impl Into<Time>, token: u64) {
        self.core.wake_at(self.actor, at.into(), token);
    }

    /// [`Self::wake_at`], counted from now.
    pub fn wake_after(&mut self, wait: Duration, token: u64) {
        self.wake_at(self.core.now + wait, token);
    }

    /// Tells another actor something that no packet carries: what a real system's control plane
    /// would.
    pub fn notify(&mut self, actor: ActorId, token: u64) {
        self.core.notify(Notice { actor, token });
    }

    /// Opens a TCP-like connection; see [`Network::open_tcp`](super::Network::open_tcp).
    pub fn open_tcp(&mut self, config: TcpConfig) -> FlowId {
        self.core.open_tcp(config)
    }

    /// Sends bytes over a connection; see [`Network::write`](super::Network::write).
    pub fn write(&mut self, flow: FlowId, bytes: u64, arrived: Option<Notice>) {
        self.core.write(flow, bytes, arrived);
    }

    /// Sends for ever; see [`Network::fill`](super::Network::fill).
    pub fn fill(&mut self, flow: FlowId) {
        self.core.fill(flow);
    }

    /// Starts a constant-rate flow; see
    /// [`Network::start_constant_rate`](super::Network::start_constant_rate).
    pub fn start_constant_rate(&mut self, config: ConstantRateConfig) -> FlowId {
        self.core.start_constant_rate(config)
    }

    /// Ends a flow; see [`Network::stop_flow`](super::Network::stop_flow).
    pub fn stop_flow(&mut self, flow: FlowId) {
        self.core.stop_flow(flow);
    }

    /// Randomness from the run's seed. Only integers and IEEE's own operations keep a run the same
    /// on every machine: `ln`, `exp` and their like do not.
    pub fn dice(&mut self) -> &mut Rand64 {
        &mut self.core.dice
    }

    /// Ends the run after this event.
    pub fn stop(&mut self) {
        self.core.stopped = true;
    }
}
