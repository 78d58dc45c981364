//! GOAT: switches that sum what a root plans for them, and each of them that goes away.

use std::net::SocketAddr;

use fanin_controller::{JobStatus, JobStatusState, RackServer, RackServerConfig, switch_status};
use fanin_protocol::control::Refusal;
use fanin_protocol::goat::{GoatJobConfig, RankTerms};
use fanin_udp::Peer;
use fanin_wire::{
    AggregationNode, Collective, Flags, FragmentPacket, Generation, GradientHeader, Kind, PlannedDirections,
    PlannedHeader, Preamble, Rank, ShardId, SubModel, WorkerId, fragment_packet_bytes,
};

use super::atp::{again, bfloat16_sums_are_exact, summing, sums_are_exact};
use super::shards::shards_of;
use super::*;

fn root_with(change: impl FnOnce(&mut SwitchServerConfig)) -> SwitchServer {
    switch_with(|config| {
        config.protocol = protocol("goat");
        change(config);
    })
}

fn root() -> SwitchServer {
    root_with(|_| {})
}

fn rack_config(listen: SocketAddr, upstream: SocketAddr, aggregators: u32) -> RackServerConfig {
    let mut config = RackServerConfig::new(protocol("goat"), listen, upstream.to_string());
    config.memory.aggregators = aggregators;
    config
}

fn rack_of(upstream: SocketAddr, aggregators: u32) -> RackServer {
    RackServer::start(rack_config(([127, 0, 0, 1], 0).into(), upstream, aggregators)).expect("a free port")
}

/// To the root's machine there is a link: it is worth the memory that spares it.
fn rack_behind_a_link(upstream: SocketAddr, aggregators: u32) -> RackServer {
    let config = rack_config(([127, 0, 0, 1], 0).into(), upstream, aggregators);
    RackServer::start(RackServerConfig { rate_bps: Some(100_000_000), ..config }).expect("a free port")
}

fn asking(switch: SocketAddr, job: &str, rank: u32, world_size: u32) -> SessionConfig {
    let mut config = SessionConfig::new(switch.to_string(), job, rank, world_size);
    config.protocol = protocol("goat");
    config
}

/// A rank at each of these switches.
fn ranks_with(job: &str, at: &[SocketAddr], change: impl Fn(&mut SessionConfig)) -> Vec<Session> {
    let connecting: Vec<_> = (0..at.len() as u32)
        .zip(at)
        .map(|(rank, switch)| {
            let mut config = asking(*switch, job, rank, at.len() as u32);
            change(&mut config);
            thread::spawn(move || Session::connect(config))
        })
        .collect();
    connecting.into_iter().map(|rank| rank.join().expect("no panic").expect("admitted")).collect()
}

fn ranks(job: &str, at: &[SocketAddr]) -> Vec<Session> {
    ranks_with(job, at, |_| {})
}

/// Which share each switch has of the only job, by the switch's address, as who is there says.
fn shares(at: SocketAddr) -> Vec<(String, f64)> {
    let status = switch_status(&at.to_string(), HANG).expect("a status");
    let JobStatusState::Running { planned, .. } = &status.jobs[0].state else { panic!("{status:?}") };
    planned.iter().map(|share| (share.switch.clone(), share.share)).collect()
}

#[test]
fn a_root_alone_sums_exactly() {
    let root = root();
    let sessions = ranks("alone", &[root.address(); 3]);
    sums_are_exact(&sessions, 1);
    assert!(shares(root.address()).is_empty());
}

#[test]
fn one_rack_sums_all_before_the_root() {
    let root = root();
    let rack = rack_of(root.address(), 4096);
    let sessions = ranks("a rack", &[rack.address(); 3]);
    sums_are_exact(&sessions, 1);
    sums_are_exact(&sessions, 2);
    assert_eq!(shares(rack.address()), [(rack.address().to_string(), 1.0)]);
    let status = switch_status(&rack.address().to_string(), HANG).expect("a status");
    assert!(status.relays[0].jobs[0].aggregations > 0, "{status:?}");
    assert_eq!((&*status.protocol, status.unplanned), ("goat", 0));
}

#[test]
fn racks_a_spine_and_ranks_beside_them_sum_exactly() {
    let root = root();
    let spine = rack_of(root.address(), 64);
    let racks = [rack_of(spine.address(), 64), rack_of(spine.address(), 64)];
    let at = [&racks[0], &racks[1], &racks[0], &racks[1]].map(RackServer::address);
    sums_are_exact(&ranks("leaf and spine", &at), 3);
    let mixed = [at[0], at[1], spine.address(), root.address(), root.address()];
    sums_are_exact(&ranks("ranks everywhere", &mixed), 4);
    let beside = rack_of(root.address(), 16);
    sums_are_exact(&ranks("two ways to the root", &[at[0], beside.address(), at[1]]), 5);
}

#[test]
fn large_floats_travel_as_bfloat16_where_ranks_ask_for_it() {
    let root = root();
    let spine = rack_behind_a_link(root.address(), 4096);
    let racks = [rack_behind_a_link(spine.address(), 4096), rack_behind_a_link(spine.address(), 4096)];
    let at = [racks[0].address(), racks[0].address(), racks[1].address(), racks[1].address()];
    let sessions = ranks_with("halves", &at, |config| config.wire_dtype = Some(WireDtype::Bfloat16));
    assert!(shares(root.address()).iter().any(|(_, share)| *share > 0.0), "switches sum");
    bfloat16_sums_are_exact(&sessions);
}

#[test]
fn a_switch_beside_a_ranks_way_sums_for_it() {
    let root = root();
    let spine = rack_of(root.address(), 0);
    let (with, without) = (rack_of(spine.address(), 4096), rack_of(spine.address(), 0));
    let at = [with.address(), without.address(), without.address(), without.address()];
    let sessions = ranks("beside", &at);
    for seed in 0..3 {
        sums_are_exact(&sessions, seed);
    }
    let of_with =
        shares(spine.address()).into_iter().find(|(switch, _)| *switch == with.address().to_string());
    assert!(of_with.expect("it is planned with").1 > 0.25, "more than its own rank's part");
    let status = switch_status(&with.address().to_string(), HANG).expect("a status");
    assert!(status.relays.iter().any(|relay| relay.jobs[0].aggregations > 0), "{status:?}");
}

#[test]
fn memory_for_no_part_and_for_some_is_exact() {
    let root = root();
    for aggregators in [0, 1, 7] {
        let rack = rack_of(root.address(), aggregators);
        sums_are_exact(&ranks("few", &[rack.address(); 2]), 6);
    }
}

#[test]
fn late_ranks_take_no_sums_from_a_switch() {
    let root = root();
    let rack = rack_of(root.address(), 4096);
    let sessions = ranks("late", &[rack.address(); 2]);
    let tensor = || (0..100_000).collect::<Vec<i32>>();
    for late in [0, 1, 0, 1_usize] {
        let early = submit(&sessions[1 - late], tensor(), Op::Sum);
        // Long enough for the early rank to fill its window, and to send again. On a slow machine
        // it is not, and the test passes all the same.
        thread::sleep(Duration::from_millis(50));
        let last = submit(&sessions[late], tensor(), Op::Sum);
        for sum in [early, last] {
            assert!(sum.wait().expect("a sum").iter().enumerate().all(|(i, sum)| *sum == 2 * i as i32));
        }
    }
    let status = switch_status(&rack.address().to_string(), HANG).expect("a status");
    assert_eq!(status.relays[0].jobs[0].collisions, 0, "{status:?}");
}

/// Each job's aggregators at the only switch, and the share of its stream that they sum. Jobs are in
/// the order of their names.
fn had(status: &SwitchStatus) -> Vec<(u32, f64)> {
    let mut jobs: Vec<_> = status.jobs.iter().collect();
    jobs.sort_unstable_by_key(|job| &job.name);
    let of = |job: &&JobStatus| match &job.state {
        JobStatusState::Running { planned, .. } => {
            planned.first().map_or((0, 0.0), |share| (share.aggregators, share.share))
        }
        _ => (0, 0.0),
    };
    jobs.iter().map(of).collect()
}

/// A few fragments fill such links: a job gets along with a third of the memory.
#[test]
fn jobs_share_a_switch_and_are_planned_anew_when_one_comes_or_goes() {
    let root = root();
    let rack = rack_behind_a_link(root.address(), 64);
    let begin = |job| {
        ranks_with(job, &[rack.address(); 2], |config| {
            config.agreed.in_flight = Some(64);
            config.services[0].rate_bps = Some(100_000_000);
        })
    };
    let until = |each: u32, jobs: usize| {
        wait_until(root.address(), "the jobs' shares are others", |status| {
            had(status) == vec![(each, 1.0); jobs]
        });
    };
    let first = begin("first");
    until(64, 1);
    summing(&first, || {
        let second = begin("second");
        summing(&second, || {
            until(32, 2);
            let third = begin("third");
            summing(&third, || until(21, 3));
            drop(third);
            until(32, 2);
        });
        drop(second);
        until(64, 1);
    });
    sums_are_exact(&first, 1);
}

#[test]
fn a_rank_that_leaves_while_its_job_is_planned_anew_takes_no_sum_from_the_others() {
    let root = root();
    let rack = rack_behind_a_link(root.address(), 64);
    for round in 0..8 {
        let [first, mut second] = ["first", "second"]
            .map(|job| ranks_with(job, &[rack.address(); 2], |config| config.agreed.in_flight = Some(64)));
        let leaves = second.pop().expect("two ranks");
        let tensor = || (0..200_000).collect::<Vec<i32>>();
        let [last, other] = [&leaves, &second[0]].map(|session| submit(session, tensor(), Op::Sum));
        drop(first);
        last.wait().expect("a sum");
        drop(leaves);
        let sum = other.wait().expect("a sum");
        assert!(sum.iter().zip(tensor()).all(|(sum, one)| *sum == 2 * one), "{round}");
    }
}

#[test]
fn a_switch_that_restarts_learns_its_plan_and_the_sums_go_on() {
    let root = root();
    let spine = rack_of(root.address(), 64);
    let first = rack_of(spine.address(), 64);
    let other = rack_of(spine.address(), 64);
    let (address, upstream) = (first.address(), spine.address());
    let sessions = ranks("goes on", &[address, address, other.address()]);
    sums_are_exact(&sessions, 1);
    let mut running = Some(first);
    summing(&sessions, || {
        drop(running.take());
        let second = again(|| RackServer::start(rack_config(address, upstream, 64)));
        wait_until(address, "it did not learn", |status| {
            status.relays.iter().any(|relay| relay.address == address.to_string() && !relay.jobs.is_empty())
        });
        running = Some(second);
    });
    sums_are_exact(&sessions, 2);
}

/// No more than a window that fits all three, so that the racks sum all, and the spine their sums. Between
/// switches of one machine no link would be spared by that, so they say that there are links.
#[test]
fn a_spine_adds_the_sums_of_racks_also_when_it_was_started_again() {
    let with_a_link = |listen, upstream| {
        let config = RackServerConfig { rate_bps: Some(1_000_000_000), ..rack_config(listen, upstream, 64) };
        RackServer::start(config)
    };
    let anywhere = ([127, 0, 0, 1], 0).into();
    let root = root();
    let spine = with_a_link(anywhere, root.address()).expect("a spine");
    let racks = [(); 2].map(|()| with_a_link(anywhere, spine.address()).expect("a rack"));
    let at = [&racks[0], &racks[1], &racks[0], &racks[1]].map(RackServer::address);
    let sessions = ranks_with("sums of sums", &at, |config| config.agreed.in_flight = Some(64));
    sums_are_exact(&sessions, 1);
    let (address, upstream) = (spine.address(), root.address());
    let added = || {
        let status = switch_status(&address.to_string(), HANG).expect("a status");
        let spine = status.relays.into_iter().find(|relay| relay.address == address.to_string());
        spine.and_then(|spine| spine.jobs.first().map(|job| job.aggregations)).unwrap_or(0)
    };
    assert!(added() > 0, "it adds something");
    let of_spine = shares(address).into_iter().find(|(switch, _)| *switch == address.to_string());
    assert_eq!(of_spine.expect("it is planned with").1, 0.0, "and it is no rank's");
    let mut running = Some(spine);
    summing(&sessions, || {
        drop(running.take());
        running = Some(again(|| with_a_link(address, upstream)));
        wait_until(address, "it did not learn", |_| added() > 0);
    });
    sums_are_exact(&sessions, 2);
}

/// A fragment of the job's, with these directions.
fn forged(config: &GoatJobConfig, generation: Generation, directions: PlannedDirections) -> Vec<u8> {
    let preamble = Preamble {
        kind: Kind::Planned,
        job: config.id,
        generation,
        worker: WorkerId::ALL,
        shard: ShardId(0),
    };
    let header = PlannedHeader {
        flags: Flags::default(),
        directions,
        sequence: 0,
        aggregator_index: 0,
        fragment: 0,
        collective: Collective { sequence: 9, elements: 9, ..collective(9) },
        exponent: GradientHeader::STATIC_FACTOR,
        next_exponent: 0,
    };
    let elements = usize::from(config.elements);
    let mut bytes = vec![0; fragment_packet_bytes::<PlannedDirections>(elements)];
    FragmentPacket::write(&mut bytes, config.key, &preamble, &header, elements, |payload| payload.fill(1));
    bytes
}

#[test]
fn packets_of_an_older_plan_and_of_none_are_dropped_and_counted() {
    let root = root();
    let rack = rack_of(root.address(), 4096);
    let sessions = ranks("old", &[rack.address(); 2]);
    sums_are_exact(&sessions, 1);
    let RankTerms::<Peer> { config, assignment, .. } = terms(&sessions[0]);
    assert_eq!(assignment.nodes()[0], AggregationNode(1), "the rack sums it");
    let label = PlannedDirections {
        aggregation_node: AggregationNode(1),
        workers: 1,
        ..PlannedDirections::default()
    };
    let (old, now) = (Generation(config.generation.0.wrapping_sub(1)), config.generation);
    let of_another = PlannedDirections { aggregation_node: AggregationNode(7), passed: true, ..label };
    let elsewhere = PlannedDirections { sub_model: SubModel(3), passed: true, ..label };
    let stranger = std::net::UdpSocket::bind("127.0.0.1:0").expect("a free port");
    summing(&sessions, || {
        for (generation, directions, to) in [
            (old, label, rack.address()),
            (old, label, root.address()),
            (now, of_another, root.address()),
            (now, elsewhere, root.address()),
        ] {
            stranger.send_to(&forged(&config, generation, directions), to).expect("sent");
        }
    });
    let status = switch_status(&rack.address().to_string(), HANG).expect("a status");
    assert_eq!((status.outdated, status.relays[0].outdated, status.unplanned), (1, 1, 2));
    for (at, reason) in
        [(rack.address(), "generation"), (root.address(), "generation"), (root.address(), "unplanned")]
    {
        let metrics = super::http::fetch(at, "/metrics");
        let counter = format!("fanin_packets_dropped_total{{reason=\"{reason}\"}}");
        let line = metrics.lines().find(|line| line.starts_with(&counter)).expect("counted");
        assert!(!line.ends_with(" 0"), "{line}");
    }
}

fn refusal(error: SessionError) -> Refusal {
    match error {
        SessionError::JoinRefused { reason, .. } => reason,
        error => panic!("{error}"),
    }
}

#[test]
fn ranks_that_name_different_sub_models_are_refused_and_told_what_to_set() {
    let root = root();
    let rack = rack_of(root.address(), 64);
    let joining: Vec<_> = [vec![1000, 2000], vec![1000]]
        .into_iter()
        .zip(0..)
        .map(|(sub_models, rank)| {
            let mut config = asking(rack.address(), "models", rank, 2);
            config.agreed.sub_models = sub_models;
            thread::spawn(move || Session::connect(config).expect_err("two plans"))
        })
        .collect();
    for rank in joining {
        let reason = refusal(rank.join().expect("no panic"));
        let Refusal::Mismatch { field, asked, job_has, .. } = &reason else { panic!("{reason}") };
        assert!(field.starts_with("sub-models ("), "{reason}");
        let mut named = [&**asked, &**job_has];
        named.sort_unstable();
        assert_eq!(named, ["1000", "1000, 2000"], "{reason}");
        assert!(reason.to_string().contains("FANIN_SUB_MODELS"), "{reason}");
    }
    let mut none = asking(rack.address(), "models", 0, 1);
    none.agreed.sub_models = vec![5, 0];
    assert_eq!(refusal(Session::connect(none).expect_err("an empty part")), Refusal::SubModels { count: 2 });
}

#[test]
fn named_sub_models_are_planned_one_by_one() {
    let root = root_with(|config| config.shards = 3);
    let mut config = rack_config(([127, 0, 0, 1], 0).into(), root.address(), 4096);
    config.memory.shards = 3;
    let rack = RackServer::start(config).expect("a free port");
    let sub_models = vec![40_000, 50_000, 10_003];
    let sessions =
        ranks_with("named", &[rack.address(); 2], |config| config.agreed.sub_models.clone_from(&sub_models));
    for seed in 0..3 {
        sums_are_exact(&sessions, seed);
    }
    // Their parts are those of one stream.
    assert_eq!(shards_of(&root), 1);
    let RankTerms::<Peer> { assignment, config, windows } = terms(&sessions[1]);
    assert_eq!(windows, 1);
    let fragments = |elements: u64| elements.div_ceil(config.elements.into()) as u32;
    let planned: Vec<u32> = (0..3).map(|part| assignment.sub_models().fragments_of(SubModel(part))).collect();
    assert_eq!(planned, sub_models.iter().map(|part| fragments(*part)).collect::<Vec<_>>());
}

#[test]
fn more_ranks_than_a_packet_can_name_are_refused_with_the_cause() {
    let root = root();
    let error = Session::connect(asking(root.address(), "crowd", 0, 129)).expect_err("too many");
    let reason = refusal(error);
    assert_eq!(reason, Refusal::TooManyWorkers { asked: 129, max: 128 });
    assert!(reason.to_string().contains("GOAT 128"), "{reason}");
}

#[test]
fn who_speaks_another_protocol_is_told_what_to_set() {
    let (switch, atp, root) = (switch(), super::atp::server(), root());
    let rack = rack_of(root.address(), 64);
    for (address, own, served) in [
        (switch.address(), "switchml", "switchml or dlcp"),
        (atp.address(), "atp", "atp"),
        (root.address(), "goat", "goat"),
        (rack.address(), "goat", "goat"),
    ] {
        for asked in ["switchml", "atp", "goat"].into_iter().filter(|asked| *asked != own) {
            let config = SessionConfig { protocol: protocol(asked), ..asking(address, "another", 0, 1) };
            let reason = refusal(Session::connect(config).expect_err("another protocol"));
            let (asked, served) = (asked.into(), served.into());
            assert_eq!(reason, Refusal::ProtocolMismatch { asked, served });
            assert!(reason.to_string().contains("FANIN_PROTOCOL"), "{reason}");
        }
    }
    let lost = rack_of(switch.address(), 64);
    let mut config = asking(lost.address(), "lost", 0, 1);
    config.join_timeout = Duration::from_secs(4);
    let error = Session::connect(config).expect_err("no root").to_string();
    assert!(error.contains("it serves switchml, and this switch goat"), "{error}");
}

#[test]
fn a_rank_that_dies_behind_a_switch_is_named_to_every_other() {
    use super::faults::{NEVER, Process};
    let root = root_with(|config| config.heartbeat_timeout = NEVER);
    let racks = [rack_of(root.address(), 64), rack_of(root.address(), 64)];
    let address = racks[1].address();
    let dying = thread::spawn(move || Process::join(address, request_of("goat", "dies", 1, 2)));
    let session = Session::connect(asking(racks[0].address(), "dies", 0, 2)).expect("admitted");
    let dying = dying.join().expect("no panic");
    let sum = submit(&session, vec![1_i32; 10], Op::Sum);
    drop(dying);
    assert_eq!(sum.wait(), Err(SessionError::RankLost { rank: Rank(1) }));
}
