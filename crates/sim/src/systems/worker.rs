//! The code shared by the product's workers here, whatever their protocol.

use std::time::Duration;

use fanin_protocol::{RetransmissionConfig, Verdict, WorkerEvent, WorkerMachine};
use fanin_wire::Op;

use super::Process;
use crate::net::{Context, Owner, Packet, SimAddress};
use crate::workload::Gradient;

/// How much longer than its shortest a worker's timeout grows while nothing comes back.
pub(super) const BACK_OFF: u32 = 16;

/// Owner of a worker's machine.
pub(super) struct WorkerOwner {
    pub(super) process: Process,
    /// Sees each packet that the machine took in, and says whether it brought something.
    absorbed: Option<Absorbed>,
}

type Absorbed = Box<dyn FnMut(&Packet<'_>) -> bool>;

impl WorkerOwner {
    pub(super) const fn new(process: Process) -> Self {
        Self { process, absorbed: None }
    }

    pub(super) fn watched(process: Process, absorbed: impl FnMut(&Packet<'_>) -> bool + 'static) -> Self {
        Self { process, absorbed: Some(Box::new(absorbed)) }
    }
}

impl<E: WorkerMachine<Address = SimAddress, Tensor = Gradient> + 'static> Owner<E> for WorkerOwner {
    fn start(&mut self, _machine: &mut E, context: &mut Context<'_>) {
        self.process.started(context);
    }

    fn event(&mut self, _machine: &mut E, event: WorkerEvent<Gradient>, context: &mut Context<'_>) {
        match event {
            WorkerEvent::Completed(gradient, _) => self.process.completed(context, gradient),
            WorkerEvent::Aborted(reason) => self.process.aborted(context, reason),
        }
    }

    fn timer(&mut self, _machine: &mut E, timer: u64, context: &mut Context<'_>) {
        self.process.timer(context, timer);
    }

    fn notice(&mut self, machine: &mut E, notice: u64, _context: &mut Context<'_>) {
        while notice == Process::SUBMIT
            && let Some(part) = self.process.next()
        {
            machine.submit(part, Op::Sum);
        }
    }

    fn handled(&mut self, packet: &Packet<'_>, verdict: Verdict, context: &mut Context<'_>) {
        if verdict == Verdict::Absorb && self.absorbed.as_mut().is_none_or(|absorbed| absorbed(packet)) {
            self.process.progressed(context);
        }
    }
}

/// How long a worker waits for an answer.
pub(super) fn retransmission(timeout: Duration) -> RetransmissionConfig {
    RetransmissionConfig { floor: timeout, ceiling: timeout * BACK_OFF }
}
