//! Which part of each tensor goes to which service, so that all services get their shares (BytePS
//! §4.1).
//!
//! BytePS cuts tensors into partitions of at most 4 MB, the unit of its transport, and places them
//! by a hash. Here the unit of the transport is a packet, so a tensor is cut into one range of
//! packets a service, as long as its share says. Ranges that are too short to fill a train are not
//! cut: a small tensor goes to the services that lag behind their shares most.

use std::ops::Range;

/// Fewest packets of a range that pay for their own train: most of one.
pub const PART_PACKETS_MIN: usize = 32;

/// Shares are counted in parts of this: the same whole numbers on every rank.
pub const SHARE_WHOLE: u32 = 1 << 20;

/// The state of a stream of tensors: a function of the shares and of the tensors before, so it is
/// the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    shares: Vec<u32>,
    /// The debt to each service, in packets times [`SHARE_WHOLE`]; they sum to zero.
    owed: Vec<i128>,
    /// Packets that each service was given.
    placed: Vec<u64>,
}

impl Placement {
    /// For services with these shares. No share is below zero, and not all are zero. They need not
    /// sum to one.
    ///
    /// # Panics
    /// When there is no service, or no share above zero.
    #[must_use]
    pub fn new(shares: &[f64]) -> Self {
        let sum: f64 = shares.iter().sum();
        assert!(sum.is_finite() && sum > 0.0 && shares.iter().all(|share| *share >= 0.0), "{shares:?}");
        // Cut where the running sums round to, so that the whole is divided without rest.
        let (mut running, mut cut) = (0.0, 0);
        let mut whole: Vec<u32> = Vec::with_capacity(shares.len());
        for share in shares {
            running += share / sum;
            let end =
                (running * f64::from(SHARE_WHOLE)).round().clamp(f64::from(cut), f64::from(SHARE_WHOLE));
            whole.push(end as u32 - cut);
            cut = end as u32;
        }
        // Sums of fractions may miss one by an ulp.
        if let Some(last) = whole.iter_mut().rev().find(|share| **share > 0) {
            *last += SHARE_WHOLE - cut;
        }
        Self { owed: vec![0; shares.len()], placed: vec![0; shares.len()], shares: whole }
    }

    /// The shares, in parts of [`SHARE_WHOLE`].
    #[must_use]
    pub fn shares(&self) -> &[u32] {
        &self.shares
    }

    /// Places the stream's next `packets` packets: each range with its service, in order and
    /// without gaps. No range has fewer than `least` packets, unless it is the only one. No packets
    /// are an empty range of one service.
    pub fn place(&mut self, packets: usize, least: usize) -> Vec<(usize, Range<usize>)> {
        let whole = i128::from(SHARE_WHOLE);
        for (owed, share) in self.owed.iter_mut().zip(&self.shares) {
            *owed += i128::from(*share) * packets as i128;
        }
        // The services that are owed most, as many as get enough.
        let mut chosen: Vec<usize> =
            (0..self.shares.len()).filter(|service| self.shares[*service] > 0).collect();
        chosen.sort_by_key(|service| (-self.owed[*service], *service));
        let mut owed_to_all: i128 = chosen.iter().map(|service| self.owed[*service].max(0)).sum();
        while let [.., last] = chosen[..]
            && chosen.len() > 1
            && self.owed[last].max(0) * (packets as i128) < owed_to_all.max(1) * least.max(1) as i128
        {
            owed_to_all -= self.owed[last].max(0);
            chosen.pop();
        }
        // In the order of services: a tensor's first part is the first service's.
        chosen.sort_unstable();
        let (mut running, mut begin) = (0, 0);
        let mut cuts = Vec::with_capacity(chosen.len());
        for (index, service) in chosen.iter().enumerate() {
            running += self.owed[*service].max(0);
            let end = if index + 1 == chosen.len() {
                packets
            } else {
                // Fits: it is at most `packets`.
                (packets as i128 * running / owed_to_all.max(1)) as usize
            };
            cuts.push((*service, begin..end));
            begin = end;
        }
        for (service, range) in &cuts {
            self.owed[*service] -= whole * range.len() as i128;
            self.placed[*service] += range.len() as u64;
        }
        cuts
    }

    /// By how much the service that is furthest from its share misses it, as a fraction of all
    /// packets so far.
    #[must_use]
    pub fn imbalance(&self) -> f64 {
        let all: u64 = self.placed.iter().sum();
        let most = self.owed.iter().map(|owed| owed.unsigned_abs()).max().unwrap_or(0);
        if all == 0 { 0.0 } else { most as f64 / f64::from(SHARE_WHOLE) / all as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_long_tensor_is_cut_by_the_shares() {
        let mut placement = Placement::new(&[0.5, 0.25, 0.25]);
        assert_eq!(placement.place(1000, 32), [(0, 0..500), (1, 500..750), (2, 750..1000)]);
    }

    #[test]
    fn small_tensors_go_round_by_the_shares() {
        let mut placement = Placement::new(&[0.5, 0.25, 0.25]);
        let services: Vec<usize> = (0..8).map(|_| placement.place(1, 32)[0].0).collect();
        assert_eq!(services.iter().filter(|service| **service == 0).count(), 4, "{services:?}");
        assert_eq!(services.iter().filter(|service| **service == 1).count(), 2, "{services:?}");
    }

    #[test]
    fn nothing_is_placed_with_one_service() {
        let mut placement = Placement::new(&[0.5, 0.5]);
        let [(_, range)] = &placement.place(0, 32)[..] else { panic!("one range") };
        assert!(range.is_empty());
        assert_eq!(placement.imbalance().to_bits(), 0);
    }

    #[test]
    fn a_service_without_a_share_gets_nothing() {
        let mut placement = Placement::new(&[0.0, 1.0, 0.0]);
        for packets in [0, 1, 31, 1000] {
            assert_eq!(placement.place(packets, 32), [(1, 0..packets)]);
        }
    }

    proptest! {
        #[test]
        fn ranges_are_whole_long_enough_and_by_the_shares(
            shares in prop::collection::vec(0.0..10.0_f64, 1..20),
            tensors in prop::collection::vec(0..5000_usize, 1..200),
            least in 1..64_usize,
        ) {
            prop_assume!(shares.iter().sum::<f64>() > 0.1);
            let mut placement = Placement::new(&shares);
            prop_assert_eq!(placement.shares().iter().sum::<u32>(), SHARE_WHOLE);
            let mut again = placement.clone();
            for packets in &tensors {
                let cuts = placement.place(*packets, least);
                prop_assert_eq!(&cuts, &again.place(*packets, least), "the same on every rank");
                prop_assert_eq!(cuts[0].1.start, 0);
                prop_assert_eq!(cuts[cuts.len() - 1].1.end, *packets);
                prop_assert!(cuts.windows(2).all(|two| two[0].1.end == two[1].1.start && two[0].0 < two[1].0));
                prop_assert!(cuts.len() == 1 || cuts.iter().all(|(_, range)| range.len() + 1 >= least));
            }
            prop_assert_eq!(placement.owed.iter().sum::<i128>(), 0);
            // No service lags by more than one tensor that was too short for all, or a train for
            // each of them.
            let bound = i128::from(SHARE_WHOLE) * (shares.len() * (least + 1)) as i128;
            prop_assert!(placement.owed.iter().all(|owed| owed.abs() <= bound), "{:?}", placement.owed);
        }
    }

    #[test]
    fn a_model_of_many_tensors_is_balanced_within_five_percent() {
        // ResNet-50-like: many small ones, a few large ones; 100 packets are 140 KB.
        let tensors = [1, 2, 26, 100, 1, 3, 400, 1600, 2, 5700, 1, 60];
        let mut placement = Placement::new(&[1.0; 9]);
        for packets in tensors {
            placement.place(packets, 32);
        }
        assert!(placement.imbalance() < 0.05, "{}", placement.imbalance());
    }
}
