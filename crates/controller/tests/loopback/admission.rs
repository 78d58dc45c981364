//! Who may join, and what the others are told.

use std::io::Write;
use std::net::TcpListener;

use fanin_protocol::control::{Ranks, Refusal};
use fanin_protocol::switchml::RankTerms;
use fanin_wire::{Key, Security, WireDtype};

use super::scripted::{ONE_SLOT, Script, Told, admission};
use super::*;
use fanin_controller::proto::{self, Admission, join_reply::Outcome, refusal::Reason};
use fanin_controller::{Cancel, JobStatusState, ServerError};

fn refused(config: SessionConfig) -> Refusal {
    match Session::connect(config).expect_err("refused") {
        SessionError::JoinRefused { reason, .. } => reason,
        other => panic!("{other}"),
    }
}

/// Lets rank 0 of job "wait" wait, until what it waits for happens or the switch stops.
fn rank_that_waits(
    switch: &SwitchServer,
    world_size: u32,
) -> thread::JoinHandle<Result<Session, SessionError>> {
    let config = config(switch, "wait", 0, world_size);
    let waiting = thread::spawn(move || Session::connect(config));
    wait_for_jobs(switch, 1);
    waiting
}

fn wait_for_jobs(switch: &SwitchServer, jobs: usize) {
    wait_until(switch.address(), "the switch keeps its jobs", |status| status.jobs.len() == jobs);
}

#[test]
fn a_duplicate_rank_and_another_world_size_are_refused_and_the_job_goes_on() {
    let switch = switch();
    let waiting = rank_that_waits(&switch, 2);
    assert_eq!(refused(config(&switch, "wait", 0, 2)), Refusal::DuplicateRank { rank: 0 });
    let mismatch = Refusal::WorldSizeMismatch { rank: 2, asked: 3, job_has: 2 };
    assert_eq!(refused(config(&switch, "wait", 2, 3)), mismatch);
    let second = Session::connect(config(&switch, "wait", 1, 2)).expect("admitted");
    let first = waiting.join().expect("no panic").expect("admitted");
    assert_eq!(refused(config(&switch, "wait", 1, 2)), Refusal::JobRunning { rank: 1, world_size: 2 });
    drop((first, second));
}

#[test]
fn ranks_that_disagree_on_the_wire_dtype_are_both_told_and_their_place_is_free() {
    let switch = switch();
    let waiting = rank_that_waits(&switch, 2);
    let unlike = SessionConfig { wire_dtype: Some(WireDtype::Bfloat16), ..config(&switch, "wait", 1, 2) };
    let field = "wire dtype (wire_dtype, or FANIN_WIRE_DTYPE)".into();
    let (asked, job_has) = ("bfloat16".into(), "native".into());
    let mismatch = Refusal::Mismatch { rank: 1, field, asked, other_rank: 0, job_has };
    assert_eq!(refused(unlike), mismatch);
    let told = waiting.join().expect("no panic").expect_err("refused");
    assert!(matches!(&told, SessionError::JoinRefused { reason, .. } if *reason == mismatch), "{told}");
    let agreed = connect_all(&switch, "wait", 2, |config| config.wire_dtype = Some(WireDtype::Bfloat16));
    assert!(
        agreed.iter().all(|session| terms::<RankTerms>(session).config.wire_dtype == WireDtype::Bfloat16)
    );
}

#[test]
fn a_switch_that_admits_to_another_wire_dtype_is_not_taken_for_one_that_knows_it() {
    let scripted = Script::default().play();
    let config = |wire_dtype| SessionConfig {
        wire_dtype: Some(wire_dtype),
        ..SessionConfig::new(scripted.address.to_string(), "old", 0, 1)
    };
    let error = Session::connect(config(WireDtype::Bfloat16)).expect_err("it does not know it");
    assert!(error.to_string().contains("does not know wire dtype bfloat16; install"), "{error}");
    Session::connect(config(WireDtype::Native)).expect("admitted");
}

#[test]
fn a_rank_that_cannot_take_the_place_it_is_given_leaves_it() {
    let joins: [fn(proto::JoinRequest) -> Outcome; 4] = [
        // More shards than a data path has threads.
        |request| Outcome::Admission(Told { shards: 65, ..ONE_SLOT }.admission(&request)),
        // Not what was asked for.
        |request| {
            let told = Told { wire_dtype: WireDtype::Bfloat16, ..ONE_SLOT };
            Outcome::Admission(told.admission(&request))
        },
        |request| {
            let key = Key::new(7).with(Security::Encrypt).to_bytes().into();
            Outcome::Admission(Admission { key, ..admission(&request) })
        },
        |request| Outcome::Admission(Admission { heartbeat_timeout_ms: 0, ..admission(&request) }),
    ];
    let causes = ["65 shards", "wire dtype native", "security tag", "heartbeat_timeout_ms"];
    for (join, cause) in joins.into_iter().zip(causes) {
        let scripted = Script { join, ..Script::default() }.play();
        let config = SessionConfig::new(scripted.address.to_string(), "unfit", 2, 3);
        let error = Session::connect(config).expect_err(cause);
        assert!(error.to_string().contains(cause), "{error}");
        let left = scripted.left.recv_timeout(HANG).expect("it says that it leaves");
        assert_eq!((left.job_id, left.rank), (1, 2));
    }
}

/// What an ATP switch asks its upstream for all ranks below it.
#[test]
fn one_connection_carries_the_calls_of_hundreds_of_ranks() {
    const WORLD_SIZE: u32 = 64;
    let switch = switch();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let client = control(switch.address());
        let mut calls = tokio::task::JoinSet::new();
        // The last rank of each job comes when all others wait.
        let others = (0..WORLD_SIZE - 1).flat_map(|rank| ["a", "b", "c", "d"].map(|job| (job, rank)));
        for (job, rank) in others.chain(["a", "b", "c", "d"].map(|job| (job, WORLD_SIZE - 1))) {
            let mut client = client.clone();
            let one = settings(&Agreed { in_flight: Some(1), ..Agreed::default() });
            let request = JoinRequest { settings: one, ..request(job, rank, WORLD_SIZE, HANG) };
            calls.spawn(async move { client.join(request).await.expect("an answer").into_inner() });
        }
        while let Some(reply) = calls.join_next().await {
            let outcome = reply.expect("no panic").outcome;
            assert!(matches!(outcome, Some(Outcome::Admission(_))), "{outcome:?}");
        }
    });
}

#[test]
fn an_exhausted_pool_says_asked_and_free() {
    let switch = switch_with(|config| config.pool_units = 1000);
    let mut greedy = config(&switch, "greedy", 0, 1);
    greedy.agreed.in_flight = Some(512);
    // The loopback interface carries chunks of 2048 elements, eight units of 256 each for two sums,
    // and four for a contribution.
    assert_eq!(refused(greedy), Refusal::PoolExhausted { asked: 6144, free: 1000 });
}

#[test]
fn more_ranks_than_a_bitmap_holds_are_refused() {
    let switch = switch();
    assert_eq!(refused(config(&switch, "many", 0, 4097)), Refusal::TooManyWorkers { asked: 4097, max: 4096 });
}

#[test]
fn ranks_that_do_not_come_are_named_by_whoever_is_first_to_lose_patience() {
    let hasty = switch_with(|config| config.join_timeout_max = Duration::from_millis(200));
    let missing = |result: Result<Session, SessionError>| match result.expect_err("incomplete") {
        SessionError::JoinTimeout { missing_ranks, .. } => missing_ranks,
        other => panic!("{other}"),
    };
    assert_eq!(missing(Session::connect(config(&hasty, "a", 1, 3))), Ranks::from([0, 2]));
    let patient = switch();
    let own = SessionConfig { join_timeout: Duration::from_millis(200), ..config(&patient, "b", 2, 3) };
    assert_eq!(missing(Session::connect(own)), Ranks::from([0, 1]));
}

#[test]
fn a_rank_that_hangs_up_while_it_waits_gives_its_place_back() {
    let switch = switch();
    let hasty = SessionConfig { join_timeout: Duration::from_millis(50), ..config(&switch, "wait", 0, 2) };
    Session::connect(hasty).expect_err("incomplete");
    wait_for_jobs(&switch, 0);
    assert_eq!(connect_all(&switch, "wait", 2, |_| {}).len(), 2);
}

#[test]
fn a_rank_that_cancels_while_it_waits_gives_its_place_back() {
    let switch = switch();
    let cancel = Cancel::default();
    let (waiting, cancelled) = (config(&switch, "wait", 0, 2), cancel.clone());
    let waiting = thread::spawn(move || Session::connect_unless(waiting, None, &cancelled));
    wait_for_jobs(&switch, 1);
    cancel.cancel();
    assert_eq!(waiting.join().expect("no panic").expect_err("cancelled"), SessionError::Closed);
    wait_for_jobs(&switch, 0);
    assert_eq!(connect_all(&switch, "wait", 2, |_| {}).len(), 2);
}

#[test]
fn a_process_that_is_stopped_while_it_waits_keeps_its_place() {
    let switch = switch_with(|config| config.heartbeat_timeout = Duration::from_millis(300));
    // Nothing runs on it between two calls: its connection stays open, and answers no ping.
    let stopped = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let address = switch.address();
    let waiting = stopped.spawn(async move {
        let mut client = control(address);
        client.join(request("wait", 0, 2, 2 * HANG)).await
    });
    let status = || switch_status(&switch.address().to_string(), HANG).expect("a status");
    while status().jobs.is_empty() {
        stopped.block_on(async { tokio::time::sleep(Duration::from_millis(5)).await });
    }
    // Many times the timeout: nothing can be waited for where nothing is to happen.
    thread::sleep(Duration::from_millis(1500));
    let second = config(&switch, "wait", 1, 2);
    let second = thread::spawn(move || Session::connect(second));
    let reply = stopped.block_on(waiting).expect("no panic").expect("an answer").into_inner();
    assert!(matches!(reply.outcome, Some(Outcome::Admission(_))), "{reply:?}");
    second.join().expect("no panic").expect("admitted");
}

#[test]
fn the_switch_waits_as_long_as_the_rank_asks() {
    let switch = switch();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let reply = runtime.block_on(async {
        let mut client = control(switch.address());
        let asked = request("hasty", 0, 2, Duration::from_millis(100));
        tokio::time::timeout(HANG, client.join(asked)).await.expect("given up").expect("an answer")
    });
    let Some(Outcome::Refusal(refusal)) = reply.into_inner().outcome else { panic!("admitted") };
    assert!(matches!(refusal.reason, Some(Reason::JoinTimeout(missing)) if missing.missing == [0b10]));
}

#[test]
fn a_rank_asks_for_its_own_patience() {
    let scripted = Script {
        join: |request| {
            let refusal = proto::refusal::TooManyJobs { max: request.patience_ms as u32 };
            Outcome::Refusal(proto::Refusal { reason: Some(Reason::TooManyJobs(refusal)) })
        },
        ..Script::default()
    }
    .play();
    let mut config = SessionConfig::new(scripted.address.to_string(), "patient", 0, 1);
    config.join_timeout = Duration::from_secs(4000);
    let Refusal::TooManyJobs { max } = refused(config) else { panic!("another refusal") };
    // Less what it took to find the switch.
    assert!((3_000_000..=4_000_000).contains(&max), "{max}");
}

#[test]
fn a_worker_tells_its_own_version_from_the_switch_s() {
    let ours = u32::from(fanin_wire::VERSION);
    let by_status = Script { wire_version: 99, ..Script::default() };
    let by_refusal = Script {
        join: |_| {
            // From where the switch stands.
            let mismatch = proto::refusal::VersionMismatch { theirs: fanin_wire::VERSION.into(), ours: 99 };
            Outcome::Refusal(proto::Refusal { reason: Some(Reason::VersionMismatch(mismatch)) })
        },
        ..Script::default()
    };
    for script in [by_status, by_refusal] {
        let scripted = script.play();
        let switch = scripted.address.to_string();
        let error = Session::connect(SessionConfig::new(&*switch, "new", 0, 1)).expect_err("refused");
        let message = format!("switch {switch} speaks wire version 99, this process {ours};");
        assert!(error.to_string().starts_with(&message), "{error}");
        assert_eq!(error, SessionError::ProtocolVersionMismatch { switch, ours, theirs: 99 });
    }
}

#[test]
fn no_switch_is_a_typed_error_that_names_the_port() {
    let (_held, free) = super::ports::closed_port();
    let mut config = SessionConfig::new(free.to_string(), "none", 0, 1);
    config.join_timeout = Duration::from_millis(300);
    let error = Session::connect(config).expect_err("nobody there");
    assert!(
        matches!(&error, SessionError::SwitchUnreachable { port, .. } if *port == free.port()),
        "{error}"
    );
    let message = error.to_string();
    assert!(message.contains("did not answer within 0.3 s") && message.contains("fanin switch"), "{message}");
}

#[test]
fn what_answers_and_is_no_switch_is_told_so() {
    let answers: [&'static [u8]; 3] = [b"", b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n"];
    for answer in answers {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound");
        thread::spawn(move || {
            for connection in listener.incoming() {
                let _ = connection.and_then(|mut connection| connection.write_all(answer));
            }
        });
        let mut config = SessionConfig::new(address.to_string(), "none", 0, 1);
        config.join_timeout = Duration::from_secs(2);
        let error = Session::connect(config).expect_err("no switch");
        assert!(matches!(error, SessionError::NotASwitch { .. }), "{error}");
    }
}

#[test]
fn another_wire_version_is_refused_with_both() {
    let switch = switch();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let reply = runtime.block_on(async {
        let mut client = control(switch.address());
        let request =
            JoinRequest { wire_version: 99, job: "new".into(), world_size: 1, ..JoinRequest::default() };
        client.join(request).await.expect("an answer").into_inner()
    });
    let Some(Outcome::Refusal(refusal)) = reply.outcome else { panic!("admitted") };
    let Some(Reason::VersionMismatch(mismatch)) = refusal.reason else { panic!("{refusal:?}") };
    assert_eq!((mismatch.theirs, mismatch.ours), (99, fanin_wire::VERSION.into()));
}

#[test]
fn a_taken_port_says_so() {
    let first = switch();
    let second = SwitchServer::start(SwitchServerConfig::new(first.address())).expect_err("taken");
    assert!(matches!(second, ServerError::PortInUse { protocol: "TCP", .. }), "{second}");
    // At an address where no other test listens: the TCP port beside it is free.
    let udp = std::net::UdpSocket::bind("127.0.0.77:0").expect("a free port");
    let address = udp.local_addr().expect("bound");
    let third = SwitchServer::start(SwitchServerConfig::new(address)).expect_err("taken");
    assert!(matches!(third, ServerError::PortInUse { protocol: "UDP", .. }), "{third}");
}

#[test]
fn limits_are_checked_when_the_switch_starts() {
    let start = |change: fn(&mut SwitchServerConfig)| {
        let mut config = SwitchServerConfig::new(([127, 0, 0, 1], 0).into());
        change(&mut config);
        SwitchServer::start(config).expect_err("a limit")
    };
    assert!(matches!(start(|config| config.shards = 0), ServerError::Shards(0)));
    assert!(matches!(start(|config| config.shards = 1000), ServerError::Shards(1000)));
    assert!(matches!(start(|config| config.pool_units = 0), ServerError::Config(_)));
}

#[test]
fn the_status_shows_a_running_job() {
    let switch = switch();
    let sessions = connect_all(&switch, "shown", 2, |config| config.agreed.in_flight = Some(64));
    let waiting = submit(&sessions[0], vec![1_i32; 10_000], Op::Sum);
    let address = switch.address().to_string();
    let waited_for = loop {
        let status = switch_status(&address, HANG).expect("a status");
        let [job] = &status.jobs[..] else { panic!("{status:?}") };
        let JobStatusState::Running { waiting_for, in_flight: 64, .. } = &job.state else {
            panic!("{job:?}")
        };
        if !waiting_for.is_empty() {
            break waiting_for.clone();
        }
        thread::sleep(Duration::from_millis(5));
    };
    assert!(waited_for.iter().all(|(rank, _)| rank.0 == 1), "{waited_for:?}");
    assert_eq!(submit(&sessions[1], vec![2_i32; 10_000], Op::Sum).wait(), Ok(vec![3; 10_000]));
    assert_eq!(waiting.wait(), Ok(vec![3; 10_000]));
}
