//! DCTCP (RFC 8257, 3.3): how much of what arrives is marked, and how far the window goes back for
//! it.

/// The share of a new window in the estimate (RFC 8257, 4.2).
const GAIN: f64 = 1.0 / 16.0;

#[derive(Debug)]
pub(crate) struct Dctcp {
    /// Share of the bytes that are marked, smoothed. The first mark halves the window, as nothing
    /// is known yet.
    alpha: f64,
    /// In the window that ends before `window_end`.
    acknowledged: u64,
    marked: u64,
    window_end: u64,
}

impl Dctcp {
    pub(crate) const fn new() -> Self {
        Self { alpha: 1.0, acknowledged: 0, marked: 0, window_end: 0 }
    }

    /// `fresh` bytes are acknowledged, up to `to`; `next` is what will be sent next.
    pub(crate) fn acknowledged(&mut self, to: u64, fresh: u64, echo: bool, next: u64) {
        self.acknowledged += fresh;
        if echo {
            self.marked += fresh;
        }
        if to <= self.window_end || self.acknowledged == 0 {
            return;
        }
        let share = self.marked as f64 / self.acknowledged as f64;
        self.alpha = (1.0 - GAIN) * self.alpha + GAIN * share;
        (self.acknowledged, self.marked, self.window_end) = (0, 0, next);
    }

    /// The rest of a window that met a mark.
    pub(crate) fn reduced(&self, window: u64) -> u64 {
        (window as f64 * (1.0 - self.alpha / 2.0)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alpha_follows_the_share_that_is_marked_once_a_window() {
        let mut dctcp = Dctcp::new();
        let mut to = 0;
        // Windows of ten segments; the first three are marked.
        let mut window = |dctcp: &mut Dctcp| {
            for at in 0..10 {
                to += 100;
                dctcp.acknowledged(to, 100, at < 3, to + 900);
            }
        };
        // The very first acknowledgement is a window of its own: there was none before it.
        window(&mut dctcp);
        assert_eq!(dctcp.alpha, 1.0, "one marked segment of one");
        window(&mut dctcp);
        assert!((dctcp.alpha - (15.0 / 16.0 + 0.3 / 16.0)).abs() < 1e-12, "{}", dctcp.alpha);
        (0..400).for_each(|_| window(&mut dctcp));
        assert!((dctcp.alpha - 0.3).abs() < 1e-9, "{}", dctcp.alpha);
        assert!((84_999..=85_000).contains(&dctcp.reduced(100_000)));
    }
}
