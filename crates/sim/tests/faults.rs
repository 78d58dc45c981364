//! Thousands of seeds, every checker on. `FANIN_SEED=n` replays one of them.

use std::sync::atomic::{AtomicU64, Ordering};

use fanin_sim::{Report, Scenario, run};

/// Seeds 0 to this; the same in CI and at the desk.
const SEEDS: u64 = 20_000;
/// The same, with racks before the switch.
const SEEDS_WITH_RACKS: u64 = 10_000;

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

/// Plays all seeds, or that of the environment. Returns how many packets were lost, and how often a job went on.
fn play_all(seeds: u64, from_seed: FromSeed) -> (u64, u64) {
    if let Ok(seed) = std::env::var("FANIN_SEED") {
        let scenario = from_seed(seed.parse().expect("FANIN_SEED is a number"));
        println!("{scenario:#?}\n{:#?}", play(&scenario));
        return (u64::MAX, u64::MAX);
    }
    let next = AtomicU64::new(0);
    let lost = AtomicU64::new(0);
    let resumptions = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds {
                        break;
                    }
                    let report = play(&from_seed(seed));
                    lost.fetch_add(report.lost, Ordering::Relaxed);
                    resumptions.fetch_add(report.resumptions, Ordering::Relaxed);
                }
            });
        }
    });
    (lost.into_inner(), resumptions.into_inner())
}

#[test]
fn every_seed_keeps_every_rule() {
    let (lost, resumptions) = play_all(SEEDS, Scenario::from_seed);
    // The scenarios must really be hostile, or the rules were kept for nothing.
    assert!(lost > 500_000);
    assert!(resumptions > 2_500);
}

#[test]
fn every_seed_keeps_every_rule_behind_racks() {
    let (lost, resumptions) = play_all(SEEDS_WITH_RACKS, Scenario::with_racks_from_seed);
    assert!(lost > 500_000, "{lost}");
    assert!(resumptions > 1_250, "{resumptions}");
}

#[test]
fn the_same_seed_plays_the_same_way() {
    for from_seed in [Scenario::from_seed as FromSeed, Scenario::with_racks_from_seed] {
        for seed in 0..50 {
            assert_eq!(play(&from_seed(seed)), play(&from_seed(seed)), "seed {seed}");
        }
    }
    assert_ne!(play(&Scenario::from_seed(1)).digest, play(&Scenario::from_seed(2)).digest);
}
