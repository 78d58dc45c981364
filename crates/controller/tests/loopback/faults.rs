//! Ranks and switches that go wrong: every other rank hears the same, with a name in it.

use fanin_protocol::control::{Ranks, Refusal};
use fanin_udp::CollectiveKind;
use fanin_wire::{Key, Rank};

use super::between::Between;
use super::scripted::{INSTANCE, ONE_SLOT, Script, Told, admission};
use super::*;
use fanin_controller::proto::join_reply::Outcome;
use fanin_controller::proto::{
    AbortReason, Admission, AttendRequest, LeaveRequest,
    abort_reason::Reason,
    heartbeat_reply::{Alive, State, Unknown},
};
use fanin_controller::{AllReduceError, JobStatus, JobStatusState, ServiceConfig, Tensor};

/// Joins as a rank that then dies: no packet, no heartbeat, no farewell.
fn rank_that_dies(switch: &SwitchServer, job: &str, rank: u32, world_size: u32) -> thread::JoinHandle<()> {
    let address = switch.address();
    let request = request(job, rank, world_size, HANG);
    thread::spawn(move || join_and_die(address, request))
}

/// Joins, and is not heard of again.
pub(super) fn join_and_die(switch: std::net::SocketAddr, request: JoinRequest) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let reply = runtime.block_on(async {
        let mut client = control(switch);
        client.join(request).await.expect("an answer").into_inner()
    });
    assert!(matches!(reply.outcome, Some(Outcome::Admission(_))), "{reply:?}");
}

/// A process that joined a job, and keeps its stream open. It asks nothing, and dies when this is dropped.
pub(super) struct Process {
    runtime: Option<tokio::runtime::Runtime>,
    stream: tokio::task::JoinHandle<Result<(), tonic::Status>>,
}

impl Process {
    pub fn join(switch: std::net::SocketAddr, request: JoinRequest) -> Self {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let rank = request.rank;
        let mut replies = runtime.block_on(async {
            let mut client = control(switch);
            let reply = client.join(request).await.expect("an answer").into_inner();
            let Some(Outcome::Admission(admission)) = reply.outcome else { panic!("{reply:?}") };
            let key = Key::from_bytes(&admission.key).expect("17 bytes");
            let who = AttendRequest {
                job_id: admission.job_id,
                rank,
                generation: admission.generation,
                secret: key.secret_of(Rank(rank as u16)),
                ..AttendRequest::default()
            };
            let ours = tokio_stream::StreamExt::chain(tokio_stream::once(who), tokio_stream::pending());
            let mut replies = client.attend(ours).await.expect("a stream").into_inner();
            // The switch knows of it when it speaks.
            replies.message().await.expect("a reply").expect("a reply");
            replies
        });
        let stream = runtime.spawn(async move {
            while let Some(_news) = replies.message().await? {}
            Ok(())
        });
        Self { runtime: Some(runtime), stream }
    }

    /// Waits for the end of its stream; an error where the connection broke.
    pub fn stream_ends(&mut self) -> Result<(), tonic::Status> {
        let runtime = self.runtime.as_ref().expect("it lives");
        let ended = runtime.block_on(async { tokio::time::timeout(HANG, &mut self.stream).await });
        ended.expect("it ends").expect("no panic")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Longer than any test: nothing is found out by silence.
pub(super) const NEVER: Duration = Duration::from_secs(3600);

#[test]
fn a_rank_whose_connection_closes_is_named_though_it_may_be_silent_for_ever() {
    let switch = switch_with(|config| config.heartbeat_timeout = NEVER);
    let (address, request) = (switch.address(), request("closes", 2, 3, HANG));
    let dying = thread::spawn(move || Process::join(address, request));
    let mut sessions: Vec<_> = (0..2)
        .map(|rank| config(&switch, "closes", rank, 3))
        .map(|config| thread::spawn(move || Session::connect(config).expect("admitted")))
        .collect();
    let sessions: Vec<_> = sessions.drain(..).map(|rank| rank.join().expect("no panic")).collect();
    let dying = dying.join().expect("no panic");
    let sums: Vec<_> = sessions.iter().map(|session| submit(session, vec![1_i32; 10], Op::Sum)).collect();
    assert!(sessions.iter().all(|session| session.failure().is_none()));
    drop(dying);
    let lost = SessionError::RankLost { rank: Rank(2) };
    for sum in sums {
        assert_eq!(sum.wait(), Err(lost.clone()));
    }
    assert!(sessions.iter().all(|session| session.failure() == Some(lost.clone())));
}

#[test]
fn a_rank_is_told_of_anothers_death_before_it_asks_or_sends_anything() {
    let switch = switch_with(|config| config.heartbeat_timeout = NEVER);
    let (address, request) = (switch.address(), request("idle", 1, 2, HANG));
    let dying = thread::spawn(move || Process::join(address, request));
    let session = Session::connect(config(&switch, "idle", 0, 2)).expect("admitted");
    drop(dying.join().expect("no panic"));
    let began = std::time::Instant::now();
    while session.failure().is_none() {
        assert!(began.elapsed() < HANG, "it was never told");
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(session.failure(), Some(SessionError::RankLost { rank: Rank(1) }));
}

#[test]
fn a_rank_that_is_stopped_is_waited_for_until_the_timeout() {
    let switch = switch_with(|config| config.heartbeat_timeout = Duration::from_millis(300));
    let (address, request) = (switch.address(), request("stopped", 1, 2, HANG));
    let stopped = thread::spawn(move || Process::join(address, request));
    let session = Session::connect(config(&switch, "stopped", 0, 2)).expect("admitted");
    let _stopped = stopped.join().expect("no panic");
    session.set_timeout(Duration::from_secs(3));
    let error = submit(&session, vec![1_i32; 10], Op::Sum).wait().expect_err("rank 1 gives nothing");
    let SessionError::AllReduceTimeout { missing_ranks, .. } = error else { panic!("{error}") };
    assert_eq!(missing_ranks, Ranks::from([1]));
}

#[test]
fn a_job_whose_ranks_died_is_started_anew_under_its_name() {
    let switch = switch_with(|config| config.heartbeat_timeout = NEVER);
    let address = switch.address();
    for world_size in [2, 3, 2] {
        let processes: Vec<_> = (0..world_size)
            .map(|rank| request("again", rank, world_size, HANG))
            .map(|request| thread::spawn(move || Process::join(address, request)))
            .collect();
        let processes: Vec<_> = processes.into_iter().map(|rank| rank.join().expect("no panic")).collect();
        let living = Session::connect(SessionConfig { join_timeout: HANG, ..config(&switch, "again", 0, 2) });
        let error = living.expect_err("a live duplicate");
        let is_taken = matches!(
            error,
            SessionError::JoinRefused {
                reason: Refusal::JobRunning { .. } | Refusal::DuplicateRank { .. },
                ..
            }
        );
        assert!(is_taken, "{error}");
        drop(processes);
        let sessions = connect_all(&switch, "again", world_size, |_| {});
        let sums: Vec<_> = sessions.iter().map(|session| submit(session, vec![1_i32; 9], Op::Sum)).collect();
        for sum in sums {
            assert_eq!(sum.wait(), Ok(vec![world_size as i32; 9]));
        }
    }
}

#[test]
fn a_rank_that_dies_is_named_to_every_other() {
    let switch = switch_with(|config| config.heartbeat_timeout = Duration::from_secs(1));
    let dying = rank_that_dies(&switch, "dying", 2, 3);
    let living: Vec<_> = (0..2)
        .map(|rank| {
            let config = config(&switch, "dying", rank, 3);
            thread::spawn(move || {
                let session = Session::connect(config).expect("admitted");
                submit(&session, vec![1_i32; 100_000], Op::Sum).wait()
            })
        })
        .collect();
    dying.join().expect("no panic");
    for rank in living {
        assert_eq!(rank.join().expect("no panic"), Err(SessionError::RankLost { rank: Rank(2) }));
    }
}

#[test]
fn ranks_that_disagree_are_told_both_tensors() {
    let switch = switch();
    let sessions = connect_all(&switch, "mismatch", 2, |_| {});
    let first = submit(&sessions[0], vec![1_i32; 1000], Op::Sum);
    let second = submit(&sessions[1], vec![1_i32; 1001], Op::Sum);
    for result in [first.wait(), second.wait()] {
        let error = result.expect_err("a mismatch");
        let SessionError::CollectiveMismatch { first, second } = &error else { panic!("{error}") };
        let mut elements = [first.1.elements, second.1.elements];
        elements.sort_unstable();
        assert_eq!(elements, [1000, 1001]);
        assert_ne!(first.0, second.0);
    }
    let later = submit(&sessions[0], vec![1_i32; 10], Op::Sum).wait();
    assert!(matches!(later, Err(SessionError::CollectiveMismatch { .. })), "an ended session stays ended");
}

#[test]
fn an_all_reduce_that_takes_too_long_names_who_is_missing() {
    let switch = switch();
    let sessions = connect_all(&switch, "late", 3, |config| config.timeout = Duration::from_millis(500));
    // An empty one has a number as well.
    for session in &sessions {
        assert_eq!(submit(session, Vec::<f32>::new(), Op::Sum).wait(), Ok(vec![]));
    }
    let waiting: Vec<_> =
        sessions[..2].iter().map(|session| submit(session, vec![1.0_f32; 7], Op::Sum)).collect();
    for all_reduce in waiting {
        let error = all_reduce.wait().expect_err("rank 2 gives nothing");
        let SessionError::AllReduceTimeout { missing_ranks, waited, tensor, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(*missing_ranks, Ranks::from([2]));
        assert!(*waited >= Duration::from_millis(500));
        assert_eq!(tensor.to_string(), "sum of 7 float32 (all-reduce 1)");
    }
}

#[test]
fn every_all_reduce_that_a_lost_rank_ends_is_named() {
    let switch = switch();
    let mut sessions = connect_all(&switch, "named", 2, |_| {});
    let (sender, ended) = mpsc::channel();
    let mut tensors = [vec![1.0_f32; 7], vec![1.0_f32; 8]];
    for tensor in &mut tensors {
        let sender = sender.clone();
        // SAFETY: both live, untouched, until both calls were made.
        let raw = unsafe { RawTensor::new(tensor.as_mut_ptr().cast(), tensor.len(), Dtype::Float32) };
        let done = move |result: Result<(), AllReduceError>, _| {
            let _ = sender.send(result);
        };
        let average = Submission::all_reduce(raw.expect("a tensor"), Op::Average);
        sessions[0].submit(average, done).expect("it is open");
    }
    sessions.pop().expect("two").close();
    for (number, elements) in [(0, 7), (1, 8)] {
        let error = ended.recv_timeout(HANG).expect("no hang").expect_err("rank 1 left");
        assert_eq!(error.cause, SessionError::RankLeft { rank: Rank(1) });
        assert_eq!(
            error.tensor,
            Tensor {
                kind: CollectiveKind::AllReduce,
                number,
                elements,
                dtype: Dtype::Float32,
                op: Op::Average
            }
        );
        assert_eq!(error.switch, switch.address().to_string());
        assert!(error.waited > Duration::ZERO);
    }
}

#[test]
fn a_timeout_that_is_changed_holds_for_what_is_under_way() {
    let switch = switch();
    let sessions = connect_all(&switch, "shortened", 2, |config| config.timeout = HANG);
    let waiting = submit(&sessions[0], vec![1_i32; 10], Op::Sum);
    sessions[0].set_timeout(Duration::from_millis(100));
    assert!(matches!(waiting.wait(), Err(SessionError::AllReduceTimeout { .. })));

    let sessions =
        connect_all(&switch, "lengthened", 2, |config| config.timeout = Duration::from_millis(500));
    let waiting = submit(&sessions[0], vec![1_i32; 10], Op::Sum);
    sessions[0].set_timeout(HANG);
    // Longer than the timeout was: nothing can be waited for where nothing is to happen.
    thread::sleep(Duration::from_secs(1));
    let second = submit(&sessions[1], vec![1_i32; 10], Op::Sum);
    assert_eq!(waiting.wait(), Ok(vec![2; 10]));
    assert_eq!(second.wait(), Ok(vec![2; 10]));
}

#[test]
fn a_rank_that_was_expelled_says_so_whether_or_not_the_switch_remembers() {
    let remembers: fn(u32) -> Option<State> =
        |_| Some(State::Aborted(AbortReason { reason: Some(Reason::Expelled(1)) }));
    let forgot: fn(u32) -> Option<State> = |_| Some(State::Unknown(Unknown {}));
    for heartbeat in [remembers, forgot] {
        let scripted = Script { heartbeat, ..Script::default() }.play();
        let switch = scripted.address.to_string();
        let session = Session::connect(SessionConfig::new(&*switch, "a", 1, 2)).expect("admitted");
        let error = submit(&session, vec![1_i32; 10], Op::Sum).wait().expect_err("expelled");
        let silence = Duration::from_millis(250);
        assert_eq!(error, SessionError::Expelled { rank: Rank(1), switch, silence });
    }
}

#[test]
fn a_failed_session_lives_on_for_the_switch_though_a_heartbeat_is_lost() {
    let heartbeat: fn(u32) -> Option<State> =
        |number| (number % 3 != 0).then_some(State::Alive(Alive { left: Vec::new(), others_behind: false }));
    let scripted = Script { heartbeat, ..Script::default() }.play();
    let mut config = SessionConfig::new(scripted.address.to_string(), "a", 0, 2);
    config.timeout = Duration::from_millis(100);
    let session = Session::connect(config).expect("admitted");
    submit(&session, vec![1_i32; 10], Op::Sum).wait().expect_err("nobody sums");
    let heartbeats = || scripted.heartbeats.load(std::sync::atomic::Ordering::Relaxed);
    let (before, began) = (heartbeats(), std::time::Instant::now());
    while heartbeats() < before + 7 {
        assert!(began.elapsed() < HANG, "it fell silent");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_rank_that_left_is_blamed_when_others_wait_for_it() {
    let switch = switch_with(|config| config.heartbeat_timeout = Duration::from_secs(1));
    let mut sessions = connect_all(&switch, "left", 2, |_| {});
    let mut leaving = sessions.pop().expect("two");
    leaving.close();
    let result = submit(&sessions[0], vec![1_i32; 10], Op::Sum).wait();
    assert_eq!(result, Err(SessionError::RankLeft { rank: Rank(1) }));
}

#[test]
fn a_switch_that_stops_tells_every_rank() {
    let switch = switch();
    let address = switch.address().to_string();
    let sessions = connect_all(&switch, "stopped", 2, |_| {});
    let waiting = submit(&sessions[0], vec![1_i32; 10], Op::Sum);
    switch.stop();
    let error = waiting.wait().expect_err("the switch stopped");
    assert_eq!(error, SessionError::SwitchLost { switch: address, cause: "it was shut down".into() });
}

#[test]
fn a_closed_session_fails_what_is_under_way_and_what_comes() {
    let switch = switch();
    let mut sessions = connect_all(&switch, "closed", 2, |_| {});
    let waiting = submit(&sessions[0], vec![1_i32; 10], Op::Sum);
    sessions[0].close();
    assert_eq!(waiting.wait(), Err(SessionError::Closed));
    assert_eq!(submit(&sessions[0], vec![1_i32; 10], Op::Sum).wait(), Err(SessionError::Closed));
    sessions[0].close();
}

#[test]
fn a_switch_that_ends_as_the_job_begins_is_named_at_once() {
    // The other rank gets no answer.
    let scripted = Script { is_brief: true, ..Script::default() }.play();
    let switch = scripted.address.to_string();
    let error = Session::connect(SessionConfig::new(switch.clone(), "brief", 0, 2)).expect_err("it is gone");
    let SessionError::SwitchLost { switch: named, cause } = error else { panic!("{error}") };
    assert_eq!(named, switch);
    assert!(cause.starts_with("it ended as the job began: ") && cause.contains("refused"), "{cause}");
}

/// Returns the error that rank 0 of three hears, and the service that dies. The live service admits
/// ranks 1 and 2. They hear nothing of the other one, which dies in the process of `host`, and
/// leave. The ranks are called 4, 5 and 6.
fn where_a_service_dies_while_ranks_are_admitted(host: Option<u32>) -> (SessionError, String) {
    let alive = switch();
    let brief = Script { is_brief: true, ..Script::default() }.play();
    let dies = brief.address.to_string();
    let services = [(alive.address().to_string(), None), (dies.clone(), host)];
    let services = services.map(|(service, host)| (service, 0.5, None, host));
    let services = ServiceConfig::all(services.to_vec());
    let plan = services[0].plan;
    let zero = SessionConfig { services, names: vec![4, 5, 6].into(), ..config(&alive, "dies", 0, 3) };
    let zero = thread::spawn(move || Session::connect(zero).expect("admitted at both"));
    let leaves = |rank: u32| {
        let alive = alive.address();
        thread::spawn(move || {
            tokio::runtime::Runtime::new().expect("a runtime").block_on(async {
                let mut client = control(alive);
                let settings = settings(&Agreed { plan, ..Agreed::default() });
                let request = JoinRequest { settings, ..request("dies", rank, 3, HANG) };
                let reply = client.join(request).await.expect("an answer").into_inner();
                let Some(Outcome::Admission(Admission { job_id, key, .. })) = reply.outcome else {
                    panic!("{reply:?}")
                };
                let secret = Key::from_bytes(&key).expect("17 bytes").secret_of(Rank(rank as u16));
                client.leave(LeaveRequest { job_id, rank, passed_on: 0, secret }).await.expect("it leaves");
            });
        })
    };
    [1, 2].map(leaves).into_iter().for_each(|rank| rank.join().expect("no panic"));
    let zero = zero.join().expect("no panic");
    let error = submit(&zero, vec![1_i32; 100_000], Op::Sum).wait().expect_err("nobody else is there");
    (error, dies)
}

#[test]
fn a_service_that_dies_while_ranks_are_admitted_is_named_and_not_the_rank_that_left_for_it() {
    let (error, dies) = where_a_service_dies_while_ranks_are_admitted(None);
    let SessionError::SwitchLost { switch, cause } = error else { panic!("{error}") };
    assert_eq!(switch, dies);
    assert!(cause.contains("refused") && cause.contains("rank 5 left"), "{cause}");
}

#[test]
fn a_service_that_goes_with_a_rank_that_left_is_not_to_blame() {
    let (error, _) = where_a_service_dies_while_ranks_are_admitted(Some(2));
    assert!(matches!(error, SessionError::RankLeft { .. }), "{error}");
}

#[test]
fn a_service_that_stops_as_ranks_join_is_named_unless_its_rank_went_with_it() {
    for host in [None, Some(1)] {
        let switch = switch();
        let service = (switch.address().to_string(), 1.0, None, host);
        let services = ServiceConfig::all(vec![service]);
        let zero = SessionConfig { services, ..config(&switch, "stops", 0, 2) };
        let zero = thread::spawn(move || Session::connect(zero));
        wait_until(switch.address(), "nobody joins", |status| !status.jobs.is_empty());
        switch.stop();
        let error = zero.join().expect("no panic").expect_err("nobody serves it");
        match host {
            None => {
                let reason = Refusal::SwitchStopping;
                assert!(
                    matches!(&error, SessionError::JoinRefused { reason: is, .. } if *is == reason),
                    "{error}"
                );
            }
            Some(_) => assert_eq!(error, SessionError::RankLost { rank: Rank(1) }),
        }
    }
}

/// Of a job that two services sum alike.
fn shared_by_two(first: &SwitchServer, second: std::net::SocketAddr, job: &str, rank: u32) -> SessionConfig {
    let services = [first.address(), second].map(|service| (service.to_string(), 0.5, None, None));
    SessionConfig { services: ServiceConfig::all(services.to_vec()), ..config(first, job, rank, 2) }
}

fn not_there_yet() -> std::net::SocketAddr {
    let switch = switch();
    let address = switch.address();
    switch.stop();
    address
}

fn wait_until_it_runs(switch: &SwitchServer) {
    let is_running = |job: &JobStatus| matches!(job.state, JobStatusState::Running { .. });
    wait_until(switch.address(), "no job runs", |status| status.jobs.iter().any(is_running));
}

#[test]
fn ranks_that_one_service_has_admitted_live_there_however_late_another_one_comes() {
    let silence = Duration::from_millis(300);
    let first = switch_with(|config| config.heartbeat_timeout = silence);
    let late = not_there_yet();
    let ranks = [0, 1].map(|rank| {
        let config = shared_by_two(&first, late, "late", rank);
        thread::spawn(move || Session::connect(config))
    });
    wait_until_it_runs(&first);
    // A rank that said nothing for a fourth of that would have been expelled: what must not happen
    // has no event to wait for.
    thread::sleep(4 * silence);
    let second = SwitchServer::start(SwitchServerConfig::new(late)).expect("its port");
    let sessions = ranks.map(|rank| rank.join().expect("no panic").expect("admitted at both"));
    let sums = sessions.each_ref().map(|session| submit(session, vec![1_i32; 100_000], Op::Sum));
    for sum in sums {
        assert!(sum.wait().expect("both are there").iter().all(|element| *element == 2));
    }
    drop(sessions);
    drop(second);
}

#[test]
fn a_rank_that_dies_at_one_service_is_named_to_those_who_wait_for_another() {
    let first = switch();
    let config = shared_by_two(&first, not_there_yet(), "dies", 0);
    let settings = settings(&Agreed { plan: config.services[0].plan, ..Agreed::default() });
    let one = JoinRequest { settings, ..request("dies", 1, 2, HANG) };
    let zero = thread::spawn(move || Session::connect(config));
    drop(Process::join(first.address(), one));
    let error = zero.join().expect("no panic").expect_err("nobody else is there");
    assert_eq!(error, SessionError::RankLost { rank: Rank(1) });
}

#[test]
fn a_rank_that_cannot_take_its_place_under_a_new_switch_leaves_it() {
    // After its restart the switch grants another number of slots, with which the job cannot go on.
    let join: fn(JoinRequest) -> Outcome = |request| {
        let again = request.resume.is_some();
        let slots = if again { 2 } else { 1 };
        Outcome::Admission(Admission {
            job_id: slots.into(),
            switch_instance: if again { INSTANCE } else { INSTANCE - 1 },
            ..Told { slots, ..ONE_SLOT }.admission(&request)
        })
    };
    let heartbeat: fn(u32) -> Option<State> = |_| Some(State::Unknown(Unknown {}));
    let scripted = Script { join, heartbeat, ..Script::default() }.play();
    let session =
        Session::connect(SessionConfig::new(scripted.address.to_string(), "a", 0, 1)).expect("admitted");
    let left = scripted.left.recv_timeout(HANG).expect("it says that it leaves");
    assert_eq!((left.job_id, left.rank), (2, 0));
    let error = submit(&session, vec![1_i32; 10], Op::Sum).wait().expect_err("it did not go on");
    assert!(matches!(error, SessionError::SwitchLost { .. }), "{error}");
}

#[test]
fn a_data_path_that_stands_still_stops_neither_heartbeats_nor_deadlines() {
    // Asked for its figures every 200 ms.
    let switch = switch_with(|config| config.heartbeat_timeout = Duration::from_secs(1));
    let config = SessionConfig { timeout: Duration::from_millis(500), ..config(&switch, "a", 0, 1) };
    let session = Session::connect(config).expect("admitted");
    // A callback that blocks keeps its thread of the data path from whatever it is asked.
    let (entered, has_entered) = mpsc::channel();
    let (go_on, goes_on) = mpsc::channel::<()>();
    let mut tensor = vec![1_i32; 10];
    // SAFETY: it lives, untouched, until the callback was called.
    let raw = unsafe { RawTensor::new(tensor.as_mut_ptr().cast(), tensor.len(), Dtype::Int32) };
    let blocks = move |_: Result<(), AllReduceError>, _| {
        entered.send(()).expect("the test waits");
        let _ = goes_on.recv();
    };
    session.submit(Submission::all_reduce(raw.expect("a tensor"), Op::Sum), blocks).expect("it is open");
    has_entered.recv_timeout(HANG).expect("it is called");
    let waiting = submit(&session, vec![1_i32; 10], Op::Sum);
    let began = Instant::now();
    while session.failure().is_none() {
        assert!(began.elapsed() < HANG, "its deadline is over, and nobody says so");
        // What ends the session tells nobody here.
        thread::sleep(Duration::from_millis(5));
    }
    go_on.send(()).expect("it waits");
    let error = waiting.wait().expect_err("its time was over");
    assert!(matches!(error, SessionError::AllReduceTimeout { .. }), "{error}");
}

#[test]
fn ranks_that_lose_patience_one_after_the_other_blame_who_never_came_and_not_each_other() {
    let switch = switch();
    let ranks: Vec<_> = [1, 2, 3]
        .map(|rank| {
            // Longer than it takes them to see each other.
            let join_timeout = Duration::from_millis(2000 + 300 * u64::from(rank));
            let config = SessionConfig { join_timeout, ..config(&switch, "impatient", rank, 4) };
            thread::spawn(move || Session::connect(config))
        })
        .into();
    for rank in ranks {
        let error = rank.join().expect("no panic").expect_err("rank 0 never comes");
        let SessionError::JoinTimeout { missing_ranks, gone, .. } = &error else { panic!("{error}") };
        assert_eq!((missing_ranks, gone), (&Ranks::from([0]), &Ranks::default()), "{error}");
        assert!(error.to_string().contains(": rank 0 did not join;"), "{error}");
    }
}

#[test]
fn a_name_that_leaves_no_room_for_another_service_to_take_over_is_refused() {
    let (first, second) = (switch(), switch());
    let name = "x".repeat(127);
    let connect = |name: &str| {
        let ranks = [0, 1].map(|rank| {
            let config = shared_by_two(&first, second.address(), name, rank);
            thread::spawn(move || Session::connect(config))
        });
        ranks.map(|rank| rank.join().expect("no panic"))
    };
    for outcome in connect(&name) {
        let error = outcome.expect_err("its substitute would have 129 bytes");
        let SessionError::JoinRefused { reason, .. } = &error else { panic!("{error}") };
        assert_eq!(*reason, Refusal::JobName { bytes: 129 });
    }
    assert!(connect(&name[1..]).iter().all(Result::is_ok));
    assert!(Session::connect(config(&first, &name, 0, 1)).is_ok(), "a single one is taken over by nobody");
}

#[test]
fn answers_that_all_ranks_lack_are_missed_although_the_switch_waits_for_nobody() {
    let switch = switch();
    let between = Between::new(switch.address());
    let sessions: Vec<_> = [0, 1]
        .map(|rank| SessionConfig::new(between.address.to_string(), "mute", rank, 2))
        .map(|config| thread::spawn(move || Session::connect(config).expect("admitted")))
        .map(|rank| rank.join().expect("no panic"))
        .into();
    let sum = || -> Vec<_> {
        let sums: Vec<_> = sessions.iter().map(|session| submit(session, vec![1_i32; 10], Op::Sum)).collect();
        sums.into_iter().map(UnderWay::wait).collect()
    };
    assert!(sum().into_iter().all(|sum| sum == Ok(vec![2; 10])));
    between.swallows_answers();
    for error in sum() {
        let error = error.expect_err("no answer comes");
        let SessionError::SwitchUnreachable { switch, cause, .. } = &error else { panic!("{error}") };
        assert_eq!(*switch, between.address.to_string());
        assert!(cause.starts_with("UDP: no packet comes back, from "), "{cause}");
    }
}

#[test]
fn a_job_that_comes_back_where_there_is_no_place_for_it_asks_again() {
    use std::sync::atomic::{AtomicU32, Ordering};

    use fanin_controller::proto::{Refusal, refusal};

    static ASKED: AtomicU32 = AtomicU32::new(0);
    let join: fn(JoinRequest) -> Outcome = |request| {
        let refused = |reason| Outcome::Refusal(Refusal { reason: Some(reason) });
        let again = request.resume.is_some();
        match again.then(|| ASKED.fetch_add(1, Ordering::SeqCst)) {
            Some(0) => refused(refusal::Reason::TooManyJobs(refusal::TooManyJobs { max: 256 })),
            Some(1) => refused(refusal::Reason::PoolExhausted(refusal::PoolExhausted { asked: 2, free: 1 })),
            _ => Outcome::Admission(Admission { switch_instance: INSTANCE - 1, ..admission(&request) }),
        }
    };
    let heartbeat: fn(u32) -> Option<State> = |_| Some(State::Unknown(Unknown {}));
    let scripted = Script { join, heartbeat, ..Script::default() }.play();
    let session =
        Session::connect(SessionConfig::new(scripted.address.to_string(), "a", 0, 1)).expect("admitted");
    let began = std::time::Instant::now();
    while ASKED.load(Ordering::SeqCst) < 3 {
        assert!(began.elapsed() < HANG, "it gave up");
        thread::yield_now();
    }
    drop(session);
}
