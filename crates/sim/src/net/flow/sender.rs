//! The sending half of a TCP-like connection: what to send, and when to send it again.

use std::time::Duration;

use super::dctcp::Dctcp;
use super::{FlowStatistics, TcpConfig, Transport};
use crate::net::time::Time;

/// A segment to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) sequence: u64,
    pub(crate) bytes: u32,
}

#[derive(Debug)]
pub(crate) struct Sender {
    segment: u64,
    window_max: u64,
    ecn: bool,
    /// Instead of halving the window for a mark.
    dctcp: Option<Dctcp>,
    /// So many duplicate acknowledgements mean a loss.
    duplicates_max: u32,
    rto_min: Time,
    /// Bytes written.
    end: u64,
    /// Everything before it is acknowledged.
    unacknowledged: u64,
    /// The next byte to send; goes back on a timeout.
    next: u64,
    /// The furthest that was ever sent.
    furthest: u64,
    window: u64,
    threshold: u64,
    /// Acknowledged since the window last grew, above the threshold.
    credit: u64,
    duplicates: u32,
    /// In fast recovery, until everything before `recover` is acknowledged.
    recovering: bool,
    recover: u64,
    /// The window is halved for marks once until this is acknowledged.
    reduced: u64,
    /// The first unacknowledged segment is to be sent again.
    resend: bool,
    smoothed: Option<(Time, Time)>,
    rto: Time,
    /// The segment that timed out last.
    timed_out: Option<u64>,
    /// When the oldest segment times out.
    deadline: Option<Time>,
    /// A segment whose round trip is measured: acknowledged by this, sent then.
    measured: Option<(u64, Time)>,
}

impl Sender {
    pub(crate) fn new(config: &TcpConfig) -> Self {
        let rto_min = Time::from(config.rto_min).max(Time::from(Duration::from_nanos(1)));
        Self {
            segment: config.segment_bytes.into(),
            window_max: config.window_max_bytes.max(config.segment_bytes.into()),
            ecn: config.takes_marks(),
            dctcp: matches!(config.transport, Transport::Dctcp | Transport::Pias { .. }).then(Dctcp::new),
            duplicates_max: config.duplicates,
            rto_min,
            end: 0,
            unacknowledged: 0,
            next: 0,
            furthest: 0,
            window: config.window_initial_bytes.max(config.segment_bytes.into()),
            threshold: u64::MAX,
            credit: 0,
            duplicates: 0,
            recovering: false,
            recover: 0,
            reduced: 0,
            resend: false,
            smoothed: None,
            // The handshake has measured a round trip, and none here is as long as this.
            rto: rto_min,
            timed_out: None,
            deadline: None,
            measured: None,
        }
    }

    pub(crate) fn write(&mut self, bytes: u64) {
        self.end = self.end.saturating_add(bytes);
    }

    pub(crate) const fn end(&self) -> u64 {
        self.end
    }

    /// Something of each part of it.
    pub(crate) fn glance(&self) -> u64 {
        let Self { rto_min, unacknowledged, credit, rto, measured, .. } = self;
        rto_min.0 ^ unacknowledged ^ credit ^ rto.0 ^ u64::from(measured.is_some())
    }

    pub(crate) const fn deadline(&self) -> Option<Time> {
        self.deadline
    }

    /// The next segment that may be sent now.
    pub(crate) fn poll(&mut self, now: Time, statistics: &mut FlowStatistics) -> Option<Piece> {
        let sequence = if std::mem::take(&mut self.resend) {
            self.unacknowledged
        } else {
            let window = self.window.min(self.window_max);
            let bytes = self.segment.min(self.end - self.next);
            if bytes == 0 || self.next + bytes > self.unacknowledged + window {
                return None;
            }
            self.next
        };
        let bytes = self.segment.min(self.end - sequence);
        let end = sequence + bytes;
        if sequence < self.furthest {
            statistics.retransmissions += 1;
            // Its acknowledgement could be for either (Karn's algorithm).
            self.measured = None;
        } else if self.measured.is_none() {
            self.measured = Some((end, now));
        }
        self.next = self.next.max(end);
        self.furthest = self.furthest.max(end);
        if self.deadline.is_none() {
            self.deadline = Some(now + self.rto);
        }
        Some(Piece { sequence, bytes: bytes as u32 })
    }

    pub(crate) fn acknowledged(&mut self, now: Time, to: u64, echo: bool, statistics: &mut FlowStatistics) {
        if to > self.furthest || to < self.unacknowledged {
            return;
        }
        if let Some(dctcp) = &mut self.dctcp {
            dctcp.acknowledged(to, to - self.unacknowledged, echo, self.next);
        }
        if echo && self.ecn && !self.recovering && to > self.reduced {
            self.reduce();
            if let Some(dctcp) = &self.dctcp {
                let window = self.window.min(self.window_max);
                self.threshold = dctcp.reduced(window).max(2 * self.segment);
            }
            self.window = self.threshold;
            self.reduced = self.furthest;
            statistics.ecn_reductions += 1;
        }
        if to > self.unacknowledged {
            self.advance(now, to);
        } else if self.furthest > self.unacknowledged {
            self.duplicate();
        }
    }

    fn advance(&mut self, now: Time, to: u64) {
        let fresh = to - self.unacknowledged;
        self.unacknowledged = to;
        self.next = self.next.max(to);
        self.duplicates = 0;
        if let Some((end, sent)) = self.measured
            && to >= end
        {
            self.measured = None;
            self.measure(now.since(sent));
        }
        // As Linux does, progress ends the timeout's doubling: after a timeout everything is sent
        // again, and nothing of that is measured.
        self.rto = self.timeout_of_round_trip();
        self.deadline = (self.furthest > to).then(|| now + self.rto);
        if self.recovering {
            if to >= self.recover {
                self.recovering = false;
                // The window is not the whole threshold at once. It would be a burst into the queue
                // that has just lost packets, and cost connections beside it theirs (RFC 6582, 3.2,
                // step 3, first option).
                let flight = self.next - self.unacknowledged;
                self.window = self.threshold.min(flight.max(self.segment) + self.segment);
            } else {
                // NewReno: the next hole (RFC 6582, 3.2, partial acknowledgement).
                self.resend = true;
                self.window = self.window.saturating_sub(fresh).max(self.segment) + self.segment;
            }
        } else if self.window < self.threshold {
            self.window = (self.window + fresh.min(self.segment)).min(self.window_max);
        } else if self.dctcp.is_some() && to <= self.reduced {
            // A window that has just been shortened does not grow before it is acknowledged, as in
            // Linux and ns-3. If it grew, each flow would have half a segment more in the queue.
            // After a timeout it is below the threshold, and grows.
        } else {
            self.credit += fresh;
            if self.credit >= self.window {
                self.credit -= self.window;
                self.window = (self.window + self.segment).min(self.window_max);
            }
        }
    }

    fn duplicate(&mut self) {
        if self.recovering {
            self.window = (self.window + self.segment).min(self.window_max.saturating_mul(2));
            return;
        }
        self.duplicates += 1;
        // After a timeout, what was sent before it makes duplicates too (RFC 6582, 3.2, step 1).
        if self.duplicates == self.duplicates_max && self.unacknowledged >= self.recover {
            self.reduce();
            self.window = self.threshold + u64::from(self.duplicates_max) * self.segment;
            self.recovering = true;
            self.recover = self.furthest;
            self.resend = true;
        }
    }

    /// RFC 5681, equation 4.
    fn reduce(&mut self) {
        let flight = self.next - self.unacknowledged;
        self.threshold = (flight / 2).max(2 * self.segment);
        self.credit = 0;
    }

    /// Acts on a timeout that has passed.
    pub(crate) fn timeout(&mut self, now: Time, statistics: &mut FlowStatistics) {
        if self.deadline.is_none_or(|deadline| deadline > now) {
            return;
        }
        statistics.timeouts += 1;
        // Not again for the same segment (RFC 5681, 3.1): one long outage would leave nothing of
        // the threshold.
        if self.timed_out != Some(self.unacknowledged) {
            self.reduce();
        }
        self.timed_out = Some(self.unacknowledged);
        self.window = self.segment;
        self.recovering = false;
        self.recover = self.furthest;
        self.duplicates = 0;
        self.resend = false;
        self.next = self.unacknowledged;
        self.measured = None;
        self.rto = (self.rto + self.rto).min(Time::from(TcpConfig::RTO_MAX).max(self.rto_min));
        self.deadline = None;
    }

    /// RFC 6298, 2.2 and 2.3.
    fn measure(&mut self, round_trip: Time) {
        let (smoothed, variation) = match self.smoothed {
            None => (round_trip.0, round_trip.0 / 2),
            Some((smoothed, variation)) => {
                let off = smoothed.0.abs_diff(round_trip.0);
                (smoothed.0 / 8 * 7 + round_trip.0 / 8, variation.0 / 4 * 3 + off / 4)
            }
        };
        self.smoothed = Some((Time(smoothed), Time(variation)));
    }

    fn timeout_of_round_trip(&self) -> Time {
        let rto =
            self.smoothed.map_or(Time::ZERO, |(smoothed, variation)| Time(smoothed.0 + 4 * variation.0));
        rto.clamp(self.rto_min, Time::from(TcpConfig::RTO_MAX).max(self.rto_min))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::ids::NodeId;

    #[test]
    fn a_full_acknowledgement_is_not_answered_with_a_burst() {
        let config = TcpConfig { segment_bytes: 100, ..TcpConfig::new(NodeId(0), NodeId(1)) };
        let config = TcpConfig { window_initial_bytes: 4000, ..config };
        let (mut sender, mut statistics) = (Sender::new(&config), FlowStatistics::default());
        let polled = |sender: &mut Sender| {
            std::iter::from_fn(|| sender.poll(Time::ZERO, &mut FlowStatistics::default())).count()
        };
        sender.write(4000);
        assert_eq!(polled(&mut sender), 40);
        // The first is lost, and all others arrive.
        for _ in 1..40 {
            sender.acknowledged(Time::ZERO, 0, false, &mut statistics);
        }
        assert_eq!(polled(&mut sender), 1, "the lost one");
        sender.acknowledged(Time::ZERO, 4000, false, &mut statistics);
        sender.write(1_000_000);
        assert_eq!(polled(&mut sender), 2, "nothing is on its way, and the threshold is 20");
    }

    /// Ten segments of 1000 bytes, all on the way.
    fn ten_on_the_way() -> (Sender, FlowStatistics) {
        let config = TcpConfig {
            segment_bytes: 1000,
            window_initial_bytes: 10_000,
            ..TcpConfig::new(NodeId(0), NodeId(1))
        };
        let (mut sender, mut statistics) = (Sender::new(&config), FlowStatistics::default());
        sender.write(10_000);
        let sent: Vec<_> = std::iter::from_fn(|| sender.poll(Time::ZERO, &mut statistics)).collect();
        let expected: Vec<_> = (0..10).map(|at| Piece { sequence: 1000 * at, bytes: 1000 }).collect();
        assert_eq!(sent, expected);
        (sender, statistics)
    }

    /// Else sixty lost segments would take sixty round trips.
    #[test]
    fn after_a_timeout_a_window_that_a_mark_shortened_starts_slowly_and_does_not_rest() {
        let config = TcpConfig {
            segment_bytes: 1000,
            window_initial_bytes: 10_000,
            transport: Transport::Dctcp,
            ..TcpConfig::new(NodeId(0), NodeId(1))
        };
        let (mut sender, mut statistics) = (Sender::new(&config), FlowStatistics::default());
        let polled = |sender: &mut Sender| {
            std::iter::from_fn(|| sender.poll(Time::ZERO, &mut FlowStatistics::default())).count()
        };
        sender.write(10_000);
        assert_eq!(polled(&mut sender), 10);
        sender.acknowledged(Time::ZERO, 1000, true, &mut statistics);
        assert_eq!(statistics.ecn_reductions, 1);
        let late = sender.deadline().expect("nine are on the way");
        sender.timeout(late, &mut statistics);
        assert_eq!(statistics.timeouts, 1);
        let mut sent = vec![polled(&mut sender)];
        let mut acknowledged = 1000;
        for _ in 0..2 {
            for _ in 0..sent[sent.len() - 1] {
                acknowledged += 1000;
                sender.acknowledged(Time::ZERO, acknowledged, false, &mut statistics);
            }
            sent.push(polled(&mut sender));
        }
        assert_eq!(sent, [1, 2, 4], "segments a round trip");
    }

    #[test]
    fn the_third_duplicate_and_no_earlier_one_sends_again() {
        let (mut sender, mut statistics) = ten_on_the_way();
        for duplicate in 1..=4 {
            sender.acknowledged(Time::from_micros(duplicate), 0, false, &mut statistics);
            let again = sender.poll(Time::from_micros(duplicate), &mut statistics);
            assert_eq!(again, (duplicate == 3).then_some(Piece { sequence: 0, bytes: 1000 }), "{duplicate}");
        }
    }

    #[test]
    fn after_a_timeout_duplicates_of_what_was_sent_before_it_send_nothing() {
        let (mut sender, mut statistics) = ten_on_the_way();
        let due = sender.deadline().unwrap();
        assert_eq!(due, Time::from_millis(10));
        sender.timeout(due, &mut statistics);
        assert_eq!(sender.poll(due, &mut statistics), Some(Piece { sequence: 0, bytes: 1000 }));
        for _ in 0..5 {
            sender.acknowledged(due, 0, false, &mut statistics);
            assert_eq!(sender.poll(due, &mut statistics), None);
        }
        // The next timeout is twice as long, and one after progress is not.
        assert_eq!(sender.deadline(), Some(Time::from_millis(30)));
        sender.acknowledged(due, 9000, false, &mut statistics);
        assert_eq!(sender.deadline(), Some(Time::from_millis(20)));
        assert_eq!(sender.poll(due, &mut statistics), Some(Piece { sequence: 9000, bytes: 1000 }));
        assert_eq!((statistics.timeouts, statistics.retransmissions), (1, 2));
    }
    #[test]
    fn a_segment_that_times_out_again_lowers_the_threshold_once() {
        let (mut sender, mut statistics) = ten_on_the_way();
        for again in 1..=3 {
            let due = sender.deadline().unwrap();
            sender.timeout(due, &mut statistics);
            assert_eq!((statistics.timeouts, sender.window, sender.threshold), (again, 1000, 5000));
            assert!(sender.poll(due, &mut statistics).is_some());
        }
        // Another segment's does.
        sender.acknowledged(Time::from_millis(100), 1000, false, &mut statistics);
        while sender.poll(Time::from_millis(100), &mut statistics).is_some() {}
        sender.timeout(sender.deadline().unwrap(), &mut statistics);
        assert_eq!(sender.threshold, 2000);
    }
}
