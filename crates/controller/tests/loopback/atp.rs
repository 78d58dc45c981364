//! ATP: racks of ranks, their switches and a server, and each of them that goes away.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use fanin_controller::{ChainError, JobStatusState, RackServer, RackServerConfig, switch_status};
use fanin_protocol::atp::{AtpJobConfig, RankTerms};
use fanin_protocol::control::{Ranks, Refusal};
use fanin_wire::{
    Collective, Directions, Flags, GradientHeader, GradientPacket, Kind, Pattern, Preamble, Rank, ShardId,
    WireDtype, WorkerId, fragment_packet_bytes,
};

use super::scripted::Script;
use super::*;

fn server_with(change: impl FnOnce(&mut SwitchServerConfig)) -> SwitchServer {
    switch_with(|config| {
        config.protocol = protocol("atp");
        change(config);
    })
}

pub(super) fn server() -> SwitchServer {
    server_with(|_| {})
}

fn rack_with(upstream: SocketAddr, change: impl FnOnce(&mut RackServerConfig)) -> RackServer {
    let mut config = RackServerConfig::new(protocol("atp"), ([127, 0, 0, 1], 0).into(), upstream.to_string());
    change(&mut config);
    RackServer::start(config).expect("a free port")
}

pub(super) fn rack(upstream: SocketAddr) -> RackServer {
    rack_with(upstream, |_| {})
}

/// A rank for each of the switches (or the server) that it is to ask.
pub(super) fn ranks(job: &str, at: &[SocketAddr]) -> Vec<Session> {
    ranks_with(job, at, |_| {})
}

/// As [`ranks`], with what `change` makes of their settings.
fn ranks_with(job: &str, at: &[SocketAddr], change: impl Fn(&mut SessionConfig)) -> Vec<Session> {
    let world_size = at.len() as u32;
    let connecting: Vec<_> = (0..world_size)
        .zip(at)
        .map(|(rank, switch)| {
            let mut config = SessionConfig::new(switch.to_string(), job, rank, world_size);
            config.protocol = protocol("atp");
            change(&mut config);
            thread::spawn(move || Session::connect(config))
        })
        .collect();
    connecting.into_iter().map(|rank| rank.join().expect("no panic").expect("admitted")).collect()
}

/// Sums tensors that differ by rank and place, of a length that fills many fragments and the last one in part.
pub(super) fn sums_are_exact(sessions: &[Session], seed: i32) {
    let (length, count) = (100_003, sessions.len() as i32);
    let value = |rank: i32, i: i32| rank * 1_000_003 + i * 7 + seed;
    let integers: Vec<_> = (0..count)
        .zip(sessions)
        .map(|(rank, session)| submit(session, (0..length).map(|i| value(rank, i)).collect(), Op::Sum))
        .collect();
    // Whole numbers, so that the sums are known to the bit: they stay far below what float32 tells apart.
    let float = |rank: i32, i: i32| ((i + rank) % 97) as f32;
    let floats: Vec<_> = (0..count)
        .zip(sessions)
        .map(|(rank, session)| submit(session, (0..length).map(|i| float(rank, i)).collect(), Op::Sum))
        .collect();
    let expected: Vec<i32> = (0..length).map(|i| (0..count).map(|rank| value(rank, i)).sum()).collect();
    for all_reduce in integers {
        assert!(all_reduce.wait().expect("a sum") == expected);
    }
    let expected: Vec<f32> = (0..length).map(|i| (0..count).map(|rank| float(rank, i)).sum()).collect();
    let mut bits = None;
    for all_reduce in floats {
        let sums = all_reduce.wait().expect("a sum");
        assert!(sums.iter().zip(&expected).all(|(sum, expected)| (sum - expected).abs() < 1e-3));
        let same: Vec<u32> = sums.iter().map(|sum| sum.to_bits()).collect();
        assert!(*bits.get_or_insert(same.clone()) == same, "every rank has the same bits");
    }
}

#[test]
fn a_window_is_as_long_as_it_was_asked_for() {
    let server = server();
    for in_flight in [40, 41] {
        let mut config = config(&server, "own", 0, 1);
        (config.protocol, config.agreed.in_flight) = (protocol("atp"), Some(in_flight));
        let session = Session::connect(config).expect("admitted");
        let job = session.job().expect("it runs");
        assert_eq!((job.in_flight(), terms::<RankTerms>(&session).config.window_max), (in_flight, in_flight));
    }
}

#[test]
fn a_rank_decides_whether_its_own_window_shrinks() {
    let server = server();
    for congestion_control in [true, false] {
        let mut config = SessionConfig::new(server.address().to_string(), "windows", 0, 1);
        (config.protocol, config.congestion_control) = (protocol("atp"), congestion_control);
        let mut session = Session::connect(config).expect("admitted");
        assert_eq!(terms::<RankTerms>(&session).config.congestion_control, congestion_control);
        session.close();
    }
}

#[test]
fn one_rack_sums_exactly() {
    let server = server();
    let rack = rack(server.address());
    let sessions = ranks("a", &[rack.address(); 3]);
    sums_are_exact(&sessions, 1);
    sums_are_exact(&sessions, 2);
}

#[test]
fn two_racks_and_a_switch_above_them_meet_at_the_server() {
    let server = server();
    let racks = [rack(server.address()), rack(server.address())];
    let at = [&racks[0], &racks[1], &racks[0], &racks[1]].map(RackServer::address);
    sums_are_exact(&ranks("two racks", &at), 3);
    let spine = rack(server.address());
    let racks = [rack(spine.address()), rack(spine.address())];
    let mixed =
        [racks[0].address(), racks[1].address(), racks[0].address(), spine.address(), server.address()];
    sums_are_exact(&ranks("two levels, and ranks above them", &mixed), 4);
    sums_are_exact(&ranks("no switch", &[server.address(); 2]), 5);
}

#[test]
fn switches_that_listen_on_all_addresses_know_each_other_by_any() {
    let everywhere: SocketAddr = ([0, 0, 0, 0], 0).into();
    let here = |address: SocketAddr| SocketAddr::from(([127, 0, 0, 1], address.port()));
    let server = server_with(|config| config.listen = everywhere);
    let rack = rack_with(here(server.address()), |config| config.listen = everywhere);
    sums_are_exact(&ranks("everywhere", &[here(rack.address()), here(server.address())]), 9);
    let status = switch_status(&here(rack.address()).to_string(), HANG).expect("a status");
    assert_eq!(status.relays[0].address, here(rack.address()).to_string(), "as its upstream sees it");

    drop(server);
    let error = refused(asking(here(rack.address()), "atp"));
    let SessionError::Chain { error: ChainError::UpstreamUnreachable { switch, .. }, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(switch, here(rack.address()).to_string(), "also when it does not answer");
}

#[test]
fn a_switch_without_aggregators_and_one_with_fewer_than_a_window_are_exact() {
    let server = server();
    for aggregators in [0, 1, 7] {
        let rack = rack_with(server.address(), |config| config.memory.aggregators = aggregators);
        sums_are_exact(&ranks("few", &[rack.address(); 2]), 6);
    }
}

#[test]
fn two_jobs_share_a_switch() {
    let server = server();
    let rack = rack(server.address());
    let jobs = ["a", "b"].map(|job| ranks(job, &[rack.address(); 2]));
    thread::scope(|scope| {
        for (seed, sessions) in (10..).zip(&jobs) {
            scope.spawn(move || (0..4).for_each(|round| sums_are_exact(sessions, 2 * seed + round)));
        }
    });
    let status = switch_status(&rack.address().to_string(), HANG).expect("a status");
    assert_eq!(status.protocol, "atp");
    let [switch] = &status.relays[..] else { panic!("{status:?}") };
    assert_eq!((switch.upstream.clone(), switch.jobs.len()), (server.address().to_string(), 2));
    assert!(switch.jobs.iter().all(|job| job.aggregations > 0), "{switch:?}");
    for job in &status.jobs {
        let JobStatusState::Running { completed, .. } = job.state else { panic!("{job:?}") };
        assert!(completed > 0, "{job:?}");
    }
}

/// Starts something again on the port that it had.
pub(super) fn again<T>(start: impl Fn() -> Result<T, fanin_controller::ServerError>) -> T {
    // Connections of the one before may still be closing.
    let began = std::time::Instant::now();
    loop {
        match start() {
            Ok(started) => return started,
            Err(error) => assert!(began.elapsed() < HANG, "{error}"),
        }
        // Between two tries, within the limit above.
        thread::sleep(Duration::from_millis(20));
    }
}

/// Sums without an end, on all ranks, until told to stop; every sum is checked.
pub(super) fn summing(sessions: &[Session], until: impl FnOnce()) -> u32 {
    summing_with(|round| sums_are_exact(sessions, round), until)
}

/// Set when it goes, also where a test fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// As [`summing`], each round of sums by `sums`.
pub(super) fn summing_with(sums: impl Fn(i32) + Sync, until: impl FnOnce()) -> u32 {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let rounds = scope.spawn(|| {
            let mut rounds = 0;
            while !stop.load(Ordering::Relaxed) || rounds < 2 {
                sums(rounds as i32);
                rounds += 1;
            }
            rounds
        });
        let ends = Ends(&stop);
        until();
        drop(ends);
        rounds.join().expect("exact sums")
    })
}

#[test]
fn a_switch_that_restarts_learns_its_jobs_and_the_sums_go_on() {
    let server = server();
    let first = rack(server.address());
    let (address, upstream) = (first.address(), server.address().to_string());
    let sessions = ranks("goes on", &[address, address, server.address()]);
    sums_are_exact(&sessions, 1);
    let mut running = Some(first);
    summing(&sessions, || {
        drop(running.take());
        let config = RackServerConfig::new(protocol("atp"), address, &*upstream);
        let second = again(|| RackServer::start(config.clone()));
        // Nobody joins again: heartbeats alone tell it.
        wait_until(address, "it did not learn", |status| !status.relays[0].jobs.is_empty());
        running = Some(second);
    });
    sums_are_exact(&sessions, 2);
}

#[test]
fn a_rank_that_dies_behind_a_switch_is_named_to_every_other() {
    let server = server_with(|config| config.heartbeat_timeout = Duration::from_secs(1));
    let racks = [rack(server.address()), rack(server.address())];
    let dying = {
        let request = request_of("atp", "dying", 2, 3);
        let address = racks[1].address();
        thread::spawn(move || super::faults::join_and_die(address, request))
    };
    let living: Vec<_> = (0..2)
        .map(|rank| {
            let mut config = SessionConfig::new(racks[rank].address().to_string(), "dying", rank as u32, 3);
            config.protocol = protocol("atp");
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
fn a_rank_whose_connection_to_its_switch_closes_is_named_to_every_other() {
    use super::faults::{NEVER, Process};
    let server = server_with(|config| config.heartbeat_timeout = NEVER);
    let (top, bottom) = (rack(server.address()), rack(server.address()));
    let far = rack(bottom.address());
    for next_to_it in [top.address(), far.address()] {
        let request = request_of("atp", "closes", 1, 2);
        let dying = thread::spawn(move || Process::join(next_to_it, request));
        let mut config = SessionConfig::new(top.address().to_string(), "closes", 0, 2);
        config.protocol = protocol("atp");
        let session = Session::connect(config).expect("admitted");
        let dying = dying.join().expect("no panic");
        let sum = submit(&session, vec![1_i32; 10], Op::Sum);
        drop(dying);
        assert_eq!(sum.wait(), Err(SessionError::RankLost { rank: Rank(1) }));
    }
}

#[test]
fn a_switch_that_stops_ends_the_streams_of_its_ranks_and_says_nothing_of_them() {
    use super::faults::{NEVER, Process};
    let server = server_with(|config| config.heartbeat_timeout = NEVER);
    let rack = rack(server.address());
    let join = |job, at| Process::join(at, request_of("atp", job, 0, 1));
    let mut behind_it = join("behind it", rack.address());
    let beside_it = join("beside it", server.address());
    rack.stop();
    behind_it.stream_ends().expect("in order, not with its connection");
    // As soon as the server gives up a rank that dies now, it would have given up one that it had heard of before.
    drop(beside_it);
    let state = |job: &str| {
        let status = switch_status(&server.address().to_string(), HANG).expect("a status");
        status.jobs.into_iter().find(|status| status.name == job).map(|status| status.state)
    };
    let began = std::time::Instant::now();
    while matches!(state("beside it"), Some(JobStatusState::Running { .. })) {
        assert!(began.elapsed() < HANG, "a dead rank is not found");
        // Between two questions, within the limit above.
        thread::sleep(Duration::from_millis(5));
    }
    assert!(matches!(state("behind it"), Some(JobStatusState::Running { .. })), "{:?}", state("behind it"));
}

#[test]
fn ranks_that_disagree_are_late_or_left_are_named() {
    let server = server();
    let rack = rack(server.address());
    let sessions = ranks("mismatch", &[rack.address(); 2]);
    let first = submit(&sessions[0], vec![1_i32; 1000], Op::Sum);
    let second = submit(&sessions[1], vec![1_i32; 1001], Op::Sum);
    for result in [first.wait(), second.wait()] {
        let error = result.expect_err("a mismatch");
        assert!(matches!(error, SessionError::CollectiveMismatch { .. }), "{error}");
    }
    let sessions = ranks("late", &[rack.address(); 3]);
    sessions.iter().for_each(|session| session.set_timeout(Duration::from_secs(1)));
    let waiting: Vec<_> =
        sessions[..2].iter().map(|session| submit(session, vec![1.0_f32; 7], Op::Sum)).collect();
    for all_reduce in waiting {
        let error = all_reduce.wait().expect_err("rank 2 gives nothing");
        let SessionError::AllReduceTimeout { missing_ranks, .. } = &error else { panic!("{error}") };
        assert_eq!(*missing_ranks, Ranks::from([2]));
    }
    let mut sessions = ranks("left", &[rack.address(), server.address()]);
    sessions.pop().expect("two").close();
    let result = submit(&sessions[0], vec![1_i32; 10], Op::Sum).wait();
    assert_eq!(result, Err(SessionError::RankLeft { rank: Rank(1) }));
}

/// A packet of the job's, with these directions.
fn forged(config: &AtpJobConfig, directions: Directions, sequence: u64, is_ack: bool) -> Vec<u8> {
    let preamble = Preamble {
        kind: Kind::Gradient,
        job: config.id,
        generation: config.generation,
        worker: WorkerId::ALL,
        shard: ShardId(0),
    };
    let wire_dtype = WireDtype::SharedExponent;
    let header = GradientHeader {
        flags: Flags { is_ack, ..Flags::default() },
        directions,
        sequence,
        aggregator_index: sequence as u32,
        fragment: 0,
        collective: Collective {
            sequence: 9,
            dtype: Dtype::Int32,
            op: Op::Sum,
            pattern: Pattern::AllReduce,
            elements: 9,
            wire_dtype,
        },
        exponent: GradientHeader::STATIC_FACTOR,
        next_exponent: 0,
    };
    let elements = usize::from(config.elements);
    let mut bytes = vec![0; fragment_packet_bytes::<Directions>(elements)];
    GradientPacket::write(&mut bytes, config.key, &preamble, &header, elements, |payload| payload.fill(1));
    bytes
}

/// Those that a child could not have sent, although they have the job's tags. What a stranger
/// sends, who has no key, is in `strangers`.
#[test]
fn foreign_packets_have_no_effect_on_a_live_job() {
    let server = server();
    let rack = rack(server.address());
    let sessions = ranks("live", &[rack.address(); 2]);
    sums_are_exact(&sessions, 1);
    let RankTerms { config, directions, .. } = terms(&sessions[0]);
    let at_server = Directions { level: 1, ..directions };
    let nobody = Directions { bitmaps: [1 << 20, 0, 0, 0], ..at_server };
    let stranger = std::net::UdpSocket::bind("127.0.0.1:0").expect("a free port");
    let (to_rack, to_server) = (rack.address(), server.address());
    let packets: Vec<_> = (0..1000)
        .flat_map(|sequence| {
            [
                // Parameters that do not come from upstream, and a fragment for another level.
                (forged(&config, directions, sequence, true), to_rack),
                (forged(&config, at_server, sequence, false), to_rack),
                // Of a worker that the job does not have, and parameters for who makes them.
                (forged(&config, nobody, sequence, false), to_server),
                (forged(&config, at_server, sequence, true), to_server),
            ]
        })
        .collect();
    summing(&sessions, || {
        for (packet, to) in &packets {
            stranger.send_to(packet, to).expect("sent");
        }
    });
    let (at_rack, at_server) = (["foreign", "out_of_range"], ["unexpected", "out_of_range"]);
    for (address, reasons) in [(to_rack, at_rack), (to_server, at_server)] {
        let metrics = super::http::fetch(address, "/metrics");
        for reason in reasons {
            let counter = format!("fanin_packets_dropped_total{{reason=\"{reason}\"}}");
            let line = metrics.lines().find(|line| line.starts_with(&counter)).expect("counted");
            assert!(!line.ends_with(" 0"), "{line}");
        }
    }
}

fn refused(config: SessionConfig) -> SessionError {
    Session::connect(config).expect_err("refused")
}

fn asking(switch: SocketAddr, name: &str) -> SessionConfig {
    let mut config = SessionConfig::new(switch.to_string(), "a", 0, 1);
    config.protocol = protocol(name);
    // What may come yet is waited for.
    config.join_timeout = Duration::from_secs(4);
    config
}

#[test]
fn a_rank_that_comes_before_the_server_waits_for_it() {
    let (held, nowhere) = super::ports::closed_port();
    let rack = rack(nowhere);
    let mut early = asking(rack.address(), "atp");
    early.join_timeout = HANG;
    let early = thread::spawn(move || Session::connect(early));
    // The rank has asked when the rack was refused; later is as good.
    thread::sleep(Duration::from_millis(500));
    assert!(!early.is_finished(), "it waits");
    drop(held);
    let server = again(|| {
        SwitchServer::start(SwitchServerConfig {
            protocol: protocol("atp"),
            ..SwitchServerConfig::new(nowhere)
        })
    });
    let session = early.join().expect("no panic").expect("admitted");
    assert_eq!(submit(&session, vec![3_i32; 5], Op::Sum).wait(), Ok(vec![3; 5]));
    drop((session, rack, server));
}

#[test]
fn a_rank_that_waited_for_the_server_and_then_for_ranks_says_which_are_missing() {
    let (held, nowhere) = super::ports::closed_port();
    let rack = rack(nowhere);
    let config = SessionConfig {
        world_size: 2,
        join_timeout: Duration::from_secs(20),
        ..asking(rack.address(), "atp")
    };
    let early = thread::spawn(move || Session::connect(config));
    // By then the rack has said once that it has no server, which it does after three seconds and
    // nobody but the rank hears. On a slow machine it has not, and the test passes all the same:
    // there are 16 seconds left.
    thread::sleep(Duration::from_millis(3300));
    drop(held);
    let _server = again(|| {
        SwitchServer::start(SwitchServerConfig {
            protocol: protocol("atp"),
            ..SwitchServerConfig::new(nowhere)
        })
    });
    let error = early.join().expect("no panic").expect_err("rank 1 does not come");
    assert!(
        matches!(&error, SessionError::JoinTimeout { missing_ranks, .. } if *missing_ranks == Ranks::from([1])),
        "{error}"
    );
}

/// Whole numbers below 256 are exact in bfloat16, and so are those of their sums that are even.
pub(super) fn bfloat16_sums_are_exact(sessions: &[Session]) {
    let count = sessions.len() as i32;
    let value = |rank: i32, i: i32| ((i + rank) % 100) as f32;
    let length = 100_003;
    let floats: Vec<_> = (0..count)
        .zip(sessions)
        .map(|(rank, session)| submit(session, (0..length).map(|i| value(rank, i)).collect(), Op::Sum))
        .collect();
    for all_reduce in floats {
        let sums = all_reduce.wait().expect("a sum");
        for (i, sum) in (0..length).zip(sums) {
            let exact: f32 = (0..count).map(|rank| value(rank, i)).sum();
            assert!((sum - exact).abs() <= if exact < 256.0 { 0.0 } else { 1.0 }, "{sum} for {exact}");
            assert_eq!(sum.to_bits() & 0xffff, 0, "{sum} came as bfloat16");
        }
    }
}

#[test]
fn large_floats_travel_as_bfloat16_where_ranks_ask_for_it() {
    let server = server();
    let racks = [rack(server.address()), rack(server.address())].map(|rack| (rack.address(), rack));
    let at = [racks[0].0, racks[0].0, racks[1].0];
    let sessions = ranks_with("b", &at, |config| config.wire_dtype = Some(WireDtype::Bfloat16));
    bfloat16_sums_are_exact(&sessions);
}

#[test]
fn a_rank_that_speaks_another_protocol_is_told_what_to_set() {
    let (switch, server) = (switch(), server());
    let rack = rack(server.address());
    let reason = |error: SessionError| match error {
        SessionError::JoinRefused { reason, .. } => reason,
        error => panic!("{error}"),
    };
    let mismatch =
        |asked: &str, served: &str| Refusal::ProtocolMismatch { asked: asked.into(), served: served.into() };
    let (atp, switch_ml) = ("atp", "switchml");
    assert_eq!(reason(refused(asking(switch.address(), atp))), mismatch(atp, "switchml or dlcp"));
    for address in [rack.address(), server.address()] {
        let reason = reason(refused(asking(address, switch_ml)));
        assert_eq!(reason, mismatch(switch_ml, atp));
        assert!(reason.to_string().contains("FANIN_PROTOCOL"), "{reason}");
    }
    let mut int8 = asking(rack.address(), atp);
    int8.wire_dtype = Some(WireDtype::Int8);
    let reason = reason(refused(int8));
    let Refusal::Unserved { reason } = reason else { panic!("{reason}") };
    assert!(
        reason.contains("none travel as int8")
            && reason.contains("to bfloat16")
            && reason.contains("FANIN_WIRE_DTYPE"),
        "{reason}"
    );
}

#[test]
fn a_chain_that_leads_nowhere_is_refused_with_the_place_where_it_ends() {
    let chain = |error: SessionError| match error {
        SessionError::Chain { error, .. } => error,
        error => panic!("{error}"),
    };
    let (held, nowhere) = super::ports::closed_port();
    let last = rack(nowhere);
    let first = rack(last.address());
    let ChainError::UpstreamUnreachable { switch, upstream, .. } =
        chain(refused(asking(first.address(), "atp")))
    else {
        panic!("reachable")
    };
    assert_eq!((switch, upstream), (last.address().to_string(), nowhere.to_string()));

    // A second switch on the port that the first one's upstream names, whose upstream is the first.
    drop(held);
    let ring = again(|| {
        RackServer::start(RackServerConfig::new(protocol("atp"), nowhere, first.address().to_string()))
    });
    let error = chain(refused(asking(ring.address(), "atp")));
    assert_eq!(error, ChainError::Loop { switch: ring.address().to_string() });

    let stranger = super::switch();
    let lost = rack(stranger.address());
    let error = refused(asking(lost.address(), "atp")).to_string();
    assert!(
        error.contains("it serves switchml, and this switch atp")
            && error.contains("with the same --protocol"),
        "{error}"
    );

    let server = server();
    let mut upstream = server.address();
    let deep: Vec<_> = (0..5)
        .map(|_| {
            let switch = rack(upstream);
            upstream = switch.address();
            switch
        })
        .collect();
    let error = refused(asking(deep[4].address(), "atp"));
    assert!(
        matches!(&error, SessionError::JoinRefused { reason: Refusal::TooManyLevels { levels: 5 }, .. }),
        "{error}"
    );
    sums_are_exact(&ranks("deep", &[deep[3].address(), deep[3].address()]), 8);
}

#[test]
fn an_upstream_whose_answer_does_not_fit_is_named() {
    use fanin_controller::proto::{Admission, Route, join_reply::Outcome};
    let answers = Script {
        protocol: "atp",
        join: |request| {
            // A job of which no switch serves any level.
            let route = Some(Box::new(Route { parts: Vec::new(), ..Route::default() }));
            Outcome::Admission(Admission { route, protocol: request.protocol, ..Admission::default() })
        },
        ..Script::default()
    };
    let answers = answers.play();
    let rack = rack(answers.address);
    let error = refused(asking(rack.address(), "atp"));
    let SessionError::Chain { error: ChainError::RouteMismatch { switch, upstream, cause }, .. } = error
    else {
        panic!("{error}")
    };
    assert_eq!((switch, upstream), (rack.address().to_string(), answers.address.to_string()));
    assert_eq!(cause, "it counts too few switches on the way");
}

#[test]
fn more_ranks_than_a_bitmap_tells_apart_are_refused() {
    let server = server();
    let rack = rack(server.address());
    let joining: Vec<_> = (0..33)
        .map(|rank_number| {
            let mut config = SessionConfig::new(rack.address().to_string(), "crowd", rank_number, 33);
            config.protocol = protocol("atp");
            thread::spawn(move || Session::connect(config).expect_err("too many"))
        })
        .collect();
    for rank in joining {
        let error = rank.join().expect("no panic");
        let SessionError::JoinRefused { reason, .. } = &error else { panic!("{error}") };
        assert_eq!(*reason, Refusal::TooManyChildren { switch: Some(rack.address()), children: 33 });
    }
}

#[test]
fn a_switch_that_cannot_serve_a_rank_gives_the_place_back_that_the_server_gave() {
    // Admitted, and not told how its packets go.
    let server = Script { protocol: "atp", ..Script::default() }.play();
    let rack = rack(server.address);
    let error = refused(asking(rack.address(), "atp"));
    assert!(error.to_string().contains("route"), "{error}");
    let left = server.left.recv_timeout(HANG).expect("the switch says that the rank leaves");
    assert_eq!((left.job_id, left.rank), (1, 0));
}
