//! The two versions of a slot: what each gathers or holds.

use fanin_quant::Exponent;
use fanin_wire::{Collective, Kind, Pattern, SlotHeader, WorkerId};

use crate::switchml::exchange::packet_bytes;
use crate::transport::Run;

/// A version of a slot; a slot has two.
#[derive(Clone, Copy, Debug)]
pub(super) struct Version {
    /// Which workers' contributions are in: the paper's `seen`, and by its population `count`.
    pub(super) worker_bitmap: u64,
    /// The exchange that it holds.
    pub(super) exchange: u32,
    pub(super) chunk: u32,
    /// The collective that is being reduced; `None` until the version is first used.
    pub(super) collective: Option<Collective>,
    /// Elements of the payload: none for an exchange of exponents alone.
    pub(super) elements: u16,
    /// The exponent in a bfloat16 payload, the same in all contributions.
    pub(super) exponent: Exponent,
    pub(super) next_exponent: i16,
    /// The worker that fixed `collective`, to name in a disagreement.
    pub(super) first: WorkerId,
    /// Who contributed last.
    pub(super) last: WorkerId,
    /// In a rack that waits for its upstream: as what this went there.
    pub(super) awaits: Option<Kind>,
}

impl Version {
    pub(super) const UNUSED: Self = Self {
        worker_bitmap: 0,
        exchange: 0,
        chunk: 0,
        collective: None,
        elements: 0,
        exponent: Exponent::ZERO,
        next_exponent: i16::MIN,
        first: WorkerId(0),
        last: WorkerId(0),
        awaits: None,
    };

    /// The only one whose result has elements, if it is one only.
    pub(super) fn sole_receiver(&self) -> Option<WorkerId> {
        match self.collective?.pattern {
            Pattern::Reduce(root) if self.elements > 0 => Some(root),
            _ => None,
        }
    }

    /// Elements of a worker's result.
    pub(super) fn elements_for(&self, worker: WorkerId) -> u16 {
        if self.sole_receiver().is_none_or(|root| root == worker) { self.elements } else { 0 }
    }

    /// Length of its result's packet with so many elements, if that still belongs to a train.
    pub(super) fn fits(&self, elements: u16, run: &Run, train: &[u8]) -> Option<usize> {
        let bytes = packet_bytes(&self.collective?, elements.into());
        run.takes(bytes, train).then_some(bytes)
    }

    /// Whether it holds the result.
    pub(super) fn is_finished(&self, everyone: u64) -> bool {
        self.worker_bitmap == everyone && self.awaits.is_none()
    }

    /// Whether it lacks some contributions and has others.
    pub(super) fn gathers(&self, everyone: u64) -> bool {
        self.collective.is_some() && self.worker_bitmap != everyone
    }
}

/// The version that a packet means, and the other one.
pub(super) fn versions<'a>(
    slots: &'a mut [[Version; 2]],
    header: &SlotHeader,
) -> (&'a mut Version, &'a Version) {
    let [zero, one] = &mut slots[header.slot.index()];
    if header.pool_version() == 0 { (zero, one) } else { (one, zero) }
}
