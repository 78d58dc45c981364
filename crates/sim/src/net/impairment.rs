//! The effects of a link on packets besides carrying them.

use std::time::Duration;

use oorandom::Rand64;

use super::packet::Packet;
use super::time::Time;

/// Says which packets are meant.
pub type Predicate = Box<dyn FnMut(&Packet<'_>) -> bool>;

/// Which packets a link loses.
#[derive(Default)]
pub enum Loss {
    /// None.
    #[default]
    None,
    /// Each with the same chance.
    Uniform(f64),
    /// Gilbert and Elliott's chain of two states, one step a packet.
    GilbertElliott {
        /// Chance to turn bad, in the good state.
        to_bad: f64,
        /// Chance to turn good, in the bad state.
        to_good: f64,
        /// Chance to lose a packet, in the good state.
        loss_good: f64,
        /// Chance to lose a packet, in the bad state.
        loss_bad: f64,
    },
    /// The packets with these numbers among those that `which` is true of; the first is 0.
    Targeted {
        /// Which packets are counted.
        which: Predicate,
        /// Which of them are lost.
        nth: Vec<u64>,
    },
    /// All packets that this is true of.
    Matching(Predicate),
}

/// The effects of a link, in one direction.
#[derive(Default)]
pub struct Impairment {
    /// Packets that it loses.
    pub loss: Loss,
    /// Chance that a packet arrives twice.
    pub duplication: f64,
    /// Chance that a packet is held back, so that later ones overtake it.
    pub reordering: f64,
    /// The longest that one is held back; evenly drawn.
    pub held_back: Duration,
}

impl Impairment {
    /// Every chance is from 0 to 1.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let loss = match self.loss {
            Loss::Uniform(chance) => [chance, 0.0, 0.0, 0.0],
            Loss::GilbertElliott { to_bad, to_good, loss_good, loss_bad } => {
                [to_bad, to_good, loss_good, loss_bad]
            }
            Loss::None | Loss::Targeted { .. } | Loss::Matching(_) => [0.0; 4],
        };
        let is_chance = |chance: &f64| (0.0..=1.0).contains(chance);
        loss.iter().chain([&self.duplication, &self.reordering]).all(is_chance)
    }
}

impl From<Loss> for Impairment {
    fn from(loss: Loss) -> Self {
        Self { loss, ..Self::default() }
    }
}

/// The fate of one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fate {
    pub(crate) lost: bool,
    pub(crate) duplicated: bool,
    /// Additional time on the link; zero if it is not held back.
    pub(crate) held_back: Time,
}

/// An impairment at work, with dice of its own: what one link loses does not depend on what others
/// carry.
pub(crate) struct Faults {
    impairment: Impairment,
    pub(crate) dice: Rand64,
    is_bad: bool,
    counted: u64,
}

impl Faults {
    pub(crate) fn new(impairment: Impairment, dice: Rand64) -> Self {
        Self { impairment, dice, is_bad: false, counted: 0 }
    }

    pub(crate) fn fate(&mut self, packet: &Packet<'_>) -> Fate {
        let lost = self.loses(packet);
        let Impairment { duplication, reordering, held_back, .. } = self.impairment;
        let duplicated = !lost && self.happens(duplication);
        let held_back = if !lost && self.happens(reordering) {
            Time(self.dice.rand_range(1..Time::from(held_back).0.max(1) + 1))
        } else {
            Time::ZERO
        };
        Fate { lost, duplicated, held_back }
    }

    /// No die is thrown for what never happens.
    fn happens(&mut self, chance: f64) -> bool {
        chance > 0.0 && self.dice.rand_float() < chance
    }

    fn loses(&mut self, packet: &Packet<'_>) -> bool {
        match &mut self.impairment.loss {
            Loss::None => false,
            Loss::Uniform(chance) => {
                let chance = *chance;
                self.happens(chance)
            }
            Loss::GilbertElliott { to_bad, to_good, loss_good, loss_bad } => {
                let (turn, losses) = (if self.is_bad { *to_good } else { *to_bad }, [*loss_good, *loss_bad]);
                self.is_bad ^= self.happens(turn);
                self.happens(losses[usize::from(self.is_bad)])
            }
            Loss::Targeted { which, nth } => {
                if !which(packet) {
                    return false;
                }
                self.counted += 1;
                nth.contains(&(self.counted - 1))
            }
            Loss::Matching(which) => which(packet),
        }
    }
}
