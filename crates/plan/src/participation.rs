//! How many workers an epoch waits for (GOAT §V, Algorithm 2).
//!
//! Fewer workers make an epoch shorter and its gradient less sure, so that more epochs are needed.
//! From how long each worker took so far, `M` epochs are played for each number `K`; `ψ(K)` says
//! how many epochs the training takes with it (Eq. 36); the least product of both is taken.
//!
//! The printed Algorithm 2 reduces a late worker's interval from `p_w`, its history, in every
//! round. The text reduces the estimate `p'_w`, so that a worker that is two epochs late arrives in
//! the third. The code follows the text. A worker that arrives just with the last of the `K` is one
//! of them.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;

use crate::gradient_schedule::JobSchedule;
use crate::topology::NodeId;

/// The known facts of the training's loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Convergence {
    /// `F(x_0) - F(x_*)`: by how much the loss is above its least at the start.
    pub loss_above_least: f64,
    /// `σ²`: variance of one worker's gradient.
    pub gradient_variance: f64,
    /// `ε`: mean square of the gradient that is to be reached.
    pub gradient_square: f64,
}

impl Convergence {
    /// `ψ(K)` of Eq. 36: epochs that `n` workers' training takes if `K` of them are waited for.
    /// None if no number of epochs is enough, as the noise of `K` gradients alone exceeds the
    /// target.
    #[must_use]
    pub fn epochs(&self, waited_for: usize, workers: usize) -> Option<f64> {
        let (k, n) = (waited_for as f64, workers as f64);
        let left = self.gradient_square * k - self.gradient_variance;
        (left > 0.0).then(|| 4.0 * k * k * self.loss_above_least.powi(2) / (n * left * left))
    }

    /// The right side of Eq. 28 (Lemma 8). It is an upper bound on the mean square of the gradient
    /// over `T` epochs, if the learning rate is at most `1 / L`.
    #[must_use]
    pub fn bound(&self, epochs: usize, learning_rate: f64, waited_for_min: usize) -> f64 {
        2.0 * self.loss_above_least / (learning_rate * epochs as f64)
            + self.gradient_variance / waited_for_min as f64
    }
}

/// The workers that the next epoch waits for.
#[derive(Clone, Debug, PartialEq)]
pub struct Participation {
    /// The `K` fastest, by their places among the job's workers, in order.
    pub workers: Vec<usize>,
    /// `H̄`: how long an epoch takes.
    pub epoch_s: f64,
    /// `T`: how many there will be.
    pub epochs: f64,
}

impl Participation {
    /// Decides by how long each worker took from getting a model to sending its last gradient, in
    /// seconds. The paper plays as many `rounds` as there are workers.
    ///
    /// # Errors
    /// When there are no workers or rounds, an interval is no positive number, or no number of
    /// workers is enough.
    pub fn of(
        intervals_s: &[f64],
        rounds: usize,
        convergence: &Convergence,
    ) -> Result<Self, ParticipationError> {
        if intervals_s.is_empty() {
            return Err(ParticipationError::NoWorkers);
        }
        if rounds == 0 {
            return Err(ParticipationError::NoRounds);
        }
        for (worker, interval_s) in intervals_s.iter().enumerate() {
            if !interval_s.is_finite() || *interval_s <= 0.0 {
                return Err(ParticipationError::Interval { worker, interval_s: *interval_s });
            }
        }
        let (least, variance) = (convergence.loss_above_least, convergence.gradient_variance);
        for (what, value) in
            [("loss above its least", least), ("mean square of the gradient", convergence.gradient_square)]
        {
            if !value.is_finite() || value <= 0.0 {
                return Err(ParticipationError::Convergence { what, value });
            }
        }
        if !variance.is_finite() || variance < 0.0 {
            return Err(ParticipationError::Convergence { what: "variance of a gradient", value: variance });
        }
        let workers = intervals_s.len();
        let mut best: Option<(f64, usize, f64, f64)> = None;
        for waited_for in 1..=workers {
            let Some(epochs) = convergence.epochs(waited_for, workers) else { continue };
            let epoch_s = played(intervals_s, waited_for, rounds);
            let whole_s = epochs * epoch_s;
            // If several are equal, the one that waits for more.
            if best.is_none_or(|(least, ..)| whole_s <= least) {
                best = Some((whole_s, waited_for, epoch_s, epochs));
            }
        }
        let Some((_, waited_for, epoch_s, epochs)) = best else {
            let needed = (variance / convergence.gradient_square).floor() as usize + 1;
            return Err(ParticipationError::TooFew { workers, needed });
        };
        let mut order: Vec<usize> = (0..workers).collect();
        order.sort_by(|a, b| intervals_s[*a].total_cmp(&intervals_s[*b]).then(a.cmp(b)));
        let mut participating = order[..waited_for].to_vec();
        participating.sort_unstable();
        Ok(Self { workers: participating, epoch_s, epochs })
    }

    /// How many of them each switch sums a sub-model for before it sends it on.
    #[must_use]
    pub fn fan_in(&self, schedule: &JobSchedule, sub_model: usize) -> BTreeMap<NodeId, usize> {
        let nodes = schedule.aggregation_nodes(sub_model);
        let mut counts = BTreeMap::new();
        for worker in &self.workers {
            if nodes[*worker] != schedule.root(sub_model) {
                *counts.entry(nodes[*worker]).or_insert(0) += 1;
            }
        }
        counts
    }

    /// `K_t^s` of Eq. 20: gradients of sub-models that each switch sums in the epoch.
    #[must_use]
    pub fn gradients(&self, schedule: &JobSchedule) -> BTreeMap<NodeId, usize> {
        let mut counts = BTreeMap::new();
        for sub_model in 0..schedule.sub_models() {
            for (switch, workers) in self.fan_in(schedule, sub_model) {
                *counts.entry(switch).or_insert(0) += workers;
            }
        }
        counts
    }
}

/// `H̄`: how long an epoch that waits for so many takes, in the mean over the next ones.
fn played(intervals_s: &[f64], waited_for: usize, rounds: usize) -> f64 {
    let mut left_s = intervals_s.to_vec();
    let mut whole_s = 0.0;
    for _ in 0..rounds {
        let mut order = left_s.clone();
        order.sort_by(f64::total_cmp);
        let epoch_s = order[waited_for - 1];
        whole_s += epoch_s;
        for (left_s, interval_s) in left_s.iter_mut().zip(intervals_s) {
            // A worker that arrived begins anew, and one that did not goes on.
            *left_s = if *left_s > epoch_s { *left_s - epoch_s } else { *interval_s };
        }
    }
    whole_s / rounds as f64
}

/// Why nobody can be waited for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ParticipationError {
    /// There are none.
    NoWorkers,
    /// No epoch is to be played.
    NoRounds,
    /// A worker took no time, or none that is a number.
    Interval {
        /// This one.
        worker: usize,
        /// The given interval.
        interval_s: f64,
    },
    /// Something of the training that is not above zero.
    Convergence {
        /// What.
        what: &'static str,
        /// The given value.
        value: f64,
    },
    /// The noise of all gradients together is above what is to be reached.
    TooFew {
        /// So many there are.
        workers: usize,
        /// So many it takes.
        needed: usize,
    },
}

impl fmt::Display for ParticipationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoWorkers => f.write_str("no worker is alive: there is nobody to wait for"),
            Self::NoRounds => f.write_str("0 epochs are to be played: play one at least"),
            Self::Interval { worker, interval_s } => {
                write!(f, "worker {worker} took {interval_s} s for an epoch: it must be more than zero")
            }
            Self::Convergence { what, value } => write!(f, "the {what} is {value}: it cannot be that"),
            Self::TooFew { workers, needed } => write!(
                f,
                "{workers} workers are too few for gradients of so little noise: it takes {needed}, or a larger gradient at the end, or larger batches"
            ),
        }
    }
}

impl Error for ParticipationError {}

#[cfg(test)]
mod tests {
    use super::*;
    use oorandom::Rand64;
    use proptest::prelude::*;

    const EASY: Convergence =
        Convergence { loss_above_least: 1.0, gradient_variance: 1.0, gradient_square: 10.0 };

    /// Rows of Algorithm 2: (what is left of each, which one is waited for).
    #[test]
    fn late_workers_arrive_in_a_later_epoch() {
        // Two of 1, 1 and 3 s are waited for: epochs of 1 s, and the third joins each third one,
        // which is no shorter.
        assert_eq!(played(&[1.0, 1.0, 3.0], 2, 6), 1.0);
        // With 1, 2 and 2.5 s: the first epoch takes 2 s (0.5 s left of the third). Then the third
        // arrives first: 1 s for the first one. Then 1 and 1.5 s are left of the others.
        let epochs = [2.0, 1.0, 1.0];
        assert_eq!(played(&[1.0, 2.0, 2.5], 2, 3), epochs.iter().sum::<f64>() / 3.0);
        assert_eq!(played(&[1.0, 2.0, 4.0], 3, 5), 4.0);
    }

    #[test]
    fn one_straggler_is_not_waited_for_and_equals_are() {
        let decided = Participation::of(&[1.0, 1.0, 1.0, 1.0, 40.0], 5, &EASY).expect("enough");
        assert_eq!((decided.workers.as_slice(), decided.epoch_s), (&[0, 1, 2, 3][..], 1.0));
        let decided = Participation::of(&[1.0; 5], 5, &EASY).expect("enough");
        assert_eq!(decided.workers, [0, 1, 2, 3, 4]);
        assert!((decided.epochs - EASY.epochs(5, 5).expect("enough")).abs() < 1e-12);
    }

    #[test]
    fn each_switch_waits_for_those_of_its_own() {
        let (server, s, u) = (NodeId(9), NodeId(1), NodeId(2));
        let schedule = JobSchedule::new(vec![server; 2], vec![s, s, u, server, u, s, u, u]);
        let decided = Participation { workers: vec![0, 2, 3], epoch_s: 1.0, epochs: 1.0 };
        assert_eq!(decided.fan_in(&schedule, 0), [(s, 1), (u, 1)].into());
        assert_eq!(decided.fan_in(&schedule, 1), [(u, 3)].into());
        assert_eq!(decided.gradients(&schedule), [(s, 1), (u, 4)].into());
    }

    #[test]
    fn what_cannot_be_decided_is_refused_with_cause_and_cure() {
        let refused = |intervals: &[f64], rounds, convergence| {
            Participation::of(intervals, rounds, &convergence).expect_err("refused").to_string()
        };
        assert!(refused(&[], 1, EASY).contains("no worker is alive"));
        assert!(refused(&[1.0], 0, EASY).contains("0 epochs"));
        for interval in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(refused(&[1.0, interval], 1, EASY).contains("worker 1 took"));
        }
        let noisy = Convergence { gradient_variance: 45.0, ..EASY };
        assert!(refused(&[1.0; 4], 4, noisy).contains("it takes 5"));
        assert!(
            refused(&[1.0], 4, Convergence { loss_above_least: 0.0, ..EASY })
                .contains("loss above its least is 0")
        );
        assert!(refused(&[1.0], 4, Convergence { gradient_variance: -1.0, ..EASY }).contains("variance"));
    }

    proptest! {
        /// The decision is the least product of all, its workers are the fastest, and no epoch is
        /// longer than the last of those who are waited for takes.
        #[test]
        fn no_number_of_workers_takes_less_time(
            intervals in prop::collection::vec(0.1..10.0_f64, 1..20),
            variance in 0.0..5.0_f64,
        ) {
            let convergence = Convergence { gradient_variance: variance, gradient_square: 6.0, ..EASY };
            let rounds = intervals.len();
            let decided = Participation::of(&intervals, rounds, &convergence).expect("enough");
            let takes = decided.epochs * decided.epoch_s;
            let mut sorted = intervals.clone();
            sorted.sort_by(f64::total_cmp);
            for waited_for in 1..=intervals.len() {
                let epoch_s = played(&intervals, waited_for, rounds);
                prop_assert!(epoch_s <= sorted[waited_for - 1] * (1.0 + 1e-12), "{} {}", waited_for, epoch_s);
                let epochs = convergence.epochs(waited_for, intervals.len()).expect("enough");
                prop_assert!(takes <= epochs * epoch_s * (1.0 + 1e-12));
            }
            let slowest = decided.workers.iter().map(|worker| intervals[*worker]).fold(0.0, f64::max);
            let beyond = (0..intervals.len()).filter(|worker| !decided.workers.contains(worker));
            prop_assert!(beyond.into_iter().all(|worker| intervals[worker] >= slowest));
        }

        /// `ψ` falls in `K` towards what an epoch without noise takes, and is none below `σ² / ε`.
        #[test]
        fn more_workers_need_fewer_epochs(variance in 0.0..20.0_f64, square in 0.5..5.0_f64) {
            let convergence = Convergence { gradient_variance: variance, gradient_square: square, ..EASY };
            let mut before = f64::INFINITY;
            for waited_for in 1..=40 {
                let epochs = convergence.epochs(waited_for, 40);
                prop_assert_eq!(epochs.is_none(), square * waited_for as f64 <= variance);
                let epochs = epochs.unwrap_or(f64::INFINITY);
                prop_assert!(epochs <= before);
                before = epochs;
            }
        }
    }

    /// Lemma 8 on a strongly convex loss, half the sum of `λ x²`. Each worker's gradient has a
    /// noise of variance `σ²`, and the number of workers changes with every epoch. The mean square
    /// of the gradient is below Eq. 28 for every learning rate up to `1 / L`, and the noise is
    /// visible.
    #[test]
    fn the_gradient_of_a_strongly_convex_loss_is_below_the_bound() {
        let curvatures = [0.5, 1.0, 2.0, 4.0];
        let variance = 4.0_f64;
        let mut random = Rand64::new(8);
        for learning_rate in [0.25, 0.1, 0.02] {
            for waited_for in [[1, 4], [2, 8], [8, 8]] {
                let (epochs, runs) = (200, 200);
                let mut squares = 0.0;
                for _ in 0..runs {
                    let mut x = [3.0_f64, -2.0, 1.0, 2.0];
                    for epoch in 0..epochs {
                        let workers = waited_for[epoch % 2];
                        let gradient: Vec<f64> =
                            x.iter().zip(curvatures).map(|(x, curvature)| curvature * x).collect();
                        squares += gradient.iter().map(|its| its * its).sum::<f64>();
                        // A uniform noise of variance σ² / 4 in each of four directions, in the
                        // mean over the workers.
                        let width = (variance / 4.0 * 12.0).sqrt();
                        for (x, gradient) in x.iter_mut().zip(gradient) {
                            let noise: f64 = (0..workers).map(|_| (random.rand_float() - 0.5) * width).sum();
                            *x -= learning_rate * (gradient + noise / workers as f64);
                        }
                    }
                }
                let mean = squares / (epochs * runs) as f64;
                let start = [3.0_f64, -2.0, 1.0, 2.0]
                    .iter()
                    .zip(curvatures)
                    .map(|(x, curvature)| curvature * x * x / 2.0);
                let convergence = Convergence {
                    loss_above_least: start.sum(),
                    gradient_variance: variance,
                    gradient_square: 1.0,
                };
                let bound = convergence.bound(epochs, learning_rate, waited_for[0]);
                assert!(mean <= bound, "{learning_rate} {waited_for:?}: {mean} {bound}");
            }
        }
    }
}
