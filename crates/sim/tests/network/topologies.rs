//! The standard topologies, and what cannot be.

use std::time::Duration;

use fanin_sim::net::{
    Buffer, LinkConfig, Network, NetworkConfig, NodeConfig, Parts, Programmable, TcpConfig, Time, Topology,
    TopologyError,
};

use crate::support::*;

fn parts() -> Parts {
    Parts::uniform(byte_a_nano())
}

fn counts(topology: &Topology) -> (usize, usize, usize) {
    (topology.hosts().count(), topology.switches().count(), topology.links().len())
}

#[test]
fn the_standard_ones_have_as_many_parts_as_they_should() {
    assert_eq!(counts(&Topology::one_rack(8, &parts()).unwrap()), (8, 1, 8));
    assert_eq!(counts(&Topology::dumbbell(3, 5, &parts()).unwrap()), (8, 2, 9));
    assert_eq!(counts(&Topology::figure9(&parts())), (7, 3, 9));
    assert_eq!(counts(&Topology::leaf_spine(4, 2, 8, &parts()).unwrap()), (32, 6, 40));
    // Al-Fares et al., 2008: k = 4 has 16 hosts and 20 switches.
    assert_eq!(counts(&Topology::fat_tree(4, 2, &parts()).unwrap()), (16, 20, 48));
    assert_eq!(counts(&Topology::fat_tree(16, 8, &parts()).unwrap()), (1024, 320, 3072));
    // More hosts at an edge switch than it has ports upwards: 192 on 80 switches.
    assert_eq!(counts(&Topology::fat_tree(8, 6, &parts()).unwrap()), (192, 80, 192 + 256));
}

#[test]
fn figure_9_has_its_workers_where_the_paper_has_them() {
    let topology = Topology::figure9(&parts());
    let switch = |host: &str| {
        let host = topology.node(host).unwrap();
        let (switch, _) = topology.neighbours(host).next().unwrap();
        topology.get(switch).name.clone()
    };
    let switches = ["w0", "w1", "w2", "w3", "w4", "w5", "ps"].map(switch);
    assert_eq!(switches, ["sw0", "sw0", "sw1", "sw1", "sw2", "sw2", "sw2"]);
    let [a, b, c] = ["sw0", "sw1", "sw2"].map(|name| topology.node(name).unwrap());
    assert!(topology.link_between(a, c).is_some() && topology.link_between(b, c).is_some());
    assert!(topology.link_between(a, b).is_none());
}

#[test]
fn every_switch_of_a_fat_tree_has_k_ports_and_every_host_reaches_every_other() {
    let topology = Topology::fat_tree(4, 2, &parts()).unwrap();
    assert!(topology.switches().all(|switch| topology.neighbours(switch).count() == 4));
    let hosts: Vec<_> = topology.hosts().collect();
    let mut network = network(topology, 1);
    let mut flows = Vec::new();
    for from in &hosts {
        for to in hosts.iter().filter(|to| *to != from) {
            let flow = network.open_tcp(TcpConfig::new(*from, *to));
            network.write(flow, 3000, None);
            flows.push(flow);
        }
    }
    network.run_until(Time::from_millis(500));
    assert!(flows.iter().all(|flow| network.flow(*flow).completed.is_some()));
}

#[test]
fn programmable_switches_are_chosen_by_name_layer_or_share() {
    let chosen = |which: Programmable| {
        let mut topology = Topology::leaf_spine(4, 2, 1, &parts()).unwrap();
        topology.set_programmable(&which)?;
        Ok(topology.programmable().map(|node| topology.get(node).name.clone()).collect::<Vec<_>>())
    };
    assert_eq!(chosen(Programmable::Layers(vec![1])).unwrap(), ["spine0", "spine1"]);
    assert_eq!(chosen(Programmable::Names(vec!["leaf2".into()])).unwrap(), ["leaf2"]);
    assert_eq!(chosen(Programmable::Share(0.5)).unwrap(), ["leaf0", "leaf2", "spine0"]);
    assert_eq!(chosen(Programmable::Share(0.0)).unwrap().len(), 0);
    assert_eq!(chosen(Programmable::Share(1.0)).unwrap().len(), 6);
    let unknown = |name: &str| chosen(Programmable::Names(vec![name.into()]));
    assert_eq!(unknown("leaf9"), Err(TopologyError::UnknownNode("leaf9".into())));
    assert_eq!(unknown("h0"), Err(TopologyError::UnknownNode("h0".into())), "a host is no switch");
    assert_eq!(chosen(Programmable::Share(1.5)), Err(TopologyError::Share(1.5)));
}

#[test]
fn what_cannot_be_is_refused_with_its_reason() {
    let refused = |change: &dyn Fn(&mut Topology)| {
        let mut topology = Topology::one_rack(2, &parts()).unwrap();
        change(&mut topology);
        Network::new(topology, NetworkConfig::default()).err()
    };
    assert_eq!(refused(&|_| ()), None);
    let link = fanin_sim::net::LinkId(0);
    let rate =
        |rate| move |topology: &mut Topology| topology.set_link(link, LinkConfig::new(rate, Duration::ZERO));
    assert_eq!(refused(&rate(0)), Some(TopologyError::Rate(link)));
    assert_eq!(refused(&rate(u64::MAX)), Some(TopologyError::Rate(link)));
    let mtu = |topology: &mut Topology| topology.set_link(link, byte_a_nano().with_mtu(67));
    assert_eq!(refused(&mtu), Some(TopologyError::Mtu(link)));
    let name = |topology: &mut Topology| {
        topology.add_host("h0", NodeConfig::host());
    };
    assert_eq!(refused(&name), Some(TopologyError::DuplicateName("h0".into())));
    let itself = |topology: &mut Topology| {
        let host = topology.node("h0").unwrap();
        topology.add_link(host, host, byte_a_nano());
    };
    assert_eq!(refused(&itself), Some(TopologyError::Ends(fanin_sim::net::LinkId(2))));
    for alpha in [0.0, -1.0, f64::NAN] {
        let buffer = move |topology: &mut Topology| {
            let mut config = NodeConfig::switch();
            config.buffer = Buffer::Shared { bytes: 1, alpha };
            let switch = topology.node("s0").unwrap();
            topology.set_node(switch, config);
        };
        assert_eq!(refused(&buffer), Some(TopologyError::Buffer("s0".into())));
    }
    let buffer = |topology: &mut Topology| {
        let mut config = NodeConfig::switch();
        config.buffer = Buffer::PerPort { bytes: 0 };
        let switch = topology.node("s0").unwrap();
        topology.set_node(switch, config);
    };
    assert_eq!(refused(&buffer), Some(TopologyError::Buffer("s0".into())));
    for k in [0, 3, 42] {
        assert!(matches!(Topology::fat_tree(k, 1, &parts()), Err(TopologyError::Parameter(_))));
    }
    assert!(Topology::one_rack(0, &parts()).is_err());
    assert!(Topology::leaf_spine(usize::MAX, 1, usize::MAX, &parts()).is_err());
}
