//! Jobs that are set up again while they run.

use super::*;

/// A registry of ATP whose numbers are all different.
fn server() -> Registry {
    let mut last = 40;
    let generator = move || {
        last += 1;
        last
    };
    let config = RegistryConfig { jobs_max: 1, ..RegistryConfig::default() };
    Registry::new(config, vec![&Atp], Box::new(generator)).expect("valid limits")
}

/// Rank 0 and 1 at switch 7, rank 2 at switch 8; each but the first attends.
fn running(registry: &mut Registry) -> (Admission, Vec<Attendance>) {
    registry.join(at(0), through(7, 0, 3));
    registry.join(at(0), through(7, 1, 3));
    let decision = registry.join(at(0), through(8, 2, 3));
    let JoinDecision::Complete { outcome: Ok(admission), replaced: None, .. } = decision else {
        panic!("{decision:?}")
    };
    let attends = |rank| registry.attends(at(0), admission.job, Rank(rank), admission.generation).1;
    let attendances = [1, 2].map(attends).map(|attendance| attendance.expect("it runs")).into();
    (admission, attendances)
}

/// Asks to join with what a rank remembers of the job.
fn again(admission: &Admission, request: JoinRequest) -> JoinRequest {
    let Admission { key, generation, terms, .. } = admission;
    let resume = Resume {
        lineage: key.lineage(),
        generation: *generation,
        in_flight: terms.in_flight,
        elements: terms.elements,
        completed: vec![Vec::new()],
    };
    JoinRequest { resume: Some(resume), ..request }
}

fn at_the_root(rank: u32) -> JoinRequest {
    JoinRequest { hops: Vec::new(), ..through(7, rank, 3) }
}

#[test]
fn a_rank_that_comes_by_another_way_has_its_job_set_up_again_without_the_switch() {
    let mut registry = server();
    let (admission, _) = running(&mut registry);
    let (job, generation) = (admission.job, admission.generation);
    assert!(!registry.came_by(job, Rank(0), 1), "as before");
    assert_eq!(registry.tick(at(1)), []);
    assert!(registry.came_by(job, Rank(0), 0));
    assert_eq!(registry.tick(at(1)), [Command::SetUpAgain { job }]);
    assert_eq!(registry.tick(at(1)), [], "the shell tells them once");
    for rank in 0..3 {
        assert_eq!(registry.beats(at(1), job, Rank(rank), generation), HeartbeatReply::SetUpAgain);
    }
    let free = registry.pool().free;
    // No other job may run here, and it takes no second place.
    for request in [through(8, 2, 3), at_the_root(0)] {
        assert!(matches!(registry.join(at(2), again(&admission, request)), JoinDecision::Waiting(_)));
    }
    let decision = registry.join(at(2), again(&admission, at_the_root(1)));
    let JoinDecision::Complete { outcome: Ok(after), replaced, tickets, .. } = decision else {
        panic!("{decision:?}")
    };
    assert_eq!((replaced, tickets.len()), (Some(job), 3));
    assert_eq!((after.generation, after.resumed), (Generation(generation.0 + 1), true));
    assert_ne!((after.job, after.key), (job, admission.key));
    assert_eq!([0, 1, 2].map(|rank| after.tree.way(Rank(rank)).len()), [0, 0, 1]);
    assert_eq!(
        (registry.pool().free, registry.jobs().count()),
        (free, 1),
        "it has the memory of the one before"
    );
    assert_eq!(registry.beats(at(3), job, Rank(0), generation), HeartbeatReply::Unknown);
    let alive = registry.beats(at(3), after.job, Rank(0), after.generation);
    assert_eq!(alive, HeartbeatReply::Alive { left: Ranks::default() });
    // The other ranks are behind until they have their sums, or have left.
    assert!(!registry.others_behind(job, Rank(0)), "it is over");
    let behind = |registry: &Registry| [0, 1, 2].map(|rank| registry.others_behind(after.job, Rank(rank)));
    registry.caught_up(after.job, Rank(1));
    assert_eq!(behind(&registry), [true; 3]);
    registry.caught_up(after.job, Rank(2));
    assert_eq!(behind(&registry), [false, true, true]);
    registry.leaves(at(3), after.job, Rank(0));
    assert_eq!(behind(&registry), [false; 3]);
}

#[test]
fn ranks_of_a_job_that_begins_are_not_behind() {
    let mut registry = server();
    let (admission, _) = running(&mut registry);
    assert!(!registry.others_behind(admission.job, Rank(0)));
}

#[test]
fn ranks_that_wait_for_a_job_to_be_set_up_again_live_and_the_death_of_another_is_told() {
    let mut registry = server();
    let (admission, attendances) = running(&mut registry);
    let job = admission.job;
    // Rank 0 has no stream, and says nothing for longer than it may.
    registry.join(at(1), again(&admission, at_the_root(0)));
    assert_eq!(registry.tick(at(2)), [Command::SetUpAgain { job }], "who joins again has it set up again");
    for second in 3..60 {
        assert_eq!(registry.tick(at(second)), []);
    }
    registry.detached(at(60), attendances[1], Detached::AtTheRank);
    let reason = AbortReason::Expelled(Rank(2));
    let refused = Refusal::JoinTimeout { missing: Ranks::from([2]) };
    assert_eq!(
        registry.tick(at(61)),
        [Command::Abort { job, reason }, Command::Refuse { tickets: vec![Ticket(3)], reason: refused }]
    );
    let told = registry.beats(at(62), job, Rank(0), admission.generation);
    assert_eq!(told, HeartbeatReply::Aborted(reason));
}

#[test]
fn a_rank_that_stopped_ends_the_job_that_is_set_up_again_when_the_others_lose_patience() {
    let mut registry = server();
    let (admission, _) = running(&mut registry);
    let job = admission.job;
    for rank in 0..2 {
        let request = JoinRequest { patience: SECOND * 10, ..at_the_root(rank) };
        registry.join(at(1), again(&admission, request));
    }
    registry.tick(at(10));
    let commands = registry.tick(at(11));
    let refused = Refusal::JoinTimeout { missing: Ranks::from([2]) };
    let reason = AbortReason::Expelled(Rank(2));
    let tickets = vec![Ticket(3), Ticket(4)];
    let expected = [Command::Refuse { tickets, reason: refused }, Command::Abort { job, reason }];
    assert_eq!(commands, expected);
}

#[test]
fn a_job_that_a_rank_left_is_not_set_up_again() {
    let mut registry = server();
    let (admission, _) = running(&mut registry);
    registry.leaves(at(1), admission.job, Rank(2));
    assert!(!registry.came_by(admission.job, Rank(0), 0) && !registry.set_up_again(admission.job));
    let left = Refusal::JoinTimeout { missing: Ranks::from([2]) };
    assert_eq!(refusal(&mut registry, again(&admission, at_the_root(0))), left);
    // It leaves while the others wait.
    let mut registry = server();
    let (admission, _) = running(&mut registry);
    registry.join(at(1), again(&admission, at_the_root(0)));
    registry.tick(at(1));
    let told = |registry: &mut Registry| registry.beats(at(1), admission.job, Rank(1), admission.generation);
    assert_eq!(told(&mut registry), HeartbeatReply::SetUpAgain);
    registry.leaves(at(1), admission.job, Rank(2));
    let goes_on = HeartbeatReply::Alive { left: Ranks::from([2]) };
    assert_eq!(told(&mut registry), goes_on, "at once");
    assert_eq!(registry.tick(at(1)), [Command::Refuse { tickets: vec![Ticket(3)], reason: left }]);
    assert_eq!(told(&mut registry), goes_on);
}
