//! Exact times of bytes at a rate.

use super::time::Time;

const PICOS: u64 = 1_000_000_000_000;

/// A rate, and the fraction of a picosecond that it owes: over any number of packets the sum of
/// times is exact.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    bps: u64,
    /// If that is a whole number, as at 1, 10, 25, 40, 100, 200 and 400 Gbit/s.
    picos_per_byte: Option<u64>,
    remainder: u64,
}

impl Rate {
    pub(crate) const fn new(bps: u64) -> Self {
        let picos_per_byte = if (8 * PICOS).is_multiple_of(bps) { Some(8 * PICOS / bps) } else { None };
        Self { bps, picos_per_byte, remainder: 0 }
    }

    pub(crate) const fn picos_per_byte(&self) -> Option<u64> {
        self.picos_per_byte
    }

    /// How long `bytes` take.
    #[inline]
    pub(crate) fn take(&mut self, bytes: u32) -> Time {
        if let Some(picos) = self.picos_per_byte {
            return Time(u64::from(bytes) * picos);
        }
        let bits = u128::from(bytes) * 8 * u128::from(PICOS) + u128::from(self.remainder);
        let bps = u128::from(self.bps);
        self.remainder = (bits % bps) as u64;
        Time((bits / bps) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_at_100_gbit_takes_80_picoseconds() {
        assert_eq!(Rate::new(100_000_000_000).take(1538), Time(1538 * 80));
    }

    #[test]
    fn nothing_is_lost_to_rounding_over_many_packets() {
        let mut rate = Rate::new(3_000_000_007);
        let sum: u64 = (0..100_000).map(|_| rate.take(1538).0).sum();
        let exact = 100_000_u128 * 1538 * 8 * u128::from(PICOS) / 3_000_000_007;
        assert_eq!(u128::from(sum), exact);
    }
}
