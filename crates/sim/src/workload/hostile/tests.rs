//! Tests of the scenarios that seeds draw, and of how a scenario that fails is made smaller.

use std::collections::BTreeSet;

use super::super::scenario::{Fault, FaultPlan};
use super::*;

/// The part that fails, from when to when.
fn outage(plan: &FaultPlan) -> Option<(String, Duration, Duration)> {
    let (what, down) = match plan.fault {
        Fault::LinkFails(link, down) => (format!("{link:?}"), down),
        Fault::NodeFails(node, down) => (format!("{node:?}"), down),
        Fault::ServerRestarts(job, down) => (format!("server of {job}"), down),
        Fault::WorkerRespawns(job, rank, down) => (format!("worker {rank} of {job}"), down),
        Fault::SwitchForgets(_) | Fault::ServiceDies(_) | Fault::JobDies(_) => return None,
    };
    Some((what, plan.at, plan.at + down))
}

#[test]
fn every_system_workload_class_buffer_and_fault_is_drawn() {
    let mut drawn = BTreeSet::new();
    for scenario in (0..2000).map(hostile) {
        let mut note = |what: &str| drawn.insert(what.to_owned());
        for job in &scenario.jobs {
            note(job.system.name());
            if let Some(way) = format!("{:?}", job.system).strip_prefix("Dlcp { way: ") {
                let servers = way.split(']').next().expect("a list").matches("NodeId").count();
                note(match (way.starts_with("Ring"), servers) {
                    (true, _) => "dlcp in a ring",
                    (false, 1) => "dlcp with a server",
                    (false, _) => "dlcp with servers",
                });
            }
            if job.system.is_asynchronous() {
                note("asynchronous");
                if matches!(job.workload, Workload::Training { overlap: true, .. }) {
                    note("asynchronous overlap");
                }
            }
            note(if job.integers { "int32" } else { "float32" });
            if job.system.name() != "atp" && matches!(job.workload, Workload::Training { .. }) {
                note(&format!("training by {}", job.system.name()));
            }
            if matches!(job.workload, Workload::Training { overlap: true, .. }) {
                note("overlap");
            }
            if matches!(job.workload, Workload::Training { partition: Some(_), .. }) {
                note("cut gradients");
            }
            if matches!(job.workload, Workload::Training { order: SendOrder::Needed { .. }, .. }) {
                note("needed first");
            }
            if job.class.priority > 0 {
                note("priority");
            }
            if job.class.drop_class > 0 {
                note("drop class");
            }
            if job.stop.is_some() {
                note("stop");
            }
            if job.sampled {
                note(&format!("sampled {}", job.system.name()));
            }
            if let (WireDtype::Bfloat16 | WireDtype::Int8, Workload::AllReduce { elements, .. }) =
                (job.system.wire_dtype(), &job.workload)
                && *elements > NATIVE_ELEMENTS_MAX
                && !job.integers
            {
                note(&format!("long {} by {}", job.system.wire_dtype().name(), job.system.name()));
            }
            if job.class.sprayed {
                note("sprayed");
            }
            match job.rates {
                Rates::OfLinks => {}
                Rates::Given(_) => drop(note("given rates")),
                Rates::Drawn { .. } => drop(note("drawn rates")),
            }
            match job.lateness {
                Lateness::None => {}
                Lateness::Uniform(_) => drop(note("late uniformly")),
                Lateness::Normal { .. } => drop(note("late normally")),
            }
            if format!("{:?}", job.system).contains("Partition") {
                note("partition");
            }
        }
        for flow in &scenario.background {
            let transport = format!("{:?}", flow.transport.transport);
            note(flow.size.map_or("constant", |_| transport.split(' ').next().expect("a name")));
        }
        for target in scenario.losses.iter().filter_map(|plan| plan.target.as_ref()) {
            note(&format!("lost {}", target.kind.as_deref().unwrap_or("packets")));
        }
        let host = scenario.topology.hosts().next().expect("a host");
        let host = scenario.topology.get(host).config;
        if host.queues[0].limit_bytes < 1 << 20 {
            note("small NIC");
        }
        if host.sends != Cost::NOTHING {
            note(&format!("{} cores", host.sends.cores));
        }
        if scenario.topology.links().iter().any(|link| link.config != scenario.topology.links()[0].config) {
            note("links differ");
        }
        for plan in &scenario.parameter_servers {
            note(match plan.sends {
                Sends::Dlcp(_) => "pushes by dlcp",
                Sends::Connections(_) => "pushes by connections",
            });
        }
        note(&format!("{} ways", scenario.switch.ways));
        for (name, what) in [("l0", "dumbbell"), ("edge0", "fat tree"), ("leaf0", "leaf-spine")] {
            if scenario.topology.node(name).is_some() {
                note(what);
            }
        }
        let switch = scenario.topology.switches().next().expect("a switch");
        let queues = scenario.topology.get(switch).config.queues;
        if queues[0].reserved {
            note("reserved");
        }
        if queues[1].order == Order::LeastRemaining {
            note("least remaining");
        }
        note(match scenario.topology.get(switch).config.buffer {
            Buffer::PerQueue => "queues",
            Buffer::PerPort { .. } => "ports",
            Buffer::Shared { .. } => "shared buffer",
        });
        let is_death = |plan: &&FaultPlan| matches!(plan.fault, Fault::ServiceDies(_));
        match scenario.faults.iter().filter(is_death).count() {
            0 => {}
            1 => drop(note("service dies")),
            _ => drop(note("services die")),
        }
        let outages: Vec<_> = scenario.faults.iter().filter_map(outage).collect();
        for (at, (what, begin, end)) in outages.iter().enumerate() {
            note(what.split(['(', ' ']).next().expect("a word"));
            let overlaps = |(other, from, to): &&(String, _, _)| other == what && from < end && begin < to;
            if outages[at + 1..].iter().any(|other| overlaps(&other)) {
                note(&format!("{} twice", what.split(['(', ' ']).next().expect("a word")));
            }
        }
    }
    let expected = "1 cores, 1 ways, 2 cores, 2 ways, 3 cores, 8 ways, Dctcp, LinkId, LinkId twice, NewReno, NodeId, NodeId twice, Pfabric, Pias, asynchronous, asynchronous overlap, atp, byteps, constant, cut gradients, dlcp, \
        dlcp in a ring, dlcp with a server, dlcp with servers, drawn rates, drop class, dumbbell, esa, fat tree, float32, given rates, goat, int32, late normally, late uniformly, leaf-spine, least remaining, links differ, long bfloat16 by byteps, long bfloat16 by switchml, long int8 by byteps, long int8 by switchml, lost acknowledgement, lost block, lost gradient, \
        lost packets, lost parameters, lost result, lost segment, lost signal, lost update, needed first, overlap, partition, ports, priority, ps, ps-n-to-n, pushes by connections, pushes by dlcp, queues, \
        reserved, ring, rss, sampled atp, sampled byteps, sampled dlcp, sampled esa, sampled goat, sampled ps, sampled ps-n-to-n, sampled ring, sampled rss, sampled switchml, sampled tcp-ps, server, server twice, service dies, services die, shared buffer, small NIC, sprayed, \
        stop, switchml, tcp-ps, training by byteps, training by dlcp, training by esa, training by goat, training by ps, training by ps-n-to-n, training by ring, training by rss, training by switchml, training by tcp-ps, worker, worker twice";
    assert_eq!(drawn.into_iter().collect::<Vec<_>>().join(", "), expected);
}

#[test]
fn shrinking_leaves_what_is_needed_to_fail() {
    let scenario = (0..100)
        .map(hostile)
        .find(|scenario| scenario.faults.len() > 2 && !scenario.losses.is_empty() && scenario.jobs.len() > 1)
        .expect("most seeds are hostile");
    let needed = scenario.faults[1];
    let small = shrink(&scenario, |scenario| scenario.faults.contains(&needed));
    assert_eq!(small.faults, [needed]);
    assert!(small.losses.iter().all(|plan| plan.loss == 0.0 && plan.duplication == 0.0));
    assert!(small.jobs.iter().all(|job| job.large_values == 0.0));
}
