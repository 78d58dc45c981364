//! Smaller scenarios that break the same rule.

use std::time::Duration;

use super::super::scenario::{Fault, Scenario, Workload};
use super::super::unlike::{Lateness, Rates};
use crate::net::Class;

/// A smaller scenario that `fails` as well: without whatever it fails without. Greedy, so not the
/// smallest.
#[must_use]
pub fn shrink(scenario: &Scenario, mut fails: impl FnMut(&Scenario) -> bool) -> Scenario {
    let mut smallest = scenario.clone();
    loop {
        let candidates = simpler(&smallest);
        match candidates.into_iter().find(|candidate| fails(candidate)) {
            Some(simpler) => smallest = simpler,
            None => return smallest,
        }
    }
}

/// Scenarios with one thing less.
fn simpler(scenario: &Scenario) -> Vec<Scenario> {
    let mut all = Vec::new();
    let mut with = |change: &dyn Fn(&mut Scenario)| {
        let mut changed = scenario.clone();
        change(&mut changed);
        if format!("{changed:?}") != format!("{scenario:?}") {
            all.push(changed);
        }
    };
    with(&|scenario| scenario.losses.clear());
    with(&|scenario| scenario.background.clear());
    with(&|scenario| scenario.parameter_servers.clear());
    for index in 0..scenario.faults.len() {
        with(&|scenario| {
            scenario.faults.remove(index);
        });
    }
    // The last job only: faults name jobs by number.
    if scenario.jobs.len() > 1 {
        let last = scenario.jobs.len() - 1;
        with(&|scenario| {
            scenario.jobs.pop();
            scenario.faults.retain(|plan| match plan.fault {
                Fault::ServerRestarts(job, _) | Fault::WorkerRespawns(job, ..) | Fault::JobDies(job) => {
                    job < last
                }
                _ => true,
            });
        });
    }
    for (field, value) in [("loss", 0.0), ("duplication", 0.0)] {
        with(&|scenario| {
            for plan in &mut scenario.losses {
                match field {
                    "loss" => plan.loss = value,
                    _ => plan.duplication = value,
                }
            }
        });
    }
    for index in 0..scenario.jobs.len() {
        with(&|scenario| {
            if let Workload::AllReduce { elements, count, .. } = &mut scenario.jobs[index].workload {
                *elements = (*elements / 2).max(1);
                *count = count.map(|count| (count / 2).max(1));
            }
        });
        with(&|scenario| {
            if let Workload::AllReduce { in_flight, .. } = &mut scenario.jobs[index].workload {
                *in_flight = 1;
            }
        });
        with(&|scenario| {
            if let Workload::Training { iterations, jitter, pause, .. } = &mut scenario.jobs[index].workload {
                *iterations = iterations.map(|count| (count / 2).max(1));
                (*jitter, *pause) = (0.0, None);
            }
        });
        with(&|scenario| scenario.jobs[index].class = Class::default());
        with(&|scenario| scenario.jobs[index].rates = Rates::OfLinks);
        with(&|scenario| scenario.jobs[index].lateness = Lateness::None);
        with(&|scenario| scenario.jobs[index].large_values = 0.0);
        with(&|scenario| scenario.jobs[index].sampled = false);
        with(&|scenario| scenario.jobs[index].start = Duration::ZERO);
        with(&|scenario| scenario.jobs[index].stop = None);
    }
    all
}
