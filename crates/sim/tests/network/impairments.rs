//! Links lose, double and hold back packets.

use std::time::Duration;

use fanin_sim::net::{
    Body, DropReason, Impairment, LinkId, Loss, Network, Packet, PortStatistics, QueueConfig, Time,
};

use crate::support::*;

/// Sends `packets` numbered packets over a link with this impairment, one every 10 us; what
/// arrived, and the link.
fn over(impairment: Impairment, packets: u64) -> (Vec<u64>, PortStatistics) {
    let (network, arrivals) = sent_over(impairment, packets, 3);
    (tags(&arrivals), network.port(LinkId(0).ports()[0]))
}

fn sent_over(impairment: Impairment, packets: u64, seed: u64) -> (Network, Arrivals) {
    let mut network = network(rack(2, QueueConfig::tail_drop(1 << 20)), seed);
    let (from, to) = (node(&network, "h0"), node(&network, "h1"));
    let arrivals = sink(&mut network, to);
    network.impair(LinkId(0).ports()[0], impairment);
    let shots = (0..packets).map(|tag| Shot::new(Time::from_micros(10 * tag), to, 200, tag));
    source(&mut network, from, shots.collect());
    network.run_until(Time::from_millis(100_000));
    assert_eq!(network.progress().packets, 0);
    (network, arrivals)
}

#[test]
fn uniform_loss_has_its_rate() {
    let (arrived, port) = over(Loss::Uniform(0.02).into(), 50_000);
    let lost = port.drops.of(DropReason::Loss);
    assert_eq!(arrived.len() as u64 + lost, 50_000);
    // 1000, give or take four standard deviations of 31.
    assert!((875..1125).contains(&lost), "{lost}");
}

#[test]
fn gilbert_and_elliott_lose_in_bursts_of_the_right_length() {
    // A quarter of the time bad, 10 packets at a time, of which it loses half.
    let loss = Loss::GilbertElliott { to_bad: 1.0 / 30.0, to_good: 0.1, loss_good: 0.0, loss_bad: 0.5 };
    let (arrived, port) = over(loss.into(), 100_000);
    let rate = port.drops.of(DropReason::Loss) as f64 / 1e5;
    assert!((rate / 0.125 - 1.0).abs() < 0.08, "{rate}");
    // After a lost packet the next is lost with 0.9 * 0.5: the state stays bad.
    let mut here = vec![false; 100_000];
    for tag in arrived {
        here[tag as usize] = true;
    }
    let pairs = here.windows(2).filter(|pair| !pair[0]).count() as f64;
    let both = here.windows(2).filter(|pair| !pair[0] && !pair[1]).count() as f64;
    assert!((both / pairs / 0.45 - 1.0).abs() < 0.06, "{}", both / pairs);
}

#[test]
fn targeted_loss_takes_the_packets_that_it_names() {
    let even = |packet: &Packet<'_>| matches!(packet.body, Body::Blank { tag, .. } if tag % 2 == 0);
    let loss = Loss::Targeted { which: Box::new(even), nth: vec![0, 2, 3] };
    let (arrived, _) = over(loss.into(), 10);
    assert_eq!(arrived, [1, 2, 3, 5, 7, 8, 9]);
    let (arrived, _) = over(Loss::Matching(Box::new(even)).into(), 6);
    assert_eq!(arrived, [1, 3, 5]);
}

#[test]
fn duplication_has_its_rate_and_the_twin_follows_at_once() {
    let (arrived, port) = over(Impairment { duplication: 0.1, ..Impairment::default() }, 10_000);
    assert_eq!(arrived.len() as u64, 10_000 + port.duplicated);
    assert!((880..1120).contains(&port.duplicated), "{}", port.duplicated);
    assert!(arrived.is_sorted());
}

#[test]
fn what_is_held_back_is_overtaken() {
    let impairment =
        Impairment { reordering: 0.1, held_back: Duration::from_micros(25), ..Impairment::default() };
    let (arrived, port) = over(impairment, 10_000);
    assert_eq!(arrived.len(), 10_000);
    assert!((880..1120).contains(&port.held_back), "{}", port.held_back);
    let overtaken = arrived.windows(2).filter(|pair| pair[0] > pair[1]).count() as u64;
    // Three of five are held back by more than a gap of 10 us.
    assert!(overtaken > port.held_back / 2 && overtaken <= port.held_back, "{overtaken}");
}

#[test]
#[should_panic(expected = "a chance that is not from 0 to 1")]
fn a_chance_that_is_none_is_refused() {
    over(Loss::Uniform(1.5).into(), 1);
}

#[test]
fn the_same_seed_loses_the_same_packets_and_another_seed_others() {
    let run = |seed| {
        let (network, arrivals) = sent_over(Loss::Uniform(0.3).into(), 200, seed);
        (network.digest(), tags(&arrivals))
    };
    assert_eq!(run(1), run(1));
    let ((one, first), (two, second)) = (run(1), run(2));
    assert!(one != two && first != second);
}

#[test]
fn faults_that_come_again_take_other_packets() {
    let mut network = network(rack(2, QueueConfig::tail_drop(1 << 20)), 3);
    let (from, to) = (node(&network, "h0"), node(&network, "h1"));
    let arrivals = sink(&mut network, to);
    for interval in 0..2 {
        network.at(Time::from_micros(1000 * interval), |network| {
            network.impair(LinkId(0).ports()[0], Loss::Uniform(0.5).into());
        });
    }
    let shots = (0..200).map(|tag| Shot::new(Time::from_micros(10 * tag + 5), to, 200, tag));
    source(&mut network, from, shots.collect());
    network.run_until(Time::from_millis(10));
    let (first, second): (Vec<_>, Vec<_>) = tags(&arrivals).into_iter().partition(|tag| *tag < 100);
    assert!(first.len() > 30 && second.len() > 30);
    assert_ne!(first, second.iter().map(|tag| tag - 100).collect::<Vec<_>>());
}
