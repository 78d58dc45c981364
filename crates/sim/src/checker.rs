//! The rules that hold whatever the network does.

use std::collections::{BTreeMap, BTreeSet};

use fanin_protocol::{Instant, Verdict};
use fanin_wire::{AbortReason, Generation, JobId, Kind, Pattern, Preamble, SlotPacket};

use crate::scenario::Scenario;
use crate::tensors::{Copy, wrong_element};

/// A rule that was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// A tensor came back with an element that is not the sum.
    WrongSum {
        /// The worker that got it.
        worker: u16,
        /// Which tensor.
        tensor: usize,
        /// The first wrong element.
        element: usize,
    },
    /// Two workers got different bits.
    Disagreement {
        /// The later worker.
        worker: u16,
        /// Which tensor.
        tensor: usize,
    },
    /// A tensor came back more than once.
    CompletedTwice {
        /// The worker.
        worker: u16,
        /// Which tensor.
        tensor: usize,
    },
    /// A contribution was added a second time.
    AddedTwice {
        /// The worker.
        worker: u16,
        /// The slot.
        slot: u16,
        /// The exchange.
        exchange: u32,
    },
    /// A slot's version was overwritten while a worker still lacked what it held.
    SlotReusedEarly {
        /// The worker that lacks it.
        worker: u16,
        /// The slot.
        slot: u16,
        /// The exchange that took its place.
        exchange: u32,
    },
    /// The job neither ended nor failed.
    NoProgress {
        /// Tensors that each worker has.
        completed: Vec<usize>,
        /// When the world was stopped.
        at: Instant,
    },
    /// A worker failed for a reason that the scenario does not give.
    WrongAbort {
        /// The worker.
        worker: u16,
        /// Its reason.
        reason: AbortReason,
    },
    /// A machine had more to send than its tables can hold, or the network more in it than the
    /// machines may have sent.
    Unbounded {
        /// What grew.
        what: &'static str,
        /// How far.
        size: usize,
    },
}

/// A switch since one of its starts, and a job there with its generation.
type Gathering = ((usize, u32), JobId, Generation);

pub(crate) struct Checker<'a> {
    scenario: &'a Scenario,
    /// Elements of a chunk as int32.
    size_class: usize,
    /// Contributions that counted: slot, exchange, and place there.
    added: BTreeSet<(Gathering, u16, u32, u8)>,
    /// For each slot, the exchange that came last to it.
    begun: BTreeMap<(Gathering, u16), u32>,
    /// The lane of each job.
    lanes: BTreeMap<JobId, usize>,
    /// Exchanges of each lane's slots that each worker has the result of.
    received: BTreeMap<(usize, u16, u16), u32>,
    results: BTreeMap<usize, Vec<u64>>,
    pub(crate) completed: Vec<BTreeSet<usize>>,
}

impl<'a> Checker<'a> {
    pub(crate) fn new(scenario: &'a Scenario, size_class: usize) -> Self {
        Self {
            scenario,
            size_class,
            added: BTreeSet::new(),
            begun: BTreeMap::new(),
            lanes: BTreeMap::new(),
            received: BTreeMap::new(),
            results: BTreeMap::new(),
            completed: vec![BTreeSet::new(); usize::from(scenario.workers)],
        }
    }

    /// A lane goes on as this job.
    pub(crate) fn admitted(&mut self, job: JobId, lane: usize) {
        self.lanes.insert(job, lane);
    }

    /// A switch has handled a packet; `switch` is which one, and how often it was started.
    pub(crate) fn at_switch(
        &mut self,
        switch: (usize, u32),
        packet: &[u8],
        verdict: Verdict,
    ) -> Result<(), Violation> {
        if !matches!(verdict, Verdict::Absorb | Verdict::Multicast | Verdict::Forward) {
            return Ok(());
        }
        let Some(packet) = slot_packet(packet) else { return Ok(()) };
        let (slot, exchange) = (packet.header.slot.0, packet.header.exchange);
        let worker = packet.preamble.worker.0;
        let contributes = match packet.preamble.kind {
            Kind::Update => true,
            // A result that is handed back is a contribution if only another worker got the sum.
            Kind::Restore => {
                let pattern = packet.header.collective.pattern;
                !packet.payload.is_empty() && !pattern.receives(packet.preamble.worker)
            }
            _ => false,
        };
        let gathering = (switch, packet.preamble.job, packet.preamble.generation);
        if contributes && !self.added.insert((gathering, slot, exchange, worker)) {
            return Err(Violation::AddedTwice { worker: worker.into(), slot, exchange });
        }
        if self.begun.insert((gathering, slot), exchange) == Some(exchange) {
            return Ok(());
        }
        // The version held exchange - 2; nobody may still need that. A worker that has it keeps it,
        // so that once an exchange is enough.
        let lane = self.lanes[&packet.preamble.job];
        for worker in 0..self.scenario.workers {
            let received = self.received.get(&(lane, worker, slot)).copied().unwrap_or(0);
            if received + 1 < exchange {
                return Err(Violation::SlotReusedEarly { worker, slot, exchange });
            }
        }
        Ok(())
    }

    /// A worker has handled a packet.
    pub(crate) fn at_worker(&mut self, worker: u16, packet: &[u8], verdict: Verdict) {
        let result = slot_packet(packet).filter(|packet| packet.preamble.kind == Kind::Result);
        if let (Verdict::Absorb, Some(packet)) = (verdict, result) {
            let lane = self.lanes[&packet.preamble.job];
            let received = self.received.entry((lane, worker, packet.header.slot.0)).or_default();
            // The answer to a sum handed back is for an exchange that the worker has.
            *received = (*received).max(packet.header.exchange + 1);
        }
    }

    pub(crate) fn completed(&mut self, worker: u16, result: &Copy) -> Result<(), Violation> {
        let tensor = result.index;
        if !self.completed[usize::from(worker)].insert(tensor) {
            return Err(Violation::CompletedTwice { worker, tensor });
        }
        let bits = result.bits();
        let pattern = self.scenario.tensors[tensor].pattern;
        let moved_from = match pattern {
            Pattern::Broadcast(root) => Some(root.0.into()),
            // It keeps what it had.
            Pattern::Reduce(root) if u16::from(root.0) != worker => Some(worker),
            _ => None,
        };
        if let Some(from) = moved_from {
            let expected = Copy::contribution(self.scenario, tensor, from).bits();
            let wrong = bits.iter().zip(&expected).position(|(is, should)| is != should);
            return wrong.map_or(Ok(()), |element| Err(Violation::WrongSum { worker, tensor, element }));
        }
        if let Some(first) = self.results.get(&tensor) {
            return if *first == bits { Ok(()) } else { Err(Violation::Disagreement { worker, tensor }) };
        }
        if let Some(element) = wrong_element(self.scenario, result, self.size_class) {
            return Err(Violation::WrongSum { worker, tensor, element });
        }
        self.results.insert(tensor, bits);
        Ok(())
    }
}

fn slot_packet(packet: &[u8]) -> Option<SlotPacket<'_>> {
    let preamble = Preamble::parse(packet).ok()?;
    SlotPacket::parse(preamble, packet).ok()
}
