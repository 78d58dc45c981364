//! How unlike a job's workers are: how fast their hosts send, and how late each is with what it
//! sends.

use std::time::Duration;

use oorandom::Rand64;

use crate::net::{Cost, NodeId, Time, Topology};

/// How fast workers' hosts send.
#[derive(Clone, Debug, PartialEq, Default)]
pub enum Rates {
    /// As fast as their links.
    #[default]
    OfLinks,
    /// Each so many bits a second, by rank.
    Given(Vec<u64>),
    /// A ratio of the best rate: normally distributed around 1, within 0 to 1 (GOAT §VII-D).
    Drawn {
        /// At best.
        most_bps: u64,
        /// Of the ratio.
        deviation: f64,
    },
}

/// How long a worker waits before it sends the first tensor of a step.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub enum Lateness {
    /// It does not.
    #[default]
    None,
    /// Each time up to so long, any time as likely as another.
    Uniform(Duration),
    /// A ratio of the longest: normally distributed around 0, within 0 to 1 (GOAT §VII-C).
    Normal {
        /// At most.
        most: Duration,
        /// Of the ratio.
        deviation: f64,
    },
}

impl Rates {
    /// The rates of so many workers, by rank; none if their links decide.
    fn drawn(&self, workers: usize, seed: u64) -> Vec<f64> {
        match self {
            Self::OfLinks => Vec::new(),
            Self::Given(given) => given.iter().map(|bps| *bps as f64).collect(),
            Self::Drawn { most_bps, deviation } => {
                let mut dice = Rand64::new(u128::from(seed));
                let rate = |_| *most_bps as f64 * (1.0 - below_one(&mut dice, *deviation));
                (0..workers).map(rate).collect()
            }
        }
    }

    /// Slows the hosts of these workers down: each byte occupies the one core that sends.
    pub(crate) fn apply(&self, topology: &mut Topology, workers: &[NodeId], seed: u64) {
        for (worker, bps) in workers.iter().zip(self.drawn(workers.len(), seed)) {
            let mut config = topology.get(*worker).config;
            let byte = Time((8e12 / bps).round() as u64).max(config.sends.byte);
            config.sends = Cost { packet: config.sends.packet, byte, cores: 1 };
            topology.set_node(*worker, config);
        }
    }
}

impl Lateness {
    /// The next one.
    pub(crate) fn drawn(self, dice: &mut Rand64) -> Duration {
        match self {
            Self::None => Duration::ZERO,
            Self::Uniform(most) => most.mul_f64(dice.rand_float()),
            Self::Normal { most, deviation } => most.mul_f64(below_one(dice, deviation)),
        }
    }
}

/// How far from the middle of a normal distribution one is, of those that are less than one away.
/// The deviation is not above one, so that most are.
fn below_one(dice: &mut Rand64, deviation: f64) -> f64 {
    loop {
        // Box and Muller.
        let (radius, angle) = (1.0 - dice.rand_float(), std::f64::consts::TAU * dice.rand_float());
        let distance = (deviation * (-2.0 * radius.ln()).sqrt() * angle.cos()).abs();
        if distance < 1.0 {
            return distance;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computations without packets (`plan`) and runs with packets have the same workers.
    #[test]
    fn rates_are_those_that_plans_are_compared_by() {
        for (deviation, seed) in [(0.0, 1), (0.2, 1), (0.5, 7)] {
            let drawn = Rates::Drawn { most_bps: 10_000_000_000, deviation }.drawn(50, seed);
            assert_eq!(drawn, fanin_plan::worker_rates(50, 1e10, deviation, seed));
        }
    }

    #[test]
    fn lateness_is_within_its_bounds_and_spread_as_said() {
        let mut dice = Rand64::new(1);
        let most = Duration::from_secs(1);
        let mut mean = |lateness: Lateness| {
            let drawn: Vec<Duration> = (0..10_000).map(|_| lateness.drawn(&mut dice)).collect();
            assert!(drawn.iter().all(|late| *late <= most));
            drawn.iter().sum::<Duration>().as_secs_f64() / 10_000.0
        };
        assert_eq!(mean(Lateness::None), 0.0);
        assert!((mean(Lateness::Uniform(most)) - 0.5).abs() < 0.02);
        // sqrt(2 / pi) deviations.
        assert!((mean(Lateness::Normal { most, deviation: 0.2 }) - 0.1596).abs() < 0.005);
    }
}
