//! What a protocol adds to the world.

use std::fmt::Debug;
use std::time::Duration;

use fanin_protocol::{Instant, Verdict};
use fanin_wire::{AbortReason, JobId, Operation};

use crate::{Network, Numbered, Packet, Way, World};

/// What the machines of a case sum, what goes wrong meanwhile, and what must come of it.
pub trait Script: Debug + Sized {
    /// What happens at a time that the script chose: a fault, a plan that changes.
    type Happening;

    /// How bad the network is.
    fn network(&self) -> Network;

    /// The jobs that machines are asked about after a failure.
    fn jobs(&self) -> Vec<JobId>;

    /// A tensor as the worker at a node has it, and what is done with it.
    fn tensor(&self, node: usize, number: usize) -> (Numbered, Operation);

    /// Something happens.
    fn happen(world: &mut World<Self>, what: Self::Happening);

    /// Panics unless every sum is right.
    fn check(world: &World<Self>);

    /// How a packet of the machine at a node travels, or `None` if it is lost for sure.
    fn carry(world: &mut World<Self>, from: usize, to: usize, _packet: &[u8]) -> Option<Way> {
        let loss_per_mille = world.script.network().loss_per_mille;
        Some(Way { from, to, loss_per_mille, late_ns: 0 })
    }

    /// The node that has an address now. Packets for an address that no node has are lost.
    fn node_at(&self, address: usize) -> Option<usize> {
        Some(address)
    }

    /// What the machines' clocks say after so many nanoseconds.
    fn clock(&self, at: u64) -> Instant {
        Instant(at)
    }

    /// How long a driver gathers packets at most before it asks its machine for answers; `None` if it asks after each packet.
    fn round(&self) -> Option<Duration> {
        None
    }

    /// No run takes longer than this, unless it hangs.
    fn patience(&self) -> Duration {
        Duration::from_secs(600)
    }

    /// A packet is about to arrive.
    fn before_packet(_world: &mut World<Self>) {}

    /// A machine has handled a packet.
    fn after_packet(_world: &mut World<Self>, _node: usize, _packet: &Packet, _verdict: Verdict) {}

    /// A machine has said all that it had to say, in so many packets. What goes to several machines counts once.
    fn after_drain(_world: &mut World<Self>, _node: usize, _sent: usize) {}

    /// A worker, or a machine that sums for this job, says that it cannot go on.
    fn gave_up(world: &mut World<Self>, node: usize, _job: Option<JobId>, reason: AbortReason) {
        panic!("{node} gave up, {reason:?}: {}", world.standing());
    }

    /// Whether the run ends here, though not all machines sleep.
    fn is_over(world: &World<Self>) -> bool {
        world.missing() == 0
    }

    /// Whether all machines may sleep. If they may not, they hang.
    fn may_sleep(world: &World<Self>) -> bool {
        world.missing() == 0
    }
}
