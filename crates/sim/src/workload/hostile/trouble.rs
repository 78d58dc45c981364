//! The faults of a scenario that a seed draws, and the losses of its links.

use std::collections::BTreeSet;
use std::time::Duration;

use super::super::scenario::{Fault, FaultPlan, JobPlan, LossPlan, TCP_KINDS, Target, Which};
use super::{BURIED, Dice, TROUBLE};
use crate::net::{LinkId, NodeId, Topology};

pub(super) fn faults(dice: &mut Dice, topology: &Topology, jobs: &[JobPlan]) -> Vec<FaultPlan> {
    let nodes: Vec<NodeId> = topology.switches().chain(topology.hosts()).collect();
    let switches = topology.switches().count() as u64;
    let programmable: Vec<NodeId> = topology.programmable().collect();
    let respawns = dice.one_in(2);
    let mut faults: Vec<FaultPlan> = Vec::new();
    for _ in 0..dice.range(0, 5) {
        let at = dice.time(Duration::ZERO, TROUBLE);
        let down = dice.time(Duration::from_micros(10), TROUBLE);
        let job = dice.range(0, jobs.len() as u64) as usize;
        let has_server = jobs[job].system.server().is_some();
        let fault = match dice.range(0, 9) {
            0 => Fault::LinkFails(LinkId(dice.range(0, topology.links().len() as u64) as u32), down),
            // Every second such fault is of a switch.
            1 if dice.one_in(2) => Fault::NodeFails(dice.among(&nodes), down),
            1 => Fault::NodeFails(nodes[dice.range(0, switches) as usize], down),
            2 | 3 if !programmable.is_empty() => Fault::SwitchForgets(dice.among(&programmable)),
            4 | 5 if respawns && has_server => {
                let rank = dice.range(0, jobs[job].workers.len() as u64) as u16;
                Fault::WorkerRespawns(job, rank, down + BURIED)
            }
            4 | 5 if has_server => Fault::ServerRestarts(job, down),
            6 if jobs.len() > 1 => Fault::JobDies(job),
            // A failed part fails again, perhaps before it is back.
            7 => match faults.last().map(|plan| plan.fault) {
                Some(Fault::LinkFails(link, _)) => Fault::LinkFails(link, down),
                Some(Fault::NodeFails(node, _)) => Fault::NodeFails(node, down),
                Some(Fault::ServerRestarts(job, _)) => Fault::ServerRestarts(job, down),
                Some(Fault::WorkerRespawns(job, rank, _)) => Fault::WorkerRespawns(job, rank, down + BURIED),
                _ => continue,
            },
            _ => continue,
        };
        faults.push(FaultPlan { at, fault });
    }
    faults
}

/// Services that die for good: of each job one lives on.
pub(super) fn deaths(dice: &mut Dice, jobs: &[JobPlan]) -> Vec<FaultPlan> {
    let services: BTreeSet<NodeId> = jobs.iter().flat_map(|job| job.system.services().0).copied().collect();
    let (mut dead, mut faults) = (BTreeSet::new(), Vec::new());
    for node in services {
        let (dies, at) = (dice.one_in(3), dice.time(Duration::ZERO, TROUBLE));
        let after = BTreeSet::from_iter(dead.iter().copied().chain([node]));
        let lives = |service: &NodeId| !after.contains(service);
        let mut jobs = jobs.iter().map(|job| job.system.services().0).filter(|of| !of.is_empty());
        if dies && jobs.all(|of| of.iter().any(lives)) {
            dead = after;
            faults.push(FaultPlan { at, fault: Fault::ServiceDies(node) });
        }
    }
    faults
}

/// Packets of one kind: links lose a few of these, and no others. It is not one packet in so many.
/// If nothing is random, packets that are sent again can come round to the same number for ever.
fn target(dice: &mut Dice, jobs: &[JobPlan]) -> Target {
    let kinds = jobs.iter().flat_map(|job| job.system.packet_kinds()).chain(&TCP_KINDS);
    let kinds: Vec<&str> = kinds.copied().collect();
    Target {
        kind: (!dice.one_in(4)).then(|| dice.among(&kinds).to_owned()),
        which: Which::Nth((0..dice.range(1, 20)).map(|_| dice.range(0, 100)).collect()),
    }
}

pub(super) fn numbered(target: &Target) -> u32 {
    match &target.which {
        Which::Nth(numbers) => numbers.len() as u32,
        Which::All | Which::Every(_) => 0,
    }
}

pub(super) fn losses(dice: &mut Dice, topology: &Topology, jobs: &[JobPlan]) -> Vec<LossPlan> {
    let target = dice.one_in(4).then(|| target(dice, jobs));
    let (loss, duplication, reordering) = (dice.chance(0.1), dice.chance(0.1), dice.chance(0.2));
    let burst = dice.one_in(4).then_some((0.02, 0.3));
    let held_back = dice.time(Duration::from_micros(1), Duration::from_micros(500));
    // Everywhere, or on one link. Six links that each lose nineteen by their numbers can lose all
    // that one who waits alone sends before the others give it up.
    let links = topology.links().len() as u64;
    let is_long = target.is_some() && topology.node("core0").is_some();
    let only = dice.one_in(3).then(|| dice.range(0, links)).or_else(|| is_long.then(|| dice.range(0, links)));
    (0..links)
        .filter(|link| only.is_none_or(|only| only == *link))
        .flat_map(|link| LinkId(link as u32).ports())
        .map(|port| LossPlan {
            port,
            loss: if target.is_some() { 0.0 } else { loss },
            loss_between: 0.0,
            target: target.clone(),
            burst: burst.filter(|_| loss > 0.0 && target.is_none()),
            duplication,
            reordering,
            held_back,
        })
        .collect()
}
