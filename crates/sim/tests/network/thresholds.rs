//! DLCP's thresholds (Appendix B): what `fanin plan --thresholds` expects of a port, and what one
//! loses here.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use fanin_plan::{DroppingPort, ImpactCurve, LayerQueue};
use fanin_sim::net::{
    Actor, Class, Context, LinkConfig, NodeConfig, NodeId, Packet, Parts, QueueConfig, SimAddress, Time,
    Topology,
};
use oorandom::Rand64;

use crate::support::*;

/// Bytes of a packet on the link, headers and framing included.
const PACKET_BYTES: u32 = 1500;
/// The drop class of small gradients; that of large ones is 0.
const SMALL: u8 = 1;

/// Sends packets of one queue at the times of a Poisson process, some of them small gradients'.
struct Gradients {
    to: NodeId,
    queue: u8,
    small_share: f64,
    mean_gap_nanos: f64,
    next_nanos: f64,
    dice: Rand64,
    sent: Rc<Cell<[u64; 2]>>,
}

impl Gradients {
    fn wait(&mut self, context: &mut Context<'_>) {
        self.next_nanos -= (1.0 - self.dice.rand_float()).ln() * self.mean_gap_nanos;
        context.wake_at(Time((self.next_nanos * 1000.0) as u64), 0);
    }
}

impl Actor for Gradients {
    fn start(&mut self, context: &mut Context<'_>) {
        self.wait(context);
    }

    fn packet(&mut self, _: &mut Context<'_>, _: &Packet<'_>) {}

    fn timer(&mut self, context: &mut Context<'_>, _: u64) {
        let is_small = self.dice.rand_float() < self.small_share;
        let mut sent = self.sent.get();
        sent[usize::from(is_small)] += 1;
        self.sent.set(sent);
        let class = Class { priority: self.queue, drop_class: u8::from(is_small) * SMALL, ..Class::DEFAULT };
        let tag = u64::from(2 * self.queue) + u64::from(is_small);
        context.send_blank(SimAddress::new(self.to, PORT), class, PACKET_BYTES - 66, tag);
        self.wait(context);
    }
}

/// The share of each queue's small and large gradients that a port with these thresholds (small,
/// whole queue, in packets) loses.
fn losses(port: &DroppingPort, thresholds: &[(usize, usize)], seed: u64) -> Vec<[f64; 2]> {
    let mut parts = Parts::uniform(LinkConfig::new(8 * GBIT, Duration::ZERO));
    let bytes = |packets: usize| packets as u64 * u64::from(PACKET_BYTES);
    let mut host = NodeConfig::new(QueueConfig::tail_drop(0));
    for (queue, (small, packets)) in host.queues.iter_mut().zip(thresholds) {
        *queue = QueueConfig::tail_drop(bytes(*packets)).with_drop_threshold(SMALL, bytes(*small));
    }
    parts.host = host;
    let mut network = network(Topology::one_rack(2, &parts).unwrap(), seed);
    let (from, to) = (node(&network, "h0"), node(&network, "h1"));
    let arrivals = sink(&mut network, to);
    let size: f64 = port.queues.iter().map(|queue| queue.size).sum();
    let sent: Vec<_> = (0..)
        .zip(&port.queues)
        .map(|(queue, layers)| {
            let sent = Rc::new(Cell::new([0; 2]));
            let load = port.load * layers.size / size;
            let source = Gradients {
                to,
                queue,
                small_share: port.small_share,
                mean_gap_nanos: f64::from(PACKET_BYTES) / load,
                next_nanos: 0.0,
                dice: Rand64::new((seed * 100 + u64::from(queue)).into()),
                sent: Rc::clone(&sent),
            };
            network.add_actor(from, PORT + u16::from(queue), source);
            sent
        })
        .collect();
    network.run_until(Time::from_nanos(400_000 * u64::from(PACKET_BYTES)));
    let mut arrived = vec![[0_u64; 2]; sent.len()];
    for (_, _, tag, _) in arrivals.borrow().iter() {
        arrived[*tag as usize / 2][*tag as usize % 2] += 1;
    }
    let lost = |(sent, arrived): (&Rc<Cell<[u64; 2]>>, &[u64; 2])| {
        // Large ones are counted first, and said last.
        [1, 0].map(|class| 1.0 - arrived[class] as f64 / sent.get()[class] as f64)
    };
    sent.iter().zip(&arrived).map(lost).collect()
}

fn impact(port: &DroppingPort, losses: &[[f64; 2]]) -> f64 {
    port.queues
        .iter()
        .zip(losses)
        .map(|(queue, [small, large])| queue.small.at(*small) + queue.large.at(*large))
        .sum()
}

/// Three layers, of which the later cost more and small gradients less, as in DLCP's Figures 4 and
/// 5.
fn port(load: f64, buffer_packets: usize) -> DroppingPort {
    let curve = |free, rounds| ImpactCurve::new(vec![(0.0, 0.0), (free, 0.0), (0.05, rounds)]).unwrap();
    let queue = |size, rounds: f64| LayerQueue {
        size,
        small: curve(0.016, rounds),
        large: curve(0.001, 5.0 * rounds),
    };
    let queues = vec![queue(1.0, 3.0), queue(1.0, 6.0), queue(2.0, 12.0)];
    DroppingPort { queues, small_share: 0.5, load, buffer_packets }
}

/// The cost of the planned thresholds here, and of the sequences T (1, 1 + d, 1 + 2 d) of §4.2 with
/// the same room: small gradients are dropped there, and large ones where a third of it is full.
fn costs(port: &DroppingPort) -> (f64, Vec<f64>) {
    let planned: Vec<_> =
        port.best().unwrap().queues.iter().map(|queue| (queue.small_packets, queue.packets)).collect();
    let third = port.buffer_packets / 3;
    let sequences = [(0.25, 0.0), (0.25, 0.5), (0.5, 0.0), (0.5, 0.5), (1.0, 0.0)].map(|(t, d)| {
        let small = |queue| (t * third as f64 * (1.0 + d * f64::from(queue))) as usize;
        let thresholds = [0, 1, 2].map(|queue| (small(queue), third));
        impact(port, &losses(port, &thresholds, 1))
    });
    (impact(port, &losses(port, &planned, 1)), sequences.into())
}

#[test]
fn on_a_link_that_carries_all_on_average_planned_thresholds_cost_least_and_less_than_expected() {
    for (load, buffer_packets) in [(0.8, 30), (0.95, 30), (0.95, 60), (0.95, 120)] {
        let port = port(load, buffer_packets);
        let (planned, sequences) = costs(&port);
        println!("load {load}, {buffer_packets} packets: {planned:.2} planned, {sequences:.2?} of sequences");
        // Packets are of one length, and what waits for a small gradient's room may use a large
        // one's.
        assert!(planned <= port.best().unwrap().impact);
        assert!(sequences.iter().all(|cost| planned < *cost), "{planned} {sequences:?}");
    }
}

/// The model has small and large gradients wait apart: so both are lost alike, however soon small
/// ones are dropped. Here they share a queue.
#[test]
fn on_a_link_that_does_not_some_sequence_costs_less_than_planned_thresholds() {
    for buffer_packets in [30, 60, 120] {
        let (planned, sequences) = costs(&port(1.2, buffer_packets));
        println!("load 1.2, {buffer_packets} packets: {planned:.2} planned, {sequences:.2?} of sequences");
        assert!(sequences.iter().any(|cost| *cost < 0.9 * planned), "{planned} {sequences:?}");
    }
}
