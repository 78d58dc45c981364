use std::collections::BTreeSet;

use microlp::{ComparisonOp, OptimizationDirection, Problem};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use super::*;
use crate::random_workloads;
use crate::sub_models::SubModel;
use crate::topologies::{Rates, SWITCH_MEMORY_BYTES, make_programmable, paper_fat_tree, testbed};

const ALEXNET_BYTES: u64 = 221_000_000;

fn job(topology: &Topology, workers: usize, sub_models: Vec<SubModel>) -> Job {
    let hosts: Vec<_> = topology.hosts().collect();
    Job {
        name: "job".into(),
        workers: hosts[..workers].into(),
        servers: vec![hosts[hosts.len() - 1]],
        sub_models,
    }
}

fn fat_tree(seed: u64) -> Workload {
    let mut tree = paper_fat_tree(Rates::alike(10e9));
    make_programmable(&mut tree, 0.2, SWITCH_MEMORY_BYTES, seed);
    let job = job(&tree, 191, SubModel::divided(ALEXNET_BYTES, 2_000_000));
    Workload::new(tree, vec![job]).expect("a workload")
}

/// 192 servers; one of them is the parameter server.
#[test]
fn the_fat_tree_is_planned_within_ten_percent_of_the_bound() {
    for seed in 0..10 {
        let workload = fat_tree(seed);
        let plan = krgs(&workload, Objective::Reduction, seed);
        assert!(plan.value >= 0.9 * plan.bound && plan.value <= plan.bound * (1.0 + 1e-6), "{plan:?}");
        // All of the model is summed in switches, so that the server gets it once.
        assert_eq!(plan.schedule.traffic(&workload, 0).server_bytes, ALEXNET_BYTES);
        let plan = krgs(&workload, Objective::Overhead, seed);
        assert!(plan.value <= 1.1 * plan.bound && plan.value >= plan.bound * (1.0 - 1e-6), "{plan:?}");
    }
}

/// Eq. 4 contains no way from a worker to a switch, so its plans are longer than those of Eq. 1,
/// from which it is derived.
#[test]
fn the_printed_program_makes_more_traffic_than_the_one_it_stands_for() {
    let workload = fat_tree(0);
    let overhead = |objective| krgs(&workload, objective, 0).schedule.traffic(&workload, 0).hop_bytes;
    assert!(overhead(Objective::Reduction) as f64 > 1.5 * overhead(Objective::Overhead) as f64);
}

#[test]
fn a_seed_is_a_plan() {
    for seed in 0..5 {
        let workload = random_workloads::workload(seed, 2, 1, 0.1);
        for objective in [Objective::Reduction, Objective::Overhead] {
            assert_eq!(krgs(&workload, objective, 7), krgs(&workload, objective, 7));
        }
    }
}

#[test]
fn what_no_switch_has_room_for_goes_to_the_server() {
    let topology = testbed();
    let sub_models = [30_000_000, 10_000_000].map(|bytes| SubModel { name: bytes.to_string(), bytes });
    let workload =
        Workload::new(topology.clone(), vec![job(&topology, 8, sub_models.into())]).expect("a workload");
    let plan = krgs(&workload, Objective::Reduction, 0);
    assert!(plan.schedule.jobs()[0].fan_in(0).is_empty());
    assert_eq!(plan.schedule.jobs()[0].fan_in(1).len(), 1);
    assert!(plan.value <= plan.bound * (1.0 + 1e-6));
    // And where no switch sums, everything does.
    let mut plain = topology.clone();
    for switch in topology.switches() {
        plain.set_memory_bytes(switch, None);
    }
    let workload = Workload::new(plain, workload.jobs().to_vec()).expect("a workload");
    let plan = krgs(&workload, Objective::Overhead, 0);
    assert_eq!(plan.schedule.jobs()[0], JobSchedule::at_server(8, 2, workload.jobs()[0].server()));
    assert!((plan.value - plan.bound).abs() <= 1e-6 * plan.bound, "{plan:?}");
}

/// Eqs. 1 and 4 as printed: a variable for every worker, sub-model and switch.
fn whole_program(workload: &Workload, objective: Objective) -> f64 {
    let (topology, job) = (workload.topology(), &workload.jobs()[0]);
    let server = job.server();
    let mut nodes: Vec<_> = topology.programmable().collect();
    nodes.push(server);
    let mut problem = Problem::new(match objective {
        Objective::Reduction => OptimizationDirection::Maximize,
        Objective::Overhead => OptimizationDirection::Minimize,
    });
    let mut memory = vec![Vec::new(); nodes.len()];
    for part in &job.sub_models {
        let bytes = part.bytes as f64;
        let xs: Vec<_> = nodes
            .iter()
            .map(|node| {
                let onward = far(topology, *node, server) * bytes;
                let cost = if objective == Objective::Reduction { -onward } else { onward };
                problem.add_var(cost, (0.0, 1.0))
            })
            .collect();
        let at_least: Vec<_> = xs.iter().map(|x| (*x, 1.0)).collect();
        problem.add_constraint(&at_least[..], ComparisonOp::Ge, 1.0);
        for (row, x) in memory.iter_mut().zip(&xs) {
            row.push((*x, bytes));
        }
        for worker in &job.workers {
            let mut whole = Vec::new();
            for (node, x) in nodes.iter().zip(&xs) {
                let cost = match objective {
                    Objective::Reduction => far(topology, *node, server),
                    Objective::Overhead => far(topology, *worker, *node),
                };
                let y = problem.add_var(cost * bytes, (0.0, 1.0));
                problem.add_constraint([(y, 1.0), (*x, -1.0)], ComparisonOp::Le, 0.0);
                whole.push((y, 1.0));
            }
            problem.add_constraint(&whole[..], ComparisonOp::Eq, 1.0);
        }
    }
    for (node, row) in nodes.iter().zip(memory) {
        if let Some(have) = topology.memory_bytes(*node) {
            problem.add_constraint(&row[..], ComparisonOp::Le, have as f64);
        }
    }
    problem.solve().expect("everything at the server").objective()
}

/// A single sub-model for all and a single worker for a rack lose nothing: the small program has
/// the optimum of the printed one.
#[test]
fn the_small_program_has_the_optimum_of_the_whole_one() {
    for seed in 0..30 {
        let workload = random_workloads::workload(seed, 1, 1, 0.4);
        let largest = workload.jobs()[0].sub_models.iter().map(|part| part.bytes).max();
        let topology = workload.topology();
        let room = topology.programmable().filter_map(|switch| topology.memory_bytes(switch)).max();
        if room < largest {
            // The printed program would divide what no switch has room for.
            continue;
        }
        for objective in [Objective::Reduction, Objective::Overhead] {
            let (small, whole) = (krgs(&workload, objective, 0).bound, whole_program(&workload, objective));
            assert!(
                (small - whole).abs() <= 1e-5 * whole.abs().max(1.0),
                "{seed} {objective:?}: {small} {whole}"
            );
        }
    }
}

/// `ϱ` of Eq. 17.
fn rho(count: f64, nu: f64) -> f64 {
    let log = count.ln();
    (log + (log * log + 8.0 * nu * log).sqrt()) / (2.0 * nu)
}

/// A solution of the relaxation of no workload: whatever Algorithm 1 may be handed.
fn fractional(switches: usize, workers: usize) -> impl Strategy<Value = Fractional> {
    let sub_models = 1..12_usize;
    let cell = prop_oneof![Just(0.0), Just(1.0), 0.0..=1.0_f64];
    sub_models.prop_flat_map(move |sub_models| {
        let x = prop::collection::vec(prop::collection::vec(cell.clone(), switches), sub_models);
        let y = prop::collection::vec(0.0..=1.0_f64, sub_models * workers * switches);
        (x, y).prop_map(move |(x, y)| {
            let mut parts = y.into_iter();
            let mut of_worker = |x: &Vec<f64>| {
                let drawn: Vec<f64> = x.iter().map(|x| x * parts.next().expect("enough")).collect();
                let sum = drawn.iter().sum::<f64>().max(1.0);
                drawn.into_iter().map(|y| y / sum).collect::<Vec<_>>()
            };
            let y = x.iter().map(|x| (0..workers).map(|_| of_worker(x)).collect()).collect();
            let class = |worker| Class { members: vec![worker], host: NodeId(100 + worker as u16) };
            Fractional {
                switches: (0..switches as u16).map(NodeId).collect(),
                classes: (0..workers).map(class).collect(),
                x,
                y,
            }
        })
    })
}

const SERVER: NodeId = NodeId(99);

fn rounded(fractional: &Fractional, seed: u64) -> JobSchedule {
    let part = |index: usize| SubModel { name: index.to_string(), bytes: 1 };
    let job = Job {
        name: "job".into(),
        workers: fractional.classes.iter().map(|class| class.host).collect(),
        servers: vec![SERVER],
        sub_models: (0..fractional.x.len()).map(part).collect(),
    };
    fractional.rounded(&job, &mut Rand64::new(u128::from(seed)))
}

proptest! {
    /// Lemma 3, and that knapsacks divide what there is.
    #[test]
    fn no_knapsack_has_half_or_less(x in prop::collection::vec(0.0..=1.0_f64, 0..24)) {
        let knapsacks = knapsacks(&x);
        prop_assert_eq!(knapsacks.len(), (x.iter().sum::<f64>() + ROUNDING).floor() as usize);
        let mut seen = BTreeSet::new();
        for knapsack in &knapsacks {
            let sum: f64 = knapsack.iter().map(|switch| x[*switch]).sum();
            prop_assert!(sum > 0.5 - ROUNDING, "{} of {:?}", sum, x);
            prop_assert!(knapsack.iter().all(|switch| seen.insert(*switch)));
        }
        let all = x.iter().filter(|x| **x > 0.0).count();
        prop_assert!(knapsacks.is_empty() || seen.len() == all);
    }

    /// Theorems 1 and 2: each worker's part of each sub-model has one node, which is the server or
    /// a switch that the sub-model was assigned to.
    #[test]
    fn each_part_has_one_node_that_may_sum_it(fractional in fractional(6, 4), seed in 0..1000_u64) {
        let schedule = rounded(&fractional, seed);
        prop_assert_eq!((schedule.sub_models(), schedule.workers()), (fractional.x.len(), 4));
        for (sub_model, x) in fractional.x.iter().enumerate() {
            prop_assert_eq!(schedule.root(sub_model), SERVER);
            for (worker, node) in schedule.aggregation_nodes(sub_model).iter().enumerate() {
                let there = fractional.switches.iter().position(|switch| switch == node);
                prop_assert!(*node == SERVER || there.is_some());
                if let Some(switch) = there {
                    prop_assert!(x[switch] > 0.0 && fractional.y[sub_model][worker][switch] > 0.0);
                }
            }
            prop_assert!(schedule.fan_in(sub_model).len() <= knapsacks(x).len());
        }
    }

    /// The plan as a whole keeps to the memories, whatever the rounding did; it is checked as every
    /// schedule is.
    #[test]
    fn no_switch_holds_more_than_it_can(seed in 0..10_000_u64, objective in prop_oneof![Just(Objective::Reduction), Just(Objective::Overhead)]) {
        let workload = random_workloads::workload(seed, 2, 1, 0.2);
        let plan = krgs(&workload, objective, seed);
        for (switch, held) in plan.schedule.held_bytes(&workload) {
            prop_assert!(held <= workload.topology().memory_bytes(switch).expect("it sums"));
        }
        let (less, more) = match objective {
            Objective::Reduction => (plan.value, plan.bound),
            Objective::Overhead => (plan.bound, plan.value),
        };
        prop_assert!(less <= more * (1.0 + 1e-6) + 1.0, "{} {}", less, more);
        // Theorem 6's factor, with ν at least 1, which is what a sub-model as large as a memory
        // has.
        if objective == Objective::Overhead {
            let pairs = workload.topology().programmable().count() * workload.jobs()[0].workers.len();
            prop_assert!(plan.value <= 2.0 * (1.0 + rho(pairs.max(2) as f64, 1.0)) * plan.bound);
        }
    }
}

proptest! {
    // Frequencies are looked at: always the same ones.
    #![proptest_config(ProptestConfig { cases: 24, rng_seed: RngSeed::Fixed(24), ..ProptestConfig::default() })]

    /// Theorem 5 on the raw rounding. In the mean a switch holds at most twice its memory, and with
    /// a chance of 1 / |S| more than 2 (1 + ϱ) times. The memories are what the program fills:
    /// there is none to spare.
    #[test]
    fn switches_overflow_by_no_more_than_the_factor(fractional in fractional(6, 3), seed in 0..1000_u64) {
        let rounds = 400;
        let memory = |switch: usize| fractional.x.iter().map(|x| x[switch]).sum::<f64>();
        let least = (0..6).map(memory).filter(|memory| *memory > 0.0).fold(f64::INFINITY, f64::min);
        prop_assume!(least.is_finite());
        let factor = 2.0 * (1.0 + rho(6.0, 2.0 * least));
        let (mut held, mut beyond) = ([0_usize; 6], [0_usize; 6]);
        let mut random = Rand64::new(u128::from(seed));
        for _ in 0..rounds {
            let mut now = [0_usize; 6];
            for x in &fractional.x {
                for switch in assigned(x, &mut random) {
                    now[switch] += 1;
                }
            }
            for switch in 0..6 {
                held[switch] += now[switch];
                beyond[switch] += usize::from(now[switch] as f64 >= factor * memory(switch).max(1e-9));
            }
        }
        for switch in (0..6).filter(|switch| memory(*switch) > 0.0) {
            let mean = held[switch] as f64 / f64::from(rounds);
            // Four standard errors of a mean of at most 11 draws.
            prop_assert!(mean <= 2.0 * memory(switch) + 4.0 * 11_f64.sqrt() / 2.0 / 20.0, "{} of {}", mean, memory(switch));
            let share = beyond[switch] as f64 / f64::from(rounds);
            prop_assert!(share <= 1.0 / 6.0 + 4.0 * (1.0 / 6.0_f64 * 5.0 / 6.0).sqrt() / 20.0, "{}", share);
        }
    }

    /// Theorem 6, if its proof holds: in the mean, no switch gets more than twice what the program
    /// sends it. The theorem does not bound what the server gets. A worker sends its parts there if
    /// they all lie at switches that were not drawn.
    #[test]
    fn workers_send_a_switch_at_most_twice_what_the_program_says(fractional in fractional(5, 3), seed in 0..1000_u64) {
        let rounds = 400_u64;
        let mut sent = vec![[[0_usize; 5]; 3]; fractional.x.len()];
        for round in 0..rounds {
            let schedule = rounded(&fractional, seed * rounds + round);
            for (sub_model, sent) in sent.iter_mut().enumerate() {
                for (worker, node) in schedule.aggregation_nodes(sub_model).iter().enumerate() {
                    if *node != SERVER {
                        sent[worker][node.index()] += 1;
                    }
                }
            }
        }
        for (sent, y) in sent.iter().zip(&fractional.y) {
            for (sent, y) in sent.iter().flatten().zip(y.iter().flatten()) {
                let mean = *sent as f64 / rounds as f64;
                prop_assert!(mean <= 2.0 * y + 5.0 * 0.5 / 20.0, "{} of {}", mean, y);
            }
        }
    }
}
