//! Packets that are not what they should be: dropped with their reason, counted, and without effect.

use fanin_protocol::dlcp::{ConfigError, Finish, JobConfig, Ring, RingPlan, Server, ServerJob, Worker};
use std::time::Duration;

use fanin_protocol::{
    Endpoint, Instant, Reason, RetransmissionConfig, Summer, Verdict, WorkerEvent, WorkerMachine,
};
use fanin_testworld::Numbered;
use fanin_wire::{
    AbortReason, BlockHeader, BlockPacket, Collective, Dtype, FlowId, Generation, JobId, Key, Kind,
    LossBound, Op, Pattern, Preamble, Rank, Report, ShardId, Signal, SignalPacket, Start, Tag, WireDtype,
    WorkerId, block_packet_bytes,
};

use crate::case::{Case, KEY};
use crate::numbers::of_worker;

/// Two workers, and flows of two blocks of 32 elements.
pub fn config() -> JobConfig {
    Case { workers: 2, flow_blocks: 2, flows: 2, bound: crate::percent(50), ..Case::plain() }.config()
}

pub fn server() -> Server<u16> {
    let mut server = Server::new(ShardId(0));
    server.add_job(ServerJob::from(config())).expect("within its limits");
    server
}

pub fn preamble(kind: Kind, worker: u8) -> Preamble {
    Preamble { kind, job: JobId(3), generation: Generation(0), worker: WorkerId(worker), shard: ShardId(0) }
}

pub fn collective(elements: u32) -> Collective {
    Collective {
        sequence: 0,
        dtype: Dtype::Float32,
        op: Op::Sum,
        pattern: Pattern::AllReduce,
        elements,
        wire_dtype: WireDtype::Native,
    }
}

pub fn start(elements: u32) -> Start {
    Start {
        collective: collective(elements),
        elements,
        bound: crate::percent(50),
        priority: 1,
        has_blocks: true,
    }
}

pub fn signal(worker: u8, flow: u32, round: u16, signal: Signal<'_>) -> Vec<u8> {
    let packet =
        SignalPacket { preamble: preamble(Kind::Signal, worker), flow: FlowId(flow), round, path: 0, signal };
    let mut bytes = vec![0; signal.packet_bytes()];
    packet.write(&mut bytes, KEY);
    bytes
}

pub fn block(worker: u8, flow: u32, block: u32, elements: usize) -> Vec<u8> {
    let header = BlockHeader { flow: FlowId(flow), block, ..PLAIN };
    written(&preamble(Kind::Block, worker), &header, elements, 0)
}

/// A worker's own first block of its first flow.
pub const PLAIN: BlockHeader = BlockHeader {
    flow: FlowId(0),
    block: 0,
    round: 0,
    tag: Tag { priority: 1, important: false, path: 0 },
    contributions: 1,
    last: false,
    restored: false,
};

/// A block whose bytes are all this one.
pub fn written(preamble: &Preamble, header: &BlockHeader, elements: usize, byte: u8) -> Vec<u8> {
    let mut bytes = vec![0; block_packet_bytes(4 * elements)];
    BlockPacket::write(&mut bytes, KEY, preamble, header, |payload| payload.fill(byte));
    bytes
}

/// Hands packets over in turn, and sees what comes of each.
pub fn take(server: &mut Server<u16>, packets: &[(Vec<u8>, Verdict)]) {
    for (number, (packet, verdict)) in packets.iter().enumerate() {
        assert_eq!(server.handle_packet(Instant(0), 9, packet), *verdict, "packet {number}");
    }
}

/// The packets that it answers with.
pub fn answers(server: &mut Server<u16>) -> Vec<Vec<u8>> {
    answers_at(Instant(0), server)
}

pub fn answers_at(now: Instant, server: &mut Server<u16>) -> Vec<Vec<u8>> {
    let mut train = vec![0; 65536];
    let mut packets = vec![];
    while let Some(sent) = server.poll_transmit(now, &mut train) {
        let (to, bytes, segment_bytes) = (sent.to.len(), sent.bytes, sent.segment_bytes);
        packets.extend(train[..bytes].chunks(segment_bytes).flat_map(|packet| vec![packet.to_vec(); to]));
    }
    packets
}

pub const fn dropped(reason: Reason) -> Verdict {
    Verdict::Drop(reason)
}

#[test]
fn what_comes_before_its_rendezvous_is_dropped_and_counted() {
    let mut server = server();
    take(
        &mut server,
        &[
            (block(0, 0, 0, 32), dropped(Reason::Unannounced)),
            (signal(0, 1, 0, Signal::Stop), dropped(Reason::Unannounced)),
            (signal(0, 0, 0, Signal::Confirm), dropped(Reason::Unannounced)),
        ],
    );
    assert_eq!(server.received().dropped[Reason::Unannounced as usize], 3);
    assert!(answers(&mut server).is_empty());
    take(
        &mut server,
        &[
            (signal(0, 0, 0, Signal::Start(start(64))), Verdict::Absorb),
            (block(0, 0, 0, 32), Verdict::Absorb),
            (signal(0, 0, 0, Signal::Start(start(64))), dropped(Reason::Duplicate)),
            (block(0, 0, 0, 32), dropped(Reason::Duplicate)),
            // Another one's is still not announced.
            (block(1, 0, 0, 32), dropped(Reason::Unannounced)),
            (signal(1, 0, 0, Signal::Stop), dropped(Reason::Unannounced)),
        ],
    );
}

#[test]
fn what_was_lost_early_holds_no_sum_up_until_its_flow_ends() {
    let config =
        Case { workers: 2, flow_blocks: 200, flows: 2, bound: crate::percent(1), ..Case::plain() }.config();
    let mut server: Server<u16> = Server::new(ShardId(0));
    server.add_job(ServerJob::from(config)).expect("within its limits");
    let start = Start { bound: crate::percent(1), ..start(200 * 32) };
    for worker in 0..2 {
        take(&mut server, &[(signal(worker, 0, 0, Signal::Start(start)), Verdict::Absorb)]);
    }
    answers(&mut server);
    let mut now = Instant(0);
    // The sums that came back, and how many are in each.
    let mut sums = vec![None; 200];
    // Stretches are of 25 blocks, two trains of 20 us at a gigabit.
    for number in 0..=51 {
        // Of the three that one worker lost, two may be missing.
        let lost = |worker: u8| worker == 1 && [3, 5, 7].contains(&number);
        for worker in (0..2).filter(|worker| !lost(*worker)) {
            server.handle_packet(now, worker.into(), &block(worker, 0, number, 32));
        }
        assert!(sums[3].is_none() && sums[5].is_none(), "{number}: two stretches have not passed");
        now = Instant(now.0 + 1_000_000);
        server.handle_timeout(now);
        for packet in answers_at(now, &mut server) {
            if let Ok(preamble) = Preamble::parse(&packet)
                && let Ok(sum) = BlockPacket::parse(preamble, &packet)
            {
                sums[sum.header.block as usize] = Some(sum.header.contributions);
            }
        }
    }
    assert_eq!(
        [2, 3, 4, 5, 6, 7].map(|block| sums[block]),
        [Some(2), Some(1), Some(2), Some(1), Some(2), None]
    );
    // What is let go is lost, also where it comes after all.
    take(&mut server, &[(block(1, 0, 3, 32), dropped(Reason::Stale))]);
}

#[test]
fn sums_leave_in_one_train_for_all_who_get_the_same_next() {
    let case = Case { workers: 3, flow_blocks: 4, flows: 2, ..Case::plain() };
    let mut server: Server<u16> = Server::new(ShardId(0));
    server.add_job(ServerJob::from(case.config())).expect("within its limits");
    let from = |worker: u8| 100 + u16::from(worker);
    for worker in 0..3 {
        let start = Start { bound: LossBound::RELIABLE, ..start(4 * 32) };
        let packet = signal(worker, 0, 0, Signal::Start(start));
        assert_eq!(server.handle_packet(Instant(0), from(worker), &packet), Verdict::Absorb);
        for number in 0..4 {
            server.handle_packet(Instant(0), from(worker), &block(worker, 0, number, 32));
        }
    }
    // Trains of sums at a time: for whom, and which blocks.
    let sums = |server: &mut Server<u16>, now| {
        let (mut train, mut sums) = (vec![0; 65536], vec![]);
        while let Some(sent) = server.poll_transmit(now, &mut train) {
            let (to, bytes, segment_bytes) = (sent.to.to_vec(), sent.bytes, sent.segment_bytes);
            let blocks = train[..bytes].chunks(segment_bytes).filter_map(|packet| {
                let preamble = Preamble::parse(packet).ok()?;
                let header = BlockPacket::parse(preamble, packet).ok()?.header;
                assert_eq!(preamble.worker, WorkerId::ALL);
                Some(header.block)
            });
            let blocks: Vec<_> = blocks.collect();
            if !blocks.is_empty() {
                sums.push((to, blocks));
            }
        }
        sums
    };
    assert_eq!(sums(&mut server, Instant(0)), [(vec![100, 101, 102], vec![0, 1, 2, 3])]);
    // Two lack the same two, and one lacks another.
    for (worker, missing) in [(0, 6), (1, 8), (2, 6)] {
        let request = signal(worker, 0, 1, Signal::Request { part: 0, missing: &[missing] });
        assert_eq!(server.handle_packet(Instant(0), from(worker), &request), Verdict::Absorb);
    }
    let again = sums(&mut server, Instant(1_000_000));
    assert_eq!(again, [(vec![100, 102], vec![1, 2]), (vec![101], vec![3])]);
}

/// The egress of a switch that sums is its server: its queues are those of §4.2, without a threshold, as all sums are important.
#[test]
fn sums_of_front_layers_leave_before_those_that_were_there_first() {
    let mut server = server();
    let layers = [(0, 6), (1, 1)];
    for worker in 0..2 {
        for (flow, priority) in layers {
            let collective = Collective { sequence: flow as u16, ..collective(64) };
            let start = Start { collective, priority, ..start(64) };
            take(&mut server, &[(signal(worker, flow, 0, Signal::Start(start)), Verdict::Absorb)]);
        }
    }
    for (flow, _) in layers {
        for number in 0..2 {
            for (worker, verdict) in [(0, Verdict::Absorb), (1, Verdict::Multicast)] {
                take(&mut server, &[(block(worker, flow, number, 32), verdict)]);
            }
        }
    }
    let mut sums = vec![];
    for ns in (0..1_000_000).step_by(1000) {
        server.handle_timeout(Instant(ns));
        for packet in answers_at(Instant(ns), &mut server) {
            let preamble = Preamble::parse(&packet).expect("it is ours");
            if let Ok(sum) = BlockPacket::parse(preamble, &packet) {
                sums.push((sum.header.flow.0, sum.header.tag.priority));
            }
        }
    }
    assert_eq!(sums, [[(1, 1); 4], [(0, 6); 4]].concat(), "two blocks to each of two workers");
}

#[test]
fn a_tensor_that_is_larger_than_announced_is_refused() {
    let mut server = server();
    take(
        &mut server,
        &[
            // More than a flow may have.
            (signal(0, 0, 0, Signal::Start(start(65))), dropped(Reason::OutOfRange)),
            (signal(0, 0, 0, Signal::Start(start(u32::MAX))), dropped(Reason::OutOfRange)),
            (signal(0, 0, 0, Signal::Start(start(40))), Verdict::Absorb),
            (block(0, 0, 2, 32), dropped(Reason::OutOfRange)),
            (block(0, 0, 1, 32), dropped(Reason::ChunkLength)),
            (block(0, 0, 1, 8), Verdict::Absorb),
            (block(0, 0, 0, 31), dropped(Reason::ChunkLength)),
        ],
    );
}

/// Else its contributions could be lost, and integers are summed when all are there.
#[test]
fn a_bound_for_what_may_lose_nothing_is_refused() {
    let mut server = server();
    for (dtype, pattern) in
        [(Dtype::Int64, Pattern::AllReduce), (Dtype::Float32, Pattern::Broadcast(WorkerId(0)))]
    {
        let start = Start { collective: Collective { dtype, pattern, ..collective(32) }, ..start(32) };
        let refused = Verdict::Drop(Reason::OutOfRange);
        take(&mut server, &[(signal(0, 0, 0, Signal::Start(start)), refused)]);
    }
}

#[test]
fn flows_that_nobody_can_have_begun_are_ahead() {
    let mut server = server();
    take(
        &mut server,
        &[
            (signal(0, 4, 0, Signal::Start(start(64))), dropped(Reason::Ahead)),
            (signal(0, 3, 0, Signal::Start(start(64))), Verdict::Absorb),
            (block(0, u32::MAX, 0, 32), dropped(Reason::Stale)),
            (signal(0, u32::MAX, 0, Signal::Stop), dropped(Reason::Stale)),
            // Who lost the confirmation of what is long over gets it again, once an answer.
            (signal(0, u32::MAX, 0, Signal::Finish), Verdict::ReplyUnicast),
            (signal(0, u32::MAX, 0, Signal::Finish), dropped(Reason::Duplicate)),
        ],
    );
    let confirms = answers(&mut server);
    let of =
        |packet: &Vec<u8>| SignalPacket::parse(Preamble::parse(packet)?, packet).map(|packet| packet.flow);
    assert!(confirms.iter().any(|packet| of(packet) == Ok(FlowId(u32::MAX))));
}

#[test]
fn signals_that_fit_nothing_have_no_effect() {
    let mut server = server();
    take(
        &mut server,
        &[
            (signal(0, 0, 0, Signal::Start(start(64))), Verdict::Absorb),
            (
                signal(0, 0, 0, Signal::Start(Start { has_blocks: false, ..start(64) })),
                dropped(Reason::Unexpected),
            ),
            (signal(0, 0, 0, Signal::Confirm), dropped(Reason::Unexpected)),
            // There is no sum yet.
            (signal(0, 0, 0, Signal::Finish), dropped(Reason::Unexpected)),
            (signal(0, 0, 1, Signal::Request { part: 0, missing: &[3] }), dropped(Reason::Stale)),
            (signal(0, 0, 7, Signal::Stop), dropped(Reason::Stale)),
            // What was not announced from there, or by anybody.
            (signal(1, 0, 0, Signal::Stop), dropped(Reason::Unannounced)),
            (signal(0, 1, 0, Signal::Stop), dropped(Reason::Unannounced)),
        ],
    );
}

#[test]
fn sums_go_to_the_ports_that_something_new_came_from_and_what_comes_again_diverts_none() {
    let config = JobConfig { paths: 2, workers: 1, flow_blocks: 16, ..config() };
    let mut server = Server::new(ShardId(0));
    server.add_job(ServerJob::from(config)).expect("within its limits");
    let mut begin = start(512);
    begin.bound = LossBound::RELIABLE;
    let on_path = |path: u8, block: u32| {
        let tag = Tag { priority: 1, important: true, path };
        written(&preamble(Kind::Block, 0), &BlockHeader { block, tag, ..PLAIN }, 32, 0)
    };
    let hand = |server: &mut Server<u16>, port: u16, packet: &[u8], reason: Option<Reason>| {
        let verdict = server.handle_packet(Instant(0), port, packet);
        let dropped = if let Verdict::Drop(reason) = verdict { Some(reason) } else { None };
        assert_eq!(dropped, reason);
    };
    let announced = signal(0, 0, 0, Signal::Start(begin));
    hand(&mut server, 10, &announced, None);
    hand(&mut server, 11, &on_path(1, 0), None);
    let mut forged = on_path(1, 1);
    Key::new(1).seal(&mut forged);
    hand(&mut server, 98, &forged, Some(Reason::Forged));
    // A path that the job has not.
    hand(&mut server, 97, &on_path(7, 1), None);
    (2..16).for_each(|block| {
        hand(&mut server, 10 + (block % 2) as u16, &on_path((block % 2) as u8, block), None)
    });
    // Copies, from another port of that host.
    for packet in [announced, on_path(1, 0), on_path(0, 2)] {
        hand(&mut server, 99, &packet, Some(Reason::Duplicate));
    }
    let (mut train, mut blocks) = (vec![0; 4 * block_packet_bytes(128)], [0, 0]);
    let mut now = 0;
    while blocks.iter().sum::<usize>() < 16 {
        now += 1_000_000;
        while let Some(sent) = server.poll_transmit(Instant(now), &mut train) {
            let &[to] = sent.to else { panic!("to one port") };
            assert!([10, 11].contains(&to), "{to}");
            let (bytes, segment_bytes) = (sent.bytes, sent.segment_bytes);
            let kinds = train[..bytes]
                .chunks(segment_bytes)
                .map(|packet| Preamble::parse(packet).expect("ours").kind);
            blocks[usize::from(to - 10)] += kinds.filter(|kind| *kind == Kind::Block).count();
        }
    }
    assert!(blocks[0] >= 4 && blocks[1] >= 4, "{blocks:?}");
}

/// The other worker still lacks the sum, so that the flow is there.
#[test]
fn a_finish_that_comes_again_is_confirmed_and_is_nothing_new() {
    let mut server = server();
    let begin = || Signal::Start(start(32));
    let first = [signal(0, 0, 0, begin()), signal(1, 0, 0, begin()), block(0, 0, 0, 32)];
    take(&mut server, &first.map(|packet| (packet, Verdict::Absorb)));
    take(&mut server, &[(block(1, 0, 0, 32), Verdict::Multicast)]);
    answers(&mut server);
    let finish = signal(0, 0, 0, Signal::Finish);
    take(&mut server, &[(finish.clone(), Verdict::ReplyUnicast)]);
    let confirms = |server: &mut Server<u16>| {
        let answers = answers(server);
        let of = |packet: &Vec<u8>| {
            SignalPacket::parse(Preamble::parse(packet)?, packet).map(|it| it.signal == Signal::Confirm)
        };
        answers.iter().filter(|packet| of(packet) == Ok(true)).count()
    };
    assert_eq!(confirms(&mut server), 1);
    take(&mut server, &[(finish, dropped(Reason::Duplicate))]);
    assert_eq!(confirms(&mut server), 1);
}

#[test]
fn strangers_and_the_dead_change_nothing() {
    let mut server = server();
    let with = |change: fn(&mut Preamble)| {
        let mut preamble = preamble(Kind::Signal, 0);
        change(&mut preamble);
        let packet =
            SignalPacket { preamble, flow: FlowId(0), round: 0, path: 0, signal: Signal::Start(start(64)) };
        let mut bytes = vec![0; packet.signal.packet_bytes()];
        packet.write(&mut bytes, KEY);
        bytes
    };
    let mut forged = signal(0, 0, 0, Signal::Start(start(64)));
    Key::new(1).seal(&mut forged);
    let mut changed = signal(0, 0, 0, Signal::Start(start(64)));
    changed[20] ^= 1;
    let mut foreign_block = block(0, 0, 0, 32);
    Key::new(1).seal(&mut foreign_block);
    take(
        &mut server,
        &[
            (forged, dropped(Reason::Forged)),
            (changed, dropped(Reason::Forged)),
            (foreign_block, dropped(Reason::Forged)),
            (with(|preamble| preamble.job = JobId(4)), dropped(Reason::UnknownJob)),
            (with(|preamble| preamble.generation = Generation(1)), dropped(Reason::Generation)),
            (with(|preamble| preamble.shard = ShardId(1)), dropped(Reason::OutOfRange)),
            (with(|preamble| preamble.worker = WorkerId(2)), dropped(Reason::OutOfRange)),
            (vec![1, 2, 3], dropped(Reason::Malformed)),
        ],
    );
    assert!(answers(&mut server).is_empty());
    server.abort_job(JobId(3), AbortReason::SwitchStopped);
    take(&mut server, &[(signal(0, 0, 0, Signal::Start(start(64))), dropped(Reason::Aborted))]);
}

#[test]
fn an_abort_that_comes_back_is_not_answered() {
    let mut server = server();
    take(&mut server, &[(signal(0, 0, 0, Signal::Start(start(64))), Verdict::Absorb)]);
    server.abort_job(JobId(3), AbortReason::SwitchStopped);
    let told = answers(&mut server);
    let kinds: Vec<_> = told.iter().map(|packet| Preamble::parse(packet).expect("ours").kind).collect();
    assert_eq!(kinds, [Kind::Abort], "only worker 0 was heard");
    take(&mut server, &[(told[0].clone(), dropped(Reason::Unexpected))]);
    assert!(answers(&mut server).is_empty());
}

#[test]
fn unlike_tensors_end_the_job_and_name_both_ranks_to_all() {
    let mut server = Server::new(ShardId(0));
    server.add_job(ServerJob::from(JobConfig { workers: 3, ..config() })).expect("within its limits");
    take(
        &mut server,
        &[
            (signal(1, 0, 0, Signal::Start(start(64))), Verdict::Absorb),
            (signal(0, 0, 0, Signal::Start(start(63))), Verdict::Multicast),
        ],
    );
    let event = server.poll_event().expect("told");
    let (first, second) = ((Rank(1), collective(64)), (Rank(0), collective(63)));
    assert_eq!(event.reason, AbortReason::Mismatch { first, second });
    let told = |server: &mut Server<u16>| {
        let of = |packet: Vec<u8>| Preamble::parse(&packet).expect("ours");
        let aborts = answers(server).into_iter().map(of).filter(|preamble| preamble.kind == Kind::Abort);
        aborts.map(|preamble| preamble.worker.0).collect::<Vec<_>>()
    };
    assert_eq!(told(&mut server), [0, 1]);
    // Who comes after that is told when it comes.
    take(&mut server, &[(signal(2, 0, 0, Signal::Start(start(64))), dropped(Reason::Aborted))]);
    assert_eq!(told(&mut server), [2]);
}

#[test]
fn numbers_outside_their_limits_are_refused() {
    for fraction in [-0.1, 1.0, 1.5, f64::NAN, f64::INFINITY] {
        assert_eq!(LossBound::new(fraction), None, "{fraction}");
    }
    let bounds =
        [0.0, 0.01, 0.29, 0.999_999_9].map(|fraction| LossBound::new(fraction).map(LossBound::millionths));
    assert_eq!(bounds, [0, 10_000, 290_000, 999_999].map(Some));
    let good = config();
    let rate = |rate| JobConfig { rate, ..good };
    let cases = [
        (JobConfig { workers: 0, ..good }, ConfigError::Workers(0)),
        (JobConfig { workers: 65, ..good }, ConfigError::Workers(65)),
        (JobConfig { elements: 33, ..good }, ConfigError::Elements(33)),
        (JobConfig { flow_blocks: 0, ..good }, ConfigError::FlowBlocks(0)),
        (JobConfig { flow_blocks: 300_000, ..good }, ConfigError::FlowBlocks(300_000)),
        (JobConfig { flows: 0, ..good }, ConfigError::Flows(0)),
        (JobConfig { paths: 0, ..good }, ConfigError::Paths(0)),
        (JobConfig { paths: 17, ..good }, ConfigError::Paths(17)),
        (
            JobConfig {
                retransmission: RetransmissionConfig { ceiling: Duration::ZERO, ..good.retransmission },
                ..good
            },
            ConfigError::Ceiling,
        ),
        (rate(fanin_protocol::dlcp::RateConfig { delta: 0.5, ..good.rate }), ConfigError::Rate),
        (rate(fanin_protocol::dlcp::RateConfig { line_rate_bps: 0, ..good.rate }), ConfigError::Rate),
    ];
    for (config, error) in cases {
        assert_eq!(Server::<u16>::new(ShardId(0)).add_job(ServerJob::from(config)), Err(error));
        assert!(error.to_string().len() > 20, "{error}");
    }
    let few = ServerJob { ranks: vec![Rank(0)], ..ServerJob::from(good) };
    assert_eq!(Server::<u16>::new(ShardId(0)).add_job(few), Err(ConfigError::Ranks(1)));
}

pub fn worker() -> Worker<u16, Numbered> {
    Worker::new(config(), WorkerId(0), 9)
}

pub fn tensor(elements: usize) -> Numbered {
    Numbered::new(0, of_worker(Dtype::Float32, 0, elements))
}

#[test]
fn a_tensor_may_have_a_loss_bound_of_its_own_and_integers_lose_nothing_all_the_same() {
    let announced = |tensor: Numbered| {
        let (mut worker, mut train) = (worker(), vec![0; 65536]);
        worker.submit(tensor, Op::Sum);
        let sent = worker.poll_transmit(Instant(0), &mut train).expect("a start");
        let packet = &train[..sent.bytes];
        match SignalPacket::parse(Preamble::parse(packet).unwrap(), packet).map(|packet| packet.signal) {
            Ok(Signal::Start(start)) => start.bound,
            other => panic!("{other:?}"),
        }
    };
    let of = |loss_bound, dtype| Numbered { loss_bound, ..Numbered::new(0, of_worker(dtype, 0, 64)) };
    assert_eq!(announced(of(None, Dtype::Float32)), config().push_bound);
    for own in [LossBound::RELIABLE, crate::percent(3), crate::percent(90)] {
        assert_eq!(announced(of(Some(own), Dtype::Float32)), own);
        assert_eq!(announced(of(Some(own), Dtype::Int32)), LossBound::RELIABLE);
    }
}

/// Where queues drop packets, the last block of a round is often among them. A stop that waited for
/// the answer to it took longer than most flows of DLCP's Figure 14.
#[test]
fn a_receiver_that_ends_when_its_bound_is_met_hears_the_stop_at_once_and_others_by_the_last_block() {
    for (finish, at_once) in [
        (Finish::Stopped, vec!["start", "block", "last"]),
        (Finish::BoundMet, vec!["start", "block", "block", "stop"]),
    ] {
        let mut worker = Worker::new(JobConfig { finish, ..config() }, WorkerId(0), 1);
        worker.submit(tensor(64), Op::Sum);
        let mut train = vec![0; 65536];
        // Nobody answers for a millisecond.
        let said = [0, 1_000_000].map(|now| {
            let mut said = vec![];
            while let Some(sent) = worker.poll_transmit(Instant(now), &mut train) {
                let packets = train[..sent.bytes].chunks(sent.segment_bytes);
                said.extend(packets.map(|packet| {
                    let preamble = Preamble::parse(packet).expect("a packet of DLCP");
                    match BlockPacket::parse(preamble, packet) {
                        Ok(block) if block.header.last => "last",
                        Ok(_) => "block",
                        Err(_) => match SignalPacket::parse(preamble, packet).expect("a signal").signal {
                            Signal::Start(_) => "start",
                            Signal::Stop => "stop",
                            signal => panic!("{signal:?}"),
                        },
                    }
                }));
            }
            said
        });
        assert_eq!(said, [at_once, vec!["start", "stop"]], "{finish:?}");
    }
}

#[test]
fn a_worker_takes_the_sums_of_its_flows_alone() {
    let mut worker = worker();
    let sum = |flow, number, elements| block(WorkerId::ALL.0, flow, number, elements);
    assert_eq!(worker.handle_packet(Instant(0), 9, &sum(0, 0, 32)), dropped(Reason::Ahead));
    worker.submit(tensor(64), Op::Sum);
    for (packet, verdict) in [
        (block(1, 0, 0, 32), dropped(Reason::OutOfRange)),
        // Its own contribution, sent back.
        (block(0, 0, 0, 32), dropped(Reason::OutOfRange)),
        (sum(0, 2, 32), dropped(Reason::OutOfRange)),
        (sum(0, 0, 31), dropped(Reason::ChunkLength)),
        (sum(0, 0, 32), Verdict::Absorb),
        (sum(0, 0, 32), dropped(Reason::Duplicate)),
        (signal(0, 0, 0, Signal::Start(start(64))), dropped(Reason::Unexpected)),
        (sum(0, 1, 32), Verdict::Absorb),
        (sum(0, 1, 32), dropped(Reason::Stale)),
    ] {
        assert_eq!(worker.handle_packet(Instant(0), 9, &packet), verdict);
    }
    assert!(matches!(worker.poll_event(), Some(WorkerEvent::Completed(..))));
}

#[test]
fn a_rank_between_other_neighbours_goes_on_with_what_had_not_begun() {
    let plan =
        RingPlan { config: JobConfig { generation: Generation(1), ..config() }, left: 7_u16, right: 8_u16 };
    let mut train = vec![0; 65536];
    let mut idle: Ring<u16, Numbered> = Ring::new(config(), WorkerId(0), 5, 6);
    idle.suspend();
    idle.submit(tensor(64), Op::Sum);
    idle.handle_timeout(Instant(0));
    assert!(idle.poll_transmit(Instant(0), &mut train).is_none());
    idle.resume(Instant(0), plan);
    assert!(idle.poll_event().is_none());
    assert_eq!(idle.generation(), Generation(1));
    let sent = idle.poll_transmit(Instant(0), &mut train).expect("it begins");
    assert_eq!(sent.to, [8]);
    // What is under way is lost with a neighbour.
    let mut midway: Ring<u16, Numbered> = Ring::new(config(), WorkerId(0), 5, 6);
    midway.submit(tensor(64), Op::Sum);
    midway.suspend();
    midway.resume(Instant(0), plan);
    assert!(matches!(midway.poll_event(), Some(WorkerEvent::Aborted(AbortReason::SwitchStopped))));
    assert_eq!(midway.abandon().count(), 1);
    assert_eq!(midway.outstanding(), 0);
}

/// Rank 0 of three: 2 is to its left, 1 to its right. Parts are of six blocks, two a segment, and four flows.
fn ring() -> Ring<u16, Numbered> {
    let config = Case { workers: 3, flow_blocks: 6, flows: 2, bound: crate::percent(50), ..Case::plain() };
    Ring::new(config.config(), WorkerId(0), 5, 6)
}

fn hand_over(ring: &mut Ring<u16, Numbered>, packets: &[(Vec<u8>, Verdict)]) {
    for (number, (packet, verdict)) in packets.iter().enumerate() {
        assert_eq!(ring.handle_packet(Instant(0), 9, packet), *verdict, "packet {number}");
    }
}

#[test]
fn a_rank_of_a_ring_takes_from_each_neighbour_what_that_one_may_say() {
    let mut ring = ring();
    let of = |contributions: u16| {
        let elements = if contributions == 0 { 0 } else { 32 };
        written(&preamble(Kind::Block, 2), &BlockHeader { contributions, ..PLAIN }, elements, 0)
    };
    let report = Signal::Report(Report { number: 1, packets: 0, period_us: 200 });
    let mut forged = signal(2, 0, 0, Signal::Start(start(192)));
    Key::new(1).seal(&mut forged);
    hand_over(
        &mut ring,
        &[
            (forged, dropped(Reason::Forged)),
            (vec![1, 2, 3], dropped(Reason::Malformed)),
            // Before its rendezvous, or from the wrong side.
            (block(2, 0, 0, 32), dropped(Reason::Unannounced)),
            (signal(2, 0, 0, Signal::Stop), dropped(Reason::Unannounced)),
            (block(1, 0, 0, 32), dropped(Reason::OutOfRange)),
            (block(7, 0, 0, 32), dropped(Reason::OutOfRange)),
            (signal(1, 0, 0, Signal::Start(start(192))), dropped(Reason::OutOfRange)),
            (signal(2, 0, 0, Signal::Finish), dropped(Reason::OutOfRange)),
            // Too long, too far ahead, and long over, which is answered once.
            (signal(2, 0, 0, Signal::Start(start(193))), dropped(Reason::OutOfRange)),
            (signal(2, 16, 0, Signal::Start(start(192))), dropped(Reason::Ahead)),
            (block(2, u32::MAX, 0, 32), dropped(Reason::Stale)),
            (signal(2, u32::MAX, 0, Signal::Stop), Verdict::Absorb),
            (signal(2, u32::MAX, 0, Signal::Stop), dropped(Reason::Duplicate)),
            // What is announced, and what of it fits nothing.
            (signal(2, 0, 0, Signal::Start(start(192))), Verdict::Absorb),
            (block(2, 0, 2, 32), dropped(Reason::OutOfRange)),
            (block(2, 0, 0, 31), dropped(Reason::ChunkLength)),
            (of(0), dropped(Reason::OutOfRange)),
            (of(2), dropped(Reason::OutOfRange)),
            (of(1), Verdict::Absorb),
            (of(1), dropped(Reason::Duplicate)),
            (signal(2, 0, 7, Signal::Stop), dropped(Reason::Stale)),
            (signal(2, 0, 0, Signal::Confirm), dropped(Reason::Unexpected)),
            // Nothing was sent to the right yet.
            (signal(1, 0, 0, report), dropped(Reason::Unexpected)),
            (signal(1, 0, 0, Signal::Finish), dropped(Reason::Unexpected)),
        ],
    );
    ring.submit(tensor(192), Op::Sum);
    let mut train = vec![0; 65536];
    while ring.poll_transmit(Instant(0), &mut train).is_some() {}
    hand_over(
        &mut ring,
        &[
            (signal(1, 0, 3, Signal::Request { part: 0, missing: &[3] }), dropped(Reason::Stale)),
            (signal(1, 0, 1, Signal::Request { part: 1, missing: &[3] }), dropped(Reason::OutOfRange)),
            (signal(1, 0, 1, Signal::Request { part: 0, missing: &[3, 3] }), dropped(Reason::OutOfRange)),
            (signal(1, 0, 1, Signal::Request { part: 0, missing: &[3] }), Verdict::Absorb),
            (signal(1, 0, 0, report), dropped(Reason::Stale)),
        ],
    );
    assert!(ring.poll_event().is_none());
    // Another tensor than its own.
    hand_over(&mut ring, &[(signal(2, 1, 0, Signal::Start(start(191))), Verdict::Absorb)]);
    let Some(WorkerEvent::Aborted(AbortReason::Mismatch { first, second })) = ring.poll_event() else {
        panic!("it goes on");
    };
    assert_eq!((first, second), ((Rank(2), collective(191)), (Rank(0), collective(192))));
    hand_over(&mut ring, &[(block(2, 0, 1, 32), dropped(Reason::Aborted))]);
}
