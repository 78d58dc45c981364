//! SwitchML's workers, racks and services in a hostile network, with the control that joins them: ranks say that they live, services
//! expel who is silent, restart, admit jobs again that they forgot, and die for good while others take their lanes over.

mod checker;
mod membership;
mod scenario;
mod script;
mod tensors;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fanin_protocol::Instant;
use fanin_testworld::each_seed_in_parallel;
use fanin_wire::{Dtype, Op, PLACES_MAX, Pattern, RANKS_MAX, WireDtype};
use scenario::{Racks, Restart, Scenario, Services, TensorShape};
use script::run;

/// Seeds 0 to this; the same in CI and at the desk.
const SEEDS: u64 = 20_000;
/// The same, with racks before the switch.
const SEEDS_WITH_RACKS: u64 = 10_000;
/// The same, with services of which some die for good.
const SEEDS_WITH_SERVICES: u64 = 5_000;
/// The same, with services whose shares follow from wrong rates.
const SEEDS_WITH_WRONG_RATES: u64 = 2_500;

type FromSeed = fn(u64) -> Scenario;

/// What all runs were like together.
#[derive(Default)]
struct Totals {
    lost: AtomicU64,
    resumptions: AtomicU64,
    taken_over: AtomicU64,
    handed_back: AtomicU64,
    killed: AtomicU64,
}

/// Plays all seeds, and returns what they were like; none if the environment names a seed, which is played alone.
fn play_all(seeds: u64, from_seed: FromSeed) -> Option<Totals> {
    let totals = Totals::default();
    let all = each_seed_in_parallel(0..seeds, |seed| {
        let report = run(&from_seed(seed));
        totals.lost.fetch_add(report.lost, Ordering::Relaxed);
        totals.resumptions.fetch_add(report.counts.resumptions, Ordering::Relaxed);
        totals.taken_over.fetch_add(report.counts.taken_over, Ordering::Relaxed);
        totals.handed_back.fetch_add(report.counts.handed_back, Ordering::Relaxed);
        totals.killed.fetch_add(report.counts.killed, Ordering::Relaxed);
    });
    all.then_some(totals)
}

#[test]
fn every_seed_keeps_every_rule() {
    let Some(totals) = play_all(SEEDS, Scenario::from_seed) else { return };
    // The scenarios must really be hostile, or the rules were kept for nothing.
    assert!(totals.lost.into_inner() > 500_000);
    assert!(totals.resumptions.into_inner() > 2_500);
}

#[test]
fn every_seed_keeps_every_rule_behind_racks() {
    let Some(totals) = play_all(SEEDS_WITH_RACKS, Scenario::with_racks_from_seed) else { return };
    let (lost, resumptions) = (totals.lost.into_inner(), totals.resumptions.into_inner());
    assert!(lost > 500_000, "{lost}");
    assert!(resumptions > 1_250, "{resumptions}");
}

#[test]
fn as_many_ranks_as_a_job_can_have_sum_exactly_behind_racks() {
    let racks = PLACES_MAX as usize;
    let tensor = |dtype, op, elements| TensorShape { dtype, op, pattern: Pattern::AllReduce, elements };
    let restart = Restart { at: Instant(0) + Duration::from_millis(40), down: Duration::from_millis(20) };
    for wire_dtype in [WireDtype::SharedExponent, WireDtype::Bfloat16, WireDtype::Int8, WireDtype::Int4] {
        let report = run(&Scenario {
            workers: RANKS_MAX as u16,
            slots: 4,
            window: 4,
            wire_dtype,
            tensors: vec![
                tensor(Dtype::Float32, Op::Average, 5000),
                tensor(Dtype::Float64, Op::Sum, 100),
                tensor(Dtype::Int8, Op::Sum, 700),
            ],
            pause: Duration::ZERO,
            loss: 0.01,
            duplication: 0.01,
            reordering: 0.01,
            crash: None,
            restarts: Vec::new(),
            racks: Racks {
                of_workers: (0..RANKS_MAX as usize).map(|rank| Some(rank / racks)).collect(),
                upstreams: vec![None; racks],
                restarts: vec![(7, restart)],
            },
            services: Services::default(),
            ..Scenario::from_seed(0)
        });
        assert!(report.lost > 500, "{report:?}");
    }
}

#[test]
fn every_seed_keeps_every_rule_where_services_die_and_others_take_over() {
    let Some(totals) = play_all(SEEDS_WITH_SERVICES, Scenario::with_services_from_seed) else { return };
    let (lost, killed) = (totals.lost.into_inner(), totals.killed.into_inner());
    let (taken_over, handed_back) = (totals.taken_over.into_inner(), totals.handed_back.into_inner());
    assert!(lost > 500_000, "{lost}");
    assert!(killed > 2_500, "{killed}");
    assert!(taken_over > 2_500, "{taken_over}");
    // Some had a sum that others lacked: it was in flight when the service died.
    assert!(handed_back > 2_500, "{handed_back}");
}

#[test]
fn every_seed_keeps_every_rule_where_shares_follow_from_wrong_rates() {
    let Some(totals) = play_all(SEEDS_WITH_WRONG_RATES, Scenario::with_wrong_rates_from_seed) else { return };
    let (lost, taken_over) = (totals.lost.into_inner(), totals.taken_over.into_inner());
    assert!(lost > 200_000, "{lost}");
    assert!(taken_over > 1_250, "{taken_over}");
    // Plans are lopsided: the services' parts of a job differ much, and some services get nothing.
    let parts = |seed: u64| {
        let Scenario { tensors, services, .. } = Scenario::with_wrong_rates_from_seed(seed);
        let of = |lane: usize| {
            tensors.iter().skip(lane).step_by(services.count).map(|part| part.elements).sum::<usize>()
        };
        let parts: Vec<usize> = (0..services.count).map(of).collect();
        (parts.iter().copied().min().unwrap_or(0), parts.into_iter().max().unwrap_or(0))
    };
    let of_all: Vec<_> = (0..1000).map(parts).collect();
    let lopsided = of_all.iter().filter(|(least, most)| *least > 0 && most > &(4 * least)).count();
    let without = of_all.iter().filter(|(least, most)| *least == 0 && *most > 2000).count();
    assert!(lopsided > 20 && without > 250, "{lopsided} {without}");
}

#[test]
fn the_same_seed_plays_the_same_way() {
    let worlds: [FromSeed; 4] = [
        Scenario::from_seed,
        Scenario::with_racks_from_seed,
        Scenario::with_services_from_seed,
        Scenario::with_wrong_rates_from_seed,
    ];
    for from_seed in worlds {
        for seed in 0..50 {
            assert_eq!(run(&from_seed(seed)), run(&from_seed(seed)), "seed {seed}");
        }
    }
    assert_ne!(run(&Scenario::from_seed(1)).digest, run(&Scenario::from_seed(2)).digest);
}
