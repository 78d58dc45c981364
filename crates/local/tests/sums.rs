//! Collectives of ranks that are threads: all kinds, dtypes, lengths and groups, with and without
//! other machines.

mod common;

use common::{Call, PATIENCE, cluster, expected, machine, spread, submit, submit_any, tensor};
use fanin_local::LocalSum;
use fanin_udp::{CollectiveKind, Failure, Loss};
use fanin_wire::{Dtype, LossBound, Op, Participants, Rank};
use proptest::prelude::*;
use std::time::Instant;

/// All ranks submit all collectives at once; returns what became of each rank's tensors.
fn reduce(ranks: &[LocalSum], calls: &[Call]) -> Vec<Vec<Vec<Vec<u8>>>> {
    let of_call = |rank: usize, number: usize, call: &Call| {
        let tensors = 0..call.tensors(ranks.len());
        tensors.map(|slice| tensor(call.dtype, call.elements, rank, number + slice)).collect()
    };
    let mut memories: Vec<Vec<Vec<Vec<u8>>>> = (0..ranks.len())
        .map(|rank| calls.iter().enumerate().map(|(number, call)| of_call(rank, number, call)).collect())
        .collect();
    let mut answers = Vec::new();
    for (rank, memories) in ranks.iter().zip(&mut memories) {
        for (memory, call) in memories.iter_mut().zip(calls) {
            let mut tensors: Vec<&mut [u8]> = memory.iter_mut().map(Vec::as_mut_slice).collect();
            answers.push(submit_any(rank, &mut tensors, call));
        }
    }
    for answer in answers {
        answer.recv_timeout(PATIENCE).expect("an answer").expect("a sum");
    }
    memories
}

fn check(ranks: &[LocalSum], calls: &[Call]) {
    let found = reduce(ranks, calls);
    for (number, call) in calls.iter().enumerate() {
        let Call { kind, root, dtype, elements, op, .. } = *call;
        for slice in 0..call.tensors(ranks.len()) {
            let sum = expected(dtype, elements, ranks.len(), number + slice, op);
            let of = |rank| tensor(dtype, elements, rank, number + slice);
            for (rank, found) in found.iter().enumerate() {
                let expected = match kind {
                    CollectiveKind::AllReduce => sum.clone(),
                    CollectiveKind::Reduce if rank == root => sum.clone(),
                    CollectiveKind::ReduceScatter if rank == slice => sum.clone(),
                    CollectiveKind::Broadcast => of(root),
                    CollectiveKind::AllGather => of(slice),
                    CollectiveKind::Reduce | CollectiveKind::ReduceScatter => of(rank),
                };
                assert!(found[number][slice] == expected, "{call:?} at rank {rank}, slice {slice}");
            }
        }
    }
    for rank in ranks {
        assert_eq!((rank.outstanding(), rank.failure().is_none()), (0, true));
    }
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let elements = prop_oneof![Just(0), Just(1), 0usize..5000, 0usize..200_000];
    let op = prop::sample::select(vec![Op::Sum, Op::Average]);
    let (kind, dtype) =
        (prop::sample::select(CollectiveKind::ALL.to_vec()), prop::sample::select(Dtype::ALL.to_vec()));
    let call = (kind, 0usize..64, dtype, elements, op).prop_map(|(kind, root, dtype, elements, op)| Call {
        kind,
        root,
        dtype,
        elements,
        op,
        ..Call::default()
    });
    prop::collection::vec(call, 1..8)
}

/// With roots that there are.
fn fit(mut calls: Vec<Call>, ranks: usize) -> Vec<Call> {
    for call in &mut calls {
        call.root %= ranks;
    }
    calls
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn one_machine_does_every_collective_of_every_dtype_and_length(ranks in 2usize..=8, calls in calls()) {
        check(&machine(ranks), &fit(calls, ranks));
    }

    #[test]
    fn machines_do_so_whatever_their_numbers_of_ranks(
        machines in prop::collection::vec(1usize..=4, 2..=3), calls in calls(),
    ) {
        check(&cluster(&machines), &fit(calls, machines.iter().sum()));
    }
}

#[test]
fn ranks_of_a_machine_need_not_follow_each_other() {
    let calls: Vec<_> = CollectiveKind::ALL
        .into_iter()
        .flat_map(|kind| [3, 30_001].map(|elements| Call { kind, root: 3, elements, ..Call::default() }))
        .collect();
    check(&spread(vec![0, 1, 1, 0, 2, 1, 0, 2]), &calls);
}

#[test]
fn many_ranks_gather_and_scatter() {
    let call = |kind, dtype, elements| Call { kind, dtype, elements, ..Call::default() };
    for elements in [1, 5000] {
        let calls = [
            call(CollectiveKind::AllGather, Dtype::Float64, elements),
            call(CollectiveKind::ReduceScatter, Dtype::Float32, elements),
        ];
        check(&machine(24), &calls);
        check(&cluster(&[9, 7, 8]), &calls);
    }
}

#[test]
fn a_long_tensor_goes_through_every_place_of_the_rings() {
    let long = |kind, dtype, elements, op| Call { kind, root: 1, dtype, elements, op, ..Call::default() };
    let calls = [
        long(CollectiveKind::AllReduce, Dtype::Float32, 7_000_003, Op::Average),
        long(CollectiveKind::Broadcast, Dtype::Float64, 2_200_001, Op::Sum),
        long(CollectiveKind::AllReduce, Dtype::Float16, 6_000_001, Op::Sum),
        long(CollectiveKind::ReduceScatter, Dtype::Float64, 450_001, Op::Average),
        long(CollectiveKind::AllGather, Dtype::Float64, 450_001, Op::Sum),
        long(CollectiveKind::Reduce, Dtype::Float64, 2_200_001, Op::Sum),
    ];
    check(&machine(4), &calls);
    check(&cluster(&[3, 2]), &calls);
}

#[test]
fn sums_of_floats_have_the_bits_of_the_order_of_ranks_everywhere() {
    let elements = 100_001;
    let mut state = 1u32;
    let mut random = || {
        state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        f32::from_bits((state >> 9) | 0x3f80_0000) * if state & 1 == 0 { 1e6 } else { -1.0 }
    };
    let tensors: Vec<Vec<f32>> = (0..5).map(|_| (0..elements).map(|_| random()).collect()).collect();
    let sum = |i: usize| tensors[1..].iter().fold(tensors[0][i], |sum, tensor| sum + tensor[i]);
    let expected: Vec<u8> = (0..elements).flat_map(|i| sum(i).to_le_bytes()).collect();
    let ranks = machine(5);
    let mut memories: Vec<Vec<u8>> =
        tensors.iter().map(|tensor| tensor.iter().flat_map(|x| x.to_le_bytes()).collect()).collect();
    let answers: Vec<_> = ranks
        .iter()
        .zip(&mut memories)
        .map(|(rank, memory)| submit(rank, memory, Dtype::Float32, Op::Sum))
        .collect();
    for answer in answers {
        answer.recv_timeout(PATIENCE).expect("an answer").expect("a sum");
    }
    assert!(memories.iter().all(|memory| *memory == expected));
}

#[test]
fn times_tell_that_a_rank_waited_for_one_that_was_late() {
    let ranks = machine(2);
    // The memory has no room for so many blocks.
    let mut memory = vec![vec![1u8; 40_000_000]; 2];
    let [mine, late] = &mut memory[..] else { unreachable!("two") };
    let before = Instant::now();
    let mine = submit(&ranks[0], mine, Dtype::Uint8, Op::Sum);
    let patience = before + PATIENCE;
    while ranks[0].awaited() != [1] {
        assert!(Instant::now() < patience, "rank 0 contributes");
        std::thread::yield_now();
    }
    let asked = Instant::now();
    let late = submit(&ranks[1], late, Dtype::Uint8, Op::Sum);
    let [mine, late] =
        [mine, late].map(|answer| answer.recv_timeout(PATIENCE).expect("an answer").expect("a sum"));
    assert!(before <= mine.begun && mine.begun <= asked, "it contributed while the other was late");
    assert!(asked <= mine.contributed, "the memory has no room for all of it");
    assert!(asked <= late.begun);
    for times in [mine, late] {
        assert!(times.begun <= times.contributed && times.contributed <= times.summed);
    }
}

#[test]
fn a_rank_that_submits_ahead_does_not_keep_others_from_what_is_complete() {
    let ranks = machine(2);
    let mut memory = vec![vec![1u8; 100]; 3];
    let [first, ahead, other] = &mut memory[..] else { unreachable!("three") };
    let first = submit(&ranks[0], first, Dtype::Uint8, Op::Sum);
    let ahead = submit(&ranks[0], ahead, Dtype::Uint8, Op::Sum);
    let other = submit(&ranks[1], other, Dtype::Uint8, Op::Sum);
    // Although the next one waits for a rank that may wait for this one's message.
    first.recv_timeout(PATIENCE).expect("an answer").expect("a sum");
    other.recv_timeout(PATIENCE).expect("an answer").expect("a sum");
    assert!(ahead.try_recv().is_err());
    let mut late = vec![1u8; 100];
    let late = submit(&ranks[1], &mut late, Dtype::Uint8, Op::Sum);
    for answer in [ahead, late] {
        answer.recv_timeout(PATIENCE).expect("an answer").expect("a sum");
    }
}

#[test]
fn what_machines_lose_between_them_is_told_to_every_rank_and_of_each_tensor_by_itself() {
    let ranks = cluster(&[3, 2]);
    let (dtype, half) = (Dtype::Float32, LossBound::new(0.5));
    // Slices of both columns in three segments, and one of one column. The network says that each
    // slice of a column lost one more than the one before.
    let calls =
        [(3_000_000, half, 6, 2 * (1 + 2 + 3)), (100, half, 1, 4), (100, None, 1, 0), (0, half, 0, 0)];
    let mut memories: Vec<Vec<_>> =
        ranks.iter().map(|_| calls.map(|(elements, ..)| tensor(dtype, elements, 0, 0)).to_vec()).collect();
    let answers: Vec<_> = ranks
        .iter()
        .zip(&mut memories)
        .flat_map(|(rank, memories)| {
            let call = |loss_bound| Call { loss_bound, ..Call::default() };
            let submit = |(memory, (_, bound, ..)): (&mut Vec<u8>, (usize, _, u64, u64))| {
                submit_any(rank, &mut [memory.as_mut_slice()], &call(bound))
            };
            memories.iter_mut().zip(calls).map(submit).collect::<Vec<_>>()
        })
        .collect();
    for (answer, (_, _, slices, lost)) in answers.into_iter().zip(calls.into_iter().cycle()) {
        let found = answer.recv_timeout(PATIENCE).expect("an answer").expect("a sum");
        let (contributions, rounds) = (2 * slices, slices as u32);
        assert_eq!(found.loss, Loss { contributions, lost, rounds, ..Loss::default() });
    }
}

fn of(set: &[u16]) -> Participants {
    Participants::of(set.iter().copied().map(Rank)).expect("few")
}

/// All ranks submit; those of a set get the sum of these, and others keep what they have.
fn check_sets(ranks: &[LocalSum], sets: &[&[u16]], elements: usize, op: Op) {
    let own = |rank: usize, number: usize| -> Vec<i32> {
        (0..elements).map(|at| ((at % 97 + number) * 12 * (rank + 1)) as i32).collect()
    };
    let bytes = |values: &[i32]| -> Vec<u8> { values.iter().flat_map(|value| value.to_le_bytes()).collect() };
    let mut memories: Vec<Vec<_>> = (0..ranks.len())
        .map(|rank| (0..sets.len()).map(|number| bytes(&own(rank, number))).collect())
        .collect();
    let answers: Vec<_> = ranks
        .iter()
        .zip(&mut memories)
        .flat_map(|(rank, memories)| {
            let submit = |(memory, set): (&mut Vec<u8>, &&[u16])| {
                let call = Call { dtype: Dtype::Int32, op, participants: of(set), ..Call::default() };
                submit_any(rank, &mut [memory.as_mut_slice()], &call)
            };
            memories.iter_mut().zip(sets).map(submit).collect::<Vec<_>>()
        })
        .collect();
    for answer in answers {
        answer.recv_timeout(PATIENCE).expect("an answer").expect("a sum");
    }
    for (rank, memories) in memories.iter().enumerate() {
        for (number, (found, set)) in memories.iter().zip(sets).enumerate() {
            let mut expected = own(rank, number);
            if set.contains(&(rank as u16)) {
                let all: Vec<_> = set.iter().map(|rank| own(usize::from(*rank), number)).collect();
                let divisor = if op == Op::Average { set.len() as i32 } else { 1 };
                for (at, sum) in expected.iter_mut().enumerate() {
                    *sum = all.iter().map(|of_rank| of_rank[at]).sum::<i32>() / divisor;
                }
            }
            assert!(*found == bytes(&expected), "{set:?} at rank {rank}, {op:?}");
        }
    }
}

#[test]
fn a_part_of_the_ranks_sums_alone_and_a_machine_without_any_of_them_is_left_out() {
    // All of a machine, some, one on each, and one alone, which speaks for no machine.
    let sets: [&[u16]; 6] = [&[0, 1, 2], &[1, 3], &[0, 3, 5], &[4], &[0, 1, 2, 3, 4, 5], &[2, 4, 5]];
    for op in [Op::Sum, Op::Average] {
        for elements in [1, 5_000] {
            check_sets(&machine(6), &sets, elements, op);
            check_sets(&cluster(&[3, 2, 1]), &sets, elements, op);
            // Two columns, and ranks that do not follow each other.
            check_sets(&spread(vec![0, 1, 0, 1, 0, 1]), &sets, elements, op);
        }
        check_sets(&cluster(&[3, 2, 1]), &sets, 1_500_000, op);
    }
}

#[test]
fn ranks_with_unlike_sets_are_told_so() {
    let ranks = machine(3);
    let mut memory = vec![vec![1u8; 800]; 3];
    let answers: Vec<_> = ranks
        .iter()
        .zip(&mut memory)
        .zip([&[0, 1][..], &[0, 1], &[0, 2]])
        .map(|((rank, memory), set)| {
            submit_any(rank, &mut [memory.as_mut_slice()], &Call { participants: of(set), ..Call::default() })
        })
        .collect();
    for answer in answers {
        let failure = answer.recv_timeout(PATIENCE).expect("an answer").expect_err("they disagree");
        let said = failure.to_string();
        assert!(said.contains("of ranks [0, 1]") && said.contains("of ranks [0, 2]"), "{said}");
    }
}

#[test]
fn ranks_that_reduce_different_tensors_are_named_with_them() {
    let ranks = machine(3);
    let mut memory = vec![vec![1u8; 800]; 3];
    let answers: Vec<_> = ranks
        .iter()
        .zip(&mut memory)
        .zip([Dtype::Float32, Dtype::Float32, Dtype::Int64])
        .map(|((rank, memory), dtype)| submit(rank, memory, dtype, Op::Sum))
        .collect();
    for answer in answers {
        let failure = answer.recv_timeout(PATIENCE).expect("an answer").expect_err("they disagree");
        let said = failure.to_string();
        assert!(
            said.contains("ranks 0 and 2 disagree")
                || said.contains("ranks 1 and 2 disagree")
                || said.contains("ranks 2 and 0 disagree"),
            "{said}"
        );
        assert!(said.contains("sum of 100 int64") && said.contains("sum of 200 float32"), "{said}");
    }
    assert!(ranks.iter().all(|rank| rank.failure().is_some()));
}

#[test]
fn ranks_that_call_unlike_collectives_are_told_both_and_have_none() {
    let call = |kind, root| Call { kind, root, dtype: Dtype::Uint8, elements: 8, ..Call::default() };
    let (broadcast, reduce) = (CollectiveKind::Broadcast, CollectiveKind::Reduce);
    for (first, second, said) in [
        (call(broadcast, 0), call(broadcast, 1), ["8 uint8 of rank 0", "8 uint8 of rank 1"]),
        (call(reduce, 0), call(broadcast, 0), ["sum of 8 uint8 for rank 0", "8 uint8 of rank 0"]),
    ] {
        let ranks = machine(2);
        let mut memories = [[1u8; 8], [2u8; 8]];
        let answers: Vec<_> = ranks
            .iter()
            .zip(&mut memories)
            .zip([first, second])
            .map(|((rank, memory), call)| submit_any(rank, &mut [memory], &call))
            .collect();
        for answer in answers {
            let failure = answer.recv_timeout(PATIENCE).expect("an answer").expect_err("they disagree");
            assert!(said.iter().all(|said| failure.to_string().contains(said)), "{failure}");
        }
        assert_eq!(memories, [[1; 8], [2; 8]], "nothing is handed out");
    }
}

#[test]
fn who_leaves_early_is_named_and_who_leaves_late_is_not_missed() {
    let mut ranks = machine(3);
    check(&ranks, &[Call { elements: 1000, ..Call::default() }]);
    drop(ranks.remove(1));
    let mut memory = vec![vec![0u8; 8]; 2];
    let answers: Vec<_> = ranks
        .iter()
        .zip(&mut memory)
        .map(|(rank, memory)| submit(rank, memory, Dtype::Float32, Op::Sum))
        .collect();
    for answer in answers {
        let failure = answer.recv_timeout(PATIENCE).expect("an answer").expect_err("a rank is missing");
        assert!(failure.to_string().starts_with("rank 1 left the job"), "{failure}");
    }
}

#[test]
fn what_keeps_an_all_reduce_waiting_too_long_is_named() {
    let ranks = machine(3);
    for rank in &ranks {
        rank.set_timeout(std::time::Duration::from_millis(1));
    }
    let mut memory = vec![0u8; 8];
    let answer = submit(&ranks[0], &mut memory, Dtype::Float32, Op::Sum);
    let failure = answer.recv_timeout(PATIENCE).expect("an answer").expect_err("nobody else came");
    assert!(failure.to_string().contains("ranks [1, 2] of this machine did not take part"), "{failure}");
}

#[test]
fn one_ranks_failure_ends_all_of_them() {
    let ranks = cluster(&[2, 2]);
    let mut memory = vec![0u8; 8];
    let waits = submit(&ranks[1], &mut memory, Dtype::Float32, Op::Sum);
    ranks[0].fail(Failure::Stopped);
    let failure = waits.recv_timeout(PATIENCE).expect("an answer").expect_err("rank 0 has failed");
    assert!(failure.to_string().starts_with("rank 0 has ended the job"), "{failure}");
    // The other machine hears of it from the network, of which this one is none.
    assert!(ranks[2].failure().is_none());
}

#[test]
fn a_group_that_is_stopped_answers_everything() {
    let ranks = machine(2);
    let mut memory = vec![0u8; 8];
    let waits = submit(&ranks[0], &mut memory, Dtype::Float32, Op::Sum);
    ranks[0].stop();
    assert!(matches!(waits.recv_timeout(PATIENCE).expect("an answer"), Err(Failure::Stopped)));
    let late = submit(&ranks[0], &mut memory, Dtype::Float32, Op::Sum);
    assert!(matches!(late.recv_timeout(PATIENCE).expect("an answer"), Err(Failure::Stopped)));
    assert_eq!(ranks[0].outstanding(), 0);
}
