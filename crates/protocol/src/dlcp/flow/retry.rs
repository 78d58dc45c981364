//! A signal that is sent again until it is answered.

use core::time::Duration;

use crate::machine::Instant;
use crate::transport::{RetransmissionConfig, RoundTrip};

/// So often a signal is sent in vain before its peer counts as silent: with the usual ceiling of
/// 250 ms that takes ten seconds. They are counted and not timed: after a clock has jumped, one try
/// is due and not all.
const TRIES_MAX: u32 = 40;
/// In so many rounds all that was missing has come, or none of it ever will: signals pass, and data
/// never does. Fewer do not show that: what waits in a queue behind others' is asked for every
/// moment, too.
pub(super) const ROUNDS_MAX: u16 = u16::MAX;
/// After so many it is not sent more seldom: a timeout of 1 ms has come to the ceiling.
const SELDOM: u32 = 10;

/// A signal that is not answered within these times, one after the other, is sent once more,
/// without a word about round trips. A timeout is for a peer that is gone. It is much longer than a
/// flow whose start, stop or end lost packets would hold up. A single echo is too few: on links
/// that lose 2 % one signal in 600 is lost twice with its answers, and a sum of eight ranks has
/// some fifty.
const ECHOES: [Duration; 3] = [Duration::from_millis(1), Duration::from_millis(2), Duration::from_millis(4)];
/// If a timeout is no more than so many times as long, it is soon enough.
const ECHOES_IN_TIMEOUT: u32 = 4;

/// The facts known of the way to a peer.
#[derive(Debug)]
pub(in crate::dlcp) struct Waiting {
    round_trip: RoundTrip,
    ceiling: Duration,
}

impl Waiting {
    pub(in crate::dlcp) const fn new(config: RetransmissionConfig) -> Self {
        Self { round_trip: RoundTrip::new(config), ceiling: config.ceiling }
    }

    pub(in crate::dlcp) fn smoothed(&self) -> Duration {
        self.round_trip.smoothed()
    }

    /// How long an answer may take after so many tries.
    fn timeout(&self, tries: u32) -> Duration {
        let timeout = self.round_trip.timeout();
        timeout.saturating_mul(1 << tries.saturating_sub(1).min(16)).min(self.ceiling.max(timeout))
    }
}

/// A signal of a flow, and when to send it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::dlcp) struct Retry {
    /// Whether it has to be said.
    is_wanted: bool,
    /// When it is to be sent again; `None` at once.
    due: Option<Instant>,
    /// When it was sent last.
    sent: Instant,
    tries: u32,
    /// How often the first try was said once more, and whether it is to be the next time.
    echoes: u8,
    is_echo: bool,
}

impl Retry {
    /// It is to be said from now on.
    pub(in crate::dlcp) fn want(&mut self) {
        *self = Self { is_wanted: true, ..Self::default() };
    }

    /// It is to be said if it is not answered soon: something else says the same.
    pub(in crate::dlcp) fn want_soon(&mut self, now: Instant) {
        *self = Self { is_wanted: true, due: Some(now + ECHOES[0]), ..Self::default() };
    }

    pub(in crate::dlcp) fn is_due(&self, now: Instant) -> bool {
        self.is_wanted && self.due.is_none_or(|due| due <= now)
    }

    /// It leaves.
    pub(in crate::dlcp) fn sent(&mut self, now: Instant, waiting: &Waiting) {
        if self.is_echo {
            self.echoes += 1;
        } else {
            self.tries += 1;
            self.sent = now;
        }
        let timeout = waiting.timeout(self.tries);
        let echo = ECHOES.get(usize::from(self.echoes)).filter(|_| self.tries == 1);
        let echo = echo.filter(|echo| **echo * ECHOES_IN_TIMEOUT < timeout);
        self.is_echo = echo.is_some();
        self.due = Some(now + *echo.unwrap_or(&timeout));
    }

    /// It is answered. An answer measures a round trip if it `counts` as an immediate one, to a
    /// signal that was sent once, or echoed: most answers are to the first.
    pub(in crate::dlcp) fn answered(&mut self, now: Instant, counts: bool, waiting: &mut Waiting) {
        if self.is_wanted && self.tries == 1 && counts {
            waiting.round_trip.measure(now.since(self.sent));
        }
        *self = Self::default();
    }

    /// It was heard, but perhaps not all of it: it waits as if it had just been sent.
    pub(in crate::dlcp) fn postpone(&mut self, now: Instant, waiting: &Waiting) {
        if self.is_wanted && self.tries > 0 {
            // No answer to it measures a round trip any more.
            (self.tries, self.is_echo) = (2, false);
            self.due = Some(now + waiting.timeout(1));
        }
    }

    /// Its peer is alive, and perhaps has not come to it: it is sent as seldom as before, and
    /// counts as few times.
    pub(in crate::dlcp) fn excuse(&mut self) {
        self.tries = self.tries.min(SELDOM);
    }

    /// Whether it was sent in vain for too long.
    pub(in crate::dlcp) const fn is_vain(&self) -> bool {
        self.tries > TRIES_MAX
    }

    /// When to look again; `Instant(0)` where it waits to be sent.
    pub(in crate::dlcp) fn poll_timeout(&self) -> Option<Instant> {
        self.is_wanted.then(|| self.due.unwrap_or_default())
    }
}
