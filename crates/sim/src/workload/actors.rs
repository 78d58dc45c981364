//! The machines of the product, as they stand on the network's nodes, and who owns them there.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use fanin_protocol::atp::{AtpServer, AtpSwitch};
use fanin_protocol::switchml::Switch;
use fanin_protocol::{JobAborted, Verdict, WorkerEvent, WorkerMachine};
use fanin_wire::{GradientPacket, Kind, Op, Preamble};

use super::checker::{Referee, Violation};
use super::job::{Job, token};
use super::values::Gradient;
use crate::net::{Body, Context, Owner, Packet, SimAddress};

/// Owner of worker `rank`'s machine `shard`.
pub(crate) struct WorkerOwner {
    pub(crate) job: Rc<RefCell<Job>>,
    pub(crate) rank: usize,
    pub(crate) shard: usize,
    /// Of ATP: which fragments have come.
    pub(crate) window: Option<Rc<RefCell<Window>>>,
    pub(crate) referee: Rc<Referee>,
    pub(crate) begins: Begins,
}

/// What a worker's process knows when it is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begins {
    /// Nothing has happened yet.
    First,
    /// Everything but its timers.
    Again,
    /// That the job has come to this fragment of this tensor.
    InPlaceOfAnother(u64, u32),
}

impl<E: WorkerMachine<Address = SimAddress, Tensor = Gradient> + 'static> Owner<E> for WorkerOwner {
    fn start(&mut self, _machine: &mut E, context: &mut Context<'_>) {
        // The first machine's timers drive the program.
        if self.shard != 0 {
            return;
        }
        match std::mem::replace(&mut self.begins, Begins::Again) {
            Begins::First => self.job.borrow().schedule_start(context),
            Begins::Again => self.job.borrow_mut().restarted(context, self.rank),
            Begins::InPlaceOfAnother(tensor, fragment) => {
                self.job.borrow_mut().respawned(context, self.rank, tensor, fragment);
            }
        }
    }

    fn event(&mut self, _machine: &mut E, event: WorkerEvent<Gradient>, context: &mut Context<'_>) {
        match event {
            WorkerEvent::Completed(gradient, _) => {
                self.job.borrow_mut().completed(context, self.rank, self.shard, gradient);
            }
            WorkerEvent::Aborted(reason) => {
                let job = self.job.borrow().plan.name.clone();
                self.referee.stop(context, Violation::Aborted { job, rank: self.rank, reason });
            }
        }
    }

    fn timer(&mut self, _machine: &mut E, timer: u64, context: &mut Context<'_>) {
        self.job.borrow_mut().told(context, self.rank, timer);
    }

    fn notice(&mut self, machine: &mut E, notice: u64, _context: &mut Context<'_>) {
        // Notices are lost while a node is away; the next one brings everything.
        while notice == token::SUBMIT
            && let Some(part) = self.job.borrow_mut().next_part(self.rank, self.shard)
        {
            machine.submit(part, Op::Sum);
        }
    }

    fn handled(&mut self, packet: &Packet<'_>, verdict: Verdict, context: &mut Context<'_>) {
        if verdict != Verdict::Absorb {
            return;
        }
        match (&self.window, gradient(packet)) {
            (Some(window), Some(gradient))
                if gradient.header.flags.is_ack && !gradient.payload.is_empty() =>
            {
                window.borrow_mut().received(self.rank, gradient.header.sequence);
            }
            (None, None) => {}
            // The server asks for something again: nothing has come.
            _ => return,
        }
        self.job.borrow_mut().progressed(context.now());
    }
}

/// Which fragments each worker of an ATP job has, to see that none is forgotten while one lacks it.
pub(crate) struct Window {
    length: u64,
    workers: Vec<Received>,
    /// Not above any worker's lowest.
    least: u64,
}

#[derive(Clone, Default)]
struct Received {
    /// The first that it lacks.
    lowest: u64,
    /// Whether it has those from there on.
    ahead: VecDeque<bool>,
}

impl Window {
    pub(crate) fn new(length: u16, workers: usize) -> Self {
        Self { length: length.into(), workers: vec![Received::default(); workers], least: 0 }
    }

    fn received(&mut self, rank: usize, sequence: u64) {
        let worker = &mut self.workers[rank];
        // A fragment beyond the window cannot be taken; its own rule is the server's.
        let Some(at) = sequence.checked_sub(worker.lowest).filter(|at| *at < 4 * self.length) else { return };
        let at = at as usize;
        if worker.ahead.len() <= at {
            worker.ahead.resize(at + 1, false);
        }
        worker.ahead[at] = true;
        while worker.ahead.front() == Some(&true) {
            worker.ahead.pop_front();
            worker.lowest += 1;
        }
    }

    /// Another worker takes a rank; it needs nothing below `sequence`.
    pub(crate) fn begins_at(&mut self, rank: usize, sequence: u64) {
        self.workers[rank] = Received { lowest: sequence, ahead: VecDeque::new() };
    }

    /// A worker that lacks a fragment below `needed`, and which.
    fn lacks(&mut self, needed: u64) -> Option<(usize, u64)> {
        if self.least >= needed {
            return None;
        }
        self.least = self.workers.iter().map(|worker| worker.lowest).min().unwrap_or(u64::MAX);
        let rank = self.workers.iter().position(|worker| worker.lowest < needed)?;
        Some((rank, self.workers[rank].lowest))
    }

    /// The server took a fragment in; with `complete`, it was the last one of its sum.
    ///
    /// The server keeps one sum that gathers and one that is done for each place of the window. A fragment that begins to
    /// gather takes the place of what was done two windows before; one that is complete that of the last window.
    fn at_server(&mut self, sequence: u64, complete: bool) -> Option<(usize, u64)> {
        let windows = if complete { 1 } else { 2 };
        let overwritten = sequence.checked_sub(windows * self.length)?;
        self.lacks(overwritten + 1)
    }
}

/// Owner of a host's server; the windows are those of the jobs that it serves.
pub(crate) struct ServerOwner {
    pub(crate) windows: Vec<(fanin_wire::JobId, String, Rc<RefCell<Window>>)>,
    pub(crate) referee: Rc<Referee>,
}

impl Owner<AtpServer<SimAddress>> for ServerOwner {
    fn event(
        &mut self,
        _machine: &mut AtpServer<SimAddress>,
        _event: JobAborted,
        _context: &mut Context<'_>,
    ) {
        // The workers hear of an abort, and their owners judge it.
    }

    fn handled(&mut self, packet: &Packet<'_>, verdict: Verdict, context: &mut Context<'_>) {
        if !matches!(verdict, Verdict::Absorb | Verdict::Multicast) {
            return;
        }
        let Some(gradient) = gradient(packet) else { return };
        let Some((_, job, window)) = self.windows.iter().find(|(id, ..)| *id == gradient.preamble.job) else {
            return;
        };
        let sequence = gradient.header.sequence;
        if let Some((rank, lacks)) = window.borrow_mut().at_server(sequence, verdict == Verdict::Multicast) {
            self.referee.stop(context, Violation::ReusedEarly { job: job.clone(), rank, lacks, sequence });
        }
    }
}

/// Owner of a programmable switch's aggregators.
pub(crate) struct SwitchOwner {
    pub(crate) aggregators: u32,
    pub(crate) referee: Rc<Referee>,
}

impl Owner<AtpSwitch<SimAddress>> for SwitchOwner {
    fn event(
        &mut self,
        _machine: &mut AtpSwitch<SimAddress>,
        _event: JobAborted,
        _context: &mut Context<'_>,
    ) {
    }
}

impl SwitchOwner {
    /// Whether the table holds what it should.
    pub(crate) fn check(&self, in_use: u32) {
        if in_use > self.aggregators {
            self.referee.note(Violation::Unbounded {
                what: "aggregators in use",
                size: in_use.into(),
                limit: self.aggregators.into(),
            });
        }
    }
}

/// Owner of SwitchML's pools.
pub(crate) struct PoolOwner;

impl Owner<Switch<SimAddress>> for PoolOwner {
    fn event(&mut self, _machine: &mut Switch<SimAddress>, _event: JobAborted, _context: &mut Context<'_>) {}
}

fn gradient<'a>(packet: &Packet<'a>) -> Option<GradientPacket<'a>> {
    let Body::Bytes(bytes) = packet.body else { return None };
    let preamble = Preamble::parse(bytes).ok().filter(|preamble| preamble.kind == Kind::Gradient)?;
    GradientPacket::parse(preamble, bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_taken_while_a_worker_lacks_what_was_there_is_seen() {
        let mut window = Window::new(2, 2);
        for sequence in [0, 1, 2] {
            window.received(0, sequence);
        }
        window.received(1, 1);
        // Worker 1 lacks 0: 2 and 3 may gather, but not complete, and 4 may not gather.
        assert_eq!(window.at_server(3, false), None);
        assert_eq!(window.at_server(2, true), Some((1, 0)));
        assert_eq!(window.at_server(4, false), Some((1, 0)));
        window.received(1, 0);
        assert_eq!(window.at_server(2, true), None);
        assert_eq!(window.at_server(3, true), None);
        assert_eq!(window.at_server(4, true), Some((1, 2)));
        window.begins_at(1, 4);
        assert_eq!(window.at_server(4, true), None);
    }
}
