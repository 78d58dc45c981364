//! The switch's report of its memory, and of ranks that did not join.

use fanin_controller::{JobStatus, JobStatusState, SwitchStatus, why_aborted};
use fanin_protocol::control::Ranks;

use super::finding::{Check, Finding};

/// Whether there is room for a job.
pub(super) fn pool(status: &SwitchStatus) -> Finding {
    let (free, units) = (status.pool_free, status.pool_units);
    let facts = format!(
        "{free} of {units} units of memory are free in each of {} shard{}",
        status.shards,
        if status.shards == 1 { "" } else { "s" }
    );
    if free == 0 {
        return Finding::warning(
            Check::Pool,
            format!("{facts}: another job would be refused"),
            "fanin status (which jobs have them); or fanin switch --pool-units N with more",
        );
    }
    Finding::ok(Check::Pool, facts)
}

/// World size against who has joined.
pub(super) fn jobs(status: &SwitchStatus, switch: &str) -> Vec<Finding> {
    let mut findings: Vec<Finding> = status.jobs.iter().filter_map(|job| incomplete(job, switch)).collect();
    let running =
        status.jobs.iter().filter(|job| matches!(job.state, JobStatusState::Running { .. })).count();
    if findings.is_empty() {
        findings.push(Finding::ok(
            Check::Jobs,
            match running {
                0 => "none runs, and none waits for ranks".into(),
                1 => "one runs; none waits for ranks to join".into(),
                _ => format!("{running} run; none waits for ranks to join"),
            },
        ));
    }
    findings
}

fn incomplete(job: &JobStatus, switch: &str) -> Option<Finding> {
    // A name may hold anything printable; quoted, it cannot pretend to be a finding.
    let name = &job.name;
    match &job.state {
        JobStatusState::Running { .. } => None,
        JobStatusState::Gathering { present } => {
            let missing = Ranks::all(job.world_size).without(present);
            let ranks = if missing.len() == 1 { "rank" } else { "ranks" };
            Some(Finding::warning(
                Check::Jobs,
                format!(
                    "job {name:?} has {} of {} ranks and waits for {ranks} {missing} to join",
                    present.len(),
                    job.world_size
                ),
                format!(
                    "start {ranks} {missing}, with --switch {switch} and the same job name and world size"
                ),
            ))
        }
        JobStatusState::Aborted { reason, .. } => Some(Finding::warning(
            Check::Jobs,
            format!("job {name:?} was aborted: {}", why_aborted(reason)),
            "look at that rank's log, and start the job again",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::*;
    use fanin_wire::{AbortReason, JobId, Rank};

    fn status(states: Vec<JobStatusState>) -> SwitchStatus {
        let job = |state| JobStatus { name: "gpt".into(), world_size: 4, state };
        SwitchStatus {
            rate_bps: None,
            version: "0.1.0".into(),
            wire_version: 1,
            shards: 1,
            pool_units: 64,
            pool_free: 0,
            jobs: states.into_iter().map(job).collect(),
            protocol: "switchml".into(),
            relays: vec![],
            outdated: 0,
            unplanned: 0,
        }
    }

    #[test]
    fn a_gathering_job_names_the_ranks_that_it_lacks() {
        let gathering = JobStatusState::Gathering { present: Ranks::from([0, 2]) };
        let aborted = JobStatusState::Aborted { job: JobId(1), reason: AbortReason::Expelled(Rank(2)) };
        let findings = jobs(&status(vec![gathering, aborted]), "box:4800");
        assert_eq!(findings[0].message, "job \"gpt\" has 2 of 4 ranks and waits for ranks 1 and 3 to join");
        assert!(findings[1].message.ends_with("was aborted: rank 2 was lost"), "{}", findings[1].message);
        assert_eq!(jobs(&status(vec![]), "box:4800")[0].verdict, Verdict::Ok);
    }

    #[test]
    fn a_full_pool_is_a_warning() {
        assert_eq!(pool(&status(vec![])).verdict, Verdict::Warning);
    }
}
