//! The actors that live on nodes.

use std::any::Any;

use super::context::Context;
use super::packet::Packet;

/// A machine or application on a host or a programmable switch. All calls are made at the time that
/// [`Context::now`] says; what is sent leaves at that time.
pub trait Actor: Any {
    /// The run begins, or the actor was added or replaced during it, or its node was repaired.
    /// Timers that were set before do not fire any more.
    fn start(&mut self, _context: &mut Context<'_>) {}
    /// A packet for the actor's address.
    fn packet(&mut self, context: &mut Context<'_>, packet: &Packet<'_>);
    /// A timer that it set is due.
    fn timer(&mut self, _context: &mut Context<'_>, _token: u64) {}
    /// Somebody told it something: another actor, or a flow whose bytes have arrived.
    fn notice(&mut self, _context: &mut Context<'_>, _token: u64) {}
}

/// An actor that only listens to notices.
pub struct Listener<F>(pub F);

impl<F: FnMut(&mut Context<'_>, u64) + 'static> Actor for Listener<F> {
    fn packet(&mut self, _context: &mut Context<'_>, _packet: &Packet<'_>) {}

    fn notice(&mut self, context: &mut Context<'_>, token: u64) {
        (self.0)(context, token);
    }
}
