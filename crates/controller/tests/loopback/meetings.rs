//! Ranks that find each other before they join.

use std::thread::JoinHandle;

use fanin_controller::{
    Cancel, JobStatusState, Meeting, MeetingConfig, RackServer, RackServerConfig, switch_status,
};
use fanin_protocol::control::Refusal;

use super::*;

/// The attempt, and what all said.
type Met = (u64, Vec<String>);

fn config(switches: &[String], rank: u32, world_size: u32) -> MeetingConfig {
    MeetingConfig {
        switches: switches.to_vec(),
        protocol: protocol("switchml"),
        job: "meets".into(),
        rank,
        world_size,
        trust: Trust::default(),
    }
}

fn meets(
    switches: &[String],
    rank: u32,
    world_size: u32,
    patience: Duration,
) -> JoinHandle<Result<Met, SessionError>> {
    says(switches, rank, world_size, patience, format!("{rank} is here"))
}

fn says(
    switches: &[String],
    rank: u32,
    world_size: u32,
    patience: Duration,
    said: String,
) -> JoinHandle<Result<Met, SessionError>> {
    let config = config(switches, rank, world_size);
    thread::spawn(move || {
        let meeting = Meeting::open(config, patience, &Cancel::default())?;
        Ok((meeting.attempt(), meeting.gather("place", said, patience, &Cancel::default())?))
    })
}

fn all_meet(ranks: Vec<JoinHandle<Result<Met, SessionError>>>) {
    let met: Vec<_> =
        ranks.into_iter().map(|rank| rank.join().expect("no panic").expect("all come")).collect();
    let said: Vec<_> = (0..met.len()).map(|rank| format!("{rank} is here")).collect();
    assert!(met.iter().all(|(attempt, heard)| (*attempt, heard) == (met[0].0, &said)), "{met:?}");
}

#[test]
fn ranks_meet_in_whatever_order_they_name_the_switches_and_behind_racks() {
    let (one, two) = (switch(), switch());
    let listen = ([127, 0, 0, 1], 0).into();
    let rack =
        RackServer::start(RackServerConfig::new(protocol("switchml"), listen, one.address().to_string()));
    let rack = rack.expect("a free port");
    let [first, second] = [&one, &two].map(|switch| switch.address().to_string());
    let behind = rack.address().to_string();
    let named = [[first.clone(), second.clone()], [second.clone(), first], [behind, second]];
    all_meet((0..3).map(|rank| meets(&named[rank as usize], rank, 3, HANG)).collect());
}

#[test]
fn who_meets_is_seen_and_named_when_missing_and_leaves_nothing_behind() {
    let switch = switch();
    let named = [switch.address().to_string()];
    let early = meets(&named, 1, 3, HANG);
    loop {
        let jobs = switch_status(&named[0], HANG).expect("it answers").jobs;
        let Some(job) = jobs.first() else { continue };
        let JobStatusState::Gathering { present } = &job.state else { panic!("{job:?}") };
        assert_eq!((job.name.as_str(), job.world_size, present.len()), ("meets", 3, 1));
        break;
    }
    let other = meets(&named, 0, 2, HANG).join().expect("no panic");
    let Err(SessionError::JoinRefused { reason, .. }) = other else { panic!("{other:?}") };
    assert!(matches!(reason, Refusal::WorldSizeMismatch { .. }), "{reason:?}");
    let hasty = meets(&named, 0, 3, Duration::from_millis(300));
    for rank in [hasty, early] {
        let outcome = rank.join().expect("no panic");
        let Err(SessionError::JoinTimeout { missing_ranks, .. }) = outcome else { panic!("{outcome:?}") };
        assert_eq!(missing_ranks.to_string(), "2");
    }
    assert!(switch.is_idle());
    all_meet((0..3).map(|rank| meets(&named, rank, 3, HANG)).collect());
}

#[test]
fn a_rank_of_a_job_that_runs_without_it_is_told_so() {
    let switch = switch();
    let running = connect_all(&switch, "meets", 2, |_| {});
    let named = [switch.address().to_string()];
    let outcome = meets(&named, 1, 2, HANG).join().expect("no panic");
    let Err(SessionError::JoinRefused { reason, .. }) = outcome else { panic!("{outcome:?}") };
    assert!(matches!(reason, Refusal::JobRunning { rank: 1, .. }), "{reason:?}");
    drop(running);
}

#[test]
fn a_rank_that_was_started_again_ends_the_attempt_of_the_others_at_once() {
    let switch = switch();
    let named = [switch.address().to_string()];
    let zero = meets(&named, 0, 2, HANG);
    drop(Meeting::open(config(&named, 1, 2), HANG, &Cancel::default()).expect("both come"));
    let one = meets(&named, 1, 2, HANG);
    let outcome = zero.join().expect("no panic");
    let Err(SessionError::JoinRefused { reason, .. }) = outcome else { panic!("{outcome:?}") };
    assert_eq!(reason, Refusal::BeganAnew { rank: 1 });
    all_meet(vec![meets(&named, 0, 2, HANG), one]);
}

#[test]
fn ranks_that_join_already_meet_again_with_one_that_was_started_again() {
    let switch = switch();
    let named = [switch.address().to_string()];
    let dead = {
        let config = config(&named, 1, 2);
        thread::spawn(move || Meeting::open(config, HANG, &Cancel::default()))
    };
    let meeting = Meeting::open(config(&named, 0, 2), HANG, &Cancel::default()).expect("both come");
    // It died after the last round, and before it joined.
    drop(dead.join().expect("no panic").expect("both come"));
    let (named, service) = (named.clone(), named[0].clone());
    let zero = {
        let cancel = Cancel::default();
        let joining = meeting.joining(HANG, &cancel);
        let config = SessionConfig { join_timeout: HANG, ..SessionConfig::new(service, "meets", 0, 2) };
        thread::spawn(move || {
            let joined = Session::connect_unless(config, None, &cancel).map(drop);
            drop(joining);
            joined
        })
    };
    let one = meets(&named, 1, 2, HANG);
    let outcome = zero.join().expect("no panic");
    let Err(SessionError::JoinRefused { reason, .. }) = outcome else { panic!("{outcome:?}") };
    assert_eq!(reason, Refusal::BeganAnew { rank: 1 });
    all_meet(vec![meets(&named, 0, 2, HANG), one]);
    assert!(switch.is_idle(), "its place among those who join is free");
}

#[test]
fn who_joins_is_told_also_by_a_switch_that_was_started_again() {
    let (first, service) = (switch(), switch());
    let (address, named) = (first.address(), [first.address().to_string()]);
    let dead = {
        let config = config(&named, 1, 2);
        thread::spawn(move || Meeting::open(config, HANG, &Cancel::default()))
    };
    let meeting = Meeting::open(config(&named, 0, 2), HANG, &Cancel::default()).expect("both come");
    drop(dead.join().expect("no panic").expect("both come"));
    let cancel = Cancel::default();
    let joining = meeting.joining(HANG, &cancel);
    first.stop();
    let _again = SwitchServer::start(SwitchServerConfig::new(address)).expect("its port");
    let one = meets(&named, 1, 2, HANG);
    let config = SessionConfig::new(service.address().to_string(), "meets", 0, 2);
    let outcome =
        joining.over(Session::connect_unless(SessionConfig { join_timeout: HANG, ..config }, None, &cancel));
    let Err(SessionError::JoinRefused { reason, .. }) = outcome else { panic!("{outcome:?}") };
    assert_eq!(reason, Refusal::BeganAnew { rank: 1 });
    all_meet(vec![meets(&named, 0, 2, HANG), one]);
}

#[test]
fn what_is_told_in_pieces_is_heard_whole_also_behind_a_rack() {
    let switch = switch();
    let listen = ([127, 0, 0, 1], 0).into();
    let rack =
        RackServer::start(RackServerConfig::new(protocol("switchml"), listen, switch.address().to_string()));
    let rack = rack.expect("a free port");
    let named = [rack.address().to_string()];
    let said: Vec<_> = ["a", "b", "c"].map(|letter| letter.repeat(16 << 10)).to_vec();
    let ranks = said.iter().zip(0..).map(|(said, rank)| says(&named, rank, 3, HANG, said.clone()));
    for rank in ranks.collect::<Vec<_>>() {
        assert!(rank.join().expect("no panic").expect("all come").1 == said);
    }
}

#[test]
fn all_hear_that_a_rank_says_too_much() {
    let switch = switch();
    let named = [switch.address().to_string()];
    let said = ["short".into(), "x".repeat((16 << 10) + 1)];
    let ranks = said.into_iter().zip(0..).map(|(said, rank)| says(&named, rank, 2, HANG, said));
    for rank in ranks.collect::<Vec<_>>() {
        let outcome = rank.join().expect("no panic");
        let Err(SessionError::JoinRefused { reason, .. }) = outcome else { panic!("{outcome:?}") };
        assert!(matches!(reason, Refusal::WordsTooLong { .. }), "{reason:?}");
    }
}
