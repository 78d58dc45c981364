//! What happens to packets between machines.

use crate::Random;

/// How bad a network is.
#[derive(Clone, Copy, Debug)]
pub struct Network {
    /// Packets of a thousand that are lost.
    pub loss_per_mille: u64,
    /// Packets of a thousand that arrive twice, unless a copy is lost.
    pub double_per_mille: u64,
    /// A packet is under way for at least this long.
    pub delay_us: u64,
    /// A packet is under way for up to this much longer, so that packets overtake each other.
    pub jitter_us: u64,
    /// Packets of a thousand that are held back, also where others keep their order.
    pub reordered_per_mille: u64,
    /// The longest time for which a packet is held back.
    pub held_back_us: u64,
}

/// Nothing goes wrong.
impl Default for Network {
    fn default() -> Self {
        Self {
            loss_per_mille: 0,
            double_per_mille: 0,
            delay_us: 5,
            jitter_us: 0,
            reordered_per_mille: 0,
            held_back_us: 50,
        }
    }
}

impl Network {
    /// When the copies of a packet arrive, from now on.
    pub(crate) fn arrivals(self, way: &Way, random: &mut Random) -> Vec<u64> {
        let copies = 1 + u64::from(random.below(1000) < self.double_per_mille);
        let mut arrivals = Vec::new();
        for _ in 0..copies {
            if random.below(1000) < way.loss_per_mille {
                continue;
            }
            let mut after = 1000 * self.delay_us + way.late_ns + random.below(1000 * self.jitter_us + 1);
            if self.reordered_per_mille > 0 && random.below(1000) < self.reordered_per_mille {
                after += random.below(1000 * self.held_back_us + 1);
            }
            arrivals.push(after);
        }
        arrivals
    }
}

/// How one packet travels.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// The address that its sender has for the recipient.
    pub from: usize,
    /// The address that it is for.
    pub to: usize,
    /// The probability of its loss.
    pub loss_per_mille: u64,
    /// How much longer than others it is under way.
    pub late_ns: u64,
}

/// A packet on its way.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Packet {
    /// The address that it is for.
    pub to: usize,
    /// The address that it comes from.
    pub from: usize,
    /// Header and payload.
    pub bytes: Vec<u8>,
}
