//! A server that loses its memory: what its workers and the next server make of that.

use fanin_protocol::dlcp::{JobConfig, Server, ServerJob, Worker, WorkerPlan};
use fanin_protocol::{Endpoint, Instant, Reason, Summer, Verdict, WorkerEvent, WorkerMachine};
use fanin_testworld::Numbered;
use fanin_wire::{
    AbortReason, BlockHeader, BlockPacket, Collective, Dtype, FlowId, Generation, JobId, Kind, LossBound, Op,
    Pattern, Preamble, ShardId, Signal, SignalPacket, Start, WorkerId,
};

use crate::packets::{
    PLAIN, answers, answers_at, block, collective, config, dropped, preamble, server, signal, start, take,
    tensor, worker, written,
};

/// A sum that worker 0 hands back.
fn handed(flow: u32, number: u32, contributions: u16, elements: usize) -> Vec<u8> {
    let (flow, block) = (FlowId(flow), number);
    let header = BlockHeader { flow, block, contributions, restored: true, ..PLAIN };
    written(&preamble(Kind::Block, 0), &header, elements, 7)
}

#[test]
fn a_worker_whose_server_forgot_begins_again_where_the_slowest_is_and_hands_its_sums_back() {
    let plan = |generation: u16, flow: u32| WorkerPlan {
        config: JobConfig { generation: Generation(generation), resumes_at: Some(FlowId(flow)), ..config() },
        place: WorkerId(0),
        server: 8,
    };
    let mut worker = worker();
    let (mut train, mut now) = (vec![0; 65536], 0);
    // Its link carries all of it within the second that this takes.
    let mut sent = |worker: &mut Worker<u16, Numbered>| {
        let mut headers = vec![];
        for _ in 0..1000 {
            now += 1_000_000;
            let Some(sent) = worker.poll_transmit(Instant(now), &mut train) else { continue };
            for packet in train[..sent.bytes].chunks(sent.segment_bytes) {
                let preamble = Preamble::parse(packet).expect("ours");
                if preamble.kind == Kind::Block {
                    let BlockHeader { flow, block, contributions, restored, .. } =
                        BlockPacket::parse(preamble, packet).expect("ours").header;
                    headers.push((flow.0, block, contributions, restored));
                } else if let Signal::Start(start) =
                    SignalPacket::parse(preamble, packet).expect("ours").signal
                {
                    assert_eq!(start.bound == LossBound::RELIABLE, preamble.generation.0 > 0);
                }
            }
        }
        headers
    };
    // Two of three flows may be under way. The first one has the sum of a block, with one contribution.
    worker.submit(tensor(192), Op::Sum);
    assert_eq!(sent(&mut worker), [(0, 0, 1, false), (0, 1, 1, false), (1, 0, 1, false), (1, 1, 1, false)]);
    let sum = block(255, 0, 1, 32);
    assert_eq!(worker.handle_packet(Instant(0), 9, &sum), Verdict::Absorb);
    assert_eq!(worker.suspend(), [0], "it lacks a sum of its first flow");
    assert_eq!(sent(&mut worker), []);
    worker.resume(Instant(0), plan(1, 0));
    assert_eq!(worker.generation(), Generation(1));
    assert_eq!(sent(&mut worker), [(0, 0, 1, false), (0, 1, 1, true), (1, 0, 1, false), (1, 1, 1, false)]);
    // It has all of it, and then another one turns out to lack it.
    let again = Preamble { generation: Generation(1), ..preamble(Kind::Block, 255) };
    for (block, contributions) in [(0, 2), (1, 1)] {
        let sum = written(&again, &BlockHeader { block, contributions, ..PLAIN }, 32, 0);
        assert_eq!(worker.handle_packet(Instant(0), 9, &sum), Verdict::Absorb);
    }
    assert_eq!(sent(&mut worker), [(2, 0, 1, false), (2, 1, 1, false)]);
    assert_eq!(worker.suspend(), [1]);
    worker.resume(Instant(0), plan(2, 0));
    assert_eq!(sent(&mut worker), [(0, 0, 2, true), (0, 1, 1, true), (1, 0, 1, false), (1, 1, 1, false)]);
    assert_eq!(worker.suspend(), [1], "what it hands back it does not lack");
    // Nobody lacks the first flow any more, and then somebody says so.
    worker.resume(Instant(0), plan(3, 1));
    assert_eq!(sent(&mut worker), [(1, 0, 1, false), (1, 1, 1, false), (2, 0, 1, false), (2, 1, 1, false)]);
    assert!(worker.poll_event().is_none());
    worker.suspend();
    worker.resume(Instant(0), plan(4, 0));
    assert!(matches!(worker.poll_event(), Some(WorkerEvent::Aborted(AbortReason::SwitchStopped))));
    assert_eq!(worker.abandon().count(), 1);
}

#[test]
fn a_sum_that_is_handed_back_is_the_sum_whatever_else_comes() {
    let whole = |worker, flow| {
        let start = Start { bound: LossBound::RELIABLE, ..start(64) };
        (signal(worker, flow, 0, Signal::Start(start)), Verdict::Absorb)
    };
    let mut ordinary = server();
    take(&mut ordinary, &[whole(0, 0), (handed(0, 0, 2, 32), dropped(Reason::OutOfRange))]);
    let mut server = Server::new(ShardId(0));
    let resumes_at = vec![FlowId(7)];
    server.add_job(ServerJob { resumes_at, ..ServerJob::from(config()) }).expect("within its limits");
    take(
        &mut server,
        &[
            (signal(0, 6, 0, Signal::Start(start(64))), dropped(Reason::Stale)),
            whole(0, 7),
            whole(1, 7),
            (handed(7, 0, 3, 32), dropped(Reason::OutOfRange)),
            (handed(7, 0, 2, 31), dropped(Reason::ChunkLength)),
            (handed(7, 0, 0, 32), dropped(Reason::Malformed)),
            // Nobody contributed to this one.
            (handed(7, 1, 0, 0), Verdict::Multicast),
            (block(1, 7, 0, 32), Verdict::Absorb),
            (handed(7, 0, 1, 32), Verdict::Multicast),
            (handed(7, 0, 1, 32), dropped(Reason::Stale)),
            (block(1, 7, 1, 32), dropped(Reason::Stale)),
        ],
    );
    let sums: Vec<_> = answers(&mut server)
        .iter()
        .filter_map(|packet| {
            let parsed = BlockPacket::parse(Preamble::parse(packet).ok()?, packet).ok()?;
            Some((parsed.header.block, parsed.header.contributions, parsed.payload.to_vec()))
        })
        .collect();
    assert_eq!(sums.iter().filter(|sum| **sum == (0, 1, vec![7; 128])).count(), 2, "{sums:?}");
    assert_eq!(sums.iter().filter(|sum| **sum == (1, 0, vec![])).count(), 2, "{sums:?}");
}

/// A worker that has sent nothing of a block whose sum another one hands back owes nothing.
#[test]
fn a_block_that_is_handed_back_is_asked_of_nobody() {
    let mut server = Server::new(ShardId(0));
    let resumes_at = vec![FlowId(0)];
    server.add_job(ServerJob { resumes_at, ..ServerJob::from(config()) }).expect("within its limits");
    let begins = |worker| {
        let start = Start { bound: LossBound::RELIABLE, ..start(64) };
        (signal(worker, 0, 0, Signal::Start(start)), Verdict::Absorb)
    };
    // Worker 1 comes before the one sum, and after the other.
    take(
        &mut server,
        &[
            begins(0),
            (handed(0, 0, 2, 32), Verdict::Multicast),
            begins(1),
            (handed(0, 1, 2, 32), Verdict::Multicast),
            (signal(1, 0, 0, Signal::Stop), dropped(Reason::Duplicate)),
        ],
    );
    let later = Instant(1_000_000_000);
    server.handle_timeout(later);
    let asked = answers_at(later, &mut server).iter().any(|packet| {
        let preamble = Preamble::parse(packet).expect("ours");
        preamble.kind == Kind::Signal
            && matches!(SignalPacket::parse(preamble, packet).expect("ours").signal, Signal::Request { .. })
    });
    assert!(!asked);
    assert_eq!(server.job_progress(JobId(3)).expect("it is there").waiting_for, [0, 0]);
}

/// Integers are all there, and who only gives has no sum.
#[test]
fn a_sum_that_nobody_can_have_is_not_taken() {
    let mut server = Server::new(ShardId(0));
    let resumes_at = vec![FlowId(0)];
    server.add_job(ServerJob { resumes_at, ..ServerJob::from(config()) }).expect("within its limits");
    let of = |collective: Collective| {
        let (elements, bound) = (collective.elements, LossBound::RELIABLE);
        Start { collective, elements, bound, ..start(64) }
    };
    let integers = of(Collective { dtype: Dtype::Int64, ..collective(32) });
    let for_another = of(Collective { pattern: Pattern::Reduce(WorkerId(1)), ..collective(64) });
    take(
        &mut server,
        &[
            (signal(0, 0, 0, Signal::Start(integers)), Verdict::Absorb),
            (handed(0, 0, 1, 32), dropped(Reason::OutOfRange)),
            (handed(0, 0, 2, 32), Verdict::Multicast),
            (signal(0, 1, 0, Signal::Start(for_another)), Verdict::Absorb),
            (handed(1, 0, 2, 32), dropped(Reason::OutOfRange)),
        ],
    );
}
