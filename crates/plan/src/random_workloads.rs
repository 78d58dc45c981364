//! Workloads of all shapes, for tests.

use oorandom::Rand64;

use crate::sub_models::{Job, SubModel, Workload};
use crate::topology::{Link, Node, NodeId, NodeKind, Topology};

fn between(random: &mut Rand64, least: usize, most: usize) -> usize {
    random.rand_range(least as u64..most as u64 + 1) as usize
}

/// A tree of switches with some links more, hosts anywhere, a half of the switches programmable
/// with 1 to 64 MB, and links of 1 to 100 Gbit/s.
pub(crate) fn topology(random: &mut Rand64) -> Topology {
    let switches = between(random, 2, 8);
    let hosts = between(random, 4, 16);
    let rates = [1e9, 10e9, 25e9, 100e9];
    let mut nodes = Vec::new();
    let mut links = Vec::new();
    let id = |index: usize| NodeId(index as u16);
    for index in 0..switches {
        let memory_bytes = (random.rand_float() < 0.5).then(|| between(random, 1, 64) as u64 * 1_000_000);
        nodes.push(Node { name: format!("s{index}"), kind: NodeKind::Switch { memory_bytes } });
        if index > 0 {
            let other = between(random, 0, index - 1);
            links.push(Link { ends: [id(index), id(other)], rate_bps: rates[between(random, 1, 3)] });
        }
    }
    for _ in 0..between(random, 0, switches) {
        let (a, b) = (between(random, 0, switches - 1), between(random, 0, switches - 1));
        if a != b {
            links.push(Link { ends: [id(a), id(b)], rate_bps: rates[between(random, 1, 3)] });
        }
    }
    for index in 0..hosts {
        nodes.push(Node { name: format!("h{index}"), kind: NodeKind::Host });
        let leaf = between(random, 0, switches - 1);
        links.push(Link { ends: [id(switches + index), id(leaf)], rate_bps: rates[between(random, 0, 2)] });
    }
    Topology::new(nodes, links).expect("a topology")
}

/// A workload of one or two jobs of 20 to 220 MB, in sub-models of up to `part_max` of that.
pub(crate) fn workload(seed: u64, jobs_max: usize, servers_max: usize, part_max: f64) -> Workload {
    let mut random = Rand64::new(u128::from(seed));
    let topology = topology(&mut random);
    let hosts: Vec<_> = topology.hosts().collect();
    let jobs = (0..between(&mut random, 1, jobs_max))
        .map(|index| {
            let mut its = hosts.clone();
            for place in 0..its.len() {
                its.swap(place, between(&mut random, place, hosts.len() - 1));
            }
            let servers = between(&mut random, 1, servers_max.min(its.len() - 1));
            let workers = between(&mut random, 2, its.len() - 1);
            let bytes = between(&mut random, 20, 220) as f64 * 1e6;
            let mut sub_models = Vec::new();
            let mut left = bytes;
            while left > 0.0 {
                let part = (bytes * part_max * (0.2 + 0.8 * random.rand_float())).min(left).ceil();
                sub_models.push(SubModel { name: format!("g{}", sub_models.len()), bytes: part as u64 });
                left -= part;
            }
            Job {
                name: format!("job{index}"),
                // The servers come from the end, so that some train as well.
                servers: its[its.len() - servers..].into(),
                workers: its[..workers].into(),
                sub_models,
            }
        })
        .collect();
    Workload::new(topology, jobs).expect("a workload")
}
