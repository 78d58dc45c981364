//! Ranks that live as long as their streams, and who comes for a dead one's place.

use super::*;

const MILLISECOND: Duration = Duration::from_millis(1);

/// Starts a job of two, of which both ranks attend.
fn attended(registry: &mut Registry, name: &str) -> (Admission, [Attendance; 2]) {
    let admission = start(registry, at(0), name, 2);
    let mut attend = |rank| {
        let (reply, attendance) = registry.attends(at(0), admission.job, Rank(rank), admission.generation);
        assert_eq!(reply, HeartbeatReply::Alive { left: Ranks::default() });
        attendance.expect("the job runs")
    };
    let attendances = [attend(0), attend(1)];
    (admission, attendances)
}

#[test]
fn a_rank_that_attends_may_be_silent_for_ever_and_is_dead_soon_after_its_stream_ended() {
    let mut registry = registry();
    let (Admission { job, .. }, [_, second]) = attended(&mut registry, "a");
    let hour = 3600;
    for second in 1..hour {
        assert_eq!(registry.tick(at(second)), vec![]);
    }
    registry.detached(at(hour), second, Detached::AtTheRank);
    assert_eq!(registry.tick(at(hour) + MILLISECOND * 500), vec![]);
    let reason = AbortReason::Expelled(Rank(1));
    assert_eq!(registry.tick(at(hour) + MILLISECOND * 501), vec![Command::Abort { job, reason }]);
}

#[test]
fn a_rank_that_opens_another_stream_in_time_goes_on() {
    let mut registry = registry();
    let (Admission { job, generation, .. }, [_, old]) = attended(&mut registry, "a");
    registry.tick(at(0));
    registry.detached(at(1), old, Detached::AtTheRank);
    let (_, new) = registry.attends(at(1) + MILLISECOND * 400, job, Rank(1), generation);
    // The end of the old one is heard of once more, and late: nobody minds.
    registry.detached(at(2), old, Detached::AtTheRank);
    for second in 2..60 {
        assert_eq!(registry.tick(at(second)), vec![]);
    }
    registry.detached(at(60), new.expect("the job runs"), Detached::AtTheRank);
    assert!(matches!(registry.tick(at(61))[..], [Command::Abort { .. }]));
}

#[test]
fn a_stream_that_breaks_on_the_way_leaves_the_rank_the_time_of_its_heartbeats() {
    let mut registry = registry();
    let (Admission { job, generation, .. }, [first, _]) = attended(&mut registry, "a");
    registry.detached(at(0), first, Detached::OnTheWay);
    for second in 1..=5 {
        assert_eq!(registry.tick(at(second)), vec![]);
    }
    registry.beats(at(5), job, Rank(0), generation);
    for second in 6..=10 {
        assert_eq!(registry.tick(at(second)), vec![]);
    }
    let reason = AbortReason::Expelled(Rank(0));
    assert_eq!(registry.tick(at(11)), vec![Command::Abort { job, reason }]);
}

#[test]
fn a_stream_that_ends_after_a_farewell_means_nothing() {
    let mut registry = registry();
    let (Admission { job, .. }, [_, second]) = attended(&mut registry, "a");
    assert_eq!(registry.leaves(at(1), job, Rank(1)), None);
    registry.detached(at(1), second, Detached::AtTheRank);
    for second in 1..60 {
        assert_eq!(registry.tick(at(second)), vec![]);
    }
}

#[test]
fn streams_that_end_while_the_switch_was_not_scheduled_may_come_back_as_long_as_heartbeats() {
    let mut registry = registry();
    let (Admission { job, .. }, [first, _]) = attended(&mut registry, "a");
    registry.tick(at(1));
    assert_eq!(registry.tick(at(100)), vec![]);
    registry.detached(at(100), first, Detached::AtTheRank);
    for second in 101..=105 {
        assert_eq!(registry.tick(at(second)), vec![]);
    }
    let reason = AbortReason::Expelled(Rank(0));
    assert_eq!(registry.tick(at(106)), vec![Command::Abort { job, reason }]);
}

#[test]
fn there_is_nothing_to_attend_without_a_running_job() {
    let mut registry = registry();
    let (Admission { job, generation, .. }, [first, _]) = attended(&mut registry, "a");
    assert_eq!(registry.attends(at(0), JobId(7), Rank(0), generation).1, None);
    let reason = AbortReason::SwitchStopped;
    registry.aborted(at(1), job, reason);
    let reply = registry.attends(at(1), job, Rank(0), generation);
    assert_eq!(reply, (HeartbeatReply::Aborted(reason), None));
    registry.detached(at(1), first, Detached::AtTheRank);
    assert_eq!(registry.pool().free, 2048);
}

#[test]
fn who_takes_a_dead_ranks_place_ends_its_job_and_begins_anew() {
    let mut registry = registry();
    let (Admission { job, .. }, [_, dead]) = attended(&mut registry, "a");
    let again = |rank| ask("a", rank, 2);
    assert_eq!(registry.make_way(at(1), &again(1), |_| true), vec![], "it lives");
    assert!(matches!(registry.join(at(1), again(1)), JoinDecision::Refused { .. }));
    registry.detached(at(1), dead, Detached::AtTheRank);
    assert_eq!(registry.make_way(at(1), &ask("b", 1, 2), |_| true), vec![], "another job");
    let reason = AbortReason::Expelled(Rank(1));
    assert_eq!(registry.make_way(at(1), &again(1), |_| true), vec![Command::Abort { job, reason }]);
    assert_eq!(registry.pool().free, 2048);
    let new = start(&mut registry, at(1), "a", 2);
    assert_ne!(new.job, job);
}

#[test]
fn a_rank_that_left_waits_for_the_next_job_of_the_name_while_the_others_end_this_one() {
    let mut registry = registry();
    let (Admission { job, .. }, _) = attended(&mut registry, "a");
    registry.leaves(at(1), job, Rank(1));
    assert_eq!(registry.make_way(at(1), &ask("a", 1, 2), |_| true), vec![]);
    assert!(matches!(registry.join(at(1), ask("a", 1, 2)), JoinDecision::Waiting(_)));
    assert!(matches!(registry.join(at(1), ask("a", 0, 2)), JoinDecision::Refused { .. }), "it lives");
    assert_eq!(registry.leaves(at(1), job, Rank(0)), Some(Command::Remove { job }));
    let last = registry.join(at(2), ask("a", 0, 2));
    assert!(matches!(last, JoinDecision::Complete { outcome: Ok(_), .. }), "{last:?}");
}

#[test]
fn a_rank_that_left_ends_its_job_when_it_comes_again_for_one_of_another_size() {
    let mut registry = registry();
    let (Admission { job, .. }, _) = attended(&mut registry, "a");
    registry.leaves(at(1), job, Rank(0));
    // The other one may still collect its last sum.
    let soon = at(1) + registry.config().return_timeout;
    assert_eq!(registry.make_way(soon, &ask("a", 0, 1), |_| true), vec![]);
    assert_eq!(refusal(&mut registry, ask("a", 0, 1)), Refusal::JobRunning { rank: 0, world_size: 2 });
    let reason = AbortReason::Expelled(Rank(0));
    assert_eq!(registry.make_way(at(2), &ask("a", 0, 1), |_| true), vec![Command::Abort { job, reason }]);
    start(&mut registry, at(2), "a", 1);
}

#[test]
fn who_is_not_let_in_ends_no_job_of_a_rank_whose_stream_broke() {
    let mut registry = registry();
    let (Admission { job, .. }, [_, broken]) = attended(&mut registry, "a");
    registry.detached(at(1), broken, Detached::AtTheRank);
    let refused = [
        JoinRequest { wire_version: VERSION + 1, ..ask("a", 1, 2) },
        JoinRequest { protocol: "atp".into(), ..ask("a", 1, 2) },
        JoinRequest { mtu: 10, ..ask("a", 1, 2) },
        ask("a", 2, 2),
    ];
    for request in refused {
        assert_eq!(registry.make_way(at(1), &request, |_| true), vec![], "{request:?}");
    }
    let reason = AbortReason::Expelled(Rank(1));
    assert_eq!(registry.make_way(at(1), &ask("a", 1, 2), |_| true), vec![Command::Abort { job, reason }]);
}

#[test]
fn who_asks_from_elsewhere_ends_no_job_of_which_it_knows_the_name() {
    let mut registry = registry();
    let (Admission { job, .. }, [_, broken]) = attended(&mut registry, "a");
    registry.detached(at(1), broken, Detached::AtTheRank);
    assert_eq!(registry.make_way(at(1), &ask("a", 1, 2), |_| false), vec![], "its stream may come back");
    let reason = AbortReason::Expelled(Rank(1));
    assert_eq!(
        registry.make_way(at(1), &ask("a", 1, 2), |of| of == job),
        vec![Command::Abort { job, reason }]
    );
}

#[test]
fn a_heartbeat_that_comes_after_the_end_of_a_stream_leaves_its_rank_gone() {
    let mut registry = registry();
    let (Admission { job, generation, .. }, [_, dead]) = attended(&mut registry, "a");
    registry.tick(at(0));
    registry.detached(at(1), dead, Detached::AtTheRank);
    registry.beats(at(1) + MILLISECOND * 100, job, Rank(1), generation);
    let reason = AbortReason::Expelled(Rank(1));
    assert_eq!(registry.tick(at(1) + MILLISECOND * 501), vec![Command::Abort { job, reason }]);
}
