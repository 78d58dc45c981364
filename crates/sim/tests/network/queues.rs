//! Queues hold, mark and drop packets.

use fanin_sim::net::{Buffer, DropReason, NodeConfig, NodeKind, Parts, PortId, QueueConfig, Time, Topology};

use crate::support::*;

/// `shots` from each of two hosts to a third at once; returns the network after it, the third's
/// arrivals, and the switch's port to it. If two packets arrive at once, one goes out and one
/// waits.
fn funnel(topology: Topology, shots: &[(u32, u8, u8)]) -> (fanin_sim::net::Network, Arrivals, PortId) {
    let mut network = network(topology, 1);
    let [a, b, to, switch] = ["h0", "h1", "h2", "s0"].map(|name| node(&network, name));
    let arrivals = sink(&mut network, to);
    for (from, offset) in [(a, 0), (b, 100)] {
        let shots = shots.iter().enumerate().map(|(tag, (bytes, priority, drop_class))| {
            Shot::new(Time::ZERO, to, *bytes, offset + tag as u64).with_class(*priority, *drop_class)
        });
        source(&mut network, from, shots.collect());
    }
    network.run_until(Time::from_millis(10));
    let link = network.topology().link_between(switch, to).unwrap();
    let port = network.topology().port(switch, link).unwrap();
    assert_eq!(network.progress().packets, 0);
    (network, arrivals, port)
}

#[test]
fn a_full_queue_drops_at_its_tail() {
    // Ten packets a host of 1000 bytes on the link; two arrive in the time of one.
    let shots = [(962, 0, 0); 10];
    let (network, arrivals, port) = funnel(rack(3, QueueConfig::tail_drop(4000)), &shots);
    let queue = network.queue(port, 0);
    assert_eq!(queue.bytes_max, 4000);
    assert_eq!(arrivals.borrow().len() as u64 + queue.drops.of(DropReason::Tail), 20);
    assert_eq!(network.port(port).drops.total(), queue.drops.of(DropReason::Tail));
    // Every microsecond two come and one leaves: it holds 1, 2, 3, 4 afterwards, and from then on
    // one of two finds no place. If the two come before the one leaves at the same moment, that
    // begins one microsecond earlier.
    assert!((6..=7).contains(&queue.drops.of(DropReason::Tail)));
}

#[test]
fn the_mean_length_is_that_of_what_waited() {
    // The second of two packets waits 1 us; the mean over 10 ms is 1000 bytes for 1 us.
    let (network, _, port) = funnel(rack(3, QueueConfig::tail_drop(10_000)), &[(962, 0, 0)]);
    let queue = network.queue(port, 0);
    let seconds = network.time().as_secs_f64();
    assert!((queue.bytes_mean - 1000.0 * 1e-6 / seconds).abs() < 1e-9);
    assert!((queue.packets_mean - 1e-6 / seconds).abs() < 1e-12);
    assert_eq!((queue.bytes, queue.packets, queue.bytes_max), (0, 0, 1000));
    assert_eq!(network.port(port).busy, Time::from_micros(2));
}

#[test]
fn a_queue_marks_what_makes_it_longer_than_its_threshold() {
    let config = QueueConfig::tail_drop(1 << 20).with_ecn(2000);
    let mut network = network(rack(3, config), 1);
    let [a, b, to] = ["h0", "h1", "h2"].map(|name| node(&network, name));
    for from in [a, b] {
        let config = fanin_sim::net::ConstantRateConfig {
            from,
            to,
            class: fanin_sim::net::Class::default(),
            rate_bps: 8 * GBIT,
            datagram_bytes: 962,
            ecn: from == a,
        };
        network.start_constant_rate(config);
    }
    network.run_until(Time::from_micros(100));
    let switch = node(&network, "s0");
    let link = network.topology().link_between(switch, to).unwrap();
    let port = network.topology().port(switch, link).unwrap();
    let queue = network.queue(port, 0);
    // Every microsecond two come and one goes. The first 2 us are the way to the switch. After n
    // more, n wait. All packets of flows that understand marks are marked but the two or three that
    // came while at most 2000 bytes waited.
    let came = network.flow(fanin_sim::net::FlowId(0)).sent_packets - 2;
    assert!((came - 4..=came - 1).contains(&queue.marked), "{} of {came}", queue.marked);
    assert!(queue.bytes_max > 90_000);
}

#[test]
fn the_urgent_queue_goes_first_and_a_queue_keeps_its_order() {
    let shots: Vec<_> = (0..8).map(|at| (962, 7 - at, 0)).collect();
    // The hosts' own NICs hold back what is less urgent, too.
    let (_, arrivals, _) = funnel(rack(3, QueueConfig::tail_drop(1 << 20)), &shots);
    let tags = tags(&arrivals);
    // Both NICs are idle, so that the first packet of each goes at once: the least urgent one. All
    // others by urgency: 7 is 0's.
    assert_eq!(tags.len(), 16);
    let rest: Vec<_> = tags.iter().map(|tag| tag % 100).filter(|tag| *tag != 0).collect();
    let mut sorted = rest.clone();
    sorted.sort_by(|a, b| b.cmp(a));
    assert_eq!(rest, sorted);
}

#[test]
fn what_is_less_urgent_waits_as_long_as_anything_more_urgent_comes() {
    // Two hosts fill the third's link with priority 1 and 2: all of 2 but the first packet waits
    // for the last of 1.
    let mut network = network(rack(3, QueueConfig::tail_drop(1 << 20)), 1);
    let [a, b, to] = ["h0", "h1", "h2"].map(|name| node(&network, name));
    let arrivals = sink(&mut network, to);
    for (from, priority) in [(a, 2), (b, 1)] {
        let shots = (0..50).map(|_| Shot::new(Time::ZERO, to, 962, priority.into()).with_class(priority, 0));
        source(&mut network, from, shots.collect());
    }
    network.run_until(Time::from_millis(1));
    let tags = tags(&arrivals);
    assert_eq!(tags.len(), 100);
    assert_eq!(tags[..2].iter().sum::<u64>(), 3);
    assert!(tags[2..51].iter().all(|tag| *tag == 1) && tags[51..].iter().all(|tag| *tag == 2));
}

#[test]
fn packets_of_a_drop_class_go_when_the_queue_is_longer_than_their_threshold() {
    let config = QueueConfig::tail_drop(1 << 20).with_drop_threshold(3, 5000);
    // Alternately of classes 0 and 3.
    let shots: Vec<_> = (0..40).map(|at| (962, 0, 3 * (at % 2))).collect();
    let (network, arrivals, port) = funnel(rack(3, config), &shots);
    let queue = network.queue(port, 0);
    let dropped = queue.drops.of(DropReason::Selective);
    assert_eq!(queue.drops.total(), dropped);
    let arrived = |odd| arrivals.borrow().iter().filter(|arrival| arrival.2 % 2 == odd).count() as u64;
    assert_eq!(arrived(0), 40);
    assert_eq!(arrived(1) + dropped, 40);
    assert!(dropped > 20, "{dropped}");
}

fn shared(hosts: usize, bytes: u64, alpha: f64) -> Topology {
    let mut parts = Parts::uniform(byte_a_nano());
    parts.switch = NodeConfig::new(QueueConfig::tail_drop(u64::MAX));
    parts.switch.buffer = Buffer::Shared { bytes, alpha };
    Topology::one_rack(hosts, &parts).unwrap()
}

#[test]
fn full_queues_share_a_buffer_as_the_dynamic_threshold_says() {
    // Each of n queues that are always full gets alpha / (1 + n * alpha) of the memory.
    for (queues, alpha) in [(1, 1.0), (2, 1.0), (3, 0.5), (2, 4.0)] {
        let memory = 1_000_000;
        let mut network = network(shared(4 * queues, memory, alpha), 1);
        // Three senders a queue, staggered by the nature of their rates.
        for queue in 0..queues {
            for sender in 0..3 {
                network.start_constant_rate(fanin_sim::net::ConstantRateConfig {
                    from: node(&network, &format!("h{}", queues + 3 * queue + sender)),
                    to: node(&network, &format!("h{queue}")),
                    class: fanin_sim::net::Class::default(),
                    rate_bps: 7 * GBIT,
                    datagram_bytes: 962,
                    ecn: false,
                });
            }
        }
        network.run_until(Time::from_millis(3));
        let share = alpha / (1.0 + queues as f64 * alpha) * memory as f64;
        let switch = node(&network, "s0");
        for queue in 0..queues {
            let to = node(&network, &format!("h{queue}"));
            let link = network.topology().link_between(switch, to).unwrap();
            let queue = network.queue(network.topology().port(switch, link).unwrap(), 0);
            assert!((queue.bytes as f64 / share - 1.0).abs() < 0.02, "{} of {share}", queue.bytes);
            assert!(queue.drops.of(DropReason::Buffer) > 0);
        }
        assert!(network.node(switch).buffer_bytes_max <= memory);
    }
}

#[test]
fn a_port_may_have_queues_of_its_own() {
    let mut topology = rack(3, QueueConfig::tail_drop(4000));
    let (switch, to) = (topology.node("s0").unwrap(), topology.node("h2").unwrap());
    let port = topology.port(switch, topology.link_between(switch, to).unwrap()).unwrap();
    topology.set_port_queues(port, [QueueConfig::tail_drop(1 << 20); 8]);
    assert!(matches!(topology.get(switch).kind, NodeKind::Switch { .. }));
    let (network, arrivals, port) = funnel(topology, &[(962, 0, 0); 10]);
    assert_eq!((arrivals.borrow().len(), network.port(port).drops.total()), (20, 0));
}

#[test]
fn the_queues_of_a_port_share_its_memory() {
    let mut parts = Parts::uniform(byte_a_nano());
    parts.switch = NodeConfig::new(QueueConfig::tail_drop(u64::MAX));
    parts.switch.buffer = Buffer::PerPort { bytes: 4000 };
    let topology = Topology::one_rack(3, &parts).unwrap();
    // The limit holds for both priorities alike: four packets wait, whichever they are.
    let shots: Vec<_> = (0..10).map(|at| (962, at % 2, 0)).collect();
    let (network, arrivals, port) = funnel(topology, &shots);
    let drops = network.port(port).drops;
    assert_eq!(arrivals.borrow().len() as u64 + drops.total(), 20);
    assert_eq!(drops.total(), drops.of(DropReason::Buffer));
    // As of one queue of this length.
    assert!((6..=7).contains(&drops.total()), "{}", drops.total());
    assert_eq!(network.node(node(&network, "s0")).buffer_bytes_max, 4000);
    assert!(network.queue(port, 1).bytes_max < 4000 + network.queue(port, 0).bytes_max);
}
