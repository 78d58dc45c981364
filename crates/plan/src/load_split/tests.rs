use microlp::{ComparisonOp, OptimizationDirection, Problem};
use proptest::prelude::*;

use super::*;
use crate::Machine;

const GBIT: f64 = 1e9;

fn equal(n: usize, k: usize) -> Cluster {
    let training = (0..n).map(|index| Machine::training(format!("w{index}"), GBIT));
    let spare = (0..k).map(|index| Machine::spare(format!("s{index}"), GBIT));
    Cluster::new(training.chain(spare).collect()).expect("a cluster")
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
}

/// BytePS, Eqs. 1, 2 and 6: shares of a CPU machine and of a GPU machine, and the time in seconds a
/// byte. The printed Eq. 4 lacks a factor n: a CPU machine takes in n contributions.
fn equations(n: usize, k: usize) -> (f64, f64, f64) {
    let (n, k) = (n as f64, k as f64);
    let whole = n * n + k * n - 2.0 * k;
    (2.0 * (n - 1.0) / whole, (n - k) / whole, 2.0 * n * (n - 1.0) / whole * 8.0 / GBIT)
}

#[test]
fn equal_links_are_split_as_in_the_equations() {
    for n in 2..=32 {
        for k in 0..=n {
            let plan = LoadSplit::of(&equal(n, k));
            let (spare, own, seconds) = equations(n, k);
            assert!(close(plan.seconds_per_byte, seconds), "n = {n}, k = {k}: {plan:?}");
            // With two machines a service of one's own costs its link nothing, so there are other
            // optima.
            if n > 2 {
                assert!(
                    plan.shares[..n].iter().all(|share| (share - own).abs() < 1e-9),
                    "n = {n}, k = {k}: {plan:?}"
                );
                assert!(
                    plan.shares[n..].iter().all(|share| close(*share, spare)),
                    "n = {n}, k = {k}: {plan:?}"
                );
            }
        }
    }
}

/// BytePS §4.1.1: for n = 32 and k = 16, 46 % faster than all-reduce, and 52 % than PS (Eq. 7; the
/// first is 46.9 %, cut).
#[test]
fn sixteen_spare_machines_beside_thirty_two_gain_what_the_paper_says() {
    let cluster = equal(32, 16);
    let seconds = LoadSplit::of(&cluster).seconds_per_byte;
    let servers = 32.0 / 16.0 * 8.0 / GBIT;
    assert_eq!(format!("{:.3}", ring(&cluster) / seconds), "1.469");
    assert_eq!(format!("{:.3}", servers / seconds), "1.516");
}

#[test]
fn more_spare_machines_than_training_ones_do_not_help() {
    let plan = LoadSplit::of(&equal(4, 9));
    assert!(close(plan.seconds_per_byte, 8.0 / GBIT));
    assert!(plan.shares[..4].iter().all(|share| *share == 0.0), "{plan:?}");
}

#[test]
fn a_switch_with_a_link_for_every_worker_gets_everything() {
    let mut machines = equal(8, 0).machines().to_vec();
    machines.push(Machine::spare("switch", 8.0 * GBIT));
    let cluster = Cluster::new(machines).expect("a cluster");
    let plan = LoadSplit::of(&cluster);
    assert!(close(plan.seconds_per_byte, 8.0 / GBIT));
    assert!(close(plan.shares[8], 1.0), "{plan:?}");
}

#[test]
fn who_may_not_sum_has_no_share() {
    let mut machines = equal(4, 1).machines().to_vec();
    machines.iter_mut().take(4).for_each(|machine| machine.sums = false);
    let cluster = Cluster::new(machines).expect("a cluster");
    let plan = LoadSplit::of(&cluster);
    assert_eq!(plan.shares, [0.0, 0.0, 0.0, 0.0, 1.0]);
    assert_eq!(plan.seconds_per_byte, one_switch(&cluster).expect("a switch").seconds_per_byte);
    assert!(matches!(plan.bound, Bound::Up(4) | Bound::Down(4)), "{plan:?}");
}

#[test]
fn slow_cores_get_less_and_are_named_when_they_decide() {
    let mut machines = equal(4, 1).machines().to_vec();
    machines[4].summed_bytes_per_s = 1e6;
    let slow = LoadSplit::of(&Cluster::new(machines.clone()).expect("a cluster"));
    let fast = LoadSplit::of(&equal(4, 1));
    assert!(slow.shares[4] < fast.shares[4] && slow.seconds_per_byte > fast.seconds_per_byte);
    machines.iter_mut().for_each(|machine| machine.summed_bytes_per_s = 1e6);
    let plan = LoadSplit::of(&Cluster::new(machines).expect("a cluster"));
    assert!(matches!(plan.bound, Bound::Summing(_)), "{plan:?}");
    assert!(close(plan.seconds_per_byte, 4.0 / 5.0 / 1e6), "{plan:?}");
}

#[test]
fn one_machine_alone_waits_for_nothing() {
    let plan = LoadSplit::of(&equal(1, 2));
    assert_eq!((plan.seconds_per_byte, plan.bound), (0.0, Bound::Nothing));
    assert!(close(plan.shares.iter().sum(), 1.0));
    assert_eq!((ring(&equal(1, 0)), lower_bound(&equal(1, 0))), (0.0, 0.0));
}

#[test]
fn what_cannot_be_planned_for_is_refused() {
    let refused = |machines| Cluster::new(machines).expect_err("refused").to_string();
    assert!(refused(vec![Machine::spare("s", GBIT)]).contains("no machine trains"));
    let training = Machine { sums: false, ..Machine::training("w", GBIT) };
    assert!(refused(vec![training]).contains("no machine may sum"));
    for rate in [0.0, -1.0, f64::NAN] {
        assert!(refused(vec![Machine::training("w7", rate)]).contains("machine w7"));
    }
}

/// Clusters of unequal machines; the first one trains and sums.
fn clusters() -> impl Strategy<Value = Cluster> {
    let rate = || prop_oneof![Just(GBIT), 1e7..1e11];
    let summing = prop_oneof![4 => Just(f64::INFINITY), 1 => 1e7..1e11];
    let machine = (any::<bool>(), any::<bool>(), rate(), rate(), summing);
    proptest::collection::vec(machine, 1..12).prop_map(|machines| {
        let machine = |(index, (trains, sums, up_bps, down_bps, summed_bytes_per_s))| Machine {
            name: format!("m{index}"),
            trains: trains || index == 0,
            sums: sums || index == 0,
            up_bps,
            down_bps,
            summed_bytes_per_s,
        };
        Cluster::new(machines.into_iter().enumerate().map(machine).collect()).expect("a cluster")
    })
}

/// The same as a linear program, in units of the time that the plan claims.
fn optimum(cluster: &Cluster, unit: f64) -> f64 {
    let mut problem = Problem::new(OptimizationDirection::Minimize);
    let time = problem.add_var(1.0, (0.0, f64::INFINITY));
    let most = |machine: &Machine| f64::from(u8::from(machine.sums));
    let shares: Vec<_> =
        cluster.machines().iter().map(|machine| problem.add_var(0.0, (0.0, most(machine)))).collect();
    problem.add_constraint(shares.iter().map(|share| (*share, 1.0)), ComparisonOp::Eq, 1.0);
    for row in rows(cluster).iter().filter(|row| row.rate.is_finite()) {
        // fixed + slope * share <= time * unit * rate
        let scale = unit * row.rate;
        let terms = [(time, 1.0), (shares[row.machine], -row.slope / scale)];
        problem.add_constraint(terms, ComparisonOp::Ge, row.fixed / scale);
    }
    problem.solve().expect("a plan").objective()
}

proptest! {
    #[test]
    fn a_plan_is_the_linear_programs_optimum(cluster in clusters()) {
        let plan = LoadSplit::of(&cluster);
        prop_assume!(plan.seconds_per_byte > 0.0);
        let optimum = optimum(&cluster, plan.seconds_per_byte);
        prop_assert!((optimum - 1.0).abs() < 1e-6, "{optimum} of {plan:?}");
    }

    #[test]
    fn shares_make_a_whole_and_no_link_takes_longer_than_the_plan_says(cluster in clusters()) {
        let plan = LoadSplit::of(&cluster);
        prop_assert!(close(plan.shares.iter().sum(), 1.0));
        for (machine, share) in cluster.machines().iter().zip(&plan.shares) {
            prop_assert!((0.0..=1.0 + 1e-12).contains(share));
            prop_assert!(machine.sums || *share == 0.0);
        }
        for row in rows(&cluster) {
            prop_assert!(row.seconds(plan.shares[row.machine]) <= plan.seconds_per_byte);
        }
    }

    #[test]
    fn a_plan_is_never_worse_than_a_ring_or_one_switch_nor_better_than_can_be(cluster in clusters()) {
        let seconds = LoadSplit::of(&cluster).seconds_per_byte * (1.0 - 1e-9);
        if let Some(switch) = one_switch(&cluster) {
            prop_assert!(seconds <= switch.seconds_per_byte);
        }
        let all_sum = |machine: &Machine| !machine.trains || (machine.sums && machine.summed_bytes_per_s.is_infinite());
        if cluster.machines().iter().all(all_sum) {
            prop_assert!(seconds <= ring(&cluster));
        }
        prop_assert!(LoadSplit::of(&cluster).seconds_per_byte >= lower_bound(&cluster) * (1.0 - 1e-9));
    }

    #[test]
    fn one_more_machine_never_makes_it_slower(cluster in clusters(), rate in 1e7..1e11) {
        let before = LoadSplit::of(&cluster).seconds_per_byte;
        let mut machines = cluster.machines().to_vec();
        machines.push(Machine::spare("more", rate));
        let after = LoadSplit::of(&Cluster::new(machines).expect("a cluster")).seconds_per_byte;
        prop_assert!(after <= before * (1.0 + 1e-9));
    }
}
