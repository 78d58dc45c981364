//! Counters of all ports of a network, and by how much they grew in each interval of the run.

use crate::net::{Network, PortId, Time};

/// Reads what is counted at a port. No counter ever falls.
pub(crate) type Read<const N: usize> = fn(&Network, PortId) -> [u64; N];

/// Memory is bounded. If there are too many numbers, each two intervals become one, and later
/// intervals are as long.
pub(crate) struct Growth<const N: usize> {
    read: Read<N>,
    kept_max: usize,
    each: u32,
    ends: Vec<Time>,
    ports: Vec<PortGrowth<N>>,
}

#[derive(Clone)]
struct PortGrowth<const N: usize> {
    /// At the last end.
    last: [u64; N],
    growth: Vec<[u64; N]>,
}

impl<const N: usize> Growth<N> {
    /// Keeps at most so many intervals, times ports.
    pub(crate) fn new(network: &Network, kept_max: usize, read: Read<N>) -> Self {
        let port = PortGrowth { last: [0; N], growth: Vec::new() };
        Self {
            read,
            kept_max,
            each: 1,
            ends: Vec::new(),
            ports: vec![port; network.topology().ports().count()],
        }
    }

    /// How many times as long as the first intervals the next one is to be.
    pub(crate) const fn each(&self) -> u32 {
        self.each
    }

    /// An interval ends now. It has no length where one ended now before, and is none then.
    pub(crate) fn end_interval(&mut self, network: &Network) {
        if self.ends.last().copied().unwrap_or(Time::ZERO) == network.time() {
            return;
        }
        self.ends.push(network.time());
        for (port, of) in network.topology().ports().zip(&mut self.ports) {
            let now = (self.read)(network, port);
            of.growth.push(std::array::from_fn(|at| now[at].saturating_sub(of.last[at])));
            of.last = now;
        }
        let numbers = self.ends.len() * self.ports.len().max(1);
        if numbers > self.kept_max.max(1) && self.ends.len() > 1 {
            self.halve();
        }
    }

    /// Makes one interval of each two; an odd one at the end stays.
    fn halve(&mut self) {
        self.each = self.each.saturating_mul(2);
        self.ends = self.ends.chunks(2).map(|two| two[two.len() - 1]).collect();
        for of in &mut self.ports {
            let sum = |two: &[[u64; N]]| std::array::from_fn(|at| two.iter().map(|grown| grown[at]).sum());
            of.growth = of.growth.chunks(2).map(sum).collect();
        }
    }

    /// Ends of the intervals.
    pub(crate) fn ends(&self) -> &[Time] {
        &self.ends
    }

    /// Lengths of the intervals.
    pub(crate) fn lengths(&self) -> Vec<Time> {
        let begins = [Time::ZERO].into_iter().chain(self.ends.iter().copied());
        self.ends.iter().zip(begins).map(|(end, begin)| *end - begin).collect()
    }

    /// For each of the topology's ports, by how much its counters grew in each interval.
    pub(crate) fn of_ports(&self) -> impl Iterator<Item = &[[u64; N]]> {
        self.ports.iter().map(|of| of.growth.as_slice())
    }
}
