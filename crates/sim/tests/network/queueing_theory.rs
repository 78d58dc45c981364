//! Mean lengths of queues against Pollaczek and Khinchine.

use std::time::Duration;

use fanin_sim::net::{
    Actor, Class, Context, LinkConfig, Network, NodeConfig, NodeId, Packet, Parts, QueueConfig, SimAddress,
    Time, Topology,
};
use oorandom::Rand64;

use crate::support::*;

/// Sends packets at the times of a Poisson process, all alike or of exponential lengths.
struct Poisson {
    to: NodeId,
    mean_gap_nanos: f64,
    mean_bytes: f64,
    exponential: bool,
    dice: Rand64,
    next_nanos: f64,
}

impl Poisson {
    fn exponential(&mut self) -> f64 {
        -(1.0 - self.dice.rand_float()).ln()
    }

    fn wait(&mut self, context: &mut Context<'_>) {
        self.next_nanos += self.exponential() * self.mean_gap_nanos;
        context.wake_at(Time((self.next_nanos * 1000.0) as u64), 0);
    }
}

impl Actor for Poisson {
    fn start(&mut self, context: &mut Context<'_>) {
        self.wait(context);
    }

    fn packet(&mut self, _: &mut Context<'_>, _: &Packet<'_>) {}

    fn timer(&mut self, context: &mut Context<'_>, _: u64) {
        let factor = if self.exponential { self.exponential() } else { 1.0 };
        // Bytes on the link, of which headers and framing are 66.
        let bytes = (self.mean_bytes * factor - 66.0).round().clamp(0.0, 65_507.0) as u32;
        context.send_blank(SimAddress::new(self.to, PORT), Class::default(), bytes, 0);
        self.wait(context);
    }
}

/// Mean number of packets that wait at a NIC of 8 Gbit/s, over `packets` arrivals.
fn waiting(load: f64, exponential: bool, packets: u64, seed: u64) -> f64 {
    // Long packets, so that neither the shortest frame nor rounding to bytes shows.
    let mean_bytes = 3000.0;
    let mut parts = Parts::uniform(LinkConfig::new(8 * GBIT, Duration::ZERO).with_mtu(65_535));
    parts.host = NodeConfig::new(QueueConfig::tail_drop(u64::MAX));
    let mut network: Network = network(Topology::one_rack(2, &parts).unwrap(), seed);
    let (from, to) = (node(&network, "h0"), node(&network, "h1"));
    sink(&mut network, to);
    let mean_gap_nanos = mean_bytes / load;
    let dice = Rand64::new(seed.into());
    let source = Poisson { to, mean_gap_nanos, mean_bytes, exponential, dice, next_nanos: 0.0 };
    network.add_actor(from, PORT, source);
    network.run_until(Time::from_nanos((mean_gap_nanos * packets as f64) as u64));
    let nic = network.topology().port(from, network.topology().neighbours(from).next().unwrap().1).unwrap();
    assert_eq!(network.port(nic).drops.total(), 0);
    network.queue(nic, 0).packets_mean
}

/// The mean over four runs of 400 000 arrivals. The standard error of one is 1.9 % of theory at the
/// highest load, by 24 seeds.
fn mean_waiting(load: f64, exponential: bool) -> f64 {
    (0..4).map(|seed| waiting(load, exponential, 400_000, seed)).sum::<f64>() / 4.0
}

const LOADS: [f64; 3] = [0.5, 0.7, 0.8];

#[test]
fn an_m_d_1_queue_is_as_long_as_theory_says() {
    for load in LOADS {
        let theory = load * load / (2.0 * (1.0 - load));
        let mean = mean_waiting(load, false);
        assert!((mean / theory - 1.0).abs() < 0.02, "load {load}: {mean}, in theory {theory}");
    }
}

#[test]
fn an_m_m_1_queue_is_as_long_as_theory_says() {
    for load in LOADS {
        let theory = load * load / (1.0 - load);
        let mean = mean_waiting(load, true);
        assert!((mean / theory - 1.0).abs() < 0.02, "load {load}: {mean}, in theory {theory}");
    }
}
