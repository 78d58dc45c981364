//! pFabric's sender (Alizadeh et al., SIGCOMM 2013, 4.2): at full rate from the start, and timeouts
//! alone say that something is lost. Queues do the rest: they send what has least left to do, and
//! each packet says how much that is.

use std::collections::{BTreeMap, BTreeSet};

use super::sender::Piece;
use super::{FlowStatistics, TcpConfig};
use crate::net::time::Time;

/// After as many timeouts in a row nothing but probes is sent until one is answered.
const TIMEOUTS_MAX: u32 = 5;

/// The number of an acknowledgement of a probe, which brings nothing.
pub(crate) const PROBE: u64 = u64::MAX;

#[derive(Debug)]
pub(crate) struct Pfabric {
    segment: u64,
    window_max: u64,
    timeout: Time,
    /// Bytes written.
    end: u64,
    /// The furthest that was ever sent.
    furthest: u64,
    arrived_bytes: u64,
    /// Segments on the way, with their bytes and when they were sent; and in that order.
    on_the_way: BTreeMap<u64, (u32, Time)>,
    in_order: BTreeSet<(Time, u64)>,
    /// Segments that timed out, with their bytes.
    lost: BTreeMap<u64, u32>,
    window: u64,
    threshold: u64,
    /// Acknowledged since the window last grew, above the threshold.
    credit: u64,
    timeouts: u32,
    /// While there is nothing but probes: when the next one goes.
    probe: Option<Time>,
}

impl Pfabric {
    pub(crate) fn new(config: &TcpConfig) -> Self {
        let segment = config.segment_bytes.into();
        Self {
            segment,
            window_max: config.window_max_bytes.max(segment),
            timeout: Time::from(config.rto_min).max(Time::from_nanos(1)),
            end: 0,
            furthest: 0,
            arrived_bytes: 0,
            on_the_way: BTreeMap::new(),
            in_order: BTreeSet::new(),
            lost: BTreeMap::new(),
            window: config.window_initial_bytes.max(segment),
            threshold: u64::MAX,
            credit: 0,
            timeouts: 0,
            probe: None,
        }
    }

    pub(crate) fn write(&mut self, bytes: u64) {
        self.end = self.end.saturating_add(bytes);
    }

    pub(crate) const fn end(&self) -> u64 {
        self.end
    }

    /// Bytes that nobody has acknowledged yet.
    pub(crate) const fn remaining(&self) -> u64 {
        self.end - self.arrived_bytes
    }

    pub(crate) fn deadline(&self) -> Option<Time> {
        self.probe.or_else(|| Some(self.in_order.first()?.0 + self.timeout))
    }

    /// Something of each part of it.
    pub(crate) fn glance(&self) -> u64 {
        self.window ^ self.arrived_bytes
    }

    /// The next segment that may be sent now; without bytes, a probe.
    pub(crate) fn poll(&mut self, now: Time, statistics: &mut FlowStatistics) -> Option<Piece> {
        if let Some(due) = self.probe {
            if due > now {
                return None;
            }
            self.probe = Some(now + self.timeout);
            return Some(Piece { sequence: PROBE, bytes: 0 });
        }
        let window = self.window.min(self.window_max);
        if (self.on_the_way.len() as u64 + 1) * self.segment > window.max(self.segment) {
            return None;
        }
        let (again, fresh) = (self.lost.pop_first(), self.segment.min(self.end - self.furthest));
        let (sequence, bytes) = again.unwrap_or((self.furthest, fresh as u32));
        if bytes == 0 {
            return None;
        }
        statistics.retransmissions += u64::from(again.is_some());
        self.furthest = self.furthest.max(sequence + u64::from(bytes));
        self.on_the_way.insert(sequence, (bytes, now));
        self.in_order.insert((now, sequence));
        Some(Piece { sequence, bytes })
    }

    /// The segment that begins there has arrived, or a probe has.
    pub(crate) fn acknowledged(&mut self, sequence: u64) {
        self.timeouts = 0;
        self.probe = None;
        let bytes = match self.on_the_way.remove(&sequence) {
            Some((bytes, sent)) => {
                self.in_order.remove(&(sent, sequence));
                bytes
            }
            // It was late, and not lost.
            None => self.lost.remove(&sequence).unwrap_or(0),
        };
        let fresh = u64::from(bytes);
        self.arrived_bytes += fresh;
        if self.window < self.threshold {
            self.window = (self.window + fresh).min(self.window_max);
        } else {
            self.credit += fresh;
            if self.credit >= self.window {
                self.credit -= self.window;
                self.window = (self.window + self.segment).min(self.window_max);
            }
        }
    }

    /// The oldest segment on the way is given up, if its time has passed, and all others with it.
    pub(crate) fn timeout(&mut self, now: Time, statistics: &mut FlowStatistics) {
        let due = self.in_order.first().is_some_and(|(sent, _)| *sent + self.timeout <= now);
        if self.probe.is_some() || !due {
            return;
        }
        statistics.timeouts += 1;
        self.timeouts += 1;
        self.threshold = (self.window / 2).max(2 * self.segment);
        self.window = self.segment;
        self.credit = 0;
        let given_up = std::mem::take(&mut self.on_the_way).into_iter();
        self.lost.extend(given_up.map(|(sequence, (bytes, _))| (sequence, bytes)));
        self.in_order.clear();
        if self.timeouts >= TIMEOUTS_MAX {
            self.probe = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::ids::NodeId;

    /// Ten segments of 1000 bytes are a window; timeouts after 250 us.
    fn sender(bytes: u64) -> (Pfabric, FlowStatistics) {
        let config = TcpConfig {
            segment_bytes: 1000,
            window_initial_bytes: 10_000,
            rto_min: std::time::Duration::from_micros(250),
            ..TcpConfig::new(NodeId(0), NodeId(1))
        };
        let mut sender = Pfabric::new(&config);
        sender.write(bytes);
        (sender, FlowStatistics::default())
    }

    fn polled(sender: &mut Pfabric, now: Time, statistics: &mut FlowStatistics) -> Vec<u64> {
        std::iter::from_fn(|| sender.poll(now, statistics)).take(100).map(|piece| piece.sequence).collect()
    }

    #[test]
    fn what_is_acknowledged_out_of_order_is_not_sent_again() {
        let (mut sender, mut statistics) = sender(9_500);
        let sent = polled(&mut sender, Time::ZERO, &mut statistics);
        assert_eq!(sent, (0..10).map(|at| 1000 * at).collect::<Vec<_>>());
        for sequence in [1000, 2000, 4000, 5000, 6000, 7000, 9000] {
            sender.acknowledged(sequence);
        }
        assert_eq!(sender.remaining(), 3000);
        assert_eq!(polled(&mut sender, Time::from_micros(100), &mut statistics), [0; 0]);
        let due = sender.deadline().unwrap();
        assert_eq!(due, Time::from_micros(250));
        sender.timeout(due, &mut statistics);
        // The window is one segment now.
        assert_eq!(polled(&mut sender, due, &mut statistics), [0]);
        sender.acknowledged(0);
        // Late, and not lost.
        sender.acknowledged(3000);
        assert_eq!(polled(&mut sender, due, &mut statistics), [8000]);
        sender.acknowledged(8000);
        sender.acknowledged(8000);
        assert_eq!((sender.remaining(), sender.deadline()), (0, None));
        assert_eq!((statistics.timeouts, statistics.retransmissions), (1, 2));
    }

    #[test]
    fn after_five_timeouts_in_a_row_probes_go_until_one_is_answered() {
        let (mut sender, mut statistics) = sender(3_000);
        for timeout in 1..=5 {
            let now = sender.deadline().unwrap_or(Time::ZERO);
            assert!(!polled(&mut sender, now, &mut statistics).is_empty());
            let due = sender.deadline().unwrap();
            sender.timeout(due, &mut statistics);
            assert_eq!(statistics.timeouts, timeout);
        }
        let mut now = sender.deadline().unwrap();
        for _ in 0..3 {
            sender.timeout(now, &mut statistics);
            assert_eq!(sender.poll(now, &mut statistics), Some(Piece { sequence: PROBE, bytes: 0 }));
            assert_eq!(sender.poll(now, &mut statistics), None);
            let next = sender.deadline().unwrap();
            assert_eq!(next, now + Time::from_micros(250));
            now = next;
        }
        sender.acknowledged(PROBE);
        assert_eq!(sender.poll(now, &mut statistics), Some(Piece { sequence: 0, bytes: 1000 }));
        assert_eq!((statistics.timeouts, sender.remaining()), (5, 3000));
    }
}
