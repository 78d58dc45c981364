//! Thousands of seeds, every checker on. `FANIN_SEED=n` replays one of them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fanin_protocol::Instant;
use fanin_sim::{Racks, Report, Restart, Scenario, Services, TensorShape, run};
use fanin_wire::{Dtype, Op, PLACES_MAX, Pattern, RANKS_MAX, WireDtype};

/// Seeds 0 to this; the same in CI and at the desk.
const SEEDS: u64 = 20_000;
/// The same, with racks before the switch.
const SEEDS_WITH_RACKS: u64 = 10_000;
/// The same, with services of which some die for good.
const SEEDS_WITH_SERVICES: u64 = 5_000;

type FromSeed = fn(u64) -> Scenario;

fn play(scenario: &Scenario) -> Report {
    run(scenario).unwrap_or_else(|violation| {
        let seed = scenario.seed;
        panic!(
            "seed {seed}: {violation:?}\nin {scenario:?}\n\
             replay: FANIN_SEED={seed} cargo test -p fanin-sim --test faults -- --nocapture\n"
        )
    })
}

/// The totals of all runs.
#[derive(Default)]
struct Totals {
    lost: AtomicU64,
    resumptions: AtomicU64,
    taken_over: AtomicU64,
    handed_back: AtomicU64,
    killed: AtomicU64,
}

/// Plays all seeds, and returns what they were like; none where the environment names a seed, which
/// is played alone.
fn play_all(seeds: u64, from_seed: FromSeed) -> Option<Totals> {
    if let Ok(seed) = std::env::var("FANIN_SEED") {
        let scenario = from_seed(seed.parse().expect("FANIN_SEED is a number"));
        println!("{scenario:#?}\n{:#?}", play(&scenario));
        return None;
    }
    let next = AtomicU64::new(0);
    let totals = Totals::default();
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds {
                        break;
                    }
                    let report = play(&from_seed(seed));
                    totals.lost.fetch_add(report.lost, Ordering::Relaxed);
                    totals.resumptions.fetch_add(report.resumptions, Ordering::Relaxed);
                    totals.taken_over.fetch_add(report.taken_over, Ordering::Relaxed);
                    totals.handed_back.fetch_add(report.handed_back, Ordering::Relaxed);
                    totals.killed.fetch_add(report.killed, Ordering::Relaxed);
                }
            });
        }
    });
    Some(totals)
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
    for wire_dtype in [WireDtype::SharedExponent, WireDtype::Bfloat16, WireDtype::Int8] {
        let report = play(&Scenario {
            workers: RANKS_MAX as u16,
            slots: 4,
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
fn the_same_seed_plays_the_same_way() {
    let worlds: [FromSeed; 3] =
        [Scenario::from_seed, Scenario::with_racks_from_seed, Scenario::with_services_from_seed];
    for from_seed in worlds {
        for seed in 0..50 {
            assert_eq!(play(&from_seed(seed)), play(&from_seed(seed)), "seed {seed}");
        }
    }
    assert_ne!(play(&Scenario::from_seed(1)).digest, play(&Scenario::from_seed(2)).digest);
}
