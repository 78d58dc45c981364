//! The cost of packets for the hosts that send and receive them.

use std::time::Duration;

use fanin_sim::net::{
    Cost, DropReason, LinkConfig, Network, Outcome, PRIORITIES, Parts, QueueConfig, Time, Topology,
};

use crate::support::*;

/// A rack of `byte_a_nano` links, whose hosts cost this.
fn rack_of(hosts: usize, sends: Cost, receives: Cost) -> Network {
    let mut parts = Parts::uniform(byte_a_nano());
    (parts.host.sends, parts.host.receives) = (sends, receives);
    network(Topology::one_rack(hosts, &parts).unwrap(), 1)
}

fn times(arrivals: &Arrivals) -> Vec<Time> {
    arrivals.borrow().iter().map(|arrival| arrival.0).collect()
}

#[test]
fn a_core_receives_packets_one_after_the_other() {
    let mut network = rack_of(3, Cost::NOTHING, Cost::of_packet(Time::from_micros(5)));
    let [a, b, to] = ["h0", "h1", "h2"].map(|name| node(&network, name));
    let arrivals = sink(&mut network, to);
    for from in [a, b] {
        source(&mut network, from, vec![Shot::new(Time::ZERO, to, 962, 0)]);
    }
    network.run_until(Time::from_millis(1));
    // The second one arrives 1 us after the first and waits for it.
    assert_eq!(times(&arrivals), [Time::from_micros(4 + 5), Time::from_micros(4 + 10)]);
}

#[test]
fn a_core_sends_packets_one_after_the_other_by_their_length() {
    let cost = Cost { byte: Time::from_nanos(2), ..Cost::of_packet(Time::from_micros(3)) };
    let mut network = rack_of(2, cost, Cost::NOTHING);
    let [from, to] = ["h0", "h1"].map(|name| node(&network, name));
    let arrivals = sink(&mut network, to);
    source(&mut network, from, [962, 462].map(|bytes| Shot::new(Time::ZERO, to, bytes, 0)).to_vec());
    assert_eq!(network.run_until(Time::from_millis(1)), Outcome::Idle);
    // Frames of 976 and 476 bytes occupy the core for 4.952 and 3.952 us; two links take 4 and 3
    // us.
    assert_eq!(times(&arrivals), [Time::from_nanos(4_952 + 4_000), Time::from_nanos(4_952 + 3_952 + 3_000)]);
}

#[test]
fn cores_work_beside_each_other_and_packets_keep_their_order() {
    let cost = Cost { packet: Time::ZERO, byte: Time::from_nanos(10), cores: 2 };
    let mut network = rack_of(2, cost, Cost::NOTHING);
    let [from, to] = ["h0", "h1"].map(|name| node(&network, name));
    let arrivals = sink(&mut network, to);
    let shots = [986, 86, 86].into_iter().zip(0..).map(|(bytes, tag)| Shot::new(Time::ZERO, to, bytes, tag));
    source(&mut network, from, shots.collect());
    network.run_until(Time::from_millis(1));
    assert_eq!(tags(&arrivals), [0, 1, 2]);
    // The first occupies one core for 10 us; both others are through on the other by then, and
    // wait.
    assert_eq!(times(&arrivals)[0], Time::from_nanos(10_000 + 2 * (1024 + 1000)));
    assert_eq!(times(&arrivals)[2], Time::from_nanos(10_000 + 2 * (1024 + 1000) + 2 * 124));
}

#[test]
fn what_waits_for_a_core_beyond_the_nics_memory_is_dropped_and_counted() {
    let mut parts = Parts::uniform(byte_a_nano());
    parts.host.receives = Cost::of_packet(Time::from_micros(10));
    parts.host.queues = [QueueConfig::tail_drop(2_000); PRIORITIES];
    let mut network = network(Topology::one_rack(2, &parts).unwrap(), 1);
    let [from, to] = ["h0", "h1"].map(|name| node(&network, name));
    let arrivals = sink(&mut network, to);
    let shots = (0..5).map(|tag| Shot::new(Time::from_micros(tag), to, 962, tag));
    source(&mut network, from, shots.collect());
    network.run_until(Time::from_millis(1));
    assert_eq!(tags(&arrivals), [0, 1]);
    assert_eq!(network.node(to).drops.of(DropReason::Host), 3);
}

#[test]
fn a_host_that_goes_down_loses_what_its_cores_have_and_begins_anew() {
    let cost = Cost::of_packet(Time::from_micros(10));
    let mut network = rack_of(2, cost, cost);
    let [from, to] = ["h0", "h1"].map(|name| node(&network, name));
    let arrivals = sink(&mut network, to);
    let at = [0, 0, 100].map(Time::from_micros);
    let shots = at.into_iter().zip(0..).map(|(at, tag)| Shot::new(at, to, 962, tag));
    source(&mut network, from, shots.collect());
    // The first has left, the second has not.
    network.at(Time::from_micros(15), move |network| network.set_node(from, false));
    network.at(Time::from_micros(16), move |network| network.set_node(from, true));
    network.run_until(Time::from_millis(1));
    // The source begins again with its host: the first two go out once more.
    assert_eq!(tags(&arrivals), [0, 0, 1, 2]);
    assert_eq!(network.node(from).drops.of(DropReason::NodeDown), 1);
    assert_eq!(network.progress().packets, 0);
}

/// Gbit/s of frames of so many bytes from one host to another over 100 Gbit/s, at this cost.
fn frames_gbps(cost: Cost, frame_bytes: u32) -> f64 {
    const PACKETS: u64 = 20_000;
    let mut parts = Parts::uniform(LinkConfig::new(100 * GBIT, Duration::from_micros(1)));
    (parts.host.sends, parts.host.receives) = (cost, cost);
    let mut network = network(Topology::one_rack(2, &parts).unwrap(), 1);
    let [from, to] = ["h0", "h1"].map(|name| node(&network, name));
    let arrivals = sink(&mut network, to);
    let shots = (0..PACKETS).map(|tag| Shot::new(Time::ZERO, to, frame_bytes - 14, tag));
    source(&mut network, from, shots.collect());
    network.run_until(Time::from_millis(10));
    let times = times(&arrivals);
    assert_eq!(times.len() as u64, PACKETS);
    let seconds = times[times.len() - 1].since(times[0]).as_secs_f64();
    (PACKETS - 1) as f64 * f64::from(frame_bytes) * 8.0 / seconds / 1e9
}

/// ATP's hosts move 60 Gbit/s in frames of 306 bytes (ATP §1, §5.5, Appendix D.1). This is 1.3
/// times what they do without the two-pass switch (Figure 19), whose frames are SwitchML's of 180
/// bytes (§4). Two figures, two unknowns: the line through them is exact, and says nothing about a
/// third length. Figure 19 is assumed to count whole frames.
#[test]
fn a_cost_of_17_5_ns_a_packet_and_76_ps_a_byte_is_that_of_atps_and_switchmls_hosts() {
    let nanos = |bytes: f64, gbps: f64| bytes * 8.0 / gbps;
    let (long, short) = (nanos(306.0, 60.0), nanos(180.0, 60.0 / 1.3));
    let byte = (long - short) / (306.0 - 180.0);
    let packet = long - 306.0 * byte;
    assert!((byte - 0.076).abs() < 0.0005, "{byte} ns a byte");
    assert!((packet - 17.5).abs() < 0.05, "{packet} ns a packet");

    let cost = Cost { byte: Time(76), ..Cost::of_packet(Time(17_500)) };
    let (atp, switchml) = (frames_gbps(cost, 306), frames_gbps(cost, 180));
    assert!((atp / 60.0 - 1.0).abs() < 0.005, "{atp} Gbit/s");
    assert!((switchml / (60.0 / 1.3) - 1.0).abs() < 0.005, "{switchml} Gbit/s");
    // Gradients are 248 bytes of one (§3.6) and 128 of the other: in them ATP is 1.48 times as
    // fast. Figure 8 has at most 1.5 in training throughput.
    let payload = atp * 248.0 / 306.0 / (switchml * 128.0 / 180.0);
    assert!((payload - 1.48).abs() < 0.01, "{payload}");
}
