//! What a link does to packets besides carrying them.

use std::time::Duration;

use super::packet::Packet;

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
    /// Of the packets that `which` is true of, those of these numbers; the first is 0.
    Targeted {
        /// Which packets are counted.
        which: Box<dyn FnMut(&Packet<'_>) -> bool>,
        /// Which of them are lost; ascending.
        nth: Vec<u64>,
    },
    /// All packets that this is true of.
    Matching(Box<dyn FnMut(&Packet<'_>) -> bool>),
}

/// What a link does, in one direction.
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
