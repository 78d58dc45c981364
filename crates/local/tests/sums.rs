//! Sums of ranks that are threads: all dtypes, lengths and groups, with and without other machines.

mod common;

use common::{PATIENCE, cluster, expected, machine, submit, tensor};
use fanin_local::LocalSum;
use fanin_udp::Failure;
use fanin_wire::{Dtype, Op};
use proptest::prelude::*;

/// All ranks submit all tensors at once; returns what they got.
fn reduce(ranks: &[LocalSum], tensors: &[(Dtype, usize, Op)]) -> Vec<Vec<Vec<u8>>> {
    let mut memories: Vec<Vec<Vec<u8>>> = (0..ranks.len())
        .map(|rank| {
            let numbered = tensors.iter().enumerate();
            numbered.map(|(number, (dtype, elements, _))| tensor(*dtype, *elements, rank, number)).collect()
        })
        .collect();
    let mut answers = Vec::new();
    for (rank, memories) in ranks.iter().zip(&mut memories) {
        for (memory, (dtype, _, op)) in memories.iter_mut().zip(tensors) {
            answers.push(submit(rank, memory, *dtype, *op));
        }
    }
    for answer in answers {
        answer.recv_timeout(PATIENCE).expect("an answer").expect("a sum");
    }
    memories
}

fn check(ranks: &[LocalSum], tensors: &[(Dtype, usize, Op)]) {
    let sums = reduce(ranks, tensors);
    for (number, (dtype, elements, op)) in tensors.iter().enumerate() {
        let expected = expected(*dtype, *elements, ranks.len(), number, *op);
        for (rank, sums) in sums.iter().enumerate() {
            assert!(sums[number] == expected, "{op:?} of {elements} {dtype:?} at rank {rank}");
        }
    }
    for rank in ranks {
        assert_eq!((rank.outstanding(), rank.failure().is_none()), (0, true));
    }
}

fn shapes() -> impl Strategy<Value = Vec<(Dtype, usize, Op)>> {
    let elements = prop_oneof![Just(0), Just(1), 0usize..5000, 0usize..700_000];
    let op = prop::sample::select(vec![Op::Sum, Op::Average]);
    prop::collection::vec((prop::sample::select(Dtype::ALL.to_vec()), elements, op), 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn one_machine_sums_every_dtype_and_length(ranks in 2usize..=8, tensors in shapes()) {
        check(&machine(ranks), &tensors);
    }

    #[test]
    fn machines_sum_whatever_their_numbers_of_ranks(
        machines in prop::collection::vec(1usize..=4, 2..=3), tensors in shapes(),
    ) {
        check(&cluster(&machines), &tensors);
    }
}

#[test]
fn a_long_tensor_goes_through_every_place_of_the_rings() {
    let tensors = [(Dtype::Float32, 7_000_003, Op::Average), (Dtype::Float16, 6_000_001, Op::Sum)];
    check(&machine(4), &tensors);
    check(&cluster(&[3, 2]), &tensors);
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
fn who_leaves_early_is_named_and_who_leaves_late_is_not_missed() {
    let mut ranks = machine(3);
    check(&ranks, &[(Dtype::Float32, 1000, Op::Sum)]);
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
