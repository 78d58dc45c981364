//! Thousands of seeds of jobs of every system in hostile networks, every checker on. `FANIN_SEED=n`
//! replays one of them.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use fanin_sim::workload::{Fault, Options, Report, RunError, Scenario, hostile, run, shrink};

/// Seeds 0 to this in `make test`; the same in CI and at the desk.
const FIRST_SEEDS: u64 = 5_000;
/// Seeds 0 to this in `make test-lab`.
const SEEDS: u64 = 25_000;
/// And from there to this in `make test-long`.
const LONG_SEEDS: u64 = 225_000;

/// Why a run is not as it should be.
fn fault(scenario: &Scenario, seed: u64) -> Result<Report, String> {
    let report = run(scenario, Options { seed, ..Options::default() }).map_err(|error| match error {
        RunError::Violation(violation, at) => format!("{violation} (at {at})"),
        error => error.to_string(),
    })?;
    let died = |index: usize| scenario.faults.iter().any(|plan| plan.fault == Fault::JobDies(index));
    // Connections wait ever longer where six links lose a tenth each: DLCP's flows alone must end.
    let mut of_dlcp = report.parameter_servers.iter().filter(|it| it.packets.is_some());
    if let Some(entry) = of_dlcp.find(|it| it.unopened + it.flow_times.unfinished > 0) {
        return Err(format!("{} flows to parameter servers have not ended", entry.flow_times.unfinished));
    }
    match report.jobs.iter().enumerate().find(|(index, job)| !job.finished && !died(*index)) {
        Some((_, job)) => Err(format!("{} has not finished", job.name)),
        None => Ok(report),
    }
}

fn play(seed: u64) -> Report {
    let scenario = hostile(seed);
    fault(&scenario, seed).unwrap_or_else(|message| {
        let small = shrink(&scenario, |scenario| fault(scenario, seed).is_err());
        let still = fault(&small, seed).err().unwrap_or_default();
        panic!(
            "seed {seed}: {message}\nshrunk, it says: {still}\nin {small:#?}\n\
             replay: FANIN_SEED={seed} cargo test -p fanin-sim --test hostile -- --nocapture\n"
        )
    })
}

#[test]
fn every_seed_keeps_every_rule() {
    if let Ok(seed) = std::env::var("FANIN_SEED") {
        let seed = seed.parse().expect("FANIN_SEED is a number");
        println!("{:#?}\n{:#?}", hostile(seed), play(seed));
        return;
    }
    play_all(0..FIRST_SEEDS);
}

#[test]
#[ignore = "a minute and a half: make test-lab"]
fn every_seed_of_a_campaign_keeps_every_rule() {
    campaign(0..SEEDS);
}

#[test]
#[ignore = "a quarter of an hour: make test-long"]
fn every_seed_of_a_long_campaign_keeps_every_rule() {
    campaign(SEEDS..LONG_SEEDS);
}

/// Plays all these seeds, on all cores; returns how often things went wrong on the way, and the packet-hops.
fn play_all(seeds: Range<u64>) -> [u64; 7] {
    let next = AtomicU64::new(seeds.start);
    let [lost, collisions, resent, overflows, stale, taken, hops] = [const { AtomicU64::new(0) }; 7];
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        break;
                    }
                    let report = play(seed);
                    let add = |sum: &AtomicU64, count| sum.fetch_add(count, Ordering::Relaxed);
                    add(&lost, report.drops.iter().map(|drop| drop.count).sum());
                    let jobs = || report.jobs.iter().map(|job| job.counters);
                    add(&collisions, jobs().filter_map(|job| job.switch_collisions).sum());
                    add(&resent, jobs().filter_map(|job| job.retransmissions).sum());
                    add(&overflows, jobs().filter_map(|job| job.overflows).sum());
                    add(&stale, report.switches.iter().filter_map(|switch| switch.freed_stale).sum());
                    add(&taken, jobs().filter_map(|job| job.take_overs).sum());
                    add(&hops, report.packet_hops);
                }
            });
        }
    });
    let counts = [lost, collisions, resent, overflows, stale, taken, hops].map(AtomicU64::into_inner);
    println!(
        "seeds {seeds:?}: lost, collisions, resent, overflows, freed stale, take-overs, packet-hops: {counts:?}"
    );
    counts
}

/// Plays all these seeds, 25,000 at least.
fn campaign(seeds: Range<u64>) {
    let counts = play_all(seeds.clone());
    // The scenarios must really be hostile, or the rules were kept for nothing: of 25,000 seeds.
    let least = [1_000_000, 1_000_000, 2_000_000, 50_000, 5_000, 500, 40_000_000];
    for (count, least) in counts.into_iter().zip(least) {
        assert!(count > least * (seeds.end - seeds.start) / 25_000, "{counts:?} beside {least:?}");
    }
}

/// Workers sent at the same times for ever, and a queue had room for the packets of the same ones
/// every time: SwitchML's at the cores of the root, the machines of one rank of an ATP job
/// (`ps-n-to-n`) at their parameter server, and all workers that a server asked for original
/// values, over and over.
#[test]
fn seeds_that_once_stood_still_go_on() {
    for seed in [76_514, 197_186, 200_132] {
        play(seed);
    }
}

#[test]
fn the_same_seed_plays_the_same_way() {
    for seed in 0..30 {
        assert_eq!(play(seed), play(seed), "seed {seed}");
    }
    assert_ne!(play(1).digest, play(2).digest);
}
