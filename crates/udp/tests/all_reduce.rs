//! Whole all-reduces over the loopback: real sockets, real threads, exact sums.

mod common;

use common::{Cluster, finished};
use fanin_protocol::{JobAborted, Reason};
use fanin_udp::{Clock, Failure, Offload, RawTensor, Submission};
use fanin_wire::{AbortReason, Dtype, Kind, Op, Rank, SHARD_OFFSET, packet_bytes};
use std::net::UdpSocket;
use std::sync::Arc;

/// Lengths around those of a chunk (256), of all slots (16 chunks) and of several turns of them.
const LENGTHS: [usize; 7] = [0, 1, 255, 256, 257, 16 * 256, 50_001];

#[test]
fn the_sum_is_exact_for_any_number_of_workers_and_shards() {
    for workers in 1..=4 {
        for shards in 1..=2 {
            let cluster = Cluster::start(workers, shards, Offload::Detect);
            for length in LENGTHS {
                cluster.all_reduce_integers(length);
            }
            assert_eq!(cluster.outstanding(), 0);
        }
    }
}

#[test]
fn packets_one_by_one_do_as_well_as_trains() {
    let cluster = Cluster::start(2, 2, Offload::Never);
    for length in LENGTHS {
        cluster.all_reduce_integers(length);
    }
    let io = cluster.workers[0].io_statistics();
    assert_eq!(io.packets_sent, io.trains_sent);
    assert_eq!(io.packets_received, io.trains_received);
}

#[test]
fn a_long_tensor_travels_in_trains() {
    let cluster = Cluster::start(2, 1, Offload::Detect);
    cluster.all_reduce_integers(1 << 20);
    let io = cluster.workers[0].io_statistics();
    // The first window at least goes out at once.
    assert!(io.packets_sent > io.trains_sent, "{io:?}");
}

#[test]
fn floats_come_out_as_their_sum_or_average() {
    let cluster = Cluster::start(3, 2, Offload::Detect);
    for (op, divisor) in [(Op::Sum, 1.0), (Op::Average, 3.0)] {
        let mut tensors: Vec<Vec<f32>> = (0..3)
            .map(|rank| (0..5000).map(|i| (i as f32 - 2500.0) * (rank + 1) as f32 / 64.0).collect())
            .collect();
        let expected: Vec<f32> = (0..5000).map(|i| (i as f32 - 2500.0) * 6.0 / 64.0 / divisor).collect();
        cluster.all_reduce(&mut tensors, Dtype::Float32, op);
        for tensor in &tensors {
            assert_eq!(tensor, &tensors[0], "every worker holds the same bits");
            for (got, expected) in tensor.iter().zip(&expected) {
                assert!((got - expected).abs() <= 1e-5 * expected.abs().max(1.0), "{got} for {expected}");
            }
        }
    }
}

#[test]
fn floats_travel_as_bfloat16_and_integers_do_not() {
    for shards in 1..=3 {
        let cluster = Cluster::start_bfloat16(3, shards);
        for length in [1, 511, 512, 513, 50_001] {
            // Of seven bits, so that their sums are exact.
            let value = |rank: usize, i: usize| (i % 40 + rank) as f32;
            let mut tensors: Vec<Vec<f32>> =
                (0..3).map(|rank| (0..length).map(|i| value(rank, i)).collect()).collect();
            cluster.all_reduce(&mut tensors, Dtype::Float32, Op::Sum);
            let expected: Vec<f32> = (0..length).map(|i| 3.0 * value(1, i)).collect();
            assert!(tensors.iter().all(|tensor| *tensor == expected), "{length} elements, {shards} shards");
            cluster.all_reduce_integers(length);
        }
        // And two thirds in bfloat16 are 171 / 256, in a tensor too long to travel as it is.
        let mut tensors = vec![vec![1.0f32 / 3.0; 5000]; 3];
        tensors[2].fill(0.0);
        cluster.all_reduce(&mut tensors, Dtype::Float32, Op::Sum);
        assert_eq!(tensors, vec![vec![171.0 / 256.0; 5000]; 3]);
    }
}

#[test]
fn half_precision_sums_of_small_integers_are_exact() {
    // 1.0, 2.0 and 3.0 of each type.
    for (dtype, one, two, three) in
        [(Dtype::Float16, 0x3c00u16, 0x4000, 0x4200), (Dtype::Bfloat16, 0x3f80, 0x4000, 0x4040)]
    {
        let cluster = Cluster::start(2, 2, Offload::Detect);
        let mut tensors = vec![vec![one; 1000], vec![two; 1000]];
        cluster.all_reduce(&mut tensors, dtype, Op::Sum);
        assert_eq!(tensors, vec![vec![three; 1000]; 2]);
    }
}

#[test]
fn many_outstanding_all_reduces_finish_each_with_its_own_sum() {
    let cluster = Cluster::start(2, 2, Offload::Detect);
    let lengths: Vec<usize> = (0..60).map(|i| i * i % 997 + 1).collect();
    let mut tensors: Vec<Vec<Vec<i32>>> =
        (0..2).map(|rank| lengths.iter().map(|&n| vec![n as i32 * (rank + 1); n]).collect()).collect();
    let mut waits = Vec::new();
    for (worker, tensors) in cluster.workers.iter().zip(&mut tensors) {
        for tensor in tensors {
            waits.push(common::submit(worker, tensor, Dtype::Int32, Op::Sum));
        }
    }
    waits.into_iter().for_each(|wait| finished(&wait).unwrap());
    for rank in tensors {
        for (tensor, n) in rank.iter().zip(&lengths) {
            assert_eq!(tensor, &vec![*n as i32 * 3; *n]);
        }
    }
}

#[test]
fn every_shard_says_when_it_was_at_work() {
    let cluster = Cluster::start(2, 2, Offload::Detect);
    let mut tensors = vec![vec![1i32; 10_000]; 2];
    let before = Clock.now();
    let waits: Vec<_> = cluster
        .workers
        .iter()
        .zip(&mut tensors)
        .map(|(worker, tensor)| {
            let (sender, receiver) = std::sync::mpsc::channel();
            // SAFETY: the tensors outlive the waits below.
            let raw = unsafe { RawTensor::new(tensor.as_mut_ptr().cast(), 10_000, Dtype::Int32) }.unwrap();
            let all_reduce = Submission::all_reduce(raw, Op::Sum);
            worker.submit(all_reduce, Box::new(move |result| drop(sender.send(result))));
            receiver
        })
        .collect();
    for wait in waits {
        let mut parts = wait.recv().unwrap().unwrap();
        parts.sort_by_key(|part| part.lane);
        assert_eq!(parts.iter().map(|part| part.lane).collect::<Vec<_>>(), [0, 1]);
        for part in parts {
            assert!(before <= part.times.first_sent && part.times.first_sent < part.times.first_result);
            assert!(part.times.first_result <= part.times.last_result);
            assert!(part.times.last_result <= Clock.now());
        }
    }
}

#[test]
fn garbage_at_both_ends_is_dropped_by_reason_and_changes_no_sum() {
    let cluster = Cluster::start(2, 2, Offload::Detect);
    let noise = UdpSocket::bind("127.0.0.1:0").unwrap();
    std::thread::scope(|scope| {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let target = cluster.switch.local_addr();
        scope.spawn(move || {
            // Linear congruential: the same garbage in every run.
            let mut state = 0x2545_f491_4f6c_dd1du64;
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) as usize
            };
            let mut datagram = [0u8; 2000];
            for sent in 0.. {
                if sent > 2000 && stopped.try_recv() != Err(std::sync::mpsc::TryRecvError::Empty) {
                    break;
                }
                let length = next() % 2000;
                datagram[..length].fill_with(|| next() as u8);
                if length > SHARD_OFFSET && next() % 2 == 0 {
                    // Our magic and version, so that later checks are reached.
                    datagram[..4].copy_from_slice(&[0x51, 0xfa, fanin_wire::VERSION, (next() % 5) as u8]);
                    datagram[SHARD_OFFSET] = (next() % 3) as u8;
                }
                // The kernel may refuse for a full buffer.
                let _ = noise.send_to(&datagram[..length], target);
            }
        });
        for _ in 0..20 {
            cluster.all_reduce_integers(50_000);
        }
        drop(stop);
    });
    for reason in [Reason::Malformed, Reason::UnknownJob, Reason::OutOfRange] {
        // Some may still be in the socket.
        while cluster.switch.received().dropped[reason as usize] == 0 {
            std::thread::yield_now();
        }
    }
}

#[test]
fn garbage_from_the_switch_itself_is_dropped_by_the_worker() {
    // Not a switch: it answers every packet with itself, with nonsense and with nothing.
    let (switch, worker) = common::worker_of_a_false_switch(1);
    let mut tensor = vec![1i32; 100_000];
    let wait = common::submit(&worker, &mut tensor, Dtype::Int32, Op::Sum);
    let mut packet = [0; 1 << 16];
    for _ in 0..50 {
        let (length, from) = switch.recv_from(&mut packet).unwrap();
        switch.send_to(&packet[..length], from).unwrap();
        switch.send_to(&[0xff; 300], from).unwrap();
        switch.send_to(&[], from).unwrap();
    }
    while worker.statistics().received.dropped[Reason::Malformed as usize] < 10
        || worker.statistics().received.dropped[Reason::Unexpected as usize] < 10
    {
        std::thread::yield_now();
    }
    worker.fail(Failure::Stopped);
    assert!(matches!(finished(&wait), Err(Failure::Stopped)));
    assert_eq!(tensor, vec![1; 100_000]);
}

#[test]
fn an_abort_fails_what_is_outstanding_and_what_comes_later_on_every_shard() {
    let cluster = Cluster::start(2, 2, Offload::Detect);
    let mut first = vec![1i32; 100_000];
    // Worker 1 never contributes.
    let wait = common::submit(&cluster.workers[0], &mut first, Dtype::Int32, Op::Sum);
    cluster.switch.abort_job(cluster.job.id, AbortReason::Expelled(Rank(1)));
    assert!(matches!(finished(&wait), Err(Failure::Aborted { reason: AbortReason::Expelled(Rank(1)), .. })));
    let mut second = vec![1i32; 10];
    let wait = common::submit(&cluster.workers[0], &mut second, Dtype::Int32, Op::Sum);
    assert!(matches!(finished(&wait), Err(Failure::Aborted { reason: AbortReason::Expelled(Rank(1)), .. })));
    assert_eq!(cluster.workers[0].outstanding(), 0);
}

#[test]
fn a_switch_that_stops_at_once_still_sends_its_abort() {
    let Cluster { switch, workers, job } = Cluster::start(2, 2, Offload::Detect);
    let mut tensor = vec![1i32; 1000];
    let wait = common::submit(&workers[0], &mut tensor, Dtype::Int32, Op::Sum);
    // It knows only the address of those that it heard.
    while switch.received().absorb < 4 {
        std::thread::yield_now();
    }
    switch.abort_job(job.id, AbortReason::SwitchStopped);
    switch.shutdown();
    assert!(matches!(finished(&wait), Err(Failure::Aborted { reason: AbortReason::SwitchStopped, .. })));
}

#[test]
fn unlike_tensors_end_the_job_naming_both_workers_and_the_owner_hears_of_it() {
    let cluster = Cluster::start(2, 1, Offload::Detect);
    let events = cluster.switch.events().unwrap();
    assert!(cluster.switch.events().is_none());
    let (mut a, mut b) = (vec![0i32; 1000], vec![0f32; 1000]);
    let wait_a = common::submit(&cluster.workers[0], &mut a, Dtype::Int32, Op::Sum);
    let wait_b = common::submit(&cluster.workers[1], &mut b, Dtype::Float32, Op::Sum);
    for wait in [wait_a, wait_b] {
        assert!(matches!(
            finished(&wait),
            Err(Failure::Aborted { reason: AbortReason::Mismatch { .. }, .. })
        ));
    }
    let JobAborted { job, reason } = events.recv().unwrap();
    assert_eq!(job, cluster.job.id);
    assert!(matches!(reason, AbortReason::Mismatch { .. }));
}

#[test]
fn no_memory_is_touched_after_done_was_called() {
    let (switch, worker) = common::worker_of_a_false_switch(1);
    let mut tensor = vec![3i32; 100_000];
    let wait = common::submit(&worker, &mut tensor, Dtype::Int32, Op::Sum);
    let mut window = Vec::new();
    for _ in 0..16 {
        let mut packet = vec![0; packet_bytes(256)];
        let (length, from) = switch.recv_from(&mut packet).unwrap();
        assert_eq!((length, packet[3]), (packet.len(), Kind::Update as u8));
        window.push((packet, from));
    }
    worker.fail(Failure::Because(Arc::new(std::io::Error::other("enough"))));
    assert!(matches!(finished(&wait), Err(Failure::Because(_))));
    // Ours again. Results that would have counted come now.
    tensor.fill(-1);
    for (mut packet, from) in window {
        packet[3] = Kind::Result as u8;
        switch.send_to(&packet, from).unwrap();
    }
    while worker.statistics().received.dropped[Reason::Aborted as usize] < 16 {
        std::thread::yield_now();
    }
    assert_eq!(tensor, vec![-1; 100_000]);
}

#[test]
fn dropping_a_worker_answers_what_is_outstanding() {
    let mut cluster = Cluster::start(2, 2, Offload::Detect);
    let mut tensor = vec![1i32; 10_000];
    let wait = common::submit(&cluster.workers[0], &mut tensor, Dtype::Int32, Op::Sum);
    drop(cluster.workers.remove(0));
    assert!(matches!(finished(&wait), Err(Failure::Stopped)));
}

#[test]
fn a_done_may_drop_the_worker_that_calls_it() {
    let mut cluster = Cluster::start(1, 1, Offload::Detect);
    let worker = Arc::new(cluster.workers.remove(0));
    let (sender, receiver) = std::sync::mpsc::channel();
    let mut tensor = vec![1i32; 10];
    let held = Arc::clone(&worker);
    // SAFETY: the tensor outlives the wait below.
    let raw = unsafe { RawTensor::new(tensor.as_mut_ptr().cast(), 10, Dtype::Int32) }.unwrap();
    // Kept back until the caller has dropped its own reference.
    let (go, wait) = std::sync::mpsc::channel::<()>();
    worker.submit(
        Submission::all_reduce(raw, Op::Sum),
        Box::new(move |result| {
            let _ = wait.recv();
            drop(held);
            sender.send(result).unwrap();
        }),
    );
    drop(worker);
    drop(go);
    receiver.recv().unwrap().unwrap();
}

#[test]
fn an_unreachable_switch_is_counted_not_judged() {
    let (switch, worker) = common::worker_of_a_false_switch(1);
    drop(switch);
    let mut tensor = vec![1i32; 10];
    let wait = common::submit(&worker, &mut tensor, Dtype::Int32, Op::Sum);
    while worker.io_statistics().unreachable == 0 {
        std::thread::yield_now();
    }
    assert_eq!(worker.outstanding(), 1);
    worker.stop();
    assert!(matches!(finished(&wait), Err(Failure::Stopped)));
}

#[test]
fn a_worker_of_which_a_thread_panics_fails_as_a_whole_and_names_the_thread() {
    let cluster = Cluster::start(2, 2, Offload::Detect);
    let mut tensors = vec![vec![0i32; 1 << 18]; 2];
    // SAFETY: the tensor is kept until the worker is dropped, which joins its threads.
    let tensor = unsafe { RawTensor::new(tensors[0].as_mut_ptr().cast(), 1 << 18, Dtype::Int32) }.unwrap();
    cluster.workers[0].submit(Submission::all_reduce(tensor, Op::Sum), Box::new(|_| panic!("on purpose")));
    let other = common::submit(&cluster.workers[1], &mut tensors[1], Dtype::Int32, Op::Sum);
    finished(&other).unwrap();
    // The other rank never submits this one: only the end of the thread can end it.
    let mut waits = vec![0i32; 1 << 18];
    let wait = common::submit(&cluster.workers[0], &mut waits, Dtype::Int32, Op::Sum);
    let failure = finished(&wait).unwrap_err().to_string();
    assert!(failure.contains("fanin-worker-"), "{failure}");
    drop(cluster);
}
