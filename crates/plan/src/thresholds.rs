//! At which lengths the queues of a port drop gradients, so that the loss costs training the least
//! (DLCP Appendix B).
//!
//! Queue `i` has the layers of priority `i`, is served when all before it are empty, drops *small*
//! gradients beyond `S_i` packets and everything beyond `L_i`. The paper takes each queue for two,
//! each an M/M/1/m of its own: small gradients with room for `θ S_i` packets and large ones with
//! room for `L_i - θ S_i`. The rooms of all queues are the port's buffer. The best division is
//! found exactly, whatever the curves are, by a table over (queues, packets): rooms are whole
//! packets, and few.
//!
//! If the paper's formulas contradict its text, the code follows the text. Small gradients are lost
//! as in an M/M/1/m, like large ones. The load of queue 1 comes from its own layers.

/// How many more rounds training takes when this share of a queue's gradients is lost: straight
/// lines between points. The last line goes on.
#[derive(Clone, Debug, PartialEq)]
pub struct ImpactCurve(Vec<(f64, f64)>);

/// The layers of one priority.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerQueue {
    /// Bytes of its layers, in any unit that all queues share: its share of the arrivals.
    pub size: f64,
    /// The cost of the loss of small gradients.
    pub small: ImpactCurve,
    /// The cost of the loss of large ones.
    pub large: ImpactCurve,
}

/// A port whose thresholds are looked for.
#[derive(Clone, Debug, PartialEq)]
pub struct DroppingPort {
    /// The first is served first.
    pub queues: Vec<LayerQueue>,
    /// `θ`: the share of gradients that are small, above 0 and below 1. DLCP's median makes it 0.5.
    pub small_share: f64,
    /// Arrivals by what the link carries (`λ/μ`), above 0; above 1 while many send to one.
    pub load: f64,
    /// `B`: packets that all queues together have room for.
    pub buffer_packets: usize,
}

/// The lengths at which one queue drops, and the loss that follows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Threshold {
    /// `S_i`: small gradients are dropped when as many packets wait.
    pub small_packets: usize,
    /// `L_i`: everything is.
    pub packets: usize,
    /// Share of the small gradients that the model expects to lose.
    pub small_loss: f64,
    /// The same of the large ones.
    pub large_loss: f64,
}

/// The thresholds of a port, and what they cost.
#[derive(Clone, Debug, PartialEq)]
pub struct Thresholds {
    /// A threshold for each queue, in the port's order.
    pub queues: Vec<Threshold>,
    /// Rounds that the losses add: the sum over all curves.
    pub impact: f64,
}

/// Why there are no thresholds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ThresholdError {
    /// No queue, or none with a size above zero, or one with a size that is not a number of at
    /// least zero.
    Sizes,
    /// A share of small gradients that is not between 0 and 1.
    SmallShare(f64),
    /// A load that is not above zero.
    Load(f64),
    /// A curve without points, that does not begin at a loss of 0 and rise to one of at most 1, or
    /// that falls.
    Curve,
    /// A threshold for small gradients above the whole queue's, or a list of another length than
    /// the queues'.
    Shape,
}

impl core::fmt::Display for ThresholdError {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Sizes => {
                write!(out, "each queue needs a size of at least 0, and one of them more than that")
            }
            Self::SmallShare(share) => {
                write!(out, "the share of small gradients is {share}: it must be above 0 and below 1")
            }
            Self::Load(load) => write!(out, "the load is {load}: it must be above 0 (1 fills the link)"),
            Self::Curve => write!(
                out,
                "an impact curve is points (loss, rounds) from loss 0 on, of rising losses up to 1 and rounds that never fall"
            ),
            Self::Shape => write!(
                out,
                "thresholds are one for each queue, and that for small gradients is at most the queue's own"
            ),
        }
    }
}

impl core::error::Error for ThresholdError {}

impl ImpactCurve {
    /// Through these points (loss from 0 to 1, rounds).
    ///
    /// # Errors
    /// When losses do not rise from 0 to at most 1, or rounds fall.
    pub fn new(points: Vec<(f64, f64)>) -> Result<Self, ThresholdError> {
        let rises = points.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1);
        let finite = points.iter().all(|(loss, rounds)| (0.0..=1.0).contains(loss) && rounds.is_finite());
        match points.first() {
            Some((first, _)) if *first <= 0.0 && rises && finite => Ok(Self(points)),
            _ => Err(ThresholdError::Curve),
        }
    }

    /// So many rounds for a loss of everything, in proportion below.
    ///
    /// # Errors
    /// When `rounds` is not a number of at least zero.
    pub fn line(rounds: f64) -> Result<Self, ThresholdError> {
        Self::new(vec![(0.0, 0.0), (1.0, rounds)])
    }

    /// Rounds that a loss costs.
    #[must_use]
    pub fn at(&self, loss: f64) -> f64 {
        // Before the last point, so that there is one behind it.
        let after = self.0.partition_point(|(x, _)| *x <= loss).clamp(1, (self.0.len() - 1).max(1));
        let (x, y) = self.0[after - 1];
        self.0.get(after).map_or(y, |(x_after, y_after)| y + (y_after - y) * (loss - x) / (x_after - x))
    }
}

impl DroppingPort {
    /// The thresholds with the least impact, and of those with the same the ones with the least
    /// room for the last queues.
    ///
    /// # Errors
    /// When a number is outside its limits.
    pub fn best(&self) -> Result<Thresholds, ThresholdError> {
        let loads = self.loads()?;
        // For each class, what its losses cost by its room.
        let classes: Vec<Vec<f64>> = self
            .queues
            .iter()
            .zip(&loads)
            .flat_map(|(queue, load)| {
                [&queue.small, &queue.large].map(|curve| {
                    (0..=self.buffer_packets).map(|room| curve.at(blocking(*load, room as f64))).collect()
                })
            })
            .collect();
        let rooms = cheapest(&classes, self.buffer_packets);
        let thresholds: Vec<(usize, usize)> = rooms
            .chunks_exact(2)
            .map(|pair| {
                let packets = pair[0] + pair[1];
                // θ S = room of the small ones; a threshold beyond the queue is none.
                let small = (pair[0] as f64 / self.small_share).round() as usize;
                (small.min(packets), packets)
            })
            .collect();
        Ok(self.with_rooms(
            &loads,
            &thresholds,
            rooms.chunks_exact(2).map(|pair| [pair[0] as f64, pair[1] as f64]),
        ))
    }

    /// The cost of these thresholds (small, whole queue) by the same model, to compare others with
    /// the best.
    ///
    /// # Errors
    /// When a number is outside its limits.
    pub fn expect(&self, thresholds: &[(usize, usize)]) -> Result<Thresholds, ThresholdError> {
        let loads = self.loads()?;
        if thresholds.len() != self.queues.len() || thresholds.iter().any(|(small, packets)| small > packets)
        {
            return Err(ThresholdError::Shape);
        }
        let rooms = thresholds.iter().map(|(small, packets)| {
            let small_room = self.small_share * *small as f64;
            [small_room, *packets as f64 - small_room]
        });
        Ok(self.with_rooms(&loads, thresholds, rooms))
    }

    fn with_rooms(
        &self,
        loads: &[f64],
        thresholds: &[(usize, usize)],
        rooms: impl Iterator<Item = [f64; 2]>,
    ) -> Thresholds {
        let mut impact = 0.0;
        let queues = self
            .queues
            .iter()
            .zip(loads)
            .zip(thresholds.iter().zip(rooms))
            .map(|((queue, load), ((small_packets, packets), rooms))| {
                let [small_loss, large_loss] = rooms.map(|room| blocking(*load, room));
                impact += queue.small.at(small_loss) + queue.large.at(large_loss);
                Threshold { small_packets: *small_packets, packets: *packets, small_loss, large_loss }
            })
            .collect();
        Thresholds { queues, impact }
    }

    /// `ρ_i`: what arrives at each queue by what those before it leave of the link. Small and large
    /// gradients share both alike.
    fn loads(&self) -> Result<Vec<f64>, ThresholdError> {
        let size: f64 = self.queues.iter().map(|queue| queue.size).sum();
        if self.queues.iter().any(|queue| queue.size < 0.0) || !(size.is_finite() && size > 0.0) {
            return Err(ThresholdError::Sizes);
        }
        if !(self.small_share > 0.0 && self.small_share < 1.0) {
            return Err(ThresholdError::SmallShare(self.small_share));
        }
        if !(self.load.is_finite() && self.load > 0.0) {
            return Err(ThresholdError::Load(self.load));
        }
        let mut left = 1.0;
        Ok(self
            .queues
            .iter()
            .map(|queue| {
                let arrivals = self.load * queue.size / size;
                let load = if arrivals == 0.0 { 0.0 } else { arrivals / left };
                left = f64::max(left - arrivals, 0.0);
                load
            })
            .collect())
    }
}

/// The loss of an M/M/1/m of this load and room: `(ρ^m - ρ^(m+1)) / (1 - ρ^(m+1))`. An infinite
/// load means that the link is never left to it: it loses everything.
fn blocking(load: f64, room: f64) -> f64 {
    if load.is_infinite() {
        1.0
    } else if (load - 1.0).abs() < 1e-9 {
        // The limit.
        1.0 / (room + 1.0)
    } else if load < 1.0 {
        load.powf(room) * (1.0 - load) / (1.0 - load.powf(room + 1.0))
    } else {
        // Divided by ρ^(m+1), which may be too large for a float.
        (1.0 - 1.0 / load) / (1.0 - load.powf(-(room + 1.0)))
    }
}

/// How much of `whole` each class gets so that the costs, by what each gets, have the least sum.
fn cheapest(classes: &[Vec<f64>], whole: usize) -> Vec<usize> {
    // Least cost of the classes so far by what they have together, and what the last of them has
    // then.
    let mut least = vec![0.0; whole + 1];
    let mut given = Vec::with_capacity(classes.len());
    for costs in classes {
        let mut next = vec![f64::INFINITY; whole + 1];
        let mut last = vec![0; whole + 1];
        for (all, (cost, room)) in next.iter_mut().zip(&mut last).enumerate() {
            for own in 0..=all {
                let sum = least[all - own] + costs[own];
                if sum < *cost {
                    (*cost, *room) = (sum, own);
                }
            }
        }
        least = next;
        given.push(last);
    }
    let mut left = whole;
    let mut rooms: Vec<usize> = given
        .iter()
        .rev()
        .map(|last| {
            let own = last[left];
            left -= own;
            own
        })
        .collect();
    rooms.reverse();
    rooms
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn line(rounds: f64) -> ImpactCurve {
        ImpactCurve::line(rounds).unwrap()
    }

    fn port(queues: &[(f64, f64, f64)], load: f64, buffer_packets: usize) -> DroppingPort {
        let queues = queues
            .iter()
            .map(|(size, small, large)| LayerQueue { size: *size, small: line(*small), large: line(*large) })
            .collect();
        DroppingPort { queues, small_share: 0.5, load, buffer_packets }
    }

    #[test]
    fn a_queue_loses_what_queueing_theory_says() {
        // M/M/1/1 is Erlang's B of one line; M/M/1/m with a load of 1 is full one time in m + 1.
        assert!((blocking(0.5, 1.0) - 0.5 / 1.5).abs() < 1e-12);
        assert!((blocking(2.0, 1.0) - 2.0 / 3.0).abs() < 1e-12);
        assert!((blocking(1.0, 4.0) - 0.2).abs() < 1e-12);
        // Without room everything is lost, and with all of it what the link cannot carry.
        for load in [0.1, 1.0, 3.0] {
            assert!((blocking(load, 0.0) - 1.0).abs() < 1e-9);
        }
        assert!((blocking(4.0, 1e6) - 0.75).abs() < 1e-9);
        assert!((blocking(1.0 + 2e-9, 4.0) - 0.2).abs() < 1e-6, "continuous about 1");
    }

    #[test]
    fn what_matters_more_gets_more_room() {
        // Back layers and large gradients cost more, as in DLCP's Figure 5.
        let best = port(&[(1.0, 1.0, 4.0), (1.0, 3.0, 12.0)], 0.9, 40).best().unwrap();
        for queue in &best.queues {
            assert!(queue.small_packets < queue.packets && queue.large_loss < queue.small_loss, "{best:?}");
        }
        assert!(best.queues[0].packets < best.queues[1].packets, "{best:?}");
    }

    #[test]
    fn what_is_never_served_gets_no_room() {
        let best = port(&[(3.0, 1.0, 1.0), (1.0, 1.0, 1.0)], 2.0, 20).best().unwrap();
        assert_eq!((best.queues[0].packets, best.queues[1].packets), (20, 0));
        assert!((best.queues[1].large_loss - 1.0).abs() < 1e-12);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let good = port(&[(1.0, 1.0, 1.0)], 0.5, 10);
        let refused = |change: fn(&mut DroppingPort)| {
            let mut port = good.clone();
            change(&mut port);
            port.best().unwrap_err()
        };
        assert_eq!(refused(|port| port.queues.clear()), ThresholdError::Sizes);
        assert_eq!(refused(|port| port.queues[0].size = 0.0), ThresholdError::Sizes);
        assert_eq!(refused(|port| port.small_share = 1.0), ThresholdError::SmallShare(1.0));
        assert_eq!(refused(|port| port.load = 0.0), ThresholdError::Load(0.0));
        assert_eq!(good.expect(&[]), Err(ThresholdError::Shape));
        assert_eq!(good.expect(&[(3, 2)]), Err(ThresholdError::Shape));
        for points in [
            vec![],
            vec![(0.1, 0.0)],
            vec![(0.0, 1.0), (0.5, 0.0)],
            vec![(0.0, 0.0), (1.5, 1.0)],
            vec![(0.0, f64::NAN)],
        ] {
            assert_eq!(ImpactCurve::new(points), Err(ThresholdError::Curve));
        }
    }

    #[test]
    fn a_curve_is_straight_between_its_points_and_goes_on_behind_them() {
        let curve = ImpactCurve::new(vec![(0.0, 0.0), (0.01, 0.0), (0.03, 4.0)]).unwrap();
        for (loss, rounds) in [(0.0, 0.0), (0.01, 0.0), (0.02, 2.0), (0.03, 4.0), (0.05, 8.0)] {
            assert!((curve.at(loss) - rounds).abs() < 1e-9, "{loss}");
        }
        assert_eq!(ImpactCurve::new(vec![(0.0, 3.0)]).unwrap().at(0.5).to_bits(), 3.0_f64.to_bits());
    }

    proptest! {
        /// Against all ways to divide a small buffer, also with curves that bend the wrong way for
        /// a greedy search.
        #[test]
        fn no_other_division_of_the_buffer_costs_less(
            sizes in prop::collection::vec(0.1f64..4.0, 2),
            bends in prop::collection::vec((0.05f64..0.9, 0.0f64..2.0, 0.0f64..5.0), 4),
            load in 0.1f64..3.0,
            small_share in 0.1f64..0.9,
            buffer_packets in 0usize..9,
        ) {
            let curve = |(loss, rise, more): (f64, f64, f64)| {
                ImpactCurve::new(vec![(0.0, 0.0), (loss, rise), (1.0, rise + more)]).unwrap()
            };
            let queues = vec![
                LayerQueue { size: sizes[0], small: curve(bends[0]), large: curve(bends[1]) },
                LayerQueue { size: sizes[1], small: curve(bends[2]), large: curve(bends[3]) },
            ];
            let port = DroppingPort { queues, small_share, load, buffer_packets };
            let loads = port.loads().unwrap();
            let best = port.best().unwrap();
            prop_assert!(best.queues.iter().map(|queue| queue.packets).sum::<usize>() <= buffer_packets);
            for a in 0..=buffer_packets {
                for b in 0..=buffer_packets - a {
                    for c in 0..=buffer_packets - a - b {
                        let rooms = [[a as f64, b as f64], [c as f64, (buffer_packets - a - b - c) as f64]];
                        let other = port.with_rooms(&loads, &[(0, 0), (0, 0)], rooms.into_iter());
                        prop_assert!(best.impact <= other.impact + 1e-9, "{best:?} {other:?}");
                    }
                }
            }
        }
    }
}
