//! How busy each direction of each link was, over time.

use super::growth::Growth;
use super::report::LinkReport;
use crate::net::{Network, NodeId, Time};

/// Numbers that are kept at most: of a long run or a large network, intervals become longer
/// instead.
const KEPT_MAX: usize = 1 << 20;

/// Samples of all ports of a network.
pub(crate) struct Loads {
    busy: Growth<1>,
    /// Calls since the last interval ended.
    calls: u32,
}

impl Loads {
    pub(crate) fn new(network: &Network) -> Self {
        Self::keeping(KEPT_MAX, network)
    }

    fn keeping(kept_max: usize, network: &Network) -> Self {
        Self { busy: Growth::new(network, kept_max, |network, port| [network.busy(port).0]), calls: 0 }
    }

    /// An interval ends; the run's last one wherever it is.
    pub(crate) fn sample(&mut self, network: &Network, last: bool) {
        self.calls += 1;
        if self.calls >= self.busy.each() || last {
            self.calls = 0;
            self.busy.end_interval(network);
        }
    }

    /// Ends of the intervals, in seconds.
    pub(crate) fn ends_s(&self) -> Vec<f64> {
        self.busy.ends().iter().map(|end| end.as_secs_f64()).collect()
    }

    /// Both directions of each link that carried or dropped anything.
    pub(crate) fn report(&self, network: &Network) -> Vec<LinkReport> {
        let topology = network.topology();
        let name = |node: NodeId| topology.get(node).name.clone();
        let lengths = self.busy.lengths();
        // A transmission that goes on when an interval ends is busy time of that interval, all of
        // it.
        let share = |busy: Time, of: Time| (busy.0 as f64 / of.0.max(1) as f64).min(1.0);
        let reports = topology.ports().zip(self.busy.of_ports()).filter_map(|(port, grown)| {
            let statistics = network.port(port);
            if statistics.sent_packets == 0 && statistics.drops.total() == 0 {
                return None;
            }
            let link = &topology.links()[port.link().0 as usize];
            let [from, to] = topology.ends(port);
            let busy = grown.iter().map(|[busy]| Time(*busy));
            let loads: Vec<f64> = busy.zip(&lengths).map(|(busy, length)| share(busy, *length)).collect();
            Some(LinkReport {
                from: name(from),
                to: name(to),
                rate_gbps: link.config.rate_bps as f64 / 1e9,
                sent_bytes: statistics.sent_bytes,
                load: share(statistics.busy, network.time()),
                load_max: loads.iter().copied().fold(0.0, f64::max),
                queue_max_bytes: statistics.queue_bytes_max,
                marked: statistics.marked,
                dropped: statistics.drops.total(),
                loads,
            })
        });
        reports.collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::net::{Class, ConstantRateConfig, LinkConfig, NetworkConfig, Parts, Topology};

    /// Half of a link of 10 Gbit/s for 20 of 25 us, sampled every microsecond; ends and loads of
    /// the sender's NIC.
    fn sampled(kept_max: usize) -> (Vec<f64>, LinkReport) {
        let parts = Parts::uniform(LinkConfig::new(10_000_000_000, Duration::ZERO));
        let topology = Topology::one_rack(2, &parts).expect("two hosts");
        let mut network = Network::new(topology, NetworkConfig::default()).expect("a sound topology");
        let (from, to) = (NodeId(1), NodeId(2));
        let flow = network.start_constant_rate(ConstantRateConfig {
            from,
            to,
            class: Class::default(),
            rate_bps: 5_000_000_000,
            datagram_bytes: 125 - 38,
            ecn: false,
        });
        network.at(Duration::from_nanos(19_950), move |network| network.stop_flow(flow));
        // Something is left to happen until then.
        network.at(Duration::from_micros(25), |_| ());
        let mut loads = Loads::keeping(kept_max, &network);
        for end in 1..=25 {
            network.run_until(Time::from_micros(end));
            loads.sample(&network, false);
        }
        loads.sample(&network, true);
        let reports = loads.report(&network);
        let names: Vec<_> = reports.iter().map(|link| (link.from.as_str(), link.to.as_str())).collect();
        assert_eq!(names, [("h0", "s0"), ("s0", "h1")], "the other directions carried nothing");
        let nic = reports[0].clone();
        (loads.ends_s(), nic)
    }

    #[test]
    fn loads_are_shares_of_their_intervals() {
        let (ends, nic) = sampled(KEPT_MAX);
        assert_eq!(ends.len(), 25);
        assert!((ends[24] - 25e-6).abs() < 1e-12);
        // A packet takes 100 ns, every 200 ns.
        let expected: Vec<f64> = (0..25).map(|at| if at < 20 { 0.5 } else { 0.0 }).collect();
        assert!(
            nic.loads.iter().zip(&expected).all(|(load, expected)| (load - expected).abs() < 0.11),
            "{nic:?}"
        );
        assert!((nic.load - 0.4).abs() < 0.005, "{nic:?}");
        assert_eq!((nic.rate_gbps, nic.sent_bytes), (10.0, 100 * 125));
        assert!((0.5..0.7).contains(&nic.load_max));
    }

    #[test]
    fn intervals_become_longer_before_there_are_too_many() {
        // Four directions, five intervals.
        let (ends, nic) = sampled(20);
        assert!(ends.len() <= 5 && nic.loads.len() == ends.len(), "{ends:?}");
        assert!((ends[ends.len() - 1] - 25e-6).abs() < 1e-12, "the last ends with the run");
        let (mut busy, mut begin) = (0.0, 0.0);
        for (load, end) in nic.loads.iter().zip(&ends) {
            busy += load * (end - begin);
            begin = *end;
        }
        assert!((busy - nic.load * 25e-6).abs() < 1e-9, "nothing is lost: {nic:?}");
    }
}
