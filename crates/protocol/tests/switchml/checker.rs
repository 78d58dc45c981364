//! What must hold in the slots whatever the network does: no contribution is added twice, and no slot is reused while a worker
//! still lacks what it held.

use std::collections::{BTreeMap, BTreeSet};

use fanin_protocol::Verdict;
use fanin_wire::{Generation, JobId, Kind, Preamble, SlotPacket};

/// A switch since one of its starts, and a job there with its generation.
type Gathering = ((usize, u32), JobId, Generation);

pub struct Checker {
    workers: u16,
    /// Contributions that counted: slot, exchange, and place there.
    added: BTreeSet<(Gathering, u16, u32, u8)>,
    /// Of each slot the exchange that came last to it.
    begun: BTreeMap<(Gathering, u16), u32>,
    /// Of which lane a job is.
    lanes: BTreeMap<JobId, usize>,
    /// Exchanges of each lane's slots that each worker has the result of.
    received: BTreeMap<(usize, u16, u16), u32>,
}

impl Checker {
    pub const fn new(workers: u16) -> Self {
        Self {
            workers,
            added: BTreeSet::new(),
            begun: BTreeMap::new(),
            lanes: BTreeMap::new(),
            received: BTreeMap::new(),
        }
    }

    /// A lane goes on as this job.
    pub fn admitted(&mut self, job: JobId, lane: usize) {
        self.lanes.insert(job, lane);
    }

    /// A switch has handled a packet; `switch` is which one, and how often it was started.
    pub fn at_switch(&mut self, switch: (usize, u32), packet: &[u8], verdict: Verdict) {
        if !matches!(verdict, Verdict::Absorb | Verdict::Multicast | Verdict::Forward) {
            return;
        }
        let _ = of_slot(packet, |packet| self.counts(switch, packet));
    }

    fn counts(&mut self, switch: (usize, u32), packet: &SlotPacket<'_>) {
        let (slot, exchange) = (packet.header.slot.0, packet.header.exchange);
        let worker = packet.preamble.worker.0;
        let contributes = match packet.preamble.kind {
            Kind::Update => true,
            // What is handed back is a contribution where only another one got the sum.
            Kind::Restore => {
                let pattern = packet.header.collective.pattern;
                !packet.payload.is_empty() && !pattern.receives(packet.preamble.worker)
            }
            _ => false,
        };
        let gathering = (switch, packet.preamble.job, packet.preamble.generation);
        let is_new = !contributes || self.added.insert((gathering, slot, exchange, worker));
        assert!(is_new, "slot {slot}, exchange {exchange}: worker {worker} was added twice");
        if self.begun.insert((gathering, slot), exchange) == Some(exchange) {
            return;
        }
        // The version held exchange - 2; nobody may still need that. Who has it keeps it, so that once an exchange is enough.
        let lane = self.lanes[&packet.preamble.job];
        for worker in 0..self.workers {
            let received = self.received.get(&(lane, worker, slot)).copied().unwrap_or(0);
            assert!(
                received + 1 >= exchange,
                "slot {slot} was reused for {exchange}: worker {worker} lacks its sum"
            );
        }
    }

    /// A worker has handled a packet.
    pub fn at_worker(&mut self, worker: u16, packet: &[u8], verdict: Verdict) {
        let _ = of_slot(packet, |packet| {
            if verdict == Verdict::Absorb && packet.preamble.kind == Kind::Result {
                let lane = self.lanes[&packet.preamble.job];
                let received = self.received.entry((lane, worker, packet.header.slot.0)).or_default();
                // The answer to a sum handed back is for an exchange that the worker has.
                *received = (*received).max(packet.header.exchange + 1);
            }
        });
    }
}

/// Hands a packet of a slot on; nothing for any other.
fn of_slot<R>(packet: &[u8], take: impl FnOnce(&SlotPacket<'_>) -> R) -> Option<R> {
    let preamble = Preamble::parse(packet).ok()?;
    Some(take(&SlotPacket::parse(&preamble, packet).ok()?))
}
