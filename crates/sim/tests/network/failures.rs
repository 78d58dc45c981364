//! Links and nodes that go down and come back.

use std::time::Duration;

use fanin_sim::net::{
    Actor, Class, ConstantRateConfig, Context, DropReason, Network, Outcome, Packet, Parts, TcpConfig, Time,
    Topology,
};

use crate::support::*;

fn leaf_spine() -> Network {
    network(Topology::leaf_spine(2, 2, 2, &Parts::uniform(byte_a_nano())).unwrap(), 1)
}

fn constant_rate(network: &mut Network, from: &str, to: &str) -> fanin_sim::net::FlowId {
    let config = ConstantRateConfig {
        from: node(network, from),
        to: node(network, to),
        class: Class::default(),
        rate_bps: 4 * GBIT,
        datagram_bytes: 962,
        ecn: false,
    };
    network.start_constant_rate(config)
}

#[test]
fn a_flow_finds_another_way_when_its_link_fails_and_loses_only_what_was_on_it() {
    let mut network = leaf_spine();
    let flow = constant_rate(&mut network, "h0", "h2");
    network.run_until(Time::from_micros(100));
    let topology = network.topology().clone();
    let leaf = node(&network, "leaf0");
    let up: Vec<_> = ["spine0", "spine1"]
        .map(|spine| {
            let link = topology.link_between(leaf, topology.node(spine).unwrap()).unwrap();
            (link, topology.port(leaf, link).unwrap())
        })
        .to_vec();
    let (used, other) = if network.port(up[0].1).sent_packets > 0 { (up[0], up[1]) } else { (up[1], up[0]) };
    assert_eq!(network.port(other.1).sent_packets, 0);
    network.set_link(used.0, false);
    network.run_until(Time::from_micros(200));
    assert!(network.port(other.1).sent_packets > 45);
    let lost = network.port(used.1).drops.of(DropReason::LinkDown);
    // A packet every 2 us, 2 us on the link.
    assert!((1..=2).contains(&lost), "{lost}");
    network.set_link(used.0, true);
    let before = network.port(used.1).sent_packets;
    network.run_until(Time::from_micros(300));
    assert!(network.port(used.1).sent_packets > before + 45, "it goes back");
    let statistics = network.flow(flow);
    let on_the_way = network.progress().packets as u64;
    assert_eq!(statistics.delivered_bytes / 934 + lost + on_the_way, statistics.sent_packets);
}

#[test]
fn without_any_way_left_packets_are_counted_and_a_connection_goes_on_afterwards() {
    let mut network = leaf_spine();
    let flow = network.open_tcp(TcpConfig::new(node(&network, "h0"), node(&network, "h2")));
    network.write(flow, 10_000_000, None);
    let links: Vec<_> = network
        .topology()
        .neighbours(node(&network, "leaf0"))
        .filter(|(other, _)| network.topology().layer(*other).is_some())
        .map(|(_, link)| link)
        .collect();
    let again = links.clone();
    network.at(Time::from_millis(1), move |network| {
        links.iter().for_each(|link| network.set_link(*link, false))
    });
    network.at(Time::from_millis(50), move |network| {
        again.iter().for_each(|link| network.set_link(*link, true))
    });
    network.run_until(Time::from_millis(49));
    assert!(network.node(node(&network, "leaf0")).drops.of(DropReason::NoRoute) > 0);
    let stuck = network.flow(flow);
    assert!(stuck.timeouts > 0 && stuck.completed.is_none());
    network.run_until(Time::from_millis(2000));
    let done = network.flow(flow);
    assert_eq!(done.delivered_bytes, 10_000_000);
    assert!(done.completed.is_some());
}

/// Counts what happens to it.
#[derive(Default)]
struct Clock {
    starts: u32,
    ticks: u32,
    notices: u32,
}

impl Actor for Clock {
    fn start(&mut self, context: &mut Context<'_>) {
        self.starts += 1;
        context.wake_after(Duration::from_micros(10), 0);
    }

    fn packet(&mut self, _: &mut Context<'_>, _: &Packet<'_>) {}

    fn timer(&mut self, context: &mut Context<'_>, _: u64) {
        self.ticks += 1;
        context.wake_after(Duration::from_micros(10), 0);
    }

    fn notice(&mut self, _: &mut Context<'_>, _: u64) {
        self.notices += 1;
    }
}

#[test]
fn actors_of_a_node_that_is_down_do_nothing_and_start_again_when_it_is_back() {
    let mut network = leaf_spine();
    let host = node(&network, "h0");
    let clock = network.add_actor(host, PORT, Clock::default());
    network.at(Time::from_micros(55), move |network| network.set_node(host, false));
    network.at(Time::from_micros(60), move |network| {
        network.notify(fanin_sim::net::Notice { actor: clock, token: 0 });
    });
    network.at(Time::from_micros(101), move |network| network.set_node(host, true));
    network.run_until(Time::from_micros(145));
    let state: &Clock = network.actor(clock).unwrap();
    assert_eq!((state.starts, state.ticks, state.notices), (2, 5 + 4, 0));
}

#[test]
fn a_replaced_actor_begins_without_the_timers_of_the_old_one() {
    let mut network = leaf_spine();
    let host = node(&network, "h0");
    let clock = network.add_actor(host, PORT, Clock::default());
    network.run_until(Time::from_micros(55));
    let old = network.replace_actor(clock, Clock::default());
    let old = (old as Box<dyn std::any::Any>).downcast::<Clock>().unwrap();
    assert_eq!((old.starts, old.ticks), (1, 5));
    network.run_until(Time::from_micros(80));
    let state: &Clock = network.actor(clock).unwrap();
    assert_eq!((state.starts, state.ticks), (1, 2));
    network.with_actor(clock, |clock: &mut Clock, context| {
        clock.ticks = 0;
        context.wake_after(Duration::from_micros(1), 0);
    });
    network.run_until(Time::from_micros(82));
    assert_eq!(network.actor::<Clock>(clock).unwrap().ticks, 1);
}

#[test]
fn a_switch_that_is_down_takes_what_is_in_it_along() {
    let mut network = network(rack(3, fanin_sim::net::QueueConfig::tail_drop(1 << 20)), 1);
    let switch = node(&network, "s0");
    let flows = ["h0", "h1"].map(|from| constant_rate(&mut network, from, "h2"));
    network.start_constant_rate(ConstantRateConfig {
        from: node(&network, "h0"),
        to: node(&network, "h2"),
        class: Class::default(),
        rate_bps: 4 * GBIT,
        datagram_bytes: 962,
        ecn: false,
    });
    network.run_until(Time::from_micros(500));
    network.set_node(switch, false);
    let link = network.topology().link_between(switch, node(&network, "h2")).unwrap();
    let port = network.topology().port(switch, link).unwrap();
    assert_eq!(network.port(port).queue_bytes, 0);
    assert!(network.port(port).drops.of(DropReason::LinkDown) > 100);
    let before = network.flow(flows[0]).delivered_bytes;
    network.run_until(Time::from_micros(600));
    assert_eq!(network.flow(flows[0]).delivered_bytes, before);
    network.set_node(switch, true);
    assert_eq!(network.run_until(Time::from_micros(700)), Outcome::TimeUp);
    assert!(network.flow(flows[0]).delivered_bytes > before + 30 * 934);
}

#[test]
fn a_link_that_is_back_within_a_packets_time_lets_nobody_wait_for_what_it_lost() {
    let link = byte_a_nano().with_mtu(65_535);
    let mut network = network(Topology::one_rack(2, &Parts::uniform(link)).unwrap(), 1);
    let (from, to) = (node(&network, "h0"), node(&network, "h1"));
    let arrivals = sink(&mut network, to);
    // The first takes 60 us; it and the second are lost.
    let shots = [(0, 59_962), (0, 962), (10, 962), (10, 962)];
    let shots =
        shots.iter().zip(0..).map(|((at, bytes), tag)| Shot::new(Time::from_micros(*at), to, *bytes, tag));
    source(&mut network, from, shots.collect());
    let nic = fanin_sim::net::LinkId(0);
    network.at(Time::from_micros(5), move |network| network.set_link(nic, false));
    network.at(Time::from_micros(6), move |network| network.set_link(nic, true));
    network.run_until(Time::from_millis(1));
    let times: Vec<_> = arrivals.borrow().iter().map(|arrival| (arrival.0, arrival.2)).collect();
    assert_eq!(times, [(Time::from_micros(14), 2), (Time::from_micros(15), 3)]);
    assert_eq!(network.port(nic.ports()[0]).drops.of(DropReason::LinkDown), 2);
}
