//! Thousands of seeds, every checker on. `FANIN_SEED=n` replays one of them.

use std::sync::atomic::{AtomicU64, Ordering};

use fanin_sim::{Report, Scenario, run};

/// Seeds 0 to this; the same in CI and at the desk.
const SEEDS: u64 = 20_000;

fn play(seed: u64) -> Report {
    let scenario = Scenario::from_seed(seed);
    run(&scenario).unwrap_or_else(|violation| {
        panic!(
            "seed {seed}: {violation:?}\nin {scenario:?}\n\
             replay: FANIN_SEED={seed} cargo test -p fanin-sim --test faults -- --nocapture\n"
        )
    })
}

#[test]
fn every_seed_keeps_every_rule() {
    if let Ok(seed) = std::env::var("FANIN_SEED") {
        let seed = seed.parse().expect("FANIN_SEED is a number");
        println!("{:#?}\n{:#?}", Scenario::from_seed(seed), play(seed));
        return;
    }
    let next = AtomicU64::new(0);
    let lost = AtomicU64::new(0);
    let resumptions = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= SEEDS {
                        break;
                    }
                    let report = play(seed);
                    lost.fetch_add(report.lost, Ordering::Relaxed);
                    resumptions.fetch_add(report.resumptions, Ordering::Relaxed);
                }
            });
        }
    });
    // The scenarios must really be hostile, or the rules were kept for nothing.
    assert!(lost.into_inner() > 500_000);
    assert!(resumptions.into_inner() > 2_500);
}

#[test]
fn the_same_seed_plays_the_same_way() {
    for seed in 0..50 {
        assert_eq!(play(seed), play(seed), "seed {seed}");
    }
    assert_ne!(play(1).digest, play(2).digest);
}
