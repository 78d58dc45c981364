//! The fate of the packets that came to a machine.

use super::{Reason, Verdict};

/// The packets that came to a machine, by its verdict on each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// All of them.
    pub packets: u64,
    /// The packets that counted and completed nothing.
    pub absorb: u64,
    /// The packets that went on towards a server, alone or with what they were added to.
    pub forward: u64,
    /// The packets that completed a slot or a fragment, or that went down to every worker.
    pub multicast: u64,
    /// The packets whose sender alone was answered: they came again, and the result was still here.
    pub reply_unicast: u64,
    /// The packets without effect, by [`Reason`].
    pub dropped: [u64; Reason::ALL.len()],
}

impl Received {
    /// The packets that had an effect.
    #[must_use]
    pub const fn counted(&self) -> u64 {
        self.absorb + self.forward + self.multicast + self.reply_unicast
    }

    /// Counts a packet, and hands the verdict on it through.
    #[inline]
    pub const fn count(&mut self, verdict: Verdict) -> Verdict {
        self.packets += 1;
        match verdict {
            Verdict::Absorb => self.absorb += 1,
            Verdict::Forward => self.forward += 1,
            Verdict::Multicast => self.multicast += 1,
            Verdict::ReplyUnicast => self.reply_unicast += 1,
            Verdict::Drop(reason) => self.dropped[reason as usize] += 1,
        }
        verdict
    }
}

/// Over several machines.
impl core::ops::AddAssign for Received {
    fn add_assign(&mut self, other: Self) {
        self.packets += other.packets;
        self.absorb += other.absorb;
        self.forward += other.forward;
        self.multicast += other.multicast;
        self.reply_unicast += other.reply_unicast;
        for (sum, other) in self.dropped.iter_mut().zip(other.dropped) {
            *sum += other;
        }
    }
}
