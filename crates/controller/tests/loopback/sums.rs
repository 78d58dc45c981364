//! Sums are right.

use super::*;

#[test]
fn four_ranks_get_the_same_exact_sum_whatever_the_length_and_the_number_of_shards() {
    for shards in [1, 2] {
        let switch = switch_with(|config| config.shards = shards);
        let sessions = connect_all(&switch, "sum", 4, |_| {});
        for length in [0_usize, 1, 255, 2048, 2049, 100_000] {
            let under_way: Vec<_> = (0..)
                .zip(&sessions)
                .map(|(rank, session)| {
                    submit(session, (0..length).map(|i| i as i32 * (rank + 1)).collect(), Op::Sum)
                })
                .collect();
            let expected: Vec<i32> = (0..length).map(|i| i as i32 * 10).collect();
            for sum in under_way {
                assert!(sum.wait().expect("a sum") == expected, "{length} elements, {shards} shards");
            }
        }
    }
}

#[test]
fn the_average_of_floats_is_within_the_quantisation_error() {
    let switch = switch();
    let sessions = connect_all(&switch, "average", 3, |_| {});
    let under_way: Vec<_> = [0.5_f32, 1.5, 4.0]
        .into_iter()
        .zip(&sessions)
        .map(|(x, s)| submit(s, vec![x; 5000], Op::Average))
        .collect();
    for average in under_way {
        let average = average.wait().expect("an average");
        assert!(average.iter().all(|x| (x - 2.0).abs() < 1e-5), "{:?}", &average[..4]);
    }
}

#[test]
fn a_job_of_one_rank_gets_its_own_numbers_back() {
    let switch = switch();
    let sessions = connect_all(&switch, "alone", 1, |_| {});
    assert_eq!(submit(&sessions[0], vec![7_i32; 3000], Op::Sum).wait(), Ok(vec![7; 3000]));
}

#[test]
fn two_jobs_do_not_see_each_other() {
    let switch = switch();
    let (a, b) = (connect_all(&switch, "a", 2, |_| {}), connect_all(&switch, "b", 2, |_| {}));
    let start = |sessions: &[Session], value: i32| -> Vec<UnderWay<i32>> {
        sessions.iter().map(|session| submit(session, vec![value; 50_000], Op::Sum)).collect()
    };
    let (a, b) = (start(&a, 1), start(&b, 10));
    assert!(a.into_iter().all(|sum| sum.wait() == Ok(vec![2; 50_000])));
    assert!(b.into_iter().all(|sum| sum.wait() == Ok(vec![20; 50_000])));
}

#[test]
fn a_job_that_ended_may_be_joined_again_under_its_name() {
    let switch = switch();
    for round in 0..3 {
        let sessions = connect_all(&switch, "again", 2, |_| {});
        let sums: Vec<_> = sessions.iter().map(|session| submit(session, vec![round; 10], Op::Sum)).collect();
        assert!(sums.into_iter().all(|sum| sum.wait() == Ok(vec![2 * round; 10])));
    }
}
